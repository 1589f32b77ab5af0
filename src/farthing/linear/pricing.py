"""Prices of methods that say what an answer may cost and have its noise follow from that.

A price is a ρ of zCDP, as if everybody were asked. Everybody is, through a `ZcdpFilter`, or a Poisson batch,
which an `RdpFilter` charges with less (`Pricing`). Either filter allows prices that are chosen on the way.

>>> from farthing.queries.bounds import ClipNorm
>>> from farthing.linear.losses import (Gradient, logistic)
>>> from farthing.queries.mechanisms import Gaussian
>>> from farthing.queries.samplers import Everyone
>>> from farthing.data.tables import Features
>>> gradient = Query(Everyone(), Gradient(logistic, Features(2)), ClipNorm(1.0), Gaussian(1.0))
>>> batches = Pricing.of(Budget(1.0, 1e-6), rate=0.01)
>>> round(Pricing.of(Budget(1.0, 1e-6)).each([(gradient, 1.0)], splits=50), 6)
0.000487
>>> round(batches.each([(gradient, 1.0)], splits=50), 3)
0.292
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from farthing import validate
from farthing.accounting.filters import RdpFilter, Totals, ZcdpFilter
from farthing.budget import Adjacency, Budget
from farthing.errors import BudgetSpent, InvalidValue, Unsupported
from farthing.ledger.ledger import Ledger
from farthing.queries.query import Answer, Query
from farthing.queries.samplers import Poisson

_ROUNDED = 1 - 1e-9  # so that rounds, added up in floats, still fit
_REFERENCE = 1e6  # noise at which a price is read off: there it falls with the square of the noise, exactly


@dataclass(frozen=True, slots=True)
class Pricing:
    """What noise a ρ buys, and what is charged for it: ρ itself, or less on a batch of a sampling ``rate``.

    ``rho`` is what a run may use of the budget, by default all of it.
    """

    rule: ZcdpFilter
    rho: float
    rate: float | None = None

    @classmethod
    def of(cls, budget: Budget, rate: float | None = None, rho: float | None = None) -> "Pricing":
        rule = ZcdpFilter(budget)
        if rate is not None:
            validate.rate(rate=rate)
            if rho is not None:
                raise InvalidValue("rho is of zCDP, which batches do not use: leave rho or rate out")
            if budget.adjacency is Adjacency.REPLACE_ONE:
                raise Unsupported(
                    "no price of a choice on a batch is known under replace-one: leave rate out"
                )
        if rho is not None and validate.positive(rho=rho) > rule.rho:
            raise InvalidValue(f"rho must be at most the {rule.rho:g} of {budget}, got {rho:g}")
        return cls(rule, rule.rho if rho is None else rho, rate)

    @property
    def filter(self) -> type[ZcdpFilter] | type[RdpFilter]:
        """The filter that the ledger needs."""
        return ZcdpFilter if self.rate is None else RdpFilter

    def query(self, query: Query, rho: float) -> Query:
        """The query, on a batch if there is a rate, with the noise at which ``rho`` asks everybody."""
        found = at_price(query, rho, self.rule)
        return found if self.rate is None else replace(found, sampler=Poisson(self.rate))

    def each(self, asked: list[tuple[Query, float]], splits: float, before: Query | None = None) -> float:
        """The ρ of a round, divided among its queries by these parts, of which ``splits`` fit the budget.

        ``before`` is an answer that is bought first.
        """
        splits, opened = validate.positive(splits=splits), self._cost(before) if before else None
        if self.rate is None:
            return (self.rho - (opened[0] if opened else 0.0)) * _ROUNDED / splits
        rule = RdpFilter(self.rule.budget)

        def fits(rho: float) -> bool:
            total = opened or rule.start()
            for query, part in asked:
                cost = self._cost(self.query(query, part * rho))
                total = [spent + splits / _ROUNDED * more for spent, more in zip(total, cost, strict=True)]
            return rule.fits(total)

        return _largest(fits, self.rho / splits)

    def rho_of(self, query: Query, noise: float) -> float:
        """The ρ that asking everybody with this noise costs."""
        asked = _with_noise(query, validate.positive(noise_multiplier=noise))
        return self.rule.cost(asked.price(self.rule.budget))[0]

    def _cost(self, query: Query) -> Totals:
        return self.filter(self.rule.budget).cost(query.price(self.rule.budget))


def _largest(fits: Callable[[float], bool], start: float) -> float:
    """The largest number that fits, or up to 1e-4 of it less."""
    low = start
    while not fits(low):
        low /= 2
    while fits(2 * low):
        low *= 2
    high = 2 * low
    while high > low * (1 + 1e-4):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class Limited:
    """A ledger that ends when its answers cost ``pricing.rho`` of zCDP together, whatever it has left."""

    def __init__(self, ledger: Ledger, pricing: Pricing) -> None:
        self._ledger, self._pricing, self._spent = ledger, pricing, pricing.rule.start()

    def ask(self, query: Query, w: Any = None) -> Answer:
        rule, rho = self._pricing.rule, self._pricing.rho
        if self._pricing.rate is None and rho < rule.rho:
            total = rule.add(self._spent, query.price(rule.budget))
            if total[0] > rho:
                raise BudgetSpent(f"nothing is left of rho={rho:g}")
            self._spent = total
        return self._ledger.ask(query, w)


def at_price(query: Query, rho: float, rule: ZcdpFilter) -> Query:
    """The query with the noise at which it costs ``rho`` under the budget's adjacency."""
    faint = _with_noise(query, _REFERENCE)
    return _with_noise(query, _REFERENCE * math.sqrt(rule.cost(faint.price(rule.budget))[0] / rho))


def _with_noise(query: Query, noise: float) -> Query:
    mechanism: Any = query.mechanism
    return replace(query, mechanism=replace(mechanism, noise=noise))
