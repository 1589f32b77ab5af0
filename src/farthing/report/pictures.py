"""Draw the pictures of a report. A picture without data is omitted."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from farthing.report import drawing, reading
from farthing.report.drawing import COLOURS, WIDTH, Frame, Scale, around, frame
from farthing.report.statement import downwards, upwards
from farthing.report.subject import ClientGroup, FederatedRun, Score, Subject, noise_of
from farthing.report.words import escape, number, percent, plain

_SHARES = ("accuracy", "auc", "f1", "precision", "recall")
_MOST_BARS = 12
_MOST_ATTACKS = 14
_TRACED = 400  # points of a trace


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing, its caption, its legend and its numbers."""

    title: str
    caption: str
    svg: str
    legend: tuple[tuple[str, str], ...] = ()  # a small drawing, and its meaning
    heads: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


def pictures(subject: Subject) -> list[Picture]:
    """Return the pictures that there is data for, in the order of the questions that they answer."""
    drawn = (draw(subject) for draw in PICTURES)
    return [picture for picture in drawn if picture is not None]


def _swatch(inside: str) -> str:
    return f'<svg class="swatch" viewBox="0 0 28 14" aria-hidden="true">{inside}</svg>'


def _stroke(kind: str) -> str:
    return _swatch(drawing.line(1, 7, 27, 7, kind))


def burned(subject: Subject) -> Picture | None:
    """Draw ε spent after so many answers, and the limit."""
    points = reading.spent(subject)
    if len(points) < 2:
        return None
    limit, answers = subject.guarantee.epsilon, points[-1][0]
    drawn = frame((0, answers), (0, 1.08 * max(limit, points[-1][1])), across="answers", upwards="ε spent")
    stairs = (
        points
        if len(points) > 20
        else [corner for (a, e), (b, f) in itertools.pairwise(points) for corner in ((a, e), (a, f), (b, f))]
    )
    drawn.area(stairs, "area c0")
    drawn.curve(stairs, "line c0")
    drawn.across(limit, "limit")
    title = "The budget, answer by answer"
    caption = (
        f"After {answers:,.0f} answer{'s' * (answers != 1)} ε is {upwards(points[-1][1])} of "
        f"{upwards(limit)}, at δ = {number(subject.guarantee.delta)}. Nothing is released beyond the line."
    )
    return Picture(
        title,
        caption,
        drawing.svg(title, caption, drawn.parts, "burned"),
        ((_stroke("line c0"), "spent"), (_stroke("limit"), f"limit, ε = {upwards(limit)}")),
        ("answers", "ε spent"),
        tuple((f"{a:,.0f}", upwards(e)) for a, e in points),
    )


def profile(subject: Subject) -> Picture | None:
    """Draw ε at every δ: one guarantee, read at other points."""
    points = reading.curve(subject)
    if len(points) < 2:
        return None
    said = subject.guarantee
    most = max(epsilon for epsilon, _ in points)
    drawn = frame(
        (0, 1.05 * max(most, said.epsilon)),
        (points[-1][1], 10.0 ** math.ceil(math.log10(max(points[0][1], said.delta)))),
        across="ε",
        upwards="δ",
        log_y=True,
    )
    drawn.curve(points, "line c0")
    drawn.parts.append(_guides(drawn, said.epsilon, said.delta))
    drawn.mark(said.epsilon, said.delta, 1)
    title = "One guarantee, every ε and δ"
    caption = "The claim is one point of this curve. All points hold jointly: a smaller δ has a larger ε."
    return Picture(
        title,
        caption,
        drawing.svg(title, caption, drawn.parts, "profile"),
        (
            (_stroke("line c0"), "what is proven"),
            (
                _swatch(drawing.mark(14, 7, 1)),
                f"the claim: ε {upwards(said.epsilon)}, δ {number(said.delta)}",
            ),
        ),
        ("δ", "ε"),
        tuple((number(delta, 3), upwards(epsilon)) for epsilon, delta in points),
    )


def _guides(drawn: Frame, x: float, y: float) -> str:
    across, up = drawn.x(x), drawn.y(y)
    return drawing.line(drawn.x.start, up, across, up, "guide") + drawing.line(
        across, up, across, drawn.y.start, "guide"
    )


def scored(subject: Subject) -> Picture | None:
    """Draw scores against ε, beside baselines without privacy or without data."""
    scores = [score for score in subject.scores if math.isfinite(score.value)]
    dots = [score for score in scores if score.epsilon is not None and 0 < score.epsilon < math.inf]
    if not dots:
        return None
    lines = [score for score in scores if score.epsilon is None]
    shares = subject.measure.lower() in _SHARES and all(0 <= score.value <= 1 for score in scores)
    low, high = around([score.value for score in scores])
    if shares:
        low, high = max(0.0, low), min(1.0, high)
    across = [score.epsilon for score in dots if score.epsilon is not None]
    ends = around(across, log=True) if max(across) > min(across) else (across[0] / 4, across[0] * 4)
    drawn = frame(
        ends, (low, high), across="ε", upwards=plain(subject.measure, 30), log_x=True, percents=shares
    )
    legend: list[tuple[str, str]] = []
    written = percent if shares else number
    for place, score in enumerate(lines):
        kind = f"level l{place % 3}"
        drawn.across(score.value, kind)
        legend.append((_stroke(kind), f"{plain(score.label, 60)}: {written(score.value)}"))
    labels = list(dict.fromkeys(score.label for score in dots))
    for place, label in reversed(list(enumerate(labels))):  # the first on top
        own = sorted((s.epsilon or 0.0, s.value) for s in dots if s.label == label)
        if len(own) > 1:
            drawn.curve(own, f"line c{place % COLOURS}")
        for epsilon, value in own:
            drawn.mark(epsilon, value, place)
    dotted = []
    for place, label in enumerate(labels):
        named = [score for score in dots if score.label == label]
        alone = (
            f": {written(named[0].value)} at ε {number(named[0].epsilon or 0.0)}" if len(named) == 1 else ""
        )
        dotted.append((_swatch(drawing.mark(14, 7, place)), plain(label, 60) + alone))
    title = f"{plain(subject.measure, 30).capitalize()} against ε"
    where = "on records that the guarantee does not cover" if subject.released else "within the guarantee"
    caption = f"Measured {where}. Privacy is stronger to the left; horizontal lines do not depend on ε."
    return Picture(
        title,
        caption,
        drawing.svg(title, caption, drawn.parts, "scored"),
        (*dotted, *legend),
        ("method", "ε", plain(subject.measure, 30)),
        tuple(_score_row(score, shares) for score in (*dots, *lines)),
    )


def _score_row(score: Score, shares: bool) -> tuple[str, str, str]:
    value = percent(score.value) if shares else number(score.value)
    return plain(score.label, 120), "none" if score.epsilon is None else number(score.epsilon), value


def _remaining(subject: Subject) -> Picture | None:
    return None if subject.federated is None else remaining(subject.federated)


def remaining(run: FederatedRun) -> Picture | None:
    """Draw what clients could afford and what they still can: bars, or a histogram of many kinds."""
    groups = [group for group in run.groups if group.clients > 0 and group.rounds > 0]
    if not groups:
        return None
    clients = sum(group.clients for group in groups)
    able = sum(group.clients for group in groups if group.done < group.rounds)
    title = "What each client has left"
    caption = (
        f"{clients:,} clients, each with a budget of its own. After {run.rounds:,} rounds {able:,} can still "
        "afford another."
    )
    groups = sorted(groups, key=lambda group: (group.epsilon, group.rounds, group.done))
    merged = _merged(groups)
    if len(merged) > _MOST_BARS:
        return _histogram(groups, title, caption)
    most, parts, y = max(group.rounds for group in merged), list[str](), 8.0
    along = Scale(0, most, 4, WIDTH - 8)
    for group in merged:
        left = group.rounds - group.done
        name = (
            f"ε {number(group.epsilon)} · {group.clients:,} {'client' if group.clients == 1 else 'clients'}"
        )
        parts.append(drawing.heading(y + 10, name, f"{left:,} of {group.rounds:,} rounds left"))
        parts.append(drawing.rectangle(4, y + 17, along(group.rounds) - 4, 12, "whole", 3))
        parts.append(drawing.rectangle(4, y + 17, along(group.done) - 4, 12, "bar c0", 3))
        y += 44
    return Picture(
        title,
        caption,
        drawing.svg(title, caption, parts, "remaining", y),
        (
            (_swatch(drawing.rectangle(1, 2, 26, 10, "bar c0", 3)), "rounds taken"),
            (_swatch(drawing.rectangle(1, 2, 26, 10, "whole", 3)), "rounds left"),
        ),
        ("ε", "clients", "rounds", "taken", "left"),
        tuple(
            (number(g.epsilon), f"{g.clients:,}", f"{g.rounds:,}", f"{g.done:,}", percent(g.left))
            for g in merged
        ),
    )


def _merged(groups: Sequence[ClientGroup]) -> list[ClientGroup]:
    """Return clients grouped by budget and rounds."""
    held: dict[tuple[float, int, int], int] = {}
    for group in groups:
        key = group.epsilon, group.rounds, group.done
        held[key] = held.get(key, 0) + group.clients
    return [ClientGroup(epsilon=e, clients=n, rounds=r, done=d) for (e, r, d), n in held.items()]


def _histogram(groups: Sequence[ClientGroup], title: str, caption: str) -> Picture:
    bins = [0] * 11  # none left, up to a tenth, ...
    for group in groups:
        bins[min(10, math.ceil(10 * group.left - 1e-9))] += group.clients
    drawn = frame((0, 11), (0, 1.08 * max(bins)), across="budget left", upwards="clients")
    words = ["none", *(f"{10 * (place - 1)}–{10 * place} %" for place in range(1, 11))]
    drawn.parts = [part for part in drawn.parts if 'text-anchor="middle"' not in part]
    for place, count in enumerate(bins):
        left, right = drawn.x(place) + 2, drawn.x(place + 1) - 2
        top = drawn.y(count)
        drawn.parts.append(drawing.rectangle(left, top, right - left, drawn.y.start - top, "bar c0", 2))
        if place in (0, 5, 10):
            middle = min((left + right) / 2, WIDTH - 36.0)
            drawn.parts.append(drawing.text(middle, drawn.y.start + 18, words[place], anchor="middle"))
    rows = tuple((word, f"{count:,}") for word, count in zip(words, bins, strict=True))
    shown = drawing.svg(title, caption, drawn.parts, "remaining")
    return Picture(title, caption, shown, (), ("budget left", "clients"), rows)


def noised(subject: Subject) -> Picture | None:
    """Draw the noise multiplier, answer by answer."""
    trace = list(_noise(subject))
    if not trace:
        return None
    title = "Noise, answer by answer"
    caption = "Standard deviation (or scale) of the noise, divided by the bound of one contribution."
    return _traced(trace, title, caption, "noise / bound", "noised")


def _noise(subject: Subject) -> Iterator[tuple[float, float]]:
    at = 0
    for charge in subject.charges:
        noise = noise_of(charge.event)
        if noise is not None:
            yield at + 1.0, noise
            if charge.count > 1:
                yield float(at + charge.count), noise
        at += charge.count


def clipped(subject: Subject) -> Picture | None:
    """Draw the clipping norm answer by answer, where the history has it."""
    if not subject.clips:
        return None
    trace = [(answer + 1.0, clip) for answer, clip in enumerate(subject.clips)]
    title = "Clipping norm, answer by answer"
    caption = "The bound of one contribution: fixed in advance, or computed from released values."
    return _traced(trace, title, caption, "bound", "clipped")


def _traced(trace: list[tuple[float, float]], title: str, caption: str, upwards: str, name: str) -> Picture:
    values = [value for _, value in trace]
    every = math.ceil(len(trace) / _TRACED)
    shown = [point for place, point in enumerate(trace) if place % every == 0 or place == len(trace) - 1]
    log = max(values) > 20 * min(values)
    ends = around(values, log=True) if log else around(values, zero=True)
    drawn = frame((0, max(at for at, _ in trace)), ends, across="answers", upwards=upwards, log_y=log)
    if len(shown) > 1:
        stairs = [
            corner for (a, v), (b, u) in itertools.pairwise(shown) for corner in ((a, v), (b, v), (b, u))
        ]
        drawn.curve(stairs, "line c0")
    if len(shown) <= 60:
        for at, value in shown:
            drawn.parts.append(drawing.mark(drawn.x(at), drawn.y(value), 0, 2.5))
    kinds = list(dict.fromkeys(values))
    said = number(kinds[0]) if len(kinds) == 1 else f"{number(min(kinds))} to {number(max(kinds))}"
    caption = f"{caption} Here: {said}."
    rows = tuple((f"{at:,.0f}", number(value)) for at, value in shown)
    return Picture(
        title, caption, drawing.svg(title, caption, drawn.parts, name), (), ("answer", upwards), rows[:60]
    )


def audited(subject: Subject) -> Picture | None:
    """Draw the lower bounds of attacks beside the claims."""
    found = sorted(subject.audit, key=lambda pair: pair[1].eps_lower / pair[1].claim.epsilon, reverse=True)[
        :_MOST_ATTACKS
    ]
    if not found:
        return None
    bounds = [v.eps_lower for _, v in found if math.isfinite(v.eps_lower)]
    most = 1.08 * max([*bounds, *(v.claim.epsilon for _, v in found)])
    along, parts, y = Scale(0, most, 4, WIDTH - 8), list[str](), 8.0
    for name, verdict in found:
        low = min(verdict.eps_lower, most)
        shown = "unbounded" if not math.isfinite(verdict.eps_lower) else f"≥ {downwards(low)}"
        said = f"{shown} of {number(verdict.claim.epsilon, 3)}"
        parts.append(drawing.heading(y + 10, f"{plain(name, 24)} · {verdict.attack}", said))
        claim = along(verdict.claim.epsilon)
        parts.append(drawing.rectangle(4, y + 19, claim - 4, 8, "whole", 2))
        parts.append(
            drawing.rectangle(4, y + 19, along(low) - 4, 8, "bad" if verdict.broken else "bar c0", 2)
        )
        parts.append(drawing.line(claim, y + 15, claim, y + 31, "claim"))
        y += 44
    left_out = len(subject.audit) - len(found)
    title = "Attacks beside the claim"
    caption = (
        "A bar shows the lower bound on ε from an attack, a mark shows the claim. A bar beyond its mark "
        "breaks the claim; a bar before it proves nothing."
    ) + (f" The {left_out:,} weakest are left out." if left_out else "")
    return Picture(
        title,
        caption,
        drawing.svg(title, caption, parts, "audited", y),
        (
            (_swatch(drawing.rectangle(1, 3, 26, 8, "bar c0", 2)), "ε shown at least"),
            (_swatch(drawing.line(14, 0, 14, 14, "claim")), "ε claimed"),
        ),
    )


def legend(picture: Picture) -> str:
    """Return a picture's legend as a list, which wraps where the page is narrow."""
    if not picture.legend:
        return ""
    items = "".join(f"<li>{swatch} {escape(said)}</li>" for swatch, said in picture.legend)
    return f'<ul class="legend">{items}</ul>'


#: What a report draws, in this order; None where there is no data for a picture.
PICTURES: list[Callable[[Subject], Picture | None]] = [
    burned,
    profile,
    scored,
    _remaining,
    noised,
    clipped,
    audited,
]
