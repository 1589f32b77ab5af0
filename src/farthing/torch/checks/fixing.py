"""Replace layers that cannot be trained privately.

Batch normalisation is the common one: it computes an example's output from the whole batch, so that no bound
on a gradient bounds what one example does. GroupNorm computes the same from one example's own channels (Wu &
He 2018), and is what private image models use (De et al. 2022).

>>> model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU())
>>> [str(change) for change in changes(model)]
['1 (BatchNorm2d) by GroupNorm(32, 64)']
"""

import copy
import logging
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from farthing.errors import Unsupported

_GROUPS = 32  # as in the paper
_CHANNELS = 8  # in a group, at least, where these may be all there is to normalise by: BatchNorm1d on rows

log = logging.getLogger("farthing.torch")


class FixedLayer(NamedTuple):
    """A layer that cannot be trained privately, and what can be in its place."""

    name: str
    old: nn.Module
    new: nn.Module

    def __str__(self) -> str:
        return f"{self.name or 'the model'} ({type(self.old).__name__}) by {described(self.new)}"


def fix(model: nn.Module) -> nn.Module:
    """Replace layers that mix examples, or keep something of them, and say in the log what was replaced.

    Batch normalisation (`SyncBatchNorm` too) becomes GroupNorm with the same weights, of an InstanceNorm or
    an embedding only what keeps or counts records is switched off. Running statistics are lost. Layers that
    `train` takes as they are stay, such as batch normalisation in eval mode. Make the optimiser afterwards.

    Parameters
    ----------
    model : nn.Module
        The model; its layers are replaced in place.

    Returns
    -------
    nn.Module
        The model, or what replaces it where it is such a layer itself.

    Raises
    ------
    Unsupported
        A lazy layer, whose number of channels is not known yet.

    Examples
    --------
    >>> import farthing as ft
    >>> fixed = ft.torch.fix(nn.Sequential(nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48), nn.ReLU()))
    >>> type(fixed[1]).__name__, fixed[1].num_groups
    ('GroupNorm', 16)
    """
    if isinstance(model, nn.DataParallel):
        model = model.module
    found = list(changes(model))
    for change in found:
        parent, _, own = change.name.rpartition(".")
        if change.name:
            setattr(model.get_submodule(parent), own, change.new)
        else:
            model = change.new
    if found:
        log.warning("replaced %s", ", ".join(map(str, found)))
    return model


def changes(model: nn.Module) -> Iterator[FixedLayer]:
    """Yield every layer that has to be replaced; the model stays as it is."""
    for name, module in model.named_modules(remove_duplicate=False):
        new = replacement(module)
        if new is not None:
            yield FixedLayer(name, module, new)


def replacement(module: nn.Module) -> nn.Module | None:
    """Return what takes a layer's place; None where it can stay."""
    match module:
        case _BatchNorm() if module.training or not module.track_running_stats:
            return _grouped(module)
        case _InstanceNorm() if module.training and module.track_running_stats:
            return _like(module, type(module)(module.num_features, module.eps, affine=module.affine))
        case nn.Embedding() | nn.EmbeddingBag() if module.scale_grad_by_freq or module.max_norm is not None:
            return _plain_table(module)
    return None


def described(module: nn.Module) -> str:
    """Return a layer in a word or two.

    >>> described(nn.GroupNorm(2, 8))
    'GroupNorm(2, 8)'
    """
    match module:
        case nn.GroupNorm():
            return f"GroupNorm({module.num_groups}, {module.num_channels})"
        case _InstanceNorm():
            return f"{type(module).__name__}({module.num_features}, track_running_stats=False)"
        case nn.Embedding() | nn.EmbeddingBag():
            return f"{type(module).__name__} with scale_grad_by_freq=False and max_norm=None"
    return type(module).__name__


def _grouped(module: Any) -> nn.Module:
    if not type(module).forward.__module__.startswith("torch."):
        raise Unsupported(
            f"{type(module).__name__} is a batch norm with a forward of its own, which may do more: put "
            f"nn.GroupNorm(…, {module.num_features}) in its place yourself, and what else it does"
        )
    if any(map(is_lazy, module.parameters(recurse=False))):
        raise Unsupported("a lazy batch norm has no channels yet: call the model once on public inputs first")
    width = module.num_features
    groups = math.gcd(_GROUPS, width)
    if isinstance(module, nn.BatchNorm1d):  # on rows a group of one channel would be all zeros
        if width == 1:
            return nn.Identity()
        groups = max(
            n for n in range(1, _GROUPS + 1) if width % n == 0 and (n == 1 or width // n >= _CHANNELS)
        )
    return _like(module, nn.GroupNorm(groups, width, module.eps, module.affine))


@torch.no_grad()
def _like(old: Any, new: Any) -> nn.Module:
    """Return the new layer with the old one's weights, device and mode."""
    if old.affine:
        new.to(old.weight.device, old.weight.dtype)
        new.weight.copy_(old.weight)
        new.bias.copy_(old.bias)
        new.weight.requires_grad_(old.weight.requires_grad)
        new.bias.requires_grad_(old.bias.requires_grad)
    made: nn.Module = new.train(old.training)
    return made


def _plain_table(module: Any) -> nn.Module:
    """Return a table that shares its weights with the old one."""
    new: Any = copy.copy(module)
    new.scale_grad_by_freq, new.max_norm = False, None
    made: nn.Module = new
    return made
