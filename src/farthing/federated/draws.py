"""Draws from the records of many users at once: rows, sorted by user, and whose they are."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from farthing.noise.lattice import Stream

Integers = NDArray[np.int64]


class Users(NamedTuple):
    """Public numbers of records, how many are there, and where their rows start; one entry a user."""

    sizes: Integers
    counts: Integers
    starts: Integers


def ranges(starts: Integers, counts: Integers) -> Integers:
    """starts[0], ..., starts[0] + counts[0] - 1, starts[1], ..."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(counts.sum())


def present(users: Users, places: Integers) -> tuple[Integers, Integers]:
    """One place a user; blank ones, beyond the records that are there, fall out."""
    who = np.flatnonzero(places < users.counts)
    return users.starts[who] + places[who], who


def exactly(size: int, users: Users, stream: Stream) -> tuple[Integers, Integers]:
    """``size`` of each user's records (all where it has fewer), without replacement, uniformly."""
    of = np.maximum(users.sizes, users.counts)
    if size == 1:
        return present(users, below(of, stream))
    rows, who = [], []
    for many in np.unique(of):
        those = np.flatnonzero(of == many)
        chosen = subsets(min(size, int(many)), int(many), len(those), stream)
        mine, places = np.nonzero(chosen)
        there = places < users.counts[those[mine]]
        who.append(those[mine[there]])
        rows.append(users.starts[who[-1]] + places[there])
    order = np.argsort(np.concatenate(who), kind="stable")
    return np.concatenate(rows)[order], np.concatenate(who)[order]


def subsets(size: int, of: int, users: int, stream: Stream) -> NDArray[np.bool_]:
    """A uniform subset of 0 .. of - 1 for each user, as a mask: where the smallest of random keys are."""
    chosen = np.ones((users, of), np.bool_)
    if size == of:
        return chosen
    open_ = np.arange(users)
    while len(open_):  # again where a tie leaves the subset open
        keys = stream.integers(len(open_) * of).reshape(-1, of)
        ordered = np.partition(keys, (size - 1, size), axis=1)
        chosen[open_] = keys <= ordered[:, size - 1, None]
        open_ = open_[ordered[:, size - 1] == ordered[:, size]]
    return chosen


def below(bounds: Integers, stream: Stream) -> Integers:
    """Uniform on 0 .. bound - 1 for each bound, exactly: words past the last multiple are drawn again."""
    limit = bounds.astype(np.uint64)
    beyond = (np.uint64(0) - limit) % limit  # 2^64 mod bound
    words = stream.integers(len(limit))
    while len(again := np.flatnonzero(words > np.uint64(2**64 - 1) - beyond)):
        words[again] = stream.integers(len(again))
    return (words % limit).astype(np.int64)
