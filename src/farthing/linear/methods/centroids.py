"""Classify by the difference of two class means, bought in two answers, where the budget is small.

If μ n is small relative to the number of features, forty gradients and a standardisation drown in noise, and
`descent` predicts the majority. This method spends the budget on two Gaussian answers:

1. Σ [α t; s t; β s R] with t = x - c shrunk to norm R (c = 1/2 for features in [0, 1], 0 for unit rows) and
   s = ±1 the class. It gives the difference of the class means, the direction of the weights.
2. Σ [p; γ s], where p is the projection of a row onto that direction, clipped, and γ s estimates the class
   shares at the same noise. The mean of p, shifted by the class shares, is the decision boundary.

Weights are scaled for features with a variance of `VARIANCE`, minus the part that noise explains. The
constants were chosen on made-up tables of 300 to 900 rows, on scikit-learn's wine table and on its digits 0
and 1, 3 and 8.

The guarantee is that of two Gaussian mechanisms, under every adjacency: terms have norms of at most √(α² + 1
+ β²) R and √(1 + γ²), and the parts of μ² add up to 1 (adaptive composition: the direction is released).

>>> import farthing as ft
>>> from farthing.data.tables import Table
>>> from farthing.linear.losses import logistic
>>> X = np.random.default_rng(0).uniform(size=(300, 30))
>>> y = (X.mean(axis=1) > 0.5) * 1.0
>>> ledger = ft.Ledger(ft.Budget(0.5, 1e-6)).over(Table(X + 0.2 * (2 * y - 1)[:, None], y))
>>> u, constant = class_means(BudgetSchedule(ledger, 300), Problem(logistic, 300, 30, unit=False))
>>> bool(u.sum() > 0), round(ledger.share, 6)
(True, 1.0)
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from farthing.data.tables import Features, Table
from farthing.data.weighted import weighed
from farthing.linear.budget_schedule import BudgetSchedule
from farthing.linear.problem import Problem
from farthing.noise.summing import Sum
from farthing.queries.bounds import ClipNorm, Kind

Array = NDArray[np.float64]

RADIUS = 0.35  # times √features: about the norm of a row centred in its bounds
VARIANCE = 0.08
MEAN, LEAD = 0.4, 0.3  # α, β: scales of the mean of all rows and of the class shares
BORDER, REACH, SIGN = 0.4, 0.5, 0.5  # share of μ² for the boundary; range of projections; γ
PRIOR = 20.0  # precision of the prior that classes are equally frequent
_WORST = 0.9  # the largest |difference of class shares|


def class_means(schedule: BudgetSchedule, problem: Problem) -> tuple[Array, Array]:
    """Return weights and constant on x, for the remaining budget."""
    d = problem.width
    middle, radius = (0.0, 1.0) if problem.unit else (0.5, RADIUS * math.sqrt(d))
    sums = ClassSums(Features(d, middle, intercept=0.0, radius=radius))
    answer, noise = schedule.mean(1 - BORDER, sums, ClipNorm(sums.norm))
    first = float(answer[-1]) / (LEAD * radius), noise / (LEAD * radius)
    mean, lead = answer[:d] / MEAN, _lead(first)
    apart = answer[d:-1] - lead * mean
    length = float(np.linalg.norm(apart)) or 1.0
    noise *= math.hypot(1.0, lead / MEAN)
    towards, sure = apart / length, max(length - d * noise**2 / length, 0.1 * noise)
    about = mean * max(0.0, 1 - d * (noise / MEAN) ** 2 / max(float(mean @ mean), 1e-300))
    reach = REACH * (2 / math.sqrt(d) if problem.unit else 1.0)
    border = Projected(sums.features, towards / reach, -float(towards @ about) / reach)
    (p, sign), noise = schedule.mean(BORDER, border, ClipNorm(math.hypot(1.0, SIGN)))
    lead = _lead(first, (float(sign) / SIGN, noise / SIGN))
    between = 2 * sure / (1 - lead**2) / reach
    variance = VARIANCE * (1 / d if problem.unit else 1.0) / reach**2 + noise**2
    steep = between / variance
    u = towards * (steep / reach)
    constant = -steep * (p - lead * between / 2) + math.log((1 + lead) / (1 - lead))
    return u, np.asarray(constant - u @ (middle + about))


def _lead(*found: tuple[float, float]) -> float:
    """Return the difference of the class shares from noisy ones, shrunk towards 0 by the noise."""
    precise = sum(noise**-2 for _, noise in found)
    value = sum(value / noise**2 for value, noise in found)
    return float(np.clip(value / (precise + PRIOR), -_WORST, _WORST))


@dataclass(frozen=True, slots=True)
class Projected:
    """Σ [p; γ s] of p = t·towards + offset, clipped to [-1, 1], and s = ±1 the class."""

    features: Features
    towards: Array
    offset: float
    honours: ClassVar[tuple[str, ...]] = (Kind.NORM,)
    shape: ClassVar[tuple[int, ...]] = (2,)

    def bounded_sum(self, records: Table, w: Any, bound: ClipNorm) -> Array:
        total = Sum(len(records), self.shape)
        for block in records.blocks(self.features):
            known, sign = _signs(block.y)
            p = np.clip(block.rows(self.features) @ self.towards + self.offset, -1.0, 1.0) * known
            terms = bound.apply(np.stack([p, SIGN * sign], axis=1))
            total.add(weighed(terms, block.weight).sum(axis=0), len(terms))
        return total.value


def _signs(y: Array) -> tuple[NDArray[np.bool_], Array]:
    """Return which targets are 0 or 1, and ±1 for those; 0 for others."""
    known = np.isin(y, (0.0, 1.0))
    return known, np.where(known, 2 * np.nan_to_num(y) - 1, 0.0)


@dataclass(frozen=True, slots=True)
class ClassSums:
    """Σ [α t; s t; β s R] of rows t within the radius R: a term has norm at most √(α² + 1 + β²) R."""

    features: Features
    honours: ClassVar[tuple[str, ...]] = (Kind.NORM,)

    @property
    def shape(self) -> tuple[int, ...]:
        return (2 * self.features.width + 1,)

    @property
    def norm(self) -> float:
        """Return the largest norm of a term."""
        return math.sqrt(MEAN**2 + 1 + LEAD**2) * float(self.features.radius or 1.0)

    def bounded_sum(self, records: Table, w: Any, bound: ClipNorm) -> Array:
        radius = float(self.features.radius or 1.0)
        total = Sum(len(records), self.shape)
        for block in records.blocks(self.features):
            known, sign = _signs(block.y)
            rows = block.rows(self.features) * known[:, None]
            parts = [MEAN * rows, sign[:, None] * rows, (LEAD * radius * sign)[:, None]]
            terms = bound.apply(np.hstack(parts))
            total.add(weighed(terms, block.weight).sum(axis=0), len(rows))
        return total.value
