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
    mean = "trimmed"                  # or "weighted" (the default), "median": one liar moves it little
    records = 20000                   # no statement of more records, or of a larger epsilon, counts more
    staleness = 2                     # rounds by which an answer may be late and still count

    [external]                        # optional: a SuperLink of others, in place of listen
    bridge = "bridge.sock"            # where the relay that `flwr run` starts there connects to
    ward-7 = 1036209964657236677      # the number of each party's node, as `flwr supernode list` shows it

    [parties]
    ward-7 = "keys/ward-7/public.toml"

For a network [model] stands in place of schema: see `farthing.deploy.learners`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farthing import validate
from farthing.data import table_files
from farthing.data.schema import Categorical, Numeric, Schema
from farthing.deploy.averages import Averaging, MeanRule
from farthing.deploy.flower.superlink import Address
from farthing.deploy.keys import PublicKeys
from farthing.deploy.learners import Learner, NetworkLearner, TableLearner
from farthing.deploy.messages.signed import checked_name
from farthing.deploy.toml_settings import Settings
from farthing.errors import InvalidValue
from farthing.federated.jobs import Job, checked
from farthing.federated.methods import table
from farthing.federated.terms import Trust

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
        if len({card.key for card in self.parties.values()}) != len(self.parties):
            raise InvalidValue("[parties] must each have a key of their own")
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
