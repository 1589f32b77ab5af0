"""What a guard answers, and everything that it refuses without a charge."""

import logging
import math
from dataclasses import replace

import numpy as np
import pytest

from farthing.data.tables import Features
from farthing.deploy.guard import keeper
from farthing.deploy.guard.answers import Tables
from farthing.deploy.guard.policy import Limits
from farthing.deploy.messages import forms
from farthing.deploy.messages.signed import MessageKind, Reason, Signer, pack_numbers, seal
from farthing.errors import InvalidValue, LedgerLocked
from farthing.federated.terms import Exactly, Invitation
from farthing.linear.losses import LinearGradient, PlacedGradient, logistic, multinomial, squared
from farthing.queries.mechanisms import Gaussian
from farthing.queries.samplers import Everyone, Poisson

PLAIN = Invitation(1.0, rounds=5)


@pytest.fixture
def house(village):
    return village.settle(1).houses["p0"]


def test_a_question_is_charged_and_answered(village, house, told):
    answer = told(house.open().answer(village.question()), house)
    assert answer["kind"] is MessageKind.ANSWER
    assert answer["value"].shape == (3,)
    assert (answer["run"], answer["round"], answer["left"]) == ("run-1", 1, 4)
    assert village.check() == {"p0": (1, 1)}


def test_the_same_question_gets_the_same_answer_and_no_other_noise(village, house, told):
    guard = house.open()
    first = guard.answer(village.question())
    assert guard.answer(village.question()) == first
    guard.answer(village.question(2))
    again = told(guard.answer(village.question()), house)
    np.testing.assert_array_equal(again["value"], told(first, house)["value"])
    assert again["left"] == 3  # as it is now
    house.stop()
    later = told(house.open().answer(village.question()), house)
    np.testing.assert_array_equal(later["value"], told(first, house)["value"])
    assert village.check() == {"p0": (2, 2)}


def test_until_the_budget_is_spent(village, house, told):
    guard = house.open()
    left = [told(guard.answer(village.question(t)), house)["left"] for t in range(1, 6)]
    assert left == [4, 3, 2, 1, 0]
    for number in (6, 7):
        assert told(guard.answer(village.question(number)), house) is Reason.SPENT
    assert told(guard.answer(village.question(1, run="run-2")), house) is Reason.SPENT
    assert village.check() == {"p0": (5, 5)}


# What is asked, and why it is refused.
LIES = [
    (Reason.DATASET, {"dataset": "another"}),
    (Reason.NOISE, {"invitation": Invitation(1.0, rounds=5, noise_multiplier=0.4)}),
    (Reason.CLIP, {"invitation": Invitation(3.1, rounds=5)}),
    (Reason.CLIP, {"invitation": Invitation(1e-200, rounds=5)}),
    (Reason.SAMPLER, {"invitation": Invitation(1.0, Poisson(0.6), 5)}),
    (Reason.SAMPLER, {"invitation": Invitation(1.0, Exactly(2), 5)}),
    (Reason.TRUST, {"invitation": Invitation(1.0, rounds=5, noise_multiplier=9.0, trust="distributed")}),
    (Reason.TRUST, {"invitation": Invitation(1.0, rounds=5, noise_multiplier=9.0, trust="trusted")}),
    (Reason.LOSS, {"gradient": LinearGradient(squared, Features(2))}),
    (Reason.LOSS, {"gradient": LinearGradient(multinomial, Features(2)), "w": np.zeros((3, 2))}),
    (Reason.SHAPE, {"gradient": LinearGradient(logistic, Features(3)), "w": np.zeros(4)}),
    (Reason.SHAPE, {"gradient": LinearGradient(logistic, Features(2, intercept=1e300))}),
    (Reason.SHAPE, {"gradient": LinearGradient(logistic, Features(2, radius=1e-9))}),
    (Reason.SHAPE, {"w": np.zeros(4)}),
    (Reason.SHAPE, {"w": np.zeros((3, 1))}),
    (Reason.SHAPE, {"w": np.zeros(2)}),
    (Reason.SHAPE, {"body": b"1234567"}),
    (Reason.SHAPE, {"body": b""}),
    (Reason.NONFINITE, {"w": [0.0, math.nan, 0.0]}),
    (Reason.NONFINITE, {"w": [0.0, -math.inf, 0.0]}),
    (Reason.STALE, {"number": 0}),
    (Reason.MALFORMED, {"lies": {"round": 2**41}}),
    (Reason.MALFORMED, {"lies": {"round": -1}}),
    (Reason.MALFORMED, {"lies": {"round": "1"}}),
    (Reason.MALFORMED, {"lies": {"run": "../etc"}}),
    (Reason.MALFORMED, {"lies": {"run": ""}}),
    (Reason.MALFORMED, {"lies": {"nonce": "xyz"}}),
    (Reason.MALFORMED, {"lies": {"more": 1}}),
    (Reason.MALFORMED, {"kind": MessageKind.ANSWER}),
    (Reason.MALFORMED, {"kind": MessageKind.OPENING}),
    (Reason.LOCKED, {"seen": (99, "00" * 32)}),
    (Reason.LOCKED, {"seen": (0, "00" * 32)}),
    (Reason.STRANGER, {"signer": Signer.new()}),
    (Reason.OVERSIZED, {"body": bytes(10**6)}),
]


@pytest.mark.parametrize(
    ("reason", "lie"), LIES, ids=[f"{reason}-{number}" for number, (reason, _) in enumerate(LIES)]
)
def test_lies_are_refused_and_cost_nothing(reason, lie, village, house, told, caplog):
    guard = house.open()
    guard.answer(village.question())
    with caplog.at_level(logging.WARNING, "farthing.deploy.guard"):
        lie = {"number": 2} | lie
        assert told(guard.answer(village.question(lie.pop("number"), **lie)), house) is reason
    assert any(record.levelno >= logging.WARNING for record in caplog.records)
    answer = told(guard.answer(village.question(2)), house)
    assert (answer["kind"], answer["left"]) == (MessageKind.ANSWER, 3)
    assert village.check() == {"p0": (2, 2)}


@pytest.mark.parametrize("noise", [1e12, 1e200])
def test_noise_that_has_no_lattice_is_refused_before_it_is_charged(noise, village, house, told):
    endless = Invitation(1.0, rounds=5, noise_multiplier=noise)
    assert told(house.open().answer(village.question(invitation=endless)), house) is Reason.NOISE
    assert village.check() == {"p0": (0, 0)}


def test_noise_that_the_guard_chose_itself_is_held_to_the_policy_too(village, told):
    """An invitation without noise leaves it to the budget, which may afford less than the policy allows."""
    house = village.settle(1, epsilon=10.0, limits="").houses["p0"]
    house.policy.write_text(house.policy.read_text().replace("noise = 0.5", "noise = 5.0"))
    guard, few = house.open(), Invitation(1.0, rounds=1)
    header = {"run": "r", "round": 0, "nonce": "0" * 32, "dataset": "d", "invitation": forms.invitation(few)}
    assert (
        told(guard.answer(seal(MessageKind.PROPOSAL, header, b"", village.coordinator)), house)
        is Reason.NOISE
    )
    assert told(guard.answer(village.question(invitation=few)), house) is Reason.NOISE
    many = Invitation(1.0, rounds=1000)
    assert told(guard.answer(village.question(invitation=many)), house)["kind"] is MessageKind.ANSWER
    assert village.check() == {"p0": (1, 1)}


def test_rounds_and_nonces(village, house, told):
    guard = house.open()
    guard.answer(village.question(3))
    assert told(guard.answer(village.question(3, w=(0.0, 0.0, 1e-300))), house) is Reason.CONFLICT
    other = LinearGradient(logistic, Features(2, radius=2.0))
    assert told(guard.answer(village.question(3, gradient=other)), house) is Reason.CONFLICT
    assert (
        told(guard.answer(village.question(3, invitation=replace(PLAIN, clip_norm=0.5))), house)
        is Reason.CONFLICT
    )
    assert told(guard.answer(village.question(3, nonce="ff" * 16)), house) is Reason.STALE
    assert told(guard.answer(village.question(2)), house) is Reason.STALE
    assert told(guard.answer(village.question(4)), house)["round"] == 4
    assert told(guard.answer(village.question(1, run="run-2")), house)["round"] == 1
    assert village.check() == {"p0": (3, 3)}


def test_sampled_rounds_are_promised_once(village, house, told):
    guard = house.open()
    guard.answer(village.question(invitation=Invitation(1.0, Poisson(0.5), 5)))
    for other in (
        Invitation(1.0, Poisson(0.5), 7),
        Invitation(1.0, rounds=5, noise_multiplier=9.0),
    ):
        assert told(guard.answer(village.question(2, invitation=other)), house) is Reason.PROMISED
        header = {"run": "r", "round": 0, "nonce": "0" * 32, "dataset": "d"}
        header["invitation"] = forms.invitation(other)
        sealed = seal(MessageKind.PROPOSAL, header, b"", village.coordinator)
        assert told(guard.answer(sealed), house) is Reason.PROMISED
    assert village.check() == {"p0": (1, 1)}


def test_a_pilot_of_few_rounds_locks_no_budget(village, house, told):
    """Three of forty rounds, and then others: the filter charges what was asked, and nothing that was not."""
    guard, pilot = house.open(), Invitation(1.0, rounds=40)
    for number in (1, 2, 3):
        found = told(guard.answer(village.question(number, run="pilot", invitation=pilot)), house)
        assert found["left"] == 40 - number
    for number in (1, 2, 3, 4):
        found = told(guard.answer(village.question(number, run="main")), house)
        assert found["left"] == 4 - number  # of five that fit a whole budget, 3/40 of which is spent
    assert told(guard.answer(village.question(5, run="main")), house) is Reason.SPENT
    rest = told(guard.answer(village.question(1, run="rest", invitation=pilot)), house)
    assert rest["left"] == 4  # 40 (1 - 4/5) - 3 - 1
    assert village.check(verify=True) == {"p0": (8, 8)}


def test_terms_that_no_filter_prices_are_refused_once_rounds_were_charged_to_one(village, house, told):
    guard, sampled = house.open(), Invitation(1.0, Poisson(0.5), 5)
    guard.answer(village.question())
    assert told(guard.answer(village.question(2, invitation=sampled)), house) is Reason.PROMISED
    assert told(guard.answer(village.question(2)), house)["left"] == 3
    assert village.check() == {"p0": (2, 2)}


MENU = """
[[menu]]
draw = "poisson:0.5"
noise = 20.0
[[menu]]
draw = "all"
noise = 30.0
"""


def test_a_menu_pays_for_sampled_rounds_one_by_one(village, house, told):
    """Terms change on the way, between entries of the menu and to what one of them dominates."""
    house.policy.write_text(house.policy.read_text() + MENU)
    guard = house.open()
    dearer = Invitation(1.0, Poisson(0.5), noise_multiplier=10.0)
    assert told(guard.answer(village.question(1, invitation=dearer)), house) is Reason.PROMISED
    rough = Invitation(1.0, Poisson(0.5), noise_multiplier=25.0)
    exact = Invitation(1.0, Poisson(0.5), noise_multiplier=20.0)
    full = Invitation(1.0, noise_multiplier=30.0)
    first = told(guard.answer(village.question(1, invitation=rough)), house)["left"]
    assert told(guard.answer(village.question(2, invitation=exact)), house)["left"] == first - 1
    assert told(guard.answer(village.question(3, invitation=full)), house)["left"] > 1
    assert told(guard.answer(village.question(4, invitation=dearer)), house) is Reason.PROMISED
    house.stop()
    again = told(house.open().answer(village.question(4, invitation=exact)), house)
    assert again["left"] < first - 2
    house.stop()
    assert village.check(verify=True) == {"p0": (4, 4)}
    house.policy.write_text(house.policy.read_text().replace("noise = 30.0", "noise = 31.0"))
    with pytest.raises(InvalidValue, match="another menu"):
        house.open()


def test_a_policy_of_ten_rounds_takes_part_in_ten_of_forty(village, told):
    house = village.settle(1, limits="").houses["p0"]
    house.policy.write_text(house.policy.read_text().replace("rounds = 1000", "rounds = 10"))
    guard, forty = house.open(), Invitation(1.0, rounds=40)
    first = told(guard.answer(village.question(25, invitation=forty)), house)  # it joined late
    assert first["left"] == 9
    left = [told(guard.answer(village.question(t, invitation=forty)), house)["left"] for t in range(26, 35)]
    assert left == list(range(8, -1, -1))
    assert told(guard.answer(village.question(35, invitation=forty)), house) is Reason.ROUNDS
    assert village.check() == {"p0": (10, 10)}


def test_a_proposal_binds_nobody(village, house, told):
    guard = house.open()

    def propose(invitation):
        header = {"run": "r", "round": 0, "nonce": "0" * 32, "dataset": "d"}
        header["invitation"] = forms.invitation(invitation)
        return told(guard.answer(seal(MessageKind.PROPOSAL, header, b"", village.coordinator)), house)

    assert propose(Invitation(1.0, rounds=7))["left"] == 7
    assert propose(Invitation(1.0, noise_multiplier=0.4)) is Reason.NOISE
    assert propose(PLAIN)["left"] == 5
    guard.answer(village.question())
    assert propose(PLAIN)["left"] == 4
    assert propose(Invitation(1.0, rounds=7))["left"] == 5  # what a fifth of the budget leaves
    assert village.check() == {"p0": (1, 1)}


def test_the_policy_limits_rounds_below_the_budget(village, told):
    house = village.settle(1, limits="").houses["p0"]
    house.policy.write_text(house.policy.read_text().replace("rounds = 1000", "rounds = 2"))
    guard, invitation = house.open(), Invitation(1.0, rounds=2, noise_multiplier=500.0)
    assert told(guard.answer(village.question(1, invitation=invitation)), house)["left"] == 1
    assert told(guard.answer(village.question(2, invitation=invitation)), house)["left"] == 0
    again = village.question(1, run="other", invitation=invitation)
    assert told(guard.answer(again), house) is Reason.ROUNDS
    assert village.check() == {"p0": (2, 2)}


def test_a_charge_without_an_answer_stays_lost(village, house, told, monkeypatch):
    guard = house.open()

    def fail(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Gaussian, "release", fail)  # there is no memory for the noise
        assert told(guard.answer(village.question()), house) is Reason.LOST
    assert told(guard.answer(village.question()), house) is Reason.LOST
    assert told(guard.answer(village.question(2)), house)["left"] == 3
    assert village.check() == {"p0": (1, 2)}


def test_an_answer_that_was_kept_and_not_logged_is_logged_before_it_goes_out(
    village, house, told, monkeypatch
):
    guard = house.open()

    def full(*_):
        raise LedgerLocked("no room")

    with monkeypatch.context() as patch:
        patch.setattr(keeper.AnswerLog, "append", full)
        assert told(guard.answer(village.question()), house) is Reason.LOCKED
    assert village.check() == {"p0": (0, 1)}
    assert told(guard.answer(village.question()), house)["left"] == 4
    assert village.check() == {"p0": (1, 1)}


def test_garbage_is_refused(village, house, told):
    guard = house.open()
    message = village.question()
    for data in (b"", b"x", message[:-1], message + b"x", bytes(1000), message[:20], message[1:]):
        assert told(guard.answer(data), house) is Reason.MALFORMED
    flipped = message[:-1] + bytes([message[-1] ^ 1])
    assert told(guard.answer(flipped), house) is Reason.FORGED
    assert village.check() == {"p0": (0, 0)}


def test_nothing_of_a_question_or_a_record_is_logged(village, house, caplog):
    guard = house.open()
    with caplog.at_level(logging.DEBUG):
        guard.answer(village.question(w=(123456.75, math.nan, 0.0)))
        guard.answer(village.question(w=(123456.75, 0.0, 0.0)))
        guard.answer(village.question(w=(654321.25, 0.0, 0.0)))
    assert caplog.records
    assert "123456" not in caplog.text
    assert "654321" not in caplog.text


def test_a_guard_says_who_it_is(village, house, told):
    header = {"run": "r", "round": 0, "nonce": "0" * 32, "dataset": "d"}
    found = told(house.open().answer(seal(MessageKind.HELLO, header, b"", village.coordinator)), house)
    assert found["records"] == 20
    assert found["budget"]["epsilon"] == 1.0
    assert found["budget"]["observer"] == "server"


def test_an_answer_is_a_clipped_sum_with_noise(village, told):
    house = village.settle(1, epsilon=1e7, limits="").houses["p0"]
    house.policy.write_text(house.policy.read_text().replace("noise = 0.5", "noise = 1e-9"))
    answer = told(house.open().answer(village.question(w=(0.5, -1.0, 0.25))), house)
    with np.load(house.folder / "records.npz") as found:
        rows = np.column_stack([found["X"], np.ones(len(found["X"]))])
        residuals = 1 / (1 + np.exp(-rows @ [0.5, -1.0, 0.25])) - found["y"]
    terms = rows * residuals[:, None]
    norms = np.linalg.norm(terms, axis=1)
    exact = (terms * np.minimum(1.0, 1.0 / norms)[:, None]).sum(axis=0)
    np.testing.assert_allclose(answer["value"], exact, atol=0.01)


def test_the_ledger_belongs_to_one_data_set(village, house):
    house.open()
    house.stop()
    house.policy.write_text(house.policy.read_text().replace('dataset = "d"', 'dataset = "e"'))
    with pytest.raises(InvalidValue, match="belongs to 'd'"):
        house.open()


def test_another_budget_does_not_open_the_ledger(village, house):
    house.open()
    house.stop()
    house.policy.write_text(house.policy.read_text().replace("epsilon = 1.0", "epsilon = 2.0"))
    with pytest.raises(InvalidValue, match="epsilon"):
        house.open()


def test_two_guards_do_not_share_a_ledger(village, house):
    house.open()
    with pytest.raises(InvalidValue, match="another guard"):
        house.open()


def test_records_must_be_those_of_the_policy(village, house):
    house.policy.write_text(house.policy.read_text().replace("width = 2", "width = 3"))
    with pytest.raises(InvalidValue, match="3 features"):
        house.open()


def test_classes_have_a_matrix_of_weights(village, told):
    house = village.settle(1, limits='losses = ["multinomial"]\noutputs = 3').houses["p0"]
    gradient, guard = LinearGradient(multinomial, Features(2)), house.open()
    answer = told(guard.answer(village.question(gradient=gradient, w=np.zeros((3, 3)))), house)
    assert answer["value"].size == 9
    asked = village.question(2, gradient=gradient, w=np.zeros((3, 4)))
    assert told(guard.answer(asked), house) is Reason.SHAPE
    asked = village.question(2, gradient=gradient, w=np.zeros((3, 4)), body=pack_numbers(np.zeros((3, 3))))
    assert told(guard.answer(asked), house) is Reason.SHAPE


@pytest.mark.parametrize("draw", [Everyone(), Poisson(0.25), Exactly(1)])
def test_draws_that_are_allowed(draw, village, house, told):
    paper = Invitation(1.0, draw, 5, calibration="advanced", accountant="sampling")
    assert told(house.open().answer(village.question(invitation=paper)), house)["left"] > 4
    assert village.check() == {"p0": (1, 1)}


def test_rows_are_summed_at_places_of_their_own():
    """A coordinator chooses the weights: last bits that follow from who is there would tell."""
    tables = Tables(Limits(noise=1.0, clip=1.0, rounds=5, width=2))
    asked = LinearGradient(logistic, Features(2, intercept=0.3, radius=1.5))
    assert tables.contribution(asked) == PlacedGradient(asked.loss, asked.features)
