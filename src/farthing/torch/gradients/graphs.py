"""Capture work on a GPU in a CUDA graph and replay it, mainly bounded sums of batches.

A small model's step is a hundred launches of a few microseconds each, which is faster than Python can issue
them; a large model's step is a thousand launches, and without a graph Python has to wait to see whether an
example is not finite. A graph needs shapes that do not change, so a batch is copied into buffers with a few
more rows: at most a 16th more, or up to the next multiple of 32 if a batch is fast. Rows that only fill up
get weight 0. Batches of nearly the same size share a graph, and all graphs share their buffers. The numbers
of a rule may change from run to run; its `ClipRule.graph_key` may not. A model that cannot be captured (for
instance because its forward waits for the GPU, or because memory is short) runs without graphs.
"""

import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from farthing.torch.gradients.clipping import ClipRule
from farthing.torch.gradients.tape import mapped
from farthing.torch.kernels import totals

_STEP = 32  # rows: sizes of quick batches are rounded up to a multiple
_QUICK = 0.01  # seconds
_MOST = 32  # graphs; other sizes go without
_SLOW = 2.0  # seconds: a batch that takes longer is not held up by launches, on any host
HUGE = 2**25  # coordinates from which a sum is lent where it lies, and not copied


class Live(NamedTuple):
    """A rule's numbers as a sum uses them: tensors in a CUDA graph, where they may change between runs."""

    clip: float | Tensor
    scale: Tensor | None

    @classmethod
    def of(cls, rule: ClipRule, size: int, device: torch.device) -> "Live":
        """Return the numbers of a rule on gradients of ``size`` coordinates."""
        return cls(rule.live_clip(device), rule.units(size, device))

    def static(self, device: torch.device) -> "Live":
        """Return the numbers in tensors of their own."""
        clip = torch.as_tensor(self.clip, dtype=torch.float32, device=device).clone()
        return Live(clip, None if self.scale is None else self.scale.clone())

    def refill(self, rule: ClipRule, size: int) -> None:
        """Write another rule's numbers into these tensors."""
        assert isinstance(self.clip, Tensor)
        other = Live.of(rule, size, self.clip.device)
        if isinstance(other.clip, Tensor):
            self.clip.copy_(other.clip)
        else:
            self.clip.fill_(other.clip)
        if self.scale is not None and other.scale is not None:
            self.scale.copy_(other.scale)


Add = Callable[[Any, Any, Tensor | None, ClipRule, Live, Tensor, bool], Tensor]


class Room:
    """Buffers for batches of up to ``rows`` examples, and for the numbers of their clip rule."""

    def __init__(
        self, inputs: Any, targets: Any, weights: Tensor | None, rule: ClipRule, count: int, rows: int
    ) -> None:
        def room(x: Tensor) -> Tensor:
            return torch.zeros((rows, *x.shape[1:]), dtype=x.dtype, device=x.device)

        self.rows, self.count, self.rule = rows, count, rule
        self.inputs, self.targets = mapped(inputs, room), mapped(targets, room)
        self.device = tensors((targets, inputs))[0].device
        shape = (rows,) if weights is None else (rows, *weights.shape[1:])
        self.weights = torch.zeros(shape, device=self.device, dtype=torch.float32)
        self.live = Live.of(rule, count, self.device).static(self.device)

    def fill(self, inputs: Any, targets: Any, weights: Tensor | None, rule: ClipRule) -> None:
        """Fill the buffers with another batch; rows that are left of the last one get weight 0."""
        rows = 0
        for old, new in zip(tensors((self.inputs, self.targets)), tensors((inputs, targets)), strict=True):
            rows = len(new)
            old[:rows].copy_(new, non_blocking=True)
        self.weights[rows:].zero_()
        if weights is None:
            self.weights[:rows].fill_(1.0)
        else:
            self.weights[:rows].copy_(weights, non_blocking=True)
        if rule is not self.rule:
            self.rule = rule
            self.live.refill(rule, self.count)


class BatchGraph:
    """The bounded sum, in ``total``, of the first ``size`` examples in a room."""

    def __init__(self, add: Add, room: Room, size: int, total: Tensor | None = None) -> None:
        self.add, self.room = add, room
        self.inputs, self.targets = (mapped(part, lambda x: x[:size]) for part in (room.inputs, room.targets))
        self.weights = room.weights[:size]
        length = room.count + room.rule.extra
        fits = total is not None and len(total) == length and total.device == room.device
        if total is None or not fits:
            total = torch.zeros(length, device=room.device, dtype=torch.float32)
        self.total = total
        self.graph: Any = None

    def run(self, anew: bool = True) -> None:
        """Compute the sum of the buffers, ``anew`` or on top of the total."""
        if anew:
            self.total.zero_()
        if self.graph is not None:
            self.graph.replay()
            return
        self.add(self.inputs, self.targets, self.weights, self.room.rule, self.room.live, self.total, True)

    def capture(self, pool: Any, side: Any) -> None:
        """Capture the sum on a side stream; it must have run before, so that all its memory is allocated."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=side):
            self.run(anew=False)
        self.graph = graph


class Graphs:
    """The graphs of a model's bounded sums, by kind of bound and size of batch."""

    def __init__(self, model: nn.Module, add: Add, count: int) -> None:
        self._model, self._add, self._count = model, add, count
        self._batches: dict[Any, BatchGraph] = {}
        self._rooms: dict[Any, Room] = {}
        self._seen: dict[Any, float] = {}
        self._pool: Any = None
        self._side: Any = None  # one for all: cuBLAS keeps a workspace for every stream that it has seen
        self._total: Tensor | None = None  # of all graphs: one runs after the other
        self._lends = count >= HUGE and _LONE > 0
        self.wanted = torch.cuda.is_available()

    def sum(
        self,
        inputs: Any,
        targets: Any,
        weights: Tensor | None,
        rule: ClipRule,
        onto: Tensor | None = None,
    ) -> Tensor | None:
        """Return the sum of a batch by its graph, on top of ``onto``; None where there is none.

        A huge sum stays where the graph made it, and the next batch has a graph if nobody holds it by then.
        """
        given = tensors((inputs, targets))
        if not self.wanted or not given[0].is_cuda or torch.cuda.is_current_stream_capturing():
            return None
        shapes = tuple((x.shape[1:], x.dtype) for x in given)
        width = None if weights is None or weights.ndim == 1 else weights.shape[1]
        weight = next(self._model.parameters()).data_ptr()
        kind = shapes, width, rule.graph_key, self._model.training, weight, totals.level(len(given[0]))
        size = self._size(kind, len(given[0]))
        key = size, *kind
        batch = self._batches.get(key)
        last = self._total if batch is None else batch.total
        if onto is not None and (batch is None or onto is not last):
            return None
        if last is not None and not alone(last):
            self._lends = False  # a caller that keeps two sums at once gets copies from now on
            return None
        if batch is None:
            batch = self._new(key, inputs, targets, weights, rule, size)
            if batch is None:
                return None
        batch.room.fill(inputs, targets, weights, rule)
        batch.run(anew=onto is None)
        return batch.total if self._lends else batch.total.clone()

    def _size(self, kind: Any, rows: int) -> int:
        """Return how many rows the buffers for so many have: a 16th more at most, unless they are quick."""
        quick = 0.0 <= self._seen.get(kind, -1.0) <= _QUICK
        fine = min(_STEP, (1 << (rows // 16).bit_length()) // 2)
        step = max(_STEP if quick else fine, 1 << (rows // 128).bit_length())
        return -(-rows // step) * step

    def _new(
        self, key: Any, inputs: Any, targets: Any, weights: Any, rule: ClipRule, size: int
    ) -> BatchGraph | None:
        """Return a graph for a kind of batch, if it is quick enough to need one and there is room for it."""
        if len(self._batches) >= _MOST:
            return None
        kind = key[1:]
        if kind not in self._seen:  # the first batch of its kind chooses routes, the second is timed
            self._seen[kind] = -1.0
            return None
        if self._seen[kind] > _SLOW:
            return None
        try:
            batch = self._captured(kind, inputs, targets, weights, rule, size)
        except RuntimeError:  # no memory, or it waits for the GPU, or what else a graph cannot hold
            self.wanted = False
        if not self.wanted:
            self._batches, self._rooms, self._total = {}, {}, None
            torch.cuda.synchronize()
            return None
        if batch is not None:
            self._batches[key] = batch
        return batch

    def _captured(
        self, kind: Any, inputs: Any, targets: Any, weights: Any, rule: ClipRule, size: int
    ) -> BatchGraph | None:
        room = self._rooms.get(kind)
        if room is None or room.rows < size:
            room = Room(inputs, targets, weights, rule, self._count, size + size // 16)
            self._rooms[kind] = room
        room.fill(inputs, targets, weights, rule)
        batch = BatchGraph(self._add, room, size, self._total)
        self._total = batch.total
        if self._seen[kind] < 0:
            self._seen[kind] = _seconds(batch)
            rows = len(tensors((inputs, targets))[0])
            if self._seen[kind] > _SLOW or self._size(kind, rows) != size:
                return None
        if self._pool is None:
            self._pool, self._side = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        batch.run()
        _forget_workspaces()
        batch.capture(self._pool, self._side)
        return batch


def _seconds(batch: BatchGraph) -> float:
    """Return how long a batch takes without a graph."""
    batch.run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    batch.run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


class Recorded:
    """A runner of a function whose tensors stay in place: on a GPU by a graph from the third run on.

    It must be the same function every time and must not wait for the GPU. What it made is overwritten when
    it runs again.
    """

    def __init__(self, device: torch.device) -> None:
        self._wanted, self._runs = device.type == "cuda", 0
        self._made: tuple[Tensor, ...] = ()
        self._graph: Any = None

    def run(self, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Return what the function makes."""
        self._runs += 1
        if self._graph is None and self._wanted and self._runs > 2:
            self._capture(make)
        if self._graph is None:
            return make()
        self._graph.replay()
        return self._made

    def _capture(self, make: Callable[[], tuple[Tensor, ...]]) -> None:
        if torch.cuda.is_current_stream_capturing():
            return
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._made = make()
            self._graph = graph
        except RuntimeError:  # somebody else used the GPU meanwhile in a way that a graph cannot hold
            torch.cuda.synchronize()
            self._wanted = False


def _forget_workspaces() -> None:
    """Free cuBLAS' workspaces, 32 MiB per stream; graphs have their own, and the next call makes one."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        torch.cuda.synchronize()
        clear()
    torch.cuda.empty_cache()  # a graph has memory of its own, and cannot free what others keep in reserve


def _uses(tensor: Tensor) -> int:
    """Return how many tensors lie in the same memory, and a constant; 0 where torch does not tell."""
    count: Any = getattr(torch._C, "_storage_Use_Count", None)
    return 0 if count is None else int(count(tensor.untyped_storage()._cdata))


def alone(tensor: Tensor) -> bool:
    """Return whether no other tensor, no view of it either, lies in the memory of this one.

    >>> whole = torch.zeros(4)
    >>> alone(whole), [alone(whole) for part in whole.split(2)], alone(whole)
    (True, [False, False], True)
    """
    return _uses(tensor) == _LONE


_LONE = _uses(torch.empty(1, dtype=torch.float32))


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested tuples."""
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in tensors(part)]
    return [value] if isinstance(value, Tensor) else []


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that does not keep its object alive, so that graphs free memory with their owner."""
    reference = weakref.WeakMethod(method)

    def call(*given: Any) -> Any:
        found = reference()
        assert found is not None
        return found(*given)

    return call
