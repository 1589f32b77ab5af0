"""The lock: every dependency and tool has an exact version, so that `make test` does the same next year."""

import re
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def pins(*names):
    """The exact versions in files of constraints, by normal name."""
    lines = [line for name in names for line in (ROOT / name).read_text().splitlines()]
    rows = [line.partition("#")[0].strip() for line in lines]
    return dict(row.replace("_", "-").lower().split("==") for row in rows if row)


def wanted(extras):
    """Every installed distribution that farthing with these extras asks for, however far down."""
    requirements = pytest.importorskip("packaging.requirements")
    farthing_too = [("farthing", extra) for extra in ("", *extras)]
    seen, waiting = set(farthing_too), list(farthing_too)
    while waiting:
        name, extra = waiting.pop()
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for line in map(requirements.Requirement, lines):
            if line.marker is None or line.marker.evaluate({"extra": extra}):
                parts = {(line.name.replace("_", "-").lower(), each) for each in ("", *line.extras)}
                waiting += parts - seen
                seen |= parts
    names = {name for name, _ in seen - set(farthing_too)}
    return {name for name in names if name != "farthing" and any(metadata.distributions(name=name))}


def test_everything_that_is_installed_for_development_has_an_exact_version():
    held, needed = pins("constraints.txt"), wanted(["dev", "torch", "flower", "report", "docs"])
    assert {"numpy", "hatchling"} <= needed
    assert needed <= set(held), f"constraints.txt does not pin {sorted(needed - set(held))}"
    assert wanted(["bench"]) <= held.keys() | pins("constraints-bench.txt").keys()


def test_constraints_name_versions_and_no_place_to_fetch_them_from():
    for path in ROOT.glob("constraints*.txt"):
        rows = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        assert rows
        assert not [row for row in rows if not re.fullmatch(r"[\w.-]+(==|<)[\w.]+(; .*)?", row)]
