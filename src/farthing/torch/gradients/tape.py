"""Record one forward and one backward pass on a tape, with the terms of per-example gradients by use.

While a tape runs, the rules of `farthing.torch.gradients.layers` replace the forward of every module that
holds trainable parameters, and these parameters do not require gradients: the backward pass computes
gradients of outputs only. If several records make up an example (a user, several views), they count as
further positions of it.

The module also has helpers that call a model with one input or several, and that run both passes of a model
under a tape.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from farthing.errors import InvalidValue, Unsupported
from farthing.torch.gradients.holdings import Holdings
from farthing.torch.gradients.joint_terms import SumTerm
from farthing.torch.gradients.layout import Layout, Sketch, real
from farthing.torch.gradients.outers import Outer
from farthing.torch.gradients.tape_plan import Axes, TapePlan, Use
from farthing.torch.gradients.terms import Factor, RowTerms, Term, summed


def _anchored(ctx: Any, out: Tensor, anchor: Tensor) -> Tensor:
    ctx.mark_dirty(out)
    return out


# Makes an output that needs no gradient need one, without a copy and without being a leaf (an in-place ReLU
# may follow).
_Anchor: Any = type(
    "_Anchor",
    (torch.autograd.Function,),
    {"forward": staticmethod(_anchored), "backward": staticmethod(lambda ctx, delta: (None, None))},
)


def _noted(ctx: Any, out: Tensor, then: Callable[..., None], *keep: Tensor) -> Tensor:
    ctx.then = then
    ctx.save_for_backward(*keep)
    ctx.mark_dirty(out)
    return out


def _told(ctx: Any, delta: Tensor) -> tuple[Any, ...]:
    kept, then, ctx.then = ctx.saved_tensors, ctx.then, None
    then(delta, *(x.detach() for x in kept))
    return delta, None, *(None for _ in kept)


# Hands an output's gradient on with inputs that autograd keeps, so that a checkpoint computes them again.
_Noted: Any = type(
    "_Noted", (torch.autograd.Function,), {"forward": staticmethod(_noted), "backward": staticmethod(_told)}
)


class Tape:
    """The terms of every trainable parameter, as the two passes go by.

    ``put`` is called with a parameter's slot and its term as soon as all its uses are known; terms of
    parameters that are used once are handed on at once, so that what they hold can be let go.
    """

    def __init__(
        self,
        plan: TapePlan,
        examples: int,
        records: int,
        put: Callable[[int, Term], None],
        factored: bool = False,
    ) -> None:
        self.plan, self.examples, self.records, self._put = plan, examples, records, put
        self.factored = factored  # norms and weighted sums are all that is asked of terms, by kernels
        self._calls: dict[Any, int] = defaultdict(int)  # of modules, and of operations on their parameters
        self._uses: dict[int, int] = defaultdict(int)
        self._terms: dict[int, list[Term]] = defaultdict(list)
        self._ends: list[Callable[[], None]] = []
        self._copies: list[tuple[int, Tensor]] = []
        self.given: Any = ()  # to the module that runs
        self._inside, self._again = 0, False  # of checkpoints, in the forward pass; computing one again
        self.holdings = Holdings()
        self.shared: frozenset[int] = frozenset()  # memory of parameters and buffers
        self.rowed: dict[int, int] = {}  # how many rows a record has in tensors that an operation is given
        self.at = 0  # the use whose output's gradient came last
        self.since: dict[int, int] = {}  # the use with which the first of a parameter's several terms came

    @property
    def rows(self) -> int:
        """Return the number of records in the batch."""
        return self.examples * self.records

    def use(self, module: nn.Module, *parameters: Tensor | None) -> Use:
        """Count one more call of a module and of the parameters that it uses."""
        self._calls[module] += 1
        for p in parameters:
            self.used(p)
        return self.plan.numbers[module], self._calls[module]

    def used(self, p: Tensor | None) -> None:
        """Note one more use of a parameter."""
        if p is not None and not self._again and id(p) in self.plan.slots:
            self._uses[self.plan.slots[id(p)]] += 1

    def settled(self, found: bool, module: nn.Module, what: str, likely: bool | None = None) -> bool:
        """Return what was ``found`` of an operation on a module's parameters in the first pass of all.

        Operations are counted by module and by name: where a model leaves some out (a mask of ones, say), the
        others stay what they are. Of one that no made-up batch met, what is ``likely`` holds.
        """
        self._calls[module, what] += 1
        key = (self.plan.names.get(module, ""), what, self._calls[module, what])
        if self.plan.checking:
            return self.plan.settled.setdefault(key, found)
        return self.plan.settled.get(key, found if likely is None else likely)

    def axes(self, use: Use) -> Axes:
        """Return the batch axes of a use."""
        found = self.plan.axes.get(use)
        if found is None:
            module = list(self.plan.rules)[use[0]]
            raise Unsupported(
                f"{self.plan.names[module]} ({type(module).__name__}) is called more often than in the "
                "check: calls of a module must not depend on the data or the size of the batch"
            )
        for x, axis, length in zip(
            leaves(self.given), found[0], self.plan.lengths.get(use, ()), strict=False
        ):
            if axis is not None and (not length or x.shape[axis] != length * self.rows):
                module = list(self.plan.rules)[use[0]]
                raise Unsupported(
                    f"{self.plan.names[module]} ({type(module).__name__}) is given a number of rows that "
                    "depends on the data, so that nobody knows whose each is"
                )
        return found

    def batch_first(self, module: nn.Module, axis: int | None) -> None:
        """Raise unless examples lie along the first dimension of a module's input."""
        if axis != 0:
            name = f"{self.plan.names[module]} ({type(module).__name__})"
            raise Unsupported(f"{name} needs examples along its first dimension")

    def grouped(self, x: Tensor, axis: int | None, last: int = 1) -> Tensor:
        """Return x as (examples, positions, *last dimensions); a tensor that all share is repeated."""
        if axis == 0 and x.ndim == last + 1 and len(x) == self.examples:
            return x.unsqueeze(1)
        if axis is None:
            x = x.expand(self.rows, *x.shape[1:]) if len(x) == 1 else x.expand(self.rows, *x.shape)
        elif axis:
            x = x.movedim(axis, 0)
        return x.reshape(self.examples, -1, *x.shape[x.ndim - last :])

    def joined(self, rows: Tensor) -> Tensor:
        """Return rows (some an example, width) added up for each example."""
        alone = rows.shape[0] == self.examples
        return rows if alone else rows.view(self.examples, -1, rows.shape[1]).sum(1)

    @contextmanager
    def checkpointed(self, function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
        """Yield what computes a part with a checkpoint again: the same uses of the same modules."""
        start = dict(self._calls)

        def again(*args: Any, **kwargs: Any) -> Any:
            before = self._calls, self._again
            self._calls, self._again = defaultdict(int, start), True
            try:
                return function(*args, **kwargs)
            finally:
                self._calls, self._again = before

        self.plan.checkpoints += 1
        self._inside += 1
        try:
            yield again
        finally:
            self._inside -= 1

    def watch(
        self, out: Tensor, then: Callable[..., None], as_is: bool = False, keep: tuple[Tensor, ...] = ()
    ) -> Tensor:
        """Hand the gradient of ``out`` to ``then``: in float32, or ``as_is`` where terms are `factored`.

        What there is to ``keep`` comes with it, and is computed again where a checkpoint asks for that.
        """
        if not torch.is_grad_enabled():
            return out
        if not out.requires_grad:
            out = _Anchor.apply(out, self.plan.anchor)
        native = as_is and self.factored
        number = 0 if self._again else self.note(out, *keep)

        def seen(delta: Tensor, *kept: Tensor) -> None:
            self.at = number
            then(delta if native else delta.float(), *kept)

        if keep and (self._inside or self._again) and not out._is_view():
            noted: Tensor = _Noted.apply(out, seen, *keep)
            return noted
        watched: Any = out
        once = [(seen, tuple(x.detach() for x in keep))]

        def called(delta: Tensor) -> None:
            told, kept = once.pop()  # what it holds is let go at once, and not with all of the graph
            told(delta, *kept)

        if not self._again:
            watched.register_hook(called)
        return out

    def note(self, out: Tensor, *others: Tensor, steps: int = 1) -> int:
        """Note the memory of what a use of a layer gives and takes; return the use's number."""
        return self.holdings.note(
            out, *others, steps=steps, part=self.plan.checkpoints if self._inside else None
        )

    def multiplied(self, x: Tensor) -> Tensor:
        """Return an input as autocast multiplies it, so that what a term keeps is what autograd keeps."""
        kind = x.device.type
        if not self.factored or not torch.is_autocast_enabled(kind) or x.dtype is not torch.float32:
            return x
        return x.to(torch.get_autocast_dtype(kind))

    def project(self, x: Tensor, weight: Tensor, bias: Tensor | None, axis: int | None) -> Tensor:
        """Return x Wᵀ + b, for any leading dimensions, and note δ ⊗ x and δ, summed over positions."""
        x = self.multiplied(x)
        flat = bool(self._inside or self._again) and x.ndim > 2 and axis is not None
        out = F.linear(x.flatten(0, -2) if flat else x, weight, bias)  # what torch makes of more is a view
        if axis is None:
            out = self.spread(out)

        def then(delta: Tensor, seen: Tensor) -> None:
            if flat:
                delta = delta.reshape(*seen.shape[:-1], -1)
            if seen.dtype is not delta.dtype:
                seen, delta = seen.float(), delta.float()
            u = Factor(self.grouped(delta, 0 if axis is None else axis))
            self.put(weight, lambda: Outer(u, Factor(self.grouped(seen, axis))))
            self.put(bias, lambda: summed(u))

        found = self.watch(out, then, as_is=True, keep=(x,))
        return found.view(*x.shape[:-1], -1) if flat else found

    def spread(self, out: Tensor) -> Tensor:
        """Return an output that all examples share, once for each, so that its gradients stay apart."""
        return out.expand(self.rows, *out.shape[1:]) if len(out) == 1 else out.expand(self.rows, *out.shape)

    def trained(self, p: Tensor | None) -> bool:
        """Return whether the gradient of a parameter is asked for."""
        return p is not None and id(p) in self.plan.slots

    def put(self, p: Tensor | None, term: Callable[[], Term]) -> None:
        """Take the term of one use of a parameter."""
        if p is None or (slot := self.plan.slots.get(id(p))) is None:
            return
        terms = self._terms[slot]
        terms.append(term())
        self.since.setdefault(slot, self.at)
        if len(terms) == self._uses[slot]:
            self._put(slot, SumTerm.of(self._terms.pop(slot)))

    def copies(self, p: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return a parameter once for each record, an example's copies being one: its gradients are rows."""
        slot = self.plan.slots[id(p)]
        leaf = p.detach().view(1, *shape).expand(self.examples, *shape).requires_grad_()
        if not self._again:
            self._uses[slot] += 2  # its gradient comes last, so that no use of it may be handed on before
            self._copies.append((slot, leaf))
        return leaf if self.records == 1 else leaf.repeat_interleave(self.records, 0)

    def finally_(self, then: Callable[[], None]) -> None:
        """Register a function to call after the backward pass."""
        if not self._again:
            self._ends.append(then)

    def back(self, objective: Tensor) -> None:
        """Run the backward pass towards trained parameters only.

        Only gradients that are asked for are made: another leaf that the graph reaches (a parameter of the
        loss, say) would keep the exact gradient of a batch in its ``grad``.
        """
        leaves = [leaf for _, leaf in self._copies]
        found = torch.autograd.grad(objective, [self.plan.anchor, *leaves], allow_unused=True)
        for (slot, _), gradient in zip(self._copies, found[1:], strict=True):
            if gradient is not None:
                self._terms[slot].append(RowTerms(real(gradient).reshape(self.examples, -1)))

    def finish(self) -> None:
        """Call the registered functions, and hand on the remaining terms, after the backward pass."""
        for end in self._ends:
            end()
        for slot in list(self._terms):
            self._put(slot, SumTerm.of(self._terms.pop(slot)))


Loss = Callable[[Any, Any], Tensor]


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """Return the model's outputs; several inputs are a tuple."""
    return model(*inputs) if isinstance(inputs, list | tuple) else model(inputs)


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to every tensor in a (nested) tuple."""
    if isinstance(value, list | tuple):
        return tuple(mapped(part, function) for part in value)
    return function(value) if isinstance(value, Tensor) else value


def leaves(value: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [leaf for part in parts for leaf in leaves(part)]


def one(inputs: Any, targets: Any, place: int) -> tuple[Any, Any]:
    """Return the example at a place, as a batch of one."""

    def pick(x: Tensor) -> Tensor:
        return x[place : place + 1].clone()  # a model may write into its inputs

    return mapped(inputs, pick), mapped(targets, pick)


@dataclass(frozen=True, slots=True, eq=False)
class Passes:
    """The passes of one model and loss, by a plan that was made on examples that are made up."""

    model: nn.Module
    loss: Loss
    layout: Layout
    plan: TapePlan
    autocast: torch.dtype | None = None

    def run(
        self,
        inputs: Any,
        targets: Any,
        weights: Tensor | None,
        put: Callable[[int, Term], None],
        factored: bool = False,
        begin: Callable[["Tape"], None] | None = None,
    ) -> int:
        """Hand the term of every trained parameter to ``put``; return how many examples there were.

        ``begin`` is given the tape before the backward pass.
        """
        first = first_tensor(targets if targets is not None else inputs)
        grouped = weights is not None and weights.ndim == 2
        examples, records = (first.shape[0], first.shape[1]) if grouped else (first.shape[0], 1)
        if grouped:
            inputs, targets = ungrouped(inputs), ungrouped(targets)
        tape = Tape(self.plan, examples, records, put, factored)
        kind = first.device.type
        mixed: Any = nullcontext() if self.autocast is None else torch.autocast(kind, self.autocast)
        with torch.enable_grad(), self.plan.patched(tape):
            with mixed:
                losses = record_losses(self.loss, call(self.model, inputs), targets, tape.rows)
            if losses.requires_grad:
                objective = losses if weights is None else losses * weights.flatten()
                if begin is not None:
                    begin(tape)
                with one_thread(first.device):
                    tape.back(objective.sum())
            tape.finish()
        return int(examples)

    def rows(
        self, inputs: Any, targets: Any, weights: Tensor | None = None, sketch: Sketch | None = None
    ) -> Tensor:
        """Return every example's gradient, unbounded, or its ``sketch``: for checks on made-up examples."""
        short = Sketch(()) if sketch is None else sketch
        found: dict[int, Tensor] = {}

        def put(slot: int, term: Term) -> None:
            found[slot] = torch.cat([short(slot, term.rows(part)) for part in term.parts()])

        inputs, targets = mapped((inputs, targets), torch.clone)
        examples = self.run(inputs, targets, weights, put)
        for n, size in enumerate(self.layout.sizes):
            if n not in found:
                zeros = torch.zeros(1, size, device=self.plan.anchor.device, dtype=torch.float32)
                found[n] = short(n, zeros).expand(examples, -1)
        return torch.cat([found[n] for n in range(len(self.layout.sizes))], 1)


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


def reseed(seed: int) -> None:
    """Seed the generators that are in use; `torch.manual_seed` leaves a note for every other backend too."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
