"""Compute per-example gradients of a convolution: a term whose positions are the windows of its input."""

import functools
import math
from collections.abc import Hashable, Iterator
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from farthing.torch.gradients.terms import Route, RowTerms, Term, contracted, norms, part_of, weighted, widely
from farthing.torch.gradients.tiles import Tiles
from farthing.torch.kernels import positions, totals
from farthing.torch.kernels.positions import blanked, fused, where
from farthing.torch.kernels.totals import exact

_POSITIONS = 64  # of a gradient that is rather made twice than kept
_LARGER = 4  # times as large as what it is made of
_TAPS = 64  # in a line, up to which a GPU's kernel for depthwise convolutions is compiled within seconds
_GRAM = 0.12  # products of Gram matrices, of those of rows: windows are copied for the former
_FILTERS = 8  # of a group, at least, for which lanes of a processor are not mostly empty


def padded(module: Any, x: Tensor) -> Tensor:
    """Return the input with its padding."""
    if module.padding_mode != "zeros":
        return F.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode)
    if isinstance(module.padding, str) or any(module.padding):
        return F.pad(x, module._reversed_padding_repeated_twice)
    return x


class Turned:
    """The convolution from the output of a transposed one to its input: the same weights."""

    padding_mode = "zeros"

    def __init__(self, module: Any) -> None:
        self.in_channels, self.out_channels, self.groups = (
            module.out_channels,
            module.in_channels,
            module.groups,
        )
        self.kernel_size, self.stride, self.dilation = module.kernel_size, module.stride, module.dilation
        self.padding, self.weight = module.padding, module.weight
        self._reversed_padding_repeated_twice = module._reversed_padding_repeated_twice


class Windows(Term):
    """Σ over windows of δ ⊗ window: δ (examples, records, p, *out), x (examples, records, c, *in).

    ``frame`` are the zeros that x has yet to be padded with, as `F.pad` takes them: kernels add them to one
    example at a time.
    """

    turned = False

    def __init__(self, module: Any, delta: Tensor, x: Tensor, frame: tuple[int, ...] = ()) -> None:
        self.module, self.delta, self.x, self.frame = module, delta, x, frame
        self.examples, self.size, self.device = x.shape[0], module.weight.numel(), x.device
        self.positions = math.prod(delta.shape[1:]) // delta.shape[2]

    @staticmethod
    def joined(terms: list["Windows"]) -> "Windows":
        first = terms[0]
        delta, x = (torch.cat([getattr(term, side) for term in terms], 1) for side in ("delta", "x"))
        return Windows(first.module, delta, x, first.frame)

    def alike(self) -> Hashable:
        m, shapes = self.module, (self.x.shape[2:], self.delta.shape[2:])
        return type(m), m.kernel_size, m.stride, m.dilation, m.groups, self.frame, self.x.dtype, *shapes

    def fresh(self, count: int | None = None) -> Self:
        some = super().fresh(count)
        some.delta, some.x = self.delta[:count], self.x[:count]
        return some

    def made_of(self) -> int:
        return self.delta.nbytes + self.x.nbytes

    def worth(self, examples: float) -> float:
        return 4 * max(self.made_of() / self.examples, 4 * part_of(self.device) / examples)

    def routes(self) -> tuple[Route, ...]:
        rows = Route.ROWS if self.keeps else Route.AGAIN
        return (rows, Route.GRAM) if self.positions**2 <= self.size else (rows,)

    def quicker(self) -> int:
        filters = self.module.out_channels // self.module.groups
        products = self.positions * (filters + self.size // self.module.out_channels)
        return int(products <= _GRAM * self.size / self.module.groups)

    def recomputes(self) -> bool:
        """Return whether making rows twice in registers takes less time than writing and reading them once.

        By a model of shapes alone: a weight costs some products a position to make again, and some bytes of
        memory to keep, which are slow where rows take much more of it than what they are made of.
        """
        filters = self.module.out_channels // self.module.groups
        if self.positions > _POSITIONS or self.bytes < _LARGER * self.made_of() or filters < _FILTERS:
            return False
        return positions.available(self.device)

    def _whole(self, part: slice = slice(None)) -> Tensor:
        """Return the input of some examples with its padding."""
        return F.pad(self.x[part], self.frame) if self.frame else self.x[part]

    def parts(self) -> Iterator[slice]:
        wide = self.size + self.positions * self.size // self.module.out_channels
        step = max(1, part_of(self.device) // wide)
        return (slice(start, start + step) for start in range(0, self.examples, step))

    def _matrices(self, part: slice) -> tuple[Tensor, Tensor]:
        """Return δ as (examples · groups, p, positions), and windows as (examples · groups, q, positions)."""
        m, delta, x = self.module, self.delta[part], self._whole(part)
        examples, records, groups = x.shape[0], x.shape[1], m.groups
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
        return widely(delta, columns.transpose(1, 2)).view(-1, self.size)

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
        if self.route is Route.AGAIN and positions.available(self.device):
            self.delta, self.x, self.turned = self.delta.contiguous(), self.x.contiguous(), True
            return positions.windows(self.x, self.delta, self._geometry(), None, self.examples)
        if self.route is Route.ROWS:
            return super().norms()
        with exact(self.device):  # as the sum is
            return super().norms()

    def _gram(self) -> Tensor:
        found = []
        wide = self.positions * max(self.positions, self.size // self.module.out_channels)
        step = max(1, part_of(self.device) // (4 * self.module.groups * wide))
        for start in range(0, self.examples, step):
            delta, columns = self._matrices(slice(start, start + step))
            grams = (widely(side.transpose(1, 2), side) for side in (delta, columns))
            groups = contracted(*grams).view(-1, self.module.groups)
            found.append(groups.squeeze(1) if groups.shape[1] == 1 else norms(groups))
        return torch.cat(found)

    def _geometry(self) -> positions.Geometry:
        m, inner, outer = self.module, tuple(self.x.shape[1:]), tuple(self.delta.shape[2:])
        return _geometry(inner, outer, m.kernel_size, m.stride, m.dilation, m.groups, self.frame)

    def _compiled(self) -> Tensor:
        """Return rows and norms by the kernel in C. A row is then (groups, q, p)."""
        delta, x, layer = self.delta.contiguous(), self.x.contiguous(), self._geometry()
        self.kept, self.turned = self.room(), True
        found = positions.windows(x, delta, layer, self.kept, self.examples)
        self.release()
        return found

    def add(self, factors: Tensor, out: Tensor) -> None:
        if not self.turned:
            super().add(factors, out)
            return
        if self.kept is None:
            positions.window_sums(self.x, self.delta, self._geometry(), factors, out)
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
        x = self._whole().flatten(0, 1).to(kind)
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
def _geometry(
    inner: tuple[int, ...],
    outer: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    frame: tuple[int, ...],
) -> positions.Geometry:
    """Return where windows begin in a padded example (records, channels, *sides), and each weight looks.

    ``inner`` is the shape of an example without its ``frame``, ``outer`` the filters and sides of its output.
    """
    records, channels, *sides = inner
    filters, *out_sides = outer
    framing: tuple[int, ...] = ()
    if frame:
        high, across = (1, *sides)[-2:]
        left, right, top, bottom = (*frame, 0, 0)[:4]
        framing = records * channels, high, across, top, left, high + top + bottom, across + left + right
        sides = [high + top + bottom, across + left + right][-len(sides) :]
    each, sites = math.prod(sides), math.prod(out_sides)
    base = torch.arange(records) * channels * each
    offsets = torch.arange(channels // groups) * each
    steps = [math.prod(sides[n + 1 :]) for n in range(len(sides))]
    for out, size, by, apart, step in zip(out_sides, kernel, stride, dilation, steps, strict=True):
        base = (base[:, None] + torch.arange(out) * by * step).flatten()
        offsets = (offsets[:, None] + torch.arange(size) * apart * step).flatten()
    shape = positions.PositionShape(
        math.prod(inner), records * sites, sites, groups, filters // groups, len(offsets),
        channels // groups * each, *framing,
    )  # fmt: skip
    return positions.Geometry.of(shape, base, offsets)


def _by_zeros(module: Any) -> bool:
    """Return whether a kernel can leave out the padding, because it is zeros."""
    return module.padding_mode == "zeros" and not isinstance(module.padding, str)


def windows(module: Any, delta: Tensor, x: Tensor, examples: int, factored: bool) -> Term:
    """Return the gradients of a convolution's weights, from its output's gradient and its input."""
    if x.dtype is not delta.dtype or x.dtype is torch.float16:
        x, delta = x.float(), delta.float()
    if factored and fused(x.device) and x.ndim <= 4:
        x = x if _by_zeros(module) else padded(module, x)
        if not 1 < module.groups == module.in_channels or module.kernel_size[-1] > _TAPS:
            return Tiles.convolution(module, delta, x, examples, not _by_zeros(module))
        from farthing.torch.kernels import layer_sums

        rows = layer_sums.depthwise(layer_sums.ConvolutionShape(module, not _by_zeros(module)), delta, x)
        return RowTerms(rows.view(examples, -1, rows.shape[1]).sum(1))
    frame: tuple[int, ...] = ()
    if module.padding_mode == "zeros" and len(module.kernel_size) <= 2 and positions.available(x.device):
        frame = tuple(module._reversed_padding_repeated_twice)
    x = x if frame else padded(module, x)
    delta, x = (part.reshape(examples, -1, *part.shape[1:]) for part in (delta, x))
    return Windows(module, delta, x, frame if any(frame) else ())
