"""What ``farthing train`` and ``farthing predict`` do: a table and a public schema in, a private model out.

Everything that can be wrong is looked at before the first charge: the schema, the tables, where the model
will be written. Messages name files, columns and what was declared, never a cell of a table.
"""

import io
import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import clone
from sklearn.metrics import roc_auc_score

from farthing import csvfile, data, validate
from farthing.algorithms.baselines import nonprivate
from farthing.books import rule_of
from farthing.budget import Adjacency, Budget, Unit
from farthing.data import ADULT, Categorical, Numeric, Schema
from farthing.errors import FarthingError, InvalidValue
from farthing.estimators import (
    CLASSIFIERS,
    REGRESSORS,
    LinearRegression,
    LinearSVC,
    LogisticRegression,
    Method,
)
from farthing.journal import Journal
from farthing.ledger import Ledger

EMBEDDED = "adult"  # in place of a file: the data and the schema that come with farthing

WITHOUT_PRIVACY = "computed on this table itself, without noise: the guarantee does not cover these figures"

Array = NDArray[np.float64]
Estimator = LogisticRegression | LinearSVC | LinearRegression


@dataclass(frozen=True, slots=True)
class Job:
    """What to train on what, and where to put it."""

    table: str
    schema: Schema
    epsilon: float
    delta: float
    adjacency: Adjacency | None = None  # that of the ledger, or add-remove
    model: str | None = None  # "logistic", "svm" or "linear"; the first that suits the target
    method: str = "auto"
    records: int | None = None
    ledger: Path | None = None
    out: Path = Path()
    force: bool = False
    test: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """A linear model on the features of a schema, as it lies in a file."""

    schema: Schema
    coef: Array
    intercept: Array

    def predict(self, X: Array) -> list[str] | list[float]:
        """A label, or a number, for every row of features."""
        scores = X @ self.coef.T + self.intercept
        if isinstance(self.schema.target, Numeric):
            return [float(score) for score in scores[:, 0]]
        places = scores.argmax(axis=1) if scores.shape[1] > 1 else (scores[:, 0] > 0).astype(int)
        return [self.schema.target.values[place] for place in places]

    def to_bytes(self, privacy: str) -> bytes:
        """The model with its guarantee as .npz: numbers and texts only, so that reading it runs no code."""
        target = self.schema.target
        buffer = io.BytesIO()
        np.savez(
            buffer,
            coef=self.coef,
            intercept=self.intercept,
            classes=np.array(target.values if isinstance(target, Categorical) else (), dtype=np.str_),
            feature_names=np.array(self.schema.feature_names),
            schema=np.array(self.schema.to_json()),
            privacy=np.array(privacy),
        )
        return buffer.getvalue()

    @classmethod
    def load(cls, path: Path) -> "Model":
        """The model at ``path``, or of the folder that `train` filled."""
        path = path / "model.npz" if path.is_dir() else path
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as found:
                schema = Schema.from_json(str(found["schema"]))
                coef, intercept = (np.asarray(found[name], np.float64) for name in ("coef", "intercept"))
        except FileNotFoundError:
            raise InvalidValue(f"MODEL must be a file that train wrote, there is no {str(path)!r}") from None
        except (OSError, ValueError, LookupError, TypeError, AttributeError, zipfile.BadZipFile, EOFError):
            raise InvalidValue(f"MODEL must be a file that train wrote, {str(path)!r} is not one") from None
        labels = len(schema.target.values) if isinstance(schema.target, Categorical) else 0
        outputs = labels if labels > 2 else 1
        if coef.shape != (outputs, schema.width) or intercept.shape != (outputs,):
            raise InvalidValue(f"{str(path)!r} holds weights of shape {coef.shape}, not its schema's")
        return cls(schema, coef, intercept)


# --- tables


def schema_of(name: str, target: str | None) -> Schema:
    """The schema that ``--schema`` names: a JSON file, or the embedded one."""
    if name == EMBEDDED:
        schema = ADULT
    else:
        try:
            schema = Schema.from_json(Path(name).read_text(encoding="utf-8"))
        except OSError as error:
            raise InvalidValue(f"--schema must be a JSON file: {_reason(name, error)}") from None
        except UnicodeDecodeError:
            raise InvalidValue(f"--schema must be a JSON file, {name!r} is not UTF-8 text") from None
        except InvalidValue as error:
            raise InvalidValue(f"--schema {name}: {error}") from None
    if target in (None, schema.target.name):
        return schema
    feature = any(column.name == target for column in schema.columns)
    raise InvalidValue(
        f"--target must be the schema's target {schema.target.name!r}, got {target!r}"
        + (", which the schema lists among the features" if feature else "")
    )


def skeleton_of(table: str, target: str) -> str:
    """A schema to fill in, with the names in the table's header."""
    return data.skeleton(csvfile.header(table, target), target)


def blocks(table: str, schema: Schema, *, target: bool = True, test: bool = False) -> Iterator[data.Table]:
    """The columns that the schema names, some thousand records at a time."""
    if table != EMBEDDED:
        wanted = (*schema.columns, schema.target) if target else schema.columns
        yield from csvfile.columns(table, [column.name for column in wanted])
        return
    adult = data.load_adult()
    rows = slice(adult.split, None) if test else slice(adult.split)
    yield {name: np.asarray(values)[rows] for name, values in adult.table.items()}


def read(table: str, schema: Schema, *, test: bool = False) -> tuple[Array, NDArray[Any]]:
    """Features in [0, 1] and targets of all records of a table."""
    parts = [
        (schema.encode(block), schema.encode_target(block)) for block in blocks(table, schema, test=test)
    ]
    if not parts:
        raise InvalidValue(f"{table!r} has no records")
    return np.concatenate([X for X, _ in parts]), np.concatenate([y for _, y in parts])


# --- training


def train(job: Job) -> dict[str, Any]:
    """Checks everything, spends the budget, writes the model and its guarantee; returns what may be told."""
    estimator, method = _estimator(job)
    X, y = read(job.table, job.schema)
    test = None if job.test is None else read(another(job.test, job.table), job.schema, test=True)
    model_file, privacy_file = _files(job.out)
    for path in (model_file, privacy_file):
        check_writable(path, job.force)
    if job.ledger is None:
        estimator.fit(X, y)
    else:
        # What a method refuses, it refuses at a rehearsal on made-up rows, before anything is charged.
        with _ledger(job, method, rehearsal=True) as ledger:
            actor = clone(estimator).set_params(records=job.records or len(X))
            _spending(actor, ledger, job).fit(*_made_up(job.schema))
        with _ledger(job, method) as ledger:
            _spending(estimator, ledger, job).fit(X, y)
    model = Model(job.schema, np.atleast_2d(estimator.coef_), np.atleast_1d(estimator.intercept_))
    fields = {
        **asdict(estimator.privacy_),
        "method": job.method,
        "steps": estimator.n_iter_,
        "records": len(X) if job.records is None else job.records,  # a private number stays private
        "features": job.schema.width,
        "model": str(model_file),
        "ledger": None if job.ledger is None else str(job.ledger),
    }
    privacy = json.dumps(fields, allow_nan=False, indent=1)
    write(model_file, model.to_bytes(privacy))
    write(privacy_file, (privacy + "\n").encode())
    return fields if test is None else {**fields, "test": {"table": job.test, **_measured(estimator, *test)}}


def _estimator(job: Job) -> tuple[Estimator, Method]:
    """The estimator a job asks for, and its method; nothing is read yet."""
    target = job.schema.target
    made: dict[str, Callable[[], Estimator]] = {}
    if isinstance(target, Categorical):
        known, classes = CLASSIFIERS, range(len(target.values))
        made["logistic"] = lambda: LogisticRegression(classes=classes)
        made["svm"] = lambda: LinearSVC(classes=classes)
    else:
        known, bounds = REGRESSORS, (target.low, target.high)
        made["linear"] = lambda: LinearRegression(target_bounds=bounds)
    kind = next(iter(made)) if job.model is None else job.model
    if kind not in made:
        raise InvalidValue(f"--model must be one of {list(made)} for target {target.name!r}, got {kind!r}")
    private = sorted(name for name, method in known.items() if method.algorithm is not nonprivate)
    if job.method not in private:  # a fit without privacy is a baseline, and for Python only
        raise InvalidValue(f"--method must be one of {private}, got {job.method!r}")
    if job.records is not None:
        validate.count(**{"--records": job.records})
    estimator = made[kind]().set_params(
        epsilon=job.epsilon,
        delta=job.delta,
        bounds=(0.0, 1.0),  # what a schema encodes into
        solver=job.method,
        adjacency=job.adjacency,
        records=job.records,
    )
    return estimator, known[job.method]


def another(test: str, table: str) -> str:
    """``test``, refused where it is the very table that was learnt from."""
    if test != EMBEDDED and table != EMBEDDED and os.path.exists(test) and os.path.samefile(test, table):
        raise InvalidValue(
            f"--test must be another table, got {test!r} again: a figure about the records that were learnt "
            "from would not be private"
        )
    return test


def _ledger(job: Job, method: Method, *, rehearsal: bool = False) -> Ledger:
    """The ledger to spend from, or one like it in memory; a new one holds the job's budget."""
    assert job.ledger is not None
    if not Journal.exists(job.ledger):
        budget = Budget(job.epsilon, job.delta, job.adjacency or Adjacency.ADD_REMOVE)
        return Ledger(budget, journal=None if rehearsal else job.ledger, filter=method.filter)
    if not rehearsal:
        return Ledger.open(job.ledger)
    with Journal(job.ledger) as found:
        rule = rule_of(found.header)
    return Ledger(rule.budget, filter=lambda _: rule)


def _spending(estimator: Estimator, ledger: Ledger, job: Job) -> Estimator:
    """The estimator with a ledger to take ε and δ from; all of it where that is meant and none is spent."""
    if ledger.budget.unit is not Unit.RECORD:
        raise InvalidValue(
            f"--ledger must be one per record, since a row counts as one: its budget is {ledger.budget}"
        )
    estimator.set_params(ledger=ledger)
    if ledger.share == 0 and ledger.budget == ledger.budget.with_(job.epsilon, job.delta):
        estimator.set_params(epsilon=None, delta=None)
    return estimator


def _made_up(schema: Schema) -> tuple[Array, ArrayLike]:
    target = schema.target
    y = range(len(target.values)) if isinstance(target, Categorical) else (target.low, target.high)
    return np.zeros((len(y), schema.width)), y


def predictions(model: Model, table: str) -> Iterator[str]:
    """A line for every record of a table, which need not have the target."""
    for block in blocks(table, model.schema, target=False, test=True):
        yield from map(str, model.predict(model.schema.encode(block)))


def _measured(estimator: Estimator, X: Array, y: NDArray[Any]) -> dict[str, Any]:
    """How well a model does on another table. Not private, and said so."""
    told: dict[str, Any] = {"records": len(y), "note": WITHOUT_PRIVACY}
    found = estimator.predict(X)
    if isinstance(estimator, LinearRegression):
        told["rmse"] = float(np.sqrt(np.mean(np.square(found - y))))
        return {**told, "rmse of the mean": float(np.std(y))}
    told["accuracy"] = float(np.mean(found == y))
    told["guessing"] = float(np.bincount(y).max() / len(y))
    scores = estimator.decision_function(X)
    if scores.ndim == 1 and 0 < y.sum() < len(y):
        told["auc"] = float(roc_auc_score(y, scores))
    if isinstance(estimator, LogisticRegression):
        told["log_loss"] = -float(np.mean(estimator.predict_log_proba(X)[np.arange(len(y)), y]))
    return told


# --- files


def _files(out: Path) -> tuple[Path, Path]:
    """Where model and guarantee go: two files in a folder, or NAME.npz and NAME.privacy.json."""
    if out.suffix == ".npz":
        return out, out.with_suffix(".privacy.json")
    return out / "model.npz", out / "privacy.json"


def check_writable(path: Path, force: bool) -> None:
    """Refused now, before anything is paid for, rather than when the model is there."""
    try:
        if path.is_dir() or (path.exists() and not force):
            instead = "is a folder" if path.is_dir() else "exists already; --force replaces it"
            raise InvalidValue(f"--out must be new: {str(path)!r} {instead}")
        with tempfile.TemporaryFile(dir=path.parent if path.parent.exists() else path.parent.parent):
            pass
    except OSError as error:
        raise InvalidValue(f"--out must be writable: {_reason(path, error)}") from None


def write(path: Path, content: bytes) -> None:
    """All of it or nothing, on disk when this returns."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(exist_ok=True)
        with draft.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise FarthingError(f"the result could not be written: {_reason(path, error)}") from None


def _reason(path: str | Path, error: OSError) -> str:
    return f"{str(path)!r}: {error.strerror or error}"
