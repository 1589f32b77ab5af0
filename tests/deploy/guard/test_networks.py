"""Guards over networks: what a coordinator may ask, refusals before the charge, repetitions."""

import pickle
import sqlite3

import numpy as np
import pytest

from farthing.deploy.guard.policy import Policy
from farthing.deploy.messages import forms
from farthing.deploy.messages.signed import MessageKind, Reason
from farthing.errors import InvalidValue, Unsupported
from farthing.federated.terms import Invitation
from farthing.queries.samplers import Poisson

TERMS = Invitation(1.0, rounds=20)


def values(reply):
    return np.frombuffer(reply["body"], dtype="<f4")


def test_a_noisy_gradient_is_charged_logged_and_sent_once(installed, told, books):
    asked = installed().settle(1)
    house = asked.village.houses["p0"]
    guard = house.open()
    message = asked.question(invitation=TERMS)
    reply = told(guard.answer(message), house)
    assert reply["kind"] is MessageKind.ANSWER
    assert (len(values(reply)), reply["left"]) == (23, 19)
    again = told(guard.answer(message), house)
    np.testing.assert_array_equal(values(again), values(reply))
    other = told(guard.answer(asked.question(2, invitation=TERMS)), house)
    assert (values(other) != values(reply)).all()
    assert books(house, verify=True) == (2, 2)


def test_the_answer_is_the_clipped_sum_but_for_its_noise(installed, told):
    """With ε = 1e6 the noise is far below the sum: 40 examples with gradients of about the clip."""
    asked = installed().settle(1, epsilon=1e6, limits="noise = 1e-9")
    house = asked.village.houses["p0"]
    house.policy.write_text(house.policy.read_text().replace("noise = 0.5\n", "", 1))
    guard = house.open()
    terms = Invitation(0.5, rounds=1, noise_multiplier=1e-3)
    w = np.linspace(-1, 1, 23).astype(np.float32)
    found = values(told(guard.answer(asked.question(w=w, invitation=terms)), house))
    from farthing.deploy import factories
    from farthing.queries.bounds import ClipNorm
    from farthing.torch.training.network import Network
    from farthing.torch.training.records import Examples

    make, loss = (factories.found(name, asked.folder) for name in asked.names)
    with np.load(house.folder / "records.npz") as held:
        records = Examples((held["X"], held["y"]))
    plain = Network(make(), loss).gradient.bounded_sum(records.take(slice(None)), w, ClipNorm(0.5))
    np.testing.assert_allclose(found, plain, atol=0.01)
    assert np.linalg.norm(plain) > 1


BAD = {
    "another model": ({"network": "large"}, {}, Reason.MODEL),
    "another source": ({"hash": "0" * 64}, {}, Reason.MODEL),
    "code": ({"network": "os:system"}, {}, Reason.MALFORMED),
    "a path": ({"network": "../evil"}, {}, Reason.MALFORMED),
    "another kind": ({"kind": "weights"}, {}, Reason.MALFORMED),
    "more fields": ({"steps": 2}, {}, Reason.MALFORMED),
    "too many steps": ({"kind": "steps", "steps": 5, "lr": 0.1, "proximal": 0.0}, {}, Reason.ROUNDS),
    "no steps": ({"kind": "steps", "steps": 0, "lr": 0.1, "proximal": 0.0}, {}, Reason.MALFORMED),
    "a rate of 0": ({"kind": "steps", "steps": 1, "lr": 0, "proximal": 0.0}, {}, Reason.MALFORMED),
    "a huge rate": ({"kind": "steps", "steps": 1, "lr": 1e9, "proximal": 0.0}, {}, Reason.MALFORMED),
    "a negative pull": ({"kind": "steps", "steps": 1, "lr": 1, "proximal": -1.0}, {}, Reason.MALFORMED),
    "fewer weights": ({}, {"w": np.zeros(22)}, Reason.SHAPE),
    "more weights": ({}, {"w": np.zeros(24)}, Reason.SHAPE),
    "a matrix": ({}, {"w": np.zeros((23, 1))}, Reason.SHAPE),
    "a short body": ({}, {"body": b"\0" * 91}, Reason.SHAPE),
    "float64": ({}, {"body": b"\0" * 8 * 23}, Reason.SHAPE),
    "too large": ({}, {"body": b"\0" * 40_000}, Reason.OVERSIZED),
    "not a number": ({}, {"w": np.full(23, np.nan)}, Reason.NONFINITE),
    "infinity": ({}, {"w": np.full(23, np.inf)}, Reason.NONFINITE),
    "huge": ({}, {"w": np.full(23, 1.1e6)}, Reason.WEIGHTS),
}


def test_what_is_not_allowed_is_refused_before_the_charge_and_the_session_goes_on(
    installed, told, books, monkeypatch
):
    asked = installed().settle(1)
    house = asked.village.houses["p0"]
    guard = house.open()
    for name in ("load", "loads"):
        monkeypatch.setattr(pickle, name, lambda *_, **__: pytest.fail("something was unpickled"))
    for name, (lies, more, reason) in BAD.items():
        reply = told(guard.answer(asked.question(lies=lies, invitation=TERMS, **more)), house)
        assert reply is reason, name
    assert books(house) == (0, 0)
    assert told(guard.answer(asked.question(invitation=TERMS)), house)["left"] == 19
    assert books(house) == (1, 1)


def test_the_limits_of_the_policy_hold_for_networks(installed, told, books):
    asked = installed().settle(1)
    house = asked.village.houses["p0"]
    guard = house.open()
    for terms, reason in (
        (Invitation(3.1, rounds=5), Reason.CLIP),
        (Invitation(1.0, rounds=5, noise_multiplier=0.4), Reason.NOISE),
        (Invitation(1.0, Poisson(0.6), rounds=5), Reason.SAMPLER),
    ):
        assert told(guard.answer(asked.question(invitation=terms)), house) is reason
    assert books(house) == (0, 0)


def test_a_guard_of_a_table_has_no_networks_and_a_guard_of_networks_no_table(installed, village, told):
    asked = installed().settle(1)
    networks = village.houses["p0"]
    assert told(networks.open().answer(village.question()), networks) is Reason.MODEL
    networks.stop()
    networks.policy.write_text(
        networks.policy.read_text()
        .partition("\n[models")[0]
        .replace('modules = "../models"\n', "")
        .replace("rounds = 1000\n", "rounds = 1000\nwidth = 4\n")
    )
    guard = networks.open()
    assert told(guard.answer(asked.question(invitation=TERMS)), networks) is Reason.MODEL


STEPS = {"kind": "steps", "steps": 3, "lr": 0.5, "proximal": 0.1}


def test_local_steps_are_charged_one_by_one_and_repeated_as_they_were(installed, told, books):
    asked = installed().settle(1)
    house = asked.village.houses["p0"]
    message = asked.question(lies=STEPS, invitation=TERMS)
    reply = told(house.open().answer(message), house)
    assert (reply["taken"], reply["left"]) == (3, 17)
    assert books(house) == (3, 3)
    house.stop()
    again = told(house.open().answer(message), house)
    np.testing.assert_array_equal(values(again), values(reply))
    assert (again["taken"], again["left"], books(house, verify=True)) == (3, 17, (3, 3))


def test_local_steps_stop_where_budget_or_policy_do(installed, told, books):
    asked = installed().settle(1, limits="")
    house = asked.village.houses["p0"]
    house.policy.write_text(house.policy.read_text().replace("rounds = 1000", "rounds = 5"))
    guard = house.open()
    first = asked.question(1, lies=STEPS, invitation=TERMS)
    second = asked.question(2, lies=STEPS, invitation=TERMS)
    assert told(guard.answer(first), house)["taken"] == 3
    reply = told(guard.answer(second), house)
    assert (reply["taken"], reply["left"]) == (2, 0)
    assert told(guard.answer(second), house)["taken"] == 2  # and not fewer: the two were its own
    assert told(guard.answer(asked.question(3, lies=STEPS, invitation=TERMS)), house) is Reason.ROUNDS
    assert books(house) == (5, 5)


def test_local_steps_that_diverge_are_refused_and_stay_charged(installed, told, books):
    asked = installed().settle(1)
    house = asked.village.houses["p0"]
    lies = STEPS | {"lr": 1000.0, "proximal": 1000.0, "steps": 4}
    w = np.full(23, 9e5)
    reply = told(house.open().answer(asked.question(lies=lies, w=w, invitation=TERMS)), house)
    assert reply is Reason.WEIGHTS
    logged, charged = books(house)
    assert (logged, charged > 0) == (0, True)


def test_other_weights_under_an_old_nonce_are_a_conflict_also_for_steps(installed, told, books):
    asked = installed().settle(1)
    house = asked.village.houses["p0"]
    guard = house.open()
    for number, lies in enumerate(({}, STEPS), 1):
        told(guard.answer(asked.question(number, lies=lies, invitation=TERMS)), house)
        other = asked.question(number, lies=lies, w=np.ones(23), invitation=TERMS)
        assert told(guard.answer(other), house) is Reason.CONFLICT
    bent = asked.question(2, lies=STEPS | {"lr": 0.6}, invitation=TERMS)
    assert told(guard.answer(bent), house) is Reason.CONFLICT  # the same round and nonce, another question
    assert books(house) == (4, 4)


UPDATE = {"kind": "update", "steps": 2, "lr": 0.5, "batch": 0}


@pytest.mark.parametrize("unit", ["user", pytest.param("party", marks=pytest.mark.slow)])
def test_whole_updates_of_users_and_parties_are_clipped_and_charged_once(unit, installed, told, books):
    asked = installed().settle(1, unit=unit)
    house = asked.village.houses["p0"]
    guard = house.open()
    terms = Invitation(1.0, rounds=20, clipped=unit)
    reply = told(guard.answer(asked.question(lies=UPDATE, invitation=terms)), house)
    assert (len(values(reply)), reply["left"]) == (23, 19)
    record = asked.question(2, lies=UPDATE, invitation=TERMS)
    assert told(guard.answer(record), house) is Reason.MALFORMED  # a record's terms for more than a record
    assert books(house, verify=True) == (1, 1)


def test_a_record_s_budget_does_not_pay_for_updates_of_users(installed, told, books):
    asked = installed().settle(1)
    house = asked.village.houses["p0"]
    terms = Invitation(1.0, rounds=20, clipped="user")
    assert told(house.open().answer(asked.question(lies=UPDATE, invitation=terms)), house) is Reason.MALFORMED
    assert books(house) == (0, 0)


# --- what a party installs


def changed(asked, **lines):
    """The policy of p0 with other lines."""
    house = asked.village.houses["p0"]
    text = house.policy.read_text()
    for before, after in lines.values():
        assert before in text
        text = text.replace(before, after)
    house.policy.write_text(text)
    return house


def test_a_source_that_changed_is_not_imported(installed):
    asked = installed().settle(1)
    file = asked.folder / f"{asked.module}.py"
    file.write_text(f"raise SystemExit('imported')\n{file.read_text()}")
    with pytest.raises(InvalidValue, match=r"the policy says .*: look at what changed"):
        asked.village.houses["p0"].open()
    with pytest.raises(InvalidValue, match="64 hexadecimal digits that `farthing guard POLICY --hashes`"):
        changed(asked, hash=(f'hash = "{asked.hash}"\n', "")).open()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("make_model", "nothing"), "has no 'nothing'"),
        (("weights = 100", "weights = 22"), "weights must be at least 23"),
        (("shape = [4]", "shape = [5]"), r"the shape \[5\]"),
        (("classes = 2", "classes = 1"), "from 0 to 0"),
        (("steps = 4", "steps = 0"), r"\[models.small\]: steps"),
        (("steps = 4", "step = 4"), r"\[models.small\] has no entry 'step'"),
        (("rounds = 1000", "rounds = 1000\nwidth = 4"), "width is for tables"),
        (("classes = 2", 'kind = "text"'), "kind must be one of"),
    ],
)
def test_a_policy_that_does_not_fit_is_an_error_when_the_guard_starts(change, message, installed):
    asked = installed().settle(1)
    with pytest.raises((InvalidValue, Unsupported), match=message):
        changed(asked, one=change).open()


def test_a_model_whose_answers_no_ledger_keeps_is_refused_when_the_guard_starts(installed, monkeypatch):
    """Every round of it would be charged, and its answer lost."""
    with sqlite3.connect(":memory:") as ledger:
        assert ledger.getlimit(sqlite3.SQLITE_LIMIT_LENGTH) > 8 * forms.MOST_WEIGHTS + 2**16
    monkeypatch.setattr(forms, "MOST_WEIGHTS", 22)
    asked = installed().settle(1)
    with pytest.raises(InvalidValue, match="at most 22 numbers, the model has 23"):
        asked.village.houses["p0"].open()
    assert not asked.village.houses["p0"].ledger.exists()


def test_a_model_that_mixes_examples_is_refused_when_the_guard_starts(installed):
    source = (
        "from torch import nn\n\n\ndef make_model():\n"
        "    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))\n\n\n"
        "def loss(out, y):\n    return nn.functional.cross_entropy(out, y, reduction='none')\n"
    )
    asked = installed(source=source).settle(1)
    with pytest.raises(Unsupported, match="BatchNorm"):
        asked.village.houses["p0"].open()
    assert not asked.village.houses["p0"].ledger.exists()


def test_a_policy_for_a_whole_party_has_size_one(installed):
    asked = installed().settle(1, unit="party")
    house = changed(asked, size=("size = 1\n", "size = 2\n"))
    with pytest.raises(InvalidValue, match="size must be 1"):
        Policy.load(house.policy)
