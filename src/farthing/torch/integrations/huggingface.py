"""Train a model of Hugging Face within a budget, by Hugging Face's own Trainer.

    trainer = PrivateTrainer(begin, model=model, args=arguments, eval_dataset=public)
    trainer.train()    # it ends when the budget is spent

`PrivateTrainer` keeps the Trainer's loop, callbacks, checkpoints and evaluation, and gives it *numbers* to
count in place of batches to read: no private record enters the loop, and no loss of one is logged. Where the
Trainer would compute a gradient, one batch is asked of the ledger; the noisy gradient is in the parameters'
``grad`` when the Trainer takes the optimiser's step.

Guarantee: that of `farthing.torch.training.loop.train`, which draws the batches, clips and adds the noise.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from farthing.errors import Unsupported
from farthing.torch.integrations.deferred import Remainder, defer
from farthing.torch.training import checkpoint as checkpoints
from farthing.torch.training.loop import Training
from farthing.torch.training.watching import warn_of_training_records

try:
    from transformers import Trainer
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ModuleNotFoundError(
        "farthing.torch.integrations.huggingface needs transformers: pip install transformers accelerate",
        name="transformers",
    ) from None

_UNSEEN = ("loss", "train_loss", "train_samples_per_second")
_KEPT = "farthing.pt"  # in a checkpoint's folder: step number and clipping norm
_LOOKED_AT = 4096  # rows of a dataset that are compared with those trained on


class Logits(nn.Module):
    """A model of Hugging Face in the form that `train` takes: tensors in, one row of logits a record out.

    ``names`` are the keywords that its inputs go by, such as "input_ids" and "attention_mask".
    """

    def __init__(self, model: nn.Module, *names: str) -> None:
        super().__init__()
        self.model, self.names = model, names or ("input_ids",)

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Return the model's logits."""
        return self.model(**dict(zip(self.names, inputs, strict=True))).logits


class PrivateTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose steps are private batches; ``begin(model)`` calls `farthing.torch.train`.

    All other arguments are the Trainer's own; of datasets it gets the public one only, ``eval_dataset``.
    """

    def __init__(self, begin: Callable[[Any], Training], *, model: Any, args: Any, **given: Any) -> None:
        if given.get("train_dataset") is not None:
            raise Unsupported("private records stay out of the Trainer: give them to train, in begin")
        if any(part is not None for part in given.get("optimizers", ())):
            raise Unsupported("the run takes the steps: give its optimizer to train, in begin")
        if args.gradient_accumulation_steps != 1 or args.n_gpu > 1 or args.world_size > 1:
            raise Unsupported("one device, and no accumulation but that of train(…, accumulate=…)")
        if args.fp16 or args.bf16:
            raise Unsupported("mixed precision is an option of the run: train(…, autocast=torch.bfloat16)")
        super().__init__(model=model, args=args, **given)
        self.begin, self.share = begin, 0.0

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Begin the run; return the numbers of its batches, the records stay behind the ledger."""
        self.private = self.begin(self.model)
        self.deferred = defer(self.private)
        numbers: Any = [{"batch": place} for place in range(self.private.steps)]
        return DataLoader(numbers, batch_size=1)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Return the run's own optimiser."""
        self.optimizer = self.deferred
        return self.deferred

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write a checkpoint's optimiser, and beside it what the run knows; never the spend."""
        super()._save_optimizer_and_scheduler(output_dir)
        checkpoints.save(os.path.join(output_dir, _KEPT), Remainder(self.private))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Go on from a checkpoint, with what the ledger has left."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and os.path.exists(path := os.path.join(checkpoint, _KEPT)):
            checkpoints.restore(path, Remainder(self.private))

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Ask for one batch. Its loss is private: 0 stands for it, and is not logged."""
        model.train()
        step = next(self.private, None)
        if step is not None:
            self.share = step.share
        if step is None or step.left == 0:
            self.control.should_training_stop = True
        return torch.zeros((), device=self.args.device, dtype=torch.float32)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log public numbers: the Trainer's, without the loss, and the share of the plan that is used."""
        logs = {name: value for name, value in logs.items() if name not in _UNSEEN}
        super().log({**logs, "privacy/share": self.share}, start_time)

    def evaluation_loop(self, dataloader: Any, *args: Any, **given: Any) -> Any:
        """Warn of records that were trained on, then evaluate."""
        warn_of_training_records(_columns(dataloader.dataset), stacklevel=4)
        return super().evaluation_loop(dataloader, *args, **given)

    def floating_point_ops(self, inputs: Any) -> int:
        """Return 0: counting would read the tokens of a batch."""
        return 0


def _columns(dataset: Any) -> Any:
    """Return rows that are dictionaries as columns, the form in which `train` is given records."""
    try:
        rows = [dataset[n] for n in range(0, len(dataset), max(1, len(dataset) // _LOOKED_AT))]
        return tuple(torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0])
    except (TypeError, KeyError, IndexError, ValueError, RuntimeError):  # of another form
        return dataset
