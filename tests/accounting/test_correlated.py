"""The choice of bands from public numbers, against brute force over all of them."""

import pytest

import farthing as ft
from farthing.accounting import correlated as choosing


def running(budget, rate, steps, bands):
    noise = choosing.noise_multiplier(budget, rate, steps, bands, tolerance=1e-4)
    every = (choosing.banded_prefix_noise(bands, hundredths / 100, steps) for hundredths in range(40, 100, 3))
    return noise * min(every)


@pytest.mark.parametrize(
    ("rate", "steps", "epsilon"), [(0.05, 100, 10.0), (0.041, 90, 6.0), (0.025, 200, 1.5), (0.3, 30, 2.0)]
)
def test_no_number_of_bands_is_better_by_two_percent(rate, steps, epsilon):
    budget = ft.Budget(epsilon, 1e-5)
    found = ft.choose_bands(budget, rate, steps)
    own = found.noise_multiplier * choosing.banded_prefix_noise(found.bands, found.exponent, steps)
    every = [running(budget, rate, steps, bands) for bands in range(1, int(1 / rate) + 1)]
    assert own <= 1.02 * min(every)
    assert own <= every[0] * (1 + 1e-3)  # never worse than independent noise
    assert found.gain == pytest.approx(own / every[0], rel=1e-3)


def test_as_many_bands_as_the_rate_allows_are_tried():
    """At 20 bands every record is in one batch of a cycle, which 16 and 24 are far from."""
    assert ft.choose_bands(ft.Budget(10.0, 1e-5), 0.05, 100).bands == 20
    assert ft.choose_bands(ft.Budget(10.0, 1e-5), 0.05, 100, most=7).bands <= 7
    assert ft.choose_bands(ft.Budget(1.0, 1e-5), 1.0, 10).bands == 1
