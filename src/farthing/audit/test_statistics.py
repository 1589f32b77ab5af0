"""Statistics: what an attack looks at in the outputs of a run, one number a run, large where it says "with".

A plain function of all outputs (one row a run) is fixed ahead. A `Tell` is learnt: ``fit`` sees outputs of
both worlds that are not counted later, and returns such a function.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Scores = Callable[[Any], Array]


@runtime_checkable
class Tell(Protocol):
    """A statistic that is learnt from runs which are not counted."""

    @property
    def name(self) -> str:
        """In a few words, for the verdict."""

    def fit(self, without: Any, within: Any) -> Scores:
        """The function of outputs, from those of both worlds."""


@dataclass(frozen=True, slots=True)
class Projection:
    """Along the direction that tells the worlds apart best, were the outputs Gaussian (Fisher 1936)."""

    name: str = "projection on the worst direction"

    def fit(self, without: Any, within: Any) -> Scores:
        first, second = (np.nan_to_num(_flat(part), posinf=0.0, neginf=0.0) for part in (without, within))
        spread = np.atleast_2d(np.cov(first.T)) + np.atleast_2d(np.cov(second.T))
        # coordinates that never move would make it singular
        spread += np.eye(len(spread)) * max(1e-9 * float(np.trace(spread)) / len(spread), 1e-300)
        direction = np.linalg.lstsq(spread, second.mean(axis=0) - first.mean(axis=0), rcond=None)[0]

        def scores(outputs: Any) -> Array:
            with np.errstate(invalid="ignore"):  # infinity times 0
                return np.asarray(_flat(outputs) @ direction)

        return scores


@dataclass(frozen=True, slots=True)
class Outcomes:
    """For outputs of few kinds (a chosen candidate): how much more often each was seen "with"."""

    name: str = "likelihood ratio of outcomes"

    def fit(self, without: Any, within: Any) -> Scores:
        kinds, places = np.unique(np.concatenate([without, within]), axis=0, return_inverse=True)
        places = places.reshape(-1)
        counts = [np.bincount(part, minlength=len(kinds)) for part in np.split(places, [len(without)])]
        ratio = np.log((counts[1] + 0.5) / (counts[0] + 0.5))
        known = {kind.tobytes(): value for kind, value in zip(kinds, ratio, strict=True)}
        return lambda outputs: np.array([known.get(kind.tobytes(), 0.0) for kind in np.asarray(outputs)])


def value(outputs: Any) -> Array:
    """The output itself, where it is one number a run."""
    return _flat(outputs)[:, 0]


def largest(outputs: Any) -> Array:
    """The largest |entry| of a run: sees a leak in the level of the noise."""
    return np.asarray(np.abs(_flat(outputs)).max(axis=1))


def spread(outputs: Any) -> Array:
    """The mean square of a run's entries: sees a leak in the variance of the noise."""
    return np.asarray(np.square(_flat(outputs)).mean(axis=1))


def level(outputs: Any) -> Array:
    """The mean logarithm of a run's |entries|: sees noise whose level varies from entry to entry."""
    sizes = np.abs(_flat(outputs))
    return np.asarray(np.log(np.maximum(sizes, 1e-300)).mean(axis=1))


def frozen(outputs: Any) -> Array:
    """Minus the number of entries of a run that are exactly 0: sees noise that was never added."""
    return np.asarray(-np.count_nonzero(_flat(outputs) == 0, axis=1), dtype=np.float64)


def lowest_bit(outputs: Any) -> Array:
    """The finest power of two that some entry of a run is no multiple of (Mironov 2012).

    A sum x + noise in floating point is a multiple of the last place of x wherever it comes out near 0; noise
    alone is not. On a lattice of integers both are the same multiples of one cell.
    """
    mantissa, exponent = np.frexp(_flat(outputs))
    whole = np.abs(np.ldexp(mantissa, 53)).astype(np.int64)
    lowest = np.log2((whole & -whole).astype(np.float64), out=np.zeros(whole.shape), where=whole > 0)
    place = np.where(whole > 0, exponent - 53 + lowest, 2000.0)
    return np.asarray(place.min(axis=1))


def _flat(outputs: Any) -> Array:
    array = np.asarray(outputs, dtype=np.float64)
    return array.reshape(len(array), -1)
