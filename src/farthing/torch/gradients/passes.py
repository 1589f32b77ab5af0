"""Both passes of a model under a tape: the forward and backward pass that per-example gradients come from."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from farthing.errors import InvalidValue
from farthing.torch.gradients.layout import Layout
from farthing.torch.gradients.tape import Loss, Tape, TapePlan, call, mapped
from farthing.torch.gradients.terms import Term


@dataclass(frozen=True, slots=True, eq=False)
class Passes:
    """The passes of one model and loss, by a plan that was made on examples that are made up."""

    model: nn.Module
    loss: Loss
    layout: Layout
    plan: TapePlan
    autocast: torch.dtype | None = None

    def run(self, inputs: Any, targets: Any, weights: Tensor | None, put: Callable[[int, Term], None]) -> int:
        """Hand the term of every trained parameter to ``put``; return how many examples there were."""
        first = first_tensor(targets if targets is not None else inputs)
        grouped = weights is not None and weights.ndim == 2
        examples, records = (first.shape[0], first.shape[1]) if grouped else (first.shape[0], 1)
        if grouped:
            inputs, targets = ungrouped(inputs), ungrouped(targets)
        tape = Tape(self.plan, examples, records, put)
        kind = first.device.type
        mixed: Any = nullcontext() if self.autocast is None else torch.autocast(kind, self.autocast)
        with torch.enable_grad(), self.plan.patched(tape):
            with mixed:
                losses = record_losses(self.loss, call(self.model, inputs), targets, tape.rows)
            if losses.requires_grad:
                objective = losses if weights is None else losses * weights.flatten()
                with one_thread(first.device):
                    tape.back(objective.sum())
            tape.finish()
        return int(examples)

    def rows(self, inputs: Any, targets: Any, weights: Tensor | None = None) -> Tensor:
        """Return every example's gradient, unbounded: for checks on made-up examples."""
        found: dict[int, Tensor] = {}

        def put(slot: int, term: Term) -> None:
            found[slot] = term.rows(slice(None))

        examples = self.run(inputs, targets, weights, put)
        device = self.plan.anchor.device
        columns = [
            found[n] if n in found else torch.zeros(examples, size, device=device)
            for n, size in enumerate(self.layout.sizes)
        ]
        return torch.cat(columns, 1)


def record_losses(loss: Loss, outputs: Any, targets: Any, rows: int) -> Tensor:
    """Return the loss of each of ``rows`` records, in float32; raise where it is not one value a record."""
    losses = loss(outputs, targets)
    if losses.shape != (rows,):
        raise InvalidValue(
            f"loss must return one value a record, got {losses.ndim} dimensions and not as many "
            "values as records: "  # the number of records that were drawn stays private
            'use reduction="none" and sum over what belongs to one record'
        )
    return losses.float()


def one_thread(device: torch.device) -> Any:
    """Return a context with backward passes of a GPU in this thread: cuBLAS keeps 32 MiB for every thread."""
    return nullcontext() if device.type != "cuda" else torch.autograd.set_multithreading_enabled(False)


def first_tensor(value: Any) -> Tensor:
    """Return the first tensor in a (nested) tuple."""
    while isinstance(value, list | tuple):
        value = value[0]
    assert isinstance(value, Tensor)
    return value


def ungrouped(value: Any) -> Any:
    """Return users and their records as one batch of records."""
    return mapped(value, lambda t: t.flatten(0, 1))
