"""State the guarantee of every level of budget, for ledgers whose units have personal budgets.

A ledger of personal budgets (`farthing.accounting.personal.PersonalFilter`) has one journal. For promises it
counts answers once for all levels, since every answer is charged to every level at that level's price; the
filter has one total per level. The guarantee of a level follows from the rows alone, so a verifier can
recompute it (`farthing.ledger.verifier`).

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

from collections.abc import Callable
from typing import Any

from farthing import validate
from farthing.accounting import personal
from farthing.accounting.filters import BasicFilter, Filter, GdpFilter
from farthing.accounting.menu import MenuFilter
from farthing.accounting.odometer import STOPPING
from farthing.accounting.personal import PersonalFilter
from farthing.accounting.tuning import TIGHT
from farthing.budget import Budget, Guarantee
from farthing.errors import InvalidValue, Unsupported
from farthing.ledger.books import Books, composed


def guarantees(books: Books) -> dict[float, Guarantee]:
    """Return the guarantee for units of each level at any stopping time, by the level's ε."""
    rule, (plan, _, _) = books.rule, books.parts()
    if not isinstance(rule, PersonalFilter):
        return {rule.budget.epsilon: books.guarantee()}
    found = personal.epsilons(composed(plan), rule) if plan else rule.epsilons
    return _said(books, rule, tuple(found), "pld" if plan else rule.name)


def spent(books: Books) -> dict[float, Guarantee]:
    """Return the charges so far for units of each level, by the level's ε."""
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
    """Return the records, after a check that their levels are the ledger's; note the sizes of the levels."""
    if hasattr(records, "__array__"):  # numpy's own `take` indexes single numbers, not rows
        raise InvalidValue("records must be ft.Rows(array), one row per record, not the array itself")
    validate.offers("take", "__len__", records=records)
    levels = getattr(records, "epsilons", None)
    if levels is None:
        return records
    own = books.rule.epsilons if isinstance(books.rule, PersonalFilter) else (books.rule.budget.epsilon,)
    if levels != own:
        raise InvalidValue(
            f"the records have epsilons {_few(levels)}, but the ledger has {_few(own)}: create the ledger "
            "with Ledger(people.budget(delta), filter=people), or use the ledger's epsilons"
        )
    books.note(records.words())
    return records


def rule_for(budget: Budget, filter: Callable[[Budget], Filter] | None) -> Filter:
    """Return the filter of a ledger; it must have the ledger's budget, by which a part is charged."""
    if not isinstance(budget, Budget):
        raise InvalidValue(f"budget must be ft.Budget(epsilon, delta), got {budget!r}")
    if filter is not None and not callable(filter):
        raise InvalidValue(
            f"filter must be a class such as GdpFilter, or a function of a budget, got {filter!r}"
        )
    rule = (filter or (GdpFilter if budget.delta > 0 else BasicFilter))(budget)
    if rule.budget != budget:
        raise InvalidValue(
            f"the filter has budget {rule.budget}, the ledger {budget}: pass the filter's class"
        )
    return rule


def refuse_parts(rule: Filter) -> None:
    """Refuse to divide a budget whose filter has no price for a part."""
    if isinstance(rule, MenuFilter | PersonalFilter):
        instead = "put its events on the menu" if isinstance(rule, MenuFilter) else "promise its answers"
        raise Unsupported(
            f"a ledger with a {rule.name} filter cannot be divided into parts: {instead}, or create a ledger "
            "with another filter"
        )


def _few(levels: tuple[float, ...]) -> str:
    named = [f"{level:g}" for level in levels]
    return ", ".join(named if len(named) <= 4 else [*named[:2], "…", named[-1]])
