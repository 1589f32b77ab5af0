"""Networks at flat weights: bounded sums against automatic differentiation, whole updates, and refusals."""

import numpy as np
import pytest
import torch
from torch import nn

import farthing as ft
from farthing.budget import Unit
from farthing.errors import InvalidValue, Unsupported
from farthing.federated.protocol import ClientAgent, Parties
from farthing.federated.terms import Invitation
from farthing.queries.bounds import ClipCoordinates, ClipNorm
from farthing.torch.kernels.totals import SLACK
from farthing.torch.training.network import COVERED, Network, WholeUpdate
from farthing.torch.training.records import Examples

LOSS = nn.CrossEntropyLoss(reduction="none")
ALL = slice(None)


def made(records=12, seed=0):
    inputs = torch.randn(records, 4, generator=torch.Generator().manual_seed(seed))
    return inputs, (inputs[:, 0] > 0).long()


def network(**options):
    torch.manual_seed(0)
    return Network(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), LOSS, **options)


def by_hand(model, w, inputs, targets):
    """Every example's gradient in float64, by torch alone."""
    model = model.double()
    torch.nn.utils.vector_to_parameters(torch.from_numpy(w), model.parameters())
    rows = []
    for x, y in zip(inputs.double(), targets, strict=True):
        found = torch.autograd.grad(LOSS(model(x[None]), y[None]).sum(), list(model.parameters()))
        rows.append(torch.cat([part.flatten() for part in found]).numpy())
    return np.array(rows)


def test_the_sum_is_that_of_gradients_clipped_a_little_below_the_bound():
    inputs, targets = made()
    asked = network()
    records = asked.check(Examples((inputs, targets)))
    w = np.random.default_rng(0).normal(size=asked.size).astype(np.float32).astype(np.float64)
    clip = 0.3
    found = asked.gradient.bounded_sum(records.take(ALL), w, ClipNorm(clip))
    torch.manual_seed(0)
    rows = by_hand(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), w, inputs, targets)
    norms = np.linalg.norm(rows, axis=1)
    assert (norms > clip).any()
    expected = rows.T @ np.minimum(1.0, clip / (1 + SLACK) / norms)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_computed_sums_of_neighbours_are_within_the_bound():
    inputs, targets = made(40)
    asked = network()
    records = asked.check(Examples((1e3 * inputs, targets)))
    w = asked.start()
    whole = asked.gradient.bounded_sum(records.take(ALL), w, ClipNorm(1.0))
    for place in range(0, 40, 7):
        others = np.delete(np.arange(40), place)
        without = asked.gradient.bounded_sum(records.take(others), w, ClipNorm(1.0))
        assert np.linalg.norm(whole - without) <= 1.0
    nobody = asked.gradient.bounded_sum(records.take(np.arange(0)), w, ClipNorm(1.0))
    np.testing.assert_array_equal(nobody, asked.gradient.zero(records, w, ClipNorm(1.0)))


def test_more_examples_than_the_theorem_covers_widen_the_slack_by_a_public_number():
    assert network().slack == SLACK
    assert network(most=COVERED).slack == SLACK
    assert network(most=2**20).slack == SLACK + 2.0**-2
    with pytest.raises(InvalidValue, match="more records than most=32768"):
        network().check(Examples((torch.zeros(COVERED + 1, 4), torch.zeros(COVERED + 1).long())))


def test_weights_are_rounded_to_float32_and_come_back():
    asked = network()
    w = np.random.default_rng(1).normal(size=asked.size)
    asked.put(w)
    np.testing.assert_array_equal(asked.start(), w.astype(np.float32))
    with pytest.raises(InvalidValue, match=rf"{asked.size} numbers, got shape \(3,\)"):
        asked.put(np.zeros(3))
    with pytest.raises(InvalidValue, match="numbers"):
        asked.gradient.zero(None, np.zeros((1, asked.size)), ClipNorm(1.0))


def test_only_the_norm_of_a_gradient_is_bounded():
    asked = network()
    with pytest.raises(Unsupported, match="does not enforce"):
        ft.Query(ft.Everyone(), asked.gradient, ClipCoordinates(np.ones(asked.size)), ft.Gaussian(1.0))
    with pytest.raises(Unsupported, match="L2 norm"):
        asked.gradient.zero(None, asked.start(), ClipNorm(1.0, order=1))


def test_weights_in_another_precision_are_refused():
    with pytest.raises(Unsupported, match="must be float32, small has some in float64"):
        Network(nn.Linear(2, 1).double(), LOSS, name="small")
    with pytest.raises(InvalidValue, match=r"must be an nn\.Module"):
        Network(len, LOSS)


def test_a_model_that_mixes_examples_is_refused_before_any_sum():
    mixing = Network(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)), LOSS)
    with pytest.raises(Unsupported, match="BatchNorm"):
        mixing.check(Examples(made()))


def test_labels_that_the_loss_does_not_take_count_as_nothing_however_many():
    inputs, targets = made()
    found, bound = network(), ClipNorm(1.0)
    for wrong in ([5], [0, 1, 2, 3, 4, 5]):
        labels = targets.clone()
        labels[wrong] = 77
        some = found.check(Examples((inputs, labels))).take(slice(None))
        rest = Examples((inputs, targets)).take(np.delete(np.arange(12), wrong))
        totals = [found.gradient.bounded_sum(b, found.start(), bound) for b in (some, rest)]
        assert np.allclose(*totals, atol=1e-6)


def people(records=12, per_user=3, seed=0):
    users = np.arange(records) // per_user
    return Examples(made(records, seed), users=users, records_per_user=per_user)


def trained_by_hand(w, inputs, targets, steps, lr):
    """An update by torch's own SGD."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    torch.nn.utils.vector_to_parameters(torch.from_numpy(w).float(), model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for _ in range(steps):
        optimizer.zero_grad()
        LOSS(model(inputs), targets).mean().backward()
        optimizer.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy() - w


def test_a_user_s_update_is_sgd_on_its_own_records_clipped_as_a_whole():
    asked, records = network(), people()
    asked.check(records)
    w = asked.start()
    update, clip = asked.update(4, 0.5), 0.2
    each = [trained_by_hand(w, *(part[3 * n : 3 * n + 3] for part in made()), 4, 0.5) for n in range(4)]
    norms = np.linalg.norm(each, axis=1)
    assert (norms > clip).any()
    found = update.bounded_sum(records.take(ALL), w, ClipNorm(clip))
    np.testing.assert_allclose(found, np.array(each).T @ np.minimum(1.0, clip / norms), atol=1e-6)
    np.testing.assert_array_equal(asked.start(), w)  # nothing of the last user stays in the model
    assert update.clipped is Unit.USER


def test_a_user_with_ill_records_counts_as_zero_and_moves_nobody_else():
    (inputs, targets), users = made(), np.arange(12) // 3
    ill = inputs.clone()
    ill[4] = torch.tensor([float("nan"), 1e30, -1e30, float("inf")])
    asked = network()
    w, update = asked.start(), asked.update(3, 0.5)
    others = Examples((inputs, targets), users=users, records_per_user=3).take(np.array([0, 2, 3]))
    found = update.bounded_sum(
        Examples((ill, targets), users=users, records_per_user=3).take(ALL), w, ClipNorm(1.0)
    )
    np.testing.assert_allclose(found, update.bounded_sum(others, w, ClipNorm(1.0)), atol=1e-12)


def test_local_batches_follow_the_order_of_a_user_s_records():
    asked, w = network(), None
    records, w = people(4, 4), asked.start()
    inputs, targets = made(4)
    found = asked.update(2, 0.5, 2).bounded_sum(records.take(ALL), w, ClipNorm(1e6))
    first = trained_by_hand(w, inputs[:2], targets[:2], 1, 0.5)
    second = trained_by_hand((w + first).astype(np.float32).astype(float), inputs[2:], targets[2:], 1, 0.5)
    np.testing.assert_allclose(found, first + second, atol=1e-5)


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"lr": 0.0}, {"lr": np.nan}, {"batch": -1}])
def test_nonsense_of_a_local_training_is_refused(wrong):
    with pytest.raises(InvalidValue):
        network().update(**{"steps": 1, "lr": 0.1} | wrong)


def test_what_a_coordinator_asks_is_words_and_numbers():
    asked = network(name="small", source="ab" * 32)
    assert asked.gradient.described == {"network": "small", "hash": "ab" * 32, "kind": "gradient"}
    told = {"network": "small", "hash": "ab" * 32, "kind": "update", "steps": 2, "lr": 0.5, "batch": 0}
    assert asked.update(2, 0.5).described == told


def test_agents_with_ledgers_of_their_own_answer_for_a_network():
    asked = network()
    budget = ft.Budget(8.0, 1e-6, observer="server")
    ledgers = [ft.Ledger(budget).over(asked.check(Examples(made(200, seed)))) for seed in range(2)]
    clients = Parties(ClientAgent(ledger, 200) for ledger in ledgers)
    clients.invite(Invitation(1.0, ft.Poisson(0.5), rounds=3))
    w = asked.start()
    for _ in range(3):
        got = clients.ask(asked.gradient, w)
        assert (got.count, got.total.shape) == (2, (asked.size,))
        w = w - 0.5 * got.mean
    assert clients.alive == 0
    with pytest.raises(ft.BudgetSpent):
        clients.ask(asked.gradient, w)


class Remembers(nn.Linear):
    """A layer that keeps something of long inputs only, which no check on made-up examples meets."""

    def __init__(self):
        super().__init__(1, 1)
        self.register_buffer("seen", torch.zeros(1))
        self.calls = 0

    def forward(self, x):
        if (x > 50).any():
            self.seen += x.mean()
            self.calls += 1
        return super().forward(x) + self.seen + self.calls


def test_what_one_user_leaves_in_a_model_no_other_user_meets():
    """The sum of three users is that of the two others and its own, whoever comes first."""
    found = Network(Remembers(), lambda out, y: (out.squeeze(1) - y).square())
    x = torch.tensor([[100.0], [90.0], [1.0], [2.0], [3.0], [0.5]])
    people = Examples((x, torch.ones(6)), users=[0, 0, 1, 1, 2, 2], records_per_user=2)
    update, w = WholeUpdate(found, steps=2, lr=0.01), found.start()

    def total(*users):
        return update.bounded_sum(people.take(np.array(users)), w, ClipNorm(0.5))

    alone = [total(user) for user in range(3)]
    np.testing.assert_allclose(total(0, 1, 2), sum(alone), rtol=1e-12)
    np.testing.assert_allclose(total(1, 2), alone[1] + alone[2], rtol=1e-12)
    assert (float(found.model.seen), found.model.calls) == (0.0, 0)
