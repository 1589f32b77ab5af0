"""Bound the spent budget where the answers decided when to stop: an odometer, by a ladder of filters.

The ε of a number of answers holds if their number was fixed in advance. An analyst who sees every answer and
stops when they reveal most may learn more than that ε says. An odometer reports a number that is valid at
such a stopping time too.

**Definition.** An odometer reports a number for every outcome of an interaction. It is valid at δ if, for
every way in which the next query and the stop depend on the answers, every e and every set S of outcomes for
which it reports at most e, P(S) <= e^e P'(S) + δ for neighbouring data sets. (Rogers, Roth, Ullman & Vadhan
2016 require that the privacy loss is below the reported number except with probability δ, which implies it.)

**Theorem.** Take levels e₁ < … < e_J below the budget's ε, fixed in advance, and for each a filter of (e_j,
δ/J). Report the lowest level whose filter the totals at the stop fit, or the budget's ε if none does. This is
valid at δ, under the adjacency and for the unit of the filters.

*Proof.* Totals never decrease, so an outcome with report e_j is an outcome of the interaction that the filter
of level j would have allowed to its end, with the same probability. Hence P(S, report e_j) <= e^(e_j) P'(S,
report e_j) + δ/J. For a set S of outcomes with reports of at most e < ε, add this up over the levels up to e.
For e >= ε the budget's own filter gives the inequality for every S. ∎

The same holds for a plan, with parts of it in place of filters: level j is the first fraction f_j of every
promise, at its tight ε for δ/J. Basic composition needs no ladder: except with probability δ, an (ε, δ)-DP
answer has a likelihood ratio of at most e^ε (Kairouz, Oh & Viswanath 2015), and so does the sum of all at any
stopping time.

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
_LEVELS = tuple(2.0 ** (-k / 6) for k in range(30, 0, -1))  # fractions of ε, from 1/32 to 0.89
_FEW = tuple(2.0 ** (-k / 3) for k in range(9, 0, -1))  # fewer for menus, which take longer to price


def epsilon(rule: Filter, total: Totals) -> float | None:
    """Return ε of totals at a stopping time that may depend on the answers; None if no bound is known.

    Parameters
    ----------
    rule : Filter
        The privacy filter: basic, GDP, zCDP, Rényi or a menu's.
    total : list of float
        Its totals at the stop.

    Returns
    -------
    float or None
        At most the budget's ε.
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
    """Return whether totals fit a filter of this kind for the budget of a level."""
    if isinstance(rule, MenuFilter):
        return rule.fits_within(level, total)
    return bool(replace(rule, budget=level).fits(total))


def planned(plan: Sequence[tuple[Event, int]], counts: Sequence[int], budget: Budget) -> float:
    """Return ε of the first answers of a plan, whose number may depend on the answers.

    Parameters
    ----------
    plan : sequence of (Event, int)
        The promised events with their counts.
    counts : sequence of int
        The number of answers of each event.
    budget : Budget
        The budget, for its δ and adjacency.

    Returns
    -------
    float
        At most that of the whole plan.
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
    """Return a sentence on the guarantee if the stopping time depended on the answers."""
    if not plan and isinstance(rule, BasicFilter):
        return f"valid also if the stopping time depended on the answers ({rule.theorem})"
    found = planned(plan, counts, rule.budget) if plan else epsilon(rule, total)
    if found is None:
        return STOPPING
    return (
        f"{STOPPING.partition(';')[0]}; if it depended on the answers, epsilon {found:.6g} holds ({THEOREM})"
    )
