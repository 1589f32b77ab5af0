"""What a method may know of a linear problem without asking: public numbers only."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farthing.losses import Loss

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Problem:
    """A loss over ``records`` rows (a public number) of ``width`` features in [0, 1] or of norm 1 (``unit``).

    ``outputs`` is 0 for a weight vector, or the number of classes for a weight matrix. Methods yield the
    weights on x and the constant as `Step.w`, whatever space they work in.
    """

    loss: Loss
    records: int
    width: int
    outputs: int = 0
    intercept: bool = True
    unit: bool = True

    @property
    def radius(self) -> float:
        """The largest norm of a row x."""
        return 1.0 if self.unit else math.sqrt(self.width)

    def zeros(self, size: int) -> Array:
        """Weights to begin with, ``size`` being the length of z."""
        return np.zeros((size, self.outputs) if self.outputs else size)
