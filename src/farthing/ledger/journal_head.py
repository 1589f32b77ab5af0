"""The head of a journal, kept in a file beside it: the number and hash of its newest row.

A SQLite file that was cut off or put back to an earlier state is whole in itself; only the head can tell.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import sqlite3
import stat
import struct
from collections.abc import Callable, Iterator

from farthing.errors import LedgerLocked

FAILED = "Nothing is released: see that the files are writable, with room on their disk, and try again"
DAMAGED = "Nothing more is charged or released: keep both files for inquiry, count what is left as spent"

log = logging.getLogger("farthing.ledger.ledger")

_OWNER_ONLY = 0o600
_sync: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)


def locked(path: str | None, error: Exception) -> LedgerLocked:
    """Return the error to raise: SQLite's own DatabaseError is a damaged file, the others are of the disk."""
    return LedgerLocked(
        f"journal {path}: {error}. {DAMAGED if type(error) is sqlite3.DatabaseError else FAILED}"
    )


@contextlib.contextmanager
def failing_closed(path: str | None) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise locked(path, error) from error


def narrow(path: str) -> None:
    """Sees to it that only its owner reads and writes a file, if it is there; whatever the umask was.

    By its name, not by opening it: closing a file of a database lets go of all locks of the process on it.
    """
    with contextlib.suppress(FileNotFoundError):
        mode = stat.S_IMODE(os.stat(path).st_mode)
        if mode & 0o777 & ~_OWNER_ONLY:
            try:
                os.chmod(path, _OWNER_ONLY)
                log.warning("%s could be opened by others (mode %o): it is its owner's now", path, mode)
            except PermissionError:
                log.warning("%s can be opened by others (mode %o), and is not ours to change", path, mode)


def create_private(path: str) -> None:
    """An empty file that only its owner reads and writes; one that is there is narrowed."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, _OWNER_ONLY)
    except FileExistsError:
        narrow(path)
        return
    try:
        os.fchmod(file, _OWNER_ONLY)
    finally:
        os.close(file)


class Head:
    """Number and hash of the newest row, in two slots written in turn: a torn write spares the other one."""

    PAGE = 4096  # each slot starts a page of its own, and is written in place
    SLOT = struct.Struct(">8sQ32s16s")  # magic, seq, hash, checksum

    def __init__(self, path: str, *, create: bool) -> None:
        self.path = path
        if create:
            create_private(path)
        else:
            narrow(path)
        self.file = os.open(path, os.O_RDWR)

    def __enter__(self) -> None:
        with failing_closed(self.path):
            fcntl.flock(self.file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile, which unlocks it too
            fcntl.flock(self.file, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self.file)
        self.file = -1

    def slots(self) -> list[tuple[int, str] | None]:
        """Return what each slot says; None for one never written, torn or damaged."""
        with failing_closed(self.path):
            return [self._parse(os.pread(self.file, self.SLOT.size, place)) for place in (0, self.PAGE)]

    def _parse(self, data: bytes) -> tuple[int, str] | None:
        if len(data) < self.SLOT.size or data != self._seal(data[:-16]):
            return None
        _, seq, digest, _ = self.SLOT.unpack(data)
        return seq, digest.hex()

    @staticmethod
    def _seal(data: bytes) -> bytes:
        return data + hashlib.sha256(b"farthing head" + data).digest()[:16]

    def write(self, seq: int, digest: str) -> None:
        """Overwrite the older slot and wait until it is on disk."""
        first, second = (-1 if slot is None else slot[0] for slot in self.slots())
        data = self._seal(self.SLOT.pack(b"farthing", seq, bytes.fromhex(digest), b"")[:-16])
        with failing_closed(self.path):
            room = 2 * self.PAGE - os.fstat(self.file).st_size
            if room > 0:  # taken before the disk is full
                os.pwrite(self.file, bytes(room), 2 * self.PAGE - room)
            if os.pwrite(self.file, data, 0 if first <= second else self.PAGE) != len(data):
                raise OSError(f"row {seq} is charged, but only part of the head could be written")
            _sync(self.file)
