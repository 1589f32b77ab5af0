"""Answers where a sum over private records fails: no refusal may depend on a record.

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

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.errors import OutOfMemory
from farthing.noise.lattice import Stream
from farthing.queries.query import Contribution, Query, Records
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
