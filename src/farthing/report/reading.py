"""Read the JSON output of other commands, for the subject of a report.

Only the fields that a page shows are read, and all of them are checked: these files may come from anywhere.

`spent` and `curve` compute the numbers of two pictures: ε after a number of answers, and ε at every δ. Both
follow the accountant of the guarantee: certified tight accounting for promised plans, the filter's totals
otherwise. If a theorem proves a single (ε, δ) only, there is no curve.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from farthing.accounting import gaussian, pld, zcdp
from farthing.accounting.filters import GdpFilter, Totals, ZcdpFilter
from farthing.budget import FORMAT, Adjacency, Budget, Guarantee, Observer, Unit
from farthing.errors import InvalidValue, LedgerLocked
from farthing.ledger.books import FLOATS, SEEDED
from farthing.queries.events import ComposedEvent, Event, RepeatedEvent
from farthing.report.subject import Charge, ClientGroup, Declared, FederatedRun, Score, Subject
from farthing.validate import read_json

if TYPE_CHECKING:
    from farthing.audit.auditing import Verdict

T = TypeVar("T")

HELD_OUT = "on held-out records, with noise: covered by the guarantee, by parallel composition"


@dataclass(frozen=True, slots=True)
class Told:
    """The facts that a ``privacy.json`` adds to those of the ledger."""

    method: str = ""
    steps: int | None = None
    records: int | None = None
    features: int | None = None
    partial: bool = False
    scores: tuple[Score, ...] = ()
    released: tuple[str, ...] = ()
    declared: Declared | None = None
    head: str | None = None  # the newest row of its ledger when it was written


def read(option: str, file: Path, take: Callable[[dict[str, Any]], T]) -> T:
    """Parse the JSON object in ``file``; an error names the option and the file."""
    try:
        found = read_json(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__}")
        if found.get("format", FORMAT) == FORMAT:
            return take(found)
    except OSError as error:
        raise InvalidValue(f"{option} {str(file)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidValue(f"{option} {str(file)!r} is not a JSON file: it is not UTF-8 text") from None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else f"{error}"[:200]
        raise InvalidValue(
            f"{option} must be the JSON object that farthing printed, {str(file)!r} is not one ({reason})"
        ) from None
    raise InvalidValue(other_format(f"{option} {str(file)!r}", found["format"]))


def other_format(what: str, found: Any) -> str:
    """Return why an object of another format, whose fields may mean something else, is refused."""
    return f"{what} has format {found!r}, but this version of farthing reads format {FORMAT}"


def told(said: dict[str, Any]) -> Told:
    """Read the privacy.json of ``farthing train``, or its ``--json`` output."""
    method = str(said["method"])
    settings = said.get("settings", {}).items()
    return Told(
        ", ".join((method, *(f"{name}={value}" for name, value in settings))),
        count(said["steps"]),
        count(said["records"]),
        count(said["features"]) if "features" in said else None,
        said.get("partial", False) is True,
        tuple(scored(said, method)[1]),
        tuple(_released(said)),
        Declared.of(said["public"], said) if "public" in said else None,
        said.get("ledger_head"),
    )


def _released(said: dict[str, Any]) -> Iterator[str]:
    """Yield the releases of a training that the guarantee does not cover."""
    test = said.get("test")
    if test and test["note"] != HELD_OUT:
        yield f"Figures on the test table {test['table']}: {test['note']}."
    if said.get("earlier_ledgers"):
        yield earlier(said["earlier_ledgers"])


def earlier(ledgers: Sequence[str]) -> str:
    """Return the sentence about ledgers of earlier trainings in the same folder."""
    return (
        f"Earlier trainings in the same folder wrote {', '.join(map(str, ledgers))}. If they used records "
        "of the same people, the costs of all of them add up"
    )


def verified(said: dict[str, Any]) -> str:
    """Return the independent verifier's finding as a sentence; raise LedgerLocked for a damaged ledger."""
    verdict = str(said["verdict"])
    unsure = any(word in verdict for word in ("not recomputed", SEEDED, FLOATS))  # the ledger is intact
    if not said["ok"] and not unsure:
        raise LedgerLocked(f"{said['file']}: {verdict}")
    if not said["ok"]:
        return f"The independent verifier did not recompute the cost: {verdict}"
    low, high = said.get("plan_between") or said.get("spent_between") or (None, None)
    if low is None or high is None:
        return "Hash chain, head and answers are consistent."
    first, last = f"{low:.5g}", f"{high:.5g}"
    return (
        "Hash chain, head and answers are consistent, and an independent verifier recomputed the cost: ε "
        f"{first if first == last else f'between {first} and {last}'}."
    )


def federated_run(said: dict[str, Any]) -> tuple[FederatedRun, list[Score]]:
    """Read the output of ``farthing simulate --json``."""
    if said["guarantee"]["epsilon"] is None:
        raise InvalidValue("a simulation without privacy has no budgets to show")
    groups = tuple(
        ClientGroup(
            epsilon=_positive(group["epsilon"]),
            clients=count(group["clients"]),
            rounds=count(group["rounds"]),
            done=count(group["done"]),
        )
        for group in said["groups"]
    )
    method, clients = str(said["method"]), sum(group.clients for group in groups)
    value, scores = scored(said, f"{method}, {clients:,} clients")
    return (
        FederatedRun(
            method=method,
            guarantee=guarantee(said["guarantee"]),
            trust=str(said["trust"]),
            rounds=count(said["rounds"]),
            groups=groups,
            value=value,
        ),
        scores,
    )


def guarantee(said: dict[str, Any]) -> Guarantee:
    """Return a guarantee from its JSON object; a missing ε is infinite."""
    return Guarantee(
        math.inf if said["epsilon"] is None else _positive(said["epsilon"]),
        float(said["delta"]),
        Adjacency(said["adjacency"]),
        Unit(said["unit"]),
        Observer(said["observer"]),
        str(said["accountant"]),
        str(said["theorem"]),
        str(said["note"]),
    )


def scored(said: dict[str, Any], label: str) -> tuple[float | None, list[Score]]:
    """Return the score on test records and that of guessing, where they were measured."""
    test = said.get("test")
    size = said["guarantee"]["epsilon"]
    if not test or "accuracy" not in test or size is None:
        return None, []
    value, epsilon = float(test["accuracy"]), _positive(size)
    return value, [
        Score(label=label, epsilon=epsilon, value=value),
        Score(label="guessing", epsilon=None, value=float(test["guessing"])),
    ]


def verdicts(said: dict[str, Any]) -> "list[tuple[str, Verdict]]":
    """Read the output of ``farthing audit --json``."""
    from farthing.audit.auditing import Verdict

    return [
        (
            str(one["method"]),
            Verdict(
                math.inf if one["eps_lower"] is None else float(one["eps_lower"]),
                Budget(**one["claim"]),
                count(one["trials"]),
                float(one["confidence"]),
                str(one["attack"]),
                str(one["assumption"]),
                caught=_power(one),
                exact=None if one.get("eps_exact") is None else _positive(one["eps_exact"]),
            ),
        )
        for one in said["verdicts"]
    ]


def _power(said: dict[str, Any]) -> float | None:
    """Return the power of an attack: None if it is not known, infinite if it could not have refuted."""
    if "catches" not in said:
        return None
    return math.inf if said["catches"] is None else _positive(said["catches"])


def _positive(value: Any) -> float:
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{value!r} is not an epsilon")
    return float(value)


def count(value: Any) -> int:
    """Return a whole number from a JSON object; raise ValueError for anything else."""
    if not isinstance(value, int | float) or not 0 <= value < 2**63 or int(value) != value:
        raise ValueError(f"{value!r} is not a count")
    return int(value)


Points = list[tuple[float, float]]

_POINTS = 32  # points of either picture: enough to see the shape, and quick to compute
_FEW = 64  # answers up to which each has a point of its own
_TIGHT = "pld"


def spent(subject: Subject) -> Points:
    """Return (answers, their ε) along the run; empty if nothing is promised."""
    total = sum(charge.count for charge in subject.charges)
    if not subject.guaranteed or not total:
        return []
    price = _tight(subject) if _promised(subject) else _filtered(subject)
    points = [(0.0, 0.0)]
    parts = total if total <= _FEW else _POINTS
    cuts = [math.ceil(total * step / parts) for step in range(1, parts + 1)]
    for answers, counted in zip(cuts, _counted(subject.charges, cuts), strict=True):
        epsilon = min(price(counted), subject.guarantee.epsilon)
        points.append((float(answers), max(points[-1][1], epsilon)))
    return points


def _promised(subject: Subject) -> bool:
    return bool(subject.plan) or subject.guarantee.accountant == _TIGHT


def _counted(charges: Sequence[Charge], cuts: Sequence[int]) -> Iterator[Counter[Event]]:
    """Return, for every cut, the number of each event among the first answers."""
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


def _all(charges: Sequence[Charge]) -> Counter[Event]:
    counted: Counter[Event] = Counter()
    for charge in charges:
        counted[charge.event] += charge.count
    return counted


def _composed(counted: Counter[Event]) -> Event:
    return ComposedEvent(tuple(RepeatedEvent(event, count) for event, count in counted.items()))


def _tight(subject: Subject) -> Callable[[Counter[Event]], float]:
    said = subject.guarantee
    return lambda counted: pld.epsilon(_composed(counted), said.delta, said.adjacency)


def _filtered(subject: Subject) -> Callable[[Counter[Event]], float]:
    rule, costs, people = subject.rule, dict[Event, Totals](), _people(subject)

    def price(counted: Counter[Event]) -> float:
        totals = rule.start()
        for event, count in counted.items():
            if event not in costs:
                costs[event] = rule.add(rule.start(), event)
            totals = [total + count * cost for total, cost in zip(totals, costs[event], strict=True)]
        if isinstance(rule, GdpFilter):  # whose totals are μ², and k records have k μ
            totals = [people**2 * total for total in totals]
        return rule.epsilon(totals)

    return price


def _people(subject: Subject) -> int:
    """Return the most records per person if the guarantee is per person and charges are not."""
    declared = subject.declared
    if declared is None or subject.guarantee.unit is not Unit.USER or subject.budget.unit is Unit.USER:
        return 1
    return declared.rows_per_person or 1


def curve(subject: Subject) -> Points:
    """Return pairs (ε, δ) that hold jointly for everything released; empty where only one pair is proven."""
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
