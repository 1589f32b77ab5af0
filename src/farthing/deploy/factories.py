"""Find the factories that a policy or a run's file names, and hash their source before it is imported.

A factory is written ``package.module:make_model``. Its hash is the SHA-256 over the paths and bytes of all
``.py`` files of its top-level package, or of the one file of a module without a package, so that it names
what a wheel's RECORD lists: parties and coordinator can compare it without sending code. What the package
itself imports (PyTorch, say) is not part of it: such packages are trusted as Python is.

>>> source_hash(["json:loads"]) == source_hash(["json:dumps"])
True
>>> found("json:loads")("[1]")
[1]
"""

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from farthing.errors import InvalidValue

_MOST = 20_000  # files of a package


def parts(name: Any) -> tuple[str, str]:
    """Return module and attribute of a factory's name."""
    module, _, attribute = name.partition(":") if isinstance(name, str) else ("", "", "")
    if not all(word.isidentifier() for word in (*module.split("."), attribute)):
        raise InvalidValue(f"a factory must be named as package.module:function, got {name!r}")
    return module, attribute


def source_hash(names: Iterable[str], folder: Path | None = None) -> str:
    """Return the hash of the source of all names, without importing it; ``folder`` is searched last."""
    whole = hashlib.sha256(b"farthing source 1\0")
    with searching(folder):
        for top in sorted({parts(name)[0].split(".")[0] for name in names}):
            for path, file in _files(top):
                whole.update(f"{path}\0{hashlib.sha256(_content(file)).hexdigest()}\n".encode())
    return whole.hexdigest()


def _files(top: str) -> list[tuple[str, Path]]:
    """Return the files of a top-level package, or the one of a module, by their paths in it."""
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise InvalidValue(f'there is no module {top!r}: install it, or name its folder, modules = "..."')
    if spec.submodule_search_locations is None:
        if spec.origin is None or not spec.origin.endswith(".py"):
            raise InvalidValue(f"the source of {top!r} is no .py file: its hash would name nothing")
        return [(f"{top}.py", Path(spec.origin))]
    roots = [Path(place) for place in spec.submodule_search_locations]
    found = [
        (f"{top}/{path.relative_to(root).as_posix()}", path) for root in roots for path in root.rglob("*.py")
    ]
    if not found or len(found) > _MOST:
        raise InvalidValue(f"package {top!r} has {len(found)} source files: 1 to {_MOST} can be hashed")
    return sorted(found)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidValue(f"{str(path)!r} cannot be read: {error.strerror}") from None


def found(name: str, folder: Path | None = None) -> Any:
    """Import what a name stands for; ``folder`` is searched last, and stays on the path of modules."""
    module, attribute = parts(name)
    if folder is not None and os.fspath(folder) not in sys.path:
        sys.path.append(os.fspath(folder))
    try:
        return getattr(import_module(module), attribute)
    except AttributeError:
        raise InvalidValue(f"module {module!r} has no {attribute!r}") from None
    except Exception as error:  # of the party's own module, while no record was read
        raise InvalidValue(f"{name!r} cannot be imported ({type(error).__name__}: {error})") from None


@contextlib.contextmanager
def searching(folder: Path | None) -> Iterator[None]:
    """Search a folder for modules as well, after all others."""
    if folder is None or os.fspath(folder) in sys.path:
        yield
        return
    sys.path.append(os.fspath(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(os.fspath(folder))
