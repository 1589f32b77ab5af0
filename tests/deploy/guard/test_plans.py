"""Noise that is correlated over rounds at guards: one plan, its turns in order, and none of them twice."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from tests.deploy.guard.test_runs import DISTRIBUTED, Reseeded

import farthing as ft
from farthing.data.tables import Features
from farthing.deploy.guard import keeper
from farthing.deploy.guard.policy import Policy
from farthing.deploy.messages import forms
from farthing.deploy.messages.signed import Fields, MessageKind, Reason, Refused
from farthing.deploy.messages.transport import InProcess, call
from farthing.deploy.secagg.masked_noise import masked
from farthing.errors import InvalidValue
from farthing.federated import Invitation, Parties
from farthing.federated.terms import NOTHING
from farthing.ledger.journal import Journal
from farthing.linear.losses import LinearGradient, logistic
from farthing.noise.lattice import SeededStream
from farthing.queries.correlated import BandedShare, coefficients

BANDS, TURNS = 3, 9
GRADIENT = LinearGradient(logistic, Features(2))
W = np.array([0.1, -0.2, 0.3])
LOCAL = Invitation(1.0, ft.Cyclic(0.3, BANDS), TURNS, bands=BANDS, exponent=0.6)
SHARES = replace(LOCAL, noise_multiplier=2.0, trust="distributed", survivors=2)


def settled(village, parties, **settings):
    """Parties whose policies allow three bands."""
    village.settle(parties, **settings)
    for house in village.houses.values():
        draws = f'"exactly:1", "cyclic:0.3:{BANDS}"]\nbands = {BANDS}'
        house.policy.write_text(house.policy.read_text().replace('"exactly:1"]', draws))
    return village


@pytest.fixture
def house(village):
    return settled(village, 1).houses["p0"]


def asked(clients, invitation, rounds):
    """The sums of some rounds at weights that follow from earlier sums."""
    clients.invite(invitation, "records")
    w, found = W, []
    for _ in range(rounds):
        found.append(clients.ask(GRADIENT, w))
        w = w - 0.01 * found[-1].mean
    return np.stack([one.total for one in found])


def turns(house):
    """The numbers of turns that each charge of the ledger took, and whether it has an answer."""
    with Journal(house.ledger) as journal:
        return [(row.body["count"], "answer" in row.body) for row in journal.rows() if row.kind == "charge"]


# --- the same as in one process


def test_guards_answer_a_plan_as_agents_in_one_process_do(village):
    settled(village, 3)
    for seed, house in enumerate(village.houses.values()):
        house.start(seed=seed)
    remote = asked(village.clients(village.sockets()), LOCAL, TURNS)
    agents = Parties([Reseeded(house, seed) for seed, house in enumerate(village.houses.values())])
    np.testing.assert_array_equal(remote, asked(agents, LOCAL, TURNS))
    assert set(village.check().values()) == {(TURNS, TURNS)}


def test_sums_of_shares_are_those_of_agents_in_one_process(village):
    settled(village, 4, records=50, **DISTRIBUTED)
    for seed, house in enumerate(village.houses.values()):
        house.start(seed=seed)
    remote = asked(village.clients(village.sockets(), seconds=120.0), SHARES, 7)
    houses = enumerate(village.houses.values())
    agents = Parties([Reseeded(house, seed, "aggregate") for seed, house in houses])
    for agent in agents._agents:  # as in the policies
        agent._ledger._books.rule = ft.Ledger(ft.Budget(1e3, 1e-6, observer="aggregate")).filter
    np.testing.assert_allclose(remote, asked(agents, SHARES, 7), rtol=1e-9)
    assert set(village.check().values()) == {(7, 7)}


def test_masks_hide_the_noise_of_one_plan_and_nothing_else():
    """Without its mask an answer is that of the share, turn by turn, though each has a mask of its own."""
    terms = SHARES.terms(ft.Budget(1e3, 1e-6, observer="aggregate"), 20)
    size, rng, records = 3, np.random.default_rng(0), ft.Rows(np.zeros((4, 3)))
    budget, nothing = ft.Budget(1e3, 1e-6, observer="aggregate"), ft.PerExample(lambda rows, w: rows[0])
    plain, hidden = (ft.Ledger(budget, stream=SeededStream(5)).over(records) for _ in range(2))
    for ledger in (plain, hidden):
        ledger.promise(terms.query(NOTHING), TURNS)
    for turn in range(6):
        mask = rng.integers(0, 2**64, size, dtype=np.uint64)
        covered = masked(terms, size, mask)
        answer = hidden.ask(covered.query(nothing), key=str(turn))
        assert answer.receipt.turn == turn
        found = (answer.value - mask).view(np.int64) * covered.mechanism.cell
        np.testing.assert_allclose(found, plain.ask(terms.query(nothing), key=str(turn)).value, rtol=1e-12)


# --- crashes, repetitions, order


@pytest.mark.parametrize("place", ["after-charge", "before-store"])
def test_a_turn_whose_answer_was_lost_is_never_given_again(place, village, told):
    house = settled(village, 1).houses["p0"]

    def ask(number):
        return told(call(house.socket, village.question(number, invitation=LOCAL), seconds=60.0), house)

    house.start(place, 3)
    first = [ask(number)["value"] for number in (1, 2)]
    with pytest.raises(OSError, match=r"guard|reset|Broken"):
        ask(3)
    house.start()
    assert [ask(3), ask(3)] == [Reason.LOST] * 2
    np.testing.assert_array_equal([ask(1)["value"], ask(2)["value"]], first)  # kept, whatever was killed
    assert [ask(number)["left"] for number in (4, 5)] == [5, 4]
    assert village.check(verify="p0") == {"p0": (4, 5)}
    assert turns(house) == [(1, True)] * 5


def test_a_guard_that_was_restarted_begins_its_noise_anew_and_draws_nobody_within_a_cycle(village, told):
    """Two guards, of which one is restarted after a round of the second cycle."""
    for name, wide in settled(village, 2, records=200).houses.items():
        guard = wide.open(stream=SeededStream(1))
        for number in range(1, 8):
            if number == 5 and name == "p1":
                wide.stop()
                guard = wide.open(stream=SeededStream(2))
            assert told(guard.answer(village.question(number, invitation=LOCAL)), wide)["round"] == number
            begun = next(iter(guard._ledger._books.memories._begun.values()))
            if name == "p1" and number in (5, 6):
                assert begun.mechanism._history._turn == number - 1
                assert len(begun.mechanism._history._kept) == min(BANDS - 1, number - 4)
                assert not begun.sampler._memory._members  # the cycle is not its own: nobody is drawn
        assert begun.sampler._memory._members  # turn 6 begins a cycle
    assert village.check() == {"p0": (7, 7), "p1": (7, 7)}


def test_a_repeated_round_gets_the_kept_answer_and_changes_no_later_noise(village, house, told):
    guard = house.open(stream=SeededStream(3))

    def ask(number):
        return told(guard.answer(village.question(number, invitation=LOCAL)), house)["value"]

    once = {number: ask(number) for number in (1, 2, 3, 4)}
    house.stop()
    for path in (house.ledger, house.log, house.ledger.with_name("my.ledger.head")):
        path.unlink()
    guard, twice = house.open(stream=SeededStream(3)), {}
    for number in (1, 1, 2, 1, 2, 3, 3, 4, 2):
        said = ask(number)
        np.testing.assert_array_equal(twice.setdefault(number, said), said)
    for number, value in once.items():
        np.testing.assert_array_equal(twice[number], value)
    assert village.check() == {"p0": (4, 4)}


def test_rounds_out_of_order_are_refused_before_a_charge(village, house, told):
    guard = house.open()
    assert told(guard.answer(village.question(1, invitation=LOCAL)), house)["left"] == TURNS - 1
    assert told(guard.answer(village.question(5, invitation=LOCAL)), house)["left"] == TURNS - 2
    for number in (2, 4):
        assert told(guard.answer(village.question(number, invitation=LOCAL)), house) is Reason.STALE
    # rounds that a guard missed took no turn of its own noise
    assert told(guard.answer(village.question(6, invitation=LOCAL)), house)["left"] == TURNS - 3
    assert village.check() == {"p0": (3, 3)}
    assert turns(house) == [(1, True)] * 3


OTHERS = {
    "other bands": replace(LOCAL, bands=2),
    "another exponent": replace(LOCAL, exponent=0.7),
    "independent noise on the same draws": replace(LOCAL, bands=1),
    "Poisson samples": replace(LOCAL, bands=1, draw=ft.Poisson(0.5), noise_multiplier=30.0),
    "a longer plan": replace(LOCAL, rounds=2 * TURNS),
    "more noise": replace(LOCAL, noise_multiplier=50.0),
    "everybody": Invitation(1.0, rounds=5),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_second_plan_is_refused_before_a_charge(other, village, house, told):
    guard = house.open()
    assert told(guard.answer(village.question(1, invitation=LOCAL)), house)["left"] == TURNS - 1
    assert told(guard.answer(village.question(2, invitation=OTHERS[other])), house) is Reason.PROMISED
    proposal = village.question(2, invitation=OTHERS[other], run="run-2")
    assert told(guard.answer(proposal), house) is Reason.PROMISED
    assert told(guard.answer(village.question(2, invitation=LOCAL)), house)["left"] == TURNS - 2
    assert village.check() == {"p0": (2, 2)}


@pytest.mark.parametrize("other", ["everybody", "Poisson samples"])
def test_a_plan_after_other_rounds_is_refused_before_a_charge(other, village, house, told):
    guard = house.open()
    assert told(guard.answer(village.question(1, invitation=OTHERS[other])), house)["left"] > 0
    assert told(guard.answer(village.question(2, invitation=LOCAL)), house) is Reason.PROMISED
    assert village.check() == {"p0": (1, 1)}


def test_a_menu_that_prices_a_chance_pays_for_no_plan(village, told):
    """A chance costs what the menu's Poisson sample does; its rounds are a plan all the same, and refused."""
    house = village.settle(1, epsilon=3.0).houses["p0"]
    draws = '"exactly:1", "cyclic:0.25:2"]\nbands = 2'
    menu = '\n[[menu]]\ndraw = "poisson:0.5"\nnoise = 5.0\n'
    house.policy.write_text(house.policy.read_text().replace('"exactly:1"]', draws) + menu)
    guard, chances = house.open(), {"noise_multiplier": 5.0, "rounds": 4}
    plan = Invitation(1.0, ft.Cyclic(0.25, 2), bands=2, **chances)
    assert told(guard.answer(village.question(1, invitation=plan)), house) is Reason.PROMISED
    sample = Invitation(1.0, ft.Poisson(0.5), **chances)
    assert told(guard.answer(village.question(1, invitation=sample)), house)["left"] > 0
    assert village.check() == {"p0": (1, 1)}


def test_what_a_policy_does_not_allow(village, told):
    house = village.settle(1).houses["p0"]
    cyclic = ft.Cyclic(0.3, BANDS)
    assert told(house.open().answer(village.question(invitation=LOCAL)), house) is Reason.SAMPLER
    house.stop()
    text = house.policy.read_text()
    house.policy.write_text(text.replace('"exactly:1"]', f'"exactly:1", "{forms.draw(cyclic)}"]\nbands = 2'))
    assert told(house.open().answer(village.question(invitation=LOCAL)), house) is Reason.NOISE
    house.stop()
    menu = f'\n[[menu]]\ndraw = "{forms.draw(cyclic)}"\nnoise = 2.0\n'
    house.policy.write_text(house.policy.read_text() + menu)
    with pytest.raises(InvalidValue, match="no price round by round"):
        Policy.load(house.policy)
    assert village.check() == {"p0": (0, 0)}


# --- shares are of the round's turn


def test_a_party_that_misses_a_round_forfeits_its_turn_and_all_shares_stay_of_one(village):
    settled(village, 5, records=50, **DISTRIBUTED)
    guards = {name: house.open() for name, house in village.houses.items()}
    away = set()

    def answer(name):
        def reply(request):
            if name in away:
                raise OSError("it is away")
            return guards[name].answer(request)

        return reply

    given = []
    for guard in guards.values():
        told = guard.released

        def noted(key, answer, terms, told=told):
            given.append((int(key.split("/")[2]), answer.receipt.turn))
            return told(key, answer, terms)

        guard.released = noted
    clients = village.clients(InProcess({name: answer(name) for name in guards}), patience=9)
    clients.invite(SHARES)
    counts = []
    for number in range(1, 6):
        away |= {"p3"} if number in (2, 3) else set()
        away -= {"p3"} if number == 4 else set()
        counts.append(clients.ask(GRADIENT, W).count)
    assert counts == [5, 4, 4, 5, 5]
    assert all(turn == number - 1 for number, turn in given)
    assert len(given) == sum(counts)
    assert turns(village.houses["p3"]) == [(1, True), (2, False), (1, True), (1, True)]
    assert village.check(verify="p3")["p3"] == (3, 3)


def test_a_session_of_a_turn_that_is_over_is_refused_before_a_charge(village, told):
    """Another run begins at round 1 again: shares of a plan are of one turn, so it has none to give."""
    village = settled(village, 3, **DISTRIBUTED)
    guards, house = {name: one.open() for name, one in village.houses.items()}, village.houses["p0"]
    guard = guards["p0"]
    clients = village.clients(InProcess({name: one.answer for name, one in guards.items()}))
    clients.invite(SHARES)
    for _ in range(2):
        assert clients.ask(GRADIENT, W).count == 3
    opening = {"kind": MessageKind.OPENING, "invitation": SHARES, "lies": {"weights": "0" * 64}, "body": b""}
    for number in (1, 2):
        assert told(guard.answer(village.question(number, run="run-2", **opening)), house) is Reason.STALE
    far = village.question(5000, run="run-2", **opening)  # more than the policy's 1,000
    assert told(guard.answer(far), house) is Reason.SPENT
    assert village.check()["p0"] == (2, 2)


def shared_rounds(village, guards, run, rounds):
    """The numbers of parties in some rounds of a run of shares."""
    clients = village.clients(InProcess({name: one.answer for name, one in guards.items()}), run=run)
    clients.invite(SHARES)
    return [clients.ask(GRADIENT, W).count for _ in range(rounds)]


def test_a_second_run_of_shares_goes_on_where_the_plan_stands(village):
    """A pilot, then the run: nothing is charged twice, and all shares of a sum are of one turn."""
    settled(village, 3, records=50, **DISTRIBUTED)
    for house in village.houses.values():
        house.policy.write_text(house.policy.read_text().replace("rounds = 1000", f"rounds = {TURNS}"))
    guards, given = {name: house.open() for name, house in village.houses.items()}, []
    for guard in guards.values():

        def noted(key, answer, terms, told=guard.released):
            given.append((*key.split("/")[1:3], answer.receipt.turn))
            return told(key, answer, terms)

        guard.released = noted
    assert shared_rounds(village, guards, "pilot", 2) == [3, 3]
    assert shared_rounds(village, guards, "run-2", TURNS - 2) == [3] * (TURNS - 2)
    turn = {("pilot", "1"): 0, ("pilot", "2"): 1} | {("run-2", str(n)): n + 1 for n in range(1, TURNS - 1)}
    assert given == [(*about, number) for about, number in turn.items() for _ in guards]
    with pytest.raises(ft.errors.BudgetSpent, match="no party agreed: p0: spent"):
        shared_rounds(village, guards, "run-3", 1)
    assert village.check(verify="p1") == dict.fromkeys(guards, (TURNS, TURNS))


def test_a_resumed_second_run_keeps_its_first_turn(village, tmp_path):
    settled(village, 3, records=50, **DISTRIBUTED)
    guards = {name: house.open() for name, house in village.houses.items()}
    shared_rounds(village, guards, "pilot", 2)
    transport, totals = InProcess({name: one.answer for name, one in guards.items()}), []
    for rounds in (2, 3):
        clients = village.clients(transport, run="run-2", checkpoint=tmp_path / "checkpoint")
        clients.invite(SHARES)
        totals.append([clients.ask(GRADIENT, W).total for _ in range(rounds)])
        clients.close()
    np.testing.assert_array_equal(totals[0], totals[1][:2])
    assert village.check() == dict.fromkeys(guards, (5, 5))


def test_one_party_that_claims_to_be_ahead_makes_nobody_forfeit_turns(village, monkeypatch):
    settled(village, 4, records=50, **DISTRIBUTED)
    guards = {name: house.open() for name, house in village.houses.items()}
    monkeypatch.setattr(guards["p3"], "_taken_turns", lambda terms: TURNS - 1)
    assert shared_rounds(village, guards, "run-1", 1) == [3]  # it refuses what it claims is over
    assert village.check() == dict.fromkeys(("p0", "p1", "p2"), (1, 1)) | {"p3": (0, 0)}


def test_a_share_of_another_turn_than_the_rounds_is_not_released(village, told, monkeypatch):
    """Should the books ever differ from what the guard counted, nothing goes out."""
    settled(village, 3, **DISTRIBUTED)
    monkeypatch.setattr(keeper, "forfeit", lambda *_: None)
    guards = {name: house.open() for name, house in village.houses.items()}
    clients = village.clients(InProcess({name: guard.answer for name, guard in guards.items()}), seconds=2.0)
    clients.invite(SHARES)
    clients._round = 3  # as after three rounds that everybody missed
    with pytest.raises(ft.errors.FarthingError, match="lost too many parties"):
        clients.ask(GRADIENT, W)
    assert {answered for answered, _ in village.check().values()} == {0}


def test_turns_of_rounds_never_overlap_and_turns_of_answers_would():
    """Brute force over who was there: the record's shifts in the noise of another party's shares."""
    column, rounds, chances = np.array(coefficients(BANDS, 0.6)), 9, (0, 3, 6)
    size = float(np.linalg.norm(column))

    def moved(turns):
        rows = np.zeros(rounds + BANDS)
        for turn in turns:
            rows[turn : turn + BANDS] += column
        return float(np.linalg.norm(rows))

    worst = {"rounds": 0.0, "answers": 0.0}
    for there in itertools.product((False, True), repeat=rounds):
        if not all(there[number] for number in chances):
            continue
        own = np.cumsum(there) - 1  # the answers before each
        worst["rounds"] = max(worst["rounds"], moved(chances))
        worst["answers"] = max(worst["answers"], moved([own[number] for number in chances]))
    assert worst["rounds"] == pytest.approx(size * np.sqrt(3))
    assert worst["answers"] > 1.3 * size * np.sqrt(3)


# --- messages


def test_an_invitation_with_bands_goes_there_and_back():
    for one in (LOCAL, SHARES, replace(LOCAL, bands=1, exponent=0.5)):
        assert forms.invitation_of(Fields(forms.invitation(one))) == one
    assert "bands" not in forms.invitation(Invitation(1.0, rounds=5))


@pytest.mark.parametrize(
    "lie",
    [{"bands": 0}, {"bands": 4}, {"bands": 2.5}, {"bands": "3"}, {"bands": True}, {"exponent": 2.0},
     {"exponent": None}, {"draw": "cyclic:0.3"}, {"draw": "cyclic:0.3:9"}, {"draw": "cyclic:nan:3"},
     {"draw": "cyclic:0.3:3:3"}, {"draw": "poisson:0.3"}],
)  # fmt: skip
def test_bent_bands_are_malformed(lie):
    with pytest.raises(Refused, match="malformed"):
        forms.invitation_of(Fields(forms.invitation(LOCAL) | lie))


def test_shares_have_the_lattice_of_their_grid():
    terms = SHARES.terms(ft.Budget(1e3, 1e-6, observer="aggregate"), 20)
    assert isinstance(terms.mechanism, BandedShare)
    hidden = masked(terms, 3, np.zeros(3, np.uint64)).mechanism
    assert hidden.cell == terms.mechanism.grid(terms.bound, 3)[1]
    assert repr(hidden) == repr(terms.mechanism)
    assert hidden.unit_event() == terms.mechanism.unit_event()
