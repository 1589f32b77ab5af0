"""Kill the writer at any moment: whatever it had released must be charged, and the journal must open.

The checker below reads the files with its own SQL, hashing and parsing, not with farthing.ledger.journal.
"""

import contextlib
import hashlib
import json
import os
import random
import sqlite3
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

import farthing
from farthing.ledger.journal import Journal

LONG = 300.0  # seconds; a busy machine is no failure

WRITER = """
import os, sys
from farthing.ledger.journal import Journal

path, world, keyed = sys.argv[1], sys.argv[2], sys.argv[3] == "True"
out = os.open(world, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
journal = Journal(path, {"epsilon": 1.0})
print("ready", flush=True)
while True:
    key = {"key": os.urandom(8).hex(), "request": "r"} if keyed else {}
    row = journal.append("charge", lambda last: ({"cost": 1.0}, [sum(last.state) + 1.0]), **key)
    if key:
        journal.store_answer(key["key"], row.hash.encode())
    os.write(out, f"{row.seq} {row.hash}\\n".encode())  # the answer leaves the house
    os.fsync(out)
"""


def start(path: Path, world: Path, keyed: bool) -> subprocess.Popen[str]:
    source = Path(farthing.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", WRITER, str(path), str(world), str(keyed)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def check(path: Path, world: Path, at_work: bool = False) -> tuple[int, int]:
    """The number of releases and of charges, if every release is charged and chain and head are whole."""
    # In this order, so that writers still at work can only have added rows to what was read before.
    lines = world.read_text().splitlines(keepends=True) if world.exists() else []
    released = [line.split() for line in lines if line.endswith("\n")]
    head_file = Path(f"{path}.head")
    head = head_file.read_bytes() if head_file.exists() else b""
    if not path.exists():
        assert not released
        assert not any(head)
        return 0, 0
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        if not connection.execute("SELECT name FROM sqlite_master").fetchall():
            assert not released
            assert not any(head)
            return 0, 0
        rows = connection.execute("SELECT * FROM chain ORDER BY seq").fetchall()

    hashes, total, previous = {}, 0.0, "0" * 64
    for number, (seq, moment, kind, body, state, before, digest) in enumerate(rows):
        canonical = json.dumps(
            [before, seq, moment, kind, json.loads(body), json.loads(state)],
            sort_keys=True,
            separators=(",", ":"),
        )
        assert (seq, before) == (number, previous)
        assert digest == hashlib.sha256(canonical.encode()).hexdigest()
        if kind == "charge":
            total += 1.0
            hashes[seq] = digest
        assert json.loads(state) == ([] if number == 0 else [total])
        previous = digest

    slots = []
    for slot in (head[:64], head[4096:4160]):
        if len(slot) == 64 and hashlib.sha256(b"farthing head" + slot[:48]).digest()[:16] == slot[48:]:
            magic, seq, digest = struct.unpack(">8sQ32s", slot[:48])
            assert magic == b"farthing"
            assert rows[seq][6] == digest.hex()
            slots.append(seq)
    # The head was read first: while writers are at work, rows may have come since it was made.
    assert slots or len(rows) == 1 or at_work

    for text_seq, digest in released:
        assert hashes[int(text_seq)] == digest, f"released in row {text_seq}, not charged"
        assert int(text_seq) <= max(slots, default=-1)
    assert len({seq for seq, _ in released}) == len(released)
    return len(released), len(hashes)


def wait_for_a_release(world: Path) -> None:
    """However slow the machine is, a writer at work releases something more."""
    said = world.stat().st_size if world.exists() else 0
    deadline = time.monotonic() + LONG
    while not world.exists() or world.stat().st_size <= said:
        assert time.monotonic() < deadline, "nothing was released"
        time.sleep(0.001)


def kill_again_and_again(directory: Path, kills: int, writers: int, keyed: bool, seed: int) -> None:
    path, world = directory / "my.ledger", directory / "world"
    dice = random.Random(seed)
    running: list[subprocess.Popen[str]] = []
    try:
        for kill in range(kills):
            while len(running) < writers:
                running.append(start(path, world, keyed))
            victim = running.pop(dice.randrange(writers))
            assert victim.stdout is not None
            if kill % 4:
                assert victim.stdout.readline() == "ready\n"
                wait_for_a_release(world)
                time.sleep(dice.uniform(0.0, 0.04))
            else:
                time.sleep(dice.uniform(0.03, 0.15))  # perhaps while it opens, recovers or creates the files
            victim.kill()
            victim.wait()
            victim.stdout.close()
            check(path, world, at_work=bool(running))
    finally:
        for writer in running:
            writer.kill()
            writer.wait()
            assert writer.stdout is not None
            writer.stdout.close()
    released, charged = check(path, world)
    assert 0 < released <= charged <= released + kills + writers  # at most what was under way each time
    with Journal(path, {"epsilon": 1.0}) as journal:
        assert journal.verify().state == [float(charged)]


@pytest.mark.parametrize(("kills", "writers", "keyed"), [(15, 1, False), (10, 1, True), (10, 3, False)])
def test_killed_writers_have_charged_what_they_released(
    kills: int, writers: int, keyed: bool, tmp_path: Path
) -> None:
    kills = kills if os.environ.get("FARTHING_EXPLORE") else kills // 3
    kill_again_and_again(tmp_path, kills, writers, keyed, seed=kills)


@pytest.mark.parametrize("seed", range(3))
def test_killed_while_it_makes_the_files(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    for attempt in range(3):
        path, world = tmp_path / f"{attempt}.ledger", tmp_path / f"{attempt}.world"
        writer = start(path, world, False)
        deadline = time.monotonic() + LONG
        while not Journal.exists(path):
            assert time.monotonic() < deadline, "no journal was made"  # asleep, the moment would be missed
        time.sleep(dice.uniform(0.0, 0.003))
        writer.kill()
        writer.wait()
        assert writer.stdout is not None
        writer.stdout.close()
        _, charged = check(path, world)
        with Journal(path, {"epsilon": 1.0}) as journal:
            assert journal.verify().state == ([float(charged)] if charged else [])


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "writers", "keyed"), [(200, 1, False), (100, 1, True), (100, 4, False)])
def test_killed_writers_many_times(kills: int, writers: int, keyed: bool, tmp_path: Path) -> None:
    kills = kills if os.environ.get("FARTHING_EXPLORE") else kills // 3
    kill_again_and_again(tmp_path, kills, writers, keyed, seed=kills)
