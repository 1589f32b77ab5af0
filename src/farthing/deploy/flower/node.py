"""Run a party's node: Flower's identity, encryption and messages, and no app but our own relay.

``python -m farthing.deploy.flower.node ADDRESS CA NODE_KEY SOCKET [--apps]`` joins the SuperLink at ADDRESS
and hands requests to the guard at SOCKET. Flower's own SuperNode downloads an app from the SuperLink's
operator and runs it for every message, in a new process; this node runs only code that the party installed,
and a round takes a fraction of a second. With ``--apps`` it is Flower's SuperNode, of any version.

It ends when its standard input closes, that is, with the process that started it.
"""

import contextlib
import socket as socketlib
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from farthing.deploy.flower.lean_imports import leave_out_servers
from farthing.deploy.messages.transport import call
from farthing.deploy.processes import end_with_parent

_AFTER_AN_ERROR = 2.0
_GUARD_STARTS = 30.0  # seconds
_LOOK, _LOOK_SECONDS = 0.1, 5.0  # seconds between two looks for the coordinator, and of one of them
_INTERVAL = "HEARTBEAT_DEFAULT_INTERVAL"


def attend(address: str, authority: Path, key: Path, socket: str) -> None:
    """Answer messages as long as the connection lasts."""
    leave_out_servers()
    from flwr.app import Message
    from flwr.supercore.inflatable.inflatable_object import (
        get_all_nested_objects,
        get_object_tree,
        iterate_object_tree,
    )
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects
    from flwr.supernode.fleet_http_connection import http_request_response

    from farthing.deploy.flower.carrier import GUARD_SECONDS, PollSchedule, opened, shorten_backoff, wrapped

    shorten_backoff()
    _beat()
    _reconnect_soon(address)
    _explain_exits()
    _await(socket)
    private: Any = load_ssh_private_key(key.read_bytes(), None)
    with http_request_response(address, False, authority.read_bytes(), (private, private.public_key())) as (
        node,
        receive,
        send,
        _get_run,
        _get_app,
        pull_object,
        push_object,
        confirm,
    ):
        print(f"joined as node {node}", flush=True)
        schedule = PollSchedule()
        schedule.begin()
        while True:
            asked = time.monotonic()
            found = receive()
            if found is None:
                time.sleep(schedule.pause(time.monotonic() - asked))
                continue
            schedule.end()
            began = time.monotonic()
            head, tree = found
            run, number = head.metadata.run_id, head.metadata.message_id
            ids = [part.object_id for part in iterate_object_tree(tree)]
            contents = pull_objects(ids, partial(pull_object, run))
            confirm(run, number)
            message: Any = inflate_object_from_contents(tree.object_id, contents)
            message.metadata.__dict__["_message_id"] = number
            try:
                answer = call(socket, opened(message), seconds=GUARD_SECONDS)
                reply: Message = Message(wrapped(answer), reply_to=message)
            except Exception as error:  # no guard, or no valid request: leave it unanswered
                print(f"not answered: {type(error).__name__}", file=sys.stderr, flush=True)
                continue
            reply.metadata.__dict__["_message_id"] = reply.object_id
            wanted, session = send(reply, get_object_tree(reply), time.monotonic() - began)
            for name, part in get_all_nested_objects(reply).items():
                if name in wanted:
                    push_object(run, session, name, part.deflate())
            schedule.begin()


def _beat() -> None:
    """Send heartbeats every ten seconds, Flower's minimum, instead of every thirty.

    A node that was killed is not readmitted before it missed two of them.
    """
    from flwr.supercore import heartbeat
    from flwr.supernode import fleet_http_connection

    for module in (heartbeat, fleet_http_connection):
        if hasattr(module, _INTERVAL):
            setattr(module, _INTERVAL, 10)


def _reconnect_soon(address: str) -> None:
    """Look every tenth of a second for a coordinator that is not there.

    Flower waits ever longer between two attempts, up to twenty seconds, though the coordinator may have
    started meanwhile. Where the coordinator's port is open and it fails all the same, Flower's pause stays.
    """
    from flwr.supernode import fleet_http_connection

    name = "make_simple_http_retry_invoker"
    made = getattr(fleet_http_connection, name, None)
    if made is None or hasattr(made, "looks"):
        return

    def looking() -> Any:
        invoker = made()
        if hasattr(invoker, "wait_function"):
            invoker.wait_function = partial(wait_until_open, address)
        return invoker

    looking.looks = True  # type: ignore[attr-defined]
    setattr(fleet_http_connection, name, looking)


def wait_until_open(address: str, seconds: float) -> None:
    """Wait until a connection to HOST:PORT is accepted, ``seconds`` at most; all of them if it is now."""
    host, _, port = address.rpartition(":")
    until = time.monotonic() + seconds
    print(f"no answer from the coordinator at {address}: trying again", file=sys.stderr, flush=True)
    if _is_open(host.strip("[]"), int(port)):
        time.sleep(seconds)
        return
    while time.monotonic() < until:
        time.sleep(min(_LOOK, seconds))
        if _is_open(host.strip("[]"), int(port)):
            return


def _is_open(host: str, port: int) -> bool:
    try:
        socketlib.create_connection((host, port), timeout=_LOOK_SECONDS).close()
    except OSError:
        return False
    return True


class _NotAdmitted(Exception):
    """Flower gives up, with these words."""


def _explain_exits() -> None:
    """Let Flower's client raise where it would end the process, so that the last words are ours."""
    from flwr.supernode import fleet_http_connection

    def give_up(_code: object, message: object = "") -> None:
        raise _NotAdmitted(str(message))

    if hasattr(fleet_http_connection, "flwr_exit"):
        setattr(fleet_http_connection, "flwr_exit", give_up)  # noqa: B010


def explained(error: BaseException, address: str, authority: str, key: str) -> str:
    """Return why a coordinator does not admit this node, and what to do."""
    said = " ".join(str(error).split())
    if "mismatch" in said and "CERTIFICATE" in said:
        host = address.rpartition(":")[0]
        return f"the coordinator's certificate is for another name: its keys must be made with --host {host}"
    if "CERTIFICATE" in said and ("expired" in said or "not yet valid" in said):
        return (
            f"the certificate of the coordinator at {address} has expired (farthing keys --renew coordinator "
            "makes another), or the clock of this machine is wrong"
        )
    if "CERTIFICATE" in said:
        return (
            f"the certificate of the coordinator at {address} is not of the authority in {authority!r}: use "
            "the ca.pem that came with the coordinator's public key"
        )
    if isinstance(error, KeyboardInterrupt):  # Flower's client interrupts itself when it is refused
        return (
            f"the coordinator at {address} refuses this node's signature: its key, {key!r}, must be the one "
            "whose public.toml the coordinator lists under [parties], and the clocks of both machines must "
            "agree to five seconds"
        )
    if "2004" in said:
        return (
            f"the coordinator at {address} does not admit this node: it lists another public.toml under "
            f"[parties] than that of {key!r}, or the node was killed less than twenty seconds ago"
        )
    return f"no connection with the coordinator at {address}: {said or type(error).__name__}"


def _await(path: str) -> None:
    """Wait until the guard listens, if it is about to: a request that finds nobody is sent again later."""
    until = time.monotonic() + _GUARD_STARTS
    while time.monotonic() < until:
        with socketlib.socket(socketlib.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.connect(path)
            return
        time.sleep(0.05)


def apps(address: str, authority: Path, key: Path, socket: str) -> None:
    """Run Flower's own SuperNode, which runs the apps it is sent; it installs nothing for them."""
    from flwr.supernode.cli import flower_supernode

    from farthing.deploy.flower.carrier import GUARD

    sys.argv = ["flower-supernode", "--superlink", address, "--root-certificates", str(authority)]
    sys.argv += ["--auth-supernode-private-key", str(key), "--node-config", f'{GUARD}="{socket}"']
    with socketlib.socket() as probe:  # for the app's processes, on this machine only
        probe.bind(("127.0.0.1", 0))
        sys.argv += ["--port", str(probe.getsockname()[1])]
    flower_supernode()


def main(arguments: list[str]) -> None:
    end_with_parent()
    address, authority, key, socket = arguments[:4]
    if arguments[4:] == ["--apps"]:
        _await(socket)
        apps(address, Path(authority), Path(key), socket)
        return
    while True:
        try:
            attend(address, Path(authority), Path(key), socket)
        except (_NotAdmitted, KeyboardInterrupt) as error:
            print(explained(error, address, authority, key), file=sys.stderr, flush=True)
            sys.exit(1)
        time.sleep(_AFTER_AN_ERROR)


if __name__ == "__main__":
    main(sys.argv[1:])
