"""How much noise a budget asks for, whatever filter keeps it.

Gaussian answers with μ₁, μ₂, ... cost Σμᵢ² in every filter that prices them, so a method that only asks for
those can lay out its spending ahead: it divides μ² among its answers.

>>> import farthing as ft
>>> ledger = ft.Ledger(ft.Budget(1.0, 1e-6))
>>> mu = gaussian_mu(ledger)
>>> noise = noise_of(ft.ClipNorm(2.0), ledger.budget.adjacency, mu / 2)  # a quarter of the budget
>>> ledger.affords(GaussianEvent(noise), times=4), ledger.affords(GaussianEvent(noise), times=5)
(True, False)
"""

import math

from farthing.budget import Adjacency
from farthing.errors import BudgetSpent
from farthing.ledger.ledger import Ledger
from farthing.queries.bounds import Bound
from farthing.queries.events import BoundedRangeEvent, GaussianEvent

_ROUNDED = 1 - 1e-9  # so that parts, added up in floats, still fit
_HALVINGS = 40
_REMAINDER = 2.0**-27  # what rounding leaves of a budget that is spent


def refuse_remainder(ledger: Ledger, kind: str) -> None:
    """Raises `BudgetSpent` where only what rounding leaves is left."""
    if 1 - ledger.share < _REMAINDER:
        raise BudgetSpent(f"nothing that {kind} could use is left of {ledger.budget}")


def gaussian_mu(ledger: Ledger) -> float:
    """The largest μ such that Gaussian answers with Σμᵢ² = μ² fit what is left of the ledger's budget."""
    shift = 2.0 if ledger.budget.adjacency is Adjacency.REPLACE_ONE else 1.0

    def fits(mu: float) -> bool:
        return ledger.affords(GaussianEvent(shift / mu))

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
    """The noise (relative to one contribution) that makes a sum of such contributions μ-GDP."""
    return bound.sensitivity(adjacency) / (bound.norm() * mu)


def choice_epsilon(ledger: Ledger, choices: int = 1) -> float:
    """The largest ε at which ``choices`` of an exponential mechanism fit what is left of the budget."""

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
