"""A menu for DP-AGD on batches: gradients, choices and the rows' mean, each at nearly a promise's price.

DP-AGD decides on the way how exactly to buy its next gradient, and how often. On Poisson batches that was
priced by a Rényi filter; a menu (`farthing.accounting.menu`) has the same freedom for less. Its entries are
what a run may come to ask: the first gradients, more exact ones (``levels`` of them, each 1 + γ times as
exact as the last), gradients bought again, choices of a step by `NoisyMax`, and the sum of all rows that
`dpagd` opens with. A choice is priced by its range (`farthing.accounting.loss_masses`).

Guarantee: that of the menu, whatever is asked and whenever it ends; add-remove and zero-out.

``ft.Ledger(budget, filter=dpagd_menu(budget, sampling_rate=0.1))`` is a ledger for it; to price one takes
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

_LESS = 1 - 1e-9  # so that what is asked has a little more noise than its entry, after rounding
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
    """Return a menu from which ``splits`` rounds of `dpagd` on batches can be bought if none is bought again.

    Parameters
    ----------
    budget : Budget
        The budget of the ledger that it is for.
    sampling_rate : float
        The probability of a record to be in a batch.
    splits, search, growth, opening
        As for `dpagd`, which takes the noise of its gradients and choices from the menu.
    levels : int, default 3
        How many prices of gradients there are: after so many less one that were bought again, they stay.
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
        except InvalidValue:  # an entry alone is dearer than all
            each /= 4
            continue
        if share <= 1:
            best = menu
            if share > 0.95:
                break
        each *= min(0.98 / share, 4.0)
    if best is None:
        raise InvalidValue(f"no menu was found for {splits:g} rounds of {budget}: ask for other splits")
    return best


@dataclass(frozen=True, slots=True)
class _Entries:
    """The entries of a menu for rounds that cost so much of zCDP, as if everybody were asked."""

    rate: float
    search: float
    growth: float | None
    opening: float
    levels: int

    def events(self, each: float) -> list[Event]:
        """Return the first gradient, the choice, and whatever else may come."""
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
    """Return the part of all units that so many rounds take, an opening included."""
    total = rule.add(rule.start(), rule.events[-1], int(opens))
    for event in rule.events[:2]:
        total = rule.add(total, event, round(rounds))
    return rule.share(total)


def on_menu(ledger: Ledger, sampling_rate: float | None) -> bool:
    """Return whether a run is to spend from a menu."""
    menu = isinstance(getattr(ledger, "filter", None), MenuFilter)
    if menu and sampling_rate is None:
        raise InvalidValue("a menu of DP-AGD is one of batches: give sampling_rate, that of the menu")
    return menu


def of_menu(ledger: Ledger, sampling_rate: float) -> tuple[float, float]:
    """Return what the first gradient and a choice cost in zCDP on a ledger with such a menu.

    Raises `Unsupported`, before anything is charged, where the menu is none for these batches.
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
