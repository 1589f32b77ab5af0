"""What a record contributes: its sums are those of plain loops, and none moves further than its bound.

(Every contribution is tried under every bound in tests/queries/test_honoured_bounds.py.)
"""

import numpy as np
import pytest

import farthing as ft
from farthing.data.tables import Features, Table
from farthing.linear.additive.basis import CELLS, Binned, Cell, codes_of
from farthing.linear.additive.sums import (
    Crowded,
    FactorSlopes,
    GroupedSpace,
    GroupGradient,
    Histograms,
    Inside,
    Length,
    Misfit,
    most_inside,
)
from farthing.linear.losses import logistic, multinomial, squared

RNG = np.random.default_rng(0)
X = np.clip(RNG.uniform(-0.3, 1.3, size=(200, 3)), 0, 1)
Y = RNG.integers(2, size=200).astype(float)
ENDS = np.zeros(3), np.ones(3)
MATRICES = [RNG.normal(size=(CELLS, k)) for k in (4, 2)]
for matrix in MATRICES:
    matrix[0] = 0.0
SPACE = GroupedSpace(Features(3, 0.4, 1.5, intercept=0.5), (Cell(0, MATRICES[0]), Cell(2, MATRICES[1])))


def binned(x=X, y=Y):
    return Binned(Table(x, y), codes_of(x, *ENDS))


def plain_rows():
    codes = codes_of(X, *ENDS)
    return np.hstack([1.5 * (X - 0.4), np.full((200, 1), 0.5), MATRICES[0][codes[0]], MATRICES[1][codes[2]]])


@pytest.mark.parametrize("loss", [logistic, squared, multinomial])
def test_a_slope_is_the_sum_of_clipped_gradients(loss):
    z, shape = plain_rows(), (10, 3) if loss is multinomial else (10,)
    w = RNG.normal(size=shape)
    residual = loss.residual(z @ w, Y)
    each = np.einsum("ni,n...->ni...", z, residual).reshape(200, -1)
    expected = ft.ClipNorm(1.5).apply(each).sum(axis=0).reshape(shape)
    np.testing.assert_allclose(
        GroupGradient(loss, SPACE).bounded_sum(binned(), w, ft.ClipNorm(1.5)), expected, atol=1e-9
    )


@pytest.mark.parametrize("loss", [logistic, multinomial])
def test_one_record_moves_a_slope_by_the_clipping_norm_at_most(loss):
    w = 3 * RNG.normal(size=(10, 3) if loss is multinomial else 10)
    slope, bound = GroupGradient(loss, SPACE), ft.ClipNorm(0.7)
    whole = slope.bounded_sum(binned(), w, bound)
    moved = [
        np.linalg.norm(whole - slope.bounded_sum(binned(np.delete(X, k, 0), np.delete(Y, k)), w, bound))
        for k in range(40)
    ]
    assert 0.69 < max(moved) <= 0.7 * (1 + 1e-9)


def test_slopes_of_factors_are_sums_of_clipped_gradients_in_what_parts_tell():
    parts, factors, z = RNG.normal(size=(10, 2)), np.array([0.5, 2.0, -0.3]), plain_rows()
    told = np.column_stack([z @ parts, np.ones(200)])
    residual = squared.residual(told @ factors, Y)
    for clip in (0.7, 1e6):
        expected = ft.ClipNorm(clip).apply(residual[:, None] * told).sum(axis=0)
        slopes = FactorSlopes(squared, SPACE, parts).bounded_sum(binned(), factors, ft.ClipNorm(clip))
        np.testing.assert_allclose(slopes, expected, rtol=1e-9, atol=1e-9)
    alone = FactorSlopes(squared, SPACE, parts[:, :0]).bounded_sum(binned(), factors[2:], ft.ClipNorm(9.0))
    np.testing.assert_allclose(alone, [(-0.3 - Y).sum()])  # a model that learnt nothing has no parts


def test_a_blank_row_counts_as_nothing():
    rows, y = X.copy(), Y.copy()
    rows[5, 1], y[9] = np.nan, np.nan
    for contribution in (
        GroupGradient(logistic, SPACE),
        FactorSlopes(squared, SPACE, np.eye(10)),
        Length(logistic, SPACE),
        Misfit(squared, SPACE, 1.0),
    ):
        normed = isinstance(contribution, GroupGradient | FactorSlopes)
        bound = ft.ClipNorm(0.7) if normed else ft.ClipValue(-1.0, 1.0)
        w = RNG.normal(size=11 if isinstance(contribution, FactorSlopes) else 10)
        without = contribution.bounded_sum(binned(np.delete(rows, [5, 9], 0), np.delete(y, [5, 9])), w, bound)
        np.testing.assert_allclose(contribution.bounded_sum(binned(rows, y), w, bound), without, atol=1e-9)
    kept = np.delete(rows, 5, 0)
    for contribution in (Histograms(3), Inside(3), Crowded(most_inside(3))):
        found = contribution.bounded_sum(binned(rows), None, ft.ClipNorm(1.0))
        np.testing.assert_allclose(
            found, contribution.bounded_sum(binned(kept, np.delete(Y, 5)), None, ft.ClipNorm(1.0))
        )


def test_histograms_count_values_between_bounds_and_shrink_rows_with_many():
    inside = (X > 0) & (X < 1)
    counts = Histograms(3).bounded_sum(binned(), None, ft.ClipNorm(2.0))
    np.testing.assert_allclose(counts.sum(axis=1), inside.sum(axis=0))
    blocks = Histograms(3, (0, 17, 200)).bounded_sum(binned(), None, ft.ClipNorm(2.0))
    parts = np.stack([counts[:, :17].sum(axis=1), counts[:, 17:200].sum(axis=1), counts[:, 200:].sum(axis=1)])
    np.testing.assert_allclose(blocks, parts.T)
    np.testing.assert_allclose(Inside(3).bounded_sum(binned(), None, ft.ClipNorm(2.0)), inside.sum(axis=0))
    shrunk = inside * np.minimum(1, 1 / np.sqrt(np.maximum(inside.sum(axis=1), 1)))[:, None]
    np.testing.assert_allclose(Inside(3).bounded_sum(binned(), None, ft.ClipNorm(1.0)), shrunk.sum(axis=0))
    crowds = Crowded((0, 1, 2, 3)).bounded_sum(binned(), None, ft.ClipNorm(1.0))
    assert crowds.tolist() == np.bincount(inside.sum(axis=1), minlength=4).tolist()


def test_an_empty_table_sums_to_nothing():
    empty = binned().take(np.empty(0, np.int64))
    assert not GroupGradient(logistic, SPACE).bounded_sum(empty, np.ones(10), ft.ClipNorm(1.0)).any()
    assert not Histograms(3).bounded_sum(empty, None, ft.ClipNorm(1.0)).any()
