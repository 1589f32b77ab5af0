"""Read the rows of a table where they lie in memory, by C kernels: products, norms and clipped gradients.

A kernel reads every row once, in the type in which it is stored, and adds up in float64 by the rules of
`farthing.noise.summing`. Without kernels, and for rows that none can read, callers go through blocks instead
(`farthing.data.tables`), which gives the same sums but for their last bits.

>>> rows = stored(np.array([[3.0, 4.0], [0.0, 1.0]]), np.ones(2))
>>> rows.kind, rows.rows, rows.stride
('f8', 2, 2)
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from farthing.noise import native

Array = NDArray[np.float64]
Factors = tuple[Array | None, Array | None, Array]  # for each row: g and h (None where all are 1), and |z|

_DENSE = {"d": "f8", "f": "f4", "B": "u1", "?": "u1"}  # kernels by numpy's type codes


class Stored(NamedTuple):
    """Rows in memory: the kernel that reads them, addresses, shape, and targets in float64 (0 for NaN).

    ``stride`` is counted in numbers. Of sparse rows (``kind`` "csr") the addresses are those of values,
    columns and starts. The table keeps the arrays alive.
    """

    kind: str
    addresses: tuple[int, ...]
    rows: int
    width: int
    stride: int
    y: Array | None

    def squares(self, centre: Array, scale: Array) -> tuple[Array, Array] | None:
        """Return |scale (x - centre)|² and |scale x|² of every row; None without a kernel."""
        found = native.kernels(self.rows * self.width)
        if found is None or self.kind == "csr":
            return None
        near, far = np.empty((2, self.rows))
        ends = np.ascontiguousarray(centre), np.ascontiguousarray(scale)
        found["squares_" + self.kind](
            *(*self.addresses, self.stride, self.rows, self.width),
            *(native.pointer(each) for each in (*ends, near, far)),
        )
        return near, far


class KernelLoss(NamedTuple):
    """A loss as kernels know it: its number there, its width, the clipping norm, a scale of sizes or 0."""

    number: int
    width: float
    clip: float
    rms: float = 0.0


class Raw(NamedTuple):
    """Stored rows, all or at some positions, with the factors of their z (`farthing.data.tables.Features`).

    Targets and factors are those of all rows.
    """

    stored: Stored
    places: NDArray[np.int64] | None
    number: int
    factors: Factors

    def margins(self, u: Array, constant: Any) -> Array | None:
        """Return z·w of all rows, for weights on x; None where no kernel gives them."""
        rows = self.stored
        found = native.kernels(self.number * len(u))
        if found is None or rows.kind == "csr" or self.places is not None or u.ndim != 1:
            return None
        products, u = np.empty(rows.rows), np.ascontiguousarray(u)
        found["products_" + rows.kind](
            *(*rows.addresses, rows.stride, rows.rows, rows.width),
            *(native.pointer(u), native.pointer(products)),
        )
        unit, shrink, _ = self.factors
        products = products if unit is None else products * unit
        products += constant
        return products if shrink is None else products * shrink

    def gradient(self, u: Array, constant: Any, loss: KernelLoss, chain: int) -> Array | None:
        """Return Σ v x, Σ v and Σ min(size / 2 rms, 1)² - 1/2, end to end; None where no kernel sums them.

        v is a row's clipped residual. At most ``chain`` rows are added up before they go into a sum of two
        parts, as `farthing.noise.summing` requires.
        """
        rows, (unit, shrink, norm) = self.stored, self.factors
        found = native.kernels(self.number * len(u))
        if found is None or rows.y is None or u.ndim != 1 or u.dtype != np.float64:
            return None
        if rows.kind == "csr" and self.places is not None:
            return None
        u, total = np.ascontiguousarray(u), np.empty((3, len(u) + 2))
        at = (rows.rows, rows.stride, native.pointer(self.places), self.number, len(u))
        done = found["gradient_" + rows.kind](
            *(*rows.addresses, *((self.number, len(u)) if rows.kind == "csr" else at)),
            *(native.pointer(u), constant, native.pointer(rows.y), native.pointer(norm)),
            *(native.pointer(unit), native.pointer(shrink), *loss, chain, native.pointer(total)),
        )
        return None if done else total[0] + total[1]


def stored(X: Any, y: Any) -> Stored | None:
    """Return where rows lie in memory; None where no kernel can read them."""
    y = None if y is None else np.nan_to_num(np.ascontiguousarray(y, dtype=np.float64))
    if y is not None and y.ndim != 1:
        return None
    if sparse.issparse(X):
        return _compressed(X, y)
    kind = _DENSE.get(X.dtype.char) if isinstance(X, np.ndarray) else None
    if kind is None or not X.dtype.isnative or not X.flags.aligned:
        return None
    if X.dtype.char == "?" and X.view(np.uint8).max(initial=0) > 1:  # numpy reads 1 there, a kernel would not
        return None
    stride, odd = divmod(X.strides[0], X.itemsize)
    if odd or X.strides[1] != X.itemsize:
        return None
    return Stored(kind, (X.ctypes.data,), X.shape[0], X.shape[1], stride, y)


def _compressed(X: Any, y: Array | None) -> Stored | None:
    """Return sparse rows whose columns ascend, so that none occurs twice in a row."""
    if X.format != "csr" or not X.nnz:
        return None
    arrays = X.data, X.indices, X.indptr
    kinds = [array.dtype.str for array in arrays]
    if kinds != ["<f8", "<i4", "<i4"] or not all(
        array.flags.c_contiguous and array.flags.aligned for array in arrays
    ):
        return None
    lengths = np.diff(X.indptr)
    if X.indptr[0] != 0 or X.indptr[-1] != len(X.indices) or (lengths < 0).any():
        return None
    if len(X.data) != len(X.indices) or len(X.indptr) != X.shape[0] + 1:
        return None
    ascends = np.diff(X.indices) > 0
    ends = X.indptr[1:-1]
    ascends[ends[(ends > 0) & (ends < len(X.indices))] - 1] = True  # a new row begins anywhere
    if not ascends.all() or X.indices.min() < 0 or X.indices.max() >= X.shape[1]:
        return None
    return Stored("csr", tuple(array.ctypes.data for array in arrays), X.shape[0], X.shape[1], 0, y)
