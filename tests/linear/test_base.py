"""What estimators are given: bounds, refused or put in order."""

import numpy as np
import pytest
from scipy import sparse

import farthing as ft
from farthing.errors import InvalidValue
from farthing.linear import base
from farthing.linear.base import clipped, compact, target_bounds


def test_what_cannot_be_declared_is_refused():
    for wrong in (None, (1, 0), (0, np.inf), 3):
        with pytest.raises(InvalidValue):
            target_bounds(wrong)


def test_rows_are_clipped_to_bounds_of_every_feature():
    assert clipped(np.array([[-1.0, 5.0]]), np.zeros(2), np.array([1.0, 2.0])).tolist() == [[0.0, 2.0]]


def test_a_table_in_units_of_its_own_is_mapped_onto_zero_and_one_row_by_row():
    rng = np.random.default_rng(0)
    raw, bounds = rng.uniform(-5, 25, size=(4000, 5)), (np.zeros(5), np.full(5, 20.0))
    raw[3, 1], raw[7, 0] = np.nan, np.inf
    found, mapped = compact(raw, bounds, 4000)
    assert found.dtype == np.float32
    assert mapped == (0.0, 1.0)
    assert not np.isfinite(found[[3, 7]]).all(axis=1).any()
    kept = np.delete(np.arange(4000), [3, 7])
    np.testing.assert_allclose(found[kept], np.clip(raw[kept] / 20, 0, 1), atol=1e-7)
    np.testing.assert_array_equal(compact(raw[::-1], bounds, 4000)[0][::-1], found)  # row by row


def test_files_small_and_sparse_tables_and_compact_ones_stay_as_they_are(tmp_path):
    small, bounds = np.zeros((10, 2)), (0, 5)
    assert compact(small, bounds, 10)[0] is small
    file = np.memmap(tmp_path / "rows", np.float64, "w+", shape=(20_000, 2))
    assert compact(file, bounds, 20_000)[0] is file
    stored = sparse.csr_array(np.eye(200))
    assert compact(stored, bounds, 200)[0] is stored
    floats = np.zeros((20_000, 2), np.float32)
    assert compact(floats, (0, 1), 20_000)[0] is floats


@pytest.mark.parametrize("edge", [2**14, 2**28])
def test_one_record_more_does_not_change_the_precision_of_the_others(edge, monkeypatch):
    if edge == 2**28:  # the same line, at a size that a test can hold
        monkeypatch.setattr(base, "_MOST", edge := 2**15)
    rows = np.full((edge + 1, 1), 0.5 + 2.0**-26)
    for records in (1000, 2**14, 2**15, 2**20):
        found = [compact(rows[: edge + more], (0, 1), records)[0] for more in (-1, 0, 1)]
        assert len({table.dtype for table in found}) == 1
        np.testing.assert_array_equal(found[0], found[2][: edge - 1])


def test_a_label_that_cannot_be_looked_up_is_none_of_the_classes():
    labels = np.array([1, None, 0], dtype=object)
    labels[1] = np.timedelta64(3)  # of no unit: its hash raises a ValueError
    assert np.array_equal(base.codes(labels, np.array([0, 1])), [1.0, np.nan, 0.0], equal_nan=True)


def test_a_masked_target_is_a_missing_one():
    X, mask = np.zeros((3, 1)), [False, True, False]
    labels = np.ma.array([1, 1, 0], mask=mask)
    model = ft.LogisticRegression()
    found = base.codes(model._supervised(X, labels)[1], np.array([0, 1]))
    assert np.array_equal(found, [1.0, np.nan, 0.0], equal_nan=True)
    numbers = model._numbers(X, np.ma.array([0.5, 0.25, 1.0], mask=mask))[1]
    assert np.array_equal(numbers, [0.5, np.nan, 1.0], equal_nan=True)


@pytest.mark.parametrize("classes", [[None, 1], [[0], 1], [1, "a"], ["a", 2.0], [1], [[0], [1]], {0, 1}])
def test_classes_are_labels_of_one_kind(classes):
    with pytest.raises(InvalidValue, match="all numbers or all texts"):
        base.declared(classes)


def test_bytes_are_no_texts():
    with pytest.raises(InvalidValue, match="kind of classes"):
        base.codes(np.array([b"a", b"b"]), np.array(["a", "b"]))


@pytest.mark.parametrize("wrong", ["no", None, 2, 0.0])
def test_a_flag_is_true_or_false(wrong):
    with pytest.raises(InvalidValue, match="fit_intercept must be True or False"):
        ft.LogisticRegression(1.0, 1e-5, fit_intercept=wrong).fit(np.ones((2, 1)), [0, 1])


QUIET = {
    "additive": lambda: ft.AdditiveClassifier(epsilon=1.0, delta=1e-6, bounds=(0, 0.5), records=40),
    "boosted": lambda: ft.GradientBoostingClassifier(epsilon=1.0, delta=1e-6, bounds=(0, 0.5), records=40),
    "linear": lambda: ft.LogisticRegression(1.0, 1e-6, bounds=(0, 0.5), records=40),
    "weights": lambda: ft.LinearRegression(
        1.0, 1e-6, bounds=(0, 7), target_bounds=(0, 7), max_sample_weight=3.0, records=40
    ),
    "additive numbers": lambda: ft.AdditiveRegressor(
        epsilon=1.0, delta=1e-6, bounds=(0, 7), target_bounds=(0, 7), records=40
    ),
    "binner": lambda: ft.PrivateBinner(4, epsilon=1.0, delta=1e-6, bounds=(0, 0.5)),
}


@pytest.mark.parametrize("kind", QUIET)
@pytest.mark.parametrize("value", [1.7e308, 5e-324], ids=["overflows", "underflows"])
@pytest.mark.filterwarnings("error:.*encountered")
def test_numpy_says_nothing_of_a_record(kind, value):
    """A row, a target and a weight at the ends of float64: a warning or an error would reveal them."""
    estimator, n = QUIET[kind](), 40
    rows, labels = np.linspace(0, 1, 3 * n).reshape(n, 3), np.arange(n) % 2.0
    rows[3, 1] = labels[5] = value
    weights = {"sample_weight": np.where(np.arange(n) == 7, value, 1.0)} if kind == "weights" else {}
    with np.errstate(all="raise"):
        fitted = estimator.fit(rows, labels, **weights)
        if hasattr(fitted, "transform"):
            fitted.transform(rows)
