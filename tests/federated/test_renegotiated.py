"""Clients whose coordinator changes the terms: every change is priced, and nobody passes a budget."""

import numpy as np
import pytest

import farthing as ft
from farthing.accounting import pld
from farthing.accounting.filters import GdpFilter, RdpFilter
from farthing.accounting.menu import Menu
from farthing.data.tables import Features
from farthing.errors import BudgetSpent, InvalidValue, Unsupported
from farthing.federated.renegotiated import Renegotiated, descend_changing, most_rounds
from farthing.federated.terms import Exactly, InTurn, Invitation, Trust
from farthing.linear.losses import LinearGradient, logistic
from farthing.linear.problem import Problem
from farthing.queries.samplers import Everyone, Poisson

X = np.random.default_rng(0).uniform(size=(1000, 2))
Y = (X[:, 0] > X[:, 1]) * 1.0
SMALL, LARGE = ft.Budget(1.0, 1e-6), ft.Budget(3.0, 1e-6)
GRADIENT, W = LinearGradient(logistic, Features(2)), np.zeros(3)


def _clients(budgets=None, rule=RdpFilter) -> Renegotiated:
    clients = Renegotiated.split(X, Y, records=100, budgets=budgets or [SMALL] * 5 + [LARGE] * 5)
    clients.rule = rule
    return clients


def _invited(noise: float, draw=None) -> Invitation:
    return Invitation(1.0, draw or Poisson(0.1), noise_multiplier=noise)


def test_terms_change_at_will_and_nobody_passes_a_budget():
    rng, clients = np.random.default_rng(1), _clients()
    for _ in range(60):
        clients.invite(_invited(float(rng.uniform(4, 40)), Poisson(float(rng.choice([0.02, 0.1, 0.3])))))
        for _ in range(5):
            if clients.alive:
                clients.ask(GRADIENT, W)
    for client, budget in ((0, SMALL), (9, LARGE)):
        tight = pld.epsilon(clients.event(client), budget.delta)
        assert 0.3 * budget.epsilon < tight <= budget.epsilon
        assert tight <= clients.spent(client).epsilon <= budget.epsilon
        assert clients.guarantee(client).accountant == "rdp"


def test_rounds_under_the_old_terms_stay_charged():
    clients = _clients()
    clients.invite(_invited(10.0))
    before = clients.left.copy()
    for _ in range(7):
        clients.ask(GRADIENT, W)
    clients.invite(_invited(20.0))
    clients.invite(_invited(10.0))
    np.testing.assert_array_equal(clients.left, before - 7)
    assert clients.done.max() == 0  # under these terms


def test_a_client_sits_out_what_it_cannot_afford_and_comes_back():
    clients = _clients()
    clients.invite(_invited(0.8, Everyone()))
    assert clients.left.tolist() == [0] * 5 + [0] * 5
    with pytest.raises(BudgetSpent):
        clients.ask(GRADIENT, W)
    clients.invite(_invited(3.0, Everyone()))
    assert clients.alive == 5
    assert clients.ask(GRADIENT, W).count == 5
    clients.invite(_invited(60.0))
    assert clients.alive == 10
    assert clients.event(0) is None


def test_gaussian_rounds_are_counted_as_by_a_ledger_with_the_same_filter():
    clients = _clients(SMALL, GdpFilter)
    clients.invite(_invited(30.0, Everyone()))
    rule = GdpFilter(SMALL)
    price = clients.terms(0).price(SMALL)
    assert clients.left[0] == int(rule.mu**2 * 900 * (1 + 1e-12))
    assert clients.left[0] == most_rounds(rule, rule.start(), price)


def test_a_menu_affords_more_than_the_renyi_filter():
    menu = Menu([Poisson(0.1).amplify(ft.Gaussian(noise)) for noise in (5.0, 10.0)])
    rounds = []
    for rule in (RdpFilter, menu):
        clients = _clients(LARGE, rule)
        clients.invite(_invited(10.0))
        rounds.append(int(clients.left[0]))
    assert rounds[1] > 1.3 * rounds[0]


def test_training_ends_when_nobody_can_afford_a_round_or_the_rule_says_so():
    problem = Problem(logistic, 1000, 2, unit=False)

    def following(t, w):
        assert np.isfinite(w).all()
        return _invited(30.0 if t < 5 else 8.0)

    clients = _clients()
    steps = list(descend_changing(clients, problem, following, lr=0.5))
    assert clients.alive == 0
    assert len(steps) > 10
    assert (
        len(list(descend_changing(_clients(), problem, lambda t, w: _invited(30.0) if t < 4 else None))) == 3
    )


@pytest.mark.parametrize(
    ("invitation", "error"),
    [
        (Invitation(1.0, Poisson(0.1)), InvalidValue),
        (Invitation(1.0, Poisson(0.1), noise_multiplier=5.0, trust=Trust.TRUSTED), Unsupported),
        (Invitation(1.0, InTurn(), noise_multiplier=5.0), Unsupported),
    ],
)
def test_terms_that_cannot_change_are_refused(invitation, error):
    with pytest.raises(error):
        _clients().invite(invitation)


def test_who_sees_the_draws_cannot_change():
    budget = ft.Budget(1.0, 1e-6, adjacency="zero-out")
    clients = _clients(budget)
    clients.invite(_invited(20.0, Exactly(1)))
    with pytest.raises(InvalidValue, match="seen"):
        clients.invite(Invitation(1.0, Exactly(1), noise_multiplier=20.0, seen=True))
    with pytest.raises(Unsupported, match="all at once"):
        clients.ask_one(0, GRADIENT, W)
