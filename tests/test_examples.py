"""The examples run, small; where their library is missing they are skipped."""

import runpy
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch")

EXAMPLES = Path(__file__).parent.parent / "examples"
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of other libraries


def test_lightning(capsys):
    pytest.importorskip("lightning", reason="Lightning is not installed: pip install lightning")
    right, _ = runpy.run_path(str(EXAMPLES / "lightning_adult.py"))["main"](steps=40)
    assert right > 0.76  # the more frequent class alone
    assert "(1, 1e-05)-DP" in capsys.readouterr().out


def test_hugging_face(tmp_path, capsys):
    pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
    example = runpy.run_path(str(EXAMPLES / "huggingface.py"))
    right, trainer = example["main"](steps=30, records=3000, epsilon=8.0, folder=str(tmp_path))
    assert right > 0.6
    assert trainer.private.ledger.share == 1.0
    assert trainer.state.global_step == trainer.private.t == 30
    logged = {name for row in trainer.state.log_history for name in row}
    assert {"privacy/share", "eval_accuracy", "learning_rate"} <= logged
    assert not {"loss", "train_loss"} & logged
    assert (tmp_path / "checkpoint-10").is_dir()
    assert "(8, 1e-05)-DP" in capsys.readouterr().out


def test_principal_components_and_a_network_share_one_budget(capsys):
    example = runpy.run_path(str(EXAMPLES / "dppca_network.py"))
    right, ledger = example["main"](epsilon=4.0, steps=40, kept=12, units=50)
    assert right > 0.5  # a guess has 0.1
    assert ledger.share == 1.0
    assert "(4, 1e-05)-DP" in capsys.readouterr().out
