"""The turns of promised plans: which of its T turns each charged answer takes.

A turn is a number from 0 to T - 1 that is given to one answer only. Turns follow from the rows of the
journal, so every process finds the same ones: a charge takes the lowest turns that are free, and a refund
frees the last turns of the charge it gives back. Where one process spends a plan, turns therefore rise by one
an answer; where it was killed, the turns that it had reserved are skipped for good. Processes that spend one
plan at the same time take turns in blocks.

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
from collections.abc import Iterator


class Turns:
    """The turns of one promise: those that are free, and those that each charge holds."""

    __slots__ = ("_free", "_held")

    def __init__(self) -> None:
        self._free = [range(sys.maxsize)]  # disjoint and in order; the last has no end
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
        """Return the turns of the charge in row ``seq``, from the lowest on."""
        return itertools.chain.from_iterable(tuple(self._held[seq]))
