"""CsvCells of CSV files: the kernel's are those of Python's module, for every file."""

import csv
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from farthing.data import csv_cells, csv_files, notation
from farthing.data.csv_cells import CsvCells
from farthing.data.csv_files import Csv
from farthing.errors import InvalidValue
from farthing.noise import native

quick = pytest.mark.skipif(native.kernels() is None, reason="no C compiler here")

cell = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6),
    st.sampled_from(
        ["1.5", " 2", "3 ", "", '"a"', '"a,b"', '"a""b"', '"a\nb"', 'x"y', "\r", "é", "-0", "1e5"]
    ),
)
lines = st.lists(st.lists(cell, min_size=2, max_size=4), max_size=6)


def read(content: bytes, kernel: bool, **options: Any) -> Any:
    """The columns a and b of a file, or the message of its refusal; ``kernel`` says whether one is used."""
    with pytest.MonkeyPatch.context() as patch:
        if not kernel:
            patch.setattr(csv_cells, "split", lambda *_: None)
        patch.setattr(csv_files, "_BYTES", 16)  # lines are cut in many places
        path = Path(FOLDER) / "a.csv"
        path.write_bytes(content)
        try:
            blocks = list(Csv(**options).columns(str(path), ["b", "a"]))
        except InvalidValue as error:
            return str(error)
        return {name: [cell for block in blocks for cell in block[name]] for name in "ab"}


@pytest.fixture(autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    global FOLDER
    FOLDER = tmp_path_factory.mktemp("cells")


FOLDER: Path


@quick
@given(lines, st.sampled_from(["\n", "\r\n", "\n\n", "\r"]), st.booleans())
@example([["1", "2"], ['"3"', '"4"']], "\n", True)
@example([["1", "2"], [" ", ""]], "\n", True)
@settings(max_examples=300)
def test_a_kernel_reads_what_pythons_module_reads(rows: Any, end: str, last: bool) -> None:
    text = end.join(",".join(row) for row in [["a", "b"], *rows]) + end * last
    assert read(text.encode(), kernel=True) == read(text.encode(), kernel=False)


@quick
def test_plain_lines_are_read_by_the_kernel_and_others_from_there_on_by_the_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[Any] = []
    split = csv_cells.split
    monkeypatch.setattr(csv_cells, "split", lambda *given: found.append(split(*given)) or found[-1])
    plain = "".join(f"{row},x{row}\n" for row in range(40))
    whole = f'a,b\n{plain}41,"two\nlines"\n{plain}'
    columns = read(whole.encode(), kernel=True)
    assert [one is None for one in found][-2:] == [False, True]
    rows = list(csv.reader(io.StringIO(whole)))[1:]
    assert columns == {"a": [a for a, _ in rows], "b": [b for _, b in rows]}


numbers = st.one_of(
    st.floats().map(repr),
    st.floats(-1e6, 1e6).map("{:.3f}".format),
    st.integers(-(10**20), 10**20).map(str),
    st.decimals(allow_nan=False, allow_infinity=False).map(str),
    st.text("0123456789.,-+eE %$ ", max_size=8),
)


@quick
@given(st.lists(numbers, max_size=20), st.sampled_from([(False, False), (True, False), (True, True)]))
@settings(max_examples=500)
def test_numbers_are_those_of_python_to_the_last_bit(cells: list[str], marks: tuple[bool, bool]) -> None:
    text = "".join(f"{cell.strip()}\tx\n" for cell in cells).encode()
    found = csv_cells.split(text, "\t", {"b": 1, "a": 0}, 2)
    if found is None:
        pytest.skip("without kernels")
    plain = CsvCells({"a": [cell.strip() for cell in cells]}, len(cells))
    commas, declared = marks
    mine, other = (one.numbers("a", commas=commas, declared=declared) for one in (found, plain))
    assert mine.tobytes() == other.tobytes() or np.array_equal(mine, other, equal_nan=True)
    assert [math.copysign(1, one) for one in mine if one == 0] == [
        math.copysign(1, o) for o in other if o == 0
    ]
    if not commas:
        expected = [notation.number(cell) for cell in cells]
        np.testing.assert_array_equal(mine, expected)


@quick
@given(st.lists(st.tuples(*[st.text("ab é;", max_size=4)] * 3), max_size=9))
def test_joined_cells_are_the_same_bytes(rows: list[tuple[str, str, str]]) -> None:
    rows = [tuple(cell.lstrip(" ") for cell in row) for row in rows if any(row)]  # type: ignore[misc]
    text = "".join(",".join(row) + "\n" for row in rows).encode()
    found = csv_cells.split(text, ",", {"c": 2, "a": 0}, 3)
    assert found is not None
    plain = CsvCells({"a": [row[0] for row in rows], "c": [row[2] for row in rows]}, len(rows))
    assert found.joined(["a", "c"]) == plain.joined(["a", "c"])
    assert found.records == len(rows)


def test_a_record_with_another_number_of_cells_is_named_wherever_it_stands() -> None:
    plain = "".join(f"{row},x\n" for row in range(40))
    refused = read(f"a,b\n{plain}secret\n{plain}".encode(), kernel=True)
    assert "(record 41 after it is the first)" in refused
    assert "secret" not in refused
    assert "not UTF-8" in read(f"a,b\n{plain}".encode() + b"1,secret\xff\n", kernel=True)
    beside = "".join(f"{row},x,y\n" for row in range(40))
    assert "not UTF-8" in read(f"a,b,c\n{beside}".encode() + b"1,2,secret\xff\n", kernel=True)
