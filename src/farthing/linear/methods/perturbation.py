"""Train by objective or output perturbation: one convex problem, with noise in it or on its solution.

Both minimise F(w) = Σ loss(z·w, y) + λ/2 |w|² over rows |z| <= R, the intercept regularised like the rest.

**Objective perturbation** (Chaudhuri, Monteleoni & Sarwate 2011, Algorithm 2; Kifer, Smith & Thakurta 2012,
Algorithm 1, Gaussian noise) minimises F(w) + b·w with b ~ N(0, σ²R²). Its price is derived here for losses
whose residual keeps its sign for a label and lies in [-1, 1], in the manner of Redberg, Koskela & Wang 2023
(the gradient of a linear model always points along z), but without the factor 2 and, for the logistic loss,
without a charge for the Jacobian. Let δ_μ(ε) be the exact curve of the Gaussian mechanism.

*Theorem (add-remove).* With curvature c, κ = ln(1 + cR²/λ) and ε >= κ it is (ε, δ_{1/σ}(ε - κ))-DP; for the
logistic loss and λ >= R²/ε it is (ε, δ_{1/σ}(ε))-DP, the price of adding b to one gradient.

*Proof.* w ↦ b is one to one (λ > 0), so the log-ratio of the densities of w with and without the record z is
at most ln(1 + ℓ''|z|²/λ) + (2ρs + ρ²)/2σ²R²: the first term from the determinants, which differ by a matrix
of rank one, the second from b, with s = b·z/|z| ~ N(0, σ²R²) and ρ = |residual| |z| (s may take its sign,
because the residual has one). The second is convex in ρ, so it is at most max(0, G(s)), where G, its value at
ρ = R, is the privacy loss of the Gaussian mechanism; the first is at most κ, and 0 in the direction where the
record is missing. For the logistic loss ℓ'' = r(1 - r) with r = ρ/|z|, and ln(1 + r(1-r)a) + r g + r²h <= g +
h = G for every r in [0, 1] as soon as a <= g + h: with a = R²/λ <= ε the log-ratio exceeds ε only where G
does, and there it is at most G. ∎

*Replace-one.* The same with two residuals and the corners of a square in place of 0 and R: δ_{2/σ}(ε - κ) + 2
δ_{1/σ}(ε - κ), or for the logistic loss δ_{2/σ}(ε) + δ_{1/σ}(ε) + δ_{1/σ}(ε - R²/λ).

The minimiser is computed up to a gradient of norm γ, so it is within γ/λ of the exact one for any data;
Gaussian noise for twice that distance, paid from ε/200 and δ/100, covers it (Iyengar et al. 2019, Algorithm
1, AMP), and also covers the lattice on which b is drawn and the rounding of floats. Newton's method computes
it; if it does not converge, Nesterov's method does, with a proven rate (2004, Thm. 2.2.3): an error, or noise
in place of an answer, would reveal something about the records.

**Output perturbation** (Chaudhuri et al. 2011, Algorithm 1, with Gaussian noise) adds noise to the minimiser,
whose sensitivity is R/λ under add-remove and 2R/λ under replace-one (strong convexity), plus 2γ/λ for the
tolerance. T steps of gradient descent at rate η on n records (Wu et al. 2017; the version of Lee & Kifer
2018) have the same sensitivity at λ = n/(ηT) and shrink alike, but only if the true number of records is near
n.

>>> import farthing as ft
>>> from farthing.linear.problem import Problem
>>> from farthing.accounting.filters import BasicFilter
>>> from farthing.linear.losses import logistic
>>> from farthing.data.tables import Table
>>> x = np.linspace(-1, 1, 5001)[:, None]
>>> ledger = ft.Ledger(ft.Budget(1.0, 1e-6), filter=BasicFilter).over(Table(x, 1.0 * (x[:, 0] > 0)))
>>> u, constant = ft.run(objective(ledger, Problem(logistic, 5001, 1, unit=False))).w
>>> bool(u[0] > 5), ledger.share
(True, 1.0)
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.accounting import gaussian
from farthing.budget import Adjacency, Budget
from farthing.data.tables import Features, Table
from farthing.errors import FarthingError, Unsupported
from farthing.ledger.ledger import Ledger
from farthing.linear.intervals import EstimatedStep, LinearEstimate
from farthing.linear.losses import HuberHinge, Logistic, Loss
from farthing.linear.problem import Problem
from farthing.noise import lattice
from farthing.noise.lattice import Stream
from farthing.noise.summing import Sum
from farthing.queries.bounds import Bound, ClipNorm, Kind
from farthing.queries.events import ApproximateEvent, Event
from farthing.queries.mechanisms import Gaussian
from farthing.queries.query import Query, Step, until_spent
from farthing.queries.samplers import Everyone

Array = NDArray[np.float64]

_TOLERANCE = 2.0**-34  # times the largest gradient: half of it covers 2^18 roundings per term
_FLOAT_SLACK = 1 + 2.0**-20  # on the noise, for the rounding of a record's own gradient
_NEWTON_STEPS = 100
_BITS = 40  # b is drawn on a lattice of σ 2^-40
_SHARE, _DELTA_SHARE = 1 / 200, 1 / 100  # shares of ε and δ for the tolerance


@until_spent
def objective(ledger: Ledger, problem: Problem, *, penalty: float | None = None) -> Iterator[Step]:
    """Minimise an objective with noise in it, in one answer for the whole budget of a basic filter.

    Parameters
    ----------
    penalty : float, optional
        λ / R², with R the largest norm of a row. None: the larger of the theorem's minimum and 2σ²d/n, which
        balances the noise on d weights against n records.
    """
    features = _features(problem)
    bound, budget = Convex(problem.loss, _radius(features)), ledger.budget
    least = _least_penalty(problem.loss, budget)
    if penalty is None:
        rough = _calibrate(bound, least, budget)
        penalty = max(least, 2 * rough.noise_multiplier**2 * features.size / problem.records)
    mechanism = _calibrate(bound, validate.positive(penalty=penalty), budget)
    contribution = Objective(features, _TOLERANCE * problem.records * bound.norm())
    answer = ledger.ask(Query(Everyone(), contribution, bound, mechanism))
    yield Step(1, features.unfold(answer.value), (answer.receipt,))


@until_spent
def output(ledger: Ledger, problem: Problem, *, penalty: float | None = None) -> Iterator[Step]:
    """Add noise to the minimiser, in one promised Gaussian answer for the whole budget.

    Parameters
    ----------
    penalty : float, optional
        λ / R², with R the largest norm of a row. None: the larger of 0.7 σ √d, at which the noise, of norm R
        σ √d / λ, is near 1, and (n σ² / 32)^(1/3), which balances the increase of the losses of n records by
        noise, at most n σ² / 8 penalty², against a pull of penalty / 2 on margins of size 4.
    """
    features = _features(problem)
    radius, budget = _radius(features), ledger.budget
    replaced = budget.adjacency is Adjacency.REPLACE_ONE
    noise = (2.0 if replaced else 1.0) * gaussian.noise(budget.epsilon, budget.delta) * (1 + 1e-12)
    if penalty is None:
        penalty = max(0.7 * noise * math.sqrt(features.size), (problem.records * noise**2 / 32) ** (1 / 3))
    strength, tolerance = (
        validate.positive(penalty=penalty) * radius**2,
        _TOLERANCE * problem.records * radius,
    )
    contribution = Minimiser(problem.loss, features, strength, tolerance)
    bound = ClipNorm(contribution.reach)
    query = Query(Everyone(), contribution, bound, Gaussian(noise))
    ledger.promise(query, times=1)
    answer = ledger.ask(query)
    spread = (noise * bound.norm() * _FLOAT_SLACK) ** 2 * np.eye(features.size)
    exact = LinearEstimate(
        features, answer.value, spread, None, 1 + 2.0**-10
    )  # including the slack for rounding
    yield EstimatedStep(1, features.unfold(answer.value), (answer.receipt,), exact)


def _features(problem: Problem) -> Features:
    if problem.outputs or not isinstance(problem.loss, Logistic | HuberHinge):
        raise Unsupported(
            f"perturbation is proven for two classes and a smooth loss of slope 1, not for {problem.loss} "
            f"with {problem.outputs or 2} outputs: use dpsgd, or one fit per class against the rest"
        )
    return problem.rows()


def _radius(features: Features) -> float:
    assert features.radius is not None
    return features.radius


CONVEX = "Convex(loss, radius)"  # a further kind of bound


@dataclass(frozen=True, slots=True)
class Convex:
    """A loss of slope 1 on rows of norm at most ``radius``, which bounds one record's gradient."""

    loss: Loss
    radius: float
    kind: ClassVar[str] = CONVEX
    width: ClassVar[int | None] = None

    @property
    def scale(self) -> float:
        return 1.0

    def norm(self, order: int = 2) -> float:
        if order != 2:
            raise Unsupported("gradients are bounded by their L2 norm: use Gaussian noise")
        return self.radius

    def sensitivity(self, adjacency: Adjacency, order: int = 2) -> float:
        return self.norm(order) * adjacency.shift


@dataclass(frozen=True, slots=True)
class ObjectiveNoise:
    """Noise of deviation ``noise_multiplier`` · R in the objective, and ``rest`` for the tolerance.

    ``penalty`` is λ / R²; ``epsilon`` is where on its curve the mechanism is priced.
    """

    noise_multiplier: float
    rest: float
    penalty: float
    epsilon: float

    def unit_event(self) -> Event:
        raise Unsupported("objective perturbation has no price without its loss: call event()")

    def check(self, bound: Bound, shape: tuple[int, ...] | None) -> None:
        if not isinstance(bound, Convex):
            raise Unsupported("objective perturbation needs the bound Convex(loss, radius)")

    def event(self, bound: Bound, adjacency: Adjacency, sampled: bool) -> Event:
        self.check(bound, None)
        assert isinstance(bound, Convex)
        if sampled:
            raise Unsupported("objective perturbation takes all records: use Everyone()")
        inner = delta_of(
            bound.loss, self.noise_multiplier, self.penalty, self.epsilon * (1 - _SHARE), adjacency
        )
        outer = gaussian.delta(1 / self.rest, self.epsilon * _SHARE)
        return ApproximateEvent(self.epsilon, min(inner + outer, math.nextafter(1.0, 0.0)))

    def release(self, total: Any, bound: Convex, stream: Stream, turn: int = 0) -> Array:
        """Return the minimiser of the ``total`` of an `Objective`, with noise in it and around it."""
        size, penalty = total.features.size, self.penalty * bound.radius**2
        cell = self.noise_multiplier * bound.radius * _FLOAT_SLACK * 2.0**-_BITS
        linear = lattice.gaussian(stream, size, _BITS).astype(np.float64) * cell
        found = minimiser(total, bound, linear, penalty)
        off = (total.tolerance + cell * math.sqrt(size)) / penalty
        return Gaussian(self.rest).release(found, ClipNorm(2 * off), stream)


def delta_of(loss: Loss, noise: float, penalty: float, epsilon: float, adjacency: Adjacency) -> float:
    """Return δ at ε by the theorem above, with ``penalty`` = λ / R²; 1 if it does not apply."""
    replaced = adjacency is Adjacency.REPLACE_ONE
    curves = [1 / noise] * 2 + [2 / noise] if replaced else [1 / noise]
    room = epsilon - math.log1p(loss.curvature / penalty)
    general = sum(gaussian.delta(mu, room) for mu in curves) if room >= 0 else 1.0
    room = epsilon - 1 / penalty
    if not isinstance(loss, Logistic) or room < 0:
        return min(1.0, general)
    special = sum(gaussian.delta(mu, epsilon) for mu in curves[1 if replaced else 0 :])
    return min(1.0, general, special + (gaussian.delta(1 / noise, room) if replaced else 0.0))


def _least_penalty(loss: Loss, budget: Budget) -> float:
    """Return λ / R² at which the Jacobian is free (logistic), or takes a quarter of ε."""
    epsilon = budget.epsilon * (1 - _SHARE)
    if not isinstance(loss, Logistic):
        return loss.curvature / math.expm1(epsilon / 4)
    return (3 if budget.adjacency is Adjacency.REPLACE_ONE else 1) / epsilon * (1 + 1e-12)


def _calibrate(bound: Convex, penalty: float, budget: Budget) -> ObjectiveNoise:
    """Return the least noise in the objective that fits the budget."""
    delta = validate.probability(delta=budget.delta)
    goal, epsilon = math.log((1 - 1.1 * _DELTA_SHARE) * delta), budget.epsilon * (1 - _SHARE)

    def excess(noise: float) -> float:
        return math.log(delta_of(bound.loss, noise, penalty, epsilon, budget.adjacency)) - goal

    safe = gaussian.noise(budget.epsilon, budget.delta)
    while excess(safe) > 0:
        safe *= 2
        if safe > 1e9:
            raise Unsupported(
                f"penalty {penalty:g} is too small for {budget}: its Jacobian alone costs more; at least "
                f"{_least_penalty(bound.loss, budget):g} is advised"
            )
    noise = gaussian.safe_root(excess, safe, safe / 1e4)
    rest = gaussian.noise(budget.epsilon * _SHARE, budget.delta * _DELTA_SHARE)
    return ObjectiveNoise(noise, rest, penalty, budget.epsilon)


@dataclass(frozen=True, slots=True)
class Objective:
    """A contribution that passes the records to the mechanism, which minimises once its noise is drawn."""

    features: Features
    tolerance: float
    additive: ClassVar[bool] = False
    honours: ClassVar[tuple[str, ...]] = (CONVEX,)
    shape: ClassVar[None] = None  # records, inside the ledger

    @property
    def least(self) -> float:
        """The norm bound of the features, as rows are not shrunk here."""
        return _radius(self.features)

    def bounded_sum(self, records: Table, w: Any, bound: Convex) -> Any:
        return Behind(records, self.features, self.tolerance)


@dataclass(frozen=True, slots=True)
class Minimiser:
    """The minimiser itself, with sensitivity ``reach`` under add-remove."""

    loss: Loss
    features: Features
    penalty: float
    tolerance: float
    additive: ClassVar[bool] = False
    honours: ClassVar[tuple[str, ...]] = (Kind.NORM,)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.features.size,)

    @property
    def least(self) -> float:
        """Return `reach`: the minimiser is not a sum, and nothing is shrunk."""
        return self.reach

    @property
    def reach(self) -> float:
        return (self.loss.slope * _radius(self.features) + 2 * self.tolerance) / self.penalty

    def bounded_sum(self, records: Table, w: Any, bound: ClipNorm) -> Array:
        behind, rows = Behind(records, self.features, self.tolerance), _radius(self.features)
        return minimiser(behind, Convex(self.loss, rows), np.zeros(self.features.size), self.penalty)


@dataclass(frozen=True, slots=True)
class Behind:
    """Records, and the objective to minimise on them."""

    records: Table
    features: Features
    tolerance: float

    def minimise(self, loss: Loss, linear: Array, penalty: float) -> Array:
        """Return the minimiser of F + linear · w by damped Newton steps, to the requested gradient norm.

        One step is one pass: value, gradient and Hessian. A step is taken if it lowers the value or, near the
        end, where values are too coarse, if it halves the gradient or ends near the lowest point on its line.
        """
        w = np.zeros(len(linear))
        value, gradient, hessian = self._look(loss, linear, penalty, w)
        for _ in range(_NEWTON_STEPS):
            size = float(np.linalg.norm(gradient))
            if size <= self.tolerance / 2:  # the other half covers the rounding of this gradient
                return w
            step, length = np.linalg.solve(hessian, gradient), 1.0
            slope, blur = float(gradient @ step), 1e-12 * abs(value)
            while True:
                ahead = self._look(loss, linear, penalty, w - length * step)
                nearer = np.linalg.norm(ahead[1]) <= size / 2 or abs(float(ahead[1] @ step)) <= slope / 2
                if ahead[0] <= value - 1e-4 * length * slope or (nearer and ahead[0] <= value + blur):
                    break
                length /= 2
                if length < 2.0**-40:
                    raise FarthingError("the objective was not minimised")
            w, (value, gradient, hessian) = w - length * step, ahead
        raise FarthingError("the objective was not minimised")

    def _look(self, loss: Loss, linear: Array, penalty: float, w: Array) -> tuple[float, Array, Array]:
        value, gradient = penalty / 2 * float(w @ w) + float(linear @ w), Sum(len(self.records), w.shape)
        hessian = penalty * np.eye(len(w))
        for block in self.records.blocks(self.features):
            y = (np.asarray(block.y) > 0.5).astype(np.float64)  # for any label, the residual has one sign
            z = block.rows(self.features)
            margins = z @ w  # rows are bounded, so these are finite
            residual = loss.residual(margins, y)
            value += float(loss.value(margins, y).sum())
            gradient.add(z.T @ residual, len(z))
            hessian += z.T @ (z * _second(loss, np.abs(residual))[:, None])
        return value, gradient.value + (linear + penalty * w), hessian


def _second(loss: Loss, size: Array) -> Array:
    """Return the second derivative in the margin, from |residual|."""
    if isinstance(loss, Logistic):
        return size * (1 - size)
    return np.where((size > 0) & (size < 1), loss.curvature, 0.0)


def minimiser(total: Any, bound: Convex, linear: Array, penalty: float) -> Array:
    """Return the minimiser by Newton's method, or by Nesterov's if that does not converge."""
    try:
        return np.asarray(total.minimise(bound.loss, linear, penalty))
    except (FarthingError, np.linalg.LinAlgError):
        return accelerated(total, bound, linear, penalty)


def accelerated(total: Any, bound: Convex, linear: Array, penalty: float) -> Array:
    """Return the minimiser by Nesterov's method for strongly convex functions, to the same tolerance.

    F(w) - min F is at most L |w*|² (1 - √(λ/L))ᵗ after t steps, with L the curvature, and the square of a
    gradient at most 2L times that. So it has converged after this number of steps, up to the rounding of
    floats.
    """
    pull = bound.norm() * len(total.records)  # the largest gradient of all records
    smooth = bound.loss.curvature * len(total.records) * bound.radius**2 + penalty
    root, far = math.sqrt(smooth / penalty), (pull + float(np.linalg.norm(linear))) / penalty
    slide, w = (root - 1) / (root + 1), np.zeros(len(linear))
    ahead, near = w, total.tolerance / 2
    for _ in range(math.ceil(2 * root * max(1.0, math.log1p(2 * smooth * far / near)))):
        _, gradient, _ = total._look(bound.loss, linear, penalty, ahead)
        if float(np.linalg.norm(gradient)) <= near:
            break
        new = ahead - gradient / smooth
        ahead, w = new + slide * (new - w), new
    return ahead
