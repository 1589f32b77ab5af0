"""Bounds on one example's gradient beyond the core's, and the plain sum under each of them.

All of them work on flat float32 tensors. An example whose gradient is NaN or infinite anywhere counts as
zero, silently. Norms are taken in float32; the mechanisms of `farthing.torch.kernels.noise` enlarge their
noise to cover the rounding.

>>> bound = ClipLayers((1.0, 2.0), sizes=(3, 5))
>>> round(bound.norm(), 4)
2.2361
>>> Automatic(1.0).norm()
1.0
"""

import bisect
import functools
import math
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
from farthing.queries.bounds import ClipCoordinates, ClipNorm, Kind
from farthing.torch.kernels import totals
from farthing.torch.kernels.noise import beside

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ClipLayers:
    """Layer l is shrunk to norm ``clips[l]`` by itself; ``sizes[l]`` coordinates make a layer.

    Coordinates of layer l are measured in units of the public ``stretches[l]``: in those units its norm is
    at most clips[l] / stretches[l], the whole gradient's N = √Σ (clips[l] / stretches[l])², and the noise of
    a `Gaussian` has standard deviation noise · N · stretches[l]. So the price is that of the noise, whatever
    the stretches: a larger one gives a layer more noise and the others less.
    """

    clips: tuple[float, ...]
    sizes: tuple[int, ...]
    stretches: tuple[float, ...] | None = None
    kind: ClassVar[str] = "ClipLayers(clips, sizes)"

    def __post_init__(self) -> None:
        object.__setattr__(self, "clips", tuple(validate.positive(clip=clip) for clip in self.clips))
        object.__setattr__(self, "sizes", tuple(validate.count(size=size) for size in self.sizes))
        if self.stretches is not None:
            stretches = tuple(validate.positive(stretch=stretch) for stretch in self.stretches)
            object.__setattr__(self, "stretches", stretches)
        lengths = {len(self.clips), len(self.sizes), len(self.stretches or self.sizes)}
        if len(lengths) != 1 or not self.clips:
            raise InvalidValue(
                f"ClipLayers needs one clip, size and stretch a layer, got {len(self.clips)} clips, "
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
        stretches = self.stretches or (1.0,) * len(self.clips)
        return math.hypot(*(clip / stretch for clip, stretch in zip(self.clips, stretches, strict=True)))

    def sensitivity(self, adjacency: Adjacency, order: int = 2) -> float:
        return self.norm(order) * (2 if adjacency is Adjacency.REPLACE_ONE else 1)


@dataclass(frozen=True, slots=True)
class Automatic:
    """Every gradient g becomes clip · g / (|g| + gamma) (Bu et al. 2023, "Automatic Clipping", AUTO-S)."""

    clip: float = 1.0
    gamma: float = 0.01
    kind: ClassVar[str] = "Automatic(clip, gamma)"
    width: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        validate.positive(clip=self.clip)
        validate.positive(gamma=self.gamma)

    @property
    def scale(self) -> float:
        return 1.0

    def norm(self, order: int = 2) -> float:
        if order != 2:
            raise Unsupported("automatic clipping bounds L2 norms: use Gaussian noise")
        return self.clip

    def sensitivity(self, adjacency: Adjacency, order: int = 2) -> float:
        return self.norm(order) * (2 if adjacency is Adjacency.REPLACE_ONE else 1)


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

    clip: float
    share: float = 0.01
    kind: ClassVar[str] = "ClipCounted(clip, share)"
    width: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        validate.positive(clip=self.clip)
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
        return self.clip / math.sqrt(1 - self.share)

    def sensitivity(self, adjacency: Adjacency, order: int = 2) -> float:
        return self.norm(order) * (2 if adjacency is Adjacency.REPLACE_ONE else 1)

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
            return torch.tensor(bound.clips, dtype=torch.float32, device=device)
        case ClipCoordinates():
            return 1.0
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
    found: Tensor = signs.sum() * clip * (bound.unit / bound.clip)
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
                for c, p in zip(bound.clips, parts, strict=True)
            )
            return torch.cat(list(clipped))
        case ClipCounted():
            norms = rows.norm(dim=1)
            return torch.cat(
                [
                    totals.weighted(rows, factors(bound, norms, bound.clip)),
                    count(bound, norms, present, bound.clip)[None],
                ]
            )
        case ClipNorm() if not isinstance(bound.scale, float):
            scale = beside(bound.scale, rows.device)
            return totals.weighted(rows, factors(bound, (rows / scale).norm(dim=1), bound.clip))
    return totals.weighted(rows, factors(bound, rows.norm(dim=1), bound.clip))
