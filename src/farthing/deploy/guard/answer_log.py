"""Log released answers: one line an answer, written and flushed before the answer is sent.

Each line names the key, the row of the ledger that charged it and the SHA-256 of the answer, and carries the
hash of the line before it. Together with the ledger it lets anybody check that no answer went out without a
charge. It also serves as a copy of the journal's head: a ledger that lacks a row named in the log was rolled
back to an earlier state, and locks.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from farthing.errors import InvalidValue, LedgerLocked
from farthing.ledger.journal_head import create_private, failing_closed

_FIRST = "0" * 64
_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


class AnswerLog:
    """An append-only log of released answers, held by one process at a time."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        if not Path(self.path).parent.is_dir():
            raise InvalidValue(f"answers must be logged in an existing directory, got {self.path!r}")
        with failing_closed(self.path):
            create_private(self.path)
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise InvalidValue(f"another guard is at work on {self.path!r}") from None
        self._rows: dict[str, tuple[int, str, str]] = {}  # key -> row, its hash, SHA-256 of the answer
        self._last = _FIRST
        try:
            with failing_closed(self.path):
                self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        content = os.pread(self._file, os.fstat(self._file).st_size, 0)
        if not content:  # the file may be new: its name must be on disk before any line is
            folder = os.open(Path(self.path).parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        whole = content.rpartition(b"\n")[0]
        self._size = len(whole) + 1 if whole else 0
        if self._size < len(content):  # torn by a crash, so its answer was never sent
            os.ftruncate(self._file, self._size)
        for number, line in enumerate(whole.splitlines()):
            try:
                entry = json.loads(line)
                key, row = entry["key"], (int(entry["row"]), str(entry["hash"]), str(entry["answer"]))
                follows = entry["previous"] == self._last
            except (ValueError, LookupError, TypeError):
                follows = False
            if not follows:
                raise LedgerLocked(f"log {self.path}: line {number + 1} was changed, or lines are missing")
            self._rows[key], self._last = row, hashlib.sha256(line).hexdigest()

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def check(self, hashes: Sequence[str], ledger: object) -> None:
        """Raise `LedgerLocked` unless the ledger with these rows holds every row that charged an answer."""
        for seq, held, _ in self._rows.values():
            if not (seq < len(hashes) and hashes[seq] == held):
                raise LedgerLocked(
                    f"journal {ledger}: it lacks row {seq}, which charged an answer in {self.path}: it was "
                    "rolled back to an earlier state. Nothing more is charged or released"
                )

    def append(self, key: str, seq: int, digest: str, answer: str) -> None:
        """Append one line, on disk when this returns; a line already there is not repeated."""
        if key in self._rows:
            if self._rows[key] != (seq, digest, answer):
                raise LedgerLocked(f"log {self.path}: another answer was logged under {key!r}")
            return
        entry: dict[str, Any] = {"key": key, "row": seq, "hash": digest, "answer": answer}
        line = _encode(entry | {"previous": self._last}).encode("ascii") + b"\n"
        with failing_closed(self.path):
            try:
                if os.write(self._file, line) != len(line):
                    raise OSError("only part of a line could be written")
                os.fsync(self._file)
            except OSError:
                os.ftruncate(self._file, self._size)
                raise
        self._rows[key], self._last = (seq, digest, answer), hashlib.sha256(line[:-1]).hexdigest()
        self._size += len(line)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
