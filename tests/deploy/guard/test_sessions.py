"""A guard in a session of secure aggregation, message by message: what it refuses, at no cost."""

import numpy as np
import pytest

from farthing.data.tables import Features
from farthing.deploy.messages.forms import Question, RoundId
from farthing.deploy.messages.signed import (
    MessageKind,
    Reason,
    digest,
    pack_numbers,
    pack_table,
    seal,
    unpack_table,
    unseal,
)
from farthing.deploy.secagg.protocol import ADVERT, SEALED
from farthing.federated.terms import Invitation
from farthing.linear.losses import LinearGradient, logistic

GRADIENT = LinearGradient(logistic, Features(2))
TERMS = Invitation(1.0, rounds=5, noise_multiplier=500.0, trust="distributed", survivors=2)
WEIGHTS = pack_numbers(np.zeros(3))


class Session:
    """The coordinator's side of one session, a step at a time; any field of a message may be a lie."""

    def __init__(self, village, number=1, nonce="0" * 32):
        self.village, self.turn = village, RoundId("run-1", number, nonce)
        self.guards = {name: house.open() for name, house in village.houses.items()}
        self.threshold = len(self.guards)

    def header(self, **lies):
        question = Question(self.turn, "d", TERMS, GRADIENT, (3,))
        return question.header() | {"weights": digest(WEIGHTS)} | lies

    def ask(self, name, kind, header, body=b""):
        """What a guard replies: the reason of a refusal, or the body of its answer."""
        reply = self.guards[name].answer(seal(kind, header, body, self.village.coordinator))
        found = unseal(reply, {self.village.houses[name].signer.public}, 10**6)
        return Reason(found.fields().plain()["reason"]) if found.kind is MessageKind.REFUSAL else found.body

    def open(self, name, **lies):
        return self.ask(name, MessageKind.OPENING, self.header(**lies))

    def share(self, name, adverts, threshold=None):
        header = self.turn.header() | {"threshold": threshold or self.threshold}
        return self.ask(name, MessageKind.ROSTER, header, pack_table(adverts))

    def masked(self, name, boxes, weights=WEIGHTS):
        table = pack_table(boxes)
        header = self.turn.header() | {"table": len(table), "each": 8}
        return self.ask(name, MessageKind.MASKED_QUESTION, header, table + weights)

    def begun(self):
        """All have shared their secrets: what p0 is to be sent with the weights."""
        self.adverts = {name: self.open(name) for name in self.guards}
        sealed = {name: unpack_table(self.share(name, self.adverts), 9, (SEALED,)) for name in self.guards}
        return {name: sealed[name]["p0"] for name in self.guards if name != "p0"}


@pytest.fixture
def session(village):
    village.settle(3, limits='trust = "distributed"')
    return Session(village)


def test_a_session_is_charged_and_answered(session, village):
    assert len(session.masked("p0", session.begun())) == 24
    assert village.check()["p0"] == (1, 1)


def test_weights_that_a_session_was_not_opened_for_are_refused(session, village):
    """Otherwise others masked for the sum at some weights, and this party added its gradient at others."""
    boxes = session.begun()
    for other in (pack_numbers(np.ones(3)), WEIGHTS[:-1] + b"\1", b""):
        assert session.masked("p0", boxes, other) is Reason.CONFLICT
    assert village.check()["p0"] == (0, 0)
    assert len(session.masked("p0", boxes)) == 24  # and the session goes on


def test_a_charged_round_is_not_opened_again(session, village):
    """In a second session the same vector would leave under another mask, or noise would be drawn again."""
    session.masked("p0", session.begun())
    newest = session.guards["p0"]._past.newest
    assert session.open("p0", seen=newest) is Reason.LOST  # another message than the one that opened it
    session.village.houses["p0"].stop()
    session.guards["p0"] = session.village.houses["p0"].open()
    assert session.open("p0") is Reason.LOST  # nor after it was started again
    assert village.check()["p0"] == (1, 1)


def test_a_refused_roster_is_not_a_step(session, village):
    """Whoever carries messages could otherwise end every session with one that is refused."""
    adverts = {name: session.open(name) for name in session.guards}
    lies = [
        ({name: adverts[name] for name in ("p1", "p2")}, None),
        (adverts | {"p1": adverts["p2"]}, None),
        (adverts | {"p1": bytes(ADVERT)}, None),
        (adverts, 1),
        ({"p0": adverts["p0"]}, 1),
    ]
    for lie, threshold in lies:
        assert session.share("p0", lie, threshold) is Reason.MEMBERS
    assert isinstance(session.share("p0", adverts), bytes)
    assert session.share("p0", adverts, 2) is Reason.MEMBERS  # taken once


def test_a_refused_mask_is_not_a_step(session, village):
    boxes = session.begun()
    swapped = {"p1": boxes["p2"], "p2": boxes["p1"]}
    for lie in ({}, swapped, {"p1": boxes["p1"], "p2": bytes(SEALED)}):
        assert session.masked("p0", lie) is Reason.MEMBERS
    assert village.check()["p0"] == (0, 0)
    assert len(session.masked("p0", boxes)) == 24


def test_a_threshold_must_keep_secrets_from_those_in_league_with_the_coordinator(village):
    """With one of three in league, two shares may be both of theirs."""
    village.settle(3, limits='trust = "distributed"\ncolluding = 1')
    session = Session(village)
    adverts = {name: session.open(name) for name in session.guards}
    assert session.share("p0", adverts, 2) is Reason.MEMBERS
    assert isinstance(session.share("p0", adverts, 3), bytes)


def test_members_that_are_told_other_turns_of_a_plan_make_no_sum(session, village):
    """A coordinator that lies to one of them about where the run began: the session's digest covers it."""
    adverts = {name: session.open(name, **({"first": 3} if name == "p0" else {})) for name in session.guards}
    for name in session.guards:
        assert session.share(name, adverts) is Reason.MEMBERS
    assert set(village.check().values()) == {(0, 0)}
