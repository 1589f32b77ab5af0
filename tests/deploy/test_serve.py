"""A run's file, and the coordinator over guards in this process; real processes are in tests/clients."""

import json
import os
import signal
import socket
import sys
import threading
import time
import urllib.request
from dataclasses import asdict, replace

import numpy as np
import pytest

from farthing.budget import Budget
from farthing.cli.demo_parties import set_up
from farthing.cli.main import main
from farthing.data import table_files
from farthing.data.tables import Table
from farthing.deploy import serve
from farthing.deploy.guard import server
from farthing.deploy.guard.policy import Policy
from farthing.deploy.messages.signed import Signer
from farthing.deploy.messages.transport import InProcess, carry
from farthing.deploy.metrics import exposition, of_run
from farthing.deploy.processes import Child
from farthing.deploy.serve import RunFile, RunProgress, coordinate
from farthing.errors import BudgetSpent, FarthingError, InvalidValue
from farthing.federated import Parties
from farthing.federated.methods.addp import addp
from farthing.federated.protocol import ClientAgent
from farthing.ledger.ledger import Ledger
from farthing.noise.lattice import SeededStream
from farthing.queries.query import run
from farthing.queries.samplers import Poisson

NAMES = ("a", "b", "c")
ADDP = 'name = "addp"\nrounds = 5\ndraw = "poisson:0.1"\nmost = 6'


@pytest.fixture
def guards():
    """Guards of a folder as functions; closed in the end."""
    opened = []

    def start(folder, seed=None, **options):
        found = {}
        for place, name in enumerate(NAMES):
            stream = None if seed is None else SeededStream(seed + place)
            opened.append(server.opened(Policy.load(folder / name / "policy.toml"), stream=stream))
            found[name] = opened[-1].answer
        return InProcess(found)

    yield start
    for guard in opened:
        guard.close()


def plan_of(folder, *, edit=lambda text: text, **options):
    path = set_up(folder, NAMES, port=9092, **{"records": 60, "method": ADDP, "epsilon": 4.0} | options)
    path.write_text(edit(path.read_text()))
    return RunFile.load(path)


def coordinated(plan, transport, board=None):
    plan.folder.mkdir(exist_ok=True)
    signer = Signer.load(plan.keys / "coordinator.key")
    test = table_files.read("adult", plan.job.schema, test=True)
    return coordinate(plan, transport, signer, test, board or RunProgress(plan))


def test_the_model_is_that_of_the_simulation_with_the_same_seed(tmp_path, guards):
    plan = plan_of(tmp_path)
    board = RunProgress(plan)
    report = coordinated(plan, guards(tmp_path, seed=40), board)
    agents = []
    for place, name in enumerate(NAMES):
        with np.load(tmp_path / name / "records.npz") as found:
            table = Table(found["X"], found["y"])
        ledger = Ledger(Budget(4.0, 1e-6, observer="server"), stream=SeededStream(40 + place))
        agents.append(ClientAgent(ledger.over(table), 60))
    steps = addp(Parties(agents), plan.learner.problem(180), draw=Poisson(0.1), rounds=5)
    u, constant = run(steps, stop=lambda step: step.t >= 6).w
    with np.load(plan.model) as model:
        np.testing.assert_array_equal(model["coef"][0], u)
        np.testing.assert_array_equal(model["intercept"], np.atleast_1d(constant))
        assert json.loads(str(model["privacy"])) == report
    assert json.loads(plan.report.read_text()) == report
    assert (report["rounds"], report["records"]) == (6, 180)
    assert "as the run's file says" in report["stopped"]
    assert 0.5 < report["test"]["accuracy"] < 1
    assert [party["budget"]["epsilon"] for party in report["parties"]] == [4.0] * 3
    assert "north" not in " ".join(serve.lines(report)["parties"])
    view = board.view()
    assert view.phase.startswith("over")
    assert (view.round, len(view.accuracy), len(view.parties)) == (6, 6, 3)
    assert view.noise == pytest.approx(report["parties"][0]["noise_multiplier"])
    assert main(["predict", str(plan.model), "adult", "-o", str(tmp_path / "out.csv")]) == 0


@pytest.mark.parametrize("method", ['name = "sgd2"\nrounds = 3', 'name = "federated-descent"\nmost = 3'])
def test_it_ends_when_nobody_can_afford_a_round(tmp_path, guards, method):
    plan = plan_of(tmp_path, method=method)
    report = coordinated(plan, guards(tmp_path))
    assert report["rounds"] == 3
    if "sgd2" in method:
        assert report["stopped"] == "no party is left that can afford another round"
        assert [party["state"] for party in report["parties"]] == ["spent"] * 3
        assert main(["ledger", "verify", str(tmp_path / "b" / "b.ledger")]) == 0


def test_published_noise_takes_its_rounds_and_the_report_says_what_they_give(tmp_path, guards):
    plan = plan_of(tmp_path, method='name = "sgd2"\nrounds = 3\npublished_noise = true\nradius = 2')
    report = coordinated(plan, guards(tmp_path))
    assert report["rounds"] == 3
    assert [party["state"] for party in report["parties"]] == ["here"] * 3  # budgets would allow more
    (really,) = report["holds"]
    assert 0 < really["epsilon"] < 4.0 / 2
    assert serve.lines(report)["published noise"] == [f"epsilon {really['epsilon']:.4g} against server"]


def test_one_party_at_a_time(tmp_path, guards):
    plan = plan_of(
        tmp_path,
        method='name = "sgd1"\nmost = 15',
        records=5,
        epsilon=8.0,
        limits='noise = 0.01\nclip = 3.0\nrounds = 100000\ndraws = ["exactly:1"]',
    )
    for name in NAMES:
        policy = tmp_path / name / "policy.toml"
        policy.write_text(
            policy.read_text().replace("delta = 1e-6", 'delta = 1e-3\nadjacency = "replace-one"')
        )
    report = coordinated(plan, guards(tmp_path))
    assert report["rounds"] == 15
    assert [party["left"] for party in report["parties"]] == [None] * 3


def test_nothing_that_is_shown_tells_whose_turn_it_was(tmp_path, guards):
    """The guarantee of SGD1 against anyone else assumes that nobody sees the turns."""
    limits = 'noise = 0.01\nclip = 3.0\nrounds = 100000\ndraws = ["exactly:1"]'
    plan = plan_of(tmp_path, method='name = "sgd1"\nmost = 45', records=5, epsilon=8.0, limits=limits)
    for name in NAMES:
        policy = tmp_path / name / "policy.toml"
        text = policy.read_text()
        policy.write_text(text.replace("delta = 1e-6", 'delta = 1e-3\nadjacency = "replace-one"'))
    whole, board, seen, asked = guards(tmp_path), RunProgress(plan), set(), set()

    def watched(name):
        def door(message):
            asked.add(name)
            missed = name == "c" and board.view().round and sum(message) % 2  # some of its turns
            reply = b"" if missed else whole._parties[name](message)
            view = board.view()
            lines = exposition(of_run(view)[1]).splitlines()
            told = [
                line
                for line in lines
                if not line.startswith(("#", "farthing_round ", "farthing_round_seconds"))
            ]
            if view.round:
                seen.add(json.dumps([told, [asdict(party) for party in view.parties]]))
            return reply

        return door

    plan.folder.mkdir()
    signer, slow = Signer.load(plan.keys / "coordinator.key"), replace(plan, seconds=0.3, patience=10**6)
    coordinate(slow, InProcess({name: watched(name) for name in NAMES}), signer, None, board)
    assert asked == set(NAMES)
    assert len(seen) == 1


@pytest.mark.parametrize("method", ['name = "sgd1"\nmost = 15', 'name = "sgd2"\nmost = 3'])
def test_a_party_with_next_to_no_budget_is_left_out_under_local_trust_too(method, tmp_path, guards):
    """One noise is sized for the least of all budgets; a plain sum has the noise of each."""
    limits = 'noise = 0.01\nclip = 3.0\nrounds = 100000\ndraws = ["all", "exactly:1"]'
    plan = plan_of(tmp_path, method=method, records=5, epsilon=8.0, limits=limits)
    for name in NAMES:
        policy = tmp_path / name / "policy.toml"
        text = policy.read_text().replace("delta = 1e-6", 'delta = 1e-3\nadjacency = "replace-one"')
        policy.write_text(text.replace("epsilon = 8.0", "epsilon = 1e-9") if name == "b" else text)
    report = coordinated(plan, guards(tmp_path))
    assert [told["party"] for told in report["parties"]] == ["a", "c"]
    assert [told["party"] for told in report["left_out"]] == ["b"]


def test_a_method_whose_rounds_would_never_end_asks_nobody(tmp_path, guards):
    """As in a simulation: SGD1 takes n² iterations, each a message to one party."""
    plan = plan_of(tmp_path, method='name = "sgd1"\nmost = 15', records=400)
    with pytest.raises(InvalidValue, match="at most 1000 in all, got 400 of a, 400 of b, 400 of c"):
        coordinated(plan, guards(tmp_path))
    assert not any((tmp_path / name / f"{name}.ledger.answers").read_bytes() for name in NAMES)


def test_a_run_goes_on_where_it_was(tmp_path, guards, monkeypatch):
    plan = plan_of(tmp_path)
    transport = guards(tmp_path, seed=7)

    def interrupt(self, step, accuracy):
        if step.t == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RunProgress, "stepped", interrupt)
        with pytest.raises(FarthingError, match="again to resume it"):
            coordinated(plan, transport)
    assert not plan.report.exists()
    report = coordinated(plan, transport)
    assert report["rounds"] == 6
    other = tmp_path / "other"
    other.mkdir()
    whole = plan_of(other)
    for name in NAMES:  # the same records; other keys
        assert (other / name / "records.npz").read_bytes() == (tmp_path / name / "records.npz").read_bytes()
    coordinated(whole, guards(other, seed=7))
    with np.load(plan.model) as one, np.load(whole.model) as two:
        np.testing.assert_array_equal(one["coef"], two["coef"])


def test_a_run_evaluates_at_its_parties_and_the_page_and_the_report_show_it(tmp_path, guards):
    """Four rounds fit the budgets; two of them are evaluations, after the first and the second step."""
    limits = "noise = 0.01\nclip = 3.0\nrounds = 1000\nevaluation = true"
    plan = plan_of(tmp_path, method='name = "sgd2"\nrounds = 4', settings="evaluate = 1", limits=limits)
    board = RunProgress(plan)
    report = coordinated(plan, guards(tmp_path), board)
    assert report["rounds"] == 2
    assert [one["round"] for one in report["evaluations"]] == [1, 2]
    assert board.view().evaluated == tuple(
        (one["round"], one["accuracy"], one["deviation"]) for one in report["evaluations"]
    )
    assert "charged to the parties' budgets" in serve.lines(report)["at the parties"]
    assert main(["ledger", "verify", str(tmp_path / "b" / "b.ledger")]) == 0


def test_a_run_whose_parties_allow_no_evaluation_trains_all_the_same(tmp_path, guards):
    plan = plan_of(tmp_path, method='name = "sgd2"\nrounds = 3', settings="evaluate = 1")
    report = coordinated(plan, guards(tmp_path))
    assert (report["rounds"], "evaluations" in report) == (3, False)


AVERAGING = '[averaging]\nmean = "median"\nstaleness = 1\n\n[parties]'


def test_the_mean_and_the_pace_of_a_run_are_settings_of_its_file(tmp_path, guards):
    plan = plan_of(
        tmp_path,
        settings="quorum = 0.6\ndeadline = 5",
        edit=lambda text: text.replace("[parties]", AVERAGING),
    )
    assert (plan.quorum, plan.deadline) == (0.6, 5.0)
    assert (plan.averaging.mean, plan.averaging.staleness) == ("median", 1)
    report = coordinated(plan, guards(tmp_path))
    assert report["rounds"] == 6


def external(text):
    nodes = "\n".join(f"{name} = {2**63 + place}" for place, name in enumerate(NAMES))
    return text.replace("[parties]", f'[external]\nbridge = "relay.sock"\n{nodes}\n\n[parties]')


def test_a_run_over_a_superlink_of_others_waits_for_the_relay_and_shows_its_health(tmp_path, guards):
    """The relay is a thread here, which reaches guards by the numbers of their nodes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    plan = plan_of(tmp_path, edit=external, settings=f'metrics = "{place}"')
    transport, seen = guards(tmp_path), []

    def look(path):
        with urllib.request.urlopen(f"http://{place}{path}", timeout=60) as said:
            return said.read().decode()

    def exchange(requests, seconds):
        seen.append((look("/healthz"), look("/metrics")))
        names = {2**63 + place: name for place, name in enumerate(NAMES)}
        for name, answer in transport.exchange({names[n]: r for n, r in requests.items()}, seconds):
            yield 2**63 + NAMES.index(name), answer

    def relay():
        while not plan.external.bridge.exists():
            time.sleep(0.01)
        carry(plan.external.bridge, exchange)

    thread = threading.Thread(target=relay, daemon=True)
    thread.start()
    said = []
    report = serve.serve(plan, say=said.append)
    thread.join(300)
    assert report["rounds"] == 6
    assert any(str(plan.external.bridge) in line for line in said)
    assert seen[0][0] == "waiting for parties\n"
    assert 'farthing_party_state{party="a",state="awaited"} 1' in seen[0][1]
    assert "farthing_round 5\n" in seen[-1][1]
    assert 'farthing_party_rounds_left{party="b"}' in seen[-1][1]


def test_a_mean_of_single_uploads_needs_local_trust(tmp_path):
    with pytest.raises(InvalidValue, match="only sums are seen"):
        plan_of(
            tmp_path,
            method=ADDP + '\ntrust = "distributed"',
            edit=lambda text: text.replace("[parties]", AVERAGING),
        )


def test_terms_that_no_guard_takes(tmp_path, guards):
    plan = plan_of(tmp_path, limits='noise = 1000.0\nclip = 3.0\nrounds = 9\ndraws = ["poisson:0.1"]')
    with pytest.raises(BudgetSpent, match="noise"):
        coordinated(plan, guards(tmp_path))
    assert not plan.report.exists()


def test_who_does_not_come_is_waited_for(tmp_path, guards):
    plan = plan_of(tmp_path, settings="wait = 0.1\nseconds = 0.1")
    transport = guards(tmp_path)
    transport._parties["c"] = lambda request: 1 / 0
    with pytest.raises(FarthingError, match="2 of 3 parties"):
        coordinated(plan, transport)
    path = tmp_path / "run.toml"
    path.write_text(path.read_text().replace("wait = 0.1", "least = 2"))
    report = coordinated(RunFile.load(path), transport)
    assert [party["party"] for party in report["parties"]] == ["a", "b"]


# --- files


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ('name = "addp"', 'name = "nonprivate"', "method.name must be one of"),
        ('name = "addp"', 'nam = "addp"', "method.name must be a text"),
        ("rounds = 5", 'rounds = "five"', "method.rounds must be a whole number"),
        ("rounds = 5", "rounds = 0", "method.rounds must be a whole number"),
        ("rounds = 5", 'rounds = 5\ntrust = "trusted"', "without noise"),
        ("rounds = 5", 'rounds = 5\naccountant = "x"', "accountant must be one of"),
        ("rounds = 5", "rounds = 5\nsurvivors = 2", "survivors"),
        ('draw = "poisson:0.1"', 'draw = "some"', "draw must be"),
        ("most = 6", "most = 6\nspeed = 9", "no setting method.speed"),
        ('run = "demo"', 'run = "de mo"', "run must be"),
        ('run = "demo"', 'ran = "demo"', "run must be a text"),
        ('schema = "adult"', 'schema = "nowhere.json"', "nowhere.json"),
        (":9092", "", "HOST:PORT"),
        ("keys/a/public.toml", "keys/z/public.toml", "cannot be read"),
        ("keys/a/public.toml", "keys/b/public.toml", "a key of their own"),
        ('test = "adult"', "least = 4", "least must be at most"),
        ('test = "adult"', "wait = -1", "wait must be a positive number"),
        ("[parties]", "[partys]", "[parties]"),
        ("[parties]", '[averaging]\nmean = "mode"\n[parties]', "mean must be one of"),
        ("[parties]", "[averaging]\ntrim = 0.6\n[parties]", "trim must lie between 0 and 0.5"),
        ("[parties]", "[averaging]\nkeep = 1\n[parties]", "no setting averaging.keep"),
        ("[parties]", "[floor]\nepsilon = -1\n[parties]", "floor.epsilon must be a positive number"),
        ('test = "adult"', "quorum = 1.5", "quorum must be a share"),
        ('test = "adult"', 'metrics = "9100"', "HOST:PORT"),
        ("[parties]", '[external]\nbridge = "b"\na = 1\n[parties]', "each of the [parties]"),
        ("[parties]", '[external]\nbridge = "b"\na = 1\nb = 1\nc = 2\n[parties]', "a node of its own"),
        ("[method]", "[method", "TOML"),
    ],
)
def test_what_a_run_must_be(tmp_path, old, new, what, capsys):
    path = set_up(tmp_path, NAMES, port=9092, records=5, method=ADDP)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(InvalidValue) as error:
        RunFile.load(path)
    assert what in str(error.value)
    assert main(["serve", str(path)]) == 2
    assert what in capsys.readouterr().err


def test_a_party_with_the_node_of_another_is_refused(tmp_path):
    """A public.toml is the party's own: with another's node in it, that party would never be asked."""
    path = set_up(tmp_path, NAMES, port=9092, records=5, method=ADDP)
    a, b = (next(tmp_path.rglob(f"{name}/public.toml")) for name in ("a", "b"))
    node = next(line for line in a.read_text().splitlines() if line.startswith("node"))
    for said in (node, f'{node[:-1]} b@elsewhere"'):
        b.write_text(f"{b.read_text().splitlines()[0]}\n{said}\n")
        with pytest.raises(InvalidValue, match="a node of their own"):
            RunFile.load(path)


def test_a_run_that_is_over_stays_so(tmp_path):
    plan = plan_of(tmp_path, records=5)
    plan.folder.mkdir()
    plan.report.write_text("{}")
    with pytest.raises(InvalidValue, match="is over"):
        serve.serve(plan)


def test_without_flower_it_says_so(tmp_path, monkeypatch, capsys):
    set_up(tmp_path, NAMES, port=9092, records=5)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["serve", str(tmp_path / "run.toml")]) == 2
    assert "pip install flwr" in capsys.readouterr().err
    assert main(["join", str(tmp_path / "a" / "party.toml")]) == 2


def test_a_port_must_be_one(tmp_path, capsys):
    assert main(["serve", str(tmp_path / "run.toml"), "--page", "70000"]) == 2
    assert "--page must be a port" in capsys.readouterr().err


def test_before_the_run_everybody_is_awaited(tmp_path):
    view = RunProgress(plan_of(tmp_path, records=5)).view()
    assert [(party.name, party.state) for party in view.parties] == [(name, "awaited") for name in NAMES]
    assert view.phase == "waiting for parties"


# --- processes


def test_a_child_ends_with_its_group_and_is_started_again(tmp_path):
    code = "import subprocess as s, time; print(s.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    child = Child([sys.executable, "-c", code], tmp_path / "log")
    child.start()
    until = time.monotonic() + 300
    while not (tmp_path / "log").read_text().strip() and time.monotonic() < until:
        time.sleep(0.01)
    grandchild = int((tmp_path / "log").read_text())
    assert not child.revive()  # it lives
    os.kill(child.pid, signal.SIGKILL)
    while child.running:
        time.sleep(0.01)
    until = time.monotonic() + 300
    while not child.revive() and time.monotonic() < until:
        time.sleep(0.05)
    assert child.running
    child.stop()
    assert not child.running
    until = time.monotonic() + 300
    while alive(grandchild) and time.monotonic() < until:  # killed, which takes a moment on a busy machine
        time.sleep(0.01)
    assert not alive(grandchild)


def alive(pid):
    """Whether a process is there and no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_child_ends_when_its_parent_is_killed(tmp_path):
    inner = (
        "from farthing.deploy.processes import end_with_parent as e; import time; e(); "
        "print('watching', flush=True); time.sleep(600)"
    )
    outer = (
        "import sys, time; from pathlib import Path; from farthing.deploy.processes import Child; "
        f"c = Child([sys.executable, '-c', {inner!r}], Path({str(tmp_path / 'inner')!r})); c.start(); "
        "print(c.pid, flush=True); time.sleep(600)"
    )
    parent = Child([sys.executable, "-c", outer], tmp_path / "outer")
    parent.start()
    until = time.monotonic() + 300
    while not (tmp_path / "outer").read_text().strip() and time.monotonic() < until:
        time.sleep(0.01)
    pid = int((tmp_path / "outer").read_text())
    while "watching" not in (tmp_path / "inner").read_text() and time.monotonic() < until:
        time.sleep(0.01)
    os.kill(parent.pid, signal.SIGKILL)
    until = time.monotonic() + 300
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive(pid)
    parent.stop()
