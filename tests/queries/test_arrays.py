"""Private arrays as lists: no cell decides the type, the width or the values of other records."""

import warnings

import numpy as np
import pytest
from scipy import sparse

import farthing as ft
from farthing.errors import InvalidValue
from farthing.queries import arrays

ROWS = [[1, 2.5], [3, 4], [True, 0]]


@pytest.mark.parametrize("odd", [["x", 1], [1], [1, 2, 3], "ab", None, {}, [None, 2j], [[1], 2], 7])
def test_an_odd_row_changes_no_other(odd):
    found = arrays.features([*ROWS, odd])
    np.testing.assert_array_equal(found[:3], arrays.features(ROWS))
    assert found.dtype == arrays.features(ROWS).dtype == np.float64
    assert np.isnan(found[3]).any()
    np.testing.assert_array_equal(arrays.target([1, 2.5, odd])[:2], [1, 2.5])


def test_numbers_beyond_floats_are_one_records_matter():
    assert np.isnan(arrays.features([[10**400], [1]])[0, 0])
    assert arrays.features([[10**30], [1]]).dtype == arrays.features([[2], [1]]).dtype


@pytest.mark.parametrize("errors", ["warn", "raise"])
def test_a_wider_float_among_objects_warns_and_raises_for_nobody(errors):
    cells = np.array([np.longdouble("1e4000"), 3.0], dtype=object)
    with warnings.catch_warnings(), np.errstate(all=errors):
        warnings.simplefilter("error")
        assert arrays.target(cells).tolist() == [np.inf, 3.0]


def test_a_list_of_numbers_is_no_table():
    with pytest.raises(InvalidValue, match="1 dimensions"):
        arrays.features([1.0, 2.0])


@pytest.mark.parametrize("kind", [ft.LogisticRegression, ft.AdditiveClassifier])
def test_text_in_a_list_counts_as_nothing_and_raises_for_nobody(kind):
    rng = np.random.default_rng(0)
    X, y = rng.uniform(size=(300, 2)), rng.integers(0, 2, 300)
    rows, labels = X.tolist(), y.tolist()
    rows[0], rows[5], labels[7] = ["a", 1.0], [0.5], "x"
    X[[0, 5]] = np.nan
    given, others = y.astype(object), {"bounds": (0, 1), "random_state": 0}
    given[7] = 9
    lists, typed = (kind(1.0, 1e-6, **others).fit(*each) for each in ((rows, labels), (X, given)))
    np.testing.assert_array_equal(lists.predict_proba(X[10:]), typed.predict_proba(X[10:]))
    assert lists.n_features_in_ == 2


def test_text_among_the_targets_of_a_list_counts_as_nothing():
    X = np.random.default_rng(0).uniform(size=(300, 2))
    y = X[:, 0].copy()
    words = [*y.tolist()[:-1], "word"]
    y[-1] = np.nan
    options = {"bounds": (0, 1), "target_bounds": (0, 1), "random_state": 0}
    lists, typed = (ft.LinearRegression(1.0, 1e-6, **options).fit(X, each) for each in (words, y))
    np.testing.assert_array_equal(lists.coef_, typed.coef_)


class Kind:
    """A type of a data frame's column that is not numpy's own, like pandas' nullable ones."""

    def __init__(self, kind, name):
        self.kind, self.name = kind, name

    def __str__(self):
        return self.name


class Frame:
    """What is looked at of a data frame: names and types of columns, and its numbers."""

    def __init__(self, **columns):
        self.columns, self.dtypes = list(columns), list(columns.values())

    def to_numpy(self, dtype=object, na_value=None):
        return np.full((2, len(self.columns)), na_value, dtype=dtype)


def test_columns_of_a_data_frame_are_refused_by_their_types_alone():
    wrong = Frame(age=np.dtype(float), job=np.dtype(object), town=Kind("O", "category"))
    with pytest.raises(InvalidValue, match=r"not: 'job' \(object\), 'town' \(category\)\. Give"):
        arrays.features(wrong)
    found = arrays.features(Frame(age=np.dtype(float), sons=Kind("i", "Int64")))
    assert found.dtype == np.float64
    assert np.isnan(found).all()


def test_a_null_in_a_boolean_column_of_an_arrow_table_counts_its_own_row_as_nothing():
    arrow = pytest.importorskip("pyarrow")
    whole, odd = (
        arrays.features(arrow.table({"age": [0.5, 2.0], "member": [True, last]})) for last in (False, None)
    )
    np.testing.assert_array_equal(whole, [[0.5, 1.0], [2.0, 0.0]])
    np.testing.assert_array_equal(odd, [[0.5, 1.0], [2.0, np.nan]])
    with pytest.raises(InvalidValue, match=r"not: 'name' \(string\)\. Give"):
        arrays.features(arrow.table({"age": [1.0], "name": ["x"]}))


@pytest.mark.parametrize("kind", [int, bool])
@pytest.mark.parametrize("classes", [[0, 1], ["no", "yes"]])
def test_a_null_among_labels_decides_neither_whether_they_are_refused_nor_what_is_said(kind, classes):
    arrow = pytest.importorskip("pyarrow")
    X, outcomes = np.random.default_rng(0).uniform(size=(300, 2)), []
    for last in (kind(1), None):
        y = arrow.array([kind(x > 0.5) for x in X[:-1, 0]] + [last])
        try:
            ft.LogisticRegression(1.0, 1e-6, classes=classes, bounds=(0, 1)).fit(X, y)
            outcomes.append("fitted")
        except InvalidValue as error:
            outcomes.append(str(error))
    assert len(set(outcomes)) == 1


def test_booleans_among_the_numbers_of_a_data_frame_are_numbers():
    found = arrays.features(Frame(age=np.dtype(float), member=np.dtype(bool)))
    assert found.dtype == np.float64


class PolarsKind:
    """A type of a column of polars, as far as it is looked at."""

    def __init__(self, name):
        self.name = name

    def is_numeric(self):
        return self.name == "Int64"

    def __str__(self):
        return self.name


class PolarsFrame(dict):
    """What is looked at of a data frame of polars: names and types of columns, and its columns."""

    def __init__(self, kinds, **columns):
        super().__init__(columns)
        self.columns, self.dtypes = list(columns), [PolarsKind(kind) for kind in kinds]

    def to_numpy(self):
        return np.column_stack([np.array(column, dtype=object) for column in self.values()])


def test_a_null_in_a_boolean_column_of_polars_counts_its_own_row_as_nothing():
    found = arrays.features(PolarsFrame(["Boolean", "Int64"], member=np.array([True, None]), sons=[1, 2]))
    np.testing.assert_array_equal(found, [[1.0, 1.0], [np.nan, 2.0]])
    with pytest.raises(InvalidValue, match=r"not: 'name' \(String\)\. Give"):
        arrays.features(PolarsFrame(["Int64", "String"], sons=[1], name=["x"]))


def test_a_null_in_held_out_rows_of_arrow_makes_no_other_row_fail():
    arrow = pytest.importorskip("pyarrow")
    kept = arrays.indexed(arrow.table({"old": [True, False, None], "member": [True, True, False]}))
    np.testing.assert_array_equal(kept, [[1.0, 1.0], [0.0, 1.0], [np.nan, 0.0]])


@pytest.mark.parametrize("cell", [2j, np.complex64(1 + 2j), np.ma.masked, np.array([1.0]), np.array(2j)])
def test_a_cell_that_is_no_number_is_nothing_and_nobody_is_told(cell):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(arrays.target([1.0, cell]), [1.0, np.nan], equal_nan=True)
    with warnings.catch_warnings(record=True) as said:  # an error in place of a warning hides it
        warnings.simplefilter("always")
        assert np.isnan(arrays.features([[1.0, 2.0], [cell, 3.0]])[1, 0])
        assert np.isnan(arrays.number(cell))
    assert not said


@pytest.mark.parametrize("column", [3, 1000, -1])
def test_a_sparse_row_with_a_column_beyond_the_table_is_refused(column):
    table = sparse.csr_array(np.ones((4, 3)))
    table.indices[-1] = column
    with pytest.raises(InvalidValue, match="valid row and column indices"):
        arrays.features(table)
    table = sparse.csr_matrix(np.ones((4, 3)))
    table.indptr[2] = 10**6
    with pytest.raises(InvalidValue, match="valid row and column indices"):
        arrays.features(table)
