"""Release quantiles: by private choices if there are few, from a tree of noisy counts if there are many.

A range between two bounds is divided into 4,096 cells.

*Choices.* For a quantile q every edge c between cells has the score -|(1-q) #(x < c) - q #(x >= c)|, which is
0 at the quantile. Under add-remove a record changes each score by at most m = max(q, 1-q), so the gap of two
scores changes by at most 2m; under replace-one it changes each by at most 1 <= 2m. The edge is chosen by the
exponential mechanism (McSherry & Talwar 2007; as Gumbel noise on a lattice, `NoisyMax`), which has a bounded
range of ε at noise 2m/ε: the chosen score is within (2m/ε)(ln K + t) of the best with probability 1 - e^-t
(Dwork & Roth 2014, Cor. 3.12).

*A tree.* Counts of cells, of blocks of 16 cells and of blocks of 256 have noise; a record is in one node of
each level, so its term has L2 norm √3 and L1 norm 3. Post-processing makes counts consistent by the weighted
means of Hay et al. 2010 (Thm. 3), makes their sums increasing by isotonic regression, and reads all quantiles
from them. The error does not grow with the number of quantiles.

Public numbers decide between the two: the one with the smaller error in ranks is used.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import isotonic_regression

from farthing import validate
from farthing.accounting.filters import BasicFilter, GdpFilter
from farthing.budget import Budget
from farthing.data.columns import numbers
from farthing.errors import InvalidValue
from farthing.ledger.ledger import Ledger
from farthing.queries.bounds import ClipNorm, ClipValue, Kind
from farthing.queries.mechanisms import NoisyMax
from farthing.queries.query import Query, Rows
from farthing.queries.samplers import Everyone
from farthing.statistics.cells import limits, shrunk
from farthing.statistics.spending import CONFIDENCE, Allowance, Statistic

Array = NDArray[np.float64]

BRANCHES, LEVELS = 16, 3
LEAVES = BRANCHES**LEVELS
_NORMS = (float(LEVELS), math.sqrt(LEVELS))
_PREFIX = math.sqrt(LEVELS * BRANCHES / 4)  # about the nodes whose noise is in a sum of counts


@dataclass(frozen=True, slots=True)
class Tree:
    """A contribution that counts records in the nodes of a tree over [low, high], leaves last.

    Records are ``Rows(numbers)``; numbers beyond the bounds are clipped, those not finite are in no node.
    """

    low: float
    high: float
    honours: ClassVar[tuple[str, ...]] = (Kind.NORM, Kind.L1_NORM)
    shape: ClassVar[tuple[int, ...]] = (sum(BRANCHES**level for level in range(1, LEVELS + 1)),)

    def bounded_sum(self, records: Any, w: Any, bound: ClipNorm) -> Array:
        """Return the counts, level by level, in units of the bound."""
        leaves = _leaves(records[0], self.low, self.high)
        levels = [leaves.reshape(BRANCHES**level, -1).sum(axis=1) for level in range(1, LEVELS + 1)]
        return np.concatenate(levels) * shrunk(bound, _NORMS)


@dataclass(frozen=True, slots=True)
class QuantileScores:
    """A contribution that scores every edge between cells of [low, high] as the quantile ``q``; not a sum."""

    q: float
    low: float
    high: float
    honours: ClassVar[tuple[str, ...]] = (Kind.VALUE,)
    shape: ClassVar[tuple[int, ...]] = (LEAVES + 1,)
    additive: ClassVar[bool] = False

    @property
    def interval(self) -> tuple[float, float]:
        """The range of one record's change of a score; with one sign a gap would have half the price."""
        most = max(self.q, 1 - self.q)
        return -most, most

    def bounded_sum(self, records: Any, w: Any, bound: ClipValue) -> Array:
        """Return the score of each edge."""
        leaves = _leaves(records[0], self.low, self.high)
        below = np.concatenate([[0.0], np.cumsum(leaves)])
        return np.asarray(-np.abs((1 - self.q) * below - self.q * (below[-1] - below)))


def _leaves(values: Any, low: float, high: float) -> Array:
    """Return the number of values in each cell; those beyond the bounds are clipped."""
    found = np.asarray(values, dtype=np.float64)
    found = np.clip(found[np.isfinite(found)], low, high)
    places = np.minimum(((found - low) * (LEAVES / (high - low))).astype(np.int64), LEAVES - 1)
    return np.bincount(places, minlength=LEAVES).astype(np.float64)


def quantiles(
    values: ArrayLike,
    q: ArrayLike,
    bounds: tuple[float, float],
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    ledger: Ledger | None = None,
) -> Statistic:
    """Release quantiles of numbers between public bounds.

    Parameters
    ----------
    values : array-like of shape (records,)
        Private numbers; missing ones are not counted, those beyond the bounds are clipped.
    q : float or array-like
        The quantiles, from 0 to 1.
    bounds : (low, high)
        Public bounds, or bounds that `bounds` released. A quantile is exact to 1/4096 of their width.
    epsilon, delta : float, optional
        The budget of this statistic; with ``ledger`` the part of it to spend, by default the remainder.
    ledger : Ledger, optional
        The ledger to spend from. None makes one in memory.

    Returns
    -------
    Statistic
        The quantiles; ``error`` is in **records**: the largest error in ranks, with probability 0.95.

    Examples
    --------
    >>> import farthing as ft
    >>> found = ft.quantiles(range(10_000), [0.25, 0.75], (0, 10_000), epsilon=1.0, delta=1e-6)
    >>> [bool(abs(value - expected) < 300) for value, expected in zip(found.value, (2500, 7500))]
    [True, True]
    """
    low, high = limits(bounds)
    wanted = _wanted(q)
    records = Rows(numbers("values", values))
    spend, chosen = _cheaper(wanted, ledger, epsilon, delta)
    found, error = (_chosen if chosen else _read)(spend, records, wanted, low, high)
    if np.ndim(q) == 0:
        return Statistic(float(found[0]), float(error[0]), spend.ledger.guarantee)
    return Statistic(found, error, spend.ledger.guarantee, tuple(wanted.tolist()))


def _wanted(q: ArrayLike) -> Array:
    try:
        wanted = np.atleast_1d(np.asarray(q, dtype=np.float64))
    except (TypeError, ValueError):
        wanted = np.array([math.nan])
    if wanted.ndim != 1 or not wanted.size or not ((wanted >= 0) & (wanted <= 1)).all():
        raise InvalidValue(f"q must be quantiles from 0 to 1, got {q!r}")
    return wanted


def _cheaper(
    wanted: Array, ledger: Ledger | None, epsilon: float | None, delta: float | None
) -> tuple[Allowance, bool]:
    """Return the allowance, and whether to spend it on choices; public numbers decide which is better."""
    if ledger is not None:
        spend = Allowance.of(ledger, epsilon, delta, _NORMS)
        return spend, _typical(spend, wanted, True) < _typical(spend, wanted, False)
    if epsilon is None:
        raise InvalidValue("pass epsilon (and delta, if it is not 0), or a ledger to spend from")
    budget = Budget(epsilon, 0.0 if delta is None else delta)
    rules: list[Any] = [BasicFilter, GdpFilter] if budget.delta else [BasicFilter]
    ways = [(Allowance(Ledger(budget, filter=rule)), chosen) for rule in rules for chosen in (True, False)]
    return min(ways, key=lambda way: _typical(way[0], wanted, way[1]))


def _typical(spend: Allowance, wanted: Array, chosen: bool) -> float:
    """Return the typical rank error of the worst quantile: twice the noise of a score, or a deviation."""
    if not chosen:
        return _tree_error(spend) / spend.quantile
    return float(2 * _choice_noise(spend, wanted).max())


def _choice_noise(spend: Allowance, wanted: Array) -> Array:
    """Return the scale of the noise on the scores of each quantile."""
    return np.asarray(
        2 * spend.adjacency.shift * np.maximum(wanted, 1 - wanted) / spend.choice(1 / len(wanted))
    )


def _choice_error(spend: Allowance, wanted: Array) -> Array:
    """Return the largest rank error of a choice, with probability 0.95."""
    return _choice_noise(spend, wanted) * (math.log(LEAVES + 1) - math.log(1 - CONFIDENCE))


def _tree_error(spend: Allowance) -> float:
    return spend.quantile * _PREFIX * spend.deviation(spend.bound(_NORMS))


def _chosen(spend: Allowance, records: Rows, wanted: Array, low: float, high: float) -> tuple[Array, Array]:
    """Choose each quantile privately."""
    edges = np.linspace(low, high, LEAVES + 1)
    epsilon, found = spend.choice(1 / len(wanted)), []
    noise = NoisyMax(2 * spend.adjacency.shift / epsilon)
    for q in wanted.tolist():
        scores = QuantileScores(q, low, high)
        query = Query(Everyone(), scores, ClipValue(*scores.interval), noise)
        found.append(edges[spend.ledger.over(records).ask(query).value])
    return np.array(found), _choice_error(spend, wanted)


def _read(spend: Allowance, records: Rows, wanted: Array, low: float, high: float) -> tuple[Array, Array]:
    """Read all quantiles from one noisy tree."""
    total, _ = spend.ask(records, Tree(low, high), _NORMS)
    below = cumulative(total)
    places = np.interp(wanted * below[-1], below, np.linspace(low, high, LEAVES + 1))
    return places, np.full(len(wanted), _tree_error(spend))


def cumulative(total: Array) -> Array:
    """Return increasing noisy counts below every edge, from the noisy nodes of a tree."""
    ends = np.cumsum([BRANCHES**level for level in range(1, LEVELS + 1)])
    levels = np.split(total, ends[:-1])
    means = [levels[-1]]
    for height, counts in enumerate(reversed(levels[:-1]), 2):  # Hay et al. 2010, Thm. 3: from the leaves up
        below = means[0].reshape(-1, BRANCHES).sum(axis=1)
        whole, part = float(BRANCHES**height), float(BRANCHES ** (height - 1))
        means.insert(0, ((whole - part) * counts + (part - 1) * below) / (whole - 1))
    consistent = means[0]
    for counts in means[1:]:  # and down again
        surplus = (consistent - counts.reshape(-1, BRANCHES).sum(axis=1)) / BRANCHES
        consistent = counts + np.repeat(surplus, BRANCHES)
    sums = np.concatenate([[0.0], np.cumsum(consistent)])
    increasing: Array = isotonic_regression(sums).x
    return np.maximum(increasing, 0.0) + np.linspace(0, validate.positive(step=1e-9), len(increasing))
