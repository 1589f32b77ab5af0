"""Hold some records of a CSV file: their cells as text, as numbers, or joined, each when it is asked for.

`CsvCells` holds lists that Python's module csv made. `RawCsvCells` holds the bytes of whole lines, and the
ends of cells, which a C kernel finds. The kernel reads plain lines only; the caller passes other lines to the
module csv. Both give the same answers, whatever other records contain.

>>> lines = CsvCells({"age": ["35", "$1,000", ""]}, records=3)
>>> lines["age"].tolist(), lines.numbers("age", commas=False).tolist()
(['35', '$1,000', ''], [35.0, 1000.0, nan])
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.data import notation
from farthing.noise import native

Array = NDArray[np.float64]

_JOINT = "\x1f"  # between cells that are joined


class CsvCells(Mapping[str, NDArray[Any]]):
    """Records of a CSV file: for each wanted column its cells as an array of texts.

    Parameters
    ----------
    columns : mapping
        The cells of each column.
    records : int
        How many records there are.
    """

    def __init__(self, columns: Mapping[str, Sequence[str]], records: int) -> None:
        self._columns, self.records = columns, records

    def __getitem__(self, name: str) -> NDArray[Any]:
        # objects, because an array of text gives every cell the size of the longest
        return np.array(self._columns[name], dtype=object)

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def numbers(self, name: str, *, commas: bool, declared: bool = False) -> Array:
        """Return the numbers of a column, NaN for a cell without one (`farthing.data.notation`).

        ``commas`` says that a comma may stand before a fraction, ``declared`` that it must.
        """
        cells = self[name].tolist()
        if commas:
            return np.array([notation.number(notation.point(cell, declared)) for cell in cells], np.float64)
        try:
            return np.array(cells, dtype=object).astype(np.float64)
        except ValueError:
            return np.array([notation.number(cell) for cell in cells], np.float64)

    def joined(self, names: Sequence[str]) -> list[bytes]:
        """Return all cells of each record in these columns, as one text."""
        texts = zip(*(self[name].tolist() for name in names), strict=True)
        return [_JOINT.join(cells).encode("utf-8", "surrogatepass") for cells in texts]


class RawCsvCells(CsvCells):
    """Records of a CSV file as bytes of UTF-8 text, with the ends of wanted cells.

    Parameters
    ----------
    names : sequence of str
        The wanted columns.
    text : bytes
        Whole lines.
    ends : array of shape (records, columns, 2)
        Where each cell begins and ends.
    """

    def __init__(self, names: Sequence[str], text: bytes, ends: NDArray[np.int32]) -> None:
        super().__init__({}, len(ends))
        self._place = {name: place for place, name in enumerate(names)}
        self._text, self._ends = text, ends

    def __getitem__(self, name: str) -> NDArray[Any]:
        found = np.empty(len(self._ends), dtype=object)
        begins, ends = self._ends[:, self._place[name]].T.copy().tolist()
        text, places = self._text, zip(begins, ends, strict=True)
        if text.isascii():
            plain = text.decode("ascii")
            found[:] = [plain[begin:end] for begin, end in places]
        else:
            found[:] = [text[begin:end].decode() for begin, end in places]
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._place)

    def __len__(self) -> int:
        return len(self._place)

    def numbers(self, name: str, *, commas: bool, declared: bool = False) -> Array:
        """Return the numbers of a column, NaN for a cell without one (`farthing.data.notation`)."""
        kernels = native.kernels()
        if kernels is None:
            return super().numbers(name, commas=commas, declared=declared)
        records, wanted = self._ends.shape[:2]
        found, odd = np.empty(records), np.empty(records, np.uint8)
        own = self._ends[:, self._place[name]]
        comma = int(commas) + int(commas and declared)
        strange = kernels["cell_numbers"](
            *(self._text, own.ctypes.data, records, 2 * wanted, comma),
            *(native.pointer(found), native.pointer(odd)),
        )
        for place in np.flatnonzero(odd) if strange else ():
            begin, end = own[place]
            cell = self._text[begin:end].decode()
            found[place] = notation.number(notation.point(cell, declared) if commas else cell)
        return found

    def joined(self, names: Sequence[str]) -> list[bytes]:
        """Return all cells of each record in these columns, as one text."""
        kernels = native.kernels()
        if kernels is None:
            return super().joined(names)
        records, wanted = self._ends.shape[:2]
        order = np.array([self._place[name] for name in names], np.int32)
        out, stops = np.empty(len(self._text) + records * len(order), np.uint8), np.empty(records, np.int64)
        kernels["joined_cells"](
            *(self._text, native.pointer(self._ends), records, wanted, native.pointer(order), len(order)),
            *(native.pointer(out), native.pointer(stops)),
        )
        text, ends = out.tobytes(), [0, *stops.tolist()]
        return [text[begin:end] for begin, end in pairwise(ends)]


def split(text: bytes, mark: str, places: Mapping[str, int], columns: int) -> RawCsvCells | None:
    """Return the cells of whole lines, of so many columns; None where no kernel reads them.

    ``places`` says which columns are wanted. The text must end with a line feed.
    """
    kernels = native.kernels(len(text))
    if (
        kernels is None
        or len(mark.encode()) > 1
        or len(text) >= 2**31
        or len({*places.values()}) < len(places)
    ):
        return None
    slots = np.full(columns, -1, np.int32)
    slots[[*places.values()]] = np.arange(len(places))
    most = text.count(b"\n")
    ends = np.empty((most, len(places), 2), np.int32)
    rows = kernels["cells"](
        *(text, len(text), ord(mark), columns, native.pointer(slots), len(places), most),
        native.pointer(ends),
    )
    return None if rows < 0 else RawCsvCells([*places], text, ends[:rows])
