"""Noisy gradient descent for linear regression: what a plain private optimiser reaches, as a baseline.

Bassily, Smith & Thakurta 2014, Algorithm 1, with all records in every step (no sampling, so no amplification
is counted): clipped gradients, one noise vector a step, the mean of the second half of the iterates. Rows are
divided by their largest norm, so that no curvature is above 1 and steps of length 1 are safe; what it lacks
is a preconditioner, and on features of unlike scales that costs more than the noise does (`leastsquares`).

Guarantee: ``steps`` Gaussian answers of μ²/steps each, so μ-GDP under every adjacency; for a filter of GDP or
zCDP.

>>> import farthing as ft
>>> from farthing.linear.losses import squared
>>> from farthing.data.tables import Table
>>> x = np.linspace(0, 1, 5001)[:, None]
>>> ledger = ft.Ledger(ft.Budget(1.0, 1e-6)).over(Table(x, 0.2 + 0.5 * x[:, 0]))
>>> u, constant = ft.run(noisy_gradient(ledger, Problem(squared, 5001, 1, unit=False))).w
>>> bool(0 < u[0] < 0.6), round(ledger.share, 6)
(True, 1.0)
"""

from collections.abc import Iterator

import numpy as np

from farthing import validate
from farthing.data.tables import Features
from farthing.ledger.ledger import Ledger
from farthing.linear.budget_schedule import Purse
from farthing.linear.losses import Gradient
from farthing.linear.methods.regression import Space, ridge
from farthing.linear.problem import Problem
from farthing.queries.bounds import ClipNorm
from farthing.queries.query import Step, until_spent


@until_spent
def noisy_gradient(
    ledger: Ledger, problem: Problem, *, steps: int = 30, clip: float | None = None, length: float = 1.0
) -> Iterator[Step]:
    """``steps`` steps of ``length``; ``clip`` is by default the largest residual to begin with."""
    space, steps = Space.of(problem), validate.count(steps=steps)
    length = validate.positive(length=length)
    scale = np.asarray(space.features.scale) / space.radius
    beside = space.features.intercept / space.radius
    features = Features(problem.width, space.features.centre, scale, beside, radius=1.0)
    bound = ClipNorm(space.most if clip is None else clip)
    purse, gradient = Purse(ledger, problem.records), Gradient(problem.loss, features)
    pull = ridge(features, problem.penalty / problem.records)
    w, mean = space.start * space.radius, np.zeros(features.size)
    for t in range(1, steps + 1):
        slope, _ = purse.mean(1 / steps, gradient, bound, w)
        w = w - length * (slope + pull @ w)
        late = max(0, t - steps // 2)
        mean = mean + (w - mean) / late if late else w
        yield Step(t, features.unfold(mean), purse.receipts())
