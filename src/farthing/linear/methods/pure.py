"""Classify under pure ε-DP (δ = 0): objective perturbation with Laplace noise.

Chaudhuri, Monteleoni & Sarwate 2011, Algorithm 2, with independent Laplace coordinates in place of their
noise of Gamma norm (1.4 times as long, but sampled exactly), and without their charge of 2 ln(1 + c R²/λ) for
the logistic loss. It minimises F(w) + b·w, F(w) = Σ loss(z·w, y) + λ/2 |w|², over rows |z| <= R of D
coordinates, the intercept regularised like the rest; b has Laplace coordinates of scale s = m R √D, with m
the noise multiplier on the L1 norm.

**Theorem (add-remove, zero-out).** For losses of curvature c whose residual lies in [-1, 1] the exact
minimiser is (1/m + ln(1 + cR²/λ))-DP; for the logistic loss and λ >= m R² it is (1/m)-DP.

*Proof.* w ↦ b = -∇F(w) is one to one and Lipschitz both ways (λ > 0), so w has the density ν(b) det ∇²F(w).
An additional record (z, y) moves b by r z, where r is its residual at w, and multiplies the determinant by 1
+ ℓ'' zᵀ(∇²F)⁻¹z, which lies in [1, 1 + ℓ''R²/λ]. The density of b changes by a factor within exp(±|r|
|z|₁/s), and |z|₁ <= √D R. So log-ratios are at most |r|/m in the direction that removes the record, and |r|/m
+ ln(1 + ℓ''R²/λ) in the one that adds it: the first claim. For the logistic loss ℓ'' = |r| (1 - |r|), and
with R²/λ <= 1/m the logarithm is at most (1 - |r|) |r| R²/λ <= (1 - |r|)/m: together at most 1/m. ∎

**Theorem (K classes).** With the softmax loss of K classes, weights a matrix of D x K, and Laplace noise of
scale s = 2 m R √D on every entry, the exact minimiser is (1/m + (K - 1) ln(1 + R²/Kλ))-DP: the noise does not
grow with K.

*Proof.* As above. A record moves b by z rᵀ, r = p - e_y with |r|₁ = 2 (1 - p_y) <= 2, so by at most 2 √D R in
L1. Its Hessian is B = z zᵀ ⊗ S with S = diag(p) - p pᵀ, whose K - 1 eigenvalues that are not 0 add up to 1 -
|p|² <= 1 - 1/K. With M >= λ the eigenvalues of M^-½ B M^-½ are at most those of B/λ (Weyl), so the
determinant grows by at most Π (1 + σ_j R²/λ), which is largest where all σ_j are 1/K. ∎

*Replace-one.* Twice the price, through the table without the record.

*Computation.* b is drawn as s 2⁻⁴⁰ round(2⁴⁰ L), with L exactly Laplace (`farthing.noise.lattice`), and the
minimiser is computed to a gradient of norm γ. Let v be the exact minimiser at s L, to which the theorem
applies. The computed one lies within (γ + s 2⁻⁴⁰ √D)/λ of v, for any records; so two tables with the same v
are at most twice that apart (√D more in L1, √(DK) with K classes), and Laplace noise for this distance, with
a 200th of ε, covers rounding, lattice and tolerance by composition. Newton's method (L-BFGS, with K classes)
computes the minimiser; if it does not converge, Nesterov's does (`farthing.linear.methods.perturbation`), so
that no table ends in an error.

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
from scipy import optimize
from scipy.special import softmax

from farthing import validate
from farthing.budget import Adjacency
from farthing.data.tables import Features, Table
from farthing.errors import FarthingError, InvalidValue, Unsupported
from farthing.ledger.ledger import Ledger
from farthing.linear.losses import Logistic, Loss, Softmax
from farthing.linear.methods import perturbation
from farthing.linear.methods.perturbation import Behind, Convex, Objective, minimiser
from farthing.linear.problem import Problem
from farthing.noise import lattice
from farthing.noise.lattice import Stream
from farthing.noise.summing import Sum
from farthing.queries.bounds import Bound, ClipNorm
from farthing.queries.events import Event, PureEvent
from farthing.queries.mechanisms import Laplace
from farthing.queries.query import Query, Step, until_spent
from farthing.queries.samplers import Everyone

Array = NDArray[np.float64]

_SHARE = 1 / 200  # share of ε for the tolerance
_BITS = 40
_ROUNDED = 1 - 2.0**-40
_BALANCE = 2.0, 0.3  # constants of the penalty's rule, for two classes and for more
_LBFGS_STEPS = 2000
_CURVED = 64  # the most weights for which the Hessian is computed


@until_spent
def pure(ledger: Ledger, problem: Problem, *, penalty: float | None = None) -> Iterator[Step]:
    """Minimise an objective with Laplace noise in it, in one ε-DP answer for the whole budget.

    Parameters
    ----------
    penalty : float, optional
        λ / R², with R the largest norm of a row. None: the larger of the theorem's minimum and 2σ²d/n, which
        balances the noise on d weights, of deviation σ R, against n records.
    """
    features, outputs = _features(problem), problem.outputs
    budget, radius = ledger.budget, perturbation._radius(features)
    epsilon = budget.epsilon * _ROUNDED / budget.adjacency.shift  # under add-remove
    inner = epsilon * (1 - _SHARE)
    bound = WideConvex(problem.loss, radius, features.size, outputs)
    noise = 1 / (inner * _inner_share(problem.loss))
    if penalty is None:
        deviation = math.sqrt(2) * noise * bound.norm(1) / radius
        least, size = _least_penalty(bound, epsilon), features.size * max(1, outputs)
        penalty = max(least, _BALANCE[outputs > 0] * deviation**2 * size / problem.records)
    jacobian = _jacobian(bound, validate.positive(penalty=penalty))
    if outputs and jacobian < inner:  # the rest of ε after the Jacobian means less noise
        noise = 1 / (inner - jacobian) * (1 + 1e-12)
    mechanism = LaplaceObjective(noise, 1 / (epsilon * _SHARE), penalty)
    tolerance = perturbation._TOLERANCE * problem.records * radius
    query = Query(Everyone(), WideObjective(features, tolerance), bound, mechanism)
    if epsilon_of(problem.loss, noise, penalty, outputs) > inner * (1 + 1e-9):
        raise Unsupported(
            f"penalty {penalty:g} is too small for {budget}: its Jacobian costs more; at least "
            f"{_least_penalty(bound, epsilon):g} is needed"
        )
    answer = ledger.ask(query)
    w = answer.value.reshape(-1, outputs) if outputs else answer.value
    yield Step(1, features.unfold(w), (answer.receipt,))


def _features(problem: Problem) -> Features:
    """Return rows of bounded norm, for a loss that one of the theorems covers."""
    if problem.outputs and not isinstance(problem.loss, Softmax):
        raise Unsupported(
            "pure ε-DP of more than two classes is proven for the softmax loss: use LogisticRegression"
        )
    return problem.rows() if problem.outputs else perturbation._features(problem)


def _inner_share(loss: Loss) -> float:
    """Return the share of ε for the noise: all of it if the Jacobian is free."""
    return 1.0 if isinstance(loss, Logistic) else 0.75


def _least_penalty(bound: "WideConvex", epsilon: float) -> float:
    """Return λ / R² at which the Jacobian is free (logistic), or takes a quarter of ε."""
    inner = epsilon * (1 - _SHARE)
    if isinstance(bound.loss, Logistic):
        return (1 + 1e-12) / inner
    if bound.outputs:
        return (1 + 1e-12) / (bound.outputs * math.expm1(inner / 4 / (bound.outputs - 1)))
    return (1 + 1e-12) * bound.loss.curvature / math.expm1(inner / 4)


def _jacobian(bound: "WideConvex", penalty: float) -> float:
    """Return the largest change of the log-determinant by a record, with ``penalty`` = λ / R²."""
    if bound.outputs:
        return (bound.outputs - 1) * math.log1p(1 / (bound.outputs * penalty))
    return math.log1p(bound.loss.curvature / penalty)


WIDE_CONVEX = "WideConvex(loss, radius, size)"  # a further kind of bound


@dataclass(frozen=True, slots=True)
class WideConvex(Convex):
    """A loss on rows of norm at most ``radius`` and ``size`` coordinates.

    It has slope 1, or is the softmax loss of ``outputs`` classes, whose residuals have norms of at most 2 and
    √2.
    """

    size: int = 1
    outputs: int = 0
    kind: ClassVar[str] = WIDE_CONVEX

    def norm(self, order: int = 2) -> float:
        row = self.radius * (math.sqrt(self.size) if order == 1 else 1.0)
        return row * (1.0 if not self.outputs else 2.0 if order == 1 else math.sqrt(2))


@dataclass(frozen=True, slots=True)
class LaplaceObjective:
    """Laplace noise of scale ``noise_multiplier`` · R √D in the objective, and ``rest`` for the tolerance.

    ``penalty`` is λ / R².
    """

    noise_multiplier: float
    rest: float
    penalty: float

    def unit_event(self) -> Event:
        raise Unsupported("objective perturbation has no price without its loss: call event()")

    def check(self, bound: Bound, shape: tuple[int, ...] | None) -> None:
        if not isinstance(bound, WideConvex):
            raise Unsupported("Laplace noise in an objective needs the bound WideConvex(loss, radius, size)")

    def event(self, bound: Bound, adjacency: Adjacency, sampled: bool) -> Event:
        self.check(bound, None)
        assert isinstance(bound, WideConvex)
        if sampled:
            raise Unsupported("objective perturbation takes all records: use Everyone()")
        epsilon = epsilon_of(bound.loss, self.noise_multiplier, self.penalty, bound.outputs) + 1 / self.rest
        return PureEvent(epsilon * adjacency.shift)

    def release(self, total: Any, bound: WideConvex, stream: Stream, turn: int = 0) -> Array:
        """Return the minimiser of the ``total`` of a `WideObjective`, with noise in it and around it."""
        size = total.features.size * max(1, bound.outputs)
        penalty = self.penalty * bound.radius**2
        scale = self.noise_multiplier * bound.norm(1) * perturbation._FLOAT_SLACK
        cell = scale * 2.0**-_BITS
        linear = lattice.laplace(stream, size, _BITS).astype(np.float64) * cell
        found = minimiser(total, bound, linear, penalty)
        off = (total.tolerance + cell * math.sqrt(size)) / penalty
        return Laplace(self.rest).release(found, ClipNorm(2 * off * math.sqrt(size), order=1), stream)


def epsilon_of(loss: Loss, noise: float, penalty: float, outputs: int = 0) -> float:
    """Return ε of the exact minimiser under add-remove by the theorems above; ``penalty`` = λ / R²."""
    if isinstance(loss, Logistic) and penalty >= noise:
        return 1 / noise
    return 1 / noise + _jacobian(WideConvex(loss, 1.0, 1, outputs), penalty)


@dataclass(frozen=True, slots=True)
class WideObjective(Objective):
    """An `Objective` whose bound includes the number of its coordinates."""

    honours: ClassVar[tuple[str, ...]] = (WIDE_CONVEX,)

    def bounded_sum(self, records: Table, w: Any, bound: Convex) -> Any:
        if not isinstance(bound, WideConvex) or bound.size != self.features.size:
            raise InvalidValue(f"the bound must be WideConvex of size {self.features.size}, got {bound}")
        if (bound.outputs > 0) != isinstance(bound.loss, Softmax):
            raise InvalidValue(f"{type(bound.loss).__name__} is not a loss of {bound.outputs} outputs")
        if bound.outputs:
            return SoftmaxBehind(records, self.features, self.tolerance, bound.outputs)
        return Objective.bounded_sum(self, records, w, bound)


@dataclass(frozen=True, slots=True)
class SoftmaxBehind(Behind):
    """Records of several classes, and the objective to minimise; weights are D x K, row by row."""

    outputs: int = 2

    def minimise(self, loss: Loss, linear: Array, penalty: float) -> Array:
        """Return the minimiser of F + linear · w, or raise if it is not within the tolerance.

        It uses Newton's method if the Hessian is small, L-BFGS otherwise.
        """
        if len(linear) <= _CURVED:
            return Behind.minimise(self, loss, linear, penalty)

        def slope(w: Array) -> tuple[float, Array]:
            value, gradient, _ = self._look(loss, linear, penalty, w, curved=False)
            return value, gradient

        near = self.tolerance / (4 * math.sqrt(len(linear)))
        options = {
            "maxiter": _LBFGS_STEPS,
            "maxfun": 2 * _LBFGS_STEPS,
            "ftol": 0.0,
            "gtol": near,
            "maxcor": 20,
        }
        found = optimize.minimize(slope, np.zeros(len(linear)), jac=True, method="L-BFGS-B", options=options)
        if float(np.linalg.norm(slope(found.x)[1])) <= self.tolerance / 2:
            return np.asarray(found.x)
        raise FarthingError("the objective was not minimised")

    def _look(
        self, loss: Loss, linear: Array, penalty: float, w: Array, curved: bool = True
    ) -> tuple[float, Array, Array]:
        value, gradient = penalty / 2 * float(w @ w) + float(linear @ w), Sum(len(self.records), w.shape)
        hessian = penalty * np.eye(len(w) if curved and len(w) <= _CURVED else 0)
        for block in self.records.blocks(self.features):
            z, y = block.rows(self.features), np.asarray(block.y, dtype=np.float64)
            margins = z @ w.reshape(-1, self.outputs)  # rows are bounded, so these are finite
            residual = loss.residual(margins, y)
            value += float(loss.value(margins, y).sum())
            gradient.add((z.T @ residual).ravel(), len(z))
            if hessian.size:
                p = softmax(margins, axis=1) * residual.any(axis=1, keepdims=True)
                outer = np.einsum("nk,kl->nkl", p, np.eye(self.outputs)) - np.einsum("nk,nl->nkl", p, p)
                hessian += np.einsum("nd,nkl,ne->dkel", z, outer, z).reshape(hessian.shape)
        return value, gradient.value + (linear + penalty * w), hessian
