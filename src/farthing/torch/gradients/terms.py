"""Represent per-example gradients of one parameter in factored form: norms and weighted sums only.

A layer's gradient is a sum over positions (tokens, pixels, uses of a tied weight) of outer products
u_t ⊗ v_t. Such a `Term` answers `norms`, the norm of every example's gradient, and `add`, the
weighted sum; `rows` makes the gradients themselves where nothing cheaper will do. The ways to the norm:

* one position: |u|² |v|²;
* rows: the gradients are made, measured, kept, and summed by one product with the weights;
* again: the same in parts that are dropped; the sum is then the layer's own product with weighted u. What
  rounding hid of rows whose positions cancel is in that sum, so norms are rounded up by it (`rounded_up`).
  Convolutions of few positions have a kernel that makes the very same rows twice instead, in registers;
* gram: Σ_ts (u_t · u_s)(v_t · v_s) (Goodfellow 2015; Li et al. 2022), for few positions and wide layers.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from enum import StrEnum
from typing import Self

import torch
from torch import Tensor

from farthing.torch.kernels import blocks, totals
from farthing.torch.kernels import positions as compiled
from farthing.torch.kernels.clamping import clamped_rows, clamped_sum
from farthing.torch.kernels.positions import blanked, fused, scaled_squares, where
from farthing.torch.kernels.totals import add_product, coarse

_PART = 2**20  # entries of the gradients made at once: they stay in the cache
_WIDE = 2**26  # on a GPU: few launches, and a quarter of a gigabyte
_ROUNDED = 2.0**-20  # rounding of a Gram sum, relative to the sum of absolute values
_TENSOR_ROUNDED = 2.0**-9  # of a product of two factors of ten bits, relative to the product of their norms
_ROW_ROUNDED = 2.0**-23  # of a row, for each position, relative to the sum of absolute values: twice 2⁻²⁴
_LOST = 1e-32  # what an inner product of up to 800,000 entries may lose where squares vanish
_SMALLEST = 1e-18  # squares of entries below may have lost digits: a norm is rounded up by as much


def part_of(device: torch.device) -> int:
    """Return how many entries of gradients are made at once."""
    return _WIDE if device.type == "cuda" else _PART


class Route(StrEnum):
    """How a term of several positions comes by its norms and its sum."""

    ROWS = "rows"
    AGAIN = "again"
    GRAM = "gram"


class Factor:
    """A tensor (examples, positions, width) whose norms and sums per example are computed once."""

    __slots__ = ("_norms", "_total", "values")

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self._norms: Tensor | None = None
        self._total: Factor | None = None

    def wide(self) -> "Factor":
        """Return the same in float32."""
        return self if self.values.dtype is torch.float32 else Factor(self.values.float())

    @property
    def norms(self) -> Tensor:
        """The norm of each example; rounded up by 1e-18, so that a product with a huge one cannot vanish."""
        if self._norms is None:
            self._norms = norms(self.values).add_(_SMALLEST)
        return self._norms


def norms(values: Tensor) -> Tensor:
    """Return the norm of each example, in float32."""
    flat = values.flatten(1) if values.ndim > 2 else values
    found: Tensor = torch.linalg.vector_norm(flat, dim=1, dtype=torch.float32)
    return found


def weighted(values: Tensor, factors: Tensor) -> Tensor:
    """Return each example times its factor."""
    if fused(values.device) and factors.dtype is torch.float32:
        from farthing.torch.kernels import grams

        found: Tensor = grams.weighted(values, factors)
        return found
    return values * factors.view(-1, *(1,) * (values.ndim - 1))


def widely(a: Tensor, b: Tensor) -> Tensor:
    """Return the products of two batches of matrices in float32; those of bfloat16 numbers are exact."""
    if a.dtype is torch.float32:
        return torch.bmm(a, b)
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.bmm(a.float(), b.float())


class Term(ABC):
    """The gradients of one parameter, one an example."""

    route = Route.ROWS
    own = False  # whether what a term holds is nobody else's
    keeps = True  # whether rows that are made may be kept
    kept: Tensor | None = None
    space: Tensor | None = None  # for the rows that are kept, so that memory is not asked for anew
    device: torch.device
    examples: int
    size: int
    positions = 1

    def fresh(self, count: int | None = None) -> Self:
        """Return a copy, or that of the first ``count`` examples, with nothing computed yet."""
        some = copy.copy(self)
        some.examples, some.space = len(range(self.examples)[:count]), None
        return some

    def routes(self) -> tuple[Route, ...]:
        """Return the ways worth measuring; one where there is no choice."""
        return (Route.ROWS,)

    def made_of(self) -> int:
        """Return the bytes of the factored form; 0 where there is none."""
        return 0

    def worth(self, examples: float) -> float:
        """Return up to how many bytes of a row keeping it is about the quickest, in a batch of so many."""
        return 4.0 * self.size

    @property
    def bytes(self) -> int:
        """Return the bytes of all rows."""
        return 4 * self.examples * self.size

    def parts(self) -> Iterator[slice]:
        """Examples whose gradients are made at once."""
        step = max(1, part_of(self.device) // max(1, self.size))
        return (slice(start, start + step) for start in range(0, self.examples, step))

    @abstractmethod
    def rows(self, part: slice) -> Tensor:
        """Return the gradients of some examples, flat, one a row, in float32."""

    @abstractmethod
    def product(self, factors: Tensor, out: Tensor) -> None:
        """out += Σ factor · gradient, from the factored form."""

    @abstractmethod
    def only(self, good: Tensor) -> None:
        """Zeros in place of the examples that are not good: 0 · NaN would be NaN."""

    @abstractmethod
    def release(self) -> None:
        """Lets go of the factored form: the rows are kept."""

    def norms(self) -> Tensor:
        """Return the norm of each example's gradient."""
        if self.route is Route.ROWS:
            return self._keep()
        return rounded_up(torch.cat([norms(self.rows(part)) for part in self.parts()]), self)

    def _keep(self, inverse: Tensor | None = None) -> Tensor:
        """The rows, made in parts that are measured, as they are or over a scale, while in the cache."""
        self.kept = self.room()
        found = []
        for part in self.parts():
            self.rows_into(part, self.kept[part])
            found.append(norms(self.kept[part] if inverse is None else self.kept[part] * inverse))
        self.release()
        return found[0] if len(found) == 1 else torch.cat(found)

    def room(self) -> Tensor:
        """Return memory for the rows of all examples."""
        if self.space is None:
            return torch.empty(self.examples, self.size, device=self.device, dtype=torch.float32)
        return self.space[: self.examples * self.size].view(self.examples, self.size)

    def rows_into(self, part: slice, out: Tensor) -> None:
        """The gradients of some examples, written where they are to be."""
        out.copy_(self.rows(part))

    def scaled_norms(self, inverse: Tensor) -> Tensor:
        """Return the norms of gradient / scale, where ``inverse`` is 1 / scale, one a coordinate."""
        found = torch.cat([norms(self.rows(part) * inverse) for part in self.parts()])
        return rounded_up(found, self, inverse.max())

    def largest(self) -> Tensor:
        """Return a bound on the norm, even if no position cancels another; not tight."""
        return torch.cat([norms(self.rows(part)) for part in self.parts()])

    def add(self, factors: Tensor, out: Tensor) -> None:
        """out += Σ factor · gradient."""
        if self.kept is not None:
            out += totals.weighted(self.kept, factors)
        else:
            self.product(factors, out)

    def add_clamped(self, limit: Tensor, out: Tensor) -> None:
        """out += Σ gradient clamped to ± limit."""
        for part in self.parts():
            clamped_rows(self.rows(part), limit, out)


def rounded_up(found: Tensor, term: Term, scale: Tensor | float = 1.0) -> Tensor:
    """Return norms of rows that the sum is not made of, plus how far rounding may have moved these rows.

    A row of T positions in float32 is off by at most T 2⁻²⁴ Σ_t |u_t| |v_t| (Higham 2002, Section 4.2). Where
    that is below 2⁻¹¹ of the norm, the slack of the noise covers it.

    >>> u, v = torch.ones(1, 3, 1), torch.tensor([[[1e8], [3.0], [-1e8]]])  # 3, in float32 0
    >>> term = Outer(Factor(u), Factor(v))
    >>> bool(rounded_up(torch.zeros(1), term) >= 3.0)
    True
    """
    if term.positions == 1:
        return found
    moved = term.largest() * (scale * (term.positions + 2) * _ROW_ROUNDED)
    return torch.where(moved > found * 2.0**-11, found + moved, found)


class RowTerms(Term):
    """Gradients that are there already: biases, scales of norms, whatever is small."""

    def __init__(self, factor: Factor | Tensor) -> None:
        self.factor = factor if isinstance(factor, Factor) else Factor(factor)
        values = self.factor.values
        self.device, self.examples, self.size = values.device, values.shape[0], math.prod(values.shape[1:])

    def rows(self, part: slice) -> Tensor:
        return self.factor.values[part].flatten(1)

    def norms(self) -> Tensor:
        return self.factor.norms

    def product(self, factors: Tensor, out: Tensor) -> None:
        out += totals.weighted(self.factor.values.flatten(1), factors)

    def only(self, good: Tensor) -> None:
        self.factor = Factor(where(good, self.factor.values))

    def release(self) -> None:
        """Nothing else is held."""


def summed(u: Factor) -> RowTerms:
    """Σ over positions: the gradients of a bias, or of several that have the same."""
    if u._total is None:
        alone = u.values.shape[1] == 1 and u.values.dtype is torch.float32
        u._total = u if alone else Factor(u.values.sum(1, dtype=torch.float32))
    return RowTerms(u._total)


class Outer(Term):
    """Σ_t u_t ⊗ v_t, for u (examples, positions, p) and v (examples, positions, q): a (p, q) matrix."""

    def __init__(self, u: Factor, v: Factor) -> None:
        self.examples, self.positions, self.height = u.values.shape
        if u.values.dtype is not v.values.dtype or self.positions == 1:
            u, v = u.wide(), v.wide()
        self.u, self.v, self.device, self.turned = u, v, u.values.device, False
        self.found: Tensor | None = None  # norms, to tell which examples' positions cancel
        self.width = v.values.shape[2]
        self.size = self.height * self.width

    @classmethod
    def joined(cls, terms: list["Outer"]) -> "Outer":
        """Return the sum over several uses of one weight: more positions."""
        if len(terms) == 1:
            return terms[0]
        u = torch.cat([term.u.values for term in terms], 1)
        return cls(Factor(u), Factor(torch.cat([term.v.values for term in terms], 1)))

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

    def made_of(self) -> int:
        return self.u.values.nbytes + self.v.values.nbytes

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
            return found * (1 + _TENSOR_ROUNDED) if coarse(self.device) else found
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
        found: Tensor = (u * v).sum(1) * _TENSOR_ROUNDED
        return found

    def _compiled(self) -> Tensor:
        """Rows and norms by the kernel in C, which likes its second factor wide: a row may be (q, p)."""
        self.kept, self.turned = self.room(), self.height > self.width
        found = self._measured(self.kept)
        self.release()
        return found

    def _measured(self, rows: Tensor | None) -> Tensor:
        """Return norms, and write ``rows`` if asked to."""
        u, v = self.u.values, self.v.values
        return compiled.outers(v, u, rows) if self.height > self.width else compiled.outers(u, v, rows)

    def add(self, factors: Tensor, out: Tensor) -> None:
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
        """out += Σ factor · gradient: all of the matrix, or ``some`` rows of it."""
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

    @classmethod
    def joined(cls, terms: list["Lookup"]) -> "Lookup":
        """Return the sum over several uses of one embedding."""
        if len(terms) == 1:
            return terms[0]
        values = torch.cat([term.v.values for term in terms], 1)
        return cls(torch.cat([term.ids for term in terms], 1), Factor(values), terms[0].height)

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
        """out += Σ factor · gradient: all of the table, or ``some`` rows of it."""
        values = weighted(self.v.values.float(), factors).flatten(0, 1)
        ids = self.ids.flatten() - (some.start or 0)
        totals.add_rows(ids, values, out.view(-1, self.width))

    def only(self, good: Tensor) -> None:
        self.v = Factor((blanked if self.own else where)(good, self.v.values))

    def release(self) -> None:
        """Rows of an embedding are never kept."""


def contracted(first: Tensor, second: Tensor) -> Tensor:
    """√Σ_ts of the product of two Gram matrices.

    Where positions cancel so much that rounding could matter, the norm is rounded up by its bound. So it is
    by what tiny factors lose in their squares, which huge ones on the other side would bring back:
    |G_ts| <= √G_tt √G_ss, so a loss of l in every entry of one matrix moves the sum by l (Σ √G_tt)² of the
    other.
    """
    each, other = (gram.diagonal(dim1=1, dim2=2).sqrt() for gram in (first, second))
    lost = (each.sum(1).square() + other.sum(1).square()) * _LOST
    square = (first.flatten(1) * second.flatten(1)).sum(1)
    return rooted(square + lost, (each * other).add_(_SMALLEST).sum(1))


def rooted(square: Tensor, most: Tensor) -> Tensor:
    """√square, where ``most`` is the norm that positions would have together if none cancelled another.

    With factors of ten bits both Gram matrices and the sum that follows round: all of it is added on.
    """
    least = most.square()
    if coarse(square.device):
        return (square.clamp_min(0.0) + least * (2 * _TENSOR_ROUNDED)).sqrt() + most * _TENSOR_ROUNDED
    return torch.where(square < least * 2.0**-10, square.clamp_min(0.0) + least * _ROUNDED, square).sqrt()
