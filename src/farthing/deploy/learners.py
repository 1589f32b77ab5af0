"""Describe what a run trains: a linear model of a table, or a network that coordinator and parties installed.

A learner gives the method its problem, reads public test data, measures accuracy on it, and writes the
model's file. Nothing here sees a private record.

    [model]                           # of a run's file, in place of schema
    name = "small"                    # as in the parties' policies, [models.small]
    factory = "ward_models:make_model"
    loss = "ward_models:loss"
    modules = "models"                # optional: a folder with modules of the coordinator's own

The coordinator's copy makes the first weights; parties are told its name and the hash of its source, and
refuse where theirs differs. ``test`` is then a ``.npz`` file with arrays X and y. The model is written as
``.npz`` with one array a parameter, which needs no pickle to be read.
"""

import io
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from farthing.data import model_file, table_files
from farthing.data.schema import Categorical, Schema
from farthing.deploy import factories
from farthing.deploy.messages.signed import checked_name
from farthing.deploy.toml_settings import Settings
from farthing.errors import FarthingError, InvalidValue
from farthing.federated.jobs import Job
from farthing.linear import losses
from farthing.linear.problem import Problem

if TYPE_CHECKING:
    from farthing.deploy.coordinator import Remote
    from farthing.torch.training.network import Network

Array = NDArray[np.float64]
PublicData = tuple[Any, NDArray[Any]]


class Learner(Protocol):
    """What a run trains."""

    networks: ClassVar[bool]  # whether it is for methods that train networks

    @property
    def size(self) -> dict[str, int]:
        """Return its size by name, for the report."""

    def problem(self, records: int) -> Any:
        """Return what the method is given beside the clients."""

    def read(self, path: str) -> PublicData:
        """Return public test data: inputs and labels."""

    def accuracy(self, w: Any, X: Any, y: NDArray[Any]) -> float:
        """Return the share of public rows whose label is found."""

    def probabilities(self, job: Job, clients: "Remote", w: Any, X: Any) -> Array:
        """Return the probability of each label for public rows."""

    def to_bytes(self, w: Any, report: str) -> bytes:
        """Return the file of the trained model."""


@dataclass(frozen=True, slots=True)
class TableLearner:
    """A linear model of the rows of a table with a public schema."""

    schema: Schema
    networks: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.schema.target, Categorical):
            raise InvalidValue(
                f"federated methods learn labels, and target {self.schema.target.name!r} is a number"
            )

    @property
    def size(self) -> dict[str, int]:
        return {"features": self.schema.width}

    def problem(self, records: int) -> Problem:
        assert isinstance(self.schema.target, Categorical)
        labels = len(self.schema.target.values)
        loss: losses.Loss = losses.logistic if labels == 2 else losses.multinomial
        return Problem(loss, records, self.schema.width, labels if labels > 2 else 0, unit=False)

    def read(self, path: str) -> PublicData:
        return table_files.read(path, self.schema, test=True)

    def accuracy(self, w: Any, X: Any, y: NDArray[Any]) -> float:
        scores = X @ w[0] + w[1]
        labels = scores.argmax(axis=1) if scores.ndim == 2 else scores > 0
        return float(np.mean(labels == y))

    def probabilities(self, job: Job, clients: "Remote", w: Any, X: Any) -> Array:
        problem = self.problem(int(clients.records.sum()))
        features = job.features(clients, problem)
        return problem.probabilities(w, X, clip_norm=clients.terms(0).bound.clip, features=features)

    def to_bytes(self, w: Any, report: str) -> bytes:
        u, constant = (np.asarray(part) for part in w)
        coef, intercept = (u.T, constant) if u.ndim == 2 else (u[None, :], np.atleast_1d(constant))
        return model_file.Model(self.schema, coef, intercept).to_bytes(report)


@dataclass(frozen=True, slots=True, eq=False)
class NetworkLearner:
    """A network, made by a factory that coordinator and parties have installed."""

    network: "Network"
    networks: ClassVar[bool] = True

    @classmethod
    def of(cls, given: Settings) -> "NetworkLearner":
        """Return the network of a [model] table; its source is hashed as the parties hash theirs."""
        name = checked_name(model=given.text("name"))
        names = given.text("factory"), given.text("loss")
        folder = given.path("modules") if "modules" in given.names else None
        given.done()
        from farthing.torch.training.network import Network

        source = factories.SourceFiles.read(names, folder)
        source.seal()
        make, loss = (factories.found(one, folder) for one in names)
        try:
            return cls(Network(make(), loss, name=name, source=source.hash))
        except FarthingError:
            raise
        except Exception as error:
            raise InvalidValue(f"{names[0]} failed ({type(error).__name__}: {error})") from None

    @property
    def size(self) -> dict[str, int]:
        return {"weights": self.network.size}

    def problem(self, records: int) -> "Network":
        return self.network

    def read(self, path: str) -> PublicData:
        try:
            with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as held:
                X, y = np.asarray(held["X"]), np.asarray(held["y"])
        except OSError as error:
            raise InvalidValue(f"test must be an .npz file, {path!r}: {error.strerror}") from None
        except (ValueError, LookupError, TypeError, AttributeError, EOFError, zipfile.BadZipFile):
            raise InvalidValue(f"test must be an .npz file with arrays X and y, {path!r} is not") from None
        if X.dtype.kind == "f":
            X = X.astype(np.float32)
        if len(X) != len(y) or not len(y) or y.ndim != 1 or y.dtype.kind not in "iu":
            raise InvalidValue(f"test must hold one whole label a row, {path!r} does not")
        try:
            scores = self.network.outputs(X[:1], self.network.start())
        except Exception as error:
            raise InvalidValue(f"the model does not run on test ({type(error).__name__}: {error})") from None
        if scores.ndim != 2 or y.min() < 0 or y.max() >= scores.shape[1]:
            raise InvalidValue("the model must give one score for each label of test")
        return X, y

    def accuracy(self, w: Any, X: Any, y: NDArray[Any]) -> float:
        return float(np.mean(self.network.outputs(X, w).argmax(axis=1) == y))

    def probabilities(self, job: Job, clients: "Remote", w: Any, X: Any) -> Array:
        scores = np.asarray(self.network.outputs(X, w), dtype=np.float64)
        scores -= scores.max(axis=1, keepdims=True)
        found: Array = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
        return found

    def to_bytes(self, w: Any, report: str) -> bytes:
        layout, file = self.network.sums.layout, io.BytesIO()
        parts = np.split(np.asarray(w, dtype=np.float32), layout.offsets[1:])
        named = zip(layout.names, layout.shapes, parts, strict=True)
        arrays: dict[str, Any] = {name: part.reshape(shape) for name, shape, part in named}
        np.savez(file, _report=np.frombuffer(report.encode(), dtype=np.uint8), **arrays)
        return file.getvalue()
