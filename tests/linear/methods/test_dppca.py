"""Components: what is asked and for how much, with and without a noisy mean."""

import math

import numpy as np
import pytest

import farthing as ft
from farthing.data.tables import Features, Table
from farthing.errors import BudgetSpent, InvalidValue
from farthing.linear.budget_schedule import gaussian_mu
from farthing.linear.losses import Total
from farthing.linear.methods.dppca import Scatter, components, dppca
from farthing.noise.lattice import SeededStream
from farthing.queries.events import GaussianEvent

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(4000, 8)) * 0.2 * np.arange(8, 0, -1) / 8 + 0.3
ROWS /= np.linalg.norm(ROWS, axis=1, keepdims=True)
FLAT = Features(8, intercept=0.0)


def moments(X, epsilon=0.5, adjacency="add-remove", seed=0, **options):
    stream = None if seed is None else SeededStream(seed)
    ledger = ft.Ledger(ft.Budget(epsilon, 1e-6, adjacency), stream=stream)
    mu = gaussian_mu(ledger)
    (step,) = dppca(ledger.over(Table(X)), Features(X.shape[1], intercept=0.0), **options)
    shift = 2.0 if adjacency == "replace-one" else 1.0
    assert all(isinstance(receipt.event, GaussianEvent) for receipt in step.receipts)
    return step.w, [(shift / receipt.event.noise / mu) ** 2 for receipt in step.receipts], ledger


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one", "zero-out"])
@pytest.mark.parametrize(
    ("records", "parts"), [(None, [1.0]), (4000, [0.1, 0.9]), (10, [1.0]), (10**7, [1.0])]
)
def test_a_mean_is_bought_by_a_public_rule(records, parts, adjacency):
    _, found, ledger = moments(ROWS, adjacency=adjacency, records=records)
    np.testing.assert_allclose(found, parts, rtol=1e-6)
    assert ledger.share == pytest.approx(1.0)
    assert ledger.share <= 1.0


def test_the_rule_does_not_look_at_the_rows():
    for rows in (ROWS, -ROWS, np.zeros_like(ROWS), RNG.normal(size=ROWS.shape), ROWS[:3]):
        assert len(moments(rows, records=4000)[1]) == 2


@pytest.mark.parametrize("records", [None, 4000])
def test_with_a_large_budget_it_is_the_matrix_itself(records):
    found, _, _ = moments(ROWS, 1e6, records=records)
    np.testing.assert_allclose(found, ROWS.T @ ROWS, atol=0.1)


def test_rows_that_share_a_direction_are_known_better_about_their_mean():
    best = np.linalg.eigvalsh(ROWS.T @ ROWS)[-3:].sum()

    def lost(records):
        kept = []
        for seed in range(20):
            _, axes = components(moments(ROWS, seed=seed, records=records)[0], 3)
            kept.append(np.trace(axes @ ROWS.T @ ROWS @ axes.T) / best)
        return 1 - np.mean(kept)

    assert 0 < lost(4000) < 0.6 * lost(None)


def test_a_short_mean_is_not_used():
    """The noise is then that of nine tenths, on rows of the full length."""
    spread = np.vstack([ROWS, -ROWS])
    found = [moments(spread, seed=seed, records=8000)[0] - spread.T @ spread for seed in range(40)]
    mu = gaussian_mu(ft.Ledger(ft.Budget(0.5, 1e-6)))
    diagonal = np.std([np.diag(noise) for noise in found])
    assert diagonal == pytest.approx(1 / (mu * math.sqrt(0.9)), rel=0.15)


@pytest.mark.parametrize("contribution", [Total(FLAT), Scatter(FLAT, np.full(8, 0.2))])
def test_neighbours_are_no_further_apart_than_the_bound_says(contribution):
    bound = ft.ClipNorm(0.8) if isinstance(contribution, Total) else ft.ClipOuter(0.8)
    corners = [*np.eye(8), *-np.eye(8), np.full(8, 1e200), np.full(8, -3.0), np.zeros(8)]

    def total(*extra):
        return contribution.bounded_sum(Table(np.vstack([ROWS[:10], *extra])), None, bound)

    moved = [np.ravel(total(row) - total()) for row in corners]
    assert max(np.linalg.norm(move) for move in moved) <= bound.sensitivity(ft.Adjacency.ADD_REMOVE) + 1e-9
    apart = max(np.linalg.norm(a - b) for a in moved for b in moved)
    assert apart <= bound.sensitivity(ft.Adjacency.REPLACE_ONE) + 1e-9


def test_the_sums_are_the_plain_ones():
    features = Features(8, 0.1, 2.0, intercept=0.0, radius=1.0)
    z = ft.ClipNorm(1.0).apply(2 * (ROWS - 0.1))
    np.testing.assert_allclose(Total(features).bounded_sum(Table(ROWS), None, ft.ClipNorm(1.0)), z.sum(0))
    about = ft.ClipNorm(0.7).apply(z - 0.2)
    total = Scatter(features, np.full(8, 0.2)).bounded_sum(Table(ROWS), None, ft.ClipOuter(0.7))
    np.testing.assert_allclose(total, about.T @ about)


@pytest.mark.parametrize(
    "rows", [np.ones((50, 8)), np.zeros((50, 8)), np.ones((1, 8)), np.empty((0, 8)), np.full((9, 8), 1e300)]
)
@pytest.mark.parametrize("epsilon", [1e-3, 1.0, 1e4])
def test_odd_tables_are_no_error(rows, epsilon):
    found, _, ledger = moments(rows, epsilon, seed=None, records=1000)
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found, found.T)
    assert ledger.share <= 1


def test_the_same_seed_gives_the_same_matrix():
    first, again, other = (moments(ROWS, seed=seed, records=4000)[0] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(
    "options", [{"clip_norm": 0.0}, {"clip_norm": np.nan}, {"records": 0}, {"records": 1.5}]
)
def test_bad_options_are_refused_before_anything_is_charged(options):
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6))
    with pytest.raises(InvalidValue):
        list(dppca(ledger.over(Table(ROWS)), FLAT, **options))
    assert ledger.share == 0


def test_the_estimator_says_what_it_took_as_public():
    model = ft.PCA(2, 0.5, 1e-6, random_state=0).fit(ROWS)
    assert "public" in model.privacy_.note
    assert "public" not in ft.PCA(2, 0.5, 1e-6, records=4000).fit(ROWS).privacy_.note
    expected = components(moments(ROWS, records=4000)[0], 2)
    np.testing.assert_array_equal(model.components_, expected[1])
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6))
    ledger.allot()
    with pytest.raises(BudgetSpent):
        ft.PCA(2, ledger=ledger).fit(ROWS)


def test_components_are_the_leading_eigenvectors():
    values, rows = components(np.diag([1.0, 5.0, 3.0]), 2)
    np.testing.assert_allclose(values, [5.0, 3.0])
    np.testing.assert_allclose(rows, [[0, 1, 0], [0, 0, 1]])


def test_a_blank_row_adds_nothing_about_a_centre_either():
    rows = np.random.default_rng(3).normal(1.0, 0.1, size=(50, 3))
    asked = Scatter(Features(3, intercept=0.0, radius=2.0), np.full(3, 0.9))
    without = asked.bounded_sum(Table(np.delete(rows, 7, 0)), None, ft.ClipOuter(0.5))
    rows[7, 1] = np.nan
    np.testing.assert_allclose(asked.bounded_sum(Table(rows), None, ft.ClipOuter(0.5)), without, atol=1e-12)
