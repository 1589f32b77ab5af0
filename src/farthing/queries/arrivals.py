"""Query records that arrive over time: each answer uses the records since the last one, and no record twice.

**Theorem.** Let the T answers of a plan have noise σ with buffers or bands (`farthing.queries.buffered`,
`farthing.queries.correlated`; independent noise has one band). If every record is in the sum of at most one
turn, all T answers together cost one answer with Gaussian noise σ: under add-remove, zero-out and
replace-one, per record, against any observer, at any stopping time, and for sums that depend on all earlier
releases.

*Proof.* Revealing X is equivalent to revealing CG + Z. A record that arrives before turn s moves G in row s
only, by g, and so CG by C e_s ⊗ g, of norm at most |C e_0| |g|. Z has standard deviation σ times a number
that is at least |C e_0| (bands: |c|; buffers: N² is a maximum over k participations, and k = 1 gives |C
e_0|²). The assignment of the other records to turns is the same with and without this record. Shifts of one
Gaussian mechanism that depend on earlier rows cost no more (Smith & Thakurta 2022). ∎

**Each record once.** A draw takes the positions from the end of the last draw to the current number of
records; records keep their positions and are only appended. This state lives in one process. Turns must be 0,
1, 2 and so on without a gap: after a skipped turn, with other records, or in a new process nothing is drawn
any more, since another process may have used the records. Later records may then be charged to a new ledger:
no record is in both.

>>> from farthing.noise.lattice import SeededStream
>>> arrivals, stream = Arrivals().begin(), SeededStream(0)
>>> [arrivals.draw(records, stream, turn).tolist() for turn, records in enumerate((3, 5, 5))]
[[0, 1, 2], [3, 4], []]
"""

import sys
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.budget import Observer
from farthing.noise.lattice import Stream
from farthing.queries.events import Event, RepeatedEvent
from farthing.queries.plan_lock import PlanLock
from farthing.queries.samplers import HasEvent, event_of


class _Seen:
    """The number of records that the turns of one plan have used."""

    def __init__(self) -> None:
        self._lock = PlanLock()
        self._records, self._turn = 0, -1

    def draw(self, records: int, turn: int) -> NDArray[np.int64]:
        with self._lock.held:
            first, follows = self._records, turn == self._turn + 1 and records >= self._records
            self._records = max(first, records)  # set first: an interruption must not reuse records
            self._turn = turn if follows else sys.maxsize
            return np.arange(first, records if follows else first)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """All records that arrived since the last turn; each takes part in one turn of a plan.

    Notes
    -----
    The theorem and its conditions are in `farthing.queries.arrivals`. The records are one growing object with
    a length and ``take(positions)``. All turns of a plan together cost one answer.

    Examples
    --------
    >>> from farthing.queries.events import GaussianEvent
    >>> Arrivals().plan(GaussianEvent(2.0), 500)
    RepeatedEvent(event=GaussianEvent(noise=2.0), count=1)
    """

    _memory: _Seen | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def separation(self) -> int:
        """The least number of turns between two participations of a record, of which there is only one."""
        return sys.maxsize

    def begin(self) -> "Arrivals":
        """Return this sampler with the state of a new plan."""
        begun = Arrivals()
        object.__setattr__(begun, "_memory", _Seen())
        return begun

    def draw(self, records: int, stream: Stream, turn: int = 0) -> NDArray[np.int64]:
        return (self._memory or _Seen()).draw(records, turn)

    def amplify(self, step: Event | HasEvent, observer: Observer = Observer.ANYONE) -> Event:
        return event_of(step, self)

    def plan(self, step: Event | HasEvent, steps: int, observer: Observer = Observer.ANYONE) -> RepeatedEvent:
        """Return the price of turns 0 to ``steps`` - 1, of which a record is in one."""
        return RepeatedEvent(event_of(step, self, validate.count(steps=steps)), 1)
