"""Classify under pure ε-DP (δ = 0): objective perturbation with Laplace noise.

Chaudhuri, Monteleoni & Sarwate 2011, Algorithm 2, with independent Laplace coordinates in place of their
noise of Gamma norm (1.4 times its length, but drawn exactly), and without their charge of 2 ln(1 + c R²/λ)
where the loss is logistic. It minimises F(w) + b·w, F(w) = Σ loss(z·w, y) + λ/2 |w|², over rows |z| <= R of D
coordinates, the intercept regularised like the rest; b has Laplace coordinates of scale s = m R √D, with m
the noise multiplier on the L1 norm.

**Theorem (add-remove, zero-out).** For losses of curvature c whose residual lies in [-1, 1] the exact
minimiser is (1/m + ln(1 + cR²/λ))-DP; for the logistic loss and λ >= m R² it is (1/m)-DP.

*Proof.* w ↦ b = -∇F(w) is one to one and Lipschitz both ways (λ > 0), so w has the density ν(b) det ∇²F(w).
With a record (z, y) more, b moves by r z, r being its residual at w, and the determinant is multiplied by 1 +
ℓ'' zᵀ(∇²F)⁻¹z, which lies in [1, 1 + ℓ''R²/λ]. The density of b changes by a factor within exp(±|r| |z|₁/s),
and |z|₁ <= √D R. So log-ratios are at most |r|/m in the direction where the record goes, and |r|/m + ln(1 +
ℓ''R²/λ) where it comes: the first claim. For the logistic loss ℓ'' = |r| (1 - |r|), and with R²/λ <= 1/m the
logarithm is at most (1 - |r|) |r| R²/λ <= (1 - |r|)/m: together at most 1/m. ∎

*Replace-one.* By way of the table without the record: twice that.

*What is computed.* b is drawn as s 2⁻⁴⁰ round(2⁴⁰ L), L exactly Laplace (`farthing.noise.lattice`), and the
minimiser to a gradient of norm γ. Given the exact minimiser v at s L, which the theorem is about, what is
found lies within (γ + s 2⁻⁴⁰ √D)/λ of v, whatever the records; so two tables with the same v are at most
twice that apart (√D more in L1), and Laplace noise for it, of a 200th of ε, covers rounding, lattice and
tolerance by composition. Newton's steps find the minimiser; should they not arrive, Nesterov's do, whose rate
is a theorem (2004, Thm. 2.2.3), so that no table ends in an error.

>>> import farthing as ft
>>> from farthing.accounting.filters import BasicFilter
>>> from farthing.data.tables import Table
>>> from farthing.linear.losses import logistic
>>> x = np.linspace(-1, 1, 5001)[:, None]
>>> ledger = ft.Ledger(ft.Budget(1.0, 0.0), filter=BasicFilter).over(Table(x, 1.0 * (x[:, 0] > 0)))
>>> u, constant = ft.run(pure(ledger, Problem(logistic, 5001, 1, unit=False))).w
>>> bool(u[0] > 5), round(ledger.share, 9), ledger.guarantee.delta
(True, 1.0, 0.0)
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.budget import Adjacency
from farthing.data.tables import Table
from farthing.errors import FarthingError, InvalidValue, Unsupported
from farthing.ledger.ledger import Ledger
from farthing.linear.losses import Logistic, Loss
from farthing.linear.methods import perturbation
from farthing.linear.methods.perturbation import Convex, Objective
from farthing.linear.problem import Problem
from farthing.noise import lattice
from farthing.noise.lattice import Stream
from farthing.queries.bounds import Bound, ClipNorm
from farthing.queries.events import Event, PureEvent
from farthing.queries.mechanisms import Laplace
from farthing.queries.query import Query, Step, until_spent
from farthing.queries.samplers import Everyone

Array = NDArray[np.float64]

_SHARE = 1 / 200  # of ε, for the tolerance
_BITS = 40
_ROUNDED = 1 - 2.0**-40


@until_spent
def pure(ledger: Ledger, problem: Problem, *, penalty: float | None = None) -> Iterator[Step]:
    """Minimises an objective with Laplace noise in it, in one answer of pure ε-DP for the whole budget.

    Parameters
    ----------
    penalty : float, optional
        λ / R², with R the largest norm of a row. None: the larger of what the theorem asks for and 2σ²d/n,
        which balances the noise on d weights, of deviation σ R, against n records.
    """
    features = perturbation._features(problem)
    budget, radius = ledger.budget, perturbation._radius(features)
    epsilon = budget.epsilon * _ROUNDED / budget.adjacency.shift  # of a record that comes or goes
    share = _inner_share(problem.loss)
    noise = 1 / (epsilon * (1 - _SHARE) * share)
    if penalty is None:
        deviation = noise * math.sqrt(2 * features.size)
        least = _least_penalty(problem.loss, epsilon)
        penalty = max(least, 2 * deviation**2 * features.size / problem.records)
    mechanism = LaplaceObjective(noise, 1 / (epsilon * _SHARE), validate.positive(penalty=penalty))
    bound = WideConvex(problem.loss, radius, features.size)
    tolerance = perturbation._TOLERANCE * problem.records * radius
    query = Query(Everyone(), WideObjective(features, tolerance), bound, mechanism)
    if epsilon_of(problem.loss, noise, penalty) > epsilon * (1 - _SHARE) * (1 + 1e-9):
        raise Unsupported(
            f"penalty {penalty:g} is too small for {budget}: its Jacobian costs more; at least "
            f"{_least_penalty(problem.loss, epsilon):g} is needed"
        )
    answer = ledger.ask(query)
    yield Step(1, features.unfold(answer.value), (answer.receipt,))


def _inner_share(loss: Loss) -> float:
    """The share of ε for the noise: all of it where the Jacobian is free."""
    return 1.0 if isinstance(loss, Logistic) else 0.75


def _least_penalty(loss: Loss, epsilon: float) -> float:
    """λ / R² at which the Jacobian is free (logistic), or takes a quarter of ε."""
    inner = epsilon * (1 - _SHARE)
    if isinstance(loss, Logistic):
        return (1 + 1e-12) / inner
    return (1 + 1e-12) * loss.curvature / math.expm1(inner / 4)


WIDE_CONVEX = "WideConvex(loss, radius, size)"  # a kind of bound of its own


@dataclass(frozen=True, slots=True)
class WideConvex(Convex):
    """A loss of slope 1 on rows of norm at most ``radius`` and ``size`` coordinates."""

    size: int = 1
    kind: ClassVar[str] = WIDE_CONVEX

    def norm(self, order: int = 2) -> float:
        return self.radius * (math.sqrt(self.size) if order == 1 else 1.0)


@dataclass(frozen=True, slots=True)
class LaplaceObjective:
    """Laplace noise of scale ``noise_multiplier`` · R √D in the objective, and ``rest`` for the tolerance.

    ``penalty`` is λ / R².
    """

    noise_multiplier: float
    rest: float
    penalty: float

    def unit_event(self) -> Event:
        raise Unsupported("objective perturbation is priced with its loss: ask for its event")

    def check(self, bound: Bound, shape: tuple[int, ...] | None) -> None:
        if not isinstance(bound, WideConvex):
            raise Unsupported("Laplace noise in an objective needs the bound WideConvex(loss, radius, size)")

    def event(self, bound: Bound, adjacency: Adjacency, sampled: bool) -> Event:
        self.check(bound, None)
        assert isinstance(bound, WideConvex)
        if sampled:
            raise Unsupported("objective perturbation takes all records: use Everyone()")
        epsilon = epsilon_of(bound.loss, self.noise_multiplier, self.penalty) + 1 / self.rest
        return PureEvent(epsilon * adjacency.shift)

    def release(self, total: Any, bound: WideConvex, stream: Stream, turn: int = 0) -> Array:
        """The minimiser of a ``total`` that `WideObjective` handed on, noise in and around it."""
        size, penalty = total.features.size, self.penalty * bound.radius**2
        scale = self.noise_multiplier * bound.norm(1) * perturbation._FLOAT_SLACK
        cell = scale * 2.0**-_BITS
        linear = lattice.laplace(stream, size, _BITS).astype(np.float64) * cell
        found = minimiser(total, bound, linear, penalty)
        off = (total.tolerance + cell * math.sqrt(size)) / penalty
        return Laplace(self.rest).release(found, ClipNorm(2 * off * math.sqrt(size), order=1), stream)


def epsilon_of(loss: Loss, noise: float, penalty: float) -> float:
    """The theorem above: ε of the exact minimiser when a record comes or goes, ``penalty`` being λ / R²."""
    if isinstance(loss, Logistic) and penalty >= noise:
        return 1 / noise
    return 1 / noise + math.log1p(loss.curvature / penalty)


@dataclass(frozen=True, slots=True)
class WideObjective(Objective):
    """An `Objective` whose bound knows the number of its coordinates."""

    honours: ClassVar[tuple[str, ...]] = (WIDE_CONVEX,)

    def bounded_sum(self, records: Table, w: Any, bound: Convex) -> Any:
        if not isinstance(bound, WideConvex) or bound.size != self.features.size:
            raise InvalidValue(f"the bound must be WideConvex of size {self.features.size}, got {bound}")
        return Objective.bounded_sum(self, records, w, bound)


def minimiser(total: Any, bound: WideConvex, linear: Array, penalty: float) -> Array:
    """Return the minimiser, by Newton's steps, or by Nesterov's where those do not arrive."""
    try:
        return np.asarray(total.minimise(bound.loss, linear, penalty))
    except (FarthingError, np.linalg.LinAlgError):
        return accelerated(total, bound, linear, penalty)


def accelerated(total: Any, bound: WideConvex, linear: Array, penalty: float) -> Array:
    """Return the minimiser by Nesterov's method for strongly convex functions, to the same tolerance."""
    smooth = bound.loss.curvature * len(total.records) * bound.radius**2 + penalty
    root = math.sqrt(smooth / penalty)
    slide, w = (root - 1) / (root + 1), np.zeros(total.features.size)
    ahead = w
    while True:
        _, gradient, _ = total._look(bound.loss, linear, penalty, ahead)
        if float(np.linalg.norm(gradient)) <= total.tolerance / 2:
            return ahead
        new = ahead - gradient / smooth
        ahead, w = new + slide * (new - w), new
