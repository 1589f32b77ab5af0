"""Noise for a budget, steps for a budget, ε for a plan: conservative by construction.

Every search ends on the side where the certified bound of `pld` holds, so an error of the search can
only cost a little utility, never privacy.

>>> from farthing.budget import Budget
>>> from farthing.events import GaussianEvent, PoissonEvent, RepeatedEvent
>>> budget = Budget(1.0, 1e-5)
>>> plan = lambda sigma: RepeatedEvent(PoissonEvent(0.01, GaussianEvent(sigma)), 10_000)
>>> round(noise(plan, budget), 6)
3.812817
>>> steps(PoissonEvent(0.01, GaussianEvent(4.0)), budget)
11050
"""

import math
from collections.abc import Callable
from functools import cache, lru_cache

from farthing import validate
from farthing.accounting import gaussian, pld
from farthing.accounting.inversion import Line, log_factor, smallest
from farthing.accounting.transform import Contour
from farthing.budget import Budget
from farthing.errors import InvalidValue
from farthing.events import ComposedEvent, Event

MOST_STEPS = 2**53  # counts beyond are not told apart in floating point

_LEAST_NOISE, _MOST_NOISE = 1e-3, 1e9
_VISIBLE = 1e-4  # a part of δ that errors may make up before another line is sought


def epsilon(event: Event, budget: Budget) -> float:
    """The smallest certified ε of ``event`` at the budget's δ and adjacency."""
    return pld.epsilon(event, budget.delta, budget.adjacency)


def noise(plan: Callable[[float], Event], budget: Budget, tolerance: float = 1e-9) -> float:
    """The smallest noise σ for which ``plan(σ)`` fits the budget; ``plan`` must get cheaper in σ."""
    goal = math.log(validate.probability(delta=budget.delta))
    validate.positive(tolerance=tolerance)
    guess = _central_limit(plan, budget)
    contour = _contour(pld.directions(plan(math.exp(guess)), budget.adjacency)[0], budget)

    @cache
    def excess(log_noise: float, directions: int | None = None) -> float:
        ways = pld.directions(plan(math.exp(log_noise)), budget.adjacency)[:directions]
        return max(_log_delta(way, budget.epsilon, contour, goal) for way in ways) - goal

    # the first direction is as a rule the dearer: it is searched alone, the other is checked at the end
    found = _least(lambda x: excess(x, 1), guess, budget, tolerance)
    if excess(found) > 0:
        found = _least(excess, found, budget, tolerance)
    return math.exp(found)


def _least(excess: Callable[[float], float], guess: float, budget: Budget, tolerance: float) -> float:
    """The least log σ with excess <= 0, bracketed around ``guess``."""
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


def _contour(steps: pld.Steps, budget: Budget) -> Contour | None:
    """A contour for ``steps`` around the budget, sought from where it would be for a Gaussian."""
    if pld.gaussian_part(steps) is not None or pld.is_single(steps):
        return None
    tilt = pld.best_tilt(
        steps,
        lambda tilt, moment: moment + log_factor(tilt) - tilt * budget.epsilon,
        gaussian_saddle(budget.epsilon, budget.delta),
    )
    return pld.line_through(steps, tilt, budget.epsilon).contour


def _log_delta(steps: pld.Steps, epsilon: float, contour: Contour | None, goal: float) -> float:
    """log δ(ε) on a known contour, or where that does not show ``goal`` on one of their own."""
    if contour is None or pld.is_single(steps) or pld.most_loss(steps) <= epsilon:
        return pld.log_delta(steps, epsilon)
    line = pld.compose(steps, contour)
    found = line.log_delta(epsilon)
    shown = not line.weak and line.slack < _VISIBLE
    return found if shown or found <= goal else min(found, pld.log_delta(steps, epsilon))


def gaussian_saddle(epsilon: float, delta: float) -> float:
    """The saddle point of a Gaussian mechanism that spends (ε, δ): ε/μ² - 1/2."""
    mu = _mu(epsilon, delta)
    return min(max(epsilon / mu / mu - 0.5, 0.25), 1e12)


@lru_cache(maxsize=256)
def _mu(epsilon: float, delta: float) -> float:
    return gaussian.mu(epsilon, delta)


def _central_limit(plan: Callable[[float], Event], budget: Budget) -> float:
    """log σ where the mean privacy loss, doubled, is the Gaussian μ² of the budget."""
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
    """How often ``event`` fits the budget, after everything in ``before``; 0 if not even once."""
    goal = math.log(validate.probability(delta=budget.delta))
    spent = before if before is not None else ComposedEvent(())
    ways = zip(
        pld.directions(ComposedEvent((event, spent)), budget.adjacency),
        _counts(event, spent, budget),
        strict=True,
    )
    return min(_steps(way[:parts], way[parts:], budget.epsilon, goal) for way, parts in ways)


def _counts(event: Event, spent: Event, budget: Budget) -> list[int]:
    """How many entries of each direction of (event, spent) belong to ``event``."""
    ways = pld.directions(ComposedEvent((event, spent)), budget.adjacency)
    return [len(pld.directions(event, budget.adjacency)[0])] * len(ways)


def _steps(event: pld.Steps, spent: pld.Steps, epsilon: float, goal: float) -> int:
    each, so_far = pld.gaussian_part(event), pld.gaussian_part(spent)
    if each is not None and so_far is not None:
        left = gaussian.mu(epsilon, math.exp(goal)) ** 2 - so_far**2
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
    plan = [(pair, count * max(few, 1)) for pair, count in event] + list(spent)
    contour = pld.line_through(plan, tilt, epsilon).contour
    once, base = pld.compose(event, contour), pld.compose(spent, contour)
    if not math.isfinite(once.error + base.error):
        return few

    def excess(count: float) -> float:
        return _line(once, base, contour, int(count)).log_delta(epsilon) - goal

    # count down from an upper bound so that `smallest` can look for the first count that fits
    low, reach = few, 1 + few // 16
    if excess(low) > 0:
        low = 0
        if excess(0) > 0 and pld.log_delta(spent, epsilon) > goal:
            return 0
    high = low + reach
    while high < MOST_STEPS and excess(high) <= 0:
        low, high = high, min(MOST_STEPS, high + 2 * (high - low))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if excess(middle) <= 0 else (low, middle)

    def fits(count: int) -> bool:
        plan = [(pair, times * count) for pair, times in event] + list(spent)
        return pld.log_delta(plan, epsilon) <= goal

    # that line was chosen for the Chernoff count; one for the count itself may show that more fit
    reach = 1
    while low + reach <= MOST_STEPS and fits(low + reach):
        low, reach = low + reach, 2 * reach
    while reach := reach // 2:
        if low + reach <= MOST_STEPS and fits(low + reach):
            low += reach
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
    """Whether ``event`` as a whole fits the budget."""
    ways = pld.directions(event, budget.adjacency)
    goal = math.log(validate.probability(delta=budget.delta))
    return max(pld.log_delta(way, budget.epsilon) for way in ways) <= goal
