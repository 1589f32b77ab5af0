"""Decide which questions a guard answers, and log the answers that it released.

`Tables` answers gradients of four losses, `Networks` questions about installed models. Both refuse before
anything is charged, from public numbers alone, and return the contribution that is asked of the ledger. The
models of a policy are made and checked once, when the guard starts: the hash of their source before it is
imported, then the model itself on made-up examples of the records' shape.

`AnswerLog` has one line an answer, written and flushed before the answer is sent. Each line names the key,
the row of the ledger that charged it and the SHA-256 of the answer, and carries the hash of the line before
it. Together with the ledger it lets anybody check that no answer went out without a charge. It also serves as
a copy of the journal's head: a ledger that lacks a row named in the log was rolled back to an earlier state,
and locks.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from farthing.deploy import factories
from farthing.deploy.guard.models import InstalledModel, check_sources
from farthing.deploy.messages import forms
from farthing.deploy.messages.forms import EACH, Asked, NetworkAsk, NetworkKind, Question
from farthing.deploy.messages.signed import Reason, refuse
from farthing.errors import FarthingError, InvalidValue, LedgerLocked
from farthing.federated.evaluation import Evaluation
from farthing.federated.rounds import LocalSteps
from farthing.federated.terms import Trust
from farthing.ledger.journal_head import create_private, failing_closed
from farthing.linear.losses import LinearGradient, PlacedGradient
from farthing.queries.query import Contribution

if TYPE_CHECKING:
    from farthing.deploy.guard.policy import Limits, Policy
    from farthing.torch.training.network import Network
    from farthing.torch.training.records import Examples

_FIRST = "0" * 64
_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


class AnswerLog:
    """An append-only log of released answers, held by one process at a time."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        if not Path(self.path).parent.is_dir():
            raise InvalidValue(f"answers must be logged in an existing directory, got {self.path!r}")
        with failing_closed(self.path):
            create_private(self.path)
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise InvalidValue(f"another guard is at work on {self.path!r}") from None
        self._rows: dict[str, tuple[int, str, str]] = {}  # key -> row, its hash, SHA-256 of the answer
        self._last = _FIRST
        try:
            with failing_closed(self.path):
                self._read()
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        content = os.pread(self._file, os.fstat(self._file).st_size, 0)
        if not content:  # the file may be new: its name must be on disk before any line is
            folder = os.open(Path(self.path).parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        whole = content.rpartition(b"\n")[0]
        self._size = len(whole) + 1 if whole else 0
        if self._size < len(content):  # torn by a crash, so its answer was never sent
            os.ftruncate(self._file, self._size)
        for number, line in enumerate(whole.splitlines()):
            try:
                entry = json.loads(line)
                key, row = entry["key"], (int(entry["row"]), str(entry["hash"]), str(entry["answer"]))
                follows = entry["previous"] == self._last
            except (ValueError, LookupError, TypeError):
                follows = False
            if not follows:
                raise LedgerLocked(f"log {self.path}: line {number + 1} was changed, or lines are missing")
            self._rows[key], self._last = row, hashlib.sha256(line).hexdigest()

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def check(self, hashes: Sequence[str], ledger: object) -> None:
        """Raise `LedgerLocked` unless the ledger with these rows holds every row that charged an answer."""
        for seq, held, _ in self._rows.values():
            if not (seq < len(hashes) and hashes[seq] == held):
                raise LedgerLocked(
                    f"journal {ledger}: it lacks row {seq}, which charged an answer in {self.path}: it was "
                    "rolled back to an earlier state. Nothing more is charged or released"
                )

    def append(self, key: str, seq: int, digest: str, answer: str) -> None:
        """Append one line, on disk when this returns; a line already there is not repeated."""
        if key in self._rows:
            if self._rows[key] != (seq, digest, answer):
                raise LedgerLocked(f"log {self.path}: another answer was logged under {key!r}")
            return
        entry: dict[str, Any] = {"key": key, "row": seq, "hash": digest, "answer": answer}
        line = _encode(entry | {"previous": self._last}).encode("ascii") + b"\n"
        with failing_closed(self.path):
            try:
                if os.write(self._file, line) != len(line):
                    raise OSError("only part of a line could be written")
                os.fsync(self._file)
            except OSError:
                os.ftruncate(self._file, self._size)
                raise
        self._rows[key], self._last = (seq, digest, answer), hashlib.sha256(line[:-1]).hexdigest()
        self._size += len(line)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


_LONGEST = 1e6  # the largest factor between 1 and an intercept or radius


class Answerable(Protocol):
    """The questions that a guard answers."""

    @property
    def largest(self) -> int:
        """Return the most bytes that weights can have."""

    def refuse(self, question: Question) -> None:
        """Refuse a question that is not answered; nothing is charged for it."""

    def contribution(self, asked: Asked) -> Contribution:
        """Return what is asked of the ledger."""

    def local_steps(self, asked: Asked) -> LocalSteps | None:
        """Return the plan of local steps that is asked for; None where one answer is."""


class Tables:
    """Gradients of the losses that a policy allows, for tables."""

    def __init__(self, limits: "Limits") -> None:
        self._limits = limits

    @property
    def largest(self) -> int:
        return 8 * self._limits.coordinates

    def refuse(self, question: Question) -> None:
        limits, asked = self._limits, question.contribution
        if isinstance(asked, NetworkAsk):
            refuse(Reason.MODEL, "this guard holds a table, and no networks")
        if isinstance(asked, Evaluation):
            _refuse_evaluation(limits)
            asked = asked.gradient
        features = asked.features
        if forms.loss_name(asked) not in limits.losses:
            refuse(Reason.LOSS, f"allowed losses: {', '.join(limits.losses)}")
        if features.width != limits.width:
            refuse(Reason.SHAPE, f"records have {limits.width} features")
        lengths = [length for length in (features.intercept, features.radius) if length]
        if not all(1 / _LONGEST <= length <= _LONGEST for length in lengths):
            refuse(Reason.SHAPE, f"intercept and radius must lie within a factor of {_LONGEST:g} of 1")
        if not limits.allows_shape(asked.loss, features.size, question.shape):
            refuse(
                Reason.SHAPE,
                f"weights must have {features.size} rows and the {limits.outputs} columns allowed",
            )

    def contribution(self, asked: Asked) -> Contribution:
        if isinstance(asked, Evaluation):
            return replace(asked, gradient=self.contribution(asked.gradient))
        assert isinstance(asked, LinearGradient)
        return PlacedGradient(asked.loss, asked.features)

    def local_steps(self, asked: Asked) -> LocalSteps | None:
        return None


class Networks:
    """The models that a party has installed, checked on made-up examples of its records' shape."""

    def __init__(self, policy: "Policy", records: "Examples") -> None:
        self._models, self._limits = policy.models, policy.limits
        self._networks: dict[str, Network] = {}
        self.records = records
        check_sources(policy)
        for name, model in policy.models.items():
            self._networks[name] = found = _installed(name, model, policy)
            self.records = found.check(self.records)

    @property
    def largest(self) -> int:
        return EACH * max(model.weights for model in self._models.values())

    def refuse(self, question: Question) -> None:
        asked = question.contribution
        if not isinstance(asked, NetworkAsk):
            refuse(Reason.MODEL, f"this guard answers about networks: {', '.join(self._models)}")
        model = self._models.get(asked.network)
        if model is None:
            refuse(Reason.MODEL, f"installed models: {', '.join(self._models)}")
        if asked.source != model.hash:
            refuse(Reason.MODEL, "the source of this model differs from the coordinator's")
        if question.shape != (size := (self._networks[asked.network].size,)):
            refuse(Reason.SHAPE, f"this model has {size[0]} weights")
        if asked.steps > model.steps:
            refuse(Reason.ROUNDS, f"at most {model.steps} local steps a round are allowed")
        if asked.kind is NetworkKind.EVALUATION:
            _refuse_evaluation(self._limits)
        if asked.kind is NetworkKind.STEPS and self._limits.trust is not Trust.LOCAL:
            refuse(Reason.TRUST, "local steps need all of their noise: only under local trust")

    def contribution(self, asked: Asked) -> Contribution:
        assert isinstance(asked, NetworkAsk)
        network = self._networks[asked.network]
        if asked.kind is NetworkKind.UPDATE:
            return network.update(asked.steps, asked.lr, asked.batch)
        if asked.kind is NetworkKind.EVALUATION:
            return Evaluation(network.gradient, asked.cap, asked.clip)
        return network.gradient

    def local_steps(self, asked: Asked) -> LocalSteps | None:
        assert isinstance(asked, NetworkAsk)
        if asked.kind is not NetworkKind.STEPS:
            return None
        gradient = self._networks[asked.network].gradient
        return LocalSteps(gradient, asked.steps, asked.lr, asked.proximal)


def _refuse_evaluation(limits: "Limits") -> None:
    if not limits.evaluation:
        refuse(Reason.EVALUATION, "the policy allows no evaluation on these records")


def _installed(name: str, model: InstalledModel, policy: "Policy") -> "Network":
    """Return a model made by its factory, if its source and size are what the policy says."""
    from farthing.torch.training.network import Network

    where = f"[models.{name}]"
    make, loss = (factories.found(one, policy.modules) for one in model.names)
    try:
        made = Network(make(), loss, name=name, source=model.hash, most=2 * policy.size, placed=True)
    except FarthingError as error:
        raise InvalidValue(f"{where}: {error}") from None
    except Exception as error:  # of the factory, which sees no record
        raise InvalidValue(f"{where}: {model.factory} failed ({type(error).__name__}: {error})") from None
    if made.size > model.weights:
        raise InvalidValue(f"{where}: weights must be at least {made.size}, which the model has")
    if made.size > forms.MOST_WEIGHTS:
        raise InvalidValue(
            f"{where}: a ledger keeps answers of at most {forms.MOST_WEIGHTS:,} numbers, the model has "
            f"{made.size:,} trained weights: train fewer of them"
        )
    return made
