"""Choose the buffers of noise that is correlated over all turns, from public numbers: budget, turns, passes.

`choose_buffers` minimises the root mean square of the noise in all running sums, the error of the path of
plain SGD, over weights and decays of `farthing.queries.buffered.BufferedGaussian`, at the noise multiplier
that the budget allows. Each record takes part once a pass, so nothing is sampled and nothing amplified: where
a random sample can be drawn, `farthing.accounting.bands.choose_bands` may be better.

>>> from farthing.budget import Budget
>>> found = choose_buffers(Budget(1.0, 1e-5), groups=500, steps=500)
>>> found.gain < 0.19  # of independent noise, one pass of 500 turns
True
"""

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.accounting import calibrate
from farthing.budget import Budget
from farthing.errors import InvalidValue
from farthing.queries.buffered import MOST_BUFFERS, BufferedGaussian, column, column_norm, overlapped
from farthing.queries.correlated import Cyclic
from farthing.queries.events import GaussianEvent

Array = NDArray[np.float64]
Pairs = tuple[tuple[float, ...], tuple[float, ...]]  # weights and decays

_DIGITS = 4  # of weights and of 1 - decays: last bits of an optimiser differ between machines


@dataclass(frozen=True, slots=True)
class Buffers:
    """Correlated noise for a plan of passes: its buffers, the noise multiplier, and what is gained.

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
        """The noise itself."""
        return BufferedGaussian(self.noise_multiplier, self.weights, self.decays, self.steps, self.groups)


@functools.lru_cache(256)
def prefix_noise(weights: tuple[float, ...], decays: tuple[float, ...], steps: int, groups: int) -> float:
    """Return the root mean square of the noise in ``steps`` running sums, for a noise multiplier of 1.

    Row t of A C⁻¹, where A adds up, holds the first t + 1 coefficients of 1 / ((1 - x) c(x)).
    """
    row = _inverse(np.array(weights), np.array(decays), np.ones(steps))
    return column_norm(weights, decays, steps, groups) * math.sqrt(float(np.cumsum(row * row).mean()))


@functools.lru_cache(256)
def row_noise(weights: tuple[float, ...], decays: tuple[float, ...], steps: int) -> float:
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
        What all turns together may cost.
    groups : int
        Turns of a pass: every record takes part once in as many.
    steps : int
        How many turns; ``groups`` of them are one pass over the records.
    buffers : int, default 2
        How many arrays of noise are kept, 1 to 8; more than two have gained 1 % at most where we looked.

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
    noise = noise_multiplier(budget, groups, steps)
    running, independent = prefix_noise(weights, decays, steps, groups), math.sqrt((steps + 1) / 2)
    return Buffers(weights, decays, noise, steps, groups, running / independent, noise * running)


def noise_multiplier(budget: Budget, groups: int, steps: int) -> float:
    """Return the smallest noise multiplier at which ``steps`` turns of ``groups`` a pass fit the budget."""
    sampler = Cyclic(1 / groups, groups)
    return calibrate.noise(lambda noise: sampler.plan(GaussianEvent(noise), steps, budget.observer), budget)


@functools.lru_cache(64)
def best_pairs(buffers: int, steps: int, groups: int) -> Pairs:
    """Return weights and decays that an optimiser finds, to four digits."""
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
        tuple(_short((1 - 10.0**-_DIGITS) * weights[i]) for i in order),  # short of 1 in all, when rounded
        tuple(1 - _short(1 - decays[i]) for i in order),
    )


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}e}")


def _start(buffers: int, turns: int) -> Array:
    """Return decays for times that grow geometrically to those of a pass, and weights as of 1/√j."""
    gaps = np.geomspace(2 / (turns + 3), 0.5, buffers + 1)[:-1]
    weights = np.sqrt(gaps) * 0.5 / np.sqrt(gaps).sum()
    return np.concatenate([np.log(weights), np.log((1 - gaps) / gaps)])


def _pairs(place: Array) -> tuple[Array, Array]:
    """Return weights, scaled down where they add up to more than 1, and decays, not too near 0 and 1."""
    weights, odds = np.split(np.exp(np.clip(place, -30.0, 30.0)), 2)
    return weights / max(1.0, weights.sum()), np.clip(odds / (1 + odds), 2.0**-10, 1 - 2.0**-20)
