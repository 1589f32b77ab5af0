"""The architecture: which folder may import which, what is exported, and how fast it opens."""

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import farthing as ft

SOURCE = Path(ft.__file__).parent
ROOT = SOURCE.parents[1]

# A folder imports from itself and from those before it, and from the modules beside them.
FOLDERS = [
    "noise",
    "queries",
    "accounting",
    "ledger",
    "data",
    "statistics",
    "linear",
    "torch",
    "federated",
    "deploy",
    "audit",
    "report",
    "cli",
]
TORCH_AUDITS = "audit.deep", "audit.network_laws", "audit.adapters"
BESIDE = ["errors", "validate", "budget"]
MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts): path
    for path in sorted(SOURCE.rglob("*.py"))
    if path.name != "__init__.py"
}


def imports(path):
    """The modules of farthing that a file imports anywhere, by their names without the package's."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "farthing":
            prefix = node.module.removeprefix("farthing").removeprefix(".")
            for alias in node.names:
                inner = f"{prefix}.{alias.name}".removeprefix(".")
                yield inner if inner in MODULES else prefix
        elif isinstance(node, ast.Import):
            yield from (
                a.name.removeprefix("farthing.") for a in node.names if a.name.startswith("farthing.")
            )


def rank(name):
    """How far down a module or folder stands; those beside the folders come before all of them."""
    folder = name.split(".")[0]
    if folder == "__main__":  # `python -m farthing`: above everything
        return len(FOLDERS)
    return -1 if folder in ("", *BESIDE) else FOLDERS.index(folder)


def test_every_folder_has_its_place():
    found = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert found == set(FOLDERS)
    assert {path.stem for path in SOURCE.glob("*.py")} == {"__init__", "__main__", *BESIDE}


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_down(name):
    for imported in imports(MODULES[name]):
        if name == "budget" and imported.startswith("accounting."):
            continue  # `Budget.rho` and `Budget.mu`, looked up when they are asked for
        if name == "budget" and imported == "report.notebook":
            continue  # what a notebook shows, looked up there
        assert rank(imported) <= rank(name), f"{name} must not import {imported}"


def test_no_modules_import_each_other_in_a_circle():
    graph = {name: {one for one in imports(path) if one in MODULES} for name, path in MODULES.items()}
    graph["budget"] = {one for one in graph["budget"] if not one.startswith(("accounting.", "report."))}
    TopologicalSorter(graph).prepare()


def test_torch_and_flower_are_imported_in_their_folders_only():
    homes = {"torch": "torch", "triton": "torch", "flwr": "deploy.flower", "lightning": "torch.integrations"}
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for imported in {one.split(".")[0] for one in names} & set(homes):
                allowed = homes[imported], *TORCH_AUDITS
                assert name.startswith(allowed), f"{name} imports {imported}"


def test_nothing_uses_the_global_generators():
    hides = SOURCE / "torch" / "checks" / "chance.py"  # it puts secret seeds in the place of people's
    for path in {*SOURCE.rglob("*.py")} - {hides}:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
                assert "random" not in names, path
            if isinstance(node, ast.Attribute):
                assert ast.unparse(node) not in ("np.random", "numpy.random"), path


def test_exports_are_curated():
    assert ft.__all__ == sorted(ft.__all__, key=lambda name: (not name.isupper(), name[0].islower(), name))
    assert all(hasattr(ft, name) for name in ft.__all__)
    assert len(ft.__all__) <= 90


def test_every_error_that_people_catch_is_exported():
    raised = {name for name, kind in vars(ft.errors).items() if isinstance(kind, type)}
    assert raised <= {*ft.__all__}
    assert ft.BudgetSpent is ft.errors.BudgetSpent


def test_opening_is_light():
    code = (
        "import sys, farthing; "
        "heavy = 'dp_accounting torch flwr sklearn matplotlib scipy.stats mpmath'.split(); "
        "print([name for name in heavy if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def tool():
    path = ROOT / "tools" / "architecture.py"
    if not path.exists():
        pytest.skip("not a checkout")
    spec = importlib.util.spec_from_file_location("architecture", path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_the_page_shows_the_folders_as_they_are():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert page == tool().drawn(page), "run: python tools/architecture.py"


def test_a_record_goes_the_way_that_the_page_shows():
    """The functions of the page are called in its order, when the script above them runs."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    script = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    called = []

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(SOURCE)):
            called.append((Path(code.co_filename).relative_to(SOURCE).as_posix(), code.co_qualname))

    names = {}
    exec(script.partition("ledger.promise")[0], names)
    sys.setprofile(note)
    try:
        exec("ledger.promise" + script.partition("ledger.promise")[2], names)
    finally:
        sys.setprofile(None)
    left = iter(called)
    for place, name in tool().WAY:
        wanted = name if name != "Rows" else "Rows.__init__"
        assert (place, wanted) in left, f"{place}: {wanted} is not called, or not in this order"


def test_no_public_class_is_defined_twice():
    """One name, one thing. (Functions may share a name: pld.epsilon, rdp.epsilon.)"""
    homes: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(path.relative_to(SOURCE).as_posix())
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_deploy_starts_no_command():
    for path in (SOURCE / "deploy").rglob("*.py"):
        assert "farthing.cli" not in path.read_text(encoding="utf-8"), path


def test_files_stay_short():
    """At most 500 lines; the verifier, which runs alone without the rest of the library, is one file."""
    long = {path.name for path in SOURCE.rglob("*.py") if path.read_text(encoding="utf-8").count("\n") > 500}
    assert long <= {"verifier.py"}


# Frameworks that farthing is called from, and what Flower, skl2onnx and PyTorch are themselves built on.
GUESTS = {"lightning", "transformers", "uvicorn", "starlette", "onnx", "triton"}
# How the packages that pyproject.toml names are imported, where that differs.
IMPORTED_AS = {"scikit-learn": "sklearn"}


def test_only_packages_that_are_declared_are_imported():
    """What a dependency brings along today, it may leave out tomorrow."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = [*project["dependencies"], *(one for extra in extras.values() for one in extra)]
    declared = {re.split(r"[^A-Za-z0-9_-]", one)[0] for one in named}
    known = {IMPORTED_AS.get(name, name.replace("-", "_")) for name in declared} | GUESTS
    found = {
        name.split(".")[0]: path.name
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    others = {name: where for name, where in found.items() if name not in known | sys.stdlib_module_names}
    assert not others.keys() - {"farthing"}, others
