"""Represent gradients that kernels on a GPU make in registers: those of convolutions and linear layers.

Rows are kept if they take no more memory than their factors. Otherwise they are made twice, once to be
measured and once to be added, by the same machine code (`farthing.torch.kernels.gradient_tiles`).
"""

import math
from typing import Any, Self

import torch
from torch import Tensor

from farthing.torch.gradients.terms import Route, Term, norms
from farthing.torch.kernels import totals
from farthing.torch.kernels.positions import blanked, where


class Tiles(Term):
    """Σ over positions of δ ⊗ window, of tensors (examples, records, sites, channels)."""

    good: Tensor | None = None  # examples that are finite, where not all of them are

    def __init__(self, layer: Any, delta: Any, x: Any) -> None:
        self.layer, self.delta, self.x = layer, delta, x
        self.device, self.examples, self.size = delta.whole.device, len(delta.whole), layer.size
        self.positions = math.prod(delta.whole.shape[1:3])

    @classmethod
    def convolution(cls, module: Any, delta: Tensor, x: Tensor, examples: int, padded: bool) -> Self:
        """Return the gradients of a convolution, from its output's gradient and its input, perhaps padded."""
        from farthing.torch.kernels import gradient_tiles, layer_sums

        shape = layer_sums.ConvolutionShape(module, padded)
        sides = tuple(x.shape[2:]), tuple(delta.shape[2:])
        layer = gradient_tiles.TileGeometry.convolution(shape, *sides)
        last = gradient_tiles.Halves.channels_last
        return cls(layer, last(delta, examples), last(x, examples))

    @classmethod
    def linear(cls, u: Tensor, v: Tensor) -> Self:
        """Return Σ_t u_t ⊗ v_t, for u (examples, positions, p) and v (examples, positions, q)."""
        from farthing.torch.kernels import gradient_tiles

        layer = gradient_tiles.TileGeometry.linear(u.shape[2], v.shape[2], u.shape[1])
        sides = (gradient_tiles.Halves.of(side, (len(side), 1, *side.shape[1:])) for side in (u, v))
        return cls(layer, *sides)

    def routes(self) -> tuple[Route, ...]:
        return (Route.ROWS if self.keeps else Route.AGAIN,)

    def made_of(self) -> int:
        return int(self.delta.nbytes + self.x.nbytes)

    def worth(self, examples: float) -> float:
        return self.made_of() / self.examples

    def norms(self) -> Tensor:
        from farthing.torch.kernels import gradient_tiles

        self.kept = self.room() if self.route is Route.ROWS else None
        found: Tensor = gradient_tiles.measured(self.delta, self.x, self.layer, self.kept)
        if self.kept is not None:
            self.release()
        return found

    def rows(self, part: slice) -> Tensor:
        from farthing.torch.kernels import gradient_tiles

        delta, x, taps = self.delta.some(part), self.x.some(part), self.layer.columns // self.layer.channels
        made = torch.empty(len(delta.whole), self.size, device=self.device, dtype=torch.float32)
        gradient_tiles.measured(delta, x, self.layer, made)
        if self.good is not None:
            made = where(self.good[part], made)
        return made.view(len(made), -1, taps, self.layer.channels).transpose(2, 3).flatten(1)

    def add(self, factors: Tensor, out: Tensor) -> None:
        if self.kept is None:
            self.product(factors, out)
            return
        from farthing.torch.kernels import gradient_tiles

        gradient_tiles.add_ordered(totals.weighted(self.kept, factors)[None], self.layer, out)

    def product(self, factors: Tensor, out: Tensor) -> None:
        """Add Σ factor · gradient to ``out``: an example whose factor is 0 may hold anything."""
        from farthing.torch.kernels import gradient_tiles

        most = totals.chain(self.examples)
        gradient_tiles.add_sum(self.delta, self.x, self.layer, factors, most, out)

    def largest(self) -> Tensor:
        taps = self.layer.columns // self.layer.channels
        return norms(self.delta.whole) * norms(self.x.whole) * (1.01 * math.sqrt(taps))

    def only(self, good: Tensor) -> None:
        self.good = good
        if self.kept is not None:
            self.kept = blanked(good, self.kept)

    def release(self) -> None:
        self.delta, self.x = self.delta.emptied(), self.x.emptied()  # a slice would hold all of it
