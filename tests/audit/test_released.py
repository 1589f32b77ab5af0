"""Statistics as people call them, attacked end to end; half of the noise is noticed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import farthing as ft
from farthing.audit import methods
from farthing.audit.released import HeardLedger, RepeatedLedger
from farthing.noise.lattice import SeededStream
from farthing.queries.mechanisms import Gaussian, Laplace, NoisyMax


@pytest.mark.slow
@pytest.mark.parametrize("name", ["count-released", "mean-released", "quantiles-released", "bounds-released"])
def test_a_statistic_stands_end_to_end(name: str) -> None:
    for _, verdict in methods.attack(name, scale=0.2, confidence=0.999, stream=SeededStream(1)):
        assert not verdict.broken, verdict


def quieter(mechanism: type) -> Callable[..., Any]:
    real = mechanism.release  # type: ignore[attr-defined]
    return lambda self, *given: real(replace(self, noise_multiplier=self.noise_multiplier / 3), *given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mechanism"),
    [
        ("count-released", Laplace),
        ("mean-released", Laplace),
        ("quantiles-released", NoisyMax),
        ("bounds-released", Gaussian),
    ],
)
def test_a_third_of_the_noise_is_noticed(name: str, mechanism: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mechanism, "release", quieter(mechanism))
    found = methods.attack(name, scale=0.2, stream=SeededStream(4))
    assert any(verdict.broken for _, verdict in found)


def test_a_repeated_ledger_gives_the_answers_again_at_no_charge() -> None:
    budget, values = ft.Budget(2.0, 1e-3), np.full(400, 1.5)
    first = HeardLedger(ft.Ledger(budget))
    low, high = ft.bounds(values, ledger=first)  # type: ignore[arg-type]
    untouched = ft.Ledger(budget)
    again = RepeatedLedger(untouched, before=first.told)
    assert ft.bounds(values[1:], ledger=again) == (low, high)  # type: ignore[arg-type]
    assert untouched.share == 0
    assert len(first.told.answers) == len(again.told.records) == 2
    assert [len(records) for records in again.told.records] == [399, 399]
