"""A finished update of a training run, in public numbers: what callbacks, stop rules and `adapt=` may see."""

from dataclasses import dataclass

from torch import Tensor

from farthing.queries import query as asking


@dataclass(frozen=True, slots=True, eq=False)
class Step(asking.Step):
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
