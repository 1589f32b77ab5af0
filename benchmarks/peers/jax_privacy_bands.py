"""Compare noise that is correlated by bands with jax_privacy's, at equal budgets: one table.

pip install jax_privacy, then, with farthing on the path: python benchmarks/peers/jax_privacy_bands.py

For each plan (sampling rate, turns, ε, δ) and number of bands: the noise multiplier by which both calibrate a
plan of cyclic Poisson samples (under zero-out, the adjacency of both), and the root mean square of the noise
in all running sums for contributions of norm 1. jax_privacy optimises all coefficients of its banded Toeplitz
matrix; farthing takes the best of one family, (1 - x)^-exponent. In the last rows each picks its own number
of bands; a plan of jax_privacy has bands that divide the number of turns.
"""

import math
import time

from jax_privacy.experimental.execution_plan import BandMFExecutionPlanConfig
from jax_privacy.matrix_factorization import toeplitz

from farthing.accounting.correlated import (
    banded_prefix_noise,
    best_exponent,
    choose_bands,
    noise_multiplier,
)
from farthing.budget import Adjacency, Budget

PLANS = [(0.01, 800, 8.0, 1e-5), (0.01, 400, 3.0, 1e-5), (0.002, 2000, 1.0, 1e-6)]
BANDS = (1, 4, 16)


def theirs(rate: float, steps: int, epsilon: float, delta: float, bands: int) -> tuple[float, float]:
    """Return jax_privacy's noise multiplier, and the noise of running sums."""
    column = toeplitz.optimize_banded_toeplitz(steps, bands)
    plan = BandMFExecutionPlanConfig(
        strategy=column,
        iterations=steps,
        epsilon=epsilon,
        delta=delta,
        sampling_prob=rate * bands,
    )
    noise = float(plan.plan.dp_event.event.event.noise_multiplier)
    error = float(toeplitz.per_query_error(strategy_coef=column, n=steps).mean())
    return noise, noise * math.sqrt(error * float(toeplitz.sensitivity_squared(column, steps)))


def main() -> None:
    head = f"{'plan':34}{'bands':>7}{'jax_privacy':>13}{'farthing':>10}{'ratio':>8}{'noise of sums':>15}"
    print(f"{head}{'farthing':>10}{'ratio':>8}")
    for rate, steps, epsilon, delta in PLANS:
        name = f"rate {rate:g}, {steps} turns, ({epsilon:g}, {delta:g})"
        budget = Budget(epsilon, delta, adjacency=Adjacency.ZERO_OUT)
        for bands in BANDS:
            noise, running = theirs(rate, steps, epsilon, delta, bands)
            own = noise_multiplier(budget, rate, steps, bands)
            sums = own * banded_prefix_noise(bands, best_exponent(bands, steps), steps)
            shown = f"{noise:13.5f}{own:10.5f}{own / noise:8.5f}{running:15.4f}{sums:10.4f}"
            print(f"{name:34}{bands:>7}{shown}{sums / running:8.4f}", flush=True)
        begun = time.perf_counter()
        column, deviation = toeplitz.optimize_coefs_for_amplifications(
            steps,
            dataset_size=1_000_000,
            expected_batch_size=round(1_000_000 * rate),
            epsilon=epsilon,
            delta=delta,
        )
        between = time.perf_counter()
        best = choose_bands(budget, rate, steps)
        ended = time.perf_counter()
        error = float(toeplitz.per_query_error(strategy_coef=column, n=steps).mean())
        running = float(deviation) * math.sqrt(error)
        sums = best.noise_multiplier * banded_prefix_noise(best.bands, best.exponent, steps)
        seconds = f"{between - begun:.0f} s and {ended - between:.1f} s"
        print(
            f"{name:34}  own choice: {len(column)} and {best.bands} bands, noise of sums {running:.4f} and "
            f"{sums:.4f} ({sums / running:.4f}), {seconds}",
            flush=True,
        )


if __name__ == "__main__":
    main()
