"""Records in parts, each summed where it lies: in processes of a Dask cluster, or one after the other.

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
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.errors import InvalidValue
from farthing.noise.summing import checked
from farthing.queries.samplers import Indices

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
