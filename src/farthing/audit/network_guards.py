"""Check the law of guards for networks: no record decides the kind, the size or the numbers of a reply.

Guards over neighbouring records of a small network get the same conversation: gradients and local steps at
usual, extreme and ill weights, other models, hashes and shapes, repeated and conflicting questions. Data sets
differ in one record: gone, of another or an unknown class, not finite, overflowing, of another shape, or one
that cannot be read. Replies must be equal except for the noise, and none may be `internal`.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from farthing.audit.guards import Conversation, GuardReply, Script
from farthing.budget import Budget
from farthing.deploy import factories
from farthing.deploy.guard.answerable import Networks
from farthing.deploy.guard.keeper import Guard
from farthing.deploy.guard.models import Inputs, InstalledModel
from farthing.deploy.guard.policy import Limits, Policy
from farthing.deploy.messages import forms
from farthing.deploy.messages.forms import Question, RoundId
from farthing.deploy.messages.networks import NetworkAsk, NetworkKind, pack_weights
from farthing.deploy.messages.signed import MessageKind, Reason, Signer
from farthing.federated.terms import Draw, Invitation
from farthing.queries.samplers import Everyone, Poisson
from farthing.torch.training.records import Examples

NAMES = ("farthing.audit.network_guards:tiny", "farthing.audit.network_guards:loss")
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
    first, *rest = neighbours()
    networks = Networks(policy_of(Path(folder), keys), Examples(first[1]))
    complaints = []
    for draw in DRAWS:
        script = talk_of(factories.source_hash(NAMES), draw)
        expected = _heard(folder, first, script, keys, networks)
        bad = [reply.what for reply in expected if reply.reason == Reason.INTERNAL]
        complaints += [f"networks, {forms.draw(draw)}: {what} fails" for what in bad]
        for records in rest:
            found = _heard(folder, records, script, keys, networks)
            told = [one.what for one, other in zip(expected, found, strict=True) if one != other]
            complaints += [f"networks: the reply to {what} tells of {records[0]}" for what in told]
    return complaints


def _heard(
    folder: str, records: Neighbour, script: Script, keys: dict[str, Signer], networks: Networks
) -> list[GuardReply]:
    """Return the replies of a guard over these records, with a ledger of its own."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        guard = kept(Path(own), records, keys, networks)
        try:
            conversation = Conversation(guard, keys["coordinator"])
            script(conversation)
            guard._ledger.journal.verify()
        finally:
            guard.close()
    return conversation.replies
