"""Check laws of inputs to `farthing.torch`: models, losses, datasets, optimizers, ranks.

Each law returns complaints; none means that it holds. The inputs are faulty on purpose: a module that keeps
its inputs, a loss with a leaf tensor of its own, a collate function that mixes records.
"""

import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from farthing.budget import Budget
from farthing.errors import FarthingError
from farthing.ledger.ledger import Ledger
from farthing.queries.bounds import ClipNorm
from farthing.torch.checks import overlap
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.training import distributed
from farthing.torch.training.collating import Padded
from farthing.torch.training.loop import train
from farthing.torch.training.records import Examples

_LOSS = nn.CrossEntropyLoss(reduction="none")
_ROWS = torch.linspace(-3, 3, 80).reshape(20, 4)
_LABELS = torch.arange(20) % 2


def leaves() -> list[str]:
    """Check that an untrained leaf is refused, and that one appearing after the check keeps no gradient."""
    heat, shown = torch.ones((), requires_grad=True), list[bool]()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = _LOSS(outputs * heat if shown else outputs, targets)
        return found

    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    gradient, rows = Gradient(model, loss), _ROWS.clone().requires_grad_()
    gradient.check(_ROWS, _LABELS)
    shown.append(True)
    gradient.bounded_sum(_examples(rows).take(slice(None)), None, ClipNorm(1.0))
    held = [name for name, leaf in (("loss", heat), ("inputs", rows)) if leaf.grad is not None]
    told = [f"a leaf of the {name} keeps the exact gradient of a batch" for name in held]
    return told if _refused(model, loss) else [*told, "a loss with a leaf of its own is accepted"]


class _Keeps(nn.Module):
    """A module that keeps its inputs, if it is told to."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.fc, self.keeps, self.mean = nn.Linear(4, 2), keeps, torch.zeros(4)
        self.last: Tensor | None = None
        self.rows: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        if self.keeps:
            self.last = x.detach()
            self.rows.append(self.last)
            self.mean.add_(self.last.mean(0))
        return self.fc(x)


def attributes() -> list[str]:
    """Check that a module which keeps examples is refused, and one that starts later keeps none."""
    told = [] if _refused(_Keeps(True), route="fast") else ["a module that keeps its inputs is accepted"]
    model = _Keeps(False)
    gradient = Gradient(model, _LOSS)
    gradient.check(_ROWS, _LABELS)
    model.keeps = True
    gradient.bounded_sum(_examples(_ROWS).take(slice(None)), None, ClipNorm(1.0))
    if model.rows or model.last is not None or model.mean.any():
        told.append("a module keeps examples after a sum")
    return told


class _Texts:
    """Sequences of which the last is the longest, and larger than the others."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        return torch.ones(4 if place < 8 else 30) * (1 if place < 8 else 90), int(place > 6)


def _centred(records: list[Any]) -> tuple[Tensor, Tensor]:
    rows = torch.stack([tokens[:3] for tokens, _ in records])
    return rows - rows.mean(0), torch.tensor([target for _, target in records])


def _longest(records: list[Any]) -> tuple[Tensor, Tensor]:
    rows = nn.utils.rnn.pad_sequence([tokens for tokens, _ in records], batch_first=True)
    return rows, torch.tensor([target for _, target in records])


def collating() -> list[str]:
    """Check that a record moves the sum by its bound at most, whatever the collate function does."""
    told = []
    for name, collate, width in (("mixes", _centred, 3), ("pads", Padded(6), 6)):
        examples, gradient = Examples(_Texts(), collate=collate), Gradient(nn.Linear(width, 2), _LOSS)
        whole, others = (
            gradient.bounded_sum(examples.take(np.arange(n)), None, ClipNorm(0.1)) for n in (9, 8)
        )
        move = float((whole - others).norm()) / 0.1
        if move > 1 + 1e-4:
            told.append(f"with a collate function that {name} a record moves the sum by {move:.2f} clips")
    padded = Examples(_Texts(), collate=_longest)
    return told if _refused(nn.Linear(4, 2), data=padded) else [*told, "padding to the longest is accepted"]


def refusals() -> list[str]:
    """Check that inputs which would fail or leak later are refused before any charge."""
    model, ledger = nn.Linear(4, 2), Ledger(Budget(2.0, 1e-5))
    labels = _LABELS.clone()
    labels[3] = 77
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd)
    cases: dict[str, dict[str, Any]] = {
        "labels out of range": {"data": (_ROWS, labels)},
        "LBFGS": {"optimizer": torch.optim.LBFGS(model.parameters())},
        "ReduceLROnPlateau": {"optimizer": sgd, "scheduler": plateau},
        "an augment that mixes": {"augment": lambda x: x - x.mean(0)},
        "an augment that counts": {"augment": lambda x: x / len(x)},
    }
    told = [
        f"accepted: {name}"
        for name, options in cases.items()
        if not _refused(model, ledger=ledger, **options)
    ]
    return told + (["a refusal was charged for"] if ledger.share else [])


def ranks() -> list[str]:
    """Check that ranks with different records are detected, and equal ones accepted."""
    found = [
        distributed.digests(_examples(rows), 7)
        for rows in (_ROWS, _ROWS.flip(0), _ROWS[:10], _ROWS[..., None])
    ]
    told = []
    for one, other in itertools.combinations(found, 2):
        try:
            distributed.refuse_different([one, other])
            told.append("ranks with different records are not noticed")
        except FarthingError:
            pass
    distributed.refuse_different([found[0], distributed.digests(_examples(_ROWS.clone()), 7)])
    return told


def scores() -> list[str]:
    """Check that scores on training records are detected, and scores on other records accepted."""
    rows = torch.rand(20, 4)
    overlap.remember((rows, _LABELS))
    told = [] if overlap.shared((rows[4:12].clone(), _LABELS[4:12])) else ["training records are not noticed"]
    others = overlap.shared((rows + 0.5, _LABELS))
    return [*told, "other records are taken for training records"] if others else told


def brought() -> list[str]:
    """Run all checks of models and datasets."""
    return leaves() + attributes() + collating() + refusals() + ranks() + scores()


def _examples(rows: Tensor) -> Examples:
    return Examples((rows, _LABELS[: len(rows)]))


def _refused(
    model: nn.Module, loss: Any = _LOSS, data: Any = None, ledger: Any = None, **options: Any
) -> bool:
    book = Ledger(Budget(2.0, 1e-5)) if ledger is None else ledger
    records = (_ROWS, _LABELS) if data is None else data
    try:
        train(model, loss, records, book, sampling_rate=0.5, noise_multiplier=4.0, steps=2, **options)
    except FarthingError:
        return True
    return False
