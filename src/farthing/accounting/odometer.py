"""Say what was spent where the answers decided when to stop: an odometer, by a ladder of filters.

The ε of so many answers holds if their number was fixed ahead. Somebody who looks at every answer, and stops
where it shows most, can make more of them than that ε says. An odometer prints a number that stands at such a
stop too.

**Definition.** An odometer prints a number for every outcome of an interaction. It is valid at δ if, however
the next question and the stop follow from the answers, for every e and every set S of outcomes for which it
prints at most e, P(S) <= e^e P'(S) + δ for neighbouring data sets: whoever acts on what is printed has what
is printed. (Rogers, Roth, Ullman & Vadhan 2016 ask that the privacy loss be below what is printed but for δ,
which implies it.)

**Theorem.** Take levels e₁ < … < e_J below the budget's ε, chosen ahead, and for each a filter of
(e_j, δ/J). Print the lowest level whose filter the totals at the stop fit; where none does, the budget's ε.
That is valid at δ, under the adjacency and for the unit of the filters.

*Proof.* Totals do not fall, so an outcome for which e_j is printed is one of the interaction that the filter
of level j would have let through to its end, and as likely in it. Hence P(S, e_j printed) <=
e^(e_j) P'(S, e_j printed) + δ/J. Let S be outcomes with at most e < ε printed; add up over the levels up to
e. With e >= ε, the budget's own filter says it of every S at once. ∎

The same holds of a plan, with parts of it in place of filters: level j is the first f_j of every promise, at
its tight ε for δ/J. Under basic composition no ladder is needed. An (ε, δ)-DP answer is, but for δ, one whose
likelihood ratio is at most e^ε (Kairouz, Oh & Viswanath 2015); so is the sum of all, whenever it ends.

>>> from farthing.accounting.filters import GdpFilter
>>> from farthing.queries.events import GaussianEvent
>>> rule = GdpFilter(Budget(1.0, 1e-5))
>>> total = rule.add(rule.start(), GaussianEvent(10.0), 2)
>>> round(rule.epsilon(total), 3), round(epsilon(rule, total), 3)
(0.497, 0.63)
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from farthing.accounting import tuning
from farthing.accounting.filters import BasicFilter, Filter, GdpFilter, RdpFilter, Totals, ZcdpFilter
from farthing.accounting.menu import MenuFilter
from farthing.budget import Budget
from farthing.queries.events import ComposedEvent, Event, RepeatedEvent

THEOREM = "a ladder of filters, farthing.accounting.odometer"
STOPPING = "valid only if the stopping time was fixed in advance; the ledger's guarantee holds in any case"
_LEVELS = tuple(2.0 ** (-k / 6) for k in range(30, 0, -1))  # of ε: from a thirty-second to nine tenths
_FEW = tuple(2.0 ** (-k / 3) for k in range(9, 0, -1))  # of menus, which take longer to price


def epsilon(rule: Filter, total: Totals) -> float | None:
    """Return ε of totals at a stop that the answers may have decided; None where nothing better is known.

    Parameters
    ----------
    rule : Filter
        The privacy filter: basic, GDP, zCDP, Rényi or a menu's.
    total : list of float
        Its totals.

    Returns
    -------
    float or None
        Never above the budget's ε.
    """
    if isinstance(rule, BasicFilter):
        return rule.epsilon(total)
    if isinstance(rule, ZcdpFilter) and rule.approximate:
        return None
    if not isinstance(rule, GdpFilter | ZcdpFilter | RdpFilter | MenuFilter):
        return None
    if not any(total):
        return 0.0
    levels, whole = _FEW if isinstance(rule, MenuFilter) else _LEVELS, rule.budget
    place = bisect_left(
        levels,
        True,
        key=lambda part: _fits(rule, whole.with_(part * whole.epsilon, whole.delta / len(levels)), total),
    )
    return whole.epsilon * (levels[place] if place < len(levels) else 1.0)


def _fits(rule: Any, level: Budget, total: Totals) -> bool:
    """Whether totals fit a filter of this kind for the budget of a level."""
    if isinstance(rule, MenuFilter):
        return rule.fits_within(level, total)
    return bool(replace(rule, budget=level).fits(total))


def planned(plan: Sequence[tuple[Event, int]], counts: Sequence[int], budget: Budget) -> float:
    """Return ε of the first answers of a plan, where the answers may have decided how many there were.

    Parameters
    ----------
    plan : sequence of (Event, int)
        What was promised, and how often.
    counts : sequence of int
        How many of each were asked.
    budget : Budget
        The budget, for its δ and adjacency.

    Returns
    -------
    float
        Never above that of the whole plan.
    """
    whole = tuning.epsilon(_composed(plan), budget.delta, budget.adjacency)
    for part in _LEVELS if any(counts) else ():
        level = [(event, math.ceil(part * times)) for event, times in plan]
        if all(count <= most for count, (_, most) in zip(counts, level, strict=True)):
            share = budget.delta / len(_LEVELS)
            return min(whole, tuning.epsilon(_composed(level), share, budget.adjacency))
    return whole if any(counts) else 0.0


def _composed(plan: Sequence[tuple[Event, int]]) -> Event:
    return ComposedEvent(tuple(RepeatedEvent(event, times) for event, times in plan))


def said(rule: Filter, plan: Sequence[tuple[Event, int]], counts: Sequence[int], total: Totals) -> str:
    """Return, in words, what holds where the answers decided when to stop."""
    if not plan and isinstance(rule, BasicFilter):
        return f"valid also if the stopping time depended on the answers ({rule.theorem})"
    found = planned(plan, counts, rule.budget) if plan else epsilon(rule, total)
    if found is None:
        return STOPPING
    return (
        f"{STOPPING.partition(';')[0]}; if it depended on the answers, epsilon {found:.6g} holds ({THEOREM})"
    )
