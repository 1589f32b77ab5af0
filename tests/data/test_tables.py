"""Tables: blocks and public maps agree with the plain arithmetic they stand for."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

import farthing as ft
from farthing.data import raw, tables
from farthing.data.tables import Features, Table, Weighted
from farthing.errors import InvalidValue
from farthing.linear.losses import LinearGradient, logistic
from farthing.noise import native

RNG = np.random.default_rng(0)


def plain(X, features, bounds=None, unit=False):
    """z of every row, written out."""
    X = np.asarray(X.toarray() if sparse.issparse(X) else X, dtype=float)
    if bounds is not None:
        low, high = (np.broadcast_to(np.asarray(b, float), X.shape[1]) for b in bounds)
        X = (np.clip(X, low, high) - low) / (high - low)
    if unit:
        norms = np.linalg.norm(X, axis=1, keepdims=True)
        X = np.divide(X, norms, out=np.zeros_like(X), where=norms > 0)
    A = features.scale if np.ndim(features.scale) == 2 else np.diag(features.scale)
    Z = (X - features.centre) @ A.T
    if features.intercept:
        Z = np.column_stack([Z, np.full(len(Z), features.intercept)])
    if features.radius is not None:
        norms = np.linalg.norm(Z, axis=1, keepdims=True)
        Z = Z * np.minimum(1, features.radius / np.maximum(norms, 1e-300))
    return Z


def maps(d):
    matrix = RNG.normal(size=(d, d))
    return [
        Features(d),
        Features(d, intercept=0.0),
        Features(d, centre=0.3, scale=2.0, intercept=0.5, radius=1.0),
        Features(d, centre=RNG.normal(size=d), scale=RNG.uniform(0.5, 2, d), radius=0.7),
        Features(d, centre=RNG.normal(size=d), scale=matrix, intercept=2.0, radius=1.5),
    ]


KINDS = [np.float64, np.float32, np.uint8, np.int64, bool, sparse.csr_matrix, sparse.csc_array]


def made(kind, n=500, d=7):
    X = (RNG.random((n, d)) < 0.3) * RNG.integers(0, 3, (n, d))
    return X.astype(kind) if isinstance(kind, type) and issubclass(kind, np.generic | bool) else kind(X * 1.0)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(("bounds", "unit"), [(None, False), (None, True), ((0, 2), False), ((0, 1), True)])
def test_blocks_are_the_rows_they_stand_for(kind, bounds, unit, monkeypatch):
    monkeypatch.setattr(tables, "_BLOCK", 900)  # several blocks, the last one short
    monkeypatch.setattr(tables, "_SPARSE_BLOCK", 900)
    X, y = made(kind), np.arange(500.0)
    table = Table(X, y, bounds=bounds, unit=unit)
    for features in maps(X.shape[1]):
        Z = plain(X, features, bounds, unit)
        w, v = RNG.normal(size=features.size), RNG.normal(size=500)
        W = RNG.normal(size=(features.size, 3))
        for _ in range(2):  # the second pass uses what the first remembered
            blocks = list(table.blocks(features))
            assert len(blocks) > 1
            np.testing.assert_allclose(np.concatenate([b.rows(features) for b in blocks]), Z, atol=1e-12)
            np.testing.assert_allclose(
                np.concatenate([b.norm for b in blocks]), np.linalg.norm(Z, axis=1), atol=1e-9
            )
            np.testing.assert_array_equal(np.concatenate([b.y for b in blocks]), y)
            for weights in (w, W):
                margins = np.concatenate([b.margins(*features.unfold(weights)) for b in blocks])
                np.testing.assert_allclose(margins, Z @ weights, atol=1e-9)
            for records in (500, 2**20, 2**29):  # longer tables are summed in other ways
                total = Weighted(records, features)
                for b in blocks:
                    total.add(b, v[b.y.astype(int)])
                np.testing.assert_allclose(total.value, Z.T @ v, atol=1e-8)


@pytest.mark.parametrize("kind", [np.float32, sparse.csr_matrix], ids=["dense", "sparse"])
def test_some_rows(kind):
    X, y = made(kind), np.arange(500.0)
    table, features = Table(X, y, unit=True), Features(7, radius=0.9)
    chosen = np.array([3, 77, 4, 499])
    for _ in range(2):  # before and after norms are remembered
        (block,) = table.take(chosen).blocks(features)
        np.testing.assert_allclose(block.rows(features), plain(X, features, unit=True)[chosen], atol=1e-12)
        np.testing.assert_array_equal(block.y, chosen)
        list(table.blocks(features))
    assert table.take(slice(None)) is table
    (nobody,) = table.take(np.array([], dtype=np.int64)).blocks(features)
    assert nobody.x.shape == (0, X.shape[1])


def test_nothing_is_remembered_of_very_long_tables_without_kernels(monkeypatch):
    monkeypatch.setattr(native, "_loaded", None)
    monkeypatch.setattr(native, "_tried", True)
    monkeypatch.setattr(tables, "_REMEMBERED", 10)
    table = Table(RNG.normal(size=(30, 2)))
    list(table.blocks(Features(2)))
    assert table._factors == {}


@pytest.mark.skipif(native.kernels() is None, reason="no kernels here")
@pytest.mark.parametrize("room", [True, False])
def test_what_is_remembered_of_a_long_table_in_a_file_lies_in_a_file_if_there_is_room(
    tmp_path, monkeypatch, room
):
    X = np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype=np.float32, shape=(1000, 4))
    X[:], y = RNG.uniform(size=X.shape), np.ones(1000)
    y[5] = np.nan
    in_memory = Table(np.array(X), y)._known(Features(4, radius=1.0))
    monkeypatch.setattr(raw, "_KEPT", 10)
    if not room:
        monkeypatch.setattr(raw.os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError("full")))
    table = Table(X, y)
    on_disk = table._known(Features(4, radius=1.0))
    for one, other in zip(in_memory[1:], on_disk[1:], strict=True):
        np.testing.assert_array_equal(one, other)
        assert isinstance(other, np.memmap) is room
    assert isinstance(table.y, np.memmap) is room
    np.testing.assert_array_equal(table.y, y)


def test_memory_mapped_rows_stay_on_disk(tmp_path):
    X = np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype=np.float32, shape=(1000, 4))
    X[:] = RNG.normal(size=X.shape)
    table = Table(X)
    assert np.shares_memory(table.X, X)
    np.testing.assert_allclose(
        np.concatenate([b.rows(Features(4)) for b in table.blocks(Features(4))]), plain(X, Features(4))
    )


def test_one_row_that_overflows_among_many_blocks(monkeypatch):
    monkeypatch.setattr(tables, "_BLOCK", 200)
    X = np.ones((300, 2))
    X[150] = 1e200
    blocks = list(Table(X).blocks(Features(2)))
    assert len(blocks) > 2
    shrink = np.concatenate([block.shrink for block in blocks])
    np.testing.assert_array_equal(np.flatnonzero(shrink == 0), [150])
    total = Weighted(300, Features(2))
    for block in blocks:
        total.add(block, np.ones(len(block.x)))
    assert total.value.tolist() == [299.0] * 3


@pytest.mark.parametrize("value", [1e200, -1e308, 5e-324])
def test_extreme_rows_are_finite(value):
    X = np.ones((3, 2))
    X[1, 0] = value
    for unit in (False, True):
        for features in (Features(2, radius=1.0), Features(2, centre=np.ones(2), radius=1.0), Features(2)):
            (block,) = Table(X, unit=unit).blocks(features)
            assert np.isfinite(block.norm).all()
            if features.radius:
                assert (block.norm <= 1 + 1e-12).all()
            assert block.shrink is None or (block.shrink[[0, 2]] > 0).all()


def test_what_lies_outside_the_bounds_counts_as_the_bound():
    X = np.array([[5.0, -9.0], [15.0, 0.5], [10.0, 1e9]])
    (block,) = Table(X, bounds=([0, 0], [10, 1])).blocks(Features(2, intercept=0.0))
    np.testing.assert_allclose(block.x, [[0.5, 0.0], [1.0, 0.5], [1.0, 1.0]])


@pytest.mark.parametrize(
    ("X", "options", "message"),
    [
        (np.array([["a"]]), {}, "real numbers"),
        (np.array([[1j]]), {}, "real numbers"),
        (np.zeros(3), {}, "a table, rows by columns"),
        (np.zeros((2, 1)), {"y": np.array(["a", "b"])}, "targets must be real numbers"),
        (np.zeros((2, 1)), {"y": np.array([[0.0], [1.0]])}, "one number per row"),
        (np.zeros((2, 1)), {"y": np.zeros(3)}, "one target per row"),
        (np.zeros((2, 1)), {"bounds": (1, 0)}, "low < high"),
        (np.zeros((2, 1)), {"bounds": (0, np.inf)}, "low < high"),
        (np.zeros((2, 2)), {"bounds": ([0, 0, 0], 1)}, "one per feature"),
        (np.zeros((2, 2)), {"bounds": 3}, "one per feature"),
        (sparse.csr_matrix(np.ones((2, 2))), {"bounds": (-1, 1)}, "sparse"),
    ],
)
def test_refusals(X, options, message):
    with pytest.raises(InvalidValue, match=message):
        Table(X, **options)


@pytest.mark.parametrize("storage", [np.asarray, sparse.csr_array])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("bounds", "unit"), [(None, False), (None, True), ((0, 2), False)])
@pytest.mark.parametrize("intercept", [0.0, 1.0])
def test_a_row_that_is_not_finite_is_blank_and_stays_in_its_place(storage, value, bounds, unit, intercept):
    rows = np.array([[1.0, 0.5], [0.25, 1.0], [0.5, 2.0]])
    odd = rows.copy()
    odd[1, 0] = value
    features = Features(2, centre=0.25, intercept=intercept)
    by_feature = Table(storage(odd), [1.0, 0.0, 1.0], bounds=bounds, unit=unit)
    by_target = Table(storage(rows), [1.0, np.nan, 1.0], bounds=bounds, unit=unit)
    whole = Table(storage(rows[[0, 2]]), [1.0, 1.0], bounds=bounds, unit=unit)
    (expected,) = whole.blocks(features)
    for table in (by_feature, by_target, by_feature.take(np.arange(3)), by_target.take(slice(0, 3))):
        assert len(table) == 3
        (block,) = table.blocks(features)
        np.testing.assert_array_equal(block.norm, [expected.norm[0], 0.0, expected.norm[1]])
        np.testing.assert_array_equal(block.rows(features)[1], np.zeros(features.size))
        np.testing.assert_array_equal(block.rows(features)[[0, 2]], expected.rows(features))
        assert np.isnan(block.y[1])
        gradient = LinearGradient(logistic, features).bounded_sum(
            table, np.ones(features.size), ft.ClipNorm(1.0)
        )
        alone = LinearGradient(logistic, features).bounded_sum(
            whole, np.ones(features.size), ft.ClipNorm(1.0)
        )
        np.testing.assert_allclose(gradient, alone, rtol=1e-12)


@pytest.mark.parametrize(
    "options",
    [{"centre": np.zeros(2)}, {"scale": np.array([1, np.nan, 1])}, {"radius": 0.0}, {"intercept": -1}],
)
def test_refused_maps(options):
    with pytest.raises(InvalidValue):
        Features(3, **options)


@given(st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_a_shrunk_row_never_exceeds_its_radius(seed):
    rng = np.random.default_rng(seed)
    X = rng.standard_t(1, size=(40, 3)) * 10.0 ** rng.uniform(-8, 8)
    features = Features(
        3, rng.normal(size=3), rng.normal(size=(3, 3)), radius=float(10 ** rng.uniform(-3, 3))
    )
    for block in Table(X).blocks(features):
        rows = block.rows(features)
        assert (np.linalg.norm(rows, axis=1) <= features.radius * (1 + 1e-9)).all()
        np.testing.assert_allclose(block.norm, np.linalg.norm(rows, axis=1), rtol=1e-9)


def test_norms_of_sparse_rows_are_those_of_dense_ones_rounded_upwards():
    rng = np.random.default_rng(4)
    rows = rng.uniform(size=(200, 9)) * (rng.uniform(size=(200, 9)) < 0.3)
    features = Features(9, rng.uniform(size=9), rng.uniform(0.1, 9.0, size=9), intercept=0.5)
    dense, stored = (features.squared_norms(x, None) for x in (rows, sparse.csr_array(rows)))
    assert (stored >= dense).all()
    np.testing.assert_allclose(stored, dense, rtol=1e-6)
    centre = features.squared_norms(sparse.csr_array(np.tile(features.centre, (3, 1))), None)
    assert (centre >= 0.25).all()


def stored_often(times):
    """Rows of which the first stores its first column so many times, once for each occurrence of a word."""
    columns = np.concatenate([np.zeros(times), [1, 1]]).astype(np.int32)
    starts = np.array([0, times, times + 1, times + 2], dtype=np.int32)
    return sparse.csr_matrix((np.ones(times + 2), columns, starts), shape=(3, 4))


@pytest.mark.parametrize("bounds", [None, (0, 1), (0, 2)])
@pytest.mark.parametrize("features", [*maps(4), Features(4, centre=0.5), Features(4, scale=2.0)])
def test_a_column_that_is_stored_several_times_in_a_row_is_clipped_as_their_sum(features, bounds):
    X, bound, gradient = stored_often(64), ft.ClipNorm(1.0), LinearGradient(logistic, features)
    w = np.zeros(features.size)
    whole, others = (Table(rows, np.ones(rows.shape[0]), bounds=bounds) for rows in (X, X[1:]))
    move = gradient.bounded_sum(whole, w, bound) - gradient.bounded_sum(others, w, bound)
    assert np.linalg.norm(move) <= 1 + 1e-9
    (block,) = whole.blocks(features)
    np.testing.assert_allclose(block.rows(features), plain(X, features, bounds), atol=1e-6)
    assert X.nnz == 66  # the caller's rows stay as they are


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("form", [np.asarray, sparse.csr_array])
def test_a_copy_reads_its_own_rows_and_no_address_of_the_original(copied, form):
    """A worker of a cluster is sent tables that another one has read."""
    X = np.random.default_rng(0).uniform(size=(5000, 7))
    table, features = Table(form(X), X[:, 0]), Features(7)
    assert table.raw(features) is not None
    batch = table.take(np.arange(5))
    for original in (table, batch):
        other = copied(original)
        assert other._lie is False
        assert other._factors == {}
        found, expected = (
            np.concatenate([block.norm for block in one.blocks(features)]) for one in (other, original)
        )
        assert np.array_equal(found, expected)
    own, theirs = (one.raw(features).stored for one in (table, copied(table)))
    anew = own.order is not None  # sparse rows, which kernels read in a layout of our own
    assert (own.addresses == theirs.addresses) == (copied is copy.copy and not anew)
