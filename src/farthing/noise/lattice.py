"""Draw noise on an integer lattice from a cryptographic stream.

Adding floating-point noise to a floating-point value leaks: the low bits of the sum show which values can
have produced it, at any ε (Mironov, "On Significance of the Least Significant Bits for Differential Privacy",
CCS 2012). Here the value is first rounded to a lattice of integers, the noise is an integer, and the two are
added as integers (`noisy`).

The guarantee. Choose the grid so that the noise scale is 2**bits cells. `gaussian` returns exactly
round(2**bits Z) for a standard normal Z, and for an integer x

    x + round(2**bits Z) = round(x + 2**bits Z),

which is post-processing of the exact Gaussian mechanism: every theorem and every accountant for real Gaussian
noise applies unchanged. The same holds for `laplace` and `gumbel`. The caller must use the sensitivity of the
*rounded* value, and convert to floats only after the noise was added.

Exactness. A word of the stream represents all uniforms that begin with its bits. If the floating-point
quantile of that interval, with its error bound, lies within one cell, that cell is the sample. Otherwise the
uniform is compared with the survival function at the cell edges in high precision, drawing more of its bits
as needed. Nothing is truncated: on ideal random bits the distribution is exact, tails included. With compiled
kernels (`native`) Gaussian samples come from a table of polynomials with its own error bound; samples that it
leaves undecided are compared as above, so the same words give the same samples.

Limits. Refining takes longer (about 1e-8 of the samples at 20 bits, 1e-2 at 40), so sampling is not
constant-time. A machine snapshot that is resumed twice repeats its stream; a fork does not.

>>> stream = SeededStream(0)  # for examples and tests; Stream() for private data
>>> bits = 20  # one standard deviation is 2**20 cells
>>> clipped_sum, sigma, cell = 0.75, 2.0, 2.0 / 2**bits
>>> released = (round(clipped_sum / cell) + gaussian(stream, 1, bits)) * cell
>>> bool(abs(released[0] - clipped_sum) < 6 * sigma)
True
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farthing.errors import InvalidValue
from farthing.noise import native
from farthing.noise.streams import BLOCK, MOST, SeededStream, Stream, whole

__all__ = ["SeededStream", "Stream", "gaussian", "gumbel", "laplace", "noisy", "on_grid"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Words = NDArray[np.uint64]
_MOST_BITS = 40
_LARGEST_CELL = 2**61
_UNBOUNDED = "a bounded sum is not finite: a contribution returned unbounded terms"
_OPEN = np.iinfo(np.int64).min  # a kernel's result for a sample that it leaves undecided


class _Law(NamedTuple):
    """The distribution of a real X by its quantile and survival functions: P(X > quantile(u)) = u.

    quantile(u) returns X in floating point and a bound on |dX / d log u|. survival(mp, b, bits) works in that
    precision on the raw numbers of mpmath.libmp, whose functions are pure and so thread-safe; it is above 1
    for b below the support.
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

# The relative error allowed for ndtri and log, and for the uniform in floating point (2**-52), with a margin.
# Cephes reports 7.2e-16 = 3.2 * 2**-52 for ndtri and numpy at most 4 * 2**-52 for its logarithms; this is 8 *
# 2**-52, and the tests require quantiles within half of the resulting bound.
_FLOAT_ERROR = 2.0**-49


def _refine(stream: Stream, law: _Law, word: int, bits: int, guess: int) -> int:
    """Return the cell of X for the uniform whose first 63 bits are `word`; `guess` only saves time."""
    from mpmath import libmp  # type: ignore[import-untyped]  # slow to import

    known = 63

    def beyond(cell: int) -> bool:
        """Return whether X lies above the upper edge of the cell, that is, u < survival(edge)."""
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
    """Return round(2**bits X) for uniforms whose first 63 bits are `words`."""
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
    size, bits = _arguments(stream, size, bits)
    samples = np.empty(size, np.int64)
    for start in range(0, size, BLOCK):
        words = stream.integers(min(BLOCK, size - start)).view(np.int64)
        cells = _cells(stream, law, words & (2**63 - 1), bits)
        samples[start : start + BLOCK] = np.where(words < 0, -cells, cells) if symmetric else cells
    return samples


def _arguments(stream: Stream, size: int, bits: int) -> tuple[int, int]:
    if not isinstance(stream, Stream):
        raise InvalidValue(f"stream must be a farthing.noise.lattice.Stream, got {stream!r}")
    return whole(0, MOST, size=size), whole(0, _MOST_BITS, bits=bits)


def gaussian(stream: Stream, size: int, bits: int, room: Integers | None = None) -> Integers:
    """Draw independent samples of round(2**bits Z), Z standard normal, into ``room`` if given."""
    size, bits = _arguments(stream, size, bits)
    found = native.kernels(size)
    samples = np.empty(size, np.int64) if room is None else room
    if found is None:
        samples[:] = _sample(stream, _HALF_NORMAL, size, bits, symmetric=True)
        return samples
    draw, scale, table = found["gaussian"], 2.0**bits, native.address()
    for start in range(0, size, BLOCK):
        part = samples[start : start + BLOCK]
        buffer, at, address = stream._claim(len(part))
        if draw(address, len(part), scale, table, native.pointer(part)):
            _settle(stream, part, buffer[at : at + len(part)], bits)
    return samples


def _settle(stream: Stream, samples: Integers, words: Words, bits: int) -> None:
    """Decide the samples that the kernel left undecided, in order."""
    open_ = np.flatnonzero(samples == _OPEN)
    doubtful = words[open_].view(np.int64)
    cells = _cells(stream, _HALF_NORMAL, doubtful & (2**63 - 1), bits)
    samples[open_] = np.where(doubtful < 0, -cells, cells)


def laplace(stream: Stream, size: int, bits: int) -> Integers:
    """Draw independent samples of round(2**bits L), L Laplace with density exp(-|l|) / 2."""
    return _sample(stream, _EXPONENTIAL, size, bits, symmetric=True)


def gumbel(stream: Stream, size: int, bits: int) -> Integers:
    """Draw independent samples of round(2**bits G), G Gumbel with distribution function exp(-exp(-g))."""
    return -_sample(stream, _NEGATIVE_GUMBEL, size, bits, symmetric=False)


def on_grid(total: Floats, unit: float | Floats, cell: float) -> Integers:
    """Return round(total / unit / cell), clamped, which like rounding never increases a distance."""
    if not np.isfinite(total).all():
        raise InvalidValue(_UNBOUNDED)
    return np.rint(np.clip(total / unit / cell, -_LARGEST_CELL, _LARGEST_CELL)).astype(np.int64)


def noisy(stream: Stream, total: Floats, unit: float | Floats, cell: float, bits: int) -> Floats:
    """Return a sum with Gaussian noise: (round(total / unit / cell) + round(2**bits Z)) · cell · unit.

    >>> total = np.array([0.75, -3.0])
    >>> cells = on_grid(total, 1.0, 0.5**20) + gaussian(SeededStream(0), 2, 20)
    >>> bool((noisy(SeededStream(0), total, 1.0, 0.5**20, 20) == cells * 0.5**20).all())
    True
    """
    size, bits = _arguments(stream, total.size, bits)
    found, each = native.kernels(size), isinstance(unit, np.ndarray) and unit.ndim > 0
    if found is None or (each and np.shape(unit) != total.shape):
        noise = gaussian(stream, size, bits).reshape(total.shape)
        return _floats(on_grid(total, unit, cell) + noise, unit, cell)
    released, flat = np.empty(total.shape), total.ravel()
    to, units = released.ravel(), np.ravel(unit) if each else None
    for start in range(0, size, BLOCK):
        part = slice(start, start + BLOCK)
        by = float(unit) if units is None else units[part]
        _release(found, stream, flat[part], by, cell, bits, to[part])
    return released if total.ndim else released[()]


def _release(
    found: native.Kernels,
    stream: Stream,
    total: Floats,
    unit: float | Floats,
    cell: float,
    bits: int,
    to: Floats,
) -> None:
    """Release one block of `noisy` with compiled kernels."""
    (size,), scale, table = total.shape, 2.0**bits, native.address()
    buffer, at, address = stream._claim(size)
    units, one = (native.pointer(unit), 0.0) if isinstance(unit, np.ndarray) else (None, unit)
    sums = native.pointer(total)
    open_ = found["release"](address, size, scale, table, sums, units, one, cell, native.pointer(to))
    if open_ < 0:
        raise InvalidValue(_UNBOUNDED)
    if open_:  # again, with all samples decided
        noise = np.empty(size, np.int64)
        found["gaussian"](address, size, scale, table, native.pointer(noise))
        _settle(stream, noise, buffer[at : at + size], bits)
        to[:] = _floats(on_grid(total, unit, cell) + noise, unit, cell)


def _floats(cells: Integers, unit: float | Floats, cell: float) -> Floats:
    return cells.astype(np.float64) * cell * unit
