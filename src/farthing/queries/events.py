"""Define privacy events in the vocabulary of dp-accounting, without heavy imports.

An event is derived from the parts of a query, never entered by hand, and is priced under an
:class:`~farthing.budget.Adjacency`. Noise is measured against the bound C of *one* contribution, so the same
event costs more under replace-one, where the sum moves by up to 2C.

>>> event = PoissonEvent(0.01, GaussianEvent(1.1))
>>> decode(encode(event)) == event
True
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from farthing import validate
from farthing.errors import InvalidValue


@dataclass(frozen=True, slots=True)
class GaussianEvent:
    """Gaussian noise on a sum: ``noise`` = standard deviation / L2 bound of one contribution."""

    noise: float

    def __post_init__(self) -> None:
        validate.positive(noise=self.noise)


@dataclass(frozen=True, slots=True)
class LaplaceEvent:
    """Laplace noise on a sum: ``noise`` = scale / L1 bound of one contribution."""

    noise: float

    def __post_init__(self) -> None:
        validate.positive(noise=self.noise)


@dataclass(frozen=True, slots=True)
class PureEvent:
    """Any mechanism that is ε-DP under the budget's adjacency."""

    epsilon: float

    def __post_init__(self) -> None:
        validate.positive(epsilon=self.epsilon)


@dataclass(frozen=True, slots=True)
class BoundedRangeEvent:
    """An exponential mechanism (Gumbel noise, argmax): log-ratios lie in an interval of length ε."""

    epsilon: float

    def __post_init__(self) -> None:
        validate.positive(epsilon=self.epsilon)


@dataclass(frozen=True, slots=True)
class ZcdpEvent:
    """Any mechanism that is δ-approximately ρ-zCDP under the budget's adjacency."""

    rho: float
    delta: float = 0.0

    def __post_init__(self) -> None:
        validate.positive(rho=self.rho)
        validate.delta(delta=self.delta)


@dataclass(frozen=True, slots=True)
class ApproximateEvent:
    """Any mechanism that is (ε, δ)-DP under the budget's adjacency, such as a part of a budget."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        validate.positive(epsilon=self.epsilon)
        validate.delta(delta=self.delta)


@dataclass(frozen=True, slots=True)
class PoissonEvent:
    """``event`` on a Poisson sample: every record joins independently with probability ``rate``."""

    rate: float
    event: "Event"

    def __post_init__(self) -> None:
        validate.rate(rate=self.rate)


@dataclass(frozen=True, slots=True)
class TruncatedEvent:
    """``event`` on a Poisson sample from at most ``of`` records, cut to at most ``size`` records."""

    rate: float
    size: int
    of: int
    event: "Event"

    def __post_init__(self) -> None:
        validate.rate(rate=self.rate)
        validate.count(size=self.size)
        validate.count(of=self.of)


@dataclass(frozen=True, slots=True)
class FixedSizeEvent:
    """``event`` on exactly ``size`` of ``of`` records, drawn without replacement."""

    size: int
    of: int
    event: "Event"

    def __post_init__(self) -> None:
        validate.count(size=self.size)
        if self.size > validate.count(of=self.of):
            raise InvalidValue(f"size must be at most of={self.of}, got {self.size}")


@dataclass(frozen=True, slots=True)
class DrawnEvent:
    """``event`` with probability ``rate``, against an observer who sees whether a record was drawn."""

    rate: float
    event: "Event"

    def __post_init__(self) -> None:
        validate.rate(rate=self.rate)


@dataclass(frozen=True, slots=True)
class BalancedEvent:
    """``event`` in one of ``bins`` turns, drawn uniformly for every record and kept secret."""

    bins: int
    event: "Event"

    def __post_init__(self) -> None:
        validate.count(bins=self.bins)


@dataclass(frozen=True, slots=True)
class RepeatedEvent:
    """``event``, ``count`` times, each possibly chosen adaptively."""

    event: "Event"
    count: int

    def __post_init__(self) -> None:
        validate.count(count=self.count)


@dataclass(frozen=True, slots=True)
class ComposedEvent:
    """Several events on the same records."""

    events: tuple["Event", ...]


@dataclass(frozen=True, slots=True)
class TurnEvent:
    """One of ``turns`` answers that depend on each other and cost ``event`` together.

    One answer costs as much as all of them, because correlated noise has no price per answer. ``by``
    identifies the sampler and the mechanism that the plan was priced for
    (`farthing.queries.query.Query.promised`).
    """

    event: "Event"
    turns: int
    by: str

    def __post_init__(self) -> None:
        validate.count(turns=self.turns)


@dataclass(frozen=True, slots=True)
class PersonalEvent:
    """Events by level of personal budget: a unit of level k pays ``events[k]``.

    `for_level` returns the price of one level; accountants answer for the level that pays most.
    """

    events: tuple["Event", ...]

    def __post_init__(self) -> None:
        if not self.events:
            raise InvalidValue("a PersonalEvent needs an event for each level of budget, got none")


@dataclass(frozen=True, slots=True)
class TuningEvent:
    """The best of a random number of runs, each ``event``; the other runs and their number stay secret.

    ``mean`` and ``shape`` are the parameters of the number of runs (`farthing.accounting.tuning.RunCount`);
    ``delta`` is the δ at which it is priced where ε and δ are added up.
    """

    event: "Event"
    mean: float
    shape: float | None
    delta: float

    def __post_init__(self) -> None:
        validate.positive(mean=self.mean)
        validate.probability(delta=self.delta)


Event = (
    GaussianEvent
    | LaplaceEvent
    | PureEvent
    | BoundedRangeEvent
    | ZcdpEvent
    | ApproximateEvent
    | PoissonEvent
    | TruncatedEvent
    | FixedSizeEvent
    | DrawnEvent
    | BalancedEvent
    | RepeatedEvent
    | ComposedEvent
    | TurnEvent
    | PersonalEvent
    | TuningEvent
)
NOTHING = ComposedEvent(())  # the price of a unit that never takes part

_KINDS: dict[str, type[Any]] = {
    "gaussian": GaussianEvent,
    "laplace": LaplaceEvent,
    "pure": PureEvent,
    "bounded-range": BoundedRangeEvent,
    "zcdp": ZcdpEvent,
    "approximate": ApproximateEvent,
    "poisson": PoissonEvent,
    "truncated": TruncatedEvent,
    "fixed-size": FixedSizeEvent,
    "drawn": DrawnEvent,
    "balanced": BalancedEvent,
    "repeated": RepeatedEvent,
    "composed": ComposedEvent,
    "turn": TurnEvent,
    "personal": PersonalEvent,
    "tuning": TuningEvent,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


def encode(event: Event) -> dict[str, Any]:
    """Return the event as plain JSON values, for the journal and its export."""
    row: dict[str, Any] = {"kind": _NAMES[type(event)]}
    for field in fields(event):
        value = getattr(event, field.name)
        if field.name == "event":
            value = encode(value)
        elif field.name == "events":
            value = [encode(part) for part in value]
        row[field.name] = value
    return row


def decode(row: dict[str, Any]) -> Event:
    """Return the inverse of :func:`encode`."""
    values = dict(row)
    kind = _KINDS[values.pop("kind")]
    if "event" in values:
        values["event"] = decode(values["event"])
    if "events" in values:
        values["events"] = tuple(decode(part) for part in values["events"])
    event: Event = kind(**values)
    return event


def flatten(event: Event, count: int = 1) -> list[tuple[Event, int]]:
    """Unroll repetitions, compositions and turns of plans into pairs of a simple event and its count."""
    if isinstance(event, RepeatedEvent) and isinstance(event.event, TurnEvent):
        return flatten(event.event, count * math.ceil(event.count / event.event.turns))
    if isinstance(event, RepeatedEvent):
        return flatten(event.event, count * event.count)
    if isinstance(event, TurnEvent):
        return flatten(event.event, count)
    if isinstance(event, ComposedEvent):
        return [pair for part in event.events for pair in flatten(part, count)]
    return [(event, count)]


def for_level(event: Event, level: int) -> Event:
    """Return the part of ``event`` that a unit of this level of budget pays, counted from 0.

    >>> for_level(RepeatedEvent(PersonalEvent((NOTHING, GaussianEvent(2.0))), 3), 1)
    RepeatedEvent(event=GaussianEvent(noise=2.0), count=3)
    """
    match event:
        case PersonalEvent(events):
            if not 0 <= level < len(events):
                raise InvalidValue(f"the event has {len(events)} levels of budget, got level {level}")
            return events[level]
        case ComposedEvent(events):
            return ComposedEvent(tuple(for_level(part, level) for part in events))
        case RepeatedEvent(inner) | TurnEvent(inner):
            return replace(event, event=for_level(inner, level))
    return event


def levels(event: Event) -> int:
    """Return the number of budget levels in an event, 1 if all units pay the same."""
    found = {len(part.events) for part, _ in flatten(event) if isinstance(part, PersonalEvent)}
    if len(found) > 1:
        raise InvalidValue(f"events of {sorted(found)} levels of budget cannot be added up")
    return found.pop() if found else 1
