"""A budget laid out ahead: Gaussian answers that each cost a part of μ².

Parts are fixed and add up to at most 1, so the filter never refuses one. By adaptive composition of Gaussian
mechanisms (Dong, Roth & Su 2022, Cor. 3.3) the whole is μ-GDP, also where a bound, a map or a weight follows
from earlier answers: the noise moves with the bound, and the price stays.

>>> import farthing as ft
>>> from farthing.linear.losses import Gram
>>> from farthing.data.tables import (Features, Table)
>>> ledger = ft.Ledger(ft.Budget(1.0, 1e-6))
>>> purse = Purse(ledger.over(Table(np.ones((100, 1)))), 100)
>>> value, deviation = purse.mean(0.25, Gram(Features(1)), ft.ClipOuter(2.0), mechanism=ft.Gaussian)
>>> value.shape, round(ledger.share, 6), len(purse.receipts())
((2, 2), 0.25, 1)
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.errors import BudgetSpent
from farthing.ledger.ledger import Ledger
from farthing.linear.noise_for_budget import gaussian_mu, noise_of
from farthing.queries.bounds import Bound
from farthing.queries.mechanisms import Gaussian
from farthing.queries.query import Contribution, Query, Receipt
from farthing.queries.samplers import Everyone

_LEAST = 2.0**-10  # of μ: a millionth of μ²


class Purse:
    """What is left of a ledger's budget, and ``records``, the public number of them."""

    def __init__(self, ledger: Ledger, records: int) -> None:
        self.ledger, self.records, self.mu = ledger, records, gaussian_mu(ledger)
        if self.mu < _LEAST * ledger.budget.mu:  # what rounding leaves of a part handed on
            raise BudgetSpent(f"nothing that a Gaussian answer could use is left of {ledger.budget}")
        self._receipts: list[Receipt] = []

    def deviation(self, part: float, bound: Bound) -> float:
        """The noise on a mean of contributions so bounded, in units of ``bound.scale``."""
        return bound.sensitivity(self.ledger.budget.adjacency) / (self.mu * math.sqrt(part) * self.records)

    def mean(
        self,
        part: float,
        contribution: Contribution,
        bound: Bound,
        w: Any = None,
        mechanism: type[Gaussian] = Gaussian,
    ) -> tuple[NDArray[np.float64], float]:
        """The noisy mean and its noise (`deviation`)."""
        noise = noise_of(bound, self.ledger.budget.adjacency, self.mu * math.sqrt(part))
        answer = self.ledger.ask(Query(Everyone(), contribution, bound, mechanism(noise)), w)
        self._receipts.append(answer.receipt)
        return answer.value / self.records, self.deviation(part, bound)

    def receipts(self) -> tuple[Receipt, ...]:
        """Those since this was last called: what a `Step` carries."""
        receipts, self._receipts = tuple(self._receipts), []
        return receipts
