"""Shamir's secret sharing of 32 bytes: any ``threshold`` shares give the secret back, fewer say nothing.

Shamir 1979, "How to share a secret": a polynomial over the integers modulo a prime p > 2^256, uniform but for
its value at 0, which is the secret; a share is its value at a place from 1 on. For fewer than ``threshold``
shares every secret is equally likely. p = 2^256 + 297 is the smallest prime above 2^256. Nothing here checks
that a share is genuine: who combines them must know the secret's hash or public key. Not constant-time.

>>> shares = split(bytes(range(32)), threshold=3, places=range(1, 6))
>>> combine({place: shares[place] for place in (1, 4, 5)}) == bytes(range(32))
True
"""

import secrets
from collections.abc import Iterable, Mapping

from farthing.errors import InvalidValue

PRIME = 2**256 + 297
SECRET, SHARE = 32, 33  # bytes


def split(secret: bytes, threshold: int, places: Iterable[int]) -> dict[int, bytes]:
    """One share a place."""
    where = list(places)
    if len(secret) != SECRET or not 1 <= threshold <= len(where):
        raise InvalidValue(f"{SECRET} bytes are shared among at least as many as the threshold {threshold}")
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
    """What shares at these places are multiplied by and added: Lagrange's polynomials at 0."""
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
    """The secret, from exactly ``threshold`` genuine shares; ``known`` saves their `coefficients`."""
    weights = coefficients(shares) if known is None else known
    total = sum(weights[place] * int.from_bytes(share, "big") for place, share in shares.items()) % PRIME
    return (total % 2**256).to_bytes(
        SECRET, "big"
    )  # beyond 2^256 there is no secret: some other one comes out
