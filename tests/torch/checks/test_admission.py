"""Wrong models, shapes and labels are told in the user's terms, before a charge and without a value."""

import pytest
import torch
from torch import nn

import farthing as ft

LOSS = nn.CrossEntropyLoss(reduction="none")
X, Y = torch.randn(2000, 5), torch.randint(3, (2000,))
SECRET = 0.73142


def refusal(model, data, loss=LOSS, **how):
    ledger = ft.Ledger(ft.Budget(1.0, 1e-5))
    with pytest.raises(ft.FarthingError) as found:
        ft.torch.train(model, loss, data, ledger, steps=2, **how)
    assert ledger.share == 0
    assert str(SECRET)[2:] not in str(found.value)
    return str(found.value)


def test_several_models_are_one_module():
    told = refusal([nn.Linear(5, 3), nn.Linear(5, 3)], (X, Y))
    assert "got a list of 2" in told
    assert "one module" in told
    assert "got a function" in refusal(lambda x: x, (X, Y))
    assert "no parameters" in refusal(nn.ReLU(), (X, Y))


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ((torch.full((2000, 7), SECRET), Y), "float32 (7,) each"),
        ((torch.full((2000, 5), SECRET, dtype=torch.float64), Y), "inputs.to(torch.float32)"),
        ((X, torch.full((2000,), SECRET)), "target float32 ()"),
        ((X, torch.full((2000, 1), 2)), "target int64 (1,)"),
        ((X, torch.full((1999,), 2)), "got lengths [1999, 2000]"),
        ((X, X, Y), "float32 (5,) and float32 (5,)"),
        ((X,), "torch.zeros(len(inputs))"),
        ((X, (Y, Y)), "(inputs, (one target, another))"),
    ],
)
def test_a_record_of_a_wrong_shape_or_kind_is_told_by_its_shape(data, told):
    assert told in refusal(nn.Linear(5, 3), data)


def test_a_loss_that_is_a_mean_is_told_what_to_return():
    assert 'reduction="none"' in refusal(nn.Linear(5, 3), (X, Y), nn.CrossEntropyLoss())


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss, "cross entropy"])
def test_a_loss_that_is_no_function_is_told_what_to_be(loss):
    assert "give a function of outputs and targets" in refusal(nn.Linear(5, 3), (X, Y), loss)


def test_a_loss_of_tokens_is_told_how_to_be_one_of_records():
    tokens, words = torch.randint(9, (2000, 5)), nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    assert "outputs.transpose(1, 2)" in refusal(words, (tokens, tokens))


@pytest.mark.parametrize("autocast", ["bfloat16", True, torch.float32])
def test_a_precision_is_a_dtype_that_autocast_takes(autocast):
    assert "torch.bfloat16, torch.float16 or None" in refusal(nn.Linear(5, 3), (X, Y), autocast=autocast)


def test_lazy_layers_get_their_weights_from_the_shape_of_a_record():
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    training = ft.torch.train(
        model, LOSS, (X, Y), epsilon=1.0, delta=1e-5, steps=2, sampling_rate=0.1, optimizer=optimizer
    )
    assert ft.run(training).steps == 2
    assert [tuple(p.shape) for p in model.parameters()] == [(4, 5), (4,), (3, 4), (3,)]


def test_a_lazy_model_that_cannot_run_says_what_it_was_given():
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.Flatten(), nn.LazyLinear(3))
    assert "float32 (5,) each" in refusal(model, (X, Y))
