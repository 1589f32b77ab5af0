"""Check the bounds and classes that estimators are given, clip rows to bounds, and find labels among classes.

>>> clipped(np.array([[-1.0, 5.0]]), np.zeros(2), np.array([1.0, 2.0])).tolist()
[[0.0, 2.0]]
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

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
    scale, mapped = 1 / (high - low), np.empty((min(step, len(X)), X.shape[1]))
    for start in range(0, len(X), step):
        rows = np.asarray(X[start : start + step], dtype=np.float64)
        part, share = found[start : start + step], mapped[: len(rows)]
        with np.errstate(over="ignore", invalid="ignore"):
            np.multiply(np.subtract(rows, low, out=share), scale, out=share)
            np.minimum(np.maximum(share, 0.0, out=share), 1.0, out=share)
        part[...] = share
        if not (np.isfinite(rows.min()) and np.isfinite(rows.max())):
            part[~np.isfinite(rows)] = np.nan
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


def declared(classes: ArrayLike) -> NDArray[Any]:
    """Return the declared classes, sorted."""
    known = np.unique(np.asarray(classes))
    if np.ndim(classes) != 1 or known.size < 2:
        raise InvalidValue(f"classes must list two labels or more, not one class or none; got {classes!r}")
    if known.dtype.kind == "f" and not (np.isfinite(known) & (known == np.rint(known))).all():
        raise InvalidValue("Unknown label type: classes must be whole numbers or texts, these are continuous")
    return known


def codes(y: NDArray[Any], classes: NDArray[Any]) -> Array:
    """Return the place of every label among the classes, NaN for one that is not declared."""
    if "O" in (y.dtype.kind, classes.dtype.kind):
        known = {label: place for place, label in enumerate(classes.tolist())}
        return np.array([_place(label, known) for label in y.tolist()], dtype=np.float64)
    texts = [values.dtype.kind in "US" for values in (y, classes)]
    if texts[0] != texts[1] or y.dtype.kind not in "biufUS":
        raise InvalidValue(
            f"y must hold labels of the kind of classes={classes.tolist()}, got {y.dtype.type.__name__}"
        )
    places = np.searchsorted(classes, y).clip(0, len(classes) - 1)
    return np.where(classes[places] == y, places, np.nan)


def _place(label: Any, known: dict[Any, int]) -> float:
    try:
        return float(known.get(label, np.nan))
    except Exception:  # nothing that could be looked up
        return float("nan")
