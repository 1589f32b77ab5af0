"""Run child processes that end with their parent, together with their whole process group.

A child's standard input is a pipe that closes when its parent ends, however it ends; our own programs watch
it (`end_with_parent`). Other programs get the parent's process id, where they can watch it.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_GRACE = 5.0  # seconds between SIGTERM and SIGKILL
_STEADY = 20.0  # seconds: a child that lived as long is restarted at once


class Child:
    """A program in a session of its own that prints to a file; only its owner can read its files."""

    def __init__(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.command, self.log = list(command), log
        self._environment = None if environment is None else dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._started, self._failures = 0.0, 0
        self.starts = 0  # how often it was started

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def code(self) -> int | None:
        """Return the exit code of a program that has ended."""
        return None if self._process is None else self._process.poll()

    @property
    def running(self) -> bool:
        return self._process is not None and self.code is None

    def start(self) -> None:
        """Start the program, after ending what is left of an earlier start."""
        self.stop()
        with open(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as output:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=self._environment,
                start_new_session=True,
                umask=0o077,  # files that it writes are readable by its owner only
            )
        self._started, self.starts = time.monotonic(), self.starts + 1

    def revive(self) -> bool:
        """Restart the program if it has ended, with growing delays; return whether it was started."""
        if self.running:
            return False
        lived = time.monotonic() - self._started
        if lived >= _STEADY:
            self._failures = 0
        if self._process is not None and lived < min(30.0, 0.5 * 2**self._failures):
            return False
        self._failures += self._process is not None
        self.start()
        return True

    def stop(self) -> None:
        """End the program and every process that it started."""
        if self._process is None:
            return
        stdin: IO[bytes] | None = self._process.stdin
        if stdin is not None:
            with contextlib.suppress(OSError):
                stdin.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE)
        self._process = None


def end_with_parent() -> None:
    """End this process and its group once its standard input closes."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1024):
                pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def program(name: str) -> str:
    """Return the path of a program that was installed beside this Python."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else name
