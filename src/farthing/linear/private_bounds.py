"""Buy the bounds of features from the budget of a fit, where nobody can declare them (``bounds="private"``).

The fit's own ledger pays: a share of its μ² (or ρ) goes to `farthing.statistics.ranges`, and the method
spends what is left, so that the whole fit is within its budget by the ledger's filter. The bounds are
released with the model.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.accounting.filters import GdpFilter, ZcdpFilter
from farthing.errors import InvalidValue, Unsupported
from farthing.ledger.ledger import Ledger
from farthing.linear.solvers import SolverMethod
from farthing.statistics import ranges
from farthing.statistics.spending import Allowance

Array = NDArray[np.float64]

SHARE = 0.1  # of μ²


def refuse(bounds: Any, X: Any, method: SolverMethod, people: Any) -> None:
    """Refuse bounds that cannot be bought, before anything is charged."""
    if bounds != "private":
        raise InvalidValue(f"bounds must be (low, high), 'private' or None, got {bounds!r}")
    if hasattr(X, "tocsr"):
        raise InvalidValue("bounds='private' needs a dense table: declare (0, high) of a sparse one")
    if people is not None:
        raise Unsupported("bounds='private' gives all records the same budget: declare bounds with budgets")
    if method.filter not in (GdpFilter, ZcdpFilter):
        raise Unsupported("bounds='private' needs a solver with a GDP or zCDP filter, such as 'auto'")


def bought(ledger: Ledger, X: Any) -> tuple[Array, Array]:
    """Return bounds of every column of a table, paid by a share of a ledger that is not spent yet."""
    return ranges.of_table(X, Allowance(ledger), SHARE)
