"""Carry messages between a coordinator and its parties: signed requests, and the ways that bytes travel.

`SignedExchange` seals a coordinator's requests, and checks signatures before it uses an answer. This module
imports little, so that a node starts quickly.

`Transport` moves opaque bytes between coordinator and guards: it sends each party its request and yields the
answers until the time is up; a party that does not answer is absent. `InProcess` calls functions,
`UnixSockets` connects to guards on this machine, each by `call`.

>>> echo = InProcess({"a": lambda request: request + b"!"})
>>> list(echo.exchange({"a": b"hello"}, seconds=1.0))
[('a', b'hello!')]

A `Bridge` connects a coordinator with another process that carries its messages, over a Unix socket: the
coordinator listens, and a carrier, which can reach the nodes, connects and calls `carry`. So keys, checkpoint
and algorithm stay in the coordinator's own process, and a carrier may die: the next one that connects gets
the requests that are still open. Frames are a line of JSON and raw bytes; no pickle.

An answer is identified by the SHA-256 of the request that it answers, not by the exchange in which the
request was sent: a late answer, which comes after its exchange has ended, is kept until the same request is
sent again. A carrier that is behind skips exchanges that are over, and one that has to wait yields the pause
in seconds: `carry` waits so long, or until the coordinator begins another exchange, which ends this one.
"""

import contextlib
import hashlib
import json
import logging
import os
import queue
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Protocol

from farthing.deploy.messages.signed import (
    LARGEST_HEADER,
    PREFIX,
    Fields,
    MessageKind,
    Opened,
    Reason,
    Refused,
    Signer,
    expected_size,
    message_digest,
    refuse,
    seal,
    unseal,
)
from farthing.errors import InvalidValue


class Transport(Protocol):
    """A way to carry requests to parties, and their answers back."""

    @property
    def parties(self) -> Sequence[str]:
        """Return the names of the parties, in a fixed order."""

    def exchange(self, requests: Mapping[str, bytes], seconds: float) -> Iterable[tuple[str, bytes]]:
        """Yield (party, answer) until all came or the time is up. Never raises for a single party."""


class InProcess:
    """A transport to parties that are functions, called in turn; one that raises is absent."""

    def __init__(self, parties: Mapping[str, Callable[[bytes], bytes]]) -> None:
        self._parties = dict(parties)

    @property
    def parties(self) -> Sequence[str]:
        return list(self._parties)

    def exchange(self, requests: Mapping[str, bytes], seconds: float) -> Iterator[tuple[str, bytes]]:
        for name, request in requests.items():
            with contextlib.suppress(Exception):  # any failure counts as no answer
                yield name, self._parties[name](request)


class UnixSockets:
    """A transport to guards on this machine, by the paths of their sockets; all are asked at once."""

    def __init__(self, sockets: Mapping[str, str | PathLike[str]]) -> None:
        self._sockets = dict(sockets)

    @property
    def parties(self) -> Sequence[str]:
        return list(self._sockets)

    def exchange(self, requests: Mapping[str, bytes], seconds: float) -> Iterator[tuple[str, bytes]]:
        came: queue.SimpleQueue[tuple[str, bytes | None]] = queue.SimpleQueue()
        until = time.monotonic() + seconds

        def ask(name: str, request: bytes) -> None:
            answer = None
            with contextlib.suppress(Exception):
                answer = call(self._sockets[name], request, seconds=seconds)
            came.put((name, answer))

        for name, request in requests.items():
            threading.Thread(target=ask, args=(name, request), daemon=True).start()
        for _ in requests:
            try:
                name, answer = came.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                return
            if answer is not None:
                yield name, answer


log = logging.getLogger("farthing.federated")

Request = tuple[MessageKind, dict[str, Any], bytes]
Check = Callable[[str, Opened], None]


@dataclass(frozen=True, slots=True, eq=False)
class Replies:
    """The replies of one exchange, by party; a party in none of the three did not reply."""

    came: dict[str, Opened] = field(default_factory=dict)
    refused: dict[str, Reason] = field(default_factory=dict)  # by the guard
    # by the coordinator: signed, and against the rules
    broken: dict[str, Reason] = field(default_factory=dict)

    @property
    def heard(self) -> set[str]:
        return {*self.came, *self.refused, *self.broken}


class SignedExchange:
    """Signed requests to enrolled parties, and their verified replies."""

    def __init__(self, transport: Transport, signer: Signer, enrolled: Mapping[str, bytes]) -> None:
        self._transport, self._signer, self._enrolled = transport, signer, enrolled

    def exchange(
        self,
        requests: Mapping[str, Request],
        kind: MessageKind,
        seconds: float,
        check: Check,
        largest: int = 0,
        enough: Callable[[Replies], bool] | None = None,
    ) -> Replies:
        """Return replies of a kind with at most ``largest`` bytes of body; ``check`` raises `Refused`.

        It ends when all have replied, or as soon as ``enough`` says so of the replies. A greeting among the
        requests is replied to by an announcement.

        A reply that the party did not sign for this very request says nothing about the party: anybody could
        have made or replayed it. It is ignored, and the party may still reply.
        """
        sealed = {name: seal(*request, self._signer) for name, request in requests.items()}
        about = {name: message_digest(data) for name, data in sealed.items()}
        mail = Replies()
        for name, data in self._transport.exchange(sealed, seconds):
            if name not in sealed or name in mail.heard:
                continue  # it was not asked, or has replied: duplicates count once
            try:
                opened = unseal(data, {self._enrolled[name]}, LARGEST_HEADER + 256 + largest)
                said = opened.fields()
                if (to := said.take("about")) != about[name]:
                    refuse(Reason.STALE, self._why_another(said, to))
            except Refused as refusal:
                hint = "; its guard.key is not that of its public.toml here"
                log.warning("from %s: %s%s", name, refusal, hint if refusal.reason == Reason.STRANGER else "")
                continue
            greeted = requests[name][0] is MessageKind.HELLO
            wanted = MessageKind.ANNOUNCEMENT if greeted else kind
            self._sort(mail, name, opened, wanted, check)
            if len(mail.heard) == len(sealed) or (enough is not None and enough(mail)):
                break
        return mail

    def _why_another(self, said: Fields, about: object) -> str:
        """Return why a reply is not to our request; a guard reads none of a coordinator it does not know."""
        if about == "" and said.plain().get("reason") == Reason.STRANGER:
            return f"it does not know this coordinator; its policy must list {self._signer.public.hex()}"
        return "the reply is to another request"

    def _sort(self, mail: Replies, name: str, opened: Opened, kind: MessageKind, check: Check) -> None:
        if opened.kind is MessageKind.REFUSAL:
            said = opened.fields().plain()
            text = said.get("reason")
            mail.refused[name] = Reason(text) if text in list(Reason) else Reason.MALFORMED
            log.warning("%s refused: %s: %s", name, mail.refused[name], _printable(said.get("text")))
            return
        try:
            if opened.kind is not kind:
                refuse(Reason.MALFORMED, "the reply has a wrong kind")
            check(name, opened)
            mail.came[name] = opened
        except Refused as refusal:
            log.warning("from %s: %s", name, refusal)
            mail.broken[name] = refusal.reason


def _printable(text: object) -> str:
    """Return what a log may show of a text that somebody else wrote."""
    return "".join(c for c in str(text)[:200] if c.isascii() and c.isprintable())


LARGEST_ANSWER = 2**30


def call(
    path: str | PathLike[str], request: bytes, *, seconds: float, largest: int = LARGEST_ANSWER
) -> bytes:
    """Ask the guard at ``path`` one question. `OSError` where it does not answer in time."""
    until = time.monotonic() + seconds
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as guard:
        guard.settimeout(seconds)
        guard.connect(fspath(path))
        guard.sendall(request)
        prefix = _read(guard, PREFIX.size, until)
        return prefix + _read(guard, expected_size(prefix, largest) - len(prefix), until)


def _read(guard: socket.socket, size: int, until: float) -> bytes:
    parts, missing = [], size
    while missing:
        guard.settimeout(max(1e-3, until - time.monotonic()))
        part = guard.recv(min(missing, 2**20))
        if not part:
            raise ConnectionError("the guard disconnected in the middle of its answer")
        parts.append(part)
        missing -= len(part)
        if missing and time.monotonic() > until:
            raise TimeoutError("the guard took too long")
    return b"".join(parts)


Carry = Callable[[Mapping[int, bytes], float], Iterable[tuple[int, bytes] | float]]

_LARGEST_LINE = 2**20


class Bridge:
    """A transport that reaches each party's node, by number, over the carrier that connected last."""

    def __init__(self, nodes: Mapping[str, int], path: Path | None = None) -> None:
        self.reach(nodes)
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

    def reach(self, nodes: Mapping[str, int]) -> None:
        """Set the number of each party's node, before the first exchange."""
        self._nodes = dict(nodes)
        self._names = {node: name for name, node in nodes.items()}

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
