"""Find the factories that a policy or a run's file names, hash their source, and import what was hashed.

A factory is written ``package.module:make_model``. Its hash is the SHA-256 over the paths and bytes of all
files of its top-level package (data and compiled modules too, as a wheel's RECORD lists them), or of the one
file of a module without a package: parties and coordinator can compare it without sending code. The hash does
not cover other packages that the package imports (such as PyTorch): these are trusted like Python itself.

**What was hashed is what runs.** Files are read once. Modules are compiled from the bytes that were hashed:
neither a file that is exchanged afterwards nor a ``.pyc`` beside it (which Python would prefer) is executed,
and a module that was not there is not found. Compiled modules are loaded from a private copy of those bytes.
A package that this process imported before it was hashed is refused, wherever it came from: nobody can say
which bytes Python ran then. So is one that is read again with other content. Therefore a guard hashes all
packages of its policy before it imports any, and one that imports another gets what was hashed, too. This
library itself is the exception: its code is running already. The folder of modules is not put on Python's
path: a module that imports another file of it must be a package with that file, so that the hash covers both.
Data files are hashed, too; ``pkgutil.get_data`` refuses those that changed, ``open`` reads what is there.

>>> source_hash(["this:s"]) == source_hash(["this:d"])
True
>>> found("tabnanny:format_witnesses")([(8, 0, 0)])
'at tab size 8'
"""

import contextlib
import hashlib
import importlib
import linecache
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec, SourceFileLoader
from importlib.util import decode_source, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any
from weakref import WeakSet

from farthing.errors import InvalidValue

OWN = "farthing"
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
    digests: dict[str, str]  # the SHA-256 of every file, by its path in the package: top/inner.py
    paths: dict[str, Path]
    modules: dict[str, bytes]  # the bytes of those files that Python runs

    @classmethod
    def read(cls, top: str, folder: Path | None) -> "_Package":
        digests, paths, modules = dict[str, str](), dict[str, Path](), dict[str, bytes]()
        for name, path in _files(top, folder):
            content = _content(path)
            digests[name], paths[name] = hashlib.sha256(content).hexdigest(), path
            if name.endswith((".py", *EXTENSION_SUFFIXES)):
                modules[name] = content
        return cls(top, folder, digests, paths, modules)

    @property
    def lines(self) -> str:
        """Return what is hashed: one line a file."""
        return "".join(f"{name}\0{digest}\n" for name, digest in sorted(self.digests.items()))

    def spec(self, name: str) -> ModuleSpec | None:
        """Return where a module of the package comes from; None where it was not there."""
        stem = name.replace(".", "/")
        for suffix in EXTENSION_SUFFIXES:  # which Python prefers as well
            if (content := self.modules.get(stem + suffix)) is not None:
                return _compiled(name, self.paths[stem + suffix].name, content)
        for inner in (f"{stem}/__init__.py", f"{stem}.py"):
            if (content := self.modules.get(inner)) is not None:
                path = self.paths[inner]
                within = [os.fspath(path.parent)] if inner.endswith("__init__.py") else None
                loader = _Loader(name, os.fspath(path), content, self)
                return spec_from_file_location(name, path, loader=loader, submodule_search_locations=within)
        if any(inner.startswith(f"{stem}/") for inner in self.modules):  # a folder without __init__.py
            return ModuleSpec(name, _Loader(name, "", b"", self), is_package=True)
        return None

    def data(self, path: str) -> bytes:
        """Return a data file that is as it was hashed; `OSError` for any other."""
        content = Path(path).read_bytes()
        names = [name for name, own in self.paths.items() if os.fspath(own) == os.path.normpath(path)]
        if hashlib.sha256(content).hexdigest() not in [self.digests[name] for name in names]:
            raise OSError(f"{path!r} is not the file that was hashed")
        return content


_RUN: "WeakSet[ModuleType]" = WeakSet()  # the modules that were made from what was hashed
_COPIES: list[TemporaryDirectory[str]] = []


class _Loader(SourceFileLoader):
    """A loader that compiles the bytes it was made with, whatever lies on the disk by now."""

    def __init__(self, name: str, path: str, content: bytes, package: _Package) -> None:
        super().__init__(name, path)
        self._content, self._package = content, package

    def get_code(self, fullname: str) -> Any:
        source = decode_source(self._content)
        # `inspect` and `torch.jit` read the source again: let it be this one, not what is on the disk
        if self.path:
            linecache.cache[self.path] = len(source), None, source.splitlines(keepends=True), self.path
        return self.source_to_code(self._content, self.path)

    def get_data(self, path: str) -> bytes:
        return self._content if path == self.path else self._package.data(path)

    def exec_module(self, module: ModuleType) -> None:
        _RUN.add(module)
        super().exec_module(module)


class _CompiledLoader(ExtensionFileLoader):
    """A loader of a compiled module, from a private copy of the bytes that were hashed."""

    def exec_module(self, module: ModuleType) -> None:
        _RUN.add(module)
        super().exec_module(module)


def _compiled(name: str, file: str, content: bytes) -> ModuleSpec | None:
    """Return the spec of a compiled module, copied where only this user can write."""
    _COPIES.append(TemporaryDirectory(prefix="farthing-"))
    path = Path(_COPIES[-1].name) / file
    path.write_bytes(content)
    return spec_from_file_location(name, path, loader=_CompiledLoader(name, os.fspath(path)))


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

    def take(self, packages: Iterable[_Package]) -> None:
        """Let modules of packages come from what was read; refuse those that other bytes were run of."""
        with self._lock:
            for package in packages:
                known = self._packages.get(package.top)
                if known is not None and known.lines != package.lines:
                    raise InvalidValue(
                        f"the source of {package.top!r} is not what this process hashed before: start anew"
                    )
                self.refuse_others(package.top)
            self._packages |= {package.top: package for package in packages if package.top != OWN}
            self.lead()

    def lead(self) -> None:
        """Come before every other finder."""
        if sys.meta_path[:1] != [self]:
            sys.meta_path[:] = [self, *(finder for finder in sys.meta_path if finder is not self)]

    @staticmethod
    def refuse_others(top: str) -> None:
        """Refuse a package of which this process has a module that was not made from what was hashed."""
        for name, module in list(sys.modules.items()) if top != OWN else ():
            if name.partition(".")[0] == top and module not in _RUN:
                origin = getattr(getattr(module, "__spec__", None), "origin", None)
                raise InvalidValue(
                    f"module {name!r} was imported before its source was hashed, from {origin!r}: import "
                    "nothing of it yourself, or give the party's module another name"
                )


_SEALED = _Sealed()


@dataclass(frozen=True, slots=True, eq=False)
class SourceFiles:
    """The source of some factories, read once: its hash, and what is imported."""

    packages: tuple[_Package, ...]

    @classmethod
    def read(cls, names: Iterable[str], folder: Path | None = None) -> "SourceFiles":
        """Read the source of all names, without importing it; ``folder`` is searched last."""
        return cls(tuple(_Package.read(top, folder) for top in _tops(names)))

    def hash(self, names: Iterable[str]) -> str:
        """Return the hash of all files of the packages of some of the names."""
        tops = _tops(names)
        lines = "".join(package.lines for package in self.packages if package.top in tops)
        return hashlib.sha256(b"farthing source 1\0" + lines.encode()).hexdigest()

    def seal(self) -> None:
        """Let what is imported from now on be what was read."""
        _SEALED.take(self.packages)


def _tops(names: Iterable[str]) -> list[str]:
    return sorted({parts(name)[0].split(".")[0] for name in names})


def source_hash(names: Iterable[str], folder: Path | None = None) -> str:
    """Return the hash of the source of all names, without importing it; ``folder`` is searched last."""
    names = list(names)
    return SourceFiles.read(names, folder).hash(names)


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
    top = module.partition(".")[0]
    if not _SEALED.knows(top, folder):
        SourceFiles.read([name], folder).seal()
    _SEALED.lead()
    try:
        made = getattr(importlib.import_module(module), attribute)
    except AttributeError:
        raise InvalidValue(f"module {module!r} has no {attribute!r}") from None
    except Exception as error:  # of the party's own module, while no record was read
        raise InvalidValue(f"{name!r} cannot be imported ({type(error).__name__}: {error})") from None
    _SEALED.refuse_others(top)
    return made


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
