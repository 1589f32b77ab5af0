"""Keep the roster of a run: what each party announced, the state that it is in, and who comes and goes.

`PartyRoster` greets every enrolled party, proposes terms, and notes which parties answer. A party that missed
``patience`` rounds in a row is away, and rounds no longer wait for it. Parties that are away, or never came,
are greeted again in the first exchange of every round, at no charge; a party that replies takes part from the
next round on. All of this is public.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median_high
from typing import Any

from farthing.budget import Budget
from farthing.deploy.messages import forms
from farthing.deploy.messages.forms import Floor, RoundId
from farthing.deploy.messages.signed import Fields, MessageKind, Opened, Reason, refuse
from farthing.deploy.messages.transport import Check, Replies, Request, SignedExchange
from farthing.errors import BudgetSpent, FarthingError
from farthing.federated.protocol import enough_came
from farthing.federated.terms import Invitation, Terms
from farthing.noise import summing

log = logging.getLogger("farthing.federated")

PAUSE = 0.25  # seconds between two attempts to reach a party
MOST_EPSILON, MOST_DELTA = 1e3, 0.1  # of budgets that parties may announce
MOST_RECORDS = summing.MOST  # the most that a party may announce: no guard adds up more
_HELLO = 5.0  # seconds of one attempt to greet the parties


# standard deviations: an honest update is longer with probability 1e-12
_TAIL = math.sqrt(2 * math.log(1e12))


class State(StrEnum):
    """A party's state in a run."""

    HERE = "here"
    MISSING = "missing"  # did not answer the last round
    SPENT = "spent"  # cannot afford another round
    REFUSED = "refused"  # refused the terms, or its answer was refused
    REVOKED = "revoked"  # its key is enrolled no more
    AWAY = "away"  # missed too many rounds: not waited for, and asked again once it replies to a greeting


@dataclass(frozen=True, slots=True)
class PartyStatus:
    """A party's state and figures, for the live page."""

    name: str
    state: State
    left: int
    missed: int
    reason: str
    stale: int = 0  # by how many rounds its last answer was late


@dataclass(frozen=True, slots=True)
class Status:
    """A run's progress."""

    run: str
    round: int
    alive: int
    parties: tuple[PartyStatus, ...]
    left_out: tuple[PartyStatus, ...] = ()  # whose budgets are below the floor


@dataclass(slots=True, eq=False)
class Party:
    """A party as the coordinator sees it."""

    name: str
    budget: Budget
    records: int
    colluding: int
    seen: tuple[int, str]  # the newest row of its ledger that the coordinator knows of
    left: int = 0
    state: State = State.HERE
    missed: int = 0
    reason: str = ""
    owes: int = 0  # the earlier round that it is still asked for, if any
    stale: int = 0
    broke: bool = False  # it signed an answer that breaks the rules
    judges: bool = True  # it has not refused evaluations

    @classmethod
    def announced(cls, name: str, said: Fields, turn: RoundId) -> "Party":
        """Return a party from its announcement; refuse a malformed one."""
        if RoundId.of(said) != turn:
            refuse(Reason.STALE, "the announcement is for another run")
        said.take("about")
        budget = forms.budget_of(said.inner("budget"))
        if budget.epsilon > MOST_EPSILON or budget.delta > MOST_DELTA:
            refuse(Reason.MALFORMED, "the budget protects nobody, and pricing it takes minutes")
        records, colluding = said.whole("records", 1, MOST_RECORDS), said.whole("colluding")
        row = forms.row_of(said.take("row"))
        said.done()
        return cls(name, budget, records, colluding, row or (0, "0" * 64))

    @property
    def asked(self) -> bool:
        """Return whether the next round asks it."""
        return self.left > 0 and self.state in (State.HERE, State.MISSING)

    @property
    def status(self) -> PartyStatus:
        return PartyStatus(self.name, self.state, self.left, self.missed, self.reason, self.stale)

    def told(self, left: int, seen: tuple[int, str] | None) -> None:
        """Note the rounds left that it announces, and the newest row of its ledger."""
        self.left, self.seen = left, seen or self.seen

    def answered(self, stale: int = 0) -> None:
        """Note that it answered a round, ``stale`` rounds late."""
        self.missed, self.reason, self.owes, self.stale = 0, "", 0, stale
        self.state = State.HERE if self.left else State.SPENT

    def absent(self, patience: int) -> None:
        """Note that it missed a round."""
        if self.state in (State.HERE, State.MISSING):
            self.missed += 1
            self.state = State.AWAY if self.missed >= patience else State.MISSING

    def returned(self) -> None:
        """Note that it is back: the next round asks it."""
        if self.state is State.AWAY:
            self.missed, self.owes, self.state = 0, 0, State.HERE if self.left else State.SPENT

    def proposed(self, rounds: int) -> None:
        """Note new terms, under which it may afford so many rounds; who broke the rules stays excluded."""
        if not self.broke:
            self.left, self.owes, self.reason = rounds, 0, ""
            if self.state in (State.HERE, State.SPENT, State.REFUSED):
                self.state = State.HERE if rounds else State.SPENT

    def refused(self, reason: Reason) -> None:
        """Note that it refused, for good or for this round."""
        match reason:
            case Reason.SPENT | Reason.ROUNDS:
                self.left, self.state = 0, State.SPENT
            case Reason.LOST | Reason.LOCKED | Reason.INTERNAL | Reason.MEMBERS | Reason.STALE:
                pass  # it may answer the next round
            case Reason.EVALUATION:
                self.judges = False  # it answers rounds of training
            case _:
                self.excluded(reason)
        self.reason = str(reason)

    def excluded(self, reason: Reason) -> None:
        """Exclude it: it refuses the terms."""
        self.left, self.state, self.reason = 0, State.REFUSED, str(reason)

    def broken(self, reason: Reason) -> None:
        """Exclude it for good: it signed an answer that breaks the rules."""
        self.broke = True
        self.excluded(reason)

    def snapshot(self) -> list[Any]:
        """Return all mutable state, as JSON values."""
        state = [self.left, str(self.state), self.missed, self.reason, *self.seen]
        return [*state, self.owes, self.stale, self.broke]

    def restore(self, said: list[Any]) -> None:
        """Restore the state that `snapshot` returned."""
        self.left, state, self.missed, self.reason, seq, text, self.owes, self.stale, self.broke = said
        self.state, self.seen = State(state), (seq, text)


def terms_or_why(invitation: Invitation, budget: Budget, records: int) -> Terms | Exception:
    """Return the terms of a party that states this, or why there are none."""
    try:
        return invitation.terms(budget, records)
    except (FarthingError, ArithmeticError) as error:
        return error


def longest(terms: Terms, records: int, size: int) -> float:
    """Return the bound on an honest upload's norm: all records clipped, and noise up to a probability of
    1e-12.

    |N(0, I)| exceeds √d + t with a chance below e^(-t²/2) (Gaussian concentration; the norm is 1-Lipschitz).
    """
    noise = math.sqrt(terms.variance) * (math.sqrt(size) + _TAIL)
    return (terms.bound.clip * (records + 1) + noise) * (1 + 1e-6)


class PartyRoster:
    """The enrolled parties of a run, those that took part in it (``members``), and their terms."""

    def __init__(
        self,
        requests: SignedExchange,
        enrolled: Mapping[str, bytes],
        greeting: RoundId,
        dataset: str,
        patience: int,
        floor: Floor | None = None,
    ) -> None:
        self._requests, self._enrolled, self._patience = requests, enrolled, patience
        self._floor, self._below = floor, dict[str, Budget]()  # and who announced a budget below it
        self._greeting, self._dataset = greeting, dataset
        self._invitation: Invitation | None = None
        self._new: dict[str, dict[str, Any]] = {}  # announcements that were not acted on yet
        self._joined: dict[str, dict[str, Any]] = {}  # parties that joined since the last recorded round
        self.members: list[Party] = []
        self.terms: list[Terms] = []

    @property
    def alive(self) -> int:
        return sum(party.asked for party in self.members)

    # --- who comes, goes and returns

    def gather(self, least: int | None, seconds: float) -> dict[str, dict[str, Any]]:
        """Wait until enough parties (by default all that are not left out) announced themselves.

        Returns what they said.
        """
        until, pause, refused = time.monotonic() + seconds, PAUSE, dict[str, Reason]()
        while True:
            left = min(_HELLO, max(PAUSE, until - time.monotonic()))
            mail = self._requests.exchange(self._greetings(), MessageKind.ANNOUNCEMENT, left, self._hear)
            refused |= mail.refused | mail.broken
            needed = max(1, len(self._enrolled) - len(self._below)) if least is None else least
            if len(self._new) >= needed or time.monotonic() + pause > until:
                break
            pause = min(_HELLO, 2 * pause) if mail.refused else PAUSE  # it would refuse again
            time.sleep(pause)
        if len(self._new) < needed:
            raise FarthingError(
                f"{len(self._new)} of {len(self._enrolled)} parties have connected, {needed} are needed; "
                + self._missing(refused)
            )
        found, self._new = self._new, {}
        return {name: found[name] for name in self._enrolled if name in found}

    def _missing(self, refused: Mapping[str, Reason]) -> str:
        """Return who did not announce themselves, and why as far as is known."""
        why = {name: "no answer" for name in self._enrolled if name not in self._new}
        why |= {name: f"refused, {reason}" for name, reason in refused.items() if name in why}
        why |= dict.fromkeys(self._below, f"below the floor of {self._floor}")
        return "missing: " + ", ".join(f"{name} ({reason})" for name, reason in why.items())

    def begin(self, said: Mapping[str, dict[str, Any]]) -> None:
        """Begin with the parties that announced this."""
        self.members = [Party.announced(name, Fields(told), self._greeting) for name, told in said.items()]
        self._revoke()

    def _revoke(self) -> None:
        """Exclude the members of a resumed run whose keys are enrolled no more."""
        for party in self.members:
            if party.name not in self._enrolled:
                party.left, party.broke, party.state = 0, True, State.REVOKED

    def _greetings(self) -> dict[str, Request]:
        header: dict[str, Any] = self._greeting.header() | {"dataset": self._dataset}
        if self._floor is not None:
            header["floor"] = {"epsilon": self._floor.epsilon, "delta": self._floor.delta}
        known = {party.name: party for party in self.members}
        away = [name for name in self._enrolled if name not in known or known[name].state is State.AWAY]
        return {name: (MessageKind.HELLO, header, b"") for name in away if name not in self._new}

    def _hear(self, name: str, opened: Opened) -> None:
        """Note the announcement of a party that is new, or back; one below the floor is left out."""
        budget = Party.announced(name, opened.fields(), self._greeting).budget
        if self._floor is None or self._floor.admits(budget):
            self._below.pop(name, None)
            self._new[name] = opened.fields().plain()
        elif self._below.get(name) != budget:
            self._below[name] = budget
            log.warning("%s is left out: its budget, %s, is below the floor, %s", name, budget, self._floor)

    @property
    def left_out(self) -> tuple[PartyStatus, ...]:
        """Return the parties that announced a budget below the floor."""
        known = {party.name for party in self.members}
        return tuple(
            PartyStatus(name, State.REFUSED, 0, 0, f"epsilon {budget.epsilon:g}: below the floor")
            for name, budget in self._below.items()
            if name not in known
        )

    def admit(self, said: dict[str, dict[str, Any]] | None = None) -> None:
        """Let the parties that announced themselves (``said``: in a recorded run) take part from now on."""
        joined, self._new = (self._new if said is None else said), {}
        known = {party.name: party for party in self.members}
        for name, told in joined.items():
            if name in known:
                known[name].returned()
            else:
                self._add(Party.announced(name, Fields(told), self._greeting))
            log.info("%s is here", name)
        self._joined |= joined if said is None else {}

    def _add(self, party: Party) -> None:
        assert self._invitation is not None
        terms = self._terms_of(party, self._invitation)
        if isinstance(terms, Exception):
            return
        party.proposed(terms.rounds)
        self.members.append(party)
        self.terms.append(terms)

    def joined(self) -> dict[str, dict[str, Any]]:
        """Return who came or returned since the last call, as the checkpoint records it."""
        joined, self._joined = self._joined, {}
        return joined

    def await_enough(self, least: int, seconds: float) -> None:
        """Wait for parties that are away where too few are here; `BudgetSpent` where none of them can pay."""
        until = time.monotonic() + seconds
        while self.alive < least and any(p.left and p.state is State.AWAY for p in self.members):
            self.exchange({}, MessageKind.ANSWER, max(PAUSE, until - time.monotonic()), self._hear)
            self.admit()
            if self.alive < least and time.monotonic() + PAUSE > until:
                raise FarthingError(
                    f"{self.alive} parties are here and {least} are needed: resume when others are back"
                )
            if self.alive < least:
                time.sleep(PAUSE)
        enough_came(self.alive, least, len(self.members))

    # --- terms

    def invite(self, invitation: Invitation) -> None:
        """Set the terms of all parties.

        One whose statements allow none is left out, or excluded where it had terms: one party's statements
        must not stop all. Where no party has terms the invitation is wrong, and its error is raised.
        """
        found = [self._terms_of(party, invitation) for party in self.members]
        errors = [error for error in found if isinstance(error, Exception)]
        if errors and len(errors) == len(found):
            raise errors[0]
        before: Sequence[Terms | None] = self.terms or [None] * len(found)
        self._invitation, members, self.terms = invitation, self.members, []
        self.members = []
        for party, terms, old in zip(members, found, before, strict=True):
            if not isinstance(terms, Exception):
                party.proposed(terms.rounds)
            elif old is not None:
                party.excluded(Reason.MALFORMED)
            if (held := old if isinstance(terms, Exception) else terms) is not None:
                self.members.append(party)
                self.terms.append(held)

    def _terms_of(self, party: Party, invitation: Invitation) -> Terms | Exception:
        """Return a party's terms, or why its statements allow none."""
        found = terms_or_why(invitation, party.budget, party.records)
        if isinstance(found, Exception):
            log.warning("%s cannot take part: %s", party.name, found)
        return found

    def propose(self, turn: RoundId, form: dict[str, Any], seconds: float) -> int:
        """Ask the parties whether they agree to the terms; `BudgetSpent` where none does.

        Returns the turn at which the plan of most of them stands, if their answers are shares of one. Who is
        behind forfeits turns, so that one party which claims to be ahead must not decide.
        """
        parties, agreed = {party.name: party for party in self.members if party.asked}, dict[str, int]()

        def agree(name: str, opened: Opened) -> None:
            said = opened.fields()
            if RoundId.of(said) != turn:
                refuse(Reason.STALE, "the agreement is for another run")
            stands = said.whole("turn", 0, forms.MOST_ROUNDS) if "turn" in said.plain() else 0
            parties[name].told(said.whole("left"), forms.row_of(said.take("row")))
            agreed[name] = stands

        header = turn.header() | {"dataset": self._dataset, "invitation": form}
        requests = dict.fromkeys(parties, (MessageKind.PROPOSAL, header, b""))
        self.exchange(requests, MessageKind.AGREEMENT, seconds, agree)
        for party in parties.values():
            if party.name in agreed:
                party.answered()
            elif party.state is State.HERE:  # it may still join a later round
                party.state = State.MISSING
        if not self.alive:
            reasons = ", ".join(f"{p.name}: {p.reason or p.state}" for p in self.members)
            raise BudgetSpent(f"no party agreed: {reasons}")
        return median_high(agreed.values()) if agreed else 0

    # --- rounds

    def exchange(
        self,
        requests: Mapping[str, Request],
        kind: MessageKind,
        seconds: float,
        check: Check,
        largest: int = 0,
        enough: Callable[[Replies], bool] | None = None,
    ) -> tuple[dict[str, Opened], set[str]]:
        """Return the accepted answers and all who replied; mark those that refused or broke the rules.

        The first exchange of a round also greets who is away or never came; nobody waits for them.
        """
        greetings = self._greetings() if kind in (MessageKind.ANSWER, MessageKind.ADVERT) else {}

        def sort(name: str, opened: Opened) -> None:
            (self._hear if name in greetings else check)(name, opened)

        def done(mail: Replies) -> bool:
            if enough is not None and requests:
                return enough(mail)
            return requests.keys() <= mail.heard and bool(mail.heard)

        mail = self._requests.exchange({**greetings, **requests}, kind, seconds, sort, largest, done)
        for party in self.members:
            if party.name in greetings:
                continue
            if party.name in mail.refused:
                party.refused(mail.refused[party.name])
            elif party.name in mail.broken:
                party.broken(mail.broken[party.name])
        heard = mail.heard - greetings.keys()
        return {name: opened for name, opened in mail.came.items() if name in heard}, heard

    def note(self, number: int, places: list[int], came: Mapping[int, int], owed: Mapping[int, int]) -> None:
        """Note who answered a round, and how late; ``owed`` are the rounds that others may still answer."""
        for place in places:
            party = self.members[place]
            if place in came:
                party.answered(came[place])
                continue
            if party.reason == Reason.EVALUATION:  # it is here, and will not be asked for another
                party.reason = ""
                continue
            party.absent(self._patience)
            party.owes = owed.get(place, 0)
            log.warning("%s did not answer round %d", party.name, number)

    def snapshot(self) -> list[list[Any]]:
        return [party.snapshot() for party in self.members]

    def restore(self, said: list[list[Any]]) -> None:
        for party, values in zip(self.members, said, strict=True):
            party.restore(values)
        self._revoke()
