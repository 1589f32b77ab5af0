"""CIFAR-10 over 20 parties with distributed noise: a linear layer on scattering features, ε = 3.

The training images are dealt out evenly to 20 parties, 2,500 each, with a budget of their own: ε = 3, δ =
1e-5, add-remove, per record, against whoever sees the sums. Each draws a Poisson sample of its records, and
adds a share of one noise. Features are those of `experiments.cifar10_recipe` without the learnt ones:
opponent colours, scattering, orders stretched, channels whitened. An image's features are averaged with those
of its mirror image, and each position with its mirror position: a function of that image alone, so that one
record stays one record, and no noise is spent on telling left from right. Moments for the whitening come from
pictures that random processes made (`experiments.random_processes`), not from records: every party computes
the same map by itself, which costs neither a round nor budget. The means were chosen on 5,000 of the training
images, with 20,000 others to train on. Other constants are those of the central recipe, with a third of its
rounds; the learning rate falls linearly, from twice the central one.
"""

from statistics import fmean, pstdev
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import farthing as ft
from experiments import random_processes
from experiments.cifar10_recipe import POWER, RATE, RIDGE, opponent, stretched
from experiments.federated_networks import dealt
from experiments.frame import COLOURS, Grid, Row, Size, canvas, say, stream, values
from experiments.pictures import Images, colours, features, kept, kept_array
from farthing.federated import Simulated, fedsgd
from farthing.torch.features import Whitening, whitening

PARTIES, EPSILON, DELTA, RUNS = 20, 3.0, 1e-5, 3
CLIP, ROUNDS, LEARNING_RATE = 0.1, 120, 8.0
MADE = 2000  # pictures of random processes that moments are taken of
BLOCK = 500  # pictures whose features are held in float32


def symmetric(pictures: Tensor) -> NDArray[np.float16]:
    """The mean of the features of each picture and of its mirror image, both of norm 1, folded."""
    parts, nobody = [], torch.zeros(0)
    for part in pictures.split(10 * BLOCK):
        found = features(Images("", part, nobody, part.flip(-1), nobody), stretched, opponent)
        for both in zip(found.x.split(BLOCK), found.test.split(BLOCK), strict=True):
            mean = sum(nn.functional.normalize(one.float().flatten(1)).view_as(one) for one in both) / 2
            parts.append(folded(mean).half().cpu().numpy())
    return np.concatenate(parts)


def folded(maps: Tensor) -> Tensor:
    """Left halves of feature maps, each cell in the mean with its mirror cell, whose waves lean otherwise."""
    turned = [-turn % 8 for turn in range(8)]
    first = [1 + 8 * band + turn for band in range(2) for turn in turned]
    order = [0, *first, *(17 + 8 * one + other for one in turned for other in turned)]
    mirrored = maps.unflatten(1, (3, -1))[:, :, order].flatten(1, 2).flip(-1)
    return ((maps + mirrored) / 2)[..., : maps.shape[-1] // 2]


def public_map(side: int, small: bool) -> Whitening:
    """The whitening of channels by the moments of made-up pictures; noise on them would hide nothing."""
    made = random_processes.pictures(random_processes.Chance(random_processes.SEED), 40 if small else MADE)
    first = (made.shape[-1] - side) // 2
    found = torch.from_numpy(symmetric(made[..., first : first + side, first : first + side]))
    ledger = ft.Ledger(ft.Budget(1e6, DELTA))
    return whitening(ledger, found, noise_multiplier=0.01, power=POWER, ridge=RIDGE, places=False)


def seen(white: Whitening, found: NDArray[Any], order: NDArray[Any]) -> Tensor:
    """Whitened rows in this order, of one size a feature on average."""
    size = found[0].size
    rows = torch.empty(len(order), size)
    for start in range(0, len(order), BLOCK):
        part = torch.from_numpy(found[order[start : start + BLOCK]])
        rows[start : start + BLOCK] = white(part) * size**0.5
    return rows


def accuracy(
    found: NDArray[Any], test: NDArray[Any], images: Images, white: Whitening, run: int, small: bool
) -> float:
    """Test accuracy of one run, in percent."""
    parties, rounds = (4, 10) if small else (PARTIES, ROUNDS)
    order, counts = dealt(images.labels.numpy(), "even", parties, run)
    model = nn.Linear(found[0].size, 10)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    network = ft.torch.Network(model, nn.CrossEntropyLoss(reduction="none"), most=2**15)
    budgets = ft.Budget(EPSILON, DELTA, observer="aggregate")
    records = ft.torch.Examples((seen(white, found, order), images.labels[order]))
    clients = Simulated(
        records, np.concatenate([[0], np.cumsum(counts)]), budgets, stream=stream("federated-cifar10", run)
    )
    for step in fedsgd(
        clients, network, rounds=rounds, clip_norm=CLIP, sampling_rate=RATE, server="momentum",
        lr=lambda t: LEARNING_RATE * max(1 - (t - 1) / rounds, 1 / rounds), trust="distributed",
    ):  # fmt: skip
        if step.t == rounds:
            break
    said = [
        torch.as_tensor(network.outputs(seen(white, test, places), step.w)).argmax(1).numpy()
        for places in np.array_split(np.arange(len(test)), max(1, len(test) // BLOCK))
    ]
    return 100 * float(np.mean(np.concatenate(said) == images.answers.numpy()))


def measure(size: Size) -> list[Row]:
    size.only("repeats")
    images, name = colours(size.small), "small" if size.small else "cifar10"
    white = public_map(images.x.shape[-1], size.small)
    found, test = (
        kept_array(f"{name}_symmetric_{part}", lambda x=pictures: symmetric(x))
        for part, pictures in (("train", images.x), ("test", images.test))
    )
    rows = list[Row]()
    for run in range(size.repeats_or(RUNS)):
        place = ("federated-cifar10 symmetric", len(found), run, LEARNING_RATE, ROUNDS, size.small)
        right = kept(place, lambda r=run: accuracy(found, test, images, white, r, size.small))
        say(f"CIFAR-10 over parties, distributed noise, ε {EPSILON:g}, run {run}: {right:.2f} %")
        rows.append(
            {"data": images.name, "noise": "distributed", "ε": EPSILON, "run": run, "accuracy": right}
        )
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
