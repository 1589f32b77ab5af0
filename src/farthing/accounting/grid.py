"""Tight accounting of a few steps on dp-accounting's grid, where frequencies run out.

dp-accounting discretises the privacy loss pessimistically ("connect the dots", Doroshenko et al. 2022) and
convolves, so its ε is an upper bound too; it costs tens of milliseconds, against one for `pld`.
"""

import math
from typing import Any

from farthing.budget import Adjacency
from farthing.queries.events import Event, GaussianEvent, LaplaceEvent, PoissonEvent, flatten

_POINTS = 1000  # grid points between 0 and the ε looked for
_FINEST, _LONGEST = 5e-5, 100_000  # finer or longer grids take seconds
_LEAST_NOISE, _MOST_NOISE, _LEAST_RATE = 0.05, 1e5, 1e-9  # beyond, its floating point gives way
SMALLEST_DELTA = 1e-11  # below, dp-accounting's own truncation of tails shows
_ROUNDING = 1e-14  # more than its convolutions, by fast Fourier transforms, lose of a δ


def epsilon(event: Event, delta: float, adjacency: Adjacency, about: float) -> float:
    """An upper bound on ε(δ), infinite where dp-accounting has no grid for the event."""
    if delta < SMALLEST_DELTA or not 0 < about < math.inf:
        return math.inf
    accountant = _compose(event, adjacency, about)
    return math.inf if accountant is None else float(accountant.get_epsilon(delta - _ROUNDING))


def delta(event: Event, epsilon: float, adjacency: Adjacency) -> float:
    """An upper bound on δ(ε), not sharpened below 1e-11; 1 where dp-accounting has no grid for the event."""
    accountant = _compose(event, adjacency, epsilon)
    return (
        1.0 if accountant is None else max(float(accountant.get_delta(epsilon)) + _ROUNDING, SMALLEST_DELTA)
    )


def _compose(event: Event, adjacency: Adjacency, about: float) -> Any:
    """dp-accounting's accountant of the event, on a grid that suits an ε of ``about``."""
    steps = flatten(event)
    if not all(_known(part, adjacency) for part, _ in steps):
        return None
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    relation = {
        Adjacency.ADD_REMOVE: dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
        Adjacency.REPLACE_ONE: dp_accounting.NeighboringRelation.REPLACE_ONE,
        Adjacency.ZERO_OUT: dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
    }[adjacency]
    interval = max(about / _POINTS, _FINEST, max(_reach(part, adjacency) for part, _ in steps) / _LONGEST)
    accountant = PLDAccountant(relation, value_discretization_interval=interval)
    try:
        for part, count in steps:
            accountant.compose(_translate(part), count)
    except (ValueError, ArithmeticError):  # beyond the range of its floating point
        return None
    return accountant


def _reach(event: Event, adjacency: Adjacency) -> float:
    """About the largest privacy loss that its grid for one step holds."""
    match event:
        case GaussianEvent(noise):
            shift = adjacency.shift / noise
            return shift * (shift / 2 + 10)
        case PoissonEvent(_, inner):
            return _reach(inner, adjacency)
    return 0.0


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
