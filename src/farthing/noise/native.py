"""Build and load the C kernels (`kernels.c`), once per machine and user; numpy replaces missing ones.

`kernels` returns them, or None: no compiler, a failed build, no private folder to keep them in, or
FARTHING_NATIVE=0 in the environment. Every caller has a path without them that gives the same answers, so
they affect speed only. They are built when there is work for them, never by an import, with the system's C
compiler and without a shell.

Only a library that this user built is loaded. The folder ($XDG_CACHE_HOME/farthing, by default
~/.cache/farthing) and the file must belong to the user and be writable by nobody else; a file's name contains
the digest of its own content, of the source, the compiler, its flags and the processor, so that a truncated
or changed file, or one for another machine, is built anew. Files are written under a temporary name and
renamed.

`table` holds the half-normal quantile x(u), P(|Z| > x) = u, as polynomials for `kernels.c`.

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

import ctypes
import functools
import hashlib
import itertools
import os
import platform
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.errors import InvalidValue

_SOURCE = Path(__file__).with_name("kernels.c")
_COMPILERS = "cc", "gcc", "clang"
_FLAGS = ("-O3", "-march=native"), ("-O3",)
_ENOUGH = 2**14  # items of work from which a build pays
_SECONDS = 60  # seconds for one build

_P, _I, _D = "pointer", "integer", "number"
_TERMS = (_P, _D, _P, _P, _P, _P, _I, _D, _D, _D, _I, _P)
_ROWS, _CSR = (_P, _I, _I, _I), (_P, _P, _P, _I, _I, _I)
_MEASURE = (_D, _D, _D, _D, _P, _P, _P)
_DENSE = "f8", "f4", "u1"
_OUTER = (_P, _P, _P, _P, _I, _I, _I, _I, _I, _I)
_LAYER = (_P, _P, _P, _P, _P)
_SIGNATURES = {
    "gaussian": (_P, _I, _D, _P, _P),
    "release": (_P, _I, _D, _P, _P, _P, _D, _D, _P),
    **{f"release_drawn_{kind}": (_P, _I, _P, _P, _D, _P) for kind in ("i8", "i4")},
    "mixed_ahead": (_P, _I, _P, _I, _I, _I, _P, _I, _D),
    "heads": (_P, _I, _I, _I, _P, _I, _P),
    "leaps": (_P, _I, _P, _I, _I, _P, _P),
    "settle": (_P, _I, _P, _I),
    **{f"gradient_{kind}": (_P, _I, _I, _P, _I, _I, *_TERMS) for kind in _DENSE},
    **{f"centred_{kind}": (_P, _I, _I, _P, _I, _I, *_TERMS, _P) for kind in _DENSE},
    **{f"products_{kind}": (*_ROWS, _P, _P) for kind in _DENSE},
    **{f"measure_{kind}": (*_ROWS, _P, _P, _D, *_MEASURE) for kind in _DENSE},
    **{f"mixed_{kind}": (*_ROWS, _P, _P, _P, _I, _I, _P, _D, *_MEASURE) for kind in _DENSE},
    **{f"moments_{kind}": (*_ROWS, _P, _P, _P, _P, _D, _D, _I, _P, _P, _P) for kind in _DENSE},
    **{f"powers_{kind}": (*_ROWS, _P, _P, _P, _P, _D, _P) for kind in _DENSE},
    **{f"scatter_{kind}": (*_ROWS, *[_P] * 4, _D, _I, _P, _P) for kind in _DENSE},
    **{f"lengths_{kind}": (*_ROWS, *[_P] * 4, _I, _I, _I, *[_D] * 4, _P, _P, _P) for kind in _DENSE},
    "slice_rows": (_P, _P, _P, _P, _I, _P, _P, _P),
    "gradient_csr": (*_CSR, _I, *_TERMS),
    "products_csr": (*_CSR, _P, _P),
    "measure_csr": (*_CSR, _P, _P, _D, *_MEASURE),
    "powers_csr": (*_CSR, _I, _P, _P, _P, _P),
    "stretch": (_P, _I, _D, _P, _P, _P, _I, _D, _D, _I, _P),
    **{f"mapped_{kind}": (*_ROWS, _P, _P, _P) for kind in ("f8", "f4")},
    **{f"outside_{kind}": (*_ROWS, _P, _P) for kind in ("f8", "f4")},
    "cells": (_P, _I, _I, _I, _P, _I, _I, _P),
    "cell_numbers": (_P, _P, _I, _I, _I, _P, _P),
    "joined_cells": (_P, _P, _I, _I, _P, _I, _P, _P),
    "add_squares": (_P, _P, _P, _I, _I, _I, _D, _D, _P),
    "factors": (_P, _I, _D, _D, _P),
    "weighted_rows": (_P, _P, _I, _I, _P),
    "narrow_product": (_P, _P, _I, _I, _I, _P, _P),
    "group_sums": (_P, _P, _P, _I, _I, _I, _I, _D, _P, _P, _P),
    "layer_sums": (_P, _P, _I, _I, _I, _D, _I, _P, _P),
    "add_parts": (_P, _P, _I, _I, _I, _I, _P),
    **{f"clamped_outer_{kind}": _OUTER for kind in ("f8", "f4")},
    "lookup_squares": (_P, _P, _I, _I, _I, _P, _P),
    "lstm_forward": (*[_P] * 7, _I, _I, _I, _I, *[_P] * 5),
    "lstm_backward": (*[_P] * 6, _I, _I, _I, _I, *[_P] * 5),
    "windows": (*_LAYER, _I, _I, _P, _P, _P),
    "window_squares": (*_LAYER, _I, _I, _P, _P),
    "window_sums": (*_LAYER, _P, _I, _I, _I, _P, _P, _P),
}

Kernels = dict[str, Callable[..., Any]]
Floats = NDArray[Any]

_NOTHING = ctypes.c_char * 0
_lock = threading.Lock()
_loaded: Kernels | None = None
_tried = False
_asked = 0


def kernels(work: int = _ENOUGH) -> Kernels | None:
    """Return the kernels by name, or None; build nothing for too little ``work``."""
    global _asked
    if _tried:
        return _loaded
    _asked += work
    return _load() if _asked >= _ENOUGH else None


def _load() -> Kernels | None:
    global _loaded, _tried
    with _lock:
        if not _tried:
            try:
                _loaded = _open() if os.environ.get("FARTHING_NATIVE", "1") != "0" else None
            except (OSError, RuntimeError):  # no home, no source, or no writable folder
                _loaded = None
            _tried = True
        return _loaded


def _open() -> Kernels | None:
    if os.name != "posix" or sys.byteorder != "little" or sys.maxsize < 2**32:
        return None
    folder = _folder()
    compiler = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if folder is None:
        return None
    for flags in _FLAGS:
        processor = _processor()
        if compiler is None or ("-march=native" in flags and processor is None):
            continue
        parts = [_SOURCE.read_bytes(), compiler.encode(), " ".join(flags).encode(), processor or b""]
        parts.append(platform.platform().encode())
        key = hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:32]
        found = _find(folder, key) or _build(folder, key, compiler, flags)
        if found is not None:
            return found
    return None


def _folder() -> Path | None:
    """Return the user's own folder for built files, created if needed; None where it is not safe."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "farthing"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder if _own(folder, stat.S_ISDIR) and os.access(folder, os.W_OK) else None


def _own(path: Path, kind: Callable[[int], bool]) -> bool:
    """Return whether a path has this type, is this user's, and is writable by nobody else (no links)."""
    found = path.lstat()
    return kind(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _processor() -> bytes | None:
    """Return text that identifies this processor among others that share the folder; None if unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().split(b"\n\n")[0].split(b"\n")
    except OSError:
        return None
    wanted = (b"model name", b"flags", b"Features", b"CPU ")
    return b"\n".join(line for line in lines if line.startswith(wanted)) or None


def _find(folder: Path, key: str) -> Kernels | None:
    """Return a library that was built before, if it is unchanged."""
    for path in sorted(folder.glob(f"kernels-{key}-*.so")):
        digest = path.stem.rpartition("-")[2]
        if _own(path, stat.S_ISREG) and hashlib.sha256(path.read_bytes()).hexdigest() == digest:
            return _bind(path)
    return None


def _build(folder: Path, key: str, compiler: str, flags: tuple[str, ...]) -> Kernels | None:
    import subprocess  # slow to import

    handle, name = tempfile.mkstemp(dir=folder, prefix="building-", suffix=".so")
    os.close(handle)
    command = [compiler, *flags, "-shared", "-fPIC", "-o", name, str(_SOURCE), "-lm"]
    try:
        subprocess.run(command, check=True, timeout=_SECONDS, capture_output=True, stdin=subprocess.DEVNULL)
        os.chmod(name, 0o700)
        digest = hashlib.sha256(Path(name).read_bytes()).hexdigest()
        path = folder / f"kernels-{key}-{digest}.so"
        os.replace(name, path)
        return _bind(path)
    except subprocess.SubprocessError:
        return None
    finally:
        Path(name).unlink(missing_ok=True)


def _bind(path: Path) -> Kernels:
    types = {_P: ctypes.c_void_p, _I: ctypes.c_int64, _D: ctypes.c_double}
    library = ctypes.CDLL(str(path))  # its calls release the interpreter's lock
    bound: Kernels = {}
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = [types[argument] for argument in arguments]
        function.restype = ctypes.c_int64
        bound[name] = function
    return bound


def pointer(array: Floats | None) -> Any:
    """Return a pointer to a contiguous array for a kernel, or none; four times as quick as its address."""
    if array is None:
        return None
    if array.flags.writeable:
        return _NOTHING.from_buffer(array.data)  # refuses what is not contiguous
    if not array.flags.c_contiguous:
        raise InvalidValue("a kernel reads contiguous arrays")
    return array.ctypes.data


def clamped_outer_sum(delta: Any, a: Any, s: Any, out: Floats, *, threads: int = 1) -> bool:
    """Add Σ_b clamp(Σ_t δ_bt ⊗ a_bt, -s, s) to out without storing a matrix per b; False without kernels.

    ``delta`` is [B, T, O] and ``a`` [B, T, I] (or [B, O] and [B, I], for T = 1), ``s`` and ``out`` are
    [O, I], all float32 and contiguous; ``out`` may be float64, and then sums are. A NaN entry counts as
    zero: an example that is not finite must be zeroed by the caller, as a whole. Outputs are split among
    ``threads``.

    >>> out = np.zeros((1, 2), np.float32)
    >>> one, two = np.ones((1, 1), np.float32), np.full((1, 2), 2, np.float32)
    >>> out.tolist() if clamped_outer_sum(one, two, np.array([[1, 3]], np.float32), out) else [[1.0, 2.0]]
    [[1.0, 2.0]]
    """
    found = kernels()
    if found is None:
        return False
    batch, steps = (delta.shape[0], 1) if delta.ndim == 2 else delta.shape[:2]
    outs, ins = delta.shape[-1], a.shape[-1]
    shapes = a.shape[:-1] == delta.shape[:-1] and s.shape == out.shape == (outs, ins)
    floats = {array.dtype for array in (delta, a, s)} == {np.dtype(np.float32)}
    if not shapes or not floats or not all(array.flags.c_contiguous for array in (delta, a, s, out)):
        shown = [(array.dtype.name, array.shape) for array in (delta, a, s, out)]
        raise InvalidValue(f"delta, a, s and out must be contiguous and fit each other, got {shown}")
    run = found[{"float32": "clamped_outer_f4", "float64": "clamped_outer_f8"}[out.dtype.name]]
    pointers = [array.ctypes.data for array in (delta, a, s, out)]

    def part(first: int, last: int) -> None:
        run(*pointers, batch, steps, outs, ins, first, last)

    threads = validate.count(threads=threads)
    edges = [outs * i // threads for i in range(threads + 1)]
    others = [threading.Thread(target=part, args=pair) for pair in itertools.pairwise(edges[1:])]
    for other in others:
        other.start()
    part(edges[0], edges[1])
    for other in others:
        other.join()
    return True


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # a parent's thread, absent after the fork, may have held the old lock


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


Array = NDArray[np.float64]

OCTAVES = 64
SEGMENTS = 64  # segments in an octave
COLUMNS = 8  # six coefficients, the error bound, and padding to one cache line
DEGREE = 5
_SERIES = 10  # terms of the series
_FLOAT_ERROR = 2.0**-48
_SLOPE = 1.26  # above √(π/2), the largest |dx / d log u|
_UNITS = 8.0  # units of 2⁻⁶³


@functools.cache
def table() -> Array:
    """Return a table with one row per segment, from u = 2⁻⁶⁴ upwards."""
    from scipy.special import ndtri  # slow to import

    place = np.arange(OCTAVES * SEGMENTS)
    exponent, segment = place // SEGMENTS - OCTAVES, place % SEGMENTS
    x = np.zeros((_SERIES, len(place)))  # series of x, and of its derivative
    slope = np.zeros_like(x)
    x[0] = -ndtri(np.ldexp(1 + (segment + 0.5) / SEGMENTS, exponent - 1))
    slope[0] = -np.ldexp(np.sqrt(np.pi / 2) * np.exp(np.square(x[0]) / 2), exponent)
    for k in range(_SERIES - 1):
        x[k + 1] = slope[k] / (k + 1)
        slope[k + 1] = _product(_products(x, slope, k), slope, k) / (k + 1)  # x'' = x x'²
    to, back = _chebyshev()
    half = (2.0 * SEGMENTS) ** -np.arange(_SERIES)[:, None]  # t in half-widths of a segment
    chebyshev = to @ (x * half)
    rows = _aligned(len(place))
    rows[:, : DEGREE + 1] = ((back @ chebyshev[: DEGREE + 1]) / half[: DEGREE + 1]).T
    lowest = np.ldexp(1 + segment / SEGMENTS, exponent)
    rows[:, DEGREE + 1] = _FLOAT_ERROR * (x[0] + 1 + _SLOPE) + _UNITS * _SLOPE * 2.0**-63 / lowest
    rows.setflags(write=False)
    return rows


def address() -> int:
    """Return the address of the table, for a kernel."""
    return _address or _keep()


_address, _kept = 0, np.zeros(0)


def _keep() -> int:
    global _address, _kept
    _kept = table()  # kernels read it where it is, also after somebody has cleared every cache
    _address = _kept.ctypes.data
    return _address


def _aligned(rows: int) -> Array:
    """Return zeros with each row aligned to a cache line."""
    raw = np.zeros((rows + 1) * COLUMNS)
    skipped = -raw.ctypes.data % (8 * COLUMNS) // 8
    return raw[skipped : skipped + rows * COLUMNS].reshape(rows, COLUMNS)


def _product(a: Array, b: Array, k: int) -> Array:
    """Return term k of the product of two series."""
    return np.asarray(sum(a[i] * b[k - i] for i in range(k + 1)))


def _products(a: Array, b: Array, last: int) -> Array:
    return np.array([_product(a, b, k) for k in range(last + 1)])


def _chebyshev() -> tuple[Array, Array]:
    """Convert powers of t to Chebyshev polynomials, and back up to `DEGREE`."""
    from numpy.polynomial import chebyshev  # slow to import

    to, back = np.zeros((_SERIES, _SERIES)), np.zeros((DEGREE + 1, DEGREE + 1))
    for k in range(_SERIES):
        to[: k + 1, k] = chebyshev.poly2cheb(np.eye(_SERIES)[k, : k + 1])
    for k in range(DEGREE + 1):
        back[: k + 1, k] = chebyshev.cheb2poly(np.eye(_SERIES)[k, : k + 1])
    return to, back
