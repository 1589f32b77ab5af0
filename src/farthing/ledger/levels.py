"""The guarantee of every level of budget, for ledgers whose units have budgets of their own.

A ledger of personal budgets (`farthing.accounting.personal.PersonalFilter`) has one journal and one balance a
level: of promises, how many answers were taken, which is one number for all levels, since every answer is
charged to every level at its own price; of the filter, one total a level. What holds for a level follows from
the rows alone, so a verifier recomputes it (`farthing.ledger.verifier`).

>>> from farthing.accounting.personal import PersonalBudgets, plan_rates
>>> from farthing.ledger.ledger import Ledger
>>> from farthing.queries.mechanisms import Gaussian
>>> people = PersonalBudgets([1.0] * 500 + [3.0] * 500)
>>> ledger = Ledger(people.budget(1e-5), filter=people)
>>> plan = plan_rates(people, 1e-5, steps=100, sampling_rate=0.1)
>>> countdown = ledger.promise(plan.sampler.amplify(Gaussian(plan.noise_multiplier)), plan.steps)
>>> {level: round(said.epsilon, 4) for level, said in ledger.guarantees.items()}
{1.0: 1.0, 3.0: 3.0}
"""

from typing import Any

from farthing.accounting import personal
from farthing.accounting.filters import Filter
from farthing.accounting.menu import MenuFilter
from farthing.accounting.odometer import STOPPING
from farthing.accounting.personal import PersonalFilter
from farthing.accounting.tuning import TIGHT
from farthing.budget import Budget, Guarantee
from farthing.errors import InvalidValue, Unsupported
from farthing.ledger.books import Books, composed


def guarantees(books: Books) -> dict[float, Guarantee]:
    """Return what holds for units of each level whenever the asking ends, by the level's ε."""
    rule, (plan, _, _) = books.rule, books.parts()
    if not isinstance(rule, PersonalFilter):
        return {rule.budget.epsilon: books.guarantee()}
    found = personal.epsilons(composed(plan), rule) if plan else rule.epsilons
    return _said(books, rule, tuple(found), "pld" if plan else rule.name)


def spent(books: Books) -> dict[float, Guarantee]:
    """Return what was charged to units of each level until now, by the level's ε."""
    rule, (plan, counts, totals) = books.rule, books.parts()
    if not isinstance(rule, PersonalFilter):
        return {rule.budget.epsilon: books.spent()}
    if not plan:
        return _said(books, rule, tuple(rule.each(totals)), rule.name, STOPPING)
    done = composed([(event, count) for (event, _), count in zip(plan, counts, strict=True) if count])
    return _said(books, rule, tuple(personal.epsilons(done, rule)), "pld", STOPPING)


def _said(
    books: Books, rule: PersonalFilter, found: tuple[float, ...], accountant: str, note: str = ""
) -> dict[float, Guarantee]:
    theorem = rule.theorem if accountant == rule.name else f"{rule.theorem}; {TIGHT}"
    pairs = zip(rule.epsilons, found, strict=True)
    return {level: books.statement(min(own, level), accountant, theorem, note) for level, own in pairs}


def bound(books: Books, records: Any) -> Any:
    """Return records whose levels, if they have any, are those of the ledger; their sizes are noted."""
    levels = getattr(records, "epsilons", None)
    if levels is None:
        return records
    own = books.rule.epsilons if isinstance(books.rule, PersonalFilter) else (books.rule.budget.epsilon,)
    if levels != own:
        raise InvalidValue(
            f"the records have budgets of epsilon {_few(levels)}, the ledger of {_few(own)}: make it with "
            "Ledger(people.budget(delta), filter=people), or give PersonalBudgets the ledger's epsilons"
        )
    books.note(records.words())
    return records


def checked(rule: Filter, budget: Budget) -> Filter:
    """Return a filter of this budget, refuse others: a part is charged by its budget, spent by its filter."""
    if rule.budget != budget:
        raise InvalidValue(f"the filter is one of {rule.budget}, the ledger of {budget}: give its class")
    return rule


def refuse_parts(rule: Filter) -> None:
    """Refuse to hand on a part of a budget that has no price for it."""
    if isinstance(rule, MenuFilter | PersonalFilter):
        instead = "put its events on the menu" if isinstance(rule, MenuFilter) else "promise its answers"
        raise Unsupported(
            f"a ledger with a {rule.name} filter has no price for a part of its budget: {instead}, or begin "
            "a ledger with another filter"
        )


def _few(levels: tuple[float, ...]) -> str:
    named = [f"{level:g}" for level in levels]
    return ", ".join(named if len(named) <= 4 else [*named[:2], "…", named[-1]])
