"""A training that is watched: every step is seen, and one may be the last."""

from collections.abc import Iterator

import numpy as np
import pytest

import farthing as ft
from farthing.cli.step_recorder import StepRecorder
from farthing.data.tables import Table
from farthing.errors import BudgetSpent
from farthing.linear import losses
from farthing.linear.methods.descent import descent
from farthing.linear.problem import Problem

PROBLEM = Problem(losses.logistic, 200, 2, unit=False)


def door() -> ft.Ledger:
    x = np.random.default_rng(0).uniform(size=(200, 2))
    return ft.Ledger(ft.Budget(1.0, 1e-5)).over(Table(x, 1.0 * (x[:, 0] > x[:, 1])))


def test_steps_are_those_of_the_algorithm_and_all_are_seen() -> None:
    recorder, seen = StepRecorder("auto", descent), list[tuple[int, float]]()

    def watch(step: ft.Step, ledger: ft.Ledger) -> bool:
        seen.append((step.t, ledger.share))
        return False

    recorder.watch = watch
    ledger = door()
    steps = list(recorder(ledger, PROBLEM))
    assert [step.t for step in steps] == [t for t, _ in seen] == [step.t for step in descent(door(), PROBLEM)]
    shares = [share for _, share in seen]
    assert shares == sorted(shares)
    assert shares[-1] == ledger.share == pytest.approx(1)
    assert not recorder.stopped


def test_a_step_may_be_the_last_and_nothing_more_is_asked() -> None:
    recorder = StepRecorder("auto", descent)
    recorder.watch = lambda step, _: step.t == 3
    ledger = door()
    assert [step.t for step in recorder(ledger, PROBLEM)] == [1, 2, 3]
    assert recorder.stopped
    assert recorder.ledger is not None
    assert recorder.ledger.share == ledger.share < 0.3


def test_what_is_asked_is_noted_with_its_noise() -> None:
    recorder, ledger = StepRecorder("auto", descent), door()
    list(recorder(ledger, PROBLEM))
    assert {what: asked.times for (what, _, _), asked in recorder.asked.items()} == {
        "norms": 1,
        "spread": 1,
        "gradient": (steps := len(list(descent(door(), PROBLEM)))),
    }
    gradients = recorder.asked["gradient", "everyone", "Gaussian"]
    (noise,) = set(gradients.noise_multiplier)
    # all of a Gaussian budget: norms, moments and gradients have 1, 14 and 85 hundredths of μ²
    assert steps / noise**2 == pytest.approx(0.85 * ledger.budget.mu**2)
    assert gradients.deviation[0] == pytest.approx(noise * gradients.clip_norm[0])


def test_the_deviation_of_laplace_noise_is_not_its_scale() -> None:
    query = ft.Query(
        ft.Poisson(0.25), ft.PerExample(lambda rows, w: rows[0]), ft.ClipNorm(2.0, order=1), ft.Laplace(3.0)
    )

    def once(ledger: ft.Ledger, _: Problem) -> Iterator[ft.Step]:
        yield ft.Step(1, ledger.ask(query).value)

    recorder = StepRecorder("once", once)
    ledger = ft.Ledger(ft.Budget(1.0, 0.0))
    list(recorder(ledger.over(ft.Rows(np.ones((5, 1)))), PROBLEM))
    ((kind, asked),) = recorder.asked.items()
    assert kind == ("perexample", "poisson, sampling rate 0.25", "Laplace")
    assert asked.deviation == pytest.approx((6 * 2**0.5, 6 * 2**0.5))


def test_no_step_at_all_is_an_error() -> None:
    recorder = StepRecorder("none", lambda ledger, problem: iter(()))
    with pytest.raises(BudgetSpent, match="does not allow a single step of 'none'"):
        list(recorder(door(), PROBLEM))
