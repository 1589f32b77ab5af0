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

import numpy as np
from scipy.special import log_ndtr

from farthing import validate
from farthing.accounting import gaussian, grid
from farthing.accounting.inversion import Line, log_factor, smallest
from farthing.accounting.pairs import Mixture, Pair, SeenShift, Shift, largest_loss, of_event
from farthing.accounting.transform import Contour, log_moment, transform
from farthing.budget import Adjacency
from farthing.events import Event, flatten

Steps = Sequence[tuple[Pair, int]]

TOO_MUCH = 1e4  # an epsilon beyond this is reported as infinite
MOST_FREQUENCIES = 1024
_LARGE = math.log(0.1)
_STEEPEST = 1e12  # tilts are not sought beyond
_FEW = 512  # steps up to which a grid of dp-accounting's helps where frequencies run out


def epsilon(event: Event, delta: float, adjacency: Adjacency = Adjacency.ADD_REMOVE) -> float:
    """The smallest certified ε at ``delta``; infinite beyond ten thousand."""
    delta = validate.probability(delta=delta)
    worst, line, weak = 0.0, None, False
    for steps in directions(event, adjacency):
        if line and compose(steps, line.contour).log_delta(worst) <= math.log(delta):
            continue  # no dearer than the other direction: one look shows it
        found, line = _epsilon(steps, delta)
        if found == math.inf or (line and line.loose):
            plain = unsampled(steps)
            found = min(found, math.inf if plain is None else gaussian.epsilon(plain, delta))
        worst, weak = max(worst, found), weak or bool(line and line.is_poor)
    if weak and sum(count for _, count in flatten(event)) <= _FEW:
        for _ in range(2):  # a first look says how fine the grid has to be
            last, worst = worst, min(worst, grid.epsilon(event, delta, adjacency, worst))
            if worst > 0.25 * last:
                break
    return worst


def delta(event: Event, epsilon: float, adjacency: Adjacency = Adjacency.ADD_REMOVE) -> float:
    """The smallest certified δ at ``epsilon``."""
    epsilon = validate.non_negative(epsilon=epsilon)
    return max(math.exp(log_delta(steps, epsilon)) for steps in directions(event, adjacency))


def directions(event: Event, adjacency: Adjacency) -> list[list[tuple[Pair, int]]]:
    """For each direction, the pairs and how often; events with one pair count in both directions."""
    parts = [(of_event(simple, adjacency), validate.count(count=count)) for simple, count in flatten(event)]
    ways = max((len(pairs) for pairs, _ in parts), default=1)
    return [[(pairs[min(way, len(pairs) - 1)], count) for pairs, count in parts] for way in range(ways)]


def _epsilon(steps: Steps, delta: float) -> tuple[float, Line | None]:
    """ε in one direction, and the line it was found on."""
    goal = math.log(delta)
    mu = gaussian_part(steps)
    if mu is not None:
        return gaussian.epsilon(mu, delta) if mu < math.inf else math.inf, None
    most = most_loss(steps)
    if is_single(steps):
        high = min(most, TOO_MUCH)
        if log_delta(steps, high) > goal:
            return math.inf, None
        return smallest(lambda x: log_delta(steps, x) - goal, 0.0, high), None
    tilt = best_tilt(steps, lambda tilt, moment: (moment + log_factor(tilt) - goal) / tilt)
    ceiling = max(0.0, (moment(steps, tilt) + log_factor(tilt) - goal) / tilt) * (1 + 1e-12)
    ceiling = min(ceiling, most)
    if not ceiling < TOO_MUCH:
        return math.inf, None
    # a little below the saddle point, where less wraps around; by no more than e^4 in size
    tilt *= 1 - min(0.15, 2 / math.sqrt(-goal))
    line = line_through(steps, tilt, ceiling)
    found = smallest(lambda x: line.log_delta(x) - goal, 0.0, ceiling)
    line.log_delta(found)
    if line.weak and line.contour.count < MOST_FREQUENCIES:  # where ε is less, more frequencies count
        finer = line_through(steps, tilt, found)
        found = smallest(lambda x: finer.log_delta(x) - goal, 0.0, found)
        finer.log_delta(found)
        return found, finer
    return found, line


def log_delta(steps: Steps, epsilon: float, tilt: float | None = None) -> float:
    """log of the certified bound on δ(ε) in one direction, on a line at ``tilt`` or the best one."""
    mu = gaussian_part(steps)
    if mu is not None:
        return gaussian.log_delta(mu, epsilon) if mu < math.inf else 0.0
    if most_loss(steps) <= epsilon:
        return -math.inf
    if is_single(steps):
        return single_log_delta(steps[0][0], epsilon)
    plain = unsampled(steps)
    ceiling = 0.0 if plain is None else gaussian.log_delta(plain, epsilon)
    return min(ceiling, _log_delta(steps, epsilon, tilt))


def _log_delta(steps: Steps, epsilon: float, tilt: float | None) -> float:
    if tilt is None:
        tilt = best_tilt(steps, lambda tilt, moment: moment + log_factor(tilt) - tilt * epsilon)
    chernoff = moment(steps, tilt) + log_factor(tilt) - tilt * epsilon
    if not math.isfinite(chernoff):
        return 0.0
    found = min(chernoff, line_through(steps, tilt, epsilon).log_delta(epsilon))
    variance = _variance(steps)
    if chernoff > _LARGE and variance < math.inf:  # near a saddle at 0 little decays; farther out is better
        tilt = 0.5 / math.sqrt(variance)
        found = min(found, line_through(steps, tilt, epsilon).log_delta(epsilon))
    return found


def most_loss(steps: Steps) -> float:
    """The largest privacy loss all steps can add up to, rounded up; infinite where one has no limit."""
    return sum(count * largest_loss(pair) for pair, count in steps) * (1 + 1e-12)


def is_single(steps: Steps) -> bool:
    """One step of a Gaussian mixture against a Gaussian or its mirror image, where δ(ε) is a closed form."""
    if len(steps) != 1 or steps[0][1] != 1 or not isinstance(steps[0][0], Mixture):
        return False
    (piece, *others) = steps[0][0].pieces
    mirrored = piece.p == piece.r and piece.a == -piece.b
    return not others and piece.start is None and (mirrored or min(piece.p, piece.r) == 0.0)


def single_log_delta(pair: Pair, epsilon: float) -> float:
    """log δ(ε) of (1-q) N(0) + q N(a) against N(0), or swapped (Balle, Barthe & Gaboardi 2018, Thm. 2)."""
    assert isinstance(pair, Mixture)
    piece = pair.pieces[0]
    if piece.b < 0:
        return _mirrored_log_delta(piece.p, min(piece.a, 1e9), epsilon)
    shift = min(piece.a + piece.b, 1e300)
    if piece.r == 0.0:
        inner = math.log1p(math.expm1(epsilon) / piece.p) if epsilon < 500 else epsilon - math.log(piece.p)
        return math.log(piece.p) + gaussian.log_delta(shift, inner)
    if epsilon >= 500:
        return -math.inf
    lost = (1 - piece.r) * math.expm1(epsilon)
    rest = piece.r - lost + 1e-15 * (piece.r + lost)  # rounded up: δ grows with it
    if rest <= 0:
        return -math.inf
    return math.log(rest) + gaussian.log_delta(shift, max(0.0, epsilon + math.log(piece.r / rest)))


def _mirrored_log_delta(rate: float, shift: float, epsilon: float) -> float:
    """log δ(ε) of (1-q) N(0) + q N(a) against (1-q) N(0) + q N(-a): their tails beyond where they cross.

    The ratio grows with x and is e^ε where q e^(-a²/2) (w² - e^ε) = (1-q) (e^ε - 1) w, w = e^(ax).
    """
    log_gap = epsilon + math.log(-math.expm1(-epsilon)) if epsilon else -math.inf
    log_rest, log_weight = math.log1p(-rate) + log_gap, math.log(rate) - 0.5 * shift * shift
    side = 0.5 * np.logaddexp(2 * log_rest, math.log(4) + 2 * log_weight + epsilon)
    start = float(np.logaddexp(log_rest, side) - math.log(2) - log_weight) / shift
    if not start < 1e9:
        return -math.inf
    log_tails = log_ndtr(np.array([shift - start, -start, -shift - start])) - log_ndtr(shift - start)
    log_weights = math.log(rate), log_rest, math.log(rate) + epsilon
    gain, plain, loss = np.exp(np.minimum(log_tails + log_weights, 700.0)).tolist()
    value = gain - plain - loss + 1e-12 * (gain + plain + loss)
    return min(0.0, math.log(value) + float(log_ndtr(shift - start))) if value > 0 else -math.inf


def gaussian_part(steps: Steps) -> float | None:
    """μ when every step is a plain Gaussian (they compose exactly), None otherwise."""
    if not all(isinstance(pair, Shift) for pair, _ in steps):
        return None
    return math.hypot(*(math.sqrt(n) * pair.mu for pair, n in steps if isinstance(pair, Shift))) * (1 + 1e-15)


def unsampled(steps: Steps) -> float | None:
    """μ of the same Gaussians on everybody: sampling only helps, so this bounds wherever lines are weak."""
    shifts = [(_shift(pair), count) for pair, count in steps]
    mu = math.hypot(*(math.sqrt(count) * shift for shift, count in shifts if shift is not None))
    known = all(shift is not None for shift, _ in shifts) and mu < math.inf
    return mu * (1 + 1e-15) if known else None


def _shift(pair: Pair) -> float | None:
    match pair:
        case Shift(mu) | SeenShift(_, mu):
            return mu
        case Mixture(pieces):
            return max(piece.a - min(piece.b, 0.0) for piece in pieces) or max(
                abs(piece.b) for piece in pieces
            )
    return None


def moment(steps: Steps, tilt: float) -> float:
    """Σ log M(λ), rounded up."""
    return sum(count * log_moment(pair, tilt) for pair, count in steps)


def best_tilt(steps: Steps, cost: Callable[[float, float], float], start: float | None = None) -> float:
    """The λ that (about) minimises ``cost(λ, log M(λ))``: the saddle point."""

    def at(tilt: float) -> float:
        value = moment(steps, tilt) if tilt < _STEEPEST else math.inf
        return cost(tilt, value) if math.isfinite(value) else math.inf

    tilt = start or 4.0 / math.sqrt(_variance(steps))
    tilt = min(max(tilt, 1e-6), _STEEPEST / 2)
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


def _variance(steps: Steps) -> float:
    """About the variance of the privacy loss."""
    return 2 * moment(steps, 0.05) / (0.05 * 1.05) + 1e-16


def line_through(steps: Steps, tilt: float, epsilon: float) -> Line:
    """The composition on a line whose frequencies suffice around ``epsilon``."""
    near = moment(steps, tilt * 1.02), moment(steps, tilt), moment(steps, tilt * 0.98)
    curvature = max((near[0] - 2 * near[1] + near[2]) / (0.02 * tilt) ** 2, 0.0)
    spread = math.sqrt(curvature) if 0 < curvature < math.inf else 1 / tilt
    spacing = min(0.08 * tilt, 0.6 / spread)  # the first: what wraps around comes from far off
    count = min(max(24, math.ceil(7.5 / (spread * spacing))), MOST_FREQUENCIES)
    line = compose(steps, Contour(tilt, spacing, count))
    while line.error == math.inf and count > 24:  # too many for the quadrature
        count //= 2
        line = compose(steps, Contour(tilt, spacing, count))
    while line.log_delta(epsilon) < 0 and line.weak and count < MOST_FREQUENCIES:
        count = min(2 * count, MOST_FREQUENCIES)
        finer = compose(steps, Contour(tilt, spacing, count))
        if finer.error == math.inf:
            return line
        line = finer
    for wider in (2, 4):  # more wraps around, less is cut off
        if line.log_delta(epsilon) < 0 and line.weak:
            coarse = compose(steps, Contour(tilt, spacing * wider, count))
            line = min(line, coarse, key=lambda line: line.log_delta(epsilon))
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
