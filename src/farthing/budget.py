"""What may be spent, and what a guarantee says.

A guarantee without its adjacency, unit and observer says nothing, so the three live on the budget
and travel with every number farthing prints.

>>> budget = Budget(1.0, 1e-5)
>>> print(budget)
(1, 1e-05)-DP, add-remove, per record, against anyone
>>> round(budget.rho, 6), round(budget.mu, 6)
(0.02082, 0.268051)
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from farthing import validate


class Adjacency(StrEnum):
    """When two data sets count as neighbours."""

    ADD_REMOVE = "add-remove"  # one has one unit more than the other
    REPLACE_ONE = "replace-one"  # same size, one unit differs
    ZERO_OUT = "zero-out"  # same size, one unit is replaced by one that contributes zero

    @property
    def shift(self) -> float:
        """How far sums of neighbours are apart, in bounds of one contribution: 2 where one is replaced."""
        return 2.0 if self is Adjacency.REPLACE_ONE else 1.0


class Unit(StrEnum):
    """Whose presence is protected."""

    RECORD = "record"
    USER = "user"  # all records of one person together
    PARTY = "party"  # all records of one party (a hospital, a bank, a phone) together


class Observer(StrEnum):
    """Against whom the guarantee holds."""

    ANYONE = "anyone"  # sees every released answer, not which records were drawn
    COORDINATOR = "coordinator"  # sees every answer and also which records were drawn
    SERVER = "server"  # sees every message of every party
    AGGREGATE = "aggregate"  # sees only sums over parties


@dataclass(frozen=True, slots=True)
class Budget:
    """The most that may ever be learnt: (ε, δ), with adjacency, unit and observer."""

    epsilon: float
    delta: float
    adjacency: Adjacency = Adjacency.ADD_REMOVE
    unit: Unit = Unit.RECORD
    observer: Observer = Observer.ANYONE

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", validate.positive(epsilon=self.epsilon))
        object.__setattr__(self, "delta", validate.delta(delta=self.delta))
        object.__setattr__(self, "adjacency", validate.choice(Adjacency, adjacency=self.adjacency))
        object.__setattr__(self, "unit", validate.choice(Unit, unit=self.unit))
        object.__setattr__(self, "observer", validate.choice(Observer, observer=self.observer))

    @property
    def rho(self) -> float:
        """The zCDP budget by the closed form ρ + 2√(ρ ln 1/δ) = ε (Bun & Steinke 2016, Prop. 1.3)."""
        from farthing.accounting import zcdp

        return zcdp.rho(self.epsilon, self.delta)

    @property
    def mu(self) -> float:
        """The Gaussian-DP budget: the largest μ with δ_μ(ε) <= δ (Dong, Roth & Su 2022, Cor. 2.13)."""
        from farthing.accounting import gaussian

        return gaussian.mu(self.epsilon, self.delta)

    def with_(self, epsilon: float, delta: float) -> Self:
        """The same adjacency, unit and observer at another (ε, δ)."""
        return replace(self, epsilon=epsilon, delta=delta)

    def __str__(self) -> str:
        return (
            f"({self.epsilon:g}, {self.delta:g})-DP, {self.adjacency}, "
            f"per {self.unit}, against {self.observer}"
        )


@dataclass(frozen=True, slots=True)
class Guarantee:
    """What holds of what was released: (ε, δ), for whom, against whom, and by which theorem.

    ``epsilon`` is infinite when nothing can be promised (seeded test noise, for instance).
    """

    epsilon: float
    delta: float
    adjacency: Adjacency
    unit: Unit
    observer: Observer
    accountant: str
    theorem: str = ""
    note: str = ""

    def noted(self, *notes: str) -> Self:
        """The same with further notes, each once."""
        said = [self.note, *(note for note in notes if note not in self.note)]
        return replace(self, note="; ".join(filter(None, said)))

    def __str__(self) -> str:
        size = "no guarantee" if math.isinf(self.epsilon) else f"({self.epsilon:.6g}, {self.delta:g})-DP"
        text = f"{size}, {self.adjacency}, per {self.unit}, against {self.observer}, by {self.accountant}"
        return f"{text} [{self.note}]" if self.note else text
