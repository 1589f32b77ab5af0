"""Ledgers, their heads and write-ahead logs, logs of answers and keys: only their owner opens them."""

import contextlib
import errno
import os
import sqlite3
import stat
import threading

import pytest

import farthing as ft
from farthing.budget import Budget
from farthing.deploy import keys as keyring
from farthing.deploy.guard.keeper import AnswerLog
from farthing.deploy.messages.signed import Signer
from farthing.errors import LedgerLocked
from farthing.ledger.journal import Journal
from farthing.ledger.journal_head import create_private, narrow
from farthing.ledger.ledger import Ledger


@pytest.fixture(params=[0o000, 0o022, 0o077, 0o277], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield
    os.umask(before)


def modes(folder):
    found = {path.relative_to(folder).as_posix(): path.stat().st_mode for path in folder.rglob("*")}
    return {name: stat.S_IMODE(mode) for name, mode in found.items() if stat.S_ISREG(mode)}


def test_a_ledger_is_its_owners_whatever_the_umask(umask, tmp_path):
    with Ledger(Budget(1.0, 1e-6), journal=tmp_path / "my.ledger") as ledger:
        ledger.journal.append("note", lambda last: ({"a": 1}, last.state))
        found = modes(tmp_path)
    assert {"my.ledger", "my.ledger-wal", "my.ledger-shm", "my.ledger.head"} <= set(found)
    assert set(found.values()) == {0o600}
    assert set(modes(tmp_path).values()) == {0o600}


def test_a_log_of_answers_is_its_owners_whatever_the_umask(umask, tmp_path):
    log = AnswerLog(tmp_path / "answers")
    log.append("d/r/1/n", 1, "00" * 32, "11" * 32)
    log.close()
    assert modes(tmp_path) == {"answers": 0o600}


def test_keys_are_their_owners(tmp_path):
    before = os.umask(0)
    try:
        keyring.make(tmp_path / "keys", ["a"], ["localhost"], coordinator=True)
    finally:
        os.umask(before)
    assert set(modes(tmp_path).values()) == {0o600}


def test_files_of_an_earlier_version_are_narrowed_and_that_is_said(tmp_path, caplog):
    path = tmp_path / "my.ledger"
    Journal(path, {"epsilon": 1.0}).close()
    AnswerLog(tmp_path / "answers").close()
    with Journal(path) as held:  # so that its write-ahead log is there
        held.append("note", lambda last: ({}, last.state))
        for found in tmp_path.iterdir():
            found.chmod(0o664)
        with Journal(path) as journal:
            journal.append("note", lambda last: ({}, last.state))
            AnswerLog(tmp_path / "answers").close()
            assert set(modes(tmp_path).values()) == {0o600}
    assert caplog.text.count("could be opened by others (mode 664)") == 5


def test_what_is_not_there_is_not_made(tmp_path):
    narrow(str(tmp_path / "nothing"))
    assert modes(tmp_path) == {}
    with pytest.raises(FileNotFoundError):
        create_private(str(tmp_path / "no" / "folder"))


def test_narrowing_lets_go_of_no_lock(tmp_path):
    """Closing any file of a database lets go of a process's locks on it: a second writer would get in."""
    path = tmp_path / "my.ledger"
    first, second = Journal(path, {}), Journal(path, {})
    entered, done, order = threading.Event(), threading.Event(), []

    def slow(last):
        entered.set()
        done.wait(30)
        order.append("first")
        return {}, last.state

    thread = threading.Thread(target=lambda: first.append("note", slow))
    thread.start()
    assert entered.wait(30)
    other = threading.Thread(
        target=lambda: (second.append("note", lambda last: ({}, last.state)), order.append("second"))
    )
    os.chmod(path, 0o644)
    narrow(str(path))
    other.start()
    other.join(0.3)
    done.set()
    thread.join(60)
    other.join(60)
    assert order == ["first", "second"]
    first.verify()
    for journal in (first, second):
        journal.close()


def test_a_folder_that_may_not_be_written_locks(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    (tmp_path / "f").mkdir(mode=0o500)
    with pytest.raises(LedgerLocked):
        Journal(tmp_path / "f" / "my.ledger", {})


@pytest.mark.parametrize("kind", ["a folder", "a table", "a database"])
def test_what_is_no_journal_is_left_as_it_is(tmp_path, kind):
    """A wrong path once took the rights to a whole folder from everybody but its owner."""
    place = tmp_path / "place"
    if kind == "a folder":
        place.mkdir()
    elif kind == "a table":
        place.write_text("age,ill\n17,no\n" * 100)
    else:
        with contextlib.closing(sqlite3.connect(place)) as database:
            database.execute("CREATE TABLE people(name TEXT)")
            database.commit()
    place.chmod(0o755)
    for wrong in (lambda: ft.Ledger(ft.Budget(1.0, 1e-5), journal=place), lambda: ft.Ledger.open(place)):
        with pytest.raises(ft.FarthingError):
            wrong()
    assert place.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in tmp_path.iterdir()] == ["place"]


@pytest.mark.parametrize("path", [5, 1.5, ["x"], "a\0b"])
def test_a_path_is_the_name_of_a_file(path):
    with pytest.raises(ft.InvalidValue, match="name of a file"):
        ft.Ledger(ft.Budget(1.0, 1e-5), journal=path)


def test_keys_that_others_can_open_are_narrowed(tmp_path, caplog):
    """They come with the modes of a copy, of an archive or of an image."""
    folder = tmp_path / "keys"
    keyring.make(folder, ["a"], [], coordinator=False)
    guard, node = folder / "a" / "guard.key", folder / "a" / "node.key"
    for path, load in ((guard, Signer.load), (node, keyring.check_node_key)):
        os.chmod(path, 0o644)
        load(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [record.args[0] for record in caplog.records] == [str(guard), str(node)]


def test_a_mode_that_cannot_be_changed_is_said_and_stops_nothing(tmp_path, caplog, monkeypatch):
    Signer.new().save(tmp_path / "key")
    os.chmod(tmp_path / "key", 0o640)

    def read_only(path, mode):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "chmod", read_only)
    Signer.load(tmp_path / "key")
    assert "cannot be changed" in caplog.text
