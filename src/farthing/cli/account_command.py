"""The commands about plans of equal steps: ``farthing account`` and ``calibrate``."""

import math
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Any

import typer

from farthing import validate
from farthing.accounting.plans import Accountant, Curve, Plan, curve
from farthing.budget import Adjacency, Budget, Unit
from farthing.cli.ledger_output import aligned, rounded_up
from farthing.cli.options import FAILED, SPENT, AsJson, Relation, emit, emit_json, number, option, say, whole
from farthing.errors import BudgetSpent, InvalidValue


class Sampler(StrEnum):
    """How the records of a step are drawn."""

    POISSON = "poisson"
    FIXED = "fixed"


_SIGMA = "Noise: standard deviation over the bound C of one contribution."
_RATE = "Probability of a record to be in a step's sample; 1 for everybody."
_RECORDS = "Records in all, for fixed samples: rate times records are drawn."

Rate = Annotated[float, option(number, _RATE)]
Records = Annotated[int | None, option(whole, _RECORDS)]
Draw = Annotated[
    Sampler, typer.Option(help="How a sample is drawn: each record by itself, or a fixed number.")
]


def account(
    sigma: Annotated[float, option(number, _SIGMA)],
    rate: Rate,
    steps: Annotated[int, option(whole, "How many steps.")],
    delta: Annotated[float | None, option(number, "Print epsilon at this delta.")] = None,
    epsilon: Annotated[
        float | None,
        option(number, "Print delta at this epsilon; with --delta, say whether epsilon stays within it."),
    ] = None,
    accountant: Annotated[Accountant, typer.Option(help="How steps are added up.")] = Accountant.PLD,
    adjacency: Relation = Adjacency.ADD_REMOVE,
    sampler: Draw = Sampler.POISSON,
    records: Records = None,
    as_json: AsJson = False,
) -> int:
    """What a plan of equal steps costs.

    Epsilon at a delta, delta at an epsilon, or with both whether it stays within them.
    """
    if delta is None and epsilon is None:
        raise InvalidValue("give --delta for epsilon, --epsilon for delta, or both for a check; got neither")
    plan = _plan(sigma, rate, steps, adjacency, sampler, records)
    if delta is not None:
        validate.probability(**{"--delta": delta})
    if epsilon is not None:
        validate.non_negative(**{"--epsilon": epsilon})
    found = curve(plan, accountant)
    if delta is None:
        assert epsilon is not None
        delta = found.delta(epsilon)
        return _report(plan, accountant, found, epsilon, delta, computed="delta", as_json=as_json)
    at_delta = found.epsilon(delta)
    if epsilon is not None and epsilon < at_delta and found.delta(epsilon) <= delta:
        at_delta = epsilon  # the two searches end within rounding of each other
    return _report(plan, accountant, found, at_delta, delta, limit=epsilon, as_json=as_json)


def calibrate(
    epsilon: Annotated[float, option(number, "The budget's epsilon.")],
    delta: Annotated[float, option(number, "The budget's delta.")],
    rate: Rate,
    steps: Annotated[int | None, option(whole, "Find the least noise for so many steps.")] = None,
    sigma: Annotated[float | None, option(number, "Find the most steps for this noise.")] = None,
    adjacency: Relation = Adjacency.ADD_REMOVE,
    sampler: Draw = Sampler.POISSON,
    records: Records = None,
    as_json: AsJson = False,
) -> int:
    """The least noise, or the most steps, within a budget."""
    from farthing.accounting import calibrate as search

    if (steps is None) == (sigma is None):
        given = "neither" if steps is None else f"--steps {steps} and --sigma {sigma:g}"
        raise InvalidValue(f"give either --steps (for noise) or --sigma (for steps), got {given}")
    validate.positive(**{"--epsilon": epsilon})
    validate.probability(**{"--delta": delta})
    budget = Budget(epsilon, delta, adjacency)
    plan = _plan(
        1.0 if sigma is None else sigma, rate, 1 if steps is None else steps, adjacency, sampler, records
    )
    if sigma is None:
        try:
            least = search.noise(lambda noise: replace(plan, sigma=noise).event, budget)
        except InvalidValue as error:  # the values themselves were checked above
            raise BudgetSpent(str(error)) from None
        plan = replace(plan, sigma=least)
    else:
        most = search.steps(plan.step, budget)
        if most == 0:
            raise BudgetSpent(f"not even {plan} fits {budget}: add noise or draw fewer")
        plan = replace(plan, steps=most)
    found = curve(plan, Accountant.PLD)
    achieved = min(found.epsilon(delta), epsilon)  # the search has certified the budget itself
    return _report(plan, Accountant.PLD, found, achieved, delta, limit=epsilon, as_json=as_json)


def _plan(
    sigma: float, rate: float, steps: int, adjacency: Adjacency, sampler: Sampler, records: int | None
) -> Plan:
    validate.positive(**{"--sigma": sigma})
    validate.rate(**{"--rate": rate})
    validate.count(**{"--steps": steps})
    if sampler is Sampler.FIXED and records is None:
        raise InvalidValue("--sampler fixed needs --records, the number of records drawn from")
    if sampler is Sampler.POISSON and records is not None:
        raise InvalidValue(f"--records is for --sampler fixed only, got {records} with --sampler poisson")
    if records is not None:
        validate.count(**{"--records": records})
    return Plan(sigma, rate, steps, adjacency, records)


def _report(
    plan: Plan,
    accountant: Accountant,
    found: Curve,
    epsilon: float,
    delta: float,
    *,
    computed: str = "epsilon",
    limit: float | None = None,
    as_json: bool,
) -> int:
    """Prints what holds of a plan and returns the exit code."""
    said = math.isfinite(epsilon) and delta < 1
    proven = said and found.proven(delta)
    notes = [found.note] if found.note else []
    if not said:
        notes.append("nothing is promised: epsilon is infinite or delta is 1")
    fields: dict[str, Any] = {
        "epsilon": epsilon if math.isfinite(epsilon) else None,
        "delta": delta,
        "sigma": plan.sigma,
        "rate": plan.drawn,
        "steps": plan.steps,
        "sampler": str(Sampler.POISSON if plan.records is None else Sampler.FIXED),
        **({} if plan.records is None else {"size": plan.size, "records": plan.records}),
        "accountant": str(accountant),
        "adjacency": str(plan.adjacency),
        "unit": str(Unit.RECORD),
        "observer": str(found.observer),
        "theorem": found.theorem,
        "valid": proven,
        **({} if limit is None else {"limit": limit, "within": proven and epsilon <= limit}),
        "note": "; ".join(notes),
    }
    if as_json:
        emit_json(fields)
    else:
        fields["valid"] = "yes" if proven else "no: this is not a guarantee"
        if limit is not None:
            fields["within"] = "yes" if fields["within"] else "no"
        fields[computed] = "none" if fields[computed] is None else rounded_up(fields[computed])
        emit(aligned(fields))
    if not proven:
        return say(f"{accountant} gives no guarantee here ({fields['note']})", FAILED)
    if limit is not None and epsilon > limit:
        return say(f"epsilon {rounded_up(epsilon)} of {plan} is above {limit:g}", SPENT)
    return 0
