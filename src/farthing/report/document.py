"""Render the report as one HTML file, without external scripts, fonts or pictures.

It is well-formed XML, too. Its content security policy forbids scripts and external resources, so that even
an escaping mistake could not run or fetch anything.
"""

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import farthing
from farthing.report import pictures
from farthing.report.drawing import STYLE, table
from farthing.report.pictures import Picture
from farthing.report.statement import Item, Tone, headline, statement, strength, upwards
from farthing.report.subject import FederatedRun, Subject
from farthing.report.words import escape, number, percent, plain
from farthing.validate import counted

if TYPE_CHECKING:
    from farthing.audit.auditing import Verdict

_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
_POLICY = f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'"
_UNCHECKED = (
    "The schema names nobody who checked that its bounds and values are public. If one was read from the "
    "records, this guarantee is void."
)
_UNKEPT = (
    "The charges were kept in memory and ended with their process. Only this page states them: nobody can "
    "verify them, or charge later trainings to the same budget."
)
_SIGN_OFF = (
    "<section class='signoff'><h2>Sign-off</h2><p class='lead'>For the person who reviews this report. Fill "
    "it in here before printing, or on paper.</p><dl>"
    + "".join(
        f"<dt>{name}</dt><dd><input type='text' aria-label='{name}'/></dd>"
        for name in ("Reviewed by", "Role", "Date", "Purpose and recipients of the model", "Conditions")
    )
    + "</dl><p>"
    + "".join(
        f"<label><input type='checkbox'/> {what}</label>"
        for what in ("Approved", "Approved under the conditions above", "Rejected")
    )
    + "</p></section>"
)
_SHORT = 12  # rows of pairs that are printed in one column
_WARNINGS = {Tone.CALM: "", Tone.CARE: "read this", Tone.WEAK: "weak", Tone.ALARM: "no privacy"}


def page(subject: Subject) -> str:
    """Return a report as one offline HTML file.

    Parameters
    ----------
    subject : Subject
        The public facts of a run.

    Returns
    -------
    str
        Well-formed HTML without scripts or anything from elsewhere.

    Examples
    --------
    >>> import farthing as ft
    >>> page(Subject.of(ft.Ledger(ft.Budget(1.0, 1e-5)), title="Income", method="none"))[:15]
    '<!DOCTYPE html>'
    """
    drawn = pictures.pictures(subject)
    parts = [
        _banner(subject),
        _tiles(subject),
        "<h2>Privacy statement</h2>",
        _intended(subject),
        _statement(statement(subject)),
        _declared(subject),
        *([_federated(subject.federated)] if subject.federated is not None else []),
        *(["<h2>Pictures</h2>", _figures(drawn)] if drawn else []),
        _audit(subject),
        _ledger(subject),
        _SIGN_OFF,
    ]
    return _document(
        subject.title, _lead(subject), "".join(parts), _foot(subject), void=not subject.guaranteed
    )


def broken(title: str, reason: str) -> str:
    """Return the page of a damaged ledger: what is wrong with it, and nothing else.

    Parameters
    ----------
    title : str
    reason : str
        What the check of the ledger found.

    Returns
    -------
    str

    Examples
    --------
    >>> "This ledger is damaged" in broken("a.ledger", "row 3 was changed")
    True
    """
    said = (
        "<section class='banner alarm' role='alert'><strong>This ledger is damaged</strong>"
        f"<p>{escape(reason, 1000)}</p></section>"
        "<p>Nothing that it says can be relied on, so that this report says nothing of what was spent. Keep "
        "its files for inquiry, and count its whole budget as spent.</p>"
    )
    return _document(title, "A ledger that failed its check", said, "", void=True)


def audit_page(verdicts: Sequence[tuple[str, "Verdict"]], laws: Mapping[str, Sequence[str]]) -> str:
    """Return the verdicts of an audit, and the laws that it checked, as one offline HTML file.

    Parameters
    ----------
    verdicts : sequence of (str, Verdict)
        What was attacked, and what came out.
    laws : mapping of str to sequences of str
        The complaints about each law; none where it holds.

    Returns
    -------
    str

    Examples
    --------
    >>> "<td>holds</td>" in audit_page([], {"noise": []})
    True
    """
    from farthing.audit.auditing import section

    refuted = sorted({name for name, one in verdicts if one.broken} | {law for law in laws if laws[law]})
    tone, strong = (Tone.ALARM, "Broken") if refuted else (Tone.CALM, "Nothing was refuted")
    text = (
        f"These claims or laws do not hold: {', '.join(refuted)}."
        if refuted
        else "No attack refuted a claim, and no law was violated. That is not a proof."
    )
    attacks = f"<div class='scroll'>{section(verdicts, 'Attacks')}</div>" if verdicts else ""
    rows = [
        f"<tr><td>{escape(law)}</td><td>{escape('; '.join(said) or 'holds', 2000)}</td></tr>"
        for law, said in laws.items()
    ]
    checked = f"<h2>Laws</h2><table><tbody>{''.join(rows)}</tbody></table>" if rows else ""
    methods = len({name for name, _ in verdicts})
    sizes = ((methods, "method"), (len(verdicts), "attack"), (len(laws), "law"))
    lead = ", ".join(counted(size, what) for size, what in sizes if size)
    return _document(
        "farthing audit", lead, _box(tone, strong, text) + attacks + checked, "", void=False, over="Audit"
    )


def _document(title: str, lead: str, body: str, foot: str, *, void: bool, over: str = "") -> str:
    """Return an HTML document; ``void`` marks the whole page, and its title, as without a guarantee."""
    name, over = escape(title, 120), "No privacy guarantee" if void else over or "Privacy report"
    kind = " class='void'" if void else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY, 1000)}"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        '<meta name="color-scheme" content="light dark"/>'
        f"<title>{over} · {name}</title><style>{STYLE}</style></head>"
        f"<body{kind}><header><p class='over'>{over}</p><h1><bdi>{name}</bdi></h1>"
        f"<p class='lead'>{lead}</p></header>"
        f"<main>{body}</main><footer>{foot}<p>Made by farthing {escape(farthing.__version__)}.</p></footer>"
        "</body></html>\n"
    )


def _lead(subject: Subject) -> str:
    facts = [f"Method {subject.method}"] if subject.method else []
    facts.append(f"{subject.steps:,} {'step' if subject.steps == 1 else 'steps'}")
    if subject.records is not None:
        facts.append(f"{subject.records:,} records")
    if subject.features is not None:
        facts.append(f"{subject.features:,} features")
    return escape(" · ".join(facts))


def _banner(subject: Subject) -> str:
    said = subject.guarantee
    if not subject.guaranteed:
        why = (
            "An audit refuted the claim. Do not release this model as private."
            if subject.refuted
            else f"{said.note or 'nothing is promised: epsilon is infinite'}. Do not release this model as "
            "private."
        )
        why = why[0].upper() + why[1:]
        return _box(Tone.ALARM, "NO PRIVACY GUARANTEE", why)
    size = f"({upwards(said.epsilon)}, {number(said.delta)})-differential privacy"
    whom = f"{said.adjacency}, per {said.unit}, against {said.observer}"
    tone, reason = strength(said, subject.records)
    unchecked = subject.declared is not None and not subject.declared.checked_by
    tone = Tone.CARE if unchecked and tone is Tone.CALM else tone
    boxes = _box(tone, size, f"{reason} It holds under {whom}: read below what each word means.")
    if unchecked:
        boxes += _box(Tone.CARE, "Unchecked schema", _UNCHECKED)
    if not subject.durable:
        boxes += _box(Tone.CARE, "Ledger in memory", _UNKEPT)
    if subject.floats:
        boxes += _box(
            Tone.CARE,
            "Float noise",
            "The guarantee holds for real numbers; low bits of floats may reveal more.",
        )
    if subject.partial:
        text = "The run was interrupted before its end. Its model is partial; everything it spent is counted."
        boxes += _box(Tone.CARE, "Partial run", text)
    return boxes


def _box(tone: Tone, strong: str, text: str) -> str:
    role = ' role="alert"' if tone is Tone.ALARM else ""
    return (
        f'<section class="banner {tone}"{role}>'
        f"<strong>{escape(strong)}</strong><p>{escape(text, 600)}</p></section>"
    )


def _tiles(subject: Subject) -> str:
    said, sound = subject.guarantee, subject.guaranteed
    tiles = [
        ("Epsilon", upwards(said.epsilon) if sound else "infinite"),
        ("Delta", number(said.delta) if sound else "none"),
        ("Protects", f"one {said.unit}"),
        ("Budget charged", percent(subject.share)),
    ]
    items = "".join(f"<dl class='tile'><dt>{name}</dt><dd>{escape(value)}</dd></dl>" for name, value in tiles)
    return f"<div class='tiles'>{items}</div>"


def _statement(items: Iterable[Item]) -> str:
    parts = []
    for item in items:
        warning = _WARNINGS[item.tone]
        flag = f'<span class="mark {item.tone}">{warning}</span>' if warning else ""
        meaning = "".join(f"<p>{_raised(text)}</p>" for text in item.meaning)
        parts.append(
            f"<li><h3>{escape(item.name)}</h3><div><p class='value'>{flag}{_raised(item.value)}</p>"
            f"{meaning}</div></li>"
        )
    return f"<ol class='statement'>{''.join(parts)}</ol>"


def _declared(subject: Subject) -> str:
    """Return a table of what was taken as public, and the hashes of schema and model."""
    declared = subject.declared
    if declared is None:
        return ""
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(cell, 2_000)}</td>' for cell in row)}</tr>" for row in declared.rows()
    )
    people = declared.rows_per_person
    by = f"; the column {declared.user_column} identifies the person" if declared.user_column else ""
    facts = [
        ("Schema", f"{declared.source}; checked by {declared.checked_by or 'nobody'}"),
        ("SHA-256 of the schema, as the model file holds it", declared.sha256),
        ("Records", "not stated" if subject.records is None else f"{subject.records:,}"),
        ("Records of a person", "not limited" if people is None else f"at most {people:,} are used{by}"),
        ("Model file", declared.model or "not stated"),
        ("SHA-256 of the model file", declared.model_sha256 or "not stated"),
    ]
    terms = "".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    return (
        "<h2>Declared public</h2><p class='lead'>The guarantee protects records given these facts. Each has "
        "to be known without looking at the records.</p>"
        f"<dl class='facts'>{terms}</dl>"
        "<div class='scroll' role='region' aria-label='Columns' tabindex='0'><table><thead><tr>"
        "<th scope='col'>column</th><th scope='col'>role</th><th scope='col'>declared</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div>"
    )


def _intended(subject: Subject) -> str:
    if not subject.guaranteed:
        return "<p class='mark alarm'>None of this holds. It shows what would have been claimed.</p>"
    return (
        "<p class='lead'>Eleven questions that decide what a guarantee is worth, in the order of "
        "NIST SP 800-226.</p>"
    )


def _raised(text: str) -> str:
    return escape(text, 600).replace("e^ε", "e<sup>ε</sup>")


def _federated(run: FederatedRun) -> str:
    said = run.guarantee
    clients = sum(group.clients for group in run.groups)
    reached = "" if run.value is None else f" It reached {percent(run.value)} on test records."
    size = f"ε = {upwards(said.epsilon)} at most, δ = {number(said.delta)}"
    return (
        "<h2>Federated clients</h2><p class='lead'>"
        + escape(
            f"{clients:,} clients kept their records and trained with {run.method} over {run.rounds:,} "
            f"rounds, each with its own budget: {size}, {said.adjacency}, per {said.unit}, against "
            f"{said.observer}, with {run.trust} noise, by {said.accountant} ({said.theorem}).{reached}",
            900,
        )
        + "</p>"
    )


def _figures(drawn: Iterable[Picture]) -> str:
    parts = []
    for picture in drawn:
        caption = (
            f"<figcaption><h3>{escape(picture.title)}</h3><p>{escape(picture.caption, 600)}</p></figcaption>"
        )
        parts.append(f"<figure>{caption}{picture.svg}{pictures.legend(picture)}{_numbers(picture)}</figure>")
    return f"<div class='figures'>{''.join(parts)}</div>"


def _numbers(picture: Picture) -> str:
    """Return a picture's numbers as a table, for readers who cannot see it or want to check it."""
    if not picture.rows:
        return ""
    narrow = len(picture.heads) == 2  # words, or more columns, would not fit beside themselves
    kind = "scroll long" if narrow and len(picture.rows) > _SHORT else "scroll"
    heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in picture.heads)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(c)}</td>' for c in row)}</tr>" for row in picture.rows)
    return (
        f"<details><summary>The numbers</summary><div class='{kind}' tabindex='0'>"
        f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div></details>"
    )


def _audit(subject: Subject) -> str:
    if not subject.audit:
        return ""
    from farthing.audit.auditing import section

    seen = [
        (plain(name, 120), replace(one, attack=plain(one.attack), assumption=plain(one.assumption)))
        for name, one in subject.audit
    ]
    said = section(seen, title="Every attack")
    return (
        f"<h2>Audit</h2><details><summary>{counted(len(subject.audit), 'attack')}, one by one</summary>"
        f"<div class='scroll'>{said}</div></details>"
    )


def _ledger(subject: Subject) -> str:
    last = subject.rows[-1]
    return (
        "<h2>The ledger</h2><p class='lead'>"
        f"{len(subject.rows):,} rows. Each carries the hash of the one before it, so that none can be "
        f"changed or taken out unnoticed; {_written(subject)} {escape(subject.verified, 600)}</p>"
        f"{table(subject.rows)}{_newest(subject, last.hash)}"
    )


def _newest(subject: Subject, newest: str) -> str:
    check = "" if subject.durable else " (of a ledger that is gone: nothing can be compared with it)"
    return f"<p>Newest hash: <code>{escape(newest)}</code>{check}</p>"


def _written(subject: Subject) -> str:
    if subject.durable:
        return "a charge is on disk before its answer is computed."
    return "a charge is written before its answer is computed, here in memory only."


def _foot(subject: Subject) -> str:
    time = subject.rows[-1].time[:19].replace("T", " ")
    return f"<p>{escape(headline(subject))}, as of {escape(time)} UTC.</p>"
