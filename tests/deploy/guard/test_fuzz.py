"""Lies in every field, messages in any order, at the guard's socket: never an overspend, never a crash."""

import contextlib
import hashlib
import shutil
import socket
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from farthing.data.tables import Features
from farthing.deploy.messages.forms import invitation as form
from farthing.deploy.messages.signed import PREFIX, MessageKind, Reason, Signer, pack_table, seal, unseal
from farthing.deploy.messages.transport import call
from farthing.federated.terms import Exactly, Invitation
from farthing.linear.losses import LinearGradient, logistic, multinomial, squared
from farthing.queries.samplers import Poisson

ROUNDS = 6
LIE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["", "d", "run-1", "00" * 16, "ff" * 32, 10**30, -1, 2**63, 1e308, [], {}]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
WEIGHTS = st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=3)
FIELDS = ["run", "round", "nonce", "dataset", "invitation", "contribution", "shape", "seen", "more"]
TERMS = sorted(form(Invitation(1.0)))
HONEST = Invitation(1.0, rounds=ROUNDS)
OTHERS = [
    Invitation(1.0, rounds=ROUNDS, noise_multiplier=0.1),
    Invitation(1.0, rounds=ROUNDS, noise_multiplier=1e-200),
    Invitation(1.0, rounds=ROUNDS, noise_multiplier=1e200),
    Invitation(1e-200, rounds=ROUNDS),
    Invitation(3.0, rounds=ROUNDS),
    Invitation(1e6, rounds=ROUNDS),
    Invitation(1.0, rounds=10**9),
    Invitation(1.0, Poisson(0.9), ROUNDS),
    Invitation(1.0, Exactly(7), ROUNDS),
    Invitation(1.0, rounds=ROUNDS, noise_multiplier=5.0, trust="trusted"),
    Invitation(1.0, rounds=ROUNDS, noise_multiplier=5.0, trust="distributed"),
]
ALLOWED = [
    Invitation(3.0, rounds=ROUNDS),
    Invitation(1.0, rounds=10**9),
]  # its rounds end when the policy's do
GRADIENTS = [
    LinearGradient(logistic, Features(2, radius=1.0)),
    LinearGradient(squared, Features(2)),
    LinearGradient(multinomial, Features(2)),
    LinearGradient(logistic, Features(3)),
    LinearGradient(logistic, Features(2, intercept=0.0)),
    LinearGradient(logistic, Features(2, intercept=1e300)),
]


def machine(make, folder, nursery, check):
    """The guard of one party as a process, and everything that can be said to it."""

    class Fuzzer(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            self.folder = Path(tempfile.mkdtemp(dir=folder))
            self.village = make(self.folder, nursery).settle(1)
            self.house = self.village.houses["p0"].start()
            self.released = {}  # (run, round, nonce) -> value, as the world saw it
            self.sent = []

        @initialize()
        def hello(self):
            header = {"run": "run-1", "round": 0, "nonce": "0" * 32, "dataset": "d"}
            self.send(seal(MessageKind.HELLO, header, b"", self.village.coordinator))

        def send(self, message):
            """What comes back is signed by the guard, and an answer is the only one of its round."""
            self.sent.append(message)
            found = unseal(call(self.house.socket, message, seconds=120), {self.house.signer.public}, 10**6)
            fields = found.fields().plain()
            if found.kind is MessageKind.REFUSAL:
                reason = Reason(fields["reason"])
                assert reason is not Reason.INTERNAL, "the guard came across something that it does not know"
                return reason
            if found.kind is MessageKind.ANSWER:
                value = np.frombuffer(found.body)
                assert np.isfinite(value).all()
                key = fields["run"], fields["round"]
                before = self.released.setdefault(key, (fields["nonce"], found.body))
                assert before == (fields["nonce"], found.body), "two answers for one round"
            return found.kind

        @rule(number=st.integers(1, 12), w=WEIGHTS, run=st.sampled_from(["run-1", "run-2"]))
        def honest(self, number, w, run):
            nonce = hashlib.sha256(f"{run} {number}".encode()).hexdigest()[:32]
            self.send(self.village.question(number, w=w, run=run, nonce=nonce, invitation=HONEST))

        @rule(number=st.integers(0, 8), nonce=st.binary(min_size=16, max_size=16))
        def other_nonce(self, number, nonce):
            self.send(self.village.question(number, nonce=nonce.hex(), invitation=HONEST))

        @rule(number=st.integers(1, 9), terms=st.sampled_from(OTHERS))
        def other_terms(self, number, terms):
            reply = self.send(self.village.question(number, invitation=terms))
            assert reply is not MessageKind.ANSWER or terms in ALLOWED

        @rule(number=st.integers(1, 9), gradient=st.sampled_from(GRADIENTS), side=st.integers(1, 5))
        def other_gradient(self, number, gradient, side):
            for shape in (side, (side, 2)):
                question = self.village.question(
                    number, gradient=gradient, w=np.zeros(shape), invitation=HONEST
                )
                self.send(question)

        @rule(number=st.integers(1, 9), field=st.sampled_from(FIELDS), lie=LIE)
        def lie(self, number, field, lie):
            with contextlib.suppress(UnicodeEncodeError):
                self.send(self.village.question(number, invitation=HONEST, lies={field: lie}))

        @rule(number=st.integers(1, 9), field=st.sampled_from(TERMS), lie=LIE)
        def lie_about_terms(self, number, field, lie):
            terms = form(HONEST) | {field: lie}
            self.send(self.village.question(number, lies={"invitation": terms}))

        @rule(number=st.integers(1, 9), body=st.binary(max_size=40))
        def lie_about_weights(self, number, body):
            self.send(self.village.question(number, invitation=HONEST, body=body))

        @rule(kind=st.sampled_from(MessageKind), body=st.binary(max_size=60), lie=LIE)
        def other_kinds(self, kind, body, lie):
            header = {"run": "run-1", "round": 1, "nonce": "0" * 32, "dataset": "d", "threshold": lie}
            self.send(seal(kind, header, body, self.village.coordinator))
            self.send(seal(kind, {"x": lie}, pack_table({"p0": body}), self.village.coordinator))

        @rule(w=WEIGHTS)
        def strangers(self, w):
            reason = self.send(self.village.question(1, w=w, signer=Signer.new(), invitation=HONEST))
            assert reason is Reason.STRANGER

        @rule(data=st.data())
        def replayed_or_bent(self, data):
            message = bytearray(data.draw(st.sampled_from(self.sent)))
            for _ in range(data.draw(st.integers(0, 2))):
                place = data.draw(st.integers(PREFIX.size, len(message) - 1))
                message[place] ^= data.draw(st.integers(1, 255))
            self.send(bytes(message))

        @rule(junk=st.binary(max_size=100))
        def junk_on_the_socket(self, junk):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
                peer.settimeout(300)
                peer.connect(str(self.house.socket))
                peer.sendall(junk)

        @rule()
        def killed_and_started_again(self):
            self.house.start()

        @invariant()
        def alive_and_within_budget(self):
            assert not self.house.process.gone()
            logged, charged = check(self.house)
            assert logged <= charged <= ROUNDS
            assert len(self.released) <= logged

        def teardown(self):
            try:
                check(self.house, bool(self.released) and len(self.sent) % 16 == 0)
            finally:
                self.village.stop()
                shutil.rmtree(self.folder, ignore_errors=True)

    return Fuzzer


def fuzz(village, nursery, check, examples, steps):
    kind = machine(type(village), village.folder, nursery, check)
    limits = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(kind, settings=limits)


def test_lies_in_every_field(village, nursery, books):
    fuzz(village, nursery, books, 8, 15)


@pytest.mark.slow
def test_lies_in_every_field_for_long(village, nursery, books):
    fuzz(village, nursery, books, 20, 50)
