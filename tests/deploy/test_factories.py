"""Factories by name: their source is hashed before it is imported, and anything else is an error."""

import sys

import pytest

from farthing.deploy import factories
from farthing.errors import InvalidValue


def package(folder, name, **files):
    home = folder / name
    home.mkdir()
    for file, text in {"__init__": "", **files}.items():
        (home / f"{file}.py").write_text(text)
    return home


def test_a_hash_follows_every_source_file_of_the_package_and_nothing_else(tmp_path):
    home = package(tmp_path, "ward_a", models="def make():\n    return 1\n", helper="X = 1\n")
    first = factories.source_hash(["ward_a.models:make"], tmp_path)
    assert len(first) == 64
    (home / "notes.txt").write_text("a note")
    (home / "__pycache__").mkdir()
    assert factories.source_hash(["ward_a:other"], tmp_path) == first
    (home / "helper.py").write_text("X = 2\n")  # what the module imports counts as well
    second = factories.source_hash(["ward_a.models:make"], tmp_path)
    (home / "helper.py").rename(home / "helped.py")
    assert len({first, second, factories.source_hash(["ward_a.models:make"], tmp_path)}) == 3
    assert "ward_a" not in sys.modules


def test_a_module_without_a_package_is_its_one_file(tmp_path):
    (tmp_path / "ward_b.py").write_text("def make():\n    return 2\n")
    (tmp_path / "other.py").write_text("")
    first = factories.source_hash(["ward_b:make", "ward_b:loss"], tmp_path)
    (tmp_path / "other.py").write_text("X = 1")
    assert factories.source_hash(["ward_b:make"], tmp_path) == first
    assert factories.found("ward_b:make", tmp_path)() == 2
    assert sys.path[-1] == str(tmp_path)
    sys.path.remove(str(tmp_path))


@pytest.mark.parametrize("name", ["", "a", "a:", ":b", "a b:c", "../a:b", "a:b.c", "a:b()", None, 3])
def test_a_name_is_a_module_and_a_function(name):
    with pytest.raises(InvalidValue, match=r"package\.module:function"):
        factories.parts(name)


@pytest.mark.parametrize(
    ("name", "message"), [("nowhere_at_all:x", "there is no module"), ("_struct:x", "is no .py file")]
)
def test_what_has_no_source_has_no_hash(name, message):
    with pytest.raises(InvalidValue, match=message):
        factories.source_hash([name])


def test_what_cannot_be_imported_is_an_error_that_says_why(tmp_path):
    (tmp_path / "ward_c.py").write_text("1 / 0\n")
    with pytest.raises(InvalidValue, match="ZeroDivisionError"):
        factories.found("ward_c:make", tmp_path)
    with pytest.raises(InvalidValue, match="module 'json' has no 'nothing'"):
        factories.found("json:nothing")
    sys.path.remove(str(tmp_path))


def test_installed_packages_come_before_a_folder_of_modules(tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit('shadowed')")
    before = factories.source_hash(["json:loads"])
    assert factories.source_hash(["json:loads"], tmp_path) == before
