"""Simulated clients spend as real ledgers do: the same charges, refusals and ends."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import farthing as ft
from farthing.data.tables import Features, Table
from farthing.errors import BudgetSpent, FarthingError, InvalidValue
from farthing.federated import ClientAgent, Exactly, Invitation, Parties, Simulated, Trust
from farthing.ledger.books import taken
from farthing.linear.losses import LinearGradient, logistic
from farthing.queries.events import decode
from farthing.queries.samplers import Everyone, Poisson

GRADIENT, ZEROS = LinearGradient(logistic, Features(2)), np.zeros(3)
RNG = np.random.default_rng(5)
X, Y = RNG.normal(size=(40, 2)), RNG.integers(0, 2, 40) * 1.0

BUDGETS = st.builds(
    ft.Budget,
    st.sampled_from([3.0, 1.0, 0.05]),
    st.sampled_from([1e-3, 1e-6]),
    st.sampled_from(ft.Adjacency),
    st.sampled_from([ft.Unit.RECORD, ft.Unit.RECORD, ft.Unit.USER]),
)
CLIENTS = st.lists(st.tuples(BUDGETS, st.integers(1, 8)), min_size=1, max_size=4)
INVITATIONS = st.builds(
    Invitation,
    st.sampled_from([0.5, 2.0]),
    st.sampled_from([Everyone(), Poisson(0.2), Exactly(1), Exactly(3)]),
    st.integers(1, 6),
    st.sampled_from([9.0, 30.0]),
    calibration=st.sampled_from(["basic", "advanced", "tight"]),
    accountant=st.sampled_from(["basic", "advanced", "amplified", "sampling", "tight"]),
    trust=st.sampled_from([Trust.LOCAL, Trust.LOCAL, Trust.DISTRIBUTED]),
    survivors=st.integers(1, 3),
)
# a round of all, a round of one of them, or a mistake that must cost nothing
PLAYS = st.lists(st.sampled_from(["all", "all", "mistake", 0, 1, 2]), min_size=4, max_size=12)


def played(clients, play):
    """What comes of one play: the kind of refusal, or who came and who is left."""
    try:
        if play == "mistake":
            clients.ask(GRADIENT, np.full(3, np.nan))
        elif play == "all":
            found = clients.ask(GRADIENT, ZEROS)
        else:
            found = clients.ask_one(play, GRADIENT, ZEROS)
    except FarthingError as error:
        return "refused" if play == "mistake" else type(error), clients.left.tolist()
    return found.count, found.alive, clients.left.tolist()


def charged(ledger):
    """What a ledger's rows charge in all, by event, less what was given back."""
    total = {}
    for row in ledger.journal.rows():
        if row.kind in ("charge", "refund"):
            event = decode(row.body["event"])
            total[event] = total.get(event, 0) + row.body["count"] * (1 if row.kind == "charge" else -1)
    return {event: count for event, count in total.items() if count}


@settings(max_examples=40, deadline=None)
@given(CLIENTS, INVITATIONS, PLAYS)
def test_a_simulation_charges_and_refuses_as_a_ledger_a_client_does(clients, invitation, plays):
    ends = np.cumsum([0, *(size for _, size in clients)])
    parts = [(X[a:b], Y[a:b]) for a, b in itertools.pairwise(ends)]
    budgets = [
        ft.Budget(own.epsilon, own.delta, own.adjacency, own.unit, invitation.observer) for own, _ in clients
    ]
    ledgers = [ft.Ledger(budget, block=3) for budget in budgets]
    simulated = Simulated.gather(parts, budgets)
    agents = [
        ClientAgent(ledger.over(Table(*part)), len(part[0]))
        for ledger, part in zip(ledgers, parts, strict=True)
    ]
    parties = Parties(agents)
    try:
        parties.invite(invitation)
    except FarthingError as error:  # no theorem covers it: neither begins
        with pytest.raises(type(error)):
            simulated.invite(invitation)
        return
    simulated.invite(invitation)
    np.testing.assert_array_equal(simulated.left, parties.left)
    for play in plays:
        assert played(simulated, play) == played(parties, play)
    for client, ledger in enumerate(ledgers):
        ledger.refund()
        event = simulated.event(client)
        assert charged(ledger) == ({} if event is None else {event.event: event.count})


def test_the_rule_takes_from_one_promise_or_from_all_or_refuses():
    assert taken(3) == 2
    assert taken(3, 3) == 0
    assert taken(np.array([3, 1])).tolist() == [2, 0]
    for left in (0, np.array([3, 0])):
        with pytest.raises(BudgetSpent, match="1 answers requested, 0 promised answers are left"):
            taken(left)
    with pytest.raises(BudgetSpent, match="3 answers requested, 2 promised answers are left"):
        taken(2, 3)


def test_an_invitation_that_is_refused_leaves_everybody_as_they_were():
    alone = Simulated.gather([(X[:4], Y[:4])], ft.Budget(1.0, 1e-6))
    with pytest.raises(InvalidValue, match="no client was invited"):
        alone.ask(GRADIENT, ZEROS)
    assert alone.left.tolist() == [0]


@pytest.mark.parametrize("adjacency", ft.Adjacency)
@pytest.mark.parametrize(
    ("invitation", "records"),
    [
        *[(Invitation(1.0, Exactly(1), noise_multiplier=100.0), records) for records in (21, 22, 40, 188)],
        *[
            (Invitation(1.0, draw, rounds, calibration="sampling", accountant="sampling"), 3)
            for draw in (Everyone(), Exactly(1), Exactly(3), Poisson(1.0))
            for rounds in (1, 10, 26)
        ],
    ],
    ids=str,
)
def test_a_ledger_accepts_the_rounds_that_were_agreed_to(invitation, records, adjacency):
    """A guard whose ledger refuses them would leave the run at the first question; a simulation has none."""
    for epsilon, delta in ((3.0, 1e-6), (0.5, 1e-8)):
        budget = ft.Budget(epsilon, delta, adjacency, observer=invitation.observer)
        agent = ClientAgent(ft.Ledger(budget).over(Table(X[:1], Y[:1])), records)
        assert agent.join(invitation).rounds == agent.left > 0
