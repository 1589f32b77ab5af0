"""The tutorials as notebooks: `python tools/notebooks.py` makes docs/tutorials/*.ipynb of the pages there.

A page is the one source. Its ``python`` blocks become cells of code, unless a comment says that they are not
run; what stands between them becomes text. `tests/test_notebooks.py` runs the notebooks, and fails where one
is not what this makes of its page.
"""

import json
import re
from pathlib import Path

TUTORIALS = Path(__file__).parent.parent / "docs" / "tutorials"
_CODE = re.compile(
    r"^(?P<mark><!-- not run[^\n]*-->\n)?```python\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
_DOWNLOAD = re.compile(r"\s*\{download\}`[^`]*`\.?")


def notebook(page: str) -> dict:
    """Return the notebook of a page, in Jupyter's format 4.5."""
    cells, end = [], 0
    for found in _CODE.finditer(page):
        if found["mark"]:
            continue
        cells += [_text(page[end : found.start()]), _code(found["text"])]
        end = found.end()
    cells = [cell for cell in [*cells, _text(page[end:])] if cell["source"]]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def written(page: str) -> str:
    """Return the file of a page's notebook."""
    return json.dumps(notebook(page), indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _text(text: str) -> dict:
    plain = re.sub(r"^<!--.*?-->\n", "", _DOWNLOAD.sub("", text), flags=re.MULTILINE)
    return {"cell_type": "markdown", "metadata": {}, "source": _lines(plain)}


def _code(text: str) -> dict:
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": {},
        "outputs": [],
        "source": _lines(text),
    }


def _lines(text: str) -> list[str]:
    return text.strip("\n").splitlines(keepends=True)


if __name__ == "__main__":
    for path in sorted(TUTORIALS.glob("*.md")):
        path.with_suffix(".ipynb").write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(path.with_suffix(".ipynb").name)
