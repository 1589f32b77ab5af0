"""Find bounds of numbers of unknown magnitude privately, for clipping.

At most two answers, for all columns at once. The first, with two thirds of the part, counts numbers by sign
and power of two, from 2⁻²⁴ to 2⁴¹, with a cell for zero: a public grid of 131 cells for any unit of
measurement. A record is in one cell of each of d columns, so its term has L2 norm √d. The outermost cells
with clearly more than noise (alone, or with neighbours further out) bound a first range, which is at most
twice too wide if it begins at zero. If it does not, as for years or heights, the second answer counts in 64
equal cells of that range, which is released by then, and narrows it in the same way; fewer such columns mean
less noise. Values of fewer records than the noise hides lie outside: the bounds are for clipping, and need
not contain all values. Both answers are Gaussian (or Laplace) sums of known norm, so the price is that of two
answers under adaptive composition (the ledger's filter); everything else, such as the choice of columns for
the second, is post-processing.

A column whose cells are all hidden by noise gets [0, 1], with a warning. So does a column of mostly zeros (an
indicator of something rare), without a warning.
"""

import math
import warnings
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farthing.data.columns import numbers
from farthing.errors import InvalidValue
from farthing.ledger.ledger import Ledger
from farthing.queries import arrays
from farthing.queries.query import Rows
from farthing.statistics.cells import Cells
from farthing.statistics.spending import Allowance

Array = NDArray[np.float64]
Integers = NDArray[np.int64]

_LEAST, _MOST = -24, 40  # powers of two
_POWERS = _MOST - _LEAST + 1
COARSE = 2 * _POWERS + 1
FINE = 64
_CHANCE = 1e-4  # probability that any empty cell is taken for an occupied one
_WINDOWS = (1, 2, 4, 8)
_FIRST = 2 / 3  # share of the part for the first answer
_RATIO = 64.0  # a range is narrowed if the ratio of its ends is smaller
_SAID = 8  # the most columns that a warning names

#: Edges of the cells of the first answer, in ascending order.
EDGES: Array = np.concatenate(
    [
        -(2.0 ** np.arange(_MOST + 1, _LEAST - 1, -1)),
        2.0 ** np.arange(_LEAST, _MOST + 2),
    ]
)


def bounds(
    values: Any,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    ledger: Ledger | None = None,
) -> tuple[Any, Any]:
    """Find bounds of private numbers, for clipping.

    Parameters
    ----------
    values : array-like of shape (records,) or (records, columns)
        Private numbers in any unit; missing ones are not counted. A list is always one column, whatever its
        cells are.
    epsilon, delta : float, optional
        The budget of this statistic; with ``ledger`` the part of it to spend, by default the remainder.
    ledger : Ledger, optional
        The ledger to spend from. None makes one in memory.

    Returns
    -------
    low, high : float or ndarray
        One pair, or one per column: released, so they may be used as public bounds. A few records may lie
        outside, as many as the noise hides.

    Examples
    --------
    >>> import numpy as np
    >>> import farthing as ft
    >>> ages = np.random.default_rng(0).integers(17, 91, 10_000)
    >>> low, high = ft.bounds(ages, epsilon=1.0, delta=1e-6)
    >>> low < 50 < high
    True
    """
    several = hasattr(values, "tocsr") or (hasattr(values, "__array__") and np.ndim(values) != 1)
    table = _cell_by_cell(values) if several else numbers("values", values)[:, None]
    norms = Cells(max(table.shape[1], 1), COARSE).norms
    low, high = of_table(table, Allowance.of(ledger, epsilon, delta, norms)).known()
    return (low, high) if several else (float(low[0]), float(high[0]))


def _cell_by_cell(values: Any) -> Any:
    """Return a table of numbers; without a type, each cell is read by itself, NaN if it is not a number."""
    if not hasattr(values, "tocsr"):
        values = arrays.attempt(np.asanyarray, values, said="values must be a table of numbers")
        if values.dtype.kind == "O" and values.ndim == 2 and values.shape[1]:
            return np.column_stack([numbers("values", column) for column in values.T])
    return arrays.features(values)


class FoundBounds(NamedTuple):
    """Released bounds of every column, and the columns without any because the noise hides their values."""

    low: Array
    high: Array
    hidden: NDArray[np.bool_]

    def known(self, places: Any = None) -> tuple[Array, Array]:
        """Return the bounds, with a warning about unknown ones; ``places`` are the columns' positions."""
        if self.hidden.any():
            found = np.flatnonzero(self.hidden) if places is None else np.asarray(places)[self.hidden]
            few = ", ".join(map(str, found[:_SAID].tolist())) + (", ..." if len(found) > _SAID else "")
            warnings.warn(
                f"the noise hides the values of the columns at positions (from 0) {few}. [0, 1] is used as "
                "their bounds: declare them, or use a larger budget or fewer columns",
                UserWarning,
                stacklevel=4,
            )
        return self.low, self.high


def of_table(table: Any, spend: Allowance, share: float = 1.0) -> FoundBounds:
    """Return bounds of every column of a dense table of numbers, for a share of a part."""
    if hasattr(table, "tocsr"):
        raise InvalidValue("bounds of a sparse table must be declared: pass (low, high), or make it dense")
    width = table.shape[1]
    if not width:
        raise InvalidValue("bounds need one column or more, got none")
    coarse = Cells(width, COARSE)
    total, deviation = spend.ask(Rows(Powers(table)), coarse, coarse.norms, share * _FIRST)
    least = deviation * spend.tail(_CHANCE / (total.size * len(_WINDOWS)))
    low, high = _ends(total, np.broadcast_to(EDGES, (width, len(EDGES))), least)
    hidden = np.isnan(low)
    low, high = _defaults(low, high)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.maximum(low / high, high / low)
    (apart,) = np.nonzero((low * high > 0) & (ratio <= _RATIO))
    if not len(apart):
        return FoundBounds(low, high, hidden)
    fine, begin, end = Cells(len(apart), FINE), low[apart], high[apart]
    edges = begin[:, None] + (end - begin)[:, None] * np.linspace(0, 1, FINE + 1)
    shares = Shares(Chosen(table, apart), begin, end)
    total, deviation = spend.ask(Rows(shares), fine, fine.norms, share * (1 - _FIRST))
    least = deviation * spend.tail(_CHANCE / (total.size * len(_WINDOWS)))
    inner_low, inner_high = _ends(total, edges, least)
    found = np.isfinite(inner_low)
    low[apart], high[apart] = np.where(found, inner_low, begin), np.where(found, inner_high, end)
    return FoundBounds(low, high, hidden)


class Chosen:
    """Some columns of a table, copied only when rows are taken."""

    def __init__(self, table: Any, columns: Any) -> None:
        self._table, self._columns = table, np.arange(table.shape[1])[columns]
        self.shape = (table.shape[0], len(self._columns))

    def __getitem__(self, place: Any) -> Array:
        return np.asarray(self._table[place][:, self._columns], dtype=np.float64)


class Powers:
    """The cells of a table's numbers by sign and power of two, computed when rows are taken."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self.shape = table.shape

    def __getitem__(self, place: Any) -> "Powers":
        return type(self)(self._table[place])

    def __array__(self, dtype: Any = None, copy: Any = None) -> Integers:
        return by_power(np.asarray(self._table, dtype=np.float64))


def by_power(values: Array) -> Integers:
    """Return the cell of each number between `EDGES`, -1 if it is not finite.

    >>> [int(code) - COARSE // 2 for code in by_power(np.array([0.0, 1.0, -1.0, 3.0, 2.0**99]))]
    [0, 25, -25, 26, 65]
    """
    _, exponents = np.frexp(values)  # |x| = m 2^e with m in [1/2, 1)
    powers = np.clip(exponents - 1 - _LEAST + 1, 0, _POWERS)
    powers = np.where(values == 0, 0, powers)
    codes = np.where(values < 0, -powers, powers) + COARSE // 2
    return np.where(np.isfinite(values), codes, -1).astype(np.int64)


class Shares:
    """The cells of a table's numbers in equal parts of released ranges, computed when rows are taken."""

    def __init__(self, table: Any, low: Array, high: Array) -> None:
        self._table, self._low, self._high = table, low, high
        self.shape = table.shape

    def __getitem__(self, place: Any) -> "Shares":
        return type(self)(self._table[place], self._low, self._high)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Integers:
        values = np.asarray(self._table, dtype=np.float64)
        with np.errstate(invalid="ignore"):
            shares = (np.clip(values, self._low, self._high) - self._low) * (FINE / (self._high - self._low))
            codes = np.minimum(np.where(np.isfinite(shares), shares, 0.0).astype(np.int64), FINE - 1)
        return np.where(np.isfinite(values), codes, -1)


def _ends(counts: Array, edges: Array, least: float) -> tuple[Array, Array]:
    """Return the outer edges of the outermost cells with more than noise; NaN if there are none."""
    ends = [_between(row, line, least) for row, line in zip(counts, edges, strict=True)]
    return np.array([low for low, _ in ends]), np.array([high for _, high in ends])


def _between(counts: Array, edges: Array, least: float) -> tuple[float, float]:
    """Return the edges around the occupied cells of one column in order, or NaN for both."""
    above, below = _outermost(counts, least), _outermost(counts[::-1], least)
    if above is None or below is None:
        return math.nan, math.nan
    low, high = len(counts) - below, above
    if low >= high:  # if only the sum of many cells is clear, the ends may cross
        low, high = max(high - 1, 0), min(low + 1, len(counts))
    return float(edges[low]), float(edges[high])


def _outermost(counts: Array, least: float) -> int | None:
    """Return the index of the upper edge of the highest occupied cell, alone or with those above."""
    for place in range(len(counts) - 1, -1, -1):
        for window in _WINDOWS:
            sums = counts[place : place + window]
            if len(sums) == window and sums.sum() > least * np.sqrt(window):
                return min(place + (1 if window == 1 else 2), len(counts))
    return None


def _defaults(low: Array, high: Array) -> tuple[Array, Array]:
    """Return first ranges of positive width: [0, 1] if there is none, or only zeros."""
    tiny = 2.0**_LEAST
    zeros = ~np.isfinite(low) | ((low >= -tiny) & (high <= tiny))
    low = np.where(low == -tiny, 0.0, low)
    high = np.where(high == tiny, 0.0, high)
    return np.where(zeros, 0.0, low), np.where(zeros, 1.0, high)
