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
3. the histograms of all features on public cells, and on blocks of them, each record's counts shrunk to norm
   √q;
4. 40 gradients or more in linear coordinates, shapes and, from `SPROUT` of the steps on, trees, whose
   questions are drawn among the features that matter most so far. On the way coordinates that noise
   explains are made smaller, so that the others get less noise (`coordinates`, `shrinkage`);
5. for classes the length of the weights, as in `descent`; for numbers the mean and the spread of the target
   first, the mean square of the residuals every few steps, which moves the clipping norm, and at the end
   factors of what lines, shapes and trees tell, and the constant (`_refitted`).

The guarantee is that of Gaussian DP: every answer is a Gaussian mechanism on a sum of contributions clipped
to its bound, chosen from earlier answers, with Σμᵢ² <= μ² fixed ahead: μ-GDP by adaptive composition (Dong,
Roth & Su 2022, Cor. 3.3), under add-remove, zero-out and replace-one alike, per record, against anyone who
sees all of it. Cells and the draws of questions are public; priors, coordinates and their scales follow from
earlier answers. The number of records is public.

Constants were chosen on BANK, IPUMS-BR, California housing, MAGIC telescope, bike sharing, diamonds, KDD
census income and its weeks worked, us_cps_income, fertility and made-up tables.

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
from farthing.linear.additive.basis import BLOCKS, CELLS, VALUES, Cell
from farthing.linear.additive.coordinates import AVERAGED, SURE, WEIGHED, CoordinateBlock, Coordinates
from farthing.linear.additive.sums import (
    Crowded,
    FactorSlopes,
    GroupedSpace,
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
from farthing.linear.methods.descent import FACTORS, GRID, MARGIN, MOMENTUM
from farthing.linear.methods.leastsquares import least_squares, target
from farthing.linear.problem import Problem
from farthing.queries.bounds import ClipNorm, ClipValue
from farthing.queries.query import Step, until_spent

Array = NDArray[np.float64]

NORMS, MOMENTS, CROWDS, INSIDE, COUNTS, LENGTH, MISFIT = (
    0.01,
    0.06,
    0.005,
    0.01,
    0.035,
    0.03,
    0.04,
)  # shares of μ²
SPROUT = 0.25  # of the steps, when trees begin
STRENGTH, STRONGEST = 300.0, 4.0  # μ n at which the prior of a shape has variance 1 a level; the largest
EACH = 25.0  # the same for each of the shapes, where they are many
WORTH, MANY = 250.0, 60  # the μ n that shapes and trees need, and the number of trees
FOREST = 1.0  # the part of E|z|² that trees add, where the budget is large
TARGET = 0.01  # of μ² each, for the mean and the spread of a target
REFIT, SIZED, REFITS = 0.12, 0.2, 12  # of μ², for factors of a regression; of that, for residuals; the steps
TAIL, WIDE = 4.0, 2.0  # the largest square of a residual that counts; the clipping norm in typical ones
DOUBT = 1.0  # the deviation of factors from 1
OFTEN = 8


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
    if not shaped:
        yield from _linear(ledger, problem, why)
        return
    numbers = isinstance(problem.loss, Squared)
    left = 1 - NORMS - MOMENTS - CROWDS - INSIDE - COUNTS
    loss: Loss = problem.loss
    origin = spread = 0.0
    if numbers:
        left -= MISFIT + REFIT + 2 * TARGET
        origin, square = target(schedule, TARGET, True, Whole)
        spread = math.sqrt(square)
        loss = Standardised(origin, spread)
    counts, _ = schedule.mean(NORMS, Whole(descent.Norms(d, problem.radius * GRID)), ClipNorm(1.0))
    radius = problem.radius * float(GRID[descent.median(counts)])
    mean, scale, variances, directions = descent.standardised(schedule, MOMENTS, problem, radius, Whole)
    reach = 1 / schedule.deviation(1.0, ClipNorm(1.0))  # μ n
    mass, known = _histograms(schedule, d, mean * radius)
    features = Features(d, mean * radius, scale / radius)
    lines = _lines(features, known)
    # every shape adds to the noise of all coordinates
    strength = min(reach / max(STRENGTH, EACH * np.count_nonzero(known)), STRONGEST)
    shapes = _shapes(mass, known, strength, np.full(d, math.inf) if numbers else scale / radius)
    clear = not numbers and schedule.deviation(LENGTH / len(FACTORS), MARGIN) < descent.CLEAR
    left -= LENGTH if clear else 0.0
    covariance = _covariance(variances, directions)
    descending = Coordinates(schedule, problem, loss, left, features, covariance, shapes, lines)
    steps, rms = descending.pace.steps, 1.0

    def made(w: Array) -> AdditiveModel:
        return model(descending.space, w, _effects(descending.space, mass, w), origin, spread, why)

    asked = {steps * k // OFTEN for k in range(1, OFTEN)}  # when residuals are measured
    weighed = {round(steps * part) + 1 for part in WEIGHED}
    for t in range(1, steps + 1):
        if t in weighed:
            descending.weigh(rms)
        if trees and t == round(steps * SPROUT) + 1:
            part = FOREST * descending.size * min(1.0, reach / descending.size / 100)
            effects = _effects(descending.space, mass, descending.signal(rms))
            forest, components, directions = basis.grown(mass, effects, trees, part)
            if forest:
                descending.grow(CoordinateBlock(tuple(forest), components, directions))
        descending.step(rms, t > steps * (1 - AVERAGED))
        if numbers and t in asked:
            rms = _falling(schedule, Misfit(loss, descending.space, rms), descending.w, rms)
        if t < steps:
            yield Step(t, made(descending.found), schedule.receipts())
    w, space = descending.shrunk(rms), descending.space
    if not numbers and not clear:
        w = descent.SHORTER * w
    if numbers:
        w = _refitted(schedule, descending, w, rms)
    if clear:
        for factor in FACTORS:
            slope, noise = schedule.mean(LENGTH / len(FACTORS), Length(loss, space), MARGIN, w)
            if abs(slope[0]) > noise:
                w = w * factor ** float(-np.sign(slope[0]))
    yield Step(steps, made(w), schedule.receipts())


def _refitted(schedule: BudgetSchedule, descending: Coordinates, w: Array, rms: float) -> Array:
    """Return the weights of a regression with its parts times factors that are fitted anew, and a constant.

    Many noisy and clipped gradients leave lines, shapes and trees too long or too short, each by a factor,
    which is near 0 where shapes or trees found nothing but noise. A factor each and a constant are few
    numbers, so there is little noise on their slopes, and of a bound of the size of residuals hardly anything
    is clipped. They are found like the weights, by steps with momentum, and are drawn to 1 as strongly as
    noise requires: with noise of variance σ² on a slope, and factors of deviation `DOUBT` about 1, the
    penalty of the least error is σ² / `DOUBT`².

    Gradients of clipped residuals also lead to a constant between the mean and the median of the target. The
    bound here follows from the mean square of residuals, which few large ones tell.
    """
    place, loss, space = len(descending.lines), descending.loss, descending.space
    parts, deviations = descending.parts(w)
    measured = ClipValue(0.0, TAIL)
    square, noise = schedule.mean(REFIT * SIZED, Misfit(loss, space, 1.0), measured, w)
    rms = math.sqrt(float(np.clip(square[0] + noise, rms**2, 1.0)))
    asked = FactorSlopes(loss, space, parts / np.maximum(deviations, 1e-12))
    bound = ClipNorm(WIDE * rms * math.sqrt(len(deviations) + 1))
    part = REFIT * (1 - SIZED)
    begin = np.append(deviations, descending.height * w[place])
    drawn = schedule.deviation(part, bound) ** 2 / np.append(np.square(DOUBT * deviations), 1.0)
    rates = 1 / (len(begin) * loss.curvature + drawn)
    now, velocity, total = begin, np.zeros_like(begin), np.zeros_like(begin)
    before = np.zeros_like(begin)
    for t in range(REFITS):
        slope, noise = schedule.mean(part / REFITS, asked, bound, now)
        if float(slope @ before) < -SURE * noise * float(np.linalg.norm(slope)):
            rates, velocity = rates / 2, np.zeros_like(velocity)  # steps were too long
        before = slope
        velocity = MOMENTUM * velocity - rates * (slope + drawn * (now - begin))
        now = now + velocity
        if t >= REFITS // 2:
            total = total + now / (REFITS - REFITS // 2)
    found = parts @ (total[:-1] / np.maximum(deviations, 1e-12))
    found[place] = total[-1] / descending.height
    return np.asarray(found)


def _covariance(variances: Array, directions: Array) -> Array | None:
    """Return the covariance of standardised features from its known directions; in others it is 1."""
    if not directions.shape[1]:
        return None
    return np.asarray(np.eye(len(directions)) + (directions * (variances - 1)) @ directions.T)


def _lines(features: Features, known: NDArray[np.bool_]) -> Array:
    """Return the variance that each linear coordinate begins with: 1, and less for rare categories.

    Categories have weights of about one size, whatever their share p, so those of standardised ones grow with
    the deviation √(p (1 - p)). A column that always lies on its bounds is taken for one.
    """
    return np.where(known, 1.0, np.minimum(2 / np.asarray(features.scale), 1.0))


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
    why = f"{kind}: the budget is worth {worth:,.0f} records, a boosted model needs {WORTH:.0f}"
    return worth >= WORTH, MANY if worth >= WORTH else 0, why


def _histograms(schedule: BudgetSchedule, d: int, mean: Array) -> tuple[Array, NDArray[np.bool_]]:
    """Return the share of every code of every feature, and which features stand out of the noise."""
    grid = most_inside(d)
    crowds, _ = schedule.mean(CROWDS, Crowded(grid), ClipNorm(1.0))
    below = np.cumsum(crowds)
    most = grid[int(np.argmax(below >= 0.9 * below[-1]))] if below[-1] > 0 else d
    bound = ClipNorm(math.sqrt(max(most, 1)))
    inside, noise = schedule.mean(INSIDE, Inside(d), bound)
    known = inside > 3 * noise
    blocks, rough = schedule.mean(COUNTS / 2, Histograms(d, BLOCKS), bound)
    counts, noise = schedule.mean(COUNTS / 2, Histograms(d), bound)
    rows = zip(blocks, counts, inside * known, mean, strict=True)
    found = [basis.masses((block, row), share, (rough, noise), m) for block, row, share, m in rows]
    return np.stack(found), known


def _shapes(mass: Array, known: NDArray[np.bool_], strength: float, scales: Array) -> list[CoordinateBlock]:
    """Return the shapes of features that are known to lie between their bounds.

    ``scales`` are those of linear coordinates that may be too short, so that a shape needs a line; infinite
    where it needs none.
    """
    blocks = []
    for feature in np.flatnonzero(known):
        matrix, spread = basis.shape(mass[feature], float(scales[feature]), strength)
        if len(spread):
            cell = Cell(int(feature), matrix * math.sqrt(strength))
            blocks.append(CoordinateBlock((cell,), spread * strength))
    return blocks


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
