"""Serve the guard on a Unix socket that only its owner (or one group) can open.

The kernel identifies each peer (SO_PEERCRED): a user who is neither the guard's own nor listed in the policy
is rejected before a byte is read. The size of a message is checked before it is read.

`guard` is the work of ``farthing guard``: it reads the policy and the records, and listens until a signal.
"""

import contextlib
import logging
import os
import signal
import socket
import stat
import struct
import sys
import threading
import time
import zipfile
from pathlib import Path

import numpy as np

from farthing.data import table_files
from farthing.data.tables import Table
from farthing.deploy.guard.answers import Networks
from farthing.deploy.guard.examples import examples_of
from farthing.deploy.guard.keeper import Guard
from farthing.deploy.guard.policy import Policy
from farthing.deploy.messages.signed import PREFIX, Refused, Signer, expected_size
from farthing.errors import InvalidValue
from farthing.noise.lattice import Stream

log = logging.getLogger("farthing.deploy.guard")

_PATIENCE = 30.0  # seconds within which a peer must begin a message, and send the rest of it
_SLOWEST = 2**20  # bytes a second: a large message may take longer
_PAUSE = 0.5  # seconds after which an idle guard notices a signal that arrived just before it began to wait
_MOST_PEERS = 16  # concurrent connections; more wait
_LONGEST_PATH = 100  # bytes: Unix allows 108 for a socket's path, some systems less


class Server:
    """A server that answers (`serve`) until `close` is called, from any thread or signal handler."""

    def __init__(self, guard: Guard) -> None:
        self._guard, self.path = guard, guard.policy.socket
        self._room = threading.BoundedSemaphore(_MOST_PEERS)
        self._closing = threading.Event()
        self._listener = self._listen()

    def _listen(self) -> socket.socket:
        if len(os.fsencode(self.path)) > _LONGEST_PATH:
            raise InvalidValue(
                f"the path of a socket has at most {_LONGEST_PATH} bytes, got {str(self.path)!r}"
            )
        _make_way(self.path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            before = os.umask(0o177)  # never open to others, not even for a moment
            try:
                listener.bind(str(self.path))
            finally:
                os.umask(before)
            if self._guard.policy.group is not None:
                os.chown(self.path, -1, self._guard.policy.group)
                os.chmod(self.path, 0o660)
            listener.listen(_MOST_PEERS)
            listener.settimeout(_PAUSE)
        except OSError as error:
            listener.close()
            raise InvalidValue(f"the socket cannot be opened, {str(self.path)!r}: {error.strerror}") from None
        return listener

    def serve(self) -> None:
        """Answer until `close`."""
        while not self._closing.is_set():
            try:
                peer, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                if self._closing.is_set():
                    return
                raise
            while not self._room.acquire(timeout=_PAUSE):
                if self._closing.is_set():  # peers that hold all places must not keep it from ending
                    peer.close()
                    return
            threading.Thread(target=self._attend, args=(peer,), daemon=True).start()

    def close(self) -> None:
        """Stop listening and remove the socket."""
        if self._closing.is_set():
            return
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # unblocks accept
        self._listener.close()
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    def _attend(self, peer: socket.socket) -> None:
        try:
            with peer:
                peer.settimeout(_PATIENCE)
                if self._may_ask(peer):
                    self._converse(peer)
        except OSError:
            pass  # the peer disconnected or timed out
        finally:
            self._room.release()

    def _converse(self, peer: socket.socket) -> None:
        try:
            while (message := self._read(peer)) is not None:
                peer.sendall(self._guard.answer(message))
        except Refused as refusal:  # the start of the next message is unknown
            peer.sendall(self._guard.refusal(refusal))

    def _may_ask(self, peer: socket.socket) -> bool:
        if not hasattr(socket, "SO_PEERCRED"):
            return True  # the socket's file mode alone decides
        size = struct.calcsize("3i")
        _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        if user in (os.geteuid(), *self._guard.policy.peers):
            return True
        log.warning("refused: user %d is not listed in the policy", user)
        return False

    def _read(self, peer: socket.socket) -> bytes | None:
        """Read one message; None where the peer has disconnected."""
        prefix = _exactly(peer, PREFIX.size)
        if not prefix:
            return None
        size = expected_size(prefix, self._guard.largest)
        rest = _exactly(peer, size - len(prefix))
        return prefix + rest


def _exactly(peer: socket.socket, size: int) -> bytes:
    """Read this many bytes; fewer where the peer disconnects. `TimeoutError` where it takes too long."""
    parts, missing = [], size
    until = time.monotonic() + _PATIENCE + size / _SLOWEST
    try:
        while missing:
            peer.settimeout(max(1e-3, until - time.monotonic()))
            part = peer.recv(min(missing, 2**20))
            if not part:
                break
            parts.append(part)
            missing -= len(part)
    finally:
        peer.settimeout(_PATIENCE)
    return b"".join(parts)


def _make_way(path: Path) -> None:
    """Remove a socket that no process listens on; leave any other file alone."""
    try:
        kind = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise InvalidValue(f"another file exists at the socket's path, {str(path)!r}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            os.unlink(path)
            return
    raise InvalidValue(f"another guard listens at {str(path)!r}")


def records_of(policy: Policy) -> Table:
    """Return the party's records, checked against the policy's features (multinomial: classes).

    The records are checked once, on the party's own machine: afterwards no refusal depends on a record.
    """
    if policy.schema is not None:
        X, y = table_files.read(str(policy.records), table_files.schema_of(policy.schema, None))
    else:
        X, y = _arrays(policy.records)
    if X.ndim != 2 or X.shape[1] != policy.limits.width:
        found = f"{X.shape[1]}: correct width under [limits]" if X.ndim == 2 else "no table"
        raise InvalidValue(f"records must have the {policy.limits.width} features of the policy, got {found}")
    y = np.asarray(y, dtype=np.float64)
    if "multinomial" in policy.limits.losses and not np.isin(y, np.arange(policy.limits.outputs)).all():
        raise InvalidValue(
            f"labels must be the classes 0 to {policy.limits.outputs - 1} of the policy's outputs = "
            f"{policy.limits.outputs}: give outputs the number of classes"
        )
    return Table(X, y)


def _arrays(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as found:
            X, y = np.asarray(found["X"]), np.asarray(found["y"])
    except OSError as error:
        raise InvalidValue(f"records must be an .npz file, {str(path)!r}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, EOFError, zipfile.BadZipFile):
        raise InvalidValue(
            f"records must be an .npz file with arrays X and y, {str(path)!r} is not"
        ) from None
    if y.ndim != 1 or y.dtype.kind not in "biuf" or not np.isfinite(y).all():
        raise InvalidValue("targets must be one finite number a record")
    if X.dtype.kind == "f" and not np.isfinite(X).all():
        raise InvalidValue("features must be finite; replace missing values by a public constant")
    return X, y


def opened(policy: Policy, *, stream: Stream | None = None) -> Guard:
    """Return the guard of a policy, over its records; PyTorch is imported for networks only."""
    signer = Signer.load(policy.key)
    if not policy.models:
        return Guard(policy, records_of(policy), signer, stream=stream)
    networks = Networks(policy, examples_of(policy))
    return Guard(policy, networks.records, signer, answerable=networks, stream=stream)


def guard(path: Path, *, check: bool = False, stream: Stream | None = None) -> str:
    """Listen until SIGTERM or SIGINT; with ``check`` only check policy, records, key and ledger.

    Returns the guard's public key, in hexadecimal.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    keeper = opened(Policy.load(path), stream=stream)
    public = keeper.public.hex()
    try:
        if check:
            return public
        server = Server(keeper)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: server.close())
        print(f"listening {public}", flush=True)
        server.serve()
        return public
    finally:
        keeper.close()
