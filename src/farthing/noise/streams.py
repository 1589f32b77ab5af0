"""Draw random words for private data, by AES-256 in counter mode, and exact draws from whole words.

Coins, indices and subsets are exact on ideal random bits: nothing is rounded. Kernels (`native`), where
available, read the same words and give the same answers.

>>> stream = SeededStream(0)  # for examples and tests; Stream() for private data
>>> kept = stream.poisson_indices(0.5, 1000)
>>> bool(400 < len(kept) < 600)
True
"""

import functools
import hashlib
import math
import operator
import os
import threading
import weakref
from typing import Any, Self

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from farthing import validate
from farthing.errors import InvalidValue, Unsupported
from farthing.noise import native

Integers = NDArray[np.int64]
Words = NDArray[np.uint64]

BLOCK = 2**15  # words in a vectorised step of a sampler: they fit the cache
MOST = 2**62 - 1  # words
# words of the first refill, small for a stream that is used once, and of later ones
_FIRST, _LAST = 2**10, 2**13
_SPARE = 2  # words of space that a cipher needs beyond its output
_ZEROS = bytes(8 * 2**12)
_STEP = 2**20  # coins at a time
_RARE, _LONG, _LEAP = 2.0**-6, 2**14, 512  # rates and numbers of coins for `_leaps`, and the longest leap
_alive: "weakref.WeakSet[Stream]" = weakref.WeakSet()


def whole(low: int, high: int, **value: Any) -> int:
    ((name, number),) = value.items()
    if type(number) is int and low <= number <= high:
        return number
    try:
        whole = operator.index(number)
    except TypeError:
        whole = low - 1
    if isinstance(number, bool) or not low <= whole <= high:
        raise InvalidValue(f"{name} must be a whole number from {low} to {high}, got {number!r}")
    return whole


@functools.lru_cache(64)
def _threshold(rate: float) -> tuple[int, int]:
    """Return floor(rate 2**64) as its first 8 bits, which decide 255 coins in 256, and the other 56."""
    return divmod(int(math.ldexp(rate, 64)), 2**56)


@functools.lru_cache(64)  # rates: personal budgets have up to 32 of them
def _tails(rate: float) -> Words:
    """Return floor(2**64 (1 - p)**k) for k = 1, 2, ..., exactly; p = floor(rate 2**64) / 2**64 > 0."""
    keep = 2**64 - int(math.ldexp(rate, 64))
    table, power = np.empty(_LEAP, np.uint64), 1 << 256  # in units of 2**-256, at most k of them too low
    for k in range(1, _LEAP + 1):
        power = power * keep >> 64
        sure = power >> 192 == power + k >> 192
        table[k - 1] = power >> 192 if sure else keep**k >> 64 * (k - 1)
    return table


class Stream:
    """A cryptographic stream of random words: AES-256 in counter mode under a key from the operating system.

    It can be shared between threads. A forked child continues under a new key, a copy is the stream itself,
    and a pickle holds no state: it loads as a new stream. So no two holders ever see the same words.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rekey()
        _alive.add(self)

    @property
    def sound(self) -> bool:
        """Return whether a guarantee may rest on this stream; no subclass can claim it."""
        return type(self) is Stream

    def _new_key(self) -> bytes:
        return os.urandom(32)

    def _rekey(self) -> None:
        self._cipher = Cipher(algorithms.AES256(self._new_key()), modes.CTR(bytes(16))).encryptor()
        self._buffer: Words = np.empty(0, np.uint64)
        self._address, self._at, self._step = 0, 0, _FIRST
        self._process = os.getpid()  # set last: after an interruption a child must not go on with old words

    def __deepcopy__(self, *memo: Any) -> Self:
        return self

    __copy__ = __deepcopy__

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def integers(self, n: int) -> Words:
        """Return the next n words, uniform on 0 .. 2**64 - 1."""
        buffer, at, _ = self._claim(whole(0, MOST, n=n))
        return buffer[at : at + n].copy()

    def _claim(self, n: int) -> tuple[Words, int, int]:
        """Return the next n words in place: a buffer, the offset, and their address.

        These words are given to no other caller, and a buffer is never refilled: its holder may read it
        without the lock.
        """
        if type(self).integers is not Stream.integers:  # a subclass with words of its own, for tests
            words = np.ascontiguousarray(self.integers(n), dtype=np.uint64)
            return words, 0, words.ctypes.data
        with self._lock:
            if self._process != os.getpid():  # a fork that bypassed Python's hooks
                self._rekey()
            if self._at + n > len(self._buffer):
                self._refill(n)
            at = self._at
            self._at = at + n
            return self._buffer, at, self._address + 8 * at

    def _refill(self, n: int) -> None:
        """Return a new buffer with at least n words, the unused ones of the old first."""
        kept = self._buffer[self._at :]
        size = max(n, len(kept) + self._step)
        self._step = min(2 * self._step, _LAST)
        buffer = np.empty(size + _SPARE, np.uint64)
        buffer[: len(kept)] = kept
        room = memoryview(buffer.data).cast("B")
        for start in range(8 * len(kept), 8 * size, len(_ZEROS)):
            count = min(len(_ZEROS), 8 * size - start)
            zeros = _ZEROS if count == len(_ZEROS) else bytes(count)
            self._cipher.update_into(zeros, room[start : start + count + 8 * _SPARE])
        self._buffer, self._at, self._address = buffer[:size], 0, buffer.ctypes.data

    def uniform_below(self, bound: int, n: int) -> Integers:
        """Draw n integers, exactly uniform below the bound: words past the last multiple are drawn again."""
        bound, n = validate.count(bound=bound), whole(0, MOST, n=n)
        last = np.uint64(2**64 - 2**64 % bound - 1)
        words = self.integers(n)
        while len(again := np.flatnonzero(words > last)):
            words[again] = self.integers(len(again))
        return (words % np.uint64(bound)).astype(np.int64)

    def bernoulli(self, rate: float, n: int) -> NDArray[np.bool_]:
        """Draw n independent coins, true with probability floor(rate 2**64) / 2**64: never above the rate."""
        coins = np.zeros(whole(0, MOST, n=n), np.bool_)
        coins[self._heads(rate, n)] = True
        return coins

    def _heads(self, rate: float, n: int, first: int = 0) -> Integers:
        """Return the indices where `bernoulli` is true, ascending, counted from ``first``."""
        head, tail = _threshold(validate.rate(rate=rate))
        found = native.kernels(n)
        if found is not None and head < 256:
            return self._quick_heads(found, head, tail, n, first)
        buffer, at, _ = self._claim(-(-n // 8))
        coins = buffer[at : at - (-n // 8)].view(np.uint8)[:n]
        heads = np.flatnonzero(coins <= head)
        if len(undecided := np.flatnonzero(coins[heads] == head)):
            lost = self.integers(len(undecided)) >> np.uint64(8) >= np.uint64(tail)
            heads = np.delete(heads, undecided[lost])
        return heads + first if first else heads

    def _quick_heads(self, found: native.Kernels, head: int, tail: int, n: int, first: int) -> Integers:
        """Return the indices of `_heads`, found by kernels."""
        held = self._claim(-(-n // 8))  # keeps the words alive while they are read
        coins = held[2]
        expected = n * (head + 1) / 256
        size = int(expected + 12 * math.sqrt(expected)) + 128  # almost always enough
        places, open_ = np.empty(size, np.int64), np.empty(1, np.int64)
        count = found["heads"](coins, n, head, first, native.pointer(places), size, native.pointer(open_))
        if count < 0:
            places = np.empty(n + 64, np.int64)
            count = found["heads"](
                coins, n, head, first, native.pointer(places), n + 64, native.pointer(open_)
            )
        if undecided := int(open_[0]):
            held = self._claim(undecided)
            count = found["settle"](native.pointer(places), count, held[2], tail)
        return places[:count]

    def poisson_indices(self, rate: float, n: int) -> Integers:
        """Return the indices below n, each kept independently with `bernoulli`'s probability, ascending."""
        n = whole(0, MOST, n=n)
        if n >= _LONG and 2.0**-64 <= validate.rate(rate=rate) <= _RARE:
            return self._leaps(float(rate), n)
        if n <= _STEP:
            return self._heads(rate, n)
        return np.concatenate([self._heads(rate, min(_STEP, n - i), i) for i in range(0, n, _STEP)])

    def _leaps(self, rate: float, n: int) -> Integers:
        """Return the indices of `_heads` from one word a head: the number of tails before it is geometric.

        A word is the beginning of a uniform U, and there are at least k tails where U < (1 - p)**k. Past the
        end of the table, coins begin anew. A word that equals an entry of the table does not decide:
        `_long_leap` takes more bits.
        """
        tails, found = _tails(rate), native.kernels(n)
        rising, last, parts = tails[::-1], -1, list[Integers]()
        while last < n - 1:
            expected = (n - 1 - last) * (rate + 1 / _LEAP)
            size = int(expected + 4 * math.sqrt(expected)) + 8
            buffer, at, address = self._claim(size)
            places, end = np.empty(size, np.int64), np.array([last])
            if found is not None:
                ends = native.pointer(places), native.pointer(end)
                count = found["leaps"](address, size, tails.ctypes.data, _LEAP, n, *ends)
                if count >= 0:
                    parts.append(places[:count])
                    last = int(end[0])
                    continue
            words = buffer[at : at + size]
            before = _LEAP - np.searchsorted(rising, words, side="right")
            for i in np.flatnonzero(tails[np.minimum(before, _LEAP - 1)] == words):
                before[i] = self._long_leap(rate, int(words[i]), int(before[i]))
            places = last + np.cumsum(before + (before < _LEAP))
            last = int(places[-1])
            parts.append(places[(before < _LEAP) & (places < n)])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _long_leap(self, rate: float, word: int, tails: int) -> int:
        """Return the number of tails for a uniform that begins with this word; it is at least ``tails``."""
        keep, known = 2**64 - int(math.ldexp(rate, 64)), 64
        while tails < _LEAP:
            power, bits = keep ** (tails + 1), 64 * (tails + 1)
            edge = power >> bits - known if known < bits else power << known - bits
            if word > edge or (word == edge and known >= bits):
                break
            if word < edge:
                tails += 1
            else:
                word, known = word << 64 | int(self.integers(1)[0]), known + 64
        return tails

    def choose(self, size: int, of: int) -> Integers:
        """Draw a uniform subset of 0 .. of - 1 with `size` members, ascending."""
        of = validate.count(of=of)
        size = whole(0, of, size=size)
        # Both branches treat all indices alike, so by symmetry every subset of this size is equally likely.
        if size == of:
            return np.arange(of)
        if 16 * size > of:  # the smallest of random keys, drawn again in a tie
            while True:
                keys = self.integers(of)
                last, after = np.partition(keys, (size - 1, size))[size - 1 : size + 1]
                if last < after:
                    return np.flatnonzero(keys <= last)
        chosen = np.empty(0, np.int64)
        while len(chosen) < size:  # fill up, never past the size, until all differ
            more = np.sort(np.concatenate([chosen, self.uniform_below(of, size - len(chosen))]))
            chosen = more[np.diff(more, prepend=-1) > 0]
        return chosen


class SeededStream(Stream):
    """A reproducible stream, for tests only: knowing the seed, one can subtract the noise (`sound` is False).

    A forked child continues with other words than its parent, but the same in every child.
    """

    def __init__(self, seed: int) -> None:
        self._seed = whole(-(2**256), 2**256, seed=seed)
        self._generation = 0
        super().__init__()

    def _new_key(self) -> bytes:
        self._generation += 1
        return hashlib.sha256(f"farthing seeded stream {self._seed} {self._generation}".encode()).digest()

    def __reduce__(self) -> tuple[Any, ...]:
        raise Unsupported("a SeededStream cannot be pickled: it would repeat its words; pass a seed instead")


def _restart_in_child() -> None:
    for stream in list(_alive):
        # a parent's thread, absent after the fork, may have held the old lock
        stream._lock = threading.Lock()
        stream._rekey()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restart_in_child)
