"""Sum a batch over several processes: each takes its share of the examples, and noise is added once.

Every rank runs the same `train` on the same data. Rank 0 has the ledger: it charges, draws the batch and
tells the other ranks which examples are in it. Every rank sums the bounded gradients of its part, rank 0 adds
these sums and the noise, and the released answer goes to all ranks, which take the same step. So the
guarantee is that of one process with one ledger, and the weights are equal on all ranks. (The ranks learn
which examples are in a batch; they hold the records anyway.)

A rank whose sum fails still takes part in the exchange and reports the failure. Rank 0's ledger then asks for
parts of the batch until the failing examples are found, and counts those as zero (`farthing.ledger.answers`);
the other ranks answer as often as it asks. If a rank runs out of memory, or if the noise is seeded, nothing
is released, the batch stays charged, and every rank raises `NotReleased`. The same happens if a rank dies, as
soon as torch.distributed notices.

Before the first batch, keyed digests show whether all ranks hold the same records (`same_records`). Rank 0
names the records of a batch by their numbers, so a number must mean the same record on every rank. If every
rank had a shard of its own, a person could be in the data of several ranks under different numbers, and would
be drawn more often than the sampling rate says. Only digests under a random key of rank 0 are sent, between
processes of one owner.
"""

import hashlib
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from farthing.errors import BudgetSpent, InvalidValue, NotReleased
from farthing.ledger.answers import refusal, zero_sum
from farthing.ledger.ledger import Ledger
from farthing.queries.correlated import Balanced, Beginnings, Cyclic
from farthing.queries.personal import PersonalCyclic
from farthing.queries.query import Answer, Contribution, Query, Receipt
from farthing.queries.truncation import TruncatedCyclic
from farthing.torch.kernels import totals
from farthing.torch.training.placing import PaddedBatch, PaddedExamples
from farthing.torch.training.plan import Plan
from farthing.torch.training.randomness import apart
from farthing.torch.training.records import Batch, Examples
from farthing.torch.training.sharding import is_shard

_BYTES = 2**28  # of tensors that are compared: all, or evenly spread rows
_RECORDS = 64  # of a dataset that are read and compared


def digests(examples: Examples, key: int) -> tuple[int, int, int]:
    """Digest the public form of the records, (some of) the records, and whether these come alike twice."""
    form = examples.unit, len(examples), examples.records, examples.width, examples.form
    public = _digest(key, [repr(form).encode()])
    if examples.tensors is not None:
        return public, _digest(key, (_bytes(tensor) for tensor in examples.tensors)), 1
    places = np.unique(np.linspace(0, examples.records - 1, _RECORDS).astype(np.int64))
    first, second = (_read(examples, places, key) for _ in range(2))
    return public, first, int(first == second)


def refuse_different(found: list[tuple[int, int, int]]) -> None:
    """Raise, on every rank, if the ranks' digests differ.

    Records that a dataset draws anew every time they are read are compared by their form only.
    """
    forms, contents = {one[0] for one in found}, {one[1] for one in found}
    steady = all(one[2] for one in found)
    if len(forms) > 1 or (steady and len(contents) > 1):
        what = "number, shape or kind of records" if len(forms) > 1 else "records"
        raise InvalidValue(
            f"the ranks differ in the {what} they hold: give every rank all records, in the same order, not "
            "a shard; rank 0 draws a batch from all of them, and each rank sums its part"
        )


def _bytes(tensor: Tensor) -> bytes:
    each = max(1, tensor[0].numel() * tensor.element_size())
    rows = min(len(tensor), max(1, _BYTES // each))
    places = torch.linspace(0, len(tensor) - 1, rows, dtype=torch.float64).long()
    chosen = tensor if rows == len(tensor) else tensor.index_select(0, places.to(tensor.device))
    return chosen.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _read(examples: Examples, places: Any, key: int) -> int:
    with apart(torch.device("cpu"), seed=key):
        rows = [examples.plain(places[n : n + 1]) for n in range(len(places))]
    return _digest(key, (_flat(row) for row in rows))


def _flat(value: Any) -> bytes:
    if isinstance(value, list | tuple):
        return b"(" + b",".join(map(_flat, value)) + b")"
    return _bytes(value) if isinstance(value, Tensor) else b"none"


def _digest(key: int, parts: Any) -> int:
    found = hashlib.blake2b(key=key.to_bytes(8, "little"), digest_size=7)
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return int.from_bytes(found.digest(), "little")


def new_key() -> int:
    """Return a key that nobody knows beforehand."""
    return int.from_bytes(os.urandom(7), "little")


_BATCH, _SPENT, _RELEASED, _FAILED, _PUBLIC = range(5)

Group = dist.ProcessGroup
Released = tuple[Any, tuple[Receipt, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """The processes that train together, and the device their messages travel from."""

    group: Group | None
    device: torch.device

    @property
    def rank(self) -> int:
        """This process's number; rank 0 holds the ledger."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return dist.get_world_size(self.group)

    def tell(self, *numbers: int) -> tuple[int, ...]:
        """Return rank 0's whole numbers, at every rank."""
        message = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        self.send(message)
        return tuple(message.tolist())

    def send(self, tensor: Tensor) -> Tensor:
        """Return rank 0's tensor, at every rank."""
        with _whole():
            dist.broadcast(tensor, group=self.group, group_src=0)
        return tensor

    def meet(self, total: Tensor | None, public: bool = False) -> Tensor:
        """Return the sum of all ranks' totals, at rank 0; raises everywhere if one has none.

        ``public``: for a reason that no example decides, such as want of memory.
        """
        with _whole():
            word = torch.tensor([total is None, public], dtype=torch.int64, device=self.device)
            dist.all_reduce(word, group=self.group)
            failed, for_good = word.tolist()
            if failed:
                raise (NotReleased if for_good else RanksFailed)(
                    f"{failed} of {self.size} ranks failed on their part of a batch: it is charged, and "
                    "nothing was released"
                )
            assert total is not None
            dist.reduce(total, group=self.group, group_dst=0)
        return total


class RanksFailed(NotReleased):
    """A rank failed on its part of a batch, perhaps because of an example: rank 0 may ask for parts of it."""

    public = False


@contextmanager
def _whole() -> Iterator[None]:
    """Turn what torch.distributed raises when a rank is gone into `NotReleased`."""
    try:
        yield
    except RuntimeError as error:
        raise NotReleased(f"a rank is gone; the charged answer is not released: {error}") from None


def ranks(device: torch.device, group: Group | None = None) -> Ranks | None:
    """Return the ranks of ``group``, or of torch's default group; None where this process is alone."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) < 2:
        return None
    own = dist.get_backend(group) == "nccl"
    return Ranks(group, device if own else torch.device("cpu"))


def same_records(together: Ranks, examples: Examples) -> None:
    """Raise, on every rank, if the ranks hold different records, before anything is asked."""
    (key,) = together.tell(new_key())
    own = torch.tensor(digests(examples, key), dtype=torch.int64, device=together.device)
    found = [torch.empty_like(own) for _ in range(together.size)]
    with _whole():
        dist.all_gather(found, own, group=together.group)
    refuse_different([tuple(one.tolist()) for one in found])


def agree(together: Ranks, model: nn.Module, plan: Plan | None, place: int) -> tuple[Plan, int]:
    """Return rank 0's weights, plan and place in it, at every rank."""
    whole = [p for p in model.parameters() if not is_shard(p)]  # a shard is on one rank only
    for tensor in (*whole, *model.buffers()):
        moved = together.send(tensor.detach().to(together.device).contiguous())
        with torch.no_grad():
            tensor.copy_(moved)
    own = plan if plan is not None else Plan(0, 0.0, (), 0)
    length, steps, place, records, promised, bands, buffers, bins = together.tell(
        *(len(own.noise_multipliers), own.steps or 0, place, own.records, own.promised),
        *(own.bands, own.buffers, own.bins),
    )
    own_numbers = [own.sampling_rate, own.exponent, *own.noise_multipliers]
    numbers = own_numbers if plan is not None else [0.0] * (2 + length)
    told = together.send(torch.tensor(numbers, dtype=torch.float64, device=together.device))
    rate, exponent, *multipliers = told.tolist()
    correlated = bands, exponent, buffers, bins
    return Plan(records, rate, tuple(multipliers), steps or None, bool(promised), *correlated), place


class Asks(Protocol):
    """A door to the examples: that of a single process, or one shared by several."""

    def ask(self, query: Query) -> Released:
        """Return the released value, or None where nobody was drawn in this turn, and the receipts.

        After a restart nobody is drawn until a cycle or pass begins: a public fact, so the noise is left out.
        """

    def public(self, numbers: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
        """Return rank 0's numbers, at every rank; ``numbers`` is called there alone."""


@dataclass(frozen=True, slots=True, eq=False)
class Alone:
    """The door of a single process."""

    door: Ledger
    turns: Beginnings = field(default_factory=Beginnings)

    def ask(self, query: Query) -> Released:
        """Call `Ledger.ask`."""
        answer = self.door.ask(query)
        return None if _idle(self.turns, query, answer) else answer.value, (answer.receipt,)

    def public(self, numbers: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
        """Return the numbers."""
        return numbers()


@dataclass(frozen=True, slots=True, eq=False)
class Leader:
    """Rank 0's door: what it asks, all ranks answer."""

    door: Ledger
    together: Ranks
    turns: Beginnings = field(default_factory=Beginnings)

    def ask(self, query: Query) -> Released:
        """Call `Ledger.ask`, and send the released value to every rank."""
        spread = Query(query.sampler, _Parts(query.contribution, self.together), query.bound, query.mechanism)
        try:
            answer = self.door.ask(spread)
        except BudgetSpent:
            self.together.tell(_SPENT, 0)
            raise
        except NotReleased as error:
            if isinstance(error, RanksFailed):
                self.together.tell(_FAILED, 0)
            raise  # every rank knows
        except Exception:
            self.together.tell(_FAILED, 0)
            raise
        if _idle(self.turns, query, answer):
            self.together.tell(_RELEASED, 0)
            return None, (answer.receipt,)
        value = answer.value if isinstance(answer.value, Tensor) else torch.as_tensor(answer.value)
        value = value.to(self.together.device, torch.float32)
        self.together.tell(_RELEASED, len(value))
        return self.together.send(value), (answer.receipt,)

    def public(self, numbers: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
        """Tell the numbers to every rank; or that rank 0 failed to find them."""
        try:
            found = numbers()
        except BaseException:
            self.together.tell(_FAILED, 0)
            raise
        self.together.tell(_PUBLIC, len(found))
        self.together.send(torch.tensor(found, dtype=torch.float64, device=self.together.device))
        return found


def _idle(turns: Beginnings, query: Query, answer: Answer) -> bool:
    """Return whether nobody was drawn in the turn of an answer."""
    in_turns = isinstance(query.sampler, Cyclic | TruncatedCyclic | Balanced | PersonalCyclic)
    return in_turns and turns.idle(answer.receipt.turn, query.sampler)


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """A contribution of which every rank sums a part."""

    contribution: Contribution
    together: Ranks

    def bounded_sum(self, batch: Batch, w: Any, bound: Any) -> Tensor:
        """Return all ranks' sums, added up at rank 0."""
        self.together.tell(_BATCH, len(batch))
        self.together.send(torch.from_numpy(batch.indices).to(self.together.device))
        return _part(self.contribution, self.together, batch, bound)

    @property
    def honours(self) -> Collection[str]:
        """Return the kinds of bound that the contribution honours."""
        return self.contribution.honours

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Return the shape of the contribution's sum."""
        return self.contribution.shape

    def zero(self, records: Any, w: Any, bound: Any) -> Any:
        """Return rank 0's own sum over nobody: the other ranks are not asked."""
        return zero_sum(self.contribution, records, w, bound)


def _part(contribution: Contribution, together: Ranks, batch: Batch | PaddedBatch, bound: Any) -> Tensor:
    """Return this rank's sum plus the others'; an error is sent to all ranks before it is raised."""
    part = batch.part(together.rank, together.size)
    try:
        with totals.among(len(batch)):
            total: Tensor = contribution.bounded_sum(part, None, bound)
    except Exception as error:
        together.meet(None, public=refusal(error) is not None)  # raises, with this error as its context
        raise
    whole = together.meet(total.to(together.device, torch.float64))
    return whole.to(total.device, total.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Follower:
    """The door of every other rank: it waits for rank 0's batch, sums its part, and gets what is released."""

    examples: Examples | PaddedExamples
    together: Ranks

    def ask(self, query: Query) -> Released:
        """Return the value that rank 0 released; its receipt is rank 0's."""
        word, size = self.together.tell(_FAILED, 0)
        if word == _SPENT:
            raise BudgetSpent("rank 0 says that the budget is spent")
        failed = NotReleased("rank 0 failed: what was charged is not released")
        while word == _BATCH:  # again, in parts, where a rank fails
            indices = self.together.send(torch.empty(size, dtype=torch.int64, device=self.together.device))
            batch = self.examples.take(np.asarray(indices.cpu()))
            try:
                _part(query.contribution, self.together, batch, query.bound)
            except RanksFailed as error:
                failed = error
            word, size = self.together.tell(_FAILED, 0)
        if word != _RELEASED:
            raise failed
        if not size:
            return None, ()
        return self.together.send(torch.empty(size, device=self.together.device, dtype=torch.float32)), ()

    def public(self, numbers: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
        """Return the numbers that rank 0 tells."""
        word, size = self.together.tell(_FAILED, 0)
        if word != _PUBLIC:
            raise NotReleased("rank 0 failed: nothing more is asked for")
        told = torch.empty(size, dtype=torch.float64, device=self.together.device)
        return tuple(self.together.send(told).tolist())
