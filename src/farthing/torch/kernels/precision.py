"""How precisely a GPU multiplies float32: it may round factors to ten bits (TF32) where that is allowed.

A norm and the sum that it bounds may be found in different ways. Where both are coarse they differ by what
their products lose, and norms are rounded up by that; where that is not done, both are made `exact`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn


def coarse(device: torch.device) -> bool:
    """Whether matrix products on a device may round their factors to ten bits."""
    if device.type != "cuda":
        return False
    matmul: Any = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):
        return matmul.fp32_precision not in ("none", "ieee")
    return bool(matmul.allow_tf32)  # before PyTorch 2.9


@contextmanager
def exact(device: torch.device) -> Iterator[None]:
    """Products and convolutions on a GPU in full float32."""
    if device.type != "cuda":
        yield
        return
    kinds: tuple[Any, Any] = torch.backends.cuda.matmul, torch.backends.cudnn
    name, full = "allow_tf32", cast(Any, False)  # before PyTorch 2.9
    if hasattr(kinds[0], "fp32_precision"):
        kinds, name, full = (kinds[0], kinds[1].conv), "fp32_precision", "ieee"
    before = [getattr(kind, name) for kind in kinds]
    try:
        for kind in kinds:
            setattr(kind, name, full)
        yield
    finally:
        for kind, old in zip(kinds, before, strict=True):
            setattr(kind, name, old)


@contextmanager
def without_cudnn(model: nn.Module) -> Iterator[None]:
    """Recurrent layers by torch's own kernels: cuDNN's have a backward pass in training mode only.

    A check switches dropout between layers off by that mode, and a model may be in eval mode by choice.
    """
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    before = torch.backends.cudnn.enabled
    if not recurrent or not before or next(model.parameters()).device.type != "cuda":
        yield
        return
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before
