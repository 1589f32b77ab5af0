"""Drafts of schemas: what is guessed, what is left to a person, and what is never copied."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from farthing.data import schema_draft
from farthing.data.columns import Numeric
from farthing.data.csv_files import Csv
from farthing.data.schema import DRAFTED, Schema
from farthing.errors import InvalidValue


def draft(
    path: Path, text: str, target: str | None = None, **options: Any
) -> tuple[dict[str, Any], dict[str, str]]:
    path.write_text(text)
    found, said = schema_draft.draft(str(path), target, **options)
    with pytest.raises(InvalidValue, match=DRAFTED):
        Schema.from_json(found)
    fields: dict[str, Any] = json.loads(found)
    assert fields.pop(DRAFTED)
    return fields, said


def test_numbers_dates_and_words(tmp_path: Path) -> None:
    rows = "39,1.5,2001-05-03,Male,yes\n-2,.25,1999-12-31,,no\n" * 5
    found, said = draft(tmp_path / "a.csv", f"age,pay,since,sex,rich\n{rows}", "rich")
    assert found == {
        "columns": [
            {"name": "age", "low": -10, "high": 40},
            {"name": "pay", "low": 0.2, "high": 1.6},
            {"name": "since", "first": "1999-01-01", "last": "2001-12-31"},
            {"name": "sex", "values": ["", "Male"]},
        ],
        "target": {"name": "rich", "values": ["no", "yes"]},
    }
    assert said == {}
    assert Schema.from_json(json.dumps(found)).width == 5


def test_decimal_commas_and_semicolons(tmp_path: Path) -> None:
    found, _ = draft(tmp_path / "a.csv", "pay;sex\n1,5;f\n2,5;m\n" * 1 + "1,5;f\n2,5;m\n" * 5, "sex")
    assert found["columns"] == [{"name": "pay", "low": 1.4, "high": 2.6}]


def test_words_for_no_value_and_other_ways_to_write_dates(tmp_path: Path) -> None:
    rows = "".join(
        f"{row}.5,n/a,03.0{row}.2001,0{row}/02/1999,yes\nNA,1,,01/02/2000,no\n" for row in range(1, 7)
    )
    found, said = draft(tmp_path / "a.csv", f"pay,few,since,seen,rich\n{rows}", "rich")
    assert found["columns"] == [
        {"name": "pay", "low": 1, "high": 7, "missing": 4},
        {
            "name": "since",
            "first": "2001-01-01",
            "last": "2001-12-31",
            "format": "%d.%m.%Y",
            "missing": "2001-07-01",
        },
        {"name": "seen", "first": "1999-01-01", "last": "2000-12-31", "format": "%d/%m/%Y"},
    ]
    assert "'missing' replaces them" in said["pay"]
    assert "check 'format', %d/%m/%Y or %m/%d/%Y" in said["seen"]
    assert Schema.from_json(json.dumps(found)).width == 5


@given(st.floats(-1e29, 1e29), st.floats(-1e29, 1e29))
@example(0.0, 5e-324)
@example(1.0, 1 + 2.0**-52)
@example(-1e15, -1e15 + 0.125)
@example(1e-310, 3e-310)
def test_bounds_of_any_two_numbers_are_beyond_them_and_may_be_declared(one: float, other: float) -> None:
    low, high = min(one, other), max(one, other)
    assume(low < high)
    below, above = schema_draft.rounded_outward(low, high)
    assert below < low or (below == low == 0)
    assert above > high or (above == high == 0)
    Numeric("x", below, above)


@given(st.floats(-1e5, 1e5), st.floats(1e-3, 1e9))
def test_bounds_are_round_and_beyond_the_extremes(low: float, width: float) -> None:
    high = low + width
    below, above = schema_draft.rounded_outward(low, high)
    assert below < low or (below == low == 0)
    assert above > high or (above == high == 0)
    assert above - below < 4 * width


@pytest.mark.parametrize("fill", ["-1.7976931348623157e+308", "-3.4028235e+38", "9.96921e36", "1e308"])
def test_numbers_that_fill_gaps_of_grids_do_not_set_the_bounds(tmp_path: Path, fill: str) -> None:
    rows = "".join(f"{row}.5,{fill if row == 7 else row},{'ab'[row % 2]}\n" for row in range(20))
    found, said = draft(tmp_path / "a.csv", f"depth,height,kind\n{rows}-1e308,1,a\n", "kind")
    assert found["columns"] == [
        {"name": "depth", "low": 0, "high": 20},
        {"name": "height", "low": 0, "high": 20},
    ]
    assert "stand for missing ones" in said["height"]
    assert "308" not in said["depth"]


def test_rare_values_are_not_copied(tmp_path: Path) -> None:
    rows = "".join(f"{'ab'[row % 2]},{'xyz'[row % 3]}\n" for row in range(60)) + "secret,x\na,rarest\n"
    found, said = draft(tmp_path / "a.csv", f"kind,label\n{rows}", "label")
    assert found["columns"] == [{"name": "kind", "values": ["a", "b"], "other": True}]
    assert found["target"]["values"] == ["x", "y", "z"]
    assert "count as 'other'" in said["kind"]
    assert "count as nothing" in said["label"]


def test_a_target_of_a_few_whole_numbers_is_taken_for_labels(tmp_path: Path) -> None:
    text = "grade,hours\n" + "".join(f"{row % 3},{row / 2}\n" for row in range(50))
    assert draft(tmp_path / "a.csv", text, "grade")[0]["target"] == {
        "name": "grade",
        "values": ["0", "1", "2"],
    }
    found, said = draft(tmp_path / "a.csv", text, "hours")
    assert found["target"] == {"name": "hours", "low": 0, "high": 30}
    assert found["columns"] == [{"name": "grade", "low": 0, "high": 2.2}]
    assert "if they are codes" in said["grade"]


def test_a_target_of_labels_with_a_sign_or_a_fraction_of_zero_is_labels(tmp_path: Path) -> None:
    for cells, expected in ((["1.0", "2.0", "3.0", "3"], ["1", "2", "3"]), (["-1", "1"], ["-1", "1"])):
        rows = "".join(f"{row}.5,{cell}\n" for row in range(9) for cell in cells)
        found, said = draft(tmp_path / "a.csv", f"a,kind\n{rows}", "kind")
        assert (found["target"], said) == ({"name": "kind", "values": expected}, {})
        target = Schema.from_json(json.dumps(found)).target
        assert target.targets(cells).tolist() == [expected.index(cell.removesuffix(".0")) for cell in cells]


def test_codes_with_missing_cells_and_labels_that_are_missing(tmp_path: Path) -> None:
    rows = "".join(f"{row % 3 or ''},{('', 'a', 'b')[row % 3]}\n" for row in range(60))
    found, said = draft(tmp_path / "a.csv", f"code,label\n{rows}", "label")
    assert found["target"] == {"name": "label", "values": ["a", "b"]}
    assert "count as nothing" in said["label"]
    assert "'missing' replaces them" in said["code"]
    assert "if they are codes" in said["code"]


def test_identifiers_free_text_and_constants_are_left_out_and_said(tmp_path: Path) -> None:
    rows = "".join(
        f"{row + 1},{7 * row},name {row},1,{row if row % 10 else ''},{'ab'[row % 2]},x\n"
        for row in range(150)
    )
    text = f"row,customer_id,name,one,age,kind,kind\n{rows}"
    found, said = draft(tmp_path / "a.csv", text, drop=["one"])
    assert found["target"] == {"name": None, "low": None, "high": None, "values": []}
    assert found["columns"] == [{"name": "age", "low": 0, "high": 160, "missing": 80}]
    assert said.keys() == {"row", "customer_id", "name", "age", "kind"}
    assert "identifiers: left out" in said["row"]
    assert "rare texts only: left out" in said["name"]
    assert "'missing' replaces them" in said["age"]
    assert "header twice" in said["kind"]
    constant, said = draft(tmp_path / "a.csv", text)
    assert "one" not in [column["name"] for column in constant["columns"]]
    assert "no two different numbers: left out" in said["one"]


def test_a_wrong_target_gets_a_hint(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("age,Income\n1,2\n")
    with pytest.raises(InvalidValue, match=r"no column 'income' \(did you mean 'Income'\?\)"):
        schema_draft.draft(str(path), "income")


def test_what_is_embedded_is_public_and_no_draft() -> None:
    text, said = schema_draft.draft("adult", None)
    assert Schema.from_json(text).target.name == "class"
    assert said == {}


def test_no_records_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,b\n")
    with pytest.raises(InvalidValue, match="has no records"):
        schema_draft.draft(str(path), None)


def column(tmp_path: Path, cells: list[str], name: str = "x") -> tuple[dict[str, Any] | None, str]:
    """The draft of one column, of so many cells, and its remark."""
    rows = "".join(f'"{cell}",{("no", "yes")[row % 2]}\n' for row, cell in enumerate(cells))
    found, said = draft(tmp_path / "a.csv", f"{name},rich\n{rows}", "rich")
    return next((one for one in found["columns"] if one["name"] == name), None), said.get(name, "")


@pytest.mark.parametrize(
    ("cells", "expected", "remark"),
    [
        ([f"${row},{row:03}.50" for row in range(1, 30)], {"low": 0, "high": 30000}, ""),
        ([f"{row} %" for row in range(30)], {"low": 0, "high": 30}, ""),
        ([f"{row}.5" for row in range(60)] + ["Total"], {"low": 0, "high": 60, "missing": 30}, "'missing'"),
        (
            [f"{row}.5" for row in range(60)] + ["#N/A", "--"],
            {"low": 0, "high": 60, "missing": 30},
            "without",
        ),
        (["0", "1"] * 20, {"low": 0, "high": 1}, ""),
        ([str(row) for row in range(20)] + ["-999"] * 9, {"low": -1000, "high": 200}, "often stands for a"),
        (["Yes", "no", "YES", "NO"] * 9, {"values": ["no", "yes"]}, ""),
        ([f"{1950 + row}0131" for row in range(30)], {"first": "1950-01-01", "last": "1979-12-31"}, ""),
        ([f"0{1 + row % 9}-Mar-2001" for row in range(30)], {"first": "2001-01-01"}, ""),
        ([f"0{1 + row % 9}/13/95 02:30 PM" for row in range(30)], {"last": "1995-12-31"}, "two digits"),
        (["low", "high", "7"] * 20, {"values": ["7", "high", "low"]}, "mixes numbers and texts"),
        (["TX", "Tx", "NY"] * 20, {"values": ["NY", "TX", "Tx"]}, "capitals, accents or spaces alone"),
        (["Ko\u0308ln", "K\u00f6ln", "Bonn"] * 9, {"values": ["Bonn", "K\u00f6ln"]}, ""),
        (["Koln", "K\u00f6ln"] * 9, {"values": ["Koln", "K\u00f6ln"]}, "accents or spaces alone"),
        (["New York", "New\u00a0York\u200b"] * 9, {}, "accents or spaces alone"),
        ([f"{row}.5" for row in range(60)] + ["999999"] * 9, {"low": 0}, "has 999999, which often"),
        ([f"{row}.5" for row in range(60)] + ["9999999"], {"low": 0}, "has 9999999, which often"),
        (
            [f"2001-05-{1 + row % 28:02}" for row in range(60)] + ["unclear", "\u2013", "999"],
            {"first": "2001-01-01", "missing": "2001-07-01"},
            "cells without a date",
        ),
        (
            [f"2001-05-{1 + row:02}" for row in range(28)] + ["9999-12-31"],
            {},
            "often stands for a missing date",
        ),
        ([f"Mon, {1 + row:02} Oct 2017 12:00:00 GMT" for row in range(28)], {"first": "2017-01-01"}, ""),
        ([f"201710{1 + row:02}T101112Z" for row in range(28)], {"format": "%Y%m%dT%H%M%SZ"}, ""),
        ([f"{1 + row}/12/2017 10:11:12.125" for row in range(28)], {"format": "%d/%m/%Y %H:%M:%S.%f"}, ""),
        ([f"{1 + row}. May 2017" for row in range(28)], {"format": "%d. %b %Y"}, ""),
        (["Apr-2017", "Sep-2017", "Oct-2017"] * 9, {"format": "%b-%Y"}, ""),
        ([f"R$ {row},234.50" for row in range(1, 30)], {"low": 0, "high": 30000}, ""),
        ([f"'{row}" for row in range(30)], {"low": 0, "high": 30}, ""),
    ],
)
def test_a_column_is_drafted_as_a_person_expects(
    tmp_path: Path, cells: list[str], expected: dict[str, Any], remark: str
) -> None:
    found, said = column(tmp_path, cells)
    assert found is not None
    assert expected.items() <= found.items()
    assert remark in said
    assert bool(remark) == bool(said)


def test_a_column_of_people_with_several_records_is_named(tmp_path: Path) -> None:
    found, said = column(tmp_path, [str(row * 7 % 13) for row in range(60)], "customer_id")
    assert found is not None
    assert "see --user" in said


@pytest.mark.parametrize(
    ("cells", "name", "remark"),
    [
        ([f"{row * 7919 % 10007}" for row in range(50)], "customer_id", "identifiers"),
        ([f"+49 {row * 7919 % 10007}" for row in range(50)], "phone", "identifiers"),
        ([f"{row:05}" for row in range(0, 5000, 37)], "zip", "codes that begin with 0"),
        ([f"{row} kg" for row in range(50)], "weight", "numbers with a unit"),
        ([f"{row}\u00a2" for row in range(50)], "tip", "numbers with a unit"),
        ([f"{row},{row:03}.50 CR" for row in range(1, 50)], "pay", "numbers with a unit"),
        ([f"{row % 24:02}:{row:02}" for row in range(50)], "clock", "or times"),
        (
            [f"2001-05-{1 + row % 28}" if row % 2 else f"{1 + row % 28}/05/2001" for row in range(50)],
            "since",
            "dates in several ways",
        ),
    ],
)
def test_identifiers_codes_and_units_are_left_out(
    tmp_path: Path, cells: list[str], name: str, remark: str
) -> None:
    found, said = column(tmp_path, cells, name)
    assert found is None
    assert remark in said


def test_columns_without_a_name_and_targets_that_cannot_be_learnt_are_said(tmp_path: Path) -> None:
    found, said = draft(tmp_path / "a.csv", "age,,rich\n" + "".join(f"{n},3,yes\n" for n in range(9)), "rich")
    assert [one["name"] for one in found["columns"]] == []
    assert "without a name" in said[""]
    assert "one value only" in said["rich"]
    found, said = draft(tmp_path / "a.csv", "x\n" + "1.5\n2.5\n" * 9, "x")
    assert "stands alone" in said["x"]
    rows = "1,yes\n2,no\n3,NA\n4,?\n" * 6
    found, said = draft(tmp_path / "a.csv", f"a,rich\n{rows}", "rich")
    assert found["target"]["values"] == ["no", "yes"]


def test_points_that_may_separate_thousands_are_said(tmp_path: Path) -> None:
    rows = "".join(f"{row}.{row:03};{('no', 'yes')[row % 2]}\n" for row in range(1, 30))
    found, said = draft(tmp_path / "a.csv", f"pay;rich\n{rows}", "rich")
    assert "--decimal ," in said["pay"]
    found, said = draft(tmp_path / "a.csv", f"pay;rich\n{rows}", "rich", csv=Csv(decimal=","))
    assert found["columns"] == [{"name": "pay", "low": 0, "high": 30000}]
    assert said == {}


def test_a_first_record_is_not_taken_for_names(tmp_path: Path) -> None:
    for line in ("39,State-gov,77516", "secret,0.5,x", "1000000,a,b"):
        with pytest.raises(InvalidValue, match="may be a record") as caught:
            draft(tmp_path / "a.csv", f"{line}\n{line}\n")
        assert "secret" not in str(caught.value)
    found, _ = draft(tmp_path / "a.csv", "0,1,2019\n" + "1.5,2,3\n2.5,3,4\n" * 9)
    assert [one["name"] for one in found["columns"]] == ["0", "1", "2019"]
