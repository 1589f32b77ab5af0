"""Exported models: what another program reads says the same as ours."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farthing.cli import export
from farthing.cli.job import TrainingJob
from farthing.cli.training import train
from farthing.data.model_file import Model
from farthing.data.schema import Categorical, Numeric, Schema
from farthing.errors import Unsupported

COLUMNS = (Numeric("age", 0, 100), Categorical("sex", ("Female", "Male")), Numeric("a b/../c", -5, 5))
LABELS = Categorical("colour", ("red", "green", "blue"))
KINDS = [
    (Categorical("rich", ("no", "yes")), "logistic"),
    (Categorical("rich", ("no", "yes")), "svm"),
    (LABELS, "logistic"),
    (LABELS, "svm"),
    (Numeric("hours", 0, 60), "linear"),
    (Numeric("hours", 20, 25), "linear"),  # what is predicted lies beyond
]


def table(path: Path, rows: int = 300) -> dict[str, Any]:
    """Values beyond the bounds and outside the vocabulary among them."""
    row = np.arange(rows)
    age, other = row * 120.0 / rows - 10, (row * 7 % 13) - 6.0
    sex = np.array(["Female", "Male", "other"])[row % 3]
    rich, colour = (
        np.where(age > 50, "yes", "no"),
        np.array(LABELS.values)[(age // 40).clip(0, 2).astype(int)],
    )
    columns = {"sex": sex, "age": age, "a b/../c": other, "rich": rich, "colour": colour, "hours": age / 2}
    lines = [",".join(map(str, cells)) for cells in zip(*columns.values(), strict=True)]
    path.write_text("\n".join([",".join(columns), *lines]) + "\n")
    return columns


@pytest.fixture
def job(tmp_path: Path) -> TrainingJob:
    table(tmp_path / "people.csv")
    schema = Schema(COLUMNS, KINDS[0][0])
    return TrainingJob(str(tmp_path / "people.csv"), schema, epsilon=50.0, delta=1e-5, out=tmp_path / "out")


@pytest.mark.parametrize(("target", "kind"), KINDS)
def test_skops_reads_without_trust_and_agrees(job: TrainingJob, target: Any, kind: str) -> None:
    skops = pytest.importorskip("skops.io", reason="needs the extra export")
    told = train(replace(job, schema=Schema(COLUMNS, target), model=kind, formats=("skops",)))
    assert skops.get_untrusted_types(file=told["skops"]) == []
    read = skops.load(told["skops"], trusted=[])
    columns = table(Path(job.table))
    rows = np.array([columns[column.name].astype(object) for column in COLUMNS]).T
    ours = np.array(list(Model.load(job.out).predictions(job.table)))
    with pytest.warns(UserWarning, match="feature names"):
        theirs = read.predict(rows)
    assert (theirs == ours).all() if kind != "linear" else np.allclose(theirs, ours)


def test_a_data_frame_may_have_its_columns_in_any_order(job: TrainingJob) -> None:
    skops = pytest.importorskip("skops.io", reason="needs the extra export")
    pandas = pytest.importorskip("pandas", reason="reads data frames")
    told = train(replace(job, formats=("skops",)))
    theirs = skops.load(told["skops"], trusted=[]).predict(pandas.DataFrame(table(Path(job.table))))
    assert theirs.tolist() == list(Model.load(job.out).predictions(job.table))


@pytest.mark.parametrize(("target", "kind"), KINDS)
def test_onnx_runs_elsewhere_and_agrees(job: TrainingJob, target: Any, kind: str) -> None:
    pytest.importorskip("skl2onnx", reason="needs the extra export")
    runtime = pytest.importorskip("onnxruntime")
    told = train(replace(job, schema=Schema(COLUMNS, target), model=kind, formats=("onnx",)))
    session = runtime.InferenceSession(told["onnx"], providers=["CPUExecutionProvider"])
    columns = table(Path(job.table))
    feed = {}
    for entry, column in zip(session.get_inputs(), COLUMNS, strict=True):
        values = columns[column.name]
        feed[entry.name] = values.astype(np.float32 if isinstance(column, Numeric) else object)[:, None]
    theirs = session.run(None, feed)[0].ravel()
    ours = np.array(list(Model.load(job.out).predictions(job.table)))
    if kind == "linear":
        assert np.allclose(theirs, ours, atol=1e-3)
    else:
        assert np.mean(theirs == ours) > 0.99  # float32 may turn a tie


def test_what_is_missing_is_said_before_anything_is_spent(
    job: TrainingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    for form, package in (("skops", "skops"), ("onnx", "skl2onnx")):
        monkeypatch.setitem(sys.modules, package, None)
        book = job.out.parent / "a.ledger"
        with pytest.raises(Unsupported, match=rf"--format {form} .*pip install skops skl2onnx"):
            train(replace(job, formats=(form,), ledger=book))
        assert not book.exists()
        assert not job.out.exists()


def test_nothing_of_the_encoding_is_learnt(job: TrainingJob) -> None:
    """It follows from the schema alone, whatever the table."""
    from sklearn.linear_model import LinearRegression

    model = LinearRegression().fit(np.zeros((2, 4)), [0, 1])
    encode = export.pipeline(job.schema, model)[0]
    rows = np.array([[-20.0, "Male", 0.0], [100.0, "nobody", 9.0]], dtype=object)
    with pytest.warns(UserWarning, match="feature names"):
        assert encode.transform(rows).tolist() == [[0, 0, 1, 0.5], [1, 0, 0, 1]]
