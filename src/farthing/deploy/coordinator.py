"""Coordinate parties whose guards run elsewhere: `Remote` gives algorithms the interface of `Clients`.

`Remote` greets every enrolled party, proposes terms, and asks round by round over a `Transport`; its roster
knows who is there. A round ends when all parties that were asked have answered, or after ``deadline`` seconds
when a ``quorum`` of them has, or when the time is up. A late answer is dropped, or counts in a later round
(`Averaging.staleness`). Parties may come, go and return at no charge. Uploads are added in the order of the
parties, not of arrival.

Terms may be proposed again at any time (`Remote.invite`): every guard prices them under its one ledger.

Answers are checked before they count: signed by the party's enrolled key, about this very request, of the
right shape, finite, and no longer than clipped sums with that noise can be. An answer without the party's
signature proves nothing about the party, which counts as missing; a signed answer that breaks the rules
excludes it. Other parties' budgets are not touched by any of this (an exception: docs/threat-model.md).

With a `Checkpoint` a killed coordinator resumes its run. The privacy guarantee does not depend on the
coordinator: it holds whatever a coordinator does, by each party's own ledger.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.budget import Budget
from farthing.deploy.averages import Averaging, Upload, limited, longest_upload, steps_of
from farthing.deploy.checkpoint import Checkpoint
from farthing.deploy.messages import forms
from farthing.deploy.messages.forms import Asked, Floor, Question, RoundId
from farthing.deploy.messages.signed import (
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
from farthing.deploy.messages.transport import Check, Replies, Request, SignedExchange, Transport
from farthing.deploy.roster import PAUSE, Party, PartyRoster, PartyStatus, State, Status, terms_or_why
from farthing.deploy.secagg.protocol import least_threshold
from farthing.deploy.secagg.sessions import Session
from farthing.errors import BudgetSpent, FarthingError, InvalidValue, Unsupported
from farthing.federated.evaluation import Evaluation
from farthing.federated.protocol import Answers, enough_came
from farthing.federated.rounds import Forecast, forecast_of
from farthing.federated.terms import Invitation, Terms, Trust, Weights, weights_under
from farthing.noise.lattice import Stream
from farthing.queries.query import Contribution, Receipt

__all__ = ["PartyStatus", "Remote", "State", "Status"]

log = logging.getLogger("farthing.federated")

Array = NDArray[np.float64]


class _NoAnswerError(FarthingError):
    """Nobody answered a round in time."""


class Remote:
    """Guards over a transport, as `Clients` (and `SequentialClients`).

    ``enrolled`` are the public keys of all parties that may take part, ``seconds`` is how long a round may
    take; after ``deadline`` seconds a ``quorum`` (a share of those that were asked) is enough. Waits until
    ``least`` parties (by default all) have announced themselves; others may come at any time. Parties whose
    budgets are below the ``floor`` are left out, and told so.
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
        quorum: float = 1.0,
        deadline: float | None = None,
        averaging: Averaging | None = None,
        floor: Floor | None = None,
    ) -> None:
        self._run, self._dataset = checked_name(run=run), checked_name(dataset=dataset)
        self._seconds = validate.positive(seconds=seconds)
        self._patience = validate.count(patience=patience)
        if not 0 < validate.positive(quorum=quorum) <= 1:
            raise InvalidValue(
                f"quorum must be a share of the parties, above 0 and at most 1, got {quorum!r}"
            )
        self._quorum = quorum
        self._deadline = validate.positive(deadline=self._seconds if deadline is None else deadline)
        self._averaging = Averaging() if averaging is None else averaging
        self._enrolled = {checked_name(party=name): key for name, key in enrolled.items()}
        self._least = None if least is None else validate.count(least=least)
        if not enrolled or (self._least or 0) > len(enrolled):
            raise InvalidValue(f"least must be at most the number of parties, {len(enrolled)}, got {least!r}")
        self._round, self._stream = 0, Stream()
        self.picks = False  # it does where parties take turns, which are secret
        self._first = 0  # the turn of a plan of shares at which the run began
        self._recent: dict[int, tuple[Question, bytes]] = {}  # questions whose answers may still come
        self._checkpoint = Checkpoint(checkpoint, run, enrolled)
        requests = SignedExchange(transport, signer, self._enrolled)
        self._roster = PartyRoster(
            requests, self._enrolled, self._turn(), self._dataset, self._patience, floor
        )
        try:
            self._gather()
        except BaseException:
            self.close()
            raise

    # --- parties

    @property
    def _members(self) -> list[Party]:
        return self._roster.members

    @property
    def _terms(self) -> list[Terms]:
        return self._roster.terms

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
        """Return each party's number of records as it counts: no more than [averaging] lets it state."""
        most = self._averaging.records
        said = np.array([party.records for party in self._members], dtype=np.int64)
        return said if most is None else np.minimum(said, most)

    @property
    def left(self) -> NDArray[np.int64]:
        return np.array([party.left if party.asked else 0 for party in self._members], dtype=np.int64)

    @property
    def alive(self) -> int:
        return self._roster.alive

    def terms(self, party: int) -> Terms:
        """Return the terms that a party was invited on."""
        return self._terms[party]

    def status(self) -> Status:
        """Return the run's progress, for the live page."""
        parties = tuple(party.status for party in self._members)
        return Status(self._run, self._round, self.alive, parties, self._roster.left_out)

    def close(self) -> None:
        """Close the checkpoint."""
        self._checkpoint.close()

    def _gather(self) -> None:
        recorded = self._checkpoint.next()
        if recorded is None:
            said = self._roster.gather(self._least, self._seconds)
            self._checkpoint.add({"members": said})
        self._roster.begin(said if recorded is None else recorded[0]["members"])

    # --- terms

    def forecast(self, invitation: Invitation, weights: Weights = Weights.PRECISION) -> Forecast:
        """Return the forecast of those with terms; statements count up to the caps of [averaging]."""
        counted = self._averaging.counted([(party.budget, party.records) for party in self._members])
        found = [terms_or_why(invitation, *stated) for stated in counted]
        terms = [one for one in found if isinstance(one, Terms)]
        if not terms:
            raise next(one for one in found if isinstance(one, Exception))
        return forecast_of(invitation, weights, terms, np.arange(len(terms)))

    def invite(self, invitation: Invitation, weights: Weights = Weights.PRECISION) -> None:
        """Propose terms to all parties; again at any time, where rounds under earlier terms stay charged."""
        if invitation.trust is Trust.TRUSTED:
            raise Unsupported("a guard releases nothing without noise: trust must be local or distributed")
        if invitation.trust is not Trust.LOCAL and self._averaging.sees_uploads:
            raise Unsupported(
                "late answers, caps, trimmed means and medians need local trust: uploads are seen"
            )
        self._weights, self._recent = weights_under(invitation.trust, weights), {}
        self._survivors = invitation.survivors if invitation.trust is Trust.DISTRIBUTED else 1
        self._invitation, form = invitation, forms.invitation(invitation)
        self._roster.invite(invitation)
        recorded = self._checkpoint.next()
        if recorded is None:
            stands = self._roster.propose(self._turn(), form, self._seconds)
            self._first = max(0, stands - self._round)
            said = {"invitation": form, "parties": self._roster.snapshot(), "first": self._first}
            self._checkpoint.add(said)
        elif recorded[0].get("invitation") != form:
            raise InvalidValue("the checkpoint belongs to other terms: use another folder")
        else:
            self._roster.restore(recorded[0]["parties"])
            self._first = recorded[0].get("first", 0)

    # --- rounds

    def ask(self, contribution: Contribution, w: Any) -> Answers:
        if isinstance(contribution, Evaluation):
            return self._evaluated(contribution, w)
        if self._terms and not self._checkpoint.replaying:
            self._roster.await_enough(self._survivors, self._seconds)
        came = [place for place, party in enumerate(self._members) if party.asked]
        return self._taken(came, contribution, w)

    def _evaluated(self, evaluation: Evaluation, w: Any) -> Answers:
        """Ask those whose policies may allow it; `Unsupported` where nobody does, also in a resumed run."""
        if self._skipped() is None:
            came = [place for place, party in enumerate(self._members) if party.asked and party.judges]
            try:
                if came or self._checkpoint.replaying:
                    return self._taken(came, evaluation, w)
            except InvalidValue:
                raise
            except FarthingError as error:
                log.warning("no evaluation: %s", error)
            self._passed()
        raise Unsupported("no party answered the evaluation: policies must allow it, evaluation = true")

    def pick(self) -> int:
        """Pick a party in proportion to its records; unchanged after a crash, and not to be published.

        A party counts no more records than [averaging] lets it, whatever it states.
        """
        self.picks = True
        ends = np.cumsum(self.records)
        place = self._checkpoint.turn(self._round + 1, int(ends[-1]))
        return int(np.searchsorted(ends, place, side="right"))

    def ask_one(self, party: int, contribution: Contribution, w: Any) -> Answers:
        """Run a round with this party alone; noise alone, with a ``count`` of 0, where it is away.

        Its turn passes: nobody else is asked in its place, as others would be drawn more often than was
        planned and priced. The noise is that of a party without records: only the coordinator sees that.
        """
        if self._terms and self._invitation.trust is not Trust.LOCAL:
            raise Unsupported("only sums over parties are seen under distributed trust")
        if not 0 <= party < len(self):
            raise InvalidValue(f"party must lie between 0 and {len(self) - 1}, got {party}")
        if (noise := self._skipped()) is not None:
            return self._noise(party, unpack_numbers(noise, np.shape(w)))
        if self._terms and not self._checkpoint.replaying:
            self._roster.await_enough(1, self._seconds)
            if self._members[party].state is State.SPENT:
                raise BudgetSpent(f"{self._members[party].name} can afford no further answer")
            if not self._members[party].asked:
                return self._noise(party, np.zeros(np.shape(w)), passed=True)
        try:
            return self._taken([party], contribution, w, Weights.RECORDS)
        except _NoAnswerError:
            return self._noise(party, np.zeros(np.shape(w)), passed=True)

    def _skipped(self) -> bytes | None:
        """Return what the recorded run noted if it passed here, and take it over; otherwise None."""
        if (recorded := self._checkpoint.passed()) is None:
            return None
        said, body = recorded
        self._round = said["round"]
        self._roster.admit(said["joined"])
        self._roster.restore(said["parties"])
        return body

    def _passed(self, noise: bytes = b"") -> None:
        """Record a turn that passes."""
        self._roster.admit()
        self._round += 1
        said = {"parties": self._roster.snapshot(), "joined": self._roster.joined()}
        self._checkpoint.add({"passed": True, "round": self._round, **said}, noise)

    def _noise(self, party: int, noise: Array, passed: bool = False) -> Answers:
        """Return an answer of noise alone: as recorded, or drawn for a turn that passes now."""
        terms = self._terms[party]
        if passed:
            noise = terms.mechanism.release(noise, terms.bound, self._stream)
            self._passed(pack_numbers(noise))
        return Answers(noise, terms.expected, 0, self.alive, terms.variance / terms.expected**2)

    def _taken(
        self, places: list[int], contribution: Contribution, w: Any, weights: Weights | None = None
    ) -> Answers:
        """Return the answers of one round among some parties: from the checkpoint, or asked and recorded."""
        if not self._terms:
            raise InvalidValue("no client was invited yet: call clients.invite(Invitation(...)) first")
        w = np.asarray(w, dtype=np.float64)
        if not np.isfinite(w).all():
            raise InvalidValue("w must be finite, got NaN or infinity; nothing was charged")
        asked = forms.asked_of(contribution)
        self._round += 1
        body, recorded = self._question(asked, w.shape).pack(w), self._checkpoint.next()
        if recorded is not None:
            answers = self._replayed(*recorded, digest(body), self._question(asked, w.shape))
            self._remember(self._question(asked, w.shape), body)
            return answers
        if self._invitation.trust is Trust.DISTRIBUTED:
            paid, answers = self._summed(asked, w.shape, body)
        else:
            question = self._question(asked, w.shape)
            self._remember(question, body)
            paid, answers = self._plain(question, places, weights or self._weights)
        self._roster.admit()
        log.info("round %d: %d answers, %d parties can go on", self._round, answers.count, self.alive)
        said = {
            "round": self._round,
            "weights": digest(body),
            "evaluation": self._question(asked, w.shape).evaluates,
            "figures": [answers.divisor, answers.count, answers.alive, answers.variance],
            "receipts": [[p, r.seq, r.hash] for p, r in zip(paid, answers.receipts, strict=True)],
            "parties": self._roster.snapshot(),
            "joined": self._roster.joined(),
        }
        self._checkpoint.add(said, pack_numbers(answers.total))
        return answers

    def _turn(self) -> RoundId:
        return RoundId(self._run, self._round, self._checkpoint.nonce(self._round))

    def _question(self, asked: Asked, shape: tuple[int, ...]) -> Question:
        turn = self._turn()
        return Question(turn, self._dataset, self._invitation, asked, shape, first=self._first)

    def _replayed(self, said: dict[str, Any], body: bytes, weights: str, question: Question) -> Answers:
        same = said.get("weights") == weights and said.get("evaluation", False) is question.evaluates
        if said.get("round", 0) < self._round or not same:
            raise InvalidValue(
                f"round {self._round} of the checkpoint belongs to another algorithm or other options: "
                "resume with the same, or use another folder"
            )
        self._round = said["round"]  # lost rounds are not recorded
        self._roster.admit(said["joined"])
        self._roster.restore(said["parties"])
        divisor, count, alive, variance = said["figures"]
        receipts = tuple(self._receipt(place, (seq, text)) for place, seq, text in said["receipts"])
        return Answers(unpack_numbers(body, question.answered), divisor, count, alive, variance, receipts)

    def _receipt(self, place: int, row: tuple[int, str]) -> Receipt:
        return Receipt(*row, self._terms[place].price(self._members[place].budget))

    def _plain(self, question: Question, places: list[int], weights: Weights) -> tuple[list[int], Answers]:
        """Ask each party for its own upload, which carries all of its noise."""
        values: dict[int, Array] = {}
        rows: dict[int, tuple[int, str]] = {}
        factors: dict[int, float] = {}  # on the variance of one answer
        where = {self._members[place].name: place for place in places}
        asked = {name: self._asked(self._members[place], question) for name, place in where.items()}

        def check(name: str, opened: Opened) -> None:
            """Accept an answer to the question that the party was asked, or refuse it."""
            party, said, (about, body) = self._members[where[name]], opened.fields(), asked[name]
            if RoundId.of(said) != about.turn:
                refuse(Reason.STALE, "the answer is for another run or round")
            if said.hexadecimal("weights", 32) != digest(body):
                refuse(Reason.CONFLICT, "the answer is about other weights")
            if said.hexadecimal("update", 32) != digest(opened.body):
                refuse(Reason.FORGED, "the update does not match its digest")
            value = about.answer(opened.body)
            if np.linalg.norm(value) > longest_upload(about, body, self._terms[where[name]], party.records):
                refuse(Reason.NORM, "the update is longer than clipped sums with this noise can be")
            left, row = said.whole("left"), forms.row_of(said.take("row"))
            party.told(left, forms.row_of(said.take("head")))
            factors[where[name]] = steps_of(about, said)
            values[where[name]], rows[where[name]] = value, row or (0, "")

        requests: dict[str, Request] = {
            name: (MessageKind.QUESTION, replace(about, seen=self._members[where[name]].seen).header(), body)
            for name, (about, body) in asked.items()
        }
        silent = self._collect(requests, values, check, max(len(body) for _, body in asked.values()))
        rounds = {place: asked[name][0].turn.round for name, place in where.items()}
        late = {place: self._round - rounds[place] for place in values}
        self._roster.note(self._round, places, late, {where[name]: rounds[where[name]] for name in silent})
        if not values:
            self._nobody(places)
        came = sorted(values)
        uploads = [self._upload(place, values[place], factors[place], late[place]) for place in came]
        sums = self._averaging.combined(uploads, weights)
        receipts = tuple(self._receipt(place, rows[place]) for place in came)
        return came, Answers(sums.total, sums.divisor, len(came), self.alive, sums.variance, receipts)

    def _collect(
        self, requests: Mapping[str, Request], values: Mapping[int, Array], check: Check, largest: int
    ) -> set[str]:
        """Ask until all have answered, or a quorum after the deadline, or the time is up.

        Parties may restart, or the network may be cut: who did not reply is asked again while there is time.
        Returns who did not.
        """
        began, unheard = time.monotonic(), set(requests)
        needed = math.ceil(self._quorum * len(requests) - 1e-9)  # 0.07 of 100 are 7, not 8

        def passed() -> float:
            return time.monotonic() - began

        def enough(mail: Replies) -> bool:
            return unheard <= mail.heard or (passed() >= self._deadline and len(values) >= needed)

        while True:
            ends = self._deadline if passed() < self._deadline else self._seconds
            due = {name: request for name, request in requests.items() if name in unheard}
            left = max(PAUSE, ends - passed())
            unheard -= self._roster.exchange(due, MessageKind.ANSWER, left, check, largest, enough)[1]
            if enough(Replies()) or passed() + PAUSE > self._seconds:
                return unheard
            if passed() < ends:
                time.sleep(PAUSE)

    def _upload(self, place: int, value: Array, factor: float, stale: int) -> Upload:
        terms, party, least = self._terms[place], self._members[place], 0.0
        if (cap := self._averaging.epsilon) is not None:
            capped = limited(party.budget, cap, [other.budget for other in self._members])
            least = self._invitation.terms(capped, party.records).variance
        return Upload(value, terms.expected, factor * terms.variance, factor * least, stale)

    def _remember(self, question: Question, body: bytes) -> None:
        """Keep the questions whose answers may still count."""
        self._recent[self._round] = (question, body)
        least = self._round - self._averaging.staleness
        self._recent = {number: asked for number, asked in self._recent.items() if number >= least}

    def _asked(self, party: Party, question: Question) -> tuple[Question, bytes]:
        """Return the question that a party is asked: this round's, or an earlier one that it still owes."""
        return self._recent.get(party.owes) or self._recent[question.turn.round]

    def _summed(self, asked: Asked, shape: tuple[int, ...], body: bytes) -> tuple[list[int], Answers]:
        """Return the sum over parties by secure aggregation; repeat in a new round where too many dropped
        out.
        """
        for _ in range(self._patience):
            places = self._agreeing([place for place, party in enumerate(self._members) if party.asked])
            enough_came(len(places), self._survivors, len(self))
            where = {self._members[place].name: place for place in places}
            session = Session(
                self._question(asked, shape),
                body,
                {name: self._terms[place] for name, place in where.items()},
                sum(self._members[place].records for place in places),
                self._enrolled,
                max(self._members[place].colluding for place in places),
                self._seconds,
            )
            seen = {name: list(self._members[place].seen) for name, place in where.items()}
            total = session.run(self._roster.exchange, seen)
            for name, (left, _, head) in session.charged.items():
                self._members[where[name]].told(left, head)
            self._roster.note(self._round, places, {where[name]: 0 for name in session.charged}, {})
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

    def _agreeing(self, places: list[int]) -> list[int]:
        """Leave out parties that want safety against more others than there are: they must not stop all."""
        left = places
        while left:
            most = max(self._members[place].colluding for place in left)
            if least_threshold(len(left), most, self._survivors) <= len(left):
                return left
            left = [place for place in left if self._members[place].colluding < most]
        return places

    def _nobody(self, places: list[int]) -> None:
        """Raise for a round without answers: `BudgetSpent` where no party can afford one."""
        if all(self._members[place].state in (State.SPENT, State.REFUSED) for place in places):
            raise BudgetSpent(f"none of {len(self)} parties is still in the run and can afford another round")
        asked = [self._members[place] for place in places]
        why = ", ".join(f"{party.name}: {party.reason or 'no answer'}" for party in asked)
        raise _NoAnswerError(
            f"no party answered round {self._round} in {self._seconds:g} s ({why}): resume when they do"
        )
