"""Progress of a long command: a line on a terminal, and a way to end it early."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

Show = Callable[[str, float | None], None]  # what is going on, and how much of the total is done


@contextmanager
def progress(quiet: bool, beginning: str, total: float | None = 1.0) -> Iterator[Show | None]:
    """A function that moves a line on standard error, or None where nobody looks; it is gone at the end."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    parts = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*parts, console=Console(stderr=True), transient=True) as line:
        task = line.add_task(beginning, total=total)

        def show(words: str, done: float | None) -> None:
            line.update(task, completed=done, description=words)

        yield show


@contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether to end: after one Ctrl-C or SIGTERM; a second ends at once."""
    asked: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    if threading.current_thread() is not threading.main_thread():  # only that one has signals
        yield lambda: False
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
