"""The list of mutants is up to date, and its runner tells what is noticed from what is not."""

import json
import re
import subprocess
import sys

import pytest
from tools.mutants import runner
from tools.mutants.catalog import ROOT, SOURCE, load

MUTANTS = load()


def test_every_mutant_still_applies_and_is_a_program():
    wrong = []
    for mutant in MUTANTS:
        text = (ROOT / SOURCE / mutant.file).read_text(encoding="utf-8")
        try:
            changed = mutant.applied(text)
            if mutant.file.endswith(".py"):
                compile(changed, mutant.file, "exec")
        except (ValueError, SyntaxError) as error:
            wrong.append(str(error))
    assert not wrong, "\n".join(wrong)


def test_there_are_enough_mutants_all_different_and_their_tests_exist():
    assert len(MUTANTS) >= 300
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        assert mutant.old != mutant.new
        assert len(mutant.breaks) > 8, mutant.name
        for name in mutant.tests.split():
            assert (ROOT / name).exists(), f"{name} of {mutant.name}"
        assert mutant.tests or mutant.equivalent


def test_every_survivor_in_the_document_is_one_of_the_list():
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", (ROOT / "docs" / "mutants.md").read_text(), re.M)
    named = {(mutant.file, mutant.old.split("\n")[0].strip()) for mutant in MUTANTS if mutant.equivalent}
    assert {(file, old.replace("\\|", "|")) for file, old in rows} == named


@pytest.fixture
def small(tmp_path):
    """A project with a function and a test of half of it."""
    package = tmp_path / SOURCE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "sums.py").write_text(
        "def twice(x):\n    return 2 * x\n\n\ndef thrice(x):\n    return 3 * x\n"
    )
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_sums.py").write_text(
        "from farthing.sums import twice\n\n\ndef test_twice():\n    assert twice(2) == 4\n"
    )
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["src"]\n')
    return tmp_path


PROGRAM = """
import json, sys
from pathlib import Path
from tools.mutants import runner
from tools.mutants.catalog import Mutant

root, seconds, rows = Path(sys.argv[1]), float(sys.argv[2]), json.loads(sys.argv[3])
mutants = [Mutant("sums.py", old, new, "", tests) for old, new, tests in rows]
found = {outcome.mutant: outcome.verdict for outcome in runner.run(mutants, root, 2, seconds)}
print(json.dumps([found[mutant] for mutant in mutants]))
"""


def verdicts(root, seconds, *rows):
    """In a process of its own: the runner forks, and this one knows farthing already."""
    command = [sys.executable, "-c", PROGRAM, str(root), str(seconds), json.dumps(rows)]
    return json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


def test_the_runner_tells_killed_from_survived_and_broken(small):
    before = (small / SOURCE / "sums.py").read_text()
    bugs = {
        ("2 * x", "2 + x + 1", "tests/test_sums.py"): runner.KILLED,
        ("3 * x", "4 * x", "tests/test_sums.py"): runner.SURVIVED,
        ("2 * x", "2 *", "tests/test_sums.py"): runner.BROKEN,
        ("5 * x", "6 * x", "tests/test_sums.py"): runner.BROKEN,
        ("2 * x", "3 * x", "tests/test_none.py"): runner.BROKEN,
    }
    assert verdicts(small, 600.0, *bugs) == list(bugs.values())
    assert (small / SOURCE / "sums.py").read_text() == before


def test_a_mutant_that_never_ends_is_ended(small):
    endless = ("2 * x", '__import__("time").sleep(3600)', "tests/test_sums.py")
    assert verdicts(small, 1.0, endless) == [runner.SLOW]
