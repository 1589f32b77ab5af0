"""A little SVG: a frame with axes, lines, marks and text. Colours are classes, so that a page can be dark.

All text is escaped here, so that no caller has to think of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from farthing.report.scales import Scale
from farthing.report.words import escape, plain

WIDTH, HEIGHT = 460, 290
_TOP, _RIGHT, _BOTTOM = 30, 16, 46
_LETTER = 8.0  # the width of a letter in wide fonts and at the size that a phone shows
COLOURS = 6  # series that can be told apart


def place(value: float) -> str:
    """A coordinate as written: two digits are more than a screen shows."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def text(x: float, y: float, said: str, *, anchor: str = "start", kind: str = "tick", most: int = 80) -> str:
    at = f'x="{place(x)}" y="{place(y)}"'
    return f'<text {at} class="{kind}" text-anchor="{anchor}">{escape(said, most)}</text>'


def heading(y: float, left: str, right: str) -> str:
    """A name and a figure on one line; the name is cut where they would touch."""
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
    """A dot whose shape tells the series too, for those who do not see its colour."""
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
    """The drawing with its title and description, which screen readers say instead."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {place(height)}" role="img" aria-labelledby="{name}-t {name}-d">'
        f'<title id="{name}-t">{escape(title)}</title><desc id="{name}-d">{escape(description, 600)}</desc>'
        f"{''.join(parts)}</svg>"
    )


@dataclass(slots=True)
class Frame:
    """Two axes: ``x`` and ``y`` map values to places, ``parts`` is what was drawn until now."""

    x: Scale
    y: Scale
    parts: list[str] = field(default_factory=list)

    def curve(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        self.parts.append(path([(self.x(x), self.y(y)) for x, y in points], kind))

    def area(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """Below a curve."""
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
    """Axes with a grid. ``across`` and ``upwards`` are their names; percents are written on the second."""
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
        if begins >= free:  # labels never run into each other
            parts.append(text(middle, up.start + 18, word, anchor=anchor))
            free = begins + 2 * half + _LETTER
    parts.append(text(left, _TOP - 14, upwards, kind="name"))
    parts.append(text(WIDTH - _RIGHT, HEIGHT - 8, across, anchor="end", kind="name"))
    return Frame(along, up, parts)
