# mypy: ignore-errors
"""Triton kernels: per-example gradients of depthwise convolutions and of group norms, in one pass each.

Imported only where Triton is installed; see `farthing.torch.kernels.lattice_noise`. Both gradients are small,
a few numbers a channel, and what is slow about them elsewhere is what lies between: windows copied out of an
input, an input normalised again. Tensors may be float32 or bfloat16, and sums are made in float32.
"""

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
    high,
    wide,
    out_wide,
    sites,
    stride_y,
    stride_x,
    apart_y,
    apart_x,
    pad_y,
    pad_x,
    taps_x,
    taps,
    TAPS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Σ over windows of δ · window for one image and one filter, which sees one channel."""
    image, filter = tl.program_id(1).to(tl.int64), tl.program_id(0)
    channel = filter // (filters // channels)
    tap = tl.arange(0, TAPS)
    shift_y, shift_x = tap // taps_x * apart_y - pad_y, tap % taps_x * apart_x - pad_x
    found = tl.zeros([TAPS], tl.float32)
    source = x + (image * channels + channel) * high * wide
    for start in range(0, sites, STEP):
        site = start + tl.arange(0, STEP)
        d = tl.load(delta + (image * filters + filter) * sites + site, mask=site < sites, other=0.0)
        y = (site // out_wide * stride_y)[None, :] + shift_y[:, None]
        z = (site % out_wide * stride_x)[None, :] + shift_x[:, None]
        there = (site < sites)[None, :] & (y >= 0) & (y < high) & (z >= 0) & (z < wide)
        there = there & (tap < taps)[:, None]
        seen = tl.load(source + y * wide + z, mask=there, other=0.0)
        found += tl.sum(seen.to(tl.float32) * d.to(tl.float32)[None, :], 1)
    tl.store(out + (image * filters + filter) * taps + tap, found, mask=tap < taps)


@triton.jit
def _groups(x, delta, out, channels, sites, eps, EACH: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr):
    """Σ δ x̂ and Σ δ over the places of every channel of one group of one image, x̂ being x normalised."""
    group, image = tl.program_id(0), tl.program_id(1).to(tl.int64)
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
    tl.store(to + tl.num_programs(1).to(tl.int64) * channels, shift, mask=row < EACH)


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

    def numbers(self, delta: Tensor, x: Tensor) -> tuple[int, ...]:
        """Return sizes, strides, dilations and paddings."""
        high, wide = (1, x.shape[2]) if x.ndim == 3 else x.shape[2:]
        sites, last = delta[0, 0].numel(), delta.shape[-1]
        ways = *self.stride, *self.dilation, *self.padding
        return self.filters, self.channels, high, wide, last, sites, *ways, self.kernel[1]


def depthwise(shape: ConvolutionShape, delta: Tensor, x: Tensor) -> Tensor:
    """Return every image's gradient, (images, filters · taps), where a filter sees one channel."""
    out = torch.empty(len(x), shape.filters * shape.taps, device=x.device)
    numbers, taps = shape.numbers(delta, x), _power(shape.taps, 2, 1024)
    step = max(16, min(4096 // taps, triton.next_power_of_2(delta[0, 0].numel())))
    with torch.cuda.device_of(x):
        _depthwise[(shape.filters, len(x))](
            *(delta.contiguous(), x.contiguous(), out, *numbers, shape.taps),
            TAPS=taps,
            STEP=step,
            num_warps=4,
        )
    return out


def group_sums(x: Tensor, delta: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """Σ δ x̂ and Σ δ of every image and channel, (images, channels) each, for group normalisation."""
    images, channels = x.shape[:2]
    sites, each = x[0, 0].numel(), channels // groups
    out = torch.empty(2, images, channels, device=x.device)
    rows = triton.next_power_of_2(each)
    step = _power(sites, 16, max(16, 4096 // rows))
    with torch.cuda.device_of(x):
        _groups[(groups, images)](
            *(x.contiguous(), delta.contiguous(), out, channels, sites, eps), EACH=each, ROWS=rows, STEP=step
        )
    scale, shift = out
    return scale, shift
