"""Read declared classes, and the place of every label among them."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from farthing.errors import InvalidValue

Array = NDArray[np.float64]


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
    except TypeError:  # nothing that could be looked up
        return float("nan")
