"""Rows as whole numbers: the same bits from kernels and numpy, exact sums, and bounds that hold exactly."""

from fractions import Fraction

import numpy as np
import pytest

import farthing as ft
from farthing.data import raw
from farthing.data.features import Features
from farthing.data.rounded import FURTHEST, RowLengths, RowProducts
from farthing.data.tables import Table
from farthing.linear.methods.leastsquares import RowScatter
from farthing.noise import native

kernels = pytest.mark.skipif(native.kernels() is None, reason="no kernels here")
KINDS = (np.float64, np.float32, np.uint8)


def table(rng, rows, width, kind, blank=True):
    """Rows in [0, 1] with ends, halves of units and tiny numbers among them, and some that are blank."""
    x = rng.uniform(size=(rows, width))
    x[rng.uniform(size=x.shape) < 0.3] = rng.choice([0.0, 1.0, 0.5, 2.0**-30, 1 - 2.0**-24])
    x, y = x.astype(kind), np.ones(rows)
    if blank:
        y[rows // 2 :: 7] = np.nan
        if kind is not np.uint8:
            x[rows // 3, width // 2] = np.nan
    return x, y


def diagonal(rng, width, constant=1.0):
    return Features(width, rng.uniform(size=width), 2.0 ** rng.uniform(-3, 4, width), constant)


def whitening(rng, width, constant=0.7):
    scale = np.triu(rng.normal(size=(width, width)) / width + 3 * np.eye(width))
    return Features(width, rng.uniform(-0.1, 1.1, width), scale, constant)


def by_both(monkeypatch, make, *given):
    found = []
    for loaded in (native.kernels(), None):
        with monkeypatch.context() as patched:
            patched.setattr(native, "_loaded", loaded)
            found.append(make(*given))
    return found


@kernels
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 7, 8, 15, 16, 17, 40])
@pytest.mark.parametrize("rows", [1, 2, 127, 129, 300])
def test_kernels_and_numpy_give_the_same_bits(monkeypatch, kind, width, rows):
    rng = np.random.default_rng(rows * width)
    x, y = table(rng, rows, width, kind)

    def scatter(*given):
        return Table(x, y, bounds=(0, 1)).scatter(*given)

    for constant in (0.0, 1.0):
        features = diagonal(rng, width, constant)
        for clip in (1.0, 1e9):
            np.testing.assert_array_equal(*by_both(monkeypatch, scatter, features, clip, 1.0))
        features = whitening(rng, width, constant)
        assert RowLengths.of(features) is not None
        one, other = by_both(monkeypatch, lambda at: Table(x, y, bounds=(0, 1))._known(at), features)
        np.testing.assert_array_equal(one[2], other[2])
        np.testing.assert_array_equal(one[1], other[1])


@kernels
def test_the_smallest_units_are_read_by_kernels_too(monkeypatch):
    """Features of very different reach, so that units differ by 2⁸ and some are raised."""
    rng = np.random.default_rng(4)
    x, y = table(rng, 200, 20, np.float32)
    features = Features(20, 0.5, 2.0 ** np.arange(-10, 10), 1.0)
    products = RowProducts.of(features, 30.0, 1.0)
    assert products.unit.max() / products.unit.min() == 256
    np.testing.assert_array_equal(
        *by_both(monkeypatch, lambda: Table(x, y, bounds=(0, 1)).scatter(features, 30.0, 1.0))
    )


@pytest.mark.parametrize("clip", [0.3, 2.0, 1e9])
def test_a_sum_is_exactly_that_of_single_records_and_each_keeps_its_bound(clip):
    rng = np.random.default_rng(5)
    x, y = table(rng, 250, 11, np.float64, blank=False)
    features = diagonal(rng, 11)
    found = Table(x, y, bounds=(0, 1)).scatter(features, clip, 1.0)
    single = [Table(x[[k]], y[[k]], bounds=(0, 1)).scatter(features, clip, 1.0) for k in range(250)]
    for term in single:  # z zᵀ has the norm Σ z², here without rounding
        assert sum(Fraction(float(each)) for each in np.diag(term)) <= Fraction(clip) ** 2
    exact = [[sum(Fraction(float(term[j, k])) for term in single) for k in range(12)] for j in range(12)]
    assert [[Fraction(float(each)) for each in row] for row in found] == exact
    if clip < 1:  # rows are shrunk to the bound, and not by much more
        assert max(np.trace(term) for term in single) > 0.98 * clip**2


@pytest.mark.parametrize("odd", [np.nan, np.inf, 7.0, -2.0])
def test_one_record_of_any_kind_moves_the_sum_by_its_own_term_alone(odd):
    """Whether kernels read a table depends on such a record: the terms of all others must not."""
    rng = np.random.default_rng(6)
    x, y = table(rng, 300, 9, np.float32, blank=False)
    more = np.vstack([x[:100], np.full((1, 9), odd, np.float32), x[100:]])
    features, clip, white = diagonal(rng, 9), 2.0, whitening(rng, 9)
    one, other = Table(x, y, bounds=(0, 1)), Table(more, np.ones(301), bounds=(0, 1))
    alone = Table(more[[100]], np.ones(1), bounds=(0, 1)).scatter(features, clip, 1.0)
    moved = other.scatter(features, clip, 1.0) - one.scatter(features, clip, 1.0)
    np.testing.assert_array_equal(moved, alone)
    assert np.linalg.norm(moved) <= clip**2
    assert (np.linalg.norm(moved) == 0) is not np.isfinite(odd)
    norms = [each._known(white)[2] for each in (one, other)]
    np.testing.assert_array_equal(norms[0], np.delete(norms[1], 100))


def exact_squares(features, row):
    """|[A (x - c); b]|² of one row, as a fraction."""
    off = [Fraction(float(a)) - Fraction(float(c)) for a, c in zip(row, features.centre, strict=True)]
    scale = [[Fraction(float(each)) for each in line] for line in features.scale]
    z = [sum(a * b for a, b in zip(line, off, strict=True)) for line in scale]
    return sum(each * each for each in z) + Fraction(features.intercept) ** 2


@pytest.mark.parametrize("kind", [np.float64, np.float32])
@pytest.mark.parametrize("form", ["near whole", "between", "at random", "long", "centre far away"])
def test_no_norm_is_above_its_bound_nor_far_below(kind, form):
    """Rows on the edges between two whole numbers, in the direction in which A stretches most."""
    rng = np.random.default_rng(7)
    for width in (1, 2, 6):
        features = whitening(rng, width)
        if form == "long":
            u, _, v = np.linalg.svd(rng.normal(size=(width, width)))
            features = Features(width, 0.4, (u * np.geomspace(40, 0.1, width)) @ v, 0.0)
        if form == "centre far away":
            features = Features(width, rng.uniform(-3, 4, width), 2 * np.eye(width), 0.1)
        lengths = RowLengths.of(features)
        assert lengths is not None
        grid, x = lengths.grid, rng.uniform(size=(40, width))
        if form in ("between", "long"):
            q = np.floor(grid.whole(x)) + rng.choice([0.5 - 1e-9, 0.5 + 1e-9, 0.5], size=x.shape)
            x = np.clip(grid.centre[:width].astype(float) + q / grid.factor[:width].astype(float), 0, 1)
            x[:4] = [[0.0] * width, [1.0] * width, [2.0**-40] * width, [1 - 2.0**-24] * width]
        x = x.astype(kind)
        bounds = Table(x, np.ones(len(x)), bounds=(0, 1))._known(features)[2]
        for row, bound in zip(x, bounds, strict=True):
            square = exact_squares(features, row)
            assert square <= Fraction(float(bound)) ** 2
            if bound > lengths.least:
                assert (Fraction(float(bound)) - 2 * Fraction(lengths.slack)) ** 2 <= square or (
                    bound < 2 * lengths.slack
                )


def test_rows_are_added_up_exactly_beyond_32_bits():
    """The largest whole numbers, in more rows than one sum of 32 bits holds, and products next to its end."""
    n = 3000
    x = np.ones((n, 3), np.float32)
    found = Table(x, np.ones(n), bounds=(0, 1)).scatter(Features(3, 0.0, 2047 / 2048, 0.0), 1e9, 1.0)
    q = RowProducts.of(Features(3, 0.0, 2047 / 2048, 0.0), 1e9, 1.0).grid.whole(x[:1].astype(float))
    assert 1000 < q.max() <= FURTHEST
    np.testing.assert_array_equal(found / found[0, 0], np.ones((3, 3)))
    assert (
        found[0, 0]
        == n
        * Table(x[:1], np.ones(1), bounds=(0, 1)).scatter(Features(3, 0.0, 2047 / 2048, 0.0), 1e9, 1.0)[0, 0]
    )
    scale = np.full((40, 40), 32700 * 2047 * 2.0**-29)  # all numbers of the matrix would be nearly 2¹⁵
    lengths = RowLengths.of(Features(40, 0.0, scale, 0.0))
    assert lengths is not None
    assert np.abs(lengths.matrix).sum(axis=0).max() * FURTHEST < 2**31
    ones = np.ones((9, 40), np.float32)
    stored = raw.stored(ones, np.ones(9))
    bounds = lengths.of_rows(ones.astype(float))
    np.testing.assert_allclose(bounds, 40 * np.sqrt(40) * scale[0, 0], atol=2 * lengths.slack)
    if native.kernels() is not None:
        np.testing.assert_array_equal(lengths.of_stored(stored, None)[2], bounds)


def test_public_facts_decide_whether_rows_are_rounded():
    x, y = np.random.default_rng(8).uniform(size=(50, 4)), np.ones(50)
    features = Features(4, 0.5, 2.0, 1.0)
    assert Table(x, y).scatter(features, 1.0, 1.0) is None  # nothing says that rows lie in [0, 1]
    assert Table(x, y, bounds=(0, 1), unit=True).scatter(features, 1.0, 1.0) is None
    assert Table(x, y, bounds=(0, 1)).scatter(features, 1.0, 1e-4) is None  # too coarse
    assert Table(x, y, bounds=(0, 1)).scatter(Features(3), 1.0, 1.0) is None  # another width
    assert Table(x, y, bounds=(0, 1)).scatter(features, 1.0, 1.0) is not None
    assert Table(x, y, bounds=(0, 1)).take(np.arange(9)).scatter(features, 1.0, 1.0) is not None
    long = np.diag([1.0, 1e4])  # so long that half a unit is longer than a whitened row
    assert RowLengths.of(Features(2, 0.5, long)) is None
    assert RowLengths.of(Features(2, 0.5, np.eye(2), radius=1.0)) is None


@pytest.mark.parametrize("bounds", [(0, 1), (-300, 700)])
def test_rounded_products_are_near_the_plain_ones(bounds):
    rng = np.random.default_rng(9)
    low, high = bounds
    x = rng.uniform(size=(500, 6)) ** 3
    features, plain = Features(6, 0.3, np.full(6, 3.0), 1.0), Features(6, intercept=0.0)
    rows = Table(x * (high - low) + low, np.ones(500), bounds=bounds)
    for clip in (1.5, 1e3):
        found = [
            RowScatter(plain, features, coarsest).bounded_sum(rows, None, ft.ClipOuter(clip)) / 500
            for coarsest in (0.0, 1.0)
        ]
        np.testing.assert_allclose(*found, atol=3e-3)
        assert np.abs(found[0] - found[1]).max() > 0
