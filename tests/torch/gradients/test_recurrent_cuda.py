"""Recurrent models on a GPU: cuDNN's kernels have a backward pass in training mode only."""

import copy

import pytest
import torch
from torch import nn

import farthing as ft
from farthing.queries.bounds import ClipNorm
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.training.records import Examples

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

LOSS = nn.CrossEntropyLoss(reduction="none")


class Reader(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.table = nn.Embedding(30, 6)
        self.rnn = kind(6, 8, batch_first=True, **options)
        self.fc = nn.Linear(8 * (2 if options.get("bidirectional") else 1), 3)

    def forward(self, tokens):
        return self.fc(self.rnn(self.table(tokens))[0].mean(1))


KINDS = {
    "lstm": (nn.LSTM, {}),
    "gru": (nn.GRU, {}),
    "rnn": (nn.RNN, {"nonlinearity": "relu"}),
    "two layers, dropout": (nn.LSTM, {"num_layers": 2, "dropout": 0.3}),
    "both ways": (nn.GRU, {"bidirectional": True}),
}


def data(records=64):
    made = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 30, (records, 12), generator=made)
    return tokens, tokens.sum(1) % 3


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_a_recurrent_model_trains_on_a_gpu_in_either_mode(name, training):
    kind, options = KINDS[name]
    model = Reader(kind, **options).cuda().train(training)
    run = ft.torch.train(model, LOSS, data(), epsilon=3.0, delta=1e-5, sampling_rate=0.3, steps=4)
    assert len(list(run)) == 4
    assert torch.backends.cudnn.enabled
    assert all(module.training is training for module in model.modules())


@pytest.mark.parametrize("route", ["fast", "loop"])  # torch.func.vmap has no rule for some fused cells
@pytest.mark.parametrize("name", ["lstm", "gru", "both ways"])
def test_a_gpu_and_a_cpu_find_the_same_sum(name, route):
    kind, options = KINDS[name]
    model = Reader(kind, **options)
    other = copy.deepcopy(model).cuda()
    found = [
        Gradient(one, LOSS, route=route)
        .bounded_sum(Examples(data()).on(device).take(slice(None)), None, ClipNorm(0.5))
        .cpu()
        for one, device in ((model, torch.device("cpu")), (other, torch.device("cuda")))
    ]
    assert torch.allclose(*found, atol=1e-3)


@pytest.mark.parametrize("name", ["lstm", "gru", "both ways", "two layers, dropout"])
def test_reduced_precision_finds_nearly_the_same_sum(name):
    kind, options = KINDS[name]
    model, batch = (
        Reader(kind, **options | {"dropout": 0.0}).cuda(),
        Examples(data(256)).on(torch.device("cuda")),
    )
    plain, narrow = Gradient(model, LOSS), Gradient(model, LOSS, autocast=torch.bfloat16)
    for _ in range(4):  # the later ones by a graph
        expected, found = (
            one.bounded_sum(batch.take(slice(None)), None, ClipNorm(0.5)) for one in (plain, narrow)
        )
        assert float((found - expected).norm() / expected.norm()) < 0.05


def test_a_target_out_of_range_does_not_end_the_gpu():
    tokens, targets = data()
    targets[5] = 77
    records = list(zip(tokens, targets, strict=True))
    model = Reader(nn.LSTM).cuda()
    run = ft.torch.train(model, LOSS, Examples(records), epsilon=3.0, delta=1e-5, sampling_rate=0.9, steps=3)
    assert len(list(run)) == 3
    assert float(torch.ones(3, device="cuda").sum()) == 3.0
