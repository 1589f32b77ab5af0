"""DP-AGD, Figure 1: how much its four parameters matter, as published and as the library has them.

Lee & Kifer 2018 vary the number of splits, the budget's growth γ and the clips C_grad and C_obj, one at a
time, on Adult, and find: robust to moderate settings; splits matter less with a larger budget; too small a
C_grad loses information, too large a one adds noise. Here each is multiplied by 1/4 to 4 about its default
(the paper's 60, 0.1, 3 and 3; the library's 18 rounds, 0.1, and clips that follow from the rows), at ε = 0.1
and 0.8, δ = 1e-8: the mean of five folds.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from experiments.datasets import classification, folds
from experiments.dpagd_comparison import DELTA, AsPublished, fitted, judged
from experiments.frame import PLOT, Grid, Row, Size, canvas, legend, line, mean, number, say, ticks, values
from farthing.accounting.filters import ZcdpFilter
from farthing.budget import Budget
from farthing.linear.losses import logistic
from farthing.linear.methods.dpagd import dpagd
from farthing.linear.problem import Problem
from farthing.linear.solvers import SolverMethod

EPSILONS, FOLDS = (0.1, 0.8), 5
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
PUBLISHED, OURS = "as published", "library"
LABELS = {"splits": "splits", "growth": "γ", "clip_norm": "C_grad", "objective_clip": "C_obj"}
ROWS_CLIP, OBJECTIVE_CLIP = math.sqrt(2) / 2, 4.0  # the library's defaults for two classes


def published(name: str, factor: float) -> AsPublished:
    default = AsPublished()
    value = getattr(default, name) * factor
    return replace(default, **{name: round(value) if name == "splits" else value})


def library(name: str, factor: float) -> Any:
    """The library's own, with one of its numbers multiplied."""
    defaults = {"splits": 18.0, "growth": 0.1, "clip_norm": ROWS_CLIP, "objective_clip": OBJECTIVE_CLIP}
    given = defaults | {name: defaults[name] * factor}
    return lambda ledger, problem: dpagd(ledger, problem, **given)


def factors(name: str, version: str) -> tuple[float, ...]:
    """Fewer for a version that takes 500 gradients, and 2,000 at four times the splits."""
    if version == OURS or name == "clip_norm":
        return FACTORS
    return FACTORS[:-1] if name == "splits" else FACTORS[::2]


def measure(size: Size) -> list[Row]:
    X, y = next(iter(classification(size.small).values()))
    rows = []
    for fold, learnt, test in folds(len(y), size, FOLDS):
        Xf, yf, tested = X[learnt].astype(np.float32), y[learnt], (X[test], y[test])
        problem = Problem(logistic, len(yf), X.shape[1], unit=False)
        for version, make in ((PUBLISHED, published), (OURS, library)):
            for epsilon in (0.8,) if size.small else EPSILONS:
                known: dict[object, Row] = {}  # the defaults need not be run four times
                for name in ("splits", "clip_norm") if size.small else LABELS:
                    for factor in (0.5, 1.0) if size.small else factors(name, version):
                        change = (name, factor) if factor != 1 else None
                        if change not in known:
                            method = SolverMethod(make(name, factor), ZcdpFilter)
                            budget, place = Budget(epsilon, DELTA), (fold, version, epsilon, change)
                            w = fitted(method, budget, Xf, yf, problem, *place)
                            known[change] = judged(w, Xf, yf, tested, logistic, True)
                        where = {"fold": fold, "version": version, "ε": epsilon}
                        rows.append({**where, "parameter": LABELS[name], "factor": factor, **known[change]})
                say(f"fold {fold + 1}, {version}, ε {epsilon:g} done")
    return rows


def tables(rows: list[Row]) -> list[Grid]:
    tried, grids = sorted(values(rows, "factor")), []
    for measured, form in (("accuracy", ".1f"), ("objective", ".3f")):
        cells = []
        for version in values(rows, "version"):
            for epsilon in values(rows, "ε"):
                for name in values(rows, "parameter"):
                    where = {"version": version, "ε": epsilon, "parameter": name}
                    found = [mean(rows, measured, factor=factor, **where) for factor in tried]
                    numbers = ["" if math.isnan(value) else f"{value:{form}}" for value in found]
                    said = PLOT if version == PUBLISHED else "not in it"
                    cells.append([version, f"{epsilon:g}", name, *numbers, said])
        head = ["", "ε", "parameter", *(f"× {number(factor)}" for factor in tried), "published"]
        grids.append(Grid(f"{measured} where a parameter is multiplied", head, cells))
    return grids


def draw(rows: list[Row]) -> Any:
    names = values(rows, "parameter")
    figure, (panels,) = canvas(1, len(names), 2.6, 2.8)
    for axes, name in zip(panels, names, strict=True):
        place = 0
        for version in values(rows, "version"):
            for epsilon in values(rows, "ε"):
                where = {"parameter": name, "version": version, "ε": epsilon}
                mine = [row for row in rows if all(row[key] == value for key, value in where.items())]
                tried = values(mine, "factor")
                heights = [mean(mine, "accuracy", factor=factor) for factor in tried]
                label = f"{version}, ε = {epsilon:g}"
                line(axes, tried, heights, place, label, dashed=version == PUBLISHED)
                place += 1
        ticks(axes, sorted(values(rows, "factor")))
        axes.set(title=name, xlabel="times the default")
    low, high = (edge(axes.get_ylim()[place] for axes in panels) for place, edge in ((0, min), (1, max)))
    for axes in panels:
        axes.set_ylim(low, high)
    panels[0].set_ylabel("accuracy on Adult (a9a), %")
    legend(figure, panels[0], 4)
    return figure
