"""Return pairs of neighbouring tables on which methods show most: the worst record among harmless others."""

import numpy as np

from farthing.data.tables import Table
from farthing.linear.additive.basis import Binned, codes_of


def linear_pair(records: int = 8) -> tuple[Table, Table]:
    """Return rows e₁ with label 0, and the same with the canary e₂ with label 1."""
    x = np.zeros((records, 2))
    x[:, 0] = 1.0
    within = np.vstack([x, [[0.0, 1.0]]])
    return Table(x, np.zeros(records)), Table(within, np.append(np.zeros(records), 1.0))


def opposite_pair(records: int = 4) -> tuple[Table, Table]:
    """Return rows e₁ with label 0, the last with label 1 in the second: the gradients are opposite."""
    x = np.zeros((records, 2))
    x[:, 0] = 1.0
    y = np.zeros(records)
    return Table(x, y), Table(x, np.append(y[1:], 1.0))


def corner_pair(records: int = 8) -> tuple[Table, Table]:
    """Return rows 0 with target 0, which move nothing, and one more at the corner of the domain, (1, 1)."""
    x, y = np.zeros((records + 1, 1)), np.zeros(records + 1)
    x[-1, 0] = y[-1] = 1.0
    return Table(x[:records], y[:records]), Table(x, y)


def pulled_pair(*targets: float, records: int = 1000, width: int = 2) -> tuple[Table, Table]:
    """Return many short rows along e₁ with these targets in turn, and one of norm 1 more with target 1.

    Together the short rows pull the weight far to one side, and add hardly any curvature, so that the last
    record's residual comes near the loss's slope and moves the minimiser as far as any record can.
    """
    x, y = np.zeros((records + 1, width)), np.resize(np.array(targets), records + 1)
    x[:, 0] = 0.025
    x[-1, 0] = y[-1] = 1.0
    return Table(x[:records], y[:records]), Table(x, y)


def outvoted_pair(records: int = 200, width: int = 2) -> tuple[Table, Table]:
    """Return many rows e₁ with label 0, and one more with label 1, whose residual is near 1 after a fit."""
    x, y = np.zeros((records + 1, width)), np.zeros(records + 1)
    x[:, 0] = y[-1] = 1.0
    return Table(x[:records], y[:records]), Table(x, y)


def trailing_pair() -> tuple[Table, Table]:
    """Return four rows of label 0 and two of label 1, and one more of label 1.

    A choice tells most of the record where the label was improbable without it. Two votes behind, its
    log-ratio is 1.89 of ε = 2; of a tie it would be 0.57.
    """
    x, y = np.ones((7, 1)), np.repeat([0.0, 1.0], [4, 3])
    return Table(x[:6], y[:6]), Table(x, y)


def binned_pair(records: int = 8) -> tuple[Binned, Binned]:
    """Return the rows of `linear_pair`, the canary between its bounds, with their cells."""
    x = np.zeros((records, 2))
    x[:, 0] = 0.5
    within, y = np.vstack([x, [[0.9, 0.3]]]), np.append(np.zeros(records), 1.0)
    ends = np.zeros(2), np.ones(2)
    return Binned(Table(x, y[:-1]), codes_of(x, *ends)), Binned(Table(within, y), codes_of(within, *ends))
