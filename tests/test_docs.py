"""Every block of code in README and docs runs: each document from top to bottom, in a folder of its own.

``python`` blocks of a document share their names, ``sh`` blocks run in a shell that stops at the first error,
``console`` blocks show commands and what they print, where … stands for anything. A comment on the line
before a block, which readers do not see, says what else is to be done with it:

    <!-- not run: needs three machines -->    a reason; nothing runs
    <!-- slow -->                             left out of the quick tests
    <!-- file: people.json -->                written to this file, for the blocks that follow
    <!-- exit: 2 -->                          the code with which the shell ends
"""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from farthing.cli.main import app
from farthing.data import table_files
from farthing.report import pictures

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [ROOT / "README.md", *PAGES]
SHOWN = {"csv", "text", "{toctree}"}  # neither run nor read
FENCE = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*) -->\n)?```(?P<language>[^\n`]*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the word and the rest of the comment before it."""

    language: str
    text: str
    mark: str
    said: str
    line: int


def text_of(path):
    return path.read_text(encoding="utf-8")


def blocks_of(path):
    page = text_of(path)
    for found in FENCE.finditer(page):
        mark, _, said = (found["mark"] or "").partition(":")
        line = page.count("\n", 0, found.start("text"))
        yield Block(found["language"].strip(), found["text"], mark.strip(), said.strip(), line + 1)


HEAVY = {  # seconds each
    *("quickstart.md", "cli.md", "deep-learning.md", "budgets.md", "accounting.md"),
    *("parties-networks.md", "correlated-noise.md"),
}
SLOW = [
    path for path in DOCUMENTS if path.name in HEAVY or any(block.mark == "slow" for block in blocks_of(path))
]


def _name(path):
    return path.name


class Reader:
    """Somebody who reads a document from top to bottom and does what it says."""

    def __init__(self, path, folder):
        self.path, self.folder = path, folder
        self.scope = {"__name__": "document"}
        command = folder.parent / "bin" / "farthing"
        command.parent.mkdir()
        command.write_text(
            f"#!{sys.executable}\nfrom farthing.cli.main import main\n\nraise SystemExit(main())\n"
        )
        command.chmod(0o755)
        self.environment = os.environ | {
            "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            "COLUMNS": "110",
        }

    def read(self, block):
        if block.mark == "file":
            Path(block.said).write_text(block.text)
        match block.language:
            case "python":
                if find_spec("torch") is not None or "torch" not in block.text:
                    # Lines are those of the page, so that a traceback leads there.
                    code = "\n" * (block.line - 1) + block.text
                    exec(compile(code, str(self.path), "exec"), self.scope)
            case "sh":
                self.shell(block.text, int(block.said) if block.mark == "exit" else 0)
            case "console":
                for command, printed in _transcript(block.text):
                    shown = self.shell(command, None)
                    assert re.fullmatch(_pattern(printed), shown), f"{command}\n{shown}"
            case "json":
                json.loads(block.text)
            case "toml":
                tomllib.loads(block.text)

    def shell(self, script, code):
        done = subprocess.run(
            ["bash", "-c" if code is None else "-ec", script],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=300,
        )
        assert code is None or done.returncode == code, f"{script}\n{done.stdout}"
        return done.stdout


def _transcript(text):
    """(command, what it printed), one after the other."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, printed = part.partition("\n")
        yield command, printed


def _pattern(printed):
    """Whole lines as they are, but for … and trailing spaces."""
    lines = (re.escape(line.rstrip()).replace("…", ".*") + " *" for line in printed.splitlines())
    return "\n".join(lines) + "\n?"


def _files(folder):
    """What documents say is there: people.csv and its schema, more.csv to predict, budgets.csv of users."""
    ages, sexes, labels = range(17, 91), ("Female", "Male"), ("<=50K", ">50K")
    rows = [
        f"{ages[7 * i % 74]},{sexes[i % 2]},{labels[(7 * i % 74 > 30) ^ (i % 9 == 0)]}" for i in range(1_000)
    ]
    budgets = [str(epsilon) for epsilon in (0.5, 1.0, 2.0, 4.0)] * 100
    for name, lines in {
        "people.csv": ["age,sex,income", *rows],
        "more.csv": ["age,sex,income", *rows[:5]],
        "budgets.csv": ["epsilon", *budgets],
    }.items():
        (folder / name).write_text("\n".join(lines) + "\n")
    columns = [{"name": "age", "low": 17, "high": 90}, {"name": "sex", "values": sexes}]
    schema = {"columns": columns, "target": {"name": "income", "values": labels}}
    (folder / "people.json").write_text(json.dumps(schema))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    place = tmp_path / "here"
    place.mkdir()
    _files(place)
    monkeypatch.chdir(place)
    # a page may add a command, a picture or a format, but to its own copies
    monkeypatch.setattr(app, "registered_commands", [*app.registered_commands])
    monkeypatch.setattr(pictures, "PICTURES", [*pictures.PICTURES])
    monkeypatch.setattr(table_files, "FORMATS", [*table_files.FORMATS])
    return place


def _run(path, folder, marks):
    reader = Reader(path, folder)
    for block in blocks_of(path):
        if block.mark in marks:
            reader.read(block)


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path.name not in HEAVY], ids=_name)
def test_blocks_run(path, folder):
    _run(path, folder, {"", "file", "exit"})


@pytest.mark.slow
@pytest.mark.parametrize("path", SLOW, ids=_name)
def test_slow_blocks_run(path, folder):
    _run(path, folder, {"", "file", "exit", "slow"})


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_every_block_is_run_or_says_why_not(path):
    found = list(blocks_of(path))
    assert 2 * len(found) == len(re.findall(r"^\s*```", text_of(path), flags=re.MULTILINE))
    for block in found:
        where = f"{path.name}, line {block.line}"
        assert block.language in {"python", "sh", "console", "json", "toml", *SHOWN}, where
        assert block.mark in {"", "not run", "slow", "file", "exit"}, where
        assert bool(block.said) == (block.mark in {"not run", "file", "exit"}), where


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_links_lead_somewhere(path):
    for file, _, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(#([^)]*))?\)", text_of(path)):
        target = path.parent / file if file else path
        assert target.exists(), file
        assert not anchor or anchor in _anchors(target), f"{file}#{anchor}"


def _anchors(path):
    """The names under which a page's headings are found, here and on the site."""
    prose = FENCE.sub("", text_of(path))
    headings = re.findall(r"^#+ (.*)$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_page_is_once_in_the_navigation():
    listed = [
        line
        for block in blocks_of(ROOT / "docs" / "index.md")
        for line in block.text.splitlines()
        if block.language == "{toctree}" and line and not line.startswith(":")
    ]
    tutorials = {f"tutorials/{page.stem}" for page in (ROOT / "docs" / "tutorials").glob("*.md")}
    pages = {page.stem for page in PAGES} - {"index"} | {"api/index"} | tutorials
    assert sorted(listed) == sorted(pages)


@pytest.mark.parametrize(
    ("module", "pages"),
    [
        ("farthing", ["core", "estimators", "algorithms", "audit"]),
        ("farthing.torch", ["torch"]),
        ("farthing.federated", ["federated"]),
        ("farthing.audit", ["audit"]),
        ("farthing.report", ["report"]),
    ],
)
def test_every_public_name_is_in_the_reference(module, pages):
    texts = [text_of(ROOT / "docs" / "api" / f"{page}.rst") for page in pages]
    shown = {
        name
        for text in texts
        for name in re.findall(r"^\.\. auto\w+:: (?:[\w.]+\.)?(\w+)$", text, re.MULTILINE)
    }
    assert {*import_module(module).__all__} - {"audit", "federated", "torch"} <= shown


def test_every_algorithm_is_in_the_reference():
    """A public function that yields steps, of `farthing.linear.methods` and of `farthing.torch`.

    What `farthing.torch` exports is in a page of its own, see above.
    """
    exported = {*import_module("farthing.torch").__all__}
    shown = text_of(ROOT / "docs" / "api" / "algorithms.rst")
    source = ROOT / "src" / "farthing"
    for path in [
        *source.glob("linear/methods/*.py"),
        *source.glob("federated/methods/*.py"),
        *source.glob("torch/*/*.py"),
    ]:
        tree = ast.parse(text_of(path))
        yielding = [
            node.name
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and _yields_steps(node)
            if not ("torch" in path.parts and node.name in exported)
        ]
        if not yielding:
            continue
        module = ".".join(("farthing", *path.relative_to(source).with_suffix("").parts))
        found = re.search(rf"^\.\. automodule:: {re.escape(module)}\n   :members: (.*)$", shown, re.MULTILINE)
        assert found, f"docs/api/algorithms.rst lacks {module}"
        assert {*yielding} <= {*found[1].split(", ")}, module
        said = ast.get_docstring(tree)
        assert re.search("[Gg]uarantee|-G?DP", said), f"{module} does not say what it guarantees"


def _yields_steps(node):
    return node.returns is not None and ast.unparse(node.returns).endswith("Iterator[Step]")
