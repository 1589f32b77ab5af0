"""CIFAR-10 within a budget: a small head on scattering and learnt features, accuracy against ε.

Images in opponent colours, by public constants; scattering features of each colour
(`farthing.torch.features.Scattering`), those of first and second order stretched by public factors; beside
them the maps of a network that has only seen pictures of random processes (`experiments.random_processes`);
channels whitened by two noisy answers; and by DP-SGD a head of two convolutions, or a linear one. One ledger
pays for all of it; no photographs are used but the records; δ = 1e-5, add-remove, per record, against anyone
who does not see who is in a batch. Constants were chosen on 10,000 of the training images, with the rest to
train on. Without a GPU there are no learnt features and only the linear head is trained, some minutes a run.
"""

import math
import os
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import farthing as ft
from experiments import mnist_recipe, random_processes
from experiments.deep import LOSS
from experiments.frame import Grid, Row, Size, say, stream
from experiments.mnist_recipe import DELTA, mapped
from experiments.pictures import DEVICE, Images, colours, features, in_unit_range, kept
from farthing.queries.events import GaussianEvent, RepeatedEvent
from farthing.torch.features import promised, whitening
from farthing.torch.training.loop import train
from farthing.torch.training.plan import fitted

RUNS = 3
MEANS, DEVIATIONS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # as usual for photographs
OPPONENT = ((1.0, 1.0, 1.0), (1.0, -1.0, 0.0), (1.0, 1.0, -2.0))  # light, red to green, yellow to blue
STRETCHED = 1.0, 4.0, 16.0  # features of order 0, 1 and 2
MOMENTS, POWER, RIDGE = 0.05, 0.8, 0.1  # of whitening: its part of μ², how far, and what is added
RATE, MOMENTUM = 0.164, 0.9


class Constants(NamedTuple):
    """How often an image is used in the mean, learning rate · clip, filters, and views of an image."""

    passes: int
    step: float
    filters: int
    views: int


class Way(NamedTuple):
    """Whether there are learnt features, whether the head has convolutions, its clip, and constants by ε."""

    learnt: bool
    convolutions: bool
    clip: float
    constants: dict[float, Constants]


WAYS = {
    "learnt features too, two convolutions": Way(True, True, 1.0, {
        1.0: Constants(40, 0.2, 64, 2), 3.0: Constants(60, 0.4, 64, 2), 8.0: Constants(90, 0.4, 128, 2),
    }),
    "two convolutions": Way(False, True, 1.0, {
        1.0: Constants(40, 0.2, 64, 1), 2.0: Constants(60, 0.4, 64, 2), 3.0: Constants(60, 0.4, 64, 2),
        8.0: Constants(90, 0.4, 128, 1),
    }),
    "linear": Way(False, False, 0.1, {
        1.0: Constants(40, 0.2, 0, 1), 2.0: Constants(60, 0.4, 0, 1), 3.0: Constants(60, 0.4, 0, 1),
        8.0: Constants(90, 0.4, 0, 1),
    }),
}  # fmt: skip


def opponent(pictures: Tensor) -> Tensor:
    """Three channels of light in [0, 1] as light and two differences of colours."""
    means, deviations, turn = (torch.tensor(c, device=pictures.device) for c in (MEANS, DEVIATIONS, OPPONENT))
    turn = turn / turn.norm(dim=1, keepdim=True)
    plain = (pictures - means[:, None, None]) / deviations[:, None, None]
    return torch.einsum("ij,njhw->nihw", turn, plain)


def stretched(found: Tensor) -> Tensor:
    """Feature maps of all colours one after the other, orders of like size."""
    sizes = torch.tensor(STRETCHED, device=found.device).repeat_interleave(
        torch.tensor([1, 16, 64], device=found.device)
    )
    return (found * sizes[:, None, None]).flatten(1, 2)


def joined(images: Images, scattered: Images, network: random_processes.Extractor) -> Images:
    """Scattering features and the maps of a network of each picture, each part of norm 1."""
    x, test = (
        torch.cat([_unit(part) for part in (found, *random_processes.maps(network, in_unit_range, whole))], 1)
        for whole, found in ((images.x, scattered.x), (images.test, scattered.test))
    )
    return replace(scattered, x=x, test=test)


def _unit(maps: Tensor) -> Tensor:
    """Feature maps of norm 1, block by block: float32 takes twice their memory."""
    return torch.cat(
        [nn.functional.normalize(part.float().flatten(1)).view_as(part).half() for part in maps.split(2000)]
    )


def head(channels: int, side: int, filters: int) -> nn.Module:
    """A head of feature maps (channels, side, side): two convolutions, or linear if there are no filters."""
    if not filters:
        model = nn.Sequential(nn.Flatten(), nn.Linear(channels * side**2, 10))
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        return model
    return nn.Sequential(
        nn.Conv2d(channels, filters, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2),
        nn.Conv2d(filters, filters, 3, padding=1), nn.Tanh(), nn.Flatten(),
        nn.Linear(filters * (side // 2) ** 2, 10),
    )  # fmt: skip


def either(pairs: Tensor) -> Tensor:
    """Of each picture (n, 2, …) itself or its mirror image, by chance."""
    count = torch.arange(len(pairs), device=pairs.device)
    return pairs[count, torch.randint(2, (len(pairs),), device=pairs.device)].float()


def recipe(pairs: tuple[Images, Images], kind: str, epsilon: float, run: int, *, lots: int) -> float:
    """Test accuracy of one run, in percent, from features of pictures and of their mirror images."""
    data, clip, constants = pairs[0], WAYS[kind].clip, WAYS[kind].constants[epsilon]
    torch.manual_seed(run)
    ledger = ft.Ledger(ft.Budget(epsilon, DELTA), stream=stream("CIFAR-10", kind, epsilon, run))
    moments = math.sqrt(2 / MOMENTS) / ledger.budget.mu
    noise = fitted(lambda t: 1.0, RATE, lots, ledger.budget, RepeatedEvent(GaussianEvent(moments), 2))[0]
    promised(ledger, noise_multiplier=moments, places=False)
    ledger.promise(ft.Poisson(RATE).amplify(ft.Gaussian(noise)), lots)
    white = whitening(ledger, data.x, noise_multiplier=moments, power=POWER, ridge=RIDGE, places=False)
    shape = data.x.shape[1:]

    def seen(found: Tensor) -> Tensor:
        return mapped(white, found).mul_(math.sqrt(math.prod(shape))).view(-1, *shape)

    model = head(shape[0], shape[1], constants.filters).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), constants.step / clip, momentum=MOMENTUM)
    views = constants.views
    rows = seen(data.x) if views == 1 else torch.stack([seen(one.x).half() for one in pairs], 1)
    for _ in train(
        model, LOSS, (rows, data.labels), ledger, sampling_rate=RATE, steps=lots, clip_norm=clip,
        optimizer=optimizer, augment=either if views > 1 else None, views=views,
        physical_batch_size=20_480 if DEVICE.type == "cuda" else None,
    ):  # fmt: skip
        pass
    return right(model, seen(data.test), seen(pairs[1].test), data.answers)


@torch.no_grad()
def right(model: nn.Module, rows: Tensor, mirrored: Tensor, answers: Tensor) -> float:
    """Percent of pictures that are labelled right, by what the model says of each and of its mirror image."""
    parts = zip(rows.split(1000), mirrored.split(1000), answers.split(1000), strict=True)
    found = sum(int(((model(x).softmax(1) + model(z).softmax(1)).argmax(1) == y).sum()) for x, z, y in parts)
    return 100 * found / len(answers)


def measure(size: Size) -> list[Row]:
    size.only("repeats")
    rows, images = list[Row](), colours(size.small)
    chosen = [
        kind for kind, way in WAYS.items() if size.small or DEVICE.type == "cuda" or not way.convolutions
    ]
    twice = images.x.flip(-1) if len(chosen) > 1 else images.x[:1]
    mirrored = replace(images, x=twice, test=images.test.flip(-1))
    scattered = [features(one, stretched, opponent) for one in (images, mirrored)]
    both = list[Images]()
    if any(WAYS[kind].learnt for kind in chosen):
        network = random_processes.extractor(size.small, os.environ.get("FARTHING_KEEP"))
        both = [joined(*pair, network) for pair in zip((images, mirrored), scattered, strict=True)]
    for kind in chosen:
        data, other = both if WAYS[kind].learnt else scattered
        for epsilon, constants in WAYS[kind].constants.items():
            if size.small and epsilon > 1:
                continue
            lots = 10 if size.small else round(constants.passes / RATE)
            for run in range(size.repeats_or(RUNS)):
                place = (data.name, kind, len(data.x), epsilon, run, lots)
                found = kept(place, partial(recipe, (data, other), kind, epsilon, run, lots=lots))
                say(f"{data.name}, {kind}, ε {epsilon:g}, run {run}: {found:.2f} %")
                row: Row = {"data": data.name, "features": kind, "ε": epsilon, "run": run}
                rows.append(row | {"accuracy": found})
    return rows


def tables(rows: list[Row]) -> list[Grid]:
    return mnist_recipe.tables(rows)


def draw(rows: list[Row]) -> Any:
    return mnist_recipe.draw(rows)
