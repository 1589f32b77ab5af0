"""Per-example gradients of layers, by the kernels in C, made and measured in one go; norms of products."""

import functools
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from farthing.noise import native
from farthing.torch.kernels.noise import has_triton


class PositionShape(NamedTuple):
    """The shape of a layer, as the kernel `windows` must know it."""

    size: int
    spots: int
    sites: int
    groups: int
    height: int
    width: int
    apart: int


def available(device: torch.device, outer: bool = False) -> bool:
    """Return whether there is a quick kernel for tensors on a device: of windows, or of ``outer`` products.

    With registers of 32 bytes a library's outer products are quicker.
    """
    registers = ("AVX512",) if outer else ("AVX512", "AVX2")
    if device.type != "cpu" or torch.backends.cpu.get_cpu_capability() not in registers:
        return False
    return native.kernels() is not None


def windows(
    x: Tensor, delta: Tensor, base: Tensor, offsets: Tensor, shape: PositionShape, rows: Tensor
) -> Tensor:
    """Fills ``rows`` (examples, groups · width · height) and returns their norms; all float32, contiguous."""
    kernels = native.kernels()
    assert kernels is not None
    kernel, examples = kernels["windows"], len(rows)
    threads = max(1, min(torch.get_num_threads(), examples))
    room = torch.empty(threads, shape.spots * (-(-shape.height // 32) * 32), dtype=torch.float32)
    squares = torch.empty(examples, dtype=torch.float32)
    inputs = [part.data_ptr() for part in (x, delta, base, offsets)]

    def run(n: int) -> None:
        first, last = (examples * edge // threads for edge in (n, n + 1))
        kernel(*inputs, first, last, *shape, room[n].data_ptr(), rows.data_ptr(), squares.data_ptr())

    in_threads(run, threads)
    return squares.sqrt_()


def in_threads(run: Callable[[int], None], threads: int) -> None:
    """Call ``run`` with each number of a thread, all at once."""
    others = [threading.Thread(target=run, args=(n,)) for n in range(1, threads)]
    for other in others:
        other.start()
    run(0)
    for other in others:
        other.join()


def outers(x: Tensor, delta: Tensor, rows: Tensor) -> Tensor:
    """rows = Σ_t x_t ⊗ δ_t of each example, for x (examples, positions, q) and δ (…, p), and their norms."""
    _, positions, width = x.shape
    shape = PositionShape(positions * width, positions, 0, 1, delta.shape[2], width, 0)
    return windows(x.contiguous(), delta.contiguous(), *_steps(positions, width), shape, rows)


@functools.lru_cache(maxsize=256)
def _steps(positions: int, width: int) -> tuple[Tensor, Tensor]:
    return torch.arange(positions) * width, torch.arange(width)


def fused(device: torch.device, positions: int = 1) -> bool:
    """Return whether there are kernels for norms of so many positions (`grams`)."""
    if device.type != "cuda" or not has_triton():
        return False
    from farthing.torch.kernels import grams

    return bool(grams.fits(device) and positions <= grams.MOST)


def where(good: Tensor, values: Tensor) -> Tensor:
    """Return each example that is good, and zeros."""
    return torch.where(good.view(-1, *(1,) * (values.ndim - 1)), values, 0.0)


def blanked(good: Tensor, values: Tensor) -> Tensor:
    """Do what `where` does, in place: on a GPU good examples are not even read."""
    if not fused(values.device) or not values.is_contiguous():
        return where(good, values)
    from farthing.torch.kernels import grams

    grams.blank(values, good)
    return values


def group_sums(x: Tensor, delta: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """Σ δ x̂ and Σ δ of every image and channel, by the kernel in C; x̂ is x normalised over its group."""
    channels, sites = x.shape[1], x[0, 0].numel()
    found = torch.empty(2, len(x), channels, dtype=torch.float32)
    places = x.contiguous(), delta.contiguous()
    sizes = len(x), groups, channels // groups, sites
    _kernel("group_sums")(*(p.data_ptr() for p in places), *sizes, eps, *(f.data_ptr() for f in found))
    return found[0], found[1]


def norm_sums(x: Tensor, delta: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """Σ δ x̂ and Σ δ over the positions of every example, (examples, positions, width), by the kernel in C."""
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
    """Σ_ij inverse_ij u_bi² v_bj² of every row b: squared norms of u ⊗ v, its coordinates weighted.

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
