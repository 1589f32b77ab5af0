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
from typing import NamedTuple, TextIO

from farthing import validate
from farthing.data import csv_cells, packed_files
from farthing.data.csv_cells import CsvCells
from farthing.errors import InvalidValue
from farthing.validate import did_you_mean, repeated

_BLOCK = 2**13  # rows held as text at a time
_BYTES = 2**19  # bytes that a kernel is given at a time
_LONGEST = 2**24  # characters of a line
_SAID = 8  # columns that are named in a message
DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}


class _Lines:
    """Lines of a file, counted; an endless one, such as a device may give, does not fill the memory."""

    def __init__(self, lines: TextIO) -> None:
        self._file, self.number, self.plain = lines, 0, True

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._file.readline(_LONGEST)
        if not line:
            raise StopIteration
        if len(line) == _LONGEST:
            raise _endless()
        self.number += 1
        self.plain = self.plain and line.endswith("\n")  # and not a carriage return alone
        return line


class _Opened(NamedTuple):
    """An open file: its records as rows of cells, its lines, the delimiter, and which share is read."""

    rows: Iterator[list[str]]
    lines: _Lines
    delimiter: str
    share: Callable[[], float]
    utf8: bool


@dataclass(slots=True)
class _Table:
    """The wanted columns of a file: how many it has, where those are, and how many records were read."""

    path: str
    width: int
    places: dict[str, int]
    done: int = 0

    def cells(self, block: list[list[str]]) -> CsvCells:
        """Return the wanted cells of some records, without blank lines."""
        rows = [row for row in block if row]
        if not {*map(len, rows)} <= {self.width}:
            rows = _cut(rows, self.width)
        if not {*map(len, rows)} <= {self.width}:
            odd = next(place for place, row in enumerate(rows) if len(row) != self.width)
            raise InvalidValue(
                f"{self.path!r} is not a CSV table: not every record has as many cells as the header, "
                f"{self.width} (record {self.done + odd + 1:,} after it is the first)"
            )
        self.done += len(rows)
        columns = list(zip(*rows, strict=True)) or [()] * self.width
        return CsvCells({name: columns[place] for name, place in self.places.items()}, len(rows))


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
            "a".encode(self.encoding or "utf-8")
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
            _places(path, names, [] if column is None else [column], opened.delimiter, self.header_line)
        return names

    def count(self, path: str, names: Iterable[str]) -> int:
        """Return the number of records; ``names`` must all be columns. No cell is read."""
        return sum(block.records for block in self.columns(path, names))

    def columns(self, path: str, names: Iterable[str]) -> Iterator[CsvCells]:
        """Yield the named columns, block by block."""
        wanted = list(names)
        with self._opened(path) as opened:
            first = _first(path, opened)
            places = _places(path, first, wanted, opened.delimiter, self.header_line)
            table = _Table(path, len(first), places)
            if not (opened.utf8 and opened.lines.plain and opened.delimiter != " "):
                yield from self._blocks(table, opened.rows, opened.share)
                return
        yield from self._quick(table, opened)

    def commas(self, path: str) -> bool:
        """Return whether numbers of this file may have a comma before their fraction."""
        if self.decimal is not None:
            return self.decimal == ","
        return self.delimiter_of(path) == ";"

    def delimiter_of(self, path: str) -> str:
        """Return what separates the cells of a file."""
        with self._opened(path) as opened:
            return opened.delimiter

    def _blocks(
        self, table: _Table, rows: Iterator[list[str]], share: Callable[[], float]
    ) -> Iterator[CsvCells]:
        """Yield the columns of all records that are left, read by Python's module."""
        while block := list(islice(rows, _BLOCK)):
            cells = table.cells(block)
            if cells.records:
                yield cells
            if self.seen is not None:
                self.seen(share())

    def _quick(self, table: _Table, opened: _Opened) -> Iterator[CsvCells]:
        """Yield the columns of a file in UTF-8, from below its header: by a kernel while lines are plain."""
        with _said_as(table.path, self.encoding), packed_files.opened(table.path) as (file, share):
            for _ in range(opened.lines.number):
                file.readline()
            while text := file.read(_BYTES):
                end = file.readline(_LONGEST)
                if len(end) == _LONGEST:
                    raise _endless()
                text += end if end.endswith(b"\n") or (not end and text.endswith(b"\n")) else end + b"\n"
                if not text.isascii():
                    text.decode()  # refused where it is not UTF-8
                cells = csv_cells.split(text, opened.delimiter, table.places, table.width)
                if cells is None:
                    more = io.TextIOWrapper(file, encoding="utf-8", newline="")
                    lines = chain(_Lines(io.StringIO(text.decode(), newline="")), _Lines(more))
                    yield from self._blocks(table, _rows(lines, opened.delimiter), share)
                    return
                table.done += cells.records
                if cells.records:
                    yield cells
                if self.seen is not None:
                    self.seen(share())

    @contextmanager
    def _opened(self, path: str) -> Iterator[_Opened]:
        """Open a file; any failure to read is an `InvalidValue`."""
        with _said_as(path, self.encoding), packed_files.opened(path) as (inner, share):
            encoding = (self.encoding or _encoding(inner.peek(4)[:4])).lower().replace("_", "-")
            utf8 = encoding in ("utf-8", "utf8", "utf-8-sig")
            with io.TextIOWrapper(inner, encoding="utf-8-sig" if utf8 else encoding, newline="") as file:
                lines = _Lines(file)
                for _ in range(self.header_line - 1):
                    next(lines, "")
                first = next((line for line in lines if line.strip()), "")
                delimiter = self.delimiter or _sniffed(first)
                if _said(first):  # as Excel writes it
                    first, delimiter = next(lines, ""), self.delimiter or _said(first)
                rows = _rows(chain([first] if first else [], lines), delimiter)
                yield _Opened(rows, lines, delimiter, share, utf8)


@contextmanager
def _said_as(path: str, encoding: str | None) -> Iterator[None]:
    """Raise an `InvalidValue` for text that is not a table, without what stands in it."""
    try:
        yield
    except UnicodeError:  # the error's own text shows a byte of the file
        raise InvalidValue(
            f"{path!r} is not a CSV table: it is not {encoding or 'UTF-8'} text (give --encoding, often "
            "cp1252, or save it as UTF-8)"
        ) from None
    except csv.Error as error:
        said = "a quote within a cell is not doubled" if "expected after" in str(error) else error
        raise InvalidValue(f"{path!r} is not a CSV table: {said}") from None


def _endless() -> csv.Error:
    return csv.Error(f"it has a line of more than {_LONGEST:,} characters")


def _rows(lines: Iterable[str], delimiter: str) -> Iterator[list[str]]:
    """Return the records of lines, each a list of cells."""
    if delimiter == " ":  # columns that are filled up with spaces
        lines = (" ".join(filter(None, line.rstrip(" \r\n").split(" "))) + "\n" for line in lines)
    skip = delimiter != " "
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST))  # a long cell is a cell
    return csv.reader(iter(lines), delimiter=delimiter, skipinitialspace=skip, strict=True)


def _first(path: str, opened: _Opened) -> list[str]:
    """Return the names in the first line."""
    names = [name.strip() for name in next(opened.rows, [])]
    if not names:
        raise InvalidValue(f"{path!r} is empty: it needs a first line with the names of its columns")
    return names


def _cut(rows: list[list[str]], width: int) -> list[list[str]]:
    """Return records without lines of spaces, and without an empty cell beyond the header's."""
    filled = [row for row in rows if len(row) > 1 or row[0] or width == 1]
    return [row[:-1] if len(row) == width + 1 and not row[-1] else row for row in filled]


def _encoding(first: bytes) -> str:
    """Return how a file is written that begins with these bytes: a mark of UTF-16, or every second one 0."""
    if first in (b"\xff\xfe\0\0", b"\0\0\xfe\xff"):
        return "utf-32"
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


def _places(path: str, header: list[str], names: Iterable[str], delimiter: str, line: int) -> dict[str, int]:
    """Return the positions of the named columns; refuse all that are not there once, together."""
    wanted = list(names)
    places, twice = {name: place for place, name in enumerate(header)}, {*repeated(header)}
    is_header = any(name in places for name in wanted)  # and no record
    wrong = []
    for name in wanted:
        if name in twice:
            wrong.append(f"two columns {name!r}")
        elif name not in places:
            wrong.append(f"no column {name!r}" + (did_you_mean(name, header) if is_header else ""))
    if wrong:
        between = DELIMITERS.get(delimiter, repr(delimiter))
        more = f" and {len(wrong) - _SAID} more like this" if len(wrong) > _SAID else ""
        where = "first line" if line == 1 else f"line {line}"
        raise InvalidValue(
            f"{path!r} has {', '.join(wrong[:_SAID])}{more}: its {where} must name each column once, "
            f"between {between}"
        )
    return {name: places[name] for name in wanted}
