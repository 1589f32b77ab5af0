"""Write the privacy statement in plain words, in the order of the concerns of NIST SP 800-226.

Unit, adjacency, ε and δ, what was taken as public, trust, accounting, sampling, randomness, other releases,
tuning, audit. Each item says what holds, and what it means for one person; unfavourable facts are stated too.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from farthing.accounting import gaussian, personal
from farthing.accounting.composition import THEOREM as GROUPS
from farthing.accounting.filters import GdpFilter
from farthing.accounting.personal import PersonalFilter
from farthing.budget import Adjacency, Guarantee, Observer, Unit
from farthing.ledger.books import FLOATS, SEEDED
from farthing.queries.events import (
    ApproximateEvent,
    BalancedEvent,
    ComposedEvent,
    DrawnEvent,
    Event,
    FixedSizeEvent,
    GaussianEvent,
    PersonalEvent,
    PoissonEvent,
    RepeatedEvent,
    TruncatedEvent,
    TuningEvent,
    TurnEvent,
    ZcdpEvent,
    flatten,
)
from farthing.report.subject import Subject
from farthing.report.words import exponential, number, percent, plain
from farthing.validate import counted

if TYPE_CHECKING:
    from farthing.audit.auditing import Verdict


class Tone(StrEnum):
    """The emphasis with which an item is shown."""

    CALM = "calm"
    CARE = "care"  # it holds, with a reservation
    WEAK = "weak"  # it holds, but is too weak to mean much
    ALARM = "alarm"  # it does not hold


@dataclass(frozen=True, slots=True)
class Item:
    """One concern: its name, what holds in a few words, and what that means."""

    name: str
    value: str
    meaning: tuple[str, ...]
    tone: Tone = Tone.CALM


def statement(subject: Subject) -> list[Item]:
    """Return all eleven items, in order."""
    return [
        _unit(subject),
        _adjacency(subject),
        _size(subject),
        _declared(subject),
        _trust(subject),
        _accounting(subject),
        _sampling(subject),
        _randomness(subject),
        _others(subject),
        _tuning(subject),
        _audit(subject),
    ]


def headline(subject: Subject) -> str:
    """Return the guarantee in a line."""
    if not subject.guaranteed:
        return "No privacy guarantee"
    said = subject.guarantee
    return f"ε = {upwards(said.epsilon)}, δ = {number(said.delta)}"


def upwards(epsilon: float) -> str:
    """Return four digits, rounded up."""
    if not math.isfinite(epsilon) or epsilon == 0:
        return number(epsilon)
    unit = 10.0 ** (math.floor(math.log10(epsilon)) - 3)
    return number(math.ceil(epsilon / unit * (1 - 1e-12)) * unit)


def band(epsilon: float) -> tuple[Tone, str]:
    """Return how strong an ε is by common practice, and why (Ponomareva et al. 2023)."""
    if epsilon <= 1:
        return Tone.CALM, "ε up to 1 is strong protection by common practice (Ponomareva et al. 2023)."
    if epsilon <= 10:
        return Tone.CARE, "ε between 1 and 10 is usual in practice, and not strong protection."
    return Tone.WEAK, "ε above 10 is weak protection: the bound hides little."


def strength(said: Guarantee, records: int | None) -> tuple[Tone, str]:
    """Return how strong a guarantee is and why, by its ε, or by δ times the records where that is large."""
    tone, reason = band(said.epsilon)
    share = said.delta * (records or 0)
    if share < _MUCH:
        return tone, reason
    worse = Tone.WEAK if share >= 1 else max(tone, Tone.CARE, key=list(Tone).index)
    return worse, _large(share) if tone is Tone.CALM else f"{_large(share)} {reason}"


def weaknesses(epsilon: float, delta: float, records: int | None) -> list[str]:
    """Return sentences about an ε or a δ that is too large to protect; none about usual ones.

    >>> weaknesses(1.0, 1e-6, 1000)
    []
    """
    tone, reason = band(epsilon)
    found = [f"ε = {number(epsilon)}. {reason}"] if tone is Tone.WEAK else []
    return found + ([_large(delta * records)] if records and delta * records >= _MUCH else [])


def _large(share: float) -> str:
    return (
        f"δ times the number of records is {number(share, 2)}. "
        + ("That is too large. " if share >= 1 else "That is large. " if share >= _MUCH else "")
        + f"At 1 or more, publishing one whole record would be allowed; it should be well below {_MUCH:g}."
    )


def guess(said: Guarantee) -> float:
    """Return the largest probability that a guess at even odds is right: (e^ε + δ) / (1 + e^ε).

    Kairouz, Oh & Viswanath 2015, Thm. 2.1: the two error probabilities sum to 2 (1 - δ) / (1 + e^ε) at least.
    """
    return 1 - (1 - said.delta) / (1 + math.exp(min(said.epsilon, 700.0)))


_MUCH = 0.1  # δ times the number of records, from which on it is flagged

_UNITS = {
    Unit.RECORD: (
        "One record",
        "The guarantee is about one row of the table. Somebody with several rows is protected less: with k "
        "rows, ε is multiplied by k, and δ by more than that.",
    ),
    Unit.USER: ("One person", "The guarantee is about all records of one person together."),
    Unit.PARTY: (
        "One party",
        "The guarantee is about all records of one party (a hospital, a bank) at once.",
    ),
}
_NEIGHBOURS = {
    Adjacency.ADD_REMOVE: (
        "Added or removed",
        "The result is compared with the result on the same data without one {unit}. "
        "ε and δ bound how well anybody can tell the two apart.",
    ),
    Adjacency.REPLACE_ONE: (
        "Replaced by another",
        "The result is compared with the result on data in which one {unit} is replaced by another. The "
        "number of them is not hidden.",
    ),
    Adjacency.ZERO_OUT: (
        "Left blank",
        "The result is compared with the result on data in which one {unit} contributes nothing. The "
        "number of them is not hidden.",
    ),
}
_OTHERWISE = {
    Adjacency.ADD_REMOVE: ("without it", "whether a {unit} was in it"),
    Adjacency.REPLACE_ONE: ("with another in its place", "which of two {unit}s was in it"),
    Adjacency.ZERO_OUT: ("with a blank in its place", "whether a {unit} was in it or a blank"),
}
_OBSERVERS = {
    Observer.ANYONE: (
        "A trusted trainer; everybody else may look",
        "Whoever ran the training held the records and is trusted with them. The guarantee holds against "
        "anybody who sees the model and every answer that was released during training, whatever else they "
        "know, but not which records were drawn in a step.",
    ),
    Observer.COORDINATOR: (
        "Also against an observer of the draws",
        "The guarantee holds even against a coordinator who sees every answer and which records were drawn.",
    ),
    Observer.SERVER: (
        "No server has to be trusted",
        "Noise is added before anything leaves its owner. The guarantee holds against a server that sees "
        "every single message.",
    ),
    Observer.AGGREGATE: (
        "Only sums may be seen",
        "Each party adds a share of the noise. The guarantee holds against anybody who sees sums over "
        "parties but no single message: it needs secure aggregation, and enough honest parties.",
    ),
}
_ACCOUNTANTS = {
    "pld": "Tight accounting of a plan that was fixed before the first answer",
    "gdp": "A filter for Gaussian differential privacy",
    "zcdp": "A filter for concentrated differential privacy",
    "rdp": "A filter for Rényi differential privacy",
    "basic": "Basic composition: the costs of all answers are added up",
}


def _unit(subject: Subject) -> Item:
    said, (value, meaning) = subject.guarantee, _UNITS[subject.guarantee.unit]
    rows = None if subject.declared is None else subject.declared.rows_per_person
    if said.unit is not Unit.RECORD or rows is None or not isinstance(subject.rule, GdpFilter):
        return Item("Who is protected", value, (meaning,))
    epsilon = gaussian.epsilon(rows * subject.rule.mu, said.delta)
    kept = (
        f"At most {rows:,} records of a person were kept, as privacy.json says. For all records of a person "
    )
    kept += f"together ε is {upwards(epsilon)}, at the same δ ({GROUPS})."
    return Item("Who is protected", value, (meaning, kept), Tone.CARE)


def _adjacency(subject: Subject) -> Item:
    value, meaning = _NEIGHBOURS[subject.guarantee.adjacency]
    return Item("What is compared", value, (meaning.format(unit=subject.guarantee.unit),))


def _size(subject: Subject) -> Item:
    said, unit = subject.guarantee, subject.guarantee.unit
    name = "How much can be learnt"
    if not subject.guaranteed:
        why = (
            "An audit refuted the claim."
            if subject.refuted
            else "ε is infinite: the release may reveal everything."
        )
        return Item(name, "No guarantee: ε is infinite", (why,), Tone.ALARM)
    epsilon, factor = upwards(said.epsilon), exponential(said.epsilon)
    other, question = _OTHERWISE[said.adjacency]
    meaning = [
        f"Whatever is released is at most e^ε = {factor} times as likely with one {unit} as {other}"
        + (f", but for a chance of δ = {number(said.delta)}." if said.delta else ".")
        + f" Somebody who guesses at even odds {question.format(unit=unit)} is right at most "
        f"{percent(guess(said))} of the time, whatever the method."
    ]
    meaning.append(band(said.epsilon)[1])
    meaning.extend(_personal(subject))
    if said.delta and subject.records:
        meaning.append(_large(said.delta * subject.records))
    if subject.budget.epsilon > 1.001 * said.epsilon or subject.share < 0.9999:
        meaning.append(
            f"The ledger allows ε = {number(subject.budget.epsilon)} and δ = {number(subject.budget.delta)} "
            f"in all; {percent(subject.share)} of that is charged."
        )
    if subject.partial:
        meaning.append(
            "The run was interrupted. The guarantee covers its releases, and the rest of the budget."
        )
    size = f"ε = {epsilon}, δ = {number(said.delta)}"
    return Item(name, size, tuple(meaning), strength(said, subject.records)[0])


def _personal(subject: Subject) -> Iterator[str]:
    """Return each client's guarantee, where budgets are personal."""
    if isinstance(rule := subject.rule, PersonalFilter):
        plan = ComposedEvent(tuple(RepeatedEvent(event, times) for event, times in subject.plan))
        found = personal.epsilons(plan, rule) if subject.plan else rule.epsilons
        each = zip(rule.epsilons, found, strict=True)
        parts = [
            f"{upwards(own)} of {number(level)}" if own else f"0 of {number(level)}" for level, own in each
        ]
        yield (
            "Budgets are personal, and this is the largest ε. For each level its own ε holds, against "
            f"the others as well: {'; '.join(parts)}. A level at 0 took no part. Everybody's budget "
            "is taken as public."
        )


def _declared(subject: Subject) -> Item:
    name, declared = "What was taken as public", subject.declared
    void = "If a bound or a value was read from the records, there is no guarantee."
    if declared is None:
        return Item(
            name,
            "Not stated in this report",
            (f"Bounds, vocabularies and sizes that the training relied on are not listed here. {void}",),
            Tone.CARE,
        )
    size = "declared" if declared.records_declared else "counted, and taken as public"
    facts = (
        f"{len(declared.columns):,} columns, the target and the number of records ({size}), listed below. "
        f"Schema: {declared.source}."
    )
    if not declared.checked_by:
        return Item(
            name,
            "A schema that names nobody who checked it",
            (
                f"{void} Ask who wrote the schema, and from which source. Treat the guarantee as void until "
                "somebody who knows the columns vouches for it.",
                facts,
            ),
            Tone.CARE,
        )
    return Item(
        name,
        f"A schema that was checked by {plain(declared.checked_by)}",
        (facts, f"That it is public is this person's statement; no program can check it. {void}"),
    )


def _trust(subject: Subject) -> Item:
    value, meaning = _OBSERVERS[subject.guarantee.observer]
    return Item("Who is trusted, who may look", value, (meaning,))


def _accounting(subject: Subject) -> Item:
    said = subject.guarantee
    value = _ACCOUNTANTS.get(said.accountant, f"By {plain(said.accountant)}")
    meaning = []
    if subject.plan:
        times = sum(times for _, times in subject.plan)
        meaning.append(f"{times:,} answers were promised in advance, and their cost was computed together.")
    elif said.accountant in ("gdp", "zcdp", "rdp", "basic"):
        meaning.append(
            "The next query may depend on earlier answers. A query that does not fit the budget is refused."
        )
    if said.theorem:
        meaning.append(f"Theorem: {plain(said.theorem)}.")
    return Item("How the cost was added up", value, tuple(meaning))


def _sampling(subject: Subject) -> Item:
    ways = list(dict.fromkeys(_drawn(charge.event) for charge in subject.charges))
    value = subject.sampler or (
        ways[0] if len(ways) == 1 else "Several ways" if ways else "Nothing was drawn"
    )
    meaning = [f"{way}." for way in ways if way != value]
    meaning.append("The charge was computed from the sampler that ran, so the two cannot differ.")
    return Item("How records were drawn", plain(value), tuple(meaning))


def _drawn(event: Event) -> str:
    match event:
        case PoissonEvent(rate):
            return f"Each record independently with probability {number(rate)} (Poisson)"
        case TruncatedEvent(rate, size):
            return (
                f"Each record independently with probability {number(rate)} (Poisson); if more than {size:,} "
                f"are drawn, a random {size:,} of them"
            )
        case FixedSizeEvent(size, of):
            return f"Exactly {size:,} of {of:,} records, without replacement"
        case DrawnEvent(rate):
            return f"With probability {number(rate)}, and the draw may be seen"
        case BalancedEvent(bins):
            return (
                f"Each record once in every pass, in one of {bins:,} turns, drawn at random and kept secret"
            )
        case TurnEvent(RepeatedEvent(PoissonEvent() | TruncatedEvent() as inner, chances), turns):
            return (
                f"Records take turns, a record in {chances:,} of {turns:,} answers at most. {_drawn(inner)}"
            )
        case TurnEvent(RepeatedEvent(GaussianEvent(), chances), turns) if chances < turns:
            return f"Each record in {chances:,} of {turns:,} answers, as it arrived"
        case RepeatedEvent(inner) | TurnEvent(inner) | TuningEvent(inner):
            return _drawn(inner)
        case PersonalEvent(events):
            ways = [_drawn(own) if flatten(own) else "Never drawn" for own in events]
            return "; ".join(["Each record at the rate of its own level of budget", *dict.fromkeys(ways)])
        case ApproximateEvent() | ZcdpEvent():
            return "Not recorded: parts of the budget were passed on, and this ledger holds only their cost"
    return "Every record takes part in every answer"


def _randomness(subject: Subject) -> Item:
    name = "Randomness and floating point"
    if subject.noise == SEEDED:
        return Item(
            name,
            "SEEDED NOISE: no privacy at all",
            (
                "The noise came from a seed, for a test. Anybody who knows the seed can remove it. What "
                "this run released must not be passed on if the records are private.",
            ),
            Tone.ALARM,
        )
    if subject.noise == FLOATS:
        return Item(
            name,
            "A cryptographic stream, but noise in floats",
            (
                "The guarantee holds for real numbers. The low bits of floating-point noise reveal more "
                "(Mironov 2012), so it does not hold against somebody who examines every bit.",
            ),
            Tone.CARE,
        )
    return Item(
        name,
        "Lattice noise from a cryptographic stream",
        (
            "Noise is drawn from a cryptographic generator that nobody can replay, and added to whole "
            "numbers on a lattice, so the low bits of floats reveal nothing.",
        ),
    )


def _others(subject: Subject) -> Item:
    name = "What else was released"
    known = list(_public(subject))
    if not subject.released:
        return Item(
            name,
            "Nothing else, as far as this report knows",
            (*known, "Other publications about the records are not covered."),
        )
    return Item(
        name,
        f"{len(subject.released)} further: not covered by the guarantee",
        (*(plain(what) for what in subject.released), *known),
        Tone.CARE,
    )


def _public(subject: Subject) -> Iterator[str]:
    note = subject.guarantee.note
    for said in filter(None, (part.strip() for part in note.split(";"))):
        if said not in (SEEDED, FLOATS) and said not in FLOATS:
            yield f"{plain(said[0].upper() + said[1:])}."


def _tuning(subject: Subject) -> Item:
    if subject.tuning:
        return Item("Tuning", plain(subject.tuning), ())
    return Item(
        "Tuning",
        "Not known to this report",
        (
            "Settings that were chosen by trials on the same records cost privacy too. Only trials that were "
            "charged to this ledger are included; the guarantee does not cover others.",
        ),
        Tone.CARE,
    )


def _audit(subject: Subject) -> Item:
    name = "Audit"
    if not subject.audit:
        return Item(name, "Not run", ("No attack was tried. The claim rests on the theorem above.",))
    own = subject.own_audit
    others = ", ".join(
        dict.fromkeys(plain(what, 60) for what, verdict in subject.audit if (what, verdict) not in own)
    )
    apart = (
        f"The table also has attacks on other methods, which say nothing about this one: {others}."
        if others
        else ""
    )
    if not own:
        return Item(name, "Not run on this method", (apart, "The claim rests on the theorem above."))
    broken = [what for what, verdict in own if verdict.broken]
    if broken:
        names = ", ".join(dict.fromkeys(plain(what, 60) for what in broken))
        return Item(
            name, "BROKEN", (f"An attack refuted the claim for: {names}. Do not rely on it.",), Tone.ALARM
        )
    most = max(own, key=lambda found: found[1].eps_lower / found[1].claim.epsilon)[1]
    return Item(
        name,
        "Not refuted",
        (
            f"{counted(len(own), 'attack')} tried. The strongest shows ε of at least "
            f"{downwards(most.eps_lower)} where {number(most.claim.epsilon)} is claimed, with "
            f"{percent(most.confidence)} confidence. This is not a proof that the claim is true.",
            _power(own),
            "The attacks ran the method many times on small tables made for the purpose; they did not attack "
            "this run.",
            *filter(None, (apart,)),
        ),
    )


def _power(own: Sequence[tuple[str, "Verdict"]]) -> str:
    """Return what violation the strongest of some attacks would have caught."""
    found = [catches for _, verdict in own if (catches := verdict.catches) is not None]
    if not found:
        return "The power of these attacks is not known: they may have been too weak to refute anything."
    if not math.isfinite(min(found)):
        return "These attacks were too weak: none of them could have refuted the claim, however large ε is."
    return (
        f"The power of these attacks: had ε really been {upwards(min(found))} or more, one of them would "
        "have refuted the claim in nine of ten tries."
    )


def downwards(value: float) -> str:
    """Return three digits, rounded down."""
    if value <= 0 or not math.isfinite(value):
        return number(max(value, 0.0))
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return number(math.floor(value / unit) * unit)
