"""Runs of a network by any method that AdaDP's paper compares, and what they cost by two counts.

AdaDP, AdaN, AdaL, DpOpt, DP-SGD and DP-AGD are farthing's: one ledger pays for DpPCA and for every batch, and
refuses what its budget does not cover. Those of `experiments.published` are Algorithm 1 as printed: they
guarantee nothing and are here for comparison.

Costs: `published_epsilon` counts as the paper does (its Theorem 1, orders 2 to 64, DpPCA left out); `epsilon`
is tight and counts DpPCA as well, add-remove, against anyone who does not see who is in a batch.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean, pstdev
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import farthing as ft
from experiments.frame import COLOURS, INK, Row, say, stream, values
from experiments.pictures import DEVICE, LENGTH, Problem, kept
from experiments.published import UNSOUND, published
from farthing.accounting import calibrate, pld, rdp
from farthing.accounting.filters import RdpFilter, ZcdpFilter
from farthing.data.tables import Features, Table
from farthing.linear.budget_schedule import at_price
from farthing.linear.methods.dppca import Scatter, components
from farthing.queries.bounds import Bound, ClipOuter, Kind
from farthing.queries.events import ComposedEvent, Event, GaussianEvent, PoissonEvent, RepeatedEvent
from farthing.queries.mechanisms import SymmetricGaussian
from farthing.queries.query import Query
from farthing.queries.samplers import Everyone
from farthing.torch.gradients.clipping import ClipLayers
from farthing.torch.methods.adadp import AdaDP, AdaL
from farthing.torch.methods.dpagd import dpagd
from farthing.torch.methods.dpopt import DpOpt
from farthing.torch.training.loop import train
from farthing.torch.training.records import Examples

LOSS = nn.CrossEntropyLoss(reduction="none")
ORDERS = np.arange(2.0, 65.0)
PART = 0.05  # of DP-AGD's budget for DpPCA
ROUNDS = 20  # of DP-AGD, if no gradient is bought again
BATCHES = "DP-AGD on batches"  # as AdaDP's authors ran it, every batch charged as what it is
AGD: dict[str, type[ZcdpFilter] | type[RdpFilter]] = {"DP-AGD": ZcdpFilter, BATCHES: RdpFilter}
MARKS = 16  # looks at the test images along a run

Marks = int | tuple[int, ...]  # so many looks or a few more, or the batches after which to look


class Exponential(NamedTuple):
    """A learning rate that falls by the same factor after every batch, to ``to`` in the end."""

    to: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One run: ``noise`` over the clip and ``pca`` over 1 are standard deviations, ``step`` a learning rate.

    ``clip`` is a norm of the whole gradient, or one norm a layer. ``falls`` is what the rate falls to,
    linearly along the first ten epochs where it is a number; ``factor`` is β.
    """

    method: str
    epsilon: float
    delta: float
    noise: float
    lot: int
    lots: int
    clip: float | tuple[float, ...]
    step: float
    pca: float | None = None
    falls: float | Exponential | None = None
    momentum: float = 0.0
    factor: float = 1.2
    run: int = 0


Run = tuple[Setting, Marks, Row]  # what else its rows say


def measured(problem: Problem, runs: Iterable[Run]) -> list[Row]:
    """The rows of all runs."""
    return [row for setting, marks, more in runs for row in rows_of(problem, setting, marks, **more)]


def curve(problem: Problem, setting: Setting, marks: Marks = MARKS) -> list[tuple[int, float]]:
    """(lots so far, test accuracy in percent) along one run."""
    place = (problem.name, problem.widths, len(problem.rows), setting, *(() if marks == MARKS else (marks,)))
    found = kept(place, lambda: list(_curve(problem, setting, marks)))
    say(f"{problem.name}, {setting.method}, ε {setting.epsilon:g}, run {setting.run}: {found[-1][1]:.2f} %")
    return [(int(t), float(right)) for t, right in found]


def rows_of(problem: Problem, setting: Setting, marks: Marks = MARKS, **more: object) -> list[Row]:
    """A curve as rows, with what it had cost: by the paper's count, and truly where there is a guarantee."""
    rate, rows = setting.lot / len(problem.rows), list[Row]()
    for t, accuracy in curve(problem, setting, marks):
        row: Row = {**more, "method": setting.method, "run": setting.run, "lots": t, "accuracy": accuracy}
        if setting.method not in ("not private", *AGD):
            row["paper ε"] = published_epsilon(setting.noise, rate, t, setting.delta)
            if setting.method not in UNSOUND:
                row["tight ε"] = epsilon(setting.noise, rate, t, setting.delta, setting.pca)
        rows.append(row)
    return rows


@lru_cache
def _theorem(noise: float, rate: float) -> Any:
    return rdp.adadp_theorem_1(noise, rate, ORDERS)


def published_epsilon(noise: float, rate: float, lots: int, delta: float) -> float:
    """ε as the paper counts it."""
    return rdp.classic_epsilon(lots * _theorem(noise, rate), ORDERS, delta)[0]


def published_lots(noise: float, rate: float, limit: float, delta: float) -> int:
    """How many lots the paper's count lets run."""
    costs, rest = _theorem(noise, rate), np.log(1 / delta) / (ORDERS - 1)
    return int(np.max(np.where(rest < limit, (limit - rest) / costs, 0.0)))


@lru_cache
def epsilon(noise: float, rate: float, lots: int, delta: float, pca: float | None) -> float:
    """ε by tight accounting, DpPCA included."""
    return pld.epsilon(_plan(noise, rate, lots, pca), delta)


@lru_cache
def fitting(rate: float, lots: int, budget: ft.Budget, pca: float | None) -> float:
    """The noise with which so many lots, and DpPCA before them, spend the budget, by tight accounting."""
    return calibrate.noise(lambda noise: _plan(noise, rate, lots, pca), budget)


def _plan(noise: float, rate: float, lots: int, pca: float | None) -> Event:
    steps = RepeatedEvent(PoissonEvent(rate, GaussianEvent(noise)), lots)
    return steps if pca is None else ComposedEvent((GaussianEvent(pca), steps))


def _curve(problem: Problem, setting: Setting, marks: Marks) -> Iterator[tuple[int, float]]:
    model = problem.network(setting.run)
    if setting.method == "not private":
        rows, held = _seen(problem, None, setting)
        yield from _plain(model, rows, problem, held, setting, marks)
    elif setting.method in UNSOUND:
        rows, held = _seen(problem, None, setting)
        for t in published(model, LOSS, rows, problem.labels, setting):
            if _mark(t, setting.lots, marks):
                yield t, right(model, held, problem.answers)
    else:
        yield from _private(model, problem, setting, marks)


def _private(
    model: nn.Sequential, problem: Problem, setting: Setting, marks: Marks
) -> Iterator[tuple[int, float]]:
    budget, noise = ft.Budget(setting.epsilon, setting.delta), stream(problem.name, repr(setting))
    if setting.method in AGD:
        yield from _agd(
            model, problem, setting, ft.Ledger(budget, filter=AGD[setting.method], stream=noise), marks
        )
        return
    ledger = ft.Ledger(budget, stream=noise)
    rate = setting.lot / len(problem.rows)
    if setting.pca is not None:
        ledger.promise(_moments(problem, setting.pca), 1)
        ledger.promise(ft.Poisson(rate).amplify(ft.Gaussian(setting.noise)), setting.lots)
    rows, held = _seen(problem, ledger, setting)
    optimizer = method(model, setting)
    falling = None
    if setting.falls is not None:
        falling = torch.optim.lr_scheduler.LambdaLR(optimizer, _falling(setting, rate))
    for step in train(
        model, LOSS, (rows, problem.labels), ledger, sampling_rate=rate, steps=setting.lots,
        noise_multiplier=setting.noise, clip_norm=clipping(model, optimizer, setting), optimizer=optimizer,
        scheduler=falling, physical_batch_size=4096 if DEVICE.type == "cuda" else None,
    ):  # fmt: skip
        if _mark(step.t, setting.lots, marks):
            yield step.t, right(model, held, problem.answers)


def _agd(
    model: nn.Sequential, problem: Problem, setting: Setting, ledger: ft.Ledger, marks: Marks
) -> Iterator[tuple[int, float]]:
    """DP-AGD: some `ROUNDS` of all records, or batches of ``lot`` until the budget or ``lots`` of them end.

    On batches the first gradient has the setting's noise, and later ones what Algorithm 2 buys. A fifth of a
    round's ρ pays for its choice, with Gumbel noise: what AdaDP's authors spent on choices is not given.
    """
    rows, held = _seen(problem, ledger, setting)
    clip = setting.clip if isinstance(setting.clip, float) else math.hypot(*setting.clip)
    how: dict[str, Any] = {"splits": ROUNDS / (1 - PART)}
    if setting.method == BATCHES:
        rate = setting.lot / len(problem.rows)
        how = {"sampling_rate": rate, "noise_multiplier": setting.noise, "momentum": setting.momentum}
    taken, examples = 0, Examples((rows, problem.labels))
    for step in dpagd(ledger, model, LOSS, examples, clip_norm=clip, physical_batch_size=4000, **how):
        taken = step.t
        if taken % 2 == 0 if setting.method != BATCHES else _mark(taken, setting.lots, marks):
            yield taken, right(model, held, problem.answers)
        if setting.method == BATCHES and taken == setting.lots:
            return
    yield taken if setting.method == BATCHES else ROUNDS, right(model, held, problem.answers)


def _falling(setting: Setting, rate: float) -> Callable[[int], float]:
    """The learning rate after t batches, over the first."""
    if isinstance(setting.falls, Exponential):
        factor = (setting.falls.to / setting.step) ** (1 / setting.lots)
        return lambda t: factor**t
    ten, end = 10 / rate, (setting.falls or 0.0) / setting.step
    return lambda t: 1 - (1 - end) * min(1.0, t / ten)


def method(model: nn.Module, setting: Setting) -> Any:
    """The optimiser of a method; those that are an `AdaDP` bring a clip of their own."""
    clip = setting.clip if isinstance(setting.clip, float) else math.hypot(*setting.clip)
    match setting.method:
        case "AdaL":
            return AdaL(model, setting.step, clip_norm=clip)
        case "AdaN":
            return AdaDP(
                model, setting.step, clip_norm=clip, adaptive_rate=False, momentum=setting.momentum, period=5
            )
        case "AdaDP":
            return AdaDP(model, setting.step, clip_norm=clip, period=5)
        case "DpOpt":
            return DpOpt(model, setting.step, clip_norm=clip, momentum=setting.momentum, period=5)
    return torch.optim.SGD(model.parameters(), setting.step, momentum=setting.momentum)


def clipping(model: nn.Sequential, optimizer: Any, setting: Setting) -> Any:
    """What `train` clips by; a method that follows scales does so by layer until it has some.

    With a norm C_l for each of k layers the noise of layer l has deviation σ √k C_l: the price of σ, as for
    one norm of all. An ellipsoid that follows has the norm √ΣC_l² in their place.
    """
    own = getattr(optimizer, "bound", None)
    if isinstance(setting.clip, float):
        return setting.clip if own is None else own
    sizes = tuple(sum(p.numel() for p in layer.parameters()) for layer in model if list(layer.parameters()))
    layers = ClipLayers(setting.clip, sizes, setting.clip)

    def bound(t: int) -> Bound:
        found: Bound = layers if own is None else own(t)
        return layers if isinstance(found.scale, float) else found

    return bound


def _plain(
    model: nn.Sequential, rows: Tensor, problem: Problem, held: Tensor, setting: Setting, marks: Marks
) -> Iterator[tuple[int, float]]:
    """RMSprop on lots of the same kind, nothing clipped and no noise."""
    optimizer, random = torch.optim.RMSprop(model.parameters(), setting.step), np.random.default_rng(0)
    for t in range(1, setting.lots + 1):
        places = torch.from_numpy(random.choice(len(rows), setting.lot, replace=False)).to(rows.device)
        optimizer.zero_grad()
        LOSS(model(rows[places]), problem.labels[places]).mean().backward()
        optimizer.step()
        if _mark(t, setting.lots, marks):
            yield t, right(model, held, problem.answers)


@torch.no_grad()
def right(model: nn.Module, rows: Tensor, answers: Tensor) -> float:
    """Percent of rows that are labelled right."""
    parts = zip(rows.split(2000), answers.split(2000), strict=True)
    return 100 * sum(int((model(part).argmax(1) == y).sum()) for part, y in parts) / len(answers)


def _mark(t: int, lots: int, marks: Marks) -> bool:
    return t == lots or (t in marks if isinstance(marks, tuple) else t % max(1, lots // marks) == 0)


class _Known:
    """The exact sum of a contribution, found once: noise is drawn anew for every ledger that asks."""

    found: dict[str, Any] = {}  # noqa: RUF012  one for all
    honours, shape = (Kind.OUTER,), None

    def __init__(self, problem: Problem) -> None:
        width = problem.rows.shape[1]
        self.name, self.inner = problem.name, Scatter(Features(width, intercept=0.0), np.zeros(width))

    def bounded_sum(self, records: Table, w: Any, bound: ClipOuter) -> Any:
        place = f"{self.name} {len(records)} {bound}"
        if place not in self.found:
            self.found[place] = self.inner.bounded_sum(records, w, bound)
        return self.found[place].copy()


def _moments(problem: Problem, noise: float) -> Query:
    return Query(Everyone(), _Known(problem), ClipOuter(1.0), SymmetricGaussian(noise))


def _seen(problem: Problem, ledger: ft.Ledger | None, setting: Setting) -> tuple[Tensor, Tensor]:
    """What the network is given: rows along DpPCA's axes, its answer asked of the ledger.

    Without a ledger (methods that have no guarantee) the same noise comes from a ledger that pays for it
    alone, or none at all is added.
    """
    parts = (problem.rows, problem.held)
    if problem.components is not None:
        if setting.method == "not private":
            matrix = problem.rows.T @ problem.rows
        else:
            if ledger is None:
                place = stream(problem.name, repr(replace(setting, method="DpPCA")))
                ledger = ft.Ledger(ft.Budget(50.0, setting.delta), stream=place)
            query = _moments(problem, setting.pca or 1.0)
            if isinstance(ledger.filter, ZcdpFilter):
                query = at_price(query, PART * ledger.filter.rho, ledger.filter)
            matrix = ledger.over(Table(problem.rows)).ask(query).value
        axes = components(matrix, problem.components)[1]
        parts = (LENGTH * problem.rows @ axes.T, LENGTH * problem.held @ axes.T)
    rows, held = (torch.from_numpy(np.ascontiguousarray(part)).float().to(DEVICE) for part in parts)
    return rows, held


def final(rows: list[Row], **where: object) -> list[float]:
    """The accuracy at the end of every run among the rows with these values."""
    ends: dict[object, float] = {}
    for row in rows:
        if all(row.get(key) == wanted for key, wanted in where.items()):
            ends[row["run"]] = row["accuracy"]
    return list(ends.values())


def shown(found: list[float]) -> str:
    """Mean and standard deviation of runs."""
    if not found:
        return ""
    return f"{fmean(found):.1f}" + (f" ± {pstdev(found):.1f}" if len(found) > 1 else "")


def marked(method: str) -> str:
    """A method's name, with a cross where it guarantees nothing."""
    return f"{method} ✗" if method in UNSOUND else method


CROSS = "✗ guarantees nothing. ± is the standard deviation of runs; a cell without it is one run."
ORDER = (
    "not private",
    "published AdaDP",
    "published AdaDP, examples clipped",
    "AdaDP",
    "DP-SGD",
    "DpOpt",
    "AdaL",
    "AdaN",
    "published AdaN",
)


def lines(axes: Any, rows: list[Row]) -> None:
    """Mean accuracy along the lots, a line a method; dashed where nothing is guaranteed."""
    for method in values(rows, "method"):
        mine = [row for row in rows if row["method"] == method]
        lots = values(mine, "lots")
        heights = [fmean(row["accuracy"] for row in mine if row["lots"] == t) for t in lots]
        style, colour = "--" if method in UNSOUND else "-", COLOURS[ORDER.index(method)]
        axes.plot(lots, heights, style, color=colour, label=marked(method))


def ends(axes: Any, rows: list[Row]) -> None:
    """A cross where each run of DP-AGD on batches ended, as its budget did."""
    found = {(row["level"], row["run"]): row for row in rows if row["method"] == BATCHES}
    places = [(row["lots"], row["accuracy"]) for row in found.values()]
    axes.plot(*zip(*places, strict=True), "x", color=INK, label=f"{BATCHES}, where a budget ends")


def key(figure: Any, grid: Any, columns: int) -> None:
    """One legend for lines that may be missing in some axes, below them."""
    found = dict[str, Any]()
    for axes in grid.flat:
        found.update(dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True)))
    columns = max(1, min(columns, int(figure.get_figwidth() / 2.2)))
    figure.legend(
        found.values(), found.keys(), loc="outside lower center", ncols=columns, fontsize=8, frameon=False
    )
