"""A line on standard error that follows something long, where that is a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Show = Callable[[str, float | None], None]  # what is going on, and how much of the total is done


@contextmanager
def progress(quiet: bool, beginning: str, total: float | None = 1.0) -> Iterator[Show | None]:
    """A function that moves the line, or None where nobody looks; the line is gone at the end."""
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
