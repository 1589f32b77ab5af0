"""Drafts of schemas: what is guessed, what is left to a person."""

import json
from pathlib import Path
from typing import Any

import pytest

from farthing.data import schema_draft
from farthing.data.schema import DRAFTED, Schema
from farthing.errors import InvalidValue


def draft(path: Path, text: str, target: str | None = None) -> tuple[dict[str, Any], dict[str, str]]:
    path.write_text(text)
    found, said = schema_draft.draft(str(path), target)
    with pytest.raises(InvalidValue, match=DRAFTED):
        Schema.from_json(found)
    fields: dict[str, Any] = json.loads(found)
    assert fields.pop(DRAFTED)
    return fields, said


def test_numbers_get_bounds_and_words_get_lists(tmp_path: Path) -> None:
    found, said = draft(tmp_path / "a.csv", "age,pay,sex,rich\n39,1.5,Male,yes\n-2,.25,,no\n", "rich")
    assert found == {
        "columns": [
            {"name": "age", "low": -2, "high": 39},
            {"name": "pay", "low": 0.25, "high": 1.5},
            {"name": "sex", "values": ["", "Male"]},
        ],
        "target": {"name": "rich", "values": ["no", "yes"]},
    }
    assert said == {}
    assert Schema.from_json(json.dumps(found)).width == 4


def test_a_target_of_a_few_whole_numbers_is_taken_for_labels(tmp_path: Path) -> None:
    text = "grade,hours\n" + "".join(f"{row % 3},{row / 2}\n" for row in range(50))
    assert draft(tmp_path / "a.csv", text, "grade")[0]["target"] == {
        "name": "grade",
        "values": ["0", "1", "2"],
    }
    found, _ = draft(tmp_path / "a.csv", text, "hours")
    assert found["target"] == {"name": "hours", "low": 0, "high": 24.5}
    assert found["columns"] == [{"name": "grade", "low": 0, "high": 2}]


def test_what_cannot_be_guessed_is_left_open_and_said(tmp_path: Path) -> None:
    rows = "".join(f"name {row},1,{row if row else ''},{'ab'[row % 2]}\n" for row in range(150))
    found, said = draft(tmp_path / "a.csv", f"name,one,age,kind\n{rows}")
    assert found["target"] == {"name": None, "low": None, "high": None, "values": []}
    name, one, age, kind = found["columns"]
    assert name == {"name": "name", "low": None, "high": None, "values": []}
    assert one == {"name": "one", "low": None, "high": None, "values": []}
    assert age == {"name": "age", "low": 1, "high": 149}
    assert kind == {"name": "kind", "values": ["a", "b"]}
    assert said.keys() == {"name", "one", "age"}
    assert "more than 100 different texts" in said["name"]
    assert "without a number" in said["age"]


def test_what_is_embedded_is_public_and_no_draft() -> None:
    text, said = schema_draft.draft("adult", None)
    assert Schema.from_json(text).target.name == "class"
    assert said == {}


def test_no_records_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,b\n")
    with pytest.raises(InvalidValue, match="has no records"):
        schema_draft.draft(str(path), None)
