"""Declare the columns of a table: numbers in bounds, values of a vocabulary, dates in a range.

Every declaration is a public rule for one cell, so the encoding of a record depends on that record alone. A
cell that does not fit is never refused or counted, which would reveal a record without a charge: a number or
a date beyond its bounds is clipped, a value outside the vocabulary is encoded as zeros (or "other", if that
is declared), and a missing number makes the record count as zero (or is replaced by the declared ``missing``,
with an indicator).
"""

import math
import unicodedata
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from functools import cached_property, lru_cache
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

from farthing.data import notation
from farthing.errors import InvalidValue
from farthing.queries import arrays
from farthing.validate import APART, finite, interval

_EPOCH = date(1970, 1, 1).toordinal()
_SOME_DAY = datetime(2000, 1, 31, 12, tzinfo=UTC)
_BOOLEANS = ("true", "false", "yes", "no")
_WORD = 2**64
_PLAIN = frozenset({bool, int, float, str, bytes, type(None)})


@dataclass(frozen=True)
class Numeric:
    """A column of numbers with public bounds, which become [0, 1].

    Values beyond the bounds are clipped. A cell that is not a finite number becomes NaN, and its record
    counts as zero (`farthing.data.tables.Table`): an error would reveal a record without a charge.

    Parameters
    ----------
    name : str
        The column's name in the table.
    low, high : float
        The public bounds, low below high.
    missing : float, optional
        A public number between the bounds that replaces missing cells. A second feature then indicates the
        replaced cells.

    Examples
    --------
    >>> Numeric("age", 17, 90).targets([17, 250, "?"])
    array([17., 90., nan])
    >>> Numeric("age", 17, 90, missing=40).feature_names
    ('age', 'age=missing')
    """

    name: str
    low: float
    high: float
    missing: float | None = None

    def __post_init__(self) -> None:
        low, high = (
            finite(**{f"{name} of column {self.name!r}": getattr(self, name)}) for name in ("low", "high")
        )
        if not interval(low, high):
            needed = "low < high" if low >= high else APART
            raise InvalidValue(
                f"column {self.name!r} must have {needed}, got low {self.low!r} and high {self.high!r}"
            )
        if self.missing is not None:
            between = finite(**{f"missing of column {self.name!r}": self.missing})
            if not low <= between <= high:
                raise InvalidValue(
                    f"column {self.name!r}: missing must lie between low and high, got {self.missing!r}"
                )

    def with_middle(self) -> "Numeric":
        """Return the column with the middle of its bounds in place of missing cells."""
        return replace(self, missing=float(self.low) + (float(self.high) - float(self.low)) / 2)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Return the names of the feature and, if ``missing`` is declared, of its indicator."""
        return (self.name,) if self.missing is None else (self.name, f"{self.name}=missing")

    @arrays.quietly
    def encode(self, values: ArrayLike, out: NDArray[np.float64]) -> None:
        """Write the scaled values, and the indicator if there is one, into `out`: (rows, features)."""
        low, high = float(self.low), float(self.high)
        found = self.targets(values)
        if self.missing is not None:
            out[:, 1] = np.isnan(found)
            found = np.where(np.isnan(found), float(self.missing), found)
        out[:, 0] = (found - low) / (high - low)

    @arrays.quietly
    def targets(self, values: ArrayLike) -> NDArray[np.float64]:
        """Return the clipped values, the targets of a regression; NaN for a cell that is not a number."""
        found = numbers(self.name, values)
        return np.where(np.isfinite(found), np.clip(found, float(self.low), float(self.high)), np.nan)

    def known(self, values: ArrayLike) -> bool:
        """Return whether every value is a finite number, or may be missing."""
        return self.missing is not None or bool(np.isfinite(numbers(self.name, values)).all())

    def holds(self, values: ArrayLike) -> bool:
        """Return whether every value is a number between the bounds, or is missing where that is allowed."""
        found = numbers(self.name, values)
        inside = (found >= self.low) & (found <= self.high)
        return bool((inside if self.missing is None else inside | ~np.isfinite(found)).all())


@dataclass(frozen=True)
class Unbounded:
    """A column of numbers without declared bounds: training buys them from its budget.

    It is encoded unchanged, with NaN for a cell that is not a number. A trained model has bounds in its
    place.

    Parameters
    ----------
    name : str
        The column's name in the table.
    bounds : str, default "private"
        Always "private".

    Examples
    --------
    >>> Unbounded("income").feature_names
    ('income',)
    """

    name: str
    bounds: str = "private"

    def __post_init__(self) -> None:
        if self.bounds != "private":
            raise InvalidValue(
                f"bounds of column {self.name!r} must be the word 'private', got {self.bounds!r}"
            )

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Return the feature that this column becomes."""
        return (self.name,)

    def encode(self, values: ArrayLike, out: NDArray[np.float64]) -> None:
        """Write the numbers unchanged into `out`, of shape (rows, 1)."""
        found = numbers(self.name, values)
        out[:, 0] = np.where(np.isfinite(found), found, np.nan)

    def known(self, values: ArrayLike) -> bool:
        """Return whether every value is a finite number."""
        return bool(np.isfinite(numbers(self.name, values)).all())

    holds = known


@dataclass(frozen=True)
class Date:
    """A column of dates in a public range, as days that become [0, 1]; dates beyond it are clipped.

    Parameters
    ----------
    name : str
        The column's name in the table.
    first, last : str
        The range, as ``YYYY-MM-DD``, first before last.
    missing : str, optional
        A public date in the range that replaces missing cells; a second feature indicates them.
    format : str, optional
        The format of dates, as for `datetime.strptime`. By default ``YYYY-MM-DD``; a time after it is
        ignored.

    Examples
    --------
    >>> born = Date("born", "2000-01-01", "2000-12-31", format="%d.%m.%Y")
    >>> born.days(["01.01.2000", "31.12.1999", "?"])
    array([10957., 10956.,    nan])
    """

    name: str
    first: str
    last: str
    missing: str | None = None
    format: str | None = None

    def __post_init__(self) -> None:
        for word in ("first", "last", "missing"):
            text = getattr(self, word)
            if text is not None and math.isnan(_day(text, None)):
                raise InvalidValue(
                    f"{word} of column {self.name!r} must be a date as YYYY-MM-DD, got {text!r}"
                )
        if _day(self.first, None) >= _day(self.last, None):
            raise InvalidValue(
                f"column {self.name!r}: first must be before last, got {self.first!r}, {self.last!r}"
            )
        if self.format is not None and not _is_format(self.format):
            raise InvalidValue(
                f"format of column {self.name!r} must be a date format like '%d.%m.%Y', got {self.format!r}"
            )
        _ = self._numeric

    @cached_property
    def _numeric(self) -> Numeric:
        """The same column in days since 1970."""
        missing = None if self.missing is None else _day(self.missing, None)
        return Numeric(self.name, _day(self.first, None), _day(self.last, None), missing)

    def with_middle(self) -> "Date":
        """Return the column with the middle of its range in place of missing cells."""
        middle = round((self._numeric.low + self._numeric.high) / 2)
        return replace(self, missing=date.fromordinal(middle + _EPOCH).isoformat())

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Return the names of the feature and, if ``missing`` is declared, of its indicator."""
        return self._numeric.feature_names

    def days(self, values: ArrayLike) -> NDArray[np.float64]:
        """Return days since 1970, NaN for a cell that is not a date."""
        raw = arrays.column(values, f"column {self.name!r}")
        if raw.dtype.kind == "M":
            whole = raw.astype("datetime64[D]")
            return np.where(np.isnat(whole), np.nan, whole.astype(np.int64).astype(np.float64))
        return np.array([_day(cell, self.format) for cell in raw.tolist()], dtype=np.float64)

    def encode(self, values: ArrayLike, out: NDArray[np.float64]) -> None:
        """Write the scaled days, and the indicator if there is one, into `out`: (rows, features)."""
        self._numeric.encode(self.days(values), out)

    def known(self, values: ArrayLike) -> bool:
        """Return whether every value is a date, or may be missing."""
        return self._numeric.known(self.days(values))

    def holds(self, values: ArrayLike) -> bool:
        """Return whether every value is a date in the range, or is missing where that is allowed."""
        return self._numeric.holds(self.days(values))


@dataclass(frozen=True)
class Categorical:
    """A column of values from a public vocabulary, encoded one-hot.

    Parameters
    ----------
    name : str
        The column's name in the table.
    values : tuple of str
        The vocabulary. A value outside it encodes as all zeros.
    other : bool, default False
        Whether values outside the vocabulary have their own feature instead.

    Notes
    -----
    Numbers, booleans and dates count as their text (1 and 1.0 as "1", true as "true" or "True", a day as
    "2000-01-31"). The case of true, false, yes and no is ignored, and so are spaces around a text; an accent
    may be a part of its letter or a mark after it. So the same vocabulary works for CSV files, Parquet files,
    lists and arrays.

    Examples
    --------
    >>> Categorical("sex", ("Female", "Male")).codes(["Male", "not listed"])
    array([ 1, -1])
    >>> Categorical("region", ("1", "2"), other=True).feature_names
    ('region=1', 'region=2', 'region=other')
    """

    name: str
    values: tuple[str, ...]
    other: bool = False

    def __post_init__(self) -> None:
        if not self.values or len(set(self.values)) < len(self.values):
            raise InvalidValue(f"column {self.name!r} needs distinct values, got {self.values!r}")
        if not isinstance(self.other, bool):
            raise InvalidValue(f"other of column {self.name!r} must be true or false, got {self.other!r}")
        if self.other and "other" in self.values:
            raise InvalidValue(
                f"column {self.name!r} lists 'other' already: leave out other=True or that value"
            )

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Return one feature per value of the vocabulary, in its order, and one for others if declared."""
        names = (*self.values, "other") if self.other else self.values
        return tuple(f"{self.name}={value}" for value in names)

    @cached_property
    def _position(self) -> dict[str, int]:
        found = {value: code for code, value in enumerate(self.values)}
        for code, value in enumerate(self.values):
            found.setdefault(unicodedata.normalize("NFC", value), code)
        return found

    def codes(self, values: ArrayLike) -> NDArray[np.int64]:
        """Return the position of each value in the vocabulary, -1 if it is not listed."""
        position = self._position
        cells = _cells(arrays.column(values, f"column {self.name!r}"))
        try:
            found = list(map(position.get, cells, repeat(-1)))
        except Exception:  # not hashable, such as numpy's timedelta without a unit
            found = [position.get(cell, -1) if isinstance(cell, str) else -1 for cell in cells]
        codes = np.array(found, dtype=np.int64)
        for place in np.flatnonzero(codes < 0):
            codes[place] = next((position[text] for text in spelt(cells[place]) if text in position), -1)
        return codes

    def encode(self, values: ArrayLike, out: NDArray[np.float64]) -> None:
        """Set the ones in `out`, zeros of shape (rows, features)."""
        codes = self.codes(values)
        if self.other:
            codes = np.where(codes < 0, len(self.values), codes)
        (known,) = np.nonzero(codes >= 0)
        out[known, codes[known]] = 1.0

    def holds(self, values: ArrayLike) -> bool:
        """Return whether all values are in the vocabulary, or others are declared."""
        return self.other or bool((self.codes(values) >= 0).all())

    def targets(self, values: ArrayLike) -> NDArray[np.int64]:
        """Return the codes of labels, the targets of a classifier; -1 for one outside the vocabulary."""
        return self.codes(values)

    known = holds


Column = Numeric | Categorical | Date | Unbounded


def _cells(values: NDArray[Any]) -> list[Any]:
    """Return cells as Python objects, integers as text."""
    if values.dtype.kind in "iu":
        return list(values.astype(np.str_).tolist())
    if values.dtype.kind == "M":
        return list(values)
    return [str(cell) if type(cell) is int and -_WORD < cell < _WORD else cell for cell in values.tolist()]


def spelt(cell: Any) -> tuple[str, ...]:
    """Return the spellings of a value in a vocabulary, by a rule for one cell.

    >>> spelt(1.0), spelt(1.5), spelt(" True"), spelt(date(2000, 1, 31)), spelt(None)
    (('1',), ('1.5',), ('True', 'true', 'True'), ('2000-01-31',), ())
    """
    if isinstance(cell, np.datetime64):
        cell = None if np.isnat(cell) else cell.astype("datetime64[us]").item()
    elif isinstance(cell, np.generic):
        cell = cell.item()
    if isinstance(cell, bool):
        cell = str(cell)
    elif isinstance(cell, int | float):
        cell = _digits(cell)
    elif isinstance(cell, date):
        cell = cell.isoformat().removesuffix("T00:00:00")
    if not isinstance(cell, str):
        return ()
    text = unicodedata.normalize("NFC", cell.strip())
    whole = text.removesuffix(".0")
    if whole != text and whole.removeprefix("-").isdigit():
        return text, whole
    return (text, text.lower(), text.capitalize()) if text.lower() in _BOOLEANS else (text,)


def _digits(number: float) -> str:
    """Return a number as text, integers without a fraction; empty if it is not finite."""
    try:
        return str(int(number)) if number == int(number) else str(number)
    except (ValueError, OverflowError):  # not finite, or thousands of digits
        return ""


@arrays.quietly
def numbers(name: str, values: ArrayLike) -> NDArray[np.float64]:
    """Return numbers, NaN for a cell that is not one; refuse a column whose type is not numeric.

    The rule is per cell (for text, that of `farthing.data.notation`): a list, an array of objects and a typed
    array of the same values give the same numbers.
    """
    raw = arrays.column(values, f"column {name!r}")
    # A date or a complex number would be cast to a float silently.
    if raw.dtype.kind not in "biufOUS":
        hint = ": declare first and last in place of low and high" if raw.dtype.kind == "M" else ""
        raise InvalidValue(f"column {name!r} must hold numbers, got {raw.dtype.type.__name__}{hint}")
    if raw.dtype.kind in "biuf":
        return np.asarray(raw, dtype=np.float64)
    cells = raw.tolist()
    try:
        if _PLAIN.issuperset(map(type, cells)):  # numpy converts these types like `_number`
            return raw.astype(object).astype(np.float64)
    except Exception:  # the message must not name the cell or its content
        pass
    return np.array([_number(cell) for cell in cells], dtype=np.float64)


def _number(cell: Any) -> float:
    return notation.number(cell) if isinstance(cell, str) else arrays.number(cell)


@lru_cache(2**16)  # `strptime` is slow, and a table has few distinct days
def _parsed(text: str, format: str | None) -> float:
    try:
        if format is None:
            return float(date.fromisoformat(text[:10]).toordinal() - _EPOCH)
        return float(datetime.strptime(text, format).toordinal() - _EPOCH)
    except ValueError:
        return math.nan


def _is_format(format: str) -> bool:
    """Return whether dates can be read in a format; a wrong one would fail on the first text in a column."""
    try:
        datetime.strptime(_SOME_DAY.strftime(format), format)
    except Exception:  # of a directive that is unknown, or there twice
        return False
    return "%" in format


def _day(cell: Any, format: str | None) -> float:
    """Return the days from 1970 to a date, NaN if it is not a date."""
    if isinstance(cell, np.datetime64):
        return math.nan if np.isnat(cell) else float(cell.astype("datetime64[D]").astype(np.int64))
    if isinstance(cell, date):
        return _ordinal(cell)
    return _parsed(cell.strip(), format) if isinstance(cell, str) else math.nan


def _ordinal(day: date) -> float:
    try:
        return float(day.toordinal() - _EPOCH)
    except Exception:  # pandas.NaT
        return math.nan


def limits(bounds: Any, X: Any) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return public bounds as one number per feature; refuse bounds that are not finite and ordered."""
    try:
        low, high = (np.broadcast_to(np.asarray(bound, dtype=np.float64), X.shape[1]) for bound in bounds)
    except (TypeError, ValueError):
        raise InvalidValue(
            f"bounds must be (low, high), numbers or one per feature ({X.shape[1]}), got {bounds!r}"
        ) from None
    if not interval(low, high).all():
        raise InvalidValue(f"bounds must be finite, in every feature {APART}, got {bounds!r}")
    if sparse.issparse(X) and np.any(low):
        raise InvalidValue("the lower bounds of a sparse table must be 0, the value that is not stored")
    return low, high
