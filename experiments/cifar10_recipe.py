"""CIFAR-10 from scratch within a budget: a linear head on scattering features, accuracy against ε.

The linear head of Tramèr & Boneh (2021) with the constants they publish: scattering features of each colour,
normalised in 27 groups of channels within each image, lots of 8,192, 60 passes, clip .1, learning rate 4. No
public images, nothing pre-trained. Beside it the whitened features of `mnist_recipe`, with the constants
chosen on Fashion-MNIST. δ = 1e-5. A GPU takes seconds a run, two cores an hour or more in all.
"""

from typing import Any

import torch
from torch import Tensor, nn

import farthing as ft
from experiments import mnist_recipe
from experiments.deep import LOSS, right
from experiments.frame import Grid, Row, say, stream
from experiments.mnist_recipe import DELTA
from experiments.pictures import Images, colours, features, kept
from farthing.torch.plan import fitted
from farthing.torch.training import train

EPSILONS, RUNS = (1.0, 2.0, 3.0, 8.0), 3
GROUPS, LOT, PASSES, CLIP, LEARNING_RATE = 27, 8192, 60, 0.1, 4.0  # published


def normalised(found: Tensor) -> Tensor:
    return nn.functional.group_norm(found.flatten(1, 2).float(), GROUPS)


def linear(data: Images, epsilon: float, run: int, *, lots: int) -> float:
    """Test accuracy of one run of the linear head, in percent."""
    torch.manual_seed(run)
    rows, held = (part.flatten(1).float() for part in (data.x, data.test))
    ledger = ft.Ledger(ft.Budget(epsilon, DELTA), stream=stream("linear", data.name, epsilon, run))
    rate = min(1.0, LOT / len(rows))
    noise = fitted(lambda t: 1.0, rate, lots, ledger.budget)[0]
    model = nn.Linear(rows.shape[1], 10).to(rows.device)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=0.9)
    for _ in train(
        model, LOSS, (rows, data.labels), ledger, rate=rate, steps=lots, noise=noise, clip=CLIP,
        optimizer=optimizer, physical=4096,
    ):  # fmt: skip
        pass
    return right(model, held, data.answers)


def measure(small: bool) -> list[Row]:
    epsilons, rows, images = EPSILONS[:1] if small else EPSILONS, list[Row](), colours(small)
    data = features(images, normalised)
    lots = 10 if small else round(PASSES * len(data.x) / LOT)
    for epsilon in epsilons:
        for run in range(1 if small else RUNS):
            place = ("linear", data.name, len(data.x), epsilon, run, lots)
            found = kept(place, lambda e=epsilon, r=run: linear(data, e, r, lots=lots))
            say(f"{data.name}, linear head, ε {epsilon:g}, run {run}: {found:.2f} %")
            row: Row = {"data": data.name, "features": "published constants", "ε": epsilon, "run": run}
            rows.append(row | {"accuracy": found})
    whitened = features(images, mnist_recipe.normalised)
    return rows + mnist_recipe.rows_of(whitened, "whitened, as on MNIST", epsilons, small)


def tables(rows: list[Row]) -> list[Grid]:
    return mnist_recipe.tables(rows)


def draw(rows: list[Row]) -> Any:
    return mnist_recipe.draw(rows)
