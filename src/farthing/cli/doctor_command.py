"""Provide the command ``farthing doctor``, which lists the optional parts that this machine has or lacks."""

import contextlib
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

import farthing
from farthing.cli.options import FAILED, AsJson, emit_json

_CORE = "numpy", "scipy", "scikit-learn", "dp-accounting", "cryptography"
_SLOW_COMMIT = 0.2  # seconds of a durable commit above which training waits for the disk
_QUICK_COMMIT = 2e-5  # below which no disk has been asked
_FIRST_YEAR = 2024  # an earlier clock is wrong: certificates and records of charges carry the date


class Finding(NamedTuple):
    """One line of the output: the part that was checked, whether it works, and a remark."""

    name: str
    state: str  # "ok", "missing" (something optional), "warning" or "failed"
    text: str


def doctor(
    folder: Annotated[
        Path, typer.Option(metavar="DIR", help="The folder in which you will keep ledgers.")
    ] = Path(),
    as_json: AsJson = False,
) -> int:
    """Check this machine and list missing optional parts.

    Nothing is changed: a few bytes are written to a temporary file in DIR, to time a durable commit. The exit
    code is 1 where something that farthing needs does not work.
    """
    checks: tuple[Callable[[], Finding], ...] = (
        _python,
        *(lambda name=name: _package(name) for name in _CORE),
        _compiler,
        lambda: _disk(folder),
        _clock,
        _torch,
        lambda: _optional("flwr", "parties on machines of their own"),
        lambda: _optional("matplotlib", "figures of experiments"),
        lambda: _optional("pyarrow", "Parquet files"),
    )
    found = [check() for check in checks]
    failed = any(finding.state == "failed" for finding in found)
    if as_json:
        emit_json({"ok": not failed, "checks": [finding._asdict() for finding in found]})
    else:
        width = max(len(finding.name) for finding in found)
        for name, state, text in found:
            print(f"{state:8} {name:{width}}  {text}")
    return FAILED if failed else 0


def _python() -> Finding:
    where = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    supported = sys.version_info >= (3, 11) and os.name == "posix"
    return Finding(f"farthing {farthing.__version__}", "ok" if supported else "failed", where)


def _package(name: str) -> Finding:
    try:
        return Finding(name, "ok", version(name))
    except PackageNotFoundError:
        return Finding(name, "failed", f"not installed: pip install {name}")


def _optional(name: str, use: str) -> Finding:
    if find_spec(name) is None:
        return Finding(name, "missing", f"for {use}: pip install {name}")
    with contextlib.suppress(PackageNotFoundError):
        return Finding(name, "ok", f"{version(name)}, for {use}")
    return Finding(name, "ok", f"for {use}")


def _compiler() -> Finding:
    from farthing.noise import native

    if os.environ.get("FARTHING_NATIVE", "1") == "0":
        return Finding("C kernels", "missing", "switched off by FARTHING_NATIVE=0; numpy takes their place")
    if native.kernels() is None:
        return Finding("C kernels", "missing", "no C compiler (cc, gcc, clang): slower, same results")
    return Finding("C kernels", "ok", "built by the C compiler of this machine")


def _disk(folder: Path) -> Finding:
    """Time a commit: a ledger makes one before every answer, or every block of answers."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".farthing-doctor-") as file:
            taken = sorted(_commit(file.fileno()) for _ in range(9))[4]
    except OSError as error:
        reason = error.strerror or type(error).__name__
        return Finding("disk", "failed", f"{str(folder)!r} cannot be written to: {reason}")
    text = f"a durable commit takes {1e3 * taken:.2f} ms in {str(folder)!r}"
    if taken > _SLOW_COMMIT:
        return Finding("disk", "warning", f"{text}: reserve answers in larger blocks, or use another disk")
    if taken < _QUICK_COMMIT:
        return Finding("disk", "warning", f"{text}: too fast for a disk, so a power cut may undo a charge")
    return Finding("disk", "ok", text)


def _commit(file: int) -> float:
    from farthing.ledger.journal_head import to_disk

    begun = time.perf_counter()
    os.write(file, b"farthing")
    to_disk(file)
    return time.perf_counter() - begun


def _clock() -> Finding:
    year = time.gmtime().tm_year
    state = "ok" if year >= _FIRST_YEAR else "failed"
    return Finding("clock", state, time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()))


def _torch() -> Finding:
    found = _optional("torch", "networks")
    if found.state != "ok":
        return found
    cuda = import_module("torch.cuda")
    device = cuda.get_device_name() if cuda.is_available() else "no GPU"
    return found._replace(text=f"{found.text}; {device}")
