"""Train by AdaDP: clipping, noise and steps that adapt to each coordinate, at the price of DP-SGD.

Xu, Shi, Liu, Zhao & Chen 2020, "An Adaptive and Fast Convergent Approach to Differentially Private Deep
Learning", Algorithm 1. As published it has no finite ε: the scale of its noise and the gate that turns it on
read gradients before the noise is added. Here both read what was released, and nothing else:

* every example's gradient is clipped, one noise vector is added to the sum of a batch;
* E' ← γ' E' + (1 - γ')(g̃² - σ²), the mean square of released mean gradients less that of their noise, which
  is public (line 23; without σ² the estimate would feed on its own noise and grow without end);
* s = min(C, β √E') (line 9; without β for an ellipsoid), E' over 1 - γ'^t and then kept between floor² and
  ceiling² times the layer's own mean square, so that no coordinate is given up and none takes all;
* while E' of no parameter exceeds its noise, batches are clipped at the norm C as in DP-SGD (line 7,
  where the paper asks for Var √E' > G: ``threshold`` is that G, of released values, and noise alone may pass
  it); a parameter whose E' does not, counts as what the noise can hide;
* w ← w - rate · g̃ / √(E + ε₀) (lines 22 to 26), E the mean square of g̃ itself, with a memory of its own.

Guarantee: a bound that follows from released values keeps its price (`ClipNorm` and `ClipCoordinates` are
measured in units of their scale, and so is the noise), so a run costs what DP-SGD costs at this noise, batch
by batch: one promise, counted by tight accounting, under the ledger's adjacency, against anyone who does not
see who is in a batch.

What made it useful, beyond sound (docs/deep-results.md has the figures):

* ``estimate``: a coordinate's released gradient is a hundredth of its noise. "factored" pools E' over rows
  and columns of a matrix (E'_ij = r_i c_j / mean, as in Shazeer & Stern 2018, "Adafactor"), "layer" over a
  parameter, "coordinate" not at all, as in the paper. Estimates are drawn to their mean by as much of their
  spread as the noise explains, so that scales differ only as far as gradients are known to.
* ``shape``: a box |g_i| <= s_i (the paper's) must pay for its corner, √m |s|, where gradients never are. An
  "ellipsoid" |g/s| <= C pays for C alone. There s is E'^¼ instead of E'^½, which makes the noise least for a
  given part of gradients that is clipped, and C shrinks with it.

`AdaL` has the adaptive rate only, `AdaN` the adaptive noise only. All three are optimisers for `train`:

>>> from farthing.torch.training.loop import train
>>> model = torch.nn.Linear(3, 2)
>>> data = torch.randn(4000, 3), torch.randint(2, (4000,))
>>> method, loss = AdaDP(model), torch.nn.CrossEntropyLoss(reduction="none")
>>> how = {"epsilon": 1.0, "delta": 1e-5, "steps": 20}
>>> training = train(model, loss, data, **how, optimizer=method, clip_norm=method.bound)
>>> len(list(training))
20
"""

import itertools
import operator
from enum import StrEnum
from typing import Any, cast

import torch
from torch import Tensor, nn

from farthing import validate
from farthing.errors import InvalidValue
from farthing.queries.bounds import Bound, ClipCoordinates, ClipNorm
from farthing.torch.gradients.graphs import Recorded
from farthing.torch.gradients.layout import Flat, Layout, joined
from farthing.torch.kernels.noise import has_triton
from farthing.torch.training.optim import DPAdam

_FACTOR = 1.2  # β of the paper's figures
_TINY = 1e-30  # a square that stands for no gradient and no noise


class Estimate(StrEnum):
    """The coordinates that E' is pooled over."""

    COORDINATE = "coordinate"
    FACTORED = "factored"
    LAYER = "layer"


class Shape(StrEnum):
    """The shape that gradients are clipped to."""

    BOX = "box"
    ELLIPSOID = "ellipsoid"


class AdaDP(DPAdam):
    """An optimiser whose steps, clipping and noise adapt to each coordinate's released gradients.

    Give it to `train` as ``optimizer`` and its `bound` as ``clip_norm``. The paper's σ_*, L and T are
    arguments of `train`: noise_multiplier, sampling_rate = L/N and steps.

    Parameters
    ----------
    model : nn.Module
        The model; its trained parameters are optimised.
    lr : float, default 0.01
        η, the learning rate.
    clip_norm : float, default 1.0
        C, the clipping norm while no parameter's gradient exceeds its noise.
    factor : float, optional
        β, which multiplies the sides of a box. None: 1.2. Refused for an ellipsoid, which has none.
    memory : float, default 0.99
        γ', decay of E', the mean square of released gradients less their noise, in [0, 1).
    rate_memory : float, default 0.99
        1 - γ, decay of E, the mean square of released gradients, in [0, 1).
    threshold : float, optional
        G: scales follow E' once Var √E' > G. None: once E' exceeds its noise.
    floor, ceiling : float, default 0.1 and 10.0
        Least and largest scale of a coordinate, over its layer's root mean square.
    period : int, default 10
        Batches between two scales.
    estimate : {"factored", "coordinate", "layer"}, default "factored"
        Over what E' is pooled: rows and columns, nothing, or a parameter.
    shape : {"ellipsoid", "box"}, default "ellipsoid"
        What gradients are clipped to.
    adaptive_noise : bool, default True
        Whether clip and noise follow E'.
    adaptive_rate : bool, default True
        Whether steps are divided by √E.
    momentum : float, default 0.0
        Momentum of released gradients, in [0, 1).
    eps : float, default 1e-8
        ε₀.

    Notes
    -----
    Xu et al. 2020, Algorithm 1, with every estimate made of released values, so that a run costs what DP-SGD
    costs at its noise multiplier. The module's docstring has the deviations line by line.

    Examples
    --------
    >>> method = AdaDP(torch.nn.Linear(3, 2), clip_norm=2.0)
    >>> method.bound(1).norm()
    2.0
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.01,
        *,
        clip_norm: float = 1.0,
        factor: float | None = None,
        memory: float = 0.99,
        rate_memory: float = 0.99,
        threshold: float | None = None,
        floor: float = 0.1,
        ceiling: float = 10.0,
        period: int = 10,
        estimate: Estimate | str = Estimate.FACTORED,
        shape: Shape | str = Shape.ELLIPSOID,
        adaptive_noise: bool = True,
        adaptive_rate: bool = True,
        momentum: float = 0.0,
        eps: float = 1e-8,
    ) -> None:
        for name, decay in (("memory", memory), ("rate_memory", rate_memory), ("momentum", momentum)):
            if not 0 <= decay < 1:
                raise InvalidValue(f"{name} must be in [0, 1), got {decay!r}")
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        super().__init__(trained, lr, betas=(momentum, rate_memory), floor=0.0, eps=eps)
        self._layout = Layout.of(model)
        self._clip = ClipNorm(validate.positive(clip_norm=clip_norm))
        self._shape, self._memory = validate.choice(Shape, shape=shape), memory
        if factor is not None and self._shape is not Shape.BOX:
            raise InvalidValue(
                f"factor multiplies the sides of a box, and the shape is {str(self._shape)!r}: leave "
                f"factor={factor!r} out, or give shape='box'"
            )
        self._factor = validate.positive(factor=_FACTOR if factor is None else factor)
        self._threshold = threshold if threshold is None else validate.non_negative(threshold=threshold)
        self._floor, self._ceiling = validate.positive(floor=floor), validate.positive(ceiling=ceiling)
        if floor > 1 or ceiling < 1:
            raise InvalidValue(f"floor <= 1 <= ceiling must hold, got {floor!r} and {ceiling!r}")
        self._period = validate.count(period=period)
        self._estimate = validate.choice(Estimate, estimate=estimate)
        self._follows, self._adapts = adaptive_noise, adaptive_rate
        self._bound: tuple[int, Bound] | None = None
        self._kept: _Held | None = None

    def bound(self, t: int) -> Bound:
        """Return the bound of batch t = 1, 2, …, made of released values only: `train`'s ``clip_norm``."""
        period = (t - 1) // self._period
        if self._bound is None or self._bound[0] != period:
            self._bound = period, self._found()
        return self._bound[1]

    def scales(self) -> list[Tensor] | None:
        """Return √E' of every parameter, between floor and ceiling; None while E' is noise."""
        root, _, (stands, _) = self._measured()
        return None if root is None or not stands else self._layout.views(root.clone())

    def _found(self) -> Bound:
        _, scale, (stands, clip) = self._measured()
        if scale is None or not stands:
            return self._clip
        return ClipCoordinates(scale) if self._shape is Shape.BOX else ClipNorm(clip, scale=scale)

    def _measured(self) -> tuple[Tensor | None, Tensor | None, tuple[float, float]]:
        """Return √E' and the scale that goes with it; whether E' exceeds its noise, and the clip.

        The two numbers are the only ones that anybody waits for.
        """
        trained = [parameter for group in self.param_groups for parameter in group["params"]]
        states = [self.state[parameter] for parameter in trained]
        if not self._follows or not all("signal" in state for state in states):
            return None, None, (0.0, 0.0)
        held, step = self._held(trained, states), states[0]["step"]
        held.young.fill_(1 - self._memory**step)
        # a mean of k squares of noise has deviation √(2/k); memory holds (1 + γ')/(1 - γ') batches
        held.batches.fill_(min(step, (1 + self._memory) / (1 - self._memory)))
        root, scale, numbers = held.measuring.run(lambda: self._estimated(held))
        stands, clip = numbers.tolist()
        return root, scale, (stands, clip)

    def _estimated(self, held: "_Held") -> tuple[Tensor, Tensor, Tensor]:
        """Return `_measured` in tensors throughout: every look at a number waits for the device."""
        flat = held.flat
        signals = flat.layout.views(flat["signal"] / held.young)
        clutters = flat["clutter"] / held.young
        levels, edges = _means(signals), 3 * clutters * (2 / (held.batches * held.sizes)).sqrt()
        stands = levels > edges
        squares = _pooled(signals, self._estimate, 2 * clutters**2 / held.batches)
        # a value hidden by noise counts as the largest that the noise can hide
        levels = torch.where(stands, levels, edges.clamp_min(_TINY))
        least = torch.where(stands, self._floor**2 * levels, levels)
        most = torch.where(stands, self._ceiling**2 * levels, levels)
        each = zip(squares, least, most, signals, strict=True)
        root = torch.cat([torch.clamp(*one).expand(signal.shape).flatten() for *one, signal in each]).sqrt_()
        scale, clip = self._shaped(root)
        gate = stands.any()
        if self._threshold is not None:
            known = torch.cat([signal.flatten() for signal in signals]).clamp_min(0).sqrt_()
            gate = torch.var(known, correction=0) > self._threshold
        return root, scale, torch.stack([gate.double(), clip])

    def _shaped(self, root: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scale that goes with √E', and the clip in its units."""
        if self._shape is Shape.BOX:
            return (self._factor * root).clamp(max=self._clip.clip), root.new_ones((), dtype=torch.float64)
        # s ∝ E'^¼ of mean square 1: |g/s| is as often above its clip as |g| is above C
        half, whole = mean(root), mean(root.square())
        return (root / half).sqrt(), self._clip.clip * half / whole.sqrt()

    def _move(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Move all parameters at once, in a few launches on a GPU, not a few for each parameter."""
        states = [self.state[parameter] for parameter in parameters]
        held = self._held(parameters, states)
        for state in states:
            state["step"] = state.get("step", 0) + 1
        if self._follows:
            held.hear([self._noise.get(parameter, 0.0) for parameter in parameters])
        released = joined([parameter.grad for parameter in parameters if parameter.grad is not None])
        constants = *group["betas"], self._memory, group["eps"]
        pairs = zip(held.stepped(released, constants), parameters, strict=True)
        moves = [move.to(parameter.dtype) for move, parameter in pairs]
        torch._foreach_add_(parameters, moves, alpha=-group["lr"])

    def _held(self, parameters: list[Tensor], states: list[dict[str, Any]]) -> "_Held":
        """Return the state of these parameters, end to end."""
        momentum = self.param_groups[0]["betas"][0] > 0
        wanted = {"mean": momentum, "signal": self._follows, "square": self._adapts}
        names = [name for name, use in wanted.items() if use]
        numbers = ["clutter"] if self._follows else []
        if self._kept is None or not self._kept.flat.holds(parameters, states, names + numbers):
            self._kept = _Held(Flat(parameters, states, names, numbers))
        return self._kept


class _Held:
    """A state, and what else stays where it is, so that graphs can be made of it."""

    def __init__(self, flat: Flat) -> None:
        self.flat, device = flat, flat.device
        self.young, self.batches = torch.ones(2, device=device, dtype=torch.float32)
        self.sizes = torch.tensor(flat.layout.sizes, dtype=torch.float32, device=device)
        self.measuring, self._stepping, self._hearing = (Recorded(device) for _ in range(3))
        size, kind = flat.layout.size, cast(Any, {"device": device, "dtype": torch.float32})
        self._variance = torch.zeros(size, **kind)  # of the noise that was told,
        self._levels = torch.zeros(len(flat.layout.shapes), **kind)  # and its mean by parameter
        self._told: list[float | Tensor] = []
        self._room = torch.empty(size if device.type == "cuda" else 0, **kind)
        self._constants: tuple[float, ...] = ()

    def hear(self, told: list[float | Tensor]) -> None:
        """Set the deviation of each parameter's noise, from now on."""
        if len(told) == len(self._told) and all(map(operator.is_, told, self._told)):
            return
        self._told, device = told, self.flat.device
        pairs = zip(told, self.flat.layout.shapes, strict=True)
        deviations = joined([torch.as_tensor(each, device=device).expand(shape) for each, shape in pairs])
        torch.mul(deviations, deviations, out=self._variance)
        self._hearing.run(self._heard)

    def _heard(self) -> tuple[Tensor, ...]:
        return (self._levels.copy_(_means(self.flat.layout.views(self._variance))),)

    def stepped(self, released: Tensor, constants: tuple[float, ...]) -> tuple[Tensor, ...]:
        """Return how far each parameter moves, to be multiplied by the learning rate."""
        if constants != self._constants:
            self._constants, self._stepping = constants, Recorded(self.flat.device)
        if len(self._room):  # a graph reads it there
            released = self._room.copy_(released)
        return self._stepping.run(lambda: self._moves(released, *constants))

    def _moves(
        self, released: Tensor, momentum: float, rate_memory: float, memory: float, eps: float
    ) -> tuple[Tensor, ...]:
        mean, signal, square = (self.flat.get(name) for name in ("mean", "signal", "square"))
        if signal is not None:
            self.flat["clutter"].lerp_(self._levels, 1 - memory)
        rates = momentum, 1 - memory, 1 - rate_memory, eps
        return tuple(self.flat.layout.views(adapted(released, self._variance, mean, signal, square, rates)))


def AdaL(
    model: nn.Module,
    lr: float = 0.01,
    *,
    clip_norm: float = 1.0,
    rate_memory: float = 0.99,
    eps: float = 1e-8,
) -> AdaDP:
    """Return DP-SGD with an adaptive learning rate: released gradients are divided by their root mean square.

    The rate is made of released values, so a run costs what DP-SGD costs.

    Parameters
    ----------
    model, lr, clip_norm, rate_memory, eps
        As for `AdaDP`, with the same defaults.

    Returns
    -------
    AdaDP
        With ``adaptive_noise=False``.

    Examples
    --------
    >>> AdaL(torch.nn.Linear(3, 2), clip_norm=0.5).bound(100).norm()
    0.5
    """
    return AdaDP(model, lr, clip_norm=clip_norm, rate_memory=rate_memory, eps=eps, adaptive_noise=False)


def AdaN(
    model: nn.Module,
    lr: float = 0.1,
    *,
    clip_norm: float = 1.0,
    factor: float | None = None,
    memory: float = 0.99,
    threshold: float | None = None,
    estimate: Estimate | str = Estimate.FACTORED,
    shape: Shape | str = Shape.ELLIPSOID,
) -> AdaDP:
    """Return DP-SGD with adaptive noise: clip and noise follow each coordinate, steps are plain.

    Parameters
    ----------
    model, clip_norm, factor, memory, threshold, estimate, shape
        As for `AdaDP`, with the same defaults.
    lr : float, default 0.1
        Learning rate of plain steps.

    Returns
    -------
    AdaDP
        With ``adaptive_rate=False``.

    Examples
    --------
    >>> AdaN(torch.nn.Linear(3, 2)).bound(1).norm()
    1.0
    """
    return AdaDP(
        model,
        lr,
        clip_norm=clip_norm,
        factor=factor,
        memory=memory,
        threshold=threshold,
        estimate=estimate,
        shape=shape,
        adaptive_rate=False,
    )


def mean(values: Tensor) -> Tensor:
    """Return the mean, summed in float64."""
    return values.mean(dtype=torch.float64)


def adapted(
    released: Tensor,
    variance: Tensor,
    mean: Tensor | None,
    signal: Tensor | None,
    square: Tensor | None,
    rates: tuple[float, float, float, float],
) -> Tensor:
    """Return the step that follows from a released gradient, and update the given states in place.

    ``rates`` are the momentum of ``mean``, 1 - γ' by which ``signal`` E' moves, 1 - γ of ``square`` E, ε₀.
    """
    if released.is_cuda and has_triton():
        from farthing.torch.kernels import lattice_noise

        return lattice_noise.adapted(released, variance, mean, signal, square, rates)
    squares, steps = released.square(), released
    momentum, learns, adapts, eps = rates
    if signal is not None:
        signal.lerp_(squares - variance, learns)
    if mean is not None:
        steps = mean.mul_(momentum).add_(released)
    if square is not None:
        square.lerp_(squares, adapts)
        steps = steps / (square + eps).sqrt_()
    return steps


def _means(values: list[Tensor]) -> Tensor:
    return torch.stack([each.mean() for each in values])


def _pooled(squares: list[Tensor], estimate: Estimate, doubts: Tensor) -> list[Tensor]:
    """Return mean squares by coordinate, by rows and columns, or one; ``doubts`` are their variances."""
    if estimate is Estimate.LAYER:
        return list(_means(squares))
    pools = [_pools(square, estimate) for square in squares]
    each = [
        (one, doubt, square.numel() // one.numel())
        for square, some, doubt in zip(squares, pools, doubts, strict=True)
        for one in some
    ]
    single, doubted, shared = (list(column) for column in zip(*each, strict=True))
    trusted = iter(_trusted(single, torch.stack(torch._foreach_div(doubted, shared))))
    found = []
    for square, some in zip(squares, pools, strict=True):
        rows, *columns = itertools.islice(trusted, len(some))
        for other in columns:
            rows = (rows / rows.mean().clamp_min(_TINY) * other).reshape(square.shape)
        found.append(rows)
    return found


def _pools(square: Tensor, estimate: Estimate) -> list[Tensor]:
    """Return the estimates that a parameter's is made of: its coordinates, or means of rows and columns."""
    if estimate is Estimate.COORDINATE or square.ndim < 2:
        return [square]
    matrix = square.flatten(1)
    return [matrix.mean(1, keepdim=True), matrix.mean(0, keepdim=True)]


def _trusted(pools: list[Tensor], doubts: Tensor) -> list[Tensor]:
    """Return estimates shrunk to their mean, by the part of their variance that is noise (Stein)."""
    spreads, means = zip(*(torch.var_mean(pool, correction=0) for pool in pools), strict=True)
    spread = torch.stack(spreads)
    parts = torch.where(spread > 0, 1 - doubts / spread, 0.0).clamp_min(0)
    found = [torch.lerp(*one) for one in zip(means, pools, parts, strict=True)]
    torch._foreach_clamp_min_(found, 0.0)
    return found
