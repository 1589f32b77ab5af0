"""Ctrl-C at every point of an answer: the ledger goes on, frees its locks, and gives each turn once.

CPython looks for signals where a call of C code ends, where a function begins and where a loop jumps back. A
`Press` raises `KeyboardInterrupt` at one of these points in files of the library.
"""

import contextlib
import dis
import fcntl
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest

import farthing as ft
from farthing.ledger import journal
from farthing.noise.lattice import Stream
from farthing.queries.plan_lock import PlanLock

ROWS = ft.Rows(np.ones((64, 2)))
LEDGER = ("turns.py", "books.py", "journal.py", "journal_head.py", "contextlib.py")
EVERYWHERE = (*LEDGER, "ledger.py", "answers.py", "correlated.py", "streams.py", "lattice.py", "query.py")


class Press:
    """A trace function that raises at the point with this number."""

    def __init__(self, at, files):
        self.at, self.files, self.seen, self.before = at, files, 0, {}

    def __call__(self, frame, event, arg):
        if os.path.basename(frame.f_code.co_filename) not in self.files:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self.local

    def local(self, frame, event, arg):
        if event == "opcode":
            now = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            called = self.before.get(id(frame)) in ("CALL", "CALL_FUNCTION_EX")
            self.before[id(frame)] = now
            self.seen += now == "RESUME" or now.startswith("JUMP_BACKWARD") or called
            if self.seen == self.at:
                sys.settrace(None)
                self.seen += 1  # press once
                raise KeyboardInterrupt
        return self.local


def pressed(work, at, files=LEDGER):
    """Return whether ``work`` was interrupted at its point ``at``, and what it returned."""
    press, found, before = Press(at, files), None, sys.gettrace()
    sys.settrace(press)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            found = work()
    finally:
        sys.settrace(before)
    return press.seen > at, found


@contextlib.contextmanager
def within(seconds):
    """Raise TimeoutError if the body takes longer, as it would if a lock stayed held."""

    def late(*_):
        raise TimeoutError("a lock stayed held")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def is_free(path):
    """Return whether another process could lock the head of a journal."""
    head = os.open(f"{path}.head", os.O_RDWR)
    try:
        fcntl.flock(head, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(head)
    return True


def plan():
    rows = ft.PerExample(lambda rows, w: rows[0])
    noise = ft.BandedGaussian(4.0, bands=4)
    return ft.Query(ft.Cyclic(0.05, groups=4), rows, ft.ClipNorm(1.0), noise)


def turns_after(path, at, files):
    """Return the turns of two ledgers on one file, one of them interrupted; None if there is no point."""
    query, budget, turns = plan(), ft.Budget(1.0, 1e-5), []
    with within(30):
        one, two = (ft.Ledger(budget, journal=path, block=2) for _ in range(2))
        for ledger in (one, two):
            ledger.promise(query, 24)
        first, second = one.over(ROWS), two.over(ROWS)
        turns += [private.ask(query).receipt.turn for private in (first, second, first)]
        was, found = pressed(lambda: first.ask(query), at, files)
        if not was:
            return None
        turns += [found.receipt.turn] if found is not None else []
        assert is_free(path), at
        for private in (second, first, second, second, first, first):
            turns.append(private.ask(query).receipt.turn)
        one.journal.verify()
        one.close()
        two.close()
    return turns


def every_point(folder, files):
    at = 0
    while True:
        at += 1
        turns = turns_after(folder / f"{at}.ledger", at, files)
        if turns is None:
            return at
        assert len(set(turns)) == len(turns), (at, turns)


@pytest.fixture
def folder(tmp_path):
    """A folder in memory where there is one: a point takes ten durable commits."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path) as made:
        yield Path(made)


needs_311 = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="points are those of this CPython")


@needs_311
def test_an_interrupted_charge_frees_its_locks_and_gives_each_turn_once(folder):
    assert every_point(folder, ("turns.py", "journal_head.py")) > 40


@needs_311
@pytest.mark.slow
def test_an_answer_that_is_interrupted_anywhere(folder):
    assert every_point(folder, EVERYWHERE) > 400


@needs_311
def test_an_interrupted_close_frees_the_head(folder):
    at, query = 0, plan()
    while True:
        at += 1
        path = folder / f"{at}.ledger"
        ledger = ft.Ledger(ft.Budget(1.0, 1e-5), journal=path)
        was, _ = pressed(ledger.close, at, ("journal.py", "contextlib.py"))
        assert is_free(path), at
        with within(30), ft.Ledger.open(path) as again:
            again.promise(query, 4)
        if not was:
            break
    assert at > 5


def test_a_lock_of_a_plan_is_taken_and_released_without_a_line_of_python():
    """A signal handler would run before or after such a line, and leave the lock held."""
    lock, ran = PlanLock(), []

    def trace(frame, event, arg):
        ran.append(frame.f_code.co_name)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with lock.held:
            pass
    finally:
        sys.settrace(before)
    assert not {"__enter__", "__exit__"} & set(ran)
    taken = []
    with lock.held:
        other = threading.Thread(target=lambda: taken.append(lock.held.acquire(blocking=False)))
        other.start()
        other.join()
    assert taken == [False]


def test_a_fork_that_is_interrupted_while_it_waits_for_a_journal_leaves_no_lock_behind(tmp_path, monkeypatch):
    one, two = (journal.Journal(tmp_path / name, {}) for name in ("a.ledger", "b.ledger"))

    def interrupted(*, verified):
        raise KeyboardInterrupt

    monkeypatch.setattr(journal, "_alive", [one, two])
    with monkeypatch.context() as during:
        during.setattr(one, "_disconnect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            journal._before_fork()
    journal._after_fork()  # the fork goes on: Python ignores what is raised before it
    free = []

    def take():
        free.extend(lock.acquire(blocking=False) for lock in (one._lock, two._lock, journal._forking))
        for lock in (one._lock, two._lock, journal._forking):
            lock.release()

    other = threading.Thread(target=take)
    other.start()
    other.join()
    assert free == [True, True, True]


def test_a_child_whose_new_key_was_interrupted_does_not_repeat_its_parents_words(monkeypatch):
    stream, parent = Stream(), os.getpid()
    stream.integers(3)
    held = stream._buffer[stream._at : stream._at + 4].copy()  # the parent's next words

    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    with monkeypatch.context() as during:
        during.setattr(Stream, "_new_key", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stream.integers(4)
    assert not (stream.integers(4) == held).any()
