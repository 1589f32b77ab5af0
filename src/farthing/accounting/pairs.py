"""Define dominating pairs: for every event, the two distributions that an observer must distinguish.

A pair (P, Q) *dominates* a mechanism if no test distinguishes its outputs on neighbouring data better than P
from Q (Zhu, Dong & Wang 2022, Def. 7). Dominating pairs compose (their Thm. 10), also when a query depends on
earlier answers. Accounting needs the transform M(s) = E_P[(P/Q)^s], so a pair is stored as the pieces of its
integral

    ∫ φ(x) A(x)^(s+1) B(x)^(-s) dx,   A = 1 - p + p e^(ax - a²/2),  B = 1 - r + r e^(bx - b²/2),

over the line or over [start, ∞), each with a weight, plus an atom where the privacy loss is zero.

============================  ==========================  ==============================================
event                         adjacency                   pairs
============================  ==========================  ==============================================
Gaussian(σ)                   add-remove, zero-out        N(1, σ²) against N(0, σ²)
\\                             replace-one                 N(1, σ²) against N(-1, σ²)
Poisson(q) of Gaussian(σ)     add-remove, zero-out        (1-q) N(0) + q N(1) against N(0), and swapped
                                                          (Zhu et al. 2022, Thm. 11)
\\                             replace-one                 (1-q) N(0) + q N(1) against (1-q) N(0) + q N(-1)
                                                          (Lebeda et al. 2024; Schuchardt et al. 2024)
Truncated(q, B) of            add-remove                  with probability τ Poisson(q) of Gaussian(σ/2),
Gaussian(σ)                                               else of Gaussian(σ); the case is observed
                                                          (`farthing.queries.samplers.TruncatedPoisson`)
\\                             zero-out, replace-one       the same, the first of the two under replace-one
FixedSize(q) of Gaussian(σ)   all three                   the symmetric pair whose profile is the larger of
                                                          the two directions at shift 2: a record in the
                                                          sample displaces another record, or a blank one
                                                          (Zhu et al. 2022, Thm. 11)
Balanced(T) of Gaussian(σ)    add-remove, zero-out        the mean of T log-normal ratios, and swapped
                                                          (`farthing.accounting.allocation`)
Drawn(q) of Gaussian(σ)       replace-one, zero-out       nothing, or with probability q the Gaussian's pair;
                                                          the case is observed (A-DDP's sampling theorem)
Laplace, pure, bounded range  as given                    Laplace, or randomised response at ε
============================  ==========================  ==============================================

Noise is relative to the bound C of one contribution, so a shift of 2 is the sensitivity 2C of replace-one.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from farthing.budget import Adjacency
from farthing.errors import Unsupported
from farthing.queries.events import (
    ApproximateEvent,
    BalancedEvent,
    BoundedRangeEvent,
    DrawnEvent,
    Event,
    FixedSizeEvent,
    GaussianEvent,
    LaplaceEvent,
    PoissonEvent,
    PureEvent,
    TruncatedEvent,
    TuningEvent,
)

_TAIL = 1e-6  # the relative amount by which the probability of an overflow is raised, far above its error


@dataclass(frozen=True, slots=True)
class Piece:
    """One integral: A has weight ``p`` at shift ``a``, B has weight ``r`` at shift ``b``.

    ``weight`` is the probability of the piece, if the observer sees the piece of an outcome.
    """

    p: float
    a: float
    r: float
    b: float
    start: float | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Mixture:
    """Gaussian mixtures: the sum of ``pieces``, and ``atom``, the mass where the loss is zero."""

    pieces: tuple[Piece, ...]
    atom: float = 0.0


@dataclass(frozen=True, slots=True)
class Shift:
    """N(μ, 1) against N(0, 1): M(s) = exp(μ² s(s+1) / 2)."""

    mu: float


@dataclass(frozen=True, slots=True)
class SeenShift:
    """With probability ``rate`` a `Shift`, otherwise nothing; the observer sees the case."""

    rate: float
    mu: float


@dataclass(frozen=True, slots=True)
class TwoPoint:
    """Randomised response at ε, the worst ε-DP mechanism (Kairouz, Oh & Viswanath 2015)."""

    epsilon: float


@dataclass(frozen=True, slots=True)
class DoubleExponential:
    """Laplace(1/ε) against Laplace(1/ε) shifted by one."""

    epsilon: float


@dataclass(frozen=True, slots=True)
class Allocation:
    """A `Shift` in one of ``bins`` turns, uniformly (`farthing.accounting.allocation`).

    It has no transform: plans with one are composed on grids of losses. ``added`` is the direction of adding
    a record.
    """

    bins: int
    mu: float
    added: bool = False


Pair = Mixture | Shift | SeenShift | TwoPoint | DoubleExponential | Allocation


@lru_cache(maxsize=65536)
def of_event(event: Event, adjacency: Adjacency) -> tuple[Pair, ...]:
    """Return the pairs, one for each direction that differs, that dominate ``event`` under ``adjacency``.

    >>> of_event(GaussianEvent(2.0), Adjacency.REPLACE_ONE)
    (Shift(mu=1.0),)
    """
    replaced = adjacency.shift
    match event:
        case GaussianEvent(noise):
            return (Shift(replaced / noise),)
        case PoissonEvent(1.0, inner):
            return of_event(inner, adjacency)
        case FixedSizeEvent(size, of, inner) if size == of and adjacency is not Adjacency.ADD_REMOVE:
            return of_event(inner, adjacency)
        case DrawnEvent(1.0, inner) if adjacency is not Adjacency.ADD_REMOVE:
            return of_event(inner, adjacency)
        case DrawnEvent(rate, GaussianEvent(noise)) if adjacency is not Adjacency.ADD_REMOVE:
            return (SeenShift(rate, replaced / noise),)
        case BalancedEvent(1, inner):
            return of_event(inner, adjacency)
        case BalancedEvent(bins, GaussianEvent(noise)) if adjacency is not Adjacency.REPLACE_ONE:
            return Allocation(bins, 1.0 / noise), Allocation(bins, 1.0 / noise, added=True)
        case LaplaceEvent(noise):
            return (DoubleExponential(replaced / noise),)
        case PureEvent(epsilon) | BoundedRangeEvent(epsilon):
            return (TwoPoint(epsilon),)
        case PoissonEvent(rate, GaussianEvent(noise)):
            shift = 1.0 / noise
            if adjacency is Adjacency.REPLACE_ONE:
                return (Mixture((Piece(rate, shift, rate, -shift),)),)
            return _sampled(rate, shift)
        case TruncatedEvent(_, _, _, GaussianEvent()):
            return _truncated(event, adjacency)
        case FixedSizeEvent(size, of, GaussianEvent(noise)) if size == of:
            return (Shift(2.0 / noise),)
        case FixedSizeEvent(size, of, GaussianEvent(noise)):
            return (_symmetric(size / of, 2.0 / noise),)
        case PoissonEvent(rate, inner) if adjacency is not Adjacency.REPLACE_ONE:
            return (TwoPoint(_amplified(_pure(inner, adjacency, event), rate)),)
        case FixedSizeEvent(size, of, inner) if adjacency is Adjacency.REPLACE_ONE:
            return (TwoPoint(_amplified(_pure(inner, adjacency, event), size / of)),)
    instead = (
        "the basic filter" if isinstance(event, ApproximateEvent | TuningEvent) else "an RDP or zCDP filter"
    )
    raise Unsupported(f"no dominating pair is known for {event} under {adjacency}; price it with {instead}")


def largest_loss(pair: Pair) -> float:
    """Return the largest privacy loss that can occur, rounded up: from this ε on, δ is zero."""
    match pair:
        case TwoPoint(epsilon) | DoubleExponential(epsilon):
            return epsilon
        case Mixture(pieces) if all(piece.p == 0.0 for piece in pieces):
            return -math.log1p(-max(piece.r for piece in pieces)) * (1 + 1e-15)
    return math.inf


def _sampled(rate: float, shift: float) -> tuple[Pair, ...]:
    if rate == 1.0:
        return (Shift(shift),)
    return Mixture((Piece(rate, shift, 0.0, 0.0),)), Mixture((Piece(0.0, 0.0, rate, shift),))


def overflow(event: TruncatedEvent) -> float:
    """Return the probability that the draw of the other records fills the batch, rounded up.

    >>> round(overflow(TruncatedEvent(0.5, 2, 4, GaussianEvent(1.0))), 5)  # two or three of three others
    0.5
    """
    from scipy.special import betainc  # slow to import

    others = event.of - 1
    if event.size > others:
        return 0.0
    if event.rate == 1.0:
        return 1.0
    return min(1.0, float(betainc(event.size, others - event.size + 1, event.rate)) * (1 + _TAIL) + 1e-300)


def _truncated(event: TruncatedEvent, adjacency: Adjacency) -> tuple[Pair, ...]:
    """Return mixtures, with the case observed, of an ordinary sample's pairs and of a full batch's pairs."""
    assert isinstance(event.event, GaussianEvent)
    full, added = overflow(event), adjacency is Adjacency.ADD_REMOVE
    usual = of_event(PoissonEvent(event.rate, event.event), adjacency)
    pushed = of_event(
        PoissonEvent(event.rate, GaussianEvent(event.event.noise / 2)),
        adjacency if added else Adjacency.REPLACE_ONE,
    )
    if full in (0.0, 1.0):
        return usual if full == 0.0 else pushed
    ways = ((one, pushed[min(way, len(pushed) - 1)]) for way, one in enumerate(usual))
    return tuple(Mixture(_weighed(one, 1 - full) + _weighed(other, full)) for one, other in ways)


def _weighed(pair: Pair, weight: float) -> tuple[Piece, ...]:
    assert isinstance(pair, Mixture)
    return tuple(replace(piece, weight=weight) for piece in pair.pieces)


def _symmetric(rate: float, shift: float) -> Mixture:
    """Return the pair with losses > 0 of the mixture against N(0), and losses < 0 of N(0) against it."""
    start = shift / 2  # where the two densities cross
    atom = (1 - rate) * math.erf(start / math.sqrt(2))
    return Mixture((Piece(rate, shift, 0.0, 0.0, start), Piece(0.0, 0.0, rate, shift, start)), atom)


def _pure(event: Event, adjacency: Adjacency, whole: Event) -> float:
    match event:
        case PureEvent(epsilon) | BoundedRangeEvent(epsilon):
            return epsilon
        case LaplaceEvent(noise):
            return adjacency.shift / noise
    raise Unsupported(f"{whole} has no dominating pair: only Gaussian and pure events can be sampled")


def _amplified(epsilon: float, rate: float) -> float:
    """Return log(1 + q(e^ε - 1)): Balle, Barthe & Gaboardi 2018, Thm. 8 and 9."""
    if epsilon < 700:
        return math.log1p(rate * math.expm1(epsilon)) * (1 + 1e-15)
    return (epsilon + math.log(rate + (1 - rate) * math.exp(-epsilon))) * (1 + 1e-15)
