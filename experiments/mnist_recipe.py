"""MNIST within a budget, the most accurate recipe: scattering features, whitened, and a linear head.

Scattering features (`farthing.torch.features`, public), their logarithms normalised in groups of channels
within each image (public), whitened by three noisy answers, and a linear head by DP-SGD with large batches
and momentum. One ledger pays for all of it; δ = 1e-5, add-remove, per record, against anyone who does not see
who is in a batch. Its constants were chosen on Fashion-MNIST and then frozen.
"""

import math
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor, nn

import farthing as ft
from experiments.deep import LOSS, right
from experiments.frame import COLOURS, MARKERS, Grid, Row, Size, canvas, say, stream, ticks, values
from experiments.pictures import Images, digits, features, kept
from farthing.queries.events import GaussianEvent, RepeatedEvent
from farthing.torch.features import promised, whitening
from farthing.torch.training.loop import train
from farthing.torch.training.plan import fitted

DELTA, EPSILONS, RUNS = 1e-5, (1.0, 3.0), 3
GROUPS = 9  # of channels, normalised together
FAINT = 1e-3  # added before logarithms are taken
MOMENTS = 0.05  # the part of μ² that whitening may cost
RATE, LOTS, CLIP, MOMENTUM = 0.05, 800, 0.1, 0.9
LEARNING_RATE, MOST = 35.0, 100.0  # times √ε, and at most


def normalised(found: Tensor) -> Tensor:
    """Logarithms of features, normalised in groups of channels; colours become channels."""
    if found.ndim == 5:
        found = found.flatten(1, 2)
    return nn.functional.group_norm((found.float().clamp(min=0) + FAINT).log(), GROUPS)


def recipe(data: Images, epsilon: float, run: int, *, lots: int = LOTS) -> float:
    """Test accuracy of one run, in percent; ``data`` holds features in place of images."""
    device = data.x.device
    torch.manual_seed(run)
    ledger = ft.Ledger(ft.Budget(epsilon, DELTA), stream=stream("recipe", data.name, epsilon, run))
    moments = math.sqrt(3 / MOMENTS) / ledger.budget.mu
    before = RepeatedEvent(GaussianEvent(moments), 3)
    noise = fitted(lambda t: 1.0, RATE, lots, ledger.budget, before)[0]
    promised(ledger, noise_multiplier=moments)
    ledger.promise(ft.Poisson(RATE).amplify(ft.Gaussian(noise)), lots)
    white = whitening(ledger, data.x, noise_multiplier=moments)
    rows = mapped(white, data.x)
    model = nn.Linear(rows.shape[1], 10).to(device)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    step = min(LEARNING_RATE * math.sqrt(epsilon), MOST)
    optimizer = torch.optim.SGD(model.parameters(), 2 * step, momentum=MOMENTUM)
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / lots)
    for _ in train(
        model, LOSS, (rows, data.labels), ledger, sampling_rate=RATE, steps=lots, clip_norm=CLIP,
        optimizer=optimizer, scheduler=falling, physical_batch_size=2000,
    ):  # fmt: skip
        pass
    return right(model, mapped(white, data.test), data.answers)


def mapped(white: Any, found: Tensor) -> Tensor:
    """Whitened rows, block by block: they are the largest thing in memory."""
    rows = torch.empty(len(found), found[0].numel(), device=found.device)
    for start in range(0, len(found), 500):
        rows[start : start + 500] = white(found[start : start + 500])
    return rows


def measure(size: Size) -> list[Row]:
    size.only("repeats")
    data, epsilons = features(digits(size.small), normalised), EPSILONS[:1] if size.small else EPSILONS
    return rows_of(data, "whitened", epsilons, size)


def rows_of(data: Images, kind: str, epsilons: tuple[float, ...], size: Size) -> list[Row]:
    """Every run of the recipe on these features."""
    rows = list[Row]()
    for epsilon in epsilons:
        for run in range(size.repeats_or(RUNS)):
            lots = 20 if size.small else LOTS
            place = ("recipe", data.name, kind, len(data.x), epsilon, run, lots)
            found = kept(place, lambda e=epsilon, r=run, t=lots: recipe(data, e, r, lots=t))
            say(f"{data.name}, {kind}, ε {epsilon:g}, run {run}: {found:.2f} %")
            rows.append({"data": data.name, "features": kind, "ε": epsilon, "run": run, "accuracy": found})
    return rows


def tables(rows: list[Row]) -> list[Grid]:
    epsilons = sorted(values(rows, "ε"), key=float)
    cells = []
    for kind in values(rows, "features"):
        cells.append([kind])
        for epsilon in epsilons:
            found = [row["accuracy"] for row in rows if row["ε"] == epsilon and row["features"] == kind]
            spread = f" ± {pstdev(found):.2f}" if len(found) > 1 else " (one run)"
            cells[-1].append(f"{fmean(found):.2f}{spread}" if found else "")
    head = ["", *(f"ε = {epsilon:g}" for epsilon in epsilons)]
    note = f"δ = {DELTA:g}; ± is the standard deviation of {len(values(rows, 'run'))} run(s)."
    return [Grid(f"{rows[0]['data']}: test accuracy, %", head, cells, note)]


def draw(rows: list[Row]) -> Any:
    figure, grid = canvas(1, 1, width=4.4)
    axes = grid[0, 0]
    for place, kind in enumerate(values(rows, "features")):
        mine = [row for row in rows if row["features"] == kind]
        epsilons = values(mine, "ε")
        found = [[row["accuracy"] for row in mine if row["ε"] == epsilon] for epsilon in epsilons]
        style = {"marker": MARKERS[place], "color": COLOURS[place], "label": kind}
        axes.errorbar(epsilons, [fmean(one) for one in found], [pstdev(one) for one in found], **style)
    axes.set(xlabel="ε at δ = 1e-5", ylabel="test accuracy, %", title=rows[0]["data"])
    ticks(axes, values(rows, "ε"))
    axes.legend(frameon=False)
    return figure
