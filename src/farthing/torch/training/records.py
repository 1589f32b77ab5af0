"""Hold private examples for a model, and draw batches from them.

An example is what the guarantee protects: a record, or with ``users`` all records of a person, or with
``views`` one record seen several times. The last two reach the model with a second dimension, and their
gradients are added before they are clipped.

>>> examples = Examples((torch.arange(12.0).reshape(6, 2), torch.tensor([0, 1, 0, 1, 0, 1])))
>>> batch = examples.take(np.array([1, 4, 5]))
>>> [(tuple(inputs.shape), targets.tolist()) for inputs, targets, weights in batch.physical_batches(2)]
[((2, 2), [1, 0]), ((1, 2), [1])]

At user level, a person with fewer than ``records_per_user`` records is filled up with blanks of weight 0; of
a person with more, the first are used. Adding or removing a person changes nothing for the others.

>>> people = Examples(examples.tensors, users=["a", "b", "a", "a", "c", "b"], records_per_user=2)
>>> inputs, targets, weights = next(people.take(slice(None)).physical_batches(64))
>>> len(people), tuple(inputs.shape), weights.tolist()
(3, (3, 2, 2), [[1.0, 1.0], [1.0, 1.0], [1.0, 0.0]])
"""

import copy
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset

from farthing import validate
from farthing.budget import Unit
from farthing.errors import InvalidValue, Unsupported
from farthing.queries.arrays import attempt, column
from farthing.queries.samplers import Indices
from farthing.torch.training.collating import Collate, Reader

log = logging.getLogger("farthing.torch")
Integers = NDArray[np.int64]
PhysicalBatch = tuple[Any, Any, Tensor | None]


class Examples:
    """Private records for a model, by the number of the example that each belongs to.

    Parameters
    ----------
    data : tuple of tensors or Dataset
        Tensors (inputs…, targets), or a map-style dataset of such tuples, of one shape, that of most of the
        first records or of a public one (`like`): a record of another shape, or one that cannot be read,
        counts as zero.
    users : sequence, optional
        Whose record each is. None: every record is an example.
    records_per_user : int, optional
        How many records of a user count at most; needed with ``users``. Further ones are left out.
    augment : callable, optional
        Maps a batch of inputs to another view of it, drawn afresh for every batch; it must treat examples
        one by one. None: inputs as they are.
    views : int, default 1
        Augmented views of an example, whose mean gradient is clipped.
    device : torch.device or str, optional
        Where batches come. None: where the data lie.
    collate : callable, optional
        Makes a batch of a list of records, and is given one record at a time; `Padded` makes sequences
        alike. None: torch's ``default_collate``.
    workers : int, default 0
        Threads that read ahead.

    Examples
    --------
    >>> examples = Examples((torch.zeros(6, 2), torch.zeros(6)), users=[1, 1, 2, 2, 2, 3], records_per_user=2)
    >>> len(examples), examples.width, examples.unit.value
    (3, 2, 'user')
    """

    def __init__(
        self,
        data: Any,
        *,
        users: Sequence[Any] | NDArray[Any] | Tensor | None = None,
        records_per_user: int | None = None,
        augment: Callable[[Any], Any] | None = None,
        views: int = 1,
        device: torch.device | str | None = None,
        collate: Collate | None = None,
        workers: int = 0,
    ) -> None:
        self.data = data
        self.tensors, dataset, self.records = _source(data)
        self._reader = None if dataset is None else Reader(dataset, collate)
        self._targets: tuple[int, tuple[int, ...]] | None = None
        self._within: NDArray[np.bool_] | None = None  # records of tensors that count; None where all do
        self._places = _places(users, records_per_user, self.records)
        self.views, self.augment = validate.count(views=views), augment
        if self.views > 1 and augment is None:
            raise InvalidValue(f"{views} views of one record are all the same without augment")
        self.device = torch.device(device) if device is not None else None
        if workers:
            validate.count(workers=workers)
        self._workers = workers

    def __len__(self) -> int:
        return self.records if self._places is None else len(self._places)

    @property
    def unit(self) -> Unit:
        """Return the unit that an example is, a record or a user."""
        return Unit.RECORD if self._places is None else Unit.USER

    @property
    def width(self) -> int:
        """Return how many rows of the model's batch an example takes up."""
        return self.views * (1 if self._places is None else self._places.shape[1])

    @property
    def form(self) -> Any:
        """Shapes and dtypes of a record's parts, the same for all."""
        if self.tensors is not None:
            return [((1, *tensor.shape[1:]), tensor.dtype) for tensor in self.tensors]
        assert self._reader is not None
        return self._reader.form

    def like(self, inputs: Any, targets: Any) -> "Examples":
        """Return these examples, read from a dataset in the shape of public ones; tensors are as they are.

        >>> ragged = [(torch.zeros(3), 0), (torch.zeros(5), 1)]
        >>> Examples(ragged).like(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)).form[0]
        (torch.Size([1, 3]), torch.float32)
        """
        if self._reader is None:
            return self
        shaped = copy.copy(self)
        shaped._reader = self._reader.like(
            (*inputs, targets) if isinstance(inputs, list | tuple) else (inputs, targets)
        )
        return shaped

    def on(self, device: torch.device) -> "Examples":
        """Return these examples with batches that come on ``device``."""
        moved = copy.copy(self)
        moved.device = device
        return moved

    def least(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return a number for each example: that of its record, or of a user's records the smallest."""
        if self._places is None:
            return values
        found: NDArray[np.float64] = np.where(self._places >= 0, values[self._places], np.inf).min(axis=1)
        return found

    def take(self, indices: Indices) -> "Batch":
        """Return the batch at ``indices``, as if records that count as zero were not there.

        Nothing is read yet.
        """
        places = np.arange(len(self))[indices] if isinstance(indices, slice) else indices
        drawn = np.asarray(places, dtype=np.int64)
        return Batch(self, drawn if self._within is None else drawn[self._within[drawn]])

    def within(self, classes: int, others: tuple[int, ...] = ()) -> "Examples":
        """Return these examples with targets held to whole numbers below ``classes``, or among ``others``.

        A record whose target is not in the range counts as zero. However many there are, nothing is refused:
        at any threshold a single record would decide whether there is an error, which nobody paid for.
        """
        limited = copy.copy(self)
        limited._targets = classes, others
        log.info(
            "the model has %d outputs: records whose target is not 0 to %d count as zero",
            classes,
            classes - 1,
        )
        if self.tensors is not None:
            fit = limited._fit(self.tensors[-1]).cpu().numpy()
            if self._places is None:
                limited._within = None if fit.all() else fit
            else:
                limited._places = np.where(fit[self._places], self._places, -1)
        return limited

    def _fit(self, targets: Tensor) -> Tensor:
        """Return whether each record's targets are in the range."""
        assert self._targets is not None
        classes, others = self._targets
        fit = (targets >= 0) & (targets < classes)
        for other in others:
            fit |= targets == other
        return fit.flatten(1).all(1) if fit.ndim > 1 else fit

    def batch(self, places: Integers) -> PhysicalBatch | None:
        """Return the examples at ``places``, on the device: inputs, targets, weights; None if none counts."""
        if self._places is None:
            (inputs, targets), good = self._read(places)
            if good is not None and not good.any():
                return None
            weights = None
        else:
            chosen = self._places[places]
            there = chosen >= 0
            (inputs, targets), good = self._read(chosen[there])
            if good is not None:
                there[there] = good
            if not there.any():
                return None
            mask = torch.from_numpy(there)
            inputs, targets = (_map(part, lambda rows: _spread(rows, mask)) for part in (inputs, targets))
            weights = self._beside(mask.to(torch.float32))
        if self.augment is None:
            return inputs, targets, weights
        return self._seen(inputs, targets, weights)

    def _seen(self, inputs: Any, targets: Any, weights: Tensor | None) -> PhysicalBatch:
        """Return ``views`` views of each example along a second dimension, weighted to make a mean."""
        assert self.augment is not None
        if self._places is not None:
            inputs = _map(inputs, lambda rows: rows.flatten(0, 1))
        views = [self.augment(inputs) for _ in range(self.views)]
        if self.views == 1 and (weights is None or weights.ndim == 1):
            return views[0], targets, weights
        if weights is None or weights.ndim == 1:
            first = targets[0] if isinstance(targets, tuple) else targets
            ones = torch.ones(len(first), device=first.device, dtype=torch.float32)
            weights = (ones if weights is None else weights)[:, None]
            targets = _map(targets, lambda rows: rows.unsqueeze(1))
        shape = (weights.shape[0], -1)
        stacked = _map(_stack(views), lambda rows: rows.reshape(*shape, *rows.shape[2:]))
        targets = _map(targets, lambda rows: rows.repeat_interleave(self.views, 1))
        return stacked, targets, (weights / self.views).repeat_interleave(self.views, 1)

    def plain(self, places: Integers) -> tuple[Any, Any]:
        """Return the records at ``places`` as they are, (inputs, targets)."""
        return self._read(places)[0]

    def made_up(self) -> tuple[Any, Any]:
        """Return one made-up record of the records' form, (inputs, targets), on the device of the records."""
        *inputs, targets = (self._beside(_zeros(form)) for form in self.form)
        return (inputs[0] if len(inputs) == 1 else tuple(inputs)), targets

    def made_up_view(self) -> tuple[Any, Any]:
        """Return one made-up record as a model is given it: a view of it, and the target."""
        inputs, targets = self.made_up()
        return (inputs if self.augment is None else self.augment(inputs)), targets

    def made_up_batch(self) -> PhysicalBatch:
        """Return what `batch` gives of one example, made up: no record is read for it but for its form."""
        (inputs, targets), weights = self.made_up(), None
        if self._places is not None:
            mask = torch.zeros((1, self._places.shape[1]), dtype=torch.bool)
            mask[0, 0] = True
            inputs, targets = (_map(part, lambda rows: _spread(rows, mask)) for part in (inputs, targets))
            weights = self._beside(mask.to(torch.float32))
        if self.augment is None:
            return inputs, targets, weights
        return self._seen(inputs, targets, weights)

    def _read(self, places: Integers) -> tuple[tuple[Any, Any], NDArray[np.bool_] | None]:
        """Return the records at ``places``, and which of them count; None where all do."""
        good: NDArray[np.bool_] | None = None
        if self.tensors is not None:
            rows = torch.from_numpy(places)
            columns = tuple(tensor.index_select(0, rows.to(tensor.device)) for tensor in self.tensors)
        else:
            assert self._reader is not None
            columns, good = self._reader.read(places.tolist())
            if columns is None:
                return (None, None), good
            columns = self._limited(columns, good)
        *inputs, targets = (self._moved(_map(column, Tensor.detach)) for column in columns)
        return ((inputs[0] if len(inputs) == 1 else tuple(inputs)), targets), good

    def _limited(self, columns: tuple[Any, ...], good: NDArray[np.bool_]) -> tuple[Any, ...]:
        """Return columns without records whose targets are out of range; unset those in ``good``."""
        if self._targets is None or not isinstance(columns[-1], Tensor):
            return columns
        fit = self._fit(columns[-1]).cpu()
        if fit.all():
            return columns
        good[good] = fit.numpy()
        return tuple(_map(column, lambda rows: rows[fit.to(rows.device)]) for column in columns)

    def _beside(self, value: Any) -> Any:
        """Return a value on the device of batches."""
        if self.device is not None or self.tensors is None:
            return self._moved(value)
        return self.on(self.tensors[0].device)._moved(value)

    def _moved(self, value: Any) -> Any:
        if self.device is None:
            return value
        return _map(value, lambda rows: rows.to(self.device, non_blocking=True))


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A batch of examples that was drawn, read in physical batches that fit into memory.

    Attributes
    ----------
    examples : Examples
        The records it is drawn from.
    indices : array of int
        Which examples are in it.

    Examples
    --------
    >>> batch = Examples((torch.zeros(6, 2), torch.zeros(6))).take(np.array([0, 3, 4]))
    >>> len(batch), [len(targets) for _, targets, _ in batch.physical_batches(2)]
    (3, [2, 1])
    """

    examples: Examples
    indices: Integers

    def __len__(self) -> int:
        return len(self.indices)

    def made_up(self) -> PhysicalBatch:
        """Return what there is of one example, made up."""
        return self.examples.made_up_batch()

    def take(self, places: Indices) -> "Batch":
        """Return the examples at these places of the batch."""
        return Batch(self.examples, self.indices[places])

    def part(self, place: int, of: int) -> "Batch":
        """Return one of ``of`` parts of equal size, to within one."""
        return Batch(self.examples, np.array_split(self.indices, of)[place])

    def physical_batches(self, physical_batch_size: int | None = None) -> Iterator[PhysicalBatch]:
        """Yield parts of at most ``physical_batch_size`` rows each; no user and no set of views is cut."""
        size = (
            len(self) if physical_batch_size is None else max(1, physical_batch_size // self.examples.width)
        )
        if len(self) <= size:  # all at once, or nobody
            parts = [self.indices] if len(self) else []
        else:
            parts = np.array_split(self.indices, -(-len(self) // size))
        yield from (batch for batch in self._read(parts) if batch is not None)

    def _read(self, parts: list[Integers]) -> Iterator[PhysicalBatch | None]:
        workers = self.examples._workers
        if not workers or len(parts) < 2:
            yield from map(self.examples.batch, parts)
            return
        with ThreadPoolExecutor(workers) as pool:
            waiting = deque[Future[PhysicalBatch | None]]()
            for part in parts:
                waiting.append(pool.submit(self.examples.batch, part))
                if len(waiting) > workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()


def _source(data: Any) -> tuple[tuple[Tensor, ...] | None, Any, int]:
    """Return tensors or a dataset, and how many records."""
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, list | tuple) and data and all(isinstance(x, Tensor | np.ndarray) for x in data):
        tensors = tuple(torch.as_tensor(column).detach() for column in data)
        lengths = {len(tensor) if tensor.ndim else 0 for tensor in tensors}
        if len(tensors) < 2:
            raise InvalidValue(
                "data must be inputs and targets, got inputs alone: a loss without targets is given any, "
                "such as torch.zeros(len(inputs))"
            )
        if len(lengths) != 1:
            raise InvalidValue(
                f"data must be inputs and targets, one row a record each, got lengths {sorted(lengths)}"
            )
        return tensors, None, _some(lengths.pop())
    if isinstance(data, list | tuple) and data and isinstance(data[0], Tensor | np.ndarray):
        raise InvalidValue(
            "data must be tensors (inputs…, targets), or records: of several targets make one tensor "
            "(torch.stack), or give a Dataset whose records are (inputs, (one target, another))"
        )
    if isinstance(data, IterableDataset):
        raise Unsupported(
            "a Poisson batch needs records by number, an IterableDataset only has the next one; "
            "use a map-style Dataset, with __getitem__ and __len__"
        )
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__") or isinstance(data, str | dict):
        raise Unsupported(
            "data must be tensors (inputs…, targets) or a map-style Dataset, with __getitem__ and __len__, "
            f"got {type(data).__name__}; of a DataLoader give its dataset, the ledger draws the batches"
        )
    return None, data, _some(len(data))


def _some(records: int) -> int:
    if records == 0:
        raise InvalidValue("data has no records")
    return records


def _places(users: Any, records_per_user: int | None, records: int) -> Integers | None:
    """Return the first ``records_per_user`` records of each user, a row a user, filled up with -1."""
    if users is None:
        if records_per_user is not None:
            raise InvalidValue("records_per_user needs users: whose record each one is")
        return None
    if records_per_user is None:
        raise InvalidValue(
            "users needs records_per_user, the public number of records of a user that count at most"
        )
    most = validate.count(records_per_user=records_per_user)
    ids, there = _identified(users)
    if len(ids) != records:
        raise InvalidValue("users must be one whole number or text a record")  # how many is no one's business
    order = there[np.argsort(ids[there], kind="stable")]
    starts = np.flatnonzero(np.append(True, ids[order][1:] != ids[order][:-1])) if len(order) else order
    ends = np.append(starts, len(order))[1:]
    places = starts[:, None] + np.arange(most)
    filled: Integers = np.where(
        places < ends[:, None], np.append(order, -1)[np.minimum(places, len(order))], -1
    )
    return filled


def _identified(users: Any) -> tuple[NDArray[Any], Integers]:
    """Return whose record each is, and the places of those that say it.

    In a list or an array of objects a record without a whole number or a text is nobody's and counts as
    nothing, as in `farthing train --user`: no single record decides whether there is a refusal.
    """
    said = "users must be one whole number or text a record"
    ids = attempt(np.asarray, users, said=said) if hasattr(users, "dtype") else column(users, "users")
    if ids.ndim != 1 or ids.dtype.kind not in "iuUSO":
        raise InvalidValue(f"{said}, got an array of {ids.dtype.name}")
    if ids.dtype.kind != "O":
        return ids, np.arange(len(ids))
    texts = [_identity(cell) for cell in ids.tolist()]
    there = np.flatnonzero([text is not None for text in texts])
    if not len(there):
        raise InvalidValue(f"{said}: none of them is either")
    # numbers, as an array of texts takes room for the longest of them everywhere
    numbers = {text: n for n, text in enumerate(sorted({text or "" for text in texts}))}
    return np.array([numbers[text or ""] for text in texts]), there


def _identity(cell: Any) -> str | None:
    """Return a whole number or a text as text, None for anything else."""
    if isinstance(cell, float) and cell.is_integer():
        cell = int(cell)
    return str(cell) if isinstance(cell, int | str | np.integer) and not isinstance(cell, bool) else None


def _zeros(form: Any) -> Any:
    """Return a row of zeros of this form, or a tuple of such."""
    if isinstance(form, list):
        return tuple(_zeros(part) for part in form)
    shape, dtype = form
    return torch.zeros(shape, dtype=dtype)


def _spread(rows: Tensor, mask: Tensor) -> Tensor:
    """Return rows in the places of ``mask``; elsewhere the first of the same user, which a model can take."""
    mask = mask.to(rows.device)
    spread = rows.new_zeros((*mask.shape, *rows.shape[1:]))
    spread[mask] = rows
    first = spread[torch.arange(len(mask), device=rows.device), mask.int().argmax(1)]
    return torch.where(mask.view(*mask.shape, *(1,) * (rows.ndim - 1)), spread, first[:, None])


def _map(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to every tensor in a (nested) tuple."""
    if isinstance(value, list | tuple):
        return tuple(_map(part, function) for part in value)
    if not isinstance(value, Tensor):
        raise InvalidValue(f"a batch must be made of tensors, got a {type(value).__name__}; give collate=")
    return function(value)


def _stack(views: list[Any]) -> Any:
    """Stack several views of a batch along a second dimension."""
    if isinstance(views[0], tuple):
        return tuple(_stack(list(parts)) for parts in zip(*views, strict=True))
    return torch.stack(views, 1)
