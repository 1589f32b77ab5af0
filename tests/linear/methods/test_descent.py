"""The default for classification: what it charges, what its sums may move by, and that it learns."""

import itertools
import math

import numpy as np
import pytest

import farthing as ft
from farthing.accounting.filters import RdpFilter, ZcdpFilter
from farthing.data.tables import Features, Table
from farthing.errors import BudgetSpent, Unsupported
from farthing.linear.losses import (
    Huber,
    LinearGradient,
    LogLinear,
    Pinball,
    huber_hinge,
    logistic,
    multinomial,
    one_against_rest,
)
from farthing.linear.methods import descent as module
from farthing.linear.methods.descent import (
    FACTORS,
    LENGTH,
    LONGEST,
    MARGIN,
    MEAN_WEIGHT,
    SHARES,
    STEPS,
    Norms,
    Spread,
    Stretch,
    descent,
    generalised,
)
from farthing.linear.problem import Problem
from farthing.noise import native
from farthing.noise.lattice import SeededStream

RNG = np.random.default_rng(0)
X = RNG.uniform(size=(6000, 4)) * np.array([1.0, 1.0, 0.2, 0.0])
Y = (X @ np.array([3.0, -3.0, 5.0, 0.0]) + 0.2 * RNG.logistic(size=6000) > 0.5).astype(float)
BUDGET = ft.Budget(1.0, 1e-6)


def fitted(table, loss=logistic, budget=BUDGET, rule=None, **public):
    ledger = ft.Ledger(budget, filter=rule, stream=SeededStream(1))
    problem = Problem(loss, len(table), table.X.shape[1], **{"unit": False, **public})
    return ledger, list(descent(ledger.over(table), problem))


@pytest.mark.parametrize("adjacency", list(ft.Adjacency))
@pytest.mark.parametrize("unit", [False, True])
def test_the_budget_is_spent_to_the_end_and_divided_as_said(adjacency, unit):
    budget = ft.Budget(1.0, 1e-6, adjacency)
    ledger, steps = fitted(Table(X, Y, unit=unit), budget=budget, unit=unit)
    assert ledger.share == pytest.approx(1.0, abs=1e-6)
    assert ledger.share <= 1.0
    receipts = [receipt for step in steps for receipt in step.receipts]
    rule = ledger.filter
    parts = [rule.cost(receipt.event)[0] / rule.mu**2 for receipt in receipts]
    first = [] if unit else [SHARES[0]]
    taken = len(steps) - 1
    gradients = (SHARES[2] + (SHARES[0] if unit else 0.0) - LENGTH) / taken
    lengths = [LENGTH / len(FACTORS)] * len(FACTORS)
    np.testing.assert_allclose(parts, [*first, SHARES[1], *[gradients] * taken, *lengths], rtol=1e-6)


@pytest.mark.parametrize("rule", [ZcdpFilter, RdpFilter])
def test_any_filter_that_prices_gaussians_will_do(rule):
    ledger, steps = fitted(Table(X, Y), rule=rule)
    assert STEPS < len(steps) <= LONGEST * STEPS + 1
    assert 0.999 < ledger.share <= 1.0


def test_no_delta_no_gaussians():
    with pytest.raises((Unsupported, BudgetSpent, ValueError)):
        fitted(Table(X, Y), budget=ft.Budget(1.0, 0.0))


@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("loss", [logistic, huber_hinge])
def test_it_learns(loss, intercept, unit):
    _, steps = fitted(Table(X, Y, unit=unit), loss, unit=unit, intercept=intercept)
    u, constant = steps[-1].w
    rows = X / np.linalg.norm(X, axis=1, keepdims=True) if unit else X
    assert np.mean((rows @ u + constant > 0) == Y) > (0.85 if intercept else 0.7)
    assert intercept or constant == 0


@pytest.mark.parametrize("loss", [multinomial, one_against_rest])
def test_it_learns_several_classes(loss):
    classes = (X[:, :3] * [1, 1, 5]).argmax(axis=1).astype(float)
    _, steps = fitted(Table(X, classes), loss, outputs=3, budget=ft.Budget(5.0, 1e-6))
    u, constant = steps[-1].w
    assert u.shape == (4, 3)
    assert np.mean((X @ u + constant).argmax(axis=1) == classes) > 0.85


def test_a_large_budget_comes_near_the_fit_without_privacy():
    from sklearn.linear_model import LogisticRegression

    plain = LogisticRegression(C=1e4, max_iter=1000).fit(X, Y)
    _, steps = fitted(Table(X, Y), budget=ft.Budget(1e4, 1e-3))
    u, constant = steps[-1].w
    agree = np.mean((X @ u + constant > 0) == plain.predict(X))
    assert agree > 0.98


def test_a_large_budget_finds_directions_of_little_variance_among_many_classes():
    from sklearn.linear_model import LogisticRegression

    rng = np.random.default_rng(3)
    centres, y = 1.3 * rng.normal(size=(12, 8)), rng.integers(12, size=6000)
    rows = (centres[y] + rng.normal(size=(6000, 8))) @ (rng.normal(size=(8, 8)) * np.geomspace(1, 0.05, 8))
    rows = (rows - rows.min(0)) / np.ptp(rows, axis=0)
    plain = LogisticRegression(C=1e4, max_iter=2000).fit(rows, y)
    _, steps = fitted(Table(rows, y.astype(float)), multinomial, outputs=12, budget=ft.Budget(1e5, 1e-3))
    u, constant = steps[-1].w
    right = np.mean((rows @ u + constant).argmax(axis=1) == y)
    assert right > plain.score(rows, y) - 0.01


@pytest.mark.parametrize("epsilon", [0.1, 1.0])
def test_probabilities_are_neither_too_sure_nor_too_cautious(epsilon):
    """No other length of the weights has a clearly smaller loss."""
    rng = np.random.default_rng(4)
    rows = rng.uniform(size=(30_000, 6))
    y = (rng.uniform(size=30_000) < 1 / (1 + np.exp(-3 * (rows @ np.array([3.0, -3, 2, -2, 1, -1]))))) * 1.0
    _, steps = fitted(Table(rows, y), budget=ft.Budget(epsilon, 1e-6))
    u, constant = steps[-1].w
    margins = rows @ u + constant
    losses = [logistic.value(factor * margins, y).mean() for factor in (0.5, 0.7, 1.0, 1.4, 2.0)]
    assert losses[2] < 1.02 * min(losses)


@pytest.mark.parametrize("loss", [logistic, multinomial])
def test_one_record_moves_the_derivative_in_the_length_by_its_bound_at_most(loss):
    rows = RNG.standard_t(1, size=(100, 3))
    y = RNG.integers(2 if loss is logistic else 4, size=100).astype(float)
    w = 9 * RNG.normal(size=4 if loss is logistic else (4, 4))
    stretch = Stretch(LinearGradient(loss, Features(3)))
    terms = [stretch.bounded_sum(Table(rows[k : k + 1], y[k : k + 1]), w, MARGIN)[0] for k in range(100)]
    assert np.abs(terms).max() == 4.0
    assert stretch.bounded_sum(Table(rows, y), w, MARGIN)[0] == pytest.approx(sum(terms), abs=1e-9)


def test_the_derivative_in_the_length_is_that_of_the_loss():
    rows, y, w = X[:50], Y[:50], np.array([1.0, -1.0, 2.0, 0.5, 0.3])
    features = Features(4)
    u, constant = features.unfold(w)
    up, down = (logistic.value(f * (rows @ u + constant), y).sum() for f in (1 + 1e-6, 1 - 1e-6))
    found = Stretch(LinearGradient(logistic, features)).bounded_sum(Table(rows, y), w, MARGIN)[0]
    assert found == pytest.approx((up - down) / 2e-6, rel=1e-5)


def test_wide_tables_skip_the_matrix(monkeypatch):
    monkeypatch.setattr(module, "MOST_GRAM", 3)
    ledger, steps = fitted(Table(X, Y))
    assert ledger.share == pytest.approx(1.0, abs=1e-6)
    u, constant = steps[-1].w
    assert np.mean((X @ u + constant > 0) == Y) > 0.85


def test_the_answer_is_the_mean_of_the_later_half():
    """Step by step, weights handed out change ever less: each is a mean of one more iterate."""
    _, steps = fitted(Table(X, Y))
    moves = [np.linalg.norm(b.w[0] - a.w[0]) for a, b in itertools.pairwise(steps)]
    assert np.mean(moves[-5:]) < 0.5 * np.mean(moves[:5])


@pytest.mark.parametrize("gram", [True, False])
def test_one_record_moves_the_moments_by_their_bound_at_most(gram):
    rows = RNG.standard_t(1, size=(200, 3))
    features = Features(3, scale=1 / 0.7, intercept=0.0, radius=1.0)
    bound = ft.ClipNorm(math.hypot(1.0, MEAN_WEIGHT))
    whole = Spread(features, gram).bounded_sum(Table(rows), None, bound)
    moved = [
        np.linalg.norm(whole - Spread(features, gram).bounded_sum(Table(np.delete(rows, k, 0)), None, bound))
        for k in range(200)
    ]
    assert max(moved) <= bound.clip * (1 + 1e-9)
    if gram:
        assert max(moved) > 0.999 * bound.clip  # a long row attains it
        np.testing.assert_array_equal(whole, whole.T)
    smaller = Spread(features, gram).bounded_sum(Table(rows[:1]), None, ft.ClipNorm(0.1))
    assert np.linalg.norm(smaller) <= 0.1 * (1 + 1e-9)


@pytest.mark.parametrize("native", [True, False])
def test_a_blank_row_adds_nothing_to_norms(native, monkeypatch):
    if not native:
        monkeypatch.setattr("farthing.noise.native.kernels", lambda work=0: None)
    grid, rows = 2.0 ** -np.arange(6.0), RNG.uniform(size=(400, 40))
    asked = Norms(40, grid)
    without = asked.bounded_sum(Table(np.delete(rows, 3, 0)), None, ft.ClipNorm(1.0))
    for odd in (np.nan, np.inf, 1e300):
        rows[3] = odd
        blank = asked.bounded_sum(Table(rows), None, ft.ClipNorm(1.0))
        np.testing.assert_allclose(blank, without, atol=1e-9)


def test_norms_count_every_row_once():
    grid = 2.0 ** -np.arange(6.0)
    rows = np.array([[0.0], [5.0], [1.0], [0.71], [0.5], [0.26], [1e-9], [1e300]])
    counts = Norms(1, grid).bounded_sum(Table(rows), None, ft.ClipNorm(1.0))
    assert counts.sum() == pytest.approx(len(rows) - 1)  # 1e300 is blank: its square is infinite
    # 5, 1 and 0.71 lie above the middle of the first cell, 0.5 at an edge; 0 and 1e-9 below all
    np.testing.assert_allclose(counts[[0, -1]], [3.5, 2])
    assert not Norms(1, grid).bounded_sum(Table(np.empty((0, 1))), None, ft.ClipNorm(1.0)).any()


@pytest.mark.parametrize("quick", [True, False])
def test_last_bits_of_norms_move_no_record_from_one_cell_to_another(quick, monkeypatch):
    """Norms at an edge, computed by other code or beside other rows, were counted elsewhere."""
    d, rng = 64, np.random.default_rng(0)
    rows = rng.uniform(0.1, 1.0, size=(1000, d))
    rows *= (np.sqrt(d) * module.GRID[3] / np.linalg.norm(rows, axis=1))[:, None]
    norms, bound = Norms(d, np.sqrt(d) * module.GRID), ft.ClipNorm(1.0)
    whole = norms.bounded_sum(Table(rows), None, bound)
    if quick:  # as in a process that has not loaded them yet
        monkeypatch.setattr(native, "_loaded", None)
        monkeypatch.setattr(native, "_tried", True)
    for place in (0, 500, 999):
        part = norms.bounded_sum(Table(np.delete(rows, place, 0)), None, bound)
        assert np.linalg.norm(whole - part) <= 1 + 1e-9


@pytest.mark.parametrize("epsilon", [1e-6, 1e-3])
def test_tiny_budgets_stay_finite(epsilon):
    _, steps = fitted(Table(X[:50], Y[:50]), budget=ft.Budget(epsilon, 1e-9))
    assert all(np.isfinite(part).all() for step in steps for part in step.w)


WIDE = np.random.default_rng(0).uniform(-1, 1, size=(2000, 3))
LOSSES = [Huber(0.1), Pinball(0.5), Pinball(0.95), LogLinear()]


@pytest.mark.parametrize("loss", LOSSES, ids=str)
@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_it_spends_its_budget_and_not_more(loss, unit, intercept, adjacency):
    ledger = ft.Ledger(ft.Budget(0.5, 1e-6, adjacency))
    problem = Problem(loss, 2000, 3, unit=unit, intercept=intercept)
    u, constant = ft.run(generalised(ledger.over(Table(WIDE, np.abs(WIDE[:, 0]), unit=unit)), problem)).w
    assert ledger.share == pytest.approx(1, abs=1e-6)
    assert ledger.share <= 1
    assert u.shape == (3,)
    assert np.isfinite([*u, constant]).all()


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_targets_that_are_no_numbers_count_as_nothing(loss):
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6)).over(Table(WIDE, np.full(2000, np.nan)))
    u, constant = ft.run(generalised(ledger, Problem(loss, 2000, 3, unit=False))).w
    assert np.isfinite([*u, constant]).all()


def test_other_losses_are_refused_before_anything_is_charged():
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6))
    with pytest.raises(Unsupported, match="no loss of numbers"):
        ft.run(generalised(ledger.over(Table(WIDE, WIDE[:, 0])), Problem(logistic, 2000, 3)))
    assert ledger.share == 0
