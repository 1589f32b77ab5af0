"""Sufficient statistics. Laws are in test_regression.py."""

import math

import numpy as np
import pytest

import farthing as ft
from farthing.data.tables import Features, Table
from farthing.linear.losses import squared
from farthing.linear.methods.sufficient import Statistics, sufficient
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
