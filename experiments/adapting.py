"""Adapting: does a rule that changes noise, batch size or clipping norm during training beat fixed plans.

A network (196-64-10, images averaged over 2 × 2 pixels) by DP-SGD with momentum, whose learning rate falls to
0 with the budget. Fixed plans: every sampling rate, number of batches and learning rate of a grid, and the
best of them with noise on a schedule or with a clip that follows a quantile. Rules spend from a menu around
that best plan. All are tuned on Fashion-MNIST; MNIST is not used for tuning, but every fixed plan is run on
it too, so that the rules can be compared with the plan that would have been best.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn

import farthing as ft
from experiments.deep import LOSS, right
from experiments.frame import COLOURS, Grid, Row, Size, canvas, say, seed, stream, values
from experiments.pictures import Images, clothes, digits, kept
from farthing.torch.training.plan import fitted

BUDGET = ft.Budget(1.0, 1e-5)
RATES, COUNTS, STEPS = (0.02, 0.06), (300, 900, 2700), (0.25, 0.5, 1.0, 2.0)
RUNS, MOMENTUM, CLIP, UNITS = 5, 0.9, 1.0, 64
TUNED, REPORTED = "Fashion-MNIST", "MNIST"
FIXED, RULES = "fixed", "rule"


@dataclass(frozen=True, slots=True)
class Way:
    """A way to train: a plan of so many batches, and what is done with its noise, rate and clip."""

    name: str
    rate: float
    count: int
    step: float
    kind: str = FIXED

    @property
    def noise(self) -> float:
        """The noise multiplier at which a promise of so many batches spends the budget."""
        return fitted(lambda t: 1.0, self.rate, self.count, BUDGET)[0]


Options = dict[str, Any]


def promised(way: Way) -> Options:
    return {"steps": way.count}


def shaped(start: float, end: float) -> Callable[[Way], Options]:
    """Noise along a line fixed ahead, in eight steps, from ``start`` to ``end`` times the same."""

    def options(way: Way) -> Options:
        def size(t: int) -> float:
            return start + (end - start) * math.floor(8 * (t - 1) / way.count) / 7

        return {"noise_multiplier": fitted(size, way.rate, way.count, BUDGET)}

    return options


def quantile(way: Way) -> Options:
    return {"steps": way.count, "clip_norm": ft.torch.Quantile(0.5, start=CLIP)}


def _noises(way: Way) -> list[ft.torch.Change]:
    return [ft.torch.Change(noise_multiplier=part * way.noise) for part in (1.0, 0.7)]


def plateau(patience: int) -> Callable[[Way], Options]:
    """Noise that falls from 1.4 to 1 and 0.7 times the plan's when released gradients stop shrinking."""
    return lambda way: _on_menu(way, ft.torch.Plateau(_noises(way), patience=patience, memory=0.98))


def gate(way: Way) -> Options:
    return _on_menu(way, ft.torch.NoiseGate(1.4 * way.noise, way.noise, memory=0.98))


def growing(way: Way) -> Options:
    changes = {share: ft.torch.Change(sampling_rate=part * way.rate) for share, part in ((0.3, 1), (0.6, 2))}
    return _on_menu(way, ft.torch.Stages(changes), parts=(1.0,), rates=(0.5, 1.0, 2.0))


def both(way: Way) -> Options:
    return plateau(60)(way) | {"clip_norm": ft.torch.Quantile(0.5, start=CLIP)}


def _on_menu(
    way: Way, rule: Any, parts: tuple[float, ...] = (1.4, 1.0, 0.7), rates: tuple[float, ...] = (1.0,)
) -> Options:
    entries = [
        ft.Poisson(rate * way.rate).amplify(ft.Gaussian(part * way.noise)) for rate in rates for part in parts
    ]
    noise, rate = parts[0] * way.noise, rates[0] * way.rate
    return {"filter": ft.Menu(entries), "adapt": rule, "noise_multiplier": noise, "sampling_rate": rate}


PLAN = "one noise for all batches"
SCHEDULES: dict[str, Callable[[Way], Options]] = {
    "noise falls, fixed ahead": shaped(1.5, 0.75),
    "noise rises, fixed ahead": shaped(0.75, 1.5),
    "clip follows the median": quantile,
}
ADAPTIVE: dict[str, Callable[[Way], Options]] = {
    "noise falls at a plateau, patience 20": plateau(20),
    "noise falls at a plateau, patience 100": plateau(100),
    "noise by a gate": gate,
    "batches grow by share": growing,
    "noise at a plateau, clip follows the median": both,
}
WAYS = {PLAN: promised, **SCHEDULES, **ADAPTIVE}


def trained(data: Images, way: Way, run: int) -> tuple[float, int]:
    """Test accuracy of one run, in percent, and its number of batches."""
    torch.manual_seed(seed("adapting", data.name, run))
    model = nn.Sequential(nn.Linear(data.x.shape[1], UNITS), nn.ReLU(), nn.Linear(UNITS, 10))
    options = {"sampling_rate": way.rate, "clip_norm": CLIP, **WAYS[way.name](way)}
    noise = stream("adapting", data.name, way.name, way.rate, way.count, way.step, run)
    ledger = ft.Ledger(BUDGET, filter=options.pop("filter", None), stream=noise)
    optimizer = torch.optim.SGD(model.parameters(), way.step, momentum=MOMENTUM)

    def fall(step: ft.torch.TrainingStep) -> None:
        optimizer.param_groups[0]["lr"] = way.step * (1 - step.share)

    steps = sum(
        1
        for _ in ft.torch.train(
            model, LOSS, (data.x, data.labels), ledger, optimizer=optimizer, callbacks=[fall],
            physical_batch_size=2000, **options,
        )
    )  # fmt: skip
    return right(model, data.test, data.answers), steps


def pooled(images: Images) -> Images:
    """Images averaged over 2 × 2 pixels, end to end, in [0, 1]."""

    def smaller(x: Tensor) -> Tensor:
        return nn.functional.avg_pool2d(x[:, None].float() / max(float(x.max()), 1.0), 2).flatten(1)

    return Images(images.name, smaller(images.x), images.labels, smaller(images.test), images.answers)


def measure(size: Size) -> list[Row]:
    size.only("repeats")
    rates, counts, steps = (RATES[1:], (40,), STEPS[:1]) if size.small else (RATES, COUNTS, STEPS)
    plans = [Way(PLAN, rate, count, step) for rate in rates for count in counts for step in steps]
    tuning, reporting = (pooled(images(size.small)) for images in (clothes, digits))
    rows = _runs(tuning, plans, 1)
    best = _best(rows, PLAN)
    others = [
        Way(name, best.rate, best.count, part * best.step, RULES if name in ADAPTIVE else FIXED)
        for name in WAYS
        if name != PLAN
        for part in ((1.0,) if size.small else (0.5, 1.0, 2.0))
    ]
    rows += _runs(tuning, others, 1)
    chosen = [_best(rows, name) for name in WAYS if name != PLAN]
    return rows + _runs(reporting, plans + chosen, size.repeats_or(RUNS))


def _runs(data: Images, ways: list[Way], runs: int) -> list[Row]:
    rows = []
    for way in ways:
        for run in range(runs):
            place = "adapting", data.name, len(data.x), way, run
            found, batches = kept(place, lambda w=way, r=run: trained(data, w, r))
            where = {"data": data.name, "way": way.name, "kind": way.kind, "rate": way.rate}
            rows.append({**where, "planned": way.count, "step": way.step, "run": run, "batches": batches})
            rows[-1]["accuracy"] = found
            say(f"{data.name}, {way.name}, {way.rate:g}, {batches}, step {way.step:g}: {found:.2f} %")
    return rows


def _best(rows: list[Row], name: str) -> Way:
    row = max((row for row in rows if row["way"] == name), key=lambda row: row["accuracy"])
    return Way(name, row["rate"], row["planned"], row["step"], row["kind"])


def _settings(rows: list[Row], data: str) -> list[tuple[Row, list[float]]]:
    """Each setting on a data set with the accuracies of its runs, the best first."""
    keys = "way", "rate", "planned", "step"
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["data"] == data:
            groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    found = [(group[0], [row["accuracy"] for row in group]) for group in groups.values()]
    return sorted(found, key=lambda one: -fmean(one[1]))


def tables(rows: list[Row]) -> list[Grid]:
    return [_grid(rows, data) for data in values(rows, "data")]


def _grid(rows: list[Row], data: str) -> Grid:
    cells, seen = [], set[str]()
    for row, found in _settings(rows, data):
        if row["way"] in seen:
            continue
        seen.add(row["way"])
        spread = f" ± {stdev(found):.2f}" if len(found) > 1 else ""
        setting = f"rate {row['rate']:g}, {row['planned']:,} planned, step {row['step']:g}"
        cells.append([row["way"], row["kind"], setting, f"{row['batches']:,}", f"{fmean(found):.2f}{spread}"])
    head = ["way", "", "setting", "batches", "accuracy, %"]
    note = "The best setting of each way on this data; ± is the standard deviation of the runs."
    return Grid(f"{data}, ε = {BUDGET.epsilon:g}, δ = {BUDGET.delta:g}", head, cells, note)


def draw(rows: list[Row]) -> Any:
    data = values(rows, "data")[-1]
    found = [(row, runs) for row, runs in _settings(rows, data)]
    names = list(dict.fromkeys(row["way"] for row, _ in found))
    figure, grid = canvas(1, 1, width=7.2, height=3.4)
    axes = grid[0, 0]
    for row, runs in found:
        colour = COLOURS[0] if row["kind"] == FIXED else COLOURS[1]
        axes.plot(runs, [-names.index(row["way"])] * len(runs), "o", color=colour, alpha=0.6, markersize=4)
    axes.set_yticks([-place for place in range(len(names))], names)
    axes.set(xlabel=f"test accuracy on {data}, %, each run (blue: fixed ahead, orange: a rule)")
    return figure
