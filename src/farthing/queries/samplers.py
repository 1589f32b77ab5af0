"""Samplers: which records take part in a query, and how much that amplifies its privacy.

A sampler draws and amplifies: the event it makes is the event of the draw that ran, so a shuffled pass can
never be charged as a Poisson sample. Draws come from the ledger's cryptographic stream.

>>> from farthing.queries.events import GaussianEvent
>>> Poisson(0.01).amplify(GaussianEvent(1.1))
PoissonEvent(rate=0.01, event=GaussianEvent(noise=1.1))
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.budget import Observer
from farthing.errors import InvalidValue
from farthing.noise.lattice import Stream
from farthing.queries.events import DrawnEvent, Event, FixedSizeEvent, PoissonEvent

Indices = slice | NDArray[np.int64]


@runtime_checkable
class HasEvent(Protocol):
    """A mechanism on its own, with contributions bounded by one."""

    def unit_event(self) -> Event:
        """Its event."""


class Sampler(Protocol):
    """A way to draw the records of one query.

    A sampler whose draws depend on the turn, such as one that cycles through blocks, also offers
    ``plan(event, steps, observer) -> Event``: the price of ``event`` on its draws of the turns 0 to ``steps``
    - 1 together. ``amplify`` is then the price of turn 0 alone. A sampler that goes by levels of
    budget (`farthing.queries.personal.Personal`) is handed the records themselves.
    """

    def draw(self, records: int, stream: Stream, turn: int = 0) -> Indices:
        """Return the positions of those who take part in this turn, of ``records`` in all."""

    def amplify(self, step: Event | HasEvent, observer: Observer = Observer.ANYONE) -> Event:
        """Return the event of ``step`` on such a draw, before ``observer``."""


def event_of(step: Event | HasEvent) -> Event:
    """Return an event, or that of a mechanism on contributions bounded by one."""
    return step if isinstance(step, Event) else step.unit_event()  # isinstance of a protocol is slow


@dataclass(frozen=True, slots=True)
class Everyone:
    """All records take part: nothing is drawn, and nothing is amplified.

    Examples
    --------
    >>> from farthing.queries.events import GaussianEvent
    >>> Everyone().amplify(GaussianEvent(1.1)) == GaussianEvent(1.1)
    True
    """

    def draw(self, records: int, stream: Stream, turn: int = 0) -> Indices:
        return slice(None)

    def amplify(self, step: Event | HasEvent, observer: Observer = Observer.ANYONE) -> Event:
        return event_of(step)


@dataclass(frozen=True, slots=True)
class Poisson:
    """A Poisson sample: each record takes part independently with probability ``sampling_rate``.

    Parameters
    ----------
    sampling_rate : float
        The probability of a record to be in a batch, above 0 and at most 1.

    Notes
    -----
    The price is that of the noise on a Poisson sample (Zhu, Dong & Wang 2022). An observer who sees the draws
    (`Observer.COORDINATOR`) is not fooled by them: a record that was drawn costs the full price then.

    Examples
    --------
    >>> from farthing.queries.events import GaussianEvent
    >>> Poisson(0.01).amplify(GaussianEvent(1.1))
    PoissonEvent(rate=0.01, event=GaussianEvent(noise=1.1))
    """

    sampling_rate: float

    def __post_init__(self) -> None:
        validate.rate(sampling_rate=self.sampling_rate)

    def draw(self, records: int, stream: Stream, turn: int = 0) -> Indices:
        """Return the positions of the records that are drawn, of ``records`` in all."""
        return stream.poisson_indices(self.sampling_rate, records)

    def amplify(self, step: Event | HasEvent, observer: Observer = Observer.ANYONE) -> Event:
        if observer is Observer.COORDINATOR:
            return DrawnEvent(self.sampling_rate, event_of(step))
        return PoissonEvent(self.sampling_rate, event_of(step))


@dataclass(frozen=True, slots=True)
class FixedSize:
    """Exactly ``size`` of ``of`` records take part, drawn without replacement; ``of`` is public.

    Parameters
    ----------
    size : int
        How many records are drawn.
    of : int
        How many records there are, a public number. Where there are fewer, blank ones that contribute nothing
        fill up, so that the rate is never above size / of whatever the data.

    Examples
    --------
    >>> from farthing.queries.events import GaussianEvent
    >>> FixedSize(64, 60_000).amplify(GaussianEvent(1.1))
    FixedSizeEvent(size=64, of=60000, event=GaussianEvent(noise=1.1))
    """

    size: int
    of: int

    def __post_init__(self) -> None:
        if validate.count(size=self.size) > validate.count(of=self.of):
            raise InvalidValue(f"size must be at most of={self.of}, got {self.size}")

    def draw(self, records: int, stream: Stream, turn: int = 0) -> Indices:
        drawn = stream.choose(self.size, max(records, self.of))
        return drawn[drawn < records]

    def amplify(self, step: Event | HasEvent, observer: Observer = Observer.ANYONE) -> Event:
        if observer is Observer.COORDINATOR:
            return DrawnEvent(self.size / self.of, event_of(step))
        return FixedSizeEvent(self.size, self.of, event_of(step))


def OneRecord(of: int) -> FixedSize:
    """Return the sampler of one record, drawn uniformly, as in A-DDP's Algorithm 1, line 11.

    Parameters
    ----------
    of : int
        How many records there are, a public number.

    Returns
    -------
    FixedSize

    Examples
    --------
    >>> OneRecord(100)
    FixedSize(size=1, of=100)
    """
    return FixedSize(1, of)
