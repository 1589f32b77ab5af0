"""Train by DP-SGD until the budget is spent, and by SGD-Adv, with noise fixed by advanced composition.

`dpsgd` is Abadi et al. 2016, "Deep learning with differential privacy", Algorithm 1: a Poisson batch (line 4
draws "with sampling probability L/N"), per-record clipping, one noise vector per batch, a public divisor (n ·
sampling rate, never the realised batch size). There is no T: the query is promised, and tight accounting,
instead of the paper's moments accountant, counts the batches that the budget affords. By default the noise is
chosen so that their number is what the problem needs; the step follows from their number.

`sgd_adv` is the baseline that Lee & Kifer 2018 call SGD-Adv, after Bassily, Smith & Thakurta 2014, Algorithm
1: T batches whose noise is fixed in advance by advanced composition (Dwork & Roth 2014, Theorem 3.20) of
steps that are amplified by sampling. Amplification is counted only if one step is at most 1-DP, as in the
textbook bound (otherwise the noise is that of T steps of plain advanced composition). The charge is the event
that ran, promised T times: it costs a part of the budget, and the baseline wastes the rest.

Guarantee: (ε, δ) of the plan promised by `accounting.pld`, for add-remove, zero-out and replace-one (where
noise doubles, as the sensitivity is 2C), against an observer who does not see the draws. Records with
personal budgets are drawn at the rates that spend them (`accounting.personal`).

Differences from the papers, all of them public: θ₀ is 0 instead of random, heavy-ball ``momentum``, steps
that decrease linearly to 0 over the T batches, rows of bounded norm (`Problem.rows`). Rules, with s the noise
of an equivalent single pass over all records (s = noise / (rate √T)): the time Σ step / (1 - momentum) makes
early stopping as strong as a penalty λ = max(1/ε, 2 s² d/n), and batches are the smallest that leave the
noise multiplier above 1.5.

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
_LONGEST = 6.0  # the longest step on rows of norm 1 and curvature 1/4, with momentum
_BATCH = 1024
_SAFE_NOISE = 1.5  # below it, sampling amplifies less


@dataclass(frozen=True, slots=True)
class Batches:
    """The batches of a run: sampler, mean rate, noise, and the ε for its rules."""

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
    """Take noisy steps on Poisson batches until the promise is used up.

    Parameters
    ----------
    sampling_rate : float, optional
        The probability that a record is in a batch. None: the smallest that leaves a noise multiplier above
        1.5 and an expected batch of at least 1,024 records.
    noise_multiplier : float, optional
        The standard deviation of the noise over ``clip_norm``. None: the one at which the budget affords the
        number of steps that the problem needs, from 200 to 1,500.
    clip_norm : float, optional
        The largest norm of a record's gradient. None: half of the largest possible norm.
    step : float, optional
        The mean learning rate, on the mean gradient. None: a rule of public numbers (see the module).
    momentum : float, default 0.9
        The fraction of the last direction that is kept, from 0 to below 1.
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
            raise Unsupported("personal budgets set the noise from sampling_rate: leave out noise_multiplier")
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
    """Take ``steps`` steps on Poisson batches, with the noise of advanced composition.

    Parameters
    ----------
    sampling_rate, clip_norm, step, momentum
        As in `dpsgd`.
    steps : int, optional
        The number of steps. None: as many as the problem needs, from 200 to 1,500.
    """
    budget, features = ledger.budget, problem.rows()
    # the noise of one pass under advanced composition: √(2 ln 2/δ) times that of one Gaussian answer
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
    """Return the least noise by advanced composition, with amplification if a step's ε is at most 1."""
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
    """Return Σ step: n / λ, on rows of norm 1 and curvature 1/4."""
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
    """Run Algorithm 1, lines 3 to 8, ``steps`` times or as often as the budget affords."""
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
