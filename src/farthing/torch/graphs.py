"""Batches on a GPU: a bounded sum captured once in a CUDA graph and replayed.

A small model's step is a hundred launches of a few microseconds each, and Python is slower than that; a large
model's is a thousand, and without a graph Python has to wait and see whether an example is not finite. A
graph needs shapes that do not change, so a batch is copied into buffers that hold a few more rows, up to the
next multiple of 32, or of 8 where few rows take long, and rows that only fill up get weight 0. Lots of nearly
the same size share few graphs. What a bound's numbers are may change from run to run; what kind of bound it
is may not. A model that cannot be captured (one that waits for the GPU in its forward, say) goes on without.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from farthing.bounds import ClipCoordinates
from farthing.torch.clipping import Automatic, ClipCounted, ClipLayers, Live, TorchBound, extra
from farthing.torch.vmapped import mapped

_STEP = 32  # rows: sizes are rounded up to a multiple
_FINE = 8  # rows, where a batch is not quick and has few
_FEW = 128
_QUICK = 0.01  # seconds
_MOST = 32  # graphs; other sizes go without
_SLOW = 0.25  # seconds: a batch that takes longer is not held up by launches

Add = Callable[[Any, Any, Tensor | None, TorchBound, Live, Tensor, bool], None]


class Batch:
    """Buffers for batches of up to ``size`` examples, and their bounded sum in ``total``."""

    def __init__(
        self,
        add: Add,
        inputs: Any,
        targets: Any,
        weights: Any,
        bound: TorchBound,
        count: int,
        size: int,
        total: Tensor | None = None,
    ):
        self.add, self.bound, self.count, self.size = add, bound, count, size

        def room(x: Tensor) -> Tensor:
            return torch.zeros((size, *x.shape[1:]), dtype=x.dtype, device=x.device)

        self.inputs, self.targets = mapped(inputs, room), mapped(targets, room)
        first = tensors((targets, inputs))[0]
        shape = (size,) if weights is None else (size, *weights.shape[1:])
        self.weights = torch.zeros(shape, device=first.device)
        self.live = Live.of(bound, count, first.device).static(first.device)
        length = count + extra(bound)
        fits = total is not None and len(total) == length and total.device == first.device
        self.total = total if total is not None and fits else torch.zeros(length, device=first.device)
        self.graph: Any = None

    def fill(self, inputs: Any, targets: Any, weights: Tensor | None, bound: TorchBound) -> None:
        """Another batch in the same buffers. What stays of the last one gets weight 0."""
        rows = 0
        for old, new in zip(tensors((self.inputs, self.targets)), tensors((inputs, targets)), strict=True):
            rows = len(new)
            old[:rows].copy_(new, non_blocking=True)
        self.weights[rows:].zero_()
        if weights is None:
            self.weights[:rows].fill_(1.0)
        else:
            self.weights[:rows].copy_(weights, non_blocking=True)
        if bound is not self.bound:
            self.bound = bound
            self.live.refill(bound, self.count)

    def run(self) -> None:
        """The sum of what the buffers hold."""
        if self.graph is not None:
            self.graph.replay()
            return
        self.total.zero_()
        self.add(self.inputs, self.targets, self.weights, self.bound, self.live, self.total, True)

    def capture(self, pool: Any, side: Any) -> None:
        """Records the sum on a stream beside; it must have run before, so that all it needs is there."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=side):
            self.run()
        self.graph = graph


class Graphs:
    """The graphs of a model's bounded sums, by kind of bound and size of batch."""

    def __init__(self, model: nn.Module, add: Add, count: int) -> None:
        self._model, self._add, self._count = model, add, count
        self._batches: dict[Any, Batch] = {}
        self._seen: dict[Any, float] = {}
        self._pool: Any = None
        self._side: Any = None  # one for all: cuBLAS keeps a workspace for every stream that it has seen
        self._total: Tensor | None = None  # of all graphs: one runs after the other
        self.wanted = torch.cuda.is_available()

    def add(
        self,
        inputs: Any,
        targets: Any,
        weights: Tensor | None,
        bound: TorchBound,
        total: Tensor,
        empty: bool = False,
    ) -> bool:
        """total += (= where it is ``empty``) the sum of a batch by its graph; False where there is none."""
        if not self.wanted or not total.is_cuda or torch.cuda.is_current_stream_capturing():
            return False
        given = tensors((inputs, targets))
        shapes = tuple((x.shape[1:], x.dtype) for x in given)
        width = None if weights is None or weights.ndim == 1 else weights.shape[1]
        weight = next(self._model.parameters()).data_ptr()
        kind = shapes, width, kind_of(bound), self._model.training, weight
        size = self._size(kind, len(given[0]))
        key = size, *kind
        batch = self._batches.get(key)
        if batch is None:
            batch = self._new(key, inputs, targets, weights, bound, size)
            if batch is None:
                return False
        batch.fill(inputs, targets, weights, bound)
        batch.run()
        total.copy_(batch.total) if empty else total.add_(batch.total)
        return True

    def _size(self, kind: Any, rows: int) -> int:
        """How many rows the buffers for so many have."""
        step = _FINE if rows <= _FEW and self._seen.get(kind, 0.0) > _QUICK else _STEP
        return -(-rows // step) * step

    def _new(
        self, key: Any, inputs: Any, targets: Any, weights: Any, bound: TorchBound, size: int
    ) -> Batch | None:
        """A graph for a kind of batch, if it is quick enough to need one and there is room for it."""
        if len(self._batches) >= _MOST:
            return None
        kind = key[1:]
        if kind not in self._seen:  # the first batch of its kind chooses routes, the second is timed
            self._seen[kind] = -1.0
            return None
        if self._seen[kind] > _SLOW:
            return None
        batch = Batch(self._add, inputs, targets, weights, bound, self._count, size, self._total)
        self._total = batch.total
        batch.fill(inputs, targets, weights, bound)
        if self._seen[kind] < 0:
            batch.run()
            torch.cuda.synchronize()
            start = time.perf_counter()
            batch.run()
            torch.cuda.synchronize()
            self._seen[kind] = time.perf_counter() - start
            rows = len(tensors((inputs, targets))[0])
            if self._seen[kind] > _SLOW or self._size(kind, rows) < size:
                return None
        if self._pool is None:
            self._pool, self._side = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        try:
            batch.run()
            _forget_workspaces()
            batch.capture(self._pool, self._side)
        except RuntimeError:  # it waits for the GPU, or does something else that a graph cannot hold
            torch.cuda.synchronize()
            self.wanted = False
            return None
        self._batches[key] = batch
        return batch


def _forget_workspaces() -> None:
    """Lets go of cuBLAS' workspaces, 32 MiB for every stream: the graph brings its own, the next call too."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        torch.cuda.synchronize()
        clear()


def kind_of(bound: TorchBound) -> tuple[Any, ...]:
    """What of a bound a graph is made for; the rest may change."""
    match bound:
        case Automatic():
            return Automatic, bound.gamma
        case ClipCounted():
            return ClipCounted, bound.share
        case ClipLayers():
            return ClipLayers, bound.sizes
        case ClipCoordinates():
            return (ClipCoordinates,)
    return type(bound), isinstance(bound.scale, float)


def tensors(value: Any) -> list[Tensor]:
    """The tensors in nested tuples."""
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in tensors(part)]
    return [value] if isinstance(value, Tensor) else []
