# mypy: ignore-errors
"""Make per-example gradients of convolutions and linear layers in registers, tile by tile, by Triton kernels.

Imported only where Triton is installed; see `farthing.torch.kernels.lattice_noise`. An example's gradient
("row") is Σ_s δ_s ⊗ window_s over positions s, a matrix (filters, taps · channels). A program makes one tile
of it on the matrix units, from tensors whose channels lie side by side, so that the windows of an input are
read where they are and never copied out. `measured` squares the tiles of every example, and writes the rows
down if asked to. `add_sum` makes the same tiles again, in the same order of additions, multiplies each by its
example's factor and adds them up: what is added is what was measured, to the last bit, and no row is stored.

Precision. The matrix units multiply bfloat16 numbers exactly and add in float32. A float32 number is the sum
of two of them, but for 2⁻¹⁶ of it, and a product is made of three; so rows of float32 tensors are off by
2⁻¹⁵ Σ_s |δ_s| |window_s| at most, and as a rule by 2⁻¹⁸ of their length. That changes what is clipped and
added, not by how much an example may move the sum. A number above 3.38e38 counts as infinite, and its example
as zero.

Rounding. Sums over a share of the examples are made in float32, with one rounding an example, and shares are
added in float64: the theorem of `farthing.torch.kernels.totals` with h = the examples of a share.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from farthing.torch.kernels.layer_sums import ConvolutionShape, processors

_ROOM = 2**26  # numbers of the shares of a sum that are held at once: a quarter of a gigabyte


class TileSize(NamedTuple):
    """The numbers of filters, of columns and of positions that a program takes at once, and how it runs."""

    rows: int
    columns: int
    step: int
    warps: int
    stages: int


@triton.jit
def _step(
    delta,
    delta_low,
    x,
    x_low,
    row,
    column,
    site,
    sites,
    found,
    layer,
    PLAIN: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Add Σ_s δ_s ⊗ window_s over some positions to a tile; ``low`` are what bfloat16 leaves of float32."""
    filters, columns, channels, delta_site, x_site = layer[0], layer[1], layer[2], layer[3], layer[4]
    high, wide, out_wide, stride_y, stride_x = layer[5], layer[6], layer[7], layer[8], layer[9]
    apart_y, apart_x, pad_y, pad_x, taps_x = layer[10], layer[11], layer[12], layer[13], layer[14]
    here = (row < filters)[:, None] & (site < sites)[None, :]
    there = (site < sites)[:, None] & (column < columns)[None, :]
    at = row[:, None] + site[None, :] * delta_site
    if PLAIN:
        place = site[:, None] * x_site + column[None, :]
    else:
        tap, channel = column // channels, column % channels
        shift_y, shift_x = tap // taps_x * apart_y - pad_y, tap % taps_x * apart_x - pad_x
        y, z = site // out_wide * stride_y, site % out_wide * stride_x
        at_y, at_x = y[:, None] + shift_y[None, :], z[:, None] + shift_x[None, :]
        there = there & (at_y >= 0) & (at_y < high) & (at_x >= 0) & (at_x < wide)
        ahead = (shift_y * wide + shift_x) * x_site + channel
        place = ((y * wide + z) * x_site)[:, None] + ahead[None, :]
    d, seen = tl.load(delta + at, mask=here, other=0.0), tl.load(x + place, mask=there, other=0.0)
    found = tl.dot(d, seen, found)
    if SPLIT:
        found = tl.dot(tl.load(delta_low + at, mask=here, other=0.0), seen, found)
        found = tl.dot(d, tl.load(x_low + place, mask=there, other=0.0), found)
    return found


@triton.jit
def _row(
    delta,
    delta_low,
    x,
    x_low,
    row,
    column,
    sites,
    records,
    lengths,
    layer,
    ONCE: tl.constexpr,
    PLAIN: tl.constexpr,
    SPLIT: tl.constexpr,
    STEP: tl.constexpr,
):
    """Return one tile of an example's row; ``ONCE`` if a single step makes it."""
    found = tl.zeros([row.shape[0], column.shape[0]], tl.float32)
    site = tl.arange(0, STEP)
    if ONCE:
        found = _step(delta, delta_low, x, x_low, row, column, site, sites, found, layer, PLAIN, SPLIT)
    else:
        for record in range(records):
            d, low = delta + record * lengths[0], delta_low + record * lengths[0]
            seen, seen_low = x + record * lengths[1], x_low + record * lengths[1]
            for start in range(0, sites, STEP):
                some = start + site
                found = _step(d, low, seen, seen_low, row, column, some, sites, found, layer, PLAIN, SPLIT)
    return found


@triton.jit
def _measured(
    delta,
    delta_low,
    x,
    x_low,
    rows,
    squares,
    tiles,
    across,
    groups,
    records,
    sites,
    lengths,
    layer,
    KEEP: tl.constexpr,
    ONCE: tl.constexpr,
    PLAIN: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Compute the square of one tile of one example's row, and store the tile if asked to."""
    tile, unit = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    example, group = unit // groups, unit % groups
    row = tile // across * ROWS + tl.arange(0, ROWS)
    column = tile % across * COLUMNS + tl.arange(0, COLUMNS)
    to = example * records * lengths[0] + group * layer[0]
    at = example * records * lengths[1] + group * layer[2]
    d, low, seen, seen_low = delta + to, delta_low + to, x + at, x_low + at
    found = _row(
        d, low, seen, seen_low, row, column, sites, records, lengths, layer, ONCE, PLAIN, SPLIT, STEP
    )
    tl.store(squares + unit * tiles + tile, tl.sum(tl.sum(found * found, 1), 0))
    if KEEP:
        inside = (row < layer[0])[:, None] & (column < layer[1])[None, :]
        place = unit * layer[0] * layer[1] + row[:, None] * layer[1] + column[None, :]
        tl.store(rows + place, found, mask=inside)


@triton.jit(do_not_specialize=["examples", "part"])
def _summed(
    delta,
    delta_low,
    x,
    x_low,
    factors,
    out,
    examples,
    part,
    tiles,
    across,
    groups,
    records,
    sites,
    lengths,
    layer,
    ONCE: tl.constexpr,
    PLAIN: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Compute one tile of Σ factor · row, over one share of the examples."""
    unit, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    share, group = unit // groups, unit % groups
    row = tile // across * ROWS + tl.arange(0, ROWS)
    column = tile % across * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for example in range(share * part, tl.minimum((share + 1) * part, examples)):
        factor = tl.load(factors + example)
        start = tl.cast(example, tl.int64) * records
        to, at = start * lengths[0] + group * layer[0], start * lengths[1] + group * layer[2]
        d, low, seen, seen_low = delta + to, delta_low + to, x + at, x_low + at
        found = _row(
            d, low, seen, seen_low, row, column, sites, records, lengths, layer, ONCE, PLAIN, SPLIT, STEP
        )
        total += tl.where(factor == 0.0, 0.0, factor * found)  # it may not be finite
    inside = (row < layer[0])[:, None] & (column < layer[1])[None, :]
    place = (tl.cast(share, tl.int64) * groups + group) * layer[0] * layer[1]
    tl.store(out + place + row[:, None] * layer[1] + column[None, :], total, mask=inside)


@triton.jit
def _rooted(squares, norms, tiles, BLOCK: tl.constexpr):
    """Compute the norm of an example's row from the squares of its tiles."""
    example, total = tl.program_id(0).to(tl.int64), tl.zeros([BLOCK], tl.float64)
    for start in range(0, tiles, BLOCK):
        place = start + tl.arange(0, BLOCK)
        total += tl.load(squares + example * tiles + place, mask=place < tiles, other=0.0).to(tl.float64)
    tl.store(norms + example, tl.sqrt(tl.sum(total, 0)).to(tl.float32))


@triton.jit
def _added(shares, out, count, size, taps, channels, BLOCK: tl.constexpr):
    """Add shares (filters, taps, channels) in float64 to what is there, (filters, channels, taps)."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, each = place < size, taps * channels
    filter, within = place // each, place % each
    source = filter * each + within % taps * channels + within // taps
    total = tl.load(out + place, mask=inside, other=0.0).to(tl.float64)
    for share in range(count):
        at = tl.cast(share, tl.int64) * size + source
        total += tl.load(shares + at, mask=inside, other=0.0).to(tl.float64)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _last(
    source, out, low, channels, sites, SPLIT: tl.constexpr, CHANNELS: tl.constexpr, SITES: tl.constexpr
):
    """Move a tile of an image to channels-last order, as one bfloat16 number or as two."""
    across = tl.cdiv(sites, SITES)
    tiles = tl.cdiv(channels, CHANNELS) * across
    image, tile = (tl.program_id(0) // tiles).to(tl.int64) * channels * sites, tl.program_id(0) % tiles
    channel = tile // across * CHANNELS + tl.arange(0, CHANNELS)
    site = tile % across * SITES + tl.arange(0, SITES)
    inside = (channel < channels)[:, None] & (site < sites)[None, :]
    found = tl.load(source + image + channel[:, None] * sites + site[None, :], mask=inside, other=0.0)
    place = image + site[None, :] * channels + channel[:, None]
    whole = found.to(tl.bfloat16)
    tl.store(out + place, whole, mask=inside)
    if SPLIT:
        tl.store(low + place, (found - whole.to(tl.float32)).to(tl.bfloat16), mask=inside)


@triton.jit
def _halves(source, out, low, size, BLOCK: tl.constexpr):
    """Split float32 numbers into two of bfloat16."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(source + place, mask=place < size, other=0.0)
    whole = found.to(tl.bfloat16)
    tl.store(out + place, whole, mask=place < size)
    tl.store(low + place, (found - whole.to(tl.float32)).to(tl.bfloat16), mask=place < size)


class Halves(NamedTuple):
    """A tensor as the matrix units take it: bfloat16, and what that leaves of float32."""

    whole: Tensor
    low: Tensor | None

    @classmethod
    def of(cls, values: Tensor, shape: tuple[int, ...]) -> "Halves":
        """Return a tensor whose channels lie last, in another shape."""
        values = values.contiguous()
        if values.dtype is torch.bfloat16:
            return cls(values.view(shape), None)
        whole, low = (torch.empty(shape, device=values.device, dtype=torch.bfloat16) for _ in range(2))
        if values.numel():
            with torch.cuda.device_of(values):
                _halves[(triton.cdiv(values.numel(), 4096),)](
                    values, whole, low, values.numel(), BLOCK=4096, num_warps=8
                )
        return cls(whole, low)

    @classmethod
    def channels_last(cls, images: Tensor, examples: int) -> "Halves":
        """Return images (n, channels, *sides) as (examples, records, sites, channels)."""
        (count, channels), sites = images.shape[:2], images[0, 0].numel() if len(images) else 0
        shape = examples, count // max(1, examples), sites, channels
        turned = images.movedim(1, -1)
        if turned.is_contiguous() or not images.numel():
            return cls.of(turned, shape)
        split = images.dtype is not torch.bfloat16
        whole = torch.empty(shape, device=images.device, dtype=torch.bfloat16)
        low = torch.empty_like(whole) if split else None
        tile = min(64, max(16, triton.next_power_of_2(channels)))
        grid = (count * triton.cdiv(channels, tile) * triton.cdiv(sites, 64),)
        images = images.contiguous()
        with torch.cuda.device_of(images):
            _last[grid](
                *(images, whole, whole if low is None else low, channels, sites),
                SPLIT=split,
                CHANNELS=tile,
                SITES=64,
                num_warps=4,
            )
        return cls(whole, low)

    @property
    def nbytes(self) -> int:
        """Return the bytes of both."""
        return self.whole.nbytes + (0 if self.low is None else self.low.nbytes)

    @property
    def both(self) -> tuple[Tensor, Tensor]:
        """Return what kernels are given: the second is not looked at where there is none."""
        return self.whole, self.whole if self.low is None else self.low

    def emptied(self) -> "Halves":
        """Return no examples, in memory of its own."""
        return Halves(self.whole.new_empty(0, *self.whole.shape[1:]), None)

    def some(self, part: slice) -> "Halves":
        """Return some examples."""
        return Halves(self.whole[part], None if self.low is None else self.low[part])


class TileGeometry(NamedTuple):
    """A layer as the kernels see it: its groups, the size of a group's gradient, and where windows lie."""

    groups: int
    filters: int  # of a group
    columns: int  # taps times channels of a group
    channels: int  # of a group
    numbers: tuple[int, ...]  # high, wide, out_wide, strides, dilations, paddings, taps in a line
    plain: bool  # whether a window is one position

    @classmethod
    def linear(cls, filters: int, channels: int, positions: int) -> "TileGeometry":
        """Return the geometry of a linear layer over some positions."""
        numbers = 1, positions, positions, 1, 1, 1, 1, 0, 0, 1
        return cls(1, filters, channels, channels, numbers, True)

    @classmethod
    def convolution(
        cls, shape: ConvolutionShape, sides: tuple[int, ...], out_sides: tuple[int, ...]
    ) -> "TileGeometry":
        """Return the geometry of a convolution from images of some sides to others."""
        filters, channels = shape.filters // shape.groups, shape.channels // shape.groups
        plain = shape.taps == 1 and not any(shape.padding) and shape.stride == (1, 1)
        numbers = shape.numbers(sides, out_sides)
        return cls(shape.groups, filters, shape.taps * channels, channels, numbers, plain)

    @property
    def size(self) -> int:
        """Return the number of weights."""
        return self.groups * self.filters * self.columns


def measured(delta: Halves, x: Halves, layer: TileGeometry, rows: Tensor | None) -> Tensor:
    """Return the norm of every row, and fill ``rows`` (examples, groups, filters, taps, channels), if given.

    δ is (examples, records, sites, filters of all groups), x (examples, records, sites, channels of all).
    """
    examples, tile = len(delta.whole), _tile_of(layer, delta)
    across = triton.cdiv(layer.columns, tile.columns)
    tiles = across * triton.cdiv(layer.filters, tile.rows)
    squares = torch.empty(examples, layer.groups, tiles, device=delta.whole.device, dtype=torch.float32)
    norms = torch.zeros(examples, device=delta.whole.device, dtype=torch.float32)
    if squares.numel():
        with torch.cuda.device_of(squares):
            _measured[(examples * layer.groups * tiles,)](
                *(*delta.both, *x.both, squares if rows is None else rows, squares, tiles, across),
                *_numbers(layer, delta, x),
                KEEP=rows is not None,
                **_how(layer, tile, delta),
            )
            _rooted[(examples,)](squares, norms, layer.groups * tiles, BLOCK=128, num_warps=1)
    return norms


def add_sum(delta: Halves, x: Halves, layer: TileGeometry, factors: Tensor, most: int, out: Tensor) -> None:
    """Add Σ factor · row to ``out``, in the order of weights (groups, filters, channels, taps).

    ``most`` are the examples that may be added up in float32. Of a large batch they are few, and shares many:
    not all shares are there at once.
    """
    examples, tile = len(delta.whole), _tile_of(layer, delta)
    across = triton.cdiv(layer.columns, tile.columns)
    tiles = across * triton.cdiv(layer.filters, tile.rows)
    shares, part = _shares(examples, tiles * layer.groups, 2 * processors(factors.device), most)
    if not shares * layer.size:
        return
    held = min(shares, max(1, _ROOM // layer.size))
    total = out if held == shares else torch.zeros_like(out, dtype=torch.float64)
    room = torch.empty(held, layer.size, device=factors.device, dtype=torch.float32)
    for start in range(0, examples, held * part):
        some = slice(start, start + held * part)
        d, seen, count = delta.some(some), x.some(some), len(factors[some])
        shares = triton.cdiv(count, part)
        with torch.cuda.device_of(room):
            _summed[(shares * layer.groups * tiles,)](
                *(*d.both, *seen.both, factors[some], room, count, part, tiles, across),
                *_numbers(layer, delta, x),
                **_how(layer, tile, delta),
            )
        add_ordered(room[:shares], layer, total)
    if total is not out:
        out += total


def add_ordered(rows: Tensor, layer: TileGeometry, out: Tensor) -> None:
    """Add the sum of rows (…, filters, taps, channels) to ``out``, in the order of weights, in float64."""
    taps, size = layer.columns // layer.channels, layer.size
    with torch.cuda.device_of(out):
        _added[(triton.cdiv(size, 512),)](rows, out, len(rows), size, taps, layer.channels, BLOCK=512)


def _numbers(layer: TileGeometry, delta: Halves, x: Halves) -> tuple[Any, ...]:
    """Return what both kernels are told of a layer and its tensors."""
    records, sites, delta_site = delta.whole.shape[1:]
    x_site = x.whole.shape[3]
    lengths = sites * delta_site, x.whole.shape[2] * x_site
    sizes = layer.filters, layer.columns, layer.channels, delta_site, x_site
    return layer.groups, records, sites, lengths, (*sizes, *layer.numbers)


def _how(layer: TileGeometry, tile: TileSize, delta: Halves) -> dict[str, Any]:
    records, sites = delta.whole.shape[1:3]
    return {
        "ONCE": records == 1 and sites <= tile.step,
        "PLAIN": layer.plain,
        "SPLIT": delta.low is not None,
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "STEP": tile.step,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _tile_of(layer: TileGeometry, delta: Halves) -> TileSize:
    return tile_size(layer, delta.whole.shape[2], delta.low is not None)


@functools.lru_cache(4096)
def tile_size(layer: TileGeometry, sites: int, split: bool) -> TileSize:
    """Return the tile in which the gradients of a layer are made and summed."""
    tall, broad = (max(16, triton.next_power_of_2(size)) for size in (layer.filters, layer.columns))
    steps = (step for step in (64, 32, 16) if -(-sites // step) * step <= 1.25 * sites)
    step = next(steps, 16)
    if split and step == 64 and sites > 64:
        step = 32  # twice as many numbers lie in a program's memory
    if split and step == 64:
        return TileSize(min(64, tall), min(64, broad), step, 4, 3)
    if split and step == 32 and min(tall, broad) >= 128:
        return TileSize(128, 128, step, 8, 3)
    rows = min(128, tall)
    return TileSize(rows, min(8192 // rows, 128, broad), step, 4, 3)


@functools.lru_cache(4096)
def _shares(examples: int, tiles: int, slots: int, most: int) -> tuple[int, int]:
    """Return into how many shares of how many examples the work is cut, of which so many run at once."""
    if not examples:
        return 0, 1
    part = min(most, triton.cdiv(examples, max(1, min(examples, triton.cdiv(slots, tiles)))))
    return triton.cdiv(examples, part), part
