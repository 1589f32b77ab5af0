"""What is seen of a run: every step, in public numbers only."""

import io

import pytest
import torch
from torch import nn

import farthing as ft
from farthing.torch.training.watching import ProgressLine, TrainingStep

LOSS = nn.CrossEntropyLoss(reduction="none")
PUBLIC = {
    "share",
    "left",
    "expected_batch_size",
    "clip_norm",
    "noise_multiplier",
    "gradient_norm",
    "noise_norm",
}


def begun(**how):
    data = torch.randn(2000, 4), torch.randint(2, (2000,))
    plan = {"epsilon": 2.0, "delta": 1e-5, "sampling_rate": 0.1, "steps": 5}
    return ft.torch.train(nn.Linear(4, 2), LOSS, data, **plan | how)


class Writer:
    """What TensorBoard and Weights & Biases are given."""

    def __init__(self):
        self.seen = []

    def add_scalar(self, tag, value, step):
        self.seen.append((tag, value, step))

    def log(self, values, step):
        self.seen += [(name, value, step) for name, value in values.items()]


@pytest.mark.parametrize("kind", [ft.torch.to_tensorboard, ft.torch.to_wandb])
def test_loggers_are_given_every_step_in_public_numbers(kind):
    writer, steps = Writer(), []
    ft.run(begun(callbacks=[kind(writer, "dp/"), steps.append]))
    assert {name for name, _, _ in writer.seen} == {f"dp/{name}" for name in PUBLIC}
    assert [value for name, value, _ in writer.seen if name == "dp/left"] == [4, 3, 2, 1, 0]
    assert sorted({t for _, _, t in writer.seen}) == [step.t for step in steps] == [1, 2, 3, 4, 5]


def test_a_line_of_progress_ends_with_the_last_step(capsys):
    ft.run(begun(progress=True))
    shown = capsys.readouterr().err
    assert shown.startswith("\r1 of 5 batches")
    assert "5 of 5 batches [########################] 0 s left, clipping norm 1" in shown
    assert shown.endswith("\n")
    assert shown.count("\n") == 1
    ft.run(begun())
    assert not capsys.readouterr().err


def test_a_line_is_not_written_too_often():
    out = io.StringIO()
    line = ProgressLine(out)
    for t in range(1, 1001):
        line.show(TrainingStep(t, None, (), 40.0, 1.0, 2.0, left=1000 - t), 1000)
    assert out.getvalue().count("\r") < 100


@pytest.mark.parametrize(("accumulate", "updates"), [(1, 5), (2, 3)])
def test_a_run_has_the_length_of_its_updates(accumulate, updates):
    training = begun(accumulate=accumulate)
    assert len(training) == updates
    next(training)
    assert len(training) == updates
    assert len(list(training)) == updates - 1
    assert len(training) == updates


def test_a_run_that_follows_a_filter_has_no_length():
    menu = ft.Menu([ft.Poisson(0.1).amplify(ft.Gaussian(4.0))])
    ledger = ft.Ledger(ft.Budget(1.0, 1e-5), filter=menu)
    data = torch.randn(2000, 4), torch.randint(2, (2000,))
    training = ft.torch.train(nn.Linear(4, 2), LOSS, data, ledger, steps=2)
    with pytest.raises(TypeError, match="no batches are promised"):
        len(training)
    assert len(list(training)) == 2


def test_a_run_describes_itself_in_public_numbers():
    training = begun()
    next(training)
    shown = repr(training)
    for part in (
        "Linear (10 weights)",
        "1 updates made",
        "4 batches left of 5",
        "size 200",
        "SGD",
        "(2, 1e-05)-DP",
    ):
        assert part in shown
