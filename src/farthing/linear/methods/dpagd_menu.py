"""Build a menu for DP-AGD on batches, which prices gradients, choices and the mean nearly like a promise.

DP-AGD decides adaptively how precisely to buy its next gradient, and how often. On Poisson batches a Rényi
filter prices this; a menu (`farthing.accounting.menu`) allows the same at a lower price. Its entries are the
queries of a run: the first gradients, more precise ones (``levels`` of them, each 1 + γ times as precise as
the last), repeated gradients, choices of a step by `NoisyMax`, and the sum of all rows that opens `dpagd`. A
choice is priced by its range (`farthing.accounting.loss_masses`).

Guarantee: that of the menu, for any adaptive choice of queries and stopping time; add-remove and zero-out.

``ft.Ledger(budget, filter=dpagd_menu(budget, sampling_rate=0.1))`` is a ledger for it; finding prices takes
seconds.
"""

from dataclasses import dataclass

from farthing import validate
from farthing.accounting.filters import ZcdpFilter
from farthing.accounting.menu import Menu, MenuFilter
from farthing.budget import Adjacency, Budget
from farthing.errors import InvalidValue, Unsupported
from farthing.ledger.ledger import Ledger
from farthing.queries.events import BoundedRangeEvent, Event, GaussianEvent, PoissonEvent
from farthing.queries.query import Query

_LESS = 1 - 1e-9  # gives a query slightly more noise than its entry, after rounding
_TRIES = 6


def dpagd_menu(
    budget: Budget,
    sampling_rate: float,
    *,
    splits: float = 18.0,
    search: float = 0.2,
    growth: float | None = 0.1,
    opening: float = 0.05,
    levels: int = 3,
) -> Menu:
    """Return a menu that pays for ``splits`` rounds of `dpagd` on batches without repeated gradients.

    Parameters
    ----------
    budget : Budget
        The budget of the ledger.
    sampling_rate : float
        The probability that a record is in a batch.
    splits, search, growth, opening
        As for `dpagd`, which takes the noise of its gradients and choices from the menu.
    levels : int, default 3
        The number of prices of gradients; the price stays at the last one after ``levels`` - 1 increases.
    """
    validate.rate(sampling_rate=sampling_rate)
    if budget.adjacency is Adjacency.REPLACE_ONE:
        raise Unsupported("no price of a choice on a batch is known under replace-one")
    if not 0 < validate.positive(search=search) < 1 or not validate.non_negative(opening=opening) < 1:
        raise InvalidValue(f"search and opening must be below 1, got {search!r} and {opening!r}")
    rounds, rho = validate.positive(splits=splits), ZcdpFilter(budget).rho
    made = _Entries(sampling_rate, search, growth, opening * rho, validate.count(levels=levels))
    each = rho / rounds / sampling_rate**2
    best: Menu | None = None
    for _ in range(_TRIES):  # shares are nearly in proportion to prices
        menu = Menu(made.events(each))
        try:
            share = _share(menu(budget), rounds, opening > 0)
        except InvalidValue:  # one entry alone exceeds the budget
            each /= 4
            continue
        if share <= 1:
            best = menu
            if share > 0.95:
                break
        each *= min(0.98 / share, 4.0)
    if best is None:
        raise InvalidValue(f"no menu was found for {splits:g} rounds of {budget}: use other splits")
    return best


@dataclass(frozen=True, slots=True)
class _Entries:
    """The entries of a menu for rounds of this price in zCDP, as for queries to all records."""

    rate: float
    search: float
    growth: float | None
    opening: float
    levels: int

    def events(self, each: float) -> list[Event]:
        """Return the first gradient, the choice, and all other possible events."""
        gradient, found = (1 - self.search) * each, list[Event]()
        for _ in range(1 if self.growth is None else self.levels):
            found.append(self._sampled(GaussianEvent((0.5 / gradient) ** 0.5)))
            gradient += (self.growth or 0.0) * gradient
        found.insert(1, self._sampled(BoundedRangeEvent((8 * self.search * each) ** 0.5)))
        if self.growth is not None and self.growth < 1:
            found.append(self._sampled(GaussianEvent((0.5 / (self.growth * gradient)) ** 0.5)))
        return [*found, GaussianEvent((0.5 / self.opening) ** 0.5 * _LESS)] if self.opening else found

    def _sampled(self, event: Event) -> Event:
        return event if self.rate == 1 else PoissonEvent(self.rate, event)


def _share(rule: MenuFilter, rounds: float, opens: bool) -> float:
    """Return the share of all units that these rounds take, including an opening."""
    total = rule.add(rule.start(), rule.events[-1], int(opens))
    for event in rule.events[:2]:
        total = rule.add(total, event, round(rounds))
    return rule.share(total)


def on_menu(ledger: Ledger, sampling_rate: float | None) -> bool:
    """Return whether a run spends from a menu."""
    menu = isinstance(getattr(ledger, "filter", None), MenuFilter)
    if menu and sampling_rate is None:
        raise InvalidValue("a menu of DP-AGD is for batches: pass the sampling_rate of the menu")
    return menu


def of_menu(ledger: Ledger, sampling_rate: float) -> tuple[float, float]:
    """Return the prices of the first gradient and of a choice in zCDP on a ledger with such a menu.

    Raises `Unsupported`, before anything is charged, if the menu is not for these batches.
    """
    assert isinstance(ledger.filter, MenuFilter)
    gradient, choice, *_ = *ledger.filter.events, GaussianEvent(1.0)
    noise, epsilon = getattr(gradient, "event", gradient), getattr(choice, "event", choice)
    rates = {getattr(event, "rate", 1.0) for event in (gradient, choice)}
    if (
        isinstance(noise, GaussianEvent)
        and isinstance(epsilon, BoundedRangeEvent)
        and rates == {sampling_rate}
    ):
        return 0.5 / noise.noise**2 * _LESS, epsilon.epsilon**2 / 8 * _LESS
    raise Unsupported(
        f"this menu is not for DP-AGD on batches of rate {sampling_rate:g}: open the ledger with "
        "filter=dpagd_menu(budget, sampling_rate) (farthing.linear.methods.dpagd_menu)"
    )


def sold(ledger: Ledger, query: Query) -> bool:
    """Return whether a ledger's menu has a price for a query; other filters price any noise."""
    if not isinstance(getattr(ledger, "filter", None), MenuFilter):
        return True
    try:
        ledger.filter.cost(query.price(ledger.budget))
    except Unsupported:
        return False
    return True
