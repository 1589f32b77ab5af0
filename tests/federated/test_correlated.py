"""Correlated noise over the rounds of federated clients: its covariance, its draws, and its books."""

import math

import numpy as np
import pytest
from scipy.linalg import toeplitz

import farthing as ft
from farthing.accounting.correlated import best_exponent
from farthing.data.tables import Features, Table
from farthing.deploy.messages import forms
from farthing.errors import InvalidValue, Unsupported
from farthing.federated import Ask, ClientAgent, InTurn, Invitation, Parties, Simulated, fedsgd
from farthing.linear.losses import LinearGradient, logistic, squared
from farthing.queries.correlated import BandedShare, coefficients, spread
from farthing.queries.events import PoissonEvent, RepeatedEvent

BANDS, TURNS, WIDTH = 3, 9, 4000
CLIENTS = 3


def invitation(trust="local", noise=2.0, **more):
    shares = {"survivors": CLIENTS} if trust == "distributed" else {}
    given = {"draw": ft.Cyclic(0.3, BANDS), "rounds": TURNS, "bands": BANDS, "exponent": 0.6, "trust": trust}
    return Invitation(1.0, noise_multiplier=noise, **given | shares | more)


def zeros(of, trust, budgets=None):
    """Clients whose records are zeros, so that all but the last coordinate of a sum is noise."""
    X, y = np.zeros((CLIENTS, WIDTH)), np.zeros(CLIENTS)
    observer = {"local": "server", "distributed": "aggregate", "trusted": "anyone"}[trust]
    budget = ft.Budget(50.0, 1e-6, observer=observer)
    if of is Simulated:
        return Simulated.split(X, y, clients=CLIENTS, budgets=budgets or budget)
    ledgers = [ft.Ledger(budget).over(Table(X[:1], y[:1])) for _ in range(CLIENTS)]
    return Parties(ClientAgent(ledger, 1) for ledger in ledgers)


def released(clients, turns=TURNS):
    """The noise of every round, a row each."""
    gradient = LinearGradient(logistic, Features(WIDTH))
    return np.stack([clients.ask(gradient, np.zeros(WIDTH + 1)).total[:-1] for _ in range(turns)])


def expected(turns=TURNS, exponent=0.6):
    """The covariance of C⁻¹Z, where Z has the deviation 2 |c|."""
    column = np.zeros(turns)
    column[:BANDS] = coefficients(BANDS, exponent)
    inverse = np.linalg.inv(np.tril(toeplitz(column)))
    return (2.0 * spread(BANDS, exponent)) ** 2 * inverse @ inverse.T


@pytest.mark.parametrize("of", [Simulated, Parties])
@pytest.mark.parametrize("trust", ["local", "distributed", "trusted"])
def test_the_noise_of_a_sum_is_correlated_as_the_theorem_says(of, trust):
    if of is Parties and trust == "trusted":
        pytest.skip("an agent releases nothing without noise")
    clients = zeros(of, trust)
    clients.invite(invitation(trust), "records")
    noise, wanted = released(clients), expected() * (CLIENTS if trust == "local" else 1)
    # 7 deviations of an empirical covariance of 4,000 pairs
    slack = 7 * np.sqrt((wanted**2 + np.outer(np.diag(wanted), np.diag(wanted))) / WIDTH)
    assert (np.abs(noise @ noise.T / WIDTH - wanted) < slack).all()
    assert wanted[1, 0] < -slack[1, 0]  # later noise cancels earlier: independent noise would fail
    variance = clients.terms(0).variance * (CLIENTS if trust == "local" else 1)
    if trust != "trusted":
        assert variance * (CLIENTS if trust == "distributed" else 1) == pytest.approx(
            wanted[-1, -1], rel=0.01
        )


def test_noise_of_a_client_that_left_is_not_cancelled():
    """One client leaves after two cycles; what follows has none of its noise, and begins anew."""
    first = invitation().terms(ft.Budget(9.0, 1e-6, observer="server"), 1).rounds
    budgets = [ft.Budget(9.0, 1e-6), ft.Budget(50.0, 1e-6), ft.Budget(50.0, 1e-6)]
    clients = zeros(Simulated, "local", budgets)
    clients.invite(invitation(), "records")
    noise = released(clients, first + 4)
    assert clients.done.tolist() == [first, first + 4, first + 4]
    over = noise[first - 1] @ noise[first] / WIDTH
    size = math.sqrt(np.square(noise[first - 1]).mean() * np.square(noise[first]).mean())
    assert abs(over) < 7 * size / math.sqrt(WIDTH)
    late = np.square(noise[first]).mean() / (2 * (2.0 * spread(BANDS, 0.6)) ** 2)
    assert abs(late - 1) < 7 * math.sqrt(2 / WIDTH)  # two clients' noise, without a history


@pytest.mark.parametrize("of", [Simulated, Parties])
def test_a_record_has_one_chance_in_a_cycle_and_its_group_stays(of):
    n, groups, budget = 12, 4, ft.Budget(1e9, 1e-6, observer="server")
    X, y = np.eye(n), np.ones(n)
    if of is Simulated:
        clients = Simulated.split(X, y, clients=3, budgets=budget)
    else:
        parts = [Table(X[i : i + 4], y[i : i + 4]) for i in (0, 4, 8)]
        clients = Parties(ClientAgent(ft.Ledger(budget).over(part), 4) for part in parts)
    given = {"draw": ft.Cyclic(1 / groups, groups), "rounds": 3 * groups, "bands": groups}
    clients.invite(Invitation(1.0, noise_multiplier=1e-3, **given), "records")
    gradient = LinearGradient(squared, Features(n, intercept=0.0))
    drawn = np.stack([np.abs(clients.ask(gradient, np.zeros(n)).total) > 0.5 for _ in range(3 * groups)])
    cycles = drawn.reshape(3, groups, n)
    assert (cycles.sum(axis=1) == 1).all()  # at a rate of 1 in its group: exactly once
    assert (cycles == cycles[0]).all()


def test_a_plan_is_charged_as_what_its_chances_cost():
    budget = ft.Budget(2.0, 1e-6, observer="server")
    ledgers = [ft.Ledger(budget).over(Table(np.zeros((40, 2)), np.zeros(40))) for _ in range(2)]
    clients = Parties(ClientAgent(ledger, 40) for ledger in ledgers)
    clients.invite(Invitation(1.0, ft.Cyclic(0.1, 5), 20, bands=5))
    terms = clients.terms(0)
    assert terms.rounds == 20
    noise = terms.mechanism.noise_multiplier
    plan = RepeatedEvent(PoissonEvent(0.5, ft.Gaussian(noise).unit_event()), 4)
    assert ft.accounting.pld.epsilon(plan, 1e-6) == pytest.approx(2.0, rel=1e-4)
    simulated = Simulated.split(np.zeros((80, 2)), np.zeros(80), clients=2, budgets=budget)
    simulated.invite(Invitation(1.0, ft.Cyclic(0.1, 5), 20, bands=5))
    gradient = LinearGradient(logistic, Features(2))
    for over in (clients, simulated):
        for t in range(7):
            over.ask(gradient, np.zeros(3))
            assert over.left.tolist() == [19 - t] * 2
    assert ledgers[0].spent.epsilon <= 2.0
    assert simulated.event(0) == RepeatedEvent(terms.price(budget), 2)  # two cycles were begun
    for told in (simulated.guarantee(0), simulated.spent(0)):
        assert "Choquette-Choo et al. 2023" in told.theorem


def test_shares_are_of_one_turn_or_refused_before_a_charge():
    clients = zeros(Parties, "distributed")
    clients.invite(invitation("distributed"), "records")
    gradient = LinearGradient(logistic, Features(WIDTH))
    agent, w = clients._agents[0], np.zeros(WIDTH + 1)
    assert isinstance(agent._terms.mechanism, BandedShare)
    agent.handle(Ask(1, gradient, w))
    with pytest.raises(InvalidValue, match="need one turn: round 1, turn 1"):
        clients.ask(gradient, w)  # it is one turn ahead of the others
    assert clients.left.tolist() == [agent._terms.rounds - 1, *[agent._terms.rounds] * 2]


class Linear:
    """In place of a network."""

    gradient = LinearGradient(logistic, Features(2))

    def start(self):
        return np.zeros(3)


@pytest.mark.parametrize("trust", ["local", "distributed"])
def test_fedsgd_trains_with_bands_and_ends_with_its_plan(trust):
    X = np.random.default_rng(0).uniform(size=(4000, 2))
    clients = Simulated.split(X, (X[:, 0] > X[:, 1]) * 1.0, clients=4, budgets=ft.Budget(3.0, 1e-6))
    trained = ft.run(fedsgd(clients, Linear(), rounds=20, sampling_rate=0.2, lr=2.0, bands=4, trust=trust))
    assert trained.steps == 20
    assert trained.w[0] > 1 > -1 > trained.w[1]
    assert clients.terms(0).mechanism.exponent == best_exponent(4, 20)
    assert clients.spent(0).epsilon <= 3.0


def test_more_bands_than_a_record_can_stay_out_for_are_refused():
    clients = Simulated.split(np.zeros((4, 2)), np.zeros(4), clients=2, budgets=ft.Budget(3.0, 1e-6))
    with pytest.raises(InvalidValue, match=r"bands must be at most 2 at the sampling rate 0\.4"):
        next(fedsgd(clients, Linear(), sampling_rate=0.4, bands=3))


def test_what_no_theorem_covers_is_refused():
    for wrong in ({"draw": ft.Cyclic(0.3, 2)}, {"draw": ft.Poisson(0.3)}, {"accountant": "sampling"}):
        with pytest.raises(Unsupported):
            invitation(**wrong)
    party = ft.Budget(50.0, 1e-6, unit="party", observer="server")
    with pytest.raises(Unsupported, match="protect a record"):
        invitation().terms(party, 1)
    each = Simulated.split(np.zeros((3, 2)), np.zeros(3), clients=3, budgets=party, noise="each")
    with pytest.raises(Unsupported, match="each"):
        each.invite(invitation())
    clients = zeros(Simulated, "local")
    clients.invite(invitation())
    with pytest.raises(Unsupported, match="one client alone has no turn"):
        clients.ask_one(0, LinearGradient(logistic, Features(WIDTH)), np.zeros(WIDTH + 1))
    with pytest.raises(Unsupported, match="only be simulated"):
        forms.invitation(Invitation(1.0, InTurn(), 9))
