"""Evaluation at guards: charged like a round where the policy allows it, refused at no charge where not."""

import numpy as np
import pytest

from farthing.deploy.messages.signed import Reason
from farthing.errors import Unsupported
from farthing.federated import Invitation, evaluate_clients
from farthing.federated.evaluation import Evaluated
from farthing.linear.losses import logistic
from farthing.linear.problem import Problem

PROBLEM = Problem(logistic, 63, 2, unit=False)
W = np.array([3.0, -3.0]), np.array(0.1)
ALLOWED = "evaluation = true"
TERMS = Invitation(1.0, rounds=6, noise_multiplier=0.6)


def of_records(village):
    """Accuracy on the records of all parties, without privacy."""
    hits = []
    for house in village.houses.values():
        with np.load(house.folder / "records.npz") as held:
            hits.append((held["X"] @ W[0] + W[1] > 0) == (held["y"] > 0.5))
    return np.concatenate(hits).mean()


def test_parties_that_allow_it_answer_and_the_others_stay_in_the_run(village, tmp_path):
    village.settle(3, limits=ALLOWED, epsilon=900.0)
    house = village.houses["p1"]
    house.policy.write_text(house.policy.read_text().replace(ALLOWED, ""))
    guards = village.functions()
    clients = village.clients(guards, checkpoint=tmp_path / "c")
    clients.invite(TERMS)
    first = evaluate_clients(clients, PROBLEM, W)
    assert first.clients == 2
    assert [str(party.state) for party in clients.status().parties] == ["here"] * 3
    second = evaluate_clients(clients, PROBLEM, W)
    assert (second.clients, second != first) == (2, True)
    assert village.check() == {"p0": (2, 2), "p1": (0, 0), "p2": (2, 2)}
    clients.close()
    again = village.clients(guards, checkpoint=tmp_path / "c")
    again.invite(TERMS)
    assert [evaluate_clients(again, PROBLEM, W) for _ in range(2)] == [first, second]


def test_it_is_right_but_for_its_noise(village):
    village.settle(3, limits=ALLOWED, epsilon=900.0)
    clients = village.clients(village.functions())
    clients.invite(TERMS)
    found = evaluate_clients(clients, PROBLEM, W)
    assert found.deviation == pytest.approx(0.6 * np.sqrt(2 / 3) / 21, rel=0.01)
    assert found.accuracy == pytest.approx(of_records(village), abs=7 * found.deviation)


def test_it_is_promised_with_the_rounds_where_draws_are_sampled(village):
    from farthing.queries.samplers import Poisson

    village.settle(2, limits=ALLOWED)
    clients = village.clients(village.functions())
    clients.invite(Invitation(1.0, Poisson(0.5), rounds=5))
    evaluate_clients(clients, PROBLEM, W)
    assert clients.left.tolist() == [4, 4]
    assert set(village.check(verify="p0").values()) == {(1, 1)}


def test_under_secure_aggregation_only_the_sum_is_seen(village):
    village.settle(3, limits=f'trust = "distributed"\n{ALLOWED}', epsilon=900.0)
    clients = village.clients(village.functions())
    terms = Invitation(1.0, rounds=4, noise_multiplier=0.6, trust="distributed", survivors=3)
    clients.invite(terms)
    found = evaluate_clients(clients, PROBLEM, W)
    assert found.clients == 3
    assert found.accuracy == pytest.approx(of_records(village), abs=7 * found.deviation)
    assert set(village.check().values()) == {(1, 1)}


def test_nobody_allows_it(village, tmp_path):
    from farthing.data.tables import Features
    from farthing.linear.losses import LinearGradient

    village.settle(2)
    guards = village.functions()
    clients = village.clients(guards, checkpoint=tmp_path / "c")
    clients.invite(Invitation(1.0, rounds=5))
    for _ in range(4):  # more often than patience lasts
        with pytest.raises(Unsupported, match="evaluation = true"):
            evaluate_clients(clients, PROBLEM, W)
    first = clients.ask(LinearGradient(logistic, Features(2)), np.zeros(3))
    assert (first.count, set(village.check().values())) == (2, {(1, 1)})
    clients.close()
    again = village.clients(guards, checkpoint=tmp_path / "c")
    again.invite(Invitation(1.0, rounds=5))
    for _ in range(4):
        with pytest.raises(Unsupported):
            evaluate_clients(again, PROBLEM, W)
    np.testing.assert_array_equal(
        again.ask(LinearGradient(logistic, Features(2)), np.zeros(3)).total, first.total
    )


def test_a_network_is_evaluated_by_its_party(installed, told, books):
    asked = installed().settle(1, limits=ALLOWED, epsilon=900.0)
    house = asked.village.houses["p0"]
    guard = house.open()
    lies = {"kind": "evaluation", "cap": 2.0, "clip": 1.0}
    reply = told(guard.answer(asked.question(lies=lies, invitation=TERMS)), house)
    assert (len(reply["body"]), reply["round"]) == (8, 1)
    for bad in ({"cap": 0.0}, {"cap": -1.0}, {"clip": 1e9}, {"cap": "1"}, {"steps": 2}):
        worse = asked.question(2, lies=lies | bad, invitation=TERMS)
        assert told(guard.answer(worse), house) is Reason.MALFORMED
    assert books(house) == (1, 1)


def test_a_policy_that_does_not_speak_of_it_allows_none(installed, told, books):
    asked = installed().settle(1)
    house = asked.village.houses["p0"]
    lies = {"kind": "evaluation", "cap": 2.0, "clip": 1.0}
    reply = told(house.open().answer(asked.question(lies=lies)), house)
    assert (reply, books(house)) == (Reason.EVALUATION, (0, 0))


def test_a_result_reads_well():
    assert str(Evaluated(0.5, 0.75, 0.01, 2)) == "accuracy 75.0 % ± 1.0 %, loss 0.5, of 2 clients"
