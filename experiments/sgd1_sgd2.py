"""SGD1 and SGD2: the write-up's claims, the guarantees that hold, by observer, and the noise needed.

"Multi-party DP Write-up 2: Stochastic Gradient Descent" is theory: it measures nothing. Its two claims of
privacy and its two theorems on utility (`experiments.excess_risk`) can still be checked.

SGD1 is said to be (ε, δ)-private with σ = 4 L n ln(1.25 n²/δ) / ε after n² iterations. Tight accounting
(`farthing.federated.methods.sgd1`) at ε = 0.5 and δ = 1/(2 n³), when a record is replaced, gives a far better
guarantee than claimed against an observer of the noisy gradients only, and from some n on a worse one against
a coordinator who drew the sequence, as in the write-up. The proof's own parts give (ε, δ + δ^(1/3)).

SGD2 states σ in its proof only: every round (ε/√(T ln 1/δ), δ/T)-private. T rounds of Gaussian noise are one
Gaussian answer exactly, so the least noise is known; the third table shows the effect of the difference:
accuracy on Adult with ten parties and T = 100 rounds, with both noises at the same claim.
"""

import math
from typing import Any

import numpy as np

from experiments import excess_risk
from experiments.datasets import classification, folds
from experiments.frame import Grid, Row, Size, canvas, level, line, say, stream, ticks, values
from farthing.accounting import gaussian
from farthing.budget import Budget
from farthing.federated.methods.sgd1 import sgd1_guarantees, sgd1_noise
from farthing.federated.methods.sgd2 import sgd2, sgd2_noise, sgd2_published_noise
from farthing.federated.simulated import Simulated
from farthing.linear.losses import logistic
from farthing.linear.problem import Problem
from farthing.queries.query import run

CLAIMED = 0.5
RECORDS = (25, 50, 100, 132, 200, 400, 1000)
SGD2_ROUNDS, SGD2_DELTA, PARTIES = 100, 1e-6, 10
EPSILONS = (0.05, 0.1, 0.2, 0.4, 0.8)
RECIPE, EXACT, MAJORITY = "noise of the proof", "least noise", "majority"


def first(n: int) -> list[Row]:
    """What SGD1 gives a record of one of two equal parties, by who looks."""
    delta = 1 / (2 * n**3)
    noise = sgd1_noise(n, 1.0, CLAIMED, delta) / n
    said = sgd1_guarantees([n // 2, n - n // 2], noise, delta)
    return [
        {"claim": "SGD1", "n": n, "observer": str(one.observer), "claimed": CLAIMED, "ε": one.epsilon}
        for one in said
    ]


def second(epsilon: float, rounds: int) -> list[Row]:
    """σ/Δ of SGD2 both ways, and the ε that it really has."""
    found = []
    for method in (RECIPE, EXACT):
        if method == RECIPE:
            noise = sgd2_published_noise(Budget(epsilon, SGD2_DELTA), rounds)
        else:
            noise = sgd2_noise(Budget(epsilon, SGD2_DELTA), rounds)
        true = gaussian.epsilon(math.sqrt(rounds) / noise, SGD2_DELTA)
        found.append(
            {"claim": "SGD2", "T": rounds, "claimed": epsilon, "method": method, "σ": noise, "ε": true}
        )
    return found


def third(size: Size) -> list[Row]:
    """Accuracy on Adult, in percent."""
    X, y = next(iter(classification(size.small).values()))
    rows = []
    for fold, learnt, test in folds(len(y), size, 3):
        problem = Problem(logistic, len(learnt), X.shape[1], unit=False)
        likelier = float(np.mean(y[learnt]) > 0.5)
        guess = 100 * float(np.mean(y[test] == likelier))
        rows.append({"claim": "accuracy", "method": MAJORITY, "fold": fold, "accuracy": guess})
        for epsilon in EPSILONS[1::2] if size.small else EPSILONS:
            for method in (RECIPE, EXACT):
                clients = Simulated.split(
                    X[learnt],
                    y[learnt],
                    records=math.ceil(len(learnt) / PARTIES),
                    budgets=Budget(epsilon, SGD2_DELTA),
                    stream=stream(fold, epsilon, method),
                )
                budget = Budget(epsilon, SGD2_DELTA)
                noise = sgd2_published_noise(budget, SGD2_ROUNDS) if method == RECIPE else None
                steps = sgd2(clients, problem, rounds=SGD2_ROUNDS, noise_multiplier=noise)
                u, constant = run(step for _, step in zip(range(SGD2_ROUNDS), steps, strict=False)).w
                accuracy = 100 * float(np.mean((X[test] @ u + constant > 0) == y[test]))
                where = {"claim": "accuracy", "method": method, "fold": fold, "claimed": epsilon}
                rows.append({**where, "accuracy": accuracy})
        say(f"SGD2: fold {fold + 1} done")
    return rows


def measure(size: Size) -> list[Row]:
    rows = [row for n in ((25, 50, 200) if size.small else RECORDS) for row in first(n)]
    rows += [row for T in (10, 100, 1000) for epsilon in (0.1, 1.0) for row in second(epsilon, T)]
    return [*rows, *third(size), *excess_risk.measured(size)]


def accuracy(rows: list[Row], method: str, epsilon: float | None = None) -> float:
    found = [
        row["accuracy"]
        for row in rows
        if (row["claim"], row.get("method"), row.get("claimed")) == ("accuracy", method, epsilon)
    ]
    return float(np.mean(found))


def tables(rows: list[Row]) -> list[Grid]:
    one = [row for row in rows if row["claim"] == "SGD1"]
    sizes = values(one, "n")
    cells = [["claimed, against anyone", *[f"{CLAIMED:g}"] * len(sizes)]]
    for observer in values(one, "observer"):
        cells.append([observer, *(f"{row['ε']:.4f}" for row in one if row["observer"] == observer)])
    grids = [Grid("SGD1: ε at δ = 1/(2n³), two parties", ["n", *map(str, sizes)], cells)]
    two = [row for row in rows if row["claim"] == "SGD2"]
    cells = [
        [f"{row['T']:g}", f"{row['claimed']:g}", row["method"], f"{row['σ']:.2f}", f"{row['ε']:.4f}"]
        for row in two
    ]
    head = ["T", "ε claimed", "", "σ/Δ", "ε that holds"]
    grids.append(Grid(f"SGD2: noise, δ = {SGD2_DELTA:g}", head, cells))
    three = [row for row in rows if row["claim"] == "accuracy"]
    epsilons = values(three, "claimed")
    cells = [[m, *(f"{accuracy(rows, m, epsilon):.1f}" for epsilon in epsilons)] for m in (RECIPE, EXACT)]
    cells.append([MAJORITY, *[f"{accuracy(rows, MAJORITY):.1f}"] * len(epsilons)])
    head = ["ε claimed", *(f"{epsilon:g}" for epsilon in epsilons)]
    grids.append(Grid("SGD2 on Adult, ten parties: accuracy in percent", head, cells))
    return [*grids, excess_risk.sgd1_grid(rows), excess_risk.sgd2_grid(rows), excess_risk.sketch_grid(rows)]


def draw(rows: list[Row]) -> Any:
    figure, ((left, right), (below, beside)) = canvas(2, 2)
    one = [row for row in rows if row["claim"] == "SGD1"]
    for place, observer in enumerate(values(one, "observer")):
        mine = [row for row in one if row["observer"] == observer]
        line(left, [row["n"] for row in mine], [row["ε"] for row in mine], place, observer)
    level(left, CLAIMED, "claimed")
    left.set(yscale="log", xlabel="records n", ylabel="ε that holds", title="SGD1")
    ticks(left, [n for n in values(one, "n") if n != 132])
    left.set_ylim(0.03, 4.0)
    left.legend(frameon=False, loc="upper left", ncols=2)
    epsilons = values([row for row in rows if row["claim"] == "accuracy"], "claimed")
    for place, method in enumerate((RECIPE, EXACT)):
        heights = [accuracy(rows, method, epsilon) for epsilon in epsilons]
        line(right, epsilons, heights, place + 3, method, dashed=method == RECIPE)
    level(right, accuracy(rows, MAJORITY), MAJORITY, "#888888")
    right.set(xlabel="ε claimed", ylabel="accuracy, %", title="SGD2 on Adult, ten parties")
    ticks(right, epsilons)
    right.legend(frameon=False, loc="lower right")
    excess_risk.draw_sgd1(below, rows)
    excess_risk.draw_sgd2(beside, rows)
    return figure
