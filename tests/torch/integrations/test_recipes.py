"""Blocks of docs/ecosystem.md that need a library which is no dependency: run where it is installed."""

import logging
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent.parent.parent / "docs" / "ecosystem.md"
BLOCK = re.compile(r"^(?:<!-- not run: needs (\w+) -->\n)?```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
BLOCKS = BLOCK.findall(PAGE.read_text())
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of other libraries


@pytest.mark.parametrize("library", [library for library, _ in BLOCKS if library])
def test_it_runs_where_its_library_is(library, tmp_path, monkeypatch):
    pytest.importorskip(library, reason=f"{library} is not installed: pip install {library}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "level", logging.ERROR)
    scope = {"__name__": "document"}
    for needs, code in BLOCKS:
        # Two blocks that run without it set the page's names up.
        if needs == library or (not needs and ("load_adult" in code or "reduction=" in code)):
            exec(compile(code, str(PAGE), "exec"), scope)
    if library in ("tensorboard", "mlflow"):
        assert list(tmp_path.glob("runs*"))
