# mypy: ignore-errors
"""A Triton kernel: AdaDP's step, all of it in one pass over the coordinates.

Imported only where Triton is installed; see `farthing.torch.kernels.lattice_noise`. Tensors must be
contiguous.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


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
    """What `farthing.torch.methods.adadp.adapted` does, on a GPU."""
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
