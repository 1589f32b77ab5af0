"""Coordinate parties whose guards run elsewhere: `Remote` gives algorithms the interface of `Clients`.

`Remote` greets every enrolled party, proposes terms, and asks round by round over a `Transport`. A round ends
when all parties that were asked have answered or the time is up; a late party is missing from that round and
asked again in the next, and after ``patience`` missed rounds in a row it is asked no more. Uploads are added
in the order of the parties, not of arrival.

Answers are checked before they count: signed by the party's enrolled key, about this very request, of the
right shape, finite, and no longer than clipped sums with that noise can be. An answer without the party's
signature proves nothing about the party, which counts as missing; a signed answer that breaks the rules
excludes it. Other parties' budgets are not touched by any of this.

With a `Checkpoint` a killed coordinator resumes its run. The privacy guarantee does not depend on the
coordinator: it holds whatever a coordinator does, by each party's own ledger.

A `View` is the state of a run in public figures, as its live page and its ``status.json`` show it.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.budget import Budget
from farthing.deploy.bridge import Party, PartyStatus, State, Status, longest
from farthing.deploy.checkpoint import Checkpoint
from farthing.deploy.messages import forms
from farthing.deploy.messages.forms import Check, Question, Request, RoundId, SignedExchange, Transport
from farthing.deploy.messages.signed import (
    Fields,
    MessageKind,
    Opened,
    Reason,
    Signer,
    checked_name,
    digest,
    pack_numbers,
    refuse,
    unpack_numbers,
)
from farthing.deploy.secagg.sessions import Session
from farthing.errors import BudgetSpent, FarthingError, InvalidValue, Unsupported
from farthing.federated.protocol import Answers, enough_came
from farthing.federated.terms import (
    Forecast,
    Invitation,
    Terms,
    Trust,
    Weights,
    forecast_of,
    weight_of,
    weights_under,
)
from farthing.linear.losses import Gradient
from farthing.queries.query import Contribution, Receipt

__all__ = ["PartyStatus", "Remote", "State", "Status"]

log = logging.getLogger("farthing.federated")

Array = NDArray[np.float64]

_PAUSE = 0.25  # seconds between two attempts to reach a party
_HELLO = 5.0  # seconds of one attempt to greet the parties


class Remote:
    """Guards over a transport, as `Clients` (and `SequentialClients`).

    ``enrolled`` are the public keys of all parties that may take part, ``seconds`` is how long a round may
    take. Waits until ``least`` parties (by default all) have announced themselves.
    """

    def __init__(
        self,
        transport: Transport,
        signer: Signer,
        enrolled: Mapping[str, bytes],
        *,
        run: str,
        dataset: str,
        checkpoint: Path | None = None,
        seconds: float = 60.0,
        patience: int = 3,
        least: int | None = None,
    ) -> None:
        self._run, self._dataset = checked_name(run=run), checked_name(dataset=dataset)
        self._seconds = validate.positive(seconds=seconds)
        self._patience = validate.count(patience=patience)
        self._enrolled = {checked_name(party=name): key for name, key in enrolled.items()}
        self._least = len(enrolled) if least is None else validate.count(least=least)
        if not enrolled or self._least > len(enrolled):
            raise InvalidValue(f"least must be at most the number of parties, {len(enrolled)}, got {least!r}")
        self._requests = SignedExchange(transport, signer, self._enrolled)
        self._round = 0
        self._terms: list[Terms] = []
        self._members: list[Party] = []
        self._checkpoint = Checkpoint(checkpoint, run, enrolled)
        try:
            self._members = self._gathered()
        except BaseException:
            self.close()
            raise

    # --- parties

    def __len__(self) -> int:
        return len(self._members)

    @property
    def names(self) -> Sequence[str]:
        """Return the parties' names, in the order of `left`, `budgets` and `records`."""
        return [party.name for party in self._members]

    @property
    def budgets(self) -> Sequence[Budget]:
        return [party.budget for party in self._members]

    @property
    def records(self) -> NDArray[np.int64]:
        return np.array([party.records for party in self._members], dtype=np.int64)

    @property
    def left(self) -> NDArray[np.int64]:
        return np.array([party.left if party.asked else 0 for party in self._members], dtype=np.int64)

    @property
    def alive(self) -> int:
        return sum(party.asked for party in self._members)

    def terms(self, party: int) -> Terms:
        """Return the terms that a party was invited on."""
        return self._terms[party]

    def status(self) -> Status:
        """Return the run's progress, for the live page."""
        return Status(self._run, self._round, self.alive, tuple(party.status for party in self._members))

    def close(self) -> None:
        """Close the checkpoint."""
        self._checkpoint.close()

    def _gathered(self) -> list[Party]:
        turn, recorded = self._turn(), self._checkpoint.next()
        if recorded is not None:
            members = recorded[0]["members"]
            return [Party.announced(name, Fields(said), turn) for name, said in members.items()]
        found: dict[str, Party] = {}
        said: dict[str, dict[str, Any]] = {}

        def hear(name: str, opened: Opened) -> None:
            found[name] = Party.announced(name, opened.fields(), turn)
            said[name] = opened.fields().plain()

        header, until = turn.header() | {"dataset": self._dataset}, time.monotonic() + self._seconds
        while True:
            absent = {name: (MessageKind.HELLO, header, b"") for name in self._enrolled if name not in found}
            left = min(_HELLO, max(_PAUSE, until - time.monotonic()))
            self._requests.exchange(absent, MessageKind.ANNOUNCEMENT, left, hear)
            if len(found) >= self._least or time.monotonic() + _PAUSE > until:
                break
            time.sleep(_PAUSE)
        if len(found) < self._least:
            raise FarthingError(
                f"{len(found)} of {len(self._enrolled)} parties have connected, {self._least} are needed"
            )
        names = [name for name in self._enrolled if name in found]  # in the order of enrolment
        self._checkpoint.add({"members": {name: said[name] for name in names}})
        return [found[name] for name in names]

    # --- terms

    def forecast(self, invitation: Invitation, weights: Weights = Weights.PRECISION) -> Forecast:
        terms = [invitation.terms(party.budget, party.records) for party in self._members]
        return forecast_of(invitation, weights, terms, np.arange(len(terms)))

    def invite(self, invitation: Invitation, weights: Weights = Weights.PRECISION) -> None:
        if self._terms:
            raise InvalidValue("these clients were already invited: terms are agreed once")
        if invitation.trust is Trust.TRUSTED:
            raise Unsupported("a guard releases nothing without noise: trust must be local or distributed")
        self._weights = weights_under(invitation.trust, weights)
        self._survivors = invitation.survivors if invitation.trust is Trust.DISTRIBUTED else 1
        self._invitation, form = invitation, forms.invitation(invitation)
        self._terms = [invitation.terms(party.budget, party.records) for party in self._members]
        recorded = self._checkpoint.next()
        if recorded is None:
            self._propose(form)
            self._checkpoint.add({"invitation": form, "parties": self._snapshot()})
        elif recorded[0].get("invitation") != form:
            raise InvalidValue("the checkpoint belongs to other terms: use another folder")
        else:
            self._restore(recorded[0]["parties"])

    def _propose(self, form: dict[str, Any]) -> None:
        turn, agreed = self._turn(), set()
        parties = {party.name: party for party in self._members}

        def agree(name: str, opened: Opened) -> None:
            said = opened.fields()
            if RoundId.of(said) != turn:
                refuse(Reason.STALE, "the agreement is for another run")
            parties[name].told(said.whole("left"), forms.row_of(said.take("row")))
            agreed.add(name)

        header = turn.header() | {"dataset": self._dataset, "invitation": form}
        requests = dict.fromkeys(parties, (MessageKind.PROPOSAL, header, b""))
        self._exchange(requests, MessageKind.AGREEMENT, self._seconds, agree)
        for party, terms in zip(self._members, self._terms, strict=True):
            if party.name in agreed:
                party.answered()
            elif party.state is State.HERE:  # it may still join a later round
                party.left, party.state = terms.rounds, State.MISSING
        if not self.alive:
            reasons = ", ".join(f"{p.name}: {p.reason or p.state}" for p in self._members)
            raise BudgetSpent(f"no party agreed: {reasons}")

    # --- rounds

    def ask(self, contribution: Contribution, w: Any) -> Answers:
        came = [place for place, party in enumerate(self._members) if party.asked]
        if self._terms:
            enough_came(len(came), self._survivors, len(self))
        return self._taken(came, contribution, w)

    def pick(self) -> int:
        """Pick a party in proportion to its records; unchanged after a crash. The result must not be
        published.
        """
        ends = np.cumsum(self.records)
        place = self._checkpoint.turn(self._round + 1, int(ends[-1]))
        return int(np.searchsorted(ends, place, side="right"))

    def ask_one(self, party: int, contribution: Contribution, w: Any) -> Answers:
        """Run a round with this party alone."""
        if self._terms and self._invitation.trust is not Trust.LOCAL:
            raise Unsupported("only sums over parties are seen under distributed trust")
        if not 0 <= party < len(self):
            raise InvalidValue(f"party must lie between 0 and {len(self) - 1}, got {party}")
        if self._terms and not self._members[party].asked:
            raise BudgetSpent(
                f"{self._members[party].name} can afford no further answer, or has left the run"
            )
        return self._taken([party], contribution, w, Weights.RECORDS)

    def _taken(
        self, places: list[int], contribution: Contribution, w: Any, weights: Weights | None = None
    ) -> Answers:
        """Return the answers of one round among some parties: from the checkpoint, or asked and recorded."""
        if not self._terms:
            raise InvalidValue("no client was invited yet: call clients.invite(Invitation(...)) first")
        w = np.asarray(w, dtype=np.float64)
        if not np.isfinite(w).all():
            raise InvalidValue("w must be finite, got NaN or infinity; nothing was charged")
        if not isinstance(contribution, Gradient):
            raise Unsupported(f"a guard answers gradients only, got {type(contribution).__name__}")
        self._round += 1
        body, recorded = pack_numbers(w), self._checkpoint.next()
        if recorded is not None:
            return self._replayed(*recorded, digest(body), w.shape)
        if self._invitation.trust is Trust.DISTRIBUTED:
            paid, answers = self._summed(contribution, w.shape, body)
        else:
            question = self._question(contribution, w.shape)
            paid, answers = self._plain(question, places, body, weights or self._weights)
        said = {
            "round": self._round,
            "weights": digest(body),
            "figures": [answers.divisor, answers.count, answers.alive, answers.variance],
            "receipts": [[p, r.seq, r.hash] for p, r in zip(paid, answers.receipts, strict=True)],
            "parties": self._snapshot(),
        }
        self._checkpoint.add(said, pack_numbers(answers.total))
        return answers

    def _turn(self) -> RoundId:
        return RoundId(self._run, self._round, self._checkpoint.nonce(self._round))

    def _question(self, contribution: Gradient, shape: tuple[int, ...]) -> Question:
        return Question(self._turn(), self._dataset, self._invitation, contribution, shape)

    def _replayed(self, said: dict[str, Any], body: bytes, weights: str, shape: tuple[int, ...]) -> Answers:
        if said.get("round", 0) < self._round or said.get("weights") != weights:
            raise InvalidValue(
                f"round {self._round} of the checkpoint belongs to another algorithm or other options: "
                "resume with the same, or use another folder"
            )
        self._round = said["round"]  # lost rounds are not recorded
        self._restore(said["parties"])
        divisor, count, alive, variance = said["figures"]
        receipts = tuple(self._receipt(place, (seq, text)) for place, seq, text in said["receipts"])
        return Answers(unpack_numbers(body, shape), divisor, count, alive, variance, receipts)

    def _receipt(self, place: int, row: tuple[int, str]) -> Receipt:
        return Receipt(*row, self._terms[place].price(self._members[place].budget))

    def _plain(
        self, question: Question, places: list[int], body: bytes, weights: Weights
    ) -> tuple[list[int], Answers]:
        """Ask each party for its own upload, which carries all of its noise."""
        values: dict[int, Array] = {}
        rows: dict[int, tuple[int, str]] = {}
        where = {self._members[place].name: place for place in places}

        def check(name: str, opened: Opened) -> None:
            """Accept an answer to this question, or refuse it."""
            party, said = self._members[where[name]], opened.fields()
            if RoundId.of(said) != question.turn:
                refuse(Reason.STALE, "the answer is for another run or round")
            if said.hexadecimal("weights", 32) != digest(body):
                refuse(Reason.CONFLICT, "the answer is about other weights")
            if said.hexadecimal("update", 32) != digest(opened.body):
                refuse(Reason.FORGED, "the update does not match its digest")
            value = unpack_numbers(opened.body, question.shape)
            if np.linalg.norm(value) > longest(self._terms[where[name]], party.records, value.size):
                refuse(Reason.NORM, "the update is longer than clipped sums with this noise can be")
            left, row = said.whole("left"), forms.row_of(said.take("row"))
            party.told(left, forms.row_of(said.take("head")))
            values[where[name]], rows[where[name]] = value, row or (0, "")

        header, until = question.header(), time.monotonic() + self._seconds
        unheard = set(where)
        while unheard:  # parties may restart, or the network may be cut: ask again while there is time
            requests = {
                name: (MessageKind.QUESTION, header | {"seen": list(self._members[place].seen)}, body)
                for name, place in where.items()
                if name in unheard
            }
            left = max(_PAUSE, until - time.monotonic())
            unheard -= self._exchange(requests, MessageKind.ANSWER, left, check, len(body))[1]
            if time.monotonic() + _PAUSE > until:
                break
            if unheard:
                time.sleep(_PAUSE)
        self._note(places, set(values))
        if not values:
            self._nobody(places)
        came = sorted(values)
        expected, variance = (
            np.array([getattr(self._terms[place], name) for place in came], dtype=np.float64)
            for name in ("expected", "variance")
        )
        weight = weight_of(weights, expected, variance)
        total = np.tensordot(weight, np.array([values[place] for place in came]), axes=1)
        divisor = float(weight @ expected)
        noise = float(np.square(weight) @ variance) / divisor**2
        receipts = tuple(self._receipt(place, rows[place]) for place in came)
        return came, Answers(total, divisor, len(came), self.alive, noise, receipts)

    def _summed(
        self, contribution: Gradient, shape: tuple[int, ...], body: bytes
    ) -> tuple[list[int], Answers]:
        """Return the sum over parties by secure aggregation; repeat in a new round where too many dropped
        out.
        """
        for _ in range(self._patience):
            places = [place for place, party in enumerate(self._members) if party.asked]
            enough_came(len(places), self._survivors, len(self))
            where = {self._members[place].name: place for place in places}
            session = Session(
                self._question(contribution, shape),
                body,
                {name: self._terms[place] for name, place in where.items()},
                sum(self._members[place].records for place in places),
                self._enrolled,
                max(self._members[place].colluding for place in places),
                self._seconds,
            )
            seen = {name: list(self._members[place].seen) for name, place in where.items()}
            total = session.run(self._exchange, seen)
            for name, (left, _, head) in session.charged.items():
                self._members[where[name]].told(left, head)
            self._note(places, {where[name] for name in session.charged})
            if total is not None:
                came = [where[name] for name in session.arrived]
                divisor = sum(self._terms[place].expected for place in came)
                noise = sum(self._terms[place].variance for place in came) / divisor**2
                rows = [session.charged[name][1] or (0, "") for name in session.arrived]
                receipts = tuple(self._receipt(p, row) for p, row in zip(came, rows, strict=True))
                return came, Answers(total, divisor, len(came), self.alive, noise, receipts)
            log.warning("round %d is lost: too few parties stayed", self._round)
            self._round += 1
        raise FarthingError(
            f"{self._patience} rounds in a row lost too many parties: resume when they are back"
        )

    def _note(self, places: list[int], came: set[int]) -> None:
        """Update the state of the parties that were asked."""
        for place in places:
            if place in came:
                self._members[place].answered()
                continue
            self._members[place].absent(self._patience)
            log.warning("%s did not answer round %d", self._members[place].name, self._round)

    def _nobody(self, places: list[int]) -> None:
        """Raise for a round without answers: `BudgetSpent` where no party can afford one."""
        if not any(self._members[place].asked for place in places):
            raise BudgetSpent(f"none of {len(self)} parties is still in the run and can afford another round")
        raise FarthingError(
            f"no party answered round {self._round} in {self._seconds:g} s: resume when they do"
        )

    def _exchange(
        self,
        requests: Mapping[str, Request],
        kind: MessageKind,
        seconds: float,
        check: Check,
        largest: int = 0,
    ) -> tuple[dict[str, Opened], set[str]]:
        """Return the accepted answers and all who replied; mark those that refused or broke the rules."""
        mail = self._requests.exchange(requests, kind, seconds, check, largest)
        for party in self._members:
            if party.name in mail.refused:
                party.refused(mail.refused[party.name])
            elif party.name in mail.broken:
                party.excluded(mail.broken[party.name])
        return mail.came, mail.heard

    # --- the checkpoint

    def _snapshot(self) -> list[list[Any]]:
        return [party.snapshot() for party in self._members]

    def _restore(self, said: list[list[Any]]) -> None:
        for party, values in zip(self._members, said, strict=True):
            party.restore(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartyView:
    """A party, as the live page shows it."""

    name: str
    state: str
    left: int | None = None  # rounds it can still afford, as it announced
    most: int | None = None  # rounds it could afford at the beginning
    records: int | None = None
    epsilon: float | None = None
    delta: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A run, as the live page shows it."""

    run: str
    method: str
    phase: str  # begins with "over" at the end
    round: int = 0
    parties: tuple[PartyView, ...] = ()
    accuracy: tuple[tuple[int, float], ...] = ()  # (round, accuracy on public test data)
    noise: float | None = None  # noise multiplier, the least over the parties
    clip: float | None = None
    seconds: float | None = None  # of one round, on average
    end: float | None = None  # estimated seconds until the end
