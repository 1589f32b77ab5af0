"""Compose (ε, δ) statements, amplify them by sampling, and convert budgets of people with several records.

Each result holds under the adjacency of its parts, against an observer who sees every answer, and for
adaptively chosen parts. These are the baselines of the literature: for known mechanisms the other accountants
of this package are tighter. Results are rounded up.

>>> epsilon, delta = advanced(0.1, 0.0, steps=100, slack=1e-5)
>>> round(epsilon, 4), delta
(5.8502, 1e-05)

*People with several records.* `per_record` returns a budget for each record that adds up to a budget for the
person. Theorem (Dong, Roth & Su 2022, Thm. 2.14): a mechanism that is f-DP for one record is (1 - (1 -
f)^∘k)-DP for neighbours that differ in k records; for Gaussian trade-off functions this is exactly G_kμ. So
if every person has at most k records, by a rule that depends on that person's records only, a mechanism that
is (μ/k)-GDP per record under add-remove is μ-GDP per person: a person is added or removed as at most k
records, one after the other. It holds for accounting by μ (`GdpFilter`), and not for the (ε, δ) of other
accountants.

>>> person = Budget(1.0, 1e-5, unit="user")
>>> record = per_record(person, 4)
>>> print(record)
(0.220267, 1e-05)-DP, add-remove, per record, against anyone
>>> record.mu * 4 <= person.mu
True
"""

import math
from dataclasses import replace
from fractions import Fraction

from farthing import validate
from farthing.accounting import gaussian
from farthing.budget import Adjacency, Budget, Guarantee, Unit
from farthing.errors import InvalidValue, Unsupported


def _up(value: float) -> float:
    return value * (1 + 1e-14)


def _times(steps: int, value: float) -> float:
    """Return the product, rounded up rather than to nearest."""
    product = steps * value
    if math.isinf(product) or Fraction(product) >= steps * Fraction(value):
        return product
    return math.nextafter(product, math.inf)


def _expm1(value: float) -> float:
    return math.expm1(value) if value < 709 else math.inf


def _checked(epsilon: float, delta: float, steps: int) -> tuple[float, float, int]:
    return (
        validate.non_negative(epsilon=epsilon),
        validate.delta(delta=delta),
        validate.count(steps=steps),
    )


def basic(epsilon: float, delta: float, steps: int) -> tuple[float, float]:
    """Return (kε, kδ): Dwork & Roth 2014, Theorem 3.16."""
    epsilon, delta, steps = _checked(epsilon, delta, steps)
    return _times(steps, epsilon), min(1.0, _times(steps, delta))


def _advanced(epsilon: float, steps: int, slack: float) -> float:
    spread = math.sqrt(2 * steps * -math.log(slack)) * epsilon
    return _up(spread + steps * epsilon * _expm1(epsilon)) if epsilon else 0.0


def advanced(epsilon: float, delta: float, steps: int, slack: float) -> tuple[float, float]:
    """Return √(2k ln 1/δ') ε + kε(e^ε − 1) and kδ + δ', δ' = ``slack``: Dwork & Roth 2014, Theorem 3.20."""
    epsilon, delta, steps = _checked(epsilon, delta, steps)
    validate.probability(slack=slack)
    total = min(1.0, math.nextafter(_times(steps, delta) + slack, 1.0) if delta else slack)
    return _advanced(epsilon, steps, slack), total


def advanced_epsilon_iter(epsilon: float, delta: float, steps: int, slack: float) -> tuple[float, float]:
    """Return the inverse of :func:`advanced`: the largest (ε, δ) per step that stays within the total.

    δ per step is (δ − slack)/k; ``slack`` is the theorem's δ' and must be below δ.
    """
    epsilon, steps = validate.positive(epsilon=epsilon), validate.count(steps=steps)
    validate.probability(delta=delta)
    if not validate.probability(slack=slack) < delta:
        raise InvalidValue(f"slack must be below delta={delta!r}, got {slack!r}")
    step = gaussian.safe_root(lambda value: _advanced(value, steps, slack) - epsilon, 0.0, epsilon)
    if _advanced(epsilon, steps, slack) <= epsilon:  # a slack near 1 with one step
        step = epsilon
    return step, math.nextafter((delta - slack) / steps, 0.0)


def strong(epsilon: float, delta: float, steps: int, slack: float) -> tuple[float, float]:
    """Return (kε² + ε√(2k ln 1/δ'), kδ + δ'), the "strong composition" of Abadi et al. 2016, Figure 2.

    It holds at every ε: Kairouz, Oh & Viswanath 2015, Theorem 3.4, has kε tanh(ε/2) <= kε²/2 in
    place of kε².
    """
    epsilon, delta, steps = _checked(epsilon, delta, steps)
    validate.probability(slack=slack)
    spread = epsilon * math.sqrt(2 * steps * -math.log(slack))
    total = math.nextafter(_times(steps, delta) + slack, 1.0) if delta else slack
    return _up(steps * epsilon * epsilon + spread), min(1.0, total)


def amplify_poisson(epsilon: float, delta: float, rate: float) -> tuple[float, float]:
    """Return (ln(1 + q(e^ε − 1)), qδ): Balle, Barthe & Gaboardi 2018, Theorems 8 and 9.

    Holds for Poisson sampling at rate q of an add-remove mechanism (Theorem 8), and for drawing m of n
    records without replacement, q = m/n, from a replace-one mechanism (Theorem 9). It does not hold for
    shuffled passes, for sampling with replacement, with the adjacencies exchanged, or against an observer who
    sees the draws.
    """
    epsilon, delta = validate.non_negative(epsilon=epsilon), validate.delta(delta=delta)
    if validate.rate(rate=rate) == 1:
        return epsilon, delta
    if epsilon < 700:
        return _up(math.log1p(rate * math.expm1(epsilon))), delta * rate * (1 + 3e-16)
    return min(epsilon, _up(max(epsilon + math.log(rate), 0.0) + math.log(2))), delta * rate * (1 + 3e-16)


def strong_as_published(noise: float, rate: float, steps: int, delta: float) -> tuple[float, bool]:
    """Return the "strong composition" baseline as plotted by Abadi et al. 2016, and whether it is proven.

    δ' = δ/2, δ₀ = δ/(2Tq), ε₁ = q√(2 ln(1.25/δ₀))/σ, ε = Tε₁² + ε₁√(2T ln 1/δ'). Two of its steps
    need conditions: the classic Gaussian bound needs ε₀ = ε₁/q < 1, and qε₀ is always below the true
    amplified ln(1 + q(e^ε₀ − 1)). The flag is True only where ε₀ < 1 and the printed ε is no less
    than :func:`advanced_sampled`, which is proven at the same δ.
    """
    validate.positive(noise=noise), validate.rate(rate=rate), validate.probability(delta=delta)
    expected = validate.count(steps=steps) * rate
    ratio = 1.25 * 2 * expected / delta
    single = math.sqrt(2 * math.log(ratio)) / noise if ratio > 1 else math.inf
    if math.isinf(single):  # δ₀ > 1: the formula has no meaning
        return math.inf, False
    published, _ = strong(rate * single, 0.0, steps, delta / 2)
    return published, single < 1 and advanced_sampled(noise, rate, steps, delta) <= published


def advanced_sampled(noise: float, rate: float, steps: int, delta: float) -> float:
    """Return ε by proven textbook parts: exact Gaussian, amplification, :func:`advanced`.

    δ is split as in :func:`strong_as_published`; the adjacency is that of :func:`amplify_poisson`.
    """
    validate.positive(noise=noise), validate.rate(rate=rate), validate.probability(delta=delta)
    expected = validate.count(steps=steps) * rate
    single_delta = delta / (2 * expected) * (1 - 1e-15)
    single = gaussian.epsilon(min(1 / noise, 1e300), single_delta) if 0 < single_delta < 1 else 0.0
    if single_delta == 0 or math.isinf(single):
        return math.inf
    return _advanced(amplify_poisson(single, 0.0, rate)[0], steps, delta / 2)


THEOREM = "group privacy of μ-GDP: Dong, Roth & Su 2022, Thm. 2.14"
_CLOSER = 1 - 2.0**-30


def per_record(budget: Budget, rows: int) -> Budget:
    """Return the budget per record that amounts to ``budget`` for a person with ``rows`` records."""
    rows = validate.count(rows=rows)
    if budget.adjacency is not Adjacency.ADD_REMOVE:
        raise Unsupported(
            f"budgets for people with several records need add-remove, got {budget.adjacency}: a person "
            "who is replaced may have another number of records"
        )
    epsilon = gaussian.epsilon(budget.mu / rows, budget.delta)
    if epsilon == 0:
        raise Unsupported(
            f"{budget} leaves no epsilon to each of {rows} records: keep fewer records per person"
        )
    record = replace(budget.with_(epsilon, budget.delta), unit=Unit.RECORD)
    while record.mu * rows > budget.mu:  # rare, because of the margin of μ
        record = record.with_(record.epsilon * _CLOSER, record.delta)
    return record


def per_person(guarantee: Guarantee, budget: Budget, rows: int) -> Guarantee:
    """Return the guarantee per person of a guarantee per record under `per_record`: that of ``budget``."""
    lifted = replace(guarantee, epsilon=budget.epsilon, delta=budget.delta, unit=Unit.USER)
    theorem = f"{guarantee.theorem}; {THEOREM}" if guarantee.theorem else THEOREM
    return replace(lifted, theorem=theorem).noted(f"at most {rows} records of a person are kept")
