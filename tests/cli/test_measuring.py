"""Figures on held-out records: one noisy sum within the budget, whatever the records hold."""

import numpy as np
import pytest

import farthing as ft
from farthing.cli import measuring


@pytest.fixture(scope="module")
def rows() -> tuple[np.ndarray, np.ndarray]:
    X = np.random.default_rng(0).uniform(size=(20_000, 2))
    return X, (X[:, 0] > 0.4).astype(np.float64)


def test_a_noisy_accuracy_is_near_the_exact_one(rows: tuple[np.ndarray, np.ndarray]) -> None:
    X, y = rows
    model = ft.LogisticRegression(1.0, 1e-6, bounds=(0, 1)).fit(X, y)
    found = measuring.held_out(model, X, y, ft.Budget(2.0, 1e-6))
    exact = measuring.measured(model, X, y.astype(int))
    # 20 deviations of the noise, which is about 6 records
    assert abs(found["accuracy"] - exact["accuracy"]) < 0.01
    assert abs(found["guessing"] - exact["guessing"]) < 0.01
    assert abs(found["records"] - 20_000) < 200
    assert measuring.verdict(found) == {}


def test_records_that_are_no_numbers_count_as_nothing(rows: tuple[np.ndarray, np.ndarray]) -> None:
    X, y = rows[0].copy(), rows[1].copy()
    model = ft.LogisticRegression(1.0, 1e-6, bounds=(0, 1)).fit(X, y)
    X[:5000, 0], y[5000:10_000] = np.inf, np.nan
    found = measuring.held_out(model, X, y, ft.Budget(2.0, 1e-6))
    assert abs(found["records"] - 10_000) < 200
    assert found["accuracy"] > 0.9


def test_a_noisy_error_of_a_regression_is_near_the_exact_one(rows: tuple[np.ndarray, np.ndarray]) -> None:
    X, _ = rows
    y = 10 * X[:, 0] + np.random.default_rng(1).normal(size=len(X))
    model = ft.LinearRegression(1.0, 1e-6, target_bounds=(-5, 15), bounds=(0, 1)).fit(X, y)
    found = measuring.held_out(model, X, y, ft.Budget(20.0, 1e-6))
    exact = measuring.measured(model, X, y)  # 10 % of either is more than 15 deviations of the noise
    assert found["rmse"] == pytest.approx(exact["rmse"], rel=0.1)
    assert found["rmse_of_mean"] == pytest.approx(exact["rmse_of_mean"], rel=0.1)
    assert measuring.verdict(found) == {}
    said = measuring.verdict({"rmse": 3.0, "rmse_of_mean": 2.9, "records": 9})
    assert "always answering the mean" in said["verdict"]
