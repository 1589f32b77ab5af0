"""``python tools/architecture.py``: draws the folders and modules into docs/architecture.md from the code.

What stands beside a name is the first sentence of its docstring, so that the page cannot go stale.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE, PAGE = ROOT / "src" / "farthing", ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- drawn by tools/architecture.py -->", "<!-- end -->"
FOLDERS = [
    "noise",
    "queries",
    "accounting",
    "ledger",
    "data",
    "linear",
    "torch",
    "federated",
    "deploy",
    "audit",
    "report",
    "cli",
]
WIDTH = 22


def drawn(page: str) -> str:
    """The page with the folders as they are between its two marks."""
    lines = [_line(path, 0) for path in sorted(SOURCE.glob("*.py"))]
    for folder in FOLDERS:
        lines += _folder(SOURCE / folder, 0)
    tree = "\n".join(lines)
    return re.sub(
        f"{BEGIN}.*?{END}",
        f"{BEGIN}\nBeside a name stands the first sentence of its docstring.\n\n```text\n{tree}\n```\n{END}",
        page,
        flags=re.DOTALL,
    )


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
    first = re.split(r"(?<=\.)\s", said.splitlines()[0])[0] if said else ""
    return f"{'  ' * depth}{name or path.name:<{WIDTH - 2 * depth}} {first.rstrip('.')}"


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
