"""Read a run's file: what is trained, by which method, over which parties, and where it is written.

    run = "wards-1"
    dataset = "wards"                 # as in the parties' policies
    listen = "0.0.0.0:9092"           # the address that nodes connect to; by default 127.0.0.1:9092
    keys = "keys/coordinator"         # the folder that `farthing keys` made
    folder = "wards-1"                # checkpoint, model.npz, report.json, logs
    schema = "adult"                  # public bounds and vocabularies, a JSON file or the word adult
    test = "adult"                    # optional: public test data, to watch accuracy on
    wait = 3600                       # seconds until enough parties have connected
    seconds = 60                      # seconds that a round may take
    patience = 3                      # rounds that a party may miss in a row before it is not waited for
    least = 3                         # parties that a run needs to begin: by default all; others may join
    deadline = 10                     # optional: seconds after which a round ends with
    quorum = 0.8                      # this share of the answers
    evaluate = 10                     # optional: loss and accuracy at the parties every so many rounds, each
                                      # charged like a round, where their policies say evaluation = true
    metrics = "127.0.0.1:9100"        # optional: /metrics and /healthz, see `farthing.deploy.metrics`

    [method]
    name = "addp"                     # or federated-descent, sgd2, sgd1
    weights = "plain"                 # options of `farthing simulate`: --epsilon-iter becomes epsilon_iter
    most = 200                        # stop after so many rounds, whatever is left

    [averaging]                       # optional, see `farthing.deploy.averages`
    mean = "trimmed"                  # or "weighted" (the default), "median": robust to one party
    records = 20000                   # no statement of more records, or of a larger epsilon, counts more
    staleness = 2                     # rounds by which an answer may be late and still count

    [floor]                           # optional: the least budget that a party may have; who has less is left
    epsilon = 0.1                     # out, and told so (by default 1e-3 and 1e-30). One noise that all share
    delta = 1e-9                      # is sized for the least of all; a plain sum has the noise of each

    [external]                        # optional: a SuperLink of others, in place of listen
    bridge = "bridge.sock"            # where the relay that `flwr run` starts there connects to
    ward-7 = 1036209964657236677      # the number of each party's node, as `flwr supernode list` shows it

    [parties]
    ward-7 = "keys/ward-7/public.toml"

A table's linear model needs a schema (`TableLearner`). A network that coordinator and parties installed
(`NetworkLearner`) has a table [model] in its place:

    [model]
    name = "small"                    # as in the parties' policies, [models.small]
    factory = "ward_models:make_model"
    loss = "ward_models:loss"
    modules = "models"                # optional: a folder with modules of the coordinator's own

The coordinator's copy makes the first weights; parties are told its name and the hash of its source, and
refuse where theirs differs. ``test`` is then a ``.npz`` file with arrays X and y. The model is written as
``.npz`` with one array a parameter, which needs no pickle to be read. Nothing here sees a private record.
"""

import io
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.data import model_file, table_files
from farthing.data.schema import Categorical, Numeric, Schema
from farthing.deploy import factories
from farthing.deploy.averages import Averaging, MeanRule
from farthing.deploy.flower.superlink import Address
from farthing.deploy.keys import PublicKeys
from farthing.deploy.messages.forms import LEAST, Floor
from farthing.deploy.messages.signed import checked_name
from farthing.deploy.toml_settings import Settings
from farthing.errors import FarthingError, InvalidValue
from farthing.federated.jobs import Job, checked
from farthing.federated.methods import table
from farthing.federated.terms import Trust
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
            return cls(Network(make(), loss, name=name, source=source.hash(names)))
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


# networks have no schema, and a job reads its own only where it reads a table
NO_SCHEMA = Schema((Numeric("none", 0.0, 1.0),), Categorical("label", ("0", "1")))


@dataclass(frozen=True, slots=True)
class External:
    """A SuperLink that others run: where its relay connects to, and the numbers of nodes there."""

    bridge: Path
    nodes: dict[str, int]

    @classmethod
    def of(cls, given: Settings) -> "External":
        """Return the [external] table of a run's file."""
        bridge = given.path("bridge")
        nodes = {checked_name(party=name): given.whole(name, 0) for name in given.names}
        given.done()
        if len(set(nodes.values())) != len(nodes):
            raise InvalidValue("[external] must give each party a node of its own")
        return cls(bridge, nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """A run's file: the method, the parties, and all paths."""

    run: str
    dataset: str
    listen: Address
    keys: Path
    folder: Path
    learner: Learner
    job: Job
    parties: dict[str, PublicKeys]
    test: str | None = None
    wait: float = 3600.0
    seconds: float = 60.0
    patience: int = 3
    least: int | None = None
    most: int | None = None
    quorum: float = 1.0
    deadline: float | None = None
    averaging: Averaging = field(default_factory=Averaging)
    evaluate: int | None = None
    metrics: Address | None = None
    external: External | None = None
    floor: Floor = LEAST

    @classmethod
    def load(cls, path: Path) -> "RunFile":
        try:
            return cls._of(Settings.load(path))
        except InvalidValue as error:
            said = re.sub(r"--([a-z][a-z-]*)", lambda flag: flag[1].replace("-", "_"), str(error))
            raise InvalidValue(f"{path}: {said}") from None

    @classmethod
    def _of(cls, given: Settings) -> "RunFile":
        method, places = given.table("method"), given.table("parties")
        parties = {checked_name(party=name): PublicKeys.load(places.path(name)) for name in places.names}
        learner = _learner(given)
        test = given.text("test", None)
        deployed = [
            one for one in table.METHODS.values() if one.deployed and one.networks is learner.networks
        ]
        job = Job(
            table="",
            schema=getattr(learner, "schema", NO_SCHEMA),
            clients=max(1, len(parties)),
            method=table.named(method.text("name"), deployed, "method.name"),
            trust=method.text("trust", None),
            survivors=method.whole("survivors", None),
            options=_options(method),
        )
        plan = cls(
            run=checked_name(run=given.text("run")),
            dataset=checked_name(dataset=given.text("dataset")),
            listen=Address.of(given.text("listen", "127.0.0.1:9092")),
            keys=given.path("keys"),
            folder=given.path("folder"),
            learner=learner,
            job=job,
            parties=parties,
            test=test if test is None or test == table_files.EMBEDDED else str(given.beside(test)),
            wait=given.number("wait", 3600.0),
            seconds=given.number("seconds", 60.0),
            patience=given.whole("patience", 3),
            least=given.whole("least", None),
            most=method.whole("most", None),
            quorum=given.number("quorum", 1.0),
            deadline=given.number("deadline", None),
            averaging=_averaging(given.table("averaging")) if "averaging" in given.names else Averaging(),
            evaluate=given.whole("evaluate", None),
            metrics=Address.of(given.text("metrics")) if "metrics" in given.names else None,
            external=External.of(given.table("external")) if "external" in given.names else None,
            floor=_floor(given.table("floor")) if "floor" in given.names else LEAST,
        )
        given.done()
        method.done()
        plan._check()
        return plan

    def _check(self) -> None:
        checked(self.job)
        if self.job.trust == Trust.TRUSTED:
            raise InvalidValue("trust must be local or distributed: a guard releases nothing without noise")
        if self.job.trusted is not Trust.LOCAL and self.averaging.sees_uploads:
            raise InvalidValue("[averaging] needs local trust: under distributed trust only sums are seen")
        if self.quorum > 1:
            raise InvalidValue(f"quorum must be a share of the parties, at most 1, got {self.quorum:g}")
        if not self.parties:
            raise InvalidValue("[parties] must name at least one, with its public.toml")
        if self.external is not None and set(self.external.nodes) != set(self.parties):
            raise InvalidValue("[external] must give the number of the node of each of the [parties]")
        for keys in zip(*((card.key, card.node) for card in self.parties.values()), strict=True):
            if len(set(keys)) != len(self.parties):  # two with one node: the first would never be asked
                raise InvalidValue("[parties] must each have a key of their own, and a node of their own")
        if self.least is not None and self.least > len(self.parties):
            raise InvalidValue(
                f"least must be at most the number of parties, {len(self.parties)}, got {self.least}"
            )

    @property
    def model(self) -> Path:
        return self.folder / "model.npz"

    @property
    def report(self) -> Path:
        return self.folder / "report.json"


def _learner(given: Settings) -> Learner:
    """Return what a run trains: [model] names a network, schema a table."""
    if "model" in given.names:
        if "schema" in given.names:
            raise InvalidValue("give schema for a table, or [model] for a network, not both")
        return NetworkLearner.of(given.table("model"))
    name = given.text("schema")
    place = name if name == table_files.EMBEDDED else str(given.beside(name))
    return TableLearner(table_files.schema_of(place, None))


def _options(given: Settings) -> dict[str, Any]:
    """Return the options in a [method] table; `checked` refuses those of other methods by name."""
    read: dict[type, Callable[..., Any]] = {float: given.number, int: given.whole, str: given.text}
    return {
        name: given.flag(name) if option.kind is bool else read[option.kind](name, None)
        for name, (option, _) in table.every_option().items()
        if name in given.names
    }


def _floor(given: Settings) -> Floor:
    """Return the least budget that a [floor] table takes."""
    made = Floor(given.number("epsilon", LEAST.epsilon), given.number("delta", LEAST.delta))
    given.done()
    return made


def _averaging(given: Settings) -> Averaging:
    """Return the settings of the mean in an [averaging] table."""
    made = Averaging(
        mean=validate.choice(MeanRule, mean=given.text("mean", "weighted")),
        trim=given.number("trim", 0.1),
        records=given.whole("records", None),
        epsilon=given.number("epsilon", None),
        staleness=given.whole("staleness", None) or 0,
    )
    given.done()
    return made
