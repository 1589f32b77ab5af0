"""Read Parquet files as columns of numbers and text, some thousand records at a time.

The declared type of a column alone decides how its cells are read, so that no record changes how others are
read. Fractions are floats, NaN if missing; dates and times are days (of the zone that the type names), NaT if
missing; whole numbers and booleans are Python's own; text is text, "" if missing, as in a CSV file. Messages
name the file, a requested column or a type, never a cell.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.errors import InvalidValue, Unsupported
from farthing.validate import did_you_mean, repeated

_BLOCK = 2**13  # rows held at a time
_BUFFER = 2**20  # bytes of a column that are read at a time
_MAGIC = b"PAR1"


def claims(path: str) -> bool:
    """Return whether a file looks like Parquet, by its first bytes or by its name."""
    try:
        with open(path, "rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC or path.endswith((".parquet", ".pq"))
    except OSError:
        return False


def header(path: str, column: str | None = None) -> list[str]:
    """Return the names of all columns; refuse a file without ``column``."""
    with _opened(path) as file:
        names: list[str] = file.schema_arrow.names
        _places(path, names, [] if column is None else [column])
    return names


def count(path: str, names: Iterable[str]) -> int:
    """Return the number of records; ``names`` must all be columns of a readable type."""
    with _opened(path) as file:
        _places(path, file.schema_arrow.names, names)
        for name in names:
            _kind(path, name, file.schema_arrow.field(name).type)
        return int(file.metadata.num_rows)


def columns(path: str, names: Iterable[str]) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield the named columns, block by block."""
    wanted = list(names)
    count(path, wanted)  # errors in the file's footer are raised before a record is read
    with _opened(path) as file:
        for batch in file.iter_batches(batch_size=_BLOCK, columns=wanted):
            yield {name: _values(path, name, batch.column(name)) for name in wanted}


def unreadable(path: str) -> dict[str, str]:
    """Return the columns whose type is none of those that are read, each with its type."""
    with _opened(path) as file:
        kinds = {name: file.schema_arrow.field(place).type for place, name in enumerate(header(path))}
        return {name: str(kind) for name, kind in kinds.items() if _known(kind) is None}


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    """Open a file; any failure to read is an `InvalidValue`."""
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError:
        raise Unsupported(f"{path!r} is a Parquet file, which needs pyarrow: pip install pyarrow") from None
    try:
        # otherwise whole groups of rows, or all of them, are read ahead into memory
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER) as file:
            yield file
    except arrow.ArrowException:  # the error's own text may show a byte of the file
        raise InvalidValue(f"{path!r} is not a complete Parquet file") from None
    except OSError as error:
        raise InvalidValue(f"{path!r} cannot be read: {error.strerror or 'it is damaged'}") from None


def _places(path: str, header: list[str], names: Iterable[str]) -> None:
    """Refuse all names that are not there once, together. The names stand apart from the records."""
    there, twice = {*header}, {*repeated(header)}
    wrong = [
        f"two columns {name!r}" if name in there else f"no column {name!r}{did_you_mean(name, header)}"
        for name in names
        if name in twice or name not in there
    ]
    if wrong:
        raise InvalidValue(f"{path!r} has {', '.join(wrong)}: each column must have a name of its own")


def _kind(path: str, name: str, kind: Any) -> str:
    """Return the kind of a column: ``text``, ``whole`` (booleans too), ``number`` or ``date``."""
    found = _known(kind)
    if found is None:
        raise InvalidValue(
            f"column {name!r} of {path!r} holds {kind}, which is no number, no text, no date and not true or "
            "false: leave it out, or store it as one of these"
        )
    return found


def _known(kind: Any) -> str | None:
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    if any(is_it(kind) for is_it in (types.is_string, types.is_large_string, types.is_null)):
        return "text"
    if str(kind) == "string_view":  # which older versions of pyarrow have no function for
        return "text"
    if types.is_integer(kind) or types.is_boolean(kind):
        return "whole"
    if types.is_floating(kind) or types.is_decimal(kind):
        return "number"
    if types.is_date(kind) or types.is_timestamp(kind):
        return "date"
    return None


def _values(path: str, name: str, column: Any) -> NDArray[Any]:
    """Return the values of a column as the module's docstring says, by its declared type alone."""
    import pyarrow as arrow
    from pyarrow import compute

    if arrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = _kind(path, name, column.type)
    if kind == "number":
        return np.asarray(column.cast(arrow.float64()).to_numpy(zero_copy_only=False), dtype=np.float64)
    if kind == "date":
        if getattr(column.type, "tz", None) is not None:  # the day at the place that the column's type names
            try:
                column = compute.local_timestamp(column)
            except arrow.ArrowInvalid:
                raise InvalidValue(
                    f"column {name!r} of {path!r} has times of a zone that is not known here: install "
                    "tzdata, or store days"
                ) from None
        return np.asarray(column.to_numpy(zero_copy_only=False)).astype("datetime64[D]")
    if kind == "text":
        # invalid UTF-8 in a cell affects only its own record
        cells = column.cast(arrow.binary()).fill_null(b"").to_pylist()
        return np.array([cell.decode(errors="replace") for cell in cells], dtype=object)
    # with a null among them, numpy would make floats of whole numbers and objects of booleans
    cells = column.fill_null(False if arrow.types.is_boolean(column.type) else 0)
    found = np.asarray(cells.to_numpy(zero_copy_only=False)).astype(object)
    found[np.asarray(column.is_null())] = ""
    return found
