"""Public cells: every value has one, blank rows have none, and rows are read as the table reads them."""

import numpy as np
import pytest
from scipy import sparse

from farthing.data.tables import Table
from farthing.errors import InvalidValue
from farthing.linear.additive import bins
from farthing.linear.additive.bins import (
    CELLS,
    EDGES,
    HIGHEST,
    LOWEST,
    VALUES,
    Binned,
    Cell,
    cells_of,
    codes_of,
)

RNG = np.random.default_rng(0)
X = RNG.uniform(-0.2, 1.2, size=(500, 3))
ENDS = np.zeros(3), np.ones(3)


def test_bounds_have_codes_of_their_own_and_cells_are_in_order():
    assert cells_of(np.array([-1.0, 0.0, 1.0, 2.0, np.nan])).tolist() == [LOWEST, LOWEST, HIGHEST, HIGHEST, 0]
    inside = np.sort(RNG.uniform(1e-9, 1 - 1e-9, size=1000))
    codes = cells_of(inside)
    assert (np.diff(codes.astype(int)) >= 0).all()
    assert codes.min() > LOWEST
    assert codes.max() < HIGHEST
    assert np.abs(VALUES[codes] - inside).max() <= 0.5 / 128
    assert len(VALUES) == CELLS <= 256
    assert cells_of(EDGES).tolist() == (np.arange(len(EDGES)) + 3).tolist()


def test_a_row_that_is_not_finite_has_no_codes():
    rows = X.copy()
    rows[3, 1], rows[7, 0] = np.nan, np.inf
    codes = codes_of(rows, *ENDS)
    assert not codes[:, [3, 7]].any()
    assert np.delete(codes, [3, 7], axis=1).all()


def test_codes_do_not_depend_on_how_a_table_is_stored(monkeypatch):
    whole = codes_of(X, *ENDS)
    monkeypatch.setattr(bins, "_ROWS", 7)
    np.testing.assert_array_equal(codes_of(X, *ENDS), whole)
    rows = np.where(X < 0.5, 0.0, X)
    np.testing.assert_array_equal(codes_of(sparse.csr_array(rows), *ENDS), codes_of(rows, *ENDS))
    raw = 10 + 5 * X
    assert (codes_of(raw, np.full(3, 10.0), np.full(3, 15.0)) != whole).mean() < 0.01  # but for rounding


def test_rows_are_taken_with_their_codes():
    records = Binned(Table(X, X[:, 0]), codes_of(X, *ENDS))
    assert records.take(slice(None)) is records
    some = records.take(np.array([5, 2]))
    assert len(some) == 2
    cell = Cell(1, np.zeros((CELLS, 1)))
    np.testing.assert_array_equal(some.codes(cell), records.codes(cell)[[5, 2]])


def test_what_is_no_table_with_its_codes_is_refused(monkeypatch):
    with pytest.raises(InvalidValue, match="one code a row"):
        Binned(Table(X), codes_of(X[:5], *ENDS))
    monkeypatch.setattr(bins, "MOST", 100)
    with pytest.raises(InvalidValue, match="2\\^26"):
        Binned(Table(X), codes_of(X, *ENDS))
