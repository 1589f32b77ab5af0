"""Per-example gradients of a convolution: a term whose positions are the windows of its input."""

import functools
import math
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from farthing.torch.gradients.terms import Route, RowTerms, Term, contracted, norms, part_of, weighted, widely
from farthing.torch.kernels import positions, totals
from farthing.torch.kernels.positions import blanked, fused, where
from farthing.torch.kernels.totals import exact


def padded(module: Any, x: Tensor) -> Tensor:
    """Return the input with its padding."""
    if module.padding_mode != "zeros":
        return F.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode)
    if isinstance(module.padding, str) or any(module.padding):
        return F.pad(x, module._reversed_padding_repeated_twice)
    return x


class Windows(Term):
    """Σ over windows of δ ⊗ window: δ (examples, records, p, *out), x (examples, records, c, *in), padded."""

    turned = False

    def __init__(self, module: Any, delta: Tensor, x: Tensor) -> None:
        self.module, self.delta, self.x = module, delta, x
        self.examples, self.size, self.device = len(x), module.weight.numel(), x.device
        self.positions = delta[0, :, 0].numel() if len(x) else 1

    def fresh(self, count: int | None = None) -> Self:
        some = super().fresh(count)
        some.delta, some.x = self.delta[:count], self.x[:count]
        return some

    def routes(self) -> tuple[Route, ...]:
        held = self.delta[0].numel() + self.x[0].numel()
        if self.lavish:
            held = 4 * max(held, part_of(self.device) // self.examples)
        rows = Route.ROWS if self.size <= held else Route.AGAIN
        return (rows, Route.GRAM) if self.positions**2 <= self.size else (rows,)

    def parts(self) -> Iterator[slice]:
        wide = self.size + self.positions * self.size // self.module.out_channels
        step = max(1, part_of(self.device) // wide)
        return (slice(start, start + step) for start in range(0, self.examples, step))

    def _matrices(self, part: slice) -> tuple[Tensor, Tensor]:
        """δ as (examples · groups, p, positions) and the windows as (examples · groups, q, positions)."""
        m, delta, x = self.module, self.delta[part], self.x[part]
        examples, records, groups = len(x), x.shape[1], m.groups
        steps, sides = x.stride(), delta.shape[3:]
        windows = x.as_strided(
            (examples, x.shape[2], *m.kernel_size, records, *sides),
            (
                steps[0],
                steps[2],
                *(d * s for d, s in zip(m.dilation, steps[3:], strict=True)),
                steps[1],
                *(d * s for d, s in zip(m.stride, steps[3:], strict=True)),
            ),
            x.storage_offset(),
        )
        columns = windows.reshape(examples * groups, -1, self.positions)
        return delta.transpose(1, 2).reshape(examples * groups, -1, self.positions), columns

    def rows(self, part: slice) -> Tensor:
        delta, columns = self._matrices(part)
        return widely(delta, columns.transpose(1, 2)).view(len(self.x[part]), -1)

    def rows_into(self, part: slice, out: Tensor) -> None:
        delta, columns = self._matrices(part)
        shape = len(delta), delta.shape[1], columns.shape[1]
        if delta.dtype is torch.float32:
            torch.bmm(delta, columns.transpose(1, 2), out=out.view(shape))
        else:
            out.view(shape).copy_(widely(delta, columns.transpose(1, 2)))

    def scaled_norms(self, inverse: Tensor) -> Tensor:
        return self._keep(inverse) if self.route is Route.ROWS else super().scaled_norms(inverse)

    def norms(self) -> Tensor:
        if self.route is Route.GRAM:
            return self._gram()
        if self.route is Route.ROWS and positions.available(self.device):
            return self._compiled()
        if self.route is Route.ROWS:
            return super().norms()
        with exact(self.device):  # as the sum is
            return super().norms()

    def _gram(self) -> Tensor:
        found = []
        wide = self.positions * max(self.positions, self.size // self.module.out_channels)
        step = max(1, part_of(self.device) // wide)
        for start in range(0, self.examples, step):
            delta, columns = self._matrices(slice(start, start + step))
            grams = (widely(side.transpose(1, 2), side) for side in (delta, columns))
            groups = contracted(*grams).view(-1, self.module.groups)
            found.append(groups.squeeze(1) if groups.shape[1] == 1 else norms(groups))
        return torch.cat(found)

    def _compiled(self) -> Tensor:
        """Return rows and norms by the kernel in C. A row is then (groups, q, p)."""
        m, delta, x = self.module, self.delta.contiguous(), self.x.contiguous()
        records, height, width = x.shape[1], m.out_channels // m.groups, self.size // m.out_channels
        places = _places(
            tuple(x.shape[1:]), tuple(delta.shape[3:]), m.kernel_size, m.stride, m.dilation, m.groups
        )
        apart = x.shape[2] // m.groups * x[0, 0, 0].numel()
        sizes = x[0].numel(), self.positions, self.positions // records, m.groups, height, width, apart
        self.kept, self.turned = self.room(), True
        found = positions.windows(x, delta, *places, positions.PositionShape(*sizes), self.kept)
        self.release()
        return found

    def add(self, factors: Tensor, out: Tensor) -> None:
        if self.kept is None or not self.turned:
            super().add(factors, out)
            return
        m = self.module
        found = totals.weighted(self.kept, factors).view(m.groups, -1, m.out_channels // m.groups)
        out.view(m.groups, -1, found.shape[1]).add_(found.transpose(1, 2))

    def largest(self) -> Tensor:
        return norms(self.delta) * norms(self.x) * math.sqrt(math.prod(self.module.kernel_size))

    def product(self, factors: Tensor, out: Tensor) -> None:
        m = self.module
        kind = torch.float64 if self.device.type == "cpu" else torch.float32  # terms of an example may cancel
        delta = weighted(self.delta.float(), factors).flatten(0, 1).to(kind)
        x = self.x.flatten(0, 1).to(kind)
        none = [0] * len(m.kernel_size)
        with exact(self.device):
            found = torch.ops.aten.convolution_backward(
                delta,
                x,
                m.weight.detach().to(kind),
                None,
                m.stride,
                none,
                m.dilation,
                False,
                none,
                m.groups,
                [False, True, False],
            )[1]
        out += found.flatten()

    def only(self, good: Tensor) -> None:
        if self.kept is not None:
            self.kept = blanked(good, self.kept)
            return
        clear = blanked if self.own else where
        self.delta, self.x = clear(good, self.delta), clear(good, self.x)

    def release(self) -> None:
        self.delta = self.x = self.x.new_zeros(self.examples, 0)


@functools.lru_cache(maxsize=256)
def _places(
    inner: tuple[int, ...],
    outer: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> tuple[Tensor, Tensor]:
    """Where every window begins in an example (records, channels, *sides), and where each weight looks."""
    records, channels, *sides = inner
    steps = [math.prod(sides[n + 1 :]) for n in range(len(sides))]
    base = torch.arange(records) * channels * math.prod(sides)
    offsets = torch.arange(channels // groups) * math.prod(sides)
    for out, size, by, apart, step in zip(outer, kernel, stride, dilation, steps, strict=True):
        base = (base[:, None] + torch.arange(out) * by * step).flatten()
        offsets = (offsets[:, None] + torch.arange(size) * apart * step).flatten()
    return base, offsets


def _by_zeros(module: Any) -> bool:
    """Return whether a kernel can leave out the padding, because it is zeros."""
    return module.padding_mode == "zeros" and not isinstance(module.padding, str)


def windows(module: Any, delta: Tensor, x: Tensor, examples: int, factored: bool) -> Term:
    """Return the gradients of a convolution's weights, from its output's gradient and its input."""
    if x.dtype is not delta.dtype:
        x, delta = x.float(), delta.float()
    if factored and fused(x.device) and x.ndim <= 4 and 1 < module.groups == module.in_channels:
        from farthing.torch.kernels import layer_sums

        shape = layer_sums.ConvolutionShape(module, not _by_zeros(module))
        rows = layer_sums.depthwise(shape, delta, x if _by_zeros(module) else padded(module, x))
        return RowTerms(rows.view(examples, -1, rows.shape[1]).sum(1))
    split = (part.reshape(examples, -1, *part.shape[1:]) for part in (delta, padded(module, x)))
    return Windows(module, *split)
