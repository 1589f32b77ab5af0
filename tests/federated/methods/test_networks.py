"""Networks over simulated clients and over parties with ledgers: exact sums, the same rule, whole updates."""

import math

import numpy as np
import pytest
from scipy import stats

import farthing as ft
from farthing.errors import InvalidValue, Unsupported
from farthing.federated import Ask, ClientAgent, Invitation, Parties, Simulated, dp_fedavg, fedavg, fedsgd
from farthing.federated.terms import ClientNoise
from farthing.noise.lattice import SeededStream
from farthing.queries.mechanisms import Gaussian

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from farthing.torch.kernels.totals import SLACK  # noqa: E402
from farthing.torch.training.network import Network  # noqa: E402
from farthing.torch.training.records import Examples  # noqa: E402

LOSS = nn.CrossEntropyLoss(reduction="none")
RNG = np.random.default_rng(3)
X = RNG.normal(size=(60, 4)).astype(np.float32)
Y = (X[:, 0] + 0.3 * RNG.normal(size=60) > 0).astype(np.int64)
DATA = torch.from_numpy(X), torch.from_numpy(Y)
OWNERS = np.repeat(np.arange(3), 20)


def network():
    torch.manual_seed(1)
    return Network(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), LOSS)


def budgets(*epsilons, **options):
    return [ft.Budget(epsilon, 1e-6, **options) for epsilon in epsilons]


def simulated(*epsilons, users=False, **options):
    grouped = {"users": OWNERS, "records_per_user": 20} if users else {}
    unit = {"unit": "party"} if users else {}
    return Simulated.split(
        Examples(DATA, **grouped), clients=3, budgets=budgets(*epsilons, **unit), **options
    )


def parties(*epsilons, users=False):
    unit, agents, ledgers = {"unit": "party"} if users else {}, [], []
    for n, budget in enumerate(budgets(*epsilons, observer="server", **unit)):
        part = tuple(column[n == OWNERS] for column in DATA)
        grouped = {"users": [0] * 20, "records_per_user": 20} if users else {}
        ledgers.append(ft.Ledger(budget, block=1))
        agents.append(ClientAgent(ledgers[-1].over(Examples(part, **grouped)), 1 if users else 20))
    return Parties(agents), ledgers


def one_by_one(w, x, y, clip):
    """Σ of clipped gradients in float64, one record at a time, by torch alone."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    torch.nn.utils.vector_to_parameters(torch.from_numpy(w), model.parameters())
    total = 0.0
    for one, label in zip(torch.from_numpy(x).double(), torch.from_numpy(y), strict=True):
        found = torch.autograd.grad(LOSS(model(one[None]), label[None]).sum(), list(model.parameters()))
        row = torch.cat([part.flatten() for part in found]).numpy()
        total = total + row * min(1.0, clip / np.linalg.norm(row))
    return total


def test_a_round_is_the_weighted_mean_of_every_partys_own_clipped_sum():
    model, clip = network(), 0.4
    w, levels = model.start(), (1e12, 1e12, 4e12)  # hardly any noise, and two precisions
    sums = [one_by_one(w, X[n == OWNERS], Y[n == OWNERS], clip / (1 + SLACK)) for n in range(3)]
    invitation = Invitation(clip, rounds=4)
    precision = [1 / invitation.terms(one, 20).variance for one in budgets(*levels, observer="server")]
    assert precision[2] > 1.5 * precision[0]
    expected = sum(p * total for p, total in zip(precision, sums, strict=True)) / sum(
        20 * p for p in precision
    )
    for clients in (simulated(*levels), simulated(*levels, noise="each"), parties(*levels)[0]):
        clients.invite(invitation)
        got = clients.ask(model.gradient, w)
        np.testing.assert_allclose(got.mean, expected, atol=2e-5)
        assert got.variance == pytest.approx(1 / sum(400 * p for p in precision))


def test_simulated_clients_and_parties_with_ledgers_follow_one_rule():
    runs, ends = [], []
    clients, ledgers = parties(1.0, 0.5, 2.0)
    for over in (simulated(1.0, 0.5, 2.0), clients):
        steps = list(fedsgd(over, network(), rounds=6, sampling_rate=0.5, noise_multiplier=6.0))
        runs.append([step.t for step in steps])
        ends.append(over.left.tolist())
        assert np.isfinite(steps[-1].w).all()
    assert runs[0] == runs[1]
    assert ends == [[0, 0, 0], [0, 0, 0]]
    first = [ledger.guarantee.epsilon for ledger in ledgers]
    for ledger, epsilon, asked in zip(ledgers, first, (1.0, 0.5, 2.0), strict=True):
        charges = [row.body["count"] for row in ledger.journal.rows() if row.kind == "charge"]
        promised = [row.body["times"] for row in ledger.journal.rows() if row.kind == "promise"]
        assert sum(charges) == sum(promised) > 0  # what was released is what was charged, to the last round
        assert ledger.spent.epsilon <= epsilon <= asked
    assert runs[0][-1] == max(sum(1 for row in one.journal.rows() if row.kind == "charge") for one in ledgers)


def test_local_steps_of_a_network_charge_each_step():
    clients, ledgers = parties(1.0, 1.0, 1.0)
    steps = list(fedavg(clients, network(), rounds=2, local_steps=3, sampling_rate=0.5, proximal=0.1))
    assert [len(step.receipts) for step in steps] == [9, 9]
    for ledger in ledgers:
        assert sum(row.body["count"] for row in ledger.journal.rows() if row.kind == "charge") == 6


def test_a_whole_update_of_a_party_is_clipped_and_noised_as_one():
    model, clip = network(), 0.05
    w, update = model.start(), network().update(3, 0.5)
    expected = 0.0
    for n in range(3):
        people = Examples(tuple(c[n == OWNERS] for c in DATA), users=[0] * 20, records_per_user=20)
        expected = expected + update.bounded_sum(people.take(slice(None)), w, ft.ClipNorm(clip)) / 3
    for clients in (simulated(1e12, 1e12, 1e12, users=True), parties(1e12, 1e12, 1e12, users=True)[0]):
        invitation = Invitation(clip, rounds=2, clipped="party")
        clients.invite(invitation)
        np.testing.assert_allclose(clients.ask(update, w).mean, expected, atol=1e-5)
    assert 0 < np.linalg.norm(expected) <= clip
    terms = Invitation(clip, rounds=2, noise_multiplier=3.0, clipped="party").terms(
        ft.Budget(1.0, 1e-6, unit="party", observer="server"), 1
    )
    assert terms.mechanism == ClientNoise(3.0, records=1)
    too_long = terms.mechanism.release(np.full(10**4, 1.0), terms.bound, SeededStream(0))
    assert np.linalg.norm(too_long) < 2 * 3.0 * clip * 100  # a sum of a hundred clips is held to one
    steps = list(dp_fedavg(simulated(4.0, 4.0, 4.0, users=True), model, rounds=3, trust="distributed"))
    assert len(steps) == 3


def test_users_of_a_party_are_priced_as_records_are_when_each_is_clipped_as_a_whole():
    budget = ft.Budget(1.0, 1e-6, unit="user", observer="server")
    terms = Invitation(1.0, ft.Poisson(0.1), rounds=50, clipped="user").terms(budget, 40)
    same = Invitation(1.0, ft.Poisson(0.1), rounds=50).terms(ft.Budget(1.0, 1e-6, observer="server"), 40)
    assert (terms.mechanism, terms.rounds) == (same.mechanism, same.rounds)
    assert isinstance(terms.mechanism, Gaussian)


def test_a_party_that_draws_whether_it_takes_part_pays_the_price_of_a_sampled_gaussian():
    """One round, against the hockey-stick divergences of both directions by numerical integration."""
    epsilon, delta, rate = 1.0, 1e-5, 0.2
    budget = ft.Budget(epsilon, delta, unit="party", observer="server")
    terms = Invitation(1.0, ft.Poisson(rate), rounds=1, clipped="party").terms(budget, 1)
    noise = terms.mechanism.noise_multiplier
    x = np.linspace(-30 * noise, 30 * noise + 1, 2_000_001)
    alone, there = stats.norm.pdf(x, 0, noise), stats.norm.pdf(x, 1, noise)
    mixed = (1 - rate) * alone + rate * there
    divergences = [
        np.trapezoid(np.maximum(p - np.exp(epsilon) * q, 0), x) for p, q in ((mixed, alone), (alone, mixed))
    ]
    assert 0.99 * delta < max(divergences) <= delta * (1 + 1e-6)
    whole = Invitation(1.0, rounds=1, clipped="party").terms(budget, 1).mechanism.noise_multiplier
    assert noise < whole / 2


def test_a_drawn_party_is_priced_as_a_drawn_record_is_and_nothing_else_of_a_party_is_amplified():
    budget, rate = ft.Budget(1.0, 1e-6, unit="party", observer="server"), ft.Poisson(0.1)
    terms = Invitation(1.0, rate, rounds=50, clipped="party").terms(budget, 1)
    record = ft.Budget(1.0, 1e-6, observer="server")
    same = Invitation(1.0, rate, rounds=50).terms(record, 40)
    assert terms.mechanism == ClientNoise(same.mechanism.noise_multiplier, records=1)
    assert (terms.rounds, terms.price(budget)) == (same.rounds, same.price(record))
    seen = ft.Budget(1.0, 1e-6, "zero-out", unit="party", observer="coordinator")
    known = Invitation(1.0, rate, rounds=50, clipped="party", seen=True).terms(seen, 1)
    assert known.mechanism.noise_multiplier > 3 * terms.mechanism.noise_multiplier
    with pytest.raises(Unsupported, match="a Poisson draw may hold all records"):
        Invitation(1.0, rate, rounds=2).terms(budget, 1)
    several = Examples(DATA, users=OWNERS, records_per_user=20)
    agent = ClientAgent(ft.Ledger(budget).over(several), 1)
    with pytest.raises(Unsupported, match="must be one example"):
        agent.join(Invitation(1.0, rate, rounds=2, clipped="party"))


class Counted:
    """A whole update that notes how many examples were drawn, in a test only."""

    def __init__(self, update):
        self.update, self.drawn = update, []
        self.honours, self.shape, self.zero = update.honours, update.shape, update.zero

    def bounded_sum(self, batch, w, bound):
        self.drawn.append(len(batch))
        return self.update.bounded_sum(batch, w, bound)


def test_a_party_that_is_not_drawn_uploads_noise():
    """60 rounds: that it is drawn in all of them, or in none, has a probability of 2^-59."""
    budget = ft.Budget(8.0, 1e-6, unit="party", observer="server")
    people = Examples(tuple(c[OWNERS == 0] for c in DATA), users=[0] * 20, records_per_user=20)
    agent, model = ClientAgent(ft.Ledger(budget).over(people), 1), network()
    agent.join(Invitation(0.05, ft.Poisson(0.5), rounds=60, clipped="party"))
    update, w = Counted(model.update(1, 0.5)), model.start()
    uploads = [agent.handle(Ask(t, update, w)).value for t in range(1, 61)]
    assert all((value != 0).any() for value in uploads)
    assert (set(update.drawn), len(update.drawn), agent.left) == ({0, 1}, 60, 0)


def test_users_and_parties_are_drawn_by_dp_fedavg():
    for trust in ("local", "distributed"):
        clients = simulated(4.0, 4.0, 4.0, users=True)
        steps = list(dp_fedavg(clients, network(), rounds=3, sampling_rate=0.5, trust=trust))
        assert (len(steps), clients.terms(0).expected) == (3, 0.5)


def test_what_is_clipped_must_be_what_the_records_and_budgets_are():
    grouped, records = simulated(1.0, 1.0, 1.0, users=True), simulated(1.0, 1.0, 1.0)
    with pytest.raises(Unsupported, match="clipped per user, but the invitation clips per record"):
        grouped.invite(Invitation(1.0, rounds=2))
    with pytest.raises(Unsupported, match="protects a party, the budget is for a record"):
        Invitation(1.0, rounds=2, clipped="party").terms(ft.Budget(1.0, 1e-6, observer="server"), 1)
    alone = Simulated.split(Examples(DATA), clients=3, budgets=ft.Budget(1.0, 1e-6, unit="user"))
    with pytest.raises(Unsupported, match="clipped per record, but the invitation clips per user"):
        alone.invite(Invitation(1.0, rounds=2, clipped="user"))
    agents, _ = parties(1.0, 1.0, 1.0, users=True)
    with pytest.raises(Unsupported, match="clipped per user"):
        agents.invite(Invitation(1.0, rounds=2))
    with pytest.raises(InvalidValue, match="counts as one record, got 3"):
        Invitation(1.0, clipped="party").terms(ft.Budget(1.0, 1e-6, unit="party", observer="server"), 3)
    with pytest.raises(Unsupported, match="give every budget unit='user'"):
        next(dp_fedavg(records, network()))


def test_more_records_than_sums_are_proven_for_are_refused_before_a_charge():
    clients = simulated(1.0, 1.0, 1.0)
    clients.invite(Invitation(1.0, rounds=2))
    model = network()
    model.most = 59
    with pytest.raises(InvalidValue, match="draws 60 records on average"):
        clients.ask(model.gradient, model.start())
    assert clients.left.tolist() == [2, 2, 2]
    model.most = 60
    clients.ask(model.gradient, model.start())


@pytest.mark.parametrize("noise", ["each", "sum"])
def test_a_round_is_hidden_by_its_noise(noise):
    clients, model = simulated(1.0, 1.0, 1.0, noise=noise), network()
    clients.invite(Invitation(1.0, rounds=2, noise_multiplier=500.0))
    total = clients.ask(model.gradient, model.start()).total
    # the sum is at most 60 long; 23 normal numbers of deviation 866 are shorter than 320 once in 1e21 runs
    assert np.linalg.norm(total) > 260


@pytest.mark.slow
def test_shares_add_up_to_the_noise_of_one_aggregator():
    model, found = network(), []
    for _ in range(60):
        clients = simulated(1.0, 1.0, 1.0, noise="each")
        clients.invite(Invitation(1.0, rounds=2, noise_multiplier=50.0, trust="distributed", survivors=3))
        found.append(clients.ask(model.gradient, model.start()).total)
    # 60 × 23 normal numbers of deviation 50: the deviation of their deviation is below 1.1
    assert abs(np.std(np.array(found) - np.mean(found, axis=0)) * math.sqrt(60 / 59) - 50.0) < 9.0
