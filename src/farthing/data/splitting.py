"""Choose records by public rules: a number of rows per person, a held-out share, and partitions.

A rule may depend on one person's own records only, so that adding or removing a person changes no other
person's assignment: the first ``rows`` rows of each person are kept, and a person is held out according to a
hash. Rows without an identifier are left out: if they counted as one person, one of them would decide which
of the others are kept. Spaces around an identifier are ignored. A rule by position would shift every later
record when one is removed, and guarantees for models trained on the parts would not hold.

Without people, a record is held out according to a hash of its cells and of its rank, the number of equal
records before it. One record more or less changes ranks only among its equals, of which one rank more or less
is taken: both sides are otherwise the same records. By its cells alone all equal records would be on one
side, and in a table with few different ones a model would be measured on kinds of records it never saw.

>>> split = Split("name", share=0.5)
>>> split.sides({"name": np.array(["ann", "eve", ""])}, [])[:2]
(array([ True, False, False]), array([False,  True, False]))

`Partitions` holds records in parts that are summed where they are stored: in processes of a Dask cluster, or
in turn in one process. A query's sum over all records is the sum over parts, so only sums are sent: each part
adds up its own records' bounded terms, one process adds up the parts, and the ledger there charges, adds
noise and releases, as for one table. There is one ledger; workers have neither budget nor noise. Sums before
the noise are as private as the records: the network between workers and ledger must be trusted.

Rounding. Neighbours differ in one record, so in the sum of one part, whose rounding is that of a table
(`farthing.noise.summing`); the other parts' sums are identical. Sums of parts are added exactly (`math.fsum`)
and rounded once, by at most 2⁻²³ of a bound for 2³⁰ records: within the slack of the mechanisms. So the
result does not depend on the order of the parts, and if terms are exact (`farthing.statistics`) it does not
depend on the partition: with the same noise the release is bitwise the same as in one process.

>>> from farthing.queries.query import Rows
>>> parts = Partitions([Rows(np.ones((3, 2))), Rows(np.ones((5, 2)))])
>>> len(parts), len(parts.take(np.array([0, 4, 7])))
(8, 3)
"""

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.data.csv_cells import CsvCells
from farthing.errors import InvalidValue
from farthing.noise.summing import checked
from farthing.queries.samplers import Indices

Mask = NDArray[np.bool_]

_NOBODY = frozenset({"", "nan", "nat", "none", "null"})  # missing identifiers, in lower case
_WORDS = 4  # 64-bit words of a digest that identifies a person
_STEP = np.uint64(0x9E3779B97F4A7C15)  # odd: words of different ranks differ
_PARTS = 128  # files that many records are divided into
_AT_ONCE = 2**14  # rows read from a file at a time
_MARKED = 2**24  # the most records whose marks are kept in memory


@dataclass(frozen=True, slots=True)
class Split:
    """The rule that decides which records are used for training, and which are held out.

    Parameters
    ----------
    user : str, optional
        The column that identifies the person of a record. Rows where it is blank, null or NaN are left out.
    rows : int, default 1
        The number of rows of a person that are kept, the first ones; with ``user`` only.
    share : float, default 0.0
        The share of the records, or of the people, that is held out.
    """

    user: str | None = None
    rows: int = 1
    share: float = 0.0

    def __post_init__(self) -> None:
        validate.count(rows=self.rows)
        if not 0 <= validate.non_negative(share=self.share) < 1:
            raise InvalidValue(f"the share that is held out must be below 1, got {self.share!r}")

    def sides(self, block: Mapping[str, Any], names: Sequence[str]) -> tuple[Mask, Mask, list[bytes]]:
        """Return the training mask, the held-out mask and the person of each record in a block.

        People may still have more than ``rows`` records: `People.first` finds the first ones. Without people
        nothing is held out yet: each record's cells of ``names`` are its person, and `People.drawn` decides.
        """
        if self.user is None:
            keys = _joined(block, names)
            return np.ones(len(keys), np.bool_), np.zeros(len(keys), np.bool_), keys
        people = [str(cell).strip() for cell in np.asarray(block[self.user]).tolist()]  # "a " is "a"
        known = np.array([person.lower() not in _NOBODY for person in people], dtype=np.bool_)
        keys = [person.encode("utf-8", "surrogatepass") for person in people]
        held = np.array([self.share > 0 and _place(key) < self.share for key in keys], dtype=np.bool_)
        return known & ~held, known & held, keys


def _joined(block: Mapping[str, Any], names: Sequence[str]) -> list[bytes]:
    """Return all cells of each record in these columns as one text."""
    if isinstance(block, CsvCells):
        return block.joined(names)
    return CsvCells({name: [*map(str, np.asarray(block[name]).tolist())] for name in names}, 0).joined(names)


def _place(key: bytes) -> float:
    """Return a number in [0, 1) that depends on the person only."""
    digest = blake2b(key, digest_size=8, person=b"farthing").digest()
    return int.from_bytes(digest, "big") / 2.0**64


class Spool:
    """Rows of numbers, in memory while they are few, then in an unnamed temporary file.

    The file is deleted when the process ends, and no other process can open it. All numbers have one type
    from the first row: if it depended on the number of rows, one more record would change the rounding of
    every other, and so a sum by far more than its bound. float32 is for features in [0, 1], each rounded
    within this range.
    """

    def __init__(self, width: int, dtype: type[np.generic] = np.float64, most: int = 2**26) -> None:
        self._width, self._dtype, self._most, self._bytes = width, np.dtype(dtype), most, 0
        self._blocks: list[NDArray[Any]] = [np.zeros((0, width), dtype)]
        self._file: Any = None

    def __len__(self) -> int:
        return self._bytes // (self._width * self._dtype.itemsize)

    def add(self, block: NDArray[Any]) -> None:
        """Add rows."""
        rows = np.asarray(block, dtype=self._dtype)
        self._bytes += rows.nbytes
        if self._file is None and self._bytes > self._most:
            self._begin()
        if self._file is None:
            self._blocks.append(rows)
        else:
            rows.tofile(self._file)

    def _begin(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="farthing-")  # noqa: SIM115  # open as long as the memory map
        while self._blocks:
            self._blocks.pop(0).tofile(self._file)

    def read(self, rows: int) -> Iterator[NDArray[Any]]:
        """Yield all rows in blocks of at most this size; no row may be added meanwhile."""
        if self._file is None:
            whole = self.value()
            yield from (whole[start : start + rows] for start in range(0, len(whole), rows))
            return
        self._file.flush()
        for start in range(0, len(self), rows):
            yield self._part(start, min(rows, len(self) - start))

    def _part(self, start: int, rows: int) -> NDArray[Any]:
        size = self._width * self._dtype.itemsize
        content = os.pread(self._file.fileno(), rows * size, start * size)
        return np.frombuffer(content, self._dtype).reshape(rows, self._width)

    def keep(self, kept: NDArray[np.bool_], others: "Spool | None" = None) -> None:
        """Remove all rows except those that are kept, in the same file; ``others`` takes the removed ones."""
        if self._file is None:
            whole = self.value()
            if others is not None:
                others.add(whole[~kept])
            self._blocks = [whole[kept]]
            self._bytes = self._blocks[0].nbytes
            return
        self._file.flush()
        total, end = len(self), 0
        for start in range(0, total, _AT_ONCE):
            rows, here = self._part(start, min(_AT_ONCE, total - start)), kept[start : start + _AT_ONCE]
            if others is not None:
                others.add(rows[~here])
            self._file.seek(end)
            end += self._file.write(rows[here].tobytes())
            self._file.flush()
        self._bytes = end
        self._file.truncate(end)

    def _gathered(self) -> NDArray[Any]:
        """Return all blocks as one; each is released when it is copied, so that memory is not doubled."""
        if len(self._blocks) == 1:
            return self._blocks[0]
        whole, end = np.empty((len(self), self._width), self._dtype), 0
        for place, block in enumerate(self._blocks):
            whole[end : end + len(block)] = block
            end += len(block)
            self._blocks[place] = block[:0].copy()
        return whole

    def close(self) -> None:
        """Release the file, if there is one."""
        if self._file is not None:
            self._file.close()

    def value(self) -> NDArray[Any]:
        """Return all rows: an array, or a memory map of the file."""
        if self._file is None:
            self._blocks = [self._gathered()]
            return self._blocks[0]
        with self._file as file:  # the memory map keeps it open
            file.flush()
            if not len(self):
                return np.zeros((0, self._width), self._dtype)  # an empty file cannot be mapped
            return np.memmap(file, dtype=self._dtype, mode="r", shape=(len(self), self._width))


class People:
    """The owners of records, in order, to find the first records of each person in constant memory.

    A record is stored as a digest of its identifier and its position. Few records are sorted in memory; many
    are divided by their digests into files, each of which is sorted by itself, so that all records of a
    person are in one file. People are identified by 256 bits of BLAKE2b. That no two of them share a digest
    is assumed, as for the hashes of a ledger; so the rule is that of a table with all identifiers in memory,
    and adding or removing a person changes no other person's records. (A table of counts in which two people
    may share an entry would not do: it would bound the rows of each, but one person's rows would depend on
    another's, who could change twice as many records as are paid for.)

    >>> people = People()
    >>> people.add([b"ann", b"bob", b"ann", b"ann", b"bob"])
    >>> people.first(2).tolist()
    [True, True, True, False, True]
    """

    def __init__(self, most: int = 2**25) -> None:
        self._entries = Spool(_WORDS + 1, np.uint64, most)
        self._most = most

    def add(self, keys: Sequence[bytes]) -> None:
        """Add the identifiers of the next records."""
        digests = b"".join(blake2b(key, digest_size=8 * _WORDS, person=b"people").digest() for key in keys)
        places = np.arange(len(self._entries), len(self._entries) + len(keys), dtype=np.uint64)
        words = np.frombuffer(digests, ">u8").reshape(len(keys), _WORDS)
        self._entries.add(np.column_stack([words, places]))

    def first(self, rows: int) -> NDArray[np.bool_]:
        """Return which records are among the first ``rows`` of their person; call this or `drawn`, once."""
        return self._marked(lambda _, rank: rank < rows)

    def drawn(self, share: float) -> NDArray[np.bool_]:
        """Return which records are drawn, a share of each person's by a hash of the person and the rank."""
        return self._marked(lambda word, rank: _mixed(word + rank.astype(np.uint64) * _STEP) < share)

    def _marked(self, chosen: Callable[[NDArray[np.uint64], NDArray[np.int64]], Mask]) -> Mask:
        """Return for which records a rule holds of a word of their person's digest and of their rank."""
        found = marks(len(self._entries))
        for entries in self._parted():
            ranked = _by_digest(entries)
            found[ranked[chosen(ranked[:, 1], _ranks(ranked[:, :_WORDS])), _WORDS]] = True
        return found

    def _parted(self) -> Iterator[NDArray[np.uint64]]:
        """Yield all entries in parts that share no person."""
        if len(self._entries) * 8 * (_WORDS + 1) <= self._most:
            yield self._entries.value()
            return
        with ExitStack() as stack:
            files = [stack.enter_context(tempfile.TemporaryFile(prefix="farthing-")) for _ in range(_PARTS)]
            for block in self._entries.read(_AT_ONCE):
                part = (block[:, 0] % np.uint64(_PARTS)).astype(np.intp)
                order = np.argsort(part, kind="stable")
                ends = np.cumsum(np.bincount(part, minlength=_PARTS))
                for file, rows in zip(files, np.split(block[order], ends[:-1]), strict=True):
                    rows.tofile(file)
            self._entries.close()
            for file in files:
                file.seek(0)
                yield np.frombuffer(file.read(), np.uint64).reshape(-1, _WORDS + 1)


def _by_digest(entries: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return entries, which are in order of position, by digest and then by position."""
    found = entries[np.argsort(entries[:, 0], kind="stable")]
    alike = found[1:, 0] == found[:-1, 0]
    if (alike & (found[1:, 1:_WORDS] != found[:-1, 1:_WORDS]).any(axis=1)).any():  # digests share a word
        return entries[np.lexsort(entries[:, ::-1].T)]
    return found


def _ranks(digests: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return how many rows before each of sorted ones are equal to it."""
    place = np.arange(len(digests))
    new = np.ones(len(digests), np.bool_)
    new[1:] = (digests[1:] != digests[:-1]).any(axis=1)
    return np.asarray(place - np.maximum.accumulate(np.where(new, place, 0)))


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return numbers in [0, 1) that look independent for different words (the finaliser of SplitMix64)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray((words ^ (words >> np.uint64(31))) >> np.uint64(11), np.float64) / 2.0**53


def marks(records: int) -> NDArray[np.bool_]:
    """Return an unset mark for each record: in a temporary file if there are many."""
    if records <= _MARKED:
        return np.zeros(records, np.bool_)
    with tempfile.TemporaryFile(prefix="farthing-") as file:
        file.truncate(records)
        return np.memmap(file, np.bool_, "r+", shape=(records,))


Integers = NDArray[np.int64]
Run = Callable[
    [Callable[..., Any], Sequence[Any], Sequence[Any]], list[Any]
]  # a function over parts and places


def one_by_one(function: Callable[..., Any], parts: Sequence[Any], places: Sequence[Any]) -> list[Any]:
    """Return a function's value for each part, computed in turn in this process."""
    return [function(part, place) for part, place in zip(parts, places, strict=True)]


class Partitions:
    """Private records in parts, for contributions that are sums.

    Parameters
    ----------
    parts : sequence
        The records of each part: a `Table`, `Rows`, or anything that ``run`` passes to a function as such.
    run : callable, optional
        Calls a function with each part and a position; by default in turn in this process.
    """

    def __init__(self, parts: Sequence[Any], run: Run = one_by_one) -> None:
        self._parts, self._run = list(parts), run
        if not self._parts:
            raise InvalidValue("partitions must be one part or more, got none")
        whole = [None] * len(self._parts)
        lengths = run(_length, self._parts, whole)
        self._ends = np.cumsum([0, *lengths])
        checked(int(self._ends[-1]))
        self._places: list[Integers | None] = list(whole)
        self._empty = run(_nobody, self._parts[:1], [None])[0]

    @classmethod
    def on(cls, client: Any, futures: Sequence[Any]) -> "Partitions":
        """Return the partitions held by Dask futures, such as ``client.map(load, files)``, summed by workers.

        Parameters
        ----------
        client : dask.distributed.Client
            The cluster.
        futures : sequence of dask.distributed.Future
            Each holds records: a `Table` or `Rows`.

        Returns
        -------
        Partitions
        """

        def run(function: Callable[..., Any], parts: Sequence[Any], places: Sequence[Any]) -> list[Any]:
            found: list[Any] = client.gather(client.map(function, parts, places, pure=False))
            return found

        return cls(futures, run)

    def __len__(self) -> int:
        return int(self._ends[-1]) if all(place is None for place in self._places) else self._taken()

    def _taken(self) -> int:
        return sum(len(place) for place in self._places if place is not None)

    def take(self, indices: Indices) -> Any:
        """Return the records at ``indices``; a full slice, in the order of the parts, makes no copy."""
        if isinstance(indices, slice) and indices == slice(None):
            return self
        places = np.arange(len(self))[indices]
        if not len(places):
            return self._empty
        taken = object.__new__(Partitions)
        taken._parts, taken._run, taken._ends, taken._empty = self._parts, self._run, self._ends, self._empty
        part = np.searchsorted(self._ends, places, side="right") - 1
        taken._places = [places[part == one] - self._ends[one] for one in range(len(self._parts))]
        return taken

    def summed(self, contribution: Any, w: Any, bound: Any) -> Any:
        """Return the sum of bounded contributions over all parts, added exactly and rounded once."""
        sums = self._run(partial(_summed, contribution, w, bound), self._parts, self._places)
        zero = np.asarray(contribution.bounded_sum(self._empty, w, bound))
        found = np.stack([np.asarray(one, dtype=np.float64) - zero for one in sums])
        exact = [math.fsum(column) for column in found.reshape(len(found), -1).T.tolist()]
        return zero + np.array(exact).reshape(zero.shape)


def _length(part: Any, place: Any) -> int:
    return len(part)


def _nobody(part: Any, place: Any) -> Any:
    return part.take(np.empty(0, np.int64))


def _summed(contribution: Any, w: Any, bound: Any, part: Any, place: Integers | None) -> Any:
    """Return the sum of one part."""
    return contribution.bounded_sum(part if place is None else part.take(place), w, bound)
