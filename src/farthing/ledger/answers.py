"""Compute, keep and release answers, and release noise on a zero sum where a sum over records fails.

A query that was charged is always answered. An error after the charge would reveal that some record caused
it, with certainty and at any ε. Nor may one record undo the sum of all others: noise on zero in place of
noise on a large sum reveals as much. So a record on which a contribution fails counts as zero, like one whose
term is NaN: `without_failing` halves a failing batch until the failing records are isolated. A lack of memory
is treated alike, since a record may decide how much a contribution allocates: smaller parts need less of it.

Guarantee. Let h(x) be the bounded term of record x, or 0 (clamped, under `ClipValue`) if the sum over {x}
alone raises, is not finite or has another shape. If a contribution is a sum (every part of a batch returns
the sum of its terms, or fails), the release is noise on Σ h(x): neighbours differ by one h(x), which is
within the bound, so the price is that of the query, under every adjacency. Contributions that are not sums
(an eigenvalue, a minimiser) declare ``additive = False``: if they fail, noise on their value for no records
is released. This hides the error, but not that the answer is far from the one without the failing record.

The running time depends on the number of failing records: see "Timing" in docs/sharp-edges.md.

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
from functools import lru_cache
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
_NO_MEMORY = (
    "there was not enough memory for the noise of a sum; the query is charged, and nothing is released"
)


def shape_of(total: Any) -> tuple[int, ...]:
    """Return the shape of a sum: that of an array or a tensor, () for a number."""
    return tuple(getattr(total, "shape", ()))


def refusal(error: Exception) -> Exception | None:
    """Return the error to raise after a charge: one that depends on no record.

    A `MemoryError` is not such an error: one record may decide how much memory a contribution asks for.
    """
    return error if getattr(error, "public", False) else None


def zero_sum(contribution: Contribution, records: Records, w: Any, bound: Any) -> Any:
    """Return the sum over no records, by the contribution's ``zero`` if it has one."""
    own = getattr(contribution, "zero", None)
    if own is not None:
        return own(records, w, bound)
    try:
        return contribution.bounded_sum(records.take(_NOBODY), w, bound)
    except Exception as error:
        error.add_note("(in the sum over no records, which every contribution must have; nothing is charged)")
        raise


def released(query: Query, records: Records, drawn: Indices | None, w: Any, stream: Stream, turn: int) -> Any:
    """Return the answer to a charged query that failed; ``drawn`` is None if the draw itself failed."""
    total = zero = zero_sum(query.contribution, records, w, query.bound)
    if drawn is not None and getattr(query.contribution, "additive", True):
        places = np.arange(len(records))[drawn]

        def sums(part: Integers) -> Any:
            return query.total(records, part, w)

        total = without_failing(sums, places, zero, getattr(query.bound, "blank", 0.0))
    found = _tried(lambda total: query.mechanism.release(total, query.bound, stream, turn), total)
    if found is not None:
        return found
    try:
        return query.mechanism.release(zero, query.bound, stream, turn)
    except MemoryError:  # noise on no records needs memory for the shape of the sum, which is public
        pass
    raise OutOfMemory(_NO_MEMORY)


def without_failing(sums: Callable[[Integers], Any], places: Integers, zero: Any, blank: float = 0.0) -> Any:
    """Return the sum over ``places``, where a failing record counts as ``blank``.

    Parts are added as by `farthing.noise.summing.Sum`: there may be as many as records.
    """
    total, lost, waiting = zero, 0.0, [places]
    while waiting:
        part = waiting.pop()
        found = _tried(sums, part)
        if found is not None and shape_of(found) == shape_of(zero) and bool((found - found == 0).all()):
            term = found - zero  # counts a public term, such as a penalty, once
        elif len(part) > 1:
            waiting += np.array_split(part, 2)
            continue
        else:
            term = zero - zero + blank * len(part)
        high = total + term
        back = high - total
        total, lost = high, lost + ((total - (high - back)) + (term - back))
    return total + lost


def _tried(function: Callable[[Any], Any], value: Any) -> Any:
    """Return the function's value, or None if it fails."""
    try:
        return function(value)
    except Exception as error:
        refused = refusal(error)
    if refused is not None:
        raise refused
    return None


def refuse_unready(query: Any, records: Records | None) -> None:
    """Refuse what is no query, and a ledger without records."""
    if records is None:
        raise InvalidValue("this ledger has no records: ask ledger.over(records)")
    if not isinstance(query, Query):
        raise InvalidValue(f"ask for a ft.Query, got {query!r}")


def refuse_nonfinite(w: Any) -> None:
    """Refuse NaN and infinity in parameters, which are public; they would make every answer zero."""
    if isinstance(w, dict):
        w = list(w.values())
    if isinstance(w, list | tuple):
        for part in w:
            refuse_nonfinite(part)
    elif type(w) is np.ndarray and w.ndim == 1 and w.dtype == np.float64 and math.isfinite(w @ w):
        return  # faster than a test of every entry
    elif isinstance(w, np.ndarray | float) and not np.isfinite(w).all():
        raise InvalidValue("w must be finite, got NaN or infinity; nothing was charged")


def form(w: Any) -> Any:
    """Return the shapes of the parameters."""
    if isinstance(w, dict):
        return tuple((key, form(value)) for key, value in w.items())
    if isinstance(w, list | tuple):
        return tuple(map(form, w))
    return getattr(w, "shape", ())


def to_bytes(value: Any) -> bytes:
    """Return parameters in a canonical form, to recognise a repeated request."""
    if isinstance(value, dict):
        return b"{" + b",".join(to_bytes(key) + b":" + to_bytes(value[key]) for key in sorted(value)) + b"}"
    if isinstance(value, list | tuple):
        return b"[" + b",".join(map(to_bytes, value)) + b"]"
    if value is None or isinstance(value, str | int | float):
        return json.dumps(value).encode()
    array = np.ascontiguousarray(value)
    if array.dtype.hasobject:
        raise InvalidValue(f"w must consist of numbers if a key is used, got {type(value).__name__}")
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
    """Return all that a filter allows as one event."""
    shift = rule.budget.adjacency.shift
    match rule:
        case GdpFilter():
            return GaussianEvent(shift / rule.mu)
        case ZcdpFilter():
            return ZcdpEvent(rule.rho, rule.approximate)
    return ApproximateEvent(rule.budget.epsilon, rule.budget.delta)


def alike(one: Query, other: Query) -> bool:
    """Return whether two queries compute the same sum, possibly with other noise."""
    return one.contribution is other.contribution and one.bound is other.bound


def immutable(query: Query) -> bool:
    """Return whether the price of a query is fixed: its sampler, bound and mechanism are the library's.

    Objects of the caller's own classes may change between two answers, and are priced anew for each.
    """
    return _all_ours(type(query.sampler), type(query.bound), type(query.mechanism))


@lru_cache(maxsize=1024)
def _all_ours(*kinds: type) -> bool:
    return all(kind.__module__.partition(".")[0] == "farthing" for kind in kinds)


def with_clip(receipt: Receipt, query: Query) -> Receipt:
    clip = getattr(query.bound, "clip", None)
    return replace(receipt, clip=float(clip)) if isinstance(clip, int | float) else receipt
