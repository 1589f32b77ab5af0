"""Format the facts of a ledger for the command line.

Reading never creates or changes a ledger: where there is no journal with its head, nothing is opened.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from decimal import ROUND_CEILING, Context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farthing.budget import Budget, Guarantee
from farthing.cli.options import near
from farthing.errors import InvalidValue, LedgerLocked
from farthing.ledger.journal import Journal
from farthing.queries.events import decode
from farthing.validate import counted

if TYPE_CHECKING:
    from farthing.ledger.ledger import Ledger

_SQLITE = b"SQLite format 3\0"


_CONTROL = {code: ascii(chr(code))[1:-1] for code in (*range(32), *range(127, 160), 0x2028, 0x2029)}


def aligned(fields: dict[str, Any]) -> str:
    """Return names and values in two columns; a list takes one line per item, an empty value none.

    Line breaks and other control characters within them are escaped.

    >>> aligned({"a\\nb": "x", "c": ["1", "2"]})
    'a\\\\nb  x\\nc     1\\n      2'
    """
    shown = {name.translate(_CONTROL): value for name, value in fields.items()}
    width = max(map(len, shown)) + 2
    lines = []
    for name, value in shown.items():
        for item in value if isinstance(value, list) else [value]:
            if item not in ("", None):
                lines.append(f"{name:{width}}{str(item).translate(_CONTROL)}")
                name = ""
    return "\n".join(lines)


def rounded_up(value: float, digits: int = 6) -> str:
    """Return so many significant digits, rounded up.

    >>> rounded_up(0.94686677)
    '0.946867'
    >>> rounded_up(1.0000001)
    '1.00001'
    """
    return f"{float(Context(prec=digits, rounding=ROUND_CEILING).create_decimal(repr(value))):.{digits}g}"


def open_journal(file: Path) -> Journal:
    """Return the verified journal at ``file``; refuse a missing one before anything is created."""
    head = Path(f"{file}.head")
    try:
        if not file.is_file():
            if head.exists():
                raise LedgerLocked(f"the ledger {str(file)!r} is missing, only its head is there")
            if file.is_dir():
                found = sorted(str(one) for one in file.glob("*.ledger"))
                such = f", such as {found[-1]!r}" if found else ""
                raise InvalidValue(f"{str(file)!r} is a folder: name the ledger file itself{such}")
            raise InvalidValue(f"there is no ledger {str(file)!r}{near(str(file))}")
        if not head.is_file():
            with file.open("rb") as opened:
                if opened.read(len(_SQLITE)) != _SQLITE:
                    raise InvalidValue(f"{str(file)!r} is not a ledger")
            raise LedgerLocked(
                f"{str(file)!r} lacks its second file, {head.name}: a ledger consists of both files"
            )
        if not all(os.access(one, os.R_OK | os.W_OK) for one in (file, head, file.absolute().parent)):
            raise InvalidValue(
                f"the ledger {str(file)!r} is read-only here, and reading it takes a lock: copy it, with all "
                f"files that begin with {file.name}, into a folder that you can write to, and name the copy"
            )
    except OSError as error:
        raise InvalidValue(f"the ledger {str(file)!r} cannot be read: {error.strerror}") from None
    return Journal(file)


def ledger(file: Path) -> dict[str, Any]:
    """Return budget, filter, plan, charges, spend, guarantee and rows of the ledger at ``file``."""
    from farthing.ledger.ledger import Ledger

    open_journal(file).close()
    with Ledger.open(file) as opened:
        rows = opened.journal
        kinds: Counter[str] = Counter()
        charged: Counter[str] = Counter()
        promised: dict[str, int] = {}
        for row in rows.rows():
            kinds[row.kind] += 1
            if row.kind == "promise":
                promised[_key(row.body)] = row.body["times"]
            elif row.kind in ("charge", "refund"):
                charged[_key(row.body)] += row.body["count"] * (1 if row.kind == "charge" else -1)
        return {
            "file": str(file),
            "budget": asdict(opened.budget),
            "filter": rows.header["filter"],
            "plan": [{"event": json.loads(event), "times": times} for event, times in promised.items()],
            "charged": [{"event": json.loads(event), "count": count} for event, count in charged.items()],
            "share": opened.share,
            "spent": _statement(opened.spent),
            "guarantee": _statement(opened.guarantee),
            **_levels(opened),
            "rows": sum(kinds.values()),
            "kinds": dict(kinds),
            "head": rows.last().hash,
        }


def _levels(opened: "Ledger") -> dict[str, Any]:
    """Return the guarantee of each level of budget, if there are several."""
    from farthing.ledger import levels

    said, spent = opened.guarantees, levels.spent(opened._books)
    if len(said) == 1:
        return {}
    each = [(level, said[level].epsilon, spent[level].epsilon) for level in said]
    return {"levels": [{"budget": level, "epsilon": all_, "spent": now} for level, all_, now in each]}


def _key(body: dict[str, Any]) -> str:
    return json.dumps(body["event"], sort_keys=True)


def _statement(guarantee: Guarantee) -> dict[str, Any]:
    fields = asdict(guarantee)
    if not math.isfinite(guarantee.epsilon):
        fields["epsilon"], fields["note"] = None, guarantee.note or "nothing is promised: epsilon is infinite"
    return fields


def ledger_lines(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the words for what `ledger` found."""
    from farthing.report.subject import priced

    plan, rule = fields["plan"], f"the {fields['filter']['name']} filter"
    whole = fields["spent"]["epsilon"] is not None and fields["share"] >= 1
    return {
        "ledger": fields["file"],
        "budget": str(Budget(**fields["budget"])),
        "spent by": f"a promised plan of {counted(len(plan), 'kind')} of answers" if plan else rule,
        "promised": [f"{part['times']:,} x {priced(decode(part['event']))}" for part in plan],
        "charged": [f"{part['count']:,} x {priced(decode(part['event']))}" for part in fields["charged"]]
        or "nothing",
        "share": f"{fields['share']:.2%} of the budget is charged",
        "spent": "the whole budget" if whole else list(_words(fields["spent"])),
        "guarantee": list(_words(fields["guarantee"])),
        **_whom(fields),
        "rows": f"{fields['rows']}: {', '.join(f'{n} {kind}' for kind, n in fields['kinds'].items())}",
        "head": fields["head"],
    }


def _whom(fields: dict[str, Any]) -> dict[str, list[str]]:
    """Return the guarantee of each level of budget as text, if there are several."""
    return {"for whom": [_level_words(**one) for one in fields["levels"]]} if "levels" in fields else {}


def _level_words(budget: float, epsilon: float, spent: float | None = None) -> str:
    if epsilon == 0:
        return f"budget {budget:g}: takes no part, so nothing about these records is released"
    now = "" if spent is None else f", {rounded_up(spent) if spent else 0} spent"
    return f"budget {budget:g}: epsilon {rounded_up(epsilon)} in all{now}"


def _words(said: dict[str, Any]) -> Iterator[str]:
    size = "no guarantee"
    if said["epsilon"] is not None:
        size = f"({rounded_up(said['epsilon'])}, {said['delta']:g})-DP"
    whom = f"{said['adjacency']}, per {said['unit']}, against {said['observer']}"
    yield f"{size}, {whom}, by {said['accountant']}"
    yield said["theorem"]
    yield said["note"]


_STATED = ("epsilon", "delta", "adjacency", "unit", "observer", "accountant", "theorem", "note")


def nested(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields with those of a guarantee in one object, as every command prints it."""
    said = {name: fields[name] for name in _STATED if name in fields}
    return {"guarantee": said, **{name: value for name, value in fields.items() if name not in said}}


def statement_words(fields: dict[str, Any]) -> list[str]:
    """Return the lines of a guarantee."""
    return list(_words(fields))


_UNMEASURED = {
    "test": "none; --holdout 0.2 measures the model within the budget, and tells if the schema fits the table"
}


def trained_lines(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the result of `farthing.cli.training.train` as text."""
    words = {
        "model": [fields["model"], *(fields[form] for form in ("skops", "onnx") if form in fields)],
        "guarantee": list(_words(fields["guarantee"])),
        **_whom(fields),
        "spent": "",
        "method": f"{_method(fields)}, {counted(fields['steps'], 'step')}",
        "records": f"{fields['records']:,}, with {counted(fields['features'], 'feature')}",
        "ledger": fields["ledger"],
        "report": fields.get("report"),
    }
    if fields["partial"]:
        spent = fields["spent"]
        words["spent"] = [f"epsilon {rounded_up(spent['epsilon'])} until training was stopped", spent["note"]]
    unmeasured = {} if {"unmeasured", "levels"} & fields.keys() else _UNMEASURED
    return words | (_test_words(fields) or unmeasured)


def rehearsed_lines(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the result of `farthing.cli.training.rehearse` as text."""
    before, after = fields["share"]
    answers = sum(part["times"] for part in fields["answers"])
    return {
        "price": list(_words(fields["guarantee"])),
        **_whom(fields),
        "method": f"{_method(fields)}, {counted(fields['steps'], 'step')}, {counted(answers, 'answer')}",
        "records": f"{fields['records']:,}, with {counted(fields['features'], 'feature')}",
        "ledger": f"{fields['ledger']}: {before:.2%} spent before, {after:.2%} after",
        "noise": [*map(_noise_words, fields["answers"]), f"({fields['expected']})"],
        "note": "nothing was spent or written; only the header and the number of records were read"
        + (", and the budgets" if "levels" in fields else ""),
    }


def _method(fields: dict[str, Any]) -> str:
    """Return a method's name with its settings."""
    words = ", ".join((fields["method"], *(f"{name}={value}" for name, value in fields["settings"].items())))
    return f"{words} ({fields['choice']})" if "choice" in fields else f"{fields['trained']}, {words}"


def _noise_words(part: dict[str, Any]) -> str:
    deviation, noise, clip = (_range(part[name]) for name in ("deviation", "noise_multiplier", "clip_norm"))
    amount = f"standard deviation {deviation} per coordinate, {noise} x the clipping norm {clip}"
    return f"{part['times']:,} x {part['what']} of {part['sampler']}: {amount} ({part['mechanism']})"


def _range(ends: Sequence[float]) -> str:
    low, high = (f"{end:.4g}" for end in ends)
    return low if low == high else f"{low} to {high}"


_FIGURES = {
    "guessing": "most frequent label",
    "auc": "AUC",
    "rmse": "RMSE",
    "rmse_of_mean": "RMSE of the mean",
}


def _test_words(fields: dict[str, Any]) -> dict[str, Any]:
    if "test" not in fields:
        return {}
    test = dict(fields["test"])
    name, note = test.pop("table"), test.pop("note")
    test.pop("verdict", None)
    figures = ", ".join(
        f"{_FIGURES.get(what, what.replace('_', ' '))} {value:.4g}"
        for what, value in test.items()
        if what not in ("records", "expected")
    )
    where = (
        "about {:,} held-out records" if "standard_error" in test else "the {:,} records"
    )  # a noisy number
    return {"test": [f"{figures} on {where.format(test['records'])} of {name}", f"({note})"]}


def simulated_lines(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the result of `farthing.federated.jobs.simulate` as text."""
    records = f"{fields['records']:,} records of {fields['features']:,} features"
    words = {
        "clients": f"{fields['clients']:,}, with {records}",
        "method": fields["method"],
        "rounds": f"{fields['rounds']:,}: {fields['stopped']}",
    }
    said = fields["guarantee"]
    if said["epsilon"] is None:
        words["guarantee"] = f"none: {said['note']}"
        return words | _test_words(fields)
    owner = "for each client"
    if fields["smallest_epsilon"] < said["epsilon"]:
        owner = (
            f"each client has its own guarantee; this is the weakest, the strongest has epsilon "
            f"{fields['smallest_epsilon']:g}"
        )
    noise, clip = fields["noise_multiplier"], fields["clip_norm"]
    trust = f"{fields['trust']} noise, {noise:.6g} x the clipping norm {clip:.4g}"
    if "survivors" in fields:
        trust += f" in any sum over {fields['survivors']:,} honest clients"
    return {
        **words,
        "guarantee": [*_words(said), owner],
        **({"noise": _published_words(fields["holds"])} if "holds" in fields else {}),
        "trust": trust,
        "left": f"{counted(fields['alive'], 'client')} with budget left, {fields['left']:.1%} of all rounds",
        **_test_words(fields),
    }


def _published_words(found: list[dict[str, Any]]) -> list[str]:
    """Return the true guarantee of published noise, one line per observer."""
    lines = [
        f"epsilon {one['epsilon']:.4g} against {one['observer']}, {one['adjacency']}: {one['note']}"
        for one in found
    ]
    return ["as published, which gives", *lines]


def verification(file: Path) -> dict[str, Any]:
    """Check that the ledger's files agree with each other, and its spend with its rows.

    LedgerLocked if the files do not agree. The spend is recomputed by `farthing.ledger.verifier`, which
    shares no code with the ledger.
    """
    with open_journal(file) as rows:
        last = rows.verify()
        lines = [json.dumps(asdict(row)) for row in rows.rows() if row.seq <= last.seq]
        budget = rows.header.get("budget")
    fields: dict[str, Any] = {"file": str(file), "ok": True, "rows": last.seq + 1, "head": last.hash}
    try:
        from farthing.ledger import verifier
    except ImportError:
        return {
            **fields,
            "verdict": "OK: hash chain, head and answers are consistent",
            "note": "spend not recomputed",
        }
    found = verifier.verify(lines, last.hash)
    return {
        **fields,
        "ok": found.code == 0,
        "verdict": found.reason,
        "budget": budget,
        "rule": found.rule,
        "charged": [{"event": json.loads(event), "count": count} for event, count in found.charged.items()],
        "spent_between": _finite(found.spent),
        "plan_between": _finite(found.plan),
        **(
            {"levels_between": {f"{level:g}": _finite(ends) for level, ends in found.levels.items()}}
            if found.levels
            else {}
        ),
        **(
            {"refunded": found.trust, "unrefunded_between": _finite(found.unrefunded)}
            if found.refunded
            else {}
        ),
    }


def _finite(interval: tuple[float, float] | None) -> list[float | None] | None:
    return None if interval is None else [end if math.isfinite(end) else None for end in interval]


def verification_lines(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the result of `verification` as text."""
    apart = ("ok", "verdict", "refunded", "unrefunded_between")
    words = {name.removesuffix("_between"): value for name, value in fields.items() if name not in apart}
    if "refunded" in fields:
        words["trusted"] = fields["refunded"]
    if "budget" in words:
        words["budget"] = _budget(words["budget"])
        words["charged"] = [f"{one['count']} x {_compact(one['event'])}" for one in words["charged"]]
    for name in ("spent", "plan"):
        if words.get(name) is not None:
            words[name] = _between(*words[name])
    if "levels" in words:
        each = words["levels"].items()
        words["levels"] = [f"budget {level}: {_between(*ends)}" for level, ends in each]
    return {**words, "verdict": fields["verdict"]}


def _budget(said: Any) -> str:
    """Return a budget as text, also from a damaged ledger."""
    try:
        return str(Budget(**said))
    except (InvalidValue, TypeError):
        return "unknown"


def _compact(event: Any) -> str:
    return json.dumps(event, sort_keys=True, separators=(",", ":"))


def _between(low: float | None, high: float | None) -> str:
    """Return an ε between two bounds as text; a missing bound is infinite.

    >>> _between(1.0, 1.0), _between(0.5, None), _between(-1e-9, 0.0)
    ('epsilon 1', 'epsilon between 0.5 and infinity', 'epsilon 0')
    """
    first, last = ("infinity" if end is None else f"{max(end, 0.0):.6g}" for end in (low, high))
    return f"epsilon {first}" if first == last else f"epsilon between {first} and {last}"
