"""Deep learning: PyTorch training that ends when the budget is spent.

    for step in ft.torch.train(model, loss, dataset, ledger):
        ...

Names are looked up when they are used, so that `import farthing` never opens torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farthing.torch.adadp import AdaDP, AdaL, AdaN
    from farthing.torch.bookkeeping import Gradient
    from farthing.torch.checkpoint import restore, save
    from farthing.torch.clipping import Automatic, ClipLayers
    from farthing.torch.collating import Padded
    from farthing.torch.dpopt import DpOpt
    from farthing.torch.evaluation import evaluate, progress
    from farthing.torch.flat import Layout
    from farthing.torch.noise import FloatGaussian, Gaussian
    from farthing.torch.optim import DPAdam
    from farthing.torch.plan import Plan, fitted
    from farthing.torch.quantile import Quantile
    from farthing.torch.records import Examples, Lot
    from farthing.torch.scattering import Scattering
    from farthing.torch.training import Step, Training, train

__all__ = [
    "AdaDP",
    "AdaL",
    "AdaN",
    "Automatic",
    "ClipLayers",
    "DPAdam",
    "DpOpt",
    "Examples",
    "FloatGaussian",
    "Gaussian",
    "Gradient",
    "Layout",
    "Lot",
    "Padded",
    "Plan",
    "Quantile",
    "Scattering",
    "Step",
    "Training",
    "evaluate",
    "fitted",
    "progress",
    "restore",
    "save",
    "train",
]

_HOMES = {
    "adadp": ("AdaDP", "AdaL", "AdaN"),
    "bookkeeping": ("Gradient",),
    "flat": ("Layout",),
    "checkpoint": ("restore", "save"),
    "clipping": ("Automatic", "ClipLayers"),
    "collating": ("Padded",),
    "dpopt": ("DpOpt",),
    "evaluation": ("evaluate", "progress"),
    "noise": ("FloatGaussian", "Gaussian"),
    "optim": ("DPAdam",),
    "plan": ("Plan", "fitted"),
    "quantile": ("Quantile",),
    "records": ("Examples", "Lot"),
    "scattering": ("Scattering",),
    "training": ("Step", "Training", "train"),
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
        raise ModuleNotFoundError(
            "farthing.torch needs PyTorch: pip install 'farthing[torch]'", name="torch"
        ) from None
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
