"""Convert the content of messages to JSON values and back: invitations, contributions, budgets, draws.

Only what this module defines can be asked over the network: gradients of four losses on public features, loss
and accuracy by them (`Evaluation`), and questions about networks that a party has installed (`NetworkAsk`).
Anything else that a message names is refused.

>>> from farthing.linear.losses import logistic
>>> asked = Gradient(logistic, Features(3, intercept=0.3, radius=1.5))
>>> contribution_of(Fields(contribution(asked))) is contribution_of(Fields(contribution(asked)))
True
>>> draw_of(draw(Poisson(0.25)))
Poisson(sampling_rate=0.25)

`SignedExchange` seals a coordinator's requests, and checks signatures before it uses an answer.

`Transport` moves opaque bytes between coordinator and guards: it sends each party its request and yields the
answers until the time is up; a party that does not answer is absent. `InProcess` calls functions,
`UnixSockets` connects to guards on this machine.

>>> echo = InProcess({"a": lambda request: request + b"!"})
>>> list(echo.exchange({"a": b"hello"}, seconds=1.0))
[('a', b'hello!')]
"""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from functools import lru_cache
from os import PathLike
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from farthing.budget import Budget
from farthing.data.tables import Features
from farthing.deploy.messages.networks import (
    LARGEST_RATE,
    MOST_WEIGHTS,
    NetworkAsk,
    NetworkKind,
    pack_weights,
    unpack_update,
    unpack_weights,
)
from farthing.deploy.messages.signed import (
    LARGEST_HEADER,
    NONCE,
    Fields,
    MessageKind,
    Opened,
    Reason,
    Refused,
    Signer,
    checked_name,
    message_digest,
    pack_numbers,
    refuse,
    seal,
    unpack_numbers,
    unseal,
)
from farthing.deploy.messages.sockets import call
from farthing.errors import FarthingError, InvalidValue, Unsupported
from farthing.federated.evaluation import Evaluation
from farthing.federated.terms import Draw, Exactly, Invitation
from farthing.linear.losses import Gradient, Loss, huber_hinge, logistic, multinomial, squared
from farthing.queries.query import Contribution
from farthing.queries.samplers import Everyone, Poisson

Array = NDArray[np.float64]
Asked = Gradient | Evaluation | NetworkAsk

LOSSES: dict[str, Loss] = {
    "logistic": logistic,
    "multinomial": multinomial,
    "huber-hinge": huber_hinge,
    "squared": squared,
}
MOST_ROUNDS = 2**40
_WIDEST = 2**22


def draw(of: Draw) -> str:
    """Return a sampler as text: ``all``, ``poisson:0.01`` or ``exactly:1``."""
    match of:
        case Everyone():
            return "all"
        case Poisson(rate):
            return f"poisson:{rate!r}"
        case Exactly(size):
            return f"exactly:{size}"
    raise Unsupported(f"a guard charges every round, so {of!r} can only be simulated")


def draw_of(text: Any) -> Draw:
    """Return the sampler that `draw` wrote; `InvalidValue` for any other text."""
    name, _, rest = text.partition(":") if isinstance(text, str) else ("", "", "")
    try:
        match name:
            case "all" if text == "all":
                return Everyone()
            case "poisson":
                return Poisson(float(rest))
            case "exactly":
                return Exactly(int(rest))
    except ValueError:
        pass
    raise InvalidValue(f"a draw must be 'all', 'poisson:RATE' or 'exactly:NUMBER', got {text!r}")


# Keys of messages that predate the names of the fields.
_KEYS = {"clip_norm": "clip", "noise_multiplier": "noise"}


def invitation(of: Invitation) -> dict[str, Any]:
    """Return an invitation as JSON values."""
    values = {_KEYS.get(field.name, field.name): _plain(getattr(of, field.name)) for field in fields(of)}
    return values | {"draw": draw(of.draw)}


def _plain(value: Any) -> Any:
    if isinstance(value, StrEnum):
        return str(value)
    return value.item() if isinstance(value, np.generic) else value


def invitation_of(given: Fields) -> Invitation:
    """Return the invitation that `invitation` wrote; refuse anything else."""
    values = {field.name: given.take(_KEYS.get(field.name, field.name)) for field in fields(Invitation)}
    given.done()
    plain = (str, int, float, bool, type(None))
    if any(
        type(value) not in plain or (name == "seen") != (type(value) is bool)
        for name, value in values.items()
    ):
        refuse(Reason.MALFORMED, "an invitation consists of texts and numbers")
    try:
        made = Invitation(**values | {"draw": draw_of(values["draw"])})
        hash(made)
    except FarthingError:
        refuse(Reason.MALFORMED, "the invitation is invalid")
    if made.rounds > MOST_ROUNDS:
        refuse(Reason.MALFORMED, "the invitation is invalid")
    return made


def contribution(of: "Contribution | NetworkAsk") -> dict[str, Any]:
    """Return a gradient, or a question about a network, as JSON values; a guard answers nothing else."""
    if isinstance(of, NetworkAsk):
        return of.header()
    if isinstance(of, Evaluation):
        return contribution(of.gradient) | {"cap": of.cap, "clip": of.clip}
    name = next((name for name, loss in LOSSES.items() if getattr(of, "loss", None) == loss), None)
    if not isinstance(of, Gradient) or name is None:
        raise Unsupported(f"a guard answers gradients of {', '.join(LOSSES)}, got {type(of).__name__}")
    features = of.features
    if np.any(features.centre) or np.any(np.asarray(features.scale) != 1.0) or np.ndim(features.scale) == 2:
        raise Unsupported("a guard takes features as they are: no centre and no scale")
    plain = {"width": features.width, "intercept": features.intercept, "radius": features.radius}
    return {"loss": name, **plain}


def asked_of(of: Contribution) -> Asked:
    """Return what a coordinator asks for a contribution: questions about networks describe themselves."""
    described = getattr(of, "described", None)
    if described is None:
        contribution(of)  # refuses what no guard answers
        return cast(Gradient | Evaluation, of)
    try:
        return NetworkAsk.of(Fields(described))
    except Refused as refusal:
        raise InvalidValue(
            f"a guard cannot be asked this ({refusal.text}): give the network a name and its source's hash"
        ) from None


def contribution_of(given: Fields) -> Asked:
    """Return the gradient, the evaluation or the question about a network that `contribution` wrote."""
    if "network" in given.plain():
        return NetworkAsk.of(given)
    judged = [given.number(name) for name in ("cap", "clip")] if "cap" in given.plain() else []
    if not all(0 < value <= LARGEST_RATE for value in judged):
        refuse(Reason.MALFORMED, f"cap and clip must lie between 0 and {LARGEST_RATE:g}")
    name, width = given.text("loss"), given.whole("width", 1, _WIDEST)
    intercept, radius = given.number("intercept"), given.take("radius")
    given.done()
    if name not in LOSSES:
        refuse(Reason.LOSS, "this loss is not known")
    if radius is not None and type(radius) not in (int, float):
        refuse(Reason.MALFORMED, "radius must be a number, or nothing")
    try:
        gradient = _gradient(name, width, intercept, radius)
        return Evaluation(gradient, *judged) if judged else gradient
    except FarthingError:
        refuse(Reason.MALFORMED, "the features are invalid")


@lru_cache(maxsize=64)
def _gradient(name: str, width: int, intercept: float, radius: float | None) -> Gradient:
    """Return one object for equal arguments, so that tables reuse what they measured for its features."""
    return Gradient(LOSSES[name], Features(width, intercept=intercept, radius=radius))


def loss_name(of: Gradient) -> str:
    """Return the name of a gradient's loss in messages and policies."""
    return str(contribution(of)["loss"])


def budget(of: Budget) -> dict[str, Any]:
    """Return a budget as JSON values."""
    return {name: _plain(value) for name, value in asdict(of).items()}


def budget_of(given: Fields) -> Budget:
    """Return the budget that `budget` wrote."""
    epsilon, delta = given.number("epsilon"), given.number("delta")
    names = [given.text(name) for name in ("adjacency", "unit", "observer")]
    given.done()
    try:
        return Budget(epsilon, delta, *names)  # type: ignore[arg-type]
    except FarthingError:
        refuse(Reason.MALFORMED, "the budget is invalid")


@dataclass(frozen=True, slots=True)
class RoundId:
    """The identity of a round in every message: run, round (0 before the first) and nonce."""

    run: str
    round: int
    nonce: str

    def header(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, given: Fields) -> "RoundId":
        return cls(given.text("run"), given.whole("round", 0, MOST_ROUNDS), given.hexadecimal("nonce", NONCE))

    def key(self, dataset: str) -> str:
        """Return the key under which an answer is charged and kept."""
        return f"{dataset}/{self.run}/{self.round}/{self.nonce}"


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """A coordinator's question, which carries everything that a guard needs: the guard keeps no state.

    ``seen`` is the newest row of the guard's ledger that the coordinator knows of (number and hash).
    """

    turn: RoundId
    dataset: str
    invitation: Invitation
    contribution: Asked
    shape: tuple[int, ...]
    seen: tuple[int, str] | None = None

    def header(self) -> dict[str, Any]:
        return self.turn.header() | {
            "dataset": checked_name(dataset=self.dataset),
            "invitation": invitation(self.invitation),
            "contribution": contribution(self.contribution),
            "shape": list(self.shape),
            "seen": None if self.seen is None else list(self.seen),
        }

    @classmethod
    def of(cls, given: Fields) -> "Question":
        turn, dataset = RoundId.of(given), given.text("dataset")
        invited, asked = (
            invitation_of(given.inner("invitation")),
            contribution_of(given.inner("contribution")),
        )
        shape, seen = given.take("shape"), given.take("seen")
        given.done()
        if not isinstance(shape, list) or not 1 <= len(shape) <= 2:
            refuse(Reason.SHAPE, "weights have one or two sides")
        network = isinstance(asked, NetworkAsk)
        widest = MOST_WEIGHTS if network else _WIDEST + 1
        if any(type(side) is not int or not 0 < side <= widest for side in shape):
            refuse(Reason.SHAPE, "a side of the weights is out of range")
        if network and len(shape) != 1:
            refuse(Reason.SHAPE, "weights of a network are one flat array")
        return cls(turn, dataset, invited, asked, tuple(shape), row_of(seen))

    def pack(self, values: Array) -> bytes:
        """Return weights or an answer as a body: float64, or float32 for a network."""
        network = isinstance(self.contribution, NetworkAsk)
        return pack_weights(values) if network else pack_numbers(values)

    def weights(self, body: bytes) -> Array:
        """Return the weights of a question's body; refuse what cannot be computed with."""
        network = isinstance(self.contribution, NetworkAsk)
        return unpack_weights(body, self.shape) if network else unpack_numbers(body, self.shape)

    @property
    def evaluates(self) -> bool:
        """Return whether it asks for loss and accuracy."""
        asked = self.contribution
        if isinstance(asked, NetworkAsk):
            return asked.kind is NetworkKind.EVALUATION
        return isinstance(asked, Evaluation)

    @property
    def answered(self) -> tuple[int, ...]:
        """Return the shape of an answer: that of the weights, or two numbers."""
        return Evaluation.shape if self.evaluates else self.shape

    def answer(self, body: bytes) -> Array:
        """Return the numbers of an answer's body."""
        network = isinstance(self.contribution, NetworkAsk)
        return unpack_update(body, self.answered) if network else unpack_numbers(body, self.answered)


def row_of(seen: Any) -> tuple[int, str] | None:
    """Return number and hash of a row of a ledger, or None."""
    if seen is None:
        return None
    if not isinstance(seen, list) or len(seen) != 2:
        refuse(Reason.MALFORMED, "seen must be a number and a hash, or nothing")
    given = Fields({"seq": seen[0], "hash": seen[1]})
    return given.whole("seq"), given.hexadecimal("hash", 32)


class Transport(Protocol):
    """A way to carry requests to parties, and their answers back."""

    @property
    def parties(self) -> Sequence[str]:
        """Return the names of the parties, in a fixed order."""

    def exchange(self, requests: Mapping[str, bytes], seconds: float) -> Iterable[tuple[str, bytes]]:
        """Yield (party, answer) until all came or the time is up. Never raises for a single party."""


class InProcess:
    """A transport to parties that are functions, called in turn; one that raises is absent."""

    def __init__(self, parties: Mapping[str, Callable[[bytes], bytes]]) -> None:
        self._parties = dict(parties)

    @property
    def parties(self) -> Sequence[str]:
        return list(self._parties)

    def exchange(self, requests: Mapping[str, bytes], seconds: float) -> Iterator[tuple[str, bytes]]:
        for name, request in requests.items():
            with contextlib.suppress(Exception):  # any failure counts as no answer
                yield name, self._parties[name](request)


class UnixSockets:
    """A transport to guards on this machine, by the paths of their sockets; all are asked at once."""

    def __init__(self, sockets: Mapping[str, str | PathLike[str]]) -> None:
        self._sockets = dict(sockets)

    @property
    def parties(self) -> Sequence[str]:
        return list(self._sockets)

    def exchange(self, requests: Mapping[str, bytes], seconds: float) -> Iterator[tuple[str, bytes]]:
        came: queue.SimpleQueue[tuple[str, bytes | None]] = queue.SimpleQueue()
        until = time.monotonic() + seconds

        def ask(name: str, request: bytes) -> None:
            answer = None
            with contextlib.suppress(Exception):
                answer = call(self._sockets[name], request, seconds=seconds)
            came.put((name, answer))

        for name, request in requests.items():
            threading.Thread(target=ask, args=(name, request), daemon=True).start()
        for _ in requests:
            try:
                name, answer = came.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                return
            if answer is not None:
                yield name, answer


log = logging.getLogger("farthing.federated")

Request = tuple[MessageKind, dict[str, Any], bytes]
Check = Callable[[str, Opened], None]


@dataclass(frozen=True, slots=True, eq=False)
class Replies:
    """The replies of one exchange, by party; a party in none of the three did not reply."""

    came: dict[str, Opened] = field(default_factory=dict)
    refused: dict[str, Reason] = field(default_factory=dict)  # by the guard
    # by the coordinator: signed, and against the rules
    broken: dict[str, Reason] = field(default_factory=dict)

    @property
    def heard(self) -> set[str]:
        return {*self.came, *self.refused, *self.broken}


class SignedExchange:
    """Signed requests to enrolled parties, and their verified replies."""

    def __init__(self, transport: Transport, signer: Signer, enrolled: Mapping[str, bytes]) -> None:
        self._transport, self._signer, self._enrolled = transport, signer, enrolled

    def exchange(
        self,
        requests: Mapping[str, Request],
        kind: MessageKind,
        seconds: float,
        check: Check,
        largest: int = 0,
        enough: Callable[[Replies], bool] | None = None,
    ) -> Replies:
        """Return replies of a kind with at most ``largest`` bytes of body; ``check`` raises `Refused`.

        It ends when all have replied, or as soon as ``enough`` says so of the replies. A greeting among the
        requests is replied to by an announcement.

        A reply that the party did not sign for this very request says nothing about the party: anybody could
        have made or replayed it. It is ignored, and the party may still reply.
        """
        sealed = {name: seal(*request, self._signer) for name, request in requests.items()}
        about = {name: message_digest(data) for name, data in sealed.items()}
        mail = Replies()
        for name, data in self._transport.exchange(sealed, seconds):
            if name not in sealed or name in mail.heard:
                continue  # it was not asked, or has replied: duplicates count once
            try:
                opened = unseal(data, {self._enrolled[name]}, LARGEST_HEADER + 256 + largest)
                said = opened.fields()
                if said.take("about") != about[name]:
                    refuse(Reason.STALE, "the reply is to another request")
            except Refused as refusal:
                log.warning("from %s: %s", name, refusal)
                continue
            greeted = requests[name][0] is MessageKind.HELLO
            wanted = MessageKind.ANNOUNCEMENT if greeted else kind
            self._sort(mail, name, opened, said.plain().get("reason"), wanted, check)
            if len(mail.heard) == len(sealed) or (enough is not None and enough(mail)):
                break
        return mail

    def _sort(
        self, mail: Replies, name: str, opened: Opened, text: Any, kind: MessageKind, check: Check
    ) -> None:
        if opened.kind is MessageKind.REFUSAL:
            mail.refused[name] = Reason(text) if text in list(Reason) else Reason.MALFORMED
            log.warning("%s refused: %s", name, mail.refused[name])
            return
        try:
            if opened.kind is not kind:
                refuse(Reason.MALFORMED, "the reply has a wrong kind")
            check(name, opened)
            mail.came[name] = opened
        except Refused as refusal:
            log.warning("from %s: %s", name, refusal)
            mail.broken[name] = refusal.reason
