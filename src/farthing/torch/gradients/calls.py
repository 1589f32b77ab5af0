"""Calls of a model with one input or several, and functions over what batches are made of."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

Loss = Callable[[Any, Any], Tensor]


def call(model: Callable[..., Any], inputs: Any) -> Any:
    """The model's outputs; several inputs are a tuple."""
    return model(*inputs) if isinstance(inputs, list | tuple) else model(inputs)


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """``function`` of every tensor in a (nested) tuple."""
    if isinstance(value, list | tuple):
        return tuple(mapped(part, function) for part in value)
    return function(value) if isinstance(value, Tensor) else value


def one(inputs: Any, targets: Any, place: int) -> tuple[Any, Any]:
    """The example at a place, as a batch of one."""

    def pick(x: Tensor) -> Tensor:
        return x[place : place + 1]

    return mapped(inputs, pick), mapped(targets, pick)
