"""Account tightly on a grid of privacy losses, for few steps or tiny sampling rates.

Most steps of such a plan reveal nothing, so M(λ + iu) hardly decays and `inversion` has to smooth. Here the
loss is put on a grid of cells instead ("connect the dots", Doroshenko et al. 2022): the mass of a cell goes
to its two ends so that its masses under P and Q stay the same, which can only raise δ(ε), and the grid is
convolved by FFT.

Truncation errors are bounded and added: losses beyond the last cell count as infinite, sums beyond the grid
are bounded by Chernoff, and mass that wraps around from below only raises δ. The rounding of the masses moves
them up a cell; the rounding of the transforms is added (`_ROUNDING`, many times the actual loss).

A few steps without a pair here, such as Laplace noise, use dp-accounting's own grid (`reference_epsilon`,
`reference_delta`). It is connected in the same way, so it is an upper bound too, and takes tens of
milliseconds.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from farthing.accounting.pairs import Mixture, Pair, Piece, SeenShift, Shift
from farthing.budget import Adjacency
from farthing.queries.events import Event, GaussianEvent, LaplaceEvent, PoissonEvent, flatten

Real = npt.NDArray[np.float64]
Steps = Sequence[tuple[Pair, int]]

_LONGEST, _HIGHEST = 2**16, 150.0  # the most cells, and the largest loss, whose exponential is finite
_MANY, _MORE = 4096, 4  # from this many steps on, there are this many times as many cells
_LEAST_RATE, _LEAST_SHIFT, _MOST_SHIFT = 1e-12, 1e-6, 100.0  # outside, floats are not precise enough
_SHARE = 1e-5  # the share of δ that may lie beyond the grid
_ROUNDING = 1e-15  # per step and per doubling of the grid
_FINE = 0.05  # the width of a cell over ε/√(steps · ln 1/δ); its relative cost in ε is about its square
_TILTS = (1, 2, 4, 8, 16, 32, 64, 128)

_REFERENCE_POINTS = 1000  # points of dp-accounting's grid between 0 and the expected ε
_FINEST, _REFERENCE_LONGEST = 5e-5, 100_000  # finer or longer grids take seconds
_LEAST_NOISE, _MOST_NOISE, _REFERENCE_RATE = 0.05, 1e5, 1e-9  # outside, its floats are not precise enough
SMALLEST_DELTA = 1e-11  # below this, dp-accounting's own truncation of tails is visible
_REFERENCE_ROUNDING = 1e-14  # above the error in δ of its convolutions by fast Fourier transforms


def epsilon(ways: Sequence[Steps], delta: float, about: float) -> float:
    """Return an upper bound on ε(δ), the largest over directions; infinite if a step has no grid."""
    if not 0 < about < math.inf or not all(_known(pair) for steps in ways for pair, _ in steps):
        return math.inf
    for _ in range(4):  # the first pass sets the resolution of the grid
        last, about = about, min(about, max(_epsilon(steps, delta, about) for steps in ways))
        if not 0 < about < 0.9 * last:
            break
    return about


def _known(pair: Pair) -> bool:
    if not isinstance(pair, Mixture | Shift | SeenShift):
        return False
    pieces, _, weight = _pieces(pair)
    rates, shifts = zip(*((max(piece.p, piece.r), max(piece.a, piece.b)) for piece in pieces), strict=True)
    return bool(weight * min(rates) > _LEAST_RATE and _LEAST_SHIFT < min(shifts) <= max(shifts) < _MOST_SHIFT)


def _epsilon(steps: Steps, delta: float, about: float) -> float:
    total = sum(count for _, count in steps)
    width, top = about * _FINE / math.sqrt(-total * math.log(delta)), 2 * about
    for _ in range(8):  # until no more than a small part of δ lies beyond the grid
        if top > _HIGHEST:
            return math.inf
        width = max(width, 2 * top / (_LONGEST * (_MORE if total > _MANY else 1)))
        size = 2 ** math.ceil(math.log2(2 * top / width))
        masses = [_masses(pair, width, size) for pair, _ in steps]
        losses = width * (np.arange(size) - size // 2)
        beyond = sum(count * lost for (_, lost), (_, count) in zip(masses, steps, strict=True))
        tails = [_sums_beyond(masses, steps, losses, side * top) for side in (1, -1)]
        if max(tails) + beyond <= _SHARE * delta:
            break
        top *= 2
    rest = delta - beyond - tails[0] - _ROUNDING * (total + 16 * math.log2(size))
    if rest <= 0:
        return math.inf
    spectrum = np.ones(size // 2 + 1, complex)
    for (mass, _), (_, count) in zip(masses, steps, strict=True):
        spectrum *= np.fft.rfft(np.fft.ifftshift(mass)) ** count
    slip = 1e-14 * total * (1 + top)  # the error of the loss at which a cut was made
    return _crossing(np.fft.fftshift(np.fft.irfft(spectrum, size)), losses, rest) + slip


def _crossing(density: Real, losses: Real, delta: float) -> float:
    """Return the least ε >= 0 with Σ density (1 - e^(ε - loss))₊ <= δ."""
    positive = losses > 0
    mass, at = np.maximum(density[positive], 0.0), losses[positive]
    above = np.cumsum(mass[::-1])[::-1]
    below = np.cumsum((mass * np.exp(-at))[::-1])[::-1]
    rest = delta - 4e-16 * len(at) * above  # less the rounding errors of the sums
    held = above - np.exp(at) * below <= rest  # at every grid point
    first = int(np.argmax(held))
    if not held[first]:
        return math.inf
    if below[first] == 0 or above[first] <= rest[first]:
        return float(at[first])
    found = math.log((above[first] - rest[first]) / below[first]) * (1 + 1e-12)
    return min(max(found, 0.0), float(at[first]))


def _sums_beyond(masses: list[tuple[Real, float]], steps: Steps, losses: Real, top: float) -> float:
    """Return Chernoff's bound on the mass of sums above ``top``; below ``top`` if it is negative."""
    tilted, best = np.exp(losses / top), math.inf
    for tilt in _TILTS:
        parts = zip(masses, steps, strict=True)
        log = sum(count * math.log(float(mass @ tilted)) for (mass, _), (_, count) in parts) - tilt
        best, tilted = min(best, log), tilted * tilted
    return math.exp(min(best, 0.0)) * (1 + 1e-9)


def _masses(pair: Pair, width: float, size: int) -> tuple[Real, float]:
    """Return P's mass at the grid points, rounded up in all δ(ε), and the mass beyond the last point."""
    mass, beyond = np.zeros(size), 0.0
    pieces, atom, weight = _pieces(pair)
    edges: Real = width * (np.arange(size, dtype=np.float64) - size // 2)
    for piece in pieces:
        found, more = _piece(piece, edges, width)
        mass += weight * piece.weight * found
        beyond += weight * piece.weight * more
    mass[size // 2] += atom
    return mass, beyond


def _pieces(pair: Pair) -> tuple[tuple[Piece, ...], float, float]:
    match pair:
        case Shift(mu):
            return (Piece(1.0, mu, 0.0, 0.0),), 0.0, 1.0
        case SeenShift(rate, mu):
            return (Piece(1.0, mu, 0.0, 0.0),), 1 - rate, rate
    assert isinstance(pair, Mixture)
    return pair.pieces, pair.atom, 1.0


def _piece(piece: Piece, edges: Real, width: float) -> tuple[Real, float]:
    """Return the masses of one piece at the edges, and the mass with a larger loss than the last edge."""
    cuts = _where(piece, edges)  # the x whose loss is an edge; falling if B holds the mixture
    start = -math.inf if piece.start is None else piece.start
    inside = np.maximum(cuts, start)
    p, p_error = _between(piece.p, piece.a, inside)
    q, q_error = _between(piece.r, piece.b, inside)
    rising = piece.p > 0
    lowest = _mass(piece.p, piece.a, *((start, inside[0]) if rising else (inside[0], math.inf)))
    highest = _mass(piece.p, piece.a, *((inside[-1], math.inf) if rising else (start, inside[-1])))
    scale = np.exp(np.minimum(edges[:-1], 700.0))
    gap = p - q * scale + p_error + q_error * scale
    upper = np.clip(gap / -math.expm1(-width), 0.0, p)
    mass = np.zeros(len(edges))
    mass[1:] += upper
    mass[:-1] += p - upper
    mass[0] += lowest
    return mass * (1 + 1e-15), highest * (1 + 1e-12)


def _mass(weight: float, shift: float, low: float, high: float) -> float:
    return float(_between(weight, shift, np.array([low, high]))[0][0])


def _between(weight: float, shift: float, cuts: Real) -> tuple[Real, Real]:
    """Return the mass of (1 - w) N(0) + w N(shift) between cuts, which may fall, and its rounding error."""
    total, error = np.zeros(len(cuts) - 1), np.zeros(len(cuts) - 1)
    for part, centre in ((1 - weight, 0.0), (weight, shift)):
        if part > 0:
            tails = ndtr(-np.abs(cuts - centre))  # the nearer tail, so only differences lose digits
            right = cuts > centre
            apart = np.abs(np.diff(tails))
            total += part * np.where(right[1:] == right[:-1], apart, 1 - tails[1:] - tails[:-1])
            error += 1e-15 * part * np.maximum(tails[1:], tails[:-1])
    return total, error


def _where(piece: Piece, losses: Real) -> Real:
    """Return the x at which log A/B equals each loss; infinite if there is none."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if piece.b < 0:  # mirrored: q e^(-a²/2) (w² - e^L) = (1-q) (e^L - 1) w, w = e^(ax)
            grown, weight = np.expm1(losses), piece.p * math.exp(-piece.a * piece.a / 2)
            half = (1 - piece.p) * grown / (2 * weight)
            root = np.hypot(half, np.exp(losses / 2))
            w = np.where(half >= 0, half + root, np.exp(losses) / (root - half))
            return np.asarray(np.log(w) / piece.a)
        rate, shift, sign = (piece.p, piece.a, 1) if piece.p > 0 else (piece.r, piece.b, -1)
        grown = np.expm1(sign * losses) / rate
        cuts = (np.log1p(grown) + shift * shift / 2) / shift
        return np.where(grown > -1, cuts, -math.inf)


def reference_epsilon(event: Event, delta: float, adjacency: Adjacency, about: float) -> float:
    """Return an upper bound on ε(δ); infinite if dp-accounting has no grid for the event."""
    if delta < SMALLEST_DELTA or not 0 < about < math.inf:
        return math.inf
    accountant = _compose(event, adjacency, about)
    return math.inf if accountant is None else float(accountant.get_epsilon(delta - _REFERENCE_ROUNDING))


def reference_delta(event: Event, epsilon: float, adjacency: Adjacency) -> float:
    """Return an upper bound on δ(ε), at least 1e-11; 1 if dp-accounting has no grid for the event."""
    accountant = _compose(event, adjacency, epsilon)
    return (
        1.0
        if accountant is None
        else max(float(accountant.get_delta(epsilon)) + _REFERENCE_ROUNDING, SMALLEST_DELTA)
    )


def _compose(event: Event, adjacency: Adjacency, about: float) -> Any:
    """Return dp-accounting's accountant of the event, on a grid that suits an ε of ``about``."""
    steps = flatten(event)
    if not all(_translatable(part, adjacency) for part, _ in steps):
        return None
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    relation = {
        Adjacency.ADD_REMOVE: dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
        Adjacency.REPLACE_ONE: dp_accounting.NeighboringRelation.REPLACE_ONE,
        Adjacency.ZERO_OUT: dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
    }[adjacency]
    interval = max(
        about / _REFERENCE_POINTS,
        _FINEST,
        max(_reach(part, adjacency) for part, _ in steps) / _REFERENCE_LONGEST,
    )
    accountant = PLDAccountant(relation, value_discretization_interval=interval)
    try:
        for part, count in steps:
            accountant.compose(_translate(part), count)
    except (ValueError, ArithmeticError):  # outside the range of its floating point
        return None
    return accountant


def _reach(event: Event, adjacency: Adjacency) -> float:
    """Return approximately the largest privacy loss on its grid for one step."""
    match event:
        case GaussianEvent(noise):
            shift = adjacency.shift / noise
            return shift * (shift / 2 + 10)
        case PoissonEvent(_, inner):
            return _reach(inner, adjacency)
    return 0.0


def _translatable(event: Event, adjacency: Adjacency) -> bool:
    match event:
        case GaussianEvent(noise):
            return _LEAST_NOISE < noise < _MOST_NOISE
        case LaplaceEvent(noise):
            return _LEAST_NOISE < noise < _MOST_NOISE and adjacency is not Adjacency.REPLACE_ONE
        case PoissonEvent(rate, GaussianEvent() | LaplaceEvent() as inner):
            return rate > _REFERENCE_RATE and _translatable(inner, adjacency)
    return False


def _translate(event: Event) -> object:
    import dp_accounting

    match event:
        case GaussianEvent(noise):
            return dp_accounting.GaussianDpEvent(noise)
        case LaplaceEvent(noise):
            return dp_accounting.LaplaceDpEvent(noise)
        case PoissonEvent(rate, inner):
            return dp_accounting.PoissonSampledDpEvent(rate, _translate(inner))
    raise AssertionError(event)
