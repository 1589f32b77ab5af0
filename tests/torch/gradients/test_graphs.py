"""Buffers of one shape for batches of many: what a graph runs, run here without one."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from farthing.queries.bounds import ClipCoordinates, ClipNorm
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.gradients.clipping import Automatic, ClipCounted, ClipLayers, rule_of
from farthing.torch.gradients.graphs import BatchGraph, Graphs, Recorded, Room
from farthing.torch.training.records import Examples


def losses(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


def model_and_data():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    return model, torch.randn(20, 5), torch.randint(0, 3, (20,))


def key_of(bound):
    return rule_of(bound).graph_key


PAIRS = [
    (ClipNorm(0.5), ClipNorm(0.3)),
    (ClipNorm(0.5, np.linspace(1, 2, 57)), ClipNorm(0.3, np.linspace(2, 1, 57))),
    (ClipCoordinates(np.full(57, 0.01)), ClipCoordinates(np.full(57, 0.02))),
    (Automatic(0.5), Automatic(0.3)),
    (ClipCounted(0.5), ClipCounted(0.3)),
    (ClipLayers((0.5, 0.2), (36, 21)), ClipLayers((0.3, 0.4), (36, 21))),
]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_batches_of_other_sizes_and_numbers_in_the_same_buffers(first, second):
    model, x, y = model_and_data()
    gradient = Gradient(model, losses)
    gradient.check(x, y)
    assert key_of(first) == key_of(second)
    batch = BatchGraph(gradient._add, Room(x, y, None, rule_of(first), gradient.layout.size, 40), 32)
    x[19] = float("nan")  # stays in the buffers, with weight 0
    for bound, places in ((first, slice(0, 20)), (second, slice(0, 7)), (first, slice(3, 16))):
        batch.room.fill(x[places], y[places], None, rule_of(bound))
        batch.run()
        expected = gradient.bounded_sum(Examples((x[places], y[places])).take(slice(None)), None, bound)
        assert torch.allclose(batch.total, expected, rtol=1e-5, atol=1e-6)


def test_users_in_buffers():
    model, x, y = model_and_data()
    gradient = Gradient(model, losses)
    batch = Examples((x, y), users=np.arange(20) // 3, records_per_user=2).take(slice(None))
    inputs, targets, weights = next(batch.physical_batches(None))
    expected = gradient.bounded_sum(batch, None, ClipNorm(0.5))
    batch = BatchGraph(
        gradient._add, Room(inputs, targets, weights, rule_of(ClipNorm(0.5)), gradient.layout.size, 32), 32
    )
    batch.room.fill(inputs, targets, weights, rule_of(ClipNorm(0.5)))
    batch.run()
    assert torch.allclose(batch.total, expected, rtol=1e-5, atol=1e-6)


def test_a_batch_on_a_cpu_has_no_graph():
    model, x, y = model_and_data()
    gradient = Gradient(model, losses)
    assert Graphs(model, gradient._add, 57).sum(x, y, None, rule_of(ClipNorm(1.0))) is None


def test_kinds_that_need_graphs_of_their_own():
    kinds = [key_of(bound) for pair in PAIRS for bound in pair[:1]]
    assert len(set(kinds)) == len(kinds)
    assert key_of(Automatic(1.0, 0.01)) != key_of(Automatic(1.0, 0.1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_graphs_replay_what_would_be_computed(first, second):
    model, x, y = model_and_data()
    model, x, y = model.cuda(), x.cuda(), y.cuda()
    gradient, plain = Gradient(model, losses), Gradient(model, losses)
    plain._graphs.wanted = False
    for bound, rows in ((first, 20), (first, 18), (first, 20), (second, 7), (second, 20)):
        batch = Examples((x[:rows], y[:rows])).take(slice(None))
        found, expected = (one.bounded_sum(batch, None, bound) for one in (gradient, plain))
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert gradient._graphs._batches


def sequence_model():
    torch.manual_seed(0)
    parts = nn.Linear(5, 16), nn.LayerNorm(16), nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 6), nn.Flatten()
    return nn.Sequential(*parts, nn.Linear(42, 3)), torch.randn(40, 7, 5), torch.randint(0, 3, (40,))


def test_examples_that_are_not_finite_leave_the_buffers_clean():
    model, x, y = sequence_model()
    x[3], x[7, 2, 1], x[9] = float("nan"), float("inf"), 1e30
    gradient, plain = Gradient(model, losses), Gradient(model, losses, route="vmap")
    gradient.check(x, y)
    batch = BatchGraph(gradient._add, Room(x, y, None, rule_of(ClipNorm(0.5)), gradient.layout.size, 64), 64)
    batch.room.fill(x, y, None, rule_of(ClipNorm(0.5)))
    batch.run()
    expected = plain.bounded_sum(Examples((x, y)).take(slice(None)), None, ClipNorm(0.5))
    assert torch.allclose(batch.total, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_graph_leaves_out_what_is_not_finite_and_the_data_alone():
    model, x, y = (part.cuda() for part in sequence_model())
    x[3], x[7, 2, 1], x[9] = float("nan"), float("inf"), 1e30
    before = x.clone()
    gradient, plain = Gradient(model, losses), Gradient(model, losses, route="vmap")
    batch = Examples((x, y)).take(slice(None))
    expected = plain.bounded_sum(batch, None, ClipNorm(0.5))
    for _ in range(4):
        assert torch.allclose(
            gradient.bounded_sum(batch, None, ClipNorm(0.5)), expected, rtol=1e-4, atol=1e-6
        )
    assert gradient._graphs._batches
    assert torch.equal(x.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_recorded_follows_its_tensors(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    x, recorded, runs = torch.zeros(5, device=device), Recorded(torch.device(device)), []

    def make():
        runs.append(1)
        return x + 1, x.sum()

    for n in range(6):
        x.fill_(n)
        more, total = recorded.run(make)
        assert more.tolist() == [n + 1] * 5
        assert float(total) == 5 * n
    assert len(runs) == (6 if device == "cpu" else 3)


def test_graphs_go_with_their_gradient():
    """Their memory must not wait for a garbage collector that counts objects, not bytes."""
    model, x, y = model_and_data()
    gradient = Gradient(model, losses)
    gradient.check(x, y)
    graphs = weakref.ref(gradient._graphs)
    gc.disable()
    try:
        del gradient
        assert graphs() is None
    finally:
        gc.enable()


def test_many_rows_share_few_sizes():
    model, _, _ = model_and_data()
    graphs = Graphs(model, None, 57)
    assert {graphs._size("kind", rows) for rows in range(577, 609)} == {608}
    around = {graphs._size("kind", rows) for rows in range(16_400 - 250, 16_400 + 250)}
    assert len(around) <= 4
    assert max(around) <= 16_650 * 1.02


def test_few_rows_are_filled_up_by_few_unless_they_are_quick():
    """Batches of 8 in buffers of 32 take four times the memory and the time."""
    model, _, _ = model_and_data()
    graphs = Graphs(model, None, 57)
    for rows in range(1, 3000):
        assert rows <= graphs._size("new", rows) <= rows + rows // 16
    graphs._seen |= {"quick": 0.001, "slow": 1.0}
    assert [graphs._size("quick", rows) for rows in (8, 40, 512)] == [32, 64, 512]
    assert [graphs._size("slow", rows) for rows in (8, 40, 512)] == [8, 40, 512]


class Lone(Graphs):
    """Graphs without a GPU: batches are run as they are."""

    def _new(self, key, inputs, targets, weights, rule, size):
        room = Room(inputs, targets, weights, rule, self._count, size)
        self._batches[key] = batch = BatchGraph(self._add, room, size, self._total)
        self._total = batch.total
        return batch


def test_a_huge_sum_is_lent_and_never_overwritten_while_somebody_holds_it(monkeypatch):
    model, x, y = model_and_data()
    gradient, rule = Gradient(model, losses), rule_of(ClipNorm(0.5))
    gradient.check(x, y)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    graphs = Lone(model, lambda *given: given[-2].add_(len(given[0])), 57)
    graphs.wanted = graphs._lends = True
    first = graphs.sum(x, y, None, rule)
    place, views = first.data_ptr(), first.split(7)
    del first
    assert graphs.sum(x[:5], y[:5], None, rule) is None  # somebody holds views of it
    assert views[0].tolist() == [20.0] * 7
    del views
    copies = [graphs.sum(x[:rows], y[:rows], None, rule) for rows in (5, 20)]
    assert [float(one[0]) for one in copies] == [5.0, 20.0]
    assert place not in [one.data_ptr() for one in copies]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_without_memory_for_a_graph_it_goes_on_without():
    model, x, y = model_and_data()
    model, x, y = model.cuda(), x.cuda(), y.cuda()
    gradient = Gradient(model, losses)
    batch, bound = Examples((x, y)).take(slice(None)), ClipNorm(0.5)
    expected = gradient.bounded_sum(batch, None, bound)
    add, calls = gradient._graphs._add, []

    def greedy(*given):
        calls.append(1)
        if len(calls) == 2:
            torch.empty(2**50, dtype=torch.uint8, device="cuda")
        add(*given)

    gradient._graphs._add = greedy
    for _ in range(4):
        assert torch.allclose(gradient.bounded_sum(batch, None, bound), expected, rtol=1e-5, atol=1e-6)
    assert len(calls) == 2
    assert not gradient._graphs.wanted
    assert not gradient._graphs._rooms


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_graphs_of_several_sizes_share_their_buffers():
    torch.manual_seed(0)
    model = nn.Linear(1000, 3).cuda()
    x, y = torch.randn(640, 1000, device="cuda"), torch.randint(0, 3, (640,), device="cuda")
    gradient, bound = Gradient(model, losses), ClipNorm(0.5)
    for rows in (600, 600, 570, 630, 540, 600, 630, 570):
        batch = Examples((x[:rows], y[:rows])).take(slice(None))
        found = gradient.bounded_sum(batch, None, bound)
        expected = Gradient(model, losses, route="vmap").bounded_sum(batch, None, bound)
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    batches = gradient._graphs._batches.values()
    assert len(batches) >= 3
    assert len({batch.inputs.data_ptr() for batch in batches}) == 1
