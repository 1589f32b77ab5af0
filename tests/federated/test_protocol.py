"""Terms, agents and the server's side of a round, without any transport."""

import math

import numpy as np
import pytest
from scipy import stats

import farthing as ft
from farthing.data.tables import Features, Table
from farthing.errors import BudgetSpent, InvalidValue, PromiseBroken, Unsupported
from farthing.federated import (
    Accountant,
    Ask,
    ClientAgent,
    Exactly,
    InTurn,
    Invitation,
    Parties,
    Simulated,
    Trust,
    Weights,
)
from farthing.federated.terms import Share, sampler_of
from farthing.linear.losses import LinearGradient, logistic
from farthing.noise.lattice import SeededStream
from farthing.queries.samplers import Everyone, FixedSize, Poisson

GRADIENT = LinearGradient(logistic, Features(2))


def budget(epsilon=1.0, delta=1e-6, adjacency="add-remove", observer="server"):
    return ft.Budget(epsilon, delta, adjacency, observer=observer)


def agent(seed=0, records=20, **options):
    rng = np.random.default_rng(seed)
    table = Table(rng.uniform(size=(records, 2)), rng.integers(0, 2, records) * 1.0)
    given = options.pop("budget", budget())
    clip = options.pop("clip_norm", None)
    ledger = ft.Ledger(given, stream=SeededStream(seed), **options)
    return ClientAgent(ledger.over(table), max(records, 1), clip)


@pytest.mark.parametrize(
    ("epsilon", "by_theorem", "tight"),
    [(0.1, 37849, 3833979), (0.5, 38012, 3857819), (1.6, 38745, 3937953)],
)
def test_rounds_of_the_papers_setting(epsilon, by_theorem, tight):
    paper = Invitation(3.0, Poisson(0.01), 10, calibration="advanced", accountant="sampling")
    terms = paper.terms(budget(epsilon, 1e-8), 100)
    assert terms.rounds == by_theorem
    counted = Accountant.TIGHT.rounds(
        terms.mechanism.noise_multiplier, 10, budget(epsilon, 1e-8), Poisson(0.01)
    )
    assert counted == tight
    once = Invitation(3.0, Exactly(1), 10, calibration="advanced", accountant="sampling")
    twice = once.terms(budget(epsilon, 1e-8), 100)
    assert twice.rounds == by_theorem  # 2C of noise for a shift of 2C
    assert twice.mechanism.noise_multiplier == pytest.approx(2 * terms.mechanism.noise_multiplier)


@pytest.mark.parametrize("by", Accountant.of_rounds())
@pytest.mark.parametrize("draw", [Everyone(), Poisson(0.1), Exactly(3)])
@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one", "zero-out"])
def test_noise_for_rounds_affords_them_and_hardly_less_does(by, draw, adjacency):
    given, sampler = budget(0.7, 1e-6, adjacency), sampler_of(draw, 30)
    noise = by.noise(12, given, sampler)
    assert by.rounds(noise * (1 + 1e-9), 12, given, sampler) >= 12
    assert by.rounds(noise * 0.98, 12, given, sampler) < 12
    tight = Accountant.TIGHT.rounds(noise * (1 + 1e-9), 12, given, sampler)
    assert tight >= 12  # no theorem affords more than tight accounting does


def test_the_draw_decides_how_far_a_record_moves_an_upload():
    by, given = Accountant.ADVANCED, budget()
    whole = by.noise(5, given, Everyone())
    assert by.noise(5, given, Poisson(0.1)) == whole
    assert by.noise(5, given, FixedSize(1, 10)) == 2 * whole
    assert by.noise(5, budget(adjacency="replace-one"), Poisson(0.1)) == 2 * whole


def test_an_agent_answers_until_its_budget_is_spent():
    one = agent()
    terms = one.join(Invitation(1.0, Poisson(0.2), 3))
    assert (terms.rounds, one.left) == (3, 3)
    for left in (2, 1, 0):
        reply = one.handle(Ask(1, GRADIENT, np.zeros(3)))
        assert reply.value.shape == (3,)
        assert one.left == left
        assert reply.variance == pytest.approx(terms.mechanism.noise_multiplier**2)
        assert reply.expected == pytest.approx(4.0)
    with pytest.raises(BudgetSpent):
        one.handle(Ask(4, GRADIENT, np.zeros(3)))


def test_an_agent_whose_budget_allows_nothing_says_so():
    poor = agent(budget=budget(0.01))
    assert poor.join(Invitation(1.0, noise_multiplier=1.0)).rounds == 0
    assert poor.left == 0
    with pytest.raises(BudgetSpent, match="not even one round"):
        poor.handle(Ask(1, GRADIENT, np.zeros(3)))


def test_an_agent_must_join_first_and_only_answers_what_it_agreed_to():
    with pytest.raises(InvalidValue, match="has not joined"):
        agent().handle(Ask(1, GRADIENT, np.zeros(3)))
    one = agent()
    one.join(Invitation(1.0, rounds=3))
    with pytest.raises((PromiseBroken, BudgetSpent)):
        one._ledger.ask(Invitation(1.0, rounds=50).terms(budget(), 20).query(GRADIENT), np.zeros(3))


@pytest.mark.parametrize(
    ("invitation", "error", "what"),
    [
        (lambda: Invitation(0.0), InvalidValue, "clip"),
        (lambda: Invitation(math.nan), InvalidValue, "clip"),
        (lambda: Invitation(1.0, rounds=0), InvalidValue, "rounds"),
        (lambda: Invitation(1.0, noise_multiplier=-1.0), InvalidValue, "noise"),
        (lambda: Invitation(1.0, draw="one"), InvalidValue, "draw"),
        (lambda: Invitation(1.0, accountant="hopeful"), InvalidValue, "accountant"),
        (lambda: Invitation(1.0, trust="blind"), InvalidValue, "trust"),
        (lambda: Invitation(1.0, trust="distributed"), InvalidValue, "noise_multiplier must be given"),
        (lambda: Invitation(1.0, survivors=0), InvalidValue, "survivors"),
        (lambda: Exactly(0), InvalidValue, "size"),
        (
            lambda: agent().join(Invitation(1.0, noise_multiplier=1.0, trust="trusted")),
            Unsupported,
            "without noise",
        ),
        (lambda: agent().join(Invitation(1.0, InTurn())), Unsupported, "every round"),
        (lambda: Invitation(1.0, InTurn()).terms(budget(), 9), Unsupported, "turns"),
        (lambda: Invitation(1.0).terms(budget(observer="anyone"), 9), InvalidValue, "against server"),
        (lambda: Invitation(1.0).terms(budget(delta=0.0), 9), InvalidValue, "delta"),
        (lambda: Parties([agent()]).ask(GRADIENT, np.zeros(3)), InvalidValue, "invited"),
    ],
)
def test_nonsense_is_refused(invitation, error, what):
    with pytest.raises(error, match=what):
        invitation()


def parties(weights, *epsilons, **options):
    clients = Parties([agent(i, budget=budget(e), records=10 + i) for i, e in enumerate(epsilons)])
    clients.invite(Invitation(1.0, rounds=2, **options), weights)
    return clients


def test_weights_of_users_who_differ():
    for weights in Weights:
        clients = parties(weights, 0.5, 2.0, 4.0)
        noises = [agent._terms.mechanism.noise_multiplier for agent in clients._agents]
        got = clients.ask(GRADIENT, np.zeros(3))
        n, v = np.array([10.0, 11.0, 12.0]), np.square(noises)
        weight = {"precision": n / v, "plain": 1 / n, "records": np.ones(3)}[weights]
        assert got.variance == pytest.approx(np.sum(weight**2 * v) / np.sum(weight * n) ** 2)
        assert (got.count, got.alive, len(got.receipts)) == (3, 3, 3)
    variances = [parties(weights, 0.5, 2.0, 4.0).ask(GRADIENT, np.zeros(3)).variance for weights in Weights]
    assert min(variances) == variances[0]  # inverse variance is the best of all


def test_without_noise_to_speak_of_the_mean_is_the_mean():
    agents = [agent(i, budget=budget(1e7), records=10 + 5 * i) for i in range(3)]
    sums = [GRADIENT.bounded_sum(a._ledger._records, np.ones(3), ft.ClipNorm(0.6)) for a in agents]
    for weights, mean in [
        (Weights.PLAIN, np.mean([s / (10 + 5 * i) for i, s in enumerate(sums)], axis=0)),
        (Weights.RECORDS, np.sum(sums, axis=0) / 45),
    ]:
        clients = Parties([agent(i, budget=budget(1e7), records=10 + 5 * i) for i in range(3)])
        clients.invite(Invitation(0.6, rounds=1), weights)
        np.testing.assert_allclose(clients.ask(GRADIENT, np.ones(3)).mean, mean, atol=1e-3)


def test_clients_go_on_while_any_can_afford_a_round():
    clients = Parties([agent(i, budget=budget(e)) for i, e in enumerate((0.5, 1.0, 2.0))])
    clients.invite(Invitation(1.0, noise_multiplier=8.0))
    settled = clients.left
    assert len(set(settled)) == 3
    came = []
    while clients.alive:
        came.append(clients.ask(GRADIENT, np.zeros(3)).count)
    with pytest.raises(BudgetSpent, match="none of 3"):
        clients.ask(GRADIENT, np.zeros(3))
    assert came == [int(np.sum(settled > t)) for t in range(max(settled))]
    with pytest.raises(InvalidValue, match="agreed once"):
        clients.invite(Invitation(1.0))


def test_a_share_costs_what_the_whole_does_and_is_as_small_as_its_part():
    share, bound = Share(6.0, 9), ft.ClipNorm(2.0)
    assert share.event(bound, ft.Adjacency.ADD_REMOVE, False) == ft.Gaussian(6.0).unit_event()
    drawn = share.release(np.zeros(4000), bound, SeededStream(1))
    assert stats.kstest(drawn / 4.0, "norm").pvalue > 0.01  # 6 · 2 / √9


def test_distributed_noise_needs_its_survivors():
    budgets = [budget(e, observer="aggregate") for e in (1.0, 1.0, 2.0)]
    clients = Parties([agent(i, budget=b) for i, b in enumerate(budgets)])
    invitation = Invitation(1.0, noise_multiplier=30.0, trust=Trust.DISTRIBUTED, survivors=3)
    outlook = clients.forecast(invitation)
    clients.invite(invitation)
    left = clients.left
    assert left[0] == left[1] < left[2]
    got = clients.ask(GRADIENT, np.zeros(3))
    assert got.variance == pytest.approx((30.0 / 60) ** 2)
    assert outlook.deviation == pytest.approx(0.5)
    for _ in range(left[0] - 1):
        clients.ask(GRADIENT, np.zeros(3))
    with pytest.raises(BudgetSpent, match=r"1 of 3 clients .* 3 are needed"):
        clients.ask(GRADIENT, np.zeros(3))
    assert clients.left[2] == left[2] - left[0]


def test_shares_lie_on_one_lattice():
    share, bound, stream = Share(37.0, 5), ft.ClipNorm(0.7), SeededStream(3)
    _, cell = ft.Gaussian(37.0 / math.sqrt(5)).grid(bound, 6)
    uploads = [share.release(np.linspace(-1, 1, 6), bound, stream) for _ in range(20)]
    counted = np.sum(uploads, axis=0) / cell
    np.testing.assert_allclose(counted, np.rint(counted), rtol=0, atol=1e-4)
    invitation = Invitation(1.0, noise_multiplier=30.0, trust=Trust.DISTRIBUTED)
    with pytest.raises(InvalidValue, match="one lattice"):
        agent(budget=budget(observer="aggregate"), clip_norm=0.5).join(invitation)


def test_shares_that_hide_whole_parties_lie_on_one_lattice_too():
    invitation = Invitation(0.7, noise_multiplier=37.0, trust=Trust.DISTRIBUTED, survivors=5)
    given = ft.Budget(1.0, 1e-6, unit="party", observer="aggregate")
    terms = [invitation.terms(given, size) for size in (3, 7, 11)]
    assert {term.variance for term in terms} == {(37.0 * 0.7) ** 2 / 5}
    noises = [term.price(given).noise for term in terms]
    np.testing.assert_allclose(noises, [37 / 3, 37 / 7, 37 / 11])  # the more records, the dearer
    assert terms[0].rounds > terms[1].rounds > terms[2].rounds


def simulated(sizes, given):
    rows = np.random.default_rng(0).uniform(size=(sum(sizes), 2))
    return Simulated.split(rows, np.zeros(len(rows)), records=sizes, budgets=given)


def agents(sizes, given):
    return Parties([agent(i, records=size, budget=given) for i, size in enumerate(sizes)])


@pytest.mark.parametrize("make", [agents, simulated])
def test_one_party_can_be_asked_alone(make):
    clients = make([4, 6], budget())
    with pytest.raises(InvalidValue, match="no client was invited"):
        clients.ask_one(0, GRADIENT, np.zeros(3))
    clients.invite(Invitation(1.0, Exactly(2), rounds=3))
    first, second = clients.left
    got = clients.ask_one(1, GRADIENT, np.zeros(3))
    assert (got.count, got.alive, got.divisor, got.total.shape) == (1, 2, 2.0, (3,))
    assert list(clients.left) == [first, second - 1]
    alive = [clients.ask_one(1, GRADIENT, np.zeros(3)).alive for _ in range(2)]
    assert alive == [2, 1]
    with pytest.raises(BudgetSpent):
        clients.ask_one(1, GRADIENT, np.zeros(3))
    assert clients.ask(GRADIENT, np.zeros(3)).count == 1  # the other one goes on
    with pytest.raises(InvalidValue, match="party must lie between 0 and 1, got 2"):
        clients.ask_one(2, GRADIENT, np.zeros(3))
    with pytest.raises(InvalidValue, match="finite"):
        clients.ask_one(0, GRADIENT, np.array([0.0, np.nan, 0.0]))
    assert clients.left[0] == first - 1


@pytest.mark.parametrize("make", [agents, simulated])
def test_nobody_is_asked_alone_where_only_sums_may_be_seen(make):
    clients = make([4, 6], budget(observer="aggregate"))
    clients.invite(Invitation(1.0, noise_multiplier=30.0, trust=Trust.DISTRIBUTED, survivors=1))
    before = list(clients.left)
    with pytest.raises(Unsupported, match="cannot be used alone"):
        clients.ask_one(0, GRADIENT, np.zeros(3))
    assert list(clients.left) == before


def test_draws_that_are_seen_amplify_nothing():
    given = budget(adjacency="replace-one", observer="coordinator")
    seen = Invitation(1.0, Exactly(1), noise_multiplier=50.0, seen=True).terms(given, 20)
    hidden = Invitation(1.0, Exactly(1), noise_multiplier=50.0).terms(budget(adjacency="replace-one"), 20)
    assert 0 < seen.rounds < hidden.rounds / 2
    with pytest.raises(InvalidValue, match="with draws seen the guarantee holds against coordinator"):
        Invitation(1.0, seen=True).terms(budget(adjacency="replace-one"), 20)
    with pytest.raises(Unsupported, match="do not amplify"):
        Invitation(1.0, seen=True, calibration="amplified")
    with pytest.raises(InvalidValue, match="invite with seen=True"):
        simulated([4], given).invite(Invitation(1.0))
