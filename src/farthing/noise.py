"""Noise on an integer lattice, drawn from a cryptographic stream.

Adding floating-point noise to a floating-point value leaks: the low bits of the sum show which values
can have produced it, whatever ε is (Mironov, "On Significance of the Least Significant Bits for
Differential Privacy", CCS 2012). Here the value is first put on a lattice of integers, the noise is an
integer, and they are added as integers.

The guarantee. Choose the grid so that the noise scale is 2**bits cells. `gaussian` returns exactly
round(2**bits Z) for a standard normal Z, and for an integer x

    x + round(2**bits Z) = round(x + 2**bits Z),

which is post-processing of the exact Gaussian mechanism: every theorem and every accountant for real
Gaussian noise applies unchanged. The same holds for `laplace` and `gumbel`. The caller owes the rest:
the sensitivity of the *rounded* value, and turning the sum into floats only after the noise is in.

Exactness. A word of the stream stands for all uniforms that begin with its bits. Where the floating-point
quantile of that interval, with its error bound, lies within one cell, that cell is the answer. Elsewhere
the uniform is compared with the survival function at the cell edges in high precision, drawing more of its
bits as needed. Nothing is cut off: on ideal random bits the law is the stated one, tails included.

Limits. Refining takes longer (about 1e-8 of the samples at 20 bits, 1e-2 at 40), so sampling is not
constant-time. A machine snapshot resumed twice repeats its stream; a fork does not.

>>> stream = SeededStream(0)  # for examples and tests; Stream() for private data
>>> bits = 20  # one standard deviation is 2**20 cells
>>> clipped_sum, sigma, cell = 0.75, 2.0, 2.0 / 2**bits
>>> released = (round(clipped_sum / cell) + gaussian(stream, 1, bits)) * cell
>>> bool(abs(released[0] - clipped_sum) < 6 * sigma)
True
"""

import hashlib
import math
import operator
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from farthing import validate
from farthing.errors import InvalidValue, Unsupported

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Words = NDArray[np.uint64]
_BLOCK = 2**15  # words a refill of the stream and a vectorised step of a sampler: they fit the cache
_MOST = 2**62 - 1  # words
_MOST_BITS = 40
_alive: "weakref.WeakSet[Stream]" = weakref.WeakSet()


def _whole(low: int, high: int, **value: Any) -> int:
    ((name, number),) = value.items()
    try:
        whole = operator.index(number)
    except TypeError:
        whole = low - 1
    if isinstance(number, bool) or not low <= whole <= high:
        raise InvalidValue(f"{name} must be a whole number from {low} to {high}, got {number!r}")
    return whole


class Stream:
    """Cryptographic random words: AES-256 in counter mode under a key from the operating system.

    Safe to share between threads. A forked child goes on under a new key, a copy is the stream itself,
    and a pickle holds no state: it loads as a new stream. So no two holders ever see the same words.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rekey()
        _alive.add(self)

    @property
    def sound(self) -> bool:
        """Whether a guarantee may rest on this stream: no subclass can say so of itself."""
        return type(self) is Stream

    def _new_key(self) -> bytes:
        return os.urandom(32)

    def _rekey(self) -> None:
        self._process = os.getpid()
        self._cipher = Cipher(algorithms.AES256(self._new_key()), modes.CTR(bytes(16))).encryptor()
        self._buffer: Words = np.empty(0, np.uint64)

    def __deepcopy__(self, *memo: Any) -> Self:
        return self

    __copy__ = __deepcopy__

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def integers(self, n: int) -> Words:
        """The next n words, uniform on 0 .. 2**64 - 1."""
        n = _whole(0, _MOST, n=n)
        with self._lock:
            if self._process != os.getpid():  # a fork that bypassed Python's hooks
                self._rekey()
            if (missing := n - len(self._buffer)) > 0:
                fresh = np.frombuffer(self._cipher.update(bytes(8 * max(missing, _BLOCK))), "<u8")
                self._buffer = np.concatenate([self._buffer, fresh], dtype=np.uint64)
            taken, self._buffer = self._buffer[:n].copy(), self._buffer[n:]
            return taken

    def uniform_below(self, bound: int, n: int) -> Integers:
        """n integers uniform on 0 .. bound - 1, exactly: words past the last multiple are drawn again."""
        bound, n = validate.count(bound=bound), _whole(0, _MOST, n=n)
        last = np.uint64(2**64 - 2**64 % bound - 1)
        words = self.integers(n)
        while len(again := np.flatnonzero(words > last)):
            words[again] = self.integers(len(again))
        return (words % np.uint64(bound)).astype(np.int64)

    def bernoulli(self, rate: float, n: int) -> NDArray[np.bool_]:
        """n independent coins, true with probability floor(rate 2**64) / 2**64: never above the rate."""
        coins = np.zeros(_whole(0, _MOST, n=n), np.bool_)
        coins[self._heads(rate, n)] = True
        return coins

    def _heads(self, rate: float, n: int) -> Integers:
        """Where `bernoulli` is true, ascending."""
        threshold = int(math.ldexp(validate.rate(rate=rate), 64))
        head, tail = divmod(threshold, 2**56)  # 8 bits decide all but one coin in 256
        coins = self.integers(-(-n // 8)).view(np.uint8)[:n]
        heads = np.flatnonzero(coins <= head)
        if len(undecided := np.flatnonzero(coins[heads] == head)):
            lost = self.integers(len(undecided)) >> np.uint64(8) >= np.uint64(tail)
            heads = np.delete(heads, undecided[lost])
        return heads

    def poisson_indices(self, rate: float, n: int) -> Integers:
        """The indices below n, each kept independently with `bernoulli`'s probability, ascending."""
        n, step = _whole(0, _MOST, n=n), 2**20
        starts = range(0, max(n, 1), step)
        return np.concatenate([i + self._heads(rate, min(step, n - i)) for i in starts])

    def choose(self, size: int, of: int) -> Integers:
        """A uniform subset of 0 .. of - 1 with `size` members, ascending."""
        of = validate.count(of=of)
        size = _whole(0, of, size=size)
        # Both ways treat all indices alike, so by symmetry every subset of this size is equally likely.
        if size == of:
            return np.arange(of)
        if 16 * size > of:  # the smallest of random keys; redrawn where a tie leaves them open
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
    """A reproducible stream, for tests only: who knows the seed can subtract the noise (`sound` is False).

    A forked child goes on with other words than its parent, but the same in every child.
    """

    def __init__(self, seed: int) -> None:
        self._seed = _whole(-(2**256), 2**256, seed=seed)
        self._generation = 0
        super().__init__()

    def _new_key(self) -> bytes:
        self._generation += 1
        return hashlib.sha256(f"farthing seeded stream {self._seed} {self._generation}".encode()).digest()

    def __reduce__(self) -> tuple[Any, ...]:
        raise Unsupported("a SeededStream cannot be pickled: it would repeat its words; pass a seed instead")


def _restart_in_child() -> None:
    for stream in list(_alive):
        stream._lock = threading.Lock()  # a thread of the parent, not here any more, may have held the old
        stream._rekey()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restart_in_child)


class _Law(NamedTuple):
    """A real variable X by its quantile and survival functions: P(X > quantile(u)) = u.

    quantile(u) gives X in floating point and a bound on |dX / d log u|. survival(mp, b, bits) works in that
    precision on the raw numbers of mpmath.libmp, whose functions are pure and so thread-safe; it is above
    1 for b below the support.
    """

    quantile: Callable[[Floats], tuple[Floats, Floats | float]]
    survival: Callable[[Any, Any, int], Any]


def _half_normal_quantile(u: Floats) -> tuple[Floats, float]:
    from scipy.special import ndtri  # slow to import

    return -ndtri(0.5 * u), 1.26  # the slope is Mills' ratio, at most sqrt(π / 2)


_HALF_NORMAL = _Law(
    _half_normal_quantile,
    lambda mp, b, bits: mp.mpf_erfc(mp.mpf_div(b, mp.mpf_sqrt(mp.from_int(2), bits), bits), bits),
)
_EXPONENTIAL = _Law(lambda u: (-np.log(u), 1.0), lambda mp, b, bits: mp.mpf_exp(mp.mpf_neg(b), bits))
_NEGATIVE_GUMBEL = _Law(
    lambda u: (np.log(-np.log(u)), -1.0 / np.log(u)),
    lambda mp, b, bits: mp.mpf_exp(mp.mpf_neg(mp.mpf_exp(b, bits)), bits),
)

# Relative error allowed to ndtri and log, and to the uniform in floating point (2**-52), with room.
# Cephes reports 7.2e-16 = 3.2 * 2**-52 for ndtri and numpy at most 4 * 2**-52 for its logarithms; this is
# 8 * 2**-52, and the tests hold the quantiles to less than half of the bound it leads to.
_FLOAT_ERROR = 2.0**-49


def _refine(stream: Stream, law: _Law, word: int, bits: int, guess: int) -> int:
    """The cell of X for the uniform whose first 63 bits are `word`; `guess` only saves time."""
    from mpmath import libmp  # type: ignore[import-untyped]  # slow to import

    known = 63

    def beyond(cell: int) -> bool:
        """Whether X lies above the upper edge of the cell, that is, u < survival(edge)."""
        nonlocal word, known
        edge = libmp.from_man_exp(2 * cell + 1, -bits - 1)
        while True:
            survival = libmp.to_fixed(law.survival(libmp, edge, known + 64), known)
            if not survival - 2 <= word <= survival + 1:  # one unit for u, one for rounding
                return bool(word < survival)
            word, known = word << 64 | int(stream.integers(1)[0]), known + 64

    low, high = guess - 1, guess
    while not beyond(low):
        low, high = low - 2 * (high - low), low
    while beyond(high):
        low, high = high, high + 2 * (high - low)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if beyond(middle) else (low, middle)
    return high


def _cells(stream: Stream, law: _Law, words: Integers, bits: int) -> Integers:
    """round(2**bits X) for uniforms whose first 63 bits are `words`."""
    u = (words.astype(np.float64) + 0.5) * 2.0**-63
    with np.errstate(divide="ignore", invalid="ignore"):  # u may round to 1: refined below
        x, slope = law.quantile(u)
        # The second term covers the width of the word's interval; at words 0 and 1 it exceeds a cell.
        error = _FLOAT_ERROR * (np.abs(x) + 1.0 + slope) + 2.0**-62 / u
        scaled = x * 2.0**bits
        nearest = np.rint(scaled)
        certain = 0.5 - np.abs(scaled - nearest) > error * 2.0**bits
        cells = nearest.astype(np.int64)
    for i in np.flatnonzero(~certain):
        guess = int(nearest[i]) if np.isfinite(nearest[i]) else 0
        cells[i] = _refine(stream, law, int(words[i]), bits, guess)
    return cells


def _sample(stream: Stream, law: _Law, size: int, bits: int, symmetric: bool) -> Integers:
    if not isinstance(stream, Stream):
        raise InvalidValue(f"stream must be a farthing.noise.Stream, got {stream!r}")
    size, bits = _whole(0, _MOST, size=size), _whole(0, _MOST_BITS, bits=bits)
    samples = np.empty(size, np.int64)
    for start in range(0, size, _BLOCK):
        words = stream.integers(min(_BLOCK, size - start)).view(np.int64)
        cells = _cells(stream, law, words & (2**63 - 1), bits)
        samples[start : start + _BLOCK] = np.where(words < 0, -cells, cells) if symmetric else cells
    return samples


def gaussian(stream: Stream, size: int, bits: int) -> Integers:
    """Independent samples of round(2**bits Z), Z standard normal."""
    return _sample(stream, _HALF_NORMAL, size, bits, symmetric=True)


def laplace(stream: Stream, size: int, bits: int) -> Integers:
    """Independent samples of round(2**bits L), L Laplace with density exp(-|l|) / 2."""
    return _sample(stream, _EXPONENTIAL, size, bits, symmetric=True)


def gumbel(stream: Stream, size: int, bits: int) -> Integers:
    """Independent samples of round(2**bits G), G Gumbel with distribution function exp(-exp(-g))."""
    return -_sample(stream, _NEGATIVE_GUMBEL, size, bits, symmetric=False)
