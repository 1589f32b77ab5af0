"""Add noise that is correlated over turns to flat tensors, by bands or by buffers, on any device.

The theorems are in `farthing.queries.correlated` and `farthing.queries.buffered`.

The noise of the last turns is kept on the tensor's device, in 32 bits per coordinate if the grid allows it.
The part that is subtracted from the noise of a turn is added up in float64, piece by piece, so that a release
needs little more memory than one with independent noise. Noise depends on no record, so on a CPU a thread
makes the noise of several turns in one pass over the noise of earlier ones, while the model computes. Noise
that was made for a turn is used for that turn or never.

>>> from farthing.noise.lattice import SeededStream
>>> from farthing.queries.bounds import ClipNorm
>>> noise, stream = BandedTensorGaussian(1.0, bands=4).begin(), SeededStream(1)
>>> turns = [noise.release(torch.zeros(20_000), ClipNorm(1.0), stream, turn) for turn in range(2)]
>>> bool((turns[0] @ turns[1]) / 20_000 < -0.5)  # the second cancels a part of the first
True
"""

import functools
import math
import os
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farthing import validate
from farthing.accounting.correlated import banded_row_noise
from farthing.noise import lattice, native
from farthing.noise.lattice import Stream
from farthing.queries import buffered, correlated
from farthing.queries.bounds import Bound
from farthing.torch.kernels import noise
from farthing.torch.kernels.totals import SLACK

_CHUNK = {"cpu": 2**16, "cuda": 2**24}  # coordinates at a time
_TURNS = 8  # whose noise is made in one pass, at most: as many as the kernel in C has sums
_AHEAD = 2**19  # numbers that are made ahead beyond those of bands
_SAMPLES = 2**15  # drawn at a time: they stay in the cache


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
        kind = total.numel(), bits, total.device, os.getpid()
        with self._history.lock.held:
            before = self._history.before(turn, kind)
            if _Ahead.fits(total, self, bits):
                kept: Any = before[0] if before and before[0].turn == turn else _Ahead(self, kind, turn)
                own = kept.take(stream)
            else:
                own = noise.drawn(stream, total.numel(), bits, total.device).to(torch.int64)
                if self.bands > 1 and _Ring.fits(total, bits):
                    ring = before[0] if before else _Ring(len(own), self.coefficients, bits, own.device)
                    kept = ring.less(own)
                else:
                    kept = _less(own, list(before), self.coefficients, bits)
            released = noise.released(total, own, unit, each)
            self._history.keep(turn, kind, kept)
        return released


class _Ahead:
    """The noise of the last turns and of some to come, as rows of one array in a CPU's memory.

    Rows hold noise up to 128 standard deviations of Z, more than 32 of its own (`fits`): as on a GPU, noise
    further out is an error. Eneström and Kakeya's theorem bounds its own: coefficients fall by the factor
    (exponent + j - 1) / j, so C⁻¹ falls geometrically, from the start to what `_row_noise` adds up.
    """

    def __init__(self, mechanism: BandedTensorGaussian, kind: tuple[Any, ...], turn: int) -> None:
        self._size, self._bits, *_ = kind
        self._ahead = min(_TURNS, max(_AHEAD // self._size, mechanism.bands - 2, 1))
        count = max(mechanism.bands - 1, self._ahead + 1)  # the row that is being released is not written
        pitch = 16 * (-(-self._size // 16) | 1)  # rows begin in different sets of a cache
        self._rows = np.zeros((count, pitch), np.int32)
        self._column = np.zeros(count + _TURNS)
        self._column[: mechanism.bands] = mechanism.coefficients
        self._slot = self._left = self._taken = 0
        self._mixed: Future[int] | None = None
        self.turn = turn  # whose noise is the next; -1 while it is made

    @staticmethod
    def fits(total: Tensor, mechanism: BandedTensorGaussian, bits: int) -> bool:
        """Return whether noise is kept in 32 bits on a CPU, and stays within them."""
        small = total.device.type == "cpu" and mechanism.bands > 1 and bits + correlated.FAR < 31
        return small and _row_noise(mechanism.bands, mechanism.exponent) < 4

    def take(self, stream: Stream) -> Tensor:
        """Return the noise of this turn; begin with that of the turns after it, if it was the last."""
        turn, self.turn = self.turn, -1  # after an interruption here the noise begins anew
        if not self._left:
            self._left = (self._mixed or self._begun(stream, 1)).result()
        own = self._rows[(self._slot - self._left) % len(self._rows), : self._size]
        self._left, self._taken, self.turn = self._left - 1, self._taken + 1, turn + 1
        if not self._left:
            self._mixed = self._begun(stream, self._ahead) if self._taken > 1 else None
        return torch.from_numpy(own)

    def _begun(self, stream: Stream, turns: int) -> "Future[int]":
        """Begin with the noise of so many turns; return their number when it is there."""
        found, key, slot = Future[int](), stream.integers(4).tobytes(), self._slot
        self._slot = (slot + turns) % len(self._rows)

        def mix() -> None:
            try:
                self._mix(noise.Keyed(key), slot, turns)
                found.set_result(turns)
            except BaseException as error:
                found.set_exception(error)

        # Not a daemon: one that is cut off inside torch takes the process down with it.
        threading.Thread(target=mix, name="farthing noise").start()
        return found

    def _mix(self, stream: Stream, slot: int, turns: int) -> None:
        """Write the noise of some turns from this slot on, a piece of all of them at a time."""
        step = _SAMPLES // turns
        room = np.empty(min(step, self._size) * turns, np.int64)
        for start in range(0, self._size, step):
            size = min(step, self._size - start)
            drawn = lattice.gaussian(stream, size * turns, self._bits, room[: size * turns])
            if self._mix_part(drawn.reshape(turns, size), start, slot):
                raise ArithmeticError("noise lies 32 standard deviations out, which ideal bits never give")

    def _mix_part(self, drawn: NDArray[np.int64], start: int, slot: int) -> int:
        """Write a piece; return how many numbers do not fit."""
        (turns, size), count, far = drawn.shape, len(self._rows), 2.0 ** (self._bits + correlated.FAR)
        found = native.kernels(drawn.size)
        if found is not None:
            rows, column = native.pointer(self._rows.ravel()[start:]), native.pointer(self._column)
            ring = rows, self._rows.shape[1], count, slot, column
            return int(found["mixed_ahead"](native.pointer(drawn), size, *ring, turns, far))
        rows, beyond = self._rows[:, start : start + size], 0
        for i, fresh in enumerate(drawn):
            taken = np.zeros(size)
            for j in range(1, count + 1):
                taken += self._column[j] * np.clip(rows[(slot + i - j) % count], -far, far)
            own = fresh - np.rint(taken).astype(np.int64)
            beyond += int((np.abs(own) >= 2**31).sum())
            rows[(slot + i) % count] = own.astype(np.int32)
        return beyond


@functools.lru_cache(64)
def _row_noise(bands: int, exponent: float) -> float:
    """Return a row's standard deviation over that of Z in a plan of any length; infinite where it is long."""
    if exponent > 0.95:
        return math.inf
    return banded_row_noise(bands, exponent, math.ceil(32 * bands / (1 - exponent)))


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
        with self._memory.lock.held:
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
