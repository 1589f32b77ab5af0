"""Train additive models, and boosted trees on top, by clipped gradient steps on everybody.

Not one paper's. Additive shapes on bins are those of explainable boosting machines (Nori, Caruana, Bu, Shen &
Kulkarni 2021, "Accuracy, interpretability, and differential privacy via explainable boosting"), trees whose
structure costs nothing those of Maddock, Cormode, Wang, Maple & Jha 2022 ("Federated boosted decision trees
with differential privacy"). Different from both, a round does not fit one feature or one tree but all at
once: the gradient of the loss in all coordinates, clipped record by record, is one Gaussian answer. A shape
is not a free number a bin either: it has a smooth prior (`basis`), whose strength follows from the budget, so
that a model of a small budget is nearly linear. Where the budget is worth few records (`WORTH`), the model is
linear. Shares of μ² go to

1. norms, means and second moments of the linear coordinates, as in `farthing.linear.methods.descent`;
2. how many features of a record lie strictly between their bounds: its 0.9-quantile q bounds the next answer.
   One-hot columns never do, so a table of categories costs nothing here;
3. the histograms of all features on public cells, each record's counts shrunk to norm √q;
4. `STEPS` gradients in linear coordinates, shapes and, from `SPROUT` of the steps on, trees, whose questions
   are drawn among the features whose shapes vary most so far;
5. for classes the length of the weights, as in `descent`; for numbers the mean and the spread of the target
   first, the mean square of the residuals every few steps, which moves the clipping norm, and at the end how
   far predictions agree with the target, by which they are shortened.

The guarantee is that of Gaussian DP: every answer is a Gaussian mechanism on a sum of contributions clipped
to its bound, chosen from earlier answers, with Σμᵢ² <= μ² fixed ahead: μ-GDP by adaptive composition (Dong,
Roth & Su 2022, Cor. 3.3), under add-remove, zero-out and replace-one alike, per record, against anyone who
sees all of it. Cells, priors and the draws of questions are public. The number of records is public.

Constants were chosen on BANK, IPUMS-BR, California housing, MAGIC telescope, bike sharing and diamonds.

>>> import farthing as ft
>>> from farthing.data.tables import Table
>>> from farthing.linear.additive.basis import Binned, codes_of
>>> from farthing.linear.losses import squared
>>> X = np.random.default_rng(0).uniform(size=(9000, 1))
>>> ledger = ft.Ledger(ft.Budget(1.0, 1e-6))
>>> rows = Binned(Table(X, np.abs(2 * X[:, 0] - 1)), codes_of(X, np.zeros(1), np.ones(1)))
>>> found = ft.run(additive(ledger.over(rows), Problem(squared, 9000, 1, unit=False), trees=0)).w
>>> ends = np.array([[0.1], [0.5], [0.9]])
>>> low, middle, high = found.margins(ends, codes_of(ends, np.zeros(1), np.ones(1)))
>>> bool(middle < 0.5 < min(low, high)), round(ledger.share, 6)
(True, 1.0)
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.data.tables import Features
from farthing.ledger.ledger import Ledger
from farthing.linear.additive import basis
from farthing.linear.additive.basis import CELLS, VALUES, Cell
from farthing.linear.additive.sums import (
    Agreement,
    Crowded,
    GroupedSpace,
    GroupGradient,
    Histograms,
    Inside,
    Length,
    Misfit,
    TablesOf,
    Whole,
    most_inside,
)
from farthing.linear.budget_schedule import BudgetSchedule
from farthing.linear.losses import Loss, Squared
from farthing.linear.methods import descent
from farthing.linear.methods.descent import FACTORS, GRID, INTERCEPT, MARGIN, MOMENTUM
from farthing.linear.methods.leastsquares import least_squares, target
from farthing.linear.problem import Problem
from farthing.queries.bounds import ClipNorm, ClipValue
from farthing.queries.query import Step, until_spent

Array = NDArray[np.float64]

NORMS, MOMENTS, CROWDS, INSIDE, COUNTS, LENGTH, MISFIT = (
    0.01,
    0.12,
    0.005,
    0.01,
    0.035,
    0.03,
    0.04,
)  # shares of μ²
STEPS, AVERAGED, SPROUT = 40, 0.5, 0.35
STRENGTH = 600.0  # μ n at which the prior of a shape has variance 1 a level
WORTH, MANY = 250.0, 60  # the μ n that shapes and trees need, and the number of trees
FOREST = 1.0  # the part of E|z|² that trees add, where the budget is large
TARGET = 0.01  # of μ² each, for the mean and the spread of a target
AGREED = 3.0  # the clipping norm of margin times target, in units of the target's variance
LOGIT_NOISE, TARGET_NOISE, LONGEST, OFTEN = 2.5, 1.2, 5.0, 8


@dataclass(frozen=True, slots=True, eq=False)
class AdditiveModel:
    """Weights on rows in [0, 1], a constant, a table of every feature's cells, and trees with leaves."""

    weights: Array
    constant: Array
    tables: Array
    trees: tuple[basis.ObliviousTree, ...]
    leaves: tuple[Array, ...]
    effects: Array
    origin: float = 0.0
    scale: float = 1.0
    why: str = ""

    def margins(self, rows: Array, codes: NDArray[np.uint8]) -> Array:
        """Return the margins of rows in [0, 1] with these codes."""
        found: Array = rows @ self.weights + self.constant
        for feature, table in enumerate(self.tables):
            if table.any():
                found += table[codes[feature]]
        for tree, leaves in zip(self.trees, self.leaves, strict=True):
            found += leaves[tree.codes(codes)]
        return self.origin + self.scale * found


@until_spent
def additive(ledger: Ledger, problem: Problem, *, trees: int | None = None) -> Iterator[Step]:
    """Descends along noisy gradients in linear coordinates, smooth shapes and trees.

    Parameters
    ----------
    trees : int, optional
        The number of trees; 0 for an additive model. None chooses by μ times the number of records.
    """
    schedule, d = BudgetSchedule(ledger, problem.records), problem.width
    shaped, trees, why = _chosen(schedule, trees)
    worth = 1 / schedule.deviation(1.0, ClipNorm(1.0))
    if not shaped and (not isinstance(problem.loss, Squared) or worth < descent.LITTLE):
        yield from _linear(ledger, problem, why)
        return
    numbers, left = (
        isinstance(problem.loss, Squared),
        1 - NORMS - MOMENTS - shaped * (CROWDS + INSIDE + COUNTS),
    )
    loss: Loss = problem.loss
    origin = spread = 0.0
    if numbers:
        left -= MISFIT + LENGTH + 2 * TARGET
        origin, square = target(schedule, TARGET, True, Whole)
        spread = math.sqrt(square)
        loss = Standardised(origin, spread)
    counts, _ = schedule.mean(NORMS, Whole(descent.Norms(d, problem.radius * GRID)), ClipNorm(1.0))
    radius = problem.radius * float(GRID[descent.median(counts)])
    mean, scale, variances, directions = descent.standardised(schedule, MOMENTS, problem, radius, Whole)
    reach = 1 / schedule.deviation(1.0, ClipNorm(1.0))  # μ n
    mass, known = (
        _histograms(schedule, d, mean * radius) if shaped else (np.zeros((d, CELLS)), np.zeros(d, np.bool_))
    )
    shapes, spreads = _shapes(mass, known, reach / STRENGTH)
    size = d + float(sum(v.sum() for v in spreads))
    height = INTERCEPT * math.sqrt(size)
    features = Features(d, mean * radius, scale / radius, height)
    clear = not numbers and schedule.deviation(LENGTH / len(FACTORS), MARGIN) < descent.CLEAR
    left -= LENGTH if clear else 0.0
    pace = Pace(schedule, loss, left, size)
    rates = np.concatenate([np.full(d, pace.rate), [pace.constant(height)], *map(pace.rates, spreads)])
    longer = pace.rates(variances) / pace.rate - 1
    space, w = GroupedSpace(features, tuple(shapes)), problem.zeros(len(rates))
    velocity, total, count, rms = np.zeros_like(w), np.zeros_like(w), 0, 1.0
    noises: list[float] = []

    def made(w: Array) -> AdditiveModel:
        return model(space, w, _effects(space, mass, w), origin, spread, why)

    asked = {pace.steps * k // OFTEN for k in range(1, OFTEN)}  # when residuals are measured
    for t in range(1, pace.steps + 1):
        if trees and t == round(pace.steps * SPROUT) + 1:
            effects = _effects(space, mass, w)
            part = FOREST * size * min(1.0, reach / size / 100)
            forest, more_spreads = basis.grown(mass, effects, trees, part)
            spreads = [*spreads, *more_spreads]
            space = GroupedSpace(features, (*shapes, *forest))
            pace, more = Pace(schedule, loss, left, size + part, pace.steps), sum(map(len, more_spreads))
            rates = np.concatenate([rates, *map(pace.rates, more_spreads)])
            w, velocity, total = (_longer(each, more) for each in (w, velocity, total))
        slope, noise = schedule.mean(
            left / pace.steps, GroupGradient(loss, space), ClipNorm(pace.clip * rms), w
        )
        slope[:d] += directions @ ((directions.T @ slope[:d]).T * longer).T
        noises.append(noise)
        velocity = MOMENTUM * velocity - (slope.T * rates).T
        w = w + velocity
        if t > pace.steps * (1 - AVERAGED):
            total, count = total + w, count + 1
        if numbers and t in asked:
            rms = _falling(schedule, Misfit(loss, space, rms), w, rms)
        if t < pace.steps:
            yield Step(t, made(total / count if count else w), schedule.receipts())
    w = shrunk(space, total / count, spreads, rates, np.array(noises), loss.curvature)
    if not numbers and not clear:
        w = descent.SHORTER * w
    if numbers:
        (agreed, square), noise = schedule.mean(LENGTH, Agreement(loss, space), ClipNorm(AGREED), w)
        w = w * float(np.clip(agreed, 0.0, max(square, noise)) / max(square, noise))
    if clear:
        for factor in FACTORS:
            slope, noise = schedule.mean(LENGTH / len(FACTORS), Length(loss, space), MARGIN, w)
            if abs(slope[0]) > noise:
                w = w * factor ** float(-np.sign(slope[0]))
    yield Step(pace.steps, made(w), schedule.receipts())


def _linear(ledger: Ledger, problem: Problem, why: str) -> Iterator[Step]:
    """Yield the steps of the linear models' own default, each as a model without shapes and trees."""
    method = least_squares if isinstance(problem.loss, Squared) else descent.descent
    tables: Any = TablesOf(ledger)
    for step in method(tables, problem):
        u, constant = step.w
        cells = np.zeros((problem.width, CELLS, *u.shape[1:]))
        found = AdditiveModel(u, constant, cells, (), (), _length(u), why=why)
        yield Step(step.t, found, step.receipts)


def _chosen(schedule: BudgetSchedule, trees: int | None) -> tuple[bool, int, str]:
    """Return whether to learn shapes, how many trees to grow, and why."""
    if trees == 0:
        return True, 0, "additive: asked for"
    if trees is not None:
        return True, validate.count(trees=trees), "boosted: asked for"
    worth = 1 / schedule.deviation(1.0, ClipNorm(1.0))
    kind = "boosted" if worth >= WORTH else "linear"
    why = f"{kind}: the budget is worth {worth:.0f} records, shapes and trees need {WORTH:.0f}"
    return worth >= WORTH, MANY if worth >= WORTH else 0, why


class Pace:
    """How far and how often to step, by the rules of `descent` for coordinates with E|z|² = ``size``."""

    def __init__(
        self, schedule: BudgetSchedule, loss: Loss, part: float, size: float, steps: int | None = None
    ) -> None:
        self.curvature, typical = loss.curvature, math.sqrt(size * (1 + INTERCEPT**2))
        reach = 1 / (schedule.deviation(1.0, ClipNorm(1.0)) * size)  # μ n a coordinate
        clip = float(np.clip(reach / 150, 0.4, max(2.0, math.sqrt(reach / 250))))
        self.clip = clip * min(loss.slope, 1.5) * typical
        noise = schedule.deviation(part / STEPS, ClipNorm(self.clip)) * math.sqrt(STEPS)
        self.reach = (1 - MOMENTUM) / noise
        noisy = LOGIT_NOISE if math.isfinite(loss.slope) else TARGET_NOISE
        self.most = noisy * min(1.0, reach) * self.reach / typical
        more = float(np.clip(math.sqrt(self.most * self.curvature), 1.0, LONGEST))
        self.steps = round(STEPS * more) if steps is None else steps
        more = self.steps / STEPS
        self.most, self.reach = self.most / more, self.reach / more
        self.rate = min(1 / self.curvature, self.most)

    def rates(self, variances: Array) -> Array:
        """Return the rates of coordinates with these variances."""
        return np.minimum(self.most, 1 / (self.curvature * variances))

    def constant(self, height: float) -> float:
        """Return the rate of the constant."""
        return min(1 / (self.curvature * height**2), 2 * self.reach / height)


def shrunk(
    space: GroupedSpace, w: Array, spreads: list[Array], rates: Array, noises: Array, curvature: float
) -> Array:
    """Return weights with each group shortened by the share of its length that noise explains.

    James & Stein's factor 1 - E|noise|² / |w|², at least 0, lengths being those of the group's part of the
    margin. The noise is that of the steps, sent through their recursion with this curvature: public numbers.
    """
    w, place = w.copy(), space.features.size
    for group, spread in zip(space.groups, spreads, strict=True):
        here = slice(place, place + group.matrix.shape[1])
        found = residue(rates[here], curvature * spread, noises)
        noise = float((spread * found).sum()) * math.prod(w.shape[1:])
        length = float((spread * np.square(w[here]).T).sum())
        w[here] *= max(0.0, 1 - noise / length) if length > 0 else 0.0
        place = here.stop
    return w


def residue(rates: Array, curvatures: Array, noises: Array) -> Array:
    """Return the variance that noise leaves on averaged weights: on each, by its rate and its curvature.

    >>> bool(np.isclose(residue(np.ones(1), np.ones(1), np.array([0.0, 3.0]))[0], 9.0))
    True
    """
    steps, first = len(noises), len(noises) * (1 - AVERAGED)
    response, slope = (
        np.zeros(len(rates)),
        np.zeros(len(rates)),
    )  # of w and its velocity to noise `age` steps ago
    mean, total = np.zeros((steps + 1, len(rates))), np.zeros(len(rates))
    for age in range(1, steps + 1):
        slope = MOMENTUM * slope - rates * (1.0 if age == 1 else curvatures * response)
        response = response + slope
        total = total + response
        mean[age] = total  # the sum of the responses 1 to `age`
    parts = np.zeros(len(rates))
    averaged = steps - math.floor(first)
    for t, noise in enumerate(noises, start=1):
        early = max(math.floor(first) + 1 - t, 0)  # responses before the average begins
        parts += np.square((mean[steps - t + 1] - mean[min(early, steps)]) / averaged * noise)
    return parts


def _longer(w: Array, more: int) -> Array:
    return np.concatenate([w, np.zeros((more, *w.shape[1:]))])


def _histograms(schedule: BudgetSchedule, d: int, mean: Array) -> tuple[Array, NDArray[np.bool_]]:
    """Return the share of every code of every feature, and which features stand out of the noise."""
    grid = most_inside(d)
    crowds, _ = schedule.mean(CROWDS, Crowded(grid), ClipNorm(1.0))
    below = np.cumsum(crowds)
    most = grid[int(np.argmax(below >= 0.9 * below[-1]))] if below[-1] > 0 else d
    bound = ClipNorm(math.sqrt(max(most, 1)))
    inside, noise = schedule.mean(INSIDE, Inside(d), bound)
    known = inside > 3 * noise
    counts, noise = schedule.mean(COUNTS, Histograms(d), bound)
    rows = zip(counts, inside * known, mean, strict=True)
    return np.stack([basis.masses(row, share, noise, m) for row, share, m in rows]), known


def _shapes(mass: Array, known: NDArray[np.bool_], strength: float) -> tuple[list[Cell], list[Array]]:
    """Return the shapes of features that are known to lie between their bounds, and their variances."""
    cells, variances = [], []
    for feature in np.flatnonzero(known):
        matrix, spread = basis.shape(mass[feature])
        if len(spread):
            cells.append(Cell(int(feature), matrix * math.sqrt(strength)))
            variances.append(spread * strength)
    return cells, variances


def _effects(space: GroupedSpace, mass: Array, w: Array) -> Array:
    """Return the deviation of every feature's part of the margin, under its histogram."""
    u, _, tables = space.unfold(w)
    values = _length(u)[:, None] * VALUES
    for group, table in zip(space.groups, tables, strict=True):
        if isinstance(group, Cell):
            values[group.feature] += _length(table)
    centred = values - (mass * values).sum(axis=1, keepdims=True)
    return np.asarray(np.sqrt((mass * np.square(centred)).sum(axis=1)))


def _length(values: Array) -> Array:
    """Return the values, or the norm over classes of each."""
    return values if values.ndim == 1 else np.asarray(np.linalg.norm(values, axis=1))


def _falling(schedule: BudgetSchedule, misfit: Misfit, w: Array, rms: float) -> float:
    """Return the root mean square of residuals, which only falls, and at most by half."""
    square, noise = schedule.mean(MISFIT / (OFTEN - 1), misfit, ClipValue(0.0, 2.0), w)
    return rms * math.sqrt(float(np.clip(square[0] + noise, 0.25, 1.0)))


def model(
    space: GroupedSpace, w: Array, effects: Array, origin: float, scale: float, why: str
) -> AdditiveModel:
    """Return what weights in a space predict."""
    u, constant, tables = space.unfold(w)
    cells = np.zeros((len(u), CELLS, *w.shape[1:]))
    trees, leaves = [], []
    for group, table in zip(space.groups, tables, strict=True):
        if isinstance(group, Cell):
            cells[group.feature] += table
        elif isinstance(group, basis.ObliviousTree):
            trees.append(group)
            leaves.append(table)
    return AdditiveModel(
        u, np.asarray(constant), cells, tuple(trees), tuple(leaves), effects, origin, scale or 1.0, why
    )


@dataclass(frozen=True, slots=True)
class Standardised:
    """(m - (y - origin) / scale)² / 2: squared loss in units of the target's spread."""

    origin: float
    scale: float
    curvature: float = 1.0
    slope: float = math.inf

    def value(self, margins: Array, y: Array) -> Array:
        return np.square(self.residual(margins, y)) / 2

    def residual(self, margins: Array, y: Array) -> Array:
        return margins - (y - self.origin) / self.scale
