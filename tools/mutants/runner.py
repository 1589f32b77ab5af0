"""Run mutants: each in a copy of the tree, with the tests named for it, in a process forked from this one.

Libraries are imported once, here, and never farthing itself, so that a run costs little more than its tests.
Outcomes are kept in build/mutants.json and not run again until the source or one of the tests changes.
"""

import contextlib
import hashlib
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.mutants.catalog import SOURCE, Mutant

KILLED, SURVIVED, SLOW, BROKEN = "killed", "survived", "killed (too slow)", "broken"
_PARTS = ("src", "tests", "tools", "docs", "examples", "experiments", "benchmarks")
_FILES = ("pyproject.toml", "conftest.py", "README.md", "CHANGELOG.md", "Makefile", "LICENSE", "NOTICE")
_HEAVY = (
    *("pytest", "hypothesis", "numpy", "scipy.stats", "scipy.special", "sklearn.linear_model", "sklearn.svm"),
    *("sklearn.utils.estimator_checks", "dp_accounting", "mpmath", "cryptography.hazmat.primitives.ciphers"),
    *("typer", "rich.console", "torch", "torch.func"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a mutant, and its seconds."""

    mutant: Mutant
    verdict: str
    seconds: float
    said: str = ""


class Tree:
    """A copy of the sources and tests, in which one line at a time is wrong."""

    def __init__(self, root: Path, place: Path) -> None:
        self.place = place
        for name in _PARTS:
            if (root / name).is_dir():
                shutil.copytree(root / name, place / name, ignore=shutil.ignore_patterns("*.ledger*"))
        for path in (*(root / name for name in _FILES), *root.glob("constraints*.txt")):
            if path.exists():
                shutil.copy2(path, place)

    @contextlib.contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        path = self.place / SOURCE / mutant.file
        text, times = path.read_text(encoding="utf-8"), path.stat()
        try:
            path.write_text(mutant.applied(text), encoding="utf-8")
            os.utime(path, (times.st_atime + 1, times.st_mtime + 1))  # so that no old compiled file matches
            yield
        finally:
            path.write_text(text, encoding="utf-8")
            os.utime(path, (times.st_atime, times.st_mtime))


def warm_up() -> None:
    """Import what tests import, except farthing."""
    for name in _HEAVY:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def fork_tests(tree: Tree, tests: str, log: Path) -> int:
    """Start a process that runs ``tests`` in the tree, and return its id; its exit code is pytest's."""
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(out, number)
        os.chdir(tree.place)
        os.environ["PYTHONPATH"] = str(tree.place / "src")
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        os.environ["XDG_CACHE_HOME"] = str(tree.place.parent / "cache")
        sys.dont_write_bytecode = True
        sys.path[:0] = [str(tree.place / "src")]
        import pytest

        options = [
            "-x",
            "-q",
            "--no-header",
            "-W",
            "ignore::pytest.PytestAssertRewriteWarning",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "-m",
            "not slow",
        ]
        code = int(pytest.main([*options, *tests.split()]))
        sys.stdout.flush()
        os._exit(code)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(70)


def verdict(code: int) -> str:
    """Return the verdict for pytest's exit code; 4 and 5 mean that no test ran."""
    return SURVIVED if code == 0 else BROKEN if code in (4, 5, 70) else KILLED


class Keeper:
    """A file of outcomes, under a digest of everything that they depend on."""

    def __init__(self, root: Path, path: Path) -> None:
        self.root, self.path = root, path
        self._keys: dict[Mutant, str] = {}  # digests of files before the run
        self.known: dict[str, list[object]] = json.loads(path.read_text()) if path.exists() else {}

    def key(self, mutant: Mutant) -> str:
        digest = hashlib.sha256(repr((mutant.file, mutant.old, mutant.new)).encode())
        named = [self.root / name.split("::")[0] for name in mutant.tests.split() if not name.startswith("-")]
        files = [path for place in named for path in ([place] if place.is_file() else place.glob("*.py"))]
        for path in (self.root / SOURCE / mutant.file, *sorted(files)):
            digest.update(path.read_bytes())
        return digest.hexdigest()

    def find(self, mutant: Mutant) -> Outcome | None:
        found = self.known.get(self._keys.setdefault(mutant, self.key(mutant)))
        return None if found is None else Outcome(mutant, str(found[0]), float(str(found[1])))

    def keep(self, outcome: Outcome) -> None:
        self.known[self._keys[outcome.mutant]] = [outcome.verdict, outcome.seconds, outcome.mutant.name]
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text(json.dumps(self.known, indent=0))


def run(mutants: Iterable[Mutant], root: Path, workers: int, seconds: float) -> Iterator[Outcome]:
    """Yield the outcome of each mutant as it comes, ``workers`` at a time, each within ``seconds``."""
    waiting, running = list(mutants)[::-1], dict[int, tuple[Mutant, Tree, float, contextlib.ExitStack]]()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        free = [Tree(root, _made(Path(folder) / str(number))) for number in range(workers)]
        try:
            while waiting or running:
                while waiting and free:
                    mutant, tree, stack = waiting.pop(), free.pop(), contextlib.ExitStack()
                    try:
                        stack.enter_context(tree.changed(mutant))
                        _compiled(tree.place / SOURCE / mutant.file)
                    except (ValueError, OSError, SyntaxError) as error:
                        stack.close()
                        free.append(tree)
                        yield Outcome(mutant, BROKEN, 0.0, str(error))
                        continue
                    child = fork_tests(tree, mutant.tests, tree.place / "log")
                    running[child] = mutant, tree, time.monotonic(), stack
                yield from _ended(running, free, seconds)
        finally:
            for child, (*_, stack) in running.items():
                _kill(child)
                stack.close()


def _compiled(path: Path) -> None:
    """Check that a mutant compiles."""
    if path.suffix == ".py":
        compile(path.read_text(encoding="utf-8"), str(path), "exec")


def _made(place: Path) -> Path:
    place.mkdir()
    return place


def _ended(
    running: dict[int, tuple[Mutant, Tree, float, contextlib.ExitStack]], free: list[Tree], seconds: float
) -> Iterator[Outcome]:
    """Yield the processes that have ended, or run too long."""
    time.sleep(0.02)
    for child, (mutant, tree, began, stack) in list(running.items()):
        took = time.monotonic() - began
        ended, status = os.waitpid(child, os.WNOHANG)
        if not ended and took < seconds:
            continue
        _kill(child)  # and the processes that it started
        del running[child]
        stack.close()
        free.append(tree)
        found = verdict(os.waitstatus_to_exitcode(status)) if ended else SLOW
        said = (tree.place / "log").read_text(errors="replace")
        yield Outcome(mutant, found, took, said[-2000:])


def _kill(child: int) -> None:
    """Kill a run with its whole session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)
