"""Excess risk of SGD1 and SGD2, E[L(θ; D) - L(θ*; D)], measured beside the bounds of Theorems 2 and 4.

The write-up's only measure of utility (its Definition 4). The problem meets its assumptions: logistic loss on
rows of norm at most 1, so l is convex and 1-Lipschitz; C is the ball of radius 1, |C|₂ = 2; where l must be
Δ-strongly convex, Δ|θ|²/2 is added to every record's loss, Δ = 1, and L = 1 + Δ. The rows are Adult's six
numeric columns and a constant, p = 7. θ is the last iterate, as both algorithms return it, and θ* is found by
Newton's method. All numbers are divided by n: excess risk of a record.

* (9) and (10), Theorem 2: O(·) in the text. "Constant 1" is the formula as it stands; "lemma" is what holds
  for the steps (4) and 1/(Δnt): Shamir & Zhang 2013, Theorems 2 and 1, with G² = n²L² + pσ² and T = n²,
  2|C|₂G(2 + ln T)/√T and 17 G²(1 + ln T)/(nΔT).
* (11), Theorem 4: explicit, 8mp(σ² + n²L²)/(nΔT), for an η(t) that the text does not name. "Lemma" is the
  same Theorem 1 for the steps 1/(Δnk) that are taken here, with G² = n²L² + mpσ².
* (12), a step of Theorem 4's sketch, for a constant η: |θ₀ - θ*|²/(2kη) + ησ². The sum of m gradients has
  noise of variance mpσ², which (11) counts and (12) does not.

Every θ in C has an excess risk of at most L|C|₂ per record, so a bound of this size or more says nothing and
is marked "vacuous".
"""

import math
from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import expit

from experiments.frame import Grid, Row, Size, level, line, mean, say, stream, ticks, values
from farthing.budget import Budget
from farthing.data.adult import load_adult
from farthing.federated.methods.sgd1 import sgd1
from farthing.federated.methods.sgd2 import sgd2, sgd2_noise, sgd2_published_noise
from farthing.federated.simulated import Simulated
from farthing.linear.losses import logistic
from farthing.linear.problem import Problem
from farthing.queries.query import run

Array = NDArray[np.float64]

RADIUS, CONVEXITY, DELTA = 1.0, 1.0, 1e-6
DIAMETER, P = 2 * RADIUS, 7
PUBLISHED, LEAST, START = "published σ", "least σ", "θ₀"
LIPSCHITZ, STRONG = "Lipschitz, (9)", "strongly convex, (10)"
ONE, TWO, SKETCH = "risk of SGD1", "risk of SGD2", "risk of SGD2, constant η"
SGD1 = [(25, 0.5), (50, 0.5), (100, 0.5), (200, 0.5), (400, 0.5), (50, 0.1), (50, 0.9)]  # n, ε
BASE = {"n": 10_000, "ε": 0.5, "m": 10, "T": 100}
VARIED = {"n": (1000, 40_000), "ε": (0.1, 2.0), "m": (2, 100), "T": (10, 1000, 3000)}


def constant(case: str) -> tuple[float, float]:
    """Δ, and the Lipschitz constant L of a record's whole loss on C."""
    convexity = 0.0 if case == LIPSCHITZ else CONVEXITY
    return convexity, 1.0 + convexity * RADIUS


# --- the bounds, of a record


def theorem_2(case: str, n: int, epsilon: float, delta: float) -> float:
    """(9) or (10) with 1 for the constant that O(·) leaves open."""
    convexity, L = constant(case)
    log = math.log(1.25 * n * n / delta)
    if not convexity:
        return L * DIAMETER * log**2 * math.sqrt(P) / epsilon / n
    return L**2 * log**3 * P / (n * convexity * epsilon**2) / n


def theorem_4(n: int, m: int, T: int, sigma: float) -> float:
    """(11)."""
    convexity, L = constant(STRONG)
    return 8 * m * P * (sigma**2 + (n * L) ** 2) / (n * convexity * T) / n


def lemma(case: str, n: int, T: int, variance: float) -> float:
    """Shamir & Zhang 2013, Theorems 2 and 1, ``variance`` being that of all noise in a sum of gradients."""
    convexity, L = constant(case)
    square = (n * L) ** 2 + variance
    if not convexity:
        return 2 * DIAMETER * math.sqrt(square) * (2 + math.log(T)) / math.sqrt(T) / n
    return 17 * square * (1 + math.log(T)) / (n * convexity * T) / n


def trivial(case: str) -> float:
    """What holds for any θ of C."""
    return constant(case)[1] * DIAMETER


# --- the problem


def problem_of(n: int) -> tuple[Array, Array]:
    """Numeric columns of n records of Adult, and labels."""
    adult = load_adult()
    numeric = [k for k in range(adult.X.shape[1]) if len(np.unique(adult.X[:2000, k])) > 2]
    assert len(numeric) + 1 == P
    order = np.random.default_rng(0).permutation(len(adult.X))[:n]
    return adult.X[order][:, numeric], adult.y[order].astype(np.float64)


def rows_of(X: Array) -> Array:
    """Rows as the algorithms learn from them: with a constant, shrunk to norm 1."""
    z = np.column_stack([X, np.ones(len(X))])
    shrunk: Array = z / np.maximum(1.0, np.linalg.norm(z, axis=1))[:, None]
    return shrunk


def risk(theta: Array, z: Array, y: Array, convexity: float) -> float:
    """L(θ; D)/n."""
    return float(np.mean(logistic.value(z @ theta, y)) + convexity * theta @ theta / 2)


def minimum(z: Array, y: Array, convexity: float) -> Array:
    """θ*: the minimiser over C. On the sphere it is that of the loss with a multiplier added (KKT)."""

    def newton(ridge: float) -> Array:
        theta = np.zeros(z.shape[1])
        for _ in range(100):
            p = expit(z @ theta)
            gradient = z.T @ (p - y) / len(y) + ridge * theta
            if float(np.linalg.norm(gradient)) < 1e-12:
                break
            curvature = (z.T * (p * (1 - p))) @ z / len(y) + ridge * np.eye(len(theta))
            theta = theta - np.linalg.solve(curvature, gradient)
        return theta

    def outside(extra: float) -> float:
        return float(np.linalg.norm(newton(convexity + extra))) - RADIUS

    if outside(1e-9) <= 0:
        return newton(convexity + 1e-9)
    return newton(convexity + brentq(outside, 1e-9, 10.0, xtol=1e-13))


# --- what is measured


def _learnt(steps: Any, rounds: int | None = None) -> Array:
    weights = run(islice(steps, rounds)).w
    return np.append(*weights)


def first(n: int, epsilon: float, case: str, method: str, repeats: int) -> list[Row]:
    """SGD1, two equal parties, δ = 1/(2n³), a record replaced."""
    X, y = problem_of(n)
    z, budget = rows_of(X), Budget(epsilon, 1 / (2 * n**3), "replace-one")
    convexity, _ = constant(case)
    best = risk(minimum(z, y, convexity), z, y, convexity)
    where = {"claim": ONE, "case": case, "n": n, "claimed": epsilon, "method": method}
    if method == START:
        return [{**where, "excess": risk(np.zeros(P), z, y, convexity) - best}]
    found = []
    for repeat in range(repeats):
        place = stream(ONE, case, n, epsilon, method, repeat)
        clients = Simulated.split(X, y, clients=2, budgets=budget, stream=place)
        problem = Problem(logistic, n, X.shape[1], unit=False)
        steps = sgd1(clients, problem, radius=RADIUS, convexity=convexity, exact=method == LEAST)
        excess = risk(_learnt(steps), z, y, convexity) - best
        found.append({**where, "σ": clients.terms(0).mechanism.noise_multiplier, "excess": excess})
    return found


def second(n: int, epsilon: float, m: int, T: int, method: str, repeats: int) -> list[Row]:
    """SGD2, m parties of n/m records, add-remove."""
    X, y = problem_of(n)
    z, budget = rows_of(X), Budget(epsilon, DELTA)
    best = risk(minimum(z, y, CONVEXITY), z, y, CONVEXITY)
    where = {"claim": TWO, "n": n, "claimed": epsilon, "m": m, "T": T, "method": method}
    if method == START:
        return [{**where, "excess": risk(np.zeros(P), z, y, CONVEXITY) - best}]
    noise, found = (sgd2_noise if method == LEAST else sgd2_published_noise)(budget, T), []
    for repeat in range(repeats):
        place = stream(TWO, n, epsilon, m, T, method, repeat)
        clients = Simulated.split(X, y, clients=m, budgets=budget, stream=place)
        problem = Problem(logistic, n, X.shape[1], unit=False)
        given = None if method == LEAST else noise
        steps = sgd2(clients, problem, rounds=T, noise_multiplier=given, radius=RADIUS, convexity=CONVEXITY)
        excess = risk(_learnt(steps, T), z, y, CONVEXITY) - best
        found.append({**where, "σ": noise, "excess": excess})
    return found


def sketched(n: int, epsilon: float, m: int, T: int, repeats: int) -> list[Row]:
    """SGD2 with a constant η, half of what the curvature of the sum allows, and the least noise."""
    X, y = problem_of(n)
    z, budget, eta = rows_of(X), Budget(epsilon, DELTA), 0.5 / (n * (0.25 + CONVEXITY))
    star = minimum(z, y, CONVEXITY)
    noise, found = sgd2_noise(budget, T), []
    for repeat in range(repeats):
        place = stream(SKETCH, n, epsilon, m, T, repeat)
        clients = Simulated.split(X, y, clients=m, budgets=budget, stream=place)
        problem = Problem(logistic, n, X.shape[1], unit=False)
        options = {"radius": RADIUS, "convexity": CONVEXITY}
        steps = sgd2(clients, problem, rounds=T, lr=lambda t: eta, **options)
        excess = risk(_learnt(steps, T), z, y, CONVEXITY) - risk(star, z, y, CONVEXITY)
        where = {"claim": SKETCH, "n": n, "claimed": epsilon, "m": m, "T": T, "method": LEAST}
        found.append({**where, "σ": noise, "η": eta, "distance": float(star @ star), "excess": excess})
    return found


def cells(small: bool) -> list[tuple[Any, ...]]:
    """The arguments of all measurements but the repeats: four of `first`, five of `second`."""
    one = [(n, epsilon, case) for n, epsilon in (SGD1[:1] if small else SGD1) for case in (LIPSCHITZ, STRONG)]
    two: list[tuple[Any, ...]] = [(1000, 0.5, 2, 100)]
    if not small:
        changed = [{name: value} for name, found in VARIED.items() for value in found]
        two = [tuple((BASE | change).values()) for change in ({}, *changed, {"m": 2, "T": 1000})]
    return [(*place, method) for place in (*one, *two) for method in (START, PUBLISHED, LEAST)]


def measured(size: Size) -> list[Row]:
    rows, repeats = [], size.repeats_or(3)
    for place in cells(size.small):
        rows += (first if len(place) == 4 else second)(*place, repeats)
        say(f"excess risk: {', '.join(map(str, place))} done")
    for m in (1, 10):
        rows += sketched(1000, 0.5, m, 100, 4 * repeats)
    return rows


# --- what is shown


def _shown(value: float, case: str) -> str:
    return f"{value:,.3g}" + (" (vacuous)" if value >= trivial(case) else "")


def _over(rows: Iterable[Row], method: str) -> str:
    found = [row["excess"] for row in rows if row["method"] == method]
    return f"{np.mean(found):.2g}" + (f" ± {np.std(found, ddof=1):.1g}" if len(found) > 1 else "")


def sgd1_grid(rows: list[Row]) -> Grid:
    cells = []
    for case in (LIPSCHITZ, STRONG):
        mine = [row for row in rows if row["claim"] == ONE and row["case"] == case]
        for n, epsilon in sorted({(row["n"], row["claimed"]) for row in mine}):
            here = [row for row in mine if (row["n"], row["claimed"]) == (n, epsilon)]
            noise = {method: mean(here, "σ", method=method) for method in (PUBLISHED, LEAST)}
            proven = [lemma(case, n, n * n, P * (one * n) ** 2) for one in noise.values()]
            delta = 1 / (2 * n**3)
            cells.append(
                [
                    *(case, f"{n:g}", f"{epsilon:g}"),
                    f"{noise[PUBLISHED]:.1f}, {noise[LEAST]:.1f}",
                    *(_over(here, method) for method in (PUBLISHED, LEAST)),
                    f"{mean(here, 'excess', method=START):.2g}",
                    _shown(theorem_2(case, n, epsilon, delta), case),
                    *(_shown(one, case) for one in proven),
                ]
            )
    head = ["l is", "n", "ε", "σ/(nL), published and least", PUBLISHED, LEAST, START]
    head += ["constant 1", "lemma, published σ", "lemma, least σ"]
    note = (
        f"Mean ± standard deviation of runs (without ±: one run). Two parties, δ = 1/(2n³), replace-one; "
        f"p = {P}, |C|₂ = {DIAMETER:g}, Δ = {CONVEXITY:g}. Any θ of C is within {trivial(LIPSCHITZ):g} "
        f"(Lipschitz) and {trivial(STRONG):g} (strongly convex). With constant 1, (9) is below that from n = "
        f"{from_n(LIPSCHITZ, 0.5):,} on at ε = 0.5 and {from_n(LIPSCHITZ, 0.9):,} at 0.9, (10) from "
        f"{from_n(STRONG, 0.5):,} and {from_n(STRONG, 0.9):,}: n² iterations each."
    )
    return Grid("SGD1: excess risk of a record beside Theorem 2", head, cells, note)


def from_n(case: str, epsilon: float) -> int:
    """The first n from which (9) or (10), constant 1, says anything."""
    n = 2
    while theorem_2(case, n, epsilon, 1 / (2 * n**3)) >= trivial(case):
        n = math.ceil(n * 1.001)
    return n


def sgd2_grid(rows: list[Row]) -> Grid:
    mine, cells = [row for row in rows if row["claim"] == TWO], []
    keys = ("n", "claimed", "m", "T")
    for place in sorted({tuple(row[key] for key in keys) for row in mine}):
        here = [row for row in mine if tuple(row[key] for key in keys) == place]
        n, epsilon, m, T = place
        noise = {method: mean(here, "σ", method=method) for method in (PUBLISHED, LEAST)}
        cells.append(
            [
                *(f"{n:,.0f}", f"{epsilon:g}", f"{m:g}", f"{T:,.0f}"),
                f"{noise[PUBLISHED]:.0f}, {noise[LEAST]:.0f}",
                *(_over(here, method) for method in (PUBLISHED, LEAST)),
                f"{mean(here, 'excess', method=START):.2g}",
                *(_shown(theorem_4(n, m, T, one), STRONG) for one in noise.values()),
                _shown(lemma(STRONG, n, T, m * P * noise[LEAST] ** 2), STRONG),
            ]
        )
    head = ["n", "ε", "m", "T", "σ/L, published and least", PUBLISHED, LEAST, START]
    head += ["(11), published σ", "(11), least σ", "lemma, least σ"]
    L = constant(STRONG)[1]
    least = 8 * P * L / (CONVEXITY * DIAMETER)
    note = (
        f"δ = {DELTA:g}, add-remove; p = {P}, |C|₂ = {DIAMETER:g}, Δ = {CONVEXITY:g}, L = {L:g}. Any θ of C "
        f"is within {trivial(STRONG):g}. Even without noise (11) is below that only for T > 8mpL/(Δ|C|₂), "
        f"here {least:.0f} m, whatever n is."
    )
    return Grid("SGD2: excess risk of a record beside Theorem 4, (11)", head, cells, note)


def sketch_grid(rows: list[Row]) -> Grid:
    cells = []
    for m in values([row for row in rows if row["claim"] == SKETCH], "m"):
        here = [row for row in rows if row["claim"] == SKETCH and row["m"] == m]
        n, T, sigma, eta, distance = (here[0][key] for key in ("n", "T", "σ", "η", "distance"))
        first = distance / (2 * T * eta)
        bounds = [(first + eta * variance) / n for variance in (sigma**2, m * P * sigma**2)]
        cells.append([f"{m:g}", f"{n:g}", f"{T:g}", _over(here, LEAST), *(f"{one:.2g}" for one in bounds)])
    head = ["m", "n", "T", "measured", "(12) as printed", "(12) with mpσ²"]
    note = "ε = 0.5, η = 1/(2n(1/4 + Δ)), least σ; else as above. The sum of m noisy gradients has mpσ²."
    return Grid("SGD2 with a constant η: excess risk of a record beside (12)", head, cells, note)


def draw_sgd1(axes: Any, rows: list[Row]) -> None:
    mine = [row for row in rows if row["claim"] == ONE and row["case"] == STRONG and row["claimed"] == 0.5]
    sizes = values(mine, "n")
    for place, method in enumerate((PUBLISHED, LEAST, START)):
        line(axes, sizes, [mean(mine, "excess", method=method, n=n) for n in sizes], place, method)
    bounds = [theorem_2(STRONG, n, 0.5, 1 / (2 * n**3)) for n in sizes]
    line(axes, sizes, bounds, 3, "(10), constant 1", dashed=True)
    _finish(axes, sizes, "records n", "SGD1, strongly convex, ε 0.5")


def draw_sgd2(axes: Any, rows: list[Row]) -> None:
    fixed = {"n": BASE["n"], "claimed": BASE["ε"], "m": BASE["m"]}
    mine = [row for row in rows if row["claim"] == TWO]
    mine = [row for row in mine if all(row[key] == value for key, value in fixed.items())]
    rounds = sorted(values(mine, "T")) or sorted(values([row for row in rows if row["claim"] == TWO], "T"))
    mine = mine or [row for row in rows if row["claim"] == TWO]
    for place, method in enumerate((PUBLISHED, LEAST, START)):
        line(axes, rounds, [mean(mine, "excess", method=method, T=T) for T in rounds], place, method)
    n, m = mine[0]["n"], mine[0]["m"]
    bounds = [theorem_4(n, m, T, mean(mine, "σ", method=LEAST, T=T)) for T in rounds]
    line(axes, rounds, bounds, 3, "(11), least σ", dashed=True)
    _finish(axes, rounds, "rounds T", f"SGD2, n {n:,.0f}, {m:g} parties, ε 0.5")


def _finish(axes: Any, places: list[float], label: str, title: str) -> None:
    level(axes, trivial(STRONG), "any θ of C")
    axes.set(yscale="log", xlabel=label, ylabel="excess risk of a record", title=title)
    ticks(axes, places)
    axes.legend(frameon=False, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3)
