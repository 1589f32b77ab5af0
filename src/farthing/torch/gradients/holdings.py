"""Measure the memory that a forward pass holds: inputs and outputs of layers, and what autograd saves."""

import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor


class HeldBytes(NamedTuple):
    """What a use of a layer takes and gives, what it holds first, in bytes, and in how many steps it runs.

    ``again`` is what the part with a checkpoint that it is in has made before and by it, when that is
    computed again.
    """

    size: int
    own: int
    steps: int = 1
    again: int = 0


class _Noted(NamedTuple):
    """A use: its steps, the memory that it takes and gives, how much that is, and its part."""

    steps: int
    memory: list[weakref.ref[Any]]
    size: int
    made: int
    part: int | None


class Holdings:
    """The memory of tensors that were seen in a forward pass, use by use, without keeping any alive.

    >>> import torch
    >>> holdings, kept = Holdings(), torch.zeros(10)
    >>> holdings.note(torch.zeros(5), kept), holdings.note(kept)
    (0, 1)
    >>> holdings.held([])
    [HeldBytes(size=40, own=40, steps=1, again=0), HeldBytes(size=40, own=0, steps=1, again=0)]
    """

    def __init__(self) -> None:
        self._uses: list[_Noted] = []
        self._saved: dict[int, list[weakref.ref[Any]]] = defaultdict(list)  # by autograd, before this use

    def note(self, out: Tensor, *others: Tensor, steps: int = 1, part: int | None = None) -> int:
        """Note what a use of a layer gives and takes, in so many steps; return its number.

        ``part``: the part with a checkpoint that it is in.
        """
        tensors = out, *others
        memory = [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
        self._uses.append(_Noted(steps, memory, sum(tensor.nbytes for tensor in tensors), out.nbytes, part))
        return len(self._uses) - 1

    def save(self, tensor: Tensor) -> Tensor:
        """Note what autograd saves, and return it."""
        self._saved[len(self._uses)].append(weakref.ref(tensor.untyped_storage()))
        return tensor

    def held(self, without: Iterable[Tensor]) -> list[HeldBytes]:
        """Return what every use holds that is there still, ``without`` weights, say."""
        seen = {id(tensor.untyped_storage()) for tensor in without}
        found, last, again = list[HeldBytes](), len(self._uses) - 1, 0
        for number, use in enumerate(self._uses):
            mine, saved = _alive(use.memory), _alive(self._saved[number])
            if number == last:
                saved |= _alive(self._saved[number + 1])
            own = sum(size for key, size in (mine | saved).items() if key not in seen)
            if use.part is None:
                found.append(HeldBytes(sum(mine.values()), own, use.steps))
            else:
                same = number > 0 and self._uses[number - 1].part == use.part
                again = use.made + (again if same else 0)
                found.append(HeldBytes(use.size, own, use.steps, again))
            seen.update(mine, saved)
        return found


def _alive(memory: list[weakref.ref[Any]]) -> dict[int, int]:
    """Return the bytes of what is there still, by identity."""
    return {id(storage): storage.nbytes() for storage in (ref() for ref in memory) if storage is not None}
