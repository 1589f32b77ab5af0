"""The tutorials' notebooks are their pages, are valid, and run from top to bottom."""

import importlib.util
import json
import logging
import re
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))


def made():
    spec = importlib.util.spec_from_file_location("notebooks", ROOT / "tools" / "notebooks.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def name_of(path):
    return path.stem


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_notebook_is_what_its_page_says(page):
    notebook = page.with_suffix(".ipynb").read_text(encoding="utf-8")
    assert notebook == made().written(page.read_text(encoding="utf-8")), "run python tools/notebooks.py"
    found = json.loads(notebook)
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in found["cells"]}) == len(found["cells"])
    for cell in found["cells"]:
        assert cell["source"]
        assert set(cell) - {"execution_count", "outputs"} == {"cell_type", "id", "metadata", "source"}
        assert all(line.endswith("\n") for line in cell["source"][:-1])
    assert sum(cell["cell_type"] == "code" for cell in found["cells"]) >= 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of other libraries
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_notebook_runs(page, tmp_path, monkeypatch, capsys):
    for needed in re.findall(r"^Needs: (.*)\.$", page.read_text(encoding="utf-8"), re.MULTILINE):
        for library in needed.split(", "):
            pytest.importorskip(library, reason=f"{library} is not installed: pip install {library}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "level", logging.ERROR)
    scope = {"__name__": "__main__"}
    for cell in json.loads(page.with_suffix(".ipynb").read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), page.stem, "exec"), scope)
    assert "-DP, add-remove, per record, against " in capsys.readouterr().out
