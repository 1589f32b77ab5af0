"""Many spenders at once, kill -9 at any moment, forks and copies: nothing goes out without a charge.

The books are read here with plain SQL and judged by `farthing.ledger.verifier`, which has no code of the
ledger.
"""

import contextlib
import copy
import io
import json
import os
import pickle
import random
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import joblib
import numpy as np
import pytest
from sklearn.base import BaseEstimator, clone

import farthing as ft
from farthing.accounting import calibrate
from farthing.errors import BudgetSpent, InvalidValue, NotReleased, Unsupported
from farthing.ledger.verifier import _Audit, verify
from farthing.queries.events import GaussianEvent, PoissonEvent

BUDGET = ft.Budget(1.0, 1e-5)
ROWS = ft.Rows(np.ones((20, 2)))
W = np.zeros(2)

PRELUDE = """
import os, random, signal, sys, threading, time
import numpy as np
import farthing as ft
from farthing.errors import *

def query(noise, sampler=None, contribution=None):
    given = contribution or ft.PerExample(lambda rows, w: rows[0] - w)
    return ft.Query(sampler or ft.Everyone(), given, ft.ClipNorm(1.0), ft.Gaussian(noise))

def tell(out, receipt):  # the answer leaves the house, with its receipt
    os.write(out, f"{receipt.seq} {receipt.ticket} {receipt.hash}\\n".encode())

def leaving(world):
    return os.open(world, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def children(count, work):
    for number in range(count):
        if os.fork() == 0:
            status = 1
            try:
                signal.alarm(50)
                work(number)
                status = 0
            finally:
                sys.stdout.flush()
                os._exit(status)
    return [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(count)]

rows, w = ft.Rows(np.ones((20, 2))), np.zeros(2)
"""


def query(noise, sampler=None):
    contribution = ft.PerExample(lambda rows, w: rows[0] - w)
    return ft.Query(sampler or ft.Everyone(), contribution, ft.ClipNorm(1.0), ft.Gaussian(noise))


def launch(code, *arguments, **options):
    source = Path(ft.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{source}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, **options)


def script(code, *arguments):
    """Runs code in a process of its own, where forking is safe."""
    process = launch(code, *arguments, stderr=subprocess.PIPE)
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return out


def read(path):
    """The export of the journal, by SQL of our own."""
    names = ("seq", "time", "kind", "body", "state", "previous", "hash")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        rows = connection.execute(f"SELECT {', '.join(names)} FROM chain ORDER BY seq").fetchall()
    found = [dict(zip(names, row, strict=True)) for row in rows]
    return [
        json.dumps({**row, "body": json.loads(row["body"]), "state": json.loads(row["state"])})
        for row in found
    ]


def check(path, world):
    """How many answers went out, if each had a charge of its own; the rows as they are on disk."""
    released = [line.split() for line in world.read_text().splitlines()] if world.exists() else []
    lines = read(path)
    audit = _Audit()
    for line in lines:
        audit.row(line)  # chain and states
    rows = {row["seq"]: row for row in map(json.loads, lines)}
    back = Counter()
    for row in rows.values():
        back[row["body"].get("of")] += row["body"]["count"] if row["kind"] == "refund" else 0
    tickets = Counter()
    for seq, _, digest in released:
        assert rows[int(seq)]["hash"] == digest
        assert rows[int(seq)]["kind"] == "charge"
        tickets[int(seq)] += 1
    assert len({(seq, ticket) for seq, ticket, _ in released}) == len(released)
    for seq, count in tickets.items():
        assert count <= rows[seq]["body"]["count"] - back[seq], f"row {seq} charged less than went out"
    return len(released), lines


# --- many at once


SPENDERS = """
path, world, block, kind = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
def work(number):
    out, dice = leaving(world), random.Random(number)
    ledger = ft.Ledger.open(path, block=block)
    door = ledger.over(rows)
    def spend():
        while True:
            noise = 60.0 if kind == "plan" else dice.choice([20.0, 50.0, 90.0])
            try:
                tell(out, door.ask(query(noise), w).receipt)
            except BudgetSpent:
                if noise in (60.0, 90.0):
                    return
    threads = [threading.Thread(target=spend) for _ in range(10)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    ledger.close()
assert children(10, work) == [0] * 10
"""

EXPLORE = os.environ.get("FARTHING_EXPLORE")


@pytest.mark.parametrize("block", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_a_hundred_spenders_of_one_plan(block, tmp_path):
    path, world = tmp_path / "my.ledger", tmp_path / "world"
    with ft.Ledger(BUDGET, journal=path) as ledger:
        times = ledger.promise(query(60.0)).times
    assert 100 < times < 500
    script(SPENDERS, path, world, block, "plan")
    released, lines = check(path, world)
    verdict = verify(lines)
    assert verdict.code == 0, verdict.reason
    assert list(verdict.charged.values()) == [released]
    assert verdict.plan[0] <= 1.0
    assert released == times if block == 1 else times - 80 <= released <= times


def test_a_hundred_spenders_of_one_filter(tmp_path):
    path, world = tmp_path / "my.ledger", tmp_path / "world"
    ft.Ledger(BUDGET, journal=path).close()
    script(SPENDERS, path, world, 1, "filter")
    released, lines = check(path, world)
    verdict = verify(lines)
    assert verdict.code == 0, verdict.reason
    assert sum(verdict.charged.values()) == released
    spent = sum(count / json.loads(event)["noise"] ** 2 for event, count in verdict.charged.items())
    assert spent <= BUDGET.mu**2 < spent + 1 / 90**2
    assert verdict.spent[0] <= 1.0


def test_the_same_promise_of_many_processes_at_once(tmp_path):
    path = tmp_path / "my.ledger"
    ft.Ledger(BUDGET, journal=path).close()
    out = script(
        """
        path, start = sys.argv[1], time.monotonic() + 0.3
        def work(number):
            ledger = ft.Ledger.open(path)
            time.sleep(max(0.0, start - time.monotonic()))
            sys.stdout.write(f"{ledger.promise(query(4.0, ft.Poisson(0.1))).times}\\n")
            ledger.close()
        assert children(8, work) == [0] * 8
        """,
        path,
    )
    times = calibrate.steps(PoissonEvent(0.1, GaussianEvent(4.0)), BUDGET)
    assert out.split() == [str(times)] * 8
    assert [json.loads(line)["kind"] for line in read(path)] == ["open", "promise"]


# --- killed


# One process imports everything once and forks a victim for every line it reads.
NURSERY = """
path, world = sys.argv[1], sys.argv[2]
for line in sys.stdin:
    block, noise = line.split()
    child = os.fork()
    if child == 0:
        ledger = ft.Ledger.open(path, block=int(block))
        question = query(float(noise), ft.Poisson(0.01) if noise == "4" else None)
        door, out = ledger.over(rows), leaving(world)
        os.write(1, b"ready\\n")
        while True:
            tell(out, door.ask(question, w).receipt)
            os.fsync(out)
    os.write(1, f"{child}\\n".encode())
    os.waitpid(child, 0)
    os.write(1, b"gone\\n")
"""


def wait_for_an_answer(world, said):
    """However slow the machine is: most victims live to tell of an answer."""
    deadline = time.monotonic() + 300
    while not world.exists() or world.stat().st_size <= said:
        assert time.monotonic() < deadline, "no answer in five minutes"
        time.sleep(0.005)


def kill_again_and_again(directory, kills, kind):
    path, world, dice = directory / "my.ledger", directory / "world", random.Random(kills)
    noise = "4" if kind == "plan" else "2000"
    with ft.Ledger(BUDGET, journal=path) as ledger:
        if kind == "plan":
            times = ledger.promise(query(4.0, ft.Poisson(0.01))).times
    nursery = launch(NURSERY, path, world, stdin=subprocess.PIPE)
    try:
        for kill in range(kills):
            said = world.stat().st_size if world.exists() else 0
            nursery.stdin.write(f"{dice.choice([1, 2, 7])} {noise}\n")
            nursery.stdin.flush()
            lines = [nursery.stdout.readline()]
            if kill % 4:  # otherwise perhaps while it opens and recovers the files
                lines.append(nursery.stdout.readline())
                wait_for_an_answer(world, said)
                time.sleep(dice.uniform(0.0, 0.04))
            else:
                while lines == ["ready\n"]:
                    lines.append(nursery.stdout.readline())
                time.sleep(dice.uniform(0.0, 0.02))
            os.kill(int(next(line for line in lines if line != "ready\n")), signal.SIGKILL)
            while lines[-1] != "gone\n":
                lines.append(nursery.stdout.readline())
            check(path, world)
    finally:
        nursery.stdin.close()
        nursery.wait()
        nursery.stdout.close()
    released, lines = check(path, world)
    verdict = verify(lines)
    assert verdict.code == 0, verdict.reason
    charged = sum(verdict.charged.values())
    assert kills // 2 < released <= charged <= released + 7 * kills
    with ft.Ledger.open(path, block=1) as ledger:  # it goes on, and ends where it should
        question = query(float(noise), ft.Poisson(0.01) if kind == "plan" else None)
        ledger.over(ROWS).ask(question, W)
        assert ledger.journal.verify().state[-1] > 0
        if kind == "plan":
            assert ledger.promise(question).left == times - charged - 1
    assert verify(read(path)).code == 0


@pytest.mark.parametrize(("kills", "kind"), [(6, "plan"), (6, "filter")])
def test_killed_spenders_have_charged_what_they_released(kills, kind, tmp_path):
    kill_again_and_again(tmp_path, kills, kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "kind"), [(200, "plan"), (100, "filter")] if EXPLORE else [(30, "plan"), (15, "filter")]
)
def test_killed_spenders_many_times(kills, kind, tmp_path):
    kill_again_and_again(tmp_path, kills, kind)


def test_killed_between_charge_and_release(tmp_path):
    path = tmp_path / "my.ledger"
    question = query(40.0)
    with ft.Ledger(BUDGET, journal=path) as ledger:
        kept = ledger.over(ROWS).ask(question, W, key="before")
    process = launch(
        """
        class Killed:
            honours, shape = ("ClipNorm(clip)",), None

            def bounded_sum(self, records, w, bound):
                if not len(records):
                    return w
                os.kill(os.getpid(), signal.SIGKILL)
        ft.Ledger.open(sys.argv[1]).over(rows).ask(query(40.0, contribution=Killed()), w, key="during")
        """,
        path,
    )
    process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL
    with ft.Ledger.open(path) as ledger:
        door, before = ledger.over(ROWS), ledger.journal.last()
        for _ in range(2):
            with pytest.raises(NotReleased):
                door.ask(question, W, key="during")
            with pytest.raises(InvalidValue):
                door.ask(question, W + 1, key="during")
            with pytest.raises(InvalidValue):
                door.ask(question, W + 1, key="before")
            again = door.ask(question, W, key="before")
            assert again.value.tobytes() == kept.value.tobytes()
            assert again.receipt == kept.receipt
        assert ledger.journal.last() == before
        assert ledger.journal.last().state == [pytest.approx(2 / 1600)]
        door.ask(question, W, key="after")
    assert verify(read(path)).code == 0


# --- forks and copies


def test_a_forked_child_never_uses_its_parents_tickets(tmp_path):
    path, world = tmp_path / "my.ledger", tmp_path / "world"
    script(
        """
        out, question = leaving(sys.argv[2]), query(60.0)
        ledger = ft.Ledger(ft.Budget(1.0, 1e-5), journal=sys.argv[1], block=6)
        ledger.promise(question)
        door = ledger.over(rows)
        mine = door.ask(question, w).receipt
        tell(out, mine)
        def work(number):
            for _ in range(3):
                receipt = door.ask(question, w).receipt
                assert receipt.seq != mine.seq
                tell(out, receipt)
            ledger.close()
        assert children(3, work) == [0] * 3
        for _ in range(5):
            receipt = door.ask(question, w).receipt
            assert receipt.seq == mine.seq
            tell(out, receipt)
        ledger.close()
        """,
        path,
        world,
    )
    released, lines = check(path, world)
    assert released == 15
    verdict = verify(lines)
    assert (verdict.code, list(verdict.charged.values())) == (0, [15])


def test_a_process_that_no_hook_told_of_its_fork_has_no_tickets(tmp_path, monkeypatch):
    with ft.Ledger(BUDGET, journal=tmp_path / "my.ledger", block=6) as ledger:
        ledger.promise(query(60.0))
        ledger.over(ROWS).ask(query(60.0), W)
        assert ledger._books._own()
        parent = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: parent + 1)
        assert not ledger._books._own()
        monkeypatch.undo()


UNTOLD = """
import ctypes
path, after = sys.argv[1], sys.argv[2]
ledger = ft.Ledger(ft.Budget(1.0, 1e-5), journal=path)
private = ledger.over(ft.Rows(np.ones((5, 2))))
private.ask(query(500.0), np.zeros(2))
reading, writing = os.pipe()
if ctypes.PyDLL(None).fork() == 0:  # of C code: Python runs nothing before it
    if after == "told after":
        ctypes.PyDLL(None).PyOS_AfterFork_Child()
    private.ask(query(500.0), np.zeros(2))
    os.write(writing, b".")
    signal.alarm(40)
    while os.path.exists(path + ".open"):
        time.sleep(0.01)
    for _ in range(9):
        private.ask(query(500.0), np.zeros(2))
    os._exit(0)
os.read(reading, 1)
for _ in range(10):
    private.ask(query(500.0), np.zeros(2))
ledger.close()  # the last one to close deletes the write-ahead log
os.remove(path + ".open")
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the fork of this system's C library")
@pytest.mark.parametrize("after", ["told after", "told nothing"])
def test_a_child_of_c_code_writes_to_files_of_its_own(after, tmp_path):
    path = tmp_path / "my.ledger"
    (tmp_path / "my.ledger.open").touch()
    command = [sys.executable, "-c", PRELUDE + UNTOLD, str(path), after]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0
    with ft.Ledger.open(path) as ledger:
        ledger.journal.verify()
        assert sum(row.body["count"] for row in ledger.journal.rows() if row.kind == "charge") == 21


def test_a_clean_end_without_a_close_gives_back_what_was_reserved(tmp_path):
    path = tmp_path / "my.ledger"
    script(
        """
        ledger, question = ft.Ledger(ft.Budget(1.0, 1e-5), journal=sys.argv[1], block=6), query(60.0)
        ledger.promise(question)
        ledger.over(rows).ask(question, w)
        """,
        path,
    )
    verdict = verify(read(path))
    assert (verdict.code, list(verdict.charged.values())) == (0, [1])


def test_a_fork_while_other_threads_ask(tmp_path):
    path, world = tmp_path / "my.ledger", tmp_path / "world"
    script(
        """
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is what is tried here
        out, question, stop = leaving(sys.argv[2]), query(2000.0), threading.Event()
        ledger = ft.Ledger(ft.Budget(1.0, 1e-5), journal=sys.argv[1], block=3)
        ledger.promise(question)
        door = ledger.over(rows)
        def spend():
            while not stop.is_set():
                tell(out, door.ask(question, w).receipt)
        threads = [threading.Thread(target=spend) for _ in range(3)]
        [thread.start() for thread in threads]
        def work(number):
            signal.alarm(15)
            tell(out, door.ask(question, w).receipt)
        for _ in range(12):
            assert children(1, work) == [0]
        stop.set()
        [thread.join() for thread in threads]
        ledger.close()
        """,
        path,
        world,
    )
    released, lines = check(path, world)
    assert released > 12
    assert verify(lines).code == 0


class Estimator(BaseEstimator):
    def __init__(self, ledger=None):
        self.ledger = ledger

    def fit(self):
        self.answer_ = self.ledger.over(ROWS).ask(query(16.0), W)
        return self


@pytest.mark.parametrize("filed", [False, True])
def test_clones_spend_one_budget(filed, tmp_path):
    ledger = ft.Ledger(BUDGET, journal=tmp_path / "my.ledger" if filed else None)
    first = Estimator(ledger).fit()
    others = [clone(first), copy.deepcopy(first), copy.copy(first)]
    assert all(other.ledger is ledger for other in others)
    fits = 1
    while ledger.affords(query(16.0)):
        others[fits % 3].fit()
        fits += 1
    for other in others:
        with pytest.raises(BudgetSpent):
            other.fit()
    assert fits * (1 / 16) ** 2 <= BUDGET.mu**2 < (fits + 1) * (1 / 16) ** 2
    buffer = io.StringIO()
    ledger.journal.export(buffer)
    assert list(verify(buffer.getvalue().splitlines()).charged.values()) == [fits]
    ledger.close()


def test_a_pickle_carries_the_path_or_nothing(tmp_path):
    path = tmp_path / "my.ledger"
    with ft.Ledger(BUDGET, journal=path) as ledger:
        Estimator(ledger).fit()
        joblib.dump(Estimator(ledger), tmp_path / "estimator.joblib")
        for other in (pickle.loads(pickle.dumps(ledger)), joblib.load(tmp_path / "estimator.joblib").ledger):
            assert other is not ledger
            share = ledger.share
            Estimator(other).fit()
            assert ledger.share == other.share == pytest.approx(share + (1 / 16) ** 2 / BUDGET.mu**2)
            other.close()
    for attempt in (pickle.dumps, lambda ledger: joblib.dump(Estimator(ledger), io.BytesIO())):
        with pytest.raises(Unsupported):
            attempt(ft.Ledger(BUDGET))
