"""Dropout and augmentation draw from torch's generators: here they do so in private.

What a model or a transform draws for one example depends on how many examples came before it in its lot. As
long as nobody knows the generator's state these are fresh, independent draws for every example, and whether
one more example is there changes nothing for the others. So every sum runs on a seed from the operating
system, and the state that the caller sees afterwards is the one before: it does not tell how large lots were.
"""

import os
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
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(int.from_bytes(os.urandom(8), "little", signed=True))
            return self.contribution.bounded_sum(records, w, bound)
