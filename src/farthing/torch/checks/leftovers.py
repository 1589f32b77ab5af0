"""Checks that a pass over private examples leaves nothing behind but the sum that was asked for.

A module that keeps ``self.last = x``, a running mean, or a list of losses in a closure carries records into
``torch.save(model)``; a leaf tensor that needs a gradient (a loss with a learned temperature) is trained on
gradients that nobody bounds. Two walls stand against that:

- `refuse` runs a model on made-up examples, before anything is charged, and names the attribute that
  differs after other examples, or the leaf that is no trained parameter of the model.
- `Wall` puts back, after every sum, what a pass changed all the same (an attribute that is written for some
  inputs only).

Both look at what can be reached from the model and the loss: attributes, containers, buffers, hooks,
closures, class attributes, random generators, the globals that the loss, the hooks, a forward and the methods
that it calls name. What a forward writes elsewhere (a file, a global of another module) is not seen.

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
import functools
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

_MOST = 50_000  # objects that are looked at
_LARGEST = 1 << 22  # elements of a tensor that is put back
_LARGE = 1 << 20  # elements: of a larger tensor only where it lies, its version and its sum are compared
_NUMBERS = (bool, int, float, complex, str, bytes, np.generic, torch.Size)
_CONTAINERS = (dict, list, set, deque)
_FIXED = (tuple, frozenset, types.MethodType, types.BuiltinMethodType, functools.partial)
_OPAQUE = (
    "farthing.",
    "lightning.",
    "pytorch_lightning.",
    "torch.utils.data.",
    "torch._",
    "torch.cuda.",
    "torch.optim.",
)
_GLOBAL_HOOKS = [name for name in vars(torch.nn.modules.module) if name.startswith("_global_")]
_INNER = ("_parameters.", "_buffers.", "_modules.", ".value")

Slots = dict[Any, Any]


def refuse(model: nn.Module, loss: Any, losses: Callable[[int, int], Tensor]) -> None:
    """Refuses what a model or its loss keeps of examples, and leaves that are not trained.

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
    found = changes(before, values(model, loss))
    if found:
        raise Unsupported(
            f"a pass over the model changes {', '.join(found[:3])}{' and more' if found[3:] else ''}: it "
            "would keep something of private examples without noise, and ship it with the model; keep "
            "nothing in forward, in hooks or in the loss, or call eval() on what does so in training only"
        )


def _unseen(loss: Any, leaf: Tensor) -> str:
    parts = [thing for _, thing in _walk({"loss": loss}) if isinstance(thing, nn.Module)]
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
    """Return all that a model and a loss hold now, directly or not, by name."""
    found: dict[str, Any] = {}
    for name, holder in _walk(_roots(model, loss)):
        for key, value in _slots(holder).items():
            path = f"{name}.{key}" if name else str(key)
            if isinstance(value, Tensor):
                found[path] = _frozen(value)
            elif isinstance(value, np.ndarray):
                found[path] = value.copy()
            elif isinstance(value, bytearray | array.array):
                found[path] = bytes(value)
            elif isinstance(value, GENERATORS) and id(value) not in SHARED:
                found[f"{path} (a random generator)"] = state_of(value)
            elif value is None or isinstance(value, _NUMBERS):
                found[path] = value
            elif isinstance(value, _CONTAINERS):
                found[path] = type(value), len(value)
            else:
                found[path] = type(value)
    return found


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names of what differs; of a container that grew, its own."""
    names, missing = {**before, **after}, object()
    found = {_plain(n) for n in names if not _same(before.get(n, missing), after.get(n, missing))}
    return sorted(n for n in found if not any(n.startswith(f"{other}.") for other in found))


def _plain(name: str) -> str:
    for inner in _INNER:
        name = name.replace(inner, "")
    return name


def _frozen(value: Tensor) -> Any:
    """Return a tensor as it is now; of a large one what tells it from another."""
    try:
        plain = value.detach()
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
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if type(one) is not type(other):
        return False
    return bool(one == other or (one != one and other != other))


def _roots(model: Any, loss: Any) -> dict[str, Any]:
    """Return what a search begins with: a model, its loss, and the hooks of all modules."""
    held = {name: getattr(torch.nn.modules.module, name) for name in _GLOBAL_HOOKS}
    return {"": model, "loss": loss} | {name: hooks for name, hooks in held.items() if hooks}


def _walk(roots: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return everything that can hold something and is reached from the roots, with its name.

    What modules hold comes first, of however many; of the rest, lists of data above all, so much is enough.
    """
    waiting = deque[tuple[str, Any]](roots.items())
    seen, kept, most = set[int](), list[Any](), _MOST
    while waiting and len(seen) < most:
        name, thing = waiting.popleft()
        if id(thing) in seen or _opaque(thing):
            continue
        seen.add(id(thing))
        kept.append(thing)  # so that its id stays its own
        slots = _slots(thing)
        yield name, thing
        prefix = f"{name}." if name else ""
        found = [(f"{prefix}{key}", value) for key, value in slots.items()]
        if isinstance(thing, nn.Module):
            most += len(found) + 1
            waiting.extendleft(reversed(found))
        else:
            waiting.extend(found)
        if callable(thing):
            waiting.extend((cls.__name__, cls) for cls in type(thing).__mro__ if _foreign(cls))


def _foreign(cls: type) -> bool:
    home: Any = cls.__module__  # of a metaclass in C a descriptor
    return isinstance(home, str) and not home.startswith(("torch.", "builtins", "abc", "typing", *_OPAQUE))


def _opaque(thing: Any) -> bool:
    """Return whether nothing is looked for inside."""
    if thing is None or isinstance(
        thing, (*_NUMBERS, np.ndarray, types.ModuleType, torch.dtype, torch.device)
    ):
        return True
    if isinstance(thing, Tensor):
        return not thing.__dict__ and not _hooks(thing)
    if isinstance(thing, dict) and type(thing).__getitem__ is not dict.__getitem__:
        return True  # it makes what it gives (transformers' table of activations), so that a copy is another
    if isinstance(thing, type):
        return not _foreign(thing)
    if isinstance(thing, types.FunctionType):
        return str(thing.__module__).startswith("torch.")
    return not isinstance(thing, nn.Module) and str(type(thing).__module__).startswith(_OPAQUE)


def _slots(thing: Any) -> Slots:
    """Return what a thing holds, by key."""
    match thing:
        case dict():
            return {
                key if isinstance(key, str | int) else f"{type(key).__name__} {n}": v
                for n, (key, v) in enumerate(thing.items())
            }
        case list() | tuple() | deque():
            return dict(enumerate(thing))
        case set() | frozenset():
            return dict(enumerate(sorted(thing, key=id)))
        case functools.partial():
            return {"func": thing.func, "args": thing.args, "keywords": thing.keywords}
        case types.MethodType():
            return {"__self__": thing.__self__, "__func__": thing.__func__}
        case types.BuiltinMethodType():  # rows.append, say
            return {"__self__": thing.__self__}
        case types.FunctionType():
            return _named(thing)
        case types.CellType():
            return {} if thing == types.CellType() else {"value": thing.cell_contents}
        case type():
            own = {k: v for k, v in vars(thing).items() if _data(v)}
            return own | {k: v for k, v in _called(thing).items() if k in vars(thing)}
    found = dict(getattr(thing, "__dict__", {}))
    if isinstance(thing, Tensor) and _hooks(thing):
        found["hooks"] = _hooks(thing)
    for cls in type(thing).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(thing, name) and not name.startswith("__"):
                found[name] = getattr(thing, name)
    return found


def _hooks(tensor: Tensor) -> Any:
    """Return the hooks that see a tensor's gradient, if it has any."""
    return tensor._backward_hooks if tensor.is_leaf else None


def _called(cls: type) -> dict[str, types.FunctionType]:
    """Return the functions of a class that run in a pass, and those that they name, directly or not."""
    waiting, found = ["forward", "__call__", "backward", "setup_context"], dict[str, types.FunctionType]()
    while waiting:
        name = waiting.pop()
        held = getattr(cls, name, None)
        held = getattr(held, "__func__", getattr(held, "fget", held))
        if name not in found and isinstance(held, types.FunctionType):
            found[name] = held
            waiting.extend(_names(held.__code__))
    return found


def _data(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray, *_CONTAINERS, *GENERATORS, bool, int, float))


def _named(function: types.FunctionType) -> Slots:
    """Return what a function can reach: its closure, defaults, attributes, and globals that it names."""
    home, names = function.__module__, _names(function.__code__)
    found: Slots = {n: v for n in names if _reached(v := function.__globals__.get(n), home)}
    found |= dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    found |= {"defaults": function.__defaults__, "keywords": function.__kwdefaults__}
    return found | function.__dict__


def _names(code: types.CodeType) -> set[str]:
    """Return the names in a function and in those that are written inside it."""
    inner = (part for part in code.co_consts if isinstance(part, types.CodeType))
    return {*code.co_names, *(name for part in inner for name in _names(part))}


def _reached(value: Any, home: str) -> bool:
    if isinstance(value, types.FunctionType | type):
        return value.__module__ == home
    return _data(value) or isinstance(value, nn.Module)


class Wall:
    """Puts back, when it is left, what the model and the loss held when it was entered.

    A model of torch's own modules has buffers only, unless ``everything`` is asked for.
    """

    def __init__(self, model: nn.Module, loss: Any, *, everything: bool = False) -> None:
        found = [holder for _, holder in _walk(_roots(model, loss)) if not _fixed(holder)]
        if not everything:
            modules = [holder for holder in found if isinstance(holder, nn.Module)]
            alone = all(map(_bare, modules))
            plain = {id(part) for module in modules for part in _plain_parts(module, alone)}
            found = [holder for holder in found if id(holder) not in plain]
        self._holders = found
        self._maps = [holder for holder in found if isinstance(holder, dict)]
        self._things = [holder for holder in found if _by_attributes(holder)]
        self._others = [h for h in found if not isinstance(h, dict) and not _by_attributes(h)]
        self._noted: list[_Noted] = []
        self._ids: list[int] = []
        self._before: list[tuple[Any, _Noted]] = []
        self._copies: dict[int, tuple[Tensor, int, Tensor]] = {}
        drawn = {id(g): g for holder in found for g in _slots(holder).values() if isinstance(g, GENERATORS)}
        self._generators = [generator for number, generator in drawn.items() if number not in SHARED]
        self._rewind: list[Callable[[], object]] = []

    def _all_ids(self) -> list[int]:
        """Return the ids of all that is held, in a few calls: this runs before and after every sum."""
        maps = [*self._maps, *(holder.__dict__ for holder in self._things)]
        found = [*map(len, maps), *map(id, chain.from_iterable(maps))]
        found += map(id, chain.from_iterable(map(dict.values, maps)))
        for holder in self._others:
            ids = _ids(_held(holder))
            found += (len(ids), *ids)
        return found

    def __enter__(self) -> "Wall":
        self._rewind = [rewinding(generator) for generator in self._generators]
        ids = self._all_ids()
        if not self._noted or ids != self._ids:
            before: list[Any] = [*self._noted] or [None] * len(self._holders)
            self._noted = [_noted(*pair) for pair in zip(self._holders, before, strict=True)]
            self._ids = ids
        self._before = list(zip(self._holders, self._noted, strict=True))
        held = self._copies
        self._copies = {}
        for tensor in (tensor for _, noted in self._before for tensor in noted.tensors if _small(tensor)):
            last = held.get(id(tensor))
            if last is None or last[0] is not tensor or last[1] != tensor._version:
                last = tensor, tensor._version, tensor.detach().clone()
            self._copies[id(tensor)] = last
        return self

    def accept(self) -> None:
        """Let what is there now stay."""
        self._before, self._copies, self._rewind = [], {}, []

    def __exit__(self, *_: object) -> None:
        for rewind in self._rewind:
            rewind()
        for holder, noted in self._before if self._before and self._all_ids() != self._ids else ():
            if _ids(_held(holder)) != noted.ids:
                _restore(holder, noted.content)
        for tensor, version, copy in list(self._copies.values()):
            if tensor._version != version:
                with torch.no_grad():
                    tensor.copy_(copy)
                self._copies[id(tensor)] = tensor, tensor._version, copy
        self._before = []


class _Noted(NamedTuple):
    """What a holder held, the ids of it all, and the plain tensors and buffers among it."""

    content: Any
    ids: list[int]
    tensors: list[Tensor]


def _noted(holder: Any, last: _Noted | None) -> _Noted:
    """Return what a holder holds: ``last`` where that is the same, whose parts live, so that ids tell."""
    ids = _ids(_held(holder))
    if last is not None and ids == last.ids:
        return last
    content = _shallow(holder)
    values = content.values() if isinstance(content, dict) else content
    plain = [v for v in values if isinstance(v, Tensor) and not isinstance(v, nn.Parameter)]
    return _Noted(content, ids, plain)


def _held(holder: Any) -> Any:
    """Return what a holder holds, not copied."""
    match holder:
        case dict() | list() | deque() | set():
            return holder
        case types.CellType():
            return _slots(holder)
        case type():
            return vars(holder)
    return getattr(holder, "__dict__", {})


def _by_attributes(holder: Any) -> bool:
    """Return whether what a holder holds are its attributes."""
    other = isinstance(holder, dict | list | deque | set | types.CellType | type)
    return not other and type(getattr(holder, "__dict__", None)) is dict


def _ids(content: Any) -> list[int]:
    if isinstance(content, dict | types.MappingProxyType):
        return [*map(id, content), *map(id, content.values())]
    return list(map(id, content))


def _small(value: Tensor) -> bool:
    return value.layout is torch.strided and value.numel() <= _LARGEST and not value.is_inference()


def _bare(module: nn.Module) -> bool:
    """Return whether a module is torch's own and carries no hooks."""
    hooks = (value for name, value in module.__dict__.items() if "_hooks" in name)
    return type(module).__module__.startswith("torch.nn.") and not any(map(bool, hooks))


def _plain_parts(module: nn.Module, alone: bool) -> list[Any]:
    """Return what a pass does not write: places of hooks, and of torch's own modules all but buffers."""
    held = module.__dict__
    empty = [part for name, part in held.items() if "_hooks" in name and isinstance(part, dict) and not part]
    if not alone:
        return empty
    buffers = [held["_buffers"]] if not held["_buffers"] else []
    return [module, held["_parameters"], held["_modules"], *buffers, *empty]


def _fixed(holder: Any) -> bool:
    return isinstance(holder, _FIXED)


def _shallow(holder: Any) -> Any:
    match holder:
        case dict():
            return dict(holder)
        case list() | deque() | set():
            return list(holder)
        case types.CellType():
            return _slots(holder)
        case type():
            return dict(vars(holder))
    return dict(getattr(holder, "__dict__", {}))


def _restore(holder: Any, content: Any) -> None:
    """Back to what it held, where that is not the same now."""
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
        case type():
            for key in vars(holder).keys() - content.keys():
                delattr(holder, key)
            for key, value in content.items():
                if vars(holder).get(key, holder) is not value:
                    setattr(holder, key, value)
        case _ if hasattr(holder, "__dict__"):
            _restore(holder.__dict__, content)
