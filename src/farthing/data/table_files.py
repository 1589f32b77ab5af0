"""Read tables for the command line: CSV or Parquet files with a public schema, or the embedded data.

Messages name files, columns and what was declared, never a cell of a table.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from farthing.data import notation, parquet_files
from farthing.data import schema as data
from farthing.data.adult import ADULT, load_adult
from farthing.data.columns import Categorical, Column, Date, Numeric, Unbounded
from farthing.data.csv_cells import CsvCells
from farthing.data.csv_files import DELIMITERS, Csv
from farthing.data.schema import Schema
from farthing.data.splitting import People, Split, Spool
from farthing.errors import InvalidValue
from farthing.validate import did_you_mean, repeated

WITHOUT_PRIVACY = "computed on this table itself, without noise: the guarantee does not cover these figures"
EMBEDDED = "adult"  # a name in place of a file: the data and the schema that come with farthing

Array = NDArray[np.float64]
T = TypeVar("T", bound=NDArray[Any] | int)
_YEARS = range(1500, 2500)
PLAIN = Csv()  # CSV files as their first line says


class FileFormat(Protocol):
    """A format of tables in files: a module such as `parquet_files`, or any object with these four functions.

    Messages may name the file and a wanted column, never a cell.
    """

    def claims(self, path: str) -> bool:
        """Return whether a file is of this format."""

    def header(self, path: str, column: str | None = None) -> list[str]:
        """Return the names of all columns; `InvalidValue` unless ``column`` is one."""

    def count(self, path: str, names: Iterable[str]) -> int:
        """Return how many records there are; `InvalidValue` unless all ``names`` are columns."""

    def columns(self, path: str, names: Iterable[str]) -> Iterator[Mapping[str, NDArray[Any]]]:
        """Yield the named columns, some thousand records at a time."""


# : The first format that claims a file reads it. CSV claims every file, so it is last.
FORMATS: list[FileFormat] = [parquet_files, PLAIN]


# --- schemas


def schema_of(name: str, target: str | None) -> Schema:
    """Return the schema that ``--schema`` names: a JSON file, or the embedded one."""
    if name == EMBEDDED:
        schema = ADULT
    else:
        try:
            schema = Schema.from_json(Path(name).read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise InvalidValue(f"--schema {name!r} cannot be read: {error.strerror or error}") from None
        except UnicodeDecodeError:
            raise InvalidValue(f"--schema {name!r} is not a JSON file: it is not UTF-8 text") from None
        except InvalidValue as error:
            raise InvalidValue(f"--schema {name}: {error}") from None
    if target in (None, schema.target.name):
        return schema
    feature = any(column.name == target for column in schema.columns)
    raise InvalidValue(
        f"--target must be the schema's target {schema.target.name!r}, got {target!r}"
        + (
            ", which the schema lists among the features"
            if feature
            else did_you_mean(str(target), [schema.target.name])
        )
    )


def declared(bounds: Sequence[str], values: Sequence[str], target: str | None) -> Schema:
    """Return a schema from ``--bounds NAME=LOW:HIGH`` and ``--values NAME=A,B``, including the target.

    Bounds of dates are written as YYYY-MM-DD.

    >>> declared(["age=17:90"], ["income=<=50K,>50K"], "income").target
    Categorical(name='income', values=('<=50K', '>50K'), other=False)
    """
    columns: dict[str, Any] = {column.name: column for column in declared_columns(bounds, values)}
    if target is None:
        raise InvalidValue("--bounds and --values need --target, the column to predict")
    if target not in columns:
        raise InvalidValue(
            f"--target must be declared as well, by --bounds {target}=LOW:HIGH or --values {target}=A,B"
            + did_you_mean(target, columns)
        )
    return Schema(tuple(column for name, column in columns.items() if name != target), columns[target])


def declared_columns(bounds: Sequence[str], values: Sequence[str]) -> list[Column]:
    """Return the columns that ``--bounds`` and ``--values`` declare; refuse all that are wrong at once."""
    makers = [partial(_bounded, text) for text in bounds], [partial(_listed, text) for text in values]
    given: list[Column] = data.collected([*makers[0], *makers[1]])
    names = [column.name for column in given]
    twice = repeated(names)
    if twice:
        raise InvalidValue(f"--bounds and --values must declare each column once, got {twice} twice")
    return given


def _bounded(text: str) -> Column:
    name, _, between = text.rpartition("=")
    low, _, high = between.partition(":")
    if name and between == "private":
        return Unbounded(name)
    if name and low.count("-") == high.count("-") == 2:
        return Date(name, low, high)
    try:
        if name:
            return Numeric(name, float(low), float(high))
    except ValueError:
        pass
    raise InvalidValue(
        "--bounds must be NAME=LOW:HIGH with LOW below HIGH (dates as YYYY-MM-DD), or NAME=private, got "
        f"{text!r}"
    )


def _listed(text: str) -> Categorical:
    name, _, values = text.partition("=")
    if not (name and values):
        raise InvalidValue(f"--values must be NAME=A,B with at least one value, got {text!r}")
    return Categorical(name, tuple(value.strip() for value in values.split(",")))


def missing(texts: Sequence[str]) -> tuple[dict[str, str], bool]:
    """Return the values of ``--missing NAME=VALUE``, and whether the word ``middle`` is among them."""
    given = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        if text != "middle":
            if not (name and value):
                raise InvalidValue(f"--missing must be NAME=VALUE or the word middle, got {text!r}")
            given[name] = value
    return given, "middle" in texts


def skeleton_of(table: str, target: str, csv: Csv = PLAIN) -> str:
    """Return a schema to fill in, with the names in the table's header."""
    names = named(table, target, csv)
    twice = repeated(names)
    if twice:
        raise InvalidValue(f"{table!r} has two columns {twice[0]!r}: its header must name each column once")
    return data.skeleton(names, target)


# --- records


def header(table: str, column: str | None = None, csv: Csv = PLAIN) -> list[str]:
    """Return the names of a table's columns; refuse a table without ``column``."""
    return _format(table, csv).header(table, column)


def named(table: str, column: str | None, csv: Csv = PLAIN) -> list[str]:
    """Return the names of a table's columns, for a command that prints them; hint at one like ``column``."""
    names = header(table, None, csv)
    if is_csv(table) and any(_a_cell(name, len(names)) for name in names):
        raise InvalidValue(
            f"line {csv.header_line} of {table!r} holds numbers, so it may be a record: write the names of "
            "columns above it, or say which line holds them (--header)"
        )
    if column is not None and column not in names:
        similar = did_you_mean(column, names)
        wrong = f"{table!r} has no column {column!r}{similar}"
        if is_csv(table) and not similar:
            mark = DELIMITERS.get(csv.delimiter_of(table), "other marks")
            wrong += (
                f" among the {len(names)} between {mark} of line {csv.header_line}: say what separates them "
                "(--delimiter), or which line names them (--header)"
            )
        raise InvalidValue(wrong)
    return names


def _a_cell(name: str, columns: int) -> bool:
    """Return whether a name is a number, and neither a year nor the number of a column."""
    if name.isdecimal():
        return not (int(name) <= columns or int(name) in _YEARS)
    return not math.isnan(notation.number(name))


def count(table: str, schema: Schema, csv: Csv = PLAIN) -> int:
    """Return the number of records, if the header has the schema's columns. No cell is read."""
    if table == EMBEDDED:
        return load_adult().split
    return _format(table, csv).count(table, _names(schema))


def columns(table: str, names: Iterable[str], csv: Csv = PLAIN) -> Iterator[Mapping[str, NDArray[Any]]]:
    """Yield the named columns of a file, some thousand records at a time."""
    wanted, form, done = list(names), _format(table, csv), 0
    total = 0 if form is csv or csv.seen is None else form.count(table, wanted)
    for block in form.columns(table, wanted):
        yield block
        if csv.seen is not None and total:
            done += len(block[wanted[0]])  # of a file whose blocks are arrays
            csv.seen(done / total)


def decoded(
    table: str, schema: Schema, csv: Csv = PLAIN, also: Sequence[str] = ()
) -> Iterator[tuple[Array, data.Table]]:
    """Yield features of unprotected records, to predict for, with their columns; refuse what is no number."""
    for block in blocks(table, schema, target=False, test=True, csv=csv, also=also):
        _decoded(table, schema, block, target=False)
        yield schema.encode(block), block


def blocks(
    table: str,
    schema: Schema,
    *,
    target: bool = True,
    test: bool = False,
    csv: Csv = PLAIN,
    also: Sequence[str] = (),
) -> Iterator[data.Table]:
    """Yield the columns that the schema names, and ``also`` others, some thousand records at a time."""
    for block in _as_written(table, schema, target=target, test=test, csv=csv, also=also):
        yield _typed(block, schema, csv, commas(table, csv))


def _typed(
    block: Mapping[str, NDArray[Any]], schema: Schema, csv: Csv, comma: bool
) -> Mapping[str, NDArray[Any]]:
    """Return a block whose columns of numbers are numbers, where it holds cells of a CSV file."""
    if not isinstance(block, CsvCells):
        return block
    plain = (*schema.columns, schema.target)
    numbers = {column.name for column in plain if isinstance(column, Numeric | Unbounded)}
    return {
        name: block.numbers(name, commas=comma, declared=csv.decimal == ",")
        if name in numbers
        else block[name]
        for name in block
    }


def _as_written(
    table: str,
    schema: Schema,
    *,
    target: bool = True,
    test: bool = False,
    csv: Csv = PLAIN,
    also: Sequence[str] = (),
) -> Iterator[Mapping[str, NDArray[Any]]]:
    """Yield the columns that the schema names, and ``also`` others, as a file holds them."""
    if table == EMBEDDED:
        if also:
            raise InvalidValue(f"the table {EMBEDDED!r} has no column {also[0]!r}")
        adult = load_adult()
        rows = slice(adult.split, None) if test else slice(adult.split)
        yield {name: np.asarray(values)[rows] for name, values in adult.table.items()}
        return
    names = _names(schema, target)
    yield from columns(table, [*names, *(name for name in also if name not in names)], csv)


class TrainingRows(NamedTuple):
    """Features in [0, 1] and targets of the records that are learnt from, and of those held out, if any."""

    X: NDArray[Any]
    y: NDArray[Any]
    held: tuple[NDArray[Any], NDArray[Any]] | None


def training_rows(
    table: str, schema: Schema, split: Split, *, strict: bool = False, csv: Csv = PLAIN
) -> TrainingRows:
    """Read the records of a table to learn from: features of a long table stay in a temporary file.

    Features within declared bounds are float32 in [0, 1], however many records there are. Where bounds are
    to be bought, numbers keep their own unit, as float64, and lie in the file from the first row on, so that
    an estimator treats any number of them alike.

    What is outside the schema is treated as in `read`; ``split`` says which records are learnt from.
    """
    names = _names(schema)
    if split.user in names:
        raise InvalidValue(f"--user {split.user!r} must not be in the schema: an identifier is no feature")
    also = [] if split.user is None else [split.user]
    plain = split.user is None and not split.share
    unbounded = any(isinstance(column, Unbounded) for column in schema.columns)
    learnt, held = (_Side(schema.width, unbounded) for _ in range(2))
    comma = commas(table, csv)
    for written in _as_written(table, schema, csv=csv, also=also):
        block = _typed(written, schema, csv, comma)
        if strict:
            _inside(table, schema, block)
        features, targets = schema.encode(block), _blank(schema.encode_target(block))
        if plain:
            learnt.add(features, targets, None)
            continue
        *masks, keys = split.sides(written, names)
        if split.user is None:
            learnt.add(features, targets, keys)
            continue
        for side, mask in zip((learnt, held), masks, strict=True):
            side.add(features[mask], targets[mask], [keys[place] for place in np.flatnonzero(mask)])
    if split.user is None and split.share:
        learnt.hold_out(split.share, held)
    kept = None if split.user is None else split.rows
    return TrainingRows(*learnt.value(kept), held.value(kept) if split.share else None)


class _Side:
    """Records of one side of a split: features, targets, and whose they are, in memory or in files."""

    def __init__(self, width: int, unbounded: bool) -> None:
        self._X = Spool(width, np.float64, most=0) if unbounded else Spool(width, np.float32)
        self._y = Spool(1, np.float64, most=2**25)
        self._people = People()

    def add(self, features: Array, targets: Array, whose: Sequence[bytes] | None) -> None:
        """Add records, of known people if ``whose`` is given."""
        self._X.add(features)
        self._y.add(targets[:, None])
        if whose is not None:
            self._people.add(whose)

    def hold_out(self, share: float, held: "_Side") -> None:
        """Move a share of the records to another side."""
        kept = ~self._people.drawn(share)
        self._X.keep(kept, held._X)
        self._y.keep(kept, held._y)

    def value(self, rows: int | None) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return features and targets, of each person the first ``rows``; None keeps all records."""
        if rows is not None:
            first = self._people.first(rows)
            self._X.keep(first)
            self._y.keep(first)
        return self._X.value(), self._y.value()[:, 0]


def read(
    table: str, schema: Schema, *, test: bool = False, strict: bool = False, csv: Csv = PLAIN
) -> tuple[Array, NDArray[Any]]:
    """Return features in [0, 1] and targets of all records of a table, which may be empty.

    Numbers beyond the schema's bounds are clipped, and a feature's value outside its vocabulary is encoded as
    zeros. A cell that is not a number, or an undeclared label, is NaN: its record contributes nothing.
    ``strict`` refuses all of that, which reveals facts about records without a charge; ``test``, for
    unprotected records, refuses undeclared labels and cells that are not numbers.
    """
    if not test and any(isinstance(column, Unbounded) for column in schema.columns):
        raise InvalidValue("only train and describe buy bounds: declare low and high of every column here")
    if not test:
        found = training_rows(table, schema, Split(), strict=strict, csv=csv)
        return found.X, found.y
    X, y = [np.zeros((0, schema.width))], list[NDArray[Any]]()
    for block in blocks(table, schema, test=True, csv=csv):
        _decoded(table, schema, block)
        X.append(schema.encode(block))
        y.append(schema.encode_target(block))
    return np.concatenate(X), filled(table, np.concatenate(y) if y else np.zeros(0, np.int64))


def _blank(targets: NDArray[Any]) -> Array:
    """Return targets as numbers, NaN for a label that is not declared."""
    return targets if targets.dtype.kind == "f" else np.where(targets < 0, np.nan, targets)


def budgets(table: str, column: str, schema: Schema, csv: Csv = PLAIN) -> Array:
    """Return the column that holds each record's own ε, which is public and no feature."""
    if table == EMBEDDED:
        raise InvalidValue(f"--budget-column must be a column of a file, the table {EMBEDDED!r} has none")
    if column in _names(schema):
        raise InvalidValue(
            f"--budget-column {column!r} is public, so it must not be in the schema: leave it out"
        )
    header(table, column, csv)
    blocks = [np.zeros(0)]
    for block in columns(table, [column], csv):
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


def held_out(
    test: str | None, table: str, schema: Schema, csv: Csv = PLAIN
) -> tuple[Array, NDArray[Any]] | None:
    """Read the table that ``--test`` names, if any; refuse the very table that is learnt from."""
    if test is None:
        return None
    if test != EMBEDDED and table != EMBEDDED and os.path.exists(test) and os.path.samefile(test, table):
        raise InvalidValue(
            f"--test must be another table, got {test!r} again: a figure about the records that were learnt "
            "from would not be private"
        )
    return read(test, schema, test=True, csv=csv)


def unreadable(table: str) -> dict[str, str]:
    """Return the columns that hold neither numbers nor text nor dates, and what they hold, by their types."""
    return {} if is_csv(table) else parquet_files.unreadable(table)


def is_csv(table: str) -> bool:
    """Return whether a file is read as CSV."""
    return isinstance(_format(table, PLAIN), Csv)


def _format(table: str, csv: Csv) -> FileFormat:
    found = next(each for each in FORMATS if each.claims(table))
    return csv if isinstance(found, Csv) else found


def _names(schema: Schema, target: bool = True) -> list[str]:
    return [column.name for column in (schema.columns + (schema.target,) * target)]


def filled(table: str, records: T) -> T:
    """Return records; refuse an empty table, where the number of records is public."""
    if (records if isinstance(records, int) else len(records)) == 0:
        raise InvalidValue(f"{table!r} has no records")
    return records


def _decoded(table: str, schema: Schema, block: data.Table, target: bool = True) -> None:
    for column in (*schema.columns, *((schema.target,) * target)):
        if not isinstance(column, Categorical) and not column.known(block[column.name]):
            what = "dates" if isinstance(column, Date) else "finite numbers"
            raise InvalidValue(
                f"column {column.name!r} of {table!r} must hold {what}: declare what replaces a missing one "
                "(--missing), and train again"
            )
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


def commas(table: str, csv: Csv) -> bool:
    """Return whether numbers of a file may have a comma before their fraction."""
    form = _format(table, csv) if table != EMBEDDED else None
    return isinstance(form, Csv) and form.commas(table)
