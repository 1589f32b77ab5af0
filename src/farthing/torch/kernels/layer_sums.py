# mypy: ignore-errors
"""Sum gradients of depthwise convolutions and group norms in one pass each, by Triton kernels.

Imported only where Triton is installed; see `farthing.torch.kernels.lattice_noise`. Gradients of both layers
are small, a few numbers a channel, and what is slow about them elsewhere is what lies between: windows copied
out of an input, an input normalised again. Tensors may be float32 or bfloat16, and sums are made in float32.
Clamped sums hold no example's gradient; their tensors must be contiguous.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _depthwise(
    delta,
    x,
    out,
    filters,
    channels,
    sites,
    taps_y,
    high,
    wide,
    out_wide,
    stride_y,
    stride_x,
    apart_y,
    apart_x,
    pad_y,
    pad_x,
    taps_x,
    EACH: tl.constexpr,
    TAPS: tl.constexpr,
    STEP: tl.constexpr,
    FILTERS: tl.constexpr,
):
    """Sum δ · window over one image's windows, for filters that see one channel each, and a row of taps.

    Positions are added up where they lie in a tile, and the tile at the end.
    """
    image, down = (tl.program_id(0) // taps_y).to(tl.int64), tl.program_id(0) % taps_y
    filter, tap = tl.program_id(1) * FILTERS + tl.arange(0, FILTERS), tl.arange(0, TAPS)
    delta += image * sites * filters
    x += image * high * wide * channels
    channel = filter if EACH == 1 else filter // EACH
    real = (filter < filters)[None, :]
    found = tl.zeros([TAPS, STEP, FILTERS], tl.float32)
    for start in range(0, sites, STEP):
        site = start + tl.arange(0, STEP)
        at = site[:, None] * filters + filter[None, :]
        d = tl.load(delta + at, mask=real & (site < sites)[:, None], other=0.0)
        y = site // out_wide * stride_y - pad_y + down * apart_y
        z = (site % out_wide * stride_x - pad_x)[None, :] + (tap * apart_x)[:, None]
        there = ((y >= 0) & (y < high) & (site < sites))[None, :] & (z >= 0) & (z < wide)
        there = there & (tap < taps_x)[:, None]
        place = ((y * wide)[None, :] + z) * channels
        at = place[:, :, None] + channel[None, None, :]
        seen = tl.load(x + at, mask=there[:, :, None] & real[None, :, :], other=0.0)
        found += seen.to(tl.float32) * d.to(tl.float32)[None, :, :]
    to = (image * filters + filter) * (taps_y * taps_x) + down * taps_x
    inside = (tap < taps_x)[:, None] & (filter < filters)[None, :]
    tl.store(out + to[None, :] + tap[:, None], tl.sum(found, 1), mask=inside)


@triton.jit
def _groups(
    x, delta, out, groups, channels, sites, eps, EACH: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr
):
    """Compute Σ δ x̂ and Σ δ per channel of one group of one image; x̂ is x normalised."""
    image, group = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups
    row, count = tl.arange(0, ROWS), EACH * sites
    source = (image * channels + group * EACH) * sites
    total, square = tl.zeros([ROWS, STEP], tl.float32), tl.zeros([ROWS, STEP], tl.float32)
    for start in range(0, sites, STEP):
        site = start + tl.arange(0, STEP)
        here = (row < EACH)[:, None] & (site < sites)[None, :]
        a = tl.load(x + source + row[:, None] * sites + site[None, :], mask=here, other=0.0)
        total += a.to(tl.float32)
    mean = tl.sum(tl.sum(total, 1), 0) / count
    scale, shift = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    for start in range(0, sites, STEP):
        site = start + tl.arange(0, STEP)
        here = (row < EACH)[:, None] & (site < sites)[None, :]
        place = source + row[:, None] * sites + site[None, :]
        a = tl.load(x + place, mask=here, other=0.0).to(tl.float32)
        d = tl.load(delta + place, mask=here, other=0.0).to(tl.float32)
        a = tl.where(here, a - mean, 0.0)
        square += a * a
        scale += tl.sum(a * d, 1)
        shift += tl.sum(d, 1)
    scale *= tl.rsqrt(tl.sum(tl.sum(square, 1), 0) / count + eps)
    to = out + image * channels + group * EACH + row
    tl.store(to, scale, mask=row < EACH)
    tl.store(to + (tl.num_programs(0) // groups).to(tl.int64) * channels, shift, mask=row < EACH)


def _power(size: int, least: int, most: int) -> int:
    return max(least, min(most, triton.next_power_of_2(size)))


class ConvolutionShape:
    """The numbers of a convolution in one or two dimensions, as the kernels want them."""

    def __init__(self, module: Any, padded: bool) -> None:
        def pair(values: Any, fill: int) -> tuple[int, int]:
            return (fill, *values) if len(values) == 1 else tuple(values)

        self.kernel, self.stride = pair(module.kernel_size, 1), pair(module.stride, 1)
        self.dilation = pair(module.dilation, 1)
        self.padding = (0, 0) if padded else pair(module.padding, 0)
        self.groups, self.filters, self.channels = module.groups, module.out_channels, module.in_channels
        self.taps = self.kernel[0] * self.kernel[1]

    def numbers(self, sides: tuple[int, ...], out_sides: tuple[int, ...]) -> tuple[int, ...]:
        """Return sides of an image and of its output, strides, dilations, paddings and taps in a line."""
        high, wide = (1, *sides)[-2:]
        return high, wide, out_sides[-1], *self.stride, *self.dilation, *self.padding, self.kernel[1]


def depthwise(shape: ConvolutionShape, delta: Tensor, x: Tensor) -> Tensor:
    """Return every image's gradient, (images, filters · taps), where a filter sees one channel."""
    out = torch.empty(len(x), shape.filters * shape.taps, device=x.device, dtype=torch.float32)
    some, taps = min(64, triton.next_power_of_2(shape.filters)), triton.next_power_of_2(shape.kernel[1])
    numbers = shape.numbers(tuple(x.shape[2:]), tuple(delta.shape[2:]))
    sizes = shape.filters, shape.channels, delta[0, 0].numel(), shape.kernel[0]
    with torch.cuda.device_of(x):
        _depthwise[(len(x) * shape.kernel[0], triton.cdiv(shape.filters, some))](
            *(channels_last(delta), channels_last(x), out, *sizes, *numbers),
            EACH=shape.filters // shape.channels,
            TAPS=taps,
            STEP=max(4, min(16, 64 // taps)),
            FILTERS=some,
            num_warps=4,
        )
    return out


@triton.jit
def _last(source, out, channels, sites, CHANNELS: tl.constexpr, SITES: tl.constexpr):
    """Move a tile of an image to channels-last order."""
    across = tl.cdiv(sites, SITES)
    tiles = tl.cdiv(channels, CHANNELS) * across
    image, tile = (tl.program_id(0) // tiles).to(tl.int64) * channels * sites, tl.program_id(0) % tiles
    channel = tile // across * CHANNELS + tl.arange(0, CHANNELS)
    site = tile % across * SITES + tl.arange(0, SITES)
    inside = (channel < channels)[:, None] & (site < sites)[None, :]
    found = tl.load(source + image + channel[:, None] * sites + site[None, :], mask=inside, other=0.0)
    tl.store(out + image + site[None, :] * channels + channel[:, None], found, mask=inside)


def channels_last(x: Tensor) -> Tensor:
    """Return images (n, channels, *sides) as (n, sites, channels), without a copy where they lie so."""
    turned = x.movedim(1, -1)
    if turned.is_contiguous():
        return turned.flatten(1, -2)
    (images, channels), sites = x.shape[:2], x[0, 0].numel()
    out = torch.empty(images, sites, channels, device=x.device, dtype=x.dtype)
    if not out.numel():
        return out
    tile = min(64, max(16, triton.next_power_of_2(channels)))
    grid = (images * triton.cdiv(channels, tile) * triton.cdiv(sites, 64),)
    with torch.cuda.device_of(x):
        _last[grid](x.contiguous(), out, channels, sites, CHANNELS=tile, SITES=64, num_warps=4)
    return out


def group_sums(x: Tensor, delta: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """Return Σ δ x̂ and Σ δ of every image and channel, (images, channels) each, for group normalisation."""
    images, channels = x.shape[:2]
    sites, each = x[0, 0].numel(), channels // groups
    out = torch.empty(2, images, channels, device=x.device, dtype=torch.float32)
    rows = triton.next_power_of_2(each)
    step = _power(sites, 16, max(16, 4096 // rows))
    with torch.cuda.device_of(x):
        _groups[(images * groups,)](
            *(x.contiguous(), delta.contiguous(), out, groups, channels, sites, eps),
            EACH=each,
            ROWS=rows,
            STEP=step,
        )
    scale, shift = out
    return scale, shift


_RESIDENT = 4  # programs of `_outer` that a processor has registers for
_ADDING = 0.03  # the cost of adding up a tile, in examples


@triton.jit
def _clamp(x, limit, ASM: tl.constexpr):
    if ASM:  # one instruction instead of two: the smaller of |x| and limit, with the sign of x
        return tl.inline_asm_elementwise(
            "min.xorsign.abs.f32 $0, $1, $2;", "=f,f,f", [x, limit], dtype=tl.float32, is_pure=True, pack=1
        )
    else:  # noqa: RET505 (Triton compiles only the branch of a constant that is taken)
        return tl.minimum(tl.maximum(x, -limit), limit)


@triton.jit(do_not_specialize=["examples", "part"])
def _outer(
    delta,
    a,
    limit,
    out,
    examples,
    rows,
    columns,
    part,
    MATRIX: tl.constexpr,
    ASM: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
):
    """Compute Σ_b clamp(delta_b a_bᵀ, ±limit): one tile, one share of the examples.

    A tile has four dimensions, of which the last two are spread over threads and the first two stay in a
    thread's registers: it then loads DOWN + ACROSS numbers an example for DOWN · ACROSS products.
    """
    across = tl.cdiv(columns, 8 * ACROSS)
    tiles = across * tl.cdiv(rows, 16 * DOWN)
    tile, share = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    row = (tile // across * DOWN + tl.arange(0, DOWN))[:, None, None, None] * 16
    row += tl.arange(0, 16)[None, None, :, None]
    column = (tile % across * ACROSS + tl.arange(0, ACROSS))[None, :, None, None] * 8
    column += tl.arange(0, 8)[None, None, None, :]
    inside = (row < rows) & (column < columns)
    bound = tl.load(limit + row * columns + column, mask=inside, other=0.0) if MATRIX else tl.load(limit)
    bound = tl.zeros([DOWN, ACROSS, 16, 8], tl.float32) + bound
    total = tl.zeros([DOWN, ACROSS, 16, 8], tl.float32)
    left = delta + share * part * rows + row
    right = a + share * part * columns + column
    count = tl.minimum(part, examples - tl.program_id(0) // tiles * part)
    for _ in tl.range(0, count, loop_unroll_factor=4):
        d = tl.load(left, mask=row < rows, other=0.0).to(tl.float32)
        x = tl.load(right, mask=column < columns, other=0.0).to(tl.float32)
        total += _clamp(d * x, bound, ASM)
        left += rows
        right += columns
    tl.store(out + share * rows * columns + row * columns + column, total, mask=inside)


@triton.jit(do_not_specialize=["examples", "positions", "part"])
def _dots(
    delta,
    a,
    limit,
    out,
    examples,
    positions,
    rows,
    columns,
    part,
    MATRIX: tl.constexpr,
    ASM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Compute Σ_b clamp(Σ_t delta_bt a_btᵀ, ±limit): one tile, one share of the examples."""
    across = tl.cdiv(columns, COLUMNS)
    tiles = across * tl.cdiv(rows, ROWS)
    tile, share = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    row = tile // across * ROWS + tl.arange(0, ROWS)
    column = tile % across * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, STEP)
    place = row[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    bound = tl.load(limit + place, mask=inside, other=0.0) if MATRIX else tl.load(limit)
    bound = tl.zeros([ROWS, COLUMNS], tl.float32) + bound
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    first = share * part
    for example in range(first, tl.minimum(first + part, examples)):
        gradient = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, positions, STEP):
            position = start + step
            at, within = example * positions + position, position < positions
            left = delta + at[None, :] * rows + row[:, None]
            right = a + at[:, None] * columns + column[None, :]
            d = tl.load(left, mask=within[None, :] & (row < rows)[:, None], other=0.0)
            x = tl.load(right, mask=within[:, None] & (column < columns)[None, :], other=0.0)
            gradient = tl.dot(d.to(tl.float32), x.to(tl.float32), gradient, input_precision="ieee")
        total += _clamp(tl.where(gradient == gradient, gradient, 0.0), bound, ASM)
    tl.store(out + share * rows * columns + place, total, mask=inside)


@triton.jit(do_not_specialize=["examples", "part"])
def _rows(
    gradients,
    limit,
    out,
    examples,
    columns,
    part,
    VECTOR: tl.constexpr,
    ASM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute Σ_b clamp(gradients_b, ±limit): some columns, one share of the examples."""
    tiles = tl.cdiv(columns, BLOCK)
    column = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    share = (tl.program_id(0) // tiles).to(tl.int64)
    inside = column < columns
    bound = tl.load(limit + column, mask=inside, other=0.0) if VECTOR else tl.load(limit)
    bound = tl.zeros([BLOCK], tl.float32) + bound
    total = tl.zeros([BLOCK], tl.float32)
    source = gradients + share * part * columns + column
    count = tl.minimum(part, examples - tl.program_id(0) // tiles * part)
    for _ in tl.range(0, count, loop_unroll_factor=4):
        x = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        total += _clamp(tl.where(x == x, x, 0.0), bound, ASM)
        source += columns
    tl.store(out + share * columns + column, total, mask=inside)


def clamped_outer(delta: Tensor, a: Tensor, limit: Tensor, most: int = 2**31) -> Tensor:
    """Return Σ_b clamp(delta_b a_bᵀ, ±limit): delta is (B, O), a (B, I), limit (O, I) or one number."""
    (examples, rows), columns = delta.shape, a.shape[1]
    down = min(4, triton.next_power_of_2(triton.cdiv(rows, 16)))
    tiles = triton.cdiv(columns, 64) * triton.cdiv(rows, 16 * down)
    shares, part = _shares(examples, tiles, _RESIDENT * processors(delta.device), most)
    out = delta.new_empty(shares, rows, columns, dtype=torch.float32)
    args = delta, a, limit, out, examples, rows, columns, part
    with torch.cuda.device_of(delta):
        _outer[(tiles * shares,)](
            *args, MATRIX=limit.numel() > 1, ASM=_asm(delta.device), DOWN=down, ACROSS=8, num_warps=2
        )
    return out[0] if shares == 1 else out.sum(0, dtype=torch.float64)


def clamped_dots(delta: Tensor, a: Tensor, limit: Tensor, most: int = 2**31) -> Tensor:
    """Return Σ_b clamp(Σ_t delta_bt a_btᵀ, ±limit); delta (B, T, O), a (B, T, I), limit (O, I) or one."""
    (examples, positions, rows), columns = delta.shape, a.shape[2]
    tiles = triton.cdiv(columns, 64) * triton.cdiv(rows, 64)
    shares, part = _shares(examples, tiles, processors(delta.device), most)
    out = delta.new_empty(shares, rows, columns, dtype=torch.float32)
    args = delta, a, limit, out, examples, positions, rows, columns, part
    tile = {"ROWS": 64, "COLUMNS": 64, "STEP": 16}
    with torch.cuda.device_of(delta):
        _dots[(tiles * shares,)](*args, MATRIX=limit.numel() > 1, ASM=_asm(delta.device), **tile)
    return out[0] if shares == 1 else out.sum(0, dtype=torch.float64)


def clamped_rows(gradients: Tensor, limit: Tensor, most: int = 2**31) -> Tensor:
    """Return Σ_b clamp(gradients_b, ±limit): gradients are (B, P), limit (P,) or one number."""
    examples, columns = gradients.shape
    tiles = triton.cdiv(columns, 256)
    shares, part = _shares(examples, tiles, processors(gradients.device), most)
    out = gradients.new_empty(shares, columns, dtype=torch.float32)
    args = gradients, limit, out, examples, columns, part
    with torch.cuda.device_of(gradients):
        _rows[(tiles * shares,)](
            *args, VECTOR=limit.numel() > 1, ASM=_asm(gradients.device), BLOCK=256, num_warps=2
        )
    return out[0] if shares == 1 else out.sum(0, dtype=torch.float64)


@functools.lru_cache(4096)
def _shares(examples: int, tiles: int, slots: int, most: int = 2**31) -> tuple[int, int]:
    """Return the number of shares of the work, ``slots`` of which run at once, and the examples in each.

    They come in waves, and one that is not full takes nearly as long; a share costs as much as adding it up.
    """

    def cost(shares: int) -> float:
        return -(-tiles * shares // slots) / shares + _ADDING * tiles * shares / examples

    part = min(most, -(-examples // min(range(1, max(1, min(examples // 8, 128)) + 1), key=cost)))
    return -(-examples // part), part


@functools.cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def _asm(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 6)
