"""Sum bounded gradients of plain MLPs on a CPU: linear layers with elementwise functions between them.

Such models are so fast that recording the factors of gradients, use by use, takes as long as the products.
Here both passes are written out and reuse their memory; squared norms and factors are computed by kernels in
C if available. The results equal those of `bookkeeping`: `Stack.of` finds out whether a model is such a
stack, and `bookkeeping.Gradient.check` compares both ways on made-up examples before the first private one.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from farthing.noise import native
from farthing.torch.gradients.clipping import ClipRule
from farthing.torch.gradients.tape import reseed
from farthing.torch.kernels import totals
from farthing.torch.kernels.clamping import clamped_rows, clamped_sum
from farthing.torch.kernels.positions import scaled_squares
from farthing.torch.kernels.totals import add_product

# Modules that may stand between linear layers: without parameters or memory, and example by example.
_BETWEEN = (
    *(nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Softplus),
    *(nn.Flatten, nn.Identity, nn.Dropout),
)
_NARROW = 16  # columns that fill a vector register
Losses = Callable[[Any, Any, int], Tensor]


class _Layer(NamedTuple):
    """A linear layer, and where its weight and bias stand among the trained parameters, if they do."""

    module: nn.Linear
    weight: int | None
    bias: int | None


class Stack:
    """A sequence of linear layers and what stands between them; ``sizes`` are those of trained parameters."""

    def __init__(self, model: nn.Module, parts: list[nn.Module], sizes: tuple[int, ...]) -> None:
        self._model, self._parts, self._sizes = model, parts, sizes
        slots = {id(p): slot for slot, p in enumerate(p for p in model.parameters() if p.requires_grad)}
        self._layers = {
            n: _Layer(part, slots.get(id(part.weight)), slots.get(id(part.bias)))
            for n, part in enumerate(parts)
            if isinstance(part, nn.Linear)
        }
        self._first = min(n for n, layer in self._layers.items() if layer[1:] != (None, None))
        self._rooms: dict[int, Tensor] = {}
        self._last: tuple[Any, Tensor | None, tuple[Tensor, ...] | None] | None = None

    @classmethod
    def of(cls, model: nn.Module, sizes: tuple[int, ...]) -> "Stack | None":
        """Return the stack that a model is, if it is one."""
        parts, weights = list(_parts(model)), list(model.parameters())
        plain = all(type(part) is nn.Linear or type(part) in _BETWEEN for part in parts)
        once = len(weights) == sum(p is not None for part in parts for p in part._parameters.values())
        written = any(getattr(part, "inplace", False) for part in parts if type(part) is not nn.ReLU)
        if not plain or not once or written:
            return None
        floats = all(p.dtype == torch.float32 and p.device.type == "cpu" for p in weights)
        return cls(model, parts, sizes) if floats and all(p.is_contiguous() for p in weights) else None

    def fits(self, inputs: Any, weights: Tensor | None, rule: ClipRule) -> bool:
        """Return whether a batch and a clip rule are plain as well, and no hook watches the modules."""
        if not isinstance(inputs, Tensor) or inputs.dtype != torch.float32:
            return False
        if weights is not None and weights.ndim != 1:
            return False
        if inputs.ndim < 2 or inputs.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
            return False
        if rule.by_layer:
            return False
        return not any(map(_watched, self._parts)) and list(_parts(self._model)) == self._parts

    def add(
        self,
        inputs: Tensor,
        targets: Any,
        losses: Losses,
        rule: ClipRule,
        total: Tensor,
        empty: bool,
        weights: Tensor | None = None,
    ) -> bool:
        """Add Σ bounded gradients to ``total``, or write it there if ``empty``; False if that is impossible.

        ``losses`` gives the loss of each record from the model's outputs, the targets and their number;
        ``weights``, one a record, multiply them, and rows of weight 0 count as nobody.
        """
        scale, inverse = self._scaled(rule, total)
        with torch.no_grad():
            forth = self._forth(inputs)
            if forth is None:
                return False
            outputs, inner, between = forth
            squares = torch.zeros(len(inputs), dtype=torch.float64)
            delta = _delta(losses, outputs, targets)
            if delta is None:
                if empty:
                    total.zero_()
                return True
            if weights is not None:
                delta = delta * weights.view(-1, *(1,) * (delta.ndim - 1))
            outer = self._back(delta, inner, between, squares, None if rule.by_coordinate else inverse)
            factors, strange = _factors(rule, squares)
            if rule.extra:
                present = None if weights is None else weights > 0
                more = rule.extras(squares.sqrt().float(), present, rule.live_clip(total.device))
                last = total[-rule.extra :]
                last.copy_(more) if empty else last.add_(more)
            if strange:
                good = factors[:, None] > 0
                outer = {n: torch.where(good, u, 0.0) for n, u in outer.items()}
                inner = {n: torch.where(good, v, 0.0) for n, v in inner.items()}
            spans = total[: sum(self._sizes)].split(self._sizes)
            if rule.by_coordinate:
                assert scale is not None
                self._add_clamped(outer, inner, scale, total.zero_() if empty else total)
                return True
            for n, u in outer.items():
                module, weight, bias = self._layers[n]
                if weight is not None:
                    sides = _weighted(u, inner[n], factors)
                    add_product(*sides, spans[weight].view(module.weight.shape), empty=empty)
                if bias is not None:
                    found = totals.weighted(u, factors)
                    spans[bias].copy_(found) if empty else spans[bias].add_(found)
        return True

    def agrees(
        self,
        inputs: Any,
        targets: Any,
        losses: Losses,
        rule: ClipRule,
        other: Callable[[ClipRule], Tensor],
    ) -> bool:
        """Return whether a sum of made-up examples is what another way gives with the same random numbers."""
        if not self.fits(inputs, None, rule):
            return False
        total = torch.zeros(sum(self._sizes), dtype=torch.float32)
        with torch.random.fork_rng([]):
            reseed(0)
            try:
                fits = self.add(inputs, targets, losses, rule, total, True)
            except RuntimeError:  # a loss that writes into the outputs, say
                return False
            reseed(0)
            expected = other(rule)
        return fits and bool((total - expected).norm() <= 1e-4 * expected.norm())

    def _scaled(self, rule: ClipRule, total: Tensor) -> tuple[Tensor | None, tuple[Tensor, ...] | None]:
        """Return a rule's units, and 1 / units² of every trained parameter; the last rule's are kept."""
        if self._last is None or self._last[0] is not rule:
            scale = rule.units(sum(self._sizes), total.device)
            inverse = None if scale is None else scale.square().reciprocal_().split(self._sizes)
            self._last = rule, scale, inverse
        return self._last[1:]

    def _add_clamped(
        self, outer: dict[int, Tensor], inner: dict[int, Tensor], limit: Tensor, total: Tensor
    ) -> None:
        """Add Σ gradients, clamped to ± limit coordinate by coordinate, to ``total``."""
        limits, spans = limit.split(self._sizes), total.split(self._sizes)
        for n, u in outer.items():
            module, weight, bias = self._layers[n]
            if weight is not None:
                shape = module.weight.shape
                clamped_sum(u, inner[n], limits[weight].view(shape), spans[weight].view(shape))
            if bias is not None:
                clamped_rows(u, limits[bias], spans[bias])

    def _forth(self, x: Tensor) -> tuple[Tensor, dict[int, Tensor], dict[int, Any]] | None:
        """Return the outputs, every layer's input, and what the way back needs of the parts between."""
        rows, inner, between = len(x), dict[int, Tensor](), dict[int, Any]()
        for n, part in enumerate(self._parts):
            if n in self._layers:
                if x.ndim != 2 or not x.is_contiguous():
                    return None
                module = self._layers[n].module
                room = self._room(n, rows, module.out_features)
                inner[n], x = x, affine(x, module.weight, module.bias, room)
            elif type(part) is nn.ReLU:
                between[n] = x = x.relu_() if n - 1 in self._layers else x.relu()
            elif n < self._first:
                x = part(x)
            else:
                between[n] = _passed(part, x)
                x = between[n][1].detach()
        return x, inner, between

    def _back(
        self,
        delta: Tensor,
        inner: dict[int, Tensor],
        between: dict[int, Any],
        squares: Tensor,
        inverse: tuple[Tensor, ...] | None,
    ) -> dict[int, Tensor]:
        """Return the gradient of every layer's output; adds what it makes of squared norms to ``squares``.

        These are norms of gradient / scale where ``inverse`` is 1 / scale², parameter by parameter.
        """
        found: dict[int, Tensor] = {}
        own = False  # whether delta is nobody else's
        gate: Tensor | None = None  # a ReLU's output that it still has to pass
        for n in range(len(self._parts) - 1, self._first - 1, -1):
            if n in self._layers:
                module, weight, bias = self._layers[n]
                found[n] = delta = delta.contiguous()
                if inverse is None:
                    _add_squares(delta, gate, inner[n], weight is not None, bias is not None, squares)
                else:
                    if gate is not None:
                        _shut(delta, gate)
                    if weight is not None:
                        by = inverse[weight].view(module.weight.shape)
                        squares += scaled_squares(delta, inner[n], by)
                    if bias is not None:
                        one = delta.new_ones(len(delta), 1)
                        squares += scaled_squares(delta, one, inverse[bias][:, None])
                own, gate = True, None
                if n > self._first:
                    delta = torch.mm(delta, module.weight, out=self._room(-n, len(delta), module.in_features))
            elif type(self._parts[n]) is not nn.ReLU:
                leaf, out = between[n]
                (delta,) = torch.autograd.grad(out, leaf, delta)
                own = False
            elif own and n - 1 in self._layers:
                gate = between[n]  # with the norms, in one go
            else:
                delta = torch.where(between[n] <= 0, 0.0, delta)
        return found

    def _room(self, n: int, rows: int, width: int) -> Tensor:
        """Return memory of one's own, the same in every step: new memory is slow."""
        room = self._rooms.get(n)
        if room is None or room.numel() < rows * width:
            room = self._rooms[n] = torch.empty((rows + rows // 8) * width, dtype=torch.float32)
        return room[: rows * width].view(rows, width)


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the parts of a model that is nothing but a sequence, in order."""
    if type(module) is nn.Sequential and not _watched(module):
        for part in module:
            yield from _parts(part)
    else:
        yield module


def _watched(module: nn.Module) -> bool:
    """Return whether a hook is attached to a module's call."""
    own = module.__dict__
    return bool(
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or modules._global_forward_hooks
        or modules._global_forward_pre_hooks
        or "forward" in own
    )


def _passed(part: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input and output of a part between layers, for autograd to find the way back."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return leaf, part(leaf)


def _delta(losses: Losses, outputs: Tensor, targets: Any) -> Tensor | None:
    """Return the gradient of each record's loss by the outputs; None where there is none."""
    with torch.enable_grad():
        leaf = outputs.detach().requires_grad_()
        found = losses(leaf, targets, len(leaf))
        if not found.requires_grad:
            return None
        (delta,) = torch.autograd.grad(found, leaf, torch.ones_like(found), allow_unused=True)
    return delta


def _add_squares(
    u: Tensor, gate: Tensor | None, v: Tensor, weight: bool, bias: bool, squares: Tensor
) -> None:
    """Add |u|² (|v|² + 1) to ``squares``, for trained weight and bias; u becomes 0 where a gate is shut."""
    kernels = native.kernels(u.numel() + v.numel())
    if kernels is not None:
        shut, sizes = None if gate is None else gate.data_ptr(), (len(u), u.shape[1], v.shape[1])
        kernels["add_squares"](u.data_ptr(), shut, v.data_ptr(), *sizes, weight, bias, squares.data_ptr())
        return
    if gate is not None:
        _shut(u, gate)
    each, other = (torch.linalg.vector_norm(side, dim=1, dtype=torch.float64).square() for side in (u, v))
    squares += each * (other + bias if weight else float(bias))


def _shut(u: Tensor, gate: Tensor) -> None:
    """Set entries to zero, in place, where the output of a ReLU is zero."""
    torch.ops.aten.threshold_backward.grad_input(u, gate, 0, grad_input=u)


def _factors(rule: ClipRule, squares: Tensor) -> tuple[Tensor, bool]:
    """Return the factors of gradients of these squared norms, and whether one of them is not finite."""
    clip, gamma = rule.live_clip(squares.device), rule.softening
    kernels = None if gamma is None else native.kernels(len(squares))
    if kernels is not None:
        found = torch.empty(len(squares), dtype=torch.float32)
        places = squares.data_ptr(), len(squares), clip, gamma, found.data_ptr()
        bad = bool(kernels["factors"](*places))
        return totals.without_denormal(found), bad
    norms = squares.sqrt()
    good = norms.float().isfinite()
    return totals.without_denormal(torch.where(good, rule.factors(norms, clip).float(), 0.0)), not good.all()


def _weighted(u: Tensor, v: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Return both sides of a sum of products, the narrow one weighted."""
    each = factors[:, None]
    return (u * each, v) if u.shape[1] <= v.shape[1] else (u, v * each)


def affine(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """Compute x Wᵀ + b into ``out``, for float32 matrices on a CPU.

    >>> x, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]])
    >>> affine(x, weight, torch.ones(2), torch.empty(1, 2))
    tensor([[12., 18.]])
    """
    if 1 < len(weight) < _NARROW and x.shape[1] > 4 * _NARROW:
        out.copy_(torch.mm(weight, x.t()).t())
        return out if bias is None else out.add_(bias)
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)
