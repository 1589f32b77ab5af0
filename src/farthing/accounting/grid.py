"""Tight accounting of a few steps on dp-accounting's grid, where frequencies run out.

dp-accounting discretises the privacy loss pessimistically ("connect the dots", Doroshenko et al. 2022) and
convolves, so its ε is an upper bound too; it costs tens of milliseconds, against one for `pld`.
"""

import math

from farthing.budget import Adjacency
from farthing.events import Event, GaussianEvent, LaplaceEvent, PoissonEvent, flatten

_POINTS = 1000  # grid points between 0 and the ε looked for
_FINEST = 5e-5  # finer ones take seconds
_LEAST_NOISE, _MOST_NOISE, _LEAST_RATE = 0.05, 1e5, 1e-9  # beyond, its floating point gives way
_SMALLEST_DELTA = 1e-12  # below, dp-accounting's own truncation of tails shows


def epsilon(event: Event, delta: float, adjacency: Adjacency, about: float) -> float:
    """An upper bound on ε(δ), infinite where dp-accounting has no grid for the event."""
    steps = flatten(event)
    if delta < _SMALLEST_DELTA or not 0 < about < math.inf or not all(_known(e, adjacency) for e, _ in steps):
        return math.inf
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    relation = {
        Adjacency.ADD_REMOVE: dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
        Adjacency.REPLACE_ONE: dp_accounting.NeighboringRelation.REPLACE_ONE,
        Adjacency.ZERO_OUT: dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
    }[adjacency]
    accountant = PLDAccountant(relation, value_discretization_interval=max(about / _POINTS, _FINEST))
    try:
        for part, count in steps:
            accountant.compose(_translate(part), count)
        return float(accountant.get_epsilon(delta))
    except (ValueError, ArithmeticError):  # beyond the range of its floating point
        return math.inf


def _known(event: Event, adjacency: Adjacency) -> bool:
    match event:
        case GaussianEvent(noise):
            return _LEAST_NOISE < noise < _MOST_NOISE
        case LaplaceEvent(noise):
            return _LEAST_NOISE < noise < _MOST_NOISE and adjacency is not Adjacency.REPLACE_ONE
        case PoissonEvent(rate, GaussianEvent() | LaplaceEvent() as inner):
            return rate > _LEAST_RATE and _known(inner, adjacency)
    return False


def _translate(event: Event) -> object:
    import dp_accounting

    match event:
        case GaussianEvent(noise):
            return dp_accounting.GaussianDpEvent(noise)
        case LaplaceEvent(noise):
            return dp_accounting.LaplaceDpEvent(noise)
        case PoissonEvent(rate, inner):
            return dp_accounting.PoissonSampledDpEvent(rate, _translate(inner))
    raise AssertionError(event)
