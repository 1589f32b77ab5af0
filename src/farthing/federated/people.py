"""Who is in a crowd: budgets, public numbers of records, clips; bad ones are named with their user.

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
    """One budget a user, of which few are distinct."""

    def __init__(self, distinct: list[Budget], which: Integers) -> None:
        self.distinct, self.which = distinct, which

    @classmethod
    def of(cls, budgets: Budget | Sequence[Budget], users: int) -> "Budgets":
        if isinstance(budgets, Budget):
            return cls([budgets], np.zeros(users, np.int64))
        if len(budgets) != users:
            raise InvalidValue(f"there must be one budget a user, got {len(budgets)} for {users} users")
        known: dict[Budget, int] = {}
        which = np.empty(users, np.int64)
        for user, budget in enumerate(budgets):
            if not isinstance(budget, Budget):
                raise InvalidValue(f"user {user} must have a Budget, got {budget!r}")
            which[user] = known.setdefault(budget, len(known))
        return cls(list(known), which)

    def __len__(self) -> int:
        return len(self.which)

    @overload
    def __getitem__(self, user: int) -> Budget: ...
    @overload
    def __getitem__(self, user: slice) -> Sequence[Budget]: ...
    def __getitem__(self, user: int | slice) -> Budget | Sequence[Budget]:
        if isinstance(user, slice):
            return Budgets(self.distinct, self.which[user])
        return self.distinct[int(self.which[user])]

    def __iter__(self) -> Iterator[Budget]:
        return (self.distinct[place] for place in self.which)


def personal(
    epsilon: ArrayLike,
    delta: ArrayLike,
    adjacency: Adjacency = Adjacency.ADD_REMOVE,
    unit: Unit = Unit.RECORD,
) -> list[Budget]:
    """A budget a user, from arrays of ε and δ; one of the two may be a single number."""
    users = max(np.size(epsilon), np.size(delta))
    epsilons, deltas = per_user("epsilon", epsilon, users), per_user("delta", delta, users)
    bad = np.flatnonzero(deltas >= 1)
    if len(bad):
        raise InvalidValue(f"delta of user {bad[0]} must be below 1, got {float(deltas[bad[0]])!r}")
    known: dict[tuple[float, float], Budget] = {}
    pairs = zip(epsilons.tolist(), deltas.tolist(), strict=True)
    return [known.get(pair) or known.setdefault(pair, Budget(*pair, adjacency, unit)) for pair in pairs]


def per_user(name: str, values: ArrayLike, users: int) -> Array:
    """One positive number a user; the message names the first for whom it is not."""
    array = np.asarray(values, dtype=np.float64)
    if array.shape not in ((), (users,)):
        raise InvalidValue(f"{name} must be one number or one a user ({users}), got shape {array.shape}")
    array = np.broadcast_to(array, users)
    bad = np.flatnonzero(~(np.isfinite(array) & (array > 0)))
    if len(bad):
        raise InvalidValue(
            f"{name} of user {bad[0]} must be a finite number > 0, got {float(array[bad[0]])!r}"
        )
    return array


def public_sizes(sizes: ArrayLike | None, counts: Integers) -> Integers:
    """Public numbers of records; without any, those that are there, and the most common one for none."""
    if sizes is None:
        usual = np.bincount(counts[counts > 0]).argmax() if counts.any() else 1
        return np.where(counts > 0, counts, usual)
    public = np.broadcast_to(np.asarray(sizes), len(counts))
    if public.dtype.kind not in "iu":
        raise InvalidValue(f"sizes must be whole numbers, got {public.dtype}")
    bad = np.flatnonzero(public < 1)
    if len(bad):
        raise InvalidValue(
            f"the public number of records of user {bad[0]} must be >= 1, got {public[bad[0]]}"
        )
    return public.astype(np.int64)


def dealt(n: int, users: int | None, records: ArrayLike | None) -> Integers:
    """Where each user's rows begin and end."""
    if records is not None and np.ndim(records):
        counts = np.asarray(records)
        if counts.dtype.kind not in "iu" or (counts < 0).any() or counts.sum() != n:
            raise InvalidValue(f"records must be whole numbers that sum to the number of rows, {n}")
        if users not in (None, len(counts)):
            raise InvalidValue(f"records are given for {len(counts)} users, not for {users}")
        return np.concatenate([[0], np.cumsum(counts)])
    if records is not None:
        each = validate.count(records=records)
        needed = max(1, -(-n // each))
        if users not in (None, needed):
            raise InvalidValue(f"{n} rows, {each} each, make {needed} users, not {users}")
        return np.minimum(np.arange(needed + 1) * each, n)
    return np.arange(validate.count(users=users) + 1) * n // (users or 1)
