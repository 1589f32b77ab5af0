"""Records that arrive once: an answer takes those that came since the last one, and nobody twice.

**Theorem.** Let T answers of a plan have noise σ by buffers or bands (`farthing.queries.buffered`,
`farthing.queries.correlated`; independent noise is one band). If every record is in the sum of one turn at
most, all T cost what one answer with Gaussian noise σ costs: under add-remove, zero-out and replace-one, per
record, before any observer, whenever the asking ends, and though each sum may follow from all earlier
releases.

*Proof.* Revealing X is revealing CG + Z. A record that arrives before turn s moves G in row s only, by g, and
so CG by C e_s ⊗ g, at most |C e_0| |g|, and Z has the deviation σ times a number that is not below |C e_0|
(bands: |c|; buffers: N² is a maximum over k chances, of which k = 1 is |C e_0|²). Which rows arrived before
which turn is the same with and without it. Shifts of that one mechanism that follow from earlier rows cost no
more (Smith & Thakurta 2022). ∎

**Nobody twice.** A draw takes the positions from where the last one ended to the number of records now;
records keep their positions and are only appended. Memory of it is in one process. It draws while its turns
are 0, 1, 2 and so on, without a gap: after a skipped turn, over other records, or in a new process nobody is
drawn any more, since another process may have had them. Later records may then go to a ledger of their own:
nobody is in both.

>>> from farthing.noise.lattice import SeededStream
>>> arrivals, stream = Arrivals().begin(), SeededStream(0)
>>> [arrivals.draw(records, stream, turn).tolist() for turn, records in enumerate((3, 5, 5))]
[[0, 1, 2], [3, 4], []]
"""

import sys
import threading
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.budget import Observer
from farthing.noise.lattice import Stream
from farthing.queries.events import Event, RepeatedEvent
from farthing.queries.samplers import HasEvent, event_of


class _Seen:
    """How many records the turns of one plan have seen."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records, self._turn = 0, -1

    def draw(self, records: int, turn: int) -> NDArray[np.int64]:
        with self._lock:
            first, follows = self._records, turn == self._turn + 1 and records >= self._records
            self._records = max(first, records)  # first: who is interrupted here loses records, or the stream
            self._turn = turn if follows else sys.maxsize
            return np.arange(first, records if follows else first)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """All records that arrived since the last turn: each takes part once in a plan.

    Notes
    -----
    Theorem and conditions are in `farthing.queries.arrivals`. Records are one object that grows: it has a
    length, and ``take(positions)``. All turns of a plan together cost one answer.

    Examples
    --------
    >>> from farthing.queries.events import GaussianEvent
    >>> Arrivals().plan(GaussianEvent(2.0), 500)
    RepeatedEvent(event=GaussianEvent(noise=2.0), count=1)
    """

    _memory: _Seen | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def separation(self) -> int:
        """How many turns lie at least between two chances of a record: there is no second one."""
        return sys.maxsize

    def begin(self) -> "Arrivals":
        """Return this sampler for one plan."""
        begun = Arrivals()
        object.__setattr__(begun, "_memory", _Seen())
        return begun

    def draw(self, records: int, stream: Stream, turn: int = 0) -> NDArray[np.int64]:
        return (self._memory or _Seen()).draw(records, turn)

    def amplify(self, step: Event | HasEvent, observer: Observer = Observer.ANYONE) -> Event:
        return event_of(step)

    def plan(self, step: Event | HasEvent, steps: int, observer: Observer = Observer.ANYONE) -> RepeatedEvent:
        """Return the price of the turns 0 to ``steps`` - 1: a record is in one of them."""
        validate.count(steps=steps)
        return RepeatedEvent(event_of(step), 1)
