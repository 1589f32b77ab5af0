"""The default for a simulated, under each kind of trust."""

import math

import numpy as np
import pytest
from scipy.special import expit

import farthing as ft
from farthing.errors import InvalidValue
from farthing.federated.budgets import personal
from farthing.federated.methods.federated_descent import CONSTANT, ROUNDS, federated_descent, learnt_in
from farthing.federated.simulated import Simulated
from farthing.linear.losses import logistic, multinomial
from farthing.linear.problem import Problem
from farthing.noise.lattice import SeededStream

RNG = np.random.default_rng(4)
X = RNG.uniform(size=(20_000, 4))
Y = 1.0 * (X @ [3.0, -3.0, 1.0, -1.0] + 0.3 * RNG.normal(size=20_000) > 0)
PROBLEM = Problem(logistic, 20_000, 4, unit=False)


def simulated(budgets, seed=0, **options):
    return Simulated.split(X, Y, records=100, budgets=budgets, stream=SeededStream(seed), **options)


def accuracy(w):
    return np.mean((X @ w[0] + w[1] > 0) == (Y > 0.5))


@pytest.mark.parametrize(
    ("trust", "epsilon", "least"),
    [("local", 1.0, 0.8), ("distributed", 0.1, 0.85), ("trusted", 0.1, 0.85), ("distributed", 1.0, 0.88)],
)
def test_every_kind_of_trust_learns_and_spends_all_it_has(trust, epsilon, least):
    clients = simulated(ft.Budget(epsilon, 1e-8))
    run = ft.run(federated_descent(clients, PROBLEM, trust=trust))
    assert run.steps == ROUNDS
    assert clients.alive == 0
    assert accuracy(run.w) > least


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_nobody_spends_more_than_its_own_budget(adjacency):
    epsilons = np.resize([0.3, 1.0, 2.5], 200)
    clients = simulated(
        personal(epsilons, 1e-7, ft.Adjacency(adjacency)), clip_norm=np.resize([0.2, 2.0], 200)
    )
    ft.run(federated_descent(clients, PROBLEM))
    shift = 2 if adjacency == "replace-one" else 1
    for user in range(6):
        mu = shift * math.sqrt(clients.done[user]) / clients.terms(user).mechanism.noise_multiplier
        assert ft.Budget(epsilons[user], 1e-7).mu * (1 - 1e-6) < mu <= ft.Budget(epsilons[user], 1e-7).mu


def test_distributed_noise_is_sized_for_its_survivors_and_the_smallest_budget():
    clients = simulated(personal(np.resize([0.3, 1.0], 200), 1e-7))
    next(federated_descent(clients, PROBLEM, trust="distributed", survivors=100))
    term = clients.terms(0)
    whole = term.variance * 100  # of a hundred shares
    assert math.sqrt(whole) / term.bound.clip == pytest.approx(10 / ft.Budget(0.3, 1e-7).mu)
    assert clients.left[0] == ROUNDS - 1 < clients.left[1]


def test_classes():
    labels = (3 * X[:, 0]).astype(int)
    clients = Simulated.split(X, labels, records=100, budgets=ft.Budget(2.0, 1e-6), stream=SeededStream(0))
    problem = Problem(multinomial, 20_000, 4, outputs=3, unit=False)
    u, constant = ft.run(federated_descent(clients, problem)).w
    assert np.mean(np.argmax(X @ u + constant, axis=1) == labels) > 0.6


@pytest.mark.parametrize("option", [{"trust": "blind"}, {"trust": "distributed", "survivors": 0}])
def test_nonsense_is_refused(option):
    with pytest.raises(InvalidValue, match=list(option)[-1]):
        next(federated_descent(simulated(ft.Budget(1.0, 1e-6)), PROBLEM, **option))


def test_much_noise_lengthens_the_constant():
    noisy, quiet = simulated(ft.Budget(0.05, 1e-8)), simulated(ft.Budget(5.0, 1e-8))
    spread = 1 / (100 * math.sqrt(200) * ft.Budget(0.05, 1e-8).mu)  # 200 clients of 100 records
    assert learnt_in(noisy, PROBLEM).intercept == pytest.approx(math.sqrt(spread / CONSTANT), rel=1e-6)
    assert learnt_in(noisy, PROBLEM).intercept > 2
    assert learnt_in(quiet, PROBLEM).intercept == 1
    assert learnt_in(noisy, PROBLEM, trust="distributed").intercept == 1
    ft.run(federated_descent(noisy, PROBLEM))
    assert learnt_in(noisy, PROBLEM).intercept > 2  # the same afterwards


@pytest.mark.parametrize("trust", ["local", "distributed"])
def test_probabilities_are_those_of_the_records(trust):
    """By tenths of what is said, what comes true; the weights alone are far too sure of themselves."""
    chance = expit(X @ [2.0, -2.0, 1.0, -1.0])
    y = 1.0 * (np.random.default_rng(9).uniform(size=len(X)) < chance)
    clients = Simulated.split(X, y, records=100, budgets=ft.Budget(4.0, 1e-8), stream=SeededStream(2))
    w = ft.run(federated_descent(clients, PROBLEM, trust=trust)).w
    features, clip = learnt_in(clients, PROBLEM, trust=trust), clients.terms(0).bound.clip
    said = PROBLEM.probabilities(w, X, clip_norm=clip, features=features)
    plain = expit(X @ w[0] + w[1])
    assert np.mean(np.abs(said - chance)) < 0.5 * np.mean(np.abs(plain - chance))
    assert abs(np.mean(said) - np.mean(y)) < 0.03


@pytest.mark.parametrize("trust", ["local", "distributed", "trusted"])
def test_whole_users(trust):
    clients = simulated(ft.Budget(30.0, 1e-6, unit="user"))
    run = ft.run(federated_descent(clients, PROBLEM, trust=trust))
    assert run.steps == ROUNDS
    shares = 200 if trust == "distributed" else 1
    deviation = math.sqrt(clients.terms(0).variance * shares)
    mu = 100 * clients.terms(0).bound.clip * math.sqrt(ROUNDS) / deviation
    assert 0.999 * ft.Budget(30.0, 1e-6).mu < mu <= ft.Budget(30.0, 1e-6).mu
    assert clients.guarantee(3).unit == "user"
