"""Record charges durably: append only, hash-chained, shared safely between processes.

Each row carries the hash of the row before, so a changed, missing or reordered row is detected. The number
and hash of the newest row are also kept in ``<path>.head``, so a truncated or restored SQLite file is
detected too: LedgerLocked is raised and nothing is released. (Restoring an older pair of *both* files is not
detected.) A row is on disk before :meth:`Journal.append` returns. Use a local disk: locks on network file
systems are not reliable.

>>> journal = Journal(None, {"epsilon": 1.0})
>>> row = journal.append("charge", lambda last: ({"cost": 0.25}, [sum(last.state) + 0.25]))
>>> row.seq, row.kind, row.state, row.previous == next(journal.rows()).hash
(1, 'charge', [0.25], True)
"""

import contextlib
import fcntl
import json
import os
import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self, TextIO

from farthing.errors import InvalidValue, LedgerLocked, NotReleased, Unsupported
from farthing.ledger.journal_head import (
    DAMAGED,
    FAILED,
    Head,
    failing_closed,
    foreign,
    identity,
    locked,
    never_begun,
    place_of,
    restrict,
)
from farthing.ledger.journal_rows import (
    BEFORE,
    Record,
    Row,
    canonical,
    digest_of,
    record_of,
    row_of,
    sha256_of,
)

KINDS = ("promise", "charge", "refund", "release", "close", "note")  # row 0 has kind "open"

_BUSY_SECONDS = 60.0
_PAGE = 1000  # rows read at a time
_SCHEMA = (
    "CREATE TABLE chain(seq INTEGER PRIMARY KEY, time TEXT, kind TEXT, body TEXT, state TEXT, previous TEXT,"
    " hash TEXT)",
    "CREATE TABLE answers(key TEXT PRIMARY KEY, request TEXT, seq INTEGER, released INTEGER, value BLOB)",
)
_FROM = "SELECT seq, time, kind, body, state, previous, hash FROM chain WHERE seq >= ? ORDER BY seq"
_ROW = _FROM.replace(">=", "=")
_ANSWERS = "SELECT key, seq, request, released, sha256(value) FROM answers"
_COPIED = "a copy would spend the same budget again, so give the ledger a file (journal='my.ledger')"


class Journal:
    """An append-only record in a SQLite file, or in memory when ``path`` is None.

    ``header`` becomes row 0 of a new journal and must equal that of an existing one; None accepts any.
    A copy is the same journal and a pickle holds only the path, so that no copy has its own balance.
    """

    def __init__(self, path: str | os.PathLike[str] | None, header: dict[str, Any] | None = None) -> None:
        self.path = None if path is None else place_of(path)
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._head: Head | None = None
        self._last = BEFORE  # the newest row that was checked
        self._notes, self._searched = list[str](), 0  # of rows below this number
        self._verified = self._closed = False
        self._pid = os.getpid()
        if self.path is None:
            header = header or {}
        elif not os.path.isdir(os.path.dirname(self.path)):
            raise InvalidValue(f"the journal must be in an existing folder, got {self.path!r}")
        elif foreign(self.path):
            raise InvalidValue(f"{self.path!r} is another kind of file: give a journal or a new file")
        elif header is None and not self.exists(self.path):
            raise InvalidValue(f"there is no journal at {self.path!r}; pass a header to create one")
        first = None if header is None else record_of(BEFORE, "open", header, [])
        with _forking:
            _alive.add(self)
        with self._lock:
            self._connect(first)
            self._first: Record = self._fetch(_ROW, 0)[0]
        if first is not None and (here := row_of(first).body) != (there := self.header):
            self.close()
            pairs = {k: (here.get(k, "absent"), there.get(k, "absent")) for k in here | there}
            text = ", ".join(f"{k} is {a!r} here and {b!r} there" for k, (a, b) in pairs.items() if a != b)
            raise InvalidValue(f"{self.path} was created differently: {text}. Open it with the same values")

    @staticmethod
    def exists(path: str | os.PathLike[str]) -> bool:
        """Return whether a journal, or the head of a missing one, is at this path.

        Empty files of a journal whose creation failed (a full disk) do not count.
        """
        place = place_of(path)
        found = any(os.path.exists(place + suffix) for suffix in ("", ".head"))
        return found and not never_begun(place)

    @property
    def header(self) -> dict[str, Any]:
        """The body of row 0."""
        return row_of(self._first).body

    # --- writing

    def append(
        self,
        kind: str,
        decide: Callable[[Row], tuple[dict[str, Any], Sequence[float]]],
        *,
        key: str | None = None,
        request: str | None = None,
    ) -> Row:
        """Write one row durably: ``decide(last)`` returns its body and the totals after it, or raises.

        It runs inside the transaction, so ``last`` includes the rows of other processes; if it raises,
        nothing is written. A ``key`` is charged only once, for one ``request`` (a hash of the query and its
        parameters): a second charge raises the error of :meth:`find_answer`, or InvalidValue if that returns
        an answer.
        """
        if kind not in KINDS:
            raise InvalidValue(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
        if (key is None) != (request is None):
            raise InvalidValue(f"key and request must be given together, got {key!r} and {request!r}")

        def fill(last: Record) -> Record:
            if key is not None and request is not None and self.find_answer(key, request) is not None:
                raise InvalidValue(f"key {key!r} was answered before: read it with find_answer")
            body, state = decide(row_of(last))
            if "answer" in body:
                raise InvalidValue(f"body must leave the name 'answer' to keyed rows, got {body!r}")
            if key is None:
                return self._insert(record_of(last, kind, body, state))
            record = record_of(last, kind, {**body, "answer": {"key": key, "request": request}}, state)
            self._fetch("INSERT INTO answers VALUES (?, ?, ?, NULL, NULL)", key, request, record[0])
            return self._insert(record)

        return self._write(fill)

    def store_answer(self, key: str, value: bytes) -> Row:
        """Store the answer of a charged key durably, with its hash in a row of kind "release"."""
        if not isinstance(value, bytes):
            raise InvalidValue(f"value must be bytes, got {type(value).__name__}")

        def fill(last: Record) -> Record:
            found = self._fetch("SELECT request FROM answers WHERE key = ? AND released IS NULL", key)
            if not found:
                raise InvalidValue(f"key must be charged and not yet answered, got {key!r}")
            answer = {"key": key, "request": found[0][0], "sha256": sha256_of(value)}
            record = record_of(last, "release", {"answer": answer}, json.loads(last[4]))
            self._fetch("UPDATE answers SET released = ?, value = ? WHERE key = ?", record[0], value, key)
            return self._insert(record)

        return self._write(fill)

    def _insert(self, record: Record) -> Record:
        self._fetch("INSERT INTO chain VALUES (?, ?, ?, ?, ?, ?, ?)", *record)
        return record

    def _write(self, fill: Callable[[Record], Record]) -> Row:
        with self._lock:
            connection = self._connect()
            if connection.in_transaction:
                raise InvalidValue("decide must not write to the journal that it decides for")
            try:
                with self._head or contextlib.nullcontext():
                    try:
                        self._fetch("BEGIN IMMEDIATE")
                        last = self._catch_up()
                        self._check_head(self._head.slots() if self._head is not None else [], last)
                        record = fill(last)
                        self._fetch("COMMIT")
                    except BaseException:
                        with contextlib.suppress(sqlite3.Error):
                            connection.rollback()
                        raise
                    self._last = record
                    if self._head is not None:
                        self._head.write(record[0], record[6])
            except BaseException as error:
                if self._head is not None:
                    self._head.__exit__()  # Ctrl-C may come before `with` has freed it for other processes
                if isinstance(error, LedgerLocked):
                    self._disconnect(verified=False)
                raise
        return row_of(record)

    # --- reading

    def rows(self, start: int = 0) -> Iterator[Row]:
        """Return the rows from number ``start`` on, each checked against its hash."""
        page: list[Record] | None = None
        while page is None or len(page) == _PAGE:
            with self._lock:
                self._connect()
                page = self._fetch(f"{_FROM} LIMIT {_PAGE}", start)
            yield from map(self._check, page)
            start = page[-1][0] + 1 if page else start

    def notes(self) -> list[str]:
        """Return the texts of all rows of kind "note", each of which is read once."""
        with self._lock:
            for row in self.rows(self._searched):
                self._searched = row.seq + 1
                if row.kind == "note" and "note" in row.body:
                    self._notes.append(row.body["note"])
            return [*self._notes]

    def last(self) -> Row:
        """Return the newest row of any process."""
        with self._lock:
            self._connect()
            return row_of(self._catch_up())

    def find_answer(self, key: str, request: str) -> bytes | None:
        """Return the answer stored under ``key``; None if the key was never charged.

        Raises InvalidValue if the key was charged for another request, NotReleased if its answer was never
        stored.
        """
        with self._lock:
            self._connect()
            found = self._fetch("SELECT request, seq, released, value FROM answers WHERE key = ?", key)
            if not found:
                return None
            asked, seq, released, value = found[0]
            if asked != request:
                raise InvalidValue(f"key {key!r} was charged for another request (row {seq}): use another")
            if released is None:
                text = f"key {key!r} was charged in row {seq} and its answer never stored"
                raise NotReleased(f"{text}: use a new key, as no second answer is drawn")
            answer = {"key": key, "request": request, "sha256": sha256_of(value)}
            if answer not in [self._check(row).body.get("answer") for row in self._fetch(_ROW, released)]:
                raise self._damaged(f"the answer stored under key {key!r} is not the one that was released")
            return bytes(value)

    def verify(self) -> Row:
        """Check the whole chain, the head and the stored answers; raise LedgerLocked if anything differs."""
        with self._lock:
            self._verified = False
            self._connect()
            return row_of(self._last)

    def export(self, file: TextIO) -> None:
        """Write each row as one line of JSON."""
        for row in self.rows():
            file.write(canonical(asdict(row)) + "\n")

    def _fetch(self, sql: str, *values: object) -> list[Any]:
        if self._connection is None:
            raise LedgerLocked(f"journal {self.path}: closed or forked while deciding. Nothing is released")
        try:
            return self._connection.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise locked(self.path, error) from error

    # --- checking

    def _damaged(self, what: str) -> LedgerLocked:
        self._verified = False  # locked until the whole chain is verified
        return LedgerLocked(f"journal {self.path}: {what}. {DAMAGED}")

    def _check(self, record: Record, before: Record | None = None) -> Row:
        """Return the row if its hash is right and it follows ``before`` (if given), or raise."""
        try:
            row = row_of(record) if digest_of(*record[:6]) == record[6] else None
        except (TypeError, ValueError):
            row = None
        if row is None:
            raise self._damaged(f"row {record[0]} was changed: its content does not match its hash")
        if before is not None and (row.seq != before[0] + 1 or row.previous != before[6]):
            raise self._damaged(f"row {row.seq} does not follow row {before[0]}: rows are missing")
        return row

    def _catch_up(self) -> Record:
        """Return the newest row after checking the rows that other processes added since the last call."""
        seen, *new = self._fetch(_FROM, self._last[0]) or [None]
        if seen != self._last:
            raise self._damaged(f"row {self._last[0]}, seen before, is missing or changed")
        for record in new:
            self._check(record, self._last)
            self._last = record
        return self._last

    def _check_head(self, slots: list[tuple[int, str] | None], last: Record) -> None:
        if self._head is not None and last[0] > 0 and not any(slots):
            raise self._damaged(f"its head {self._head.path} is missing or damaged")
        for slot in filter(None, slots):
            if slot != (last[0], last[6]) and slot not in [(r[0], r[6]) for r in self._fetch(_ROW, slot[0])]:
                raise self._damaged(f"it ends at row {last[0]}, without the row {slot[0]} of its head")

    def _check_all(self, connection: sqlite3.Connection) -> None:
        slots = self._head.slots() if self._head is not None else []  # read first: only rows may be ahead
        before = BEFORE
        answers: dict[str, tuple[object, ...]] = {}
        nested = connection.in_transaction
        if not nested:
            connection.execute("BEGIN")  # one snapshot of both tables
        for record in connection.execute(_FROM, (-(2**63),)):
            row = self._check(record, before)
            answer = row.body.get("answer") if row.kind != "open" else None
            if record[0] == self._last[0] and record != self._last:
                raise self._damaged(f"row {record[0]}, seen before, was replaced")
            if answer and "sha256" not in answer:
                answers[answer["key"]] = (record[0], answer["request"], None, None)
            elif answer:
                answers[answer["key"]] = (*answers.get(answer["key"], ())[:2], record[0], answer["sha256"])
            before = record
        if before[0] < max(self._last[0], 0):
            raise self._damaged(f"it ends at row {before[0]}, rows seen before are missing")
        self._check_head(slots, before)
        if {row[0]: row[1:] for row in connection.execute(_ANSWERS)} != answers:
            raise self._damaged("the stored answers do not match the hash chain")
        if not nested:
            connection.rollback()
        self._last, self._verified = before, True

    # --- files

    def _connect(self, first: Record | None = None) -> sqlite3.Connection:
        """Return a verified connection, reopened after a fork, a failure or a change of files."""
        if self._closed:
            raise InvalidValue("this journal is closed: open it again by its path")
        if self.path is None and self._pid != os.getpid():
            raise Unsupported(f"this journal in memory belongs to another process: {_COPIED}")
        try:
            with failing_closed(self.path):
                if self._pid != os.getpid():
                    self._leave()
                if self._connection is not None and self._files != identity(self.path):
                    self._disconnect(verified=False)
                connection = self._connection or self._open(first)
                if not self._verified:
                    self._check_all(connection)
        except BaseException:
            self._disconnect(verified=False)
            raise
        return connection

    def _open(self, first: Record | None) -> sqlite3.Connection:
        place = ":memory:"
        if self.path is not None:
            self._head = Head(self.path + ".head", create=first is not None)
            place = f"{Path(self.path).as_uri()}?mode={'rw' if first is None else 'rwc'}"
        with self._head or contextlib.nullcontext():
            restrict(self.path, create=first is not None)
            self._files = identity(self.path)
            connection = sqlite3.connect(
                place, uri=True, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._connection = connection
            connection.create_function("sha256", 1, sha256_of, deterministic=True)
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
            seen = self._head is not None and any(self._head.slots())
            if not tables and (first is None or seen):
                raise self._damaged("it is empty")
            mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            if self.path is not None and mode != "wal":
                raise LedgerLocked(f"journal {self.path}: its disk has no write-ahead log. {FAILED}")
            connection.execute("PRAGMA synchronous = FULL")
            for flush in ("fullfsync", "checkpoint_fullfsync"):  # on macOS: past the cache of the drive
                connection.execute(f"PRAGMA {flush} = ON")
            if not tables and first is not None:
                self._create(first)
        return connection

    def _create(self, first: Record) -> None:
        for statement in ("BEGIN IMMEDIATE", *_SCHEMA):
            self._fetch(statement)
        self._insert(first)
        self._fetch("COMMIT")
        if self._head is not None:
            self._head.write(first[0], first[6])
            directory = os.open(os.path.dirname(self._head.path), os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    def _disconnect(self, *, verified: bool) -> None:
        """Close the files; the next use opens them again, and reads every row unless ``verified``."""
        self._verified = self._verified and verified
        if self.path is None and self._connection is not None and not self._closed:
            self._connection.rollback()
            return  # a journal in memory is kept
        connection, self._connection = self._connection, None
        head, self._head = self._head, None
        try:
            if head is not None and self._pid == os.getpid():
                with contextlib.suppress(OSError):  # do not wait: its holder may wait for this process
                    fcntl.flock(head.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if connection is not None:
                connection.close()
        finally:
            if head is not None:  # without a call of Python code, before which Ctrl-C could come
                file, head.file = head.file, -1
                os.close(file)

    def _leave(self) -> None:
        """Close the files of the parent, which a fork that ran no hook before it leaves open."""
        if self._connection is not None and self._connection.in_transaction:
            _lost.append(self._connection)  # closed, it would roll back the row that the parent writes
            self._connection, self._closed = None, True
            raise LedgerLocked(f"journal {self.path}: forked while another thread wrote. Nothing is released")
        if self._connection is not None:
            self._disconnect(verified=False)
        self._pid = os.getpid()

    def close(self) -> None:
        """Close the files; any later use raises."""
        with self._lock:
            self._closed = True
            self._disconnect(verified=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # incomplete object, or interpreter shutdown
            self.close()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[type[Self], tuple[str]]:
        if self.path is None:
            raise Unsupported(f"a journal in memory cannot be pickled: {_COPIED}")
        return type(self), (self.path,)


# A SQLite connection must not cross a fork: the child would have it without its locks, and the parent's close
# would delete the write-ahead log that the child writes to. So all files are closed before a fork. If Ctrl-C
# ends this halfway, the fork goes on, and only what was locked is released.
_alive: weakref.WeakSet[Journal] = weakref.WeakSet()
_held: list[Journal] = []
_lost: list[sqlite3.Connection] = []
_forking = threading.RLock()


def _before_fork() -> None:
    _forking.acquire()
    for journal in list(_alive):
        _held.append(journal)
        journal._lock.acquire()
        journal._disconnect(verified=True)


def _after_fork() -> None:
    while _held:
        with contextlib.suppress(RuntimeError):
            _held.pop()._lock.release()
    with contextlib.suppress(RuntimeError):
        _forking.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
