"""Factories by name: their source is hashed before it is imported, and what was hashed is what runs."""

import importlib.util
import inspect
import py_compile
import sys
import types
import zipfile
from pathlib import Path

import pytest

from farthing.deploy import factories
from farthing.deploy.guard.models import Inputs, InstalledModel, check_sources
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
    assert source.hash(["ward_d:X"]) != factories.source_hash(["ward_d.models:make"], tmp_path)


def test_compiled_code_beside_the_source_is_not_executed(tmp_path):
    """Python prefers a .pyc that says of itself that nobody need compare it with the source."""
    path = tmp_path / "ward_e.py"
    path.write_text("def make():\n    return 'compiled'\n")
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(path), importlib.util.cache_from_source(path), invalidation_mode=unchecked)
    path.write_text("def make():\n    return 'hashed'\n")
    assert factories.found("ward_e:make", tmp_path)() == "hashed"


def test_a_module_of_the_same_name_with_other_content_needs_another_process(tmp_path):
    """A function of the first may still import from its package: it would get the second's."""
    for folder in (tmp_path / "one", tmp_path / "two", tmp_path / "three"):
        folder.mkdir()
        (folder / "ward_f.py").write_text(
            f"def make():\n    return {folder.name.replace('three', 'one')!r}\n"
        )
    make = factories.found("ward_f:make", tmp_path / "one")
    with pytest.raises(InvalidValue, match="'ward_f' is not what this process hashed before"):
        factories.found("ward_f:make", tmp_path / "two")
    assert factories.found("ward_f:make", tmp_path / "three")() == make() == "one"


def imported(monkeypatch, folder, name):
    """Import a module by Python's own means."""
    monkeypatch.syspath_prepend(str(folder))
    importlib.import_module(name)
    sys.path.remove(str(folder))


def test_what_was_imported_before_from_elsewhere_is_refused(tmp_path, monkeypatch):
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        (folder / "ward_g.py").write_text("X = 1\n")
    imported(monkeypatch, tmp_path / "one", "ward_g")
    with pytest.raises(InvalidValue, match="was imported before"):
        factories.found("ward_g:X", tmp_path / "two")


def test_what_was_imported_before_it_was_hashed_is_refused_also_from_the_same_file(tmp_path, monkeypatch):
    """Python ran what it read then: the file may have changed since, or a .pyc was preferred."""
    path = tmp_path / "ward_j.py"
    path.write_text("def make():\n    return 'imported'\n")
    imported(monkeypatch, tmp_path, "ward_j")
    path.write_text("def make():\n    return 'hashed'\n")
    with pytest.raises(InvalidValue, match="was imported before"):
        factories.found("ward_j:make", tmp_path)


def test_one_module_of_a_package_that_was_there_before_is_enough_to_refuse_it(tmp_path, monkeypatch):
    package(tmp_path, "ward_k", models="from ward_k.helper import X\n", helper="X = 'hashed'\n")
    planted = types.ModuleType("ward_k.helper")
    planted.X = "planted"
    monkeypatch.setitem(sys.modules, "ward_k.helper", planted)
    with pytest.raises(InvalidValue, match=r"'ward_k\.helper' was imported before"):
        factories.found("ward_k.models:X", tmp_path)


def test_a_folder_without_an_init_that_was_imported_before_is_refused(tmp_path, monkeypatch):
    (tmp_path / "ward_l").mkdir()
    (tmp_path / "ward_l" / "models.py").write_text("X = 1\n")
    imported(monkeypatch, tmp_path, "ward_l")  # a namespace package: it has no file of its own
    with pytest.raises(InvalidValue, match="'ward_l' was imported before"):
        factories.found("ward_l.models:X", tmp_path)


def test_packages_that_import_each_other_get_what_was_hashed_in_any_order(tmp_path, monkeypatch):
    """One is on Python's path, with a .pyc that Python would prefer; the other imports it first."""
    helper = tmp_path / "ward_n.py"
    helper.write_text("X = 'compiled'\n")
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(helper), importlib.util.cache_from_source(helper), invalidation_mode=unchecked)
    helper.write_text("X = 'hashed'\n")
    (tmp_path / "ward_m.py").write_text("import ward_n\nX = ward_n.X\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    factories.SourceFiles.read(["ward_m:X", "ward_n:X"]).seal()
    assert (factories.found("ward_m:X"), factories.found("ward_n:X")) == ("hashed", "hashed")


def test_another_finder_that_comes_first_is_passed(tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "ward_o.py").write_text("X = 'other'\n")
    (tmp_path / "ward_o.py").write_text("X = 'hashed'\n")
    factories.SourceFiles.read(["ward_o:X"], tmp_path).seal()
    finder = types.SimpleNamespace(
        find_spec=lambda name, *_: importlib.util.spec_from_file_location(
            name, tmp_path / "other" / f"{name}.py"
        )
    )
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    assert factories.found("ward_o:X", tmp_path) == "hashed"


def test_a_compiled_module_is_loaded_from_the_bytes_that_were_hashed(tmp_path):
    compiled = next(
        (
            Path(found.origin)
            for name in ("_csv", "_json", "_heapq")
            if (found := importlib.util.find_spec(name)).origin != "built-in"
        ),
        None,
    )
    if compiled is None:
        pytest.skip("this Python has all of its modules built in")
    name = compiled.name.partition(".")[0]
    home = package(tmp_path, "ward_p", models=f"from ward_p import {name} as X\n")
    (home / compiled.name).write_bytes(compiled.read_bytes())
    factories.SourceFiles.read(["ward_p.models:X"], tmp_path).seal()
    (home / compiled.name).write_bytes(b"exchanged")
    found = factories.found("ward_p.models:X", tmp_path)
    assert found.__name__ == f"ward_p.{name}"
    assert Path(found.__file__).parent != home


def test_what_inspects_the_source_sees_what_was_hashed(tmp_path):
    path = tmp_path / "ward_q.py"
    path.write_text("def make():\n    return 'hashed'\n")
    factories.SourceFiles.read(["ward_q:make"], tmp_path).seal()
    path.write_text("def make():\n    return 'exchanged'\n")
    assert "hashed" in inspect.getsource(factories.found("ward_q:make", tmp_path))


def test_data_that_changed_is_not_given_out(tmp_path):
    home = package(
        tmp_path,
        "ward_r",
        models="import pkgutil\n\ndef make():\n    return pkgutil.get_data('ward_r', 'scale.json')\n",
    )
    (home / "scale.json").write_text("[1]")
    make = factories.found("ward_r.models:make", tmp_path)
    assert make() == b"[1]"
    (home / "scale.json").write_text("[2]")
    with pytest.raises(OSError, match="is not the file that was hashed"):
        make()


def test_archives_links_to_folders_and_code_without_source_are_not_run(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "ward.zip", "w") as archive:
        archive.writestr("ward_s/__init__.py", "")
        archive.writestr("ward_t.py", "X = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path / "ward.zip"))
    with pytest.raises(InvalidValue, match="'ward_s' has 0 source files"):
        factories.source_hash(["ward_s:X"])
    with pytest.raises(InvalidValue, match="cannot be read"):
        factories.source_hash(["ward_t:X"])
    home, elsewhere = package(tmp_path, "ward_u"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "models.py").write_text("X = 1\n")
    (home / "linked").symlink_to(elsewhere)
    py_compile.compile(str(elsewhere / "models.py"), str(home / "bare.pyc"))
    for module in ("ward_u.linked.models", "ward_u.bare"):
        with pytest.raises(InvalidValue, match="no part of what was hashed"):
            factories.found(f"{module}:X", tmp_path)


def test_a_policy_is_checked_in_whole_before_anything_of_it_is_imported(tmp_path):
    """The first model's package imports the second's, which changed since the policy was written."""
    (tmp_path / "ward_v.py").write_text("import ward_w\n")
    (tmp_path / "ward_w.py").write_text("def make():\n    pass\n")
    models = {
        name: InstalledModel(
            factory=f"{module}:make",
            loss=f"{module}:loss",
            weights=1,
            hash=factories.source_hash([f"{module}:make"], tmp_path),
        )
        for name, module in (("first", "ward_v"), ("second", "ward_w"))
    }
    policy = types.SimpleNamespace(models=models, inputs=Inputs(), modules=tmp_path)
    (tmp_path / "ward_w.py").write_text("raise SystemExit('imported')\n")
    with pytest.raises(InvalidValue, match=r"\[models\.second\].*look at what changed"):
        check_sources(policy)
    assert not {"ward_v", "ward_w"} & set(sys.modules)


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
    (tmp_path / "ward_c2.py").write_text("")
    with pytest.raises(InvalidValue, match="module 'ward_c2' has no 'nothing'"):
        factories.found("ward_c2:nothing", tmp_path)


def test_installed_packages_come_before_a_folder_of_modules(tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit('shadowed')")
    before = factories.source_hash(["json:loads"])
    assert factories.source_hash(["json:loads"], tmp_path) == before
