"""AdaDP: clip and noise that follow each coordinate, and steps that do; for the price of DP-SGD.

Xu, Shi, Liu, Zhao & Chen 2020, "An Adaptive and Fast Convergent Approach to Differentially Private Deep
Learning", Algorithm 1. As published it has no finite ε: the scale of its noise and the gate that turns it on
read gradients before the noise is added. Here both read what was released, and nothing else:

* every example's gradient is clipped, one noise vector is added to the sum of a lot;
* E' ← γ' E' + (1 - γ')(g̃² - σ²), the mean square of released mean gradients less that of their noise, which
  is public (line 23; without σ² the estimate would feed on its own noise and grow without end);
* s = min(ceiling, β √max(E', floor²)) (line 9), where ceiling and floor are multiples of the layer's own
  root mean square, so that no coordinate is given up and none takes all;
* while E' of no parameter stands out of its noise, lots are clipped at the norm C as in DP-SGD (line 7, where
  the paper asks for Var √E' > G); a parameter whose E' does not, counts as what the noise can hide;
* w ← w - rate · g̃ / √(E + ε₀) (lines 22 to 26), E the mean square of g̃ itself, with a memory of its own.

Guarantee: a bound that follows from released values keeps its price (`ClipNorm` and `ClipCoordinates` are
measured in units of their scale, and so is the noise), so a run costs what DP-SGD costs at this noise, lot by
lot: one promise, counted by tight accounting, under the ledger's adjacency, against anyone who does not see
who is in a lot.

What made it useful, beyond sound (docs/deep-results.md has the figures):

* ``estimate``: a coordinate's released gradient is a hundredth of its noise. "factored" pools E' over rows
  and columns of a matrix (E'_ij = r_i c_j / mean, as in Shazeer & Stern 2018, "Adafactor"), "layer" over a
  parameter, "coordinate" not at all, as in the paper. Estimates are drawn to their mean by as much of their
  spread as the noise explains, so that scales differ only as far as gradients are known to.
* ``shape``: a box |g_i| <= s_i (the paper's) must pay for its corner, √m |s|, where gradients never are. An
  "ellipsoid" |g/s| <= C pays for C alone. There s is E'^¼ instead of E'^½, which makes the noise least for a
  given part of gradients that is clipped, and C shrinks with it.

`AdaL` has the adaptive rate only, `AdaN` the adaptive noise only. All three are optimisers for `train`:

>>> from farthing.torch.training import train
>>> model = torch.nn.Linear(3, 2)
>>> data = torch.randn(4000, 3), torch.randint(2, (4000,))
>>> method, loss = AdaDP(model), torch.nn.CrossEntropyLoss(reduction="none")
>>> lots = train(model, loss, data, epsilon=1.0, delta=1e-5, steps=20, optimizer=method, clip=method.bound)
>>> len(list(lots))
20
"""

import math
import operator
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from farthing import validate
from farthing.bounds import Bound, ClipCoordinates, ClipNorm
from farthing.errors import InvalidValue
from farthing.torch.bookkeeping import Layout
from farthing.torch.optim import DPAdam

_TINY = 1e-30  # a square that stands for no gradient and no noise


class Estimate(StrEnum):
    """Over what E' is pooled."""

    COORDINATE = "coordinate"
    FACTORED = "factored"
    LAYER = "layer"


class Shape(StrEnum):
    """What gradients are clipped to."""

    BOX = "box"
    ELLIPSOID = "ellipsoid"


class AdaDP(DPAdam):
    """An optimiser of ``model``, and in `bound` the clip that goes with it.

    ``clip`` is C, ``factor`` β, ``memory`` γ' and ``rate_memory`` 1 - γ, the decays of the two mean squares;
    ``floor`` and ``ceiling`` are multiples of a layer's root mean square, ``period`` the lots between two
    scales. ``noise`` and ``rate`` switch the two adaptive halves. ``momentum`` is that of released
    gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.01,
        *,
        clip: float = 1.0,
        factor: float = 1.2,
        memory: float = 0.99,
        rate_memory: float = 0.99,
        floor: float = 0.1,
        ceiling: float = 10.0,
        period: int = 10,
        estimate: Estimate | str = Estimate.FACTORED,
        shape: Shape | str = Shape.ELLIPSOID,
        noise: bool = True,
        rate: bool = True,
        momentum: float = 0.0,
        eps: float = 1e-8,
    ) -> None:
        for name, decay in (("memory", memory), ("rate_memory", rate_memory), ("momentum", momentum)):
            if not 0 <= decay < 1:
                raise InvalidValue(f"{name} must be in [0, 1), got {decay!r}")
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        super().__init__(trained, lr, betas=(momentum, rate_memory), floor=0.0, eps=eps)
        self._layout = Layout.of(model)
        self._clip = ClipNorm(validate.positive(clip=clip))
        self._factor, self._memory = validate.positive(factor=factor), memory
        self._floor, self._ceiling = validate.positive(floor=floor), validate.positive(ceiling=ceiling)
        if floor > 1 or ceiling < 1:
            raise InvalidValue(f"floor <= 1 <= ceiling must hold, got {floor!r} and {ceiling!r}")
        self._period = validate.count(period=period)
        self._estimate = validate.choice(Estimate, estimate=estimate)
        self._shape = validate.choice(Shape, shape=shape)
        self._follows, self._adapts = noise, rate
        self._bound: tuple[int, Bound] | None = None
        self._told: list[float | Tensor] = []  # the noise of the last step,
        self._variances: list[Tensor] = []  # and what follows from it
        self._levels: list[Tensor] = []

    def bound(self, t: int) -> Bound:
        """The clip of lot t = 1, 2, …: give it to `train` as ``clip``. It reads released values only."""
        period = (t - 1) // self._period
        if self._bound is None or self._bound[0] != period:
            self._bound = period, self._found()
        return self._bound[1]

    def scales(self) -> list[Tensor] | None:
        """√E' of every parameter, kept between floor and ceiling; None while E' is noise."""
        trained = [parameter for group in self.param_groups for parameter in group["params"]]
        states = [self.state[parameter] for parameter in trained]
        if not all("signal" in state for state in states):
            return None
        young = 1 - self._memory ** states[0]["step"]
        # a mean of k squares of noise has deviation √(2/k); memory holds (1 + γ')/(1 - γ') lots
        lots = min(states[0]["step"], (1 + self._memory) / (1 - self._memory))
        scales, stands = [], list[Tensor]()
        for state in states:  # in tensors throughout: every look at a number waits for the device
            signal, clutter = state["signal"] / young, state["clutter"].mean() / young
            edge = 3 * clutter * math.sqrt(2 / (lots * signal.numel()))
            level = signal.mean()
            stands.append(level > edge)
            square = _pooled(signal, self._estimate, 2 * clutter**2 / lots)
            # what does not stand out of the noise is taken to be as large as the noise can hide
            level = torch.where(stands[-1], level, edge.clamp_min(_TINY))
            square = torch.where(stands[-1], square, level)
            scales.append(square.clamp(self._floor**2 * level, self._ceiling**2 * level).sqrt())
        return scales if bool(torch.stack(stands).any()) else None

    def _found(self) -> Bound:
        scales = self.scales() if self._follows else None
        if scales is None:
            return self._clip
        parts = zip(scales, self._layout.shapes, strict=True)
        return self._shaped(torch.cat([scale.expand(shape).flatten() for scale, shape in parts]))

    def _shaped(self, root: Tensor) -> Bound:
        """The bound that goes with √E', on its device."""
        if self._shape is Shape.BOX:
            return ClipCoordinates((self._factor * root).clamp(max=self._clip.clip))
        # s ∝ E'^¼ of mean square 1: |g/s| is as often above its clip as |g| is above C
        half, whole = means(root, root.square())
        return ClipNorm(self._clip.clip * half / math.sqrt(whole), scale=(root / half).sqrt())

    def _move(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """All parameters at once: their steps are a few launches on a GPU, not a few for each."""
        released = [parameter.grad.float() for parameter in parameters if parameter.grad is not None]
        states = [self._state_of(parameter) for parameter in parameters]
        squares = list(torch._foreach_mul(released, released))
        if self._follows:
            self._learn(parameters, states, squares)
        (momentum, memory), steps = group["betas"], released
        if momentum:
            steps = [state["mean"] for state in states]
            torch._foreach_mul_(steps, momentum)
            torch._foreach_add_(steps, released)
        if self._adapts:
            roots = [state["square"] for state in states]
            torch._foreach_lerp_(roots, squares, 1 - memory)
            roots = list(torch._foreach_add(roots, group["eps"]))
            torch._foreach_sqrt_(roots)
            steps = list(torch._foreach_div(steps, roots))
        moves = [step.to(parameter.dtype) for step, parameter in zip(steps, parameters, strict=True)]
        torch._foreach_add_(parameters, moves, alpha=-group["lr"])

    def _learn(self, parameters: list[Tensor], states: list[dict[str, Any]], squares: list[Tensor]) -> None:
        """E' and what of it is noise, from the squares of what was released."""
        signals, clutters = ([state[name] for state in states] for name in ("signal", "clutter"))
        told = [self._noise.get(parameter, 0.0) for parameter in parameters]
        if len(told) != len(self._told) or any(map(operator.is_not, told, self._told)):
            pairs = zip(told, signals, strict=True)
            self._variances = [torch.as_tensor(each).to(p).square().expand_as(p) for each, p in pairs]
            self._told, self._levels = told, [each.mean() for each in self._variances]
        torch._foreach_lerp_(signals, torch._foreach_sub(squares, self._variances), 1 - self._memory)
        torch._foreach_lerp_(clutters, self._levels, 1 - self._memory)

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            zeros = torch.zeros_like(parameter, dtype=torch.float32)
            state.update(step=0, mean=zeros, signal=zeros.clone(), square=zeros.clone())
            state["clutter"] = zeros.new_zeros(())
        state["step"] += 1
        return state


def AdaL(model: nn.Module, lr: float = 0.01, *, clip: float = 1.0, rate_memory: float = 0.99) -> AdaDP:
    """Adaptive rate, plain noise: DP-SGD whose released gradients are divided by their root mean square."""
    return AdaDP(model, lr, clip=clip, rate_memory=rate_memory, noise=False)


def AdaN(
    model: nn.Module,
    lr: float = 0.1,
    *,
    clip: float = 1.0,
    factor: float = 1.2,
    estimate: Estimate | str = Estimate.FACTORED,
    shape: Shape | str = Shape.ELLIPSOID,
) -> AdaDP:
    """Adaptive noise, plain steps."""
    return AdaDP(model, lr, clip=clip, factor=factor, estimate=estimate, shape=shape, rate=False)


def means(*values: Tensor) -> list[float]:
    """Of each, summed in float64."""
    found: list[float] = torch.stack([each.mean(dtype=torch.float64) for each in values]).tolist()
    return found


def _pooled(square: Tensor, estimate: Estimate, doubt: Tensor) -> Tensor:
    """A mean square by coordinate, by rows and columns, or one; ``doubt`` is a coordinate's variance."""
    if estimate is Estimate.LAYER:
        return square.mean()
    if estimate is Estimate.COORDINATE or square.ndim < 2:
        return _trusted(square, doubt)
    whole = square.flatten(1)
    rows = _trusted(whole.mean(1, keepdim=True), doubt / whole.shape[1])
    columns = _trusted(whole.mean(0, keepdim=True), doubt / whole.shape[0])
    mean = rows.mean().clamp_min(_TINY)
    return (rows * columns / mean).reshape(square.shape)


def _trusted(values: Tensor, doubt: Tensor) -> Tensor:
    """Estimates drawn to their mean, by the part of their variance that is noise (Stein's shrinkage)."""
    mean, spread = values.mean(), values.var(correction=0)
    part = torch.where(spread > 0, 1 - doubt / spread, 0.0).clamp_min(0)
    return (mean + part * (values - mean)).clamp_min(0)
