"""Add Gaussian noise to flat tensors: the lattice noise of the core, on the tensor's own device.

`TensorGaussian` has the event, and so the price, of `farthing.queries.mechanisms.Gaussian`, and releases in
the same way: the sum is rounded to a grid, integer noise is added, and only then is it turned into floats.
Its noise is larger by ``slack``, 2⁻⁷, because a model's gradients are float32:
`farthing.torch.kernels.totals` has the theorem on their sums, and what it takes as given.

>>> from farthing.queries.bounds import ClipNorm
>>> from farthing.noise.lattice import SeededStream
>>> released = TensorGaussian(1.0).release(torch.zeros(1000), ClipNorm(2.0), SeededStream(1))
>>> released.dtype, bool(1.8 < released.std() < 2.2)
(torch.float32, True)

**Noise pool.** The noise of the next releases is drawn while the model computes. Noise does not depend on
data, so it need not wait for the sum, and noise that was drawn earlier reveals nothing by the time that it
took. On a CPU a thread draws the noise for small sums (`farthing.noise.lattice`); that of large sums takes 2
nanoseconds per number and is drawn when it is added, because it would otherwise take memory beside the
model's activations. On a GPU a kernel draws it beside the model's work
(`farthing.torch.kernels.lattice_noise`); the CPU settles roundings that the kernel leaves open, exactly and
from the same words, before the noise is used.

The amount, the key and the order of draws are fixed when noise is requested and never depend on timing, so a
seeded run can be repeated. Noise is used once. A forked child drops the noise that its parent has drawn.
"""

import functools
import math
import os
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

from farthing import validate
from farthing.errors import InvalidValue, Unsupported
from farthing.noise import lattice, native
from farthing.noise.lattice import Stream
from farthing.queries import mechanisms
from farthing.queries.bounds import Bound
from farthing.torch.kernels.totals import SLACK

_AHEAD = {"cpu": 2**16, "cuda": 3 * 2**20}  # samples in a draw at most, or those of one release
_SMALL = 2**21  # samples of a release up to which a GPU has two draws ahead: Python would wait for one
_RELEASES = 64  # whose noise is drawn ahead at most
_POOLS = 4  # kinds of release whose noise is kept ahead, a stream
_CHUNK = 2**17  # coordinates at a time on a CPU: they stay in the cache
_HUGE = {"cpu": 2**16, "cuda": 2**25}  # coordinates from which noise is added in the sum's memory, never held
_HUGE_SHARE = 2.0**-9  # of the noise, by which a coarser grid may enlarge it, on as many as on a GPU
_PIECE = 2**16  # of them at a time, which stay in the cache
_LARGEST = 2.0**52  # cells: whole numbers up to here add up exactly in float64


def release(stream: Stream, total: Tensor, scale: Tensor | None, cell: float, bits: int) -> Tensor:
    """Return (round(total / scale / cell) + round(2^bits Z)) · cell · scale, as float32."""
    if total.numel() >= _HUGE.get(total.device.type, _HUGE["cuda"]):
        return _in_place(stream, total.detach().contiguous(), scale, cell, bits)

    def add(noise: Tensor) -> Tensor:
        return released(total, noise, scale, cell)

    return _pool_of(stream, total.numel(), bits, total.device).used(stream, total.numel(), total.device, add)


def _in_place(stream: Stream, total: Tensor, scale: Tensor | None, cell: float, bits: int) -> Tensor:
    """Release in the sum's own memory, with noise that is never there all at once."""
    if total.is_cuda and has_triton():
        from farthing.torch.kernels import lattice_noise

        key = stream.integers(4).tobytes()
        found = open_places(lattice_noise.noisy(key, total, scale, cell, bits).cpu())
        if found:
            at = torch.tensor(found, device=total.device)
            settled = torch.from_numpy(settle(stream, key, found, bits, lattice_noise.block_of))
            some = None if scale is None else scale[at]
            total[at] = released(total[at], settled.to(total.device), some, cell)
        return total
    words = Keyed(stream.integers(4).tobytes())
    room = torch.empty(min(_PIECE, total.numel()), dtype=torch.int64)
    for start in range(0, total.numel(), _PIECE):
        part = slice(start, start + _PIECE)
        noise = room[: total[part].numel()]
        lattice.gaussian(words, len(noise), bits, noise.numpy())
        some = None if scale is None else scale[part]
        total[part] = released(total[part], noise.to(total.device), some, cell)
    return total


def drawn(stream: Stream, size: int, bits: int, device: torch.device) -> Tensor:
    """Return round(2^bits Z) of each coordinate, in memory of its own."""
    return _pool_of(stream, size, bits, device).used(stream, size, device, Tensor.clone)


def released(total: Tensor, noise: Tensor, scale: Tensor | None, cell: float) -> Tensor:
    """Return (round(total / scale / cell) + noise) · cell · scale, with exact integers in float64."""
    total = total.detach()
    if total.is_cuda and has_triton():
        from farthing.torch.kernels import lattice_noise

        return lattice_noise.release(total.contiguous(), noise, scale, cell)
    if total.device.type == "cpu":
        found = native.kernels(total.numel())
        if found is not None and (scale is None or scale.dtype == torch.float32):
            kernel = found["release_drawn_i4" if noise.dtype is torch.int32 else "release_drawn_i8"]
            return _at_once(kernel, total.contiguous(), noise, scale, cell)
        if not torch.isfinite(total).all():
            raise InvalidValue(lattice._UNBOUNDED)
    out = torch.empty_like(total)
    room = total.new_empty(min(_CHUNK, total.numel()), dtype=torch.float64)
    for start in range(0, total.numel(), _CHUNK):
        part = slice(start, start + _CHUNK)
        cells = room[: total[part].numel()].copy_(total[part])
        each = 1.0 if scale is None else scale[part].double()
        cells.div_(each * cell).round_().clamp_(-_LARGEST, _LARGEST)
        if total.device.type != "cpu":
            cells.nan_to_num_(0.0)
        out[part] = cells.add_(noise[part]).mul_(each * cell)
    return out


def _at_once(
    kernel: Callable[..., int], total: Tensor, noise: Tensor, scale: Tensor | None, cell: float
) -> Tensor:
    """Add the noise by the kernel in C, which also looks whether the sum is finite."""
    out, units = torch.empty_like(total), None if scale is None else scale.contiguous()
    by = None if units is None else units.data_ptr()
    if kernel(total.data_ptr(), total.numel(), noise.data_ptr(), by, cell, out.data_ptr()):
        raise InvalidValue(lattice._UNBOUNDED)
    return out


@functools.cache
def has_triton() -> bool:
    """Return whether there are kernels for a GPU."""
    return find_spec("triton") is not None


class Keyed(Stream):
    """The stream of one draw, under a key from the ledger's stream."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        super().__init__()

    def _new_key(self) -> bytes:
        key, self._key = self._key, os.urandom(32)  # once: whoever forks goes on with other words
        return key


class _Draw:
    """Noise for ``count`` releases, begun at once. Nothing of it is handed out twice.

    ``room`` may be noise that is used up: the new noise takes its place.
    """

    def __init__(
        self,
        stream: Stream,
        size: int,
        bits: int,
        device: torch.device,
        count: int,
        room: Tensor | None = None,
    ) -> None:
        self._size, self.left = size, count
        self.noise: Tensor | None = None
        key = stream.integers(4).tobytes()
        self._drawn: _Threaded | _Launched = (
            _Launched(key, size * count, bits, device, room)
            if device.type == "cuda" and has_triton()
            else _Threaded(key, size * count, bits, device, room)
        )

    def take(self, stream: Stream) -> Tensor:
        """Return the noise of the next release."""
        if self.noise is None:
            self.noise = self._drawn.result(stream)
        self.left -= 1
        return self.noise[self.left * self._size : (self.left + 1) * self._size]


class _Threaded:
    """Drawn by a thread that ends with its work."""

    def __init__(self, key: bytes, size: int, bits: int, device: torch.device, room: Tensor | None) -> None:
        self._future: Future[Tensor] = Future()
        fits = room is not None and room.device.type == "cpu" and len(room) == size
        drawn = room if room is not None and fits else torch.empty(size, dtype=torch.int64)

        def draw() -> None:
            try:
                lattice.gaussian(Keyed(key), size, bits, drawn.numpy())
                self._future.set_result(drawn.to(device))
            except BaseException as error:
                self._future.set_exception(error)

        # Not a daemon: one that is cut off inside torch takes the process down with it.
        threading.Thread(target=draw, name="farthing noise").start()

    def result(self, stream: Stream) -> Tensor:
        """Return the noise; waits for it."""
        return self._future.result()


class _Launched:
    """Drawn by a kernel. The places it left open come back beside the work that follows."""

    def __init__(self, key: bytes, size: int, bits: int, device: torch.device, room: Tensor | None) -> None:
        from farthing.torch.kernels import lattice_noise

        self._key, self._bits, self._block_of = key, bits, lattice_noise.block_of
        self._queue = queue = _queues.get(device) or _queues.setdefault(device, torch.cuda.Stream(device))
        queue.wait_stream(torch.cuda.current_stream(device))  # work that reads the old noise comes first
        with torch.cuda.stream(queue):
            self._noise, places = lattice_noise.gaussian(key, size, bits, device, room)
            self._places = torch.empty(places.shape, dtype=torch.int64, pin_memory=True)
            self._places.copy_(places, non_blocking=True)
            self._done = queue.record_event()

    def result(self, stream: Stream) -> Tensor:
        """Return the noise with every rounding settled, by more bits of a word from the stream if needed."""
        self._done.synchronize()
        key, self._key = self._key, b""
        here = torch.cuda.current_stream(self._noise.device)
        if self._places[0]:
            with torch.cuda.stream(self._queue):  # a copy there does not wait for the model's work
                decide(self._noise, self._places, stream, key, self._bits, self._block_of)
            here.wait_stream(self._queue)
        self._noise.record_stream(here)
        return self._noise


def open_places(places: Tensor) -> list[int]:
    """Return the places that a kernel left open, in order; ``places`` begins with their number."""
    count, *found = places[: 1 + int(places[0])].tolist()
    if count > len(found):
        raise ArithmeticError(f"{count} roundings are open where at most {len(found)} are ever expected")
    return sorted(found)  # the order in which a GPU noted them is no order


def decide(
    noise: Tensor,
    places: Tensor,
    stream: Stream,
    key: bytes,
    bits: int,
    block_of: Callable[[int], tuple[int, int]],
) -> None:
    """Settle the samples that a kernel left open; ``places`` begins with their number."""
    found = open_places(places)
    if not found:
        return
    settled = settle(stream, key, found, bits, block_of)
    if np.abs(settled).max() > torch.iinfo(noise.dtype).max:
        raise ArithmeticError("a sample lies 32 standard deviations out, which ideal bits never give")
    at = torch.tensor(found, device=noise.device)
    noise[at] = torch.from_numpy(settled).to(noise.device, noise.dtype)


def settle(
    stream: Stream, key: bytes, places: list[int], bits: int, block_of: Callable[[int], tuple[int, int]]
) -> lattice.Integers:
    """Return the samples at these places of a kernel's draw, in exact arithmetic, from the same words."""
    words = np.array([_word(key, *block_of(place)) for place in places], np.uint64).view(np.int64)
    cells = lattice._cells(stream, lattice._HALF_NORMAL, words & (2**63 - 1), bits)
    return np.where(words < 0, -cells, cells)


def _word(key: bytes, block: int, word: int) -> int:
    cipher = Cipher(algorithms.ChaCha20(key, struct.pack("<QQ", block, 0)), None)
    return int.from_bytes(cipher.encryptor().update(bytes(64))[8 * word : 8 * word + 8], "little")


class _NoisePool:
    """The noise ahead for one kind of release, drawn once the kind has been asked for twice."""

    def __init__(self, bits: int) -> None:
        self._bits, self._asked = bits, 0
        self._draws = deque[_Draw]()
        self._lock = threading.Lock()

    def used(
        self, stream: Stream, size: int, device: torch.device, use: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return what ``use`` makes of fresh noise, whose memory is used again afterwards."""
        with self._lock:
            draw = self._draws.popleft() if self._draws else _Draw(stream, size, self._bits, device, 1)
            out = use(draw.take(stream))  # if it fails, its noise is not used again
            if draw.left:
                self._draws.appendleft(draw)
                return out
            self._asked += 1
            if self._asked > 1:
                room, count = draw.noise, max(1, min(_RELEASES, _AHEAD.get(device.type, 0) // size))
                while len(self._draws) < (2 if device.type == "cuda" and size <= _SMALL else 1):
                    self._draws.append(_Draw(stream, size, self._bits, device, count, room))
                    room = None
            return out


_queues: dict[torch.device, Any] = {}  # beside the work of the model, one a GPU
_pools: "weakref.WeakKeyDictionary[Stream, dict[Any, _NoisePool]]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_process = os.getpid()


def _pool_of(stream: Stream, size: int, bits: int, device: torch.device) -> _NoisePool:
    if _process != os.getpid():  # a fork that bypassed Python's hooks
        _drop_in_child()
    with _lock:
        pools = _pools.setdefault(stream, {})
        pool = pools.get((size, bits, device))
        if pool is None:
            pool = pools[size, bits, device] = _NoisePool(bits)
            if len(pools) > _POOLS:
                pools.pop(next(iter(pools)))
        return pool


def _drop_in_child() -> None:
    """Drop all noise drawn ahead in a forked child, since its parent will use it."""
    global _pools, _lock, _process
    _pools, _lock, _process = weakref.WeakKeyDictionary(), threading.Lock(), os.getpid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_in_child)


_FEW = 2**14  # coordinates below which drawing ahead does not pay


@dataclass(frozen=True, slots=True)
class TensorGaussian(mechanisms.Gaussian):
    """Gaussian noise on a lattice for flat float32 tensors, on any device.

    Parameters
    ----------
    noise_multiplier : float
        Standard deviation over the bound's norm, in units of its scale.
    slack : float, default `totals.SLACK`
        How much larger the noise is, relatively, to cover the rounding of float32 sums.

    Notes
    -----
    The price is that of `farthing.Gaussian` with the same noise multiplier; the slack is a gift to privacy.

    Examples
    --------
    >>> from farthing.noise.lattice import SeededStream
    >>> from farthing.queries.bounds import ClipNorm
    >>> released = TensorGaussian(1.0).release(torch.zeros(1000), ClipNorm(2.0), SeededStream(1))
    >>> released.dtype, 1.8 < float(released.std()) < 2.2
    (torch.float32, True)
    """

    slack: float = SLACK

    def __post_init__(self) -> None:
        mechanisms.Gaussian.__post_init__(self)
        validate.positive(slack=self.slack)

    def grid(self, bound: Bound, size: int) -> tuple[int, float]:
        bits, cell = mechanisms.Gaussian.grid(self, bound, size)
        return bits, cell * (1 + self.slack)

    def grid_share(self, size: int) -> float:
        """Return by how much the grid may enlarge the noise: more on a huge sum.

        Of a finer grid so many roundings are open that the CPU, which settles them, holds up a GPU.
        """
        return mechanisms.GRID_SHARE if size < _HUGE["cuda"] else _HUGE_SHARE

    def release(self, total: Any, bound: Any, stream: Stream, turn: int = 0) -> Any:
        """Return the noisy sum: a new float32 tensor on the same device, or the same where it is large.

        From 2¹⁶ numbers on a CPU and 2²⁵ on a GPU noise is added in the sum's own memory.

        A coordinate that is not finite, which no bounded sum has, is refused on a CPU and counts as zero on
        a GPU, where nobody waits for the sum.
        """
        scale = checked(total, bound)
        bits, cell = self.grid(bound, total.numel())
        if total.device.type == "cpu" and total.numel() < _FEW:
            unit = scale if isinstance(scale, float) else scale.double().numpy()
            released = lattice.noisy(stream, total.detach().double().numpy(), unit, cell, bits)
            return torch.from_numpy(released).float()
        if isinstance(scale, float):
            return release(stream, total, None, cell * scale, bits)
        return release(stream, total, scale, cell, bits)


@dataclass(frozen=True, slots=True)
class FloatGaussian(TensorGaussian):
    """Float noise from torch's own generator, seeded from the stream: quick, and not sound.

    Parameters
    ----------
    noise_multiplier, slack
        As for `TensorGaussian`.

    Notes
    -----
    The low bits of a float sum tell which sums can have produced it, whatever ε is (Mironov 2012), and
    torch's generators are not cryptographic. Only a ledger that says so in its guarantee answers with it:
    ``Ledger(budget, float_noise=True)``.

    Examples
    --------
    >>> FloatGaussian(1.0).on_lattice
    False
    """

    on_lattice: ClassVar[bool] = False

    def release(self, total: Any, bound: Any, stream: Stream, turn: int = 0) -> Any:
        """Return total + noise · bound · N(0, 1), in float32."""
        scale = checked(total, bound)
        generator = torch.Generator(total.device)
        generator.manual_seed(int(stream.integers(1)[0] >> np.uint64(1)))
        noise = torch.randn(total.shape, generator=generator, device=total.device, dtype=torch.float32)
        return total + noise * scale * (self.noise_multiplier * bound.norm() * (1 + self.slack))


def checked(total: Any, bound: Any) -> float | Tensor:
    """Return the bound's scale: one number, or a tensor beside the sum."""
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
    """Return a scale of many coordinates on the device, in float32. A constant one travels once."""
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
