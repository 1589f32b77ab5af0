"""Time rounds over Flower: ours, with guards, signatures and ledgers, beside a bare and an empty exchange.

    python benchmarks/flower.py [--parties 3] [--rounds 8]
    python benchmarks/flower.py --start [--parties 10]

One SuperLink (TLS, node keys, a database), and on it, in turn:

* bare: Flower's SuperNodes with a ClientApp that returns an empty message, asked by a ServerApp's
  `grid.send_and_receive`, as Flower is documented and installed;
* empty: our nodes and relay, every guard asked something that it refuses at once;
* ours: A-DDP rounds over the same nodes, relay and guards, with charge, noise, log and signature.

Beside them the same rounds over the guards' sockets, without Flower: that is the local work. Medians; the
first round is left out, since everything is imported then.

With ``--start``: ``farthing serve`` and as many ``farthing join`` are started at once, and the run ends after
one round. Seconds until then, and CPU seconds of all processes: on a machine without other work, two cores
take at least half of those.
"""

import argparse
import json
import os
import resource
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from farthing.cli.demo_parties import _RUN, set_up
from farthing.deploy import keys as keyring
from farthing.deploy.coordinator import Remote
from farthing.deploy.flower.superlink import Address, SuperLink, environment
from farthing.deploy.join import listening
from farthing.deploy.messages.signed import MessageKind, Signer, seal
from farthing.deploy.messages.transport import Transport, UnixSockets
from farthing.deploy.processes import Child
from farthing.deploy.serve import RunFile
from farthing.federated.methods.addp import addp
from farthing.queries.samplers import Poisson

GUARD = "import sys; from farthing.cli.main import main; main(sys.argv[1:])"
OUT = "FARTHING_BENCH_OUT"
APP = """[project]
name = "bare"
version = "1.0.0"
dependencies = []

[tool.flwr.app]
publisher = "farthing"

[tool.flwr.app.components]
serverapp = "bare:server"
clientapp = "bare:client"
"""
CODE = f'''
import json, os, time
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client = ClientApp()
server = ServerApp()

@client.query()
def empty(message, context):
    return Message(RecordDict(), reply_to=message)

@server.main()
def main(grid, context):
    with open(os.environ["{OUT}"]) as file:
        asked = json.load(file)
    while set(grid.get_node_ids()) < set(asked["nodes"]):
        time.sleep(1)
    seconds = []
    for _ in range(asked["rounds"] + 1):
        began = time.monotonic()
        messages = [Message(RecordDict(), node, "query") for node in asked["nodes"]]
        came = list(grid.send_and_receive(messages, timeout=600))
        assert len(came) == len(messages) and all(m.has_content() for m in came)
        seconds.append(time.monotonic() - began)
    with open(os.environ["{OUT}"] + ".done.draft", "w") as file:
        json.dump(seconds, file)
    os.rename(os.environ["{OUT}"] + ".done.draft", os.environ["{OUT}"] + ".done")
'''


def node(folder: Path, name: str, plan: RunFile, *flags: str) -> Child:
    command = [sys.executable, "-m", "farthing.deploy.flower.node", str(plan.listen)]
    command += [str(plan.keys / "ca.pem"), str(folder / "keys" / name / "node.key")]
    command += [str(folder / name / "guard.sock"), *flags]
    home = environment(folder / f"home-{name}")
    return Child(command, folder / f"{name}{''.join(flags)}.log", home)


def bare(folder: Path, plan: RunFile, link: SuperLink, names: Sequence[str], rounds: int) -> list[float]:
    """Time Flower without our code."""
    app, out = folder / "bare", Path(os.environ[OUT])
    app.mkdir()
    (app / "pyproject.toml").write_text(APP)
    (app / "bare.py").write_text(CODE)
    bridge = link.bridge
    assert bridge is not None
    out.write_text(json.dumps({"nodes": [bridge._nodes[name] for name in names], "rounds": rounds}))
    children = [node(folder, name, plan, "--apps") for name in names]
    try:
        for child in children:
            child.start()
        link._control("run", str(app))
        done = Path(f"{out}.done")
        while not done.exists():
            time.sleep(1)
        seconds: list[float] = json.loads(done.read_text())
        return seconds
    finally:
        for child in children:
            child.stop()


def empty(transport: Transport, names: Sequence[str], rounds: int) -> list[float]:
    stranger, seconds = Signer.new(), []
    for number in range(rounds + 1):
        request = seal(MessageKind.HELLO, {"number": number}, b"\0" * 8 * 109, stranger)
        began = time.monotonic()
        came = dict(transport.exchange(dict.fromkeys(names, request), 600.0))
        assert len(came) == len(names)
        seconds.append(time.monotonic() - began)
    return seconds


def ours(plan: RunFile, transport: Transport, run: str, rounds: int) -> list[float]:
    enrolled = {name: card.key for name, card in plan.parties.items()}
    signer = Signer.load(plan.keys / "coordinator.key")
    clients = Remote(
        transport, signer, enrolled, run=run, dataset="adult", checkpoint=plan.folder / run, seconds=600.0
    )
    problem, seconds = plan.learner.problem(int(clients.records.sum())), []
    steps = addp(clients, problem, draw=Poisson(0.1), rounds=5)
    for _ in range(rounds + 1):
        began = time.monotonic()
        next(steps)
        seconds.append(time.monotonic() - began)
    clients.close()
    return seconds


def started(count: int) -> tuple[float, float]:
    """Return the seconds from the start of all processes to the end of the first round, and CPU seconds."""
    with tempfile.TemporaryDirectory(prefix="fs-") as text:
        folder, names = Path(text), [f"p{number}" for number in range(count)]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        method = 'name = "addp"\nrounds = 5\nmost = 1\ndraw = "poisson:0.1"'
        run = set_up(folder, names, port=port, method=method, records=1000)
        commands = {"serve": ["serve", str(run)]}
        commands |= {name: ["join", str(folder / name / "party.toml")] for name in names}
        children = {
            name: Child([sys.executable, "-c", _RUN, *command], folder / f"{name}.log")
            for name, command in commands.items()
        }
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        try:
            for child in children.values():
                child.start()
            while children["serve"].running:
                time.sleep(0.05)
            seconds, code = time.monotonic() - began, children["serve"].code
            for child in children.values():  # processes that end in order have their CPU time counted
                if child.running and child.pid is not None:
                    os.kill(child.pid, signal.SIGTERM)
            until = time.monotonic() + 60
            while any(child.running for child in children.values()) and time.monotonic() < until:
                time.sleep(0.1)
        finally:
            for child in children.values():
                child.stop()
        assert code == 0, (folder / "serve.log").read_text()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parties", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--start", action="store_true", help="time until the first round is over")
    options = parser.parse_args(arguments)
    if options.start:
        seconds, work = started(options.parties)
        print(f"{options.parties} parties, first round after {seconds:.1f} s; {work:.1f} CPU s in all")
        return
    with tempfile.TemporaryDirectory(prefix="fb-") as text:
        folder, rounds = Path(text), options.rounds
        names = [f"p{number}" for number in range(options.parties)]
        rivals = [f"bare{number}" for number in range(options.parties)]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        method = 'name = "addp"\nrounds = 5\ndraw = "poisson:0.1"'
        plan = RunFile.load(set_up(folder, names, port=port, method=method, records=1000))
        for name in rivals:
            (folder / name).mkdir()
        keyring.make(folder / "keys", rivals, [], coordinator=False)
        cards = {
            name: keyring.PublicKeys.load(folder / "keys" / name / "public.toml")
            for name in [*names, *rivals]
        }
        plan.folder.mkdir()
        os.environ[OUT] = str(folder / "out")
        guards = [
            Child(
                [sys.executable, "-c", GUARD, "guard", str(folder / name / "policy.toml")],
                folder / f"{name}.guard.log",
            )
            for name in names
        ]
        nodes = [node(folder, name, plan) for name in names]
        link = SuperLink(
            Address("127.0.0.1", port), plan.keys, {n: c.node for n, c in cards.items()}, plan.folder
        )
        try:
            assert link.bridge is not None
            measured = {"bare": bare(folder, plan, link, rivals, rounds)}
            for child in [*guards, *nodes]:
                child.start()
            while not all(listening(folder / name / "guard.sock") for name in names):
                time.sleep(0.2)
            measured["empty"] = empty(link.bridge, names, rounds)
            measured["ours"] = ours(plan, link.bridge, "flower", rounds)
            near = UnixSockets({name: folder / name / "guard.sock" for name in names})
            measured["local"] = ours(plan, near, "near", rounds)
        finally:
            for child in [*nodes, *guards]:
                child.stop()
            link.close()
    times = {what: statistics.median(seconds[1:]) for what, seconds in measured.items()}
    print(f"{options.parties} parties, seconds a round, medians of {rounds}")
    for what, seconds in measured.items():
        low, high = min(seconds[1:]), max(seconds[1:])
        print(f"{what:6} {times[what]:8.3f}  ({low:.3f} to {high:.3f})")
    print(f"ours over bare  {times['ours'] / times['bare']:.2f}")
    print(f"ours over empty {times['ours'] / times['empty']:.2f}")


if __name__ == "__main__":
    main()
