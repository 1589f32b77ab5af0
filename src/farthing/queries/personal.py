"""Draw records at their own rates, or with their own weights, by level of personal budget.

Each unit (a record, or a person with all records) has its own ε, and there are a few levels of ε. A unit of
level k is drawn with probability q_k, independently of all others, and its bounded contribution is multiplied
by w_k <= 1. One noise vector is added to the sum. Rates alone are the "Sample", weights alone the "Scale" of
Boenisch, Mühl, Dziedzic, Rinberg & Papernot 2023, "Have it your way: individualized privacy assignment for
DP-SGD"; a guarantee with one ε per unit is personalised DP (Jorgensen, Yu & Cormode 2015).

**Theorem.** Let D' be D with one unit x of level k added (add-remove), with x in place of a blank one of the
same level (zero-out), or with x in place of another x' of the same level (replace-one). One answer is
dominated by the pair of noise σ / w_k on a Poisson sample of rate q_k under that adjacency, and any number of
adaptively chosen answers by the product of these pairs. So the guarantee for units of level k is that of the
events of this level, for any prices of the other levels, and against any observer, the other units included.

*Proof.* Draws are independent, so fix those of all units but x: the rest of the sum is a constant s. Given s
the answer is s + noise with probability 1 - q_k and s + w_k v + noise with probability q_k, with |v| at most
the bound; the shift by s is the same for both neighbours. This is the Gaussian mechanism with noise
multiplier σ / w_k on a Poisson sample of one, whose pair under each adjacency is known (Zhu, Dong & Wang
2022, Thm. 11; replace-one: Lebeda et al. 2024; the table in `farthing.accounting.pairs`). The answer is the
mixture of these over s with the same weights for both neighbours, and hockey-stick divergences are jointly
convex, so the pair dominates the mixture, for any rates of the other units. Dominating pairs compose
adaptively (Zhu et al., Thm. 10). For an observer who sees all draws the same proof holds, conditioned on the
draws of the others, with the pairs of `DrawnEvent`. ∎

Limits. Neighbours include the unit together with its budget: levels, rates, weights and noise are fixed in
advance from public numbers (the levels and the number of units on each). The assignment of budgets to units
is assumed to be public. If an ε depends on the unit's own data, the theorem still bounds what the *answers*
reveal about that unit by its ε, but the published sizes of the levels are not bounded. Two units of different
levels that replace each other are not neighbours here (a removal and an addition, each at its own price,
would be).

Weights and rounding. The noise is enlarged by the distance that rounding can add between neighbouring sums of
unweighted contributions: 2⁻¹⁴ of the bound in float64 and at most 2⁻¹² on the lattice
(`farthing.queries.mechanisms`); a smaller contribution has the same rounding error. With ρ = 2⁻¹¹ for both
and 2⁻¹⁵ for adding up 32 weighted sums of 2³⁰ records, a contribution that is charged as w is multiplied by
(w - ρ - 2⁻¹⁵) / (1 - ρ): the sum then moves by at most w times the distance that the noise is enlarged for.

>>> from farthing.queries.events import GaussianEvent
>>> Personal((0.01, 0.03)).amplify(GaussianEvent(2.0)).events[1]
PoissonEvent(rate=0.03, event=GaussianEvent(noise=2.0))
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.budget import Observer
from farthing.errors import InvalidValue, Unsupported
from farthing.noise.lattice import Stream
from farthing.queries.correlated import Cyclic
from farthing.queries.events import NOTHING, Event, GaussianEvent, PersonalEvent, RepeatedEvent
from farthing.queries.samplers import HasEvent, Indices, Poisson, event_of

MOST_LEVELS = 32
PUBLIC = "who has which budget, and how many have it, is taken as public"
_ROUNDING, _ADDING = 2.0**-11, 2.0**-15  # see "Weights and rounding"
_NOBODY = np.empty(0, np.int64)

Integers = NDArray[np.int64]


class Leveled:
    """Records with a level of personal budget each.

    Parameters
    ----------
    records : Records
        The private records.
    levels : array of int
        The level of each record, an index into ``epsilons``.
    epsilons : sequence of float
        The ε of every level, ascending, as in the ledger (`farthing.accounting.personal`).

    Examples
    --------
    >>> from farthing.queries.query import Rows
    >>> people = Leveled(Rows(np.ones((3, 2))), np.array([0, 1, 0]), (1.0, 2.0))
    >>> len(people), [len(members) for members in people.members]
    (3, [2, 1])
    """

    def __init__(self, records: Any, levels: NDArray[Any], epsilons: Sequence[float]) -> None:
        places = np.asarray(levels)
        fits = places.shape == (len(records),) and places.dtype.kind in "iu"
        if not fits or (places.size and not 0 <= places.min() <= places.max() < len(epsilons)):
            raise InvalidValue(f"levels must be integers from 0 to {len(epsilons) - 1}, one for each record")
        self.records, self.levels, self.epsilons = records, places, tuple(epsilons)

    def __len__(self) -> int:
        return len(self.records)

    def take(self, indices: Indices) -> Any:
        """Return the records at ``indices``."""
        return self.records.take(indices)

    def words(self) -> str:
        """Return a sentence with the number of records per level, which is public."""
        each = zip(self.epsilons, self.members, strict=True)
        named = [f"{len(members)} at epsilon {epsilon:g}" for epsilon, members in each]
        if len(named) > 4:
            named = [*named[:2], "…", named[-1]]
        return f"personal budgets: {', '.join(named)}; {PUBLIC}"

    @cached_property
    def members(self) -> list[Integers]:
        """The positions of the records of every level."""
        return [np.flatnonzero(self.levels == level) for level in range(len(self.epsilons))]

    @cached_property
    def _parts(self) -> list[Any]:
        """The records of every level, cached for methods that use all records repeatedly."""
        return [self.take(places) for places in self.members]

    def by_level(self, drawn: Indices) -> list[Any]:
        """Return the records at ``drawn``, grouped by level."""
        if isinstance(drawn, slice):
            return self._parts
        return [self.take(drawn[self.levels[drawn] == level]) for level in range(len(self.epsilons))]


@dataclass(frozen=True, slots=True)
class Personal:
    """A sampler that draws each record at the rate of its budget level, with the weight of that level.

    Parameters
    ----------
    sampling_rates : sequence of float
        The probability that a record is in a batch, one per level, from 0 (never) to 1.
    weights : sequence of float, optional
        The factor of a contribution, one per level, from 0 to 1; all 1 by default.

    Notes
    -----
    It draws from `Leveled` records only. The price is a `PersonalEvent`, with one event per level, by the
    theorem of this module.

    Examples
    --------
    >>> Personal((0.0, 0.02)).amplify(GaussianEvent(1.5)).events
    (ComposedEvent(events=()), PoissonEvent(rate=0.02, event=GaussianEvent(noise=1.5)))
    """

    sampling_rates: tuple[float, ...]
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        rates = tuple(map(float, self.sampling_rates))
        weights = tuple(map(float, self.weights)) or (1.0,) * len(rates)
        for name, values in (("sampling_rates", rates), ("weights", weights)):
            if not all(0 <= value <= 1 for value in values):
                raise InvalidValue(f"{name} must be numbers from 0 to 1, got {values}")
            object.__setattr__(self, name, values)
        if not 0 < len(rates) == len(weights) <= MOST_LEVELS:
            raise InvalidValue(
                f"there must be a sampling rate and a weight for each of at most {MOST_LEVELS} levels, got "
                f"{len(rates)} and {len(weights)}"
            )

    @property
    def factors(self) -> tuple[float, ...]:
        """The factors of the contributions: all 1, or slightly below their weights."""
        if set(self.weights) == {1.0}:
            return self.weights
        return tuple(max(0.0, (w - _ROUNDING - _ADDING) / (1 - _ROUNDING)) for w in self.weights)

    def expected(self, sizes: Sequence[int]) -> float:
        """Return the expected sum of factors over a batch, the divisor of the sums."""
        return math.fsum(
            rate * factor * size
            for rate, factor, size in zip(self.sampling_rates, self.factors, sizes, strict=True)
        )

    def check(self, records: Any) -> None:
        """Refuse records without the levels of these rates."""
        found = getattr(records, "epsilons", ())
        if len(found) != len(self.sampling_rates):
            raise Unsupported(
                f"rates for {len(self.sampling_rates)} levels of budget need records with their levels, "
                f"Leveled(records, levels, epsilons); these have {len(found)} levels"
            )

    def draw(self, records: int, stream: Stream, turn: int = 0) -> Indices:
        """Refuse: a number of records does not say their levels."""
        raise Unsupported("personal sampling rates need records with levels: use Leveled(records, …)")

    def draw_from(self, records: Leveled, stream: Stream, turn: int = 0) -> Indices:
        """Return the positions of the records that are drawn, each at the rate of its level."""
        if set(self.sampling_rates) == {1.0}:
            return slice(None)
        parts = [
            members[stream.poisson_indices(rate, len(members))]
            for rate, members in zip(self.sampling_rates, records.members, strict=True)
            if rate > 0
        ]
        return np.sort(np.concatenate([_NOBODY, *parts]))  # sorted for sequential reads

    def weighted(self, sums: Callable[[Any], Any], records: Leveled, drawn: Indices) -> Any:
        """Return the sum over ``drawn``, weighted by level; ``sums`` adds up some of the records.

        A public term of every sum, such as a penalty, is counted once.
        """
        if set(self.factors) == {1.0}:
            return sums(records.take(drawn))
        zero = total = sums(records.take(_NOBODY))
        for factor, part in zip(self.factors, records.by_level(drawn), strict=True):
            if factor > 0 and len(part):
                total = total + factor * (sums(part) - zero)
        return total

    def amplify(self, step: Event | HasEvent, observer: Observer = Observer.ANYONE) -> Event:
        """Return the event of ``step`` for every level, with its rate and the noise over its weight."""
        event = event_of(step, self)
        parts = zip(self.sampling_rates, self.weights, self.factors, strict=True)
        return PersonalEvent(tuple(_level(event, *part, observer) for part in parts))


@dataclass(frozen=True, slots=True)
class PersonalCyclic(Personal):
    """A sampler at the rate of each record's level, from one of ``groups`` groups that take turns.

    Parameters
    ----------
    sampling_rates : sequence of float
        The expected fraction of a level's records in a batch, one per level; at most 1 / ``groups``.
    groups : int
        The number of groups: a record is eligible in one of as many turns, and noise may be correlated over
        them.

    Notes
    -----
    **Theorem.** With noise of at most ``groups`` bands (`farthing.BandedGaussian`), T turns cost a unit of
    level k at most ⌈T / groups⌉ answers with Gaussian noise on Poisson samples of rate q_k ``groups``, under
    add-remove, zero-out and replace-one within a level, against the budget's observer. Proof: the proof in
    `farthing.queries.correlated` considers one unit, given the groups and draws of all others. The unit is
    drawn at its eligible turns at the rate of its own level, and the proof uses no other rate.

    Examples
    --------
    >>> PersonalCyclic((0.01, 0.02), groups=4).plan(GaussianEvent(1.5), 8).event.events[1]
    PoissonEvent(rate=0.08, event=GaussianEvent(noise=1.5))
    """

    groups: int = 1
    _memory: Cyclic | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        Personal.__post_init__(self)
        if max(self.sampling_rates) * validate.count(groups=self.groups) > 1 + 2.0**-40:
            raise InvalidValue(
                f"sampling_rates * groups must be at most 1, got {max(self.sampling_rates)} * {self.groups}"
            )
        if set(self.weights) != {1.0}:
            raise Unsupported("PersonalCyclic has personal sampling rates only: leave out weights")

    @property
    def chances(self) -> Personal:
        """The sampler of a group at its turn."""
        return Personal(tuple(min(1.0, rate * self.groups) for rate in self.sampling_rates))

    @property
    def period(self) -> int:
        """The turns of a cycle."""
        return self.groups

    @property
    def separation(self) -> int:
        """The least number of turns between two eligible turns of a record."""
        return self.groups

    def begin(self) -> "PersonalCyclic":
        """Return this sampler with the groups of a new plan."""
        begun = PersonalCyclic(self.sampling_rates, groups=self.groups)
        object.__setattr__(begun, "_memory", Cyclic(1 / self.groups, self.groups).begin())
        return begun

    def draw_from(self, records: Leveled, stream: Stream, turn: int = 0) -> Indices:
        memory = self._memory or Cyclic(1 / self.groups, self.groups)
        now = np.asarray(memory.draw(len(records), stream, turn))
        parts = [
            group[stream.poisson_indices(rate, len(group))]
            for level, rate in enumerate(self.chances.sampling_rates)
            if rate > 0 and len(group := now[records.levels[now] == level])
        ]
        return np.sort(np.concatenate([_NOBODY, *parts]))

    def amplify(self, step: Event | HasEvent, observer: Observer = Observer.ANYONE) -> Event:
        return self.chances.amplify(event_of(step, self), observer)

    def plan(self, step: Event | HasEvent, steps: int, observer: Observer = Observer.ANYONE) -> RepeatedEvent:
        """Return the price of turns 0 to ``steps`` - 1: a record is eligible in one of ``groups`` turns."""
        one = self.amplify(event_of(step, self, validate.count(steps=steps)), observer)
        return RepeatedEvent(one, -(-steps // self.groups))


def _level(event: Event, rate: float, weight: float, factor: float, observer: Observer) -> Event:
    if rate == 0 or factor == 0:
        return NOTHING
    if weight < 1:
        if not isinstance(event, GaussianEvent):
            raise Unsupported(f"weights need Gaussian noise, got {event}: use sampling rates")
        event = GaussianEvent(math.nextafter(event.noise / weight, 0.0))
    if rate == 1 and observer is not Observer.COORDINATOR:
        return event
    return Poisson(validate.rate(sampling_rate=rate)).amplify(event, observer)
