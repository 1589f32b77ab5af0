"""Sum clipped gradients in float32 in secret blocks, so that rounding does not grow with the batch.

**Theorem (blocks).** Let every example be put into one of B blocks, independently of all else and in
secret; let sums of blocks be computed apart and added in float64. A block of L examples is summed in pieces
of K rows, and the rows of its examples have Σ_t |u_t| |v_t| <= κ |t_i|; a block with an example beyond κ is
summed in float64. Let B follow from the public expected batch size N, K from that and the block alone, and
(K + 3) L <= c (3 · 2¹⁴ - (1 + p) m), where c is √3 if an example is one row (κ = 1), and else 1/κ, and sums
of up to p parts are added in float32 before they are added in float64. Then for
n <= m = 5/4 N + 64 examples (Poisson batches are larger with probability e⁻²⁷ at N = 200, and need n 2⁻²²
more slack then), and as long as nobody's term depends on who is beside it, the noisy sum has the price of its
mechanism at the same slack. Proof: given the blocks of the others, neighbours have the same sums of all
blocks but one, bit by bit. That one is computed twice, with the example and without (or with another), each
time within (K + 3) L u C / c of its exact sum, by the lemma or, for several rows, by the theorem of
`farthing.torch.kernels.totals`. Parts and the result round to float32, n u C each, and so does every addition
of a part to those before it, of which there are p - 1 at most for any term. So the sums are apart by
the example's term and 3/4 of `SLACK`. Blocks do not depend on the records, and divergences are jointly
convex, so that the mixture over blocks costs no more. ∎ What counts is the length of one block, about 240, in
place of n.

**Lemma.** Let K terms have Euclidean norms of at most C (all clip rules bound Euclidean norms, in units of
their scale), and let every coordinate be added by a binary tree of its own, products rounded or fused. Then
the sum is within K (K + 3) u C / √3 of the exact one. Proof: let d_j(i) <= K be how many roundings term i
goes through in coordinate j: its depth in the tree, and one for its product. That coordinate is off by at
most u' Σ_i d_j(i) |t_ij|, u' = u / (1 - Ku). For a unit vector w the Cauchy-Schwarz inequality gives
Σ_j w_j Σ_i d_j(i) |t_ij| <= C Σ_i (Σ_j w_j² d_j(i)²)^½ <= C √K (Σ_j w_j² Σ_i d_j(i)²)^½. Of all trees with K
leaves a chain has the largest Σ_i d(i)², which is 2² + ... + K² + K² <= K (K + 9/4)² / 3: that of a chain,
wherever it begins, is convex in its number of leaves, so that by induction a root does best to part with one
leaf. At last, (K + 9/4) u' <= (K + 3) u for K < 2¹¹. ∎ Depths of K for all terms, as the theorem of `totals`
allows for, would give K² u C.

>>> with blocked((180, 170), expected=350, count=2):
...     product(torch.ones(350, 1), torch.ones(350, 1), 350)
tensor([[350.]])
"""

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farthing.noise import native
from farthing.noise.streams import Stream

ROUNDINGS = 3 * 2**14  # h n: two neighbours, 2⁻²⁴ a rounding, three quarters of the slack
ONTO = 8  # parts that are added where the sum lies
_FULL = 0.92  # of the longest block in one piece, for those that are drawn to be longer
_IN_A_PIECE = 3  # of K + 3
_TOGETHER = 2  # sums of blocks that are added at once: more are beyond a core's cache
_FEWEST = (
    8  # examples of a block that must be shorter than the theorem asks: by chance few have twice as many
)
_SHORTEST = 48  # rows of a product in float32 that is quicker than one in float64
_NARROW, _SMALL = 16, 2**24  # outputs, and products and sums that one core makes in a millisecond


class _Part(threading.local):
    """The blocks that this thread sums at present, and memory that stays."""

    def __init__(self) -> None:
        self.blocks: tuple[int, ...] = ()  # the sizes of those that the part is made of
        self.spare = 0.0  # (K + 3) L / c, above 0 where there are blocks
        self.usual = 0.0  # examples of a block, to expect
        self.pieces: dict[int, list[tuple[int, bool]]] = {}  # of these blocks, by the rows of an example
        self.room = torch.empty(0, dtype=torch.float64)
        self.rooms: dict[tuple[int, int], tuple[Tensor, list[Tensor]]] = {}


_part = _Part()
_words = Stream()


def active() -> bool:
    """Return whether this thread sums blocks."""
    return _part.spare > 0


@contextmanager
def blocked(sizes: tuple[int, ...], expected: float, count: int, onto: int = 1) -> Iterator[None]:
    """Say that the examples of a part are whole blocks of these sizes, of ``count`` in a batch.

    ``onto``: how many parts are added in float32.
    """
    before = _part.blocks, _part.spare, _part.usual, _part.pieces
    _part.blocks, _part.spare, _part.pieces = sizes, _spare(expected, onto), {}
    _part.usual = expected / count if count > 1 else math.inf
    try:
        yield
    finally:
        _part.blocks, _part.spare, _part.usual, _part.pieces = before


def _spare(expected: float, onto: int) -> float:
    """Return (K + 3) L / c: what the roundings of parts and of the result leave of all."""
    return ROUNDINGS - (1.0 + onto) * (1.25 * expected + 64)


def adds_up(expected: float) -> bool:
    """Return whether parts of a batch may be added where their sum lies: for half of all roundings."""
    return _spare(expected, ONTO) >= ROUNDINGS / 2


def block_count(expected: float, positions: int = 1, most: int | None = None, onto: int = 1) -> int:
    """Return how many blocks a batch is put into, for products over so many positions.

    A block is to have at most ``most`` examples, but by chance. 0: there is no theorem, or blocks would be
    short: slow, or often much longer than is asked.

    >>> block_count(100), block_count(4096), block_count(512, positions=16), block_count(2**20)
    (1, 18, 29, 0)
    >>> block_count(4096, most=100), block_count(4096, most=30)
    (62, 0)
    """
    left = _most(_spare(expected, onto), positions) / positions
    if left <= 0:
        return 0
    longest = math.inf if most is None else most / 1.5
    size = max(1.0, min(_FULL * math.sqrt(left), longest))
    if size == longest < min(_FEWEST, expected):
        return 0
    if positions == 1 and size < expected <= min(_FULL * math.sqrt(2 * left), longest):
        size = expected  # two pieces of one block are as quick as two blocks, and nothing is drawn
    return max(1, math.ceil(expected / size)) if min(size, expected) * positions >= _SHORTEST else 0


def _most(spare: float, positions: int) -> float:
    """Return (K + 3) L, for examples of so many rows each: c times what is left for it."""
    return spare * (math.sqrt(3.0) if positions == 1 else 1 / cancelling(positions))


def cancelling(positions: int) -> float:
    """Return κ, by how much an example's positions may cancel in blocks; at random they do by √positions."""
    return 1.0 if positions == 1 else 2.0 * math.sqrt(positions)


def drawn_blocks(count: int, blocks: int) -> tuple[NDArray[np.int64], list[int]]:
    """Return so many examples block by block, and the blocks' sizes: independent and secret draws.

    Blocks are even to within 2⁻¹⁶ of the draws; the theorem asks that they be independent.
    """
    if blocks == 1:
        return np.arange(count), [count]
    at = _words.integers(-(-count // 4)).view(np.uint16)[:count] % blocks
    return at.argsort(kind="stable"), np.bincount(at, minlength=blocks).tolist()


def together(sizes: list[int], most: int) -> Iterator[list[int]]:
    """Yield the sizes of blocks that have at most so many examples together, or of one that has more.

    >>> list(together([3, 2, 4, 9, 0], 5))
    [[3, 2], [4], [9, 0]]
    """
    part: list[int] = []
    for size in sizes:
        if part and size and sum(part) + size > most:
            yield part
            part = []
        part.append(size)
    if any(part):
        yield part


def product(
    u: Tensor,
    v: Tensor,
    examples: int,
    wide: Tensor | None = None,
    out: Tensor | None = None,
    double: bool = False,
) -> Tensor:
    """Return uᵀ v block by block; in float64 where that is as fast, or where blocks are unknown.

    See `farthing.torch.kernels.totals.product` for the rows, for ``wide`` and for ``double``.
    """
    kernels = native.kernels(u.numel()) if _narrow(u, v) and not double else None
    if kernels is not None:
        found, sizes = _place(out, (u.shape[1], v.shape[1])), (*u.shape, v.shape[1])
        total = _rooms((-(-u.shape[1] // 4) * 4, v.shape[1]))[0]
        kernels["narrow_product"](u.data_ptr(), v.data_ptr(), *sizes, total.data_ptr(), found.data_ptr())
        return found if out is None or out is found else out.copy_(found)
    each, known = len(u) // max(1, examples), wide is not None or len(u) == examples
    if not known or sum(_part.blocks) != examples or each * _part.usual < _SHORTEST:
        found = torch.mm(u.t().double(), v.double())
        return found if out is None else out.copy_(found)
    pieces = _pieces(each, None if wide is None or not wide.any() else wide.tolist())
    if len(pieces) == 1 and pieces[0][1]:
        return torch.mm(u.t(), v, out=out)
    sums, lengths = _Sums((u.shape[1], v.shape[1]), out), [rows for rows, _ in pieces]
    sides = (torch.split_with_sizes(side, lengths) for side in (u, v))
    for (_, short), left, right in zip(pieces, *sides, strict=True):
        if not short:
            sums.add(torch.mm(left.t().double(), right.double()))
        elif double:
            sums.add(torch.mm(left.t(), right))
        else:
            torch.mm(left.t(), right, out=sums.room())
    return sums.wide() if double else sums.whole()


def _place(out: Tensor | None, shape: tuple[int, int]) -> Tensor:
    """Return ``out`` if a kernel can write float32 to it, else memory for that."""
    usable = out is not None and out.is_contiguous() and out.dtype is torch.float32
    return out if usable and out is not None else torch.empty(shape, dtype=torch.float32)


def _narrow(u: Tensor, v: Tensor) -> bool:
    """Return whether a layer has so few outputs that a kernel in float64 is as quick as others in float32."""
    few = 2 <= u.shape[1] <= _NARROW and v.shape[1] >= 128 and u.numel() * v.shape[1] <= _SMALL
    return few and u.is_contiguous() and v.is_contiguous() and u.dtype is v.dtype is torch.float32


def _pieces(each: int, wide: list[bool] | None) -> list[tuple[int, bool]]:
    """Return the rows of every piece of every block, and whether they may be summed in float32."""
    if wide is None and each in _part.pieces:
        return _part.pieces[each]
    most, start, found = _most(_part.spare, each), 0, list[tuple[int, bool]]()
    for size in _part.blocks:
        rows, start = size * each, start + size
        longest = min(rows, int(most / max(1, size)) - _IN_A_PIECE)
        if longest < min(_SHORTEST, rows) or (wide is not None and any(wide[start - size : start])):
            found.append((rows, False))
        elif rows:
            count = -(-rows // longest)
            found += [(rows * (n + 1) // count - rows * n // count, True) for n in range(count)]
    if wide is None:
        _part.pieces[each] = found
    return found


class _Sums:
    """The sum of matrices, added in float64, in memory that is used again.

    Those in float32 lie in ``out`` and in rooms beside it until they are added, several at once.
    """

    def __init__(self, shape: tuple[int, int], out: Tensor | None) -> None:
        (self._total, self._rooms), self._asked = _rooms(shape), out
        self._out = _place(out, shape)
        self._filled, self._empty = 0, True

    def room(self) -> Tensor:
        """Return room for one more matrix, in float32."""
        if self._filled == _TOGETHER:
            self._move(last=False)
        self._filled += 1
        return self._out if self._filled == 1 else self._rooms[self._filled - 2]

    def add(self, matrix: Tensor) -> None:
        """Add a matrix, in float64."""
        self._total.copy_(matrix) if self._empty else self._total.add_(matrix)
        self._empty = False

    def wide(self) -> Tensor:
        """Return the sum of what was added, in float64, until the next one."""
        return self._total.zero_() if self._empty else self._total

    def whole(self) -> Tensor:
        """Return the sum, rounded once."""
        if self._filled:
            self._move(last=True)
        else:
            self._out.zero_() if self._empty else self._out.copy_(self._total)
        return self._out if self._asked is None or self._asked is self._out else self._asked.copy_(self._out)

    def _move(self, last: bool) -> None:
        """Add what is filled to the total; at the last, the total to what is filled, in ``out``."""
        others, size = self._rooms[: self._filled - 1], self._out.numel()
        kernels = native.kernels(size * self._filled)
        if last and self._empty and len(others) == 1:  # two numbers in float32 are also rounded once
            self._out.add_(others[0])
        elif kernels is not None:
            places = self._out.data_ptr(), self._rooms[0].data_ptr(), len(others), size
            kernels["add_parts"](*places, self._empty, last, self._total.data_ptr())
            self._empty = False
        else:
            for matrix in (self._out, *others):
                self.add(matrix)
            if last:
                self._out.copy_(self._total)
        self._filled = 0


def _rooms(shape: tuple[int, int]) -> tuple[Tensor, list[Tensor]]:
    """Return room for a matrix in float64 and for others in float32, the same in every step."""
    if shape not in _part.rooms:
        size, others = math.prod(shape), _TOGETHER - 1
        if _part.room.numel() < size * (1 + others / 2):
            _part.room, _part.rooms = torch.empty(size + -(-size * others // 2), dtype=torch.float64), {}
        floats = _part.room[size:].view(torch.float32)[: size * others]
        _part.rooms[shape] = _part.room[:size].view(shape), list(floats.view(others, *shape))
    return _part.rooms[shape]
