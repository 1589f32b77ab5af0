"""Parties that come, go, return and are late: guards in this process, and time that passes only in a test."""

import re

import numpy as np
import pytest

from farthing.budget import Budget
from farthing.data.tables import Features
from farthing.deploy import coordinator, roster
from farthing.deploy.averages import Averaging
from farthing.deploy.guard import keeper
from farthing.deploy.messages.forms import Floor, RoundId
from farthing.deploy.messages.signed import MessageKind, Signer, message_digest, seal, unseal
from farthing.deploy.roster import State
from farthing.errors import BudgetSpent, FarthingError, InvalidValue, Unsupported
from farthing.federated import Exactly, Invitation, Trust, Weights
from farthing.federated.methods.addp import addp
from farthing.federated.methods.federated_descent import federated_descent
from farthing.federated.methods.sgd1 import sgd1
from farthing.federated.methods.sgd2 import sgd2
from farthing.federated.protocol import least_noise, under
from farthing.federated.renegotiated import descend_changing
from farthing.linear.losses import LinearGradient, logistic
from farthing.linear.problem import Problem
from farthing.queries.samplers import Poisson

GRADIENT = LinearGradient(logistic, Features(2))
W = np.zeros(3)


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Links:
    """Guards of this process, each with a delay in seconds; None: nobody is there.

    A late answer stays on its way, as it does over Flower: the same request, sent again, gets it when due.
    """

    def __init__(self, village, clock, **delays):
        self._guards = {name: house.open() for name, house in village.houses.items()}
        self.clock, self.delays, self.sent = clock, dict.fromkeys(self._guards, 0.1) | delays, []
        self._due, self._signer = {}, village.coordinator.public

    @property
    def parties(self):
        return list(self._guards)

    def exchange(self, requests, seconds):
        until = self.clock.now + seconds
        for name, request in requests.items():
            if self.delays[name] is not None and (name, request) not in self._due:
                self.sent.append((name, unseal(request, {self._signer}, 10**6).kind))
                when, answer = self.clock.now + self.delays[name], self._guards[name].answer(request)
                self._due[name, request] = when, answer
        coming = sorted((self._due[key][0], key) for key in requests.items() if key in self._due)
        for when, (name, request) in coming:
            if when <= until:
                self.clock.now = max(self.clock.now, when)
                yield name, self._due.pop((name, request))[1]
        self.clock.now = until

    def questions(self, name):
        return sum(kind is MessageKind.QUESTION for party, kind in self.sent if party == name)


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    for module in (coordinator, roster):
        monkeypatch.setattr(module, "time", found)
    return found


def crowd(village, clock, parties=3, rounds=20, delays=None, **options):
    """The links, and the invited clients over them."""
    links = Links(village.settle(parties), clock, **(delays or {}))
    clients = village.clients(links, **{"seconds": 10.0} | options)
    clients.invite(Invitation(1.0, rounds=rounds))
    return links, clients


def counts(clients, rounds):
    return [clients.ask(GRADIENT, W).count for _ in range(rounds)]


def states(clients):
    return [str(party.state) for party in clients.status().parties]


def test_a_party_that_was_away_for_many_rounds_returns_at_no_charge(village, clock):
    links, clients = crowd(village, clock)
    assert counts(clients, 1) == [3]
    links.delays["p1"] = None
    began = clock.now
    assert counts(clients, 6) == [2] * 6
    assert clock.now - began < 3 * 10.5 + 3 * 0.5  # after three rounds nobody waits for it
    assert states(clients) == ["here", "away", "here"]
    links.delays["p1"] = 0.05
    assert counts(clients, 3) == [2, 3, 3]  # it replies to a greeting, and is asked in the next round
    assert states(clients) == ["here"] * 3
    assert village.check(verify="p1") == {"p0": (10, 10), "p1": (3, 3), "p2": (10, 10)}


def test_who_is_missing_is_named_with_the_reason_and_what_to_do(village, clock, caplog):
    """A guard that knows another coordinator, one over other data, one whose key was exchanged."""
    village.settle(4)
    p1, p2 = (village.houses[name].policy for name in ("p1", "p2"))
    p1.write_text(p1.read_text().replace(village.coordinator.public.hex(), "ab" * 32))
    p2.write_text(p2.read_text().replace('dataset = "d"', 'dataset = "e"'))
    links = Links(village, clock)
    enrolled = village.enrolled | {"p3": Signer.new().public}
    with pytest.raises(FarthingError) as error:
        coordinator.Remote(links, village.coordinator, enrolled, run="run-1", dataset="d", seconds=10.0)
    missing = "missing: p1 (no answer), p2 (refused, dataset), p3 (no answer)"
    assert str(error.value) == f"1 of 4 parties have connected, 4 are needed; {missing}"
    assert f"its policy must list {village.coordinator.public.hex()}" in caplog.text
    assert "its guard.key is not that of its public.toml here" in caplog.text


def test_the_words_of_a_refusal_are_logged_without_what_a_terminal_would_act_on(village, clock, caplog):
    village.settle(2)
    policy = village.houses["p1"].policy
    policy.write_text(policy.read_text().replace("noise = 0.5", "noise = 1000.0"))
    links = Links(village, clock)
    clients = village.clients(links)
    clients.invite(Invitation(1.0, rounds=5))
    assert "p1 refused: noise: the noise multiplier must be at least 1000" in caplog.text
    links._guards["p1"].answer = lambda request: seal(
        MessageKind.REFUSAL,
        {"about": message_digest(request), "reason": "noise", "text": "\x1b[2Jgone\n" + "x" * 999},
        b"",
        village.houses["p1"].signer,
    )
    clients.invite(Invitation(1.0, rounds=4))
    assert "[2Jgonexxx" in caplog.text
    assert "\x1b" not in caplog.text
    assert "x" * 200 not in caplog.text


def test_who_refuses_a_greeting_is_not_greeted_four_times_a_second(village, clock):
    village.settle(2)
    policy = village.houses["p1"].policy
    policy.write_text(policy.read_text().replace('dataset = "d"', 'dataset = "e"'))
    links = Links(village, clock)
    with pytest.raises(FarthingError, match=r"p1 \(refused, dataset\)"):
        village.clients(links, seconds=30.0)
    assert sum(name == "p1" for name, _ in links.sent) < 12


def test_a_party_that_comes_after_the_run_began_gets_in(village, clock, tmp_path):
    links, clients = crowd(village, clock, delays={"p0": None}, least=2, checkpoint=tmp_path / "c")
    assert clients.names == ["p1", "p2"]
    assert counts(clients, 2) == [2, 2]
    links.delays["p0"] = 0.05
    assert counts(clients, 3) == [2, 3, 3]
    assert clients.names == ["p1", "p2", "p0"]
    assert clients.left.tolist() == [15, 15, 18]
    assert (clients.records.tolist(), clients.terms(2).rounds) == ([21, 22, 20], 20)
    assert village.check() == {"p0": (2, 2), "p1": (5, 5), "p2": (5, 5)}
    clients.close()
    links.delays = dict.fromkeys(links.delays)  # nobody needs to be asked
    again = village.clients(links, seconds=10.0, least=2, checkpoint=tmp_path / "c")
    again.invite(Invitation(1.0, rounds=20))
    assert counts(again, 5) == [2, 2, 2, 3, 3]
    assert (again.names, again.left.tolist()) == (clients.names, clients.left.tolist())


def test_a_run_waits_for_parties_that_are_all_away_and_says_so_when_it_gives_up(village, clock):
    links, clients = crowd(village, clock, parties=2, patience=1)
    links.delays["p0"] = None
    assert counts(clients, 1) == [1]
    links.delays |= {"p1": None}
    with pytest.raises(FarthingError, match="no party answered"):
        clients.ask(GRADIENT, W)
    assert states(clients) == ["away", "away"]
    with pytest.raises(FarthingError, match="resume when others are back") as error:
        clients.ask(GRADIENT, W)
    assert not isinstance(error.value, BudgetSpent)
    links.delays["p0"] = 5.0
    assert counts(clients, 1) == [1]
    assert states(clients) == ["here", "away"]


def test_a_party_of_another_observer_does_not_join(village, clock):
    house = village.settle(3).houses["p2"]
    other = 'delta = 1e-6\nadjacency = "zero-out"\nobserver = "coordinator"'
    house.policy.write_text(house.policy.read_text().replace("delta = 1e-6", other))
    links = Links(village, clock, p2=None)
    clients = village.clients(links, seconds=10.0, least=2)
    clients.invite(Invitation(1.0, rounds=20))
    links.delays["p2"] = 0.05
    assert counts(clients, 3) == [2, 2, 2]
    assert clients.names == ["p0", "p1"]
    assert village.check()["p2"] == (0, 0)


def test_a_key_is_renewed_and_another_revoked_in_a_run_that_goes_on(village, clock, tmp_path):
    links, clients = crowd(village, clock, checkpoint=tmp_path / "c")
    assert counts(clients, 2) == [3, 3]
    clients.close()
    house = village.houses["p0"]  # whose ledger stays what it is
    house.stop()
    house.signer = Signer.new()
    (house.folder / "key").unlink()
    house.signer.save(house.folder / "key")
    links._guards["p0"] = house.open()
    enrolled = {name: key for name, key in village.enrolled.items() if name != "p1"}
    options = {"run": "run-1", "dataset": "d", "seconds": 10.0, "checkpoint": tmp_path / "c"}
    again = coordinator.Remote(links, village.coordinator, enrolled, **options)
    village.remotes.append(again)
    again.invite(Invitation(1.0, rounds=20))
    assert counts(again, 4) == [3, 3, 2, 2]  # two from the checkpoint
    assert states(again) == ["here", "revoked", "here"]
    assert village.check(verify="p0") == {"p0": (4, 4), "p1": (2, 2), "p2": (4, 4)}


def stating(monkeypatch, house, lie):
    """Let a party announce something else than its policy says."""
    seal = keeper.seal

    def lying(kind, header, body, signer):
        if kind is MessageKind.ANNOUNCEMENT and signer.public == house.signer.public:
            told = {"budget": header["budget"] | lie["budget"]} if "budget" in lie else {}
            header = header | lie | told
        return seal(kind, header, body, signer)

    monkeypatch.setattr(keeper, "seal", lying)


@pytest.mark.parametrize(
    "lie",
    [
        {"budget": {"epsilon": 1e-9, "delta": 1e-12}},
        {"budget": {"epsilon": 1e300, "delta": 0.999}},
        {"budget": {"delta": 0.5}},
        {"budget": {"unit": "party"}},
        {"records": 0},
        {"records": 2**31},
        {"colluding": -1},
    ],
)
def test_what_one_party_states_does_not_stop_the_others(lie, village, clock, monkeypatch):
    """A budget without terms, or one that takes minutes to price, whether it comes first or later."""
    stating(monkeypatch, village.settle(3).houses["p2"], lie)
    for late in (False, True):
        links = Links(village, clock, **({"p2": None} if late else {}))
        clients = village.clients(links, seconds=10.0, least=2, run=f"run-{late}")
        clients.invite(Invitation(1.0, Poisson(0.5), rounds=20))
        links.delays["p2"] = 0.05
        assert counts(clients, 2) == [2, 2]
        assert clients.names == ["p0", "p1"]
        village.stop()
    assert village.check() == {"p0": (4, 4), "p1": (4, 4), "p2": (0, 0)}


@pytest.mark.parametrize("method", [addp, federated_descent, sgd2])
@pytest.mark.parametrize("lie", [{"observer": "coordinator"}, {"delta": 0.0}, {"epsilon": 1e-300}])
def test_methods_forecast_without_the_parties_that_have_no_terms(lie, method, village, clock, monkeypatch):
    stating(monkeypatch, village.settle(3).houses["p2"], {"budget": lie})
    clients = village.clients(Links(village, clock), seconds=2.0)
    next(method(clients, Problem(logistic, 63, 2, unit=False)))
    here = {party.name for party in clients.status().parties if party.state is State.HERE}
    assert here >= {"p0", "p1"}
    assert {name: counts[0] for name, counts in village.check().items()} == {
        name: int(name in here) for name in village.houses
    }


def test_a_party_that_states_more_records_than_any_sum_holds_does_not_stop_a_secure_sum(
    village, clock, monkeypatch
):
    """Words of 64 bits are sized for all records that are stated."""
    village.settle(4, limits='trust = "distributed"\ncolluding = 0', epsilon=1e3)
    stating(monkeypatch, village.houses["p2"], {"records": 2**45})
    clients = village.clients(Links(village, clock), least=2)
    clients.invite(Invitation(1.0, rounds=5, noise_multiplier=0.5, trust="distributed", survivors=2))
    assert counts(clients, 1) == [3]
    assert clients.names == ["p0", "p1", "p3"]


@pytest.mark.parametrize(
    ("lie", "averaging"),
    [
        ({"records": 2**29}, Averaging(records=25)),
        ({"budget": {"epsilon": 900.0, "delta": 0.09}}, Averaging(epsilon=1.0)),
        ({"records": 2**29, "budget": {"epsilon": 900.0}}, Averaging(records=25, epsilon=1.0)),
        ({"records": 2**29, "budget": {"epsilon": 900.0, "delta": 0.09}}, Averaging(mean="trimmed")),
        ({"records": 2**29, "budget": {"epsilon": 900.0, "delta": 0.09}}, Averaging(mean="median")),
    ],
)
@pytest.mark.parametrize("weights", [Weights.PRECISION, Weights.PLAIN])
def test_steps_follow_from_no_statement_beyond_the_caps(lie, averaging, weights, village, clock, monkeypatch):
    """Methods choose steps by the forecast; one party that states much must not set everybody's."""
    invitation = Invitation(1.0, rounds=10)
    if weights is Weights.PLAIN:  # A-DDP's own settings, with which larger budgets have more rounds
        invitation = Invitation(1.0, Exactly(1), 10, calibration="advanced", accountant="sampling")
    village.settle(5)
    honest = village.clients(Links(village, clock), averaging=averaging, run="honest")
    before = honest.forecast(invitation, weights)
    village.stop()
    stating(monkeypatch, village.houses["p2"], lie)
    found = village.clients(Links(village, clock), averaging=averaging).forecast(invitation, weights)
    assert 0.8 * before.rounds <= found.rounds <= 1.6 * before.rounds
    assert 0.8 * before.deviation <= found.deviation <= 1.25 * before.deviation


def test_a_party_that_wants_safety_against_all_others_does_not_stop_them(village, clock):
    limits = 'trust = "distributed"\ncolluding = 0\n'
    house = village.settle(4, limits=limits).houses["p3"]
    house.policy.write_text(house.policy.read_text().replace("colluding = 0", "colluding = 3"))
    clients = village.clients(Links(village, clock), seconds=10.0)
    clients.invite(Invitation(1.0, rounds=5, noise_multiplier=20.0, trust="distributed", survivors=3))
    assert counts(clients, 2) == [3, 3]


def test_replies_that_come_twice_out_of_order_or_from_other_rounds_count_once(village, clock):
    """Every reply of every exchange so far comes again with each exchange, the newest first."""
    links, clients = crowd(village, clock)
    plain, old = links.exchange, []

    def exchange(requests, seconds):
        came = list(plain(requests, seconds))
        others = [("p1", answer) for name, answer in came if name == "p0"]
        old.extend(came)
        yield from [*others, *reversed(old), *came]

    links.exchange = exchange
    totals = [clients.ask(GRADIENT, W) for _ in range(4)]
    assert [got.count for got in totals] == [3] * 4
    assert len({got.total[0] for got in totals}) == 4
    assert states(clients) == ["here"] * 3
    assert set(village.check().values()) == {(4, 4)}


def test_a_turn_passes_where_its_party_is_away_and_a_resumed_run_passes_it_again(village, clock, tmp_path):
    """Nobody else is asked in its place: nobody's budget pays for more turns than were planned.

    The coordinator's noise stands in for the answer: nobody else sees which turns passed.
    """
    village.settle(3, records=3, budget='adjacency = "replace-one"')
    problem = Problem(logistic, 12, 2, unit=False)
    links = Links(village, clock)
    clients = village.clients(links, seconds=10.0, patience=1, checkpoint=tmp_path / "c")
    turns, taken = [], clients.ask_one
    clients.ask_one = lambda party, *rest: turns.append((party, taken(party, *rest))) or turns[-1][1]
    steps = sgd1(clients, problem, exact=True)
    next(steps)
    links.delays["p0"] = None
    while all(got.count for _, got in turns):  # each turn is its with a chance of 1/4; there are 144
        next(steps)
    links.delays["p0"] = 0.1
    last = [next(steps) for _ in range(2)][-1]
    passed = [party for party, got in turns if not got.count]
    assert set(passed) == {0}
    for _, got in turns:  # of a passed turn: noise, within 9 deviations
        assert 0 < np.abs(got.mean).max() < 1.0 + 9 * got.variance**0.5
    assert states(clients) == ["here"] * 3
    assert sum(logged for logged, _ in village.check().values()) == last.t - len(passed)
    clients.close()
    links.delays = dict.fromkeys(links.delays)
    again = village.clients(links, seconds=10.0, patience=1, checkpoint=tmp_path / "c")
    steps = sgd1(again, problem, exact=True)
    np.testing.assert_array_equal([next(steps) for _ in range(last.t // 12)][-1].w[0], last.w[0])


# --- the pace


def test_the_slowest_does_not_set_the_pace(village, clock):
    _, clients = crowd(village, clock, parties=5, delays={"p4": 8.0}, quorum=0.8, deadline=1.0, patience=9)
    began = clock.now
    assert counts(clients, 4) == [4] * 4
    assert clock.now - began < 4 * 1.5
    assert village.check()["p4"] == (4, 4)  # charged, and dropped


def test_everybody_who_is_quick_counts_even_above_the_quorum(village, clock):
    _, clients = crowd(village, clock, parties=4, delays={"p3": 0.9}, quorum=0.5, deadline=1.0)
    assert counts(clients, 2) == [4, 4]


def test_without_a_quorum_a_round_waits_until_its_time_is_up(village, clock):
    _, clients = crowd(village, clock, delays={"p1": 6.0, "p2": 5.0}, quorum=1.0, deadline=1.0)
    began = clock.now
    assert counts(clients, 1) == [3]
    assert clock.now - began >= 6.0


def test_late_answers_count_less_where_the_job_says_so(village, clock):
    links, clients = crowd(
        village,
        clock,
        delays={"p2": 1.7},
        quorum=0.6,
        deadline=1.0,
        averaging=Averaging(staleness=2),
    )
    late = [clients.ask(GRADIENT, np.array([0.1 * t, 0.0, 0.0])) for t in range(6)]
    assert [answers.count for answers in late] == [2, 3, 2, 3, 2, 3]
    fresh, with_late = late[0], late[1]
    share = 22 / np.sqrt(2.0)  # p2 has 22 records, and is a round late; weights are by precision
    terms = [clients.terms(place) for place in range(3)]
    weights = [term.expected / term.variance for term in terms]
    assert fresh.divisor == pytest.approx(weights[0] * 20 + weights[1] * 21)
    assert with_late.divisor == pytest.approx(fresh.divisor + weights[2] * share)
    assert clients.status().parties[2].stale == 1
    assert links.questions("p2") == 3  # one question in two rounds, and each answer is used
    assert village.check() == {"p0": (6, 6), "p1": (6, 6), "p2": (3, 3)}


def test_an_answer_that_is_too_late_is_dropped_and_its_party_asked_anew(village, clock):
    links, clients = crowd(
        village,
        clock,
        delays={"p2": 9.0},
        quorum=0.6,
        deadline=1.0,
        patience=9,
        averaging=Averaging(staleness=1),
    )
    assert counts(clients, 4) == [2] * 4
    assert links.questions("p2") == 2
    assert village.check()["p2"] == (2, 2)


def test_a_resumed_coordinator_still_waits_for_what_it_is_owed(village, clock, tmp_path):
    options = {
        "quorum": 0.6,
        "deadline": 1.0,
        "averaging": Averaging(staleness=2),
        "checkpoint": tmp_path / "c",
    }
    links, clients = crowd(village, clock, delays={"p2": 1.7}, **options)
    assert clients.ask(GRADIENT, W).count == 2
    clients.close()
    again = village.clients(links, seconds=10.0, **options)
    again.invite(Invitation(1.0, rounds=20))
    assert again.ask(GRADIENT, W).count == 2  # from the checkpoint
    assert again.ask(GRADIENT, W).count == 3
    assert links.questions("p2") == 1
    assert village.check()["p2"] == (1, 1)


@pytest.mark.parametrize(
    "options", [{"quorum": 0.0}, {"quorum": 1.1}, {"deadline": 0.0}, {"deadline": float("nan")}]
)
def test_what_a_pace_must_be(options, village, clock):
    with pytest.raises(InvalidValue, match=next(iter(options))):
        crowd(village, clock, **options)


def test_distributed_noise_shows_no_single_upload_to_average(village, clock):
    village.settle(3, limits='trust = "distributed"\ncolluding = 1', epsilon=1e3)
    clients = village.clients(Links(village, clock), averaging=Averaging(mean="median"))
    with pytest.raises(Unsupported, match="local trust"):
        clients.invite(Invitation(1.0, rounds=5, noise_multiplier=0.5, trust="distributed", survivors=2))


# --- a floor under budgets


@pytest.mark.parametrize("least", [None, 2])
@pytest.mark.parametrize("line", ["epsilon = 0.0001", "delta = 1e-40"])
def test_who_is_below_the_floor_is_left_out_and_told_so_and_sets_nobodys_noise(
    line, least, village, clock, caplog
):
    village.settle(3, limits='trust = "distributed"\ncolluding = 0', budget='observer = "aggregate"')
    policy = village.houses["p1"].policy
    policy.write_text(re.sub(rf"{line.partition(' ')[0]} = .*", line, policy.read_text(), count=1))
    clients = village.clients(Links(village, clock), least=least, floor=Floor(0.1, 1e-9))
    assert list(clients.names) == ["p0", "p2"]
    (left,) = clients.status().left_out
    assert (left.name, left.state, "below the floor" in left.reason) == ("p1", State.REFUSED, True)
    said = [record.getMessage() for record in caplog.records]
    assert sum("takes no budget below" in text for text in said) == 1  # by its own guard
    assert sum("p1 is left out" in text for text in said) == 1
    invitation = under(clients, Invitation(1.0, rounds=5), Trust.DISTRIBUTED)
    assert invitation.noise_multiplier == least_noise(
        Invitation(1.0, rounds=5), Budget(1.0, 1e-6, observer="aggregate"), 20
    )
    clients.invite(invitation)
    assert clients.ask(GRADIENT, W).count == invitation.survivors == 2


def test_who_comes_back_with_a_budget_above_the_floor_joins_a_run_that_goes_on(village, clock):
    village.settle(3)
    house = village.houses["p1"]
    text = house.policy.read_text()
    house.policy.write_text(text.replace("epsilon = 1.0", "epsilon = 0.01"))
    links = Links(village, clock)
    clients = village.clients(links, seconds=10.0, floor=Floor(0.1, 1e-9))
    clients.invite(Invitation(1.0, rounds=20))
    assert counts(clients, 1) == [2]
    assert [one.name for one in clients.status().left_out] == ["p1"]
    house.stop()
    house.policy.write_text(text.replace("my.ledger", "new.ledger"))
    links._guards["p1"] = house.open()
    assert counts(clients, 3)[-1] == 3
    assert clients.status().left_out == ()


def test_a_floor_that_is_none_is_refused(village, told):
    house = village.settle(1).houses["p0"]
    guard = house.open()
    for floor in ({"epsilon": 0.0, "delta": 0.1}, {"epsilon": 1.0, "delta": 2.0}, {"epsilon": 1.0}, [1, 0.1]):
        header = RoundId("run-1", 0, "0" * 32).header() | {"dataset": "d", "floor": floor}
        data = seal(MessageKind.HELLO, header, b"", village.coordinator)
        assert told(guard.answer(data), house) == "malformed"


# --- terms that change


def test_terms_change_on_the_way_and_every_guard_prices_them_under_one_ledger(village, clock):
    _, clients = crowd(village, clock)
    assert counts(clients, 5) == [3] * 5
    clients.invite(Invitation(1.0, rounds=4))  # a quarter is spent: three of four rounds are left
    assert clients.left.tolist() == [3, 3, 3]
    assert counts(clients, 3) == [3, 3, 3]
    assert states(clients) == ["spent"] * 3
    with pytest.raises(BudgetSpent):
        clients.ask(GRADIENT, W)
    with pytest.raises(BudgetSpent, match="no party agreed"):
        clients.invite(Invitation(1.0, Poisson(0.5), 4))  # which no filter of theirs prices
    assert village.check(verify="p0") == dict.fromkeys(village.houses, (8, 8))


def test_terms_that_follow_from_the_rounds_train_over_guards(village, clock):
    """Rough rounds first, then exact ones until the budget is spent: by each guard's own ledger."""
    links = Links(village.settle(2), clock)
    clients = village.clients(links, seconds=10.0)

    def rough_then_exact(t, w):
        return Invitation(1.0, noise_multiplier=40.0 if t <= 3 else 10.0)

    steps = list(descend_changing(clients, Problem(logistic, 41, 2, unit=False), rough_then_exact))
    assert states(clients) == ["spent", "spent"]
    # μ² of the budget is 0.0560 (ε = 1, δ = 1e-6): 3/40² of it, then as often as 1/10² fits
    assert len(steps) == 3 + 5
    assert village.check(verify="p0") == {"p0": (8, 8), "p1": (8, 8)}


def test_a_party_that_refused_may_accept_other_terms(village, clock):
    village.settle(2)
    house = village.houses["p1"]
    house.policy.write_text(house.policy.read_text().replace("clip = 3.0", "clip = 0.5"))
    clients = village.clients(Links(village, clock), seconds=10.0)
    clients.invite(Invitation(1.0, rounds=4))
    assert states(clients) == ["here", "refused"]
    assert counts(clients, 1) == [1]
    clients.invite(Invitation(0.5, rounds=4))
    assert counts(clients, 1) == [2]
    assert village.check() == {"p0": (2, 2), "p1": (1, 1)}


def test_changed_terms_resume_as_they_were(village, clock, tmp_path):
    links, clients = crowd(village, clock, checkpoint=tmp_path / "c")
    counts(clients, 2)
    clients.invite(Invitation(1.0, rounds=10))
    last = clients.ask(GRADIENT, W)
    clients.close()
    links.delays = dict.fromkeys(links.delays)
    again = village.clients(links, checkpoint=tmp_path / "c", seconds=10.0)
    again.invite(Invitation(1.0, rounds=20))
    counts(again, 2)
    again.invite(Invitation(1.0, rounds=10))
    np.testing.assert_array_equal(again.ask(GRADIENT, W).total, last.total)


def test_state_survives_a_snapshot(village, clock):
    _, clients = crowd(village, clock)
    party = clients._members[0]
    party.owes, party.stale, party.broke, party.state = 7, 2, True, State.AWAY
    said = party.snapshot()
    other = clients._members[1]
    other.restore(said)
    assert other.snapshot() == said
