"""Draw batches of a largest size from groups that take turns, for correlated noise.

**Theorem.** Let the records be dealt into G groups of at most m = ⌈of / G⌉, independently of their values,
and let group t mod G have turn t: each of its members is drawn with probability p = ``sampling_rate`` G, and
if more than B are drawn, a random B of them are kept. Let noise be correlated over at most G turns
(`farthing.queries.correlated.BandedGaussian`, noise multiplier σ). Then T turns cost at most ⌈T / G⌉ answers
of `farthing.queries.samplers.TruncatedPoisson` (p, B, of=m) with Gaussian noise σ: under add-remove, zero-out
and replace-one, per record (or user), against an observer who does not see the draws, at any stopping time,
and for sums that depend on all earlier releases. No term is added to δ.

*Proof.* The deal gives each of ``of`` places to a record or leaves it blank, uniformly: with and without x
all other records have the same places, and x has a place that is blank without it. Condition on the deal and
on the draws of all turns at which x is not eligible; they have the same distribution for both neighbours.
Consider one eligible turn s of x. Its draw moves row s of the sums only. The record y that x displaces is in
the group of x, and its other eligible turns have independent draws. So the sum of turn s differs by a vector
Δ, and rows s to s + ``bands`` - 1 of CG by c ⊗ Δ, of norm |c| |Δ|, all of them before the next eligible turn
of x: the rows between two eligible turns are one Gaussian mechanism whose deviation is σ |c| times the bound.
This is the answer that the theorem of `TruncatedPoisson` prices, with the norm of Δ in place of a number:
given the number k of others drawn, out of at most m - 1, Δ is g(x) on a Poisson sample of rate p if k < B,
and g(x) - g(y) on one of rate p B / (k + 1) otherwise (zero-out, replace-one: as there). So the pair of each
eligible turn is dominated by that of ``of`` = m for every deal, as P[k >= B] grows with the number of others.
Draws of different eligible turns are independent given the deal, and dominating pairs compose adaptively
(Zhu, Dong & Wang 2022, Theorem 10). On the lattice rows differ by c_j Δ + e with the same e as in
`farthing.queries.correlated`, for every Δ. ∎

Groups of random sizes, such as those of `farthing.Cyclic`, have no such price: the probability of a full
batch would depend on the size of the group, which is the same in all cycles, so that τ of one turn does not
apply independently to the next. Balanced draws have none either: a record displaced from one turn of a pass
is in no other turn of it, and the theorem of balanced draws compares records one by one. If ``sampling_rate``
times ``groups`` is 1, every batch is a whole group: at ``max_batch_size`` = ⌈of / groups⌉ batch sizes differ
by at most one, and nothing is cut.

>>> from farthing.queries.events import GaussianEvent
>>> TruncatedCyclic(0.01, groups=4, max_batch_size=140, of=10_000).plan(GaussianEvent(1.1), 400).event
TruncatedEvent(rate=0.04, size=140, of=2500, event=GaussianEvent(noise=1.1))
"""

from collections.abc import Sized
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from farthing import validate
from farthing.budget import Observer
from farthing.errors import InvalidValue
from farthing.noise.lattice import Stream
from farthing.queries.correlated import Cyclic, Integers, TurnGroups
from farthing.queries.events import Event, RepeatedEvent
from farthing.queries.samplers import HasEvent, Indices, TruncatedPoisson, event_of


class _DealtGroups(TurnGroups):
    """Groups whose sizes differ by at most one."""

    def _drawn(self, sampler: Any, records: int, stream: Stream, turn: int) -> Integers:
        if not self._members:
            self._members = dealt(stream, records, sampler.of, sampler.groups)
        members = self._members[turn % sampler.groups]
        return np.asarray(members[sampler.within_group.draw(len(members), stream)])


def dealt(stream: Stream, records: int, of: int, groups: int) -> list[Integers]:
    """Return the positions of each group, for a uniformly random deal of the records to ``of`` places."""
    while True:
        keys = stream.integers(of)
        order = np.argsort(keys, kind="stable")
        if (np.diff(keys[order]) > 0).all():  # a tie would favour the earlier record
            return [np.sort(own[own < records]) for own in (order[group::groups] for group in range(groups))]


@dataclass(frozen=True, slots=True)
class TruncatedCyclic:
    """A Poisson sample of at most ``max_batch_size`` records from one of ``groups`` groups in turn.

    Parameters
    ----------
    sampling_rate : float
        The expected fraction of all records in a batch before it is cut; at most 1 / ``groups``.
    groups : int
        The number of groups of equal size: a record is eligible in one of as many turns.
    max_batch_size : int
        The largest batch. From a larger sample a uniformly random subset of this size is kept.
    of : int
        A public upper bound on the number of records; more records are refused.

    Raises
    ------
    InvalidValue
        If ``sampling_rate`` times ``groups`` is above 1.

    Notes
    -----
    The theorem is in `farthing.queries.truncation`: each eligible turn of a record costs one answer of
    `farthing.TruncatedPoisson` on its group. Noise may be correlated over as many turns as there are groups.

    Examples
    --------
    >>> from farthing.queries.events import GaussianEvent
    >>> sampler = TruncatedCyclic(0.01, groups=4, max_batch_size=140, of=10_000)
    >>> sampler.plan(GaussianEvent(1.1), 400).count
    100
    """

    sampling_rate: float
    groups: int
    max_batch_size: int
    of: int
    _memory: _DealtGroups | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        Cyclic(self.sampling_rate, self.groups)  # checks both parameters
        validate.count(max_batch_size=self.max_batch_size)
        validate.count(of=self.of)

    @property
    def rate(self) -> float:
        """The probability that a record is drawn when its group is eligible."""
        return Cyclic(self.sampling_rate, self.groups).rate

    @property
    def period(self) -> int:
        """The turns of a cycle, after which the records may be dealt anew."""
        return self.groups

    @property
    def separation(self) -> int:
        """The least number of turns between two eligible turns of a record."""
        return self.groups

    @property
    def within_group(self) -> TruncatedPoisson:
        """The sampler of one eligible turn, among the members of a group."""
        return TruncatedPoisson(self.rate, self.max_batch_size, -(-self.of // self.groups))

    @property
    def cuts(self) -> bool:
        """Whether a batch can exceed the largest size."""
        return self.max_batch_size < self.within_group.of

    def begin(self) -> "TruncatedCyclic":
        """Return this sampler with the groups of a new plan."""
        begun = replace(self)
        object.__setattr__(begun, "_memory", _DealtGroups())
        return begun

    def check(self, records: Sized) -> None:
        """Refuse more records than the price holds for."""
        TruncatedPoisson(self.rate, self.max_batch_size, self.of).check(records)

    def draw(self, records: int, stream: Stream, turn: int = 0) -> Indices:
        if self._memory is None and turn:
            raise InvalidValue("draws of one plan must share their groups: draw from begin()")
        return (self._memory or _DealtGroups()).draw(self, records, stream, turn)

    def members(self, turn: int) -> Integers:
        """Return the records that may be drawn at this turn; none if the records are not dealt yet."""
        return (self._memory or _DealtGroups()).members(turn % self.groups)

    def amplify(self, step: Event | HasEvent, observer: Observer = Observer.ANYONE) -> Event:
        return self.within_group.amplify(event_of(step, self), observer)

    def plan(self, step: Event | HasEvent, steps: int, observer: Observer = Observer.ANYONE) -> RepeatedEvent:
        """Return the price of turns 0 to ``steps`` - 1: a record is eligible in one of ``groups`` turns."""
        one = self.amplify(event_of(step, self, validate.count(steps=steps)), observer)
        return RepeatedEvent(one, -(-steps // self.groups))
