"""Central algorithms against their pseudocode, line by line: noise and draws are scripted, the rest is real.

Each reference is the paper's lines in plain numpy, one record after the other; a run of the library with the
same script must ask the same questions at the same points and prices and arrive at the same weights.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.special import expit

import farthing as ft
from farthing.accounting import pld
from farthing.accounting.filters import RdpFilter, ZcdpFilter
from farthing.data.tables import Table
from farthing.errors import BudgetSpent
from farthing.linear.losses import logistic, squared
from farthing.linear.methods.dpagd import Lengths, Ray, dpagd
from farthing.linear.methods.dpsgd import dpsgd
from farthing.linear.methods.functional import functional
from farthing.linear.methods.privgene import NoisyTop, privgene
from farthing.linear.problem import Problem
from farthing.noise.lattice import SeededStream
from farthing.queries.events import BoundedRangeEvent, GaussianEvent, PoissonEvent, RepeatedEvent
from farthing.queries.mechanisms import Gaussian, NoisyMax
from farthing.queries.query import Answer, Receipt
from farthing.queries.samplers import Poisson

RNG = np.random.default_rng(3)
X = RNG.random((60, 2))
Y = 1.0 * (X[:, 0] + 0.3 * RNG.normal(size=60) > X[:, 1])


def clipped(g, clip):
    return g / max(1.0, np.linalg.norm(g) / clip)


def gradient(w, rows, y, clip):
    """Σ of logistic gradients, each divided by max(1, norm / clip), in a loop."""
    each = [clipped((expit(z @ w) - t) * z, clip) for z, t in zip(rows, y, strict=True)]
    return sum(each, np.zeros(len(w)))


def objective(w, rows, y, clip):
    """Σ min(loss, clip)."""
    return np.minimum(np.log1p(np.exp(-(2 * y - 1) * (rows @ w))), clip).sum()


class Script:
    """Noise written down ahead, told to both sides in the order in which it is asked for."""

    def __init__(self, seed):
        self._rng, self.normals, self.races = np.random.default_rng(seed), [], []

    def normal(self, t, size):
        while len(self.normals) <= t:
            self.normals.append(self._rng.normal(size=size))
        return self.normals[t]

    def race(self, t, size):
        while len(self.races) <= t:
            self.races.append(self._rng.gumbel(size=size))
        return self.races[t]


# DP-AGD, Algorithm 2 of Lee & Kifer 2018


class Watched:
    """A real ledger, whose questions are written down."""

    def __init__(self, ledger):
        self.ledger, self.budget, self.asked = ledger, ledger.budget, []

    def ask(self, query, w):
        answer = self.ledger.ask(query, w)
        self.asked.append(SimpleNamespace(query=query, w=w, value=answer.value))
        return answer


def algorithm_2(script, rho, options, kind, rounds=1000, batches=None, shrinks=0.0):
    """Lines 1-29, with the line's number beside it; line 2's ρ is given.

    Line 14's check stands before every answer here: one that does not fit is not given. ``batches`` are the
    records of each answer in turn (all 60 if there are none), ``shrinks`` is the public code's reg_coeff, of
    the sum of a batch.
    """
    rho_nmax, rho_ng, gamma, c_grad, c_obj = options
    everyone, trace, draws, races = np.column_stack([X, np.ones(60)]), [], 0, 0
    w, longest, recent, t = np.zeros(3), 2.0, [], 0  # 1, 2

    def batch():
        drawn = np.arange(60) if batches is None else batches[len(trace)]
        return everyone[drawn], Y[drawn]

    def noisy(price):
        nonlocal draws, rho
        if price > rho:
            raise BudgetSpent
        rho -= price  # 7, 19
        draws += 1
        value = gradient(w, *batch(), c_grad)  # 5
        value = value + c_grad / math.sqrt(2 * price) * script.normal(draws - 1, 3)  # 6, 26
        trace.append(("gradient", price, w, value))
        return value

    try:
        while t < rounds:  # 3
            i = 0  # 4
            known = noisy(rho_ng)
            phi = np.linspace(0, longest, 21)
            while i == 0:  # 9
                direction = known + shrinks * w
                direction = direction / np.linalg.norm(direction)  # 8, and again after 18
                points, some = [w - alpha * direction for alpha in phi], batch()
                scores = [-objective(p, *some, c_obj) - shrinks / 2 * p @ p for p in points]  # 10
                # 12: ε' = √(2 ρ_nmax) for Laplace noise; Gumbel noise costs ε'²/8, so ε' = √(8 ρ_nmax)
                epsilon = math.sqrt((2 if kind == "laplace" else 8) * rho_nmax)
                cost = rho_nmax if kind == "gumbel" else epsilon * math.tanh(epsilon / 2)
                if cost > rho:
                    raise BudgetSpent
                rho -= cost  # 11
                i = int(np.argmax(np.array(scores) + c_obj / epsilon * script.race(races, 21)))
                races += 1
                trace.append(("choice", rho_nmax, w, i))
                if i > 0:  # 13
                    w = w - phi[i] * direction  # 14
                else:  # 15
                    rho_old, rho_ng = rho_ng, (1 + gamma) * rho_ng  # 16, 17
                    second = noisy(rho_ng - rho_old)  # 18, 25-29
                    known = (rho_old * known + (rho_ng - rho_old) * second) / rho_ng  # 27
            t += 1  # 22
            recent.append(phi[i])
            if t % 10 == 0:  # Φ anew, as in the public code
                longest, recent = min(1.1 * max(recent), 2.0), []
    except BudgetSpent:
        pass
    return w, t, trace


@pytest.mark.parametrize("kind", ["gumbel", "laplace"])
@pytest.mark.parametrize("search", [0.9, 0.3])
def test_dpagd_is_algorithm_2_to_its_last_farthing(monkeypatch, kind, search):
    """DP-AGD, lines 1-29: prices (6, 7, 11, 12, 19, 26), branches (13-18), Φ anew, the end (3, 14).

    The end is the ledger's own: what does not fit is refused before it is computed, and no step is taken.
    """
    script, drawn = Script(seed=9), {"normal": 0, "race": 0}

    def release(self, total, bound, stream, turn=0):
        drawn["normal"] += 1
        return total + self.noise_multiplier * bound.clip * script.normal(drawn["normal"] - 1, 3)

    def choose(self, total, bound, stream, turn=0):
        drawn["race"] += 1
        return int(
            np.argmax(total + self.noise_multiplier * bound.norm() * script.race(drawn["race"] - 1, 21))
        )

    monkeypatch.setattr(Gaussian, "release", release)
    monkeypatch.setattr(NoisyMax, "release", choose)
    ledger = ft.Ledger(ft.Budget(60.0, 1e-6), filter=ZcdpFilter, stream=SeededStream(0))
    watched, each = Watched(ledger.over(Table(X, Y))), ledger.filter.rho / 40
    paper = {"grid": Lengths(20), "opening": 0, "momentum": 0, "averaging": None, "radius": None}
    steps = list(
        dpagd(
            watched,
            Problem(logistic, 60, 2, unit=False),
            splits=40,
            search=search,
            growth=0.5,
            choice_noise=kind,
            clip_norm=0.4,
            objective_clip=1.5,
            **paper,
        )
    )
    whole = each * (1 - 1e-9)
    options = search * whole, (1 - search) * whole, 0.5, 0.4, 1.5
    w, rounds, trace = algorithm_2(script, ledger.filter.rho, options, kind)
    kinds = ["choice" if isinstance(ask.w, Ray) else "gradient" for ask in watched.asked]
    assert kinds == [line[0] for line in trace]
    for ask, (what, price, at, value) in zip(watched.asked, trace, strict=True):
        noise = 1 / math.sqrt(2 * price)
        if what == "choice":
            noise = 1 / math.sqrt((2 if kind == "laplace" else 8) * price)
        assert ask.query.mechanism.noise_multiplier == pytest.approx(noise, rel=1e-5)
        np.testing.assert_allclose(ask.w.w if what == "choice" else ask.w, at, atol=1e-9)
        np.testing.assert_allclose(ask.value, value, rtol=1e-6, atol=1e-6)
    assert len(steps) == rounds
    np.testing.assert_allclose(np.append(*steps[-1].w), w, atol=1e-6)
    # every branch was taken, in later rounds too, and the grid was made anew at least once
    failures = [n for n, line in enumerate(trace) if line[0] == "choice" and line[3] == 0]
    assert rounds > 10
    assert failures
    assert failures[-1] > 20
    tops = {round(float(ask.w.steps[-1]), 9) for ask in watched.asked if isinstance(ask.w, Ray)}
    assert len(tops) > 1


def test_dpagd_on_batches_is_algorithm_2_on_the_records_that_were_drawn(monkeypatch):
    """DP-AGD, lines 4-22 with a batch of its own for each gradient, choice and GradAvg, and a penalty.

    The fifth batch is empty. What is charged is the answer on a batch, whatever noise was chosen on the way.
    """
    script, drawn, some = Script(seed=4), {"normal": 0, "race": 0}, np.random.default_rng(8)
    batches = [np.flatnonzero(row < 0.4) for row in some.random((400, 60))]
    batches[4], taken = np.empty(0, np.int64), iter(batches)

    def release(self, total, bound, stream, turn=0):
        drawn["normal"] += 1
        return total + self.noise_multiplier * bound.clip * script.normal(drawn["normal"] - 1, 3)

    def choose(self, total, bound, stream, turn=0):
        drawn["race"] += 1
        return int(
            np.argmax(total + self.noise_multiplier * bound.norm() * script.race(drawn["race"] - 1, 21))
        )

    monkeypatch.setattr(Gaussian, "release", release)
    monkeypatch.setattr(NoisyMax, "release", choose)
    monkeypatch.setattr(Poisson, "draw", lambda self, records, stream, turn=0: next(taken))
    ledger = ft.Ledger(ft.Budget(40.0, 1e-6), filter=RdpFilter, stream=SeededStream(0))
    watched = Watched(ledger.over(Table(X, Y)))
    problem = Problem(logistic, 60, 2, unit=False)
    options = {"grid": Lengths(20), "opening": 0, "momentum": 0, "averaging": None, "radius": None}
    options |= {"splits": 30, "search": 0.4, "growth": 0.1, "clip_norm": 0.4, "objective_clip": 1.5}
    steps = list(dpagd(watched, problem, sampling_rate=0.4, penalty=0.05, **options))
    each = 1 / (2 * watched.asked[0].query.mechanism.noise_multiplier ** 2) / 0.6
    prices, shrinks = (0.4 * each, 0.6 * each, 0.1, 0.4, 1.5), 0.05 * 60 * 0.4
    w, rounds, trace = algorithm_2(script, math.inf, prices, "gumbel", len(steps), batches, shrinks)
    assert rounds == len(steps) > 10
    for ask, (what, price, at, value) in zip(watched.asked, trace, strict=False):
        scale = 1 / math.sqrt((8 if what == "choice" else 2) * price)
        assert ask.query.mechanism.noise_multiplier == pytest.approx(scale, rel=1e-5)
        inner = BoundedRangeEvent if what == "choice" else GaussianEvent
        event = ask.query.price(ledger.budget)
        assert isinstance(event, PoissonEvent)
        assert event.rate == 0.4
        assert isinstance(event.event, inner)
        np.testing.assert_allclose(ask.w.w if what == "choice" else ask.w, at, atol=1e-9)
        np.testing.assert_allclose(ask.value, value, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(np.append(*steps[-1].w), w, atol=1e-6)
    failures = [n for n, line in enumerate(trace) if line[0] == "choice" and line[3] == 0]
    assert failures
    assert failures[-1] > 20
    assert ledger.share <= 1


@pytest.mark.parametrize("closed", [True, False])
def test_dpagd_ends_at_the_rho_that_it_was_given(closed):
    """DP-AGD, lines 2, 3 and 14 with (5) as printed, ε = ρ + 2√(ρ ln(1/δ)), and with the tight ρ."""
    budget = ft.Budget(0.8, 1e-8)
    rho = (math.sqrt(math.log(1e8) + 0.8) - math.sqrt(math.log(1e8))) ** 2  # (5), solved for ρ
    ledger = ft.Ledger(budget, filter=ZcdpFilter, stream=SeededStream(3))
    given = {"rho": budget.rho} if closed else {}
    assert budget.rho == pytest.approx(rho)
    watched = Watched(ledger.over(Table(X, Y)))
    problem = Problem(logistic, 60, 2, unit=False)
    steps = list(dpagd(watched, problem, splits=25, opening=0, momentum=0, averaging=None, **given))
    spent = sum(ledger.filter.cost(ask.query.price(budget))[0] for ask in watched.asked)
    limit = rho if closed else ledger.filter.rho
    assert 0.9 * limit < spent <= limit * (1 + 1e-9)
    assert 1 <= len(steps) <= 25
    first = ledger.filter.cost(watched.asked[0].query.price(budget))[0]
    assert first == pytest.approx(0.8 * limit / 25, rel=1e-6)


# DP-SGD, Algorithm 1 of Abadi et al. 2016


def shrunk(x):
    """z = (x, 1), no longer than 1 (`Problem.rows`)."""
    rows = np.column_stack([x, np.ones(len(x))])
    return rows / np.maximum(1.0, np.linalg.norm(rows, axis=1))[:, None]


@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_dpsgd_is_algorithm_1_lot_by_lot(monkeypatch, momentum):
    """DP-SGD, all lines: θ₀ = 0, the lot of rate L/N, gradient, clip, one noise a lot, 1/L, descent, the end.

    L is the expected lot, not the one that came, which the third, empty one tells apart. η_t falls linearly;
    T is as many lots as the budget affords.
    """
    script, lots, drawn = Script(seed=1), [], []
    some = np.random.default_rng(5)

    def draw(self, records, stream, turn=0):
        came = (
            np.empty(0, np.int64)
            if len(lots) == 2
            else np.flatnonzero(some.random(records) < self.sampling_rate)
        )
        lots.append((self.sampling_rate, came))
        return came

    def release(self, total, bound, stream, turn=0):
        drawn.append((self.noise_multiplier, bound.clip))
        return total + self.noise_multiplier * bound.clip * script.normal(len(drawn) - 1, 3)

    monkeypatch.setattr(Poisson, "draw", draw)
    monkeypatch.setattr(Gaussian, "release", release)
    ledger = ft.Ledger(ft.Budget(3.0, 1e-5), stream=SeededStream(0))
    door = ledger.over(Table(X, Y))
    options = {
        "sampling_rate": 0.3,
        "noise_multiplier": 2.5,
        "clip_norm": 0.25,
        "step": 2.0,
        "momentum": momentum,
    }
    steps = list(dpsgd(door, Problem(logistic, 60, 2, unit=False), **options))
    assert len(steps) == len(lots) > 5
    event = steps[0].receipts[0].event
    assert pld.epsilon(RepeatedEvent(event, len(steps)), 1e-5, ledger.budget.adjacency) <= 3.0
    assert pld.epsilon(RepeatedEvent(event, len(steps) + 1), 1e-5, ledger.budget.adjacency) > 3.0 * (1 - 1e-3)
    assert set(drawn) == {(2.5, 0.25)}
    rows, w, velocity = shrunk(X), np.zeros(3), np.zeros(3)
    for t, (step, (rate, came)) in enumerate(zip(steps, lots, strict=True)):
        assert rate == 0.3
        total = gradient(w, rows[came], Y[came], 0.25) + 2.5 * 0.25 * script.normal(t, 3)
        velocity = momentum * velocity + total / (0.3 * 60)
        w = w - 2 * (1 - t / len(steps)) * 2.0 * velocity
        np.testing.assert_allclose(np.append(*step.w), w, atol=1e-9)


# PrivGene, Zhang et al. 2013


class Elections:
    """A ledger that lets whom it was told to win; prices are a real one's."""

    def __init__(self, budget, winners):
        self._real = ft.Ledger(budget, filter=ZcdpFilter)
        self.budget, self.affords, self.share = budget, self._real.affords, 0.0
        self._winners, self.asked = iter(winners), []

    def ask(self, query, w):
        self.asked.append(SimpleNamespace(query=query, w=w))
        return Answer(np.array(next(self._winners)), Receipt(len(self.asked), "", query.price(self.budget)))


@pytest.mark.parametrize(("adjacency", "moved"), [("add-remove", 1.0), ("replace-one", 2.0)])
def test_privgene_selects_crosses_and_mutates_generation_by_generation(adjacency, moved):
    """PrivGene: random candidates; each round chooses parents, crosses and mutates them; the last elects one.

    All choices cost the same ρ/(parents (rounds - 1) + 1), in units of R times the candidates' diameter.
    """
    winners = [[3, 11, 7], [0, 19, 5], [2, 1, 12], [9]]
    ledger = Elections(ft.Budget(1.0, 1e-6, adjacency), winners)
    options = {"candidates": 20, "parents": 3, "rounds": 4, "spread": 2.0, "shrink": 0.01}
    steps = list(privgene(ledger, Problem(logistic, 500, 6, unit=False), **options))
    assert len(steps) == len(ledger.asked) == 4
    epsilon = math.sqrt(8 * ZcdpFilter(ledger.budget).rho / (3 * 3 + 1))
    first = ledger.asked[0].w
    assert first.shape == (7, 20)
    assert np.abs(first).max() <= 2.0
    assert np.ptp(first) > 3.0
    for t, (ask, won) in enumerate(zip(ledger.asked, winners, strict=True), 1):
        assert isinstance(ask.query.mechanism, NoisyTop)
        assert ask.query.mechanism.count == len(won)
        assert ask.query.mechanism.noise_multiplier == pytest.approx(moved / epsilon, rel=1e-6)
        apart = max(np.linalg.norm(a - b) for a in ask.w.T for b in ask.w.T)
        assert ask.query.bound.high == pytest.approx(apart)  # slope 1, rows of norm 1 at most
        np.testing.assert_array_equal(np.append(*steps[t - 1].w), ask.w[:, won[0]])
        if t == 4:
            break
        parents, after = ask.w[:, won], ledger.asked[t].w
        np.testing.assert_array_equal(after[:, :3], parents)  # parents stay
        children, step = after[:, 3:], 2.0 * 0.01 ** (t / 4)
        gaps = np.abs(children[:, :, None] - parents[:, None, :])
        assert gaps.min(axis=2).max() <= step  # each coordinate is a parent's, moved by a step at most
        whole = np.linalg.norm(gaps, axis=0).min(axis=1)
        assert (whole > step * math.sqrt(7)).any()  # and not all of one parent
        kept = np.mean(gaps.min(axis=2) == 0)
        assert 0.05 < kept < 0.6  # 2/√7 of them are moved


# linear regression by a noisy quadratic: Jiang, Sections 4.2.1 and 4.2.2


class Laplaced:
    """A ledger of one answer, with noise that was written down."""

    def __init__(self, budget, table, noise):
        self._real = ft.Ledger(budget)
        self.budget, self.affords, self.share = budget, self._real.affords, 0.0
        self._table, self._noise = table, noise

    def ask(self, query, w=None):
        self.query = query
        total = query.contribution.bounded_sum(self._table, w, query.bound)
        units = self._noise[: len(total)] * query.mechanism.noise_multiplier * query.bound.norm(1)
        return Answer(total + units, Receipt(1, "", query.price(self.budget)))


@pytest.mark.parametrize("repair", [False, True])
@pytest.mark.parametrize("triangle", [False, True])
@pytest.mark.parametrize("share", [None, 0.5, 0.7])
def test_linear_regression_minimises_the_noisy_quadratic(repair, triangle, share):
    """Section 4.2.1: rows and targets in [-1, 1], a = Σ x xᵀ, b = -2 Σ y x, Laplace noise on both, -b̂/(2â).

    Noise of scale Δ₁/ε₁ on a and Δ₂/ε₂ on b, Δ₁ = 2 (d+1)² and Δ₂ = 4 (d+1); Δ₁ of a triangle is
    (d+1)² + d + 1. Without a share ε is divided in proportion to them.
    """
    target = 0.2 + X @ [0.5, 0.1]
    noise = np.random.default_rng(4).laplace(size=20)
    ledger = Laplaced(ft.Budget(3.0, 0.0, "replace-one"), Table(X, target), noise)
    problem = Problem(squared, 60, 2, unit=False)
    (step,) = functional(ledger, problem, repair=repair, triangle=triangle, quadratic_share=share)
    first, second = 9 + 3 if triangle else 2 * 9, 4 * 3
    part = first / (first + second) if share is None else share
    scale, other = first / (3.0 * part), second / (3.0 * (1 - part))
    places = [(j, k) for j in range(3) for k in range(3) if j <= k or not triangle]
    rows, y = np.column_stack([2 * X - 1, np.ones(60)]), 2 * target - 1
    a, b = np.zeros((3, 3)), np.zeros(3)
    for draw, (j, k) in zip(noise, places, strict=False):
        a[j, k] = sum(rows[:, j] * rows[:, k]) + scale * draw
    for j in range(3):
        b[j] = -2 * sum(y * rows[:, j]) + other * noise[len(places) + j]
    a = np.triu(a) + np.triu(a, 1).T if triangle else (a + a.T) / 2
    if repair:
        deviation = math.sqrt(2) * scale / (1 if triangle else math.sqrt(2))
        values, vectors = np.linalg.eigh(a)
        a = vectors @ np.diag(np.maximum(values, 0) + math.sqrt(3) * deviation) @ vectors.T
    theta = np.linalg.solve(a, -b / 2)
    # (y' + 1)/2 with y' = θ·x', x' = 2 x - 1
    wanted = np.append(theta[:2], (theta[2] - theta[:2].sum() + 1) / 2)
    np.testing.assert_allclose(np.append(*step.w), wanted, rtol=1e-6)
