"""Train a LightningModule within a budget, by Lightning's own Trainer.

    private = Private(lambda net, optimizer: ft.torch.train(net, loss, data, ledger, optimizer=optimizer))
    trainer = Trainer(callbacks=[private], max_epochs=-1)    # it ends when the budget is spent
    trainer.fit(module, private.batches, val_dataloaders=public)

Lightning's own loop draws batches and passes each to hooks, loggers and `training_step`; a loss logged there
is a release that is not paid for. With this callback no private record enters the loop: the Trainer counts
*batches*, 0, 1, 2, …, and instead of calling the module's `training_step`, one batch is asked of the ledger
(Poisson, every example's gradient bounded, noise on the sum). The released gradient is in the parameters'
``grad`` when Lightning takes the optimiser's step. The rest is Lightning's: schedules, checkpoints,
validation on public data, early stopping, loggers. The callback logs public numbers: the used share of the
plan, batches left, clipping norm and noise multiplier.

Guarantee: that of `farthing.torch.training.loop.train`, which draws the batches, clips and adds the noise.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from farthing import validate
from farthing.errors import InvalidValue, Unsupported
from farthing.torch.integrations.deferred import Remainder, defer
from farthing.torch.training.loop import Training
from farthing.torch.training.optim import rehearse
from farthing.torch.training.watching import warn_of_training_records

try:
    from lightning.pytorch import Callback, LightningModule
except ModuleNotFoundError as error:
    if error.name not in ("lightning", "lightning.pytorch"):
        raise
    raise ModuleNotFoundError(
        "farthing.torch.integrations.lightning needs Lightning: pip install lightning", name="lightning"
    ) from None

Begin = Callable[[Any, torch.optim.Optimizer | None], Training]

_REPLACED = ("training_step", "configure_optimizers")
_LOGS = ("log", "log_dict")
_LOGGERS = ("logger", "loggers", "callback_metrics", "logged_metrics", "progress_bar_metrics", "callbacks")


class Private(Callback):  # type: ignore[misc]
    """A callback that makes a Trainer take private batches instead of the module's own training steps.

    ``begin(module, optimizer)`` starts the run: a call of `farthing.torch.train` with this model and this
    optimiser, which is what the module's `configure_optimizers` made, or None where that returned None; then
    the run chooses. ``batches_per_epoch`` batches count as an epoch of the Trainer, which may validate, save
    and log after each; `batches` is what `Trainer.fit` takes in place of a loader.

    A checkpoint holds weights, optimiser and step number, never the spend: with ``ckpt_path`` training goes
    on from the weights, with what the ledger has left.
    """

    def __init__(self, begin: Begin, *, batches_per_epoch: int = 100) -> None:
        self.begin = begin
        self.batches = range(validate.count(batches_per_epoch=batches_per_epoch))
        self.training: Training | None = None
        self._saved: dict[str, Any] = {}
        self._automatic: bool | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Replace training steps by batches, until the fit has ended."""
        if stage != "fit":
            return
        _refuse(trainer)
        configure = pl_module.configure_optimizers

        def training_step(batch: Any, batch_idx: int) -> None:
            self._batch(trainer, pl_module)

        self._automatic = bool(pl_module.automatic_optimization)
        pl_module.automatic_optimization = False
        pl_module.training_step = training_step
        pl_module.configure_optimizers = lambda: self._configured(pl_module, configure())

    def _configured(self, module: Any, given: Any) -> Any:
        """Begin the run with the optimiser that the module made; the weights are on their device by now."""
        optimizer = _only(given)
        with _unlogged(module):
            training = self.begin(module, optimizer)
        if training.model is not module or (optimizer is not None and training.optimizer is not optimizer):
            raise InvalidValue(
                "begin must hand its module and optimizer on: train(module, …, optimizer=optimizer)"
            )
        taking = defer(training)
        self.training = training
        return taking if given is None else given

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse any loader but the numbers of batches, before the first is read."""
        if trainer.train_dataloader != self.batches:
            raise InvalidValue(
                "Trainer.fit must be given the callback's own batches, trainer.fit(module, private.batches), "
                "not a loader: what a loader yields goes to hooks and loggers without noise"
            )
        for config in trainer.lr_scheduler_configs:
            rehearse(config.scheduler.optimizer, config.scheduler)
        if self._saved and self.training is not None:
            Remainder(self.training).load_state_dict(self._saved)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Warn where validation is on records that were trained on."""
        loaders = trainer.val_dataloaders
        for loader in loaders if isinstance(loaders, list | tuple) else [loaders]:
            warn_of_training_records(getattr(loader, "dataset", None))

    def _batch(self, trainer: Any, module: Any) -> None:
        assert self.training is not None
        try:
            with _unlogged(module):
                step = next(self.training)
        except StopIteration:
            trainer.should_stop = True
            return
        module.optimizers().step()
        _schedule(trainer, module, "step", step.t)
        public = {
            "left": float(step.left),
            "clip_norm": step.clip_norm,
            "noise_multiplier": step.noise_multiplier,
        }
        module.log("privacy/share", step.share, prog_bar=True, batch_size=1)
        module.log_dict({f"privacy/{name}": value for name, value in public.items()}, batch_size=1)
        if step.left == 0:
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Step the schedules that count epochs."""
        _schedule(trainer, pl_module, "epoch", trainer.current_epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps beside weights and optimiser."""
        return self._saved if self.training is None else Remainder(self.training).state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a state until training starts."""
        self._saved = dict(state_dict)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Give the module its own methods back."""
        self._restore(pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Give the module its own methods back, also after an error."""
        self._restore(pl_module)

    def _restore(self, module: Any) -> None:
        if self._automatic is None:
            return
        module.automatic_optimization, self._automatic = self._automatic, None
        for name in _REPLACED:
            delattr(module, name)


def _refuse(trainer: Any) -> None:
    """Refuse what the Trainer would do beside a batch, without knowing of its noise."""
    if trainer.world_size > 1:
        raise Unsupported(
            f"this callback trains on one device, the Trainer has {trainer.world_size}: for several call "
            "farthing.torch.train on every rank, which draws one batch for all"
        )
    if str(trainer.precision) not in ("32-true", "32"):
        raise Unsupported(
            f"the Trainer's precision must be 32, got {trainer.precision!r}: mixed precision is an option of "
            "the run, train(…, autocast=torch.bfloat16)"
        )
    if trainer.gradient_clip_val is not None:
        raise Unsupported(
            "gradient_clip_val clips a mean; give train(…, clip_norm=…), which clips every example"
        )
    if trainer.accumulate_grad_batches != 1:
        raise Unsupported(
            "accumulate_grad_batches must be 1: batches are accumulated by train(…, accumulate=…)"
        )


def _only(given: Any) -> torch.optim.Optimizer | None:
    """Return the one optimiser in a result of `configure_optimizers`, in any form that Lightning accepts."""
    while (
        isinstance(given, list | tuple) and given and (len(given) == 1 or isinstance(given[0], list | tuple))
    ):
        given = given[0]
    found = given["optimizer"] if isinstance(given, dict) else given
    if found is not None and not isinstance(found, torch.optim.Optimizer):
        raise Unsupported(f"one torch optimizer takes the released gradient, got a {type(found).__name__}")
    return found


def _schedule(trainer: Any, module: Any, interval: str, count: int) -> None:
    """Step the schedules that Lightning describes and, with manual optimisation, does not step itself."""
    for config in trainer.lr_scheduler_configs:
        if config.interval == interval and count % config.frequency == 0:
            module.lr_scheduler_step(config.scheduler, None)


@contextlib.contextmanager
def _unlogged(module: nn.Module) -> Iterator[None]:
    """Forbid logging by a module and its parts while private records go through them."""
    parts = [part for part in module.modules() if isinstance(part, LightningModule)]
    trainers = [part._trainer for part in parts]
    for part, trainer in zip(parts, trainers, strict=True):
        part._trainer = None if trainer is None else _Unlogged(trainer, type(part).__name__)
        for name in _LOGS:
            setattr(part, name, partial(_refused, type(part).__name__))
    try:
        yield
    finally:
        for part, trainer in zip(parts, trainers, strict=True):
            part._trainer = trainer
            for name in _LOGS:
                delattr(part, name)


class _Unlogged:
    """A Trainer without its loggers and metrics."""

    def __init__(self, trainer: Any, name: str) -> None:
        self._trainer, self._name = trainer, name

    def __getattr__(self, name: str) -> Any:
        if name in _LOGGERS:
            _refused(self._name)
        return getattr(self._trainer, name)


def _refused(name: str, *_: Any, **__: Any) -> NoReturn:
    raise Unsupported(
        f"{name}.forward logs: what it sees in training are private records, and nobody "
        "pays for the release; log in validation_step, on public data"
    )
