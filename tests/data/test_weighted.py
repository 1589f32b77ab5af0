"""Tables with weights: sums are those of single records times their weights, within the same bounds."""

import numpy as np
import pytest
from scipy import sparse

import farthing as ft
from farthing.data.tables import Features, Table
from farthing.data.weighted import PLACES, WeightedTable, placed, weighed
from farthing.errors import InvalidValue, Unsupported
from farthing.linear.losses import LinearGradient, logistic, multinomial, squared
from farthing.linear.methods.centroids import ClassSums
from farthing.linear.methods.descent import MARGIN, Norms, Spread, Stretch
from farthing.linear.methods.leastsquares import RowMoments, RowScatter, Slope, Targets
from farthing.linear.methods.sufficient import Statistics
from farthing.queries.bounds import ClipNorm, ClipOuter, ClipValue

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(40, 3)), RNG.integers(0, 2, 40).astype(float)
SHARES = np.round(RNG.uniform(size=40), 3)
PLAIN, CENTRED = Features(3), Features(3, 0.2, np.array([1.0, 2.0, 0.5]), 0.7)
BALL = Features(3, intercept=0.0, radius=1.0)
W, W3 = RNG.normal(size=4), RNG.normal(size=(4, 3))
SLOPE = Slope(CENTRED, 0.3, 0.8, 0.5)
SUMS = {
    "gradient": (LinearGradient(logistic, CENTRED), ClipNorm(0.5), W),
    "gradients of classes": (LinearGradient(multinomial, CENTRED), ClipNorm(0.5), W3),
    "squares": (LinearGradient(squared, PLAIN), ClipNorm(0.5), W),
    "stretch": (Stretch(LinearGradient(logistic, CENTRED)), MARGIN, W),
    "norms": (Norms(3, 3.0 * 2.0 ** -np.arange(6)), ClipNorm(1.0), None),
    "matrix": (Spread(BALL, True), ClipNorm(1.3), None),
    "diagonal": (Spread(BALL, False), ClipNorm(1.3), None),
    "classes": (ClassSums(BALL), ClipNorm(1.0), None),
    "targets": (Targets(0.5, 2, 0.1), ClipValue(-0.5, 0.2), None),
    "rows": (RowMoments(PLAIN, CENTRED), ClipNorm(1.0), None),
    "products": (RowScatter(PLAIN, CENTRED), ClipOuter(1.0), None),
    "moments": (Statistics(CENTRED, 0.5, 1.0), ClipOuter(1.0), None),
    "slope": (SLOPE, SLOPE.bound, W),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_is_that_of_single_records_times_their_weights(name):
    contribution, bound, w = SUMS[name]
    each = [contribution.bounded_sum(Table(X[i : i + 1], Y[i : i + 1]), w, bound) for i in range(len(X))]
    wanted = sum(share * term for share, term in zip(SHARES, each, strict=True))
    table = WeightedTable(Table(X, Y), SHARES)
    np.testing.assert_allclose(contribution.bounded_sum(table, w, bound), wanted, atol=1e-12)
    batch = np.array([3, 8, 30])
    some = sum(SHARES[i] * each[i] for i in batch)
    np.testing.assert_allclose(contribution.bounded_sum(table.take(batch), w, bound), some, atol=1e-12)


def test_shares_beyond_one_are_clamped_and_others_count_as_nothing():
    table = WeightedTable(Table(np.ones((5, 1)), np.ones(5)), np.array([3.0, -1.0, np.nan, np.inf, 0.5]))
    assert table.shares.tolist() == [1.0, 0.0, 0.0, 0.0, 0.5]
    assert ClipNorm(0.1).norm() >= LinearGradient(logistic, Features(1)).bounded_sum(
        table.take(slice(0, 1)), np.zeros(2), ClipNorm(0.1)
    ).max(initial=0)
    with pytest.raises(InvalidValue, match="one weight per row"):
        WeightedTable(Table(np.ones((2, 1))), np.ones(3))


def test_values_away_from_zero_cannot_be_weighed():
    with pytest.raises(Unsupported, match="may be 0"):
        weighed(np.ones((0, 1)), np.ones(0), ClipValue(0.5, 1.0))
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6)).over(WeightedTable(Table(X, Y), SHARES))
    query = ft.Query(ft.Everyone(), Targets(0.0), ClipValue(0.5, 1.0), ft.Gaussian(5.0))
    with pytest.raises(Unsupported, match="may be 0"):
        ledger.ask(query)
    assert ledger.share == 0


@pytest.mark.parametrize("clip", [0.5, 2.0])
def test_replaced_outer_products_move_a_sum_no_further_than_their_bound(clip):
    scatter, bound = RowScatter(PLAIN, CENTRED), ClipOuter(clip)
    sums = [
        scatter.bounded_sum(WeightedTable(Table(X[i : i + 1], Y[:1]), SHARES[i : i + 1]), None, bound)
        for i in range(len(X))
    ]
    largest = bound.sensitivity(ft.Adjacency.REPLACE_ONE)
    assert max(np.linalg.norm(a - b) for a in sums for b in sums) <= largest * (1 + 1e-12)


@pytest.mark.parametrize("count", [1, 2, 200])
@pytest.mark.parametrize("kind", [np.float64, np.float32, np.uint8])
def test_every_row_is_there_once_with_its_target(count, kind):
    X = np.arange(1, count + 1).astype(kind)[:, None]
    found = []
    for table in placed(Table(X, X[:, 0])):
        assert len(table) == PLACES
        for block in table.blocks(Features(1)):
            np.testing.assert_array_equal(block.x[:, 0], block.y)
            assert not block.y[block.weight == 0].any()
            found += block.y[block.weight > 0].tolist()
    assert sorted(found) == X[:, 0].tolist()


def test_sparse_rows_are_left_where_they_are():
    table = Table(sparse.csr_array(np.eye(5)), np.ones(5))
    assert list(placed(table)) == [table]


def test_rows_that_are_mapped_are_refused():
    for table in (Table(np.ones((2, 1)), np.ones(2), unit=True), Table(np.ones((2, 1)), bounds=(0, 2))):
        with pytest.raises(Unsupported, match="without bounds or scaling"):
            next(placed(table))
