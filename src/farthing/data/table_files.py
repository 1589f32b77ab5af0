"""Read tables for the command line: CSV or Parquet files with a public schema, or the embedded data.

Messages name files, columns and what was declared, never a cell of a table.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from farthing.data import csv_files, parquet_files
from farthing.data import schema as data
from farthing.data.adult import ADULT, load_adult
from farthing.data.schema import Categorical, Numeric, Schema
from farthing.errors import InvalidValue

WITHOUT_PRIVACY = "computed on this table itself, without noise: the guarantee does not cover these figures"
EMBEDDED = "adult"  # a name in place of a file: the data and the schema that come with farthing

Array = NDArray[np.float64]
T = TypeVar("T", bound=NDArray[Any] | int)


class FileFormat(Protocol):
    """A format of tables in files: a module such as `csv_files`, or any object with these four functions.

    Messages may name the file and a wanted column, never a cell.
    """

    def claims(self, path: str) -> bool:
        """Return whether a file is of this format."""

    def header(self, path: str, column: str | None = None) -> list[str]:
        """Return the names of all columns; `InvalidValue` unless ``column`` is one."""

    def count(self, path: str, names: Iterable[str]) -> int:
        """Return how many records there are; `InvalidValue` unless all ``names`` are columns."""

    def columns(self, path: str, names: Iterable[str]) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield the named columns, some thousand records at a time."""


# : The first format that claims a file reads it. CSV claims every file, so it is last.
FORMATS: list[FileFormat] = [parquet_files, csv_files]


# --- schemas


def schema_of(name: str, target: str | None) -> Schema:
    """Return the schema that ``--schema`` names: a JSON file, or the embedded one."""
    if name == EMBEDDED:
        schema = ADULT
    else:
        try:
            schema = Schema.from_json(Path(name).read_text(encoding="utf-8"))
        except OSError as error:
            raise InvalidValue(f"--schema must be a JSON file, {name!r}: {error.strerror or error}") from None
        except UnicodeDecodeError:
            raise InvalidValue(f"--schema must be a JSON file, {name!r} is not UTF-8 text") from None
        except InvalidValue as error:
            raise InvalidValue(f"--schema {name}: {error}") from None
    if target in (None, schema.target.name):
        return schema
    feature = any(column.name == target for column in schema.columns)
    raise InvalidValue(
        f"--target must be the schema's target {schema.target.name!r}, got {target!r}"
        + (", which the schema lists among the features" if feature else "")
    )


def declared(bounds: Sequence[str], values: Sequence[str], target: str | None) -> Schema:
    """Return a schema from ``--bounds NAME=LOW:HIGH`` and ``--values NAME=A,B``, including the target.

    >>> declared(["age=17:90"], ["income=<=50K,>50K"], "income").target
    Categorical(name='income', values=('<=50K', '>50K'))
    """
    given: list[Numeric | Categorical] = [*map(_bounded, bounds), *map(_listed, values)]
    columns = {column.name: column for column in given}
    if len(columns) < len(given):
        raise InvalidValue("--bounds and --values must declare each column once")
    if target is None:
        raise InvalidValue("--bounds and --values need --target, which of the columns to predict")
    if target not in columns:
        raise InvalidValue(
            f"--target must be declared as well, by --bounds {target}=LOW:HIGH or --values {target}=A,B"
        )
    return Schema(tuple(column for name, column in columns.items() if name != target), columns[target])


def _bounded(text: str) -> Numeric:
    name, _, between = text.partition("=")
    low, _, high = between.partition(":")
    try:
        if name:
            return Numeric(name, float(low), float(high))
    except ValueError:
        pass
    raise InvalidValue(f"--bounds must be NAME=LOW:HIGH with LOW below HIGH, got {text!r}")


def _listed(text: str) -> Categorical:
    name, _, values = text.partition("=")
    if not (name and values):
        raise InvalidValue(f"--values must be NAME=A,B with at least one value, got {text!r}")
    return Categorical(name, tuple(value.strip() for value in values.split(",")))


def skeleton_of(table: str, target: str) -> str:
    """Return a schema to fill in, with the names in the table's header."""
    return data.skeleton(header(table, target), target)


# --- records


def header(table: str, column: str | None = None) -> list[str]:
    """Return the names of a table's columns; refuse a table without ``column``."""
    return _format(table).header(table, column)


def count(table: str, schema: Schema) -> int:
    """Return the number of records, if the header has the schema's columns. No cell is read."""
    if table == EMBEDDED:
        return load_adult().split
    return _format(table).count(table, _names(schema))


def columns(table: str, names: Iterable[str]) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield the named columns of a file, some thousand records at a time."""
    yield from _format(table).columns(table, names)


def decoded(table: str, schema: Schema) -> Iterator[Array]:
    """Return features of unprotected records, to predict for; refuse a cell that is not a number."""
    for block in blocks(table, schema, target=False, test=True):
        _decoded(table, schema, block, target=False)
        yield schema.encode(block)


def blocks(table: str, schema: Schema, *, target: bool = True, test: bool = False) -> Iterator[data.Table]:
    """Yield the columns that the schema names, some thousand records at a time."""
    if table == EMBEDDED:
        adult = load_adult()
        rows = slice(adult.split, None) if test else slice(adult.split)
        yield {name: np.asarray(values)[rows] for name, values in adult.table.items()}
        return
    texts = {column.name for column in (*schema.columns, schema.target) if isinstance(column, Categorical)}
    for block in columns(table, _names(schema, target)):
        yield {name: _text(name, block[name]) if name in texts else block[name] for name in block}


def read(
    table: str, schema: Schema, *, test: bool = False, strict: bool = False
) -> tuple[Array, NDArray[Any]]:
    """Return features in [0, 1] and targets of all records of a table, which may be empty.

    Numbers beyond the schema's bounds are clipped, and a feature's value outside its vocabulary is encoded as
    zeros. A cell that is not a number, or an undeclared label, is NaN: its record contributes nothing.
    ``strict`` refuses all of that, which reveals facts about records without a charge; ``test``, for
    unprotected records, refuses undeclared labels and cells that are not numbers.
    """
    X, y = [np.zeros((0, schema.width))], [np.zeros(0, np.int64 if test else np.float64)]
    for block in blocks(table, schema, test=test):
        if test:
            _decoded(table, schema, block)
        if strict:
            _inside(table, schema, block)
        X.append(schema.encode(block))
        codes = schema.encode_target(block)
        y.append(codes if test or codes.dtype.kind == "f" else np.where(codes < 0, np.nan, codes))
    return np.concatenate(X), filled(table, np.concatenate(y)) if test else np.concatenate(y)


def budgets(table: str, column: str, schema: Schema) -> Array:
    """The column of a table that holds each record's own ε, which is public and no feature."""
    if table == EMBEDDED:
        raise InvalidValue(f"--budget-column must be a column of a file, the table {EMBEDDED!r} has none")
    if column in _names(schema):
        raise InvalidValue(
            f"--budget-column {column!r} is public, so it must not be in the schema: leave it out"
        )
    header(table, column)
    blocks = [np.zeros(0)]
    for block in columns(table, [column]):
        try:
            blocks.append(np.asarray(block[column]).astype(np.float64))
        except (TypeError, ValueError):
            blocks.append(np.full(1, np.nan))
    values = np.concatenate(blocks)
    if not (np.isfinite(values) & (values > 0)).all():
        raise InvalidValue(
            f"--budget-column {column!r} of {table!r} must hold finite numbers above 0, and does not"
        )
    return values


def held_out(test: str | None, table: str, schema: Schema) -> tuple[Array, NDArray[Any]] | None:
    """Read the table that ``--test`` names, if any; refuse the very table that is learnt from."""
    if test is None:
        return None
    if test != EMBEDDED and table != EMBEDDED and os.path.exists(test) and os.path.samefile(test, table):
        raise InvalidValue(
            f"--test must be another table, got {test!r} again: a figure about the records that were learnt "
            "from would not be private"
        )
    return read(test, schema, test=True)


def _format(table: str) -> FileFormat:
    return next(each for each in FORMATS if each.claims(table))


def _names(schema: Schema, target: bool = True) -> list[str]:
    return [column.name for column in (schema.columns + (schema.target,) * target)]


def filled(table: str, records: T) -> T:
    """Return records; refuse an empty table, where the number of records is public."""
    if (records if isinstance(records, int) else len(records)) == 0:
        raise InvalidValue(f"{table!r} has no records")
    return records


def _decoded(table: str, schema: Schema, block: data.Table, target: bool = True) -> None:
    for column in schema.columns + (schema.target,) * target:
        if isinstance(column, Numeric) and not column.known(block[column.name]):
            raise InvalidValue(f"column {column.name!r} of {table!r} must hold finite numbers")
    if target and not schema.target.known(block[schema.target.name]):
        raise InvalidValue(
            f"column {schema.target.name!r} of {table!r} must hold only values that the schema lists"
        )


def _inside(table: str, schema: Schema, block: data.Table) -> None:
    for column in (*schema.columns, schema.target):
        if not column.holds(block[column.name]):
            raise InvalidValue(
                f"column {column.name!r} of {table!r} has values that the schema does not list or bound, "
                "which --strict refuses"
            )


def _text(name: str, values: NDArray[Any]) -> NDArray[Any]:
    """Return whole numbers and booleans as text, as they would stand in a CSV file."""
    if values.dtype.kind == "b":
        return np.where(values, "true", "false")
    if values.dtype.kind == "f":
        raise InvalidValue(
            f"column {name!r} holds fractions, which no vocabulary lists: declare low and high, or store text"
        )
    return values.astype(np.str_) if values.dtype.kind in "iu" else values
