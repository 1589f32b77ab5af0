"""Collect the subject of a report: the public facts of one run.

    subject = Subject.of(ledger, title="churn", method="auto", steps=40, guarantee=model.privacy_,
                         history=model.history_)
    Path("report.html").write_text(page(subject), encoding="utf-8")

A ledger's rows record the charges. If a training took its part of a ledger in one charge, its own answers are
in ``history``, the steps that it returned, and the pictures show those.

`Declared` holds the facts that a run took as public: columns, bounds, vocabularies, sizes, and who checked
them. A guarantee protects the records given these facts. If one of them was read from the records, it does
not hold; a report therefore lists them column by column.

>>> facts = {"schema": {"source": "a.json", "sha256": "ab", "checked_by": ""},
...          "columns": [{"name": "age", "low": 0, "high": 99}],
...          "target": {"name": "rich", "values": ["no", "yes"]}}
>>> Declared.of(facts).rows()
[('age', 'feature', 'numbers from 0 to 99'), ('rich', 'target', '2 values: no, yes')]
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from farthing.accounting.filters import FILTERS, Filter
from farthing.budget import Budget, Guarantee
from farthing.ledger.books import FLOATS, SEEDED, Books, rule_of
from farthing.ledger.journal import Journal
from farthing.ledger.journal_rows import Row
from farthing.ledger.ledger import Ledger
from farthing.queries.events import Event, decode
from farthing.queries.query import Step
from farthing.report.words import number

if TYPE_CHECKING:  # the audit imports much, and few reports have one
    from farthing.audit.auditing import Verdict
from collections.abc import Mapping
from typing import Any

from farthing.queries.events import (
    ApproximateEvent,
    BalancedEvent,
    BoundedRangeEvent,
    ComposedEvent,
    DrawnEvent,
    FixedSizeEvent,
    GaussianEvent,
    LaplaceEvent,
    PersonalEvent,
    PoissonEvent,
    PureEvent,
    RepeatedEvent,
    TruncatedEvent,
    TuningEvent,
    TurnEvent,
    ZcdpEvent,
)
from farthing.report.words import plain

_MOST = 2_000  # letters of a vocabulary in a report


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """The facts that a run took as public. Read them from a ``privacy.json`` with `Declared.of`.

    Parameters
    ----------
    source : str
        The file of the schema, or its other origin.
    sha256 : str
        The hash of the schema as JSON, which the model file holds.
    checked_by : str
        The person who checked that it is public; empty if nobody is named.
    columns : tuple of mappings
        The features, as in a schema's JSON.
    target : mapping
        The column that is predicted.
    records_declared : bool, default False
        Whether the number of records was declared, not counted.
    rows_per_person : int, optional
        The largest number of records of a person that were kept; None if it is not limited.
    user_column : str
        The column that identifies the person of a record; empty if there is none.
    model, model_sha256 : str
        The model file, and its hash.

    Examples
    --------
    >>> rich = {"name": "rich", "values": ["no", "yes"]}
    >>> Declared(source="a.json", sha256="ab", checked_by="Ann, 2026-11-16", columns=(), target=rich).rows()
    [('rich', 'target', '2 values: no, yes')]
    """

    source: str
    sha256: str
    checked_by: str
    columns: tuple[Mapping[str, Any], ...]
    target: Mapping[str, Any]
    records_declared: bool = False
    rows_per_person: int | None = None
    user_column: str = ""
    model: str = ""
    model_sha256: str = ""

    @classmethod
    def of(cls, public: Mapping[str, Any], told: Mapping[str, Any] | None = None) -> "Declared":
        """Read the object ``public`` of a ``privacy.json``, and of the whole the model's file and hash."""
        schema, told = public["schema"], told or {}
        rows = told.get("rows_per_person")
        found = cls(
            source=str(schema["source"]),
            sha256=str(schema["sha256"]),
            checked_by=str(schema["checked_by"] or ""),
            columns=tuple({**column, "name": str(column["name"])} for column in public["columns"]),
            target={**public["target"], "name": str(public["target"]["name"])},
            records_declared=public.get("records_declared", False) is True,
            rows_per_person=None if rows is None else int(rows),
            user_column=str(told.get("user_column", "")),
            model=str(told.get("model", "")),
            model_sha256=str(told.get("sha256", {}).get("model", "")),
        )
        found.rows()  # which raises an error where a declaration cannot be read
        return found

    def rows(self) -> list[tuple[str, str, str]]:
        """Return name, role and declaration of every column."""
        columns = [(column, "feature") for column in self.columns]
        return [(plain(c["name"], 120), role, _words(c)) for c, role in [*columns, (self.target, "target")]]


def _words(column: Mapping[str, Any]) -> str:
    """Return what is declared of a column."""
    if "values" in column:
        values = [str(value) for value in column["values"]]
        also = "; others are one more value" if column.get("other") else ""
        return plain(f"{len(values):,} values: {', '.join(values)}{also}", _MOST)
    if "first" in column:
        text = f"dates from {column['first']} to {column['last']}"
    elif "low" in column:
        text = f"numbers from {number(float(column['low']), 6)} to {number(float(column['high']), 6)}"
    else:
        return "numbers; bounds were bought from the budget"
    if column.get("bought"):
        return plain(f"{text}, bounds that were bought from the budget")
    missing = column.get("missing")
    if isinstance(missing, int | float):
        missing = number(float(missing), 6)
    return plain(text if missing is None else f"{text}; a missing one counts as {missing}")


Plan = tuple[tuple[Event, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One point of the picture "accuracy against ε".

    Parameters
    ----------
    label : str
        A method or a baseline.
    epsilon : float or None
        None draws a line across: a model without privacy, or guessing.
    value : float
        The score.
    """

    label: str
    epsilon: float | None
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientGroup:
    """A group of clients with the same budget.

    Parameters
    ----------
    epsilon : float
        Their budget.
    clients : int
        The number of clients.
    rounds, done : int
        The rounds that they could afford, and those that they took.
    """

    epsilon: float
    clients: int
    rounds: int
    done: int

    @property
    def left(self) -> float:
        """Return the share of their rounds that is left."""
        return 1 - self.done / self.rounds if self.rounds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FederatedRun:
    """The facts of a federated training, in which each client has its own budget.

    Parameters
    ----------
    method : str
    guarantee : Guarantee
        That of the client with the largest budget.
    trust : str
        Where noise is added: "local", "distributed" or "trusted".
    rounds : int
    groups : tuple of ClientGroup
    value : float, optional
        The accuracy on public test records.
    """

    method: str
    guarantee: Guarantee
    trust: str
    rounds: int
    groups: tuple[ClientGroup, ...]
    value: float | None = None


@dataclass(frozen=True, slots=True)
class Charge:
    """A charge of ``count`` answers at one price."""

    event: Event
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The public facts of one run. Build it with `Subject.of`."""

    title: str
    method: str
    steps: int
    budget: Budget  # of the ledger
    guarantee: Guarantee  # the guarantee of this run
    noise: str  # the kind of noise that the ledger was used with
    rule: Filter  # the filter that composes this run's answers, unless they were promised
    plan: Plan  # the promised events; empty where a filter spends
    charges: tuple[Charge, ...]  # the charges of this run, in order
    clips: tuple[float, ...]  # the clipping norms of this run's answers, where its history has them
    share: float  # the fraction of the ledger's budget that is charged, by all runs
    rows: tuple[Row, ...]
    sampler: str | None = None
    records: int | None = None
    features: int | None = None
    scores: tuple[Score, ...] = ()
    measure: str = "accuracy"
    released: tuple[str, ...] = ()
    tuning: str = ""
    partial: bool = False
    federated: FederatedRun | None = None
    audit: tuple[tuple[str, "Verdict"], ...] = ()
    verified: str = ""  # the finding of an independent check of the ledger
    durable: bool = True  # whether the ledger is a file, not in memory
    declared: Declared | None = None  # what the run took as public

    @property
    def guaranteed(self) -> bool:
        """Return whether there is a guarantee."""
        return math.isfinite(self.guarantee.epsilon) and self.noise != SEEDED and not self.refuted

    @property
    def refuted(self) -> bool:
        """Return whether an audit broke the claim of this method."""
        return any(verdict.broken for _, verdict in self.own_audit)

    @property
    def own_audit(self) -> tuple[tuple[str, "Verdict"], ...]:
        """Return the attacks on this run's method; those on others do not concern it."""
        if not self.audit:
            return ()
        from farthing.audit.auditing import attacks

        told = re.findall(r"(?:^|\()([\w-]+)", self.method)  # a method, settings, and a model in brackets
        names = {self.method, *(attack for name in told for attack in (name, *attacks(name)))}
        return tuple(one for one in self.audit if one[0].removesuffix("-step") in names)

    @property
    def floats(self) -> bool:
        """Return whether the noise may be of floats."""
        return self.noise == FLOATS

    @classmethod
    def of(
        cls,
        ledger: Ledger | Journal,
        *,
        title: str,
        method: str,
        steps: int | None = None,
        guarantee: Guarantee | None = None,
        history: Iterable[Step] = (),
        sampler: str | None = None,
        records: int | None = None,
        features: int | None = None,
        scores: Sequence[Score] = (),
        measure: str = "accuracy",
        released: Sequence[str] = (),
        tuning: str = "",
        partial: bool = False,
        federated: FederatedRun | None = None,
        audit: Sequence[tuple[str, "Verdict"]] = (),
        verified: str = "",
        declared: Declared | None = None,
    ) -> "Subject":
        """Return the subject of a run that spent from ``ledger``.

        Parameters
        ----------
        ledger : Ledger or Journal
            A journal alone is enough, also one that was used with seeded noise, which no ledger opens again.
        title, method : str
        steps : int, optional
            None: the number of answers.
        guarantee : Guarantee, optional
            None: the ledger's.
        history : iterable of Step
            The steps of the run, if it took its part of the ledger in one charge.
        sampler : str, optional
            A description of the sampler.
        records, features : int, optional
            Public numbers.
        scores : sequence of Score
        measure : str, default "accuracy"
            The name of the score.
        released : sequence of str
            Releases that were computed without privacy.
        tuning : str
            Whether settings were tried on the records, and whether these trials were charged.
        partial : bool, default False
            Whether the run was interrupted.
        federated : FederatedRun, optional
        audit : sequence of (str, Verdict)
        verified : str
            The finding of an independent check of the ledger.
        declared : Declared, optional
            The facts that the run took as public, by column.
        """
        journal = ledger.journal if isinstance(ledger, Ledger) else ledger
        header, rows = journal.header, tuple(journal.rows())
        rule, noise = rule_of(header), str(header["noise"])
        books = Books(rule, journal, noise, 1)  # read only: nothing is asked of it
        said = books.guarantee() if guarantee is None else guarantee
        plan = tuple((decode(row.body["event"]), int(row.body["times"])) for row in rows if _promises(row))
        charges = _charges(rows)
        answers = sum(charge.count for charge in charges)
        receipts = [receipt for step in history for receipt in step.receipts]
        told = tuple(Charge(receipt.event) for receipt in receipts)
        clips = tuple(receipt.clip for receipt in receipts if receipt.clip is not None)
        if told and not {receipt.hash for receipt in receipts} & {row.hash for row in rows}:
            # a part, charged here as one answer: its own answers are more precise
            charges, rule = told, _rule_of(said, rule)
        return cls(
            title=title,
            method=method,
            steps=answers if steps is None else steps,
            budget=rule_of(header).budget,
            guarantee=said,
            noise=noise,
            rule=rule,
            plan=plan,
            charges=charges,
            clips=clips,
            share=books.share(),
            rows=rows,
            sampler=sampler,
            records=records,
            features=features,
            scores=tuple(scores),
            measure=measure,
            released=tuple(released),
            tuning=tuning,
            partial=partial,
            federated=federated,
            audit=tuple(audit),
            verified=verified,
            durable=journal.path is not None,
            declared=declared,
        )


def _promises(row: Row) -> bool:
    return row.kind == "promise"


def _charges(rows: Sequence[Row]) -> tuple[Charge, ...]:
    """Return the charges that were not refunded, in order."""
    held: dict[int, Charge] = {}
    for row in rows:
        if row.kind == "charge":
            held[row.seq] = Charge(decode(row.body["event"]), int(row.body["count"]))
        elif row.kind == "refund":
            of = int(row.body["of"])
            held[of] = replace(held[of], count=held[of].count - int(row.body["count"]))
    return tuple(charge for charge in held.values() if charge.count)


def _rule_of(said: Guarantee, otherwise: Filter) -> Filter:
    """Return the filter of the part that a guarantee is about, by default the ledger's own."""
    kind = FILTERS.get(said.accountant)
    if kind is None or not math.isfinite(said.epsilon):
        return otherwise
    return kind(Budget(said.epsilon, said.delta, said.adjacency, said.unit, said.observer))


def priced(event: Event) -> str:
    """Return a description of an event.

    >>> priced(PoissonEvent(0.01, GaussianEvent(1.1)))
    'Gaussian noise 1.1 × bound, on a Poisson sample of rate 0.01'
    """
    match event:
        case GaussianEvent(noise):
            return f"Gaussian noise {number(noise)} × bound"
        case LaplaceEvent(noise):
            return f"Laplace noise {number(noise)} × bound"
        case PureEvent(epsilon):
            return f"an answer of ε {number(epsilon)}"
        case BoundedRangeEvent(epsilon):
            return f"a noisy choice of ε {number(epsilon)}"
        case ZcdpEvent(rho, delta):
            return f"zCDP of ρ {number(rho)}" + (f" and δ {number(delta)}" if delta else "")
        case ApproximateEvent(epsilon, delta):
            return f"a part of ε {number(epsilon)}, δ {number(delta)}"
        case PoissonEvent(rate, inner):
            return f"{priced(inner)}, on a Poisson sample of rate {number(rate)}"
        case TruncatedEvent(rate, size, _, inner):
            return f"{priced(inner)}, on a Poisson sample of rate {number(rate)}, of {size:,} at most"
        case FixedSizeEvent(size, of, inner):
            return f"{priced(inner)}, on {size:,} of {of:,} records"
        case DrawnEvent(rate, inner):
            return f"{priced(inner)}, drawn openly with probability {number(rate)}"
        case BalancedEvent(bins, inner):
            return f"{priced(inner)}, in one of {bins:,} turns"
        case RepeatedEvent(inner, count):
            return f"{count:,} × {priced(inner)}"
        case ComposedEvent(events):
            return " and ".join(map(priced, events))
        case PersonalEvent(events):
            return f"by level of budget: {'; '.join(priced(own) or 'nothing' for own in events)}"
        case TurnEvent(inner, turns):
            return f"one of {turns:,} turns that cost {priced(inner)} together"
        case TuningEvent(inner, mean):
            return f"the best of about {number(mean)} runs ({priced(inner)} each), how many being random"


def noise_of(event: Event) -> float | None:
    """Return the noise multiplier, where an event has one."""
    match event:
        case GaussianEvent(noise) | LaplaceEvent(noise):
            return noise
        case PoissonEvent() | TruncatedEvent() | FixedSizeEvent() | DrawnEvent():
            return noise_of(event.event)
        case BalancedEvent() | RepeatedEvent():
            return noise_of(event.event)
    return None
