"""Fit least squares from its sufficient statistics, released at once.

The moments of rows (x, 1, y), which contain XᵀX and Xᵀy, are released in one symmetric answer. Foulds et al.
2016 and Wang 2018 (Section 3, "SSP") call this sufficient statistics perturbation; here both matrices share
one bound, |(x, 1, y)|² <= d + 2, and so one noise. The noisy XᵀX may be indefinite: negative eigenvalues are
set to 0 and all are raised by a quarter of the norm of the noise, √(2(d+1)) deviations. This uses released
values only.

Guarantee: one Gaussian answer, μ-GDP under every adjacency (`ClipOuter`: sensitivity clip² under add-remove,
√2 clip² under replace-one), with a GDP or zCDP filter.

>>> import farthing as ft
>>> from farthing.linear.losses import squared
>>> x = np.linspace(0, 1, 5001)[:, None]
>>> ledger = ft.Ledger(ft.Budget(1.0, 1e-6)).over(Table(x, 0.2 + 0.5 * x[:, 0]))
>>> u, constant = ft.run(sufficient(ledger, Problem(squared, 5001, 1, unit=False))).w
>>> bool(0 < u[0] < 0.6), round(ledger.share, 6)
(True, 1.0)

`adassp` fits least squares from noisy moments, with a penalty that adapts to the noise.

Wang 2018, "Revisiting differentially private linear regression: optimal and adaptive prediction & estimation
in unbounded domain", Algorithm 2. Line 1 releases the smallest eigenvalue λ of XᵀX and takes a lower bound of
it; line 2 sets the penalty to what the noise on XᵀX may amount to, less that bound; lines 3 to 5 release XᵀX
and Xᵀy and solve.

Differences from the paper. (ε/3, δ/3) three times becomes μ²/3 three times, which is exact for Gaussian
noise, so √ln(6/δ) / (ε/3) · |X|² of the paper is the deviation of that noise; the lower bound of line 1 is
its quantile ``failure`` (the paper's ϱ), not 1 - δ. The noise on XᵀX off its diagonal is 1/√2 of that on it
(`SymmetricGaussian`). Features and target are centred in their public ranges, with a constant 1 beside the
features and |X|² = d + 1 (or 2, for unit rows): with features in [0, 1] most of XᵀX would be their mean, and
the smallest eigenvalue, which decides the penalty, would be far smaller.

Guarantee: three Gaussian answers of μ²/3, so μ-GDP under every adjacency, with a GDP or zCDP filter. λ is not
a sum, but its sensitivity is |X|²: adding x xᵀ to a matrix raises each eigenvalue by 0 to |x|² (Weyl).

>>> import farthing as ft
>>> from farthing.linear.losses import squared
>>> from farthing.data.tables import Table
>>> x = np.linspace(0, 1, 5001)[:, None]
>>> ledger = ft.Ledger(ft.Budget(1.0, 1e-6)).over(Table(x, 0.2 + 0.5 * x[:, 0]))
>>> u, constant = ft.run(adassp(ledger, Problem(squared, 5001, 1, unit=False))).w
>>> bool(0 < u[0] < 0.6), round(ledger.share, 6)
(True, 1.0)
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from farthing import validate
from farthing.data.tables import Features, Table
from farthing.data.weighted import root, weighed
from farthing.errors import InvalidValue
from farthing.ledger.ledger import Ledger
from farthing.linear.budget_schedule import BudgetSchedule
from farthing.linear.intervals import EstimatedStep, of_moments
from farthing.linear.losses import Gram, LinearGradient
from farthing.linear.methods.regression import Space, ridge
from farthing.linear.problem import Problem
from farthing.noise.summing import Sum
from farthing.queries.bounds import ClipNorm, ClipOuter, ClipValue, Kind
from farthing.queries.mechanisms import SymmetricGaussian
from farthing.queries.query import Step, until_spent

Array = NDArray[np.float64]

_RAISED = 0.25


@until_spent
def sufficient(ledger: Ledger, problem: Problem) -> Iterator[Step]:
    """Solve least squares from one noisy matrix of second moments, for the whole budget."""
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


@until_spent
def adassp(ledger: Ledger, problem: Problem, *, failure: float = 0.05) -> Iterator[Step]:
    """Solve least squares from noisy moments, in three Gaussian answers.

    Parameters
    ----------
    failure : float, default 0.05
        The probability that the penalty is smaller than the noise requires.
    """
    failure = validate.probability(failure=failure)
    space, schedule = Space.of(problem), BudgetSchedule(ledger, problem.records)
    features, radius, size = space.features, space.radius, space.features.size
    # line 1
    smallest, deviation = schedule.mean(1 / 3, Smallest(features), ClipValue(0.0, radius**2))
    surely = max(float(smallest[0]) - float(ndtri(1 - failure)) * deviation, 0.0)
    # lines 3 and 4
    bound = ClipOuter(radius)
    moments, deviation = schedule.mean(1 / 3, Gram(features), bound, mechanism=SymmetricGaussian)
    limit = ClipNorm(space.most * radius)
    slope, _ = schedule.mean(1 / 3, LinearGradient(problem.loss, features), limit, space.start)
    # lines 2 and 5; all are means here, including the penalty
    penalty = max(0.0, deviation * math.sqrt(size * math.log(2 * size**2 / failure)) - surely)
    asked = ridge(features, problem.penalty / problem.records)
    strength = np.maximum(asked, penalty * np.eye(size))
    w = space.start - np.linalg.solve(moments + strength, slope)
    yield Step(1, features.unfold(w), schedule.receipts())


@dataclass(frozen=True, slots=True)
class Smallest:
    """The smallest eigenvalue of Σ z zᵀ, rows clipped to the root of the bound's upper end (`ClipValue`)."""

    features: Features
    additive: ClassVar[bool] = False
    honours: ClassVar[tuple[str, ...]] = (Kind.VALUE,)

    @property
    def shape(self) -> tuple[int, ...]:
        return (1,)

    def bounded_sum(self, records: Table, w: Any, bound: ClipValue) -> Array:
        if not bound.low <= 0 < bound.high:
            raise InvalidValue(f"an eigenvalue is not negative: the bound needs low <= 0 < high, got {bound}")
        moments = Gram(self.features).bounded_sum(records, w, ClipOuter(math.sqrt(bound.high)))
        return np.asarray(np.maximum(np.linalg.eigvalsh(moments)[:1], 0.0))
