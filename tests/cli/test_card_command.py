"""``farthing card``: the model card of a training, and what is refused."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def fit(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that train wrote, with a column whose name is Markdown."""
    monkeypatch.chdir(tmp_path)
    rows = "\n".join(f"{row % 100},{('no', 'yes')[row % 100 > 50]}" for row in range(200))
    Path("people.csv").write_text(f"*age*,rich\n{rows}\n")
    Path("test.csv").write_text(f"*age*,rich\n{rows}\n")
    done = run(
        *("train", "people.csv", "--epsilon", "1", "--delta", "1e-5", "--target", "rich", "--out", "fit"),
        *("--bounds", "*age*=0:100", "--values", "rich=no,yes", "--test", "test.csv"),
        *("--checked-by", "Ann, 2026-11-16"),
    )
    assert done.code == 0
    assert "names nobody" not in done.err
    return tmp_path / "fit"


def test_a_card_has_hugging_faces_fields_and_the_reports_facts(run: Any, fit: Path) -> None:
    done = run("card", "fit")
    assert (done.code, done.err) == (0, "")
    front, body = done.out.split("---\n")[1:]
    fields = {line.split(": ")[0]: json.loads(line.split(": ", 1)[1]) for line in front.splitlines()}
    assert fields["pipeline_tag"] == "tabular-classification"
    assert (fields["library_name"], fields["metrics"]) == ("farthing", ["accuracy"])
    assert fields["privacy"] == "(1, 1e-05)-differential privacy"
    told = json.loads((fit / "privacy.json").read_text())
    for fact in ("| \\*age\\* | feature | numbers from 0 to 100 |", "checked by Ann, 2026-11-16"):
        assert fact in body
    for fact in (
        told["sha256"]["model"],
        told["software"],
        told["date"],
        "| accuracy | ",
        "`fit/train.ledger`",
        f"A {told['choice'].split(':')[0]} model,",
    ):
        assert fact in body


def test_a_card_is_written_once_and_from_a_file(run: Any, fit: Path) -> None:
    assert run("card", "fit/privacy.json", "--out", "README.md").code == 0
    assert Path("README.md").read_text().startswith("---\nlicense")
    assert run("card", "fit", "--out", "README.md").code == 2
    told = json.loads((fit / "privacy.json").read_text())
    told["public"]["schema"]["checked_by"] = None
    Path("other.json").write_text(json.dumps(told))
    assert "the guarantee is void" in run("card", "other.json").out


@pytest.mark.parametrize("content", [None, "[1]", '{"epsilon": 1}', "no json", "[" * 100_000])
def test_what_is_no_training_is_refused(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("a.json").write_text(content)
    done = run("card", "a.json")
    assert done.code == 2
    assert "FOLDER must be one that train wrote" in done.err


def test_facts_that_are_not_as_train_wrote_them_are_named(run: Any, fit: Path) -> None:
    told = json.loads((fit / "privacy.json").read_text())
    Path("other.json").write_text(json.dumps({**told, "records": "many"}))
    done = run("card", "other.json")
    assert (done.code, done.out) == (2, "")
    assert "('many' is not a count)" in done.err


def test_a_training_is_logged_to_mlflow(run: Any, fit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    class Run:
        info = SimpleNamespace(run_id="7")

        def __enter__(self) -> "Run":
            return self

        def __exit__(self, *_: object) -> None: ...

    fake = SimpleNamespace(
        start_run=Run,
        log_params=seen.update,
        set_tags=seen.update,
        set_tag=lambda name, value: seen.update({name: value}),
        log_metric=lambda name, value: seen.update({name: value}),
        log_text=lambda text, name: seen.update({name: text}),
        log_artifact=lambda path: seen.setdefault("files", []).append(Path(path).name),
    )
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    Path("people.csv").rename(fit / "people.csv")
    done = run("card", "fit", "--mlflow", "--out", "card.md")
    assert (done.code, done.err) == (
        0,
        "farthing: logged to MLflow as run 7\nfarthing: the model card is written to card.md\n",
    )
    assert (seen["epsilon"], seen["delta"], seen["privacy.checked_by"]) == (1.0, 1e-5, "Ann, 2026-11-16")
    expected = ["model.npz", "privacy.json", "report.html", "train.ledger", "train.ledger.head"]
    assert seen["files"] == expected  # and not the table that lies beside them
    assert "rows_per_person" not in seen  # there are none
    assert seen["model-card.md"] == Path("card.md").read_text()
    fake.log_text = lambda text, name: (_ for _ in ()).throw(ConnectionError("no server\nat port 1"))
    done = run("card", "fit", "--mlflow")
    assert done.code == 2
    assert "MLflow refused the training (ConnectionError): no server at port 1" in done.err
    monkeypatch.setitem(sys.modules, "mlflow", None)
    assert "pip install mlflow" in run("card", "fit", "--mlflow").err


def test_a_card_is_not_made_of_another_format(run: Any, fit: Path) -> None:
    told = json.loads((fit / "privacy.json").read_text())
    (fit / "privacy.json").write_text(json.dumps({**told, "format": 2}))
    done = run("card", "fit")
    assert (done.code, done.out) == (2, "")
    assert "has format 2, but this version of farthing reads format 1" in done.err


@pytest.mark.parametrize(
    ("name", "value"), [("steps", "many"), ("records", None), ("guarantee", {}), ("public", [])]
)
def test_a_card_of_changed_facts_is_one_sentence(run: Any, fit: Path, name: str, value: Any) -> None:
    told = json.loads((fit / "privacy.json").read_text())
    (fit / "privacy.json").write_text(json.dumps({**told, name: value}))
    done = run("card", "fit")
    assert (done.code, done.out) == (2, "")
    assert "privacy.json" in done.err
