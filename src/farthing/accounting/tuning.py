"""Account for tuning: a random number K of runs of one mechanism, of which only the best is released.

A run draws a candidate, trains it privately and scores it privately: candidate, model and score together are
the output of one mechanism M, and only the best of K independent outputs is released. The *score is a part of
the output*, so it is charged like the rest (or computed on public data); the theorem does not hold for a
score that was computed from the records without noise.

**Theorem.** Let f(x) = E[x^K] with f' non-decreasing, and let M have the privacy profile δ₀ in both
directions: H_a(M(D) ‖ M(D')) <= δ₀(log a) for a >= 1, H_a being the hockey-stick divergence, hence
H_a <= 1 - a + a δ₀(-log a) for a < 1. Put g(x) = max_a (x - H_a) / a. Then for every ε and every score

    H_{e^ε}(A(D) ‖ A(D')) <= E[sup_x (f'(x) - e^ε f'(g(x)) R)₊],   R = Q/P under P,

for every pair (P, Q) that dominates M, where A is the best of K runs. Adjacency, unit and observer are those
under which δ₀ holds, for an observer who sees the best output and not K.

*Proof.* Ties are broken by an independent uniform number; taking the first of equal runs has the same
distribution, as runs are exchangeable. So scores have no atoms, and with F(y) the probability under M(D) that
a run is scored no higher than y, the best is y with density f'(F(y)) against M(D): Σ P(K = k) k F^(k-1). The
probability of no release, K = 0, is the same under D'. With x = F(y) and x' the same under D', any M(D)-mass
x has at least g(x) under D', because x <= a x' + H_a. As f' is non-decreasing, the density of A(D) minus e^ε
times that of A(D') is at most (f'(x) - e^ε f'(g(x)) R(y)) times that of M(D), and at most h(R), the supremum
over x. A supremum of decreasing lines and 0 is convex and non-increasing, so E_{M(D)}[h(R)] is largest for
the dominating pair (Zhu, Dong & Wang 2022). ∎

Koskela, Redberg & Wang 2024 use one point of the profile; this theorem uses all points. If the profile is one
point, (ε₀, δ₀)-DP, the geometric K costs 3ε₀ (Liu & Talwar 2019); a full profile costs far less. In Rényi DP
the same step gives ε(λ) + sup_x (λ log f'(x) - (λ-1) log f'(g(x))) / (λ-1), of which Papernot & Steinke 2022,
Thm. 2 and Thm. 6, are the cases in which g comes from one order or one point.

Numerically, h is bounded from above by its chords between points, and the supremum over x is taken over
cells, at the end where each term is larger. A chord of points k is a sum of c (k - R)₊ with c >= 0, whose
mean is c k δ₀(-log k).

>>> from farthing.queries.events import GaussianEvent, TuningEvent
>>> from farthing.accounting import gaussian
>>> run = GaussianEvent(gaussian.noise(1.0, 1e-5))
>>> [round(epsilon(TuningEvent(run, 10.0, shape, 1e-5), 1e-5), 2) for shape in (0.0, 1.0)]
[1.45, 1.54]
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.accounting import calibrate, composition, gaussian, pld
from farthing.accounting.tolerance import inner
from farthing.budget import Adjacency, Budget
from farthing.errors import InvalidValue
from farthing.noise.streams import Stream
from farthing.queries.events import (
    ApproximateEvent,
    Event,
    GaussianEvent,
    PoissonEvent,
    TuningEvent,
    flatten,
)

Array = NDArray[np.float64]

SHAPES: dict[str, float | None] = {"geometric": 1.0, "logarithmic": 0.0, "poisson": None}
TIGHT = "Zhu, Dong & Wang 2022, Thm. 10 (dominating pairs compose), certified inversion"
THEOREM = "farthing.accounting.tuning: the best of a random number of runs, by their privacy profile"
_POINTS, _PLAN_POINTS = 384, 160  # points of a profile: in closed form, and of a plan
_CELLS = 2500  # cells of x, by its distance from 1 and again by f'(x)
_DEEP = 1e-4  # the share of δ down to which a profile is computed
_UP = 1 + 1e-11  # above the rounding of f', of lines and of chords
_LOSSES = 700.0


@dataclass(frozen=True, slots=True)
class RunCount:
    """The distribution of the number of runs: truncated negative binomial, or Poisson.

    Attributes
    ----------
    mean : float
        The expected number of runs.
    shape : float or None
        η of the negative binomial, from -0.5 (1 is geometric, 0 logarithmic), for which K >= 1. None is
        Poisson, for which K may be 0.
    """

    mean: float
    shape: float | None = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", validate.positive(mean=self.mean))
        if self.mean > 1000:
            raise InvalidValue(f"the mean number of runs must be at most 1000, got {self.mean:g}")
        if self.shape is not None:
            object.__setattr__(self, "shape", validate.finite(shape=self.shape))
            if not -0.5 <= self.shape <= 1000:
                raise InvalidValue(f"shape must be from -0.5 to 1000, got {self.shape!r}")
            if not self.mean > 1.001:
                raise InvalidValue(
                    f"the mean number of runs must be above 1.001 unless it is Poisson, got {self.mean}"
                )
            if self.gamma < 1e-4:
                raise InvalidValue(f"{self} may give thousands of runs: lower the mean or raise the shape")

    @property
    def gamma(self) -> float:
        """Return the γ of the negative binomial that gives the mean."""
        return _gamma(self.mean, self.shape) if self.shape is not None else math.nan

    def log_slope(self, x: Array) -> Array:
        """Return log f'(x) of f(x) = E[x^K]."""
        if self.shape is None:
            return math.log(self.mean) + self.mean * (x - 1)
        gamma = self.gamma  # f' is (γ / (1 - (1 - γ) x))^(η + 1) times its value at 1, the mean
        return math.log(self.mean) + (self.shape + 1) * (math.log(gamma) - np.log(1 - x + gamma * x))

    def missing(self, top: float) -> float:
        """Return the probability that no run is among the best ``top`` share of all possible runs."""
        x = 1 - top
        if self.shape is None:
            return math.exp(-self.mean * top)
        gamma, eta = self.gamma, self.shape
        if eta == 0:
            return math.log1p(-(1 - gamma) * x) / math.log(gamma)
        return math.expm1(-eta * math.log1p(-(1 - gamma) * x)) / math.expm1(-eta * math.log(gamma))

    def draw(self, stream: Stream) -> int:
        """Return a number of runs drawn from a stream of random words, with a total error of 2^-90."""
        totals = _totals(self)
        place = int.from_bytes(stream.integers(4).tobytes(), "little") * totals[-1] >> 256
        return bisect_right(totals, place)


@lru_cache(maxsize=16)
def _totals(runs: RunCount, bits: int = 128) -> list[int]:
    """Return integers in proportion to P(K <= 0), P(K <= 1), … until the remainder is below 2^-bits.

    Each probability follows from the one before by their ratio, rounded down to 2^-2bits.
    """
    found, rate = [1 << 2 * bits], Fraction(runs.mean if runs.shape is None else 1 - runs.gamma)
    eta, place = Fraction(runs.shape or 0.0), 0 if runs.shape is None else 1
    while place <= 2 * runs.mean or found[-1] * runs.mean > 1 << bits:
        ratio = rate / (place + 1) * (1 if runs.shape is None else place + eta)
        found.append(found[-1] * ratio.numerator // ratio.denominator)
        place += 1
    return list(accumulate(found if runs.shape is None else [0, *found]))


@lru_cache(maxsize=256)
def _gamma(mean: float, shape: float) -> float:
    """Return γ with η (1 - γ) / (γ (1 - γ^η)) = mean, found as e^-s."""

    def expected(s: float) -> float:
        return math.expm1(s) * (shape / -math.expm1(-shape * s) if shape else 1 / s)

    low, high = 0.0, 1.0
    while expected(high) < mean:
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if expected(middle) < mean else (low, middle)
    return math.exp(-high)


@dataclass(frozen=True, slots=True)
class Profile:
    """A privacy profile: at ``losses`` (from 0, rising) δ is at most ``deltas``, in both directions."""

    losses: Array
    deltas: Array

    def both(self) -> tuple[Array, Array]:
        """Return every log a, rising, with its H_a; those below 0 follow from those above."""
        below = -self.losses[:0:-1]
        divergences = -np.expm1(below) + np.exp(below) * self.deltas[:0:-1]
        return np.concatenate([below, self.losses]), np.concatenate([divergences, self.deltas])


@dataclass(frozen=True, slots=True)
class Selection:
    """The best of K runs of a mechanism with a profile: δ at ε, and the increase of Rényi divergences."""

    points: Array  # k, rising: where h has a kink
    means: Array  # of (k - R)₊
    high: Array  # log f' at the upper end of a cell of x
    low: Array  # log f'(g(x)) at its lower end

    @classmethod
    def of(cls, profile: Profile, runs: RunCount) -> "Selection":
        """Return the selection among runs of a mechanism with this profile."""
        logs, divergences = profile.both()
        x = _cells(runs)
        least = np.zeros(len(x))
        for log, divergence in zip(logs.tolist(), divergences.tolist(), strict=True):
            np.maximum(least, (x - divergence) * math.exp(-log) * (1 - 1e-14) - 1e-15, out=least)
        points = np.exp(-logs[::-1])
        return cls(points, points * divergences[::-1], runs.log_slope(x[1:]), runs.log_slope(least[:-1]))

    def delta(self, epsilon: float) -> float:
        """Return the bound of the theorem on δ at ε, rounded up."""
        constant, slope = np.exp(self.high) * _UP, np.exp(self.low + min(epsilon, _LOSSES)) / _UP
        edges = np.concatenate([[0.0], self.points])
        envelope = np.array([float((constant - slope * k).max()) for k in edges])
        envelope = np.maximum(envelope, 0.0)
        if envelope[-1] > 0:  # the profile does not reach so far: there is no bound
            return 1.0
        slopes = np.append(np.diff(envelope) / np.diff(edges), 0.0)
        found = float(np.maximum(np.diff(slopes), 0.0) @ self.means)
        return min(1.0, found * _UP + 1e-15 * float(constant.max()))

    def added(self, order: float) -> float:
        """Return the amount that selection adds to the Rényi divergence of one run at an order."""
        return float((order * self.high - (order - 1) * self.low).max()) / (order - 1) * _UP + 1e-12


def _cells(runs: RunCount) -> Array:
    """Return the ends of cells of x, from 0 to 1: some even in log(1 - x), others in log f'(x)."""
    tails = np.geomspace(1e-14, 1.0, _CELLS)
    first, last = (float(runs.log_slope(np.array(end))) for end in (0.0, 1.0))
    goals = np.linspace(first, last, _CELLS) - math.log(runs.mean)
    if runs.shape is None:
        even = 1 + goals / runs.mean
    else:
        gamma = runs.gamma
        even = (1 - gamma * np.exp(-goals / (runs.shape + 1))) / (1 - gamma)
    return np.unique(np.clip(np.concatenate([[0.0, 1.0], 1 - tails, even]), 0.0, 1.0))


@lru_cache(maxsize=256)
def selection(event: TuningEvent, adjacency: Adjacency) -> Selection:
    """Return the selection of a tuning event."""
    return Selection.of(_profile(event.event, event.delta, adjacency), RunCount(event.mean, event.shape))


@lru_cache(maxsize=256)
def _profile(event: Event, delta: float, adjacency: Adjacency) -> Profile:
    """Return the profile of one run, computed until δ is a small share of ``delta``."""
    deep = delta * _DEEP
    parts = flatten(event)
    if len(parts) == 1 and isinstance(parts[0][0], ApproximateEvent) and parts[0][1] == 1:
        return _approximate(parts[0][0])
    steps = pld.directions(event, adjacency)
    mu = pld.gaussian_part(steps[0])
    if mu is not None:
        losses = np.linspace(0.0, gaussian.epsilon(mu, deep), _POINTS)
        return Profile(losses, gaussian.delta(mu, losses))
    most = min(max(pld.most_loss(way) for way in steps), pld.epsilon(event, deep, adjacency))
    if not most < math.inf:
        raise InvalidValue(f"a run of {event} has no finite epsilon: use more noise or fewer steps")
    losses = np.linspace(0.0, most, _PLAN_POINTS)
    return Profile(losses, np.array([pld.delta(event, loss, adjacency) for loss in losses.tolist()]))


def _approximate(event: ApproximateEvent) -> Profile:
    """Return the profile of any (ε, δ)-DP mechanism: Kairouz, Oh & Viswanath 2015, Thm. 3.3."""
    losses = np.linspace(0.0, event.epsilon, _POINTS)
    gap = np.expm1(losses - event.epsilon) / -(1 + math.exp(-event.epsilon))
    return Profile(losses, (event.delta + (1 - event.delta) * np.maximum(gap, 0.0)) * _UP)


def delta(event: TuningEvent, epsilon: float, adjacency: Adjacency = Adjacency.ADD_REMOVE) -> float:
    """Return δ at ε of a tuning, rounded up."""
    return selection(event, adjacency).delta(validate.non_negative(epsilon=epsilon))


def epsilon(event: Event, delta: float, adjacency: Adjacency = Adjacency.ADD_REMOVE) -> float:
    """Return ε at δ of a tuning, rounded up; for any other plan, that of `pld`."""
    match _alone(event):
        case TuningEvent() as tuning:
            return _epsilon(tuning, validate.probability(delta=delta), adjacency)
    return pld.epsilon(event, delta, adjacency)


@lru_cache(maxsize=1024)
def _epsilon(event: TuningEvent, delta: float, adjacency: Adjacency) -> float:
    found, goal = selection(event, adjacency), math.log(delta)

    def excess(value: float) -> float:
        return math.log(max(found.delta(value), 1e-300)) - goal

    high = 1e-3
    while excess(high) > 0:
        high *= 2
        if high > _LOSSES:
            return math.inf
    return gaussian.safe_root(excess, high, high / 2 if high > 1e-3 else 0.0)


def affordable(event: Event, budget: Budget) -> bool:
    """Return whether a plan fits a budget: one tuning by the theorem above, any other by `calibrate`."""
    if isinstance(_alone(event), TuningEvent):
        return epsilon(event, inner(budget.delta), budget.adjacency) <= inner(budget.epsilon)
    return calibrate.affordable(event, budget)


def accountant(event: Event) -> tuple[str, str]:
    """Return the name and the theorem of `epsilon`."""
    return ("tuning", THEOREM) if isinstance(_alone(event), TuningEvent) else ("pld", TIGHT)


def _alone(event: Event) -> Event:
    parts = flatten(event)
    return parts[0][0] if len(parts) == 1 and parts[0][1] == 1 else event


def price(event: Event, adjacency: Adjacency) -> tuple[float, float] | None:
    """Return (ε, δ) of a tuning, perhaps on a Poisson sample; None for other events.

    On a sample of rate q: (log(1 + q(e^ε - 1)), qδ) under add-remove, for any computation of the runs on the
    sample (Balle, Barthe & Gaboardi 2018, Thm. 8). All runs use the same sample, which stays secret.
    """
    match event:
        case TuningEvent():
            return _epsilon(event, event.delta, adjacency), event.delta
        case PoissonEvent(rate, TuningEvent() as tuning) if adjacency is Adjacency.ADD_REMOVE:
            found = composition.amplify_poisson(_epsilon(tuning, tuning.delta, adjacency), tuning.delta, rate)
            return found if math.isfinite(found[0]) else None
    return None


@lru_cache(maxsize=64)
def largest_mu(budget: Budget, runs: RunCount) -> float:
    """Return the largest μ such that the best of K runs that are μ-GDP each fits a budget."""
    goal = math.log(inner(budget.delta))

    def excess(mu: float) -> float:
        event = TuningEvent(GaussianEvent(budget.adjacency.shift / mu), runs.mean, runs.shape, budget.delta)
        return math.log(max(delta(event, inner(budget.epsilon), budget.adjacency), 1e-300)) - goal

    unsafe = budget.mu
    safe = unsafe / 2
    while excess(safe) > 0:
        safe, unsafe = safe / 2, safe
        if safe < 1e-9:
            raise InvalidValue(f"{budget} is too small for the best of {runs.mean:g} runs: lower the mean")
    while unsafe - safe > 1e-8 * safe:
        middle = (safe + unsafe) / 2
        safe, unsafe = (middle, unsafe) if excess(middle) <= 0 else (safe, middle)
    return safe
