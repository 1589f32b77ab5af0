"""Define a query to private records, its answer, and the steps that an algorithm yields.

A query is a sampler, a contribution, a bound and a mechanism; its price follows from these parts and the
budget. This module never reads records: only `farthing.ledger.ledger.Ledger.ask` does.

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

from farthing import validate
from farthing.budget import Budget, Drawn
from farthing.errors import BudgetSpent, InvalidValue, Unsupported
from farthing.noise.lattice import Stream
from farthing.noise.summing import checked, summed
from farthing.queries.arrays import length
from farthing.queries.bounds import ROWS, Bound
from farthing.queries.events import Event, PersonalEvent, RepeatedEvent, TurnEvent
from farthing.queries.mechanisms import Mechanism
from farthing.queries.personal import Personal
from farthing.queries.samplers import Everyone, Indices, Sampler, refuse_more, refuse_overlap
from farthing.queries.step_counter import StepCounter

Array = NDArray[np.float64]
P = ParamSpec("P")


class Records(Protocol):
    """Private records behind the two operations that the ledger needs."""

    def __len__(self) -> int:
        """Return the number of records."""

    def take(self, indices: Indices) -> Any:
        """Return the records at ``indices`` in the form that the contribution expects."""


class Contribution(Protocol):
    """A function of the records and the parameters ``w``, bounded per record and summed.

    ``bounded_sum`` may compute the sum without materialising its terms. It must accept an empty batch, add
    its terms up as `farthing.noise.summing` does, and bound *every* term; terms with NaN or infinity count as
    zero.

    The price of a query assumes that the contribution enforces the bound, so a contribution lists the kinds
    of bound that it ``honours``, and `Query` refuses any other. Four attributes are optional: ``least``
    (default 0), the norm that a bound must allow because terms are not shrunk; ``interval`` (default None),
    the values that a `ClipValue` must contain because scores are not clamped; ``additive`` (default True),
    whether the sum over all records is the sum over any partition of them; and ``zero(records, w, bound)``,
    the sum over no records where it differs from that of an empty batch.
    """

    @property
    def honours(self) -> Collection[str]:
        """The kinds of bound (`farthing.queries.bounds.Kind`) that it enforces on every record's term."""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of one record's term; None if it depends on ``w``."""

    def bounded_sum(self, records: Any, w: Any, bound: Any, /) -> Any:
        """Return the sum of the bounded contributions of ``records`` at ``w`` for the mechanism."""


@dataclass(frozen=True, slots=True)
class Query:
    """A query to private records, which may be asked at many parameters ``w``, always at the same price.

    Parameters
    ----------
    sampler : Sampler
        The rule that selects the records: `Everyone`, `Poisson`, `FixedSize`.
    contribution : Contribution
        The function of a record and ``w`` that is summed; `PerExample` makes one from a callable.
    bound : Bound
        The limit on one contribution: `ClipNorm`, `ClipCoordinates`, `ClipValue`, `ClipOuter`.
    mechanism : Mechanism
        The noise on the bounded sum: `Gaussian`, `Laplace`, `SymmetricGaussian`, `NoisyMax`.

    Raises
    ------
    Unsupported
        If the contribution does not enforce the bound, or the mechanism has no price for it.

    Notes
    -----
    The price follows from the four parts and from the budget's adjacency and observer. It is never an input.

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
        validate.offers("draw", "amplify", sampler=self.sampler)
        validate.offers("check", "event", "release", mechanism=self.mechanism)
        refuse_bound(self.contribution, self.bound)
        self.mechanism.check(self.bound, self.contribution.shape)
        if self._weighted:
            refuse_weights(self.contribution, self.bound, self.mechanism)
        refuse_overlap(self.sampler, self.mechanism)

    def price(self, budget: Budget) -> Event:
        """Return the event of one answer under the budget's adjacency, as its observer sees it.

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
                f"{type(self.contribution).__name__} is not a sum over records: pass a table, not partitions"
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
        if hasattr(taken, "summed"):  # partitioned records: each part is summed on its own
            return taken.summed(self.contribution, w, self.bound)
        return sums(taken)

    @property
    def remembers(self) -> bool:
        """Whether draws or noise depend on the turn, so that only a whole plan has a price."""
        return hasattr(self.mechanism, "plan") or hasattr(self.sampler, "plan")

    def begin(self) -> "tuple[Sampler, Mechanism]":
        """Return the sampler and the mechanism of a new plan, with fresh state where they offer ``begin``."""
        sampler, mechanism = (getattr(part, "begin", None) for part in (self.sampler, self.mechanism))
        return sampler() if sampler else self.sampler, mechanism() if mechanism else self.mechanism

    def plan(self, budget: Budget, steps: int) -> Event:
        """Return the event of the first ``steps`` answers of a promised plan.

        Parameters
        ----------
        budget : Budget
            The budget that the answers are charged to.
        steps : int
            The number of answers, at turns 0 to ``steps`` - 1.

        Returns
        -------
        Event
            ``steps`` times the price of one answer, unless the mechanism or the sampler has a ``plan``
            method.

        Raises
        ------
        Unsupported
            If noise and draws both depend on the turn.

        Notes
        -----
        Noise that is correlated over turns, and draws that are balanced over turns, have no price per answer.
        Such a mechanism offers ``plan(event, steps)`` and such a sampler ``plan(event, steps, observer)``;
        both receive the turn when they release or draw. Noise with a number of ``bands`` is priced by the
        plan of a sampler that leaves at least as many turns between two possible draws of the same record.
        Other noise that its sampler prices has a method ``suits``, which refuses samplers without a theorem,
        and an attribute ``steps``, the largest number of turns.
        """
        mechanism, sampler = (getattr(part, "plan", None) for part in (self.mechanism, self.sampler))
        if mechanism is not None and sampler is not None:
            raise Unsupported(
                f"no theorem prices {self.mechanism!r} on draws of {self.sampler!r}: both depend on the turn"
            )
        refuse_more(self.mechanism, steps)
        if sampler is not None:
            one = self.mechanism.event(self.bound, budget.adjacency, True)
            return cast(Event, sampler(one, steps, budget.observer))
        price = self.price(budget)
        if mechanism is not None and isinstance(price, PersonalEvent):
            raise Unsupported(f"no theorem prices {self.mechanism!r} on draws with personal sampling rates")
        return RepeatedEvent(price, steps) if mechanism is None else cast(Event, mechanism(price, steps))

    def promised(self, budget: Budget, steps: int) -> Event:
        """Return the event that is charged for one of ``steps`` promised answers."""
        if not self.remembers:
            return self.price(budget)
        parts = f"{self.sampler!r}, {self.mechanism!r}"
        return TurnEvent(self.plan(budget, steps), steps, hashlib.sha256(parts.encode()).hexdigest())


def refuse_bound(contribution: Contribution, bound: Bound) -> None:
    """Refuse a bound that the contribution does not enforce."""
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
            f"{name} does not enforce {kind or type(bound).__name__}: it honours "
            + (", ".join(contribution.honours) or "no bound")
        )
    interval = getattr(contribution, "interval", None)
    if interval is not None and not (bound.low <= interval[0] and interval[1] <= bound.high):  # type: ignore[attr-defined]
        raise InvalidValue(f"terms of {name} lie in {interval}, which {bound!r} does not contain")
    least = getattr(contribution, "least", 0.0)
    if bound.norm() < least:
        raise InvalidValue(f"terms of {name} have norms up to {least}, above the bound's {bound.norm()}")


def refuse_weights(contribution: Contribution, bound: Bound, mechanism: Mechanism) -> None:
    """Refuse weights by level where a weighted sum could change by more than the weight times the bound."""
    if not getattr(contribution, "additive", True):
        raise Unsupported(f"{type(contribution).__name__} is not a sum over records and cannot be weighted")
    if getattr(bound, "blank", 0.0):
        raise Unsupported(f"{bound!r} gives a failing record a value above 0, so records cannot be weighted")
    if getattr(mechanism, "slack", 0.0):
        raise Unsupported(f"{mechanism!r} adds up in float32, too coarse for weights: use sampling rates")


@dataclass(frozen=True, slots=True)
class PerExample:
    """A contribution made of a function from records and parameters to one row per record.

    Parameters
    ----------
    function : callable
        ``function(records, w)`` returns an array with one row per record. It must accept an empty batch, and
        a row may depend on its own record only. Records on which it fails, or for which it returns another
        number of rows, contribute zero.

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
        """Return the sum of the rows, each computed from one record and clipped by ``bound``."""
        found = self.function(records, w)
        known = all(hasattr(records, name) for name in ("take", "__len__"))
        if known and length(found) != len(records):
            raise InvalidValue("the function of a PerExample must return one row per record")
        return summed(bound.apply, found)


class Rows:
    """Records as arrays of equal length, where row i of each belongs to record i.

    Parameters
    ----------
    *arrays : array
        Arrays, sparse matrices or memory maps with one row per record.

    Raises
    ------
    InvalidValue
        If the arrays differ in length, are lists, whose type one record could change, or data frames, whose
        rows are found by labels that several may share.

    Examples
    --------
    >>> rows = Rows(np.arange(6.0).reshape(3, 2), np.array([0, 1, 1]))
    >>> len(rows), rows.take(np.array([2]))[1]
    (3, array([1]))
    """

    __slots__ = ("arrays",)

    def __init__(self, *arrays: Any) -> None:
        if any(hasattr(array, "iloc") or not hasattr(array, "shape") for array in arrays):
            raise InvalidValue("records must be arrays (frame.to_numpy()): the type of a list is not fixed")
        if not arrays or len({length(array) for array in arrays}) != 1:
            raise InvalidValue("arrays must have one row per record each")  # the lengths are private
        checked(length(arrays[0]))
        self.arrays = arrays

    def __len__(self) -> int:
        return int(self.arrays[0].shape[0])

    def __getitem__(self, place: int) -> Any:
        return self.arrays[place]

    def take(self, indices: Indices) -> "Rows":
        """Return the records at ``indices``; a full slice makes no copy."""
        whole = isinstance(indices, slice) and indices == slice(None)
        return self if whole else Rows(*(array[indices] for array in self.arrays))


@dataclass(frozen=True, slots=True)
class Receipt:
    """The position of a charge in the journal. ``ticket`` counts the answers drawn from one reservation.

    ``clip`` is the clipping norm of the query, if it has one; it is public, like the query. ``turn`` is the
    number of earlier answers of the same promise, 0 if nothing was promised.
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
    """A finished training: the last parameters, every receipt, and the reason why it stopped.

    Parameters
    ----------
    w : array
        The last parameters.
    steps : int
        The number of steps.
    receipts : tuple of Receipt
        Every charge, in order.
    stop_reason : str
        Why the training ended.

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
    """Make an algorithm that queries without end stop when the budget is spent.

    Parameters
    ----------
    algorithm : callable
        A generator function that yields `Step`.

    Returns
    -------
    callable
        The same function, whose generator ends when `BudgetSpent` is raised. If not even the first step fits
        the budget, the error is passed on.

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


def run(steps: Iterable[Step], stop: Callable[[Step], bool] | None = None, progress: bool = False) -> Run:
    """Run an algorithm to its end, or until ``stop`` returns True.

    Parameters
    ----------
    steps : iterable of Step
        The steps that the algorithm yields.
    stop : callable, optional
        A function of a step that returns True to end the run. It sees public values only, so stopping costs
        no budget.
    progress : bool, default False
        Whether to show the number of steps and the time on standard error.

    Returns
    -------
    Run

    Raises
    ------
    BudgetSpent
        If the algorithm yields no step.
    InvalidValue
        If it yields anything but a `Step`.

    Examples
    --------
    >>> run((Step(t, t / 10) for t in range(1, 100)), stop=lambda step: step.w >= 0.3).steps
    3
    """
    last, receipts, reason = None, list[Receipt](), "the algorithm ended or its budget is spent"
    counter = StepCounter() if progress else None
    for step in steps:
        if not isinstance(step, Step):
            raise InvalidValue(f"an algorithm must yield ft.Step(t, w), got {type(step).__name__}")
        last = step
        receipts += step.receipts
        if counter is not None:
            counter.show(step.t)
        if stop is not None and stop(step):
            reason = "stopped by rule"
            break
    if last is None:
        raise BudgetSpent("the budget does not allow a single step")
    if counter is not None:
        counter.end(last.t)
    return Run(last.w, last.t, tuple(receipts), reason)
