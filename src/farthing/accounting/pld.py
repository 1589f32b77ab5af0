"""Tight accounting of a fixed list of events, by certified inversion of their transform.

The guarantee: the dominating pairs of `pairs` compose (Zhu, Dong & Wang 2022, Thm. 10), their privacy
profile is the hockey-stick divergence, and `inversion` never under-reports it. Both directions are
computed and the larger is returned. Valid for a plan whose *prices* are fixed before the first answer
(see `farthing.accounting.filters` for prices chosen on the way).

>>> from farthing.events import GaussianEvent, PoissonEvent, RepeatedEvent
>>> event = RepeatedEvent(PoissonEvent(0.01, GaussianEvent(4.0)), 10_000)
>>> round(epsilon(event, 1e-5), 6)
0.946867
"""

import math
from collections.abc import Callable, Sequence

from farthing import validate
from farthing.accounting import gaussian, grid
from farthing.accounting.inversion import Line, log_factor, smallest
from farthing.accounting.pairs import Mixture, Pair, Shift, of_event
from farthing.accounting.transform import Contour, log_moment, transform
from farthing.budget import Adjacency
from farthing.events import Event, flatten

Steps = Sequence[tuple[Pair, int]]

TOO_MUCH = 1e4  # an epsilon beyond this is reported as infinite
_MOST_FREQUENCIES = 1024
_FEW = 64  # steps up to which a grid of dp-accounting's helps where frequencies run out


def epsilon(event: Event, delta: float, adjacency: Adjacency = Adjacency.ADD_REMOVE) -> float:
    """The smallest certified ε at ``delta``; infinite beyond ten thousand."""
    delta = validate.probability(delta=delta)
    worst, tilt, weak = 0.0, None, False
    for steps in directions(event, adjacency):
        found, tilt, short = _epsilon(steps, delta, tilt, worst)
        worst, weak = max(worst, found), weak or short
    if weak and sum(count for _, count in flatten(event)) <= _FEW:
        worst = min(worst, grid.epsilon(event, delta, adjacency, worst))
    return worst


def delta(event: Event, epsilon: float, adjacency: Adjacency = Adjacency.ADD_REMOVE) -> float:
    """The smallest certified δ at ``epsilon``."""
    epsilon = validate.non_negative(epsilon=epsilon)
    return max(math.exp(log_delta(steps, epsilon)) for steps in directions(event, adjacency))


def directions(event: Event, adjacency: Adjacency) -> list[list[tuple[Pair, int]]]:
    """For each direction, the pairs and how often; events with one pair count in both directions."""
    parts = [(of_event(simple, adjacency), count) for simple, count in flatten(event)]
    ways = max((len(pairs) for pairs, _ in parts), default=1)
    return [[(pairs[min(way, len(pairs) - 1)], count) for pairs, count in parts] for way in range(ways)]


def _epsilon(
    steps: Steps, delta: float, tilt: float | None, enough: float
) -> tuple[float, float | None, bool]:
    """ε in one direction, the tilt used (one that shows ε <= ``enough`` will do), and whether it is weak."""
    goal = math.log(delta)
    mu = gaussian_part(steps)
    if mu is not None:
        return gaussian.epsilon(mu, delta) if mu else 0.0, None, False
    if is_single(steps):
        return smallest(lambda x: log_delta(steps, x) - goal, 0.0, TOO_MUCH), None, False
    if tilt is None:
        tilt = best_tilt(steps, lambda tilt, moment: (moment + log_factor(tilt) - goal) / tilt)
        enough = math.inf
    ceiling = max(0.0, (moment(steps, tilt) + log_factor(tilt) - goal) / tilt) * (1 + 1e-12)
    if not ceiling < TOO_MUCH:
        return math.inf, tilt, False
    line = line_through(steps, tilt, ceiling)
    found = smallest(lambda x: line.log_delta(x) - goal, 0.0, ceiling, 1e-10)
    if found <= enough:
        line.log_delta(found)
        return float(found), tilt, line.weak
    return _epsilon(steps, delta, None, math.inf)


def log_delta(steps: Steps, epsilon: float, tilt: float | None = None) -> float:
    """log of the certified bound on δ(ε) in one direction, on a line at ``tilt`` or the best one."""
    mu = gaussian_part(steps)
    if mu is not None:
        return gaussian.log_delta(mu, epsilon) if mu else -math.inf
    if is_single(steps):
        return single_log_delta(steps[0][0], epsilon)
    if tilt is None:
        tilt = best_tilt(steps, lambda tilt, moment: moment + log_factor(tilt) - tilt * epsilon)
    if not math.isfinite(moment(steps, tilt)):
        return 0.0
    return line_through(steps, tilt, epsilon).log_delta(epsilon)


def is_single(steps: Steps) -> bool:
    """One step of a Gaussian mixture against a Gaussian, where δ(ε) is a closed form."""
    if len(steps) != 1 or steps[0][1] != 1 or not isinstance(steps[0][0], Mixture):
        return False
    (piece, *others) = steps[0][0].pieces
    return not others and piece.start is None and min(piece.p, piece.r) == 0.0


def single_log_delta(pair: Pair, epsilon: float) -> float:
    """log δ(ε) of (1-q) N(0) + q N(a) against N(0), or swapped (Balle, Barthe & Gaboardi 2018, Thm. 2)."""
    assert isinstance(pair, Mixture)
    piece = pair.pieces[0]
    if piece.r == 0.0:
        inner = math.log1p(math.expm1(epsilon) / piece.p) if epsilon < 500 else epsilon - math.log(piece.p)
        return math.log(piece.p) + gaussian.log_delta(piece.a, inner)
    rest = piece.r - (1 - piece.r) * math.expm1(epsilon) if epsilon < 500 else -1.0
    if rest <= 0:
        return -math.inf
    return math.log(rest) + gaussian.log_delta(piece.b, epsilon + math.log(piece.r / rest))


def gaussian_part(steps: Steps) -> float | None:
    """μ when every step is a plain Gaussian (they compose exactly), None otherwise."""
    if not all(isinstance(pair, Shift) for pair, _ in steps):
        return None
    return math.sqrt(sum(count * pair.mu**2 for pair, count in steps if isinstance(pair, Shift)))


def moment(steps: Steps, tilt: float) -> float:
    """Σ log M(λ), rounded up."""
    return sum(count * log_moment(pair, tilt) for pair, count in steps)


def best_tilt(steps: Steps, cost: Callable[[float, float], float], start: float | None = None) -> float:
    """The λ that (about) minimises ``cost(λ, log M(λ))``: the saddle point."""

    def at(tilt: float) -> float:
        value = moment(steps, tilt)
        return cost(tilt, value) if math.isfinite(value) else math.inf

    tilt = start or min(4.0 / math.sqrt(2 * moment(steps, 0.05) / (0.05 * 1.05) + 1e-16), 1e8)
    best, reach = at(tilt), 0.6
    while best == math.inf and tilt > 1e-6:
        tilt /= 4
        best = at(tilt)
    while reach > 0.08:
        for trial in (tilt * math.exp(reach), tilt * math.exp(-reach)):
            value = at(trial)
            if value < best:
                tilt, best = trial, value
                break
        else:
            reach /= 2
    return tilt


def line_through(steps: Steps, tilt: float, epsilon: float) -> Line:
    """The composition on a line whose frequencies suffice around ``epsilon``."""
    near = moment(steps, tilt * 1.02), moment(steps, tilt), moment(steps, tilt * 0.98)
    curvature = max((near[0] - 2 * near[1] + near[2]) / (0.02 * tilt) ** 2, 0.0)
    spread = math.sqrt(curvature) if 0 < curvature < math.inf else 1 / tilt
    spacing = min(0.15 * tilt, 0.6 / spread)
    count = min(max(24, math.ceil(7.5 / (spread * spacing))), _MOST_FREQUENCIES)
    line = compose(steps, Contour(tilt, spacing, count))
    while line.log_delta(epsilon) < 0 and line.weak and count < _MOST_FREQUENCIES:
        count = min(2 * count, _MOST_FREQUENCIES)
        finer = compose(steps, Contour(tilt, spacing, count))
        if finer.error == math.inf:
            break
        line = finer
    return line


def compose(steps: Steps, contour: Contour) -> Line:
    """All steps on one contour; a step too wild for quadrature counts by its moment alone."""
    line = Line.empty(contour)
    for pair, count in steps:
        step = transform(pair, contour)
        if step is None:
            line.error = math.inf
            return line
        line.add(step, count)
    return line
