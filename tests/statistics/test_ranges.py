"""Private bounds: a public grid of powers of two, and what noise hides stays outside."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import farthing as ft
from farthing.noise.lattice import SeededStream
from farthing.statistics.ranges import COARSE, EDGES, FINE, Shares, _ends, by_power


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_a_number_lies_between_the_edges_of_its_cell(value: float) -> None:
    (code,) = by_power(np.array([value]))
    if not math.isfinite(value):
        assert code == -1
        return
    assert len(EDGES) == COARSE + 1
    within = min(max(value, EDGES[0]), EDGES[-1])
    assert EDGES[code] <= within <= EDGES[code + 1]


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_shares_are_cells_or_none(value: float) -> None:
    cells = np.asarray(Shares(np.array([[value]]), np.array([-1.0]), np.array([3.0])))
    assert cells.shape == (1, 1)
    assert (0 <= cells[0, 0] < FINE) == math.isfinite(value)


@pytest.mark.parametrize(
    ("make", "low", "high"),
    [
        (lambda rng: rng.integers(17, 91, 20_000), (8, 20), (85, 128)),
        (lambda rng: rng.integers(1990, 2021, 20_000), (1970, 1991), (2015, 2040)),
        (lambda rng: -rng.uniform(3, 4, 20_000) * 1e6, (-4.3e6, -3.9e6), (-3.1e6, -2.5e6)),
        (lambda rng: rng.normal(size=20_000) * 1e-3, (-0.016, -0.0015), (0.0015, 0.016)),
        (lambda rng: rng.uniform(size=20_000) < 0.3, (0, 0), (1, 2)),
        (lambda rng: np.zeros(20_000), (0, 0), (1, 1)),
        (lambda rng: np.full(20_000, np.nan), (0, 0), (1, 1)),
        (lambda rng: np.append(rng.uniform(0, 1, 20_000), [1e12, -1e12]), (0, 0.01), (1, 2)),
    ],
    ids=["ages", "years", "negative", "small", "indicator", "zeros", "missing", "outliers"],
)
@pytest.mark.filterwarnings("ignore:the noise hides")  # a column of which everything is missing
@pytest.mark.parametrize("delta", [0.0, 1e-6])
def test_bounds_fit_whatever_the_unit(make, low, high, delta) -> None:  # type: ignore[no-untyped-def]
    values = make(np.random.default_rng(0))
    ledger = ft.Ledger(ft.Budget(1.0, delta), stream=SeededStream(3))  # an empty cell passes rarely
    found_low, found_high = ft.bounds(values, ledger=ledger)
    assert low[0] <= found_low <= low[1]
    assert high[0] <= found_high <= high[1]


def test_a_column_that_the_noise_hides_is_told_and_one_of_zeros_is_known() -> None:
    table = np.column_stack([np.full(20_000, 7.0), np.full(20_000, np.nan), np.zeros(20_000)])
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6), stream=SeededStream(3))
    with pytest.warns(UserWarning, match=r"positions \(from 0\) 1\."):
        low, high = ft.bounds(table, ledger=ledger)
    assert (low[1], high[1]) == (0, 1)
    model = ft.LogisticRegression(1.0, 1e-6, bounds=(np.array([0, np.nan]), np.array([9, np.nan])))
    with pytest.warns(UserWarning, match=r"positions \(from 0\) 1\."):
        model.fit(table[:, :2], np.zeros(20_000))


def test_many_columns_are_bought_at_once_within_the_budget() -> None:
    rng = np.random.default_rng(0)
    table = rng.uniform(size=(20_000, 30)) * 10.0 ** np.arange(-5, 10).repeat(2)
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6), stream=SeededStream(3))
    low, high = ft.bounds(table, ledger=ledger)
    assert 0.5 < ledger.share <= 1
    assert (high >= 0.9 * table.max(axis=0)).all()
    assert (high <= 4.2 * table.max(axis=0)).all()
    assert (low <= np.median(table, axis=0)).all()


def test_a_model_with_bought_bounds_is_as_good_as_with_declared_ones() -> None:
    rng = np.random.default_rng(0)
    unit = np.array([1e-4, 1.0, 1e5])
    X = rng.uniform(0.5, 1, size=(20_000, 3)) * unit
    X[0] *= 1e6  # one record decides no bound
    y = (X[:, 0] / 1e-4 > X[:, 1]).astype(int)
    declared = ft.LogisticRegression(1.0, 1e-6, bounds=(0 * unit, unit)).fit(X, y)
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6), stream=SeededStream(3))
    bought = ft.LogisticRegression(bounds="private", ledger=ledger).fit(X, y)
    assert bought.score(X, y) > declared.score(X, y) - 0.02
    assert (bought.bounds_[1] >= 0.9 * unit).all()
    assert (bought.bounds_[1] <= 4.2 * unit).all()
    assert ledger.share <= 1
    with pytest.raises(ft.BudgetSpent):
        ft.count(y, epsilon=0.1, delta=1e-6, ledger=ledger)


def test_bounds_that_cannot_be_bought_are_refused_before_anything_is_charged() -> None:
    from scipy.sparse import csr_array

    ledger = ft.Ledger(ft.Budget(1.0, 1e-6))
    X, y = np.ones((10, 2)), np.arange(10) % 2
    for rows, more, error in (
        (csr_array(X), {}, ft.InvalidValue),
        (X, {"bounds": "privat"}, ft.InvalidValue),
        (X, {"solver": "sgd-ma"}, ft.Unsupported),
        (X, {"solver": "nonprivate"}, ft.Unsupported),
        (X, {"classes": [1]}, ft.InvalidValue),
    ):
        with pytest.raises(error):
            ft.LogisticRegression(**({"bounds": "private", "ledger": ledger} | more)).fit(rows, y)
    assert ledger.share == 0


def test_rows_in_units_of_their_own_are_warned_about() -> None:
    rng = np.random.default_rng(0)
    X = np.column_stack([rng.uniform(0, 90, 5000), rng.uniform(1e4, 9e4, 5000)])
    y = (X[:, 0] > 45).astype(int)
    with pytest.warns(UserWarning, match="bounds='private'"):
        ft.LogisticRegression(1.0, 1e-6).fit(X, y)
    with pytest.warns(UserWarning, match="bounds='private'"):
        ft.LinearRegression(1.0, 1e-6, target_bounds=(0, 1)).fit(X, y)


@given(st.lists(st.floats(-10, 10), min_size=FINE, max_size=FINE), st.floats(1, 40))
def test_bounds_are_in_order_whatever_the_noise_is(counts: list[float], least: float) -> None:
    (low,), (high,) = _ends(np.array([counts]), np.linspace(1, 2, FINE + 1)[None], least)
    assert 1 <= low < high <= 2 or (math.isnan(low) and math.isnan(high))


@pytest.mark.parametrize("window", [2, 4, 8])
def test_bounds_found_in_one_sum_of_cells_are_in_order(window: int) -> None:
    counts = np.zeros((1, FINE))
    counts[0, 20 : 20 + window] = 1.0
    (low,), (high,) = _ends(counts, np.arange(FINE + 1.0)[None], 0.99 * math.sqrt(window))
    assert 20 <= low < high <= 20 + window
