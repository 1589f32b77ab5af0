"""What pricing a proposal costs, in operations of the accountant, and that it is not done under the lock."""

import threading
from collections import Counter

import numpy as np
import pytest

from farthing.accounting import transform
from farthing.deploy.guard import policy
from farthing.deploy.messages import forms
from farthing.deploy.messages.signed import MessageKind, Reason, seal
from farthing.federated.terms import Invitation
from farthing.queries.samplers import Poisson

MOST = 20_000  # integrals that pricing one proposal may take
DRAWS = ["poisson:1e-17", "poisson:1e-300", "poisson:5e-324", "poisson:1e-7", "poisson:9.99e-7"]


@pytest.fixture
def house(village):
    return village.settle(1).houses["p0"]


@pytest.fixture
def work(monkeypatch):
    """How many integrals were taken, in all and while the guard's lock was held; how often it was priced."""
    found = Counter()

    def counted(owner, name, what, lock):
        whole = getattr(owner, name)

        def count(*args, **kwargs):
            found[what] += 1
            found[what, "locked"] += lock.locked()
            return whole(*args, **kwargs)

        monkeypatch.setattr(owner, name, count)

    def watch(guard):
        for name in ("_integral", "_rough"):  # of one piece of a privacy loss, at one contour or tilt
            counted(transform, name, "work", guard._lock)
        counted(guard._agent, "terms", "priced", guard._lock)
        return found

    return watch


def propose(village, invitation):
    header = {"run": "r", "round": 0, "nonce": "0" * 32, "dataset": "d"}
    return seal(MessageKind.PROPOSAL, header | {"invitation": invitation}, b"", village.coordinator)


@pytest.mark.parametrize("draw", DRAWS)
def test_rates_that_no_policy_needs_are_refused_before_they_are_priced(draw, village, house, told, work):
    guard = house.open()
    found = work(guard)
    for accountant in ("tight", "sampling", "amplified"):
        lie = forms.invitation(Invitation(1.0, rounds=5)) | {"draw": draw, "accountant": accountant}
        assert told(guard.answer(propose(village, lie)), house) is Reason.SAMPLER
        assert told(guard.answer(village.question(lies={"invitation": lie})), house) is Reason.SAMPLER
    assert (found["work"], found["priced"]) == (0, 0)


def test_a_rate_that_the_policy_lists_is_priced(village, told):
    house = village.settle(1).houses["p0"]
    house.policy.write_text(house.policy.read_text().replace('"exactly:1"', '"poisson:1e-7"'))
    guard = house.open()
    listed = forms.invitation(
        Invitation(1.0, Poisson(1e-7), rounds=1, noise_multiplier=1e3, accountant="sampling")
    )
    assert told(guard.answer(propose(village, listed)), house)["kind"] is MessageKind.AGREEMENT
    assert told(guard.answer(propose(village, listed | {"draw": "poisson:2e-7"})), house) is Reason.SAMPLER


@pytest.mark.parametrize(
    "terms",
    [
        {"rounds": 1000},
        {"rounds": 1000, "calibration": "advanced", "accountant": "sampling", "draw": "poisson:1e-06"},
        {"noise": 0.5, "draw": "poisson:0.5"},
        {"noise": 1e9, "draw": "poisson:0.5"},
        {"rounds": 1, "calibration": "sampling", "accountant": "basic", "draw": "poisson:0.001"},
        {"rounds": 1000, "calibration": "basic", "draw": "exactly:1"},
        {"clip": 1e-100, "rounds": 7},
    ],
    ids=str,
)
def test_a_proposal_is_priced_once_with_bounded_work_and_not_under_the_lock(
    terms, village, house, told, work
):
    guard = house.open()
    found, invitation = work(guard), forms.invitation(Invitation(1.0, rounds=5)) | terms
    replies = [told(guard.answer(propose(village, invitation)), house) for _ in range(3)]
    assert all(type(reply) is type(replies[0]) for reply in replies)
    assert found["priced"] == 1
    assert found["work"] <= MOST
    assert (found["work", "locked"], found["priced", "locked"]) == (0, 0)


def test_under_the_lock_a_plan_is_checked_once_and_with_bounded_work(village, house, told, work):
    """The first question of a ledger promises its plan, in one transaction with the charge; no other does."""
    guard = house.open()
    found, terms = (
        work(guard),
        Invitation(1.0, Poisson(0.5), 1000, noise_multiplier=500.0, accountant="sampling"),
    )
    for number in (1, 2, 3):
        told(guard.answer(village.question(number, invitation=terms)), house)
        if number == 1:
            first = found["work", "locked"]
    assert first <= 1000
    assert found["work", "locked"] == first


@pytest.mark.parametrize("noise", [1e10, 1e200])
def test_more_noise_than_can_be_drawn_is_refused_before_it_is_priced(noise, village, house, told, work):
    guard = house.open()
    found = work(guard)
    lie = forms.invitation(Invitation(1.0, Poisson(0.5), rounds=5, noise_multiplier=noise))
    assert told(guard.answer(propose(village, lie)), house) is Reason.NOISE
    assert (found["work"], found["priced"]) == (0, 0)


def test_others_are_answered_while_a_proposal_is_priced(village, house, told, monkeypatch):
    guard = house.open()
    entered, go_on = threading.Event(), threading.Event()
    whole = policy.TermsPricing._priced

    def slow(self, invitation):
        entered.set()
        assert go_on.wait(60)
        return whole(self, invitation)

    monkeypatch.setattr(policy.TermsPricing, "_priced", slow)
    header, said = {"run": "r", "round": 0, "nonce": "0" * 32, "dataset": "d"}, []
    asked = propose(village, forms.invitation(Invitation(1.0, rounds=5)))
    thread = threading.Thread(target=lambda: said.append(told(guard.answer(asked), house)))
    thread.start()
    assert entered.wait(60)
    hello = seal(MessageKind.HELLO, header, b"", village.coordinator)
    assert told(guard.answer(hello), house)["kind"] is MessageKind.ANNOUNCEMENT
    go_on.set()
    thread.join(60)
    assert said[0]["left"] == 5
    assert np.isfinite(said[0]["value"]).all()
