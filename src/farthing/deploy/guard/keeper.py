"""Implement the guard: records, noise and ledger behind one function from bytes to bytes.

`Guard.answer` opens a signed message, checks it against the party's own `Policy` and either answers or
refuses; it never raises on what it is sent. A question carries everything it needs (terms, contribution,
weights), so the guard has no state but its ledger: after a crash it reads its state from the ledger.

The order is that of `Ledger.ask`: the charge is on disk, then the answer is computed and kept under its key,
then logged (`AnswerLog`), then sent. A repeated question (run, round, nonce, terms, weights) gets the kept
answer; one that was charged and never answered is refused (`Reason.LOST`): no second noise is drawn. A round
is answered once: earlier rounds are stale, whatever their nonce. No decision depends on a clock.

The guarantee is the ledger's: (ε, δ) of the policy for one unit, under its adjacency, against an observer who
sees everything that the guard ever sends. Rounds whose price the ledger's filter knows are charged to it one
by one (`GdpFilter` prices those without sampling exactly; the menu of a policy prices sampled ones): runs may
then end early, and terms may change, at no loss. Other prices are promised ahead: the first run settles them.
Draws and noise that depend on earlier rounds are one plan of turns (`farthing.deploy.guard.plans`).
"""

import contextlib
import hashlib
import json
import logging
import math
import threading
from bisect import bisect_left
from typing import Any

import numpy as np

from farthing.deploy.guard import plans
from farthing.deploy.guard.answers import Answerable, AnswerLog, Tables
from farthing.deploy.guard.masking import Masking
from farthing.deploy.guard.policy import Policy, TermsPricing, spending
from farthing.deploy.messages import forms
from farthing.deploy.messages.forms import Question, RoundId, refuse_weights
from farthing.deploy.messages.signed import (
    LARGEST_HEADER,
    MessageKind,
    Opened,
    Reason,
    Refused,
    Signer,
    digest,
    refuse,
    seal,
    unseal,
)
from farthing.deploy.secagg.masked_noise import own_cell
from farthing.errors import (
    BudgetSpent,
    FarthingError,
    InvalidValue,
    LedgerLocked,
    NotReleased,
    PromiseBroken,
    Unsupported,
)
from farthing.federated.protocol import ClientAgent
from farthing.federated.rounds import LocalSteps
from farthing.federated.terms import Invitation, Terms, Trust
from farthing.ledger.journal_rows import Row
from farthing.ledger.ledger import Ledger
from farthing.ledger.turns import forfeit
from farthing.noise.lattice import Stream
from farthing.queries.events import encode
from farthing.queries.query import Answer, Records

log = logging.getLogger("farthing.deploy.guard")

_LOCKED = "the ledger cannot be written, or is not the newest: nothing is released"


class Guard:
    """A party's guard over its records, which answers one question at a time; thread-safe."""

    def __init__(
        self,
        policy: Policy,
        records: Records,
        signer: Signer,
        *,
        answerable: Answerable | None = None,
        stream: Stream | None = None,
    ) -> None:
        self.policy, self._signer = policy, signer
        self._answerable = answerable if answerable is not None else Tables(policy.limits)
        self.largest = LARGEST_HEADER + self._answerable.largest + Masking.largest(policy) + 256
        distributed = policy.limits.trust is Trust.DISTRIBUTED
        self._masking = Masking(policy, signer, self) if distributed else None
        self._lock = threading.Lock()
        with contextlib.ExitStack() as opened:
            self._log = AnswerLog(policy.log)
            opened.callback(self._log.close)
            self._ledger = Ledger(
                policy.budget, journal=policy.ledger, filter=spending(policy), stream=stream, block=1
            )
            opened.callback(self._ledger.close)
            self._attached = self._ledger.over(records)
            self._agent = ClientAgent(self._attached, policy.size)
            self._pricing = TermsPricing(policy.limits, self._agent)
            self._past = _Past(policy.dataset)
            self._past.read(self._ledger)
            self._log.check(self._past.hashes, policy.ledger)
            self._name_the_ledger()
            opened.pop_all()  # no error: both stay open

    def _name_the_ledger(self) -> None:
        """Write the data set's name into a new ledger; refuse a ledger of another data set."""
        named, dataset = self._past.dataset, self.policy.dataset
        if named is None:
            note = {"dataset": dataset}
            self._ledger.journal.append("note", lambda last: (note, last.state))
        elif named != dataset:
            raise InvalidValue(f"the ledger {self.policy.ledger} belongs to {named!r}, not to {dataset!r}")

    @property
    def public(self) -> bytes:
        """Return the public key that verifies its answers."""
        return self._signer.public

    def close(self) -> None:
        """Close ledger, log and files."""
        with self._lock:
            self._ledger.close()
            self._log.close()

    # --- answering

    def answer(self, data: bytes) -> bytes:
        """Return a signed answer or a signed refusal. Never raises for what ``data`` holds."""
        about = ""
        try:
            opened = unseal(data, self.policy.coordinators, self.largest)
            about = opened.digest
            self._price(opened)
            # a floating-point warning would depend on the records
            with self._lock, np.errstate(all="ignore"):
                return self._reply(opened)
        except Refused as refusal:
            return self.refusal(refusal, about)
        except Exception as error:
            log.error("%s while answering: refused", type(error).__name__)
            return self.refusal(Refused(Reason.INTERNAL, "the guard could not answer this"), about)

    def refusal(self, refusal: Refused, about: str = "") -> bytes:
        """Return a signed refusal of the message with digest ``about``; log it without values."""
        log.warning("refused: %s", refusal)
        header = {"about": about, "reason": str(refusal.reason), "text": refusal.text}
        return seal(MessageKind.REFUSAL, header, b"", self._signer)

    def _reply(self, opened: Opened) -> bytes:
        try:
            match opened.kind:
                case MessageKind.HELLO:
                    return self._announce(opened)
                case MessageKind.PROPOSAL:
                    return self._agree(opened)
                case MessageKind.QUESTION:
                    return self._question(opened)
            if self._masking is not None:
                turn, kind, header, body = self._masking.reply(opened)
                return self._sealed(kind, turn, opened, header, body)
            refuse(Reason.MALFORMED, "a guard does not answer messages of this kind")
        except LedgerLocked as error:
            log.error("%s", error)
            refuse(Reason.LOCKED, _LOCKED)

    def _price(self, opened: Opened) -> None:
        """Price the terms of a message, if it has any, before the lock is taken."""
        if opened.kind in (MessageKind.PROPOSAL, MessageKind.QUESTION, MessageKind.OPENING):
            given = opened.fields()
            self._of_ours(given.text("dataset"))
            invitation = forms.invitation_of(given.inner("invitation"))
            with contextlib.suppress(Refused):  # remembered, and raised when the message is processed
                self._pricing.terms(invitation)

    def _announce(self, opened: Opened) -> bytes:
        given = opened.fields()
        turn, dataset, floor = RoundId.of(given), given.text("dataset"), forms.Floor.of(given)
        given.done()
        self._of_ours(dataset)
        self._past.read(self._ledger)
        if floor is not None and not floor.admits(self.policy.budget):
            log.warning(
                "run %s takes no budget below %s, and leaves this party out: its budget is %s",
                *(turn.run, floor, self.policy.budget),
            )
        header = {
            "budget": forms.budget(self.policy.budget),
            "records": self.policy.size,
            "colluding": self.policy.limits.colluding,
            **self._row(),
        }
        return self._sealed(MessageKind.ANNOUNCEMENT, turn, opened, header)

    def _agree(self, opened: Opened) -> bytes:
        given = opened.fields()
        turn, dataset = RoundId.of(given), given.text("dataset")
        invitation = forms.invitation_of(given.inner("invitation"))
        given.done()
        self._of_ours(dataset)
        self._past.read(self._ledger)
        terms = self._allowed(invitation)
        header = {"left": self._left(terms), **self._row()}
        if plans.shares_plan(invitation, terms):
            header["turn"] = self._taken_turns(terms)
        return self._sealed(MessageKind.AGREEMENT, turn, opened, header)

    def _question(self, opened: Opened) -> bytes:
        question = Question.of(opened.fields())
        w = question.weights(opened.body)
        if self.policy.limits.trust is not Trust.LOCAL:
            refuse(Reason.TRUST, "under distributed trust only masked answers are released")
        terms, key, _ = self.admitted(question)
        if (local := self._answerable.local_steps(question.contribution)) is not None:
            value, told = self._stepped(question, terms, w, key, local)
        else:
            answer = self.ask(question, terms, w, key)
            value, told = answer.value, self.released(key, answer, terms)
        body = question.pack(value)
        header = {"weights": digest(opened.body), "update": digest(body)}
        return self._sealed(MessageKind.ANSWER, question.turn, opened, header | told, body)

    # --- checking questions

    def _of_ours(self, dataset: str) -> None:
        if dataset != self.policy.dataset:
            refuse(Reason.DATASET, "this guard holds another data set")

    def _allowed(self, invitation: Invitation) -> Terms:
        """Return our terms for an invitation, if policy and promised budget allow them."""
        terms, promised = self._pricing.terms(invitation), self._past.promised
        if promised and self._event(terms) not in promised:
            refuse(Reason.PROMISED, "the budget of this data set is promised to other terms")
        filtered = self.policy.menu or (self._past.charged and not promised)
        if filtered and not self._adaptive(terms):
            refuse(Reason.PROMISED, "the ledger's filter has no price for these terms: a menu must name them")
        return terms

    def _event(self, terms: Terms) -> str:
        """Return the event as which a round is charged, as the ledger's rows have it."""
        return _text(encode(plans.charged_as(terms, self.policy.budget)))

    def _adaptive(self, terms: Terms) -> bool:
        """Return whether rounds are charged to the ledger's filter one by one, without a promise."""
        if self._past.promised or plans.has_plan(terms):
            return False
        try:
            self._ledger.filter.cost(terms.price(self.policy.budget))
        except Unsupported:
            return False
        return True

    def admitted(self, question: Question) -> tuple[Terms, str, bool]:
        """Return our terms, the key to charge and whether it is new, if policy and past rounds allow."""
        self._of_ours(question.dataset)
        self._answerable.refuse(question)
        self._past.read(self._ledger)
        self._past.must_hold(question.seen)
        terms = self._allowed(question.invitation)
        key = f"{question.turn.key(self.policy.dataset)}/{_about(question)}"
        try:
            # refuse before charging where the noise has no lattice
            own_cell(terms, math.prod(question.answered))
        except (FarthingError, ArithmeticError):
            refuse(Reason.NOISE, "there is no lattice for so much noise on so many coordinates")
        new = self._past.is_new(question.turn, key)
        if new:
            if self._past.charged >= (most := self.policy.limits.rounds):
                refuse(Reason.ROUNDS, f"all {most} rounds that the policy allows have been taken")
            if self._left(terms) <= self._behind(question, terms):
                refuse(Reason.SPENT, "the next round does not fit the budget")
        return terms, key, new

    def _behind(self, question: Question, terms: Terms) -> int:
        """Return how many turns of its plan a round skips."""
        turn, next_turn = plans.turn_of(question, terms), self._taken_turns(terms)
        if turn is not None and turn < next_turn:
            refuse(Reason.STALE, f"round {turn + 1} is over: the plan is at turn {next_turn + 1}")
        return 0 if turn is None else turn - next_turn

    def _taken_turns(self, terms: Terms) -> int:
        """Return how many rounds were charged on these terms."""
        return self._past.counts.get(self._event(terms), 0)

    def _left(self, terms: Terms) -> int:
        """Return how many more rounds budget and policy allow."""
        price, event = terms.price(self.policy.budget), self._event(terms)
        by_budget = self._past.promised.get(event, terms.rounds) - self._taken_turns(terms)
        left = max(0, min(by_budget, self.policy.limits.rounds - self._past.charged))
        if not left or not self._adaptive(terms) or self._ledger.affords(price, left):
            return left
        return bisect_left(range(1, left), True, key=lambda times: not self._ledger.affords(price, times))

    # --- charging and answering

    def ask(self, question: Question, terms: Terms, w: Any, key: str) -> Answer:
        """Charge, then answer; a repeated question gets the answer that was kept."""
        before, turn = self._past.holds(key), plans.turn_of(question, terms)
        try:
            if not self._adaptive(terms):
                self._agent.join(question.invitation)
            asked = self._answerable.contribution(question.contribution)
            if skipped := self._behind(question, terms):
                forfeit(self._attached, terms.query(asked), skipped)
            answer = self._attached.ask(terms.query(asked), w, key=key)
            if turn is not None and answer.receipt.turn != turn:
                refuse(Reason.LOST, "the ledger gave this round another turn: nothing is released")
            return answer
        except BudgetSpent:
            refuse(Reason.SPENT, "the next round does not fit the budget")
        except PromiseBroken:
            refuse(Reason.PROMISED, "the budget of this data set is promised to other terms")
        except NotReleased:
            refuse(Reason.LOST, "this round was charged and its answer lost: no second one is drawn")
        except InvalidValue:
            if before:
                refuse(Reason.CONFLICT, "this round was asked with the same nonce at other weights")
            raise

    def _stepped(
        self, question: Question, terms: Terms, w: Any, key: str, local: LocalSteps
    ) -> tuple[Any, dict[str, Any]]:
        """Take local private steps, each charged, kept and logged under a key of its own.

        The weights of a later step follow from answers that were charged, so that a refusal of them tells
        nothing more. A repeated question takes as many steps as the first did: what it charged counts.
        """
        answers: list[tuple[str, Answer]] = []

        def mean(at: Any) -> Any:
            refuse_weights(at)
            step = f"{key}/{len(answers) + 1}"
            answers.append((step, self.ask(question, terms, at, step)))
            return answers[-1][1].value / terms.expected

        update, taken = local.run(mean, w, self._left(terms) + self._past.taken(key))
        told = [self.released(step, answer, terms) for step, answer in answers]
        return terms.expected * update, told[-1] | {"taken": taken}

    def released(self, key: str, answer: Answer, terms: Terms) -> dict[str, Any]:
        """Log an answer durably; return the row that charged it and the rounds left."""
        value = np.ascontiguousarray(answer.value)
        self._log.append(key, answer.receipt.seq, answer.receipt.hash, digest(value.tobytes()))
        self._past.read(self._ledger)
        row = [answer.receipt.seq, answer.receipt.hash]
        return {"row": row, "left": self._left(terms), "head": self._past.newest}

    def _row(self) -> dict[str, Any]:
        """Return the newest row, which the coordinator keeps as a copy of the journal's head."""
        return {"row": self._past.newest}

    def _sealed(
        self, kind: MessageKind, turn: RoundId, opened: Opened, header: dict[str, Any], body: bytes = b""
    ) -> bytes:
        return seal(kind, turn.header() | {"about": opened.digest} | header, body, self._signer)


class _Past:
    """A summary of earlier rounds, read from the ledger incrementally."""

    def __init__(self, dataset: str) -> None:
        self._prefix = f"{dataset}/"
        self.hashes: list[str] = []
        self._rounds: dict[str, dict[int, str]] = {}  # run -> round -> key
        self._taken: dict[str, int] = {}  # key -> answers that were charged under it
        self.dataset: str | None = None
        self.promised: dict[str, int] = {}
        self.counts: dict[str, int] = {}

    def read(self, ledger: Ledger) -> None:
        for row in ledger.journal.rows(len(self.hashes)):
            self.hashes.append(row.hash)
            self._add(row)

    def _add(self, row: Row) -> None:
        body = row.body
        if row.kind == "note" and self.dataset is None:
            self.dataset = body.get("dataset")
        if row.kind == "promise":
            self.promised[_text(body["event"])] = body["times"]
        if row.kind in ("charge", "refund"):
            event, count = _text(body["event"]), body["count"]
            self.counts[event] = self.counts.get(event, 0) + (count if row.kind == "charge" else -count)
        key = body.get("answer", {}).get("key", "") if row.kind == "charge" else ""
        if key.startswith(self._prefix):
            run, number = key.split("/")[1:3]
            self._rounds.setdefault(run, {})[int(number)] = round_of(key)
            self._taken[round_of(key)] = self.taken(key) + 1

    def holds(self, key: str) -> bool:
        """Return whether a key was charged."""
        run, number = key.split("/")[1:3]
        return self._rounds.get(run, {}).get(int(number)) == round_of(key)

    def taken(self, key: str) -> int:
        """Return how many answers were charged under a key: local steps have a number behind it."""
        return self._taken.get(round_of(key), 0)

    @property
    def charged(self) -> int:
        """Return the number of answers that were charged, at any price."""
        return sum(self.counts.values())

    @property
    def newest(self) -> list[Any]:
        return [len(self.hashes) - 1, self.hashes[-1]]

    def must_hold(self, seen: tuple[int, str] | None) -> None:
        """Refuse where the ledger lacks a row that the coordinator saw: it was rolled back."""
        if seen is not None and not (seen[0] < len(self.hashes) and self.hashes[seen[0]] == seen[1]):
            log.error("the ledger lacks row %d, which the coordinator has seen", seen[0])
            refuse(Reason.LOCKED, _LOCKED)

    def is_new(self, turn: RoundId, key: str) -> bool:
        """Return True for a new question, False for a repeated one; refuse stale and conflicting ones."""
        rounds = self._rounds.get(turn.run, {})
        before = rounds.get(turn.round)
        if before == key:
            return False
        if before is not None and before.split("/")[3] == turn.nonce:
            refuse(Reason.CONFLICT, "this round was asked with the same nonce and other terms")
        if before is not None or turn.round < max(rounds, default=1):
            refuse(Reason.STALE, "this round is over")
        return True


def round_of(key: str) -> str:
    """Return the key of a round, without the number of a local step."""
    return "/".join(key.split("/")[:5])


def _text(event: dict[str, Any]) -> str:
    return json.dumps(event, sort_keys=True)


def _about(question: Question) -> str:
    """Return a digest of terms and contribution, which with the weights determine an answer."""
    header = question.header()
    text = json.dumps([header["invitation"], header["contribution"], header["shape"]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
