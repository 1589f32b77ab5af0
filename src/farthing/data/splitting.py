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
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing import validate
from farthing.errors import InvalidValue

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
