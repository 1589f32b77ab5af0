"""The server's side of a crowd whose parties are guards elsewhere: a `Crowd` like any other to algorithms.

`Remote` says hello to every enrolled party, proposes terms, and asks round by round over a `Transport`. A
round ends when all who were asked have answered or the time is up; who was late is missing from that round
and asked again in the next, and after ``patience`` rounds in a row is left in peace. Uploads are added in the
order of the parties, not of arrival.

Answers are checked before they count: signed by the party's enrolled key, about this very request, of the
right shape, finite, and no longer than clipped sums with that noise can be. What is not signed by the party
proves nothing about it, so the party is merely missing; a signed answer that breaks the rules excludes it.
Other parties' budgets are not touched by any of this.

With a `Checkpoint` a killed coordinator goes on: see there. The guarantee is not the coordinator's affair: it
holds whatever a coordinator does, by each party's own ledger.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.budget import Budget
from farthing.crowd import forms
from farthing.crowd.checkpoint import Checkpoint
from farthing.crowd.forms import Question, Turn
from farthing.crowd.messages import (
    LARGEST_HEADER,
    Fields,
    Kind,
    Opened,
    Reason,
    Refused,
    Signer,
    checked_name,
    digest,
    pack_numbers,
    refuse,
    seal,
    unpack_numbers,
    unseal,
)
from farthing.crowd.protocol import Answers, Forecast, enough_came, forecast_of, weight_of, weights_under
from farthing.crowd.sessions import Session
from farthing.crowd.terms import Invitation, Terms, Trust, Weights
from farthing.crowd.transport import Transport
from farthing.errors import BudgetSpent, FarthingError, InvalidValue, Unsupported
from farthing.losses import Gradient
from farthing.query import Contribution, Receipt

log = logging.getLogger("farthing.crowd")

Array = NDArray[np.float64]

_PAUSE = 0.25  # seconds between two attempts to reach somebody
_TAIL = math.sqrt(2 * math.log(1e12))  # deviations: an honest update is longer once in 1e12


class State(StrEnum):
    """Where a party stands."""

    HERE = "here"
    MISSING = "missing"  # did not answer the last round
    SPENT = "spent"  # cannot afford another
    REFUSED = "refused"  # refused our terms, or we refused its answer
    GONE = "gone"  # missed too many rounds


@dataclass(slots=True, eq=False)
class _Party:
    """What is known of a party. All of it is public."""

    name: str
    public: bytes
    budget: Budget
    records: int
    colluding: int
    seen: tuple[int, str]
    left: int = 0
    state: State = State.HERE
    missed: int = 0
    reason: str = ""

    @property
    def asked(self) -> bool:
        return self.left > 0 and self.state in (State.HERE, State.MISSING)


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
    """How far a run is. All of it is public."""

    run: str
    round: int
    alive: int
    parties: tuple[PartyStatus, ...]


class Remote:
    """Guards over a transport, as a `Crowd` (and `Passing`).

    ``enrolled`` are the public keys of all who may take part, ``seconds`` is how long a round may take.
    Waits until ``least`` parties (all, unless told) have said who they are.
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
        self._least = len(enrolled) if least is None else validate.count(least=least)
        self._transport, self._signer, self._enrolled = transport, signer, dict(enrolled)
        if not enrolled or self._least > len(enrolled):
            raise InvalidValue(f"least must be at most the number of parties, {len(enrolled)}, got {least!r}")
        self._checkpoint = Checkpoint(checkpoint, run, enrolled)
        self._round = 0
        self._terms: list[Terms] = []
        self._members = self._gathered()

    # --- who is there

    @property
    def users(self) -> int:
        return len(self._members)

    @property
    def names(self) -> Sequence[str]:
        """The parties, in the order of `left`, `budgets` and `records`."""
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

    def status(self) -> Status:
        """How far it is, for people to look at."""
        parties = tuple(PartyStatus(p.name, p.state, p.left, p.missed, p.reason) for p in self._members)
        return Status(self._run, self._round, self.alive, parties)

    def close(self) -> None:
        """Lets go of the checkpoint."""
        self._checkpoint.close()

    def _gathered(self) -> list[_Party]:
        recorded = self._checkpoint.next()
        if recorded is not None:
            return [self._member(name, Fields(said)) for name, said in recorded[0]["members"].items()]
        found: dict[str, tuple[_Party, dict[str, Any]]] = {}
        until = time.monotonic() + self._seconds
        while True:
            turn = Turn(self._run, 0, self._checkpoint.nonce(0))
            absent = [name for name in self._enrolled if name not in found]
            requests = {
                name: (Kind.HELLO, turn.header() | {"dataset": self._dataset}, b"") for name in absent
            }
            left = max(_PAUSE, until - time.monotonic())
            for name, opened in self._exchange(requests, Kind.ANNOUNCEMENT, left)[0].items():
                said = dict(opened.fields().plain())
                found[name] = self._member(name, opened.fields(), turn), said
            if len(found) >= self._least or time.monotonic() + _PAUSE > until:
                break
            time.sleep(_PAUSE)
        if len(found) < self._least:
            raise FarthingError(
                f"{len(found)} of {len(self._enrolled)} parties are there, {self._least} must be"
            )
        members = {name: found[name] for name in self._enrolled if name in found}  # in a fixed order
        self._checkpoint.add({"members": {name: said for name, (_, said) in members.items()}})
        return [party for party, _ in members.values()]

    def _member(self, name: str, said: Fields, turn: Turn | None = None) -> _Party:
        if Turn.of(said) != (turn or Turn(self._run, 0, self._checkpoint.nonce(0))):
            refuse(Reason.STALE, "it announces itself to another run")
        said.take("about")
        budget = forms.budget_of(said.inner("budget"))
        records, colluding = said.whole("records", 1), said.whole("colluding")
        row = forms.row_of(said.take("row"))
        said.done()
        return _Party(name, self._enrolled[name], budget, records, colluding, row or (0, "0" * 64))

    # --- terms

    def forecast(self, invitation: Invitation, weights: Weights = Weights.PRECISION) -> Forecast:
        terms = [invitation.terms(party.budget, party.records) for party in self._members]
        return forecast_of(invitation, weights, terms, np.arange(len(terms)))

    def invite(self, invitation: Invitation, weights: Weights = Weights.PRECISION) -> None:
        if self._terms:
            raise InvalidValue("this crowd was invited before: terms are settled once")
        if invitation.trust is Trust.TRUSTED:
            raise Unsupported("a guard hands nothing out without noise: trust must be local or distributed")
        self._weights = weights_under(invitation.trust, weights)
        self._survivors = invitation.survivors if invitation.trust is Trust.DISTRIBUTED else 1
        self._invitation = invitation
        self._terms = [invitation.terms(party.budget, party.records) for party in self._members]
        recorded = self._checkpoint.next()
        if recorded is not None:
            said = recorded[0]
            if said.get("invitation") != forms.invitation(invitation):
                raise InvalidValue("the checkpoint is that of other terms: use another folder")
            self._restore(said["parties"])
            return
        turn = Turn(self._run, 0, self._checkpoint.nonce(0))
        header = turn.header() | {"dataset": self._dataset, "invitation": forms.invitation(invitation)}
        requests = {party.name: (Kind.PROPOSAL, header, b"") for party in self._members}
        came, _ = self._exchange(requests, Kind.AGREEMENT, self._seconds)
        for party, terms in zip(self._members, self._terms, strict=True):
            if party.name in came:
                self._agreed(party, came[party.name].fields())
            elif party.state is State.HERE:  # not heard of, and may come later
                party.left, party.state = terms.rounds, State.MISSING
        if not self.alive:
            raise BudgetSpent("nobody agreed: " + (", ".join(f"{p.name}: {p.reason}" for p in self._members)))
        self._checkpoint.add({"invitation": forms.invitation(invitation), "parties": self._snapshot()})

    def _agreed(self, party: _Party, said: Fields) -> None:
        Turn.of(said)
        said.take("about")
        party.left, party.seen = said.whole("left"), forms.row_of(said.take("row")) or party.seen
        said.done()
        if not party.left:
            party.state = State.SPENT

    # --- rounds

    def ask(self, contribution: Contribution, w: Any) -> Answers:
        came = [place for place, party in enumerate(self._members) if party.asked]
        if self._terms:
            enough_came(len(came), self._survivors, self.users)
        return self._taken(came, contribution, w)

    def pick(self) -> int:
        """A party, by its share of all records; the same again after a crash. Not to be published."""
        ends = np.cumsum(self.records)
        place = self._checkpoint.turn(self._round + 1, int(ends[-1]))
        return int(np.searchsorted(ends, place, side="right"))

    def pass_to(self, party: int, contribution: Contribution, w: Any) -> Answers:
        """A round with this party alone."""
        if self._terms and self._invitation.trust is not Trust.LOCAL:
            raise Unsupported("only sums over parties are seen under distributed trust")
        if not 0 <= party < self.users:
            raise InvalidValue(f"party must lie between 0 and {self.users - 1}, got {party}")
        if self._terms and not self._members[party].asked:
            raise BudgetSpent(f"{self._members[party].name} can afford no further answer, or is gone")
        return self._taken([party], contribution, w, Weights.RECORDS)

    def _taken(
        self, places: list[int], contribution: Contribution, w: Any, weights: Weights | None = None
    ) -> Answers:
        """One round among some parties: recorded before, or asked now and recorded."""
        if not self._terms:
            raise InvalidValue("nobody was invited yet: call crowd.invite(Invitation(...)) first")
        w = np.asarray(w, dtype=np.float64)
        if not np.isfinite(w).all():
            raise InvalidValue("w must be finite, got NaN or infinity; nothing was charged")
        self._round += 1
        body = pack_numbers(w)
        recorded = self._checkpoint.next()
        if recorded is not None:
            return self._replayed(*recorded, digest(body), w.shape)
        if not isinstance(contribution, Gradient):
            raise Unsupported(f"a guard answers gradients only, got {type(contribution).__name__}")
        if self._invitation.trust is Trust.DISTRIBUTED:
            answers = self._summed(contribution, w.shape, body)
        else:
            question = self._question(contribution, w.shape)
            answers = self._plain(question, places, body, weights or self._weights)
        self._checkpoint.add(
            {
                "round": self._round,
                "weights": digest(body),
                "figures": [answers.divisor, answers.count, answers.alive, answers.variance],
                "receipts": [[r.seq, r.hash] for r in answers.receipts],
                "parties": self._snapshot(),
            },
            pack_numbers(answers.total),
        )
        return answers

    def _question(self, contribution: Gradient, shape: tuple[int, ...]) -> Question:
        turn = Turn(self._run, self._round, self._checkpoint.nonce(self._round))
        return Question(turn, self._dataset, self._invitation, contribution, shape)

    def _replayed(self, said: dict[str, Any], body: bytes, weights: str, shape: tuple[int, ...]) -> Answers:
        if said.get("round", 0) < self._round or said.get("weights") != weights:
            raise InvalidValue(
                f"round {self._round} of the checkpoint is that of another algorithm or of other options: "
                "resume with the same, or use another folder"
            )
        self._round = said["round"]  # rounds that were lost are not recorded
        self._restore(said["parties"])
        divisor, count, alive, variance = said["figures"]
        price = self._terms[0].price(self._members[0].budget)
        receipts = tuple(Receipt(seq, text, price) for seq, text in said["receipts"])
        return Answers(unpack_numbers(body, shape), divisor, count, alive, variance, receipts)

    def _plain(self, question: Question, places: list[int], body: bytes, weights: Weights) -> Answers:
        """Everybody's own upload, with all of its noise."""
        values: dict[int, Array] = {}
        receipts: dict[int, Receipt] = {}
        until = time.monotonic() + self._seconds
        header, open_ = question.header(), list(places)
        while open_:
            members = {self._members[place].name: place for place in open_}
            requests = {
                name: (Kind.QUESTION, header | {"seen": list(self._members[place].seen)}, body)
                for name, place in members.items()
            }
            checks = {name: self._checker(question, place, body) for name, place in members.items()}
            left = max(_PAUSE, until - time.monotonic())
            came, heard = self._exchange(requests, Kind.ANSWER, left, checks)
            for name, opened in came.items():
                values[members[name]], receipts[members[name]] = self._upload(question, members[name], opened)
            open_ = [place for name, place in members.items() if name not in heard]
            if open_ and time.monotonic() + _PAUSE > until:
                break
            if (
                open_
            ):  # they may be starting again, or the network is cut: the same question, while there is time
                time.sleep(_PAUSE)
        for place in places:
            self._note(self._members[place], place in values)
        if not values:
            return self._nobody(places)
        places = sorted(values)
        expected, variance = (
            np.array([getattr(self._terms[place], name) for place in places], dtype=np.float64)
            for name in ("expected", "variance")
        )
        weight = weight_of(weights, expected, variance)
        total = np.tensordot(weight, np.array([values[place] for place in places]), axes=1)
        divisor = float(weight @ expected)
        noise = float(np.square(weight) @ variance) / divisor**2
        paid = tuple(receipts[place] for place in places)
        return Answers(total, divisor, len(places), self.alive, noise, paid)

    def _summed(self, contribution: Gradient, shape: tuple[int, ...], body: bytes) -> Answers:
        """The sum over parties and nothing else; where too many left, once more in another round."""
        for _ in range(self._patience):
            places = [place for place, party in enumerate(self._members) if party.asked]
            enough_came(len(places), self._survivors, self.users)
            question = self._question(contribution, shape)
            names = {self._members[place].name: place for place in places}
            colluding = max(self._members[place].colluding for place in places)
            terms = {name: self._terms[place] for name, place in names.items()}
            records = sum(self._members[place].records for place in places)
            session = Session(question, body, terms, records, self._enrolled, colluding, self._seconds)
            seen = {name: list(self._members[place].seen) for name, place in names.items()}
            total = session.run(self._exchange, seen)
            for name, opened in session.answers.items():
                self._paid(names[name], opened)
            for name, place in names.items():
                self._note(self._members[place], name in session.answers)
            if total is not None:
                return self._of_sum(total, [names[name] for name in session.arrived], session)
            log.warning("round %d is lost: too few stayed", self._round)
            self._round += 1
        raise FarthingError(
            f"{self._patience} rounds in a row were left by too many: resume when they are back"
        )

    def _of_sum(self, total: Array, places: list[int], session: Session) -> Answers:
        divisor = sum(self._terms[place].expected for place in places)
        noise = sum(self._terms[place].variance for place in places) / divisor**2
        names = {party.name: place for place, party in enumerate(self._members)}
        rows = [
            (names[name], forms.row_of(session.answers[name].fields().take("row")))
            for name in session.arrived
        ]
        receipts = tuple(
            Receipt(*(row or (0, "")), self._terms[place].price(self._members[place].budget))
            for place, row in rows
        )
        return Answers(total, divisor, len(places), self.alive, noise, receipts)

    def _paid(self, place: int, opened: Opened) -> None:
        party, said = self._members[place], opened.fields()
        party.left, party.seen = said.whole("left"), forms.row_of(said.take("head")) or party.seen

    def _nobody(self, places: list[int]) -> Answers:
        """Nobody answered: over for good where nobody can afford a round, otherwise the network's fault."""
        if not any(self._members[place].asked for place in places):
            raise BudgetSpent(f"none of {self.users} parties can afford another round, or is still there")
        raise FarthingError(
            f"nobody answered round {self._round} in {self._seconds:g} s: resume when they do"
        )

    def _note(self, party: _Party, came: bool) -> None:
        """Where a party stands after a round."""
        if came:
            party.missed, party.reason = 0, ""
            party.state = State.HERE if party.left else State.SPENT
        elif party.state in (State.HERE, State.MISSING):
            party.missed += 1
            party.state = State.GONE if party.missed >= self._patience else State.MISSING
            log.warning("%s did not answer round %d", party.name, self._round)

    def _checker(self, question: Question, place: int, body: bytes) -> Callable[[Opened], None]:
        """What an answer must be; raises `Refused` where it is not."""
        party, terms = self._members[place], self._terms[place]

        def check(opened: Opened) -> None:
            said = opened.fields()
            if Turn.of(said) != question.turn:
                refuse(Reason.STALE, "it is of another run or round")
            if said.hexadecimal("weights", 32) != digest(body):
                refuse(Reason.CONFLICT, "it is about other weights")
            if said.hexadecimal("update", 32) != digest(opened.body):
                refuse(Reason.FORGED, "its update is not the one it names")
            value = unpack_numbers(opened.body, question.shape)
            if np.linalg.norm(value) > longest(terms, party.records, value.size):
                refuse(Reason.NORM, "its update is longer than clipped sums with this noise are")
            said.whole("left")
            forms.row_of(said.take("row"))
            forms.row_of(said.take("head"))

        return check

    def _upload(self, question: Question, place: int, opened: Opened) -> tuple[Array, Receipt]:
        """The upload of an answer that was checked."""
        self._paid(place, opened)
        price = self._terms[place].price(self._members[place].budget)
        row = forms.row_of(opened.fields().take("row")) or (0, "")
        return unpack_numbers(opened.body, question.shape), Receipt(*row, price)

    # --- messages

    def _exchange(
        self,
        requests: Mapping[str, tuple[Kind, dict[str, Any], bytes]],
        kind: Kind,
        seconds: float,
        checks: Mapping[str, Callable[[Opened], None]] | None = None,
        largest: int | None = None,
    ) -> tuple[dict[str, Opened], set[str]]:
        """What came back in time and in order, and who was heard of; marks who broke the rules."""
        sealed = {name: seal(*request, self._signer) for name, request in requests.items()}
        about = {name: unseal(data, {self._signer.public}, len(data)).digest for name, data in sealed.items()}
        came: dict[str, Opened] = {}
        heard: set[str] = set()
        for name, data in self._transport.exchange(sealed, seconds):
            if name not in sealed or name in heard:
                continue  # nobody asked it, or it answered before: duplicates count once
            try:
                most = len(requests[name][2]) if largest is None else largest
                opened = unseal(data, {self._enrolled[name]}, LARGEST_HEADER + 256 + most)
                said = opened.fields()
                if said.take("about") != about[name]:
                    refuse(Reason.STALE, "it is not about this request")
            except Refused as refusal:  # says nothing about the party: anybody could have made or kept it
                log.warning("from %s: %s", name, refusal)
                continue
            heard.add(name)
            try:
                self._must_be(kind, opened, said)
                if checks is not None:
                    checks[name](opened)
                came[name] = opened
            except Refused as refusal:
                log.warning("from %s: %s", name, refusal)
                self._exclude(name, refusal)
            if len(heard) == len(sealed):
                break
        return came, heard

    def _must_be(self, kind: Kind, opened: Opened, said: Fields) -> None:
        if opened.kind is Kind.REFUSAL:
            try:
                reason = Reason(said.take("reason"))
            except ValueError:
                reason = Reason.MALFORMED
            raise Refused(reason, "the guard refused")
        if opened.kind is not kind:
            refuse(Reason.MALFORMED, "it is another kind of message")

    def _exclude(self, name: str, refusal: Refused) -> None:
        """A party that refused, or whose signed answer breaks the rules, by what that means for it."""
        party = next((party for party in self._members_so_far if party.name == name), None)
        if party is None:
            return
        party.reason = str(refusal.reason)
        match refusal.reason:
            case Reason.SPENT | Reason.ROUNDS | Reason.PROMISED:
                party.left, party.state = 0, State.SPENT
            case Reason.LOST | Reason.LOCKED | Reason.INTERNAL:
                pass  # not in this round; perhaps in the next
            case _:
                party.left, party.state = 0, State.REFUSED

    @property
    def _members_so_far(self) -> list[_Party]:
        return getattr(self, "_members", [])

    # --- the checkpoint

    def _snapshot(self) -> list[list[Any]]:
        return [[p.left, str(p.state), p.missed, p.reason, *p.seen] for p in self._members]

    def _restore(self, said: list[list[Any]]) -> None:
        for party, (left, state, missed, reason, seq, text) in zip(self._members, said, strict=True):
            party.left, party.state, party.missed, party.reason = left, State(state), missed, reason
            party.seen = (seq, text)


def longest(terms: Terms, records: int, size: int) -> float:
    """How long an honest upload can be: all of its records clipped, and noise but for one time in 1e12.

    |N(0, I)| exceeds √d + t with a chance below e^(-t²/2) (Gaussian concentration; the norm is 1-Lipschitz).
    """
    noise = math.sqrt(terms.variance) * (math.sqrt(size) + _TAIL)
    return (terms.bound.clip * (records + 1) + noise) * (1 + 1e-6)
