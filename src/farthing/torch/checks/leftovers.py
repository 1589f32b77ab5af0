"""Check that a pass over private examples leaves nothing behind but the requested sum.

A module that keeps ``self.last = x``, a running mean, or a list of losses in a closure carries records into
``torch.save(model)``; a leaf tensor that needs a gradient (a loss with a learned temperature) is trained on
gradients that nobody bounds. Two walls stand against that:

- `refuse` runs a model on made-up examples, before anything is charged, and names the attribute that
  differs after other examples, or the leaf that is no trained parameter of the model.
- `Wall` puts back, after every sum, what a pass changed all the same (an attribute that is written for some
  inputs only). What very unlike made-up examples changed, and a wall did not put back, is refused as well.

Both look at what `farthing.torch.checks.reach` finds. What a forward writes elsewhere (a file, a global of an
installed package) is not seen; nor is a rare write, which no made-up example brought about, into a large
tensor or the weights of one of torch's own modules, or by ``.data`` into a tensor on a GPU.

>>> class Keeps(nn.Linear):
...     def forward(self, x):
...         self.last = x
...         return super().forward(x)
>>> model = Keeps(2, 1)
>>> before = values(model)
>>> _ = model(torch.ones(1, 2))
>>> changes(before, values(model))
['last']
"""

import array
import contextvars
import io
import itertools
import queue
import types
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from farthing.errors import Unsupported
from farthing.torch.checks.chance import GENERATORS, SHARED, rewinding, state_of
from farthing.torch.checks.reach import (
    CONTAINERS,
    FILES,
    FIXED,
    MISSING,
    NUMBERS,
    ROOM,
    Cached,
    Entries,
    attributes,
    roots,
    slot_names,
    slots,
    walk,
    written,
)

_LARGEST = 1 << 22  # elements of a tensor that is put back
_SMALL = 1 << 16  # elements of a parameter that is put back
_LARGE = 1 << 20  # elements: of a larger tensor only where it lies, its version and its sum are compared
_BYTES = (*ROOM, np.ndarray, *FILES)
_ROOMY = 1 << 24  # bytes of a buffer that is looked at
_GLOBAL = "global "
_INNER = ("_parameters.", "_buffers.", "_modules.", ".value")


def refuse(model: nn.Module, loss: Any, losses: Callable[[int, int], Tensor]) -> None:
    """Refuse a model or a loss that keeps something of examples, and leaves that are not trained.

    ``losses(size, seed)`` runs both passes on so many made-up examples and returns their losses, with their
    graph. Two runs on other examples, and on another number of them, must leave the same behind: what is
    cached once and for all (positions, masks) may stay.
    """
    trained = {id(p) for p in model.parameters()}
    others = {id(leaf): leaf for leaf in _leaves(losses(4, 0)) if id(leaf) not in trained}
    for leaf in _leaves(losses(4, 0)) if others else ():  # one that every pass makes anew is no weight
        if id(leaf) in others:
            raise Unsupported(_unseen(loss, leaf))
    before = values(model, loss)
    losses(3, 1)
    refuse_changes(before, model, loss)


def refuse_changes(before: dict[str, Any], model: nn.Module, loss: Any) -> None:
    """Refuse a model or a loss whose state differs from the one ``before``."""
    found = changes(before, values(model, loss))
    if found:
        raise Unsupported(
            f"a pass over the model changes {', '.join(found[:3])}{' and more' if found[3:] else ''}: it "
            "would keep something of private examples without noise, and ship it with the model; keep "
            "nothing in forward, in hooks or in the loss, or call eval() on what does so in training only"
        )


def _unseen(loss: Any, leaf: Tensor) -> str:
    parts = [thing for _, thing in walk({"loss": loss}) if isinstance(thing, nn.Module)]
    names = [name for part in parts for name, p in part.named_parameters() if p is leaf]
    what = f"the loss has a parameter {names[0]}" if names else "the loss or the model uses a tensor"
    return (
        f"{what} {tuple(leaf.shape)} that needs a gradient and is no parameter of the model: no gradient of "
        "it is released. Make it part of the model (a module that holds both, and returns what the loss "
        "needs), or fix it, requires_grad_(False)"
    )


def _leaves(value: Tensor) -> Iterator[Tensor]:
    """Yield the leaf tensors that a backward pass would reach."""
    waiting, seen = [value.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        waiting.extend(after for after, _ in node.next_functions)
    if value.is_leaf and value.requires_grad:
        yield value


def values(model: Any, loss: Any = None) -> dict[str, Any]:
    """Return everything that a model and a loss hold, directly or not, by name."""
    found: dict[str, Any] = {}
    for name, holder in walk(roots(model, loss)):
        for key, value in slots(holder).items():
            path = f"{name}.{key}" if name else str(key)
            if isinstance(value, Tensor):
                found[path] = _frozen(value)
                if isinstance(value, nn.Parameter) and value.grad is not None:
                    found[f"{path}.grad"] = _frozen(value.grad)
            elif isinstance(value, _BYTES):
                found[path] = _bytes(value)
            elif isinstance(value, itertools.count | queue.SimpleQueue):
                found[path] = repr(value) if isinstance(value, itertools.count) else value.qsize()
            elif isinstance(value, GENERATORS) and id(value) not in SHARED:
                found[f"{path} (a random generator)"] = state_of(value)
            elif value is None or isinstance(value, NUMBERS):
                found[path] = value
            elif isinstance(value, CONTAINERS):
                found[path] = type(value), len(value)
            else:
                found[path] = type(value)
    return found


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names of the parts that differ; of a container that grew, its own name."""
    names, missing = {**before, **after}, object()
    found = {_plain(n) for n in names if not _same(before.get(n, missing), after.get(n, missing))}
    return sorted(n for n in found if not any(n.startswith(f"{other}.") for other in found))


def _plain(name: str) -> str:
    for inner in _INNER:
        name = name.replace(inner, "")
    return name


def _frozen(value: Tensor) -> Any:
    """Return a copy of a tensor, or of a large one something that identifies its content."""
    try:
        plain = value.detach()
        plain = plain._values() if plain.layout is torch.sparse_coo else plain
        if plain.numel() > _LARGE or plain.layout is not torch.strided:
            return plain.data_ptr(), value._version, float(plain.sum(dtype=torch.float64))
        return plain.clone()
    except (RuntimeError, NotImplementedError):  # no values: meta tensors, those of a transform that is over
        return tuple(value.shape), value.dtype


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
            return False
        return bool(((one == other) | ((one != one) & (other != other))).all())  # NaN is NaN
    if isinstance(one, Entries) and isinstance(other, Entries):
        return other <= one
    if type(one) is not type(other):
        return False
    return bool(one == other or (one != one and other != other))


class Wall:
    """A context that restores, on exit, the state that the model and the loss had on entry.

    A model of torch's own modules has buffers only, unless ``everything`` is asked for.
    """

    def __init__(self, model: Any, loss: Any, *, everything: bool = False) -> None:
        found = [holder for _, holder in walk(roots(model, loss)) if not _fixed(holder)]
        if not everything:
            modules = [holder for holder in found if isinstance(holder, nn.Module)]
            alone = all(map(_bare, modules))
            plain = {id(part) for module in modules for part in _plain_parts(module, alone)}
            found = [holder for holder in found if id(holder) not in plain]
        self._holders = found
        weights = (m._parameters for m in found if isinstance(m, nn.Module) and _bare(m))
        self._weights = set(map(id, weights))  # which are many, and torch's own modules do not write them
        self._maps = [holder for holder in found if isinstance(holder, dict)]
        self._things = [holder for holder in found if _by_attributes(holder)]
        self._others = [h for h in found if not isinstance(h, dict) and not _by_attributes(h)]
        self._noted: list[_Noted] = []
        self._ids: list[int] = []
        self._before: list[tuple[Any, _Noted]] = []
        self._copies: list[_Copy] = []
        drawn = {id(g): g for holder in found for g in slots(holder).values() if isinstance(g, GENERATORS)}
        self._generators = [generator for number, generator in drawn.items() if number not in SHARED]
        self._rewind: list[Callable[[], object]] = []

    def _all_ids(self) -> list[int]:
        """Return the ids of all objects held, in few calls, since this runs before and after every sum."""
        maps = [*self._maps, *(holder.__dict__ for holder in self._things)]
        found = [*map(len, maps), *map(id, chain.from_iterable(maps))]
        found += map(id, chain.from_iterable(map(dict.values, maps)))
        for holder in self._others:
            ids = _ids(holder)
            found += (len(ids), *ids)
        return found

    def __enter__(self) -> "Wall":
        self._rewind = [rewinding(generator) for generator in self._generators]
        ids = self._all_ids()
        if not self._noted or ids != self._ids:
            before: list[Any] = [*self._noted] or [None] * len(self._holders)
            self._noted = [_noted(*pair) for pair in zip(self._holders, before, strict=True)]
            self._ids = ids
            pairs = zip(self._holders, self._noted, strict=True)
            copied = [noted.parts for holder, noted in pairs if id(holder) not in self._weights]
            parts = {id(part): part for part in chain.from_iterable(copied)}
            last = {id(copy.part): copy for copy in self._copies}
            self._copies = [last.get(key) or _Copy(part) for key, part in parts.items()]
        self._before = list(zip(self._holders, self._noted, strict=True))
        for copy in self._copies:
            copy.take()
        return self

    def accept(self) -> None:
        """Take the present state as the one to restore."""
        self._before, self._noted, self._copies, self._rewind = [], [], [], []

    def __exit__(self, *_: object) -> None:
        for rewind in self._rewind:
            rewind()
        for holder, noted in self._before if self._before and self._all_ids() != self._ids else ():
            if _ids(holder) != noted.ids:
                _restore(holder, noted.content)
        for copy in self._copies:
            copy.put_back()
        self._before = []


class _Noted(NamedTuple):
    """The content of a holder, its ids, and its tensors and arrays that can be restored."""

    content: Any
    ids: list[int]
    parts: list[Any]


def _noted(holder: Any, last: _Noted | None) -> _Noted:
    """Return a holder's content: ``last`` if it is the same (its parts are alive, so ids identify them)."""
    ids = _ids(holder)
    if last is not None and ids == last.ids:
        return last
    held = _held(holder)
    content = dict(held) if isinstance(held, dict | types.MappingProxyType) else list(held)
    values = content.values() if isinstance(content, dict) else content
    return _Noted(content, ids, [value for value in values if _copied(value)])


class _Copy:
    """A copy of a tensor, an array or a file in memory, by which it is put back."""

    __slots__ = ("_copy", "_version", "part")

    def __init__(self, part: Any) -> None:
        self.part, self._version = part, 0
        self._copy: Any = None

    def take(self) -> None:
        """Copy the present content, because writing to ``.data`` does not change a tensor's version."""
        part, copy = self.part, self._copy
        if not isinstance(part, Tensor):
            self._copy = _bytes(part)
            return
        now, self._version = part.detach(), part._version
        if copy is None or copy.shape != now.shape or copy.dtype != now.dtype or copy.device != now.device:
            self._copy = now.clone()
        else:
            copy.copy_(now)

    def put_back(self) -> None:
        """Restore the copied content where it has changed; of tensors on a GPU only versions are compared."""
        part, copy = self.part, self._copy
        if not isinstance(part, Tensor):
            if _bytes(part) != copy:
                _rewrite(part, copy)
        elif part._version != self._version or (part.device.type == "cpu" and not torch.equal(part, copy)):
            with torch.no_grad():
                if part.shape != copy.shape:
                    part.data = copy.clone()
                part.copy_(copy)


def _bytes(part: Any) -> Any:
    """Return the content of an array or of a file in memory."""
    if isinstance(part, FILES):
        return part.getvalue() if not part.closed else None
    if isinstance(part, np.ndarray):
        return part.dtype.str, part.shape, part.tobytes()
    try:
        return bytes(part) if memoryview(part).nbytes <= _ROOMY else None
    except ValueError:  # it is closed
        return None


def _rewrite(part: Any, held: Any) -> None:
    """Write an earlier content into an array or a file."""
    match part:
        case io.BytesIO() | io.StringIO():
            part.seek(0)
            part.truncate()
            part.write(held)
        case np.ndarray():
            part[...] = np.frombuffer(held[2], dtype=part.dtype).reshape(held[1])
        case array.array():
            part[:] = array.array(part.typecode, held)
        case bytearray():
            part[:] = held
        case _:
            memoryview(part).cast("B")[:] = held


def _held(holder: Any) -> Any:
    """Return the content of a holder, by name or in order."""
    match holder:
        case dict() | list() | deque() | set():
            return holder
        case types.CellType() | contextvars.ContextVar():
            return slots(holder)
        case type():
            return vars(holder)
        case types.FunctionType():
            bound = {name: holder.__globals__.get(name, MISSING) for name in written(holder.__code__)}
            return {_GLOBAL + name: value for name, value in bound.items()} | holder.__dict__
    return attributes(holder)


def _by_attributes(holder: Any) -> bool:
    """Return whether a holder's content is its attributes, all in one dictionary."""
    other = isinstance(holder, dict | list | deque | set | types.CellType | type | contextvars.ContextVar)
    if other or type(getattr(holder, "__dict__", None)) is not dict or isinstance(holder, Cached):
        return False
    return not slot_names(holder) and not (
        isinstance(holder, types.FunctionType) and written(holder.__code__)
    )


def _ids(holder: Any) -> list[int]:
    if isinstance(holder, Cached):
        return [holder.cache_info().currsize]
    content = _held(holder)
    if isinstance(content, dict | types.MappingProxyType):
        return [*map(id, content), *map(id, content.values())]
    return list(map(id, content))


def _copied(value: Any) -> bool:
    """Return whether a tensor or an array is restored: all but large weights."""
    if isinstance(value, np.ndarray):
        return value.size <= _LARGEST and not value.dtype.hasobject
    if not isinstance(value, Tensor):
        return isinstance(value, _BYTES)
    most = _SMALL if isinstance(value, nn.Parameter) else _LARGEST
    plain = value.layout is torch.strided and value.device.type != "meta" and not hasattr(value, "placements")
    return plain and value.numel() <= most and not value.is_inference()


def _bare(module: nn.Module) -> bool:
    """Return whether a module is torch's own and carries no hooks."""
    hooks = (value for name, value in module.__dict__.items() if "_hooks" in name)
    return type(module).__module__.startswith("torch.nn.") and not any(map(bool, hooks))


def _plain_parts(module: nn.Module, alone: bool) -> list[Any]:
    """Return the parts that no pass writes: places of hooks, and all of torch's modules but buffers."""
    held = module.__dict__
    empty = [part for name, part in held.items() if "_hooks" in name and isinstance(part, dict) and not part]
    if not alone:
        return empty
    buffers = [held["_buffers"]] if not held["_buffers"] else []
    return [module, held["_parameters"], held["_modules"], *buffers, *empty]


def _fixed(holder: Any) -> bool:
    return isinstance(holder, FIXED)


def _restore(holder: Any, content: Any) -> None:
    """Restore the content of a holder where it has changed."""
    match holder:
        case dict():
            if len(holder) != len(content) or any(holder.get(k, holder) is not v for k, v in content.items()):
                holder.clear()
                holder.update(content)
        case list() | deque() | set():
            if len(holder) != len(content) or any(a is not b for a, b in zip(holder, content, strict=True)):
                holder.clear()
                (holder.update if isinstance(holder, set) else holder.extend)(content)
        case types.CellType():
            if content and holder.cell_contents is not content["value"]:
                holder.cell_contents = content["value"]
        case contextvars.ContextVar():
            holder.set(content["value"])
        case types.FunctionType():
            names = written(holder.__code__)
            for name in names:
                holder.__globals__[name] = content[_GLOBAL + name]
                if content[_GLOBAL + name] is MISSING:
                    del holder.__globals__[name]
            bound = {_GLOBAL + name for name in names}
            _restore(holder.__dict__, {k: v for k, v in content.items() if k not in bound})
        case type():
            for key in vars(holder).keys() - content.keys():
                delattr(holder, key)
            for key, value in content.items():
                if vars(holder).get(key, holder) is not value:
                    setattr(holder, key, value)
        case _ if isinstance(holder, Cached):
            holder.cache_clear()
        case _:
            slotted = slot_names(holder)
            if hasattr(holder, "__dict__"):
                _restore(holder.__dict__, {k: v for k, v in content.items() if k not in slotted})
            for name in slotted:
                if name in content:
                    object.__setattr__(holder, name, content[name])
                elif hasattr(holder, name):
                    object.__delattr__(holder, name)
