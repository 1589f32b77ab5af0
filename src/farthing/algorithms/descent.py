"""The default for classification: private standardisation, then clipped gradient steps on everybody.

All releases are Gaussian and full-batch, so that the budget divides exactly: shares of μ² (`SHARES`) go to

1. a histogram of row norms on a public grid, one cell a record: the median's cell gives the typical norm r
   (left out, with its share, where rows have norm 1 anyway);
2. means and second moments of rows u = x/r shrunk to norm 1: one symmetric matrix Σ [u uᵀ, αu/√2; αuᵀ/√2, 0],
   each term of Frobenius norm at most √(1+α²). They centre and scale the features, as far as they stand out
   of the noise, and tell directions of large variance, along which steps are shortened. Where the matrix
   would be large (`MOST_GRAM`), only its diagonal is asked for;
3. `STEPS` gradients of z = [(x - mean) · scale; b], clipped at C √E|z|², with momentum; the answer is the
   mean of the later iterates.

The guarantee is that of Gaussian DP: adaptively chosen Gaussian answers with Σμᵢ² <= μ² are μ-GDP (Smith &
Thakurta 2022), under the ledger's adjacency. Nobody names a number of steps: under exact Gaussian accounting
more of them cost nothing (noise grows with √T and averages out again), so `STEPS` is what convergence needs.
Constants were chosen on the Adult, BANK and IPUMS-BR tables at ε from .05 to 1.6 and are rules of public
numbers (n, d, μ) only; docs/methods.md has the figures, and those of tables that played no part in it.

>>> import farthing as ft
>>> from farthing.losses import logistic
>>> from farthing.tables import Table
>>> X = np.random.default_rng(0).uniform(size=(4000, 2))
>>> ledger = ft.Ledger(ft.Budget(1.0, 1e-6)).over(Table(X, (X[:, 0] > X[:, 1]) * 1.0))
>>> u, constant = ft.run(descent(ledger, Problem(logistic, 4000, 2, unit=False))).w
>>> bool(u[0] > 1 > -1 > u[1])
True
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.algorithms.problem import Problem
from farthing.algorithms.spending import gaussian_mu, noise_of
from farthing.bounds import Bound, ClipNorm
from farthing.ledger import Ledger
from farthing.losses import Gradient
from farthing.mechanisms import Gaussian, SymmetricGaussian
from farthing.query import Query, Receipt, Step, until_spent
from farthing.samplers import Everyone
from farthing.tables import Features, Table

Array = NDArray[np.float64]

SHARES = (0.01, 0.14, 0.85)  # of μ²: norms, moments, gradients
STEPS, MOMENTUM, AVERAGED = 40, 0.5, 0.5
MEAN_WEIGHT = 0.7  # α: means are asked for so much louder than second moments
INTERCEPT = 0.15  # b over the typical |z|
LOGIT_NOISE = 2.5  # the most noise that steps may put on a typical margin
MOST_GRAM = 1000
_GRID = 2.0 ** (-np.arange(25) / 4)  # row norms, relative to the largest


@until_spent
def descent(ledger: Ledger, problem: Problem) -> Iterator[Step]:
    """Noisy gradient descent with momentum in privately standardised features."""
    asking = _Asking(ledger, problem.records, gaussian_mu(ledger))
    n, d, loss = problem.records, problem.width, problem.loss
    norms, moments, gradients = (math.sqrt(share) for share in SHARES)
    if problem.unit:
        gradients, radius = math.hypot(norms, gradients), 1.0
    else:
        counts, _ = asking(Norms(d, problem.radius * _GRID), ClipNorm(1.0), norms)
        radius = problem.radius * float(_GRID[_median(counts)])
    mean, scale, large, directions = _standardise(asking, d, radius, moments)
    height = INTERCEPT * math.sqrt(d) if problem.intercept else 0.0
    features = Features(d, mean * radius, scale / radius, height)
    typical = math.sqrt(d * (1 + INTERCEPT**2))
    per_weight = asking.mu * n / d
    bound = ClipNorm(float(np.clip(per_weight / 150, 0.4, 2.0)) * min(loss.slope, math.sqrt(2)) * typical)
    deviation = asking.deviation(bound, gradients / math.sqrt(STEPS))
    reach = (1 - MOMENTUM) / (deviation * math.sqrt(STEPS))  # rate · noise of weights after all steps = reach
    rate = min(1 / loss.curvature, LOGIT_NOISE * min(1.0, per_weight) * reach / typical)
    shorter = np.minimum(1.0, 1 / (loss.curvature * rate * large)) - 1
    rates = np.full(features.size, rate)
    if height:
        rates[-1] = min(1 / (loss.curvature * height**2), 2 * reach / height)
    w = problem.zeros(features.size)
    velocity, total, count = np.zeros_like(w), np.zeros_like(w), 0
    for t in range(1, STEPS + 1):
        value, receipt = asking(Gradient(loss, features), bound, gradients / math.sqrt(STEPS), w)
        value[:d] += directions @ ((directions.T @ value[:d]).T * shorter).T
        velocity = MOMENTUM * velocity - (value.T * rates).T
        w = w + velocity
        if t > STEPS * (1 - AVERAGED):
            total, count = total + w, count + 1
        yield Step(t, features.unfold(total / count if count else w), (*asking.receipts, receipt))
        asking.receipts = ()


def _median(counts: Array) -> int:
    """The cell in which half of all (noisy) rows are at least so long."""
    below = np.cumsum(counts)
    return int(np.argmax(below >= 0.5)) if below.max() >= 0.5 else 0


def _standardise(asking: "_Asking", d: int, radius: float, share: float) -> tuple[Array, Array, Array, Array]:
    """Mean and scale of u; of scaled u, the variances and directions that are large and not noise."""
    features = Features(d, scale=1 / radius, intercept=0.0, radius=1.0)
    bound = ClipNorm(math.hypot(1.0, MEAN_WEIGHT))
    gram = d <= MOST_GRAM
    noise = asking.deviation(bound, share)
    value, receipt = asking(Spread(features, gram), bound, share, symmetric=gram)
    asking.receipts += (receipt,)
    if gram:
        mean = value[-1, :-1] * math.sqrt(2) / MEAN_WEIGHT
        covariance = value[:-1, :-1] - np.outer(mean, mean)
        variance = covariance.diagonal()
    else:
        mean = value[:d] / MEAN_WEIGHT
        variance = value[d:] - mean**2
    trusted = np.maximum(variance, noise)
    kept = np.maximum(variance, 0.01 * noise) / trusted
    scale = 1 / np.sqrt(trusted * kept.mean())  # so that E|z|² is about d
    if not gram:
        return mean, scale, np.zeros(0), np.zeros((d, 0))
    values, vectors = np.linalg.eigh(covariance * scale[:, None] * scale)
    edge = noise * math.sqrt(2 * np.max(scale**2) * np.sum(scale**2))
    large = values > max(edge, 1.0)
    return mean, scale, values[large], vectors[:, large]


@dataclass(slots=True)
class _Asking:
    """Asks for means over everybody, at shares √(part of μ²) of the budget."""

    ledger: Ledger
    records: int
    budget: float
    receipts: tuple[Receipt, ...] = ()

    @property
    def mu(self) -> float:
        """μ relative to one contribution: half of it where a record is replaced."""
        unit = ClipNorm(1.0)
        return self.budget / unit.sensitivity(self.ledger.budget.adjacency)

    def deviation(self, bound: Bound, share: float) -> float:
        """The noise on a coordinate of a mean."""
        return bound.sensitivity(self.ledger.budget.adjacency) / (self.budget * share * self.records)

    def __call__(
        self, contribution: Any, bound: Bound, share: float, w: Any = None, symmetric: bool = False
    ) -> tuple[Array, Receipt]:
        noise = noise_of(bound, self.ledger.budget.adjacency, self.budget * share)
        mechanism = SymmetricGaussian(noise) if symmetric else Gaussian(noise)
        answer = self.ledger.ask(Query(Everyone(), contribution, bound, mechanism), w)
        return answer.value / self.records, answer.receipt


@dataclass(frozen=True, slots=True)
class Norms:
    """How many rows have norms in each cell of a descending grid: one cell a record."""

    width: int
    grid: Array

    def bounded_sum(self, records: Table, w: Any, bound: ClipNorm) -> Array:
        counts = np.zeros(len(self.grid))
        for block in records.blocks(Features(self.width, intercept=0.0)):
            cells = np.searchsorted(-self.grid, -block.norm, side="right") - 1
            counts += np.bincount(np.clip(cells, 0, len(self.grid) - 1), minlength=len(self.grid))
        return counts * min(1.0, bound.clip)


@dataclass(frozen=True, slots=True)
class Spread:
    """Σ [u uᵀ, αu/√2; αuᵀ/√2, 0] of rows |u| <= 1, or only Σ [αu; u²]; a term has norm √(1+α²) at most."""

    features: Features
    gram: bool

    def bounded_sum(self, records: Table, w: Any, bound: ClipNorm) -> Array:
        d = self.features.width
        first, second = np.zeros(d), np.zeros((d, d) if self.gram else d)
        for block in records.blocks(self.features):
            u = block.rows(self.features)
            first += u.sum(axis=0)
            second += u.T @ u if self.gram else np.square(u).sum(axis=0)
        smaller = min(1.0, bound.clip / math.hypot(1.0, MEAN_WEIGHT))
        if not self.gram:
            return smaller * np.concatenate([MEAN_WEIGHT * first, second])
        edge = MEAN_WEIGHT / math.sqrt(2) * first
        return smaller * np.block([[second, edge[:, None]], [edge[None], np.zeros((1, 1))]])
