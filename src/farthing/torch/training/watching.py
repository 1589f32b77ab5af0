"""What people see of a run: a line of progress, and callbacks that log to TensorBoard or Weights & Biases.

All of it is made of `Step.public`: what was released, and public numbers. No loss and no accuracy of training
records is among them, as nobody paid for one; log those of public data yourself.
"""

import math
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from farthing.torch.training.step import Step

_WIDTH = 24
_OFTEN = 0.1  # seconds between two lines, at least


def to_tensorboard(writer: Any, prefix: str = "privacy/") -> Callable[[Step], None]:
    """Return a callback for `train` that writes the public numbers of every step to TensorBoard.

    Parameters
    ----------
    writer : torch.utils.tensorboard.SummaryWriter
        Anything with its ``add_scalar(tag, value, step)``; you close it.
    prefix : str, default "privacy/"
        What tags begin with.

    Returns
    -------
    callable
        For ``train(…, callbacks=[…])``.

    Examples
    --------
    >>> import farthing as ft
    >>> log = ft.torch.to_tensorboard
    >>> callable(log(writer=None))
    True
    """

    def log(step: Step) -> None:
        for name, value in step.public.items():
            writer.add_scalar(f"{prefix}{name}", value, step.t)

    return log


def to_wandb(run: Any, prefix: str = "privacy/") -> Callable[[Step], None]:
    """Return a callback for `train` that logs the public numbers of every step to Weights & Biases.

    Never `wandb.watch` a model: its hooks see gradients before they are clipped.

    Parameters
    ----------
    run : wandb.Run
        Anything with its ``log(values, step=…)``, as ``wandb.init()`` returns it.
    prefix : str, default "privacy/"
        What names begin with.

    Returns
    -------
    callable
        For ``train(…, callbacks=[…])``.

    Examples
    --------
    >>> import farthing as ft
    >>> log = ft.torch.to_wandb
    >>> callable(log(run=None))
    True
    """

    def log(step: Step) -> None:
        run.log({f"{prefix}{name}": value for name, value in step.public.items()}, step=step.t)

    return log


class ProgressLine:
    """One line of text that follows a run: batches, time left, clipping norm, noise multiplier.

    >>> line = ProgressLine(sys.stdout)
    >>> line.show(Step(4, None, (), 40.0, 1.0, 2.0, share=1.0, left=0), steps=4)
    ... # doctest: +NORMALIZE_WHITESPACE
    4 of 4 batches [########################] 0 s left, clipping norm 1, noise multiplier 2
    """

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = sys.stderr if out is None else out
        self._first, self._last, self._begun = time.monotonic(), -math.inf, 0

    def show(self, step: Step, steps: int) -> None:
        """Write the line anew, not too often; end it with the last step."""
        now, done = time.monotonic(), steps - step.left
        self._begun = self._begun or done
        if step.left and now - self._last < _OFTEN:
            return
        self._last = now
        ahead = step.left * (now - self._first) / (done - self._begun + 1)
        bar = "#" * round(_WIDTH * done / max(steps, 1))
        self._out.write(
            f"\r{done} of {steps} batches [{bar:.<{_WIDTH}}] {ahead:.0f} s left, "
            f"clipping norm {step.clip_norm:.3g}, noise multiplier {step.noise_multiplier:.3g}   "
        )
        if not step.left:
            self._out.write("\n")
        self._out.flush()
