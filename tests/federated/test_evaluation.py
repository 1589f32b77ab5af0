"""Loss and accuracy on the clients' own records: right but for their noise, and paid for like a round."""

import math

import numpy as np
import pytest

import farthing as ft
from farthing.data.tables import Features, Table
from farthing.errors import BudgetSpent, InvalidValue
from farthing.federated import ClientAgent, Evaluation, Invitation, Parties, Simulated, evaluate_clients
from farthing.linear.losses import LinearGradient, PlacedGradient, logistic, multinomial
from farthing.linear.problem import Problem
from farthing.queries.bounds import ClipNorm

RNG = np.random.default_rng(3)
X = RNG.uniform(size=(600, 2))
Y = (X[:, 0] + 0.2 * RNG.normal(size=600) > 0.5) * 1.0
PROBLEM = Problem(logistic, 600, 2, unit=False)
W = np.array([6.0, 1.0]), np.array(-3.0)
BUDGET = ft.Budget(1e4, 1e-6)  # so much that noise does not matter, unless a test says so


def by_hand(X, Y, w, cap=4.0):
    margins = X @ w[0] + w[1]
    return np.minimum(np.logaddexp(0, margins) - Y * margins, cap).mean(), ((margins > 0) == (Y > 0.5)).mean()


@pytest.mark.parametrize("noise", ["sum", "each"])
def test_simulated_clients_say_what_a_loop_says_and_pay_a_round(noise):
    clients = Simulated.split(X, Y, clients=3, budgets=BUDGET, noise=noise)
    clients.invite(Invitation(2.0, rounds=4))
    found = evaluate_clients(clients, PROBLEM, W)
    loss, accuracy = by_hand(X, Y, W)
    assert found.deviation < 1e-3  # ten of them are as good as never reached
    assert (found.loss, found.accuracy) == (pytest.approx(loss, abs=0.04), pytest.approx(accuracy, abs=0.01))
    assert (found.clients, clients.left.tolist()) == (3, [3, 3, 3])
    for _ in range(3):
        evaluate_clients(clients, PROBLEM, W, cap=0.1)
    with pytest.raises(BudgetSpent):
        evaluate_clients(clients, PROBLEM, W)


def test_parties_charge_it_to_their_ledgers_at_the_price_of_a_round():
    budget = ft.Budget(2.0, 1e-6, observer="server")
    ledgers = [ft.Ledger(budget).over(Table(X[i::2], Y[i::2])) for i in range(2)]
    parties = Parties(ClientAgent(ledger, 300) for ledger in ledgers)
    with pytest.raises(InvalidValue, match="invited"):
        evaluate_clients(parties, PROBLEM, W)
    parties.invite(Invitation(1.0, ft.Poisson(0.5), rounds=3))
    parties.ask(LinearGradient(logistic, Features(2)), np.zeros(3))
    found = evaluate_clients(parties, PROBLEM, W)
    events = {receipt.event for receipt in found.receipts}
    assert events == {parties.terms(0).price(budget)}
    assert parties.left.tolist() == [1, 1]


def test_the_deviation_is_that_of_the_noise():
    """400 answers: 7 standard errors of a deviation are 7/√800 of it."""
    clients = Simulated.split(X, Y, clients=2, budgets=ft.Budget(50.0, 1e-6))
    clients.invite(Invitation(0.7, rounds=400))
    found = [evaluate_clients(clients, PROBLEM, W) for _ in range(400)]
    spread = np.std([one.accuracy for one in found])
    assert spread == pytest.approx(found[0].deviation, rel=7 / math.sqrt(800))


def test_classes_and_placed_rows_count_the_same():
    labels = RNG.integers(0, 3, 600)
    w = RNG.normal(size=(3, 3))
    table, bound = Table(X, labels.astype(float)), ClipNorm(1.0)
    features = Features(2)
    plain, placed = (
        Evaluation(kind(multinomial, features)).bounded_sum(table, w, bound)
        for kind in (LinearGradient, PlacedGradient)
    )
    np.testing.assert_allclose(placed, plain, rtol=1e-9)
    found = (X @ w[:2] + w[2]).argmax(axis=1) == labels
    assert plain[1] == pytest.approx(found.sum() / math.sqrt(2))


def test_numbers_have_a_loss_and_no_accuracy():
    from farthing.linear.losses import squared

    found = Evaluation(LinearGradient(squared, Features(2)), cap=1.0).bounded_sum(
        Table(X, Y), np.zeros(3), ClipNorm(9.0)
    )
    assert found[0] > 0 == found[1]


class TestNetworks:
    @pytest.fixture(autouse=True)
    def torch(self):
        self.torch = pytest.importorskip("torch")

    def network(self, **options):
        nn = self.torch.nn
        self.torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
        return ft.torch.Network(model, nn.CrossEntropyLoss(reduction="none"), **options)

    def expected(self, network, rows=slice(None), cap=4.0):
        outputs = self.torch.as_tensor(network.outputs(X.astype(np.float32), network.start()))
        y = self.torch.as_tensor(Y).long()
        losses = self.torch.nn.functional.cross_entropy(outputs, y, reduction="none").clamp(max=cap)
        return losses.numpy()[rows], (outputs.argmax(1) == y).double().numpy()[rows]

    @pytest.mark.parametrize("options", [{}, {"placed": True}, {"route": "loop"}, {"route": "vmap"}])
    def test_records(self, options):
        network = self.network(**options)
        records = network.check(ft.torch.Examples((X.astype(np.float32), Y.astype(np.int64))))
        losses, hits = self.expected(network)
        some = np.arange(0, 600, 7)
        found = Evaluation(network.gradient).bounded_sum(records.take(some), network.start(), ClipNorm(1.0))
        wanted = np.array([losses[some].sum() / 4.0, hits[some].sum()]) / math.sqrt(2)
        np.testing.assert_allclose(found, wanted, rtol=1e-5)

    @pytest.mark.parametrize("placed", [False, True])
    def test_users_count_by_the_mean_of_their_records(self, placed):
        network, whose = self.network(placed=placed), np.minimum(np.arange(600) // 4, 120)
        records = ft.torch.Examples(
            (X.astype(np.float32), Y.astype(np.int64)), users=whose, records_per_user=5
        )
        losses, hits = self.expected(network)
        counted = [np.flatnonzero(whose == user)[:5] for user in range(121)]
        found = Evaluation(network.gradient, cap=0.6).bounded_sum(
            network.check(records).take(slice(None)), network.start(), ClipNorm(1.0)
        )
        wanted = [sum(min(losses[own].mean(), 0.6) / 0.6 for own in counted)]
        wanted.append(sum(hits[own].mean() for own in counted))
        np.testing.assert_allclose(found, np.array(wanted) / math.sqrt(2), rtol=1e-5)

    def test_a_method_and_its_evaluation_share_the_rounds(self):
        network = self.network()
        records = ft.torch.Examples((X.astype(np.float32), Y.astype(np.int64)))
        clients = Simulated.split(records, clients=3, budgets=ft.Budget(1e4, 1e-6))
        training = ft.federated.fedsgd(clients, network, rounds=4, sampling_rate=1.0)
        step = next(training)
        found = evaluate_clients(clients, network, step.w)
        assert found.accuracy == pytest.approx(
            (network.outputs(X.astype(np.float32), step.w).argmax(1) == Y).mean(), abs=0.01
        )
        assert len([step, *training]) == 3
