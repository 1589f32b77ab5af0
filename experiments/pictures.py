"""Images for experiments: MNIST and CIFAR-10 where they are at hand, made-up ones in small mode.

A `Problem` is what a network is given: MNIST's rows of norm 1, of which DpPCA keeps 60 dimensions, or what
two frozen convolutions make of CIFAR-10's images. AdaDP's authors trained these convolutions on CIFAR-100;
here they are random filters, as nothing is pre-trained, so that accuracies lie below theirs.

A run of a network takes minutes. Where the environment variable FARTHING_KEEP names a folder, finished runs
are kept there (`kept`): an experiment that was stopped goes on, and two that share runs make them once.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from experiments.frame import seed
from farthing.data import find

CONVOLUTIONS = 64
LENGTH = 8.0  # what rows are stretched to before a network sees them


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Rows to learn from with their labels, rows to test on with theirs, and the widths of the network."""

    name: str
    rows: NDArray[Any]
    labels: Tensor
    held: NDArray[Any]
    answers: Tensor
    widths: tuple[int, ...]
    components: int | None  # of DpPCA, if there is one before the network

    def network(self, place: int) -> nn.Sequential:
        """Fully connected layers with ReLU, with weights that depend on ``place`` alone."""
        torch.manual_seed(seed(self.name, place))
        layers: list[nn.Module] = []
        for a, b in zip(self.widths, self.widths[1:], strict=False):
            layers += [nn.Linear(a, b), nn.ReLU()]
        return nn.Sequential(*layers[:-1])


def mnist(small: bool) -> Problem:
    """60 dimensions and 1,000 units (6 and 16 in small mode)."""
    if small:
        x, y, test, answers = _made_up(64)
    else:
        with np.load(_path("mnist.npz")) as data:
            x, y, test, answers = (data[key] for key in ("X_train", "y_train", "X_test", "y_test"))
    rows, held = (_unit(part.reshape(len(part), -1).astype(np.float64)) for part in (x, test))
    kept = 6 if small else 60
    labels = (torch.from_numpy(part.astype(np.int64)) for part in (y, answers))
    return Problem("MNIST", rows, next(labels), held, next(labels), (kept, 16 if small else 1000, 10), kept)


def cifar10(small: bool) -> Problem:
    """4,096 outputs of the convolutions, 384 and 192 units (64, 16 and 12 in small mode)."""
    if small:
        x, y, test, answers = _made_up(64)
        rows, held = _unit(x), _unit(test)
    else:
        parts = [_shard(_path(f"cifar10/train_{i}.npz")) for i in range(1, 6)]
        x, y = (np.concatenate(part) for part in zip(*parts, strict=True))
        test, answers = _shard(_path("cifar10/test.npz"))
        rows, held = (_unit(_convolved(part, name)) for part, name in ((x, "train"), (test, "test")))
    labels = (torch.from_numpy(part.astype(np.int64)) for part in (y, answers))
    widths = (rows.shape[1], *((16, 12) if small else (384, 192)), 10)
    return Problem("CIFAR-10", LENGTH * rows, next(labels), LENGTH * held, next(labels), widths, None)


def kept(place: tuple[object, ...], make: Callable[[], Any]) -> Any:
    """What ``make`` gives, or gave before for the same ``place`` (any JSON)."""
    folder = os.environ.get("FARTHING_KEEP")
    if not folder:
        return make()
    path = Path(folder) / f"{seed(*place):08x}.json"
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["place"] == repr(place):
            return found["value"]
    value = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"place": repr(place), "value": value}), encoding="utf-8")
    return value


def _path(name: str) -> Path:
    path = find(name)
    if path is None:
        raise FileNotFoundError(f"there is no {name} in the folder that FARTHING_DATA names")
    return path


def _shard(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """Images (n, 3, 32, 32) in bytes, and labels; shards hold differences along rows and columns."""
    with np.load(path) as data:
        c = data["X_delta"].cumsum(2, dtype=np.uint8).cumsum(3, dtype=np.uint8)
        return np.stack([c[:, 0] + c[:, 1], c[:, 0], c[:, 0] + c[:, 2]], 1), data["y"]


@torch.no_grad()
def _convolved(images: NDArray[Any], name: str) -> NDArray[np.float32]:
    """What the paper's two convolutions, with random filters, make of images."""
    folder = os.environ.get("FARTHING_KEEP")
    path = Path(folder) / f"cifar10_{name}.npy" if folder else None
    if path is not None and path.exists():
        return np.load(path).astype(np.float32)
    torch.manual_seed(seed("convolutions"))
    norm = nn.LocalResponseNorm(4)
    body = nn.Sequential(
        nn.Conv2d(3, CONVOLUTIONS, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), norm,
        nn.Conv2d(CONVOLUTIONS, CONVOLUTIONS, 5, padding=2), nn.ReLU(), norm, nn.MaxPool2d(2), nn.Flatten(),
    )  # fmt: skip
    found = torch.cat([body(part.float() / 127.5 - 1) for part in torch.from_numpy(images).split(250)])
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, found.half().numpy())
    return np.asarray(found.numpy(), dtype=np.float32)


def _unit(rows: NDArray[Any]) -> NDArray[Any]:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(1e-12)


def _made_up(width: int) -> tuple[NDArray[Any], ...]:
    """2,000 and 500 pictures of ten kinds."""
    random = np.random.default_rng(0)
    kinds = random.random((10, width))
    labels = random.integers(10, size=2500)
    pictures = kinds[labels] + 0.3 * random.normal(size=(2500, width))
    return pictures[:2000], labels[:2000], pictures[2000:], labels[2000:]
