"""Read CSV files with a header as columns of text, some thousand records at a time; unpack gzip.

The first line alone decides what separates the cells: commas, semicolons, tabs or bars, whichever it has most
of. Messages name the file, a requested column or a line's number, never a cell. They do not quote a header,
because the first line of a file without one is a record; a hint at a name that is like a wanted one is given
where the line holds another wanted name exactly, so that it is a header.
"""

import csv
import gzip
import io
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray

from farthing.errors import InvalidValue
from farthing.validate import did_you_mean

_BLOCK = 2**13  # rows held as text at a time
_LONGEST = 2**24  # characters of a line
_SAID = 8  # columns that are named in a message
_GZIP = b"\x1f\x8b"
DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}


class _Opened(NamedTuple):
    """An open file: its records as rows of cells, what separates them, and which share is read."""

    lines: Any
    delimiter: str
    share: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Csv:
    """The format of CSV files, which claims any file.

    Parameters
    ----------
    delimiter : str, optional
        What separates cells, one character. By default the first line decides.
    decimal : str, optional
        What numbers have before their fraction: a point, or a comma as well. By default a comma is accepted
        where semicolons separate the cells.
    seen : callable, optional
        Is told after each block which share of the file is read.
    """

    delimiter: str | None = None
    decimal: str | None = None
    seen: Callable[[float], None] | None = None

    def __post_init__(self) -> None:
        if self.delimiter is not None and (len(self.delimiter) != 1 or self.delimiter in '"\r\n'):
            raise InvalidValue(
                f"the delimiter must be one character, such as ';' or a tab, got {self.delimiter!r}"
            )
        if self.decimal not in (None, ".", ","):
            raise InvalidValue(f"the decimal mark must be '.' or ',', got {self.decimal!r}")
        if self.decimal == self.delimiter == ",":
            raise InvalidValue(
                "commas cannot both separate cells and begin fractions: give another delimiter"
            )

    def claims(self, path: str) -> bool:
        """Return whether a file may be CSV: any file may."""
        return True

    def header(self, path: str, column: str | None = None) -> list[str]:
        """Return the names of all columns; refuse a file without ``column``, which may have no header."""
        with self._opened(path) as opened:
            names = _first(path, opened)
            _places(path, names, [] if column is None else [column], opened.delimiter)
        return names

    def count(self, path: str, names: Iterable[str]) -> int:
        """Return the number of records; ``names`` must all be columns. No cell is read."""
        return sum(len(rows) for _, rows in self._blocks(path, names))

    def columns(self, path: str, names: Iterable[str]) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield the named columns, block by block."""
        for places, rows in self._blocks(path, names):
            cells = list(zip(*rows, strict=True))
            # objects, because an array of text gives every cell the size of the longest
            yield {name: np.array(cells[place], dtype=object) for name, place in places.items()}

    def commas(self, path: str) -> bool:
        """Return whether numbers of this file may have a comma before their fraction."""
        if self.decimal is not None:
            return self.decimal == ","
        with self._opened(path) as opened:
            return opened.delimiter == ";"

    def _blocks(self, path: str, names: Iterable[str]) -> Iterator[tuple[dict[str, int], list[list[str]]]]:
        """Yield the places of the named columns, with rows of cells, block by block."""
        with self._opened(path) as opened:
            first = _first(path, opened)
            places = _places(path, first, names, opened.delimiter)
            while block := list(islice(opened.lines, _BLOCK)):
                rows = [row for row in block if row]  # no empty lines
                if not {len(row) for row in rows} <= {len(first)}:
                    raise InvalidValue(
                        f"{path!r} is not a CSV table: not every record has as many cells as the header, "
                        f"{len(first)}"
                    )
                if rows:
                    yield places, rows
                if self.seen is not None:
                    self.seen(opened.share())

    @contextmanager
    def _opened(self, path: str) -> Iterator[_Opened]:
        """Open a file; any failure to read is an `InvalidValue`."""
        try:
            with open(path, "rb") as raw:
                size = os.fstat(raw.fileno()).st_size or 1
                packed = path.endswith(".gz") or raw.peek(2)[:2] == _GZIP
                inner: Any = gzip.GzipFile(fileobj=raw) if packed else raw
                with io.TextIOWrapper(inner, encoding="utf-8-sig", newline="") as file:
                    lines = _lines(file)
                    first = next(lines, "")
                    delimiter = self.delimiter or _sniffed(first)
                    rows = csv.reader(
                        chain([first] if first else [], lines),
                        delimiter=delimiter,
                        skipinitialspace=True,
                        strict=True,
                    )
                    yield _Opened(rows, delimiter, lambda: min(1.0, raw.tell() / size))
        except UnicodeDecodeError:  # the error's own text shows a byte of the file
            raise InvalidValue(
                f"{path!r} is not a CSV table: it is not UTF-8 text (save it as UTF-8, or convert it: "
                "iconv -f latin1 -t utf-8)"
            ) from None
        except csv.Error as error:
            raise InvalidValue(f"{path!r} is not a CSV table: {error}") from None
        except (EOFError, zlib.error, gzip.BadGzipFile):
            raise InvalidValue(f"{path!r} is not a complete gzip file") from None
        except OSError as error:
            raise InvalidValue(f"{path!r} cannot be read: {error.strerror or error}") from None


def _first(path: str, opened: _Opened) -> list[str]:
    """Return the names in the first line."""
    names = [name.strip() for name in next(opened.lines, [])]
    if not names:
        raise InvalidValue(f"{path!r} is empty: it needs a first line with the names of its columns")
    return names


def _sniffed(line: str) -> str:
    """Return the delimiter that a header has most of, outside of quotes; a comma where it has none."""
    bare = "".join(line.split('"')[::2])
    return max(DELIMITERS, key=bare.count)


def _lines(file: TextIO) -> Iterator[str]:
    """Yield lines one by one; an endless line, such as a device may give, does not fill the memory."""
    while line := file.readline(_LONGEST):
        if len(line) == _LONGEST:
            raise csv.Error(f"it has a line of more than {_LONGEST:,} characters")
        yield line


def _places(path: str, header: list[str], names: Iterable[str], delimiter: str) -> dict[str, int]:
    """Return the positions of the named columns; refuse all that are not there once, together."""
    wanted = list(names)
    is_header = any(name in header for name in wanted)  # and no record
    wrong = []
    for name in wanted:
        if header.count(name) > 1:
            wrong.append(f"two columns {name!r}")
        elif name not in header:
            wrong.append(f"no column {name!r}" + (did_you_mean(name, header) if is_header else ""))
    if wrong:
        between = DELIMITERS.get(delimiter, repr(delimiter))
        more = f" and {len(wrong) - _SAID} more like this" if len(wrong) > _SAID else ""
        raise InvalidValue(
            f"{path!r} has {', '.join(wrong[:_SAID])}{more}: its first line must name each column once, "
            f"between {between}"
        )
    return {name: header.index(name) for name in wanted}
