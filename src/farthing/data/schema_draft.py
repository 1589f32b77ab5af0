"""Draft a schema from a table, for a person to check (``farthing schema``).

A draft is made of private facts, which no guarantee covers, so it is marked as a draft, and training refuses
it until a person deletes that mark. It copies no extreme and no rare value all the same: bounds are round
numbers beyond the smallest and the largest, and a value that fewer than `FEWEST` records have is not listed.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import date, datetime
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.data import schema as data
from farthing.data import table_files
from farthing.data.columns import Numeric
from farthing.data.csv_files import Csv
from farthing.errors import InvalidValue

FEWEST = 5  # records that a listed value has at least
MOST_VALUES = 100  # a column with more distinct texts, rare ones aside, is free text
_COUNTED = 10_000  # distinct texts that are counted; a column with more is free text
_BLANK: dict[str, Any] = {"low": None, "high": None, "values": []}  # values that a person must fill in
_MOST_LABELS = 10  # a target with at most so many distinct whole numbers is taken for labels
_NO_VALUE = {"", "nan", "none", "na", "n/a", "null", "-", "?", "."}  # cells of numbers and dates
_DATES = ("", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y")  # "" is YYYY-MM-DD
_ID = re.compile(r"(^|[_\W])(id|uuid|guid|key|index|nr|number)$|[a-z]I[dD]$", re.IGNORECASE)


@dataclass(slots=True)
class _Seen:
    """The facts that were read from one column."""

    low: float = math.inf
    high: float = -math.inf
    numeric: bool = True
    # first and last day by each way to write dates that fits all cells so far
    days: dict[str, tuple[float, float]] = field(
        default_factory=lambda: dict.fromkeys(_DATES, (math.inf, -math.inf))
    )
    missing: bool = False
    rising: bool = True  # whole numbers, each larger than the one before: row numbers
    records: int = 0
    texts: Counter[str] = field(default_factory=Counter)

    def add(self, values: NDArray[Any], commas: bool) -> None:
        """Add another block of the column."""
        if values.dtype.kind == "M":
            values = np.where(np.isnat(values), "", values.astype(np.str_))
        cells = [
            "true" if cell is True else "false" if cell is False else str(cell).strip()
            for cell in values.tolist()
        ]
        self.records += len(cells)
        if len(self.texts) <= _COUNTED:
            self.texts.update(cells)
        distinct = {cell for cell in set(cells) if cell.lower() not in _NO_VALUE}
        self._add_days(distinct)
        found = [_number(cell.replace(",", ".") if commas else cell) for cell in distinct]
        self.numeric = self.numeric and None not in found
        numbers = [number for number in found if number is not None and math.isfinite(number)]
        dates = len(distinct) if self.days else 0
        self.missing = self.missing or max(len(numbers), dates) < len(set(cells))
        self.rising = self.rising and self.numeric and _rising(cells, self.high)
        self.low, self.high = min([self.low, *numbers]), max([self.high, *numbers])

    def _add_days(self, distinct: set[str]) -> None:
        for way, (low, high) in [*self.days.items()]:
            found = []
            for cell in distinct:
                if (day := _day(cell, way)) is None:
                    del self.days[way]
                    break
                found.append(day)
            else:
                self.days[way] = min([low, *found]), max([high, *found])

    def described(self, name: str, target: bool) -> tuple[dict[str, Any] | None, str]:
        """Return the column of a schema, None to leave it out, and a remark for the person who checks it."""
        column: dict[str, Any] = {"name": name}
        whole = all(text.isdigit() for text in self.texts if text)
        if target and whole and len(self.texts) <= _MOST_LABELS:
            return self._listed(column, target)
        if (
            not target
            and self.records > FEWEST
            and self.rising
            and (_ID.search(name) or self.high - self.low + 1 == self.records)
        ):
            return None, "holds row numbers or identifiers: left out"
        if self.days and max(high for _, high in self.days.values()) > -math.inf:
            return self._range(column)
        if self.numeric:
            return self._bounds(column, target, whole)
        return self._listed(column, target)

    def _bounds(self, column: dict[str, Any], target: bool, whole: bool) -> tuple[dict[str, Any] | None, str]:
        if not self.low < self.high:
            return (column | _BLANK if target else None), "holds no two different numbers" + (
                "" if target else ": left out"
            )
        low, high = rounded_outward(self.low, self.high)
        column |= {"low": _short(low), "high": _short(high)}
        said = []
        if self.missing and not target:
            column["missing"] = _short(Numeric("", low, high).with_middle().missing or 0.0)
            said.append("has cells without a number: 'missing' replaces them, with an indicator")
        elif self.missing:
            said.append("has cells without a number: their records will count as nothing")
        if whole and not target and len(self.texts) <= _MOST_LABELS:
            said.append("holds few different whole numbers: if they are codes, list them as 'values'")
        return column, "; ".join(said)

    def _range(self, column: dict[str, Any]) -> tuple[dict[str, Any], str]:
        way, days = next(iter(self.days.items()))
        first, last = (date.fromordinal(int(day)).year for day in days)
        column |= {"first": f"{first:04}-01-01", "last": f"{last:04}-12-31"}
        said = []
        if way:
            column["format"] = way
        if len(self.days) > 1:
            said.append(f"may have day and month in either order: check 'format', {' or '.join(self.days)}")
        if self.missing:
            column["missing"] = f"{(first + last) // 2:04}-07-01"
            said.append("has cells without a date: 'missing' replaces them, with an indicator")
        return column, "; ".join(said)

    def _listed(self, column: dict[str, Any], target: bool) -> tuple[dict[str, Any] | None, str]:
        common = sorted(text for text, n in self.texts.items() if n >= FEWEST and (text or not target))
        rare = len(self.texts) > len(common)
        if not common or len(self.texts) > _COUNTED or len(common) > MOST_VALUES:
            what = (
                f"more than {MOST_VALUES} different texts" if len(common) > MOST_VALUES else "rare texts only"
            )
            return (column | _BLANK if target else None), f"holds {what}" + ("" if target else ": left out")
        column["values"] = common
        if not rare:
            return column, ""
        if target:
            return (
                column,
                f"has values of fewer than {FEWEST} records, which are not listed: they count as nothing",
            )
        column["other"] = True
        return (
            column,
            f"has values of fewer than {FEWEST} records, which are not listed: they count as 'other'",
        )


def draft(
    table: str, target: str | None, csv: Csv = table_files.PLAIN, drop: Iterable[str] = ()
) -> tuple[str, dict[str, str]]:
    """Return a draft as JSON, and remarks on columns that a person must check."""
    if table == table_files.EMBEDDED:
        return table_files.schema_of(table, target).to_json(), {}
    header = table_files.named(table, target, csv)
    dropped = [*drop]
    for name in dropped:
        table_files.named(table, name, csv)
    twice = {name for name in header if header.count(name) > 1} - {*dropped}
    names = [name for name in header if name not in twice and name not in dropped]
    if target is not None and target not in names:
        raise InvalidValue(f"{table!r} has two columns {target!r}, or it is dropped: it cannot be the target")
    seen = {name: _Seen() for name in names}
    form = csv.commas(table) if table_files.is_csv(table) else False
    for block in table_files.columns(table, names, csv):
        for name, values in block.items():
            seen[name].add(values, form)
    if not any(column.records for column in seen.values()):
        raise InvalidValue(f"{table!r} has no records")
    described = {name: column.described(name, name == target) for name, column in seen.items()}
    features = [column for name, (column, _) in described.items() if name != target and column is not None]
    aim = {"name": None, **_BLANK} if target is None else described[target][0]
    assert aim is not None
    said = {name: f"{remark}" for name, (_, remark) in described.items() if remark}
    said |= dict.fromkeys(sorted(twice), "stands in the header twice: left out, rename one")
    return data.draft(features, aim), said


def rounded_outward(low: float, high: float) -> tuple[float, float]:
    """Return round numbers strictly beyond two; a smallest number of 0, which is no one's, stays.

    >>> rounded_outward(17, 90), rounded_outward(0.0, 24.5), rounded_outward(-3.2, 1e6)
    ((10.0, 100.0), (0.0, 30.0), (-200000.0, 1200000.0))
    """
    step = 10.0 ** math.floor(math.log10(high - low))
    step = step if (high - low) / step > 2 else step / 5
    below = 0.0 if low == 0 else step * (math.ceil(low / step) - 1)
    above = 0.0 if high == 0 else step * (math.floor(high / step) + 1)
    return float(f"{below:.12g}"), float(f"{above:.12g}")


def _rising(cells: list[str], before: float) -> bool:
    """Return whether cells are whole numbers, each larger than the one before."""
    if not all(cell.isdigit() for cell in cells):
        return False
    numbers = [before, *map(float, cells)]
    return all(a < b for a, b in pairwise(numbers))


def _day(cell: str, way: str) -> int | None:
    """Return the ordinal of a date, written in this way or as YYYY-MM-DD, with or without a time."""
    if not way and (len(cell) < 10 or cell[4] != "-"):
        return None
    try:
        return (datetime.strptime(cell, way) if way else date.fromisoformat(cell[:10])).toordinal()
    except ValueError:
        return None


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _short(number: float) -> float:
    return int(number) if number.is_integer() and abs(number) < 2**53 else number
