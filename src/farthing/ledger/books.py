"""Keep the books of a ledger: promises, charges, reservations and refunds.

Every decision is made inside the journal's transaction, from the totals of its last row, so processes that
share a file cannot overspend together. A row's ``state`` holds the filter's totals followed by one count per
promise; one of the two stays zero, because a ledger spends in one way only.
"""

import atexit
import contextlib
import itertools
import math
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.accounting import calibrate, gaussian, odometer, personal, tuning, zcdp
from farthing.accounting.filters import BasicFilter, Filter, GdpFilter, Totals, ZcdpFilter
from farthing.accounting.menu import FILTERS_BY_NAME, MenuFilter
from farthing.budget import Budget, Guarantee
from farthing.errors import BudgetSpent, InvalidValue, PromiseBroken, Unsupported
from farthing.ledger.journal import Journal
from farthing.ledger.journal_rows import Row
from farthing.ledger.turns import Memories, TurnsOfCharges
from farthing.queries.events import ComposedEvent, Event, RepeatedEvent, TurnEvent, decode, encode
from farthing.queries.query import Query, Receipt

SEEDED = "seeded noise: no privacy at all, for tests only"
SOUND = "lattice noise from a cryptographic stream"
FLOATS = "float noise: true of real numbers, but the low bits of floats tell more (Mironov 2012)"

_FORMAT = 1
_ROUNDED = 1 - 1e-9  # rounds the rest down, so that it still fits after conversion and back
_DEAD = 1e300  # stands for an infinite total (an unusable RDP order), which JSON cannot hold

Plan = list[tuple[Event, int]]
Left = TypeVar("Left", int, NDArray[np.int64])  # answers left of one promise, or of those of many clients


def header_of(rule: Filter, noise: str) -> dict[str, Any]:
    """Return the first row of a journal: budget, filter, noise."""
    names = [field.name for field in fields(rule) if field.init and field.name != "budget"]  # type: ignore[arg-type]
    options = {name: _plain(getattr(rule, name)) for name in names}
    return {
        "farthing": _FORMAT,
        "budget": asdict(rule.budget),
        "filter": {"name": rule.name, **options},
        "noise": noise,
    }


def _plain(value: Any) -> Any:
    """Return a filter's option as JSON values; events are encoded."""
    if isinstance(value, tuple):
        return [encode(one) if isinstance(one, Event) else one for one in value]
    return value


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(decode(one) if isinstance(one, dict) else one for one in value)
    return value


def rule_of(header: dict[str, Any]) -> Filter:
    """Return the filter of an existing journal: the inverse of `header_of`."""
    if header.get("farthing") != _FORMAT:
        raise InvalidValue(f"the ledger has format {header.get('farthing')!r}, not {_FORMAT}")
    options = dict(header["filter"])
    kind = FILTERS_BY_NAME[options.pop("name")]
    options = {name: _decoded(value) for name, value in options.items()}
    return kind(Budget(**header["budget"]), **options)


class _Promised(Exception):
    """Another process made the same promise in the meantime."""


@dataclass(slots=True)
class _Reservation:
    row: Row
    turns: Iterator[int]
    left: int
    used: int = 0


class Books:
    """Charges, promises and reservations of one ledger."""

    def __init__(self, rule: Filter, journal: Journal, noise: str, block: int) -> None:
        self.rule, self.journal, self.noise = rule, journal, noise
        self._block = block
        self.parent: Books | None = None  # the books that paid for this part
        self.plans = True  # False if only the filter's total was paid for: no promises then
        self._known: Plan = []
        self._counted = TurnsOfCharges()
        self._reserved: dict[Event, _Reservation] = {}
        self.memories, self._process = Memories(), os.getpid()
        self._lock = threading.RLock()
        _OPEN.add(self)

    def take(self, event: Event, key: str | None = None, request: str | None = None) -> Receipt:
        """Charge one answer, from a reservation if there is one."""
        with self._lock:
            held = self._own().get(event)
            if key is None and held is not None and held.left > 0:
                held.left, held.used = held.left - 1, held.used + 1
                return Receipt(held.row.seq, held.row.hash, event, held.used, turn=next(held.turns))
            row = self._charge(event, 1, self._block if key is None else 1, key, request)
            turns = self._turns(row)
            receipt = Receipt(row.seq, row.hash, event, turn=next(turns))
            if row.body["count"] > 1:
                self._reserved[event] = _Reservation(row, turns, row.body["count"] - 1)
            return receipt

    def turn(self, seq: int) -> int:
        """Return the turn of an answer that row ``seq`` charged alone; 0 if nothing is promised."""
        with self._lock:
            if not self._plan(self._state(self.journal.last())):
                return 0
            self._catch_up()
            return next(self._counted.held(seq))

    def note(self, text: str) -> None:
        """Record an assumption once, here and in the books that paid for this part of a budget."""
        if self.parent is not None:
            self.parent.note(text)
        with self._lock:
            if text not in self.notes():
                self.journal.append("note", lambda last: ({"note": text}, list(last.state)))

    def notes(self) -> list[str]:
        """Return the recorded assumptions, which every guarantee states."""
        return self.journal.notes()

    def reserve(self, event: Event, count: int) -> None:
        """Charge ``count`` answers in advance."""
        with self._lock:
            held = self._own().get(event)
            if held is not None and held.left > 0:
                self._refund(event, held)
            row = self._charge(event, count, count)
            self._reserved[event] = _Reservation(row, self._turns(row), count)

    def affords(self, event: Event, times: int) -> bool:
        """Return whether ``times`` more answers fit, including the reservations of this process."""
        with self._lock:
            held = self._own().get(event)
            times -= min(times, held.left if held is not None else 0)
            try:
                self._after(self._state(self.journal.last()), event, times, times)
            except (BudgetSpent, PromiseBroken):
                return False
            return True

    def promise(self, event: Event, times: int | None) -> "Countdown":
        """Add (event, times) to the plan, or find it there."""
        if not self.plans:
            raise Unsupported(
                f"this part of a budget was paid for as a {self.rule.name} filter, so it cannot make "
                "promises: use parts of a ledger with BasicFilter"
            )
        with self._lock:
            place = _place(event, self._plan(self._state(self.journal.last())))
            if place is None:
                with contextlib.suppress(_Promised):
                    self.journal.append("promise", lambda last: self._promised(last, event, times))
                place = _place(event, self._plan(self._state(self.journal.last())))
            assert place is not None
            promised = self._known[place][1]
            if times is not None and times != promised:
                raise PromiseBroken(f"this query is already promised {promised} times, not {times}")
            return Countdown(promised, place, self)

    def promised_as(self, query: Query) -> Event:
        """Return the event that is charged for an answer of a query with memory: a turn of its promise."""
        with self._lock:
            plan = self._plan(self._state(self.journal.last()))
            found = self._turn_of(query, plan)
            if found is None and plan:
                raise PromiseBroken(f"{query} was not promised: this ledger answers promised queries only")
            return found or query.price(self.rule.budget)  # each answer is a plan of one turn

    def promise_turns(self, query: Query, times: int | None) -> "Countdown":
        """Add turns of a query with memory (None: as many as fit) to the plan, or find them there."""
        with self._lock:
            budget, plan = self.rule.budget, self._plan(self._state(self.journal.last()))
            event = self._turn_of(query, plan)
            if event is None:
                if times is None:
                    _, least = personal.paid(composed(plan), self.rule)[0]
                    times = calibrate.turns(lambda steps: query.plan(budget, steps), least, composed(plan))
                if times == 0:
                    raise BudgetSpent(f"not even one turn of {query} fits {budget} with {len(plan)} others")
                event = query.promised(budget, times)
            return self.promise(event, times)

    def _turn_of(self, query: Query, plan: Plan) -> Event | None:
        of = self.rule.budget
        turns = ((event, times) for event, times in plan if isinstance(event, TurnEvent))
        return next((event for event, times in turns if event == query.promised(of, times)), None)

    def _turns(self, row: Row) -> Iterator[int]:
        """Return the turns of the answers that a row charges; all 0 if nothing is promised."""
        if not self._plan(self._state(row)):
            return itertools.repeat(0)
        self._catch_up(row)
        return self._counted.held(row.seq)

    def _catch_up(self, new: Row | None = None) -> None:
        """Count the turns of rows that any process has written since the last call."""
        alone = new is not None and new.seq == self._counted.rows
        self._counted.count([new] if new is not None and alone else self.journal.rows(self._counted.rows))

    def _forget(self) -> None:
        """Reset in a forked process: reservations belong to the parent, counts may be incomplete."""
        self.memories, self._process, self._reserved = Memories(), os.getpid(), {}
        self._counted = TurnsOfCharges()

    def used(self, place: int) -> int:
        """Return the number of answers of a promise that were released, forfeited or reserved elsewhere."""
        with self._lock:
            state = self._state(self.journal.last())
            event = self._plan(state)[place][0]
            held = self._own().get(event)
            return int(self._counts(state)[place]) - (held.left if held is not None else 0)

    def guarantee(self) -> Guarantee:
        """Return the guarantee at any stopping time: the price of the plan, or the filter's budget."""
        budget, plan = self.rule.budget, self._plan(self._state(self.journal.last()))
        if not plan:
            return self.statement(budget.epsilon, self.rule.name, self.rule.theorem)
        epsilon = tuning.epsilon(composed(plan), budget.delta, budget.adjacency)
        return self.statement(min(epsilon, budget.epsilon), *tuning.accountant(composed(plan)))

    def spent(self) -> Guarantee:
        """Return the guarantee of the charges so far."""
        plan, counts, totals = self.parts()
        budget, stopped = self.rule.budget, odometer.said(self.rule, plan, counts, totals)
        if not plan:
            epsilon = self.rule.epsilon(totals)
            if self.rule.fits(totals):  # rounding must not report more than the budget
                epsilon = min(epsilon, budget.epsilon)
            return self.statement(epsilon, self.rule.name, self.rule.theorem, stopped)
        done = [(event, count) for (event, _), count in zip(plan, counts, strict=True) if count]
        epsilon = tuning.epsilon(composed(done), budget.delta, budget.adjacency) if done else 0.0
        return self.statement(min(epsilon, budget.epsilon), *tuning.accountant(composed(plan)), stopped)

    def parts(self) -> tuple[Plan, list[int], Totals]:
        """Return the plan, the number of charged answers of each promise, and the filter's totals."""
        state = self._state(self.journal.last())
        return self._plan(state), [int(count) for count in self._counts(state)], self._totals(state)

    def share(self) -> float:
        """Return the charged share of the plan's answers or of the filter's budget."""
        plan, counts, totals = self.parts()
        if not plan:
            share = self.rule.share(totals)
            return min(share, 1.0) if self.rule.fits(totals) else share
        return sum(counts) / sum(times for _, times in plan)

    def rest(self) -> Budget:
        """Return the remainder as a budget."""
        state, budget = self._state(self.journal.last()), self.rule.budget
        if not any(state) and not self._plan(state):
            return budget
        total = self._totals(state)
        if not self._plan(state):
            match self.rule:
                case BasicFilter():
                    return _positive(budget, budget.epsilon - total[0], max(0.0, budget.delta - total[1]))
                case GdpFilter(mu=mu):
                    left = math.sqrt(max(0.0, mu * mu - total[0])) * _ROUNDED
                    return _positive(
                        budget, gaussian.epsilon(left, budget.delta) if left else 0.0, budget.delta
                    )
                case ZcdpFilter(rho=rho):
                    left, delta = max(0.0, rho - total[0]) * _ROUNDED, budget.delta - total[1]
                    return _positive(budget, zcdp.epsilon(left, delta) if left else 0.0, delta)
        raise Unsupported(
            "the rest of a plan or of an RDP filter is not an (epsilon, delta): pass epsilon and delta"
        )

    def rehearsal(self) -> "Books":
        """Return books in memory with the same promises, notes and balance."""
        noise = self.noise if self.noise == FLOATS else SOUND
        like = Books(self.rule, Journal(None, header_of(self.rule, noise)), noise, self._block)
        like.plans = self.plans
        with self._lock:
            state = self._state(self.journal.last())
            totals, counts = self._totals(state), [int(count) for count in self._counts(state)]
            texts = self.notes()
            for place, (event, times) in enumerate(self._plan(state)):
                row = {"event": encode(event), "times": times}, [*self.rule.start(), *[0.0] * (place + 1)]
                like.journal.append("promise", partial(_as_it_was, *row))
        for (event, _), count in zip(self._known, counts, strict=True):
            if count:
                like._charge(event, count, count)
        for text in texts:
            like.note(text)
        if any(totals):
            like.journal.append("note", partial(_as_it_was, {}, totals))
        return like

    def refund(self) -> None:
        """Give back the unused reservations of this process."""
        with self._lock:
            for event, held in list(self._own().items()):
                if held.left > 0:
                    self._refund(event, held)

    def close(self) -> None:
        """Give back unused reservations and close the journal."""
        with self._lock:
            self.refund()
            self.journal.close()

    def _own(self) -> dict[Event, _Reservation]:
        """Return the reservations of this process; a forked child starts with none."""
        if self._process != os.getpid():
            self._forget()
        return self._reserved

    def _charge(
        self, event: Event, least: int, most: int, key: str | None = None, request: str | None = None
    ) -> Row:
        def decide(last: Row) -> tuple[dict[str, Any], Totals]:
            count, state = self._after(self._state(last), event, least, most)
            return {"event": encode(event), "count": count}, state

        return self.journal.append("charge", decide, key=key, request=request)

    def _refund(self, event: Event, held: _Reservation) -> None:
        count, held.left = held.left, 0

        def decide(last: Row) -> tuple[dict[str, Any], Totals]:
            before = self._state(last)
            after = self._add(before, event, -count)
            if not self._plan(before):  # totals are rounded up, so a refund is never larger than the charge
                after = [min(b, a) for b, a in zip(before, after, strict=True)]
            return {"event": encode(event), "count": count, "of": held.row.seq}, after

        self.journal.append("refund", decide)

    def _after(self, state: Totals, event: Event, least: int, most: int) -> tuple[int, Totals]:
        """Return how many of ``most`` (at least ``least``) fit, and the new state; raise if none do."""
        plan = self._plan(state)
        if not plan:
            after = self._add(state, event, least)
            if not self.rule.fits(self._totals(after)):
                left = max(0.0, 1 - self.rule.share(self._totals(state)))
                price = self.rule.share(self.rule.add(self.rule.start(), event, least))
                raise BudgetSpent(
                    f"budget exhausted: {event} costs {price:.3%} of {self.rule.budget} by the "
                    f"{self.rule.name} filter, and {left:.3%} is left"
                )
            if most > least and isinstance(self.rule, MenuFilter):  # a block is paid for when it begins
                more = min(most - least, self.rule.free(self._totals(after), event))
                return least + more, self._add(state, event, least + more)
            return least, after
        place = _place(event, plan)
        if place is None:
            raise PromiseBroken(f"{event} was not promised; this ledger only answers {[e for e, _ in plan]}")
        left = plan[place][1] - int(self._counts(state)[place])
        taken(left, least, f" of {plan[place][1]}")
        count = min(most, left)
        return count, self._add(state, event, count)

    def _add(self, state: Totals, event: Event, count: int) -> Totals:
        plan = self._plan(state)
        if not plan:
            after = self.rule.add(state, event, count)
            return [total if abs(total) < _DEAD else _DEAD for total in after]  # also if it is NaN
        place = len(self.rule.start()) + (_place(event, plan) or 0)
        return [value + count if i == place else value for i, value in enumerate(state)]

    def _promised(self, last: Row, event: Event, times: int | None) -> tuple[dict[str, Any], Totals]:
        state, budget = self._state(last), self.rule.budget
        plan = self._plan(state)
        if _place(event, plan) is not None:
            raise _Promised
        if any(state):
            raise PromiseBroken("this ledger has already answered; promise before the first answer")
        before = composed(plan)
        beside = f" beside {validate.counted(len(plan), 'promise')}" if plan else ""
        if times is None:
            times = personal.steps(event, self.rule, before)
            if times == 0:
                raise BudgetSpent(f"not even one answer of {event} fits {budget}{beside}")
        elif not personal.affordable(composed([*plan, (event, times)]), self.rule):
            raise BudgetSpent(f"{times} answers of {event} do not fit {budget}{beside}")
        return {"event": encode(event), "times": times}, [*state, 0.0]

    def _state(self, last: Row) -> Totals:
        return list(last.state) or self.rule.start()

    def _totals(self, state: Totals) -> Totals:
        return state[: len(self.rule.start())]

    def _counts(self, state: Totals) -> Sequence[float]:
        return state[len(self.rule.start()) :]

    def _plan(self, state: Totals) -> Plan:
        promises = len(state) - len(self.rule.start())
        if promises != len(self._known):
            rows = (row for row in self.journal.rows() if row.kind == "promise")
            self._known = [(decode(row.body["event"]), row.body["times"]) for row in rows][:promises]
        return self._known

    def statement(self, epsilon: float, accountant: str, theorem: str, note: str = "") -> Guarantee:
        """Return a guarantee on the terms of the budget, with the notes of the journal."""
        budget = self.rule.budget
        if self.noise == SEEDED:
            epsilon, note = float("inf"), SEEDED
        if self.noise == FLOATS:
            note = f"{note}; {FLOATS}" if note else FLOATS
        return Guarantee(
            epsilon, budget.delta, budget.adjacency, budget.unit, budget.observer, accountant, theorem, note
        ).noted(*self.notes())


@dataclass(frozen=True, slots=True)
class Countdown:
    """A promise: the number of answers in all, and the number that are left."""

    times: int
    place: int
    books: Books

    @property
    def left(self) -> int:
        """The number of answers left for this process, without those that others have reserved."""
        return self.times - self.books.used(self.place)


def taken(left: Left, answers: int = 1, of: str = "") -> Left:
    """Return the number of promised answers left after ``answers`` more: one number, or one per client.

    Ledgers and simulated clients share this rule. Raises `BudgetSpent` if fewer are left; nothing is charged
    then.
    """
    after = left - answers
    fewest = after if isinstance(after, int) else int(after.min(initial=0))  # an int for a ledger
    if fewest < 0:
        raise BudgetSpent(f"{answers} answers requested, {fewest + answers}{of} promised answers are left")
    return after


def _place(event: Event, plan: Plan) -> int | None:
    return next((place for place, (promised, _) in enumerate(plan) if promised == event), None)


def composed(plan: Plan) -> ComposedEvent:
    """Return all answers of a plan as one event."""
    return ComposedEvent(tuple(RepeatedEvent(event, times) for event, times in plan))


def _as_it_was(body: dict[str, Any], state: Totals, _: Row) -> tuple[dict[str, Any], Totals]:
    return body, state


def _positive(budget: Budget, epsilon: float, delta: float) -> Budget:
    if not epsilon > 0:
        raise BudgetSpent(f"nothing is left of {budget}")
    return budget.with_(epsilon, delta)


_OPEN: "weakref.WeakSet[Books]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Give reservations back when the process ends normally."""
    for books in list(_OPEN):
        if books.journal.path is not None and books._own():
            books.close()


def _after_fork_in_child() -> None:
    """Replace the lock, which a thread that the child does not have may hold."""
    for books in list(_OPEN):
        books._lock = threading.RLock()
        books._forget()


os.register_at_fork(after_in_child=_after_fork_in_child)
