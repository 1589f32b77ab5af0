"""Compare totals with budgets, rounded inward by a stated margin, on every processor.

A budget that is converted (to μ, to ρ), divided into parts and added up again in floating point differs in
its last bits, depending on the processor's `exp` and `log`. With exact comparison, a whole budget would not
fit itself. So limits are lowered first, and totals may then exceed them by less:

* `inner`: conversions start from (ε(1 - MARGIN), δ(1 - MARGIN)), and the result (a μ, a ρ) is lowered by
  MARGIN once more. That number is the *limit*, which the library offers.
* `within`: totals fit up to limit · (1 + TOLERANCE).

Why the budget holds. Totals are rounded up when they are added (`plus`), so the true sum is never larger. A
part that is charged with its limit allows (1 + TOLERANCE) times as much, and so do its own parts: DEPTH
levels of them, including the rounding of each cost (2⁻⁵⁰), allow less than 1 + 2 DEPTH TOLERANCE = 1 + MARGIN
/ 2 times as much, and (1 - MARGIN)(1 + MARGIN / 2) < 1. Everything that fits such a limit is therefore (ε(1 -
MARGIN), δ(1 - MARGIN))-DP by the theorem of the conversion. Under basic composition Σε and Σδ of parts may
exceed ε and δ by TOLERANCE per level, and the true cost of each part is lower by MARGIN, so their product is
below 1. An answer whose ε is charged directly has more noise than its charge requires (`mechanisms`: by 2⁻²⁰,
for the floats of its sum, which need less than half of it).

>>> within(0.1 + 0.2, 0.3), 0.1 + 0.2 <= 0.3
(True, False)
"""

import math

TOLERANCE = 2.0**-40  # a total may exceed a limit by this: thousands of float sums stay below
DEPTH = 16  # how often a part may be divided
MARGIN = 4 * DEPTH * TOLERANCE  # by which limits are lowered: 6e-11 of them


def inner(value: float, times: int = 1) -> float:
    """Return an ε, a δ, a μ or a ρ lowered by the margin, this many ``times``."""
    return value * (1 - times * MARGIN)


def within(total: float, limit: float) -> bool:
    """Return whether a total fits a limit that was lowered by `inner`."""
    return total <= limit * (1 + TOLERANCE)


def plus(total: float, more: float) -> float:
    """Return the sum, rounded up: the error of a float sum is a float (Knuth, TwoSum)."""
    added = total + more
    back = added - total
    lost = (total - (added - back)) + (more - back)
    return math.nextafter(added, math.inf) if lost > 0 else added


def times(count: int, cost: float) -> float:
    """Return the product, rounded up; with a negative count, the largest refund."""
    product = count * cost
    exact = cost == 0 or abs(count) == 1 or not math.isfinite(product)
    return product if exact else math.nextafter(product, math.inf)
