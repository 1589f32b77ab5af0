"""What an answer is asked at and kept as: the form of the weights, and keyed answers as bytes."""

import hashlib
import io
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np

from farthing.accounting.filters import Filter, GdpFilter, ZcdpFilter
from farthing.errors import InvalidValue
from farthing.queries.events import ApproximateEvent, Event, GaussianEvent, ZcdpEvent
from farthing.queries.query import Answer, Query, Receipt


def refuse_nonfinite(w: Any) -> None:
    """Parameters are public, so a NaN among them may be named; it would turn every answer into nothing."""
    if isinstance(w, dict):
        w = list(w.values())
    if isinstance(w, list | tuple):
        for part in w:
            refuse_nonfinite(part)
    elif type(w) is np.ndarray and w.ndim == 1 and w.dtype == np.float64 and math.isfinite(w @ w):
        return  # quicker than asking every entry
    elif isinstance(w, np.ndarray | float) and not np.isfinite(w).all():
        raise InvalidValue("w must be finite, got NaN or infinity; nothing was charged")


def form(w: Any) -> Any:
    """Return the shapes of parameters."""
    if isinstance(w, dict):
        return tuple((key, form(value)) for key, value in w.items())
    if isinstance(w, list | tuple):
        return tuple(map(form, w))
    return getattr(w, "shape", ())


def to_bytes(value: Any) -> bytes:
    """A canonical form of parameters, to tell whether a request is the same."""
    if isinstance(value, dict):
        return b"{" + b",".join(to_bytes(key) + b":" + to_bytes(value[key]) for key in sorted(value)) + b"}"
    if isinstance(value, list | tuple):
        return b"[" + b",".join(map(to_bytes, value)) + b"]"
    if value is None or isinstance(value, str | int | float):
        return json.dumps(value).encode()
    array = np.ascontiguousarray(value)
    if array.dtype.hasobject:
        raise InvalidValue(f"w must be made of numbers to be kept under a key, got {type(value).__name__}")
    return f"{array.dtype.str}{array.shape}".encode() + hashlib.sha256(array.tobytes()).digest()


def pack(answer: Answer) -> bytes:
    buffer = io.BytesIO()
    buffer.write(json.dumps([answer.receipt.seq, answer.receipt.hash]).encode() + b"\n")
    np.save(buffer, np.asarray(answer.value), allow_pickle=False)
    return buffer.getvalue()


def unpack(stored: bytes) -> tuple[int, str, Any]:
    first, rest = stored.split(b"\n", 1)
    seq, digest = json.loads(first)
    value = np.load(io.BytesIO(rest), allow_pickle=False)
    return seq, digest, value if value.ndim else value.item()


def whole_event(rule: Filter) -> Event:
    """Return everything that a filter lets through, as one event."""
    shift = rule.budget.adjacency.shift
    match rule:
        case GdpFilter():
            return GaussianEvent(shift / rule.mu)
        case ZcdpFilter():
            return ZcdpEvent(rule.rho, rule.approximate)
    return ApproximateEvent(rule.budget.epsilon, rule.budget.delta)


def alike(one: Query, other: Query) -> bool:
    """Return whether two queries ask for the same sum, perhaps with other noise."""
    return one.contribution is other.contribution and one.bound is other.bound


def with_clip(receipt: Receipt, query: Query) -> Receipt:
    clip = getattr(query.bound, "clip", None)
    return replace(receipt, clip=float(clip)) if isinstance(clip, int | float) else receipt
