"""Run Flower's processes on the coordinator's side, and a `Bridge` over them.

This is a SuperLink (TLS, nodes known by their keys, its own database, access control) with our relay in it.
Where Flower is not of a version that this is known to work with, a SuperExec runs the relay as a process of
its own, and Flower's client registers nodes and starts it. A thread restarts any of them that ends: a
SuperLink that was killed continues from its database. Nothing is installed, fetched or reported: telemetry
and update checks are off.

Other accounts of this machine cannot start apps: the control interface asks for a key that is new for every
coordinator and lies in a file readable by its own account only.

``python -m farthing.deploy.flower.superlink register FILE...`` registers the nodes with these keys, ``... run
FOLDER`` starts the app in a folder. Both run Flower's own commands, several in one process; each prints a
JSON object among other text (`objects`). Requests carry the coordinator's key, without which
`farthing.deploy.flower.link` refuses them.
"""

import contextlib
import errno
import importlib.util
import json
import logging
import math
import os
import secrets
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farthing.deploy.processes import Child, program
from farthing.errors import FarthingError, InvalidValue, Unsupported

if TYPE_CHECKING:
    from farthing.deploy.messages.transport import Bridge

KEY_FILE = "FARTHING_CONTROL_KEY"  # environment variable: the file with the key of the control interface
KEY_HEADER = "x-farthing-control-key"  # the HTTP header that carries the key
ORDER = "/farthing-order"  # where our SuperLink takes the coordinator's orders
WORDS = (
    "joined as node",
    "no answer from the coordinator",
)  # how lines begin that a node's operator waits for


def objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in printed text.

    >>> list(objects('Registered. {"node-id": 1} Done. {"success": false}'))
    [{'node-id': 1}, {'success': False}]
    """
    decoder, place = json.JSONDecoder(), 0
    while (start := text.find("{", place)) >= 0:
        try:
            found, place = decoder.raw_decode(text, start)
            yield found
        except ValueError:
            place = start + 1


def _carry_key() -> None:
    """Add the coordinator's key to every request of Flower's client."""
    from flwr.supercore.protobuf.client import ProtobufClient

    key, begin = Path(os.environ[KEY_FILE]).read_text(encoding="ascii").strip(), ProtobufClient.__init__

    def keyed(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self._client.headers[KEY_HEADER] = key

    ProtobufClient.__init__ = keyed  # type: ignore[method-assign]


def main(arguments: list[str]) -> None:
    from flwr.cli.app import app

    _carry_key()
    command, *rest = arguments
    before = ["run"] if command == "run" else ["supernode", "register"]
    for argument in rest:
        with contextlib.suppress(SystemExit):  # the printed object holds the error
            app([*before, argument, "farthing", "--format", "json"], standalone_mode=False)


if __name__ == "__main__":
    main(sys.argv[1:])


log = logging.getLogger("farthing.federated")

BRIDGE = "FARTHING_BRIDGE"  # repeated from `farthing.deploy.flower.app`, whose import needs Flower
_ACCESS_CHECK = "/farthing-access-control"

APP = """[project]
name = "farthing-relay"
version = "1.0.0"
dependencies = []

[tool.flwr.app]
publisher = "farthing"

[tool.flwr.app.components]
serverapp = "farthing.deploy.flower.app:server"
clientapp = "farthing.deploy.flower.app:client"
"""

_DATABASE, _MADE = "superlink.db", "superlink.made"  # the second is there once the first is whole
_UP = 120.0  # seconds within which a SuperLink must answer
_EACH = 20.0  # additional seconds for each node to register
_FREE = 20.0  # seconds for which the SuperLink of a killed coordinator may still hold the port
_RELAY = 90.0  # seconds within which a relay must connect before another is started
_LOOK = 0.5
_SOON = 0.1  # seconds between two looks for a SuperLink that starts
_DOOR = 20.0  # seconds within which the access control must answer, even on a busy machine


def needs_flower() -> None:
    """Refuse to continue where Flower is not installed."""
    if importlib.util.find_spec("flwr") is None:
        raise Unsupported("this needs Flower: pip install flwr")


def environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's programs: no telemetry, no update checks, files under ``home``."""
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    return {
        **os.environ,
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
    }


def _write_secret(path: Path, text: str) -> None:
    """Write a file that only its owner reads, replacing an older one."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(text)


@dataclass(frozen=True, slots=True)
class Address:
    """The address at which parties reach the coordinator."""

    host: str
    port: int

    @classmethod
    def of(cls, text: str) -> "Address":
        host, _, port = text.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 2**16:
            raise InvalidValue(f"an address is HOST:PORT, got {text!r}")
        return cls(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def taken(self) -> bool:
        """Return whether another process listens here."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
            try:
                probe.bind((self.host, self.port))
            except OSError as error:
                return error.errno == errno.EADDRINUSE
        return False

    @property
    def near(self) -> "Address":
        """Return the address as reached from this machine."""
        everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}
        return Address(everywhere.get(self.host, self.host), self.port)


class SuperLink:
    """Flower's processes that a coordinator needs; ``nodes`` are the parties' keys in OpenSSH's format."""

    def __init__(self, place: Address, keys: Path, nodes: Mapping[str, str], folder: Path) -> None:
        from farthing.ledger.journal_head import narrow  # not for parties, who need an `Address` only

        needs_flower()
        self._place, self._keys, self._folder = place, keys, folder
        for name in ("ca.pem", "server.pem", "server.key"):
            if not (keys / name).is_file():
                raise InvalidValue(f"keys must be a coordinator's, {str(keys)!r} has no {name}")
        narrow(str(keys / "server.key"))
        folder.mkdir(mode=0o700, exist_ok=True)
        self._key = secrets.token_hex(32)
        self._environment = environment(folder / "flower") | {KEY_FILE: str(folder / "control.key")}
        self._over = threading.Event()
        self._link: Child | None = None
        self._executor: Child | None = None  # where the SuperLink does not carry messages itself
        self.bridge: Bridge | None = None
        self._keeper: threading.Thread | None = None
        try:
            self._begin(nodes)
        except BaseException:
            self.close()
            raise

    def _begin(self, nodes: Mapping[str, str]) -> None:
        from farthing.deploy.messages.transport import Bridge  # not for parties, who need an `Address` only

        self._write_settings()
        self.bridge = Bridge({})
        self._environment[BRIDGE] = str(self.bridge.path)
        self._link = Child(self._link_command(), self._folder / "superlink.log", self._environment)
        self._remove_unmade()
        self._link.start()
        self._await_link(self._link)
        self.bridge.reach(self._registered(nodes))
        self._keeper = threading.Thread(target=self._keep, args=(self._link,), daemon=True)
        self._keeper.start()

    def close(self) -> None:
        """End all processes."""
        self._over.set()
        if self._keeper is not None:
            self._keeper.join()
        if self.bridge is not None:
            self.bridge.close()
        for child in (self._executor, self._link):
            if child is not None:
                child.stop()

    # --- programs

    def _write_settings(self) -> None:
        secret, app = self._folder / "secret", self._folder / "app"
        if not secret.exists():
            _write_secret(secret, secrets.token_hex(32))
        _write_secret(self._folder / "control.key", self._key)
        app.mkdir(exist_ok=True)
        (app / "pyproject.toml").write_text(APP, encoding="ascii")
        known = json.dumps(str((self._keys / "ca.pem").resolve()))  # a JSON text is a TOML text
        (self._folder / "flower" / "config.toml").write_text(
            f'[superlink]\ndefault = "farthing"\n\n[superlink.farthing]\naddress = "{self._place.near}"\n'
            f"root-certificates = {known}\n",
            encoding="utf-8",
        )

    def _link_command(self) -> list[str]:
        keys = self._keys.resolve()
        return [
            *(sys.executable, "-m", "farthing.deploy.flower.link"),
            *("--host", self._place.host, "--port", str(self._place.port)),
            *("--ssl-certfile", str(keys / "server.pem"), "--ssl-keyfile", str(keys / "server.key")),
            *("--ssl-ca-certfile", str(keys / "ca.pem"), "--enable-supernode-auth"),
            *("--isolation", "process", "--superexec-auth-secret-file", str(self._folder / "secret")),
            *("--database", str(self._folder / _DATABASE), "--disable-runtime-dependency-installation"),
        ]

    def _executor_command(self) -> list[str]:
        return [
            *(program("flower-superexec"), "--runtime-api-address", str(self._place.near)),
            *("--root-certificates", str((self._keys / "ca.pem").resolve())),
            *("--superexec-auth-secret-file", str(self._folder / "secret")),
            *("--parent-pid", str(os.getpid())),
        ]

    def _ordered(self, *arguments: str) -> list[dict[str, object]] | None:
        """Return what our SuperLink answers to an order; None where Flower's command line must give it."""
        try:
            with self._opener().open(self._request(ORDER, json.dumps(arguments)), timeout=_UP) as said:
                found: list[dict[str, object]] = json.load(said)
                return found
        except (OSError, ValueError):
            return None

    def _control(self, *arguments: str) -> list[dict[str, object]]:
        try:
            said = subprocess.run(
                [sys.executable, "-m", "farthing.deploy.flower.superlink", *arguments],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_UP + _EACH * len(arguments),
            )
        except subprocess.TimeoutExpired:
            return []
        with open(self._folder / "control.log", "a", encoding="utf-8") as file:
            file.write(said.stdout + said.stderr)
        return list(objects(said.stdout))

    # --- starting and keeping alive

    def _await_link(self, link: Child) -> None:
        began, warned = time.monotonic(), False
        while not (link.running and self._answers(time.monotonic() - began < _FREE)):
            waited, taken = time.monotonic() - began, not link.running and self._place.taken()
            if waited > _UP or (waited > _FREE and not link.running):
                if taken:
                    raise FarthingError(
                        f"another program listens at {self._place}: end it, or give another address as listen"
                    )
                raise FarthingError(
                    f"Flower's SuperLink did not start at {self._place}: see {self._folder / 'superlink.log'}"
                )
            if taken and not warned:
                log.warning("%s is in use: waiting %g s for who was here before to end", self._place, _FREE)
                warned = True
            if not link.running:
                self._remove_unmade()
            link.revive()
            time.sleep(_SOON)
        (self._folder / _MADE).touch(0o600)

    def _remove_unmade(self) -> None:
        """Remove a database that Flower was killed over while it made it: it never starts with it again.

        Nothing is lost with it: no SuperLink has answered yet.
        """
        if not (self._folder / _MADE).exists():
            for end in ("", "-wal", "-shm", "-journal"):
                (self._folder / f"{_DATABASE}{end}").unlink(missing_ok=True)

    def _answers(self, early: bool = False) -> bool:
        """Return whether our access control answers; raise where something else does.

        ``early``: that may be the SuperLink of a coordinator that was killed, which is about to end.
        """
        try:
            with self._opener().open(self._request(_ACCESS_CHECK), timeout=_DOOR) as said:
                if said.status == 204:
                    return True
        except urllib.error.HTTPError:
            pass
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None)
            if isinstance(reason, ssl.SSLCertVerificationError) and "expired" in reason.verify_message:
                raise FarthingError(
                    f"the certificate in {str(self._keys)!r} has expired, or this machine's clock is wrong: "
                    "make another with farthing keys --renew coordinator"
                ) from None
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise FarthingError(
                    f"the server at {self._place} has another certificate, or one for another name: "
                    f"make keys with --host {self._place.near.host}"
                ) from None
            return False
        if early:
            return False
        raise FarthingError(
            f"the server at {self._place} is not our SuperLink, or its control interface is open"
        )

    def _opener(self) -> urllib.request.OpenerDirector:
        known = ssl.create_default_context(cafile=str(self._keys / "ca.pem"))
        no_proxy = urllib.request.ProxyHandler({})
        return urllib.request.build_opener(no_proxy, urllib.request.HTTPSHandler(context=known))

    def _request(self, path: str, body: str | None = None) -> urllib.request.Request:
        content = None if body is None else body.encode("ascii")
        address = f"https://{self._place.near}{path}"
        return urllib.request.Request(address, data=content, headers={KEY_HEADER: self._key})

    def _registered(self, nodes: Mapping[str, str]) -> dict[str, int]:
        """Return the numbers of the parties' nodes, as the SuperLink's database has them."""
        said = self._ordered("register", *nodes.values())
        if said is None:
            return self._noted(nodes)
        return {name: int(str(found["node-id"])) for name, found in zip(nodes, said, strict=True)}

    def _noted(self, nodes: Mapping[str, str]) -> dict[str, int]:
        """Return the numbers that Flower's command line said when it registered the nodes, or says now.

        It registers a key once, and does not tell the number again.
        """
        path = self._folder / "nodes.json"
        known: dict[str, list[object]] = json.loads(path.read_text()) if path.exists() else {}
        fresh = [name for name, key in nodes.items() if known.get(name, [""])[0] != key]
        if fresh:
            files = []
            for name in fresh:
                files.append(self._folder / f"{name}.pub")
                files[-1].write_text(nodes[name] + "\n", encoding="ascii")
            said = self._control("register", *map(str, files))
            for name, found in zip(fresh, said, strict=False):
                if isinstance(found.get("node-id"), int):
                    known[name] = [nodes[name], found["node-id"]]
            path.write_text(json.dumps(known), encoding="ascii")
            absent = [name for name in fresh if known.get(name, [""])[0] != nodes[name]]
            if absent:
                raise FarthingError(
                    f"Flower did not register {', '.join(absent)}: see {self._folder / 'control.log'}"
                )
        return {name: int(str(known[name][1])) for name in nodes}

    def _keep(self, link: Child) -> None:
        """Restart processes that have ended, and the relay."""
        assert self.bridge is not None
        since, before = -math.inf, False  # when the last relay was started, and whether it connected
        while not self._over.wait(_LOOK if since > 0 else _SOON):
            if link.revive():
                log.warning("the SuperLink had ended and was restarted")
            if self._executor is not None and self._executor.revive():
                log.warning("the SuperExec had ended and was restarted")
                since = -math.inf
            here = self.bridge.connected
            if before and not here:
                log.warning("the relay disconnected")
                since = -math.inf
            before = here
            if not here and time.monotonic() - since > _RELAY and self._ready(link):
                said = self._ordered("run")
                said = self._control("run", str(self._folder / "app")) if said is None else said
                if said and said[-1].get("success"):
                    since = time.monotonic()
                    self._execute(inside=bool(said[-1].get("inside")))

    def _execute(self, inside: bool) -> None:
        """Run the relay as an app, unless the SuperLink carries messages itself."""
        if not inside and self._executor is None:
            self._executor = Child(
                self._executor_command(), self._folder / "superexec.log", self._environment
            )
            self._executor.start()

    def _ready(self, link: Child) -> bool:
        try:
            return link.running and self._answers()
        except FarthingError:
            return False
