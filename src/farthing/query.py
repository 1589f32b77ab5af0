"""A question to private records, its answer, and what an algorithm hands out.

A query is sampler, contribution, bound, mechanism; its price follows from those parts and from the budget
it is charged to. Nothing here touches records: only `farthing.ledger.Ledger.ask` does.

>>> from farthing.bounds import ClipNorm
>>> from farthing.budget import Budget
>>> from farthing.mechanisms import Gaussian
>>> from farthing.samplers import Poisson
>>> gradient = Query(Poisson(0.01), PerExample(lambda rows, w: rows[0] - w), ClipNorm(2.0), Gaussian(1.1))
>>> gradient.price(Budget(1.0, 1e-5))
PoissonEvent(rate=0.01, event=GaussianEvent(noise=1.1))
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol

import numpy as np
from numpy.typing import NDArray

from farthing.arrays import length, rows
from farthing.bounds import Bound
from farthing.budget import Budget
from farthing.errors import BudgetSpent, InvalidValue
from farthing.events import Event
from farthing.mechanisms import Mechanism
from farthing.samplers import Everyone, Indices, Sampler
from farthing.summing import checked, summed

Array = NDArray[np.float64]
P = ParamSpec("P")


class Records(Protocol):
    """Private records, as the ledger sees them: how many, and some of them."""

    def __len__(self) -> int:
        """How many."""

    def take(self, indices: Indices) -> Any:
        """Those at ``indices``, as the contribution wants them."""


class Contribution(Protocol):
    """What a record says about parameters ``w``, bounded and summed.

    ``bounded_sum`` may compute the sum without ever materialising its terms. It must work for no records at
    all, add terms up as `farthing.summing` does, and bound *every* one, NaN and infinity included (they count
    as zero).
    """

    def bounded_sum(self, records: Any, w: Any, bound: Any, /) -> Any:
        """Σ bounded contributions of ``records`` at ``w``, in the form that the mechanism takes."""


@dataclass(frozen=True, slots=True)
class Query:
    """One kind of question: it may be asked at many ``w``, always at the same price."""

    sampler: Sampler
    contribution: Contribution
    bound: Bound
    mechanism: Mechanism

    def price(self, budget: Budget) -> Event:
        """The event of one answer under the budget's adjacency, before its observer."""
        sampled = not isinstance(self.sampler, Everyone)
        event = self.mechanism.event(self.bound, budget.adjacency, sampled)
        return self.sampler.amplify(event, budget.observer)


@dataclass(frozen=True, slots=True)
class PerExample:
    """The plain contribution: a function from records and ``w`` to one row a record."""

    function: Callable[[Any, Any], Any]

    def bounded_sum(self, records: Any, w: Any, bound: Any) -> Array:
        """Every row is computed, clipped by ``bound`` and added."""
        return summed(bound.apply, self.function(records, w))


class Rows:
    """Records as arrays of equal length, row i of each belonging to record i.

    >>> rows = Rows(np.arange(6.0).reshape(3, 2), np.array([0, 1, 1]))
    >>> len(rows), rows.take(np.array([2]))[1]
    (3, array([1]))
    """

    __slots__ = ("arrays",)

    def __init__(self, *arrays: Any) -> None:
        arrays = tuple(array if hasattr(array, "shape") else rows(array) for array in arrays)
        if not arrays or len({length(array) for array in arrays}) != 1:
            raise InvalidValue("arrays must have one row a record each")  # how many is no one's business
        checked(length(arrays[0]))
        self.arrays = arrays

    def __len__(self) -> int:
        return int(self.arrays[0].shape[0])

    def __getitem__(self, place: int) -> Any:
        return self.arrays[place]

    def take(self, indices: Indices) -> "Rows":
        """Those at ``indices``; everybody costs no copy."""
        return (
            self
            if isinstance(indices, slice) and indices == slice(None)
            else Rows(*(array[indices] for array in self.arrays))
        )


@dataclass(frozen=True, slots=True)
class Receipt:
    """Where a charge stands in the journal. ``ticket`` counts answers drawn from one reservation.

    ``clip`` is where the query clipped one contribution, if it has such a number: public, like the query.
    """

    seq: int
    hash: str
    event: Event
    ticket: int = 0
    clip: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """A released value and the charge that was written before it."""

    value: Any
    receipt: Receipt


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What an algorithm yields: round, parameters, and the charges of this round. All of it is public."""

    t: int
    w: Any
    receipts: tuple[Receipt, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """A finished training: the last parameters, every receipt, and why it stopped."""

    w: Any
    steps: int
    receipts: tuple[Receipt, ...]
    stop_reason: str


def until_spent(algorithm: Callable[P, Iterator[Step]]) -> Callable[P, Iterator[Step]]:
    """Makes an algorithm that asks forever end by itself when the budget is spent.

    Where not even its first step fits, `BudgetSpent` is passed on: nothing was learnt, and that is no end.
    """

    @functools.wraps(algorithm)
    def ends(*args: P.args, **kwargs: P.kwargs) -> Iterator[Step]:
        made = False
        try:
            for step in algorithm(*args, **kwargs):
                made = True
                yield step
        except BudgetSpent:
            if not made:
                raise

    return ends


def run(steps: Iterable[Step], stop: Callable[[Step], bool] | None = None) -> Run:
    """Takes all steps of an algorithm; ``stop`` may end it early, from public values only."""
    last, receipts, reason = None, list[Receipt](), "the algorithm ended or its budget is spent"
    for step in steps:
        last = step
        receipts += step.receipts
        if stop is not None and stop(step):
            reason = "stopped by rule"
            break
    if last is None:
        raise BudgetSpent("the budget does not allow a single step")
    return Run(last.w, last.t, tuple(receipts), reason)
