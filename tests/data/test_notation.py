"""Numbers and dates as people write them: what a cell means, and what is no number."""

import math
from datetime import date

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farthing.data import notation
from farthing.data.columns import Numeric, numbers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1,234.50", 1234.5),
        ("1,234,567", 1234567),
        ("1 234.5", 1234.5),
        ("1\u202f234", 1234),
        ("1'234.5", 1234.5),
        ("$1,234", 1234),
        ("-$3.50", -3.5),
        ("$-3.50", -3.5),
        ("3.50 €", 3.5),
        ("£20", 20),
        ("USD 20", 20),
        ("20 CHF", 20),
        ("R$ 1,234.50", 1234.5),
        ("US$20", 20),
        ("20 kr", 20),
        ("12,34,567.5", 1234567.5),
        ("\u20b91,23,456", 123456),
        ("'18", 18),
        ('="1,234"', 1234),
        ("12.5%", 12.5),
        ("12.5 %", 12.5),
        ("(300.25)", -300.25),
        ("($1,300)", -1300),
        ("\u22125", -5),
        ("5-", -5),
        (" 7 ", 7),
        ("1e3", 1000),
    ],
)
def test_a_number_is_read_as_a_person_reads_it(text: str, expected: float) -> None:
    assert notation.number(text) == expected
    assert Numeric("x", -1e9, 1e9).targets([text, "1"]).tolist() == [expected, 1.0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1,23",
        "1,23,45",
        "1,234,56,789",
        "ABC 20",
        "'",
        "''5",
        '="5',
        "12,34.5",
        "1,234 567",
        "70kg",
        "<25",
        "(5",
        "5)",
        "(-5)",
        "-5-",
        "12:30",
        "$",
        "1.2.3",
        "A1",
    ],
)
def test_what_is_no_number_is_none(text: str) -> None:
    assert math.isnan(notation.number(text))


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_plain_number_is_what_python_reads(number: float) -> None:
    assert notation.number(repr(number)) == number


@given(st.lists(st.sampled_from(["1.5", "2", "$3", "x", "1,000", "-4", ""]), min_size=1, max_size=8))
def test_a_cell_is_read_alike_whatever_stands_beside_it(cells: list[str]) -> None:
    together = numbers("x", np.array(cells, dtype=object))
    alone = np.concatenate([numbers("x", np.array([cell], dtype=object)) for cell in cells])
    np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize(
    ("text", "either", "declared"),
    [
        ("3,14", 3.14, 3.14),
        ("1.234,5", 1234.5, 1234.5),
        ("1.234.567,89", 1234567.89, 1234567.89),
        ("1.234", 1.234, 1234),  # only a declaration tells which
        ("2.5", 2.5, 2.5),
        ("1 234,5", 1234.5, 1234.5),
        ("1,234,567", 1234567, 1234567),
        ("1.234,50 €", 1234.5, 1234.5),
    ],
)
def test_decimal_commas(text: str, either: float, declared: float) -> None:
    assert notation.number(notation.point(text)) == either
    assert notation.number(notation.point(text, declared=True)) == declared


@given(st.dates(date(1970, 1, 1), date(2067, 12, 31)), st.sampled_from(sorted(notation._SHAPES)))
def test_a_date_is_read_in_the_way_it_was_written(day: date, way: str) -> None:
    text = day.strftime(way)
    assert way in notation.ways(text) or notation.ways(text) == [notation.ISO]
    read = notation.day(text, way)
    assert read == (day.replace(day=1) if "%d" not in way else day).toordinal()


def test_what_is_no_date_is_none() -> None:
    for text in ("", "31.02.2019", "12345678", "3.14", "99999999", "2019-13-01", "May", "1/2"):
        assert notation.ways(text) == []
    assert notation.ways("2019-12-31T10:00:00Z") == [notation.ISO]
    assert notation.swapped("%d/%m/%Y") == "%m/%d/%Y"
