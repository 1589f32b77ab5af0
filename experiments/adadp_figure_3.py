"""AdaDP, Figure 3: accuracy on CIFAR-10 at three levels of privacy (Xu et al. 2020).

Two frozen convolutions of 64 filters, 384 and 192 units, batches of 2,000, noise 6. The paper's three levels
have the same noise and differ in the length of training, and it prints no ε for them. They are read as ε = 2,
4 and 8 at δ = 1e-5, the values of Abadi et al. 2016 for this noise (their CIFAR-10 figure), which are 854,
3,236 and 11,455 batches by the paper's own Theorem 1.

* The paper's settings: clips of 3 for each fully connected layer and 6 for the softmax layer; learning rates
  0.001 for AdaDP and AdaL, 0.052 for DP-SGD and DpOpt, at the high level 0.1 decaying exponentially (to
  0.052, read so: its end is not printed); no momentum is printed, and none used.
* Tuned: one clip of 3, momentum 0.9 for DP-SGD and DpOpt, and steps that were best of three to five on 10,000
  held-out training images for 3,236 batches (DpOpt has DP-SGD's, published AdaDP's was not tuned).
* DP-AGD asks all records in each of its rounds; "DP-AGD on batches", as the paper's authors ran it, a batch
  for each gradient and each choice, all of them charged (Rényi filter). Both end with the ε of their level.

The paper's convolutions were trained on CIFAR-100; ours are random filters, so that only the order of methods
can be compared. On a GPU: 20 to 40 seconds a run.
"""

from collections.abc import Iterator
from statistics import fmean
from typing import Any

from experiments import pictures
from experiments.deep import (
    AGD,
    BATCHES,
    CROSS,
    MARKS,
    Exponential,
    Marks,
    Run,
    Setting,
    ends,
    final,
    key,
    lines,
    marked,
    measured,
    shown,
)
from experiments.frame import Grid, Row, Size, canvas, values

DELTA, NOISE, LOT, CLIP, CLIPS, RUNS = 1e-5, 6.0, 2000, 3.0, (3.0, 3.0, 6.0), 2
LEVELS = {"high": (2, 854), "medium": (4, 3236), "low": (8, 11_455)}  # ε, read as, and lots by Theorem 1
LOTS = LEVELS["low"][1]
PAPER = {
    "published AdaDP": 0.001,
    "AdaDP": 0.001,
    "DP-SGD": 0.052,
    "DpOpt": 0.052,
    "AdaL": 0.001,
    "AdaN": 0.05,
    "published AdaN": 0.05,
}
FALLS = ("DP-SGD", "DpOpt")  # from 0.1, at the high level
TUNED = {
    "not private": 0.0003,
    "published AdaDP": 0.002,
    "AdaDP": 0.0025,
    "DP-SGD": 0.02,
    "DpOpt": 0.02,
    "AdaL": 0.0012,
}
METHODS = ("published AdaDP", "AdaDP", "DP-SGD", "DpOpt", "AdaL")
LEADS = {
    "DP-SGD": (3.2, 5.3, 4.8),
    "DP-AGD": (8.5, 8.0, 6.9),
    BATCHES: (8.5, 8.0, 6.9),
    "DpOpt": (2.1, 3.5, 3.2),
}  # of AdaDP, published
PLACES = tuple(
    sorted({*range(100, 854, 100), *range(1000, LOTS, 500), *(lots for _, lots in LEVELS.values())})
)


def paper(
    problem: pictures.Problem, method: str, run: int, small: bool, *, high: bool = False,
    noise: float = NOISE, delta: float = DELTA, lots: int = LOTS,
) -> Setting:  # fmt: skip
    """The paper's own setting."""
    falls = high and method in FALLS
    return Setting(
        method=method, epsilon=8.0, delta=delta, noise=noise, lot=min(LOT, len(problem.rows) // 10),
        lots=12 if small else LEVELS["high"][1] if high else lots, clip=CLIPS,
        step=0.1 if falls else PAPER[method], falls=Exponential(0.052) if falls else None, run=run,
    )  # fmt: skip


def tuned(problem: pictures.Problem, method: str, run: int, small: bool) -> Setting:
    """One clip, momentum and steps that did best on held-out training images."""
    return Setting(
        method=method, epsilon=8.0, delta=DELTA, noise=NOISE, lot=min(LOT, len(problem.rows) // 10),
        lots=12 if small else LOTS, clip=CLIP, step=TUNED[method], momentum=0.9, run=run,
    )  # fmt: skip


def agd(problem: pictures.Problem, method: str, level: str, run: int, small: bool) -> Setting:
    """DP-AGD's rounds over all records or on batches, up to the whole of the ε that a level is read as."""
    epsilon, lots = LEVELS[level]
    batches = method == BATCHES
    return Setting(
        method=method, epsilon=float(epsilon), delta=DELTA, noise=NOISE if batches else 1.0,
        lot=min(LOT, len(problem.rows) // 10), lots=12 if small else lots, clip=CLIPS if batches else 1.0,
        step=0.0, run=run,
    )  # fmt: skip


def runs(problem: pictures.Problem, size: Size) -> Iterator[Run]:
    marks: Marks = 4 if size.small else PLACES
    for run in range(size.repeats_or(RUNS)):
        for method in METHODS:
            if method in FALLS:
                setting = paper(problem, method, run, size.small, high=True)
                yield setting, 8, {"settings": "paper", "level": "high"}
            setting = paper(problem, method, run, size.small)
            yield setting, marks, {"settings": "paper", "level": "low"}
        for method in TUNED if run == 0 else METHODS:
            setting = tuned(problem, method, run, size.small)
            yield setting, marks, {"settings": "tuned", "level": "low"}
        for level in LEVELS:
            for method in AGD:
                yield agd(problem, method, level, run, size.small), MARKS, {"settings": "AGD", "level": level}


def measure(size: Size) -> list[Row]:
    size.only("repeats")
    problem = pictures.cifar10(size.small)
    return measured(problem, runs(problem, size))


def tables(rows: list[Row]) -> list[Grid]:
    costs = [_ends(rows, "paper", "AdaDP", level)[0] for level in LEVELS]
    told = "; ".join(
        f"{row['lots']:,} batches: {row['paper ε']:.2f} by Theorem 1, "
        f"{row['tight ε']:.2f} by tight accounting"
        for row in costs
    )
    head = [f"{level}, read as ε = {epsilon}" for level, (epsilon, _) in LEVELS.items()]
    grids = []
    for settings, caption in (
        ("paper", "the paper's clips and learning rates, no momentum"),
        ("tuned", "one clip of 3, tuned learning rates, momentum 0.9"),
    ):
        methods = values([row for row in rows if row["settings"] in (settings, "AGD")], "method")
        cells = [
            [marked(method), *(shown(_at(rows, settings, method, level)) for level in LEVELS)]
            for method in methods
        ]
        grids.append(Grid(f"Test accuracy, %: {caption}", ["", *head], cells, f"ε of {told}."))
    cells = [
        [method, " / ".join(f"{lead:.1f}" for lead in leads),
         *(_leads(rows, settings, best, method)
           for settings in ("paper", "tuned") for best in ("published AdaDP", "AdaDP"))]
        for method, leads in LEADS.items()
    ]  # fmt: skip
    caption = "AdaDP's lead over, points at the three levels"
    head = ["", "the paper says", "published AdaDP ✗, its settings", "AdaDP, its settings",
            "published AdaDP ✗, tuned", "AdaDP, tuned"]  # fmt: skip
    return [*grids, Grid(caption, head, cells, CROSS)]


def _ends(rows: list[Row], settings: str, method: str, level: str) -> list[Row]:
    """The row of each run at a level: of a run made for it, or on the way of a longer one."""
    mine = [row for row in rows if row["settings"] == settings and row["method"] == method]
    mine = [row for row in mine if row["level"] == level] or [row for row in mine if row["level"] == "low"]
    places = [row["lots"] for row in mine if row["lots"] <= LEVELS[level][1]]
    return [row for row in mine if places and row["lots"] == max(places)]


def _at(rows: list[Row], settings: str, method: str, level: str) -> list[float]:
    if method in AGD:
        return final(rows, method=method, level=level)
    return [row["accuracy"] for row in _ends(rows, settings, method, level)]


def _leads(rows: list[Row], settings: str, best: str, method: str) -> str:
    pairs = [(_at(rows, settings, best, level), _at(rows, settings, method, level)) for level in LEVELS]
    return " / ".join(f"{fmean(one) - fmean(other):+.1f}" if one and other else "–" for one, other in pairs)


def draw(rows: list[Row]) -> Any:
    figure, grid = canvas(1, 2, width=4.8)
    for axes, (settings, title) in zip(
        grid[0], (("paper", "the paper's settings"), ("tuned", "tuned")), strict=True
    ):
        lines(axes, [row for row in rows if row["settings"] == settings and row["level"] == "low"])
        ends(axes, rows)
        last = max(row["lots"] for row in rows)
        for _, lots in LEVELS.values():
            if lots <= last:
                axes.axvline(lots, color="#999999", linestyle=":", linewidth=0.8)
        axes.set(xlabel="batches", title=f"CIFAR-10, frozen random convolutions, σ = 6: {title}")
        axes.set_ylim(0 if last < 100 else 20, 65)
    grid[0, 0].set(ylabel="test accuracy, %")
    key(figure, grid, 3)
    return figure
