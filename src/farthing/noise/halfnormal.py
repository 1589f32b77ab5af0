"""The half-normal quantile x(u), P(|Z| > x) = u, as a table of polynomials for `kernels.c`.

Segments. u in [2⁻⁶⁴, 1) is cut by the exponent of its float64 and six bits of its mantissa: 64 segments an
octave, u = 2ᵉ (c + t) with |t| <= 2⁻⁷ and c the middle. Exponent, segment and t are read off the bits of u
without rounding. A row of the table holds the coefficients of a polynomial of degree 5 in t, and a bound on
its error.

Coefficients. x' = -√(π/2) e^(x²/2) gives the Taylor series at the middle by recurrence, x itself there is
scipy's. The series up to degree 9 is expanded in Chebyshev polynomials and cut after degree 5.

Error. The singularity nearest to a segment is u = 0, 128 half-widths away, so coefficients fall by about 2⁸ a
degree: what is cut off is below 2⁻⁵⁰, and the remainder of the series below 2⁻⁷⁰. Rounding adds less than
2⁻⁵¹ (1 + x), and scipy's error is that of the numpy path. The bound, 2⁻⁴⁸ (x + 2.26), is twice that of the
numpy path, and the tests hold the polynomials to less than half of it in every segment.

Words. A word w stands for all u in [w, w + 1) 2⁻⁶³. The bound also covers eight of these units on each side
(x moves by at most √(π/2) du / u): where a cell is certain here, no cell edge is so near that the high
precision of `noise._refine` would ask for more bits. So which words of a stream are used does not depend on
whether there are kernels.

>>> row = table()[63 * 64 + 32]  # u from 0.75
>>> bool(abs(row[0] - 0.3134) < 1e-4), bool(row[6] < 2.0**-46)
(True, True)
"""

import functools

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

OCTAVES = 64
SEGMENTS = 64  # an octave
COLUMNS = 8  # six coefficients, the bound, and room so that a row is a line of the cache
DEGREE = 5
_SERIES = 10  # terms
_FLOAT_ERROR = 2.0**-48
_SLOPE = 1.26  # above √(π/2), the largest |dx / d log u|
_UNITS = 8.0  # of 2⁻⁶³


@functools.cache
def table() -> Array:
    """One row a segment, from u = 2⁻⁶⁴ upwards."""
    from scipy.special import ndtri  # slow to import

    place = np.arange(OCTAVES * SEGMENTS)
    exponent, segment = place // SEGMENTS - OCTAVES, place % SEGMENTS
    x = np.zeros((_SERIES, len(place)))  # of x, and of its derivative
    slope = np.zeros_like(x)
    x[0] = -ndtri(np.ldexp(1 + (segment + 0.5) / SEGMENTS, exponent - 1))
    slope[0] = -np.ldexp(np.sqrt(np.pi / 2) * np.exp(np.square(x[0]) / 2), exponent)
    for k in range(_SERIES - 1):
        x[k + 1] = slope[k] / (k + 1)
        slope[k + 1] = _product(_products(x, slope, k), slope, k) / (k + 1)  # x'' = x x'²
    to, back = _chebyshev()
    half = (2.0 * SEGMENTS) ** -np.arange(_SERIES)[:, None]  # t in half-widths
    chebyshev = to @ (x * half)
    rows = _aligned(len(place))
    rows[:, : DEGREE + 1] = ((back @ chebyshev[: DEGREE + 1]) / half[: DEGREE + 1]).T
    lowest = np.ldexp(1 + segment / SEGMENTS, exponent)
    rows[:, DEGREE + 1] = _FLOAT_ERROR * (x[0] + 1 + _SLOPE) + _UNITS * _SLOPE * 2.0**-63 / lowest
    rows.setflags(write=False)
    return rows


def address() -> int:
    """Where the table lies, for a kernel."""
    return _address or _keep()


_address = 0


def _keep() -> int:
    global _address
    _address = table().ctypes.data
    return _address


def _aligned(rows: int) -> Array:
    """Zeros, each row a line of the cache."""
    raw = np.zeros((rows + 1) * COLUMNS)
    skipped = -raw.ctypes.data % (8 * COLUMNS) // 8
    return raw[skipped : skipped + rows * COLUMNS].reshape(rows, COLUMNS)


def _product(a: Array, b: Array, k: int) -> Array:
    """Term k of the product of two series."""
    return np.asarray(sum(a[i] * b[k - i] for i in range(k + 1)))


def _products(a: Array, b: Array, last: int) -> Array:
    return np.array([_product(a, b, k) for k in range(last + 1)])


def _chebyshev() -> tuple[Array, Array]:
    """From powers of t to Chebyshev polynomials, and back up to `DEGREE`."""
    from numpy.polynomial import chebyshev  # slow to import

    to, back = np.zeros((_SERIES, _SERIES)), np.zeros((DEGREE + 1, DEGREE + 1))
    for k in range(_SERIES):
        to[: k + 1, k] = chebyshev.poly2cheb(np.eye(_SERIES)[k, : k + 1])
    for k in range(DEGREE + 1):
        back[: k + 1, k] = chebyshev.cheb2poly(np.eye(_SERIES)[k, : k + 1])
    return to, back
