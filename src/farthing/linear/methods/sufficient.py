"""Least squares from its sufficient statistics, released at once.

The moments of rows (x, 1, y), which hold XᵀX and Xᵀy, in one symmetric answer: what Foulds et al. 2016 and
Wang 2018 (Section 3, "SSP") call sufficient statistics perturbation, except that both matrices share one
bound, |(x, 1, y)|² <= d + 2, and so one noise. The noisy XᵀX may be indefinite; its eigenvalues are set to 0
where they are negative and raised by a quarter of the noise's norm, √(2(d+1)) deviations. That uses released
values only.

Guarantee: one Gaussian answer, μ-GDP under every adjacency (`ClipOuter`: the sum moves by at most clip² when
a record comes or goes, √2 clip² when it is replaced); for a filter of GDP or zCDP.

>>> import farthing as ft
>>> from farthing.linear.losses import squared
>>> x = np.linspace(0, 1, 5001)[:, None]
>>> ledger = ft.Ledger(ft.Budget(1.0, 1e-6)).over(Table(x, 0.2 + 0.5 * x[:, 0]))
>>> u, constant = ft.run(sufficient(ledger, Problem(squared, 5001, 1, unit=False))).w
>>> bool(0 < u[0] < 0.6), round(ledger.share, 6)
(True, 1.0)
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from farthing.data.tables import Features, Table
from farthing.data.weighted import root, weighed
from farthing.ledger.ledger import Ledger
from farthing.linear.budget_schedule import BudgetSchedule
from farthing.linear.intervals import EstimatedStep, of_moments
from farthing.linear.methods.regression import Space, ridge
from farthing.linear.problem import Problem
from farthing.noise.summing import Sum
from farthing.queries.bounds import ClipOuter, Kind
from farthing.queries.mechanisms import SymmetricGaussian
from farthing.queries.query import Step, until_spent

Array = NDArray[np.float64]

_RAISED = 0.25


@until_spent
def sufficient(ledger: Ledger, problem: Problem) -> Iterator[Step]:
    """Solves least squares from one noisy matrix of second moments, for the whole budget."""
    space, schedule = Space.of(problem), BudgetSchedule(ledger, problem.records)
    features, size = space.features, space.features.size
    bound = ClipOuter(math.sqrt(space.radius**2 + 1))
    contribution = Statistics(features, 1 - space.most, 1 / space.most)
    moments, deviation = schedule.mean(1.0, contribution, bound, mechanism=SymmetricGaussian)
    exact = None if problem.penalty else of_moments(features, moments, deviation, space.most, problem.records)
    moments[:size, :size] += ridge(features, problem.penalty / problem.records)
    values, vectors = np.linalg.eigh(moments[:size, :size])
    raised = np.maximum(values, 0.0) + _RAISED * deviation * math.sqrt(2 * size)
    w = space.start + vectors @ ((moments[:size, size] * space.most @ vectors) / raised)
    yield EstimatedStep(1, features.unfold(w), schedule.receipts(), exact)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Σ s sᵀ of a table with s = [z; stretch (y - origin)], each s clipped (`ClipOuter`)."""

    features: Features
    origin: float
    stretch: float
    honours: ClassVar[tuple[str, ...]] = (Kind.OUTER,)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.features.size + 1, self.features.size + 1)

    def bounded_sum(self, records: Table, w: Any, bound: ClipOuter) -> Array:
        total = Sum(len(records), (self.features.size + 1, self.features.size + 1))
        for block in records.blocks(self.features):
            with np.errstate(over="ignore"):
                target = self.stretch * (block.y - self.origin)
            rows = bound.rows.apply(np.column_stack([block.rows(self.features), target]))
            rows = weighed(rows, root(block))
            total.add(rows.T @ rows, len(rows))
        return total.value
