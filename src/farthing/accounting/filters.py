"""Define privacy filters, for queries whose next price may depend on the last answer.

A filter decides whether the next event still fits the budget, and its guarantee holds for *every* way of
choosing the next query from earlier answers. Each filter here turns an event into a vector of costs that add
up, and cites the theorem that allows stopping at a fixed total. Tight (PLD) prices do not have this property:
they are used only for plans that are fixed in advance (`Countdown`), and a filter raises for them.

The totals are kept in the ledger's journal, so a filter is a frozen description without state. Totals are
rounded up and compared with limits that are rounded down (`accounting.tolerance`).

>>> from farthing.budget import Budget
>>> from farthing.queries.events import GaussianEvent
>>> rule = GdpFilter(Budget(1.0, 1e-5))
>>> total = rule.add(rule.start(), GaussianEvent(10.0), 3)
>>> rule.fits(total), rule.fits(rule.add(total, GaussianEvent(10.0), 5))
(True, False)
"""

import math
import operator
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from scipy.special import ndtri_exp

from farthing import validate
from farthing.accounting import gaussian, pairs, transform, tuning, zcdp
from farthing.accounting.tolerance import MARGIN, inner, plus, times, within
from farthing.budget import Budget
from farthing.errors import InvalidValue, Unsupported
from farthing.queries.events import (
    ApproximateEvent,
    BoundedRangeEvent,
    Event,
    FixedSizeEvent,
    GaussianEvent,
    LaplaceEvent,
    PoissonEvent,
    PureEvent,
    ZcdpEvent,
    flatten,
)

Totals = list[float]


class Filter(Protocol):
    """A rule for adaptive spending; ``name`` and ``theorem`` are part of the guarantee."""

    name: ClassVar[str]
    theorem: ClassVar[str]

    @property
    def budget(self) -> Budget:
        """The budget of the filter."""

    def start(self) -> Totals:
        """Return the totals before the first charge."""

    def cost(self, event: Event) -> Totals:
        """Return the cost of one simple event; raise `Unsupported` if no theorem prices it."""

    def add(self, total: Totals, event: Event, count: int = 1) -> Totals:
        """Return the totals after ``count`` more of ``event``."""

    def fits(self, total: Totals) -> bool:
        """Return whether totals are within the budget."""

    def share(self, total: Totals) -> float:
        """Return the share of the budget that totals use, from 0 to 1."""

    def epsilon(self, total: Totals) -> float:
        """Return ε of totals at the budget's δ, for events that were fixed in advance."""


class Additive(ABC):
    """A privacy filter whose costs add."""

    @abstractmethod
    def cost(self, event: Event) -> Totals:
        """Return the cost of one simple event."""

    def add(self, total: Totals, event: Event, count: int = 1) -> Totals:
        """Return the totals after ``count`` more of ``event`` (negative: refunded), rounded up."""
        try:
            count = operator.index(count)
        except TypeError:
            raise InvalidValue(f"count must be an integer, got {count!r}") from None
        for part, each in flatten(event):
            if abs(each * count) >= 2**62:
                raise InvalidValue(f"count must be below 2**62 in all, got {each * count} of {part}")
            costs = zip(total, self.cost(part), strict=True)
            total = [plus(before, times(each * count, cost)) for before, cost in costs]
        return total


def _no_theorem(event: Event, name: str, instead: str) -> Unsupported:
    return Unsupported(f"the {name} filter has no price for {event}: {instead}")


@dataclass(frozen=True, slots=True)
class BasicFilter(Additive):
    """A privacy filter that adds up ε and δ: basic composition with adaptively chosen parameters.

    Parameters
    ----------
    budget : Budget
        The budget; its ε and δ are the limits of the two sums.

    Notes
    -----
    Rogers, Roth, Ullman & Vadhan 2016: sums of ε and of δ are a valid filter. The true cost is below the
    charge by more than the tolerance (`tolerance`).

    Examples
    --------
    >>> rule = BasicFilter(Budget(1.0, 0.0))
    >>> total = rule.add(rule.start(), PureEvent(0.3), 3)
    >>> rule.fits(total), rule.fits(rule.add(total, PureEvent(0.3)))
    (True, False)
    """

    budget: Budget
    name: ClassVar[str] = "basic"
    theorem: ClassVar[str] = "Rogers et al. 2016: fully adaptive basic composition"

    def start(self) -> Totals:
        return [0.0, 0.0]

    def cost(self, event: Event) -> Totals:
        match event:
            case ApproximateEvent(epsilon, delta):
                return [epsilon, delta]
            case _ if (priced := tuning.price(event, self.budget.adjacency)) is not None:
                return list(priced)
            case PureEvent() | BoundedRangeEvent() | LaplaceEvent() | PoissonEvent() | FixedSizeEvent():
                ways = pairs.of_event(event, self.budget.adjacency)
                if all(isinstance(way, pairs.TwoPoint | pairs.DoubleExponential) for way in ways):
                    return [max(way.epsilon for way in ways), 0.0]  # type: ignore[union-attr]
        raise _no_theorem(event, self.name, "it is not ε-DP for any ε; use the GDP or RDP filter")

    def fits(self, total: Totals) -> bool:
        return within(total[0], self.budget.epsilon) and within(total[1], self.budget.delta)

    def share(self, total: Totals) -> float:
        parts = [total[0] / self.budget.epsilon]
        if self.budget.delta:
            parts.append(total[1] / self.budget.delta)
        return max(parts)

    def epsilon(self, total: Totals) -> float:
        return total[0] if within(total[1], self.budget.delta) else math.inf


@dataclass(frozen=True, slots=True)
class ZcdpFilter(Additive):
    """A privacy filter that adds up ρ of zCDP (and δ of approximate zCDP).

    Parameters
    ----------
    budget : Budget
        The budget. ρ is the largest whose tight conversion meets (ε, δ).
    approximate : float, default 0.0
        A part of δ reserved for answers that are only approximately zCDP.

    Notes
    -----
    Whitehouse, Ramdas, Rogers & Wu 2023, Thm. 1 (and Feldman & Zrnic 2021): (approximate) zCDP composes fully
    adaptively if bounds on Σρ and Σδ are fixed in advance.

    Examples
    --------
    >>> rule = ZcdpFilter(Budget(1.0, 1e-5))
    >>> round(rule.share(rule.add(rule.start(), GaussianEvent(10.0))), 3)
    0.164
    """

    budget: Budget
    approximate: float = 0.0
    rho: float = field(init=False)
    name: ClassVar[str] = "zcdp"
    theorem: ClassVar[str] = "Whitehouse et al. 2023, Thm. 1; conversion: Canonne et al. 2020, Prop. 12"

    def __post_init__(self) -> None:
        reserve = validate.delta(approximate=self.approximate)
        if reserve >= self.budget.delta:
            raise InvalidValue(
                f"approximate must be below the budget's delta {self.budget.delta:g}, got {reserve:g}"
            )
        rest = self.budget.delta - reserve * (1 + 2 * MARGIN)  # the reserve fills up by the tolerance too
        object.__setattr__(self, "rho", zcdp.rho_tight(self.budget.epsilon, rest) if rest > 0 else 0.0)

    def start(self) -> Totals:
        return [0.0, 0.0]

    def cost(self, event: Event) -> Totals:
        shift = self.budget.adjacency.shift
        match event:
            case GaussianEvent(noise):
                return [zcdp.rho_of_gaussian(noise / shift), 0.0]
            case ZcdpEvent(rho, delta):
                return [rho, delta]
            case BoundedRangeEvent(epsilon):
                return [min(zcdp.rho_of_bounded_range(epsilon), zcdp.rho_of_pure(epsilon)), 0.0]
            case PureEvent(epsilon):
                return [zcdp.rho_of_pure(epsilon), 0.0]
            case LaplaceEvent(noise):
                return [zcdp.rho_of_pure(shift / noise), 0.0]
        raise _no_theorem(
            event, self.name, "sampling does not amplify zCDP; promise the query or use the RDP filter"
        )

    def fits(self, total: Totals) -> bool:
        return within(total[0], self.rho) and within(total[1], self.approximate)

    def share(self, total: Totals) -> float:
        rho = total[0] / self.rho if self.rho else math.inf
        return max(rho if total[0] else 0.0, total[1] / self.approximate if total[1] else 0.0)

    def epsilon(self, total: Totals) -> float:
        return zcdp.epsilon(total[0], self.budget.delta, total[1]) if total[0] else 0.0


@dataclass(frozen=True, slots=True)
class GdpFilter(Additive):
    """A privacy filter that adds up μ² of Gaussian answers and converts the sum exactly.

    Parameters
    ----------
    budget : Budget
        The budget. μ is the largest with δ_μ(ε) <= δ.

    Notes
    -----
    Smith & Thakurta 2022 (a filter with the parameters of non-adaptive composition); Koskela, Tobaben &
    Honkela 2023: if Σμᵢ² <= μ² always, the whole is μ-GDP. An ε-DP answer is μ-GDP with μ =
    2Φ⁻¹(e^ε/(1+e^ε)): the Gaussian trade-off curve is convex, and lies below the two segments of randomised
    response as soon as it passes below their corner.

    Examples
    --------
    >>> rule = GdpFilter(Budget(1.0, 1e-5))
    >>> round(rule.share(rule.add(rule.start(), GaussianEvent(10.0))), 3)
    0.139
    """

    budget: Budget
    mu: float = field(init=False)
    name: ClassVar[str] = "gdp"
    theorem: ClassVar[str] = (
        "Smith & Thakurta 2022: fully adaptive composition of Gaussian DP; "
        "conversion: Dong, Roth & Su 2022, Cor. 2.13"
    )

    def __post_init__(self) -> None:
        validate.probability(delta=self.budget.delta)
        object.__setattr__(self, "mu", gaussian.mu(self.budget.epsilon, self.budget.delta))

    def start(self) -> Totals:
        return [0.0]

    def cost(self, event: Event) -> Totals:
        shift = self.budget.adjacency.shift
        match event:
            case GaussianEvent(noise):
                return [shift / noise * (shift / noise)]
            case PureEvent(epsilon) | BoundedRangeEvent(epsilon):
                return [_mu_of_pure(epsilon) * _mu_of_pure(epsilon)]
            case LaplaceEvent(noise):
                return [_mu_of_pure(shift / noise) * _mu_of_pure(shift / noise)]
        raise _no_theorem(
            event, self.name, "a sampled query is not Gaussian; promise it or use the RDP filter"
        )

    def fits(self, total: Totals) -> bool:
        return within(total[0], self.mu * self.mu)

    def share(self, total: Totals) -> float:
        return total[0] / self.mu**2

    def epsilon(self, total: Totals) -> float:
        return gaussian.epsilon(math.sqrt(total[0]), self.budget.delta) if total[0] else 0.0


def _mu_of_pure(epsilon: float) -> float:
    if epsilon < 1e-3:  # Φ(x) - 1/2 >= (x - x³/6) / √(2π), and tanh(y) <= y - y³/3 + 2y⁵/15
        return epsilon * math.sqrt(math.pi / 2) * (1 + 1e-8)
    return float(-2 * ndtri_exp(-epsilon - math.log1p(math.exp(-epsilon)))) * (1 + 1e-12)


DEFAULT_ORDERS = (1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 128.0, 256.0, 512.0)


@dataclass(frozen=True, slots=True)
class RdpFilter(Additive):
    """A privacy filter that adds up Rényi divergences at fixed orders; the budget holds if one order fits.

    Parameters
    ----------
    budget : Budget
        The budget.
    orders : tuple of float, default `DEFAULT_ORDERS`
        The orders α > 1. Each further order costs log(number of orders) / (α - 1).

    Notes
    -----
    One order α: Feldman & Zrnic 2021. Several: let X_α = exp((α-1)(L - Σε(α))), where L is the privacy loss
    so far; it is a supermartingale with mean at most 1 for any choice of the next query. With weights Σw = 1
    so is ΣwX, and if Σε(α) <= ε - log(c_α / (w δ)) / (α-1) for some α at the stopping time, then (1 -
    e^(ε-L))₊ <= c_α e^((α-1)(L-ε)) <= δ w X_α, so its mean, which is δ(ε), is at most δ. The choice of α may
    depend on everything; the weights (log of their number, over α-1) pay for it.

    A choice of bounded range ε on a Poisson batch of rate q (add-remove, zero-out): given the other records
    in the batch, its losses are log(1 - q + q e^L), or minus that, with L in an interval [t - ε, t] that
    contains 0. They lie in an interval of length at most ε' = log(1 + q(e^ε - 1)), the length at t = ε, and
    cost ε'²/8 times α (`zcdp.rho_of_bounded_range`). The mixture over the other records costs no more: Rényi
    divergence is jointly quasi-convex (van Erven & Harremoës 2014, Thm. 13).

    Examples
    --------
    >>> rule = RdpFilter(Budget(1.0, 1e-5))
    >>> total = rule.add(rule.start(), PoissonEvent(0.01, GaussianEvent(2.0)), 100)
    >>> rule.fits(total), round(rule.epsilon(total), 2)
    (True, 0.28)
    """

    budget: Budget
    orders: tuple[float, ...] = DEFAULT_ORDERS
    limits: tuple[float, ...] = field(init=False)
    name: ClassVar[str] = "rdp"
    theorem: ClassVar[str] = "Feldman & Zrnic 2021: fully adaptive composition of Rényi DP, mixed over orders"

    def __post_init__(self) -> None:
        validate.probability(delta=self.budget.delta)
        if not self.orders or not all(_is_order(order) for order in self.orders):
            raise InvalidValue(f"orders must be finite numbers > 1, got {self.orders}")
        goal = math.log(inner(self.budget.delta)) - math.log(len(self.orders))
        converted = [_converted(order, goal) for order in self.orders]
        object.__setattr__(self, "limits", tuple(inner(self.budget.epsilon, 2) - size for size in converted))

    def start(self) -> Totals:
        return [0.0] * len(self.orders)

    def cost(self, event: Event) -> Totals:
        if isinstance(event, ZcdpEvent) and event.delta == 0.0:
            return [event.rho * order for order in self.orders]
        ways = pairs.of_event(event, self.budget.adjacency)
        costs = [
            max(transform.log_moment(way, order - 1) for way in ways) / (order - 1) for order in self.orders
        ]
        if _has_bounded_range(event):
            (pure,) = ways
            rho = zcdp.rho_of_bounded_range(pairs.largest_loss(pure))
            return [min(cost, rho * order) for cost, order in zip(costs, self.orders, strict=True)]
        return costs

    def fits(self, total: Totals) -> bool:
        return any(within(spent, limit) for spent, limit in zip(total, self.limits, strict=True) if limit > 0)

    def share(self, total: Totals) -> float:
        parts = zip(total, self.limits, strict=True)
        return min((spent / limit for spent, limit in parts if limit > 0), default=math.inf)

    def epsilon(self, total: Totals) -> float:
        if not any(total):
            return 0.0
        goal = math.log(self.budget.delta)
        parts = zip(total, self.orders, strict=True)
        return max(0.0, min(spent + _converted(order, goal) for spent, order in parts))


def _converted(order: float, goal: float) -> float:
    """Return the cost of converting Rényi DP at an order to (ε, e^goal), rounded up."""
    size = abs(_log_c(order)) + abs(goal)
    return (_log_c(order) - goal + 1e-15 * size) / (order - 1)


def _has_bounded_range(event: Event) -> bool:
    return isinstance(event.event if isinstance(event, PoissonEvent) else event, BoundedRangeEvent)


def _is_order(order: float) -> bool:
    return isinstance(order, int | float) and 1 < order < math.inf


def _log_c(order: float) -> float:
    """Return log sup_t (1 - e^-t) e^(-(α-1)t) = log of (1/α) (1 - 1/α)^(α-1)."""
    return (order - 1) * math.log1p(-1 / order) - math.log(order)


FILTERS: dict[str, type[BasicFilter | ZcdpFilter | GdpFilter | RdpFilter]] = {
    rule.name: rule for rule in (BasicFilter, ZcdpFilter, GdpFilter, RdpFilter)
}
