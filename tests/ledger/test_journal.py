import contextlib
import copy
import errno
import fcntl
import io
import json
import os
import pickle
import random
import shutil
import sqlite3
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import farthing
from farthing.errors import BudgetSpent, InvalidValue, LedgerLocked, NotReleased, Unsupported
from farthing.ledger import journal as module
from farthing.ledger.journal import Journal
from farthing.ledger.journal_rows import Row, digest_of

HEADER = {"epsilon": 1.0, "delta": 1e-5, "adjacency": "add-remove"}
SUFFIXES = ("", "-wal", "-shm", ".head")


def charge(journal: Journal, cost: float = 0.5, **keyed: str) -> Row:
    return journal.append("charge", lambda last: ({"cost": cost}, [sum(last.state) + cost]), **keyed)


def request(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def files(path: Path) -> list[Path]:
    return [file for suffix in SUFFIXES if (file := Path(f"{path}{suffix}")).exists()]


def save(path: Path, to: Path) -> None:
    # By another process: closing a second descriptor of the file here would drop SQLite's locks on it.
    to.mkdir()
    subprocess.run(["cp", *map(str, files(path)), str(to)], check=True)


def restore(path: Path, saved: Path, *suffixes: str) -> None:
    for suffix in suffixes:
        Path(f"{path}{suffix}").unlink(missing_ok=True)
        if Path(f"{saved / path.name}{suffix}").exists():
            shutil.copy(f"{saved / path.name}{suffix}", f"{path}{suffix}")


def sql(path: Path, statement: str, *values: object) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        return connection.execute(statement, values).fetchall()


def script(code: str, *arguments: object) -> str:
    """Run code in a fresh process with one thread, where forking is safe."""
    source = Path(farthing.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


PRELUDE = """
import os, sys, time
from farthing.errors import *
from farthing.ledger.journal import Journal
def charge(journal, limit=1e9):
    def decide(last):
        if sum(last.state) + 1 > limit:
            raise BudgetSpent("spent")
        return {"by": os.getpid()}, [sum(last.state) + 1]
    return journal.append("charge", decide)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "my.ledger"


@pytest.fixture
def written(path: Path) -> Path:
    """A closed journal of eight rows, with an answered key and one that was never answered."""
    with Journal(path, HEADER) as journal:
        for cost in (0.25, 0.5, 0.125):
            charge(journal, cost)
        charge(journal, key="first", request=request("mean"))
        journal.store_answer("first", b"\x00 answer \xff")
        charge(journal, key="second", request=request("median"))
        journal.append("close", lambda last: ({}, last.state))
    return path


# --- what a journal does


@pytest.mark.parametrize("durable", [False, True])
def test_rows_follow_each_other(durable: bool, path: Path) -> None:
    with Journal(path if durable else None, HEADER) as journal:
        rows = [charge(journal, 0.1 * n) for n in range(5)]
        assert journal.header == HEADER
        assert [row.seq for row in rows] == [1, 2, 3, 4, 5]
        assert list(journal.rows(1)) == rows
        assert list(journal.rows(4)) == rows[3:]
        assert list(journal.rows(9)) == []
        assert journal.last() == rows[-1] == journal.verify()
        previous = "0" * 64
        for row in journal.rows():
            fields = [previous, row.seq, row.time, row.kind, row.body, row.state]
            text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
            assert (row.previous, row.hash) == (previous, sha256(text.encode()).hexdigest())
            previous = row.hash
    with pytest.raises(InvalidValue, match="closed"):
        charge(journal)


def test_reopened_journal_goes_on(path: Path) -> None:
    assert not Journal.exists(path)
    with Journal(path, HEADER) as journal:
        first = charge(journal)
    assert Journal.exists(path)
    with Journal(str(path)) as journal:
        assert journal.header == HEADER
        assert journal.last() == first
        assert charge(journal).state == [1.0]


def test_many_rows_are_read_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAGE", 3)
    journal = Journal(None, {})
    for _ in range(8):
        charge(journal)
    assert [row.seq for row in journal.rows()] == list(range(9))
    assert [row.seq for row in journal.rows(-2)] == list(range(9))


def test_refusal_writes_nothing(path: Path) -> None:
    def refuse(last: Row) -> tuple[dict[str, Any], list[float]]:
        last.state[0] = 99.0  # what decide is shown is its own
        raise BudgetSpent("no")

    with Journal(path, HEADER) as journal:
        charge(journal)
        with pytest.raises(BudgetSpent):
            journal.append("charge", refuse)
        with pytest.raises(OSError, match="mine"):
            journal.append("charge", lambda last: (_ for _ in ()).throw(OSError("mine")))
        assert charge(journal).state == [1.0]
        assert journal.verify().seq == 2


@pytest.mark.parametrize(
    ("body", "state"),
    [
        ({}, [float("nan")]),
        ({}, [float("inf")]),
        ({}, ["much"]),
        ({"cost": float("nan")}, [0.0]),
        ({"cost": {1, 2}}, [0.0]),
        ({"answer": 1}, [0.0]),
    ],
)
def test_nonsense_is_refused(body: dict[str, Any], state: list[float]) -> None:
    journal = Journal(None, {})
    with pytest.raises(InvalidValue):
        journal.append("charge", lambda last: (body, state))
    with pytest.raises(InvalidValue, match="finite"):
        Journal(None, {"epsilon": float("inf")})
    assert journal.verify().seq == 0


def test_wrong_arguments_are_refused(path: Path, tmp_path: Path) -> None:
    journal = Journal(None, {})
    with pytest.raises(InvalidValue, match="kind must be one of"):
        journal.append("open", lambda last: ({}, []))
    with pytest.raises(InvalidValue, match="key and request"):
        charge(journal, key="first")
    with pytest.raises(InvalidValue, match="must not write"):
        journal.append("note", lambda last: (charge(journal).body, []))
    with pytest.raises(InvalidValue, match="bytes"):
        journal.store_answer("first", "text")  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match="pass a header to create one"):
        Journal(path)
    with pytest.raises(InvalidValue, match="existing folder"):
        Journal(tmp_path / "nowhere" / "my.ledger", HEADER)
    assert files(path) == []
    assert journal.verify().seq == 0


def test_another_database_is_left_alone(path: Path) -> None:
    sql(path, "CREATE TABLE mine(x)")
    with pytest.raises(InvalidValue, match="another kind of file"):
        Journal(path, HEADER)
    assert sql(path, "SELECT name FROM sqlite_master") == [("mine",)]
    assert sql(path, "PRAGMA journal_mode") == [("delete",)]


def test_header_must_be_the_same(written: Path) -> None:
    Journal(written, dict(reversed(HEADER.items()))).close()
    with pytest.raises(
        InvalidValue, match=r"epsilon is 2\.0 here and 1\.0 there, unit is 'user' here"
    ) as caught:
        Journal(written, {**HEADER, "epsilon": 2.0, "unit": "user"})
    assert "delta" not in str(caught.value)


def test_export(written: Path) -> None:
    out = io.StringIO()
    with Journal(written) as journal:
        journal.export(out)
        assert [Row(**json.loads(line)) for line in out.getvalue().splitlines()] == list(journal.rows())


# --- keys


@pytest.mark.parametrize("durable", [False, True])
def test_a_key_is_charged_once_and_its_answer_replayed(durable: bool, path: Path) -> None:
    mean, median = request("mean"), request("median")
    with Journal(path if durable else None, {}) as journal:
        assert journal.find_answer("key", mean) is None
        row = charge(journal, key="key", request=mean)
        assert row.body == {"cost": 0.5, "answer": {"key": "key", "request": mean}}
        with pytest.raises(NotReleased, match="row 1"):
            journal.find_answer("key", mean)
        with pytest.raises(NotReleased):
            charge(journal, key="key", request=mean)
        with pytest.raises(InvalidValue, match="another request"):
            charge(journal, key="key", request=median)

        released = journal.store_answer("key", b"3.14")
        assert (released.kind, released.state) == ("release", row.state)
        assert journal.find_answer("key", mean) == b"3.14"
        with pytest.raises(InvalidValue, match="another request"):
            journal.find_answer("key", median)
        with pytest.raises(InvalidValue, match="find_answer"):
            charge(journal, key="key", request=mean)
        for key in ("key", "never"):
            with pytest.raises(InvalidValue, match="not yet answered"):
                journal.store_answer(key, b"2.72")
        assert journal.verify() == released


def test_a_refused_key_is_still_free() -> None:
    journal = Journal(None, {})
    with pytest.raises(BudgetSpent):
        journal.append("charge", lambda last: (_ for _ in ()).throw(BudgetSpent()), key="a", request="b")
    assert journal.find_answer("a", "b") is None
    assert charge(journal, key="a", request="b").seq == 1
    journal.store_answer("a", b"")
    assert journal.find_answer("a", "b") == b""


@pytest.mark.parametrize(
    "change",
    [
        "value = x'00'",
        "value = NULL",
        "value = 'text'",
        "request = 'other'",
        "key = 'third'",
        "seq = 3",
        "released = 4",
        "released = NULL, value = NULL",
    ],
)
def test_changed_answers_lock(change: str, written: Path) -> None:
    with Journal(written) as journal:
        sql(written, f"UPDATE answers SET {change} WHERE key = 'first'")
        if change.startswith(("value", "released = 4")):
            with pytest.raises(LedgerLocked):
                journal.find_answer("first", request("mean"))
        with pytest.raises(LedgerLocked):
            journal.verify()
    sql(written, "DELETE FROM answers")
    with pytest.raises(LedgerLocked, match="answers"):
        Journal(written)


# --- damage


@pytest.mark.parametrize("column", ["seq", "time", "kind", "body", "state", "previous", "hash"])
def test_one_flipped_byte_locks(column: str, written: Path) -> None:
    with (
        contextlib.closing(sqlite3.connect(written, isolation_level=None)) as tamper,
        Journal(written) as journal,
    ):
        tamper.execute("PRAGMA synchronous = OFF")
        for (seq,) in tamper.execute("SELECT seq FROM chain").fetchall():
            ((value,),) = tamper.execute(f"SELECT {column} FROM chain WHERE seq = ?", (seq,)).fetchall()
            size = 8 if column == "seq" else len(value)
            for place in range(0, size, max(1, size // 16)):
                if column == "seq":
                    wrong = seq ^ (1 << (7 * place + 4))  # far enough not to meet another row
                else:
                    wrong = value[:place] + chr(ord(value[place]) ^ 1) + value[place + 1 :]
                where = wrong if column == "seq" else seq
                tamper.execute(f"UPDATE chain SET {column} = ? WHERE seq = ?", (wrong, seq))
                with pytest.raises(LedgerLocked):
                    journal.verify()
                tamper.execute(f"UPDATE chain SET {column} = ? WHERE seq = ?", (value, where))
        journal.verify()


@pytest.mark.parametrize("suffix", ["", "-wal"])
def test_a_flipped_byte_in_the_file_locks_or_does_no_harm(suffix: str, path: Path, tmp_path: Path) -> None:
    with Journal(path, HEADER) as journal:
        for _ in range(6):
            charge(journal)
        rows = list(journal.rows())
        if suffix:  # else the log is folded into the file on closing
            save(path, tmp_path / "saved")
    if not suffix:
        save(path, tmp_path / "saved")
    data = Path(f"{tmp_path / 'saved' / path.name}{suffix}").read_bytes()
    used = [place for place, byte in enumerate(data) if byte]
    locked = 0
    for place in random.Random(0).sample(used, 120):
        restore(path, tmp_path / "saved", *SUFFIXES)
        Path(f"{path}-shm").unlink(missing_ok=True)
        changed = bytes([data[place] ^ 1])
        Path(f"{path}{suffix}").write_bytes(data[:place] + changed + data[place + 1 :])
        try:
            with Journal(path, HEADER) as journal:
                assert list(journal.rows()) == rows
        except (LedgerLocked, InvalidValue):
            locked += 1
    assert locked > 60


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM chain WHERE seq = 3",
        "DELETE FROM chain WHERE seq = 0",
        "DELETE FROM chain WHERE seq = (SELECT max(seq) FROM chain)",
        "DELETE FROM chain",
        "UPDATE chain SET seq = CASE seq WHEN 2 THEN -3 ELSE -2 END WHERE seq IN (2, 3);"
        "UPDATE chain SET seq = -seq WHERE seq < 0",
        "INSERT INTO chain SELECT seq + 99, time, kind, body, state, previous, hash FROM chain WHERE seq = 1",
        "INSERT INTO chain SELECT -seq, time, kind, body, state, previous, hash FROM chain WHERE seq = 1",
        "UPDATE chain SET body = CAST(body AS BLOB) WHERE seq = 2",
        "UPDATE chain SET state = NULL WHERE seq = 2",
        "UPDATE chain SET body = replace(body, ':', ': ') WHERE seq = 2",
        "DROP TABLE chain",
        "DROP TABLE answers",
    ],
)
def test_missing_reordered_or_added_rows_lock(damage: str, written: Path) -> None:
    with contextlib.closing(sqlite3.connect(written)) as connection:
        connection.executescript(damage)
    for header in (None, HEADER):
        with pytest.raises(LedgerLocked):
            Journal(written, header)


def test_a_forged_chain_does_not_agree_with_the_head(written: Path, tmp_path: Path) -> None:
    with Journal(tmp_path / "forged.ledger", HEADER) as journal:
        for _ in range(9):
            charge(journal, 0.0)
    shutil.copy(tmp_path / "forged.ledger", written)
    with pytest.raises(LedgerLocked, match=r"without the row \d of its head"):
        Journal(written)


@pytest.mark.parametrize("restored", [("", "-wal", "-shm"), ("-wal",), ("-wal", "-shm")])
def test_an_earlier_log_or_file_put_back_locks(restored: tuple[str, ...], path: Path, tmp_path: Path) -> None:
    code = """
        journal = Journal(sys.argv[1])
        for _ in range(3):
            charge(journal)
        os.kill(os.getpid(), 9)  # so that the log stays beside the file
    """
    Journal(path, HEADER).close()
    for saved in ("earlier", "now"):
        with contextlib.suppress(AssertionError):  # killed
            script(code, path)
        save(path, tmp_path / saved)
    restore(path, tmp_path / "earlier", *restored)
    with pytest.raises(LedgerLocked, match=r"ends at row 3, without the row [56] of its head"):
        Journal(path, HEADER)
    restore(path, tmp_path / "now", *SUFFIXES)
    Path(f"{path}-wal").write_bytes(Path(f"{path}-wal").read_bytes()[:-1])
    with pytest.raises(LedgerLocked, match="ends at row 5"):
        Journal(path, HEADER)
    restore(path, tmp_path / "now", *SUFFIXES)
    with Journal(path, HEADER) as journal:
        assert journal.verify().seq == 6


def test_a_deleted_log_or_file_locks(path: Path, tmp_path: Path) -> None:
    with Journal(path, HEADER) as journal:
        charge(journal)
        save(path, tmp_path / "open")
    restore(path, tmp_path / "open", *SUFFIXES)
    for suffix in ("-wal", "-shm"):
        Path(f"{path}{suffix}").unlink()
    with pytest.raises(LedgerLocked):
        Journal(path, HEADER)
    path.unlink()
    assert Journal.exists(path)
    for header in (HEADER, None):
        with pytest.raises(LedgerLocked):
            Journal(path, header)


@pytest.mark.parametrize("pair", [False, True])
def test_files_replaced_under_an_open_journal_lock(pair: bool, path: Path, tmp_path: Path) -> None:
    with Journal(path, HEADER) as journal:
        charge(journal)
        save(path, tmp_path / "earlier")
        charge(journal)
        restore(path, tmp_path / "earlier", *(SUFFIXES if pair else SUFFIXES[:3]))
        for _ in range(2):
            with pytest.raises(LedgerLocked):
                charge(journal)
        for file in files(path):
            file.unlink()
        with pytest.raises(LedgerLocked):
            charge(journal)
        assert not path.exists()


def test_another_journal_put_in_place_of_an_open_one_locks(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "saved" / path.name
    with Journal(path, HEADER) as journal:
        charge(journal)
        other.parent.mkdir()
        with Journal(other, HEADER) as longer:
            for _ in range(3):
                charge(longer, 0.0)
        restore(path, other.parent, *SUFFIXES)
        with pytest.raises(LedgerLocked, match="row 1, seen before, was replaced"):
            charge(journal)


def test_a_journal_found_damaged_stays_locked(written: Path) -> None:
    with Journal(written) as journal:
        sql(written, "UPDATE chain SET body = '{}' WHERE seq = 1")
        for _ in range(2):
            with pytest.raises(LedgerLocked, match=r"row 1 was changed.*Keep both files"):
                journal.verify()
            with pytest.raises(LedgerLocked):
                charge(journal)


def test_a_changed_answer_stops_charges_too(written: Path) -> None:
    with Journal(written) as journal:
        sql(written, "UPDATE answers SET value = x'00' WHERE key = 'first'")
        with pytest.raises(LedgerLocked, match="not the one that was released"):
            journal.find_answer("first", request("mean"))
        with pytest.raises(LedgerLocked):
            charge(journal)


def test_a_middle_row_rewritten_with_a_hash_of_its_own_breaks_the_chain(written: Path) -> None:
    seq, time, kind, body, _, previous, _ = sql(written, "SELECT * FROM chain WHERE seq = 1")[0]
    forged = (seq, time, kind, body, "[0.0]", previous)
    digest = digest_of(*forged)
    sql(written, "UPDATE chain SET state = ?, hash = ? WHERE seq = 1", "[0.0]", digest)
    with pytest.raises(LedgerLocked, match="row 2 does not follow row 1"):
        Journal(written).verify()


def test_a_row_that_another_process_adds_has_to_follow_the_last_one(path: Path) -> None:
    with Journal(path, {"epsilon": 1.0}) as journal:
        last = charge(journal)
        fields = (last.seq + 1, last.time, "charge", "{}", "[0.0]", "f" * 64)
        sql(path, "INSERT INTO chain VALUES (?, ?, ?, ?, ?, ?, ?)", *fields, digest_of(*fields))
        with pytest.raises(LedgerLocked, match="does not follow"):
            charge(journal)


@pytest.mark.parametrize("room", [0, 1, 60, 4095, 4096, 4200, 8192, 8250, 12_000, 20_000, 30_000])
def test_a_disk_that_was_full_when_a_ledger_was_begun_leaves_nothing_in_the_way(
    room: int, path: Path
) -> None:
    code = """
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
    try:
        Journal(sys.argv[1], {"epsilon": 1.0})
        print("begun")
    except LedgerLocked as error:
        print("the disk has room" in str(error))
    """
    said = script(code, path, room).split()
    assert said in (["True"], ["begun"])
    assert said == ["begun"] or not Journal.exists(path) or Journal(path).last().seq == 0
    with Journal(path, {"epsilon": 1.0}) as journal:  # once there is room
        charge(journal)
        assert journal.verify().seq == 1
    assert Journal.exists(path)


def test_a_head_that_was_written_is_never_taken_for_a_beginning(written: Path) -> None:
    for name in (str(written), f"{written}-wal", f"{written}-shm"):
        Path(name).unlink(missing_ok=True)
    assert Journal.exists(written)
    with pytest.raises(LedgerLocked):
        Journal(written, {"epsilon": 1.0})


def test_not_a_database(path: Path) -> None:
    path.write_text("my notes\n" * 100)
    with pytest.raises(InvalidValue, match="another kind of file"):
        Journal(path, HEADER)


# --- the head


def head(path: Path) -> list[int | None]:
    """The row numbers in the two slots, read without the code under test."""
    data = Path(f"{path}.head").read_bytes()
    found: list[int | None] = []
    for place in (0, 4096):
        magic, seq, _, checksum = struct.unpack(">8sQ32s16s", data[place : place + 64])
        sealed = sha256(b"farthing head" + data[place : place + 48]).digest()[:16] == checksum
        found.append(seq if sealed and magic == b"farthing" else None)
    return found


def forge(path: Path, slot: int, seq: int) -> None:
    data = struct.pack(">8sQ32s", b"farthing", seq, bytes(32))
    with open(f"{path}.head", "r+b") as file:
        file.seek(4096 * slot)
        file.write(data + sha256(b"farthing head" + data).digest()[:16])


def tear(path: Path, slot: int) -> None:
    with open(f"{path}.head", "r+b") as file:
        file.seek(4096 * slot + 20)
        file.write(b"torn")


def test_slots_alternate(path: Path) -> None:
    with Journal(path, HEADER) as journal:
        assert head(path) == [0, None]
        charge(journal)
        assert head(path) == [0, 1]
        charge(journal)
        assert head(path) == [2, 1]
    assert Path(f"{path}.head").stat().st_size == 8192


@pytest.mark.parametrize("slot", [0, 1])
def test_one_torn_slot_is_survived(slot: int, written: Path) -> None:
    tear(written, slot)
    with Journal(written, HEADER) as journal:
        seq = charge(journal).seq
        assert head(written)[slot] == seq  # the torn one is written next
        charge(journal)
        assert sorted(filter(None, head(written))) == [seq, seq + 1]


@pytest.mark.parametrize("seq", [1, 2, 3])
def test_a_head_that_saw_another_row_locks_an_open_journal(seq: int, path: Path) -> None:
    with Journal(path, HEADER) as journal:
        charge(journal), charge(journal)
        forge(path, seq % 2, seq)
        for _ in range(2):
            with pytest.raises(LedgerLocked, match=f"without the row {seq} of its head"):
                charge(journal)
        assert sql(path, "SELECT max(seq) FROM chain") == [(2,)]


@pytest.mark.parametrize("damage", ["both", "missing", "empty", "short"])
def test_no_valid_slot_locks(damage: str, written: Path) -> None:
    file = Path(f"{written}.head")
    if damage == "both":
        tear(written, 0)
        tear(written, 1)
    elif damage == "missing":
        file.unlink()
    else:
        os.truncate(file, 0 if damage == "empty" else 40)
    for _ in range(2):
        with pytest.raises(LedgerLocked, match=r"head .* is missing or damaged"):
            Journal(written, HEADER)


def test_head_may_be_lost_before_the_first_charge(path: Path) -> None:
    Journal(path, HEADER).close()
    Path(f"{path}.head").unlink()  # as after a crash between the first row and its head
    with Journal(path, HEADER) as journal:
        charge(journal)
    assert head(path) == [1, None]


def test_the_row_is_committed_before_the_head_is_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def sync(file: int) -> None:
        seen.append(sql(path, "SELECT max(seq) FROM chain")[0][0])
        os.fdatasync(file)

    with Journal(path, HEADER) as journal:
        assert journal._fetch("PRAGMA synchronous") == [(2,)]
        assert journal._fetch("PRAGMA journal_mode") == [("wal",)]
        monkeypatch.setattr("farthing.ledger.journal_head.to_disk", sync)
        charge(journal), charge(journal)
    assert seen == [1, 2]


@pytest.mark.parametrize("supported", [True, False])
def test_where_a_full_flush_exists_it_is_used(
    path: Path, monkeypatch: pytest.MonkeyPatch, supported: bool
) -> None:
    """macOS: fsync leaves data in the cache of the drive."""
    asked, synced, lower = list[int](), list[int](), fcntl.fcntl

    def full(file: int, command: int, argument: int = 0) -> int:
        if command != 51:
            return lower(file, command, argument)
        asked.append(file)
        if not supported:
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
        return 0

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", full)
    monkeypatch.setattr(os, "fdatasync", synced.append)
    with Journal(path, HEADER) as journal:
        assert journal._fetch("PRAGMA fullfsync") == journal._fetch("PRAGMA checkpoint_fullfsync") == [(1,)]
        charge(journal)
    assert asked
    assert synced == ([] if supported else asked)


# --- failures


def test_failed_head_write_is_charged_and_survived(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Journal(path, HEADER) as journal:
        charge(journal)
        monkeypatch.setattr(os, "pwrite", lambda file, data, place: fail(file))
        for _ in range(3):
            with pytest.raises(LedgerLocked, match="Input/output error"):
                charge(journal)
        monkeypatch.undo()
        assert head(path) == [0, 1]
        assert journal.verify().seq == 4
        assert charge(journal).state == [2.5]
    assert head(path) == [5, 1]


@pytest.mark.parametrize("statement", ["BEGIN", "INSERT", "COMMIT"])
def test_failed_statement_charges_nothing(statement: str, path: Path) -> None:
    class Failing:
        def __init__(self, connection: sqlite3.Connection) -> None:
            self.connection = connection

        def __getattr__(self, name: str) -> object:
            return getattr(self.connection, name)

        def execute(self, text: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
            if text.startswith(statement):
                raise sqlite3.OperationalError("disk I/O error")
            return self.connection.execute(text, values)

    with Journal(path, HEADER) as journal:
        charge(journal)
        journal._connection = Failing(journal._connection)  # type: ignore[assignment,arg-type]
        with pytest.raises(LedgerLocked, match="disk I/O error"):
            charge(journal, key="key", request="request")
        assert journal.find_answer("key", "request") is None
        assert journal.verify().seq == 1
        assert charge(journal, key="key", request="request").seq == 2


def test_full_disk_charges_nothing(path: Path) -> None:
    out = script(
        """
        import resource
        journal = Journal(sys.argv[1], {})
        charge(journal)
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(sys.argv[1] + "-wal") + 50_000, hard))
        charged = 1
        for attempt in range(100):
            try:
                charge(journal)
                charged += 1
            except LedgerLocked as error:
                print(type(error).__name__, error)
                break
        try:
            charge(journal)
            charged += 1
        except LedgerLocked:
            pass
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert 1 < charged < 90, charged
        assert journal.verify().seq == charged, (journal.verify().seq, charged)
        assert charge(journal).state == [charged + 1]
        """,
        path,
    )
    assert out.startswith("LedgerLocked journal")
    assert "the disk has room" in out


def test_read_only_files_charge_nothing() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "my.ledger"
        with Journal(path, HEADER) as journal:
            charge(journal)
        for file in files(path):
            file.chmod(0o444)
        os.chmod(directory, 0o555)
        user = os.geteuid()
        try:
            if user == 0:
                os.seteuid(65534)  # root may write anything
            with pytest.raises(LedgerLocked, match=r"Permission denied.*writable"):
                Journal(path, HEADER)
        finally:
            os.seteuid(user)
            os.chmod(directory, 0o755)
        with Journal(path, HEADER) as journal:
            assert journal.verify().seq == 1
            journal._fetch("PRAGMA query_only = ON")
            with pytest.raises(LedgerLocked, match="readonly"):
                charge(journal)
            assert journal.verify().seq == 1


def test_a_file_locked_for_long_charges_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BUSY_SECONDS", 0.05)
    with Journal(path, HEADER) as journal, contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(LedgerLocked, match="locked"):
            charge(journal)
        other.rollback()
        assert charge(journal).seq == 1


# --- copies, threads and processes


def test_copies_are_the_same_journal(path: Path) -> None:
    with Journal(path, HEADER) as journal:
        assert copy.copy(journal) is journal
        assert copy.deepcopy({"ledger": [journal]})["ledger"][0] is journal
        charge(journal)
        with pickle.loads(pickle.dumps(journal)) as other:
            assert other.path == journal.path
            assert charge(other).state == [1.0]
            assert charge(journal).state == [1.5]
            assert other.last() == journal.last()
        carried = pickle.dumps(journal)
    for file in files(path):
        file.unlink()
    with pytest.raises(InvalidValue, match="pass a header to create one"):  # never a fresh budget
        pickle.loads(carried)


def test_a_journal_in_memory_is_not_copied() -> None:
    journal = Journal(None, HEADER)
    assert copy.deepcopy(journal) is journal
    with pytest.raises(Unsupported, match="give the ledger a file"):
        pickle.dumps(journal)
    out = script(
        """
        journal = Journal(None, {})
        charge(journal)
        if os.fork() == 0:
            try:
                charge(journal)
            except Unsupported as error:
                print(error)
            sys.exit()
        os.wait()
        assert charge(journal).state == [2]
        """
    )
    assert "belongs to another process" in out


def test_a_symbolic_link_is_the_same_journal(path: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(path)
    with Journal(path, HEADER) as journal, Journal(tmp_path / "link", HEADER) as link:
        charge(journal)
        assert charge(link).state == [1.0]
    assert not (tmp_path / "link.head").exists()


@pytest.mark.parametrize("suffix", ["", ".head"])
def test_a_second_name_of_a_file_locks_the_journal(path: Path, tmp_path: Path, suffix: str) -> None:
    """Under each name SQLite would keep a log of its own, and the budget could be spent twice."""
    other = tmp_path / f"other.ledger{suffix}"
    with Journal(path, HEADER) as journal:
        os.link(f"{path}{suffix}", other)
        with pytest.raises(LedgerLocked, match="another name"):
            charge(journal)
        for name in (path, *([other] if not suffix else [])):
            with pytest.raises(LedgerLocked, match="another name"):
                Journal(name, HEADER)
        other.unlink()
        assert charge(journal).state == [0.5]
    with Journal(path, HEADER) as journal:
        assert journal.last().seq == 1


def test_threads_share_a_journal(path: Path) -> None:
    with Journal(path, {}) as journal:
        threads = [threading.Thread(target=lambda: [charge(journal) for _ in range(20)]) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert journal.verify().state == [60.0]


@pytest.mark.parametrize("inherited", [False, True])
def test_processes_never_spend_more_than_the_limit(inherited: bool, path: Path) -> None:
    out = script(
        """
        import multiprocessing
        path, inherited = sys.argv[1], sys.argv[2] == "True"
        shared = Journal(path, {}) if inherited else None
        def spend(_):
            journal = shared or Journal(path, {})  # made by whoever comes first
            done = 0
            while True:
                try:
                    charge(journal, limit=200)
                    done += 1
                except BudgetSpent:
                    return done
        if shared:
            charge(shared, limit=200)
        with multiprocessing.get_context("fork").Pool(12) as pool:
            done = pool.map(spend, range(12), chunksize=1)
            pool.close()
            pool.join()
        print(sum(done) + bool(shared))
        """,
        path,
        inherited,
    )
    assert int(out) == 200
    with Journal(path, {}) as journal:
        assert journal.verify().state == [200.0]
        assert len({row.body["by"] for row in journal.rows(1)}) > 1


def test_opening_and_closing_while_others_write(path: Path) -> None:
    out = script(
        """
        import multiprocessing
        def spend(_):
            for _ in range(25):
                with Journal(sys.argv[1], {}) as journal:
                    charge(journal)
        with multiprocessing.get_context("fork").Pool(8) as pool:
            pool.map(spend, range(8), chunksize=1)
        print(Journal(sys.argv[1]).verify().seq)
        """,
        path,
    )
    assert int(out) == 200


def test_a_forked_child_keeps_its_charges_when_the_parent_closes(path: Path) -> None:
    script(
        """
        journal = Journal(sys.argv[1], {})
        charge(journal)
        read, write = os.pipe()
        if os.fork() == 0:
            charge(journal)
            os.read(read, 1)  # until the parent has closed
            for _ in range(5):
                charge(journal)
            os.kill(os.getpid(), 9)  # no clean close
        time.sleep(0.1)
        charge(journal)
        journal.close()
        os.write(write, b"x")
        os.wait()
        with Journal(sys.argv[1]) as journal:
            assert journal.verify().state == [8], journal.last()
        """,
        path,
    )


def test_forking_while_a_thread_writes(path: Path) -> None:
    script(
        """
        import threading
        journal = Journal(sys.argv[1], {})
        def write():
            for _ in range(60):
                charge(journal)
        thread = threading.Thread(target=write)
        thread.start()
        children = []
        for _ in range(10):
            child = os.fork()
            if child == 0:
                charge(journal)
                os._exit(0)
            children.append(child)
        thread.join()
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * 10
        assert journal.verify().state == [70]
        """,
        path,
    )


def test_forking_while_deciding_charges_nothing(path: Path) -> None:
    out = script(
        """
        journal = Journal(sys.argv[1], {})
        charge(journal)
        def decide(last):
            if os.fork():
                os.wait()
            return {}, last.state
        try:
            journal.append("charge", decide)
        except LedgerLocked as error:
            assert journal.verify().seq == 1
            print("locked", flush=True)
        """,
        path,
    )
    assert out.split() == ["locked", "locked"]


def test_a_row_seen_before_that_changes_is_noticed_by_the_next_look(path: Path) -> None:
    with Journal(path, {"epsilon": 1.0}) as journal:
        charge(journal)
        seq, time, kind, body, _, previous, _ = sql(path, "SELECT * FROM chain WHERE seq = 1")[0]
        digest = digest_of(seq, time, kind, body, "[0.0]", previous)
        sql(path, "UPDATE chain SET state = ?, hash = ? WHERE seq = 1", "[0.0]", digest)
        with pytest.raises(LedgerLocked, match="seen before"):
            journal.last()


def test_an_emptied_journal_is_left_as_it_was_found(written: Path) -> None:
    for name in (str(written), f"{written}-wal", f"{written}-shm"):
        Path(name).unlink(missing_ok=True)
    before = Path(f"{written}.head").read_bytes()
    with pytest.raises(LedgerLocked, match="it is empty"):
        Journal(written, {"epsilon": 1.0})
    assert Path(f"{written}.head").read_bytes() == before


def test_rows_are_numbered_without_a_gap(path: Path) -> None:
    """Even where a forger linked and hashed the row after the gap, and wrote a head for it."""
    with Journal(path, {"epsilon": 1.0}) as journal:
        last = charge(journal)
    fields = (last.seq + 5, last.time, "note", "{}", "[1.0]", last.hash)
    digest = digest_of(*fields)
    sql(path, "INSERT INTO chain VALUES (?, ?, ?, ?, ?, ?, ?)", *fields, digest)
    data = struct.pack(">8sQ32s", b"farthing", last.seq + 5, bytes.fromhex(digest))
    sealed = data + sha256(b"farthing head" + data).digest()[:16]
    with open(f"{path}.head", "r+b") as file:
        for place in (0, 4096):
            file.seek(place)
            file.write(sealed)
    with pytest.raises(LedgerLocked, match="does not follow"):
        Journal(path).verify()
