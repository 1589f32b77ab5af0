# mypy: ignore-errors
"""Draw noise on the lattice and release it, by Triton kernels.

Imported only where Triton is installed. On a machine without a GPU they run, slowly, under
``TRITON_INTERPRET=1``: that is how they are tested. Tensors given to them must be contiguous.

**Noise.** A launch turns a fresh key into blocks of ChaCha20 (RFC 8439, 20 rounds; the number of the block is
the counter), a block into eight words, a word into a sample: its first bit is the sign, the other 63 stand
for all uniforms u that begin with them, and |Z| = -Φ⁻¹(u/2). The quantile is a rational function of 1 - u
above u = 0.2 and of √-log(u/2) below, fitted to a relative error under 2⁻⁵⁶. Rounding brings that to less
than 2⁻⁵⁰, which the tests hold it to; `ERROR` allows 2⁻⁴⁹. Where a cell edge is within that error, or within
the width of the word's interval, the kernel does not decide: it notes the place, and
`farthing.torch.kernels.noise.settle` decides from the same word in exact arithmetic.

**AdaDP.** `adapted` takes a step of AdaDP in one pass over the coordinates.
"""

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

ERROR = 2.0**-49  # of the quantile, relative
LANES = 256  # blocks of ChaCha20 a program; a block makes eight samples
NARROW = 26  # bits up to which samples are kept in 32 bits: |Z| < 32
_MAGIC = tl.constexpr(6755399441055744.0)  # 1.5 · 2^52: adding it rounds to a whole number, in the low bits
_MAGIC_BITS = tl.constexpr(0x4338000000000000)
_LARGEST = tl.constexpr(4503599627370496.0)  # 2^52 cells: farther out a sum is clamped


@triton.jit
def _quarter(a, b, c, d):
    a = a + b
    d = d ^ a
    d = (d << 16) | (d >> 16)
    c = c + d
    b = b ^ c
    b = (b << 12) | (b >> 20)
    a = a + b
    d = d ^ a
    d = (d << 8) | (d >> 24)
    c = c + d
    b = b ^ c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@triton.jit
def _chacha(k0, k1, k2, k3, k4, k5, k6, k7, n0, n1, n2, n3):
    """Return ChaCha20's block function of a key, and of counter and nonce, a vector per lane."""
    zero = n0 ^ n0
    c0, c1, c2, c3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    k0, k1, k2, k3 = zero + k0, zero + k1, zero + k2, zero + k3
    k4, k5, k6, k7 = zero + k4, zero + k5, zero + k6, zero + k7
    x0, x1, x2, x3, x4, x5, x6, x7 = c0, c1, c2, c3, k0, k1, k2, k3
    x8, x9, x10, x11, x12, x13, x14, x15 = k4, k5, k6, k7, n0, n1, n2, n3
    for _ in range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    w0, w1, w2 = _word(x0 + c0, x1 + c1), _word(x2 + c2, x3 + c3), _word(x4 + k0, x5 + k1)
    w3, w4, w5 = _word(x6 + k2, x7 + k3), _word(x8 + k4, x9 + k5), _word(x10 + k6, x11 + k7)
    w6, w7 = _word(x12 + n0, x13 + n1), _word(x14 + n2, x15 + n3)
    return w0, w1, w2, w3, w4, w5, w6, w7


@triton.jit
def _word(low, high):
    return (high.to(tl.uint64) << 32) | low.to(tl.uint64)


@triton.jit
def _half_normal(odd):
    """Return |Z| for u = odd / 2^64, with a relative error below `ERROR`."""
    u = odd.to(tl.float64) * 5.421010862427522e-20
    q = ((odd ^ odd) - odd).to(tl.float64) * 5.421010862427522e-20  # 1 - u, of the same word
    t = 0.64 - q * q
    p = t * 0.020729190568833523 + 1.247245921104778
    p = p * t + 11.613228224145375
    p = p * t + 37.491120659530466
    p = p * t + 53.97803051890621
    p = p * t + 37.85999320873545
    p = p * t + 12.632299739323324
    p = (p * t + 1.6019394569307506) * q
    d = t * 0.09049551067340841 + 2.2546122587750483
    d = d * t + 14.317908090571532
    d = d * t + 36.61037963739798
    d = d * t + 44.86565176550616
    d = d * t + 27.927117640469522
    d = d * t + 8.493822354536128
    d = d * t + 1.0
    # -log(u/2) from the exponent and 2 artanh((m - 1) / (m + 1)), with m between √½ and √2
    raw = (u * 0.5).to(tl.int64, bitcast=True)
    e = (raw - 0x3FE6A09E667F3BCD) >> 52
    m = (raw - (e << 52)).to(tl.float64, bitcast=True)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    a = z * 0.14617589150677499 + 0.15331630977520247
    a = a * z + 0.18182891794864686
    a = a * z + 0.22222211099110173
    a = a * z + 0.28571428626186746
    a = a * z + 0.3999999999989906
    a = a * z + 0.666666666666667
    r = tl.sqrt(-(e.to(tl.int32).to(tl.float64) * 0.6931471805599453 + (2.0 * s + s * z * a))) - 1.5
    n = r * 8.003809330529473e-05 + 0.003246724433657072
    n = n * r + 0.048022975449629045
    n = n * r + 0.36237955598652705
    n = n * r + 1.5740660980404657
    n = n * r + 4.039833074405389
    n = n * r + 5.911936369560515
    n = n * r + 4.423274444523464
    n = n * r + 1.2513729290570323
    f = r * 3.6095007234700056e-11 + 5.659088273652834e-05
    f = f * r + 0.002211373848535256
    f = f * r + 0.030800986685331343
    f = f * r + 0.21462646980688438
    f = f * r + 0.840219796448687
    f = f * r + 1.8594893326915287
    f = f * r + 2.1489385262290366
    f = f * r + 1.0
    central = u > 0.2
    return tl.where(central, p, n) / tl.where(central, d, f), u


@triton.jit
def _nearest(word, stretch):
    """Return round(stretch Z), and whether the rounding is certain."""
    x, u = _half_normal((word << 1) | 1)
    scaled = x * stretch
    shifted = scaled + _MAGIC
    distance = tl.abs(scaled - (shifted - _MAGIC))
    # The second term is the width of the word's interval, 2^-62 / u of |Z|, brought over.
    certain = (0.5 - distance - scaled * 1.7763568394002505e-15) * u > stretch * 2.168404344971009e-19
    cell = shifted.to(tl.int64, bitcast=True) - _MAGIC_BITS
    return tl.where((word >> 63) == 0, cell, -cell), certain


@triton.jit
def _emit(out, place, size, word, stretch):
    """Store the sample of a word; return where its rounding is open."""
    cell, certain = _nearest(word, stretch)
    inside = place < size
    tl.store(out + place, cell.to(out.dtype.element_ty), mask=inside)
    return (inside & (certain == 0)).to(tl.int32)


@triton.jit
def _note(places, place, doubt, most):
    slot = tl.atomic_add(places + place * 0, tl.full(place.shape, 1, tl.int64), mask=doubt)
    tl.store(places + 1 + slot, place, mask=doubt & (slot < most))


@triton.jit(do_not_specialize=["size", "stretch", "most", "k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7"])
def _gaussian(out, places, size, stretch, most, k0, k1, k2, k3, k4, k5, k6, k7, LANES: tl.constexpr):
    """Store round(stretch Z_i) in ``out``; places[0] counts open samples, whose positions follow."""
    program = tl.program_id(0).to(tl.int64)
    block = program * LANES + tl.arange(0, LANES)
    counter, carry = block.to(tl.uint32), (block >> 32).to(tl.uint32)
    zero = counter ^ counter
    w0, w1, w2, w3, w4, w5, w6, w7 = _chacha(
        k0.to(tl.uint32, bitcast=True),
        k1.to(tl.uint32, bitcast=True),
        k2.to(tl.uint32, bitcast=True),
        k3.to(tl.uint32, bitcast=True),
        k4.to(tl.uint32, bitcast=True),
        k5.to(tl.uint32, bitcast=True),
        k6.to(tl.uint32, bitcast=True),
        k7.to(tl.uint32, bitcast=True),
        counter,
        carry,
        zero,
        zero,
    )
    scale = stretch.to(tl.float64, bitcast=True)
    place = program * (8 * LANES) + tl.arange(0, LANES)
    doubts = _emit(out, place, size, w0, scale)
    doubts |= _emit(out, place + LANES, size, w1, scale) << 1
    doubts |= _emit(out, place + 2 * LANES, size, w2, scale) << 2
    doubts |= _emit(out, place + 3 * LANES, size, w3, scale) << 3
    doubts |= _emit(out, place + 4 * LANES, size, w4, scale) << 4
    doubts |= _emit(out, place + 5 * LANES, size, w5, scale) << 5
    doubts |= _emit(out, place + 6 * LANES, size, w6, scale) << 6
    doubts |= _emit(out, place + 7 * LANES, size, w7, scale) << 7
    if tl.max(doubts, 0) > 0:
        for j in range(8):
            _note(places, place + j * LANES, ((doubts >> j) & 1) == 1, most)


@triton.jit(do_not_specialize=["size", "inverse", "cell"])
def _release(total, noise, scale, out, size, inverse, cell, VECTOR: tl.constexpr, BLOCK: tl.constexpr):
    """Store the sum on the grid plus noise, as floats; a sum that is not a number counts as zero."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    wide, by = cell.to(tl.float64, bitcast=True), inverse.to(tl.float64, bitcast=True)
    cells, width = _on_grid(total, scale, place, inside, wide, by, VECTOR)
    cells += tl.load(noise + place, mask=inside, other=0).to(tl.int64)
    tl.store(out + place, (cells.to(tl.float64) * width).to(tl.float32), mask=inside)


@triton.jit
def _on_grid(total, scale, place, inside, cell, inverse, VECTOR: tl.constexpr):
    """Return a sum in cells of the grid, and a cell's width; NaN counts as zero."""
    x = tl.load(total + place, mask=inside, other=0.0).to(tl.float64)
    width = cell
    if VECTOR:
        each = tl.load(scale + place, mask=inside, other=1.0).to(tl.float64)
        x = x / each * inverse
        width = width * each
    else:
        x = x * inverse
    x = tl.where(x == x, tl.minimum(tl.maximum(x, -_LARGEST), _LARGEST), 0.0)
    return tl.floor(x + 0.5).to(tl.int64), width


@triton.jit
def _add_to(total, scale, place, size, word, stretch, cell, inverse, VECTOR: tl.constexpr):
    """Replace a sum by its release, unless the sample of its word is open; return where it is open."""
    noise, certain = _nearest(word, stretch)
    inside = place < size
    cells, width = _on_grid(total, scale, place, inside, cell, inverse, VECTOR)
    value = ((cells + noise).to(tl.float64) * width).to(tl.float32)
    tl.store(total + place, value, mask=inside & certain)
    return (inside & (certain == 0)).to(tl.int32)


@triton.jit(do_not_specialize=["size", "stretch", "most", "cell", "inverse", *(f"k{n}" for n in range(8))])
def _noisy(
    total,
    scale,
    places,
    size,
    stretch,
    most,
    cell,
    inverse,
    k0,
    k1,
    k2,
    k3,
    k4,
    k5,
    k6,
    k7,
    VECTOR: tl.constexpr,
    LANES: tl.constexpr,
):
    """Draw and release as `_gaussian` and `_release` do, in the sum's memory, without storing samples."""
    program = tl.program_id(0).to(tl.int64)
    block = program * LANES + tl.arange(0, LANES)
    counter, carry = block.to(tl.uint32), (block >> 32).to(tl.uint32)
    zero = counter ^ counter
    w0, w1, w2, w3, w4, w5, w6, w7 = _chacha(
        k0.to(tl.uint32, bitcast=True),
        k1.to(tl.uint32, bitcast=True),
        k2.to(tl.uint32, bitcast=True),
        k3.to(tl.uint32, bitcast=True),
        k4.to(tl.uint32, bitcast=True),
        k5.to(tl.uint32, bitcast=True),
        k6.to(tl.uint32, bitcast=True),
        k7.to(tl.uint32, bitcast=True),
        counter,
        carry,
        zero,
        zero,
    )
    to, by = stretch.to(tl.float64, bitcast=True), inverse.to(tl.float64, bitcast=True)
    wide = cell.to(tl.float64, bitcast=True)
    place = program * (8 * LANES) + tl.arange(0, LANES)
    doubts = _add_to(total, scale, place, size, w0, to, wide, by, VECTOR)
    doubts |= _add_to(total, scale, place + LANES, size, w1, to, wide, by, VECTOR) << 1
    doubts |= _add_to(total, scale, place + 2 * LANES, size, w2, to, wide, by, VECTOR) << 2
    doubts |= _add_to(total, scale, place + 3 * LANES, size, w3, to, wide, by, VECTOR) << 3
    doubts |= _add_to(total, scale, place + 4 * LANES, size, w4, to, wide, by, VECTOR) << 4
    doubts |= _add_to(total, scale, place + 5 * LANES, size, w5, to, wide, by, VECTOR) << 5
    doubts |= _add_to(total, scale, place + 6 * LANES, size, w6, to, wide, by, VECTOR) << 6
    doubts |= _add_to(total, scale, place + 7 * LANES, size, w7, to, wide, by, VECTOR) << 7
    if tl.max(doubts, 0) > 0:
        for j in range(8):
            _note(places, place + j * LANES, ((doubts >> j) & 1) == 1, most)


@triton.jit(do_not_specialize=["k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7", "n0", "n1", "n2", "n3"])
def _blocks(out, k0, k1, k2, k3, k4, k5, k6, k7, n0, n1, n2, n3, LANES: tl.constexpr):
    """Store eight words per block, from the counter n0 on: the cipher alone, for its tests."""
    lane = tl.arange(0, LANES)
    counter = lane.to(tl.uint32) + n0.to(tl.uint32, bitcast=True)
    zero = counter ^ counter
    w0, w1, w2, w3, w4, w5, w6, w7 = _chacha(
        k0.to(tl.uint32, bitcast=True),
        k1.to(tl.uint32, bitcast=True),
        k2.to(tl.uint32, bitcast=True),
        k3.to(tl.uint32, bitcast=True),
        k4.to(tl.uint32, bitcast=True),
        k5.to(tl.uint32, bitcast=True),
        k6.to(tl.uint32, bitcast=True),
        k7.to(tl.uint32, bitcast=True),
        counter,
        zero + n1.to(tl.uint32, bitcast=True),
        zero + n2.to(tl.uint32, bitcast=True),
        zero + n3.to(tl.uint32, bitcast=True),
    )
    tl.store(out + lane * 8 + 0, w0.to(tl.int64, bitcast=True))
    tl.store(out + lane * 8 + 1, w1.to(tl.int64, bitcast=True))
    tl.store(out + lane * 8 + 2, w2.to(tl.int64, bitcast=True))
    tl.store(out + lane * 8 + 3, w3.to(tl.int64, bitcast=True))
    tl.store(out + lane * 8 + 4, w4.to(tl.int64, bitcast=True))
    tl.store(out + lane * 8 + 5, w5.to(tl.int64, bitcast=True))
    tl.store(out + lane * 8 + 6, w6.to(tl.int64, bitcast=True))
    tl.store(out + lane * 8 + 7, w7.to(tl.int64, bitcast=True))


def blocks(key: bytes, counter: int, nonce: bytes, count: int, device: torch.device) -> Tensor:
    """Return ``count`` blocks of ChaCha20's key stream (a power of two), eight words each."""
    out = torch.empty(count, 8, dtype=torch.int64, device=device)
    words = struct.unpack("<8i", key) + struct.unpack("<i", struct.pack("<I", counter))
    with torch.cuda.device_of(out):
        _blocks[(1,)](out, *words, *struct.unpack("<3i", nonce), LANES=count)
    return out


def gaussian(
    key: bytes, size: int, bits: int, device: torch.device, room: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``size`` samples round(2^bits Z), in ``room`` if it fits, and the places of open ones."""
    kind = torch.int32 if bits <= NARROW else torch.int64
    fits = room is not None and room.shape == (size,) and room.dtype == kind and room.device == device
    out = room if fits else torch.empty(size, dtype=kind, device=device)
    most = 64 + round(size * 2.0 ** (bits - 45))  # sixteen times what is expected
    places = torch.zeros(1 + most, dtype=torch.int64, device=device)
    grid = (triton.cdiv(size, 8 * LANES),)
    with torch.cuda.device_of(out):
        _gaussian[grid](out, places, size, bits_of(2.0**bits), most, *struct.unpack("<8i", key), LANES=LANES)
    return out, places


def noisy(key: bytes, total: Tensor, scale: Tensor | None, cell: float, bits: int) -> Tensor:
    """Release a sum in its own memory, but for the places that it returns, where roundings are open."""
    size = total.numel()
    most = 64 + round(size * 2.0 ** (bits - 45))
    places = torch.zeros(1 + most, dtype=torch.int64, device=total.device)
    numbers = size, bits_of(2.0**bits), most, bits_of(cell), bits_of(1 / cell)
    each = total if scale is None else scale
    with torch.cuda.device_of(total):
        _noisy[(triton.cdiv(size, 8 * LANES),)](
            *(total, each, places, *numbers, *struct.unpack("<8i", key)),
            VECTOR=scale is not None,
            LANES=LANES,
        )
    return places


def block_of(place: int) -> tuple[int, int]:
    """Return the block of the key stream, and which of its eight words, that make the sample at a place."""
    program, within = divmod(place, 8 * LANES)
    return program * LANES + within % LANES, within // LANES


def release(total: Tensor, noise: Tensor, scale: Tensor | None, cell: float) -> Tensor:
    """Return (round(total / scale / cell) + noise) · cell · scale, as float32."""
    out = torch.empty_like(total, dtype=torch.float32)
    grid = (triton.cdiv(total.numel(), 1024),)
    each = total if scale is None else scale
    args = total, noise, each, out, total.numel(), bits_of(1 / cell), bits_of(cell)
    with torch.cuda.device_of(total):
        _release[grid](*args, VECTOR=scale is not None, BLOCK=1024)
    return out


@triton.jit(do_not_specialize=["size", "head", "rows", "count", "far"])
def _less_earlier(own, ring, column, size, head, rows, count, far, BLOCK: tl.constexpr):
    """Take the rounded sum of earlier noise, the latest first, from own noise; keep it as the latest."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    taken = tl.zeros([BLOCK], tl.float64)
    for j in range(count):
        row = ((head + j) % rows).to(tl.int64)
        earlier = tl.load(ring + row * size + place, mask=inside, other=0)
        taken += tl.load(column + j) * earlier.to(tl.float64)
    cells = (taken + _MAGIC).to(tl.int64, bitcast=True) - _MAGIC_BITS
    left = tl.load(own + place, mask=inside, other=0).to(tl.int64) - cells
    tl.store(own + place, left, mask=inside)
    kept = tl.minimum(tl.maximum(left, -far), far)
    row = ((head + rows - 1) % rows).to(tl.int64)
    tl.store(ring + row * size + place, kept.to(tl.int32), mask=inside)


def less_earlier(own: Tensor, ring: Tensor, column: Tensor, head: int, count: int, far: int) -> None:
    """Take from ``own``, int64, what ``count`` rows of the ring do, of which ``head`` is the latest.

    Row head - 1 of the ring then holds ``own``, not beyond ``far``. All is done in place, in one pass.
    """
    grid, rows = (triton.cdiv(own.numel(), 1024),), len(ring)
    with torch.cuda.device_of(own):
        _less_earlier[grid](own, ring, column, own.numel(), head, rows, count, far, BLOCK=1024)


def bits_of(value: float) -> int:
    """Return a float64 as an integer: Triton takes Python's floats for float32."""
    return struct.unpack("<q", struct.pack("<d", value))[0]


@triton.jit(do_not_specialize=["size", "momentum", "learns", "adapts", "eps"])
def _adapt(
    released,
    variance,
    mean,
    signal,
    square,
    out,
    size,
    momentum,
    learns,
    adapts,
    eps,
    MOMENTUM: tl.constexpr,
    LEARNS: tl.constexpr,
    ADAPTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    step = tl.load(released + place, mask=inside, other=0.0)
    squared = step * step
    if LEARNS:
        noise = tl.load(variance + place, mask=inside, other=0.0)
        old = tl.load(signal + place, mask=inside, other=0.0)
        tl.store(signal + place, old + learns * (squared - noise - old), mask=inside)
    if MOMENTUM:
        step += momentum * tl.load(mean + place, mask=inside, other=0.0)
        tl.store(mean + place, step, mask=inside)
    if ADAPTS:
        old = tl.load(square + place, mask=inside, other=0.0)
        new = old + adapts * (squared - old)
        tl.store(square + place, new, mask=inside)
        step = step / tl.sqrt(new + eps)
    tl.store(out + place, step, mask=inside)


def adapted(
    released: Tensor,
    variance: Tensor,
    mean: Tensor | None,
    signal: Tensor | None,
    square: Tensor | None,
    rates: tuple[float, float, float, float],
) -> Tensor:
    """Do what `farthing.torch.methods.adadp.adapted` does, on a GPU."""
    out, size = torch.empty_like(released), released.numel()
    states = (out if one is None else one for one in (mean, signal, square))
    with torch.cuda.device_of(released):
        _adapt[(triton.cdiv(size, 1024),)](
            *(released, variance, *states, out, size, *rates),
            MOMENTUM=mean is not None,
            LEARNS=signal is not None,
            ADAPTS=square is not None,
            BLOCK=1024,
        )
    return out
