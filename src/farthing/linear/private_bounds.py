"""Buy the bounds of features from the budget of a fit, where nobody can declare them (``bounds="private"``).

The fit's own ledger pays: a share of its μ² (or ρ) goes to `farthing.statistics.ranges`, and the method
spends what is left, so that the whole fit is within its budget by the ledger's filter. The bounds are
released with the model.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.accounting.filters import BasicFilter, GdpFilter, ZcdpFilter
from farthing.errors import InvalidValue, Unsupported
from farthing.ledger.ledger import Ledger
from farthing.linear.solvers import SolverMethod
from farthing.statistics import ranges
from farthing.statistics.spending import Allowance

Array = NDArray[np.float64]

SHARE = 0.1  # of μ²


def unknown(bounds: Any, width: int) -> NDArray[np.bool_] | None:
    """Return which features have no bounds, "private" or NaN; None where all have, or none is needed."""
    if isinstance(bounds, str):
        if bounds != "private":
            raise InvalidValue(f"bounds must be (low, high), 'private' or None, got {bounds!r}")
        return np.ones(width, np.bool_)
    try:
        low, high = (np.broadcast_to(np.asarray(end, np.float64), width) for end in bounds)
    except (TypeError, ValueError):
        return None  # which the table refuses, if it is wrong
    missing = np.isnan(low) | np.isnan(high)
    return missing if missing.any() else None


def refuse(X: Any, method: SolverMethod, people: Any, ledger: Ledger | None = None) -> None:
    """Refuse to buy bounds where that cannot be done, before anything is charged."""
    if ledger is not None and not isinstance(ledger.filter, GdpFilter | ZcdpFilter | BasicFilter):
        raise Unsupported("bounds='private' needs a ledger with a GDP, zCDP or basic filter")
    if hasattr(X, "tocsr"):
        raise InvalidValue("bounds='private' needs a dense table: declare (0, high) of a sparse one")
    if people is not None:
        raise Unsupported("bounds='private' gives all records the same budget: declare bounds with budgets")
    if method.filter not in (GdpFilter, ZcdpFilter):
        raise Unsupported("bounds='private' needs a solver with a GDP or zCDP filter, such as 'auto'")


def bought(ledger: Ledger, X: Any, bounds: Any, missing: NDArray[np.bool_]) -> tuple[Array, Array]:
    """Return bounds of every feature, those that are missing paid by a share of a ledger not spent yet."""
    low, high = ranges.of_table(ranges.Chosen(X, missing), Allowance(ledger), SHARE)
    if missing.all():
        return low, high
    ends = [np.array(np.broadcast_to(np.asarray(end, np.float64), len(missing))) for end in bounds]
    ends[0][missing], ends[1][missing] = low, high
    return ends[0], ends[1]
