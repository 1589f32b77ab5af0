"""What a method may know of a linear problem without asking: public numbers only."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farthing.losses import Loss
from farthing.tables import Features

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Problem:
    """A loss over ``records`` rows (a public number) of ``width`` features in [0, 1] or of norm 1 (``unit``).

    ``outputs`` is 0 for a weight vector, or the number of classes for a weight matrix. Methods yield the
    weights on x and the constant as `Step.w`, whatever space they work in. ``penalty`` is the alpha of
    scikit-learn's Ridge, for regression: Σ (y - x·u - constant)² + penalty |u|² is minimised.
    """

    loss: Loss
    records: int
    width: int
    outputs: int = 0
    intercept: bool = True
    unit: bool = True
    penalty: float = 0.0

    @property
    def radius(self) -> float:
        """The largest norm of a row x."""
        return 1.0 if self.unit else math.sqrt(self.width)

    def zeros(self, size: int) -> Array:
        """Weights to begin with, ``size`` being the length of z."""
        return np.zeros((size, self.outputs) if self.outputs else size)

    def rows(self) -> Features:
        """z of bounded norm, `Features.radius`, for methods that need no other map.

        Unit rows get a constant of .3 beside them, which lengthens them by 4 % only; others, whose length is
        not known, are shrunk to norm 1 together with a constant 1. Shrinking keeps the sign of a margin.
        """
        if not self.unit:
            return Features(self.width, intercept=float(self.intercept), radius=1.0)
        constant = 0.3 if self.intercept else 0.0
        return Features(self.width, intercept=constant, radius=math.hypot(1.0, constant))
