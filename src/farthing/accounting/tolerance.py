"""Comparison of totals with budgets: rounded inward by a stated margin, on every processor.

A budget that is converted (to μ, to ρ), divided into parts and added up again in floating point comes back
with another last bit, and which one depends on the processor's `exp` and `log`. Compared bit by bit, the
whole of a budget does not fit itself. So limits are lowered first, and totals may then pass them by less:

* `inner`: whatever is converted is converted from (ε(1 - MARGIN), δ(1 - MARGIN)), and the result (a μ, a ρ)
  is lowered by MARGIN once more. That number is the *limit*, and what the library itself offers.
* `within`: totals fit up to limit · (1 + TOLERANCE).

Why nothing leaves the budget. Totals are rounded up when they are added (`plus`), so the true sum is never
larger. A part that is charged with its limit lets through (1 + TOLERANCE) times as much, and so do its own
parts: DEPTH levels of them, with what each cost is rounded by (2⁻⁵⁰), less than 1 + 2 DEPTH TOLERANCE =
1 + MARGIN / 2 times as much, and (1 - MARGIN)(1 + MARGIN / 2) < 1. Everything that fits such a limit is
therefore (ε(1 - MARGIN), δ(1 - MARGIN))-DP by the conversion's own theorem. Under basic composition Σε and
Σδ of parts may pass ε and δ by TOLERANCE a level, and each part is true to MARGIN less, so their product is
below 1. An answer whose ε is charged as it stands has more noise than it is charged for (`mechanisms`: by
2⁻²⁰, for the floats of its sum, which need less than half of it).

>>> within(0.1 + 0.2, 0.3), 0.1 + 0.2 <= 0.3
(True, False)
"""

import math

TOLERANCE = 2.0**-40  # by which a total may pass a limit: thousands of sums in floats stay below
DEPTH = 16  # parts of parts of parts ...
MARGIN = 4 * DEPTH * TOLERANCE  # by which limits are lowered: 6e-11 of them


def inner(value: float, times: int = 1) -> float:
    """An ε, a δ, a μ or a ρ lowered by the margin, so many ``times``."""
    return value * (1 - times * MARGIN)


def within(total: float, limit: float) -> bool:
    """Return whether a total fits a limit that was lowered before."""
    return total <= limit * (1 + TOLERANCE)


def plus(total: float, more: float) -> float:
    """Return the sum, rounded up: the error of a float sum is a float (Knuth, TwoSum)."""
    added = total + more
    back = added - total
    lost = (total - (added - back)) + (more - back)
    return math.nextafter(added, math.inf) if lost > 0 else added


def times(count: int, cost: float) -> float:
    """Return the product, rounded up; with a negative count, what may be given back at most."""
    product = count * cost
    exact = cost == 0 or abs(count) == 1 or not math.isfinite(product)
    return product if exact else math.nextafter(product, math.inf)
