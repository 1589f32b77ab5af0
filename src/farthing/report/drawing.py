"""Draw SVG: a frame with axes, lines, marks and text. Colours are classes, so that a page can be dark.

All text is escaped here, so that callers need not do it.

`Scale` maps values to coordinates, and chooses the values to write beside an axis.

>>> Scale(0, 1, 50, 450)(0.5)
250.0
>>> Scale(0, 1, 50, 450).ticks(5)
[0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 1.0]
>>> Scale(1e-8, 1e-2, 0, 100, log=True).ticks(4)
[1e-08, 1e-06, 0.0001, 0.01]

The style follows the reader's preference, light or dark, and adapts to paper and to phones.

`table` shows the hashed ledger: each charge with its time, and the hash chain.

A long ledger shows its first and last rows and folds the rest; a very long one says how many rows it omits
(``farthing ledger export`` has them all).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from farthing.accounting.filters import Filter
from farthing.ledger.books import rule_of
from farthing.ledger.journal_rows import Row
from farthing.queries.events import decode
from farthing.report.subject import priced
from farthing.report.words import RAISED, escape, number, percent, plain


@dataclass(frozen=True, slots=True)
class Scale:
    """A map of values from ``low`` to ``high`` to coordinates from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * share

    def ticks(self, most: int) -> list[float]:
        """Return about ``most`` round values, within the ends."""
        return self._powers(most) if self.log else self._steps(most)

    def _steps(self, most: int) -> list[float]:
        step = _step((self.high - self.low) / most)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [place * step for place in range(first, last + 1)]

    def _powers(self, most: int) -> list[float]:
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        if last - first >= 2:
            every = math.ceil((last - first) / max(1, most - 1))
            return [_ten(power) for power in range(first, last + 1) if (power - first) % every == 0]
        for parts in ((1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
            found = [part * _ten(power) for power in range(first - 1, last + 1) for part in parts]
            found = [v for v in found if self.low * (1 - 1e-9) <= v <= self.high * (1 + 1e-9)]
            if len(found) >= 2:
                return found
        return [self.low, self.high]

    def words(self, values: list[float]) -> list[str]:
        """Return the ticks as text, with as many digits as the step needs."""
        if self.log and values and min(values) < 1e-4 and all(_is_power(value) for value in values):
            return [f"10{str(round(math.log10(value))).translate(RAISED)}" for value in values]
        if self.log or len(values) < 2:
            return [number(value, 3) for value in values]
        step = values[1] - values[0]
        if max(map(abs, values)) >= 1e7 or step < 1e-5:
            return [number(value, 3) for value in values]
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        digits += round(step * 10**digits, 6) % 1 > 0  # a step of 2.5
        return [f"{value:,.{digits}f}" for value in values]


def _is_power(value: float) -> bool:
    return value == _ten(round(math.log10(value)))


def _ten(power: int) -> float:
    return float(f"1e{power}")


def _step(rough: float) -> float:
    unit = 10.0 ** math.floor(math.log10(rough))
    return next(unit * part for part in (1, 2, 2.5, 5, 10) if unit * part >= rough * (1 - 1e-9))


def around(values: list[float], *, log: bool = False, zero: bool = False) -> tuple[float, float]:
    """Return ends that contain all values with a margin; from 0 on if asked for."""
    low, high = min(values), max(values)
    if log:
        air = max((high / low) ** 0.06, 1.25)
        return low / air, high * air
    if zero:
        return 0.0, (high or 1.0) * 1.08
    air = max(0.08 * (high - low), 0.005 * abs(high), 1e-9)
    return low - air, high + air


WIDTH, HEIGHT = 460, 290
_TOP, _RIGHT, _BOTTOM = 30, 16, 46
_LETTER = 8.0  # the width of a letter in wide fonts and at the size that a phone shows
COLOURS = 6  # the most series that can be distinguished


def place(value: float) -> str:
    """Return a coordinate as text: two digits are more than a screen shows."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def text(x: float, y: float, said: str, *, anchor: str = "start", kind: str = "tick", most: int = 80) -> str:
    at = f'x="{place(x)}" y="{place(y)}"'
    return f'<text {at} class="{kind}" text-anchor="{anchor}">{escape(said, most)}</text>'


def heading(y: float, left: str, right: str) -> str:
    """Return a name and a figure on one line; the name is cut before they overlap."""
    room = int((WIDTH - 12) / _LETTER) - len(plain(right)) - 2
    return text(4, y, left, kind="name", most=max(room, 8)) + text(WIDTH - 8, y, right, anchor="end")


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    ends = f'x1="{place(x1)}" y1="{place(y1)}" x2="{place(x2)}" y2="{place(y2)}"'
    return f'<line {ends} class="{kind}"/>'


def rectangle(x: float, y: float, width: float, height: float, kind: str, round_: float = 0) -> str:
    size = f'width="{place(max(0.0, width))}" height="{place(max(0.0, height))}"'
    return f'<rect x="{place(x)}" y="{place(y)}" {size} rx="{place(round_)}" class="{kind}"/>'


def path(points: Sequence[tuple[float, float]], kind: str, *, closed: bool = False) -> str:
    steps = " L".join(f"{place(x)} {place(y)}" for x, y in points)
    return f'<path d="M{steps}{"Z" if closed else ""}" class="{kind}"/>'


def mark(x: float, y: float, series: int, size: float = 4.5) -> str:
    """Return a mark whose shape also identifies the series, for readers who do not see its colour."""
    s, kind = size, f"dot c{series % COLOURS}"
    match series % 4:
        case 0:
            return f'<circle cx="{place(x)}" cy="{place(y)}" r="{place(s)}" class="{kind}"/>'
        case 1:
            return rectangle(x - s * 0.9, y - s * 0.9, 1.8 * s, 1.8 * s, kind)
        case 2:
            corners = [(x, y - 1.2 * s), (x + 1.15 * s, y + 0.9 * s), (x - 1.15 * s, y + 0.9 * s)]
        case _:
            corners = [(x, y - 1.35 * s), (x + 1.35 * s, y), (x, y + 1.35 * s), (x - 1.35 * s, y)]
    return path(corners, kind, closed=True)


def svg(title: str, description: str, parts: Sequence[str], name: str, height: float = HEIGHT) -> str:
    """Return the drawing with its title and description, which screen readers read instead."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {place(height)}" role="img" aria-labelledby="{name}-t {name}-d">'
        f'<title id="{name}-t">{escape(title)}</title><desc id="{name}-d">{escape(description, 600)}</desc>'
        f"{''.join(parts)}</svg>"
    )


@dataclass(slots=True)
class Frame:
    """A chart with two axes: ``x`` and ``y`` map values to places, ``parts`` holds its drawing."""

    x: Scale
    y: Scale
    parts: list[str] = field(default_factory=list)

    def curve(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        self.parts.append(path([(self.x(x), self.y(y)) for x, y in points], kind))

    def area(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """Fill the area below a curve."""
        floor = self.y.start
        corners = [(self.x(x), self.y(y)) for x, y in points]
        self.parts.append(
            path([(corners[0][0], floor), *corners, (corners[-1][0], floor)], kind, closed=True)
        )

    def across(self, value: float, kind: str) -> None:
        self.parts.append(line(self.x.start, self.y(value), self.x.end, self.y(value), kind))

    def mark(self, x: float, y: float, series: int) -> None:
        self.parts.append(mark(self.x(x), self.y(y), series))


def frame(
    x: tuple[float, float],
    y: tuple[float, float],
    *,
    across: str,
    upwards: str,
    log_x: bool = False,
    log_y: bool = False,
    percents: bool = False,
) -> Frame:
    """Return axes with a grid. ``across`` and ``upwards`` are their names; the second may show percent."""
    up = Scale(*y, HEIGHT - _BOTTOM, _TOP, log_y)
    rows = up.ticks(5)
    words = up.words([100 * row for row in rows]) if percents else up.words(rows)
    words = [f"{word} %" for word in words] if percents else words
    left = 14 + _LETTER * max((len(plain(word)) for word in words), default=1)
    along = Scale(*x, left, WIDTH - _RIGHT, log_x)
    parts = []
    for value, word in zip(rows, words, strict=True):
        parts.append(line(left, up(value), WIDTH - _RIGHT, up(value), "grid"))
        parts.append(text(left - 7, up(value) + 4, word, anchor="end"))
    parts.append(line(left, up.start, WIDTH - _RIGHT, up.start, "axis"))
    ticks = along.ticks(6)
    free = 0.0
    for value, word in zip(ticks, along.words(ticks), strict=True):
        middle, half = along(value), _LETTER * len(word) / 2
        anchor = "middle"
        if middle + half > WIDTH - 2:
            middle, anchor = WIDTH - 2.0, "end"
        begins = middle - (half if anchor == "middle" else 2 * half)
        parts.append(line(along(value), up.start, along(value), up.start + 4, "axis"))
        if begins >= free:  # labels never overlap
            parts.append(text(middle, up.start + 18, word, anchor=anchor))
            free = begins + 2 * half + _LETTER
    parts.append(text(left, _TOP - 14, upwards, kind="name"))
    parts.append(text(WIDTH - _RIGHT, HEIGHT - 8, across, anchor="end", kind="name"))
    return Frame(along, up, parts)


# The colours of the report and of the live page, light or dark by the reader's preference.
PALETTE = """
:root{color-scheme:light dark;--paper:#fbfaf7;--card:#fff;--ink:#1b1d22;--soft:#565c69;--line:#dcd8cf;
--faint:#edeae2;--c0:#1f5fbf;--c1:#a34a00;--c2:#0a6e68;--c3:#7a3e9d;--c4:#8c6d00;--c5:#a1286a;
--good:#17663c;--goodback:#e6f3eb;--care:#7a4d00;--careback:#fbf1dc;--bad:#a3190f;--badback:#fdeae8}
@media(prefers-color-scheme:dark){:root{--paper:#14161a;--card:#1c1f25;--ink:#e9e7e2;--soft:#a9aeb9;
--line:#373c46;--faint:#282c34;--c0:#7db0ff;--c1:#ffa05c;--c2:#5fd0c7;--c3:#cf9df0;--c4:#dcbc55;--c5:#ff8dc0;
--good:#74d9a3;--goodback:#15301f;--care:#f0bd66;--careback:#33270f;--bad:#ff9a90;--badback:#3c1714}}
"""
# The style of `svg` there; every colour is a class.
CHART = """svg text{font-size:12.5px;font-variant-numeric:tabular-nums}
.tick{fill:var(--soft)}.name{fill:var(--ink)}
.grid{stroke:var(--faint)}.axis{stroke:var(--soft)}.guide{stroke:var(--soft);stroke-dasharray:2 3}
.line{fill:none;stroke-width:2.2;stroke-linejoin:round;stroke-linecap:round}
.limit,.claim{stroke:var(--bad);stroke-width:2}.limit{stroke-dasharray:7 4}
.level{stroke:var(--soft);stroke-width:1.6}.l0{stroke-dasharray:8 4}.l1{stroke-dasharray:2 4}
.l2{stroke-dasharray:9 3 2 3}
.whole{fill:var(--faint);stroke:var(--line)}.bad{fill:var(--bad)}
.line.c0{stroke:var(--c0)}.line.c1{stroke:var(--c1)}.line.c2{stroke:var(--c2)}.line.c3{stroke:var(--c3)}
.line.c4{stroke:var(--c4)}.line.c5{stroke:var(--c5)}
.dot{stroke:var(--card);stroke-width:1}.bar.c0,.dot.c0{fill:var(--c0)}.dot.c1{fill:var(--c1)}
.dot.c2{fill:var(--c2)}.dot.c3{fill:var(--c3)}.dot.c4{fill:var(--c4)}.dot.c5{fill:var(--c5)}
.area.c0{fill:var(--c0);opacity:.13}
"""
STYLE = (
    PALETTE
    + CHART
    + """*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);font:1rem/1.6 system-ui,-apple-system,"Segoe UI",
"Helvetica Neue",Arial,sans-serif}
main,header,footer{max-width:66rem;margin:0 auto;padding:0 1.4rem}
header{padding-top:2.6rem}
.over{margin:0;color:var(--soft);font-size:.8rem;letter-spacing:.09em;text-transform:uppercase}
h1{margin:.2rem 0 .3rem;font-size:1.9rem;line-height:1.2;font-weight:650;overflow-wrap:anywhere}
h2{margin:2.8rem 0 .4rem;font-size:1.3rem;font-weight:650}
h3{margin:0 0 .2rem;font-size:1rem;font-weight:650}
p{margin:.3rem 0}
.lead{color:var(--soft);max-width:46rem;overflow-wrap:anywhere}
.banner{margin:1.3rem 0 0;padding:.9rem 1.2rem;border-radius:.6rem;border:1px solid;border-left-width:.4rem}
.banner p{margin:0;max-width:50rem}.banner strong{display:block;font-size:1.15rem}
.calm{color:var(--good);background:var(--goodback)}.care{color:var(--care);background:var(--careback)}
.alarm,.weak{color:var(--bad);background:var(--badback)}
.banner.alarm{border-width:3px;border-left-width:1rem}.banner.alarm strong{font-size:1.5rem}
.banner p{color:var(--ink)}
.void{border-top:1rem solid var(--bad)}.void .over{color:var(--bad);font-weight:700}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.8rem;margin:1.2rem 0 0}
.tile{margin:0;padding:.7rem .9rem;background:var(--card);border:1px solid var(--line);border-radius:.6rem;
min-width:0}
.tile dt{color:var(--soft);font-size:.8rem}
.tile dd{margin:0;font-size:1.2rem;font-weight:600;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.statement{margin:1rem 0 0;padding:0;list-style:none;background:var(--card);border:1px solid var(--line);
border-radius:.6rem;counter-reset:item}
.statement>li{display:grid;grid-template-columns:15rem minmax(0,1fr);gap:.2rem 1.6rem;padding:1rem 1.3rem;
border-top:1px solid var(--line);counter-increment:item}
.statement>li:first-child{border-top:0}
.statement h3{font-weight:500;color:var(--soft);font-size:.95rem}
.statement h3:before{content:counter(item) ". ";font-variant-numeric:tabular-nums}
.statement .value{margin:0;font-weight:650;overflow-wrap:anywhere}
.statement p{max-width:44rem;overflow-wrap:anywhere}
.mark{display:inline-block;margin-right:.5rem;padding:0 .55rem;border-radius:1rem;font-size:.8rem;
font-weight:600;border:1px solid}
.figures{columns:2;column-gap:1.2rem;margin-top:1rem}
figure{margin:0 0 1.2rem;break-inside:avoid;padding:1.1rem 1.2rem;background:var(--card);
border:1px solid var(--line);border-radius:.6rem;min-width:0}
figcaption p{color:var(--soft);font-size:.9rem;line-height:1.45;margin:0 0 .6rem;overflow-wrap:anywhere}
figure>svg{display:block;width:100%;height:auto}
.legend{display:flex;flex-wrap:wrap;gap:.15rem 1.2rem;margin:.5rem 0 0;padding:0;list-style:none;
font-size:.85rem;color:var(--soft)}
.legend li{min-width:0;overflow-wrap:anywhere}
.swatch{width:28px;height:14px;vertical-align:-2px;margin-right:.15rem}
details{margin-top:.6rem;font-size:.85rem}summary{cursor:pointer;color:var(--soft)}
.scroll{overflow-x:auto;margin:.5rem 0;border:1px solid var(--line);border-radius:.5rem;
background:var(--card)}
.scroll:focus-visible{outline:2px solid var(--c0)}
table{width:100%;border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}
th,td{padding:.4rem .8rem;text-align:left;border-top:1px solid var(--line);vertical-align:top}
thead th{border-top:0;color:var(--soft);font-weight:500}
.n{text-align:right}.ledger td,.ledger th{white-space:nowrap}
.ledger td:nth-child(4){white-space:normal;min-width:15rem;overflow-wrap:anywhere}
code{font:.95em ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}
tr.broken td{color:var(--bad);font-weight:600}
.audit h2{margin-top:.6rem;font-size:1rem}.audit>h2,.audit>p{margin-left:.8rem;margin-right:.8rem}
.banner+.scroll{margin-top:1.2rem}
.audit td:nth-child(8){white-space:nowrap}.audit td:nth-child(3){min-width:14rem}
.facts,.signoff dl{display:grid;grid-template-columns:15rem minmax(0,1fr);gap:.3rem 1.6rem;margin:1rem 0}
.facts dt,.signoff dt{color:var(--soft)}.facts dd,.signoff dd{margin:0;overflow-wrap:anywhere}
.signoff input[type=text]{width:100%;border:0;border-bottom:1px solid var(--soft);background:none;
color:var(--ink);font:inherit}.signoff label{display:inline-block;margin-right:1.6rem}
footer{margin-top:3rem;padding-bottom:3rem;color:var(--soft);font-size:.85rem;overflow-wrap:anywhere}
@media(max-width:56rem){.figures{columns:1}figure{max-width:40rem}
.statement>li,.facts,.signoff dl{grid-template-columns:minmax(0,1fr)}.facts dd{margin-bottom:.4rem}}
@media(max-width:30rem){main,header,footer{padding:0 .9rem}header{padding-top:1.4rem}h1{font-size:1.5rem}
.tiles{grid-template-columns:repeat(2,minmax(0,1fr));gap:.6rem}.statement>li{padding:.8rem .9rem}
figure{padding:.9rem .8rem}svg text{font-size:14px}
.ledger td:nth-child(2),.ledger th:nth-child(2){display:none}th,td{padding:.4rem .6rem}}
@media print{:root{color-scheme:light;--paper:#fff;--card:#fff;--ink:#000;--soft:#444;--line:#bbb;
--faint:#eee;--c0:#1f5fbf;--c1:#a34a00;--c2:#0a6e68;--c3:#7a3e9d;--c4:#8c6d00;--c5:#a1286a;--good:#17663c;
--goodback:#fff;--care:#7a4d00;--careback:#fff;--bad:#a3190f;--badback:#fff}
@page{margin:16mm 14mm}html{font-size:13px}main,header,footer{max-width:none}
main,header,footer{padding:0 1px}h2{margin-top:1.6rem;break-after:avoid}h3,.lead{break-after:avoid}
figure,.statement>li,.tile,.banner,.facts>*,tr{break-inside:avoid}summary{break-after:avoid}
.figures{columns:auto}figure{margin-bottom:.8rem;padding:.6rem .8rem}
figure{max-width:none;display:flow-root}figure>svg{float:left;width:23rem;margin:0 1.2rem 0 0}
figure details{display:flow-root}.long{columns:3;column-gap:.6rem;border:0}figure table{font-size:.8rem}
figure th,figure td{padding:.05rem .3rem}.audit th,.audit td{padding:.2rem .3rem}
details::details-content{content-visibility:visible;height:auto;display:block}summary{list-style:none}
.facts,.signoff dl{grid-template-columns:15rem minmax(0,1fr)}
.signoff,.audit>p{break-inside:avoid}.signoff dd{padding-bottom:.8rem}
.statement>li{display:block;padding:.5rem .8rem}.statement h3{float:left;width:11rem}
.statement>li>div{margin-left:12rem}.scroll{overflow:visible}
.tiles{grid-template-columns:repeat(4,minmax(0,1fr))}
.bar,.dot,.whole,.area,.bad{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""
)


_FIRST, _LAST = 10, 6  # rows of a long ledger that are always visible
_FOLDED = 500  # rows that are folded but still in the page

_HEADS = (("#", "n"), ("time (UTC)", ""), ("kind", ""), ("what", ""), ("charged so far", "n"), ("hash", ""))


def table(rows: Sequence[Row]) -> str:
    """Return all rows as HTML, with the middle of a long ledger folded."""
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
    """Return a row as text."""
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
