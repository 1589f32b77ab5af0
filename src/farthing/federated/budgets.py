"""Check the budgets, public numbers of records and clipping norms of clients; errors name the client.

>>> personal([0.5, 1.0, 0.5], 1e-8)[1].epsilon
1.0
"""

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from farthing import validate
from farthing.budget import Adjacency, Budget, Unit
from farthing.errors import InvalidValue

Array = NDArray[np.float64]
Integers = NDArray[np.int64]


class Budgets(Sequence[Budget]):
    """A sequence of one budget per client, with few distinct ones."""

    def __init__(self, distinct: list[Budget], which: Integers) -> None:
        self.distinct, self.which = distinct, which

    @classmethod
    def of(cls, budgets: Budget | Sequence[Budget], clients: int) -> "Budgets":
        if isinstance(budgets, Budget):
            return cls([budgets], np.zeros(clients, np.int64))
        if not hasattr(budgets, "__len__"):
            raise InvalidValue(f"budgets must be ft.Budget(epsilon, delta), or one a client, got {budgets!r}")
        if len(budgets) != clients:
            raise InvalidValue(f"there must be one budget per client, got {len(budgets)} for {clients}")
        known: dict[Budget, int] = {}
        which = np.empty(clients, np.int64)
        for client, budget in enumerate(budgets):
            if not isinstance(budget, Budget):
                raise InvalidValue(f"client {client} must have a Budget, got {budget!r}")
            which[client] = known.setdefault(budget, len(known))
        return cls(list(known), which)

    def __len__(self) -> int:
        return len(self.which)

    @overload
    def __getitem__(self, client: int) -> Budget: ...
    @overload
    def __getitem__(self, client: slice) -> Sequence[Budget]: ...
    def __getitem__(self, client: int | slice) -> Budget | Sequence[Budget]:
        if isinstance(client, slice):
            return Budgets(self.distinct, self.which[client])
        return self.distinct[int(self.which[client])]

    def __iter__(self) -> Iterator[Budget]:
        return (self.distinct[place] for place in self.which)


def personal(
    epsilon: ArrayLike,
    delta: ArrayLike,
    adjacency: Adjacency = Adjacency.ADD_REMOVE,
    unit: Unit = Unit.RECORD,
) -> list[Budget]:
    """Return a budget for each client, from arrays of ε and δ; one of the two may be a single number.

    Parameters
    ----------
    epsilon : array_like
        ε of each client, or one for all.
    delta : array_like
        δ of each client, or one for all.
    adjacency : Adjacency, default "add-remove"
        The adjacency of every budget.
    unit : Unit, default "record"
        The unit of every budget.

    Returns
    -------
    list of Budget
        Clients with equal budgets share one object.

    Raises
    ------
    InvalidValue
        Names the first client with an invalid value.

    Examples
    --------
    >>> import farthing as ft
    >>> [budget.epsilon for budget in ft.federated.personal([0.5, 1.0], 1e-8)]
    [0.5, 1.0]
    """
    clients = max(np.size(epsilon), np.size(delta))
    epsilons, deltas = per_client("epsilon", epsilon, clients), per_client("delta", delta, clients)
    bad = np.flatnonzero(deltas >= 1)
    if len(bad):
        raise InvalidValue(f"delta of client {bad[0]} must be below 1, got {float(deltas[bad[0]])!r}")
    known: dict[tuple[float, float], Budget] = {}
    pairs = zip(epsilons.tolist(), deltas.tolist(), strict=True)
    return [known.get(pair) or known.setdefault(pair, Budget(*pair, adjacency, unit)) for pair in pairs]


def per_client(name: str, values: ArrayLike, clients: int) -> Array:
    """Return one positive number per client; the error names the first invalid one."""
    array = np.asarray(values, dtype=np.float64)
    if array.shape not in ((), (clients,)):
        raise InvalidValue(f"{name} must be one number or one per client ({clients}), got {array.shape}")
    array = np.broadcast_to(array, clients)
    bad = np.flatnonzero(~(np.isfinite(array) & (array > 0)))
    if len(bad):
        raise InvalidValue(
            f"{name} of client {bad[0]} must be a finite number > 0, got {float(array[bad[0]])!r}"
        )
    return array


def public_sizes(sizes: ArrayLike | None, counts: Integers) -> Integers:
    """Return the public numbers of records: by default the true ones, with the most common one for 0."""
    if sizes is None:
        usual = np.bincount(counts[counts > 0]).argmax() if counts.any() else 1
        return np.where(counts > 0, counts, usual)
    public = np.broadcast_to(np.asarray(sizes), len(counts))
    if public.dtype.kind not in "iu":
        raise InvalidValue(f"sizes must be whole numbers, got {public.dtype}")
    bad = np.flatnonzero(public < 1)
    if len(bad):
        raise InvalidValue(
            f"the public number of records of client {bad[0]} must be >= 1, got {public[bad[0]]}"
        )
    return public.astype(np.int64)


def dealt(n: int, clients: int | None, records: ArrayLike | None) -> Integers:
    """Return the first and last row of each client."""
    if records is not None and np.ndim(records):
        counts = np.asarray(records)
        if counts.dtype.kind not in "iu" or (counts < 0).any() or counts.sum() != n:
            raise InvalidValue(f"records must be whole numbers that sum to the number of rows, {n}")
        if clients not in (None, len(counts)):
            raise InvalidValue(f"records are given for {len(counts)} clients, not for {clients}")
        return np.concatenate([[0], np.cumsum(counts)])
    if records is not None:
        each = validate.count(records=records)
        needed = max(1, -(-n // each))
        if clients not in (None, needed):
            raise InvalidValue(f"{n} rows, {each} each, make {needed} clients, not {clients}")
        return np.minimum(np.arange(needed + 1) * each, n)
    return np.arange(validate.count(clients=clients) + 1) * n // (clients or 1)
