"""Class means in one answer: what a record may move, and that small tables are better than their majority."""

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer

import farthing as ft
from farthing.data.tables import Features, Table
from farthing.linear.budget_schedule import BudgetSchedule
from farthing.linear.losses import logistic
from farthing.linear.methods.centroids import LEAD, MEAN, SIGN, ClassSums, Projected, class_means
from farthing.linear.problem import Problem
from farthing.noise.lattice import SeededStream

RNG = np.random.default_rng(0)
X = RNG.uniform(size=(100, 4))
Y = RNG.integers(2, size=100).astype(float)
SUMS = ClassSums(Features(4, 0.5, intercept=0.0, radius=0.6))
TOWARDS = np.array([3.0, -2.0, 1.0, 4.0])
PROJECTED = Projected(SUMS.features, TOWARDS, 0.1)


def test_the_sums_are_those_of_a_plain_loop_and_rows_without_a_class_count_as_nothing():
    y = Y.copy()
    y[[3, 8]] = 7.0, np.nan
    t = X - 0.5
    t *= np.minimum(1, 0.6 / np.linalg.norm(t, axis=1))[:, None]
    sign = np.where(np.isin(y, (0, 1)), 2 * y - 1, 0)
    t[sign == 0] = 0.0
    expected = np.concatenate([MEAN * t.sum(axis=0), sign @ t, [LEAD * 0.6 * np.nansum(sign)]])
    found = SUMS.bounded_sum(Table(X, y), None, ft.ClipNorm(2.0))
    np.testing.assert_allclose(found, expected, atol=1e-9)
    p = np.where(sign == 0, 0.0, np.clip(t @ TOWARDS + 0.1, -1, 1))
    found = PROJECTED.bounded_sum(Table(X, y), None, ft.ClipNorm(2.0))
    np.testing.assert_allclose(found, [p.sum(), SIGN * sign.sum()], atol=1e-9)


def test_a_record_moves_them_by_the_bound_at_most_and_by_a_smaller_one_too():
    for sums, norm in ((SUMS, SUMS.norm), (PROJECTED, np.hypot(1, SIGN))):
        for clip in (norm, 10.0, 0.2):  # the norm is a bound of the terms, whatever the clip
            each = [
                sums.bounded_sum(Table(X[k : k + 1], Y[k : k + 1]), None, ft.ClipNorm(clip))
                for k in range(100)
            ]
            assert max(np.linalg.norm(term) for term in each) <= min(clip, norm) * (1 + 1e-9)


@pytest.mark.parametrize("adjacency", list(ft.Adjacency))
def test_the_whole_budget_goes_into_two_answers(adjacency):
    ledger = ft.Ledger(ft.Budget(0.1, 1e-6, adjacency))
    u, _ = class_means(BudgetSchedule(ledger.over(Table(X, Y)), 100), Problem(logistic, 100, 4, unit=False))
    assert u.shape == (4,)
    assert ledger.share == pytest.approx(1.0, abs=1e-6)
    assert ledger.share <= 1.0


def test_a_small_table_is_told_apart_better_than_by_its_majority():
    """The mean over 40 seeded fits."""
    rows, y = load_breast_cancer(return_X_y=True)
    rows = (rows - rows.min(axis=0)) / np.ptp(rows, axis=0)
    fits = [ft.LogisticRegression(0.1, 1e-5, bounds=(0, 1), random_state=k).fit(rows, y) for k in range(40)]
    assert all(model.n_iter_ == 1 for model in fits)
    assert np.mean([model.score(rows, y) for model in fits]) > y.mean() + 0.02


def test_exact_means_are_found_where_the_budget_is_large():
    y = (X[:, 0] > 0.5) * 1.0
    ledger = ft.Ledger(ft.Budget(1e4, 1e-3), stream=SeededStream(1))
    u, constant = class_means(
        BudgetSchedule(ledger.over(Table(X, y)), 100), Problem(logistic, 100, 4, unit=False)
    )
    assert np.mean((X @ u + constant > 0) == y) > 0.9
