"""Account tightly for a fixed list of events, by certified inversion of their transform.

The guarantee: the dominating pairs of `pairs` compose (Zhu, Dong & Wang 2022, Thm. 10), their privacy profile
is the hockey-stick divergence, and `inversion` never under-reports it. Both directions are computed and the
larger is returned. It holds for a plan whose *prices* are fixed before the first answer (for adaptively
chosen prices see `farthing.accounting.filters`).

>>> from farthing.queries.events import (GaussianEvent, PoissonEvent, RepeatedEvent)
>>> event = RepeatedEvent(PoissonEvent(0.01, GaussianEvent(4.0)), 10_000)
>>> round(epsilon(event, 1e-5), 6)
0.946867
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from scipy.special import log_ndtr

from farthing import validate
from farthing.accounting import cells, gaussian, loss_masses, sampling
from farthing.accounting.inversion import Line, log_factor, smallest
from farthing.accounting.pairs import Allocation, Mixture, Pair, SeenShift, Shift, largest_loss, of_event
from farthing.accounting.transform import Contour, log_moment, rough_log_moment, transform
from farthing.budget import Adjacency
from farthing.queries.events import Event, GaussianEvent, PoissonEvent, flatten, for_level, levels

Steps = Sequence[tuple[Pair, int]]

TOO_MUCH = 1e4  # an epsilon beyond this is reported as infinite
MOST_FREQUENCIES = 1024
_LARGE = math.log(0.1)
_FAR = 5.0  # log of Chernoff's bound over the result: larger means a second bump
_SHALLOWEST, _STEEPEST = 1e-7, 1e12  # the range of tilts
_LEFT_OUT = 1e-13  # the mass of losses that truncating grids may move
_RAISED = 1e-10  # relative: above the rounding of sums of masses
_FEW = 512  # the most steps for dp-accounting's grid, where frequencies run out


def epsilon(event: Event, delta: float, adjacency: Adjacency = Adjacency.ADD_REMOVE) -> float:
    """Return the smallest certified ε at ``delta``; infinite beyond ten thousand.

    If levels of budget pay differently, the result is that of the level that pays most.
    """
    validate.probability(delta=delta)
    return max(_tight(for_level(event, level), delta, adjacency) for level in range(levels(event)))


@lru_cache(maxsize=4096)
def _tight(event: Event, delta: float, adjacency: Adjacency) -> float:
    worst, line, weak = 0.0, None, False
    for steps in directions(event, adjacency):
        if line and compose(steps, line.contour).log_delta(worst) <= math.log(delta):
            continue  # one evaluation shows that this direction costs no more
        found, line = _epsilon(steps, delta)
        if found == math.inf or (line and line.loose):
            plain = unsampled(steps)
            found = min(found, math.inf if plain is None else gaussian.epsilon(plain, delta))
        worst, weak = max(worst, found), weak or bool(line and line.is_poor)
    if not weak:
        return worst
    about = worst if worst < math.inf else 1.0
    found = cells.epsilon(directions(event, adjacency), delta, about)
    return min(worst, found if found < about else _epsilon_of_few(event, delta, adjacency, worst))


def delta(event: Event, epsilon: float, adjacency: Adjacency = Adjacency.ADD_REMOVE) -> float:
    """Return the smallest certified δ at ``epsilon``, the largest over levels of budget."""
    epsilon = validate.non_negative(epsilon=epsilon)
    return max(_delta(for_level(event, level), epsilon, adjacency) for level in range(levels(event)))


def _delta(event: Event, epsilon: float, adjacency: Adjacency) -> float:
    looks = [_look(steps, epsilon) for steps in directions(event, adjacency)]
    found = math.exp(max(log for log, _ in looks))
    return min(found, _delta_of_few(event, epsilon, adjacency, found)) if any(w for _, w in looks) else found


def _epsilon_of_few(event: Event, delta: float, adjacency: Adjacency, about: float) -> float:
    """Return ε by other bounds where frequencies run out: textbook parts, seen draws, or a grid."""
    steps, best = flatten(event), about
    total = sum(count for _, count in steps)
    each = [_single_epsilon(part, delta / (2 * total), adjacency) for part, _ in steps]
    if all(epsilon < 700 for epsilon in each):
        # Kairouz, Oh & Viswanath 2015, Thm. 3.5, half of δ for the steps and half for their sum
        drift = sum(count * x * math.tanh(x / 2) for x, (_, count) in zip(each, steps, strict=True))
        spread = math.sqrt(2 * sum(count * x * x for x, (_, count) in zip(each, steps, strict=True)))
        plain = sum(count * x for x, (_, count) in zip(each, steps, strict=True))
        best = min(best, (drift + spread * math.sqrt(math.log(2 / delta))) * (1 + 1e-12), plain * (1 + 1e-12))
    seen = _draws(event, adjacency)
    if seen and 0 < best < math.inf and sampling.delta(*seen, 0.98 * best) <= delta:
        best = min(best, sampling.epsilon(*seen, delta))
    if total <= _FEW:
        for _ in range(2):  # the first pass sets the resolution of the grid
            last, best = best, min(best, cells.reference_epsilon(event, delta, adjacency, best))
            if best > 0.25 * last:
                break
    return best


def _delta_of_few(event: Event, epsilon: float, adjacency: Adjacency, about: float) -> float:
    """Return δ by other bounds where frequencies run out."""
    steps, best = flatten(event), about
    total = sum(count for _, count in steps)
    # an even share of ε for every step (Dwork & Roth 2014, Thm. 3.16)
    share = epsilon / total * (1 - 1e-12)
    logs = [_single_log_delta(part, share, adjacency) for part, _ in steps]
    plain = sum(count * math.exp(log) for log, (_, count) in zip(logs, steps, strict=True))
    best = min(best, plain * (1 + 1e-12))
    if seen := _draws(event, adjacency):
        best = min(best, sampling.delta(*seen, epsilon))
    if total <= _FEW and best > cells.SMALLEST_DELTA:
        best = min(best, cells.reference_delta(event, epsilon, adjacency))
    return best


def _draws(event: Event, adjacency: Adjacency) -> tuple[float, float, int] | None:
    """Return noise, rate and rounds for an observer who sees the draws, and so learns at least as much."""
    match flatten(event):
        case ((PoissonEvent(rate, GaussianEvent(noise)), count),):
            return noise / adjacency.shift, rate, count
    return None


def _single_log_delta(event: Event, epsilon: float, adjacency: Adjacency) -> float:
    """Return log δ of one step in closed form, the larger of both directions; 0 if there is none."""
    pairs = of_event(event, adjacency)
    if not all(isinstance(pair, Shift) or is_single([(pair, 1)]) for pair in pairs):
        return 0.0
    return max(log_delta([(pair, 1)], epsilon) for pair in pairs)


def _single_epsilon(event: Event, delta: float, adjacency: Adjacency) -> float:
    """Return ε of one step in closed form, the larger of both directions; infinite if there is none."""
    pairs = of_event(event, adjacency)
    if delta == 0 or not all(isinstance(pair, Shift) or is_single([(pair, 1)]) for pair in pairs):
        return math.inf
    return max(_epsilon([(pair, 1)], delta)[0] for pair in pairs)


def directions(event: Event, adjacency: Adjacency) -> list[list[tuple[Pair, int]]]:
    """Return the pairs and counts of each direction; events with one pair count in both directions.

    If levels of budget pay differently, each level has its own directions.
    """
    if (count := levels(event)) > 1:
        each = (directions(for_level(event, level), adjacency) for level in range(count))
        return [way for ways in each for way in ways if way] or [[]]
    event = for_level(event, 0)
    parts = [(of_event(simple, adjacency), validate.count(count=count)) for simple, count in flatten(event)]
    ways = max((len(pairs) for pairs, _ in parts), default=1)
    return [[(pairs[min(way, len(pairs) - 1)], count) for pairs, count in parts] for way in range(ways)]


def _epsilon(steps: Steps, delta: float) -> tuple[float, Line | None]:
    """Return ε in one direction, and the line on which it was found."""
    goal = math.log(delta)
    if on_masses(steps):
        return smallest(lambda x: masses_log_delta(steps, x) - goal, 0.0, TOO_MUCH), None
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
    about = min(max(0.0, (rough_moment(steps, tilt) + log_factor(tilt) - goal) / tilt), most)
    if not about < TOO_MUCH:
        return math.inf, None
    # slightly below the saddle point less wraps around; the size grows by at most e^4
    below = tilt * (1 - min(0.15, 2 / math.sqrt(-goal)))
    line = line_through(steps, below, about)
    # the bound from the moment of this line, or from that of the saddle point if the line shows nothing
    at, mass = below, line.log_mass
    while not mass < math.inf and at > 1e-6:
        at, mass = tilt, moment(steps, tilt)
        tilt /= 4
    ceiling = min(max(0.0, (mass + log_factor(at) - goal) / at) * (1 + 1e-12), most)
    if not ceiling < TOO_MUCH:
        return math.inf, line
    found = smallest(lambda x: line.log_delta(x) - goal, 0.0, ceiling)
    line.log_delta(found)
    if line.weak and line.contour.count < MOST_FREQUENCIES:  # a smaller ε needs more frequencies
        finer = line_through(steps, below, found)
        found = smallest(lambda x: finer.log_delta(x) - goal, 0.0, found)
        finer.log_delta(found)
        return found, finer
    return found, line


def on_masses(steps: Steps) -> bool:
    """Return whether a plan has a pair without a transform, so that it is composed on a grid of losses."""
    return any(isinstance(pair, Allocation) for pair, _ in steps)


def masses_log_delta(steps: Steps, epsilon: float) -> float:
    """Return log δ(ε) of a plan composed on a grid of losses (`farthing.accounting.loss_masses`)."""
    total, count = _composed(tuple(steps)), sum(count for _, count in steps)
    found = loss_masses.delta(total, max(0.0, epsilon - 4 * count * loss_masses.EDGE)) * (1 + _RAISED)
    return math.log(found) if found > 0 else -math.inf


@lru_cache(maxsize=128)
def _composed(steps: tuple[tuple[Pair, int], ...]) -> loss_masses.LossMasses:
    return loss_masses.composed(steps, _LEFT_OUT)


def log_delta(steps: Steps, epsilon: float) -> float:
    """Return the log of the certified bound on δ(ε) in one direction."""
    return _look(steps, epsilon)[0]


def _look(steps: Steps, epsilon: float) -> tuple[float, bool]:
    """Return log δ(ε) in one direction, and whether frequencies ran out."""
    if on_masses(steps):
        return masses_log_delta(steps, epsilon), False
    mu = gaussian_part(steps)
    if mu is not None:
        return gaussian.log_delta(mu, epsilon) if mu < math.inf else 0.0, False
    if most_loss(steps) <= epsilon:
        return -math.inf, False
    if is_single(steps):
        return single_log_delta(steps[0][0], epsilon), False
    plain = unsampled(steps)
    found, weak = _log_delta(steps, epsilon)
    return min(found, 0.0 if plain is None else gaussian.log_delta(plain, epsilon)), weak


def _log_delta(steps: Steps, epsilon: float) -> tuple[float, bool]:
    tilt = best_tilt(steps, lambda tilt, moment: moment + log_factor(tilt) - tilt * epsilon)
    while not math.isfinite(chernoff := moment(steps, tilt) + log_factor(tilt) - tilt * epsilon):
        if tilt < 1e-6:
            return 0.0, True
        tilt /= 4
    line = line_through(steps, tilt, epsilon)
    found = min(chernoff, line.log_delta(epsilon))
    variance = _variance(steps)
    if chernoff > _LARGE and variance < math.inf:  # little decays near a saddle at 0, more farther out
        line = line_through(steps, 0.5 / math.sqrt(variance), epsilon)
        found = min(found, line.log_delta(epsilon))
    elif chernoff - found > _FAR:  # a second, distant bump of the tilted distribution wraps around
        line = line_through(steps, 0.75 * tilt, epsilon)
        found = min(found, line.log_delta(epsilon))
    return found, line.is_poor


def most_loss(steps: Steps) -> float:
    """Return the largest total loss of all steps, rounded up; infinite if there is no limit."""
    return sum(count * largest_loss(pair) for pair, count in steps) * (1 + 1e-12)


def is_single(steps: Steps) -> bool:
    """Return whether the plan is one Gaussian mixture against a Gaussian, whose δ(ε) has a closed form."""
    if len(steps) != 1 or steps[0][1] != 1 or not isinstance(steps[0][0], Mixture):
        return False
    (piece, *others) = steps[0][0].pieces
    mirrored = piece.p == piece.r and piece.a == -piece.b
    return not others and piece.start is None and (mirrored or min(piece.p, piece.r) == 0.0)


def single_log_delta(pair: Pair, epsilon: float) -> float:
    """Return log δ(ε) of (1-q) N(0) + q N(a) against N(0), or swapped (Balle et al. 2018, Thm. 2)."""
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
    """Return log δ(ε) of (1-q) N(0) + q N(a) against (1-q) N(0) + q N(-a), from their tails.

    The likelihood ratio grows with x and is e^ε where q e^(-a²/2) (w² - e^ε) = (1-q) (e^ε - 1) w, w = e^(ax).
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
    """Return μ if every step is a plain Gaussian (they compose exactly), None otherwise."""
    if not all(isinstance(pair, Shift) for pair, _ in steps):
        return None
    return math.hypot(*(math.sqrt(n) * pair.mu for pair, n in steps if isinstance(pair, Shift))) * (1 + 1e-15)


def unsampled(steps: Steps) -> float | None:
    """Return μ of the same Gaussians without sampling, an upper bound where lines are weak."""
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
    """Return Σ log M(λ), rounded up."""
    return sum(count * log_moment(pair, tilt) for pair, count in steps)


def rough_moment(steps: Steps, tilt: float) -> float:
    """Return Σ log M(λ) approximately."""
    return sum(count * rough_log_moment(pair, tilt) for pair, count in steps)


def best_tilt(steps: Steps, cost: Callable[[float, float], float], start: float | None = None) -> float:
    """Return the λ that approximately minimises ``cost(λ, log M(λ))``: the saddle point."""

    def at(tilt: float) -> float:
        value = rough_moment(steps, tilt) if _SHALLOWEST < tilt < _STEEPEST else math.inf
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
    """Return the variance of the privacy loss approximately."""
    return 2 * rough_moment(steps, 0.05) / (0.05 * 1.05) + 1e-16


def line_through(steps: Steps, tilt: float, epsilon: float) -> Line:
    """Return the composition on a line with enough frequencies around ``epsilon``."""
    near = [rough_moment(steps, tilt * part) for part in (1.02, 1.0, 0.98)]
    curvature = max((near[0] - 2 * near[1] + near[2]) / (0.02 * tilt) ** 2, 0.0)
    spread = math.sqrt(curvature) if 0 < curvature < math.inf else 1 / tilt
    spacing = min(0.08 * tilt, 0.6 / spread)  # the first term: only distant mass wraps around
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
    for wider in (2, 4):  # more mass wraps around, less is truncated
        if line.log_delta(epsilon) < 0 and line.weak:
            coarse = compose(steps, Contour(tilt, spacing * wider, count))
            coarse.coarse = True
            line = min(line, coarse, key=lambda line: line.log_delta(epsilon))
    return line


def compose(steps: Steps, contour: Contour) -> Line:
    """Return all steps on one contour; a step too wild for quadrature counts by its moment alone."""
    line = Line.empty(contour)
    for pair, count in steps:
        step = transform(pair, contour)
        if step is None:
            line.error = math.inf
            return line
        line.add(step, count)
    return line
