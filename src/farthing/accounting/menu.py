"""Spend from a public menu: the next event may depend on the answers, at nearly the price of a fixed plan.

A menu is a finite list of events, fixed before the first answer. Events of entry m are bought in blocks of
``steps[m]`` for ``prices[m]`` units, and at most ``units`` units are spent in all. The entry that is bought
next, and the bought event that happens next, may depend on all answers so far.

**Theorem.** Let (P_m, Q_m) dominate one event of entry m in one direction (a record removed, say), and let r
be the density of the answers so far under D' over that under D. Put

    φ₀(r) = max(0, 1 - e^ε r),   φ_u(r) = max(φ_{u-1}(r), max_m E[φ_{u-c_m}(r L)]),

where L is a product of b_m independent Q_m/P_m under P_m, over the entries with price c_m <= u. Then the
answers of any strategy within U units satisfy H_{e^ε}(D ‖ D') <= φ_U(1): they are (ε, φ_U(1))-DP in that
direction.

*Proof.* φ₀ is convex, non-increasing and bounded, and products, averages and maxima preserve this. For such
f, E_{M(D)}[f(r M(D')/M(D))] <= E_{P_m}[f(r Q_m/P_m)] whenever the pair dominates M, because f is a mixture of
(k - r)₊, whose averages are hockey-stick divergences (Zhu, Dong & Wang 2022). Let u units be left and a_m
events of each entry be bought and not used, and put Ψ(r, u, a) = E[φ_u(r Π L_m)], over a_m independent
Q_m/P_m of each m. Ψ bounds the divergence that the strategy can still reach. (1) A bought event happens:
E[Ψ(r L_m, u, a - e_m)] = Ψ(r, u, a), and an event that the entry dominates reaches no more, as Ψ is convex
and non-increasing in r. (2) A block is bought: φ_u(r) >= E[φ_{u-c_m}(r L)] at every r, so Ψ(r, u - c_m, a +
b_m e_m) <= Ψ(r, u, a). (3) The strategy stops: E[Π L] <= 1, so Ψ(r, u, a) >= φ_u(r) >= φ₀(r). At the start r
= 1, u = U, a = 0. ∎

So the events of a block may be used in any order with other entries, at any time; the unused ones are not
refunded. The proof counts events that happen one by one: an entry costs ceil(n_m / b_m) c_m units after n_m
events.

Numerically, φ is kept on a grid of log(1/r) and rounded up throughout: below the grid it has the lowest grid
value, above it 1; the kernels are those of `accounting.loss_masses`. With a single entry of rate 1 this is
the exact filter of Gaussian DP up to rounding, and with a single entry the price is that of a fixed plan.

>>> from farthing.budget import Budget
>>> from farthing.queries.events import (GaussianEvent, PoissonEvent)
>>> noises = Menu(PoissonEvent(0.01, GaussianEvent(noise)) for noise in (2.0, 4.0))
>>> rule = noises(Budget(1.0, 1e-5))
>>> [rule.most(event) >= 0.97 * fixed for event, fixed in zip(noises.events, (2433, 11050))]
[True, True]
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, takewhile
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.accounting import calibrate, gaussian, loss_masses, pairs, pld
from farthing.accounting.filters import FILTERS, Additive, Filter, Totals
from farthing.accounting.loss_masses import EDGE, LossMasses, Pair, WorstChoice, repeated, ways
from farthing.accounting.personal import PersonalFilter
from farthing.accounting.tolerance import inner
from farthing.budget import Budget
from farthing.errors import InvalidValue, Unsupported
from farthing.queries.events import ComposedEvent, Event, RepeatedEvent
from farthing.queries.samplers import HasEvent

Array = NDArray[np.float64]

UNITS = 128  # default: a block is about this fraction of the budget
_POINTS = 12  # grid points per standard deviation of a block's loss
_CUT = 1e-4  # the share of δ that truncated tails may add
_TRIES = 6  # attempts to find prices
_FEW = 1000  # below this many events, counts are not rounded down before prices are set
_DEAREST = 64  # the most units of a block
_UNIT = 2.0**-53


@dataclass(frozen=True, slots=True)
class Menu:
    """A public menu of events to spend from adaptively: ``Ledger(budget, filter=Menu(events))``.

    Parameters
    ----------
    events : iterable of Event or of mechanisms
        The entries, such as ``Poisson(0.01).amplify(Gaussian(2.0))``. An event that is not an entry is
        charged as the cheapest entry that dominates it: less noise, or a larger sampling rate.
    weights : iterable of float, optional
        The price of each entry relative to its share of a fixed plan; 1 each by default, so that every entry
        alone gets about the same share. If an entry with little noise has weight 2, the others get more.
    units : int, default 128
        The least number of units of a budget. More units make smaller blocks: less is lost in blocks that are
        begun and not used up, but the share of a fixed plan falls slightly and finding prices takes longer.

    Examples
    --------
    >>> import farthing as ft
    >>> menu = ft.Menu(ft.Poisson(0.01).amplify(ft.Gaussian(noise)) for noise in (2.0, 4.0, 8.0))
    >>> ledger = ft.Ledger(ft.Budget(1.0, 1e-5), filter=menu)
    """

    events: tuple[Event, ...]
    weights: tuple[float, ...] | None
    units: int

    def __init__(
        self, events: Iterable[Event | HasEvent], weights: Iterable[float] | None = None, units: int = UNITS
    ) -> None:
        entries = tuple(one.unit_event() if isinstance(one, HasEvent) else one for one in events)
        if not entries:
            raise InvalidValue("a menu needs at least one event")
        if len(set(entries)) < len(entries):
            raise InvalidValue(f"the events of a menu must differ, got {list(entries)}")
        shares = None if weights is None else tuple(validate.positive(weight=weight) for weight in weights)
        if shares is not None and len(shares) != len(entries):
            raise InvalidValue(f"there must be {len(entries)} weights, one per event, got {len(shares)}")
        object.__setattr__(self, "events", entries)
        object.__setattr__(self, "weights", shares)
        object.__setattr__(self, "units", validate.count(units=units))

    def __call__(self, budget: Budget) -> "MenuFilter":
        """Return the filter of this menu for a budget, and find its prices."""
        validate.probability(delta=budget.delta)
        weights = self.weights or (1.0,) * len(self.events)
        fixed = tuple(_fixed(event, budget) / w for event, w in zip(self.events, weights, strict=True))
        for event, count in zip(self.events, fixed, strict=True):
            if count < 1:
                raise InvalidValue(
                    f"a budget of epsilon {budget.epsilon:g} and delta {budget.delta:g} does not pay for one "
                    f"{event}: leave it out of the menu, lower its weight or raise the budget"
                )
        return MenuFilter(budget, self.events, *_priced(self.events, fixed, budget, self.units))


@dataclass(frozen=True, slots=True)
class MenuFilter(Additive):
    """A privacy filter for events of a menu: ``steps`` events of an entry for ``prices`` of ``units`` units.

    Totals are counts, one per entry; n events use ceil(n / steps) blocks. Prices are certified when the
    filter is made, also when they come from a journal: `InvalidValue` is raised if some strategy within them
    could exceed the budget.
    """

    budget: Budget
    events: tuple[Event, ...]
    steps: tuple[int, ...]
    prices: tuple[int, ...]
    units: int
    name: ClassVar[str] = "menu"
    theorem: ClassVar[str] = (
        "farthing.accounting.menu: adaptive spending from a menu, by dominating pairs (Zhu, Dong & Wang 2022)"
    )

    def __post_init__(self) -> None:
        for name in ("steps", "prices"):
            counts = tuple(validate.count(**{name: count}) for count in getattr(self, name))
            if len(counts) != len(self.events):
                raise InvalidValue(
                    f"{name} must have one entry for each of {len(self.events)} events, got {len(counts)}"
                )
            object.__setattr__(self, name, counts)
        if _reach(self.events, self.steps, self.prices, self.units, self.budget) < self.units:
            raise InvalidValue(
                f"the prices {self.prices} for {self.steps} events in {self.units} units can exceed "
                "the budget: make the filter with Menu(events), which finds prices that do not"
            )

    def start(self) -> Totals:
        """Return zero events of every entry."""
        return [0.0] * len(self.events)

    def cost(self, event: Event) -> Totals:
        """Return 1 at the cheapest entry that dominates an event, 0 elsewhere."""
        fitting = [place for place, entry in enumerate(self.events) if self._covers(entry, event)]
        if not fitting:
            raise Unsupported(
                f"{event} is not on the menu, and no entry dominates it (by less noise or a larger sampling "
                f"rate): use one of {', '.join(map(str, self.events))}"
            )
        cheapest = min(fitting, key=lambda place: self.prices[place] / self.steps[place])
        return [float(place == cheapest) for place in range(len(self.events))]

    def add(self, total: Totals, event: Event, count: int = 1) -> Totals:
        """Return the counts after ``count`` more of ``event``; a negative count takes some back.

        The theorem counts events that happened: reserved ones that did not happen are refunded, and so is a
        block of which no event happened.
        """
        return [float(math.floor(one)) for one in Additive.add(self, total, event, count)]

    def fits(self, total: Totals) -> bool:
        """Return whether the blocks that were begun cost at most all units."""
        return self._used(total) <= self.units

    def fits_within(self, budget: Budget, total: Totals) -> bool:
        """Return whether the blocks that were begun keep every strategy within another, smaller budget."""
        return self._used(total) <= _reach(self.events, self.steps, self.prices, self.units, budget)

    def share(self, total: Totals) -> float:
        """Return the share of units that is used."""
        return self._used(total) / self.units

    def epsilon(self, total: Totals) -> float:
        """Return ε of these counts at the budget's δ, if they had been fixed in advance."""
        asked = [RepeatedEvent(event, int(n)) for event, n in zip(self.events, total, strict=True) if n >= 1]
        if not asked:
            return 0.0
        return pld.epsilon(ComposedEvent(tuple(asked)), self.budget.delta, self.budget.adjacency)

    def most(self, event: Event) -> int:
        """Return the number of events of one kind that the budget allows."""
        place = self.cost(event).index(1.0)
        return self.units // self.prices[place] * self.steps[place]

    def free(self, total: Totals, event: Event) -> int:
        """Return how many more of an event the last block covers."""
        place = self.cost(event).index(1.0)
        return -int(total[place]) % self.steps[place]

    def _used(self, total: Totals) -> int:
        parts = zip(total, self.steps, self.prices, strict=True)
        return sum(-(-int(count) // steps) * price for count, steps, price in parts)

    def _covers(self, entry: Event, event: Event) -> bool:
        if entry == event:
            return True
        try:
            both = [ways(one, self.budget.adjacency) for one in (entry, event)]
        except Unsupported:
            return False
        directions = range(max(len(way) for way in both))
        return all(_dominates(*(way[min(d, len(way) - 1)] for way in both)) for d in directions)


def _dominates(entry: Pair, event: Pair) -> bool:
    """Return whether one pair is known to dominate the other.

    A smaller shift is more noise on both sides of a pair; a smaller rate mixes both with the same
    distribution, by which no hockey-stick divergence grows: it is jointly convex, and at least (1 - a)₊.
    """
    match entry, event:
        case pairs.Shift(mu), pairs.Shift(other):
            return other <= mu
        case pairs.Shift(mu), pairs.Mixture((pairs.Piece(_, a, _, b, None),), 0.0):
            return abs(a) + abs(b) <= mu
        case pairs.SeenShift(rate, mu), pairs.SeenShift(other_rate, other):
            return other_rate <= rate and other <= mu
        case (pairs.TwoPoint(epsilon), pairs.TwoPoint(other) | pairs.DoubleExponential(other)):
            return other <= epsilon
        case pairs.DoubleExponential(epsilon), pairs.DoubleExponential(other):
            return other <= epsilon
        case WorstChoice(epsilon, rate), WorstChoice(other, other_rate):
            return other_rate <= rate and other <= epsilon
        case pairs.TwoPoint(epsilon), WorstChoice(other, other_rate):
            return other <= epsilon or math.log1p(other_rate * math.expm1(other)) * (1 + 1e-15) <= epsilon
        case pairs.Mixture((one,), 0.0), pairs.Mixture((two,), 0.0):
            alike = (one.p == 0.0) == (two.p == 0.0) and (one.r == 0.0) == (two.r == 0.0)
            rarer = two.p <= one.p and two.r <= one.r
            return alike and rarer and abs(two.a) <= abs(one.a) and abs(two.b) <= abs(one.b)
        case pairs.Mixture((one, _)), pairs.Mixture((two, _)):
            if one.start is None or two.start is None:  # not a fixed-size sample
                return False
            return two.p <= one.p and abs(two.a) <= abs(one.a)
    return False


@lru_cache(maxsize=64)
def _priced(
    events: tuple[Event, ...], fixed: tuple[float, ...], budget: Budget, units: int
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return the largest blocks that a few attempts find, for ``fixed`` events of each entry without loss."""
    scale, best = 0.99, None
    for _ in range(_TRIES):
        found = _blocks([scale * count for count in fixed], units)
        reached, total = _reach(events, *found, budget), found[-1]
        if reached >= total:
            best = found
            if reached <= 1.004 * total:
                return best
        elif best is not None:
            return best
        scale *= reached / total * 0.999
    if best is None:
        raise InvalidValue(f"no prices were found for {len(events)} entries in {units} units: raise units")
    return best


def _fixed(event: Event, budget: Budget) -> float:
    """Return the number of events of a fixed plan, with a fraction; it sets a price and proves nothing."""
    found = ways(event, budget.adjacency)
    ranged = isinstance(found[0], WorstChoice)

    @lru_cache
    def delta(count: int) -> float:
        if not ranged:
            return pld.delta(RepeatedEvent(event, count), budget.epsilon, budget.adjacency)
        step = gaussian.mu(budget.epsilon, budget.delta) / 100
        many = (repeated(way, count, step, budget.delta * _CUT) for way in found)
        return max(loss_masses.delta(losses, budget.epsilon) for losses in many)

    count = calibrate.steps(event, budget)  # a choice is priced as the worst ε-DP mechanism
    if ranged:
        count = bisect_left(range(1, 16 * count + 16), True, key=lambda n: delta(n) > budget.delta)
    if not 1 <= count < _FEW:
        return float(count)
    here, more = (math.log(max(delta(n), 1e-300)) for n in (count, count + 1))
    return (
        count + min(1.0, max(0.0, (math.log(budget.delta) - here) / (more - here)))
        if more > here
        else float(count)
    )


def _blocks(counts: list[float], units: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return the steps, prices and units that lose least of ``counts`` to integers.

    No entry is cheaper than its share, steps / price <= count / units, except one that takes all units.
    """

    def block(count: float, total: int) -> tuple[int, int]:
        prices = np.arange(1, min(total, _DEAREST) + 1)
        prices = np.append(prices, min(total, math.ceil(total / count)))
        steps = np.floor(prices * (count / total)).astype(np.int64)
        steps[-1] = max(1, steps[-1])  # an event that fits once, or lost by rounding the last price
        kept = total // prices * steps
        place = int(np.argmax(kept / count - prices / total / 4))  # the last block is half used on average
        return int(steps[place]), int(prices[place])

    def loss(total: int) -> float:
        found = [block(count, total) for count in counts]
        kept = [total // price * steps / count for (steps, price), count in zip(found, counts, strict=True)]
        return min(kept) - 0.004 * total / units - sum(price for _, price in found) / total / 4 / len(found)

    total = max(range(units, 6 * units + 1, max(1, units // 32)), key=loss)
    steps, prices = zip(*(block(count, total) for count in counts), strict=True)
    return steps, prices, total


@lru_cache(maxsize=256)
def _reach(
    events: tuple[Event, ...], steps: tuple[int, ...], prices: tuple[int, ...], units: int, budget: Budget
) -> int:
    """Return the units, at most 3 % above ``units``, that keep every strategy within the budget."""
    most, delta = math.ceil(1.03 * units), inner(budget.delta)
    for direction in range(max(len(ways(event, budget.adjacency)) for event in events)):
        deltas = islice(worst_deltas(events, steps, prices, units, budget, direction), most)
        most = sum(1 for _ in takewhile(lambda one: one <= delta, deltas))
    return most


def worst_deltas(
    events: tuple[Event, ...],
    steps: tuple[int, ...],
    prices: tuple[int, ...],
    units: int,
    budget: Budget,
    direction: int,
) -> Iterator[float]:
    """Yield φ_u(1) at the budget's ε for u = 1, 2, …, rounded up, in one direction.

    ``units`` sets the resolution of the grid.
    """
    mu = gaussian.mu(budget.epsilon, budget.delta)
    step = mu / math.sqrt(max(units // price for price in prices) or 1) / _POINTS
    every = [ways(event, budget.adjacency) for event in events]
    cut = inner(budget.delta) * _CUT / units
    kernels = [
        repeated(way[min(direction, len(way) - 1)], count, step, cut)
        for way, count in zip(every, steps, strict=True)
    ]
    largest = max(2 * units // price * count for price, count in zip(prices, steps, strict=True))
    wide = max(max(abs(k.first), abs(k.first + len(k.masses))) * step for k in kernels)
    epsilon = inner(budget.epsilon) - largest * EDGE * max(1.0, wide / 16)
    low, high = -math.ceil(8 * mu / step), math.ceil((budget.epsilon + 6 * mu) / step)
    losses = np.arange(low, high + 1) * step
    values = [np.maximum(0.0, -np.expm1(epsilon - losses)) * (1 + 8 * _UNIT)]
    for unit in range(1, 2 * units + 1):
        new = values[-1].copy()
        for kernel, price in zip(kernels, prices, strict=True):
            if price <= unit:
                np.maximum(new, _expected(kernel, values[-price]), out=new)
        values.append(np.minimum(new, 1.0))
        del values[: -max(prices)]
        yield float(values[-1][-low])


def _expected(kernel: LossMasses, values: Array) -> Array:
    """Return E[φ(r L)] at every point of the grid, rounded up."""
    length, first, last = len(kernel.masses), kernel.first, kernel.first + len(kernel.masses) - 1
    below, above = max(0, -first), max(0, last)
    padded = np.concatenate([np.full(below, values[0]), values, np.ones(above)])
    start = first + below
    sums = np.correlate(padded[start : start + len(values) + length - 1], kernel.masses, "valid")
    expected: Array = sums * (1 + (length + 4) * _UNIT) + kernel.infinite
    return expected


FILTERS_BY_NAME: dict[str, Callable[..., Filter]] = {
    **FILTERS,
    MenuFilter.name: MenuFilter,
    PersonalFilter.name: PersonalFilter,
}
