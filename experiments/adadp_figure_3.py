"""AdaDP, Figure 3: accuracy on CIFAR-10 (Xu et al. 2020).

Two frozen convolutions of 64 filters, 384 and 192 units, lots of 2,000, noise 6, clip 3, δ = 1e-5. The
paper's three levels of privacy are one noise at three lengths of training: 854, 3,236 and 11,455 lots by its
own Theorem 1, for ε = 2, 4 and 8. Here 3,236 are run: half a minute a run on a GPU, hours on two cores. Steps
of DP-SGD, AdaL and AdaDP are the best of three to five that were tried on 10,000 held-out training images;
DpOpt has DP-SGD's. The paper's convolutions were trained on CIFAR-100; ours are random filters, so that only
the order of methods can be compared.
"""

from statistics import fmean
from typing import Any

from experiments import pictures
from experiments.deep import CROSS, Setting, key, lines, marked, rows_of, shown
from experiments.frame import Grid, Row, Size, canvas, values

DELTA, NOISE, LOT, CLIP, LOTS, RUNS = 1e-5, 6.0, 2000, 3.0, 3236, 3
STEPS = {
    "not private": 0.0003,
    "published AdaDP": 0.002,
    "AdaDP": 0.0025,
    "DP-SGD": 0.02,
    "DpOpt": 0.02,
    "AdaL": 0.0012,
}
SHORT = {  # for a hundred lots, as in Table I and Figure 4
    "published AdaDP": 0.004,
    "AdaDP": 0.004,
    "DP-SGD": 0.1,
    "AdaL": 0.004,
    "AdaN": 0.1,
    "published AdaN": 0.1,
}
LEVELS = 854, LOTS  # lots at which the paper counts ε = 2 and 4
METHODS = ("not private", "published AdaDP", "AdaDP", "DP-SGD", "DpOpt", "AdaL")
LEADS = {"DP-SGD": "3.2 / 5.3 / 4.8", "DP-AGD": "8.5 / 8.0 / 6.9", "DpOpt": "2.1 / 3.5 / 3.2"}


def setting(
    problem: pictures.Problem, method: str, run: int, small: bool,
    noise: float = NOISE, delta: float = DELTA, lots: int = LOTS,
) -> Setting:  # fmt: skip
    """The setting of every method on CIFAR-10."""
    return Setting(
        method=method, epsilon=8.0, delta=delta, noise=noise, lot=min(LOT, len(problem.rows) // 10),
        lots=12 if small else lots, clip=CLIP, step=(STEPS if lots == LOTS else SHORT)[method], momentum=0.9,
        run=run,
    )  # fmt: skip


def measure(size: Size) -> list[Row]:
    size.only("repeats")
    problem = pictures.cifar10(size.small)
    return [
        row
        for run in range(size.repeats_or(RUNS))
        for method in METHODS
        for row in rows_of(problem, setting(problem, method, run, size.small))
    ]


def tables(rows: list[Row]) -> list[Grid]:
    places = [max(row["lots"] for row in rows if row["lots"] <= level) for level in LEVELS]
    costs = [next(row for row in rows if row["lots"] == t and "tight ε" in row) for t in places]
    both = zip(places, costs, strict=True)
    told = "; ".join(f"{t} lots: {row['paper ε']:.2f}, {row['tight ε']:.2f}" for t, row in both)
    cells = []
    for method in values(rows, "method"):
        found = [_at(rows, method, t) for t in places]
        leads = ["", ""]
        if method in LEADS:
            leads = [_leads(rows, best, method, places) for best in ("published AdaDP", "AdaDP")]
        cells.append([marked(method), *map(shown, found), LEADS.get(method, ""), *leads])
    cells.append(["DP-AGD", *["not run"] * len(places), LEADS["DP-AGD"], "", ""])
    head = [
        "",
        *(f"{t} lots" for t in places),
        "AdaDP's lead, the paper says",
        "lead of published AdaDP ✗",
        "lead of AdaDP",
    ]
    return [Grid(f"Test accuracy, %. ε by Theorem 1, and tightly: {told}", head, cells, CROSS)]


def _at(rows: list[Row], method: str, lots: int) -> list[float]:
    return [row["accuracy"] for row in rows if row["method"] == method and row["lots"] == lots]


def _leads(rows: list[Row], best: str, method: str, places: list[int]) -> str:
    return " / ".join(f"{fmean(_at(rows, best, t)) - fmean(_at(rows, method, t)):+.1f}" for t in places)


def draw(rows: list[Row]) -> Any:
    figure, grid = canvas(1, 1, width=5.2)
    lines(grid[0, 0], rows)
    grid[0, 0].set(
        xlabel="lots", ylabel="test accuracy, %", title="CIFAR-10, frozen random convolutions, σ = 6"
    )
    key(figure, grid, 3)
    return figure
