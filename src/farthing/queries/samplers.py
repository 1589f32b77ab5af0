"""Draw the records that take part in a query, and amplify its privacy accordingly.

A sampler draws records and derives the event of that same draw, so a shuffled pass can never be charged as a
Poisson sample. Draws come from the ledger's cryptographic stream.

>>> from farthing.queries.events import GaussianEvent
>>> Poisson(0.01).amplify(GaussianEvent(1.1))
PoissonEvent(rate=0.01, event=GaussianEvent(noise=1.1))
"""

from collections.abc import Sized
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.budget import Observer
from farthing.errors import InvalidValue, Unsupported
from farthing.noise.lattice import Stream
from farthing.queries.events import DrawnEvent, Event, FixedSizeEvent, PoissonEvent, TruncatedEvent

Indices = slice | NDArray[np.int64]


@runtime_checkable
class HasEvent(Protocol):
    """A mechanism that has an event for contributions bounded by one."""

    def unit_event(self) -> Event:
        """Return its event."""


class Sampler(Protocol):
    """A rule that draws the records of one query.

    A sampler whose draws depend on the turn, such as one that cycles through groups, also offers
    ``plan(event, steps, observer) -> Event``: the joint price of ``event`` at turns 0 to ``steps`` - 1.
    ``amplify`` is then the price of turn 0 alone. A sampler by level of budget
    (`farthing.queries.personal.Personal`) draws from the records themselves.
    """

    def draw(self, records: int, stream: Stream, turn: int = 0) -> Indices:
        """Return the positions of the records drawn at this turn, out of ``records`` in all."""

    def amplify(self, step: Event | HasEvent, observer: Observer = Observer.ANYONE) -> Event:
        """Return the event of ``step`` on such a draw, as ``observer`` sees it."""


def refuse_overlap(sampler: Sampler, mechanism: Any) -> None:
    """Refuse noise that is correlated over more turns than lie between two possible draws of a record."""
    bands, apart = getattr(mechanism, "bands", 1), getattr(sampler, "separation", 1)
    if bands > apart:
        raise Unsupported(
            f"noise of {bands} bands needs {bands} turns between two draws of a record, and {sampler!r} "
            f"leaves {apart}: sample with Cyclic(sampling_rate, groups={bands})"
        )
    if hasattr(mechanism, "suits"):
        mechanism.suits(sampler)


def refuse_more(mechanism: Any, steps: int) -> None:
    """Refuse more turns than noise covers that its sampler prices."""
    if (most := getattr(mechanism, "steps", steps)) < steps:
        raise InvalidValue(f"{mechanism!r} covers at most {most} turns and has no price for {steps}")


def event_of(step: Event | HasEvent, sampler: Sampler, steps: int = 1) -> Event:
    """Return the event itself, or the event of a mechanism on contributions bounded by one.

    A mechanism whose turns cost more together on draws of ``sampler`` than one by one is refused.
    """
    if isinstance(step, Event):
        return step
    refuse_overlap(sampler, step)
    refuse_more(step, steps)
    try:
        return step.unit_event()
    except AttributeError:
        if hasattr(step, "unit_event"):
            raise
        raise InvalidValue(
            f"step must be a mechanism such as ft.Gaussian(1.0), or sampler.amplify(mechanism), got {step!r}"
        ) from None


def one_turn(step: Event | HasEvent, sampler: Sampler) -> Event:
    """Return the event itself; refuse a mechanism, as several turns of ``sampler`` may cost more together."""
    if isinstance(step, Event):
        return step
    raise Unsupported(
        f"turns of {sampler!r} are priced together: ask for its plan(mechanism, steps), which is one step"
    )


@dataclass(frozen=True, slots=True)
class Everyone:
    """All records take part: nothing is sampled, and privacy is not amplified.

    Examples
    --------
    >>> from farthing.queries.events import GaussianEvent
    >>> Everyone().amplify(GaussianEvent(1.1)) == GaussianEvent(1.1)
    True
    """

    def draw(self, records: int, stream: Stream, turn: int = 0) -> Indices:
        return slice(None)

    def amplify(self, step: Event | HasEvent, observer: Observer = Observer.ANYONE) -> Event:
        return event_of(step, self)


@dataclass(frozen=True, slots=True)
class Poisson:
    """A Poisson sample: each record takes part independently with probability ``sampling_rate``.

    Parameters
    ----------
    sampling_rate : float
        The probability that a record is in a batch, above 0 and at most 1.

    Notes
    -----
    The price is that of the noise on a Poisson sample (Zhu, Dong & Wang 2022). Against an observer who sees
    the draws (`Observer.COORDINATOR`) sampling does not amplify: a record that was drawn pays the full price.

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
        """Return the positions of the records that are drawn, out of ``records`` in all."""
        return stream.poisson_indices(self.sampling_rate, records)

    def amplify(self, step: Event | HasEvent, observer: Observer = Observer.ANYONE) -> Event:
        if observer is Observer.COORDINATOR:
            return DrawnEvent(self.sampling_rate, event_of(step, self))
        return PoissonEvent(self.sampling_rate, event_of(step, self))


@dataclass(frozen=True, slots=True)
class TruncatedPoisson:
    """A Poisson sample cut to at most ``max_batch_size`` records, chosen uniformly from those drawn.

    Parameters
    ----------
    sampling_rate : float
        The probability that a record is drawn, above 0 and at most 1.
    max_batch_size : int
        The largest batch. From a larger sample a uniformly random subset of this size is kept.
    of : int
        A public upper bound on the number of records; more records are refused.

    Notes
    -----
    **Theorem.** Let τ = P[Binomial(of - 1, sampling_rate) >= max_batch_size]. One answer with Gaussian noise
    σ is dominated by this pair: with probability τ it reveals the pair of a Poisson sample with noise σ/2
    (under add-remove its own pair; under zero-out and replace-one that of replace-one), and otherwise the
    pair of the Poisson sample with noise σ under the adjacency. The theorem holds per record (or user),
    against an observer who does not see the draws, and for sums chosen adaptively. Pairs compose, so
    promises, menus and Rényi filters can price it. No term is added to δ.

    *Proof.* Let x be the record that differs, q the rate, B the largest size, and k the number of other
    records drawn, whose distribution is the same for both neighbours. A hockey-stick divergence is jointly
    convex, so condition on k. If k < B nothing is cut, with x or without it: this is an ordinary Poisson
    sample with the shift of the adjacency. If k >= B, let R be a random (B - 1)-subset of those k and y a
    random one of the others: R and y form a random B-subset, which is the batch if x is not in it. Given R
    and y, x is in the batch, with R and in the place of y, with probability p = q B / (k + 1) <= q.
    *Add-remove*: the sum moves by g(x) - g(y), at most twice the bound, on a Poisson sample of rate p; rate q
    costs no less (mix its pair with its own second part). *Zero-out, replace-one*: x, or its replacement, is
    drawn alike in both neighbours, and the sum differs from that of R and y by g(x) - g(y) in one and by
    g(x') - g(y) in the other: replace-one with twice the bound on a Poisson sample. P[k >= B] grows with the
    number of records, so it is at most τ; and the pair that is revealed with probability τ costs no less than
    the other one. ∎

    The published price (Chua et al. 2024, "Scalable DP-SGD: shuffling vs. Poisson subsampling") compares both
    neighbours with the sample that is not cut, and adds (1 + e^ε) τ to δ with each answer. Here a full batch
    costs twice the shift, with probability τ. At five standard deviations above the mean, this is less than
    0.1 % more noise in the plans that we looked at, where the published δ is above 1e-3.

    An observer who sees the draws (`Observer.COORDINATOR`) sees whether a record is kept, which has
    probability at most q.

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
        """Refuse more records than the price holds for."""
        if len(records) > self.of:
            raise InvalidValue(
                f"there are more records than of={self.of}, for which the price holds: pass a public upper "
                "bound on the number of records"
            )

    def draw(self, records: int, stream: Stream, turn: int = 0) -> Indices:
        drawn = stream.poisson_indices(self.sampling_rate, records)
        if len(drawn) <= self.max_batch_size:
            return drawn
        kept: NDArray[np.int64] = drawn[stream.choose(self.max_batch_size, len(drawn))]
        return kept

    def amplify(self, step: Event | HasEvent, observer: Observer = Observer.ANYONE) -> Event:
        if observer is Observer.COORDINATOR or self.max_batch_size >= self.of:  # draws seen, or never cut
            return Poisson(self.sampling_rate).amplify(step, observer)
        return TruncatedEvent(self.sampling_rate, self.max_batch_size, self.of, event_of(step, self))


@dataclass(frozen=True, slots=True)
class FixedSize:
    """A sample of exactly ``size`` out of ``of`` records, drawn without replacement; ``of`` is public.

    Parameters
    ----------
    size : int
        The number of records that are drawn.
    of : int
        The public number of records. If there are fewer, blank records that contribute zero fill up, so that
        the sampling rate is at most size / of for any data.

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
            return DrawnEvent(self.size / self.of, event_of(step, self))
        return FixedSizeEvent(self.size, self.of, event_of(step, self))


def OneRecord(of: int) -> FixedSize:
    """Return the sampler of one record, drawn uniformly, as in A-DDP's Algorithm 1, line 11.

    Parameters
    ----------
    of : int
        The public number of records.

    Returns
    -------
    FixedSize

    Examples
    --------
    >>> OneRecord(100)
    FixedSize(size=1, of=100)
    """
    return FixedSize(1, of)
