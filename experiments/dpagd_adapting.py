"""DP-AGD: the gain from buying a gradient again, in the library's version.

Lee & Kifer 2018 raise the price of gradients where no step along one helps (γ; Algorithm 2, lines 15-19). It
is compared with a version that never does so and takes a fresh gradient at the old price instead: logistic
regression, δ = 1e-8, add-remove. The versions were chosen on Adult alone. Tables of more than 100,000 records
have one fold.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from experiments.datasets import CENSUS, FILES, classification, folds
from experiments.dpagd_comparison import DELTA, judged
from experiments.frame import Grid, Row, Size, canvas, legend, line, mean, say, stream, values
from farthing.accounting.filters import ZcdpFilter
from farthing.budget import Budget
from farthing.data.tables import Table
from farthing.ledger.ledger import Ledger
from farthing.linear.losses import logistic
from farthing.linear.methods.dpagd import Ray, dpagd
from farthing.linear.problem import Problem
from farthing.queries.query import Answer, Query, run

NEVER, DEFAULT = "never again", "γ = 0.1, the default"
VERSIONS: dict[str, dict[str, Any]] = {
    NEVER: {"growth": None},
    DEFAULT: {},
    "γ = 1": {"growth": 1.0},
    "40 splits, never again": {"splits": 40.0, "growth": None},
    "40 splits, γ = 0.5": {"splits": 40.0, "growth": 0.5},
}
EPSILONS, FOLDS, MANY = (0.1, 0.8), 5, 100_000


class Counted:
    """A ledger that counts gradients asked for at a place where one was asked for before."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self.budget, self._last, self.gradients, self.again = ledger, ledger.budget, None, 0, 0

    def ask(self, query: Query, w: Any = None) -> Answer:
        if w is not None and not isinstance(w, Ray):
            self.gradients += 1
            self.again += w is self._last
            self._last = w
        return self._ledger.ask(query, w)


def measure(size: Size) -> list[Row]:
    rows = []
    for data, (X, y) in classification(size.small, (*FILES, CENSUS)).items():
        for fold, learnt, test in folds(len(y), size, 1 if len(y) > MANY else FOLDS):
            Xf, yf, tested = X[learnt].astype(np.float32), y[learnt], (X[test], y[test])
            problem = Problem(logistic, len(yf), X.shape[1], unit=False)
            for epsilon in EPSILONS[1:] if size.small else EPSILONS:
                for version, options in VERSIONS.items():
                    noise = stream("adapting", data, fold, epsilon)  # the same for all versions
                    ledger = Ledger(Budget(epsilon, DELTA), filter=ZcdpFilter, stream=noise)
                    door: Any = Counted(ledger.over(Table(Xf, yf)))
                    w = run(dpagd(door, problem, **options)).w
                    where = {"data": data, "fold": fold, "ε": epsilon, "version": version}
                    counts = {"gradients": door.gradients, "again": door.again}
                    rows.append({**where, **judged(w, Xf, yf, tested, logistic, True), **counts})
            say(f"{data}: fold {fold + 1} done")
    return rows


def places(rows: list[Row]) -> Iterator[tuple[str, float]]:
    return ((data, epsilon) for data in values(rows, "data") for epsilon in values(rows, "ε"))


def tables(rows: list[Row]) -> list[Grid]:
    grids = []
    head = ["", *(f"{data}, ε {epsilon:g}" for data, epsilon in places(rows))]
    for measured, form in (("accuracy", ".2f"), ("objective", ".4f"), ("gradients", ".1f"), ("again", ".1f")):
        cells = []
        for version in values(rows, "version"):
            found = [mean(rows, measured, version=version, data=data, ε=e) for data, e in places(rows)]
            cells.append([version, *(f"{value:{form}}" for value in found)])
        grids.append(Grid(f"{measured}, mean of folds", head, cells))
    return grids


def draw(rows: list[Row]) -> Any:
    figure, grid = canvas(1, len(values(rows, "ε")), 5.0, 3.1)
    data = values(rows, "data")
    for axes, epsilon in zip(grid[0], values(rows, "ε"), strict=True):
        for place, version in enumerate(values(rows, "version")):
            gains = [
                mean(rows, "accuracy", version=version, data=name, ε=epsilon)
                - mean(rows, "accuracy", version=NEVER, data=name, ε=epsilon)
                for name in data
            ]
            line(axes, range(len(data)), gains, place, version)
        axes.set_xticks(range(len(data)), data, rotation=20)
        axes.set_title(f"ε = {epsilon:g}")
    grid[0, 0].set_ylabel("accuracy gained over\nnever buying again, points")
    legend(figure, grid[0, 0], 3)
    return figure
