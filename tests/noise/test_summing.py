"""Sums of values built to round badly: neighbours stay within the slack that mechanisms add noise for."""

import math
from fractions import Fraction

import numpy as np
import pytest

from farthing.audit.steps import badly_rounded, moved
from farthing.budget import Adjacency
from farthing.data.tables import Features, Table
from farthing.errors import InvalidValue
from farthing.linear.losses import Gram, LinearGradient, Moments, Scores, squared
from farthing.noise import native, summing
from farthing.noise.summing import MOST, SLACK, Sum, chain, summed
from farthing.queries.bounds import ClipNorm, ClipOuter, ClipValue
from farthing.queries.mechanisms import Gaussian, NoisyMax
from farthing.queries.query import PerExample, Rows

LONG, FAR = 2**20, 2.0**-18  # a sequential sum of so many moves by 2⁻¹⁵ more than its bound


def test_a_plain_sum_would_move_by_more_than_its_bound():
    assert moved(lambda terms: terms.cumsum()[-1:], badly_rounded(LONG)) > 1 + 4 * FAR


def test_sums_of_examples_move_by_their_bound():
    contribution = PerExample(lambda rows, w: np.column_stack([rows[0], 0 * rows[0]]))
    found = moved(lambda t: contribution.bounded_sum(Rows(t), None, ClipNorm(1.0)), badly_rounded(LONG))
    assert found <= 1 + FAR


@pytest.mark.parametrize("compiled", [True, False], ids=["kernel", "numpy"])
def test_sums_of_gradients_move_by_their_bound(compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(native, "kernels", lambda work=0: None)
    gradient, x = LinearGradient(squared, Features(2, intercept=0.0)), np.zeros((LONG, 2))
    x[:, 0] = 1.0
    for step in (1, 4):
        terms = badly_rounded(LONG, step)
        found = moved(lambda t: gradient.bounded_sum(Table(x, -t), np.zeros(2), ClipNorm(1.0)), terms)
        assert found <= 1 + FAR


def test_sums_of_scores_and_moments_move_by_their_bound():
    features, terms = Features(1, intercept=0.0), badly_rounded(LONG)
    x = np.sqrt(np.abs(terms))[:, None]
    one = x.copy()
    one[0] = 1.0
    low, high = (
        Moments(features).bounded_sum(Table(rows), None, ClipNorm(math.sqrt(2.0))) for rows in (x, one)
    )
    assert np.linalg.norm(high - low) <= math.sqrt(2.0) * (1 + FAR)
    low, high = (Gram(features).bounded_sum(Table(rows), None, ClipOuter(1.0)) for rows in (x, one))
    assert np.linalg.norm(high - low) <= 1 + FAR
    scores = Scores(squared, features)
    low, high = (
        scores.bounded_sum(Table(rows, np.zeros(LONG)), np.ones((1, 2)), ClipValue(-1.0, 0.0))
        for rows in (x, one)
    )
    assert np.abs(high - low).max() <= 0.5 * (1 + FAR)


@pytest.mark.parametrize("matrix", [False, True], ids=["diagonal", "matrix"])
@pytest.mark.parametrize("compiled", [True, False], ids=["kernel", "numpy"])
def test_rows_near_a_far_centre_move_by_their_bound(compiled, matrix, monkeypatch):
    """Σ v x and c Σ v are huge there and cancel in Σ v z."""
    if not compiled:
        monkeypatch.setattr(native, "kernels", lambda work=0: None)
    rng, n = np.random.default_rng(0), 2**13
    centre = np.full(3, 1e6 + 0.1)
    features = Features(3, centre, np.eye(3) if matrix else 1.0, intercept=0.0)
    X = centre + rng.normal(size=(n, 3)) * 1e-6
    y = rng.normal(size=n) * 1e9  # residuals are huge: terms are clipped to 1
    gradient, bound = LinearGradient(squared, features), ClipNorm(1.0)
    whole = gradient.bounded_sum(Table(X, y), np.zeros(3), bound)
    worst = max(
        float(np.linalg.norm(whole - gradient.bounded_sum(Table(*without), np.zeros(3), bound)))
        for without in ((np.delete(X, i, 0), np.delete(y, i)) for i in range(0, n, n // 16))
    )
    assert worst <= 1 + SLACK


def test_a_centre_in_the_midst_of_the_rows_changes_nothing():
    rng = np.random.default_rng(0)
    X, y = rng.uniform(size=(500, 4)), rng.normal(size=500) * 100
    features = Features(4, 0.5, 3.0, intercept=0.1)
    z = features.rows(X, None)
    clipped = ClipNorm(1.0).apply(-y[:, None] * z)
    found = LinearGradient(squared, features).bounded_sum(Table(X, y), np.zeros(5), ClipNorm(1.0))
    np.testing.assert_allclose(found, clipped.sum(axis=0), atol=1e-12)


@pytest.mark.parametrize("records", [2**12, 2**29, 2**30])
def test_the_error_of_a_sum_is_that_of_the_theorem(records):
    """In chains that are as short as so many records need, on few of them."""
    terms = badly_rounded(2**12) * (1 + 2.0**-30)
    total = Sum(records)
    step = min(total.rows, 100)
    for start in range(0, len(terms), step):
        some = terms[start : start + step]
        total.add(some.cumsum()[-1], len(some))
    exact = sum(map(Fraction, terms.tolist()), Fraction(0))
    assert abs(Fraction(float(total.value)) - exact) <= Fraction(chain(records) * len(terms), 2**53)


def test_parts_that_are_too_long_are_refused():
    total = Sum(2**30)
    with pytest.raises(InvalidValue, match="more terms"):
        total.add(1.0, total.rows + 1)


def test_more_records_than_the_theorem_covers_are_refused():
    with pytest.raises(InvalidValue, match="at most 2\\^30"):
        Sum(MOST + 1)
    many = np.broadcast_to(np.zeros((1, 1), np.int8), (MOST + 1, 1))
    with pytest.raises(InvalidValue, match="at most 2\\^30"):
        Rows(many)


def test_sums_of_no_rows_are_zeros():
    np.testing.assert_array_equal(summed(ClipNorm(1.0).apply, np.empty((0, 3))), np.zeros(3))
    assert Sum(0, (2,)).value.tolist() == [0.0, 0.0]
    with pytest.raises(InvalidValue, match="one row per record"):
        summed(ClipNorm(1.0).apply, np.ones(3))


def test_noise_is_larger_by_the_slack_of_the_norm():
    """Where replacing a record moves a sum by less than its norm, the norm is what rounds."""
    for bound in (ClipNorm(2.0), ClipValue(0.0, 1.0), ClipValue(100.0, 101.0)):
        bits, cell = Gaussian(1.0).grid(bound, 1)
        nearest = min(bound.norm(), bound.sensitivity(Adjacency.REPLACE_ONE))
        assert cell * 2.0**bits >= bound.norm() * (1 + summing.SLACK * bound.norm() / nearest)
    bits, cell = NoisyMax(1.0).grid(ClipValue(100.0, 101.0))
    assert cell * 2.0**bits >= 101 * (1 + 202 * SLACK)
