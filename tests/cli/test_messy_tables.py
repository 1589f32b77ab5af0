"""Tables as people have them, from the command line: formats, missing cells, people with several rows."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farthing.accounting import gaussian
from farthing.data import table_files
from farthing.data.schema import Schema

SPEND = ("--epsilon", "4", "--delta", "1e-5")
SCHEMA = """{"columns": [{"name": "age", "low": 0, "high": 100}, {"name": "pay", "low": 0, "high": 10},
 {"name": "since", "first": "2000-01-01", "last": "2019-12-31"}, {"name": "region", "values": ["1", "2"]}],
 "target": {"name": "rich", "values": ["no", "yes"]}}"""


def rows(number: int = 600) -> list[list[str]]:
    table = [["id", "age", "pay", "since", "region", "rich"]]
    for row in range(number):
        age = row % 100
        day, label = f"20{row % 20:02}-06-01", ("no", "yes")[age > 50]
        table.append([f"p{row // 3}", str(age), f"{row % 10}.5", day, str(row % 3), label])
    return table


def text(table: list[list[str]], delimiter: str = ",") -> str:
    return "".join(delimiter.join(row) + "\n" for row in table)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("schema.json").write_text(SCHEMA)
    Path("a.csv").write_text(text(rows()))


TRAIN = ("train", "a.csv", *SPEND, "--schema", "schema.json", "--out", "fit", "--force")


def test_the_same_table_in_every_form_is_the_same_table(run: Any) -> None:
    table = rows()
    plain = text(table)
    comma = text([[cell.replace(".", ",") for cell in row] for row in table], ";")
    forms: dict[str, bytes] = {
        "semicolons.csv": comma.encode(),
        "tabs.tsv": text(table, "\t").encode(),
        "bom.csv": b"\xef\xbb\xbf" + plain.encode(),
        "windows.csv": plain.replace("\n", "\r\n").encode(),
        "packed.csv.gz": gzip.compress(plain.encode()),
    }
    assert run(*TRAIN).code == 0
    expected = run("predict", "fit", "a.csv").out
    for name, content in forms.items():
        Path(name).write_bytes(content)
        assert run("predict", "fit", name).out == expected, name
        done = run("train", name, *SPEND, "--schema", "schema.json", "--dry-run", "--json")
        assert done.json["records"] == 600, name
    Path("bars.csv").write_text(comma.replace(";", "|"))
    declared = run("predict", "fit", "bars.csv", "--delimiter", "|", "--decimal", ",")
    assert declared.out == expected


def test_probabilities_beside_identifiers(run: Any) -> None:
    assert run(*TRAIN).code == 0
    done = run("predict", "fit", "a.csv", "--proba", "--id", "id")
    lines = done.out.splitlines()
    assert lines[0] == "id,rich,P(rich=no),P(rich=yes)"
    found = [line.split(",") for line in lines[1:]]
    assert [row[0] for row in found] == [row[0] for row in rows()[1:]]
    for _, label, no, yes in found:
        assert float(no) + float(yes) == pytest.approx(1)
        assert label == ("yes" if float(yes) > 0.5 else "no")
    high = run("predict", "fit", "a.csv", "--threshold", "0.9").out.split()
    assert high == ["yes" if float(row[3]) >= 0.9 else "no" for row in found]
    fields = run("predict", "fit", "a.csv", "--id", "id", "--json").json
    assert fields["columns"]["id"][:4] == ["p0", "p0", "p0", "p1"]
    for wrong in (("--threshold", "1.5"), ("--threshold", "x"), ("--id", "nobody")):
        assert run("predict", "fit", "a.csv", *wrong).code == 2
    assert run(*TRAIN, "--model", "svm").code == 0
    assert "not with --model svm" in run("predict", "fit", "a.csv", "--proba").err


def test_missing_cells_and_undeclared_values_are_declared(run: Any) -> None:
    table = rows()
    for row in table[1::4]:
        row[1] = ""
    Path("a.csv").write_text(text(table))
    done = run(*TRAIN, "--missing", "age=40", "--missing", "middle", "--drop", "region", "--json")
    assert done.json["features"] == 6
    assert len(run("predict", "fit", "a.csv").out.split()) == 600
    assert run(*TRAIN).code == 0
    assert "declare what replaces a missing one" in run("predict", "fit", "a.csv").err
    for wrong, message in (
        (("--missing", "age"), "NAME=VALUE or the word middle"),
        (("--missing", "agee=3"), "did you mean 'age'?"),
        (("--missing", "age=200"), "between low and high"),
        (("--missing", "region=1"), "has a vocabulary"),
        (("--drop", "regio"), "did you mean 'region'?"),
        (("--drop", "rich"), "no column 'rich'"),
        (("--format", "skops", "--missing", "middle"), "--format cannot write column"),
        (("--delimiter", "ab"), "one character"),
        (("--decimal", "x"), "decimal mark"),
    ):
        refused = run(*TRAIN, *wrong)
        assert (refused.code, message in refused.err) == (2, True), refused.err


def test_a_person_with_several_rows_is_protected_whole(run: Any) -> None:
    train = (*TRAIN, "--records", "390")
    command = (*train, "--user", "id", "--rows", "2", "--ledger", "my.ledger")
    done = run(*command, "--json")
    told = done.json
    assert (told["guarantee"]["epsilon"], told["guarantee"]["unit"], told["records"]) == (4.0, "user", 390)
    assert "at most 2 records of a person" in told["guarantee"]["note"]
    assert "public" not in told["guarantee"]["note"]
    assert "400" not in done.out  # how many were kept is private
    assert told["spent"]["epsilon"] == pytest.approx(4.0, rel=0.01)  # of a person, not of a record
    assert "group privacy" in told["guarantee"]["theorem"]
    record = run("ledger", "show", "my.ledger", "--json").json["guarantee"]
    assert record["unit"] == "record"
    assert gaussian.delta(2 * gaussian.mu(record["epsilon"], 1e-5), 4.0) <= 1e-5
    assert "user" in run(*train, "--user", "id", "--dry-run").out
    refused = run(*TRAIN, "--user", "id")
    assert (refused.code, "--user needs --records" in refused.err) == (2, True), refused.err
    for wrong, code, message in (
        (("--user", "age"), 2, "must not be in the schema"),
        (("--user", "nobody"), 2, "no column 'nobody'"),
        (("--rows", "3"), 2, "it needs --user COLUMN"),
        (("--user", "id", "--rows", "0"), 2, "--rows"),
        (("--user", "id", "--method", "dpagd"), 2, "accounted by GDP"),
        (("--user", "id", "--adjacency", "replace-one"), 2, "need add-remove"),
    ):
        refused = run(*train, *wrong)
        assert (refused.code, message in refused.err) == (code, True), refused.err


def test_held_out_records_are_measured_with_noise(run: Any) -> None:
    Path("a.csv").write_text(text(rows(6000)))
    done = run(*TRAIN, "--holdout", "0.3", "--json")
    told = done.json
    held = told["test"]
    assert "parallel composition" in held["note"]
    assert told["records"] == 6000
    assert 1500 < held["records"] < 2000  # binomial: 6 deviations are 210 records of 1,800
    assert abs(held["accuracy"] - 0.97) < 0.08
    assert 0 < held["standard_error"] < 0.02
    assert "verdict" not in held
    assert run(*TRAIN, "--holdout", "0.3").err.count("standard error") == 1
    for wrong, message in (
        (("--holdout", "1"), "--holdout must be at least 0 and below 1"),
        (("--holdout", "0.2", "--test", "a.csv"), "either --test or --holdout"),
        (("--holdout", "0.2", "--adjacency", "replace-one"), "--holdout needs --adjacency add-remove"),
    ):
        refused = run(*TRAIN, *wrong)
        assert (refused.code, message in refused.err) == (2, True), refused.err


def test_a_record_that_is_no_number_does_not_stop_the_figures_on_held_out_records(run: Any) -> None:
    table = rows(3000)
    for row in table[1::7]:
        row[1] = "secret"
    for row in table[2::7]:
        row[-1] = "secret"
    Path("a.csv").write_text(text(table))
    done = run(*TRAIN, "--holdout", "0.5", "--json")
    assert done.code == 0
    assert abs(done.json["test"]["records"] - 1500 * 5 / 7) < 200  # those count as nothing
    schema = json.loads(SCHEMA)
    schema["target"] = schema["columns"].pop(1)
    Path("pay.json").write_text(json.dumps(schema))
    done = run("train", "a.csv", *SPEND, "--schema", "pay.json", "--out", "pay", "--holdout", "0.5", "--json")
    assert done.code == 0, done.err
    assert done.json["test"]["rmse"] < 6


def test_a_model_no_better_than_guessing_is_said_to_be(run: Any) -> None:
    rng = np.random.default_rng(0)
    table = rows(2000)
    for row in table[1:]:
        row[-1] = ["no", "yes"][int(rng.uniform() < 0.1)]  # whatever the features say
    Path("a.csv").write_text(text(table))
    done = run(*TRAIN, "--holdout", "0.5")
    assert (done.code, "not clearly better than always predicting the most frequent label" in done.err) == (
        0,
        True,
    )


def test_all_missing_columns_are_named_at_once(run: Any) -> None:
    Path("a.csv").write_text(text(rows()).replace("age,pay", "Age,pays", 1))
    done = run(*TRAIN)
    assert done.code == 2
    assert "no column 'age' (did you mean 'Age'?), no column 'pay' (did you mean 'pays'?)" in done.err


def test_a_draft_is_a_good_beginning(run: Any) -> None:
    done = run("schema", "a.csv", "--target", "rich", "--out", "draft.json")
    assert done.code == 0
    draft = json.loads(Path("draft.json").read_text())
    draft.pop("drafted_from_private_data")
    Path("checked.json").write_text(json.dumps(draft))
    assert "'id' holds rare texts only: left out" in done.err
    assert run("train", "a.csv", *SPEND, "--schema", "checked.json", "--out", "fit").code == 0
    assert run("schema", "a.csv", "--target", "Rich").err.count("did you mean 'rich'?") == 1


def test_a_remark_on_many_columns_is_one_message(run: Any) -> None:
    for width, lines in ((5, 5), (500, 1)):
        names = [f"v{place}" for place in range(width)]
        body = [[str((row + place) % 7) for place in range(width)] + ["ab"[row % 2]] for row in range(30)]
        Path("wide.csv").write_text(text([[*names, "kind"], *body]))
        done = run("schema", "wide.csv", "--target", "kind", "--out", "wide.json", "--force")
        assert (done.code, done.err.count("few different whole numbers")) == (0, lines)
    assert "column 'v0' (and 499 others, such as 'v1') holds few different whole numbers" in done.err


def test_a_table_as_a_spreadsheet_exports_it_holds_the_records_of_the_plain_one(run: Any) -> None:
    table = rows()
    plain = [row[:] for row in table]
    for row in plain[1:]:
        row[2] = f"{1000 + 3 * int(row[1])}.50"
    odd = [row[:] for row in plain]
    for row in odd[1:]:
        row[1], row[2] = f"'{row[1]}", f'"R$ {row[2][0]},{row[2][1:]}"'
        row[3] = f"Mon, {row[3][8:]} Jun {row[3][:4]} 12:00:00 GMT".join('""')
    Path("odd.csv").write_text(text(odd))
    Path("plain.csv").write_text(text(plain))
    found = []
    for name in ("plain.csv", "odd.csv"):
        assert run("schema", name, "--target", "rich", "--out", f"{name}.json").code == 0
        draft = json.loads(Path(f"{name}.json").read_text())
        draft.pop("drafted_from_private_data")
        found.append([{key: one[key] for key in one if key != "format"} for one in draft["columns"]])
        Path(f"{name}.json").write_text(json.dumps(draft))
    assert found[0] == found[1]
    schemas = [Schema.from_json(Path(f"{name}.json").read_text()) for name in ("plain.csv", "odd.csv")]
    plain_rows, odd_rows = (
        table_files.read(*each) for each in zip(("plain.csv", "odd.csv"), schemas, strict=True)
    )
    np.testing.assert_array_equal(plain_rows[0], odd_rows[0])
    np.testing.assert_array_equal(plain_rows[1], odd_rows[1])
