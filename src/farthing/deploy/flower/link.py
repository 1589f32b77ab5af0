"""Run Flower's SuperLink with access control: other machines reach the nodes' interface only.

Flower serves three interfaces on one port. Nodes need the fleet interface, where they authenticate. The
runtime interface is for the coordinator's own processes, which authenticate with a secret; it is closed to
other machines. The control interface registers nodes and starts apps, that is: code that runs under the
coordinator's account, and Flower asks for no credentials there unless an account system is set up. So
`AccessControl` does: a request to it must come from this machine and carry the key that the coordinator wrote
to a file readable by its own account only (`KEY_FILE`), and the only app that can be started is our relay,
identified by the SHA-256 of its bundle. All other paths are closed. The coordinator's own orders (register
nodes, start the relay) come with the same key and are carried out here, without Flower's command line. The
relay is a thread of this process (`Relay`): it connects to the coordinator's bridge and carries bytes. Where
Flower's inner parts are others than those known, it is an app in a process of its own.

``python -m farthing.deploy.flower.link ARGUMENTS`` takes flower-superlink's arguments. It ends when its
standard input closes, that is, with the process that started it.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import json
import os
import sys
import threading
import warnings
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from farthing.deploy.flower.messaging import DirectMessaging, NearGrid
from farthing.deploy.flower.superlink import APP, BRIDGE, KEY_FILE, KEY_HEADER, ORDER
from farthing.deploy.messages.transport import carry
from farthing.deploy.processes import end_with_parent

NODES = "/v1/fleet/"
EXECUTOR = "/v1/runtime/"
REGISTER, START = "/v1/control/register-node", "/v1/control/start-run"
ACCESS_CHECK = (
    "/farthing-access-control"  # answered by the access control itself, to show that it is in place
)

_LARGEST = 2**22  # bytes of a request that starts an app: our bundle is one small file
_LAST_ANSWERS = 2  # seconds that a server which ends waits for answers under way
_BEAT = 10.0  # seconds between two heartbeats of the relay's task; Flower waits for sixty

App = Callable[[dict[str, Any], Any, Any], Awaitable[None]]


class AccessControl:
    """An ASGI wrapper: ``key`` opens the control interface, only ``bundle`` (a SHA-256) can be started.

    ``orders`` carries out what the coordinator asks of its own SuperLink.
    """

    def __init__(self, app: App, key: str, bundle: str, orders: "Orders | None" = None) -> None:
        if not key:
            raise ValueError("access control needs a key")
        self._app, self._key, self._bundle = app, key.encode("ascii"), bundle
        self._orders = orders

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        path: Any = scope.get("path")
        if scope["type"] != "http" or not admitted(path, scope.get("client"), scope.get("server")):
            await _refuse(send, "not from this machine, and not a node")
        elif path.startswith((NODES, EXECUTOR)):
            await self._app(scope, receive, send)
        elif not self._known(scope):
            await _refuse(send, "the coordinator's key is missing")
        elif path == ACCESS_CHECK:
            await _answer(send, 204)
        elif path == ORDER and self._orders is not None:
            await self._order(self._orders, receive, send)
        elif path == REGISTER:
            await self._app(scope, receive, send)
        elif path == START:
            await self._start(scope, receive, send)
        else:
            await _refuse(send, "a coordinator does not need this")

    def _known(self, scope: dict[str, Any]) -> bool:
        given = [value for name, value in scope.get("headers", ()) if name == KEY_HEADER.encode("ascii")]
        return len(given) == 1 and hmac.compare_digest(given[0], self._key)

    async def _order(self, orders: "Orders", receive: Any, send: Any) -> None:
        """Carry out an order; a status of 500 says that it must be given by Flower's command line."""
        body = await _whole(receive)
        try:
            command, *arguments = json.loads(body or b"")
            said = await asyncio.to_thread(orders, command, arguments)
        except Exception as error:  # of Flower's inner parts, which may be others in another version
            print(f"not carried out: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            await _answer(send, 500)
            return
        await _answer(send, 200, json.dumps(said).encode("ascii"))

    async def _start(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Forward a request that starts our app; refuse any other app."""
        body = await _whole(receive)
        if body is None or bundle_of(body) != self._bundle:
            await _refuse(send, "this is not our app")
            return
        left = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Any:
            return left.pop() if left else await receive()

        await self._app(scope, again, send)


def admitted(path: Any, peer: Any, here: Any = None) -> bool:
    """Return whether a client may use a path: nodes from anywhere, everything else from this machine only.

    >>> admitted("/v1/fleet/pull-messages", ("192.0.2.7", 4711))
    True
    >>> admitted("/v1/control/start-run", ("192.0.2.7", 4711)), admitted("/v1/control/start-run", ("::1", 1))
    (False, True)
    """
    if not isinstance(path, str) or ".." in path:
        return False
    if path.startswith(NODES):
        return True
    try:
        address = ipaddress.ip_address(peer[0])
    except (TypeError, ValueError, LookupError):
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback) or (here is not None and peer[0] == here[0])


def bundle_of(body: bytes) -> str:
    """Return the SHA-256 of the bundle that a request would start; empty where it names a remote one."""
    from flwr.proto.control_pb2 import StartRunRequest

    try:
        asked = StartRunRequest.FromString(body)
    except Exception:  # a DecodeError, which protobuf does not export with types
        return ""
    if asked.app_spec or not asked.fab.content:
        return ""
    return hashlib.sha256(asked.fab.content).hexdigest()


def bundled(files: Mapping[str, bytes]) -> bytes:
    """Return an app as Flower bundles it; equal files give equal bytes."""
    from flwr.cli.build import build_fab_from_files

    with warnings.catch_warnings():  # a deprecation warning between two dependencies
        warnings.simplefilter("ignore", DeprecationWarning)
        return build_fab_from_files(files)[0]


def our_bundle() -> str:
    """Return the SHA-256 of the relay's bundle."""
    return hashlib.sha256(bundled({"pyproject.toml": APP.encode("ascii")})).hexdigest()


async def _whole(receive: Any) -> bytes | None:
    """Return the body of a request; None where it is too large or incomplete."""
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        size, more = size + len(parts[-1]), message.get("more_body", False)
        if size > _LARGEST:
            return None
    return b"".join(parts)


async def _refuse(send: Any, why: str) -> None:
    print(f"refused: {why}", file=sys.stderr, flush=True)
    await _answer(send, 403)


async def _answer(send: Any, status: int, body: bytes = b"") -> None:
    length = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": length})
    await send({"type": "http.response.body", "body": body})


class Orders:
    """The coordinator's orders to its own SuperLink: register nodes, start the relay."""

    def __init__(self, app: Any, relay: "Relay | None" = None) -> None:
        self._app, self._relay = app, relay

    def __call__(self, command: str, arguments: list[str]) -> list[dict[str, Any]]:
        """Return a result for each key that is registered, or one for the start, as Flower prints it."""
        from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
        from flwr.supercore.auth.typing import AccountInfo

        account = AccountInfo(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME)
        if command == "register":
            return [{"node-id": self._registered(key, account)} for key in arguments]
        if command == "run":
            run = self._started(account)
            inside = self._relay is not None and run > 0 and self._relay.start(run, self._state())
            return [{"success": run > 0, "inside": inside}]
        raise ValueError(f"there is no order {command!r}")

    def _registered(self, key: str, account: Any) -> int:
        from cryptography.hazmat.primitives.serialization import load_ssh_public_key
        from flwr.proto.control_pb2 import RegisterNodeRequest
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes
        from flwr.superlink.servicer.control import control_handlers

        loaded: Any = load_ssh_public_key(key.encode("ascii"))
        public, state = public_key_to_bytes(loaded), self._state()
        known = state.get_node_id_by_public_key(public)  # registered by a coordinator that was killed
        if known is not None:
            return int(known)
        request = RegisterNodeRequest(public_key=public)
        return int(control_handlers.register_node(request, account, state).node_id)

    def _started(self, account: Any) -> int:
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.proto.fab_pb2 import Fab
        from flwr.superlink.servicer.control import control_handlers

        content = bundled({"pyproject.toml": APP.encode("ascii")})
        fab = Fab(hash_str=hashlib.sha256(content).hexdigest(), content=content)
        api = self._app.state.fleet_api_type
        said = control_handlers.start_run(StartRunRequest(fab=fab), account, self._state(), api)
        return int(said.run_id)

    def _state(self) -> Any:
        return self._app.state.linkstate_factory.state()


class Relay:
    """A relay between the coordinator's bridge and nodes, as a thread of the SuperLink."""

    def __init__(self, messaging: DirectMessaging, bridge: str | None) -> None:
        self._messaging, self._bridge = messaging, bridge

    def start(self, run: int, state: Any) -> bool:
        """Carry messages of this run; return False where they must be carried by an app."""
        loop = self._messaging.loop
        if self._bridge is None or loop is None or not self._messaging.known:
            return False
        try:
            from flwr.common.constant import SUPERLINK_NODE_ID
            from flwr.supercore.task_identity import TaskIdentity

            (task,) = state.get_tasks(run_ids=[run])
            number = int(task.task_id)
            # Flower's own SuperNodes answer messages of runs that are under way only
            if state.claim_task(number) is None or not state.activate_task(number):
                return False
        except (ImportError, AttributeError, TypeError, ValueError):
            return False
        # whom messages come from: Flower sets it in the process of an app
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, SUPERLINK_NODE_ID, number
        over = threading.Event()
        threading.Thread(target=_beat, args=(state, number, over), daemon=True).start()
        grid = NearGrid(self._messaging, loop)
        threading.Thread(target=self._carry, args=(grid, over), daemon=True).start()
        return True

    def _carry(self, grid: NearGrid, over: threading.Event) -> None:
        from farthing.deploy.flower.carrier import Carrier

        assert self._bridge is not None
        try:
            carry(self._bridge, Carrier(grid).exchange)
        except Exception as error:  # the coordinator sees that it disconnected, and orders another
            print(f"the relay ended: {type(error).__name__}", file=sys.stderr, flush=True)
        finally:
            over.set()


def _beat(state: Any, task: int, over: threading.Event) -> None:
    """Keep a task alive until it is over: Flower ends one without heartbeats."""
    while not over.wait(_BEAT):
        if not state.acknowledge_task_heartbeat(task):
            print("Flower has ended the relay's task", file=sys.stderr, flush=True)
            return
    state.finish_task(task, "completed", "")


def _end_soon(messaging: DirectMessaging) -> None:
    """Let a signal that ends the server end the requests that it holds, which it would wait for."""
    import uvicorn

    before = getattr(uvicorn.Server, "handle_exit", None)
    if before is None:
        return

    def end(server: Any, *signal: Any) -> None:
        messaging.end()
        before(server, *signal)

    setattr(uvicorn.Server, "handle_exit", end)  # noqa: B010 (its type is another)


def main() -> None:
    end_with_parent()
    import uvicorn
    from flwr.superlink.cli.flower_superlink import flower_superlink

    serve = uvicorn.run
    key, bundle = Path(os.environ[KEY_FILE]).read_text(encoding="ascii").strip(), our_bundle()

    def guarded(app: Any, **options: Any) -> None:
        # The address of a client comes from a proxy on this machine, if there is one; no other is trusted.
        messaging = DirectMessaging(app)
        orders = Orders(app, Relay(messaging, os.environ.get(BRIDGE)))
        controlled = AccessControl(messaging, key, bundle, orders)
        _end_soon(messaging)
        options |= {"proxy_headers": True, "forwarded_allow_ips": "127.0.0.1,::1"}
        serve(controlled, timeout_graceful_shutdown=_LAST_ANSWERS, **options)

    uvicorn.run = guarded
    flower_superlink()


if __name__ == "__main__":
    main()
