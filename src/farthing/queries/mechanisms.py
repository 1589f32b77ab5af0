"""Define mechanisms, which add noise to a sum: their privacy events and their releases.

``noise_multiplier`` is relative to the bound of one contribution (`Bound.norm`): Gaussian(1.1) on ClipNorm(C)
adds a standard deviation of 1.1 C. Every release lies on a lattice: the sum is rounded to a grid, integer
noise of `farthing.noise.lattice` is added, and the result is converted to floats. Rounding moves two
neighbouring sums apart by at most one grid cell per coordinate, and float64 arithmetic by at most 2⁻¹⁴ of a
contribution's norm, for any values of up to 2³⁰ records (the theorem of `farthing.noise.summing`). The noise
is enlarged accordingly, so the price is that of the requested noise.
"""

import functools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from farthing import validate
from farthing.budget import Adjacency
from farthing.errors import InvalidValue, Unsupported
from farthing.noise import lattice
from farthing.noise.lattice import Stream
from farthing.noise.summing import SLACK
from farthing.queries.bounds import Bound, ClipValue, Kind, in_range
from farthing.queries.events import BoundedRangeEvent, Event, GaussianEvent, LaplaceEvent, PureEvent

Array = NDArray[np.float64]

GRID_SHARE = 2.0**-12  # the largest relative increase of the noise because of the grid
_FEWEST_BITS, _MOST_BITS = 20, 40
_BITS_OF_A_CHOICE, _CELLS_OF_A_CHOICE = 30, 6  # the least number of bits, and the cells of NoisyMax's proof


class Mechanism(Protocol):
    """Noise on a bounded sum.

    A mechanism whose noise depends on the turn, such as correlated noise, also offers ``plan(event, steps) ->
    Event``: the joint price of turns 0 to ``steps`` - 1, where ``event`` is the price of turn 0 alone.
    Mechanisms without it draw independent noise and ignore the turn.
    """

    def unit_event(self) -> Event:
        """Return the event for contributions bounded by one."""

    def event(self, bound: Bound, adjacency: Adjacency, sampled: bool) -> Event:
        """Return the event for this bound. If ``sampled``, a contribution may also be absent from the sum."""

    def check(self, bound: Bound, shape: tuple[int, ...] | None) -> None:
        """Refuse a bound, or a shape of the sum (None if not known yet), that has no price or no release."""

    def release(self, total: Any, bound: Any, stream: Stream, turn: int = 0) -> Any:
        """Return the noisy answer at this turn of a plan; raise for a sum that is not finite."""


def _ratio(bound: Bound, adjacency: Adjacency, sampled: bool, order: int) -> float:
    """Return the norm of one contribution over the distance of neighbours that the event assumes.

    Events assume a distance of 2 norms under replace-one and of 1 otherwise. A bound may have a smaller
    sensitivity, which holds only where every record takes part.
    """
    norm = bound.norm(order)
    if sampled:
        return 1.0
    return adjacency.shift * norm / bound.sensitivity(adjacency, order)


def _grid(
    noise: float, bound: Bound, order: int, size: int, grid_share: float = GRID_SHARE
) -> tuple[int, float]:
    """Return the bits and the width of a cell: the scale of the noise is 2^bits cells, in units of scale."""
    norm = bound.norm(order)
    nearest = min(norm, bound.sensitivity(Adjacency.REPLACE_ONE, order))
    return _lattice(noise, norm, nearest, order, size, grid_share)


@functools.lru_cache(128)
def _lattice(
    noise: float, norm: float, nearest: float, order: int, size: int, grid_share: float
) -> tuple[int, float]:
    share = noise * norm / nearest * (size if order == 1 else math.sqrt(size))
    bits = max(_FEWEST_BITS, math.ceil(math.log2(share / grid_share)))
    if bits > _MOST_BITS:
        raise Unsupported(
            f"noise {noise:g} on {size} coordinates needs a grid of 2^-{bits}, finer than 2^-{_MOST_BITS}; "
            "lower the noise multiplier or the number of coordinates"
        )
    return bits, noise * norm * enlarged(norm, nearest) / (1 - share * 2.0**-bits) * 2.0**-bits


def enlarged(norm: float, nearest: float) -> float:
    """Return the factor by which rounding of sums can increase the smallest distance of neighbours."""
    return 1 + SLACK * norm / nearest


def refuse_width(bound: Bound, size: int) -> None:
    """Refuse a bound whose number of coordinates differs from that of the sum."""
    if bound.width in (None, size):
        return
    if bound.kind == Kind.VALUE:
        raise InvalidValue(f"ClipValue bounds one number, the sum has {size}; use ClipCoordinates")
    raise InvalidValue(f"the bound has {bound.width} coordinates, the sum has {size}")


@dataclass(frozen=True, slots=True)
class _Added(ABC):
    """Noise of one scale on every coordinate of a sum, priced by the sensitivity in the norm ``order``."""

    noise_multiplier: float
    order: ClassVar[int]
    kind: ClassVar[type[GaussianEvent] | type[LaplaceEvent]]

    @abstractmethod
    def _noisy(self, stream: Stream, total: Array, unit: float | Array, cell: float, bits: int) -> Array:
        """Return the sum on a grid of ``cell`` units, with noise of scale 2^bits cells."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise_multiplier", in_range(noise_multiplier=self.noise_multiplier))

    def unit_event(self) -> Event:
        return self.kind(self.noise_multiplier)

    def event(self, bound: Bound, adjacency: Adjacency, sampled: bool) -> Event:
        return self.kind(self.noise_multiplier * _ratio(bound, adjacency, sampled, self.order))

    def grid(self, bound: Bound, size: int) -> tuple[int, float]:
        """Return the bits and the width of a cell for a release of ``size`` coordinates."""
        return _grid(self.noise_multiplier, bound, self.order, size, self.grid_share(size))

    def grid_share(self, size: int) -> float:
        """Return by how much the grid may enlarge the noise on ``size`` coordinates, relatively."""
        return GRID_SHARE

    def check(self, bound: Bound, shape: tuple[int, ...] | None) -> None:
        bound.norm(self.order)  # raises if this norm is not bounded
        if shape is not None:
            refuse_width(bound, math.prod(shape))

    def release(self, total: ArrayLike, bound: Bound, stream: Stream, turn: int = 0) -> Array:
        """Return the sum, rounded to a grid, plus integer noise."""
        total = np.asarray(total, dtype=np.float64)
        refuse_width(bound, total.size)
        bits, cell = self.grid(bound, total.size)
        return self._noisy(stream, total, bound.scale, cell, bits)


@dataclass(frozen=True, slots=True)
class Gaussian(_Added):
    """Gaussian noise on a sum, with deviation ``noise_multiplier`` times the bound of one contribution.

    Parameters
    ----------
    noise_multiplier : float
        The standard deviation over the bound's norm, above 0.

    Notes
    -----
    Dwork & Roth 2014; the price is exact (Balle & Wang 2018). The noise is an integer Gaussian on a lattice,
    drawn from a cryptographic stream and enlarged by the slack that rounding needs.

    Examples
    --------
    >>> from farthing.noise.lattice import SeededStream
    >>> from farthing.queries.bounds import ClipNorm
    >>> Gaussian(1.1).unit_event()
    GaussianEvent(noise=1.1)
    >>> Gaussian(1.1).release(np.zeros(3), ClipNorm(2.0), SeededStream(0)).shape
    (3,)
    """

    order = 2
    kind = GaussianEvent

    def _noisy(self, stream: Stream, total: Array, unit: float | Array, cell: float, bits: int) -> Array:
        return lattice.noisy(stream, total, unit, cell, bits)


@dataclass(frozen=True, slots=True)
class Laplace(_Added):
    """Laplace noise on a sum, with scale ``noise_multiplier`` times the L1 bound of one contribution.

    Parameters
    ----------
    noise_multiplier : float
        The scale over the bound's L1 norm, above 0; one answer is (1 / noise_multiplier)-DP under add-remove.

    Notes
    -----
    Dwork et al. 2006. It needs a bound on the L1 norm: ``ClipNorm(clip, order=1)``, `ClipCoordinates` or
    `ClipValue`.

    Examples
    --------
    >>> Laplace(2.0).unit_event()
    LaplaceEvent(noise=2.0)
    """

    order = 1
    kind = LaplaceEvent

    def _noisy(self, stream: Stream, total: Array, unit: float | Array, cell: float, bits: int) -> Array:
        noise = lattice.laplace(stream, total.size, bits).reshape(total.shape)
        return (lattice.on_grid(total, unit, cell) + noise).astype(np.float64) * cell * unit


@dataclass(frozen=True, slots=True)
class SymmetricGaussian(Gaussian):
    """Gaussian noise on a symmetric matrix: the full deviation on the diagonal, 1/√2 of it elsewhere.

    Parameters
    ----------
    noise_multiplier : float
        The standard deviation on the diagonal over the bound's norm, above 0.

    Notes
    -----
    The vector of the diagonal and √2 times the upper triangle has the Frobenius norm of the matrix as its L2
    norm, so plain Gaussian noise on that vector is calibrated to a Frobenius bound. (Dwork et al. 2014 put
    the full deviation on every entry: twice the variance off the diagonal at the same price.) If the sum is
    not symmetric, its symmetric part is released; this is a projection, so the norm does not grow.

    Examples
    --------
    >>> from farthing.noise.lattice import SeededStream
    >>> from farthing.queries.bounds import ClipOuter
    >>> found = SymmetricGaussian(2.0).release(np.zeros((3, 3)), ClipOuter(1.0), SeededStream(0))
    >>> bool((found == found.T).all())
    True
    """

    def check(self, bound: Bound, shape: tuple[int, ...] | None) -> None:
        Gaussian.check(self, bound, shape)
        if bound.width is not None:
            raise Unsupported("symmetric noise has one scale for all entries: use a bound without a scale")
        if shape is not None and (len(shape) != 2 or shape[0] != shape[1]):
            raise InvalidValue(f"a symmetric sum must be a square matrix, got shape {shape}")

    def release(self, total: ArrayLike, bound: Bound, stream: Stream, turn: int = 0) -> Array:
        total = np.asarray(total, dtype=np.float64)
        self.check(bound, total.shape)
        rows, columns = np.triu_indices(len(total))
        stretch = np.where(rows == columns, 1.0, math.sqrt(2))
        upper = (total[rows, columns] + total[columns, rows]) / 2
        noisy = Gaussian.release(self, upper * stretch, bound, stream) / stretch
        mirrored = np.empty_like(total)
        mirrored[rows, columns] = mirrored[columns, rows] = noisy
        return mirrored


@dataclass(frozen=True, slots=True)
class NoisyMax:
    """A noisy choice: the index of the largest score after noise of ``noise_multiplier`` times the bound.

    Parameters
    ----------
    noise_multiplier : float
        The scale of the noise over the bound's norm, above 0.
    kind : {"gumbel", "laplace"}, default "gumbel"
        The noise: Gumbel (the exponential mechanism) or Laplace (report noisy max).

    Notes
    -----
    Laplace: report noisy max is ε-DP with ε = d / scale, where d is the largest change of the gap between two
    scores (Dwork & Roth 2014, Claim 3.9). Gumbel: the exponential mechanism; its log-probabilities change
    within an interval of length ε, so it satisfies ε²/8-zCDP (Dong et al. 2020; Cesar & Rogers 2021). A
    record that can only raise scores (`ClipValue` with low >= 0) changes a gap by one bound under add-remove
    and by 2 (high - low) under replace-one.

    On the grid, the scale of the noise is 2^bits cells. The gap of two rounded scores changes by at most two
    cells more. The noise is Nᵢ = round(2^bits Xᵢ), and ties go to the lower index.
    Laplace: given the noise of the others, index i wins if Nᵢ >= T for an integer T, that is if 2^bits Xᵢ >=
    T - 1/2; so Claim 3.9 applies to the rounded gap.
    Gumbel: |Nⱼ - 2^bits Xⱼ| <= 1/2 for all j. So if i wins on the grid, it wins without a grid when its score
    is one cell higher; and if it wins without a grid when its score is one cell lower, it wins on the grid.
    One cell multiplies a softmax probability by at most e^(±2^-bits), so each log-probability is within
    2^-bits of the exponential mechanism's, the ratio of two within 2 of these units, and the interval is
    longer by 4.
    In total 6 cells. The noise is enlarged by 6 cells relative to the smallest gap, and the bits grow with
    the noise so that this is at most 2⁻¹² of it.

    Examples
    --------
    >>> from farthing.noise.lattice import SeededStream
    >>> NoisyMax(0.5).release(np.array([0.0, 30.0, 2.0]), ClipValue(0.0, 1.0), SeededStream(0))
    1
    """

    noise_multiplier: float
    kind: Literal["gumbel", "laplace"] = "gumbel"

    def __post_init__(self) -> None:
        noise = validate.positive(noise_multiplier=self.noise_multiplier)
        object.__setattr__(self, "noise_multiplier", noise)
        if self.kind not in ("gumbel", "laplace"):
            raise InvalidValue(f"kind must be 'gumbel' or 'laplace', got {self.kind!r}")

    def unit_event(self) -> Event:
        """Refuse: signs of scores and the adjacency decide whether a gap changes by 1 bound or by up to 4."""
        raise Unsupported(
            "a choice has no price without the adjacency and the bound of its scores: use "
            "Query(...).price(budget)"
        )

    def check(self, bound: Bound, shape: tuple[int, ...] | None) -> None:
        if not isinstance(bound, ClipValue):
            raise Unsupported("NoisyMax needs a bound on each score: use ClipValue(low, high)")
        if shape is not None:
            if len(shape) != 1 or not shape[0]:
                raise InvalidValue(f"scores must be a vector, one score per candidate, got shape {shape}")
            self.grid(bound)  # raises if the noise needs too fine a grid

    def event(self, bound: Bound, adjacency: Adjacency, sampled: bool) -> Event:
        self.check(bound, None)
        assert isinstance(bound, ClipValue)
        norm = bound.norm()
        if adjacency is Adjacency.REPLACE_ONE:
            gap = 2 * (max(bound.high - bound.low, norm) if sampled else bound.high - bound.low)
        else:
            gap = norm if bound.one_signed else bound.high - bound.low
        return self._priced(gap / (self.noise_multiplier * norm))

    def _priced(self, epsilon: float) -> Event:
        return BoundedRangeEvent(epsilon) if self.kind == "gumbel" else PureEvent(epsilon)

    def grid(self, bound: Bound, size: int = 1) -> tuple[int, float]:
        """Return the bits and the width of a cell: the scale of the noise is 2^bits cells."""
        norm = bound.norm()
        nearest = min(norm, bound.sensitivity(Adjacency.REPLACE_ONE))
        share = _CELLS_OF_A_CHOICE * self.noise_multiplier * norm / nearest
        bits = max(_BITS_OF_A_CHOICE, math.ceil(math.log2(share / GRID_SHARE)))
        if bits > _MOST_BITS:
            raise Unsupported(
                f"a choice with noise {self.noise_multiplier:g} needs a grid of 2^-{bits}, finer than "
                f"2^-{_MOST_BITS}: lower the noise multiplier"
            )
        wider = enlarged(2 * norm, nearest) / (1 - share * 2.0**-bits)  # a gap is the difference of two sums
        return bits, self.noise_multiplier * norm * wider * 2.0**-bits

    def release(self, total: ArrayLike, bound: Bound, stream: Stream, turn: int = 0) -> int:
        total = np.asarray(total, dtype=np.float64)
        self.check(bound, total.shape)
        bits, cell = self.grid(bound)
        draw = lattice.gumbel if self.kind == "gumbel" else lattice.laplace
        return int(np.argmax(lattice.on_grid(total, bound.scale, cell) + draw(stream, total.size, bits)))
