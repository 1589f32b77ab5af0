"""Check laws of prices: no event costs less than the divergence of its worst pair, by integration on a grid.

The oracle is elementary: two densities on the line, δ(ε) = ∫ (p - e^ε q)₊, in both directions; product
densities for two steps. It uses no code of the accountants.
"""

import itertools
import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from farthing.accounting import calibrate, pld
from farthing.accounting.filters import BasicFilter, Filter, GdpFilter, RdpFilter, ZcdpFilter
from farthing.budget import Adjacency, Budget, Observer
from farthing.noise import lattice
from farthing.queries.bounds import ClipNorm, ClipValue
from farthing.queries.events import (
    ApproximateEvent,
    DrawnEvent,
    Event,
    GaussianEvent,
    PureEvent,
    RepeatedEvent,
    ZcdpEvent,
)
from farthing.queries.mechanisms import Gaussian, Laplace, Mechanism, NoisyMax
from farthing.queries.query import PerExample, Query
from farthing.queries.samplers import Everyone, FixedSize, Poisson, Sampler

Array = NDArray[np.float64]

_REPLACED = Adjacency.REPLACE_ONE
_LINE = np.linspace(-14.0, 14.0, 2801)
_NOTHING = PerExample(lambda rows, w: rows[0])
_SLACK = 1e-3  # the error of the oracle's grid


def _density(mean: float, sigma: float) -> Array:
    return np.asarray(np.exp(-np.square((_LINE - mean) / sigma) / 2))


def _distance(first: Array, second: Array, epsilon: float, steps: int) -> float:
    """Return δ(ε) of densities on the grid, or of two independent copies of each; the larger direction."""
    p, q = (part / part.sum() for part in (first, second))
    if steps == 2:
        p, q = (np.outer(part[::4], part[::4]) for part in (p, q))
        p, q = p / p.sum(), q / q.sum()
    grown = math.exp(epsilon)
    return float(max(np.maximum(p - grown * q, 0.0).sum(), np.maximum(q - grown * p, 0.0).sum()))


def worlds(sampler: Sampler, mechanism: Mechanism, adjacency: Adjacency) -> tuple[Array, Array, Event]:
    """Return two densities at clipping norm 1 that a query's price must cover, and its price."""
    sigma = mechanism.noise_multiplier  # type: ignore[attr-defined]

    def at(mean: float) -> Array:
        if isinstance(mechanism, Laplace):
            return np.asarray(np.exp(-np.abs(_LINE - mean) / sigma))
        return _density(mean, sigma)

    order = 1 if isinstance(mechanism, Laplace) else 2
    event = Query(sampler, _NOTHING, ClipNorm(1.0, order=order), mechanism).price(
        Budget(1.0, 1e-5, adjacency)
    )
    other = -1.0 if adjacency is _REPLACED else 0.0
    match sampler:
        case Poisson(rate):
            return (1 - rate) * at(0.0) + rate * at(1.0), (1 - rate) * at(0.0) + rate * at(other), event
        case FixedSize(size, of):  # the other records pull the opposite way, and one of them is displaced
            rate = size / of
            return (1 - rate) * at(-size) + rate * at(2.0 - size), at(-size), event
    return at(1.0), at(other), event


def divergences() -> list[str]:
    """Check that prices cover their worst pairs."""
    cases: list[tuple[Sampler, Mechanism]] = [
        (Everyone(), Gaussian(1.0)),
        (Everyone(), Laplace(1.0)),
        (Poisson(0.3), Gaussian(0.9)),
        (Poisson(0.3), Laplace(1.0)),
        (FixedSize(1, 4), Gaussian(1.2)),
    ]
    complaints = []
    for sampler, mechanism in cases:
        for adjacency in (Adjacency.ADD_REMOVE, _REPLACED):
            if isinstance(sampler, Poisson) and isinstance(mechanism, Laplace) and adjacency is _REPLACED:
                continue  # refused: no theorem applies
            if isinstance(sampler, FixedSize) and adjacency is Adjacency.ADD_REMOVE:
                continue  # the pair above has equally many records in both worlds
            first, second, event = worlds(sampler, mechanism, adjacency)
            twice = isinstance(mechanism, Gaussian) and not isinstance(sampler, FixedSize)
            for steps in (1, 2) if twice else (1,):
                for epsilon in (0.3, 1.0)[: 3 - steps]:
                    truth = _distance(first, second, epsilon, steps)
                    priced = pld.delta(RepeatedEvent(event, steps), epsilon, adjacency)
                    if priced < truth * (1 - 20 * _SLACK * steps) - 1e-6:
                        what = f"{steps} x {type(mechanism).__name__} on {sampler}, {adjacency}"
                        complaints.append(f"{what}: δ({epsilon}) is {truth:.3g}, priced {priced:.3g}")
    return complaints


def gaussians() -> list[str]:
    """Check that T Gaussian answers cost what one with √T times the μ does (Balle & Wang 2018)."""
    complaints = []
    for noise, steps, adjacency in (
        (2.0, 1, Adjacency.ADD_REMOVE),
        (5.0, 9, Adjacency.ADD_REMOVE),
        (5.0, 9, _REPLACED),
    ):
        mu = math.sqrt(steps) * (2.0 if adjacency is _REPLACED else 1.0) / noise
        for epsilon in (0.1, 1.0, 3.0):
            truth = float(ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu))
            priced = pld.delta(RepeatedEvent(GaussianEvent(noise), steps), epsilon, adjacency)
            if priced < truth * (1 - 1e-9):
                complaints.append(f"{steps} x Gaussian({noise}), {adjacency}: δ({epsilon}) is {truth:.3g}")
    return complaints


def choices() -> list[str]:
    """Check that an exponential mechanism's probabilities, in closed form, satisfy the ε of its event."""
    complaints = []
    for low, high in ((-1.0, 0.0), (-1.0, 1.0), (0.0, 2.0)):
        bound, mechanism = ClipValue(low, high), NoisyMax(1.3)
        ends = [np.array([a, b, a, b]) for a in (low, high) for b in (low, high)]
        nothing = np.zeros(4)
        for adjacency, others in ((Adjacency.ADD_REMOVE, [nothing]), (_REPLACED, ends)):
            claimed = mechanism.event(bound, adjacency, False).epsilon  # type: ignore[union-attr]
            for one in ends:
                for other in others:
                    logs = [_log_softmax(part / (1.3 * bound.norm())) for part in (one, other)]
                    shown = float(np.ptp(logs[0] - logs[1]))  # the definition of bounded range
                    if shown > claimed * (1 + 1e-9):
                        complaints.append(f"NoisyMax on {bound}, {adjacency}: {shown:.3g} of {claimed:.3g}")
    return complaints


def election_grids() -> list[str]:
    """Check that a choice on its grid reveals no more than its event, however large the noise.

    Two scores of a pair of neighbours are tried at values where rounding changes their gap the most; ties and
    the rounding of Gumbel noise cost four cells more (`NoisyMax`).
    """
    complaints = []
    for low, high in ((-1.0, 0.0), (0.0, 1.0), (-1.0, 1.0), (0.9, 1.0)):
        bound = ClipValue(low, high)
        for noise, kind in ((0.5, "gumbel"), (1e3, "gumbel"), (1e6, "gumbel"), (1e6, "laplace")):
            mechanism = NoisyMax(noise, kind)  # type: ignore[arg-type]
            bits, cell = mechanism.grid(bound)
            for adjacency in (Adjacency.ADD_REMOVE, _REPLACED):
                claimed = mechanism.event(bound, adjacency, False).epsilon  # type: ignore[union-attr]
                came = [(a, b) for a in (low, high) for b in (low, high)]
                gone = [(0.0, 0.0)] if adjacency is Adjacency.ADD_REMOVE else came
                parts = np.linspace(-1.0, 1.0, 41) * cell
                for one, other in itertools.product(came, gone):
                    before = [lattice.on_grid(other[k] + parts, 1.0, cell) for k in (0, 1)]
                    after = [lattice.on_grid(one[k] + parts, 1.0, cell) for k in (0, 1)]
                    moved = [after[k] - before[k] for k in (0, 1)]
                    gap = max(int(a.max() - b.min()) for a, b in (moved, moved[::-1]))
                    shown = (gap + (4 if kind == "gumbel" else 0)) * 2.0**-bits
                    if shown > claimed * (1 + 1e-12):
                        complaints.append(f"the grid of {mechanism} on {bound} shows more than its event")
    return sorted(set(complaints))


def _log_softmax(scores: Array) -> Array:
    return np.asarray(scores - scores.max() - math.log(float(np.exp(scores - scores.max()).sum())))


def filters() -> list[str]:
    """Check by closed forms that the answers a filter allows are within the budget."""
    complaints = []
    for adjacency in (Adjacency.ADD_REMOVE, _REPLACED):
        budget = Budget(1.0, 1e-5, adjacency)
        shift = 2.0 if adjacency is _REPLACED else 1.0
        rules: list[Filter] = [GdpFilter(budget), ZcdpFilter(budget), RdpFilter(budget)]
        for rule in rules:
            mu = math.sqrt(_most(rule, GaussianEvent(20.0))) * shift / 20.0
            truth = float(ndtr(mu / 2 - 1.0 / mu) - math.e * ndtr(-mu / 2 - 1.0 / mu))
            if truth > budget.delta * (1 + 1e-9):
                complaints.append(f"the {rule.name} filter lets δ={truth:.3g} through, {adjacency}")
        basic = BasicFilter(Budget(1.0, 0.0, adjacency))
        if _most(basic, PureEvent(0.3)) > 3:
            complaints.append("the basic filter lets more than its ε through")
        if _most(BasicFilter(budget), ApproximateEvent(0.01, 3e-6)) > 3:
            complaints.append("the basic filter lets more than its δ through")
    return complaints + _wholes()


def _wholes() -> list[str]:
    """Check that a filter admits its whole budget, and refuses a millionth more."""
    complaints = []
    for epsilon, delta in ((1.0, 1e-6), (4.0, 1e-5), (0.4, 1e-5), (10.0, 1e-6), (0.3, 1e-7)):
        budget = Budget(epsilon, delta)
        basic, gdp, zcdp = BasicFilter(budget), GdpFilter(budget), ZcdpFilter(budget)
        for part in (1.0, 1.0 + 1e-6):
            fits = {
                basic.name: basic.fits(basic.add(basic.start(), ApproximateEvent(epsilon * part, delta))),
                gdp.name: gdp.fits(gdp.add(gdp.start(), GaussianEvent(1 / (gdp.mu * part)))),
                zcdp.name: zcdp.fits(zcdp.add(zcdp.start(), ZcdpEvent(zcdp.rho * part))),
            }
            wrong = [name for name, held in fits.items() if held is not (part == 1.0)]
            what = "the whole budget" if part == 1.0 else "more than the budget"
            verb = "refuses" if part == 1.0 else "lets through"
            complaints += [f"the {name} filter {verb} {what} {budget}" for name in wrong]
    return complaints


def _most(rule: Filter, event: Event) -> int:
    """Return how many answers a filter allows, one by one."""
    total, count = rule.start(), 0
    while rule.fits(total := rule.add(total, event)) and count < 100_000:
        count += 1
    return count


def countdowns() -> list[str]:
    """Check by closed forms that promised steps fit, and that observed draws amplify nothing."""
    complaints = []
    for adjacency in (Adjacency.ADD_REMOVE, _REPLACED):
        budget = Budget(1.0, 1e-5, adjacency)
        mu = (
            math.sqrt(calibrate.steps(GaussianEvent(20.0), budget))
            * (2.0 if adjacency is _REPLACED else 1.0)
            / 20
        )
        if float(ndtr(mu / 2 - 1 / mu) - math.e * ndtr(-mu / 2 - 1 / mu)) > budget.delta * (1 + 1e-9):
            complaints.append(f"more steps are counted than fit, {adjacency}")
        step = Poisson(0.2).amplify(GaussianEvent(3.0))
        if not calibrate.affordable(RepeatedEvent(step, calibrate.steps(step, budget)), budget):
            complaints.append(f"more sampled steps are counted than fit, {adjacency}")
    for sampler in (Poisson(0.2), FixedSize(1, 5)):
        if not isinstance(sampler.amplify(GaussianEvent(1.0), Observer.COORDINATOR), DrawnEvent):
            complaints.append(f"{sampler} amplifies against an observer of the draw")
    return complaints
