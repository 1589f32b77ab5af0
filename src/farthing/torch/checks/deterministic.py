"""A model without its random numbers, so that its results can be compared: dropout keeps everything.

While `Calm` is entered, torch's random functions return what they are given or one fixed number for all
examples; a permutation turns the order round, so that whoever mixes by one is seen. Training mode stays,
which `model.eval()` would end: a model may mix examples in training only.

>>> with Calm():
...     torch.rand(2).tolist() == [0.375, 0.375], torch.randperm(3).tolist()
(True, [2, 1, 0])
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_NUMBER = 0.375
_KEPT = {f"{kind}dropout{end}" for kind in ("", "feature_", "alpha_", "feature_alpha_") for end in ("", "_")}
_KEPT |= {"dropout1d", "dropout2d", "dropout3d"}
_FILLED = {"rand", "randn", "rand_like", "randn_like", "normal", "poisson"}
_WRITTEN = {"uniform_", "normal_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_"}


class Calm(TorchFunctionMode):
    """Random functions of torch, without chance."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name in _KEPT:
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention" and len(args) <= 4:
            kwargs["dropout_p"] = 0.0
        elif name == "scaled_dot_product_attention":
            args = (*args[:4], 0.0, *args[5:])
        elif name in ("rrelu", "rrelu_", "multi_head_attention_forward"):
            kwargs["training"], args = False, args[:3] if name.startswith("rrelu") else args
        elif name == "gumbel_softmax":
            return torch.softmax(args[0], kwargs.get("dim", -1))
        elif name in _WRITTEN or name == "bernoulli_":
            floats = args[0].is_floating_point()
            return args[0].fill_(1 if name == "bernoulli_" else _NUMBER if floats else 0)
        found = func(*args, **kwargs)
        if name in _FILLED:
            return torch.full_like(found, _NUMBER, requires_grad=found.requires_grad)
        if name == "bernoulli":
            return torch.ones_like(found)
        if name in ("randint", "randint_like"):
            return torch.zeros_like(found)
        if name == "multinomial":
            return torch.arange(found.shape[-1], device=found.device).expand(found.shape).clone()
        if name == "randperm":
            return torch.arange(len(found) - 1, -1, -1, device=found.device).to(found.dtype)
        return found
