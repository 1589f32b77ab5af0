"""docs/symbols.md: every argument, flag, setting and key that its tables name is in the code."""

import ast
import inspect
import re
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

import farthing as ft
from farthing.cli.main import app
from farthing.federated.methods.table import every_option
from farthing.linear.solvers import CLASSIFIERS, REGRESSORS

pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "farthing"
PAGE = (ROOT / "docs" / "symbols.md").read_text(encoding="utf-8")
SECTIONS = re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
HOMES = ("farthing", "farthing.federated", "farthing.torch", "farthing.linear.problem")
TEXTS = ("sgd1", "sgd2", "addp", "addp_baselines", "projection")


def test_the_five_texts_have_sections() -> None:
    names = " ".join(name for name, _ in SECTIONS)
    for text in ("DP-AGD", "DP-SGD", "Linear regression", "AdaDP", "A-DDP", "SGD1 and SGD2"):
        assert text in names
    assert sum(len(rows) for _, body in SECTIONS for _, rows in tables(body)) > 90


@pytest.mark.parametrize(("name", "body"), SECTIONS, ids=[name for name, _ in SECTIONS])
def test_what_the_tables_name_exists(name: str, body: str) -> None:
    owners = [found(each) for each in re.findall(r"`(farthing\.[\w.]+)`", body.split("\n|")[0])]
    assert owners, name
    for head, rows in tables(body):
        for row in rows:
            for title, cell in zip(head, row, strict=True):
                for token in re.findall(r"`([^`]+)`", cell):
                    looked_up(title, token, owners)


def test_no_setting_of_a_papers_method_is_left_out() -> None:
    every = [(title, row[place]) for _, body in SECTIONS for head, rows in tables(body)
             for place, title in enumerate(head) for row in rows]  # fmt: skip
    for method in ("dpagd", "sgd-ma", "functional"):
        cells = [cell for title, cell in every if f"--method {method} --set" in title]
        listed = {token for cell in cells for token in re.findall(r"`([^`]+)`", cell)}
        known = (CLASSIFIERS | REGRESSORS)[method]
        wanted = {name for name, value in known.settings.items() if not is_dataclass(value)}
        assert wanted | {*known.aliases} <= listed, method
    said = " ".join(re.findall(r"`AdaDP\((.*?)\)`", PAGE))
    assert {*inspect.signature(ft.torch.AdaDP).parameters} - {"model"} <= {*re.findall(r"\w+", said)}


def tables(body: str) -> list[tuple[list[str], list[list[str]]]]:
    """The heads and rows of a section's tables; a bar after a backslash is no border."""
    parts = re.findall(r"(?:^\|.*\n)+", body, re.MULTILINE)
    cells = [
        [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in part.splitlines()]
        for part in parts
    ]
    return [(head, rows) for head, _, *rows in cells]


def looked_up(title: str, token: str, owners: list[Any]) -> None:
    if token.startswith("python -m experiments "):
        assert (ROOT / "experiments" / f"{token.split()[-1].replace('-', '_')}.py").exists(), token
    elif command := re.search(r"`farthing (\w+)(?: --method ([\w-]+) --set)?`", title):
        option(COMMANDS[command[1]], command[2], token)
    elif "run.toml" in title:
        assert token.strip("[]") in keys(), token
    elif title == "`--method`":
        assert CLASSIFIERS[token].private, token
    elif title == "argument in Python":
        argument(token, owners)
    else:  # prose: a word of the code, wherever it may be
        assert title in ("symbol", "symbol in the text", "meaning", "baseline"), title


def option(command: Any, method: str | None, token: str) -> None:
    """A flag of the command, with a value of its own if it has choices; or a setting of the method."""
    if token.startswith("farthing "):
        assert token.split()[1] in COMMANDS, token
        return
    if not token.startswith("--"):
        if method is None:  # a value, in a sentence
            return
        known = (CLASSIFIERS | REGRESSORS)[method]
        assert token in known.settings or token in known.aliases, f"{method} has no setting {token}"
        return
    flag, _, value = token.partition(" ")
    named = {name: parameter for parameter in command.params for name in parameter.opts}
    assert flag in named, f"there is no {flag}"
    choices = getattr(named[flag].type, "choices", None)
    assert not value or choices is None or value in [str(getattr(each, "value", each)) for each in choices]


def argument(token: str, owners: list[Any]) -> None:
    """``name=``, ``name=value``, ``Callable(argument, other=)``, or a name."""
    given = re.fullmatch(r"(\w+)=(.*)", token)
    called = re.fullmatch(r"([\w.]+)\((.*)\)", token)
    if given:
        assert any(given[1] in parameters(owner) for owner in owners), f"nothing there takes {token}"
        if "(" in given[2]:
            argument(given[2], owners)
    elif called:
        for part in filter(None, (part.strip() for part in called[2].split(","))):
            if part != "..." and not part.isdigit():
                assert part.partition("=")[0] in parameters(found(called[1])), token
    elif not any(token in parameters(owner) for owner in (*owners, ft.Budget)):
        found(token)


def parameters(owner: Any) -> set[str]:
    if inspect.ismodule(owner):
        named = (each for name, each in vars(owner).items() if callable(each) and not name.startswith("_"))
        return {name for each in named if each.__module__ == owner.__name__ for name in parameters(each)}
    return {*inspect.signature(owner).parameters}


def found(name: str) -> Any:
    """What a name means: from the root, or from where readers would look for it."""
    if name.startswith("experiments."):
        return (ROOT / (name.replace(".", "/") + ".py")).exists() or pytest.fail(name)
    name = name.removeprefix("ft.")
    places = [*HOMES, *(f"farthing.federated.methods.{text}" for text in TEXTS)]
    for full in (name, *(f"{place}.{name}" for place in places)):
        parts = full.split(".")
        for cut in range(len(parts), 0, -1):
            path = SOURCE.parent / "/".join(parts[:cut])
            if not path.with_suffix(".py").exists() and not (path / "__init__.py").exists():
                continue
            value: Any = import_module(".".join(parts[:cut]))
            try:
                for part in parts[cut:]:
                    value = getattr(value, part)
            except AttributeError:
                break
            return value
    raise AssertionError(f"there is no {name}")


def keys() -> set[str]:
    """The keys of a run's file, the options of federated methods, and the parts of a budget (a policy's)."""
    nodes = ast.walk(ast.parse((SOURCE / "deploy" / "run_file.py").read_text()))
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return texts | {*inspect.signature(ft.Budget).parameters} | {*every_option()}
