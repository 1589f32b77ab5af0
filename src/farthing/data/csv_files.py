"""Read CSV files with a header as columns of text, some thousand records at a time.

The first line alone decides what separates the cells: commas, semicolons, tabs or bars, whichever it has most
of; so do the first bytes whether the text is UTF-8 or UTF-16. Other encodings are declared: whether bytes are
valid depends on all records. Blank lines are no records, and a delimiter at the end of a record opens no cell
beyond the header's.

Messages name the file, a requested column or a record's number, never a cell. They do not quote a header,
because the first line of a file without one is a record; a hint at a name that is like a wanted one is given
where the line holds another wanted name exactly, so that it is a header.
"""

import csv
import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.data import packed_files
from farthing.errors import InvalidValue
from farthing.validate import did_you_mean

_BLOCK = 2**13  # rows held as text at a time
_LONGEST = 2**24  # characters of a line
_SAID = 8  # columns that are named in a message
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
    encoding : str, optional
        How text is written, such as cp1252. By default UTF-8, or UTF-16 where the first bytes say so.
    header_line : int, default 1
        The number of the line that names the columns; lines above it are skipped.
    seen : callable, optional
        Is told after each block which share of the file is read.
    """

    delimiter: str | None = None
    decimal: str | None = None
    encoding: str | None = None
    header_line: int = 1
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
        validate.count(**{"the line of the header": self.header_line})
        try:
            b"a".decode(self.encoding or "utf-8")
        except (LookupError, ValueError):
            raise InvalidValue(
                f"the encoding must be one of text, such as cp1252 or utf-16, got {self.encoding!r}"
            ) from None

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
        return self.delimiter_of(path) == ";"

    def delimiter_of(self, path: str) -> str:
        """Return what separates the cells of a file."""
        with self._opened(path) as opened:
            return opened.delimiter

    def _blocks(self, path: str, names: Iterable[str]) -> Iterator[tuple[dict[str, int], list[list[str]]]]:
        """Yield the places of the named columns, with rows of cells, block by block."""
        with self._opened(path) as opened:
            first = _first(path, opened)
            places = _places(path, first, names, opened.delimiter)
            done = 0
            while block := list(islice(opened.lines, _BLOCK)):
                rows = [row for row in block if row]  # no empty lines
                if not {*map(len, rows)} <= {len(first)}:
                    rows = _cut(rows, len(first))
                if not {*map(len, rows)} <= {len(first)}:
                    odd = next(place for place, row in enumerate(rows) if len(row) != len(first))
                    raise InvalidValue(
                        f"{path!r} is not a CSV table: not every record has as many cells as the header, "
                        f"{len(first)} (record {done + odd + 1:,} after it is the first)"
                    )
                done += len(rows)
                if rows:
                    yield places, rows
                if self.seen is not None:
                    self.seen(opened.share())

    @contextmanager
    def _opened(self, path: str) -> Iterator[_Opened]:
        """Open a file; any failure to read is an `InvalidValue`."""
        try:
            with packed_files.opened(path) as (inner, share):
                encoding = self.encoding or _encoding(inner.peek(4)[:4])
                signed = "utf-8-sig" if encoding.lower().replace("_", "-") in ("utf-8", "utf8") else encoding
                with io.TextIOWrapper(inner, encoding=signed, newline="") as file:
                    lines = _lines(file)
                    for _ in range(self.header_line - 1):
                        next(lines, "")
                    first = next((line for line in lines if line.strip()), "")
                    delimiter = self.delimiter or _sniffed(first)
                    if _said(first):  # as Excel writes it
                        first, delimiter = next(lines, ""), self.delimiter or _said(first)
                    whole: Iterator[str] = chain([first] if first else [], lines)
                    if delimiter == " ":  # columns that are filled up with spaces
                        whole = (" ".join(filter(None, line.split(" "))) for line in whole)
                    skip = delimiter != " "
                    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST))  # a long cell is a cell
                    rows = csv.reader(whole, delimiter=delimiter, skipinitialspace=skip, strict=True)
                    yield _Opened(rows, delimiter, share)
        except UnicodeError:  # the error's own text shows a byte of the file
            raise InvalidValue(
                f"{path!r} is not a CSV table: it is not {self.encoding or 'UTF-8'} text (give --encoding, "
                "often cp1252, or save it as UTF-8)"
            ) from None
        except csv.Error as error:
            raise InvalidValue(f"{path!r} is not a CSV table: {error}") from None


def _first(path: str, opened: _Opened) -> list[str]:
    """Return the names in the first line."""
    names = [name.strip() for name in next(opened.lines, [])]
    if not names:
        raise InvalidValue(f"{path!r} is empty: it needs a first line with the names of its columns")
    return names


def _cut(rows: list[list[str]], width: int) -> list[list[str]]:
    """Return records without lines of spaces, and without an empty cell beyond the header's."""
    filled = [row for row in rows if len(row) > 1 or row[0] or width == 1]
    return [row[:-1] if len(row) == width + 1 and not row[-1] else row for row in filled]


def _encoding(first: bytes) -> str:
    """Return how a file is written that begins with these bytes: a mark of UTF-16, or every second one 0."""
    if first[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "utf-16"
    if len(first) == 4 and first[1] == first[3] == 0:
        return "utf-16-le"
    return "utf-16-be" if len(first) == 4 and first[0] == first[2] == 0 else "utf-8"


def _said(line: str) -> str:
    """Return the delimiter that a line such as ``sep=;`` declares, nothing for any other line."""
    word, _, mark = line.strip("\r\n").partition("sep=")
    return mark if not word and len(mark) == 1 else ""


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
