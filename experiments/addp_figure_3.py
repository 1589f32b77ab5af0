"""A-DDP, Figure 3: the sampling composition theorem against advanced composition, and the tight value.

Cheng, Liu, Wang & Lu 2020, "Adaptive Distributed Differential Privacy with SGD", Figure 3: with p = 0.1, clip
= 3, δ = 1e-5, ε = 0.1 and T = 10 but for the one that varies, calibrate the noise of *one* iteration to (ε,
δ), let advanced composition (δ' = δ) say the total ε', and compare what each says of δ at this ε'. The paper
does not say whether the p of an iteration is counted in ε'. Both readings are shown:

* plain: advanced composition of T steps (ε, δ). Nothing here depends on p but the sampling theorem.
* amplified: each step first amplified by p, as its SGD-Adv does. Only this reading has the remark of the
  text, "when the probability of sampling becomes extremely small, Advanced Composition perform better". The
  paper's (pε, pδ) is slightly too small; ln(1 + p(e^ε - 1)) holds and is used.

The third curve is `accounting.pld` for the same rounds with Poisson draws that stay secret. Neighbours differ
by a record zeroed out, so the sum moves by the clip C. The sampling theorem is exact against an observer of
the draws; the difference of the two lower curves is the gain from keeping the draws secret. The last row
shows the reverse: ε at the δ of advanced composition, since budgets are spent in ε. The tight δ is a
certified upper bound, which includes its own numerical errors; for p below 0.01 these dominate (at p = 0.001
an integral in high precision shows less than 1e-44, where 7e-14 is certified). Its ε is not affected.
"""

from dataclasses import dataclass, replace
from typing import Any

from experiments.frame import Grid, Row, Size, canvas, legend, line, values
from farthing.accounting import composition, gaussian, pld, sampling
from farthing.budget import Adjacency
from farthing.queries.events import GaussianEvent, PoissonEvent, RepeatedEvent

CURVES = ("advanced", "sampling", "tight")
PLAIN, AMPLIFIED, SPENT = "δ at ε', plain", "δ at ε', amplified", "ε at that δ, amplified"
QUESTIONS = (PLAIN, AMPLIFIED, SPENT)
TINIEST = 1e-323  # where floats end: a δ is never printed as 0


@dataclass(frozen=True, slots=True)
class Setting:
    """The paper's own, but for the one parameter that varies."""

    p: float = 0.1
    clip: float = 3.0
    delta: float = 1e-5
    epsilon: float = 0.1
    T: int = 10


VARIED: dict[str, tuple[float, ...]] = {
    "p": (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    "clip": (0.5, 1.0, 2.0, 3.0, 4.0, 6.0),
    "delta": (1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3),
    "epsilon": (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
    "T": (1, 2, 5, 10, 20, 50, 100, 200),
}


def compare(setting: Setting) -> list[Row]:
    """A row for each question: where the curves are compared, and what each of the three says."""
    noise = gaussian.noise(setting.epsilon, setting.delta)  # over the clip, which cancels in every theorem
    event = RepeatedEvent(PoissonEvent(setting.p, GaussianEvent(noise)), setting.T)
    one = setting.epsilon, setting.delta
    found = []
    for question, step in ((PLAIN, one), (AMPLIFIED, composition.amplify_poisson(*one, setting.p))):
        total, failure = composition.advanced(*step, setting.T, slack=setting.delta)
        said = sampling.delta(noise, setting.p, setting.T, total), pld.delta(event, total, Adjacency.ZERO_OUT)
        found.append((question, total, (failure, *said)))
    said = (
        sampling.epsilon(noise, setting.p, setting.T, failure),
        pld.epsilon(event, failure, Adjacency.ZERO_OUT),
    )
    found.append((SPENT, failure, (total, *said)))
    return [
        {"question": question, "σ": noise * setting.clip, "at": at, **dict(zip(CURVES, three, strict=True))}
        for question, at, three in found
    ]


def measure(size: Size) -> list[Row]:
    size.only()
    return [
        {"varied": name, "value": value, **row}
        for name, found in VARIED.items()
        for value in (found[::4] if size.small else found)
        for row in compare(replace(Setting(), **{name: value}))
    ]


def shown(x: float, small: float = TINIEST) -> str:
    return f"{x:.3g}" if x >= small else "< 1e-323"


def tables(rows: list[Row]) -> list[Grid]:
    head = ["σ"]
    for title in ("plain", "amplified"):
        head += [f"ε', {title}", *(f"δ, {curve}" for curve in CURVES)]
    head += [f"ε, {curve}" for curve in CURVES]
    found = {(row["varied"], row["value"], row["question"]): row for row in rows}
    grids = []
    for name in values(rows, "varied"):
        cells = []
        for value in values([row for row in rows if row["varied"] == name], "value"):
            plain, amplified, spent = (found[name, value, question] for question in QUESTIONS)
            line = [f"{value:g}", f"{plain['σ']:.4g}"]
            for row in (plain, amplified):
                line += [shown(row[key]) for key in ("at", *CURVES)]
            cells.append(line + [shown(spent[curve], 0.0) for curve in CURVES])
        grids.append(Grid(f"{name} varies", [name, *head], cells, PUBLISHED))
    return grids


PUBLISHED = (
    "ε at the δ of advanced composition, amplified, in the last three columns. Published: plot only; the text"
    " says that the sampling theorem is much better than advanced composition except for extremely small p."
)


def draw(rows: list[Row]) -> Any:
    varied = [name for name in values(rows, "varied") if name != "clip"]  # which changes nothing
    figure, grid = canvas(2, len(varied), 2.4, 2.3)
    for axes_row, question in zip(grid, (AMPLIFIED, SPENT), strict=True):
        for axes, name in zip(axes_row, varied, strict=True):
            mine = [row for row in rows if (row["varied"], row["question"]) == (name, question)]
            for place, curve in enumerate(CURVES):
                heights = [row[curve] or float("nan") for row in mine]
                line(axes, [row["value"] for row in mine], heights, place, curve)
            axes.set(xscale="log", yscale="log", xlabel=LABELS[name])
            if question == AMPLIFIED:
                axes.set_ylim(1e-15, 1e-2)  # below it the tight δ goes on to 1e-51 and less
        axes_row[0].set_ylabel("δ at ε'" if question == AMPLIFIED else "ε at that δ")
    legend(figure, grid[0, 0], 3)
    return figure


LABELS = {"p": "p", "delta": "δ of an iteration", "epsilon": "ε of an iteration", "T": "T"}
