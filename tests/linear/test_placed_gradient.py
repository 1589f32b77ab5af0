"""Gradients at weights that were chosen against the records."""

import numpy as np
import pytest
from scipy import sparse

from farthing.data import weighted
from farthing.data.tables import Features, Table
from farthing.linear.losses import LinearGradient, PlacedGradient, huber_hinge, logistic, multinomial, squared
from farthing.noise import native
from farthing.queries.bounds import ClipNorm

CLIP = 1e-3


@pytest.mark.parametrize("loss", [squared, huber_hinge])
@pytest.mark.parametrize("radius", [None, 0.5])
@pytest.mark.parametrize("kind", [np.float64, np.float32])
def test_one_record_moves_the_sum_by_one_clip_at_weights_chosen_against_the_others(
    monkeypatch, loss, radius, kind
):
    """The sign of a residual is that of a rounding error, which must not follow from who is there."""
    rng = np.random.default_rng(0)
    gradient = PlacedGradient(loss, Features(20, intercept=1.0, radius=radius))
    for count in (2, 8, 9, 130):
        X, y = rng.uniform(-1, 1, size=(count, 20)).astype(kind), np.zeros(count)
        places = rng.integers(weighted.PLACES, size=count)
        for other in (1, count // 2, count - 1):
            u = rng.normal(size=20) * 1e16
            w, sums = np.append(u, -X[other].astype(np.float64) @ u), []
            for members in (np.arange(count), np.arange(1, count)):
                monkeypatch.setattr(weighted, "drawn_places", lambda _, m=members, p=places: p[m])
                sums.append(gradient.bounded_sum(Table(X[members], y[members]), w, ClipNorm(CLIP)))
            assert np.linalg.norm(sums[0] - sums[1]) <= CLIP * (1 + 1e-9)


@pytest.mark.parametrize(("loss", "outputs"), [(logistic, 0), (squared, 2), (multinomial, 3)])
def test_the_sum_is_that_of_the_gradient(loss, outputs):
    rng = np.random.default_rng(1)
    features = Features(4, radius=1.5)
    table = Table(rng.normal(size=(300, 4)), rng.integers(2, size=300))
    w = rng.normal(size=(5, outputs) if outputs else 5)
    for some in (table, table.take(np.arange(7)), table.take(np.arange(0))):
        sums = [
            made(loss, features).bounded_sum(some, w, ClipNorm(0.7))
            for made in (LinearGradient, PlacedGradient)
        ]
        np.testing.assert_allclose(*sums, rtol=1e-12, atol=1e-12)


def test_a_record_that_no_kernel_reads_moves_a_sparse_sum_by_one_clip():
    """A row that is not finite turns kernels off for all others, whose last bits must not notice."""
    native.kernels()
    rows, w = np.tile([1.0, 1.0, 1.0, 1.0], (4000, 1)), np.array([1e20, 100.0, -1e20, 0.0, 0.0])
    gradient = PlacedGradient(logistic, Features(4))
    tables = [rows, np.vstack([rows, [[np.nan, 1.0, 1.0, 1.0]]])]
    sums = [
        gradient.bounded_sum(Table(sparse.csr_array(X), np.ones(len(X))), w, ClipNorm(CLIP)) for X in tables
    ]
    assert np.linalg.norm(sums[0] - sums[1]) <= CLIP * (1 + 1e-9)


def test_labels_that_hang_on_last_bits_are_judged_alike_beside_other_rows(monkeypatch):
    """Rows on the border of public weights, in `Evaluation` of clients that are not asked over a network."""
    rng, d, n = np.random.default_rng(0), 33, 150
    w, X = np.append(rng.normal(size=d), 0.0), rng.normal(size=(n, d))
    for _ in range(3):
        X = X - np.outer(X @ w[:d] / (w[:d] @ w[:d]), w[:d])
    places = rng.integers(0, weighted.PLACES, n)  # each record's own, whoever else is there
    gradient = LinearGradient(logistic, Features(d))

    def hits(kept):
        monkeypatch.setattr(weighted, "drawn_places", lambda count: places[kept])
        parts = gradient.judged(Table(X[kept], np.ones(len(kept))), w)
        return sum(float(found @ there) for _, found, there in parts)

    whole = hits(np.arange(n))
    assert 0 < whole < n
    assert max(abs(whole - hits(np.delete(np.arange(n), place))) for place in range(n)) <= 1
