"""Choose noise that is correlated over turns, from public numbers: its bands or buffers, and its multiplier.

Both kinds are compared by the root mean square of the noise in all running sums of the answers, at equal
budgets: that is the error of the path of plain SGD with one learning rate.

*Bands* (`farthing.queries.correlated.BandedGaussian`). More bands cancel more of the noise in running sums. A
record is then drawn in fewer turns, with a larger probability (`farthing.queries.correlated.Cyclic`), which
amplifies less. `choose_bands` tries numbers of bands, including one (independent noise), so by this measure
the result is never worse than independent noise.

*Balanced draws* (`farthing.queries.correlated.Balanced`). A pass costs less than Poisson samples of the same
size, above all with few turns per group: `choose_balanced` tries the divisors of a pass.

*Buffers* (`farthing.queries.buffered.BufferedGaussian`). `choose_buffers` minimises over weights and decays.
Each record takes part once per pass without sampling, so nothing is amplified: if random samples are
possible, bands may be better.

>>> from farthing.budget import Budget
>>> found = choose_bands(Budget(8.0, 1e-5), sampling_rate=0.01, steps=400)
>>> found.bands > 4, found.gain < 0.5
(True, True)
>>> found = choose_buffers(Budget(1.0, 1e-5), groups=500, steps=500)
>>> found.gain < 0.19  # of independent noise, one pass of 500 turns
True
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.accounting import calibrate
from farthing.budget import Budget
from farthing.errors import InvalidValue
from farthing.queries.buffered import MOST_BUFFERS, BufferedGaussian, column, column_norm, overlapped
from farthing.queries.correlated import MOST_BANDS, Balanced, BandedGaussian, Cyclic, coefficients, spread
from farthing.queries.events import GaussianEvent, RepeatedEvent
from farthing.queries.truncation import TruncatedCyclic

Array = NDArray[np.float64]
InGroups = Callable[[float, int], Cyclic | TruncatedCyclic]  # from a sampling rate and a number of groups
Pairs = tuple[tuple[float, ...], tuple[float, ...]]  # weights and decays

_NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_CLOSELY = 1e-4  # the relative precision of noise on balanced draws, whose search takes a second
_DIGITS = 4  # digits of weights and of 1 - decays: the last bits of an optimiser differ between machines


@dataclass(frozen=True, slots=True)
class Bands:
    """Correlated noise for a plan: its bands and exponent, the noise multiplier, and the gain.

    ``gain`` is the root mean square of the noise in running sums over that of independent noise, at the same
    budget: 0.5 means half the noise, 1 means that independent noise is best.
    """

    bands: int
    exponent: float
    noise_multiplier: float
    gain: float


@dataclass(frozen=True, slots=True)
class BalancedBands:
    """Correlated noise on balanced draws: the sampler, the exponent, the noise multiplier, and the gain.

    ``sampler.groups`` is the number of bands; ``gain`` is the root mean square of the noise in running sums
    over that of independent noise on Poisson samples of the same size, at the same budget.
    """

    sampler: Balanced
    exponent: float
    noise_multiplier: float
    gain: float

    @property
    def mechanism(self) -> BandedGaussian:
        """Return the mechanism that adds this noise."""
        return BandedGaussian(self.noise_multiplier, self.sampler.groups, self.exponent)


@functools.lru_cache(4096)
def banded_prefix_noise(bands: int, exponent: float, steps: int) -> float:
    """Return the root mean square of the noise in ``steps`` running sums, for a noise multiplier of 1.

    Row t of A C⁻¹, where A adds up, holds the first t + 1 coefficients of 1 / ((1 - x) c(x)).
    """
    from scipy.signal import lfilter  # slow to import

    with np.errstate(over="ignore"):  # exponents near 1 may have an unbounded inverse: infinite noise
        row = lfilter([1.0], coefficients(bands, exponent), np.ones(validate.count(steps=steps)))
        return spread(bands, exponent) * math.sqrt(float(np.cumsum(row * row).mean()))


def banded_row_noise(bands: int, exponent: float, steps: int) -> float:
    """Return the standard deviation of the noise of a late turn, for independent noise Z of deviation 1."""
    from scipy.signal import lfilter  # slow to import

    first = np.zeros(validate.count(steps=steps))
    first[0] = 1.0
    return float(np.linalg.norm(lfilter([1.0], coefficients(bands, exponent), first)))


def best_exponent(bands: int, steps: int) -> float:
    """Return the best of the exponents 0.50, 0.51, ..., 1.00."""
    if bands == 1:
        return 0.5
    coarse = min(
        range(50, 101, 5), key=lambda hundredths: banded_prefix_noise(bands, hundredths / 100, steps)
    )
    near = range(max(50, coarse - 4), min(100, coarse + 4) + 1)
    return min(near, key=lambda hundredths: banded_prefix_noise(bands, hundredths / 100, steps)) / 100


def noise_multiplier(
    budget: Budget,
    sampling_rate: float,
    steps: int,
    groups: int,
    tolerance: float = 1e-9,
    draws: InGroups = Cyclic,
) -> float:
    """Return the smallest noise multiplier at which ``steps`` turns of draws by groups fit the budget."""
    sampler = draws(sampling_rate, groups)
    return calibrate.noise(
        lambda noise: sampler.plan(GaussianEvent(noise), steps, budget.observer), budget, tolerance
    )


def choose_bands(
    budget: Budget, sampling_rate: float, steps: int, most: int = 64, draws: InGroups = Cyclic
) -> Bands:
    """Return the number of bands, up to ``most``, whose running sums have the least noise.

    Parameters
    ----------
    budget : Budget
        The budget of all turns together.
    sampling_rate : float
        The expected share of the records in a batch.
    steps : int
        The number of turns.
    most : int, default 64
        The largest number of bands; a plan keeps one array of noise per band but one.
    draws : callable, default Cyclic
        A function from a sampling rate and a number of groups to a sampler.

    Returns
    -------
    Bands
        One band if independent noise is best.

    Examples
    --------
    >>> from farthing.budget import Budget
    >>> choose_bands(Budget(1.0, 1e-5), sampling_rate=0.05, steps=2000).bands
    1
    """
    validate.rate(sampling_rate=sampling_rate)
    whole = int((1 + 2.0**-40) / sampling_rate)  # bands at which every record is in one batch of a cycle
    most = min(validate.count(most=most), validate.count(steps=steps), MOST_BANDS, whole)
    numbers = [*(bands for bands in _NUMBERS if bands < most), most]
    found = [_tried(budget, sampling_rate, steps, bands, draws) for bands in numbers]
    best = min(found, key=lambda bands: bands.gain)
    exact = noise_multiplier(budget, sampling_rate, steps, best.bands, draws=draws)
    return replace(best, noise_multiplier=exact, gain=best.gain / found[0].gain)


def _tried(budget: Budget, sampling_rate: float, steps: int, bands: int, draws: InGroups) -> Bands:
    """Return a candidate, with the noise of its running sums in place of the gain."""
    noise = noise_multiplier(budget, sampling_rate, steps, bands, tolerance=1e-4, draws=draws)
    exponent = best_exponent(bands, steps)
    return Bands(bands, exponent, noise, noise * banded_prefix_noise(bands, exponent, steps))


@dataclass(frozen=True, slots=True)
class Buffers:
    """Correlated noise for a plan of passes: its buffers, the noise multiplier, and the gain.

    ``gain`` is the root mean square of the noise in running sums over that of independent noise, at the same
    budget and the same draws; ``running_noise`` is that root mean square, for a bound of 1.
    """

    weights: tuple[float, ...]
    decays: tuple[float, ...]
    noise_multiplier: float
    steps: int
    groups: int
    gain: float
    running_noise: float

    @property
    def mechanism(self) -> BufferedGaussian:
        """Return the mechanism that adds this noise."""
        return BufferedGaussian(self.noise_multiplier, self.weights, self.decays, self.steps, self.groups)


def choose_balanced(budget: Budget, turns: int, steps: int, most: int = 64) -> BalancedBands:
    """Return the bands, up to ``most``, whose running sums have the least noise on balanced draws.

    Parameters
    ----------
    budget : Budget
        The budget of all turns together, under add-remove or zero-out.
    turns : int
        The turns of a pass, in which every record takes part once. Bands are among its divisors.
    steps : int
        The total number of turns.
    most : int, default 64
        The largest number of bands; a plan keeps one array of noise per band but one.

    Returns
    -------
    BalancedBands

    Examples
    --------
    >>> from farthing.budget import Budget
    >>> found = choose_balanced(Budget(8.0, 1e-5), turns=4, steps=4, most=2)
    >>> found.sampler, found.gain < 1
    (Balanced(bins=2, groups=2), True)
    """
    validate.count(turns=turns)
    most = min(validate.count(most=most), validate.count(steps=steps), MOST_BANDS)
    independent = noise_multiplier(budget, 1 / turns, steps, 1) * banded_prefix_noise(1, 0.5, steps)
    every = [groups for groups in range(1, min(turns, most) + 1) if turns % groups == 0]
    best = best_balanced(budget, turns, steps, every)
    return replace(best, gain=best.gain / independent)


def best_balanced(budget: Budget, turns: int, steps: int, groups: Sequence[int]) -> BalancedBands:
    """Return the best of these numbers of groups, with the noise of its running sums in place of the gain."""
    found = []
    for count in groups:
        sampler, exponent = Balanced(turns // count, count), best_exponent(count, steps)
        noise = balanced_noise(budget, sampler, steps)
        found.append(
            BalancedBands(sampler, exponent, noise, noise * banded_prefix_noise(count, exponent, steps))
        )
    return min(found, key=lambda balanced: balanced.gain)


def balanced_noise(budget: Budget, sampler: Balanced, steps: int) -> float:
    """Return approximately the smallest noise multiplier at which ``steps`` turns of balanced draws fit."""
    return calibrate.noise(functools.partial(_balanced_plan, sampler, steps, budget), budget, _CLOSELY)


def _balanced_plan(sampler: Balanced, steps: int, budget: Budget, noise: float) -> RepeatedEvent:
    return sampler.plan(GaussianEvent(noise), steps, budget.observer)


@functools.lru_cache(256)
def buffered_prefix_noise(
    weights: tuple[float, ...], decays: tuple[float, ...], steps: int, groups: int
) -> float:
    """Return the root mean square of the noise in ``steps`` running sums, for a noise multiplier of 1.

    Row t of A C⁻¹, where A adds up, holds the first t + 1 coefficients of 1 / ((1 - x) c(x)).
    """
    row = _inverse(np.array(weights), np.array(decays), np.ones(steps))
    return column_norm(weights, decays, steps, groups) * math.sqrt(float(np.cumsum(row * row).mean()))


@functools.lru_cache(256)
def buffered_row_noise(weights: tuple[float, ...], decays: tuple[float, ...], steps: int) -> float:
    """Return the standard deviation of the noise of a late turn, for independent noise Z of deviation 1."""
    first = np.zeros(validate.count(steps=steps))
    first[0] = 1.0
    return float(np.linalg.norm(_inverse(np.array(weights), np.array(decays), first)))


def _inverse(weights: Array, decays: Array, series: Array) -> Array:
    """Return a series divided by c(x) = 1 + Σ ω_i x / (1 - λ_i x), as a rational filter."""
    from scipy.signal import lfilter  # slow to import

    poles = np.poly(decays)  # Π (1 - λ_i x), by rising powers of x
    zeros = poles.copy()
    for i, weight in enumerate(weights):
        zeros[1:] += weight * np.poly(np.delete(decays, i))
    return np.asarray(lfilter(poles, zeros, series))


def choose_buffers(budget: Budget, groups: int, steps: int, buffers: int = 2) -> Buffers:
    """Return the buffers whose running sums have the least noise.

    Parameters
    ----------
    budget : Budget
        The budget of all turns together.
    groups : int
        The turns of a pass, in which every record takes part once.
    steps : int
        The number of turns; ``groups`` of them are one pass over the records.
    buffers : int, default 2
        The number of arrays of noise that are kept, 1 to 8; more than two gained at most 1 % in our trials.

    Returns
    -------
    Buffers

    Raises
    ------
    InvalidValue
        If there are more than 8 buffers.

    Examples
    --------
    >>> from farthing.budget import Budget
    >>> found = choose_buffers(Budget(3.0, 1e-5), groups=100, steps=400)
    >>> len(found.weights), found.gain < 0.25
    (2, True)
    >>> found.mechanism.steps
    400
    """
    if validate.count(buffers=buffers) > MOST_BUFFERS:
        raise InvalidValue(f"buffers must be at most {MOST_BUFFERS}, got {buffers}")
    weights, decays = best_pairs(buffers, validate.count(steps=steps), validate.count(groups=groups))
    noise = noise_multiplier(budget, 1 / groups, steps, groups)
    running, independent = buffered_prefix_noise(weights, decays, steps, groups), math.sqrt((steps + 1) / 2)
    return Buffers(weights, decays, noise, steps, groups, running / independent, noise * running)


@functools.lru_cache(64)
def best_pairs(buffers: int, steps: int, groups: int) -> Pairs:
    """Return the weights and decays found by an optimiser, to four digits."""
    from scipy.optimize import minimize  # slow to import

    def logarithm(place: Array) -> float:
        weights, decays = _pairs(place)
        every = overlapped(column(tuple(weights), tuple(decays), steps), groups)
        row = _inverse(weights, decays, np.ones(steps))
        return math.log(float(every @ every)) + math.log(float(np.cumsum(row * row).mean()))

    found = minimize(logarithm, _start(buffers, min(steps, groups)), method="L-BFGS-B").x
    weights, decays = _pairs(found)
    order = np.argsort(-decays)
    return (
        tuple(_short((1 - 10.0**-_DIGITS) * weights[i]) for i in order),  # the rounded sum stays below 1
        tuple(1 - _short(1 - decays[i]) for i in order),
    )


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}e}")


def _start(buffers: int, turns: int) -> Array:
    """Return decays whose time scales grow geometrically to a pass, and the weights that fit 1/√j."""
    gaps = np.geomspace(2 / (turns + 3), 0.5, buffers + 1)[:-1]
    weights = np.sqrt(gaps) * 0.5 / np.sqrt(gaps).sum()
    return np.concatenate([np.log(weights), np.log((1 - gaps) / gaps)])


def _pairs(place: Array) -> tuple[Array, Array]:
    """Return weights, scaled down if they add up to more than 1, and decays, not too near 0 and 1."""
    weights, odds = np.split(np.exp(np.clip(place, -30.0, 30.0)), 2)
    return weights / max(1.0, weights.sum()), np.clip(odds / (1 + odds), 2.0**-10, 1 - 2.0**-20)
