"""The default for a crowd, under each kind of trust."""

import math

import numpy as np
import pytest

import farthing as ft
from farthing.algorithms.problem import Problem
from farthing.algorithms.together import ROUNDS, together
from farthing.crowd.people import personal
from farthing.crowd.simulated import Simulated
from farthing.errors import InvalidValue
from farthing.losses import logistic, multinomial
from farthing.noise import SeededStream

RNG = np.random.default_rng(4)
X = RNG.uniform(size=(20_000, 4))
Y = 1.0 * (X @ [3.0, -3.0, 1.0, -1.0] + 0.3 * RNG.normal(size=20_000) > 0)
PROBLEM = Problem(logistic, 20_000, 4, unit=False)


def crowd(budgets, seed=0, **options):
    return Simulated.split(X, Y, records=100, budgets=budgets, stream=SeededStream(seed), **options)


def accuracy(w):
    return np.mean((X @ w[0] + w[1] > 0) == (Y > 0.5))


@pytest.mark.parametrize(
    ("trust", "epsilon", "least"),
    [("local", 1.0, 0.8), ("distributed", 0.1, 0.85), ("trusted", 0.1, 0.85), ("distributed", 1.0, 0.88)],
)
def test_every_kind_of_trust_learns_and_spends_all_it_has(trust, epsilon, least):
    users = crowd(ft.Budget(epsilon, 1e-8))
    run = ft.run(together(users, PROBLEM, trust=trust))
    assert run.steps == ROUNDS
    assert users.alive == 0
    assert accuracy(run.w) > least


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_nobody_spends_more_than_its_own_budget(adjacency):
    epsilons = np.resize([0.3, 1.0, 2.5], 200)
    users = crowd(personal(epsilons, 1e-7, ft.Adjacency(adjacency)), clip=np.resize([0.2, 2.0], 200))
    ft.run(together(users, PROBLEM))
    shift = 2 if adjacency == "replace-one" else 1
    for user in range(6):
        mu = shift * math.sqrt(users.done[user]) / users.terms(user).mechanism.noise
        assert ft.Budget(epsilons[user], 1e-7).mu * (1 - 1e-6) < mu <= ft.Budget(epsilons[user], 1e-7).mu


def test_distributed_noise_is_sized_for_its_survivors_and_the_smallest_budget():
    users = crowd(personal(np.resize([0.3, 1.0], 200), 1e-7))
    next(together(users, PROBLEM, trust="distributed", survivors=100))
    term = users.terms(0)
    whole = term.variance * 100  # of a hundred shares
    assert math.sqrt(whole) / term.bound.clip == pytest.approx(10 / ft.Budget(0.3, 1e-7).mu)
    assert users.left[0] == ROUNDS - 1 < users.left[1]


def test_classes():
    labels = (3 * X[:, 0]).astype(int)
    users = Simulated.split(X, labels, records=100, budgets=ft.Budget(2.0, 1e-6), stream=SeededStream(0))
    problem = Problem(multinomial, 20_000, 4, outputs=3, unit=False)
    u, constant = ft.run(together(users, problem)).w
    assert np.mean(np.argmax(X @ u + constant, axis=1) == labels) > 0.6


@pytest.mark.parametrize("option", [{"trust": "blind"}, {"trust": "distributed", "survivors": 0}])
def test_nonsense_is_refused(option):
    with pytest.raises(InvalidValue, match=list(option)[-1]):
        next(together(crowd(ft.Budget(1.0, 1e-6)), PROBLEM, **option))
