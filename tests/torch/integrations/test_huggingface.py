"""Hugging Face's Trainer on private batches: what it is refused before a record is read."""

import pytest
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")

from transformers import TrainingArguments

from farthing.errors import Unsupported
from farthing.torch.integrations.huggingface import PrivateTrainer

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("options", "given", "told"),
    [
        ({}, {"train_dataset": [{"x": 1}]}, "private records stay out of the Trainer"),
        ({"gradient_accumulation_steps": 2}, {}, "accumulate="),
        ({"bf16": True}, {}, "autocast="),
    ],
)
def test_what_the_trainer_would_do_with_records_is_refused(options, given, told, tmp_path):
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", **options)
    with pytest.raises(Unsupported, match=told):
        PrivateTrainer(lambda model: None, model=nn.Linear(2, 2), args=arguments, **given)
