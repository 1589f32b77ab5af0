"""Runs over guards with a network: as in one process, with bounded uploads and secure sums."""

import math

import numpy as np
import pytest

import farthing as ft
from farthing.deploy import factories
from farthing.deploy.averages import longest_upload, steps_of
from farthing.deploy.guard import keeper
from farthing.deploy.messages.forms import NetworkAsk, NetworkKind, Question, RoundId, pack_weights
from farthing.deploy.messages.signed import Fields, MessageKind, Reason, digest, pack_table, seal, unseal
from farthing.deploy.messages.transport import InProcess
from farthing.deploy.roster import State, longest
from farthing.errors import InvalidValue, Unsupported
from farthing.federated.methods.networks import dp_fedavg
from farthing.federated.protocol import ClientAgent, Parties
from farthing.federated.rounds import LocalSteps
from farthing.federated.terms import Invitation, Weights
from farthing.noise.lattice import SeededStream
from farthing.queries.query import PerExample

TERMS = Invitation(1.0, ft.Poisson(0.5), rounds=6)


@pytest.fixture
def network(installed):
    """The network as a coordinator has it, over parties that are settled by `Installed.settle`."""
    from farthing.torch.training.network import Network

    asked = installed()
    make, loss = (factories.found(name, asked.folder) for name in asked.names)
    asked.network = Network(make(), loss, name="small", source=asked.hash)
    return asked


def examples(house):
    from farthing.torch.training.records import Examples

    with np.load(house.folder / "records.npz") as held:
        return Examples((held["X"], held["y"]))


def trained(clients, contribution, w, rounds):
    for _ in range(rounds):
        got = clients.ask(contribution, w)
        w = np.float32(w - 0.5 * got.mean).astype(np.float64)
    return w, got


def test_guards_train_the_network_that_agents_in_one_process_do(network):
    """Their noise is the same; an upload is rounded to float32 on its way."""
    village = network.settle(2).village
    doors = {
        name: house.open(stream=SeededStream(seed)).answer
        for seed, (name, house) in enumerate(village.houses.items())
    }
    remote = village.clients(InProcess(doors))
    agents = []
    for seed, house in enumerate(village.houses.values()):
        ledger = ft.Ledger(ft.Budget(1.0, 1e-6, observer="server"), stream=SeededStream(seed))
        records = network.network.check(examples(house))
        agents.append(ClientAgent(ledger.over(records), len(records)))
    local = Parties(agents)
    start = network.network.start()
    for clients in (remote, local):
        clients.invite(TERMS, Weights.PRECISION)
    there, got = trained(remote, network.network.gradient, start, 3)
    here, other = trained(local, network.network.gradient, start, 3)
    np.testing.assert_allclose(there, here, rtol=1e-4, atol=1e-3)
    assert (got.count, got.divisor, got.alive) == (other.count, other.divisor, other.alive)
    assert math.isclose(got.variance, other.variance)
    assert set(village.check().values()) == {(3, 3)}


def test_local_steps_over_guards_are_charged_by_the_step_and_weighed_by_their_noise(network):
    village = network.settle(2).village
    clients = village.clients(village.functions())
    clients.invite(Invitation(1.0, rounds=8))
    local = LocalSteps(network.network.gradient, steps=3, lr=0.5, proximal=0.1)
    got = clients.ask(local, network.network.start())
    assert (got.count, clients.left.tolist()) == (2, [5, 5])
    one, other = (clients.terms(place) for place in range(2))
    weight = np.array([terms.expected / (0.25 * 3 * terms.variance) for terms in (one, other)])
    expected = np.array([one.expected, other.expected])
    noise = np.array([0.25 * 3 * one.variance, 0.25 * 3 * other.variance])
    assert math.isclose(got.variance, float(weight**2 @ noise) / float(weight @ expected) ** 2)
    clients.ask(local, network.network.start())
    last = clients.ask(local, network.network.start())  # two are left
    assert (last.count, clients.alive) == (2, 0)
    assert set(village.check().values()) == {(8, 8)}


def test_what_no_guard_answers_is_not_sent(network):
    village = network.settle(1).village
    clients = village.clients(village.functions())
    clients.invite(TERMS)
    with pytest.raises(Unsupported, match="a guard answers gradients"):
        clients.ask(PerExample(lambda rows, w: rows), np.zeros(23))
    network.network.source = ""
    with pytest.raises(InvalidValue, match="its source's hash"):
        clients.ask(network.network.gradient, np.zeros(23))
    with pytest.raises(InvalidValue, match="finite"):
        clients.ask(network.network.gradient, np.full(23, np.nan))
    assert village.check() == {"p0": (0, 0)}


def test_a_party_with_another_source_leaves_and_the_others_go_on(network):
    village = network.settle(2).village
    clients = village.clients(village.functions())
    clients.invite(TERMS)
    other = village.houses["p1"].objects[0]._answerable
    other._models["small"] = type(other._models["small"])(
        factory="a:b", loss="a:c", weights=100, hash="0" * 64
    )
    assert clients.ask(network.network.gradient, network.network.start()).count == 1
    party = clients.status().parties[1]
    assert (party.state, party.reason) == (State.REFUSED, "model")
    assert village.check() == {"p0": (1, 1), "p1": (0, 0)}


class Unruly:
    """A transport on which every reply so far comes again, the newest first, and one party stalls a round.

    A reply that was held back comes with those of the next round.
    """

    def __init__(self, inner):
        self.inner, self.parties, self.old, self.late, self.stalls = inner, inner.parties, [], [], None

    def exchange(self, requests, seconds):
        came = list(self.inner.exchange(requests, seconds))
        held = [reply for reply in came if reply[0] == self.stalls]
        fresh = [reply for reply in came if reply[0] != self.stalls]
        swapped = [(other, data) for (other, _), (_, data) in zip(fresh, reversed(fresh), strict=True)]
        late = [] if self.stalls else self.late
        yield from [*reversed(self.old), *late, *swapped, *reversed(fresh), *fresh]
        self.old, self.late = self.old + fresh, self.late + held


def test_replies_about_a_network_that_come_twice_late_or_out_of_order_count_once(network, monkeypatch):
    """Of a party that stalls beyond the time of a round, the late reply is not taken for the next one's."""
    from farthing.deploy import coordinator, roster

    village = network.settle(3).village
    monkeypatch.setattr(coordinator, "PAUSE", 0.02)
    monkeypatch.setattr(roster, "PAUSE", 0.02)
    unruly = Unruly(village.functions())
    clients = village.clients(unruly, seconds=0.1)
    clients.invite(Invitation(1.0, rounds=20))
    w, contributions = network.network.start(), [network.network.gradient] * 2
    contributions.append(LocalSteps(network.network.gradient, steps=2, lr=0.5))
    counts, totals = [], []
    for stalled, contribution in zip((None, "p1", None), contributions, strict=True):
        unruly.stalls = stalled
        got = clients.ask(contribution, w)
        counts.append(got.count)
        totals.append(got.total)
    assert counts == [3, 2, 3]
    assert not np.isclose(totals[0], totals[1]).any()
    assert [str(party.state) for party in clients.status().parties] == ["here"] * 3
    assert set(village.check(verify="p1").values()) == {(4, 4)}  # the stalled one was charged as well


LIES = [
    ({"body": np.full(23, 1e5)}, Reason.NORM),
    ({"body": np.full(23, np.nan)}, Reason.NONFINITE),
    ({"body": np.zeros(22)}, Reason.SHAPE),
    ({"taken": 4}, Reason.MALFORMED),
    ({"taken": 0}, Reason.MALFORMED),
    ({"taken": None}, Reason.MALFORMED),
]


def test_a_party_that_lies_about_its_steps_or_sizes_is_excluded(network):
    village = network.settle(2).village
    doors = {name: house.open().answer for name, house in village.houses.items()}
    honest, house = doors["p1"], village.houses["p1"]
    local = LocalSteps(network.network.gradient, steps=3, lr=0.5)
    for number, (lie, reason) in enumerate(LIES):

        def bent(request, lie=lie):
            found = unseal(honest(request), {house.signer.public}, 10**6)
            if found.kind is not MessageKind.ANSWER:
                return honest(request)
            header, body = found.fields().plain() | lie, pack_weights(lie.get("body", np.zeros(23)))
            header = {name: value for name, value in header.items() if name != "body"}
            return seal(found.kind, header | {"update": digest(body)}, body, house.signer)

        clients = village.clients(InProcess(doors | {"p1": bent}), run=f"run-{number}")
        clients.invite(Invitation(1.0, rounds=20))
        assert clients.ask(local, network.network.start()).count == 1
        party = clients.status().parties[1]
        assert (party.state, party.reason) == (State.REFUSED, str(reason))
    assert set(village.check().values()) == {(18, 18)}


def test_no_honest_upload_of_local_steps_is_refused_for_its_length():
    """A step of the longest noisy mean in one direction, k times, with and without a pull back."""
    terms = Invitation(1.0, rounds=5).terms(ft.Budget(1.0, 1e-6, observer="server"), 40)
    turn = RoundId("r", 1, "0" * 32)
    for proximal in (0.0, 0.5):
        asked = NetworkAsk("n", "0" * 64, NetworkKind.STEPS, steps=4, lr=0.5, proximal=proximal)
        question = Question(turn, "d", TERMS, asked, (3,))
        w = np.ones(3)
        g = np.array([0.0, 0.0, longest(terms, 40, 3)])
        update, taken = LocalSteps(None, 4, 0.5, proximal).run(lambda at, g=g: g / terms.expected, w, 9)
        upload = np.linalg.norm(terms.expected * update)
        assert upload <= longest_upload(question, pack_weights(w), terms, 40)
        assert steps_of(question, Fields({"taken": taken})) == 0.25 * 4


# --- secure aggregation

SHARED = Invitation(1.0, rounds=4, noise_multiplier=500.0, trust="distributed", survivors=2)


@pytest.mark.parametrize("unit", ["record", "party"])
def test_a_party_that_announces_another_unit_is_left_out_of_whole_updates(unit, network, monkeypatch):
    house, seals = network.settle(3, unit="user").village.houses["p1"], keeper.seal

    def lying(kind, header, body, signer):
        if kind is MessageKind.ANNOUNCEMENT and signer.public == house.signer.public:
            header = header | {"budget": header["budget"] | {"unit": unit}}
        return seals(kind, header, body, signer)

    monkeypatch.setattr(keeper, "seal", lying)
    clients = network.village.clients(network.village.functions(), seconds=5.0)
    next(dp_fedavg(clients, network.network, rounds=3))
    assert clients.names == ["p0", "p2"]
    assert network.village.check() == {"p0": (1, 1), "p1": (0, 0), "p2": (1, 1)}


def test_a_secure_sum_of_a_network_is_the_sum_of_what_parties_would_have_sent(network):
    """The noise of the sum is 500 on each coordinate: 23 of them stay within 8 deviations (below 1e-13)."""
    village = network.settle(3, limits='trust = "distributed"').village
    clients = village.clients(village.functions())
    clients.invite(SHARED)
    got = clients.ask(network.network.gradient, network.network.start())
    assert (got.count, got.total.shape) == (3, (23,))
    assert np.abs(got.total).max() < 8 * 500 * math.sqrt(3 / 2) + 123
    assert set(village.check().values()) == {(1, 1)}
    with pytest.raises(ft.FarthingError):
        clients.ask(LocalSteps(network.network.gradient, 2, 0.5), network.network.start())
    assert set(village.check().values()) == {(1, 1)}  # local steps have no shares of noise


def test_a_server_that_opens_one_session_at_different_weights_gets_no_sum(network):
    village = network.settle(3, limits='trust = "distributed"').village
    guards = {name: house.open() for name, house in village.houses.items()}
    asked = NetworkAsk("small", network.hash, NetworkKind.GRADIENT)
    turn = RoundId("run-1", 1, "0" * 32)
    header = Question(turn, "d", SHARED, asked, (23,)).header()
    weights = {name: pack_weights(np.full(23, float(name == "p0"))) for name in guards}

    def ask(name, kind, header, body=b""):
        reply = guards[name].answer(seal(kind, header, body, village.coordinator))
        found = unseal(reply, {village.houses[name].signer.public}, 10**6)
        return Reason(found.fields().plain()["reason"]) if found.kind is MessageKind.REFUSAL else found.body

    adverts = {
        name: ask(name, MessageKind.OPENING, header | {"weights": digest(weights[name])}) for name in guards
    }
    roster = turn.header() | {"threshold": 3}
    refused = [ask(name, MessageKind.ROSTER, roster, pack_table(adverts)) for name in guards]
    assert all(isinstance(reply, Reason) for reply in refused)
    masked = turn.header() | {"table": 0, "each": 8}
    for name in guards:  # and weights that were not announced are refused in any case
        reply = ask(name, MessageKind.MASKED_QUESTION, masked, pack_weights(np.full(23, 7.0)))
        assert isinstance(reply, Reason)
    assert set(village.check().values()) == {(0, 0)}
