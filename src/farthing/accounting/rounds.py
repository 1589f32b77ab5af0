"""Find noise for a number of federated rounds, and rounds for a noise, by each kind of composition.

A round is one noisy answer of a client, on everybody or on a sample of its records. Noise is a multiple of
the clipping norm. `basic`, `advanced` and `amplified` fix the number of rounds beforehand; the others count
as many as fit.

>>> from farthing.budget import Budget
>>> from farthing.queries.samplers import Poisson
>>> round(basic(10, Budget(1.0, 1e-5), Poisson(0.1)), 3)
36.305
"""

import math
from collections.abc import Callable

from farthing.accounting import calibrate, composition, gaussian, sampling
from farthing.accounting.tolerance import inner
from farthing.budget import Budget
from farthing.errors import Unsupported
from farthing.queries.bounds import ClipNorm
from farthing.queries.events import Event, RepeatedEvent
from farthing.queries.mechanisms import Gaussian
from farthing.queries.samplers import Everyone, FixedSize, Poisson, Sampler

Noise = Callable[[int, Budget, Sampler], float]  # the least noise for a number of rounds
Rounds = Callable[[float, int, Budget, Sampler], int]  # the most rounds with a noise, up to a planned number

_ROUNDED = 1 + 1e-12  # so that counting with the calibrated noise gives at least the planned rounds


def basic(rounds: int, budget: Budget, sampler: Sampler) -> float:
    """Return the noise of (ε/T, δ/T) a round."""
    return shift(sampler, budget) * gaussian.noise(budget.epsilon / rounds, budget.delta / rounds)


def advanced(rounds: int, budget: Budget, sampler: Sampler) -> float:
    """Return the noise of advanced composition with half of δ as slack, without amplification."""
    return shift(sampler, budget) * sampling.addp_noise(
        budget.epsilon, budget.delta, rounds, budget.delta / 2
    )


def amplified(rounds: int, budget: Budget, sampler: Sampler) -> float:
    """Return the noise of advanced composition over rounds that sampling amplifies."""
    each, missed = composition.advanced_epsilon_iter(budget.epsilon, budget.delta, rounds, budget.delta / 2)
    unsampled = math.log1p(math.expm1(each) / _rate(sampler)) * (1 - 1e-14)
    return shift(sampler, budget) * gaussian.noise(unsampled, missed / _rate(sampler) * (1 - 1e-15))


def sampled(rounds: int, budget: Budget, sampler: Sampler) -> float:
    """Return the noise of A-DDP's Gaussian Sampling Composition Theorem."""
    rate = _rate(sampler)
    # by as much as other noise is calibrated inside a budget, so that a ledger accepts the planned rounds
    epsilon, delta = (inner(part, 2) or part for part in (budget.epsilon, budget.delta))
    safe = gaussian.noise(epsilon, delta) * math.sqrt(rounds) * (1 + 1e-12)

    def excess(noise: float) -> float:
        return math.log(sampling.delta(noise, rate, rounds, epsilon) / delta)

    unsafe = safe
    while unsafe > 1e-3 and excess(unsafe) <= 0:
        safe, unsafe = unsafe, unsafe / 2
    return shift(sampler, budget) * (safe if safe == unsafe else gaussian.safe_root(excess, safe, unsafe))


def tight(rounds: int, budget: Budget, sampler: Sampler) -> float:
    """Return the noise of the privacy loss distribution of the draw and the noise."""
    if isinstance(sampler, Everyone):
        noise = gaussian.noise(budget.epsilon, budget.delta)
        return shift(sampler, budget) * math.sqrt(rounds) * noise * _ROUNDED
    least = calibrate.noise(lambda noise: RepeatedEvent(_price(noise, budget, sampler), rounds), budget)
    noise, more = least, 1e-9
    # counting rounds bounds δ on other lines than calibration: it may need slightly more noise
    while calibrate.steps(_price(noise, budget, sampler), budget) < rounds:
        noise, more = least * (1 + more), 4 * more
    return noise


def sampled_rounds(noise: float, planned: int, budget: Budget, sampler: Sampler) -> int:
    """Return the rounds of A-DDP's theorem, which need not be planned."""
    return sampling.rounds(noise / shift(sampler, budget), _rate(sampler), budget.epsilon, budget.delta)


def tight_rounds(noise: float, planned: int, budget: Budget, sampler: Sampler) -> int:
    """Return the rounds of tight accounting, which need not be planned."""
    return calibrate.steps(_price(noise, budget, sampler), budget)


def planned_rounds(by: Noise) -> Rounds:
    """Return a function that counts rounds, up to the planned ones, whose noise is no larger."""

    def rounds_of(noise: float, planned: int, budget: Budget, sampler: Sampler) -> int:
        def fits(rounds: int) -> bool:
            return by(rounds, budget, sampler) <= noise * (1 + 1e-12)

        if fits(planned):
            return planned
        low, high = 0, planned
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    return rounds_of


def shift(sampler: Sampler, budget: Budget) -> float:
    """Return the sensitivity of an upload to one record, divided by the clipping norm."""
    if not isinstance(sampler, Everyone | Poisson | FixedSize):
        raise Unsupported(f"only tight accounting prices rounds on draws of {sampler!r}: use 'tight'")
    return 2.0 if isinstance(sampler, FixedSize) else budget.adjacency.shift


def _price(noise: float, budget: Budget, sampler: Sampler) -> Event:
    sampled = not isinstance(sampler, Everyone)
    return sampler.amplify(Gaussian(noise).event(ClipNorm(1.0), budget.adjacency, sampled), budget.observer)


def _rate(sampler: Sampler) -> float:
    match sampler:
        case Poisson(rate):
            return rate
        case FixedSize(size, of):
            return size / of
    return 1.0
