"""The most frequent class, and the fit without privacy, against scikit-learn and closed forms."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from sklearn.linear_model import LogisticRegression, Ridge

import farthing as ft
from farthing.accounting.filters import BasicFilter, GdpFilter, RdpFilter, ZcdpFilter
from farthing.data.tables import Table
from farthing.errors import BudgetSpent, InvalidValue
from farthing.linear.losses import huber_hinge, logistic, multinomial, squared
from farthing.linear.methods.baselines import Counts, majority, nonprivate
from farthing.linear.problem import Problem
from farthing.noise.lattice import SeededStream
from farthing.queries.events import BoundedRangeEvent


def rows(n=500, d=4):
    return (np.arange(n * d).reshape(n, d) * 0.6180339887) % 1.0


@pytest.mark.parametrize("adjacency", list(ft.Adjacency))
@pytest.mark.parametrize("rule", [BasicFilter, ZcdpFilter, GdpFilter, RdpFilter])
def test_majority_spends_all_of_any_budget_once(adjacency, rule):
    ledger = ft.Ledger(ft.Budget(0.3, 1e-6, adjacency), filter=rule).over(Table(rows(), np.ones(500)))
    run = ft.run(majority(ledger, Problem(logistic, 500, 4)))
    (receipt,) = run.receipts
    assert isinstance(receipt.event, BoundedRangeEvent)
    assert 0.999 < ledger.share <= 1


def test_a_spent_budget_has_no_choice_left():
    ledger = ft.Ledger(ft.Budget(0.3, 1e-6), filter=BasicFilter).over(Table(rows(), np.ones(500)))
    ledger.allot(0.3, 0.0)
    with pytest.raises(BudgetSpent):
        ft.run(majority(ledger, Problem(logistic, 500, 4)))


def test_pure_privacy_charges_epsilon_itself():
    ledger = ft.Ledger(ft.Budget(0.3, 0.0, "replace-one")).over(Table(rows(), np.ones(500)))
    (receipt,) = ft.run(majority(ledger, Problem(logistic, 500, 4))).receipts
    assert receipt.event.epsilon == pytest.approx(0.3, rel=1e-5)


@pytest.mark.parametrize("frequent", [0, 1, 2])
def test_it_predicts_the_most_frequent_class(frequent):
    y = np.where(np.arange(500) % 4, frequent, np.arange(500) % 3)
    door = ft.Ledger(ft.Budget(5.0, 1e-6), stream=SeededStream(0)).over(Table(rows(), y))
    u, constant = ft.run(majority(door, Problem(multinomial, 500, 4, outputs=3))).w
    assert u.shape == (4, 3)
    assert not u.any()
    assert np.argmax(constant) == frequent
    if frequent < 2:
        door = ft.Ledger(ft.Budget(5.0, 1e-6), stream=SeededStream(0)).over(Table(rows(), y))
        u, constant = ft.run(majority(door, Problem(logistic, 500, 4))).w
        assert u.shape == (4,)
        assert np.sign(constant) == 2 * frequent - 1


def test_the_choice_is_the_exponential_mechanism():
    """Counts 3 and 1 at ε = ln 3, one record coming or going: odds e^(2 ε / 1) = 9 to 1."""
    records, wins = Table(rows(4), np.array([1.0, 1.0, 1.0, 0.0])), 0
    stream = SeededStream(7)
    for _ in range(600):
        ledger = ft.Ledger(ft.Budget(math.log(3), 0.0), stream=stream).over(records)
        wins += ft.run(majority(ledger, Problem(logistic, 4, 4))).w[1] > 0
    assert abs(wins / 600 - 0.9) < 4.5 * math.sqrt(0.9 * 0.1 / 600)


@settings(max_examples=50, deadline=None)
@given(y=st.lists(st.sampled_from([0.0, 1.0, 2.0, 7.0, math.nan, math.inf]), min_size=1, max_size=20))
def test_a_record_moves_one_count_by_one_at_most(y):
    def counts(labels):
        return Counts(3).bounded_sum(
            Table(np.ones((len(labels), 1)), np.array(labels)), None, ft.ClipValue(0, 1)
        )

    moved = counts(y) - counts(y[1:])
    assert moved.min() >= 0
    assert moved.sum() <= 1
    assert (counts(y) == [y.count(c) for c in range(3)]).all()


@pytest.mark.parametrize("form", [np.asarray, sparse.csr_array])
def test_logistic_is_scikit_learns(form):
    x = rows()
    y = (x[:, 0] + 0.3 * x[:, 1] > 0.5 + 0.2 * x[:, 2]).astype(float)
    step = nonprivate(Table(form(x), y), Problem(logistic, 500, 4, unit=False), penalty=0.5, tolerance=1e-8)
    model = LogisticRegression(C=2.0, tol=1e-8, max_iter=1000).fit(x, y)
    assert step.w[0] == pytest.approx(model.coef_[0], rel=1e-4)
    assert step.w[1] == pytest.approx(model.intercept_[0], rel=1e-4)
    assert step.receipts == ()


def test_softmax_is_scikit_learns():
    x = rows()
    y = np.argmax(x[:, :3], axis=1)
    step = nonprivate(Table(x, y), Problem(multinomial, 500, 4, outputs=3), tolerance=1e-8)
    model = LogisticRegression(C=1.0, tol=1e-8, max_iter=1000).fit(x, y)
    assert step.w[0] == pytest.approx(model.coef_.T, abs=1e-3)


def test_squared_is_ridge():
    x = rows()
    y = x @ np.array([1.0, -2.0, 0.5, 0.0]) + 0.3
    step = nonprivate(Table(x, y), Problem(squared, 500, 4), penalty=2.0, tolerance=1e-9)
    model = Ridge(alpha=2.0).fit(x, y)
    assert step.w[0] == pytest.approx(model.coef_, abs=1e-5)
    assert step.w[1] == pytest.approx(model.intercept_, abs=1e-5)


def test_huber_hinge_is_stationary_and_separates():
    x = rows()
    y = (x[:, 0] > x[:, 1]).astype(float)
    u, constant = nonprivate(Table(x, y), Problem(huber_hinge, 500, 4), penalty=0.1, tolerance=1e-8).w
    residual = huber_hinge.residual(x @ u + constant, y)
    assert x.T @ residual + 0.1 * u == pytest.approx(np.zeros(4), abs=1e-4)
    assert np.mean((x @ u + constant > 0) == y) > 0.97


def test_without_an_intercept_there_is_no_constant():
    x = rows()
    step = nonprivate(Table(x, x[:, 0]), Problem(squared, 500, 4, intercept=False))
    assert step.w[1] == 0.0


def test_what_cannot_be_fitted_is_refused():
    with pytest.raises(InvalidValue, match="targets"):
        nonprivate(Table(rows()), Problem(logistic, 500, 4))
    with pytest.raises(InvalidValue, match="penalty"):
        nonprivate(Table(rows(), np.ones(500)), Problem(logistic, 500, 4), penalty=-1)
