"""Rules that change terms by released values: when they do, what they refuse, what they remember."""

import math

import pytest
from torch import nn

import farthing as ft
from farthing.errors import InvalidValue
from farthing.queries.events import DrawnEvent
from farthing.torch.training.adapting import Change, NoiseGate, Plateau, Stages, menu
from farthing.torch.training.plan import planned
from farthing.torch.training.watching import TrainingStep

QUIET, QUIETER = Change(noise_multiplier=4.0), Change(noise_multiplier=2.0)


def step(t, *, share=0.0, norm=1.0, noise=0.5, multiplier=8.0, model=None):
    return TrainingStep(
        t, model, noise_multiplier=multiplier, share=share, gradient_norm=norm, noise_norm=noise
    )


@pytest.mark.parametrize(
    "terms",
    [
        {"noise_multiplier": 0.0},
        {"noise_multiplier": math.nan},
        {"sampling_rate": 1.5},
        {"sampling_rate": 0},
        {"clip_norm": -1.0},
        {"clip_norm": math.inf},
    ],
)
def test_a_change_to_what_is_no_public_number_is_refused(terms):
    with pytest.raises(InvalidValue, match=next(iter(terms))):
        Change(**terms)


def test_a_plateau_takes_one_change_after_the_other_and_then_none():
    rule = Plateau([QUIET, QUIETER], patience=3, score=lambda model: 0.9)
    found = [rule(step(t)) for t in range(1, 15)]
    assert [t for t, one in enumerate(found, 1) if one is not None] == [4, 8]
    assert [one for one in found if one] == [QUIET, QUIETER]


def test_a_score_that_gets_better_is_no_plateau():
    scores = iter(range(100))
    rule = Plateau([QUIET], patience=1, score=lambda model: next(scores))
    assert not any(rule(step(t)) for t in range(1, 50))


def test_a_score_is_looked_at_every_so_often_only():
    seen = []
    rule = Plateau([QUIET], every=5, score=lambda model: seen.append(1) or 0.0)
    for t in range(1, 11):
        rule(step(t))
    assert len(seen) == 2


def test_falling_gradients_are_no_plateau_and_level_ones_are():
    falling = Plateau([QUIET], patience=5, memory=0.0)
    assert not any(falling(step(t, norm=10 * 0.9**t, noise=0.0)) for t in range(1, 30))
    level = Plateau([QUIET], patience=5, memory=0.0)
    assert [t for t in range(1, 30) if level(step(t, norm=2.0, noise=1.0))] == [6]


def test_stages_are_taken_once_as_the_share_passes_them():
    rule = Stages({0.6: QUIETER, 0.3: QUIET})
    found = [rule(step(t, share=share)) for t, share in enumerate((0.1, 0.3, 0.4, 0.7, 0.9), 1)]
    assert found == [None, QUIET, None, QUIETER, None]


def test_a_stage_that_is_jumped_over_is_left_out():
    rule = Stages({0.3: QUIET, 0.6: QUIETER})
    assert [rule(step(1, share=0.8)), rule(step(2, share=0.9))] == [QUIETER, None]


def test_a_gate_follows_whether_gradients_stand_out_of_their_noise():
    model, rule = nn.Linear(100, 10), NoiseGate(8.0, 4.0, memory=0.5)
    clear = [rule(step(t, norm=1.2, noise=1.0, model=model)) for t in range(1, 5)]
    assert clear == [None] * 4  # the large noise stays
    hidden = [rule(step(t, norm=1.0, noise=1.0, model=model)) for t in range(5, 25)]
    assert next(one for one in hidden if one) == Change(noise_multiplier=4.0)
    again = [rule(step(t, norm=1.2, noise=1.0, multiplier=4.0, model=model)) for t in range(25, 45)]
    assert next(one for one in again if one) == Change(noise_multiplier=8.0)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: Plateau([]), "at least one Change"),
        (lambda: Plateau([{"noise_multiplier": 2.0}]), "at least one Change"),
        (lambda: Plateau([QUIET], memory=1.0), "memory"),
        (lambda: Plateau([QUIET], patience=0), "patience"),
        (lambda: Stages({1.5: QUIET}), "share"),
        (lambda: NoiseGate(2.0, 4.0), "large must be above small"),
    ],
)
def test_rules_refuse_nonsense(made, says):
    with pytest.raises(InvalidValue, match=says):
        made()


@pytest.mark.parametrize(
    "made",
    [
        lambda: Plateau([QUIET, QUIETER], patience=4, memory=0.5),
        lambda: Stages({0.2: QUIET, 0.5: QUIETER}),
        lambda: NoiseGate(8.0, 4.0, memory=0.5),
    ],
)
def test_a_rule_goes_on_from_its_state_as_if_it_had_not_stopped(made):
    model = nn.Linear(3, 2)
    steps = [step(t, share=t / 20, norm=1 + (t % 3) / 9, model=model) for t in range(1, 20)]
    whole, first, second = made(), made(), made()
    expected = [whole(one) for one in steps]
    found = [first(one) for one in steps[:7]]
    second.load_state_dict(first.state_dict())
    assert found + [second(one) for one in steps[7:]] == expected


def test_a_menu_has_every_rate_with_every_noise():
    budget = ft.Budget(1.0, 1e-5)
    found = menu(budget, 1000, sampling_rate=(0.1, 0.2), noise_multiplier=[8, 4]).events
    assert [(event.rate, event.event.noise) for event in found] == [(0.1, 8), (0.1, 4), (0.2, 8), (0.2, 4)]


def test_a_menu_without_numbers_lies_around_the_plan_that_training_would_choose():
    budget = ft.Budget(1.0, 1e-5)
    first, *others = menu(budget, 60_000).events
    assert first.event.noise == planned(budget, 60_000).noise_multiplier(0)
    assert [round(one.event.noise / first.event.noise, 2) for one in others] == [0.71, 1.41, 2.0, 2.83]


def test_a_menu_for_a_coordinator_amplifies_nothing():
    budget = ft.Budget(1.0, 1e-5, observer="coordinator")
    found = menu(budget, 1000, sampling_rate=0.1, noise_multiplier=40.0).events
    assert all(isinstance(one, DrawnEvent) for one in found)
