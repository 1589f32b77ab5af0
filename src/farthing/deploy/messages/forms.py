"""Convert the content of messages to JSON values and back: invitations, contributions, budgets, draws.

Only what this module defines can be asked over the network: gradients of four losses on public features, loss
and accuracy by them (`Evaluation`), and questions about networks that a party has installed (`NetworkAsk`).
Anything else that a message names is refused.

>>> from farthing.linear.losses import logistic
>>> asked = LinearGradient(logistic, Features(3, intercept=0.3, radius=1.5))
>>> contribution_of(Fields(contribution(asked))) is contribution_of(Fields(contribution(asked)))
True
>>> draw_of(draw(Poisson(0.25)))
Poisson(sampling_rate=0.25)

A question about a network is a name, a hash, and numbers, never code: the model that the party has installed,
the hash of the source that the coordinator expects, and one of four kinds: the clipped gradients at the
weights of the message (``gradient``), so many local private steps from there (``steps``), the clipped update
of a user's or the party's local training (``update``), or loss and accuracy on the party's own records
(``evaluation``). Weights and answers are bodies of float32; a weight that is not finite, or beyond
`LARGEST_WEIGHT`, is refused.

>>> network = NetworkAsk("small", "ab" * 32, NetworkKind.STEPS, steps=4, lr=0.5)
>>> NetworkAsk.of(Fields(network.header())) == network
True
>>> unpack_weights(pack_weights(np.ones(3)), (3,))
array([1., 1., 1.])
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from functools import lru_cache
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from farthing import validate
from farthing.budget import Budget
from farthing.data.tables import Features
from farthing.deploy.messages.signed import (
    NONCE,
    Fields,
    Reason,
    Refused,
    checked_name,
    pack_numbers,
    refuse,
    unpack_numbers,
)
from farthing.errors import FarthingError, InvalidValue, Unsupported
from farthing.federated.evaluation import Evaluation
from farthing.federated.terms import Draw, Exactly, Invitation
from farthing.linear.losses import LinearGradient, Loss, huber_hinge, logistic, multinomial, squared
from farthing.queries.correlated import Cyclic
from farthing.queries.query import Contribution
from farthing.queries.samplers import Everyone, Poisson

Array = NDArray[np.float64]

EACH = 4  # bytes of a weight
LARGEST_WEIGHT = 1e6
LARGEST_RATE = 1e3  # a local learning rate, or a proximal term
MOST_STEPS = 2**20
MOST_WEIGHTS = 124_000_000  # a guard keeps answers in its ledger, as float64: SQLite holds 1e9 bytes a value


class NetworkKind(StrEnum):
    """The kind of a question about a network."""

    GRADIENT = "gradient"
    STEPS = "steps"
    UPDATE = "update"
    EVALUATION = "evaluation"


_NUMBERS = {
    NetworkKind.GRADIENT: (),
    NetworkKind.STEPS: ("steps", "lr", "proximal"),
    NetworkKind.UPDATE: ("steps", "lr", "batch"),
    NetworkKind.EVALUATION: ("cap", "clip"),
}


@dataclass(frozen=True, slots=True)
class NetworkAsk:
    """A question about a network that the party has installed."""

    network: str
    source: str  # the SHA-256 of the source that the coordinator expects
    kind: NetworkKind
    steps: int = 1
    lr: float = 0.0
    proximal: float = 0.0
    batch: int = 0
    cap: float = 0.0
    clip: float = 0.0

    def header(self) -> dict[str, Any]:
        """Return the question as JSON values."""
        numbers = {name: getattr(self, name) for name in _NUMBERS[self.kind]}
        return {"network": self.network, "hash": self.source, "kind": str(self.kind), **numbers}

    @classmethod
    def of(cls, given: Fields) -> "NetworkAsk":
        """Return the question that `header` wrote; refuse anything else."""
        network, source, word = given.text("network"), given.hexadecimal("hash", 32), given.text("kind")
        if word not in list(NetworkKind):
            refuse(Reason.MALFORMED, f"a question about a network is one of {', '.join(NetworkKind)}")
        kind = NetworkKind(word)
        found = {name: _READ[name](given, name) for name in _NUMBERS[kind]}
        given.done()
        for name in ("lr", "cap", "clip"):
            if found.get(name) == 0.0:
                refuse(Reason.MALFORMED, f"{name} must be above 0")
        return cls(network, source, kind, **found)


def _rate(given: Fields, name: str) -> float:
    value = given.number(name)
    if not 0.0 <= value <= LARGEST_RATE:
        refuse(Reason.MALFORMED, f"{name} must lie between 0 and {LARGEST_RATE:g}")
    return value


def _steps(given: Fields, name: str) -> int:
    return given.whole(name, 1, MOST_STEPS)


_READ: dict[str, Any] = {"steps": _steps, "batch": Fields.whole}
_READ |= dict.fromkeys(("lr", "proximal", "cap", "clip"), _rate)


def pack_weights(values: ArrayLike) -> bytes:
    """Return numbers as little-endian float32."""
    return np.ascontiguousarray(values, dtype="<f4").tobytes()


def unpack_update(body: bytes, shape: Sequence[int]) -> Array:
    """Return finite numbers of exactly this shape, as an answer holds them; check the length first."""
    size = EACH * math.prod(shape)
    if len(body) != size:
        refuse(Reason.SHAPE, f"{len(body)} bytes, {size} are expected")
    values = np.frombuffer(body, dtype="<f4").astype(np.float64).reshape(tuple(shape))
    if not np.isfinite(values).all():
        refuse(Reason.NONFINITE, "a number is not finite")
    return values


def unpack_weights(body: bytes, shape: Sequence[int]) -> Array:
    """Return finite weights of exactly this shape, none beyond `LARGEST_WEIGHT`."""
    values = unpack_update(body, shape)
    refuse_weights(values)
    return values


def refuse_weights(values: Array) -> None:
    """Refuse weights beyond `LARGEST_WEIGHT`: gradients there are nothing but rounding."""
    if not np.abs(values).max(initial=0.0) <= LARGEST_WEIGHT:
        refuse(Reason.WEIGHTS, f"a weight is beyond {LARGEST_WEIGHT:g}")


Asked = LinearGradient | Evaluation | NetworkAsk

LOSSES: dict[str, Loss] = {
    "logistic": logistic,
    "multinomial": multinomial,
    "huber-hinge": huber_hinge,
    "squared": squared,
}
MOST_ROUNDS = 2**40
_WIDEST = 2**22


def draw(of: Draw) -> str:
    """Return a sampler as text: ``all``, ``poisson:0.01``, ``exactly:1`` or ``cyclic:0.01:8``."""
    match of:
        case Everyone():
            return "all"
        case Poisson(rate):
            return f"poisson:{rate!r}"
        case Exactly(size):
            return f"exactly:{size}"
        case Cyclic(rate, groups):
            return f"cyclic:{rate!r}:{groups}"
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
            case "cyclic":
                rate, _, groups = rest.partition(":")
                return Cyclic(float(rate), int(groups))
    except ValueError:
        pass
    raise InvalidValue(
        f"a draw must be 'all', 'poisson:RATE', 'exactly:NUMBER' or 'cyclic:RATE:GROUPS', got {text!r}"
    )


# Keys of messages that predate the names of the fields.
_KEYS = {"clip_norm": "clip", "noise_multiplier": "noise"}


_BANDED = ("bands", "exponent")  # only where noise is correlated: other messages are what they were
_CARRIED = [field.name for field in fields(Invitation) if field.name not in _BANDED]


def invitation(of: Invitation) -> dict[str, Any]:
    """Return an invitation as JSON values."""
    names = [*_CARRIED, *_BANDED] if of.bands > 1 else _CARRIED
    values = {_KEYS.get(name, name): _plain(getattr(of, name)) for name in names}
    return values | {"draw": draw(of.draw)}


def _plain(value: Any) -> Any:
    if isinstance(value, StrEnum):
        return str(value)
    return value.item() if isinstance(value, np.generic) else value


def invitation_of(given: Fields) -> Invitation:
    """Return the invitation that `invitation` wrote; refuse anything else."""
    names = [*_CARRIED, *_BANDED] if "bands" in given.plain() else _CARRIED
    values = {name: given.take(_KEYS.get(name, name)) for name in names}
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
    if not isinstance(of, LinearGradient) or name is None:
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
        return cast(LinearGradient | Evaluation, of)
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
def _gradient(name: str, width: int, intercept: float, radius: float | None) -> LinearGradient:
    """Return one object for equal arguments, so that tables reuse what they measured for its features."""
    return LinearGradient(LOSSES[name], Features(width, intercept=intercept, radius=radius))


def loss_name(of: LinearGradient) -> str:
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
class Floor:
    """The least budget that a run takes; a party with less is left out, and told so.

    One noise for all is sized for the least of all budgets, and a plain sum has the noise of every party.
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        validate.positive(epsilon=self.epsilon)
        validate.probability(delta=self.delta)

    def admits(self, of: Budget) -> bool:
        return of.epsilon >= self.epsilon and of.delta >= self.delta

    @classmethod
    def of(cls, given: Fields) -> "Floor | None":
        """Return the floor in a greeting, if it has one."""
        if "floor" not in given.plain():
            return None
        inner = given.inner("floor")
        epsilon, delta = inner.number("epsilon"), inner.number("delta")
        inner.done()
        try:
            return cls(epsilon, delta)
        except FarthingError:
            refuse(Reason.MALFORMED, "the floor is invalid")

    def __str__(self) -> str:
        return f"epsilon {self.epsilon:g} and delta {self.delta:g}"


# less lets no model come out of any number of parties
LEAST = Floor(1e-3, 1e-30)


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

    ``seen`` is the newest row of the guard's ledger that the coordinator knows of (number and hash);
    ``first`` is the turn of a plan that all shares of the run's first round are of.
    """

    turn: RoundId
    dataset: str
    invitation: Invitation
    contribution: Asked
    shape: tuple[int, ...]
    seen: tuple[int, str] | None = None
    first: int = 0

    def header(self) -> dict[str, Any]:
        later = {"first": self.first} if self.first else {}
        return (
            self.turn.header()
            | later
            | {
                "dataset": checked_name(dataset=self.dataset),
                "invitation": invitation(self.invitation),
                "contribution": contribution(self.contribution),
                "shape": list(self.shape),
                "seen": None if self.seen is None else list(self.seen),
            }
        )

    @classmethod
    def of(cls, given: Fields) -> "Question":
        turn, dataset = RoundId.of(given), given.text("dataset")
        invited, asked = (
            invitation_of(given.inner("invitation")),
            contribution_of(given.inner("contribution")),
        )
        shape, seen = given.take("shape"), given.take("seen")
        first = given.whole("first", 1, MOST_ROUNDS) if "first" in given.plain() else 0
        given.done()
        if not isinstance(shape, list) or not 1 <= len(shape) <= 2:
            refuse(Reason.SHAPE, "weights have one or two sides")
        network = isinstance(asked, NetworkAsk)
        widest = MOST_WEIGHTS if network else _WIDEST + 1
        if any(type(side) is not int or not 0 < side <= widest for side in shape):
            refuse(Reason.SHAPE, "a side of the weights is out of range")
        if network and len(shape) != 1:
            refuse(Reason.SHAPE, "weights of a network are one flat array")
        return cls(turn, dataset, invited, asked, tuple(shape), row_of(seen), first)

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
