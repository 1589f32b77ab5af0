"""What a coordinator knows of the parties of a run: what they announced, and where they stand. All public."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from farthing.budget import Budget
from farthing.deploy.messages import forms
from farthing.deploy.messages.forms import Turn
from farthing.deploy.messages.signed import Fields, Reason, refuse
from farthing.federated.terms import Terms

_TAIL = math.sqrt(2 * math.log(1e12))  # deviations: an honest update is longer once in 1e12


class State(StrEnum):
    """Where a party stands."""

    HERE = "here"
    MISSING = "missing"  # did not answer the last round
    SPENT = "spent"  # cannot afford another
    REFUSED = "refused"  # refused our terms, or we refused its answer
    GONE = "gone"  # missed too many rounds


@dataclass(frozen=True, slots=True)
class PartyStatus:
    """Where a party stands, for people to look at."""

    name: str
    state: State
    left: int
    missed: int
    reason: str


@dataclass(frozen=True, slots=True)
class Status:
    """How far a run is."""

    run: str
    round: int
    alive: int
    parties: tuple[PartyStatus, ...]


@dataclass(slots=True, eq=False)
class Party:
    """One party."""

    name: str
    budget: Budget
    records: int
    colluding: int
    seen: tuple[int, str]  # the newest row of its ledger that we know of
    left: int = 0
    state: State = State.HERE
    missed: int = 0
    reason: str = ""

    @classmethod
    def announced(cls, name: str, said: Fields, turn: Turn) -> "Party":
        """From its announcement; refused where that is none."""
        if Turn.of(said) != turn:
            refuse(Reason.STALE, "it announces itself to another run")
        said.take("about")
        budget = forms.budget_of(said.inner("budget"))
        records, colluding = said.whole("records", 1), said.whole("colluding")
        row = forms.row_of(said.take("row"))
        said.done()
        return cls(name, budget, records, colluding, row or (0, "0" * 64))

    @property
    def asked(self) -> bool:
        """Whether it is asked in the next round."""
        return self.left > 0 and self.state in (State.HERE, State.MISSING)

    @property
    def status(self) -> PartyStatus:
        return PartyStatus(self.name, self.state, self.left, self.missed, self.reason)

    def told(self, left: int, seen: tuple[int, str] | None) -> None:
        """What it says is left, and the newest row of its ledger."""
        self.left, self.seen = left, seen or self.seen

    def answered(self) -> None:
        """It came to a round."""
        self.missed, self.reason = 0, ""
        self.state = State.HERE if self.left else State.SPENT

    def absent(self, patience: int) -> None:
        """It did not come to a round."""
        if self.state in (State.HERE, State.MISSING):
            self.missed += 1
            self.state = State.GONE if self.missed >= patience else State.MISSING

    def refused(self, reason: Reason) -> None:
        """It refused, for good or for this round."""
        match reason:
            case Reason.SPENT | Reason.ROUNDS | Reason.PROMISED:
                self.left, self.state = 0, State.SPENT
            case Reason.LOST | Reason.LOCKED | Reason.INTERNAL | Reason.MEMBERS | Reason.STALE:
                pass  # perhaps in the next
            case _:
                self.excluded(reason)
        self.reason = str(reason)

    def excluded(self, reason: Reason) -> None:
        """It will not have our terms, or signed an answer that breaks the rules."""
        self.left, self.state, self.reason = 0, State.REFUSED, str(reason)

    def snapshot(self) -> list[Any]:
        """All that changes, as JSON values."""
        return [self.left, str(self.state), self.missed, self.reason, *self.seen]

    def restore(self, said: list[Any]) -> None:
        """The inverse of `snapshot`."""
        self.left, state, self.missed, self.reason, seq, text = said
        self.state, self.seen = State(state), (seq, text)


def longest(terms: Terms, records: int, size: int) -> float:
    """How long an honest upload can be: all of its records clipped, and noise but for one time in 1e12.

    |N(0, I)| exceeds √d + t with a chance below e^(-t²/2) (Gaussian concentration; the norm is 1-Lipschitz).
    """
    noise = math.sqrt(terms.variance) * (math.sqrt(size) + _TAIL)
    return (terms.bound.clip * (records + 1) + noise) * (1 + 1e-6)
