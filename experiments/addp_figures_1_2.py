"""A-DDP, Figures 1 and 2: accuracy and objective against ε, and what tight accounting adds.

Cheng, Liu, Wang & Lu 2020, "Adaptive Distributed Differential Privacy with SGD", Figures 1 and 2: logistic
regression on Adult (a9a's 123 binary features), BANK and IPUMS-BR, 100 records a user, δ = 1e-8, clip 3, T =
10 for private methods; means over 5 folds. The budget is each user's, for one record. Rows are shuffled with
a fixed seed and dealt out to users in that order. The objective is the mean logistic loss of the records that
were learnt from (`federated-descent` learns from rows shrunk to norm 1, so its margins are divided by their
norms). Nothing is tuned: every rate follows from public numbers (`farthing.federated.methods.addp`), so that
no figure is the best of several. The paper does not give its rates.

The first rows are the paper's comparison. The others spend the same budgets of the same users by tight
accounting; with the whole local gradient in place of one record; and with each user adding a share of the
noise, if only sums are seen. Only the last changes whom a user trusts. The row with a ✗ is Algorithm 1 as
printed, one record and noise for C, outside of any ledger: `experiments.published_addp` shows what it really
guarantees.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.datasets import Array, classification, folds
from experiments.frame import (
    PLOT,
    Grid,
    Row,
    Size,
    canvas,
    legend,
    level,
    line,
    mean,
    say,
    stream,
    ticks,
    values,
)
from experiments.published_addp import published, really
from farthing.budget import Adjacency, Budget
from farthing.data.tables import Table
from farthing.federated.methods.addp import addp, non_private, sgd_adv, sgd_maj, sgd_pass
from farthing.federated.methods.federated_descent import federated_descent, learnt_in
from farthing.federated.protocol import Accountant, Trust, Weights
from farthing.federated.simulated import Simulated
from farthing.linear.losses import logistic
from farthing.linear.problem import Problem
from farthing.queries.query import run
from farthing.queries.samplers import Everyone, Poisson

Learnt = tuple[Array, Array, tuple[Array, Array]]  # X, y, and what is tested on

EPSILONS = (0.1, 0.4, 0.8, 1.6)
DELTA, CLIP, EACH, PLANNED, MORE = 1e-8, 3.0, 100, 10, 1000
FOLDS = 5
PRINTED = "A-DDP as printed (one record, C) ✗"
TIGHT = Accountant.TIGHT

# Name: (adjacency of the budget, steps over clients).
PAPER = {
    "A-DDP, one record (2C)": (Adjacency.ADD_REMOVE, lambda c, p: addp(c, p, weights=Weights.PLAIN)),
    "A-DDP, Poisson 1/100 (C)": (
        Adjacency.ADD_REMOVE,
        lambda c, p: addp(c, p, draw=Poisson(1 / EACH), weights=Weights.PLAIN),
    ),
    "SGD-Adv": (Adjacency.ADD_REMOVE, lambda c, p: sgd_adv(c, p, clip_norm=CLIP, rounds=PLANNED)),
    "SGD-Pass": (Adjacency.ZERO_OUT, lambda c, p: sgd_pass(c, p, clip_norm=CLIP, rounds=PLANNED)),
    "SGD-Maj": (Adjacency.ADD_REMOVE, lambda c, p: sgd_maj(c, p, clip_norm=CLIP, rounds=PLANNED)),
}
BETTER = {
    "one record, tight": (
        Adjacency.ADD_REMOVE,
        lambda c, p: addp(c, p, rounds=MORE, calibration=TIGHT, accountant=TIGHT),
    ),
    "ten records, tight": (
        Adjacency.ADD_REMOVE,
        lambda c, p: addp(c, p, draw=Poisson(10 / EACH), rounds=MORE, calibration=TIGHT, accountant=TIGHT),
    ),
    "whole gradient, tight": (
        Adjacency.ADD_REMOVE,
        lambda c, p: addp(c, p, draw=Everyone(), rounds=100, calibration=TIGHT, accountant=TIGHT),
    ),
    "together, local noise": (Adjacency.ADD_REMOVE, lambda c, p: federated_descent(c, p)),
    "together, distributed": (
        Adjacency.ADD_REMOVE,
        lambda c, p: federated_descent(c, p, trust=Trust.DISTRIBUTED),
    ),
}
PRIVATE = PAPER | BETTER
SHRUNK = {  # learn from a row and its constant, shrunk to norm 1
    "together, local noise": Trust.LOCAL,
    "together, distributed": Trust.DISTRIBUTED,
}
NON_PRIVATE, MAJORITY = "non-private", "majority"


LEVELS = (NON_PRIVATE, MAJORITY)
CROSS = "✗ its claim does not hold: noise for C, where replacing a record moves an upload by 2C (last table)."


def judged(w: Any, X: Array, y: Array, tested: tuple[Array, Array], shrunk: float = 0.0) -> Row:
    """Accuracy on the test rows in percent, and the objective on those learnt from."""
    u, constant = w
    accuracy = 100 * float(np.mean((tested[0] @ u + constant > 0) == tested[1]))
    margins = X @ u + constant
    if shrunk:
        margins = margins / np.sqrt(shrunk**2 + np.einsum("ij,ij->i", X, X, dtype=np.float64))
    return {"accuracy": accuracy, "objective": float(np.mean(logistic.value(margins, y)))}


def levels(X: Array, y: Array, tested: tuple[Array, Array], problem: Problem) -> list[Row]:
    """What does not depend on a budget: gradient descent on all records, and the most frequent label."""
    trained = run(non_private(Table(X, y), problem))
    share = float(np.mean(y))
    entropy = -share * np.log(share) - (1 - share) * np.log(1 - share)
    guess = 100 * float(np.mean(tested[1] == (share > 0.5)))
    return [
        {"method": NON_PRIVATE, **judged(trained.w, X, y, tested), "rounds": trained.steps},
        {"method": MAJORITY, "accuracy": guess, "objective": float(entropy), "rounds": 0},
    ]


def cell(name: str, fold: int, data: Learnt, method: str, epsilons: Sequence[float]) -> list[Row]:
    """What one method comes to on one fold, at each ε."""
    X, y, tested = data
    problem = Problem(logistic, len(y), X.shape[1], unit=False)
    if method == PRINTED:
        printed = published(X, y, epsilons, DELTA, (name, fold))
        return [
            {"method": method, "ε": epsilon, **judged((u, constant), X, y, tested), "rounds": rounds}
            for epsilon, (u, constant, rounds) in zip(epsilons, printed, strict=True)
        ]
    adjacency, algorithm = PRIVATE[method]
    found = []
    for epsilon in epsilons:
        budget, noise = Budget(epsilon, DELTA, adjacency), stream(name, fold, method, epsilon)
        clients = Simulated.split(X, y, records=EACH, budgets=budget, stream=noise)
        trained = run(algorithm(clients, problem))
        trust = SHRUNK.get(method)
        shrunk = learnt_in(clients, problem, trust=trust).intercept if trust else 0.0
        result = judged(trained.w, X, y, tested, shrunk)
        found.append({"method": method, "ε": epsilon, **result, "rounds": trained.steps})
    return found


def measure(size: Size) -> list[Row]:
    rows, epsilons = [], (1.6,) if size.small else EPSILONS
    for name, (X, y) in classification(size.small).items():
        for fold, learnt, test in folds(len(y), size, FOLDS):
            data = X[learnt], y[learnt], (X[test], y[test])
            found = levels(*data, Problem(logistic, len(learnt), X.shape[1], unit=False))
            for method in (*PRIVATE, PRINTED):
                found += cell(name, fold, data, method, epsilons)
            rows += [{"data": name, "fold": fold, **row} for row in found]
            say(f"{name}: fold {fold + 1} done")
    return rows


def tables(rows: list[Row]) -> list[Grid]:
    epsilons, grids = values(rows, "ε"), []
    for data in values(rows, "data"):
        for measured, form in (("accuracy", ".1f"), ("objective", ".3f")):
            cells = []
            for method in (PRINTED, *PRIVATE, *LEVELS):
                wheres = [{}] if method in LEVELS else [{"ε": epsilon} for epsilon in epsilons]
                found = [mean(rows, measured, data=data, method=method, **where) for where in wheres]
                rounds = max(mean(rows, "rounds", data=data, method=method, **where) for where in wheres)
                numbers = [f"{value:{form}}" for value in found] * (len(epsilons) // len(found))
                said = PLOT if method in (PRINTED, *PAPER, NON_PRIVATE) else "not in it"
                cells.append([_label(method), *numbers, f"{rounds:,.0f}", said])
            used = len(values([row for row in rows if row["data"] == data], "fold"))
            caption = f"{data}: {measured}{' in percent' if measured == 'accuracy' else ''} (folds: {used})"
            head = ["", *(f"ε {epsilon:g}" for epsilon in epsilons), "rounds", "published"]
            grids.append(Grid(caption, head, cells, CROSS))
    return [*grids, claims(epsilons)]


def _label(method: str) -> str:
    """Return the name under which readers know a method; seeds and rows keep the older one."""
    return method.replace("together", "federated-descent")


def claims(epsilons: list[float]) -> Grid:
    """What A-DDP as printed costs, beside what it claims."""
    seen, secret = zip(*(really(epsilon, DELTA) for epsilon in epsilons), strict=True)
    cells = [
        ["claimed", *(f"{epsilon:g}" for epsilon in epsilons)],
        ["against an observer of the draws (Theorem 1 with H = 2C, exact)", *(f"{one:.3f}" for one in seen)],
        ["where the draws stay secret (tight)", *(f"{one:.4f}" for one in secret)],
    ]
    head = ["ε at δ = 1e-8, a record replaced", *(f"ε {epsilon:g}" for epsilon in epsilons)]
    return Grid(PRINTED, head, cells)


def draw(rows: list[Row]) -> Any:
    data, epsilons = values(rows, "data"), values(rows, "ε")
    figure, grid = canvas(2, len(data), 3.6, 2.9)
    for column, name in zip(grid.T, data, strict=True):
        for axes, measured in zip(column, ("accuracy", "objective"), strict=True):
            for place, method in enumerate((*SHOWN, PRINTED)):
                heights = [mean(rows, measured, data=name, method=method, ε=epsilon) for epsilon in epsilons]
                line(axes, epsilons, heights, place, _label(method), dashed=method in (PRINTED, *PAPER))
            best, guess = (mean(rows, measured, data=name, method=method) for method in LEVELS)
            level(axes, best, NON_PRIVATE)
            level(axes, guess, MAJORITY, "#888888")
            ticks(axes, epsilons)
            if measured == "objective":
                axes.set_ylim(best * 0.9, 0.8)
                axes.set_xlabel("ε of each user")
            else:
                axes.set_title(name)
        grid[0, 0].set_ylabel("accuracy, %")
        grid[1, 0].set_ylabel("objective")
    legend(figure, grid[0, 0], 5)
    return figure


# "ten records, tight" and "whole gradient, tight" lie between their neighbours.
SHOWN = tuple(method for method in PRIVATE if method not in ("ten records, tight", "whole gradient, tight"))
