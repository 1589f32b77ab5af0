"""Rows that kernels read where they lie, against sums over blocks; what is malformed they never see."""

import numpy as np
import pytest
from scipy import sparse

import farthing as ft
from farthing.data import raw
from farthing.data.tables import Features, Table
from farthing.linear.losses import LinearGradient, logistic, squared
from farthing.linear.methods.descent import MARGIN, Norms, Stretch
from farthing.linear.methods.leastsquares import Slope
from farthing.noise import native

RNG = np.random.default_rng(3)
ROWS = RNG.uniform(size=(400, 9)) * 2
Y = RNG.uniform(size=400)
Y[7] = np.nan  # a blank row
CLIP = ft.ClipNorm(1.0)
kernels = pytest.mark.skipif(native.kernels() is None, reason="no kernels here")


@pytest.mark.parametrize(
    ("indices", "indptr"),
    [
        ([0, 0], [0, 2, 2]),
        ([1, 0], [0, 2, 2]),
        ([0, 9], [0, 1, 2]),
        ([0, -1], [0, 1, 2]),
        ([0, 1], [0, 2, 1]),
        ([0, 1], [0, 3, 2]),
    ],
    ids=["a column twice", "unordered", "no such column", "negative", "fewer than said", "falling starts"],
)
def test_malformed_sparse_rows_are_not_handed_to_a_kernel(indices, indptr):
    rows = sparse.csr_array((2, 3))
    rows.data, rows.indices = np.ones(2), np.array(indices, np.int32)
    rows.indptr = np.array(indptr, np.int32)
    assert raw.stored(rows, np.ones(2)) is None


def test_empty_rows_of_a_sparse_table_are_no_disorder():
    rows = sparse.csr_array(np.array([[0, 0, 1.0], [0, 0, 0], [2.0, 0, 3.0], [0, 0, 0]]))
    assert raw.stored(rows, None) is not None


@kernels
@pytest.mark.parametrize("kind", [np.float64, np.float32, np.uint8])
def test_squares_are_those_of_numpy(kind):
    rows = (ROWS * 3).astype(kind)
    centre, scale = RNG.uniform(size=9), RNG.uniform(size=9) + 0.1
    near, far = raw.stored(rows, None).squares(centre, scale)
    np.testing.assert_allclose(near, np.square((rows - centre) * scale).sum(axis=1), rtol=1e-12)
    np.testing.assert_allclose(far, np.square(rows * scale).sum(axis=1), rtol=1e-12)


@kernels
@pytest.mark.parametrize("kind", [np.float64, np.float32])
@pytest.mark.parametrize("matrix", [False, True])
def test_sums_by_kernels_are_those_of_blocks(monkeypatch, kind, matrix):
    scale = RNG.normal(size=(9, 9)) if matrix else RNG.uniform(size=9) + 0.5
    features = Features(9, centre=0.4, scale=scale, intercept=0.7)
    slope, w = Slope(features, origin=0.3, clip=2.0, rms=0.4), RNG.normal(size=10)
    asked = [
        (slope, w, slope.bound),
        (Stretch(LinearGradient(logistic, features)), w, MARGIN),
        (Norms(9, 3.0 * 2.0 ** (-np.arange(9) / 4)), None, ft.ClipNorm(1.0)),
    ]
    for contribution, at, bound in asked:
        found = []
        for loaded in (native.kernels(), None):
            with monkeypatch.context() as patched:
                patched.setattr(native, "_loaded", loaded)
                found.append(contribution.bounded_sum(Table(ROWS.astype(kind), Y), at, bound))
        np.testing.assert_allclose(*found, rtol=1e-10, atol=1e-10)


@kernels
def test_a_blank_row_adds_nothing_to_any_part_of_a_step():
    features = Features(9, intercept=0.7)
    slope, w = Slope(features, origin=0.3, clip=2.0, rms=0.4), RNG.normal(size=10)
    with_it = slope.bounded_sum(Table(ROWS, Y), w, slope.bound)
    without = slope.bounded_sum(Table(np.delete(ROWS, 7, 0), np.delete(Y, 7)), w, slope.bound)
    np.testing.assert_allclose(with_it, without, rtol=1e-10, atol=1e-10)


@kernels
def test_one_record_moves_a_step_by_its_bound_at_most():
    features = Features(9, intercept=0.7)
    slope, w = Slope(features, origin=0.3, clip=0.2, rms=0.1), 30 * RNG.normal(size=10)
    whole = slope.bounded_sum(Table(ROWS, Y), w, slope.bound)
    for gone in range(0, 400, 40):
        less = slope.bounded_sum(Table(np.delete(ROWS, gone, 0), np.delete(Y, gone)), w, slope.bound)
        assert np.linalg.norm((whole - less) / slope.bound.scale) <= slope.bound.clip * (1 + 1e-9)


def test_sparse_rows_with_fewer_values_than_columns_are_not_handed_to_a_kernel():
    rows = sparse.csr_array(np.eye(3))
    rows.data = rows.data[:2]
    assert raw.stored(rows, np.ones(3)) is None
    rows.data = np.ones(3).astype(">f8")
    assert raw.stored(rows, np.ones(3)) is None


@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.parametrize("width", [5, 12])
def test_features_of_another_width_than_the_table_are_refused(kind, width):
    table = Table(ROWS if kind == "dense" else sparse.csr_array(ROWS), Y)
    for some in (table, table.take(np.arange(3)), table.take(np.arange(0))):
        with pytest.raises(ft.errors.InvalidValue, match="the table has 9"):
            LinearGradient(logistic, Features(width)).bounded_sum(some, np.zeros(width + 1), ft.ClipNorm(1.0))


def test_a_table_keeps_the_sparse_rows_that_it_was_given():
    """Another array in the caller's matrix must not free the memory that a kernel reads."""
    rows, w = sparse.csr_array(ROWS), np.zeros(10)
    table, gradient = Table(rows, Y), LinearGradient(logistic, Features(9))
    before = gradient.bounded_sum(table, w, ft.ClipNorm(1.0))
    rows.data = np.full(rows.nnz, 1e9)
    others = [np.full(rows.nnz, 1e9) for _ in range(4)]
    np.testing.assert_array_equal(gradient.bounded_sum(table, w, ft.ClipNorm(1.0)), before)
    assert len(others) == 4


@pytest.mark.parametrize("rows", [1, 3000])
@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_a_row_whose_squares_vanish_is_clipped_as_any_other(rows, kind):
    X, y = np.zeros((rows, 20)), np.zeros(rows)
    X[0], y[0] = 1e-170, 1e308
    y[1:3] = 1.7e308  # rows of zeros: their factors must not add up to infinity
    gradient = LinearGradient(squared, Features(20, intercept=0.0, scale=2.0))
    total = gradient.bounded_sum(Table(X if kind == "dense" else sparse.csr_array(X), y), np.zeros(20), CLIP)
    assert np.linalg.norm(total) <= 1 + 1e-9


def test_a_value_beyond_float64_makes_its_own_row_blank():
    X = np.ones((5, 2), np.longdouble)
    X[0, 0] = np.longdouble("1e400")
    total = LinearGradient(logistic, Features(2)).bounded_sum(Table(X, np.ones(5)), np.zeros(3), CLIP)
    np.testing.assert_allclose(total, np.full(3, -2.0))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("step", [2, -2])
def test_rows_that_are_not_side_by_side_are_the_ones_that_are_read(frozen, step):
    drawn, w = np.arange(400)[::step], RNG.normal(size=10)
    drawn.flags.writeable = not frozen
    table, gradient = Table(ROWS, Y), LinearGradient(logistic, Features(9))
    expected = gradient.bounded_sum(Table(ROWS[drawn], Y[drawn]), w, CLIP)
    for some in (table.take(drawn), table.take(slice(None, None, step))):
        np.testing.assert_allclose(gradient.bounded_sum(some, w, CLIP), expected, rtol=1e-9, atol=1e-9)


def test_truth_values_that_are_stored_as_255_are_measured_as_they_are_added():
    rows = np.frombuffer(bytes([255, 0, 255, 255] * 3000), dtype=np.bool_).reshape(-1, 4)
    gradient, w = LinearGradient(logistic, Features(4, scale=np.eye(4), intercept=0.0)), np.zeros(4)
    total = gradient.bounded_sum(Table(rows, np.ones(3000)), w, ft.ClipNorm(0.5))
    np.testing.assert_allclose(np.linalg.norm(total), 1500)
