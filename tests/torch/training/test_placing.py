"""Examples at places of their own: what is computed of one does not depend on the others."""

import numpy as np
import pytest
import torch
from torch import nn

from farthing.queries.bounds import ClipNorm
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.gradients.clipping import ClipCounted
from farthing.torch.training import placing as batches
from farthing.torch.training.network import Network
from farthing.torch.training.placing import PaddedExamples, PlacedBatch
from farthing.torch.training.records import Examples

WIDE = 300


def squared(out, y):
    return (out.squeeze(1) - y).square()


def hostile(x, hidden, rng):
    """Weights at which the sign of a record's residual is that of a rounding error."""
    first = rng.normal(size=(hidden, WIDE)).astype(np.float32)
    bias = -(first.astype(np.float64) @ x.double().numpy()).astype(np.float32)
    last = np.zeros(hidden, np.float32)
    last[0] = 1e6
    return np.concatenate([first.ravel(), bias, last, [0.0]]).astype(np.float64)


@pytest.mark.parametrize("route", ["auto", "vmap", "loop"])
@pytest.mark.parametrize("users", [False, True])
def test_one_record_moves_the_sum_by_one_clip_at_weights_chosen_against_the_others(monkeypatch, route, users):
    rng = np.random.default_rng(0)
    model = nn.Sequential(nn.Linear(WIDE, 8), nn.Linear(8, 1))
    network, places = Network(model, squared, route=route, placed=True), rng.integers(64, size=8)
    for count in (2, 3, 5, 8):
        x = torch.from_numpy(rng.normal(size=(count, WIDE)).astype(np.float32))
        whose = {"users": np.arange(count), "records_per_user": 2} if users else {}
        records = Examples((x, torch.zeros(count)), **whose)
        for other in range(1, count):
            w, sums = hostile(x[other], 8, rng), []
            for members in (np.arange(count), np.arange(1, count)):
                monkeypatch.setattr(batches, "drawn_places", lambda _, n, m=members: places[m] % n)
                sums.append(network.gradient.bounded_sum(records.take(members), w, ClipNorm(1e-3)))
            assert np.linalg.norm(sums[0] - sums[1]) <= 1e-3


class Gaps(torch.utils.data.Dataset):
    """Every third record cannot be read."""

    def __len__(self):
        return 9

    def __getitem__(self, place):
        if place % 3 == 2:
            raise ValueError(place)
        return torch.full((2,), float(place)), place


@pytest.mark.parametrize("places", [1, 4, 64])
def test_every_example_is_read_once_at_its_place(places):
    rows = torch.arange(1.0, 21.0)
    for data, wanted in (((rows[:, None], rows), range(1, 21)), (Gaps(), [0, 1, 3, 4, 6, 7])):
        batch = PlacedBatch(Examples(data).take(slice(None)), places)
        found = []
        for inputs, targets, weights in batch.physical_batches(3):
            assert len(inputs) == len(targets) == len(weights) == places
            assert torch.equal(inputs[:, 0].double(), targets.double())
            assert not targets[weights == 0].any()
            found += targets[weights > 0].tolist()
        assert sorted(found) == list(wanted)


def test_placed_sums_are_those_of_the_batch():
    torch.manual_seed(0)
    model, loss = (
        nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)),
        nn.CrossEntropyLoss(reduction="none"),
    )
    data = torch.randn(150, 4), torch.randint(2, (150,))
    sums = []
    for placed in (False, True):
        network = Network(model, loss, placed=placed)
        records = network.check(Examples(data))
        sums.append(network.gradient.bounded_sum(records.take(slice(None)), network.start(), ClipNorm(0.5)))
    np.testing.assert_allclose(*sums, atol=1e-4)
    assert not network.gradient.bounded_sum(records.take(slice(0)), network.start(), ClipNorm(0.5)).any()


@pytest.mark.parametrize("route", ["fast", "vmap", "loop"])
@pytest.mark.parametrize("users", [False, True])
def test_rows_that_fill_up_are_not_counted_among_those_within_the_clip(route, users):
    """One that is drawn would take the place of one that counts, and move the count twice as far."""
    bound = ClipCounted(1e-3, share=0.3)  # every gradient is longer: each counts -½, and a blank would ½
    whose = {"users": np.arange(5), "records_per_user": 2} if users else {}
    records = PaddedExamples(Examples((torch.ones(5, 2), torch.full((5,), 9.0)), **whose), 8)
    found = Gradient(nn.Linear(2, 1), squared, route=route)
    for count in range(6):
        total = found.bounded_sum(records.take(np.arange(count)), None, bound)
        assert round(float(total[-1]) / bound.unit, 3) == -count / 2
