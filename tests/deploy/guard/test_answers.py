"""The log of answers: appended, chained, held by one, and a head of the ledger."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import farthing
from farthing.deploy.guard.keeper import AnswerLog
from farthing.errors import InvalidValue, LedgerLocked


@pytest.fixture
def path(tmp_path):
    return tmp_path / "answers"


def filled(path, lines=3):
    log = AnswerLog(path)
    for number in range(lines):
        log.append(f"k{number}", number, f"{number:064x}", "ab" * 32)
    log.close()


def test_lines_stay_and_are_not_repeated(path):
    filled(path)
    before = path.read_bytes()
    log = AnswerLog(path)
    assert "k1" in log
    assert "k3" not in log
    log.append("k1", 1, f"{1:064x}", "ab" * 32)
    assert path.read_bytes() == before
    with pytest.raises(LedgerLocked, match="another answer"):
        log.append("k1", 1, f"{1:064x}", "cd" * 32)
    log.append("k3", 3, f"{3:064x}", "ab" * 32)
    assert path.read_bytes().startswith(before)
    assert len(path.read_bytes().splitlines()) == 4
    log.close()
    assert oct(path.stat().st_mode)[-3:] == "600"


@pytest.mark.parametrize("cut", range(1, 12, 2))
def test_a_torn_line_is_cut_away(path, cut):
    filled(path)
    whole = path.read_bytes()
    os.truncate(path, len(whole) - cut)
    log = AnswerLog(path)
    assert "k1" in log
    assert "k2" not in log
    log.append("k2", 2, f"{2:064x}", "ab" * 32)
    log.close()
    assert path.read_bytes() == whole


def test_changed_or_missing_lines_lock(path):
    filled(path)
    first, second, third = path.read_bytes().splitlines(keepends=True)
    for lines in ([second, third], [first, third], [first, second.replace(b"ab", b"cd"), third], [b"{}\n"]):
        path.write_bytes(b"".join(lines))
        with pytest.raises(LedgerLocked, match="line"):
            AnswerLog(path)


def test_one_at_a_time(path):
    log = AnswerLog(path)
    with pytest.raises(InvalidValue, match="another guard"):
        AnswerLog(path)
    log.close()
    AnswerLog(path).close()
    with pytest.raises(InvalidValue, match="directory"):
        AnswerLog(path / "none" / "x")


def test_a_ledger_without_a_logged_row_locks(path):
    filled(path)
    log, hashes = AnswerLog(path), [f"{number:064x}" for number in range(3)]
    log.check(hashes, "my.ledger")
    log.check([*hashes, "more"], "my.ledger")
    for other in (hashes[:2], [*hashes[:2], "another"], []):
        with pytest.raises(LedgerLocked, match="earlier state"):
            log.check(other, "my.ledger")
    log.close()


def test_a_full_disk_leaves_whole_lines(path):
    filled(path)
    code = """
import resource, sys
from farthing.errors import LedgerLocked
from farthing.deploy.guard.keeper import AnswerLog
log = AnswerLog(sys.argv[1])
size = len(open(sys.argv[1], "rb").read())
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, resource.RLIM_INFINITY))
try:
    log.append("k3", 3, "00" * 32, "ab" * 32)
except LedgerLocked:
    print("locked", "k3" in log)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
log.append("k3", 3, "00" * 32, "ab" * 32)
"""
    if resource.getrlimit(resource.RLIMIT_FSIZE)[1] != resource.RLIM_INFINITY:
        pytest.skip("the size of files is limited here already")
    source = {**os.environ, "PYTHONPATH": str(Path(farthing.__file__).parents[1])}
    command = [sys.executable, "-c", code, path]
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=source)
    assert out.stdout == "locked False\n"
    lines = path.read_bytes().splitlines()
    assert [json.loads(line)["key"] for line in lines] == ["k0", "k1", "k2", "k3"]
