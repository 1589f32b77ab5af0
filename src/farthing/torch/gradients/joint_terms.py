"""Combine terms: all uses of one parameter, or consecutive parts of it."""

from typing import Any, Self

import torch
from torch import Tensor

from farthing.torch.gradients.outers import Lookup, Outer
from farthing.torch.gradients.terms import Route, RowTerms, Term, norms, part_of, rooted, rounded_up
from farthing.torch.kernels import totals
from farthing.torch.kernels.positions import blanked
from farthing.torch.kernels.totals import exact


class SumTerm(Term):
    """The sum of terms of several kinds on one parameter, cross terms and all."""

    def __init__(self, terms: list[Term]) -> None:
        self.terms = _joined(terms)
        self.examples, self.size, self.device = terms[0].examples, terms[0].size, terms[0].device
        self.positions = sum(term.positions for term in self.terms)

    @staticmethod
    def of(terms: list[Term]) -> Term:
        """Return one term for all uses of a parameter."""
        blocks = [term.terms for term in terms if isinstance(term, Blocks)]
        if len(blocks) == len(terms) > 1 and len({tuple(p.size for p in parts) for parts in blocks}) == 1:
            return Blocks([SumTerm.of(list(parts)) for parts in zip(*blocks, strict=True)])
        joined = SumTerm(terms)
        return joined.terms[0] if len(joined.terms) == 1 else joined

    def made_of(self) -> int:
        return 0 if self._pair() else sum(term.made_of() or term.bytes for term in self.terms)

    def routes(self) -> tuple[Route, ...]:
        return (Route.ROWS if self.keeps and not self._pair() else Route.AGAIN,)

    def rows(self, part: slice) -> Tensor:
        first, *rest = (term.rows(part) for term in self.terms)
        for more in rest:
            first = first + more
        return first

    def _pair(self) -> tuple[Outer, Lookup] | None:
        """Return a wide matrix that is looked up in and multiplied by: its norms need no rows."""
        match self.terms:
            case [Outer() as outer, Lookup() as lookup] if self.size > outer.positions * lookup.positions:
                return outer, lookup
        return None

    def norms(self) -> Tensor:
        if pair := self._pair():
            pair[0].found = _crossed(*pair)
            return pair[0].found
        if self.route is Route.ROWS:
            return self._keep()
        with exact(self.device):  # as the sum is
            return rounded_up(torch.cat([norms(self.rows(part)) for part in self.parts()]), self)

    def largest(self) -> Tensor:
        return torch.stack([term.largest() for term in self.terms]).sum(0)

    def product(self, factors: Tensor, out: Tensor) -> None:
        """Add Σ factor · gradient to ``out``.

        One use may take back another's, so that each alone is far longer than what was measured: their sums
        are added in float64, or rows are made again and summed as they were measured.
        """
        if pair := self._pair():  # a large table, some rows at a time
            table = out.view(pair[1].height, pair[1].width)
            for some in totals.slabs(*table.shape):
                wide = torch.zeros_like(table[some], dtype=torch.float64)
                for use in pair:
                    use.product(factors, wide, some)
                table[some] += wide
            return
        with exact(self.device):
            wide = torch.zeros_like(out, dtype=torch.float64)
            for part in self.parts():
                wide += totals.weighted(self.rows(part), factors[part])
            out += wide

    def only(self, good: Tensor) -> None:
        if self.kept is not None:
            self.kept = blanked(good, self.kept)
            return
        for term in self.terms:
            term.only(good)

    def release(self) -> None:
        for term in self.terms:
            term.release()


def _joined(terms: list[Term]) -> list[Term]:
    """Return as few terms as have the same sum: several that are alike are one of more positions."""
    kinds: dict[Any, list[Any]] = {}
    for term in sorted(terms, key=lambda term: isinstance(term, Lookup)):
        kinds.setdefault(term.alike(), []).append(term)
    return [each[0].joined(each) if len(each) > 1 else each[0] for each in kinds.values()]


class Blocks(Term):
    """Terms of consecutive parts of one parameter: the three projections of attention."""

    def __init__(self, terms: list[Term]) -> None:
        self.terms, self.device = terms, terms[0].device
        self.examples, self.size = terms[0].examples, sum(term.size for term in terms)
        self.positions = max(term.positions for term in terms)

    def rows(self, part: slice) -> Tensor:
        return torch.cat([term.rows(part) for term in self.terms], 1)

    def norms(self) -> Tensor:
        return norms(torch.stack([term.norms() for term in self.terms], 1))

    def largest(self) -> Tensor:
        return torch.stack([term.largest() for term in self.terms]).sum(0)

    def product(self, factors: Tensor, out: Tensor) -> None:
        for term, part in zip(self.terms, torch.split(out, [term.size for term in self.terms]), strict=True):
            term.add(factors, part)

    def only(self, good: Tensor) -> None:
        for term in self.terms:
            term.only(good)

    def release(self) -> None:
        """Do nothing: the terms release their own memory."""


class MaskedTerm(Term):
    """A term times a mask of zeros and ones: the gradients of weights that only partly count.

    As no product with the mask rounds, a sum of gradients is the mask times theirs.
    """

    def __init__(self, term: Term, mask: Tensor) -> None:
        self.term, self.mask = term, mask
        self.examples, self.size, self.device = term.examples, term.size, term.device
        self.positions = term.positions

    def fresh(self, count: int | None = None) -> Self:
        some = super().fresh(count)
        some.term = self.term.fresh(count)
        return some

    def routes(self) -> tuple[Route, ...]:
        self.term.keeps = self.keeps
        return self.term.routes()[:1]

    def made_of(self) -> int:
        return self.term.made_of()

    def rows(self, part: slice) -> Tensor:
        return self.term.rows(part) * self.mask

    def norms(self) -> Tensor:
        self.term.route, self.term.space = self.route, self.space
        return self.term.scaled_norms(self.mask)

    def largest(self) -> Tensor:
        return self.term.largest()

    def add(self, factors: Tensor, out: Tensor) -> None:
        found = torch.zeros_like(out)
        self.term.add(factors, found)
        out += found * self.mask

    product = add

    def only(self, good: Tensor) -> None:
        self.term.own = self.own
        self.term.only(good)

    def release(self) -> None:
        self.term.release()


class SmallRows(RowTerms):
    """Rows of several small parameters, end to end: measured and summed at once, as if they were one.

    ``places`` says where each coordinate lies in ``total``, the sum of all parameters.
    """

    def __init__(self, terms: list[RowTerms], places: Tensor, total: Tensor) -> None:
        super().__init__(torch.cat([term.factor.values.flatten(1) for term in terms], 1))
        self._places, self._total = places, total

    def add(self, factors: Tensor, out: Tensor) -> None:
        """Add to the whole sum, whichever part of it ``out`` is."""
        self._total.index_add_(0, self._places, totals.weighted(self.factor.values, factors))


def _crossed(outer: Outer, lookup: Lookup) -> Tensor:
    """Return the norms of the sum of both: |o|² + |l|² + 2 Σ_ts u_s[ids_t] (v_t · v_s)."""
    step = max(1, 4 * part_of(outer.device) // (outer.positions * lookup.positions))
    found = []
    for start in range(0, outer.examples, step):
        part = slice(start, start + step)
        u, ids = outer.u.values[part], lookup.ids[part]
        picked = u.gather(2, ids[:, None, :].expand(-1, u.shape[1], -1)).float()
        products = torch.bmm(outer.v.values[part].float(), lookup.v.values[part].float().transpose(1, 2))
        found.append((picked * products).flatten(1).sum(1))
    one, other = outer.gram_norms(), lookup.norms()
    whole = rooted(one.square() + other.square() + 2 * torch.cat(found), one + other)
    return whole + outer.rounding() if outer.rounds() else whole
