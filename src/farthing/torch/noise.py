"""Gaussian noise on flat tensors: the lattice noise of the core, on the tensor's own device.

`Gaussian` has the event, and so the price, of `farthing.mechanisms.Gaussian`, and releases in the same way:
the sum is rounded to a grid, integer noise is added, and only then is it turned into floats. Its noise is
larger by ``slack``, 2⁻¹⁰, because a model's gradients are float32:

* An example's norm and its clipped gradient are float32. Libraries add in blocks, so no term goes through
  more than some thousand roundings of 2⁻²⁴: the clipped gradient is longer than its clip by less than 2⁻¹¹.
* The sum over a lot rounds as well, and which way depends on who is in it. An addition moves a coordinate by
  at most 2⁻²⁴ of its partial sum; k of them move the sum by about √k 2⁻²⁴ |Σ g|, roundings going either way.
  2⁻¹¹ of the clip covers that while √k |Σ g| is below 8,000 clips: lots of 400 examples that all pull the
  same way, or of thousands that do not. Give a larger slack for more, or sum parts in float64.

**Drawn ahead.** Noise does not depend on data, so what the next releases need is drawn while the model
computes: on a CPU by a thread of its own, on a GPU by a kernel (`kernels`) whose open roundings a CPU settles
exactly before the noise is used. How much is drawn under which key is decided when noise is asked for, never
by who is faster, so a seeded run repeats itself. Drawn noise is used once; a forked child drops it.

>>> from farthing.bounds import ClipNorm
>>> from farthing.noise import SeededStream
>>> released = Gaussian(1.0).release(torch.zeros(1000), ClipNorm(2.0), SeededStream(1))
>>> released.dtype, bool(1.8 < released.std() < 2.2)
(torch.float32, True)
"""

import math
import os
import struct
import threading
import weakref
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

from farthing import mechanisms, validate
from farthing import noise as lattice
from farthing.bounds import Bound, ClipValue
from farthing.errors import InvalidValue, Unsupported
from farthing.noise import Stream

_FEW = 2**14  # coordinates below which drawing ahead does not pay
_AHEAD = 2**21  # samples drawn ahead at most, or those of one release
_RELEASES = 64
_SHELVES = 4  # kinds of release whose noise is kept ahead, a stream
_CHUNK = 2**17  # coordinates at a time on a CPU: they stay in the cache
_LARGEST = 2.0**52  # cells: whole numbers up to here add up exactly in float64


@dataclass(frozen=True, slots=True)
class Gaussian(mechanisms.Gaussian):
    """Gaussian noise of standard deviation ``noise`` · bound on a flat float32 tensor, wherever it lies."""

    slack: float = 2.0**-10

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
        if total.device.type == "cpu":
            if not math.isfinite(total.abs().max()):  # a NaN is the largest of all
                raise InvalidValue("a bounded sum is not finite: a contribution returned unbounded terms")
            if total.numel() < _FEW:
                unit = scale if isinstance(scale, float) else scale.double().numpy()
                released = lattice.noisy(stream, total.double().numpy(), unit, cell, bits)
                return torch.from_numpy(released).float()
        shelf = _shelf(stream, total.numel(), bits, total.device)
        if isinstance(scale, float):
            return shelf.release(stream, total, None, cell * scale)
        return shelf.release(stream, total, scale, cell)


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
    if isinstance(bound, ClipValue) and total.numel() != 1:
        raise InvalidValue(f"ClipValue bounds one number, the sum has {total.numel()}; use ClipCoordinates")
    scale = bound.scale
    width = scale.numel() if isinstance(scale, Tensor) else np.size(scale)
    if width == 1:
        return float(scale)
    if width != total.numel():
        raise InvalidValue(f"the bound has {width} coordinates, the sum has {total.numel()}")
    scale = scale if isinstance(scale, Tensor) else torch.from_numpy(np.array(scale, dtype=np.float32))
    return scale.detach().to(total.device).reshape(-1)


def _released(total: Tensor, noise: Tensor, scale: Tensor | None, cell: float) -> Tensor:
    """(round(total / scale / cell) + noise) · cell · scale, with whole numbers held exactly in float64."""
    total = total.detach()
    if total.is_cuda and (kernels := triton_kernels()) is not None:
        return kernels.release(total.contiguous(), noise, scale, cell)
    out, room = torch.empty_like(total), total.new_empty(min(_CHUNK, total.numel()), dtype=torch.float64)
    for start in range(0, total.numel(), _CHUNK):
        part = slice(start, start + _CHUNK)
        cells = room[: total[part].numel()].copy_(total[part])
        each = 1.0 if scale is None else scale[part].double()
        cells.div_(each * cell).round_().clamp_(-_LARGEST, _LARGEST)
        if total.device.type != "cpu":
            cells.nan_to_num_(0.0)
        out[part] = cells.add_(noise[part]).mul_(each * cell)
    return out


def triton_kernels() -> Any:
    """The Triton kernels, or None where Triton is not installed."""
    try:
        from farthing.torch import kernels
    except ModuleNotFoundError as missing:
        if missing.name != "triton":
            raise
        return None
    return kernels


class _Keyed(Stream):
    """The stream of one draw, under a key from the ledger's stream."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        super().__init__()

    def _new_key(self) -> bytes:
        key, self._key = self._key, os.urandom(32)  # once: whoever forks goes on with other words
        return key


class _Draw:
    """Noise for ``count`` releases, begun at once. Nothing of it is handed out twice."""

    def __init__(self, stream: Stream, size: int, bits: int, device: torch.device, count: int) -> None:
        self._size, self.left = size, count
        self._noise: Tensor | None = None
        key = stream.integers(4).tobytes()
        kernels = triton_kernels() if device.type == "cuda" else None
        self._drawn: _Threaded | _Launched = (
            _Threaded(key, size * count, bits, device)
            if kernels is None
            else _Launched(kernels, stream, key, size * count, bits, device)
        )

    def take(self) -> Tensor:
        """The noise of the next release."""
        if self._noise is None:
            self._noise = self._drawn.result()
        self.left -= 1
        return self._noise[self.left * self._size : (self.left + 1) * self._size]


class _Threaded:
    """Drawn by a thread that ends with its work, or with the process."""

    def __init__(self, key: bytes, size: int, bits: int, device: torch.device) -> None:
        self._future: Future[Tensor] = Future()

        def draw() -> None:
            try:
                drawn = torch.from_numpy(lattice.gaussian(_Keyed(key), size, bits))
                self._future.set_result(drawn.to(device))
            except BaseException as error:
                self._future.set_exception(error)

        threading.Thread(target=draw, name="farthing noise", daemon=True).start()

    def result(self) -> Tensor:
        return self._future.result()


class _Launched:
    """Drawn by a kernel. The places it left open come back beside the work that follows."""

    def __init__(
        self, kernels: Any, stream: Stream, key: bytes, size: int, bits: int, device: torch.device
    ) -> None:
        self._kernels, self._stream, self._key, self._bits = kernels, stream, key, bits
        self._noise, places = kernels.gaussian(key, size, bits, device)
        self._places = torch.empty(places.shape, dtype=torch.int64, pin_memory=True)
        self._places.copy_(places, non_blocking=True)
        self._queue = torch.cuda.current_stream(device)
        self._done = torch.cuda.Event()
        self._done.record(self._queue)

    def result(self) -> Tensor:
        """The noise with every rounding settled."""
        self._done.synchronize()
        count, *places = self._places[: 1 + int(self._places[0])].tolist()
        if count > len(places):
            raise ArithmeticError(f"{count} roundings are open where at most {len(places)} are ever expected")
        if places:
            places.sort()  # the order in which a GPU noted them is no order
            settled = settle(self._stream, self._key, places, self._bits, self._kernels.block_of)
            if np.abs(settled).max() > torch.iinfo(self._noise.dtype).max:
                raise ArithmeticError("a sample lies 32 standard deviations out, which ideal bits never give")
            at = torch.tensor(places, device=self._noise.device)
            self._noise[at] = torch.from_numpy(settled).to(self._noise.device, self._noise.dtype)
        if (queue := torch.cuda.current_stream(self._noise.device)) != self._queue:
            self._noise.record_stream(queue)
        return self._noise


def settle(stream: Stream, key: bytes, places: list[int], bits: int, block_of: Any) -> lattice.Integers:
    """The samples at these places of a kernel's draw, in exact arithmetic, from the same words."""
    words = np.array([_word(key, *block_of(place)) for place in places], np.uint64).view(np.int64)
    cells = lattice._cells(stream, lattice._HALF_NORMAL, words & (2**63 - 1), bits)
    return np.where(words < 0, -cells, cells)


def _word(key: bytes, block: int, word: int) -> int:
    cipher = Cipher(algorithms.ChaCha20(key, struct.pack("<QQ", block, 0)), None)
    return int.from_bytes(cipher.encryptor().update(bytes(64))[8 * word : 8 * word + 8], "little")


class _Shelf:
    """What is ahead for one kind of release. Noise is drawn ahead once the kind has been asked for twice."""

    def __init__(self, bits: int) -> None:
        self._bits, self._asked = bits, 0
        self._draw: _Draw | None = None
        self._lock = threading.Lock()

    def release(self, stream: Stream, total: Tensor, scale: Tensor | None, cell: float) -> Tensor:
        size, device = total.numel(), total.device
        with self._lock:
            draw = self._draw or _Draw(stream, size, self._bits, device, 1)
            self._draw = None  # whatever fails now, this noise is not used again
            out = _released(total, draw.take(), scale, cell)
            if draw.left:
                self._draw = draw
                return out
            del draw  # its memory is free for the next one
            self._asked += 1
            if self._asked > 1:
                count = max(1, min(_RELEASES, _AHEAD // size))
                self._draw = _Draw(stream, size, self._bits, device, count)
            return out


_stocks: "weakref.WeakKeyDictionary[Stream, dict[Any, _Shelf]]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_process = os.getpid()


def _shelf(stream: Stream, size: int, bits: int, device: torch.device) -> _Shelf:
    if _process != os.getpid():  # a fork that bypassed Python's hooks
        _drop_in_child()
    with _lock:
        shelves = _stocks.setdefault(stream, {})
        shelf = shelves.setdefault((size, bits, device), _Shelf(bits))
        if len(shelves) > _SHELVES:
            shelves.pop(next(iter(shelves)))
        return shelf


def _drop_in_child() -> None:
    """A forked child must not use what its parent will: it begins with nothing ahead."""
    global _stocks, _lock, _process
    _stocks, _lock, _process = weakref.WeakKeyDictionary(), threading.Lock(), os.getpid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_in_child)
