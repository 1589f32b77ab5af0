"""Rows that kernels read where they lie, against sums over blocks; what is malformed they never see."""

import numpy as np
import pytest
from scipy import sparse

import farthing as ft
from farthing.data import raw
from farthing.data.tables import Features, Table
from farthing.linear.losses import Gradient, logistic
from farthing.linear.methods.descent import MARGIN, Norms, Stretch
from farthing.linear.methods.leastsquares import Slope
from farthing.noise import native

RNG = np.random.default_rng(3)
ROWS = RNG.uniform(size=(400, 9)) * 2
Y = RNG.uniform(size=400)
Y[7] = np.nan  # a blank row
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
        (Stretch(Gradient(logistic, features)), w, MARGIN),
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
