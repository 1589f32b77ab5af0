"""Represent per-example gradients that are sums of outer products: of matrices, and of tables of rows."""

import math
from collections.abc import Hashable
from typing import Self

import torch
from torch import Tensor

from farthing.torch.gradients.terms import (
    TENSOR_ROUNDED,
    Factor,
    Route,
    Term,
    contracted,
    part_of,
    rounded_up,
    weighted,
    widely,
)
from farthing.torch.gradients.tiles import Tiles
from farthing.torch.kernels import blocks, totals
from farthing.torch.kernels import positions as compiled
from farthing.torch.kernels.clamping import clamped_sum
from farthing.torch.kernels.positions import blanked, fused, scaled_squares, where
from farthing.torch.kernels.totals import add_product, coarse

_KEPT, _TWICE = 0.25, 0.6  # products of Gram matrices, of those of rows that are kept, or made and multiplied


class Outer(Term):
    """Σ_t u_t ⊗ v_t, for u (examples, positions, p) and v (examples, positions, q): a (p, q) matrix."""

    tiles: Term | None = None  # what makes rows twice in registers, on a GPU

    def __init__(self, u: Factor, v: Factor) -> None:
        self.examples, self.positions, self.height = u.values.shape
        if u.values.dtype is not v.values.dtype or self.positions == 1:
            u, v = u.wide(), v.wide()
        self.u, self.v, self.device, self.turned = u, v, u.values.device, False
        self.found: Tensor | None = None  # norms, to tell which examples' positions cancel
        self.width = v.values.shape[2]
        self.size = self.height * self.width

    def alike(self) -> Hashable:
        return Outer

    @staticmethod
    def joined(terms: list["Outer"]) -> "Outer":
        u = torch.cat([term.u.values for term in terms], 1)
        return Outer(Factor(u), Factor(torch.cat([term.v.values for term in terms], 1)))

    def fresh(self, count: int | None = None) -> Self:
        some = super().fresh(count)
        some.u, some.v = Factor(self.u.values[:count]), Factor(self.v.values[:count])
        return some

    def routes(self) -> tuple[Route, ...]:
        if self.positions == 1:
            return (Route.GRAM,)
        rows = Route.ROWS if self.keeps else Route.AGAIN
        if self.positions**2 > 4 * self.size:
            return (rows,)
        return rows, Route.GRAM

    def quicker(self) -> int:
        share = _KEPT if self.keeps else _TWICE
        return int(self.positions * (self.height + self.width) <= share * self.size)

    def made_of(self) -> int:
        return self.u.values.nbytes + self.v.values.nbytes

    def factors(self) -> tuple[Tensor, ...]:
        return (self.v.values,)

    def worth(self, examples: float) -> float:
        made = self.made_of() / self.examples
        return made if self.device.type == "cuda" else max(2 * made, 4 * part_of(self.device) / examples)

    def rows(self, part: slice) -> Tensor:
        u, v = self.u.values[part], self.v.values[part]
        if self.positions == 1:
            return (u.transpose(1, 2) * v).flatten(1)
        return widely(u.transpose(1, 2), v).flatten(1)

    def rows_into(self, part: slice, out: Tensor) -> None:
        u, v = self.u.values[part], self.v.values[part]
        found = out.view(-1, self.height, self.width)
        if u.dtype is torch.float32:
            torch.bmm(u.transpose(1, 2), v, out=found)
        else:
            found.copy_(widely(u.transpose(1, 2), v))

    def norms(self) -> Tensor:
        if self.positions == 1:
            found = self.u.norms * self.v.norms
            return found * (1 + TENSOR_ROUNDED) if coarse(self.device) else found
        if self.route is Route.AGAIN and not self.rounds() and fused(self.device):
            return self._tiled()
        by_kernel = compiled.available(self.device, outer=True) and self.u.values.dtype is torch.float32
        if self.route is Route.ROWS:
            return self._compiled() if by_kernel else super().norms()
        if self.route is Route.GRAM:
            self.found = self.gram_norms()
        elif by_kernel:
            self.found = rounded_up(self._measured(None), self)
        else:
            self.found = super().norms()
        return self.found + self.rounding() if self.route is Route.AGAIN and self.rounds() else self.found

    def rounds(self) -> bool:
        """Return whether the weighted sum is a product of few bits: of TF32, or of bfloat16 factors."""
        return coarse(self.device) or self.u.values.dtype is not torch.float32

    def rounding(self) -> Tensor:
        """Return how far the sum of a coarse product may be from these gradients."""
        u, v = (
            torch.linalg.vector_norm(side.values, dim=2, dtype=torch.float32) for side in (self.u, self.v)
        )
        found: Tensor = (u * v).sum(1) * TENSOR_ROUNDED
        return found

    def _tiled(self) -> Tensor:
        """Return norms of rows that are made in registers, and again for the sum."""
        self.tiles = Tiles.linear(self.u.values, self.v.values)
        self.tiles.route = Route.AGAIN
        self.release()
        return self.tiles.norms()

    def _compiled(self) -> Tensor:
        """Make rows and norms by the kernel in C; a row may be (q, p), as a wide second factor is faster."""
        self.kept, self.turned = self.room(), self.height > self.width
        found = self._measured(self.kept)
        self.release()
        return found

    def _measured(self, rows: Tensor | None) -> Tensor:
        """Return norms, and write ``rows`` if asked to."""
        u, v = self.u.values, self.v.values
        return compiled.outers(v, u, rows) if self.height > self.width else compiled.outers(u, v, rows)

    def add(self, factors: Tensor, out: Tensor) -> None:
        if self.tiles is not None:
            self.tiles.add(factors, out)
            return
        if self.kept is None or not self.turned:
            super().add(factors, out)
            return
        found = totals.weighted(self.kept, factors).view(self.width, self.height)
        out.view(self.height, self.width).add_(found.t())

    def add_clamped(self, limit: Tensor, out: Tensor) -> None:
        shape = self.height, self.width
        clamped_sum(self.u.values, self.v.values, limit.view(shape), out.view(shape))

    def largest(self) -> Tensor:
        return self.u.norms * self.v.norms

    def gram_norms(self) -> Tensor:
        if fused(self.device, self.positions):
            from farthing.torch.kernels import grams

            found_: Tensor = grams.norms(self.u.values, self.v.values, coarse=coarse(self.device))
            return found_
        step = max(1, 4 * part_of(self.device) // self.positions**2)
        found = []
        for start in range(0, self.examples, step):
            u, v = self.u.values[start : start + step], self.v.values[start : start + step]
            found.append(contracted(torch.bmm(u, u.transpose(1, 2)), torch.bmm(v, v.transpose(1, 2))))
        return found[0] if len(found) == 1 else torch.cat(found)

    def scaled_norms(self, inverse: Tensor) -> Tensor:
        if self.positions > 1:
            return self._keep(inverse) if self.route is Route.ROWS else super().scaled_norms(inverse)
        inverse = inverse.square().view(self.height, self.width)
        return scaled_squares(self.u.values.squeeze(1), self.v.values.squeeze(1), inverse).sqrt()

    def product(self, factors: Tensor, out: Tensor, some: slice = slice(None)) -> None:
        """Add Σ factor · gradient to ``out``: all of the matrix, or ``some`` rows of it."""
        u, v = self.u.values[..., some], self.v.values
        if u.shape[2] <= self.width:
            u = weighted(u, factors)
        else:
            v = weighted(v, factors)
        if self.positions == 1:
            u, v = u.squeeze(1), v.squeeze(1)
        else:
            u, v = u.flatten(0, 1), v.flatten(0, 1)
        add_product(u, v, out.view(-1, self.width), examples=self.examples, wide=self._cancels())

    def _cancels(self) -> Tensor | None:
        """Return which examples' positions cancel so much that blocks of them, on a CPU, are in float64."""
        if self.found is None or self.device.type != "cpu":
            return None
        return ~(self.largest() <= self.found * blocks.cancelling(self.positions))

    def only(self, good: Tensor) -> None:
        if self.tiles is not None:
            self.tiles.own = self.own
            self.tiles.only(good)
            return
        if self.kept is not None:
            self.kept = blanked(good, self.kept)
            return
        clear = blanked if self.own else where
        self.u, self.v = Factor(clear(good, self.u.values)), Factor(clear(good, self.v.values))

    def release(self) -> None:
        empty = Factor(self.u.values.new_zeros(self.examples, 0, 0))
        self.u = self.v = empty


class Lookup(Term):
    """Σ_t e(ids_t) ⊗ v_t: rows of an embedding with ``height`` of them."""

    def __init__(self, ids: Tensor, v: Factor, height: int) -> None:
        self.ids, self.v, self.height, self.device = ids, v, height, ids.device
        self.examples, self.positions, self.width = v.values.shape
        self.size = height * self.width

    def alike(self) -> Hashable:
        return Lookup

    @staticmethod
    def joined(terms: list["Lookup"]) -> "Lookup":
        values = torch.cat([term.v.values for term in terms], 1)
        return Lookup(torch.cat([term.ids for term in terms], 1), Factor(values), terms[0].height)

    def rows(self, part: slice) -> Tensor:
        ids, v = self.ids[part], self.v.values[part].float()
        places = ids + torch.arange(len(ids), device=ids.device)[:, None] * self.height
        table = v.new_zeros(len(ids) * self.height, self.width)
        return table.index_add_(0, places.flatten(), v.flatten(0, 1)).view(len(ids), -1)

    def norms(self) -> Tensor:
        if self.positions == 1:
            return self.v.norms
        if fused(self.device, self.positions):
            from farthing.torch.kernels import grams

            found_: Tensor = grams.norms(self.ids, self.v.values, coarse=coarse(self.device))
            return found_
        if compiled.available(self.device):
            return compiled.lookup_norms(self.ids, self.v.values.float())
        step = max(1, 4 * part_of(self.device) // self.positions**2)
        found = []
        for start in range(0, self.examples, step):
            ids, v = self.ids[start : start + step], self.v.values[start : start + step]
            same = (ids[:, :, None] == ids[:, None, :]).float()
            v = v.float()
            found.append(contracted(same, torch.bmm(v, v.transpose(1, 2))))
        return torch.cat(found)

    def largest(self) -> Tensor:
        return self.v.norms * math.sqrt(self.positions)

    def product(self, factors: Tensor, out: Tensor, some: slice = slice(None)) -> None:
        """Add Σ factor · gradient to ``out``: all of the table, or ``some`` rows of it."""
        values, each = self.v.values.flatten(0, 1), factors[:, None].expand(-1, self.positions).flatten()
        ids = self.ids.flatten() - (some.start or 0)
        totals.add_rows(ids, values, out.view(-1, self.width), each)

    def only(self, good: Tensor) -> None:
        self.v = Factor((blanked if self.own else where)(good, self.v.values))

    def release(self) -> None:
        """Do nothing, because rows of an embedding are never kept."""
