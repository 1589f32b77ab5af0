"""Sum clipped gradients in float32 with bounded rounding: the theorem behind the slack of torch's noise.

Added in float32 one after the other, 512 terms built to round badly move a sum by 0.4 % of the clip more than
the one example between neighbours does, 4,096 by a quarter of it.

**Theorem.** Let n examples have terms t_i, |t_i| <= C in the norm of the bound, and let no term go through
more than h roundings of u = 2⁻²⁴ on its way into the sum, in any order. Then the computed sum is within
γ_h n C of Σ t_i, γ_h = hu / (1 - hu): every coordinate is off by at most γ_h Σ |t_i| there (Higham 2002,
Section 4.2), and the norm is absolute. With h n <= 3 · 2¹⁴ that is 3 · 2⁻¹⁰ C, for two neighbours 3/4 of
`SLACK`. The result itself is rounded to float32 once, so that n may be 2¹⁵; for larger batches give noise a
slack of n 2⁻²² more. The rest, 2⁻⁹ C, is for the one example's own term, which does not grow with n: its
norm, measured in float32 in blocks (and rounded up where positions cancel), its factor, and their product.
`farthing.torch.kernels.blocks` has a theorem for larger batches, in which h n does not grow with n.

`chain` gives h for the examples of a batch (all of it, over all parts and ranks). What is summed, and how:

* one product a layer and example (linear layers of plain networks): float32 where the batch is no longer than
  h; on a CPU, where the expected batch size is known, in blocks, or of few outputs by a kernel in float64;
  else in float64 on GPUs where that is as quick; else float32 in pieces of h examples, pieces by a binary
  tree, which takes log2 of their number more roundings, up to 1,024 examples, and beyond in float64;
* rows (biases, norms, convolutions, whatever is kept): by a C kernel that adds in float64, else pieces of h
  examples in float32, and pieces in float64. Rows of convolutions with few positions may be made twice
  instead of kept, by the same machine code, so that what is measured and what is added are the same float32
  numbers; the kernel adds those in float64 as well;
* products over several positions (tokens, on a CPU also windows) and embeddings: in float64, since the terms
  of one example may cancel, and positions times examples is many; those of linear layers in blocks, as above;
* clamped gradients, coordinate by coordinate: in float64, or, unless parts are added where their sum lies, in
  pieces of h examples;
* parts of a batch and ranks: in float64; those of very large models on a GPU, and of small batches on a CPU
  (`in_place`), one on top of the other, in float32, with a quarter of h for it, or counted by the theorem of
  `farthing.torch.kernels.blocks`.

**What the theorem takes as given.** What is computed of one example alone (activations, output gradients,
rows) must not depend on who is beside it; libraries choose other kernels for other sizes, and such last bits
count for every example. Not covered are, because float64 would cost much there: any product where TF32 is
switched on; products over several positions under autocast on a GPU, and on GPUs without full-rate float64
(`exact64`); and convolutions on a GPU that are not kept as rows. Their h is the number of examples times that
of positions, and the slack covers it for small batches only.

>>> with among(500):
...     chain()
88

**Order of products.** CPU libraries are fast if the wide side of a result is the inner one: a result with a
few columns leaves vector registers half empty, and its transpose does not. Both orders give the same sums, up
to rounding.

**Precision.** A GPU may round factors of float32 products to ten bits (TF32) if that is allowed, and a CPU
with matrix units to seven (bfloat16). Sums on a CPU are always computed in full float32 (`exact`).

A norm and the sum that it bounds may be computed in different ways. If both are coarse, they differ by the
rounding of their products, and norms are rounded up by that amount; where norms are not rounded up, both are
computed in full float32 (`exact`).
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from farthing.noise import native
from farthing.torch.kernels import blocks


def coarse(device: torch.device) -> bool:
    """Return whether matrix products on a device may round their factors to ten bits."""
    if device.type != "cuda":
        return False
    matmul: Any = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):
        return matmul.fp32_precision not in ("none", "ieee")
    return bool(matmul.allow_tf32)  # before PyTorch 2.9


@contextmanager
def exact(device: torch.device) -> Iterator[None]:
    """Compute products in full float32 for a while, even if a GPU may use TF32, or a CPU bfloat16."""
    settings = _precisions(device)
    before = [getattr(kind, name) for kind, name, _ in settings]
    try:
        for kind, name, full in settings:
            setattr(kind, name, full)
        yield
    finally:
        for (kind, name, _), old in zip(settings, before, strict=True):
            setattr(kind, name, old)


def exact_on_cpu(device: torch.device) -> AbstractContextManager[None]:
    """Compute products on a CPU in full float32 for a while; a GPU's precision is unchanged."""
    return exact(device) if device.type == "cpu" else nullcontext()


def _precisions(device: torch.device) -> list[tuple[Any, str, Any]]:
    """Return the settings of how a device rounds factors of float32: an object, a name, the exact value."""
    backends: Any = torch.backends
    if device.type == "cuda":
        products, convolutions = backends.cuda.matmul, backends.cudnn
        if not hasattr(products, "fp32_precision"):  # before PyTorch 2.9
            return [(kind, "allow_tf32", False) for kind in (products, convolutions)]
        return [(kind, "fp32_precision", "ieee") for kind in (products, convolutions.conv)]
    kinds = [getattr(backends.mkldnn, name, None) for name in ("matmul", "conv")]
    return [(kind, "fp32_precision", "ieee") for kind in kinds if hasattr(kind, "fp32_precision")]


SLACK = 2.0**-7  # of the clip
_AFTER = 8  # roundings besides those in a piece: a factor, its product, a tree of pieces or their total
_FEWEST = 40  # examples in a piece of products that is worth its call
_FULL_RATE = (8, 0), (9, 0), (10, 0)  # GPUs that multiply float64 about as fast as float32
_NORMAL = 2.0**-126  # the least number of float32 with all its digits
_WIDE = 2**23  # numbers of a large matrix that are held in float64 at once


class _Batch(threading.local):
    """How many examples the batch has that this thread sums a part of."""

    records = 1
    in_place = False  # whether parts are added to a sum where it lies


_batch = _Batch()


@contextmanager
def among(records: int) -> Iterator[None]:
    """Say that sums of this thread are parts of a batch of so many examples."""
    before = _batch.records
    _batch.records = level(records)
    try:
        yield
    finally:
        _batch.records = before


@contextmanager
def in_place(wanted: bool) -> Iterator[None]:
    """Say whether sums of this thread are made one on top of the other, without a copy in float64."""
    before = _batch.in_place
    _batch.in_place = wanted
    try:
        yield
    finally:
        _batch.in_place = before


def is_in_place() -> bool:
    """Return whether sums of this thread are made one on top of the other."""
    return _batch.in_place


def level(records: int = 1) -> int:
    """Return the batch's size, rounded up to a power of two: sums of one level are made alike."""
    return max(_batch.records, _power(records))


def _power(records: int) -> int:
    return 1 << max(0, records - 1).bit_length()


def chain(records: int = 1) -> int:
    """Return how many examples may be added up in float32 in any order, of a batch of at least so many."""
    return max(1, _roundings(records) - (parts_in_place(records) if _batch.in_place else 0))


def parts_in_place(records: int = 1) -> int:
    """Return how many parts of a batch may be added up in float32 where they are."""
    return max(0, _roundings(records) // 4)


def _roundings(records: int) -> int:
    return blocks.ROUNDINGS // level(records) - _AFTER


def shared(records: int) -> bool:
    """Return whether so many examples are only a part of the batch that is summed, over several ranks."""
    return level() > _power(records)


def exact64(device: torch.device) -> bool:
    """Return whether products in float64 cost little more than in float32."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) in _FULL_RATE


def product(
    u: Tensor,
    v: Tensor,
    examples: int,
    out: Tensor | None = None,
    wide: Tensor | None = None,
    double: bool = False,
) -> Tensor:
    """Return uᵀ v, in ``out`` if given; a row of both is an example's term, or one of several.

    ``wide`` are the examples of several rows that cancel by more than `blocks.cancelling`; None: unknown.
    ``double``: the result is added to another that may cancel it, so that on a CPU it is not rounded before.
    """
    double = double and u.device.type == "cpu"
    several = examples < len(u) or double
    if blocks.active() and u.device.type == "cpu":
        return blocks.product(u, v, examples, wide, out, double)
    if u.dtype is not torch.float32:  # bfloat16, whose products are exact
        if out is None:
            return torch.mm(u.t(), v, out_dtype=torch.float32)
        return torch.mm(u.t(), v, out_dtype=torch.float32, out=out)
    if coarse(u.device) or (several and not exact64(u.device)):
        return torch.mm(u.t(), v, out=out)
    whole = len(u) <= chain(examples)
    if several or chain(examples) < _FEWEST or (u.is_cuda and not whole and exact64(u.device)):
        found = torch.mm(u.t().double(), v.double())
        return found if out is None else out.copy_(found)
    return _tree(u, v, chain(examples), out)


def _tree(u: Tensor, v: Tensor, rows: int, out: Tensor | None) -> Tensor:
    """Return uᵀ v, summed by a binary tree of pieces of at most ``rows`` rows, in memory that is reused."""
    pieces = -(-len(u) // rows)
    if pieces == 1:
        return torch.mm(u.t(), v, out=out)
    free = [torch.empty(u.shape[1], v.shape[1], device=u.device, dtype=torch.float32) if out is None else out]
    held: list[tuple[int, Tensor]] = []  # sums of 2^k pieces each, as a binary counter holds them
    for left, right in zip(u.tensor_split(pieces), v.tensor_split(pieces), strict=True):
        room = free.pop() if free else torch.empty_like(held[0][1])
        held.append((0, torch.mm(left.t(), right, out=room)))
        while len(held) > 1 and held[-1][0] == held[-2][0]:
            _join(held, free)
    while len(held) > 1:
        _join(held, free)
    return held[0][1]


def _join(held: list[tuple[int, Tensor]], free: list[Tensor]) -> None:
    """Add the last sum to the one before it."""
    _, last = held.pop()
    k, before = held.pop()
    held.append((k + 1, before.add_(last)))
    free.append(last)


def weighted(rows: Tensor, factors: Tensor) -> Tensor:
    """Return Σ factor · row, in float32.

    >>> weighted(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1.0, 0.5]))
    tensor([2.5000, 4.0000])
    """
    if not blocks.active() and len(rows) <= chain(len(rows)):
        return torch.mv(rows.t(), factors)
    kernels = native.kernels(rows.numel()) if rows.device.type == "cpu" else None
    if kernels is not None and rows.is_contiguous() and rows.dtype == factors.dtype == torch.float32:
        out = torch.empty(rows.shape[1], dtype=torch.float32)
        places = rows.data_ptr(), factors.contiguous().data_ptr()
        kernels["weighted_rows"](*places, *rows.shape, out.data_ptr())
        return out
    if blocks.active():
        return torch.mv(rows.t().double(), factors.double()).float()
    step = min(chain(len(rows)), 64)
    whole = len(rows) // step * step
    with exact(rows.device):
        pieces = torch.bmm(factors[:whole].view(-1, 1, step), rows[:whole].unflatten(0, (-1, step)))
    total = pieces.sum((0, 1), dtype=torch.float64)
    if whole < len(rows):
        total += torch.mv(rows[whole:].t(), factors[whole:])
    return total.float()


class Parts:
    """The sum of a batch's parts, each a flat float32 tensor; several are added in float64."""

    def __init__(self) -> None:
        self._total: Tensor | None = None

    def put(self, part: Tensor) -> None:
        """Add a part, whose memory may be used again."""
        self._total = part.double() if self._total is None else self._total.add_(part)

    def whole(self, last: Tensor) -> Tensor:
        """Return the sum, with the last part, in its memory."""
        return last if self._total is None else last.copy_(self._total.add_(last))


_SHORT = 64  # columns of a gradient that is better made the other way round


def add_product(
    u: Tensor,
    v: Tensor,
    out: Tensor,
    *,
    empty: bool = False,
    examples: int | None = None,
    wide: Tensor | None = None,
) -> None:
    """Add uᵀ v to ``out``, or write it there if ``empty``, with the rounding that the module describes.

    A row of both is an example's term, or one of several where there are fewer ``examples`` than rows.

    >>> out = torch.empty(2, 1)
    >>> add_product(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]]), out, empty=True)
    >>> out
    tensor([[3.],
            [6.]])
    """
    examples, double = len(u) if examples is None else examples, out.dtype is torch.float64
    if u.is_cuda and not (empty or double) and (u.dtype is not torch.float32 or coarse(u.device)):
        narrow: Any = {} if u.dtype is torch.float32 else {"out_dtype": torch.float32}
        torch.addmm(out, u.t(), v, **narrow, out=out)  # without memory for the product
        return
    if len(u) * len(out) > 4 * _WIDE:  # of a head over many words neither factor nor product is held twice
        for some in slabs(len(out), max(len(u), out.shape[1])):
            product_of = u[:, some], v, examples
            part = product(*product_of, out[some] if empty else None, wide, double)
            if not empty:
                out[some].add_(part)
        return
    if out.device.type == "cpu" and out.shape[1] <= _SHORT and len(out) >= 4 * out.shape[1]:
        found = product(v, u, examples, wide=wide, double=double).t()
        out.copy_(found) if empty else out.add_(found)
    elif empty:
        product(u, v, examples, out, wide)
    else:
        out.add_(product(u, v, examples, wide=wide, double=double))


def slabs(height: int, width: int) -> list[slice]:
    """Return the rows of a matrix in slices of which each fits into memory in float64.

    >>> slabs(1000, 10), slabs(5, 2**22)
    ([slice(0, 1000, None)], [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)])
    """
    step = max(1, _WIDE // width)
    return [slice(start, min(start + step, height)) for start in range(0, height, step)]


def without_denormal(factors: Tensor) -> Tensor:
    """Return factors, with zeros for those so small that float32 has not all digits of them.

    Those of a gradient of 10³⁰ and a clip of 10⁻¹³, say: rounded to 1.4 · 10⁻⁴⁵ it would be longer than that.

    >>> without_denormal(torch.tensor([1e-45, 1e-30, 0.0, torch.nan])).tolist()
    [0.0, 1.0000000031710769e-30, 0.0, nan]
    """
    return torch.threshold(factors, _NORMAL, 0.0)


def add_rows(ids: Tensor, values: Tensor, table: Tensor, factors: Tensor) -> None:
    """Add factor · value to table[id] for each valid id, in float64, rounded once.

    Values may cancel: what they leave must not be the rounding of their products.

    >>> table = torch.zeros(2, 1)
    >>> add_rows(torch.tensor([1, 5, 1]), torch.ones(3, 1), table, torch.tensor([1.0, 1.0, 0.5]))
    >>> table.tolist()
    [[0.0], [1.5]]
    """
    for some in slabs(*table.shape):
        part, here = table[some], ids - some.start
        inside = (here >= 0) & (here < len(part))
        each = torch.where(inside, factors.double(), 0.0)
        seen = values.to(torch.float64, copy=True).mul_(each[:, None])
        wide = part if part.dtype is torch.float64 else torch.zeros_like(part, dtype=torch.float64)
        wide.index_add_(0, here.clamp(0, len(part) - 1), seen)
        if wide is not part:
            part += wide
