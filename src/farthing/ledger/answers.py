"""Answers: what they are asked at and kept as, and what is released where a sum over records fails.

A query that was charged is answered, whatever happens. An error after the charge would tell that some record
caused it, with certainty and at any ε. Nor may one record undo the sum of all others: noise on zero in place
of noise on a large sum tells as much. So a record on which a contribution fails counts as zero, like one
whose term is NaN: `without_failing` halves a batch that fails until the records that fail stand alone.

Guarantee. Let h(x) be the bounded term of record x, or 0 (clamped, under `ClipValue`) where the sum over {x}
alone raises, is not finite or has another shape. Where a contribution is a sum (every part of a batch has the
sum of its terms, or fails), what is released is noise on Σ h(x): neighbours differ by one h(x), which is
within the bound, and the price is the query's, under every adjacency. Contributions that are no sums (an
eigenvalue, a minimiser) say so, ``additive = False``: where they fail, noise on their sum over no records is
released. That hides the error, not that the answer is far from what the others would have made.

How long it takes does depend on how many records fail: see "Timing" in docs/sharp-edges.md.

>>> def sums(places):
...     if 3 in places:
...         raise ValueError("record 3 is ill")
...     return np.array([float(places.sum())])
>>> without_failing(sums, np.arange(6), np.zeros(1))
array([12.])
"""

import hashlib
import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.accounting.filters import Filter, GdpFilter, ZcdpFilter
from farthing.errors import InvalidValue, OutOfMemory
from farthing.noise.lattice import Stream
from farthing.queries.events import ApproximateEvent, Event, GaussianEvent, ZcdpEvent
from farthing.queries.query import Answer, Contribution, Query, Receipt, Records
from farthing.queries.samplers import Indices

Integers = NDArray[np.int64]

_NOBODY = np.empty(0, np.int64)
_NO_MEMORY = "there is no memory for the records that were drawn; they are charged, and nothing is released"


def shape_of(total: Any) -> tuple[int, ...]:
    """Return the shape of a sum: an array's or a tensor's own, () for a number."""
    return tuple(getattr(total, "shape", ()))


def refusal(error: Exception) -> Exception | None:
    """Return what to raise after a charge: an error that no record decides, or that there was no memory."""
    if getattr(error, "public", False):
        return error
    return OutOfMemory(_NO_MEMORY) if isinstance(error, MemoryError) else None


def zero_sum(contribution: Contribution, records: Records, w: Any, bound: Any) -> Any:
    """Return the sum over no records: by the contribution's own ``zero`` if it has one."""
    own = getattr(contribution, "zero", None)
    if own is not None:
        return own(records, w, bound)
    try:
        return contribution.bounded_sum(records.take(_NOBODY), w, bound)
    except Exception as error:
        error.add_note("(in the sum over no records, which every contribution must have; nothing is charged)")
        raise


def released(query: Query, records: Records, drawn: Indices | None, w: Any, stream: Stream, turn: int) -> Any:
    """An answer to a query that was charged and failed; ``drawn`` is None where nobody could be drawn."""
    total = zero = zero_sum(query.contribution, records, w, query.bound)
    if drawn is not None and getattr(query.contribution, "additive", True):
        places = np.arange(len(records))[drawn]

        def sums(part: Integers) -> Any:
            return query.total(records, part, w)

        total = without_failing(sums, places, zero, getattr(query.bound, "blank", 0.0))
    found = _tried(lambda total: query.mechanism.release(total, query.bound, stream, turn), total)
    return query.mechanism.release(zero, query.bound, stream, turn) if found is None else found


def without_failing(sums: Callable[[Integers], Any], places: Integers, zero: Any, blank: float = 0.0) -> Any:
    """Σ over ``places``, in which a record that fails counts ``blank``. ``sums`` adds up some of them."""
    total, waiting = zero, [places]
    while waiting:
        part = waiting.pop()
        found = _tried(sums, part)
        if found is not None and shape_of(found) == shape_of(zero) and bool((found - found == 0).all()):
            total = total + (found - zero)  # so that a public term, such as a penalty, counts once
        elif len(part) > 1:
            waiting += np.array_split(part, 2)
        else:
            total = total + blank * len(part)
    return total


def _tried(function: Callable[[Any], Any], value: Any) -> Any:
    """Return the function's value, or None where it fails."""
    try:
        return function(value)
    except Exception as error:
        refused = refusal(error)
    if refused is not None:
        raise refused
    return None


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
