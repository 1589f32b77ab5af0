"""Choose over how many turns noise is correlated, from public numbers: budget, sampling rate, steps.

More bands cancel more of the noise in running sums of gradients, and leave a record fewer but likelier
chances (`farthing.queries.correlated.Cyclic`), which amplify less. `choose_bands` tries numbers of bands and
compares the root mean square of the noise in all running sums, at equal budgets: that is the error of the
path of plain SGD with one learning rate. One band, independent noise, is among them, so by that measure it
never loses.

>>> from farthing.budget import Budget
>>> found = choose_bands(Budget(8.0, 1e-5), sampling_rate=0.01, steps=400)
>>> found.bands > 4, found.gain < 0.5
(True, True)
"""

import functools
import math
from dataclasses import dataclass, replace

import numpy as np

from farthing import validate
from farthing.accounting import calibrate
from farthing.budget import Budget
from farthing.queries.correlated import MOST_BANDS, Cyclic, coefficients, spread
from farthing.queries.events import GaussianEvent

_NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


@dataclass(frozen=True, slots=True)
class Bands:
    """Correlated noise for a plan: its bands and exponent, the noise multiplier, and what is gained.

    ``gain`` is the root mean square of the noise in running sums over that of independent noise, at the same
    budget: 0.5 means half the noise, 1 means that independent noise is best.
    """

    bands: int
    exponent: float
    noise_multiplier: float
    gain: float


@functools.lru_cache(4096)
def prefix_noise(bands: int, exponent: float, steps: int) -> float:
    """Return the root mean square of the noise in ``steps`` running sums, for a noise multiplier of 1.

    Row t of A C⁻¹, where A adds up, holds the first t + 1 coefficients of 1 / ((1 - x) c(x)).
    """
    from scipy.signal import lfilter  # slow to import

    with np.errstate(over="ignore"):  # exponents near 1 may have no bounded inverse: infinitely bad
        row = lfilter([1.0], coefficients(bands, exponent), np.ones(validate.count(steps=steps)))
        return spread(bands, exponent) * math.sqrt(float(np.cumsum(row * row).mean()))


def row_noise(bands: int, exponent: float, steps: int) -> float:
    """Return the standard deviation of the noise of a late turn, for independent noise Z of deviation 1."""
    from scipy.signal import lfilter  # slow to import

    first = np.zeros(validate.count(steps=steps))
    first[0] = 1.0
    return float(np.linalg.norm(lfilter([1.0], coefficients(bands, exponent), first)))


def best_exponent(bands: int, steps: int) -> float:
    """Return the best of the exponents 0.50, 0.51, ..., 1.00."""
    if bands == 1:
        return 0.5
    coarse = min(range(50, 101, 5), key=lambda hundredths: prefix_noise(bands, hundredths / 100, steps))
    near = range(max(50, coarse - 4), min(100, coarse + 4) + 1)
    return min(near, key=lambda hundredths: prefix_noise(bands, hundredths / 100, steps)) / 100


def noise_multiplier(
    budget: Budget, sampling_rate: float, steps: int, bands: int, tolerance: float = 1e-9
) -> float:
    """Return the smallest noise multiplier at which ``steps`` turns of `Cyclic` draws fit the budget."""
    sampler = Cyclic(sampling_rate, bands)
    return calibrate.noise(
        lambda noise: sampler.plan(GaussianEvent(noise), steps, budget.observer), budget, tolerance
    )


def choose_bands(budget: Budget, sampling_rate: float, steps: int, most: int = 64) -> Bands:
    """Return the number of bands, up to ``most``, whose running sums have the least noise.

    Parameters
    ----------
    budget : Budget
        What all turns together may cost.
    sampling_rate : float
        The expected part of the records in a batch.
    steps : int
        How many turns.
    most : int, default 64
        The most bands: one array of noise is kept for each but one.

    Returns
    -------
    Bands
        With one band where independent noise is best.

    Examples
    --------
    >>> from farthing.budget import Budget
    >>> choose_bands(Budget(1.0, 1e-5), sampling_rate=0.05, steps=2000).bands
    1
    """
    validate.rate(sampling_rate=sampling_rate)
    most = min(validate.count(most=most), validate.count(steps=steps), MOST_BANDS)
    found = [
        _tried(budget, sampling_rate, steps, bands)
        for bands in _NUMBERS
        if bands <= most and sampling_rate * bands <= 1
    ]
    best = min(found, key=lambda bands: bands.gain)
    exact = noise_multiplier(budget, sampling_rate, steps, best.bands)
    return replace(best, noise_multiplier=exact, gain=best.gain / found[0].gain)


def _tried(budget: Budget, sampling_rate: float, steps: int, bands: int) -> Bands:
    """Return a candidate, with the noise of its sums in the place of the gain."""
    noise = noise_multiplier(budget, sampling_rate, steps, bands, tolerance=1e-4)
    exponent = best_exponent(bands, steps)
    return Bands(bands, exponent, noise, noise * prefix_noise(bands, exponent, steps))
