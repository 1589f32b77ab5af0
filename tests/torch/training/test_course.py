"""Training by a privacy filter: charged batch by batch, on terms that follow what was released."""

import json
from itertools import pairwise

import pytest
import torch
from torch import nn

import farthing as ft
from farthing.accounting.filters import RdpFilter
from farthing.errors import BudgetSpent, InvalidValue, PromiseBroken, Unsupported
from farthing.ledger.ledger import Ledger
from farthing.noise.lattice import SeededStream
from farthing.queries.events import PoissonEvent
from farthing.torch.training.adapting import Change, Stages
from farthing.torch.training.checkpoint import restore, save
from farthing.torch.training.loop import train

LOSS = nn.CrossEntropyLoss(reduction="none")
BUDGET = ft.Budget(1.0, 1e-5)
RATE, NOISES = 0.2, (40.0, 20.0, 10.0)
MENU = ft.Menu(ft.Poisson(RATE).amplify(ft.Gaussian(noise)) for noise in NOISES)
WIDE = ft.Menu(ft.Poisson(rate).amplify(ft.Gaussian(noise)) for rate in (0.1, 0.2) for noise in (40.0, 10.0))
RULE, WIDE_RULE = MENU(BUDGET), WIDE(BUDGET)  # found once
HOW = {"sampling_rate": RATE, "noise_multiplier": 10.0}


@pytest.fixture
def data():
    made = torch.Generator().manual_seed(0)
    x = torch.randn(500, 4, generator=made)
    return x, (x[:, 0] > 0).long()


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(4, 2)


def ledger(rule=RULE, **options):
    return Ledger(BUDGET, filter=lambda _: rule, **options)


def asked(ledger):
    """The events that were charged, one an answer, less those that were given back."""
    counts = {}
    for row in ledger.journal.rows():
        if row.kind in ("charge", "refund"):
            sign, event = 1 if row.kind == "charge" else -1, json.dumps(row.body["event"])
            counts[event] = counts.get(event, 0) + sign * row.body["count"]
    return sum(counts.values())


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_on_a_menu_nothing_is_promised_and_training_ends_when_nothing_more_fits(data):
    book = ledger()
    training = train(model(), LOSS, data, book, **HOW)
    most = RULE.most(PoissonEvent(RATE, RULE.events[2].event))
    assert training.steps == most
    steps = list(training)
    assert len(steps) == most == asked(book)
    assert [step.left for step in steps[-3:]] == [2, 1, 0]
    assert steps[-1].share == book.share <= 1.0
    assert not any(row.kind == "promise" for row in book.journal.rows())
    assert not book.affords(RULE.events[2])


def test_terms_that_do_not_change_release_what_a_promise_releases(data):
    found = []
    for options in ({"filter": lambda _: RULE}, {}):
        book, trained = Ledger(BUDGET, stream=SeededStream(3), **options), model()
        sgd = torch.optim.SGD(trained.parameters(), lr=0.5)
        list(train(trained, LOSS, data, book, steps=12, optimizer=sgd, **HOW))
        found.append(weights(trained))
    assert torch.equal(*found)


def test_without_numbers_training_begins_with_the_first_entry_of_the_menu(data):
    assert next(train(model(), LOSS, data, ledger())).noise_multiplier == 40.0
    by_rate = train(model(), LOSS, data, ledger(WIDE_RULE), sampling_rate=0.2).plan
    assert (by_rate.sampling_rate, by_rate.noise_multiplier(0)) == (0.2, 40.0)
    by_noise = train(model(), LOSS, data, ledger(WIDE_RULE), noise_multiplier=10.0).plan
    assert (by_noise.sampling_rate, by_noise.noise_multiplier(0)) == (0.1, 10.0)


def test_noise_rate_and_clip_follow_a_rule_and_every_batch_is_charged_as_it_was_asked_for(data):
    def rule(step):
        found = {3: Change(noise_multiplier=10.0), 5: Change(sampling_rate=0.2, clip_norm=0.25)}
        return found.get(step.t)

    book = ledger(WIDE_RULE)
    steps = list(train(model(), LOSS, data, book, steps=8, adapt=rule))
    assert [step.noise_multiplier for step in steps] == [40.0] * 3 + [10.0] * 5
    assert [step.expected_batch_size for step in steps] == [50.0] * 5 + [100.0] * 3
    assert [step.clip_norm for step in steps] == [1.0] * 5 + [0.25] * 3
    charged = [(event.rate, event.event.noise) for step in steps for event in [step.receipts[0].event]]
    assert charged == [(0.1, 40.0)] * 3 + [(0.1, 10.0)] * 2 + [(0.2, 10.0)] * 3
    total = WIDE_RULE.start()
    for step in steps:
        total = WIDE_RULE.add(total, step.receipts[0].event)
    assert WIDE_RULE.share(total) == book.share


def test_a_rule_sees_the_released_gradient_and_how_much_of_it_is_noise(data):
    seen = []
    trained = model()
    sgd = torch.optim.SGD(trained.parameters(), lr=0.0)
    list(train(trained, LOSS, data, ledger(), steps=40, optimizer=sgd, adapt=seen.append))
    assert seen[0].noise_norm == pytest.approx(40.0 / 100 * 10**0.5)
    mean = sum(step.gradient_norm**2 for step in seen) / 40
    # 400 squares of noise: 1 ± 0.07, and the gradient's share is below 2 %
    assert 0.5 < mean / seen[0].noise_norm ** 2 < 1.6


def test_one_may_train_look_change_everything_and_go_on_under_the_same_ledger(data):
    book, trained = ledger(), model()
    first = list(train(trained, LOSS, data, book, noise_multiplier=40.0, steps=10))
    adam = torch.optim.Adam(trained.parameters(), lr=0.01)
    second = list(train(trained, LOSS, data, book, noise_multiplier=20.0, steps=5, optimizer=adam))
    third = list(train(model(1), LOSS, data, book, noise_multiplier=10.0))
    assert (len(first), len(second)) == (10, 5)
    assert asked(book) == 15 + len(third)
    total = RULE.add(RULE.add(RULE.start(), RULE.events[0], 10), RULE.events[1], 5)
    assert RULE.fits(RULE.add(total, RULE.events[2], len(third)))
    assert not RULE.fits(RULE.add(total, RULE.events[2], len(third) + 1))
    with pytest.raises(BudgetSpent, match="not one batch"):
        next(train(model(), LOSS, data, book, noise_multiplier=10.0))


def test_a_default_learning_rate_falls_with_what_is_left_and_never_rises(data):
    rule = Stages({0.3: Change(noise_multiplier=20.0), 0.6: Change(noise_multiplier=10.0)})
    training, rates = train(model(), LOSS, data, ledger(), adapt=rule), []
    full = training.optimizer.param_groups[0]["lr"]
    for _ in training:
        rates.append(training.optimizer.param_groups[0]["lr"])
    assert rates[0] == full
    assert all(after <= before for before, after in pairwise(rates))
    assert 0 < rates[-1] < 0.05 * full


def test_several_batches_make_one_update_on_the_same_terms(data):
    rule = {1: Change(noise_multiplier=10.0)}
    book = ledger()
    steps = list(train(model(), LOSS, data, book, steps=5, accumulate=2, adapt=lambda s: rule.get(s.t)))
    assert [[one.event.event.noise for one in step.receipts] for step in steps] == [
        [40.0, 40.0],
        [10.0, 10.0],
        [10.0],
    ]


def test_a_checkpoint_brings_back_the_terms_and_the_rules_memory_but_not_the_spend(data, tmp_path):
    stages = {0.1: Change(noise_multiplier=20.0, clip_norm=0.5), 0.9: Change(noise_multiplier=10.0)}
    book = ledger()
    training = train(model(), LOSS, data, book, adapt=Stages(stages))
    while next(training).noise_multiplier == 40.0:
        pass
    save(tmp_path / "run.pt", training)
    spent, done = book.share, training.t
    again = train(model(1), LOSS, data, book, adapt=Stages(stages))
    restore(tmp_path / "run.pt", again)
    step = next(again)
    assert (step.t, step.noise_multiplier, step.clip_norm) == (done + 1, 20.0, 0.5)
    assert step.share >= spent > 0


# --- refused before any charge


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"noise_multiplier": 5.0, "sampling_rate": RATE}, Unsupported, "not on the menu"),
        ({"noise_multiplier": 40.0, "sampling_rate": 0.5}, Unsupported, "not on the menu"),
        ({"noise_multiplier": [40.0, 20.0]}, InvalidValue, "adapt="),
        ({"noise_multiplier": lambda t: 40.0}, InvalidValue, "adapt="),
        ({"noise_multiplier": 33.0}, InvalidValue, "no entry of the menu"),
        ({"adapt": 3}, InvalidValue, "adapt must be a function"),
        ({"steps": 0}, InvalidValue, "steps"),
        ({"clip_norm": [1.0, 0.5], "steps": 3}, InvalidValue, "clip_norm must have a value"),
    ],
)
def test_what_has_no_price_or_no_sense_is_refused_and_nothing_is_charged(data, options, error, says):
    book = ledger()
    with pytest.raises(error, match=says):
        next(train(model(), LOSS, data, book, **options))
    assert book.share == 0


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda: Change(noise_multiplier=5.0), Unsupported, "not on the menu"),
        (lambda: Change(sampling_rate=0.5), Unsupported, "not on the menu"),
        (lambda: {"noise_multiplier": 20.0}, InvalidValue, "adapt must return a Change or None"),
        (lambda: 20.0, InvalidValue, "adapt must return a Change or None"),
        (lambda: Change(noise_multiplier=-1.0), InvalidValue, "noise_multiplier"),
    ],
)
def test_a_rule_that_returns_nonsense_ends_the_run_before_the_next_charge(data, change, error, says):
    book = ledger(block=1)
    training = train(model(), LOSS, data, book, adapt=lambda step: change() if step.t == 2 else None)
    next(training)
    with pytest.raises(error, match=says):
        next(training)
    assert asked(book) == 2


def test_a_rule_on_a_ledger_that_promises_is_refused_and_told_how_to_open_one(data):
    with pytest.raises(Unsupported, match=r"filter=ft\.Menu"):
        train(model(), LOSS, data, epsilon=1.0, delta=1e-5, adapt=lambda step: None, **HOW)
    book = Ledger(BUDGET)
    list(train(model(), LOSS, data, book, steps=2, **HOW))
    with pytest.raises(PromiseBroken, match=r"filter=ft\.Menu"):
        train(model(), LOSS, data, book, adapt=lambda step: None, **HOW)


# --- other filters


def test_a_renyi_filter_charges_the_same_run_and_gets_less_of_it(data):
    book = Ledger(BUDGET, filter=RdpFilter)
    training = train(model(), LOSS, data, book, adapt=lambda step: None, **HOW)
    steps = list(training)
    assert 0 < len(steps) == asked(book) < RULE.most(RULE.events[2])


def test_a_ledger_that_goes_on_in_another_process_goes_on_with_what_is_left(data, tmp_path):
    path = tmp_path / "menu.ledger"
    with ledger(journal=path) as book:
        first = list(train(model(), LOSS, data, book, steps=7, **HOW))
    with Ledger.open(path) as book:
        rest = list(train(model(), LOSS, data, book, **HOW))
        book.journal.verify()
    assert len(first) + len(rest) == RULE.most(RULE.events[2])
