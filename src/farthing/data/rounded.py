"""Round rows in [0, 1] to whole numbers of a public grid, so that products of rows are added up exactly.

A row x becomes q_j = rint((x_j - c_j) f_j), at most `FURTHEST` in size, with public c and f in float32. Each
number goes through one subtraction and one product in float32, and all that follows (products, sums, shifts)
is exact in integers of 32 bits and in float64. Kernels of every compiler and processor and numpy, whichever
reads a table, therefore give the same bits for a row, beside whatever other rows: no record can change how
those of others are rounded. That is what float32 alone would not give.

**Products.** For z = A (x - c) with a diagonal A, z_j is u_j q_j, u_j a power of two and f_j =
A_j / u_j; the released sum is that of these z, each clipped. Units lie within 2⁸ of each other. *The sum is
exact:* |q_j| < 2¹¹, so 128 products fit into 32 bits and 2³⁰ of them into the 53 of float64, and u_j u_k is a
power of two. *A term keeps its bound:* Σ q_j² (u_j / U)², U the least unit, is a sum of at most 2¹² whole
numbers below 2³⁸, so exact; where it exceeds L <= (clip / U)² (1 - 2⁻⁴⁰), q is multiplied by √(L / Σ), which
four roundings make longer by 2⁻⁵⁰ at most, and rounded towards 0. Neighbours so differ by one term exactly.

**Lengths.** An upper bound of |z|² = b² + |A (x - c)|² with a matrix A, for clipping. Let B = A
diag(1 / f), a = rint(B / W) in 16 bits, p = q a in 32 bits, and 2ˢ the power that leaves 20 bits of p. Then A
(x - c) is W 2ˢ floor(p / 2ˢ) but for three errors, whose norms add up to at most ``slack``:

* x - c is q / f to within (1/2 + 2⁻¹⁰) / f_j in each coordinate: rint, and four roundings of numbers that are
  below 2048 when multiplied by f (x to float32, c, their difference, the product; 2⁻¹¹ together). A makes at
  most |A|₂ √d max (1/2 + 2⁻¹⁰) / f_j of it.
* q (B - W a) has a norm of at most `FURTHEST` √d |B - W a|, in Frobenius' norm.
* floor costs less than W 2ˢ in each coordinate, √d of them.

√(m² + b²) + slack >= √((m + slack)² + b²), b² / (W 2ˢ)² is rounded up to a whole number, the sum of squares
below 2⁴⁰ is exact, W is a power of two, and a millionth more of slack covers the root and the last addition.
A bound is used where slack is at most a 64th of √d, the norm of whitened rows.

>>> features = Features(2, 0.5, np.array([[4.0, 0.0], [1.0, 3.0]]), 1.0)
>>> x = np.array([[0.9, 0.1], [0.5, 0.5]])
>>> bound = RowLengths.of(features).of_rows(x) - np.sqrt(features.squared_norms(x, None))
>>> bool((bound >= 0).all()), bool((bound < 0.01).all())
(True, True)
"""

import math
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from farthing.data.features import Features
from farthing.data.raw import Factors, Stored, scratch
from farthing.noise import native

Array = NDArray[np.float64]
Blank = NDArray[np.bool_] | None

FURTHEST = 2**11 - 1  # the largest whole number of a row
_WIDEST = 2**12 - 1  # features
_SPREAD = 2.0**-8  # the least unit of a feature, relative to the largest
_MATRIX, _SUMS = (
    2**15 - 1,
    2**20,
)  # the largest number of a matrix, and the most that a row of them adds up to
_KEPT = 20  # bits of a product
_OFF = 0.5 + 2.0**-10  # how far a whole number is from what it stands for
_LOSE = 2.0**-6  # the most by which a bound may exceed the norm of whitened rows, relative to it
_MARGIN = 1 + 1e-6
_PITCH, _PAIRS, _HIGH = 16, 64, 8  # of kernels' rooms: a part of their width, and the rows in them


class RowGrid(NamedTuple):
    """Where the whole numbers of each feature lie: at ``centre`` + q / ``factor``, both in float32."""

    centre: NDArray[np.float32]
    factor: NDArray[np.float32]

    @classmethod
    def of(cls, centre: Array, factor: Array) -> Self:
        """Return a grid with room for kernels beyond its last feature."""
        padded = [np.zeros(_pitch(len(centre)), np.float32) for _ in range(2)]
        for to, values in zip(padded, (centre, factor), strict=True):
            to[: len(values)] = values
        return cls(*padded)

    def whole(self, x: Array) -> Array:
        """Return rows as whole numbers; those of rows beyond [0, 1] lie at the ends."""
        d = x.shape[1]
        with np.errstate(over="ignore", invalid="ignore"):
            q = (x.astype(np.float32) - self.centre[:d]) * self.factor[:d]
        return np.asarray(np.clip(np.rint(q), -FURTHEST, FURTHEST), dtype=np.float64)


class RowProducts(NamedTuple):
    """Σ z zᵀ of rounded rows [z; b], z_j = ``unit``_j q_j, each clipped."""

    grid: RowGrid
    unit: Array
    constant: int  # b, in its unit
    weight: Array  # units relative to the least
    limit: float  # of Σ (weight q)², infinite where no row can exceed it

    @classmethod
    def of(cls, features: Features, clip: float, coarsest: float) -> Self | None:
        """Return how products of rows in [0, 1] are added up; None where a unit exceeds ``coarsest``."""
        scale, centre, b = np.asarray(features.scale), np.asarray(features.centre), features.intercept
        if scale.ndim == 2 or features.radius is not None or features.width > _WIDEST:
            return None
        reach = scale * np.maximum(np.abs(centre), np.abs(1 - centre))
        unit = _power(np.append(reach, b if b else reach[0]) * (1 + 2.0**-10) / FURTHEST)
        if not (unit.min() > 0 and unit.max() <= coarsest):
            return None
        unit = np.maximum(unit, unit.max() * _SPREAD)
        constant = round(b / unit[-1])
        if not b:
            unit = unit[:-1]
        weight = unit / unit.min()
        limit = math.floor(min(clip / float(unit.min()), 2.0**30) ** 2 * (1 - 2.0**-40))
        most = float(np.square(FURTHEST * weight).sum())
        return cls(
            RowGrid.of(
                np.append(centre, -constant), np.append(scale / unit[: features.width], 1.0)
            ),  # 0 to b
            unit,
            constant,
            weight,
            math.inf if most <= limit else float(limit),
        )

    def of_rows(self, x: Array, blank: Blank) -> Array:
        """Return rows whose products, times units, are added up; ``blank`` ones count for nothing."""
        q = self.grid.whole(x)
        if self.constant:
            q = np.column_stack([q, np.full(len(q), float(self.constant))])
        if blank is not None:
            q[blank] = 0.0
        if self.limit < math.inf:
            size = np.square(q * self.weight).sum(axis=1)
            long = size > self.limit
            q[long] = np.trunc(q[long] * np.sqrt(self.limit / size[long])[:, None])
        return q

    def of_stored(self, rows: Stored, blank: Blank) -> Array | None:
        """Return Σ q qᵀ of all rows; None without a kernel."""
        found, size = native.kernels(rows.rows * rows.width), len(self.unit)
        if found is None or rows.kind == "csr":
            return None
        pitch = _pitch(size)
        weight, total = np.zeros(pitch), np.zeros((pitch, pitch))
        weight[:size], room = self.weight, np.empty((_PAIRS, pitch), np.int32)
        found["scatter_" + rows.kind](
            *(*rows.some(slice(0, rows.rows)), native.pointer(blank), *map(native.pointer, self.grid)),
            *(native.pointer(weight), self.limit, pitch),
            *(native.pointer(room), native.pointer(total)),
        )
        upper = np.triu(total[:size, :size])
        return upper + np.triu(upper, 1).T

    def in_units(self, total: Array) -> Array:
        """Return Σ z zᵀ from Σ q qᵀ."""
        return total * np.multiply.outer(self.unit, self.unit)


class RowLengths(NamedTuple):
    """Upper bounds of |z|, z = [A (x - c); b] with a matrix A, of rows x in [0, 1]."""

    grid: RowGrid
    matrix: Array  # whole numbers, a column for each coordinate of z
    shift: int
    base: float  # b², in squared units
    unit: float  # W 2ˢ
    slack: float
    least: float

    @classmethod
    def of(cls, features: Features, least: float = 0.0) -> Self | None:
        """Return how rows are measured, all for at least ``least``; None where it would be too coarse."""
        scale, centre, d = np.asarray(features.scale), np.asarray(features.centre), features.width
        if scale.ndim != 2 or features.radius is not None or d > _WIDEST:
            return None
        reach = np.maximum(np.abs(centre), np.abs(1 - centre))
        grid = RowGrid.of(centre, FURTHEST / reach)
        b = scale.T / grid.factor[:d, None].astype(np.float64)
        least_unit = max(np.abs(b).max() / _MATRIX, np.abs(b).sum(axis=0).max() / (_SUMS - d / 2)) * _MARGIN
        if not 2.0**-200 < least_unit < 2.0**200:
            return None
        unit = float(_power(least_unit))
        matrix = np.rint(b / unit)
        shift = max(0, int(np.abs(matrix).sum(axis=0).max() * FURTHEST).bit_length() - _KEPT)
        width, kept = math.sqrt(d), unit * 2.0**shift
        slack = features.across * width * _OFF / float(grid.factor[:d].min())
        slack += float(np.linalg.norm(b - unit * matrix)) * FURTHEST * width + width * kept
        base = math.ceil((features.intercept / kept) ** 2 * _MARGIN)
        if slack > _LOSE * width or base > 2**50:
            return None
        length, by = features.cancels
        return cls(grid, matrix, shift, float(base), kept, slack * _MARGIN, max(least, (length + width) * by))

    def of_rows(self, x: Array) -> Array:
        """Return the bounds of some rows."""
        p = np.floor(self.grid.whole(x) @ self.matrix * 2.0**-self.shift)
        bound = np.sqrt(np.square(p).sum(axis=1) + self.base) * self.unit + self.slack
        return np.asarray(np.maximum(bound, self.least))

    def of_stored(self, rows: Stored, blank: Blank) -> Factors | None:
        """Return g (None), h (None where no row is ``blank``) and the bounds of all rows, or None."""
        found = native.kernels(rows.rows * rows.width)
        if found is None or rows.kind == "csr":
            return None
        d = rows.width
        pitch = _pitch(d)
        whole = np.zeros((pitch, pitch), np.int16)
        whole[:d, :d] = self.matrix
        pairs = np.ascontiguousarray(whole.reshape(pitch // 2, 2, pitch).transpose(0, 2, 1)).view(np.int32)
        norm = scratch(rows.rows, rows.filed)
        shrink = None if blank is None else scratch(rows.rows, rows.filed)
        upper, room = not np.triu(self.matrix, 1).any(), np.empty((_HIGH, pitch), np.int16)
        found["lengths_" + rows.kind](
            *(*rows.some(slice(0, rows.rows)), native.pointer(blank), *map(native.pointer, self.grid)),
            *(native.pointer(pairs), pitch, upper, self.shift, self.base, self.unit, self.slack, self.least),
            *(native.pointer(room), native.pointer(shrink), native.pointer(norm)),
        )
        return None, shrink, norm


def _pitch(size: int) -> int:
    return -(-size // _PITCH) * _PITCH


def _power(values: Array | float) -> Array:
    """Return the least powers of two that are no less."""
    mantissa, exponent = np.frexp(values)
    return np.asarray(np.ldexp(1.0, exponent - (mantissa == 0.5)))
