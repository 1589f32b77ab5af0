"""The moments accountant against strong composition and tight accounting (Abadi et al. 2016, Figure 2).

Poisson batches of rate q = 0.01, noise σ = 4 times the clip, δ = 1e-5, add-remove: ε of E epochs (E/q
batches), by each method for the same batches. "strong" is the curve as it was published; it uses a Gaussian
bound outside of its range and is not a guarantee (`composition.strong_as_published`). "advanced" is textbook
composition of valid bounds. "tight" is `accounting.pld`. The second table shows the reverse: the noise that
10,000 batches need within a given ε. The third follows from it: Theorem 1 says that for some constant c₂ σ >=
c₂ q √(T ln 1/δ) / ε is enough, without naming it; the table has the least. The fourth compares the log
moments of one batch, by integration, with the bound q² λ (λ + 1) / ((1 - q) σ²), without its O(q³/σ³).

E = 100 (ε 9.34 and 1.26) is in Section 3.1 of Jiang, "Deep learning with differential privacy"; E = 400 in
Section 5.1 of Abadi et al. only.
"""

import math
from typing import Any

from experiments.frame import PLOT, Grid, Row, Size, canvas, legend, line, ticks, values
from farthing.accounting import calibrate, composition, gaussian, moments, pld, rdp
from farthing.budget import Budget
from farthing.queries.events import GaussianEvent, PoissonEvent, RepeatedEvent

RATE, NOISE, DELTA, LOTS = 0.01, 4.0, 1e-5, 10_000
EPOCHS = (1, 5, 10, 20, 50, 100, 150, 200, 250, 300, 350, 400)
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
MOMENTS = (1, 2, 4, 8, 16, 32)
METHODS = ("strong", "advanced", "moments", "Rényi", "tight")
PUBLISHED = {
    ("strong", 100): "9.34",
    ("strong", 400): "24.22",
    ("moments", 100): "1.26",
    ("moments", 400): "2.55",
}


def epsilon(method: str, noise: float, lots: int) -> float:
    """ε of so many lots at DELTA."""
    if method == "strong":
        return composition.strong_as_published(noise, RATE, lots, DELTA)[0]
    if method == "advanced":
        return composition.advanced_sampled(noise, RATE, lots, DELTA)
    if method == "moments":
        return moments.epsilon(noise, RATE, lots, DELTA)[0]
    if method == "Rényi":
        return rdp.epsilon(lots * rdp.poisson_gaussian(noise, RATE, rdp.ORDERS), rdp.ORDERS, DELTA)[0]
    return pld.epsilon(RepeatedEvent(PoissonEvent(RATE, GaussianEvent(noise)), lots), DELTA)


def noise(method: str, limit: float) -> float:
    """The least noise with which LOTS lots stay within ε."""
    if method == "tight":
        return calibrate.noise(
            lambda sigma: RepeatedEvent(PoissonEvent(RATE, GaussianEvent(sigma)), LOTS), Budget(limit, DELTA)
        )
    return gaussian.safe_root(lambda sigma: epsilon(method, sigma, LOTS) - limit, 200.0, 0.5)


def bound(order: int) -> float:
    """The leading term of the bound on the log moment λ of one lot."""
    return RATE**2 * order * (order + 1) / ((1 - RATE) * NOISE**2)


def constant(sigma: float, limit: float) -> float:
    """c₂ of Theorem 1 for LOTS lots."""
    return sigma * limit / (RATE * math.sqrt(LOTS * math.log(1 / DELTA)))


def measure(size: Size) -> list[Row]:
    size.only()
    exact = moments.log_moments(NOISE, RATE)
    rows: list[Row] = [
        {"question": "moment", "λ": order, "value": float(exact[order - 1]), "bound": bound(order)}
        for order in MOMENTS
    ]
    rows += [
        {"question": "ε", "epochs": epochs, "method": method, "value": epsilon(method, NOISE, epochs * 100)}
        for epochs in ((1, 100, 400) if size.small else EPOCHS)
        for method in METHODS
    ]
    return rows + [
        {"question": "noise", "ε": limit, "method": method, "value": noise(method, limit)}
        for limit in ((1.0,) if size.small else EPSILONS)
        for method in METHODS
    ]


def tables(rows: list[Row]) -> list[Grid]:
    known = [row for row in rows if "method" in row]
    found = {(row["question"], row.get("epochs", row.get("ε")), row["method"]): row["value"] for row in known}
    epochs = [e for e in values(rows, "epochs") if e in (1, 10, 50, 100, 200, 400)]
    cells = []
    for method in METHODS:
        said = [PUBLISHED.get((method, e), PLOT if method in ("strong", "moments") else "") for e in epochs]
        cells.append([method, *(f"{found['ε', e, method]:.4f}" for e in epochs)])
        if method in ("strong", "moments"):
            cells.append([f"{method}, published", *said])
    first = Grid(
        f"ε after E epochs, q = {RATE}, σ = {NOISE:g}, δ = {DELTA:g}", ["E", *map(str, epochs)], cells
    )
    limits = values(rows, "ε")
    heads = [f"{e:g}" for e in limits]
    cells = [[method, *(f"{found['noise', e, method]:.3f}" for e in limits)] for method in METHODS]
    second = Grid(f"noise σ/C that {LOTS:,} batches need", ["ε", *heads], cells)
    cells = [
        [method, *(f"{constant(found['noise', e, method], e):.3f}" for e in limits)] for method in METHODS
    ]
    third = Grid(f"c₂ = σε / (q √(T ln 1/δ)) of Theorem 1, T = {LOTS:,}", ["ε", *heads], cells)
    sizes = [row for row in rows if row["question"] == "moment"]
    cells = [
        ["exact", *(f"{row['value']:.3g}" for row in sizes)],
        ["bound, leading term", *(f"{row['bound']:.3g}" for row in sizes)],
        ["bound over exact", *(f"{row['bound'] / row['value']:.2f}" for row in sizes)],
    ]
    fourth = Grid(
        f"α(λ) of one batch, q = {RATE}, σ = {NOISE:g}", ["λ", *(str(row["λ"]) for row in sizes)], cells
    )
    return [first, second, third, fourth]


def draw(rows: list[Row]) -> Any:
    figure, ((left, right),) = canvas(1, 2)
    for place, method in enumerate(METHODS):
        dashed = method == "strong"
        mine = [row for row in rows if row.get("method") == method]
        curve = [(row["epochs"], row["value"]) for row in mine if row["question"] == "ε"]
        line(left, *zip(*curve, strict=True), place, method, dashed)
        curve = [(row["ε"], row["value"]) for row in mine if row["question"] == "noise"]
        line(right, *zip(*curve, strict=True), place, method, dashed)
    said = [(epochs, float(text)) for (_, epochs), text in PUBLISHED.items()]
    left.plot(*zip(*said, strict=True), "k*", markersize=8, markerfacecolor="none", label="published")
    left.set(yscale="log", xlabel="epochs", ylabel="ε at δ = 1e-5", title="q = 0.01, σ = 4")
    right.set(yscale="log", xlabel="ε", ylabel="σ / C", title="noise that 10,000 batches need")
    ticks(right, EPSILONS)
    legend(figure, left, 6)
    return figure
