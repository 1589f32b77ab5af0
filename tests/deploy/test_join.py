"""A party's file, and its guard under ``farthing join``."""

import os
import signal
import socket
import sys
import threading
import time

import pytest

from farthing.cli.demo_parties import set_up
from farthing.cli.main import main
from farthing.deploy import join as joining
from farthing.deploy.flower.superlink import Address
from farthing.deploy.join import PartyFile, join, listening
from farthing.errors import FarthingError, InvalidValue


@pytest.fixture
def folder(tmp_path):
    set_up(tmp_path, ["a", "b"], port=9092, records=5)
    return tmp_path


def test_a_party(folder):
    party = PartyFile.load(folder / "a" / "party.toml")
    assert party.coordinator == Address("localhost", 9092)
    assert party.socket == (folder / "a" / "guard.sock")
    assert not party.apps


def test_a_guard_elsewhere(folder):
    path = folder / "a" / "party.toml"
    path.write_text(path.read_text().replace('policy = "policy.toml"', 'socket = "/run/g"\napps = true'))
    party = PartyFile.load(path)
    assert (str(party.socket), party.policy, party.apps) == ("/run/g", None, True)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ('policy = "policy.toml"', "", "policy or"),
        ('policy = "policy.toml"', 'policy = "policy.toml"\nsocket = "s"', "policy or"),
        ('policy = "policy.toml"', 'policy = "none.toml"', "none.toml"),
        ("localhost:9092", "localhost", "HOST:PORT"),
        ("node.key", "other.key", "other.key' cannot be read: No such file"),
        ("node.key", "guard.key", "node must be a node.key"),
        ("node.key", "public.toml", "node must be a node.key"),
        ("ca.pem", "other.pem", "other.pem' cannot be read: No such file"),
        ("ca.pem", 300 * "other", "cannot be read: File name too long"),
        ("ca.pem", "ca.key", "authority must be the coordinator's ca.pem"),
        ("ca.pem", "ca\\u0000.pem", "without null characters"),
        ("authority", "autority", "authority must be a text"),
        ("coordinator =", 'speed = "9"\ncoordinator =', "no setting speed"),
        ("coordinator =", "apps = 1\ncoordinator =", "true or false"),
    ],
)
def test_what_a_party_must_be(folder, old, new, what, capsys):
    path = folder / "a" / "party.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(InvalidValue) as error:
        PartyFile.load(path)
    assert what in str(error.value)
    assert main(["join", str(path)]) == 2
    assert what in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_named(folder, quiet_node, capsys):
    path = folder / "a" / "party.toml"
    path.write_text(path.read_text().replace('folder = "state"', 'folder = "policy.toml/state"'))
    assert main(["join", str(path)]) == 2
    assert "folder must be writable" in capsys.readouterr().err


def test_a_guard_that_runs_elsewhere_and_is_not_there_is_named(folder, quiet_node):
    path, said = folder / "a" / "party.toml", []
    path.write_text(path.read_text().replace('policy = "policy.toml"', 'socket = "typo.sock"'))

    def say(line):
        said.append(line)
        os.kill(os.getpid(), signal.SIGTERM)

    join(PartyFile.load(path), say)
    assert "none listens at" in said[0]
    assert "typo.sock" in said[0]


def test_listening(tmp_path):
    path = tmp_path / "s"
    assert not listening(path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert listening(path)
    assert not listening(path)


@pytest.fixture
def quiet_node(monkeypatch):
    """A node that does nothing, since there is no coordinator, and no need of Flower."""
    real = joining.Child

    def child(command, log, environment=None):
        if "farthing.deploy.flower.node" in command:
            wait = "from farthing.deploy import processes; processes.end_with_parent(); input()"
            command = [sys.executable, "-c", wait]
        return real(command, log, environment)

    monkeypatch.setattr(joining, "Child", child)
    monkeypatch.setattr(joining, "needs_flower", lambda: None)


def test_guard_and_node_live_until_told_to_end(folder, quiet_node):
    party, said = PartyFile.load(folder / "a" / "party.toml"), []
    ended, began = threading.Event(), time.monotonic()

    def end():
        while not any(line.startswith("joining") for line in said) and time.monotonic() - began < 300:
            time.sleep(0.05)
        said.append(listening(party.socket))
        ended.set()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end, daemon=True).start()
    join(party, said.append)
    assert ended.is_set()
    assert said[-1] is True
    assert not listening(party.socket)


def test_a_node_that_ends_says_why(folder, monkeypatch):
    real, said = joining.Child, []

    def child(command, log, environment=None):
        if "farthing.deploy.flower.node" in command:
            command = [sys.executable, "-c", "print('the clocks differ')"]
        return real(command, log, environment)

    def say(line):
        said.append(line)
        if line.startswith("node"):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(joining, "Child", child)
    monkeypatch.setattr(joining, "needs_flower", lambda: None)
    join(PartyFile.load(folder / "a" / "party.toml"), say)
    assert said[-1] == "node        had ended, started again: the clocks differ"


def test_what_a_node_says_of_its_coordinator_is_passed_on_once(tmp_path):
    log = tmp_path / "node.log"
    log.write_text("joined as node 7\n")  # of an earlier start
    heard = joining.NewWords(log)
    waiting, joined = "no answer from the coordinator at h:1: trying again", "joined as node 7"
    found = []
    for text in (
        f"{waiting}\n",
        f"{waiting}\nINFO other\n",
        joined[:4],
        f"{joined[4:]}\n",
        f"{waiting}\n",
        "",
    ):
        with log.open("a") as file:
            file.write(text)
        found.append(list(heard.read()))
    assert found == [[waiting], [], [], [joined], [waiting], []]
    log.unlink()
    assert list(heard.read()) == []


def test_a_node_writes_the_words_that_join_passes_on(capsys, monkeypatch):
    node = pytest.importorskip("farthing.deploy.flower.node")
    monkeypatch.setattr(node, "_is_open", lambda *_: False)
    node.wait_until_open("h:1", 0.0)
    assert capsys.readouterr().err.startswith(joining.WORDS[1])


def test_why_a_child_ended(tmp_path):
    for code, why in (("print('why')", "why"), ("import os; os.kill(os.getpid(), 9)", "killed by signal 9")):
        child = joining.Child([sys.executable, "-c", code], tmp_path / "log")
        child.start()
        child._process.wait()
        assert joining._why(child) == why
        child.stop()


def test_a_guard_that_cannot_start_says_why(folder, quiet_node):
    (folder / "a" / "records.npz").unlink()
    with pytest.raises(FarthingError, match="records must be"):
        join(PartyFile.load(folder / "a" / "party.toml"))


def test_a_policy_that_is_wrong_is_named_by_the_guard_that_read_it(tmp_path):
    pytest.importorskip("flwr")
    set_up(tmp_path, ["a"], port=9092, records=5)
    policy = tmp_path / "a" / "policy.toml"
    policy.write_text(policy.read_text().replace("size = 5", "size = 0"))
    with pytest.raises(InvalidValue, match=r"the guard did not start: .*policy\.toml: size must be"):
        join(PartyFile.load(tmp_path / "a" / "party.toml"))
