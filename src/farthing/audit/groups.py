"""Data sets of few distinct records, so that thousands of runs fit into arrays.

All runs of a world go side by side: one row a run. A batch is how often each distinct record came in each
run, a gradient one row a run and a distinct record. The targets of `as_published` are written so.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr, expit

from farthing.noise.lattice import Stream, gaussian

Array = NDArray[np.float64]

_BITS = 30


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """``counts`` of each distinct record: a row of ``x``, and a label 0 or 1 in ``y``."""

    x: Array
    y: Array
    counts: NDArray[np.int64]

    def batches(self, rate: float, runs: int, stream: Stream) -> Array:
        """Poisson batches of all runs: how often each distinct record came, (runs, distinct)."""
        return np.column_stack([binomial(stream, int(count), rate, runs) for count in self.counts])

    def gradients(self, w: Array) -> Array:
        """Logistic gradients of every distinct record at every run's weights, (runs, distinct, weights)."""
        residual = expit(w @ self.x.T) - self.y
        return np.asarray(residual[:, :, None] * self.x)


def canary_pair() -> tuple[Groups, Groups]:
    """500 records e₁, 500 records e₂, and in the second world one record e₃, all with label 1."""
    x, y = np.eye(3), np.ones(3)
    return tuple(Groups(x, y, np.array([500, 500, present])) for present in (0, 1))  # type: ignore[return-value]


def normal(stream: Stream, shape: tuple[int, ...]) -> Array:
    """Standard normals, as good as real ones for anything but their last bits."""
    cells: Array = gaussian(stream, int(np.prod(shape)), _BITS).astype(np.float64).reshape(shape)
    return cells * 2.0**-_BITS


def uniform(stream: Stream, size: int) -> Array:
    """Uniform on [0, 1), on a grid of 2⁻⁵³."""
    return (stream.integers(size) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def binomial(stream: Stream, trials: int, rate: float, size: int) -> NDArray[np.int64]:
    """Binomial numbers, by inversion of their distribution function."""
    if trials == 0:
        return np.zeros(size, np.int64)
    steps = bdtr(np.arange(trials + 1, dtype=np.float64), trials, rate)
    return np.searchsorted(steps, uniform(stream, size), side="right").clip(0, trials)
