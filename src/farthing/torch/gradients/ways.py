"""The ways in which terms come by their norms, the fastest when first seen, and the memory that they use.

What is chosen follows from shapes, from time and from settings, never from a record: on a CPU the ways of a
term are timed on some examples of the first batch, and all give the same sums, to rounding.
"""

from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from farthing.torch.gradients.convolution import Windows
from farthing.torch.gradients.terms import Route, RowTerms, Term, fastest


class Memory(StrEnum):
    """What a GPU's memory is given for."""

    BALANCED = "balanced"
    SPEED = "speed"
    SPACE = "space"


class Ways:
    """The way of each parameter's term, and the memory in which its rows are kept from step to step."""

    def __init__(self, memory: Memory, route: Route | None) -> None:
        self._memory, self._route = memory, route
        self.routes: dict[Any, Route] = {}
        self._spaces: dict[int, Tensor] = {}

    def prepare(self, slot: int, term: Term, scaled: bool = False) -> None:
        """Give a term its way and its memory; norms of ``scaled`` gradients have one way only."""
        term.lavish = self._lavish(term)
        term.route = term.routes()[0] if scaled else self._routed(slot, term)
        term.space = self._space(slot, term)

    def _lavish(self, term: Term) -> bool:
        """Return whether a term's rows may take more memory than what they are made of."""
        if term.device.type != "cuda" or self._memory is Memory.SPEED:
            return True
        return self._memory is Memory.BALANCED and isinstance(term, Windows)

    def _space(self, slot: int, term: Term) -> Tensor | None:
        """Memory for the rows that a term keeps, the same in every step: on a CPU new memory is slow."""
        if term.device.type != "cpu" or term.route is not Route.ROWS or isinstance(term, RowTerms):
            return None
        needed = term.examples * term.size
        if slot not in self._spaces or self._spaces[slot].numel() < needed:
            self._spaces[slot] = torch.empty(needed + needed // 8, dtype=torch.float32)
        return self._spaces[slot]

    def _routed(self, slot: int, term: Term) -> Route:
        """Return the way to a term's norm: fixed, or the fastest when first seen."""
        if self._route is None and isinstance(term, Windows) and term.recomputes():
            return Route.AGAIN
        options = term.routes()
        if len(options) == 1:
            return options[0]
        if self._route is not None:
            return self._route if self._route in options else options[0]
        key = slot, options
        if key not in self.routes:
            self.routes[key] = fastest(term, options)
        return self.routes[key]
