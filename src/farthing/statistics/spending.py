"""Spend a part of a budget on a statistic, with the noise that fits it, and report the error.

A statistic is one or more queries in which every record's term has a known norm. With a ledger it takes the
part (``epsilon``, ``delta``) of it, or the remainder; without one it makes its own ledger. Noise is Gaussian
if the part is accounted by μ-GDP or ρ-zCDP, and Laplace if it is accounted by pure ε; without a ledger it is
the one with the smaller deviation, which only public numbers decide.

Price. A part of share s of μ² (of ρ, of ε) is spent by noise whose event costs exactly that: a Gaussian
answer of noise multiplier m on a bound of norm C and sensitivity Δ is (Δ / (m C))-GDP (Dong, Roth & Su
2022, Thm. 3.7), a Laplace answer (Δ₁ / (m C₁))-DP (Dwork et al. 2006), a choice by `NoisyMax` of bounded
range ε is ε-DP and ε²/8-zCDP (Dong et al. 2020; Cesar & Rogers 2021). The ledger derives all of these from
the query again, and refuses a query that does not fit. Shares add up by the ledger's filter.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtri

from farthing.accounting.filters import BasicFilter, GdpFilter, ZcdpFilter
from farthing.budget import Adjacency, Budget, Guarantee
from farthing.errors import InvalidValue, Unsupported
from farthing.ledger.ledger import Ledger
from farthing.queries.bounds import Bound, ClipNorm
from farthing.queries.mechanisms import Gaussian, Laplace
from farthing.queries.query import Query, Records
from farthing.queries.samplers import Everyone

Array = NDArray[np.float64]

_ROUNDED = 1 - 2.0**-30  # so that shares that add up to one fit after rounding
_SHY = 1 - 2.0**-24  # for choices: the filter rounds the μ of a small ε up by 1e-8
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, eq=False)
class Statistic:
    """A released statistic with its error from noise and its guarantee.

    Parameters
    ----------
    value : float or ndarray
        The statistic, with noise.
    error : float or ndarray
        The distance from the statistic without noise that is not exceeded with probability 0.95 each, from
        public numbers and released values. It does not include sampling error.
    privacy : Guarantee
        The guarantee of everything that was released for it.
    groups : tuple
        The labels of the values: groups, or edges of bins; empty if there is one value.

    Examples
    --------
    >>> import farthing as ft
    >>> found = ft.count(range(1000), epsilon=1.0, delta=1e-6)
    >>> bool(abs(found.value - 1000) < 40), round(found.error, 2)
    (True, 3.0)
    """

    value: Any
    error: Any
    privacy: Guarantee
    groups: tuple[Any, ...] = ()

    def __repr__(self) -> str:
        if not self.groups:
            return f"{self.value:.6g} ± {self.error:.2g} {self.privacy}"
        return f"<Statistic of {len(self.groups)} values, {self.privacy}>"


class Allowance:
    """The part of a budget that a statistic spends, in shares.

    Parameters
    ----------
    ledger : Ledger
        A ledger that is spent to its end: a part of another, or a new one.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, rule = ledger, ledger.filter
        if isinstance(rule, GdpFilter):
            self._size, self.gaussian = rule.mu**2, True
        elif isinstance(rule, ZcdpFilter):
            self._size, self.gaussian = 2 * rule.rho, True  # ρ-zCDP of Gaussian noise is μ²/2
        elif isinstance(rule, BasicFilter):
            self._size, self.gaussian = rule.budget.epsilon, False
        else:
            raise Unsupported(
                f"statistics need a ledger with a GDP, zCDP or basic filter, got {rule.name!r}: "
                "Ledger(budget) has one"
            )

    @classmethod
    def of(
        cls,
        ledger: Ledger | None,
        epsilon: float | None,
        delta: float | None,
        norms: tuple[float, float] = (1.0, 1.0),
    ) -> "Allowance":
        """Return a part of a ledger, or a new one; ``norms`` are the L1 and L2 norms of a record's term."""
        ledger = spendable(ledger)
        if ledger is None:
            if epsilon is None:
                raise InvalidValue("pass epsilon (and delta, if it is not 0), or a ledger to spend from")
            budget = Budget(epsilon, 0.0 if delta is None else delta)
            return cls(Ledger(budget, filter=_better(budget, norms)))
        if isinstance(ledger.filter, BasicFilter):
            if epsilon is None and delta is None:
                return cls(ledger.allot(filter=_better(ledger.rest, norms)))
            part = ledger.budget.with_(epsilon or 0.0, 0.0 if delta is None else delta)
            return cls(ledger.allot(part.epsilon, part.delta, filter=_better(part, norms)))
        return cls(ledger.allot(epsilon, delta))

    @property
    def adjacency(self) -> Adjacency:
        """The relation between neighbours."""
        return self.ledger.budget.adjacency

    @property
    def quantile(self) -> float:
        """The number of deviations that cover the noise with probability 0.95."""
        return self.tail((1 - CONFIDENCE) / 2)

    def tail(self, chance: float) -> float:
        """Return the deviations that the noise exceeds on one side with at most this probability."""
        return float(-ndtri(chance)) if self.gaussian else -math.log(2 * chance) / math.sqrt(2)

    def bound(self, norms: tuple[float, float]) -> ClipNorm:
        """Return the bound for terms of these L1 and L2 norms to which the noise is calibrated."""
        return ClipNorm(norms[1]) if self.gaussian else ClipNorm(norms[0], order=1)

    def mechanism(self, bound: Bound, share: float = 1.0) -> Gaussian | Laplace:
        """Return the noise that spends a share of this part on one answer."""
        size = self._size * share * _ROUNDED
        if self.gaussian:
            return Gaussian(bound.sensitivity(self.adjacency) / (bound.norm() * math.sqrt(size)))
        return Laplace(bound.sensitivity(self.adjacency, 1) / (bound.norm(1) * size))

    def choice(self, share: float = 1.0) -> float:
        """Return ε of a choice that costs a share of this part: the range of its log-probabilities."""
        size = self._size * share * _ROUNDED
        if not self.gaussian:
            return size
        if isinstance(self.ledger.filter, ZcdpFilter):
            return 2 * math.sqrt(size)  # ε²/8 = μ²/2
        return _log_odds(math.sqrt(size)) * _SHY  # ε-DP is μ-GDP with μ = 2 Φ⁻¹(e^ε / (1 + e^ε))

    def deviation(self, bound: Bound, share: float = 1.0) -> float:
        """Return the standard deviation of the noise on each coordinate of such an answer."""
        noise = self.mechanism(bound, share)
        order, spread = (2, 1.0) if self.gaussian else (1, math.sqrt(2))
        return noise.noise_multiplier * bound.norm(order) * spread

    def ask(
        self, records: Records, contribution: Any, norms: tuple[float, float], share: float = 1.0
    ) -> tuple[Array, float]:
        """Query a noisy sum; return it with the standard deviation of its noise."""
        bound = self.bound(norms)
        query = Query(Everyone(), contribution, bound, self.mechanism(bound, share))
        return self.ledger.over(records).ask(query).value, self.deviation(bound, share)


def spendable(ledger: Ledger | None) -> Ledger | None:
    """Return a ledger, or None; refuse a budget or a path in its place.

    An audit listens through an object around a ledger, so that what counts is that it can be asked.
    """
    if ledger is not None and not callable(getattr(ledger, "ask", None)):
        raise InvalidValue(f"ledger must be ft.Ledger(budget), got {ledger!r}")
    return ledger


def _log_odds(mu: float) -> float:
    """Return log p / (1 - p) for p = Φ(μ/2)."""
    return float(log_ndtr(mu / 2) - log_ndtr(-mu / 2))


def _better(budget: Budget, norms: tuple[float, float]) -> Any:
    """Return the filter under which one answer has less noise: pure ε by Laplace, or μ by Gaussian."""
    if not budget.delta:
        return BasicFilter
    laplace, gaussian = math.sqrt(2) * norms[0] / budget.epsilon, norms[1] / budget.mu
    return BasicFilter if laplace <= gaussian else GdpFilter
