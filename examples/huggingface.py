"""Train a transformer from Hugging Face within a budget, by Hugging Face's own Trainer.

    pip install '.[torch]' transformers accelerate
    python examples/huggingface.py

`PrivateTrainer` keeps the Trainer's loop, callbacks, checkpoints and evaluation, and gives it *numbers* to
count in place of batches to read: no private record enters the loop, and no loss of one is logged. Where the
Trainer would compute a gradient, one batch is asked of the ledger; the noisy gradient is in the parameters'
``grad`` when the Trainer takes the optimizer's step. Training ends when the budget is spent.

Nothing is downloaded: the model is made from a configuration and the sentences are made up.
"""

import argparse
import tempfile
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

import farthing as ft
from farthing.torch.integrations.huggingface import Logits, PrivateTrainer

WORDS, LENGTH, PADDING = 60, 12, 0
GOOD, BAD = range(1, 11), range(11, 21)  # transformers has no type annotations


class Sentences(Dataset[Any]):
    """Made-up sentences: half of the words of a happy one are good, of an unhappy one bad."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(2, (count,), generator=generator)
        plain = torch.randint(BAD.stop, WORDS, (count, LENGTH), generator=generator)
        mood = torch.randint(len(GOOD), (count, LENGTH), generator=generator)
        mood = mood + torch.tensor([BAD.start, GOOD.start])[self.labels][:, None]
        self.ids = torch.where(torch.rand(count, LENGTH, generator=generator) < 0.5, mood, plain)
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (count, 1), generator=generator)
        self.mask = (torch.arange(LENGTH) < lengths).long()
        self.ids = torch.where(self.mask == 1, self.ids, PADDING)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        return {
            "input_ids": self.ids[place],
            "attention_mask": self.mask[place],
            "labels": self.labels[place],
        }


def right(prediction: Any) -> dict[str, float]:
    """Return the fraction of right answers."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main(
    epsilon: float = 3.0, steps: int = 60, records: int = 8000, folder: str | None = None
) -> tuple[float, PrivateTrainer]:
    """Train, print the guarantee and the accuracy; return the accuracy and the trainer."""
    private, public = Sentences(records, seed=1), Sentences(1000, seed=2)
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    ledger = ft.Ledger(ft.Budget(epsilon, 1e-5))
    loss = nn.CrossEntropyLoss(reduction="none")

    def begin(model: Any) -> ft.torch.Training:
        data = private.ids, private.mask, private.labels
        optimizer = ft.torch.DPAdam(model.parameters(), 5e-3)  # without one the run chooses
        view = Logits(model, "input_ids", "attention_mask")
        return ft.torch.train(view, loss, data, ledger, steps=steps, optimizer=optimizer)

    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            folder or scratch,
            num_train_epochs=1,
            lr_scheduler_type="constant",
            max_grad_norm=0,  # examples are clipped already
            eval_strategy="steps",
            eval_steps=max(1, steps // 3),
            logging_steps=max(1, steps // 3),
            save_strategy="no" if folder is None else "steps",
            save_steps=max(1, steps // 3),
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            dataloader_pin_memory=False,
        )
        trainer = PrivateTrainer(
            begin,
            model=BertForSequenceClassification(config),
            args=arguments,
            eval_dataset=public,
            compute_metrics=right,
        )
        trainer.train()
        found = trainer.evaluate()["eval_accuracy"]
    print(ledger.guarantee)
    print(f"{found:.1%} right on public sentences")
    return found, trainer


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--epsilon", type=float, default=3.0)
    options.add_argument("--steps", type=int, default=60)
    chosen = options.parse_args()
    main(chosen.epsilon, chosen.steps)
