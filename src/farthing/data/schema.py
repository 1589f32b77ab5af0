"""Describe tables by public schemas: bounds and vocabularies are declared, never learnt from the records.

Scaling a column by its own minimum and maximum, or listing the categories that happen to occur, reads the
private records outside the ledger. A `Schema` is written down beforehand, from a code book, so encoding costs
no budget:

>>> schema = Schema(
...     columns=(Numeric("age", 17, 90), Categorical("sex", ("Female", "Male"))),
...     target=Categorical("income", ("<=50K", ">50K")),
... )
>>> schema.feature_names
('age', 'sex=Female', 'sex=Male')
>>> schema.encode({"age": [17, 250], "sex": ["Male", "not listed"]})
array([[0., 0., 1.],
       [1., 0., 0.]])
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from farthing.data.columns import Categorical, Column, Date, Numeric, Unbounded
from farthing.errors import InvalidValue
from farthing.queries import arrays
from farthing.validate import did_you_mean, read_json, repeated

__all__ = [
    "CHECKED",
    "DRAFTED",
    "Categorical",
    "Column",
    "Date",
    "Numeric",
    "Schema",
    "Table",
    "draft",
    "find",
    "skeleton",
]

Table = Mapping[str, ArrayLike]

DRAFTED = "drafted_from_private_data"  # the key that marks a draft, with which training is refused
CHECKED = "checked_by"  # the key that names who checked it
_DRAFTED = (
    "read from private records; covered by no guarantee: check every line, then replace this one by "
    f'"{CHECKED}": "name, date"'
)


@dataclass(frozen=True)
class Schema:
    """The public description of a table: its columns in order, and the target to predict.

    Parameters
    ----------
    columns : tuple of Numeric, Categorical or Date
        The features. Every encoded feature lies in [0, 1].
    target : Numeric or Categorical
        What to predict: a vocabulary asks for a classifier, bounds ask for a regression.
    checked_by : str, default ""
        Who checked that all of it is public knowledge, and when. A report names that person; without one it
        says that the guarantee is void if anything here was read from the records.

    Raises
    ------
    InvalidValue
        For names that occur twice, no column, or a target with one value.

    Examples
    --------
    >>> schema = Schema((Numeric("age", 0, 100),), Categorical("rich", ("no", "yes")))
    >>> schema.encode({"age": [20, 60]}).ravel(), schema.encode_target({"rich": ["no", "yes"]})
    (array([0.2, 0.6]), array([0, 1]))
    >>> Schema.from_json(schema.to_json()) == schema
    True
    """

    columns: tuple[Column, ...]
    target: Numeric | Categorical
    checked_by: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.checked_by, str):
            raise InvalidValue(f"{CHECKED!r} of a schema must be a text, got {self.checked_by!r}")
        names = [column.name for column in (*self.columns, self.target)]
        if len(names) < 2:
            raise InvalidValue(f"a schema needs a column beside its target, got only {names!r}")
        twice = repeated(names)
        if twice:
            raise InvalidValue(
                f"a schema must describe each column once, got {twice[0]!r} twice in {names!r}"
            )
        if isinstance(self.target, Date | Unbounded):
            raise InvalidValue(f"the target {self.target.name!r} must have values or bounds of numbers")
        if isinstance(self.target, Categorical) and len(self.target.values) < 2:
            raise InvalidValue(
                f"the target {self.target.name!r} needs two values or more, got {self.target.values!r}"
            )
        if getattr(self.target, "other", False) or getattr(self.target, "missing", None) is not None:
            raise InvalidValue(
                f"the target {self.target.name!r} must have no 'missing' and no 'other': a record without a "
                "declared target counts as nothing"
            )

    @classmethod
    def from_json(cls, text: str) -> "Schema":
        """Read a schema from the text of `to_json`; the message names the key that is wrong."""
        try:
            found = read_json(text)
        except ValueError as error:
            raise InvalidValue(f"a schema must be JSON: {error}") from None
        if isinstance(found, dict) and DRAFTED in found:
            raise InvalidValue(
                f"this is a draft that was read from private records: check every bound and value against "
                f"public knowledge, then replace {DRAFTED!r} by {CHECKED!r} with your name and the date"
            )
        if not isinstance(found, dict) or found.keys() - {CHECKED} != {"columns", "target"}:
            keys = sorted(found) if isinstance(found, dict) else type(found).__name__
            raise InvalidValue(
                f"a schema must have the keys 'columns' and 'target' and may have {CHECKED!r}, got {keys}"
            )
        if not isinstance(found["columns"], list):
            raise InvalidValue(f"'columns' of a schema must be a list, got {found['columns']!r}")
        keys = [*(f"columns[{place}]" for place in range(len(found["columns"]))), "target"]
        parts = zip(keys, [*found["columns"], found["target"]], strict=True)
        described = collected(partial(_described, *part) for part in parts)
        return cls(tuple(described[:-1]), described[-1], found.get(CHECKED, ""))

    def to_json(self) -> str:
        """Return the schema as JSON text, a line a column."""
        text = _json([_declared(column) for column in self.columns], _declared(self.target))
        return (
            text
            if not self.checked_by
            else f"{{{json.dumps(CHECKED)}: {json.dumps(self.checked_by)},\n {text[1:]}"
        )

    def without(self, names: Iterable[str]) -> "Schema":
        """Return the schema without some columns; refuse names that it does not have."""
        dropped = set(names)
        self._refuse_unknown(dropped)
        return replace(self, columns=tuple(column for column in self.columns if column.name not in dropped))

    def with_missing(self, values: Mapping[str, Any], middle: bool = False) -> "Schema":
        """Return the schema with public values in place of missing numbers and dates.

        ``middle`` gives every column of numbers or dates that has none the middle of its bounds.
        """
        self._refuse_unknown(values)
        return replace(self, columns=tuple(_replacing(column, values, middle) for column in self.columns))

    def _refuse_unknown(self, names: Iterable[str]) -> None:
        known = [column.name for column in self.columns]
        wrong = [f"{name!r}{did_you_mean(name, known)}" for name in names if name not in known]
        if wrong:
            raise InvalidValue(f"the schema has no column {' and no column '.join(wrong)} among its features")

    @property
    def bounds(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return what every feature lies between: 0 and 1, NaN where its bounds are to be bought."""
        ends = [np.nan if isinstance(c, Unbounded) else 1.0 for c in self.columns for _ in c.feature_names]
        high = np.array(ends)
        return np.where(np.isnan(high), np.nan, 0.0), high

    def with_bounds(self, low: NDArray[np.float64], high: NDArray[np.float64]) -> "Schema":
        """Return the schema with bounds in place of those that were to be bought, one a feature."""
        columns, place = list[Column](), 0
        for column in self.columns:
            if isinstance(column, Unbounded):
                column = Numeric(column.name, float(low[place]), float(high[place]))
            columns.append(column)
            place += len(column.feature_names)
        return replace(self, columns=tuple(columns))

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Return the names of the columns of `encode`: 'age', 'sex=Female', and so on."""
        return tuple(name for column in self.columns for name in column.feature_names)

    @property
    def width(self) -> int:
        """Return the number of features that `encode` makes of a row."""
        return len(self.feature_names)

    def encode(self, table: Table) -> NDArray[np.float64]:
        """Return features of shape (rows, width) in [0, 1], NaN for a cell that is not a number.

        Columns that the schema does not name are left out.
        """
        rows = len(_column(table, self.columns[0].name))
        features = np.zeros((rows, self.width))
        start = 0
        for column in self.columns:
            values = _column(table, column.name)
            if len(values) != rows:
                raise InvalidValue(
                    f"columns must be equally long: {column.name!r} and {self.columns[0].name!r} are not"
                )
            stop = start + len(column.feature_names)
            column.encode(values, features[:, start:stop])
            start = stop
        return features

    def encode_target(self, table: Table) -> NDArray[Any]:
        """Return each record's label as its position in `target.values`, or its number within the bounds.

        -1 stands for an unknown label, NaN for a cell that is not a number.
        """
        return self.target.targets(_column(table, self.target.name))


def skeleton(names: Sequence[str], target: str) -> str:
    """Return a schema to fill in: for every column either low and high, or values; other keys may stay.

    >>> print(skeleton(["age", "income"], "income"))
    {"columns": [
      {"name": "age", "low": null, "high": null, "values": []}
     ],
     "target": {"name": "income", "low": null, "high": null, "values": []}}
    """
    blank: list[dict[str, Any]] = [
        {"name": name, "low": None, "high": None, "values": []} for name in (*names, target)
    ]
    return _json([column for column in blank[:-1] if column["name"] != target], blank[-1])


def draft(columns: list[dict[str, Any]], target: dict[str, Any]) -> str:
    """Return a schema with bounds and values from records, refused until a person deletes the mark."""
    return f"{{\n {json.dumps(DRAFTED)}: {json.dumps(_DRAFTED)},\n {_json(columns, target)[1:]}"


def collected(makers: Iterable[Callable[[], Any]]) -> list[Any]:
    """Return what every one of some functions makes, or raise what all of them refuse, at once."""
    made, problems = [], []
    for make in makers:
        try:
            made.append(make())
        except InvalidValue as error:
            problems.append(str(error))
    if len(problems) == 1:
        raise InvalidValue(problems[0])
    if problems:
        numbered = "; ".join(f"({place}) {problem}" for place, problem in enumerate(problems, 1))
        raise InvalidValue(f"{len(problems)} problems: {numbered}")
    return made


def _declared(column: Column) -> dict[str, Any]:
    """Return what is declared of a column, without what is left out."""
    return {word: value for word, value in asdict(column).items() if value is not None and value is not False}


def _replacing(column: Column, values: Mapping[str, Any], middle: bool) -> Column:
    """Return the column with the value that replaces a missing one."""
    value = values.get(column.name)
    if isinstance(column, Unbounded):
        if value is not None:
            raise InvalidValue(
                f"column {column.name!r} has no declared bounds: declare them to replace a cell"
            )
        return column
    if isinstance(column, Categorical):
        if value is not None:
            raise InvalidValue(
                f"column {column.name!r} has a vocabulary: list the empty text among its values, or declare "
                '"other": true'
            )
        return column
    if value is None and middle and column.missing is None:
        return column.with_middle()
    if value is None:
        return column
    if isinstance(column, Date):
        return replace(column, missing=value)
    try:
        return replace(column, missing=float(value))
    except ValueError as error:
        if isinstance(error, InvalidValue):
            raise
    raise InvalidValue(f"the missing value of column {column.name!r} must be a number, got {value!r}")


def _json(columns: list[dict[str, Any]], target: dict[str, Any]) -> str:
    lines = [json.dumps(column, ensure_ascii=False, default=float) for column in (*columns, target)]
    return '{"columns": [\n  ' + ",\n  ".join(lines[:-1]) + '\n ],\n "target": ' + lines[-1] + "}"


_KINDS: dict[frozenset[str], type[Column]] = {
    frozenset({"low", "high"}): Numeric,
    frozenset({"values"}): Categorical,
    frozenset({"first", "last"}): Date,
    frozenset({"bounds"}): Unbounded,
}
_OPTIONAL: dict[type[Column], set[str]] = {
    Numeric: {"missing"},
    Categorical: {"other"},
    Date: {"missing", "format"},
    Unbounded: set(),
}


def _described(key: str, found: Any) -> Any:
    """Return a column from its JSON description. A key that a skeleton leaves empty counts as absent."""
    if not isinstance(found, dict) or not isinstance(found.get("name"), str) or not found["name"]:
        raise InvalidValue(f"{key!r} of a schema must be an object with a 'name', got {found!r}")
    name = found["name"]
    given = {word: value for word, value in found.items() if value is not None and value != []}
    words = given.keys() - {"name"}
    kind = next((one for needed, one in _KINDS.items() if needed <= words), None)
    needed = next((needed for needed, one in _KINDS.items() if one is kind), frozenset())
    if kind is None or not words - needed <= _OPTIONAL[kind]:
        known = sorted({*_OPTIONAL[Numeric], *_OPTIONAL[Categorical], *_OPTIONAL[Date], *_ALL})
        unknown = "".join(
            f"; there is no key {word!r}{did_you_mean(word, known)}" for word in sorted(words - {*known})
        )
        empty = "" if words else ", all of them empty" if len(found) > 1 else " beside 'name'"
        raise InvalidValue(
            f"{key!r} of a schema must give column {name!r} either 'low' and 'high' or 'values' or 'first' "
            f"and 'last', got {sorted(words or found.keys() - {'name'})}{empty}{unknown}"
        )
    if kind is not Categorical:
        return kind(**given)
    values = given.pop("values")
    if not isinstance(values, list) or not all(type(value) in (str, int) for value in values):
        raise InvalidValue(
            f"'values' of column {name!r} must be a list of texts, as they stand in the table, got {values!r}"
        )
    return Categorical(values=tuple(map(str, values)), **given)


_ALL = frozenset().union(*_KINDS)


def _column(table: Table, name: str) -> NDArray[Any]:
    if name not in table:
        raise InvalidValue(f"the table has no column {name!r}")
    return arrays.column(table[name], f"column {name!r}")


def find(name: str) -> Path | None:
    """Return the path of a data set that farthing does not ship, or None: for benchmarks and tests only.

    The folder is named by the environment variable FARTHING_DATA; if that is not set, it is ../shared/data
    relative to a checkout of the project.
    """
    folder = os.environ.get("FARTHING_DATA")
    path = (Path(folder) if folder else Path(__file__).parents[3].parent / "shared" / "data") / name
    return path if path.exists() else None
