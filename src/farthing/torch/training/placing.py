"""Build batches of one public shape, in which padding rows have weight 0.

A `PlacedBatch` puts every example at a secret place in a batch of one public shape, so that nobody's last
bits depend on who else is there; other places are blank, of weight 0. The theorem is in
`farthing.data.weighted`; here a record's term is the clipped gradient of an example.

>>> batch = Examples((torch.ones(3, 2), torch.zeros(3))).take(slice(None))
>>> parts = list(PlacedBatch(batch, 8).physical_batches())
>>> {len(inputs) for inputs, _, _ in parts}, float(sum(weights.sum() for _, _, weights in parts))
({8}, 3.0)

A `PaddedBatch` fills a batch up to its largest size (`farthing.TruncatedPoisson`): physical batches have the
same shape in every step, as compiled code wants them.

>>> padded = PaddedExamples(Examples((torch.ones(3, 2), torch.zeros(3))), 8)
>>> [weights.tolist() for _, _, weights in padded.take(slice(None)).physical_batches(4)]
[[1.0, 1.0, 1.0, 0.0]]
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from farthing.budget import Unit
from farthing.data.weighted import rounds
from farthing.queries.samplers import Indices
from farthing.torch.training.records import Batch, Examples, Integers, PhysicalBatch


class PlacedBatch:
    """A batch that is read in physical batches of ``places`` examples, present or blank."""

    def __init__(self, batch: Batch, places: int) -> None:
        self._examples, self._indices, self._places = batch.examples, batch.indices, places
        # a record of a dataset that cannot be read leaves no gap: such are read one by one
        self._together = self._examples.tensors is not None or self._examples.unit is not Unit.RECORD

    def __len__(self) -> int:
        return len(self._indices)

    def made_up(self) -> PhysicalBatch:
        """Return what there is of one example, made up."""
        return self._examples.made_up_batch()

    def physical_batches(self, physical_batch_size: int | None = None) -> Iterator[PhysicalBatch]:
        """Yield parts of one shape, whatever size is asked for."""
        at = drawn_places(len(self), self._places)
        for members in rounds(at):
            found = self._block(self._indices[members], torch.from_numpy(at[members]), self._places)
            if found is not None:
                yield found

    def _block(self, members: Integers, at: Tensor, places: int) -> PhysicalBatch | None:
        """Return examples at their places, of so many; None where none of them can be read."""
        found = None
        pieces = [(members, at)] if self._together else zip(members[:, None], at[:, None], strict=True)
        for part, where in pieces:
            read = self._examples.batch(part)
            if read is not None:
                inputs, targets, weights = read
                weights = torch.ones(len(where), dtype=torch.float32) if weights is None else weights
                found = _put(found, (inputs, targets, weights), where, places)
        return found


class PaddedExamples:
    """Examples whose batches are filled up to ``places``."""

    def __init__(self, examples: Examples, places: int) -> None:
        self._examples, self._places = examples, places

    def __len__(self) -> int:
        return len(self._examples)

    def take(self, indices: Indices) -> "PaddedBatch":
        """Return the batch at ``indices``; nothing is read yet."""
        return PaddedBatch(self._examples.take(indices), self._places)


class PaddedBatch(PlacedBatch):
    """A batch that is read in physical batches of one size each, filled up with rows of weight 0."""

    def __init__(self, batch: Batch, places: int) -> None:
        super().__init__(batch, places)
        self._batch = batch

    @property
    def indices(self) -> Integers:
        """Which examples are in it."""
        return self._indices

    @property
    def largest(self) -> int:
        """How many there may be, a public number."""
        return self._places

    def part(self, place: int, of: int) -> "PaddedBatch":
        """Return one of ``of`` parts of equal size, to within one."""
        return PaddedBatch(self._batch.part(place, of), -(-self._places // of))

    def physical_batches(self, physical_batch_size: int | None = None) -> Iterator[PhysicalBatch]:
        """Yield parts of one shape, of at most ``physical_batch_size`` rows, as many as anybody is in."""
        width, most = self._examples.width, self._places
        if physical_batch_size is not None:
            most = min(most, max(1, physical_batch_size // width))
        size = -(-self._places // -(-self._places // most))
        for first in range(0, len(self), size):
            members = self._indices[first : first + size]
            found = self._block(members, torch.arange(len(members)), size)
            if found is not None:
                yield found


def drawn_places(count: int, places: int) -> Integers:
    """Return a place for each example, from torch's generator, which is secret here (`randomness.apart`)."""
    return torch.randint(places, (count,)).numpy()


def _put(found: Any, value: Any, where: Tensor, places: int) -> Any:
    """Return tensors, or what they are put into, with the rows of ``value`` at their places."""
    if isinstance(value, tuple):
        parts = (None,) * len(value) if found is None else found
        return tuple(_put(old, new, where, places) for old, new in zip(parts, value, strict=True))
    rows = value.new_zeros((places, *value.shape[1:])) if found is None else found
    rows[where.to(value.device)] = value
    return rows
