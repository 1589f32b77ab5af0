"""Train a LightningModule within a budget, by Lightning's own Trainer.

    pip install '.[torch]' lightning
    python examples/lightning_adult.py

The module is an ordinary one. The changes are the `Private` callback, its `batches` in place of a loader, and
a loss with one value per record. Validation runs on the test table, which counts as public here.
"""

import argparse
import tempfile

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import farthing as ft
from farthing.data import load_adult
from farthing.torch.integrations.lightning import Private

loss = nn.CrossEntropyLoss(reduction="none")


class Income(LightningModule):
    """A classifier of whether a person earns more than $50,000."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of both classes."""
        return self.layers(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Compute the loss for training without privacy; never called with the callback."""
        return loss(self(batch[0]), batch[1]).mean()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the accuracy: on public data anything may be logged."""
        self.log("right", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> None:
        """Return None: the run chooses by rules of public numbers. An optimizer of your own works as well."""


def main(epsilon: float = 1.0, steps: int | None = None) -> tuple[float, Trainer]:
    """Train, print the guarantee and the accuracy; return the accuracy and the trainer."""
    adult = load_adult()
    private = torch.tensor(adult.X_train, dtype=torch.float32), torch.tensor(adult.y_train)
    test = TensorDataset(torch.tensor(adult.X_test, dtype=torch.float32), torch.tensor(adult.y_test))
    public = DataLoader(test, batch_size=4096)
    ledger = ft.Ledger(ft.Budget(epsilon, 1e-5))  # journal="adult.ledger" to keep it

    callback = Private(
        lambda module, optimizer: ft.torch.train(
            module, loss, private, ledger, optimizer=optimizer, steps=steps
        ),
        batches_per_epoch=100,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            callbacks=[callback, ModelCheckpoint(folder, monitor="right", mode="max")],
            logger=CSVLogger(folder),  # or TensorBoardLogger, MLFlowLogger, …
            max_epochs=-1,  # until the budget is spent
            accelerator="auto",
            devices=1,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = Income(adult.X_train.shape[1])
        trainer.fit(module, callback.batches, val_dataloaders=public)
        (found,) = trainer.validate(module, public, verbose=False)
    print(ledger.guarantee)
    print(f"{found['right']:.1%} right on the test table, after {callback.training.t} batches")
    return found["right"], trainer


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--epsilon", type=float, default=1.0)
    options.add_argument("--steps", type=int, default=None)
    chosen = options.parse_args()
    main(chosen.epsilon, chosen.steps)
