"""Sufficient statistics. Laws are in test_regression.py."""

import math

import numpy as np
import pytest

import farthing as ft
from farthing.data.tables import Features, Table
from farthing.linear.budget_schedule import gaussian_mu
from farthing.linear.losses import squared
from farthing.linear.methods.sufficient import Smallest, Statistics, adassp, sufficient
from farthing.linear.problem import Problem
from farthing.noise.lattice import SeededStream
from farthing.queries.events import GaussianEvent

RNG = np.random.default_rng(0)
X = RNG.uniform(size=(3000, 3))
Y = 0.2 + X @ [0.1, 0.2, 0.3]


def test_the_statistics_are_those_of_rows_and_targets():
    s = np.column_stack([2 * X - 1, np.ones(3000), 2 * Y - 1])
    total = Statistics(Features(3, 0.5, 2.0), 0.5, 2.0).bounded_sum(Table(X, Y), None, ft.ClipOuter(3.0))
    np.testing.assert_allclose(total, s.T @ s)


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_one_answer_for_everything(adjacency):
    """Under replace-one the matrix moves √2 times as far, and the event counts a distance of 2."""
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6, adjacency))
    (step,) = sufficient(ledger.over(Table(X, Y)), Problem(squared, 3000, 3, unit=False))
    (receipt,) = step.receipts
    shift = 2.0 if adjacency == "replace-one" else 1.0
    assert isinstance(receipt.event, GaussianEvent)
    assert shift / receipt.event.noise == pytest.approx(ledger.budget.mu, rel=1e-6)


def test_eigenvalues_are_floored_so_that_weights_stay_small():
    sizes = []
    for seed in range(10):
        ledger = ft.Ledger(ft.Budget(0.05, 1e-6), stream=SeededStream(seed))
        u, constant = ft.run(sufficient(ledger.over(Table(X, Y)), Problem(squared, 3000, 3, unit=False))).w
        sizes.append(math.hypot(*u, constant))
    assert max(sizes) < 20


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_three_answers_of_a_third_each(adjacency):
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6, adjacency))
    mu, shift = gaussian_mu(ledger), 2.0 if adjacency == "replace-one" else 1.0
    (step,) = adassp(ledger.over(Table(X, Y)), Problem(squared, 3000, 3, unit=False))
    found = [(shift / receipt.event.noise / mu) ** 2 for receipt in step.receipts]
    np.testing.assert_allclose(found, 1 / 3, rtol=1e-6)


def test_the_smallest_eigenvalue_moves_by_no_more_than_a_row():
    features, bound = Features(3, 0.5, 2.0), ft.ClipValue(0.0, 4.0)

    def smallest(rows):
        return float(Smallest(features).bounded_sum(Table(rows), None, bound)[0])

    for _ in range(200):
        rows = RNG.uniform(size=(RNG.integers(3, 9), 3))
        one, other = RNG.choice([0.0, 1.0, 7.0], size=(2, 1, 3))
        base, first, second = smallest(rows), *(smallest(np.vstack([rows, row])) for row in (one, other))
        assert base - 1e-9 <= first <= base + 4 + 1e-9
        assert abs(first - second) <= bound.sensitivity(ft.Adjacency.REPLACE_ONE) + 1e-9
    z = np.column_stack([2 * X - 1, np.ones(3000)])
    assert smallest(X) == pytest.approx(np.linalg.eigvalsh(z.T @ z)[0])


@pytest.mark.parametrize(("unit", "square"), [(False, 4.0), (True, 2.0)])
def test_rows_are_as_long_as_the_public_bounds_allow(unit, square):
    asked = []

    class Spy:
        def __init__(self, ledger):
            self.ledger, self.budget, self.affords = ledger, ledger.budget, ledger.affords
            self.share, self.filter = ledger.share, ledger.filter

        def ask(self, query, w=None):
            asked.append(query.bound)
            return self.ledger.ask(query, w)

    door = Spy(ft.Ledger(ft.Budget(1.0, 1e-6)).over(Table(X, Y, unit=unit)))
    list(adassp(door, Problem(squared, 3000, 3, unit=unit)))
    smallest, moments, slope = asked
    assert (smallest.low, smallest.high) == pytest.approx((0.0, square))
    assert moments.clip == pytest.approx(math.sqrt(square))
    assert slope.clip == pytest.approx(math.sqrt(square) / 2)


def test_the_penalty_shrinks_where_the_noise_would_explode():
    """Two features that are nearly one: without a penalty, noise would be divided by almost nothing."""
    twins = np.column_stack([X[:, 0], X[:, 0]])
    sizes = []
    for seed in range(5):
        ledger = ft.Ledger(ft.Budget(0.1, 1e-6), stream=SeededStream(seed))
        u, _ = ft.run(adassp(ledger.over(Table(twins, Y)), Problem(squared, 3000, 2, unit=False))).w
        sizes.append(np.abs(u).max())
    assert max(sizes) < 1


def test_a_safer_penalty_is_a_larger_one():
    models = {}
    for failure in (0.001, 0.9):
        ledger = ft.Ledger(ft.Budget(0.2, 1e-6), stream=SeededStream(0))
        steps = adassp(ledger.over(Table(X, Y)), Problem(squared, 3000, 3, unit=False), failure=failure)
        models[failure] = ft.run(steps).w[0]
    assert math.hypot(*models[0.001]) < math.hypot(*models[0.9])
