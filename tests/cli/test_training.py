"""Training on a table: the model file, what is charged and when, and what is told."""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farthing as ft
from farthing.accounting import gaussian
from farthing.accounting.filters import BasicFilter, ZcdpFilter
from farthing.cli import measuring, outputs
from farthing.cli.job import TrainingJob
from farthing.cli.main import main
from farthing.cli.training import train
from farthing.data import model_file, table_files
from farthing.data.model_file import Model
from farthing.data.schema import Categorical, Numeric, Schema
from farthing.data.splitting import Split
from farthing.data.tables import Features
from farthing.errors import BudgetSpent, FarthingError, InvalidValue, Unsupported
from farthing.linear.additive.basis import DEPTH
from farthing.linear.losses import LinearGradient
from farthing.linear.problem import Problem
from farthing.linear.solvers import CLASSIFIERS, SolverMethod

SCHEMA = Schema(
    (Numeric("age", 0, 100), Categorical("sex", ("Female", "Male"))), Categorical("rich", ("no", "yes"))
)
COLOURS = Schema((Numeric("age", 0, 100),), Categorical("colour", ("red", "green", "blue")))
HOURS = Schema((Numeric("age", 0, 100),), Numeric("hours", 0, 60))


def write_table(path: Path, rows: int = 600) -> str:
    """Those over 50 are rich, and work 0.6 hours a year of age."""
    lines = ["age,sex,rich,colour,hours"]
    for row in range(rows):
        age = 100 * row / rows
        colour = ("red", "green", "blue")[int(age // 34)]
        lines.append(f"{age},{('Female', 'Male')[row % 2]},{('no', 'yes')[age > 50]},{colour},{0.6 * age}")
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.fixture
def job(tmp_path: Path) -> TrainingJob:
    table = write_table(tmp_path / "people.csv")
    return TrainingJob(table, SCHEMA, epsilon=200.0, delta=1e-5, out=tmp_path / "out")


def saved(job: TrainingJob) -> Model:
    return outputs.loaded(job.out)


def test_a_classifier_learns_and_its_file_predicts(job: TrainingJob, tmp_path: Path) -> None:
    test = write_table(tmp_path / "test.csv", 300)
    told = train(replace(job, test=test))
    assert told["test"]["accuracy"] > 0.8 > told["test"]["guessing"]
    labels = list(saved(job).predictions(test))
    truth = ["no" if 100 * row / 300 <= 50 else "yes" for row in range(300)]
    assert np.mean(np.array(labels) == truth) == told["test"]["accuracy"]


def test_three_classes_and_a_machine(job: TrainingJob, tmp_path: Path) -> None:
    test = write_table(tmp_path / "test.csv", 300)
    for kind in ("logistic", "svm"):
        told = train(replace(job, schema=COLOURS, model=kind, test=test, force=True))
        assert "auc" not in told["test"]
        assert ("log_loss" in told["test"]) is (kind == "logistic")
        model = saved(job)
        assert model.coef.shape == (3, 1)
        labels = np.array(list(model.predictions(test)))
        assert set(labels) <= {"red", "green", "blue"}
        truth = [("red", "green", "blue")[int(100 * row / 300 // 34)] for row in range(300)]
        assert np.mean(labels == truth) == told["test"]["accuracy"]


def test_a_regression_predicts_in_its_own_unit(job: TrainingJob, tmp_path: Path) -> None:
    test = write_table(tmp_path / "test.csv", 300)
    told = train(replace(job, schema=HOURS, test=test))
    assert told["test"]["rmse"] < told["test"]["rmse_of_mean"]
    found = np.array(list(saved(job).predictions(test)))
    truth = 0.6 * 100 * np.arange(300) / 300
    assert np.sqrt(np.mean(np.square(found - truth))) == pytest.approx(told["test"]["rmse"])


@pytest.mark.parametrize(
    ("kind", "schema"),
    [("additive", SCHEMA), ("boosted", COLOURS), ("boosted", HOURS), ("poisson", HOURS), ("huber", HOURS)],
)
def test_the_file_of_any_model_predicts_what_the_model_does(
    job: TrainingJob, tmp_path: Path, kind: str, schema: Schema
) -> None:
    test = write_table(tmp_path / "test.csv", 300)
    told = train(replace(job, schema=schema, model=kind, test=test))
    assert told["trained"] == kind
    found, age = np.array(list(outputs.loaded(job.out).predictions(test))), 100 * np.arange(300) / 300
    if schema is HOURS:
        rmse = np.sqrt(np.mean(np.square(found - 0.6 * age)))
        assert rmse == pytest.approx(told["test"]["rmse"])
        return
    colours = np.array(["red", "green", "blue"])[(age // 34).astype(int)]
    truth = np.where(age <= 50, "no", "yes") if schema is SCHEMA else colours
    assert np.mean(found == truth) == told["test"]["accuracy"]
    assert "log_loss" in told["test"]


def test_the_report_says_which_model_was_chosen_and_why(job: TrainingJob) -> None:
    told = train(replace(job, model="boosted", epsilon=0.1))
    assert told["choice"] == "linear: the budget is worth 20 records, a boosted model needs 250"
    assert told["choice"] in (job.out / "report.html").read_text()
    assert json.loads((job.out / "privacy.json").read_text())["choice"] == told["choice"]


def test_settings_of_a_model_reach_it(job: TrainingJob) -> None:
    told = train(replace(job, schema=HOURS, model="quantile", settings=("quantile=0.9",)))
    assert told["settings"] == {"quantile": 0.9}
    for settings in (("quantile=2",), ("quantile=x",), ("quantile=0.1", "quantile=0.2"), ("threshold=1",)):
        with pytest.raises(InvalidValue, match=r"quantile|threshold"):
            train(replace(job, schema=HOURS, model="quantile", settings=settings, force=True))


@pytest.mark.parametrize("kind", ["additive", "boosted"])
def test_models_with_shapes_refuse_what_only_linear_ones_have(job: TrainingJob, kind: str) -> None:
    with pytest.raises(Unsupported, match=f"got --model {kind}: leave --format out"):
        train(replace(job, model=kind, formats=("skops",)))
    with pytest.raises(Unsupported, match="--budget-column needs a linear model"):
        train(replace(job, model=kind, epsilon=None, budget_column="age"))
    with pytest.raises(InvalidValue, match=f"--method of --model {kind} must be one of"):
        train(replace(job, model=kind, method="dpagd"))
    with pytest.raises(InvalidValue, match="--delta must be above 0"):
        train(replace(job, model=kind, delta=0.0))
    assert not job.out.exists()


@pytest.mark.parametrize("name", ["tables", "questions", "leaves", "scale"])
def test_a_file_with_other_shapes_than_its_schema_is_refused(job: TrainingJob, name: str) -> None:
    train(replace(job, model="boosted"))
    with np.load(job.out / "model.npz", allow_pickle=False) as file:
        arrays = dict(file)
    # Whether a tree survives its noise is chance, so the file gets one of its own.
    arrays |= {"questions": np.zeros((1, 2, DEPTH), np.int64), "leaves": np.zeros((1, 1 + 2**DEPTH))}
    np.savez(job.out / "model.npz", **arrays)
    assert outputs.loaded(job.out).schema == SCHEMA
    arrays[name] = arrays[name][1:] if name != "questions" else arrays[name] + 300
    np.savez(job.out / "model.npz", **arrays)
    with pytest.raises(InvalidValue, match="is not a model"):
        outputs.loaded(job.out)
    with pytest.raises(InvalidValue, match="is not a model"):
        Model.load(job.out)  # which reads linear ones


def test_the_model_file_holds_numbers_and_texts_only(job: TrainingJob) -> None:
    train(job)
    with np.load(job.out / "model.npz", allow_pickle=False) as file:
        assert file["coef"].shape == (1, 3)
        assert file["intercept"].shape == (1,)
        assert file["classes"].tolist() == ["no", "yes"]
        assert file["feature_names"].tolist() == ["age", "sex=Female", "sex=Male"]
        assert Schema.from_json(str(file["schema"])) == SCHEMA
        privacy = json.loads(str(file["privacy"]))
    beside = json.loads((job.out / "privacy.json").read_text())
    assert beside.pop("sha256") == {"model": hashlib.sha256((job.out / "model.npz").read_bytes()).hexdigest()}
    assert privacy == beside
    assert privacy["guarantee"]["epsilon"] == 200.0
    assert sorted(path.name for path in job.out.iterdir()) == [
        *("model.npz", "privacy.json", "report.html", "train.ledger", "train.ledger.head")
    ]


def test_the_default_is_boosted_where_the_budget_allows_it_and_linear_where_something_needs_it(
    job: TrainingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    for model in (None, "auto"):
        told = train(replace(job, model=model, force=True))
        assert told["trained"] == "boosted"
        assert told["choice"].startswith("boosted: the budget is worth")
    assert train(replace(job, schema=HOURS, epsilon=0.1, force=True))["choice"].startswith(
        "linear: the budget"
    )
    for changed in ({"method": "dpagd"}, {"method": "pure", "delta": 0.0}):
        told = train(replace(job, force=True, **changed))
        assert told["trained"] == "logistic"
        assert "choice" not in told
    monkeypatch.setattr("farthing.cli.training.LARGE", 599)
    told = train(replace(job, force=True))
    assert (told["trained"], told["choice"]) == ("logistic", "linear: there are more than 2,097,152 records")
    assert train(replace(job, records=599, force=True))["trained"] == "boosted"  # the public number decides
    assert train(replace(job, model="boosted", force=True))["trained"] == "boosted"


def test_the_default_is_linear_where_a_format_needs_it(job: TrainingJob) -> None:
    pytest.importorskip("skops", reason="needs the extra export")
    told = train(replace(job, formats=("skops",)))
    assert (told["trained"], told["choice"]) == ("logistic", "linear: --format needs a linear model")


def test_two_trainings_at_once_do_not_share_a_ledger_that_neither_named(job: TrainingJob) -> None:
    @contextmanager
    def meanwhile(csv: Any) -> Iterator[Any]:
        job.out.mkdir(exist_ok=True)
        ft.Ledger(ft.Budget(1.0, 1e-5), journal=job.out / "train.ledger").close()
        yield csv

    with pytest.raises(InvalidValue, match=r"another training has begun .*train\.ledger' meanwhile"):
        train(job, reading=meanwhile)
    with ft.Ledger.open(job.out / "train.ledger") as ledger:
        assert ledger.share == 0


def test_what_is_told(job: TrainingJob) -> None:
    told = train(job)
    assert list(told) == [
        *("format", "software", "date", "guarantee", "trained", "choice", "method", "settings", "steps"),
        "records",
        *(
            "rows_per_person",
            "features",
            "partial",
            "spent",
            "public",
            "ledger",
            "ledger_head",
            "earlier_ledgers",
        ),
        *("model", "report", "sha256"),
    ]
    stated = ["epsilon", "delta", "adjacency", "unit", "observer", "accountant", "theorem", "note"]
    assert list(told["guarantee"]) == list(told["spent"]) == stated
    assert (told["records"], told["features"], told["ledger"]) == (600, 3, str(job.out / "train.ledger"))
    assert "taken as public" in told["guarantee"]["note"]


def test_a_declared_number_of_records_is_the_only_one_told(job: TrainingJob) -> None:
    told = train(replace(job, records=550))
    assert told["records"] == 550
    assert told["guarantee"]["note"] == ""
    written = (job.out / "privacy.json").read_text()
    assert "600" not in re.sub('"[0-9a-f]{64}"|"date.*', "", written)  # a hash has any digits


def test_a_second_training_never_replaces_the_ledger_of_the_first(job: TrainingJob) -> None:
    first = train(job)
    before = (job.out / "train.ledger").read_bytes()
    second = train(replace(job, force=True))
    assert (job.out / "train.ledger").read_bytes() == before
    assert second["ledger"] == str(job.out / "train-2.ledger")
    assert (first["earlier_ledgers"], second["earlier_ledgers"]) == ([], [first["ledger"]])
    assert "Earlier trainings in the same folder wrote" in (job.out / "report.html").read_text()
    for path in ("train.ledger", "train-2.ledger"):
        with ft.Ledger.open(job.out / path) as ledger:
            assert ledger.share == 1


def test_what_was_taken_as_public_is_written_down(job: TrainingJob) -> None:
    told = train(replace(job, schema=replace(SCHEMA, checked_by="Ann, today")))["public"]
    assert told["schema"]["checked_by"] == "Ann, today"
    assert told["schema"]["source"] == "the command line"
    with np.load(job.out / "model.npz", allow_pickle=False) as file:
        assert hashlib.sha256(str(file["schema"]).encode()).hexdigest() == told["schema"]["sha256"]
    assert [column["name"] for column in told["columns"]] == ["age", "sex"]
    assert told["columns"][0] == {"name": "age", "low": 0, "high": 100}
    assert "checked by Ann, today" in (job.out / "report.html").read_text()


@pytest.mark.parametrize("method", ["sgd-ma", "output"])
def test_a_plan_that_is_measured_on_held_out_records_is_in_a_ledger_too(
    job: TrainingJob, method: str
) -> None:
    told = train(replace(job, epsilon=1.0, method=method, holdout=0.5, schema=SCHEMA))
    assert "accuracy" in told["test"]
    report = (job.out / "report.html").read_text()
    assert "Measured within the guarantee" in report
    assert "Nothing else, as far as this report knows" in report
    with ft.Ledger.open(told["ledger"]) as ledger:
        assert ledger.share == 1


def test_adjacency_reaches_the_guarantee(job: TrainingJob) -> None:
    assert train(replace(job, adjacency=ft.Adjacency.REPLACE_ONE))["guarantee"]["adjacency"] == "replace-one"


def test_the_embedded_data_trains_and_tests_on_different_records() -> None:
    X, y = table_files.read("adult", table_files.ADULT)
    X_test, y_test = table_files.read("adult", table_files.ADULT, test=True)
    assert (len(X), len(X_test)) == (len(y), len(y_test)) == (32_561, 16_281)


def test_values_beyond_the_schema_are_clipped_or_zero(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("age,sex,rich\n250,Unknown,no\n-3,,yes\n")
    X, y = table_files.read(str(path), SCHEMA)
    assert X.tolist() == [[1, 0, 0], [0, 0, 0]]
    assert y.tolist() == [0, 1]


# --- ledgers


def rows(path: Path) -> list[str]:
    with ft.Ledger.open(path) as ledger:
        return [row.kind for row in ledger.journal.rows()]


def test_a_new_ledger_holds_the_budget_and_is_spent(job: TrainingJob, tmp_path: Path) -> None:
    path = tmp_path / "a.ledger"
    told = train(replace(job, ledger=path))
    assert told["ledger"] == str(path)
    with ft.Ledger.open(path) as ledger:
        assert ledger.budget == ft.Budget(200.0, 1e-5)
        assert ledger.share == pytest.approx(1)
    with pytest.raises(BudgetSpent):
        train(replace(job, ledger=path, force=True))
    assert rows(path) == ["open", "charge", "note"]


def test_parts_of_one_ledger(job: TrainingJob, tmp_path: Path) -> None:
    path = tmp_path / "a.ledger"
    ft.Ledger(ft.Budget(3.0, 1e-5, "replace-one"), journal=path).close()
    part = replace(job, ledger=path, epsilon=1.0, force=True)
    told = train(part)
    assert (told["guarantee"]["epsilon"], told["guarantee"]["adjacency"]) == (
        1.0,
        "replace-one",
    )  # the ledger's, since none was named
    with ft.Ledger.open(path) as ledger:
        assert 0 < ledger.share < 0.5
    for _ in range(3):  # μ² adds up, which allows more than ε would
        train(part)
    with pytest.raises(BudgetSpent):
        train(replace(part, epsilon=2.5))
    with ft.Ledger.open(path) as ledger:
        assert ledger.spent.epsilon <= 3.0


def test_what_is_told_of_people_is_about_all_their_records(job: TrainingJob, tmp_path: Path) -> None:
    lines = Path(job.table).read_text().splitlines()
    named = [f"{line},{'who' if row == 0 else row % 200}" for row, line in enumerate(lines)]
    table = tmp_path / "visits.csv"
    table.write_text("\n".join(named) + "\n")
    told = train(replace(job, table=str(table), epsilon=4.0, user="who", rows=3, records=600))
    assert (told["user_column"], told["rows_per_person"]) == ("who", 3)
    assert told["spent"]["epsilon"] == pytest.approx(4.0)
    assert told["spent"]["note"].endswith("epsilon 4 holds")
    page = Path(told["report"]).read_text()
    assert "answers ε is 4 of 4" in page
    assert "at most 3 are used; the column who identifies the person" in page
    path = tmp_path / "again.html"
    main(["report", told["ledger"], "--privacy", str(job.out / "privacy.json"), "--out", str(path)])
    assert "For all records of a person together ε is 4, at the same δ" in path.read_text()


def test_a_ledger_per_user_is_refused(job: TrainingJob, tmp_path: Path) -> None:
    path = tmp_path / "a.ledger"
    ft.Ledger(ft.Budget(200.0, 1e-5, unit="user"), journal=path).close()
    with pytest.raises(InvalidValue, match="must have unit record"):
        train(replace(job, ledger=path))
    assert rows(path) == ["open"]


@ft.until_spent
def _planned(ledger: ft.Ledger, problem: Problem) -> Iterator[ft.Step]:
    """Promises a plan, and asks it until it is spent."""
    features = Features(problem.width, intercept=float(problem.intercept))
    query = ft.Query(
        ft.Everyone(),
        LinearGradient(problem.loss, features),
        ft.ClipNorm(1.0),
        ft.Gaussian(0.5),
    )
    ledger.promise(query, 5)
    w = problem.zeros(features.size)
    for t in range(1, 9):
        answer = ledger.ask(query, w)
        w = w - answer.value / problem.records
        yield ft.Step(t, features.unfold(w), (answer.receipt,))


@ft.until_spent
def _picky(ledger: ft.Ledger, problem: Problem) -> Iterator[ft.Step]:
    raise Unsupported("two outputs only")
    yield


@pytest.fixture
def methods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CLASSIFIERS, "planned", SolverMethod(_planned, filter=None))
    monkeypatch.setitem(CLASSIFIERS, "picky", SolverMethod(_picky))
    monkeypatch.setitem(
        CLASSIFIERS, "careful", SolverMethod(CLASSIFIERS["auto"].algorithm, filter=ZcdpFilter)
    )


@pytest.mark.usefixtures("methods")
def test_what_a_method_refuses_is_not_charged(job: TrainingJob, tmp_path: Path) -> None:
    path = tmp_path / "a.ledger"
    with pytest.raises(Unsupported, match="two outputs only"):
        train(replace(job, ledger=path, method="picky"))
    assert not path.exists()
    ft.Ledger(ft.Budget(300.0, 1e-5), journal=path).close()
    for method in ("picky", "planned"):  # a plan cannot be a part of a GDP filter's budget
        with pytest.raises(Unsupported):
            train(replace(job, ledger=path, method=method))
    assert rows(path) == ["open"]
    assert not job.out.exists()


def test_a_training_is_rehearsed_once_and_paid_by_one_ledger(
    job: TrainingJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, started, begin = list[object](), list[int](), ft.Ledger.__init__

    def algorithm(ledger: ft.Ledger, problem: Problem) -> Iterator[ft.Step]:
        started.append(len(ledger._records))  # type: ignore[arg-type]
        return CLASSIFIERS["auto"].algorithm(ledger, problem)

    def init(self: ft.Ledger, *args: Any, **options: Any) -> None:
        made.append(options.get("journal"))
        begin(self, *args, **options)

    monkeypatch.setitem(CLASSIFIERS, "counted", SolverMethod(algorithm))
    monkeypatch.setattr(ft.Ledger, "__init__", init)
    train(replace(job, method="counted"))
    own = job.out / "train.ledger"
    assert (started, made) == ([2, 600], [None, own, None])  # a rehearsal, a ledger, and the part that pays
    train(replace(job, method="counted", ledger=tmp_path / "a.ledger", out=tmp_path / "b"))
    assert started[2:] == [2, 600]
    assert made[3:] == [None, tmp_path / "a.ledger", None]


@pytest.mark.usefixtures("methods")
def test_a_plan_in_a_ledger_of_its_own_or_a_part_by_basic_composition(
    job: TrainingJob, tmp_path: Path
) -> None:
    told = train(replace(job, ledger=tmp_path / "own.ledger", method="planned"))
    assert (told["guarantee"]["accountant"], told["steps"]) == ("pld", 5)
    assert rows(tmp_path / "own.ledger")[:4] == ["open", "note", "promise", "charge"]
    path = tmp_path / "basic.ledger"
    ft.Ledger(ft.Budget(300.0, 1e-3), journal=path, filter=BasicFilter).close()
    told = train(replace(job, ledger=path, method="planned", force=True))
    assert told["guarantee"]["accountant"] == "pld"
    with ft.Ledger.open(path) as ledger:
        assert ledger.spent.epsilon == 200.0


@pytest.mark.usefixtures("methods")
def test_a_new_ledger_suits_the_method(job: TrainingJob, tmp_path: Path) -> None:
    path = tmp_path / "a.ledger"
    told = train(replace(job, ledger=path, method="careful"))
    assert told["guarantee"]["accountant"] == "zcdp"
    with ft.Ledger.open(path) as ledger:
        assert ledger.journal.header["filter"]["name"] == "zcdp"


# --- files


def test_a_name_that_ends_in_npz(job: TrainingJob, tmp_path: Path) -> None:
    told = train(replace(job, out=tmp_path / "first.npz"))
    assert told["model"] == str(tmp_path / "first.npz")
    assert json.loads((tmp_path / "first.privacy.json").read_text())["guarantee"]["epsilon"] == 200.0


def test_files_are_only_replaced_when_asked(job: TrainingJob) -> None:
    train(job)
    before = (job.out / "model.npz").read_bytes()
    with pytest.raises(InvalidValue, match=r"model\.npz' exists already; --force"):
        train(job)
    (job.out / "model.npz").unlink()
    with pytest.raises(InvalidValue, match=r"privacy\.json' exists already"):
        train(job)
    train(replace(job, force=True))
    assert (job.out / "model.npz").read_bytes() != before


def test_writing_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"before")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FarthingError, match=r"could not be written: .*No space left"):
        model_file.write(path, b"after")
    assert [file.name for file in tmp_path.iterdir()] == ["a"]
    assert path.read_bytes() == b"before"


@pytest.mark.parametrize(
    "content",
    [b"", b"text", b"PK\x03\x04", b"\x93NUMPY", b"\x80\x04N."],
    ids=["", "text", "zip", "npy", "pkl"],
)
def test_what_is_no_model_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(content)
    with pytest.raises(InvalidValue, match=r"a\.npz' is not a model"):
        Model.load(path)
    with pytest.raises(InvalidValue, match=r"there is no .*b\.npz"):
        Model.load(tmp_path / "b.npz")


@pytest.mark.parametrize("change", ["coef", "intercept", "schema", None])
def test_a_model_that_does_not_fit_its_schema_is_refused(job: TrainingJob, change: str | None) -> None:
    train(job)
    with np.load(job.out / "model.npz", allow_pickle=False) as file:
        arrays: dict[str, Any] = dict(file)
    if change == "schema":
        arrays["schema"] = np.array(COLOURS.to_json())
    elif change is not None:
        arrays[change] = np.zeros((2, 2))
    else:
        del arrays["coef"]
    np.savez(job.out / "model.npz", **arrays)
    with pytest.raises(InvalidValue, match=r"model\.npz"):
        saved(job)


def test_a_report_that_fails_does_not_take_the_model_with_it(
    job: TrainingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> str:
        raise Unsupported("no picture of this")

    monkeypatch.setattr("farthing.cli.outputs.page", fails)
    with pytest.raises(
        FarthingError, match=r"no picture of this\. The training is charged to .*model\.npz"
    ) as error:
        train(job)
    assert not isinstance(error.value, Unsupported)  # nothing was wrong with what was asked for
    assert saved(job).coef.shape == (1, 3)
    assert json.loads((job.out / "privacy.json").read_text())["partial"] is False


@pytest.fixture
def deviations(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The noise multipliers of all figures on held-out records."""
    made = list[float]()

    def spy(noise: float) -> ft.Gaussian:
        made.append(noise)
        return ft.Gaussian(noise)

    monkeypatch.setattr(measuring, "Gaussian", spy)
    return made


@pytest.mark.parametrize("method", ["auto", "sgd-adv", "output", "dpagd", "objective"])
def test_the_printed_guarantee_covers_figures_on_held_out_records(
    job: TrainingJob, method: str, deviations: list[float]
) -> None:
    told = train(replace(job, epsilon=1.0, holdout=0.5, method=method))
    assert gaussian.delta(1 / deviations[0], told["guarantee"]["epsilon"]) <= told["guarantee"]["delta"]
    assert gaussian.delta(1 / deviations[0], told["spent"]["epsilon"]) <= told["guarantee"]["delta"]
    assert "cost it no more than training" in told["guarantee"]["note"]
    assert told["records"] == 600
    assert "number of records of the table is taken as public" in told["guarantee"]["note"]


def test_repeated_figures_on_held_out_records_add_up_in_a_zcdp_ledger(
    job: TrainingJob, tmp_path: Path, deviations: list[float]
) -> None:
    path = tmp_path / "z.ledger"
    ft.Ledger(ft.Budget(1.0, 1e-5), journal=path, filter=ZcdpFilter).close()
    for _ in range(3):
        train(replace(job, epsilon=0.3, holdout=0.5, ledger=path, force=True))
    with ft.Ledger.open(path) as ledger:
        (rho, _) = ledger.journal.last().state
        notes = [row.body["note"] for row in ledger.journal.rows() if row.kind == "note"]
    assert len(deviations) == 3
    assert sum(1 / (2 * noise**2) for noise in deviations) <= rho
    assert any("held out" in note for note in notes)


def test_an_interrupted_training_pays_for_figures_by_what_it_spent(
    job: TrainingJob, deviations: list[float]
) -> None:
    job = replace(job, epsilon=1.0, holdout=0.5)
    told = train(job, lambda: nullcontext(lambda step, ledger: True))
    assert told["partial"]
    assert told["spent"]["epsilon"] < 0.9
    assert gaussian.delta(1 / deviations[0], told["spent"]["epsilon"]) <= told["guarantee"]["delta"]


def test_a_ledger_that_is_taken_as_a_whole_pays_for_no_figures(job: TrainingJob, tmp_path: Path) -> None:
    path = tmp_path / "a.ledger"
    with pytest.raises(Unsupported, match="--filter basic"):
        train(replace(job, holdout=0.5, method="sgd-ma", ledger=path))
    assert not path.exists()


def test_how_many_records_are_on_which_side_is_neither_told_nor_learnt_with(
    job: TrainingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = list[int]()

    def steps(ledger: ft.Ledger, problem: Problem) -> Iterator[ft.Step]:
        sizes.append(problem.records)
        yield from CLASSIFIERS["auto"].algorithm(ledger, problem)

    monkeypatch.setitem(CLASSIFIERS, "counted", SolverMethod(steps))
    told = train(replace(job, epsilon=1.0, holdout=0.5, method="counted"))
    assert (told["records"], set(sizes)) == (600, {300})
    kept = table_files.training_rows(job.table, job.schema, Split(share=0.5)).y
    assert len(kept) != 300  # as many as the hashes say
