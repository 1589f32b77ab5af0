"""The demonstration of parties: nothing of it stays behind, however it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import farthing
from farthing.cli.demo_parties import set_up

pytest.importorskip("flwr", reason="Flower is not installed")

_DEMO = """
import subprocess, sys, time
from farthing.cli import demo_parties as demo
from pathlib import Path
home = Path(sys.argv[1])
child = demo.Child([sys.executable, "-c", demo._RUN, "join", str(home / "party.toml")], home / "join.log")
child.start()
print(child.pid, flush=True)
time.sleep(300)
"""


def running(pid):
    """Return whether a process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def processes(session):
    """Return the processes of a session, and of sessions that its processes began."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            fields = (place / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found[int(place.name)] = int(fields[1]), int(fields[3])
    own = {session}
    while more := {
        pid for pid, (parent, home) in found.items() if (parent in own or home in own) and pid not in own
    }:
        own |= more
    return set(filter(running, own))


@pytest.mark.slow
def test_parties_end_with_the_demonstration(tmp_path):
    set_up(tmp_path, ["a"], port=9, records=50)
    demo = subprocess.Popen(
        [sys.executable, "-c", _DEMO, str(tmp_path / "a")],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(farthing.__file__).parents[1])},
    )
    joined = int(demo.stdout.readline())
    until = time.monotonic() + 120
    while len(begun := processes(joined)) < 3:  # farthing join, its guard and its node
        assert time.monotonic() < until
        time.sleep(0.1)
    demo.send_signal(signal.SIGTERM)
    demo.wait(60)
    demo.stdout.close()
    while any(map(running, begun)):
        assert time.monotonic() < until
        time.sleep(0.1)
