"""Convert questions about networks to JSON values and back: a name, a hash, and numbers, never code.

A coordinator names a model that the party has installed, the hash of the source that it expects, and one of
four questions: the clipped gradients at the weights of the message (``gradient``), so many local private
steps from there (``steps``), the clipped update of a user's or the party's local training (``update``), or
loss and accuracy on the party's own records (``evaluation``).
Weights and answers are bodies of float32; a weight that is not finite, or beyond `LARGEST_WEIGHT`, is
refused.

>>> asked = NetworkAsk("small", "ab" * 32, NetworkKind.STEPS, steps=4, lr=0.5)
>>> NetworkAsk.of(Fields(asked.header())) == asked
True
>>> unpack_weights(pack_weights(np.ones(3)), (3,))
array([1., 1., 1.])
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from farthing.deploy.messages.signed import Fields, Reason, refuse

Array = NDArray[np.float64]

EACH = 4  # bytes of a weight
LARGEST_WEIGHT = 1e6
LARGEST_RATE = 1e3  # a local learning rate, or a proximal term
MOST_STEPS = 2**20
MOST_WEIGHTS = 2**28


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
