"""Aggregate securely: a server learns the sum of vectors modulo 2^64, and nothing else about any vector.

Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine Learning", in the variant
for an actively malicious server, its rounds in brackets. Every party has an enrolled Ed25519 key; all other
keys are made for one session and deleted after it.

    advertise  two fresh X25519 keys, one for sealing shares and one for masks, signed              [0]
    share      Shamir shares of the mask key and of a seed for one's own mask, sealed for each other [1]
    mask       own vector + own mask ± one mask a pair, modulo 2^64                                  [2]
    consent    a signature of the list of those whose vectors arrived                                [3]
    reveal     of each who arrived a share of its seed, of each who did not a share of its mask key,
               never both, and only once enough others signed the same list                          [4]

Every two parties are neighbours. A sparser graph (Bell et al. 2020) would save masks, and few bytes beside
the vectors; its neighbours would have to be drawn so that an untrusted server cannot bias the draw, with a
margin for its grinding. At 100 parties and 1e5 coordinates all masks of a party take some 30 ms, so it does
not pay.

**Threshold.** Let n parties be in the session, c of them colluding with the server, and t shares recover a
secret. Honest parties sign one list, the others as many as they like, so that two lists with t signatures
each would need 2 (t - c) honest parties of n - c: with 2t > n + c there is one list at most. Seeds are
revealed of the parties on it and mask keys of the others, so of no party both secrets are revealed; c < t
shares reveal nothing. (This is the condition of their theorem on active adversaries including the server.) A
`Member` checks it, and t >= survivors + c, so that a sum holds the noise of at least ``survivors`` honest
parties. A dishonest party can spoil a sum but learn nothing more: `Aggregator` detects wrong shares, not
wrong vectors.

Masks are AES-256 in counter mode under keys of 256 bits from HKDF-SHA-256. Keys, signatures and ciphers come
from `cryptography`; Shamir's secret sharing is implemented here.

`split` and `combine` share 32 bytes: any ``threshold`` shares recover the secret, fewer reveal nothing.

Shamir 1979, "How to share a secret": a polynomial over the integers modulo a prime p > 2^256, uniform but for
its value at 0, which is the secret; a share is its value at a place from 1 on. For fewer than ``threshold``
shares every secret is equally likely. p = 2^256 + 297 is the smallest prime above 2^256. Shares are not
authenticated: the caller of `combine` must know the secret's hash or public key. Not constant-time.

>>> shares = split(bytes(range(32)), threshold=3, places=range(1, 6))
>>> combine({place: shares[place] for place in (1, 4, 5)}) == bytes(range(32))
True
"""

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from farthing.deploy.messages.signed import KEY, SIGNATURE, Reason, Refused, Signer, refuse, verified
from farthing.errors import InvalidValue

PRIME = 2**256 + 297
SECRET, SHARE = 32, 33  # bytes


def split(secret: bytes, threshold: int, places: Iterable[int]) -> dict[int, bytes]:
    """Return one share of the secret for each place."""
    where = list(places)
    if len(secret) != SECRET or not 1 <= threshold <= len(where):
        raise InvalidValue(f"{SECRET} bytes are shared among at least threshold = {threshold} places")
    if len(set(where)) != len(where) or not all(0 < place < PRIME for place in where):
        raise InvalidValue("places must differ and be at least 1")
    polynomial = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {place: _value(polynomial, place).to_bytes(SHARE, "big") for place in where}


def _value(polynomial: list[int], place: int) -> int:
    value = 0
    for coefficient in reversed(polynomial):
        value = (value * place + coefficient) % PRIME
    return value


def coefficients(places: Iterable[int]) -> dict[int, int]:
    """Return Lagrange's coefficients at 0: the factor of the share at each place."""
    where = list(places)
    found = {}
    for place in where:
        above, below = 1, 1
        for other in where:
            if other != place:
                above, below = above * other % PRIME, below * (other - place) % PRIME
        found[place] = above * pow(below, -1, PRIME) % PRIME
    return found


def combine(shares: Mapping[int, bytes], known: Mapping[int, int] | None = None) -> bytes:
    """Return the secret, from exactly ``threshold`` genuine shares; ``known`` saves their `coefficients`."""
    weights = coefficients(shares) if known is None else known
    total = sum(weights[place] * int.from_bytes(share, "big") for place, share in shares.items()) % PRIME
    return (total % 2**256).to_bytes(
        SECRET, "big"
    )  # no secret is this large, so a share was wrong: return some other value


Words = NDArray[np.uint64]

ADVERT = 3 * KEY + SIGNATURE  # sealing key, mask key, hash of the seed, signature
SEALED = 2 * SHARE + 16
SEED, MASK_KEY = b"\0", b"\1"  # the first byte of a revealed share: which secret it belongs to
_ADVERT, _CONSENT, _SEED = (b"farthing secagg " + what + b" 1\0" for what in (b"advert", b"consent", b"seed"))
_CHUNK = 2**17  # words of a mask made at a time: one megabyte, which fits the cache
_ZEROS = bytes(8 * _CHUNK)


def session_of(header: dict[str, Any]) -> bytes:
    """Return the id of a session: a digest of run, round, nonce, terms, contribution and weights."""
    shared = {name: value for name, value in header.items() if name != "seen"}
    return hashlib.sha256(b"farthing session 1\0" + json.dumps(shared, sort_keys=True).encode()).digest()


def least_threshold(members: int, colluding: int, survivors: int) -> int:
    """Return the least t with 2t > n + c and t >= survivors + c."""
    return max((members + colluding) // 2 + 1, survivors + colluding)


def _derived(secret: bytes, *about: bytes) -> bytes:
    """Derive a key of 256 bits; every part of ``about`` is prefixed with its length."""
    info = b"".join(len(part).to_bytes(4, "big") + part for part in about)
    return HKDF(hashes.SHA256(), KEY, b"farthing secagg 1", info).derive(secret)


def _shared(own: X25519PrivateKey, theirs: bytes) -> bytes:
    try:
        return own.exchange(X25519PublicKey.from_public_bytes(theirs))
    except ValueError:  # a point of small order
        refuse(Reason.MEMBERS, "a key in the roster is invalid")


def add_mask(total: Words, key: bytes, minus: bool = False) -> None:
    """Add the mask of a key to a vector in place, or subtract it."""
    stream = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
    mask = bytearray(8 * min(total.size, _CHUNK))
    for start in range(0, total.size, _CHUNK):
        part = total[start : start + _CHUNK]
        stream.update_into(memoryview(_ZEROS)[: 8 * part.size], memoryview(mask)[: 8 * part.size])
        words = np.frombuffer(mask, "<u8", part.size)
        np.subtract(part, words, out=part) if minus else np.add(part, words, out=part)


def _listed(names: Iterable[str]) -> bytes:
    return b"".join(len(name).to_bytes(2, "big") + name.encode() for name in sorted(names))


@dataclass(frozen=True, slots=True)
class Roster:
    """The members of a session and their keys; it must be equal for all, or their masks do not cancel."""

    session: bytes
    adverts: Mapping[str, bytes]
    threshold: int
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        parts = b"".join(self.adverts[name] for name in sorted(self.adverts))
        text = self.session + self.threshold.to_bytes(4, "big") + _listed(self.adverts) + parts
        object.__setattr__(self, "digest", hashlib.sha256(text).digest())

    @property
    def places(self) -> dict[str, int]:
        """Return the place of each party's shares."""
        return {name: place for place, name in enumerate(sorted(self.adverts), 1)}

    def sealing_key(self, name: str) -> bytes:
        return self.adverts[name][:KEY]

    def mask_key(self, name: str) -> bytes:
        return self.adverts[name][KEY : 2 * KEY]

    def seed_hash(self, name: str) -> bytes:
        return self.adverts[name][2 * KEY : 3 * KEY]

    def pair_key(self, own: X25519PrivateKey, name: str, other: str) -> bytes:
        """Derive the key of a pair's mask."""
        pair = sorted((name, other))
        return _derived(_shared(own, self.mask_key(other)), b"mask", self.digest, *(n.encode() for n in pair))

    def channel(self, own: X25519PrivateKey, other: str, sender: str, receiver: str) -> AESGCM:
        """Return the cipher for the one message from ``sender`` to ``receiver`` in this session."""
        shared = _shared(own, self.sealing_key(other))
        return AESGCM(_derived(shared, b"seal", self.digest, sender.encode(), receiver.encode()))

    def own_key(self, seed: bytes) -> bytes:
        return _derived(seed, b"own", self.digest)


def genuine(session: bytes, name: str, advert: bytes, public: bytes | None) -> bool:
    """Return whether an advert is signed by the enrolled key of that name, for this session."""
    if public is None or len(advert) != ADVERT:
        return False
    content = _ADVERT + session + _listed([name]) + advert[: 3 * KEY]
    return verified(public, advert[3 * KEY :], content)


class Member:
    """A party's side of one session: each step once, in order; a refused step was not taken."""

    def __init__(
        self,
        session: bytes,
        name: str,
        signer: Signer,
        enrolled: Mapping[str, bytes],
        *,
        survivors: int,
        colluding: int,
    ) -> None:
        self._session, self._name, self._signer, self._enrolled = session, name, signer, enrolled
        self._survivors, self._colluding = survivors, colluding
        self._sealing, self._masking = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self._seed = os.urandom(KEY)
        self._taken = 0
        self._arrived: list[str] = []
        self._held: dict[str, bytes] = {}  # the others' shares of mask key and seed, decrypted

    def _next(self, step: int) -> None:
        if self._taken != step:
            refuse(Reason.MEMBERS, "a step of a session is taken once, and in order")

    def advertise(self) -> bytes:
        """Return our keys for this session, signed."""
        self._next(0)
        keys = [key.public_key().public_bytes_raw() for key in (self._sealing, self._masking)]
        content = b"".join([*keys, hashlib.sha256(_SEED + self._seed).digest()])
        self._taken = 1
        return content + self._signer.sign(_ADVERT + self._session + _listed([self._name]) + content)

    def share(self, adverts: Mapping[str, bytes], threshold: int) -> dict[str, bytes]:
        """Return sealed shares of both secrets for each other member; refuse an unsafe session."""
        self._next(1)
        members = len(adverts)
        if self._name not in adverts or not members > 1:
            refuse(Reason.MEMBERS, "this party is not in the session, or alone in it")
        if threshold > members or threshold < least_threshold(members, self._colluding, self._survivors):
            refuse(
                Reason.MEMBERS,
                f"{threshold} of {members} shares do not keep the two secrets of a party apart",
            )
        for name, advert in adverts.items():
            if not genuine(self._session, name, advert, self._enrolled.get(name)):
                refuse(
                    Reason.MEMBERS, "a member of this session is not enrolled, or its keys are not its own"
                )
        if len({advert[: 2 * KEY] for advert in adverts.values()}) < members:
            refuse(Reason.MEMBERS, "two members have the same keys")
        roster = Roster(self._session, dict(adverts), threshold)
        places = roster.places
        secrets = self._masking.private_bytes_raw(), self._seed
        key, seed = (split(secret, threshold, places.values()) for secret in secrets)
        both = {name: key[place] + seed[place] for name, place in places.items()}
        own, sealed = both.pop(self._name), {}
        for name, shares in both.items():
            channel = roster.channel(self._sealing, name, self._name, name)
            sealed[name] = channel.encrypt(bytes(12), shares, roster.digest)
        self._roster, self._held = roster, {self._name: own}
        self._taken = 2
        return sealed

    def mask(self, sealed: Mapping[str, bytes], size: int) -> Words:
        """Return the mask to add to our vector: pairwise masks with all who shared, and our own."""
        self._next(2)
        roster = self._roster
        if len(sealed) + 1 < roster.threshold or not set(sealed) <= set(roster.adverts) - {self._name}:
            refuse(
                Reason.MEMBERS, "too few members shared their secrets, or a party outside this session did"
            )
        held = dict(self._held)
        for name, box in sealed.items():
            channel = roster.channel(self._sealing, name, name, self._name)
            try:
                held[name] = channel.decrypt(bytes(12), box, roster.digest)
            except InvalidTag:
                refuse(Reason.MEMBERS, "the shares for this party cannot be decrypted")
            if len(held[name]) != 2 * SHARE:
                refuse(Reason.MEMBERS, "the shares for this party have a wrong length")
        total = np.zeros(size, np.uint64)
        for name in sealed:
            add_mask(total, roster.pair_key(self._masking, self._name, name), minus=name < self._name)
        add_mask(total, roster.own_key(self._seed))
        self._held = held
        self._taken = 3
        return total

    def consent(self, arrived: Sequence[str]) -> bytes:
        """Sign that exactly these members are in the sum."""
        self._next(3)
        least = max(self._roster.threshold, self._survivors + self._colluding)
        names = set(arrived)
        if len(names) != len(arrived) or not names <= set(self._held) or self._name not in names:
            refuse(Reason.MEMBERS, "the list of arrived members does not belong to this session")
        if len(names) < least:
            refuse(
                Reason.MEMBERS, f"{len(names)} vectors arrived, {least} are needed for noise and threshold"
            )
        self._arrived = sorted(names)
        self._taken = 4
        return self._signer.sign(consent_text(self._roster, names))

    def reveal(self, consents: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return one share of each member: of the seed if its vector arrived, of the mask key if not."""
        self._next(4)
        text = consent_text(self._roster, self._arrived)
        signed = [
            name
            for name, signature in consents.items()
            if name in self._arrived and verified(self._enrolled[name], signature, text)
        ]
        if len(signed) < self._roster.threshold:
            refuse(Reason.MEMBERS, f"{len(signed)} members signed the list of arrived members, too few")
        revealed = {}
        for name, both in self._held.items():
            key, seed = both[:SHARE], both[SHARE:]
            revealed[name] = SEED + seed if name in self._arrived else MASK_KEY + key
        self._taken = 5
        return revealed


def consent_text(roster: Roster, arrived: Iterable[str]) -> bytes:
    """Return the text that members sign: the list of those whose vectors arrived."""
    return _CONSENT + roster.digest + _listed(arrived)


class Aggregator:
    """The server's side of one session, which learns the sum and its members."""

    def __init__(self, session: bytes, enrolled: Mapping[str, bytes], adverts: Mapping[str, bytes]) -> None:
        self._session, self._enrolled = session, enrolled
        self.adverts = {
            name: advert
            for name, advert in adverts.items()
            if genuine(session, name, advert, enrolled.get(name))
        }

    def settle(self, threshold: int) -> Roster:
        """Fix the members: all parties with genuine adverts."""
        self.roster = Roster(self._session, self.adverts, threshold)
        self._shared: set[str] = set()
        self._arrived: set[str] = set()
        self._total: Words | None = None
        return self.roster

    def route(self, sealed: Mapping[str, Mapping[str, bytes]]) -> dict[str, dict[str, bytes]]:
        """Return the sealed shares by receiver; drop senders that did not seal one for each other member."""
        everybody = set(self.roster.adverts)
        whole = {
            sender: boxes
            for sender, boxes in sealed.items()
            if set(boxes) == everybody - {sender} and all(len(box) == SEALED for box in boxes.values())
        }
        self._shared = set(whole)
        return {to: {of: boxes[to] for of, boxes in whole.items() if of != to} for to in whole}

    def add(self, name: str, vector: Words) -> None:
        """Add one masked vector."""
        if name not in self._shared or name in self._arrived:
            refuse(Reason.MEMBERS, "the sender is not in this session, or its vector arrived before")
        if self._total is None:
            self._total = np.zeros_like(vector)
        self._total += vector
        self._arrived.add(name)

    @property
    def arrived(self) -> list[str]:
        """Return the members whose vectors are in the sum."""
        return sorted(self._arrived)

    def consents(self, signed: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return the signatures that are genuine."""
        text = consent_text(self.roster, self._arrived)
        return {
            n: s for n, s in signed.items() if n in self._arrived and verified(self._enrolled[n], s, text)
        }

    def result(self, revealed: Mapping[str, Mapping[str, bytes]]) -> Words:
        """Return the sum of all vectors that arrived, modulo 2^64."""
        assert self._total is not None
        roster, places, total = self.roster, self.roster.places, self._total.copy()
        known: dict[tuple[int, ...], dict[int, int]] = {}
        for name in sorted(self._shared):
            here = name in self._arrived
            kind = SEED if here else MASK_KEY
            shares = {
                places[sender]: given[name][1:]
                for sender, given in revealed.items()
                if sender in places and given.get(name, b"")[:1] == kind
            }
            secret = self._secret(name, here, shares, known)
            if here:
                add_mask(total, roster.own_key(secret), minus=True)
                continue
            own = X25519PrivateKey.from_private_bytes(secret)
            # pairwise masks that the dropped member's own vector would have cancelled
            for other in self.arrived:
                add_mask(total, roster.pair_key(own, name, other), minus=name > other)
        return total

    def _secret(
        self, name: str, here: bool, shares: dict[int, bytes], known: dict[tuple[int, ...], dict[int, int]]
    ) -> bytes:
        """Return a seed or a mask key; its hash or public key tells right shares from wrong ones."""
        t, places = self.roster.threshold, sorted(shares)
        for first in range(max(0, len(places) - t + 1)):
            those = tuple(places[first : first + t])
            if those not in known:
                known[those] = coefficients(those)
            secret = combine({place: shares[place] for place in those}, known[those])
            if here and hashlib.sha256(_SEED + secret).digest() == self.roster.seed_hash(name):
                return secret
            if not here:
                own = X25519PrivateKey.from_private_bytes(secret)
                if own.public_key().public_bytes_raw() == self.roster.mask_key(name):
                    return secret
        raise Refused(Reason.MEMBERS, f"a secret of {name} cannot be recovered from {len(shares)} shares")


# --- vectors


def word_bytes(largest: float) -> int:
    """Return the bytes a coordinate needs so that sums up to ±largest do not wrap; 8 at most."""
    needed = max(1, int(np.ceil((np.log2(max(largest, 1.0)) + 2) / 8)))
    if needed > 8 or largest >= 2**62:
        refuse(Reason.MEMBERS, "the sum does not fit 64 bits: use fewer parties, or more noise")
    return needed


def pack_words(words: Words, each: int) -> bytes:
    """Return the low ``each`` bytes of every word."""
    raw = np.ascontiguousarray(words, dtype="<u8").view(np.uint8).reshape(-1, 8)
    return raw[:, :each].tobytes()


def unpack_words(body: bytes, size: int, each: int) -> Words:
    """Return the words that `pack_words` wrote, modulo 2^(8 each)."""
    if len(body) != size * each:
        refuse(Reason.SHAPE, f"{len(body)} bytes, {size * each} are expected")
    raw = np.zeros((size, 8), np.uint8)
    raw[:, :each] = np.frombuffer(body, np.uint8).reshape(size, each)
    return raw.reshape(-1).view("<u8").astype(np.uint64)


def signed_words(words: Words, each: int) -> NDArray[np.int64]:
    """Return sums modulo 2^(8 each) as signed whole numbers."""
    shift = np.uint64(64 - 8 * each)
    return (words << shift).view(np.int64) >> np.int64(64 - 8 * each)
