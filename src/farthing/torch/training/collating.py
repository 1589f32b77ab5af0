"""Read a dataset's records into the rows of a batch, one record at a time.

A function that makes a batch of a list of records can let them meet: one that pads to the longest of the
list changes the others' inputs with the one that comes or goes, and a bound on each gradient then bounds
nothing. So a collate function is called with one record, and rows are put together here. For that they need
one public shape: that of a public example, or without one that of most of the first records, which are looked
at once and whose shape then counts as public. A record of another shape, or one that cannot be read, counts
as zero, the first one too; an error would tell on it. Where the first records have several shapes, one of
them can decide whether there is a refusal: a public example leaves no such decision to the records. A dataset
that writes every record into the same memory is collated as it is read: each row would be that of the last.

`Padded` makes sequences of different lengths alike, by a public length.

>>> texts = [([5, 3, 8], 1), ([7], 0), ([1, 2, 3, 4, 5, 6], 1)]
>>> (tokens, targets), there = Reader(texts, Padded(4)).read([0, 1, 2])
>>> tokens.tolist(), targets.tolist(), there.tolist()
([[5, 3, 8, 0], [7, 0, 0, 0], [1, 2, 3, 4]], [1, 0, 1], [True, True, True])
"""

import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

from farthing import validate
from farthing.errors import InvalidValue

Collate = Callable[[list[Any]], Any]
Mask = NDArray[np.bool_]

_SEEN = 7  # records that show their form: no single one decides what it is
_UNREAD = object()  # in place of a record that cannot be read
_FORMS = (
    "the first records have several shapes or types, none of which most of them have, so that a single "
    "record would decide which others count; make them alike by collate=, such as ft.torch.Padded(length), "
    "or give train a public example=(inputs, targets), whose shape the records are then read in"
)


@dataclass(frozen=True, slots=True)
class Padded:
    """A collate function that cuts or pads sequences to one length.

    For records (sequences…, target).

    Parameters
    ----------
    length : int
        The public length, chosen without a look at the records.
    value : float, default 0
        What sequences are filled up with.
    targets : float, optional
        What targets are filled up with, where they are sequences as well (one label a token). None: targets
        are left as they are.

    Examples
    --------
    >>> Padded(3)([([5, 3, 8, 1], 1), ([7], 0)])
    (tensor([[5, 3, 8],
            [7, 0, 0]]), tensor([1, 0]))
    """

    length: int
    value: float = 0
    targets: float | None = None

    def __post_init__(self) -> None:
        validate.count(length=self.length)

    def __call__(self, records: list[Any]) -> tuple[Tensor, ...]:
        """Return the batch of these records: each of them by itself."""
        rows = [self._row(record) for record in records]
        return tuple(torch.stack(column) for column in zip(*rows, strict=True))

    def _row(self, record: Any) -> list[Tensor]:
        *inputs, target = record
        fill = self.targets
        last = torch.as_tensor(target) if fill is None else self._long(target, fill)
        return [*(self._long(sequence, self.value) for sequence in inputs), last]

    def _long(self, sequence: Any, value: float) -> Tensor:
        found = torch.as_tensor(sequence)[: self.length]
        filled = found.new_full((self.length, *found.shape[1:]), value)
        filled[: len(found)] = found
        return filled


class Reader:
    """Reads records by number; `form` is what they look like: of a public example, or most of the first."""

    def __init__(self, dataset: Any, collate: Collate | None = None) -> None:
        self._dataset, self._collate = dataset, default_collate if collate is None else collate
        self._plain = self._collate is default_collate
        self._found: tuple[Any, Any] | None = None
        self._declared = self._reused = False

    def like(self, columns: tuple[Any, ...]) -> "Reader":
        """Return a reader of records in the form of public columns (inputs…, targets), of one row or more.

        No record decides the form. Numbers are converted to the columns' types, each record by itself.
        """
        reader = Reader(self._dataset, self._collate)
        reader._declared, reader._found = True, (_form(_first_row(columns)), None)
        return reader

    @property
    def form(self) -> Any:
        """Shapes and dtypes of a record's parts."""
        return self._first()[0]

    def _first(self) -> tuple[Any, Any]:
        """Return the form of a row, and the kind of the record that it was made of."""
        if self._found is None:
            seen = [self._seen(place) for place in range(max(1, min(_SEEN, len(self._dataset))))]
            forms = [one[0] for one in seen]
            found = seen[max(range(len(seen)), key=lambda place: forms.count(forms[place]))]
            if isinstance(found[0], str):
                raise InvalidValue(found[0])
            others = [form for form in forms if form != found[0]]
            if len(seen) - len(others) < 2 + max(map(others.count, others), default=-1):
                raise InvalidValue(_FORMS)
            if not self._plain:
                self._refuse_padding(found[2])
            self._found = found[:2]
        return self._found

    def _seen(self, place: int) -> tuple[Any, Any, Any]:
        """Return form and kind of a record, and the record; in place of the form, the text of an error."""
        try:
            record = self._dataset[place]
            row = self._collate([record])
        except BaseException as error:  # what it says may quote the record
            if from_outside(error):
                raise
            return (
                f"most of the first records cannot be read or collated ({type(error).__name__}): a record "
                "must be a tuple (inputs…, target) of tensors, arrays or numbers; for anything else give "
                "collate=",
                None,
                None,
            )
        try:
            return _form(_columns(row)), _kind(record), record
        except InvalidValue as error:  # which names types and shapes
            return str(error), None, None

    def _refuse_padding(self, record: Any) -> None:
        """Refuse a function whose row for a made-up record grows with a longer record beside it."""
        try:
            short, long = _made_up(record, 1), _made_up(record, 2)
            alone, together = self._collate([short]), self._collate([short, long])
            same = all(a.shape[1:] == b.shape[1:] for a, b in zip(alone, together, strict=True))
        except Exception:  # the function needs records of one shape
            return
        if not same:
            raise InvalidValue(
                "collate pads to the longest record of a batch, so that one record changes the others' rows; "
                "make every row as long as a public number says, by collate=ft.torch.Padded(length) or alike"
            )

    def read(self, places: Sequence[int]) -> tuple[Any, Mask]:
        """Return the records that have the form, as columns (inputs…, targets), and which of ``places``."""
        form, kind = self._first()
        records: Iterable[Any] = map(self._record, places)  # each is read when the one before is a row
        if self._plain and kind is not None and not self._reused:
            records = list(records)
            self._reused = _overlap(records)
            if self._reused:
                records = map(self._record, places)
            elif all(_kind(record) == kind for record in records):
                return self._together(records), np.ones(len(records), dtype=bool)
        rows = [self._row(record, form) for record in records]
        there = np.array([row is not None for row in rows], dtype=bool)
        return _joined([row for row in rows if row is not None]), there

    def _record(self, place: int) -> Any:
        try:
            return self._dataset[place]
        except BaseException as error:
            if from_outside(error):
                raise
            return _UNREAD

    def _together(self, records: list[Any]) -> Any:
        """Return records of one form as columns, stacked by torch's own function."""
        return _columns(default_collate(records)) if records else None

    def _row(self, record: Any, form: Any) -> Any:
        if record is _UNREAD:
            return None
        try:
            row = _columns(self._collate([record]))
            if self._declared:
                row = _cast(row, form)
            return _copied(row) if _form(row) == form else None
        except BaseException as error:
            if from_outside(error):
                raise
            return None


def from_outside(error: BaseException) -> bool:
    """Return whether an interruption or a signal raised an error, and not the code that was given a record.

    Of the errors that are no `Exception`: a panic of a library in Rust and ``sys.exit`` may be a record's.
    """
    if isinstance(error, Exception | KeyboardInterrupt):
        return isinstance(error, KeyboardInterrupt)
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    codes = {getattr(getattr(held, "__func__", held), "__code__", None) for held in handlers} - {None}
    step = error.__traceback__
    while step is not None and step.tb_frame.f_code not in codes:
        step = step.tb_next
    return step is not None


def _overlap(records: list[Any]) -> bool:
    """Return whether some records lie in the same memory, in which one may have overwritten another."""
    places = [place for record in records for place in _memory(record)]
    return len({*places}) < len(places)


def _memory(part: Any) -> Iterator[int]:
    """Yield where what may be written into lies."""
    if isinstance(part, Tensor):
        if part.numel():
            yield part.data_ptr()
    elif isinstance(part, np.ndarray):
        if part.size:
            yield part.__array_interface__["data"][0]
    elif isinstance(part, list | tuple):
        if isinstance(part, list):
            yield id(part)
        for inner in part:
            yield from _memory(inner)


def _columns(row: Any) -> tuple[Any, ...]:
    if not isinstance(row, list | tuple) or len(row) < 2:
        raise InvalidValue(
            f"a record must be a tuple (inputs…, target), a batch of them is a {type(row).__name__}; "
            "give the data as one tuple (inputs, targets), or collate=, a function from a list of records to "
            "(inputs…, targets)"
        )
    return tuple(row)


def _form(row: Any) -> Any:
    """Return shapes and dtypes in a batch of one."""
    if type(row) is tuple or isinstance(row, list | tuple):
        return [_form(part) for part in row]
    if type(row) is not Tensor and not isinstance(row, Tensor):
        raise InvalidValue(f"a batch must be made of tensors, got a {type(row).__name__}; give collate=")
    shape = row.shape
    if shape[:1] != (1,):
        raise InvalidValue(
            f"collate must make one row of one record, got shape {tuple(shape)}: it is called with a "
            "list of one record, so that records cannot meet"
        )
    return shape, row.dtype


def _first_row(columns: Any) -> Any:
    """Return the first row of public columns, which are tensors or tuples of such."""
    if isinstance(columns, list | tuple):
        return tuple(_first_row(part) for part in columns)
    return torch.as_tensor(columns)[:1]


def _cast(row: Any, form: Any) -> Any:
    """Return a row with the types of a form."""
    if isinstance(row, list | tuple):
        return tuple(_cast(part, each) for part, each in zip(row, form, strict=True))
    return row.to(form[1])


def _copied(row: Any) -> Any:
    """Return a row in memory of its own."""
    return tuple(map(_copied, row)) if isinstance(row, list | tuple) else row.clone()


def _made_up(record: Any, times: int) -> Any:
    """Return a made-up record like a given one, ``times`` as long."""
    match record:
        case Tensor() | np.ndarray() if record.ndim:
            zeros = torch.zeros if isinstance(record, Tensor) else np.zeros
            return zeros((times * len(record), *record.shape[1:]), dtype=record.dtype)
        case str():
            return " ".join(["word"] * times * max(1, len(record.split())))
        case list() if all(isinstance(part, int | float) for part in record):
            return [0] * times * len(record)
        case list() | tuple():
            return type(record)(_made_up(part, times) for part in record)
        case dict():
            return {key: _made_up(part, times) for key, part in record.items()}
    return record


def _kind(record: Any) -> Any:
    """Return the types and shapes that torch's collate function goes by; None where they are not known.

    Records that differ in it may still have one form (1 and numpy's 1): only forms decide who counts.
    """
    kind = type(record)  # by type, which is quick: this is asked of every record
    if kind is Tensor:
        return record.shape, record.dtype, record.device, record.layout
    if kind in (int, float, bool):
        return kind
    if kind in (list, tuple):
        kinds = [_kind(part) for part in record]
        return None if None in kinds else (kind, kinds)
    if kind is np.ndarray:
        return record.shape, record.dtype
    return record.dtype if isinstance(record, np.generic) else None


def _joined(rows: list[Any]) -> Any:
    """Return batches of one as one batch."""
    if not rows:
        return None
    if isinstance(rows[0], list | tuple):
        return tuple(_joined(list(parts)) for parts in zip(*rows, strict=True))
    return torch.cat(rows)
