"""Images for experiments: MNIST and CIFAR-10 where they are at hand, made-up ones in small mode.

A `Problem` is what a network is given: MNIST's rows of norm 1, of which DpPCA keeps 60 dimensions, or the
outputs of two frozen convolutions on CIFAR-10's images. AdaDP's authors trained these convolutions on
CIFAR-100; here they are random filters, as nothing is pre-trained, so that accuracies lie below theirs.

`Images` are the pictures themselves, for `features` to make scattering features of.

A run of a network takes minutes. Where the environment variable FARTHING_KEEP names a folder, finished runs
are kept there (`kept`), and features as well (`kept_array`): an interrupted experiment continues, and two
that share runs make them once.
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
from farthing.data.schema import find
from farthing.torch.features import Scattering

CONVOLUTIONS = 64
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
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
        return nn.Sequential(*layers[:-1]).to(DEVICE)


@dataclass(frozen=True, slots=True, eq=False)
class Images:
    """Pictures (n, 28, 28) or (n, 3, 32, 32) in [0, 1], or what was made of them, and their labels."""

    name: str
    x: Tensor
    labels: Tensor
    test: Tensor
    answers: Tensor


def digits(small: bool) -> Images:
    """MNIST as pictures."""
    return Images("MNIST", *(_tensor(part) for part in (_made_up((16, 16), 400) if small else _mnist())))


def clothes(small: bool) -> Images:
    """Fashion-MNIST as pictures."""
    parts = _made_up((16, 16), 400) if small else _mnist("fashion_mnist.npz")
    return Images("Fashion-MNIST", *(_tensor(part) for part in parts))


def colours(small: bool) -> Images:
    """CIFAR-10 as pictures."""
    parts = _made_up((3, 16, 16), 400) if small else _cifar10()
    return Images("CIFAR-10", *(_tensor(part) for part in parts))


@torch.no_grad()
def features(
    images: Images, form: Callable[[Tensor], Tensor], light: Callable[[Tensor], Tensor] = lambda x: x
) -> Images:
    """Scattering features of every picture, in half precision: ``form`` of the features of its ``light``."""
    scattering = Scattering((images.x.shape[-2], images.x.shape[-1])).to(DEVICE)
    size = 1000 if DEVICE.type == "cuda" else 32
    x, test = (
        torch.cat(
            [form(scattering(light(in_unit_range(part.to(DEVICE))))).half() for part in whole.split(size)]
        )
        for whole in (images.x, images.test)
    )
    return Images(images.name, x, images.labels.to(DEVICE), test, images.answers.to(DEVICE))


def in_unit_range(pictures: Tensor) -> Tensor:
    """Pictures in [0, 1], from bytes or from numbers."""
    return pictures.float() / 255 if pictures.dtype == torch.uint8 else pictures.float()


def _tensor(part: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(part if part.ndim > 1 else part.astype(np.int64)))


def _mnist(name: str = "mnist.npz") -> tuple[NDArray[Any], ...]:
    with np.load(_path(name)) as data:
        return tuple(data[key] for key in ("X_train", "y_train", "X_test", "y_test"))


def _cifar10() -> tuple[NDArray[Any], ...]:
    parts = [_shard(_path(f"cifar10/train_{i}.npz")) for i in range(1, 6)]
    x, y = (np.concatenate(part) for part in zip(*parts, strict=True))
    return x, y, *_shard(_path("cifar10/test.npz"))


def mnist(small: bool) -> Problem:
    """60 dimensions and 1,000 units (6 and 16 in small mode)."""
    x, y, test, answers = _made_up((64,)) if small else _mnist()
    rows, held = (_unit(part.reshape(len(part), -1).astype(np.float64)) for part in (x, test))
    kept = 6 if small else 60
    labels = (torch.from_numpy(part.astype(np.int64)).to(DEVICE) for part in (y, answers))
    return Problem("MNIST", rows, next(labels), held, next(labels), (kept, 16 if small else 1000, 10), kept)


def cifar10(small: bool) -> Problem:
    """4,096 outputs of the convolutions, 384 and 192 units (64, 16 and 12 in small mode)."""
    x, y, test, answers = _made_up((64,)) if small else _cifar10()
    if not small:
        x, test = _convolved(x, "train"), _convolved(test, "test")
    rows, held = _unit(x), _unit(test)
    labels = (torch.from_numpy(part.astype(np.int64)).to(DEVICE) for part in (y, answers))
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


def kept_array(name: str, make: Callable[[], NDArray[Any]]) -> NDArray[Any]:
    """What ``make`` gives, or gave before under the same name, read from its file on demand."""
    folder = os.environ.get("FARTHING_KEEP")
    if not folder:
        return make()
    path = Path(folder) / f"{name}.npy"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".draft.npy")
        np.save(draft, make())
        draft.rename(path)
    found: NDArray[Any] = np.load(path, mmap_mode="r")
    return found


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


def _convolved(images: NDArray[Any], name: str) -> NDArray[np.float32]:
    """What the paper's two convolutions, with random filters, make of images."""
    return kept_array(f"cifar10_{name}", lambda: _filtered(images)).astype(np.float32)


@torch.no_grad()
def _filtered(images: NDArray[Any]) -> NDArray[np.float16]:
    torch.manual_seed(seed("convolutions"))
    norm = nn.LocalResponseNorm(4)
    body = nn.Sequential(
        nn.Conv2d(3, CONVOLUTIONS, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), norm,
        nn.Conv2d(CONVOLUTIONS, CONVOLUTIONS, 5, padding=2), nn.ReLU(), norm, nn.MaxPool2d(2), nn.Flatten(),
    ).to(DEVICE)  # fmt: skip
    parts = torch.from_numpy(images).split(250)
    found = torch.cat([body(part.to(DEVICE).float() / 127.5 - 1).cpu() for part in parts])
    return np.asarray(found.half().numpy())


def _unit(rows: NDArray[Any]) -> NDArray[Any]:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(1e-12)


def _made_up(shape: tuple[int, ...], count: int = 2000) -> tuple[NDArray[Any], ...]:
    """``count`` pictures of ten kinds to learn from, and a quarter as many to test on."""
    random = np.random.default_rng(0)
    kinds = random.random((10, *shape))
    labels = random.integers(10, size=count + count // 4)
    pictures = kinds[labels] + 0.3 * random.normal(size=(len(labels), *shape))
    return pictures[:count], labels[:count], pictures[count:], labels[count:]
