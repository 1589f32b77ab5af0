"""Recurrent layers whose steps a library goes through, given projected inputs and the identity."""

import pytest
import torch
from torch import nn

from farthing.queries.bounds import ClipNorm
from farthing.torch.gradients import recurrent
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.training.records import Examples

LOSS = nn.CrossEntropyLoss(reduction="none")
KINDS = {
    "lstm": (nn.LSTM, {"batch_first": True}),
    "gru": (nn.GRU, {"batch_first": True}),
    "two layers": (nn.LSTM, {"num_layers": 2}),
    "both ways": (nn.GRU, {"bidirectional": True}),
    "no bias": (nn.GRU, {"bias": False}),
}


class Reader(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.rnn = kind(6, 8, **options)
        self.fc = nn.Linear(8 * (2 if options.get("bidirectional") else 1), 3)

    def forward(self, x):
        out = self.rnn(x if self.rnn.batch_first else x.transpose(0, 1))[0]
        return self.fc(out.mean(1 if self.rnn.batch_first else 0))


@pytest.mark.parametrize("name", KINDS)
def test_a_library_finds_the_same_gradients_of_gates(name, monkeypatch):
    torch.manual_seed(0)
    kind, options = KINDS[name]
    model, batch = Reader(kind, **options), Examples((torch.randn(20, 12, 6), torch.arange(20) % 3))
    monkeypatch.setattr(recurrent.steps, "fits", lambda *_: False)
    state, used, library = torch.get_rng_state(), [], recurrent.library

    def watched(*given):
        used.append(given[2])
        return library(*given)

    monkeypatch.setattr(recurrent, "library", watched)
    expected = Gradient(model, LOSS).bounded_sum(batch.take(slice(None)), None, ClipNorm(0.1))
    assert not used
    monkeypatch.setattr(recurrent, "_by_library", lambda *_: True)
    found = Gradient(model, LOSS).bounded_sum(batch.take(slice(None)), None, ClipNorm(0.1))
    assert used
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert torch.equal(torch.get_rng_state(), state)  # no random numbers for the library's own layers
    assert all(module in (model, model.rnn, model.fc) for module in model.modules())
