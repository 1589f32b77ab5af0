"""Gaussian noise on flat tensors: the lattice noise of the core, on the tensor's own device.

`Gaussian` has the event, and so the price, of `farthing.queries.mechanisms.Gaussian`, and releases in the
same way: the sum is rounded to a grid, integer noise is added, and only then is it turned into floats. Its
noise is larger by ``slack``, 2⁻⁷, because a model's gradients are float32: `farthing.torch.kernels.totals`
has the theorem on their sums, and what it takes as given.

Noise is drawn ahead (`noise_pool`), since it does not depend on data.

>>> from farthing.queries.bounds import ClipNorm
>>> from farthing.noise.lattice import SeededStream
>>> released = Gaussian(1.0).release(torch.zeros(1000), ClipNorm(2.0), SeededStream(1))
>>> released.dtype, bool(1.8 < released.std() < 2.2)
(torch.float32, True)
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from farthing import validate
from farthing.errors import InvalidValue, Unsupported
from farthing.noise import lattice
from farthing.noise.lattice import Stream
from farthing.queries import mechanisms
from farthing.queries.bounds import Bound
from farthing.torch.kernels import noise_pool
from farthing.torch.kernels.totals import SLACK

_FEW = 2**14  # coordinates below which drawing ahead does not pay


@dataclass(frozen=True, slots=True)
class Gaussian(mechanisms.Gaussian):
    """Gaussian noise of standard deviation ``noise`` · bound on a flat float32 tensor, wherever it lies."""

    slack: float = SLACK

    def __post_init__(self) -> None:
        mechanisms.Gaussian.__post_init__(self)
        validate.positive(slack=self.slack)

    def grid(self, bound: Bound, size: int) -> tuple[int, float]:
        bits, cell = mechanisms.Gaussian.grid(self, bound, size)
        return bits, cell * (1 + self.slack)

    def release(self, total: Any, bound: Any, stream: Stream) -> Any:
        """The noisy sum: a new float32 tensor on the same device.

        A coordinate that is not finite, which no bounded sum has, is refused on a CPU and counts as zero on
        a GPU, where nobody waits for the sum.
        """
        scale = _checked(total, bound)
        bits, cell = self.grid(bound, total.numel())
        if total.device.type == "cpu" and total.numel() < _FEW:
            unit = scale if isinstance(scale, float) else scale.double().numpy()
            released = lattice.noisy(stream, total.detach().double().numpy(), unit, cell, bits)
            return torch.from_numpy(released).float()
        if isinstance(scale, float):
            return noise_pool.release(stream, total, None, cell * scale, bits)
        return noise_pool.release(stream, total, scale, cell, bits)


@dataclass(frozen=True, slots=True)
class FloatGaussian(Gaussian):
    """Float noise of torch's own generator, seeded from the stream: quick, and not sound.

    The low bits of a float sum tell which sums can have produced it, whatever ε is (Mironov 2012), and
    torch's generators are not cryptographic. Only a ledger that says so in its guarantee answers with it:
    ``Ledger(budget, float_noise=True)``.
    """

    on_lattice: ClassVar[bool] = False

    def release(self, total: Any, bound: Any, stream: Stream) -> Any:
        """total + noise · bound · N(0, 1), in float32."""
        scale = _checked(total, bound)
        generator = torch.Generator(total.device)
        generator.manual_seed(int(stream.integers(1)[0] >> np.uint64(1)))
        noise = torch.randn(total.shape, generator=generator, device=total.device, dtype=torch.float32)
        return total + noise * scale * (self.noise * bound.norm() * (1 + self.slack))


def _checked(total: Any, bound: Any) -> float | Tensor:
    """The bound's scale: one number, or a tensor beside the sum."""
    if not isinstance(total, Tensor) or total.ndim != 1 or total.dtype != torch.float32 or not len(total):
        kind = f"{total.dtype} {tuple(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
        raise InvalidValue(f"a sum must be a flat float32 tensor, got {kind}; use Gradient for a model's")
    if total.is_cuda and torch.cuda.is_current_stream_capturing():
        raise Unsupported("a CUDA graph would repeat its noise: capture the sum, and release outside of it")
    mechanisms.refuse_width(bound, total.numel())
    scale = bound.scale
    if math.prod(getattr(scale, "shape", ())) == 1:
        return float(scale)
    return beside(scale, total.device)


def beside(scale: Any, device: torch.device) -> Tensor:
    """A scale of many coordinates on the device, in float32. A constant one travels once."""
    global _kept
    if isinstance(scale, Tensor):
        if scale._version:  # what was measured in one scale must not get noise in another
            raise InvalidValue("a bound's scale was changed in place: make a new bound")
        return scale.detach().to(device, torch.float32).reshape(-1)
    kept = _kept
    if kept is None or kept[0] is not scale or kept[1].device != device or scale.flags.writeable:
        kept = _kept = scale, torch.from_numpy(np.array(scale, dtype=np.float32)).to(device).reshape(-1)
    return kept[1]


_kept: tuple[Any, Tensor] | None = None
