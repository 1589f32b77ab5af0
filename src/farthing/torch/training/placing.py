"""Place examples in batches of one public shape, so that nobody's last bits depend on who else is there.

The theorem is in `farthing.data.placed`; here a record's term is the clipped gradient of an example. A
`PlacedBatch` puts every example at a secret place in a batch of so many places; other places are blank, of
weight 0.

>>> from farthing.torch.training.records import Examples
>>> batch = Examples((torch.ones(3, 2), torch.zeros(3))).take(slice(None))
>>> parts = list(PlacedBatch(batch, 8).physical_batches())
>>> {len(inputs) for inputs, _, _ in parts}, float(sum(weights.sum() for _, _, weights in parts))
({8}, 3.0)
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farthing.budget import Unit
from farthing.data.placed import rounds
from farthing.torch.training.records import Batch, PhysicalBatch

Integers = NDArray[np.int64]


class PlacedBatch:
    """A batch that is read in physical batches of ``places`` examples, present or blank."""

    def __init__(self, batch: Batch, places: int) -> None:
        self._examples, self._indices, self._places = batch.examples, batch.indices, places
        # a record of a dataset that cannot be read leaves no gap: such are read one by one
        self._together = self._examples.tensors is not None or self._examples.unit is not Unit.RECORD

    def __len__(self) -> int:
        return len(self._indices)

    def physical_batches(self, physical_batch_size: int | None = None) -> Iterator[PhysicalBatch]:
        """Yield parts of one shape, whatever size is asked for."""
        at = drawn_places(len(self), self._places)
        for members in rounds(at):
            found = self._block(self._indices[members], torch.from_numpy(at[members]))
            if found is not None:
                yield found

    def _block(self, members: Integers, at: Tensor) -> PhysicalBatch | None:
        """Return examples at their places; None where none of them can be read."""
        found = None
        pieces = [(members, at)] if self._together else zip(members[:, None], at[:, None], strict=True)
        for part, where in pieces:
            read = self._examples.batch(part)
            if read is not None:
                inputs, targets, weights = read
                weights = torch.ones(len(where)) if weights is None else weights
                found = _put(found, (inputs, targets, weights), where, self._places)
        return found


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
