"""Rows of zeros and ones as places: the same sums as a table of them."""

import numpy as np
import pytest

import farthing as ft
from farthing.data.tables import Features, Table
from farthing.errors import InvalidValue, Unsupported
from farthing.federated.draws import Indicators
from farthing.linear.losses import LinearGradient, logistic, multinomial

RNG = np.random.default_rng(5)
X = (RNG.random((300, 11)) < 0.3).astype(np.uint8)
X[7] = 0  # a row without ones
y = RNG.integers(0, 2, 300)


@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize(
    "features",
    [
        Features(11),
        Features(11, intercept=0.0, radius=1.2),
        Features(11, centre=RNG.random(11), scale=RNG.uniform(0.5, 2, 11), intercept=0.3),
    ],
)
def test_sums_are_those_of_the_dense_table(features, unit):
    rows, table = Indicators.of(X, y, unit=unit), Table(X, y, unit=unit)
    for gradient, w in [
        (LinearGradient(logistic, features), RNG.normal(size=features.size)),
        (LinearGradient(multinomial, features), RNG.normal(size=(features.size, 2))),
    ]:
        for places in (slice(None), np.array([3, 7, 7, 250])):
            ours = gradient.bounded_sum(rows.take(places), w, ft.ClipNorm(0.7))
            np.testing.assert_allclose(ours, gradient.bounded_sum(table.take(places), w, ft.ClipNorm(0.7)))


def test_materialised_rows_agree():
    features = Features(11, intercept=0.5, radius=1.5)
    ours = [block.rows(features) for block in Indicators.of(X, y).blocks(features)]
    theirs = [block.rows(features) for block in Table(X, y).blocks(features)]
    np.testing.assert_allclose(np.concatenate(ours), np.concatenate(theirs))


@pytest.mark.parametrize("intercept", [0.0, 2.0])
@pytest.mark.parametrize("unit", [False, True])
def test_sums_of_clients_are_those_of_their_rows(unit, intercept):
    features = Features(11, intercept=intercept, radius=1.0 if unit else None)
    owners, factors = np.repeat(np.arange(3), [100, 0, 200]), RNG.normal(size=300)
    (block,) = Indicators.of(X, y, unit=unit).blocks(features)
    rows = block.rows(features)
    expected = np.array([factors[owners == n] @ rows[owners == n] for n in range(3)])
    np.testing.assert_allclose(block.sums(features, factors, owners, 3), expected, atol=1e-12)


def test_a_place_takes_a_byte():
    assert Indicators.of(X).places.dtype == np.uint8
    assert Indicators.of(np.eye(300)).places.dtype == np.uint16
    assert len(Indicators.of(X)) == 300


@pytest.mark.parametrize(
    ("places", "width", "targets", "what"),
    [
        (np.array([[0.5]]), 3, None, "integers"),
        (np.array([[4]]), 3, None, "between 0 and width=3"),
        (np.array([[-1]]), 3, None, "between 0 and width=3"),
        (np.array([[1]]), 0, None, "width"),
        (np.array([[1]]), 3, [1, 0], "one target per row"),
    ],
)
def test_nonsense_is_refused(places, width, targets, what):
    with pytest.raises(InvalidValue, match=what):
        Indicators(places, width, targets)


def test_other_refusals():
    with pytest.raises(InvalidValue, match="zeros and ones"):
        Indicators.of(np.array([[2]]))
    with pytest.raises(Unsupported, match="feature by feature"):
        list(Indicators.of(X).blocks(Features(11, scale=np.eye(11))))
