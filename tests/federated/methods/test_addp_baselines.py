"""What A-DDP is compared with: rounds, noise and price of each baseline."""

import math

import numpy as np
import pytest

import farthing as ft
from farthing.accounting import composition, gaussian, pld
from farthing.data.tables import Table
from farthing.errors import InvalidValue, Unsupported
from farthing.federated.methods.addp import non_private, sgd_adv, sgd_maj, sgd_pass
from farthing.federated.simulated import Simulated
from farthing.linear.losses import logistic
from farthing.linear.problem import Problem
from farthing.noise.lattice import SeededStream
from farthing.queries.events import RepeatedEvent
from farthing.queries.samplers import Poisson

RNG = np.random.default_rng(2)
X = RNG.uniform(size=(1000, 2))
Y = 1.0 * (X[:, 0] > X[:, 1])
PROBLEM = Problem(logistic, 1000, 2, unit=False)


def simulated(adjacency="zero-out", epsilon=0.8):
    budget = ft.Budget(epsilon, 1e-8, adjacency)
    return Simulated.split(X, Y, records=50, budgets=budget, stream=SeededStream(0))


def test_each_divides_the_budget_as_it_says():
    clients = simulated()
    assert ft.run(sgd_maj(clients, PROBLEM, draw=Poisson(0.02))).steps == 10
    assert clients.terms(0).mechanism.noise_multiplier == gaussian.noise(0.08, 1e-9)

    clients = simulated()
    assert ft.run(sgd_adv(clients, PROBLEM, draw=Poisson(0.02))).steps == 10
    each, missed = composition.advanced_epsilon_iter(0.8, 1e-8, 10, 5e-9)
    noise = clients.terms(0).mechanism.noise_multiplier
    amplified, _ = composition.amplify_poisson(
        gaussian.epsilon(1 / noise, missed / 0.02), missed / 0.02, 0.02
    )
    assert amplified == pytest.approx(each, rel=1e-9)

    clients = simulated()
    assert ft.run(sgd_pass(clients, PROBLEM)).steps == 10 * 50
    assert clients.terms(0).mechanism.noise_multiplier == gaussian.noise(each, missed)
    assert clients.event(0).count == 10  # visits of a record


@pytest.mark.parametrize("method", [sgd_maj, sgd_adv, sgd_pass])
@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
def test_the_true_price_is_within_the_budget(method, adjacency):
    clients = simulated(adjacency)
    ft.run(method(clients, PROBLEM))
    event = clients.event(3)
    assert isinstance(event, RepeatedEvent)
    assert pld.epsilon(event, 1e-8, ft.Adjacency(adjacency)) <= 0.8
    assert clients.alive == 0


def test_turns_need_places():
    with pytest.raises(Unsupported, match="shifts all later turns"):
        next(sgd_pass(simulated("add-remove"), PROBLEM))


def test_without_privacy_it_fits():
    (*_, last) = non_private(Table(X, Y), PROBLEM, rounds=300, lr=3.0)
    assert last.t == 300
    assert np.mean((X @ last.w[0] + last.w[1] > 0) == (Y > 0.5)) > 0.97


def test_nonsense_is_refused():
    with pytest.raises(InvalidValue, match="lr"):
        next(non_private(Table(X, Y), PROBLEM, lr=math.inf))
    with pytest.raises(InvalidValue, match="rounds"):
        next(non_private(Table(X, Y), PROBLEM, rounds=0))
    with pytest.raises(InvalidValue, match="rounds"):
        next(sgd_maj(simulated(), PROBLEM, rounds=0))
