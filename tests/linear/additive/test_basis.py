"""Shapes and trees: their coordinates leave to others what others explain, and add up as said."""

import numpy as np
import pytest

from farthing.linear.additive import basis
from farthing.linear.additive.bins import CELLS, HIGHEST, LOWEST, VALUES, cells_of

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
    assert 5 < len(variances) < 60
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
    for noise in (0.0, 0.003, 0.1, 10.0):
        noisy = counts + noise * RNG.normal(size=len(counts))
        mass = basis.masses(noisy, 0.8, noise, 0.5)
        assert mass.min() >= 0
        assert mass.sum() == pytest.approx(1.0)
        assert mass[2:-1].sum() == pytest.approx(0.8)
    exact = basis.masses(counts, 1.0, 0.0, 0.5)
    np.testing.assert_allclose(exact[2:-1], counts, atol=1e-12)


def test_a_mean_tells_the_share_at_the_upper_bound():
    mass = basis.masses(np.zeros(CELLS - 3), 0.0, 0.01, 0.3)
    assert mass[HIGHEST] == pytest.approx(0.3)
    assert mass[LOWEST] == pytest.approx(0.7)


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
    trees, variances = basis.grown(mass, np.array([1.0, 0.0, 1.0]), 20, 7.0)
    assert {feature for tree in trees for feature in tree.asked} == {0, 2}
    rows = np.stack([RNG.choice(CELLS, size=2000, p=row) for row in mass]).astype(np.uint8)
    length = sum(float(np.square(tree.matrix[tree.codes(rows)]).sum()) / 2000 for tree in trees)
    assert 0.5 < length / 7.0 < 2
    assert all(len(v) == tree.matrix.shape[1] for v, tree in zip(variances, trees, strict=True))
    assert basis.grown(mass, np.array([1.0, 0.0, 0.0]), 20, 7.0) == ([], [])
