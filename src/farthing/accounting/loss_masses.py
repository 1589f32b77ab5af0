"""Discretise privacy losses on a grid, rounded up, for one event or many.

A `LossMasses` holds masses under P at whole multiples of ``step``, and at infinity. It bounds a dominating
pair in one sense only: for every convex, non-increasing f with f(0) = 1 the sum Σ wⱼ f(r e^(-jh)) + w_∞ is at
least E_P[f(r Q/P)]. The recursion of `accounting.menu` needs this property, and four operations preserve it:

* *Connecting the dots.* The mass of an interval of losses goes to its two ends so that its masses under P and
  under Q stay the same (Doroshenko, Ghazi, Kamath, Kumar & Manurangsi 2022): a two-point distribution of Q/P
  with the same mean, and f is convex.
* *Moving mass upwards*, to a larger loss or to infinity: f does not increase. Tails are cut off and masses
  are rounded in this way.
* *Convolving* two of them: f averaged over one is again convex and non-increasing.
* *Coarsening* to every other point, which is connecting the dots once more, in closed form.

A choice of bounded range ε (an exponential mechanism) has losses in some [t - ε, t] that contains 0. Given t,
Q/P has mean 1 within [e^-t, e^(ε-t)], so the worst convex average is that of its two ends, and H_a is at most
(e^ε - e^t)(1 - a e^-t) / (e^ε - 1) (generalised randomised response, Dong, Durfee & Rogers 2020). The largest
over t, at e^t = √(a e^ε), is (e^(ε/2) - √a)² / (e^ε - 1) for a from e^-ε to e^ε: the profile of one pair,
`WorstChoice`, whose loss has density e^(x/2) / (4 sinh(ε/2)) on [-ε, ε] under P, and the mirror image under
Q. So it dominates every choice in both directions; its loss has a third of the variance of randomised
response. On a Poisson batch the pair is mixed as any other (Zhu et al. 2022, Thm. 11; add-remove, zero-out).

Rounding. All terms are non-negative, so a sum of n terms has a relative error below n units of 2⁻⁵³ in any
order, and is raised by as much. The relative error of masses of normal intervals is taken to be `_MASS`,
three times the worst error that cephes states for Φ. The edges of intervals have an error of `EDGE` in the
loss: `accounting.menu` subtracts from ε the amount by which a loss may exceed its interval.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from farthing.accounting import allocation, pairs
from farthing.budget import Adjacency
from farthing.queries.events import BoundedRangeEvent, Event, PoissonEvent

Array = NDArray[np.float64]

EDGE = 2.0**-48  # the amount by which a loss of at most 16 may exceed the interval that counts it
_MASS = 1e-13  # the relative error of the mass of an interval
_UNIT = 2.0**-53
_SPREAD = 16  # grid points per standard deviation of one event's loss
_WIDE = 48  # grid points per standard deviation from which on a grid is made coarser
_LONGEST = 12_000  # the most grid points of one event
_FINE = 160  # grid points per standard deviation of a whole plan's loss


@dataclass(frozen=True, slots=True)
class LossMasses:
    """Masses under P at the losses (first + j) · step, and at infinity."""

    step: float
    first: int
    masses: Array
    infinite: float

    def deviation(self) -> float:
        """Return the standard deviation of the finite losses."""
        at = (self.first + np.arange(len(self.masses))) * self.step
        weights = self.masses / self.masses.sum()
        return float(np.sqrt(weights @ (at - weights @ at) ** 2))


@dataclass(frozen=True, slots=True)
class WorstChoice:
    """The worst choice of bounded range ε on a Poisson batch; ``added`` if the record is added."""

    epsilon: float
    rate: float = 1.0
    added: bool = False


Pair = pairs.Pair | WorstChoice


def ways(event: Event, adjacency: Adjacency) -> tuple[Pair, ...]:
    """Return the pairs that dominate an event on a menu, one for each direction that differs."""
    match event:
        case BoundedRangeEvent(epsilon) | PoissonEvent(1.0, BoundedRangeEvent(epsilon)):
            return (WorstChoice(epsilon),)
        case PoissonEvent(rate, BoundedRangeEvent(epsilon)) if adjacency is not Adjacency.REPLACE_ONE:
            return WorstChoice(epsilon, rate), WorstChoice(epsilon, rate, added=True)
    return pairs.of_event(event, adjacency)


def delta(losses: LossMasses, epsilon: float) -> float:
    """Return δ at ε of losses on a grid."""
    at = (losses.first + np.arange(len(losses.masses))) * losses.step
    return float(losses.masses @ -np.expm1(np.minimum(epsilon - at, 0.0))) + losses.infinite


def composed(steps: Sequence[tuple[Pair, int]], cut: float) -> LossMasses:
    """Return the losses of several events with their counts, on a grid that suits their sum."""
    share = cut / max(1, len(steps))
    spread = math.sqrt(sum(count * _deviation(pair) ** 2 for pair, count in steps))
    parts = [repeated(pair, count, spread / _FINE, share) for pair, count in steps]
    total = parts[0]
    for part in parts[1:]:
        total = _convolved(total, part, share)
    return total


def repeated(pair: Pair, count: int, step: float, cut: float) -> LossMasses:
    """Return the losses of ``count`` events on a grid of ``step``; truncation moves mass <= ``cut``."""
    share = cut / 4 / count  # for one event; it doubles with the number of events
    fine = step
    low, high = _ends(pair, share)
    while fine > _deviation(pair) / _SPREAD and (high - low) / fine < _LONGEST / 2:
        fine /= 2
    total = one = _single(pair, fine, share)
    done = 1
    for bit in bin(count)[3:]:
        total, done = _convolved(total, total, share * done), 2 * done
        if bit == "1":
            total, done = _convolved(total, one, share), done + 1
        while total.step < step and total.deviation() > _WIDE * total.step:
            total, one = _coarser(total), _coarser(one)
    while total.step < step:
        total = _coarser(total)
    return total


def _single(pair: Pair, step: float, cut: float) -> LossMasses:
    """Return the losses of one event by connecting the dots; mass outside the grid is at most ``cut``."""
    if isinstance(pair, pairs.Allocation):
        return _of_atoms(*allocation.atoms(pair.bins, pair.mu, pair.added), step, cut)
    low, high = _ends(pair, cut)
    first, last = math.floor(low / step), math.ceil(high / step)
    edges: Array = np.arange(first, last + 1) * np.float64(step)
    p, q = _intervals(pair, edges)
    p = p * (1 + _MASS)
    upper = (p - q * (1 - 3 * _MASS) * np.exp(edges[:-1])) / -math.expm1(-step)
    upper = np.clip(upper, 0.0, p)
    masses = np.zeros(last - first + 1)
    masses[1:] += upper
    masses[:-1] += p - upper
    masses[0] += 2 * cut
    for loss, mass in _atoms(pair):
        below = min(math.floor(loss / step), last - 1)
        up = min(1.0, (1 - math.exp(below * step - loss)) / -math.expm1(-step) + 1e-15 / step)
        masses[below + 1 - first] += mass * up
        masses[below - first] += mass * (1 - up)
    return LossMasses(step, first, masses * (1 + 8 * _UNIT), 2 * cut)


def _of_atoms(losses: Array, masses: Array, infinite: float, step: float, cut: float) -> LossMasses:
    """Connect the dots of masses at single losses; at most ``cut`` is moved up at either end."""
    order = np.argsort(losses)
    losses, masses = losses[order], masses[order]
    above = np.cumsum(masses[::-1])[::-1]
    kept = (np.cumsum(masses) > cut) & (above > cut)
    low, high = losses[kept][0], losses[kept][-1]
    infinite += _raised(masses[losses > high])
    masses, losses = masses[losses <= high], np.maximum(losses[losses <= high], low)
    place = np.floor(losses / step)
    up = np.expm1(place * step - losses) / math.expm1(-step)
    up = np.clip(up + 1e-15 / step, 0.0, 1.0)
    first = int(place[0])
    at = place.astype(np.int64) - first
    size = int(at[-1]) + 2
    found = np.bincount(at + 1, masses * up, size) + np.bincount(at, masses * (1 - up), size)
    raised = np.asarray(found, np.float64) * (1 + (len(masses) + 8) * _UNIT)
    return LossMasses(step, first, raised, infinite)


def _convolved(one: LossMasses, other: LossMasses, cut: float) -> LossMasses:
    terms = min(len(one.masses), len(other.masses)) + 4
    masses = np.convolve(one.masses, other.masses) * (1 + terms * _UNIT)
    infinite = (one.infinite + other.infinite) * (1 + 2 * _UNIT)
    above = np.cumsum(masses[::-1])[::-1]
    end = max(1, int(np.count_nonzero(above > cut)))
    begin = min(int(np.count_nonzero(np.cumsum(masses[:end]) <= cut)), end - 1)
    kept = masses[begin:end].copy()
    kept[0] += _raised(masses[:begin])
    infinite += _raised(masses[end:])
    return LossMasses(one.step, one.first + other.first + begin, kept, infinite)


def _coarser(losses: LossMasses) -> LossMasses:
    """Keep every other point: the mass at an odd point goes to both neighbours and keeps its mean of Q/P."""
    first, masses = losses.first, losses.masses
    if first % 2:
        first, masses = first - 1, np.concatenate([[0.0], masses])
    if len(masses) % 2 == 0:
        masses = np.concatenate([masses, [0.0]])
    up = 1 / (1 + math.exp(-losses.step)) + 2.0**-51
    even, odd = masses[::2].copy(), masses[1::2]
    even[1:] += odd * up
    even[:-1] += odd * (1 - up)
    return LossMasses(2 * losses.step, first // 2, even * (1 + 8 * _UNIT), losses.infinite)


def _raised(masses: Array) -> float:
    return float(masses.sum()) * (1 + (len(masses) + 1) * _UNIT)


@lru_cache(maxsize=1024)
def _deviation(pair: Pair) -> float:
    """Return approximately the standard deviation of one event's loss."""
    low, high = _ends(pair, 1e-9)
    return _single(pair, (high - low) / 4000, 1e-9).deviation()


# --- the events


def _ends(pair: Pair, cut: float) -> tuple[float, float]:
    """Return two losses: P has at most ``cut`` of mass below the first, and as much above the second."""
    z = -float(ndtri(cut))
    match pair:
        case pairs.Shift(mu) | pairs.SeenShift(_, mu):
            return min(0.0, mu * mu / 2 - z * mu), mu * mu / 2 + z * mu
        case pairs.TwoPoint(epsilon) | pairs.DoubleExponential(epsilon):
            return -epsilon, epsilon
        case pairs.Allocation(bins, mu, added):
            losses, masses, _ = allocation.atoms(bins, mu, added)
            likely = losses[masses > cut / len(masses)]
            return float(likely.min()), float(likely.max())
        case WorstChoice(epsilon, rate, added):
            ends = [math.log1p(rate * math.expm1(x)) for x in (-epsilon, epsilon)]
            return (-ends[1], -ends[0]) if added else (ends[0], ends[1])
        case pairs.Mixture(pieces):
            both = [_ends_of_piece(piece, z) for piece in pieces]
            return min(0.0, *(low for low, _ in both)), max(0.0, *(high for _, high in both))


def _ends_of_piece(piece: pairs.Piece, z: float) -> tuple[float, float]:
    half = piece.start is not None
    if piece.r == 0.0:  # a mixture against N(0): the loss rises from log(1 - p)
        return 0.0 if half else math.log1p(-piece.p), _log_mixture(piece.p, piece.a, z + piece.a)
    if piece.p == 0.0:  # N(0) against a mixture: the loss falls from -log(1 - r)
        return -_log_mixture(piece.r, piece.b, z), 0.0 if half else -math.log1p(-piece.r)
    far = z + piece.a
    high = _log_mixture(piece.p, piece.a, far) - _log_mixture(piece.r, piece.b, far)
    return -high, high


def _log_mixture(weight: float, shift: float, x: float) -> float:
    """Return log(1 - w + w e^(sx - s²/2)), the log of a mixture's density over that of N(0) at x."""
    exponent = shift * x - shift * shift / 2
    if exponent > 700:
        return exponent + math.log(weight + (1 - weight) * math.exp(-exponent))
    return math.log1p(weight * math.expm1(exponent))


def _atoms(pair: Pair) -> list[tuple[float, float]]:
    """Return the losses with positive probability, with their masses under P."""
    match pair:
        case pairs.TwoPoint(epsilon):
            return [(epsilon, 1 / (1 + math.exp(-epsilon))), (-epsilon, 1 / (1 + math.exp(epsilon)))]
        case pairs.DoubleExponential(epsilon):
            return [(epsilon, 0.5), (-epsilon, 0.5 * math.exp(-epsilon))]
        case pairs.SeenShift(rate, _):
            return [(0.0, 1 - rate)]
        case pairs.Mixture(_, atom) if atom:
            return [(0.0, atom)]
    return []


def _intervals(pair: Pair, edges: Array) -> tuple[Array, Array]:
    """Return the masses under P and under Q of the losses between edges, without the atoms."""
    match pair:
        case pairs.Shift(mu):
            return _normal(edges / mu - mu / 2), _normal(edges / mu + mu / 2)
        case pairs.SeenShift(rate, mu):
            return rate * _normal(edges / mu - mu / 2), rate * _normal(edges / mu + mu / 2)
        case pairs.TwoPoint():
            return np.zeros(len(edges) - 1), np.zeros(len(edges) - 1)
        case pairs.DoubleExponential(epsilon):
            inside = np.clip(edges, -epsilon, epsilon)
            p = np.exp((inside[:-1] - epsilon) / 2) * np.expm1(np.diff(inside) / 2) / 2
            return p, np.exp((-inside[1:] - epsilon) / 2) * np.expm1(np.diff(inside) / 2) / 2
        case WorstChoice(epsilon, rate, added):
            x = _before_sampling(epsilon, rate, -edges[::-1] if added else edges)
            scale = np.expm1(np.diff(x) / 2) / (2 * math.sinh(epsilon / 2))
            p, q = np.exp(x[:-1] / 2) * scale, np.exp(-x[1:] / 2) * scale
            mixed = (1 - rate) * q + rate * p
            return (q[::-1], mixed[::-1]) if added else (mixed, q)
        case pairs.Mixture(pieces):
            found = [_of_piece(piece, edges) for piece in pieces]
            return sum(p for p, _ in found), sum(q for _, q in found)  # type: ignore[return-value]
        case pairs.Allocation():
            raise AssertionError("an allocation has atoms only")


def _before_sampling(epsilon: float, rate: float, losses: Array) -> Array:
    """Return the x in [-ε, ε] whose log(1 - rate + rate e^x) are these losses; the end points become ±ε."""
    with np.errstate(divide="ignore"):
        x: Array = np.clip(np.log1p(np.maximum(np.expm1(losses) / rate, -1.0)), -epsilon, epsilon)
    x[0], x[-1] = -epsilon, epsilon
    return x


def _of_piece(piece: pairs.Piece, edges: Array) -> tuple[Array, Array]:
    x = _where(piece, edges)
    if piece.start is not None:
        x = np.maximum(x, piece.start)
    p, q = ((1 - weight) * _normal(x) for weight in (piece.p, piece.r))
    if piece.p:
        p = p + piece.p * _normal(x - piece.a)
    if piece.r:
        q = q + piece.r * _normal(x - piece.b)
    return piece.weight * p, piece.weight * q


def _where(piece: pairs.Piece, loss: Array) -> Array:
    """Return the x at which a piece has these losses; -∞ or ∞ if there is none."""
    p, a, r, b = piece.p, piece.a, piece.r, piece.b
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if r == 0.0:
            return (np.log(np.maximum(np.expm1(loss) / p + 1, 0.0)) + a * a / 2) / a
        if p == 0.0:
            return (np.log(np.maximum(np.expm1(-loss) / r + 1, 0.0)) + b * b / 2) / b
        # (1 - p + p k z) = e^loss (1 - p + p k / z) for z = e^(ax), k = e^(-a²/2): a quadratic in z
        k, middle = p * math.exp(-a * a / 2), (1 - p) * -np.expm1(loss)
        root = np.sqrt(middle * middle + 4 * k * k * np.exp(loss))
        z = np.where(middle > 0, 2 * k * np.exp(loss) / (middle + root), (root - middle) / (2 * k))
        positions: Array = np.log(z) / a
    return positions


def _normal(x: Array) -> Array:
    """Return the masses of N(0, 1) between neighbouring x, in either order, accurate in both tails."""
    low, high = np.minimum(x[:-1], x[1:]), np.maximum(x[:-1], x[1:])
    left, right = ndtr(high) - ndtr(low), ndtr(-low) - ndtr(-high)
    masses: Array = np.where(low > 0, right, left)
    return masses
