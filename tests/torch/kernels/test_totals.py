"""Float32 sums of values built to round badly: neighbours stay within the slack that noise is enlarged by.

On a GPU (`pytest tests/torch/kernels/test_totals.py` where there is one) everything runs there as well.
"""

import numpy as np
import pytest
import torch
from torch import nn

from farthing.audit.steps import badly_rounded, moved
from farthing.noise import native
from farthing.queries.bounds import ClipCoordinates, ClipNorm
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.gradients.clipping import ClipLayers, plain_sum
from farthing.torch.gradients.outers import Lookup
from farthing.torch.gradients.terms import Factor
from farthing.torch.kernels import clamping, totals
from farthing.torch.kernels import totals as products
from farthing.torch.kernels.totals import SLACK, among, chain
from farthing.torch.training.records import Examples

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SIZES = [64, 512, 8192]


def loss(outputs, targets):
    return outputs.flatten(1)[:, 0] * targets


def excess(gradient, shape, bound, terms, device):
    """How much further than 1 neighbours' sums are apart: an example's gradient is its term, in one place."""
    inputs = torch.zeros(len(terms), *shape)
    inputs.view(len(terms), -1)[:, 0] = 1.0

    def total(terms):
        batch = Examples((inputs.to(device), torch.tensor(terms, dtype=torch.float32, device=device)))
        return gradient.bounded_sum(batch.take(slice(None)), None, bound).cpu().double().numpy()

    return moved(total, terms) - 1


def bias_only():
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].weight.requires_grad_(False)
    return model


CASES = {
    "linear": (lambda: nn.Sequential(nn.Linear(16, 16, bias=False)), (16,), {}),
    "bias": (bias_only, (1,), {}),
    "tokens": (lambda: nn.Linear(16, 16, bias=False), (2, 16), {"route": "gram"}),
    "rows": (lambda: nn.Linear(16, 16, bias=False), (2, 16), {"route": "rows"}),
    "convolution": (lambda: nn.Conv2d(1, 2, 3, bias=False), (1, 3, 3), {"route": "rows"}),
    "parts": (lambda: nn.Sequential(nn.Linear(4, 4, bias=False)), (4,), {"physical_batch_size": 64}),
    "isolated": (lambda: nn.Linear(4, 4, bias=False), (4,), {"route": "vmap"}),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("examples", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_sums_of_gradients_are_within_the_slack(case, examples, device):
    model, shape, options = CASES[case]
    gradient = Gradient(model().to(device), loss, **options)
    for apart in (1, 8):
        found = excess(gradient, shape, ClipNorm(1.0), badly_rounded(examples, apart, bits=23), device)
        assert found <= SLACK * 3 / 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("examples", SIZES)
def test_clamped_sums_are_within_the_slack(examples, device):
    bound = ClipCoordinates(torch.ones(16, device=device))
    gradient = Gradient(nn.Sequential(nn.Linear(4, 4, bias=False)).to(device), loss)
    assert excess(gradient, (4,), bound, badly_rounded(examples, bits=23), device) <= SLACK * 3 / 4


@pytest.mark.parametrize("examples", [512, 4096])
def test_one_after_the_other_would_be_beyond_it(examples):
    """What was summed before: 0.4 % and 25 % of the clip."""

    def total(terms):
        return torch.tensor(terms, dtype=torch.float32).numpy().cumsum(dtype=np.float32)[-1:].astype(float)

    assert moved(total, badly_rounded(examples, bits=23)) - 1 > (0.003 if examples == 512 else 0.2)


def one_after_the_other(matrix, vector):
    """A product as a library may compute it, in the worst order that it may choose."""
    terms = (matrix * vector).numpy().cumsum(axis=1, dtype=np.float32)
    return torch.from_numpy(terms[:, -1].copy())


@pytest.mark.parametrize("case", ["bias", "convolution"])
def test_chains_without_an_end_are_noticed(case, monkeypatch):
    """A planted bug: as if every batch were short."""
    monkeypatch.setattr(totals, "chain", lambda records=1: 2**30)
    monkeypatch.setattr(torch, "mv", one_after_the_other)
    model, shape, options = CASES[case]
    gradient = Gradient(model(), loss, **options)
    worst = max(
        excess(gradient, shape, ClipNorm(1.0), badly_rounded(8192, n, bits=23), "cpu") for n in (1, 8)
    )
    assert worst > 4 * SLACK


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("examples", [7, 300, 700, 3000])
def test_sums_are_those_of_float64(examples, device):
    torch.manual_seed(0)
    u, v = torch.randn(examples, 5, device=device), torch.randn(examples, 70, device=device)
    factors = torch.rand(examples, device=device)
    close = {"rtol": 1e-5, "atol": 1e-4}
    exact = u.double().t() @ v.double()
    torch.testing.assert_close(totals.product(u, v, examples).double(), exact, **close)
    torch.testing.assert_close(totals.product(u, v, examples // 7).double(), exact, **close)
    for empty in (True, False):
        out = torch.full((70, 5), 0.0 if not empty else 9.0, device=device)
        products.add_product(v, u, out, empty=empty)
        torch.testing.assert_close(out.double(), exact.t(), **close)
    torch.testing.assert_close(totals.weighted(v, factors).double(), factors.double() @ v.double(), **close)
    torch.testing.assert_close(
        totals.weighted(v[:, ::2], factors).double(), factors.double() @ v[:, ::2].double(), **close
    )


def test_sums_without_kernels_are_the_same(monkeypatch):
    torch.manual_seed(0)
    rows, factors = torch.randn(3000, 33), torch.rand(3000)
    found = totals.weighted(rows, factors)
    out = clamping.clamped_rows(rows, 0.5, torch.zeros(33))
    monkeypatch.setattr(native, "kernels", lambda work=0: None)
    torch.testing.assert_close(totals.weighted(rows, factors), found)
    torch.testing.assert_close(clamping.clamped_rows(rows, 0.5, torch.zeros(33)), out)


def test_chains_follow_the_whole_batch_not_its_part():
    alone = chain(64)
    with among(1000):
        assert chain(64) == chain(1000) < alone
        with among(10):
            assert chain() == chain(1000)
    assert chain(64) == alone
    for examples in (1, 64, 100, 1000, 3000):
        assert (chain(examples) + 2) * examples * 2.0**-23 <= SLACK * 3 / 4


@pytest.mark.parametrize("device", DEVICES)
def test_embeddings_are_within_the_slack(device):
    terms = badly_rounded(4096, bits=23)

    def total(terms):
        ids = torch.zeros(len(terms), 1, dtype=torch.int64, device=device)
        values = torch.tensor(terms, dtype=torch.float32, device=device).view(-1, 1, 1)
        out = torch.zeros(3, device=device)
        Lookup(ids, Factor(values), 3).product(torch.ones(len(terms), device=device), out)
        return out.cpu().double().numpy()

    assert moved(total, terms) <= 1 + SLACK * 3 / 4


@pytest.mark.parametrize(
    "bound", [ClipNorm(1.0), ClipLayers((1.0, 1.0), (1, 1)), ClipCoordinates(np.ones(2))]
)
def test_plain_sums_are_within_the_slack(bound):
    def total(terms):
        rows = torch.tensor(np.column_stack([terms, 0 * terms]), dtype=torch.float32)
        return plain_sum(rows, bound).double().numpy()

    assert moved(total, badly_rounded(4096, bits=23)) <= 1 + SLACK * 3 / 4


def test_parts_that_are_added_where_their_sum_lies_are_clamped_in_float64(monkeypatch):
    kernel, kinds = native.clamped_outer_sum, []

    def watched(delta, a, limits, total, **options):
        kinds.append(total.dtype)
        return kernel(delta, a, limits, total, **options)

    monkeypatch.setattr(native, "clamped_outer_sum", watched)
    rows = torch.ones(4, 3)
    for lies in (False, True):
        with among(2048), totals.in_place(lies):
            clamping.clamped_rows(rows, 0.5, torch.zeros(3))
    assert kinds[-1] == np.float64
    assert kinds[0] == np.float32
