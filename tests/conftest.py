"""What several tests share: one thread a process, and a way to run commands."""

import json
import os
from typing import Any

# Before numpy or torch is imported: workers already fill the cores, and a fork beside threads may hang.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest

from farthing.cli import main as cli


class Done:
    """An exit code, and what went to standard output and standard error."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> dict[str, Any]:
        assert self.out.count("\n") == 1
        fields: dict[str, Any] = json.loads(self.out, parse_constant=pytest.fail)
        return fields


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: object) -> Done:
        code = cli.main([str(argument) for argument in arguments])
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture
def twenty_runs(monkeypatch):
    """Tuning makes twenty runs, so that both of two candidates are drawn, but for one time in a million."""
    monkeypatch.setattr("farthing.accounting.tuning.RunCount.draw", lambda self, stream: 20)
