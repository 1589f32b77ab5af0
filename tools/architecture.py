"""Draw folders, modules and a record's way into docs/architecture.md (``python tools/architecture.py``).

Each name is followed by the first sentence of its docstring, so that the page cannot go stale.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE, PAGE = ROOT / "src" / "farthing", ROOT / "docs" / "architecture.md"
END = "<!-- end -->"
FOLDERS = [
    "noise",
    "queries",
    "accounting",
    "ledger",
    "data",
    "statistics",
    "linear",
    "torch",
    "federated",
    "deploy",
    "audit",
    "report",
    "cli",
]
WIDTH = 22


# One record's way through the folders, in the order of the calls (tests/test_architecture.py checks it).
WAY = [
    ("queries/query.py", "Rows"),
    ("ledger/ledger.py", "Ledger.over"),
    ("ledger/ledger.py", "Ledger.ask"),
    ("queries/query.py", "Query.price"),
    ("ledger/books.py", "Books.take"),
    ("ledger/journal.py", "Journal.append"),
    ("queries/samplers.py", "Poisson.draw"),
    ("noise/streams.py", "Stream.poisson_indices"),
    ("queries/query.py", "Rows.take"),
    ("queries/query.py", "PerExample.bounded_sum"),
    ("noise/summing.py", "summed"),
    ("queries/bounds.py", "ClipNorm.apply"),
    ("queries/mechanisms.py", "_Added.release"),
    ("noise/lattice.py", "noisy"),
    ("ledger/ledger.py", "Ledger.guarantee"),
    ("accounting/pld.py", "epsilon"),
]


def drawn(page: str) -> str:
    """Return the page with its three drawings as the code has them: folders, a record's way, modules."""
    folders = [_line(SOURCE / folder / "__init__.py", 0, f"{folder}/") for folder in FOLDERS]
    way = [_called(place, name) for place, name in WAY]
    modules = [_line(path, 0) for path in sorted(SOURCE.glob("*.py"))]
    for folder in FOLDERS:
        modules += _folder(SOURCE / folder, 0)
    for name, lines in (("folders", folders), ("way", way), ("modules", modules)):
        block = "\n".join(["```text", *lines, "```"])
        begin = f"<!-- the {name}, drawn by tools/architecture.py -->\n"
        before, _, after = page.partition(begin)
        page = f"{before}{begin}\n{block}\n{after[after.index(END) :]}"
    return page


def _called(place: str, name: str) -> str:
    """Return a line for a function or class: folder, name, and the first sentence of its docstring."""
    node: ast.AST = ast.parse((SOURCE / place).read_text(encoding="utf-8"))
    for part in name.split("."):
        named = (found for found in ast.walk(node) if isinstance(found, ast.ClassDef | ast.FunctionDef))
        node = next(found for found in named if found.name == part)
    assert isinstance(node, ast.ClassDef | ast.FunctionDef)
    said = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
    module = "" if "." in name else f"{Path(place).stem}."  # a function is described by its module
    shown = name.replace("_Added", "Gaussian") if name[0].isupper() or name[0] == "_" else module + name
    return f"{place.split('/')[0] + '/':<12} {shown:<25} {_first(said)}"


def _folder(place: Path, depth: int) -> list[str]:
    lines = [_line(place / "__init__.py", depth, f"{place.name}/")]
    for path in sorted(place.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        if path.is_dir() and (path / "__init__.py").exists():
            lines += _folder(path, depth + 1)
        elif path.suffix == ".py" and path.name != "__init__.py":
            lines.append(_line(path, depth + 1))
    return lines


def _line(path: Path, depth: int, name: str = "") -> str:
    said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    first = _first(said.splitlines()[0]) if said else ""
    return f"{'  ' * depth}{name or path.name:<{WIDTH - 2 * depth}} {first.rstrip('.')}"


def _first(text: str) -> str:
    return re.split(r"(?<=\.)\s", text)[0]


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
