"""Rows that kernels read where they lie, against sums over blocks; what is malformed they never see."""

import math

import numpy as np
import pytest
from scipy import sparse

import farthing as ft
from farthing.data import raw
from farthing.data.tables import Features, Table
from farthing.linear.base import compact
from farthing.linear.losses import LinearGradient, logistic, squared
from farthing.linear.methods.descent import MARGIN, Norms, Spread, Stretch
from farthing.linear.methods.leastsquares import RowMoments, RowScatter, Slope
from farthing.noise import native, summing
from farthing.noise.summing import Sum

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
@pytest.mark.parametrize("width", [3, 8, 9, 21])
@pytest.mark.parametrize("rows", [1, 31, 40])
@pytest.mark.parametrize("kind", [np.float64, np.float32, np.uint8, "csr"])
@pytest.mark.parametrize("form", ["plain", "diagonal", "triangle", "matrix"])
def test_norms_are_those_of_blocks(monkeypatch, width, rows, kind, form):
    x = RNG.uniform(size=(rows, width)) * 3
    x[RNG.uniform(size=x.shape) < 0.5] = 0.0
    X, y = sparse.csr_array(x) if kind == "csr" else x.astype(kind), np.ones(rows)
    y[rows // 2 :: 7] = np.nan
    scale = {
        "plain": 1.0,
        "diagonal": RNG.uniform(size=width) + 0.1,
        "triangle": np.triu(RNG.normal(size=(width, width))),
        "matrix": RNG.normal(size=(width, width)),
    }[form]
    for radius in (None, 1.0):
        for centre in (0.0, RNG.uniform(size=width)):
            features, found = Features(width, centre, scale, 0.3, radius), []
            for loaded in (native.kernels(), None):
                with monkeypatch.context() as patched:
                    patched.setattr(native, "_loaded", loaded)
                    found.append(Table(X, y)._known(features)[1:])
            np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-9)
            assert (found[0][0] is None) is (found[1][0] is None)
            if found[0][0] is not None:
                np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-9)


@kernels
@pytest.mark.parametrize("kind", [np.float64, np.float32, np.uint8, "csr"])
@pytest.mark.parametrize(("rows", "width"), [(1, 2), (63, 8), (200, 9), (129, 27)])
@pytest.mark.parametrize("unit", [False, True])
def test_moments_are_those_of_blocks(monkeypatch, kind, rows, width, unit):
    x = RNG.uniform(size=(rows, width)) * 2
    x[RNG.uniform(size=x.shape) < 0.5] = 0.0
    X, y = sparse.csr_array(x) if kind == "csr" else x.astype(kind), np.ones(rows)
    y[rows // 2 :: 7] = np.nan
    plain, about = Features(width, intercept=0.0), Features(width, 0.4, intercept=0.0)
    scaled = Features(width, RNG.uniform(size=width), RNG.uniform(size=width) + 0.5, 0.8)
    within = Features(width, scale=0.6, intercept=0.0, radius=1.0)
    asked = [
        (RowMoments(plain, about), ft.ClipNorm(0.9)),
        (RowMoments(plain, plain), ft.ClipNorm(0.5)),
        (RowScatter(plain, scaled), ft.ClipOuter(0.9)),
        (Spread(within, True), ft.ClipNorm(2.0)),
        (Spread(within, False), ft.ClipNorm(2.0)),
    ]
    for contribution, bound in asked:
        found = []
        for loaded in (native.kernels(), None):
            with monkeypatch.context() as patched:
                patched.setattr(native, "_loaded", loaded)
                found.append(contribution.bounded_sum(Table(X, y, unit=unit), None, bound))
        np.testing.assert_allclose(*found, rtol=1e-10, atol=1e-10)


@kernels
@pytest.mark.parametrize("kind", [np.float64, "csr"])
def test_sums_by_kernels_are_the_exact_sums_of_single_records_within_the_theorem(kind):
    """Values of many sizes, which round badly: `farthing.noise.summing` allows 2⁻¹⁶ of a bound."""
    x = 2.0 ** RNG.integers(-40, 1, size=(700, 9)) * RNG.choice(
        [1.0, 1 + 2.0**-52, 1 - 2.0**-53], size=(700, 9)
    )
    X, y = sparse.csr_array(x) if kind == "csr" else x, RNG.integers(0, 2, 700) * 1.0
    plain, within = Features(9, intercept=0.0), Features(9, scale=0.9, intercept=0.0, radius=1.0)
    gradient, w = LinearGradient(logistic, Features(9, centre=0.1)), RNG.normal(size=10)
    asked = [
        (RowMoments(plain, Features(9, 0.4, intercept=0.0)), None, ft.ClipNorm(0.9), 0.9),
        (RowScatter(plain, Features(9, 0.3, 1.1, 0.8)), None, ft.ClipOuter(0.9), 0.81),
        (Spread(within, True), None, ft.ClipNorm(2.0), 2.0),
        (Spread(within, False), None, ft.ClipNorm(2.0), 2.0),
        (Stretch(gradient), w, MARGIN, 4.0),
        (gradient, w, CLIP, 1.0),
    ]
    for contribution, at, bound, most in asked:
        found = contribution.bounded_sum(Table(X, y), at, bound)
        single = [contribution.bounded_sum(Table(X[[k]], y[[k]]), at, bound) for k in range(700)]
        assert max(float(np.linalg.norm(each)) for each in single) <= most * (1 + 2.0**-15)
        exact = [math.fsum(column) for column in np.reshape(single, (700, -1)).T.tolist()]
        assert np.linalg.norm(found.ravel() - exact) <= 2.0**-16 * most


@kernels
def test_logistic_residuals_are_right_at_any_margin(monkeypatch):
    """The kernel has an exponential of its own; rows of 1 with weights from -1e300 to 1e300 are margins."""
    ends = np.array([0.0, 1e-300, 1e-9, 1.0, 20.0, 708.0, 709.5, 745.0, 1e5, 1e300])
    margins = np.concatenate([-ends, ends, RNG.normal(size=100) * 30])
    gradient = LinearGradient(logistic, Features(1, intercept=0.0))
    for margin in margins:
        found = []
        for loaded in (native.kernels(), None):
            with monkeypatch.context() as patched:
                patched.setattr(native, "_loaded", loaded)
                found.append(
                    gradient.bounded_sum(Table(np.ones((3, 1)), np.zeros(3)), np.array([margin]), CLIP)
                )
        np.testing.assert_allclose(*found, rtol=4e-15, atol=1e-300)


@kernels
@pytest.mark.parametrize("kind", [np.float64, np.float32])
def test_tables_are_mapped_as_without_kernels(monkeypatch, kind):
    X = (RNG.normal(size=(300, 70)) * 5).astype(kind)
    X[3, 4], X[5, 6], X[7, 8] = np.nan, np.inf, -np.inf
    bounds, found = (-2.0, np.linspace(1, 9, 70)), []
    for loaded in (native.kernels(), None):
        with monkeypatch.context() as patched:
            patched.setattr(native, "_loaded", loaded)
            found.append(compact(X[:, ::1], bounds, 300)[0])
    np.testing.assert_array_equal(*found)
    assert found[0].dtype == np.float32
    assert np.isnan(found[0][[3, 5, 7], [4, 6, 8]]).all()


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
@pytest.mark.parametrize("kind", [np.float64, np.float32, np.uint8])
@pytest.mark.parametrize("width", [3, 8, 9, 21])
@pytest.mark.parametrize("rows", [1, 37, 400])
def test_sums_over_long_tables_are_those_of_centred_rows(monkeypatch, kind, width, rows):
    x = (RNG.uniform(size=(rows, width)) * 3).astype(kind)
    features = Features(width, RNG.uniform(size=width), RNG.uniform(0.5, 2, width), intercept=0.7, radius=2.0)
    table, w = Table(x, Y[:rows]), RNG.normal(size=width + 1)
    gradient, real = LinearGradient(logistic, features), raw.Raw.gradient
    found, centres = [], []

    def watched(self, *given):
        centres.append(given[4])
        return real(self, *given)

    monkeypatch.setattr(raw.Raw, "gradient", watched)
    for long in (False, True):
        monkeypatch.setattr(summing, "long", lambda records, spread, said=long: said)
        found.append(gradient.bounded_sum(table, w, CLIP))
    assert [each is None for each in centres] == [True, False]
    np.testing.assert_allclose(*found, rtol=1e-10, atol=1e-10)


@kernels
def test_the_longest_tables_have_a_kernel_too():
    """Terms v x are up to 2⁸ times as long as v z: of more than 2²⁹ / 23 rows too few could be added up."""
    features = Features(9, centre=0.5)
    assert [summing.long(rows, features.spread) for rows in (2**20, 2**26)] == [False, True]
    least = 2 * 8  # rows that a kernel adds up at least
    assert Sum(2**26, spread=features.spread).rows < least < Sum(2**30).rows


@kernels
def test_rows_that_were_not_measured_have_no_gradient():
    rows = Table(ROWS, Y).raw(Features(9), norms=False)
    assert rows.gradient(np.zeros(9), 0.0, raw.KernelLoss(0, 0.0, 1.0), 100) is None


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


@kernels
@pytest.mark.parametrize("width", [3, 8, 11])
@pytest.mark.parametrize("kind", [np.float64, np.float32])
def test_values_beyond_their_bounds_are_seen_wherever_they_are(width, kind):
    low, high = np.zeros(width), np.linspace(1, 2, width)
    for column in range(width):
        X = np.tile(np.linspace(1, 2, width), (5, 1)).astype(kind) * 0.999
        assert raw.outside(X, low, high) is False
        X[3, column] = high[column] * 1.001
        assert raw.outside(X, low, high) is True
        X[3, column] = -0.001
        assert raw.outside(X[:, :], low, high) is True
        for odd in (np.nan, np.inf, -np.inf):
            X[3, column] = odd
            assert raw.outside(X, low, high) is None
            assert Table(X)._blank.tolist() == [False, False, False, True, False]


@kernels
@pytest.mark.parametrize("most", [0, 10**6], ids=["as they lie", "by eight"])
@pytest.mark.parametrize("rows", [1, 7, 70])
@pytest.mark.parametrize("loss", [logistic, squared])
def test_sums_over_sparse_rows_of_any_length_are_those_of_dense_ones(monkeypatch, loss, rows, most):
    monkeypatch.setattr(raw, "_SLICED", most)
    x = RNG.normal(size=(rows, 13))
    for row in range(rows):
        x[row, RNG.permutation(13)[: (row + 5) % 14]] = 0.0
    y, w = RNG.integers(0, 2, rows) * 1.0, RNG.normal(size=14)
    y[rows // 2 + 1 :: 9] = np.nan  # blank rows, wherever they lie
    features, within = Features(13, centre=0.2, scale=1.3), Features(13, intercept=0.0, radius=1.0)
    asked = [
        (LinearGradient(loss, features), w, ft.ClipNorm(2.0)),
        (Stretch(LinearGradient(loss, features)), w, MARGIN),
        (Spread(within, False), None, ft.ClipNorm(2.0)),
        (Norms(13, 4.0 * 2.0 ** (-np.arange(9) / 4)), None, ft.ClipNorm(1.0)),
    ]
    tables = Table(x, y), Table(sparse.csr_array(x), y)
    assert tables[1].raw(features).stored.stride == (8 if most else 1)
    for contribution, at, bound in asked:
        found = [contribution.bounded_sum(table, at, bound) for table in tables]
        np.testing.assert_allclose(*found, rtol=1e-7, atol=1e-7)
    np.testing.assert_allclose(*(table._known(features)[2] for table in tables), rtol=1e-7)


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


@kernels
def test_blank_rows_of_a_sparse_table_are_those_left_out_without_norms():
    rng = np.random.default_rng(6)
    X = sparse.random_array((200, 30), density=0.2, format="csr", rng=rng)
    y = rng.uniform(size=200)
    y[[3, 50, 120]] = np.nan
    raw = Table(X, y).raw(Features(30), norms=False)
    total = sum(part for part, _ in raw.powers(np.zeros(30), np.ones(30), np.inf, 1000))
    kept = X[np.isfinite(y)]
    np.testing.assert_allclose(total, np.concatenate([kept.sum(axis=0), kept.power(2).sum(axis=0)]))


@kernels
@pytest.mark.parametrize("width", [3, 8, 21])
def test_rows_that_cannot_be_longer_than_their_bound_are_added_as_they_are(width):
    """Where bounds are declared and the clip covers all of [0, 1], no kernel looks for long rows."""
    x, y = RNG.uniform(size=(129, width)), np.ones(129)
    x[:5], y[64] = RNG.choice([0.0, 1.0], size=(5, width)), np.nan
    about, plain = Features(width, 0.5, intercept=0.0), Features(width, intercept=0.0)
    for clip in (math.sqrt(width * (1 / 4 + 1 / 16)), 0.6):
        found = [
            RowMoments(plain, about).bounded_sum(Table(x, y, bounds=bounds), None, ft.ClipNorm(clip))
            for bounds in ((0, 1), None)
        ]
        np.testing.assert_allclose(*found, rtol=1e-12, atol=1e-12)
