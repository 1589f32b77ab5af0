"""Fit linear regression by the functional mechanism: ε-DP noise on the coefficients of the loss.

Jiang, "Deep learning with differential privacy", Sections 4.2.1 and 4.2.2, after Zhang, Zhang, Xiao, Yang &
Winslett 2012 ("Functional mechanism", Algorithm 1): Σ (y - x·θ)² = θᵀa θ + b·θ + c over rows x of d + 1
entries (x₀ = 1), features and target in [-1, 1]. Laplace noise is added to a = Σ x xᵀ, whose entries (j, k)
have the joint L1 sensitivity 2 (d+1)² under replace-one, and to b = -2 Σ y x, with sensitivity 4 (d+1). The
scales are Δ₁/ε₁ and Δ₂/ε₂, where ε₁ + ε₂ = ε. ``quadratic_share`` is ε₁/ε; None divides ε in proportion to Δ₁
and Δ₂, which gives both the same noise, ε₁/ε = (d+1)/(d+3). The paper asks for ε₁ >= ε₂ without numbers. The
default, 0.7, was chosen on the tables of `docs/reproduction.md` among a few others: with many features the
proportion leaves too little for b. Both are one answer here, with b scaled by a public factor, and the
sensitivity is the sum. The minimiser of the noisy quadratic is post-processing; c does not affect it and is
not released.

Each (j, k) has independent noise, as in the paper. With ``triangle`` only j <= k is released, with
sensitivity half of (d+1)² + d + 1, and mirrored; the two are never mixed. A noisy a need not be positive
definite, and then there is no minimum: the paper leaves this open, and ``repair=False`` takes the stationary
point. ``repair`` sets negative eigenvalues of the noisy a to 0 and raises all by √(d+1) deviations of the
noise, which uses released values and public numbers only. (Zhang et al. add 4 deviations and drop the
eigenvalues that are still negative, which is too little for many features: the norm of the noise grows with
√(d+1).)

Difference from the paper: a row is bounded by its L1 norm B, Σ|x_j x_k| <= B², which is d + 1 in the cube and
at most √d + 1 for unit rows; the sensitivity under add-remove, half of the above, follows from it too.

Guarantee: one Laplace answer, ε-DP with δ = 0 under every adjacency (Dwork et al. 2006), for a ledger of
basic composition. (With another filter it spends the largest ε that the ledger affords.)

>>> import farthing as ft
>>> from farthing.linear.losses import squared
>>> x = np.linspace(0, 1, 5001)[:, None]
>>> ledger = ft.Ledger(ft.Budget(1.0, 0.0, "replace-one")).over(Table(x, 0.2 + 0.5 * x[:, 0]))
>>> u, constant = ft.run(functional(ledger, Problem(squared, 5001, 1, unit=False))).w
>>> bool(abs(u[0] - 0.5) < 0.2), round(ledger.share, 6)
(True, 1.0)
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.data.tables import Features, Table
from farthing.errors import BudgetSpent
from farthing.ledger.ledger import Ledger
from farthing.linear.budget_schedule import refuse_remainder
from farthing.linear.methods.regression import Space, ridge
from farthing.linear.problem import Problem
from farthing.noise.summing import Sum
from farthing.queries.bounds import ClipNorm, Kind
from farthing.queries.mechanisms import Laplace
from farthing.queries.query import Query, Step, until_spent
from farthing.queries.samplers import Everyone

Array = NDArray[np.float64]

_ROUNDED = 1 - 1e-12
_HALVINGS = 40


@until_spent
def functional(
    ledger: Ledger,
    problem: Problem,
    *,
    quadratic_share: float | None = 0.7,
    repair: bool = True,
    triangle: bool = False,
) -> Iterator[Step]:
    """Release the coefficients of the loss with Laplace noise, and minimise the resulting quadratic.

    Parameters
    ----------
    quadratic_share : float or None, default 0.7
        The share ε₁/ε of the budget for a; the rest, ε₂, pays for b. None divides the budget in proportion to
        their sensitivities.
    repair : bool, default True
        Whether to raise the eigenvalues of a quadratic without a minimum. False takes its stationary point,
        as in the paper.
    triangle : bool, default False
        Whether to release each pair of coefficients (j, k) and (k, j) once.
    """
    space = Space.of(problem)
    features, size = space.features, space.features.size
    reach = (math.sqrt(problem.width) if problem.unit else float(problem.width)) + problem.intercept
    contribution = Coefficients(features, reach, 1 - space.most, 1 / space.most, triangle)
    if quadratic_share is not None:
        share = validate.probability(quadratic_share=quadratic_share)
        louder = contribution.square * (1 - share) / (2 * reach * share)
        contribution = replace(contribution, louder=louder)
    bound = ClipNorm(contribution.least, order=1)
    mechanism = _mechanism(ledger, contribution, bound)
    answer = ledger.ask(Query(Everyone(), contribution, bound, mechanism))
    a, b = answer.value[:-size], answer.value[-size:] / contribution.louder
    deviation = math.sqrt(2) * mechanism.noise_multiplier * bound.norm(1)
    if triangle:
        a = _mirrored(a, size)
    else:
        a = a.reshape(size, size)
        a, deviation = (a + a.T) / 2, deviation / math.sqrt(2)
    a = a + ridge(features, problem.penalty)
    if repair:
        values, vectors = np.linalg.eigh(a)
        raised = np.maximum(values, 0.0) + deviation * math.sqrt(size)
        w = vectors @ ((b @ vectors) / (-2 * raised))
    else:
        w = np.linalg.lstsq(2 * a, -b, rcond=None)[0]
    yield Step(1, features.unfold(space.start + space.most * w), (answer.receipt,))


def _mechanism(ledger: Ledger, contribution: "Coefficients", bound: ClipNorm) -> Laplace:
    """Return the least noise that fits: ε of the budget under basic composition, less under other filters."""

    def fits(epsilon: float) -> bool:
        return ledger.affords(Query(Everyone(), contribution, bound, laplace(epsilon)))

    def laplace(epsilon: float) -> Laplace:
        return Laplace(bound.sensitivity(ledger.budget.adjacency, 1) / (bound.norm(1) * epsilon))

    refuse_remainder(ledger, "a Laplace answer")
    low = high = ledger.budget.epsilon * _ROUNDED
    while not fits(low):
        low /= 2
        if low < high * 2.0**-_HALVINGS:
            raise BudgetSpent(f"nothing that a Laplace answer could use is left of {ledger.budget}")
    for _ in range(_HALVINGS if low < high else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return laplace(low)


def _mirrored(entries: Array, size: int) -> Array:
    matrix = np.zeros((size, size))
    upper = np.triu_indices(size)
    matrix[upper] = entries
    matrix.T[upper] = entries
    return matrix


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Σ [z zᵀ; -2 louder t z] as one row, with |z| <= 1 in every entry, |z|₁ <= ``reach`` and |t| <= 1.

    t is stretch (y - origin). With ``triangle`` only the upper triangle of z zᵀ, row by row.
    """

    features: Features
    reach: float
    origin: float
    stretch: float
    triangle: bool = False
    louder: float = 1.0
    honours: ClassVar[tuple[str, ...]] = (Kind.L1_NORM,)

    @property
    def shape(self) -> tuple[int, ...]:
        size = self.features.size
        return (size * (size + 1) // 2 + size if self.triangle else size * size + size,)

    @property
    def square(self) -> float:
        """Return the bound on Σ|z_j z_k|; with |z| <= 1, Σ z² <= Σ|z| <= reach."""
        return (self.reach**2 + self.reach) / 2 if self.triangle else self.reach**2

    @property
    def least(self) -> float:
        """Return that bound plus that on 2 louder Σ|t z_j|."""
        return self.square + self.louder * 2 * self.reach

    def bounded_sum(self, records: Table, w: Any, bound: ClipNorm) -> Array:
        size = self.features.size
        squares, linear = Sum(len(records), (size, size)), Sum(len(records), (size,))
        for block in records.blocks(self.features):
            rows = np.clip(block.rows(self.features), -1.0, 1.0)
            rows = ClipNorm(self.reach, order=1).apply(rows)
            with np.errstate(over="ignore"):
                target = np.clip(np.nan_to_num(self.stretch * (block.y - self.origin)), -1.0, 1.0)
            squares.add(rows.T @ rows, len(rows))
            linear.add(-2 * target @ rows, len(rows))
        square = squares.value
        entries = square[np.triu_indices(len(square))] if self.triangle else square.ravel()
        return np.concatenate([entries, self.louder * linear.value])
