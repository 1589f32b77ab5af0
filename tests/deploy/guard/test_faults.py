"""Guards as real processes, killed, starved and set back: no answer without a charge, none given back."""

import os
import resource
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import farthing
from farthing.deploy.messages.signed import Reason
from farthing.deploy.messages.transport import call
from farthing.errors import LedgerLocked


def ask(village, house, number, **lies):
    return call(house.socket, village.question(number, **lies), seconds=60)


# Where the guard dies in round 2, and what comes of the same question afterwards.
PLACES = {
    "before-anything": "answered",
    "before-charge": "answered",
    "after-charge": "lost",
    "before-store": "lost",
    "after-store": "kept",
    "before-log": "kept",
    "after-log": "kept",
    "after-answer": "kept",
}


@pytest.mark.parametrize("place", PLACES)
def test_killed_in_the_middle(place, village, told):
    house = village.settle(1).houses["p0"]
    house.start(place, 2)
    first = told(ask(village, house, 1), house)["value"]
    with pytest.raises(OSError, match=r"guard|reset|Broken"):
        ask(village, house, 2)
    assert house.process.gone(60)
    charged = {"answered": 1, "lost": 2, "kept": 2}[PLACES[place]]
    assert village.check()["p0"][1] == charged
    house.start()
    again = told(ask(village, house, 2), house)
    if PLACES[place] == "lost":
        assert again is Reason.LOST
    else:
        assert again["left"] == 3
        np.testing.assert_array_equal(told(ask(village, house, 2), house)["value"], again["value"])
    np.testing.assert_array_equal(told(ask(village, house, 1), house)["value"], first)
    assert told(ask(village, house, 2, w=(1.0, 0.0, 0.0)), house) in (Reason.CONFLICT, Reason.LOST)
    assert told(ask(village, house, 3), house)["left"] == 2
    answered = 2 if PLACES[place] == "lost" else 3
    assert village.check(verify=place in ("after-charge", "before-log")) == {"p0": (answered, 3)}


def test_a_full_disk_releases_nothing_and_recovers(village, told):
    house = village.settle(1).houses["p0"].start()
    ask(village, house, 1)
    hard = resource.prlimit(house.process.pid, resource.RLIMIT_FSIZE)[1]
    grown = max(path.stat().st_size for path in house.folder.iterdir() if path.is_file())
    for number, room in enumerate((0, 4096, grown, grown + 2048), 2):
        resource.prlimit(house.process.pid, resource.RLIMIT_FSIZE, (room, hard))
        reply = told(ask(village, house, number), house)
        assert reply is Reason.LOCKED or reply["round"] == number
        village.check()
    resource.prlimit(house.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
    charged = village.check()["p0"][1]
    if charged < 5:
        assert told(ask(village, house, 10), house)["left"] == 4 - charged
    assert told(ask(village, house, 1), house)["round"] == 1
    logged, charged = village.check(verify=True)["p0"]
    assert 1 <= logged <= charged <= 5


def test_a_ledger_that_cannot_be_written_releases_nothing(village, told):
    house = village.settle(1).houses["p0"]
    guard = house.open()
    guard.answer(village.question(1))
    guard._ledger.journal._fetch("PRAGMA query_only = ON")
    assert told(guard.answer(village.question(2)), house) is Reason.LOCKED
    house.stop()
    for path in house.folder.iterdir():
        path.chmod(0o444)
    house.folder.chmod(0o555)
    village.folder.chmod(0o755)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)  # root may write anything
        with pytest.raises(LedgerLocked, match="Permission denied"):
            house.open()
    finally:
        os.seteuid(user)
        house.folder.chmod(0o755)
    for path in house.folder.iterdir():
        path.chmod(0o600)
    assert told(house.start() and ask(village, house, 2), house)["left"] == 3
    assert village.check(verify=True) == {"p0": (2, 2)}


def files(house, *suffixes):
    return [Path(f"{house.ledger}{suffix}") for suffix in suffixes]


@pytest.fixture
def restored(village):
    """A party after three rounds; a function puts some of its files back to what they were after one."""
    house = village.settle(1).houses["p0"]
    guard = house.open()
    guard.answer(village.question(1))
    house.stop()
    for path in files(house, "", ".head", ".answers"):
        shutil.copy(path, f"{path}.old")
    guard = house.open()
    for number in (2, 3):
        guard.answer(village.question(number))
    house.stop()

    def put_back(*suffixes):
        for path in files(house, *suffixes):
            shutil.copy(f"{path}.old", path)
        for path in files(house, "-wal", "-shm"):
            path.unlink(missing_ok=True)
        return house

    return put_back


@pytest.mark.parametrize("suffixes", [("",), ("", ".head"), (".head",), ("", ".answers"), (".answers",)])
def test_an_old_copy_of_some_files_locks_or_changes_nothing(suffixes, restored, village):
    house = restored(*suffixes)
    if "" in suffixes:
        assert house.fails() == "failed LedgerLocked"
    else:  # an old head or log beside the newest ledger: the ledger has all that they saw
        house.start()


def test_an_old_copy_of_all_files_is_found_by_the_head_that_the_coordinator_keeps(restored, village, told):
    house = restored()
    guard = house.open()
    head = told(guard.answer(village.question(3)), house)["head"]
    house.stop()
    house = restored("", ".head", ".answers").start()
    reply = ask(village, house, 4, seen=tuple(head))
    assert told(reply, house) is Reason.LOCKED
    assert village.check() == {"p0": (1, 1)}


def test_clocks_that_jump_decide_nothing(village, told):
    house = village.settle(1).houses["p0"].start("clock")
    left = [told(ask(village, house, number), house)["left"] for number in (1, 2, 3)]
    assert left == [4, 3, 2]
    house.start()
    assert told(ask(village, house, 4), house)["left"] == 1
    with sqlite3.connect(house.ledger) as connection:
        years = [row[0][:4] for row in connection.execute("SELECT time FROM chain ORDER BY seq")]
    connection.close()
    assert {"1971", "9998"} & set(years)
    assert years != sorted(years)
    assert village.check(verify=True) == {"p0": (4, 4)}


COORDINATOR = """
import os, signal, sys
from pathlib import Path
import numpy as np
from farthing.linear.problem import Problem
from farthing.federated.methods.sgd2 import sgd2
from farthing.deploy.checkpoint import Checkpoint
from farthing.deploy.coordinator import Remote
from farthing.deploy.messages.signed import Signer
from farthing.deploy.messages.transport import UnixSockets
from farthing.linear.losses import logistic
from farthing.queries.query import run

folder, place, number, out = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
names = sys.argv[5:]

def dying(name, after):
    global number
    whole = getattr(Checkpoint, name)
    def wrapped(self, *arguments):
        global number
        number -= 1
        if number == 0 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = whole(self, *arguments)
        if number == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(Checkpoint, name, wrapped)

if place:
    dying("add", place == "after-record")
sockets = UnixSockets({name: folder / name / "s" for name in names})
enrolled = {name: Signer.load(folder / name / "key").public for name in names}
key = Signer.load(folder / "coordinator")
clients = Remote(sockets, key, enrolled, run="run-1", dataset="d", checkpoint=folder / "run", seconds=60)
found = run(sgd2(clients, Problem(logistic, 63, 2, unit=False), rounds=5))
np.savez(out, steps=found.steps, u=found.w[0], constant=found.w[1])
"""


def coordinate(village, place, number, out):
    source = Path(farthing.__file__).parents[1]
    command = [sys.executable, "-c", COORDINATOR, str(village.folder), place, str(number), str(out)]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    return subprocess.run([*command, *village.houses], env=environment, timeout=300).returncode


def test_a_killed_coordinator_goes_on_and_ends_with_the_same_model(village, tmp_path):
    """Killed before and after it recorded a round; guards answer from what they kept, at no charge."""
    village.settle(3).coordinator.save(village.folder / "coordinator")
    for number, house in enumerate(village.houses.values()):
        house.start(seed=number)
    assert coordinate(village, "", 0, tmp_path / "whole.npz") == 0
    whole = dict(np.load(tmp_path / "whole.npz"))
    books = village.check()
    village.stop()
    shutil.rmtree(village.folder / "run")
    for number, house in enumerate(village.houses.values()):
        for path in files(house, "", ".head", ".answers", "-wal", "-shm"):
            path.unlink(missing_ok=True)
        house.start(seed=number)
    assert (
        coordinate(village, "before-record", 4, tmp_path / "none.npz") < 0
    )  # hello, invite, round 1, round 2
    assert coordinate(village, "after-record", 2, tmp_path / "none.npz") < 0  # round 2 again, round 3
    assert not (tmp_path / "none.npz").exists()
    assert coordinate(village, "", 0, tmp_path / "again.npz") == 0
    again = dict(np.load(tmp_path / "again.npz"))
    assert again.keys() == whole.keys()
    for name, value in whole.items():
        np.testing.assert_array_equal(again[name], value)
    assert village.check() == books == {"p0": (5, 5), "p1": (5, 5), "p2": (5, 5)}
