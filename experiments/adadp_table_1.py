"""AdaDP, Table I: the ε that DP-SGD and AdaDP need for a given accuracy (Xu et al. 2020).

MNIST: noise 3, 6 for DpPCA, batches of 600, clip 4, and CIFAR-10: noise 4, batches of 2,000, clips 3, 3 and
6; the paper's learning rates (those of figures 2 and 3) and δ = 1e-4, up to the largest ε it prints: 5.48 and
8.36, which are 26,835 and 6,328 batches by its Theorem 1. ε is counted up to the first evaluation on the test
images that shows the accuracy, and averaged over runs; it is given as the paper counts (Theorem 1, DpPCA left
out) and by tight accounting with DpPCA. In addition, on MNIST: budgets of ε = 0.25 to 8 counted tightly, 300
batches each with steps tuned on Fashion-MNIST (`adadp_figure_2.within`).

The paper's convolutions were trained on CIFAR-100, ours are random: its accuracies are out of reach there,
and lower ones stand in.
"""

import math
from collections.abc import Iterator
from statistics import fmean, pstdev
from typing import Any

import farthing as ft
from experiments import adadp_figure_3, pictures
from experiments.adadp_figure_2 import within
from experiments.deep import (
    CROSS,
    MARKS,
    Marks,
    Run,
    Setting,
    final,
    lines,
    marked,
    measured,
    published_lots,
    rows_of,
    shown,
)
from experiments.deep import key as legend
from experiments.frame import Grid, Row, Size, canvas, values

DELTA, RUNS = 1e-4, {"MNIST": 3, "CIFAR-10": 2}
MOST = {"MNIST": 5.48, "CIFAR-10": 8.36}  # the largest ε of the table
BUDGETS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
METHODS = {"DP-SGD": (0.1, 0.052), "published AdaDP": (0.002, None), "AdaDP": (0.002, None)}
LEVELS = {
    "MNIST": {90: ("", ""), 92: ("1.10", "0.75"), 94: ("1.61", "0.78"), 95: ("1.96", "0.80"),
              96: ("5.48", "1.40")},
    "CIFAR-10": {35: ("", ""), 40: ("", ""), 45: ("", ""), 50: ("", ""), 55: ("", ""), 68: ("0.89", "0.62"),
                 69: ("1.85", "1.07"), 70: ("4.75", "2.13"), 71: ("8.36", "3.55")},
}  # fmt: skip


def measure(size: Size) -> list[Row]:
    size.only("repeats")
    mnist, cifar10 = pictures.mnist(size.small), pictures.cifar10(size.small)
    rows = [row for problem in (mnist, cifar10) for row in measured(problem, runs(problem, size))]
    for setting, marks, more in budgets(mnist, size):
        rows.append({**rows_of(mnist, setting, marks)[-1], **more})
    return rows


def runs(problem: pictures.Problem, size: Size) -> Iterator[Run]:
    """Up to the largest ε of the table, looked at more often at first, where accuracies change most."""
    for run in range(size.repeats_or(RUNS[problem.name])):
        for method in METHODS:
            setting = _setting(problem, method, run, size.small)
            often, end = (30, 1500) if problem.name == "MNIST" else (10, 300)
            marks: Marks = (*range(often, end, often), *range(end, setting.lots, end // 3))
            yield setting, marks, {"data": problem.name}


def budgets(problem: pictures.Problem, size: Size) -> Iterator[Run]:
    """Budgets counted tightly, a few lots each."""
    for epsilon in BUDGETS[:1] if size.small else BUDGETS:
        for run in range(size.repeats_or(RUNS["MNIST"])):
            for method in ("DP-SGD", "AdaDP"):
                setting = within(problem, ft.Budget(epsilon, DELTA), method, run, size.small)
                yield setting, MARKS, {"data": "MNIST within budgets", "budget": epsilon}


def _setting(problem: pictures.Problem, method: str, run: int, small: bool) -> Setting:
    most = MOST[problem.name]
    if problem.name == "CIFAR-10":
        lots = published_lots(4.0, adadp_figure_3.LOT / 50_000, most, DELTA)
        return adadp_figure_3.paper(problem, method, run, small, noise=4.0, delta=DELTA, lots=lots)
    step, falls = METHODS[method]
    lots = 60 if small else published_lots(3.0, 600 / 60_000, most, DELTA)
    return Setting(
        method=method, epsilon=most, delta=DELTA, noise=3.0, lot=min(600, len(problem.rows) // 10),
        lots=lots, clip=4.0, step=step, pca=6.0, falls=falls, run=run,
    )  # fmt: skip


def needed(rows: list[Row], level: float, count: str) -> tuple[list[float], int]:
    """ε when each run first was that accurate (∞ where there is none), and how many runs never were."""
    found, missed = list[float](), 0
    for run in values(rows, "run"):
        mine = [row for row in rows if row["run"] == run and row["accuracy"] >= level]
        if mine:
            found.append(float(mine[0].get(count, math.inf)))
        else:
            missed += 1
    return found, missed


def tables(rows: list[Row]) -> list[Grid]:
    grids = []
    for data in LEVELS:
        cells = []
        for level, said in LEVELS[data].items():
            for method in METHODS:
                mine = [row for row in rows if row["data"] == data and row["method"] == method]
                paper = said[0] if method == "DP-SGD" else said[1]
                ends = [_shown(*needed(mine, level, count)) for count in ("paper ε", "tight ε")]
                cells.append([f"{level} %", marked(method), paper, *ends])
        last = max((row for row in rows if row["data"] == data and "tight ε" in row), key=lambda r: r["lots"])
        grids.append(
            Grid(
                f"{data}: ε for an accuracy, δ = {DELTA:g}",
                ["accuracy", "", "the paper says", "ε by Theorem 1", "ε tight, DpPCA included"],
                cells,
                f"–: not within {last['lots']:,} batches, which cost ε = {last['paper ε']:.2f} by Theorem 1 "
                f"and {last['tight ε']:.2f} by tight accounting. {CROSS}",
            )
        )
    mine = [row for row in rows if "budget" in row]
    budgets = values(mine, "budget")
    cells = [
        [method, *(shown(final(mine, method=method, budget=budget)) for budget in budgets)]
        for method in values(mine, "method")
    ]
    head = ["ε", *(f"{budget:g}" for budget in budgets)]
    caption = f"MNIST within a budget by tight accounting, 300 batches: test accuracy, %, δ = {DELTA:g}"
    return [grids[0], Grid(caption, head, cells, CROSS), *grids[1:]]


def _shown(found: list[float], missed: int) -> str:
    if not found:
        return "–"
    if math.inf in found:
        return "none"
    spread = f" ± {pstdev(found):.2f}" if len(found) > 1 else ""
    return f"{fmean(found):.2f}{spread}" + (f" ({missed} of {missed + len(found)} never)" if missed else "")


def draw(rows: list[Row]) -> Any:
    names = tuple(LEVELS)
    figure, grid = canvas(1, len(names), width=4.6)
    for axes, data in zip(grid[0], names, strict=True):
        lines(axes, [row for row in rows if row["data"] == data])
        axes.set(title=f"{data}, σ = {3 if data == 'MNIST' else 4}", xlabel="batches", xscale="log")
    grid[0, 0].set(ylabel="test accuracy, %")
    legend(figure, grid, 3)
    return figure
