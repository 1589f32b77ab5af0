"""Whether all ranks hold the same records: found before the first batch, by keyed digests.

Rank 0 says which records are in a batch by their numbers, so a number must mean the same record everywhere.
Where every rank was given a shard of its own, a person would be in the data as often as there are ranks that
have her under some number, and the sampling rate would not be hers. What travels are digests under a random
key of rank 0, between processes of one owner.
"""

import hashlib
import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farthing.errors import InvalidValue
from farthing.torch.training.randomness import apart
from farthing.torch.training.records import Examples

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
    """Raises, alike on every rank, where the ranks' digests differ.

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
