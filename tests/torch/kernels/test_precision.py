"""Products that a GPU may round to ten bits: seen, switched off and on again, allowed for in norms."""

from contextlib import contextmanager, suppress

import numpy as np
import pytest
import torch
from torch import nn

from farthing.queries.bounds import ClipNorm
from farthing.torch.gradients import bookkeeping, convolution, joint_terms, terms
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.kernels import positions
from farthing.torch.kernels.totals import coarse, exact
from farthing.torch.training.records import Examples

GPU = torch.device("cuda")


@pytest.fixture
def settings():
    places = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = [place.fp32_precision for place in places]
    yield places
    for place, old in zip(places, before, strict=True):
        place.fp32_precision = old


@pytest.mark.parametrize("matmul", ["ieee", "tf32"])
@pytest.mark.parametrize("conv", ["ieee", "tf32"])
def test_exact_is_exact_and_leaves_things_as_they_were(settings, matmul, conv):
    settings[0].fp32_precision, settings[1].fp32_precision = matmul, conv
    assert coarse(GPU) == (matmul == "tf32")
    with exact(GPU):
        assert not coarse(GPU)
        assert [place.fp32_precision for place in settings] == ["ieee", "ieee"]
    with suppress(KeyError), exact(GPU):
        raise KeyError
    assert [place.fp32_precision for place in settings] == [matmul, conv]


CPU_SETTINGS = torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv


@pytest.mark.parametrize("route", ["fast", "vmap"])
def test_sums_on_a_cpu_are_exact_where_bfloat16_is_allowed(route, monkeypatch):
    part, seen, before = Gradient._sum_of, [], [place.fp32_precision for place in CPU_SETTINGS]

    def looked_at(*arguments):
        seen.extend(place.fp32_precision for place in CPU_SETTINGS)
        return part(*arguments)

    monkeypatch.setattr(Gradient, "_sum_of", looked_at)
    torch.set_float32_matmul_precision("medium")  # bfloat16 where a processor multiplies it
    CPU_SETTINGS[1].fp32_precision = "bf16"
    try:
        batch = Examples((torch.ones(6, 3), torch.zeros(6, 1))).take(slice(None))
        gradient = Gradient(nn.Linear(3, 1), lambda outputs, y: (outputs - y).square().sum(1), route=route)
        gradient.bounded_sum(batch, None, ClipNorm(1.0))
        assert set(seen) == {"ieee"}
        assert [place.fp32_precision for place in CPU_SETTINGS] == ["bf16", "bf16"]
    finally:
        torch.set_float32_matmul_precision("highest")
        for place, old in zip(CPU_SETTINGS, before, strict=True):
            place.fp32_precision = old


def test_the_older_switch_counts_as_well(settings):
    torch.set_float32_matmul_precision("high")
    try:
        assert coarse(GPU)
        with exact(GPU):
            assert not coarse(GPU)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert not coarse(GPU)


class Opposed(nn.Module):
    """A convolution whose places cancel: the gradient is a small difference of large parts."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(128, 128, 3)

    def forward(self, x):
        found = self.conv(x).flatten(2)
        return (found[:, :, ::2] - 0.999 * found[:, :, 1::2]).mean((1, 2))


class Twice(Opposed):
    """The same with one convolution called twice."""

    def forward(self, x):
        return super().forward(x) - 0.999 * super().forward(x.flip(1))


@pytest.fixture
def sparing(monkeypatch):
    """Rows are not kept, as for many examples: they are made, measured and dropped."""
    monkeypatch.setattr(convolution, "part_of", lambda device: 1)


def opposed(device):
    """An example of nearly equal neighbours."""
    rows = torch.randn(1, 128, 8, 1, device=device).expand(1, 128, 8, 8)
    return rows + 1e-3 * torch.randn(1, 128, 8, 8, device=device)


@pytest.fixture
def rough(monkeypatch):
    """A CPU that rounds the factors of products to ten bits, but where it is asked to be exact."""
    product, full = torch.bmm, [False]

    def short(x):
        return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

    def bmm(a, b, **kwargs):
        return product(*((a, b) if full[0] else (short(a), short(b))), **kwargs)

    @contextmanager
    def fully(device):
        before, full[0] = full[0], True
        yield
        full[0] = before

    for module in (bookkeeping, convolution, joint_terms):
        monkeypatch.setattr(module, "exact", fully)
    monkeypatch.setattr(terms, "coarse", lambda device: not full[0])
    monkeypatch.setattr(positions, "available", lambda device: False)
    monkeypatch.setattr(torch, "bmm", bmm)


@pytest.mark.parametrize("make", [Opposed, Twice])
@pytest.mark.parametrize("route", ["again", "gram"])
@pytest.mark.parametrize("scaled", [False, True])
def test_what_is_measured_is_what_is_summed(rough, sparing, make, route, scaled):
    torch.manual_seed(0)
    gradient = Gradient(make(), lambda outputs, targets: outputs * targets, route=route)
    scale = np.exp(np.random.default_rng(0).normal(size=gradient.layout.size)) if scaled else 1.0
    for _ in range(5):
        batch = Examples((opposed("cpu"), torch.full((1,), 1e4))).take(slice(None))
        total = gradient.bounded_sum(batch, None, ClipNorm(1e-3, scale) if scaled else ClipNorm(1e-3))
        assert float((total.double() / torch.as_tensor(scale)).norm()) <= 1e-3 * (1 + 2.0**-11)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("route", ["again", "gram"])
@pytest.mark.parametrize("scaled", [False, True])
def test_no_example_gets_past_its_clip_by_rounding(settings, sparing, route, scaled):
    for place in settings:
        place.fp32_precision = "tf32"
    torch.manual_seed(0)
    model = Opposed().cuda()
    gradient = Gradient(model, lambda outputs, targets: outputs * targets, route=route)
    scale = np.exp(np.random.default_rng(0).normal(size=gradient.layout.size)) if scaled else 1.0
    bound = ClipNorm(1e-3, scale) if scaled else ClipNorm(1e-3)
    units = torch.as_tensor(scale, dtype=torch.float64, device=GPU)
    for n in range(12):
        batch = Examples((opposed(GPU), torch.ones(1, device=GPU) * 10.0**n)).take(slice(None))
        for _ in range(3):  # without a graph, then with one
            total = gradient.bounded_sum(batch, None, bound)
            assert float((total.double() / units).norm()) <= 1e-3 * (1 + 2.0**-11)


@pytest.mark.filterwarnings("ignore")  # the profiler's own
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_convolutions_are_summed_by_the_gpus_own_library(settings):
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.Flatten(), nn.Linear(4096, 2)).cuda()
    gradient = Gradient(model, nn.CrossEntropyLoss(reduction="none"), route="gram")
    data = torch.randn(100, 64, 8, 8, device=GPU), torch.randint(2, (100,), device=GPU)
    gradient._graphs.wanted = False
    batch = Examples(data).take(slice(None))
    gradient.bounded_sum(batch, None, ClipNorm(1.0))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        gradient.bounded_sum(batch, None, ClipNorm(1.0))
    assert not any("im2col" in event.key for event in seen.key_averages())  # one launch an example


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("route", ["rows", "again", "gram"])
def test_no_example_gets_past_its_clip_in_bfloat16(route):
    """Tokens that cancel: what a factor's product with its weight rounds off is on top of the norm."""
    torch.manual_seed(0)
    model = nn.Linear(64, 96).cuda()

    def opposed_tokens(outputs, targets):
        return (outputs[:, ::2].float() - 0.99 * outputs[:, 1::2].float()).sum((1, 2)) * targets

    gradient = Gradient(model, opposed_tokens, route=route, autocast=torch.bfloat16)
    for n in range(8):
        x = torch.randn(1, 32, 1, 64, device=GPU).expand(1, 32, 2, 64).reshape(1, 64, 64)
        batch = Examples((x, torch.full((1,), 10.0**n, device=GPU))).take(slice(None))
        total = gradient.bounded_sum(batch, None, ClipNorm(1e-3))
        assert float(total.double().norm()) <= 1e-3 * (1 + 2.0**-9)
