"""Provide the commands about plans of equal steps: ``farthing account`` and ``calibrate``."""

import math
from dataclasses import asdict, replace
from enum import StrEnum
from typing import Annotated, Any

import typer

from farthing import validate
from farthing.accounting.accountants import Accountant, EqualSteps, PrivacyCurve
from farthing.budget import Adjacency, Budget, Unit
from farthing.cli.ledger_output import aligned, nested, rounded_up
from farthing.cli.options import FAILED, SPENT, AsJson, Relation, emit, emit_json, number, option, say, whole
from farthing.errors import BudgetSpent, InvalidValue


class Sampling(StrEnum):
    """The ways in which the records of a step are drawn."""

    POISSON = "poisson"
    FIXED = "fixed"


_NOISE = "Standard deviation of the noise, divided by the clipping norm."
_RATE = "The probability that a record is in the sample of a step; 1 for all records."
_ACCOUNTANTS = [row.value for row in Accountant.of_steps()]
_RECORDS = "The number of records, for --sampler fixed: sampling rate x records are drawn."


def _named(text: str) -> str:
    if text not in _ACCOUNTANTS:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(_ACCOUNTANTS)}.")
    return text


_ACCOUNTANT = typer.Option(
    parser=_named, metavar="|".join(_ACCOUNTANTS), help="The accountant that adds up the steps."
)
Rate = Annotated[float, option(number, _RATE)]
Records = Annotated[int | None, option(whole, _RECORDS)]
Draw = Annotated[
    Sampling,
    typer.Option(help="poisson draws each record independently, fixed draws a fixed number of records."),
]


def account(
    noise_multiplier: Annotated[float, option(number, _NOISE)],
    sampling_rate: Rate,
    steps: Annotated[int, option(whole, "The number of steps.")],
    delta: Annotated[float | None, option(number, "Print epsilon at this delta.")] = None,
    epsilon: Annotated[
        float | None,
        option(number, "Print delta at this epsilon; with --delta, check whether epsilon is at most this."),
    ] = None,
    accountant: Annotated[str, _ACCOUNTANT] = Accountant.PLD.value,
    adjacency: Relation = Adjacency.ADD_REMOVE,
    sampler: Draw = Sampling.POISSON,
    records: Records = None,
    as_json: AsJson = False,
) -> int:
    """Compute the privacy cost of a plan of equal steps.

    With --delta it prints epsilon, with --epsilon it prints delta, and with both it checks the plan.
    """
    if delta is None and epsilon is None:
        raise InvalidValue(
            "give --delta to compute epsilon, --epsilon to compute delta, or both to check the plan; got "
            "neither"
        )
    plan = _plan(noise_multiplier, sampling_rate, steps, adjacency, sampler, records)
    if delta is not None:
        validate.probability(**{"--delta": delta})
    if epsilon is not None:
        validate.non_negative(**{"--epsilon": epsilon})
    by = validate.choice(Accountant, accountant=accountant)
    found = by.curve(plan)
    if delta is None:
        assert epsilon is not None
        delta = found.delta(epsilon)
        return _report(plan, by, found, epsilon, delta, computed="delta", as_json=as_json)
    at_delta = found.epsilon(delta)
    if epsilon is not None and epsilon < at_delta and found.delta(epsilon) <= delta:
        at_delta = epsilon  # the two searches end within rounding of each other
    return _report(plan, by, found, at_delta, delta, limit=epsilon, as_json=as_json)


def calibrate(
    epsilon: Annotated[float, option(number, "Epsilon of the budget.")],
    delta: Annotated[float, option(number, "Delta of the budget.")],
    sampling_rate: Rate,
    steps: Annotated[int | None, option(whole, "Find the least noise for this number of steps.")] = None,
    noise_multiplier: Annotated[
        float | None, option(number, "Find the most steps for this noise multiplier.")
    ] = None,
    menu: Annotated[
        str | None,
        typer.Option(
            metavar="NOISES",
            help="Price a menu: noise multipliers, separated by commas, to choose from adaptively.",
        ),
    ] = None,
    adjacency: Relation = Adjacency.ADD_REMOVE,
    sampler: Draw = Sampling.POISSON,
    records: Records = None,
    as_json: AsJson = False,
) -> int:
    """Find the least noise or the most steps for a budget.

    Give --steps to find the noise, --noise-multiplier to find the steps, or --menu to price a menu.
    """
    from farthing.accounting import calibrate as search

    if menu is not None:
        if steps is not None or noise_multiplier is not None:
            raise InvalidValue(
                "--menu finds the steps of every noise multiplier: leave out --steps and --noise-multiplier"
            )
        plans = [_plan(noise, sampling_rate, 1, adjacency, sampler, records) for noise in _noises(menu)]
        validate.positive(**{"--epsilon": epsilon})
        validate.probability(**{"--delta": delta})
        return _report_menu(plans, Budget(epsilon, delta, adjacency), as_json)
    if (steps is None) == (noise_multiplier is None):
        both = f"--steps {steps} and --noise-multiplier {noise_multiplier}"
        given = "none" if steps is None else both
        raise InvalidValue(
            f"give one of --steps (to find noise), --noise-multiplier (to find steps) and --menu, got {given}"
        )
    validate.positive(**{"--epsilon": epsilon})
    validate.probability(**{"--delta": delta})
    budget = Budget(epsilon, delta, adjacency)
    plan = _plan(
        1.0 if noise_multiplier is None else noise_multiplier,
        sampling_rate,
        1 if steps is None else steps,
        adjacency,
        sampler,
        records,
    )
    if noise_multiplier is None:
        try:
            least = search.noise(lambda noise: replace(plan, noise_multiplier=noise).event, budget)
        except InvalidValue as error:  # the values themselves were checked above
            raise BudgetSpent(str(error)) from None
        plan = replace(plan, noise_multiplier=least)
    else:
        most = search.steps(plan.step, budget)
        if most == 0:
            raise BudgetSpent(f"{plan} does not fit {budget}: use more noise or a smaller sampling rate")
        plan = replace(plan, steps=most)
    found = Accountant.PLD.curve(plan)
    achieved = min(found.epsilon(delta), epsilon)  # the search has certified the budget itself
    return _report(plan, Accountant.PLD, found, achieved, delta, limit=epsilon, as_json=as_json)


def _noises(menu: str) -> list[float]:
    try:
        return [float(noise) for noise in menu.split(",")]
    except ValueError:
        raise InvalidValue(f"--menu must be numbers separated by commas, got {menu!r}") from None


def _report_menu(plans: list[EqualSteps], budget: Budget, as_json: bool) -> int:
    """Print what each entry of a menu gets, beside a promise of it."""
    from farthing.accounting import calibrate as search
    from farthing.accounting.menu import Menu

    rule = Menu(plan.step for plan in plans)(budget)
    entries = [
        {
            "noise_multiplier": plan.noise_multiplier,
            "steps": rule.most(plan.step),
            "promise": search.steps(plan.step, budget),
            "block": block,
            "price": price,
        }
        for plan, block, price in zip(plans, rule.steps, rule.prices, strict=True)
    ]
    fields = {"sampling_rate": plans[0].drawn, "units": rule.units, "theorem": rule.theorem}
    if as_json:
        emit_json({"budget": asdict(budget), **fields, "entries": entries})
        return 0
    emit(aligned({"budget": str(budget), **fields}))
    for entry in entries:
        steps, promise = entry["steps"], entry["promise"]
        emit(
            f"noise multiplier {entry['noise_multiplier']:g}: at most {steps:,} steps "
            f"({steps / promise:.1%} of the "
            f"{promise:,} of a promise), charged in blocks of {entry['block']:,} steps for "
            f"{entry['price']} of {rule.units} units"
        )
    return 0


def _plan(
    noise_multiplier: float,
    sampling_rate: float,
    steps: int,
    adjacency: Adjacency,
    sampler: Sampling,
    records: int | None,
) -> EqualSteps:
    validate.positive(**{"--noise-multiplier": noise_multiplier})
    validate.rate(**{"--sampling-rate": sampling_rate})
    validate.count(**{"--steps": steps})
    if sampler is Sampling.FIXED and records is None:
        raise InvalidValue("--sampler fixed needs --records, the number of all records")
    if sampler is Sampling.POISSON and records is not None:
        raise InvalidValue(f"--records is for --sampler fixed only, got {records} with --sampler poisson")
    if records is not None:
        validate.count(**{"--records": records})
    return EqualSteps(noise_multiplier, sampling_rate, steps, adjacency, records)


def _report(
    plan: EqualSteps,
    accountant: Accountant,
    found: PrivacyCurve,
    epsilon: float,
    delta: float,
    *,
    computed: str = "epsilon",
    limit: float | None = None,
    as_json: bool,
) -> int:
    """Print the guarantee of a plan and return the exit code."""
    said = math.isfinite(epsilon) and delta < 1
    proven = said and found.proven(delta)
    notes = [found.note] if found.note else []
    if not said:
        notes.append("no guarantee: epsilon is infinite or delta is 1")
    fields: dict[str, Any] = {
        "epsilon": epsilon if math.isfinite(epsilon) else None,
        "delta": delta,
        "noise_multiplier": plan.noise_multiplier,
        "sampling_rate": plan.drawn,
        "steps": plan.steps,
        "sampler": str(Sampling.POISSON if plan.records is None else Sampling.FIXED),
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
        emit_json(nested(fields))
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
