"""Read the rows of a table where they lie in memory, by C kernels: products, norms and clipped gradients.

A kernel reads every row once, in the type in which it is stored, and adds up in float64 by the rules of
`farthing.noise.summing`. Without kernels, and for rows that none can read, callers go through blocks instead
(`farthing.data.tables`), which gives the same sums but for their last bits.

>>> rows = stored(np.array([[3.0, 4.0], [0.0, 1.0]]), np.ones(2))
>>> rows.kind, rows.rows, rows.stride
('f8', 2, 2)
"""

import os
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from farthing.noise import native
from farthing.noise.summing import Sum

Array = NDArray[np.float64]
Factors = tuple[Array | None, Array | None, Array]  # for each row: g and h (None where all are 1), and |z|

_DENSE = {"d": "f8", "f": "f4", "B": "u1", "?": "u1"}  # kernels by numpy's type codes
_KEPT = 2**22  # rows of a table in a file beside which numbers are kept in memory
_MARGINS = 2**14  # products that are kept at a time
_SLICED = 2**27  # stored numbers of sparse tables that may have a copy
_LANES, _BLOCK = 8, 64  # of kernels: numbers of a vector at most, and rows whose outer products are added up


class Stored(NamedTuple):
    """Rows in memory: the kernel that reads them, addresses, shape, and targets in float64.

    ``stride`` is counted in numbers. The table keeps the arrays alive. Of sparse rows (``kind`` "csr") the
    addresses are those of values, columns and starts, and ``stride`` is how many rows lie side by side; these
    and their targets are in an ``order`` of their own.
    """

    kind: str
    addresses: tuple[Any, ...]
    rows: int
    width: int
    stride: int
    y: Array | None
    filed: bool = False  # whether they lie in a file
    order: NDArray[np.int64] | None = None  # which row each is; None where all are at their places
    kept: tuple[NDArray[Any], ...] = ()  # arrays of our own that addresses point to
    laid: dict[Any, Factors] | None = None  # the last factors in this order

    def measured(self, gauge: "Gauge", blank: NDArray[np.bool_] | None) -> tuple[Array | None, Array] | None:
        """Return h (None where all are 1) and |z| of every row; None without a kernel.

        ``blank`` rows count for nothing, like those whose norm is not finite.
        """
        if not self.rows:  # as before every charge
            return None, np.empty(0)
        if blank is not None and self.order is not None:
            blank = blank[self.order]
        found = native.kernels(self.rows * self.width)
        if found is None:
            return None
        kernel, before, kept = self._gauged(gauge)
        norm = scratch(self.rows, self.filed)
        shrink = None if blank is None and gauge.radius == np.inf else scratch(self.rows, self.filed)

        def run() -> int:
            ends = (native.pointer(each) for each in (blank, shrink, norm))
            return int(found[kernel](*before, gauge.length, gauge.by, gauge.least, gauge.radius, *ends))

        if run() and shrink is None:
            shrink = scratch(self.rows, self.filed)
            run()
        del kept  # keeps the memory behind the addresses alive until here
        return None if shrink is None else self._back(shrink), self._back(norm)

    def _back(self, values: Array) -> Array:
        """Return numbers of rows in the table's own order."""
        if self.order is None:
            return values
        found = np.empty_like(values)
        found[self.order] = values
        return found

    def _gauged(self, gauge: "Gauge") -> tuple[str, tuple[Any, ...], Any]:
        """Return the kernel that measures these rows, its first arguments, and arrays to keep meanwhile."""
        centre, scale = (np.ascontiguousarray(each) for each in (gauge.centre, gauge.scale))
        if self.kind == "csr":
            kept = 2 * centre, np.square(scale)
            base = gauge.base + float(kept[1] @ np.square(centre))
            return "measure_csr", (*self.some(slice(0, self.rows)), *map(native.pointer, kept), base), kept
        rows = *self.addresses, self.stride, self.rows, self.width
        if scale.ndim == 1:
            pointers = native.pointer(centre), native.pointer(scale)
            return "measure_" + self.kind, (*rows, *pointers, gauge.base), (centre, scale)
        matrix = np.zeros((self.width, padded(self.width)))
        matrix[:, : self.width] = scale.T
        upper = not np.tril(scale, -1).any()
        arrays = centre, np.ones(self.width), matrix, np.empty((_LANES, matrix.shape[1]))
        ends = [native.pointer(each) for each in arrays]
        before = *rows, *ends[:3], matrix.shape[1], int(upper), ends[3], gauge.base
        return "mixed_" + self.kind, before, arrays

    def there(self, blank: NDArray[np.bool_] | None) -> Array | None:
        """Return h of rows that are not shrunk, in their stored order: 0 for ``blank`` ones."""
        if blank is None:
            return None
        return np.where(blank if self.order is None else blank[self.order], 0.0, 1.0)

    def in_order(self, key: Any, factors: Factors) -> Factors:
        """Return the factors of all rows in the order in which these are stored, kept under a key."""
        if self.order is None or self.laid is None:
            return factors
        found = self.laid.get(key)
        if found is None:
            unit, shrink = (None if each is None else each[self.order] for each in factors[:2])
            found = unit, shrink, factors[2][self.order]
            self.laid.clear()
            self.laid[key] = found
        return found

    def some(self, part: slice) -> tuple[Any, ...]:
        """Return some rows as kernels take them; of sparse rows, those of whole slices."""
        if self.kind == "csr":
            return *self.addresses, self.stride, part.start, part.stop
        address = self.addresses[0] + part.start * self.stride * int(self.kind[1])
        return address, self.stride, part.stop - part.start, self.width


class Gauge(NamedTuple):
    """How rows are measured: |z|² is ``base`` + |A (x - c)|², A a diagonal (``scale``) or a matrix.

    A norm is raised to ``by`` (|A x| + ``length``) (|x|, where A is a matrix) and to ``least``, and longer
    ones are shrunk to ``radius``.
    """

    centre: Array
    scale: Array
    base: float
    length: float
    by: float
    least: float
    radius: float


class KernelLoss(NamedTuple):
    """A loss as kernels know it: its number there, its width, the clipping norm, a scale of sizes or 0."""

    number: int
    width: float
    clip: float
    rms: float = 0.0


class Raw(NamedTuple):
    """Stored rows, all or at some positions, with the factors of their z (`farthing.data.tables.Features`).

    Targets and factors are those of all rows, in the order in which they are stored.
    """

    stored: Stored
    places: NDArray[np.int64] | None
    number: int
    factors: Factors

    @property
    def centrable(self) -> bool:
        """Return whether `gradient` can take a centre."""
        return self.stored.kind != "csr" and self.factors[0] is None

    def stretch(self, u: Array, constant: Any, loss: KernelLoss) -> float | None:
        """Return Σ residual · margin, each term clamped to the loss's clip; None without a kernel."""
        rows, found = self.stored, native.kernels(self.number * len(u))
        if found is None or rows.y is None or self.places is not None or u.ndim != 1 or u.dtype != np.float64:
            return None
        u, total, whole = np.ascontiguousarray(u), np.empty(3), Sum(self.number)
        products, most = np.empty(_MARGINS), min(_MARGINS, whole.rows) // _LANES * _LANES
        for part in slices(self.number, most):
            found["products_" + rows.kind](*rows.some(part), native.pointer(u), native.pointer(products))
            mine = (None if each is None else each[part] for each in (rows.y, *self.factors[:2]))
            found["stretch"](
                *(
                    native.pointer(products),
                    part.stop - part.start,
                    float(constant),
                    *map(native.pointer, mine),
                ),
                *(loss.number, loss.width, loss.clip, 2 * _MARGINS, native.pointer(total)),
            )
            whole.add(total[0] + total[1], part.stop - part.start)
        return float(whole.value)

    def moments(
        self, centre: Array, scale: Array, constant: float, clip: float, rows: int
    ) -> Iterator[tuple[Array, Array, int]] | None:
        """Return Σ z and Σ z zᵀ of at most so many rows each, z = h [A (g x - c); constant] clipped.

        A is a diagonal, ``scale``. None where no kernel sums them.
        """
        size, clip = self.stored.width + (constant > 0), float(clip)
        found = native.kernels(self.number * size)
        if found is None or self.places is not None or self.stored.kind == "csr" or np.ndim(scale) == 2:
            return None
        centre, scale = np.ascontiguousarray(centre), np.ascontiguousarray(scale)
        pitch = padded(size)
        kernel, room = found["moments_" + self.stored.kind], np.empty((_BLOCK, pitch))

        def sums() -> Iterator[tuple[Array, Array, int]]:
            for part in slices(self.number, rows):
                total = np.zeros((pitch + 1, pitch))
                ends = [native.pointer(each) for each in (centre, scale)]
                kernel(
                    *self._part(part),
                    *(*ends, constant, clip, pitch, native.pointer(room)),
                    *(native.pointer(total[0]), native.pointer(total[1:])),
                )
                second = np.triu(total[1 : size + 1, :size])
                yield total[0, :size].copy(), second + np.triu(second, 1).T, part.stop - part.start

        return sums()

    def powers(
        self, centre: Array, scale: Array, clip: float, rows: int
    ) -> Iterator[tuple[Array, int]] | None:
        """Return Σ [z; z²] of at most so many rows each, z = A (g x - c), the row of both clipped.

        A is a diagonal, ``scale``. A row with h = 0 counts for nothing. Sparse rows are shrunk by h; no
        kernel centres or clips them. None where none sums them.
        """
        d = self.stored.width
        found, csr = native.kernels(self.number * d), self.stored.kind == "csr"
        if found is None or self.places is not None or np.ndim(scale) == 2:
            return None
        if csr and (np.any(centre) or clip < np.inf):
            return None
        centre, scale = np.ascontiguousarray(centre), np.ascontiguousarray(scale)
        kernel = found["powers_" + self.stored.kind]

        def sums() -> Iterator[tuple[Array, int]]:
            for part in slices(self.number, rows // _LANES * _LANES):
                total, ends = np.zeros(2 * d), (native.pointer(centre), native.pointer(scale), float(clip))
                kernel(*self._part(part), *(ends[1:2] if csr else ends), native.pointer(total))
                yield total, part.stop - part.start

        return sums()

    def _part(self, part: slice) -> tuple[Any, ...]:
        """Return some rows and their factors g and h as kernels of sums take them."""
        if self.stored.kind == "csr":
            return *self.stored.some(part), self.stored.width, *map(native.pointer, self.factors[:2])
        factors = (None if each is None else native.pointer(each[part]) for each in self.factors[:2])
        return *self.stored.some(part), *factors

    def gradient(
        self, u: Array, constant: Any, loss: KernelLoss, chain: int, centre: Array | None = None
    ) -> Array | None:
        """Return Σ v x, Σ v and Σ min(size / 2 rms, 1)² - 1/2, end to end; None where no kernel sums them.

        v is a row's clipped residual. With a ``centre`` (of dense rows that no g shrinks) the first is
        Σ v (x - centre). At most ``chain`` rows are added up before they go into a sum of two
        parts, as `farthing.noise.summing` requires.
        """
        rows, (unit, shrink, norm) = self.stored, self.factors
        found = native.kernels(self.number * len(u))
        if found is None or rows.y is None or u.ndim != 1 or u.dtype != np.float64:
            return None
        if (rows.kind == "csr" and self.places is not None) or len(norm) < rows.rows:  # not measured
            return None
        u, total = np.ascontiguousarray(u), np.empty((3, len(u) + 2))
        at = (rows.rows, rows.stride, native.pointer(self.places), self.number, len(u))
        done = found[("gradient_" if centre is None else "centred_") + rows.kind](
            *((*rows.some(slice(0, self.number)), len(u)) if rows.kind == "csr" else (*rows.addresses, *at)),
            *(native.pointer(u), constant, native.pointer(rows.y), native.pointer(norm)),
            *(native.pointer(unit), native.pointer(shrink), *loss, chain, native.pointer(total)),
            *(() if centre is None else (native.pointer(centre),)),
        )
        return None if done else total[0] + total[1]


def outside(X: Any, low: Array, high: Array) -> bool | None:
    """Return whether a value lies beyond its bounds; None where one is not finite, or without a kernel."""
    found = native.kernels(X.size) if isinstance(X, np.ndarray) else None
    rows = None if found is None else stored(X, None)
    if rows is None or found is None or rows.kind not in ("f8", "f4"):
        return None
    low, high = np.ascontiguousarray(low), np.ascontiguousarray(high)
    said = found["outside_" + rows.kind](
        *(*rows.addresses, rows.stride, rows.rows, rows.width, native.pointer(low), native.pointer(high))
    )
    return None if said & 2 else bool(said)


def mapped(X: Any, low: Array, scale: Array) -> NDArray[np.float32] | None:
    """Return (X - low) scale in float32, within [0, 1], NaN for what is not finite; None without a kernel."""
    rows = stored(X, None)
    found = native.kernels(X.size)
    if rows is None or found is None or rows.kind not in ("f8", "f4"):
        return None
    values = np.empty(X.shape, np.float32)
    low, scale = np.ascontiguousarray(low), np.ascontiguousarray(scale)
    found["mapped_" + rows.kind](
        *(*rows.addresses, rows.stride, rows.rows, rows.width),
        *(native.pointer(low), native.pointer(scale), native.pointer(values)),
    )
    return values


def scratch(rows: int, filed: bool) -> Array:
    """Return room for a number a row: beside a long table in a file (``filed``) it lies in a file, too.

    The file has no name and goes with the array. Where there is no place for it, memory has to do.
    """
    if filed and rows > _KEPT:
        try:
            with tempfile.TemporaryFile(prefix="farthing-") as file:
                os.posix_fallocate(file.fileno(), 0, 8 * rows)  # or a full disk would end the process later
                return np.memmap(file, np.float64, "r+", shape=(rows,))
        except (OSError, AttributeError):
            pass
    return np.empty(rows)


def marked(y: NDArray[Any], blank: NDArray[np.bool_], filed: bool) -> Array:
    """Return targets, NaN where a row is blank."""
    found = scratch(len(y), filed)
    for part in slices(len(y)):
        found[part] = np.where(blank[part], np.nan, y[part])
    return found


def joined(parts: list[Array | None], norms: list[Array]) -> Array | None:
    """Return the factors of all blocks, None where all are 1."""
    if all(part is None for part in parts):
        return None
    pairs = zip(parts, norms, strict=True)
    return np.concatenate([np.ones_like(norm) if part is None else part for part, norm in pairs])


def odd_rows(x: Any) -> NDArray[np.bool_]:
    """Return which rows hold a value that is not finite."""
    if not sparse.issparse(x):
        return np.asarray(~np.isfinite(x).all(axis=1))
    return np.asarray(np.bincount(_owners(x)[~np.isfinite(x.data)], minlength=x.shape[0]) > 0)


def without(x: Any, blank: NDArray[np.bool_]) -> Any:
    """Return a copy whose blank rows are zeros."""
    if not sparse.issparse(x):
        return np.where(blank[:, None], 0.0, x)
    return sparse.csr_array((np.where(blank[_owners(x)], 0.0, x.data), x.indices, x.indptr), x.shape)


def _owners(x: Any) -> NDArray[np.intp]:
    """Return the row of every stored entry."""
    return np.repeat(np.arange(x.shape[0]), np.diff(x.indptr))


def slices(rows: int, most: int = 2**16) -> Iterator[slice]:
    """Yield slices of at most so many of all rows."""
    return (slice(start, min(rows, start + most)) for start in range(0, rows, most))


def padded(size: int) -> int:
    """Return a size that is a whole number of vectors on every processor."""
    return -(-size // _LANES) * _LANES


def stored(X: Any, y: Any) -> Stored | None:
    """Return where rows lie in memory; None where no kernel can read them."""
    y = None if y is None else np.ascontiguousarray(y, dtype=np.float64)
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
    return Stored(kind, (X.ctypes.data,), X.shape[0], X.shape[1], stride, y, isinstance(X, np.memmap))


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
    addresses = tuple(array.ctypes.data for array in arrays)
    return _sliced(Stored("csr", addresses, X.shape[0], X.shape[1], 1, y), lengths)


def _sliced(rows: Stored, lengths: NDArray[np.int32]) -> Stored:
    """Return sparse rows by eight of like length, side by side: loops over them end together.

    Without kernels, and where there are too many for a copy, they stay as they are.
    """
    found = native.kernels(int(lengths.sum()))
    if found is None or lengths.sum() > _SLICED:
        return rows
    order = np.argsort(lengths.astype(np.min_scalar_type(lengths.max())), kind="stable")  # radix, of 16 bits
    tops = lengths[order[np.minimum(np.arange(0, rows.rows, _LANES) + _LANES, rows.rows) - 1]]
    starts = np.concatenate([[0], np.cumsum(tops)]).astype(np.int32)
    values, columns = (np.empty(int(starts[-1]) * _LANES, kind) for kind in (np.float64, np.int32))
    to = (native.pointer(each) for each in (starts, values, columns))
    found["slice_rows"](*rows.addresses, native.pointer(order), rows.rows, *to)
    kept, y = (values, columns, starts), None if rows.y is None else rows.y[order]
    addresses = tuple(each.ctypes.data for each in kept)
    return rows._replace(addresses=addresses, stride=_LANES, y=y, order=order, kept=kept, laid={})
