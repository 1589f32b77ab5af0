"""Define clip rules for a model's gradients, one class each.

A `ClipRule` bounds one example's gradient and owns what sums need to know of it: its factors, its units, its
extra coordinates. Rules work on flat float32 tensors. An example whose gradient is NaN or infinite anywhere
counts as zero, silently. Norms are taken in float32; the mechanisms of `farthing.torch.kernels.noise` enlarge
their noise to cover the rounding.
"""

import bisect
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

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
_SMALLEST = (
    2.0**-43
)  # of clips: 2³⁰ squares below 2⁻¹²⁶, which vanish in float32, add up to 2⁻¹⁰ of its square
_LEAST, _MOST = 2.0**-90, 2.0**90  # of clips times scales: sums of 2³⁰ neither vanish nor overflow
_LOST = 2.0**-48  # of a norm: the root of 2³⁰ squares of 2⁻¹²⁶, which vanish in float32
_PROMISED = 1 + 2.0**-10
_RAMP = 0.2  # clips on either side, over which a gradient counts less and less as one within the clip


class ClipRule(ABC):
    """A bound on one example's gradient with its own factors: the base class of clip rules.

    A subclass says how long a clipped gradient can be (`largest_norm`) and by what each gradient is
    multiplied (`factors`). All that sums of a model's gradients need to know follows from these two, or is
    overridden: a new rule is one class, and no other module has to hear of it.

    Attributes
    ----------
    scale : float or array or Tensor, default 1.0
        Public units: norms are those of gradient / scale, and so is the noise.
    width : int or None, default None
        Number of coordinates that the rule names; None where it holds for any.
    by_layer : bool, default False
        Whether parameters of one example have factors of their own (`parameter_factors`).
    by_coordinate : bool, default False
        Whether coordinates are clamped to ± scale one by one, without factors.
    extra : int, default 0
        Coordinates that a sum has beyond the gradient's (`extras`).
    softening : float or None, default None
        γ where factors are exactly clip / (norm + γ), 0 where they are min(1, clip / norm): a kernel in C
        then finds them. None for any other formula.

    Notes
    -----
    The guarantee rests on `largest_norm`: no gradient times its factor may be longer, in units of ``scale``.
    NaN must give NaN, or a gradient that is not finite would count.

    Examples
    --------
    >>> class Half(ClipRule):
    ...     largest_norm = 1.0
    ...
    ...     def factors(self, norms, clip):
    ...         return torch.where(norms > 1.0, 0.5 / norms, 1.0)
    >>> plain_sum(torch.tensor([[3.0, 4.0], [0.6, 0.0]]), Half())
    tensor([0.9000, 0.4000])
    """

    kind: ClassVar[str] = "ClipRule"
    by_layer: ClassVar[bool] = False
    by_coordinate: ClassVar[bool] = False
    extra: ClassVar[int] = 0
    extent: Any = (1.0, 1.0)  # the least and the largest number of the scale

    @property
    @abstractmethod
    def largest_norm(self) -> float:
        """Return the largest L2 norm of one contribution, in units of scale."""

    @abstractmethod
    def factors(self, norms: Tensor, clip: float | Tensor) -> Tensor:
        """Return what gradients of these norms are multiplied by; ``clip`` is `live_clip`. NaN for NaN."""

    @property
    def scale(self) -> Any:
        """Return the public units of the coordinates."""
        return 1.0

    @property
    def width(self) -> int | None:
        """Return the number of coordinates that the rule names; None for any."""
        return None

    @property
    def softening(self) -> float | None:
        """γ of clip / (norm + γ), 0 for min(1, clip / norm), None for another formula than these."""
        return None

    def norm(self, order: int = 2) -> float:
        """Return the largest norm of one contribution, in units of scale."""
        if order != 2:
            raise Unsupported(f"{type(self).__name__} bounds L2 norms: use Gaussian noise")
        return self.largest_norm

    def sensitivity(self, adjacency: Adjacency, order: int = 2) -> float:
        """Return how far a sum over all examples moves between neighbours, in units of scale."""
        return self.norm(order) * adjacency.shift

    def check(self, size: int, starts: tuple[int, ...]) -> None:
        """Raise unless the rule fits ``size`` coordinates, of parameters that begin at ``starts``."""
        if self.width not in (None, size):
            raise InvalidValue(f"the bound has {self.width} coordinates, the model {size} trainable ones")

    @property
    def graph_key(self) -> Hashable:
        """Return the key of a sum's CUDA graph; `live_clip` and `units` may change between its runs."""
        return self

    def live_clip(self, device: torch.device) -> float | Tensor:
        """Return the number, or numbers, that `factors` are computed from."""
        return self.largest_norm

    def units(self, size: int, device: torch.device) -> Tensor | None:
        """Return what each coordinate is measured in, on the device; None where all are 1."""
        scale = self.scale
        if isinstance(scale, float):
            return None if scale == 1.0 else torch.full((size,), scale, device=device, dtype=torch.float32)
        return beside(scale, device).float().expand(size)

    def parameter_factors(
        self, norms: Tensor, whole: Tensor, starts: list[int], clip: float | Tensor
    ) -> list[Tensor]:
        """Return the factors of each parameter; ``norms`` has a row for each, ``whole`` is of them all."""
        return [self.factors(whole, clip)] * len(starts)

    def extras(self, norms: Tensor, present: Tensor | None, clip: float | Tensor) -> Tensor:
        """Return the last coordinates of a sum, those beyond the gradient's."""
        raise NotImplementedError(f"{type(self).__name__} has {self.extra} extra coordinates, and no extras")

    def plain_sum(self, rows: Tensor, present: Tensor | None) -> Tensor:
        """Return the sum of the bounded rows, which are finite: what every faster way must agree with."""
        clip, units = self.live_clip(rows.device), self.units(rows.shape[1], rows.device)
        norms = (rows if units is None else rows / units).norm(dim=1)
        total = totals.weighted(rows, self.factors(norms, clip))
        return torch.cat([total, self.extras(norms, present, clip)]) if self.extra else total


def shrinking(norms: Tensor, clip: float | Tensor) -> Tensor:
    """Return min(1, clip / norm), the factors of plain clipping; NaN for NaN."""
    return clip / (torch.maximum(norms, clip) if isinstance(clip, Tensor) else norms.clamp_min(clip))


@dataclass(frozen=True)
class ClipLayers(ClipRule):
    """A clip rule that shrinks each layer to a norm of its own.

    Parameters
    ----------
    clip_norms : tuple of float
        The clipping norm of each layer, above 0.
    sizes : tuple of int
        The number of coordinates of each layer, in the order of the model's trained parameters; a layer ends
        where a parameter ends.
    stretches : tuple of float, optional
        Public units of each layer, 1 by default: a larger one gives its layer more noise and the others less.

    Notes
    -----
    In units of the stretches layer l has at most the norm clip_norms[l] / stretches[l], the whole gradient
    N = √Σ (clip_norms[l] / stretches[l])², and the noise of a `Gaussian` the standard deviation
    noise multiplier · N · stretches[l]: the price is that of the noise multiplier, whatever the stretches.

    Examples
    --------
    >>> bound = ClipLayers((1.0, 2.0), sizes=(3, 5))
    >>> round(bound.norm(), 4)
    2.2361
    """

    clip_norms: tuple[float, ...]
    sizes: tuple[int, ...]
    stretches: tuple[float, ...] | None = None
    by_layer: ClassVar[bool] = True

    def __post_init__(self) -> None:
        clip_norms = tuple(validate.positive(clip_norm=clip) for clip in self.clip_norms)
        object.__setattr__(self, "clip_norms", clip_norms)
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

    @property
    def largest_norm(self) -> float:
        stretches = self.stretches or (1.0,) * len(self.clip_norms)
        return math.hypot(*(clip / stretch for clip, stretch in zip(self.clip_norms, stretches, strict=True)))

    @property
    def extent(self) -> Any:
        return min(self.stretches or (1.0,)), max(self.stretches or (1.0,))

    @property
    def graph_key(self) -> Hashable:
        return ClipLayers, self.sizes

    def check(self, size: int, starts: tuple[int, ...]) -> None:
        super().check(size, starts)
        if not {*accumulate(self.sizes)} <= {*starts, size}:
            raise InvalidValue(f"a layer ends inside a parameter: parameters end at {(*starts[1:], size)}")

    def live_clip(self, device: torch.device) -> Tensor:
        return torch.tensor(self.clip_norms, dtype=torch.float32, device=device)

    def units(self, size: int, device: torch.device) -> None:
        return None  # a layer is clipped by its plain norm; only the noise has the stretches

    def factors(self, norms: Tensor, clip: float | Tensor) -> Tensor:
        return shrinking(norms, clip)

    def parameter_factors(self, norms: Tensor, whole: Tensor, starts: list[int], clip: Any) -> list[Tensor]:
        ends = list(accumulate(self.sizes))
        layers = [bisect.bisect_right(ends, start) for start in starts]
        found: dict[int, Tensor] = {}
        for layer in set(layers):
            rows = [norms[n] for n, other in enumerate(layers) if other == layer]
            whole = rows[0] if len(rows) == 1 else torch.stack(rows).norm(dim=0)
            found[layer] = self.factors(whole, clip[layer])
        return [found[layer] for layer in layers]

    def plain_sum(self, rows: Tensor, present: Tensor | None) -> Tensor:
        parts = zip(self.clip_norms, torch.split(rows, list(self.sizes), 1), strict=True)
        return torch.cat(
            [totals.weighted(p.contiguous(), self.factors(p.norm(dim=1), clip)) for clip, p in parts]
        )


@dataclass(frozen=True, slots=True)
class Automatic(ClipRule):
    """A clip rule that scales every gradient to nearly the clipping norm: clip_norm · g / (|g| + gamma).

    Parameters
    ----------
    clip_norm : float, default 1.0
        The norm that no gradient exceeds. It only sets the units: the learning rate can take it up.
    gamma : float, default 0.01
        How short a gradient must be to stay short, from 4e-12.

    Notes
    -----
    Bu et al. 2023, "Automatic Clipping", AUTO-S.

    Examples
    --------
    >>> Automatic(2.0).norm()
    2.0
    """

    clip_norm: float = 1.0
    gamma: float = 0.01

    def __post_init__(self) -> None:
        validate.positive(clip_norm=self.clip_norm)
        validate.positive(gamma=self.gamma)

    @property
    def largest_norm(self) -> float:
        return self.clip_norm

    @property
    def softening(self) -> float:
        return self.gamma

    @property
    def graph_key(self) -> Hashable:
        return Automatic, self.gamma

    def factors(self, norms: Tensor, clip: float | Tensor) -> Tensor:
        return clip / (norms + self.gamma)


@dataclass(frozen=True, slots=True)
class ClipCounted(ClipRule):
    """A clip rule like `ClipNorm` that also counts the gradients within the clip, less half of them all.

    An example adds (g, k (1[|g| <= clip] - ½)), clipped to norm `clip_norm` in g, with k = 2 √share N and
    N = clip_norm / √(1 - share). The last coordinate is at most √share N, so the whole has norm N at most:
    one Gaussian release at the price of its noise. What it costs is a little more noise on the gradient (a
    factor 1 / √(1 - share)); the count's own noise has standard deviation noise multiplier / (2 √share)
    (Andrew et al. 2021, "Differentially Private Learning with Adaptive Clipping", with the split named by
    its share).

    >>> bound = ClipCounted(1.0, share=0.01)
    >>> round(bound.norm() ** 2 * (1 - 0.01), 6), round(bound.unit / 2 / bound.norm(), 6)
    (1.0, 0.1)
    """

    clip_norm: float
    share: float = 0.01
    extra: ClassVar[int] = 1

    def __post_init__(self) -> None:
        validate.positive(clip_norm=self.clip_norm)
        validate.probability(share=self.share)

    @property
    def unit(self) -> float:
        """Return the factor of the last coordinate."""
        return 2 * math.sqrt(self.share) * self.norm()

    @property
    def largest_norm(self) -> float:
        return self.clip_norm / math.sqrt(1 - self.share)

    @property
    def softening(self) -> float:
        return 0.0

    @property
    def graph_key(self) -> Hashable:
        return ClipCounted, self.share

    def live_clip(self, device: torch.device) -> float:
        return self.clip_norm

    def factors(self, norms: Tensor, clip: float | Tensor) -> Tensor:
        return shrinking(norms, clip)

    def extras(self, norms: Tensor, present: Tensor | None, clip: float | Tensor) -> Tensor:
        """Return unit · Σ (1[norm <= clip] - ½), over the examples that are present.

        The step falls evenly from 0.8 to 1.2 clips: otherwise the last bits of norms, which depend on who
        else is in a batch, would decide on which side examples at the clip are counted. A gradient that is
        not finite counts as zero, which is within the clip.
        """
        signs = ((clip - norms) / (2 * _RAMP * clip)).clamp(-0.5, 0.5)
        signs = torch.where(torch.isfinite(norms), signs, 0.5)
        if present is not None:
            signs = torch.where(present, signs, 0.0)
        found: Tensor = signs.sum(dtype=torch.float64) * clip * (self.unit / self.clip_norm)
        return found[None].to(norms.dtype)

    def read(self, released: Tensor) -> tuple[Tensor, float]:
        """Return the gradient and the count Σ (1[|g| <= clip] - ½) of a released sum."""
        return released[:-1], float(released[-1]) / self.unit


@dataclass(frozen=True, slots=True, eq=False)
class _OfBound(ClipRule):
    """The rule of one of the core's bounds, which know nothing of tensors."""

    bound: Any

    @property
    def largest_norm(self) -> float:
        return float(self.bound.norm())

    @property
    def scale(self) -> Any:
        return self.bound.scale

    @property
    def extent(self) -> Any:
        return self.bound.extent

    @property
    def width(self) -> int | None:
        width: int | None = self.bound.width
        return width

    @property
    def softening(self) -> float:
        return 0.0

    def factors(self, norms: Tensor, clip: float | Tensor) -> Tensor:
        return shrinking(norms, clip)


class _Norm(_OfBound):
    """`farthing.ClipNorm`, plain or scaled."""

    @property
    def graph_key(self) -> Hashable:
        return _Norm, isinstance(self.bound.scale, float)

    def check(self, size: int, starts: tuple[int, ...]) -> None:
        if self.bound.order != 2:
            raise Unsupported("norms of a model's gradients are L2 norms: use ClipNorm(clip), order 2")
        super().check(size, starts)


class _Coordinates(_OfBound):
    """`farthing.ClipCoordinates`."""

    by_coordinate: ClassVar[bool] = True

    @property
    def graph_key(self) -> Hashable:
        return _Coordinates

    def live_clip(self, device: torch.device) -> float:
        return 1.0

    def plain_sum(self, rows: Tensor, present: Tensor | None) -> Tensor:
        limit = beside(self.bound.scale, rows.device)
        clamped = torch.minimum(torch.maximum(rows, -limit), limit)
        return clamped.sum(0, dtype=torch.float64).float()


#: What `Gradient` honours: bounds of the core whose rules stand here, and every `ClipRule`.
KINDS = (Kind.NORM, Kind.SCALED_NORM, Kind.COORDINATES, ClipRule.kind)


def rule_of(bound: Any) -> ClipRule:
    """Return the rule of a bound: itself, or that of one of the core's bounds."""
    match bound:
        case ClipRule():
            return bound
        case ClipNorm():
            return _Norm(bound)
        case ClipCoordinates():
            return _Coordinates(bound)
    raise Unsupported(
        f"{type(bound).__name__} does not bound gradients of a model: use ClipNorm, ClipCoordinates or a "
        "ClipRule, such as ClipLayers and Automatic"
    )


def checked(bound: Any, size: int, starts: tuple[int, ...]) -> ClipRule:
    """Return the rule of a bound; raise unless it fits parameters of ``size`` that begin at ``starts``."""
    rule = rule_of(bound)
    rule.check(size, starts)
    norm, (least, most) = rule.largest_norm, rule.extent
    smallest = min(getattr(rule, "clip_norms", (norm,)))
    if not (smallest >= _SMALLEST and _LEAST <= norm * least <= norm * most <= _MOST):
        raise InvalidValue(f"float32 gradients have norms from {_SMALLEST:.1g} to {_MOST:.1g}: not {bound!r}")
    if rule.softening != 0 and not (rule.by_layer or rule.by_coordinate):
        _refuse_longer(rule)
    return rule


def _refuse_longer(rule: ClipRule) -> None:
    """Refuse factors that leave some gradient longer than promised, with what its computed norm may lack.

    A gradient of 2³⁰ numbers whose squares vanish in float32 has the norm 2⁻⁴⁸ and is taken for zero: factors
    without an upper limit (clip / norm) would make it as long as any. Nor may factors follow other norms.
    """
    norms = torch.logspace(-127, 126, 1013, base=2.0, dtype=torch.float32)
    norms[0] = 0.0
    clip = rule.live_clip(norms.device)
    factors, parts = rule.factors(norms, clip), [rule.factors(some, clip) for some in norms.split(101)]
    if not torch.allclose(factors, torch.cat(parts), equal_nan=True):
        raise InvalidValue(f"{rule!r}: one gradient moves all others; compute a factor from its norm alone")
    longest = factors.double() * (norms.double() + _LOST)
    for place in (longest.abs() > rule.largest_norm * _PROMISED).nonzero().flatten()[:1].tolist():
        raise InvalidValue(
            f"{rule!r} promises a largest norm of {rule.largest_norm:g}, but a gradient with a computed norm "
            f"of {float(norms[place]):.3g} may come out {float(longest[place].abs()):.3g} long: keep factors "
            "times norms within it, and factors near 0 below 2^38 times it (gamma from 4e-12)"
        )


def plain_sum(rows: Tensor, bound: Any, present: Tensor | None = None) -> Tensor:
    """Return the sum of bounded rows, one a gradient: what every faster way must agree with.

    ``present`` tells examples from rows that only fill up a batch.
    """
    rows = rows.float()
    finite = torch.isfinite(rows).all(1)
    if present is not None:
        finite &= present
    rows = torch.where(finite[:, None], rows, 0.0)
    return rule_of(bound).plain_sum(rows, present)
