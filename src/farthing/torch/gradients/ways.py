"""Choose how terms compute their norms, and what they keep, so that a step stays within its memory.

The choice depends on shapes and settings, never on a record: rows that take no more memory than their factors
are kept, and on a CPU all else follows from the numbers of products that each way takes. On a GPU, ways that
take the same memory are timed on the first batch. All ways give the same sums, up to rounding.
"""

import math
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from farthing.torch.gradients.allowance import KeptRows
from farthing.torch.gradients.convolution import Windows
from farthing.torch.gradients.joint_terms import Blocks
from farthing.torch.gradients.terms import Route, RowTerms, Term

_NAP = 2_000_000  # cycles, about a millisecond: a GPU waits while what is to be timed is launched


class Memory(StrEnum):
    """The purpose for which memory is used."""

    BALANCED = "balanced"
    SPEED = "speed"
    SPACE = "space"


class Ways:
    """The way of each parameter's term, and the memory in which its rows are kept from step to step."""

    def __init__(self, memory: Memory, route: Route | None) -> None:
        self._memory, self._route = memory, route
        self.allowance = KeptRows()
        self.routes: dict[Any, Route] = {}
        self._spaces: dict[Any, Tensor] = {}

    def prepare(self, slot: Any, term: Term, scaled: bool = False) -> None:
        """Give a term its way and its memory; norms of ``scaled`` gradients have one way only."""
        if isinstance(term, Blocks):
            for n, part in enumerate(term.terms):
                self.prepare((slot, n), part, scaled)
            return
        term.keeps = self._keeps(slot, term)
        term.route = term.routes()[0] if scaled else self._routed(slot, term)
        term.space = self._space(slot, term)

    def _keeps(self, slot: Any, term: Term) -> bool:
        """Return whether a term's rows may be kept."""
        if term.bytes <= term.made_of():
            return True
        if self._memory is Memory.SPEED:
            return term.bytes <= term.worth(term.examples) * term.examples
        return slot in self.allowance.kept

    def _space(self, slot: Any, term: Term) -> Tensor | None:
        """Return memory for the rows of a term, the same in every step, as new memory on a CPU is slow."""
        if self._memory is not Memory.SPEED or term.device.type != "cpu" or isinstance(term, RowTerms):
            return None
        if term.route is not Route.ROWS:
            return None
        needed = term.examples * term.size
        if slot not in self._spaces or self._spaces[slot].numel() < needed:
            self._spaces[slot] = torch.empty(needed + needed // 8, dtype=torch.float32)
        return self._spaces[slot]

    def _routed(self, slot: Any, term: Term) -> Route:
        """Return the way to a term's norm: the one asked for, one by shapes, or a GPU's fastest at first."""
        options = term.routes()
        if self._route is not None:
            return self._route if self._route in options else options[0]
        if isinstance(term, Windows) and term.recomputes():
            return Route.AGAIN
        if len(options) == 1 or term.bytes <= term.made_of():
            return options[0]
        if term.device.type == "cpu":
            return options[term.quicker()]
        key = slot, options
        if key not in self.routes:
            self.routes[key] = fastest(term, options)
        return self.routes[key]


def fastest(term: Term, options: tuple[Route, ...]) -> Route:
    """Return the first option, unless another clearly takes less of a GPU's time; thrice each, by turns."""
    best = dict.fromkeys(options, math.inf)
    for _ in range(3):
        for option in options:
            best[option] = min(best[option], _seconds(term, option))
    others = [option for option in options if best[option] < 0.9 * best[options[0]]]
    return min(others, key=best.__getitem__, default=options[0])


def _seconds(term: Term, route: Route) -> float:
    """Return how long a term takes by a route, without launches."""
    again = term.fresh()
    again.route = route
    out = torch.zeros(term.size, device=term.device, dtype=torch.float32)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_NAP)
    first.record()
    again.add(again.norms(), out)
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last))
