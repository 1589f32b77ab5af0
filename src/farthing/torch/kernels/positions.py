"""Compute and measure per-example gradients of layers in one pass, by kernels in C."""

import functools
import math
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from farthing.noise import native
from farthing.torch.kernels.noise import has_triton

_FEW = 16  # examples that `window_sums` in C makes room for at once
_PITCH = 32  # filters that the kernels take at once, at most


class PositionShape(NamedTuple):
    """The shape of a layer, as the kernels must know it; the last seven are zeros where nothing is padded."""

    size: int
    spots: int
    sites: int
    groups: int
    height: int
    width: int
    apart: int
    planes: int = 0
    high: int = 0
    across: int = 0
    top: int = 0
    left: int = 0
    tall: int = 0
    broad: int = 0

    def room(self) -> int:
        """Return how many numbers a kernel needs for an example: its padded input and its turned δ."""
        return self.planes * self.tall * self.broad + self.spots * (-(-self.height // _PITCH) * _PITCH)


class Geometry(NamedTuple):
    """A shape, where every window begins, where each weight looks, and all of it as the kernels read it."""

    shape: PositionShape
    base: Tensor
    offsets: Tensor
    sizes: Tensor

    @classmethod
    def of(cls, shape: PositionShape, base: Tensor, offsets: Tensor) -> "Geometry":
        """Return the geometry of a layer."""
        return cls(shape, base, offsets, torch.tensor(shape))

    def pointers(self, x: Tensor, delta: Tensor) -> list[int]:
        """Return the first arguments of every kernel."""
        return [part.data_ptr() for part in (x, delta, self.base, self.offsets, self.sizes)]


def available(device: torch.device, outer: bool = False) -> bool:
    """Return whether there is a quick kernel for tensors on a device: of windows, or of ``outer`` products.

    With registers of 32 bytes a library's outer products are quicker.
    """
    registers = ("AVX512",) if outer else ("AVX512", "AVX2")
    if device.type != "cpu" or torch.backends.cpu.get_cpu_capability() not in registers:
        return False
    return native.kernels() is not None


def windows(x: Tensor, delta: Tensor, layer: Geometry, rows: Tensor | None, examples: int) -> Tensor:
    """Fill ``rows`` (examples, groups · width · height), if asked to, and return their norms; all float32."""
    name, to = ("window_squares", []) if rows is None else ("windows", [rows.data_ptr()])
    kernel, inputs = _kernel(name), layer.pointers(x, delta)
    threads = max(1, min(torch.get_num_threads(), examples))
    room = torch.empty(threads, layer.shape.room(), dtype=torch.float32)
    squares = torch.empty(examples, dtype=torch.float32)

    def run(n: int) -> None:
        first, last = (examples * edge // threads for edge in (n, n + 1))
        kernel(*inputs, first, last, room[n].data_ptr(), *to, squares.data_ptr())

    in_threads(run, threads)
    return squares.sqrt_()


def window_sums(x: Tensor, delta: Tensor, layer: Geometry, factors: Tensor, out: Tensor) -> None:
    """Add Σ factor · gradient to ``out``, (groups · height · width), from rows made again, in float64."""
    shape, examples = layer.shape, factors.shape[0]
    kernel, inputs, factors = _kernel("window_sums"), layer.pointers(x, delta), factors.contiguous()
    threads = max(1, min(torch.get_num_threads(), shape.width // 64))
    room = torch.empty(threads, _FEW * shape.room(), dtype=torch.float32)
    total = torch.empty(out.numel(), dtype=torch.float64)
    ends = [shape.width // 64 * n // threads * 64 for n in range(threads)] + [shape.width]

    def run(n: int) -> None:
        some = factors.data_ptr(), examples, ends[n], ends[n + 1]
        kernel(*inputs, *some, room[n].data_ptr(), total.data_ptr(), out.data_ptr())

    in_threads(run, threads)


def in_threads(run: Callable[[int], None], threads: int) -> None:
    """Call ``run`` with each number of a thread, all at once."""
    if threads == 1:
        run(0)
        return
    others = [threading.Thread(target=run, args=(n,)) for n in range(1, threads)]
    for other in others:
        other.start()
    run(0)
    for other in others:
        other.join()


def outers(x: Tensor, delta: Tensor, rows: Tensor | None) -> Tensor:
    """Return the norms of Σ_t x_t ⊗ δ_t, for x (examples, positions, q) and δ (…, p), and fill ``rows``."""
    layer = _steps(x.shape[1], x.shape[2], delta.shape[2])
    return windows(x.contiguous(), delta.contiguous(), layer, rows, x.shape[0])


@functools.lru_cache(maxsize=256)
def _steps(positions: int, width: int, height: int) -> Geometry:
    shape = PositionShape(positions * width, positions, 0, 1, height, width, 0)
    return Geometry.of(shape, torch.arange(positions) * width, torch.arange(width))


def fused(device: torch.device, positions: int = 1) -> bool:
    """Return whether there are kernels for norms of so many positions (`grams`)."""
    if device.type != "cuda" or not has_triton():
        return False
    from farthing.torch.kernels import grams

    return bool(grams.fits(device) and positions <= grams.MOST)


def where(good: Tensor, values: Tensor) -> Tensor:
    """Return each example that is good, and zeros for the others."""
    return torch.where(good.view(-1, *(1,) * (values.ndim - 1)), values, 0.0)


def blanked(good: Tensor, values: Tensor) -> Tensor:
    """Replace examples that are not good by zeros, in place: on a GPU good examples are not even read."""
    if not fused(values.device) or not values.is_contiguous():
        return where(good, values)
    from farthing.torch.kernels import grams

    grams.blank(values, good)
    return values


def group_sums(
    x: Tensor, delta: Tensor, groups: int, eps: float, gamma: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return Σ δ x̂ and Σ δ of every image and channel, by the kernel in C; x̂ is x normalised over its group.

    With ``gamma``, the scale of the channels, the third is the gradient of x, where δ is that of γ x̂.
    """
    (images, channels, *sides), back = x.shape, None if gamma is None else torch.empty_like(delta)
    found = torch.empty(2, images, channels, dtype=torch.float32)
    places = [p.data_ptr() for p in (x, delta)] + [None if gamma is None else gamma.data_ptr()]
    sizes = images, groups, channels // groups, math.prod(sides)
    to = [f.data_ptr() for f in found] + [None if back is None else back.data_ptr()]
    _kernel("group_sums")(*places, *sizes, eps, *to)
    return found[0], found[1], back


def norm_sums(x: Tensor, delta: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """Return Σ δ x̂ and Σ δ over positions, for (examples, positions, width), by the kernel in C."""
    found = torch.empty(2, len(x), x.shape[2], dtype=torch.float32)
    places = x.contiguous(), delta.contiguous()
    numbers = *x.shape, eps, centred
    _kernel("layer_sums")(*(p.data_ptr() for p in places), *numbers, *(f.data_ptr() for f in found))
    return found[0], found[1]


def lookup_norms(ids: Tensor, v: Tensor) -> Tensor:
    """Return the norm of each example's Σ_t e(ids_t) ⊗ v_t, added up in float64 by the kernel in C."""
    found, room = (torch.empty(size, dtype=torch.float64) for size in (len(v), v[:1].numel()))
    places = ids.long().contiguous(), v.contiguous()
    _kernel("lookup_squares")(*(p.data_ptr() for p in places), *v.shape, room.data_ptr(), found.data_ptr())
    return found.sqrt_().float()


def _kernel(name: str) -> Callable[..., object]:
    kernels = native.kernels()
    assert kernels is not None
    return kernels[name]


def scaled_squares(u: Tensor, v: Tensor, inverse: Tensor) -> Tensor:
    """Return Σ_ij inverse_ij u_bi² v_bj² of every row b: squared norms of u ⊗ v, its coordinates weighted.

    Squares are rounded up by 2⁻¹⁰⁰: tiny factors beside huge ones count, and no product is denormal.

    >>> one = torch.tensor([[2.0]])
    >>> scaled_squares(one, torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 0.5]]))
    tensor([22.])
    """
    tiny = torch.full((), 2.0**-100, device=u.device, dtype=torch.float32)
    u, v = torch.addcmul(tiny, u, u), torch.addcmul(tiny, v, v)
    if len(inverse) <= inverse.shape[1]:  # the smaller side is what a product leaves
        return (torch.mm(inverse, v.t()).t() * u).sum(1)
    return (torch.mm(u, inverse) * v).sum(1)
