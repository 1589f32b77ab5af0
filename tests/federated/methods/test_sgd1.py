"""SGD1: its noise, its steps, and what it guarantees against whom, each by a calculation of its own."""

import math

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import binom, chisquare, ks_2samp, norm

import farthing as ft
from farthing.accounting import composition, pld
from farthing.budget import Adjacency, Observer
from farthing.data.tables import Table
from farthing.errors import BudgetSpent, InvalidValue, Unsupported
from farthing.federated import ClientAgent, Parties, Simulated
from farthing.federated.methods.sgd1 import sgd1, sgd1_guarantees, sgd1_noise
from farthing.linear.losses import LinearGradient, logistic, multinomial, squared
from farthing.linear.problem import Problem
from farthing.noise.lattice import SeededStream
from farthing.queries.events import DrawnEvent, FixedSizeEvent, GaussianEvent, RepeatedEvent
from farthing.queries.mechanisms import Gaussian
from farthing.queries.samplers import OneRecord


def small(n):
    return 1 / (2 * n**3)


def table(n=12, d=3):
    x = (np.arange(n * d).reshape(n, d) * 0.6180339887) % 1.0
    return Table(x, (x[:, 0] > x[:, 1]).astype(float), unit=True)


def budget(n=12, epsilon=0.5, delta=None, adjacency="replace-one", observer="server"):
    return ft.Budget(epsilon, delta or small(n), adjacency, observer=observer)


def agents(sizes, given, seeded=False):
    """One door a party, to its own rows of the table; party i draws from stream i."""
    records, start, found = table(sum(sizes)), 0, []
    for party, size in enumerate(sizes):
        ledger = ft.Ledger(given, stream=SeededStream(party) if seeded else None, block=1)
        found.append(ClientAgent(ledger.over(records.take(np.arange(start, start + size))), size))
        start += size
    return found


def parties(sizes=(5, 4, 3), given=None, seeded=False):
    given = given or budget(sum(sizes))
    return Parties(agents(sizes, given, seeded), SeededStream(99) if seeded else None)


def simulated(sizes=(5, 4, 3), given=None, stream=None):
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    given = given or budget(sum(sizes), observer="anyone")
    return Simulated(table(sum(sizes)), offsets, given, stream=stream)


@pytest.mark.parametrize("n", [10, 100, 1000])
def test_the_proof_of_theorem_1_gives_more_delta_than_it_claims(n):
    """Equations (5) and (6): strong composition (Lemma 1) with δ' = δ^(1/3) keeps ε and loses δ."""
    epsilon, delta = 0.5, small(n)
    each = epsilon / (n * math.sqrt(math.log(1 / delta)))
    total, failure = composition.strong(each, delta / n**2, n**2, delta ** (1 / 3))
    assert total == pytest.approx(epsilon * (epsilon / math.log(1 / delta) + math.sqrt(2 / 3)), rel=1e-9)
    assert total < epsilon
    exact = 1 - (1 - delta / n**2) ** (n**2) * (1 - delta ** (1 / 3))
    assert failure == pytest.approx(exact, rel=1e-2)
    assert failure > delta ** (1 / 3) > 100 * delta


def test_noise_is_equation_3():
    n, L, epsilon, delta = 50, 2.0, 0.5, 1e-6
    assert sgd1_noise(n, L, epsilon, delta) ** 2 == pytest.approx(
        16 * L**2 * n**2 * math.log(1.25 * n**2 / delta) ** 2 / epsilon**2
    )


def claimed(n, epsilon=0.5):
    """σ/(nL) of (3)."""
    return sgd1_noise(n, 1.0, epsilon, small(n)) / n


@pytest.mark.parametrize(
    ("n", "coordinator", "anyone"), [(50, 0.320, 0.0374), (100, 0.441, 0.0373), (200, 0.605, 0.0368)]
)
def test_true_epsilons_at_a_claim_of_one_half(n, coordinator, anyone):
    for sizes in ([n], [1] * n):
        found = sgd1_guarantees(sizes, claimed(n), small(n))
        observers = [guarantee.observer for guarantee in found]
        assert observers == [Observer.COORDINATOR, Observer.SERVER, Observer.ANYONE]
        assert {guarantee.adjacency for guarantee in found} == {Adjacency.REPLACE_ONE}
        assert {guarantee.delta for guarantee in found} == {small(n)}
        assert round(found.coordinator.epsilon, 3) == coordinator
        assert round(found.anyone.epsilon, 4) == anyone
        # turns tell nothing of one party's records, and everything of a record that is a party
        same = found.anyone if len(sizes) == 1 else found.coordinator
        assert found.server.epsilon == pytest.approx(same.epsilon)


@pytest.mark.parametrize(("seen", "epsilon"), [(True, 0.320), (False, 0.0374)])
def test_those_epsilons_are_what_a_ledger_charges(seen, epsilon):
    """One party with 50 records, asked 50² times: as a coordinator sees it, and as one that does not."""
    given = budget(50, observer="coordinator" if seen else "server")
    (agent,) = agents([50], given)
    ft.run(sgd1(Parties([agent]), Problem(logistic, 50, 3), seen=seen))
    assert round(agent._ledger.spent.epsilon, 3 if seen else 4) == epsilon
    assert agent._ledger.spent.observer is given.observer


def test_the_claim_fails_before_the_coordinator_from_132_on():
    assert sgd1_guarantees([131], claimed(131), small(131)).coordinator.epsilon <= 0.5
    assert sgd1_guarantees([132], claimed(132), small(132)).coordinator.epsilon > 0.5
    assert round(sgd1_guarantees([1000], claimed(1000), small(1000)).coordinator.epsilon, 2) == 1.27


def seen_delta(n, noise, epsilon):
    """E over K ~ Bin(n², 1/n) of the Gaussian mechanism's δ at 2nL√K/σ."""
    k = np.arange(1, n * n + 1)
    mu = 2 * np.sqrt(k) / noise
    gauss = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    return float(binom.pmf(k, n * n, 1 / n) @ gauss)


@pytest.mark.parametrize("n", [20, 50, 200])
def test_the_coordinators_epsilon_by_a_plain_sum(n):
    noise = sgd1_noise(n, 3.0, 0.5, small(n)) / (3.0 * n)
    epsilon = sgd1_guarantees([n], noise, small(n)).coordinator.epsilon
    assert seen_delta(n, noise, epsilon) <= small(n) * (1 + 1e-9)
    assert seen_delta(n, noise, epsilon * (1 - 1e-6)) > small(n)


def hidden_delta(rate, noise, steps, epsilon, turn=1.0, cell=1e-6, points=2**20):
    """δ of secret draws of one record, its loss put on a grid (mean preserved) and convolved by FFT.

    A step is one with probability ``turn``, and nothing otherwise; which of both is known.

    Losses above 0 are those of (1-q) N(0) + q N(2/noise) against N(0), those below 0 of the swapped pair, and
    the rest of the mass has none: the pair whose profile is the larger of both directions.
    """
    a = 2 / noise
    edges = np.linspace(a / 2, a / 2 + 12, 200_001)
    x = (edges[1:] + edges[:-1]) / 2
    loss = np.log1p(rate * np.expm1(a * x - a * a / 2))
    base = norm.cdf(-edges[:-1]) - norm.cdf(-edges[1:])
    mixed = (1 - rate) * base + rate * (norm.cdf(a - edges[:-1]) - norm.cdf(a - edges[1:]))
    law = np.zeros(points)
    for losses, mass in ((loss, mixed), (-loss, base)):
        place = losses / cell
        low = np.floor(place).astype(int)
        np.add.at(law, low % points, mass * (1 - (place - low)))
        np.add.at(law, (low + 1) % points, mass * (place - low))
    law[0] += 1 - law.sum()
    law *= turn
    law[0] += 1 - turn
    total = np.fft.irfft(np.fft.rfft(law) ** steps, points)
    sums = np.arange(points // 2) * cell
    beyond = sums > epsilon
    return float(-np.expm1(epsilon - sums[beyond]) @ total[: points // 2][beyond])


@pytest.mark.parametrize("n", [30, 50])
def test_everybody_elses_epsilon_by_convolution(n):
    epsilon = sgd1_guarantees([n], claimed(n), small(n)).anyone.epsilon
    assert hidden_delta(1 / n, claimed(n), n * n, epsilon) == pytest.approx(small(n), rel=2e-3)


@pytest.mark.parametrize(("n", "mine"), [(30, 10), (50, 25), (50, 2)])
def test_the_servers_epsilon_by_convolution(n, mine):
    """A turn of the party with probability mine/n, and then one of its records: never below, hardly above."""
    sizes, cell = [n - mine, mine], 4e-6 if mine == 2 else 1e-6
    found = sgd1_guarantees(sizes, claimed(n), small(n), of=1)
    exact = hidden_delta(1 / mine, claimed(n), n * n, found.server.epsilon, mine / n, cell)
    assert 0.8 * small(n) < exact <= small(n) * (1 + 2e-3)
    less = hidden_delta(1 / mine, claimed(n), n * n, found.server.epsilon * 0.985, mine / n, cell)
    assert less > small(n)
    assert found.anyone.epsilon < found.server.epsilon < found.coordinator.epsilon


def test_everybody_elses_epsilon_beside_dp_accounting():
    """Its pair for Poisson draws is one direction of ours, so a lower bound, and a close one."""
    reference = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    n = 50
    one = reference.from_gaussian_mechanism(
        claimed(n) / 2, sampling_prob=1 / n, value_discretization_interval=1e-6
    )
    lower = one.self_compose(n * n).get_epsilon_for_delta(small(n))
    found = sgd1_guarantees([n], claimed(n), small(n)).anyone.epsilon
    assert 0.999 * lower <= found <= 1.01 * lower


def test_a_party_knows_its_own_turns():
    n, delta, noise = 60, small(60), claimed(60)
    seen = [sgd1_guarantees([1] * n, noise, delta, held=held).anyone for held in (0, 1, 20, 30, 58)]
    epsilons = [guarantee.epsilon for guarantee in seen]
    assert epsilons == sorted(epsilons)
    # half of the iterations, with draws twice as likely: √2 times the loss, and a tail set aside
    assert math.sqrt(2) < epsilons[3] / epsilons[0] < 1.1 * math.sqrt(2)
    assert "30 of 60" in seen[3].note
    most = sgd1_guarantees([1, n - 1], noise, delta, held=n - 1)
    assert most.anyone.epsilon <= most.coordinator.epsilon


def test_a_partys_epsilon_by_a_plain_mixture():
    """Whatever number of turns falls to the others: their draws are one in n - held, composed so often."""
    n, held, delta, noise = 30, 15, small(30), claimed(30)
    found = sgd1_guarantees([15, 15], noise, delta, held=held).anyone.epsilon
    turns = np.arange(350, 560)
    event = FixedSizeEvent(1, n - held, GaussianEvent(noise))
    prices = [pld.delta(RepeatedEvent(event, int(t)), found, Adjacency.REPLACE_ONE) for t in turns]
    assert 0.3 * delta < binom.pmf(turns, n * n, 0.5) @ prices <= delta


def reference(sizes, clip, noise, radius, convexity, features):
    """The write-up's pseudocode, iteration by iteration on explicit rows, with the same draws and noise."""
    records, n, ends = table(sum(sizes)), sum(sizes), np.cumsum(sizes)
    z = np.column_stack([records.X / np.linalg.norm(records.X, axis=1)[:, None], np.full(n, 0.3)])
    theta, sigma, turns = np.zeros(4), noise * n * clip, []
    coordinator, own = SeededStream(99), [SeededStream(party) for party in range(len(sizes))]
    for t in range(1, n * n + 1):
        party = int(np.argmax(coordinator.uniform_below(n, 1)[0] < ends))
        turns.append(party)
        (record,) = own[party].choose(1, sizes[party]) + ends[party] - sizes[party]
        gradient = (expit(z[record] @ theta) - records.y[record]) * z[record]
        gradient *= min(1.0, clip / np.linalg.norm(gradient))
        G = n * Gaussian(noise).release(gradient, ft.ClipNorm(clip), own[party])
        G = G + n * convexity * theta
        eta = 2 * radius / math.sqrt(t * (n**2 * clip**2 + 4 * sigma**2))
        theta = theta - (1 / (convexity * n * t) if convexity else eta) * G
        theta = theta * min(1.0, radius / np.linalg.norm(theta))
    return features.unfold(theta), turns


@pytest.mark.parametrize(("sizes", "away"), [((1, 3), {1}), ((2, 2, 4), {2}), ((2, 2, 4), {1, 2})])
def test_a_turn_that_passes_as_noise_costs_nothing_and_one_that_shows_does(sizes, away):
    """One iteration, by integration: records of who is away are blank, or the turn is seen to pass."""
    n, noise, epsilon = sum(sizes), 1.0, 0.2
    gone = sum(sizes[party] for party in away)
    x = np.linspace(-12, 12, 40_001)
    below, zero, above = (norm.pdf(x, value, noise) for value in (-1.0, 0.0, 1.0))
    # the worst pair for a record of who is here: its gradient is L or -L, and all others' here are -L
    others = (n - gone - 1) * below
    worlds = [(record + others) / n for record in (above, below)]
    blank = [world + gone * zero / n for world in worlds]
    claimed = pld.delta(OneRecord(n).amplify(GaussianEvent(noise)), epsilon, Adjacency.REPLACE_ONE)

    def delta(one, other):
        return float(np.maximum(one - math.exp(epsilon) * other, 0.0).sum() * (x[1] - x[0]))

    assert delta(*blank) <= claimed * (1 + 1e-4)
    # seen to pass: the same chance in both worlds, which adds nothing; all else is as large as it was
    assert delta(*worlds) > claimed * (1 + 1e-4)


@pytest.mark.parametrize(("convexity", "clip", "radius"), [(0.0, 0.4, 1.0), (0.5, 2.0, 3.0)])
def test_it_is_the_pseudocode(convexity, clip, radius):
    n, problem, clients = 12, Problem(logistic, 12, 3), parties(seeded=True)
    steps = list(sgd1(clients, problem, lipschitz=clip, radius=radius, convexity=convexity))
    (u, constant), turns = reference((5, 4, 3), clip, claimed(n), radius, convexity, problem.rows())
    assert [step.t for step in steps] == [n * k for k in range(1, n + 1)]
    assert steps[-1].w[0] == pytest.approx(u, rel=1e-9)
    assert steps[-1].w[1] == pytest.approx(constant, rel=1e-9)
    for party, agent in enumerate(clients._agents):
        assert agent._terms.rounds - agent.left == turns.count(party)


def test_turns_fall_to_parties_by_their_share():
    """Drawing the owner and then one of its records is drawing a record."""
    clients = simulated((20, 30, 10), stream=SeededStream(4))
    ft.run(sgd1(clients, Problem(logistic, 60, 3)))
    assert clients.done.sum() == 3600
    assert chisquare(clients.done, np.array([1200, 1800, 600])).pvalue > 0.01


@pytest.mark.parametrize("seen", [False, True])
def test_every_answer_is_charged_to_its_owner_as_its_observer_sees_it(seen):
    given = budget(observer="coordinator" if seen else "server")
    clients, noise = parties(given=given), GaussianEvent(claimed(12))
    run = ft.run(sgd1(clients, Problem(logistic, 12, 3), lipschitz=1.0, seen=seen))
    assert run.receipts == ()  # they would tell whose turn it was
    answered = 0
    for agent, size in zip(clients._agents, (5, 4, 3), strict=True):
        event = DrawnEvent(1 / size, noise) if seen else FixedSizeEvent(1, size, noise)
        done = agent._terms.rounds - agent.left
        expected = pld.epsilon(RepeatedEvent(event, done), small(12), Adjacency.REPLACE_ONE)
        answered += done
        assert agent._terms.price(given) == event
        assert agent._ledger.spent.epsilon == pytest.approx(expected, rel=1e-9)
    assert answered == run.steps == 144


def test_simulated_parties_keep_the_same_books():
    clients = simulated()
    ft.run(sgd1(clients, Problem(logistic, 12, 3)))
    for party, size in enumerate((5, 4, 3)):
        event = FixedSizeEvent(1, size, GaussianEvent(claimed(12)))
        assert clients.event(party) == RepeatedEvent(event, int(clients.done[party]))
        assert clients.guarantee(party).observer is Observer.SERVER


def test_simulated_and_real_parties_agree_in_distribution():
    """The first n iterations' weight, many times over, with the same budgets."""

    def ends(make):
        return [next(sgd1(make(seed), Problem(logistic, 4, 3), exact=True)).w[1] for seed in range(150)]

    def real(seed):
        given = budget(4, 2.0, 1e-3)
        return Parties(
            [ClientAgent(ft.Ledger(given, stream=SeededStream(seed)).over(table(4)), 4)],
            SeededStream(seed),
        )

    def arrays(seed):
        return simulated([4], budget(4, 2.0, 1e-3), SeededStream(1000 + seed))

    assert ks_2samp(ends(real), ends(arrays)).pvalue > 0.01


def test_a_party_stops_by_itself_whomever_the_coordinator_asks():
    clients = parties((6, 6), given=budget(epsilon=2.0, delta=1e-3))
    next(sgd1(clients, Problem(logistic, 12, 3), exact=True))
    gradient = LinearGradient(logistic, Problem(logistic, 12, 3).rows())
    agent, other = clients._agents
    alive, before = 2, other.left
    for _ in range(agent.left):
        alive = clients.ask_one(0, gradient, np.zeros(4)).alive
    assert (alive, agent.left, other.left) == (1, 0, before)
    with pytest.raises(BudgetSpent):
        clients.ask_one(0, gradient, np.zeros(4))
    assert agent._ledger.spent.epsilon <= 2.0
    assert other.left == before


def test_an_ended_budget_ends_the_run():
    clients = simulated((6, 6), budget(epsilon=2.0, delta=1e-3))
    steps = sgd1(clients, Problem(logistic, 12, 3), exact=True)
    next(steps)
    clients.left[0] = 2
    assert 0 <= len(list(steps)) < 11
    assert clients.left[0] == 0


def test_nothing_is_asked_where_the_claim_does_not_hold():
    given = budget(132, observer="coordinator")
    clients = Parties(agents([132], given))
    with pytest.raises(BudgetSpent, match="may be asked 17424 times"):
        next(sgd1(clients, Problem(logistic, 132, 3), seen=True))
    assert clients._agents[0]._ledger.spent.epsilon == 0
    lonely = parties([1] * 132, budget(132))  # whose turn it was tells which record it was
    with pytest.raises(BudgetSpent, match="a party with 1 of 132 records"):
        next(sgd1(lonely, Problem(logistic, 132, 3)))
    coming = parties(given=budget(adjacency="add-remove", observer="coordinator"))
    with pytest.raises(Unsupported, match="learns the number of records"):
        next(sgd1(coming, Problem(logistic, 12, 3), seen=True))


@pytest.mark.parametrize("seen", [False, True])
def test_exact_noise_is_the_least_that_the_neediest_party_affords(seen):
    given = budget(12, 2.0, 1e-3, observer="coordinator" if seen else "server")
    clients = parties((8, 4), given)
    ft.run(sgd1(clients, Problem(logistic, 12, 3), exact=True, seen=seen))
    large, small_ = (agent._terms.rounds for agent in clients._agents)
    # turns come as rarely as 1e-6 more often than these: Bin(144, 1/3) stays below 75
    assert binom.sf(small_, 144, 1 / 3) < 0.5e-6 < binom.sf(small_ - 2, 144, 1 / 3)
    assert large > small_


def test_more_privacy_budget_finds_the_direction():
    n = 60
    clients = simulated((40, 20), budget(n, 200.0, 1e-3), SeededStream(3))
    u, constant = ft.run(sgd1(clients, Problem(logistic, n, 3), exact=True, radius=5.0)).w
    records = table(n)
    right = (records.X / np.linalg.norm(records.X, axis=1)[:, None] @ u + constant > 0) == records.y
    assert right.mean() > 0.85


def test_classes():
    u, constant = ft.run(sgd1(parties(), Problem(multinomial, 12, 3, outputs=2))).w
    assert u.shape == (3, 2)
    assert constant.shape == (2,)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"radius": 0.0}, "radius"),
        ({"lipschitz": -1.0}, "lipschitz"),
        ({"convexity": math.nan}, "convexity"),
        ({"start": [1.0]}, "start"),
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"lr": lambda t: -1.0}, "lr"),
    ],
)
def test_bad_options(options, named):
    clients = parties()
    with pytest.raises(InvalidValue, match=named):
        next(sgd1(clients, Problem(logistic, 12, 3), **options))
    assert clients._agents[0]._ledger.share == 0


@pytest.mark.parametrize(("observer", "seen"), [("anyone", False), ("coordinator", False), ("server", True)])
def test_a_budget_is_spent_before_its_own_observer_only(observer, seen):
    with pytest.raises(InvalidValue, match=f"the budget is against {observer}"):
        next(sgd1(parties(given=budget(observer=observer)), Problem(logistic, 12, 3), seen=seen))


def test_claims_that_the_write_up_does_not_make():
    with pytest.raises(InvalidValue, match="epsilon must be below 1"):
        sgd1_noise(10, 1.0, 1.0, 1e-6)
    with pytest.raises(InvalidValue, match="delta must be below 1/n³"):
        sgd1_noise(10, 1.0, 0.5, 1e-3)
    with pytest.raises(InvalidValue, match="held must be below n=10"):
        sgd1_guarantees([4, 6], 9.0, 1e-6, held=10)
    with pytest.raises(InvalidValue, match="of must name one of 2 parties"):
        sgd1_guarantees([4, 6], 9.0, 1e-6, of=2)
    with pytest.raises(InvalidValue, match="lipschitz must be given"):
        next(sgd1(parties(), Problem(squared, 12, 3)))
