"""The default for regression: its parts, its map, and what it is worth. Laws are in test_regression.py."""

import math

import numpy as np
import pytest

import farthing as ft
from farthing.data.tables import Features, Table
from farthing.errors import BudgetSpent
from farthing.linear.budget_schedule import BudgetSchedule, gaussian_mu
from farthing.linear.losses import Gram, squared
from farthing.linear.methods import leastsquares
from farthing.linear.methods.leastsquares import RowMoments, RowScatter, Slope, Targets, least_squares
from farthing.linear.problem import Problem
from farthing.noise.lattice import SeededStream
from farthing.queries.events import GaussianEvent
from farthing.queries.mechanisms import SymmetricGaussian

RNG = np.random.default_rng(0)


def data(records, width, unlike=False):
    rng = np.random.default_rng(1)  # the same rows in whichever order tests run
    X = rng.uniform(size=(records, width)) ** (np.arange(width) + 1 if unlike else 1)
    y = 0.3 + X @ rng.normal(size=width) * 0.1 + 0.05 * rng.normal(size=records)
    return X, np.clip(y, 0, 1)


def parts(steps, ledger, mu):
    """The parts of μ² of every receipt, from the events alone."""
    shift = 2.0 if ledger.budget.adjacency == "replace-one" else 1.0
    events = [receipt.event for step in steps for receipt in step.receipts]
    assert all(isinstance(event, GaussianEvent) for event in events)
    return [(shift / event.noise / mu) ** 2 for event in events]


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one", "zero-out"])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize(("records", "moments"), [(30_000, True), (100, True), (15, False)])
def test_parts_are_those_of_the_plan(records, moments, intercept, adjacency):
    X, y = data(records, 3)
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6, adjacency))
    mu = gaussian_mu(ledger)
    problem = Problem(squared, records, 3, intercept=intercept, unit=False)
    found = parts(list(least_squares(ledger.over(Table(X, y)), problem)), ledger, mu)
    reach = records * mu / (2 if adjacency == "replace-one" else 1)
    target = min(max((17 / reach) ** 2, 0.01), 0.2)
    rest = 1 - target * (1 + intercept)
    expected = [target] * (1 + intercept) + [0.05 * rest] + [0.18 * rest] * moments
    steps = len(found) - len(expected)  # fewer where the moments are known well
    assert steps == 10 if records < 1000 else 3 <= steps < 10
    expected += [(0.77 if moments else 0.95) * rest / steps] * steps
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert sum(found) == pytest.approx(1)


def test_every_step_carries_its_receipts_and_weights():
    X, y = data(5000, 3)
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6))
    steps = list(least_squares(ledger.over(Table(X, y)), Problem(squared, 5000, 3, unit=False), steps=4))
    assert [step.t for step in steps] == [1, 2, 3, 4]
    assert [len(step.receipts) for step in steps] == [5, 1, 1, 1]
    assert all(step.w[0].shape == (3,) and np.shape(step.w[1]) == () for step in steps)
    assert ledger.share == pytest.approx(1)


@pytest.mark.parametrize("intercept", [0.0, 1.0, 0.3])
def test_whitening_whitens(intercept):
    """Raised moments become the identity, and eigenvalues of the moments themselves are those reported."""
    X = RNG.uniform(size=(500, 4)) @ RNG.normal(size=(4, 4))
    table = Table(X)
    features = Features(4, RNG.uniform(size=4), RNG.normal(size=(4, 4)), intercept)
    size, floor = features.size, 0.07
    plain = Features(4, intercept=0.0)

    def moments(features):
        return RowScatter(plain, features).bounded_sum(table, None, ft.ClipOuter(1e6)) / 500

    before = moments(features)
    white, curvature = leastsquares._whitened(features, before, floor)
    # z' = T z for some T; where z zᵀ is the identity, z' z'ᵀ is T Tᵀ
    rows = np.vstack([features.rows(X, np.ones(500)), np.zeros((0, size))])
    linear = np.linalg.lstsq(rows, white.rows(X, np.ones(500)), rcond=None)[0].T
    np.testing.assert_allclose(linear @ (before + floor * np.eye(size)) @ linear.T, np.eye(size), atol=1e-8)
    np.testing.assert_allclose(np.sort(np.linalg.eigvalsh(moments(white))), np.sort(curvature), atol=1e-8)


def test_negative_moments_count_as_none():
    features = Features(2, intercept=0.0)
    white, curvature = leastsquares._whitened(features, np.diag([4.0, -3.0]), 0.5)
    np.testing.assert_allclose(np.sort(curvature), [0.0, 4 / 4.5])
    np.testing.assert_allclose(white.scale.T @ white.scale, np.diag([1 / 4.5, 1 / 0.5]))


def test_sums_are_those_of_the_plain_formulas():
    X, y = data(300, 3)
    table, plain = Table(X, y), Features(3, intercept=0.0)
    features = Features(3, 0.4, RNG.normal(size=(3, 3)), 0.8)
    z = features.rows(X, np.ones(300))
    clip = float(np.median(np.linalg.norm(z, axis=1)))
    short = ft.ClipNorm(clip).apply(z)
    both = ft.ClipNorm(clip).apply(np.hstack([z, z**2]))
    np.testing.assert_allclose(
        RowMoments(plain, features).bounded_sum(table, None, ft.ClipNorm(clip)), both.sum(0)
    )
    np.testing.assert_allclose(
        RowScatter(plain, features).bounded_sum(table, None, ft.ClipOuter(clip)), short.T @ short
    )
    np.testing.assert_allclose(
        RowScatter(plain, features).bounded_sum(table, None, ft.ClipOuter(clip)),
        Gram(features).bounded_sum(table, None, ft.ClipOuter(clip)),
    )
    w = RNG.normal(size=4) * 0.1
    terms = (y - 0.2 - z @ w)[:, None] * z
    sizes = np.linalg.norm(terms, axis=1)
    slope = Slope(features, 0.2, float(np.median(sizes)), float(np.median(sizes)) / 3)
    expected = ft.ClipNorm(slope.clip).apply(terms).sum(axis=0)
    squares = np.minimum(sizes / (2 * slope.rms), 1) ** 2 - 0.5
    answer = slope.bounded_sum(table, w, slope.bound)
    np.testing.assert_allclose(answer, [*expected, squares.sum()])
    np.testing.assert_allclose(
        Targets(0.3, 2, 0.1).bounded_sum(table, None, ft.ClipValue(-0.1, 0.1)),
        [np.clip((y - 0.3) ** 2 - 0.1, -0.1, 0.1).sum()],
    )


def test_the_scale_costs_a_twentieth_of_a_step():
    slope = Slope(Features(3), 0.0, 5.0, 1.0)
    whole = slope.bound.norm()
    assert (slope.clip / whole) ** 2 == pytest.approx(0.95)
    assert (0.5 / slope.stretch / whole) ** 2 == pytest.approx(0.05)
    assert math.hypot(slope.clip, 0.5 / slope.stretch) == pytest.approx(whole)


def test_it_is_near_least_squares_on_features_of_unlike_scales():
    X, y = data(20_000, 6, unlike=True)
    ledger = ft.Ledger(ft.Budget(0.5, 1e-6), stream=SeededStream(0))
    u, constant = ft.run(least_squares(ledger.over(Table(X, y)), Problem(squared, 20_000, 6, unit=False))).w
    rows = np.column_stack([X, np.ones(len(X))])
    best = y - rows @ np.linalg.lstsq(rows, y, rcond=None)[0]
    assert np.var(y - X @ u - constant) < 1.02 * np.var(best) < 0.5 * np.var(y)


def test_unit_rows_are_learnt_from_as_well():
    X, y = data(20_000, 6)
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6), stream=SeededStream(0))
    problem = Problem(squared, 20_000, 6, unit=True)
    u, constant = ft.run(least_squares(ledger.over(Table(X, y, unit=True)), problem)).w
    rows = np.column_stack([X / np.linalg.norm(X, axis=1, keepdims=True), np.ones(len(X))])
    best = y - rows @ np.linalg.lstsq(rows, y, rcond=None)[0]
    assert np.var(y - rows[:, :-1] @ u - constant) < 1.05 * np.var(best) < 0.7 * np.var(y)


def test_with_next_to_no_budget_it_predicts_a_constant():
    X, y = data(20_000, 6)
    spreads = []
    for seed in range(5):
        ledger = ft.Ledger(ft.Budget(1e-4, 1e-6), stream=SeededStream(seed))
        problem = Problem(squared, 20_000, 6, unit=False)
        u, constant = ft.run(least_squares(ledger.over(Table(X, y)), problem)).w
        assert -0.5 < constant + X.mean(axis=0) @ u < 1.5
        spreads.append(float(np.std(X @ u)))
    assert np.median(spreads) < 2 * np.std(y)


def test_a_purse_adds_up():
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6, "replace-one"))
    schedule = BudgetSchedule(ledger.over(Table(np.zeros((10, 2)), np.zeros(10))), 10)
    bound = ft.ClipOuter(2.0)
    plain = Features(2, intercept=0.0)
    _, deviation = schedule.mean(0.5, RowScatter(plain, plain), bound, mechanism=SymmetricGaussian)
    assert deviation == pytest.approx(math.sqrt(2) * 4 / (schedule.mu * math.sqrt(0.5)) / 10)
    assert len(schedule.receipts()) == 1
    assert schedule.receipts() == ()
    assert ledger.share == pytest.approx(0.5)
    ledger.allot()
    with pytest.raises(BudgetSpent):
        BudgetSchedule(ledger, 10)


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("target", [RNG.uniform(size=999), np.arange(999) % 2, np.full(999, 0.9)])
def test_residuals_are_measured_from_the_mean_in_units_of_their_own(target, intercept):
    door = ft.Ledger(ft.Budget(1e8, 1e-6)).over(Table(np.zeros((999, 1)), np.asarray(target, dtype=float)))
    origin, square = leastsquares.target(BudgetSchedule(door, 999), 0.1, intercept)
    expected = (target.mean(), target.var()) if intercept else (0.0, np.square(target).mean())
    np.testing.assert_allclose((origin, square), expected, atol=1e-4)


@pytest.mark.parametrize(("curvature", "most"), [(1.0, 3), (0.9, 4), (0.7, 6), (0.3, 10), (-0.5, 10)])
def test_so_many_steps_are_taken_as_the_least_curvature_needs(curvature, most):
    curvatures = np.array([curvature, 1.0, 0.95])
    steps, averaged = leastsquares._counted(None, curvatures, 0.01)
    assert steps <= most
    assert averaged == (7 if steps == 10 else 2)
    assert leastsquares._counted(4, curvatures, 0.01) == (4, 3)
    if steps < 10:  # an exact descent on these curvatures is as near as promised, and one step less was not
        w = ahead = np.zeros(3)
        found, momentum = [], 1.0
        for _ in range(steps):
            after = (1 + np.sqrt(1 + 4 * momentum**2)) / 2
            new = ahead + curvatures * (1 - ahead)
            ahead, w, momentum = new + (momentum - 1) / after * (new - w), new, after
            found.append(w)
        assert np.abs(1 - np.mean(found[-2:], axis=0)).max() < 0.01
        assert np.abs(1 - np.mean(found[-3:-1], axis=0)).max() >= 0.01 or steps == 2


@pytest.mark.parametrize("native", [True, False])
def test_a_row_of_infinite_norm_counts_for_nothing_in_a_slope(native, monkeypatch):
    """With kernels or without, which one odd row elsewhere decides for all such rows."""
    if not native:
        monkeypatch.setattr("farthing.noise.native.kernels", lambda work=0: None)
    x, y = np.random.default_rng(5).uniform(size=(500, 40)), np.full(500, 0.4)
    features = Features(40, 0.5)
    slope, w = Slope(features, 0.2, 1.0, 0.3), np.full(41, 0.1)
    without = slope.bounded_sum(Table(x[9:], y[9:]), w, slope.bound)
    x[:9] = 1e200
    np.testing.assert_allclose(slope.bounded_sum(Table(x, y), w, slope.bound), without, atol=1e-9)
