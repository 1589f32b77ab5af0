"""Three questions before a run, in one line each: ε of a plan, noise for a budget, steps for a budget.

All by tight accounting (`accounting.pld`); the other accountants are in `farthing.accounting`.
"""

from collections.abc import Callable

from farthing import validate
from farthing.accounting import calibrate, pld
from farthing.budget import Adjacency, Budget
from farthing.queries.events import Event, RepeatedEvent
from farthing.queries.samplers import Everyone, HasEvent


def epsilon(
    step: Event | HasEvent, *, steps: int = 1, delta: float, adjacency: Adjacency = Adjacency.ADD_REMOVE
) -> float:
    """The certified ε of ``steps`` times ``step`` at ``delta`` (Zhu, Dong & Wang 2022, Thm. 10)."""
    return pld.epsilon(_repeated(step, steps), delta, validate.choice(Adjacency, adjacency=adjacency))


def delta(
    step: Event | HasEvent, *, steps: int = 1, epsilon: float, adjacency: Adjacency = Adjacency.ADD_REMOVE
) -> float:
    """The certified δ of ``steps`` times ``step`` at ``epsilon``, by the same theorem."""
    return pld.delta(_repeated(step, steps), epsilon, validate.choice(Adjacency, adjacency=adjacency))


def noise_for(step: Callable[[float], Event | HasEvent], budget: Budget, *, steps: int = 1) -> float:
    """The least noise σ for which ``steps`` times ``step(σ)`` fits the budget."""
    return calibrate.noise(lambda sigma: _repeated(step(sigma), steps), budget)


def steps_for(step: Event | HasEvent, budget: Budget) -> int:
    """How often ``step`` fits the budget."""
    return calibrate.steps(Everyone().amplify(step), budget)


def _repeated(step: Event | HasEvent, steps: int) -> RepeatedEvent:
    return RepeatedEvent(Everyone().amplify(step), validate.count(steps=steps))
