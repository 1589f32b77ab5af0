"""AdaDP, Figure 1: trajectories on Beale's and other functions, and the cosine example (Xu et al. 2020).

Beale's function: 150 steps from (1, 1.5) towards the minimum (3, 0.5), γ = 0.1, γ' = 0.9, β = 1.5, G = 1e-6
as in the paper; its start, noise, clip and learning rates are not given: here σ = 0.3, C = 4 and several
rates, drawn at those that bring paths without noise nearest to the minimum. The third term is squared, as
Beale has it (the paper prints a cube). A distance D is the mean over steps between a noisy path and the path
of the same method without noise, and over 400 paths. "All widely used test functions show similar results":
the same on thirteen others (`experiments.surfaces`), each method at its own best rate of ten.

"published AdaDP" scales noise by gradients that were never released: it guarantees nothing. "AdaDP" reads
released gradients only, less the variance of their noise.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.frame import COLOURS, Grid, Row, Size, canvas, legend, seed, values
from experiments.surfaces import BEALE, SURFACES

Array = NDArray[np.float64]

STEPS, PATHS = 150, 400
NOISE, CLIP, FACTOR, GATE, SMOOTHING = 0.3, 4.0, 1.5, 1e-6, 1e-8
REMEMBERED, REMEMBERED_RAW, FLOOR = 0.1, 0.9, 0.1
RATES = {True: (0.01, 0.02, 0.05), False: (0.02, 0.05, 0.1, 0.15)}  # with adaptive steps and without
WIDE = {
    True: (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.15, 0.2),
    False: (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.3),
}
METHODS = {  # what scales the noise, and whether steps adapt
    "published AdaDP": ("raw", True),
    "AdaDP": ("released", True),
    "AdaL": ("clip", True),
    "DP-SGD": ("clip", False),
}
SAID = {"published AdaDP": "0.21", "DP-SGD": "0.90"}
COSINES = {(17.0, 8.5): "0.52", (13.5, 13.5): "0.36", (12.4, 24.8): "0.28"}  # deviations: published


def paths(surface: str, method: str, rate: float, noise: float, count: int) -> Array:
    """(steps + 1, count, 2): Algorithm 1 with lots of one, or its sound version."""
    scale, adapts = METHODS[method]
    random = np.random.default_rng(seed(surface, method, rate))
    w = np.tile(SURFACES[surface].start, (count, 1))
    squares, known, path = np.zeros_like(w), np.zeros_like(w), [w]
    for _ in range(STEPS):
        exact = SURFACES[surface].gradient(w)
        root = np.sqrt(np.maximum(known, (FLOOR * CLIP) ** 2 if scale == "released" else 0.0))
        local = (root.var(axis=1, keepdims=True) > GATE) & (scale != "clip")
        limit = np.minimum(FACTOR * root, np.inf if scale == "raw" else CLIP)
        norm = np.linalg.norm(exact, axis=1, keepdims=True)
        clipped = np.where(local, np.clip(exact, -limit, limit), exact / np.maximum(1, norm / CLIP))
        deviation = noise * np.where(local, np.sqrt(2) * limit, CLIP)
        noisy = clipped + deviation * random.normal(size=w.shape)
        squares = (1 - REMEMBERED) * squares + REMEMBERED * noisy**2
        seen = exact**2 if scale == "raw" else noisy**2 - deviation**2
        known = REMEMBERED_RAW * known + (1 - REMEMBERED_RAW) * seen
        move = noisy / np.sqrt(squares + SMOOTHING) if adapts else noisy
        w = w - rate * move
        path.append(w)
    return np.stack(path)


def measure(size: Size) -> list[Row]:
    size.only("repeats")
    rows, many = list[Row](), size.repeats_or(PATHS, small=20)
    for method, (_, adapts) in METHODS.items():
        for rate in RATES[adapts]:
            rows.append(
                {"what": "distance", "method": method, "rate": rate, **_apart(BEALE, method, rate, many)}
            )
        rate = _best(rows, method)
        noisy, exact = (paths(BEALE, method, rate, *one) for one in ((NOISE, many), (0.0, 1)))
        typical = np.argsort(np.linalg.norm(noisy - exact, axis=2).mean(axis=0))[noisy.shape[1] // 2]
        for kind, path in (("noisy", noisy[:, typical]), ("no noise", exact[:, 0])):
            place: Row = {"what": "path", "method": method, "rate": rate, "kind": kind}
            rows += [{**place, "step": t, "x": float(x), "y": float(y)} for t, (x, y) in enumerate(path)]
    for surface in list(SURFACES)[:3] if size.small else SURFACES:
        for method, (_, adapts) in METHODS.items():
            found = [(rate, _apart(surface, method, rate, many)) for rate in WIDE[adapts]]
            rate, best = min(found, key=lambda one: one[1]["no noise end"])
            rows.append({"what": "surface", "surface": surface, "method": method, "rate": rate, **best})
    random = np.random.default_rng(seed("cosine"))
    answer = np.array([10.0, 5.0])
    for deviations in COSINES:
        noisy = answer + random.normal(size=(10_000 if size.small else 1_000_000, 2)) * deviations
        cosines = noisy @ answer / np.linalg.norm(noisy, axis=1) / np.linalg.norm(answer)
        rows.append({"what": "cosine", "first": deviations[0], "second": deviations[1],
                     "mean": float(cosines.mean())})  # fmt: skip
    return rows


def _apart(surface: str, method: str, rate: float, many: int) -> dict[str, float]:
    """D, its deviation over paths, and how far paths with and without noise end from a minimum."""
    noisy, exact = paths(surface, method, rate, NOISE, many), paths(surface, method, rate, 0.0, 1)
    distances = np.linalg.norm(noisy - exact, axis=2).mean(axis=0)
    ends = {
        f"{kind} end": float(SURFACES[surface].distance(path[-1]).mean())
        for kind, path in (("noisy", noisy), ("no noise", exact))
    }
    return {"mean": float(distances.mean()), "sd": float(distances.std()), **ends}


def tables(rows: list[Row]) -> list[Grid]:
    cells = [
        [
            row["method"] + (" ✗" if row["method"].startswith("published") else ""),
            f"{row['rate']:g}",
            f"{row['mean']:.2f} ± {row['sd']:.2f}",
            SAID.get(row["method"], ""),
            f"{row['noisy end']:.2f}",
            f"{row['no noise end']:.2f}",
        ]
        for row in rows
        if row["what"] == "distance"
    ]
    head = ["", "rate", "D", "the paper's D (its rate is not given)", "end to minimum", "without noise"]
    first = Grid(f"Beale's function, {STEPS} steps", head, cells, "✗ guarantees nothing.")
    cells = [
        [f"{row['first']:g}, {row['second']:g}", f"{row['mean']:.3f}", COSINES[row["first"], row["second"]]]
        for row in rows
        if row["what"] == "cosine"
    ]
    caption = "Mean cosine between (10, 5) and itself with noise of three equal prices"
    return [first, _surfaces(rows), Grid(caption, ["deviations", "cosine", "the paper says"], cells)]


def _surfaces(rows: list[Row]) -> Grid:
    """D on every function, and on how many of them DP-SGD's is the larger."""
    mine = {(row["surface"], row["method"]): row for row in rows if row["what"] == "surface"}
    names = list(dict.fromkeys(surface for surface, _ in mine))
    cells = [[name, *(_distance(mine[name, method]) for method in METHODS)] for name in names]
    counts = [
        f"{sum(mine[name, method]['mean'] < mine[name, 'DP-SGD']['mean'] for name in names)} of {len(names)}"
        for method in METHODS
        if method != "DP-SGD"
    ]
    cells.append(["nearer than DP-SGD", *counts, ""])
    head = ["", *(method + (" ✗" if method.startswith("published") else "") for method in METHODS)]
    note = "In brackets: the distance to the nearest minimum at the end, with noise, and without."
    return Grid(f"D on test functions, {STEPS} steps, each method at its best rate", head, cells, note)


def _distance(row: Row) -> str:
    return f"{row['mean']:.2f} ({row['noisy end']:.2f}, {row['no noise end']:.2f})"


def draw(rows: list[Row]) -> Any:
    lines = [row for row in rows if row["what"] == "path"]
    methods = values(lines, "method")
    figure, (grid,) = canvas(1, len(methods), width=2.9, height=3.0)
    x, y = np.meshgrid(np.linspace(0, 4, 40), np.linspace(-1, 2, 40))
    height = SURFACES[BEALE].value(x, y)
    for axes, method in zip(grid, methods, strict=True):
        axes.contour(x, y, np.log1p(height), levels=8, colors="#cccccc", linewidths=0.5)
        for kind, colour in (("noisy", COLOURS[1]), ("no noise", COLOURS[0])):
            mine = [row for row in lines if row["method"] == method and row["kind"] == kind]
            axes.plot([row["x"] for row in mine], [row["y"] for row in mine], color=colour, label=kind)
        axes.plot(
            *SURFACES[BEALE].minima[0], "*", color=COLOURS[2], markersize=9, label="minimum", linestyle="none"
        )
        cross = " ✗" if method.startswith("published") else ""
        axes.set(title=f"{method}{cross}, rate {mine[0]['rate']:g}", xlim=(0, 4), ylim=(-1, 2), xlabel="x")
    grid[0].set(ylabel="y")
    legend(figure, grid[0], 3)
    return figure


def _best(rows: list[Row], method: str) -> float:
    """The rate whose path without noise ends nearest to the minimum."""
    mine = [row for row in rows if row["what"] == "distance" and row["method"] == method]
    return float(min(mine, key=lambda row: float(row["no noise end"]))["rate"])
