"""Time rounds over Flower: ours, with guards, signatures and ledgers, beside a bare and an empty exchange.

    python benchmarks/flower.py [--parties 3] [--rounds 8]
    python benchmarks/flower.py --start [--parties 10]

In turn, each over a SuperLink with TLS, node keys and a database:

* bare: Flower's SuperLink and SuperNodes with a ClientApp that returns an empty message, asked by a
  ServerApp's `grid.send_and_receive`, as Flower is documented and installed;
* empty: our SuperLink, nodes and relay, every guard asked something that it refuses at once;
* ours: A-DDP rounds over the same nodes, relay and guards, with charge, noise, log and signature.

Beside them the same rounds over the guards' sockets, without Flower: that is the local work. Medians; the
first round is left out, since everything is imported then. CPU time a round is that of the SuperLink, of all
nodes and of all guards, with every process that they start, and of this process, which coordinates.

With ``--start``: ``farthing serve`` and as many ``farthing join`` are started at once, and the run ends after
one round. Seconds until then, and CPU seconds of all processes: on a machine without other work, two cores
take at least half of those.
"""

import argparse
import contextlib
import json
import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from farthing.cli.demo_parties import _RUN, set_up
from farthing.deploy import keys as keyring
from farthing.deploy.coordinator import Remote
from farthing.deploy.flower.superlink import KEY_FILE, Address, SuperLink, environment, objects
from farthing.deploy.join import listening
from farthing.deploy.messages.signed import MessageKind, Signer, seal
from farthing.deploy.messages.transport import Transport, UnixSockets
from farthing.deploy.processes import Child, program
from farthing.deploy.serve import RunFile
from farthing.federated.methods.addp import addp
from farthing.queries.samplers import Poisson

GUARD = "import sys; from farthing.cli.main import main; main(sys.argv[1:])"
OUT = "FARTHING_BENCH_OUT"
LONGEST = 600.0  # seconds for Flower to start, or for all rounds
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
        open(os.environ["{OUT}"] + ".begun", "w").close()
    with open(os.environ["{OUT}"] + ".done.draft", "w") as file:
        json.dump(seconds, file)
    os.rename(os.environ["{OUT}"] + ".done.draft", os.environ["{OUT}"] + ".done")
'''


def node(folder: Path, name: str, address: str, *flags: str) -> Child:
    command = [sys.executable, "-m", "farthing.deploy.flower.node", address]
    command += [str(folder / "keys" / "coordinator" / "ca.pem"), str(folder / "keys" / name / "node.key")]
    command += [str(folder / name / "guard.sock"), *flags]
    home = environment(folder / f"home-{name}")
    return Child(command, folder / f"{name}{''.join(flags)}.log", home)


def bare(folder: Path, names: Sequence[str], rounds: int) -> tuple[list[float], dict[str, float]]:
    """Time Flower without our code: its SuperLink, its SuperNodes and an app, each as it is installed."""
    app, out, home = folder / "bare", Path(os.environ[OUT]), environment(folder / "flower")
    keys, port = folder / "keys", free_port()
    app.mkdir()
    (app / "pyproject.toml").write_text(APP)
    (app / "bare.py").write_text(CODE)
    authority = keys / "coordinator" / "ca.pem"
    (folder / "flower" / "config.toml").write_text(
        f'[superlink]\ndefault = "farthing"\n\n[superlink.farthing]\naddress = "127.0.0.1:{port}"\n'
        f'root-certificates = "{authority}"\n'
    )
    (folder / "no.key").write_text("none")  # Flower's SuperLink asks for none
    home[KEY_FILE] = str(folder / "no.key")
    command = [program("flower-superlink"), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--ssl-certfile", str(keys / "coordinator" / "server.pem")]
    command += ["--ssl-keyfile", str(keys / "coordinator" / "server.key")]
    command += ["--ssl-ca-certfile", str(authority), "--enable-supernode-auth"]
    command += ["--database", str(folder / "bare.db")]
    link = Child(command, folder / "bare.log", home)
    children = [node(folder, name, f"127.0.0.1:{port}", "--apps") for name in names]

    def ordered(*arguments: str) -> list[dict[str, object]]:
        command = [sys.executable, "-m", "farthing.deploy.flower.superlink", *arguments]
        said = subprocess.run(command, env=home, capture_output=True, text=True, timeout=LONGEST)
        return list(objects(said.stdout)) or [{"said": said.stdout + said.stderr}]

    try:
        link.start()
        wait_for(lambda: is_open(port), "Flower's SuperLink", folder / "bare.log")
        cards = []
        for name in names:
            card = keyring.PublicKeys.load(keys / name / "public.toml")
            cards.append(folder / f"{name}.pub")
            cards[-1].write_text(card.node + "\n")
        nodes = ordered("register", *map(str, cards))
        assert all("node-id" in one for one in nodes), nodes
        out.write_text(json.dumps({"nodes": [one["node-id"] for one in nodes], "rounds": rounds}))
        for child in children:
            child.start()
        (begun,) = ordered("run", str(app))
        assert begun.get("success"), begun
        begun_at, done = Path(f"{out}.begun"), Path(f"{out}.done")
        wait_for(begun_at.exists, "Flower's app", folder / "bare.log")
        work = Work({"SuperLink and its app": [link], "nodes and their apps": children})
        wait_for(done.exists, "Flower's app", folder / "bare.log")
        seconds: list[float] = json.loads(done.read_text())
        return seconds, work.each(rounds)
    finally:
        for child in [*children, link]:
            child.stop()


class Work:
    """CPU seconds of groups of processes, from now on."""

    def __init__(self, groups: Mapping[str, Sequence[Child]]) -> None:
        self._groups, self._before = groups, {name: cpu_seconds(group) for name, group in groups.items()}

    def each(self, rounds: int) -> dict[str, float]:
        """CPU seconds a round of each group."""
        return {
            name: (cpu_seconds(group) - self._before[name]) / rounds for name, group in self._groups.items()
        }


def cpu_seconds(children: Sequence[Child]) -> float:
    """CPU seconds of processes and of those in their sessions, which they have started."""
    sessions, ticks = {str(child.pid) for child in children}, 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile: its parent has its time
            fields = path.read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15])) if fields[3] in sessions else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def wait_for(there: Callable[[], bool], what: str, log: Path) -> None:
    """Wait for something that takes `LONGEST` seconds at most."""
    until = time.monotonic() + LONGEST
    while not there():
        if time.monotonic() > until:
            raise SystemExit(f"{what} did not answer in {LONGEST:g} s:\n{log.read_text()[-4000:]}")
        time.sleep(0.5)


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
        port = free_port()
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
        port = free_port()
        method = 'name = "addp"\nrounds = 5\ndraw = "poisson:0.1"'
        plan = RunFile.load(set_up(folder, names, port=port, method=method, records=1000))
        for name in rivals:
            (folder / name).mkdir()
        keyring.make(folder / "keys", rivals, [], coordinator=False)
        plan.folder.mkdir()
        os.environ[OUT] = str(folder / "out")
        guards = [
            Child(
                [sys.executable, "-c", GUARD, "guard", str(folder / name / "policy.toml")],
                folder / f"{name}.guard.log",
            )
            for name in names
        ]
        nodes = [node(folder, name, f"localhost:{port}") for name in names]
        measured, spent = dict[str, list[float]](), dict[str, dict[str, float]]()
        measured["bare"], spent["bare"] = bare(folder, rivals, rounds)
        known = {name: card.node for name, card in plan.parties.items()}
        link = SuperLink(Address("127.0.0.1", port), plan.keys, known, plan.folder)
        try:
            assert link.bridge is not None
            assert link._link is not None
            for child in [*guards, *nodes]:
                child.start()
            while not all(listening(folder / name / "guard.sock") for name in names):
                time.sleep(0.2)
            measured["empty"] = empty(link.bridge, names, rounds)
            counted = Work({"SuperLink": [link._link], "nodes": nodes, "guards": guards})
            own = time.process_time()
            measured["ours"] = ours(plan, link.bridge, "flower", rounds)
            spent["ours"] = counted.each(rounds + 1) | {"here": (time.process_time() - own) / (rounds + 1)}
            near = UnixSockets({name: folder / name / "guard.sock" for name in names})
            measured["local"] = ours(plan, near, "near", rounds)
        finally:
            for child in [*nodes, *guards]:
                child.stop()
            link.close()
    times = {what: statistics.median(took[1:]) for what, took in measured.items()}
    print(f"{options.parties} parties, seconds a round, medians of {rounds}")
    for what, took in measured.items():
        low, high = min(took[1:]), max(took[1:])
        print(f"{what:6} {times[what]:8.3f}  ({low:.3f} to {high:.3f})")
    for what, groups in spent.items():
        print(f"{what:6} CPU s a round: " + ", ".join(f"{name} {one:.3f}" for name, one in groups.items()))
    print(f"ours over bare  {times['ours'] / times['bare']:.2f}")
    print(f"ours over empty {times['ours'] / times['empty']:.2f}")


if __name__ == "__main__":
    main()
