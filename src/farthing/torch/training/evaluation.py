"""Looking at a run without looking at its records.

A loss or an accuracy on training data is a release like any other, and nobody paid for it. So training shows
none; `evaluate` is for data outside the guarantee: public, or held out from people who agreed to it.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from farthing import validate
from farthing.errors import NotPrivate
from farthing.torch.checks import overlap
from farthing.torch.gradients.tape import call
from farthing.torch.training.records import Examples


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
    if overlap.shared(examples.data):
        warnings.warn(
            "these are records that a model was trained on: this value is not private, and no guarantee "
            "covers it; evaluate on public data, or on records that were held out and may be used so",
            NotPrivate,
            stacklevel=3,
        )
    training, total = model.training, 0.0
    model.eval()
    try:
        for inputs, targets, _ in examples.take(slice(None)).physical_batches(
            validate.count(physical_batch_size=physical_batch_size)
        ):
            outputs = call(model, inputs)
            found = (outputs.argmax(-1) == targets).float() if loss is None else loss(outputs, targets)
            total += float(found.double().sum())
    finally:
        model.train(training)
    return total / len(examples)
