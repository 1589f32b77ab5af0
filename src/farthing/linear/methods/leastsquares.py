"""Fit least squares without tuning: means, variances, second moments, then steps in whitened features.

Not one paper's. Clipped steps are those of Brown, Dvijotham, Evans, Liu, Smith & Thakurta 2024 ("Private
gradient descent for linear regression"), noisy second moments to precondition them those of Avella-Medina,
Bradshaw & Loh 2023 ("Differentially private inference via noisy optimization"). The rules for every constant
are ours and follow from public numbers: N = n μ (halved under replace-one, where everything moves twice as
far), so that 1/N is the noise on a mean whose terms have norm 1; D, the length of a row; and the bounds,
[0, 1] for features and target.

1. The mean of y (nearer to 1/2 the noisier it is), and its mean square about that: a part (17/N)² of μ²,
   from 0.01 to 0.2, each. Of the rest, 0.05 for the means of x and of its squares, which centre and scale x.
   A variance is taken for at least its noise, and at most m (1 - m), what it can be on [0, 1].
2. 0.18 for the second moments: rows z = [A (x - c); b] are clipped to max(1, 0.3 (N/D)^⅓) times their
   root mean square and Σ z zᵀ is released. Its eigenvalues, negative ones set to 0, are raised by
   √(2D) times the noise, which is the norm of the noise; A, c and b then whiten what results. Left out where
   the noise is above the trace, or D above 2500: rows are then divided by √D, so that no curvature exceeds 1
   either.
3. 10 steps of length 1 of Nesterov's method, or fewer where the released moments, less the norm of their
   noise, say that these leave less than a hundredth of any direction, and less than the noise of a step over
   all directions: with a larger budget there are more steps, up to 10. Residual · z is clipped to max(1.5,
   0.7 (N/D)^⅓) times a root mean square that a twentieth of each step's part keeps up to date (it only
   falls, at most by half).
4. The mean of the last 7 (of fewer steps the last 2), weighted by precision, times S/(S + 6E): S is the mean
   square of y, and E what the noise alone would cost, found by sending it through the recursion.

The penalty is the larger of the one asked for and 0.3/N: 1/μ records at the end of a range are below what may
be seen, and would carry a second moment of 1/N. The constants were chosen on made-up linear tables of 700 to
5,000 rows and 5 to 50 features at ε from 0.1 to 1 (docs/methods-results.md has tables that played no part).

Guarantee: each of the answers (14 with 10 steps; one fewer without the moments, and without an intercept) is
a Gaussian mechanism on a sum of clipped terms, and their parts add up to μ²: μ-GDP by adaptive composition,
under every adjacency; for a filter of GDP or zCDP. The number of records is public.

>>> import farthing as ft
>>> from farthing.linear.losses import squared
>>> from farthing.data.tables import Table
>>> x = np.linspace(0, 1, 5001)[:, None]
>>> ledger = ft.Ledger(ft.Budget(1.0, 1e-6)).over(Table(x, 0.2 + 0.5 * x[:, 0]))
>>> u, constant = ft.run(least_squares(ledger, Problem(squared, 5001, 1, unit=False))).w
>>> bool(abs(u[0] - 0.5) < 0.1), round(ledger.share, 6)
(True, 1.0)
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.data.raw import slices
from farthing.data.tables import Block, Features, Table, Weighted
from farthing.data.weighted import root, weighed
from farthing.errors import InvalidValue
from farthing.ledger.ledger import Ledger
from farthing.linear.budget_schedule import BudgetSchedule
from farthing.linear.losses import LinearGradient, squared
from farthing.linear.methods.regression import Space, ridge
from farthing.linear.problem import Problem
from farthing.noise.summing import Sum
from farthing.queries.bounds import ClipNorm, ClipOuter, ClipValue, Kind
from farthing.queries.mechanisms import SymmetricGaussian
from farthing.queries.query import Step, until_spent

Array = NDArray[np.float64]

_MEANS, _MOMENTS, _SCALE = 0.05, 0.18, 0.05  # parts: of the rest, of the rest, and of a step's
_TARGET_NOISE = 1 / 17  # y is known to 6 % of half its range
_TARGET = (0.01, 0.2)  # the least and the most of μ² for either number about y
_WIDEST = 2500  # rows whose second moments are worth their time
_SHORT, _SMALL = 1.0, 1.5  # the least clips, of rows and of their steps, in root mean squares
_TAIL, _SHRINK = 0.7, 6.0
_STEPS, _LEFT = 10, 0.01  # the most steps, and the largest share of a direction that fewer may leave


@until_spent
def least_squares(
    ledger: Ledger, problem: Problem, *, steps: int | None = None, penalty: float = 0.3
) -> Iterator[Step]:
    """Solve least squares by clipped steps, in features whitened by noisy second moments.

    Parameters
    ----------
    steps : int, optional
        The number of steps of Nesterov's method. None: 10, or what the moments call for.
    penalty : float, default 0.3
        ``penalty`` / N is the least penalty on a mean of squares, N = n μ.
    """
    Space.of(problem)  # refuses other losses
    steps = None if steps is None else validate.count(steps=steps)
    schedule, size = BudgetSchedule(ledger, problem.records), problem.width + problem.intercept
    reach = 1 / schedule.deviation(1.0, ClipNorm(1.0))  # N
    penalty = max(validate.non_negative(penalty=penalty) / reach, problem.penalty / problem.records)
    part = min(max((1 / (_TARGET_NOISE * reach)) ** 2, _TARGET[0]), _TARGET[1])
    origin, spread = target(schedule, part, problem.intercept)
    rest = 1 - part * (1 + problem.intercept)

    plain = Features(problem.width, intercept=0.0)
    features, trace = _scaled(schedule, rest * _MEANS, problem, plain, penalty)
    each = (reach / size) ** (1 / 3)
    left, clip = rest * (1 - _MEANS), max(_SHORT, 0.3 * each)
    noise = schedule.deviation(rest * _MOMENTS, ClipOuter(clip)) * math.sqrt(2 * size)  # over the trace
    if whitened := size <= _WIDEST and noise < 1:
        bound = ClipOuter(clip * math.sqrt(trace))
        scatter = RowScatter(plain, features, math.sqrt(noise * trace) / 2)
        moments, deviation = schedule.mean(rest * _MOMENTS, scatter, bound, mechanism=SymmetricGaussian)
        floor = deviation * math.sqrt(2 * size)
        features, curvature = _whitened(features, moments + ridge(features, penalty), floor)
        left, trace = left - rest * _MOMENTS, max(float(curvature.sum()), 1.0)
    else:
        shrink = 1 / math.sqrt(size)
        scale = np.asarray(features.scale) * shrink
        features = Features(features.width, features.centre, scale, features.intercept * shrink)
        curvature, trace = np.full(size, shrink**2), 1.0

    clip = max(_SMALL, 0.7 * each)
    # the norm of a step's noise over √spread, which no w with a positive R² exceeds
    noise = schedule.deviation(left / _STEPS, ClipNorm(clip)) * math.sqrt(trace * size)
    steps, averaged = _counted(steps, 2 * curvature - 1 if whitened else np.zeros(size), min(_LEFT, noise))
    rms, pull = math.sqrt(trace * spread), ridge(features, penalty)
    w, ahead, mean, precision, momentum = (*np.zeros((3, size)), 0.0, 1.0)
    # what the noise of each step adds, in the directions of the curvatures (the noise is the same in all)
    w_noise, ahead_noise, mean_noise = np.zeros((3, steps, size))
    for t in range(1, steps + 1):
        slope = Slope(features, origin, clip * rms, rms)
        answer, deviation = schedule.mean(left / steps, slope, slope.bound, ahead)
        after = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
        slide = (momentum - 1) / after
        new, new_noise = ahead + answer[:-1] - pull @ ahead, ahead_noise * (1 - curvature)
        new_noise[t - 1] += deviation
        ahead, w, momentum = new + slide * (new - w), new, after
        ahead_noise, w_noise = new_noise + slide * (new_noise - w_noise), new_noise
        if t > steps - averaged:
            mean, mean_noise = mean + w / deviation**2, mean_noise + w_noise / deviation**2
            precision += deviation**-2
        least = deviation * slope.stretch
        if least < 0.25:
            rms *= 2 * math.sqrt(min(max(answer[-1] + 0.5, least, 1 / 16), 0.25))
        if t < steps:
            yield Step(t, _on_x(features, w, origin), schedule.receipts())
    cost = float((curvature * np.square(mean_noise / precision).sum(axis=0)).sum())
    w = mean / precision * (spread / (spread + _SHRINK * cost))
    yield Step(steps, _on_x(features, w, origin), schedule.receipts())


def _counted(steps: int | None, curvature: Array, most: float) -> tuple[int, int]:
    """Return the number of steps and of those that are averaged.

    None: as few as leave less than ``most`` of directions with these curvatures (two of these are averaged),
    or `_STEPS`.
    """
    left, ahead, momentum = np.ones_like(curvature), np.ones_like(curvature), 1.0
    for t in range(1, _STEPS) if steps is None else ():
        before, left = left, ahead * (1 - curvature)
        after = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
        ahead, momentum = left + (momentum - 1) / after * (left - before), after
        if np.abs(left + before).max() < 2 * most:
            return t, 2
    steps = _STEPS if steps is None else steps
    return steps, steps - int(steps * (1 - _TAIL))


def target(
    schedule: BudgetSchedule, part: float, intercept: bool, asked: Any = lambda targets: targets
) -> tuple[float, float]:
    """Return the origin of residuals (the mean of y, or 0), and an upper bound of their mean square."""
    origin = 0.0
    if intercept:
        mean, deviation = schedule.mean(part, asked(Targets(0.5)), ClipValue(-0.5, 0.5))
        known = 1 / (1 + 12 * deviation**2)  # 1/12: the variance of what may lie anywhere in [0, 1]
        origin = float(np.clip(0.5 + known * mean[0], 0.0, 1.0))
    half = max(origin, 1 - origin) ** 2 / 2  # squares lie in [0, 2 half]: centred, a record moves half as far
    mean, deviation = schedule.mean(part, asked(Targets(origin, 2, half)), ClipValue(-half, half))
    return origin, min(max(float(mean[0]) + half, 0.0) + deviation, 0.25 if intercept else 1.0)


def _scaled(
    schedule: BudgetSchedule, part: float, problem: Problem, plain: Features, penalty: float
) -> tuple[Features, float]:
    """Return x about its mean, in units of its deviation (about 0 without an intercept), and E|z|².

    In [0, 1] the variance is at most m (1 - m) and the mean square at most m, and in any case taken for what
    exceeds the noise.
    """
    width, middle = problem.width, 0.0 if problem.unit else 0.5
    about = Features(width, middle, intercept=0.0)
    bound = ClipNorm(math.sqrt(2.0) if problem.unit else math.sqrt(width * (1 / 4 + 1 / 16)))
    value, noise = schedule.mean(part, RowMoments(plain, about), bound)
    mean, square = value[:width] + middle, value[width:]
    if problem.unit:
        problem.warn_if_alike(mean, noise)
        most, mean = np.ones(width), mean / max(1.0, float(np.linalg.norm(mean)))
    else:
        mean = np.clip(mean, 0.0, 1.0)
        most = np.maximum(mean * (1 - mean) if problem.intercept else mean, noise)
    if problem.intercept:
        variance, most = square - (mean - middle) ** 2, np.minimum(most, 0.25)
    else:
        variance, most = square + 2 * middle * mean - middle**2, np.minimum(most, 1.0)
    trusted = np.minimum(np.maximum(variance, noise), most)
    trace = float(np.clip(variance / trusted, 0.0, 1.0).sum())
    centre = mean if problem.intercept else 0.0
    features = Features(width, centre, (trusted + penalty) ** -0.5, intercept=float(problem.intercept))
    return features, max(trace, 1.0) + problem.intercept


def _whitened(features: Features, moments: Array, floor: float) -> tuple[Features, Array]:
    """Return features whose second moments are 1 if those of ``features`` are max(moments, 0) + floor.

    Also the eigenvalues of max(moments, 0) there. Eliminating the constant leaves it a coordinate of its own:
    z' = [Lᵀ (zₓ - g b/q); b/√q], for moments [[H, g], [gᵀ, q]] and L Lᵀ = (H - g gᵀ/q)⁻¹.
    """
    values, vectors = np.linalg.eigh(moments)
    values = np.maximum(values, 0.0)
    width, b = features.width, features.intercept
    inverse = (vectors / (values + floor)) @ vectors.T
    root, scale = np.linalg.cholesky(inverse[:width, :width]), _matrix(features)
    centre = np.asarray(features.centre)
    if b:
        raised = (vectors[-1] * (values + floor)) @ vectors.T  # [gᵀ, q]
        centre = centre + np.linalg.solve(scale, raised[:width]) * b / raised[-1]
        b = b / math.sqrt(raised[-1])
    return Features(width, centre, root.T @ scale, b), values / (values + floor)


def _matrix(features: Features) -> Array:
    scale = np.asarray(features.scale)
    return scale if scale.ndim == 2 else np.diag(scale)


def _on_x(features: Features, w: Array, origin: float) -> tuple[Array, Array]:
    u, constant = features.unfold(w)
    return u, np.asarray(constant + origin)


@dataclass(frozen=True, slots=True)
class Targets:
    """Σ (y - origin)^power - middle of a table, each term clipped (`ClipValue`)."""

    origin: float
    power: int = 1
    middle: float = 0.0
    honours: ClassVar[tuple[str, ...]] = (Kind.VALUE,)

    @property
    def shape(self) -> tuple[int, ...]:
        return (1,)

    def bounded_sum(self, records: Table, w: Any, bound: ClipValue) -> Array:
        total, shares = Sum(len(records), (1,)), getattr(records, "shares", None)
        for part in slices(max(1, len(records)), min(2**16, total.rows)):  # what is refused, of nobody too
            with np.errstate(over="ignore", invalid="ignore"):
                off = np.asarray(records.y[part], dtype=np.float64) - self.origin
                off = off**self.power - self.middle
                finite = shares is None and bool(np.isfinite(off.sum()))  # then every term is
            if finite:
                total.add(np.clip(off, bound.low, bound.high, out=off).sum(keepdims=True), len(off))
            else:
                each = weighed(bound.apply(off[:, None]), None if shares is None else shares[part], bound)
                total.add(each.sum(axis=0), len(each))
        return total.value


@dataclass(frozen=True, slots=True)
class RowMoments:
    """Σ [z; z²] of a table, both of a record clipped together (`ClipNorm`).

    Rows are read by ``plain``, whose norms cost little.
    """

    plain: Features
    features: Features
    honours: ClassVar[tuple[str, ...]] = (Kind.NORM,)

    @property
    def shape(self) -> tuple[int, ...]:
        return (2 * self.features.size,)

    def bounded_sum(self, records: Table, w: Any, bound: ClipNorm) -> Array:
        total, size = Sum(len(records), self.shape), self.features.size
        raw = (
            records.raw(self.plain, norms=False)
            if type(records) is Table and not self.features.intercept
            else None
        )
        centre, scale = np.asarray(self.features.centre), np.asarray(self.features.scale)
        reach = np.square(scale * np.maximum(np.abs(centre), np.abs(1 - centre)))
        clip = bound.clip
        if raw is not None and records.within and np.sqrt((reach + reach**2).sum()) <= clip * (1 + 2.0**-48):
            clip = math.inf  # no row in [0, 1] is longer, but for what `summing.SLACK` covers
        quick = None if raw is None else raw.powers(centre, scale, clip, total.rows)
        for part, count in quick or ():
            total.add(part, count)
        for block in records.blocks(self.plain) if quick is None else ():
            both = np.empty((len(block.norm), 2 * size))
            both[:, :size] = _there(self.features.rows(block.x, block.unit), block)
            with np.errstate(over="ignore", invalid="ignore"):
                np.square(both[:, :size], out=both[:, size:])
            total.add(weighed(_clipped(both, bound.clip), block.weight).sum(axis=0), len(both))
        return total.value


@dataclass(frozen=True, slots=True)
class RowScatter:
    """Σ z zᵀ of a table, each z clipped (`ClipOuter`); otherwise like `RowMoments`.

    Features in [0, 1] are rounded to whole numbers of units of at most ``coarsest``, whose products cost a
    quarter as much (`farthing.data.rounded`), unless this would need coarser ones.
    """

    plain: Features
    features: Features
    coarsest: float = 0.0
    honours: ClassVar[tuple[str, ...]] = (Kind.OUTER,)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.features.size, self.features.size)

    def bounded_sum(self, records: Table, w: Any, bound: ClipOuter) -> Array:
        total, features = Sum(len(records), (self.features.size, self.features.size)), self.features
        rounded = records.scatter(features, bound.clip, self.coarsest) if type(records) is Table else None
        if rounded is not None:
            return rounded
        raw = records.raw(self.plain, norms=False) if type(records) is Table else None
        centre, scale = np.asarray(features.centre), np.asarray(features.scale)
        quick = (
            None if raw is None else raw.moments(centre, scale, features.intercept, bound.clip, total.rows)
        )
        for _, part, count in quick or ():
            total.add(part, count)
        for block in records.blocks(self.plain) if quick is None else ():
            rows = _there(features.rows(block.x, block.unit), block)
            rows = weighed(_clipped(rows, bound.clip), root(block))
            total.add(rows.T @ rows, len(rows))
        return total.value


def _there(rows: Array, block: Block) -> Array:
    """Return rows of which those of blank records are zeros; ``block`` has no radius."""
    if block.shrink is not None:
        rows[block.shrink == 0] = 0.0
    return rows


def _clipped(rows: Array, clip: float) -> Array:
    """Clip rows in place, like `ClipNorm.apply`; a row whose squares overflow counts as zero."""
    with np.errstate(over="ignore", invalid="ignore"):
        factors = ClipNorm(clip).factors(np.sqrt(np.einsum("ij,ij->i", rows, rows)))
    if not (factors == 1).all():
        rows[factors == 0] = 0.0
        rows *= factors[:, None]
    return rows


@dataclass(frozen=True)
class Slope:
    """Σ [r z; min(|r z| / 2 rms, 1)² - 1/2] of a table, r = y - origin - z·w, with r z clipped to ``clip``.

    One answer for both: the step and what sets the next clip. In units of ``bound.scale`` the second part has
    as much of the square of the norm as `_SCALE` of the price.
    """

    features: Features
    origin: float
    clip: float
    rms: float
    honours: ClassVar[tuple[str, ...]] = (Kind.SCALED_NORM,)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.features.size + 1,)

    @property
    def least(self) -> float:
        """Terms are shrunk by ``clip``, not by the bound."""
        return self.clip / math.sqrt(1 - _SCALE)

    @property
    def stretch(self) -> float:
        """The unit of the last coordinate, that of the others being 1."""
        return 0.5 / self.clip / math.sqrt(_SCALE / (1 - _SCALE))

    @cached_property
    def bound(self) -> ClipNorm:
        """Return the bound of the terms: clip² + (1/2 / stretch)²."""
        scale = np.append(np.ones(self.features.size), self.stretch)
        return ClipNorm(self.least, scale)

    def zero(self, records: Any, w: Array, bound: ClipNorm) -> Array:
        """Return the sum over no records, for which every step asks; refuse what cannot be summed."""
        if not np.array_equal(bound.scale, self.bound.scale):
            raise InvalidValue("the bound must have the scale of Slope.bound")
        self.features.unfold(w)
        return np.zeros(self.shape)

    def bounded_sum(self, records: Table, w: Array, bound: ClipNorm) -> Array:
        if not np.array_equal(bound.scale, self.bound.scale):
            raise InvalidValue("the bound must have the scale of Slope.bound")
        u, constant = self.features.unfold(w)
        gradient = LinearGradient(squared, self.features)
        quick = gradient.quick_sum(records, u, constant + self.origin, ClipNorm(self.clip), self.rms)
        if quick is not None:
            return np.append(-quick[0], quick[1])
        total, squares = Weighted(len(records), self.features), Sum(len(records))
        for block in records.blocks(self.features):
            with np.errstate(over="ignore", invalid="ignore"):
                residual = block.y - block.margins(u, constant + self.origin)
                sizes = np.abs(residual) * block.norm
            factors = ClipNorm(self.clip).factors(sizes)
            kept = factors > 0
            if block.shrink is not None:
                kept &= block.shrink > 0  # a row of infinite norm counts for nothing, as in kernels
            total.add(block, weighed(np.where(kept, residual, 0.0) * factors, block.weight))
            shares = np.square(np.minimum(sizes[kept] / (2 * self.rms), 1.0)) - 0.5
            weight = None if block.weight is None else block.weight[kept]
            squares.add(weighed(shares, weight).sum(), len(shares))
        return np.append(total.value, squares.value)
