"""Sum gradients of a table at weights that others choose: each row is computed at a place of its own.

The theorem is in `farthing.data.placed`.

>>> from farthing.data.tables import Features
>>> from farthing.linear.losses import logistic
>>> table, bound = Table(np.ones((3, 1)), np.ones(3)), ClipNorm(1.0)
>>> gradient = PlacedGradient(logistic, Features(1))
>>> np.round(gradient.bounded_sum(table, np.zeros(2), bound), 6).tolist()
[-1.5, -1.5]
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farthing.data.placed import PLACES, placed
from farthing.data.tables import Table
from farthing.linear.losses import Gradient
from farthing.noise.summing import Sum
from farthing.queries.bounds import ClipNorm

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PlacedGradient(Gradient):
    """A `Gradient` whose terms do not depend on who is beside them, not even in their last bits."""

    def bounded_sum(self, records: Table, w: Array, bound: ClipNorm) -> Array:
        if len(records) == 0:
            return Gradient.bounded_sum(self, records, w, bound)
        total = Sum(len(records), np.shape(w))
        for block in placed(records):
            some = Gradient.bounded_sum(self, block, w, bound)  # type: ignore[arg-type]
            total.add(some, min(PLACES, len(block)))
        return total.value
