"""``make demo``: private models of the embedded Adult data, trained until their budget is spent; a report.

It trains the default and two other methods at ε = 1 and a few other values, simulates 488 clients that train
together and keep their records, and runs an audit. All files go into the folder ``farthing-demo``; a second
run replaces them. Nothing is opened, nothing is fetched.
"""

import io
import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from farthing.audit import methods
from farthing.budget import Adjacency, Budget, Guarantee, Unit
from farthing.cli import outputs
from farthing.data.adult import Dataset, load_adult
from farthing.data.model_file import Model, write
from farthing.data.tables import Features, Table
from farthing.federated.jobs import budget_groups
from farthing.federated.methods.addp import addp
from farthing.federated.protocol import Accountant
from farthing.federated.simulated import Simulated, personal
from farthing.ledger import verifier
from farthing.ledger.ledger import Ledger
from farthing.linear.losses import logistic
from farthing.linear.methods.baselines import nonprivate
from farthing.linear.problem import Problem
from farthing.linear.solvers import CLASSIFIERS
from farthing.queries.query import Step
from farthing.queries.samplers import Poisson
from farthing.report.document import page
from farthing.report.statement import downwards
from farthing.report.subject import ClientGroup, Declared, FederatedRun, Score, Subject

FOLDER = "farthing-demo"
EPSILON, DELTA = 1.0, 1e-5
METHODS = {"auto": "auto, the default", "dpagd": "DP-AGD", "sgd-ma": "DP-SGD"}
EPSILONS = (0.1, 0.3, EPSILON, 3.0)  # at which methods are compared
ATTACKED, EFFORT = ("descent", "dpagd", "dpsgd"), 0.3  # the same methods, as the audit calls them
CLIENTS, RECORDS = 488, 66  # of each
THEIRS, ROUNDS, NOISE, RATE = (0.25, 0.5, 1.0), 1500, 16.0, 0.1  # budgets in turn; noise over the clip

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Trained:
    """A model, how it was reached, and what holds of it."""

    history: tuple[Step, ...]
    guarantee: Guarantee
    seconds: float
    accuracy: float

    @property
    def weights(self) -> tuple[Array, Array]:
        u, constant = self.history[-1].w
        return np.atleast_2d(u.T), np.atleast_1d(constant)


def main() -> None:
    """Train, and print the results and the path of the report."""
    began, adult, folder = time.perf_counter(), load_adult(), place()
    guessing = float(max(np.mean(adult.y_test), 1 - np.mean(adult.y_test)))
    print(f"Adult: {adult.split:,} records to learn from, {len(adult.y_test):,} to test on.")
    print(f"Budget: {Budget(EPSILON, DELTA)}\n", flush=True)
    with Ledger(Budget(EPSILON, DELTA), journal=folder / "adult.ledger") as ledger:
        first = trained("auto", ledger, adult)
        scores = compared(adult, first)
        without = accuracy(nonprivate(table(adult), problem(adult)), adult)
        scores.append(Score(label="without privacy", epsilon=None, value=without))
        scores.append(Score(label="guessing", epsilon=None, value=guessing))
        federated = simulated(adult)
        label = f"A-DDP, {CLIENTS} clients of ε up to {max(THEIRS):g}"
        scores.append(Score(label=label, epsilon=max(THEIRS), value=federated.value or 0.0))
        told(scores)
        found = [finding for name in ATTACKED for finding in methods.attack(name, scale=EFFORT)]
        worst = max(found, key=lambda one: one[1].eps_lower / one[1].claim.epsilon)[1]
        broken = sum(verdict.broken for _, verdict in found)
        print(f"\nAudit: {len(found)} attacks on these methods, of which {broken} broke a claim.")
        low = downwards(worst.eps_lower)
        print(f"The strongest shows ε of at least {low}, where {worst.claim.epsilon:g} is claimed.")
        others = len(METHODS) * len(EPSILONS) - 1
        subject = Subject.of(
            ledger,
            title="Income in the Adult data",
            method="auto",
            steps=first.history[-1].t,
            guarantee=first.guarantee,
            history=first.history,
            records=adult.split,
            features=adult.X.shape[1],
            scores=scores,
            released=(
                f"Accuracy on {len(adult.y_test):,} test records, of every model: computed without noise.",
                f"{others} further models, one of federated clients and one without privacy, for comparison: "
                "each cost a budget of its own, which this ε does not count. The Adult data is public.",
            ),
            tuning="Not included: the methods' settings were chosen on this table and others, as public data",
            federated=federated,
            audit=found,
            verified=checked(ledger),
        )
        files = written(folder, adult, subject, first)
    print(f"\nIn {time.perf_counter() - began:.0f} seconds. Open the report in a browser:")
    print(f"  {files[0].resolve()}")
    print(f"Beside it: {', '.join(file.name for file in files[1:])}, adult.ledger")


def place() -> Path:
    """Return the folder for the files, emptied of earlier runs; a temporary one if it cannot be made."""
    folder = Path(FOLDER)
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        for name in ("report.html", "model.npz", "privacy.json"):
            (folder / name).unlink(missing_ok=True)
        for end in ("", ".head", "-wal", "-shm"):
            (folder / f"adult.ledger{end}").unlink(missing_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix=f"{FOLDER}-"))
    return folder


def table(adult: Dataset) -> Table:
    """Return the private records, whose features lie in [0, 1] by the public schema."""
    return Table(adult.X_train, adult.y_train.astype(np.float64), bounds=(0, 1))


def problem(adult: Dataset, records: int | None = None) -> Problem:
    """Return the public problem."""
    return Problem(logistic, adult.split if records is None else records, adult.X.shape[1], unit=False)


def trained(method: str, ledger: Ledger, adult: Dataset) -> Trained:
    """Train by a method until the ledger's budget is spent."""
    began = time.perf_counter()
    history = tuple(CLASSIFIERS[method].algorithm(ledger.over(table(adult)), problem(adult)))
    said = replace(ledger.guarantee, note="the number of records is taken as public")
    return Trained(history, said, time.perf_counter() - began, accuracy(history[-1], adult))


def accuracy(step: Step, adult: Dataset) -> float:
    """Return the accuracy on the test records, which the budget does not protect."""
    u, constant = step.w
    return float(np.mean((adult.X_test @ u + constant > 0) == adult.y_test))


def compared(adult: Dataset, first: Trained) -> list[Score]:
    """Train by each method at each ε, on a new ledger each time; ``first`` is the default's run at ε = 1."""
    scores = []
    print(f"{'method':34}{'steps':>7}{'seconds':>9}{'accuracy':>10}   guarantee")
    for method, name in METHODS.items():
        for epsilon in EPSILONS:
            if (method, epsilon) == ("auto", EPSILON):
                run = first
            else:
                ledger = Ledger(Budget(epsilon, DELTA), filter=CLASSIFIERS[method].filter)
                run = trained(method, ledger, adult)
            scores.append(Score(label=name, epsilon=epsilon, value=run.accuracy))
            if epsilon == EPSILON:
                said = (
                    f"ε {run.guarantee.epsilon:.4g}, δ {run.guarantee.delta:g}, by {run.guarantee.accountant}"
                )
                figures = f"{run.history[-1].t:7,}{run.seconds:9.1f}{run.accuracy:10.1%}"
                print(f"{name:34}{figures}   {said}", flush=True)
    return scores


def simulated(adult: Dataset) -> FederatedRun:
    """Run A-DDP: clients keep their records, add noise, and leave when the next round does not fit."""
    began, n = time.perf_counter(), CLIENTS * RECORDS
    budgets = personal(np.resize(np.array(THEIRS), CLIENTS), DELTA, Adjacency.ADD_REMOVE, Unit.RECORD)
    rows = Table(adult.X_train[:n], adult.y_train[:n].astype(np.float64))
    clients, public = Simulated.split(rows, clients=CLIENTS, budgets=budgets), problem(adult, n)
    last = None
    for last in addp(
        clients, public, draw=Poisson(RATE), noise_multiplier=NOISE, accountant=Accountant.TIGHT
    ):
        if last.t == ROUNDS:
            break
    assert last is not None
    sure = public.probabilities(last.w, adult.X_test, clip_norm=3.0, features=Features(public.width))
    value = float(np.mean((sure > 0.5) == adult.y_test))
    largest = int(np.argmax([budget.epsilon for budget in budgets]))
    said = clients.guarantee(largest)
    name, seconds = f"A-DDP, {CLIENTS} clients with {RECORDS} records", time.perf_counter() - began
    budget = f"ε {', '.join(f'{epsilon:g}' for epsilon in THEIRS)} in turn, against the {said.observer}"
    print(f"{name:34}{last.t:7,}{seconds:9.1f}{value:10.1%}   {budget}", flush=True)
    groups = tuple(ClientGroup(**group) for group in budget_groups(clients))
    return FederatedRun(
        method="A-DDP", guarantee=said, trust="local", rounds=last.t, groups=groups, value=value
    )


def told(scores: Sequence[Score]) -> None:
    """Print the baselines, and every method at every ε."""
    for score in scores:
        if score.epsilon is None:
            print(f"{score.label:34}{'':16}{score.value:10.1%}   {'none' if score.label[0] == 'w' else ''}")
    print(f"\n{'Accuracy at ε =':34}" + "".join(f"{epsilon:10g}" for epsilon in EPSILONS))
    for name in METHODS.values():
        values = [score.value for score in scores if score.label == name]
        print(f"{name:34}" + "".join(f"{value:10.1%}" for value in values))


def written(folder: Path, adult: Dataset, subject: Subject, first: Trained) -> list[Path]:
    """Write the report, the model and its guarantee as `farthing train` does."""
    told = {
        **outputs.stamped(first.guarantee),
        "method": "auto",
        "steps": first.history[-1].t,
        "records": adult.split,
        "features": adult.X.shape[1],
        "public": outputs.declared(adult.schema, adult.schema),
    }
    model = Model(adult.schema, *first.weights).to_bytes(json.dumps(told, allow_nan=False))
    files = [folder / name for name in ("report.html", "model.npz", "privacy.json")]
    told |= {"model": str(files[1]), "sha256": {"model": outputs.sha256(model)}}
    subject = replace(subject, declared=Declared.of(told["public"], told))
    privacy = json.dumps(told, allow_nan=False, indent=1) + "\n"
    contents = page(subject).encode(), model, privacy.encode()
    for file, content in zip(files, contents, strict=True):
        write(file, content)
    return files


def checked(ledger: Ledger) -> str:
    """Return the independent verifier's finding in the ledger's export alone."""
    export = io.StringIO()
    ledger.journal.export(export)
    found = verifier.verify(export.getvalue().splitlines())
    low, high = found.spent or (0.0, 0.0)
    said = f"An independent verifier recomputed the cost from its rows: ε between {low:.5f} and {high:.5f}"
    print(f"The ledger has {found.rows} rows.\n{said};\n{found.reason}.")
    return f"{said}; {found.reason}."


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
