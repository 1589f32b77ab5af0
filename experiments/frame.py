"""What every experiment shares: its three functions, the files they become, and the look of a figure.

An experiment is a module of this package with three functions:

* ``measure(small) -> rows``: the work. A row is a flat dictionary of numbers and texts, one a measurement;
  ``small`` is a version of seconds that needs no data but what farthing ships.
* ``tables(rows) -> grids``: what a reader wants to see, ours beside what the paper prints (`Grid`).
* ``draw(rows) -> figure``: the same as a picture (`canvas`).

The first line of its docstring is its title. `write` makes NAME.csv of the rows, NAME.md of the tables and
NAME.svg of the figure; `read` gives rows back, so that tables and figures can be made anew without measuring.
Equal rows make equal files: no time, no date, no random identifiers. Noise is seeded (`stream`), so that a
run can be repeated to the digit; by that alone it protects nobody, which public data do not need.
"""

import ast
import csv
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from farthing.noise import SeededStream

Row = dict[str, Any]

UNSAID = "not given"  # a paper that prints no number
PLOT = "plot only"  # a paper that draws it and prints no number

# Okabe & Ito's colours, told apart by most eyes, on a ground of their own in light and dark surroundings.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7570b3", "#666666")
MARKERS = "osD^vPX<>"
INK, PAPER = "#1a1a1a", "#ffffff"


class Experiment(Protocol):
    """What a module of this package offers."""

    def measure(self, small: bool) -> list[Row]: ...
    def tables(self, rows: list[Row]) -> list["Grid"]: ...
    def draw(self, rows: list[Row]) -> Any: ...


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
            found[path.stem.replace("_", "-")] = (ast.get_docstring(tree) or "").splitlines()[0]
    return found


def load(name: str) -> Experiment:
    """The module of an experiment, by the name that `names` gives it."""
    module: Any = importlib.import_module(f"experiments.{name.replace('-', '_')}")
    return module


def write(
    name: str, title: str, rows: list[Row], experiment: Experiment, out: Path, small: bool
) -> list[Path]:
    """NAME.csv, NAME.md and, where matplotlib is installed, NAME.svg."""
    out.mkdir(parents=True, exist_ok=True)
    written = [out / f"{name}.csv", out / f"{name}.md"]
    keys = list(dict.fromkeys(key for row in rows for key in row))
    with written[0].open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, keys, lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: _shown(value) for key, value in row.items()} for row in rows)
    parts = [f"# {title}", f"`python -m experiments {name}{' --small' if small else ''}`"]
    if importlib.util.find_spec("matplotlib"):
        parts.append(f"![{title}]({name}.svg)")
    parts += [grid.markdown() for grid in experiment.tables(rows)]
    written[1].write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    if importlib.util.find_spec("matplotlib"):
        written.append(out / f"{name}.svg")
        save(experiment.draw(rows), written[2])
    else:
        say("no figure: matplotlib is not installed (pip install 'farthing[report]')")
    return written


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
    """Noise that is the same in every run of the same place (a fold, a method, an ε), and differs elsewhere."""
    return SeededStream(seed(*place))


def seed(*place: object) -> int:
    """The same number for the same place in every run."""
    return int.from_bytes(hashlib.sha256(repr(place).encode()).digest()[:4], "big") >> 1


def mean(rows: Iterable[Row], value: str, **where: object) -> float:
    """The mean of a column over the rows with these values in other columns."""
    found = [row[value] for row in rows if all(row.get(key) == wanted for key, wanted in where.items())]
    return sum(found) / len(found) if found else float("nan")


def values(rows: Iterable[Row], key: str) -> list[Any]:
    """The distinct values of a column, in the order in which they come."""
    return list(dict.fromkeys(row[key] for row in rows if key in row))


def canvas(down: int, across: int, width: float = 4.0, height: float = 3.1) -> tuple[Any, Any]:
    """A matplotlib figure and its grid of axes, in the house's look."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_LOOK):
        figure = Figure(figsize=(width * across, height * down), facecolor=PAPER, layout="constrained")
        return figure, figure.subplots(down, across, squeeze=False)


def legend(figure: Any, axes: Any, columns: int) -> None:
    """One legend for all axes, below them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


def save(figure: Any, path: Path) -> None:
    """A small SVG, the same for the same figure: letters stay letters, no date, no random names."""
    from matplotlib import rc_context

    with rc_context(_LOOK):
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


_LOOK: Any = {
    "svg.hashsalt": "farthing",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.facecolor": PAPER,
    "axes.grid": True,
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
