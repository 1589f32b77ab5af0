"""Losses and the bounded sums built on them, against derivatives taken numerically and sums written out."""

import numpy as np
import pytest
from scipy import sparse
from scipy.optimize import approx_fprime

import farthing as ft
from farthing.data.tables import Features, Table
from farthing.errors import Unsupported
from farthing.linear import losses
from farthing.linear.losses import Gram, LinearGradient, Moments, Scores
from farthing.noise import native

RNG = np.random.default_rng(1)
X = RNG.normal(size=(300, 4)) * np.array([1, 3, 0.1, 1])
BINARY = (RNG.random(300) < 0.4).astype(float)
CLASSES = RNG.integers(0, 3, 300).astype(float)
REAL = RNG.uniform(size=300)
CASES = [
    (losses.logistic, BINARY, 0),
    (losses.huber_hinge, BINARY, 0),
    (losses.squared, REAL, 0),
    (losses.Huber(0.3), REAL, 0),
    (losses.Pinball(0.8, 0.05), REAL, 0),
    (losses.LogLinear(), REAL, 0),
    (losses.multinomial, CLASSES, 3),
    (losses.one_against_rest, CLASSES, 3),
]
FEATURES = Features(4, centre=0.2, scale=np.array([1, 0.5, 2, 1.0]), radius=2.0)


def weights(outputs, scale=1.0):
    return scale * RNG.normal(size=(FEATURES.size, outputs) if outputs else FEATURES.size)


def each_gradient(loss, y, w):
    """One gradient a record, materialised."""
    (block,) = Table(X, y).blocks(FEATURES)
    z = block.rows(FEATURES)
    residual = loss.residual(z @ w, y)
    return z[:, :, None] * residual[:, None, :] if residual.ndim == 2 else z * residual[:, None]


@pytest.mark.parametrize(("loss", "y", "outputs"), CASES, ids=lambda case: type(case).__name__)
def test_residuals_are_derivatives(loss, y, outputs):
    for place in range(20):
        at = RNG.normal(size=max(outputs, 1)) * 3
        target = y[place : place + 1]

        def value(m, target=target):
            return loss.value(m[None] if outputs else m, target)[0]

        found = loss.residual(at[None] if outputs else at, target)
        np.testing.assert_allclose(np.ravel(found), approx_fprime(at, value, 1e-7), atol=2e-6)


@pytest.mark.parametrize(("loss", "y", "outputs"), CASES, ids=lambda case: type(case).__name__)
def test_slope_and_curvature_bound_what_they_say(loss, y, outputs):
    m = RNG.normal(size=(5000, outputs) if outputs else 5000) * 4
    y = np.resize(y, 5000)
    residual = loss.residual(m, y).reshape(5000, -1)
    if np.isfinite(loss.slope):
        assert np.linalg.norm(residual, axis=1).max() <= loss.slope + 1e-12
    moved = RNG.normal(size=m.shape) * 1e-3
    change = (loss.residual(m + moved, y).reshape(5000, -1)) - residual
    ratio = np.linalg.norm(change, axis=1) / np.linalg.norm(moved.reshape(5000, -1), axis=1)
    assert ratio.max() <= loss.curvature * (1 + 1e-3)


@pytest.mark.parametrize("clip", [0.05, 1.0, 1e3])
@pytest.mark.parametrize(("loss", "y", "outputs"), CASES, ids=lambda case: type(case).__name__)
def test_the_gradient_is_the_sum_of_clipped_gradients(loss, y, outputs, clip):
    w = weights(outputs)
    every = each_gradient(loss, y, w).reshape(300, -1)
    expected = ft.ClipNorm(clip).apply(every).sum(axis=0).reshape(w.shape)
    found = LinearGradient(loss, FEATURES).bounded_sum(Table(X, y), w, ft.ClipNorm(clip))
    np.testing.assert_allclose(found, expected, atol=1e-9)


@pytest.mark.parametrize(("loss", "y", "outputs"), CASES, ids=lambda case: type(case).__name__)
def test_one_record_moves_a_sum_by_the_bound_at_most(loss, y, outputs):
    bound, gradient, w = ft.ClipNorm(0.3), LinearGradient(loss, FEATURES), weights(outputs, 30.0)
    whole = gradient.bounded_sum(Table(X * 100, y), w, bound)
    for gone in range(0, 300, 50):
        kept = np.delete(np.arange(300), gone)
        less = gradient.bounded_sum(Table(X[kept] * 100, y[kept]), w, bound)
        assert np.linalg.norm(whole - less) <= 0.3 * (1 + 1e-9)


def test_rows_that_overflow_count_as_zero():
    rows = np.array([[1.0, 0.0], [1e308, -1e308], [0.5, 0.5]])
    y = np.array([1.0, 1.0, 0.0])
    for features in (Features(2), Features(2, centre=np.ones(2), scale=3.0, radius=5.0)):
        gradient = LinearGradient(losses.logistic, features)
        w = np.array([1e10, -1e10, 0.0])
        found = gradient.bounded_sum(Table(rows, y), w, ft.ClipNorm(1.0))
        without = gradient.bounded_sum(Table(rows[[0, 2]], y[[0, 2]]), w, ft.ClipNorm(1.0))
        np.testing.assert_allclose(found, without)


def test_scores_are_clipped_losses_of_every_candidate():
    candidates = RNG.normal(size=(FEATURES.size, 6))
    (block,) = Table(X, BINARY).blocks(FEATURES)
    expected = [
        -np.minimum(losses.logistic.value(block.rows(FEATURES) @ w, BINARY), 0.8).sum() for w in candidates.T
    ]
    found = Scores(losses.logistic, FEATURES).bounded_sum(
        Table(X, BINARY), candidates, ft.ClipValue(-0.8, 0.0)
    )
    np.testing.assert_allclose(found, expected)


def test_moments_and_gram():
    (block,) = Table(X, REAL).blocks(FEATURES)
    z = block.rows(FEATURES)
    both = ft.ClipNorm(1.5).apply(np.hstack([z, z * z]))
    np.testing.assert_allclose(
        Moments(FEATURES).bounded_sum(Table(X), None, ft.ClipNorm(1.5)), both.sum(axis=0)
    )
    rows = ft.ClipNorm(1.2).apply(np.column_stack([z, 0.5 * REAL]))
    np.testing.assert_allclose(
        Gram(FEATURES, target=0.5).bounded_sum(Table(X, REAL), None, ft.ClipOuter(1.2)), rows.T @ rows
    )


def test_no_records_at_all():
    empty = Table(np.empty((0, 4)), np.empty(0))
    assert (
        not LinearGradient(losses.logistic, FEATURES).bounded_sum(empty, weights(0), ft.ClipNorm(1.0)).any()
    )
    assert not Gram(FEATURES).bounded_sum(empty, None, ft.ClipOuter(1.0)).any()
    assert not Moments(FEATURES).bounded_sum(empty, None, ft.ClipNorm(1.0)).any()
    scores = Scores(losses.logistic, FEATURES).bounded_sum(empty, np.zeros((5, 2)), ft.ClipValue(-1.0, 0.0))
    assert not scores.any()


def test_only_plain_norms():
    with pytest.raises(Unsupported):
        LinearGradient(losses.logistic, FEATURES).bounded_sum(
            Table(X, BINARY), weights(0), ft.ClipNorm(1.0, scale=np.ones(5))
        )


@pytest.mark.skipif(native.kernels() is None, reason="no kernels here")
class TestKernels:
    """The kernel's sums against those of the blocks, which everything above holds to account."""

    @staticmethod
    def both(monkeypatch, loss, features, table, w, clip, lot=None):
        found = []
        for kernels in (native.kernels(), None):
            with monkeypatch.context() as patched:
                patched.setattr(native, "_loaded", kernels)
                records = table if lot is None else table.take(lot)
                found.append(LinearGradient(loss, features).bounded_sum(records, w, ft.ClipNorm(clip)))
        return found

    @pytest.mark.parametrize("kind", [np.float64, np.float32, np.uint8, np.bool_])
    @pytest.mark.parametrize("width", [1, 7, 8, 23, 124])
    @pytest.mark.parametrize(
        "loss", [losses.logistic, losses.huber_hinge, losses.HuberHinge(0.1), losses.squared]
    )
    def test_sums(self, monkeypatch, loss, width, kind):
        rng = np.random.default_rng(width)
        rows = (rng.random((203, width)) * 2).astype(kind)
        y = (rng.random(203) < 0.4).astype(np.int8)
        maps = [
            (Features(width), False),
            (Features(width, intercept=0.0, radius=0.5), True),
            (Features(width, centre=0.1, scale=rng.random(width) + 0.5, radius=1.0), True),
            (Features(width, scale=rng.normal(size=(width, width))), False),
        ]
        lots = [
            None,
            np.arange(0),
            np.array([202]),
            np.sort(rng.choice(203, 77, replace=False)),
            np.zeros(3, int),
        ]
        for features, unit in maps:
            table, w = Table(rows, y, unit=unit), rng.normal(size=features.size)
            for lot in lots:
                quick, plain = self.both(monkeypatch, loss, features, table, w, 0.3, lot)
                np.testing.assert_allclose(quick, plain, rtol=1e-11, atol=1e-11)

    def test_it_is_the_kernel_that_runs(self, monkeypatch):
        table, w = Table(X, BINARY), np.zeros(FEATURES.size)
        monkeypatch.setattr(Table, "blocks", None)
        LinearGradient(losses.logistic, FEATURES).bounded_sum(table, w, ft.ClipNorm(1.0))
        LinearGradient(losses.logistic, FEATURES).bounded_sum(table.take(np.array([1])), w, ft.ClipNorm(1.0))

    @pytest.mark.parametrize("loss", [losses.logistic, losses.huber_hinge, losses.squared])
    @pytest.mark.parametrize("scale", [1e-300, 1e5, 1e160, 1e308])
    def test_no_term_passes_the_clip_whatever_the_row(self, monkeypatch, loss, scale):
        rows = np.array([[scale, 1.0], [scale, -scale], [0.0, 0.0], [1.0, 1.0]])
        table, features = Table(rows, np.array([0.0, 1.0, 1.0, 0.0])), Features(2)
        for w in (np.array([1.0, -1.0, 0.5]), np.array([1e200, 1e200, 1.0]), np.array([-1e308, 1e308, 0.0])):
            with np.errstate(all="ignore"):
                for lot in (None, *(np.array([i]) for i in range(4))):
                    quick, plain = self.both(monkeypatch, loss, features, table, w, 2.0, lot)
                    assert np.linalg.norm(quick) <= 2.0 * (4 if lot is None else 1) * (1 + 1e-12)
                    if w[0] == 1.0:  # else margins cancel, and their rounding decides
                        np.testing.assert_allclose(quick, plain, rtol=1e-11, atol=1e-11)

    def test_what_no_kernel_reads_goes_the_other_way(self, monkeypatch):
        w, features = RNG.normal(size=5), Features(4)
        odd = [X[:, ::-1], X.astype(">f8"), np.asfortranarray(X), np.rint(X).astype(np.int64), X[::2]]
        for rows in odd:
            table = Table(rows, BINARY[: len(rows)])
            quick, plain = self.both(monkeypatch, losses.logistic, features, table, w, 1.0)
            np.testing.assert_allclose(quick, plain, rtol=1e-12)

    @pytest.mark.parametrize("loss", [losses.logistic, losses.HuberHinge(0.1), losses.squared])
    def test_sums_of_sparse_rows(self, monkeypatch, loss):
        rng = np.random.default_rng(5)
        rows = sparse.random_array((500, 40), density=0.1, format="csr", rng=rng)
        y = (rng.random(500) < 0.4).astype(float)
        y[3] = np.nan
        shuffled = rows.copy()
        shuffled.indices[:2] = shuffled.indices[1::-1]  # which no kernel reads
        for table in (
            Table(rows, y),
            Table(rows, y, unit=True),
            Table(shuffled, y),
            Table(rows * 3, y, bounds=(0, 2)),
        ):
            for features in (Features(40), Features(40, centre=0.1, scale=rng.random(40) + 0.5, radius=1.0)):
                w = rng.normal(size=features.size)
                quick, plain = self.both(monkeypatch, loss, features, table, w, 0.3)
                np.testing.assert_allclose(quick, plain, rtol=1e-11, atol=1e-11)

    def test_sparse_rows_are_read_where_they_lie(self, monkeypatch):
        rows = sparse.random_array((50, 9), density=0.3, format="csr", rng=np.random.default_rng(1))
        table, features = Table(rows, np.ones(50)), Features(9)
        list(table.blocks(features))  # measures norms
        monkeypatch.setattr(Table, "blocks", None)
        assert (
            LinearGradient(losses.logistic, features).bounded_sum(table, np.zeros(10), ft.ClipNorm(1.0)).any()
        )

    def test_a_target_that_is_not_finite_counts_as_nothing(self, monkeypatch):
        some, features, w = BINARY > 0, Features(4), RNG.normal(size=5)
        table = Table(X, np.where(some, BINARY, np.nan))
        quick, plain = self.both(monkeypatch, losses.logistic, features, table, w, 1.0)
        np.testing.assert_allclose(quick, plain, rtol=1e-11)
        alone, _ = self.both(monkeypatch, losses.logistic, features, Table(X[some], BINARY[some]), w, 1.0)
        np.testing.assert_allclose(quick, alone, rtol=1e-11)

    def test_a_place_that_is_no_row_is_refused(self):
        table = Table(X, BINARY)
        for place in (300, 2**40):
            with pytest.raises(IndexError):
                LinearGradient(losses.logistic, FEATURES).bounded_sum(
                    table.take(np.array([place])), np.zeros(FEATURES.size), ft.ClipNorm(1.0)
                )
