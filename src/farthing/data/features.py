"""Map rows x to z = h [A (x - c); b]: centre c, scales or a matrix A, a constant b, and h, which shrinks.

z is not materialised: products with z are computed from products with x (`farthing.data.tables`).

>>> features = Features(2, centre=0.5, scale=2.0)
>>> u, constant = features.unfold(np.array([1.0, 0.0, 3.0]))
>>> u.tolist(), float(constant)
([2.0, 0.0], 2.0)
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from farthing import validate
from farthing.errors import InvalidValue
from farthing.noise import summing
from farthing.queries import arrays

Array = NDArray[np.float64]

_SPREAD = 2.0**8  # the factor by which terms of Σ v x may exceed those of Σ v z


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """A public map of rows: z = h [A (x - c); b]. All of it must be public or already released.

    Parameters
    ----------
    width : int
        The number of features of x.
    centre : float or array, default 0.0
        c, one number or one per feature.
    scale : float or array, default 1.0
        The diagonal of A (one number, or one per feature), or A itself, a square matrix.
    intercept : float, default 1.0
        b, a constant that is appended; none if 0.
    radius : float, optional
        Longer z are shrunk to this norm (h < 1). None shrinks no row.

    Examples
    --------
    >>> Features(2, centre=0.5).size
    3
    """

    width: int
    centre: float | Array = 0.0
    scale: float | Array = 1.0
    intercept: float = 1.0
    radius: float | None = None
    plain: bool = field(init=False, repr=False)  # neither centred nor scaled
    across: float = field(init=False, repr=False)  # the largest stretch of a matrix A
    spread: float = field(init=False, repr=False)  # for `farthing.noise.summing`: see `at_least`

    def __post_init__(self) -> None:
        d = validate.count(width=self.width)
        validate.non_negative(intercept=self.intercept)
        if self.radius is not None:
            validate.positive(radius=self.radius)
        for name, shapes in (("centre", [(), (d,)]), ("scale", [(), (d,), (d, d)])):
            given = getattr(self, name)
            said = partial("{} must be a number, or one a feature, got {!r}".format, name, given)
            value = arrays.attempt(np.asarray, given, np.float64, said=said)
            if value.shape not in shapes or not np.isfinite(value).all():
                raise InvalidValue(f"{name} must be finite, of a shape in {shapes}, got shape {value.shape}")
            object.__setattr__(self, name, value if value.ndim == 2 else np.broadcast_to(value, d))
        diagonal = np.ndim(self.scale) == 1
        plain = diagonal and not np.any(self.centre) and bool(np.all(self.scale == 1))
        object.__setattr__(self, "plain", plain)
        across = 1.0 if diagonal else float(np.linalg.norm(np.asarray(self.scale), 2))
        object.__setattr__(self, "across", across)  # computed once: every block needs it
        spread = _SPREAD if diagonal else 2 * _SPREAD  # half of the roundings are left for products with A
        object.__setattr__(self, "spread", 1.0 if diagonal and not np.any(self.centre) else spread)

    @property
    def size(self) -> int:
        """Return the length of z."""
        return self.width + (self.intercept > 0)

    def unfold(self, w: Array) -> tuple[Array, Array]:
        """Return weights u and constant on x for weights ``w`` on z, unshrunk: z·w = x·u + constant."""
        if len(w) != self.size:
            raise InvalidValue(f"w must have one row per coordinate of z, {self.size}, got {len(w)}")
        if self.plain:
            u = w[: self.width]
            return u, self.intercept * w[-1] if self.intercept else np.zeros(w.shape[1:])
        u = _apply(np.transpose(self.scale), w[: self.width])
        constant = self.intercept * w[-1] if self.intercept else np.zeros(w.shape[1:])
        return u, constant - self.centre @ u

    def gather(self, total: Array, weight: Array, records: int, centred: bool = False) -> Array:
        """Return Σ v z from Σ v x (if ``centred``, Σ v (x - c)) and Σ v of this many records."""
        off = 0.0 if centred or self.plain else np.multiply.outer(self.centre, weight)
        mapped = total if self.plain else self._mapped(total - off, records)
        return np.concatenate([mapped, (self.intercept * weight)[None]]) if self.intercept else mapped

    def rows(self, x: Any, unit: Array | None) -> Array:
        """Return [A (g x - c); b] materialised, for one block at a time."""
        dense = rowwise(x.toarray() if sparse.issparse(x) else x, unit)
        if np.any(self.centre):
            dense = dense - self.centre
        rows, d = np.empty((len(dense), self.size)), self.width
        rows[:, d:] = self.intercept
        if np.ndim(self.scale) == 2:
            np.matmul(dense, np.transpose(self.scale), out=rows[:, :d])
        else:
            np.multiply(dense, self.scale, out=rows[:, :d])
        return rows

    def squared_norms(self, x: Any, unit: Array | None) -> Array:
        """Return |[A (g x - c); b]|² of every row."""
        if sparse.issparse(x) and unit is None and np.ndim(self.scale) == 1:
            return self._sparse_norms(x)
        if np.ndim(self.scale) == 2 or np.any(self.centre):  # a difference of squares would cancel
            rows = self.rows(x, unit)
            squares: Array = np.einsum("ij,ij->i", rows, rows)
            return squares
        inner = squares_of(x, self.scale)
        return (inner if unit is None else np.square(unit) * inner) + self.intercept**2

    def _sparse_norms(self, x: Any) -> Array:
        """Return |[A (x - c); b]|² of sparse rows, from stored values alone, rounded upwards.

        Σ a²(x - c)² is Σ a²c², plus a²x(x - 2c) of the stored ones. Sums of k terms are off by at most 2k u
        of their absolute values (u = 2⁻⁵³), which 2⁻³⁰ of them covers for k <= 2²².
        """
        square = np.square(np.asarray(self.scale))
        base = float(square @ np.square(self.centre)) + self.intercept**2
        terms = x.data * (x.data - 2 * np.asarray(self.centre)[x.indices]) * square[x.indices]
        stored = sparse.csr_array((terms, x.indices, x.indptr), x.shape)
        ones = np.ones(x.shape[1])
        slack = base + abs(stored) @ ones
        return np.asarray(np.maximum(base + stored @ ones, 0.0) + 2.0**-30 * slack)

    def at_least(self, norm: Array, x: Any, unit: Array | None) -> Array:
        """Return norms |z| of rows, raised to at least 2⁻⁸ of the size of their terms in Σ v x and Σ v.

        Terms of a row near the centre are longer than v z and cancel. With norms raised in this way their
        length, |A| |v| (|g x| + |c|), is at most 2⁸ clips, as the theorem of `farthing.noise.summing`
        requires.
        """
        length, by = self.cancels
        if not by:
            return norm
        inner = np.sqrt(squares_of(x, 1.0 if np.ndim(self.scale) == 2 else self.scale))
        return np.maximum(norm, (length + (inner if unit is None else unit * inner)) * by)

    @property
    def cancels(self) -> tuple[float, float]:
        """Return |A c| (|c| if A is a matrix), and the factor of `at_least`; 0 if nothing cancels."""
        scale = 1.0 if np.ndim(self.scale) == 2 else np.asarray(self.scale)
        length = float(np.linalg.norm(np.asarray(self.centre) * scale))
        return length, 0.0 if self.spread == 1 else self.across / _SPREAD

    def _mapped(self, columns: Array, records: int) -> Array:
        """Return A times sums over this many records; a matrix A in parts with few roundings."""
        if np.ndim(self.scale) == 1:
            return _apply(self.scale, columns)
        total = summing.Sum(records, columns.shape, spread=self.spread)
        step = total.rows // 2
        for part in (slice(start, start + step) for start in range(0, len(columns), step)):
            total.add(np.asarray(self.scale)[:, part] @ columns[part], step)
        return total.value


def _apply(scale: Any, columns: Array) -> Array:
    """Return A times columns, where A is a matrix or its diagonal."""
    if np.ndim(scale) == 2:
        return np.asarray(scale @ columns)
    return np.asarray(columns * (scale if columns.ndim == 1 else scale[:, None]))


def rowwise(values: Array, factors: Array | None) -> Array:
    """Return values times a factor for each row, None for 1."""
    if factors is None:
        return values
    return values * (factors if values.ndim == 1 else factors[:, None])


def squares_of(x: Any, scale: Any) -> Array:
    """Return Σ (scale x)² of every row."""
    scaled = np.broadcast_to(np.square(scale), x.shape[1])
    return np.asarray((x.multiply(x) if sparse.issparse(x) else np.square(x)) @ scaled)
