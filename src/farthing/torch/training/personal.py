"""Train with personal budgets: each example has a sampling rate that spends its own ε.

"Sample" of Boenisch et al. 2023, by levels of budget (`farthing.queries.personal` has the theorem): batches
have one noise multiplier, and an example of level k is in a batch with the largest probability that keeps
all batches together within (ε_k, δ) by tight accounting. Batches are promised ahead; the ledger has a balance
for every level, and what a level pays is the event of its own rate.

Number of batches, mean rate and noise follow from the mean budget (by μ of Gaussian DP) as they do without
personal budgets (`plan`). All of it is a rule of public numbers: the levels, and how many are on each.

With ``users`` an example is a person, whose budget is the smallest among the records that count.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.accounting.correlated import best_exponent, choose_bands
from farthing.accounting.personal import (
    PersonalBudgets,
    PersonalFilter,
    RatePlan,
    mean_budget,
    numbers,
    plan_rates,
)
from farthing.budget import Unit
from farthing.errors import InvalidValue, Unsupported
from farthing.ledger.ledger import Ledger
from farthing.queries.events import Event, GaussianEvent, PersonalEvent, PoissonEvent, flatten
from farthing.queries.personal import PersonalCyclic
from farthing.torch.training.correlated import correlated_kind
from farthing.torch.training.plan import (
    BatchKind,
    Noise,
    Plan,
    default_rate,
    default_steps,
    ledger_of,
    promised,
)
from farthing.torch.training.records import Examples

Values = NDArray[np.float64]


def values_of(budgets: Any, examples: Examples, records: int | None, adapt: Any) -> Values | None:
    """Return an ε for each example, or None where budgets are not personal; refuses what cannot be.

    Raises
    ------
    InvalidValue
        If there is not one finite number above 0 a record; no message quotes one.
    """
    if budgets is None:
        return None
    values = numbers(budgets)
    if len(values) != examples.records:
        raise InvalidValue(
            f"budgets must be one epsilon for each of {examples.records} records, got {len(values)}"
        )
    if adapt is not None:
        raise Unsupported("adapt= changes prices on the way, and personal rates are promised: leave one out")
    values = examples.least(values)
    if records not in (None, len(values)):
        raise InvalidValue(f"records must be left out with budgets: there are {len(values)}, which is public")
    return values


def opened(
    values: Values | None, ledger: Ledger | None, epsilon: float | None, delta: float | None, unit: Unit
) -> tuple[Ledger, PersonalBudgets | None]:
    """Return the ledger that pays, given or in memory, and of personal budgets everybody's level in it."""
    if values is None:
        return ledger_of(ledger, epsilon, delta, unit), None
    if epsilon is not None:
        raise InvalidValue("epsilon must be left out with budgets, which say it for everybody")
    if ledger is None:
        if delta is None:
            raise InvalidValue("give a ledger, or delta for one in memory")
        people = PersonalBudgets(values)
        return Ledger(people.budget(delta, unit=unit), filter=people), people
    rule = ledger.filter
    if not isinstance(rule, PersonalFilter):
        raise InvalidValue(
            "budgets need a ledger of personal budgets: people = ft.PersonalBudgets(budgets), then "
            f"ft.Ledger(people.budget(delta), filter=people); this one has {ledger.budget}"
        )
    return ledger_of(ledger, None, delta, unit), PersonalBudgets(values, epsilons=rule.epsilons)


def personal_plan(
    ledger: Ledger,
    people: PersonalBudgets,
    kind: BatchKind,
    sampling_rate: float | None,
    noise_multiplier: Noise | None,
    steps: int | None,
    bands: int | str = 1,
) -> tuple[Plan, BatchKind]:
    """Return the plan that the ledger holds, or a new one, and batches that are drawn by its rates."""
    if bands != 1:
        return _in_turns(ledger, people, kind, sampling_rate, noise_multiplier, steps, bands)
    rates = _resumed(ledger, steps) if sampling_rate is None and noise_multiplier is None else None
    rates = rates or _planned(ledger, people, sampling_rate, noise_multiplier, steps)
    expected = rates.sampler.expected(people.sizes)
    plan = Plan(len(people), expected / len(people), (rates.noise_multiplier,), rates.steps)
    return plan, replace(kind, personal=rates.sampler)


def _in_turns(
    ledger: Ledger,
    people: PersonalBudgets,
    kind: BatchKind,
    sampling_rate: float | None,
    noise_multiplier: Noise | None,
    steps: int | None,
    bands: int | str,
) -> tuple[Plan, BatchKind]:
    """Return a plan of correlated noise, and batches of groups that take turns, each example at its rate."""
    if noise_multiplier is not None:
        raise InvalidValue("bands with budgets find the noise_multiplier: leave it out")
    mean = mean_budget(people, ledger.budget)
    length = default_steps(mean) if steps is None else validate.count(steps=steps)
    rate = default_rate(mean, len(people), length) if sampling_rate is None else sampling_rate
    validate.rate(sampling_rate=rate)
    count = choose_bands(mean, rate, length).bands if bands == "auto" else validate.count(bands=bands)
    if rate * count > 1:
        raise InvalidValue(f"at a mean sampling_rate of {rate:g} there are at most {int(1 / rate)} bands")
    found = plan_rates(people, ledger.budget, steps=-(-length // count), sampling_rate=rate * count)
    sampler = PersonalCyclic(tuple(each / count for each in found.sampling_rates), groups=count)
    expected = sampler.expected(people.sizes) / len(people)
    terms = (found.noise_multiplier,), length, True, count, best_exponent(count, length)
    plan = Plan(len(people), expected, *terms)
    return plan, replace(correlated_kind(kind, plan), personal=sampler)


def _planned(
    ledger: Ledger,
    people: PersonalBudgets,
    sampling_rate: float | None,
    noise_multiplier: Noise | None,
    steps: int | None,
) -> RatePlan:
    if noise_multiplier is not None and not isinstance(noise_multiplier, int | float):
        raise Unsupported("personal rates are found for one noise_multiplier: give a number")
    if sampling_rate is not None and noise_multiplier is not None:
        raise InvalidValue("give the mean sampling_rate or the noise_multiplier with budgets, not both")
    mean = mean_budget(people, ledger.budget)
    length = default_steps(mean) if steps is None else validate.count(steps=steps)
    if sampling_rate is None and noise_multiplier is None:
        sampling_rate = default_rate(mean, len(people), length)
    return plan_rates(
        people, ledger.budget, steps=length, sampling_rate=sampling_rate, noise_multiplier=noise_multiplier
    )


def _resumed(ledger: Ledger, steps: int | None) -> RatePlan | None:
    """Return the plan of a run that goes on: the ledger's one promise of personal batches, if it fits."""
    found = [
        RatePlan(terms[0], times, terms[1])
        for event, times in promised(ledger.journal)
        if (terms := _terms(event)) is not None and steps in (None, times)
    ]
    return found[0] if len(found) == 1 else None


def _terms(event: Event) -> tuple[float, tuple[float, ...]] | None:
    """Return noise multiplier and rates of personal batches; None of another event."""
    if not isinstance(event, PersonalEvent):
        return None
    rates, noises = list[float](), set[float]()
    for own in event.events:
        match own:
            case PoissonEvent(rate, GaussianEvent(noise)):
                rates.append(rate)
            case GaussianEvent(noise):
                rates.append(1.0)
            case _ if not flatten(own):
                rates.append(0.0)
                continue
            case _:
                return None
        noises.add(noise)
    return (noises.pop(), tuple(rates)) if len(noises) == 1 else None
