"""Leave the optimiser's step to a framework that keeps its own loop.

Lightning and Hugging Face's Trainer call the optimiser themselves, between their own hooks. `defer` makes a
run stop each update when the released gradient is in the parameters' ``grad``; the framework then takes the
step, which is post-processing.

>>> import farthing as ft
>>> model = torch.nn.Linear(3, 2)
>>> data = torch.randn(4000, 3), torch.randint(2, (4000,))
>>> loss = torch.nn.CrossEntropyLoss(reduction="none")
>>> training = ft.torch.train(model, loss, data, epsilon=1.0, delta=1e-5, steps=5)
>>> optimizer = defer(training)
>>> before = model.weight.detach().clone()
>>> _ = next(training)
>>> bool((model.weight == before).all()), model.weight.grad is not None
(True, True)
>>> optimizer.step()
>>> bool((model.weight == before).all())
False
"""

from typing import Any, cast

import torch

from farthing.errors import InvalidValue
from farthing.torch.training.loop import Training


def defer(training: Training) -> torch.optim.Optimizer:
    """Make ``training`` leave its steps to the caller, and return the optimiser that takes them.

    Its learning rate follows the run's own rule where the run chose it; a scheduler or an average of weights
    belongs to whoever takes the steps.
    """
    state = training.state_dict()
    for name, what in (("scheduler", "a scheduler"), ("averaged", "an average of weights")):
        if state[name] is not None:
            raise InvalidValue(f"{what} follows steps that are taken elsewhere here: leave it out of train")
    optimizer = training.optimizer
    training.optimizer = cast(torch.optim.Optimizer, _Deferred(optimizer))
    return optimizer


_OURS = "t", "clip", "terms"  # of a run's state, what frameworks do not keep by themselves


class Remainder:
    """The state of a run in a framework's checkpoint, beside weights and optimiser; never the spend."""

    def __init__(self, training: Training) -> None:
        self._training = training

    def state_dict(self) -> dict[str, Any]:
        """Return step number, clipping norm and terms."""
        state = self._training.state_dict()
        return {name: state[name] for name in _OURS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from such a state; weights and optimiser stay as the framework restored them."""
        self._training.load_state_dict({**self._training.state_dict(), **state})


class _Deferred:
    """An optimiser without its step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        if hasattr(optimizer, "expect"):
            self.expect = optimizer.expect

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the optimiser's own, also after it was restored."""
        return self._optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, before the next batch is asked for."""
        self._optimizer.zero_grad(set_to_none)

    def step(self) -> None:
        """Do nothing: the framework calls the step of the optimiser itself."""

    def state_dict(self) -> dict[str, Any]:
        """Return the optimiser's state."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the optimiser."""
        self._optimizer.load_state_dict(state_dict)
