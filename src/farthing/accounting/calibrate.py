"""Calibrate noise or steps for a budget, and compute ε of a plan, always rounded to the safe side.

Every search ends on the side where the certified bound of `pld` holds, so an error of the search can
only cost a little utility, never privacy. A plan fits a budget if it is inside it by the margin of
`accounting.tolerance`; noise is calibrated with twice that margin, so that it fits on every processor.

>>> from farthing.budget import Budget
>>> from farthing.queries.events import (GaussianEvent, PoissonEvent, RepeatedEvent)
>>> budget = Budget(1.0, 1e-5)
>>> plan = lambda sigma: RepeatedEvent(PoissonEvent(0.01, GaussianEvent(sigma)), 10_000)
>>> round(noise(plan, budget), 6)
3.812817
>>> steps(PoissonEvent(0.01, GaussianEvent(4.0)), budget)
11050
"""

import functools
import math
from collections.abc import Callable
from functools import cache, lru_cache

from farthing import validate
from farthing.accounting import gaussian, pld
from farthing.accounting.inversion import Line, log_factor, smallest
from farthing.accounting.pairs import Pair
from farthing.accounting.tolerance import inner
from farthing.accounting.transform import Contour
from farthing.budget import Budget
from farthing.errors import InvalidValue
from farthing.queries.events import ComposedEvent, Event

MOST_STEPS = 2**53  # floating point does not represent all larger counts

_LEAST_NOISE, _MOST_NOISE = 1e-3, 1e9
_LINES = 8  # the number of lines that are tried for a count
_MOST_TURNS = 2**32  # the most turns of a plan whose cost may stop to grow
_COARSE = 1e-5  # the precision of log σ before the line is chosen
_MASSES = 1e-6  # the relative precision of noise if one evaluation takes a tenth of a second
_VISIBLE = 1e-6  # the share of δ for which another search is worthwhile


def epsilon(event: Event, budget: Budget) -> float:
    """Return the smallest certified ε of ``event`` at the budget's δ and adjacency."""
    return pld.epsilon(event, budget.delta, budget.adjacency)


def noise(plan: Callable[[float], Event], budget: Budget, tolerance: float = 1e-9) -> float:
    """Return the smallest noise σ for which ``plan(σ)`` fits the budget; ``plan`` must get cheaper in σ."""
    validate.probability(delta=budget.delta)
    validate.positive(tolerance=tolerance)
    budget = _inner(budget, 2)
    goal = math.log(budget.delta)
    if pld.on_masses(pld.directions(plan(1.0), budget.adjacency)[0]):
        return _noise_on_masses(plan, budget, max(tolerance, _MASSES))
    guess = _central_limit(plan, budget)

    @cache
    def ways(log_noise: float) -> list[list[tuple[Pair, int]]]:
        return pld.directions(plan(math.exp(log_noise)), budget.adjacency)

    @cache
    def excess(contour: Contour | None, directions: int | None, log_noise: float) -> float:
        way = ways(log_noise)[:directions]
        return max(_log_delta(steps, budget.epsilon, contour) for steps in way) - goal

    @cache
    def shown(log_noise: float) -> float:
        return max(_shown(steps, budget.epsilon, goal) for steps in ways(log_noise)) - goal

    def least(contour: Contour | None, directions: int | None, guess: float, precision: float) -> float:
        try:
            return _least(functools.partial(excess, contour, directions), guess, budget, precision)
        except InvalidValue:  # the error of one line for all noise may be above δ, as for a few rare draws
            return _least(functools.partial(excess, None, directions), guess, budget, precision)

    # the first direction usually costs more: it is searched alone, and the other is checked at the end
    found, contour = guess, _contour(ways(guess)[0], budget.epsilon, goal)
    for _ in range(_LINES):
        found = least(contour, 1, found, max(tolerance, _COARSE))
        better = _contour(ways(found)[0], budget.epsilon, goal)
        if better == contour or excess(better, 1, found) > -_VISIBLE - _COARSE:
            break
        contour = better  # a line through the result, not through a guess, gives a tighter bound
    found = least(contour, 1, found, tolerance)
    if excess(contour, None, found) > 0:
        found = least(contour, None, found, tolerance)
    if shown(found) <= -_VISIBLE:
        found = _least(shown, found, budget, tolerance)
    elif shown(found) > 0:
        high, more = found, tolerance
        while shown(high := high + more) > 0:
            more *= 4
        found = smallest(shown, found, high, 0.0, max(tolerance, more / 8))
    return math.exp(found)


def _noise_on_masses(plan: Callable[[float], Event], budget: Budget, tolerance: float) -> float:
    """Return the least noise for a plan that is composed on grids of losses, which are slow to evaluate."""
    goal = math.log(budget.delta)

    def excess(directions: int | None, log_noise: float) -> float:
        ways = pld.directions(plan(math.exp(log_noise)), budget.adjacency)[:directions]
        return max(pld.log_delta(way, budget.epsilon) for way in ways) - goal

    found = _least(cache(functools.partial(excess, 1)), 0.0, budget, tolerance)
    if excess(None, found) > 0:
        found = _least(cache(functools.partial(excess, None)), found, budget, tolerance)
    return math.exp(found)


def _inner(budget: Budget, times: int = 1) -> Budget:
    """Return the budget lowered by ``times`` margins; numbers too small to be lowered stay as they are."""
    epsilon, delta = (inner(part, times) or part for part in (budget.epsilon, budget.delta))
    return budget.with_(epsilon, delta)


def _least(excess: Callable[[float], float], guess: float, budget: Budget, tolerance: float) -> float:
    """Return the least log σ with excess <= 0, bracketed around ``guess``."""
    bottom, reach = math.log(_LEAST_NOISE), 0.02
    low = high = guess
    if excess(guess) <= 0:
        while low > bottom and excess(low := max(guess - reach, bottom)) <= 0:
            high, reach = low, 4 * reach
    else:
        while excess(high := guess + reach) > 0:
            low, reach = high, 4 * reach
            if high > math.log(_MOST_NOISE):
                raise InvalidValue(f"no noise up to {_MOST_NOISE:g} fits {budget}; ask for fewer steps")
    return smallest(excess, low, high, 0.0, tolerance)


def _contour(steps: pld.Steps, epsilon: float, goal: float) -> Contour | None:
    """Return a contour for ``steps`` around (ε, e^goal), starting from that of a Gaussian.

    If that contour has too few frequencies, as with few steps, return the best of several.
    """
    if pld.gaussian_part(steps) is not None or pld.is_single(steps):
        return None

    def cost(tilt: float, moment: float) -> float:
        return moment + log_factor(tilt) - tilt * epsilon

    tilt = pld.best_tilt(steps, cost, gaussian_saddle(epsilon, math.exp(goal)))
    line = pld.line_through(steps, tilt, epsilon)
    if not line.is_poor:
        return line.contour
    # M decays more for tilts nearer to 0, and a wider spacing reaches higher frequencies
    other = min(tilt, pld.best_tilt(steps, cost))
    places = ((0.75 * other, 0.08), (0.75 * other, 0.16), (0.85 * other, 0.12))
    lines = [line, *(pld.compose(steps, Contour(at, wide * at, pld.MOST_FREQUENCIES)) for at, wide in places)]
    return min(lines, key=lambda line: line.log_delta(epsilon)).contour


def _log_delta(steps: pld.Steps, epsilon: float, contour: Contour | None) -> float:
    """Return log δ(ε) on a known contour, or on a new one if that is too short for the steps."""
    if contour is None or pld.is_single(steps) or pld.most_loss(steps) <= epsilon:
        return pld.log_delta(steps, epsilon)
    line = pld.compose(steps, contour)
    return line.log_delta(epsilon) if math.isfinite(line.error) else pld.log_delta(steps, epsilon)


def _shown(steps: pld.Steps, epsilon: float, goal: float) -> float:
    """Return log δ(ε) on lines chosen for these steps, the bound by which noise and counts are accepted."""
    if pld.on_masses(steps):
        return pld.log_delta(steps, epsilon)
    if pld.most_loss(steps) <= epsilon:
        return -math.inf
    found = _log_delta(steps, epsilon, _contour(steps, epsilon, goal))
    return found if found <= goal else min(found, pld.log_delta(steps, epsilon))


def gaussian_saddle(epsilon: float, delta: float) -> float:
    """Return the saddle point of a Gaussian mechanism that spends (ε, δ): ε/μ² - 1/2."""
    mu = _mu(epsilon, delta)
    return min(max(epsilon / mu / mu - 0.5, 0.25), 1e12)


@lru_cache(maxsize=256)
def _mu(epsilon: float, delta: float) -> float:
    return gaussian.mu(epsilon, delta)


def _central_limit(plan: Callable[[float], Event], budget: Budget) -> float:
    """Return log σ at which twice the mean privacy loss is the Gaussian μ² of the budget."""
    goal = _mu(budget.epsilon, budget.delta) ** 2

    def cost(log_noise: float) -> float:
        steps = pld.directions(plan(math.exp(log_noise)), budget.adjacency)[0]
        return pld.rough_moment(steps, 0.05) / (0.5 * 0.05 * 1.05) - goal

    low, high = math.log(_LEAST_NOISE), math.log(_MOST_NOISE)
    while high - low > 0.05:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if not cost(middle) <= 0 else (low, middle)
    return high


def steps(event: Event, budget: Budget, before: Event | None = None) -> int:
    """Return how often ``event`` fits the budget, after everything in ``before``; 0 if not even once."""
    validate.probability(delta=budget.delta)
    budget = _inner(budget)
    goal = math.log(budget.delta)
    spent = before if before is not None else ComposedEvent(())
    ways = zip(
        pld.directions(ComposedEvent((event, spent)), budget.adjacency),
        _counts(event, spent, budget),
        strict=True,
    )
    return min(_steps(way[:parts], way[parts:], budget.epsilon, goal) for way, parts in ways)


def turns(plan: Callable[[int], Event], budget: Budget, before: Event | None = None) -> int:
    """Return the most turns for which ``plan(turns)`` fits the budget, after ``before``; 0 if none.

    The cost must not fall as turns grow; if it does, the result may be too small, never too large.
    """

    def fits(count: int) -> bool:
        return affordable(ComposedEvent((plan(count), before or ComposedEvent(()))), budget)

    low, high = 0, 1
    while high <= _MOST_TURNS and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if middle <= _MOST_TURNS and fits(middle) else (low, middle)
    return low


def _counts(event: Event, spent: Event, budget: Budget) -> list[int]:
    """Return how many entries of each direction of (event, spent) belong to ``event``."""
    ways = pld.directions(ComposedEvent((event, spent)), budget.adjacency)
    return [len(pld.directions(event, budget.adjacency)[0])] * len(ways)


def _steps_on_masses(event: pld.Steps, spent: pld.Steps, epsilon: float, goal: float) -> int:
    def fits(count: int) -> bool:
        steps = [(pair, times * count) for pair, times in event] + list(spent)
        return pld.log_delta(steps, epsilon) <= goal

    low, high = 0, 1
    while high < _MOST_TURNS and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _steps(event: pld.Steps, spent: pld.Steps, epsilon: float, goal: float) -> int:
    if pld.on_masses([*event, *spent]):
        return _steps_on_masses(event, spent, epsilon, goal)
    each, so_far = pld.gaussian_part(event), pld.gaussian_part(spent)
    if each is not None and so_far is not None:
        left = gaussian.largest_mu(epsilon, math.exp(goal)) ** 2 - so_far**2
        root = math.sqrt(max(left, 0.0)) / each * (1 + 1e-15)
        count = math.floor(min(root * root, MOST_STEPS))
        while count and gaussian.log_delta(math.hypot(math.sqrt(count) * each, so_far), epsilon) > goal:
            count -= 1 + count // 2**50
        return count

    def chernoff(tilt: float, before: float, each: float) -> float:
        room = goal + tilt * epsilon - log_factor(tilt) - before
        return max(room, 0.0) / max(each, 1e-300)

    start = gaussian_saddle(epsilon, math.exp(goal))
    tilt = pld.best_tilt(
        event, lambda tilt, each: -chernoff(tilt, pld.rough_moment(spent, tilt), each), start
    )
    few = math.floor(min(chernoff(tilt, pld.moment(spent, tilt), pld.moment(event, tilt)), MOST_STEPS))
    if few >= MOST_STEPS:
        return MOST_STEPS

    def plan(count: int) -> list[tuple[Pair, int]]:
        return [(pair, times * count) for pair, times in event] + list(spent)

    low = _counted(
        event, spent, pld.line_through(plan(max(few, 1)), tilt, epsilon).contour, few, epsilon, goal
    )
    if low is None:
        return few
    for _ in range(
        _LINES
    ):  # that line was chosen for the Chernoff count; a line for a larger count may show that more fit
        contour = _contour(plan(max(low, 1)), epsilon, goal)
        found = None if contour is None else _counted(event, spent, contour, low, epsilon, goal)
        if found is None or found <= low:
            break
        low = found
    if low == 0 and pld.log_delta(spent, epsilon) > goal:
        return 0

    def fits(count: int) -> bool:
        return _shown(plan(count), epsilon, goal) <= goal

    back = 1  # another line than counts are accepted by may have shown more
    while low and not fits(low):
        low, back = max(low - back, 0), 2 * back
    reach = 1
    while low + reach <= MOST_STEPS and fits(low + reach):
        low, reach = low + reach, 2 * reach
    while reach := reach // 2:
        if low + reach <= MOST_STEPS and fits(low + reach):
            low += reach
    return low


def _counted(
    event: pld.Steps, spent: pld.Steps, contour: Contour, few: int, epsilon: float, goal: float
) -> int | None:
    """Return how often ``event`` fits by this contour: ``few`` or more, or 0; None if it has no line."""
    once, base = pld.compose(event, contour), pld.compose(spent, contour)
    if not math.isfinite(once.error + base.error):
        return None

    def fits(count: int) -> bool:
        return _line(once, base, contour, count).log_delta(epsilon) <= goal

    low, reach = few if fits(few) else 0, 1 + few // 16
    high = low + reach
    while high < MOST_STEPS and fits(high):
        low, high = high, min(MOST_STEPS, high + 2 * (high - low))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _line(once: Line, base: Line, contour: Contour, count: int) -> Line:
    return Line(
        contour,
        once.log * count + base.log,
        once.error * count + base.error,
        once.log_beyond * count + base.log_beyond,
        once.adds + base.adds + 1,
        once.reach * count + base.reach,
    )


def affordable(event: Event, budget: Budget) -> bool:
    """Return whether ``event`` as a whole fits the budget."""
    validate.probability(delta=budget.delta)
    ways, budget = pld.directions(event, budget.adjacency), _inner(budget)
    goal = math.log(budget.delta)
    return all(_shown(way, budget.epsilon, goal) <= goal for way in ways)
