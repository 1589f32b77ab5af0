"""Truncated batches of groups that take turns: draws of a largest size for correlated noise.

**Theorem.** Let the records be dealt into G groups of at most m = ⌈of / G⌉, independently of what they hold,
and let group t mod G have turn t: each of its members is drawn with probability p = ``sampling_rate`` G, and
of more than B drawn a random B are kept. Let noise be correlated over at most G turns
(`farthing.queries.correlated.BandedGaussian`, noise multiplier σ). Then T turns cost at most what ⌈T / G⌉
answers of `farthing.queries.samplers.TruncatedPoisson` (p, B, of=m) with Gaussian noise σ cost: under
add-remove, zero-out and replace-one, per record (or user), against anyone who does not see the draws,
whenever the asking ends, and though each sum may follow from all earlier releases. There is no term of δ.

*Proof.* The deal gives each of ``of`` places to a record or to nobody, uniformly: where x comes or goes,
those of all others are as they were, and x has a place that is blank without it. Take the deal as given, and
the draws of all turns at which x has no chance; they have one law in both worlds. One chance of x, at turn s:
its draw moves row s of the sums only. Who is pushed out there, y, is in the group of x, and its other chances
have draws of their own. So the sum of turn s differs by a vector Δ, and rows s to s + ``bands`` - 1 of CG by
c ⊗ Δ, of norm |c| |Δ|, all of them before the next chance of x: the rows between two chances are one Gaussian
mechanism whose deviation is σ |c| times the bound. That is the answer which the theorem of `TruncatedPoisson`
prices, with the norm of Δ in place of a number: given how many others are drawn, k, of at most m - 1, Δ is
g(x) on a Poisson sample of rate p if k < B, and g(x) - g(y) on one of rate p B / (k + 1) if not (zero-out,
replace-one: as there). So the pair of each chance is dominated by that of ``of`` = m whatever the deal, as
P[k >= B] grows with the number of others. Draws of different chances are independent given the deal, and what
dominates composes, whatever earlier rows decide (Zhu, Dong & Wang 2022, Theorem 10). On the lattice rows
differ by c_j Δ + e with the same e as in `farthing.queries.correlated`, whatever Δ is. ∎

Groups of random sizes, as those of `farthing.Cyclic`, have no such price: how often a batch is full would
depend on the size of the group, which stays the same over all cycles, so that τ of one turn says nothing of
the next. Balanced draws have none either: who is pushed out of one turn of a pass is in no other turn of it,
and the theorem of balanced draws compares records one by one. Where ``sampling_rate`` times ``groups`` is 1,
every batch is a whole group: at ``max_batch_size`` = ⌈of / groups⌉ batches have one size, to within one, and
nothing is cut.

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
from farthing.queries.samplers import HasEvent, Indices, TruncatedPoisson


class _DealtGroups(TurnGroups):
    """Groups of one size, to within one."""

    def _drawn(self, sampler: Any, records: int, stream: Stream, turn: int) -> Integers:
        if not self._members:
            self._members = dealt(stream, records, sampler.of, sampler.groups)
        members = self._members[turn % sampler.groups]
        return np.asarray(members[sampler.within_group.draw(len(members), stream)])


def dealt(stream: Stream, records: int, of: int, groups: int) -> list[Integers]:
    """Return the positions of each group: of ``of`` places every record has one, all deals alike."""
    while True:
        keys = stream.integers(of)
        order = np.argsort(keys, kind="stable")
        if (np.diff(keys[order]) > 0).all():  # a tie would favour the first
            return [np.sort(own[own < records]) for own in (order[group::groups] for group in range(groups))]


@dataclass(frozen=True, slots=True)
class TruncatedCyclic:
    """A Poisson sample, of at most ``max_batch_size`` records, of one of ``groups`` groups, which take turns.

    Parameters
    ----------
    sampling_rate : float
        The expected part of all records in a batch, before it is cut; times ``groups`` it is at most 1.
    groups : int
        How many groups of equal size: a record has one chance in as many turns.
    max_batch_size : int
        How many of those drawn are kept at most, each set of as many with the same probability.
    of : int
        A public number of records that the data never exceed; more are refused.

    Raises
    ------
    InvalidValue
        If ``sampling_rate`` times ``groups`` is above 1.

    Notes
    -----
    The theorem is in `farthing.queries.truncation`: each chance of a record costs what an answer of
    `farthing.TruncatedPoisson` on its group costs. Noise may be correlated over as many turns as groups.

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
        Cyclic(self.sampling_rate, self.groups)  # refuses what makes no sense
        validate.count(max_batch_size=self.max_batch_size)
        validate.count(of=self.of)

    @property
    def rate(self) -> float:
        """The probability of a record to be drawn when its group is."""
        return Cyclic(self.sampling_rate, self.groups).rate

    @property
    def period(self) -> int:
        """The turns of a cycle, at whose end a deal may begin anew."""
        return self.groups

    @property
    def separation(self) -> int:
        """How many turns lie at least between two chances of a record."""
        return self.groups

    @property
    def within_group(self) -> TruncatedPoisson:
        """The draw of one chance, among the members of a group."""
        return TruncatedPoisson(self.rate, self.max_batch_size, -(-self.of // self.groups))

    @property
    def cuts(self) -> bool:
        """Whether a batch may have to be cut."""
        return self.max_batch_size < self.within_group.of

    def begin(self) -> "TruncatedCyclic":
        """Return this sampler for one plan: with groups that stay."""
        begun = replace(self)
        object.__setattr__(begun, "_memory", _DealtGroups())
        return begun

    def check(self, records: Sized) -> None:
        """Refuse more records than the price was found for."""
        TruncatedPoisson(self.rate, self.max_batch_size, self.of).check(records)

    def draw(self, records: int, stream: Stream, turn: int = 0) -> Indices:
        if self._memory is None and turn:
            raise InvalidValue("draws of one plan must share their groups: draw from begin()")
        return (self._memory or _DealtGroups()).draw(self, records, stream, turn)

    def members(self, turn: int) -> Integers:
        """Return who may be drawn at this turn of a plan that was begun; nobody where none is dealt yet."""
        return (self._memory or _DealtGroups()).members(turn % self.groups)

    def amplify(self, step: Event | HasEvent, observer: Observer = Observer.ANYONE) -> Event:
        return self.within_group.amplify(step, observer)

    def plan(self, step: Event | HasEvent, steps: int, observer: Observer = Observer.ANYONE) -> RepeatedEvent:
        """Return the price of the turns 0 to ``steps`` - 1: a record has a chance in one of ``groups``."""
        return RepeatedEvent(self.amplify(step, observer), -(-validate.count(steps=steps) // self.groups))
