"""Name the files of a training, and collect the public facts that it writes into them.

``privacy.json`` begins with a ``format`` number, as every JSON object of the commands does
(`farthing.budget.FORMAT`).
"""

import hashlib
import json
import zipfile
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import farthing
from farthing.budget import FORMAT, Guarantee
from farthing.cli.job import Estimator, TrainingJob
from farthing.data.columns import Numeric, Unbounded
from farthing.data.model_file import Model
from farthing.data.schema import Schema
from farthing.data.table_files import EMBEDDED
from farthing.ledger.journal import Journal
from farthing.ledger.ledger import Ledger
from farthing.linear.additive.basis import CELLS, DEPTH, ObliviousTree, codes_of
from farthing.linear.additive.method import AdditiveModel
from farthing.report.document import page
from farthing.report.reading import HELD_OUT, earlier
from farthing.report.subject import Declared, Score, Subject

Array = NDArray[np.float64]

_BESIDE = "embedded in farthing"
UNCHECKED = (
    "the schema names nobody who checked it. If a bound or a value in it was read from the records, the "
    'guarantee is void. Name the person who checked it by "checked_by" in the schema, or by --checked-by'
)


def files_of(job: TrainingJob) -> dict[str, Path]:
    """Return the path of each file: in a folder, or NAME.npz and others that begin with NAME."""
    folder, model, other = _place(job.out)
    files = {"model": f"{model}.npz", "privacy": f"{other}privacy.json", "report": f"{other}report.html"}
    files |= {form: f"{model}.{form}" for form in job.formats}
    return {kind: folder / name for kind, name in files.items()}


def new_ledger(out: Path) -> tuple[Path, list[Path]]:
    """Return where a training keeps its own ledger, a new file, and those of earlier trainings beside it.

    A ledger is never replaced, also not by ``--force``: it is the only record of what was charged.
    """
    folder, name, other = _place(out)
    name, earlier, turn = name if other else "train", list[Path](), 1
    path = folder / f"{name}.ledger"
    while Journal.exists(path):
        earlier.append(path)
        turn += 1
        path = folder / f"{name}-{turn}.ledger"
    return path, earlier


def _place(out: Path) -> tuple[Path, str, str]:
    """Return the folder, the name of the model, and what the names of other files begin with."""
    if out.suffix == ".npz":
        return out.parent, out.stem, f"{out.stem}."
    return out, "model", ""


@dataclass(frozen=True, slots=True, eq=False)
class ShapeModel(Model):
    """An additive or boosted model: linear weights, a table of each feature's cells, and trees."""

    shapes: AdditiveModel | None = None

    def scores(self, X: Array) -> Array:
        """Return the scores of every row of features: one, or one a label."""
        assert self.shapes is not None
        rows = np.clip(X, 0.0, 1.0)
        found = self.shapes.margins(rows, codes_of(X, np.zeros(X.shape[1]), np.ones(X.shape[1])))
        if isinstance(self.schema.target, Numeric):
            low, high = float(self.schema.target.low), float(self.schema.target.high)
            found = low + (high - low) * found
        return found[:, None] if found.ndim == 1 else found

    def weights(self) -> dict[str, Any]:
        """Return the arrays of the file that hold what was learnt."""
        assert self.shapes is not None
        found, own = self.shapes, {"coef": self.coef, "intercept": self.intercept}
        questions = np.array([(tree.asked, tree.above) for tree in found.trees], np.int64)
        leaves = np.array(found.leaves, np.float64)
        scale = np.array([found.origin, found.scale])
        return own | {"tables": found.tables, "questions": questions, "leaves": leaves, "scale": scale}

    @classmethod
    def _more(cls, found: Any, width: int) -> tuple[Any, ...]:
        """Return the shapes in a file; raise ValueError unless they have this many features."""
        names = ("coef", "intercept", "tables", "leaves", "scale")
        coef, constant, tables, leaves, (origin, scale) = (np.asarray(found[n], np.float64) for n in names)
        outputs = (len(coef),) if len(coef) > 1 else ()
        questions = np.asarray(found["questions"], np.int64).reshape(-1, 2, DEPTH)
        leaves = leaves.reshape(len(questions), 1 + 2**DEPTH, *outputs)
        asked, above = questions[:, 0], questions[:, 1]
        within = ((asked >= 0) & (asked < width)).all() and ((above >= 0) & (above < CELLS)).all()
        if tables.shape != (width, CELLS, *outputs) or not within:
            raise ValueError
        trees = tuple(ObliviousTree(tuple(a), tuple(b), np.empty(0)) for a, b in questions.tolist())
        weights, first = (coef.T, constant) if outputs else (coef[0], constant[0])
        effects = np.zeros(width)
        return (AdditiveModel(weights, first, tables, trees, tuple(leaves), effects, origin, scale),)


def model_of(schema: Schema, estimator: Estimator, kind: str) -> Model:
    """Return a fitted estimator as a model on features in [0, 1], with the bounds that were bought."""
    bounds = getattr(estimator, "bounds_", None)
    used = schema if bounds is None else schema.with_bounds(*bounds)
    if hasattr(estimator, "model_"):
        found = estimator.model_
        return ShapeModel(used, np.atleast_2d(found.weights.T), np.atleast_1d(found.constant), kind, found)
    coef, intercept = np.atleast_2d(estimator.coef_), np.atleast_1d(estimator.intercept_)
    if bounds is None:
        return Model(schema, coef, intercept, kind)
    low, high = bounds
    return Model(used, coef * (high - low), intercept + coef @ low, kind)


def loaded(path: Path) -> Model:
    """Read a model that `train` wrote, linear or with shapes."""
    whole = path / "model.npz" if path.is_dir() else path
    try:
        with whole.open("rb") as file, np.load(file, allow_pickle=False) as found:
            shaped = "tables" in found
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, AttributeError, TypeError):
        shaped = False  # which `Model` says in words
    return (ShapeModel if shaped else Model).load(path)


def sha256(content: bytes) -> str:
    """Return the hash of a file's content, as ``sha256sum`` prints it."""
    return hashlib.sha256(content).hexdigest()


def public(job: TrainingJob, used: Schema) -> dict[str, Any]:
    """Return what a training took as public; ``used`` is its schema, with the bounds that were bought."""
    source = _BESIDE if (job.schema_file or job.table) == EMBEDDED else job.schema_file or "the command line"
    told = declared(job.schema, used, source)
    return {**told, "records_declared": job.records is not None}


def declared(schema: Schema, used: Schema, source: str = _BESIDE) -> dict[str, Any]:
    """Return what a schema declares, who checked it, and its hash."""
    told = json.loads(used.to_json())
    bought = {column.name for column in schema.columns if isinstance(column, Unbounded)}
    for column in told["columns"]:
        if column["name"] in bought and "low" in column:
            column["bought"] = True
    return {
        "schema": {
            "source": source,
            "sha256": sha256(schema.to_json().encode()),
            "checked_by": schema.checked_by or None,
        },
        "columns": told["columns"],
        "target": told["target"],
    }


def stamped(guarantee: Guarantee) -> dict[str, Any]:
    """Return how a ``privacy.json`` begins: its format, the software, the date, and the guarantee."""
    return {
        "format": FORMAT,
        "software": f"farthing {farthing.__version__}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "guarantee": asdict(guarantee),
    }


def reported(
    job: TrainingJob,
    estimator: Estimator,
    ledger: Ledger,
    told: dict[str, Any],
    measured: dict[str, Any] | None,
) -> str:
    """Return the report of a training."""
    scores, released, measure = list[Score](), list[str](), "accuracy"
    if measured is not None:
        measure = "rmse" if "rmse" in measured else measure
        baseline = "guessing" if measure == "accuracy" else "rmse_of_mean"
        if measured["note"] != HELD_OUT:  # which the guarantee covers
            released = [f"{measure} on {measured['table']}, {measured['note']}"]
        scores = [
            Score(label=job.method, epsilon=estimator.privacy_.epsilon, value=measured[measure]),
            Score(label=baseline.replace("_", " "), epsilon=None, value=measured[baseline]),
        ]
    if told.get("earlier_ledgers"):
        released.append(earlier(told["earlier_ledgers"]))
    choice = told.get("choice") or (told["trained"] if job.model else "")
    subject = Subject.of(
        ledger,
        title=f"{job.schema.target.name} of {Path(job.table).name}",
        method=", ".join((job.method, *job.settings)) + f" ({choice})" * bool(choice),
        steps=told["steps"],
        guarantee=estimator.privacy_,
        history=estimator.history_,
        records=told["records"],
        features=told["features"],
        scores=scores,
        measure=measure,
        released=released,
        partial=told["partial"],
        declared=Declared.of(told["public"], told),
    )
    return page(subject)
