"""Choose records by public rules: so many rows a person, and a share that is held out.

A rule may look at one person's own records and at nothing else, so that a person who comes or goes changes no
other record's place: the first ``rows`` rows of each person are kept, and a record (or, where people have
several, a person) is held out if the hash of its cells says so. A rule by position would move every later
record when one goes, and no guarantee of what is learnt from the parts would hold. Rows without an identifier
are left out: if they counted as one person, one of them would decide which of the others is kept. Spaces
around an identifier do not count.

>>> split = Split(share=0.5)
>>> split.masks({"age": np.array(["17", "90", "35"])}, ["age"])
(array([False,  True,  True]), array([ True, False, False]))

Records in parts, each summed where it lies: in processes of a Dask cluster, or one after the other.

A query's sum over all records is the sum over parts, so only sums travel: each part adds up its own
records' bounded terms, one process adds up the parts, and the ledger there charges, adds noise and
releases, as for one table. There is one ledger; workers have neither budget nor noise. Sums before the
noise are as private as the records: the network between workers and ledger is inside the trusted side.

Rounding. Neighbours differ in one record, so in the sum of one part, whose rounding is that of a table of
its own (`farthing.noise.summing`); the other parts' sums are the same bits. Sums of parts are added exactly
(`math.fsum`) and rounded once, by at most 2⁻²³ of a bound for 2³⁰ records: within the slack of the
mechanisms. So the result does not depend on the order of the parts, and where terms are exact
(`farthing.statistics`) not on how records are parted: with the same noise the release is the same to the
last bit as in one process.

>>> from farthing.queries.query import Rows
>>> parts = Partitions([Rows(np.ones((3, 2))), Rows(np.ones((5, 2)))])
>>> len(parts), len(parts.take(np.array([0, 4, 7])))
(8, 3)
"""

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.errors import InvalidValue
from farthing.noise.summing import checked
from farthing.queries.samplers import Indices

Mask = NDArray[np.bool_]

_NOBODY = frozenset({"", "nan", "nat", "none", "null"})  # identifiers that are missing, in small letters


@dataclass(slots=True)
class Split:
    """The records that are learnt from, and those that are held out. It counts rows: use one a reading.

    Parameters
    ----------
    user : str, optional
        The column that says whose record it is. Rows where it is blank, null or NaN are left out.
    rows : int, default 1
        How many rows of a person are kept, the first ones; with ``user`` only.
    share : float, default 0.0
        Which share of the records, or of the people, is held out.
    """

    user: str | None = None
    rows: int = 1
    share: float = 0.0
    _seen: dict[str, int] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        validate.count(rows=self.rows)
        if not 0 <= validate.non_negative(share=self.share) < 1:
            raise InvalidValue(f"the share that is held out must be below 1, got {self.share!r}")

    def masks(self, block: Mapping[str, Any], names: Sequence[str]) -> tuple[Mask, Mask]:
        """Return which records of a block are learnt from, and which are held out."""
        texts = [[str(cell) for cell in np.asarray(block[name]).tolist()] for name in self._hashed(names)]
        keys = ["\x1f".join(cells) for cells in zip(*texts, strict=True)]
        keys = keys if self.user is None else [key.strip() for key in keys]  # "a" and "a " are one person
        kept = np.array([self._kept(key) for key in keys], dtype=np.bool_)
        held = np.array([_place(key) < self.share for key in keys], dtype=np.bool_)
        return kept & ~held, kept & held

    def _hashed(self, names: Sequence[str]) -> Sequence[str]:
        return names if self.user is None else [self.user]

    def _kept(self, person: str) -> bool:
        if self.user is None:
            return True
        if person.lower() in _NOBODY:
            return False
        self._seen[person] = self._seen.get(person, 0) + 1
        return self._seen[person] <= self.rows


def _place(key: str) -> float:
    """Return a number in [0, 1) that only the record decides."""
    digest = blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8, person=b"farthing").digest()
    return int.from_bytes(digest, "big") / 2.0**64


class Spool:
    """Blocks of features: in memory while they are few, then in a temporary file that nobody else can open.

    The file has no name, so it is gone when the process ends. All numbers have one type from the first row:
    if it followed from how many there are, one record more would move every other by a rounding, and so a sum
    by far more than its bound. float32 is for features in [0, 1], each rounded by itself within those.
    """

    def __init__(self, width: int, dtype: type[np.floating[Any]] = np.float64, most: int = 2**29) -> None:
        self._width, self._dtype, self._most, self._bytes = width, np.dtype(dtype), most, 0
        self._blocks: list[NDArray[Any]] = [np.zeros((0, width), dtype)]
        self._file: Any = None

    def add(self, block: NDArray[np.float64]) -> None:
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

    def value(self) -> NDArray[Any]:
        """Return all rows: an array, or a memory map of the file."""
        if self._file is None:
            return np.concatenate(self._blocks)
        with self._file as file:  # the memory map keeps it open
            file.flush()
            shape = (self._bytes // (self._width * self._dtype.itemsize), self._width)
            return np.memmap(file, dtype=self._dtype, mode="r", shape=shape)


Integers = NDArray[np.int64]
Run = Callable[
    [Callable[..., Any], Sequence[Any], Sequence[Any]], list[Any]
]  # a function over parts and places


def one_by_one(function: Callable[..., Any], parts: Sequence[Any], places: Sequence[Any]) -> list[Any]:
    """Return what a function makes of each part, one after the other in this process."""
    return [function(part, place) for part, place in zip(parts, places, strict=True)]


class Partitions:
    """Private records in parts, for contributions that are sums.

    Parameters
    ----------
    parts : sequence
        Records each: a `Table`, `Rows`, or whatever ``run`` hands to a function as such.
    run : callable, optional
        Calls a function with each part and a place; here, one after the other, by default.
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
        """Return the parts that Dask futures hold, as of ``client.map(load, files)``, summed by workers.

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
        """Return the records at ``indices``; all of them, in the order of the parts, cost nothing."""
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
        """Return Σ bounded contributions over all parts, added exactly and rounded once."""
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
    """Return the sum of one part, where it lies."""
    return contribution.bounded_sum(part if place is None else part.take(place), w, bound)
