"""Divide a budget among the answers of a method: how much noise each answer gets.

`BudgetSchedule` divides μ² of Gaussian DP among Gaussian answers. Its parts are fixed in advance and add up
to at most 1, so the filter never refuses one. By adaptive composition of Gaussian mechanisms (Dong, Roth & Su
2022, Cor. 3.3) the whole is μ-GDP, also if a bound, a map or a weight depends on earlier answers: the noise
scales with the bound, and the price stays the same. Gaussian answers with μ₁, μ₂, ... cost Σμᵢ² in every
filter that prices them (`gaussian_mu`).

>>> import farthing as ft
>>> from farthing.linear.losses import (LinearGradient, Gram, logistic)
>>> from farthing.data.tables import (Features, Table)
>>> ledger = ft.Ledger(ft.Budget(1.0, 1e-6))
>>> schedule = BudgetSchedule(ledger.over(Table(np.ones((100, 1)))), 100)
>>> value, deviation = schedule.mean(0.25, Gram(Features(1)), ft.ClipOuter(2.0), mechanism=ft.Gaussian)
>>> value.shape, round(ledger.share, 6), len(schedule.receipts())
((2, 2), 0.25, 1)
>>> noise = noise_of(ft.ClipNorm(2.0), ledger.budget.adjacency, gaussian_mu(ledger) / 2)  # a quarter
>>> ledger.affords(GaussianEvent(noise), times=4), ledger.affords(GaussianEvent(noise), times=5)
(True, False)

`Pricing` is for methods that choose the price of an answer adaptively. A price is a ρ of zCDP for a query to
all records. Queries go to all records under a `ZcdpFilter`, or to a Poisson batch under an `RdpFilter`, which
charges less. Either filter allows adaptive prices.

>>> gradient = Query(Everyone(), LinearGradient(logistic, Features(2)), ft.ClipNorm(1.0), Gaussian(1.0))
>>> round(Pricing.of(Budget(1.0, 1e-6)).each([(gradient, 1.0)], splits=50), 6)
0.000487
>>> round(Pricing.of(Budget(1.0, 1e-6), sampling_rate=0.01).each([(gradient, 1.0)], splits=50), 3)
0.292
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.accounting.filters import RdpFilter, Totals, ZcdpFilter
from farthing.accounting.personal import everyone
from farthing.budget import Adjacency, Budget
from farthing.errors import BudgetSpent, InvalidValue, Unsupported
from farthing.ledger.ledger import Ledger
from farthing.queries.bounds import Bound
from farthing.queries.events import BoundedRangeEvent, GaussianEvent
from farthing.queries.mechanisms import Gaussian
from farthing.queries.query import Answer, Contribution, Query, Receipt
from farthing.queries.samplers import Everyone, Poisson

_ROUNDED = 1 - 1e-9  # so that float sums of parts still fit
_HALVINGS = 40
_REMAINDER = 2.0**-27  # rounding may leave this share of a spent budget


def refuse_remainder(ledger: Ledger, kind: str) -> None:
    """Raise `BudgetSpent` if only a rounding error of the budget is left."""
    if 1 - ledger.share < _REMAINDER:
        raise BudgetSpent(f"nothing that {kind} could use is left of {ledger.budget}")


def gaussian_mu(ledger: Ledger) -> float:
    """Return the largest μ such that Gaussian answers with Σμᵢ² = μ² fit what the ledger has left.

    For personal budgets it is the μ of the largest; the others have weights (`farthing.accounting.personal`).
    """
    shift, sampler = ledger.budget.adjacency.shift, everyone(ledger.filter)

    def fits(mu: float) -> bool:
        return ledger.affords(sampler.amplify(GaussianEvent(shift / mu)))

    refuse_remainder(ledger, "a Gaussian answer")
    high = ledger.budget.mu
    if fits(high):
        return high * _ROUNDED
    low = high
    while not fits(low):
        low /= 2
        if low < high * 2.0**-_HALVINGS:
            raise BudgetSpent(f"nothing that a Gaussian answer could use is left of {ledger.budget}")
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * _ROUNDED


def noise_of(bound: Bound, adjacency: Adjacency, mu: float) -> float:
    """Return the noise multiplier that makes a sum of contributions within ``bound`` μ-GDP."""
    return bound.sensitivity(adjacency) / (bound.norm() * mu)


def choice_epsilon(ledger: Ledger, choices: int = 1) -> float:
    """Return the largest ε at which ``choices`` exponential mechanisms fit the remaining budget."""

    def fits(epsilon: float) -> bool:
        return ledger.affords(BoundedRangeEvent(epsilon), choices)

    refuse_remainder(ledger, "a choice")
    low = high = 8 * ledger.budget.epsilon
    while not fits(low):
        low, high = low / 2, low
        if low < 1e-12:
            raise BudgetSpent(f"{choices} choices, however noisy, do not fit what is left of {ledger.budget}")
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * _ROUNDED


_LEAST = 2.0**-10  # a fraction of μ: a millionth of μ²


class BudgetSchedule:
    """A plan that divides the remaining budget of a ledger among Gaussian means.

    ``records`` is the public number of records (weighted, for personal budgets), the divisor of sums.
    """

    def __init__(self, ledger: Ledger, records: int) -> None:
        self.ledger, self.records, self.mu = ledger, records, gaussian_mu(ledger)
        self._sampler = everyone(ledger.filter)
        if self.mu < _LEAST * ledger.budget.mu:  # a rounding error of a spent part
            raise BudgetSpent(f"nothing that a Gaussian answer could use is left of {ledger.budget}")
        self._receipts: list[Receipt] = []

    def deviation(self, part: float, bound: Bound) -> float:
        """Return the noise on a mean of contributions with this bound, in units of ``bound.scale``."""
        return self._noise(part, bound) * bound.norm() / self.records

    def _noise(self, part: float, bound: Bound) -> float:
        adjacency, mu = self.ledger.budget.adjacency, self.mu * math.sqrt(part)
        if isinstance(self._sampler, Everyone):
            return noise_of(bound, adjacency, mu)
        return adjacency.shift / mu  # weights are priced by the general shift, not by the bound's sensitivity

    def mean(
        self,
        part: float,
        contribution: Contribution,
        bound: Bound,
        w: Any = None,
        mechanism: type[Gaussian] = Gaussian,
    ) -> tuple[NDArray[np.float64], float]:
        """Query a mean that costs ``part`` of μ²; return it with its noise (`deviation`)."""
        noise = mechanism(self._noise(part, bound))
        answer = self.ledger.ask(Query(self._sampler, contribution, bound, noise), w)
        self._receipts.append(answer.receipt)
        return answer.value / self.records, self.deviation(part, bound)

    def receipts(self) -> tuple[Receipt, ...]:
        """Return the receipts since the last call, for a `Step`."""
        receipts, self._receipts = tuple(self._receipts), []
        return receipts


_REFERENCE = 1e6  # a noise at which the price is proportional to 1 / noise²


@dataclass(frozen=True, slots=True)
class Pricing:
    """A price list in zCDP: the noise for a ρ, on all records or on batches of a ``sampling_rate``.

    ``rho`` is the part of the budget that a run may use, by default all of it.
    """

    rule: ZcdpFilter
    rho: float
    sampling_rate: float | None = None

    @classmethod
    def of(cls, budget: Budget, sampling_rate: float | None = None, rho: float | None = None) -> "Pricing":
        rule = ZcdpFilter(budget)
        if sampling_rate is not None:
            validate.rate(sampling_rate=sampling_rate)
            if rho is not None:
                raise InvalidValue("rho is for zCDP, which batches do not use: pass rho or sampling_rate")
            if budget.adjacency is Adjacency.REPLACE_ONE:
                raise Unsupported(
                    "no price of a choice on a batch is known under replace-one: leave sampling_rate out"
                )
        if rho is not None and validate.positive(rho=rho) > rule.rho:
            raise InvalidValue(f"rho must be at most the {rule.rho:g} of {budget}, got {rho:g}")
        return cls(rule, rule.rho if rho is None else rho, sampling_rate)

    @property
    def filter(self) -> type[ZcdpFilter] | type[RdpFilter]:
        """Return the filter that the ledger needs."""
        return ZcdpFilter if self.sampling_rate is None else RdpFilter

    def query(self, query: Query, rho: float) -> Query:
        """Return the query at the noise that costs ``rho`` on all records, on a batch if there is a rate."""
        found = at_price(query, rho, self.rule)
        return found if self.sampling_rate is None else replace(found, sampler=Poisson(self.sampling_rate))

    def each(self, asked: list[tuple[Query, float]], splits: float, before: Query | None = None) -> float:
        """Return the ρ of a round of which ``splits`` fit the budget.

        The round is divided among its queries by these parts; ``before`` is an answer that is bought first.
        """
        splits, opened = validate.positive(splits=splits), self._cost(before) if before else None
        if self.sampling_rate is None:
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
        """Return the ρ of a query to all records with this noise."""
        asked = _with_noise(query, validate.positive(noise_multiplier=noise))
        return self.rule.cost(asked.price(self.rule.budget))[0]

    def _cost(self, query: Query) -> Totals:
        return self.filter(self.rule.budget).cost(query.price(self.rule.budget))


def _largest(fits: Callable[[float], bool], start: float) -> float:
    """Return the largest number that fits, to within a relative error of 1e-4 below it."""
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
    """A ledger that ends when its answers cost ``pricing.rho`` of zCDP in all."""

    def __init__(self, ledger: Ledger, pricing: Pricing) -> None:
        self._ledger, self._pricing, self._spent = ledger, pricing, pricing.rule.start()

    def ask(self, query: Query, w: Any = None) -> Answer:
        rule, rho = self._pricing.rule, self._pricing.rho
        if self._pricing.sampling_rate is None and rho < rule.rho:
            total = rule.add(self._spent, query.price(rule.budget))
            if total[0] > rho:
                raise BudgetSpent(f"nothing is left of rho={rho:g}")
            self._spent = total
        return self._ledger.ask(query, w)


def at_price(query: Query, rho: float, rule: ZcdpFilter) -> Query:
    """Return the query with the noise at which it costs ``rho`` under the budget's adjacency."""
    faint = _with_noise(query, _REFERENCE)
    return _with_noise(query, _REFERENCE * math.sqrt(rule.cost(faint.price(rule.budget))[0] / rho))


def _with_noise(query: Query, noise: float) -> Query:
    mechanism: Any = query.mechanism
    return replace(query, mechanism=replace(mechanism, noise_multiplier=noise))
