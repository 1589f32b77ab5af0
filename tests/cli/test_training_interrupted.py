"""Ctrl-C and SIGTERM in the middle of a training, in a real process: what is left is in order and usable."""

import itertools
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import farthing as ft
from farthing.data.model_file import Model
from farthing.linear.methods.descent import descent
from farthing.linear.problem import Problem
from farthing.linear.solvers import CLASSIFIERS, SolverMethod

SECONDS = 300  # the most that anything here may take; it takes one or two

# Two methods that would take hours.
ENDLESS = """
import itertools, sys
import farthing as ft
from farthing.cli import main as cli
from farthing.linear import losses
from farthing.linear.solvers import (CLASSIFIERS, SolverMethod)
from farthing.data.tables import Features


@ft.until_spent
def steps(ledger, problem, promised):
    features = Features(problem.width, intercept=1.0)
    gradient = losses.LinearGradient(problem.loss, features)
    sampler = ft.Poisson(0.1) if promised else ft.Everyone()
    query = ft.Query(sampler, gradient, ft.ClipNorm(1.0), ft.Gaussian(1e5))
    if promised:
        ledger.promise(query, 10**7)
    w = problem.zeros(features.size)
    for t in itertools.count(1):
        answer = ledger.ask(query, w)
        yield ft.Step(t, features.unfold(w), (answer.receipt,))


CLASSIFIERS["promised"] = SolverMethod(lambda ledger, problem: steps(ledger, problem, True), None)
CLASSIFIERS["filtered"] = SolverMethod(lambda ledger, problem: steps(ledger, problem, False))
sys.exit(cli.main(sys.argv[1:]))
"""
SCHEMA = """\
{"columns": [{"name": "age", "low": 0, "high": 100}], "target": {"name": "rich", "values": ["no", "yes"]}}
"""
OPTIONS = (
    *("--schema", "schema.json", "--epsilon", "1", "--delta", "1e-5"),
    *("--ledger", "a.ledger", "--out", "fit", "--json"),
)

Begin = Callable[[str], "subprocess.Popen[str]"]


def table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    rows = [f"{age},{('no', 'yes')[age > 50]}\n" for age in range(100)]
    Path("people.csv").write_text("".join(["age,rich\n", *rows]))
    Path("schema.json").write_text(SCHEMA)


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """Begins a training in a process of its own, and waits until its first charge is written."""
    table(tmp_path, monkeypatch)
    running: list[subprocess.Popen[str]] = []

    def begin(method: str) -> "subprocess.Popen[str]":
        charged = charges()
        process = subprocess.Popen(
            [sys.executable, "-c", ENDLESS, "train", "people.csv", *OPTIONS, "--method", method],
            env={**os.environ, "PYTHONPATH": str(Path(ft.__file__).parents[1])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        until(lambda: charges() > charged or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        return process

    yield begin
    for process in running:
        process.kill()
        process.wait(SECONDS)


def until(happens: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.02)


def charges() -> int:
    """How many charges the journal holds; a reader never holds a writer up."""
    if not Path("a.ledger").exists():
        return 0
    try:
        with closing(sqlite3.connect("file:a.ledger?mode=ro", uri=True)) as journal:
            (found,) = journal.execute("SELECT count(*) FROM chain WHERE kind = 'charge'").fetchone()
            return int(found)
    except sqlite3.Error:  # just being made
        return 0


def ended(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """What the process told on its one line of output, once it ended as it should."""
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130, err
    assert err == "farthing: interrupted: the model of the last step is written\n"
    told: dict[str, Any] = json.loads(out)
    assert told == json.loads(Path("fit/privacy.json").read_text())
    assert told["partial"] is True
    return told


def test_an_interrupted_plan_leaves_the_rest_of_it_and_a_partial_model(begin: Begin, run: Any) -> None:
    process = begin("promised")
    process.send_signal(signal.SIGINT)
    told = ended(process)
    assert told["steps"] >= 1
    shown = run("ledger", "show", "a.ledger", "--json").json
    assert [part["count"] for part in shown["charged"]] == [told["steps"]]  # what was reserved is given back
    assert shown["share"] == told["steps"] / 10**7
    assert told["spent"]["epsilon"] == shown["spent"]["epsilon"] < told["guarantee"]["epsilon"] <= 1
    assert run("ledger", "verify", "a.ledger").code == 0
    assert len(run("predict", "fit", "people.csv").out.splitlines()) == 100
    assert "interrupted" in Path("fit/report.html").read_text()


def test_a_terminated_part_of_a_ledger_is_charged_as_a_whole(begin: Begin, run: Any) -> None:
    ft.Ledger(ft.Budget(3.0, 1e-5), journal="a.ledger").close()
    process = begin("filtered")
    process.send_signal(signal.SIGTERM)
    told = ended(process)
    assert told["guarantee"]["epsilon"] == 1.0
    assert 0 <= told["spent"]["epsilon"] < 0.1  # hardly anything was asked of the part, if at all
    shown = run("ledger", "show", "a.ledger", "--json").json
    assert shown["kinds"] == {"open": 1, "charge": 1, "note": 1}
    assert 0.05 < shown["share"] < 0.5
    assert run("ledger", "verify", "a.ledger").code == 0
    assert Model.load(Path("fit")).coef.shape == (1, 1)


def test_a_second_interruption_does_not_wait_for_the_step(
    tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def impatient(ledger: ft.Ledger, problem: Problem) -> Iterator[ft.Step]:
        yield from itertools.islice(descent(ledger, problem), 3)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setitem(CLASSIFIERS, "impatient", SolverMethod(impatient))
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    table(tmp_path, monkeypatch)
    done = run("train", "people.csv", *OPTIONS, "--method", "impatient")
    assert (done.code, done.out) == (130, "")
    assert done.err.strip() == "farthing: interrupted"
    assert not Path("fit").exists()
    assert run("ledger", "verify", "a.ledger").code == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
