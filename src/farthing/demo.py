"""``make demo``: a private model of the embedded Adult data, trained until its budget is spent.

Nothing here is special: it is the code a user would write, with a contribution of a few lines.
"""

import io
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import farthing as ft
from farthing import verifier
from farthing.data import load_adult
from farthing.plans import Accountant, Plan, curve

Array = NDArray[np.float64]

RATE, CLIP, NOISE, LEARNING_RATE = 0.02, 1.0, 4.0, 4.0


def gradient(rows: ft.Rows, w: Array) -> Array:
    """Gradients of the logistic loss, one row a record."""
    x, y = rows[0], rows[1]
    residual = 1 / (1 + np.exp(-x @ w)) - y
    result: Array = residual[:, None] * x
    return result


@ft.until_spent
def dpsgd(ledger: ft.Ledger, query: ft.Query, lot: float, w: Array) -> Iterator[ft.Step]:
    """Abadi et al. 2016, Algorithm 1, without the T: the budget ends it."""
    for t in itertools.count(1):
        answer = ledger.ask(query, w)
        w = w - LEARNING_RATE * answer.value / lot  # a public number, never the realised lot
        yield ft.Step(t, w, (answer.receipt,))


def main() -> None:
    """Train, print what was spent, and let the independent verifier recompute it."""
    adult = load_adult()
    x, x_test = (np.column_stack([part, np.ones(len(part))]) for part in (adult.X_train, adult.X_test))
    budget = ft.Budget(1.0, 1e-5)
    query = ft.Query(ft.Poisson(RATE), ft.PerExample(gradient), ft.ClipNorm(CLIP), ft.Gaussian(NOISE))
    print(f"Adult: {len(x):,} records to learn from, {len(x_test):,} to test on, {x.shape[1]} weights")
    print(f"Budget: {budget}")
    with (
        tempfile.TemporaryDirectory() as folder,
        ft.Ledger(budget, journal=Path(folder) / "a.ledger") as ledger,
    ):
        countdown = ledger.promise(query)
        print(f"One lot of {RATE:.0%} with noise {NOISE:g}: the budget allows {countdown.times:,} of them")
        run = ft.run(
            dpsgd(ledger.over(ft.Rows(x, adult.y_train)), query, RATE * len(x), np.zeros(x.shape[1]))
        )
        accuracy = np.mean((x_test @ run.w > 0) == adult.y_test)
        majority = max(np.mean(adult.y_test), 1 - np.mean(adult.y_test))
        print(f"Trained {run.steps:,} steps; test accuracy {accuracy:.1%} (guessing: {majority:.1%})")
        print(f"Guarantee: {ledger.guarantee}")
        plan = Plan(NOISE, RATE, run.steps)
        told = {
            name: curve(plan, name).epsilon(budget.delta) for name in (Accountant.RDP, Accountant.MOMENTS)
        }
        print("The same steps by", ", ".join(f"{name}: epsilon {value:.3f}" for name, value in told.items()))
        export = io.StringIO()
        ledger.journal.export(export)
        print("\nThe independent verifier, from the ledger's export alone:")
        print(verifier.verify(export.getvalue().splitlines()))


if __name__ == "__main__":
    main()
