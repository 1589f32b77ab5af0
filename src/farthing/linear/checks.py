"""Check the bounds that estimators are given, of features and targets, and clip rows to them.

>>> low, high = limits((0, [1, 2]), 2)
>>> clipped(np.array([[-1.0, 5.0]]), low, high).tolist()
[[0.0, 2.0]]
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.errors import InvalidValue

Array = NDArray[np.float64]


def limits(bounds: Any, width: int) -> tuple[Array, Array]:
    """Return the bounds of a table, one number a feature each."""
    low, high = (np.broadcast_to(np.asarray(bound, dtype=np.float64), width) for bound in bounds)
    return low, high


def clipped(X: Any, low: Array, high: Array) -> Any:
    """Return rows clipped to their bounds; zeros that are not stored stay so where they can."""
    if not hasattr(X, "indptr"):
        return np.clip(X, low, high)
    if (low > 0).any() or (high < 0).any():
        return np.clip(X.toarray(), low, high)
    X = X.astype(np.float64)
    X.data = np.clip(X.data, low[X.indices], high[X.indices])
    return X


def target_bounds(bounds: tuple[float, float] | None) -> tuple[float, float]:
    """Return the declared bounds of a target."""
    try:
        low, high = bounds  # type: ignore[misc]
    except (TypeError, ValueError):
        raise InvalidValue(f"declare target_bounds=(low, high) of the target, got {bounds!r}") from None
    if not validate.finite(low=low) < validate.finite(high=high):
        raise InvalidValue(f"target_bounds must be (low, high) with low < high, got {bounds!r}")
    return float(low), float(high)
