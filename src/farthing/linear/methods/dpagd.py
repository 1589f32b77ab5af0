"""Train by DP-AGD: a noisy line search decides how much budget each gradient gets.

Lee & Kifer, "Concentrated Differentially Private Gradient Descent with Adaptive per-Iteration Privacy
Budget", KDD 2018, Algorithm 2 (its lines in brackets below). A round buys a noisy gradient [5-7], lets
`NoisyMax` choose a step along it [10-12] and takes it [14]. If no step helps (the step 0 wins), the gradient
is measured again for a part γ of its price and averaged with the first by inverse variance, and every later
one is bought at the higher precision [16-19, `GradAvg` 25-29].

Guarantee: zCDP composes fully adaptively up to a ρ fixed in advance (Whitehouse et al. 2023, Thm. 1), so any
run within `ZcdpFilter` is (ε, δ)-DP by Canonne et al. 2020, Prop. 12, for any adaptive choices. Use that
filter: the GDP filter charges six times as much for Gumbel noise. Under add-remove and zero-out a Gaussian
answer costs 1/(2 noise²), a choice ε²/8 with Gumbel noise or ε²/2 with Laplace; a record's scores -loss lie
in [-C, 0], so it can only lower them and changes the gap of two by at most C. Replace-one costs four times as
much. Noise is derived from the price, so under replace-one a run keeps its rounds and doubles its noise.

On batches (``sampling_rate``; the public code's ``batch_size``) every gradient and every choice has its own
Poisson batch. ρ sets the noise as for a query to all records; the charge is that of the answer on the batch,
through an `RdpFilter` with orders fixed in advance (Feldman & Zrnic 2021), so that noise may be adaptive
there too. A gradient is a subsampled Gaussian (Zhu et al. 2022, Thm. 11); for a choice see `RdpFilter`. A
ledger with a menu (`dpagd_menu`) allows the same at a lower price, and the menu sets the noise. Add-remove
and zero-out only: no price of a choice on a batch is known here for replace-one.

Differences from the paper (arguments restore each of them except the first two):

* gradients are averaged un-normalised, as in the public code; the pseudocode would average unit vectors;
* ρ is that of the filter, by the tight conversion, 1.3 to 1.6 times the closed form of the paper's (5) [2]
  (which is ``rho=budget.rho``);
* an answer that does not fit the remaining budget is not given [3, 14]; the paper buys it and takes no step;
* a choice is made with Gumbel noise instead of Laplace;
* 10 candidates beside 0 instead of 20: as accurate, and faster;
* ``opening``, a part of the budget, first buys the mean c of the rows. Rows are centred at it, and feature j
  is multiplied by (c(1-c) + τ)^-½. Without centring, the direction of the mean has most of the curvature and
  limits every line search. τ is 0.003, or half the standard deviation of c if that is larger;
* a direction is the gradient plus ``momentum`` times the last direction (heavy ball). If no step helps, the
  momentum is dropped first, and only then is a gradient measured again;
* ``penalty`` is a term of the objective, in gradients and in the scores of steps, where the public code adds
  reg_coeff · w to a gradient of norm 1. It depends on public numbers only and costs no budget;
* the released weights are an average of iterates that favours late ones (Shamir & Zhang 2013, Section 4).

Measuring again brings nothing with these defaults: it happens in 0 to 3 of some 17 rounds, and
``growth=None``, which never does it, is as accurate on five tables (docs/methods-results.md has the figures).

The defaults are the same for every budget. They were chosen by held-out accuracy on Adult, BANK and IPUMS-BR
at ε from 0.05 to 1.6, where accuracy is flat around them.

>>> import farthing as ft
>>> from farthing.accounting.filters import ZcdpFilter
>>> from farthing.linear.losses import logistic
>>> X = np.repeat([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]], 2000, axis=0)
>>> table = Table(X, X[:, 0], unit=True)
>>> ledger = ft.Ledger(ft.Budget(1.0, 1e-6), filter=ZcdpFilter)
>>> u, constant = ft.run(dpagd(ledger.over(table), Problem(logistic, len(table), 2))).w
>>> bool(u[0] > 0), ledger.share <= 1
(True, True)
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.accounting import zcdp
from farthing.budget import Budget
from farthing.data.tables import Features, Table
from farthing.errors import InvalidValue, Unsupported
from farthing.ledger.ledger import Ledger
from farthing.linear.budget_schedule import Limited, Pricing, at_price
from farthing.linear.losses import LinearGradient, Loss, Total
from farthing.linear.methods.dpagd_menu import of_menu, on_menu, sold
from farthing.linear.problem import Problem
from farthing.noise.summing import Sum
from farthing.queries.bounds import ClipNorm, ClipValue, Kind
from farthing.queries.mechanisms import Gaussian, NoisyMax
from farthing.queries.query import Query, Receipt, Step, until_spent
from farthing.queries.samplers import Everyone

Array = NDArray[np.float64]


class Ray(NamedTuple):
    """Candidates w - step · direction, one per step."""

    w: Array
    direction: Array
    steps: Array


@dataclass(frozen=True, slots=True)
class RayScores:
    """-Σ loss at the candidates of a `Ray`, with clamped terms (`ClipValue`), minus ``penalty`` |w|²/2.

    Margins along a ray are those at its start minus step times those of its direction: one pass over the
    table serves all candidates.
    """

    loss: Loss
    features: Features
    penalty: float = 0.0
    honours: ClassVar[tuple[str, ...]] = (Kind.VALUE,)
    shape: ClassVar[None] = None

    def bounded_sum(self, records: Table, w: Ray, bound: ClipValue) -> Array:
        start, direction, steps = w
        u, constant = self.features.unfold(np.column_stack([start, direction]))
        total, half = Sum(len(records), (len(steps),)), len(constant) // 2
        for block in records.blocks(self.features):
            with np.errstate(over="ignore", invalid="ignore"):
                margins = block.margins(u, constant)
                here, along = margins[:, :half], margins[:, half:]
                if start.ndim == 1:
                    values = self.loss.value(here - along * steps, block.y)
                else:
                    moved = [self.loss.value(here - step * along, block.y) for step in steps]
                    values = np.column_stack(moved)
                total.add(bound.apply(-values).sum(axis=0), len(values))
        if not self.penalty:
            return total.value
        return total.value - self.penalty / 2 * np.array(
            [np.sum((start - s * direction) ** 2) for s in steps]
        )


@dataclass(frozen=True, slots=True)
class Lengths:
    """The step lengths to try: 0 and ``count`` equal parts of a longest one, updated every ``period`` steps.

    The longest is ``longest`` at first, then ``growth`` times the longest chosen in the last period, at most
    ``longest`` (as in the public code). The paper's count is 20.
    """

    count: int = 10
    longest: float = 2.0
    growth: float = 1.1
    period: int = 10

    def __post_init__(self) -> None:
        validate.count(count=self.count)
        validate.count(period=self.period)
        validate.positive(longest=self.longest)
        validate.positive(growth=self.growth)

    def after(self, chosen: list[float]) -> Array:
        """Return the lengths to try after those ``chosen`` so far."""
        last = len(chosen) // self.period * self.period
        recent = chosen[max(0, last - self.period) : last]
        longest = min(self.growth * max(recent), self.longest) if recent else self.longest
        return np.linspace(0.0, longest, self.count + 1)


def paper_splits(budget: Budget, splits: int = 60, rho: float | None = None) -> tuple[float, float]:
    """Return ``splits`` and ``search`` of `dpagd` for the paper's prices: ε' = ε/(2 splits) per answer.

    A choice then costs ε'²/2 and a gradient ε'²/(4 ln(1.25/δ)), that of noise √(2 ln(1.25/δ)) C/ε', so that
    its 60 splits are about 600 rounds, and 97 % of the budget goes into choices. ``rho`` is that of `dpagd`.

    >>> splits, search = paper_splits(Budget(0.1, 1e-8))
    >>> round(splits), round(search, 3)
    (586, 0.974)
    """
    part = budget.epsilon / (2 * validate.count(splits=splits))
    choice, gradient = part**2 / 2, part**2 / (4 * math.log(1.25 / budget.delta))
    rho = zcdp.rho_tight(budget.epsilon, budget.delta) if rho is None else validate.positive(rho=rho)
    return rho / (choice + gradient), choice / (choice + gradient)


@until_spent
def dpagd(
    ledger: Ledger,
    problem: Problem,
    *,
    splits: float = 18.0,
    search: float = 0.2,
    growth: float | None = 0.1,
    clip_norm: float | None = None,
    objective_clip: float | None = None,
    grid: Lengths = Lengths(),  # noqa: B008  frozen
    choice_noise: Literal["gumbel", "laplace"] = "gumbel",
    opening: float = 0.05,
    momentum: float = 0.7,
    averaging: float | None = 3.0,
    radius: float | None = math.sqrt(2),
    sampling_rate: float | None = None,
    penalty: float = 0.0,
    rho: float | None = None,
    published_splits: int | None = None,
) -> Iterator[Step]:
    """Take steps of privately chosen length along noisy gradients until the budget is spent.

    Parameters
    ----------
    splits : float, default 18
        The number of rounds that the budget pays for if no gradient is measured again; a menu has its own.
    search : float, default 0.2
        The share of a round's price that pays for choosing the step, from 0 to below 1.
    growth : float or None, default 0.1
        γ of the paper: the price increase for a gradient along which no step helps. None takes a fresh
        gradient at the same price instead.
    clip_norm : float, optional
        C_grad, the largest norm of a record's gradient. None: half of the largest possible norm.
    objective_clip : float, optional
        C_obj, the largest loss of a record. None: 4 + ln(K/2) for K classes.
    grid : Lengths, default Lengths()
        The step lengths to choose among.
    choice_noise : {"gumbel", "laplace"}, default "gumbel"
        The noise of a choice; the paper's is Laplace.
    opening : float, default 0.05
        The share of the budget that first buys the mean of the rows. 0 leaves it out.
    momentum : float, default 0.7
        The fraction of the last direction that is kept, from 0 to below 1.
    averaging : float or None, default 3.0
        How strongly the average of iterates favours late ones. None returns the last iterate.
    radius : float or None, default √2
        Longer rows z are shrunk to this norm. None shrinks no row.
    sampling_rate : float, optional
        The probability that a record is in a Poisson batch; the ledger then needs an `RdpFilter`, or a menu
        made by `dpagd_menu`. None uses all records.
    penalty : float, default 0
        λ of mean loss + λ|w|²/2, over the weights on z including the constant (on x itself with
        ``opening=0``).
    rho : float, optional
        The zCDP budget of the run. None: all that the budget allows; ``ledger.budget.rho`` is the paper's
        (5).
    published_splits : int, optional
        Sets ``splits`` and ``search`` to the paper's prices (`paper_splits`). The paper's own settings are
        ``published_splits=60``, ``grid=Lengths(20)``, ``choice_noise="laplace"``, ``opening=0``,
        ``momentum=0``, ``averaging=None``, ``radius=None``, ``clip_norm=3``, ``objective_clip=3``.
    """
    if published_splits is not None and sampling_rate is not None:
        raise InvalidValue("published_splits needs all records: leave out published_splits or sampling_rate")
    if published_splits is not None:
        splits, search = paper_splits(ledger.budget, published_splits, rho)
    loss, constant = problem.loss, float(problem.intercept)
    longest = math.hypot(problem.radius, constant) if radius is None else validate.positive(radius=radius)
    if math.isinf(loss.slope) and clip_norm is None:
        raise Unsupported("a loss of unbounded slope needs clip_norm; for squared loss use linear regression")
    for name, part in (("opening", opening), ("momentum", momentum), ("search", search)):
        if not validate.non_negative(**{name: part}) < 1:
            raise InvalidValue(f"{name} must be below 1, got {part!r}")
    if objective_clip is None:
        objective_clip = 4 + math.log(max(problem.outputs, 2) / 2)
    if averaging is not None:
        validate.non_negative(averaging=averaging)
    # everything is checked before the opening is charged
    short = ClipNorm(
        loss.slope * longest / 2 if clip_norm is None else validate.positive(clip_norm=clip_norm)
    )
    low, chooser = (
        ClipValue(-validate.positive(objective_clip=objective_clip), 0.0),
        NoisyMax(1.0, choice_noise),
    )
    pricing, growth = (
        Pricing.of(ledger.budget, sampling_rate, rho),
        None if growth is None else validate.positive(growth=growth),
    )
    shrinks = validate.non_negative(penalty=penalty) * problem.records * (sampling_rate or 1.0)
    limited, total = Limited(ledger, pricing), _total(problem, pricing, opening)
    plain = Features(problem.width, intercept=constant, radius=radius)
    gradient = Query(Everyone(), LinearGradient(loss, plain), short, Gaussian(1.0))
    choice = Query(Everyone(), RayScores(loss, plain, shrinks), low, chooser)
    if on_menu(ledger, sampling_rate) and sampling_rate is not None:
        exactness, search_price = of_menu(ledger, sampling_rate)
    else:
        parts = [(gradient, 1 - search), (choice, validate.positive(search=search))]
        each = pricing.each(parts, splits, total)
        exactness, search_price = (1 - search) * each, search * each  # rho_ng, rho_nmax
    features, receipts = (plain, []) if total is None else _features(limited, problem, total, radius)
    gradient = replace(gradient, contribution=LinearGradient(loss, features))
    choice = pricing.query(replace(choice, contribution=RayScores(loss, features, shrinks)), search_price)
    w = problem.zeros(features.size)
    average, memory, chosen = w, np.zeros_like(w), list[float]()
    while True:
        answer = limited.ask(pricing.query(gradient, exactness), w)  # [5-7]
        known, receipts = answer.value, [*receipts, answer.receipt]
        while True:
            direction = known + shrinks * w + memory
            unit = direction / max(float(np.linalg.norm(direction)), 1e-300)  # [8]
            steps = grid.after(chosen)
            picked = limited.ask(choice, Ray(w, unit, steps))  # [10-12]
            receipts.append(picked.receipt)
            if picked.value > 0:
                break
            if np.any(memory):
                memory = np.zeros_like(memory)
                continue
            more = exactness if growth is None else growth * exactness  # [16-19]
            again = limited.ask(pricing.query(gradient, more), w)
            receipts.append(again.receipt)
            if growth is None:
                known = again.value
                continue
            known = (exactness * known + more * again.value) / (exactness + more)
            if sold(ledger, pricing.query(gradient, exactness + more)):
                exactness += more
        chosen.append(float(steps[picked.value]))
        w, memory = w - chosen[-1] * unit, momentum * direction  # [14]
        t = len(chosen)
        weight = 1.0 if averaging is None else (averaging + 1) / (t + averaging)
        average = (1 - weight) * average + weight * w
        yield Step(t, features.unfold(average), tuple(receipts))
        receipts = []


def _total(problem: Problem, pricing: Pricing, opening: float) -> Query | None:
    """Return the query that ``opening`` pays for: the sum of all rows."""
    if opening == 0:
        return None
    # rows that need not have norm 1 are shrunk to it; a constant beside them shows by how much
    plain = Features(problem.width, intercept=0.0 if problem.unit else 1.0, radius=1.0)
    query = Query(Everyone(), Total(plain), ClipNorm(1.0), Gaussian(1.0))
    return at_price(query, opening * pricing.rho, pricing.rule)


def _features(
    limited: Limited, problem: Problem, total: Query, radius: float | None
) -> tuple[Features, list[Receipt]]:
    """Return the map of rows, centred and scaled by the mean that ``total`` buys, of norm ``radius``."""
    d, constant, answer = problem.width, float(problem.intercept), limited.ask(total)
    rows = problem.records if problem.unit else max(answer.value[-1], 1.0)
    mean = np.clip(answer.value[:d] / rows, 0.0, 1.0)
    spread = mean * (1 - mean) + max(0.003, 0.5 * _noise(total) / rows)
    scale = np.sqrt(spread.mean() / spread)
    return Features(d, mean if problem.intercept else 0.0, scale, constant, radius), [answer.receipt]


def _noise(query: Query) -> float:
    mechanism: Any = query.mechanism
    return float(mechanism.noise_multiplier)
