# mypy: ignore-errors
"""Compute norms from Gram matrices that are never stored, and sums of norm layers, by Triton kernels.

Imported only where Triton is installed; see `farthing.torch.kernels.lattice_noise`. The last dimension of
tensors must be contiguous.

**Norms.** Σ_ts (u_t · u_s)(v_t · v_s) by tiles of the lower triangle: a program holds one tile of both Gram
matrices in registers and contracts them at once. How a product rounds decides by how much a norm is rounded
up, so that it is never too small by more than what the noise's slack covers:

* "tf32x3", for float32: a factor is the sum of two of eleven bits. Without their smallest product a term is
  off by 5 · 2⁻²² at most, and the product of both matrices by `ROUNDED` of Σ_ts |u_t| |u_s| |v_t| |v_s|, the
  square of ``most`` = Σ_t |u_t| |v_t|. Where so much cancels that this might matter, it is added.
* "tf32": products of factors cut to eleven bits are exact, so that this is the norm of Σ_t u'_t ⊗ v'_t for
  the factors u', v' as cut. The weighted sum cuts or rounds them again, and after the weight: entry by entry
  by 3 · 2⁻¹⁰ at most, by Minkowski 3 · 2⁻¹⁰ ``most`` in norm. `COARSE` of ``most`` is added, always.

* bfloat16 factors: their products are exact, and so is this norm, to float32. The weighted sum rounds a
  factor times its weight to bfloat16, by 2⁻⁹ of each entry at most: `NARROW` of ``most`` is added, always.

What underflows in squares, `LOST` a factor at most, is added too.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROUNDED = 2.0**-18
CANCELLED = 2.0**-8  # of most²: a smaller square is rounded up
COARSE = 2.0**-8
NARROW = 2.0**-9
LOST = tl.constexpr(1e-17)
MOST = 4096  # positions
_CHUNK = 384  # of the width, in one program


@triton.jit
def _own(
    source,
    stride,
    at,
    positions,
    first,
    last,
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Return products of positions with each other: a tile on the diagonal."""
    found = tl.zeros([TILE, TILE], tl.float32)
    for start in range(first, last, STEP):
        place = start + tl.arange(0, STEP)
        inside = (at < positions)[:, None] & (place < last)[None, :]
        x = tl.load(source + at[:, None] * stride + place[None, :], mask=inside, other=0.0)
        found = tl.dot(x, tl.trans(x), found, input_precision=PRECISION)
    return found


@triton.jit
def _cross(
    source,
    stride,
    at,
    to,
    positions,
    first,
    last,
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Return products of some positions with earlier ones."""
    found = tl.zeros([TILE, TILE], tl.float32)
    for start in range(first, last, STEP):
        place = start + tl.arange(0, STEP)
        inside = (at < positions)[:, None] & (place < last)[None, :]
        x = tl.load(source + at[:, None] * stride + place[None, :], mask=inside, other=0.0)
        inside = (to < positions)[:, None] & (place < last)[None, :]
        y = tl.load(source + to[:, None] * stride + place[None, :], mask=inside, other=0.0)
        found = tl.dot(x, tl.trans(y), found, input_precision=PRECISION)
    return found


@triton.jit
def _contract(left, right, out, TILE: tl.constexpr):
    """Store Σ_ts of a tile on the diagonal, Σ_t |u_t| |v_t|, and a bound on its rounding error."""
    tl.store(out, tl.sum(tl.sum(left * right, 1), 0))
    at = tl.arange(0, TILE)
    diagonal = at[:, None] == at[None, :]
    one = tl.sqrt_rn(tl.sum(tl.where(diagonal, left, 0.0), 1))
    other = tl.sqrt_rn(tl.sum(tl.where(diagonal, right, 0.0), 1))
    tl.store(out + 1, tl.sum(one * other, 0))
    tl.store(out + 2, tl.sum(one + other + LOST, 0) * LOST)


@triton.jit
def _aside(square, out):
    """Return the contribution of a tile beside the diagonal."""
    tl.store(out, square)
    tl.store(out + 1, 0.0)
    tl.store(out + 2, 0.0)


@triton.jit
def _tiles(
    u,
    v,
    found,
    tiles,
    positions,
    height,
    width,
    u_example,
    u_position,
    v_example,
    v_position,
    LOOKUP: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Compute a tile of Σ_ts (u_t · u_s)(v_t · v_s), on the diagonal also Σ_t |u_t| |v_t| and its error."""
    pair, example = tl.program_id(0) % (tiles * tiles), (tl.program_id(0) // (tiles * tiles)).to(tl.int64)
    row, column = pair // tiles, pair % tiles
    u, v = u + example * u_example, v + example * v_example
    at, to = row * TILE + tl.arange(0, TILE), column * TILE + tl.arange(0, TILE)
    out = found + ((example * tiles + row) * tiles + column) * 3
    if LOOKUP:
        first = tl.load(u + at * u_position, mask=at < positions, other=-1)
        second = tl.load(u + to * u_position, mask=to < positions, other=-2)
        left = (first[:, None] == second[None, :]).to(tl.float32)
    if row == column:
        if not LOOKUP:
            left = _own(u, u_position, at, positions, 0, height, PRECISION, TILE, STEP)
        right = _own(v, v_position, at, positions, 0, width, PRECISION, TILE, STEP)
        _contract(left, right, out, TILE)
    elif row > column:
        if not LOOKUP:
            left = _cross(u, u_position, at, to, positions, 0, height, PRECISION, TILE, STEP)
        right = _cross(v, v_position, at, to, positions, 0, width, PRECISION, TILE, STEP)
        _aside(2.0 * tl.sum(tl.sum(left * right, 1), 0), out)
    else:
        _aside(0.0, out)


@triton.jit(do_not_specialize=["examples"])
def _parts(
    x,
    out,
    examples,
    positions,
    width,
    tiles,
    x_example,
    x_position,
    chunk,
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
):
    """Compute one tile of x_t · x_s over a part of the width."""
    pairs = tiles * tiles
    pair, unit = tl.program_id(0) % pairs, (tl.program_id(0) // pairs).to(tl.int64)
    part, example = unit // examples, unit % examples
    row, column = pair // tiles, pair % tiles
    at, to = row * TILE + tl.arange(0, TILE), column * TILE + tl.arange(0, TILE)
    place = tl.arange(0, TILE)
    out += (unit * pairs + pair) * TILE * TILE
    out += place[:, None] * TILE + place[None, :]
    first, x = part * chunk, x + example * x_example
    last = tl.minimum(first + chunk, width)
    if row == column:
        tl.store(out, _own(x, x_position, at, positions, first, last, PRECISION, TILE, STEP))
    elif row > column:
        tl.store(out, _cross(x, x_position, at, to, positions, first, last, PRECISION, TILE, STEP))


@triton.jit(do_not_specialize=["examples"])
def _joined(left, right, found, examples, tiles, left_parts, right_parts, TILE: tl.constexpr):
    """Compute the results of `_tiles` from the parts of both matrices."""
    at, pairs = tl.program_id(0).to(tl.int64), tiles * tiles
    pair = tl.program_id(0) % pairs
    row, column = pair // tiles, pair % tiles
    place = tl.arange(0, TILE)
    source = at * TILE * TILE + place[:, None] * TILE + place[None, :]
    step = tl.cast(examples, tl.int64) * pairs * TILE * TILE
    if row >= column:
        one, other = tl.zeros([TILE, TILE], tl.float32), tl.zeros([TILE, TILE], tl.float32)
        for part in range(left_parts):
            one += tl.load(left + source + part * step)
        for part in range(right_parts):
            other += tl.load(right + source + part * step)
        if row == column:
            _contract(one, other, found + at * 3, TILE)
        else:
            _aside(2.0 * tl.sum(tl.sum(one * other, 1), 0), found + at * 3)
    else:
        _aside(0.0, found + at * 3)


@triton.jit
def _roots(
    found,
    out,
    tiles,
    ROUNDED: tl.constexpr,
    CANCELLED: tl.constexpr,
    COARSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the norm of an example from its tiles, rounded up."""
    example, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    source, inside = found + (example * tiles + place) * 3, place < tiles
    square = tl.sum(tl.load(source, mask=inside, other=0.0).to(tl.float64), 0)
    most = tl.sum(tl.load(source + 1, mask=inside, other=0.0).to(tl.float64), 0)
    lost = tl.sum(tl.load(source + 2, mask=inside, other=0.0).to(tl.float64), 0)
    least = most * most
    raised = tl.where(square < 0.0, 0.0, square) + least * ROUNDED
    square = tl.where(square < least * CANCELLED, raised, square)
    tl.store(out + example, (tl.sqrt(square) + most * COARSE + lost).to(tl.float32))


@triton.jit
def _scales(
    x,
    delta,
    out,
    positions,
    width,
    part,
    eps,
    CENTRED: tl.constexpr,
    SHARES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute Σ_t δ_t x̂_t and Σ_t δ_t for a share of an example's positions; x̂ is x normalised."""
    example, share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, BLOCK)
    inside = (place < width)[None, :]
    scale, shift = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    last = tl.minimum(positions, (share + 1) * part)
    for start in range(share * part, last, ROWS):
        at = start + tl.arange(0, ROWS)
        here = inside & (at < last)[:, None]
        source = (example * positions + at)[:, None] * width + place[None, :]
        a = tl.load(x + source, mask=here, other=0.0).to(tl.float32)
        d = tl.load(delta + source, mask=here, other=0.0).to(tl.float32)
        if CENTRED:
            a = tl.where(here, a - (tl.sum(a, 1) / width)[:, None], 0.0)
        a = a * tl.rsqrt(tl.sum(a * a, 1) / width + eps)[:, None]
        scale += tl.sum(a * d, 0)
        shift += tl.sum(d, 0)
    to = out + (example * SHARES + share) * width + place
    tl.store(to, scale, mask=place < width)
    tl.store(to + tl.num_programs(0).to(tl.int64) * SHARES * width, shift, mask=place < width)


@triton.jit
def _blank(values, good, size, parts, part, BLOCK: tl.constexpr):
    """Replace an example that is not good by zeros."""
    example = (tl.program_id(0) // parts).to(tl.int64)
    if tl.load(good + example) == 0:
        first = tl.program_id(0) % parts * part
        for start in range(first, tl.minimum(first + part, size), BLOCK):
            place = start + tl.arange(0, BLOCK)
            none = tl.zeros([BLOCK], values.dtype.element_ty)
            tl.store(values + example * size + place, none, mask=place < size)


@triton.jit
def _weighted(values, factors, out, size, BLOCK: tl.constexpr):
    """Multiply an example by its factor; the result is zero if the factor is, even for NaN."""
    blocks = tl.cdiv(size, BLOCK)
    example = (tl.program_id(0) // blocks).to(tl.int64)
    place = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(factors + example)
    x = tl.load(values + example * size + place, mask=place < size, other=0.0).to(tl.float32)
    x = tl.where(factor == 0.0, 0.0, x * factor).to(out.dtype.element_ty)  # to the nearest
    tl.store(out + example * size + place, x, mask=place < size)


@functools.cache
def fits(device: torch.device) -> bool:
    """Return whether a device has products of eleven bits (TF32)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def norms(u: Tensor, v: Tensor, *, coarse: bool) -> Tensor:
    """Return |Σ_t u_t ⊗ v_t| per example: u is (B, T, p) or places in a table (B, T); v is (B, T, q).

    ``coarse``: in products of eleven bits, and rounded up for a sum in such products.
    """
    lookup = u.ndim == 2
    u, v = (side if side.stride(-1) == 1 else side.contiguous() for side in (u, v))
    examples, positions, width = v.shape
    tile = min(64, max(16, triton.next_power_of_2(positions)))
    tiles = triton.cdiv(positions, tile)
    found, out = (
        torch.empty(shape, device=v.device, dtype=torch.float32)
        for shape in ((examples, tiles * tiles, 3), (examples,))
    )
    exact = v.dtype is not torch.float32  # products of bfloat16 numbers are exact in float32
    height, strides = (1, u.stride()) if lookup else (u.shape[2], u.stride()[:2])
    args = u, v, found, tiles, positions, height, width, *strides, *v.stride()[:2]
    how = {"PRECISION": "tf32" if coarse else "tf32x3", "TILE": tile}
    with torch.cuda.device_of(v):
        if coarse or lookup or exact:
            _tiles[(examples * tiles * tiles,)](
                *args, LOOKUP=lookup, **how, STEP=64, num_warps=4, num_stages=3
            )
        else:
            parts = [_parts_of(side, tiles, how) for side in (u, v)]
            lengths = (len(side) for side in parts)
            _joined[(examples * tiles * tiles,)](*parts, found, examples, tiles, *lengths, TILE=tile)
        _roots[(examples,)](
            found,
            out,
            tiles * tiles,
            ROUNDED=ROUNDED,
            CANCELLED=CANCELLED,
            COARSE=NARROW if exact else COARSE if coarse else 0.0,
            BLOCK=triton.next_power_of_2(tiles * tiles),
        )
    return out


def _parts_of(x: Tensor, tiles: int, how: dict[str, Any]) -> Tensor:
    """Return the lower tiles of Gram matrices over parts of the width: enough programs to fill a GPU."""
    (examples, positions, width), tile = x.shape, how["TILE"]
    parts = triton.cdiv(width, _CHUNK)
    out = torch.empty(parts, examples, tiles * tiles, tile, tile, device=x.device, dtype=torch.float32)
    args = x, out, examples, positions, width, tiles, *x.stride()[:2], _CHUNK
    _parts[(parts * examples * tiles * tiles,)](*args, **how, STEP=32, num_warps=4, num_stages=3)
    return out


def norm_sums(x: Tensor, delta: Tensor, eps: float, centred: bool = True) -> tuple[Tensor, Tensor]:
    """Return Σ_t δ_t x̂_t and Σ_t δ_t, (B, width) each, with x̂ = (x - mean) / √(variance + eps).

    Not ``centred``, x̂ = x / √(mean square + eps).
    """
    examples, positions, width = x.shape
    shares = max(1, min(triton.cdiv(positions, 16), triton.cdiv(1024, examples)))
    block = triton.next_power_of_2(width)
    part = triton.cdiv(positions, shares)
    out = torch.empty(2, examples, shares, width, device=x.device, dtype=torch.float32)
    args = x.contiguous(), delta.contiguous(), out, positions, width, part, eps
    with torch.cuda.device_of(x):
        _scales[(examples, shares)](
            *args, CENTRED=centred, SHARES=shares, ROWS=max(1, 4096 // block), BLOCK=block, num_warps=8
        )
    scale, shift = out.sum(2)
    return scale, shift


def blank(values: Tensor, good: Tensor) -> None:
    """Overwrite examples that are not good by zeros; others are not read."""
    size = values[0].numel()
    part = triton.cdiv(triton.cdiv(size, 8), 1024) * 1024
    parts = triton.cdiv(size, part)
    with torch.cuda.device_of(values):
        _blank[(len(values) * parts,)](values, good.view(torch.uint8), size, parts, part, BLOCK=1024)


def weighted(values: Tensor, factors: Tensor) -> Tensor:
    """Return every example times its factor; zeros if the factor is zero."""
    values, size = values.contiguous(), values[0].numel()
    out = torch.empty_like(values)
    with torch.cuda.device_of(values):
        _weighted[(len(values) * triton.cdiv(size, 4096),)](
            values, factors, out, size, BLOCK=4096, num_warps=8
        )
    return out
