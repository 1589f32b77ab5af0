"""Correlated noise: when noise that cancels beats independent noise, by epochs and budget.

Three tasks: MNIST (a network 196-64-10, images averaged over 2 × 2 pixels), CIFAR-10 (a network 396-64-10 on
scattering features) and text (the next character of documentation strings, from the eight before it). Each is
trained by DP-SGD with momentum, whose learning rate falls to 0, for 1 to 40 epochs. Noise is independent, or
correlated as ``bands="auto"`` chooses for cyclic draws. Each kind of noise gets its own learning rate for
every task, number of epochs and ε, the best of a grid on data that are not used afterwards: Fashion-MNIST for
both kinds of images, other files for text. It is scaled in proportion to the number of records, so that a
step has the same noise. 40 epochs use the learning rate that was best for 8.

All of it takes minutes on a GPU. ``python -m experiments.correlated FILE`` writes the prepared data, 13 MB;
where the environment variable FARTHING_TASKS names such a file, nothing else is read. FARTHING_WORKERS is the
number of processes that share the work.
"""

import functools
import multiprocessing
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import farthing as ft
from experiments import texts
from experiments.deep import LOSS, right
from experiments.frame import COLOURS, MARKERS, Grid, Row, Size, canvas, say, seed, stream, values
from experiments.pictures import DEVICE, Images, clothes, colours, digits, kept
from farthing.torch.features import Scattering

DELTA, EPSILONS, EPOCHS, LONG = 1e-5, (1.0, 3.0, 8.0), (1, 4, 8), 40
RATE, STEPS = 0.02, (0.5, 1.0, 2.0, 4.0)
RUNS, MOMENTUM, CLIP, UNITS = 3, 0.9, 1.0, 64
KINDS = "independent", "correlated"
TUNED_ON = {"MNIST": "Fashion-MNIST", "CIFAR-10": "Fashion-MNIST", "text": "other text"}
COLOURED = 15_000, 5_000  # pictures of CIFAR-10 to learn from and to test on

Arrays = dict[str, NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class Way:
    """A way to spend ε in so many epochs on a task: the kind of noise and the learning rate."""

    task: str
    kind: str
    epsilon: float
    epochs: int
    step: float


def prepared(small: bool) -> Arrays:
    """The data of all tasks in bytes: rows and labels to learn from, and to test on."""
    found: Arrays = {}
    for images in (clothes(small), digits(small)):
        _keep(found, images.name, *(_pooled(x) for x in (images.x, images.test)), images)
    pictures = colours(small)
    wide = min(COLOURED[0], len(pictures.x)), min(COLOURED[1], len(pictures.test))
    pictures = Images(
        "CIFAR-10", pictures.x[: wide[0]], pictures.labels[: wide[0]],
        pictures.test[: wide[1]], pictures.answers[: wide[1]],
    )  # fmt: skip
    _keep(found, "CIFAR-10", *(scattered(x) for x in (pictures.x, pictures.test)), pictures)
    parts = texts.parts(400 if small else 45_000, ("other text", "other test", "text", "test"))
    for name, held in (("other text", "other test"), ("text", "test")):
        found |= {name: parts[name][:, :-1], f"{name} labels": parts[name][:, -1]}
        found |= {f"{name} test": parts[held][:10_000, :-1], f"{name} answers": parts[held][:10_000, -1]}
    return found


def _keep(found: Arrays, name: str, x: Any, test: Any, images: Images) -> None:
    labels, answers = (part.numpy().astype(np.uint8) for part in (images.labels, images.answers))
    found |= {name: x, f"{name} labels": labels, f"{name} test": test, f"{name} answers": answers}


def _pooled(x: Tensor) -> NDArray[np.uint8]:
    """Pictures averaged over 2 × 2 pixels, in bytes."""
    light = x[:, None].float() / max(float(x.max()), 1.0)
    return bytes_of(nn.functional.avg_pool2d(light, 2).flatten(1), 255.0)


def bytes_of(x: Tensor, scale: float) -> NDArray[np.uint8]:
    return (x * scale).round().clamp(0, 255).to(torch.uint8).cpu().numpy()


@torch.no_grad()
def scattered(x: Tensor) -> NDArray[np.uint8]:
    """Scattering features: blurs and first orders over four quarters, second orders over all of a picture.

    Each order is stretched by a number that does not depend on the pictures.
    """
    scattering = Scattering((x.shape[-2], x.shape[-1])).to(DEVICE)
    found = []
    for part in x.split(1000 if DEVICE.type == "cuda" else 32):
        f = scattering(part.to(DEVICE).float() / (255.0 if part.dtype == torch.uint8 else 1.0))
        first = nn.functional.adaptive_avg_pool2d(f[:, :, :17].flatten(0, 1), 2)
        first = first.reshape(*f.shape[:2], 17, 4)
        second = f[:, :, 17:].mean((3, 4))
        blurs, first = first[:, :, :1].flatten(1), first[:, :, 1:].flatten(1)
        found.append(bytes_of(torch.cat([blurs, 8 * first, 40 * second.flatten(1)], 1), 128.0))
    return np.concatenate(found)


@functools.cache
def _data(small: bool) -> Arrays:
    path = os.environ.get("FARTHING_TASKS")
    if path and not small:
        with np.load(path) as found:
            return dict(found)
    return prepared(small)


@functools.cache
def images(name: str, small: bool) -> Images:
    """The data of one name, on the device."""
    found = _data(small)
    x, test = (torch.from_numpy(found[key]).to(DEVICE) for key in (name, f"{name} test"))
    x, test = (rows.long() if "text" in name else rows.float() / 128 for rows in (x, test))
    labels, answers = (
        torch.from_numpy(found[f"{name} {key}"].astype(np.int64)).to(DEVICE) for key in ("labels", "answers")
    )
    return Images(name, x, labels, test, answers)


def network(task: str, width: int) -> nn.Module:
    if task == "text":
        classes = len(texts.ALPHABET)
        first = nn.Embedding(classes, 8), nn.Flatten(), nn.Linear(8 * width, UNITS)
        return nn.Sequential(*first, nn.ReLU(), nn.Linear(UNITS, classes)).to(DEVICE)
    return nn.Sequential(nn.Linear(width, UNITS), nn.ReLU(), nn.Linear(UNITS, 10)).to(DEVICE)


def trained(data: Images, way: Way, run: int) -> tuple[float, int, int]:
    """Test accuracy of one run, in percent, and the bands and buffers of its noise."""
    torch.manual_seed(seed("correlated", data.name, run))
    model, steps = network(way.task, data.x.shape[1]), round(way.epochs / RATE)
    noise = stream("correlated", data.name, way.kind, way.epsilon, way.epochs, way.step, run)
    ledger = ft.Ledger(ft.Budget(way.epsilon, DELTA), stream=noise)
    optimizer = torch.optim.SGD(model.parameters(), way.step, momentum=MOMENTUM)
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / steps)
    training = ft.torch.train(
        model, LOSS, (data.x, data.labels), ledger, optimizer=optimizer, scheduler=falling,
        sampling_rate=RATE, steps=steps, clip_norm=CLIP, bands=1 if way.kind == KINDS[0] else "auto",
        sampling="poisson",
        physical_batch_size=2400,
    )  # fmt: skip
    for _ in training:
        pass
    return right(model, data.test, data.answers), training.plan.bands, training.plan.buffers


def measure(size: Size) -> list[Row]:
    size.only("repeats")
    epsilons, every, steps = ((8.0,), (1,), STEPS[:1]) if size.small else (EPSILONS, EPOCHS, STEPS)
    cells = [(kind, epsilon, epochs) for epochs in every for epsilon in epsilons for kind in KINDS]
    tuning = [("MNIST", "Fashion-MNIST"), ("text", "other text")]
    tried = _rows(
        [
            (size.small, name, Way(task, *cell, step), 0)
            for task, name in tuning
            for cell in cells
            for step in steps
        ]
    )
    jobs = []
    for task in TUNED_ON:
        for cell in cells:
            best = _best(tried, TUNED_ON[task], *cell)
            records = [len(images(name, size.small).x) for name in (task, TUNED_ON[task])]
            ways = [Way(task, *cell, best * round(records[0] / records[1], 2))]
            if not size.small and cell[-1] == EPOCHS[-1]:
                ways.append(replace(ways[0], epochs=LONG))
            jobs += [(size.small, task, way, run) for way in ways for run in range(size.repeats_or(RUNS))]
    return tried + _rows(jobs)


def _best(tried: list[Row], name: str, kind: str, epsilon: float, epochs: int) -> float:
    return float(max(_found(tried, name, kind, epsilon, epochs), key=lambda row: row["accuracy"])["step"])


Job = tuple[bool, str, Way, int]  # small or not, the data, the way, the run


def _rows(jobs: list[Job]) -> list[Row]:
    """The rows of jobs, in order; the longest are begun first."""
    workers = int(os.environ.get("FARTHING_WORKERS", "1"))
    if workers == 1 or len(jobs) == 1:
        return [_row(job) for job in jobs]
    longest = sorted(range(len(jobs)), key=lambda place: -jobs[place][2].epochs)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        found = pool.map(_row, [jobs[place] for place in longest], chunksize=1)
    return [row for _, row in sorted(zip(longest, found, strict=True), key=lambda pair: pair[0])]


def _row(job: Job) -> Row:
    small, name, way, run = job
    data = images(name, small)
    place = ("correlated tasks", name, len(data.x), way, run)
    accuracy, bands, buffers = kept(place, lambda: trained(data, way, run))
    noise = f"{buffers} buffers" if buffers else f"{bands} bands"
    say(f"{name}, {way.kind} ({noise}), ε {way.epsilon:g}, {way.epochs} epochs: {accuracy:.2f} %")
    where = {"data": name, "noise": way.kind, "ε": way.epsilon, "epochs": way.epochs}
    return {**where, "step": way.step, "bands": bands, "buffers": buffers, "run": run, "accuracy": accuracy}


def _found(rows: list[Row], data: str, kind: str, epsilon: float, epochs: int) -> list[Row]:
    where = {"data": data, "noise": kind, "ε": epsilon, "epochs": epochs}
    return [row for row in rows if all(row[key] == value for key, value in where.items())]


def tables(rows: list[Row]) -> list[Grid]:
    return [_table(rows, task) for task in TUNED_ON]


def _table(rows: list[Row], task: str) -> Grid:
    lines = []
    for epochs in values(rows, "epochs"):
        for epsilon in values(rows, "ε"):
            both = [_found(rows, task, kind, epsilon, epochs) for kind in KINDS]
            cells = [_shown([row["accuracy"] for row in found]) for found in both]
            gained = fmean(row["accuracy"] for row in both[1]) - fmean(row["accuracy"] for row in both[0])
            chosen = both[1][0]
            noise = f"{chosen['buffers']} buffers" if chosen["buffers"] else f"{chosen['bands']} bands"
            steps = [f"{found[0]['step']:g}" for found in both]
            lines.append([str(epochs), f"{epsilon:g}", *cells, f"{gained:+.2f}", noise, *steps])
    heads = ["epochs", "ε", "independent", "correlated", "gained", "noise", "step", "step"]
    caption = (
        f"{task}: test accuracy in percent, mean and standard deviation of runs; tuned on {TUNED_ON[task]}"
    )
    return Grid(caption, heads, lines)


def _shown(found: list[float]) -> str:
    return f"{fmean(found):.2f}" + (f" ± {stdev(found):.2f}" if len(found) > 1 else "")


def draw(rows: list[Row]) -> Any:
    epsilons = values(rows, "ε")
    figure, grid = canvas(len(TUNED_ON), len(epsilons))
    for task, axes in zip(TUNED_ON, grid, strict=True):
        for axis, epsilon in zip(axes, epsilons, strict=True):
            for kind, colour, marker in zip(KINDS, COLOURS, MARKERS, strict=False):
                for epochs in values(rows, "epochs"):
                    found = [row["accuracy"] for row in _found(rows, task, kind, epsilon, epochs)]
                    label = kind if epochs == values(rows, "epochs")[0] else None
                    axis.plot([epochs] * len(found), found, marker, color=colour, label=label, alpha=0.8)
            axis.set_xscale("log")
            axis.set_xlabel("epochs")
            axis.set_title(f"{task}, ε = {epsilon:g}")
        axes[0].set_ylabel("test accuracy, %")
    grid[0][0].legend()
    return figure


if __name__ == "__main__":
    np.savez_compressed(Path(sys.argv[1]), **prepared(small=False))
