"""Ask a guard on this machine over its Unix socket; importing little lets a node start quickly."""

import socket
import time
from os import PathLike, fspath

from farthing.deploy.messages.signed import PREFIX, expected_size

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
