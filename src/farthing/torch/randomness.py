"""Dropout and augmentation draw from torch's generators: here they do so in private.

What a model or a transform draws for one example depends on how many examples came before it in its lot. As
long as nobody knows the generator's state these are fresh, independent draws for every example, and whether
one more example is there changes nothing for the others. So every sum runs on a seed from the operating
system, and the state that the caller sees afterwards is the one before: it does not tell how large lots were.

For the same reason a transform that draws elsewhere (from Python's or numpy's generator) is refused, and one
that mixes examples as well: it would move other examples' gradients with the one that comes or goes.
"""

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from farthing.errors import Unsupported
from farthing.failsafe import zero_sum
from farthing.query import Contribution
from farthing.torch.layers import leaves
from farthing.torch.probe import Source
from farthing.torch.vmapped import mapped

_EXAMPLES, _SEEDS = 4, 8


@dataclass(frozen=True, slots=True, eq=False)
class OwnRandomness:
    """A contribution computed on torch generators of its own."""

    contribution: Contribution
    device: torch.device

    def bounded_sum(self, records: Any, w: Any, bound: Any) -> Any:
        """The contribution's sum; torch's generators are afterwards as they were."""
        with apart(self.device):
            return self.contribution.bounded_sum(records, w, bound)

    @property
    def honours(self) -> Collection[str]:
        """What the contribution honours."""
        return self.contribution.honours

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The contribution's."""
        return self.contribution.shape

    def zero(self, records: Any, w: Any, bound: Any) -> Any:
        """The contribution's sum over nobody."""
        return zero_sum(self.contribution, records, w, bound)


@contextmanager
def apart(device: torch.device, seed: int | None = None) -> Iterator[None]:
    """Torch's generators, of the CPU and of ``device``, newly seeded, and afterwards as they were.

    ``seed`` is for checks on made-up examples.

    Generator by generator: `torch.manual_seed` also leaves a note for every backend that is not in use.
    """
    generators = [torch.default_generator]
    if device.type == "cuda":
        place = device.index if device.index is not None else torch.cuda.current_device()
        generators.append(torch.cuda.default_generators[place])
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            secret = int.from_bytes(os.urandom(8), "little", signed=True)
            generator.manual_seed(secret if seed is None else seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def one_by_one(augment: Callable[[Any], Any], inputs: Any, device: torch.device) -> None:
    """Refuses a transform that mixes examples, or whose random numbers are not torch's.

    On made-up inputs of the same shapes: one of four is exchanged, and the other three must stay as they are.
    """
    source = Source(inputs, inputs)
    batch, other = source.batch(_EXAMPLES)[0], source.batch(_EXAMPLES, seed=1)[0]
    swapped = _with_first(other, batch)

    def seen(value: Any, seed: int) -> list[torch.Tensor]:
        with apart(device, seed):
            return leaves((augment(mapped(value, torch.clone)),))

    for seed in range(_SEEDS):
        views, again, exchanged = seen(batch, seed), seen(batch, seed), seen(swapped, seed)
        if any(len(view) != _EXAMPLES for view in views):
            raise Unsupported("augment must return a batch of as many examples as it was given")
        if not all(map(torch.equal, views, again)):
            raise Unsupported(
                "augment must draw from torch's generators only, so that its numbers stay secret"
            )
        if not all(torch.equal(a[1:], b[1:]) for a, b in zip(views, exchanged, strict=True)):
            raise Unsupported("augment mixes examples: it must make a view of each one from that one alone")


def _with_first(other: Any, value: Any) -> Any:
    """``value`` with the first example of ``other``."""
    if isinstance(value, list | tuple):
        return tuple(map(_with_first, other, value))
    return torch.cat([other[:1], value[1:]])
