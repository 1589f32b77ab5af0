"""Read CSV files with a header as columns of text, some thousand records at a time; unpack ``.gz``.

Messages name the file, a requested column or a line's number, never a cell. They never quote a header,
because the first line of a file without one is a record.
"""

import csv
import gzip
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from farthing.errors import InvalidValue

_BLOCK = 2**13  # rows held as text at a time
_LONGEST = 2**24  # characters of a line


def claims(path: str) -> bool:
    """Return whether a file may be CSV: any file may."""
    return True


def header(path: str, column: str | None = None) -> list[str]:
    """Return the names of all columns; refuse a file without ``column``, which may have no header."""
    with _opened(path) as lines:
        names: list[str] = next(lines, [])
        _places(path, names, [] if column is None else [column])
    return names


def count(path: str, names: Iterable[str]) -> int:
    """Return the number of records; ``names`` must all be columns. No cell is read."""
    with _opened(path) as lines:
        _, rows = _records(path, lines, names)
        return sum(1 for _ in rows)


def columns(path: str, names: Iterable[str]) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield the named columns, block by block."""
    with _opened(path) as lines:
        places, rows = _records(path, lines, names)
        while block := list(islice(rows, _BLOCK)):
            yield _block(block, places)


def _records(path: str, lines: Any, names: Iterable[str]) -> tuple[dict[str, int], Iterator[list[str]]]:
    """Return the positions of the named columns, and the records as rows of cells."""
    first: list[str] = next(lines, [])
    return _places(path, first, names), _rows(path, lines, len(first))


def _rows(path: str, lines: Any, width: int) -> Iterator[list[str]]:
    for row in lines:
        if row and len(row) != width:
            raise InvalidValue(
                f"{path!r} is not a CSV table: not every record has as many cells as the header, {width}"
            )
        if row:  # not an empty line
            yield row


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    """Yield the lines of a file, split into cells; any failure to read is an `InvalidValue`."""
    try:
        with (gzip.open if path.endswith(".gz") else open)(
            path, "rt", encoding="utf-8-sig", newline=""
        ) as file:
            yield csv.reader(_lines(file), skipinitialspace=True, strict=True)
    except UnicodeDecodeError:  # the error's own text shows a byte of the file
        raise InvalidValue(f"{path!r} is not a CSV table: it is not UTF-8 text") from None
    except csv.Error as error:
        raise InvalidValue(f"{path!r} is not a CSV table: {error}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise InvalidValue(f"{path!r} is not a complete gzip file") from None
    except OSError as error:
        raise InvalidValue(f"{path!r} cannot be read: {error.strerror or error}") from None


def _lines(file: TextIO) -> Iterator[str]:
    """Yield lines one by one; an endless line, such as a device may give, does not fill the memory."""
    while line := file.readline(_LONGEST):
        if len(line) == _LONGEST:
            raise csv.Error(f"it has a line of more than {_LONGEST:,} characters")
        yield line


def _places(path: str, header: list[str], names: Iterable[str]) -> dict[str, int]:
    """Return the positions of the named columns."""
    if not header:
        raise InvalidValue(f"{path!r} is empty: it needs a first line with the names of its columns")
    places = {}
    for name in names:
        if header.count(name) != 1:
            what = "two columns" if name in header else "no column"
            raise InvalidValue(
                f"{path!r} has {what} {name!r}: its first line must name each column once, between commas"
            )
        places[name] = header.index(name)
    return places


def _block(rows: list[list[str]], places: dict[str, int]) -> dict[str, NDArray[Any]]:
    # objects, because an array of text gives every cell the size of the longest
    return {name: np.array([row[place] for row in rows], dtype=object) for name, place in places.items()}
