"""Count records in cells and average numbers in them: counts, histograms and means, by declared groups.

Every record lies in at most one cell (a group, a bin), decided by its own values and public rules, and adds a
term of known norm there: 1 to a count; (1/2, z) to a mean, where z in [-1, 1] is its position between the
bounds. So under add-remove a record changes all cells together by that norm, for any number of cells
(parallel composition), and the noise on each is that of one count. A value that lies in no cell, is missing
or is not finite adds nothing.

Sums are exact: terms are integer multiples of 2⁻²⁰ with at most 2³⁰ records, so every partial sum is a
multiple of 2⁻²⁰ below 2³¹ and float64 has no rounding, in any order and over any partition.

Why (1/2, z): a mean is sum over count, z̄ = S / N, and the noise of both changes it by σ √(1 + 4 z̄²) / N
where σ is proportional to the norm √(5/4) of the term. The weight 1/2 is nearly optimal for means in the
middle half of their bounds. The method needs no public number of records, and missing values are not counted.
"""

import cmath
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from farthing import validate
from farthing.data.columns import Categorical, numbers, spelt
from farthing.errors import InvalidValue
from farthing.ledger.ledger import Ledger
from farthing.queries.arrays import column
from farthing.queries.bounds import ClipNorm, Kind
from farthing.queries.query import Rows
from farthing.statistics.spending import Allowance, Statistic

Array = NDArray[np.float64]
Integers = NDArray[np.int64]

GRID = 2.0**-20  # all terms are multiples of it
BLOCK = 2**16  # records per block
_COUNTED = 0.5  # a record's contribution to the count of a mean
_FEWEST = 4.0  # a count needs this many deviations for its mean to be reported


@dataclass(frozen=True, slots=True)
class Cells:
    """A contribution that counts records in cells: for each of ``columns``, one of ``cells`` or none.

    Records are ``Rows(codes)`` with codes of shape (records, columns), -1 for no cell. One record's term has
    ``columns`` ones, and is shrunk if the bound is smaller.
    """

    columns: int
    cells: int
    honours: ClassVar[tuple[str, ...]] = (Kind.NORM, Kind.L1_NORM)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the sum."""
        return (self.columns, self.cells)

    @property
    def norms(self) -> tuple[float, float]:
        """The L1 and L2 norms of one record's term."""
        return float(self.columns), math.sqrt(self.columns)

    def bounded_sum(self, records: Any, w: Any, bound: ClipNorm) -> Array:
        """Return the number of records in each cell of each column, in units of the bound."""
        found = np.zeros(self.columns * self.cells)
        for start in range(0, len(records), BLOCK):
            codes = np.asarray(records[0][start : start + BLOCK], dtype=np.int64).reshape(-1, self.columns)
            inside = (codes >= 0) & (codes < self.cells)
            flat = (codes + self.cells * np.arange(self.columns))[inside]
            found += np.bincount(flat, minlength=len(found))
        return found.reshape(self.shape) * shrunk(bound, self.norms)


@dataclass(frozen=True, slots=True)
class Sums:
    """A contribution that adds (1/2, z) in one of ``cells``, where z is a record's number between two bounds.

    Records are ``Rows(codes, numbers)``: codes are cells, -1 for none. ``counted`` is 0 in place of 1/2 if
    the number of records is public.
    """

    cells: int
    low: float
    high: float
    counted: float = _COUNTED
    honours: ClassVar[tuple[str, ...]] = (Kind.NORM, Kind.L1_NORM)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the sum."""
        return (2, self.cells)

    @property
    def norms(self) -> tuple[float, float]:
        """The L1 and L2 norms of one record's term."""
        return 1 + self.counted, math.hypot(1, self.counted)

    def bounded_sum(self, records: Any, w: Any, bound: ClipNorm) -> Array:
        """Return half of the count, and the sum of z, in each cell."""
        codes, values = np.asarray(records[0], dtype=np.int64), np.asarray(records[1], dtype=np.float64)
        inside = (codes >= 0) & (codes < self.cells) & np.isfinite(values)
        codes, values = codes[inside], np.clip(values[inside], self.low, self.high)
        half = (self.high - self.low) / 2
        z = np.rint(np.clip((values - self.low) / half - 1, -1, 1) / GRID) * GRID
        counts = self.counted * np.bincount(codes, minlength=self.cells)
        sums = np.bincount(codes, weights=z, minlength=self.cells)
        return np.stack([counts, sums]) * shrunk(bound, self.norms)


def shrunk(bound: ClipNorm, norms: tuple[float, float]) -> float:
    """Return the factor, at most 1, that brings a term of these L1 and L2 norms within the bound."""
    return min(1.0, bound.clip / norms[bound.order - 1])


def count(
    values: ArrayLike,
    *,
    by: ArrayLike | None = None,
    groups: ArrayLike | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    ledger: Ledger | None = None,
) -> Statistic:
    """Count the records that have a value, in all or in declared groups.

    Parameters
    ----------
    values : array-like of shape (records,)
        Private values of any type; None, empty text and numbers that are not finite are not counted.
    by : array-like of shape (records,), optional
        The group of each record.
    groups : array-like, optional
        The public list of groups, with ``by``; a record of any other group is not counted.
    epsilon, delta : float, optional
        The budget of this statistic; with ``ledger`` the part of it to spend, by default the remainder.
    ledger : Ledger, optional
        The ledger to spend from. None makes one in memory.

    Returns
    -------
    Statistic
        One count, or one per group; the price does not depend on the number of groups.

    Examples
    --------
    >>> import farthing as ft
    >>> ages = [17, 35, 90, None] * 1000
    >>> found = ft.count(ages, by=["f", "m"] * 2000, groups=["f", "m"], epsilon=1.0, delta=1e-6)
    >>> [bool(abs(value - expected) < 30) for value, expected in zip(found.value, (2000, 1000))]
    [True, True]
    """
    cells = column(values)
    codes, names = _grouped(cells, by, groups)
    codes = np.where(_present(cells), codes, -1)
    return _counted(codes, names, by is not None, Allowance.of(ledger, epsilon, delta))


def histogram(
    values: ArrayLike,
    bins: ArrayLike,
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    ledger: Ledger | None = None,
) -> Statistic:
    """Count the records in bins between public edges, or of declared values.

    Parameters
    ----------
    values : array-like of shape (records,)
        Private numbers or values.
    bins : array-like
        Edges in ascending order, numbers: a bin includes its lower edge, the last one also its upper edge. Or
        texts: the values to count. Other values are not counted.
    epsilon, delta : float, optional
        The budget of this statistic; with ``ledger`` the part of it to spend, by default the remainder.
    ledger : Ledger, optional
        The ledger to spend from. None makes one in memory.

    Returns
    -------
    Statistic
        One count per bin; ``groups`` are the edges, or the values.

    Examples
    --------
    >>> import farthing as ft
    >>> found = ft.histogram(range(1000), [0, 250, 500, 1000], epsilon=1.0, delta=1e-6)
    >>> found.value.shape, found.groups
    ((3,), (0.0, 250.0, 500.0, 1000.0))
    """
    public = np.asarray(bins)
    if public.ndim != 1 or public.dtype.kind in "USO":
        codes, names = _grouped(column(values), values, bins)
        return _counted(codes, names, True, Allowance.of(ledger, epsilon, delta))
    edges = np.asarray(public, dtype=np.float64)
    if len(edges) < 2 or not np.isfinite(edges).all() or not (np.diff(edges) > 0).all():
        raise InvalidValue(f"bins must be two or more finite edges in ascending order, got {bins!r}")
    codes = binned(numbers("values", values), edges)
    return _counted(codes, tuple(edges.tolist()), True, Allowance.of(ledger, epsilon, delta), len(edges) - 1)


def mean(
    values: ArrayLike,
    bounds: tuple[float, float],
    *,
    by: ArrayLike | None = None,
    groups: ArrayLike | None = None,
    records: int | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    ledger: Ledger | None = None,
) -> Statistic:
    """Average numbers between public bounds, in all or in declared groups.

    Parameters
    ----------
    values : array-like of shape (records,)
        Private numbers; missing ones are not counted, those beyond the bounds are clipped.
    bounds : (low, high)
        Public bounds, or bounds that `bounds` released.
    by : array-like of shape (records,), optional
        The group of each record.
    groups : array-like, optional
        The public list of groups, with ``by``.
    records : int, optional
        The public number of records, if it is known and none is missing: the whole budget then goes to the
        sum. None counts them privately.
    epsilon, delta : float, optional
        The budget of this statistic; with ``ledger`` the part of it to spend, by default the remainder.
    ledger : Ledger, optional
        The ledger to spend from. None makes one in memory.

    Returns
    -------
    Statistic
        One mean, or one per group. If the noise hides a group, it is the middle of the bounds, with an error
        of half their width.

    Examples
    --------
    >>> import farthing as ft
    >>> found = ft.mean(range(1000), (0, 1000), epsilon=1.0, delta=1e-6)
    >>> bool(abs(found.value - 499.5) < 30), bool(found.error < 10)
    (True, True)
    """
    low, high = limits(bounds)
    codes, names = _grouped(column(values), by, groups)
    if records is not None and by is not None:
        raise InvalidValue("records is the number of all records: leave it out with by, groups are counted")
    public = None if records is None else validate.count(records=records)
    sums = Sums(len(names) or 1, low, high, _COUNTED if public is None else 0.0)
    rows = Rows(codes, numbers("values", values))  # may be refused, so before the charge
    spend = Allowance.of(ledger, epsilon, delta, sums.norms)
    total, deviation = spend.ask(rows, sums, sums.norms)
    if public is not None:
        z, half = np.clip(total[1] / public, -1, 1), (high - low) / 2
        off = np.minimum(half * deviation * spend.quantile / public, high - low)
        return _estimate(low + half * (1 + z), np.full(1, off), spend, names, several=False)
    found, error = averages(total, deviation * spend.quantile, low, high)
    return _estimate(found, error, spend, names, by is not None)


def averages(total: Array, spread: float, low: float, high: float) -> tuple[Array, Array]:
    """Return means and their errors from noisy counts and sums of z; ``spread`` covers the noise."""
    half, counts = (high - low) / 2, total[0] / _COUNTED
    known = counts > _FEWEST * spread / _COUNTED
    size = np.where(known, counts, 1.0)
    z = np.where(known, np.clip(total[1] / size, -1, 1), 0.0)
    error = np.where(known, half * spread * np.sqrt(1 + (z / _COUNTED) ** 2) / size, half)
    return low + half * (1 + z), np.minimum(error, high - low)


def limits(bounds: Any) -> tuple[float, float]:
    """Return public bounds as two finite numbers, low below high."""
    try:
        low, high = bounds
    except (TypeError, ValueError):
        raise InvalidValue(f"bounds must be (low, high), two public numbers, got {bounds!r}") from None
    low, high = validate.finite(low=low), validate.finite(high=high)
    if not validate.interval(low, high):
        raise InvalidValue(f"bounds must have {validate.APART}, got {bounds!r}")
    return low, high


def binned(values: Array, edges: Array) -> Integers:
    """Return the bin of each number between edges, -1 outside; the last bin includes its upper edge."""
    codes = np.searchsorted(edges, values, side="right") - 1
    codes = np.where(values == edges[-1], len(edges) - 2, codes)
    return np.where(np.isfinite(values) & (codes >= 0) & (codes < len(edges) - 1), codes, -1).astype(np.int64)


def _present(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which values are present: not None, no empty text, no missing date, and finite if a number."""
    if values.dtype.kind in "fc":
        return np.asarray(np.isfinite(values))
    if values.dtype.kind in "biu":
        return np.ones(len(values), np.bool_)
    if values.dtype.kind in "mM":
        return np.asarray(~np.isnat(values))
    return np.array([_is_there(cell) for cell in values.tolist()], np.bool_)


def _is_there(cell: Any) -> bool:
    """Return whether a cell has a value, by the rule of `_present`."""
    if isinstance(cell, float | complex | np.inexact):
        return cmath.isfinite(cell)
    try:
        return cell is not None and bool(cell == cell) and not (isinstance(cell, str | bytes) and not cell)
    except Exception:  # values that cannot be compared, such as pandas.NA
        return False


def _grouped(
    values: NDArray[Any], by: ArrayLike | None, groups: ArrayLike | None
) -> tuple[Integers, tuple[Any, ...]]:
    """Return the group of each record, 0 if there is one group in all, and the groups."""
    if (by is None) != (groups is None):
        raise InvalidValue("pass both by and groups, the public list of its values, or neither")
    if by is None:
        return np.zeros(len(values), dtype=np.int64), ()
    names = tuple(column(groups, "groups").tolist())
    said = column(by, "by")
    if len(said) != len(values):
        raise InvalidValue("by must have one group per record")  # the lengths are private
    texts = tuple(name if isinstance(name, str) else next(iter(spelt(name)), str(name)) for name in names)
    return Categorical("groups", texts).codes(said), names


def _counted(
    codes: Integers, names: tuple[Any, ...], several: bool, spend: Allowance, cells: int | None = None
) -> Statistic:
    counts = Cells(1, cells or len(names) or 1)
    total, deviation = spend.ask(Rows(codes), counts, counts.norms)
    # a count is off by k or less where its noise, before it is rounded, is below k + 1/2
    error = np.full(counts.cells, max(0.0, math.ceil(deviation * spend.quantile - 0.5)))
    return _estimate(np.rint(total[0]), error, spend, names, several)


def _estimate(
    value: Array, error: Array, spend: Allowance, names: tuple[Any, ...], several: bool
) -> Statistic:
    privacy = spend.ledger.guarantee
    if several:
        return Statistic(value, error, privacy, names)
    return Statistic(float(value[0]), float(error[0]), privacy)
