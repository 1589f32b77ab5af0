"""Intervals of coefficients: the law of the noise against simulation, coverage, and what is refused."""

import numpy as np
import pytest

import farthing as ft
from farthing.data.tables import Features
from farthing.errors import InvalidValue, Unsupported
from farthing.linear.intervals import of_moments

RNG = np.random.default_rng(0)
X = RNG.uniform(size=(4000, 3))
TRUTH = np.array([0.4, -0.2, 0.1])


def targets(rng, rows):
    return 0.4 + rows @ TRUTH + rng.uniform(-0.1, 0.1, size=len(rows))


def line(**more):
    return ft.LinearRegression(5.0, 1e-5, bounds=(0, 1), target_bounds=(0, 1.2), solver="sufficient", **more)


@pytest.mark.parametrize("steep", [1.0, 10.0])
def test_the_covariance_of_the_noise_is_that_of_solutions_of_noisy_moments(steep):
    """Where weights are large, most of it is noise on the moments of features."""
    z, noise = np.column_stack([2 * X - 1, np.ones(4000)]), 1e-3
    rows = np.column_stack([z, steep * (targets(RNG, X) - 0.6)])
    moments = rows.T @ rows / 4000
    found = of_moments(Features(3), moments, noise, 1.0, 4000)
    solutions = []
    for _ in range(4000):
        half = RNG.normal(size=(5, 5))
        noisy = moments + noise * (half + half.T) / 2  # variance 1 on the diagonal, 1/2 elsewhere
        solutions.append(np.linalg.solve(noisy[:4, :4], noisy[:4, 4]))
    # variances of 4,000 normal numbers are known to 2.2 %
    wanted = np.cov(np.array(solutions).T)
    np.testing.assert_allclose(found.noise, wanted, rtol=0.2, atol=0.1 * wanted.max())
    found = of_moments(Features(3), moments, 1e-9, 1.0, 4000)
    best = np.linalg.lstsq(z, rows[:, 4], rcond=None)
    np.testing.assert_allclose(found.w, best[0], atol=1e-7)
    np.testing.assert_allclose(found.sampling, best[1][0] / 4000 * np.linalg.inv(z.T @ z), rtol=1e-3)


@pytest.mark.parametrize("of", ["population", "records"])
def test_intervals_hold_as_often_as_they_say(of):
    rng, held = np.random.default_rng(1), []
    for seed in range(80):  # seeds fix the noise as well: the count below is always the same
        rows = rng.uniform(size=(1500, 3))
        y = targets(rng, rows)
        model = line(random_state=seed).fit(rows, y)
        low, high = model.coef_interval(0.9, of=of)
        best = np.linalg.lstsq(np.column_stack([rows, np.ones(1500)]), y, rcond=None)[0][:3]
        goal = TRUTH if of == "population" else best
        held.extend((low <= goal) & (goal <= high))
    assert np.mean(held) >= 0.88


def test_intervals_of_output_perturbation_hold_for_the_fit_without_noise():
    y, held = (X[:, 0] > X[:, 1]).astype(int), []
    still = ft.LogisticRegression(1e9, 0.5, bounds=(0, 1), solver=ft.OutputPerturbation(penalty=50.0)).fit(
        X, y
    )
    for seed in range(60):
        solver = ft.OutputPerturbation(penalty=50.0)
        model = ft.LogisticRegression(1.0, 1e-6, bounds=(0, 1), solver=solver, random_state=seed).fit(X, y)
        low, high = model.coef_interval(0.8, of="records")
        held.extend(((low <= still.coef_) & (still.coef_ <= high)).ravel())
    assert low.shape == model.coef_.shape
    assert 0.65 <= np.mean(held) <= 0.95  # of 180; seeds fix the noise
    with pytest.raises(Unsupported, match="of='records'"):
        model.coef_interval(0.8)


def test_units_are_those_of_the_coefficients():
    model = ft.LinearRegression(
        50.0, 1e-3, bounds=(0, 100), target_bounds=(0, 1200), solver="sufficient", random_state=0
    ).fit(100 * X, 1000 * targets(RNG, X))
    low, high = model.coef_interval(0.99)
    assert ((low < 10 * TRUTH) & (high > 10 * TRUTH)).all()
    assert (high - low < 3).all()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (ft.LinearRegression(1.0, 1e-6, bounds=(0, 1), target_bounds=(0, 1.2)), "solver='sufficient'"),
        (line(alpha=1.0), "alpha"),
        (
            ft.LinearRegression(0.01, 1e-6, bounds=(0, 1), target_bounds=(0, 1.2), solver="sufficient"),
            "too large",
        ),
    ],
)
def test_where_the_law_is_not_known_nothing_is_said(model, said):
    with pytest.raises(Unsupported, match=said):
        model.fit(X, targets(RNG, X)).coef_interval()


def test_wrong_levels_and_parts_are_refused():
    ledger = ft.Ledger(ft.Budget(20.0, 1e-4))
    model = line(ledger=ledger).partial_fit(X, targets(RNG, X))
    with pytest.raises(InvalidValue, match="level"):
        model.coef_interval(1.0)
    with pytest.raises(InvalidValue, match="of must be"):
        model.coef_interval(0.9, of="everyone")
    model.partial_fit(X, targets(RNG, X))
    with pytest.raises(Unsupported, match="in one call of fit"):
        model.coef_interval()
