"""Classify by the nearer of two class means, bought in one answer, where a budget is worth little.

Where μ n is below the number of features, forty gradients and a standardisation drown in noise, and `descent`
predicts the majority. Here the whole budget goes into one Gaussian answer, Σ [t; s t; s R] with t = x - c
shrunk to norm R (c = 1/2 for features in [0, 1], 0 for unit rows) and s = ±1 the class. It gives both class
means and the share of the classes. The weights are the difference of the means, the border is half-way
between them; their length is that of features with a variance of `VARIANCE`, shortened by the share of it
that noise explains.

The guarantee is that of the Gaussian mechanism: a term has norm √3 R at most, under every adjacency; μ-GDP.

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

RADIUS = 0.35  # of √features: about the length of a row about the middle of its bounds
VARIANCE = 0.08
_WORST = 0.95  # the largest |share difference| of the classes that is believed


def class_means(schedule: BudgetSchedule, problem: Problem) -> tuple[Array, Array]:
    """Return weights and constant on x, for what is left of the budget."""
    d = problem.width
    middle, radius = (0.0, 1.0) if problem.unit else (0.5, RADIUS * math.sqrt(d))
    sums = ClassSums(Features(d, middle, intercept=0.0, radius=radius))
    answer, noise = schedule.mean(1.0, sums, ClipNorm(math.sqrt(3) * radius))
    mean, apart, lead = answer[:d], answer[d:-1], float(np.clip(answer[-1] / radius, -_WORST, _WORST))
    between = 2 * (apart - lead * mean) / (1 - lead**2)
    half = ((mean + apart) / (1 + lead) + (mean - apart) / (1 - lead)) / 2
    explained = 4 * noise**2 * d * (1 + lead**2) / (1 - lead**2) ** 2
    known = max(0.1, 1 - explained / max(float(between @ between), 1e-300))
    u = between * (known / VARIANCE)
    return u, np.asarray(-u @ (middle + half))


@dataclass(frozen=True, slots=True)
class ClassSums:
    """Σ [t; s t; s R] of rows t within the radius R: a term has norm √3 R at most. Targets are 0 and 1."""

    features: Features
    honours: ClassVar[tuple[str, ...]] = (Kind.NORM,)

    @property
    def shape(self) -> tuple[int, ...]:
        return (2 * self.features.width + 1,)

    def bounded_sum(self, records: Table, w: Any, bound: ClipNorm) -> Array:
        radius = float(self.features.radius or 1.0)
        total = Sum(len(records), self.shape)
        for block in records.blocks(self.features):
            known = np.isin(block.y, (0.0, 1.0))
            sign = np.where(known, 2 * np.nan_to_num(block.y) - 1, 0.0)[:, None]
            rows = block.rows(self.features) * known[:, None]
            terms = bound.apply(np.hstack([rows, sign * rows, sign * radius]))
            total.add(weighed(terms, block.weight).sum(axis=0), len(rows))
        return total.value
