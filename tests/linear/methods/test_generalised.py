"""Regression by other losses: what is charged, what is refused, and what weights come out."""

import numpy as np
import pytest

import farthing as ft
from farthing.data.tables import Table
from farthing.errors import Unsupported
from farthing.linear.losses import Huber, LogLinear, Pinball, logistic
from farthing.linear.methods.generalised import generalised
from farthing.linear.problem import Problem

X = np.random.default_rng(0).uniform(-1, 1, size=(2000, 3))
LOSSES = [Huber(0.1), Pinball(0.5), Pinball(0.95), LogLinear()]


@pytest.mark.parametrize("loss", LOSSES, ids=str)
@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_it_spends_its_budget_and_not_more(loss, unit, intercept, adjacency):
    ledger = ft.Ledger(ft.Budget(0.5, 1e-6, adjacency))
    problem = Problem(loss, 2000, 3, unit=unit, intercept=intercept)
    u, constant = ft.run(generalised(ledger.over(Table(X, np.abs(X[:, 0]), unit=unit)), problem)).w
    assert ledger.share == pytest.approx(1, abs=1e-6)
    assert ledger.share <= 1
    assert u.shape == (3,)
    assert np.isfinite([*u, constant]).all()


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_targets_that_are_no_numbers_count_as_nothing(loss):
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6)).over(Table(X, np.full(2000, np.nan)))
    u, constant = ft.run(generalised(ledger, Problem(loss, 2000, 3, unit=False))).w
    assert np.isfinite([*u, constant]).all()


def test_other_losses_are_refused_before_anything_is_charged():
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6))
    with pytest.raises(Unsupported, match="no loss of numbers"):
        ft.run(generalised(ledger.over(Table(X, X[:, 0])), Problem(logistic, 2000, 3)))
    assert ledger.share == 0
