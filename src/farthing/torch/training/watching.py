"""Show a run to people: steps in public numbers, a progress line, callbacks, and scores on public data.

All of this uses `TrainingStep.public`: released values and public numbers. A loss or an accuracy on training
records is a release like any other, and nothing was paid for it, so training shows none. `evaluate` is for
data outside the guarantee: public data, or data held out from people who agreed to it.
"""

import math
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from farthing import validate
from farthing.errors import NotPrivate
from farthing.queries import query as asking
from farthing.torch.checks import overlap
from farthing.torch.gradients.plain import evaluating
from farthing.torch.gradients.tape import call
from farthing.torch.training.records import Examples

_WIDTH = 24
_OFTEN = 0.1  # seconds between two lines, at least


@dataclass(frozen=True, slots=True, eq=False)
class TrainingStep(asking.Step):
    """A finished update, in public numbers.

    Attributes
    ----------
    t : int
        Number of the update, from 1.
    w : nn.Module
        The model, moved in place.
    receipts : tuple of Receipt
        What the ledger charged for this update, one a batch.
    expected_batch_size : float
        Sampling rate times number of examples: by this, and not by the size of the batch that was drawn,
        sums are divided.
    clip_norm : float
        The norm that no example's gradient exceeded.
    noise_multiplier : float
        Standard deviation of the noise over ``clip_norm``.
    share : float
        The part of the planned batches that is used, from 0 to 1; of the budget, where nothing is promised.
    left : int
        Planned batches to come; where nothing is promised, how many more would fit on the present terms.
    gradient_norm : float or Tensor
        Norm of the released mean gradient, noise included: a number on the model's device, which waits for
        it when it is looked at, ``float(step.gradient_norm)``.
    noise_norm : float or Tensor
        Root mean square norm of the noise in it.

    Examples
    --------
    >>> import torch
    >>> from farthing.torch.training.loop import train
    >>> data = torch.randn(4000, 3), torch.randint(2, (4000,))
    >>> loss = torch.nn.CrossEntropyLoss(reduction="none")
    >>> how = {"epsilon": 1.0, "delta": 1e-5, "sampling_rate": 0.01, "steps": 4}
    >>> step = next(train(torch.nn.Linear(3, 2), loss, data, **how))
    >>> step.t, step.expected_batch_size, step.left, float(step.gradient_norm) > 0
    (1, 40.0, 3, True)
    """

    expected_batch_size: float = 0.0
    clip_norm: float = 0.0
    noise_multiplier: float = 0.0
    share: float = 0.0
    left: int = 0
    gradient_norm: float | Tensor = 0.0
    noise_norm: float | Tensor = 0.0

    @property
    def public(self) -> dict[str, float]:
        """Return the numbers of this step by name, for a log; waits for the model's device."""
        names = "share", "left", "expected_batch_size", "clip_norm", "noise_multiplier"
        return {name: float(getattr(self, name)) for name in (*names, "gradient_norm", "noise_norm")}


def to_tensorboard(writer: Any, prefix: str = "privacy/") -> Callable[[TrainingStep], None]:
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

    def log(step: TrainingStep) -> None:
        for name, value in step.public.items():
            writer.add_scalar(f"{prefix}{name}", value, step.t)

    return log


def to_wandb(run: Any, prefix: str = "privacy/") -> Callable[[TrainingStep], None]:
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

    def log(step: TrainingStep) -> None:
        run.log({f"{prefix}{name}": value for name, value in step.public.items()}, step=step.t)

    return log


class ProgressLine:
    """One line of text that follows a run: batches, time left, clipping norm, noise multiplier.

    >>> line = ProgressLine(sys.stdout)
    >>> line.show(TrainingStep(4, None, (), 40.0, 1.0, 2.0, share=1.0, left=0), steps=4)
    ... # doctest: +NORMALIZE_WHITESPACE
    4 of 4 batches [########################] 0 s left, clipping norm 1, noise multiplier 2
    """

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = sys.stderr if out is None else out
        self._first, self._last, self._begun = time.monotonic(), -math.inf, 0

    def show(self, step: TrainingStep, steps: int) -> None:
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


@torch.no_grad()
def evaluate(
    model: nn.Module,
    public: Any,
    loss: Callable[[Any, Any], Tensor] | None = None,
    *,
    physical_batch_size: int = 1024,
) -> float:
    """Return the share of right classes on public data, or the mean of a loss.

    Warns (`farthing.errors.NotPrivate`) where these are records that a run of this process was trained on.

    Parameters
    ----------
    model : nn.Module
        The model; it is put into evaluation mode meanwhile.
    public : Examples or Dataset or tuple of tensors
        Data outside the guarantee: public, or held out from people who agreed to it.
    loss : callable, optional
        ``loss(outputs, targets)`` returns one value a record. None: whether the largest output is the target.
    physical_batch_size : int, default 1024
        Rows that go through the model at once.

    Returns
    -------
    float
        The mean over records.

    Examples
    --------
    >>> model = nn.Linear(1, 2, bias=False)
    >>> _ = model.weight.data.copy_(torch.tensor([[-1.0], [1.0]]))
    >>> evaluate(model, (torch.tensor([[1.0], [2.0], [-1.0]]), torch.tensor([1, 1, 1])))
    0.6666666666666666
    """
    device = next(model.parameters()).device
    examples = public if isinstance(public, Examples) else Examples(public, device=device)
    warn_of_training_records(examples.data, stacklevel=4)
    total = 0.0
    with evaluating(model):
        for inputs, targets, _ in examples.take(slice(None)).physical_batches(
            validate.count(physical_batch_size=physical_batch_size)
        ):
            outputs = call(model, inputs)
            found = (outputs.argmax(-1) == targets).float() if loss is None else loss(outputs, targets)
            total += float(found.double().sum())
    return total / len(examples)


def warn_of_training_records(data: Any, stacklevel: int = 2) -> None:
    """Warn where a score is about to be computed on records that this process trained on."""
    if overlap.shared(data):
        warnings.warn(
            "these are records that a model was trained on: this value is not private, and no guarantee "
            "covers it; evaluate on public data, or on records that were held out and may be used so",
            NotPrivate,
            stacklevel=stacklevel,
        )
