"""How requests reach guards and answers come back: opaque bytes, whatever carries them.

A `Transport` sends each party its request and yields what comes back until the time is up; who does not
answer is absent. `InProcess` calls functions, `UnixSockets` connects to guards on this machine.

>>> echo = InProcess({"a": lambda request: request + b"!"})
>>> list(echo.exchange({"a": b"hello"}, seconds=1.0))
[('a', b'hello!')]
"""

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike, fspath
from typing import Protocol

from farthing.deploy.messages.signed import PREFIX, expected_size

LARGEST_ANSWER = 2**30


class Transport(Protocol):
    """Carries requests to parties, and their answers back."""

    @property
    def parties(self) -> Sequence[str]:
        """Their names, in a fixed order."""

    def exchange(self, requests: Mapping[str, bytes], seconds: float) -> Iterable[tuple[str, bytes]]:
        """(party, answer) as they come, until all came or the time is up. Never raises for a single party."""


class InProcess:
    """Parties as functions from bytes to bytes, asked one after the other; one that raises is absent."""

    def __init__(self, parties: Mapping[str, Callable[[bytes], bytes]]) -> None:
        self._parties = dict(parties)

    @property
    def parties(self) -> Sequence[str]:
        return list(self._parties)

    def exchange(self, requests: Mapping[str, bytes], seconds: float) -> Iterator[tuple[str, bytes]]:
        for name, request in requests.items():
            with contextlib.suppress(Exception):  # whatever happened to it, it did not answer
                yield name, self._parties[name](request)


class UnixSockets:
    """Guards on this machine, by the paths of their sockets; asked at the same time."""

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


def call(
    path: str | PathLike[str], request: bytes, *, seconds: float, largest: int = LARGEST_ANSWER
) -> bytes:
    """One question to the guard at ``path``. `OSError` where it does not answer in time."""
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
            raise ConnectionError("the guard ended before its answer did")
        parts.append(part)
        missing -= len(part)
        if missing and time.monotonic() > until:
            raise TimeoutError("the guard took too long")
    return b"".join(parts)
