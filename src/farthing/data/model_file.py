"""Store a model on the features of a schema in a file, and write files atomically."""

import io
import json
import os
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_expit, softmax

from farthing.budget import FORMAT
from farthing.data import table_files
from farthing.data.columns import Categorical, Numeric
from farthing.data.csv_files import Csv
from farthing.data.schema import Schema
from farthing.errors import FarthingError, InvalidValue, Unsupported
from farthing.ledger.journal_head import foreign, never_begun

Array = NDArray[np.float64]

KINDS = "scores", "logistic", "counts"  # logistic: scores are log-odds; counts: logarithms of means


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """Weights on the features of a schema."""

    schema: Schema
    coef: Array
    intercept: Array
    kind: str = "scores"  # one of `KINDS`

    def scores(self, X: Array) -> Array:
        """Return the scores of every row of features: one, or one a label."""
        return np.asarray(X @ self.coef.T + self.intercept)

    def predict(self, X: Array, threshold: float | None = None) -> list[str] | list[float]:
        """Return a label, or a number, for every row of features.

        ``threshold`` is the probability from which on the second of two labels is answered.
        """
        scores = self.scores(X)
        if isinstance(self.schema.target, Numeric):
            found = np.exp(np.minimum(scores[:, 0], 700.0)) if self.kind == "counts" else scores[:, 0]
            within = np.clip(found, float(self.schema.target.low), float(self.schema.target.high))
            return [float(score) for score in within]
        if threshold is not None:
            places = (self.probabilities(X)[:, 1] >= threshold).astype(int)
        else:
            places = scores.argmax(axis=1) if scores.shape[1] > 1 else (scores[:, 0] > 0).astype(int)
        return [self.schema.target.values[place] for place in places]

    def probabilities(self, X: Array) -> Array:
        """Return the probability of every label, in the schema's order."""
        if self.kind != "logistic":
            raise Unsupported("this model gives no probabilities: train on labels, and not with --model svm")
        scores = self.scores(X)
        if scores.shape[1] == 1:
            return np.asarray(np.exp(np.column_stack([log_expit(-scores), log_expit(scores)])))
        return np.asarray(softmax(scores, axis=1))

    def refuse(self, threshold: float | None) -> None:
        """Refuse probabilities, and a threshold of them, where the model has none."""
        self.probabilities(np.zeros((1, self.schema.width)))
        if threshold is not None and (len(self.intercept) > 1 or not 0 < threshold < 1):
            raise InvalidValue(
                f"--threshold must be a probability below 1, for a target of two labels, got {threshold!r}"
            )

    def columns(self, proba: bool, also: str | None) -> list[str]:
        """Return the names of what `rows` yields."""
        target = self.schema.target
        labels = target.values if isinstance(target, Categorical) and proba else ()
        names = [target.name, *(f"P({target.name}={label})" for label in labels)]
        return names if also is None else [also, *names]

    def predictions(self, table: str) -> Iterator[Any]:
        """Yield a prediction for every record of a table, which need not have the target."""
        for (found,) in self.rows(table):
            yield found

    def rows(
        self,
        table: str,
        *,
        csv: Csv = table_files.PLAIN,
        threshold: float | None = None,
        proba: bool = False,
        also: str | None = None,
    ) -> Iterator[tuple[Any, ...]]:
        """Yield a row for every record of a table, with the names of `columns`.

        It has the cell of the column ``also`` if one is named, the prediction, and with ``proba`` the
        probability of every label.
        """
        for X, block in table_files.decoded(table, self.schema, csv, [] if also is None else [also]):
            parts: list[list[Any]] = [self.predict(X, threshold)]
            if also is not None:
                parts.insert(0, np.asarray(block[also]).tolist())
            if proba:
                parts.extend(self.probabilities(X).T.tolist())
            yield from zip(*parts, strict=True)

    def to_bytes(self, privacy: str) -> bytes:
        """Return model and guarantee as .npz: numbers and text only, so that reading it runs no code."""
        target = self.schema.target
        buffer = io.BytesIO()
        np.savez(
            buffer,
            **self.weights(),
            classes=np.array(target.values if isinstance(target, Categorical) else (), dtype=np.str_),
            feature_names=np.array(self.schema.feature_names),
            schema=np.array(self.schema.to_json()),
            privacy=np.array(privacy),
            kind=np.array(self.kind),
        )
        return buffer.getvalue()

    def weights(self) -> dict[str, Any]:
        """Return the arrays of the file that hold what was learnt."""
        return {"coef": self.coef, "intercept": self.intercept}

    @classmethod
    def load(cls, path: Path) -> "Model":
        """Read the model at ``path``, or in the folder that `train` wrote."""
        path = path / "model.npz" if path.is_dir() else path
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as found:
                schema = Schema.from_json(str(found["schema"]))
                coef, intercept = (np.asarray(found[name], np.float64) for name in ("coef", "intercept"))
                kind = str(found["kind"]) if "kind" in found else "scores"
                newer = _newer(json.loads(str(found["privacy"])) if "privacy" in found else {}, kind)
                more = cls._more(found, schema.width)
        except FileNotFoundError:
            raise InvalidValue(
                f"there is no model {str(path)!r}: MODEL must be a folder or file that train wrote"
            ) from None
        except (OSError, ValueError, LookupError, TypeError, AttributeError, zipfile.BadZipFile, EOFError):
            raise InvalidValue(
                f"{str(path)!r} is not a model: MODEL must be a folder or file that train wrote"
            ) from None
        if newer:
            raise InvalidValue(f"{str(path)!r} {newer}: install the version that trained it")
        labels = len(schema.target.values) if isinstance(schema.target, Categorical) else 0
        outputs = labels if labels > 2 else 1
        if coef.shape != (outputs, schema.width) or intercept.shape != (outputs,):
            raise InvalidValue(f"{str(path)!r} holds weights of shape {coef.shape}, not its schema's")
        return cls(schema, coef, intercept, kind, *more)

    @classmethod
    def _more(cls, found: Any, width: int) -> tuple[Any, ...]:
        """Return what else of a file the model is made of; a file with shapes is none of a linear model."""
        if "tables" in found:
            raise ValueError
        return ()


def _newer(told: dict[str, Any], kind: str) -> str:
    """Return what of a model's file only another version of farthing can read, or nothing."""
    if told.get("format", FORMAT) != FORMAT:
        written = f", written by {told['software']}" * ("software" in told)
        return f"has format {told['format']!r}{written}, but this version of farthing reads format {FORMAT}"
    return "" if kind in KINDS else f"holds a model of kind {kind!r}, which this version of farthing lacks"


def check_writable(
    path: Path, force: bool, kept: Iterable[str | Path | None] = (), option: str = "--out"
) -> None:
    """Refuse an unwritable file before anything is charged, rather than when there is a result to write.

    Files that are ``kept`` (a table, a model), and the two of any ledger, are never replaced, even by force.
    """
    try:
        if path.is_dir() or (path.exists() and not force):
            instead = "is a folder" if path.is_dir() else "exists already; --force replaces it"
            raise InvalidValue(f"{option} must be new: {str(path)!r} {instead}")
        if os.path.realpath(path) in [os.path.realpath(file) for file in kept if file is not None]:
            raise InvalidValue(f"{option} must be new: {str(path)!r} is read by this command")
        if path.is_file() and _of_a_ledger(path):
            raise InvalidValue(
                f"{option} must be new: {str(path)!r} belongs to a ledger, and is never replaced"
            )
        with tempfile.TemporaryFile(dir=path.parent if path.parent.exists() else path.parent.parent):
            pass
    except OSError as error:
        raise InvalidValue(f"{option} must be writable: {_reason(path, error)}") from None


def _of_a_ledger(path: Path) -> bool:
    """Return whether a file is one of the two of a ledger: the only record of what was charged."""
    place = os.path.realpath(path).removesuffix(".head")
    return not foreign(place) and not never_begun(place)


def write(path: Path, content: bytes) -> None:
    """Write a file atomically; it is on disk when this returns."""
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


def _reason(path: Path, error: OSError) -> str:
    return f"{str(path)!r}: {error.strerror or error}"
