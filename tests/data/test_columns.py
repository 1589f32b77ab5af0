"""Columns: missing values, dates, others, and the ways in which a value may be written."""

import math
from datetime import date, datetime
from typing import Any

import numpy as np
import pytest

from farthing.data.columns import Categorical, Date, Numeric, Unbounded, numbers
from farthing.data.schema import Schema
from farthing.errors import InvalidValue

RICH = Categorical("rich", ("no", "yes"))


def encoded(column: Numeric | Categorical | Date, values: object) -> list[list[float]]:
    rows: list[list[float]] = Schema((column,), RICH).encode({column.name: values}).tolist()  # type: ignore[dict-item]
    return rows


def test_a_missing_number_takes_its_declared_place_and_an_indicator() -> None:
    age = Numeric("age", 0, 100, missing=40)
    assert encoded(age, ["20", "", "?", 250]) == [[0.2, 0], [0.4, 1], [0.4, 1], [1, 0]]
    assert age.known(["", "?"])
    assert age.holds([20, ""])
    assert not age.holds([250])
    for wrong in (-1, 101, float("nan"), "x"):
        with pytest.raises(InvalidValue, match="missing"):
            Numeric("age", 0, 100, missing=wrong)  # type: ignore[arg-type]


def test_dates_become_days_of_their_range() -> None:
    born = Date("born", "2000-01-01", "2000-01-11")
    cells = ["2000-01-06", "2000-01-02T23:59:59", "1990-01-01", "2030-12-31", date(2000, 1, 11)]
    assert encoded(born, np.array(cells, dtype=object)) == [[0.5], [0.1], [0], [1], [1]]
    assert np.isnan(encoded(born, ["06.01.2000"])[0][0])
    german = Date("born", "2000-01-01", "2000-01-11", format="%d.%m.%Y", missing="2000-01-02")
    assert encoded(german, ["06.01.2000", "32.01.2000", ""]) == [[0.5, 0], [0.1, 1], [0.1, 1]]
    days = np.array(["2000-01-06", "NaT"], dtype="datetime64[s]")
    assert encoded(german, days) == [[0.5, 0], [0.1, 1]]


@pytest.mark.parametrize("cell", ["now", "today", "2000", "0", 3, None, "2000-13-01", "secret"])
def test_what_is_no_date_is_none(cell: object) -> None:
    assert np.isnan(Date("born", "2000-01-01", "2001-01-01").days(np.array([cell], dtype=object)))[0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("01.01.2000", "2001-01-01"), "first of column 'born' must be a date as YYYY-MM-DD"),
        (("2001-01-01", "2000-01-01"), "first must be before last"),
        (("2000-01-01", "2001-01-01", "1999-01-01"), "missing must lie between"),
        (("2000-01-01", "2001-01-01", None, "dmy"), "format of column 'born'"),
        # these failed on the first text in the column, and not where there was none
        (("2000-01-01", "2001-01-01", None, "%d.%d.%Y"), "format of column 'born'"),
        (("2000-01-01", "2001-01-01", None, "%Y-%m-%d %"), "format of column 'born'"),
        (("2000-01-01", "2001-01-01", None, "%Q"), "format of column 'born'"),
    ],
)
def test_nonsense_ranges_are_refused(given: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        Date("born", *given)


def test_undeclared_values_are_other_where_that_is_declared() -> None:
    region = Categorical("region", ("1", "2"), other=True)
    assert encoded(region, ["1", "7", "", "2"]) == [[1, 0, 0], [0, 0, 1], [0, 0, 1], [0, 1, 0]]
    assert region.holds(["7"])
    with pytest.raises(InvalidValue, match="lists 'other' already"):
        Categorical("region", ("other",), other=True)


def test_one_vocabulary_serves_texts_numbers_and_booleans() -> None:
    code = Categorical("code", ("1", "2"))
    for values in ([1, 2], [1.0, 2.0], ["1", "2"], [" 1", "2 "], ["1.0", "2.0"], np.array([1, 2], np.uint8)):
        assert code.codes(values).tolist() == [0, 1]
    assert code.codes([1.5, np.nan]).tolist() == [-1, -1]
    for words in (("true", "false"), ("True", "False")):
        flag = Categorical("flag", words)
        for values in ([True, False], ["true", "false"], ["True", "False"], ["TRUE", "FALSE"]):
            assert flag.codes(values).tolist() == [0, 1]
    day = Categorical("day", ("2000-01-01",))
    assert day.codes(np.array(["2000-01-01"], dtype="datetime64[D]")).tolist() == [0]


def test_accents_may_be_marks_after_their_letters() -> None:
    composed, marked = "K\u00f6ln", "Ko\u0308ln"
    for value in (composed, marked):
        city = Categorical("city", ("Bonn", value))
        assert city.codes([composed, marked, "Koln"]).tolist() == [1, 1, -1]
    both = Categorical("city", (composed, marked))  # as a schema may list them
    assert both.codes([composed, marked]).tolist() == [0, 1]


def test_a_schema_with_all_of_it_survives_json() -> None:
    schema = Schema(
        (
            Numeric("age", 0, 100, missing=40),
            Categorical("region", ("1",), other=True),
            Date("born", "2000-01-01", "2001-01-01", missing="2000-06-01", format="%d.%m.%Y"),
        ),
        RICH,
    )
    assert Schema.from_json(schema.to_json()) == schema
    assert schema.without(["age"]).feature_names == ("region=1", "region=other", "born", "born=missing")


def test_all_problems_of_a_schema_are_listed_at_once() -> None:
    text = """{"columns": [{"name": "a", "low": 2, "high": 1}, {"name": "b", "lo": 0, "high": 1},
               {"name": "c", "values": "x"}, {"name": "d", "first": "x", "last": "2000-01-01"}],
               "target": {"name": "y"}}"""
    with pytest.raises(InvalidValue) as caught:
        Schema.from_json(text)
    said = str(caught.value)
    assert said.startswith("5 problems: (1) column 'a'")
    assert "did you mean 'low'?" in said
    for name in "bcdy":
        assert f"column '{name}'" in said


def test_a_target_has_no_other_no_missing_and_no_dates() -> None:
    age = Numeric("age", 0, 1)
    for target in (
        Categorical("y", ("a", "b"), other=True),
        Numeric("y", 0, 1, missing=0),
        Date("y", "2000-01-01", "2001-01-01"),
    ):
        with pytest.raises(InvalidValue, match="target 'y'"):
            Schema((age,), target)  # type: ignore[arg-type]


def test_missing_values_may_be_declared_afterwards() -> None:
    born = Date("born", "2000-01-01", "2000-01-11")
    schema = Schema((Numeric("age", 0, 100), born, Numeric("pay", 0, 9, missing=1)), RICH)
    middle = schema.with_missing({"age": "30"}, middle=True)
    assert [column.missing for column in middle.columns] == [30.0, "2000-01-06", 1]  # type: ignore[union-attr]
    assert schema.with_missing({"born": "2000-01-02"}).columns[1].missing == "2000-01-02"  # type: ignore[union-attr]
    for name, value, message in (
        ("agee", "1", r"no column 'agee' \(did you mean 'age'\?\)"),
        ("rich", "no", "no column 'rich'"),
        ("age", "x", "must be a number, got 'x'"),
        ("age", "200", "must lie between"),
    ):
        with pytest.raises(InvalidValue, match=message):
            schema.with_missing({name: value})
    with pytest.raises(InvalidValue, match="has a vocabulary"):
        Schema((Categorical("sex", ("f",)),), RICH).with_missing({"sex": "f"})


ODD: list[Any] = [
    None,
    math.nan,
    math.inf,
    "x",
    "",
    True,
    2,
    0.5,
    10**17 + 1,
    10**5000,
    1e22,
    1 + 2j,
    [1],
    b"x",
]
ODD += [np.timedelta64(3)]  # of no unit: its hash raises a ValueError
ODD += ["2000-01-06", date(2000, 1, 6), np.datetime64("2000-01-06"), np.datetime64("2000-01-06T05", "ns")]
COLUMNS = (
    Numeric("cell", 0, 10, missing=5),
    Unbounded("cell"),
    Date("cell", "2000-01-01", "2000-01-11", missing="2000-01-02"),
    Categorical("cell", ("true", "2", "0.5", "x", str(10**17 + 1), str(10**22), "2000-01-06"), other=True),
)


def alone(column: Any, values: list[Any]) -> list[list[float]]:
    """The features of values that a column is given by itself, in no schema."""
    out = np.zeros((len(values), len(column.feature_names)))
    column.encode(values, out)
    return out.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("made", [encoded, alone])
@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: type(column).__name__)
def test_a_record_more_changes_no_other_records_features(column: Any, made: Any) -> None:
    for base in ODD:
        first = made(column, [base])
        for odd in ODD:
            assert np.array_equal(made(column, [base, odd, base]), first + made(column, [odd]) + first, True)


@pytest.mark.parametrize(
    "cell", [1j, np.complex64(1), np.datetime64(1, "ns"), np.timedelta64(1, "ns"), np.ones(1)]
)
def test_what_only_numpy_takes_for_a_number_is_none(cell: Any) -> None:
    assert np.isnan(numbers("cell", [cell, 1.0])).tolist() == [True, False]


@pytest.mark.filterwarnings("error")
def test_a_number_beyond_float64_is_not_told_by_a_warning() -> None:
    with np.errstate(over="raise"):
        found = numbers("cell", np.array(["1", "1e400"], dtype=np.longdouble))
    assert found.tolist() == [1.0, math.inf]


def test_dates_of_any_precision_are_the_same_day() -> None:
    day = Categorical("day", ("2000-01-06", "2000-01-06T05:00:00"))
    cells = [date(2000, 1, 6), datetime(2000, 1, 6), np.datetime64("2000-01-06", "ns"), "2000-01-06"]
    assert day.codes([*cells, datetime(2000, 1, 6, 5), np.datetime64("NaT")]).tolist() == [0, 0, 0, 0, 1, -1]
    assert day.codes(np.array(cells[:3], dtype="datetime64[ns]")).tolist() == [0, 0, 0]


def test_numbers_in_texts_are_read_as_python_reads_them() -> None:
    texts = ["1_0", " 7 ", "1e3", "Infinity", "nan", "0x10", "1,5", "", "\u0663", "-0", "1" * 400, "1.", ".5"]
    alone = np.array([numbers("cell", [text])[0] for text in texts])
    assert np.array_equal(numbers("cell", texts), alone, True)
    assert np.array_equal(numbers("cell", np.array(texts)), alone, True)
    assert np.isnan(alone).tolist() == [text in ("nan", "0x10", "1,5", "") for text in texts]
