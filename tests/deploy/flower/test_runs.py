"""Parties, SuperLink and coordinator as real processes on this machine, killed and started again."""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import farthing as ft
from farthing.cli.demo_parties import set_up
from farthing.data.tables import Table
from farthing.deploy.serve import RunFile
from farthing.federated import Parties
from farthing.federated.methods.addp import addp
from farthing.federated.protocol import ClientAgent
from farthing.noise.lattice import SeededStream
from farthing.queries.query import run
from farthing.queries.samplers import Poisson

pytestmark = pytest.mark.slow

_PLACE = (
    Path(__file__).parents[2] / "deploy" / "guard" / "conftest.py"
)  # guards that are forked, and the checker
_SPEC = importlib.util.spec_from_file_location("farthing_guard_houses", _PLACE)
houses = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = houses
_SPEC.loader.exec_module(houses)

NAMES, RECORDS, ROUNDS = ("a", "b", "c"), 400, 6
METHOD = f'name = "addp"\nrounds = 5\ndraw = "poisson:0.1"\nmost = {ROUNDS}'
_COMMAND = "import sys; from farthing.cli.main import main; sys.exit(main())"
_LONG = 300.0  # seconds; a busy machine is no failure


@dataclass(frozen=True)
class Books:
    """Where a party's ledger is, as the checker asks."""

    ledger: Path

    @property
    def log(self):
        return Path(f"{self.ledger}.answers")


def _rows(ledger):
    """The number of charges that a reader finds in a journal."""
    with contextlib.closing(sqlite3.connect(ledger)) as connection:
        return connection.execute("SELECT COUNT(*) FROM chain").fetchone()[0]


class Town:
    """Three parties, and coordinators that come and go."""

    def __init__(self, folder: Path, first: str = "", **more) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder, self.nursery = folder, houses.Nursery(first)
        settings = {"method": METHOD, "records": RECORDS, "epsilon": 4.0} | more
        self.run = set_up(folder, NAMES, port=self.port, settings="seconds = 120\nwait = 240", **settings)
        self.guards, self.processes = {}, {}

    def guard(self, name):
        """Starts a guard whose noise follows from its name and the round."""
        self.guards[name], said = self.nursery.start(
            self.folder / name / "policy.toml", "", 1, NAMES.index(name)
        )
        assert said.startswith("listening"), said

    def start(self, name, *command):
        with open(self.folder / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(ft.__file__).parents[1])},
            )
        return self.processes[name]

    def join(self, name):
        self.start(name, "join", str(self.folder / name / "party.toml"))

    def serve(self, path=None):
        (self.folder / "serve.log").unlink(missing_ok=True)
        self.start("serve", "serve", str(path or self.run), "--page", "0")

    def again(self, old="", new=""):
        """The file of a second run, with one line changed."""
        text = self.run.read_text().replace('run = "demo"', 'run = "second"')
        path = self.folder / "second.toml"
        path.write_text(text.replace('folder = "run"', 'folder = "run2"').replace(old, new))
        return path

    def kill(self, name, number=signal.SIGKILL):
        self.processes[name].send_signal(number)
        self.processes[name].wait(_LONG)

    def kill_guard(self, name):
        """Kill a guard between two answers: one that is charged and lost is not drawn again."""
        guard, until = self.guards[name], time.monotonic() + _LONG
        while time.monotonic() < until:
            os.kill(guard.pid, signal.SIGSTOP)
            while Path(f"/proc/{guard.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                time.sleep(0.01)
            ledger = self.folder / name / f"{name}.ledger"
            answers, charges = houses.check(Books(ledger))
            if answers == charges and _rows(ledger) == self.rows_after_kill(ledger):
                return guard.end(signal.SIGKILL)
            os.kill(guard.pid, signal.SIGCONT)
            time.sleep(0.05)
        raise AssertionError(f"{name} never ends an answer")

    def rows_after_kill(self, ledger):
        """The rows that a restart would find: also those whose commit others do not see before its fsync."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            for suffix in ("", "-wal"):
                if Path(f"{ledger}{suffix}").exists():
                    shutil.copy(f"{ledger}{suffix}", Path(folder) / f"copy{suffix}")
            return _rows(Path(folder) / "copy")

    def child(self, name, of):
        """The number of a process that another one started."""
        until = time.monotonic() + _LONG
        while time.monotonic() < until:
            for place in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
                    if parent == self.processes[of].pid and name in (place / "cmdline").read_text():
                        return int(place.name)
            time.sleep(0.1)
        raise AssertionError(f"{of} has no {name}")

    def status(self):
        said = (self.folder / "serve.log").read_text() if (self.folder / "serve.log").exists() else ""
        found = re.search(r"page +(http\S+)", said)
        if not found:
            return {"round": 0, "parties": []}
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(found[1] + "status.json", timeout=30) as answer:
                return json.load(answer)
        except OSError:
            return {"round": 0, "parties": []}

    def reached(self, number):
        """Waits until a round is over; the coordinator must not be done before."""
        until = time.monotonic() + _LONG
        while self.status()["round"] < number:
            assert self.processes["serve"].poll() is None, (self.folder / "serve.log").read_text()
            assert time.monotonic() < until, (self.folder / "serve.log").read_text()
            time.sleep(0.1)

    def over(self):
        code = self.processes["serve"].wait(_LONG)
        assert code == 0, (self.folder / "serve.log").read_text()

    def checked(self):
        """Answers and charges of every party, once its books were found in order.

        (`farthing ledger verify` refuses them, as it must: their noise has a seed.)
        """
        return {name: houses.check(Books(self.folder / name / f"{name}.ledger")) for name in NAMES}

    def close(self):
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LONG)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(_LONG)
        for guard in self.guards.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(guard.pid, signal.SIGCONT)
            guard.end(signal.SIGKILL)
        self.nursery.close()


@pytest.fixture(scope="module")
def town(tmp_path_factory):
    found = Town(tmp_path_factory.mktemp("t"))
    try:
        for name in NAMES:
            found.guard(name)
            found.join(name)
        yield found
    finally:
        found.close()


@pytest.fixture(scope="module")
def network_town(tmp_path_factory):
    """The same parties with a network that they have installed."""
    pytest.importorskip("torch")
    tmp_path = tmp_path_factory.mktemp("n")
    method = 'name = "fedavg"\nrounds = 9\nlocal_steps = 2\nlocal_lr = 0.2\nmost = 4'
    found = Town(tmp_path, "import farthing.torch.training.network", method=method, network=True)
    try:
        for name in NAMES:
            found.guard(name)
            found.join(name)
        yield found
    finally:
        found.close()


class Reseeded(ClientAgent):
    """An agent of one process whose noise follows from its seed and the round."""

    def __init__(self, folder, seed):
        with np.load(folder / "records.npz") as found:
            table = Table(found["X"], found["y"])
        self.seed, self.stream = seed, SeededStream(seed)
        ledger = ft.Ledger(ft.Budget(4.0, 1e-6, observer="server"), stream=self.stream)
        super().__init__(ledger.over(table), len(table))

    def handle(self, ask):
        self.stream._seed, self.stream._generation = 1000 * self.seed + ask.round, 0
        self.stream._rekey()
        return super().handle(ask)


def test_whoever_is_killed_and_comes_back_the_model_is_the_simulations(town):
    town.serve()
    town.reached(1)
    os.kill(town.child("flower.link", of="serve"), signal.SIGKILL)
    os.kill(town.child("flower.node", of="c"), signal.SIGKILL)
    town.reached(3)
    town.kill("serve")
    town.serve()
    town.reached(4)
    town.kill_guard("b")
    town.guard("b")
    town.over()
    report = json.loads((town.folder / "run" / "report.json").read_text())
    assert report["rounds"] == ROUNDS
    assert [party["state"] for party in report["parties"]] == ["here"] * 3
    assert town.checked() == dict.fromkeys(NAMES, (ROUNDS, ROUNDS))
    agents = [Reseeded(town.folder / name, seed) for seed, name in enumerate(NAMES)]
    problem = RunFile.load(town.run).learner.problem(len(NAMES) * RECORDS)
    steps = addp(Parties(agents), problem, draw=Poisson(0.1), rounds=5)
    u, constant = run(steps, stop=lambda step: step.t >= ROUNDS).w
    with np.load(town.folder / "run" / "model.npz") as model:
        np.testing.assert_array_equal(model["coef"][0], u)
        np.testing.assert_array_equal(model["intercept"], np.atleast_1d(constant))


def test_a_straggler_is_waited_for_and_one_that_never_comes_back_is_not(town):
    before = town.checked()
    town.serve(town.again("seconds = 120", "seconds = 6\npatience = 2"))
    town.reached(1)
    os.kill(town.guards["b"].pid, signal.SIGSTOP)  # takes its time
    town.kill("c")
    town.guards["c"].end(signal.SIGKILL)
    until = time.monotonic() + _LONG
    while {p["name"]: p["state"] for p in town.status()["parties"]}.get("b") != "missing":
        assert time.monotonic() < until
        time.sleep(0.05)
    os.kill(town.guards["b"].pid, signal.SIGCONT)
    town.over()
    report = json.loads((town.folder / "run2" / "report.json").read_text())
    states = {party["party"]: party["state"] for party in report["parties"]}
    assert (report["rounds"], states["c"]) == (6, "away")
    after = town.checked()
    assert all(answers <= charges for answers, charges in after.values())
    assert after["a"][1] <= before["a"][1] + 6
    assert after["c"][1] < before["c"][1] + 6


def test_a_network_is_trained_by_local_steps_whoever_is_killed(network_town):
    """SuperLink and a guard are killed; a round costs two charges, and none is paid twice.

    (A coordinator of a network is killed in tests/deploy/guard/test_network_faults.py.)
    """
    town = network_town
    town.serve()
    town.reached(1)
    os.kill(town.child("flower.link", of="serve"), signal.SIGKILL)
    town.guards["b"].end(signal.SIGKILL)
    town.guard("b")
    town.over()
    report = json.loads((town.folder / "run" / "report.json").read_text())
    assert (report["method"], report["rounds"]) == ("fedavg", 4)
    books = town.checked()
    assert (books["a"], books["c"]) == ((8, 8), (8, 8))
    assert books["b"][0] <= books["b"][1] <= 8  # killed between a charge and its answer, it loses that round
    with np.load(town.folder / "run" / "model.npz", allow_pickle=False) as model:
        assert np.isfinite(model["0.weight"]).all()


def test_a_guard_a_node_and_the_superlink_that_hang_for_ten_seconds_lose_nothing(network_town):
    """They are stopped in the middle of rounds: everybody is waited for, and nobody pays twice."""
    town, before = network_town, network_town.checked()
    town.serve(town.again())
    town.reached(1)
    stopped = [town.guards["b"].pid, town.child("flower.node", of="c"), town.child("flower.link", of="serve")]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(10.0)
    for pid in reversed(stopped):
        os.kill(pid, signal.SIGCONT)
    town.over()
    report = json.loads((town.folder / "run2" / "report.json").read_text())
    assert report["rounds"] == 4
    assert [party["state"] for party in report["parties"]] == ["here"] * 3
    for name, (answers, charges) in town.checked().items():
        assert (answers, charges) == (before[name][0] + 8, before[name][1] + 8)
