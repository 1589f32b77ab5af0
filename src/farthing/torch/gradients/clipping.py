"""Bounds on one example's gradient beyond the core's, and the plain sum under each of them.

All of them work on flat float32 tensors. An example whose gradient is NaN or infinite anywhere counts as
zero, silently. Norms are taken in float32; the mechanisms of `farthing.torch.kernels.noise` enlarge their
noise to cover the rounding.

>>> bound = ClipLayers((1.0, 2.0), sizes=(3, 5))
>>> round(bound.norm(), 4)
2.2361
>>> Automatic(1.0).norm()
1.0

Sums of gradients clamped coordinate by coordinate, without ever holding one example's gradient matrix.

A linear layer's gradient is Σ_t δ_t ⊗ a_t over its positions t. Clamping every coordinate of it
(`farthing.queries.bounds.ClipCoordinates`) does not scale an example as a whole, so norms and one weighted
product do not give the sum: every coordinate of every example has to be looked at. Here that happens in
registers, by a Triton kernel on a GPU and by a C kernel on a CPU, and else in pieces that stay in the cache.

Examples must be finite: who is not is zeroed by the caller, as a whole. A gradient that overflows all the
same is clamped, and counts as zero where it is not a number. Sums round as `farthing.torch.kernels.totals`
says.

>>> out = torch.zeros(1, 2)
>>> clamped_sum(torch.ones(3, 1), torch.tensor([[2.0, -5.0]] * 3), 1.5, out)
tensor([[ 4.5000, -4.5000]])
"""

import bisect
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farthing import validate
from farthing.budget import Adjacency
from farthing.errors import InvalidValue, Unsupported
from farthing.noise import native
from farthing.queries.bounds import ClipCoordinates, ClipNorm, Kind
from farthing.torch.kernels import totals
from farthing.torch.kernels.noise import beside, has_triton

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ClipLayers:
    """Layer l is shrunk to norm ``clip_norms[l]`` by itself; ``sizes[l]`` coordinates make a layer.

    Coordinates of layer l are measured in units of the public ``stretches[l]``: in those units its norm is at
    most clip_norms[l] / stretches[l], the whole gradient's N = √Σ (clip_norms[l] / stretches[l])², and the
    noise of a `Gaussian` has standard deviation noise · N · stretches[l]. So the price is that of the noise,
    whatever the stretches: a larger one gives a layer more noise and the others less.
    """

    clip_norms: tuple[float, ...]
    sizes: tuple[int, ...]
    stretches: tuple[float, ...] | None = None
    kind: ClassVar[str] = "ClipLayers(clip_norms, sizes)"

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "clip_norms", tuple(validate.positive(clip_norm=clip) for clip in self.clip_norms)
        )
        object.__setattr__(self, "sizes", tuple(validate.count(size=size) for size in self.sizes))
        if self.stretches is not None:
            stretches = tuple(validate.positive(stretch=stretch) for stretch in self.stretches)
            object.__setattr__(self, "stretches", stretches)
        lengths = {len(self.clip_norms), len(self.sizes), len(self.stretches or self.sizes)}
        if len(lengths) != 1 or not self.clip_norms:
            raise InvalidValue(
                f"ClipLayers needs one clip, size and stretch a layer, got {len(self.clip_norms)} clips, "
                f"{len(self.sizes)} sizes and {len(self.stretches or self.sizes)} stretches"
            )

    @property
    def width(self) -> int:
        return sum(self.sizes)

    @functools.cached_property
    def scale(self) -> float | Array:
        if self.stretches is None:
            return 1.0
        scale = np.repeat(np.array(self.stretches), self.sizes)
        scale.setflags(write=False)
        return scale

    def norm(self, order: int = 2) -> float:
        if order != 2:
            raise Unsupported("norms of layers are L2 norms: use Gaussian noise")
        stretches = self.stretches or (1.0,) * len(self.clip_norms)
        return math.hypot(*(clip / stretch for clip, stretch in zip(self.clip_norms, stretches, strict=True)))

    def sensitivity(self, adjacency: Adjacency, order: int = 2) -> float:
        return self.norm(order) * adjacency.shift


@dataclass(frozen=True, slots=True)
class Automatic:
    """Every gradient g becomes clip · g / (|g| + gamma) (Bu et al. 2023, "Automatic Clipping", AUTO-S)."""

    clip_norm: float = 1.0
    gamma: float = 0.01
    kind: ClassVar[str] = "Automatic(clip_norm, gamma)"
    width: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        validate.positive(clip_norm=self.clip_norm)
        validate.positive(gamma=self.gamma)

    @property
    def scale(self) -> float:
        return 1.0

    def norm(self, order: int = 2) -> float:
        if order != 2:
            raise Unsupported("automatic clipping bounds L2 norms: use Gaussian noise")
        return self.clip_norm

    def sensitivity(self, adjacency: Adjacency, order: int = 2) -> float:
        return self.norm(order) * adjacency.shift


@dataclass(frozen=True, slots=True)
class ClipCounted:
    """`ClipNorm`, and one coordinate more: how many gradients were within the clip, less half of them all.

    An example adds (g, k (1[|g| <= clip] - ½)), clipped to norm `clip` in g, with k = 2 √share N and
    N = clip / √(1 - share). The last coordinate is at most √share N, so the whole has norm N at most: one
    Gaussian release at the price of its noise. What it costs is a little more noise on the gradient (a
    factor 1 / √(1 - share)); the count's own noise has standard deviation noise / (2 √share) (Andrew et al.
    2021, "Differentially Private Learning with Adaptive Clipping", with the split named by its share).

    >>> bound = ClipCounted(1.0, share=0.01)
    >>> round(bound.norm() ** 2 * (1 - 0.01), 6), round(bound.unit / 2 / bound.norm(), 6)
    (1.0, 0.1)
    """

    clip_norm: float
    share: float = 0.01
    kind: ClassVar[str] = "ClipCounted(clip_norm, share)"
    width: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        validate.positive(clip_norm=self.clip_norm)
        validate.probability(share=self.share)

    @property
    def scale(self) -> float:
        return 1.0

    @property
    def unit(self) -> float:
        """What the last coordinate is multiplied by."""
        return 2 * math.sqrt(self.share) * self.norm()

    def norm(self, order: int = 2) -> float:
        if order != 2:
            raise Unsupported("norms are L2 norms: use Gaussian noise")
        return self.clip_norm / math.sqrt(1 - self.share)

    def sensitivity(self, adjacency: Adjacency, order: int = 2) -> float:
        return self.norm(order) * adjacency.shift

    def read(self, released: Tensor) -> tuple[Tensor, float]:
        """The gradient and the count Σ (1[|g| <= clip] - ½) of a released sum."""
        return released[:-1], float(released[-1]) / self.unit


TorchBound = ClipNorm | ClipCoordinates | ClipLayers | Automatic | ClipCounted
KINDS = (
    *(Kind.NORM, Kind.SCALED_NORM, Kind.COORDINATES),
    *(ClipLayers.kind, Automatic.kind, ClipCounted.kind),
)


def checked(bound: Any, size: int, starts: tuple[int, ...]) -> TorchBound:
    """A bound that fits a gradient of ``size`` coordinates, whose parameters begin at ``starts``."""
    if not isinstance(bound, TorchBound):
        raise Unsupported(
            f"{type(bound).__name__} does not bound gradients of a model: use ClipNorm, ClipLayers, "
            "ClipCoordinates, Automatic or ClipCounted"
        )
    if isinstance(bound, ClipNorm) and bound.order != 2:
        raise Unsupported("norms of a model's gradients are L2 norms: use ClipNorm(clip), order 2")
    if bound.width not in (None, size):
        raise InvalidValue(f"the bound has {bound.width} coordinates, the model {size} trainable ones")
    if isinstance(bound, ClipLayers) and not {*accumulate(bound.sizes)} <= {*starts, size}:
        raise InvalidValue(f"a layer ends inside a parameter: parameters end at {(*starts[1:], size)}")
    return bound


def extra(bound: TorchBound) -> int:
    """How many coordinates a sum has beyond the gradient's."""
    return 1 if isinstance(bound, ClipCounted) else 0


class Live(NamedTuple):
    """A bound's numbers as a sum uses them: tensors in a CUDA graph, where they may change between runs."""

    clip: float | Tensor
    scale: Tensor | None

    @classmethod
    def of(cls, bound: TorchBound, size: int, device: torch.device) -> "Live":
        """The numbers of a bound on gradients of ``size`` coordinates."""
        return cls(_clip(bound, device), _scale(bound, size, device))

    def static(self, device: torch.device) -> "Live":
        """The same in tensors of their own."""
        clip = torch.as_tensor(self.clip, dtype=torch.float32, device=device).clone()
        return Live(clip, None if self.scale is None else self.scale.clone())

    def refill(self, bound: TorchBound, size: int) -> None:
        """Another bound's numbers in the same tensors."""
        assert isinstance(self.clip, Tensor)
        other = Live.of(bound, size, self.clip.device)
        if isinstance(other.clip, Tensor):
            self.clip.copy_(other.clip)
        else:
            self.clip.fill_(other.clip)
        if self.scale is not None and other.scale is not None:
            self.scale.copy_(other.scale)


def _clip(bound: TorchBound, device: torch.device) -> float | Tensor:
    match bound:
        case ClipLayers():
            return torch.tensor(bound.clip_norms, dtype=torch.float32, device=device)
        case ClipCoordinates():
            return 1.0
        case Automatic() | ClipCounted():
            return bound.clip_norm
    return bound.clip


def _scale(bound: TorchBound, size: int, device: torch.device) -> Tensor | None:
    """A scale of several coordinates on the device; layers are measured as they are."""
    scale: Any = bound.scale
    if isinstance(bound, ClipLayers) or (isinstance(scale, float) and scale == 1.0):
        return None
    return beside(scale, device).float().expand(size)


def factors(bound: TorchBound, norms: Tensor, clip: float | Tensor) -> Tensor:
    """What to multiply gradients of these norms by; NaN for NaN."""
    if isinstance(bound, Automatic):
        return clip / (norms + bound.gamma)
    return clip / (torch.maximum(norms, clip) if isinstance(clip, Tensor) else norms.clamp_min(clip))


def layer_factors(bound: ClipLayers, norms: Tensor, starts: list[int], clips: Any) -> list[Tensor]:
    """The factors of parameters that begin at ``starts``, from their norms, a row a parameter."""
    ends = list(accumulate(bound.sizes))
    layers = [bisect.bisect_right(ends, start) for start in starts]
    found: dict[int, Tensor] = {}
    for layer in set(layers):
        rows = [norms[n] for n, other in enumerate(layers) if other == layer]
        whole = rows[0] if len(rows) == 1 else torch.stack(rows).norm(dim=0)
        found[layer] = clips[layer] / torch.maximum(whole, clips[layer])
    return [found[layer] for layer in layers]


def count(bound: ClipCounted, norms: Tensor, present: Tensor | None, clip: float | Tensor) -> Tensor:
    """The last coordinate: unit · Σ (1[norm <= clip] - ½), over the examples that are there.

    A gradient that is not finite counts as zero, which is within the clip.
    """
    within = ~(torch.isfinite(norms) & (norms > clip))
    signs = torch.where(within, 0.5, -0.5)
    if present is not None:
        signs = torch.where(present, signs, 0.0)
    found: Tensor = signs.sum() * clip * (bound.unit / bound.clip_norm)
    return found


def plain_sum(rows: Tensor, bound: TorchBound, present: Tensor | None = None) -> Tensor:
    """Σ bounded rows, one a gradient: what every faster way must agree with.

    ``present`` tells examples from rows that only fill up a batch.
    """
    rows = rows.float()
    finite = torch.isfinite(rows).all(1)
    if present is not None:
        finite &= present
    rows = torch.where(finite[:, None], rows, 0.0)
    match bound:
        case ClipCoordinates():
            limit = beside(bound.scale, rows.device)
            clamped = torch.minimum(torch.maximum(rows, -limit), limit)
            return clamped.sum(0, dtype=torch.float64).float()
        case ClipLayers():
            parts = torch.split(rows, list(bound.sizes), 1)
            clipped = (
                totals.weighted(p.contiguous(), factors(ClipNorm(c), p.norm(dim=1), c))
                for c, p in zip(bound.clip_norms, parts, strict=True)
            )
            return torch.cat(list(clipped))
        case ClipCounted():
            norms = rows.norm(dim=1)
            return torch.cat(
                [
                    totals.weighted(rows, factors(bound, norms, bound.clip_norm)),
                    count(bound, norms, present, bound.clip_norm)[None],
                ]
            )
        case ClipNorm() if not isinstance(bound.scale, float):
            scale = beside(bound.scale, rows.device)
            return totals.weighted(rows, factors(bound, (rows / scale).norm(dim=1), bound.clip))
    return totals.weighted(rows, factors(bound, rows.norm(dim=1), bound.norm()))


_PIECE = 2**18  # coordinates at a time without a kernel
_SHARES = 64  # of the examples at a time on a GPU: each has a sum of its own


def clamped_sum(delta: Tensor, a: Tensor, s: float | Tensor, out: Tensor) -> Tensor:
    """out += Σ_b clamp(Σ_t δ_bt ⊗ a_bt, -s, s), and returns it.

    ``delta`` is (B, T, O) and ``a`` (B, T, I), or (B, O) and (B, I) where T is 1; ``s`` is one number or
    (O, I), like ``out``, which is float32.
    """
    if delta.ndim == 3 and delta.shape[1] == 1:
        delta, a = delta[:, 0], a[:, 0]
    delta, a, limit = _ready(delta), _ready(a), _limit(s, out)
    shape = (delta.shape[-1], a.shape[-1])
    if delta.ndim not in (2, 3) or delta.shape[:-1] != a.shape[:-1] or out.shape != shape:
        shapes = [tuple(one.shape) for one in (delta, a, out)]
        raise InvalidValue(f"delta (B, T, O), a (B, T, I) and out (O, I) must fit each other, got {shapes}")
    if not len(delta) or not delta.numel():
        return out
    if out.is_cuda and has_triton():
        from farthing.torch.kernels import clamped_sums

        many = clamped_sums.clamped_outer if delta.ndim == 2 else clamped_sums.clamped_dots
        return _by_kernel(many, (delta, a), limit, out)
    if out.device.type == "cpu" and out.is_contiguous():
        limits = limit.expand(shape).contiguous().numpy()
        if _compiled(delta.numpy(), a.numpy(), limits, out, threads=torch.get_num_threads()):
            return out
    return _in_pieces(delta, a, limit, out)


def clamped_rows(gradients: Tensor, s: float | Tensor, out: Tensor) -> Tensor:
    """out += Σ_b clamp(g_b, -s, s), and returns it: ``gradients`` is (B, P), one a row; ``out`` is (P,)."""
    gradients, limit = _ready(gradients), _limit(s, out)
    if gradients.ndim != 2 or out.shape != gradients.shape[1:]:
        shapes = [tuple(one.shape) for one in (gradients, out)]
        raise InvalidValue(f"gradients (B, P) and out (P,) must fit each other, got {shapes}")
    if not gradients.numel():
        return out
    if out.is_cuda and has_triton():
        from farthing.torch.kernels import clamped_sums

        return _by_kernel(clamped_sums.clamped_rows, (gradients,), limit, out)
    if out.device.type == "cpu" and out.is_contiguous():
        one = np.ones((len(gradients), 1), np.float32)
        limits = limit.expand(out.shape).contiguous().numpy()[None]
        if _compiled(one, gradients.numpy(), limits, out[None]):
            return out
    total = torch.zeros_like(out, dtype=torch.float64)
    for rows in gradients.split(max(1, _PIECE // gradients.shape[1])):
        total += _clamped(rows, limit).sum(0, dtype=torch.float64)
    return out.add_(total)


def _by_kernel(many: Callable[..., Tensor], given: tuple[Tensor, ...], limit: Tensor, out: Tensor) -> Tensor:
    """out += the sum by a Triton kernel, whose shares have as many examples as may be added in float32."""
    most = totals.chain(len(given[0]))
    total = torch.zeros_like(out, dtype=torch.float64)
    for some in zip(*(part.split(_SHARES * most) for part in given), strict=True):
        total += many(*some, limit, most)
    return out.add_(total)


def _compiled(delta: Any, a: Any, limits: Any, out: Tensor, threads: int = 1) -> bool:
    """out += the sum by the kernel in C: in a few pieces that may be added in float32, or in float64."""
    most, examples = totals.chain(len(delta)), len(delta)
    if examples <= 6 * most:  # a call adds its examples up, and then all of them to the sum: 6 roundings more
        target = out.detach().numpy()
        pieces = [slice(start, start + most) for start in range(0, examples, most)]
        return all(
            native.clamped_outer_sum(delta[some], a[some], limits, target, threads=threads) for some in pieces
        )
    total = np.zeros(tuple(out.shape))
    done = native.clamped_outer_sum(delta, a, limits, total, threads=threads)
    if done:
        out += torch.from_numpy(total)
    return done


def _in_pieces(delta: Tensor, a: Tensor, limit: Tensor, out: Tensor) -> Tensor:
    """The same with plain products of some examples and some rows at a time."""
    if delta.ndim == 2:
        delta, a = delta[:, None], a[:, None]
    columns = a.shape[2]
    rows = max(1, min(delta.shape[2], _PIECE // columns))
    examples = max(1, _PIECE // (rows * columns))
    total = torch.zeros_like(out, dtype=torch.float64)
    for first in range(0, delta.shape[2], rows):
        part = slice(first, first + rows)
        most = limit[part] if limit.ndim else limit
        for some, inputs in zip(delta[:, :, part].split(examples), a.split(examples), strict=True):
            gradients = torch.bmm(some.transpose(1, 2), inputs)
            total[part] += _clamped(gradients, most).sum(0, dtype=torch.float64)
    return out.add_(total)


def _clamped(gradients: Tensor, limit: Tensor) -> Tensor:
    return torch.minimum(torch.maximum(gradients, -limit), limit).nan_to_num_(0.0)


def _ready(tensor: Tensor) -> Tensor:
    return tensor.detach().float().contiguous()


def _limit(s: float | Tensor, out: Tensor) -> Tensor:
    """The limits beside the sum: one number, or one a coordinate."""
    limit = torch.as_tensor(s, dtype=torch.float32, device=out.device).detach()
    if limit.numel() == 1:
        return limit.reshape(())
    if limit.shape != out.shape:
        raise InvalidValue(f"s must be one number or of the sum's shape, got {tuple(limit.shape)}")
    return limit.contiguous()
