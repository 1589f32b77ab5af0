"""Check laws of data entry: no record decides whether an input is refused, or how a guard replies.

`refusals`: each entry point is tried on a table and on its neighbour with one odd record more. Both calls
must end in the same way, with an answer or with the same error, and no message may contain anything of the
record.

`replies`: guards over neighbouring records get the same conversation, with every kind of message that a guard
knows and some that it does not: hello, proposals, questions about every loss at usual, extreme and ill-shaped
weights, repeated questions, and a session of secure aggregation step by step. Data sets that differ in one
record (removed, another label, an unknown label, NaN, values that overflow) must get replies that are equal
except for the noise, and none may be `internal`.
"""

import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.budget import Budget
from farthing.data.schema import Categorical, Numeric, Schema
from farthing.data.tables import Features, Table
from farthing.deploy.guard.keeper import Guard
from farthing.deploy.guard.policy import Limits, Policy
from farthing.deploy.messages import forms
from farthing.deploy.messages.forms import LOSSES, Question, RoundId
from farthing.deploy.messages.signed import (
    MessageKind,
    Opened,
    Reason,
    Signer,
    digest,
    pack_numbers,
    pack_table,
    seal,
    unpack_table,
    unseal,
)
from farthing.deploy.secagg.protocol import SEALED, Member, session_of
from farthing.errors import FarthingError
from farthing.federated.simulated import Simulated
from farthing.federated.terms import Draw, Exactly, Invitation, Trust
from farthing.ledger.ledger import Ledger
from farthing.linear.estimators import LinearRegression, LinearSVC, LogisticRegression
from farthing.linear.losses import LinearGradient, multinomial
from farthing.linear.preprocessing import PCA
from farthing.linear.selection import PrivateScore
from farthing.queries.arrays import attempt
from farthing.queries.bounds import ClipNorm
from farthing.queries.correlated import Cyclic
from farthing.queries.samplers import Everyone, Poisson

MARK = 918273645  # values that no message may contain
_ROWS, _WIDTH = 12, 3
_VALUES = (float(MARK), float("nan"), float("inf"))
_CELLS = (str(MARK), f"word {MARK}", "", "1e999")

Entrance = Callable[[Any, Any], Any]


class _Answers:
    """A model that always predicts one answer."""

    def predict(self, X: Any) -> Any:
        return np.zeros(len(X), int)


def outcome(entrance: Entrance, X: Any, y: Any) -> tuple[str, str]:
    """Return how a call ends, and everything that a traceback would show of an error."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            entrance(X, y)
        except Exception as error:
            own = isinstance(error, FarthingError)
            shown = [str(error), *traceback.format_exception_only(error), *_chained(error)]
            return ("refused: " if own else "failed: ") + str(error), "".join(shown)
    told = "".join(str(warning.message) for warning in said)
    return f"answered {told}", told


def _chained(error: BaseException) -> list[str]:
    """Return the causes and contexts of an error, printed or not."""
    behind = [each for each in (error.__cause__, error.__context__) if each is not None]
    return [text for each in behind for text in (str(each), *_chained(each))]


def _spent() -> Ledger:
    return Ledger(Budget(1.0, 1e-5))


_SCHEMA = Schema((Numeric("a", 0, 1), Categorical("b", ("no", "yes"))), Categorical("c", ("no", "yes")))


def _through_a_schema(X: Any, y: Any) -> Any:
    table = {"a": X, "b": X, "c": y}
    codes = _SCHEMA.encode_target(table)
    model = LogisticRegression(ledger=_spent(), bounds=(0, 1), records=_ROWS)
    return model.fit(_SCHEMA.encode(table), codes)


def entrances() -> dict[str, Entrance]:
    """Return every entry point that takes arrays, with the number of records declared."""
    return {
        "LogisticRegression": lambda X, y: LogisticRegression(ledger=_spent(), records=_ROWS).fit(X, y),
        "LinearSVC": lambda X, y: LinearSVC(ledger=_spent(), records=_ROWS, bounds=(0, 1)).fit(X, y),
        "LinearRegression": lambda X, y: LinearRegression(
            ledger=_spent(), records=_ROWS, bounds=(0, 1), target_bounds=(0, 1)
        ).fit(X, y),
        "PCA": lambda X, y: PCA(1, ledger=_spent(), records=_ROWS).fit(X),
        "PrivateScore": lambda X, y: PrivateScore(_spent(), 0.1, 1e-6, records=_ROWS)(_Answers(), X, y),
        "Simulated": lambda X, y: Simulated.split(X, y, clients=2, budgets=Budget(1.0, 1e-5)),
    }


def refusals() -> list[str]:
    """Check that a table and its neighbour with an odd record end alike, and that no message quotes it."""
    rng = np.arange(_ROWS * _WIDTH, dtype=np.float64).reshape(_ROWS, _WIDTH) % 7 / 7
    labels = np.arange(_ROWS) % 2.0
    complaints = []
    for name, entrance in entrances().items():
        usual = outcome(entrance, rng, labels)[0]
        for value in _VALUES:
            odd = (np.vstack([rng, np.full(_WIDTH, value)]), np.append(labels, 1.0))
            other = (np.vstack([rng, np.full(_WIDTH, 0.5)]), np.append(labels, value))
            complaints += _compared(name, entrance, usual, (odd, other))
    cells, texts = np.array(["0.5"] * 2, dtype=object), np.array(["no", "yes"], dtype=object)
    usual = outcome(_through_a_schema, cells, texts)[0]
    for cell in _CELLS:
        pairs = (
            (np.append(cells, cell), np.append(texts, "no")),
            (np.append(cells, "0.5"), np.append(texts, cell)),
        )
        complaints += _compared("a schema", _through_a_schema, usual, pairs)
    complaints += _counted()
    try:
        attempt(float, f"word {MARK}", said="no number")
    except FarthingError as error:
        complaints += [f"an error of another library is passed on: {each}" for each in _chained(error)]
    return sorted(set(complaints))


def _compared(name: str, entrance: Entrance, usual: str, pairs: Any) -> list[str]:
    complaints = []
    for X, y in pairs:
        ended, shown = outcome(entrance, X, y)
        if ended != usual:
            complaints.append(f"one record decides how {name} ends: {ended.split(':')[0]}")
        if str(MARK) in shown:
            complaints.append(f"a message of {name} quotes a record")
    return complaints


def _counted() -> list[str]:
    """Check that a perfect score hides the number of rows, and that values taken as public are recorded."""
    complaints = []
    scores = [
        PrivateScore(Ledger(Budget(1e6, 1e-5)), 1e5, 1e-6, records=4)(
            _Answers(), np.zeros((n, 1)), np.zeros(n)
        )
        for n in (3, 4)
    ]
    if abs(scores[1] - scores[0] - 0.25) > 0.1:
        complaints.append("a score is divided by the realised number of rows")
    ledger = _spent()
    LogisticRegression(0.5, 1e-6, ledger=ledger).fit(np.eye(4), [0, 1, 0, 1])
    if "public" not in ledger.guarantee.note:
        complaints.append("a guarantee does not say that the number of records was taken as public")
    return complaints


Array = NDArray[np.float64]
Neighbour = tuple[str, Array, Array]

_INPUTS, _CLASSES, _NOISE = 2, 3, 500.0
_DRAWS: tuple[Draw, ...] = (Everyone(), Poisson(0.5), Exactly(1), Cyclic(0.25, 2))
_ALL, _FEW = "all", 3  # neighbours tried for other draws and for sessions
_LARGEST = 10**6
_NOT_PUBLIC = ("about", "update", "weights", "head")  # digests of noise, and hashes that contain the time


def neighbours() -> Iterator[Neighbour]:
    """Return records, and then data sets that differ from them in one record."""
    X = np.linspace(0.0, 1.0, 16).reshape(8, _INPUTS)
    y = np.array([0.0, 1.0, 2.0, 1.0, 0.0, 2.0, 1.0, 0.0])
    yield "as they are", X, y
    yield "one record is gone", X[:-1], y[:-1]
    for label in (77.0, np.nan, 1.0, 2.0, -1.0, 0.5, np.inf, 1e308):
        yield f"label {label:g}", X, np.append(y[:-1], label)
    for value in (1e308, -1e200, 5e-324):
        yield f"features {value:g}", np.vstack([X[:-1], np.full((1, _INPUTS), value)]), y


@dataclass(frozen=True, slots=True)
class GuardReply:
    """The part of a reply that does not depend on noise."""

    what: str
    kind: MessageKind
    reason: str
    size: int
    numbers: str


@dataclass(eq=False)
class Conversation:
    """A conversation of one coordinator with one guard; ``replies`` lists what came back."""

    guard: Guard
    coordinator: Signer
    replies: list[GuardReply] = field(default_factory=list)

    def ask(self, what: str, kind: MessageKind, header: dict[str, Any], body: bytes = b"") -> Opened:
        return self.send(what, seal(kind, header, body, self.coordinator))

    def send(self, what: str, message: bytes) -> Opened:
        data = self.guard.answer(message)
        found = unseal(data, {self.guard.public}, _LARGEST)
        told = {name: value for name, value in found.fields().plain().items() if name not in _NOT_PUBLIC}
        told["row"] = told["row"][0] if "row" in told else None
        reason = str(told.get("reason", ""))
        self.replies.append(
            GuardReply(what, found.kind, reason, len(data), repr(sorted(told.items(), key=str)))
        )
        return found


Script = Callable[[Conversation], None]


def _header(number: int, kind: str, draw: Draw = _DRAWS[0], w: Array | None = None, **more: Any) -> Any:
    """Return header and body of a question."""
    w = np.zeros(_INPUTS + 1) if w is None else w
    features = Features(_INPUTS, intercept=more.pop("intercept", 1.0), radius=more.pop("radius", None))
    invitation = _invitation(draw, **more)
    turn = RoundId("run", number, f"{number:032x}")
    return Question(
        turn, "d", invitation, LinearGradient(LOSSES[kind], features), w.shape
    ).header(), pack_numbers(w)


def _invitation(draw: Draw, **more: Any) -> Invitation:
    """Return terms: noise is correlated over rounds where records take turns in groups."""
    if isinstance(draw, Cyclic):
        return Invitation(1.0, draw, 100, noise_multiplier=_NOISE, bands=draw.groups, **more)
    return Invitation(1.0, draw, 1000, noise_multiplier=_NOISE, **more)


def plain_talk(draw: Draw) -> Script:
    """Return every message under local noise, with one draw."""

    def talk(to: Conversation) -> None:
        start = {"run": "run", "round": 0, "nonce": "0" * 32, "dataset": "d"}
        to.ask("hello", MessageKind.HELLO, start)
        terms = forms.invitation(_invitation(draw))
        to.ask("a proposal", MessageKind.PROPOSAL, start | {"invitation": terms})
        number = 0
        for kind in LOSSES:
            shape = (_INPUTS + 1, _CLASSES) if kind == "multinomial" else (_INPUTS + 1,)
            for size in (0.0, 1e300):
                number += 1
                to.ask(
                    f"{kind} at {size:g}",
                    MessageKind.QUESTION,
                    *_header(number, kind, draw, np.full(shape, size)),
                )
            for other in (
                (_INPUTS + 1, 2),
                (_INPUTS + 1, 1),
                (_INPUTS + 1,),
                (_INPUTS,),
                (_INPUTS, _CLASSES),
            ):
                if other != shape and (kind == "multinomial" or len(other) == 1):
                    number += 1
                    w = np.zeros(other)
                    to.ask(f"{kind} with {other}", MessageKind.QUESTION, *_header(number, kind, draw, w))
        more = _header(number + 1, "logistic", draw, np.ones(_INPUTS + 1), radius=1.0)
        to.ask("within a radius", MessageKind.QUESTION, *more)
        to.ask("the same again", MessageKind.QUESTION, *more)
        to.ask("a conflict", MessageKind.QUESTION, *_header(number + 1, "logistic", draw))
        to.ask("an old round", MessageKind.QUESTION, *_header(1, "squared", draw))
        for kind_ in MessageKind:
            to.ask(f"an empty {kind_.name}", kind_, {})
        to.send("nonsense", b"?" * 99)

    return talk


def session_talk(
    to: Conversation, others: dict[str, Signer], enrolled: dict[str, bytes], draw: Draw = _DRAWS[0]
) -> None:
    """Run a session of secure aggregation with two other parties, including messages to be refused."""
    weights = pack_numbers(np.zeros(_INPUTS + 1))
    header = _header(1, "logistic", draw, trust=Trust.DISTRIBUTED, survivors=2)[0]
    header["weights"] = digest(weights)
    if isinstance(draw, Cyclic):
        header["first"] = 3  # three turns of the plan are forfeited
    turn = {name: header[name] for name in ("run", "round", "nonce")}
    session, count = session_of(header), len(enrolled)
    members = {
        name: Member(session, name, signer, enrolled, survivors=2, colluding=0)
        for name, signer in others.items()
    }
    adverts = {name: member.advertise() for name, member in members.items()}
    adverts["p0"] = to.ask("an opening", MessageKind.OPENING, header).body
    threshold = turn | {"threshold": count}
    to.ask("a roster without us", MessageKind.ROSTER, threshold, pack_table({"p1": adverts["p1"]}))
    sealed = to.ask("a roster", MessageKind.ROSTER, threshold, pack_table(adverts)).body
    boxes = {name: member.share(adverts, count) for name, member in members.items()}
    table = pack_table({name: given["p0"] for name, given in boxes.items()})
    asked = turn | {"table": len(table), "each": 8}
    to.ask("other weights", MessageKind.MASKED_QUESTION, asked, table + pack_numbers(np.ones(_INPUTS + 1)))
    to.ask("a masked question", MessageKind.MASKED_QUESTION, asked, table + weights)
    ours = unpack_table(sealed, count, (SEALED,))
    for name, member in members.items():
        given = {other: box[name] for other, box in boxes.items() if other != name} | {"p0": ours[name]}
        member.mask(given, _INPUTS + 1)
    to.ask("too few survivors", MessageKind.SURVIVORS, turn, pack_table({"p0": b""}))
    signed = to.ask("survivors", MessageKind.SURVIVORS, turn, pack_table(dict.fromkeys(enrolled, b""))).body
    consents = {name: member.consent(list(enrolled)) for name, member in members.items()} | {"p0": signed}
    to.ask("too few consents", MessageKind.REVEAL, turn, pack_table({"p0": signed}))
    to.ask("consents", MessageKind.REVEAL, turn, pack_table(consents))
    to.ask("the same round again", MessageKind.OPENING, header | {"seen": [0, "0" * 64]})


def kept(folder: Path, records: Neighbour, trust: Trust, keys: dict[str, Signer]) -> Guard:
    """Open a guard over these records, with a ledger in this folder."""
    _, X, y = records
    policy = Policy(
        dataset="d",
        records=folder / "records",
        size=8,
        ledger=folder / "ledger",
        socket=folder / "socket",
        key=folder / "key",
        coordinators=(keys["coordinator"].public,),
        budget=Budget(1.0, 1e-6, observer=trust.observer),
        limits=Limits(
            noise=0.5,
            clip=3.0,
            rounds=1000,
            draws=_DRAWS,
            losses=tuple(LOSSES),
            width=_INPUTS,
            outputs=_CLASSES,
            trust=trust,
            evaluation=True,
            bands=2,
        ),
        parties={name: key.public for name, key in keys.items() if name != "coordinator"},
    )
    return Guard(policy, Table(X, y), keys["p0"])


def replies(folder: str) -> list[str]:
    """Return complaints: replies that differ between neighbours, and failures."""
    keys = {name: Signer.new() for name in ("coordinator", "p0", "p1", "p2")}
    enrolled = {name: keys[name].public for name in ("p0", "p1", "p2")}
    others = {name: keys[name] for name in ("p1", "p2")}
    scripts: list[tuple[str, Script, Trust]] = [
        (forms.draw(draw), plain_talk(draw), Trust.LOCAL) for draw in _DRAWS
    ]
    for draw in (_DRAWS[0], _DRAWS[-1]):
        talk = partial(session_talk, others=others, enrolled=enrolled, draw=draw)
        scripts.append((f"a session, {forms.draw(draw)}", talk, Trust.DISTRIBUTED))
    complaints = []
    for name, script, trust in scripts:
        data_sets = list(neighbours())
        data_sets = data_sets if name == _ALL else data_sets[: 1 + _FEW]  # the draw does not affect labels
        guard = partial(kept, trust=trust, keys=keys)
        complaints += differences(name, data_sets, folder, guard, script, keys["coordinator"])
    return complaints + _classes()


def differences(
    name: str,
    data_sets: Iterable[Any],
    folder: str,
    guard: Callable[[Path, Any], Guard],
    script: Script,
    coordinator: Signer,
) -> list[str]:
    """Return complaints on the replies of one ``guard(folder, records)`` per data set to the same script.

    A reply to the first data set must not be `internal`, and all others must give equal replies.
    """

    def heard(records: Any) -> list[GuardReply]:
        with tempfile.TemporaryDirectory(dir=folder) as own:
            opened = guard(Path(own), records)
            try:
                conversation = Conversation(opened, coordinator)
                script(conversation)
                opened._ledger.journal.verify()
            finally:
                opened.close()
        return conversation.replies

    first, *rest = data_sets
    expected = heard(first)
    complaints = [f"{name}: {reply.what} fails" for reply in expected if reply.reason == Reason.INTERNAL]
    for records in rest:
        pairs = zip(expected, heard(records), strict=True)
        differ = [one.what for one, other in pairs if one != other]
        complaints += [f"{name}: the reply to {what} tells of {records[0]}" for what in differ]
    return complaints


def _classes() -> list[str]:
    """Check that a record of an unknown class contributes 0, and that too few columns are refused."""
    complaints = []
    gradient, bound, w = (
        LinearGradient(multinomial, Features(_INPUTS)),
        ClipNorm(1.0),
        np.zeros((_INPUTS + 1, _CLASSES)),
    )
    for label in (77.0, -1.0, 0.5, np.nan):
        try:
            alone = gradient.bounded_sum(Table(np.ones((1, _INPUTS)), np.array([label])), w, bound)
        except Exception as error:
            complaints.append(f"a label of no class raises {type(error).__name__}")
            continue
        if alone.any():
            complaints.append("a label of no class contributes")
    limits = Limits(
        noise=0.5, clip=3.0, rounds=1000, draws=_DRAWS, losses=tuple(LOSSES), width=_INPUTS, outputs=_CLASSES
    )
    if limits.allows_shape(multinomial, _INPUTS + 1, (_INPUTS + 1, _CLASSES - 1)):
        complaints.append("weights without a column for every class are allowed")
    return complaints
