"""Add bounded terms with bounded rounding, which makes the mechanisms' float slack a theorem.

A float64 sum is rounded at every addition, in a direction that depends on its terms: adversarial values move
a sequential sum of n terms by n² 2⁻⁵⁵ of one term's bound, 3e-5 at 2²⁰ rows and 3 % at 2²⁵. The sums of this
module consist of short chains instead.

**Theorem.** Let t_1, ..., t_n be terms with |t_i| <= C in an absolute norm (L1, L2, Frobenius, in units of a
scale), n <= `MOST`, and let S be their sum as `Sum` computes it from parts. A part is computed in any order,
fused or not, from at most ``rows`` terms or products of two factors whose absolute values have norm <=
``spread`` · C. Then the computed sum is within 2⁻¹⁶ C of the exact sum of the terms. For two neighbours the
difference is 2⁻¹⁵ C, under any adjacency.

*Proof.* Let u = 2⁻⁵³. A value that is computed from terms a_i (each a product rounded at most once) by a tree
of additions in which no term passes through more than h roundings differs from Σ a_i by at most γ_h Σ |a_i|
in every coordinate, with γ_h = hu / (1 - hu) (Higham 2002, Lemma 8.4 and Section 4.2); as the norm is
absolute, by at most γ_h n · spread · C in norm. `Sum` adds parts directly while rows + parts <= `chain` - 6,
so a term passes through at most that many roundings. Then it adds the result to a total by Knuth's two-sum
and accumulates the error separately; this is Sum2 of Ogita, Rump & Oishi (2005), whose error is at most u |S|
+ γ_m² Σ |parts|, less than u Σ |parts| for the second term with m <= 2²⁶ parts. Four roundings remain for
later steps, such as subtracting a centre. So the error is at most γ_chain n · spread · C, and `chain` is the
largest h with h n spread <= 2³⁷, that is h u n spread <= 2⁻¹⁶ (2⁻¹⁶ is not met with equality: 6 roundings are
counted and fewer made).  ∎

**Slack.** `SLACK` = 2⁻¹⁴ of C: 2⁻¹⁵ for the sums of two neighbours, and 2⁻¹⁵ for the rounding of the
differing record's own term: a norm of d squares and a factor, (d + 8) u, which is smaller for d <= 2³⁰.

>>> total = Sum(2**20, (2,))
>>> for rows in (np.ones((1000, 2)), np.full((500, 2), 0.5)):
...     total.add(rows.sum(axis=0), len(rows))
>>> total.value.tolist(), summed(np.abs, -np.ones((5, 1))).tolist()
([1250.0, 1250.0], [5.0])
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from farthing.errors import InvalidValue

Array = NDArray[np.float64]

MOST = 2**30  # the most terms of a sum
SLACK = 2.0**-14  # in units of one term's bound
_ROUNDINGS = 2**37  # h n spread: 2⁻¹⁶ / u
_AT_ONCE = 2**18  # the most rows in one part, for _AT_ONCE² < _ROUNDINGS
_SHORTEST = 2**7  # roundings that a sum needs room for
_AFTER = 6  # further roundings of a term: its product, the two-sum, steps after the sum


def checked(records: int) -> int:
    """Return the number of records if the theorem covers it, or raise; call it before any charge."""
    if records > MOST:
        raise InvalidValue(f"the rounding bound holds for at most 2^30 = {MOST:,} records: use fewer")
    return records


def chain(records: int, spread: float = 1.0) -> int:
    """Return the number of roundings that a term may pass through in a sum of this many terms.

    >>> chain(2**20), chain(2**30), chain(2**20, spread=256)
    (131072, 128, 512)
    """
    return int(_ROUNDINGS / spread) // max(2**6, checked(records))


def long(records: int, spread: float) -> bool:
    """Return whether terms that may be longer than their bound would be rounded too often.

    Shorter ones must be added up then: of v z = v A (x - c), in place of v x, terms v z or, where A is a
    diagonal, v (x - c). The rounding of x - c takes the place of the one that subtracts c from the sum.

    >>> long(2**22, spread=256), long(2**23, spread=256), long(2**30, spread=1)
    (False, True, False)
    """
    return chain(records, spread) < _SHORTEST


class Sum:
    """A sum of ``records`` terms, added in parts of at most ``rows`` terms each.

    ``spread`` bounds the absolute values that are added, in units of the terms' bound.
    """

    __slots__ = ("_high", "_longest", "_low", "_most", "_part", "_parts", "_shape")

    def __init__(self, records: int, shape: tuple[int, ...] = (), *, spread: float = 1.0) -> None:
        self._most = chain(records, spread) - _AFTER
        self._high: Any = None
        self._low: Any = 0.0
        self._part: Any = None
        self._shape, self._longest, self._parts = shape, 0, 0

    @property
    def rows(self) -> int:
        """Return the largest number of terms of a part."""
        return self._most - 1

    def add(self, part: Any, rows: int) -> None:
        """Add a part, the sum of so many terms; no other code may hold its array."""
        if rows >= self._most:
            raise InvalidValue("a part of a sum has more terms than its rounding bound allows")
        if max(self._longest, rows) + self._parts >= self._most:
            self._settle()
        if self._part is None:
            self._part, self._longest, self._parts = part, rows, 1
        else:
            self._part += part
            self._longest, self._parts = max(self._longest, rows), self._parts + 1

    def _settle(self) -> None:
        """Move the added parts into the total: Knuth's two-sum, and the sum of its errors."""
        if self._high is None:
            self._high = self._part
        elif self._part is not None:
            high = self._high + self._part
            back = high - self._high
            self._low = self._low + ((self._high - (high - back)) + (self._part - back))
            self._high = high
        self._part, self._longest, self._parts = None, 0, 0

    @property
    def value(self) -> Array:
        """Return the sum."""
        if self._high is None:
            return np.zeros(self._shape) if self._part is None else np.asarray(self._part)
        if self._part is not None:
            self._settle()
        return np.asarray(self._high + self._low)


def summed(bounded: Callable[[Array], Array], rows: ArrayLike) -> Array:
    """Return Σ bounded(rows), in the largest parts allowed; ``bounded`` refuses other shapes than tables."""
    if np.iscomplexobj(rows):  # the conversion would warn, perhaps because of one record
        raise InvalidValue("contributions must be real numbers")
    rows = np.asarray(rows, dtype=np.float64)
    if rows.ndim != 2 or len(rows) <= _AT_ONCE:
        return np.asarray(bounded(rows).sum(axis=0))
    total = Sum(len(rows), rows.shape[1:])
    for start in range(0, max(1, len(rows)), total.rows):
        some = bounded(rows[start : start + total.rows])
        total.add(some.sum(axis=0), len(some))
    return total.value
