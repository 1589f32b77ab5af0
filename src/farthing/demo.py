"""``make demo``: a private model of the embedded Adult data, trained until its budget is spent.

Nothing here is special: it is the code a user would write.
"""

import io
import tempfile
from pathlib import Path

import numpy as np

import farthing as ft
from farthing import verifier
from farthing.data import Dataset, load_adult
from farthing.estimators import CLASSIFIERS

BUDGET = ft.Budget(epsilon=1.0, delta=1e-5)
OTHERS = ("sgd-ma",)  # the classic: DP-SGD by the moments accountant, with its usual settings


def accuracy(model: ft.LogisticRegression, adult: Dataset) -> str:
    """On the test records, which the budget does not protect."""
    return f"{np.mean(model.predict(adult.X_test) == adult.y_test):.1%}"


def main() -> None:
    """Train, print what was spent, and let the independent verifier recompute it."""
    adult = load_adult()
    majority = max(np.mean(adult.y_test), 1 - np.mean(adult.y_test))
    print(f"Adult: {adult.split:,} records to learn from, {len(adult.y_test):,} to test on")
    print(f"Budget: {BUDGET}")
    with (
        tempfile.TemporaryDirectory() as folder,
        ft.Ledger(BUDGET, journal=Path(folder) / "a.ledger") as ledger,
    ):
        model = ft.LogisticRegression(bounds=(0, 1), ledger=ledger).fit(adult.X_train, adult.y_train)
        print(f"\nTrained in {model.n_iter_:,} steps, until the budget was spent")
        print(f"Test accuracy: {accuracy(model, adult)} (guessing: {majority:.1%})")
        print(f"Guarantee: {model.privacy_}")
        for name in OTHERS:
            if name in CLASSIFIERS:
                other = ft.LogisticRegression(BUDGET.epsilon, BUDGET.delta, bounds=(0, 1), solver=name)
                other.fit(adult.X_train, adult.y_train)
                print(f"For comparison, {name} with a budget of its own: {accuracy(other, adult)}")
        export = io.StringIO()
        ledger.journal.export(export)
        print("\nThe independent verifier, from the ledger's export alone:")
        print(verifier.verify(export.getvalue().splitlines()))


if __name__ == "__main__":
    main()
