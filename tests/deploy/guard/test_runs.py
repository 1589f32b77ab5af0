"""Whole runs over guards: the same algorithms, whatever happens on the way."""

import itertools
import random
import threading
import time
from collections import Counter

import numpy as np
import pytest

import farthing as ft
from farthing.data.adult import load_adult
from farthing.data.tables import Features, Table
from farthing.deploy import roster
from farthing.deploy.messages.signed import (
    MessageKind,
    Reason,
    digest,
    pack_numbers,
    seal,
    unpack_table,
    unseal,
)
from farthing.deploy.messages.transport import Bridge, InProcess, carry
from farthing.deploy.roster import State, longest
from farthing.errors import BudgetSpent, FarthingError, InvalidValue, Unsupported
from farthing.federated import Invitation, Parties, Weights
from farthing.federated.methods.addp import addp
from farthing.federated.methods.federated_descent import federated_descent
from farthing.federated.methods.sgd1 import sgd1
from farthing.federated.methods.sgd2 import sgd2
from farthing.federated.protocol import ClientAgent
from farthing.linear.losses import LinearGradient, logistic
from farthing.linear.problem import Problem
from farthing.noise.lattice import SeededStream
from farthing.queries.query import PerExample, run
from farthing.queries.samplers import Poisson

GRADIENT = LinearGradient(logistic, Features(2))
PROBLEM = Problem(logistic, 63, 2, unit=False)


class Reseeded(ClientAgent):
    """An agent whose noise follows from its seed and the round, as that of the nursery's guards does."""

    def __init__(self, house, seed, observer="server"):
        with np.load(house.folder / "records.npz") as found:
            table = Table(found["X"], found["y"])
        self.seed, self.stream = seed, SeededStream(seed)
        ledger = ft.Ledger(ft.Budget(1.0, 1e-6, observer=observer), stream=self.stream)
        super().__init__(ledger.over(table), len(table))

    def handle(self, ask):
        self.stream._seed, self.stream._generation = 1000 * self.seed + ask.round, 0
        self.stream._rekey()
        return super().handle(ask)


METHODS = {
    "sgd2": lambda clients: sgd2(clients, PROBLEM, rounds=6),
    "addp": lambda clients: addp(clients, PROBLEM, rounds=3, draw=Poisson(0.25)),
    "federated-descent": lambda clients: federated_descent(clients, PROBLEM),
}


def few(steps, most=8):
    return run(steps, stop=lambda step: step.t >= most)


@pytest.mark.parametrize("method", METHODS)
def test_guards_train_the_very_model_that_agents_in_one_process_do(method, village):
    village.settle(3)
    for seed, house in enumerate(village.houses.values()):
        house.start(seed=seed)
    remote = few(METHODS[method](village.clients(village.sockets())))
    agents = Parties([Reseeded(house, seed) for seed, house in enumerate(village.houses.values())])
    local = few(METHODS[method](agents))
    assert remote.steps == local.steps
    for there, here in zip(remote.w, local.w, strict=True):
        np.testing.assert_array_equal(there, here)
    assert set(village.check().values()) == {(remote.steps, remote.steps)}


@pytest.mark.parametrize("place", ["before-charge", "after-store", "after-answer"])
def test_a_party_that_is_killed_and_comes_back_changes_nothing(place, village):
    """The same question is asked again while the round lasts; what was kept is sent again."""
    village.settle(3)
    for seed, house in enumerate(village.houses.values()):
        house.start(place if seed == 1 else "", 3, seed)
    with village.houses["p1"].kept_alive(seed=1):
        remote = run(METHODS["sgd2"](village.clients(village.sockets(), seconds=120.0)))
    agents = Parties([Reseeded(house, seed) for seed, house in enumerate(village.houses.values())])
    local = run(METHODS["sgd2"](agents))
    np.testing.assert_array_equal(remote.w[0], local.w[0])
    assert village.check() == {"p0": (6, 6), "p1": (6, 6), "p2": (6, 6)}


def test_a_party_that_loses_an_answer_is_missing_from_that_round_only(village):
    village.settle(3)
    for number, house in enumerate(village.houses.values()):
        house.start("after-charge" if number == 1 else "", 3)
    clients = village.clients(village.sockets(), seconds=120.0)
    clients.invite(Invitation(1.0, rounds=6))
    counts = []
    with village.houses["p1"].kept_alive():
        while clients.alive:
            counts.append(clients.ask(GRADIENT, np.zeros(3)).count)
    assert counts == [3, 3, 2, 3, 3, 3]
    assert village.check(verify="p1") == {"p0": (6, 6), "p1": (5, 6), "p2": (6, 6)}


class Wire(InProcess):
    """Guards in this process over a wire that does what ``plan`` says of (round of exchanges, party)."""

    def __init__(self, village, plan):
        super().__init__({name: house.open().answer for name, house in village.houses.items()})
        self.plan, self.number, self.sent = plan, 0, []

    def exchange(self, requests, seconds):
        self.number += 1
        for name, request in requests.items():
            what = self.plan(self.number, name)
            if what == "lost":
                continue
            reply = self._parties[name](request)
            self.sent.append((name, reply))
            if what == "late":
                continue
            if what == "old":
                yield name, next(old for party, old in self.sent if party == name)
            elif what == "forged":
                yield name, reply[:-1] + bytes([reply[-1] ^ 1])
            elif what == "garbage":
                yield name, b"?" * 500
            elif what == "swapped":
                other = next(old for party, old in reversed(self.sent) if party != name)
                yield name, other
            elif what == "twice":
                yield name, reply
                yield name, reply
                yield "nobody", reply
            elif callable(what):
                yield name, what(request, reply)
            else:
                yield name, reply


def asked(village, plan, rounds=4, **options):
    """The counts of each round over such a wire."""
    clients = village.clients(Wire(village, plan), **{"seconds": 0.2} | options)
    clients.invite(Invitation(1.0, rounds=rounds))
    counts = []
    while clients.alive:
        counts.append(clients.ask(GRADIENT, np.zeros(3)).count)
    return clients, counts


@pytest.mark.parametrize("what", ["old", "forged", "garbage", "swapped"])
def test_what_no_party_signed_for_this_request_counts_as_nothing(what, village):
    """In round 2 the wire lies about p1, which is asked again and answers from what it kept."""
    village.settle(3)
    lies = []

    def plan(number, name):
        if name == "p1" and number >= 4 and len(lies) < 2:
            lies.append(number)
            return what
        return "whole"

    clients, counts = asked(village, plan, seconds=60.0)
    assert counts == [3, 3, 3, 3]
    assert lies
    assert village.check() == {"p0": (4, 4), "p1": (4, 4), "p2": (4, 4)}
    assert {party.state for party in clients.status().parties} == {State.SPENT}


def test_duplicates_count_once(village):
    _, counts = asked(village.settle(3), lambda number, name: "twice")
    assert counts == [3, 3, 3, 3]
    assert set(village.check().values()) == {(4, 4)}


def test_a_straggler_is_left_out_of_a_round_and_pays_for_it(village):
    village.settle(3)
    missing = iter(["late"] * 10**6)
    clients = village.clients(
        Wire(village, lambda n, name: "whole" if name != "p1" or n < 4 else next(missing)), seconds=0.2
    )
    clients.invite(Invitation(1.0, rounds=4))
    assert clients.ask(GRADIENT, np.zeros(3)).count == 3
    assert clients.ask(GRADIENT, np.zeros(3)).count == 2
    assert clients.status().parties[1].state is State.MISSING
    missing = iter(["whole"] * 10**6)
    assert clients.ask(GRADIENT, np.zeros(3)).count == 3
    assert clients.status().parties[1].state is State.HERE
    assert village.check() == {"p0": (3, 3), "p1": (3, 3), "p2": (3, 3)}


def test_a_party_that_never_comes_back_is_left_in_peace(village):
    """It is greeted, which charges nothing, and not asked."""
    clients, counts = asked(
        village.settle(3), lambda n, name: "lost" if name == "p1" and n > 3 else "whole", rounds=6, patience=2
    )
    assert counts == [3, 2, 2, 2, 2, 2]
    party = clients.status().parties[1]
    assert (party.state, party.missed, clients.left.tolist()) == (State.AWAY, 2, [0, 0, 0])
    assert village.check() == {"p0": (6, 6), "p1": (1, 1), "p2": (6, 6)}


def test_a_cut_network_heals(village):
    _, counts = asked(village.settle(3), lambda n, name: "lost" if 4 <= n <= 6 else "whole", seconds=60.0)
    assert counts == [3, 3, 3, 3]
    assert set(village.check().values()) == {(4, 4)}


def test_a_network_that_does_not_heal_ends_the_run_and_charges_nothing(village):
    with pytest.raises(FarthingError, match="no party answered round 2"):
        asked(village.settle(2), lambda n, name: "lost" if n >= 4 else "whole")
    assert village.check() == {"p0": (1, 1), "p1": (1, 1)}


def altered(house, **changes):
    """An answer of a party that breaks the rules: signed by its own key, about this very request."""

    def lie(request, reply):
        found = unseal(reply, {house.signer.public}, 10**6)
        header, body = found.fields().plain(), changes.get("body", found.body)
        header |= {"update": digest(body)} | {k: v for k, v in changes.items() if k != "body"}
        return seal(changes.get("kind", found.kind), header, body, house.signer)

    return lie


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"body": pack_numbers(np.array([1e6, 0.0, 0.0]))}, Reason.NORM),
        ({"body": pack_numbers(np.array([np.nan, 0.0, 0.0]))}, Reason.NONFINITE),
        ({"body": pack_numbers(np.array([np.inf, 0.0, 0.0]))}, Reason.NONFINITE),
        ({"body": pack_numbers(np.zeros(2))}, Reason.SHAPE),
        ({"body": b""}, Reason.SHAPE),
        ({"update": "00" * 32}, Reason.FORGED),
        ({"weights": "00" * 32}, Reason.CONFLICT),
        ({"round": 9}, Reason.STALE),
        ({"run": "another"}, Reason.STALE),
        ({"left": -1}, Reason.MALFORMED),
        ({"left": "many"}, Reason.MALFORMED),
        ({"row": [1]}, Reason.MALFORMED),
        ({"kind": MessageKind.AGREEMENT}, Reason.MALFORMED),
    ],
)
def test_a_byzantine_party_is_excluded_and_costs_the_others_nothing(changes, reason, village):
    village.settle(3)
    lie = altered(village.houses["p1"], **changes)
    clients, counts = asked(village, lambda n, name: lie if name == "p1" and n >= 4 else "whole")
    assert counts == [3, 2, 2, 2]
    party = clients.status().parties[1]
    assert (party.state, party.reason, party.left) == (State.REFUSED, str(reason), 0)
    assert village.check() == {"p0": (4, 4), "p1": (2, 2), "p2": (4, 4)}


def test_honest_uploads_are_within_the_bound(village):
    budget = ft.Budget(0.05, 1e-6, observer="server")
    terms = Invitation(1.0, rounds=4).terms(budget, 20)
    for size in (1, 3, 1000):
        noise = np.sqrt(terms.variance) * np.random.default_rng(0).standard_normal((200, size))
        assert np.linalg.norm(noise, axis=1).max() + 20 < longest(terms, 20, size)


def test_terms_that_a_policy_refuses(village):
    village.settle(2)
    clients = village.clients(village.functions())
    with pytest.raises(BudgetSpent, match=r"p0: clip, p1: clip"):
        clients.invite(Invitation(5.0, rounds=4))
    other = village.settle(0)
    assert set(other.check().values()) == {(0, 0)}


def test_one_party_of_two_refuses(village):
    village.settle(2)
    house = village.houses["p1"]
    house.policy.write_text(house.policy.read_text().replace("clip = 3.0", "clip = 0.5"))
    clients = village.clients(village.functions())
    clients.invite(Invitation(1.0, rounds=4))
    assert clients.ask(GRADIENT, np.zeros(3)).count == 1
    assert clients.status().parties[1].state is State.REFUSED
    assert village.check() == {"p0": (1, 1), "p1": (0, 0)}


def test_parties_that_are_not_there(village):
    village.settle(3)
    functions = {name: house.open().answer for name, house in village.houses.items()}
    functions["p2"] = lambda request: 1 / 0
    with pytest.raises(FarthingError, match="2 of 3 parties"):
        village.clients(InProcess(functions), seconds=0.2)
    clients = village.clients(InProcess(functions), seconds=0.2, least=2)
    assert clients.names == ["p0", "p1"]


def test_a_party_under_another_key_is_not_it(village):
    village.settle(2)
    transport = village.functions()
    transport._parties["p1"] = transport._parties["p0"]
    with pytest.raises(FarthingError, match="1 of 2 parties"):
        village.clients(transport, seconds=0.2)


@pytest.mark.parametrize(
    "change", [{"records": 0}, {"budget": {}}, {"row": [1, 2]}, {"round": 3}, {"colluding": "x"}]
)
def test_an_announcement_that_is_none_is_nobody(change, village):
    village.settle(3)
    lie = altered(village.houses["p1"], **change)

    def plan(number, name):
        return lie if name == "p1" else "whole"

    clients = village.clients(Wire(village, plan), seconds=0.2, least=2)
    assert clients.names == ["p0", "p2"]


@pytest.mark.parametrize(
    "change", [{"left": -1}, {"left": 1.5}, {"row": "x"}, {"round": 3}, {"run": "other"}]
)
def test_an_agreement_that_is_none_excludes(change, village):
    village.settle(3)
    lie = altered(village.houses["p1"], **change)
    clients, counts = asked(village, lambda n, name: lie if name == "p1" and n == 2 else "whole")
    assert counts == [2, 2, 2, 2]
    assert clients.status().parties[1].state is State.REFUSED
    assert village.check()["p1"] == (0, 0)


def test_what_remote_clients_refuse(village):
    village.settle(2)
    clients = village.clients(village.functions())
    with pytest.raises(InvalidValue, match="invited"):
        clients.ask(GRADIENT, np.zeros(3))
    with pytest.raises(Unsupported, match="without noise"):
        clients.invite(Invitation(1.0, noise_multiplier=1.0, trust="trusted"))
    clients.invite(Invitation(1.0, rounds=3), Weights.PLAIN)
    with pytest.raises(InvalidValue, match="finite"):
        clients.ask(GRADIENT, np.array([0.0, np.nan, 0.0]))
    with pytest.raises(Unsupported, match="gradients"):
        clients.ask(PerExample(lambda rows, w: rows), np.zeros(3))
    for options in ({"run": "a b"}, {"least": 3}, {"seconds": 0.0}, {"patience": 0}):
        with pytest.raises(InvalidValue):
            village.clients(village.functions(), **options)


def test_one_party_at_a_time(village):
    village.settle(3)
    clients = village.clients(village.functions())
    clients.invite(Invitation(1.0, rounds=4))
    picks = [clients.pick() for _ in range(3)]
    assert len(set(picks)) == 1  # the same until a round was taken
    got = clients.ask_one(2, GRADIENT, np.zeros(3))
    assert (got.count, got.divisor) == (1, 22.0)
    assert clients.left.tolist() == [4, 4, 3]
    with pytest.raises(InvalidValue, match="between 0 and 2"):
        clients.ask_one(3, GRADIENT, np.zeros(3))
    for _ in range(3):
        clients.ask_one(2, GRADIENT, np.zeros(3))
    with pytest.raises(BudgetSpent, match="p2"):
        clients.ask_one(2, GRADIENT, np.zeros(3))
    assert village.check() == {"p0": (0, 0), "p1": (0, 0), "p2": (4, 4)}


def test_permission_is_passed_from_guard_to_guard(village, tmp_path):
    village.settle(3, records=3, budget='adjacency = "replace-one"', limits="")
    problem = Problem(logistic, 12, 2, unit=False)
    clients = village.clients(village.functions(), checkpoint=tmp_path / "run")
    first = few(sgd1(clients, problem, exact=True), 12)
    clients.close()
    assert first.steps == sum(logged for logged, _ in village.check().values()) == 12
    nobody = InProcess(dict.fromkeys(village.houses, lambda request: 1 / 0))
    again = few(sgd1(village.clients(nobody, checkpoint=tmp_path / "run"), problem, exact=True), 12)
    np.testing.assert_array_equal(first.w[0], again.w[0])  # the same turns, and nobody was asked


def test_a_checkpoint_belongs_to_its_run(village, tmp_path):
    village.settle(2)
    transport = village.functions()
    clients = village.clients(transport, checkpoint=tmp_path / "run")
    with pytest.raises(InvalidValue, match="another coordinator"):
        village.clients(transport, checkpoint=tmp_path / "run")
    first = few(sgd2(clients, PROBLEM, rounds=4), 2)
    clients.close()
    with pytest.raises(InvalidValue, match="another run"):
        village.clients(transport, run="run-2", checkpoint=tmp_path / "run")
    for options, what in (
        ({"rounds": 5}, "other terms"),
        ({"rounds": 4, "radius": 3.0}, "another algorithm"),
    ):
        again = village.clients(transport, checkpoint=tmp_path / "run")
        with pytest.raises(InvalidValue, match=what):
            run(sgd2(again, PROBLEM, **options))
        again.close()
    again = village.clients(
        InProcess(dict.fromkeys(village.houses, lambda request: 1 / 0)), checkpoint=tmp_path / "run"
    )
    second = few(sgd2(again, PROBLEM, rounds=4), 2)  # nobody needs to be asked
    np.testing.assert_array_equal(first.w[0], second.w[0])
    assert first.receipts == second.receipts
    assert set(village.check().values()) == {(2, 2)}


def test_parties_are_found_where_every_look_at_them_takes_longer_than_an_exchange(village, monkeypatch):
    """Ten parties on a busy machine: answers that come after the exchange that asked for them count."""
    monkeypatch.setattr(roster, "_HELLO", 0.1)
    village.settle(3)
    guards, looks = village.functions(), []

    def slow(requests, seconds):
        looks.append(seconds)
        time.sleep(5 * max(0.1, seconds))  # far too late for this exchange
        for name, answer in guards.exchange({names[node]: r for node, r in requests.items()}, 60.0):
            yield int(name[1:]), answer

    bridge = Bridge({name: int(name[1:]) for name in village.houses})
    names = {int(name[1:]): name for name in village.houses}
    threading.Thread(target=carry, args=(bridge.path, slow), daemon=True).start()
    try:
        clients = village.clients(bridge, seconds=60.0)
        assert clients.names == ["p0", "p1", "p2"]
        assert len(looks) < 20
    finally:
        bridge.close()


# --- only sums are seen


DISTRIBUTED = {"limits": 'trust = "distributed"\ncolluding = 1', "epsilon": 1e3}


def invitation(survivors=2):
    return Invitation(1.0, rounds=5, noise_multiplier=0.5, trust="distributed", survivors=survivors)


def exact(village, names, w):
    total = np.zeros(3)
    for name in names:
        with np.load(village.houses[name].folder / "records.npz") as found:
            total += GRADIENT.bounded_sum(Table(found["X"], found["y"]), w, ft.ClipNorm(1.0))
    return total


def test_a_sum_over_guards_and_nothing_else(village):
    village.settle(5, records=2000, **DISTRIBUTED).start()
    clients = village.clients(village.sockets(), seconds=120.0)
    clients.invite(invitation())
    w = np.array([0.1, -0.2, 0.3])
    got = clients.ask(GRADIENT, w)
    assert got.count == 5
    assert got.variance == pytest.approx(5 * 0.25 / 2 / got.divisor**2)
    np.testing.assert_allclose(got.total, exact(village, village.houses, w), atol=8 * np.sqrt(0.625))
    assert set(village.check().values()) == {(1, 1)}


def test_a_guard_that_is_killed_in_a_session_is_left_out_of_the_sum(village):
    village.settle(6, records=2000, **DISTRIBUTED).start()
    village.houses["p2"].start("after-charge")
    village.houses["p4"].start("after-log")
    clients = village.clients(village.sockets(), seconds=120.0)
    clients.invite(invitation())
    w = np.array([0.1, -0.2, 0.3])
    got = clients.ask(GRADIENT, w)
    here = ["p0", "p1", "p3", "p5"]
    assert got.count == 4
    np.testing.assert_allclose(got.total, exact(village, here, w), atol=8 * np.sqrt(0.5))
    for name in ("p2", "p4"):
        village.houses[name].start()
    assert clients.ask(GRADIENT, w).count == 6
    books = village.check()
    assert books == dict.fromkeys(here, (2, 2)) | {"p2": (1, 2), "p4": (2, 2)}


def test_a_session_that_too_many_leave_is_lost_and_tried_again(village):
    """Of four with one in league with the server, three must stay; a second session has them."""
    village.settle(4, records=2000, **DISTRIBUTED)
    lost = []

    def plan(number, name):
        if number == 5 and name in ("p0", "p1"):  # hello, proposal, opening, roster, masked question
            lost.append(name)
            return "late"
        return "whole"

    clients = village.clients(Wire(village, plan))
    clients.invite(invitation())
    got = clients.ask(GRADIENT, np.zeros(3))
    assert (lost, got.count, clients.status().round) == (["p0", "p1"], 4, 2)
    np.testing.assert_allclose(got.total, exact(village, village.houses, np.zeros(3)), atol=8)
    assert set(village.check().values()) == {(2, 2)}
    with pytest.raises(Unsupported, match="sums"):
        clients.ask_one(0, GRADIENT, np.zeros(3))


def test_too_few_survivors_are_not_asked(village):
    clients = village.settle(3, **DISTRIBUTED).clients(village.functions(), seconds=0.2)
    clients.invite(invitation(survivors=3))  # with one in league with the server four are needed
    with pytest.raises(FarthingError, match="lost too many parties"):
        clients.ask(GRADIENT, np.zeros(3))
    assert set(village.check().values()) == {(0, 0)}


def test_guards_do_not_show_their_share_alone(village, told):
    house = village.settle(3, **DISTRIBUTED).houses["p0"]
    guard = house.open()
    assert told(guard.answer(village.question(invitation=invitation())), house) is Reason.TRUST
    for kind in (MessageKind.ROSTER, MessageKind.MASKED_QUESTION, MessageKind.SURVIVORS, MessageKind.REVEAL):
        header = {"run": "r", "round": 1, "nonce": "0" * 32, "threshold": 2, "table": 0, "each": 8}
        assert told(guard.answer(seal(kind, header, b"", village.coordinator)), house) is Reason.MEMBERS
    assert village.check()["p0"] == (0, 0)


def test_distributed_training_over_guards(village):
    village.settle(4, limits='trust = "distributed"\ncolluding = 1')
    clients = village.clients(village.functions())
    found = few(federated_descent(clients, PROBLEM, trust="distributed", survivors=2), 3)
    assert found.steps == 3
    assert set(village.check().values()) == {(3, 3)}


def test_lies_in_a_session_are_refused(village):
    """Every request of a session is also sent bent, signed all the same: no crash, and no secret twice."""
    village.settle(4, records=50, **DISTRIBUTED)
    dice, seen, revealed = random.Random(3), Counter(), {}

    class Bending(Wire):
        def exchange(self, requests, seconds):
            for name, request in requests.items():
                found = unseal(request, {village.coordinator.public}, 10**6)
                for _ in range(3 if found.kind >= MessageKind.OPENING and name == "p0" else 0):
                    reply = self._parties[name](bent(found))
                    told = unseal(reply, {village.houses[name].signer.public}, 10**6)
                    fields = told.fields().plain()
                    seen[fields.get("reason", "answered")] += 1
            for name, reply in super().exchange(requests, seconds):
                told = unseal(reply, {village.houses[name].signer.public}, 10**6)
                if told.kind is MessageKind.REVEALED:
                    for about, share in unpack_table(told.body, 4, (34,)).items():
                        revealed.setdefault((self.number // 5, about), set()).add(share[:1])
                yield name, reply

    def bent(found):
        header, body = found.fields().plain(), bytearray(found.body)
        field = dice.choice([name for name in header if name not in ("run", "round", "nonce")] or ["more"])
        if body and dice.random() < 0.5:
            body[dice.randrange(len(body))] ^= 1 + dice.randrange(255)
        else:
            header[field] = dice.choice([0, -1, 2**40, "x", None, [], {}, 1.5, "00" * 32])
        return seal(found.kind, header, bytes(body), village.coordinator)

    clients = village.clients(Bending(village, lambda number, name: "whole"), seconds=1.0, patience=30)
    clients.invite(invitation())
    for _ in range(4):
        assert clients.ask(GRADIENT, np.zeros(3)).count in (3, 4)
    assert seen["internal"] == 0
    assert sum(seen.values()) - seen["answered"] > 20
    assert all(len(kinds) == 1 for kinds in revealed.values())
    for logged, charged in village.check().values():
        assert logged == charged <= 5


def test_messages_lost_anywhere_in_sessions(village):
    """One message in thirty is lost: what comes out is the sum over as many as are said to be in it."""
    village.settle(6, records=2000, **DISTRIBUTED)
    dice = random.Random(4)

    def plan(number, name):
        return "whole" if number <= 2 or dice.random() > 1 / 30 else dice.choice(["lost", "late"])

    clients = village.clients(Wire(village, plan), patience=20)
    clients.invite(Invitation(1.0, rounds=100, noise_multiplier=0.5, trust="distributed", survivors=2))
    w = np.array([0.1, -0.2, 0.3])
    each = {name: exact(village, [name], w) for name in village.houses}
    counts = []
    for _ in range(12):
        got = clients.ask(GRADIENT, w)
        counts.append(got.count)
        sums = [sum(each[name] for name in some) for some in itertools.combinations(each, got.count)]
        assert min(np.abs(got.total - total).max() for total in sums) < 8 * np.sqrt(0.75)
    assert len(set(counts)) > 1
    for logged, charged in village.check().values():
        assert logged == charged >= 12 - counts.count(5) - counts.count(4)


def test_a_guard_that_is_not_enrolled_does_not_mask(village):
    house = village.settle(2, **DISTRIBUTED).houses["p0"]
    text = house.policy.read_text().replace(house.signer.public.hex(), "ab" * 32)
    house.policy.write_text(text)
    with pytest.raises(InvalidValue, match="of the guard itself"):
        house.open()


@pytest.mark.slow
def test_twenty_guards_train_addp_on_adult_to_the_very_model_of_one_process(village):
    adult = load_adult()
    village.settle(20, records=100, width=adult.X_train.shape[1], limits="")
    problem = Problem(logistic, 2000, adult.X_train.shape[1], unit=False)
    for seed, house in enumerate(village.houses.values()):
        rows = slice(100 * seed, 100 * seed + 100)
        np.savez(house.folder / "records.npz", X=adult.X_train[rows], y=adult.y_train[rows])
        size = house.policy.read_text().replace(f"size = {100 + seed}", "size = 100")
        house.policy.write_text(size)
        house.start(seed=seed)

    def method(clients):
        return addp(clients, problem, rounds=10, draw=Poisson(0.01))

    remote = few(method(village.clients(village.sockets(), seconds=120.0)), 60)
    agents = Parties([Reseeded(house, seed) for seed, house in enumerate(village.houses.values())])
    local = few(method(agents), 60)
    np.testing.assert_array_equal(remote.w[0], local.w[0])
    np.testing.assert_array_equal(remote.w[1], local.w[1])
    assert set(village.check().values()) == {(60, 60)}
