"""Keep the head of a journal in a file beside it: the number and hash of its newest row.

A SQLite file that was truncated or restored to an earlier state is consistent in itself; only the head
detects it.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import sqlite3
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from farthing.errors import InvalidValue, LedgerLocked

FAILED = "Nothing is released. Make sure that the files are writable and the disk has room, then try again"
DAMAGED = "The ledger is locked: nothing is charged or released. Keep both files, and count the rest as spent"

log = logging.getLogger("farthing.ledger.ledger")

_OWNER_ONLY = 0o600


def to_disk(file: int) -> None:
    """Wait until an open file is on its disk; on macOS, fsync would leave it in the cache of the drive."""
    if hasattr(fcntl, "F_FULLFSYNC"):
        with contextlib.suppress(OSError):  # some file systems do not have it
            fcntl.fcntl(file, fcntl.F_FULLFSYNC)
            return
    getattr(os, "fdatasync", os.fsync)(file)


def locked(path: str | None, error: Exception) -> LedgerLocked:
    """Return the error to raise: a plain DatabaseError is a damaged file, its subclasses are of the disk."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    return LedgerLocked(
        f"journal {path}: {reason}. {DAMAGED if type(error) is sqlite3.DatabaseError else FAILED}"
    )


@contextlib.contextmanager
def failing_closed(path: str | None) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise locked(path, error) from error


def place_of(path: str | os.PathLike[str]) -> str:
    """Return the place of a journal, links followed."""
    try:
        return os.path.realpath(os.fsdecode(path))
    except (TypeError, ValueError):
        raise InvalidValue(f"path must be the name of a file, got {path!r}") from None


def never_begun(place: str) -> bool:
    """Return whether files lie here in which no row and no head was ever written."""
    try:
        return not _written(place + ".head") and not _tables(place)
    except (OSError, sqlite3.Error):  # whatever it is, it is there
        return False


def foreign(place: str) -> bool:
    """Return whether a folder, or a file of another kind, lies where a journal should; it is not touched."""
    try:
        if not os.path.isfile(place):
            return os.path.exists(place)
        tables = set() if _written(place + ".head") else _tables(place)
        return bool(tables) and "chain" not in tables
    except (OSError, sqlite3.OperationalError):  # of the disk: opening it will tell
        return False
    except sqlite3.DatabaseError:  # no database
        return True


def _written(head: str) -> bool:
    return os.path.exists(head) and any(Path(head).read_bytes())


def _tables(place: str) -> set[str]:
    """Return the names of a database's tables; none of a file that is empty or not there."""
    if not os.path.exists(place) or os.path.getsize(place) == 0:
        return set()
    with contextlib.closing(sqlite3.connect(f"{Path(place).as_uri()}?mode=rw", uri=True)) as database:
        return {name for (name,) in database.execute("SELECT name FROM sqlite_master")}


def narrow(path: str) -> None:
    """Restrict an existing file to its owner, for any umask.

    It is addressed by name: opening and closing a file of a database would release all locks of the process
    on it.
    """
    with contextlib.suppress(FileNotFoundError):
        found = os.stat(path).st_mode
        mode = stat.S_IMODE(found)
        if stat.S_ISREG(found) and mode & 0o777 & ~_OWNER_ONLY:
            try:
                os.chmod(path, _OWNER_ONLY)
                log.warning("%s could be opened by others (mode %o): now restricted to its owner", path, mode)
            except OSError:  # it is another account's, or on a file system that cannot be written
                log.warning("%s can be opened by others (mode %o), and that cannot be changed", path, mode)


def create_private(path: str) -> None:
    """Create an empty file that only its owner can read and write; an existing one is restricted."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, _OWNER_ONLY)
    except FileExistsError:
        narrow(path)
        return
    try:
        os.fchmod(file, _OWNER_ONLY)
    finally:
        os.close(file)


def restrict(path: str | None, *, create: bool) -> None:
    """Restrict the files of a journal to their owner; SQLite gives a log the mode of its database."""
    if path is not None:
        (create_private if create else narrow)(path)
        for suffix in ("-wal", "-shm"):
            narrow(path + suffix)


def identity(path: str | None) -> list[tuple[int, int]]:
    """Return what tells the files of a journal from others of their names; nothing for one in memory.

    A file with a second name (a hard link) is refused: SQLite keeps a log for each name, so rows that are
    written under one name would be missing under the other.
    """
    found = [os.stat(path + suffix) for suffix in ("", ".head")] if path is not None else []
    if any(file.st_nlink > 1 for file in found):
        raise LedgerLocked(
            f"journal {path}: it has another name, a hard link, under which its budget could be spent again. "
            "Nothing is released. Delete the other name"
        )
    return [(file.st_dev, file.st_ino) for file in found]


class Head:
    """The number and hash of the newest row, in two slots written in turn: a torn write spares the other."""

    PAGE = 4096  # each slot has its own page and is written in place
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
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile, which also unlocks
            fcntl.flock(self.file, fcntl.LOCK_UN)

    def slots(self) -> list[tuple[int, str] | None]:
        """Return the content of each slot; None for one never written, torn or damaged."""
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
            if room > 0:  # allocate now, in case the disk fills up later
                os.pwrite(self.file, bytes(room), 2 * self.PAGE - room)
            if os.pwrite(self.file, data, 0 if first <= second else self.PAGE) != len(data):
                raise OSError(f"row {seq} is charged, but only part of the head could be written")
            to_disk(self.file)
