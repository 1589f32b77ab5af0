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
from farthing.torch.gradients.terms import Factor, Lookup
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


@pytest.fixture
def same_blocks(monkeypatch):
    """Blocks that do not change from sum to sum: between neighbours only one differs."""

    def drawn(count, blocks):
        at = np.random.default_rng(0).integers(blocks, size=count)
        return [np.flatnonzero(at == block) for block in range(blocks)]

    monkeypatch.setattr(totals, "drawn_blocks", drawn)


IN_BLOCKS = {
    "linear": (lambda: nn.Sequential(nn.Linear(16, 16, bias=False)), (16,), {}),
    "residual": (lambda: Residual(), (16,), {"physical_batch_size": 512}),
    "tokens": (lambda: nn.Linear(64, 600, bias=False), (16, 64), {"route": "gram"}),
}


class Residual(nn.Module):
    """A linear layer that is no stack, so that a tape notes its terms."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16, bias=False)

    def forward(self, x):
        return self.layer(x) + 0.0


@pytest.mark.parametrize("examples", [700, 4096])
@pytest.mark.parametrize("case", IN_BLOCKS)
def test_sums_in_blocks_are_within_the_slack(case, examples, same_blocks):
    """The sum of neighbours, given the blocks: bounded by the length of one block, and not of the batch."""
    if case == "tokens":
        examples //= 16
    model, shape, options = IN_BLOCKS[case]
    gradient = Gradient(model(), loss, expected_batch_size=examples, **options)
    for apart in (1, 8):
        terms = badly_rounded(examples, apart, bits=23)
        assert excess(gradient, shape, ClipNorm(1.0), terms, "cpu") <= SLACK * 3 / 4
    batch = Examples((torch.zeros(examples, *shape), torch.zeros(examples))).take(slice(None))
    assert gradient._blocks(batch) > 1


def test_blocks_as_long_as_a_batch_are_noticed(same_blocks, monkeypatch):
    """A planted bug: a sum that is added up in one float32 product, in the worst order."""
    monkeypatch.setattr(totals, "_ROUNDINGS", 2**40)

    def mm(a, b, out=None):
        found = torch.from_numpy(
            (a[:1] * b[:, :1].t()).numpy().cumsum(axis=1, dtype=np.float32)[:, -1:].copy()
        )
        return found.expand(len(a), b.shape[1]).clone() if out is None else out.copy_(found)

    gradient = Gradient(nn.Sequential(nn.Linear(16, 16, bias=False)), loss, expected_batch_size=4096)
    excess(gradient, (16,), ClipNorm(1.0), badly_rounded(64, bits=23), "cpu")
    monkeypatch.setattr(torch, "mm", mm)
    terms = badly_rounded(4096, bits=23)
    assert excess(gradient, (16,), ClipNorm(1.0), terms, "cpu") > 4 * SLACK


@pytest.mark.parametrize("each", [1, 16])
def test_sums_in_blocks_are_those_of_float64(each):
    torch.manual_seed(0)
    sizes = (180, 0, 3, 400, 201) if each == 1 else (11, 0, 1, 60, 12)
    rows = sum(sizes) * each
    u, v = torch.randn(rows, 5), torch.randn(rows, 70)
    exact = u.double().t() @ v.double()
    cancels = torch.zeros(sum(sizes), dtype=torch.bool)
    cancels[-1] = True
    for kernels in (True, False):
        with totals.blocked(sizes, expected=784, count=5), pytest.MonkeyPatch.context() as patch:
            if not kernels:
                patch.setattr(native, "kernels", lambda work=0: None)
            for wide in (None, cancels) if each == 1 else (cancels, ~cancels, None):
                found = totals.product(u, v, sum(sizes), wide=wide).double()
                torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-4)
            weights = torch.rand(rows)
            torch.testing.assert_close(totals.weighted(v, weights).double(), weights.double() @ v.double())


@pytest.mark.parametrize("each", [1, 16])
def test_pieces_of_a_block_are_as_short_as_the_theorem_asks(each, monkeypatch):
    pieces, mm = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out=None: pieces.append(len(b)) or mm(a, b, out=out))
    expected, roundings = 1000, 3 * 2**14
    for size in (8, 60) if each > 1 else (150, 260, 500):
        pieces.clear()
        some = torch.ones(size * each, 2)
        with totals.blocked((size, 1), expected, count=2):
            totals.product(some[:-each], some[:-each], size - 1, wide=None if each == 1 else torch.zeros(1))
            totals.product(
                torch.ones((size + 1) * each, 2),
                torch.ones((size + 1) * each, 2),
                size + 1,
                wide=None if each == 1 else torch.zeros(size + 1, dtype=torch.bool),
            )
        most = (roundings - 2 * 1.25 * expected) / (2 * each**0.5 if each > 1 else 1)
        assert len(pieces) >= 3
        assert max(pieces[1:]) * size < most
        assert pieces[0] == (size - 1) * each  # not these blocks: all at once, in float64


def test_a_block_with_an_example_that_cancels_is_summed_in_float64():
    u, v = torch.ones(64, 1), torch.ones(64, 1)
    v[:16], v[16:48], v[48:] = 2.0**30, 0.125, -(2.0**30)  # in float32 what is between is lost
    with totals.blocked((2,), expected=2, count=1):
        found = totals.product(u, v, 2, wide=torch.tensor([True, False]))
    assert float(found) == 4.0


def test_every_example_is_in_one_block_and_the_number_of_blocks_is_public():
    blocks = totals.drawn_blocks(1000, 7)
    assert len(blocks) == 7
    assert sorted(np.concatenate(blocks)) == list(range(1000))
    assert not np.array_equal(np.concatenate(blocks), np.concatenate(totals.drawn_blocks(1000, 7)))
    gradient = Gradient(IN_BLOCKS["linear"][0](), loss, expected_batch_size=1000)
    examples = Examples((torch.zeros(2000, 16), torch.zeros(2000)))
    gradient.bounded_sum(examples.take(slice(4)), None, ClipNorm(1.0))
    counts = {gradient._blocks(examples.take(slice(n))) for n in (0, 1, 64, 65, 999, 1001, 2000)}
    assert len(counts) == 1
    with among(4000):  # a part of a batch that other ranks have the rest of
        assert gradient._blocks(examples.take(slice(64))) == 0


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
