"""Join a run as a party (``farthing join``): start its guard, unless one runs, and its node.

    coordinator = "coordinator.example:9092"
    authority = "ca.pem"              # who signed the coordinator's certificate: it came with its public key
    node = "keys/ward-7/node.key"
    policy = "policy.toml"            # of the guard; or, for a guard under an account of its own,
    # socket = "/run/ward-7/guard.sock"
    # metrics = "127.0.0.1:9101"      # /metrics and /healthz: whether guard and node run
    # apps = true                     # Flower's own SuperNode, which runs apps that the coordinator sends

Both are restarted when they end, until SIGTERM or Ctrl-C.
"""

import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from farthing.deploy import keys
from farthing.deploy.flower.superlink import WORDS, Address, environment, needs_flower
from farthing.deploy.metrics import Health, Metric, MetricsServer, of_processes
from farthing.deploy.processes import Child
from farthing.deploy.toml_settings import Settings
from farthing.errors import FarthingError, InvalidValue

_LOOK = 0.2
_LONGEST = 2**16  # bytes of a log that are read at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class PartyFile:
    """A party's configuration file, which says how it joins a coordinator."""

    coordinator: Address
    authority: Path
    node: Path
    policy: Path | None
    socket: Path
    folder: Path  # holds logs and Flower's files
    apps: bool = False
    metrics: Address | None = None

    @classmethod
    def load(cls, path: Path) -> "PartyFile":
        try:
            given = Settings.load(path)
            policy = given.path("policy") if "policy" in given.names else None
            if (policy is None) == ("socket" not in given.names):
                raise InvalidValue("give policy or, where the guard runs already, its socket")
            party = cls(
                coordinator=Address.of(given.text("coordinator")),
                authority=given.path("authority"),
                node=given.path("node"),
                policy=policy,
                socket=_socket(policy) if policy is not None else given.path("socket"),
                folder=given.beside(given.text("folder", path.stem)),
                apps=given.flag("apps"),
                metrics=Address.of(given.text("metrics")) if "metrics" in given.names else None,
            )
            given.done()
            keys.check_authority(party.authority)
            keys.check_node_key(party.node)
        except InvalidValue as error:
            raise InvalidValue(f"{path}: {error}") from None
        return party


def _socket(policy: Path) -> Path:
    """Return the socket that a policy names; its guard checks the rest, in its own process."""
    try:
        return Settings.load(policy).path("socket")
    except InvalidValue as error:
        raise InvalidValue(f"{policy}: {error}") from None


def listening(path: Path) -> bool:
    """Return whether a guard answers at this socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def join(party: PartyFile, say: Callable[[str], None] = lambda _: None) -> None:
    """Run a party's guard and node until SIGTERM or Ctrl-C."""
    needs_flower()
    try:
        party.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidValue(f"folder must be writable, {str(party.folder)!r}: {error.strerror}") from None
    over = threading.Event()
    guard = None
    if party.policy is not None and not listening(party.socket):
        command = [sys.executable, "-c", _GUARD, str(party.policy)]
        guard = Child(command, party.folder / "guard.log")
    command = [sys.executable, "-m", "farthing.deploy.flower.node", str(party.coordinator)]
    command += [str(party.authority.resolve()), str(party.node.resolve()), str(party.socket)]
    command += ["--apps"] if party.apps else []
    node = Child(command, party.folder / "node.log", environment(party.folder / "flower"))
    children = {"node": node} if guard is None else {"guard": guard, "node": node}
    heard = NewWords(node.log)
    counted = None if party.metrics is None else MetricsServer(lambda: _seen(children), party.metrics)
    try:
        with _until_signal(over):
            node.start()  # both import for a second; the node waits for the guard before it joins
            if guard is not None:
                guard.start()
                _await(guard, party, over)
                say(f"guard       {party.socket}")
            elif not listening(party.socket):
                say(f"guard       none listens at {party.socket} yet: start farthing guard")
            if not over.is_set():
                say(f"joining     {party.coordinator}")
            while not over.wait(_LOOK):
                for line in heard.read():
                    say(f"node        {line}")
                for name, child in children.items():
                    why = _why(child)
                    if child.revive():
                        say(f"{name:12}had ended, started again: {why}")
    finally:
        if counted is not None:
            counted.close()
        node.stop()
        if guard is not None:
            guard.stop()


class NewWords:
    """What a node writes to its log from now on about its coordinator: each line once until another comes."""

    def __init__(self, log: Path) -> None:
        self._log, self._said = log, ""
        self._place = log.stat().st_size if log.exists() else 0

    def read(self) -> Iterator[str]:
        with contextlib.suppress(OSError), self._log.open("rb") as file:
            file.seek(self._place)
            whole, ended, _ = file.read(_LONGEST).rpartition(b"\n")
            self._place += len(whole) + len(ended)
            for line in whole.decode(errors="replace").splitlines():
                if line.startswith(WORDS) and line != self._said:
                    self._said = line
                    yield line


def _seen(children: Mapping[str, Child]) -> tuple[Health, list[Metric]]:
    running = {name: child.running for name, child in children.items()}
    return of_processes(running, {name: child.starts for name, child in children.items()})


# The guard ends when its standard input closes with this process. An error is the last line of its log.
_GUARD = """
import pathlib, sys
from farthing.deploy.processes import end_with_parent
end_with_parent()
from farthing.deploy.guard.server import guard
from farthing.errors import FarthingError, InvalidValue
try:
    guard(pathlib.Path(sys.argv[1]))
except FarthingError as error:
    print(error, file=sys.stderr)
    sys.exit(2 if isinstance(error, InvalidValue) else 1)
"""


def _await(guard: Child, party: PartyFile, over: threading.Event) -> None:
    while not listening(party.socket) and not over.wait(_LOOK):
        if not guard.running:
            kind = InvalidValue if guard.code == 2 else FarthingError
            raise kind(f"the guard did not start: {_last_line(guard.log)}")


def _why(child: Child) -> str:
    """Return why a child ended: the signal that killed it, or its last words."""
    if child.code is not None and child.code < 0:
        return f"killed by signal {-child.code}"
    return "" if child.running else _last_line(child.log)


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else f"see {log}"


@contextlib.contextmanager
def _until_signal(over: threading.Event) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, lambda *_: over.set()) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
