"""Regression by other losses than squares: Huber's, a quantile's and that of Poisson counts.

Like `descent`, but for targets that are numbers in [0, 1], with these answers, each a Gaussian sum that all
records take part in; shares are of μ²:

1. the mean of y and its mean square about that, 0.02 each (less noise is bought by small budgets, up to 0.2):
   where to begin, and how far residuals reach. The corner of a quantile's loss is rounded off within
   `ROUNDED` of the root of the latter;
2. row norms, 0.01, then means and second moments, 0.14, to standardise features (`descent.standardised`);
3. the rest: 40 to 400 gradients, with momentum, clipped at max(`CLIP`, 0.7 (N/d)^⅓) typical ones, N = n μ;
   the answer is the mean of the later half.

With a growing budget steps, clips and lengths grow, so that the optimum without privacy is met.

The guarantee is that of `descent`: adaptively chosen Gaussian answers with Σμᵢ² <= μ² are μ-GDP, under every
adjacency. Which loss it is does not matter to that, because gradients are clipped; for the three here
residuals are bounded besides. The constants were chosen on made-up tables.

>>> import farthing as ft
>>> from farthing.linear.losses import Pinball
>>> from farthing.data.tables import Table
>>> x = np.linspace(0, 1, 5001)[:, None]
>>> ledger = ft.Ledger(ft.Budget(1.0, 1e-6)).over(Table(x, 0.2 + 0.5 * x[:, 0]))
>>> u, constant = ft.run(generalised(ledger, Problem(Pinball(0.5), 5001, 1, unit=False))).w
>>> bool(abs(u[0] - 0.5) < 0.1), round(ledger.share, 6)
(True, 1.0)
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from farthing.data.tables import Features
from farthing.errors import Unsupported
from farthing.ledger.ledger import Ledger
from farthing.linear.budget_schedule import BudgetSchedule
from farthing.linear.losses import Gradient, Huber, LogLinear, Loss, Pinball
from farthing.linear.methods.descent import INTERCEPT, DescentPace, along, median_norm, standardised, typical
from farthing.linear.methods.leastsquares import target
from farthing.linear.problem import Problem
from farthing.queries.bounds import ClipNorm
from farthing.queries.query import Step, until_spent

Array = NDArray[np.float64]

NORMS, MOMENTS = 0.01, 0.14
TARGETS = (0.02, 0.2)
TARGET_NOISE = 1 / 17
ROUNDED = 0.1
CLIP = 2.0
NOISE = 0.5  # the most that steps may put on a typical margin, in deviations of the target
_LEAST_MEAN = 1e-4  # of the target's bound, where logarithms begin


@until_spent
def generalised(ledger: Ledger, problem: Problem) -> Iterator[Step]:
    """Descends along noisy gradients of a loss of numbers, from their mean, in standardised features."""
    if problem.outputs or not isinstance(problem.loss, Huber | Pinball | LogLinear):
        raise Unsupported(
            f"{type(problem.loss).__name__} is no loss of numbers that this solver knows: Huber, Pinball or "
            "LogLinear, of one output"
        )
    schedule, d = BudgetSchedule(ledger, problem.records), problem.width
    reach = 1 / schedule.deviation(1.0, ClipNorm(1.0))  # N
    part = min(max((1 / (TARGET_NOISE * reach)) ** 2, TARGETS[0]), TARGETS[1])
    origin, spread = target(schedule, part, problem.intercept)
    rest = 1 - part * (1 + problem.intercept)
    loss, begin, residual, curvature, unit = _known(problem.loss, origin, math.sqrt(spread))

    for_norms = 0.0 if problem.unit else NORMS * rest
    radius = 1.0 if problem.unit else median_norm(schedule, for_norms, problem)
    mean, scale, *spectrum = standardised(schedule, MOMENTS * rest, problem, radius)
    height = INTERCEPT * math.sqrt(d) if problem.intercept else 0.0
    features = Features(d, mean * radius, scale / radius, height)
    if problem.start is None and problem.intercept:
        problem = replace(problem, start=(np.zeros(d), np.asarray(begin)))
    clip = max(CLIP, 0.7 * (reach / d) ** (1 / 3))
    bound = ClipNorm(clip * residual * typical(d))
    pace = DescentPace(rest * (1 - MOMENTS) - for_norms, curvature, NOISE * unit * min(1.0, reach / d))
    steps = along(
        schedule, pace, Gradient(loss, features), bound, problem.begin(features), (spectrum[0], spectrum[1])
    )
    for t, w in steps:
        yield Step(t, features.unfold(w), schedule.receipts())


def _known(loss: Loss, origin: float, deviation: float) -> tuple[Loss, float, float, float, float]:
    """Return the loss, a margin to begin at, a typical residual, a curvature and the unit of margins.

    All follow from ``origin`` and ``deviation``, the released mean and deviation of the target.
    """
    if isinstance(loss, Huber):
        return loss, origin, min(loss.threshold, deviation), loss.curvature, deviation
    if isinstance(loss, Pinball):
        loss = replace(loss, width=ROUNDED * deviation)
        begin = float(np.clip(origin + ndtri(loss.quantile) * deviation, 0.0, 1.0))
        spread = math.sqrt(loss.quantile * (1 - loss.quantile))
        return loss, begin, spread, loss.curvature, deviation
    mean = max(origin, _LEAST_MEAN)
    return loss, math.log(mean), deviation, min(1.0, 3 * mean), 1.0
