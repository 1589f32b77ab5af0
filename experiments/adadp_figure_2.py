"""AdaDP, Figure 2: accuracy on MNIST at three levels of privacy (Xu et al. 2020).

60 dimensions of DpPCA, 1,000 ReLU units, batches of 600. As the paper has it: noise 8, 4 and 2 (16, 7 and 4
for DpPCA), clip 4 and its learning rates (AdaL's is that of its Figure 4). It calls these levels high, medium
and low and prints no ε for them; they are read as ε = 0.5, 2 and 8 at δ = 1e-5, which is what Abadi et al.
2016, Section 5.2, give for the same three pairs of noise (its own Section IV-F has ε = 0.5 for the first).
Its Theorem 1 lets 1,635, 6,095 and 18,131 batches run for these. And within the same budgets: 300 batches,
whose noise follows from tight accounting, DpPCA included, clip 1, steps that did best on Fashion-MNIST.
DP-AGD asks all records in each of its rounds, and "DP-AGD on batches" a batch for each gradient and each
choice, as the paper's authors ran it, but every batch and every choice is charged (Rényi filter); both end
with the budget. Close to an hour on one core.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean
from typing import Any

import farthing as ft
from experiments import pictures
from experiments.deep import (
    BATCHES,
    CROSS,
    MARKS,
    Run,
    Setting,
    ends,
    final,
    fitting,
    key,
    lines,
    marked,
    measured,
    published_lots,
    shown,
)
from experiments.frame import Grid, Row, Size, canvas, values

DELTA, LOT, CLIP, WITHIN, RUNS = 1e-5, 600, 4.0, 300, 3
LEVELS = {  # ε (read as), σ, σ of DpPCA
    "high": (0.5, 8.0, 16.0),
    "medium": (2.0, 4.0, 7.0),
    "low": (8.0, 2.0, 4.0),
}
PAPER = {  # learning rate, and what it falls to
    "not private": (0.001, None),
    "published AdaDP": (0.002, None),
    "published AdaDP, examples clipped": (0.002, None),
    "AdaDP": (0.002, None),
    "AdaL": (0.001, None),
    "DP-SGD": (0.1, 0.052),
    "DpOpt": (0.1, 0.052),
}
TUNED = {"AdaDP": 0.01, "AdaL": 0.01, "AdaN": 0.8, "DP-SGD": 0.3, "DpOpt": 0.3}
PART = 0.05  # of μ² for DpPCA within a budget
LEADS = {
    "DP-SGD": (5.9, 2.7, 1.0),
    "DP-AGD": (8.8, 9.5, 6.7),
    BATCHES: (8.8, 9.5, 6.7),
    "DpOpt": (4.3, 1.5, 0.7),
}  # of AdaDP, published
COUNTED = {"DP-AGD": "zCDP", BATCHES: "RDP"}  # with any of the others' counts


def paper(problem: pictures.Problem, level: str, method: str, run: int, small: bool = False) -> Setting:
    """The paper's own setting of a level."""
    epsilon, noise, pca = LEVELS[level]
    step, falls = PAPER[method]
    most = 24 if small else published_lots(noise, LOT / 60_000, epsilon, DELTA)
    return Setting(
        method=method, epsilon=epsilon, delta=DELTA, noise=noise, lot=_lot(problem), lots=most, clip=CLIP,
        step=step, pca=pca, falls=falls, run=run,
    )  # fmt: skip


def within(problem: pictures.Problem, budget: ft.Budget, method: str, run: int, small: bool) -> Setting:
    """A budget counted tightly: a few lots with the noise that spends it."""
    lots, lot = 12 if small else WITHIN, _lot(problem)
    pca = 1 / (math.sqrt(PART) * budget.mu)
    noise = fitting(lot / len(problem.rows), lots, budget, pca)
    return Setting(
        method=method, epsilon=budget.epsilon, delta=budget.delta, noise=noise, lot=lot, lots=lots, clip=1.0,
        step=TUNED[method], pca=pca, momentum=0.9, run=run,
    )  # fmt: skip


def _lot(problem: pictures.Problem) -> int:
    return min(LOT, len(problem.rows) // 10)


def runs(problem: pictures.Problem, size: Size) -> Iterator[Run]:
    for level in ("high",) if size.small else LEVELS:
        for run in range(size.repeats_or(RUNS)):
            for method in TUNED:
                setting = within(problem, ft.Budget(LEVELS[level][0], DELTA), method, run, size.small)
                yield setting, MARKS, {"level": level, "counted": "tight"}
            for method in PAPER:
                if method.endswith("examples clipped") and (level != "high" or run > 0):
                    continue
                setting = paper(problem, level, method, run, size.small)
                yield setting, MARKS, {"level": level, "counted": "Theorem 1"}
            yield agd(problem, level, run), MARKS, {"level": level, "counted": "zCDP"}
            batches = replace(paper(problem, level, "AdaDP", run, size.small), method=BATCHES, step=0.0)
            yield batches, MARKS, {"level": level, "counted": "RDP"}


def measure(size: Size) -> list[Row]:
    size.only("repeats")
    problem = pictures.mnist(size.small)
    return measured(problem, runs(problem, size))


def agd(problem: pictures.Problem, level: str, run: int) -> Setting:
    """DP-AGD's rounds: zCDP, up to the whole budget."""
    epsilon = LEVELS[level][0]
    return Setting(
        method="DP-AGD", epsilon=epsilon, delta=DELTA, noise=1.0, lot=_lot(problem), lots=1, clip=1.0,
        step=0.0, pca=None, run=run,
    )  # fmt: skip


def tables(rows: list[Row]) -> list[Grid]:
    levels = values(rows, "level")
    grids = []
    for counted, caption in (
        ("Theorem 1", "the paper's noise, clipping norm, rates and batches"),
        ("tight", "the same budgets by tight accounting, 300 batches, tuned rates"),
    ):
        cells = []
        for method in values(rows, "method"):
            kind = COUNTED.get(method, counted)
            found = [final(rows, level=level, method=method, counted=kind) for level in levels]
            if any(found):
                cells.append([marked(method), *(shown(one) for one in found)])
        grids.append(Grid(f"Test accuracy, %: {caption}", ["", *map(_level, levels)], cells))
    kinds = (("published AdaDP", "Theorem 1"), ("AdaDP", "Theorem 1"), ("AdaDP", "tight"))
    cells = []
    for method, leads in LEADS.items():
        for place, level in enumerate(levels):
            cells.append([f"{method}, {level}", f"{leads[place]:.1f}"])
            for ahead, counted in kinds:
                kind = COUNTED.get(method, counted)
                best = final(rows, level=level, method=ahead, counted=counted)
                other = final(rows, level=level, method=method, counted=kind)
                cells[-1].append(f"{fmean(best) - fmean(other):+.1f}" if best and other else "")
    head = ["AdaDP's lead over", "the paper says", "published AdaDP ✗", "AdaDP, same batches", "AdaDP, tight"]
    return [*grids, Grid("AdaDP's lead, points", head, cells, CROSS)]


def _level(level: str) -> str:
    return f"{level}, read as ε = {LEVELS[level][0]:g}"


def draw(rows: list[Row]) -> Any:
    levels = values(rows, "level")
    figure, grid = canvas(2, len(levels))
    for axes, counted in zip(grid, ("Theorem 1", "tight"), strict=True):
        for cell, level in zip(axes, levels, strict=True):
            mine = [row for row in rows if row["level"] == level]
            lines(cell, [row for row in mine if row["counted"] == counted])
            if counted == "Theorem 1":
                ends(cell, mine)
            rounds = final(rows, level=level, method="DP-AGD", counted="zCDP")
            if rounds:
                cell.axhline(fmean(rounds), color="#666666", linestyle=":", label="DP-AGD, at its end")
            title = "as the paper counts" if counted == "Theorem 1" else "by tight accounting"
            cell.set(
                xlabel="batches", title=f"{_level(level)}: {title}", ylim=(75 if len(levels) > 1 else 0, 100)
            )
        axes[0].set(ylabel="test accuracy, %")
    key(figure, grid, 4)
    return figure
