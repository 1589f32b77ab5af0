"""Take a guard's part in secure aggregation: one session at a time, in memory only.

Under distributed trust a guard's noise is only a share of what the sum needs, so its upload must not be seen
alone. The guard itself is the member of the session (`farthing.deploy.secagg.protocol.Member`); the processes
that relay its messages see masked vectors and sealed shares. Keys of a session are never written to disk: a
guard that was restarted has dropped out of the session, and the others recover its masks from their shares.
A round that was charged is not masked again.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from farthing.deploy.guard.policy import Policy
from farthing.deploy.messages.forms import Question, RoundId
from farthing.deploy.messages.signed import (
    SIGNATURE,
    Fields,
    MessageKind,
    Opened,
    Reason,
    Refused,
    Signer,
    digest,
    pack_table,
    refuse,
    table_size,
    unpack_table,
)
from farthing.deploy.secagg.masked_noise import masked
from farthing.deploy.secagg.protocol import ADVERT, SEALED, Member, pack_words, session_of
from farthing.errors import InvalidValue
from farthing.federated.terms import Terms
from farthing.queries.query import Answer

Array = NDArray[np.float64]


class GuardSession(Protocol):
    """The interface of the guard to a session of secure aggregation."""

    def admitted(self, question: Question) -> tuple[Terms, str, bool]:
        """Return our terms, the key to charge and whether it is new; refuse where the policy says so."""

    def ask(self, question: Question, terms: Terms, w: Array, key: str) -> Answer:
        """Charge and answer."""

    def released(self, key: str, answer: Answer, terms: Terms) -> dict[str, Any]:
        """Log the answer, durably."""


@dataclass(slots=True, eq=False)
class _Session:
    question: Question
    weights: str
    terms: Terms
    key: str
    member: Member
    replies: dict[str, tuple[MessageKind, dict[str, Any], bytes]] = field(default_factory=dict)


class Masking:
    """A guard's replies to the messages of secure aggregation."""

    def __init__(self, policy: Policy, signer: Signer, keeper: GuardSession) -> None:
        self._policy, self._signer, self._keeper = policy, signer, keeper
        names = [name for name, key in policy.parties.items() if key == signer.public]
        if not names:
            raise InvalidValue(
                "[parties] must hold the public key of the guard itself under distributed trust"
            )
        self._name = names[0]
        self._session: _Session | None = None

    @staticmethod
    def largest(policy: Policy) -> int:
        """Return the most bytes of tables that a message can hold."""
        return table_size(len(policy.parties), max(ADVERT, SEALED, SIGNATURE))

    def reply(self, opened: Opened) -> tuple[RoundId, MessageKind, dict[str, Any], bytes]:
        """Return the reply to a message; a repeated message gets the reply that was kept."""
        given, session = opened.fields(), self._session
        if session is not None and opened.digest in session.replies:
            return session.question.turn, *session.replies[opened.digest]
        if opened.kind is MessageKind.OPENING:
            session = self._open(opened, given)
            made: tuple[MessageKind, dict[str, Any], bytes] = (
                MessageKind.ADVERT,
                {},
                session.member.advertise(),
            )
        else:
            if session is None or RoundId.of(given) != session.question.turn:
                refuse(Reason.MEMBERS, "this session does not exist")
            made = self._step(session, opened, given)
        session.replies[opened.digest] = made
        return session.question.turn, *made

    def _open(self, opened: Opened, given: Fields) -> _Session:
        header = given.plain()
        weights = given.hexadecimal("weights", 32)
        question = Question.of(given)
        terms, key, new = self._keeper.admitted(question)
        if not new:
            refuse(Reason.LOST, "this round was charged, and its session is over")
        member = Member(
            session_of(header),
            self._name,
            self._signer,
            self._policy.parties,
            survivors=question.invitation.survivors,
            colluding=self._policy.limits.colluding,
        )
        self._session = _Session(question, weights, terms, key, member)
        return self._session

    def _step(
        self, session: _Session, opened: Opened, given: Fields
    ) -> tuple[MessageKind, dict[str, Any], bytes]:
        member, most = session.member, len(self._policy.parties)
        match opened.kind:
            case MessageKind.ROSTER:
                threshold = given.whole("threshold", 1, most)
                given.done()
                adverts = unpack_table(opened.body, most, (ADVERT,))
                return MessageKind.SHARES, {}, pack_table(member.share(adverts, threshold))
            case MessageKind.MASKED_QUESTION:
                return self._masked(session, opened, given)
            case MessageKind.SURVIVORS:
                given.done()
                return MessageKind.CONSENT, {}, member.consent(list(unpack_table(opened.body, most, (0,))))
            case MessageKind.REVEAL:
                given.done()
                revealed = member.reveal(unpack_table(opened.body, most, (SIGNATURE,)))
                return MessageKind.REVEALED, {}, pack_table(revealed)
        raise Refused(Reason.MALFORMED, "a guard does not answer messages of this kind")

    def _masked(
        self, session: _Session, opened: Opened, given: Fields
    ) -> tuple[MessageKind, dict[str, Any], bytes]:
        length, each = given.whole("table", 0, len(opened.body)), given.whole("each", 1, 8)
        given.done()
        question, terms = session.question, session.terms
        sealed = unpack_table(opened.body[:length], len(self._policy.parties), (SEALED,))
        if digest(opened.body[length:]) != session.weights:
            refuse(Reason.CONFLICT, "these are not the weights that the session was opened for")
        w = question.weights(opened.body[length:])
        size = math.prod(question.answered)
        hidden = masked(terms, size, session.member.mask(sealed, size))
        answer = self._keeper.ask(question, hidden, w, session.key)
        body = pack_words(np.asarray(answer.value, dtype=np.uint64), each)
        header = {"weights": session.weights, "update": digest(body)}
        return MessageKind.MASKED_ANSWER, header | self._keeper.released(session.key, answer, terms), body
