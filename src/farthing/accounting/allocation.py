"""Account for balanced draws without Monte Carlo: a record takes part in one of T turns, chosen uniformly.

Such draws ("balls and bins", Chua et al. 2025; "random allocation", Feldman & Shenfeld 2025) put every record
into exactly one batch of a pass. The literature accounts for them by simulation or by looser formulas.

**Theorem.** Let a record take part in one of T turns, uniformly at random and independently of all others,
with a contribution of norm at most C and Gaussian noise of standard deviation C/μ, and let each turn's sum
depend on earlier answers in any way. Under add-remove and zero-out the T answers are dominated, in both
directions, by the pair whose likelihood ratio (with the record over without) is L = (Y_1 + ... + Y_T) / T,
where the Y_t are independent and log-normal under "without": log Y_t is N(-μ²/2, μ²).

Proof. Given all other records' turns the ratio is the mean of Y_t = exp(<g_t, z_t> - |g_t|²/2), where z_t ~
N(0, I) is the noise of turn t and g_t the record's contribution, both divided by the standard deviation:
|g_t| <= μ, and g_t is a function of the answers before t. Divergences are E[f(L)] under "without" with f
convex: (L - a)₊ in one direction, (1 - a L)₊ in the other. Given the past, Y_t is the exponential martingale
of a Brownian motion at time |g_t|², so it is smaller in convex order than at time μ². Replace the last Y_t
first: the average of f over it is convex in the sum of the others; and so on. Mixtures over the other
records' turns do not increase the divergence (joint convexity). ∎

Each pass draws anew, so passes compose (Zhu, Dong & Wang 2022, Thm. 10). Turns after an early end count as
g_t = 0.

**Numerically**, upper bounds on all E[f(L)] are kept by spreading mass: Y is put on grid points so that every
interval keeps its mass and its mean (a convex order), sums of two distributions on grids are put on a new
grid in the same way, and T is reached by doubling. All terms are non-negative, so rounding errors are
relative. Beyond the last point Y counts as 0, and sums are cut off at their last point. The mean that L loses
by this is counted as mass of an infinite loss in the first direction, (a + b - c)₊ <= (a - c)₊ + b, and
raises the bound in the second. Masses are rounded to the side that raises the bound of their direction.

>>> losses, masses, infinite = atoms(100, 1.0, False)
>>> 0.62 < float(losses[masses[::-1].cumsum()[::-1] > 1e-4][-1]) < 3.0
True
"""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from farthing.errors import Unsupported

Array = NDArray[np.float64]

_POINTS = 500  # grid points per distribution
_CUT = 1e-13  # the share of the mean of L that may lie beyond the grid of one turn
_MOST_SHIFT, _MOST_BINS = 6.0, 10**6  # beyond these, grids get too coarse
_UP = 1e-10  # relative rounding of the split of an interval
_FAR = 10.0  # standard deviations of a sum that its grid covers


@lru_cache(maxsize=512)
def atoms(bins: int, mu: float, added: bool) -> tuple[Array, Array, float]:
    """Return the losses of a pass of ``bins`` turns, their masses and the mass of an infinite loss.

    If ``added``, masses are those of "without"; otherwise they are those of "with".
    """
    if mu > _MOST_SHIFT or bins > _MOST_BINS:
        raise Unsupported(
            f"balanced draws need noise of at least {1 / _MOST_SHIFT:.3g} and at most {_MOST_BINS:,} turns, "
            f"got noise {1 / mu:.3g} and {bins:,} turns: use Poisson(sampling_rate) instead"
        )
    ratios, masses, excess = _law(bins, mu, not added)
    some = ratios > 0
    if added:
        return -np.log(ratios[some]), masses[some], float(masses[~some].sum())
    return np.log(ratios[some]), masses[some] * ratios[some], excess


def _law(bins: int, mu: float, rising: bool) -> tuple[Array, Array, float]:
    """Return the values of L, their masses under "without", and the part of its mean that was cut off."""
    one = _points(1, mu)
    single, lost = _single(mu, one, rising)
    points, masses, excess, count = one, single, lost, 1
    for bit in bin(bins)[3:]:
        points, masses, more = _added((points, masses), (points, masses), _points(2 * count, mu), rising)
        excess, count = 2 * excess + more, 2 * count
        if bit == "1":
            points, masses, more = _added((points, masses), (one, single), _points(count + 1, mu), rising)
            excess, count = excess + lost + more, count + 1
    return points / bins, masses, excess / bins * (1 + _UP)


def _points(count: int, mu: float) -> Array:
    """Return 0 and grid points for a sum of ``count`` terms: dense around its mean, sparse farther out."""
    z = -float(ndtri(_CUT))
    spread = math.sqrt(math.expm1(mu * mu) / count)  # of the mean, relative
    far = mu * (z + mu) - mu * mu / 2
    low = -mu * z - mu * mu / 2 if count == 1 else max(-mu * z, -_FAR * spread - 0.1)
    high = far if count == 1 else np.logaddexp(far - math.log(count), math.log1p(_FAR * spread))
    unit = 2 * math.sqrt(math.log1p(spread * spread))
    even = np.linspace(math.asinh(low / unit), math.asinh(float(high) / unit), _POINTS)
    return np.concatenate([[0.0], count * np.exp(unit * np.sinh(even))])


def _single(mu: float, points: Array, rising: bool) -> tuple[Array, float]:
    """Return the masses of one Y on points that begin with 0, and the mean beyond the last point."""
    with np.errstate(divide="ignore"):
        x = (np.log(points) + mu * mu / 2) / mu
    q, p = _between(x), _between(x - mu)  # masses, and means of Y on the intervals
    upper = np.clip((p - points[:-1] * q) / np.diff(points), 0.0, q)
    upper = np.minimum(upper * (1 + _UP), q) if rising else upper * (1 - _UP)
    masses = np.zeros(len(points))
    masses[1:] += upper
    masses[:-1] += q - upper
    masses[0] += ndtr(-x[-1])
    return masses, float(ndtr(mu - x[-1])) * (1 + _UP)


def _between(x: Array) -> Array:
    low, high = x[:-1], x[1:]
    return np.asarray(np.where(low > 0, ndtr(-low) - ndtr(-high), ndtr(high) - ndtr(low)))


def _added(
    one: tuple[Array, Array], other: tuple[Array, Array], points: Array, rising: bool
) -> tuple[Array, Array, float]:
    """Return a grid, the masses of a sum of two terms on it, and the mean beyond its last point."""
    sums = np.add.outer(one[0], other[0]).ravel()
    masses = np.multiply.outer(one[1], other[1]).ravel()
    excess = float(masses @ np.maximum(sums - points[-1], 0.0))
    place = np.clip(np.searchsorted(points, sums, side="right") - 1, 0, len(points) - 2)
    upper = (np.minimum(sums, points[-1]) - points[place]) / (points[place + 1] - points[place])
    upper = np.minimum(upper * (1 + _UP), 1.0) if rising else upper * (1 - _UP)
    size = len(points)
    found = np.bincount(place, masses * (1 - upper), size) + np.bincount(place + 1, masses * upper, size)
    return points, np.asarray(found, np.float64), excess * (1 + _UP)
