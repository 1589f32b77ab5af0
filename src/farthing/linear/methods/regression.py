"""What the methods for linear regression share: a space to work in, where to begin, and a penalty in it.

>>> from farthing.linear.losses import squared
>>> space = Space.of(Problem(squared, 100, 3, unit=False))
>>> space.features.size, round(space.radius, 9), space.start
(4, 2.0, array([0. , 0. , 0. , 0.5]))
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from farthing.data.tables import Features
from farthing.errors import Unsupported
from farthing.linear.losses import Squared
from farthing.linear.problem import Problem

Array = NDArray[np.float64]


class Space(NamedTuple):
    """Rows z as far to one side of 0 as to the other, and |z| <= radius.

    Features in [0, 1] are mapped to [-1, 1] and a constant 1 is put beside them; unit rows stay as they are.
    Methods begin at ``start``, the constant 1/2, which is the middle of the target's range [0, 1], so that no
    residual is above ``most`` = 1/2. Without an intercept nothing may be shifted: z is x, and ``most`` is 1.
    """

    features: Features
    radius: float
    start: Array
    most: float

    @classmethod
    def of(cls, problem: Problem) -> "Space":
        """The space of a problem that must be about the squared loss and one output."""
        if problem.outputs or not isinstance(problem.loss, Squared):
            raise Unsupported(
                f"regression is about the squared loss of one output, not {problem.loss} ({problem.outputs})"
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
    """``penalty`` |u|² of weights u on x, as a matrix on weights on z; the constant is free."""
    scale, d = np.asarray(features.scale), features.width
    matrix = np.zeros((features.size, features.size))
    matrix[:d, :d] = penalty * (scale @ scale.T if scale.ndim == 2 else np.diag(scale**2))
    return matrix
