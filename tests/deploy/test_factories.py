"""Factories by name: their source is hashed before it is imported, and what was hashed is what runs."""

import importlib.util
import py_compile
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


def test_a_hash_follows_every_file_of_the_package_and_nothing_else(tmp_path):
    home = package(tmp_path, "ward_a", models="def make():\n    return 1\n", helper="X = 1\n")
    first = factories.source_hash(["ward_a.models:make"], tmp_path)
    assert len(first) == 64
    (home / "__pycache__").mkdir()
    (home / "__pycache__" / "helper.pyc").write_bytes(b"")
    assert factories.source_hash(["ward_a:other"], tmp_path) == first
    seen = {first}
    for file, text in (("helper.py", "X = 2\n"), ("scale.json", "[1]"), ("scale.json", "[2]")):
        (home / file).write_text(text)  # what the module imports or reads counts as well
        seen.add(factories.source_hash(["ward_a.models:make"], tmp_path))
    (home / "helper.py").rename(home / "helped.py")
    assert len({*seen, factories.source_hash(["ward_a.models:make"], tmp_path)}) == 5
    assert "ward_a" not in sys.modules


def test_a_module_without_a_package_is_its_one_file(tmp_path):
    (tmp_path / "ward_b.py").write_text("def make():\n    return 2\n")
    (tmp_path / "other.py").write_text("")
    first = factories.source_hash(["ward_b:make", "ward_b:loss"], tmp_path)
    (tmp_path / "other.py").write_text("X = 1")
    assert factories.source_hash(["ward_b:make"], tmp_path) == first
    assert factories.found("ward_b:make", tmp_path)() == 2
    assert str(tmp_path) not in sys.path


def test_a_file_that_is_exchanged_after_it_was_hashed_is_not_imported(tmp_path):
    home = package(tmp_path, "ward_d", models="from ward_d.helper import X\n\ndef make():\n    return X\n")
    (home / "helper.py").write_text("X = 'hashed'\n")
    source = factories.SourceFiles.read(["ward_d.models:make"], tmp_path)
    source.seal()
    (home / "helper.py").write_text("X = 'exchanged'\n")
    (home / "added.py").write_text("X = 'added'\n")
    assert factories.found("ward_d.models:make", tmp_path)() == "hashed"
    with pytest.raises(InvalidValue, match="no part of what was hashed"):
        factories.found("ward_d.added:X", tmp_path)
    assert source.hash != factories.source_hash(["ward_d.models:make"], tmp_path)


def test_compiled_code_beside_the_source_is_not_executed(tmp_path):
    """Python prefers a .pyc that says of itself that nobody need compare it with the source."""
    path = tmp_path / "ward_e.py"
    path.write_text("def make():\n    return 'compiled'\n")
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(path), importlib.util.cache_from_source(path), invalidation_mode=unchecked)
    path.write_text("def make():\n    return 'hashed'\n")
    assert factories.found("ward_e:make", tmp_path)() == "hashed"


def test_a_module_of_another_folder_with_the_same_name_is_another_module(tmp_path):
    found = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        (folder / "ward_f.py").write_text(f"def make():\n    return {folder.name!r}\n")
        assert factories.SourceFiles.read(["ward_f:make"], folder).hash not in [hash for hash, _ in found]
        found.append((factories.source_hash(["ward_f:make"], folder), factories.found("ward_f:make", folder)))
    assert [make() for _, make in found] == ["one", "two"]


def test_what_was_imported_before_from_elsewhere_is_refused(tmp_path, monkeypatch):
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        (folder / "ward_g.py").write_text("X = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path / "one"))
    importlib.import_module("ward_g")
    sys.path.remove(str(tmp_path / "one"))
    with pytest.raises(InvalidValue, match="was imported before"):
        factories.found("ward_g:X", tmp_path / "two")


def test_files_of_the_folder_that_the_hash_does_not_cover_are_not_imported(tmp_path):
    (tmp_path / "ward_h.py").write_text("import ward_h_helper\n")
    (tmp_path / "ward_h_helper.py").write_text("")
    with pytest.raises(InvalidValue, match="No module named 'ward_h_helper'"):
        factories.found("ward_h:make", tmp_path)


def test_folders_without_an_init_and_relative_imports_are_found(tmp_path):
    home = package(tmp_path, "ward_i", models="from .inner.deep import X\n")
    (home / "inner").mkdir()
    (home / "inner" / "deep.py").write_text("X = 3\n")
    assert factories.found("ward_i.models:X", tmp_path) == 3


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


def test_installed_packages_come_before_a_folder_of_modules(tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit('shadowed')")
    before = factories.source_hash(["json:loads"])
    assert factories.source_hash(["json:loads"], tmp_path) == before
