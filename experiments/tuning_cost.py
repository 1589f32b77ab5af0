"""The cost of tuning: the best of a random number of runs, against one run and against composition.

Prices: runs that are μ-GDP each, the ε of one of them, and the factor by which the best of K costs more
(`farthing.accounting.tuning`). "Composed" releases every run: √K μ. "On a sample" tunes on a tenth of the
records with runs of the same ε, and then trains on all of them for that ε once more, by basic composition.
The last row of the first table has the probability that no run is among the best tenth of all candidates,
which also matters in the choice of a distribution of K.

Use: accuracy on rows held out of two tables, all at a total of (ε, 1e-6). The candidates (solvers and ways to
bound rows) are a plausible grid; nothing was searched to find them.
"""

import math
import time
from typing import Any

import farthing as ft
from experiments.datasets import classification, folds
from experiments.frame import COLOURS, INK, Grid, Row, Size, canvas, mean, say, values
from farthing.accounting import composition, gaussian, tuning
from farthing.accounting.tuning import RunCount
from farthing.queries.events import GaussianEvent, TuningEvent

KINDS = {"shape -0.5": -0.5, "logarithmic": 0.0, "geometric": 1.0, "Poisson": None}
COMPOSED, SAMPLED = "composed", "on a sample"
MEANS = (2.0, 3.0, 5.0, 10.0, 20.0, 50.0)
SETTINGS = [(e, d) for d in (1e-5, 1e-8) for e in (0.1, 0.5, 1.0, 3.0, 8.0)]
SAMPLE, TOP, DELTA = 0.1, 0.1, 1e-6
DEFAULT, BEST, TUNED = "default", "best candidate, had it been known", "best of 10 expected runs"
AGD = "DP-AGD as it comes"
DRAWN = (1.0, 1e-5)
EPSILONS = (1.0,)


def candidates() -> list[dict[str, Any]]:
    """Parameters to draw from: what the library offers for Gaussian answers, and DP-AGD's settings."""
    solvers = ["auto", *(ft.DPAGD(splits=splits, momentum=m) for splits in (6.0, 18.0) for m in (0.0, 0.7))]
    return [{"solver": solver, "bounds": bounds} for solver in solvers for bounds in (None, (0, 1))]


def measure(size: Size) -> list[Row]:
    size.only("folds", "repeats")
    rows = [row for setting in (SETTINGS[2:3] if size.small else SETTINGS) for row in prices(*setting)]
    for name, (X, y) in classification(size.small).items():
        for fold, learn, test in folds(len(y), size, full=2):
            for epsilon in EPSILONS:
                rows += used(name, fold, epsilon, (X[learn], y[learn]), (X[test], y[test]), size.small)
    return rows


def prices(epsilon: float, delta: float) -> list[Row]:
    """The factor on ε of one run, for every distribution and mean."""
    noise, found = gaussian.noise(epsilon, delta), []
    for expected in MEANS if (epsilon, delta) == DRAWN else (10.0,):
        for name, shape in KINDS.items():
            try:
                runs = RunCount(expected, shape)
            except ft.InvalidValue:
                continue
            event = TuningEvent(GaussianEvent(noise), expected, shape, delta)
            found.append((name, expected, tuning.epsilon(event, delta), runs.missing(TOP)))
        many = gaussian.epsilon(math.sqrt(expected) / noise, delta)
        found.append((COMPOSED, expected, many, (1 - TOP) ** expected))
        half = GaussianEvent(gaussian.noise(epsilon, delta / 2))
        event = TuningEvent(half, expected, 1.0, delta / 2 / SAMPLE)
        part, _ = composition.amplify_poisson(tuning.epsilon(event, event.delta), event.delta, SAMPLE)
        found.append((SAMPLED, expected, epsilon + part, RunCount(expected).missing(TOP)))
    say(f"prices at ε {epsilon:g}, δ {delta:g}")
    return [
        {"kind": "price", "ε": epsilon, "δ": delta, "runs": name, "mean": expected}
        | {"factor": round(cost / epsilon, 4), "missed": round(missed, 4)}
        for name, expected, cost, missed in found
    ]


def used(name: str, fold: int, epsilon: float, learn: Any, test: Any, small: bool) -> list[Row]:
    """Accuracy of the default, of every candidate and of the best of K, each at the whole budget."""
    options, budget, begun = (
        candidates()[:2] if small else candidates(),
        ft.Budget(epsilon, DELTA),
        time.time(),
    )
    scores = [_fitted(one, budget, *learn).score(*test) for one in options]
    tuned = ft.tune(ft.LogisticRegression(), options, *learn, ft.Ledger(budget), runs=10)
    found = {DEFAULT: scores[0], BEST: max(scores), TUNED: tuned.model.score(*test)}
    if not small:
        plain = _fitted({"solver": ft.DPAGD(), "bounds": None}, budget, *learn)
        found[AGD] = plain.score(*test)
    seconds = time.time() - begun
    say(
        f"{name}, fold {fold}, ε {epsilon:g}: {found[DEFAULT]:.4f}, tuned {found[TUNED]:.4f}, {seconds:.0f} s"
    )
    base = {"kind": "use", "table": name, "fold": fold, "ε": epsilon}
    return [base | {"way": way, "accuracy": round(float(score), 5)} for way, score in found.items()]


def _fitted(parameters: dict[str, Any], budget: ft.Budget, X: Any, y: Any) -> Any:
    return ft.LogisticRegression(budget.epsilon, budget.delta, **parameters).fit(X, y)


def tables(rows: list[Row]) -> list[Grid]:
    priced, use = ([row for row in rows if row["kind"] == kind] for kind in ("price", "use"))
    names = [*KINDS, SAMPLED, COMPOSED]
    cells = [
        [f"{e:g}", f"{d:g}", *(_factor(priced, e, d, name) for name in names)]
        for d in values(priced, "δ")
        for e in values(priced, "ε")
        if any((row["ε"], row["δ"]) == (e, d) for row in priced)
    ]
    missed = [f"{mean(priced, 'missed', runs=name, mean=10.0):.2f}" for name in names]
    cells.append(["", "misses the best tenth", *missed])
    head = ["ε of one run", "δ", *names]
    note = "A factor of 1.5 at ε 1: the best of 10 expected runs, each of ε 1 by itself, is 1.5-DP at that δ."
    found = [Grid("ε of the best of 10 expected runs, over ε of one", head, cells, note)]
    ways = values(use, "way")
    for epsilon in values(use, "ε"):
        here = [row for row in use if row["ε"] == epsilon]
        lines = [
            [table, *(f"{100 * mean(here, 'accuracy', table=table, way=way):.2f}" for way in ways)]
            for table in values(here, "table")
        ]
        title = f"Accuracy in percent at a total of ε {epsilon:g}, δ {DELTA:g}, on held-out rows"
        found.append(
            Grid(
                title,
                ["table", *ways],
                lines,
                "The candidates are a plausible grid: nothing was searched to find them.",
            )
        )
    return found


def _factor(rows: list[Row], epsilon: float, delta: float, name: str) -> str:
    return f"{mean(rows, 'factor', ε=epsilon, δ=delta, runs=name, mean=10.0):.2f}"


def draw(rows: list[Row]) -> Any:
    figure, grid = canvas(1, 2, width=4.0, height=3.4)
    priced = [row for row in rows if row["kind"] == "price" and (row["ε"], row["δ"]) == DRAWN]
    for place, (name, label) in enumerate((n, n) for n in [*KINDS, SAMPLED, COMPOSED]):
        here = [row for row in priced if row["runs"] == name]
        style = {"color": INK if name == COMPOSED else COLOURS[place], "marker": ".", "label": label}
        grid[0, 0].plot([row["mean"] for row in here], [row["factor"] for row in here], **style)
        grid[0, 1].plot([row["missed"] for row in here], [row["factor"] for row in here], **style)
    grid[0, 0].set(
        xscale="log", xlabel="expected number of runs", ylabel="ε, over that of one run", ylim=(1, 4)
    )
    grid[0, 1].set(xlabel="chance to miss the best tenth of candidates", ylim=(1, 4), xlim=(0, 1))
    grid[0, 0].axhline(1.3, color=INK, linestyle=":", linewidth=1)
    grid[0, 1].axhline(1.3, color=INK, linestyle=":", linewidth=1)
    grid[0, 0].legend(frameon=False, fontsize=7, loc="upper left")
    return figure
