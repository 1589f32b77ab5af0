"""AdaDP, Figure 5: learning rate, clipping factor, noise and batch size (Xu et al. 2020).

MNIST at ε = 0.5, δ = 1e-5 as the paper counts: rate 0.002, batches of 600, β = 1.2, clip 4, noise 8 (16 for
DpPCA), each changed by itself, and as many batches as Theorem 1 lets run: 386 at noise 4, 2,578 at 10, 6,639
of 300 records, 399 of 1,200. Published AdaDP guarantees nothing; ours is beside it where it has the same
parameter (an ellipsoid has no β).
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from experiments import pictures
from experiments.adadp_figure_2 import DELTA, paper
from experiments.deep import CROSS, MARKS, ORDER, Run, Setting, curve, key, marked, published_lots, shown
from experiments.frame import COLOURS, Grid, Row, Size, canvas, mean, ticks, values

EPSILON, RUNS = 0.5, 3
PANELS: dict[str, tuple[float, ...]] = {
    "learning rate": (0.0008, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.03),
    "factor": (0.6, 0.8, 1.0, 1.2, 1.5, 2.0, 4.0),
    "noise": (4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0),
    "lot": (300.0, 400.0, 500.0, 600.0, 700.0, 800.0, 900.0, 1000.0, 1200.0),
}
METHODS = {
    "published AdaDP": ("learning rate", "factor", "noise", "lot"),
    "AdaDP": ("learning rate", "noise", "lot"),
}
SAID = {
    "learning rate": "above 93 % from 0.0008 to 0.005; rising up to 0.02, falling beyond",
    "factor": "best a little above 1; hardly matters",
    "noise": "best at 7",
    "lot": "best at 800",
}
LABELS = {"factor": "clipping factor β", "lot": "batch size"}  # where a panel has another name


def _changed(setting: Setting, panel: str, value: float, records: int, small: bool) -> Setting:
    match panel:
        case "learning rate":
            setting = replace(setting, step=value)
        case "factor":
            setting = replace(setting, factor=value)
        case "noise":
            setting = replace(setting, noise=value)
        case "lot":
            setting = replace(setting, lot=int(value) * records // 60_000)
    lots = published_lots(setting.noise, setting.lot / records, EPSILON, DELTA)
    return setting if small else replace(setting, lots=lots)


def measure(size: Size) -> list[Row]:
    size.only("repeats")
    problem = pictures.mnist(size.small)
    return [
        {**more, "method": setting.method, "run": setting.run, "lots": setting.lots,
         "accuracy": curve(problem, setting, marks)[-1][1]}
        for setting, marks, more in runs(problem, size)
    ]  # fmt: skip


def runs(problem: pictures.Problem, size: Size) -> Iterator[Run]:
    for run in range(size.repeats_or(RUNS)):
        for method, panels in METHODS.items():
            setting = paper(problem, "high", method, run, size.small)
            for panel in panels[:1] if size.small else panels:
                for value in PANELS[panel][:2] if size.small else PANELS[panel]:
                    one = _changed(setting, panel, value, len(problem.rows), size.small)
                    yield one, MARKS, {"panel": panel, "value": value}


def tables(rows: list[Row]) -> list[Grid]:
    grids = []
    for panel in values(rows, "panel"):
        mine = [row for row in rows if row["panel"] == panel]
        points = sorted(values(mine, "value"))
        cells = [
            [marked(method), *(_cell(mine, method, value) for value in points)]
            for method in values(mine, "method")
        ]
        head = [LABELS.get(panel, panel), *(f"{value:g}" for value in points)]
        caption = f"Test accuracy by {head[0]}, % ({len(values(rows, 'run')) or 1} run(s))"
        grids.append(Grid(caption, head, cells, f"The paper: {SAID[panel]}."))
    return [*grids[:-1], replace(grids[-1], note=f"{grids[-1].note} {CROSS}")]


def _cell(rows: list[Row], method: str, value: float) -> str:
    return shown([row["accuracy"] for row in rows if row["method"] == method and row["value"] == value])


def draw(rows: list[Row]) -> Any:
    panels = values(rows, "panel")
    figure, grid = canvas(1, len(panels), width=2.7)
    heights = [row["accuracy"] for row in rows]
    for axes, panel in zip(grid[0], panels, strict=True):
        for method in values(rows, "method"):
            points = {row["value"] for row in rows if row["panel"] == panel and row["method"] == method}
            where = {"panel": panel, "method": method}
            mine = [(value, mean(rows, "accuracy", value=value, **where)) for value in sorted(points)]
            if mine:
                style = "--o" if method != "AdaDP" else "-s"
                colour = COLOURS[ORDER.index(method)]
                axes.plot(*zip(*mine, strict=True), style, color=colour, label=marked(method))
        axes.set(title=LABELS.get(panel, panel))
        ticks(axes, PANELS[panel])
        axes.set_xticks(PANELS[panel], [f"{value:g}" for value in PANELS[panel]], rotation=90)
        axes.set_ylim(min(heights) - 2, max(heights) + 2)
    grid[0, 0].set(ylabel="test accuracy, %")
    key(figure, grid, 2)
    return figure
