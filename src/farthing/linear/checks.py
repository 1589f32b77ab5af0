"""Check the bounds that estimators are given, of features and targets, and clip rows to them.

>>> clipped(np.array([[-1.0, 5.0]]), np.zeros(2), np.array([1.0, 2.0])).tolist()
[[0.0, 2.0]]
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.data.columns import limits
from farthing.errors import InvalidValue

Array = NDArray[np.float64]


def clipped(X: Any, low: Array, high: Array) -> Any:
    """Return rows clipped to their bounds; zeros that are not stored stay so where they can."""
    if not hasattr(X, "indptr"):
        return np.clip(X, low, high)
    if (low > 0).any() or (high < 0).any():
        return np.clip(X.toarray(), low, high)
    X = X.astype(np.float64)
    X.data = np.clip(X.data, low[X.indices], high[X.indices])
    return X


_FEWEST, _MOST = 2**14, 2**28  # entries of tables that are worth a compact copy, and that may have one
_BLOCK = 2**18


def compact(X: Any, bounds: Any, records: int) -> tuple[Any, Any]:
    """Return a table and its bounds: mapped onto [0, 1], in float32, where that makes passes faster.

    A row is mapped by itself and by public numbers. One that is not finite becomes NaN, which counts as
    nothing. Files (`numpy.memmap`), sparse tables and very large ones stay as they are. ``records`` is the
    public number of them: were it the table's own where that is private, one record more might round all.
    """
    low, high = limits(bounds, X)
    unmapped = not low.any() and bool((high == 1).all())
    worth = _FEWEST <= records * X.shape[1] <= _MOST
    stays = isinstance(X, np.memmap) or not isinstance(X, np.ndarray) or not worth
    if stays or (unmapped and X.dtype.char in "fB?"):
        return X, bounds
    found, step = np.empty(X.shape, np.float32), max(1, _BLOCK // X.shape[1])
    scale = 1 / (high - low)
    for start in range(0, len(X), step):
        rows = np.asarray(X[start : start + step], dtype=np.float64)
        part, broken = found[start : start + step], ~np.isfinite(rows)
        with np.errstate(over="ignore", invalid="ignore"):
            np.clip((rows - low) * scale, 0.0, 1.0, out=part, casting="same_kind")
        if broken.any():
            part[broken] = np.nan
    return found, (0.0, 1.0)


def target_bounds(bounds: tuple[float, float] | None) -> tuple[float, float]:
    """Return the declared bounds of a target."""
    try:
        low, high = bounds  # type: ignore[misc]
    except (TypeError, ValueError):
        raise InvalidValue(f"declare target_bounds=(low, high) of the target, got {bounds!r}") from None
    if not validate.finite(low=low) < validate.finite(high=high):
        raise InvalidValue(f"target_bounds must be (low, high) with low < high, got {bounds!r}")
    return float(low), float(high)
