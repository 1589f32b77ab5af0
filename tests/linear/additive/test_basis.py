"""Shapes and trees: their coordinates leave to others what others explain, and add up as said."""

import numpy as np
import pytest
from scipy import sparse

from farthing.data.tables import Table
from farthing.errors import InvalidValue
from farthing.linear.additive import basis
from farthing.linear.additive.basis import (
    BLOCKS,
    CELLS,
    EDGES,
    HIGHEST,
    LOWEST,
    VALUES,
    Binned,
    Cell,
    cells_of,
    codes_of,
)

RNG = np.random.default_rng(0)


def histogram(x):
    return np.bincount(cells_of(x), minlength=CELLS) / len(x)


MASSES = [
    histogram(RNG.uniform(size=5000)),
    histogram(np.where(RNG.uniform(size=5000) < 0.9, 0.0, RNG.beta(1, 20, size=5000))),
    histogram(np.clip(RNG.normal(0.5, 0.5, size=5000), 0, 1)),
]


@pytest.mark.parametrize("mass", MASSES, ids=["uniform", "zeros", "ends"])
def test_a_shape_is_orthogonal_to_what_is_linear_and_has_the_variances_it_says(mass):
    matrix, variances = basis.shape(mass)
    assert 5 < len(variances) < 120
    assert (np.diff(variances) <= 1e-12).all()
    np.testing.assert_allclose(mass @ matrix, 0, atol=1e-9)
    np.testing.assert_allclose((mass * VALUES) @ matrix, 0, atol=1e-9)
    np.testing.assert_allclose(matrix.T @ (mass[:, None] * matrix), np.diag(variances), atol=1e-9)
    assert not matrix[0].any()


def test_a_feature_of_two_values_has_no_shape():
    mass = np.zeros(CELLS)
    mass[LOWEST], mass[HIGHEST] = 0.7, 0.3
    assert len(basis.shape(mass)[1]) == 0


def test_masses_are_shares_whatever_the_noise():
    counts = histogram(RNG.uniform(size=5000))[2:-1]
    blocks = np.add.reduceat(counts, BLOCKS)
    for noise in (0.0, 0.003, 0.1, 10.0):
        noisy = [each + noise * RNG.normal(size=len(each)) for each in (blocks, counts)]
        mass = basis.masses((noisy[0], noisy[1]), 0.8, (noise, noise), 0.5)
        assert mass.min() >= 0
        assert mass.sum() == pytest.approx(1.0)
        assert mass[2:-1].sum() == pytest.approx(0.8)
    exact = basis.masses((blocks, counts), 1.0, (0.0, 0.0), 0.5)
    np.testing.assert_allclose(exact[2:-1], counts, atol=1e-12)


def test_a_mean_tells_the_share_at_the_upper_bound():
    mass = basis.masses((np.zeros(len(BLOCKS)), np.zeros(CELLS - 3)), 0.0, (0.01, 0.01), 0.3)
    assert mass[HIGHEST] == pytest.approx(0.3)
    assert mass[LOWEST] == pytest.approx(0.7)


def test_blocks_tell_where_a_feature_piles_up_when_cells_are_noise():
    counts = histogram(RNG.uniform(0.01, 0.03, size=5000))[2:-1]
    blocks = np.add.reduceat(counts, BLOCKS)
    noisy = counts + 0.05 * RNG.normal(size=len(counts))
    mass = basis.masses((blocks + 0.01 * RNG.normal(size=len(blocks)), noisy), 1.0, (0.01, 0.05), 0.02)
    assert mass[(VALUES > 1 / 128) & (VALUES < 1 / 32)].sum() > 0.9


def test_a_value_of_many_records_can_have_a_weight_of_its_own():
    """What a spike tells apart from its neighbours has more variance than without it."""
    flat = np.full(CELLS, 0.0)
    flat[2:-1] = 1 / (CELLS - 3)
    spike = 0.8 * flat
    spike[40] += 0.2
    alone = np.zeros(CELLS)
    alone[40], alone[[39, 41]] = 1.0, -0.5
    own = [float(np.square(alone @ basis.shape(mass)[0]).sum()) for mass in (flat, spike)]
    assert own[1] > 1.5 * own[0]


def test_a_tree_numbers_its_leaves_by_the_answers():
    features = RNG.integers(1, CELLS, size=(3, 200)).astype(np.uint8)
    features[:, 0] = 0
    tree = basis.ObliviousTree((0, 2, 0), (60, 30, 100), np.zeros((9, 1)))
    leaves = [1 + (a > 60) + 2 * (c > 30) + 4 * (a > 100) for a, _, c in features.T.astype(int)]
    assert tree.codes(features).tolist() == [0, *leaves[1:]]


def test_products_are_orthonormal_if_answers_are_independent_and_none_is_of_one_feature():
    shares = (0.5, 0.3, 0.8, 0.6)
    matrix, variances = basis.products((0, 1, 2, 0), shares)
    bits = (np.arange(16)[:, None] >> np.arange(4)) & 1
    chances = np.prod(np.where(bits == 1, shares, 1 - np.array(shares)), axis=1)
    np.testing.assert_allclose(matrix[1:].T @ (chances[:, None] * matrix[1:]), np.diag(variances), atol=1e-9)
    np.testing.assert_allclose(chances @ matrix[1:], 0, atol=1e-9)
    assert len(variances) == 2**4 - 1 - 4 - 1  # without the empty one, single answers, and 0 with 0


def test_trees_ask_about_features_of_large_effect_and_add_what_they_may():
    mass = np.stack(MASSES)
    trees, variances, directions = basis.grown(mass, np.array([1.0, 0.0, 1.0]), 20, 7.0)
    assert variances.sum() == pytest.approx(7.0)
    assert variances.max() > 5 * variances.mean()
    assert {feature for tree in trees for feature in tree.asked} == {0, 2}
    rows = np.stack([RNG.choice(CELLS, size=2000, p=row) for row in mass]).astype(np.uint8)
    length = sum(float(np.square(tree.matrix[tree.codes(rows)]).sum()) / 2000 for tree in trees)
    assert 0.5 < length / 7.0 < 2
    z = np.hstack([tree.matrix[tree.codes(rows)] for tree in trees]) @ directions
    np.testing.assert_allclose(z.var(axis=0)[-5:], variances[-5:], rtol=0.2)
    np.testing.assert_allclose(directions.T @ directions, np.eye(len(variances)), atol=1e-9)
    assert not basis.grown(mass, np.array([1.0, 0.0, 0.0]), 20, 7.0)[0]


def test_a_shape_has_a_line_where_the_linear_coordinate_is_too_short():
    """A feature within 1/100 of its range: moments with noise do not scale it, its histogram does."""
    mass = np.where((VALUES > 0.001) & (VALUES < 0.01), 1.0, 0.0)
    mass /= mass.sum()
    centred = VALUES - mass @ VALUES
    deviation = np.sqrt(mass @ np.square(centred))
    for scale, expected in ((1 / deviation, 0.0), (0.6 / deviation, 0.64)):
        for strength in (1.0, 0.1):  # of the prior of the shape, which the line does not depend on
            matrix, _ = basis.shape(mass, scale, strength)
            along = (mass * centred / deviation) @ matrix  # the covariance of each coordinate with the line
            assert strength * np.square(along).sum() == pytest.approx(expected, abs=1e-6)
            assert np.abs(matrix).max() < 1e3


X = np.random.default_rng(0).uniform(-0.2, 1.2, size=(500, 3))
ENDS = np.zeros(3), np.ones(3)


def test_bounds_have_codes_of_their_own_and_cells_are_in_order():
    assert cells_of(np.array([-1.0, 0.0, 1.0, 2.0, np.nan])).tolist() == [LOWEST, LOWEST, HIGHEST, HIGHEST, 0]
    inside = np.sort(RNG.uniform(1e-9, 1 - 1e-9, size=1000))
    codes = cells_of(inside)
    assert (np.diff(codes.astype(int)) >= 0).all()
    assert codes.min() > LOWEST
    assert codes.max() < HIGHEST
    assert np.abs(VALUES[codes] - inside).max() <= 0.5 / 128
    small = inside[(inside > 0.001) & (inside < 0.125)]
    assert np.abs(VALUES[cells_of(small)] / small - 1).max() <= 1 / 32
    assert len(VALUES) == CELLS <= 256
    assert cells_of(EDGES).tolist() == (np.arange(len(EDGES)) + 3).tolist()


def test_a_row_that_is_not_finite_has_no_codes():
    rows = X.copy()
    rows[3, 1], rows[7, 0] = np.nan, np.inf
    codes = codes_of(rows, *ENDS)
    assert not codes[:, [3, 7]].any()
    assert np.delete(codes, [3, 7], axis=1).all()


def test_codes_do_not_depend_on_how_a_table_is_stored(monkeypatch):
    whole = codes_of(X, *ENDS)
    monkeypatch.setattr(basis, "_ROWS", 7)
    np.testing.assert_array_equal(codes_of(X, *ENDS), whole)
    rows = np.where(X < 0.5, 0.0, X)
    np.testing.assert_array_equal(codes_of(sparse.csr_array(rows), *ENDS), codes_of(rows, *ENDS))
    raw = 10 + 5 * X
    assert (codes_of(raw, np.full(3, 10.0), np.full(3, 15.0)) != whole).mean() < 0.01  # but for rounding


def test_rows_are_taken_with_their_codes():
    records = Binned(Table(X, X[:, 0]), codes_of(X, *ENDS))
    assert records.take(slice(None)) is records
    some = records.take(np.array([5, 2]))
    assert len(some) == 2
    cell = Cell(1, np.zeros((CELLS, 1)))
    np.testing.assert_array_equal(some.codes(cell), records.codes(cell)[[5, 2]])


def test_what_is_no_table_with_its_codes_is_refused(monkeypatch):
    with pytest.raises(InvalidValue, match="one code a row"):
        Binned(Table(X), codes_of(X[:5], *ENDS))
    monkeypatch.setattr(basis, "MOST", 100)
    with pytest.raises(InvalidValue, match="2\\^26"):
        Binned(Table(X), codes_of(X, *ENDS))
