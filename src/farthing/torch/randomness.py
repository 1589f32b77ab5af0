"""Dropout and augmentation draw from torch's generators: here they do so in private.

What a model or a transform draws for one example depends on how many examples came before it in its lot. As
long as nobody knows the generator's state these are fresh, independent draws for every example, and whether
one more example is there changes nothing for the others. So every sum runs on a seed from the operating
system, and the state that the caller sees afterwards is the one before: it does not tell how large lots were.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from farthing.query import Contribution


@dataclass(frozen=True, slots=True, eq=False)
class OwnRandomness:
    """A contribution computed on torch generators of its own."""

    contribution: Contribution
    device: torch.device

    def bounded_sum(self, records: Any, w: Any, bound: Any) -> Any:
        """The contribution's sum; torch's generators are afterwards as they were."""
        with apart(self.device):
            return self.contribution.bounded_sum(records, w, bound)


@contextmanager
def apart(device: torch.device) -> Iterator[None]:
    """Torch's generators, of the CPU and of ``device``, newly seeded, and afterwards as they were.

    Generator by generator: `torch.manual_seed` also leaves a note for every backend that is not in use.
    """
    generators = [torch.default_generator]
    if device.type == "cuda":
        place = device.index if device.index is not None else torch.cuda.current_device()
        generators.append(torch.cuda.default_generators[place])
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(int.from_bytes(os.urandom(8), "little", signed=True))
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
