"""Connect a coordinator with the process that carries its messages: bytes over a Unix socket.

The coordinator listens (`Bridge`, a `Transport`); a carrier, which can reach the nodes, connects and calls
`carry`. So keys, checkpoint and algorithm stay in the coordinator's own process, and a carrier may die: the
next one that connects gets the requests that are still open. Frames are a line of JSON and raw bytes; no
pickle.

An answer is identified by the SHA-256 of the request that it answers, not by the exchange in which the
request was sent: a late answer, which comes after its exchange has ended, is kept until the same request is
sent again. A carrier that is behind skips exchanges that are over, and one that has to wait yields the pause
in seconds: `carry` waits so long, or until the coordinator begins another exchange, which ends this one.
"""

import contextlib
import hashlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from farthing.deploy.messages.sockets import LARGEST_ANSWER
from farthing.errors import InvalidValue

Carry = Callable[[Mapping[int, bytes], float], Iterable[tuple[int, bytes] | float]]

_LARGEST_LINE = 2**20


class Bridge:
    """A transport that reaches each party's node, by number, over the carrier that connected last."""

    def __init__(self, nodes: Mapping[str, int], path: Path | None = None) -> None:
        self._nodes = dict(nodes)
        self._names = {node: name for name, node in nodes.items()}
        self._folder = tempfile.TemporaryDirectory(prefix="farthing-")  # readable by its owner only
        # short, because paths of sockets are limited
        self.path = Path(self._folder.name) / "bridge" if path is None else path
        self._listener = self._listening()
        self._changed = threading.Condition()
        self._carrier: Connection | None = None
        self._number, self._closed = 0, False
        self._open: dict[int, str] = {}  # the digest of each node's unanswered request
        self._late: dict[int, bytes] = {}  # answers that came after their exchange had ended
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _listening(self) -> Listener:
        """Return the listener on a socket that only its owner opens; an old socket is replaced."""
        before = os.umask(0o177)
        try:
            if self.path.is_socket():
                self.path.unlink()
            return Listener(str(self.path), "AF_UNIX")
        except OSError as error:
            self._folder.cleanup()
            raise InvalidValue(f"the bridge cannot be opened, {str(self.path)!r}: {error.strerror}") from None
        finally:
            os.umask(before)

    @property
    def parties(self) -> Sequence[str]:
        return list(self._nodes)

    @property
    def connected(self) -> bool:
        """Return whether a carrier is connected, as far as is known."""
        with self._changed:
            return self._carrier is not None

    def exchange(self, requests: Mapping[str, bytes], seconds: float) -> Iterator[tuple[str, bytes]]:
        until = time.monotonic() + seconds
        left = {self._nodes[name]: request for name, request in requests.items()}
        for node, request in list(left.items()):
            if self._open.get(node) != (asked := _digest(request)):
                self._open[node] = asked
                self._late.pop(node, None)
            elif node in self._late:
                del left[node], self._open[node]
                yield self._names[node], self._late.pop(node)
        while left and (carrier := self._there(until)) is not None:
            try:
                yield from self._carried(carrier, left, until)
                return
            except (OSError, EOFError, ValueError):
                self._lost(carrier)

    def _carried(
        self, carrier: Connection, left: dict[int, bytes], until: float
    ) -> Iterator[tuple[str, bytes]]:
        """Run one exchange with one carrier; remove answered requests from ``left``."""
        self._number += 1
        header = {"number": self._number, "seconds": max(0.0, until - time.monotonic())}
        sizes = [[node, len(request)] for node, request in left.items()]
        carrier.send_bytes(_packed(header | {"sizes": sizes}, *left.values()))
        while left and carrier.poll(max(0.0, until - time.monotonic())):
            said, body = _unpacked(carrier.recv_bytes(LARGEST_ANSWER))
            node = said.get("node")
            if node is None:
                if said.get("number") == self._number:
                    return  # the carrier has sent all answers
            elif node not in self._open or said.get("request") != self._open[node]:
                continue  # it answers a request that is no longer open
            elif node in left:
                del left[node], self._open[node]
                yield self._names[node], body
            else:
                self._late[node] = body

    def close(self) -> None:
        """Stop listening; a connected carrier notices."""
        self._closed = True
        with contextlib.suppress(OSError):  # unblocks accept
            Client(str(self.path), "AF_UNIX").close()
        self._thread.join()
        self._listener.close()
        with self._changed:
            if self._carrier is not None:
                self._carrier.close()
                self._carrier = None
        self._folder.cleanup()

    def _accept(self) -> None:
        while not self._closed:
            try:
                arrived = self._listener.accept()
            except OSError:
                return
            with self._changed:
                before, self._carrier = self._carrier, arrived
                if before is not None:
                    before.close()
                self._changed.notify_all()

    def _there(self, until: float) -> Connection | None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._carrier is not None, timeout=max(0.0, until - time.monotonic())
            )
            return self._carrier if time.monotonic() < until else None

    def _lost(self, carrier: Connection) -> None:
        with self._changed:
            if self._carrier is carrier:
                self._carrier = None
            carrier.close()


def carry(path: str | os.PathLike[str], exchange: Carry) -> None:
    """Serve the coordinator's exchanges as its carrier until the coordinator disconnects."""
    with Client(os.fspath(path), "AF_UNIX") as coordinator, contextlib.suppress(EOFError, OSError):
        while True:
            asked, bodies = _unpacked(coordinator.recv_bytes())
            while coordinator.poll():  # earlier exchanges are over: skip them
                asked, bodies = _unpacked(coordinator.recv_bytes())
            requests, place = {}, 0
            for node, size in asked["sizes"]:
                requests[node] = bodies[place : place + size]
                place += size
            number = asked["number"]
            for came in exchange(requests, asked["seconds"]):
                if not isinstance(came, tuple):
                    if coordinator.poll(came):  # this exchange is over, or the coordinator is gone
                        break
                    continue
                node, answer = came
                about = {"number": number, "node": node, "request": _digest(requests.get(node, b""))}
                coordinator.send_bytes(_packed(about, answer))
            coordinator.send_bytes(_packed({"number": number}))


def _digest(request: bytes) -> str:
    return hashlib.sha256(request).hexdigest()


def _packed(header: dict[str, Any], *bodies: bytes) -> bytes:
    return b"".join([json.dumps(header).encode("ascii"), b"\n", *bodies])


def _unpacked(frame: bytes) -> tuple[dict[str, Any], bytes]:
    line, _, body = frame.partition(b"\n")
    if len(line) > _LARGEST_LINE:
        raise ValueError("a line is too long")
    header = json.loads(line)
    if not isinstance(header, dict):
        raise ValueError("a frame must begin with a JSON object")
    return header, body
