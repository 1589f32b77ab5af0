"""SGD1: permission to compute is passed on record by record, and every noisy gradient is broadcast.

"Multi-party DP Write-up 2: Stochastic Gradient Descent", Algorithm SGD1 (its numbers in brackets): B draws
π₁, π₂, ... uniformly from all n records, n² of them [1]; in iteration i the owner of record π(i) computes
G = n ∇l(θ; d) + z with z ~ N(0, σ²)^p [2, 3], B broadcasts G [4], and all move to Π(θ - η(i) G) [3, 5].

    σ = 4 L n ln(1.25 n²/δ) / ε  (3),     η(t) = |C| / √(t (n² L² + p σ²))  (4), or 1/(Δ n t).

**The guarantee depends on who looks** (`sgd1_guarantees`). The printed proof gives (ε, δ + δ^(1/3)), and its
constant is too small for the 2nL by which replacing a record moves G. What holds, when a record is replaced:

* the coordinator knows π, so that nothing is amplified: δ = E δ_Gauss(2nL√K/σ) over K ~ Bin(n², 1/n), the
  times that the record was drawn (condition on π; the hockey-stick divergence is jointly convex). At ε = .5
  and δ = 1/(2n³) the claim fails before it from n = 132 on;
* who sees every G and not π faces n² draws of one in n: tight accounting of `FixedSize(1, n)` shows a tenth
  of the claim. A party is not quite that blind: it knows when it was its own turn, so that before one with k
  records the others' are drawn 1 in n - k, in the remaining iterations (``held``).

Simulated here as one door to all parties' records: π comes from the ledger's cryptographic stream, one record
a question. The observer is that of the budget, and n² answers are promised at once: where the claim does not
hold before that observer, nothing is asked. ``exact`` takes the least σ that the budget allows, not (3).

Where this differs from the write-up: gradients are clipped to L, which is not trusted to be a Lipschitz
constant; θ₀ is the centre of C, a ball, or given, instead of drawn; with ``convexity`` Δ the loss of a record
is made Δ-strongly convex by a public Δ|θ|²/2, whose gradient needs no noise. |C| is the diameter. It is
sequential, about .15 ms an iteration, so for n in the hundreds; a `Step` is handed out every n iterations.

>>> import numpy as np
>>> import farthing as ft
>>> from farthing.losses import logistic
>>> from farthing.tables import Table
>>> for guarantee in sgd1_guarantees(200, 1.0, 0.5, 1 / (2 * 200**3)):
...     print(guarantee.observer, round(guarantee.epsilon, 4))
coordinator 0.6053
anyone 0.0368
>>> x = np.linspace(-1, 1, 30)[:, None]
>>> ledger = ft.Ledger(ft.Budget(0.5, 1 / (2 * 30**3), "replace-one")).over(Table(x, 1.0 * (x[:, 0] > 0)))
>>> run = ft.run(sgd1(ledger, Problem(logistic, 30, 1, unit=False)))
>>> run.steps, ledger.spent.epsilon < 0.04
(900, True)
"""

import math
from collections.abc import Iterator

from numpy.typing import ArrayLike
from scipy.special import bdtrc

from farthing import validate
from farthing.accounting import calibrate, pld
from farthing.algorithms.ball import Ball, lipschitz_of
from farthing.algorithms.problem import Problem
from farthing.bounds import ClipNorm
from farthing.budget import Adjacency, Guarantee, Observer, Unit
from farthing.errors import InvalidValue
from farthing.events import GaussianEvent, RepeatedEvent
from farthing.ledger import Ledger
from farthing.losses import Gradient
from farthing.mechanisms import Gaussian
from farthing.query import Query, Receipt, Step
from farthing.samplers import OneRecord

_REPLACED = Adjacency.REPLACE_ONE
_SET_ASIDE = 1e-3  # of δ, for a party that has fewer turns of its own than expected


def sgd1(
    ledger: Ledger,
    problem: Problem,
    *,
    lipschitz: float | None = None,
    radius: float = 1.0,
    convexity: float = 0.0,
    exact: bool = False,
    start: ArrayLike | None = None,
) -> Iterator[Step]:
    """n² iterations on one record each. ``radius`` is that of C, ``convexity`` Δ, ``lipschitz`` L.

    Raises `BudgetSpent` before the first where n² of them do not fit the budget before its observer.
    """
    n, budget, features, ball = problem.records, ledger.budget, problem.rows(), Ball(radius)
    if budget.observer not in (Observer.COORDINATOR, Observer.ANYONE):
        raise InvalidValue(
            f"observer must be 'coordinator' or 'anyone', got {str(budget.observer)!r}: the server of SGD1 "
            "is its coordinator and knows every draw"
        )
    clip = lipschitz_of(problem, features, lipschitz)
    convexity = validate.non_negative(convexity=convexity)
    w = ball.start(start, problem.zeros(features.size))
    draw = OneRecord(n)
    if exact:
        noise = calibrate.noise(
            lambda noise: RepeatedEvent(draw.amplify(GaussianEvent(noise), budget.observer), n * n), budget
        )
    else:
        noise = sgd1_noise(n, clip, budget.epsilon, budget.delta) / (n * clip)
    square = (n * clip) ** 2 * (1 + w.size * noise**2)
    query = Query(draw, Gradient(problem.loss, features), ClipNorm(clip), Gaussian(noise))
    ledger.promise(query, n * n)
    receipts: list[Receipt] = []
    for t in range(1, n * n + 1):
        answer = ledger.ask(query, w)
        receipts.append(answer.receipt)
        gradient = n * (answer.value + convexity * w)
        w = ball.project(w - ball.length(t, square, convexity * n) * gradient)
        if t % n == 0:
            yield Step(t, features.unfold(w), tuple(receipts))
            receipts.clear()


def sgd1_noise(n: int, lipschitz: float, epsilon: float, delta: float) -> float:
    """σ by (3), stated for 0 < ε < 1 and δ < 1/n³."""
    n, lipschitz = validate.count(n=n), validate.positive(lipschitz=lipschitz)
    if not validate.positive(epsilon=epsilon) < 1:
        raise InvalidValue(f"epsilon must be below 1 for SGD1's noise, got {epsilon!r}: use exact=True")
    if not validate.probability(delta=delta) < 1 / n**3:
        raise InvalidValue(f"delta must be below 1/n³ = {1 / n**3:g} for SGD1's noise, got {delta!r}")
    return 4 * lipschitz * n * math.log(1.25 * n * n / delta) / epsilon


def sgd1_guarantees(
    n: int, lipschitz: float, epsilon: float, delta: float, held: int = 0
) -> tuple[Guarantee, Guarantee]:
    """What n² iterations with the σ claimed for (ε, δ) give: before the coordinator, and everybody else.

    ``held`` is how many of the n records belong to the party that looks (others' records are protected from
    it); 0 is somebody who owns none.
    """
    noise = sgd1_noise(n, lipschitz, epsilon, delta) / (n * lipschitz)
    if held and not validate.count(held=held) < n:
        raise InvalidValue(f"held must be below n={n}, got {held!r}: there must be somebody else's records")
    step, draw = GaussianEvent(noise), OneRecord(n)
    seen = RepeatedEvent(draw.amplify(step, Observer.COORDINATOR), n * n)
    iterations, aside = _others(n, held, delta * _SET_ASIDE) if held else (n * n, 0.0)
    hidden = RepeatedEvent(OneRecord(n - held).amplify(step), iterations)
    most = pld.epsilon(seen, delta, _REPLACED)
    least = min(most, pld.epsilon(hidden, delta - aside, _REPLACED))  # who knows less can tell no more
    knows = f"a party that holds {held} of {n} records" if held else "knows none of the draws"
    return (
        _guarantee(most, delta, Observer.COORDINATOR, "Cheng et al. 2020, Thm. 1", "knows every draw"),
        _guarantee(least, delta, Observer.ANYONE, "Zhu, Dong & Wang 2022, Thm. 10 and 11", knows),
    )


def _others(n: int, held: int, failure: float) -> tuple[int, float]:
    """How often others' records are drawn in n² iterations at most, but for a probability <= ``failure``."""
    low, high = 0, n * n
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if bdtrc(middle, n * n, 1 - held / n) <= failure else (middle, high)
    return high, float(bdtrc(high, n * n, 1 - held / n)) * (1 + 1e-9) if high < n * n else 0.0


def _guarantee(epsilon: float, delta: float, observer: Observer, theorem: str, note: str) -> Guarantee:
    return Guarantee(epsilon, delta, _REPLACED, Unit.RECORD, observer, "pld", theorem, note)
