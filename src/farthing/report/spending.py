"""The numbers behind two pictures: what was spent after so many answers, and ε at every δ.

Both follow the accountant of the guarantee: certified tight accounting for what was promised, the filter's
own totals otherwise. Where a theorem covers one (ε, δ) only, there is no curve.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from farthing.accounting import gaussian, pld, zcdp
from farthing.accounting.filters import GdpFilter, Totals, ZcdpFilter
from farthing.queries.events import ComposedEvent, Event, RepeatedEvent
from farthing.report.subject import Charge, Subject

Points = list[tuple[float, float]]

_POINTS = 32  # of either picture: enough to see the shape, quick enough not to be noticed
_FEW = 64  # answers up to which each has a point of its own
_TIGHT = "pld"


def spent(subject: Subject) -> Points:
    """(answers, ε of them all) along the run; empty where nothing is promised."""
    total = sum(charge.count for charge in subject.charges)
    if not subject.guaranteed or not total:
        return []
    price = _tight(subject) if _promised(subject) else _filtered(subject)
    points = [(0.0, 0.0)]
    count = total if total <= _FEW else _POINTS
    cuts = [math.ceil(total * step / count) for step in range(1, count + 1)]
    for answers, counted in zip(cuts, _counted(subject.charges, cuts), strict=True):
        epsilon = min(price(counted), subject.guarantee.epsilon)
        points.append((float(answers), max(points[-1][1], epsilon)))
    return points


def _promised(subject: Subject) -> bool:
    return bool(subject.plan) or subject.guarantee.accountant == _TIGHT


def _counted(charges: Sequence[Charge], cuts: Sequence[int]) -> "Iterator[Counter[Event]]":
    """How often each event is among the first so many answers, for every cut."""
    counted: Counter[Event] = Counter()
    places, at, passed = iter(cuts), 0, 0
    cut = next(places, None)
    for charge in charges:
        passed += charge.count
        while cut is not None and cut <= passed:
            counted[charge.event] += cut - at
            at, cut = cut, next(places, None)
            yield counted
        counted[charge.event] += passed - at
        at = passed


def _all(charges: Sequence[Charge]) -> "Counter[Event]":
    counted: Counter[Event] = Counter()
    for charge in charges:
        counted[charge.event] += charge.count
    return counted


def _composed(counted: "Counter[Event]") -> Event:
    return ComposedEvent(tuple(RepeatedEvent(event, count) for event, count in counted.items()))


def _tight(subject: Subject) -> Callable[["Counter[Event]"], float]:
    said = subject.guarantee
    return lambda counted: pld.epsilon(_composed(counted), said.delta, said.adjacency)


def _filtered(subject: Subject) -> Callable[["Counter[Event]"], float]:
    rule, costs = subject.rule, dict[Event, Totals]()

    def price(counted: "Counter[Event]") -> float:
        totals = rule.start()
        for event, count in counted.items():
            if event not in costs:
                costs[event] = rule.add(rule.start(), event)
            totals = [total + count * cost for total, cost in zip(totals, costs[event], strict=True)]
        return rule.epsilon(totals)

    return price


def curve(subject: Subject) -> Points:
    """(ε, δ) that hold together of all that may be released; empty where only one pair is proven."""
    said = subject.guarantee
    if not subject.guaranteed or not 0 < said.delta < 1:
        return []
    event, rule = None, subject.rule
    if _promised(subject):
        event = _composed(Counter(dict(subject.plan)) or _all(subject.charges))
    elif not isinstance(rule, GdpFilter | ZcdpFilter):
        return []
    deepest = min(1e-10, said.delta / 1e3)
    steps = [deepest * (1e-2 / deepest) ** (step / (_POINTS - 1)) for step in range(_POINTS)]
    points = []
    for delta in sorted({*steps, said.delta}, reverse=True):
        if event is not None:
            epsilon = pld.epsilon(event, delta, said.adjacency)
        elif isinstance(rule, GdpFilter):
            epsilon = gaussian.epsilon(rule.mu, delta)
        elif isinstance(rule, ZcdpFilter) and delta > rule.approximate:
            epsilon = zcdp.epsilon(rule.rho, delta, rule.approximate)
        else:
            continue
        if math.isfinite(epsilon):
            points.append((epsilon, delta))
    return points
