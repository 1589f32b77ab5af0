"""Release sums under masks: mechanisms whose answers are cells of a noisy sum plus a mask, modulo 2^64.

Price, plan and memory are those of the noise inside. No unmasked value is ever returned or kept.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from farthing.federated.terms import Terms
from farthing.noise.lattice import Stream
from farthing.queries.correlated import BandedGaussian, BandedShare
from farthing.queries.mechanisms import Gaussian

Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Masked(Gaussian):
    """A mechanism that releases masked sums: cells of ``inner``'s noisy sum, plus a mask, modulo 2^64.

    Its price is that of the inner mechanism. No unmasked value is ever returned or kept.
    """

    inner: Gaussian = field(default_factory=lambda: Gaussian(1.0))
    cell: float = 1.0
    mask: Words = field(default_factory=lambda: np.zeros(0, np.uint64), repr=False, compare=False)

    def release(self, total: ArrayLike, bound: Any, stream: Stream, turn: int = 0) -> Any:
        return _covered(self.inner.release(total, bound, stream, turn), self.cell, self.mask)


@dataclass(frozen=True, slots=True, repr=False)
class MaskedBands(BandedShare):
    """Masked sums of a share of correlated noise: its price, plan and memory are those of the share.

    Each answer has a mask of its own, and the noise of the plan's earlier turns.
    """

    cell: float = 1.0
    mask: Words = field(default_factory=lambda: np.zeros(0, np.uint64), compare=False)

    @classmethod
    def of(cls, share: BandedShare, cell: float, mask: Words) -> "MaskedBands":
        return cls(share.noise_multiplier, share.bands, share.exponent, share.survivors, cell, mask)

    def __repr__(self) -> str:  # by which a plan is known, whatever the masks
        return repr(BandedShare(self.noise_multiplier, self.bands, self.exponent, self.survivors))

    def resumed(self, begun: "MaskedBands") -> "MaskedBands":
        """Return this mechanism with the memory of the plan's first."""
        found = replace(self)
        object.__setattr__(found, "_history", begun._history)
        return found

    def release(self, total: ArrayLike, bound: Any, stream: Stream, turn: int = 0) -> Any:
        return _covered(BandedShare.release(self, total, bound, stream, turn), self.cell, self.mask)


def _covered(noisy: ArrayLike, cell: float, mask: Words) -> Words:
    """Return a noisy sum in cells, under a mask."""
    cells: NDArray[np.int64] = np.rint(np.asarray(noisy) / cell).astype(np.int64)
    return cells.reshape(-1).view(np.uint64) + mask


def masked(terms: Terms, size: int, mask: Words) -> Terms:
    """Return terms whose mechanism releases masked sums of ``size`` coordinates."""
    inner, cell = terms.mechanism, own_cell(terms, size)
    hidden: Gaussian = Masked(inner.noise_multiplier, inner, cell, mask)
    if isinstance(inner, BandedShare):
        hidden = MaskedBands.of(inner, cell, mask)
    return replace(terms, mechanism=hidden)


def own_cell(terms: Terms, size: int) -> float:
    """Return the cell width of the lattice that all uploads of ``size`` coordinates lie on."""
    if isinstance(terms.mechanism, BandedGaussian):
        return terms.mechanism.grid(terms.bound, size)[1]
    return Gaussian(math.sqrt(terms.variance) / terms.bound.clip).grid(terms.bound, size)[1]
