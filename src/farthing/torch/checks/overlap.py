"""Remember the records that this process trained on, to warn about scores computed on them.

A loss or an accuracy on training records is a release that is not paid for. `evaluate` asks this module
whether data that it was given as public are training records. A dataset (or a part of one) is recognised by
its identity and indices; tensors are recognised by some of their rows, also in a copy, a slice or another
order. Only 64-bit hashes of rows are kept, under a secret key of this process.

>>> x, y = torch.randn(100, 3), torch.arange(100)
>>> remember((x, y))
>>> shared((x[20:30].clone(), y[20:30])), shared((torch.randn(100, 3), y))
(True, False)
"""

import os
import weakref
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

Integers = NDArray[np.int64]

_ROWS, _LEAST, _BYTES = 4096, 16, 2**25  # of a table that are looked at, evenly spread
_RUNS = 64  # runs that are remembered
_HALF = 0.5  # of the hits that training records would give: tables share some rows by chance
_KEY = int.from_bytes(os.urandom(8), "little") | 1


class _Table(NamedTuple):
    """Hashes of some rows, and which part of all rows they are."""

    hashes: Integers
    part: float


class _Part(NamedTuple):
    """A dataset, and which of its records; None for all."""

    root: Any
    places: Integers | None


_known: deque[_Table | _Part] = deque(maxlen=_RUNS)


def remember(data: Any) -> None:
    """Remember that a run is trained on these records."""
    _known.append(_seen(data))


def shared(data: Any) -> bool:
    """Return whether some of these records are among those of a run."""
    given = _seen(data)
    return any(_meet(known, given) for known in tuple(_known))


def _seen(data: Any) -> _Table | _Part:
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, list | tuple) and data and all(isinstance(x, Tensor | np.ndarray) for x in data):
        return _table([torch.as_tensor(column).detach() for column in data])
    places: Integers | None = None
    while isinstance(data, Subset):
        own = np.asarray(data.indices, dtype=np.int64)
        places, data = own if places is None else own[places], data.dataset
    try:
        return _Part(weakref.ref(data), places)
    except TypeError:  # a plain list has no weak references
        return _Part(None, places)


def _table(columns: list[Tensor]) -> _Table:
    rows = min(len(column) for column in columns)
    each = sum(column[0].numel() * column.element_size() for column in columns)
    most = min(rows, _ROWS, max(_LEAST, _BYTES // max(1, each)))
    places = np.unique(np.linspace(0, rows - 1, most).astype(np.int64))
    total = np.zeros(len(places), dtype=np.uint64)
    for n, column in enumerate(columns):
        chosen = column.index_select(0, torch.from_numpy(places).to(column.device)).cpu().contiguous()
        words = (
            np.frombuffer(chosen.view(torch.uint8).numpy().tobytes(), dtype=np.uint8) if chosen.numel() else 0
        )
        total += _hashes(np.reshape(words, (len(places), -1)), n)
    return _Table(total.view(np.int64), len(places) / rows)


def _hashes(rows: NDArray[np.uint8], salt: int) -> NDArray[np.uint64]:
    """Return Σ of each row's bytes times secret odd numbers, modulo 2⁶⁴."""
    weights = np.arange(1, rows.shape[1] + 1, dtype=np.uint64) * np.uint64(_KEY)
    weights = (weights ^ (weights >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9) + np.uint64(2 * salt)
    found = np.zeros(len(rows), dtype=np.uint64)
    for start in range(0, rows.shape[1], 1024):
        part = rows[:, start : start + 1024].astype(np.uint64)
        found += (part * (weights[start : start + 1024] | np.uint64(1))).sum(1, dtype=np.uint64)
    return found


def _meet(known: _Table | _Part, given: _Table | _Part) -> bool:
    if isinstance(known, _Table) and isinstance(given, _Table):
        hits = int(np.isin(given.hashes, known.hashes).sum())
        return hits >= max(1.0, _HALF * known.part * len(given.hashes))
    if isinstance(known, _Part) and isinstance(given, _Part):
        root = known.root() if known.root is not None else None
        if root is None or given.root is None or root is not given.root():
            return False
        if known.places is None or given.places is None:
            return True
        return bool(np.isin(given.places, known.places).any())
    return False
