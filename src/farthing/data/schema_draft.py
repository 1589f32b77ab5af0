"""Draft a schema from a table, for a person to check (``farthing schema``).

A draft is made of private facts, which no guarantee covers, so it is marked as a draft, and training refuses
it until a person deletes that mark. It copies no extreme and no rare value all the same: bounds are round
numbers beyond the smallest and the largest, and a value that fewer than `FEWEST` records have is not listed.
"""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.data import notation, table_files
from farthing.data import schema as data
from farthing.data.columns import Numeric
from farthing.data.csv_files import Csv
from farthing.errors import InvalidValue
from farthing.validate import repeated

FEWEST = 5  # records that a listed value has at least
MOST_VALUES = 100  # a column with more distinct texts, rare ones aside, is free text
_COUNTED = 10_000  # distinct texts that are counted; a column with more is free text
_BLANK: dict[str, Any] = {"low": None, "high": None, "values": []}  # values that a person must fill in
_MOST_LABELS = 10  # a target with at most so many distinct whole numbers is taken for labels
_MOSTLY = 0.8  # the share of numbers, or of dates, from which texts among them count as missing
_TRIED = 100  # distinct cells that are tried by all ways to write dates
_ID = re.compile(r"(^|[_\W])(id|uuid|guid|key|index|nr|number)$|[a-z]I[dD]$", re.IGNORECASE)
_PERSONAL = re.compile(
    r"(^|[_\W])(ssn|phone|telephone|mobile|fax|iban|passport|account|e-?mail)([_ ]?(no|nr|number|id))?$",
    re.IGNORECASE,
)
_UNIT = re.compile(r"[-+]?\d[\d.,]*\s?[^\s\d.,_]{1,5}|\d+:\d\d(?::\d\d)?")
_WHOLE = re.compile(r"\d+(?:\.0)?")
_CODE = re.compile(r"0\d+")  # a number that begins with 0 is a code
_SENTINELS = {-(10.0**n - 1) for n in range(1, 13)} | {10.0**n - 1 for n in range(3, 13)}  # nines
_FILL = 1e30  # numbers from here on stand for missing ones, as grids and images have them
_FINEST = -250  # the least power of ten between bounds, far above what floats lose
_NO_DAYS = ("0001-01-01", "1899-12-30", "1900-01-01", "1970-01-01", "2099-12-31", "2999-12-31", "9999-12-31")
_FOLDED = ("true", "false", "yes", "no")  # whose capitals do not count


@dataclass(slots=True)
class _Days:
    """The facts that were read from dates that are written in one way."""

    low: int = date.max.toordinal()
    high: int = 0
    records: int = 0

    def add(self, day: int, n: int) -> None:
        """Add the date of so many records."""
        self.low, self.high, self.records = min(self.low, day), max(self.high, day), self.records + n


@dataclass(slots=True)
class _Seen:
    """The facts that were read from one column."""

    low: float = math.inf
    high: float = -math.inf
    numbers: int = 0  # records with a number
    words: int = 0  # records with neither a number nor a word for none
    units: int = 0  # among those, a number with a unit, or a time of day
    codes: bool = False  # whether some whole numbers begin with 0
    grouped: bool = True  # whether all points may separate thousands
    pointed: bool = False  # whether there are any
    sentinel: float | None = None
    filled: bool = False  # whether there are numbers of `_FILL` or more
    days: dict[str, _Days] = field(default_factory=dict)  # by each way to write dates that fits many cells
    tried: int = 0  # distinct cells that were tried by all ways
    dated: int = 0  # records with a date
    missing: bool = False
    rising: bool = True  # whole numbers, each larger than the one before: row numbers
    records: int = 0
    texts: Counter[str] = field(default_factory=Counter)

    def add(self, values: NDArray[Any], csv: Csv, commas: bool) -> None:
        """Add another block of the column."""
        if values.dtype.kind == "M":
            values = np.where(np.isnat(values), "", values.astype(np.str_))
        cells = [_text(cell) for cell in values.tolist()]
        before, self.records = self.high, self.records + len(cells)
        counts = Counter(cells)
        if len(self.texts) <= _COUNTED:
            self.texts.update(counts)
        distinct = {cell: n for cell, n in counts.items() if cell.lower() not in notation.NO_VALUE}
        self.missing = self.missing or len(distinct) < len(counts)
        self._add_days(distinct)
        for cell, n in distinct.items():
            self._add_cell(cell, n, csv, commas)
        some = (self.numbers + self.words) * (1 - _MOSTLY)
        self.days = {way: days for way, days in self.days.items() if days.records >= some}
        self.rising = self.rising and not self.words and _rising(cells, before)

    def _add_cell(self, cell: str, n: int, csv: Csv, commas: bool) -> None:
        found = notation.number(notation.point(cell, csv.decimal == ",") if commas else cell)
        if not math.isfinite(found):
            self.words += n
            self.units += n if _UNIT.fullmatch(cell) else 0
            return
        self.numbers += n
        self.codes = self.codes or bool(_CODE.fullmatch(cell))
        if commas and csv.decimal is None and "." in cell and "," not in cell:
            self.pointed, self.grouped = True, self.grouped and _grouped(cell)
        if found in _SENTINELS and abs(found) >= abs(self.sentinel or 0.0):
            self.sentinel = found
        if abs(found) < _FILL:
            self.low, self.high = min(self.low, found), max(self.high, found)
        else:
            self.filled = True

    def _add_days(self, distinct: Mapping[str, int]) -> None:
        for cell, n in distinct.items():
            if not self.days and self.tried >= _TRIED:
                return
            fits = notation.ways(cell) if self.tried < _TRIED else [*self.days]
            self.tried += 1
            days = [(way, day) for way in fits if (day := notation.day(cell, way)) is not None]
            for way, day in days:
                self.days.setdefault(way, _Days()).add(day, n)
            self.dated += n if days else 0

    def _written(self) -> str | None:
        """Return the way in which most dates are written, None where no way fits most cells."""
        most = max((days.records for days in self.days.values()), default=0)
        if most == 0 or most < _MOSTLY * (self.numbers + self.words):
            return None
        return next(way for way, days in self.days.items() if days.records == most)

    def described(self, name: str, target: bool) -> tuple[dict[str, Any] | None, str]:
        """Return the column of a schema, None to leave it out, and a remark for the person who checks it."""
        column: dict[str, Any] = {"name": name}
        texts = [text for text in self.texts if text.lower() not in notation.NO_VALUE]
        whole = all(_WHOLE.fullmatch(text.removeprefix("-" if target else "")) for text in texts)
        if whole:
            self.texts = _counted(self.texts, lambda text: text.removesuffix(".0"))
        few = len(self.texts) <= _MOST_LABELS
        if target and whole and few:
            return self._listed(column, target)
        if not target and self._identifies(name, whole):
            return None, "holds row numbers or identifiers: left out"
        if (way := self._written()) is not None and not target:
            return self._range(column, way)
        if not target and self.dated >= _MOSTLY * (self.numbers + self.words) and self.dated > FEWEST:
            return None, "holds dates in several ways: left out, unless you write them in one"
        if not self.words and not self.codes:
            return self._bounds(column, target, whole)
        if self.numbers >= _MOSTLY * (self.numbers + self.words) and not few and not self.codes:
            return self._bounds(column, target, False)
        if not target and self.units >= _MOSTLY * (self.numbers + self.words) and not few:
            return None, "holds numbers with a unit, or times: left out, unless you write plain numbers"
        return self._listed(column, target)

    def _identifies(self, name: str, whole: bool) -> bool:
        """Return whether the column seems to number the rows, or to name people."""
        if self.records <= FEWEST:
            return False
        if self.rising and (_ID.search(name) or self.high - self.low + 1 == self.records):
            return True
        many = len(self.texts) > min(_COUNTED, self.records / 2)
        return many and (bool(_PERSONAL.search(name)) or (whole and bool(_ID.search(name))))

    def _bounds(self, column: dict[str, Any], target: bool, whole: bool) -> tuple[dict[str, Any] | None, str]:
        if not self.low < self.high:
            return (column | _BLANK if target else None), "holds no two different numbers" + (
                "" if target else ": left out"
            )
        flag = whole and {*self.texts} - {"0", "1"} <= notation.NO_VALUE
        low, high = (0.0, 1.0) if flag else rounded_outward(self.low, self.high)  # a flag has nobody's bounds
        column |= {"low": _short(low), "high": _short(high)}
        said = []
        if (self.missing or self.words) and not target:
            column["missing"] = _short(Numeric("", low, high).with_middle().missing or 0.0)
            said.append("has cells without a number: 'missing' replaces them, with an indicator")
        elif self.missing or self.words:
            said.append("has cells without a number: their records will count as nothing")
        if whole and not flag and not target and len(self.texts) <= _MOST_LABELS:
            said.append("holds few different whole numbers: if they are codes, list them as 'values'")
        if whole and not target and self.records > _MOST_LABELS and len(self.texts) == self.records:
            said.append("differs in all records: if it is an identifier, leave it out")
        elif whole and not target and _ID.search(column["name"]):
            said.append(
                "is named like an identifier: if it says whose record it is, leave it out, see --user"
            )
        if self.pointed and self.grouped:
            said.append("has points that may separate thousands: then give --decimal , to every command")
        if self.sentinel in (self.low, self.high):
            said.append(
                f"has {self.sentinel:.0f}, which often stands for a missing number: if so, empty those cells"
            )
        if self.filled:
            said.append(
                f"has numbers of {_FILL:g} or more in size, which often stand for missing ones, beyond "
                "these bounds: empty those cells"
            )
        return column, "; ".join(said)

    def _range(self, column: dict[str, Any], way: str) -> tuple[dict[str, Any], str]:
        found = self.days[way]
        first, last = (date.fromordinal(day).year for day in (found.low, found.high))
        column |= {"first": f"{first:04}-01-01", "last": f"{last:04}-12-31"}
        said = []
        if way:
            column["format"] = way
        other = self.days.get(notation.swapped(way), _Days())
        if notation.swapped(way) != way and other.records == found.records:
            said.append(
                f"may have day and month in either order: check 'format', {way} or {notation.swapped(way)}"
            )
        if "%y" in way:
            said.append("has years of two digits, which are taken for 1969 to 2068")
        if self.missing or found.records < self.numbers + self.words:
            column["missing"] = f"{(first + last) // 2:04}-07-01"
            said.append("has cells without a date: 'missing' replaces them, with an indicator")
        for text in _NO_DAYS:
            if date.fromisoformat(text).toordinal() in (found.low, found.high):
                said.append(f"has {text}, which often stands for a missing date: if so, empty those cells")
        return column, "; ".join(said)

    def _listed(self, column: dict[str, Any], target: bool) -> tuple[dict[str, Any] | None, str]:
        texts = _folded(self.texts)
        absent = notation.NO_LABEL if target else frozenset[str]()
        common = sorted(text for text, n in texts.items() if n >= FEWEST and text.lower() not in absent)
        if not common or len(texts) > _COUNTED or len(common) > MOST_VALUES:
            what = "codes that begin with 0" if self.codes and not self.words else "rare texts only"
            what = f"more than {MOST_VALUES} different texts" if len(common) > MOST_VALUES else what
            return (column | _BLANK if target else None), f"holds {what}" + ("" if target else ": left out")
        column["values"] = common
        if target and len(common) == 1:
            return column, "has one value only: list the others that are possible"
        said = []
        if self.numbers and self.words and min(self.numbers, self.words) * 20 > self.records:
            said.append("mixes numbers and texts")
        if len({*map(_look, common)}) < len(common):
            said.append(
                "has values that differ in capitals, accents or spaces alone: write them alike, if they mean "
                "the same"
            )
        if any(text.lower() in absent for text in texts):
            said.append("has cells without a label: their records will count as nothing")
        if any(n < FEWEST and text.lower() not in absent for text, n in texts.items()):
            counted = "nothing" if target else "'other'"
            column |= {} if target else {"other": True}
            said.append(
                f"has values of fewer than {FEWEST} records, which are not listed: they count as {counted}"
            )
        return column, "; ".join(said)


def draft(
    table: str, target: str | None, csv: Csv = table_files.PLAIN, drop: Iterable[str] = ()
) -> tuple[str, dict[str, str]]:
    """Return a draft as JSON, and remarks on columns that a person must check."""
    if table == table_files.EMBEDDED:
        return table_files.schema_of(table, target).to_json(), {}
    header = table_files.named(table, target, csv)
    dropped, strange = [*drop], table_files.unreadable(table)
    for name in dropped:
        table_files.named(table, name, csv)
    if target in strange:
        raise InvalidValue(f"column {target!r} of {table!r} holds {strange[target]}: it cannot be the target")
    twice = {*repeated(header)} - {*dropped, ""}
    left = {"", *twice, *dropped, *strange}
    names = [name for name in header if name not in left]
    if target is not None and target not in names:
        raise InvalidValue(f"{table!r} has two columns {target!r}, or it is dropped: it cannot be the target")
    seen = {name: _Seen() for name in names}
    commas = table_files.commas(table, csv)
    for block in table_files.columns(table, names, csv):
        for name, values in block.items():
            seen[name].add(values, csv, commas)
    if not any(column.records for column in seen.values()):
        raise InvalidValue(f"{table!r} has no records")
    described = {name: column.described(name, name == target) for name, column in seen.items()}
    features = [column for name, (column, _) in described.items() if name != target and column is not None]
    aim = {"name": None, **_BLANK} if target is None else described[target][0]
    assert aim is not None
    said = {name: f"{remark}" for name, (_, remark) in described.items() if remark}
    if target is not None and not features:
        said[target] = said.get(target, "") or "stands alone: no other column can be learnt from"
    said |= dict.fromkeys([""] * ("" in header), "is in the table, without a name: left out")
    said |= {name: f"holds {kind}: left out" for name, kind in strange.items() if name not in dropped}
    said |= dict.fromkeys(sorted(twice), "stands in the header twice: left out, rename one")
    return data.draft(features, aim), said


def rounded_outward(low: float, high: float) -> tuple[float, float]:
    """Return round numbers strictly beyond two; a smallest number of 0, which is no one's, stays.

    Numbers that differ in their last digits only get bounds further out, of twelve digits like all others.

    >>> rounded_outward(17, 90), rounded_outward(0.0, 24.5), rounded_outward(-3.2, 1e6)
    ((10.0, 100.0), (0.0, 30.0), (-200000.0, 1200000.0))
    >>> rounded_outward(1e15, 1e15 + 0.125)
    (999999999980000.0, 1000000000020000.0)
    """
    step = 10.0 ** max(math.floor(math.log10(high - low)), _FINEST)
    step = step if (high - low) / step > 2 else step / 5
    while True:
        below = 0.0 if low == 0 else float(f"{step * (math.ceil(low / step) - 1):.12g}")
        above = 0.0 if high == 0 else float(f"{step * (math.floor(high / step) + 1):.12g}")
        if (below < low or low == 0) and (above > high or high == 0):
            return below, above
        step *= 10


def _rising(cells: list[str], before: float) -> bool:
    """Return whether cells are whole numbers, each larger than the one before."""
    if not all(cell.isdigit() for cell in cells):
        return False
    numbers = [before, *map(float, cells)]
    return all(a < b for a, b in pairwise(numbers))


def _grouped(cell: str) -> bool:
    """Return whether points of a number may separate thousands."""
    return notation.point(cell, declared=True) != cell


def _text(cell: Any) -> str:
    """Return a cell as it would stand in a CSV file."""
    if isinstance(cell, bool):
        return "true" if cell else "false"
    return str(cell).strip()


def _folded(texts: Counter[str]) -> Counter[str]:
    """Return counts in which spellings that a vocabulary takes for one value are one text."""
    several = {word for word in _FOLDED if sum(text.lower() == word for text in texts) > 1}
    return _counted(
        texts, lambda text: text.lower() if text.lower() in several else unicodedata.normalize("NFC", text)
    )


def _counted(texts: Counter[str], written: Callable[[str], str]) -> Counter[str]:
    """Return counts of texts as they are written by a function."""
    found = Counter[str]()
    for text, n in texts.items():
        found[written(text)] += n
    return found


def _look(text: str) -> str:
    """Return a text without capitals, accents and spaces."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    return "".join(mark for mark in plain if unicodedata.category(mark)[0] in "LNPS")


def _short(number: float) -> float:
    return int(number) if number.is_integer() and abs(number) < 2**53 else number
