"""``farthing train``, ``schema`` and ``predict``: what they print and write, and what they refuse."""

import json
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farthing as ft

PEOPLE = """\
{"columns": [{"name": "age", "low": 0, "high": 100}, {"name": "sex", "values": ["Female", "Male"]}],
 "target": {"name": "rich", "values": ["no", "yes"]}}
"""
SPEND = ("--epsilon", "1", "--delta", "1e-5")


@pytest.fixture
def people(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a table and its schema."""
    monkeypatch.chdir(tmp_path)
    rows = [
        f"{row % 100},{('Female', 'Male')[row % 2]},{('no', 'yes')[row % 100 > 50]}" for row in range(300)
    ]
    Path("people.csv").write_text("\n".join(["age,sex,rich", *rows]) + "\n")
    Path("schema.json").write_text(PEOPLE)
    return tmp_path


TRAIN = ("train", "people.csv", *SPEND, "--target", "rich", "--schema", "schema.json")


@pytest.mark.usefixtures("people")
def test_train_and_predict(run: Any) -> None:
    shutil.copy("people.csv", "test.csv")
    done = run(*TRAIN, "--out", "fit", "--ledger", "my.ledger", "--test", "test.csv", "--json")
    assert (done.code, done.err) == (0, "")
    told = done.json
    assert told == json.loads(Path("fit/privacy.json").read_text())
    test = told.pop("test")
    expected = {"epsilon": 1.0, "delta": 1e-5, "adjacency": "add-remove", "unit": "record"}
    assert told["guarantee"].items() >= expected.items()
    assert (told["format"], told["method"]) == (1, "auto")
    assert (told["model"], told["ledger"], told["records"]) == ("fit/model.npz", "my.ledger", 300)
    assert "without noise" in test["note"]
    assert run("ledger", "verify", "my.ledger").code == 0
    labels = run("predict", "fit", "test.csv")
    assert (labels.code, labels.err) == (0, "")
    truth = ["no" if row % 100 <= 50 else "yes" for row in range(300)]
    assert np.mean(np.array(labels.out.splitlines()) == truth) == test["accuracy"]
    assert run("predict", "fit/model.npz", "test.csv", "--out", "labels.txt").out == ""
    assert Path("labels.txt").read_text() == labels.out
    assert run("predict", "fit", "test.csv", "--out", "labels.txt").code == 2
    assert run("predict", "fit", "test.csv", "--out", "labels.txt", "--force").code == 0


@pytest.mark.usefixtures("people")
@pytest.mark.parametrize(
    ("epsilon", "delta"), [("1", "1e-6"), ("4", "1e-5"), ("0.4", "1e-5"), ("10", "1e-6")]
)
def test_the_whole_budget_is_trained_on_whatever_its_size(run: Any, epsilon: str, delta: str) -> None:
    given = ("--epsilon", epsilon, "--delta", delta)
    trained = ("train", "people.csv", *given, "--target", "rich", "--schema", "schema.json")
    assert run(*trained, "--out", "fit", "--ledger", "new.ledger").code == 0
    for kind in ("gdp", "basic"):
        assert run("ledger", "create", f"{kind}.ledger", *given, "--filter", kind).code == 0
        done = run(*trained, "--out", kind, "--ledger", f"{kind}.ledger")
        assert (done.code, "100.000%" in done.err) == (0, False), done.err
        shown = run("ledger", "show", f"{kind}.ledger", "--json").json
        assert shown["spent"]["epsilon"] <= float(epsilon)
        assert run("ledger", "verify", f"{kind}.ledger").code == 0
        assert run(*trained, "--out", "again", "--ledger", f"{kind}.ledger").code == 3


@pytest.fixture
def budgets(people: Path) -> tuple[str, ...]:
    """A table whose last column is each record's own ε, and the command that trains on it."""
    lines = Path("people.csv").read_text().splitlines()
    own = ["eps", *(("0.5", "1", "4")[row % 3] for row in range(300))]
    Path("own.csv").write_text("\n".join(f"{a},{b}" for a, b in zip(lines, own, strict=True)) + "\n")
    return "train", "own.csv", "--delta", "1e-5", "--schema", "schema.json", "--budget-column", "eps"


@pytest.mark.parametrize("method", ["auto", "sgd-ma"])
def test_records_may_have_budgets_of_their_own(run: Any, budgets: tuple[str, ...], method: str) -> None:
    command = (*budgets, "--method", method)
    assert "budget 0.5: epsilon 0.5 in all" in run(*command, "--dry-run").out
    done = run(*command, "--out", "fit", "--ledger", "own.ledger", "--json")
    assert done.code == 0, done.err
    assert [level["budget"] for level in done.json["levels"]] == [0.5, 1.0, 4.0]
    assert [level["epsilon"] for level in done.json["levels"]] == pytest.approx([0.5, 1, 4], rel=1e-4)
    assert done.json["features"] == 3, "the budget is no feature"
    assert "budget 4: epsilon 4 in all, 4 spent" in run("ledger", "show", "own.ledger").out
    assert run("ledger", "verify", "own.ledger").code == 0
    assert "Budgets are personal" in Path("fit/report.html").read_text()
    assert run(*command, "--out", "more", "--ledger", "own.ledger").code in (2, 3)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--epsilon", "1"), "got both"),
        (("--records", "300"), "leave out --records"),
        (("--method", "dpagd"), "--budget-column needs --method auto or sgd-ma, got 'dpagd'"),
        (("--budget-column", "age"), "must not be in the schema"),
        (("--budget-column", "none"), "no column 'none'"),
    ],
)
def test_a_wrong_budget_column_is_one_sentence(
    run: Any, budgets: tuple[str, ...], more: tuple[str, ...], message: str
) -> None:
    done = run(*budgets, *more, "--out", "fit")
    assert done.code == 2
    assert message in done.err
    assert not Path("fit").exists()


@pytest.mark.parametrize("cell", ["many", "-1", "0", "nan", ""])
def test_a_budget_that_is_none_is_not_quoted(run: Any, budgets: tuple[str, ...], cell: str) -> None:
    Path("own.csv").write_text(f"{Path('own.csv').read_text()}1,Male,no,{cell}\n")
    done = run(*budgets, "--out", "fit")
    assert done.code == 2
    assert "must hold finite numbers above 0" in done.err
    assert "many" not in done.err


def test_the_embedded_table_has_no_budgets(run: Any) -> None:
    done = run("train", "adult", "--delta", "1e-5", "--budget-column", "age")
    assert done.code == 2
    assert "has none" in done.err


@pytest.mark.usefixtures("people")
def test_the_summary_is_prose(run: Any) -> None:
    shutil.copy("people.csv", "test.csv")
    done = run(*TRAIN, "--test", "test.csv")
    assert (done.code, done.out) == (0, "")
    for words in ("(1, 1e-05)-DP, add-remove, per record", "model.npz", "taken as public", "without noise"):
        assert words in done.err
    assert Path("model.npz").exists()
    assert Path("privacy.json").exists()


@pytest.mark.usefixtures("people")
def test_without_a_schema_a_skeleton_is_shown(run: Any) -> None:
    done = run("train", "people.csv", *SPEND, "--target", "rich")
    assert done.code == 2
    assert "--schema" in done.err
    assert "from public knowledge" in done.err
    skeleton = json.loads(done.out)
    assert [column["name"] for column in (*skeleton["columns"], skeleton["target"])] == ["age", "sex", "rich"]
    assert not re.search("Female|Male|no|yes|[0-9]", done.out)
    without = run("train", "people.csv", *SPEND)
    assert (without.code, without.out) == (2, "")
    assert "--target" in without.err


@pytest.mark.usefixtures("people")
def test_a_record_in_the_place_of_a_header_is_not_shown(run: Any) -> None:
    Path("people.csv").write_text("39,secret,no\n40,secret,yes\n")
    done = run("train", "people.csv", *SPEND, "--target", "rich")
    assert (done.code, done.out) == (2, "")
    assert "secret" not in done.err


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file with its bytes. SQLite's own shared memory is left out: readers may touch it."""
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if not path.name.endswith("-shm")
    }


WRONG_TRAINING: list[tuple[tuple[str, ...], str]] = [
    (("--epsilon", "0"), "--epsilon must be"),
    (("--epsilon", "nan"), "--epsilon must be"),
    (("--epsilon", "-1"), "--epsilon must be"),
    (("--epsilon", "inf"), "--epsilon must be"),
    (("--epsilon", "much"), "--epsilon"),
    (("--delta", "1"), "--delta must be"),
    (("--delta", "nan"), "--delta must be"),
    (("--delta", "-1e-5"), "--delta must be"),
    (("--delta", "0"), "--delta must be above 0 with --method auto"),
    (("--target", "age"), "'age', which the schema lists among the features"),
    (("--target", "salary"), "--target must be the schema's target 'rich', got 'salary'"),
    (("--target", "../rich"), "--target must be the schema's target 'rich', got '../rich'"),
    (("--schema", "missing.json"), "missing.json' cannot be read: No such file"),
    (("--schema", "../missing.json"), "missing.json' cannot be read: No such file"),
    (("--schema", "."), "'.' cannot be read: Is a directory"),
    (("--schema", "people.csv"), "people.csv: a schema must be JSON"),
    (("--schema", "broken.json"), "broken.json: .*'columns.0.'.* column 'age'"),
    (("--schema", "one.json"), "the target 'rich' needs two values or more"),
    (
        ("--schema", "draft.json"),
        "draft.json: this is a draft that was read from private records: .* replace",
    ),
    (("--bounds", "age=0:100"), "either --schema or --bounds and --values"),
    (("--method", "magic"), "--method must be one of .*'auto'.*, got 'magic'"),
    (("--method", "../auto"), "--method must be one of .*, got '../auto'"),
    (
        ("--method", "dpagd", "--set", "gama=1"),
        "--method dpagd has no setting 'gama': it has averaging, .*growth",
    ),
    (("--method", "dpagd", "--set", "gamma"), "--set must be NAME=VALUE, got 'gamma'"),
    (("--method", "dpagd", "--set", "gamma=much"), "--set gamma must be a number.*, got 'much'"),
    (("--method", "dpagd", "--set", "gamma=-1"), "growth must be a finite number > 0, got -1"),
    (("--method", "dpagd", "--set", "gamma=nan"), "growth must be a finite number > 0, got nan"),
    (
        ("--method", "dpagd", "--set", "choice_noise=loud"),
        "--set choice_noise must be 'gumbel' or 'laplace', got 'loud'",
    ),
    (("--method", "dpagd", "--set", "m=2.5"), "--set m must be a whole number, got '2.5'"),
    (("--method", "dpagd", "--set", "m=0"), "count must be a whole number from 1"),
    (("--method", "dpagd", "--set", "grid=20"), "no setting 'grid': it has .*grid.count"),
    (("--method", "privgene", "--set", "rounds=0"), "rounds must be a whole number from 1"),
    (("--set", "gamma=1"), "--method auto has no setting 'gamma': it has trees"),
    (("--model", "linear"), "--model must be one of .*'svm'.*, got 'linear'"),
    (("--model", "../logistic"), "--model must be one of .*, got '../logistic'"),
    (("--format", "pickle"), "--format must be one of .*'onnx'.*, got 'pickle'"),
    (("--records", "0"), "--records must be"),
    (("--records", "some"), "--records"),
    (("--adjacency", "near"), "--adjacency"),
    (("--out", "people.csv"), "--out must be writable: 'people.csv"),
    (("--out", "none/of/these"), "--out must be writable"),
    (("--out", "/proc/none"), "--out must be writable: '/proc/none/model.npz'"),
    (("--out", "folder.npz"), "folder.npz' is a folder"),
    (("--ledger", "people.csv"), "'people.csv' is not a ledger"),
    (("--ledger", "none/a.ledger"), "existing folder"),
    (("--ledger", "/proc/a.ledger"), "--ledger must be writable: '/proc/a.ledger'"),
    (("--ledger", "folder.npz"), "folder.npz"),
    (("--ledger", "fit.npz", "--out", "fit.npz"), "'fit.npz' is read by this command"),
    (("--test", "people.csv"), "--test must be another table"),
    (("--test", "missing.csv"), "there is no file 'missing.csv'"),
    (("--test", "text.csv"), "column 'age' of 'text.csv' must hold finite numbers"),
]


@pytest.mark.parametrize("book", ["a.ledger", "new.ledger"])
@pytest.mark.parametrize(("options", "message"), WRONG_TRAINING)
def test_wrong_training_is_one_sentence(
    run: Any, people: Path, options: tuple[str, ...], message: str, book: str
) -> None:
    Path("broken.json").write_text(PEOPLE.replace(', "high": 100', ""))
    Path("one.json").write_text(PEOPLE.replace('"no", ', ""))
    Path("draft.json").write_text('{"drafted_from_private_data": "",' + PEOPLE[1:])
    Path("text.csv").write_text("age,sex,rich\nsecret,Male,no\n")
    Path("folder.npz").mkdir()
    ft.Ledger(ft.Budget(3.0, 1e-5), journal="a.ledger").close()
    before = contents(people)
    given = dict(zip(TRAIN[2::2], TRAIN[3::2], strict=True)) | {"--ledger": book, "--out": "fit"}
    given |= dict(zip(options[::2], options[1::2], strict=True))
    done = run("train", "people.csv", *(word for pair in given.items() for word in pair))
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1
    assert re.search(message, done.err)
    assert "secret" not in done.err
    assert contents(people) == before  # no new ledger, no model, and no byte of the old one changed


@pytest.mark.usefixtures("people")
def test_batches_have_a_ledger_of_their_own(run: Any) -> None:
    given = (
        *TRAIN,
        "--method",
        "dpagd",
        "--set",
        "sampling_rate=0.2",
        "--set",
        "splits=4",
        "--ledger",
        "new.ledger",
    )
    done = run(*given, "--out", "fit", "--json")
    assert (done.code, done.json["guarantee"]["accountant"]) == (0, "rdp")
    assert run("ledger", "verify", "new.ledger").code == 0
    again = run(*given, "--out", "again")
    assert (again.code, again.err.count("\n")) == (2, 1)
    assert run("ledger", "create", "a.ledger", *SPEND).code == 0
    shared = run(*given[:-1], "a.ledger", "--out", "again")
    assert (shared.code, "uses batches" in shared.err) == (2, True)


@pytest.mark.usefixtures("people")
def test_settings_reach_the_method_and_what_is_written(run: Any) -> None:
    given = ("--method", "dpagd", "--set", "gamma=0.2", "--set", "splits=4", "--set", "m=20")
    plan = run(*TRAIN, *given, "--dry-run")
    assert "dpagd, growth=0.2, splits=4.0, grid.count=20, " in plan.out
    done = run(*TRAIN, *given, "--out", "fit", "--json")
    assert (done.code, done.err) == (0, "")
    assert done.json["settings"] == {"growth": 0.2, "splits": 4.0, "grid.count": 20}
    assert done.json["steps"] <= 4 < run(*TRAIN, *given[:2], "--out", "plain", "--json").json["steps"]
    with np.load("fit/model.npz") as model:
        assert json.loads(str(model["privacy"]))["settings"] == done.json["settings"]
    assert "dpagd, gamma=0.2, splits=4, m=20" in Path("fit/report.html").read_text()
    twice = run(*TRAIN, *given, "--set", "growth=1", "--out", "again")
    assert (twice.code, "--set growth=1: 'growth' is set twice" in twice.err) == (2, True)


WRONG_TABLES: list[tuple[bytes | None, str]] = [
    (None, "there is no file 'people.csv'"),
    (b"", "is empty"),
    (b"\n", "is empty"),
    (b"age,sex,rich\n", "has no records"),
    (b"\x00\x01secret\x02", "no column 'age'"),
    (b"PK\x03\x04\x14\x00secret\xff\xfe", "not a complete zip file"),
    (b"ARROW1\0\0secret", "an Arrow .Feather. file: write it as Parquet"),
    ("age,sex,rich\n39,Malé,no\n".encode("latin-1"), "not UTF-8 text"),
    ("age,sex,rich\n39,Male,no\n".encode("utf-16")[:-1], "not UTF-8 text|not every record"),
    (b"age:sex:rich\n39:Male:no\n40:Male:yes\n", "no column 'age', .* between commas"),
    (b"age,age,sex,rich\n39,1,Male,no\n", "two columns 'age'"),
    (b"age,rich\n39,no\n", "no column 'sex'"),
    (b"age,sex\n39,Male\n", "no column 'rich'"),
    (b"age,sex,rich\n39,Male,no\n40,Male\n", "not every record has as many cells as the header, 3"),
    (b"age,sex,rich\n39,Male,no\n40,Male,no,secret\n", "not every record has as many cells as the header, 3"),
    (b'age,sex,rich\n39,"Male,no\n40,secret,no\n', "not a CSV table"),
    (b"PAR1 secret", "not a complete Parquet file|needs pyarrow"),
]


@pytest.mark.parametrize(("content", "message"), WRONG_TABLES)
def test_a_wrong_table_is_one_sentence(run: Any, people: Path, content: bytes | None, message: str) -> None:
    if content is None:
        Path("people.csv").unlink()
    else:
        Path("people.csv").write_bytes(content)
    ft.Ledger(ft.Budget(3.0, 1e-5), journal="a.ledger").close()
    before = contents(people)
    for book in ("a.ledger", "new.ledger"):
        done = run(*TRAIN, "--ledger", book, "--out", "fit")
        assert (done.code, done.out) == (2, "")
        assert done.err.count("\n") == 1
        assert re.search(message, done.err)
        assert "secret" not in done.err
        assert contents(people) == before


def test_a_folder_in_place_of_a_table(run: Any, people: Path) -> None:
    before = contents(people)
    done = run("train", ".", *TRAIN[2:], "--ledger", "a.ledger")
    assert (done.code, done.out, done.err) == (2, "", "farthing: '.' cannot be read: Is a directory\n")
    assert contents(people) == before


@pytest.mark.usefixtures("people")
def test_a_byte_order_mark_is_no_part_of_a_name(run: Any) -> None:
    Path("people.csv").write_bytes(b"\xef\xbb\xbf" + Path("people.csv").read_bytes())
    assert run(*TRAIN, "--out", "fit").code == 0


def test_a_name_with_dots_never_becomes_a_path(run: Any, people: Path) -> None:
    """Of a column, that is: what --out and --ledger name is the user's own choice."""
    inner = people / "inner"
    inner.mkdir()
    rows = "\n".join(f"{row % 100},{('no', 'yes')[row % 2]}" for row in range(200))
    Path("inner/people.csv").write_text(f"../age,../../rich\n{rows}\n")
    before = set(contents(people))
    done = run(
        *("train", "inner/people.csv", *SPEND, "--target", "../../rich", "--out", "inner/fit"),
        *("--bounds", "../age=0:100", "--values", "../../rich=no,yes"),
    )
    assert done.code == 0
    new = set(contents(people)) - before
    assert new == {
        f"inner/fit{name}"
        for name in (
            *("", "/model.npz", "/privacy.json", "/report.html"),
            *("/train.ledger", "/train.ledger.head"),
        )
    }


# --- values outside the schema


@pytest.mark.parametrize(
    "record",
    [
        "40,Male,no",
        "secret,Male,no",
        "nan,Male,no",
        "1e999,Male,no",
        ",Male,no",
        "40,Male,secret",
        "40,Male,",
        ",,",
    ],
)
@pytest.mark.usefixtures("people")
def test_no_record_decides_how_a_training_ends(run: Any, record: str) -> None:
    """One record more: a label that occurs once, or not at all, a missing number, a word in its place."""
    for rows in ("", "39,Female,no\n", "39,Female,no\n40,Male,yes\n"):
        Path("people.csv").write_text(f"age,sex,rich\n{rows}")
        ends = [run(*TRAIN, "--out", "without", "--records", "2", "--force")]
        Path("people.csv").write_text(f"age,sex,rich\n{rows}{record}\n")
        ends.append(run(*TRAIN, "--out", "within", "--records", "2", "--force"))
        for done in ends:
            assert (done.code, done.out) == (0, "")
            assert "secret" not in done.err
        told = [done.err.replace("within", "without") for done in ends]
        assert told[0] == told[1]
        done = run(*TRAIN, "--out", "fit", "--strict", "--force")
        assert done.code == (0 if record == "40,Male,no" else 2)
    assert not any(b"secret" in path.read_bytes() for path in Path("within").iterdir())


def test_values_outside_the_schema_are_clipped_unless_strict(run: Any, people: Path) -> None:
    """The documented behaviour: numbers are clipped, a feature's unknown value counts as none."""
    rows = Path("people.csv").read_text()
    Path("people.csv").write_text(rows + "250,Male,no\n")
    assert run(*TRAIN, "--out", "clipped").code == 0
    before = contents(people)
    done = run(*TRAIN, "--out", "fit", "--strict", "--ledger", "a.ledger")
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch("farthing: column 'age' of 'people.csv' has values .* --strict refuses\n", done.err)
    assert contents(people) == before
    Path("people.csv").write_text(rows + "25,Unknown,no\n")
    assert run(*TRAIN, "--out", "counted").code == 0
    done = run(*TRAIN, "--out", "fit", "--strict")
    assert (done.code, done.out) == (2, "")
    assert "column 'sex'" in done.err
    assert "Unknown" not in done.err
    Path("people.csv").write_text(rows)
    assert run(*TRAIN, "--out", "fit", "--strict").code == 0


# --- schemas by options, and drafts


@pytest.mark.usefixtures("people")
def test_a_schema_spelt_out_is_the_same_as_a_file(run: Any) -> None:
    options = ("--bounds", "age=0:100", "--values", "sex=Female,Male", "--values", "rich=no,yes")
    done = run("train", "people.csv", *SPEND, "--target", "rich", *options, "--dry-run", "--json")
    assert (done.code, done.err) == (0, "")
    by_file = run(*TRAIN, "--dry-run", "--json").json
    assert {**done.json, "answers": None} == {**by_file, "answers": None}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--bounds", "age"), "--bounds must be NAME=LOW:HIGH"),
        (("--bounds", "age=0"), "--bounds must be NAME=LOW:HIGH"),
        (("--bounds", "age=9:1"), "--bounds must be NAME=LOW:HIGH with LOW below HIGH"),
        (("--bounds", "age=0:nan"), "--bounds must be NAME=LOW:HIGH"),
        (("--bounds", "=0:1"), "--bounds must be NAME=LOW:HIGH"),
        (("--values", "sex"), "--values must be NAME=A,B"),
        (("--values", "sex=a,a"), "column 'sex' needs distinct values"),
        (("--bounds", "rich=0:1"), "must declare each column once"),
        (("--values", "sex=Female,Male", "--target", "age"), "--target must be declared as well"),
    ],
)
@pytest.mark.usefixtures("people")
def test_wrong_declarations_are_one_sentence(run: Any, options: tuple[str, ...], message: str) -> None:
    target = () if "--target" in options else ("--target", "rich")
    done = run("train", "people.csv", *SPEND, "--values", "rich=no,yes", *target, *options)
    assert (done.code, done.out) == (2, "")
    assert done.err.count("\n") == 1
    assert message in done.err


@pytest.mark.usefixtures("people")
def test_a_draft_is_refused_until_a_person_deletes_its_line(run: Any) -> None:
    done = run("schema", "people.csv", "--target", "rich")
    assert done.code == 0
    assert "private records" in done.err
    assert "no guarantee" in done.err
    draft = json.loads(done.out)
    assert draft.pop("drafted_from_private_data")
    assert draft == {
        "columns": [{"name": "age", "low": 0, "high": 100}, {"name": "sex", "values": ["Female", "Male"]}],
        "target": {"name": "rich", "values": ["no", "yes"]},
    }
    written = run("schema", "people.csv", "--target", "rich", "--out", "draft.json")
    assert (written.code, written.out) == (0, "")
    assert Path("draft.json").read_text() == done.out
    refused = run("train", "people.csv", *SPEND, "--schema", "draft.json", "--out", "fit")
    assert (refused.code, refused.out) == (2, "")
    lines = Path("draft.json").read_text().splitlines()
    Path("draft.json").write_text("\n".join(line for line in lines if "drafted" not in line))
    assert run("train", "people.csv", *SPEND, "--schema", "draft.json", "--out", "fit").code == 0


@pytest.mark.usefixtures("people")
def test_wrong_drafts_are_one_sentence(run: Any) -> None:
    for arguments, message in (
        (("missing.csv",), "there is no file"),
        (("people.csv", "--target", "salary"), "no column 'salary'"),
        (("people.csv", "--out", "people.csv", "--force"), "is read by this command"),
        (("people.csv", "--out", "schema.json"), "exists already"),
    ):
        done = run("schema", *arguments)
        assert (done.code, done.out) == (2, "")
        assert done.err.count("\n") == 1
        assert message in done.err


# --- dry runs


def test_a_dry_run_spends_and_writes_nothing_and_reads_no_cell(run: Any, people: Path) -> None:
    ft.Ledger(ft.Budget(3.0, 1e-5), journal="a.ledger").close()
    Path("people.csv").write_text("age,sex,rich\n" + "secret,secret,secret\n" * 300)
    before = contents(people)
    for book in ("a.ledger", "new.ledger"):
        done = run(*TRAIN, "--ledger", book, "--dry-run", "--json")
        assert (done.code, done.err) == (0, "")
        told = done.json
        assert (told["guarantee"]["epsilon"], told["guarantee"]["delta"], told["guarantee"]["adjacency"]) == (
            1.0,
            1e-5,
            "add-remove",
        )
        assert (told["guarantee"]["unit"], told["guarantee"]["observer"], told["records"]) == (
            "record",
            "anyone",
            300,
        )
        assert told["guarantee"]["accountant"] == "gdp"
        gradients = next(part for part in told["answers"] if part["what"] == "gradient")
        assert gradients["times"] == told["steps"] > 20
        assert gradients["sampler"] == "everyone"
        assert gradients["deviation"][0] == pytest.approx(
            gradients["noise_multiplier"][0] * gradients["clip_norm"][0]
        )
        assert told["share"][0] == 0 < told["share"][1] <= 1
        assert contents(people) == before
    text = run(*TRAIN, "--dry-run")
    assert (text.code, text.err) == (0, "")
    assert "standard deviation" in text.out
    assert "(1, 1e-05)-DP, add-remove, per record, against anyone, by gdp" in text.out


@pytest.mark.usefixtures("people")
def test_a_dry_run_tells_the_noise_that_is_then_added(run: Any) -> None:
    told = run(*TRAIN, "--method", "sgd-ma", "--dry-run", "--json").json
    (lots,) = told["answers"]
    assert lots["sampler"].startswith("poisson, sampling rate ")
    assert run(*TRAIN, "--method", "sgd-ma", "--ledger", "a.ledger").code == 0
    shown = run("ledger", "show", "a.ledger", "--json").json
    (part,) = shown["plan"]
    assert lots["noise_multiplier"] == [part["event"]["event"]["noise"]] * 2
    assert lots["times"] == part["times"]


@pytest.mark.usefixtures("people")
def test_a_dry_run_notices_what_is_spent_and_what_is_missing(run: Any) -> None:
    assert run(*TRAIN, "--ledger", "a.ledger", "--out", "fit").code == 0
    done = run(*TRAIN, "--ledger", "a.ledger", "--dry-run")
    assert (done.code, done.out) == (3, "")
    Path("people.csv").write_text("age,rich\n1,no\n")
    done = run(*TRAIN, "--dry-run", "--records", "300")
    assert (done.code, done.out) == (2, "")
    assert "no column 'sex'" in done.err


# --- files and ledgers


def test_a_folder_without_permission(run: Any, people: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", denied)  # root may write everywhere
    done = run(*TRAIN, "--ledger", "a.ledger", "--out", "closed")
    assert (done.code, done.out) == (2, "")
    assert "--out must be writable: 'closed/model.npz': Permission denied" in done.err
    assert not (people / "a.ledger").exists()


def test_a_spent_ledger_exits_with_3(run: Any, people: Path) -> None:
    assert run(*TRAIN, "--ledger", "a.ledger", "--out", "first").code == 0
    before = contents(people)
    for method in ("auto", "dpagd"):
        done = run(*TRAIN, "--ledger", "a.ledger", "--out", "second", "--method", method)
        assert (done.code, done.out) == (3, "")
        assert done.err.count("\n") == 1
        assert "0.000% is left" in done.err
        assert contents(people) == before


def test_a_used_up_plan_exits_with_3(run: Any, people: Path) -> None:
    assert run(*TRAIN, "--ledger", "a.ledger", "--out", "first", "--method", "output").code == 0
    before = contents(people)
    for method in ("output", "auto", "sgd-ma"):
        done = run(*TRAIN, "--ledger", "a.ledger", "--out", "second", "--method", method)
        assert (done.code, done.out) == (3, "")
        assert re.fullmatch("farthing: --ledger holds the plan .* 0.000% left.*\n", done.err)
        assert contents(people) == before


def test_a_plan_in_a_shared_ledger_needs_basic_composition(run: Any, people: Path) -> None:
    ft.Ledger(ft.Budget(3.0, 1e-5), journal="a.ledger").close()
    before = contents(people)
    done = run(*TRAIN, "--ledger", "a.ledger", "--method", "output", "--out", "fit")
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch("farthing: --method output promises a plan, .* --filter basic\n", done.err)
    assert contents(people) == before
    new = ("ledger", "create", "b.ledger", "--epsilon", "3", "--delta", "1e-4", "--filter", "basic", "--json")
    assert run(*new).json["filter"]["name"] == "basic"
    for out in ("fit", "again"):
        assert run(*TRAIN, "--ledger", "b.ledger", "--method", "output", "--out", out).code == 0


def test_an_rdp_ledger_is_refused(run: Any, people: Path) -> None:
    new = ("ledger", "create", "a.ledger", "--epsilon", "3", "--delta", "1e-4", "--filter", "rdp")
    assert run(*new).code == 0
    before = contents(people)
    done = run(*TRAIN, "--ledger", "a.ledger", "--out", "fit")
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch("farthing: --ledger has an RDP filter, .* --filter gdp, .*\n", done.err)
    assert contents(people) == before


def _without_head(path: Path) -> None:
    Path(f"{path}.head").unlink()


def _without_rows(path: Path) -> None:
    path.unlink()


def _changed(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(b'"epsilon":2.0') + 10] ^= 1  # 2 becomes 3
    path.write_bytes(data)


def _of_another(path: Path) -> None:
    ft.Ledger(ft.Budget(2.0, 1e-5), journal="other.ledger").close()
    shutil.copy("other.ledger.head", f"{path}.head")


@pytest.mark.parametrize("damage", [_without_head, _without_rows, _changed, _of_another])
def test_a_locked_ledger_exits_with_1(run: Any, people: Path, damage: Any) -> None:
    ft.Ledger(ft.Budget(2.0, 1e-5), journal="a.ledger").close()
    damage(Path("a.ledger"))
    before = contents(people)
    done = run(*TRAIN, "--ledger", "a.ledger", "--out", "fit")
    assert (done.code, done.out) == (1, "")
    assert done.err.count("\n") == 1
    assert "a.ledger" in done.err
    assert contents(people) == before


def test_a_ledger_that_another_program_holds_exits_with_1(
    run: Any, people: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farthing.ledger.journal._BUSY_SECONDS", 0.05)
    ft.Ledger(ft.Budget(2.0, 1e-5), journal="a.ledger").close()
    with closing(sqlite3.connect("a.ledger", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        before = Path("a.ledger").read_bytes()
        done = run(*TRAIN, "--ledger", "a.ledger", "--out", "fit")
        assert (done.code, done.out) == (1, "")
        assert done.err.count("\n") == 1
        assert "database is locked" in done.err
        assert Path("a.ledger").read_bytes() == before
    assert not Path("fit").exists()
    assert run("ledger", "show", "a.ledger", "--json").json["share"] == 0


@pytest.mark.usefixtures("people")
def test_another_adjacency_than_the_ledgers_is_refused(run: Any) -> None:
    ft.Ledger(ft.Budget(2.0, 1e-5), journal="a.ledger").close()
    done = run(*TRAIN, "--ledger", "a.ledger", "--adjacency", "replace-one")
    assert (done.code, done.out) == (2, "")
    assert "adjacency must be the ledger's" in done.err
    assert json.loads(run("ledger", "show", "a.ledger", "--json").out)["share"] == 0


@pytest.mark.usefixtures("people")
def test_wrong_predictions_are_one_sentence(run: Any) -> None:
    run(*TRAIN, "--out", "fit")
    Path("other.csv").write_text("age,rich\n39,no\n")
    for arguments, message in (
        (("people.csv", "people.csv"), "MODEL must be"),
        (("missing", "people.csv"), "there is no model 'missing'"),
        (("fit", "missing.csv"), "cannot be read"),
        (("fit", "other.csv"), "no column 'sex'"),
        (("fit", "people.csv", "--out", "schema.json"), "schema.json' exists already"),
    ):
        done = run("predict", *arguments)
        assert (done.code, done.out) == (2, "")
        assert done.err.count("\n") == 1
        assert message in done.err


@pytest.mark.usefixtures("people")
def test_train_offers_no_fit_without_privacy(run: Any) -> None:
    done = run(*TRAIN, "--method", "nonprivate", "--out", "none")
    assert (done.code, done.out) == (2, "")
    assert "--method must be one of" in done.err
    assert "nonprivate'," not in done.err.split("got")[0]
