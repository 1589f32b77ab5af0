"""A-DDP, SGD1 and SGD2 against their pseudocode: draws and noise are scripted, books and sums are real.

A reference is the paper's lines in plain numpy, one user and one record after the other.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import expit, ndtr
from scipy.stats import binom

import farthing as ft
from farthing.data.tables import Table
from farthing.errors import BudgetSpent
from farthing.federated import ClientAgent, Exactly, Parties, simulated
from farthing.federated.methods.addp import addp, sgd_adv, sgd_maj, sgd_pass
from farthing.federated.methods.sgd1 import sgd1
from farthing.federated.methods.sgd2 import sgd2
from farthing.federated.simulated import Simulated
from farthing.linear.losses import logistic
from farthing.linear.problem import Problem
from farthing.noise.lattice import SeededStream
from farthing.queries.mechanisms import Gaussian
from farthing.queries.query import Answer, Receipt
from farthing.queries.samplers import Everyone, Poisson

RNG = np.random.default_rng(12)
SIZES = [3, 2, 4]
ENDS = np.concatenate([[0], np.cumsum(SIZES)])
X = RNG.random((9, 2))
Y = 1.0 * (X[:, 0] > X[:, 1])
Z = np.column_stack([X, np.ones(9)])
SHRUNK = Z / np.maximum(1.0, np.linalg.norm(Z, axis=1))[:, None]
NOISE = RNG.normal(size=(3, 200, 3))  # of each user, round after round
DRAWS = RNG.integers(10**6, size=(3, 200))


def row_of(user, t):
    """The record that a user draws in its t-th round."""
    return int(ENDS[user] + DRAWS[user, t] % SIZES[user])


def one_gradient(w, place, clip, rows=Z):
    g = (expit(rows[place] @ w) - Y[place]) * rows[place]
    return g / max(1.0, np.linalg.norm(g) / clip)


class Door:
    """A user's ledger whose draws and noise are written down; what is promised is counted down."""

    def __init__(self, user, budget, log, whole=False):
        self.user, self.budget, self._log, self._whole, self._t = user, budget, log, whole, 0

    def promise(self, query, times):
        self.left = times
        return self

    def ask(self, query, w):
        if not self.left:
            raise BudgetSpent("the promise is used up")
        self.left -= 1
        low, high = ENDS[self.user : self.user + 2]
        places = range(low, high) if self._whole else [row_of(self.user, self._t)]
        table = Table(X[list(places)], Y[list(places)])
        deviation = query.mechanism.noise_multiplier * query.bound.clip
        total = query.contribution.bounded_sum(table, w, query.bound)
        value = total + deviation * NOISE[self.user, self._t]
        self._t += 1
        self._log.append(SimpleNamespace(user=self.user, w=w, query=query, deviation=deviation))
        return Answer(value, Receipt(self._t, "", query.price(self.budget)))


def agents(budgets, clips=(None,) * 3, whole=False, stream=None):
    log = []
    doors = [Door(user, budget, log, whole) for user, budget in enumerate(budgets)]
    clients = [ClientAgent(door, size, clip) for door, size, clip in zip(doors, SIZES, clips, strict=True)]
    return Parties(clients, stream), log


def server(*epsilons, delta=1e-3, adjacency="add-remove"):
    return [ft.Budget(epsilon, delta, adjacency, observer="server") for epsilon in epsilons]


# A-DDP, Algorithm 1 of Cheng et al. 2020


def delta_of(rounds, rate, sigma, moved, epsilon):
    """δ_u by Theorem 1: Σ B(i, k, p) δ_Gauss(H √i / σ)."""
    i = np.arange(1, rounds + 1)
    mu = moved * np.sqrt(i) / sigma
    tails = ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu)
    return float(binom.pmf(i, rounds, rate) @ tails)


def iteration_noise(epsilon, delta, rounds, moved):
    """Line 5: (eps_iter, δ_iter) by advanced composition with half of δ as slack; σ by equation (4)."""

    def total(each):
        return math.sqrt(2 * rounds * math.log(2 / delta)) * each + rounds * each * math.expm1(each)

    each, missed = brentq(lambda e: total(e) - epsilon, 1e-9, epsilon), delta / (2 * rounds)

    def excess(sigma):
        mu = moved / sigma
        return ndtr(mu / 2 - each / mu) - math.exp(each) * ndtr(-mu / 2 - each / mu) - missed

    return brentq(excess, 1e-3 * moved, 1e6 * moved, xtol=1e-12, rtol=1e-13)


def algorithm_1(budgets, sigmas, clips, rate, weights):
    """Lines 1-19; the check of lines 7-10 is about the round to come. Without noise where sigmas are 0."""
    w, done, path, came = np.zeros(3), [0, 0, 0], [], []  # 1

    def fits(u):  # 7, 8
        moved = 2 * clips[u]  # exactly one record pushes another out
        price = delta_of(done[u] + 1, 1 / SIZES[u], sigmas[u], moved, budgets[u].epsilon)
        return price <= budgets[u].delta

    while any(fits(u) for u in range(3)):  # 2
        count, grad, weight, who = 0, np.zeros(3), 0.0, []  # 3, 4
        for u in range(3):  # 6
            if not fits(u):
                continue  # 9
            g = one_gradient(w, row_of(u, done[u]), clips[u])  # 11-13
            share = 1.0 if weights == "plain" else 1 / sigmas[u] ** 2
            grad = grad + share * (g + sigmas[u] * NOISE[u, done[u]])  # 14
            count, weight, done[u] = count + 1, weight + share, done[u] + 1  # 15
            who.append(u)
        assert count == len(who)
        w = w - rate * grad / weight  # 17
        path.append(w)
        came.append(who)
    return path, came


@pytest.mark.parametrize("weights", ["plain", "precision"])
def test_addp_is_algorithm_1_round_by_round(weights):
    """A-DDP, lines 1-19: budgets and clips that differ, clients leaving one by one, the rest going on."""
    budgets, clips = server(0.6, 1.3, 0.9), (0.3, 0.45, 0.2)
    clients, log = agents(budgets, clips)
    steps = list(
        addp(
            clients,
            Problem(logistic, 9, 2, unit=False),
            clip_norm=0.45,
            noise_multiplier=8.0,
            lr=0.7,
            weights=weights,
        )
    )
    path, came = algorithm_1(budgets, [8.0 * clip for clip in clips], clips, 0.7, weights)
    assert {len(who) for who in came} == {1, 2, 3}  # clients left in later rounds, one by one
    assert [ask.user for ask in log] == [user for who in came for user in who]
    for ask in log:
        assert ask.deviation == pytest.approx(8.0 * clips[ask.user])
    asked = iter(log)
    for t, who in enumerate(came):
        for _ in who:  # all of a round are asked at the same w
            np.testing.assert_allclose(next(asked).w, path[t - 1] if t else np.zeros(3), atol=1e-12)
    assert len(steps) == len(path)
    for step, w in zip(steps, path, strict=True):
        np.testing.assert_allclose(np.append(*step.w), w, atol=1e-12)


@pytest.mark.parametrize("weights", ["plain", "precision"])
def test_simulated_clients_run_the_same_lines(monkeypatch, weights):
    """A-DDP, lines 1-19, over arrays: the same draws; the noise of the weighted sum is that of its parts."""
    done, noises = np.zeros(3, int), []

    def exactly(size, users, stream):
        came = [int(np.searchsorted(ENDS, start)) for start in users.starts]
        rows = np.array([row_of(user, done[user]) for user in came])
        done[came] += 1
        noises.append(came)
        return rows, np.arange(len(came))

    def release(self, total, bound, stream, turn=0):
        """The parts' noise in the units that the sum has: that of weights over the largest."""
        came = noises[-1]
        sigmas = np.array([8.0 * clips[user] for user in came])
        shares = np.ones(len(came)) if weights == "plain" else sigmas**-2.0
        shares = shares / shares.max()
        assert self.noise_multiplier * bound.clip == pytest.approx(math.sqrt(np.sum((shares * sigmas) ** 2)))
        parts = [NOISE[user, done[user] - 1] for user in came]
        return total + (shares * sigmas) @ np.array(parts)

    monkeypatch.setattr(simulated, "exactly", exactly)
    monkeypatch.setattr(Gaussian, "release", release)
    budgets, clips = server(0.6, 1.3, 0.9), (0.3, 0.45, 0.2)
    clients = Simulated(Table(X, Y), ENDS, budgets, clip_norm=clips, stream=SeededStream(0))
    problem = Problem(logistic, 9, 2, unit=False)
    steps = list(addp(clients, problem, clip_norm=0.45, noise_multiplier=8.0, lr=0.7, weights=weights))
    path, came = algorithm_1(budgets, [8.0 * clip for clip in clips], clips, 0.7, weights)
    assert noises == came
    for step, w in zip(steps, path, strict=True):
        np.testing.assert_allclose(np.append(*step.w), w, atol=1e-12)


@pytest.mark.parametrize(
    ("draw", "rate", "adjacency", "moved"),
    [
        (Exactly(1), 1 / 3, "add-remove", 2.0),
        (Exactly(1), 1 / 3, "replace-one", 2.0),
        (Poisson(0.4), 0.4, "add-remove", 1.0),
        (Poisson(0.4), 0.4, "zero-out", 1.0),
        (Poisson(0.4), 0.4, "replace-one", 2.0),
        (Everyone(), 1.0, "add-remove", 1.0),
        (Everyone(), 1.0, "replace-one", 2.0),
    ],
    ids=str,
)
def test_line_5_and_lines_7_to_10_of_addp(draw, rate, adjacency, moved):
    """A-DDP, line 5 (noise for an estimated T) and 7-10 (δ_u by Theorem 1), with H = C or 2C by the draw.

    Every user does it with its own budget.
    """
    budgets = server(0.4, 1.5, delta=1e-4, adjacency=adjacency)
    doors = [Door(0, budget, []) for budget in budgets]
    clients = Parties([ClientAgent(door, 3) for door in doors])
    problem = Problem(logistic, 6, 2, unit=False)
    next(addp(clients, problem, clip_norm=0.5, draw=draw, rounds=4, lr=1.0))
    for door, budget in zip(doors, budgets, strict=True):
        noise = door._log[0].deviation
        assert noise == pytest.approx(iteration_noise(budget.epsilon, 1e-4, 4, moved * 0.5), rel=1e-6)
        rounds = door.left + 1
        assert rounds > 4  # the theorem affords more than was estimated
        assert delta_of(rounds, rate, noise, moved * 0.5, budget.epsilon) <= 1e-4
        assert delta_of(rounds + 1, rate, noise, moved * 0.5, budget.epsilon) > 1e-4


# the baselines of Cheng et al. 2020, "Contrast algorithms", and Bassily, Smith & Thakurta 2014 for SGD-Adv

T = 5


def analytic(epsilon, delta, moved):
    """The least σ by equation (4)."""

    def excess(sigma):
        mu = moved / sigma
        return ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu) - delta

    return brentq(excess, 1e-3 * moved, 1e6 * moved, xtol=1e-12, rtol=1e-13)


def advanced_iteration(epsilon, delta):
    """(ε_iter, δ_iter) of T rounds by advanced composition, with half of δ as slack."""

    def total(each):
        return math.sqrt(2 * T * math.log(2 / delta)) * each + T * each * math.expm1(each)

    return brentq(lambda each: total(each) - epsilon, 1e-9, epsilon, xtol=1e-15), delta / (2 * T)


def maj_noise(budget, rate, moved):
    return analytic(budget.epsilon / T, budget.delta / T, moved)


def adv_noise(budget, rate, moved):
    """ln(1 + p (e^ε - 1)) and p δ of a round are what advanced composition allows it."""
    each, missed = advanced_iteration(budget.epsilon, budget.delta)
    return analytic(math.log1p(math.expm1(each) / rate), missed / rate, moved)


@pytest.mark.parametrize(("method", "noise"), [(sgd_maj, maj_noise), (sgd_adv, adv_noise)])
def test_sgd_maj_and_sgd_adv_are_t_plain_rounds_of_one_record(method, noise):
    """T is fixed beforehand: users draw, clip at C, add noise for 2C; the server takes the mean."""
    budgets, clip = server(0.6, 1.3, 0.9), 0.45
    clients, log = agents(budgets)
    steps = list(method(clients, Problem(logistic, 9, 2, unit=False), clip_norm=clip, rounds=T, lr=0.7))
    sigmas = [noise(budget, 1 / size, 2 * clip) for budget, size in zip(budgets, SIZES, strict=True)]
    assert [ask.user for ask in log] == [0, 1, 2] * T
    w, shrunk = np.zeros(3), 0
    for t in range(T):
        total = np.zeros(3)
        for user in range(3):
            ask = log[3 * t + user]
            assert ask.deviation == pytest.approx(sigmas[user], rel=1e-6)
            np.testing.assert_allclose(ask.w, w, atol=1e-12)
            whole = one_gradient(w, row_of(user, t), math.inf)
            shrunk += np.linalg.norm(whole) > clip
            total += one_gradient(w, row_of(user, t), clip) + ask.deviation * NOISE[user, t]
        w = w - 0.7 * total / 3
        np.testing.assert_allclose(np.append(*steps[t].w), w, atol=1e-12)
    assert len(steps) == T
    assert 0 < shrunk < 3 * T


def test_sgd_pass_visits_each_record_t_times_in_turn(monkeypatch):
    """T passes; a record's own T visits are composed, and nothing is amplified; short users end first."""
    budgets, clip = server(0.6, 1.3, 0.9, adjacency="zero-out"), 0.45
    sigmas = [analytic(*advanced_iteration(budget.epsilon, budget.delta), clip) for budget in budgets]
    sums = []

    def release(self, total, bound, stream, turn=0):
        sums.append((np.array(total), self.noise_multiplier * bound.clip))
        return total + NOISE[0, len(sums) - 1]

    monkeypatch.setattr(Gaussian, "release", release)
    clients = Simulated(Table(X, Y), ENDS, budgets, stream=SeededStream(0))
    steps = list(sgd_pass(clients, Problem(logistic, 9, 2, unit=False), clip_norm=clip, rounds=T, lr=0.7))
    w, visits, t = np.zeros(3), np.zeros(9, int), 0
    while came := [user for user in range(3) if t < T * SIZES[user]]:
        places = [ENDS[user] + t % SIZES[user] for user in came]
        visits[places] += 1
        total = sum(one_gradient(w, place, clip) for place in places)
        np.testing.assert_allclose(sums[t][0], total, atol=1e-9)
        assert sums[t][1] == pytest.approx(math.hypot(*(sigmas[user] for user in came)), rel=1e-6)
        w = w - 0.7 * (total + NOISE[0, t]) / len(came)
        np.testing.assert_allclose(np.append(*steps[t].w), w, atol=1e-9)
        t += 1
    assert len(steps) == t == T * max(SIZES)
    assert set(visits) == {T}


# SGD1 and SGD2 of the multi-party write-up


def projected(theta, radius):
    return theta if np.linalg.norm(theta) <= radius else theta * radius / np.linalg.norm(theta)


RATES = [(0.0, None), (0.8, None), (0.8, lambda t: 0.1 / t)]


class Permission:
    """B's sequence π, written down."""

    def __init__(self, places):
        self._places = iter(places)

    def uniform_below(self, high, size):
        assert (high, size) == (9, 1)
        return [next(self._places)]


@pytest.mark.parametrize(("convexity", "rate"), RATES)
@pytest.mark.parametrize("start", [None, (0.1, -0.2, 0.05)])
def test_sgd1_is_its_six_items_permission_by_permission(convexity, rate, start):
    """SGD1, items 1-6, with σ of (3), η of (4), 1/(Δ n t) or B's own: one owner's one record each."""
    n, lipschitz, radius, epsilon, delta = 9, 0.3, 0.4, 0.5, 1e-3
    order = np.random.default_rng(2).integers(9, size=81)  # 1
    clients, log = agents(
        server(*[epsilon] * 3, delta=delta, adjacency="replace-one"), stream=Permission(order)
    )
    options = {"lipschitz": lipschitz, "radius": radius, "convexity": convexity, "lr": rate, "start": start}
    steps = list(sgd1(clients, Problem(logistic, n, 2, unit=False), **options))
    sigma = 4 * lipschitz * n * math.log(1.25 * n**2 / delta) / epsilon  # (3)
    theta, turns, outside = np.zeros(3) if start is None else np.array(start), [0, 0, 0], 0
    assert len(log) == n * n
    for i, (place, ask) in enumerate(zip(order, log, strict=True), 1):
        owner = int(np.searchsorted(ENDS, place, side="right")) - 1  # 2
        assert ask.user == owner
        np.testing.assert_allclose(ask.w, theta, atol=1e-12)
        assert n * ask.deviation == pytest.approx(sigma)
        g = one_gradient(theta, row_of(owner, turns[owner]), lipschitz, SHRUNK) + convexity * theta
        noisy = n * g + sigma * NOISE[owner, turns[owner]]  # 3
        eta = 2 * radius / math.sqrt(i * (n**2 * lipschitz**2 + 3 * sigma**2))  # (4)
        if convexity:
            eta = 1 / (convexity * n * i)
        eta = rate(i) if rate else eta
        outside += np.linalg.norm(theta - eta * noisy) > radius
        theta, turns[owner] = projected(theta - eta * noisy, radius), turns[owner] + 1  # 3, 5
        if i % n == 0:
            np.testing.assert_allclose(np.append(*steps[i // n - 1].w), theta, atol=1e-12)
    assert steps[-1].t == n * n  # 6
    assert 0 < outside < n * n  # some steps were projected and some were not


@pytest.mark.parametrize(("convexity", "rate"), RATES)
@pytest.mark.parametrize("start", [None, (0.1, -0.2, 0.05)])
def test_sgd2_is_its_five_items_round_by_round(convexity, rate, start):
    """SGD2, items 1-5: sums over all of a party's records, one projected step on their sum, parties leaving.

    η(k) is SGD1's for the n records that came: |C| / √(k (n² L² + p Σσ²)), 1/(Δ n k), or B's own.
    """
    lipschitz, radius, sigma = 0.3, 0.5, 0.3 * 12.0
    budgets = server(0.6, 1.3, 0.9)
    clients, log = agents(budgets, whole=True)
    options = {"lipschitz": lipschitz, "radius": radius, "convexity": convexity, "lr": rate, "start": start}
    steps = list(sgd2(clients, Problem(logistic, 9, 2, unit=False), noise_multiplier=12.0, **options))
    theta, k, asked = np.zeros(3) if start is None else np.array(start), 0, iter(log)
    outside, sizes = 0, set()
    while came := [u for u in range(3) if delta_of(k + 1, 1.0, sigma, lipschitz, budgets[u].epsilon) <= 1e-3]:
        k += 1  # 2
        total, n = np.zeros(3), sum(SIZES[u] for u in came)
        for u in came:  # 3
            ask = next(asked)
            assert ask.user == u
            assert ask.deviation == pytest.approx(sigma)
            np.testing.assert_allclose(ask.w, theta, atol=1e-12)
            records = range(ENDS[u], ENDS[u + 1])
            total += sum(
                one_gradient(theta, place, lipschitz, SHRUNK) + convexity * theta for place in records
            )
            total += sigma * NOISE[u, k - 1]
        eta = 2 * radius / math.sqrt(k * (n**2 * lipschitz**2 + 3 * len(came) * sigma**2))
        if convexity:
            eta = 1 / (convexity * n * k)
        eta = rate(k) if rate else eta
        outside += np.linalg.norm(theta - eta * total) > radius
        theta = projected(theta - eta * total, radius)  # 4
        np.testing.assert_allclose(np.append(*steps[k - 1].w), theta, atol=1e-12)
        sizes.add(len(came))
    assert len(steps) == k  # 5
    assert sizes == {1, 2, 3}
    assert 0 < outside < k
