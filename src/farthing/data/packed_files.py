"""Open files as bytes, by their first ones: unpack gzip, bzip2, xz and zip, and name what is no text."""

import bz2
import gzip
import lzma
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from farthing.errors import InvalidValue

_ZIP = b"PK\x03\x04"
_GZIP = b"\x1f\x8b"
_PACKED: dict[bytes, tuple[str, Callable[[Any], Any]]] = {
    _GZIP: ("gzip", lambda raw: gzip.GzipFile(fileobj=raw)),
    b"BZh": ("bzip2", bz2.BZ2File),
    b"\xfd7zXZ\x00": ("xz", lzma.LZMAFile),
}
_OTHERS = {
    b"\xd0\xcf\x11\xe0": "an Excel workbook: save it as CSV",
    b"ARROW1": "an Arrow (Feather) file: write it as Parquet",
    b"FEA1": "a Feather file: write it as Parquet",
    b"SQLite format 3": "an SQLite database: export the table as CSV",
    b"\x28\xb5\x2f\xfd": "packed by zstd: unpack it first",
    b"\x89HDF": "an HDF5 file: write the table as Parquet",
    b"%PDF": "a PDF document: save the table as CSV",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive: unpack it first",
    b"\x93NUMPY": "an array of numpy: write it as CSV or Parquet",
    b"\xff\xff\xff\xff": "an Arrow stream: write it as Parquet",
    b"PAR1": "a packed Parquet file: unpack it first",
    b'{"': "a JSON file: write the table as CSV or Parquet",
    b"[{": "a JSON file: write the table as CSV or Parquet",
    **dict.fromkeys(
        (b"<!", b"<?", b"<html", b"<HTML", b"<table"), "an HTML or XML document: save the table as CSV"
    ),
}
_TAR = slice(257, 262), b"ustar"
_SPOILT = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, zipfile.BadZipFile, NotImplementedError)


class Unpacked(NamedTuple):
    """A file of bytes that was unpacked where it had to be, and which share of the packed one is read."""

    file: Any
    share: Callable[[], float]


@contextmanager
def opened(path: str) -> Iterator[Unpacked]:
    """Open a file; one that cannot be read or unpacked is an `InvalidValue`, also later, while it is read."""
    kind = ""
    try:
        with open(path, "rb") as raw, ExitStack() as stack:
            size = os.fstat(raw.fileno()).st_size or 1
            first = raw.peek(16)[:16]
            _refuse_others(path, first)
            found = next((magic for magic in _PACKED if first.startswith(magic)), None)
            if found is None and path.endswith(".gz"):
                found = _GZIP
            file: Any = raw
            if first.startswith(_ZIP):
                kind = "zip"
                file = stack.enter_context(_member(path, raw))
            elif found is not None:
                kind, unpack = _PACKED[found]
                file = stack.enter_context(unpack(raw))
            _refuse_others(path, file.peek(_TAR[0].stop))
            yield Unpacked(file, lambda: min(1.0, raw.tell() / size))
    except _SPOILT:
        raise InvalidValue(f"{path!r} is not a complete {kind} file") from None
    except OSError as error:
        said = error.strerror or f"it is not a complete {kind} file"
        raise InvalidValue(f"{path!r} cannot be read: {said}") from None


def _refuse_others(path: str, first: bytes) -> None:
    """Refuse a file that begins with the bytes of another format."""
    for magic, what in _OTHERS.items():
        if first.startswith(magic):
            raise InvalidValue(f"{path!r} is {what}")
    place, mark = _TAR
    if first[place] == mark:
        raise InvalidValue(f"{path!r} is a tar archive: unpack it first")


@contextmanager
def _member(path: str, raw: Any) -> Iterator[Any]:
    """Yield the only file of a zip archive."""
    with zipfile.ZipFile(raw) as archive:
        names = [one for one in archive.namelist() if not one.endswith("/") and "__MACOSX" not in one]
        if "[Content_Types].xml" in names or "mimetype" in names:
            raise InvalidValue(f"{path!r} is a workbook or a document: save the table as CSV")
        if len(names) != 1:
            raise InvalidValue(f"{path!r} holds {len(names)} files: a zip archive must hold one table")
        if archive.getinfo(names[0]).flag_bits & 1:
            raise InvalidValue(f"{path!r} is encrypted: unpack it first")
        with archive.open(names[0]) as inner:
            yield inner
