"""CIFAR-10 over 20 parties with distributed noise: a linear layer on scattering features, ε = 3.

The training images are dealt out evenly to 20 parties, 2,500 each, with a budget of their own: ε = 3, δ =
1e-5, add-remove, per record, against whoever sees the sums. Each draws a Poisson sample of its records, and
adds a share of one noise. Features are those of `experiments.cifar10_recipe` without the learnt ones:
opponent colours, scattering, orders stretched, channels whitened. Moments for the whitening come from
pictures that random processes made (`experiments.random_processes`), not from records: every party computes
the same map by itself, and no round and no budget goes into it. The prediction for a test image is the mean
over it and its mirror image. Constants are those of the central recipe, with half as many rounds; the
learning rate falls linearly, from twice the central one. Nothing was tuned.
"""

import math
from dataclasses import replace
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import farthing as ft
from experiments import random_processes
from experiments.cifar10_recipe import POWER, RATE, RIDGE, opponent, stretched
from experiments.federated_networks import dealt
from experiments.frame import COLOURS, Grid, Row, Size, canvas, say, stream, values
from experiments.mnist_recipe import mapped
from experiments.pictures import Images, colours, features, kept
from farthing.federated import Simulated, fedsgd
from farthing.torch.features import Whitening, whitening

PARTIES, EPSILON, DELTA, RUNS = 20, 3.0, 1e-5, 3
CLIP, ROUNDS, LEARNING_RATE = 0.1, 180, 8.0
MADE = 2000  # pictures of random processes that moments are taken of


def public_map(side: int, small: bool) -> Whitening:
    """The whitening of channels by the moments of made-up pictures; noise on them would hide nothing."""
    made = random_processes.pictures(random_processes.Chance(random_processes.SEED), 40 if small else MADE)
    first = (made.shape[-1] - side) // 2
    made = made[..., first : first + side, first : first + side]
    nobody = torch.zeros(len(made), dtype=torch.long)
    found = features(Images("made-up", made, nobody, made[:1], nobody[:1]), stretched, opponent).x
    ledger = ft.Ledger(ft.Budget(1e6, DELTA))
    return whitening(ledger, found, noise_multiplier=0.01, power=POWER, ridge=RIDGE, places=False)


def seen(white: Whitening, found: Tensor) -> Tensor:
    """Whitened rows, of one size a feature on average."""
    return mapped(white, found).mul_(math.sqrt(found[0].numel()))


def accuracy(data: Images, mirrored: Tensor, white: Whitening, run: int, small: bool) -> float:
    """Test accuracy of one run, in percent."""
    parties, rounds = (4, 10) if small else (PARTIES, ROUNDS)
    order, counts = dealt(data.labels.numpy(), "even", parties, run)
    model = nn.Linear(data.x[0].numel(), 10)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    network = ft.torch.Network(model, nn.CrossEntropyLoss(reduction="none"), most=2**15)
    budgets = ft.Budget(EPSILON, DELTA, observer="aggregate")
    records = ft.torch.Examples((seen(white, data.x[order]), data.labels[order]))
    clients = Simulated(
        records, np.concatenate([[0], np.cumsum(counts)]), budgets, stream=stream("federated-cifar10", run)
    )
    for step in fedsgd(
        clients, network, rounds=rounds, clip_norm=CLIP, sampling_rate=RATE, server="momentum",
        lr=lambda t: LEARNING_RATE * max(1 - (t - 1) / rounds, 1 / rounds), trust="distributed",
    ):  # fmt: skip
        if step.t == rounds:
            break
    rows = zip(data.test.split(500), mirrored.split(500), strict=True)
    scores = [
        sum(torch.as_tensor(network.outputs(seen(white, part), step.w)).softmax(1) for part in pair)
        for pair in rows
    ]
    return 100 * float(np.mean(torch.cat(scores).argmax(1).numpy() == data.answers.numpy()))


def measure(size: Size) -> list[Row]:
    size.only("repeats")
    images = colours(size.small)
    white = public_map(images.x.shape[-1], size.small)
    data = features(images, stretched, opponent)
    mirrored = features(replace(images, x=images.x[:1], test=images.test.flip(-1)), stretched, opponent).test
    rows = list[Row]()
    for run in range(size.repeats_or(RUNS)):
        place = ("federated-cifar10", len(data.x), run, LEARNING_RATE, ROUNDS, size.small)
        found = kept(place, lambda r=run: accuracy(data, mirrored, white, r, size.small))
        say(f"CIFAR-10 over parties, distributed noise, ε {EPSILON:g}, run {run}: {found:.2f} %")
        rows.append({"data": data.name, "noise": "distributed", "ε": EPSILON, "run": run, "accuracy": found})
    return rows


def tables(rows: list[Row]) -> list[Grid]:
    found = [row["accuracy"] for row in rows]
    spread = f" ± {pstdev(found):.2f}" if len(found) > 1 else " (one run)"
    cells = [[str(rows[0]["noise"]), f"{fmean(found):.2f}{spread}"]]
    note = f"δ = {DELTA:g}, {PARTIES} parties with 2,500 records each; {len(values(rows, 'run'))} run(s)."
    return [Grid("CIFAR-10 over parties: test accuracy, %", ["noise", f"ε = {EPSILON:g}"], cells, note)]


def draw(rows: list[Row]) -> Any:
    figure, grid = canvas(1, 1, width=6.4)
    axes = grid[0, 0]
    axes.plot([row["run"] for row in rows], [row["accuracy"] for row in rows], "o", color=COLOURS[0])
    title = f"CIFAR-10 over {PARTIES} parties, ε = {EPSILON:g}"
    axes.set(xlabel="run", ylabel="test accuracy, %", title=title)
    axes.set_xticks([row["run"] for row in rows])
    return figure
