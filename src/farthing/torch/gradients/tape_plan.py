"""Plan how a model runs while a tape records it: which rule a module has, what stands for its parameters.

A plan is made before private examples reach the model, and tried on made-up ones. Where it does not give the
right gradients, some modules go another way (`TapePlan.otherwise`).
"""

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from farthing.torch.gradients.copies import Copies, Own, Past, Unmapped, alone, one_first
from farthing.torch.gradients.products import PRODUCTS

Use = tuple[int, int]  # a module's number, and the how-manieth call of it
Axes = tuple[tuple[int | None, ...], tuple[int | None, ...]]  # of inputs and outputs; None: no batch
Rule = Callable[..., Any]
_PRIMES = 3, 5, 7, 11, 13, 17, 19, 23, 29
_LARGE = 2**23  # trained weights


@dataclass
class TapePlan:
    """A plan of a model, made before private examples reach it: a rule a module, the batch axis of each use.

    Axes are found by `probe` on made-up batches of two sizes: the axis that grew is the batch's. A use whose
    input does not grow (positions of tokens, say) belongs to every example alike.
    """

    model: nn.Module
    rules: dict[nn.Module, Rule]
    spread: list[tuple[nn.Module, str]] = field(default_factory=list)
    axes: dict[Use, Axes] = field(default_factory=dict)
    lengths: dict[Use, tuple[int | None, ...]] = field(default_factory=dict)  # of inputs, for each record
    held: int = 0  # numbers that go into and come out of the uses, a record
    again: bool = True  # whether parts with a checkpoint are computed again in the backward pass
    checkpoints: int = 0  # parts that were
    mixed: bool = True  # whether modules without a rule run in mixed precision where the others do
    free: Collection[nn.Module] = ()  # whose parameters are followed wherever they go
    settled: dict[Any, bool] = field(default_factory=dict)  # whether something grows with the records
    checking: bool = True  # whether passes are on made-up examples, by which that is settled
    helpers: dict[Any, nn.Module] = field(default_factory=dict)  # modules of rules, not of the model

    def __post_init__(self) -> None:
        self.numbers = {module: number for number, module in enumerate(self.rules)}
        self.names = {module: name or "the model" for name, module in self.model.named_modules()}
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.slots = {id(p): slot for slot, p in enumerate(self.trained)}
        spread = ((module, name) for module, name in self.spread if module not in self.free)
        self._first = {(module, name) for module, name in spread if one_first(module, name)}
        self.anchor = torch.zeros((), device=self.trained[0].device, requires_grad=True, dtype=torch.float32)

    @property
    def holders(self) -> set[nn.Module]:
        """Return the modules with parameters that `Copies` stand in for."""
        return {module for module, name in self.spread if (module, name) not in self._first}

    def telling(self, inputs: Any) -> int:
        """Return a size of a batch by which lengths tell what has rows for each record: a prime, of no side.

        2 where no copies ask for it; of a large model never many records, as they would take much memory.

        >>> TapePlan(nn.Linear(5, 9), {}).telling([torch.zeros(2, 7)])
        2
        >>> one = nn.Linear(5, 9)
        >>> TapePlan(one, {}, [(one, "weight")]).telling([torch.zeros(2, 7)])
        11
        """
        if not self.holders:
            return 2
        held = (*self.model.parameters(), *self.model.buffers(), *(x[0] for x in inputs))
        sides = {side for x in held for side in x.shape}
        primes = _PRIMES if sum(p.numel() for p in self.trained) <= _LARGE else _PRIMES[:2]
        return next((n for n in primes if all(side % n for side in sides)), primes[-1])

    @property
    def shared(self) -> set[nn.Module]:
        """Return the modules that are given what all examples share, such as places."""
        alike = {use[0] for use, (inner, _) in self.axes.items() if inner and set(inner) == {None}}
        return {module for module, number in self.numbers.items() if number in alike}

    def otherwise(self, error: Exception, whole: set[nn.Module], free: set[nn.Module]) -> bool:
        """Let some modules go another way, after an error; return whether there is one that was not tried."""
        left, before = self.holders - whole, (len(whole), len(free))
        if isinstance(error, Past) and error.module not in free | whole:
            free.add(error.module)
        elif isinstance(error, Unmapped):
            whole.add(error.module)
        elif more := self.shared - free or {module for module, _ in self._first}:
            free |= more
        else:
            whole |= set(filter(alone, left)) or left
        return before != (len(whole), len(free))

    @contextmanager
    def patched(self, tape: Any) -> Iterator[None]:
        """The rules in place of the modules' own forward; parameters that need no gradient."""
        if self.spread:
            tape.shared = _storages(self.model)
        before = {module: module.__dict__.get("forward") for module in self.rules}
        for module, rule in self.rules.items():
            module.__dict__["forward"] = _Forward(rule, tape, module, module.forward)
        for p in self.trained:
            p.requires_grad_(False)
        bare: list[tuple[nn.Module, str, Any]] = [
            (module, name, module._parameters.pop(name)) for module, name in self.spread
        ]
        own = {id(p): Own(tape, p, PRODUCTS) for _, _, p in bare}
        for module, name, p in bare:
            first = (module, name) in self._first
            module.__dict__[name] = (
                tape.copies(p, tuple(p.shape[1:])) if first else Copies(module, (own[id(p)],))
            )
        fast, before_it = torch.backends.mha.get_fastpath_enabled(), running()
        torch.backends.mha.set_fastpath_enabled(False)
        _running.tape = tape
        try:
            yield
        finally:
            _running.tape = before_it
            torch.backends.mha.set_fastpath_enabled(fast)
            for module, name, p in bare:
                del module.__dict__[name]
                module._parameters[name] = p
            for p in self.trained:
                p.requires_grad_(True)
            for module, forward in before.items():
                if forward is None:
                    del module.__dict__["forward"]
                else:
                    module.__dict__["forward"] = forward


class _Forward:
    """A module's forward while a tape runs."""

    __slots__ = ("args",)

    def __init__(self, rule: Rule, tape: Any, module: nn.Module, own: Callable[..., Any]) -> None:
        self.args = rule, tape, module, own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rule, tape, module, own = self.args
        tape.given = args, kwargs
        try:
            return rule(tape, module, own, *args, **kwargs)
        finally:
            tape.given = ()  # or all that it was made of would stay


_running = threading.local()  # the tape of this thread, if one runs


def running() -> Any:
    """Return the tape that runs in this thread."""
    return getattr(_running, "tape", None)


def _storages(model: nn.Module) -> frozenset[int]:
    """Return where parameters and buffers lie."""
    held = (*model.parameters(), *model.buffers())
    return frozenset(x.untyped_storage().data_ptr() for x in held if x.numel())
