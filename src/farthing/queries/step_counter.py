"""Show on one line of text how far a run is.

>>> counter = StepCounter(sys.stdout)
>>> counter.end(3)  # doctest: +NORMALIZE_WHITESPACE
3 steps in 0 s
"""

import sys
import time
from typing import TextIO

_OFTEN = 0.2  # seconds between two updates


class StepCounter:
    """Write the number of steps and the time since the first one, on standard error unless told otherwise.

    An algorithm that runs until its budget is spent states no number of steps ahead, so there is no bar.
    """

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = sys.stderr if out is None else out
        self._first = self._last = time.monotonic()

    def show(self, steps: int) -> None:
        """Write the line anew, not too often."""
        if time.monotonic() - self._last >= _OFTEN:
            self._write(steps, "")

    def end(self, steps: int) -> None:
        """Write the line a last time, and end it."""
        self._write(steps, "\n")

    def _write(self, steps: int, end: str) -> None:
        self._last = time.monotonic()
        unit = "step" if steps == 1 else "steps"
        self._out.write(f"\r{steps:,} {unit} in {self._last - self._first:.0f} s   {end}")
        self._out.flush()
