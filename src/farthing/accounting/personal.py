"""Account for personal budgets: levels of ε, the rates and weights that spend them, and a filter for each.

A unit pays the event of its own level (`farthing.queries.personal` has the theorem, for each adjacency), so
accounting is per level and not per person, and takes the same time for a hundred people and for a million.
More than 32 different ε are rounded *down* to 32 levels, by less than a factor (largest / smallest)^(1/31).

Rates. The price of T batches with noise multiplier σ grows with the rate q, so each level has one largest
rate that keeps it within (ε_k, δ) by tight accounting: `rates`. σ follows from one plan at the mean budget:
in the limit of Gaussian DP a level's rate is proportional to its μ_k, so the expected batch Σ n_k q_k is that
of this plan. If a part of the largest budget would be left even at rate 1, the noise is the one that spends
it at rate 1. A level that would not be drawn once in the whole training has rate 0.

Weights. If all records take part in every answer, a level's weight is μ_k / μ of the largest: Gaussian
answers whose Σμ² is within the largest budget are then within every other, also for adaptively chosen answers
(`PersonalFilter`, one Gaussian-DP filter per level).

>>> people = PersonalBudgets([1.0, 3.0, 1.0, 2.0])
>>> people.epsilons, people.sizes, people.levels.tolist()
((1.0, 2.0, 3.0), (2, 1, 1), [0, 2, 0, 1])
>>> plan = plan_rates(people, 1e-5, steps=1000, sampling_rate=0.02)
>>> [round(rate, 4) for rate in plan.sampling_rates], round(plan.noise_multiplier, 3)
([0.0122, 0.0229, 0.0329], 1.646)
"""

import math
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.accounting import calibrate, gaussian, pld, tuning
from farthing.accounting.filters import Additive, Filter, GdpFilter, Totals
from farthing.accounting.tolerance import inner
from farthing.budget import Budget
from farthing.errors import BudgetSpent, InvalidValue
from farthing.queries.events import (
    Event,
    GaussianEvent,
    RepeatedEvent,
    flatten,
    for_level,
    levels,
)
from farthing.queries.personal import MOST_LEVELS, Leveled, Personal
from farthing.queries.samplers import Everyone, Poisson

_DEEPEST = 20.0  # largest -log(rate): a level with a smaller rate does not take part
_SECANTS = 20
_FINE = 1e-7  # relative precision of the largest rate


class PersonalBudgets:
    """An ε for every record or person, on at most 32 levels.

    Parameters
    ----------
    budgets : array of float
        The public ε of each record or person, a finite number above 0.
    epsilons : sequence of float, optional
        The levels, ascending; each record is on the largest level that does not exceed its ε. None: the
        distinct values, or 32 levels at equal ratios if there are more than 32.

    Raises
    ------
    InvalidValue
        If there are no budgets, or some are not finite numbers above 0, or below the smallest level.

    Examples
    --------
    >>> people = PersonalBudgets([0.5, 2.0, 0.5])
    >>> people.epsilons, people.sizes
    ((0.5, 2.0), (2, 1))
    >>> PersonalBudgets([0.5, 2.0, 0.7], epsilons=(0.5, 1.0)).levels.tolist()
    [0, 1, 0]
    """

    def __init__(self, budgets: Any, *, epsilons: Any = None) -> None:
        values = numbers(budgets)
        self.epsilons = _levels(values) if epsilons is None else _ascending(epsilons)
        self.levels: NDArray[np.int64] = np.searchsorted(self.epsilons, values, side="right") - 1
        if (self.levels < 0).any():
            raise InvalidValue(
                f"budgets must not be below the smallest level, epsilon {self.epsilons[0]:g}, and some are"
            )
        counts = np.bincount(self.levels, minlength=len(self.epsilons))
        self.sizes = tuple(int(count) for count in counts)

    def __len__(self) -> int:
        return len(self.levels)

    def budget(self, delta: float, **terms: Any) -> Budget:
        """Return the largest budget at this δ; ``terms`` are its adjacency, unit and observer."""
        return Budget(self.epsilons[-1], delta, **terms)

    def over(self, records: Any) -> Leveled:
        """Return the records with their levels."""
        if len(records) != len(self):
            raise InvalidValue(f"there must be one budget per record: {len(self)} are given")
        return Leveled(records, self.levels, self.epsilons)

    def __call__(self, budget: Budget) -> "PersonalFilter":
        """Return the filter of these levels, for ``Ledger(budget, filter=…)``."""
        return PersonalFilter(budget, self.epsilons)


def numbers(budgets: Any) -> NDArray[np.float64]:
    """Return one finite number above 0 per record; errors do not name a record."""
    try:
        values = np.asarray(budgets)
        if values.dtype.kind not in "iuf":
            raise ValueError
    except (TypeError, ValueError):
        raise InvalidValue("budgets must be numbers, an epsilon for each record or person") from None
    values = values.astype(np.float64)
    if values.ndim != 1 or not values.size:
        raise InvalidValue(f"budgets must be one epsilon per record or person, got shape {values.shape}")
    if not (np.isfinite(values) & (values > 0)).all():
        raise InvalidValue("budgets must be finite numbers above 0, and some are not")
    return values


def _levels(values: NDArray[np.float64]) -> tuple[float, ...]:
    different = np.unique(values)
    if len(different) > MOST_LEVELS:
        low, high = float(different[0]), float(different[-1])
        different = np.append(np.geomspace(low, high, MOST_LEVELS)[1:-1], [low, high])
        different = np.unique(np.clip(different, low, high))
    return tuple(map(float, different))


def _ascending(epsilons: Any) -> tuple[float, ...]:
    found = tuple(validate.positive(epsilons=epsilon) for epsilon in epsilons)
    if not 0 < len(found) <= MOST_LEVELS or any(a >= b for a, b in pairwise(found)):
        raise InvalidValue(f"epsilons must be 1 to {MOST_LEVELS} ascending numbers, got {found}")
    return found


@dataclass(frozen=True, slots=True)
class Levels:
    """The public numbers of personal budgets: every level's ε and size."""

    epsilons: tuple[float, ...]
    sizes: tuple[int, ...]

    def __len__(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class PersonalFilter(Additive):
    """A privacy filter with a balance for each level of ε, which keeps every level within its budget.

    Parameters
    ----------
    budget : Budget
        The largest budget.
    epsilons : tuple of float
        The levels, ascending; the last is the budget's.

    Notes
    -----
    Promised answers are counted by tight accounting, per level. Other answers are charged to one Gaussian-DP
    filter per level (Smith & Thakurta 2022), so their prices may depend on earlier answers.

    Examples
    --------
    >>> from farthing.queries.events import PersonalEvent
    >>> rule = PersonalFilter(Budget(2.0, 1e-5), (1.0, 2.0))
    >>> total = rule.add(rule.start(), PersonalEvent((GaussianEvent(8.0), GaussianEvent(4.0))), 3)
    >>> rule.fits(total), [round(epsilon, 3) for epsilon in rule.each(total)]
    (True, [0.791, 1.698])
    """

    budget: Budget
    epsilons: tuple[float, ...]
    rules: tuple[GdpFilter, ...] = field(init=False)
    name: ClassVar[str] = "personal"
    theorem: ClassVar[str] = (
        "farthing.queries.personal: each level of budget pays its own events; Smith & Thakurta 2022"
    )

    def __post_init__(self) -> None:
        epsilons = _ascending(self.epsilons)
        if epsilons[-1] != self.budget.epsilon:
            raise InvalidValue(
                f"the budget must be that of the largest level, epsilon {epsilons[-1]:g}, got {self.budget}"
            )
        object.__setattr__(self, "epsilons", epsilons)
        rules = tuple(GdpFilter(self.budget.with_(epsilon, self.budget.delta)) for epsilon in epsilons)
        object.__setattr__(self, "rules", rules)

    def start(self) -> Totals:
        """Return μ² = 0 at every level."""
        return [0.0] * len(self.epsilons)

    def cost(self, event: Event) -> Totals:
        """Return μ² of an event at every level."""
        _refuse_levels(event, len(self.epsilons))
        return [rule.add([0.0], for_level(event, k))[0] for k, rule in enumerate(self.rules)]

    def fits(self, total: Totals) -> bool:
        """Return whether every level is within its budget."""
        return all(rule.fits([own]) for rule, own in zip(self.rules, total, strict=True))

    def share(self, total: Totals) -> float:
        """Return the used share of the level that has least left."""
        return max(rule.share([own]) for rule, own in zip(self.rules, total, strict=True))

    def each(self, total: Totals) -> list[float]:
        """Return ε of every level."""
        return [rule.epsilon([own]) for rule, own in zip(self.rules, total, strict=True)]

    def epsilon(self, total: Totals) -> float:
        """Return the largest ε of any level."""
        return max(self.each(total))


def _refuse_levels(event: Event, own: int) -> None:
    if (found := levels(event)) not in (1, own):
        raise InvalidValue(
            f"an answer that {found} levels of budget pay differently needs a ledger of these levels, "
            f"Ledger(people.budget(delta), filter=people); this one has {own}"
        )


def paid(event: Event, rule: Filter) -> list[tuple[Event, Budget]]:
    """Return the part of ``event`` that each level of a ledger's budgets pays, with its budget.

    A ledger of one budget has one level.
    """
    if not isinstance(rule, PersonalFilter):
        _refuse_levels(event, 1)
        return [(event, rule.budget)]
    _refuse_levels(event, len(rule.epsilons))
    return [(for_level(event, level), each.budget) for level, each in enumerate(rule.rules)]


def steps(event: Event, rule: Filter, before: Event) -> int:
    """Return how often ``event`` fits every level's budget, after ``before``; 0 if not even once."""
    counts = []
    for (own, budget), (spent, _) in zip(paid(event, rule), paid(before, rule), strict=True):
        if flatten(own):
            counts.append(calibrate.steps(own, budget, spent))
    return min(counts, default=0)


def affordable(event: Event, rule: Filter) -> bool:
    """Return whether ``event`` fits every level's budget."""
    return all(tuning.affordable(own, budget) for own, budget in paid(event, rule) if flatten(own))


def epsilons(event: Event, rule: Filter) -> list[float]:
    """Return the certified ε of ``event`` for every level, at most its budget's."""
    return [
        min(pld.epsilon(own, budget.delta, budget.adjacency), budget.epsilon) if flatten(own) else 0.0
        for own, budget in paid(event, rule)
    ]


def mean_budget(people: PersonalBudgets | Levels, largest: Budget) -> Budget:
    """Return the budget whose μ is the mean over all units."""
    mus = [gaussian.mu(epsilon, largest.delta) for epsilon in people.epsilons]
    mean = math.fsum(mu * size for mu, size in zip(mus, people.sizes, strict=True)) / len(people)
    return largest.with_(min(gaussian.epsilon(mean, largest.delta), largest.epsilon), largest.delta)


def everyone(rule: Filter) -> Everyone | Personal:
    """Return a sampler of all records, with weights by which Gaussian answers spend all levels at once."""
    if not isinstance(rule, PersonalFilter):
        return Everyone()
    mus = [own.mu for own in rule.rules]
    smaller = (math.nextafter(mu / mus[-1], 0.0) for mu in mus[:-1])
    return Personal((1.0,) * len(mus), (*smaller, 1.0))


@dataclass(frozen=True, slots=True)
class RatePlan:
    """A plan of ``steps`` batches: one noise multiplier, and the sampling rate of every level."""

    noise_multiplier: float
    steps: int
    sampling_rates: tuple[float, ...]

    @property
    def sampler(self) -> Personal:
        """Return the sampler of these rates."""
        return Personal(self.sampling_rates)


def plan_rates(
    people: PersonalBudgets | Levels,
    budget: Budget | float,
    *,
    steps: int,
    sampling_rate: float | None = None,
    noise_multiplier: float | None = None,
) -> RatePlan:
    """Return a plan that spends every level's budget, from public numbers.

    Parameters
    ----------
    people : PersonalBudgets or Levels
        The levels and their sizes.
    budget : Budget or float
        The largest budget, or δ.
    steps : int
        The number of batches.
    sampling_rate : float, optional
        The mean sampling rate to aim at, which decides the noise.
    noise_multiplier : float, optional
        The noise; one of the two must be given.

    Returns
    -------
    RatePlan

    Raises
    ------
    BudgetSpent
        If no level can take part.

    Examples
    --------
    >>> plan = plan_rates(PersonalBudgets([1.0, 2.0]), 1e-5, steps=100, noise_multiplier=2.0)
    >>> [round(rate, 3) for rate in plan.sampling_rates]
    [0.046, 0.087]
    """
    largest = budget if isinstance(budget, Budget) else Budget(people.epsilons[-1], budget)
    count = validate.count(steps=steps)
    if (sampling_rate is None) == (noise_multiplier is None):
        raise InvalidValue("pass either the mean sampling_rate or the noise_multiplier")
    if noise_multiplier is None:
        noise_multiplier = min(
            _noise(validate.rate(sampling_rate=sampling_rate), count, mean_budget(people, largest)),
            _noise(1.0, count, largest),  # more would leave a part of the largest budget even at rate 1
        )
    sigma = validate.positive(noise_multiplier=noise_multiplier)
    rates = tuple(
        rate if count * size * rate >= 1 else 0.0
        for size, rate in zip(people.sizes, _rates(people.epsilons, largest, sigma, count), strict=True)
    )
    if not any(rates):
        raise BudgetSpent(f"no budget allows {count} batches with noise multiplier {sigma:g} at any rate")
    return RatePlan(sigma, count, rates)


def plan_weights(
    people: PersonalBudgets | Levels, budget: Budget, *, steps: int, sampling_rate: float
) -> tuple[Personal, float]:
    """Return one sampling rate for all with weights that spend every level's budget, and the noise.

    This is "Scale" of Boenisch et al. 2023, with weights in place of clipping norms. One rate for all reads
    larger batches than `plan_rates`, for about the same noise on a mean.
    """
    rate, count = validate.rate(sampling_rate=sampling_rate), validate.count(steps=steps)
    noises = [_noise(rate, count, budget.with_(epsilon, budget.delta)) for epsilon in people.epsilons]
    smaller = (noises[-1] / noise * (1 - _FINE) for noise in noises[:-1])
    return Personal((rate,) * len(noises), (*smaller, 1.0)), noises[-1]


def _noise(rate: float, steps: int, budget: Budget) -> float:
    sampler = Poisson(rate)
    return calibrate.noise(
        lambda sigma: RepeatedEvent(sampler.amplify(GaussianEvent(sigma), budget.observer), steps), budget
    )


@lru_cache(maxsize=64)
def _rates(epsilons: tuple[float, ...], largest: Budget, noise: float, steps: int) -> tuple[float, ...]:
    return tuple(largest_rate(largest.with_(one, largest.delta), noise, steps) for one in epsilons)


def largest_rate(budget: Budget, noise_multiplier: float, steps: int) -> float:
    """Return the largest sampling rate at which ``steps`` Gaussian batches fit a budget; 0 if there is none.

    The result is at most a relative 1e-7 below the largest, and checked as the ledger does.
    """

    def plan(rate: float) -> Event:
        return RepeatedEvent(Poisson(rate).amplify(GaussianEvent(noise_multiplier), budget.observer), steps)

    def excess(depth: float) -> float:
        """Return the log of ε over the budget's, at rate e^-depth."""
        found = pld.epsilon(plan(math.exp(-depth)), budget.delta, budget.adjacency)
        return math.log(max(found, 1e-300) / inner(budget.epsilon, 2))

    if calibrate.affordable(plan(1.0), budget):
        return 1.0
    # secants from the central limit (Dong, Roth & Su 2022, Cor. 5.4): ε is nearly proportional to the rate
    spread = math.sqrt(steps * math.expm1(min(1 / noise_multiplier**2, 700.0))) * budget.adjacency.shift
    depth = min(max(0.0, math.log(spread / gaussian.mu(budget.epsilon, budget.delta))), _DEEPEST)
    found, slope = excess(depth), -1.0
    for _ in range(_SECANTS):
        if -_FINE <= found <= 0:
            break
        after = min(max(depth - (found + _FINE / 2) / slope, 0.0), _DEEPEST)
        value = excess(after)
        if after != depth and math.isfinite(value - found):
            slope = min(max((value - found) / (after - depth), -2.0), -0.5)
        depth, found = after, value
    while found > 0 and depth < _DEEPEST:
        depth += 0.01
        found = excess(depth)
    if found > 0:
        return 0.0
    rate = math.exp(-depth)
    less = _FINE
    while not calibrate.affordable(plan(rate), budget):  # it integrates along another line
        rate, less = rate / (1 + less), 2 * less
        if rate < math.exp(-_DEEPEST):
            return 0.0
    return rate
