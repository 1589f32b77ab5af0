"""Every public name says what it takes and shows how it is used, in numpydoc sections with an example."""

import inspect
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from farthing.accounting import filters

ROOT = Path(__file__).parent.parent
PACKAGES = ["farthing", "farthing.audit", "farthing.federated", "farthing.torch"]
UNDOCUMENTED = {  # names that lack a section still: this set may shrink and must not grow
    "farthing.torch.Training",  # made by train, which names its parameters
}


def public():
    """Everything that the packages export, and the privacy filters, by name."""
    found = {rule.__name__: rule for rule in filters.FILTERS.values()}
    for package in PACKAGES:
        if package == "farthing.torch" and find_spec("torch") is None:
            continue
        home = import_module(package)
        found |= {f"{package}.{name}": getattr(home, name) for name in home.__all__}
    return {name: each for name, each in found.items() if inspect.isclass(each) or inspect.isfunction(each)}


PUBLIC = public()


def takes_any(found):
    """Whether a function or a class takes parameters; enumerations, exceptions and protocols do not count."""
    if isinstance(found, type) and issubclass(found, BaseException | str):
        return False
    if getattr(found, "_is_protocol", False):
        return False
    return bool(inspect.signature(found).parameters)


def sections(found):
    return {
        line.strip()
        for line, rule in zip(*[(inspect.getdoc(found) or "").splitlines()[n:] for n in (0, 1)], strict=False)
        if rule.strip() and set(rule.strip()) == {"-"}
    }


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_says_what_it_takes_and_has_an_example(name):
    found = PUBLIC[name]
    missing = {"Examples"} - sections(found)
    if takes_any(found) and not sections(found) & {"Parameters", "Attributes"}:
        missing.add("Parameters")
    if ">>> " not in (found.__doc__ or ""):
        missing.add("an example")
    if name in UNDOCUMENTED:
        pytest.skip(f"{name} lacks {', '.join(sorted(missing)) or 'no section'}")
    assert not missing


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_parameter_is_named_in_the_docstring(name):
    found = PUBLIC[name]
    if name in UNDOCUMENTED or not takes_any(found):
        pytest.skip("without parameters, or not documented yet")
    lines = re.findall(r"^([*\w, ]+?)(?: : .*)?$", inspect.getdoc(found), re.MULTILINE)
    named = {name.strip(" *") for line in lines for name in line.split(",")}
    missing = inspect.signature(found).parameters.keys() - named
    assert not missing


def test_a_docstring_begins_with_a_sentence():
    for name in PUBLIC.keys() - UNDOCUMENTED:
        first = inspect.getdoc(PUBLIC[name]).split("\n")[0]
        assert first.endswith("."), name
        assert not first.startswith(("The same", "What ", "Who ")), name


def exists(name):
    """Whether a name is a module of farthing or lies in one; true if a library that it needs is missing."""
    parts = name.split(".")
    for depth in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:depth]))
        except ImportError as error:
            if not (error.name or "").startswith("farthing"):
                return True
            continue
        for part in parts[depth:]:
            if part in getattr(found, "__dataclass_fields__", ()):
                return True
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def test_names_in_docstrings_and_pages_exist():
    """Every `farthing.module.name` in backticks, in the sources and in the documents."""
    files = [*ROOT.glob("src/**/*.py"), *ROOT.glob("docs/**/*.md"), ROOT / "README.md"]
    named = {
        (name, path.relative_to(ROOT).as_posix())
        for path in files
        for name in re.findall(r"`(farthing(?:\.\w+)+)", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 100
    assert [(name, path) for name, path in sorted(named) if not exists(name)] == []


def test_a_property_begins_without_a_colon():
    """The site would take the words before it for the type of the property."""
    for name, found in PUBLIC.items():
        for member, value in vars(found).items() if inspect.isclass(found) else ():
            if isinstance(value, property) and not member.startswith("_"):
                first = (inspect.getdoc(value) or "").split("\n")[0]
                assert ": " not in first, f"{name}.{member}"
