"""What noise leaves on weights, and which part of their squares is signal."""

import numpy as np
import pytest

from farthing.linear.additive.shrinkage import INFLATED, Residue, kept
from farthing.linear.methods.descent import MOMENTUM

RATES, CURVATURES = np.array([0.5, 1.0, 0.1]), np.array([1.0, 0.3, 0.01])


def run(push):
    """Return the sum of the later iterates of a descent with these slopes beside those of the loss."""
    w = velocity = total = np.zeros(push.shape[1:])
    for t, slope in enumerate(push, start=1):
        velocity = MOMENTUM * velocity - RATES * (CURVATURES * w + slope)
        w = w + velocity
        total = total + (t > 10) * w
    return total


def test_the_noise_left_on_weights_is_that_of_the_recursion():
    """Against running the recursion itself on drawn noise: the variance of 4,000 runs is within 10 %."""
    noises, left = np.geomspace(2, 1, 21), Residue(3)
    for t, noise in enumerate(noises, start=1):
        left.step(RATES, CURVATURES, noise, t > 10)
    drawn = np.random.default_rng(2).normal(size=(21, 4000, 3)) * noises[:, None, None]
    np.testing.assert_allclose(left.noise[:, 2, 2], run(drawn).var(axis=0), rtol=0.1)
    np.testing.assert_allclose(left.slope[:, 2], run(np.ones((21, 3))), rtol=1e-9)


@pytest.mark.parametrize(("signals", "share"), [(0.0, 1.0), (1.0, 1.0), (30.0, 0.1)])
@pytest.mark.parametrize("freedom", [1, 8])
def test_what_is_kept_estimates_nearly_as_well_as_if_signals_were_known(signals, share, freedom):
    """Weights with unit noise, of which a share has a signal of this variance.

    The best part is that of who knows which have a signal. James & Stein's, weight by weight, is worse.
    """
    rng = np.random.default_rng(8)
    strong = rng.uniform(size=(400, 1)) < share
    theta = rng.normal(size=(400, freedom)) * np.sqrt(signals) * strong
    w = theta + rng.normal(size=theta.shape)
    ratios = np.square(w).mean(axis=1)

    def error(part):
        return float(np.square(part[:, None] * w - theta).mean())

    found = error(kept(ratios * INFLATED, np.full(400, float(freedom))))
    best = error(strong[:, 0] * signals / (1 + signals))
    assert found < best + 0.15
    assert found < error(np.maximum(0, 1 - 1 / ratios))


def test_ratios_of_any_size_and_none_stay_finite():
    parts = kept(np.array([0.0, 1e-300, 1.0, 1e300]), np.array([1.0, 60.0, 1.0, 600.0]))
    assert np.isfinite(parts).all()
    assert (np.diff(parts[[0, 2, 3]]) > 0).all()
    assert parts[-1] > 0.99
    assert kept(np.zeros(0), np.zeros(0)).shape == (0,)
