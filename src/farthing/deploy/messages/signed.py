"""Sign and verify binary messages: a prefix, the signer, a JSON header, raw bytes, an Ed25519 signature.

    0   4  magic             16  32  public key of the signer
    4   1  version           48   h  header, JSON
    5   1  kind              48+h b  body: little-endian numbers, or records of fixed length
    6   2  zero              ...  64 signature of everything before it (but of the body its SHA-256)
    8   4  h, length of the header
    12  4  b, length of the body

`expected_size` reads the prefix alone, so that a message that is too large is refused before it is read.
`unseal` checks the signer and the signature before it parses anything. There is no pickle. A message that is
not accepted raises `Refused` with a `Reason`; its text never shows a weight, an update or a record.

>>> signer = Signer.new()
>>> message = seal(MessageKind.QUESTION, {"run": "r1"}, b"\\0" * 8, signer)
>>> opened = unseal(message, {signer.public}, largest=1000)
>>> opened.kind is MessageKind.QUESTION, opened.fields().text("run"), len(opened.body)
(True, 'r1', 8)
>>> unseal(message[:-1] + b"?", {signer.public}, largest=1000)
Traceback (most recent call last):
    ...
farthing.deploy.messages.signed.Refused: forged: the signature does not match the signer
"""

import hashlib
import json
import os
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from numpy.typing import NDArray

from farthing.errors import FarthingError, InvalidValue

MAGIC, VERSION = b"frth", 1
PREFIX = struct.Struct("<4sBBHII")
_ENTRY = struct.Struct("<BI")  # lengths of a name and of what it names
KEY, SIGNATURE, NONCE = 32, 64, 16  # bytes
LARGEST_HEADER = 2**14
_OVERHEAD = PREFIX.size + KEY + SIGNATURE
_DOMAIN = b"farthing message 1\0"  # domain separation: our signatures are valid in no other protocol
_HEXADECIMAL = frozenset("0123456789abcdef")
_SAFE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


class MessageKind(IntEnum):
    """The kind of a message."""

    REFUSAL = 0
    HELLO = 1  # coordinator: asks a party to announce itself
    ANNOUNCEMENT = 2  # party: its budget and public number of records
    PROPOSAL = 3  # coordinator: proposes terms
    AGREEMENT = 4  # party: accepts them, for so many rounds
    QUESTION = 5  # coordinator: asks for the gradient at these weights
    ANSWER = 6  # party: the gradient, with all of its noise
    OPENING = 7  # the kinds below are secure aggregation's: `farthing.deploy.secagg.protocol`
    ADVERT = 8
    ROSTER = 9
    SHARES = 10
    MASKED_QUESTION = 11
    MASKED_ANSWER = 12
    SURVIVORS = 13
    CONSENT = 14
    REVEAL = 15
    REVEALED = 16


class Reason(StrEnum):
    """The reason why a message was not accepted."""

    MALFORMED = "malformed"
    OVERSIZED = "oversized"
    STRANGER = "stranger"  # the signer may not ask, or answer
    FORGED = "forged"
    DATASET = "dataset"
    STALE = "stale"  # the round is over
    FUTURE = "future"
    CONFLICT = "conflict"  # a repeated run, round and nonce with other weights
    SHAPE = "shape"
    NONFINITE = "nonfinite"
    NORM = "norm"
    NOISE = "noise"  # less than the policy allows
    CLIP = "clip"
    ROUNDS = "rounds"
    SAMPLER = "sampler"
    LOSS = "loss"
    MODEL = "model"  # the party has no such model, or its source differs
    EVALUATION = "evaluation"  # the policy allows none
    WEIGHTS = "weights"  # a weight that is too large to compute with
    TRUST = "trust"
    SPENT = "spent"  # the next round does not fit the budget
    PROMISED = "promised"  # the budget is promised to other terms
    LOST = "lost"  # charged, but never released
    LOCKED = "locked"  # the ledger cannot be written, or was rolled back
    MEMBERS = "members"  # too few members, or others than agreed
    INTERNAL = "internal"


class Refused(FarthingError):
    """A message was not accepted. Nothing was charged for it, unless the reason is ``lost``."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(f"{reason}: {text}")
        self.reason, self.text = reason, text


def refuse(reason: Reason, text: str) -> NoReturn:
    raise Refused(reason, text)


class Signer:
    """An Ed25519 private key, which leaves this object only into its own file."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public: bytes = key.public_key().public_bytes_raw()

    @classmethod
    def new(cls) -> Self:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Return the signer in a file that `save` wrote, which is restricted to its owner if it was not."""
        from farthing.ledger.journal_head import narrow  # not for nodes, which load no such key

        try:
            raw = bytes.fromhex(Path(path).read_text(encoding="ascii").strip())
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "not 64 hexadecimal digits"
            raise InvalidValue(f"a key file must hold a private key, {os.fspath(path)!r}: {why}") from None
        if len(raw) != KEY:
            raise InvalidValue(f"a private key has {KEY} bytes, {os.fspath(path)!r} holds {len(raw)}")
        narrow(os.fspath(path))
        return cls(Ed25519PrivateKey.from_private_bytes(raw))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the key to a new file that only its owner may read."""
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise InvalidValue(
                f"a key is written to a new file, {os.fspath(path)!r}: {error.strerror}"
            ) from None
        with os.fdopen(file, "w", encoding="ascii") as target:
            target.write(self._key.private_bytes_raw().hex() + "\n")

    def sign(self, content: bytes) -> bytes:
        return self._key.sign(content)

    def __repr__(self) -> str:
        return f"<Signer {self.public.hex()[:8]}>"

    def __reduce__(self) -> NoReturn:
        raise InvalidValue("a private key is not pickled: save it to a file of its own")


def verified(public: bytes, signature: bytes, content: bytes) -> bool:
    """Return whether the owner of ``public`` signed ``content``."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, content)
    except (InvalidSignature, ValueError):
        return False
    return True


def public_key(text: Any) -> bytes:
    """Return a public key from its 64 hexadecimal digits."""
    try:
        key = bytes.fromhex(text)
    except (TypeError, ValueError):
        key = b""
    if len(key) != KEY:
        raise InvalidValue(f"a public key must be {2 * KEY} hexadecimal digits, got {text!r}")
    return key


# --- sealing


@dataclass(frozen=True, slots=True)
class Opened:
    """A message with a valid size and signature; its content is not yet checked."""

    kind: MessageKind
    signer: bytes
    header: bytes
    body: bytes
    digest: str  # of everything that was signed: it identifies the message

    def fields(self) -> "Fields":
        """Return the header, parsed."""
        return Fields.parse(self.header)


def seal(kind: MessageKind, header: dict[str, Any], body: bytes, signer: Signer) -> bytes:
    """Return a signed message."""
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
    if len(text) > LARGEST_HEADER or len(body) >= 2**32:
        raise InvalidValue(f"a message of {len(text)} + {len(body)} bytes is too large")
    start = PREFIX.pack(MAGIC, VERSION, kind, 0, len(text), len(body)) + signer.public + text
    return start + body + signer.sign(_signed(start, body))


def _signed(start: bytes, body: bytes) -> bytes:
    return _DOMAIN + start + hashlib.sha256(body).digest()


def message_digest(data: bytes) -> str:
    """Return the digest that `Opened.digest` will have of a sealed message."""
    _, _, _, _, header, body = PREFIX.unpack_from(data)
    first = PREFIX.size + KEY + header
    return hashlib.sha256(_signed(data[:first], data[first : first + body])).hexdigest()


def expected_size(prefix: bytes, largest: int) -> int:
    """Return a message's size in bytes, from its first 16; refuse a size above ``largest``."""
    if len(prefix) < PREFIX.size:
        refuse(Reason.MALFORMED, "the message is shorter than a prefix")
    magic, version, kind, zero, header, body = PREFIX.unpack_from(prefix)
    if (magic, version, zero) != (MAGIC, VERSION, 0) or kind not in set(MessageKind):
        refuse(Reason.MALFORMED, "the message has a wrong magic number, version or kind")
    size: int = _OVERHEAD + header + body
    if header > LARGEST_HEADER or size > largest:
        refuse(Reason.OVERSIZED, f"{size} bytes, {largest} are allowed")
    return size


def unseal(data: bytes, signers: Collection[bytes], largest: int) -> Opened:
    """Check size, signer and signature, in this order, before the header is parsed."""
    if len(data) != expected_size(data[: PREFIX.size], largest):
        refuse(Reason.MALFORMED, "the length differs from the prefix")
    _, _, kind, _, header, body = PREFIX.unpack_from(data)
    first = PREFIX.size + KEY
    signer, text = data[PREFIX.size : first], data[first : first + header]
    content, signature = data[first + header : first + header + body], data[-SIGNATURE:]
    if signer not in signers:
        refuse(Reason.STRANGER, "the signer is not known here")
    signed = _signed(data[: first + header], content)
    if not verified(signer, signature, signed):
        refuse(Reason.FORGED, "the signature does not match the signer")
    return Opened(MessageKind(kind), signer, text, content, hashlib.sha256(signed).hexdigest())


# --- content


class Fields:
    """A JSON object read field by field: a missing, mistyped or unread field is refused."""

    def __init__(self, values: Any) -> None:
        if not isinstance(values, dict):
            refuse(Reason.MALFORMED, "the header must be a JSON object")
        self._values: dict[str, Any] = dict(values)

    @classmethod
    def parse(cls, text: bytes) -> "Fields":
        try:
            return cls(json.loads(text.decode("ascii"), object_pairs_hook=_once, parse_constant=_never))
        except (ValueError, RecursionError):
            refuse(Reason.MALFORMED, "the header is not plain JSON")

    def take(self, name: str) -> Any:
        if name not in self._values:
            refuse(Reason.MALFORMED, f"{name} is missing")
        return self._values.pop(name)

    def text(self, name: str, longest: int = 64) -> str:
        value = self.take(name)
        if not isinstance(value, str) or not 0 < len(value) <= longest or not _SAFE.issuperset(value):
            refuse(Reason.MALFORMED, f"{name} must be up to {longest} letters, digits, dots or dashes")
        return value

    def whole(self, name: str, low: int = 0, high: int = 2**53) -> int:
        value = self.take(name)
        if type(value) is not int or not low <= value <= high:
            refuse(Reason.MALFORMED, f"{name} must be a whole number from {low} to {high}")
        return value

    def number(self, name: str) -> float:
        value = self.take(name)
        if type(value) not in (int, float) or not abs(value) <= 1e300:
            refuse(Reason.MALFORMED, f"{name} must be a number")
        return float(value)

    def hexadecimal(self, name: str, size: int) -> str:
        value = self.take(name)
        if not isinstance(value, str) or len(value) != 2 * size or not _HEXADECIMAL.issuperset(value):
            refuse(Reason.MALFORMED, f"{name} must be {2 * size} hexadecimal digits")
        return value

    def plain(self) -> dict[str, Any]:
        """Return the entries that were not read yet."""
        return dict(self._values)

    def inner(self, name: str) -> "Fields":
        return Fields(self.take(name))

    def done(self) -> None:
        """Refuse entries that were not read."""
        if self._values:
            refuse(Reason.MALFORMED, f"{len(self._values)} unknown fields")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("a name occurs twice")
    return dict(pairs)


def _never(text: str) -> NoReturn:
    raise ValueError(text)


def checked_name(**value: Any) -> str:
    """Return a name that messages can carry: letters, digits, dots, dashes and underscores."""
    ((name, text),) = value.items()
    if not isinstance(text, str) or not 0 < len(text) <= 64 or not _SAFE.issuperset(text):
        raise InvalidValue(
            f"{name} must be up to 64 letters, digits, dots, dashes or underscores, got {text!r}"
        )
    if not text.strip("."):
        raise InvalidValue(f"{name} must not consist of dots, which are folders, got {text!r}")
    return text


def pack_numbers(values: NDArray[np.float64]) -> bytes:
    """Return numbers as little-endian float64, row by row."""
    return np.ascontiguousarray(values, dtype="<f8").tobytes()


def unpack_numbers(body: bytes, shape: Sequence[int]) -> NDArray[np.float64]:
    """Return finite numbers of exactly this shape; check the length before reading."""
    count = 1
    for side in shape:
        count *= side
    if len(body) != 8 * count:
        refuse(Reason.SHAPE, f"{len(body)} bytes, {8 * count} are expected")
    values = np.frombuffer(body, dtype="<f8").astype(np.float64).reshape(tuple(shape))
    if not np.isfinite(values).all():
        refuse(Reason.NONFINITE, "a number is not finite")
    return values


def digest(body: bytes) -> str:
    """Return the SHA-256 of weights or of an update, as it stands in headers and logs."""
    return hashlib.sha256(body).hexdigest()


def pack_table(entries: Mapping[str, bytes]) -> bytes:
    """Return named byte strings as one, in the order of their names."""
    parts = []
    for name in sorted(entries):
        parts += [_ENTRY.pack(len(name), len(entries[name])), name.encode("ascii"), entries[name]]
    return b"".join(parts)


def unpack_table(body: bytes, most: int, lengths: Collection[int]) -> dict[str, bytes]:
    """Return the table that `pack_table` wrote: at most ``most`` entries of these lengths, names sorted."""
    entries: dict[str, bytes] = {}
    place, before = 0, ""
    while place < len(body):
        if place + _ENTRY.size > len(body) or len(entries) >= most:
            refuse(Reason.MALFORMED, "a table is cut off, or too long")
        letters, length = _ENTRY.unpack_from(body, place)
        place += _ENTRY.size
        text, value = body[place : place + letters], body[place + letters : place + letters + length]
        place += letters + length
        if not letters <= 64 or length not in lengths or len(text) + len(value) != letters + length:
            refuse(Reason.MALFORMED, "an entry of a table has a wrong length")
        name = text.decode("ascii", "replace")
        if not _SAFE.issuperset(name) or not before < name:
            refuse(Reason.MALFORMED, "the names of a table must be sorted and plain")
        entries[name], before = value, name
    return entries


def table_size(most: int, length: int) -> int:
    """Return the most bytes that a table of so many entries can have."""
    return most * (_ENTRY.size + 64 + length)
