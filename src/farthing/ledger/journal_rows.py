"""Write the rows of a journal as text, each with the hash of the row before.

>>> row = row_of(record_of(BEFORE, "open", {"epsilon": 1.0}, []))
>>> row.seq, row.body, row.previous == "0" * 64
(0, {'epsilon': 1.0}, True)
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeAlias

from farthing.errors import InvalidValue

canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode

Record: TypeAlias = tuple[int, str, str, str, str, str, str]  # a Row as stored: body and state are JSON text
BEFORE: Record = (-1, "", "", "", "", "", "0" * 64)  # the predecessor of row 0


@dataclass(frozen=True, slots=True)
class Row:
    """A row; ``hash`` is the SHA-256 of [previous, seq, time, kind, body, state] as canonical JSON."""

    seq: int
    time: str
    kind: str
    body: dict[str, Any]
    state: list[float]
    previous: str
    hash: str


def row_of(record: Record) -> Row:
    """Return a stored row with its texts read."""
    seq, time, kind, body, state, previous, digest = record
    return Row(seq, time, kind, json.loads(body), json.loads(state), previous, digest)


def digest_of(seq: int, time: str, kind: str, body: str, state: str, previous: str) -> str:
    """Return the hash of a row."""
    # body and state are hashed as stored, so one changed byte of their text changes the hash
    return hashlib.sha256(
        f"{canonical([previous, seq, time, kind])[:-1]},{body},{state}]".encode()
    ).hexdigest()


def sha256_of(value: object) -> str | None:
    """Return the hash of a stored answer; None where there is none."""
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    return None if value is None else "not bytes"


def record_of(last: Record, kind: str, body: dict[str, Any], state: Sequence[float]) -> Record:
    """Return the row that follows ``last``, as it is stored."""
    time = datetime.now(UTC).isoformat(timespec="microseconds")
    try:
        texts = canonical(dict(body)), canonical([float(total) for total in state])
    except (TypeError, ValueError) as error:
        given = f"{body!r} and {state!r}"
        raise InvalidValue(f"body and state must be finite JSON values, got {given}: {error}") from None
    fields = (last[0] + 1, time, kind, *texts, last[6])
    return *fields, digest_of(*fields)
