"""Measure the memory that a forward pass holds: inputs and outputs of layers, and what autograd saves."""

import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor


class HeldBytes(NamedTuple):
    """What a use of a layer takes and gives, what it holds first, in bytes, and in how many steps it runs."""

    size: int
    own: int
    steps: int = 1


class Holdings:
    """The memory of tensors that were seen in a forward pass, use by use, without keeping any alive.

    >>> import torch
    >>> holdings, kept = Holdings(), torch.zeros(10)
    >>> holdings.note(torch.zeros(5), kept), holdings.note(kept)
    (0, 1)
    >>> holdings.held([])
    [HeldBytes(size=40, own=40, steps=1), HeldBytes(size=40, own=0, steps=1)]
    """

    def __init__(self) -> None:
        self._uses: list[tuple[int, list[weakref.ref[Any]]]] = []
        self._saved: dict[int, list[weakref.ref[Any]]] = defaultdict(list)  # by autograd, before this use

    def note(self, *tensors: Tensor, steps: int = 1) -> int:
        """Note what a use of a layer takes and gives, in so many steps; return its number."""
        self._uses.append((steps, [weakref.ref(tensor.untyped_storage()) for tensor in tensors]))
        return len(self._uses) - 1

    def save(self, tensor: Tensor) -> Tensor:
        """Note what autograd saves, and return it."""
        self._saved[len(self._uses)].append(weakref.ref(tensor.untyped_storage()))
        return tensor

    def held(self, without: Iterable[Tensor]) -> list[HeldBytes]:
        """Return what every use holds that is there still, ``without`` weights, say."""
        seen = {id(tensor.untyped_storage()) for tensor in without}
        found, last = list[HeldBytes](), len(self._uses) - 1
        for number, (steps, use) in enumerate(self._uses):
            mine, saved = _alive(use), _alive(self._saved[number])
            if number == last:
                saved |= _alive(self._saved[number + 1])
            own = sum(size for key, size in (mine | saved).items() if key not in seen)
            found.append(HeldBytes(sum(mine.values()), own, steps))
            seen.update(mine, saved)
        return found


def _alive(memory: list[weakref.ref[Any]]) -> dict[int, int]:
    """Return the bytes of what is there still, by identity."""
    return {id(storage): storage.nbytes() for storage in (ref() for ref in memory) if storage is not None}
