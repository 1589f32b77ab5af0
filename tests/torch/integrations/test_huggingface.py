"""Hugging Face's Trainer on private batches: what it is refused, and what it logs."""

import pytest
import torch
from torch import nn

import farthing as ft
from farthing.errors import NotPrivate, Unsupported

pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")

from transformers import TrainingArguments

from farthing.torch.integrations.huggingface import PrivateTrainer

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("options", "given", "told"),
    [
        ({}, {"train_dataset": [{"x": 1}]}, "private records stay out of the Trainer"),
        ({"gradient_accumulation_steps": 2}, {}, "accumulate="),
        ({"bf16": True}, {}, "autocast="),
        ({}, {"optimizers": (torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1), None)}, "in begin"),
    ],
)
def test_what_the_trainer_would_do_with_records_is_refused(options, given, told, tmp_path):
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **options)
    with pytest.raises(Unsupported, match=told):
        PrivateTrainer(lambda model: None, model=nn.Linear(2, 2), args=arguments, **given)


X = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


class Small(nn.Module):
    """A model in Hugging Face's form."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x, labels=None):
        logits = self.linear(x)
        return logits if labels is None else (nn.functional.cross_entropy(logits, labels), logits)


def trainer_of(ledger, tmp_path, rows, accumulate=1, clip_norm=None, **options):
    def begin(model):
        loss, sgd = nn.CrossEntropyLoss(reduction="none"), torch.optim.SGD(model.parameters(), 0.1)
        given = {"optimizer": sgd, "steps": 8, "sampling_rate": 0.1, "accumulate": accumulate}
        return ft.torch.train(model, loss, (X, Y), ledger, clip_norm=clip_norm, **given)

    arguments = TrainingArguments(
        str(tmp_path),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
        num_train_epochs=1,
        **{"save_strategy": "no", **options},
    )
    return PrivateTrainer(begin, model=Small(), args=arguments, eval_dataset=rows)


def rows_of(x, y):
    return [{"x": one, "labels": label} for one, label in zip(x, y, strict=True)]


def shares(trainer):
    return [row["privacy/share"] for row in trainer.state.log_history]


def test_it_evaluates_before_it_trains(tmp_path):
    trainer = trainer_of(None, tmp_path, rows_of(X + 1, Y))
    assert trainer.evaluate()["eval_loss"] > 0
    assert shares(trainer) == [0.0]


def test_the_share_that_is_logged_is_that_of_the_plan(tmp_path):
    """Also where several batches make an update, and where another trainer had some of them before."""
    ledger = ft.Ledger(ft.Budget(8.0, 1e-5))
    first = trainer_of(ledger, tmp_path, None, accumulate=2, max_steps=2)
    first.train()
    assert shares(first)[:2] == [0.25, 0.5]
    second = trainer_of(ledger, tmp_path, None)
    second.train()
    assert shares(second)[0] == 5 / 8
    assert shares(second)[-1] == 1.0
    assert "loss" not in {name for row in second.state.log_history for name in row}


def test_evaluation_on_the_records_trained_on_is_warned_of(tmp_path):
    trainer = trainer_of(ft.Ledger(ft.Budget(8.0, 1e-5)), tmp_path, rows_of(X[:100], Y[:100]))
    trainer.train()
    with pytest.warns(NotPrivate, match="trained on"):
        trainer.evaluate()


def test_a_resumed_trainer_goes_on_with_clipping_norm_step_number_and_what_is_left(tmp_path):
    ledger, saves = ft.Ledger(ft.Budget(8.0, 1e-5)), {"save_strategy": "steps", "save_steps": 2}
    first = trainer_of(
        ledger, tmp_path, None, clip_norm=ft.torch.Quantile(0.5, start=50.0), max_steps=4, **saves
    )
    first.train()
    followed = ft.torch.Quantile(0.5, start=50.0)
    second = trainer_of(ledger, tmp_path, None, clip_norm=followed, **saves)
    seen = []
    second.training_step = lambda *args, step=second.training_step: (
        seen.append(followed.clip_norm),
        step(*args),
    )[1]
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert seen[0] == first.private.state_dict()["clip"]["clip"] < 50.0
    assert second.private.t == 8
    assert len(seen) == 4
