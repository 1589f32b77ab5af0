"""Run all steps of an LSTM by kernels in C, forward and backward, where the kernels are available.

A step's products end in registers where its gates begin, and nothing is copied between steps. Records are
first, steps second; each thread runs some of the records.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from farthing.noise import native
from farthing.torch.kernels.positions import available, in_threads


class LayerWeights(NamedTuple):
    """The weights of a layer: of its input, of the state before, and their biases."""

    input: Tensor
    hidden: Tensor
    bias: Tensor | None = None
    other: Tensor | None = None


def fits(x: Tensor, weights: LayerWeights) -> bool:
    """Return whether the steps of such an input are run here."""
    alike = all(p is None or (p.dtype is torch.float32 and p.is_contiguous()) for p in weights)
    return alike and x.dtype is torch.float32 and x.numel() > 0 and available(x.device)


class Lstm(torch.autograd.Function):
    """All states (records, steps, width) of an LSTM and its last cell, for x (records, steps, depth).

    The backward pass runs once: the gradient of what goes into the gates, which is handed to ``then``, is
    written over the gates. Weights get none. ``anchor`` requires a gradient, for an x that does not.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        x: Tensor,
        h: Tensor,
        c: Tensor,
        weights: LayerWeights,
        then: Callable[[Tensor], None],
    ) -> tuple[Tensor, Tensor]:
        """Run all steps."""
        (records, steps, _), width = x.shape, h.shape[1]
        x, h, c = (part.detach().contiguous() for part in (x, h, c))
        gates = x.new_empty(records, steps, 4 * width)
        cells, tanhs, states = (x.new_empty(records, steps, width) for _ in range(3))
        _run("lstm_forward", (x, h, c), tuple(weights), (gates, cells, tanhs, states), weights)
        ctx.save_for_backward(gates, cells, tanhs, c)
        ctx.rest = weights, then
        return states, cells[:, -1].clone()

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        """Run them backward, from the gradients of all states and of the last cell."""
        (gates, cells, tanhs, start), (weights, then) = ctx.saved_tensors, ctx.rest
        deltas, c = given[0].contiguous(), given[1].clone(memory_format=torch.contiguous_format)
        h, dx = torch.empty_like(c), None
        if ctx.needs_input_grad[1]:
            dx = gates.new_empty(*gates.shape[:2], weights.input.shape[1])
        _run("lstm_backward", (deltas, cells, tanhs, start), weights[:2], (gates, h, c, dx), weights)
        then(gates)
        return None, dx, h, c, None, None


def _run(
    name: str,
    inputs: tuple[Tensor, ...],
    shared: tuple[Tensor | None, ...],
    outputs: tuple[Tensor | None, ...],
    weights: LayerWeights,
) -> None:
    """Call a kernel for shares of the records, which are the first axis of inputs and outputs."""
    kernels = native.kernels()
    assert kernels is not None
    kernel, (records, steps) = kernels[name], inputs[0].shape[:2]
    width, depth = weights.hidden.shape[1], weights.input.shape[1]
    high, long = (-(-size // 64) * 64 for size in (width, depth))
    threads = max(1, min(torch.get_num_threads(), records))
    room = torch.empty(threads, 4 * (high * (width + depth) + width * long), dtype=torch.float32)

    def run(n: int) -> None:
        first, last = (records * edge // threads for edge in (n, n + 1))
        before, after = ([_at(part, first) for part in parts] for parts in (inputs, outputs))
        between = [_at(part) for part in shared]
        kernel(*before, *between, last - first, steps, depth, width, room[n].data_ptr(), *after)

    in_threads(run, threads)


def _at(part: Tensor | None, first: int | None = None) -> int | None:
    """Return where a tensor, or what it has of a record, begins."""
    if part is None:
        return None
    return part.data_ptr() if first is None else part[first].data_ptr()
