"""Provide the base of the methods for linear regression: working space, starting point and penalty.

>>> from farthing.linear.losses import squared
>>> space = Space.of(Problem(squared, 100, 3, unit=False))
>>> space.features.size, round(space.radius, 9), space.start
(4, 2.0, array([0. , 0. , 0. , 0.5]))

`noisy_gradient` is a baseline: plain noisy gradient descent for linear regression. It is Bassily, Smith &
Thakurta 2014, Algorithm 1, with all records in every step (no sampling, so no amplification): clipped
gradients, one noise vector per step, the mean of the second half of the iterates. Rows are divided by their
largest norm, so that the curvature is at most 1 and steps of length 1 are safe. It has no preconditioner,
which on features of different scales costs more than the noise (`leastsquares`).

Guarantee: ``steps`` Gaussian answers of μ²/steps each, so μ-GDP under every adjacency, with a GDP or zCDP
filter.

>>> import farthing as ft
>>> from farthing.linear.losses import squared
>>> from farthing.data.tables import Table
>>> x = np.linspace(0, 1, 5001)[:, None]
>>> ledger = ft.Ledger(ft.Budget(1.0, 1e-6)).over(Table(x, 0.2 + 0.5 * x[:, 0]))
>>> u, constant = ft.run(noisy_gradient(ledger, Problem(squared, 5001, 1, unit=False))).w
>>> bool(0 < u[0] < 0.6), round(ledger.share, 6)
(True, 1.0)
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.data.tables import Features
from farthing.errors import Unsupported
from farthing.ledger.ledger import Ledger
from farthing.linear.budget_schedule import BudgetSchedule
from farthing.linear.losses import LinearGradient, Squared
from farthing.linear.problem import Problem
from farthing.queries.bounds import ClipNorm
from farthing.queries.query import Step, until_spent

Array = NDArray[np.float64]


class Space(NamedTuple):
    """Rows z that are symmetric about 0, with |z| <= radius.

    Features in [0, 1] are mapped to [-1, 1] and a constant 1 is added; unit rows are not changed. Methods
    begin at ``start``, the constant 1/2, the middle of the target's range [0, 1], so that no residual is
    above ``most`` = 1/2. Without an intercept nothing is shifted: z is x, and ``most`` is 1.
    """

    features: Features
    radius: float
    start: Array
    most: float

    @classmethod
    def of(cls, problem: Problem) -> "Space":
        """Return the space of a problem with the squared loss and one output."""
        if problem.outputs or not isinstance(problem.loss, Squared):
            raise Unsupported(
                f"regression needs the squared loss of one output, got {problem.loss} ({problem.outputs})"
            )
        beside = float(problem.intercept)
        radius = math.sqrt(problem.radius**2 + beside)
        shift = bool(beside) and not problem.unit
        centre, scale = (0.5, 2.0) if shift else (0.0, 1.0)
        features = Features(problem.width, centre, scale, beside, radius)
        start = np.zeros(features.size)
        if problem.intercept:
            start[-1] = 0.5
        return cls(features, radius, start, 0.5 if problem.intercept else 1.0)


def ridge(features: Features, penalty: float) -> Array:
    """Return ``penalty`` |u|² of weights u on x as a matrix on weights on z, without the constant."""
    scale, d = np.asarray(features.scale), features.width
    matrix = np.zeros((features.size, features.size))
    matrix[:d, :d] = penalty * (scale @ scale.T if scale.ndim == 2 else np.diag(scale**2))
    return matrix


@until_spent
def noisy_gradient(
    ledger: Ledger, problem: Problem, *, steps: int = 30, clip_norm: float | None = None, length: float = 1.0
) -> Iterator[Step]:
    """Take steps along noisy gradients of all records, and average the second half of the iterates.

    Parameters
    ----------
    steps : int, default 30
        The number of answers.
    clip_norm : float, optional
        The largest norm of a record's gradient. None: the largest initial residual.
    length : float, default 1.0
        The learning rate.
    """
    space, steps = Space.of(problem), validate.count(steps=steps)
    length = validate.positive(length=length)
    scale = np.asarray(space.features.scale) / space.radius
    beside = space.features.intercept / space.radius
    features = Features(problem.width, space.features.centre, scale, beside, radius=1.0)
    bound = ClipNorm(space.most if clip_norm is None else validate.positive(clip_norm=clip_norm))
    schedule, gradient = BudgetSchedule(ledger, problem.records), LinearGradient(problem.loss, features)
    pull = ridge(features, problem.penalty / problem.records)
    w, mean = space.start * space.radius, np.zeros(features.size)
    for t in range(1, steps + 1):
        slope, _ = schedule.mean(1 / steps, gradient, bound, w)
        w = w - length * (slope + pull @ w)
        late = max(0, t - steps // 2)
        mean = mean + (w - mean) / late if late else w
        yield Step(t, features.unfold(mean), schedule.receipts())
