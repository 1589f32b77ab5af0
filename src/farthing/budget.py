"""Define budgets and guarantees: (ε, δ) with adjacency, unit and observer.

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
from typing import Any, Self

from farthing import validate

FORMAT = 1  # of JSON objects that commands print and write; grows when a field changes its meaning or place


class Adjacency(StrEnum):
    """The relation between data sets that count as neighbours.

    A guarantee compares what is released from neighbouring data sets, so it says nothing without this.

    Attributes
    ----------
    ADD_REMOVE
        One data set has one unit more than the other; ``"add-remove"``.
    REPLACE_ONE
        Both have the same size and differ in one unit; ``"replace-one"``.
    ZERO_OUT
        Both have the same size, and one unit is replaced by one that contributes zero; ``"zero-out"``.

    Examples
    --------
    >>> Adjacency("replace-one").shift
    2.0
    """

    ADD_REMOVE = "add-remove"  # one has one unit more than the other
    REPLACE_ONE = "replace-one"  # same size, one unit differs
    ZERO_OUT = "zero-out"  # same size, one unit is replaced by one that contributes zero

    @property
    def shift(self) -> float:
        """The distance of neighbours' sums, in bounds of one contribution, 2 for replace-one and else 1."""
        return 2.0 if self is Adjacency.REPLACE_ONE else 1.0


class Unit(StrEnum):
    """The unit whose presence a guarantee protects.

    Attributes
    ----------
    RECORD
        One record; ``"record"``.
    USER
        All records of one person together; ``"user"``.
    PARTY
        All records of one party (a hospital, a bank, a phone) together; ``"party"``.

    Examples
    --------
    >>> Budget(1.0, 1e-5, unit=Unit.USER).unit
    <Unit.USER: 'user'>
    """

    RECORD = "record"
    USER = "user"  # all records of one person together
    PARTY = "party"  # all records of one party (a hospital, a bank, a phone) together


class Observer(StrEnum):
    """The observer against whom a guarantee holds.

    Attributes
    ----------
    ANYONE
        Sees every released answer, and not which records were drawn; ``"anyone"``.
    COORDINATOR
        Sees every answer and also which records were drawn, so sampling does not amplify; ``"coordinator"``.
    SERVER
        Sees every message of every party; ``"server"``.
    AGGREGATE
        Sees only sums over parties; ``"aggregate"``.

    Examples
    --------
    >>> Budget(1.0, 1e-5, observer="server").observer
    <Observer.SERVER: 'server'>
    """

    ANYONE = "anyone"  # sees every released answer, not which records were drawn
    COORDINATOR = "coordinator"  # sees every answer and also which records were drawn
    SERVER = "server"  # sees every message of every party
    AGGREGATE = "aggregate"  # sees only sums over parties


@dataclass(frozen=True, slots=True)
class Budget:
    """A privacy budget: (ε, δ) with adjacency, unit and observer.

    Parameters
    ----------
    epsilon : float
        ε of differential privacy, finite and above 0.
    delta : float
        δ of differential privacy, from 0 to below 1; 0 asks for pure differential privacy.
    adjacency : Adjacency or str, default "add-remove"
        The relation between neighbouring data sets.
    unit : Unit or str, default "record"
        The unit that is protected.
    observer : Observer or str, default "anyone"
        The observer against whom the guarantee holds.

    Raises
    ------
    InvalidValue
        If a number is out of range or a name is unknown.

    Examples
    --------
    >>> print(Budget(1.0, 1e-5, adjacency="replace-one"))
    (1, 1e-05)-DP, replace-one, per record, against anyone
    """

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
        """The budget in Gaussian DP, the largest μ with δ_μ(ε) <= δ (Dong, Roth & Su 2022, Cor. 2.13)."""
        from farthing.accounting import gaussian

        return gaussian.mu(self.epsilon, self.delta)

    def with_(self, epsilon: float, delta: float) -> Self:
        """Return a budget of another (ε, δ) with this one's adjacency, unit and observer.

        Parameters
        ----------
        epsilon, delta : float
            The new numbers.

        Returns
        -------
        Budget
        """
        return replace(self, epsilon=epsilon, delta=delta)

    def __str__(self) -> str:
        return (
            f"({self.epsilon:g}, {self.delta:g})-DP, {self.adjacency}, "
            f"per {self.unit}, against {self.observer}"
        )


class Shown:
    """The base of objects that notebooks show as a table (`farthing.report.notebook`)."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        from farthing.report import notebook

        return notebook.html(self)


class Drawn(Shown):
    """The base of objects that notebooks can also draw."""

    __slots__ = ()

    def plot(self) -> Any:
        """Return a picture: a notebook shows it, and its ``save(path)`` writes an SVG file.

        Of a ledger it shows ε after each answer and the limit, of a run the noise of each answer.

        Returns
        -------
        Plot
        """
        from farthing.report import notebook

        return notebook.plot(self)


@dataclass(frozen=True, slots=True)
class Guarantee(Shown):
    """A guarantee for everything that was released: (ε, δ), unit, observer and theorem.

    Attributes
    ----------
    epsilon : float
        ε at ``delta``; infinite where nothing can be promised (seeded test noise, for instance).
    delta : float
        δ of the budget.
    adjacency : Adjacency
    unit : Unit
    observer : Observer
    accountant : str
        The accountant or privacy filter that computed ``epsilon``.
    theorem : str
        The theorem that the statement rests on.
    note : str
        Assumptions that the statement depends on, such as a public number of records.

    Examples
    --------
    >>> import farthing as ft
    >>> print(ft.Ledger(ft.Budget(1.0, 1e-5)).guarantee)
    (1, 1e-05)-DP, add-remove, per record, against anyone, by gdp
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
        """Return this statement with further notes, each once.

        Parameters
        ----------
        *notes : str
            Assumptions to add.

        Returns
        -------
        Guarantee
        """
        said = [self.note, *(note for note in notes if note not in self.note)]
        return replace(self, note="; ".join(filter(None, said)))

    def __str__(self) -> str:
        size = "no guarantee" if math.isinf(self.epsilon) else f"({self.epsilon:.6g}, {self.delta:g})-DP"
        text = f"{size}, {self.adjacency}, per {self.unit}, against {self.observer}, by {self.accountant}"
        return f"{text} [{self.note}]" if self.note else text
