"""Samplers: which records take part in a query, and how much that amplifies its privacy.

A sampler draws and amplifies: the event it makes is the event of the draw that ran, so a shuffled pass can
never be charged as a Poisson sample. Draws come from the ledger's cryptographic stream.

>>> from farthing.queries.events import GaussianEvent
>>> Poisson(0.01).amplify(GaussianEvent(1.1))
PoissonEvent(rate=0.01, event=GaussianEvent(noise=1.1))
"""

from collections.abc import Sized
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.budget import Observer
from farthing.errors import InvalidValue
from farthing.noise.lattice import Stream
from farthing.queries.events import DrawnEvent, Event, FixedSizeEvent, PoissonEvent, TruncatedEvent

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
        object.__setattr__(self, "sampling_rate", validate.rate(sampling_rate=self.sampling_rate))

    def draw(self, records: int, stream: Stream, turn: int = 0) -> Indices:
        """Return the positions of the records that are drawn, of ``records`` in all."""
        return stream.poisson_indices(self.sampling_rate, records)

    def amplify(self, step: Event | HasEvent, observer: Observer = Observer.ANYONE) -> Event:
        if observer is Observer.COORDINATOR:
            return DrawnEvent(self.sampling_rate, event_of(step))
        return PoissonEvent(self.sampling_rate, event_of(step))


@dataclass(frozen=True, slots=True)
class TruncatedPoisson:
    """A Poisson sample of at most ``max_batch_size`` records: of a larger one a random part is kept.

    Parameters
    ----------
    sampling_rate : float
        The probability of a record to be drawn, above 0 and at most 1.
    max_batch_size : int
        How many of those drawn are kept at most, each set of as many with the same probability.
    of : int
        A public number of records that the data never exceed; more are refused.

    Notes
    -----
    **Theorem.** Let τ = P[Binomial(of - 1, sampling_rate) >= max_batch_size]. One answer with Gaussian noise
    σ is dominated by a pair that shows, with probability τ, a Poisson sample with noise σ/2 (under
    add-remove; under zero-out and replace-one that of replace-one), and otherwise the Poisson sample with
    noise σ under the adjacency. It holds per record (or user), against anyone who does not see the draws, and
    though each sum may follow from earlier answers. Pairs compose, so promises, menus and Rényi filters price
    it, without a term of δ.

    *Proof.* Let x be the record that differs, q the rate, B the largest size, and k the number of other
    records drawn, whose law is the same in both worlds. A hockey-stick divergence is jointly convex, so
    condition on k. If k < B nothing is cut, with x or without it: an ordinary Poisson sample with the shift
    of the adjacency. If k >= B, let R be a random (B - 1)-subset of those k and y a random one of the rest: R
    and y are a random B-subset, which is what is kept if x is not. Given R and y, x is kept, with R and in
    the place of y, with probability p = q B / (k + 1) <= q. *Add-remove*: the sum moves by g(x) - g(y), at
    most twice the bound, on a Poisson sample of rate p; rate q costs no less (mix its pair with its own
    second part). *Zero-out, replace-one*: x, or what stands in its place, is drawn alike in both worlds, and
    its sum differs from that of R and y by g(x) - g(y) in one and by g(x') - g(y) in the other: replace-one
    with twice the bound on a Poisson sample. P[k >= B] grows with the number of records, so it is at most τ;
    and what is seen with probability τ costs no less than what is seen otherwise. ∎

    The published price (Chua et al. 2024, "Scalable DP-SGD: shuffling vs. Poisson subsampling") compares
    both worlds with the sample that is not cut, and adds (1 + e^ε) τ to δ with each answer. Here a full batch
    costs twice the shift, τ of the time. Five standard deviations above the mean that is less than 0.1 % more
    noise in the plans that we looked at; there the published δ is above 1e-3.

    An observer who sees the draws (`Observer.COORDINATOR`) sees whether a record is kept, with probability q
    at most.

    Examples
    --------
    >>> from farthing.queries.events import GaussianEvent
    >>> TruncatedPoisson(0.01, 128, of=10_000).amplify(GaussianEvent(1.1))
    TruncatedEvent(rate=0.01, size=128, of=10000, event=GaussianEvent(noise=1.1))
    """

    sampling_rate: float
    max_batch_size: int
    of: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "sampling_rate", validate.rate(sampling_rate=self.sampling_rate))
        for name in ("max_batch_size", "of"):
            object.__setattr__(self, name, validate.count(**{name: getattr(self, name)}))

    def check(self, records: Sized) -> None:
        """Refuse more records than the price was found for."""
        if len(records) > self.of:
            raise InvalidValue(
                f"there are more records than of={self.of}, for which the price was found: give a public "
                "number that the data never exceed"
            )

    def draw(self, records: int, stream: Stream, turn: int = 0) -> Indices:
        drawn = stream.poisson_indices(self.sampling_rate, records)
        if len(drawn) <= self.max_batch_size:
            return drawn
        kept: NDArray[np.int64] = drawn[stream.choose(self.max_batch_size, len(drawn))]
        return kept

    def amplify(self, step: Event | HasEvent, observer: Observer = Observer.ANYONE) -> Event:
        if observer is Observer.COORDINATOR or self.max_batch_size >= self.of:  # seen, or never cut
            return Poisson(self.sampling_rate).amplify(step, observer)
        return TruncatedEvent(self.sampling_rate, self.max_batch_size, self.of, event_of(step))


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
        for name in ("size", "of"):
            object.__setattr__(self, name, validate.count(**{name: getattr(self, name)}))
        if self.size > self.of:
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
