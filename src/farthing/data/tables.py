"""Hold private rows in tables that linear models read in blocks, without a copy of the whole.

`Table` holds the records of a ledger. Features of any real type (float64, float32, integers, a memory-mapped
file, a sparse matrix) stay unchanged in memory; a block is converted to float64 when it is read, so that
margins, norms and sums are safe for any input. `Features` is the public map z = h [A (x - c); b] of a row x
that a method uses: centre c, scales or matrix A, constant b for the intercept, and h, which shrinks a row to
``radius``. z is not materialised: products with z are computed from products with x.

>>> table = Table(np.array([[3.0, 4.0], [0.0, 0.5]]), np.array([1.0, 0.0]))
>>> features = Features(2, intercept=0.0, radius=1.0)
>>> [block.norm.round(9).tolist() for block in table.blocks(features)]
[[1.0, 0.5]]
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from farthing.data.columns import limits
from farthing.data.features import Features, rowwise, squares_of
from farthing.data.raw import Factors, Gauge, Raw, Stored, joined, marked, odd_rows, slices, stored, without
from farthing.data.raw import outside as outside_of
from farthing.data.rounded import RowLengths, RowProducts
from farthing.errors import InvalidValue
from farthing.noise import summing
from farthing.queries import arrays
from farthing.queries.samplers import Indices

__all__ = ["Block", "Features", "Parts", "Table", "Weighted"]

Array = NDArray[np.float64]
Parts = list[tuple[Array, Array]]  # sums of v x and of v

_BLOCK = 2**17  # entries of a block: one megabyte of float64, which stays in the cache for both products
_SPARSE_BLOCK = 2**25  # entries of a sparse block, zeros included
_FEWEST_ROWS, _MOST = 64, np.finfo(np.float64).max
_LEAST = 2.0**-400  # least norm: smaller squares underflow, and residuals may be as large as 2¹⁰²⁴
_REMEMBERED = 2**22  # the most rows whose factors are cached where no kernel measures them


class Block(NamedTuple):
    """Some rows of a table: x in float64, targets, and the factors of z = h [A (g x - c); b].

    ``unit`` is g, ``shrink`` is h and ``norm`` is |z|, one number per row; None if all are 1. In a
    `farthing.data.weighted.WeightedTable`, ``weight`` is each record's fraction of the largest weight.
    """

    x: Any
    y: Any
    unit: Array | None
    shrink: Array | None
    norm: Array
    weight: Array | None = None

    def margins(self, u: Array, constant: Array) -> Array:
        """Return z·w of every row, for weights that `Features.unfold` turned into weights on x."""
        inner = rowwise(self.x @ u, self.unit)
        inner += constant
        return rowwise(inner, self.shrink)

    def weighted(self, v: Array, rows: int) -> Parts:
        """Return Σ v x and Σ v of at most this many rows each, which `Features.gather` turns into Σ v z."""
        v = rowwise(v, self.shrink)
        scaled = rowwise(v, self.unit)
        if len(v) <= rows:
            return [(self.x.T @ scaled, v.sum(axis=0))]
        places = [slice(start, start + rows) for start in range(0, len(v), rows)]
        return [(_part(self.x, place).T @ scaled[place], v[place].sum(axis=0)) for place in places]

    def rows(self, features: Features) -> Array:
        """Return the materialised rows z."""
        return rowwise(features.rows(self.x, self.unit), self.shrink)


def _part(x: Any, place: slice) -> Any:
    """Return some rows of a table; for a sparse one a view, as its slices are copies."""
    if not (sparse.issparse(x) and x.format == "csr"):
        return x[place]
    ends = x.indptr[place.start : place.stop + 1]
    stored = slice(ends[0], ends[-1])
    inner = x.data[stored], x.indices[stored], ends - ends[0]
    return sparse.csr_array(inner, (len(ends) - 1, x.shape[1]))


class Weighted:
    """A running sum Σ v z over the blocks of a table, kept as Σ v x and Σ v while rounding allows.

    If z is centred or mixed, terms v x may exceed v z by `Features.spread`; for a table too long for that, z
    is materialised.
    """

    def __init__(self, records: int, features: Features, columns: tuple[int, ...] = ()) -> None:
        self._features, self._records = features, records
        self._long = summing.long(records, features.spread)
        spread = 1.0 if self._long else features.spread
        size = features.size if self._long else features.width
        self._total = summing.Sum(records, (size, *columns), spread=spread)
        self._weight = summing.Sum(records, columns, spread=spread)

    def add(self, block: Any, v: Array) -> None:
        """Add the rows of a block, times v."""
        if self._long:
            self._total.add(block.rows(self._features).T @ v, len(v))
            return
        rows = self._total.rows // 2  # so that several parts are added before the total
        for part, weight in block.weighted(v, rows):
            self._total.add(part, min(rows, len(v)))
            self._weight.add(weight, min(rows, len(v)))

    @property
    def value(self) -> Array:
        """Return the sum."""
        if self._long:
            return self._total.value
        return self._features.gather(self._total.value, self._weight.value, self._records)


class Table:
    """A table of private rows: features and optionally a target.

    Parameters
    ----------
    X : array-like or sparse matrix of shape (records, features)
        Features of any real type; they stay unchanged in memory.
    y : array-like of shape (records,), optional
        The target.
    bounds : (low, high), optional
        Public bounds, numbers or one per feature: a value beyond them is clipped, and [low, high] is mapped
        onto [0, 1] (in a sparse table low must be 0, so that zeros stay zeros). None keeps values unchanged.
    unit : bool, default False
        Whether to divide each row by its norm afterwards.

    Notes
    -----
    A row with a feature or a target that is not a finite number is *blank*: it keeps its position, so that no
    other row is drawn differently, its z is zero and its target NaN, which every contribution counts as zero.
    An error would reveal such a record without a charge.
    """

    __slots__ = (
        "_X",
        "_blank",
        "_factors",
        "_length",
        "_lie",
        "_map",
        "_sound",
        "_unit",
        "_whole",
        "_within",
        "_y",
    )

    def __init__(self, X: Any, y: Any = None, *, bounds: Any = None, unit: bool = False) -> None:
        X, y = arrays.features(X), None if y is None else arrays.target(y)
        if y is not None and len(y) != X.shape[0]:
            # the message must not contain the lengths
            raise InvalidValue("there must be one target per row")
        self._X, self._y, self._unit = X, y, unit
        self._within = bounds is not None and not unit  # whether all features lie in [0, 1]
        self._length = summing.checked(int(X.shape[0]))
        self._blank: NDArray[np.bool_] | None = None
        self._map: tuple[Array, Array] | None = None
        self._factors: dict[Features, Factors] = {}
        self._lie: Stored | bool | None = False  # the memory of rows; None: no kernel can read them
        self._whole: tuple[Table, Indices] | None = None  # the table of which this one is a batch
        ends = None if bounds is None else limits(bounds, X)
        broken = np.zeros(self._length, np.bool_)
        if self._outside(ends, broken) or (ends is not None and (np.any(ends[0]) or np.any(ends[1] != 1))):
            self._map = ends
        self._sound = not broken.any()  # whether a kernel may read the features unchanged
        for part in slices(0 if y is None else self._length):
            if not (finite := np.isfinite(y[part])).all():  # pages without a blank row are not written to
                broken[part] |= ~finite
        if broken.any():
            self._blank = broken
            self._y = None if y is None else marked(y, broken, isinstance(X, np.memmap))

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """Return the state of a copy, without addresses of this process and cached factors."""
        return None, {name: getattr(self, name) for name in self.__slots__} | {"_lie": False, "_factors": {}}

    @property
    def X(self) -> Any:
        """Return the features; those of a batch are gathered on first use."""
        if self._X is None:
            assert self._whole is not None
            self._X = self._whole[0].X[self._whole[1]]
        return self._X

    @property
    def y(self) -> Any:
        """Return the targets; those of a batch are gathered on first use."""
        if self._y is None and self._whole is not None and self._whole[0].y is not None:
            self._y = self._whole[0].y[self._whole[1]]
        return self._y

    @property
    def within(self) -> bool:
        """Return whether all features lie in [0, 1], which is public: they have bounds."""
        return self._within

    @property
    def placeable(self) -> bool:
        """Return whether the rows are dense and used without bounds or scaling."""
        return bool(len(self)) and self._map is None and not self._unit and not sparse.issparse(self.X)

    def _outside(self, limits: tuple[Array, Array] | None, broken: NDArray[np.bool_]) -> bool:
        """Return whether any value lies outside the bounds; mark rows that are not finite, in one pass."""
        ends = limits or tuple(np.full(self.X.shape[1], end) for end in (-np.inf, np.inf))
        if (quick := outside_of(self.X, *ends)) is not None:
            return quick and limits is not None
        outside, (low, high) = False, (ends[0].max(initial=-_MOST), ends[1].min(initial=_MOST))
        if sparse.issparse(x := self.X) and x.data.size and low <= x.data.min() and x.data.max() <= high:
            return False
        for place in self._places() if self.X.shape[1] else ():
            x = self.X[place]
            values = x.data if sparse.issparse(x) else x
            least, most = (values.min(), values.max()) if values.size else (np.inf, -np.inf)
            if values.size and not (np.isfinite(least) and np.isfinite(most)):
                broken[place] = odd_rows(x)
            if limits is None or outside or (least >= limits[0].max() and most <= limits[1].min()):
                continue
            low, high = (limit[x.indices] for limit in limits) if sparse.issparse(x) else limits
            outside = bool((values < low).any() or (values > high).any())
        return outside

    def _places(self) -> Iterator[slice]:
        n, d = self.X.shape
        entries = _SPARSE_BLOCK if sparse.issparse(self.X) else _BLOCK
        step = min(max(_FEWEST_ROWS, entries // max(1, d)), summing.chain(n) // 2)
        # an empty batch has one empty block, on which wrong shapes raise too
        return (slice(start, min(n, start + step)) for start in range(0, max(n, 1), step))

    def raw(self, features: Features, norms: bool = True) -> Raw | None:
        """Return the input of a kernel for these rows; None if it cannot read them or factors are not cached.

        Without ``norms`` rows are not measured, and only a blank row has an h, of 0.
        """
        whole, places = (self, None) if self._whole is None or self._X is not None else self._whole
        if isinstance(places, slice) or whole._X is None or self._map is not None or not self._sound:
            return None
        rows = whole._stored()
        if rows is not None and not norms and not self._unit:
            return Raw(rows, places, self._length, (None, rows.there(whole._blank), np.empty(0)))
        if rows is None or (known := whole._known(features)) is None:
            return None
        return Raw(rows, places, self._length, rows.in_order(features, known))

    def _stored(self) -> Stored | None:
        """Return the memory of the rows, looked up once."""
        if isinstance(self._lie, bool):
            self._lie = stored(self._X, self.y)
        return self._lie

    def _read(self, place: slice) -> Any:
        """Return some rows in float64, clipped and mapped by the bounds; blank ones are zeros."""
        x: Any = _part(self.X, place)
        x = x.astype(np.float64, copy=False) if sparse.issparse(x) else np.asarray(x, dtype=np.float64)
        if self._blank is not None:
            x = without(x, self._blank[place])
        if self._map is None:
            return x
        low, high = self._map
        if sparse.issparse(x):
            return sparse.csr_array((np.clip(x.data / high[x.indices], 0, 1), x.indices, x.indptr), x.shape)
        return (np.clip(x, low, high) - low) / (high - low)

    def __len__(self) -> int:
        return self._length

    def take(self, indices: Indices) -> "Table":
        """Return the rows at ``indices``; a full slice makes no copy."""
        if isinstance(indices, slice) and indices == slice(None):
            return self
        table = object.__new__(Table)
        lazy = isinstance(indices, np.ndarray) and indices.dtype == np.int64 and indices.ndim == 1
        table._X, table._y = None if lazy else self.X[indices], None
        table._length = len(cast(Any, indices)) if lazy else int(table._X.shape[0])
        table._map, table._unit, table._within = self._map, self._unit, self._within
        table._blank, table._sound = None if self._blank is None else self._blank[indices], self._sound
        places = np.ascontiguousarray(indices) if lazy else indices  # the layout that kernels read
        table._factors, table._lie, table._whole = {}, False, (self, places)
        if table._length == 0:  # an empty batch must not measure the other rows
            table._X = np.empty((0, self.X.shape[1])) if sparse.issparse(self.X) else self.X[:0]
            table._y, table._whole = None if self.y is None else self.y[:0], None
        return table

    def blocks(self, features: Features) -> Iterator[Block]:
        """Yield all rows in blocks. Factors are cached, those of a batch with those of its table."""
        known = self._known(features)
        for place in self._places():
            x = self._read(place)
            parts = self._measure(x, features, place) if known is None else _at(known, place)
            yield Block(x, None if self.y is None else np.asarray(self.y[place], dtype=np.float64), *parts)

    def _known(self, features: Features) -> Factors | None:
        """Return g, h and |z| of all rows, measured once; None if the table is too long to cache them."""
        if self._whole is not None:
            known = self._whole[0]._known(features)
            return None if known is None else _at(known, self._whole[1])
        if features.width != self._X.shape[1]:  # a kernel would read out of bounds
            raise InvalidValue(f"features have {features.width} columns, the table has {self._X.shape[1]}")
        if features not in self._factors:
            found = self._measured(features)
            if found is None and len(self) <= _REMEMBERED:
                found = self._measured_in_blocks(features)
            self._factors = {} if found is None else {features: found}
        return self._factors.get(features)

    def _measured(self, features: Features) -> Factors | None:
        """Return g, h and |z| of all rows by a kernel; None if there is none for them."""
        if (lengths := self._lengths(features)) is not None:
            lying = self._lying()
            return None if lying is None else lengths.of_stored(lying, self._blank)
        if self._map is not None or self._unit or not self._sound:
            return None
        rows, radius = self._stored(), np.inf if features.radius is None else features.radius
        if rows is None or (rows.kind == "csr" and np.ndim(features.scale) == 2):
            return None
        ends = np.asarray(features.centre), np.asarray(features.scale), features.intercept**2
        found = rows.measured(Gauge(*ends, *features.cancels, _LEAST, radius), self._blank)
        return None if found is None else (None, *found)

    def _lengths(self, features: Features) -> RowLengths | None:
        """Return how rows are measured as whole numbers, by public facts alone; None if they are not."""
        return RowLengths.of(features, _LEAST) if self._within and not sparse.issparse(self.X) else None

    def _lying(self) -> Stored | None:
        """Return the memory of rows that are used as they are, blank ones aside; None if there is none."""
        return self._stored() if self._map is None and not self._unit and self._whole is None else None

    def scatter(self, features: Features, clip: float, coarsest: float) -> Array | None:
        """Return Σ z zᵀ of rows rounded to units of at most ``coarsest``, each clipped: see `rounded`.

        None, by public facts alone, where these are too coarse, or rows are sparse or not in [0, 1].
        """
        if not self._within or sparse.issparse(self.X):
            return None
        if (
            features.width != self.X.shape[1]
            or (products := RowProducts.of(features, clip, coarsest)) is None
        ):
            return None
        found = None if (lying := self._lying()) is None else products.of_stored(lying, self._blank)
        if found is None:
            found = np.zeros((features.size, features.size))
            for place in self._places():
                q = products.of_rows(self._read(place), None if self._blank is None else self._blank[place])
                found += q.T @ q
        return products.in_units(found)

    def _measured_in_blocks(self, features: Features) -> Factors:
        """Return g, h and |z| of all rows."""
        parts = [self._measure(self._read(place), features, place) for place in self._places()]
        norms = [norm for _, _, norm in parts]
        unit, shrink = (joined([part[k] for part in parts], norms) for k in (0, 1))
        return unit, shrink, np.concatenate([np.empty(0), *norms])

    def _measure(self, x: Any, features: Features, place: slice) -> Factors:
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            unit = None
            if self._unit:
                unit = 1 / np.sqrt(squares_of(x, 1.0))
                unit[~np.isfinite(unit)] = 0.0
            if (lengths := self._lengths(features)) is not None:
                norm = lengths.of_rows(x)
                return unit, *self._shrunk(norm, norm, features, place)
            size = np.sqrt(features.squared_norms(x, unit))
            return unit, *self._shrunk(size, features.at_least(size, x, unit), features, place)

    def _shrunk(self, size: Array, norm: Array, features: Features, place: slice) -> Any:
        """Return h and |z|, at least `_LEAST`. A blank row, or one whose norm is not finite, has h = 0."""
        norm = np.maximum(norm, _LEAST)
        if self._blank is not None:
            norm[self._blank[place]] = np.inf
        if features.radius is None and np.isfinite(norm).all():
            return None, norm
        radius = np.inf if features.radius is None else features.radius
        shrink = np.where(np.isfinite(norm), np.minimum(1.0, radius / size), 0.0)
        return shrink, np.where(shrink > 0, norm * shrink, 0.0)


def _at(factors: Factors, place: Indices) -> Factors:
    unit, shrink, norm = (None if each is None else np.ascontiguousarray(each[place]) for each in factors)
    return unit, shrink, cast(Array, norm)
