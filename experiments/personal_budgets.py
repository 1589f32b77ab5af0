"""Personal budgets in one training: what they gain over one budget for all.

Records have ε of their own, in the proportions of the literature: 34, 43 and 23 %, or 54, 37 and 9 %, the
strictest first (Boenisch et al. 2023, "Have it your way"; ε 1, 2, 3 at δ = 1e-5 on MNIST). Their two methods
are compared on the same model, by this library's accounting: *rates* ("Sample"), a sampling rate a level, and
*weights* ("Scale"), one rate for all and a weight a level. The alternatives are one budget for all, the
strictest, and leaving the stricter records out, "ε ≥ 2 alone" being a plain run at ε = 2 on those who allow
it. "All at 3" is for comparison only, since most people did not agree to it. MNIST: histograms of oriented
gradients (Dalal & Triggs 2005, not learnt) and multinomial logistic regression by DP-SGD. Tables: logistic
regression at ε 0.05, 0.2 and 1, by DP-SGD (rates), and by the estimator's default, which queries all records
(weights). Nothing was tuned for any of it: all constants are the library's defaults. Who has which budget is
drawn anew for each run.
"""

from collections.abc import Iterator
from functools import partial
from statistics import fmean, pstdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

import farthing as ft
from experiments.datasets import classification, folds
from experiments.frame import COLOURS, INK, Grid, Row, Size, canvas, say, seed, values
from farthing.accounting.personal import Levels, PersonalFilter, mean_budget, plan_rates, plan_weights
from farthing.data.schema import find
from farthing.linear.methods.dpsgd import Batches, on_batches
from farthing.linear.solvers import CLASSIFIERS, SolverMethod

Array = NDArray[Any]
Way = tuple[str, str, float | None, float]

DELTA, RUNS = 1e-5, 3
MIXES = {"34 / 43 / 23 %": (0.34, 0.43, 0.23), "54 / 37 / 9 %": (0.54, 0.37, 0.09)}
DIGITS, TABLES = (1.0, 2.0, 3.0), (0.05, 0.2, 1.0)
STEPS, RATE = 1500, 0.03  # of MNIST: as many as the estimator takes at most, of 1,800 records
ORIENTATIONS, CELL = 8, 4


def gradients(pictures: Array) -> Array:
    """Histograms of oriented gradients: ``ORIENTATIONS`` in cells of ``CELL`` pixels, in rows of norm 1."""
    light = pictures.astype(np.float32) / 255
    down, right = np.gradient(light, axis=(1, 2))
    size, angle = np.hypot(down, right), np.arctan2(down, right) % (2 * np.pi)
    place = (angle / (2 * np.pi) * ORIENTATIONS).astype(int) % ORIENTATIONS
    n, cells = len(light), light.shape[1] // CELL
    rows = np.empty((n, cells, cells, ORIENTATIONS), np.float32)
    for each in range(ORIENTATIONS):
        kept = np.where(place == each, size, 0)[:, : cells * CELL, : cells * CELL]
        rows[..., each] = kept.reshape(n, cells, CELL, cells, CELL).sum(axis=(2, 4))
    rows = np.sqrt(rows.reshape(n, -1))
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)


def batches(ledger: ft.Ledger, problem: Any, *, way: str, steps: int) -> Iterator[Any]:
    """DP-SGD on ``steps`` batches: rates or weights by level, or one budget for all."""
    budget, rule = ledger.budget, ledger.filter
    if not isinstance(rule, PersonalFilter):
        people = Levels((budget.epsilon,), (problem.records,))
    else:
        people = Levels(rule.epsilons, problem.sizes)
    if way == "weights":
        sampler, noise = plan_weights(people, budget, steps=steps, sampling_rate=RATE)
    else:
        plan = plan_rates(people, budget, steps=steps, sampling_rate=RATE)
        sampler, noise = plan.sampler, plan.noise_multiplier
    if not isinstance(rule, PersonalFilter):
        sampler = ft.Poisson(sampler.sampling_rates[0])
        mean, to_go_by = sampler.sampling_rate, budget.epsilon
    else:
        mean = sampler.expected(people.sizes) / len(people)
        to_go_by = mean_budget(people, budget).epsilon
    terms = Batches(sampler, mean, noise, to_go_by)
    yield from on_batches(ledger, problem, problem.rows(), terms, steps, None, None, 0.9)


def solver(name: str, steps: int | None) -> SolverMethod:
    """A solver that takes personal budgets: the library's own, or one of a number of steps."""
    if steps is None:
        return CLASSIFIERS[name]
    way = "weights" if name == "weights" else "rates"
    return SolverMethod(partial(batches, way=way, steps=steps), None, personal="rates")


def ways(epsilons: tuple[float, ...], name: str, personal: tuple[str, ...]) -> list[Way]:
    """The name of a way, its solver, its one ε (None: everybody's own), and who is left out (ε below)."""
    alone = [(f"ε ≥ {one:g} alone", name, one, one) for one in epsilons[1:]]
    everybody = f"all at {epsilons[-1]:g} (not agreed to)"
    return [
        (f"all at {epsilons[0]:g}", name, epsilons[0], 0.0),
        *alone,
        *((f"personal {one}", one if name == "batches" else name, None, 0.0) for one in personal),
        (everybody, name, epsilons[-1], 0.0),
    ]


def accuracy(
    train: tuple[Array, Array], test: tuple[Array, Array], own: Array, way: Way,
    steps: int | None, run: int, **model: Any,
) -> float:  # fmt: skip
    """Test accuracy of one way, in percent."""
    name, kind, epsilon, least = way
    kept = own >= least
    estimator = ft.LogisticRegression(
        epsilon=epsilon, delta=DELTA, solver=solver(kind, steps), random_state=seed(name, kind, run), **model
    )
    budgets = own[kept] if epsilon is None else None
    estimator.fit(train[0][kept], train[1][kept], budgets=budgets)
    return 100 * float(np.mean(estimator.predict(test[0]) == test[1]))


def measure(size: Size) -> list[Row]:
    size.only("repeats")
    rows, known = list[Row](), dict[tuple[Any, ...], float]()
    for data, mix, train, test, epsilons, kinds, steps, more in problems(size.small):
        for run in range(size.repeats_or(RUNS)):
            shares = MIXES[mix]
            own = np.random.default_rng(seed(data, mix, run)).choice(epsilons, len(train[1]), p=shares)
            for name, personal in kinds:
                for way in ways(epsilons, name, personal):
                    alike = way[2] is not None and not way[3]  # nobody's own budget matters
                    key = (data, name, *way, run, "" if alike else mix)
                    if key not in known:
                        known[key] = accuracy(train, test, own, way, steps, run, **more)
                    found = known[key]
                    say(f"{data}, {name}, {mix}, {way[0]}, run {run}: {found:.2f} %")
                    rows.append({"data": data, "solver": name, "mix": mix, "way": way[0], "run": run})
                    rows[-1]["accuracy"] = found
    return rows


def problems(small: bool) -> Iterator[tuple[Any, ...]]:
    """Data, mix, rows to learn from and to test on, levels, solvers, steps and settings of the estimator."""
    if not small and (path := find("mnist.npz")) is not None:
        with np.load(path) as data:
            train, test = (
                (gradients(data[f"X_{part}"]), data[f"y_{part}"].astype(np.int64))
                for part in ("train", "test")
            )
        for mix in MIXES:
            kinds = [("batches", ("rates", "weights"))]
            yield "MNIST", mix, train, test, DIGITS, kinds, STEPS, {"classes": range(10)}
    for name, (X, y) in classification(small).items():
        _, chosen, held = next(folds(len(y), Size(), 1))
        train, test = (X[chosen], y[chosen].astype(int)), (X[held], y[held].astype(int))
        kinds = [("auto", ("weights",)), ("sgd-ma", ("rates",))]
        mix = list(MIXES)[-1]
        yield name, mix, train, test, TABLES, kinds, None, {"bounds": (0, 1)}


def tables(rows: list[Row]) -> list[Grid]:
    return [_grid(name, [row for row in rows if row["data"] == name]) for name in values(rows, "data")]


def _grid(name: str, rows: list[Row]) -> Grid:
    columns = list(dict.fromkeys((row["solver"], row["mix"]) for row in rows))
    cells = []
    for way in _in_order(rows):
        cells.append([way])
        for solver, mix in columns:
            found = [
                row["accuracy"]
                for row in rows
                if (row["way"], row["solver"], row["mix"]) == (way, solver, mix)
            ]
            cells[-1].append(f"{fmean(found):.2f} ± {pstdev(found):.2f}" if found else "")
    head = ["", *(f"{solver}, {mix}" for solver, mix in columns)]
    note = f"δ = {DELTA:g}, add-remove; ± is the standard deviation of {len(values(rows, 'run'))} run(s)."
    return Grid(f"{name}: test accuracy, %", head, cells, note)


def _in_order(rows: list[Row]) -> list[str]:
    """The ways, with what was not agreed to at the end."""
    return sorted(values(rows, "way"), key=lambda way: "agreed" in way)


def draw(rows: list[Row]) -> Any:
    names = values(rows, "data")
    across = min(2, len(names))
    figure, grid = canvas(-(-len(names) // across), across, width=4.2, height=2.5)
    for axes, name in zip(grid.flat, names, strict=False):
        mine = [row for row in rows if row["data"] == name]
        labels = list(reversed(_in_order(mine)))
        for place, column in enumerate(dict.fromkeys((row["solver"], row["mix"]) for row in mine)):
            here = [row for row in mine if (row["solver"], row["mix"]) == column]
            for way in values(here, "way"):
                found = [row["accuracy"] for row in here if row["way"] == way]
                at = labels.index(way) + 0.16 * (place - 0.5)
                style = {"color": COLOURS[place], "marker": "os"[place % 2], "linestyle": "none"}
                label = f"{column[0]}, {column[1]}" if way == values(here, "way")[0] else None
                axes.errorbar(fmean(found), at, xerr=pstdev(found), label=label, markersize=4, **style)
        axes.set_yticks(range(len(labels)), labels, fontsize=7)
        axes.set(xlabel="test accuracy, %", title=name)
        axes.legend(frameon=False, fontsize=6, loc="lower left", bbox_to_anchor=(0.0, 0.08))
        axes.grid(axis="y", color=INK, alpha=0.1)
    return figure
