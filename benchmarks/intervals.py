"""Simulate how often `coef_interval` holds: `python benchmarks/intervals.py [TABLES]`, 200 tables a setting.

Each table is drawn anew, fitted with ``solver="sufficient"``, and asked for intervals of level 0.9 of the
population's coefficients and of the fit without noise. Printed are the least and the largest coverage of a
coefficient, and the mean; the standard error of one is 0.3 / √TABLES.
"""

import sys

import numpy as np

import farthing as ft

SLOPES = np.array([0.4, -0.2, 0.1, 0.3, -0.1, 0.05, 0.2, -0.3]) / 2
SETTINGS = [  # records, features, ε, and how features are drawn
    (2_000, 3, 1.0, "uniform"),
    (3_000, 2, 2.0, "uniform"),
    (10_000, 4, 1.0, "correlated"),
    (20_000, 8, 2.0, "uniform"),
    (50_000, 8, 1.0, "rare"),
]


def rows(rng, records, features, drawn):
    """Return features in [0, 1]: independent, with a part in common, or two that are 1 for a tenth."""
    found = rng.uniform(size=(records, features))
    if drawn == "correlated":
        return (found + rng.uniform(size=(records, 1))) / 2
    if drawn == "rare":
        found[:, -2:] = found[:, -2:] < 0.1
    return found


def held(rng, records, features, epsilon, drawn, seed):
    """Return for one table which intervals hold: of the population, of the records."""
    X, slopes = rows(rng, records, features, drawn), SLOPES[:features]
    y = 0.4 + X @ slopes + rng.normal(scale=0.05, size=records)
    best = np.linalg.lstsq(np.column_stack([X, np.ones(records)]), y, rcond=None)[0][:features]
    model = ft.LinearRegression(
        epsilon, 1e-6, bounds=(0, 1), target_bounds=(-0.6, 1.8), solver="sufficient", random_state=seed
    ).fit(X, y)
    pairs = (
        (model.coef_interval(0.9, of=of), goal) for of, goal in (("population", slopes), ("records", best))
    )
    return [(low <= goal) & (goal <= high) for (low, high), goal in pairs]


def main(tables=200):
    """Print a line a setting."""
    for setting in SETTINGS:
        rng = np.random.default_rng(7)
        found = np.mean([held(rng, *setting, seed) for seed in range(tables)], axis=0)
        for of, part in zip(("population", "records"), found, strict=True):
            print(*setting, of, f"{part.min():.3f} to {part.max():.3f}, mean {part.mean():.3f}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
