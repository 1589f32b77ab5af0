"""Bound one record's contribution, and with it the sensitivity of a sum.

A bound clips contributions and provides `sensitivity(adjacency)`. A contribution with NaN or infinity counts
as zero, without a message: an error or a NaN in the answer would reveal the record. Clipping is exact up to
float64 rounding, which the mechanisms' slack covers (`farthing.noise.summing`). Parameters of other numeric
types are converted to Python's: 20 squared is 144 in numpy's uint8, and float16 has too few bits for noise.

>>> import numpy as np
>>> bound = ClipNorm(1.0)
>>> bound.apply(np.array([[3.0, 4.0], [0.3, 0.4], [np.nan, 0.0]]))
array([[0.6, 0.8],
       [0.3, 0.4],
       [0. , 0. ]])
>>> bound.sensitivity(Adjacency.ADD_REMOVE), bound.sensitivity(Adjacency.REPLACE_ONE)
(1.0, 2.0)
"""

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from farthing import validate
from farthing.budget import Adjacency
from farthing.errors import InvalidValue, Unsupported

Array = NDArray[np.float64]

_UNSCALED = 1.0


class Kind(StrEnum):
    """The kinds of bound, by the names that contributions list in ``honours``."""

    NORM = "ClipNorm(clip)"
    SCALED_NORM = "ClipNorm(clip, scale)"
    L1_NORM = "ClipNorm(clip, order=1)"
    SCALED_L1_NORM = "ClipNorm(clip, scale, order=1)"
    COORDINATES = "ClipCoordinates(scale)"
    VALUE = "ClipValue(low, high)"
    OUTER = "ClipOuter(clip)"


#: The kinds that a contribution honours if it passes every record's row through ``bound.apply`` and adds.
ROWS = (
    Kind.NORM,
    Kind.SCALED_NORM,
    Kind.L1_NORM,
    Kind.SCALED_L1_NORM,
    Kind.COORDINATES,
    Kind.VALUE,
)
#: The range of bounds, scales and noise multipliers: within it no sum of 2³⁰ contributions overflows, squares
#: underflow only in rows far below their clipping norm, and noise keeps all of its bits.
SMALLEST, LARGEST = 1e-100, 1e100


class Bound(Protocol):
    """A limit on one contribution, in units of the public ``scale`` (one number, or one per coordinate)."""

    @property
    def kind(self) -> str:
        """The kind (`Kind`, or a name of a new one) that a contribution must honour."""

    @property
    def width(self) -> int | None:
        """The number of coordinates that it bounds; None if it holds for any number."""

    @property
    def scale(self) -> Any:
        """The public numbers that contributions are divided by before their norm is taken."""

    def norm(self, order: int = 2) -> float:
        """Return the largest L1 (order 1) or L2 norm of one contribution, in units of scale."""

    def sensitivity(self, adjacency: Adjacency, order: int = 2) -> float:
        """Return the largest change of a sum over all records between neighbours, in units of scale."""


def _twice_if_replaced(norm: float, adjacency: Adjacency) -> float:
    return adjacency.shift * norm


def _rows(contributions: ArrayLike, width: int | None = None) -> Array:
    rows = np.asarray(contributions, dtype=np.float64)
    if rows.ndim != 2:
        raise InvalidValue(f"contributions must have one row per record, got {rows.ndim} dimensions")
    if width not in (None, rows.shape[1]):  # no broadcasting: the price holds for these coordinates only
        raise InvalidValue(f"the bound has {width} coordinates, a contribution has {rows.shape[1]}")
    return rows


def _width(scale: Any) -> int | None:
    """Return the number of coordinates of a scale; None for a single number, which holds for any."""
    return math.prod(scale.shape) if getattr(scale, "ndim", 0) else None


def in_range(**value: Any) -> float:
    """Return the number if it lies between `SMALLEST` and `LARGEST`, or raise."""
    ((name, number),) = value.items()
    if not SMALLEST <= validate.positive(**value) <= LARGEST:
        raise InvalidValue(f"{name} must lie between {SMALLEST:g} and {LARGEST:g}, got {number!r}")
    return float(number)


def _public_scale(scale: Any) -> tuple[Any, tuple[float, float]]:
    """Return a scale that the caller cannot change, and its least and largest entry.

    Arrays are copied and made read-only; tensors stay on their device.
    """
    if hasattr(scale, "detach"):  # a torch tensor; torch is not imported here
        values = scale.detach().clone()
        edges = (0.0, 0.0) if 0 in values.shape else values.aminmax()
    else:
        try:
            values = np.array(scale, dtype=np.float64)
        except (TypeError, ValueError):
            raise InvalidValue(f"scale must be a number, or one a coordinate, got {scale!r}") from None
        values.setflags(write=False)
        edges = (0.0, 0.0) if 0 in values.shape else (values.min(), values.max())
    least, most = map(float, edges)  # NaN if any entry is
    if not SMALLEST <= least <= most <= LARGEST:
        raise InvalidValue(f"scale must lie between {SMALLEST:g} and {LARGEST:g} everywhere, got {scale!r}")
    return values, (least, most)


@dataclass(frozen=True, slots=True, eq=False)
class ClipNorm:
    """A bound on the norm: each record's row is shrunk to norm ``clip``.

    Parameters
    ----------
    clip : float
        The clipping norm, above 0.
    scale : float or array, default 1.0
        Public numbers that rows are divided by before their norm is taken, so that the bound is an ellipsoid;
        the noise is scaled alike.
    order : {2, 1}, default 2
        The norm: 2 for Gaussian noise, 1 for Laplace noise.

    Notes
    -----
    The sensitivity of a sum is ``clip`` under add-remove and zero-out, and twice that under replace-one.

    Examples
    --------
    >>> ClipNorm(1.0).apply(np.array([[3.0, 4.0], [0.3, 0.4]]))
    array([[0.6, 0.8],
           [0.3, 0.4]])
    """

    clip: float
    scale: Any = _UNSCALED  # number, array or tensor
    order: int = 2
    extent: tuple[float, float] = field(init=False, repr=False)  # the least and the largest scale

    def __post_init__(self) -> None:
        object.__setattr__(self, "clip", in_range(clip=self.clip))
        if self.order not in (1, 2):
            raise InvalidValue(f"order must be 1 or 2, got {self.order!r}")
        scale, extent = (_UNSCALED, (1.0, 1.0)) if self.scale is _UNSCALED else _public_scale(self.scale)
        object.__setattr__(self, "scale", scale)
        object.__setattr__(self, "extent", extent)

    @property
    def kind(self) -> str:
        scaled = self.scale is not _UNSCALED
        if self.order == 1:
            return Kind.SCALED_L1_NORM if scaled else Kind.L1_NORM
        return Kind.SCALED_NORM if scaled else Kind.NORM

    @property
    def width(self) -> int | None:
        return _width(self.scale)

    def norm(self, order: int = 2) -> float:
        if order < self.order:
            raise Unsupported("Laplace noise needs an L1 bound: use ClipNorm(clip, order=1)")
        return self.clip

    def sensitivity(self, adjacency: Adjacency, order: int = 2) -> float:
        return _twice_if_replaced(self.norm(order), adjacency)

    def factors(self, norms: ArrayLike) -> Array:
        """Return min(1, clip / norm) for each norm, and 0 for NaN and infinity.

        It serves contributions that are never materialised.
        """
        sizes = np.asarray(norms, dtype=np.float64)
        factors: Array = self.clip / np.maximum(np.abs(sizes), self.clip)
        # a factor below 1e-290 would round coarsely; such a contribution is dropped, like NaN and infinity
        if sizes.size and not factors.min() > 1e-290:
            factors = np.where(factors > 1e-290, factors, 0.0)
        return factors

    def apply(self, contributions: ArrayLike) -> Array:
        """Return each row clipped. Rows whose squares overflow or underflow take a slower, scaled path."""
        rows = _rows(contributions, self.width)
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = rows if self.scale is _UNSCALED else rows / self.scale
            sizes = np.abs(scaled).sum(axis=1) if self.order == 1 else np.einsum("ij,ij->i", scaled, scaled)
            norms = sizes if self.order == 1 else np.sqrt(sizes)
            clipped: Array = rows * self.factors(norms)[:, None]
        odd = np.flatnonzero(~np.isfinite(sizes))
        clipped[odd] = self._apply_scaled(rows[odd])
        return clipped

    def _apply_scaled(self, rows: Array) -> Array:
        """Return each row clipped; the norm of row / largest entry neither overflows nor underflows."""
        with np.errstate(over="ignore"):
            scaled = rows / self.scale
        finite = np.isfinite(scaled).all(axis=1, keepdims=True)
        rows, scaled = np.where(finite, rows, 0.0), np.where(finite, scaled, 0.0)
        largest = np.max(np.abs(scaled), axis=1, initial=0.0)
        unit = scaled / np.where(largest > 0, largest, 1.0)[:, None]
        norms = np.abs(unit).sum(axis=1) if self.order == 1 else np.sqrt((unit * unit).sum(axis=1))
        norms = np.maximum(norms, 1.0)  # true except for a zero row, which has no norm to divide by
        with np.errstate(over="ignore"):
            sizes = (norms * largest)[:, None]
        clipped: Array = np.where(sizes > self.clip, unit * (self.clip / norms)[:, None] * self.scale, rows)
        return clipped


@dataclass(frozen=True, slots=True, eq=False)
class ClipCoordinates:
    """A bound on every coordinate: coordinate i is clamped to [-scale_i, scale_i].

    Parameters
    ----------
    scale : array
        The bound of each coordinate, above 0. For one bound on m coordinates pass ``np.full(m, scale)``.

    Notes
    -----
    In units of scale every coordinate lies in [-1, 1], so the L2 norm is at most √m: Gaussian noise of
    standard deviation σ √m scale_i satisfies Σ (scale_i/σ_i)² = 1/σ², AdaDP's Lemma 1 with equality.

    Examples
    --------
    >>> ClipCoordinates(np.array([1.0, 0.1])).apply(np.array([[3.0, -4.0]]))
    array([[ 1. , -0.1]])
    """

    scale: Any  # an array or a tensor
    extent: tuple[float, float] = field(init=False, repr=False)  # the least and the largest scale
    kind: ClassVar[str] = Kind.COORDINATES

    def __post_init__(self) -> None:
        if np.ndim(self.scale) == 0:
            raise InvalidValue(
                f"scale must have one entry per coordinate, got {self.scale!r}: use np.full(m, scale)"
            )
        scale, extent = _public_scale(self.scale)
        object.__setattr__(self, "scale", scale)
        object.__setattr__(self, "extent", extent)

    @property
    def width(self) -> int:
        return math.prod(self.scale.shape)

    def norm(self, order: int = 2) -> float:
        return float(self.width) if order == 1 else math.sqrt(self.width)

    def sensitivity(self, adjacency: Adjacency, order: int = 2) -> float:
        return _twice_if_replaced(self.norm(order), adjacency)

    def apply(self, contributions: ArrayLike) -> Array:
        """Return each entry clamped; a row with an entry that is not finite counts as zero."""
        rows = _rows(contributions, self.width)
        finite = np.isfinite(rows).all(axis=1, keepdims=True)
        clamped: Array = np.clip(np.where(finite, rows, 0.0), -self.scale, self.scale)
        return clamped


@dataclass(frozen=True, slots=True)
class ClipValue:
    """A bound on values: every entry is clamped to [low, high].

    Parameters
    ----------
    low, high : float
        The ends of the interval, low below high.

    Notes
    -----
    It bounds one number per record, or one score per candidate (`NoisyMax`). Without sampling, the
    sensitivity is high - low under replace-one and max(|low|, |high|) under the other adjacencies.

    Examples
    --------
    >>> ClipValue(0.0, 1.0).apply(np.array([[3.0], [0.5]]))
    array([[1. ],
           [0.5]])
    """

    low: float
    high: float
    kind: ClassVar[str] = Kind.VALUE
    width: ClassVar[int] = 1  # for added noise; `NoisyMax` takes any number of scores

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            object.__setattr__(self, name, validate.finite(**{name: getattr(self, name)}))
        if not self.high > self.low:
            raise InvalidValue(f"high must be above low={self.low:g}, got {self.high:g}")
        in_range(norm=self.norm())

    @property
    def scale(self) -> float:
        return 1.0

    @property
    def blank(self) -> float:
        """The value of a record that fails or is not finite, which is zero, clamped to the interval."""
        return min(max(0.0, self.low), self.high)

    @property
    def one_signed(self) -> bool:
        """Whether all terms have the same sign, so that a record can move a sum in one direction only."""
        return self.low >= 0 or self.high <= 0

    def norm(self, order: int = 2) -> float:
        return max(abs(self.low), abs(self.high))

    def sensitivity(self, adjacency: Adjacency, order: int = 2) -> float:
        return self.high - self.low if adjacency is Adjacency.REPLACE_ONE else self.norm(order)

    def apply(self, contributions: ArrayLike) -> Array:
        """Return each entry clamped; a row with an entry that is not finite counts as zeros, clamped."""
        rows = _rows(contributions)
        finite = np.isfinite(rows).all(axis=1, keepdims=True)
        clamped: Array = np.clip(np.where(finite, rows, 0.0), self.low, self.high)
        return clamped


@dataclass(frozen=True, slots=True)
class ClipOuter:
    """A bound on outer products x xᵀ of rows shrunk to norm ``clip``.

    Parameters
    ----------
    clip : float
        The clipping norm of a row x, above 0.

    Notes
    -----
    The Frobenius norm of x xᵀ is at most clip², and the sensitivity under replace-one is √2 clip². It bounds
    products, not rows, so it has no ``apply``: a contribution clips its rows with `rows` and then multiplies
    them.

    Examples
    --------
    >>> bound = ClipOuter(2.0)
    >>> bound.norm(), round(bound.sensitivity(Adjacency.REPLACE_ONE), 3)
    (4.0, 5.657)
    """

    clip: float
    kind: ClassVar[str] = Kind.OUTER
    width: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "clip", in_range(clip=self.clip))
        in_range(norm=self.norm())

    @property
    def scale(self) -> float:
        return 1.0

    def norm(self, order: int = 2) -> float:
        if order != 2:
            raise Unsupported("ClipOuter has no L1 bound: use Gaussian noise")
        return self.clip**2

    def sensitivity(self, adjacency: Adjacency, order: int = 2) -> float:
        # |xxᵀ - yyᵀ|² = |x|⁴ + |y|⁴ - 2(x·y)² <= 2 clip⁴
        return self.norm(order) * (math.sqrt(2) if adjacency is Adjacency.REPLACE_ONE else 1.0)

    @property
    def rows(self) -> ClipNorm:
        """The bound that each row x is clipped with before the outer product."""
        return ClipNorm(self.clip)
