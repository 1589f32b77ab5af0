"""DP-SGD until the budget is spent, and SGD-Adv, its forerunner with noise fixed by advanced composition.

`dpsgd` is Abadi et al. 2016, "Deep learning with differential privacy", Algorithm 1: a Poisson batch (line 4
draws "with sampling probability L/N"), gradients clipped one by one, one noise vector a batch, a public
divisor (n · sampling rate, never the size of the batch that was drawn). There is no T: the query is promised,
and its countdown, by tight accounting instead of the paper's moments accountant, says how many batches the
budget affords. By default the noise is chosen so that these are as many as the problem needs; the step
follows from their number.

`sgd_adv` is the baseline that Lee & Kifer 2018 call SGD-Adv, after Bassily, Smith & Thakurta 2014, Algorithm
1: T batches whose noise is fixed ahead by advanced composition (Dwork & Roth 2014, Theorem 3.20) of steps
that are amplified by sampling, which is counted only where one step is at most 1-DP, as the textbook bound
has it (without that, by T steps of plain advanced composition). What is charged is the event of what ran, as
always, promised T times: it costs a part of the budget, and the rest of it is what the baseline wastes.

Guarantee: (ε, δ) of the plan promised by `accounting.pld`, for add-remove, zero-out and replace-one alike
(under the last each of C and 2C is counted, so noise doubles), against anyone who does not see the draws.
Records with budgets of their own are drawn each at the rate that spends its own (`accounting.personal`).

Where this differs from the papers, all of it public: θ₀ is 0 instead of random, heavy-ball ``momentum``,
steps that fall linearly to 0 over the T batches, rows of bounded norm (`Problem.rows`). Rules, with s the
noise of one pass over all records that would count as much (s = noise / (rate √T)): the time Σ step / (1 -
momentum) is what makes early stopping as strong as a penalty λ = max(1/ε, 2 s² d/n), and batches are as small
as leaves noise above 1.5.

>>> import farthing as ft
>>> from farthing.linear.losses import logistic
>>> from farthing.data.tables import Table
>>> x = np.linspace(-1, 1, 5001)[:, None]
>>> ledger = ft.Ledger(ft.Budget(1.0, 1e-6)).over(Table(x, 1.0 * (x[:, 0] > 0)))
>>> u, constant = ft.run(dpsgd(ledger, Problem(logistic, 5001, 1, unit=False))).w
>>> bool(u[0] > 2), ledger.share
(True, 1.0)
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.accounting import calibrate, composition, gaussian
from farthing.accounting.personal import Levels, PersonalFilter, mean_budget, plan_rates
from farthing.budget import Budget
from farthing.data.tables import Features
from farthing.errors import InvalidValue, Unsupported
from farthing.ledger.ledger import Ledger
from farthing.linear.losses import LinearGradient
from farthing.linear.problem import Problem
from farthing.queries.bounds import ClipNorm
from farthing.queries.events import GaussianEvent, RepeatedEvent
from farthing.queries.mechanisms import Gaussian
from farthing.queries.query import Query, Step, until_spent
from farthing.queries.samplers import Poisson, Sampler

Array = NDArray[np.float64]

_FEWEST, _MOST = 200, 1500  # steps
_LONGEST = 6.0  # step on rows of norm 1 and curvature 1/4, with momentum
_BATCH = 1024
_SAFE_NOISE = 1.5  # below, sampling amplifies less and less


@dataclass(frozen=True, slots=True)
class Batches:
    """The batches of a run: who is drawn, at which mean rate, with which noise, and the ε to go by."""

    sampler: Sampler
    sampling_rate: float
    noise_multiplier: float
    epsilon: float


@until_spent
def dpsgd(
    ledger: Ledger,
    problem: Problem,
    *,
    sampling_rate: float | None = None,
    noise_multiplier: float | None = None,
    clip_norm: float | None = None,
    step: float | None = None,
    momentum: float = 0.9,
) -> Iterator[Step]:
    """Takes noisy steps on Poisson batches until the promise is used up.

    Parameters
    ----------
    sampling_rate : float, optional
        The probability of a record to be in a batch. None: as small as leaves a noise multiplier above 1.5,
        and 1,024 records a batch at least.
    noise_multiplier : float, optional
        The standard deviation of the noise over ``clip_norm``. None: the one at which the budget affords as
        many steps as the problem needs, from 200 to 1,500.
    clip_norm : float, optional
        The largest norm of a record's gradient. None: half of what a row could reach.
    step : float, optional
        The mean learning rate, on the mean gradient. None: a rule of public numbers (see the module).
    momentum : float, default 0.9
        The share of the last direction that is kept, from 0 to below 1.
    """
    budget, features, rule, personal = ledger.budget, problem.rows(), ledger.filter, None
    if isinstance(rule, PersonalFilter):
        people = Levels(rule.epsilons, problem.sizes)
        budget = mean_budget(people, budget)
    spread = budget.adjacency.shift / gaussian.mu(budget.epsilon, budget.delta)
    steps = _steps(problem, features, budget, spread, momentum)
    sampling_rate = (
        _rate(problem, steps, spread) if sampling_rate is None else validate.rate(sampling_rate=sampling_rate)
    )
    if isinstance(rule, PersonalFilter):
        if noise_multiplier is not None:
            raise Unsupported("with budgets of their own the noise follows from sampling_rate: leave it out")
        plan = plan_rates(people, ledger.budget, steps=steps, sampling_rate=sampling_rate)
        personal, noise_multiplier = plan.sampler, plan.noise_multiplier
        sampling_rate = personal.expected(people.sizes) / len(people)
    if noise_multiplier is None:
        sampler = Poisson(sampling_rate)
        noise_multiplier = calibrate.noise(
            lambda sigma: RepeatedEvent(sampler.amplify(GaussianEvent(sigma), budget.observer), steps), budget
        )
    batches = Batches(personal or Poisson(sampling_rate), sampling_rate, noise_multiplier, budget.epsilon)
    yield from on_batches(ledger, problem, features, batches, None, clip_norm, step, momentum)


@until_spent
def sgd_adv(
    ledger: Ledger,
    problem: Problem,
    *,
    sampling_rate: float | None = None,
    steps: int | None = None,
    clip_norm: float | None = None,
    step: float | None = None,
    momentum: float = 0.9,
) -> Iterator[Step]:
    """Takes ``steps`` steps on Poisson batches, with the noise that advanced composition fixes ahead.

    Parameters
    ----------
    sampling_rate, clip_norm, step, momentum
        As in `dpsgd`.
    steps : int, optional
        How many. None: as many as the problem needs, from 200 to 1,500.
    """
    budget, features = ledger.budget, problem.rows()
    # what advanced composition makes of one pass's noise: √(2 ln 2/δ) times that of one Gaussian answer
    spread = math.sqrt(2 * math.log(2 / validate.probability(delta=budget.delta))) * budget.adjacency.shift
    spread /= gaussian.mu(budget.epsilon, budget.delta)
    rule = _steps(problem, features, budget, spread, momentum)
    steps = rule if steps is None else validate.count(steps=steps)
    sampling_rate = (
        _rate(problem, steps, spread) if sampling_rate is None else validate.rate(sampling_rate=sampling_rate)
    )
    noise_multiplier = advanced_noise(sampling_rate, steps, budget)
    batches = Batches(Poisson(sampling_rate), sampling_rate, noise_multiplier, budget.epsilon)
    yield from on_batches(ledger, problem, features, batches, steps, clip_norm, step, momentum)


@functools.lru_cache(maxsize=256)
def advanced_noise(sampling_rate: float, steps: int, budget: Budget) -> float:
    """The least noise that advanced composition allows, with amplification where a step's ε is at most 1."""
    shift, slack = budget.adjacency.shift, budget.delta / 2
    amplified = slack / (steps * validate.rate(sampling_rate=sampling_rate))  # a step's δ before sampling

    def excess(noise_multiplier: float) -> float:
        step = gaussian.epsilon(shift / noise_multiplier, min(amplified, 0.5))
        if step <= 1:
            step, _ = composition.amplify_poisson(step, 0.0, sampling_rate)
        else:
            step = gaussian.epsilon(shift / noise_multiplier, slack / steps)
        return composition.advanced(step, 0.0, steps, slack)[0] - budget.epsilon if step < 700 else math.inf

    safe = 1.0
    while excess(safe) > 0:
        safe *= 2
    return gaussian.safe_root(excess, safe, 1e-3)


def _time(problem: Problem, features: Features, epsilon: float, spread: float) -> float:
    """Σ step: n / λ, on rows of norm 1 and curvature 1/4."""
    size = features.size * max(1, problem.outputs)
    return problem.records / max(1 / epsilon, 2 * spread**2 * size / problem.records)


def _steps(problem: Problem, features: Features, budget: Budget, spread: float, momentum: float) -> int:
    if not validate.non_negative(momentum=momentum) < 1:
        raise InvalidValue(f"momentum must be in [0, 1), got {momentum!r}")
    needed = _time(problem, features, budget.epsilon, spread) * (1 - momentum) / _LONGEST
    return math.ceil(min(max(needed, _FEWEST), _MOST))


def _rate(problem: Problem, steps: int, spread: float) -> float:
    return min(1.0, max(_BATCH / problem.records, _SAFE_NOISE / (spread * math.sqrt(steps))))


def on_batches(
    ledger: Ledger,
    problem: Problem,
    features: Features,
    batches: Batches,
    steps: int | None,
    clip_norm: float | None,
    step: float | None,
    momentum: float,
) -> Iterator[Step]:
    """Algorithm 1, lines 3 to 8, ``steps`` times or as often as the budget affords."""
    radius = features.radius or problem.radius
    bound = ClipNorm(radius / 2 if clip_norm is None else validate.positive(clip_norm=clip_norm))
    noise = Gaussian(validate.positive(noise_multiplier=batches.noise_multiplier))
    query = Query(batches.sampler, LinearGradient(problem.loss, features), bound, noise)
    times = ledger.promise(query, steps).times
    if step is None:
        spread = batches.noise_multiplier / (batches.sampling_rate * math.sqrt(times))
        time = _time(problem, features, batches.epsilon, spread)
        step = min(time * (1 - momentum) / times, _LONGEST) / (4 * problem.loss.curvature * radius**2)
    length = validate.positive(step=step) / (batches.sampling_rate * problem.records)
    w = problem.begin(features)
    velocity = np.zeros_like(w)
    for t in range(1, times + 1):
        answer = ledger.ask(query, w)
        velocity = momentum * velocity + answer.value
        w = w - 2 * (1 - (t - 1) / times) * length * velocity
        yield Step(t, features.unfold(w), (answer.receipt,))
