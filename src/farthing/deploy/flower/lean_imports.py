"""Import Flower's node without the web servers that its modules name and a node never runs.

Of the seconds until a node has joined, half went into the import of FastAPI, of requests and of a command
line. `leave_out_servers` puts stand-ins in their places: a package whose own code runs when somebody asks it
for a name, and one module of Flower that translates a server's errors, without which the others import. Where
Flower is another than expected, that is, where an import fails, everything is imported as it is.
"""

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

_LATER = ("flwr", "fastapi", "requests")  # packages whose code runs on demand
_UNUSED = "flwr.supercore.error.http"  # translates errors of a server for its clients
_NODE = "flwr.supernode.fleet_http_connection"
_COMMANDS = "httpx._main"  # httpx goes without its command line where this cannot be imported


class _Later(ModuleType):
    """A package whose own code runs when a name is asked for that none of its modules has set."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":  # the import system looks for some
            raise AttributeError(name)
        self.__class__ = ModuleType  # type: ignore[assignment]
        assert self.__spec__ is not None
        assert self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


class _Unused(ModuleType):
    """A module each of whose names is an exception that nobody raises."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Exception,), {})


def leave_out_servers() -> bool:
    """Import Flower's node; return whether it came without servers. Does nothing where Flower is loaded."""
    if "flwr" in sys.modules:
        return False
    before = set(sys.modules)
    try:
        for name in _LATER:
            if name not in sys.modules:
                _defer(name)
        if "httpx" not in sys.modules:
            sys.modules[_COMMANDS] = None  # type: ignore[assignment]
        sys.modules[_UNUSED] = _Unused(_UNUSED)
        sys.modules["fastapi"].status = importlib.import_module("starlette.status")  # type: ignore[attr-defined]
        importlib.import_module(_NODE)
    except Exception:  # of modules that are others in another version
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in (*_LATER, "httpx"):
                del sys.modules[name]
        return False
    return True


def _defer(name: str) -> None:
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ImportError(name)
    module = importlib.util.module_from_spec(spec)
    module.__class__ = _Later
    sys.modules[name] = module
