"""A-DDP's Algorithm 1 over a simulated: rounds, weights, who leaves when, and what it learns."""

import math

import numpy as np
import pytest
from scipy.special import ndtr

import farthing as ft
from farthing.data.tables import Features, Table
from farthing.errors import BudgetSpent, InvalidValue, Unsupported
from farthing.federated import ClientAgent, Exactly, Parties
from farthing.federated.budgets import personal
from farthing.federated.methods.addp import addp, sgd_pass
from farthing.federated.simulated import Simulated
from farthing.linear.losses import LinearGradient, logistic, multinomial
from farthing.linear.problem import Problem
from farthing.noise.lattice import SeededStream
from farthing.queries.samplers import Everyone, Poisson

RNG = np.random.default_rng(11)
X = RNG.uniform(size=(4000, 3))
Y = 1.0 * (X @ [4.0, -4.0, 0.0] + 0.3 * RNG.normal(size=4000) > 0)
PROBLEM = Problem(logistic, 4000, 3, unit=False)
GRADIENT = LinearGradient(logistic, Features(3))


def simulated(budgets=None, records=100, seed=0, **options):
    budgets = ft.Budget(0.5, 1e-8) if budgets is None else budgets
    return Simulated.split(X, Y, records=records, budgets=budgets, stream=SeededStream(seed), **options)


def accuracy(w):
    return np.mean((X @ w[0] + w[1] > 0) == (Y > 0.5))


def test_the_papers_setting_counts_down_from_its_own_digits():
    clients = simulated()
    step = next(addp(clients, PROBLEM, draw=Poisson(0.01)))
    assert (step.t, step.w[0].shape, step.w[1].shape) == (1, (3,), ())
    assert set(clients.left) == {38011}
    assert clients.terms(0).mechanism.noise_multiplier == pytest.approx(193.7, abs=0.05)
    doubled = simulated()
    next(addp(doubled, PROBLEM))  # exactly one record: twice the noise, as many rounds
    assert set(doubled.left) == {38011}
    assert doubled.terms(0).mechanism.noise_multiplier == pytest.approx(2 * 193.735, abs=0.01)


@pytest.mark.parametrize(
    ("accountant", "rounds"), [("advanced", 10), ("sampling", 38012), ("tight", 3857819)]
)
def test_three_accountants_side_by_side(accountant, rounds):
    clients = simulated()
    next(addp(clients, PROBLEM, draw=Poisson(0.01), accountant=accountant))
    assert set(clients.left) == {rounds - 1}


def test_it_goes_on_while_anyone_can_afford_a_round():
    clients = simulated(budgets=personal(np.resize([0.2, 0.4, 0.8], 40), 1e-6))
    steps = list(addp(clients, PROBLEM, draw=Everyone(), noise_multiplier=90.0, accountant="tight"))
    settled = clients.done
    assert clients.alive == 0
    assert len(set(settled)) == 3
    assert [step.t for step in steps] == list(range(1, max(settled) + 1))


def test_a_budget_for_no_round_at_all_is_said():
    with pytest.raises(BudgetSpent):
        ft.run(addp(simulated(ft.Budget(0.01, 1e-9)), PROBLEM, noise_multiplier=1.0))


@pytest.mark.parametrize("draw", [Everyone(), Exactly(20), Poisson(0.2)])
def test_it_learns_where_noise_allows(draw):
    run = ft.run(
        addp(
            simulated(ft.Budget(8.0, 1e-6)),
            PROBLEM,
            draw=draw,
            rounds=60,
            calibration="tight",
            accountant="tight",
        )
    )
    assert run.steps >= 60
    assert accuracy(run.w) > 0.85


def test_precision_weights_are_worth_having():
    budgets = personal(np.where(np.arange(40) % 4 == 0, 4.0, 0.05), 1e-6)
    variances = []
    for weights in ("precision", "plain"):
        clients = simulated(budgets)
        first = next(
            addp(
                clients,
                PROBLEM,
                draw=Everyone(),
                rounds=30,
                calibration="tight",
                accountant="tight",
                weights=weights,
                lr=1.0,
            )
        )
        variances.append(float(np.sum(np.square(first.w[0]))))
    assert variances[0] < variances[1] / 100


def test_agents_run_the_same_file():
    budget = ft.Budget(2.0, 1e-6, observer="server")
    agents = [
        ClientAgent(ft.Ledger(budget, stream=SeededStream(i)).over(Table(X[i::20], Y[i::20])), 200)
        for i in range(20)
    ]
    steps = list(
        addp(Parties(agents), PROBLEM, draw=Everyone(), rounds=25, calibration="tight", accountant="tight")
    )
    assert len(steps) == 25
    assert len(steps[0].receipts) == 20
    assert all(agent._ledger.spent.epsilon == math.inf for agent in agents)  # seeded
    assert accuracy(steps[-1].w) > 0.8


def test_classes():
    labels = (3 * X[:, 0]).astype(int)
    clients = Simulated.split(X, labels, records=100, budgets=ft.Budget(8.0, 1e-6), stream=SeededStream(0))
    problem = Problem(multinomial, 4000, 3, outputs=3, unit=False)
    u, constant = ft.run(
        addp(clients, problem, draw=Everyone(), rounds=5, calibration="tight", accountant="tight")
    ).w
    assert (u.shape, constant.shape) == ((3, 3), (3,))


@pytest.mark.parametrize("option", [{"lr": 0.0}, {"lr": math.nan}, {"clip_norm": 0.0}, {"rounds": 0}])
def test_nonsense_is_refused(option):
    with pytest.raises(InvalidValue, match=next(iter(option))):
        next(addp(simulated(), PROBLEM, **option))


@pytest.mark.parametrize(
    "option",
    [
        {"epsilon_iter": 0.1},
        {"delta_iter": 1e-6},
        {"epsilon_iter": 0.1, "delta_iter": 1e-6, "noise_multiplier": 9.0},
        {"epsilon_iter": 0.0, "delta_iter": 1e-6},
        {"delta_iter": 1.0, "epsilon_iter": 0.1},
    ],
)
def test_half_of_an_iterations_budget_is_refused(option):
    with pytest.raises(InvalidValue, match=next(iter(option))):
        next(addp(simulated(), PROBLEM, **option))


@pytest.mark.parametrize("unit", ["record", "user"])
def test_an_iterations_budget_is_that_of_what_is_protected(unit):
    """eps_iter and δ_iter (line 14): σ of (4) for one record, or for all that an upload holds."""
    budget = ft.Budget(1.0, 1e-6, "replace-one", unit=unit)
    clients = Simulated.split(np.ones((20, 1)), np.ones(20), records=5, budgets=budget)
    next(addp(clients, Problem(logistic, 20, 1), draw=Everyone(), epsilon_iter=0.3, delta_iter=1e-7))
    mu = 2 * (5 if unit == "user" else 1) / clients.terms(0).mechanism.noise_multiplier
    tail = ndtr(mu / 2 - 0.3 / mu) - math.exp(0.3) * ndtr(-mu / 2 - 0.3 / mu)
    assert tail == pytest.approx(1e-7, rel=1e-6)


@pytest.mark.parametrize("trust", ["distributed", "trusted"])
@pytest.mark.parametrize("draw", [Exactly(1), Poisson(0.05), Everyone()])
def test_one_noise_on_the_sum_does_more(trust, draw):
    deviations = []
    for kind in ("local", trust):
        clients = simulated(ft.Budget(1.0, 1e-6))
        steps = addp(
            clients, PROBLEM, draw=draw, rounds=50, calibration="tight", accountant="tight", trust=kind
        )
        next(steps)
        assert set(clients.left) == {49}
        deviations.append(clients.ask(GRADIENT, np.zeros(4)).variance)
    assert deviations[0] / deviations[1] == pytest.approx(40, rel=1e-6)  # of as many clients
    assert clients.guarantee(0).observer == {"distributed": "aggregate", "trusted": "anyone"}[trust]


def test_it_goes_on_while_enough_survivors_are_left():
    clients = simulated(budgets=personal(np.resize([0.5, 1.0], 40), 1e-6))
    run = ft.run(
        addp(
            clients,
            PROBLEM,
            draw=Everyone(),
            accountant="tight",
            trust="distributed",
            survivors=20,
            rounds=30,
        )
    )
    assert run.steps == clients.done.max() > 30
    assert set(clients.left) == {0}


@pytest.mark.parametrize("trust", ["local", "distributed", "trusted"])
@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_a_users_records_together(adjacency, trust):
    """A whole user moves the sum by as many clips as are drawn, twice that where it is another user."""
    budget = ft.Budget(2.0, 1e-6, adjacency, unit="user")
    clients = simulated(budget)
    run = ft.run(
        addp(
            clients,
            PROBLEM,
            clip_norm=0.5,
            draw=Exactly(7),
            rounds=20,
            calibration="tight",
            accountant="tight",
            trust=trust,
        )
    )
    shares = 40 if trust == "distributed" else 1
    deviation = math.sqrt(clients.terms(0).variance * shares)
    moved = 7 * 0.5 * (2 if adjacency == "replace-one" else 1)
    assert run.steps == 20
    assert 0.999 * budget.mu < moved * math.sqrt(20) / deviation <= budget.mu
    assert clients.spent(0).unit == "user"


def test_what_hides_no_whole_user_is_refused():
    budget = ft.Budget(2.0, 1e-6, "zero-out", unit="user")
    with pytest.raises(Unsupported, match="Poisson draw may hold all"):
        next(addp(simulated(budget), PROBLEM, draw=Poisson(0.1)))
    with pytest.raises(Unsupported, match="draws in turn protect a record"):
        next(sgd_pass(simulated(budget), PROBLEM))
