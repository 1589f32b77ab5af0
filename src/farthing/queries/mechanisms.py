"""Noise on a sum: the event it makes, and the release itself.

``noise_multiplier`` is relative to the bound of one contribution (`Bound.norm`): Gaussian(1.1) on ClipNorm(C)
adds a standard deviation of 1.1 C. Every release lives on a lattice: the sum is rounded to a grid, integer
noise of `farthing.noise.lattice` is added, and only then is it turned into floats. Rounding can move two
neighbouring sums apart by one grid cell a coordinate, and float64 arithmetic by 2⁻¹⁴ of a contribution's
norm, whatever the values of up to 2³⁰ records (the theorem of `farthing.noise.summing`); noise is enlarged by
as much, and the price is that of the noise asked for.
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

_GRID_SHARE = 2.0**-12  # how much the grid may enlarge the noise
_FEWEST_BITS, _MOST_BITS = 20, 40
_BITS_OF_A_CHOICE, _CELLS_OF_A_CHOICE = 30, 6  # at least; see NoisyMax


class Mechanism(Protocol):
    """Noise on a bounded sum.

    A mechanism whose noise depends on the turn, such as one that correlates it over turns, also offers
    ``plan(event, steps) -> Event``: the price of its answers of the turns 0 to ``steps`` - 1 together, where
    ``event`` is that of turn 0 alone. Mechanisms without it draw independent noise and ignore the turn.
    """

    def unit_event(self) -> Event:
        """Return the event for contributions bounded by one."""

    def event(self, bound: Bound, adjacency: Adjacency, sampled: bool) -> Event:
        """Return the event for this bound. On a sample, contributions are compared with nothing as well."""

    def check(self, bound: Bound, shape: tuple[int, ...] | None) -> None:
        """Refuse a bound or a sum of this shape (None: not known yet) that its noise does not answer to."""

    def release(self, total: Any, bound: Any, stream: Stream, turn: int = 0) -> Any:
        """Return the noisy answer of this turn of a promised plan; raises for a sum that is not finite."""


def _ratio(bound: Bound, adjacency: Adjacency, sampled: bool, order: int) -> float:
    """Return one contribution's norm over the distance of neighbours in the event's pair.

    Events count a distance of 2 norms under replace-one and 1 otherwise; a bound may know better, but only
    where everybody takes part.
    """
    norm = bound.norm(order)
    if sampled:
        return 1.0
    return adjacency.shift * norm / bound.sensitivity(adjacency, order)


def _grid(noise: float, bound: Bound, order: int, size: int) -> tuple[int, float]:
    """Return bits and width of a cell: the noise has a scale of 2^bits cells, in units of ``bound.scale``."""
    norm = bound.norm(order)
    return _lattice(noise, norm, min(norm, bound.sensitivity(Adjacency.REPLACE_ONE, order)), order, size)


@functools.lru_cache(128)
def _lattice(noise: float, norm: float, nearest: float, order: int, size: int) -> tuple[int, float]:
    share = noise * norm / nearest * (size if order == 1 else math.sqrt(size))
    bits = max(_FEWEST_BITS, math.ceil(math.log2(share / _GRID_SHARE)))
    if bits > _MOST_BITS:
        raise Unsupported(
            f"noise {noise:g} on {size} coordinates needs a grid of 2^-{bits}, finer than 2^-{_MOST_BITS}; "
            "lower the noise or the number of coordinates"
        )
    return bits, noise * norm * enlarged(norm, nearest) / (1 - share * 2.0**-bits) * 2.0**-bits


def enlarged(norm: float, nearest: float) -> float:
    """Return what the rounding of sums adds to the least distance of neighbours, relative to it."""
    return 1 + SLACK * norm / nearest


def refuse_width(bound: Bound, size: int) -> None:
    """A bound that names coordinates bounds exactly those: none more and none fewer."""
    if bound.width in (None, size):
        return
    if bound.kind == Kind.VALUE:
        raise InvalidValue(f"ClipValue bounds one number, the sum has {size}; use ClipCoordinates")
    raise InvalidValue(f"the bound has {bound.width} coordinates, the sum has {size}")


@dataclass(frozen=True, slots=True)
class _Added(ABC):
    """Noise of one scale on every coordinate of a sum; ``order`` is that of the norm it answers to."""

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
        """Return the lattice of a release of ``size`` coordinates: bits and width of a cell."""
        return _grid(self.noise_multiplier, bound, self.order, size)

    def check(self, bound: Bound, shape: tuple[int, ...] | None) -> None:
        bound.norm(self.order)  # refuses an order that it does not bound
        if shape is not None:
            refuse_width(bound, math.prod(shape))

    def release(self, total: ArrayLike, bound: Bound, stream: Stream, turn: int = 0) -> Array:
        """Return the sum, rounded to a grid, with integer noise on it."""
        total = np.asarray(total, dtype=np.float64)
        refuse_width(bound, total.size)
        bits, cell = self.grid(bound, total.size)
        return self._noisy(stream, total, bound.scale, cell, bits)


@dataclass(frozen=True, slots=True)
class Gaussian(_Added):
    """Gaussian noise on a sum: its deviation is ``noise_multiplier`` times the bound of one contribution.

    Parameters
    ----------
    noise_multiplier : float
        The standard deviation over the bound's norm, above 0.

    Notes
    -----
    Dwork & Roth 2014; priced exactly by Balle & Wang 2018. The noise is an integer Gaussian on a lattice from
    a cryptographic stream, and is enlarged by as much as rounding can move sums apart.

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
    A symmetric matrix as the vector of its diagonal and √2 times its upper triangle has the same length as
    the Frobenius norm, so plain Gaussian noise on that vector answers to a Frobenius bound. (Dwork et al.
    2014 put the full deviation on every entry: twice the variance off the diagonal, for the same price.) Of a
    sum that is not symmetric the symmetric part is released: a projection, so its norm is no larger.

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
            raise Unsupported("symmetric noise is the same in all coordinates: use a bound without a scale")
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
    """A noisy choice: the place of the largest score, after noise of ``noise_multiplier`` times the bound.

    Parameters
    ----------
    noise_multiplier : float
        The scale of the noise over the bound's norm, above 0.
    kind : {"gumbel", "laplace"}, default "gumbel"
        The noise: Gumbel (the exponential mechanism) or Laplace (report noisy max).

    Notes
    -----
    Laplace: report noisy max is ε-DP with ε = d / scale, d being how much the gap between two scores can
    change (Dwork & Roth 2014, Claim 3.9). Gumbel: the exponential mechanism, whose log-probabilities vary by
    an interval of length ε, so that it costs ε²/8 of zCDP (Dong et al. 2020; Cesar & Rogers 2021). A record
    that can only raise scores (`ClipValue` with low >= 0) changes a gap by one bound when it comes or goes,
    by 2 (high - low) when it is replaced.

    On the grid, in cells of which 2^bits are the scale of the noise: a gap of rounded scores changes by at
    most two cells more. Noise is Nᵢ = round(2^bits Xᵢ), and of equal sums the lower place wins.
    Laplace: given the others' noise, place i wins if Nᵢ >= T for a whole T, that is if 2^bits Xᵢ >= T - 1/2;
    so Claim 3.9 holds as it stands, with the rounded gap.
    Gumbel: if i wins on the grid it wins without a grid when its score is one cell higher, and if it wins
    without one when its score is one cell lower it wins on the grid, as |Nⱼ - 2^bits Xⱼ| <= 1/2 for all j. A
    cell multiplies a softmax probability by e^(±2^-bits) at most, so each log-probability is within 2^-bits
    of the exponential mechanism's, a ratio of two within 2 of them, and the interval is longer by 4.
    Together 6 cells, of which the noise is enlarged by as much as the smallest gap needs; the bits grow with
    the noise, so that this is at most 2⁻¹² of it.

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
        return self._priced(1 / self.noise_multiplier)

    def check(self, bound: Bound, shape: tuple[int, ...] | None) -> None:
        if not isinstance(bound, ClipValue):
            raise Unsupported("NoisyMax needs scores bounded one by one: use ClipValue(low, high)")
        if shape is not None:
            if len(shape) != 1 or not shape[0]:
                raise InvalidValue(f"scores must be a vector, one a candidate, got shape {shape}")
            self.grid(bound)  # refuses noise that needs too fine a grid

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
        """Bits and width of a cell, of which 2^bits are the scale of the noise, however many scores."""
        norm = bound.norm()
        nearest = min(norm, bound.sensitivity(Adjacency.REPLACE_ONE))
        share = _CELLS_OF_A_CHOICE * self.noise_multiplier * norm / nearest
        bits = max(_BITS_OF_A_CHOICE, math.ceil(math.log2(share / _GRID_SHARE)))
        if bits > _MOST_BITS:
            raise Unsupported(
                f"a choice with noise {self.noise_multiplier:g} needs a grid of 2^-{bits}, finer than "
                f"2^-{_MOST_BITS}: lower the noise"
            )
        wider = enlarged(2 * norm, nearest) / (1 - share * 2.0**-bits)  # a gap is one of two sums
        return bits, self.noise_multiplier * norm * wider * 2.0**-bits

    def release(self, total: ArrayLike, bound: Bound, stream: Stream, turn: int = 0) -> int:
        total = np.asarray(total, dtype=np.float64)
        self.check(bound, total.shape)
        bits, cell = self.grid(bound)
        draw = lattice.gumbel if self.kind == "gumbel" else lattice.laplace
        return int(np.argmax(lattice.on_grid(total, bound.scale, cell) + draw(stream, total.size, bits)))
