"""A mod for any Flower ClientApp: every update is clipped, noised and paid for from a budget on the node.

    from farthing.deploy.flower.mod import BudgetMod

    mod = BudgetMod("hospital.ledger", epsilon=4.0, delta=1e-5, clip_norm=1.0, rounds=50)
    app = ClientApp(client_fn, mods=[mod])

The ledger is a file of the node. An update leaves only after its charge is on disk, and none leaves once the
budget is spent: the node then answers with an error, and the others go on. Nothing has to be trusted beyond
the node: neither the server nor its strategy.

Guarantee: that of the ledger, for everything the node holds (unit party), under replace-one by default: an
update lies within ``clip_norm`` of the weights it came from, whatever the records are, so that two sets of
records move it by at most twice as much. Gaussian noise on the lattice (`farthing.queries.mechanisms`),
composed by the Gaussian DP filter (Smith & Thakurta 2022), against anyone who sees every reply. It covers
what the reply holds. An app that sends private values by other ways (its own connections, files that others
read), or how long it takes, is not covered.

Other values in an app's reply (losses, accuracies, numbers of examples) depend on the records and are not
paid for: they are left out, and ``metrics`` gives public values in their place. If an app fails after the
charge, the reply is that of an app that did not move the weights, so that a failure reveals nothing. An
evaluation is paid for from the same budget if ``evaluation`` names its metrics and their public bounds: each
value is clamped to its bounds and noised. Otherwise messages for evaluation, and all queries, are refused
unless ``public_evaluation`` says that they do not read private records.
"""

import logging
import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from numpy.typing import NDArray

from farthing import validate
from farthing.accounting import calibrate
from farthing.budget import Adjacency, Budget, Unit
from farthing.errors import BudgetSpent, FarthingError, InvalidValue
from farthing.ledger.ledger import Ledger
from farthing.queries.bounds import ROWS, ClipNorm
from farthing.queries.events import GaussianEvent, RepeatedEvent
from farthing.queries.mechanisms import Gaussian
from farthing.queries.query import Query
from farthing.queries.samplers import Everyone

Floats = NDArray[np.float64]
App = Callable[[Message, Context], Message]

_OLD, _OLD_REPLY = "fitins.parameters", "fitres"  # how apps made of a NumPyClient name their records
_log = logging.getLogger(__name__)


class BudgetMod:
    """A Flower client mod that spends a budget of the node on its app's updates, and stops when it is spent.

    Parameters
    ----------
    journal : path
        The ledger's file on the node; begun where there is none. Give every node a file of its own.
    epsilon, delta : float
        The budget of everything the node ever sends.
    clip_norm : float
        How far an update may be from the weights that were sent, in Euclidean norm over all arrays.
    rounds : int, optional
        How many updates the budget is to last for; the noise follows from it.
    noise_multiplier : float, optional
        The standard deviation of the noise over ``clip_norm``, in place of ``rounds``.
    metrics : mapping of str to number, default {"num-examples": 1}
        Public numbers that are replied with every update, such as the weight that the strategy goes by.
    adjacency : {"replace-one", "zero-out"}, default "replace-one"
        What is compared: other records in place of the node's, or an update of nothing.
    public_evaluation : bool, default False
        Whether messages other than for training are handed to the app: only if they read no private record.
    evaluation : mapping of str to (low, high), optional
        The metrics that evaluations are answered with, and their public bounds. Each evaluation is charged.
    evaluation_noise : float, optional
        The noise multiplier of evaluations: the standard deviation of the noise on a metric is this times
        half the width of its bounds times the square root of their number. ``noise_multiplier`` by default.

    Raises
    ------
    InvalidValue
        If neither or both of ``rounds`` and ``noise_multiplier`` are given, or a value is out of range.

    Examples
    --------
    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/node.ledger"
    >>> mod = BudgetMod(path, epsilon=4.0, delta=1e-5, clip_norm=1.0, rounds=50)
    >>> round(mod.noise_multiplier, 2)
    15.29
    """

    def __init__(
        self,
        journal: str | os.PathLike[str],
        *,
        epsilon: float,
        delta: float,
        clip_norm: float,
        rounds: int | None = None,
        noise_multiplier: float | None = None,
        metrics: Mapping[str, float] | None = None,
        adjacency: Adjacency | str = Adjacency.REPLACE_ONE,
        public_evaluation: bool = False,
        evaluation: Mapping[str, tuple[float, float]] | None = None,
        evaluation_noise: float | None = None,
    ) -> None:
        self.journal, self.public_evaluation = os.fspath(journal), public_evaluation
        self.budget = Budget(epsilon, delta, adjacency=Adjacency(adjacency), unit=Unit.PARTY)
        self.metrics = {"num-examples": 1.0} if metrics is None else dict(metrics)
        if (rounds is None) == (noise_multiplier is None):
            raise InvalidValue("give rounds, which the budget is to last for, or noise_multiplier, not both")
        if rounds is not None:
            count = validate.count(rounds=rounds)
            noise_multiplier = calibrate.noise(lambda s: RepeatedEvent(GaussianEvent(s), count), self.budget)
        assert noise_multiplier is not None
        self.noise_multiplier = validate.positive(noise_multiplier=noise_multiplier)
        self._bound, self._noise = ClipNorm(clip_norm), Gaussian(self.noise_multiplier)
        self.evaluation = {name: _bounds(name, pair) for name, pair in (evaluation or {}).items()}
        if self.evaluation and public_evaluation:
            raise InvalidValue("give evaluation, which is charged, or public_evaluation, not both")
        given = self.noise_multiplier if evaluation_noise is None else evaluation_noise
        self._coarse = Gaussian(validate.positive(evaluation_noise=given))

    def __call__(self, message: Message, context: Context, call_next: App) -> Message:
        """Answer a message: charge, let the app train, clip, add noise; or say why not."""
        kind = message.metadata.message_type.split(".")[0]
        if kind != "train" and not (kind == "evaluate" and self.evaluation):
            if self.public_evaluation:
                return call_next(message, context)
            return _refused(message, f"messages for {kind} are not answered here: nothing pays for them")
        try:
            if kind == "evaluate":
                return self._evaluated(message, context, call_next)
            return self._trained(message, context, call_next)
        except BudgetSpent:
            return _refused(message, "the privacy budget of this node is spent")
        except InvalidValue as error:  # of the message: whatever fails after a charge ends as noise
            return _refused(message, str(error))
        except FarthingError as error:
            _log.error("no update was sent: %s", error)
            return _refused(message, "the ledger of this node cannot be used")

    def _trained(self, message: Message, context: Context, call_next: App) -> Message:
        name, given = _arrays(message)
        query = Query(Everyone(), _Update(len(given.flat)), self._bound, self._noise)
        with Ledger(self.budget, journal=self.journal, block=1) as ledger:
            party = ledger.over(_Party(lambda: _moved(call_next(message, context), given)))
            answer = party.ask(query, given.flat)
        return Message(self._reply(name, given.shaped(given.flat + answer.value)), reply_to=message)

    def _evaluated(self, message: Message, context: Context, call_next: App) -> Message:
        """Charge, evaluate, and answer with the noisy metrics: each is scaled to [-1, 1] by its bounds."""
        low, high = np.array(list(self.evaluation.values()), dtype=np.float64).T
        middle, half = (low + high) / 2, (high - low) / 2
        size = len(half)
        query = Query(Everyone(), _Update(size), ClipNorm(math.sqrt(size)), self._coarse)

        def scaled() -> Floats:
            values = _metrics(call_next(message, context), list(self.evaluation))
            found: Floats = np.clip(np.nan_to_num((values - middle) / half), -1.0, 1.0)
            return found

        with Ledger(self.budget, journal=self.journal, block=1) as ledger:
            answer = ledger.over(_Party(scaled)).ask(query, np.zeros(size))
        said = dict(zip(self.evaluation, (middle + half * answer.value).tolist(), strict=True))
        return Message(RecordDict({"metrics": MetricRecord(said | dict(self.metrics))}), reply_to=message)

    def _reply(self, name: str, arrays: ArrayRecord) -> RecordDict:
        """Return a reply made of public values alone, in the form of the message that it answers."""
        if name != _OLD:
            return RecordDict({name: arrays, "metrics": MetricRecord(dict(self.metrics))})
        weight = max(1, round(next(iter(self.metrics.values()), 1)))
        return RecordDict(
            {
                f"{_OLD_REPLY}.parameters": arrays,
                f"{_OLD_REPLY}.num_examples": MetricRecord({"num_examples": weight}),
                f"{_OLD_REPLY}.metrics": ConfigRecord(),
                f"{_OLD_REPLY}.status": ConfigRecord({"code": 0, "message": ""}),
            }
        )


def _bounds(name: str, pair: tuple[float, float]) -> tuple[float, float]:
    """Return the public bounds of a metric."""
    low, high = (validate.finite(**{name: value}) for value in pair)
    if not low < high:
        raise InvalidValue(f"the bounds of {name} must be two numbers, the lower one first, got {pair!r}")
    return low, high


def _metrics(reply: Message, names: list[str]) -> Floats:
    """Return the metrics of an app's reply; raises where one is missing."""
    if reply.has_error():
        raise InvalidValue("the app replied with an error")
    found: dict[str, Any] = {}
    for record in reply.content.metric_records.values():
        found |= dict(record)
    return np.array([float(found[name]) for name in names])


@dataclass(frozen=True, slots=True, eq=False)
class _Weights:
    """The weights of a message as one vector, and how to make arrays of another."""

    flat: Floats
    arrays: dict[str, NDArray[Any]]

    def shaped(self, flat: Floats) -> ArrayRecord:
        parts = np.split(flat, np.cumsum([array.size for array in self.arrays.values()])[:-1])
        shaped = zip(self.arrays.items(), parts, strict=True)
        return ArrayRecord(
            {
                name: Array(np.asarray(part.reshape(array.shape), dtype=array.dtype))
                for (name, array), part in shaped
            }
        )


def _arrays(message: Message) -> tuple[str, _Weights]:
    """Return the one record of arrays of a message, by its name."""
    records = message.content.array_records
    if len(records) != 1:
        raise InvalidValue(f"a message for training must hold one record of arrays, got {len(records)}")
    name, record = next(iter(records.items()))
    arrays = {key: array.numpy() for key, array in record.items()}
    odd = [key for key, array in arrays.items() if not np.issubdtype(array.dtype, np.floating)]
    if odd or not any(array.size for array in arrays.values()):
        raise InvalidValue(f"weights must be arrays of floats, got {', '.join(map(repr, odd)) or 'none'}")
    return name, _Weights(np.concatenate([a.ravel().astype(np.float64) for a in arrays.values()]), arrays)


def _moved(reply: Message, given: _Weights) -> Floats:
    """Return how far the app moved the weights; raises where its reply does not say."""
    if reply.has_error():
        raise InvalidValue("the app replied with an error")
    _, found = _arrays(reply)
    if [a.shape for a in found.arrays.values()] != [a.shape for a in given.arrays.values()]:
        raise InvalidValue("the app replied with arrays of other shapes than it was sent")
    return found.flat - given.flat


@dataclass(frozen=True, slots=True, eq=False)
class _Party:
    """All that a node holds, as one record: its app, which is run when it is asked."""

    train: Callable[[], Floats]

    def __len__(self) -> int:
        return 1

    def take(self, indices: Any) -> "list[Callable[[], Floats]]":
        """Return the app, or nobody."""
        return [self.train][indices] if isinstance(indices, slice) else [self.train for _ in indices]


@dataclass(frozen=True, slots=True)
class _Update:
    """The contribution of a node: its update of ``size`` weights, clipped; zero where its app fails."""

    size: int
    honours: ClassVar[Collection[str]] = ROWS

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.size,)

    def bounded_sum(self, records: "list[Callable[[], Floats]]", w: Any, bound: Any) -> Floats:
        """Return the clipped update. An error of the app stays here: the reply must not depend on it."""
        total = np.zeros(self.size)
        for train in records:
            try:
                total += bound.apply(train()[None])[0]
            except KeyboardInterrupt:  # of the node's owner
                raise
            except BaseException as error:  # its text may quote a record
                _log.warning(
                    "the app failed after its update was paid for (%s): noise alone is sent",
                    type(error).__name__,
                )
        return total


def _refused(message: Message, reason: str) -> Message:
    _log.warning("%s", reason)
    return Message(Error(ErrorCode.MOD_FAILED_PRECONDITION, reason), reply_to=message)
