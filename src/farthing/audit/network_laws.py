"""Check laws of networks: the inputs to `farthing.torch`, and the replies of guards that train networks.

Each law returns complaints; none means that it holds. `brought` tries models, losses, datasets, optimizers
and ranks that are faulty on purpose: a module that keeps its inputs, a loss with a leaf tensor of its own, a
collate function that mixes records.

`replies`: guards over neighbouring records of a small network get the same conversation: gradients and local
steps at usual, extreme and ill weights, other models, hashes and shapes, repeated and conflicting questions.
Data sets differ in one record: gone, of another or an unknown class, not finite, overflowing, of another
shape, or one that cannot be read. Replies must be equal except for the noise, and none may be `internal`.
"""

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from farthing.audit.entrances import Conversation, Script, differences
from farthing.budget import Budget
from farthing.deploy import factories
from farthing.deploy.guard.answers import Networks
from farthing.deploy.guard.keeper import Guard
from farthing.deploy.guard.models import Inputs, InstalledModel
from farthing.deploy.guard.policy import Limits, Policy
from farthing.deploy.messages import forms
from farthing.deploy.messages.forms import NetworkAsk, NetworkKind, Question, RoundId, pack_weights
from farthing.deploy.messages.signed import MessageKind, Signer
from farthing.errors import FarthingError
from farthing.federated.terms import Draw, Invitation
from farthing.ledger.ledger import Ledger
from farthing.queries.bounds import ClipNorm
from farthing.queries.samplers import Everyone, Poisson
from farthing.torch.checks import overlap
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.training import distributed, plan
from farthing.torch.training.collating import Padded
from farthing.torch.training.loop import train
from farthing.torch.training.records import Examples

_LOSS = nn.CrossEntropyLoss(reduction="none")
_ROWS = torch.linspace(-3, 3, 80).reshape(20, 4)
_LABELS = torch.arange(20) % 2


def leaves() -> list[str]:
    """Check that an untrained leaf is refused, and that one appearing after the check keeps no gradient."""
    heat, shown = torch.ones((), requires_grad=True), torch.tensor(False)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = _LOSS(outputs * heat if bool(shown) else outputs, targets)
        return found

    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    gradient, rows = Gradient(model, loss), _ROWS.clone().requires_grad_()
    gradient.check(_ROWS, _LABELS)
    shown.fill_(True)  # a tensor, in which the check does not look for switches
    gradient.bounded_sum(_examples(rows).take(slice(None)), None, ClipNorm(1.0))
    held = [name for name, leaf in (("loss", heat), ("inputs", rows)) if leaf.grad is not None]
    told = [f"a leaf of the {name} keeps the exact gradient of a batch" for name in held]
    return told if _refused(model, loss) else [*told, "a loss with a leaf of its own is accepted"]


class _Keeps(nn.Module):
    """A module that keeps its inputs, if it is told to."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.fc, self.keeps, self.mean = nn.Linear(4, 2), torch.tensor(keeps), torch.zeros(4)
        self.last: Tensor | None = None
        self.rows: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        if bool(self.keeps):
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
    model.keeps.fill_(True)  # a tensor, in which the check does not look for switches
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
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd)
    cases: dict[str, dict[str, Any]] = {
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


def labels() -> list[str]:
    """Check that records whose labels are no classes count as zero, however many there are."""
    told, gradient, bound = [], Gradient(nn.Linear(4, 2), _LOSS), ClipNorm(0.1)
    for wrong in (1, 10, 20):
        targets = _LABELS.clone()
        targets[:wrong] = 77
        rest = gradient.bounded_sum(Examples((_ROWS, _LABELS)).take(np.arange(wrong, 20)), None, bound)
        try:
            found = plan.checked(gradient, Examples((_ROWS, targets)))
            whole = gradient.bounded_sum(found.take(slice(None)), None, bound)
        except Exception as error:
            told.append(f"{wrong} labels out of range raise {type(error).__name__}")
            continue
        if not torch.allclose(whole, rest, atol=1e-4):
            told.append(f"{wrong} labels out of range move the sum")
    return told


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
    return leaves() + attributes() + collating() + refusals() + labels() + ranks() + scores()


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


NAMES = ("farthing.audit.network_laws:tiny", "farthing.audit.network_laws:loss")
SIZE = 6
DRAWS: tuple[Draw, ...] = (Everyone(), Poisson(0.5))
NOISE = 500.0
Neighbour = tuple[str, list[Any]]


def tiny() -> nn.Module:
    """Return a model with `SIZE` weights."""
    return nn.Linear(2, 2)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of each record."""
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


class _Unreadable(list[Any]):
    """Records of which the last cannot be read."""

    def __getitem__(self, place: Any) -> Any:
        if place == len(self) - 1:
            raise ValueError("this record cannot be read")
        return super().__getitem__(place)


def neighbours() -> Iterator[Neighbour]:
    """Return records, and then data sets that differ from them in one record."""
    x = torch.linspace(0.0, 1.0, 16).reshape(8, 2)
    records = [(row, number % 2) for number, row in enumerate(x)]
    yield "as they are", records
    yield "one record is gone", records[:-1]
    for label in (0, 77, -5):
        yield f"label {label}", [*records[:-1], (x[-1], label)]
    for value in (float("nan"), float("inf"), 3e38, -1e30, 1e-45):
        yield f"features {value:g}", [*records[:-1], (torch.full((2,), value), 1)]
    yield "another shape", [*records[:-1], (torch.zeros(3), 1)]
    yield "a record that cannot be read", _Unreadable(records)


def asked(hash_: str, kind: NetworkKind = NetworkKind.GRADIENT, **more: Any) -> NetworkAsk:
    """Return a question about the model."""
    return NetworkAsk("tiny", hash_, kind, **more)


def question(number: int, about: NetworkAsk, w: Any, draw: Draw = DRAWS[0]) -> tuple[dict[str, Any], bytes]:
    """Return header and body of a question."""
    body = pack_weights(w)
    invitation = Invitation(1.0, draw, 1000, noise_multiplier=NOISE)
    turn = RoundId("run", number, f"{number:032x}")
    return Question(turn, "d", invitation, about, (len(body) // 4,)).header(), body


def talk_of(hash_: str, draw: Draw) -> Script:
    """Return every message about a network, with one draw."""
    gradient = asked(hash_)
    steps = asked(hash_, NetworkKind.STEPS, steps=3, lr=0.5, proximal=0.1)
    update = asked(hash_, NetworkKind.UPDATE, steps=2, lr=0.5)
    evaluation = asked(hash_, NetworkKind.EVALUATION, cap=0.5, clip=1.0)

    def talk(to: Conversation) -> None:
        start = {"run": "run", "round": 0, "nonce": "0" * 32, "dataset": "d"}
        to.ask("hello", MessageKind.HELLO, start)
        terms = forms.invitation(Invitation(1.0, draw, 1000, noise_multiplier=NOISE))
        to.ask("a proposal", MessageKind.PROPOSAL, start | {"invitation": terms})
        number = 0
        for about in (gradient, steps, update, evaluation):
            for size in (0.0, 1e5, 3e38, float("nan")):
                number += 1
                what = f"{about.kind} at {size:g}"
                to.ask(what, MessageKind.QUESTION, *question(number, about, [size] * SIZE, draw))
        for count in (1, SIZE - 1, SIZE + 1):
            more = question(number + 1, gradient, [0.0] * count, draw)
            to.ask(f"{count} weights", MessageKind.QUESTION, *more)
        for other in (asked("0" * 64), NetworkAsk("other", hash_, NetworkKind.GRADIENT)):
            more = question(number + 1, other, [0.0] * SIZE, draw)
            to.ask(f"about {other.network}", MessageKind.QUESTION, *more)
        again = question(number + 1, steps, [0.5] * SIZE, draw)
        to.ask("steps", MessageKind.QUESTION, *again)
        to.ask("the same again", MessageKind.QUESTION, *again)
        to.ask("a conflict", MessageKind.QUESTION, *question(number + 1, steps, [0.25] * SIZE, draw))
        to.ask("an old round", MessageKind.QUESTION, *question(1, gradient, [0.0] * SIZE, draw))

    return talk


def policy_of(folder: Path, keys: dict[str, Signer]) -> Policy:
    """Return a policy that allows the small network."""
    model = InstalledModel(
        factory=NAMES[0], loss=NAMES[1], hash=factories.source_hash(NAMES), weights=8, steps=4
    )
    return Policy(
        dataset="d",
        records=folder / "records",
        size=8,
        ledger=folder / "ledger",
        socket=folder / "socket",
        key=folder / "key",
        coordinators=(keys["coordinator"].public,),
        budget=Budget(1.0, 1e-6, observer="server"),  # type: ignore[arg-type]
        limits=Limits(noise=0.5, clip=3.0, rounds=1000, draws=DRAWS, evaluation=True),
        models={"tiny": model},
        inputs=Inputs(shape=(2,), classes=2),
    )


def kept(folder: Path, records: Neighbour, keys: dict[str, Signer], networks: Networks) -> Guard:
    """Open a guard over these records, for networks that were checked, with a ledger in this folder."""
    examples = Examples(records[1]).within(2, (-100,))
    return Guard(policy_of(folder, keys), examples, keys["p0"], answerable=networks)


def replies(folder: str) -> list[str]:
    """Return complaints: replies that differ between neighbours, and failures."""
    keys = {name: Signer.new() for name in ("coordinator", "p0")}
    data_sets = list(neighbours())
    networks = Networks(policy_of(Path(folder), keys), Examples(data_sets[0][1]))
    guard = partial(kept, keys=keys, networks=networks)
    complaints = []
    for draw in DRAWS:
        script, name = talk_of(factories.source_hash(NAMES), draw), f"networks, {forms.draw(draw)}"
        complaints += differences(name, data_sets, folder, guard, script, keys["coordinator"])
    return complaints
