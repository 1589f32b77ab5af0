"""Noise that is correlated over turns, on flat tensors: by bands or by buffers, on any device.

The theorems are in `farthing.queries.correlated` and `farthing.queries.buffered`.

The noise of the last turns stays on the tensor's device, 32 bits a coordinate where the grid allows it. What
it takes from the noise of a turn is added up in float64, a piece at a time, so that a release needs little
more memory than one of independent noise.

>>> from farthing.noise.lattice import SeededStream
>>> from farthing.queries.bounds import ClipNorm
>>> noise, stream = BandedTensorGaussian(1.0, bands=4).begin(), SeededStream(1)
>>> turns = [noise.release(torch.zeros(20_000), ClipNorm(1.0), stream, turn) for turn in range(2)]
>>> bool((turns[0] @ turns[1]) / 20_000 < -0.5)  # the second cancels a part of the first
True
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farthing import validate
from farthing.noise import native
from farthing.noise.lattice import Stream
from farthing.queries import buffered, correlated
from farthing.queries.bounds import Bound
from farthing.torch.kernels import noise
from farthing.torch.kernels.totals import SLACK

_CHUNK = {"cpu": 2**16, "cuda": 2**24}  # coordinates at a time


@dataclass(frozen=True, slots=True)
class BandedTensorGaussian(correlated.BandedGaussian):
    """Correlated Gaussian noise on a lattice for flat float32 tensors, on any device.

    Parameters
    ----------
    noise_multiplier, bands, exponent
        As for `farthing.BandedGaussian`, whose price it has.
    slack : float, default `totals.SLACK`
        How much larger the noise is, relatively, to cover the rounding of float32 sums.

    Examples
    --------
    >>> from farthing.noise.lattice import SeededStream
    >>> from farthing.queries.bounds import ClipNorm
    >>> BandedTensorGaussian(1.0, 4).release(torch.zeros(5), ClipNorm(1.0), SeededStream(0)).shape
    torch.Size([5])
    """

    slack: float = SLACK

    def __post_init__(self) -> None:
        correlated.BandedGaussian.__post_init__(self)
        validate.positive(slack=self.slack)

    def grid(self, bound: Bound, size: int) -> tuple[int, float]:
        bits, cell = correlated.BandedGaussian.grid(self, bound, size)
        return bits, cell * (1 + self.slack)

    def release(self, total: Any, bound: Any, stream: Stream, turn: int = 0) -> Any:
        """Return the noisy sum: a new float32 tensor on the same device."""
        scale = noise.checked(total, bound)
        bits, cell = self.grid(bound, total.numel())
        unit = None if isinstance(scale, float) else scale
        each = cell * scale if isinstance(scale, float) else cell
        if self._history is None:
            return noise.release(stream, total, unit, each, bits)
        kind = total.numel(), bits, total.device
        with self._history.lock:
            before = self._history.before(turn, kind)
            own = noise.drawn(stream, total.numel(), bits, total.device).to(torch.int64)
            if self.bands > 1 and _Ring.fits(total, bits):
                ring = before[0] if before else _Ring(len(own), self.coefficients, bits, own.device)
                kept: Any = ring.less(own)
            else:
                kept = _less(own, list(before), self.coefficients, bits)
            released = noise.released(total, own, unit, each)
            self._history.keep(turn, kind, kept)
        return released


class _Ring:
    """The noise of the last turns as rows of one array on a GPU, the latest at ``_head``: one pass a turn."""

    def __init__(self, size: int, column: tuple[float, ...], bits: int, device: torch.device) -> None:
        self._rows = torch.empty(len(column) - 1, size, dtype=torch.int32, device=device)
        self._column = torch.tensor(column[1:], dtype=torch.float64, device=device)
        self._far, self._head, self._count = 2 ** (bits + correlated.FAR), 0, 0

    @staticmethod
    def fits(total: Tensor, bits: int) -> bool:
        """Return whether there is a kernel for it, and noise is kept in 32 bits."""
        return total.is_cuda and noise.has_triton() and bits + correlated.FAR < 31

    def less(self, own: Tensor) -> "_Ring":
        """Take from the noise of this turn what that of earlier turns does, in place, and keep it."""
        from farthing.torch.kernels import lattice_noise

        lattice_noise.less_earlier(own, self._rows, self._column, self._head, self._count, self._far)
        self._head = (self._head - 1) % len(self._rows)
        self._count = min(self._count + 1, len(self._rows))
        return self


def _less(own: Tensor, before: list[Tensor], column: tuple[float, ...], bits: int) -> Tensor:
    """Take from the noise of this turn what the noise of earlier ones does, in place; return what is kept.

    That is the same, not beyond 64 standard deviations, as narrow as that allows.
    """
    far = 2 ** (bits + correlated.FAR)
    kept = torch.empty(len(own), dtype=torch.int32 if far < 2**31 else torch.int64, device=own.device)
    found = native.kernels(len(own)) if own.device.type == "cpu" else None
    if found is not None and kept.dtype is torch.int32:
        places = np.array([earlier.data_ptr() for earlier in before] or [0], np.uintp)
        factors = np.array(column[1:] or [0.0])
        ends = native.pointer(places), native.pointer(factors), len(before), far, kept.data_ptr()
        found["less_earlier"](own.data_ptr(), len(own), *ends)
        return kept
    step = _CHUNK.get(own.device.type, 2**20)
    for start in range(0, len(own), step):
        part = slice(start, start + step)
        taken = torch.zeros(len(own[part]), dtype=torch.float64, device=own.device)
        for factor, earlier in zip(column[1:], before, strict=False):
            taken.add_(earlier[part], alpha=factor)
        own[part] -= taken.round_().to(torch.int64)
        kept[part] = own[part].clamp(-far, far)
    return kept


@dataclass(frozen=True, slots=True)
class BufferedTensorGaussian(buffered.BufferedGaussian):
    """Gaussian noise correlated over all turns, by buffers, for flat float32 tensors on any device.

    Parameters
    ----------
    noise_multiplier, weights, decays, steps, groups
        As for `farthing.BufferedGaussian`, whose price it has.
    slack : float, default `totals.SLACK`
        How much larger the noise is, relatively, to cover the rounding of float32 sums.

    Examples
    --------
    >>> from farthing.noise.lattice import SeededStream
    >>> from farthing.queries.bounds import ClipNorm
    >>> noise, stream = BufferedTensorGaussian(1.0, (0.3,), (0.9,), 9, 9).begin(), SeededStream(1)
    >>> turns = [noise.release(torch.zeros(20_000), ClipNorm(1.0), stream, turn) for turn in range(2)]
    >>> bool((turns[0] @ turns[1]) / 20_000 < -0.3)
    True
    """

    slack: float = SLACK

    def __post_init__(self) -> None:
        buffered.BufferedGaussian.__post_init__(self)
        validate.positive(slack=self.slack)

    def release(self, total: Any, bound: Any, stream: Stream, turn: int = 0) -> Any:
        """Return the noisy sum: a new float32 tensor on the same device."""
        scale = noise.checked(total, bound)
        self.refuse_turn(turn)
        bits, cell, units = self.lattice(bound, total.numel())
        unit, cell = None if isinstance(scale, float) else scale, cell * (1 + self.slack)
        each = cell * scale if isinstance(scale, float) else cell
        if self._memory is None:
            return noise.release(stream, total, unit, each, bits)
        kind = total.numel(), bits, total.device
        with self._memory.lock:
            kept = self._memory.before(turn, kind)
            own = noise.drawn(stream, total.numel(), bits, total.device).to(torch.int64)
            after = _through(own, kept, self, bits, units)
            released = noise.released(total, own, unit, each)
            self._memory.keep(turn, kind, after)
        return released


def _through(
    own: Tensor, kept: list[Tensor], mechanism: BufferedTensorGaussian, bits: int, units: float
) -> list[Tensor]:
    """Take from the noise of this turn what the buffers do, in place; return the buffers after it."""
    after = kept or [torch.zeros(len(own), dtype=torch.float64, device=own.device) for _ in mechanism.weights]
    far, step = 2 ** (bits + correlated.FAR), _CHUNK.get(own.device.type, 2**20)
    for start in range(0, len(own), step):
        part = slice(start, start + step)
        taken = torch.zeros(len(own[part]), dtype=torch.float64, device=own.device)
        for weight, buffer in zip(mechanism.weights, after, strict=True):
            taken.add_(buffer[part], alpha=weight)
        own[part] -= taken.div_(units).round_().to(torch.int64)
        entering = own[part].clamp(-far, far).to(torch.float64).mul_(units)
        for decay, buffer in zip(mechanism.decays, after, strict=True):
            buffer[part].mul_(decay).round_().add_(entering).clamp_(-(2.0**52), 2.0**52)
    return after
