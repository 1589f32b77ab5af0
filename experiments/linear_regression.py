"""Linear regression against ε: the noisy quadratic as published and repaired, and methods with a δ.

Jiang, "Deep learning with differential privacy", Section 4.2 and Figures 2 and 3: Laplace noise on the
coefficients of the loss J = Σ (y - x·θ)² / 2m, features and target in [-1, 1], 80 % of the records to train
and 20 % to test, pure ε-DP when a record is replaced (`farthing.linear.methods.functional`). The stationary
point of a noisy quadratic that is not convex can be anywhere, so medians of ten draws and the worst are
shown.

The text's data, 370,000 US and 190,000 Brazilian records of IPUMS with an income, are not available, and it
prints no numbers. Other data replace them, so that the shapes of curves may be compared and their heights may
not: "US" is 280,005 tax units of the US Current Population Survey (wages from 19 features), "Brazil" is
IPUMS-BR's 38,000 records and its column c49, by its range weekly hours of work, from the 51 others.

The text divides ε between the quadratic and the linear coefficients so that ε₁ >= ε₂, the more sensitive
having the larger part, and names no numbers: "as published" is in proportion, ε₁ : ε₂ = (d+1) : 2. Equal
parts and the library's own, ε₁ = 0.7 ε, are shown beside it.

`auto`, `adassp` and `sufficient` are the library's, at the same ε with δ = 1e-8 instead of 0, when a record
is replaced.
"""

from typing import Any

import numpy as np

from experiments.datasets import Array, Data
from experiments.frame import PLOT, Grid, Row, Size, canvas, legend, level, line, say, stream, ticks, values
from farthing.budget import Budget
from farthing.data.adult import load_adult
from farthing.data.schema import find
from farthing.data.tables import Table
from farthing.ledger.ledger import Ledger
from farthing.linear.losses import squared
from farthing.linear.problem import Problem
from farthing.linear.solvers import REGRESSORS
from farthing.queries.query import run

EPSILONS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
DELTA, REPEATS = 1e-8, 10
FUNCTIONAL = REGRESSORS["functional"]
PURE = {
    "as published": FUNCTIONAL.with_({"quadratic_share": None, "repair": False}),
    "repaired": FUNCTIONAL.with_({"quadratic_share": None}),
    "repaired, ε₁ = ε₂": FUNCTIONAL.with_({"quadratic_share": 0.5}),
    "repaired, ε₁ = 0.7 ε": FUNCTIONAL,
    "repaired, ε₁ = 0.7 ε, triangle": FUNCTIONAL.with_({"triangle": True}),
}
WITH_DELTA = {name: REGRESSORS[name] for name in ("adassp", "sufficient", "auto")}
METHODS = PURE | WITH_DELTA
PLAIN, MEAN = "least squares, not private", "the mean alone"
LEVELS = (PLAIN, MEAN)


def sets(small: bool) -> dict[str, Data]:
    """Features and target in [0, 1]; what is not there is left out, and said."""
    if small:
        adult = load_adult()
        names = list(adult.schema.feature_names)
        hours = names.index("hours-per-week")
        wanted = ("age", "education-num", "sex=Male", "marital-status=Married-civ-spouse", "capital-gain")
        return {"Adult, hours": (adult.X[:, [names.index(name) for name in wanted]], adult.X[:, hours])}
    found = {}
    for name, file in (("US", "us_cps_income.npz"), ("Brazil", "ipums_br.npz")):
        path = find(file)
        if path is None:
            say(f"{name} is left out: there is no {file} in the folder that FARTHING_DATA names")
            continue
        data = np.load(path)
        X = data["X"].astype(np.float64)
        if name == "US":
            found[name] = X, data["y"].astype(np.float64)
        else:
            place = data["feature_names"].tolist().index("c49")
            found[name] = np.delete(X, place, axis=1), X[:, place]
    if not found:
        raise FileNotFoundError("none of its data is there; --small takes Adult")
    return found


def loss(X: Array, y: Array, u: Array, constant: float) -> float:
    """J on targets mapped from [0, 1] to [-1, 1]: residuals double."""
    return float(np.mean(np.square(2 * (y - X @ u - constant))) / 2)


def measure(size: Size) -> list[Row]:
    size.only("repeats")
    rows = []
    for data, (X, y) in sets(size.small).items():
        order = np.random.default_rng(0).permutation(len(y))
        train, test = np.split(order, [int(0.8 * len(y))])
        beside = np.column_stack([X[train], np.ones(len(train))])
        *u, constant = np.linalg.lstsq(beside, y[train], rcond=None)[0]
        rows.append({"data": data, "method": PLAIN, "J": loss(X[test], y[test], np.array(u), constant)})
        nothing = loss(X[test], y[test], np.zeros(X.shape[1]), y[train].mean())
        rows.append({"data": data, "method": MEAN, "J": nothing})
        table, problem = Table(X[train], y[train]), Problem(squared, len(train), X.shape[1], unit=False)
        for name, method in METHODS.items():
            for epsilon in (0.1, 1.6) if size.small else EPSILONS:
                budget = Budget(epsilon, 0.0 if name in PURE else DELTA, "replace-one")
                for repeat in range(size.repeats_or(REPEATS, small=3)):
                    ledger = Ledger(budget, filter=method.filter, stream=stream(data, name, epsilon, repeat))
                    model = run(method.algorithm(ledger.over(table), problem))
                    found = loss(X[test], y[test], *model.w)
                    rows.append({"data": data, "method": name, "ε": epsilon, "repeat": repeat, "J": found})
            say(f"{data}: {name} done")
    return rows


def drawn(rows: list[Row], data: str, method: str, epsilon: float) -> Array:
    return np.array(
        [row["J"] for row in rows if (row["data"], row["method"], row.get("ε")) == (data, method, epsilon)]
    )


def tables(rows: list[Row]) -> list[Grid]:
    epsilons, grids = values(rows, "ε"), []
    for data in values(rows, "data"):
        cells = []
        for method in METHODS:
            draws = [drawn(rows, data, method, epsilon) for epsilon in epsilons]
            said = PLOT if method == "as published" else "not in it"
            cells.append([method, *(f"{np.median(found):.4g}" for found in draws), said])
            cells.append(
                [f"{method}, worst of {len(draws[0])}", *(f"{found.max():.4g}" for found in draws), ""]
            )
        for method in LEVELS:
            value = next(row["J"] for row in rows if (row["data"], row["method"]) == (data, method))
            cells.append(
                [method, *[f"{value:.4g}"] * len(epsilons), PLOT if method == PLAIN else "not in it"]
            )
        head = ["", *(f"ε {epsilon:g}" for epsilon in epsilons), "published"]
        grids.append(Grid(f"{data}: J on held-out records, median", head, cells))
    return grids


def draw(rows: list[Row]) -> Any:
    data, epsilons = values(rows, "data"), values(rows, "ε")
    figure, (panels,) = canvas(1, len(data), 4.2, 3.4)
    for axes, name in zip(panels, data, strict=True):
        for place, method in enumerate(METHODS):
            heights = [float(np.median(drawn(rows, name, method, epsilon))) for epsilon in epsilons]
            line(axes, epsilons, heights, place, method, dashed=method in PURE)
        for method, colour in zip(LEVELS, ("#1a1a1a", "#888888"), strict=True):
            value = next(row["J"] for row in rows if (row["data"], row["method"]) == (name, method))
            level(axes, value, method, colour)
        ticks(axes, epsilons)
        axes.set(yscale="log", xlabel="ε", title=name)
    panels[0].set_ylabel("J on held-out records")
    legend(figure, panels[0], 4)
    return figure
