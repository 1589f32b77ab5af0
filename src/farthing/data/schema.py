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
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from farthing.errors import InvalidValue
from farthing.queries import arrays
from farthing.validate import finite

Table = Mapping[str, ArrayLike]

DRAFTED = "drafted_from_private_data"  # the key that marks a draft, with which training is refused
_DRAFTED = "read from private records; covered by no guarantee: check every line, then delete this one"


@dataclass(frozen=True)
class Numeric:
    """A column of numbers with public bounds, which become [0, 1].

    Values beyond the bounds are clipped. A cell that is not a finite number becomes NaN, and its record
    contributes nothing (`farthing.data.tables.Table`): an error would reveal a record without a charge.

    Parameters
    ----------
    name : str
        The column's name in the table.
    low, high : float
        The public bounds, low below high.

    Examples
    --------
    >>> Numeric("age", 17, 90).targets([17, 250, "?"])
    array([17., 90., nan])
    """

    name: str
    low: float
    high: float

    def __post_init__(self) -> None:
        low, high = (
            finite(**{f"{name} of column {self.name!r}": getattr(self, name)}) for name in ("low", "high")
        )
        if not 0 < high - low < math.inf:
            raise InvalidValue(
                f"column {self.name!r}: low must be below high, got {self.low!r}, {self.high!r}"
            )

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Return the one feature that this column becomes."""
        return (self.name,)

    def encode(self, values: ArrayLike, out: NDArray[np.float64]) -> None:
        """Write the scaled values into `out`, of shape (rows, 1)."""
        low, high = float(self.low), float(self.high)
        out[:, 0] = (self.targets(values) - low) / (high - low)

    def targets(self, values: ArrayLike) -> NDArray[np.float64]:
        """Return the clipped values, the targets of a regression; NaN for a cell that is not a number."""
        numbers = _numbers(self.name, values)
        return np.where(np.isfinite(numbers), np.clip(numbers, float(self.low), float(self.high)), np.nan)

    def known(self, values: ArrayLike) -> bool:
        """Return whether every value is a finite number."""
        return bool(np.isfinite(_numbers(self.name, values)).all())

    def holds(self, values: ArrayLike) -> bool:
        """Return whether every value is a number between the bounds."""
        numbers = _numbers(self.name, values)
        return bool(((numbers >= self.low) & (numbers <= self.high)).all())


@dataclass(frozen=True)
class Categorical:
    """A column of values from a public vocabulary, encoded one-hot.

    Parameters
    ----------
    name : str
        The column's name in the table.
    values : tuple of str
        The vocabulary. A value outside it encodes as all zeros.

    Examples
    --------
    >>> Categorical("sex", ("Female", "Male")).codes(["Male", "not listed"])
    array([ 1, -1])
    """

    name: str
    values: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.values or len(set(self.values)) < len(self.values):
            raise InvalidValue(f"column {self.name!r} needs distinct values, got {self.values!r}")

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Return one feature for each value of the vocabulary, in its order."""
        return tuple(f"{self.name}={value}" for value in self.values)

    def codes(self, values: ArrayLike) -> NDArray[np.int64]:
        """Return the position of each value in the vocabulary, -1 where it is not in it."""
        position = {value: code for code, value in enumerate(self.values)}
        found = [position.get(v, -1) if isinstance(v, str) else -1 for v in np.asarray(values).tolist()]
        return np.array(found, dtype=np.int64)

    def encode(self, values: ArrayLike, out: NDArray[np.float64]) -> None:
        """Set the ones in `out`, zeros of shape (rows, len(values))."""
        codes = self.codes(values)
        (known,) = np.nonzero(codes >= 0)
        out[known, codes[known]] = 1.0

    def holds(self, values: ArrayLike) -> bool:
        """Return whether all values are in the vocabulary."""
        return bool((self.codes(values) >= 0).all())

    def targets(self, values: ArrayLike) -> NDArray[np.int64]:
        """Return the codes of labels, the targets of a classifier; -1 for one outside the vocabulary."""
        return self.codes(values)

    known = holds


@dataclass(frozen=True)
class Schema:
    """The public description of a table: its columns in order, and the target to predict.

    Parameters
    ----------
    columns : tuple of Numeric or Categorical
        The features. Every encoded feature lies in [0, 1], so a row has squared norm at most len(columns).
    target : Numeric or Categorical
        What to predict: a vocabulary asks for a classifier, bounds ask for a regression.

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

    columns: tuple[Numeric | Categorical, ...]
    target: Numeric | Categorical

    def __post_init__(self) -> None:
        names = [column.name for column in (*self.columns, self.target)]
        if len(names) < 2 or len(set(names)) < len(names):
            raise InvalidValue(f"a schema needs a column, a target and distinct names, got {names!r}")
        if isinstance(self.target, Categorical) and len(self.target.values) < 2:
            raise InvalidValue(
                f"the target {self.target.name!r} needs two values or more, got {self.target.values!r}"
            )

    @classmethod
    def from_json(cls, text: str) -> "Schema":
        """Read a schema from the text of `to_json`; the message names the key that is wrong."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidValue(f"a schema must be JSON: {error}") from None
        if isinstance(found, dict) and DRAFTED in found:
            raise InvalidValue(
                f"this is a draft that was read from private records: check every bound and value against "
                f"public knowledge, then delete {DRAFTED!r} from it"
            )
        if not isinstance(found, dict) or found.keys() != {"columns", "target"}:
            keys = sorted(found) if isinstance(found, dict) else type(found).__name__
            raise InvalidValue(f"a schema must have the keys 'columns' and 'target' and no other, got {keys}")
        if not isinstance(found["columns"], list):
            raise InvalidValue(f"'columns' of a schema must be a list, got {found['columns']!r}")
        columns = [_described(f"columns[{place}]", column) for place, column in enumerate(found["columns"])]
        return cls(tuple(columns), _described("target", found["target"]))

    def to_json(self) -> str:
        """Return the schema as JSON text, a line a column."""
        return _json([asdict(column) for column in self.columns], asdict(self.target))

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


def _json(columns: list[dict[str, Any]], target: dict[str, Any]) -> str:
    lines = [json.dumps(column, ensure_ascii=False, default=float) for column in (*columns, target)]
    return '{"columns": [\n  ' + ",\n  ".join(lines[:-1]) + '\n ],\n "target": ' + lines[-1] + "}"


def _described(key: str, found: Any) -> Numeric | Categorical:
    """Return a column from its JSON description. A key that a skeleton leaves empty counts as absent."""
    if not isinstance(found, dict) or not isinstance(found.get("name"), str) or not found["name"]:
        raise InvalidValue(f"{key!r} of a schema must be an object with a 'name', got {found!r}")
    name = found["name"]
    given = {word: value for word, value in found.items() if value is not None and value != []}
    if given.keys() == {"name", "low", "high"}:
        return Numeric(name, given["low"], given["high"])
    if given.keys() != {"name", "values"}:
        words = sorted(given.keys() - {"name"})
        raise InvalidValue(
            f"{key!r} of a schema must give column {name!r} either 'low' and 'high' or 'values', got {words}"
        )
    values = given["values"]
    if not isinstance(values, list) or not all(type(value) in (str, int) for value in values):
        raise InvalidValue(
            f"'values' of column {name!r} must be a list of texts, as they stand in the table, got {values!r}"
        )
    return Categorical(name, tuple(map(str, values)))


# Vocabularies as listed in UCI's adult.names, with "?" in the three columns UCI says have missing values.
# The lower bounds of age and hours are UCI's extraction rule (AAGE > 16, HRSWK > 0); 90 years, 99 hours and a
# gain of 99,999 are taken as the survey's top codes; the remaining bounds are round numbers.

# SHA-256 of the uncompressed bytes.


def _column(table: Table, name: str) -> NDArray[Any]:
    if name not in table:
        raise InvalidValue(f"the table has no column {name!r}")
    values = arrays.attempt(np.asarray, table[name], said=f"column {name!r} must hold one value a record")
    if values.ndim != 1:
        raise InvalidValue(f"column {name!r} must be one-dimensional, got {values.ndim} dimensions")
    return values


def _numbers(name: str, values: ArrayLike) -> NDArray[np.float64]:
    """Return numbers, NaN for a cell that is not one; refuse a column whose type is not numeric."""
    raw = arrays.attempt(np.asarray, values, said=f"column {name!r} must hold one value a record")
    # A date or a complex number would be cast to a float silently.
    if raw.dtype.kind not in "biufOUS":
        raise InvalidValue(f"column {name!r} must hold numbers, got {raw.dtype.type.__name__}")
    try:
        return np.asarray(raw, dtype=np.float64)
    except Exception:  # the message must not tell which cell, or its content
        return np.array([_number(cell) for cell in raw.tolist()], dtype=np.float64)


def _number(cell: Any) -> float:
    try:
        return math.nan if isinstance(cell, complex) else float(cell)
    except Exception:
        return math.nan


def find(name: str) -> Path | None:
    """Return the path of a data set that farthing does not ship, or None: for benchmarks and tests only.

    The folder is named by the environment variable FARTHING_DATA; if that is not set, it is ../shared/data
    relative to a checkout of the project.
    """
    folder = os.environ.get("FARTHING_DATA")
    path = (Path(folder) if folder else Path(__file__).parents[3].parent / "shared" / "data") / name
    return path if path.exists() else None
