"""Shamir's shares, by brute force over a small field and at full size."""

import itertools
import os
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farthing.deploy.secagg import protocol as shamir
from farthing.errors import InvalidValue


def test_the_modulus_is_the_smallest_prime_above_two_to_the_256():
    def probably_prime(n, rounds=40):
        odd, twos = n - 1, 0
        while odd % 2 == 0:
            odd, twos = odd // 2, twos + 1
        for base in range(2, 2 + rounds):
            x = pow(base, odd, n)
            if x in (1, n - 1):
                continue
            for _ in range(twos - 1):
                x = x * x % n
                if x == n - 1:
                    break
            else:
                return False
        return True

    assert probably_prime(shamir.PRIME)
    assert not any(probably_prime(2**256 + k, 2) for k in range(1, 297, 2))


@pytest.mark.parametrize("threshold", [1, 2, 3])
def test_all_polynomials_of_a_small_field(threshold, monkeypatch):
    """Any t shares give every secret back; with t - 1 of them every secret is equally likely."""
    monkeypatch.setattr(shamir, "PRIME", 7)
    places = range(1, 5)
    seen = Counter()
    for polynomial in itertools.product(range(7), repeat=threshold):
        shares = {place: shamir._value(list(polynomial), place) for place in places}
        for those in itertools.combinations(places, threshold):
            weights = shamir.coefficients(those)
            assert sum(weights[place] * shares[place] for place in those) % 7 == polynomial[0]
        for those in itertools.combinations(places, threshold - 1):
            seen[(those, tuple(shares[place] for place in those), polynomial[0])] += 1
    assert set(seen.values()) == {1}
    assert len(seen) == 7 * 7 ** (threshold - 1) * len(list(itertools.combinations(places, threshold - 1)))


@given(st.binary(min_size=32, max_size=32), st.integers(1, 12), st.data())
@settings(max_examples=40)
def test_any_shares_give_the_secret_back(secret, threshold, data):
    n = data.draw(st.integers(threshold, 15))
    shares = shamir.split(secret, threshold, range(1, n + 1))
    assert all(len(share) == shamir.SHARE for share in shares.values())
    those = data.draw(st.permutations(sorted(shares)))[:threshold]
    assert shamir.combine({place: shares[place] for place in those}) == secret


def test_extreme_secrets():
    for secret in (bytes(32), b"\xff" * 32):
        shares = shamir.split(secret, 2, (1, 5, 9))
        assert shamir.combine({1: shares[1], 9: shares[9]}) == secret


def test_too_few_or_wrong_shares_give_something_else():
    secret = os.urandom(32)
    shares = shamir.split(secret, 3, range(1, 6))
    assert shamir.combine({place: shares[place] for place in (1, 2)}) != secret
    assert shamir.combine({1: shares[1], 2: shares[2], 3: shares[4]}) != secret
    assert shamir.split(secret, 3, range(1, 6)) != shares


@pytest.mark.parametrize(
    ("secret", "threshold", "places"),
    [(b"x", 1, [1]), (bytes(32), 0, [1]), (bytes(32), 2, [1]), (bytes(32), 1, [0]), (bytes(32), 1, [1, 1])],
)
def test_nonsense_is_refused(secret, threshold, places):
    with pytest.raises(InvalidValue):
        shamir.split(secret, threshold, places)
