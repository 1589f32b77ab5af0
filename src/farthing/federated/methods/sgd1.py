"""Train by SGD1: parties compute in turn, one record at a time, and every noisy gradient is broadcast.

"Multi-party DP Write-up 2: Stochastic Gradient Descent", Algorithm SGD1 (its numbers in brackets): B draws
π₁, π₂, ... uniformly from all n records, n² of them [1]; in iteration i the owner of record π(i) computes
G = n ∇l(θ; d) + z with z ~ N(0, σ²)^p [2, 3], B broadcasts G [4], and all move to Π(θ - η(i) G) [3, 5].

    σ = 4 L n ln(1.25 n²/δ) / ε  (3),     η(t) = |C| / √(t (n² L² + p σ²))  (4), or 1/(Δ n t).

**Roles** differ from the write-up in two ways. In the write-up B draws π itself. Here B draws the *owner*,
party i with probability n_i/n, and the owner draws among its own n_i records (`SequentialClients`): π has the
same distribution, and B learns only which party was asked. In the write-up θ is never sent: every party holds
it, makes each step itself and gets every G from B. Here B makes the steps and sends θ to the one party that
it asks. θ is a function of θ₀, η and the G's, so no party learns more from it, and a party that is not asked
learns less. In both versions B returns θ in the end.

**The guarantee depends on the observer** (`sgd1_guarantees`). The printed proof gives (ε, δ + δ^(1/3)), and
its constant is too small for the sensitivity 2nL of G to replacing a record. These guarantees hold when a
record is replaced:

* *coordinator*, who knows π as in the write-up: nothing is amplified, δ = E δ_Gauss(2nL√K/σ) over
  K ~ Bin(n², 1/n), the number of times that the record was drawn (condition on π; the hockey-stick divergence
  is jointly convex). At ε = 0.5 and δ = 1/(2n³) the claim fails against this observer from n = 132 on;
* *server*, who knows which party was asked when: T ~ Bin(n², n_i/n) draws of one in n_i, δ = E δ_T(ε) over T.
  It equals the coordinator's for a party with one record, and the next one for a party with all records;
* *anyone*, who sees every G and no draw: n² draws of one in n. A party knows when it was asked itself, so
  against a party with k records the other records are drawn 1 in n - k, in the other iterations (``held``).

Each party's own ledger charges every answer before it is released, against a server (or a coordinator, with
``seen``), as one record of n_i that the party drew itself. Its (ε, δ) therefore holds for any choice and
order of parties by B, and the party stops by itself. Only the last of the three guarantees assumes that B
draws fairly and does not reveal the order.

**If a party is absent** its turn passes: B draws no other party in its place, so no party is drawn more often
than planned, and B broadcasts G = z, noise alone. A visibly skipped turn would reveal that an absent party
was drawn, and every other turn that a present one was: a record of a present party would be drawn 1 in m (the
number of records present) and not 1 in n; with one party left, *anyone* would know its turns like the server.
With G = z the absent records are blank: every G is a mixture over n records, of which some have gradient 0,
also if the observer knows which parties are absent. All three guarantees therefore hold for every pattern of
absence that does not depend on records. *Anyone* sees the G's, not how long B waited for each. A party is
asked T times; before the first question every party must afford an upper bound on T, which fails with
probability at most a thousandth of the least δ. The guarantee of `anyone` includes that probability (a run
that ends early reveals whose budget ended). Steps carry no receipts, which would reveal the party that was
asked.

``exact`` takes the least σ that all budgets allow, not (3). Other differences from the write-up: gradients
are clipped to L, which is not trusted to be a Lipschitz constant; C is a ball, and θ₀ is its centre or given,
instead of drawn; ``convexity`` Δ makes the loss of a record Δ-strongly convex by a public term Δ|θ|²/2, whose
gradient needs no noise. |C| is the diameter. The method is sequential, about 0.2 ms an iteration, so it suits
n in the hundreds; it yields a `Step` every n iterations.

>>> import numpy as np
>>> import farthing as ft
>>> from farthing.linear.losses import logistic
>>> noise = sgd1_noise(200, 1.0, 0.5, 1 / (2 * 200**3)) / 200
>>> for guarantee in sgd1_guarantees([100, 50, 50], noise, 1 / (2 * 200**3)):
...     print(guarantee.observer, round(guarantee.epsilon, 4))
coordinator 0.6053
server 0.053
anyone 0.0368
>>> x = np.linspace(-1, 1, 30)[:, None]
>>> budget = ft.Budget(0.5, 1 / (2 * 30**3), "replace-one")
>>> clients = ft.federated.Simulated.split(x, 1.0 * (x[:, 0] > 0), records=[20, 10], budgets=budget)
>>> run = ft.run(sgd1(clients, Problem(logistic, 30, 1, unit=False)))
>>> run.steps, int(clients.done.sum()), clients.spent(0).epsilon < clients.spent(1).epsilon < 0.1
(900, 900, True)
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from numpy.typing import ArrayLike
from scipy.special import bdtr, bdtrc

from farthing import validate
from farthing.accounting import pld
from farthing.accounting.inversion import smallest
from farthing.budget import Adjacency, Guarantee, Observer, Unit
from farthing.errors import BudgetSpent, InvalidValue
from farthing.federated.methods.server import L2Projection, lipschitz_of
from farthing.federated.protocol import Clients, Exactly, Invitation, SequentialClients, least_noise
from farthing.linear.losses import LinearGradient
from farthing.linear.problem import Problem
from farthing.queries.events import GaussianEvent, RepeatedEvent
from farthing.queries.query import Step, until_spent
from farthing.queries.samplers import OneRecord

_REPLACED = Adjacency.REPLACE_ONE
_SET_ASIDE = 1e-3  # the part of δ for turns beyond the planned number
_ONE = Exactly(1)


def sgd1(
    clients: SequentialClients,
    problem: Problem,
    *,
    lipschitz: float | None = None,
    radius: float = 1.0,
    convexity: float = 0.0,
    exact: bool = False,
    noise_multiplier: float | None = None,
    lr: Callable[[int], float] | None = None,
    seen: bool = False,
    start: ArrayLike | None = None,
) -> Iterator[Step]:
    """Train by SGD1: n² iterations, each on one record of one party.

    Parameters
    ----------
    clients : SequentialClients
        Parties that can be asked one at a time; they are invited here.
    problem : Problem
        The loss and the public numbers of the table.
    lipschitz : float, optional
        L, the clipping norm of gradients; by default from the loss and the largest row norm.
    radius : float, default 1.0
        The radius of C, the ball that steps are projected onto.
    convexity : float, default 0.0
        Δ, which makes the loss strongly convex.
    exact : bool, default False
        Whether to take the least noise that all budgets allow, in place of (3).
    noise_multiplier : float, optional
        σ/(nL), in place of the noise of (3) and of ``exact``.
    lr : callable, optional
        η(t), in place of (4) or 1/(Δ n t).
    seen : bool, default False
        Whether every budget must hold even against an observer who knows which records were drawn.
    start : array_like, optional
        θ₀, which must be public; by default the centre of C.

    Returns
    -------
    Iterator of Step
        A step every n iterations, without receipts, which would reveal the party that was asked.

    Raises
    ------
    BudgetSpent
        Before the first iteration, if a party cannot afford its part of the iterations.

    Notes
    -----
    The module's docstring states the guarantees and the deviations from the write-up.
    """
    features, projection = problem.rows(), L2Projection(radius)
    clip = lipschitz_of(problem, features, lipschitz)
    convexity = validate.non_negative(convexity=convexity)
    w = projection.start(start, problem.zeros(features.size))
    n, invitation = int(clients.records.sum()), _invitation(clients, clip, exact, noise_multiplier, seen)
    clients.invite(invitation)
    assert invitation.noise_multiplier is not None
    square = (n * clip) ** 2 * (1 + w.size * invitation.noise_multiplier**2)
    gradient = LinearGradient(problem.loss, features)

    @until_spent
    def iterations() -> Iterator[Step]:
        theta = w
        for t in range(1, n * n + 1):
            length = validate.positive(lr=lr(t)) if lr else projection.length(t, square, convexity * n)
            got = clients.ask_one(clients.pick(), gradient, theta)
            moved = n * (got.mean + convexity * theta)
            theta = projection.project(theta - length * moved)
            if t % n == 0:
                yield Step(t, features.unfold(theta))

    yield from iterations()


def _invitation(
    clients: SequentialClients, clip: float, exact: bool, noise: float | None, seen: bool
) -> Invitation:
    """Return the invitation with one noise for all parties: given, by (3), or the least that all afford."""
    n, local = int(clients.records.sum()), Invitation(clip, _ONE, seen=seen)
    failure = _SET_ASIDE * min(budget.delta for budget in clients.budgets) / len(clients)
    kinds = {
        (replace(budget, observer=local.observer), size)
        for budget, size in zip(clients.budgets, clients.records.tolist(), strict=True)
    }
    turns = {size: _at_most(n * n, size / n, failure)[0] for _, size in kinds}
    if noise is not None:
        noises = [validate.positive(noise_multiplier=noise)]
    elif exact:
        noises = [least_noise(replace(local, rounds=turns[size]), budget, size) for budget, size in kinds]
    else:
        noises = [sgd1_noise(n, clip, budget.epsilon, budget.delta) / (n * clip) for budget, _ in kinds]
    invitation = replace(local, noise_multiplier=max(noises))
    for budget, size in kinds:
        if (afforded := invitation.terms(budget, size).rounds) < turns[size]:
            raise BudgetSpent(
                f"a party with {size} of {n} records may be asked {turns[size]} times, and its {budget} "
                f"affords {afforded}: nothing was asked"
            )
    return invitation


def sgd1_noise(n: int, lipschitz: float, epsilon: float, delta: float) -> float:
    """Return σ by (3), stated for 0 < ε < 1 and δ < 1/n³."""
    n, lipschitz = validate.count(n=n), validate.positive(lipschitz=lipschitz)
    if not validate.positive(epsilon=epsilon) < 1:
        raise InvalidValue(
            f"epsilon must be below 1 for SGD1's noise, got {epsilon!r}: take the least noise (exact=True)"
        )
    if not validate.probability(delta=delta) < 1 / n**3:
        raise InvalidValue(f"delta must be below 1/n³ = {1 / n**3:g} for SGD1's noise, got {delta!r}")
    return 4 * lipschitz * n * math.log(1.25 * n * n / delta) / epsilon


class Guarantees(NamedTuple):
    """The guarantees of n² iterations for a replaced record, one per observer."""

    coordinator: Guarantee  # knows every draw
    server: Guarantee  # knows which party was asked when
    anyone: Guarantee  # knows neither


def sgd1_guarantees(
    sizes: Sequence[int], noise: float, delta: float, *, of: int = 0, held: int = 0
) -> Guarantees:
    """Return the guarantees of a record of party ``of``, if B draws fairly, independently of its ledger.

    ``sizes`` are all parties' numbers of records and ``noise`` is σ/(nL). ``held`` is the number of records
    that the observer *anyone* holds itself.
    """
    if not sizes or not 0 <= of < len(sizes):
        raise InvalidValue(f"of must name one of {len(sizes)} parties, got {of!r}")
    n, mine = sum(validate.count(sizes=size) for size in sizes), int(sizes[of])
    if held and not validate.count(held=held) < n:
        raise InvalidValue(f"held must be below n={n}, got {held!r}: other parties must have records")
    step, delta = GaussianEvent(noise), validate.probability(delta=delta)
    seen = RepeatedEvent(OneRecord(n).amplify(step, Observer.COORDINATOR), n * n)
    most = pld.epsilon(seen, delta, _REPLACED)
    turns = min(most, _turns(n, mine, step, delta))  # an observer with less knowledge distinguishes no more
    iterations, missed = _at_most(n * n, 1 - held / n, delta * _SET_ASIDE) if held else (n * n, 0.0)
    early = delta * _SET_ASIDE if len(sizes) > 1 else 0.0
    hidden = RepeatedEvent(OneRecord(n - held).amplify(step), iterations)
    least = pld.epsilon(hidden, delta - missed - early, _REPLACED)
    least = min(turns, least)
    knows = f"a party that holds {held} of {n} records" if held else "knows none of the draws"
    pairs = "Zhu, Dong & Wang 2022, Thm. 10 and 11"
    return Guarantees(
        _guarantee(most, delta, Observer.COORDINATOR, "Cheng et al. 2020, Thm. 1", "knows every draw"),
        _guarantee(turns, delta, Observer.SERVER, pairs, f"knows the turns of a party with {mine} records"),
        _guarantee(least, delta, Observer.ANYONE, pairs, knows),
    )


def sgd1_published(clients: Clients, noise: float, client: int, rounds: int) -> Guarantees:
    """Return the guarantees that noise σ/(nL) gives a record of party ``client``, by observer."""
    return sgd1_guarantees(clients.records.tolist(), noise, clients.budgets[client].delta, of=client)


def _turns(n: int, mine: int, step: GaussianEvent, delta: float) -> float:
    """Return ε with E δ_T(ε) <= δ over T ~ Bin(n², mine/n), with T rounded up to the end of its block."""
    if mine in (1, n):  # every turn draws the record, or every iteration is a turn
        event = OneRecord(n).amplify(step, Observer.COORDINATOR if mine == 1 else Observer.SERVER)
        return pld.epsilon(RepeatedEvent(event, n * n), delta, _REPLACED)
    rate, event = mine / n, OneRecord(mine).amplify(step)
    deviation = math.sqrt(n * n * rate * (1 - rate))
    last, missed = _at_most(n * n, rate, delta * _SET_ASIDE)
    tops = {round(n * mine + deviation * k / 3) for k in range(-12, 30)}
    ends = [*sorted(top for top in tops if 0 < top < last), last]
    below = [0.0, *(float(bdtr(end, n * n, rate)) for end in ends)]
    weights = [high - low for low, high in itertools.pairwise(below)]

    def excess(epsilon: float) -> float:
        parts = (pld.delta(RepeatedEvent(event, end), epsilon, _REPLACED) for end in ends)
        return sum(w * part for w, part in zip(weights, parts, strict=True)) + missed - delta

    low, high = (
        pld.epsilon(RepeatedEvent(event, end), delta - missed, _REPLACED) for end in (n * mine, last)
    )
    return smallest(excess, 0.9 * low, high, 1e-4)


def _at_most(times: int, rate: float, failure: float) -> tuple[int, float]:
    """Return an upper bound on a binomial count, and the probability <= ``failure`` that it is exceeded."""
    if rate == 1.0:
        return times, 0.0
    low, high = 0, times
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if bdtrc(middle, times, rate) <= failure else (middle, high)
    return high, float(bdtrc(high, times, rate)) * (1 + 1e-9) if high < times else 0.0


def _guarantee(epsilon: float, delta: float, observer: Observer, theorem: str, note: str) -> Guarantee:
    return Guarantee(epsilon, delta, _REPLACED, Unit.RECORD, observer, "pld", theorem, note)
