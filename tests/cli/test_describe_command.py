"""``farthing describe``, and trainings that buy bounds: figures within their errors, one budget."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

AGES = np.arange(20_000) * 7 % 74 + 17
PAY = (np.arange(20_000) * 13 % 997) * 60.5


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        f"{age};{pay:.1f};{'fmx'[place % 3]};20{place % 20:02}-06-01;{'no' if age < 50 else 'yes'}"
        for place, (age, pay) in enumerate(zip(AGES, PAY, strict=True))
    ]
    Path("a.csv").write_text("age;pay;sex;since;rich\n" + "\n".join(rows).replace(".", ",") + "\n")


def test_every_column_is_described_within_its_errors(run: Any) -> None:
    fields = run("describe", "a.csv", "--epsilon", "2", "--delta", "1e-6", "--json").json
    assert (fields["guarantee"]["epsilon"], fields["guarantee"]["delta"]) == (2.0, 1e-6)
    age, pay, *others = fields["columns"]
    for column, exact in ((age, AGES), (pay, PAY)):
        assert column["bought"]
        assert abs(column["count"] - 20_000) < 4 * column["count_error"]
        clipped = np.clip(exact, column["low"], column["high"])
        assert abs(column["mean"] - clipped.mean()) < 4 * column["mean_error"]
        quantiles = np.quantile(clipped, [0.05, 0.25, 0.5, 0.75, 0.95])
        off = np.abs(np.array(column["quantiles"]) - quantiles)
        assert (off < 3 * np.array(column["quantile_errors"])).all()
    assert [column["mean"] for column in others] == [None] * 3
    printed = run("describe", "a.csv", "--epsilon", "2", "--delta", "1e-6")
    assert "by private bounds" in printed.out
    assert "too few for a mean" in printed.out


def test_declared_columns_and_a_shared_ledger(run: Any) -> None:
    declared = ("--bounds", "since=2000-01-01:2019-12-31", "--values", "sex=f,m", "--bounds", "pay=private")
    spend = ("--epsilon", "1", "--delta", "1e-6", "--ledger", "my.ledger")
    assert run("ledger", "create", "my.ledger", "--epsilon", "3", "--delta", "1e-6").code == 0
    done = run("describe", "a.csv", *spend, *declared)
    assert done.code == 0, done.err
    assert "clipped to 2000-01-01 to 2019-12-31, as declared" in done.out
    assert "f 6,6" in done.out
    assert 0.05 < run("ledger", "show", "my.ledger", "--json").json["share"] < 0.5
    assert run("ledger", "verify", "my.ledger").code == 0
    assert run("describe", "a.csv", "--epsilon", "3", "--delta", "1e-6", "--ledger", "my.ledger").code == 3


def test_names_and_values_with_line_breaks_stay_on_their_lines(run: Any) -> None:
    Path("b.csv").write_text('"age\n(years)",note\n' + '30,"a\nb"\n40,\n' * 500)
    schema = {
        "columns": [{"name": "age\n(years)", "low": 0, "high": 90}],
        "target": {"name": "note", "values": ["a\nb", ""]},
    }
    Path("b.json").write_text(json.dumps(schema))
    done = run("describe", "b.csv", "--schema", "b.json", "--epsilon", "5", "--delta", "1e-6")
    assert done.code == 0, done.err
    assert done.out.splitlines()[0].startswith(r"age\n(years)  ")
    assert any(
        line.startswith("note ") and r"a\nb " in line and ", empty " in line for line in done.out.splitlines()
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--epsilon", "0"), "--epsilon"),
        (("--epsilon", "1", "--delta", "2"), "--delta"),
        (("--epsilon", "1", "--bounds", "agee=0:9"), "no column 'agee'"),
        (("--epsilon", "1", "--drop", "agee"), "did you mean 'age'?"),
        (("--epsilon", "1", "--bounds", "age=9:0"), "--bounds must be NAME=LOW:HIGH"),
        (("--epsilon", "1", "--bounds", "age=private", "--values", "age=1"), "twice"),
        (("--epsilon", "1", "--schema", "none.json"), "--schema 'none.json' cannot be read"),
        (("--epsilon", "1", "--ledger", "a.csv"), "a.csv"),
    ],
)
def test_nonsense_is_one_sentence(run: Any, more: tuple[str, ...], message: str) -> None:
    done = run("describe", "a.csv", *more)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert not Path("a.csv.head").exists()


@pytest.mark.slow  # an empty cell is taken for a full one, and spoils the bounds, once in 10⁴ runs
def test_a_training_buys_bounds_from_its_own_budget(run: Any) -> None:
    train = ("train", "a.csv", "--epsilon", "2", "--delta", "1e-6", "--target", "rich")
    declared = ("--bounds", "age=private", "--bounds", "pay=private", "--values", "rich=no,yes")
    done = run(*train, *declared, "--holdout", "0.3", "--ledger", "my.ledger", "--out", "fit", "--json")
    assert done.code == 0, done.err
    assert done.json["test"]["accuracy"] > 0.9
    assert run("ledger", "show", "my.ledger", "--json").json["share"] <= 1
    assert run("ledger", "verify", "my.ledger").code == 0
    labels = run("predict", "fit", "a.csv").out.split()
    assert np.mean(np.array(labels) == np.where(AGES < 50, "no", "yes")) > 0.9
    schema = json.loads(str(np.load("fit/model.npz")["schema"]))
    assert schema["columns"][0]["high"] < 200
    assert run(*train, *declared, "--dry-run").code == 0
    for wrong, message in (
        (("--method", "sgd-ma"), "bounds='private' needs a solver"),
        (("--format", "skops"), "--format cannot write"),
        (("--missing", "age=3"), "no declared bounds"),
    ):
        refused = run(*train, *declared, *wrong)
        assert (refused.code, message in refused.err) == (2, True), refused.err


def test_bounds_may_be_private_in_a_schema(run: Any) -> None:
    Path("s.json").write_text(
        '{"columns": [{"name": "age", "bounds": "private"}, {"name": "pay", "low": 0, "high": 70000}], '
        '"target": {"name": "rich", "values": ["no", "yes"]}}'
    )
    spend = ("--epsilon", "2", "--delta", "1e-6", "--schema", "s.json")
    assert run("train", "a.csv", *spend, "--out", "fit").code == 0
    simulated = run("simulate", "a.csv", *spend, "--clients", "10")
    assert (simulated.code, "only train and describe buy bounds" in simulated.err) == (2, True)


@pytest.mark.filterwarnings("default:the noise hides")  # as for everybody who is no test
def test_bounds_that_the_noise_hides_are_told_in_one_sentence(run: Any) -> None:
    spend = ("--epsilon", "1e-4", "--delta", "1e-6", "--target", "rich", "--values", "rich=no,yes")
    trained = run("train", "a.csv", *spend, "--bounds", "age=private", "--out", "hidden")
    assert trained.code == 0
    assert trained.err.count("farthing: the noise hides the values of the columns") == 1  # not at a rehearsal
    assert "UserWarning" not in trained.err


def test_a_delta_of_zero_is_refused_where_the_ledger_needs_one(run: Any) -> None:
    assert run("ledger", "create", "my.ledger", "--epsilon", "3", "--delta", "1e-6").code == 0
    done = run("describe", "a.csv", "--epsilon", "1", "--ledger", "my.ledger", "--values", "sex=f,m")
    assert (done.code, done.out) == (2, "")
    assert "--delta must be above 0 with this ledger, which adds up charges by gdp" in done.err
    assert run("ledger", "show", "my.ledger", "--json").json["share"] == 0
