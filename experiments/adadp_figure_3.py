"""AdaDP, Figure 3: accuracy on CIFAR-10 (Xu et al. 2020).

Two frozen convolutions of 64 filters, 384 and 192 units, lots of 2,000, noise 6, clip 3, δ = 1e-5. The
paper's three levels of privacy are one noise at three lengths of training, some 850 to 11,000 lots by its own
Theorem 1; here 100 lots are run, with steps to match (momentum .9, or an adaptive rate of .004). The paper's
convolutions were trained on CIFAR-100; ours are random filters, so that only the order of methods can be
compared.
"""

from statistics import fmean
from typing import Any

from experiments import pictures
from experiments.deep import CROSS, Setting, final, key, lines, marked, rows_of, shown
from experiments.frame import Grid, Row, canvas, values

DELTA, NOISE, LOT, CLIP, LOTS, RUNS = 1e-5, 6.0, 2000, 3.0, 100, 2
STEPS = {
    "not private": 0.001,
    "published AdaDP": 0.004,
    "AdaDP": 0.004,
    "DP-SGD": 0.1,
    "DpOpt": 0.1,
    "AdaL": 0.004,
    "AdaN": 0.1,
    "published AdaN": 0.1,
}
METHODS = ("not private", "published AdaDP", "AdaDP", "DP-SGD", "DpOpt")
LEADS = {"DP-SGD": "3.2 / 5.3 / 4.8", "DP-AGD": "8.5 / 8.0 / 6.9", "DpOpt": "2.1 / 3.5 / 3.2"}


def setting(
    problem: pictures.Problem, method: str, run: int, small: bool,
    noise: float = NOISE, delta: float = DELTA, lots: int = LOTS,
) -> Setting:  # fmt: skip
    """The setting of every method on CIFAR-10."""
    return Setting(
        method=method, epsilon=8.0, delta=delta, noise=noise, lot=min(LOT, len(problem.rows) // 10),
        lots=12 if small else lots, clip=CLIP, step=STEPS[method], momentum=0.9, run=run,
    )  # fmt: skip


def measure(small: bool) -> list[Row]:
    problem = pictures.cifar10(small)
    return [
        row
        for run in range(1 if small else RUNS)
        for method in METHODS
        for row in rows_of(problem, setting(problem, method, run, small))
    ]


def tables(rows: list[Row]) -> list[Grid]:
    last = rows[-1]
    caption = (
        f"Test accuracy after {last['lots']} lots, %: ε = {last['paper ε']:.2f} by Theorem 1, "
        f"{last['tight ε']:.2f} tightly"
    )
    cells = []
    ours, theirs = (final(rows, method=method) for method in ("AdaDP", "published AdaDP"))
    for method in values(rows, "method"):
        found = final(rows, method=method)
        leads = [f"{fmean(best) - fmean(found):+.1f}" if method in LEADS else "" for best in (theirs, ours)]
        cells.append([marked(method), shown(found), LEADS.get(method, ""), *leads])
    cells.append(["DP-AGD", "not run", LEADS["DP-AGD"], "", ""])
    head = ["", "accuracy", "AdaDP's lead, the paper says", "lead of published AdaDP ✗", "lead of AdaDP"]
    return [Grid(caption, head, cells, CROSS)]


def draw(rows: list[Row]) -> Any:
    figure, grid = canvas(1, 1, width=5.2)
    lines(grid[0, 0], rows)
    grid[0, 0].set(
        xlabel="lots", ylabel="test accuracy, %", title="CIFAR-10, frozen random convolutions, σ = 6"
    )
    key(figure, grid, 3)
    return figure
