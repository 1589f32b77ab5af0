"""Sums in secret blocks, of values built to round badly: bounded by one block, and not by the batch."""

import functools
import math

import numpy as np
import pytest
import torch
from torch import nn

from farthing.audit.steps import badly_rounded, moved
from farthing.noise import native
from farthing.queries.bounds import ClipNorm
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.kernels import blocks as secret
from farthing.torch.kernels import totals
from farthing.torch.kernels.totals import SLACK, among
from farthing.torch.training.records import Examples


def loss(outputs, targets):
    return outputs.flatten(1)[:, 0] * targets


def excess(gradient, shape, terms):
    """How much further than 1 neighbours' sums are apart: an example's gradient is its term, in one place."""
    inputs = torch.eye(1, math.prod(shape)).view(1, *shape).repeat(len(terms), *(1 for _ in shape))

    def total(terms):
        batch = Examples((inputs[: len(terms)], torch.tensor(terms, dtype=torch.float32))).take(slice(None))
        return gradient.bounded_sum(batch, None, ClipNorm(1.0)).double().numpy()

    return moved(total, terms) - 1


@pytest.fixture
def same_blocks(monkeypatch):
    """Blocks that do not change from sum to sum: between neighbours only one differs."""

    def drawn(count, blocks):
        at = np.random.default_rng(0).integers(blocks, size=count)
        return np.argsort(at, kind="stable"), np.bincount(at, minlength=blocks).tolist()

    monkeypatch.setattr(secret, "drawn_blocks", drawn)


IN_BLOCKS = {
    "linear": (lambda: nn.Sequential(nn.Linear(16, 16, bias=False)), (16,), {}),
    "residual": (lambda: Residual(), (16,), {"physical_batch_size": 512}),
    "head": (lambda: nn.Sequential(nn.Linear(200, 10, bias=False)), (200,), {}),
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
        assert excess(gradient, shape, terms) <= SLACK * 3 / 4
    batch = Examples((torch.zeros(examples, *shape), torch.zeros(examples))).take(slice(None))
    assert gradient._blocks(batch) > 1


def test_blocks_as_long_as_a_batch_are_noticed(same_blocks, monkeypatch):
    """A planted bug: a sum that is added up in one float32 product, in the worst order."""
    monkeypatch.setattr(secret, "ROUNDINGS", 2**40)

    def mm(a, b, out=None):
        found = torch.from_numpy(
            (a[:1] * b[:, :1].t()).numpy().cumsum(axis=1, dtype=np.float32)[:, -1:].copy()
        )
        return found.expand(len(a), b.shape[1]).clone() if out is None else out.copy_(found)

    gradient = Gradient(nn.Sequential(nn.Linear(16, 16, bias=False)), loss, expected_batch_size=4096)
    excess(gradient, (16,), badly_rounded(64, bits=23))
    monkeypatch.setattr(torch, "mm", mm)
    terms = badly_rounded(4096, bits=23)
    assert excess(gradient, (16,), terms) > 4 * SLACK


@functools.cache
def depths(leaves):
    """The depths of the leaves of every binary tree, sorted."""
    if leaves == 1:
        return {(0,)}
    pairs = ((a, b) for n in range(1, leaves // 2 + 1) for a in depths(n) for b in depths(leaves - n))
    return {tuple(sorted(1 + d for d in a + b)) for a, b in pairs}


def test_no_tree_of_additions_is_worse_than_the_lemma_says():
    """Every term is rounded as often as it is deep, and once as a product."""
    for leaves in range(1, 14):
        chain = sorted([*range(1, leaves), leaves - 1])
        squares = {depth: sum((d + 1) ** 2 for d in depth) for depth in depths(leaves)}
        assert max(squares.values()) == squares[tuple(chain)] <= leaves * (leaves + 9 / 4) ** 2 / 3
    for leaves in range(2, 2**11):
        chain_squares = sum(n**2 for n in range(2, leaves + 1)) + leaves**2
        assert chain_squares <= leaves * (leaves + 9 / 4) ** 2 / 3
        assert (leaves + 9 / 4) / (1 - leaves * 2.0**-24) <= leaves + 3


@pytest.mark.parametrize("count", [16, 64, 256])
def test_a_chain_of_additions_comes_near_to_the_lemma_and_not_beyond(count):
    """Terms of at most 1, each chosen so that its addition is rounded up by nearly half a unit of the sum."""
    total, exact, unit = np.float32(1.0), 1.0, 2.0**-24
    for _ in range(count - 1):
        half = float(np.spacing(np.float32(total + np.float32(0.5)))) / 2
        term = np.float32(
            math.floor((1.0 - half) / (2 * half)) * 2 * half + half + (unit if half > unit else 0.0)
        )
        assert 0 < term <= 1
        total, exact = np.float32(total + term), exact + float(term)
    off = (float(total) - exact) / unit
    assert count**2 / 5 < off <= count * (count + 3) / math.sqrt(3)


@pytest.mark.parametrize("outputs", [2, 5, 10, 16])
def test_products_of_few_outputs_are_added_in_float64(outputs):
    torch.manual_seed(0)
    rows, inputs = 333, 203
    u, v = torch.randn(rows, outputs), torch.randn(rows, inputs)
    exact = (u.double().t() @ v.double()).float()
    near = {"rtol": 2.0**-23, "atol": 1e-12}  # the last bit: a sum in float64 may be rounded either way
    for turned in (False, True):
        out = torch.full((inputs, outputs), 9.0).t() if turned else torch.full((outputs, inputs), 9.0)
        with secret.blocked((rows,), expected=rows, count=1):
            assert totals.product(u, v, rows, out) is out
            torch.testing.assert_close(out, exact, **near)
            torch.testing.assert_close(totals.product(u, v, rows), exact, **near)


@pytest.mark.parametrize("kernels", [True, False])
def test_many_blocks_in_memory_that_is_not_contiguous(kernels, monkeypatch):
    if not kernels:
        monkeypatch.setattr(native, "kernels", lambda work=0: None)
    torch.manual_seed(0)
    for count in (1, 2, 3, 4, 5, 8):
        u, v = torch.randn(60 * count, 20), torch.randn(60 * count, 30)
        exact, out = u.double().t() @ v.double(), torch.full((30, 20), 9.0).t()
        with secret.blocked((60,) * count, expected=60 * count, count=count):
            totals.product(u, v, len(u), out)
            torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(totals.product(u, v, len(u)).double(), exact, rtol=1e-5, atol=1e-4)


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
        with secret.blocked(sizes, expected=784, count=5), pytest.MonkeyPatch.context() as patch:
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
        with secret.blocked((size, 1), expected, count=2):
            totals.product(some[:-each], some[:-each], size - 1, wide=None if each == 1 else torch.zeros(1))
            totals.product(
                torch.ones((size + 1) * each, 2),
                torch.ones((size + 1) * each, 2),
                size + 1,
                wide=None if each == 1 else torch.zeros(size + 1, dtype=torch.bool),
            )
        most = (roundings - 2 * (1.25 * expected + 64)) * (1 / (2 * each**0.5) if each > 1 else 3**0.5)
        assert len(pieces) >= 3
        assert (max(pieces[1:]) + 3) * size <= most
        assert pieces[0] == (size - 1) * each  # not these blocks: all at once, in float64


def test_a_block_with_an_example_that_cancels_is_summed_in_float64():
    u, v = torch.ones(64, 1), torch.ones(64, 1)
    v[:16], v[16:48], v[48:] = 2.0**30, 0.125, -(2.0**30)  # in float32 what is between is lost
    with secret.blocked((2,), expected=2, count=1):
        found = totals.product(u, v, 2, wide=torch.tensor([True, False]))
    assert float(found) == 4.0


def test_every_example_is_in_one_block_and_the_number_of_blocks_is_public():
    places, sizes = secret.drawn_blocks(1000, 7)
    assert len(sizes) == 7
    assert sum(sizes) == 1000
    assert sorted(places) == list(range(1000))
    assert not np.array_equal(places, secret.drawn_blocks(1000, 7)[0])
    gradient = Gradient(IN_BLOCKS["linear"][0](), loss, expected_batch_size=1000)
    examples = Examples((torch.zeros(2000, 16), torch.zeros(2000)))
    gradient.bounded_sum(examples.take(slice(4)), None, ClipNorm(1.0))
    counts = {gradient._blocks(examples.take(slice(n))) for n in (0, 1, 64, 65, 999, 1001, 2000)}
    assert len(counts) == 1
    with among(4000):  # a part of a batch that other ranks have the rest of
        assert gradient._blocks(examples.take(slice(64))) == 0


def test_parts_that_are_added_where_the_sum_lies_leave_fewer_roundings_to_blocks():
    expected = 512
    left, fewer = (secret._spare(expected, onto) for onto in (1, secret.ONTO))
    assert left - fewer == (secret.ONTO - 1) * (1.25 * expected + 64)
    assert secret.block_count(expected, 16, onto=secret.ONTO) >= secret.block_count(expected, 16)
    assert secret.adds_up(expected)
    assert not secret.adds_up(4096)


def test_blocks_that_would_often_be_longer_than_a_part_are_not_drawn():
    assert secret.block_count(16, 64) == 3
    assert secret.block_count(16, 64, most=4) == 0
