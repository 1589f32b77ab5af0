"""Deep learning: PyTorch training that ends when the budget is spent.

    for step in ft.torch.train(model, loss, dataset, ledger):
        ...

Names are looked up when they are used, so that `import farthing` never opens torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farthing.torch.checks.fixing import fix
    from farthing.torch.features import Scattering
    from farthing.torch.gradients.bookkeeping import Gradient
    from farthing.torch.gradients.clipping import Automatic, ClipLayers, ClipRule
    from farthing.torch.gradients.layers import layer_rule
    from farthing.torch.gradients.layout import Layout
    from farthing.torch.kernels.noise import FloatGaussian, TensorGaussian
    from farthing.torch.methods.adadp import AdaDP, AdaL, AdaN
    from farthing.torch.methods.dpopt import DpOpt
    from farthing.torch.training.adapting import Change, NoiseGate, Plateau, Stages, menu
    from farthing.torch.training.checkpoint import restore, save
    from farthing.torch.training.collating import Padded
    from farthing.torch.training.loop import Training, train
    from farthing.torch.training.network import Network
    from farthing.torch.training.optim import DPAdam
    from farthing.torch.training.plan import Plan, fitted
    from farthing.torch.training.records import Batch, Examples
    from farthing.torch.training.schedules import AdaptiveClip, Quantile
    from farthing.torch.training.watching import TrainingStep, evaluate, to_tensorboard, to_wandb

__all__ = [
    "AdaDP",
    "AdaL",
    "AdaN",
    "AdaptiveClip",
    "Automatic",
    "Batch",
    "Change",
    "ClipLayers",
    "ClipRule",
    "DPAdam",
    "DpOpt",
    "Examples",
    "FloatGaussian",
    "Gradient",
    "Layout",
    "Network",
    "NoiseGate",
    "Padded",
    "Plan",
    "Plateau",
    "Quantile",
    "Scattering",
    "Stages",
    "TensorGaussian",
    "Training",
    "TrainingStep",
    "evaluate",
    "fitted",
    "fix",
    "layer_rule",
    "menu",
    "restore",
    "save",
    "to_tensorboard",
    "to_wandb",
    "train",
]

_HOMES = {
    "methods.adadp": ("AdaDP", "AdaL", "AdaN"),
    "gradients.bookkeeping": ("Gradient",),
    "gradients.layout": ("Layout",),
    "training.checkpoint": ("restore", "save"),
    "gradients.clipping": ("Automatic", "ClipLayers", "ClipRule"),
    "gradients.layers": ("layer_rule",),
    "training.collating": ("Padded",),
    "methods.dpopt": ("DpOpt",),
    "training.watching": ("TrainingStep", "evaluate", "to_tensorboard", "to_wandb"),
    "checks.fixing": ("fix",),
    "kernels.noise": ("FloatGaussian", "TensorGaussian"),
    "training.network": ("Network",),
    "training.optim": ("DPAdam",),
    "training.plan": ("Plan", "fitted"),
    "training.schedules": ("AdaptiveClip", "Quantile"),
    "training.records": ("Examples", "Batch"),
    "features": ("Scattering",),
    "training.adapting": ("Change", "NoiseGate", "Plateau", "Stages", "menu"),
    "training.loop": ("Training", "train"),
}
_HOME = {name: f"farthing.torch.{home}" for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = globals()[name] = getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError("farthing.torch needs PyTorch: pip install torch", name="torch") from None
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
