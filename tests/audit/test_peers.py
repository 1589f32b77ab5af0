"""Bounds from one run agree with another implementation of the same theorems, where it is installed."""

import numpy as np
import pytest

from farthing.accounting import gaussian
from farthing.audit import canaries

auditing = pytest.importorskip("jax_privacy.auditing")


@pytest.mark.parametrize(("shift", "guesses"), [(0.5, 200), (1.5, 100), (3.0, 50)])
def test_one_run_agrees(shift, guesses):
    rng = np.random.default_rng(3)
    coins = rng.random(1000) < 0.5
    scores = coins * shift + rng.normal(size=1000)
    threshold = float(np.sort(scores)[-guesses])
    right = int(coins[scores >= threshold].sum())
    auditor = auditing.CanaryScoreAuditor(scores[coins], scores[~coins])
    fixed = auditing.Explicit(threshold)
    theirs = auditor.epsilon_one_run(0.05, 1e-5, threshold_strategy=fixed)
    assert canaries.epsilon(1000, guesses, right, 1e-5, 0.95) == pytest.approx(theirs, abs=1e-4)
    theirs = auditor.epsilon_one_run_fdp(0.05, 1e-5, threshold_strategy=fixed)
    ours = gaussian.epsilon(canaries.gaussian_mu(1000, guesses, right, 0.95), 1e-5)
    assert ours == pytest.approx(theirs, abs=1e-3)
