"""The wheel and the source archive: what is in them, and that they work where nothing else is."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import farthing

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "farthing"
pytestmark = pytest.mark.slow

USER = """
import farthing as ft
from farthing.linear.selection import Folds

ledger = ft.Ledger(ft.Budget(1.0, 1e-5))
reveal_type(ledger.share)
reveal_type(ledger.guarantee)
reveal_type(Folds(3).get_n_splits())
wrong: str = ledger.share
ft.Budget("much", 1e-5)
"""

PROGRAM = """
import farthing as ft
from farthing.data.adult import load_adult

adult = load_adult()
model = ft.LogisticRegression(1.0, 1e-5, bounds=(0, 1)).fit(adult.X_train, adult.y_train)
assert model.score(adult.X_test, adult.y_test) > 0.8
print(ft.__file__)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Both archives, built without a network."""
    pytest.importorskip("hatchling", reason="hatchling is not installed: pip install hatchling")
    pytest.importorskip("build", reason="build is not installed: pip install build")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, cwd=folder)
    (wheel,), (archive,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, archive


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """A Python with the wheel's files and the dependencies of this one, and nothing else of the checkout."""
    place = tmp_path_factory.mktemp("venv")
    venv.create(place, symlinks=True)
    python = place / "bin" / "python"
    if not python.exists():
        pytest.skip("a virtual environment lies elsewhere on this system")
    paths = sysconfig.get_paths(vars={"base": str(place), "platbase": str(place)})
    site = Path(paths["purelib"])
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(site)
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    return python


def run(python, *arguments, cwd):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(python), *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def test_the_wheel_holds_the_package_and_nothing_else(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
    info = f"farthing-{farthing.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"farthing", info}
    assert {f"{info}/licenses/LICENSE", f"{info}/licenses/NOTICE", f"{info}/entry_points.txt"} <= names
    assert {"farthing/py.typed", "farthing/noise/kernels.c", "farthing/data/datasets/adult.xz"} <= names
    modules = {f"farthing/{path.relative_to(SOURCE).as_posix()}" for path in SOURCE.rglob("*.py")}
    assert modules <= names
    assert not [name for name in names if "ledger-" in name or name.endswith((".pyc", ".so", ".ledger"))]


def test_the_source_archive_holds_what_a_build_and_the_tests_need(built):
    with tarfile.open(built[1]) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    wanted = {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "NOTICE",
        "constraints.txt",
        "src/farthing/noise/kernels.c",
    }
    assert wanted <= names
    assert {"tests/test_packaging.py", "conftest.py", "Makefile"} <= names
    assert not [
        name for name in names if name.startswith((".ci", ".venv", ".git/")) or name.endswith(".ledger")
    ]


def test_the_metadata(built):
    with zipfile.ZipFile(built[0]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith("METADATA"))
        said = Parser().parsestr(wheel.read(name).decode())
    assert said["Name"] == "farthing"
    assert said["Version"] == farthing.__version__
    assert said["License-Expression"] == "Apache-2.0"
    assert said["Requires-Python"] == ">=3.11"
    assert {"torch", "flower"} <= set(said.get_all("Provides-Extra"))
    assert "Typing :: Typed" in said.get_all("Classifier")
    needed = [line for line in said.get_all("Requires-Dist") if "extra ==" not in line]
    assert not [line for line in needed if line.startswith(("torch", "flwr", "lightning", "pytest"))]


def test_it_works_in_an_empty_folder(installed, tmp_path):
    found = run(installed, "-W", "error", "-c", PROGRAM, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert str(installed.parent.parent) in found.stdout
    assert list(tmp_path.iterdir()) == []


def test_its_command_works_in_an_empty_folder(installed, tmp_path):
    found = run(installed, "-m", "farthing.cli.main", "--version", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert farthing.__version__ in found.stdout
    assert run(installed, "-m", "farthing.cli.main", "--help", cwd=tmp_path).returncode == 0


def test_a_users_project_sees_the_types(installed, tmp_path):
    pytest.importorskip("mypy", reason="mypy is not installed: pip install mypy")
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\n[mypy-torch.*,flwr.*]\nfollow_imports = skip\n"
    )  # as if not there
    command = ["-m", "mypy", "--python-executable", str(installed), "--strict", "user.py"]
    found = run(sys.executable, *command, cwd=tmp_path).stdout
    assert 'Revealed type is "float"' in found.replace("builtins.", ""), found
    assert "budget.Guarantee" in found, found
    assert 'Revealed type is "int"' in found.replace("builtins.", ""), found
    assert found.count("error:") == 2, found  # the two mistakes in it, and nothing else
