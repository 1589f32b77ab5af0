"""A question to private records, its answer, and what an algorithm hands out.

A query is sampler, contribution, bound, mechanism; its price follows from those parts and from the budget
it is charged to. Nothing here touches records: only `farthing.ledger.ledger.Ledger.ask` does.

>>> from farthing.queries.bounds import ClipNorm
>>> from farthing.budget import Budget
>>> from farthing.queries.mechanisms import Gaussian
>>> from farthing.queries.samplers import Poisson
>>> gradient = Query(Poisson(0.01), PerExample(lambda rows, w: rows[0] - w), ClipNorm(2.0), Gaussian(1.1))
>>> gradient.price(Budget(1.0, 1e-5))
PoissonEvent(rate=0.01, event=GaussianEvent(noise=1.1))
"""

import functools
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, ParamSpec, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from farthing.budget import Budget, Drawn
from farthing.errors import BudgetSpent, InvalidValue, Unsupported
from farthing.noise.lattice import Stream
from farthing.noise.summing import checked, summed
from farthing.queries.arrays import length
from farthing.queries.bounds import ROWS, Bound
from farthing.queries.events import Event, PersonalEvent, RepeatedEvent, TurnEvent
from farthing.queries.mechanisms import Mechanism
from farthing.queries.personal import Personal
from farthing.queries.samplers import Everyone, Indices, Sampler

Array = NDArray[np.float64]
P = ParamSpec("P")


class Records(Protocol):
    """Private records, as the ledger sees them: how many, and some of them."""

    def __len__(self) -> int:
        """Return how many records there are."""

    def take(self, indices: Indices) -> Any:
        """Return the records at ``indices``, as the contribution wants them."""


class Contribution(Protocol):
    """A contribution: what records say about parameters ``w``, bounded and summed.

    ``bounded_sum`` may compute the sum without ever materialising its terms. It must work for no records at
    all, add terms up as `farthing.noise.summing` does, and bound *every* one, NaN and infinity included (they
    count as zero).

    A bound must mean to the contribution what it means to the price, so a contribution says which kinds of
    bound it ``honours``; a `Query` with any other is refused when it is made. Four more attributes have
    defaults: ``least``, the norm that a bound must have because terms are not shrunk to it (0); ``interval``,
    the numbers that a `ClipValue` must hold because scores are not clamped to it (none); ``additive``,
    whether the sum over records is the sum over parts of them (true); and ``zero(records, w, bound)``, the
    sum over nobody where it is not that of an empty batch.
    """

    @property
    def honours(self) -> Collection[str]:
        """The kinds of bound (`farthing.queries.bounds.Kind`) that hold for every record's term."""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of a record's term; None where only ``w`` decides."""

    def bounded_sum(self, records: Any, w: Any, bound: Any, /) -> Any:
        """Σ bounded contributions of ``records`` at ``w``, in the form that the mechanism takes."""


@dataclass(frozen=True, slots=True)
class Query:
    """A question to private records, which may be asked at many parameters ``w``, always at the same price.

    Parameters
    ----------
    sampler : Sampler
        Which records take part: `Everyone`, `Poisson`, `FixedSize`.
    contribution : Contribution
        What a record says about ``w``; `PerExample` makes one of a function.
    bound : Bound
        What one contribution is clipped to: `ClipNorm`, `ClipCoordinates`, `ClipValue`, `ClipOuter`.
    mechanism : Mechanism
        The noise on the bounded sum: `Gaussian`, `Laplace`, `SymmetricGaussian`, `NoisyMax`.

    Raises
    ------
    Unsupported
        If the contribution does not keep its terms within such a bound, or the noise does not answer to it.

    Notes
    -----
    The price follows from the four parts and from the budget's adjacency and observer; nobody types it.

    Examples
    --------
    >>> from farthing import (Budget, ClipNorm, Gaussian, Poisson)
    >>> rows = PerExample(lambda rows, w: rows[0] - w)
    >>> Query(Poisson(0.01), rows, ClipNorm(2.0), Gaussian(1.1)).price(Budget(1.0, 1e-5))
    PoissonEvent(rate=0.01, event=GaussianEvent(noise=1.1))
    """

    sampler: Sampler
    contribution: Contribution
    bound: Bound
    mechanism: Mechanism

    def __post_init__(self) -> None:
        refuse_bound(self.contribution, self.bound)
        self.mechanism.check(self.bound, self.contribution.shape)
        if self._weighted:
            refuse_weights(self.contribution, self.bound, self.mechanism)
        refuse_overlap(self.sampler, self.mechanism)

    def price(self, budget: Budget) -> Event:
        """Return the event of one answer under the budget's adjacency, before its observer.

        Parameters
        ----------
        budget : Budget
            The budget that the answer is charged to.

        Returns
        -------
        Event
        """
        sampled = not isinstance(self.sampler, Everyone)
        event = self.mechanism.event(self.bound, budget.adjacency, sampled)
        return self.sampler.amplify(event, budget.observer)

    @property
    def _weighted(self) -> bool:
        return isinstance(self.sampler, Personal) and set(self.sampler.weights) != {1.0}

    def check(self, records: Records) -> None:
        """Refuse records that the sampler cannot draw from."""
        if (check := getattr(self.sampler, "check", None)) is not None:
            check(records)
        if hasattr(records, "summed") and not getattr(self.contribution, "additive", True):
            raise Unsupported(
                f"{type(self.contribution).__name__} is no sum over records: give it a table, not partitions"
            )

    def draw(self, records: Any, stream: Stream, turn: int) -> Indices:
        """Return the positions of the records that take part in this turn."""
        if isinstance(self.sampler, Personal):
            return self.sampler.draw_from(records, stream, turn)
        return self.sampler.draw(len(records), stream, turn)

    def total(self, records: Any, drawn: Indices, w: Any) -> Any:
        """Return the sum of the bounded contributions of the records at ``drawn``."""

        def sums(part: Any) -> Any:
            return self.contribution.bounded_sum(part, w, self.bound)

        if self._weighted:
            return cast(Personal, self.sampler).weighted(sums, records, drawn)
        taken = records.take(drawn)
        if hasattr(taken, "summed"):  # records in parts, each summed where it lies
            return taken.summed(self.contribution, w, self.bound)
        return sums(taken)

    @property
    def remembers(self) -> bool:
        """Whether draws or noise depend on the turn, so that many answers are priced as one plan."""
        return hasattr(self.mechanism, "plan") or hasattr(self.sampler, "plan")

    def begin(self) -> "tuple[Sampler, Mechanism]":
        """Return sampler and mechanism for one plan: those that offer ``begin`` have a memory then."""
        sampler, mechanism = (getattr(part, "begin", None) for part in (self.sampler, self.mechanism))
        return sampler() if sampler else self.sampler, mechanism() if mechanism else self.mechanism

    def plan(self, budget: Budget, steps: int) -> Event:
        """Return the event of ``steps`` answers together, of the turns 0 to ``steps`` - 1 of a promise.

        Parameters
        ----------
        budget : Budget
            The budget that the answers are charged to.
        steps : int
            How many answers.

        Returns
        -------
        Event
            ``steps`` times the price of one, unless the mechanism or the sampler says otherwise by a ``plan``
            of its own.

        Raises
        ------
        Unsupported
            If noise and draws both depend on the turn.

        Notes
        -----
        Noise that is correlated over turns, or draws that are balanced over them, have no price answer by
        answer. Such a mechanism offers ``plan(event, steps)``, such a sampler ``plan(event, steps,
        observer)``; both are told the turn when they release or draw. Noise of a number of ``bands`` is
        priced by the plan of a sampler that leaves as many turns between two chances of a record; other noise
        that is priced by its sampler's plan has a method ``suits``, which refuses samplers without a theorem,
        and ``steps``, the most turns of a plan.
        """
        mechanism, sampler = (getattr(part, "plan", None) for part in (self.mechanism, self.sampler))
        if mechanism is not None and sampler is not None:
            raise Unsupported(
                f"no theorem prices {self.mechanism!r} on draws of {self.sampler!r}: both depend on the turn"
            )
        if (most := getattr(self.mechanism, "steps", steps)) < steps:
            raise InvalidValue(f"{self.mechanism!r} is noise for {most} turns: it has no price for {steps}")
        if sampler is not None:
            one = self.mechanism.event(self.bound, budget.adjacency, True)
            return cast(Event, sampler(one, steps, budget.observer))
        price = self.price(budget)
        if mechanism is not None and isinstance(price, PersonalEvent):
            raise Unsupported(f"no theorem prices {self.mechanism!r} on draws of personal rates")
        return RepeatedEvent(price, steps) if mechanism is None else cast(Event, mechanism(price, steps))

    def promised(self, budget: Budget, steps: int) -> Event:
        """Return the event as which one of ``steps`` promised answers is charged."""
        if not self.remembers:
            return self.price(budget)
        parts = f"{self.sampler!r}, {self.mechanism!r}"
        return TurnEvent(self.plan(budget, steps), steps, hashlib.sha256(parts.encode()).hexdigest())


def refuse_bound(contribution: Contribution, bound: Bound) -> None:
    """Refuse a bound that the contribution does not keep its terms within."""
    name = type(contribution).__name__
    for attribute, example in (("honours", "farthing.queries.bounds.ROWS"), ("shape", "None")):
        if not hasattr(contribution, attribute):
            raise Unsupported(
                f"{name} must say which bounds it honours and the shape of its sum: it has no {attribute!r}; "
                f"add {attribute} = {example} if each record's row goes through bound.apply"
            )
    kind = getattr(bound, "kind", None)
    if kind not in contribution.honours:
        raise Unsupported(
            f"{name} does not keep its terms within {kind or type(bound).__name__}: it honours "
            + (", ".join(contribution.honours) or "no bound")
        )
    interval = getattr(contribution, "interval", None)
    if interval is not None and not (bound.low <= interval[0] and interval[1] <= bound.high):  # type: ignore[attr-defined]
        raise InvalidValue(f"terms of {name} lie anywhere between {interval}, beyond {bound!r}")
    least = getattr(contribution, "least", 0.0)
    if bound.norm() < least:
        raise InvalidValue(f"terms of {name} have norms up to {least}, beyond the bound's {bound.norm()}")


def refuse_weights(contribution: Contribution, bound: Bound, mechanism: Mechanism) -> None:
    """Refuse weights by level where a sum could move by more than they say."""
    if not getattr(contribution, "additive", True):
        raise Unsupported(f"{type(contribution).__name__} is no sum over records, so nobody can be weighed")
    if getattr(bound, "blank", 0.0):
        raise Unsupported(f"{bound!r} counts a record that fails as more than 0: nobody can be weighed")
    if getattr(mechanism, "slack", 0.0):
        raise Unsupported(f"{mechanism!r} takes sums in float32, too coarse for weights: use rates")


def refuse_overlap(sampler: Sampler, mechanism: Mechanism) -> None:
    """Refuse noise that is correlated over more turns than lie between two chances of a record."""
    bands, apart = getattr(mechanism, "bands", 1), getattr(sampler, "separation", 1)
    if bands > apart:
        raise Unsupported(
            f"noise of {bands} bands needs {bands} turns between two chances of a record, and {sampler!r} "
            f"leaves {apart}: draw by Cyclic(sampling_rate, groups={bands})"
        )
    if hasattr(mechanism, "suits"):
        mechanism.suits(sampler)


@dataclass(frozen=True, slots=True)
class PerExample:
    """A contribution made of a function from records and parameters to one row a record.

    Parameters
    ----------
    function : callable
        ``function(records, w)`` returns an array with one row a record. It must work for no records at all,
        and a row may depend on its own record only. Records for which it returns more rows or fewer count as
        nothing, like those on which it fails.

    Examples
    --------
    >>> from farthing import ClipNorm
    >>> PerExample(lambda rows, w: rows[0] - w).bounded_sum(Rows(np.ones((3, 2))), np.zeros(2), ClipNorm(1.0))
    array([2.12132034, 2.12132034])
    """

    function: Callable[[Any, Any], Any]
    honours: ClassVar[Collection[str]] = ROWS
    shape: ClassVar[None] = None

    def bounded_sum(self, records: Any, w: Any, bound: Any) -> Array:
        """Return the sum of all rows, each computed and clipped by ``bound``; one a record, none more."""
        found = self.function(records, w)
        known = all(hasattr(records, name) for name in ("take", "__len__"))
        if known and length(found) != len(records):
            raise InvalidValue("a function for PerExample must return one row a record")
        return summed(bound.apply, found)


class Rows:
    """Records as arrays of equal length, where row i of each belongs to record i.

    Parameters
    ----------
    *arrays : array
        Arrays, sparse matrices or memory maps with one row a record.

    Raises
    ------
    InvalidValue
        If the arrays differ in length, or are lists, whose type and shape one record could change.

    Examples
    --------
    >>> rows = Rows(np.arange(6.0).reshape(3, 2), np.array([0, 1, 1]))
    >>> len(rows), rows.take(np.array([2]))[1]
    (3, array([1]))
    """

    __slots__ = ("arrays",)

    def __init__(self, *arrays: Any) -> None:
        if not all(hasattr(array, "shape") for array in arrays):
            raise InvalidValue("records must be arrays: a list has no type, and takes one that fits them all")
        if not arrays or len({length(array) for array in arrays}) != 1:
            raise InvalidValue("arrays must have one row a record each")  # how many is no one's business
        checked(length(arrays[0]))
        self.arrays = arrays

    def __len__(self) -> int:
        return int(self.arrays[0].shape[0])

    def __getitem__(self, place: int) -> Any:
        return self.arrays[place]

    def take(self, indices: Indices) -> "Rows":
        """Return the records at ``indices``; all of them cost no copy."""
        return (
            self
            if isinstance(indices, slice) and indices == slice(None)
            else Rows(*(array[indices] for array in self.arrays))
        )


@dataclass(frozen=True, slots=True)
class Receipt:
    """The place of a charge in the journal. ``ticket`` counts answers drawn from one reservation.

    ``clip`` is where the query clipped one contribution, if it has such a number: public, like the query.
    ``turn`` is how many answers of the same promise came before; 0 where nothing was promised.
    """

    seq: int
    hash: str
    event: Event
    ticket: int = 0
    clip: float | None = None
    turn: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """A released value and the charge that was written before it."""

    value: Any
    receipt: Receipt


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One step of an algorithm: the round, the parameters and the charges of this round. All of it is public.

    Parameters
    ----------
    t : int
        The round, from 1.
    w : array
        The parameters after it.
    receipts : tuple of Receipt, default ()
        The charges that the round made.

    Examples
    --------
    >>> Step(1, np.zeros(2)).t
    1
    """

    t: int
    w: Any
    receipts: tuple[Receipt, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Run(Drawn):
    """A finished training: the last parameters, every receipt, and why it stopped.

    Parameters
    ----------
    w : array
        The last parameters.
    steps : int
        How many steps were taken.
    receipts : tuple of Receipt
        Every charge, in order.
    stop_reason : str
        Why it ended.

    Examples
    --------
    >>> run([Step(1, 0.5)]).stop_reason
    'the algorithm ended or its budget is spent'
    """

    w: Any
    steps: int
    receipts: tuple[Receipt, ...]
    stop_reason: str


def until_spent(algorithm: Callable[P, Iterator[Step]]) -> Callable[P, Iterator[Step]]:
    """Make an algorithm that asks forever end by itself when the budget is spent.

    Parameters
    ----------
    algorithm : callable
        A generator function of `Step`.

    Returns
    -------
    callable
        The same function, whose generator ends where `BudgetSpent` is raised. Where not even its first step
        fits, the error is passed on: nothing was learnt, and that is no end.

    Examples
    --------
    >>> @until_spent
    ... def two(ledger):
    ...     yield Step(1, 0.0)
    ...     raise BudgetSpent("all of it")
    >>> [step.t for step in two(None)]
    [1]
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
    """Take all steps of an algorithm.

    Parameters
    ----------
    steps : iterable of Step
        What the algorithm yields.
    stop : callable, optional
        A function of a step that returns True to end early. It sees public values only, so stopping costs
        nothing.

    Returns
    -------
    Run

    Raises
    ------
    BudgetSpent
        If there was no step at all.

    Examples
    --------
    >>> run((Step(t, t / 10) for t in range(1, 100)), stop=lambda step: step.w >= 0.3).steps
    3
    """
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
