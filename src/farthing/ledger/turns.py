"""Assign turns of promised plans: which of the T turns each charged answer takes.

A turn is a number from 0 to T - 1 that is given to one answer only. Turns follow from the rows of the
journal, so every process computes the same ones: a charge takes the lowest free turns, and a refund frees the
last turns of its charge. If one process spends a plan, turns therefore increase by one per answer; if it was
killed, the turns that it had reserved are skipped for good. Processes that spend one plan at the same time
take turns in blocks.

>>> turns = Turns()
>>> turns.charge(1, 4)              # row 1 reserves four answers
[range(0, 4)]
>>> turns.charge(2, 2)              # row 2, of another process, two
[range(4, 6)]
>>> turns.refund(1, 3)              # three of the first were never used
>>> turns.charge(4, 5)
[range(1, 4), range(6, 8)]
"""

import itertools
import sys
from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from farthing.errors import Unsupported
from farthing.queries.events import Event, TurnEvent
from farthing.queries.mechanisms import Mechanism
from farthing.queries.query import Query
from farthing.queries.samplers import Sampler


class Turns:
    """The turns of one promise: the free ones, and those of each charge."""

    __slots__ = ("_free", "_held")

    def __init__(self) -> None:
        self._free = [range(sys.maxsize)]  # disjoint and sorted; the last is unbounded
        self._held: dict[int, list[range]] = {}

    def charge(self, seq: int, count: int) -> list[range]:
        """Give the ``count`` lowest free turns to the charge in row ``seq``."""
        taken = []
        while count:
            first = self._free.pop(0)
            taken.append(first[:count])
            if len(first) > count:
                self._free.insert(0, first[count:])
            count -= len(taken[-1])
        self._held[seq] = taken
        return taken

    def refund(self, seq: int, count: int) -> None:
        """Free the last ``count`` turns of the charge in row ``seq``."""
        held = self._held[seq]
        while count and held:
            last = held.pop()
            kept, freed = last[:-count], last[-count:]
            insort(self._free, freed, key=lambda turns: turns.start)
            if kept:
                held.append(kept)
            count -= len(freed)

    def held(self, seq: int) -> Iterator[int]:
        """Return the turns of the charge in row ``seq`` in ascending order."""
        return itertools.chain.from_iterable(tuple(self._held[seq]))


class TurnsOfCharges:
    """The turns of every charge of a promise, counted from the rows of a journal."""

    __slots__ = ("_by_event", "_by_seq", "rows")

    def __init__(self) -> None:
        self._by_event: dict[str, Turns] = {}  # by promised event, as encoded in the rows
        self._by_seq: dict[int, Turns] = {}
        self.rows = 0  # the number of rows that are counted

    def count(self, rows: Iterable[Any]) -> None:
        """Count further rows.

        If this is interrupted, the next call must begin at row 0: a row that is counted in part, or twice,
        would give out turns that other processes have.
        """
        try:
            for row in rows:
                if row.kind == "promise":
                    self._by_event[repr(row.body["event"])] = Turns()
                elif row.kind == "charge":
                    if (turns := self._by_event.get(repr(row.body["event"]))) is not None:
                        self._by_seq[row.seq] = turns
                        turns.charge(row.seq, row.body["count"])
                elif row.kind == "refund" and row.body["of"] in self._by_seq:
                    self._by_seq[row.body["of"]].refund(row.body["of"], row.body["count"])
                self.rows = row.seq + 1
        except BaseException:
            self._by_event, self._by_seq, self.rows = {}, {}, 0
            raise

    def held(self, seq: int) -> Iterator[int]:
        """Return the turns of the charge in row ``seq`` in ascending order."""
        return self._by_seq[seq].held(seq)


class _Begun(NamedTuple):
    records: Any
    sampler: Sampler
    mechanism: Mechanism


class Memories:
    """The state that samplers and mechanisms keep between turns of a plan, in this process only."""

    __slots__ = ("_begun",)

    def __init__(self) -> None:
        self._begun: dict[Event, _Begun] = {}

    def begin(self, query: Query, event: Event, records: Any) -> Query:
        """Return the query with the state of its plan, which is empty if the records are new.

        A new process also starts with empty state, so parts that offer ``begin`` allow for it. Other parts
        may rely on the positions of records and are limited to one set of records. The caller keeps the
        result until its release: another thread may use other records meanwhile. A mechanism that is wrapped
        anew for every answer takes over the state of the one before (``resumed``).
        """
        if not isinstance(event, TurnEvent):
            return query
        held = self._begun.get(event)
        if held is None or held.records is not records:
            by_itself = any(_remembers_by_itself(part) for part in (query.sampler, query.mechanism))
            if held is not None and by_itself:
                raise Unsupported(
                    "draws or noise of this plan depend on earlier turns, so all of its answers must use the "
                    "same records: keep private = ledger.over(records) and use it; nothing was charged"
                )
            self._begun[event] = held = _Begun(records, *query.begin())
        resumed = getattr(query.mechanism, "resumed", None)
        mechanism = held.mechanism if resumed is None else resumed(held.mechanism)
        return replace(query, sampler=held.sampler, mechanism=mechanism)


def _remembers_by_itself(part: Sampler | Mechanism) -> bool:
    return hasattr(part, "plan") and not hasattr(part, "begin")


def forfeit(ledger: Any, query: Query, count: int) -> None:
    """Charge the next ``count`` turns of a plan that a `Ledger` promised, and release nothing for them.

    Raises `BudgetSpent` if the plan has fewer left, and `PromiseBroken` if it is not promised.
    """
    books = ledger._books
    books._charge(books.promised_as(query), count, count)
