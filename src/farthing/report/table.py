"""The hashed ledger as a table: what was charged when, and the chain that holds it together.

A long one shows its first and last rows and folds the rest away; a very long one says how many it leaves out
(``farthing ledger export`` has them all).
"""

from collections.abc import Iterable, Sequence

from farthing.accounting.filters import Filter
from farthing.ledger.books import rule_of
from farthing.ledger.journal import Row
from farthing.queries.events import decode
from farthing.report.words import escape, number, percent, priced

_FIRST, _LAST = 10, 6  # rows of a long ledger that are always shown
_FOLDED = 500  # rows that are folded away and still in the page

_HEADS = (("#", "n"), ("time (UTC)", ""), ("kind", ""), ("what", ""), ("charged so far", "n"), ("hash", ""))


def table(rows: Sequence[Row]) -> str:
    """All rows as HTML, the middle of a long ledger folded."""
    rule = rule_of(rows[0].body)
    promised = [int(row.body["times"]) for row in rows if row.kind == "promise"]
    if len(rows) <= _FIRST + _LAST + 4:
        return _scrolled(_body(rows, rule, promised), "The ledger, row by row")
    middle = rows[_FIRST:-_LAST]
    shown, out = middle[:_FOLDED], max(0, len(middle) - _FOLDED)
    more = f"<p>{out:,} more rows are left out here; the ledger's export has them.</p>" if out else ""
    return (
        _scrolled(_body(rows[:_FIRST], rule, promised), "The first rows of the ledger")
        + f"<details><summary>{len(middle):,} rows between</summary>"
        + _scrolled(_body(shown, rule, promised), "Rows between")
        + more
        + "</details>"
        + _scrolled(_body(rows[-_LAST:], rule, promised), "The last rows of the ledger")
    )


def _scrolled(body: Iterable[str], label: str) -> str:
    heads = "".join(f'<th scope="col" class="{kind}">{name}</th>' for name, kind in _HEADS)
    return (
        f'<div class="scroll" role="region" aria-label="{escape(label)}" tabindex="0"><table class="ledger">'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _body(rows: Sequence[Row], rule: Filter, promised: Sequence[int]) -> Iterable[str]:
    for row in rows:
        yield (
            f'<tr><td class="n">{row.seq:,}</td><td>{escape(row.time[:19].replace("T", " "))}</td>'
            f"<td>{escape(row.kind)}</td><td>{escape(what(row))}</td>"
            f'<td class="n">{_share(row, rule, promised)}</td>'
            f"<td><code>{escape(row.hash[:12])}</code></td></tr>"
        )


def what(row: Row) -> str:
    """What a row says, in words."""
    body = row.body
    match row.kind:
        case "open":
            budget = body["budget"]
            size = f"ε {number(budget['epsilon'])}, δ {number(budget['delta'])}"
            return (
                f"budget {size}, {budget['adjacency']}, per {budget['unit']}, {body['filter']['name']} filter"
            )
        case "promise":
            return f"{body['times']:,} × {priced(decode(body['event']))}"
        case "charge" | "refund":
            of = f", of row {body['of']:,}" if row.kind == "refund" else ""
            key = f", under the key {body['answer']['key']}" if "answer" in body else ""
            return f"{body['count']:,} × {priced(decode(body['event']))}{of}{key}"
        case "release":
            return f"the answer under the key {body['answer']['key']}"
    return ", ".join(f"{name}: {value}" for name, value in body.items())


def _share(row: Row, rule: Filter, promised: Sequence[int]) -> str:
    width = len(rule.start())
    totals, counts = row.state[:width], row.state[width:]
    if not row.state:
        return ""
    if counts:
        return percent(sum(counts) / sum(promised[: len(counts)]))
    return percent(rule.share(totals))
