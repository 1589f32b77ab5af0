"""Find every object that a model and its loss can reach, and that could hold something of an example.

Attributes, containers, buffers, hooks, closures, class attributes, caches of functions, and the globals that
the loss, the hooks, a forward and what these call name, in the user's own modules: functions, and methods of
the user's own classes. What belongs to torch, to an installed package or to Python's library is not searched,
but for objects that people keep things in (`HOLDERS`).

>>> {"", "_buffers"} <= {name for name, _ in walk({"": nn.Linear(2, 1)})}
True
"""

import array
import contextvars
import ctypes
import dis
import functools
import io
import itertools
import mmap
import multiprocessing.sharedctypes
import queue
import sys
import sysconfig
import threading
import types
import weakref
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from farthing.torch.checks.chance import GENERATORS

_MOST = 50_000  # objects that are looked at
NUMBERS = (bool, int, float, complex, str, bytes, np.generic, torch.Size)
CONTAINERS = (dict, list, set, deque)
FIXED = (tuple, frozenset, types.MethodType, types.BuiltinMethodType, functools.partial)
Cached: Any = type(functools.lru_cache(lambda: None))
FILES = (io.BytesIO, io.StringIO)
_SHARED: Any = multiprocessing.sharedctypes.SynchronizedBase
_CTYPES: Any = (ctypes.Array, ctypes._SimpleCData, ctypes.Structure)
ROOM = (bytearray, memoryview, array.array, mmap.mmap, *_CTYPES)  # bytes to write into
HOLDERS: Any = (
    *(types.SimpleNamespace, threading.local, contextvars.ContextVar, queue.SimpleQueue, itertools.count),
    *(queue.Queue, UserDict, UserList, ChainMap, types.GeneratorType, _SHARED),
    *(weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet),
    *(*FILES, *ROOM),
)
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
MISSING = object()

Slots = dict[Any, Any]


def roots(model: Any, loss: Any) -> dict[str, Any]:
    """Return what a search begins with: a model, its loss, and the hooks of all modules."""
    held = {name: getattr(torch.nn.modules.module, name) for name in _GLOBAL_HOOKS}
    return {"": model, "loss": loss} | {name: hooks for name, hooks in held.items() if hooks}


def walk(roots: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return everything that can hold something and is reached from the roots, with its name.

    What modules hold comes first, of however many; of the rest, lists of data above all, so much is enough.
    """
    waiting = deque[tuple[str, Any]](roots.items())
    seen, kept, most, methods = set[int](), list[Any](), _MOST, _Methods()
    while (waiting or (waiting := deque(methods.called()))) and len(seen) < most:
        name, thing = waiting.popleft()
        if id(thing) in seen or _opaque(thing):
            continue
        methods.note(thing)
        seen.add(id(thing))
        kept.append(thing)  # so that its id stays its own
        found = slots(thing)
        yield name, thing
        prefix = f"{name}." if name else ""
        named = [(f"{prefix}{key}", value) for key, value in found.items()]
        if isinstance(thing, nn.Module):
            most += len(named) + 1
            waiting.extendleft(reversed(named))
        else:
            waiting.extend(named)
        if callable(thing):
            waiting.extend((cls.__name__, cls) for cls in type(thing).__mro__ if _foreign(cls))


class _Methods:
    """The methods of the user's own classes that code may call: by name, whatever object they belong to."""

    def __init__(self) -> None:
        self._names, self._classes = set[str](), dict[type, set[str]]()

    def note(self, thing: Any) -> None:
        """Note the names in a function, and the classes of any other thing."""
        if isinstance(thing, types.FunctionType):
            self._names |= _names(thing.__code__)
            return
        for cls in (thing if isinstance(thing, type) else type(thing)).__mro__:
            if cls not in self._classes and is_own(cls.__module__):
                self._classes[cls] = set()

    def called(self) -> list[tuple[str, Any]]:
        """Return the functions behind the names that were noted, each once."""
        found = list[tuple[str, Any]]()
        for cls, told in self._classes.items():
            fresh = (self._names & vars(cls).keys()) - told
            told |= fresh
            found += [(f"{cls.__name__}.{name}", _function(vars(cls)[name])) for name in sorted(fresh)]
        return [(name, held) for name, held in found if isinstance(held, types.FunctionType)]


def _function(held: Any) -> Any:
    """Return the function in a method of any kind, or in a property."""
    held = getattr(held, "__func__", getattr(held, "fget", held))
    return getattr(held, "__wrapped__", held)


def _foreign(cls: type) -> bool:
    home: Any = cls.__module__  # of a metaclass in C a descriptor
    return isinstance(home, str) and not home.startswith(("torch.", "builtins", "abc", "typing", *_OPAQUE))


def _opaque(thing: Any) -> bool:
    """Return whether nothing is looked for inside."""
    if thing is None or isinstance(
        thing, (*NUMBERS, np.ndarray, types.ModuleType, torch.dtype, torch.device)
    ):
        return True
    if isinstance(thing, Tensor):
        return not thing.__dict__ and not _hooks(thing)
    if isinstance(thing, dict) and type(thing).__getitem__ is not dict.__getitem__:
        return True  # it makes what it gives (transformers' table of activations), so that a copy is another
    if isinstance(thing, type):
        return not _foreign(thing)
    if isinstance(thing, (types.FunctionType, Cached)):
        return str(thing.__module__).startswith("torch.")
    return not isinstance(thing, nn.Module) and str(type(thing).__module__).startswith(_OPAQUE)


def slots(thing: Any) -> Slots:
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
        case types.GeneratorType():
            return {} if thing.gi_frame is None else dict(thing.gi_frame.f_locals)
        case multiprocessing.sharedctypes.SynchronizedBase():
            return {"value": thing.get_obj()}
        case contextvars.ContextVar():
            return {"value": thing.get(None)}
        case type():
            own = {k: v for k, v in vars(thing).items() if _data(v)}
            return own | {k: v for k, v in _called(thing).items() if k in vars(thing)}
    if isinstance(thing, Cached):
        return {"entries": Entries(thing.cache_info().currsize), **thing.__dict__}
    found = attributes(thing)
    if isinstance(thing, Tensor) and _hooks(thing):
        found["hooks"] = _hooks(thing)
    return found


class Entries(int):
    """The number of entries of a function's cache: fewer are no change, as a cache may be cleared."""


def attributes(thing: Any) -> Slots:
    """Return the attributes of an object, those of its ``__slots__`` too."""
    found = dict(getattr(thing, "__dict__", {}))
    found |= {name: getattr(thing, name) for name in slot_names(thing) if hasattr(thing, name)}
    return found


def slot_names(thing: Any) -> list[str]:
    """Return the names of the attributes that have a slot."""
    found: list[str] = []
    for cls in type(thing).__mro__:
        names = cls.__dict__.get("__slots__", ())
        found += (names,) if isinstance(names, str) else names
    return [name for name in found if not name.startswith("__")]


def _hooks(tensor: Tensor) -> Any:
    """Return the hooks that see a tensor's gradient, if it has any."""
    return tensor._backward_hooks if tensor.is_leaf else None


def _called(cls: type) -> dict[str, Any]:
    """Return the functions of a class that run in a pass, and those that they name, directly or not."""
    waiting, found = ["forward", "__call__", "backward", "setup_context"], dict[str, Any]()
    while waiting:
        name = waiting.pop()
        held = getattr(cls, name, None)
        held = getattr(held, "__func__", getattr(held, "fget", held))
        code = getattr(getattr(held, "__wrapped__", held), "__code__", None)
        if name not in found and isinstance(held, (types.FunctionType, Cached)) and code is not None:
            found[name] = held
            waiting.extend(_names(code))
    return found


def _data(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray, *CONTAINERS, *GENERATORS, bool, int, float))


def _named(function: types.FunctionType) -> Slots:
    """Return what a function can reach: its closure, defaults, attributes, and globals that it names."""
    home, names = function.__module__, _names(function.__code__)
    found: Slots = {n: v for n in names if _reached(v := function.__globals__.get(n), home)}
    for module in _modules(function.__globals__, names):
        inside = ((n, vars(module).get(n)) for n in names)
        found |= {f"{module.__name__}.{n}": v for n, v in inside if _reached(v, home)}
    found |= dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    found |= {"defaults": function.__defaults__, "keywords": function.__kwdefaults__}
    return found | function.__dict__


def _modules(inside: dict[str, Any], names: set[str]) -> list[types.ModuleType]:
    """Return the user's own modules among named globals, and those in them, as in ``package.module.seen``."""
    found, waiting = list[types.ModuleType](), [inside]
    while waiting:
        held = waiting.pop()
        here = (held.get(n) for n in names)
        fresh = [m for m in here if isinstance(m, types.ModuleType) and m not in found and is_own(m.__name__)]
        found += fresh
        waiting += map(vars, fresh)
    return found


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> set[str]:
    """Return the names in a function and in those that are written inside it."""
    inner = (part for part in code.co_consts if isinstance(part, types.CodeType))
    return {*code.co_names, *(name for part in inner for name in _names(part))}


@functools.lru_cache(maxsize=4096)
def written(code: types.CodeType) -> tuple[str, ...]:
    """Return the globals that a function binds anew, as after ``global last``."""
    steps = dis.get_instructions(code)
    found = [step.argval for step in steps if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")]
    inner = (part for part in code.co_consts if isinstance(part, types.CodeType))
    return (*found, *(name for part in inner for name in written(part)))


def _reached(value: Any, home: str) -> bool:
    """Return whether a global may hold something: data, a module, and what the user's own code defines."""
    if value is None or isinstance(value, types.ModuleType):
        return False
    if isinstance(value, (types.FunctionType, type, Cached)):
        return value.__module__ == home or is_own(value.__module__)
    if _data(value) or isinstance(value, (nn.Module, *HOLDERS)):
        return True
    return type(value).__module__ == home or is_own(type(value).__module__)


_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@functools.lru_cache(maxsize=4096)
def is_own(module: Any) -> bool:
    """Return whether a module is the user's own: no part of Python, of an installed package, or of us."""
    if not isinstance(module, str) or module.partition(".")[0] in ("torch", "farthing", "builtins"):
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return module == "__main__"
    return not file.startswith(_INSTALLED) and "site-packages" not in file
