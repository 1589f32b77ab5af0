"""Represent per-example gradients of one parameter in factored form: norms and weighted sums only.

A layer's gradient is a sum over positions (tokens, pixels, uses of a tied weight) of products u_t ⊗ v_t.
A `Term` in this form has a method `norms`, for the norm of every example's gradient, and a method `add`, for
the weighted sum; `rows` makes the gradients themselves if nothing cheaper works. Ways to compute the norm:

* one position: |u|² |v|²;
* rows: the gradients are made, measured, kept, and summed by one product with the weights;
* again: the same in parts that are dropped; the sum is then the layer's own product with weighted u. If the
  positions of a row cancel, that sum may exceed the measured row by a rounding error, so norms are rounded up
  by this error (`rounded_up`). Convolutions with few positions have a kernel that makes identical rows twice,
  in registers;
* gram: Σ_ts (u_t · u_s)(v_t · v_s) (Goodfellow 2015; Li et al. 2022), for few positions and wide layers.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from enum import StrEnum
from typing import Any, Self

import torch
from torch import Tensor

from farthing.torch.kernels import totals
from farthing.torch.kernels.clamping import clamped_rows
from farthing.torch.kernels.positions import fused, where
from farthing.torch.kernels.totals import coarse

_PART = 2**20  # entries of the gradients made at once: they stay in the cache
_WIDE = 2**26  # on a GPU: few launches, and a quarter of a gigabyte
_ROUNDED = 2.0**-20  # rounding of a Gram sum, relative to the sum of absolute values
TENSOR_ROUNDED = 2.0**-9  # of a product of two factors of ten bits, relative to the product of their norms
_ROW_ROUNDED = 2.0**-23  # of a row, for each position, relative to the sum of absolute values: twice 2⁻²⁴
_LOST = 1e-32  # what an inner product of up to 800,000 entries may lose where squares vanish
_SMALLEST = 1e-18  # squares of entries below may have lost digits: a norm is rounded up by as much


def part_of(device: torch.device) -> int:
    """Return how many entries of gradients are made at once."""
    return _WIDE if device.type == "cuda" else _PART


class Route(StrEnum):
    """The way in which a term of several positions computes its norms and its sum."""

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

    def alike(self) -> Hashable:
        """Return what other uses of a parameter must have in common with this one to be `joined` with it."""
        return id(self)

    @staticmethod
    def joined(terms: list[Any]) -> "Term":
        """Return the sum over several uses that are alike."""
        raise NotImplementedError

    def routes(self) -> tuple[Route, ...]:
        """Return the ways worth measuring; one where there is no choice."""
        return (Route.ROWS,)

    def quicker(self) -> int:
        """Return which of two ways to a norm takes less time on a CPU, by the products that they take."""
        return 0

    def made_of(self) -> int:
        """Return the bytes of the factored form; 0 where there is none."""
        return 0

    def factors(self) -> tuple[Tensor, ...]:
        """Return the tensors of the factored form that other terms may also hold."""
        return ()

    def worth(self, examples: float) -> float:
        """Return up to how many bytes of a row keeping it is about the quickest, in a batch of so many."""
        return 4.0 * self.size

    @property
    def bytes(self) -> int:
        """Return the bytes of all rows."""
        return 4 * self.examples * self.size

    def parts(self) -> Iterator[slice]:
        """Return slices of examples whose gradients are made at once."""
        step = max(1, part_of(self.device) // max(1, self.size))
        return (slice(start, start + step) for start in range(0, self.examples, step))

    @abstractmethod
    def rows(self, part: slice) -> Tensor:
        """Return the gradients of some examples, flat, one a row, in float32."""

    @abstractmethod
    def product(self, factors: Tensor, out: Tensor) -> None:
        """Add Σ factor · gradient to ``out``, from the factored form."""

    @abstractmethod
    def only(self, good: Tensor) -> None:
        """Replace examples that are not good by zeros, because 0 · NaN would be NaN."""

    @abstractmethod
    def release(self) -> None:
        """Free the factored form, once the rows are kept."""

    def norms(self) -> Tensor:
        """Return the norm of each example's gradient."""
        if self.route is Route.ROWS:
            return self._keep()
        return rounded_up(torch.cat([norms(self.rows(part)) for part in self.parts()]), self)

    def _keep(self, inverse: Tensor | None = None) -> Tensor:
        """Make and keep the rows in parts; return their norms (over a scale), taken while in the cache."""
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
        """Write the gradients of some examples to ``out``."""
        out.copy_(self.rows(part))

    def scaled_norms(self, inverse: Tensor) -> Tensor:
        """Return the norms of gradient / scale, where ``inverse`` is 1 / scale, one a coordinate."""
        found = torch.cat([norms(self.rows(part) * inverse) for part in self.parts()])
        return rounded_up(found, self, inverse.max())

    def largest(self) -> Tensor:
        """Return a bound on the norm, even if no position cancels another; not tight."""
        return torch.cat([norms(self.rows(part)) for part in self.parts()])

    def add(self, factors: Tensor, out: Tensor) -> None:
        """Add Σ factor · gradient to ``out``."""
        if self.kept is not None:
            out += totals.weighted(self.kept, factors)
        else:
            self.product(factors, out)

    def add_clamped(self, limit: Tensor, out: Tensor) -> None:
        """Add Σ gradient, clamped to ± limit, to ``out``."""
        for part in self.parts():
            clamped_rows(self.rows(part), limit, out)


def rounded_up(found: Tensor, term: Term, scale: Tensor | float = 1.0) -> Tensor:
    """Return norms of rows that the sum is not made of, plus how far rounding may have moved these rows.

    A row of T positions in float32 is off by at most T 2⁻²⁴ Σ_t |u_t| |v_t| (Higham 2002, Section 4.2). Where
    that is below 2⁻¹¹ of the norm, the slack of the noise covers it.

    >>> from farthing.torch.gradients.outers import Outer
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
    """Gradients in full: of biases, scales of norms, and other small parameters."""

    def __init__(self, factor: Factor | Tensor) -> None:
        self.factor = factor if isinstance(factor, Factor) else Factor(factor)
        values = self.factor.values
        self.device, self.examples, self.size = values.device, values.shape[0], math.prod(values.shape[1:])

    def alike(self) -> Hashable:
        return RowTerms

    @staticmethod
    def joined(terms: list["RowTerms"]) -> "RowTerms":
        return RowTerms(torch.stack([term.factor.values.flatten(1).float() for term in terms]).sum(0))

    def rows(self, part: slice) -> Tensor:
        return self.factor.values[part].flatten(1)

    def norms(self) -> Tensor:
        return self.factor.norms

    def product(self, factors: Tensor, out: Tensor) -> None:
        out += totals.weighted(self.factor.values.flatten(1), factors)

    def only(self, good: Tensor) -> None:
        self.factor = Factor(where(good, self.factor.values))

    def release(self) -> None:
        """Do nothing: the rows are all that is held."""


def summed(u: Factor) -> RowTerms:
    """Return the sum over positions: the gradients of a bias, or of several equal ones."""
    if u._total is None:
        alone = u.values.shape[1] == 1 and u.values.dtype is torch.float32
        u._total = u if alone else Factor(u.values.sum(1, dtype=torch.float32))
    return RowTerms(u._total)


def contracted(first: Tensor, second: Tensor) -> Tensor:
    """Return √Σ_ts of the product of two Gram matrices.

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
    """Return √square; ``most`` is the norm that all positions would have if none cancelled another.

    With factors of ten bits both Gram matrices and the sum that follows round: all of it is added on.
    """
    least = most.square()
    if coarse(square.device):
        return (square.clamp_min(0.0) + least * (2 * TENSOR_ROUNDED)).sqrt() + most * TENSOR_ROUNDED
    return torch.where(square < least * 2.0**-10, square.clamp_min(0.0) + least * _ROUNDED, square).sqrt()
