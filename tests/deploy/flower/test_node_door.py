"""A real SuperLink: another account of its machine, and what a killed coordinator left behind."""

import contextlib
import json
import os
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

import farthing
from farthing.deploy import keys as keyring
from farthing.deploy.flower.superlink import Address, SuperLink, environment, objects
from farthing.deploy.keys import PublicKeys

pytestmark = pytest.mark.slow

_LONG = 240.0  # seconds; a busy machine is no failure
EVIL = """[project]
name = "evil"
version = "1.0.0"
dependencies = []

[tool.flwr.app]
publisher = "evil"

[tool.flwr.app.components]
serverapp = "evil.app:server"
clientapp = "evil.app:server"
"""
CODE = """from pathlib import Path
Path({marker!r}).write_text("code ran as the coordinator")
from flwr.serverapp import ServerApp
server = ServerApp()
"""
FLWR = "import sys; from flwr.cli.app import app; app(sys.argv[1:])"


@pytest.fixture
def link(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(farthing.__file__).parents[1]))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = Address("127.0.0.1", probe.getsockname()[1])
    keyring.make(tmp_path / "keys", ["a", "b"], ["127.0.0.1"], coordinator=True)
    card = PublicKeys.load(tmp_path / "keys" / "a" / "public.toml")
    found = SuperLink(place, tmp_path / "keys" / "coordinator", {"a": card.node}, tmp_path / "run")
    try:
        yield found
    finally:
        found.close()


def waited(what):
    until = time.monotonic() + _LONG
    while not what() and time.monotonic() < until:
        time.sleep(0.2)
    return what()


def intruder(tmp_path, link, *command):
    """Flower's own client with ca.pem alone, as any local account could run it."""
    home = tmp_path / "intruder"
    settings = environment(home)
    authority = json.dumps(str(tmp_path / "keys" / "coordinator" / "ca.pem"))
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "it"\n\n[superlink.it]\naddress = "{link._place}"\n'
        f"root-certificates = {authority}\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", FLWR, *command, "it", "--format", "json"],
        env=settings,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_LONG,
    )
    return [found.get("success") for found in objects(said.stdout)], said.stdout + said.stderr


def test_who_has_the_certificate_alone_starts_and_registers_nothing(link, tmp_path):
    assert waited(lambda: link.bridge.connected)  # our own relay was registered, started and has connected
    marker, app = tmp_path / "marker", tmp_path / "app"
    (app / "evil").mkdir(parents=True)
    (app / "pyproject.toml").write_text(EVIL)
    (app / "evil" / "__init__.py").write_text("")
    (app / "evil" / "app.py").write_text(CODE.format(marker=str(marker)))
    started, said = intruder(tmp_path, link, "run", str(app))
    assert True not in started, said
    other = tmp_path / "b.pub"
    other.write_text(PublicKeys.load(tmp_path / "keys" / "b" / "public.toml").node + "\n")
    registered, said = intruder(tmp_path, link, "supernode", "register", str(other))
    assert True not in registered, said
    assert "node-id" not in said
    ours, said = intruder(tmp_path, link, "run", str(tmp_path / "run" / "app"))
    assert True not in ours, said
    time.sleep(10)  # as long as an executor takes to begin
    assert not marker.exists(), "somebody else's code ran as the coordinator"
    assert (tmp_path / "run" / "superlink.log").read_text().count("refused: the coordinator's key") >= 3
    for name in ("control.key", "secret", "superlink.db", "superlink.log"):
        assert os.stat(tmp_path / "run" / name).st_mode & 0o077 == 0, name


def test_a_superlink_starts_over_a_database_that_flower_was_killed_over(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(farthing.__file__).parents[1]))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = Address("127.0.0.1", probe.getsockname()[1])
    keyring.make(tmp_path / "keys", ["a"], ["127.0.0.1"], coordinator=True)
    nodes = {"a": PublicKeys.load(tmp_path / "keys" / "a" / "public.toml").node}
    (tmp_path / "run").mkdir()
    with contextlib.closing(sqlite3.connect(tmp_path / "run" / "superlink.db")) as half:
        half.execute("CREATE TABLE federation_app (is_hub_app BOOLEAN)")  # of a migration that was not noted
    numbers = []
    for _ in range(2):  # and the database that it made is kept
        found = SuperLink(place, tmp_path / "keys" / "coordinator", nodes, tmp_path / "run")
        numbers.append(dict(found.bridge._nodes))
        found.close()
    assert numbers[0] == numbers[1]
