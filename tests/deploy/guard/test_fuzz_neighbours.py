"""Thousands of messages, valid, bent and random, at two guards over neighbouring records at the same time.

Asserted of every message: both reply, signed; neither fails; kind, reason, size and public numbers of the two
replies are the same. Of every ledger afterwards: no answer without a charge, and it verifies.
"""

import json
import logging
import math
import os
import random
import struct
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from farthing.audit import entrances
from farthing.deploy.guard.answers import Networks
from farthing.deploy.messages.forms import NetworkKind
from farthing.deploy.messages.signed import (
    MessageKind,
    Reason,
    Signer,
    digest,
    pack_numbers,
    pack_table,
    seal,
    unpack_table,
)
from farthing.deploy.secagg.protocol import ADVERT, SEALED, Member, session_of
from farthing.federated.terms import Exactly, Trust
from farthing.queries.correlated import Cyclic
from farthing.queries.samplers import Everyone, Poisson

try:
    from farthing.audit import network_laws
except ModuleNotFoundError:  # without torch
    network_laws = None

KEYS = {name: Signer.new() for name in ("coordinator", "p0", "p1", "p2", "stranger")}
ENROLLED = {name: KEYS[name].public for name in ("p0", "p1", "p2")}
LIES = [
    *(None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 2**53, 2**64, 10**40, 0.5, -1.5, 1e300, 1e-300, 5e-324),
    *("", "d", "run", "r1", "0" * 32, "f" * 64, "x" * 65, "../..", "all", "tight", "local", "distributed"),
    *([], {}, [0], [3, 3], [0, "0" * 64], {"loss": "logistic"}, [[]] * 5, "poisson:1e-17", "exactly:10"),
]
TERMS = {
    "clip": [3.0, 3.1, 1e-300, 0, "1"],
    "draw": [
        "all",
        "poisson:0.5",
        "poisson:0.4",
        "exactly:1",
        "exactly:2",
        "poisson:1e-9",
        "poisson:nan",
        "cyclic:0.25:2",
        "turns",
    ],
    "rounds": [1, 5, 1001, 0, 2**60, 1.5],
    "noise": [None, 0.4, 0.5, 499.0, 1e9, 1e10, 1e300, -1.0],
    "calibration": ["basic", "advanced", "x"],
    "accountant": ["basic", "advanced", "x"],
    "trust": ["local", "distributed", "trusted", ""],
    "survivors": [1, 2, 3, 0, 2**40],
    "seen": [True, 0],
    "bands": [1, 2, 3, 0, 2**40],
    "exponent": [0.5, 0.6, 2.0],
}
ASKED = {
    "loss": ["logistic", "multinomial", "huber-hinge", "squared", "hope"],
    "width": [1, 2, 3, 2**22, 0],
    "intercept": [0, 1.0, 1e-7, 1e7, 1e300, -1.0],
    "radius": [None, 1.0, 1e-9, 0, "1"],
}


NETWORK = {
    "network": ["tiny", "other", "os:system", ""],
    "hash": ["0" * 64, "f" * 63, None],
    "kind": ["gradient", "steps", "update", "code"],
    "steps": [1, 3, 4, 5, 0, 2**30],
    "lr": [0.5, 1e-3, 0, 1e9, -1.0],
    "proximal": [0.0, 0.5, -1.0, 1e9],
    "batch": [0, 2, -1],
}


@dataclass
class State:
    """What a coordinator knows of its conversation with one guard."""

    talk: entrances.Conversation
    rounds: int = 0
    first: int = 0
    session: dict = field(default_factory=dict)  # header, adverts, members, boxes, what came back


def weights(rng, shape):
    """Usual, extreme and ill numbers."""
    scale = rng.choice([0.0, 1.0, 1e3, 1e300, 1e-300])
    w = np.array([rng.uniform(-scale, scale) for _ in range(math.prod(shape))]).reshape(shape)
    if rng.random() < 0.05:
        w.flat[0] = rng.choice([math.nan, math.inf, -math.inf])
    return w


def local(rng, state, draw):
    """A valid message under local noise: hello, a proposal, the next question, or an earlier one again."""
    start = {"run": "run", "round": 0, "nonce": "0" * 32, "dataset": "d"}
    what = rng.random()
    if what < 0.05:
        return MessageKind.HELLO, start, b""
    kind = rng.choice(list(entrances.LOSSES))
    shape = (3, 3) if kind == "multinomial" else (3,)
    if rng.random() < 0.1:
        shape = rng.choice([(3, 2), (3, 1), (3,), (3, 3), (2,), (4, 3), (1, 1)])
    number = state.rounds + 1 if what > 0.3 else rng.randint(0, state.rounds + 2)
    header, body = entrances._header(
        number, kind, draw, weights(rng, shape), radius=rng.choice([None, None, 1.0])
    )
    if what < 0.12:
        return MessageKind.PROPOSAL, start | {"invitation": header["invitation"]}, b""
    if number % 7 == 3:  # an evaluation
        header["contribution"] |= {"cap": 1e-3 * number, "clip": 900.0}
    state.rounds = max(state.rounds, number)
    return MessageKind.QUESTION, header, body


def networks(rng, state, draw):
    """A valid message about a network: any question; the next, or an earlier one."""
    asked = network_laws.asked(
        "0" * 64 if rng.random() < 0.05 else state.talk.guard.policy.models["tiny"].hash,
        NetworkKind(rng.choice(["gradient", "gradient", "steps", "update"])),
        steps=rng.randint(1, 4),
        lr=rng.choice([0.01, 0.5]),
    )
    number = state.rounds + 1 if rng.random() > 0.25 else rng.randint(0, state.rounds + 2)
    if number % 7 == 3:
        asked = network_laws.asked(asked.source, NetworkKind.EVALUATION, cap=1e-3 * number, clip=900.0)
    size = rng.choice([0.0, 1.0, 100.0, 100.0, 1e7, 3e38, math.nan, math.inf]) if rng.random() < 0.4 else 1.0
    count = rng.choice([1, 5, 7, 600]) if rng.random() < 0.05 else network_laws.SIZE
    w = [rng.uniform(-1, 1) * size for _ in range(count)]
    header, body = network_laws.question(number, asked, w, draw)
    if rng.random() < 0.08:
        start = {"run": "run", "round": 0, "nonce": "0" * 32, "dataset": "d"}
        return MessageKind.PROPOSAL, start | {"invitation": header["invitation"]}, b""
    state.rounds = max(state.rounds, number)
    return MessageKind.QUESTION, header, body


def masked(rng, state, draw):
    """The next message of a session, or any other of it, or the opening of a new one."""
    known, step = state.session, rng.random()
    if not known or step < (0.02 if known["step"] < 5 else 0.25):
        state.rounds += 1
        shared = {"trust": Trust.DISTRIBUTED, "survivors": 2}
        header, body = entrances._header(state.rounds, "logistic", draw, **shared)
        header["weights"] = digest(body)
        state.first += rng.choice([0, 0, 0, 1, 3])  # as other runs of the plan leave it
        if state.first and isinstance(draw, Cyclic):
            header["first"] = state.first
        session = session_of(header)
        members = {
            name: Member(session, name, KEYS[name], ENROLLED, survivors=2, colluding=0)
            for name in ("p1", "p2")
        }
        adverts = {name: member.advertise() for name, member in members.items()}
        state.session = {"header": header, "body": body, "members": members, "adverts": adverts, "step": 1}
        return MessageKind.OPENING, header, b""
    turn = {name: known["header"][name] for name in ("run", "round", "nonce")}
    at = (known["step"] if known["step"] < 5 else 5 * rng.randint(0, 1)) if step < 0.85 else rng.randint(0, 4)
    known["step"] = max(known["step"], at + 1)
    if at <= 0:
        return (
            MessageKind.OPENING,
            known["header"] | {"seen": rng.choice([None, [0, "0" * 64], state.talk.guard._past.newest])},
            b"",
        )
    if at == 1:
        return MessageKind.ROSTER, turn | {"threshold": 3}, pack_table(known["adverts"])
    if at == 2:
        table = pack_table({name: given["p0"] for name, given in known.get("boxes", {}).items()})
        return MessageKind.MASKED_QUESTION, turn | {"table": len(table), "each": 8}, table + known["body"]
    if at == 3:
        return MessageKind.SURVIVORS, turn, pack_table(dict.fromkeys(ENROLLED, b""))
    return MessageKind.REVEAL, turn, pack_table(known.get("consents", {}))


def heard(state, kind, found):
    """Goes on with the session where a step of it was answered."""
    known = state.session
    if found.kind is MessageKind.ADVERT:
        known["adverts"]["p0"] = found.body
    if found.kind is MessageKind.SHARES and "boxes" not in known:
        try:
            known["boxes"] = {n: m.share(known["adverts"], 3) for n, m in known["members"].items()}
            ours = unpack_table(found.body, 3, (SEALED,))
            for name, member in known["members"].items():
                given = {o: box[name] for o, box in known["boxes"].items() if o != name}
                member.mask(given | {"p0": ours[name]}, 3)
        except Exception:  # the roster was a bent one
            known.pop("boxes", None)
    if found.kind is MessageKind.CONSENT and "consents" not in known and "boxes" in known:
        signed = {name: member.consent(list(ENROLLED)) for name, member in known["members"].items()}
        known["consents"] = signed | {"p0": found.body}


def bent(rng, kind, header, body):
    """The message with one or two lies in it: in a field, in an inner one, in its body, or its kind."""
    header = json.loads(json.dumps(header))
    for _ in range(rng.choice([1, 1, 2])):
        way = rng.random()
        if way < 0.15 and header:
            del header[rng.choice(sorted(header))]
        elif way < 0.35 and header:
            header[rng.choice(sorted(header))] = rng.choice(LIES)
        elif way < 0.4:
            names = ["more", "about", "threshold", "table", "each", "weights", "first"]
            header[rng.choice(names)] = rng.choice(LIES)
        elif way < 0.6 and isinstance(header.get("invitation"), dict):
            name = rng.choice(sorted(TERMS))
            header["invitation"][name] = rng.choice(TERMS[name])
        elif way < 0.7 and isinstance(header.get("contribution"), dict):
            bends = NETWORK if "network" in header["contribution"] else ASKED
            name = rng.choice(sorted(bends))
            header["contribution"][name] = rng.choice(bends[name])
        elif way < 0.8:
            body = body[: rng.randint(0, len(body))] + rng.randbytes(rng.choice([0, 0, 1, 8, ADVERT]))
        elif way < 0.9 and body:
            place = rng.randrange(len(body))
            body = body[:place] + bytes([body[place] ^ rng.randint(1, 255)]) + body[place + 1 :]
        elif way < 0.95:
            body = pack_numbers(weights(rng, (rng.randint(1, 12),)))
        else:
            kind = rng.choice(list(MessageKind))
    return kind, header, body


def wire(rng, message):
    """Bytes that no coordinator signed: bits flipped, cut off, of a stranger, or random."""
    way = rng.random()
    if way < 0.3:
        place = rng.randrange(len(message))
        return message[:place] + bytes([message[place] ^ rng.randint(1, 255)]) + message[place + 1 :]
    if way < 0.5:
        return message[: rng.randint(0, len(message) - 1)]
    if way < 0.65:
        return message + rng.randbytes(rng.randint(1, 9))
    if way < 0.85:
        return rng.randbytes(rng.randint(0, 300))
    start = struct.pack("<4sBBHII", b"frth", 1, rng.randint(0, 20), 0, rng.choice([0, 9, 2**31]), 7)
    return start + rng.randbytes(rng.randint(0, 200))


def message(seed, state, valid, draw):
    """One message for one guard: the same decisions for the same seed."""
    rng = random.Random(seed)
    kind, header, body = valid(rng, state, draw)
    if rng.random() < (0.35 if valid is masked else 0.55):
        kind, header, body = bent(rng, kind, header, body)
    signer = KEYS["stranger" if rng.random() < 0.02 else "coordinator"]
    sealed = seal(kind, header, body, signer)
    return kind, wire(rng, sealed) if rng.random() < 0.12 else sealed


@dataclass(frozen=True)
class Books:
    ledger: Path

    @property
    def log(self):
        return Path(f"{self.ledger}.answers")


def episode(folder, seed, count, other, valid, draw, trust, books, verify, kept=None):
    """Messages to two guards; what was replied, and how many answers were charged."""
    first, found = next(entrances.neighbours() if kept is None else network_laws.neighbours()), Counter()
    opened, states = [], []
    for name, records in (("one", first), ("other", other)):
        (folder / name).mkdir(parents=True)
        if kept is None:
            opened.append(entrances.kept(folder / name, records, trust, KEYS))
        else:
            opened.append(kept(folder / name, records))
        states.append(State(entrances.Conversation(opened[-1], KEYS["coordinator"])))
    try:
        for number in range(count):
            replies = []
            for state in states:
                kind, data = message(f"{seed} {number}", state, valid, draw)
                came = state.talk.send(f"message {number}, {kind.name}", data)
                heard(state, kind, came)
                replies.append(state.talk.replies[-1])
            assert replies[0] == replies[1], f"{other[0]}: a reply tells of a record"
            assert replies[0].reason != Reason.INTERNAL, f"seed {seed}, message {number}: {kind.name} fails"
            found[replies[0].reason or replies[0].kind.name] += 1
    finally:
        for guard in opened:
            guard.close()
    answered, charged = zip(
        *(books(Books(folder / name / "ledger"), verify) for name in ("one", "other")), strict=True
    )
    assert answered[0] == answered[1]
    assert charged[0] == charged[1]
    if kept is None:  # local steps are several answers
        assert found["ANSWER"] + found["MASKED_ANSWER"] >= answered[0]
    return found, charged[0]


TALKS = [
    (local, Everyone(), Trust.LOCAL),
    (masked, Everyone(), Trust.DISTRIBUTED),
    (local, Poisson(0.5), Trust.LOCAL),
    (local, Exactly(1), Trust.LOCAL),
    (local, Cyclic(0.25, 2), Trust.LOCAL),
    (masked, Cyclic(0.25, 2), Trust.DISTRIBUTED),
]


def fuzzed(village, books, messages, episodes, verified):
    """Kinds and reasons of all replies. ``messages`` go to both of two guards.

    So many ledgers have their spend recomputed from an export; all are read by code that shares nothing.
    """
    found, charged = Counter(), 0
    others = list(entrances.neighbours())[1:]
    for seed in range(episodes):
        talk = TALKS[seed % len(TALKS)]
        folder = village.folder / str(seed)
        other, verify = others[seed % len(others)], seed < verified
        told, paid = episode(folder, seed, messages // episodes, other, *talk, books, verify)
        found, charged = found + told, charged + paid
    assert found.total() == messages
    assert charged
    kinds = "ANSWER MASKED_ANSWER AGREEMENT ANNOUNCEMENT ADVERT SHARES CONSENT REVEALED"
    reasons = "malformed forged stranger shape stale conflict members promised noise lost nonfinite"
    assert not [what for what in f"{kinds} {reasons}".split() if not found[what]], found
    return found, charged


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.CRITICAL, "farthing.deploy.guard")


def test_hundreds_of_messages_at_neighbouring_guards(village, books):
    fuzzed(village, books, 800, 8, 1)


@pytest.mark.slow
def test_thousands_of_messages_at_neighbouring_guards(village, books):
    fuzzed(village, books, 20_016 if os.environ.get("FARTHING_EXPLORE") else 3_000, 24, 4)


def fuzzed_networks(village, books, messages, episodes):
    """The same for guards over a network, whose model is made and checked once."""
    from farthing.torch.training.records import Examples

    first, *others = network_laws.neighbours()
    checked = Networks(network_laws.policy_of(village.folder, KEYS), Examples(first[1]))
    found, charged = Counter(), 0
    for seed in range(episodes):
        told, paid = episode(
            village.folder / f"n{seed}",
            f"networks {seed}",
            messages // episodes,
            others[seed % len(others)],
            networks,
            network_laws.DRAWS[seed % 2],
            Trust.LOCAL,
            books,
            seed == 0,
            lambda folder, records: network_laws.kept(folder, records, KEYS, checked),
        )
        found, charged = found + told, charged + paid
    assert found.total() == messages
    assert charged > found["ANSWER"] / 2
    reasons = "malformed forged stranger shape stale conflict model nonfinite weights oversized"
    assert not [what for what in f"ANSWER AGREEMENT {reasons}".split() if not found[what]], found
    return found, charged


@pytest.mark.skipif(network_laws is None, reason="without torch")
def test_hundreds_of_messages_about_a_network_at_neighbouring_guards(village, books):
    fuzzed_networks(village, books, 200, 2)


@pytest.mark.slow
@pytest.mark.skipif(network_laws is None, reason="without torch")
def test_thousands_of_messages_about_a_network_at_neighbouring_guards(village, books):
    fuzzed_networks(village, books, 20_000 if os.environ.get("FARTHING_EXPLORE") else 2_000, 20)
