"""Record a run on disk, its seed and the result of every round, so that a killed coordinator resumes it.

``run.json`` holds the name of the run, the enrolled parties and the seed from which nonces and picks are
derived; it is written atomically. ``rounds.log`` gets one record a round, flushed before the algorithm
goes on. A coordinator that was killed runs its algorithm again from the start: recorded rounds are read here
and no party is asked; the interrupted round is asked again under the same nonce, so that guards return the
answers they kept. Everything but the seed is public.

>>> import tempfile
>>> folder = Path(tempfile.mkdtemp())
>>> with Checkpoint(folder, "run-1", {"a": bytes(32)}) as checkpoint:
...     nonce = checkpoint.nonce(1)
...     checkpoint.add({"round": 1}, b"total")
>>> with Checkpoint(folder, "run-1", {"a": bytes(32)}) as again:
...     again.nonce(1) == nonce, again.next(), again.next()
(True, ({'round': 1}, b'total'), None)
"""

import fcntl
import hashlib
import hmac
import json
import os
import struct
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from farthing.deploy.messages.signed import NONCE
from farthing.errors import FarthingError, InvalidValue

_RECORD = struct.Struct("<II32s")  # lengths of header and body, SHA-256 of both
_AT_ONCE = 2**26  # bytes


class Checkpoint:
    """A run's records in a folder, or in memory only where ``folder`` is None."""

    def __init__(self, folder: Path | None, run: str, enrolled: Mapping[str, bytes]) -> None:
        self._folder, self._file = folder, -1
        self._places: deque[int] = deque()  # of the records that are still to be read
        about = {"run": run, "parties": {name: key.hex() for name, key in enrolled.items()}}
        if folder is None:
            self._seed = os.urandom(32)
            return
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            self._file = os.open(folder / "rounds.log", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._seed = self._begun(folder / "run.json", about)
            self._read()
        except BlockingIOError:
            self.close()
            raise InvalidValue(f"another coordinator is at work in {str(folder)!r}") from None
        except OSError as error:
            self.close()
            raise FarthingError(
                f"the checkpoint {str(folder)!r} cannot be opened: {error.strerror}"
            ) from None
        except BaseException:
            self.close()
            raise

    def _begun(self, path: Path, about: dict[str, Any]) -> bytes:
        """Return the seed of the run, which begins here or did before; its parties' keys may have changed."""
        if not path.exists():
            seed = os.urandom(32)
            _replace(path, about | {"seed": seed.hex()})
            return seed
        try:
            found = json.loads(path.read_text(encoding="ascii"))
            seed, run = bytes.fromhex(found.pop("seed")), found["run"]
        except (ValueError, LookupError, TypeError, AttributeError):
            raise InvalidValue(f"{str(path)!r} is not the file of a run") from None
        if run != about["run"]:
            raise InvalidValue(f"{str(path)!r} belongs to another run, {run!r}: use another folder")
        if found != about:  # keys were renewed or revoked, or parties were added
            _replace(path, about | {"seed": seed.hex()})
        return seed

    def _read(self) -> None:
        """Find all records; cut off an incomplete one that a crash left at the end.

        They are read one by one: those of a network may be larger than the memory.
        """
        place, size = 0, os.fstat(self._file).st_size
        while (found := self._record(place, size)) is not None:
            self._places.append(place)
            place = found[2]
        if place < size:
            os.ftruncate(self._file, place)

    def _record(self, place: int, size: int) -> tuple[dict[str, Any], bytes, int] | None:
        """Return the record at a place of the file, and where it ends; None where there is no whole one."""
        if place + _RECORD.size > size:
            return None
        header, body, digest = _RECORD.unpack(self._bytes(place, _RECORD.size))
        end = place + _RECORD.size + header + body
        if end > size:
            return None
        text = self._bytes(place + _RECORD.size, header + body)
        if hashlib.sha256(text).digest() != digest:
            return None
        return json.loads(text[:header]), text[header:], end

    def _bytes(self, place: int, count: int) -> bytes:
        """Return so many bytes of the file; one call reads 2 GiB at most."""
        parts = []
        while count and (part := os.pread(self._file, min(count, _AT_ONCE), place)):
            parts.append(part)
            place, count = place + len(part), count - len(part)
        return b"".join(parts)

    def _first(self) -> tuple[dict[str, Any], bytes] | None:
        if not self._places:
            return None
        found = self._record(self._places[0], os.fstat(self._file).st_size)
        if found is None:
            raise FarthingError("the checkpoint was changed while the run was going on")
        return found[:2]

    def next(self) -> tuple[dict[str, Any], bytes] | None:
        """Return the next recorded step of the run; None after the last."""
        found = self._first()
        if found is not None:
            self._places.popleft()
        return found

    def passed(self) -> tuple[dict[str, Any], bytes] | None:
        """Return the next recorded step if it is a turn that passed."""
        found = self._first()
        if found is None or "passed" not in found[0]:
            return None
        self._places.popleft()
        return found

    @property
    def replaying(self) -> bool:
        """Return whether recorded steps are still to be read."""
        return bool(self._places)

    def add(self, header: dict[str, Any], body: bytes = b"") -> None:
        """Append a step; it is on disk when this returns."""
        if self._file < 0:
            return
        text = json.dumps(header, allow_nan=False).encode("ascii")
        record = _RECORD.pack(len(text), len(body), hashlib.sha256(text + body).digest()) + text + body
        left = memoryview(record)
        try:
            while left:
                left = left[os.write(self._file, left) :]
            os.fsync(self._file)
        except OSError as error:
            raise FarthingError(f"the checkpoint cannot be written: {error}; resume when it can") from None

    def nonce(self, number: int) -> str:
        """Return the nonce of a round: unpredictable, and unchanged after a crash."""
        return self._derived(f"nonce {number}")[:NONCE].hex()

    def turn(self, number: int, of: int) -> int:
        """Return a secret whole number below ``of``, uniform up to 2^-190, which picks a party."""
        return int.from_bytes(self._derived(f"turn {number}"), "big") % of

    def _derived(self, what: str) -> bytes:
        return hmac.digest(self._seed, what.encode(), "sha256")

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _replace(path: Path, content: dict[str, Any]) -> None:
    """Write a file that only its owner reads, at once or not at all."""
    draft = path.with_suffix(".draft")
    draft.unlink(missing_ok=True)
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
