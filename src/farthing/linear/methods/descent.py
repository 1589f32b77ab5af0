"""Train by the default for classification: private standardisation, then clipped full-batch gradients.

All releases are Gaussian and full-batch, so that the budget divides exactly: shares of μ² (`SHARES`) go to

1. a histogram of row norms on a public grid, with two neighbouring cells per record: the median's cell gives
   the typical norm r (left out, with its share, if rows have norm 1 anyway);
2. means and second moments of rows u = x/r shrunk to norm 1: one symmetric matrix Σ [u uᵀ, αu/√2; αuᵀ/√2, 0],
   each term of Frobenius norm at most √(1+α²). They centre and scale the features, as far as the moments
   exceed their noise. They also show directions of large variance, along which steps are shortened, and of
   small variance, along which steps are lengthened as far as noise allows. If the matrix would be large
   (`MOST_GRAM`), only its diagonal is asked for;
3. `STEPS` gradients of z = [(x - mean) · scale; b], clipped at C √E|z|², with momentum; the result is the
   mean of the later iterates. If noise allows only steps of less than half the stable length, fewer and
   longer steps are taken instead (`FEWER`). If noise is small there are up to `LONGEST` times as many steps
   and C grows, so that a growing budget leads to the optimum without privacy. Steps may then end early:
   whenever a released gradient is mostly noise, or has little in common with the one before, the rest of the
   share buys half as many steps with less noise, down to `LAST`;
4. the derivative of the loss in the length of the weights, three times (share `LENGTH` of item 3): clipping
   and noise make weights too long or too short, which spoils probabilities. A record's term is residual ·
   margin, clamped. If its noise would be large (`CLEAR`), it is left out and weights are shortened by
   `SHORTER`. The predicted class does not depend on it, so a support vector machine omits it.

Two classes on a budget worth fewer than `FEWEST` records a feature, or `FEW` where it is worth few records
at all, are told apart by their means alone (`centroids`).

The guarantee is that of Gaussian DP: adaptively chosen Gaussian answers with Σμᵢ² <= μ² are μ-GDP (Smith &
Thakurta 2022), under the ledger's adjacency. The user sets no number of steps: under exact Gaussian
accounting more steps cost nothing (noise grows with √T and averages out again), so `STEPS` is the number that
convergence needs. Constants were chosen on the Adult, BANK and IPUMS-BR tables at ε from 0.05 to 1.6 and are
rules of public numbers (n, d, μ) only; docs/methods-results.md has the figures, and those of unseen tables.

>>> import farthing as ft
>>> from farthing.linear.losses import logistic
>>> from farthing.data.tables import Table
>>> X = np.random.default_rng(0).uniform(size=(4000, 2))
>>> ledger = ft.Ledger(ft.Budget(1.0, 1e-6)).over(Table(X, (X[:, 0] > X[:, 1]) * 1.0))
>>> u, constant = ft.run(descent(ledger, Problem(logistic, 4000, 2, unit=False))).w
>>> bool(u[0] > 1 > -1 > u[1])
True

**Other losses.** `generalised` trains regressions with other losses than squares: Huber's, a quantile's and
that of Poisson counts.

It works like `descent`, for targets that are numbers in [0, 1], with these answers, each a Gaussian sum over
all records; shares are of μ²:

1. the mean of y and its mean square about that, 0.02 each (less noise is bought by small budgets, up to 0.2):
   where to begin, and how far residuals reach. The corner of a quantile's loss is rounded off within
   `ROUNDED` of the root of the latter;
2. row norms, 0.01, then means and second moments, 0.14, to standardise features (`descent.standardised`);
3. the rest: 40 to 400 gradients, with momentum, clipped at max(`CLIP`, 0.7 (N/d)^⅓) typical ones, N = n μ;
   the answer is the mean of the later half.

With a growing budget, the number of steps, the clipping norm and the step lengths grow, so that the result
approaches the optimum without privacy.

The guarantee is that of `descent`: adaptively chosen Gaussian answers with Σμᵢ² <= μ² are μ-GDP, under every
adjacency. It holds for any loss, because gradients are clipped; the residuals of these three are bounded
anyway. The constants were chosen on made-up tables.

>>> import farthing as ft
>>> from farthing.linear.losses import Pinball
>>> from farthing.data.tables import Table
>>> x = np.linspace(0, 1, 5001)[:, None]
>>> ledger = ft.Ledger(ft.Budget(1.0, 1e-6)).over(Table(x, 0.2 + 0.5 * x[:, 0]))
>>> u, constant = ft.run(generalised(ledger, Problem(Pinball(0.5), 5001, 1, unit=False))).w
>>> bool(abs(u[0] - 0.5) < 0.1), round(ledger.share, 6)
(True, 1.0)
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.special import ndtri

from farthing.data.raw import slices
from farthing.data.tables import Block, Features, Table
from farthing.data.weighted import root, weighed
from farthing.errors import InvalidValue, Unsupported
from farthing.ledger.ledger import Ledger
from farthing.linear.budget_schedule import BudgetSchedule
from farthing.linear.losses import Huber, LinearGradient, Logistic, LogLinear, Loss, Pinball, Softmax
from farthing.linear.methods.centroids import class_means
from farthing.linear.methods.leastsquares import target
from farthing.linear.problem import Problem
from farthing.noise.summing import Sum
from farthing.queries.bounds import ClipNorm, ClipValue, Kind
from farthing.queries.mechanisms import Gaussian, SymmetricGaussian
from farthing.queries.query import Step, until_spent

Array = NDArray[np.float64]

SHARES = (0.01, 0.14, 0.85)  # of μ²: norms, moments, gradients
STEPS, MOMENTUM, AVERAGED = 40, 0.5, 0.5
MEAN_WEIGHT = 0.7  # α: means are asked for so much louder than second moments
INTERCEPT = 0.15  # b over the typical |z|
LONGEST = 10.0  # times `STEPS` at most, where noise is small
FEWER = 0.6  # times `STEPS` at least, where noise allows short steps only
AMPLE, LAST = 1.5, 8  # from so many times on, steps end early: `along`
SETTLED, UNLIKE, CLOSE = 1.3, 0.1, 4.0  # in squared lengths of the noise: `_settled`
LENGTH, CLEAR = 0.03, 0.1  # of μ², for the length of the weights; the most noise at which it is asked for
FACTORS, SHORTER = (1.5, 1.25, 1.12), 0.6  # by which weights grow or shrink; where nothing is asked
MARGIN = ClipValue(-4.0, 4.0)
LOGIT_NOISE = 2.5  # the most noise that steps may put on a typical margin
FEWEST = 0.75  # μ n a feature, below which two classes are told apart by their means alone
FEW, LITTLE = 3.0, 50.0  # the same where μ n is below `LITTLE`
MOST_GRAM, MOST_SPARSE = 1000, 300  # features of tables whose matrix is asked for, dense and sparse ones
GRID = 2.0 ** (-np.arange(25) / 4)  # row norms, relative to the largest


@until_spent
def descent(ledger: Ledger, problem: Problem) -> Iterator[Step]:
    """Descend along noisy gradients with momentum, in privately standardised features."""
    schedule = BudgetSchedule(ledger, problem.records)
    d, loss = problem.width, problem.loss
    if _drowned(schedule, problem):
        yield Step(1, class_means(schedule, problem), schedule.receipts())
        return
    for_norms, for_moments, for_gradients = SHARES
    if problem.unit:
        for_gradients, radius = for_gradients + for_norms, 1.0
    else:
        radius = median_norm(schedule, for_norms, problem)
    probable = isinstance(loss, Logistic | Softmax)
    clear = probable and schedule.deviation(LENGTH / len(FACTORS), MARGIN) < CLEAR
    for_gradients -= LENGTH if clear else 0.0
    length = SHORTER if probable and not clear else 1.0
    mean, scale, variances, directions = standardised(schedule, for_moments, problem, radius)
    height = INTERCEPT * math.sqrt(d) if problem.intercept else 0.0
    features = Features(d, mean * radius, scale / radius, height)
    per_weight = 1 / (schedule.deviation(1.0, ClipNorm(1.0)) * d)  # μ n / d
    clip = float(np.clip(per_weight / 150, 0.4, max(2.0, math.sqrt(per_weight / 250))))
    bound = ClipNorm(clip * min(loss.slope, math.sqrt(2)) * typical(d))
    gradient, w, t = LinearGradient(loss, features), problem.zeros(features.size), 0
    pace = DescentPace(for_gradients, loss.curvature, LOGIT_NOISE * min(1.0, per_weight), fewest=FEWER)
    start = problem.begin(features)
    for t, w in along(schedule, pace, gradient, bound, start, (variances, directions)):
        yield Step(t, features.unfold(length * w), schedule.receipts())
    if clear:
        w = _calibrated(schedule, gradient, w)
        yield Step(t + 1, features.unfold(w), schedule.receipts())


def typical(width: int) -> float:
    """Return the typical norm of standardised z with its constant."""
    return math.sqrt(width * (1 + INTERCEPT**2))


class DescentPace(NamedTuple):
    """How fast to descend: a part of μ² for all steps, a curvature, the most noise on a typical margin.

    ``constant_noise`` is how much of it the constant may add to every margin; ``fewest`` steps are taken at
    least, in units of `STEPS`.
    """

    part: float
    curvature: float
    margin_noise: float
    constant_noise: float = 2.0
    fewest: float = 1.0


def along(
    schedule: BudgetSchedule,
    pace: DescentPace,
    gradient: LinearGradient,
    bound: ClipNorm,
    w: Array,
    spectrum: tuple[Array, Array],
) -> Iterator[tuple[int, Array]]:
    """Yield the steps of a descent with momentum, numbered: iterates, then the mean of the later ones."""
    part, curvature, margin_noise, constant_noise, fewest = pace
    (variances, directions), d = spectrum, gradient.features.width
    height = gradient.features.intercept
    # a rate of reach would put noise of 1 on every weight in the course of all steps
    reach = (1 - MOMENTUM) / (schedule.deviation(part / STEPS, bound) * math.sqrt(STEPS))
    most = margin_noise * reach / typical(d)
    limit = most * curvature  # how long noise allows steps to be, over what is stable
    more = min(math.sqrt(limit), LONGEST) if limit >= 1 else max(fewest, min(1.0, 2 * limit))
    steps, most, reach = round(STEPS * more), most / more, reach / more
    ample = more > AMPLE
    rate = min(1 / curvature, most)
    longer = np.minimum(most, 1 / (curvature * variances)) / rate - 1
    rates = np.full(gradient.features.size, rate)
    if height:
        stable = float(np.clip(1 / more, 1.0, 2.0)) / (curvature * height**2)
        rates[-1] = min(stable, constant_noise * reach / height)
    velocity, total, count = np.zeros_like(w), np.zeros_like(w), 0
    t, left, each, first = 0, part, part / steps, steps * (1 - AVERAGED)
    before: Array | None = None
    while t < steps:
        t += 1
        slope, noise = schedule.mean(each, gradient, bound, w)
        left, last, before = left - each, before, slope.copy()
        if ample and steps - t > LAST and _settled(slope, last, noise):
            steps, first = t + max(LAST, (steps - t) // 2), t  # what is left buys fewer, with less noise
            each, before = left / (steps - t), None
        slope[:d] += directions @ ((directions.T @ slope[:d]).T * longer).T
        velocity = MOMENTUM * velocity - (slope.T * rates).T
        w = w + velocity
        if t > first:
            total, count = total + w, count + 1
        yield t, total / count if count else w


def _settled(slope: Array, before: Array | None, noise: float) -> bool:
    """Return whether a released gradient is mostly noise, or shares nothing with the one before but noise.

    A descent that has arrived goes to and fro in its own noise: gradients are longer than that of one answer,
    but point nowhere together.
    """
    one, square = slope.size * noise**2, float(np.square(slope).sum())
    if square < SETTLED * one or before is None:
        return square < SETTLED * one
    return square < CLOSE * one and float(np.vdot(slope, before)) < UNLIKE * one


def _drowned(schedule: BudgetSchedule, problem: Problem) -> bool:
    """Return whether a budget is worth too few records a feature for more than the class means."""
    plain = problem.intercept and not problem.outputs and not problem.sizes
    worth, d = 1 / schedule.deviation(1.0, ClipNorm(1.0)), problem.width
    return plain and worth < max(FEWEST * d, min(FEW * d, LITTLE))


def _calibrated(schedule: BudgetSchedule, gradient: LinearGradient, w: Array) -> Array:
    """Return the weights times a factor at which their probabilities are right."""
    for factor in FACTORS:
        slope, noise = schedule.mean(LENGTH / len(FACTORS), Stretch(gradient), MARGIN, w)
        if abs(slope[0]) > noise:
            w = w * factor ** float(-np.sign(slope[0]))
    return w


def median_norm(schedule: BudgetSchedule, part: float, problem: Problem) -> float:
    """Return the typical norm of a row, from a histogram of norms on a public grid."""
    counts, _ = schedule.mean(part, Norms(problem.width, problem.radius * GRID), ClipNorm(1.0))
    return problem.radius * float(GRID[median(counts)])


def median(counts: Array) -> int:
    """Return the first cell up to which noisy counts hold at least half of all rows."""
    below = np.cumsum(counts)
    return int(np.argmax(below >= 0.5)) if below.max() >= 0.5 else 0


def standardised(
    schedule: BudgetSchedule, part: float, problem: Problem, radius: float, asked: Any = lambda spread: spread
) -> tuple[Array, Array, Array, Array]:
    """Return mean and scale of u; of scaled u, the variances and directions that are large and not noise."""
    d = problem.width
    features = Features(d, scale=1 / radius, intercept=0.0, radius=1.0)
    bound = ClipNorm(math.hypot(1.0, MEAN_WEIGHT))
    gram = d <= (MOST_SPARSE if problem.sparse else MOST_GRAM)
    mechanism = SymmetricGaussian if gram else Gaussian
    value, noise = schedule.mean(part, asked(Spread(features, gram)), bound, mechanism=mechanism)
    mean = value[-1, :-1] * math.sqrt(2) / MEAN_WEIGHT if gram else value[:d] / MEAN_WEIGHT
    problem.warn_if_alike(mean, 2 * noise)
    if not problem.intercept:
        mean = np.zeros(d)  # without a constant nothing may be shifted
    covariance = value[:-1, :-1] - np.outer(mean, mean) if gram else np.empty(0)
    variance = covariance.diagonal() if gram else value[d:] - mean**2
    trusted = np.maximum(variance, noise)
    kept = np.maximum(variance, 0.01 * noise) / trusted
    scale = 1 / np.sqrt(trusted * kept.mean())  # so that E|z|² is about d
    if not gram:
        return mean, scale, np.zeros(0), np.zeros((d, 0))
    values, vectors = np.linalg.eigh(covariance * scale[:, None] * scale)
    edge = noise * math.sqrt(2 * np.max(scale**2) * np.sum(scale**2))
    known = values > edge
    return mean, scale, np.where(values > 1, values, np.minimum(values + edge, 1.0))[known], vectors[:, known]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Σ residual · margin, each term clamped: by how much the loss grows if all weights do."""

    gradient: LinearGradient
    honours: ClassVar[tuple[str, ...]] = (Kind.VALUE,)
    shape: ClassVar[tuple[int, ...]] = (1,)

    def bounded_sum(self, records: Table, w: Array, bound: ClipValue) -> Array:
        features, loss = self.gradient.features, self.gradient.loss
        u, constant = features.unfold(w)
        total = Sum(len(records), (1,))
        if (quick := self._quick(records, u, constant, bound)) is not None:
            return np.array([quick])
        with np.errstate(over="ignore", invalid="ignore"):
            for block in records.blocks(features):
                margins = block.margins(u, constant)
                moved = loss.residual(margins, block.y) * margins
                each = bound.apply(moved[:, None] if moved.ndim == 1 else moved.sum(axis=1, keepdims=True))
                total.add(weighed(each, block.weight, bound).sum(axis=0), len(each))
        return total.value

    def _quick(self, records: Table, u: Array, constant: Any, bound: ClipValue) -> float | None:
        """Return the sum by a kernel; None where there is none for it."""
        raw = records.raw(self.gradient.features) if type(records) is Table else None
        loss = self.gradient.kernel_loss(bound.high)
        if raw is None or loss is None or bound.low != -bound.high:
            return None
        return raw.stretch(u, constant, loss)


@dataclass(frozen=True, slots=True)
class Norms:
    """The number of rows with norms in each cell of a geometric grid, descending: two at most, 1 in all.

    A blank row, whose norm is 0, is in no cell.

    A record is divided between the two cells whose middles (of logarithms) its norm lies between. Were it
    counted in one cell, the last bits of norms would decide where records go whose norms lie at an edge, and
    one record more, which changes how others are computed, would move many of them.
    """

    width: int
    grid: Array
    honours: ClassVar[tuple[str, ...]] = (Kind.NORM,)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.grid),)

    def bounded_sum(self, records: Table, w: Any, bound: ClipNorm) -> Array:
        total, features = Sum(len(records), self.shape), Features(self.width, intercept=0.0)
        raw = records.raw(features) if type(records) is Table else None
        parts: Iterable[tuple[Array, Array | None]]
        if raw is not None and raw.places is None:
            norm = raw.factors[2]
            parts = ((norm[part], None) for part in slices(len(norm), min(2**16, total.rows)))
        else:
            parts = ((block.norm, block.weight) for block in records.blocks(features))
        for norms, weight in parts:
            total.add(self._divided(norms, 1.0 if weight is None else weight), len(norms))
        return total.value * min(1.0, bound.clip)

    def _divided(self, norms: Array, weight: Any) -> Array:
        """Return what rows of these norms add to every cell; cell k lies between edges k and k + 1."""
        last = len(self.grid) - 1
        with np.errstate(divide="ignore"):  # log 0, of a blank row
            place = np.log(norms / self.grid[0]) / math.log(self.grid[1] / self.grid[0]) - 0.5
        place, weight = np.clip(place, 0.0, last), weight * (norms > 0)
        lower = place.astype(np.int64)
        upper, share = np.minimum(lower + 1, last), place - lower
        below, above = (
            np.bincount(cells, weight * part, len(self.grid))
            for cells, part in ((lower, 1 - share), (upper, share))
        )
        return np.asarray(below + above)


@dataclass(frozen=True, slots=True)
class Spread:
    """Σ [u uᵀ, αu/√2; αuᵀ/√2, 0] of rows |u| <= 1, or only Σ [αu; u²]; a term has norm √(1+α²) at most."""

    features: Features
    gram: bool

    def __post_init__(self) -> None:
        if self.features.radius is None or self.features.radius > 1 or self.features.intercept:
            raise InvalidValue("Spread is bounded for rows within the unit ball, without a constant")

    honours: ClassVar[tuple[str, ...]] = (Kind.NORM,)

    @property
    def shape(self) -> tuple[int, ...]:
        d = self.features.width
        return (d + 1, d + 1) if self.gram else (2 * d,)

    def bounded_sum(self, records: Table, w: Any, bound: ClipNorm) -> Array:
        d = self.features.width
        sums = Sum(len(records), (d,)), Sum(len(records), (d, d) if self.gram else (d,))
        quick = self._quick(records, sums[0].rows)
        for first, second, count in quick or ():
            sums[0].add(first, count)
            sums[1].add(second, count)
        for block in records.blocks(self.features) if quick is None else ():
            if sparse.issparse(block.x) and not self.gram:
                u, each = _shrunk(block, self.features), weighed(np.ones(len(block.norm)), block.weight)
                sums[0].add(u.T @ each, u.shape[0])
                sums[1].add(u.multiply(u).T @ each, u.shape[0])
                continue
            u = block.rows(self.features)
            sums[0].add(weighed(u, block.weight).sum(axis=0), len(u))
            u = weighed(u, root(block))
            sums[1].add(u.T @ u if self.gram else np.square(u).sum(axis=0), len(u))
        first, second = sums[0].value, sums[1].value
        smaller = min(1.0, bound.clip / math.hypot(1.0, MEAN_WEIGHT))
        if not self.gram:
            return smaller * np.concatenate([MEAN_WEIGHT * first, second])
        edge = MEAN_WEIGHT / math.sqrt(2) * first
        return smaller * np.block([[second, edge[:, None]], [edge[None], np.zeros((1, 1))]])

    def _quick(self, records: Table, rows: int) -> Iterator[tuple[Array, Array, int]] | None:
        """Return Σ u and Σ u uᵀ, or Σ u², of at most so many rows each; None without a kernel."""
        raw = records.raw(self.features) if type(records) is Table else None
        centre, scale, d = (
            np.asarray(self.features.centre),
            np.asarray(self.features.scale),
            self.features.width,
        )
        if raw is None or centre.any():
            return None
        if self.gram:
            return raw.moments(centre, scale, 0.0, math.inf, rows)
        powers = raw.powers(centre, scale, math.inf, rows) if raw.stored.kind == "csr" else None
        return None if powers is None else ((part[:d], part[d:], count) for part, count in powers)


def _shrunk(block: Block, features: Features) -> Any:
    """Return sparse rows u as such, scaled and shrunk to their radius."""
    rows = sparse.diags_array(np.ones(len(block.norm)) if block.shrink is None else block.shrink)
    units = sparse.diags_array(np.ones(len(block.norm)) if block.unit is None else block.unit)
    return (rows @ units @ block.x @ sparse.diags_array(np.asarray(features.scale))).tocsr()


NORMS, MOMENTS = 0.01, 0.14
TARGETS = (0.02, 0.2)
TARGET_NOISE = 1 / 17
ROUNDED = 0.1
CLIP = 2.0
NOISE = 0.5  # the most that steps may put on a typical margin, in deviations of the target
_LEAST_MEAN = 1e-4  # of the target's bound, where logarithms begin


@until_spent
def generalised(ledger: Ledger, problem: Problem) -> Iterator[Step]:
    """Descend along noisy gradients of a regression loss, from the mean target, in standardised features."""
    if problem.outputs or not isinstance(problem.loss, Huber | Pinball | LogLinear):
        raise Unsupported(
            f"{type(problem.loss).__name__} is no loss of numbers that this solver knows: Huber, Pinball or "
            "LogLinear, of one output"
        )
    schedule, d = BudgetSchedule(ledger, problem.records), problem.width
    reach = 1 / schedule.deviation(1.0, ClipNorm(1.0))  # N
    part = min(max((1 / (TARGET_NOISE * reach)) ** 2, TARGETS[0]), TARGETS[1])
    origin, spread = target(schedule, part, problem.intercept)
    rest = 1 - part * (1 + problem.intercept)
    loss, begin, residual, curvature, unit = _known(problem.loss, origin, math.sqrt(spread))

    for_norms = 0.0 if problem.unit else NORMS * rest
    radius = 1.0 if problem.unit else median_norm(schedule, for_norms, problem)
    mean, scale, *spectrum = standardised(schedule, MOMENTS * rest, problem, radius)
    height = INTERCEPT * math.sqrt(d) if problem.intercept else 0.0
    features = Features(d, mean * radius, scale / radius, height)
    if problem.start is None and problem.intercept:
        problem = replace(problem, start=(np.zeros(d), np.asarray(begin)))
    clip = max(CLIP, 0.7 * (reach / d) ** (1 / 3))
    bound = ClipNorm(clip * residual * typical(d))
    noise = NOISE * unit * min(1.0, reach / d)  # else a small budget would predict a bound of the target
    pace = DescentPace(rest * (1 - MOMENTS) - for_norms, curvature, noise, noise)
    steps = along(
        schedule,
        pace,
        LinearGradient(loss, features),
        bound,
        problem.begin(features),
        (spectrum[0], spectrum[1]),
    )
    for t, w in steps:
        yield Step(t, features.unfold(w), schedule.receipts())


def _known(loss: Loss, origin: float, deviation: float) -> tuple[Loss, float, float, float, float]:
    """Return the loss, a margin to begin at, a typical residual, a curvature and the unit of margins.

    All follow from ``origin`` and ``deviation``, the released mean and deviation of the target.
    """
    if isinstance(loss, Huber):
        return loss, origin, min(loss.threshold, deviation), loss.curvature, deviation
    if isinstance(loss, Pinball):
        loss = replace(loss, width=ROUNDED * deviation)
        begin = float(np.clip(origin + ndtri(loss.quantile) * deviation, 0.0, 1.0))
        spread = math.sqrt(loss.quantile * (1 - loss.quantile))
        return loss, begin, spread, loss.curvature, deviation
    mean = max(origin, _LEAST_MEAN)
    return loss, math.log(mean), deviation, min(1.0, 3 * mean), 1.0
