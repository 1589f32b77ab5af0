"""DP-AGD of a model: candidates' losses, the budget, and that it learns."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import farthing as ft
from farthing.accounting.filters import RdpFilter, ZcdpFilter
from farthing.errors import BudgetSpent, InvalidValue
from farthing.linear.methods.dpagd import Lengths
from farthing.linear.methods.dpagd_menu import dpagd_menu
from farthing.noise.lattice import SeededStream
from farthing.queries.bounds import ClipValue
from farthing.queries.query import Answer, Receipt
from farthing.torch.gradients.isolation import Isolation
from farthing.torch.gradients.layout import Layout
from farthing.torch.methods.dpagd import ModelRay, RayLosses, dpagd
from farthing.torch.training.records import Examples

LOSS = nn.CrossEntropyLoss(reduction="none")


def problem(records=1500, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    x = torch.randn(records, 4)
    return model, x, x[:, :3].argmax(1)


def ledger(epsilon=1.0, seed=1):
    return ft.Ledger(ft.Budget(epsilon, 1e-5), filter=ZcdpFilter, stream=SeededStream(seed))


def test_scores_are_clipped_losses_at_the_candidates():
    model, x, y = problem(50)
    layout = Layout.of(model)
    direction = torch.linspace(-1, 1, layout.size)
    ray = ModelRay(direction.double().numpy(), np.array([0.0, 0.5, 2.0]))
    batch = Examples((x, y)).take(slice(None))
    found = RayLosses(model, LOSS, layout, physical_batch_size=7).bounded_sum(
        batch, ray, ClipValue(-1.0, 0.0)
    )
    start = nn.utils.parameters_to_vector(model.parameters()).detach()
    for step, score in zip(ray.steps, found, strict=True):
        nn.utils.vector_to_parameters(start - step * direction, model.parameters())
        assert score == pytest.approx(-LOSS(model(x), y).clamp(max=1.0).sum().item(), rel=1e-4)


def test_an_example_that_is_not_finite_counts_as_nothing():
    model, x, y = problem(20)
    contribution = RayLosses(model, LOSS, Layout.of(model))
    ray, bound = ModelRay(np.ones(Layout.of(model).size), np.array([0.0, 0.1])), ClipValue(-1.0, 0.0)
    clean = contribution.bounded_sum(Examples((x[1:], y[1:])).take(slice(None)), ray, bound)
    x[0] = torch.inf
    assert contribution.bounded_sum(Examples((x, y)).take(slice(None)), ray, bound) == pytest.approx(clean)


def test_a_users_records_are_one_loss():
    model, x, y = problem(6)
    users = Examples((x, y), users=[0, 0, 1, 1, 1, 2], records_per_user=2)
    ray, bound = ModelRay(np.ones(Layout.of(model).size), np.array([0.0])), ClipValue(-1e9, 0.0)
    found = RayLosses(model, LOSS, Layout.of(model)).bounded_sum(users.take(slice(None)), ray, bound)
    losses = LOSS(model(x), y)
    assert found[0] == pytest.approx(
        -(losses.sum() - losses[4]).item(), rel=1e-5
    )  # a third record is dropped


def test_it_spends_the_budget_and_no_more_and_learns():
    model, x, y = problem()
    books = ledger(2.0)
    steps = list(
        dpagd(books, model, LOSS, Examples((x, y)), splits=10, grid=Lengths(6), physical_batch_size=None)
    )
    assert 3 <= len(steps) <= 10
    assert 0.8 < books.share <= 1
    assert (model(x).argmax(1) == y).float().mean() > 0.7
    assert steps[-1].w is model
    assert all(step.receipts for step in steps)


def test_frozen_parameters_stay():
    model, x, y = problem(300)
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    list(dpagd(ledger(), model, LOSS, Examples((x, y)), splits=2, grid=Lengths(3)))
    assert torch.equal(before, model[0].weight)


def test_nonsense_is_refused_before_anything_is_charged():
    model, x, y = problem(50)
    books = ft.Ledger(ft.Budget(1.0, 1e-5))
    with pytest.raises(InvalidValue, match="ZcdpFilter"):
        list(dpagd(books, model, LOSS, Examples((x, y))))
    for wrong in (
        {"clip_norm": 0.0},
        {"momentum": 1.0},
        {"search": 0.0},
        {"splits": 0},
        {"objective_clip": -1.0},
    ):
        books = ledger()
        with pytest.raises(InvalidValue):
            list(dpagd(books, model, LOSS, Examples((x, y)), **wrong))
        assert books.share == 0


class Scripted:
    """A ledger whose answers are written down ahead: gradients in turn, and which step is chosen."""

    def __init__(self, gradients, choices):
        self.budget, self.filter, self.asked = ft.Budget(1.0, 1e-5), ZcdpFilter(ft.Budget(1.0, 1e-5)), []
        self.gradients, self.choices = iter(gradients), iter(choices)

    def over(self, records):
        return self

    def ask(self, query, w=None):
        self.asked.append("G" if w is None else "S")
        value = next(self.gradients if w is None else self.choices, None)
        if value is None:
            raise BudgetSpent("the script ends here")
        return Answer(value, Receipt(len(self.asked), "", query.price(self.budget)))


@pytest.mark.parametrize(("momentum", "asked"), [(0.0, "GS" + "GSGSGS" + "G"), (0.5, "GS" + "GSSGS" + "GSS")])
def test_in_later_rounds_a_failed_search_buys_a_better_gradient(momentum, asked):
    """Algorithm 2, lines 9-19; with momentum its memory is dropped first."""
    model, x, y = problem(8)
    gradients = [torch.randn(Layout.of(model).size) for _ in range(asked.count("G") - (momentum == 0))]
    script = Scripted(gradients, [1, 0, 0, 1, 0])
    list(dpagd(script, model, LOSS, Examples((x, y)), momentum=momentum))
    assert "".join(script.asked)[: len(asked)] == asked


def test_on_batches_it_learns_within_the_budget_of_an_rdp_filter():
    model, x, y = problem(3000)
    door = ft.Ledger(ft.Budget(4.0, 1e-5), filter=RdpFilter, stream=SeededStream(1))
    options = {"sampling_rate": 0.1, "splits": 25, "grid": Lengths(6, 1.0)}
    steps = list(dpagd(door, model, LOSS, Examples((x, y)), **options))
    assert {type(receipt.event).__name__ for step in steps for receipt in step.receipts} == {"PoissonEvent"}
    assert door.share <= 1
    assert (model(x).argmax(1) == y).float().mean() > 0.6


def test_on_batches_it_spends_from_a_menu():
    model, x, y = problem(3000)
    budget = ft.Budget(4.0, 1e-5)
    menu = dpagd_menu(budget, 0.1, splits=25, opening=0.0, growth=None)
    door = ft.Ledger(budget, filter=menu, stream=SeededStream(1))
    options = {"sampling_rate": 0.1, "growth": None, "grid": Lengths(6, 1.0)}
    steps = list(dpagd(door, model, LOSS, Examples((x, y)), **options))
    assert {receipt.event for step in steps for receipt in step.receipts if door.filter.cost(receipt.event)}
    assert len(steps) >= 12
    assert door.share <= 1


def test_what_batches_and_penalties_need_is_said_before_anything_is_charged():
    model, x, y = problem(50)
    for options, rule, words in (
        ({"sampling_rate": 0.1}, ZcdpFilter, "filter=RdpFilter"),
        ({}, RdpFilter, "filter=ZcdpFilter"),
        ({"penalty": 0.1}, ZcdpFilter, "public number"),
        ({"noise_multiplier": 0.0}, ZcdpFilter, "noise_multiplier"),
    ):
        door = ft.Ledger(ft.Budget(1.0, 1e-5), filter=rule)
        with pytest.raises(InvalidValue, match=words):
            next(dpagd(door, model, LOSS, Examples((x, y)), **options))
        assert door.share == 0


def test_a_spectral_norm_stands_still_while_losses_are_added_up():
    """Else a record's loss would depend on how many parts of the batch came before it."""
    torch.manual_seed(0)
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
    model = nn.Sequential(normed, nn.Tanh(), nn.utils.parametrizations.spectral_norm(nn.Linear(6, 2)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    x, y = torch.randn(40, 6) * 5, torch.arange(40) % 2
    layout = Layout.of(model)
    ray = ModelRay(np.random.default_rng(0).normal(size=layout.size), np.array([0.0, 0.5, 1.0]))
    scores, bound = RayLosses(model, LOSS, layout, physical_batch_size=4), ClipValue(-1.0, 0.0)
    examples = Examples((x, y))
    whole = scores.bounded_sum(examples.take(np.arange(40)), ray, bound)
    for gone in range(0, 40, 7):
        rest = scores.bounded_sum(examples.take(np.delete(np.arange(40), gone)), ray, bound)
        assert np.abs(whole - rest).max() <= 1 + 1e-5


class Coarse(nn.Module):
    """A model that computes in float32, whatever its weights are."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 2)

    def forward(self, x):
        return nn.functional.linear(x.float(), self.inner.weight.float(), self.inner.bias.float())


@pytest.mark.parametrize("isolated", [None, Isolation.VMAP, Isolation.LOOP])
@pytest.mark.parametrize("fine", [True, False])
def test_an_examples_loss_does_not_round_with_its_company(fine, isolated):
    """Else one record moves the last digits of all losses, and no slack covers that."""
    torch.manual_seed(0)
    stack = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 2))
    model, n = stack if fine else Coarse(), 300 if isolated is None else 60
    examples = Examples((3 * torch.randn(n, 64), torch.arange(n) % 2))
    layout = Layout.of(model)
    ray = ModelRay(np.random.default_rng(0).normal(size=layout.size), np.array([0.0, 0.1, 0.2]))
    scores, bound = RayLosses(model, LOSS, layout, 128, isolated), ClipValue(-100.0, 0.0)
    scores = replace(scores, double=scores.in_double(examples))
    assert scores.double == fine
    whole = scores.bounded_sum(examples.take(np.arange(n)), ray, bound)
    for gone in range(0, n, 50):
        rest = scores.bounded_sum(examples.take(np.delete(np.arange(n), gone)), ray, bound)
        own = scores.bounded_sum(examples.take(np.array([gone])), ray, bound)
        np.testing.assert_allclose(whole - rest, own, rtol=0, atol=1e-9)
