"""Draft a schema from a table, for a person to check (``farthing schema``).

The draft contains private facts, such as the smallest and the largest number of a column. No guarantee covers
it, so it is marked as a draft, and training refuses it until a person deletes that mark.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.data import schema as data
from farthing.data import table_files
from farthing.errors import InvalidValue

MOST_VALUES = 100  # a column with more distinct texts is left to a person
_BLANK: dict[str, Any] = {"low": None, "high": None, "values": []}  # values that a person must fill in
_MOST_LABELS = 10  # a target with at most so many distinct whole numbers is taken for labels


@dataclass(slots=True)
class _Seen:
    """The facts that were read from one column."""

    low: float = math.inf
    high: float = -math.inf
    numeric: bool = True
    missing: bool = False
    texts: set[str] = field(default_factory=set)  # at most one more than `MOST_VALUES`

    def add(self, values: NDArray[Any]) -> None:
        """Add another block of the column."""
        if values.dtype.kind == "b":
            values = np.where(values, "true", "false")
        cells = {str(cell) for cell in values.tolist()}
        self.texts |= set(sorted(cells)[: MOST_VALUES + 1 - len(self.texts)])
        numbers = [_number(cell) for cell in cells - {""}]
        self.numeric = self.numeric and None not in numbers
        finite = [number for number in numbers if number is not None and math.isfinite(number)]
        self.missing = self.missing or len(finite) < len(cells)
        self.low, self.high = min([self.low, *finite]), max([self.high, *finite])

    def described(self, name: str | None, target: bool) -> tuple[dict[str, Any], str]:
        """Return the column of a schema, and a remark for the person who checks it."""
        column: dict[str, Any] = {"name": name}
        few = len(self.texts) <= MOST_VALUES
        labels = target and len(self.texts) <= _MOST_LABELS and all(text.isdigit() for text in self.texts)
        if self.numeric and not labels:
            if not self.low < self.high:
                return column | _BLANK, "holds no two different numbers"
            column |= {"low": _short(self.low), "high": _short(self.high)}
            return column, "has cells without a number, which train refuses" if self.missing else ""
        if not few:
            return column | _BLANK, f"holds more than {MOST_VALUES} different texts"
        return column | {"values": sorted(self.texts)}, ""


def draft(table: str, target: str | None) -> tuple[str, dict[str, str]]:
    """Return a draft as JSON, and remarks on columns that a person must check."""
    if table == table_files.EMBEDDED:
        return table_files.schema_of(table, target).to_json(), {}
    names = table_files.header(table, target)
    seen = {name: _Seen() for name in names}
    for block in table_files.columns(table, names):
        for name, values in block.items():
            seen[name].add(values)
    if not any(column.texts for column in seen.values()):
        raise InvalidValue(f"{table!r} has no records")
    described = {name: column.described(name, name == target) for name, column in seen.items()}
    features = [column for name, (column, _) in described.items() if name != target]
    aim = {"name": None, **_BLANK} if target is None else described[target][0]
    return data.draft(features, aim), {name: said for name, (_, said) in described.items() if said}


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _short(number: float) -> float:
    return int(number) if number.is_integer() and abs(number) < 2**53 else number
