"""Correlated noise: when noise that cancels beats independent noise, by epochs and budget.

A network (196-64-10, images averaged over 2 × 2 pixels) by DP-SGD with momentum, whose learning rate falls to
0, for 1 to 40 epochs. Noise is independent, or correlated over the number of bands that
`farthing.choose_bands` finds from public numbers. Each kind gets its own sampling rate and learning rate for
every number of epochs and every ε, the best of a grid on Fashion-MNIST; MNIST plays no part in that. 40
epochs go by what was best for 8.
"""

from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

import torch
from torch import nn

import farthing as ft
from experiments.adapting import pooled
from experiments.deep import LOSS, right
from experiments.frame import COLOURS, MARKERS, Grid, Row, Size, canvas, say, seed, stream, values
from experiments.pictures import Images, clothes, digits, kept

DELTA, EPSILONS, EPOCHS, LONG = 1e-5, (1.0, 3.0, 8.0), (1, 4, 8), 40
RATES, STEPS = (0.01, 0.04), (0.25, 0.5, 1.0, 2.0)
RUNS, MOMENTUM, CLIP, UNITS = 3, 0.9, 1.0, 64
KINDS = "independent", "correlated"


@dataclass(frozen=True, slots=True)
class Way:
    """A way to spend ε in so many epochs: the kind of noise, sampling rate and learning rate."""

    kind: str
    epsilon: float
    epochs: int
    rate: float
    step: float


def trained(data: Images, way: Way, run: int) -> tuple[float, int]:
    """Test accuracy of one run, in percent, and the bands of its noise."""
    torch.manual_seed(seed("correlated", data.name, run))
    model = nn.Sequential(nn.Linear(data.x.shape[1], UNITS), nn.ReLU(), nn.Linear(UNITS, 10))
    noise = stream("correlated", data.name, way.kind, way.epsilon, way.epochs, way.rate, way.step, run)
    budget, steps = ft.Budget(way.epsilon, DELTA), round(way.epochs / way.rate)
    ledger = ft.Ledger(budget, stream=noise)
    optimizer = torch.optim.SGD(model.parameters(), way.step, momentum=MOMENTUM)
    bands = 1 if way.kind == "independent" else ft.choose_bands(budget, way.rate, steps).bands
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / steps)
    training = ft.torch.train(
        model, LOSS, (data.x, data.labels), ledger, optimizer=optimizer, scheduler=falling,
        sampling_rate=way.rate, steps=steps, clip_norm=CLIP, bands=bands, physical_batch_size=2400,
    )  # fmt: skip
    for _ in training:
        pass
    return right(model, data.test, data.answers), training.plan.bands


def measure(size: Size) -> list[Row]:
    size.only("repeats")
    grid = ((8.0,), (1,), RATES[1:], STEPS[1:2]) if size.small else (EPSILONS, EPOCHS, RATES, STEPS)
    tuning, reporting = (pooled(images(size.small)) for images in (clothes, digits))
    rows: list[Row] = []
    for epochs in grid[1]:
        for epsilon in grid[0]:
            for kind in KINDS:
                ways = [Way(kind, epsilon, epochs, rate, step) for rate in grid[2] for step in grid[3]]
                tried = [_row(tuning, way, 0) for way in ways]
                best = ways[max(range(len(ways)), key=lambda place: tried[place]["accuracy"])]
                again = [best] if size.small or epochs < EPOCHS[-1] else [best, replace(best, epochs=LONG)]
                rows += tried
                rows += [_row(reporting, way, run) for way in again for run in range(size.repeats_or(RUNS))]
    return rows


def _row(data: Images, way: Way, run: int) -> Row:
    accuracy, bands = kept(("correlated", data.name, len(data.x), way, run), lambda: trained(data, way, run))
    say(f"{data.name}, {way.kind} ({bands} bands), ε {way.epsilon:g}, {way.epochs} epochs: {accuracy:.2f} %")
    where = {"data": data.name, "noise": way.kind, "ε": way.epsilon, "epochs": way.epochs}
    return {**where, "rate": way.rate, "step": way.step, "bands": bands, "run": run, "accuracy": accuracy}


def _found(rows: list[Row], data: str, kind: str, epsilon: float, epochs: int) -> list[Row]:
    where = {"data": data, "noise": kind, "ε": epsilon, "epochs": epochs}
    return [row for row in rows if all(row[key] == value for key, value in where.items())]


def tables(rows: list[Row]) -> list[Grid]:
    data = values(rows, "data")[-1]
    lines = []
    for epochs in values(rows, "epochs"):
        for epsilon in values(rows, "ε"):
            both = [_found(rows, data, kind, epsilon, epochs) for kind in KINDS]
            cells = [_shown([row["accuracy"] for row in found]) for found in both]
            settings = [f"{found[0]['rate']:g}, {found[0]['step']:g}" for found in both]
            gained = fmean(row["accuracy"] for row in both[1]) - fmean(row["accuracy"] for row in both[0])
            line = [epochs, f"{epsilon:g}", *cells, f"{gained:+.2f}", both[1][0]["bands"], *settings]
            lines.append([str(cell) for cell in line])
    heads = ["epochs", "ε", "independent", "correlated", "gained", "bands", "rate, step", "rate, step"]
    return [Grid(f"{data}: test accuracy in percent, mean and standard deviation of runs", heads, lines)]


def _shown(found: list[float]) -> str:
    return f"{fmean(found):.2f}" + (f" ± {stdev(found):.2f}" if len(found) > 1 else "")


def draw(rows: list[Row]) -> Any:
    data, epsilons = values(rows, "data")[-1], values(rows, "ε")
    figure, grid = canvas(1, len(epsilons))
    axes = grid[0]
    for axis, epsilon in zip(axes, epsilons, strict=True):
        for kind, colour, marker in zip(KINDS, COLOURS, MARKERS, strict=False):
            for epochs in values(rows, "epochs"):
                found = [row["accuracy"] for row in _found(rows, data, kind, epsilon, epochs)]
                label = kind if epochs == values(rows, "epochs")[0] else None
                axis.plot([epochs] * len(found), found, marker, color=colour, label=label, alpha=0.8)
        axis.set_xscale("log")
        axis.set_xlabel("epochs")
        axis.set_title(f"ε = {epsilon:g}")
    axes[0].set_ylabel("test accuracy, %")
    axes[0].legend()
    return figure
