"""SGD2: its noise against other calculations, its steps against the pseudocode, every party's own books."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.special import expit
from scipy.stats import norm

import farthing as ft
from farthing.accounting import gaussian
from farthing.budget import Adjacency, Unit
from farthing.data.tables import Table
from farthing.errors import InvalidValue
from farthing.federated.methods.sgd2 import sgd2, sgd2_epsilon, sgd2_noise, sgd2_published_noise
from farthing.federated.protocol import ClientAgent, ClientNoise, Invitation, Parties, Trust, Weights
from farthing.federated.simulated import Simulated
from farthing.linear.losses import LinearGradient, logistic, multinomial, squared
from farthing.linear.problem import Problem
from farthing.noise.lattice import SeededStream
from farthing.queries.events import GaussianEvent
from farthing.queries.mechanisms import Gaussian

SHIFT = {Adjacency.ADD_REMOVE: 1, Adjacency.ZERO_OUT: 1, Adjacency.REPLACE_ONE: 2}


def rows(n=60, d=3):
    x = (np.arange(n * d).reshape(n, d) * 0.6180339887) % 1.0
    return x, (x[:, 0] > x[:, 1]).astype(float)


def parties(sizes, budgets, seed=0, **options):
    """Agents, each with its own ledger over its own rows and its own seeded stream."""
    x, y = rows(sum(sizes))
    ends = np.cumsum(sizes)
    agents = []
    for place, (end, size, budget) in enumerate(zip(ends, sizes, budgets, strict=True)):
        table = Table(x[end - size : end], y[end - size : end], unit=True)
        ledger = ft.Ledger(budget, stream=SeededStream(seed + place))
        agents.append(ClientAgent(ledger.over(table), size, **options))
    return Parties(agents)


def budget(epsilon=1.0, delta=1e-6, adjacency="add-remove", unit="record"):
    return ft.Budget(epsilon, delta, adjacency, unit, "server")


def test_the_noise_that_the_write_up_leaves_open():
    assert round(sgd2_noise(budget(), 100), 2) == 42.25
    assert round(sgd2_noise(budget(adjacency="replace-one"), 100, lipschitz=3.0), 2) == round(6 * 42.24679, 2)
    party = budget(adjacency="replace-one", unit="party")
    assert sgd2_noise(party, 100, 3.0, records=7) == pytest.approx(2 * 7 * 3 * 42.24679, rel=1e-6)


def test_the_write_ups_recipe_adds_five_times_as_much():
    each, missed = 1 / math.sqrt(100 * math.log(1e6)), 1e-6 / 100
    recipe = sgd2_published_noise(budget(), 100)  # Theorem 3, step 4, by Lemma 2
    assert recipe == pytest.approx(math.sqrt(2 * math.log(1.25 / missed)) / each, rel=1e-12)
    assert round(recipe) == 227
    assert round(sgd2_epsilon(budget(), recipe, 100), 3) == 0.165
    assert plain_delta(math.sqrt(100) / recipe, sgd2_epsilon(budget(), recipe, 100)) == pytest.approx(
        1e-6, rel=1e-5
    )
    whole = budget(unit="party", adjacency="replace-one")
    assert sgd2_published_noise(whole, 100, 3.0, records=7) == pytest.approx(2 * 7 * 3 * recipe)
    assert sgd2_epsilon(whole, 2 * 7 * recipe, 100, records=7) == pytest.approx(
        sgd2_epsilon(budget(), recipe, 100)
    )
    with pytest.raises(InvalidValue, match=r"epsilon must be below 37\.17 for SGD2's noise"):
        sgd2_published_noise(budget(epsilon=40.0), 100)


def plain_delta(mu, epsilon):
    """The hockey-stick divergence of N(μ, 1) from N(0, 1), integrated."""
    start = epsilon / mu + mu / 2  # where the densities' ratio is e^ε
    value, _ = quad(
        lambda x: norm.pdf(x - mu) - math.exp(epsilon) * norm.pdf(x),
        start,
        start + 12,
        epsabs=0,
        epsrel=1e-10,
    )
    return value


@pytest.mark.parametrize(
    ("epsilon", "delta", "rounds"), [(1.0, 1e-6, 100), (0.1, 1e-8, 7), (8.0, 1e-3, 1000)]
)
@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize("unit", [Unit.RECORD, Unit.PARTY])
def test_the_noise_is_exact(epsilon, delta, rounds, adjacency, unit):
    given = budget(epsilon, delta, adjacency, unit)
    distance = SHIFT[adjacency] * 2.0 * (30 if unit is Unit.PARTY else 1)
    mu = distance * math.sqrt(rounds) / sgd2_noise(given, rounds, 2.0, records=30)
    assert plain_delta(mu, epsilon) <= delta * (1 + 1e-9)
    assert plain_delta(mu * (1 + 1e-6), epsilon) > delta


def test_the_noise_beside_dp_accounting():
    reference = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    one = reference.from_gaussian_mechanism(sgd2_noise(budget(), 100), value_discretization_interval=1e-5)
    assert one.self_compose(100).get_epsilon_for_delta(1e-6) == pytest.approx(1.0, rel=2e-3)


budgets = st.builds(
    budget,
    st.floats(0.05, 5.0),
    st.floats(1e-9, 1e-3),
    st.sampled_from(list(Adjacency)),
    st.sampled_from([Unit.RECORD, Unit.PARTY]),
)


@settings(max_examples=25, deadline=None)
@example([(1, budget(2.375, 9.56743213376253e-05))], 3, 1.0)  # where rounding once lost a round
@given(
    st.lists(st.tuples(st.integers(1, 9), budgets), min_size=1, max_size=5),
    st.integers(1, 12),
    st.floats(0.1, 3.0),
)
def test_every_party_derives_its_own_noise_and_spends_no_more_than_its_own_budget(clients, rounds, clip):
    sizes, given_budgets = [size for size, _ in clients], [own for _, own in clients]
    x, y = rows(sum(sizes))
    simulated = Simulated.split(x, y, records=sizes, budgets=given_budgets, unit=True, noise="each")
    run = ft.run(sgd2(simulated, Problem(logistic, sum(sizes), 3), rounds=rounds, lipschitz=clip))
    assert run.steps == rounds
    for user, (size, own) in enumerate(clients):
        sigma = math.sqrt(simulated.terms(user).variance)
        assert sigma == pytest.approx(sgd2_noise(own, rounds, clip, size), rel=1e-10)
        units = size if own.unit is Unit.PARTY else 1
        mu = SHIFT[own.adjacency] * units * clip * math.sqrt(int(simulated.done[user])) / sigma
        assert plain_delta(mu, own.epsilon) <= own.delta * (1 + 1e-8)
        assert 0.999 * own.epsilon < simulated.spent(user).epsilon <= own.epsilon


@pytest.mark.parametrize("unit", ["record", "party"])
def test_with_noise_given_the_countdowns_say_how_many_rounds_there_are(unit):
    sizes, epsilons, sigma = [4, 4, 10], [0.5, 1.0, 1.0], 20.0 if unit == "record" else 100.0
    clients = parties(sizes, [budget(epsilon, unit=unit) for epsilon in epsilons])
    run = ft.run(sgd2(clients, Problem(logistic, 18, 3), noise_multiplier=sigma))
    units = sizes if unit == "party" else [1, 1, 1]
    expected = [
        math.floor((sigma / u * gaussian.mu(epsilon, 1e-6)) ** 2)
        for u, epsilon in zip(units, epsilons, strict=True)
    ]
    assert len(set(expected)) > 1
    assert run.steps == max(expected)
    assert len(run.receipts) == sum(expected)
    assert clients.alive == 0


def test_messages_are_charged_as_what_they_are():
    clients = parties([3, 5], [budget(), budget(unit="party")])
    run = ft.run(sgd2(clients, Problem(logistic, 8, 3), rounds=4))
    (one, whole) = (receipt.event for receipt in run.receipts[:2])
    # the party's noise is five times as large and hides five times as much: both cost the same
    assert isinstance(one, GaussianEvent)
    assert one == whole
    assert one.noise == pytest.approx(2 / budget().mu, rel=1e-9)


def reference(sizes, given_budgets, rounds, clip, radius, convexity, features):
    """The write-up's pseudocode on explicit rows, with each party's own stream."""
    x, y = rows(sum(sizes))
    z = np.column_stack([x / np.linalg.norm(x, axis=1)[:, None], np.full(len(x), 0.3)])
    n, p, ends = len(z), 4, np.cumsum(sizes)
    streams = [SeededStream(place) for place in range(len(sizes))]
    sigmas = [sgd2_noise(own, rounds, clip, size) for own, size in zip(given_budgets, sizes, strict=True)]
    theta = np.zeros(p)
    for k in range(1, rounds + 1):
        total = np.zeros(p)
        for end, size, sigma, stream in zip(ends, sizes, sigmas, streams, strict=True):
            own = slice(end - size, end)
            gradients = (expit(z[own] @ theta) - y[own])[:, None] * z[own]
            gradients *= np.minimum(1.0, clip / np.linalg.norm(gradients, axis=1))[:, None]
            total += Gaussian(sigma / clip).release(gradients.sum(axis=0), ft.ClipNorm(clip), stream)
        total += n * convexity * theta
        eta = 2 * radius / math.sqrt(k * (n**2 * clip**2 + p * sum(sigma**2 for sigma in sigmas)))
        theta = theta - (1 / (convexity * n * k) if convexity else eta) * total
        theta = theta * min(1.0, radius / np.linalg.norm(theta))
    return features.unfold(theta)


@pytest.mark.parametrize("unit", ["record", "party"])
@pytest.mark.parametrize(("convexity", "clip", "radius"), [(0.0, 0.3, 1.0), (0.2, 2.0, 30.0)])
def test_it_is_the_pseudocode(unit, convexity, clip, radius):
    sizes, problem = [20, 1, 39], Problem(logistic, 60, 3)
    given_budgets = [
        budget(50.0, unit=unit),
        budget(80.0, 1e-5, "replace-one"),
        budget(60.0, 1e-4, unit=unit),
    ]
    clients = parties(sizes, given_budgets)
    run = ft.run(sgd2(clients, problem, rounds=15, lipschitz=clip, radius=radius, convexity=convexity))
    u, constant = reference(sizes, given_budgets, 15, clip, radius, convexity, problem.rows())
    assert run.steps == 15
    assert run.w[0] == pytest.approx(u, rel=1e-6)
    assert run.w[1] == pytest.approx(constant, rel=1e-6)


@pytest.mark.parametrize("noise", ["sum", "each"])
@pytest.mark.parametrize("unit", ["record", "party"])
def test_simulated_and_asked_one_by_one_agree_where_noise_is_small(noise, unit):
    sizes, given_budgets, problem = [20, 1, 39], [budget(1e9, 0.5, unit=unit)] * 3, Problem(logistic, 60, 3)
    x, y = rows()
    clients = Simulated.split(
        x, y, records=sizes, budgets=given_budgets, unit=True, noise=noise, stream=SeededStream(7)
    )
    one = ft.run(sgd2(clients, problem, rounds=10)).w
    other = ft.run(sgd2(parties(sizes, given_budgets), problem, rounds=10)).w
    assert one[0] == pytest.approx(other[0], abs=0.01)
    assert one[1] == pytest.approx(other[1], abs=0.01)


def test_replacing_a_party_moves_its_sum_by_twice_its_clips():
    """So n_i L would not do, and 2 n_i L does."""
    x, y = np.ones((50, 1)), np.ones(50)
    problem = Problem(logistic, 50, 1, unit=False)
    gradient = LinearGradient(logistic, problem.rows())
    sums = [gradient.bounded_sum(Table(x, labels), np.zeros(2), ft.ClipNorm(0.25)) for labels in (y, 1 - y)]
    apart = float(np.linalg.norm(sums[0] - sums[1]))
    sensitivity = 2 * 50 * 0.25
    assert 0.999 * sensitivity < apart <= sensitivity * (1 + 1e-9)


def test_a_party_that_holds_more_than_it_said_is_shrunk_to_what_it_said():
    quiet = ClientNoise(1e-2, records=10)
    released = quiet.release(np.array([300.0, 400.0]), ft.ClipNorm(2.0), SeededStream(0))
    assert released == pytest.approx([12.0, 16.0], abs=0.2)
    x, y = rows(20)
    clients = Simulated(Table(x, y), [0, 20], budget(unit="party"), sizes=[10])
    with pytest.raises(InvalidValue, match=r"more records than their public number"):
        ft.run(sgd2(clients, Problem(logistic, 20, 3)))


@pytest.mark.parametrize("unit", [Unit.PARTY, Unit.USER])
def test_a_whole_party_is_hidden_by_as_much_noise_as_its_records_need(unit):
    terms = Invitation(1.0, rounds=9).terms(budget(unit=unit), 10)
    assert terms.rounds == 9
    assert math.sqrt(terms.variance) == pytest.approx(sgd2_noise(budget(unit=unit), 9, records=10), rel=1e-10)


@pytest.mark.parametrize("unit", ["record", "party"])
@pytest.mark.parametrize("trust", Trust)
def test_the_sums_noise_fits_the_least_budget(trust, unit):
    """μ of all rounds from the noise in the sum alone: what the party can do to it over its deviation."""
    sizes, epsilons = [5, 40, 15], [3.0, 2.0, 1.0]
    x, y = rows(60)
    given = [ft.Budget(e, 1e-5, "replace-one", unit=unit) for e in epsilons]
    clients = Simulated.split(x, y, records=sizes, budgets=given, unit=True, stream=SeededStream(0))
    survivors = 2 if trust is Trust.DISTRIBUTED else None
    run = ft.run(
        sgd2(clients, Problem(logistic, 60, 3), rounds=7, lipschitz=0.5, trust=trust, survivors=survivors)
    )
    assert run.steps >= 7
    clips = np.array(sizes) if unit == "party" else np.ones(3)
    if trust is Trust.LOCAL:
        deviations = np.sqrt([clients.terms(user).variance for user in range(3)])
    else:
        shares = survivors or 1
        deviations = np.full(3, math.sqrt(clients.terms(0).variance * shares))
        assert len({clients.terms(user).variance for user in range(3)}) == 1  # so on one lattice
    mu = 2 * 0.5 * clips * np.sqrt(clients.done) / deviations
    allowed = np.array([own.mu for own in given])
    assert (mu <= allowed * (1 + 1e-9)).all()
    assert (mu / allowed).max() > 0.999  # somebody spends all it has
    assert clients.guarantee(1).observer is trust.observer
    assert clients.guarantee(1).unit == unit


def test_survivors_are_for_shares_only():
    x, y = rows(20)
    clients = Simulated.split(x, y, clients=2, budgets=budget())
    with pytest.raises(InvalidValue, match="survivors need distributed trust"):
        next(sgd2(clients, Problem(logistic, 20, 3), survivors=2))


@pytest.mark.parametrize("loss", [logistic, multinomial])
def test_it_learns(loss):
    x, y = rows(20_000)
    outputs = 2 if loss is multinomial else 0
    clients = Simulated.split(
        x, y, clients=40, budgets=budget(2.0), unit=True, noise="sum", stream=SeededStream(1)
    )
    u, constant = ft.run(sgd2(clients, Problem(loss, 20_000, 3, outputs=outputs), rounds=100)).w
    margins = x / np.linalg.norm(x, axis=1)[:, None] @ u + constant
    guess = margins.argmax(axis=1) if outputs else margins > 0
    assert (guess == y).mean() > 0.9


def test_precision_can_be_weighed():
    sizes, given_budgets = [100, 100], [budget(0.01), budget(10.0)]
    spread = {}
    for weights in (Weights.RECORDS, Weights.PRECISION):
        clients = parties(sizes, given_budgets)
        clients.invite(Invitation(1.0, rounds=5), weights)
        problem = Problem(logistic, 200, 3)
        spread[weights] = clients.ask(LinearGradient(logistic, problem.rows()), np.zeros(4)).variance
    assert spread[Weights.PRECISION] < 0.01 * spread[Weights.RECORDS]
    run = ft.run(
        sgd2(parties(sizes, given_budgets), problem, rounds=5, weights=Weights.PRECISION, start=np.ones(4))
    )
    assert run.steps == 5


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"radius": -1.0}, "radius"),
        ({"lipschitz": 0.0}, "lipschitz"),
        ({"convexity": -0.1}, "convexity"),
        ({"start": [1.0]}, "start"),
        ({"rounds": 0}, "rounds"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"weights": "loud"}, "weights"),
        ({"lr": lambda t: 0.1, "weights": "plain"}, "lr applies to a plain sum"),
    ],
)
def test_bad_options(options, named):
    clients = parties([3], [budget()])
    with pytest.raises(InvalidValue, match=named):
        ft.run(sgd2(clients, Problem(logistic, 3, 3), **options))
    assert clients.alive == 0


def test_a_bad_learning_rate_costs_nothing():
    clients = parties([3], [budget()])
    with pytest.raises(InvalidValue, match="lr must be a finite number > 0, got nan"):
        next(sgd2(clients, Problem(logistic, 3, 3), lr=lambda t: math.nan))
    assert clients._agents[0]._ledger.share == 0


def test_bad_noise_requests():
    with pytest.raises(InvalidValue, match="rounds"):
        sgd2_noise(budget(), 0)
    with pytest.raises(InvalidValue, match="records"):
        sgd2_noise(budget(unit="party"), 5, records=0)
    with pytest.raises(InvalidValue, match="clip"):
        sgd2_noise(budget(), 5, lipschitz=-1.0)
    with pytest.raises(InvalidValue, match="lipschitz must be given"):
        ft.run(sgd2(parties([3], [budget()]), Problem(squared, 3, 3)))
