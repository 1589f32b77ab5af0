"""Made-up examples, and what a model does with them: where its batch axis is.

Made-up inputs have the shapes and dtypes of real ones and nothing else of them: floats between 0.05 and
0.95, whole numbers 0 or 1. So whatever is found, or refused, tells nothing about private records.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from farthing.errors import FarthingError, Unsupported
from farthing.torch.layers import leaves, rules_of
from farthing.torch.tape import Plan, Use
from farthing.torch.vmapped import call, mapped

_SIZES = (2, 3)


@dataclass(frozen=True, eq=False)
class Source:
    """Where examples for a check come from: the shapes of a batch, or a public one's examples themselves."""

    inputs: Any
    targets: Any
    public: bool = False

    def batch(self, size: int, seed: int = 0) -> tuple[Any, Any]:
        """``size`` examples; others for another seed."""
        generator = torch.Generator().manual_seed(seed)

        def fill(x: Tensor) -> Tensor:
            if self.public:
                return x[(torch.arange(size, device=x.device) + seed) % len(x)]
            shape = (size, *x.shape[1:])
            if x.is_floating_point() or x.is_complex():
                values = torch.rand(shape, generator=generator) * 0.9 + 0.05
            else:
                values = torch.randint(0, 2, shape, generator=generator)
            return values.to(x.device, x.dtype)

        return mapped(self.inputs, fill), mapped(self.targets, fill)


def plan_of(model: nn.Module, source: Source) -> Plan:
    """The rules of a model and the batch axes of every use of them."""
    plan = Plan(model, *rules_of(model))
    seen = [_shapes(plan, source.batch(size)[0]) for size in _SIZES]
    for use, (inner, outer) in seen[0].items():
        others = seen[1].get(use)
        if others is None:
            module = list(plan.rules)[use[0]]
            raise Unsupported(
                f"{plan.names[module]} ({type(module).__name__}) is called as often as there are examples: "
                "call it once, on the whole batch"
            )
        plan.axes[use] = _axes(inner, others[0]), _axes(outer, others[1])
    small, large = (
        sum(math.prod(shape) for use in s.values() for side in use for shape in side) for s in seen
    )
    plan.held = (large - small) // (_SIZES[1] - _SIZES[0])
    return plan


Shapes = dict[Use, tuple[list[torch.Size], list[torch.Size]]]


def _shapes(plan: Plan, inputs: Any) -> Shapes:
    """The shapes of every use's inputs and outputs on one batch."""
    found: Shapes = {}
    calls: dict[nn.Module, int] = defaultdict(int)

    def note(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        calls[module] += 1
        shapes = [x.shape for x in leaves((args, kwargs))], [x.shape for x in leaves(out)]
        found[plan.numbers[module], calls[module]] = shapes

    handles = [module.register_forward_hook(note, with_kwargs=True) for module in plan.rules]
    buffers = {name: buffer.clone() for name, buffer in plan.model.named_buffers()}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices(plan.model)):
            call(plan.model, inputs)
    except FarthingError:
        raise
    except Exception as error:
        raise Unsupported(
            f"the model does not run on made-up inputs ({type(error).__name__}: {error}); give public ones, "
            "Gradient(..., example=(inputs, targets)), with at least two records"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
        for name, buffer in plan.model.named_buffers():
            buffer.copy_(buffers[name])
    return found


def _axes(small: list[torch.Size], large: list[torch.Size]) -> tuple[int | None, ...]:
    """The axis along which each tensor grew with the batch."""
    return tuple(
        next((axis for axis, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
        for one, other in zip(small, large, strict=False)
    )


def devices(model: nn.Module) -> list[int]:
    """The GPUs a model is on, whose generators are put back after a check."""
    places = {p.device for p in model.parameters() if p.device.type == "cuda"}
    return [place.index or 0 for place in places]
