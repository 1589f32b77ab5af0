"""Training: what is released, what it is divided by, when it ends, what is refused before a charge."""

import io
import itertools
import math
import warnings

import dp_accounting as dp
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from torch import nn

import farthing as ft
from farthing.accounting.filters import BasicFilter
from farthing.errors import BudgetSpent, InvalidValue, PromiseBroken, Unsupported
from farthing.ledger.verifier import verify
from farthing.noise.lattice import SeededStream
from farthing.queries.events import GaussianEvent, PoissonEvent
from farthing.torch.gradients.clipping import Automatic, ClipLayers
from farthing.torch.kernels.noise import TensorGaussian
from farthing.torch.training.loop import train
from farthing.torch.training.optim import DPAdam
from farthing.torch.training.plan import planned
from farthing.torch.training.records import Examples
from farthing.torch.training.schedules import Quantile
from farthing.torch.training.watching import evaluate

BUDGET = ft.Budget(2.0, 1e-5)
LOSS = nn.CrossEntropyLoss(reduction="none")


def data(records=400, seed=0):
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(records, 4, generator=made)
    return x, (x[:, 0] + 0.5 * x[:, 1] > 0).long()


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def seeded(seed=1, budget=BUDGET, **options):
    return ft.Ledger(budget, stream=SeededStream(seed), **options)


def sgd(model, lr=0.5):
    return torch.optim.SGD(model.parameters(), lr=lr)


class Quiet(TensorGaussian):
    """No noise at all, to see what is under it."""

    def release(self, total, bound, stream, turn=0):
        return total


def clipped_mean(model, x, y, clip, divisor):
    """By a loop over single examples and torch's own autograd."""
    total = torch.zeros_like(flat(model))
    for place in range(len(x)):
        gradients = torch.autograd.grad(
            LOSS(model(x[place : place + 1]), y[place : place + 1]).sum(), list(model.parameters())
        )
        row = torch.cat([g.flatten() for g in gradients])
        total += row * min(1.0, clip / float(row.norm()))
    return total / divisor


def test_an_update_is_the_clipped_sum_over_the_expected_batch():
    x, y = data()
    model, rate = network(), 0.1
    batch = SeededStream(1).poisson_indices(rate, 400)
    assert len(batch) != 40  # the divisor is told apart from the batch that came
    wanted = flat(model) - 0.5 * clipped_mean(model, x[batch], y[batch], 0.3, 40)
    training = train(
        model,
        LOSS,
        (x, y),
        seeded(),
        sampling_rate=rate,
        clip_norm=0.3,
        noise_multiplier=2.0,
        optimizer=sgd(model),
        mechanism=Quiet,
        physical_batch_size=7,
    )
    step = next(training)
    assert torch.allclose(flat(model), wanted, atol=1e-6)
    assert (step.t, step.expected_batch_size, step.clip_norm, step.noise_multiplier) == (1, 40.0, 0.3, 2.0)


def test_the_divisor_is_the_public_number_of_records():
    x, y = data()
    model, batch = network(), SeededStream(1).poisson_indices(0.1, 400)
    wanted = flat(model) - 0.5 * clipped_mean(model, x[batch], y[batch], 0.3, 0.1 * 500)
    next(
        train(
            model,
            LOSS,
            (x, y),
            seeded(),
            sampling_rate=0.1,
            clip_norm=0.3,
            noise_multiplier=2.0,
            optimizer=sgd(model),
            mechanism=Quiet,
            records=500,
        )
    )
    assert torch.allclose(flat(model), wanted, atol=1e-6)


@pytest.mark.parametrize("physical", [1, 5, 512])
def test_physical_batches_do_not_show(physical):
    found = []
    for size in (physical, 64):
        model = network()
        training = train(
            model,
            LOSS,
            data(),
            seeded(),
            sampling_rate=0.1,
            noise_multiplier=2.0,
            steps=3,
            optimizer=sgd(model),
            physical_batch_size=size,
        )
        ft.run(training)
        found.append(flat(model))
    assert torch.allclose(*found, atol=1e-5)


def test_noise_has_the_deviation_it_was_charged_for():
    model = nn.Linear(300, 40)
    x, y = torch.zeros(50, 300), torch.zeros(50, dtype=torch.long)
    nn.init.zeros_(model.weight)
    training = train(
        model,
        LOSS,
        (x, y),
        seeded(),
        sampling_rate=1e-4,
        clip_norm=0.7,
        noise_multiplier=3.0,
        optimizer=sgd(model),
        steps=1,
    )
    before = flat(model)
    next(training)
    moved = (flat(model) - before)[: 300 * 40] / (0.5 / (1e-4 * 50))  # inputs are zero: all of it is noise
    assert abs(float(moved.std()) / (3.0 * 0.7) - 1) < 0.03
    assert abs(float(moved.mean())) < 0.1


def test_an_empty_batch_is_charged_and_released_like_any_other():
    model = network()
    before, ledger = flat(model), seeded()
    training = train(
        model, LOSS, data(3), ledger, sampling_rate=1e-9, noise_multiplier=1.0, steps=4, optimizer=sgd(model)
    )
    steps = list(training)
    assert len(steps) == 4
    assert len({step.receipts[0].ticket for step in steps}) == 4
    assert (flat(model) != before).all()


def test_it_ends_when_the_promise_is_used_up_and_not_before():
    model, ledger = network(), ft.Ledger(BUDGET)
    event = PoissonEvent(0.2, GaussianEvent(3.0))
    steps = list(train(model, LOSS, data(100), ledger, sampling_rate=0.2, noise_multiplier=3.0))
    assert len(steps) == ft.steps_for(event, BUDGET)
    assert [step.left for step in steps] == list(range(len(steps)))[::-1]
    assert steps[-1].share == ledger.share == 1.0
    weights = flat(model)
    with pytest.raises(ft.BudgetSpent, match="spent before"):
        next(train(model, LOSS, data(100), ledger, sampling_rate=0.2, noise_multiplier=3.0))
    assert (flat(model) == weights).all()
    with pytest.raises(BudgetSpent):
        ft.run(train(model, LOSS, data(100), ledger))


def test_the_spend_agrees_with_the_oracles():
    model, ledger = network(), ft.Ledger(BUDGET)
    steps = list(train(model, LOSS, data(100), ledger, sampling_rate=0.2, noise_multiplier=3.0, steps=40))
    export = io.StringIO()
    ledger.journal.export(export)
    verdict = verify(export.getvalue().splitlines())
    assert verdict.code == 0
    oracle = PLDAccountant()
    oracle.compose(dp.PoissonSampledDpEvent(0.2, dp.GaussianDpEvent(3.0)), len(steps))
    assert verdict.spent[0] <= ledger.spent.epsilon <= verdict.spent[1] * 1.001
    assert ledger.spent.epsilon == pytest.approx(oracle.get_epsilon(1e-5), rel=2e-3)


def test_stopping_early_costs_only_what_was_asked():
    model, ledger = network(), ft.Ledger(BUDGET, block=1)
    training = train(model, LOSS, data(100), ledger, sampling_rate=0.2, noise_multiplier=3.0, steps=40)
    run = ft.run(training, stop=lambda step: step.t == 10)
    assert (run.steps, len(run.receipts), ledger.share) == (10, 10, 0.25)
    assert run.w is model


def test_a_budget_is_enough():
    model = network()
    training = train(model, LOSS, data(), epsilon=2.0, delta=1e-5, steps=30)
    list(training)
    assert training.ledger.share == 1.0
    assert 1.99 < training.ledger.guarantee.epsilon <= 2.0


def test_schedules_of_clip_and_noise_are_followed_and_priced():
    model, ledger = network(), ft.Ledger(BUDGET)
    noises = [4.0] * 5 + [2.5] * 5
    training = train(
        model,
        LOSS,
        data(),
        ledger,
        sampling_rate=0.05,
        noise_multiplier=noises,
        clip_norm=lambda t: 1.0 / t,
        optimizer=sgd(model),
    )
    steps = list(training)
    assert [step.noise_multiplier for step in steps] == noises
    assert [step.clip_norm for step in steps] == [1.0 / t for t in range(1, 11)]
    oracle = PLDAccountant()
    for noise in (4.0, 2.5):
        oracle.compose(dp.PoissonSampledDpEvent(0.05, dp.GaussianDpEvent(noise)), 5)
    assert ledger.spent.epsilon == pytest.approx(oracle.get_epsilon(1e-5), rel=2e-3)


def test_noise_that_follows_the_step_needs_its_length():
    with pytest.raises(InvalidValue, match="needs steps"):
        train(network(), LOSS, data(), ft.Ledger(BUDGET), noise_multiplier=lambda t: 2.0)


@pytest.mark.parametrize("bound", [Automatic(1.0), "layers", ft.ClipCoordinates(np.full(44, 0.1))])
def test_other_bounds_are_trained_with(bound):
    model = network()
    if bound == "layers":
        bound = ClipLayers((0.5, 0.2, 0.5, 0.2), sizes=(24, 6, 12, 2), stretches=(1.0, 2.0, 1.0, 0.5))
    steps = list(
        train(
            model, LOSS, data(), seeded(), sampling_rate=0.2, noise_multiplier=2.0, clip_norm=bound, steps=3
        )
    )
    assert [step.clip_norm for step in steps] == [bound.norm()] * 3
    assert torch.isfinite(flat(model)).all()


def test_several_batches_make_one_update():
    x, y = data()
    model, stream = network(), SeededStream(1)
    batches = [stream.poisson_indices(0.1, 400) for _ in range(2)]
    both = sum(clipped_mean(model, x[batch], y[batch], 1.0, 80) for batch in batches)
    wanted = flat(model) - 0.5 * both
    training = train(
        model,
        LOSS,
        (x, y),
        seeded(),
        sampling_rate=0.1,
        noise_multiplier=2.0,
        steps=5,
        optimizer=sgd(model),
        mechanism=Quiet,
        accumulate=2,
    )
    step = next(training)
    assert torch.allclose(flat(model), wanted, atol=1e-6)
    assert (len(step.receipts), step.left) == (2, 3)
    assert [len(step.receipts) for step in training] == [2, 1]


def test_users_are_one_example_and_the_guarantee_says_so():
    x, y = data(60)
    users, model = np.arange(60) // 3, network()
    budget = ft.Budget(2.0, 1e-5, unit="user")
    batch = SeededStream(1).poisson_indices(0.3, 20)
    total = torch.zeros_like(flat(model))
    for user in batch:
        theirs = slice(3 * user, 3 * user + 2)  # two of three records count
        gradients = torch.autograd.grad(LOSS(model(x[theirs]), y[theirs]).sum(), list(model.parameters()))
        row = torch.cat([g.flatten() for g in gradients])
        total += row * min(1.0, 0.5 / float(row.norm()))
    wanted = flat(model) - 0.5 * total / 6
    training = train(
        model, LOSS, (x, y), seeded(budget=budget), users=users, records_per_user=2,
        sampling_rate=0.3, clip_norm=0.5, noise_multiplier=2.0, steps=1, optimizer=sgd(model),
        mechanism=Quiet,
    )  # fmt: skip
    next(training)
    assert torch.allclose(flat(model), wanted, atol=1e-6)
    assert training.ledger.guarantee.unit == "user"


def test_views_are_averaged_before_they_are_clipped(monkeypatch):
    monkeypatch.setattr(
        "farthing.torch.training.loop.one_by_one", lambda *given: None
    )  # views known to the test
    x, y = data(60)
    model, sizes = network(), itertools.cycle([1.0, 3.0])
    batch = SeededStream(1).poisson_indices(0.3, 60)
    total = torch.zeros_like(flat(model))
    for place in batch:
        rows = []
        for size in (1.0, 3.0):
            one = LOSS(model(size * x[place : place + 1]), y[place : place + 1]).sum()
            rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(one, list(model.parameters()))]))
        row = sum(rows) / 2
        total += row * min(1.0, 0.5 / float(row.norm()))
    wanted = flat(model) - 0.5 * total / 18
    next(train(
        model, LOSS, (x, y), seeded(), sampling_rate=0.3, clip_norm=0.5, noise_multiplier=2.0,
        steps=1, optimizer=sgd(model), mechanism=Quiet, augment=lambda inputs: next(sizes) * inputs, views=2,
    ))  # fmt: skip
    assert torch.allclose(flat(model), wanted, atol=1e-6)


def test_records_may_be_stored_in_a_form_that_only_a_view_of_them_makes_fit():
    x, y = data(60)
    pairs, model = torch.stack([x, -x], 1).half(), network()

    def either(rows):
        return rows[torch.arange(len(rows)), torch.randint(2, (len(rows),))].float()

    training = train(
        model, LOSS, (pairs, y), seeded(), sampling_rate=0.3, clip_norm=0.5, noise_multiplier=2.0,
        steps=2, optimizer=sgd(model), augment=either, views=2,
    )  # fmt: skip
    assert len(list(training)) == 2


def test_dropout_and_augmentation_leave_the_callers_generator_alone():
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 2))
    torch.manual_seed(3)
    state = torch.get_rng_state()
    training = train(model, LOSS, data(), seeded(), sampling_rate=0.1, noise_multiplier=2.0, steps=2,
                     augment=lambda x: x + torch.randn_like(x))  # fmt: skip
    list(training)
    assert torch.equal(torch.get_rng_state(), state)


def test_any_optimizer_and_schedule_of_torch():
    model = network()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
    list(
        train(
            model,
            LOSS,
            data(),
            seeded(),
            sampling_rate=0.2,
            noise_multiplier=2.0,
            steps=4,
            optimizer=optimizer,
            scheduler=scheduler,
        )
    )
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


def test_adam_is_told_the_noise_of_a_mean_gradient():
    model = network()
    adam = DPAdam(model.parameters())
    list(
        train(
            model,
            LOSS,
            data(),
            seeded(),
            sampling_rate=0.2,
            clip_norm=0.5,
            noise_multiplier=2.0,
            steps=1,
            optimizer=adam,
        )
    )
    assert set(adam._noise.values()) == {2.0 * 0.5 / 80}


def test_mixed_precision_is_close_and_releases_float32():
    found = []
    for autocast in (None, torch.bfloat16):
        model = network()
        options = {
            "sampling_rate": 0.3,
            "noise_multiplier": 2.0,
            "steps": 2,
            "optimizer": sgd(model),
            "mechanism": Quiet,
        }
        list(train(model, LOSS, data(), seeded(), autocast=autocast, **options))
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
        found.append(flat(model))
    assert torch.allclose(*found, atol=0.01)
    assert not torch.equal(*found)  # it did run in another precision


def test_a_budget_for_users_is_made_for_users():
    training = train(
        network(),
        LOSS,
        data(),
        epsilon=2.0,
        delta=1e-5,
        steps=2,
        users=np.arange(400) // 2,
        records_per_user=2,
    )
    list(training)
    assert training.ledger.budget.unit == "user"
    assert training.plan.records == 200


def test_a_dataset_read_by_threads_trains_as_tensors_do():
    found = []
    for given in (data(), Examples(list(zip(*data(), strict=True)), workers=2)):
        model = network()
        list(
            train(
                model,
                LOSS,
                given,
                seeded(),
                sampling_rate=0.2,
                noise_multiplier=2.0,
                steps=3,
                optimizer=sgd(model),
                physical_batch_size=16,
            )
        )
        found.append(flat(model))
    assert torch.allclose(*found, atol=1e-6)


def test_tied_weights_count_once():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    x, y = data()
    batch = SeededStream(1).poisson_indices(0.1, 400)
    wanted = flat(model) - 0.5 * clipped_mean(model, x[batch], y[batch], 0.3, 40)
    options = {
        "sampling_rate": 0.1,
        "clip_norm": 0.3,
        "noise_multiplier": 2.0,
        "optimizer": sgd(model),
        "mechanism": Quiet,
    }
    next(train(model, LOSS, (x, y), seeded(), **options))
    assert torch.allclose(flat(model), wanted, atol=1e-6)


def test_frozen_parameters_stay():
    model = network()
    model[0].weight.requires_grad_(False)
    kept = model[0].weight.clone()
    list(train(model, LOSS, data(), seeded(), sampling_rate=0.2, noise_multiplier=2.0, steps=2))
    assert torch.equal(model[0].weight, kept)


def test_it_learns_with_nothing_but_a_budget():
    model = network()
    list(train(model, LOSS, data(8000, seed=5), seeded(), steps=60))
    assert evaluate(model, data(2000, seed=6)) > 0.93


def refused(error, says, model=None, loss=LOSS, given=None, ledger=None, **options):
    """Nothing is charged, whether the refusal comes at once or at the first step."""
    ledger = ledger if ledger is not None else seeded()
    before = ledger.share
    with pytest.raises(error, match=says):
        next(train(model or network(), loss, given if given is not None else data(), ledger, **options))
    assert ledger.share == before


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sampling_rate": 0.0}, "rate"),
        ({"sampling_rate": 1.5}, "rate"),
        ({"clip_norm": 0.0}, "clip"),
        ({"clip_norm": -1.0}, "clip"),
        ({"clip_norm": math.nan}, "clip"),
        ({"clip_norm": "large"}, "clip"),
        ({"clip_norm": []}, "clip_norm must have a value for each"),
        ({"clip_norm": [1.0], "noise_multiplier": 2.0, "steps": 3}, "each of 3 steps"),
        ({"noise_multiplier": 0.0}, "noise"),
        ({"noise_multiplier": -1.0}, "noise"),
        ({"noise_multiplier": [1.0, 0.0]}, "noise"),
        ({"noise_multiplier": [1.0], "steps": 2}, "each of 2 steps"),
        ({"steps": 0}, "steps"),
        ({"physical_batch_size": 0}, "physical"),
        ({"accumulate": 0}, "accumulate"),
        ({"average": 1.0}, "average"),
        ({"records": 0}, "records"),
        ({"epsilon": 1.0}, "those of the ledger"),
        ({"scheduler": object()}, "give optimizer="),
        ({"users": [0] * 400, "records_per_user": 2}, "protects a record"),
    ],
)
def test_nonsense_is_refused_before_anything_is_charged(options, says):
    refused(InvalidValue, says, **options)


def test_data_without_records_or_order_is_refused():
    refused(InvalidValue, "no records", given=(torch.zeros(0, 4), torch.zeros(0)))
    refused(Unsupported, "map-style", given=iter([]))


def test_a_user_ledger_wants_users():
    refused(InvalidValue, "give users=", ledger=seeded(budget=ft.Budget(2.0, 1e-5, unit="user")))


def test_options_of_examples_belong_to_examples():
    refused(InvalidValue, "belong to Examples", given=Examples(data()), views=2)


def test_a_model_that_has_nothing_to_train_or_is_no_number_is_refused():
    refused(InvalidValue, "no trainable parameter", network().requires_grad_(False))
    broken = network()
    nn.init.constant_(broken[2].bias, math.nan)
    refused(InvalidValue, "2.bias holds NaN", broken)


def test_weights_that_became_nan_end_it_before_the_next_charge():
    model, ledger = network(), seeded(block=1)
    training = train(
        model, LOSS, data(), ledger, sampling_rate=0.2, noise_multiplier=2.0, steps=4, optimizer=sgd(model)
    )
    next(training)
    nn.init.constant_(model[0].weight, math.inf)
    with pytest.raises(InvalidValue, match="weights must be finite"):
        next(training)
    assert ledger.share == 0.25


def test_a_loss_that_is_already_a_mean_is_refused():
    refused(InvalidValue, "reduction", loss=nn.CrossEntropyLoss(), noise_multiplier=2.0, sampling_rate=0.1)


def test_an_optimizer_of_something_else_is_refused():
    refused(InvalidValue, "not trained ones", optimizer=sgd(network()))
    refused(InvalidValue, "must be one of torch.optim, or several, got 'sgd'", optimizer="sgd")
    model = network()
    refused(InvalidValue, "leaves out 2", model, optimizer=torch.optim.SGD(model[0].parameters(), lr=0.1))


def test_a_ledger_that_was_asked_without_a_promise_is_refused_with_the_way_out():
    ledger = seeded()
    rows = ft.Query(ft.Everyone(), ft.PerExample(lambda r, w: r[0]), ft.ClipNorm(1.0), ft.Gaussian(50.0))
    ledger.over(ft.Rows(np.ones((5, 2)))).ask(rows)
    refused(PromiseBroken, "begin a new ledger", ledger=ledger, noise_multiplier=3.0, sampling_rate=0.01)


def test_a_part_of_a_ledger_by_basic_composition_trains():
    ledger = ft.Ledger(BUDGET, filter=BasicFilter)
    part = ledger.allot(1.0, 5e-6)
    list(train(network(), LOSS, data(), part, steps=3))
    assert part.guarantee.epsilon <= 1.0
    assert ledger.share == pytest.approx(0.5)


def test_a_plan_leaves_room_for_what_is_promised_already():
    ledger = ft.Ledger(BUDGET)
    rows = ft.Query(ft.Everyone(), ft.PerExample(lambda r, w: r[0]), ft.ClipNorm(1.0), ft.Gaussian(10.0))
    ledger.promise(rows, 1)
    training = train(network(), LOSS, data(), ledger, steps=5)
    assert training.plan.noise_multipliers[0] > planned(BUDGET, 400, steps=5).noise_multipliers[0]
    assert len(list(training)) == 5
    ledger.over(ft.Rows(np.ones((5, 2)))).ask(rows)
    assert ledger.guarantee.epsilon <= 2.0


def test_more_batches_than_fit_are_refused():
    refused(BudgetSpent, "do not fit", noise_multiplier=1.0, sampling_rate=0.5, steps=1000)


def test_a_quantile_clip_costs_no_more():
    model, ledger = network(), ft.Ledger(BUDGET)
    steps = list(
        train(
            model,
            LOSS,
            data(),
            ledger,
            sampling_rate=0.2,
            noise_multiplier=3.0,
            clip_norm=Quantile(0.5, start=0.1),
        )
    )
    assert len(steps) == ft.steps_for(PoissonEvent(0.2, GaussianEvent(3.0)), BUDGET)
    assert len({step.clip_norm for step in steps}) == len(steps)


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("scale", [None, 3.0, np.linspace(1, 2, 44), torch.linspace(1, 2, 44)])
def test_an_optimiser_is_told_the_deviation_of_the_noise_it_gets(scale, batches):
    """Against the noise itself, which is nearly all of what is released here."""
    told, released = [], []

    class Listening(torch.optim.SGD):
        def expect(self, deviation):
            told.append(deviation)

        def step(self, closure=None):
            released.append(torch.cat([p.grad.flatten() for g in self.param_groups for p in g["params"]]))

    model = network()
    bound = ft.ClipNorm(2.0) if scale is None else ft.ClipNorm(2.0, scale)
    optimizer = Listening(model.parameters(), lr=0.0)
    for _ in train(
        model, LOSS, data(), seeded(budget=ft.Budget(1e4, 1e-5)), sampling_rate=0.1, steps=200 * batches,
        noise_multiplier=50.0, clip_norm=bound, optimizer=optimizer, accumulate=batches,
    ):  # fmt: skip
        pass
    each = told[-1] if isinstance(told[-1], float) else torch.cat([part.flatten() for part in told[-1]])
    normal = torch.stack(released) / each
    assert float(normal.square().mean()) == pytest.approx(1.0, abs=0.06)
    assert torch.corrcoef(torch.stack([normal.std(0), torch.linspace(1, 2, 44)]))[0, 1].abs() < 0.5


def test_without_an_optimizer_the_learning_rate_falls_linearly():
    training = train(network(), LOSS, data(), seeded(), sampling_rate=0.2, noise_multiplier=3.0, steps=4)
    rates = [training.optimizer.param_groups[0]["lr"] for _ in training]
    assert rates == pytest.approx([rates[0] * part for part in (1.0, 0.75, 0.5, 0.25)])


class Interrupts(TensorGaussian):
    """A user who interrupts the second batch, after its charge."""

    asked = 0

    def release(self, total, bound, stream, turn=0):
        Interrupts.asked += 1
        if Interrupts.asked == 2:
            raise KeyboardInterrupt
        return super().release(total, bound, stream, turn)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_that_was_interrupted_goes_on(accumulate):
    Interrupts.asked = 0
    training = train(
        network(),
        LOSS,
        data(),
        seeded(),
        steps=6,
        mechanism=Interrupts,
        sampling_rate=0.1,
        accumulate=accumulate,
    )
    with pytest.raises(KeyboardInterrupt):
        list(training)
    done = training.t
    assert len(list(training)) + done == (5 if accumulate == 1 else 3)  # the batch at hand is lost
    assert list(training) == []


def test_a_callback_that_fails_costs_no_batch():
    def fails(step):
        if step.t == 2:
            raise OSError("the disk is full")

    training = train(network(), LOSS, data(), seeded(), steps=5, sampling_rate=0.1, callbacks=[fails])
    with pytest.raises(OSError, match="full"):
        list(training)
    assert [step.t for step in training] == [3, 4, 5]


def test_inference_mode_is_refused_before_a_charge():
    ledger = seeded()
    training = train(network(), LOSS, data(), ledger, steps=5, sampling_rate=0.1)
    with torch.inference_mode(), pytest.raises(InvalidValue, match=r"torch\.inference_mode: train outside"):
        next(training)
    assert ledger.share == 0
    assert len(list(training)) >= 4


def test_a_warning_of_a_record_is_not_shown():
    class Warns(nn.Linear):
        def forward(self, x):
            if len(x) > 60:  # more than any check has, but the largest
                warnings.warn("a record is odd", stacklevel=2)
            return super().forward(x)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = train(nn.Sequential(Warns(4, 2)), LOSS, data(), seeded(), steps=2, sampling_rate=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(training)) == 2
