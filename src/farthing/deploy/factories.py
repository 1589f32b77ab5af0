"""Find the factories that a policy or a run's file names, hash their source, and import what was hashed.

A factory is written ``package.module:make_model``. Its hash is the SHA-256 over the paths and bytes of all
files of its top-level package (data and compiled modules too, as a wheel's RECORD lists them), or of the one
file of a module without a package: parties and coordinator can compare it without sending code. What the
package itself imports (PyTorch, say) is not part of it: such packages are trusted as Python is.

**What was hashed is what runs.** Files are read once. Modules are compiled from the bytes that were hashed:
neither a file that is exchanged afterwards nor a ``.pyc`` beside it (which Python would prefer) is executed,
and a module that was not there is not found. The folder of modules is not put on Python's path: a module that
imports another file of it must be a package with that file, so that the hash covers both. Compiled modules
and data files are hashed, too, but read from the disk when the package opens them.

>>> source_hash(["json:loads"]) == source_hash(["json:dumps"])
True
>>> found("json:loads")("[1]")
[1]
"""

import contextlib
import hashlib
import importlib
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
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


@dataclass(frozen=True, slots=True, eq=False)
class _Package:
    """A top-level package or module as it was read: the hash of every file, the bytes of its modules."""

    top: str
    folder: Path | None
    lines: str
    modules: dict[str, tuple[Path, bytes]] = field(default_factory=dict)  # by path: top/inner.py
    others: dict[str, Path] = field(default_factory=dict)

    @classmethod
    def read(cls, top: str, folder: Path | None) -> "_Package":
        lines, modules, others = [], dict[str, tuple[Path, bytes]](), dict[str, Path]()
        for name, path in _files(top, folder):
            content = _content(path)
            lines.append(f"{name}\0{hashlib.sha256(content).hexdigest()}\n")
            if name.endswith(".py"):
                modules.setdefault(name, (path, content))
            else:
                others.setdefault(name, path)
        return cls(top, folder, "".join(lines), modules, others)

    def spec(self, name: str) -> ModuleSpec | None:
        """Return where a module of the package comes from; None where it was not there."""
        stem = name.replace(".", "/")
        for suffix in EXTENSION_SUFFIXES:  # which Python prefers as well
            if (compiled := self.others.get(stem + suffix)) is not None:
                return spec_from_file_location(name, compiled)
        for inner in (f"{stem}/__init__.py", f"{stem}.py"):
            if inner in self.modules:
                path, content = self.modules[inner]
                within = [str(path.parent)] if inner.endswith("__init__.py") else None
                return spec_from_file_location(
                    name, path, loader=_Loader(name, path, content), submodule_search_locations=within
                )
        if any(inner.startswith(f"{stem}/") for inner in self.modules):  # a folder without __init__.py
            return ModuleSpec(name, None, is_package=True)
        return None


class _Loader(SourceFileLoader):
    """A loader that compiles the bytes it was made with, whatever lies on the disk by now."""

    def __init__(self, name: str, path: Path, content: bytes) -> None:
        super().__init__(name, os.fspath(path))
        self._content = content

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self._content, self.path)


class _Sealed(MetaPathFinder):
    """A finder that gives modules of packages that were hashed, from the bytes that were."""

    def __init__(self) -> None:
        self._packages: dict[str, _Package] = {}
        self._lock = threading.Lock()

    def knows(self, top: str, folder: Path | None) -> bool:
        """Return whether a package was read, from where a folder of modules leads as well."""
        return top in self._packages and self._packages[top].folder == folder

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package = self._packages.get(fullname.partition(".")[0])
        if package is None:
            return None
        if (spec := package.spec(fullname)) is None:
            raise ModuleNotFoundError(f"{fullname!r} is no part of what was hashed", name=fullname)
        return spec

    def take(self, package: _Package) -> None:
        """Let modules of a package come from what was read; forget those that came from other bytes."""
        with self._lock:
            known, top = self._packages.get(package.top), package.top
            ours = isinstance(getattr(sys.modules.get(top), "__loader__", None), _Loader)
            if top in sys.modules and not ours:
                _refuse_imported(package)
            elif known is not None and known.lines != package.lines:
                for name in [name for name in sys.modules if name.partition(".")[0] == top]:
                    del sys.modules[name]
            self._packages[top] = package
            if self not in sys.meta_path:
                sys.meta_path.insert(0, self)


_SEALED = _Sealed()


def _refuse_imported(package: _Package) -> None:
    """Refuse a package that this process has imported from other files than those that were hashed."""
    spec = getattr(sys.modules[package.top], "__spec__", None)
    origin = getattr(spec, "origin", None)
    if origin is not None and Path(origin) not in {path for path, _ in package.modules.values()}:
        raise InvalidValue(
            f"module {package.top!r} was imported before, from {origin!r}: give the party's module another "
            "name"
        )


@dataclass(frozen=True, slots=True, eq=False)
class SourceFiles:
    """The source of some factories, read once: its hash, and what is imported."""

    packages: tuple[_Package, ...]

    @classmethod
    def read(cls, names: Iterable[str], folder: Path | None = None) -> "SourceFiles":
        """Read the source of all names, without importing it; ``folder`` is searched last."""
        tops = sorted({parts(name)[0].split(".")[0] for name in names})
        return cls(tuple(_Package.read(top, folder) for top in tops))

    @property
    def hash(self) -> str:
        """Return the hash of all files."""
        lines = "".join(package.lines for package in self.packages)
        return hashlib.sha256(b"farthing source 1\0" + lines.encode()).hexdigest()

    def seal(self) -> None:
        """Let what is imported from now on be what was read."""
        for package in self.packages:
            _SEALED.take(package)


def source_hash(names: Iterable[str], folder: Path | None = None) -> str:
    """Return the hash of the source of all names, without importing it; ``folder`` is searched last."""
    return SourceFiles.read(names, folder).hash


def _files(top: str, folder: Path | None) -> list[tuple[str, Path]]:
    """Return the files of a top-level package, or the one of a module, by their paths in it."""
    spec = _spec(top, folder)
    if spec is None:
        raise InvalidValue(f'there is no module {top!r}: install it, or name its folder, modules = "..."')
    if spec.submodule_search_locations is None:
        if spec.origin is None or not spec.origin.endswith(".py"):
            raise InvalidValue(f"the source of {top!r} is no .py file: its hash would name nothing")
        return [(f"{top}.py", Path(spec.origin))]
    found = [
        (f"{top}/{path.relative_to(root).as_posix()}", path)
        for root in map(Path, spec.submodule_search_locations)
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.relative_to(root).parts
    ]
    if not any(name.endswith(".py") for name, _ in found) or len(found) > _MOST:
        raise InvalidValue(f"package {top!r} has {len(found)} source files: 1 to {_MOST} can be hashed")
    return sorted(found)


def _spec(top: str, folder: Path | None) -> ModuleSpec | None:
    """Return where Python would find a module, whatever was imported already."""
    importlib.invalidate_caches()
    with searching(folder), contextlib.suppress(ImportError, ValueError):
        for finder in sys.meta_path:
            spec = None if finder is _SEALED else finder.find_spec(top, None)
            if spec is not None:
                return spec
    return None


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidValue(f"{str(path)!r} cannot be read: {error.strerror}") from None


def found(name: str, folder: Path | None = None) -> Any:
    """Import what a name stands for, from the source that was sealed; it is read now where none was."""
    module, attribute = parts(name)
    if not _SEALED.knows(module.partition(".")[0], folder):
        SourceFiles.read([name], folder).seal()
    try:
        return getattr(importlib.import_module(module), attribute)
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
