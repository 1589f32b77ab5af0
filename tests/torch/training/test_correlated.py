"""Training with correlated noise: what is planned, promised and told, what goes on, and what is refused."""

import copy
import io
import math
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import farthing as ft
from farthing.accounting import correlated as choosing
from farthing.accounting import gaussian, pld
from farthing.errors import InvalidValue, PromiseBroken, Unsupported
from farthing.ledger import verifier
from farthing.noise.lattice import SeededStream
from farthing.queries.events import (
    BalancedEvent,
    GaussianEvent,
    PoissonEvent,
    RepeatedEvent,
    TruncatedEvent,
)
from farthing.queries.personal import Leveled
from farthing.queries.query import Rows
from farthing.torch.gradients.bookkeeping import Gradient
from farthing.torch.training.correlated import deviation, walking
from farthing.torch.training.plan import Plan

LOSS = nn.CrossEntropyLoss(reduction="none")
BUDGET = ft.Budget(8.0, 1e-5)


def data(records=1000):
    inputs = torch.randn(records, 3, generator=torch.Generator().manual_seed(0))
    return inputs, (inputs[:, 0] > 0).long()


def train(ledger=None, **more):
    more = {"sampling_rate": 0.05, "steps": 40, "bands": 4, **more}
    return ft.torch.train(nn.Linear(3, 2), LOSS, data(), ledger or ft.Ledger(BUDGET), **more)


def test_a_run_spends_its_budget_as_one_chance_a_cycle():
    training = train()
    assert len(list(training)) == 40
    noise = training.plan.noise_multiplier(0)
    event = RepeatedEvent(PoissonEvent(0.2, GaussianEvent(noise)), 10)
    assert pld.epsilon(event, 1e-5) == pytest.approx(8.0, rel=1e-6)
    assert training.ledger.guarantee.epsilon == pytest.approx(8.0, rel=1e-6)


def test_with_a_noise_multiplier_as_many_batches_as_fit_are_made():
    training = train(noise_multiplier=2.0, steps=None)
    assert training.steps % 4 == 0  # whole cycles
    longer = RepeatedEvent(PoissonEvent(0.2, GaussianEvent(2.0)), training.steps // 4 + 1)
    assert pld.epsilon(longer, 1e-5) > 8.0


def test_noise_cancels_over_the_steps_of_a_training():
    inputs, targets = torch.zeros(4, 1), torch.zeros(4, dtype=torch.long)  # next to nothing but noise
    model = nn.Linear(1, 20_000, bias=False)
    noises = []

    def remember(step):
        noises.append(model.weight.grad.flatten().clone())

    training = ft.torch.train(
        model,
        LOSS,
        (inputs, targets),
        ft.Ledger(BUDGET),
        sampling_rate=0.25,
        steps=4,
        bands=4,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        callbacks=[remember],
    )
    for step in training:
        assert float(step.noise_norm) == pytest.approx(float(step.gradient_norm), rel=0.25)
    correlation = float(torch.corrcoef(torch.stack(noises[:2]))[0, 1])
    assert correlation == pytest.approx(-0.5, abs=0.2)  # -c₁ / √(1 + c₁²), at the exponent that was chosen


def test_a_killed_training_goes_on_at_the_same_price(tmp_path):
    journal = tmp_path / "a.ledger"
    code = (
        f"import sys; sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}\n"
        "from test_correlated import *\n"
        f"training = train(ft.Ledger(BUDGET, journal={str(journal)!r}, block=3))\n"
        "[next(training) for _ in range(7)]\n"
        "import os; os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert killed.returncode == -9, killed.stderr
    with ft.Ledger.open(journal) as ledger:
        training = train(ledger)
        assert len(list(training)) == 40 - 12  # three blocks were reserved, and a cycle begins at 12
        assert ledger.spent.epsilon <= 8.0
    with ft.Ledger.open(journal) as ledger, pytest.raises(PromiseBroken):
        train(ledger, bands=2)


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"bands": 0}, InvalidValue, "bands"),
        ({"bands": "some"}, InvalidValue, "auto"),
        ({"bands": 2.5}, InvalidValue, "auto"),
        ({"bands": 40}, InvalidValue, "at most 20 groups"),
        ({"bands": "auto", "noise_multiplier": 1.0}, InvalidValue, "leave it out"),
        ({"noise_multiplier": [1.0, 2.0]}, Unsupported, "one noise_multiplier"),
        ({"adapt": lambda step: None}, Unsupported, "adapt"),
        ({"budgets": np.ones(1000), "bands": "pass"}, Unsupported, "budgets"),
        ({"mechanism": ft.torch.FloatGaussian}, Unsupported, "mechanism"),
        ({"sampling": "shuffled"}, InvalidValue, "sampling"),
        ({"sampling": "balanced", "bands": "pass"}, Unsupported, "fixed order"),
        ({"sampling": "balanced", "bands": 40}, InvalidValue, "20 batches"),
        ({"sampling": "balanced", "bands": 1, "adapt": lambda step: None}, Unsupported, "adapt"),
        ({"sampling": "balanced", "bands": 1, "budgets": np.ones(1000)}, Unsupported, "budgets"),
        ({"sampling": "balanced", "bands": 1, "noise_multiplier": [1.0, 2.0]}, Unsupported, "one noise"),
        ({"sampling": "balanced", "bands": "auto", "noise_multiplier": 2.0}, InvalidValue, "leave it out"),
        ({"max_batch_size": 0, "bands": 1}, InvalidValue, "max_batch_size"),
        ({"max_batch_size": 60, "sampling": "balanced"}, Unsupported, "truncated"),
        ({"max_batch_size": 60, "bands": 1, "sampling": "balanced"}, Unsupported, "truncated"),
        ({"max_batch_size": 60, "bands": 1, "budgets": np.ones(1000)}, Unsupported, "budgets"),
    ],
)
def test_what_has_no_theorem_is_refused_before_anything_is_charged(more, error, message):
    ledger = ft.Ledger(BUDGET)
    with pytest.raises(error, match=message):
        train(ledger, **more)
    assert ledger.share == 0.0
    assert len(list(ledger.journal.rows())) == 1


@pytest.mark.parametrize("more", [{"bands": 4}, {"bands": 1, "sampling": "balanced"}])
def test_a_menu_is_refused_for_batches_that_are_one_plan(more):
    ledger = ft.Ledger(BUDGET, filter=ft.Menu([PoissonEvent(0.05, GaussianEvent(2.0))]))
    with pytest.raises(Unsupported, match="batch by batch"):
        train(ledger, **more)


def test_more_records_than_the_public_number_are_refused_for_truncated_batches():
    training = train(records=900, **TRUNCATED)
    with pytest.raises(InvalidValue, match="more records"):
        next(training)
    assert training.ledger.share == 0.0


def test_a_learning_rate_goes_by_the_noise_of_running_sums():
    plan = Plan(1000, 0.05, (2.0,), 40, True, 4, 0.7)
    gain = choosing.banded_prefix_noise(4, 0.7, 40) / choosing.banded_prefix_noise(1, 0.5, 40)
    assert walking(plan).noise_multiplier(0) == pytest.approx(2.0 * gain)
    assert walking(Plan(1000, 0.05, (2.0,), 40)).noise_multiplier(0) == 2.0
    assert deviation(plan) > math.sqrt(1 + 0.7**2)


def test_passes_spend_the_budget_as_one_gaussian_answer_each():
    training = train(bands="pass")
    assert (training.plan.bands, training.plan.buffers, training.plan.sampling_rate) == (20, 2, 0.05)
    assert len(list(training)) == 40
    mu = math.sqrt(2) / training.plan.noise_multiplier(0)
    assert gaussian.delta(mu, 8.0) == pytest.approx(1e-5, rel=1e-6)
    assert training.ledger.guarantee.epsilon == pytest.approx(8.0, rel=1e-6)


@pytest.mark.parametrize(("rate", "steps"), [(0.05, 40), (0.05, 20), (0.01, 800)])
def test_the_least_noise_in_running_sums_is_chosen(rate, steps):
    plan = train(bands="auto", sampling_rate=rate, steps=steps).plan
    banded = choosing.choose_bands(BUDGET, rate, steps)
    by_bands = banded.noise_multiplier * choosing.banded_prefix_noise(banded.bands, banded.exponent, steps)
    by_passes = choosing.choose_buffers(BUDGET, round(1 / rate), steps).running_noise
    noise = walking(plan).noise_multiplier(0) * choosing.banded_prefix_noise(1, 0.5, steps)
    assert plan.bins  # balanced draws have the least noise here
    assert noise < min(by_bands, by_passes)
    plan = train(bands="auto", sampling_rate=rate, steps=steps, sampling="poisson").plan
    assert bool(plan.buffers) == (by_passes < by_bands)
    noise = walking(plan).noise_multiplier(0) * choosing.banded_prefix_noise(1, 0.5, steps)
    assert noise == pytest.approx(min(by_bands, by_passes), rel=1e-3)


def test_replace_one_has_no_balanced_draws():
    ledger = ft.Ledger(ft.Budget(8.0, 1e-5, "replace-one"))
    assert not train(ledger, bands="auto", steps=20).plan.bins
    with pytest.raises(Unsupported, match="no dominating pair"):
        train(ft.Ledger(ft.Budget(8.0, 1e-5, "replace-one")), sampling="balanced", bands=1)


@pytest.mark.parametrize("bands", [1, 4, "auto"])
def test_balanced_draws_take_everybody_once_a_pass_and_spend_the_budget(bands, monkeypatch):
    drawn, draw = [], ft.Balanced.draw

    def seen(self, records, stream, turn=0):
        drawn.append(np.asarray(draw(self, records, stream, turn)))
        return drawn[-1]

    monkeypatch.setattr(ft.Balanced, "draw", seen)
    training = train(bands=bands, sampling="balanced")
    plan = training.plan
    assert (plan.sampling_rate, plan.bins * plan.bands, plan.steps) == (0.05, 20, 40)
    assert len(list(training)) == 40
    for each in (drawn[:20], drawn[20:]):  # two passes
        assert np.array_equal(np.sort(np.concatenate(each)), np.arange(1000))
    event = RepeatedEvent(BalancedEvent(plan.bins, GaussianEvent(plan.noise_multiplier(0))), 2)
    assert training.ledger.guarantee.epsilon == pytest.approx(pld.epsilon(event, 1e-5), rel=1e-9)
    assert 7.99 < training.ledger.guarantee.epsilon <= 8.0


def test_balanced_draws_need_less_noise_than_poisson_samples():
    noise = [train(bands=1, sampling=way).plan.noise_multiplier(0) for way in ("balanced", "poisson")]
    assert 0.85 * noise[1] < noise[0] < 0.98 * noise[1]


def test_the_default_number_of_steps_is_one_of_whole_passes():
    plan = train(bands=1, sampling="balanced", steps=None, sampling_rate=1 / 30).plan
    assert plan.steps % 30 == 0
    assert abs(plan.steps - 800 * math.sqrt(8)) <= 15
    plan = train(bands=1, sampling="balanced", steps=None, sampling_rate=0.1, noise_multiplier=3.0).plan
    longer = RepeatedEvent(BalancedEvent(10, GaussianEvent(3.0)), plan.steps // 10 + 1)
    assert plan.steps % 10 == 0
    assert pld.epsilon(longer, 1e-5) > 8.0


def test_a_killed_training_on_balanced_draws_waits_for_the_next_pass(tmp_path):
    """Turns that were reserved are forfeited; until a pass begins nobody is drawn, and no update is made."""
    journal = tmp_path / "a.ledger"
    code = (
        f"import sys; sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}\n"
        "from test_correlated import *\n"
        f"ledger = ft.Ledger(BUDGET, journal={str(journal)!r}, block=3)\n"
        "training = train(ledger, bands=1, sampling='balanced')\n"
        "[next(training) for _ in range(7)]\n"
        "import os; os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert killed.returncode == -9, killed.stderr
    with ft.Ledger.open(journal) as ledger:
        training = train(ledger, bands=1, sampling="balanced")
        steps = list(training)
        assert [step.receipts[-1].turn for step in steps] == list(range(20, 40))
        assert [receipt.turn for step in steps for receipt in step.receipts] == list(range(9, 40))
        assert ledger.spent.epsilon <= 8.0
    with ft.Ledger.open(journal) as ledger, pytest.raises(PromiseBroken):
        train(ledger, bands=1, sampling="poisson")


def test_a_checkpoint_never_draws_a_pass_anew(tmp_path):
    ledger = ft.Ledger(BUDGET)
    training = train(ledger, bands=1, sampling="balanced")
    [next(training) for _ in range(5)]
    ft.torch.save(tmp_path / "a.pt", training)
    again = train(ledger, bands=1, sampling="balanced")
    ft.torch.restore(tmp_path / "a.pt", again)
    assert again.t == 5
    assert next(again).receipts[-1].turn == 20  # when the next pass begins
    assert again.t == 6


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_run_is_not_copied(copied):
    training = train(bands=4)
    next(training)
    with pytest.raises(Unsupported, match="save it"):
        copied(training)
    assert next(training).receipts[-1].turn == 1


@pytest.mark.parametrize("other", [{"bands": 8}, {"sampling_rate": 0.04}, {"steps": 41}, {"bands": 1}])
def test_a_plan_that_differs_is_refused_and_other_orders_and_more_records_go_on(other, tmp_path):
    with ft.Ledger(BUDGET, journal=tmp_path / "a.ledger") as ledger:
        [next(training) for training in [train(ledger, bands=4)] for _ in range(5)]
        spent = ledger.spent
    with ft.Ledger.open(tmp_path / "a.ledger") as ledger:
        with pytest.raises(PromiseBroken):
            train(ledger, **{"bands": 4, **other})
        assert ledger.spent == spent
        x, y = data()
        rows = torch.cat([x.flip(0), x[:50]]), torch.cat([y.flip(0), y[:50]])
        how = {"sampling_rate": 0.05, "steps": 40, "bands": 4}
        step = next(ft.torch.train(nn.Linear(3, 2), LOSS, rows, ledger, **how))
        assert [receipt.turn for receipt in step.receipts] == [5, 6, 7, 8]  # nobody until a cycle begins


TRUNCATED = {"bands": 1, "max_batch_size": 85}


def test_truncated_batches_spend_their_own_price():
    training = train(**TRUNCATED)
    assert len(list(training)) == 40
    noise = training.plan.noise_multiplier(0)
    event = RepeatedEvent(TruncatedEvent(0.05, 85, 1000, GaussianEvent(noise)), 40)
    assert training.ledger.guarantee.epsilon == pytest.approx(pld.epsilon(event, 1e-5), rel=1e-9)
    plain = train(bands=1).plan.noise_multiplier(0)
    assert plain < noise < 1.01 * plain  # five standard deviations of room


@pytest.mark.parametrize(("rows", "shape"), [(None, 90), (40, 30)])
@pytest.mark.parametrize("hidden", [nn.Tanh, nn.LayerNorm])
def test_truncated_batches_have_one_shape_and_blank_rows_weigh_nothing(rows, shape, hidden, monkeypatch):
    shapes, summed = set(), Gradient._sum_of

    def watched(self, inputs, targets, weights, rule, room, onto=False):
        shapes.add((len(inputs), len(targets), len(weights) if weights is not None else None))
        return summed(self, inputs, targets, weights, rule, room, onto)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), hidden(4) if hidden is nn.LayerNorm else hidden(), nn.Linear(4, 2))
    plain = copy.deepcopy(model)
    steps = {"sampling_rate": 0.05, "noise_multiplier": 1.0, "steps": 6, "physical_batch_size": rows}
    ledgers = [ft.Ledger(BUDGET, stream=SeededStream(3)) for _ in range(2)]
    with monkeypatch.context() as patched:
        patched.setattr(Gradient, "_sum_of", watched)
        list(ft.torch.train(model, LOSS, data(), ledgers[0], max_batch_size=90, **steps))
    assert shapes == {(shape, shape, shape)}
    list(ft.torch.train(plain, LOSS, data(), ledgers[1], **steps))  # nobody is left out: the same draws
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-4)


def test_a_truncated_training_goes_on_and_another_size_is_refused(tmp_path):
    with ft.Ledger(BUDGET, journal=tmp_path / "a.ledger") as ledger:
        training = train(ledger, **TRUNCATED)
        [next(training) for _ in range(5)]
    with ft.Ledger.open(tmp_path / "a.ledger") as ledger:
        again = ft.torch.train(nn.Linear(3, 2), LOSS, data(), ledger, max_batch_size=85)
        assert again.plan.steps == 40
        assert len(list(again)) == 35
    with ft.Ledger.open(tmp_path / "a.ledger") as ledger, pytest.raises(PromiseBroken):
        train(ledger, bands=1, max_batch_size=86)


def test_truncated_batches_follow_a_menu_and_a_schedule():
    entries = [ft.TruncatedPoisson(0.05, 80, 1000).amplify(GaussianEvent(noise)) for noise in (1.0, 2.0)]
    ledger = ft.Ledger(BUDGET, filter=ft.Menu(entries))
    training = train(ledger, bands=1, max_batch_size=80, noise_multiplier=1.0, steps=3)
    assert [step.noise_multiplier for step in training] == [1.0] * 3
    schedule = train(bands=1, max_batch_size=80, noise_multiplier=[1.0, 2.0, 1.0], steps=3)
    assert [step.noise_multiplier for step in schedule] == [1.0, 2.0, 1.0]


def test_truncated_batches_with_bands_spend_the_price_of_their_groups():
    training = train(bands=4, max_batch_size=75)
    assert len(list(training)) == 40
    noise = training.plan.noise_multiplier(0)
    event = RepeatedEvent(TruncatedEvent(0.2, 75, 250, GaussianEvent(noise)), 10)
    assert training.ledger.guarantee.epsilon == pytest.approx(pld.epsilon(event, 1e-5), rel=1e-9)
    plain = train(bands=4).plan.noise_multiplier(0)
    assert plain < noise < 1.01 * plain  # four standard deviations of room: 250 records at 0.2
    assert train(bands=4, max_batch_size=75, noise_multiplier=1.0).plan.bands == 4


@pytest.mark.parametrize("bands", [4, "auto", "pass"])
def test_truncated_batches_in_turns_have_one_shape(bands, monkeypatch):
    shapes, summed = set(), Gradient._sum_of

    def watched(self, inputs, targets, weights, rule, room, onto=False):
        shapes.add(len(inputs))
        return summed(self, inputs, targets, weights, rule, room, onto)

    monkeypatch.setattr(Gradient, "_sum_of", watched)
    training = train(bands=bands, max_batch_size=75)
    assert len(list(training)) == 40
    assert shapes == {75}
    assert training.ledger.guarantee.epsilon <= 8.0


def test_auto_bands_of_truncated_batches_are_no_worse_than_independent_noise():
    for size in (75, 52):  # ample room, and hardly any: full batches cost more in groups
        plan, one = (train(bands=bands, max_batch_size=size).plan for bands in ("auto", 1))
        running = [
            each.noise_multiplier(0) * choosing.banded_prefix_noise(each.bands, each.exponent, 40)
            for each in (plan, one)
            if not each.buffers
        ]
        assert plan.buffers or running[0] <= running[1] * (1 + 1e-4)


def test_a_pass_of_whole_groups_is_not_cut():
    plan = train(bands="pass", max_batch_size=50).plan
    assert plan.noise_multiplier(0) == train(bands="pass").plan.noise_multiplier(0)
    with pytest.raises(Unsupported, match="max_batch_size=50"):
        train(bands="pass", max_batch_size=49)


def test_a_truncated_training_with_bands_goes_on_and_another_size_is_refused(tmp_path):
    with ft.Ledger(BUDGET, journal=tmp_path / "a.ledger") as ledger:
        training = train(ledger, bands=4, max_batch_size=75)
        [next(training) for _ in range(5)]
    with ft.Ledger.open(tmp_path / "a.ledger") as ledger:
        for other in ({"max_batch_size": 76}, {"max_batch_size": None}, {"max_batch_size": 75, "bands": 8}):
            with pytest.raises(PromiseBroken):
                train(ledger, **{"bands": 4, **other})
        turns = [
            receipt.turn for step in train(ledger, bands=4, max_batch_size=75) for receipt in step.receipts
        ]
        assert turns[-1] == 39
        assert turns == sorted(set(turns))


def test_a_batch_by_buffers_has_the_noise_that_the_optimiser_is_told():
    plan = train(bands="pass", sampling_rate=0.25, steps=8).plan
    pairs = choosing.best_pairs(plan.buffers, 8, 4)
    mechanism = ft.BufferedGaussian(1.0, *pairs, 8, 4).begin()
    stream, bound = SeededStream(0), ft.ClipNorm(1.0)
    last = [mechanism.release(np.zeros(50_000), bound, stream, turn) for turn in range(8)][-1]
    assert float(last.std()) == pytest.approx(deviation(plan), rel=0.03)  # ten standard deviations


def test_buffers_find_their_own_noise():
    with pytest.raises(InvalidValue, match="leave it out"):
        train(bands="pass", noise_multiplier=2.0)


PEOPLE = np.repeat([1.0, 4.0], 500)


def personal(**more):
    more = {"sampling_rate": 0.05, "steps": 40, "bands": 4, "delta": 1e-5, "budgets": PEOPLE, **more}
    return ft.torch.train(nn.Linear(3, 2), LOSS, data(), **more)


@pytest.mark.parametrize("bands", [4, "auto"])
def test_everybody_spends_their_own_budget_with_correlated_noise(bands):
    training = personal(bands=bands)
    assert len(list(training)) == 40
    said = [one.epsilon for one in training.ledger.guarantees.values()]
    assert said == pytest.approx([1.0, 4.0], rel=1e-5)
    assert max(said) <= 4.0
    assert training.plan.bands > 1
    training.ledger.journal.export(exported := io.StringIO())
    found = verifier.verify(exported.getvalue().splitlines())
    assert found.code == 0, found.reason


def test_levels_are_drawn_at_their_rates_in_turns():
    training, counts = personal(), np.zeros((40, 1000))
    sampler = training._kind.personal.begin()
    people = Leveled(Rows(np.ones((1000, 1))), (PEOPLE > 1).astype(int), (1.0, 4.0))
    for turn in range(40):
        counts[turn, sampler.draw_from(people, SeededStream(turn), turn)] += 1
    assert set(counts.reshape(10, 4, 1000).sum(axis=1).max(axis=0)) <= {0.0, 1.0}  # once a cycle at most
    found = counts.mean(axis=0).reshape(2, 500).mean(axis=1)
    assert found == pytest.approx(sampler.sampling_rates, rel=0.1)
    assert found[1] > 2 * found[0]


@pytest.mark.parametrize(
    ("more", "message"),
    [({"noise_multiplier": 2.0}, "leave it out"), ({"bands": 40}, "at most 20 bands")],
)
def test_personal_plans_of_correlated_noise_that_cannot_be_are_refused(more, message):
    with pytest.raises(InvalidValue, match=message):
        personal(**more)
