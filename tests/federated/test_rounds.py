"""Several private steps of a client in one round: what is charged, what is sent, and who may take them."""

import numpy as np
import pytest

import farthing as ft
from farthing.data.tables import Features, Table
from farthing.errors import BudgetSpent, InvalidValue, Unsupported
from farthing.federated import ClientAgent, Invitation, LocalSteps, Parties, Simulated, Trust
from farthing.federated.rounds import rounded
from farthing.linear.losses import LinearGradient, logistic
from farthing.noise.lattice import SeededStream

GRADIENT = LinearGradient(logistic, Features(2))
RNG = np.random.default_rng(5)
X, Y = RNG.normal(size=(40, 2)), RNG.integers(0, 2, 40) * 1.0
HUGE = ft.Budget(1e12, 1e-6, observer="server")  # noise far below the sixth digit


def agents(budgets, block=1):
    size = len(X) // len(budgets)
    ledgers = [ft.Ledger(budget, block=block) for budget in budgets]
    parts = [Table(X[n * size : (n + 1) * size], Y[n * size : (n + 1) * size]) for n in range(len(budgets))]
    return ledgers, [ClientAgent(one.over(part), size) for one, part in zip(ledgers, parts, strict=True)]


def by_hand(x, y, w, local):
    """Local weights after the steps of FedProx on all records, without noise or clipping."""
    start, rows = w, np.hstack([x, np.ones((len(x), 1))])
    for _ in range(local.steps):
        mean = rows.T @ (1 / (1 + np.exp(-rows @ w)) - y) / len(x)
        w = w - local.lr * (mean + local.proximal * (w - start))
    return w


@pytest.mark.parametrize("proximal", [0.0, 0.7])
def test_the_mean_update_is_that_of_fedprox(proximal):
    local, start = LocalSteps(GRADIENT, 3, 0.5, proximal), rounded([0.3, -0.2, 0.1])
    expected = [by_hand(X[n : n + 20], Y[n : n + 20], start, local) - start for n in (0, 20)]
    _, parties = agents([HUGE, HUGE])
    for clients in (Parties(parties), Simulated.split(X, Y, clients=2, budgets=HUGE, stream=SeededStream(0))):
        clients.invite(Invitation(100.0, rounds=6))
        got = clients.ask(local, start)
        near = 1e-6 + 9 * got.variance**0.5  # rounding to float32, and 9 deviations of the noise
        assert near < 1e-4
        np.testing.assert_allclose(got.mean, np.mean(expected, axis=0), atol=near)


def test_as_many_answers_are_charged_as_steps_were_taken_and_never_more_than_fit():
    budgets = [ft.Budget(1.0, 1e-6, observer="server"), ft.Budget(0.5, 1e-6, observer="server")]
    ledgers, parties = agents(budgets)
    clients, local = Parties(parties), LocalSteps(GRADIENT, 3, 0.1)
    clients.invite(Invitation(1.0, rounds=7, noise_multiplier=20.0))
    simulated = Simulated.split(X, Y, clients=2, budgets=budgets)
    simulated.invite(Invitation(1.0, rounds=7, noise_multiplier=20.0))
    first = clients.left.tolist()
    assert first == simulated.left.tolist()
    assert first[0] > first[1] > 0
    receipts = 0
    while clients.alive:
        got, other = clients.ask(local, np.zeros(3)), simulated.ask(local, np.zeros(3))
        receipts += len(got.receipts)
        assert (got.count, got.alive) == (other.count, other.alive)
        assert clients.left.tolist() == simulated.left.tolist()
    assert receipts == sum(first)
    for ledger, rounds in zip(ledgers, first, strict=True):
        charges = [row.body["count"] for row in ledger.journal.rows() if row.kind == "charge"]
        assert sum(charges) == rounds
        assert ledger.spent.epsilon <= ledger.budget.epsilon
    for over in (clients, simulated):
        with pytest.raises(BudgetSpent):
            over.ask(local, np.zeros(3))


def test_the_variance_of_an_update_is_that_of_the_noise_of_its_steps():
    many, start = 400, np.zeros(3)
    budget, local = ft.Budget(1.0, 1e-6), LocalSteps(GRADIENT, 4, 0.25)
    clients = Simulated.split(np.zeros((many, 2)), np.zeros(many), clients=many, budgets=budget)
    clients.invite(Invitation(1e-3, rounds=4, noise_multiplier=1e3))  # noise of 1 on nearly nothing
    got = clients.ask(local, start)
    assert got.variance == pytest.approx(0.25**2 * 4 / many)
    # 9 deviations of each of three coordinates: fails once in 1e18 runs
    assert np.abs(got.mean).max() < 9 * got.variance**0.5


def test_shares_of_noise_and_aggregators_take_no_local_steps():
    budget = ft.Budget(1.0, 1e-6)
    for trust, survivors in ((Trust.DISTRIBUTED, 2), (Trust.TRUSTED, 1)):
        clients = Simulated.split(X, Y, clients=2, budgets=budget)
        clients.invite(Invitation(1.0, rounds=5, noise_multiplier=30.0, trust=trust, survivors=survivors))
        with pytest.raises(Unsupported, match=r"local steps need local trust|cannot be used alone"):
            clients.ask(LocalSteps(GRADIENT, 2, 0.1), np.zeros(3))
        assert clients.left.tolist() == [clients.terms(0).rounds] * 2  # nothing was charged
    _, parties = agents([ft.Budget(1.0, 1e-6, observer="aggregate")] * 2)
    shared = Parties(parties)
    shared.invite(Invitation(1.0, rounds=5, noise_multiplier=30.0, trust="distributed", survivors=2))
    left = shared.left.tolist()
    with pytest.raises(Unsupported, match="local steps need local trust"):
        shared.ask(LocalSteps(GRADIENT, 2, 0.1), np.zeros(3))
    assert shared.left.tolist() == left


def test_no_ledger_answers_local_steps_as_one_sum():
    local = LocalSteps(GRADIENT, 2, 0.1)
    with pytest.raises(Unsupported, match="LocalSteps does not enforce"):
        ft.Query(ft.Everyone(), local, ft.ClipNorm(1.0), ft.Gaussian(1.0))
    with pytest.raises(Unsupported, match="several answers"):
        local.bounded_sum(None, None, None)
    for wrong in ({"steps": 0}, {"lr": 0.0}, {"proximal": -1.0}):
        with pytest.raises(InvalidValue):
            LocalSteps(GRADIENT, **{"steps": 2, "lr": 0.1} | wrong)


def test_a_client_that_others_spend_from_keeps_the_steps_it_took():
    def ask(w):
        asked.append(w)
        if len(asked) > 2:
            raise BudgetSpent("another process took the rest")
        return np.ones(1)

    asked = []
    update, taken = LocalSteps(GRADIENT, 5, 0.5).run(ask, np.zeros(1), left=5)
    assert (update.tolist(), taken) == ([-1.0], 2)
    with pytest.raises(BudgetSpent):
        LocalSteps(GRADIENT, 5, 0.5).run(ask, np.zeros(1), left=5)
    asked.clear()
    assert LocalSteps(GRADIENT, 5, 0.5).run(ask, np.zeros(1), left=1)[1] == 1
    assert len(asked) == 1  # no more is even asked for than is left
