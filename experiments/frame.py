"""What every experiment shares: its three functions, the files they become, and the look of a figure.

An experiment is a module of this package with three functions:

* ``measure(size) -> rows``: the work. A row is a flat dictionary of numbers and texts, one a measurement;
  `Size` sets its extent: a small version that takes seconds and needs only data that farthing ships, and the
  numbers of folds and repeats. An experiment without folds or repeats says so first (`Size.only`).
* ``tables(rows) -> grids``: the results beside the paper's figures (`Grid`).
* ``draw(rows) -> figure``: the same as a picture (`canvas`).

The first line of its docstring is its title. `write` makes NAME.csv of the rows, NAME.md of the tables and
NAME.svg of the figure; `read` gives rows back, so that tables and figures can be made anew without measuring.
Equal rows make equal files: no time, no date, no random identifiers. Noise is seeded (`stream`), so that a
run can be repeated exactly; seeded noise protects nobody, and the data are public.
"""

import ast
import csv
import hashlib
import importlib
import importlib.util
import io
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from farthing.noise.lattice import SeededStream

Row = dict[str, Any]

UNSAID = "not given"  # a paper that prints no number
PLOT = "plot only"  # a paper that draws it and prints no number

# Okabe & Ito's colours, told apart by most eyes, on a ground of their own in light and dark surroundings.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7570b3", "#666666")
MARKERS = "osD^vPX<>"
INK, PAPER = "#1a1a1a", "#ffffff"


class Experiment(Protocol):
    """What a module of this package offers."""

    def measure(self, size: "Size") -> list[Row]: ...
    def tables(self, rows: list[Row]) -> list["Grid"]: ...
    def draw(self, rows: list[Row]) -> Any: ...


class SizeError(ValueError):
    """A size that the experiment does not have."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much of an experiment is measured; None leaves the number to the experiment.

    >>> Size().folds_or(5), Size(small=True).folds_or(5), Size(folds=2).folds_or(5)
    (5, 1, 2)
    >>> Size(folds=5, repeats=20).flags()
    ' --folds 5 --repeats 20'
    """

    small: bool = False
    folds: int | None = None
    repeats: int | None = None

    def folds_or(self, full: int, small: int = 1) -> int:
        return self.folds or (small if self.small else full)

    def repeats_or(self, full: int, small: int = 1) -> int:
        return self.repeats or (small if self.small else full)

    def only(self, *known: str) -> None:
        """Refuse a number of folds or repeats that an experiment has no use for."""
        for name in ("folds", "repeats"):
            if getattr(self, name) is not None and name not in known:
                raise SizeError(f"it has no {name}; leave --{name} out")

    def flags(self) -> str:
        """This size as it is typed."""
        counts = [f" --{name} {n}" for name, n in (("folds", self.folds), ("repeats", self.repeats)) if n]
        return (" --small" if self.small else "") + "".join(counts)


@dataclass(frozen=True, slots=True)
class Grid:
    """A table to print: a caption, heads, and cells that are already texts."""

    caption: str
    head: Sequence[str]
    cells: Sequence[Sequence[str]]
    note: str = ""

    def markdown(self) -> str:
        lines = [self.head, ["---"] * len(self.head), *self.cells]
        body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n\n".join(part for part in (f"**{self.caption}**", body, self.note) if part)


def names() -> dict[str, str]:
    """Every experiment and the first line of its docstring, read without importing it."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        offered = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if {"measure", "tables", "draw"} <= offered:
            found[path.stem.replace("_", "-")] = (ast.get_docstring(tree) or "").splitlines()[0].rstrip(".")
    return found


def load(name: str) -> Experiment:
    """The module of an experiment, by the name that `names` gives it."""
    module: Any = importlib.import_module(f"experiments.{name.replace('-', '_')}")
    return module


def write(
    name: str, title: str, rows: list[Row], experiment: Experiment, out: Path, size: Size
) -> list[Path]:
    """NAME.csv, NAME.md and, where matplotlib is installed, NAME.svg; made-up images are called so."""
    out.mkdir(parents=True, exist_ok=True)
    written = [out / f"{name}.csv", out / f"{name}.md"]
    told = made_up if size.small else str
    told_of = f"{experiment.__doc__} {rows}"
    if told(told_of) != told_of:
        rows = [{**row, "images": "made up"} for row in rows]
    keys = list(dict.fromkeys(key for row in rows for key in row))
    with written[0].open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, keys, lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: _shown(value) for key, value in row.items()} for row in rows)
    rows = read(written[0])  # so that files made now and files made anew are the same
    parts = [f"# {title}", f"`python -m experiments {name}{size.flags()}`"]
    if importlib.util.find_spec("matplotlib"):
        parts.append(f"![{title}]({name}.svg)")
    parts += [grid.markdown() for grid in experiment.tables(rows)]
    if told(told_of) != told_of:
        parts.insert(1, "Small mode: the images are made up, and no number here is about another data set.")
    written[1].write_text(told("\n\n".join(parts)) + "\n", encoding="utf-8")
    if importlib.util.find_spec("matplotlib"):
        written.append(out / f"{name}.svg")
        save(_told(experiment.draw(rows), told), written[2])
    else:
        say("no figure: matplotlib is not installed (pip install 'farthing[report]')")
    return written


def made_up(text: str) -> str:
    """What small mode says in place of data that it does not read.

    >>> made_up("MNIST, with steps tuned on Fashion-MNIST, and CIFAR-10")
    'made-up images (not MNIST), with steps tuned on Fashion-MNIST, and made-up images (not CIFAR-10)'
    """
    return re.sub(r"(?<![-\w])(MNIST|CIFAR-10)(?![\w])", r"made-up images (not \1)", text)


def _told(figure: Any, told: Callable[[str], str]) -> Any:
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_text(told(text.get_text()))
    return figure


def read(path: Path) -> list[Row]:
    """The rows of a NAME.csv; cells that read as numbers are numbers, empty ones are left out."""
    with path.open(newline="", encoding="utf-8") as file:
        return [
            {key: _number(cell) for key, cell in row.items() if cell != ""} for row in csv.DictReader(file)
        ]


def _shown(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def _number(cell: str) -> Any:
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            continue
    return cell


def say(sentence: str) -> None:
    """Prose goes to standard error; files hold the data."""
    print(sentence, file=sys.stderr, flush=True)


def stream(*place: object) -> SeededStream:
    """Noise that is the same in every run of the same place (a fold, a method, an ε)."""
    return SeededStream(seed(*place))


def seed(*place: object) -> int:
    """The same number for the same place in every run."""
    return int.from_bytes(hashlib.sha256(repr(place).encode()).digest()[:4], "big") >> 1


def mean(rows: Iterable[Row], value: str, /, **where: object) -> float:
    """The mean of a column over the rows with these values in other columns."""
    found = [row[value] for row in rows if all(row.get(key) == wanted for key, wanted in where.items())]
    return sum(found) / len(found) if found else float("nan")


def values(rows: Iterable[Row], key: str) -> list[Any]:
    """The distinct values of a column, in the order in which they come."""
    return list(dict.fromkeys(row[key] for row in rows if key in row))


def number(x: float) -> str:
    """A short text: 0.05, 12, 1e-6."""
    return (f"{x:g}" if x >= 0.001 else f"{x:.0e}").replace("e-0", "e-")


def canvas(down: int, across: int, width: float = 4.0, height: float = 3.1) -> tuple[Any, Any]:
    """A matplotlib figure and its grid of axes, in the house's look."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams.update(_LOOK)
    figure = Figure(figsize=(width * across, height * down), facecolor=PAPER, layout="constrained")
    return figure, figure.subplots(down, across, squeeze=False)


def line(
    axes: Any, x: Sequence[float], y: Sequence[float], place: int, label: str, dashed: bool = False
) -> None:
    """A curve in the colour and with the marker of its place."""
    style = {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)]}
    axes.plot(x, y, label=label, linestyle="--" if dashed else "-", **style)


def level(axes: Any, y: float, label: str, colour: str = INK) -> None:
    """A dotted line across, for what does not depend on a budget."""
    axes.axhline(y, color=colour, linestyle=":", linewidth=1.2, label=label)


def ticks(axes: Any, places: Sequence[float]) -> None:
    """A logarithmic axis across with these values on it, and no others."""
    axes.set(xscale="log")
    axes.set_xticks(places, [number(place) for place in places])
    axes.minorticks_off()


def legend(figure: Any, axes: Any, columns: int) -> None:
    """One legend for all axes, below them, in as many columns as fit."""
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, min(columns, int(figure.get_figwidth() / 1.9)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


def save(figure: Any, path: Path) -> None:
    """A small SVG, the same for the same figure: letters stay letters, no date, no random names."""
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            _plain(axis)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    path.write_text(_compact(text.getvalue()), encoding="utf-8")


def _compact(svg: str) -> str:
    """The same picture in half the bytes: two decimals, no names, and a marker's style said once."""
    svg = re.sub(
        r"<[^>]*>",
        lambda tag: re.sub(r"\d+\.\d{3,}", lambda digits: f"{float(digits[0]):.2f}", tag[0]),
        svg,
    )
    for needless in (
        r' id="(?:line2d|text|[xy]tick|patch|axes|matplotlib\.axis)_\d+"',
        r' transform="rotate\(-0 [\d. ]+\)"',
        r" font-family: 'DejaVu Sans', sans-serif;",
        r"<!--.*?-->",
    ):
        svg = re.sub(needless, "", svg)
    svg = svg.replace("*{stroke-linejoin", "text{font-family: 'DejaVu Sans', sans-serif} *{stroke-linejoin")
    styles: dict[str, set[str]] = {}
    for name, style in re.findall(r'<use xlink:href="#(\w+)"[^>]* style="([^"]*)"', svg):
        styles.setdefault(name, set()).add(style)
    for name, found in styles.items():
        if len(found) == 1:
            svg = re.sub(rf'(<use xlink:href="#{name}"[^>]*?) style="[^"]*"', r"\1", svg)
            svg = re.sub(rf'(<path id="{name}"[^>]* style=")[^"]*', rf"\g<1>{found.pop()}", svg)
    return re.sub(r"\s*\n\s*", "\n", svg)


def _plain(axis: Any) -> None:
    """On a logarithmic axis plain numbers, enough of them, instead of powers of ten in raised letters."""
    from matplotlib.ticker import FuncFormatter, LogFormatter, LogLocator, NullFormatter

    if axis.get_scale() == "log" and isinstance(axis.get_major_formatter(), LogFormatter):
        low, high = axis.get_view_interval()
        if high < 100 * low:
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda x, place: number(x)))
        axis.set_minor_formatter(NullFormatter())


_LOOK: Any = {
    "svg.hashsalt": "farthing",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "legend.fontsize": 8.0,
    "axes.titlesize": 9.0,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.facecolor": PAPER,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "xtick.minor.bottom": False,
    "ytick.minor.left": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.0,
}
