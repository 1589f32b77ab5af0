"""Users as arrays: the same books, draws and noise as agents asked one by one."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse, stats

import farthing as ft
from farthing.accounting import sampling
from farthing.data.tables import Features, Table
from farthing.errors import BudgetSpent, InvalidValue, Unsupported
from farthing.federated import Accountant, ClientAgent, Exactly, InTurn, Invitation, Parties, Trust, Weights
from farthing.federated.budgets import personal
from farthing.federated.draws import Indicators
from farthing.federated.simulated import Simulated
from farthing.federated.terms import ClientNoise
from farthing.linear.losses import LinearGradient, Scores, logistic, multinomial, squared
from farthing.noise.lattice import SeededStream
from farthing.queries.bounds import Kind
from farthing.queries.events import FixedSizeEvent, GaussianEvent, PoissonEvent
from farthing.queries.samplers import Everyone, Poisson

RNG = np.random.default_rng(3)
X, Y = RNG.uniform(size=(60, 2)), RNG.integers(0, 2, 60) * 1.0
GRADIENT = LinearGradient(logistic, Features(2))
MOST = 100  # rounds that the oracle can compose in a moment
DRAWS = [Everyone(), Poisson(0.3), Exactly(1), Exactly(4)]


def split(records=10, budgets=None, seed=0, **options):
    budgets = ft.Budget(1.0, 1e-6) if budgets is None else budgets
    return Simulated.split(X, Y, records=records, budgets=budgets, stream=SeededStream(seed), **options)


def true_delta(event, epsilon, rounds, adjacency):
    """δ(ε) of the plan by dp-accounting's grid, rounded down."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    match event:
        case GaussianEvent(noise):
            rate, shift = 1.0, 2.0 if adjacency == "replace-one" else 1.0
        case PoissonEvent(rate, GaussianEvent(noise)):
            shift = 1.0
        case FixedSizeEvent(size, of, GaussianEvent(noise)):
            rate, shift = size / of, 1.0 if size == of and adjacency == "zero-out" else 2.0
    if rate == 1.0:
        mu = shift * math.sqrt(rounds) / noise
        first, second = (stats.norm.cdf(sign * mu / 2 - epsilon / mu) for sign in (1, -1))
        return first - math.exp(epsilon) * second
    grid = {"pessimistic_estimate": False, "use_connect_dots": False, "value_discretization_interval": 1e-3}
    once = pld.from_gaussian_mechanism(noise, sensitivity=shift, sampling_prob=rate, **grid)
    return once.self_compose(rounds).get_delta_for_epsilon(epsilon)


@settings(max_examples=15, deadline=None)
@given(
    users=st.lists(
        st.tuples(
            st.floats(0.1, 3.0), st.sampled_from([1e-8, 1e-5]), st.integers(0, 12), st.floats(0.2, 4.0)
        ),
        min_size=1,
        max_size=4,
    ),
    draw=st.sampled_from(DRAWS),
    rounds=st.integers(1, 5),
    calibration=st.sampled_from(Accountant.of_rounds()),
    accountant=st.sampled_from(Accountant.of_rounds()),
    adjacency=st.sampled_from(["add-remove", "zero-out", "replace-one"]),
)
def test_nobody_ever_spends_more_than_its_budget(users, draw, rounds, calibration, accountant, adjacency):
    if isinstance(draw, Poisson) and adjacency == "replace-one":
        adjacency = "zero-out"  # dp-accounting has no such pair
    parts = [(X[:n], Y[:n]) for _, _, n, _ in users]
    budgets = [ft.Budget(e, d, adjacency) for e, d, _, _ in users]
    clients = Simulated.gather(parts, budgets, clip_norm=[c for *_, c in users], stream=SeededStream(1))
    clients.invite(Invitation(1.0, draw, rounds, calibration=calibration, accountant=accountant))
    settled = clients.left.copy()
    asked = 0
    while asked < 40:
        try:
            got = clients.ask(GRADIENT, np.zeros(3))
        except BudgetSpent:
            assert clients.alive == 0
            break
        assert got.count == np.sum(settled > asked)
        asked += 1
    np.testing.assert_array_equal(clients.done, np.minimum(settled, asked))
    for user, (epsilon, delta, _, clip) in enumerate(users):
        term = clients.terms(user)
        assert term.bound.clip == clip
        if settled[user]:
            event, done = term.price(clients.budgets[user]), min(int(settled[user]), MOST)
            assert true_delta(event, epsilon, done, adjacency) <= delta * (1 + 1e-6)
        event = clients.event(user)
        assert (0 if event is None else event.count) == min(settled[user], asked)
        assert clients.spent(user).epsilon == math.inf  # seeded: no guarantee


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.6])
def test_the_papers_countdown(epsilon):
    counts = {0.1: (37849, 3833979), 0.5: (38012, 3857819), 1.6: (38745, 3937953)}[epsilon]
    for accountant, rounds in zip(("sampling", "tight"), counts, strict=True):
        clients = Simulated.split(
            np.ones((200, 2)), np.ones(200), records=100, budgets=ft.Budget(epsilon, 1e-8)
        )
        clients.invite(Invitation(3.0, Poisson(0.01), 10, calibration="advanced", accountant=accountant))
        assert clients.left.tolist() == [rounds, rounds]
        noise = clients.terms(0).mechanism.noise_multiplier
        fits = [sampling.delta(noise, 0.01, n, epsilon) <= 1e-8 for n in (counts[0], counts[0] + 1)]
        assert fits == [True, False]
        clients.ask(LinearGradient(logistic, Features(2)), np.zeros(3))
        assert clients.done.tolist() == [1, 1]
        assert 0 < clients.spent(0).epsilon <= epsilon == clients.guarantee(0).epsilon
        assert clients.guarantee(0).observer == "server"


def personal_clients(noise, seed=0, rounds=1500, draw=Everyone(), n=(0, 3, 9, 9)):  # noqa: B008
    parts = [(X[:k], Y[:k]) for k in n]
    budgets = [ft.Budget(e, 1e-6) for e in (0.5, 1.0, 2.0, 2.0)]
    clients = Simulated.gather(
        parts, budgets, clip_norm=[1.0, 0.5, 0.3, 2.0], noise=noise, stream=SeededStream(seed)
    )
    clients.invite(Invitation(1.0, draw, rounds))
    return clients


def means(clients, rounds, w):
    return np.array([clients.ask(GRADIENT, w).mean for _ in range(rounds)])


@pytest.mark.parametrize("draw", DRAWS)
def test_summed_and_per_user_noise_agree_in_distribution(draw):
    w, both = np.array([0.5, -1.0, 0.2]), []
    for seed, noise in enumerate(("sum", "each")):
        clients = personal_clients(noise, seed, draw=draw)
        deviation = math.sqrt(clients.ask(GRADIENT, w).variance)
        both.append(means(clients, 1200, w) / deviation)
    for first, second in zip(both[0].T, both[1].T, strict=True):
        assert stats.ks_2samp(first, second).pvalue > 1e-3
        assert np.std(second) == pytest.approx(np.std(first), rel=0.1)
    if isinstance(draw, Everyone):  # nothing is random but the noise
        for coordinates in both:
            centred = (coordinates - coordinates.mean(axis=0)).ravel()
            assert stats.kstest(centred, "norm").pvalue > 1e-3


@pytest.mark.parametrize("weights", Weights)
@pytest.mark.parametrize("noise", ["sum", "each"])
def test_without_noise_to_speak_of_a_round_is_the_weighted_mean(weights, noise):
    parts = [(X[:k], Y[:k]) for k in (2, 5, 9)]
    clients = Simulated.gather(
        parts, ft.Budget(1e9, 1e-6), clip_norm=[0.3, 0.6, 5.0], noise=noise, stream=SeededStream(0)
    )
    clients.invite(Invitation(1.0, rounds=1), weights)
    w = np.array([1.0, 2.0, 3.0])
    sums = [
        GRADIENT.bounded_sum(Table(*part), w, ft.ClipNorm(clip))
        for part, clip in zip(parts, (0.3, 0.6, 5.0), strict=True)
    ]
    n, v = np.array([2.0, 5.0, 9.0]), np.square([0.3, 0.6, 5.0])
    weight = {"precision": n / v, "plain": 1 / n, "records": np.ones(3)}[weights]
    expected = weight @ np.array(sums) / (weight @ n)
    np.testing.assert_allclose(clients.ask(GRADIENT, w).mean, expected, atol=1e-3)


@pytest.mark.parametrize("noise", ["sum", "each"])
def test_matrices_of_weights_and_storages_agree(noise):
    ones = (RNG.random((40, 6)) < 0.4).astype(np.uint8)
    y = RNG.integers(0, 3, 40)
    gradient, w = LinearGradient(multinomial, Features(6)), RNG.normal(size=(7, 3))
    exact = gradient.bounded_sum(Table(ones, y), w, ft.ClipNorm(0.8)) / 40
    for table in (ones, ones.astype(np.float32), sparse.csr_array(ones), Indicators.of(ones, y)):
        targets = None if isinstance(table, Indicators) else y
        clients = Simulated.split(
            table, targets, records=7, budgets=ft.Budget(1e9, 1e-6), noise=noise, stream=SeededStream(0)
        )
        clients.invite(Invitation(0.8, rounds=1), Weights.RECORDS)
        np.testing.assert_allclose(clients.ask(gradient, w).mean, exact, atol=1e-3)


@pytest.mark.parametrize("draw", [Poisson(0.3), Exactly(1), Exactly(4)])
def test_agents_in_a_loop_and_the_simulation_agree_in_distribution(draw):
    invitation, w = Invitation(0.7, draw, 400), np.array([0.5, -1.0, 0.2])
    budgets = [ft.Budget(e, 1e-6, observer="server") for e in (1.0, 1.0, 2.0)]
    clients = Simulated.gather([(X[:k], Y[:k]) for k in (5, 9, 9)], budgets, stream=SeededStream(0))
    agents = [
        ClientAgent(ft.Ledger(b, stream=SeededStream(i)).over(Table(X[:k], Y[:k])), k)
        for i, (k, b) in enumerate(zip((5, 9, 9), budgets, strict=True))
    ]
    parties = Parties(agents)
    assert clients.forecast(invitation) == parties.forecast(invitation)
    clients.invite(invitation)
    parties.invite(invitation)
    np.testing.assert_array_equal(clients.left, parties.left)
    np.testing.assert_array_equal(clients.records, parties.records)
    assert list(clients.budgets) == list(parties.budgets)
    first, second = clients.ask(GRADIENT, w), parties.ask(GRADIENT, w)
    assert (first.count, first.alive) == (second.count, second.alive)
    assert first.variance == pytest.approx(second.variance)
    ours, theirs = means(clients, 390, w), means(parties, 390, w)
    for column, other in zip(ours.T, theirs.T, strict=True):
        assert stats.ks_2samp(column, other).pvalue > 1e-3


def counted_draws(draw, rounds=3000, sizes=None):
    """How often each of ten records came, from a contribution that marks them, one column a record."""
    marks = np.eye(10)
    clients = Simulated(
        Table(marks, np.zeros(10)), [0, 4, 10], ft.Budget(1e9, 1e-6), sizes=sizes, stream=SeededStream(2)
    )
    clients.invite(Invitation(1.0, draw, rounds, calibration="basic", accountant="basic"), Weights.RECORDS)
    gradient = LinearGradient(logistic, Features(10, intercept=0.0))
    # the gradient of each mark at 0 is half of it
    return np.array([np.rint(clients.ask(gradient, np.zeros(10)).total * 2) for _ in range(rounds)])


@pytest.mark.parametrize(
    ("draw", "probabilities"),
    [
        (Poisson(0.3), [0.3] * 10),
        (Exactly(1), [1 / 4] * 4 + [1 / 6] * 6),
        (Exactly(3), [3 / 4] * 4 + [3 / 6] * 6),
        (Exactly(5), [1.0] * 4 + [5 / 6] * 6),
        (Everyone(), [1.0] * 10),
    ],
)
def test_every_record_is_drawn_as_often_as_it_should(draw, probabilities):
    drawn = counted_draws(draw)
    assert set(np.unique(drawn)) <= {0.0, 1.0}
    p = np.array(probabilities)
    np.testing.assert_allclose(drawn.mean(axis=0), p, atol=4.5 * math.sqrt(0.25 / 3000))
    if isinstance(draw, Exactly):
        assert (drawn[:, :4].sum(axis=1) == min(draw.size, 4)).all()
        assert (drawn[:, 4:].sum(axis=1) == min(draw.size, 6)).all()


def test_blank_records_fill_up_to_the_public_number():
    drawn = counted_draws(Exactly(1), sizes=[8, 6])
    np.testing.assert_allclose(drawn[:, :4].mean(axis=0), 1 / 8, atol=0.03)
    assert drawn[:, :4].sum(axis=1).min() == 0


def test_turns_visit_each_record_once_a_pass_and_are_charged_by_the_pass():
    clients = Simulated.split(
        np.eye(6), np.zeros(6), records=3, budgets=ft.Budget(1e9, 1e-6, "zero-out"), stream=SeededStream(0)
    )
    clients.invite(Invitation(1.0, InTurn(), 2, calibration="basic", accountant="basic"), Weights.RECORDS)
    assert clients.left.tolist() == [6, 6]
    gradient = LinearGradient(logistic, Features(6, intercept=0.0))
    seen = [np.flatnonzero(np.rint(clients.ask(gradient, np.zeros(6)).total * 2)).tolist() for _ in range(4)]
    assert seen == [[0, 3], [1, 4], [2, 5], [0, 3]]
    assert clients.event(0).count == 2


def test_users_leave_one_by_one_and_the_rest_goes_on():
    clients = split(budgets=personal([0.5, 1.0, 2.0, 2.0, 0.5, 1.0], 1e-6))
    clients.invite(Invitation(1.0, Exactly(1), noise_multiplier=25.0))
    settled, came = clients.left.copy(), []
    while clients.alive:
        got = clients.ask(GRADIENT, np.zeros(3))
        came.append((got.count, got.alive))
    with pytest.raises(BudgetSpent, match="none of 6"):
        clients.ask(GRADIENT, np.zeros(3))
    assert came == [(int(np.sum(settled > t)), int(np.sum(settled > t + 1))) for t in range(max(settled))]
    np.testing.assert_array_equal(clients.done, settled)


def test_a_user_without_records_uploads_noise_and_stays_as_long_as_others():
    parts = [(X[:0], Y[:0]), (X[:9], Y[:9]), (X[9:18], Y[9:18])]
    for noise in ("sum", "each"):
        clients = Simulated.gather(parts, ft.Budget(1.0, 1e-6), noise=noise, stream=SeededStream(0))
        clients.invite(Invitation(1.0, Exactly(1), 5, calibration="basic", accountant="basic"))
        assert clients.left.tolist() == [5, 5, 5]
        assert clients.records.tolist() == [9, 9, 9]
        assert clients.ask(GRADIENT, np.zeros(3)).count == 3
    alone = Simulated.gather(parts[:1], ft.Budget(1.0, 1e-6), noise="each", stream=SeededStream(0))
    alone.invite(Invitation(1.0, rounds=400))
    uploads = [alone.ask(GRADIENT, np.ones(3)) for _ in range(400)]
    values = np.array([got.mean / math.sqrt(got.variance) for got in uploads])
    assert stats.kstest(values.ravel(), "norm").pvalue > 1e-3


def test_the_books_come_before_the_answer():
    class Broken:
        honours, shape = (Kind.NORM,), None

        def bounded_sum(self, records, w, bound):
            if len(records):
                raise RuntimeError("in the middle of a round")
            return np.zeros(3)

    clients = split()
    clients.invite(Invitation(1.0, rounds=5))
    with pytest.raises(RuntimeError):
        clients.ask(Broken(), np.zeros(3))
    assert clients.left.tolist() == [4] * 6
    with pytest.raises(InvalidValue, match="finite"):
        clients.ask(GRADIENT, np.array([np.nan, 0, 0]))
    assert clients.left.tolist() == [4] * 6


@pytest.mark.parametrize("noise", ["sum", "each"])
@pytest.mark.parametrize(("trust", "variance"), [("distributed", 6 / 4), ("trusted", 1.0)])
def test_who_adds_the_noise(trust, variance, noise):
    clients = split(budgets=ft.Budget(1.0, 1e-6), noise=noise)
    invitation = Invitation(2.0, noise_multiplier=80.0, trust=trust, survivors=4)
    deviation = clients.forecast(invitation).deviation
    clients.invite(invitation)
    assert clients.guarantee(0).observer == Trust(trust).observer
    got = [clients.ask(GRADIENT, np.zeros(3)) for _ in range(200)]
    assert got[0].variance == pytest.approx(variance * (160.0 / 60) ** 2)
    assert deviation == pytest.approx(math.sqrt(got[0].variance))
    values = np.array([g.mean for g in got]) / deviation
    centred = values - GRADIENT.bounded_sum(Table(X, Y), np.zeros(3), ft.ClipNorm(2.0)) / 60 / deviation
    assert stats.kstest(centred.ravel(), "norm").pvalue > 1e-3


def test_too_few_survivors_end_a_round_of_shares():
    clients = split(budgets=personal([0.5, 2, 2, 2, 2, 2], 1e-6))
    clients.invite(Invitation(1.0, noise_multiplier=40.0, trust="distributed", survivors=6))
    while clients.left[0]:
        clients.ask(GRADIENT, np.zeros(3))
    with pytest.raises(BudgetSpent, match="5 of 6"):
        clients.ask(GRADIENT, np.zeros(3))
    assert clients.left[0] == 0 < clients.left[1]
    with pytest.raises(InvalidValue, match="client 2 clips at 2"):
        split(clip_norm=[1, 1, 2, 1, 1, 1]).invite(
            Invitation(1.0, noise_multiplier=40.0, trust="distributed")
        )


class Hidden:
    """A gradient that cannot be told from any other contribution."""

    honours, shape = ("ClipNorm(clip)",), None

    def __init__(self, inner):
        self.bounded_sum = inner.bounded_sum


def test_other_contributions_than_gradients_are_summed_client_by_client_or_in_groups():
    budgets = personal(
        [1e12, 4e12] * 3, 1e-6
    )  # two levels: under precision two weights, and hardly any noise
    expected = []
    for noise in ("each", "sum"):
        clients = split(noise=noise, budgets=budgets)
        clients.invite(Invitation(1.0, rounds=5))
        by_rows, by_groups = (clients.ask(one, np.zeros(3)) for one in (GRADIENT, Hidden(GRADIENT)))
        np.testing.assert_allclose(by_rows.mean, by_groups.mean, atol=1e-4)
        assert by_rows.variance == by_groups.variance
        expected.append(by_rows.mean)
    np.testing.assert_allclose(*expected, atol=1e-4)
    with pytest.raises(Unsupported, match=r"honours ClipValue"):
        clients.ask(Scores(logistic, Features(2)), np.zeros((3, 4)))


class Picky(Hidden):
    """A gradient that fails on rows with a feature above 5."""

    def __init__(self, inner):
        def sums(table, w, bound):
            if any((block.x > 5).any() for block in table.blocks(inner.features)):
                raise ValueError
            return inner.bounded_sum(table, w, bound)

        self.bounded_sum = sums


LINE = LinearGradient(squared, Features(2))


@pytest.mark.parametrize(
    ("gradient", "row", "label"),
    [(Picky(GRADIENT), 9.0, 1.0), (LINE, 1e308, 1e308)],
)
def test_a_record_that_fails_leaves_every_upload_on_its_own_lattice(gradient, row, label):
    for features, target in (([0.1, 0.2], 1.0), ([row, row], label)):
        parts = [(X[:4], Y[:4]), (np.vstack([X[:3], features]), np.append(Y[:3], target))]
        clients = Simulated.gather(parts, ft.Budget(1.0, 1e-6), noise="each")
        clients.invite(Invitation(1.0, rounds=5), Weights.RECORDS)
        term = clients.terms(0)
        cell = term.mechanism.grid(term.bound, 3)[1]
        total = clients.ask(gradient, np.zeros(3)).total
        np.testing.assert_allclose(np.rint(total / cell) * cell, total, rtol=1e-12, atol=0)


def test_a_seed_makes_a_run_again():
    def values(seed, noise):
        clients = split(seed=seed, noise=noise)
        clients.invite(Invitation(1.0, Exactly(2), 5, calibration="basic", accountant="basic"))
        return means(clients, 3, np.ones(3))

    for noise in ("sum", "each"):
        np.testing.assert_array_equal(values(4, noise), values(4, noise))
        assert not np.array_equal(values(4, noise), values(5, noise))


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: split(budgets=[ft.Budget(1.0, 1e-6)] * 5), "5 for 6"),
        (lambda: split(budgets=[1.0] * 6), "client 0 must have a Budget"),
        (lambda: split(clip_norm=[1.0, 1.0, 0.0, 1.0, 1.0, 1.0]), r"clip_norm of client 2 .* 0\.0"),
        (lambda: split(clip_norm=[1.0, math.nan, 1.0, 1.0, 1.0, 1.0]), "clip_norm of client 1 .* nan"),
        (lambda: split(clip_norm=[1.0]), "got \\(1,\\)"),
        (lambda: split(noise="some"), "noise must be"),
        (lambda: split(records=0), "records"),
        (lambda: split(records=[30, 20]), "sum to the number of rows"),
        (lambda: split(records=[30, 30], clients=3), "not for 3"),
        (lambda: split(records=10, clients=7), "make 6 clients"),
        (lambda: split(records=None), "clients"),
        (lambda: personal([1.0, 0.0], 1e-6), r"epsilon of client 1 .* 0\.0"),
        (lambda: personal([-1.0, 1.0], 1e-6), "epsilon of client 0"),
        (lambda: personal([1.0, math.nan], 1e-6), "epsilon of client 1 .* nan"),
        (lambda: personal([1.0, 1.0], [1e-6, 1.0]), "delta of client 1"),
        (lambda: personal([1.0, 1.0], [1e-6] * 3), "epsilon must be one number"),
        (lambda: Simulated.gather([], ft.Budget(1.0, 1e-6)), "at least one client"),
        (lambda: Simulated.gather([(X, Y), (X[:, :1], Y)], ft.Budget(1, 1e-6)), "client 1 .* width 2"),
        (lambda: Simulated.gather([(X, Y), (X, Y[:3])], ft.Budget(1, 1e-6)), "client 1 .* target per row"),
        (lambda: Simulated(Table(X, Y), [0, 50], ft.Budget(1, 1e-6)), "offsets"),
        (lambda: Simulated(Table(X, Y), [0, 30, 20, 60], ft.Budget(1, 1e-6)), "offsets"),
        (lambda: Simulated(Table(X, Y), [0, 60], ft.Budget(1, 1e-6), sizes=[0]), "records of client 0"),
        (lambda: Simulated(Table(X, Y), [0, 60], ft.Budget(1, 1e-6), sizes=[0.5]), "whole numbers"),
    ],
)
def test_bad_input_is_named(make, what):
    with pytest.raises(InvalidValue, match=what):
        make()


@pytest.mark.parametrize("storage", [np.asarray, sparse.csr_array])
@pytest.mark.parametrize("noise", ["sum", "each"])
def test_what_is_not_finite_counts_as_nothing_and_names_nobody(storage, noise):
    bad, wrong = X.copy(), Y.copy()
    bad[37, 1], wrong[0] = math.inf, math.nan
    values = []
    for other in (0.0, 5.0):
        bad[[0, 37], 0] = other
        options = {"records": 10, "budgets": ft.Budget(1.0, 1e-6), "noise": noise, "stream": SeededStream(1)}
        clients = Simulated.split(storage(bad), wrong, **options)
        clients.invite(Invitation(clip_norm=1.0, rounds=5))
        values.append(clients.ask(LinearGradient(logistic, Features(2)), np.zeros(3)).mean)
    np.testing.assert_array_equal(*values)
    assert np.isfinite(values[0]).all()


def test_clients_are_invited_once_and_before_they_are_asked():
    clients = split()
    with pytest.raises(InvalidValue, match="invited"):
        clients.ask(GRADIENT, np.zeros(3))
    clients.invite(Invitation(1.0))
    with pytest.raises(InvalidValue, match="agreed once"):
        clients.invite(Invitation(1.0))


def test_rows_are_dealt_evenly_or_as_told():
    evenly = Simulated.split(X, Y, clients=7, budgets=ft.Budget(1.0, 1e-6))
    assert (len(evenly), evenly.records.sum(), np.ptp(evenly.records)) == (7, 60, 1)
    told = split(records=[10, 0, 50], budgets=ft.Budget(1.0, 1e-6))
    assert len(told) == 3
    assert len(told.budgets[1:]) == 2


def test_all_records_of_a_user_are_priced_and_bounded_together():
    mechanism, bound = ClientNoise(8.0, records=4), ft.ClipNorm(2.0)
    assert mechanism.unit_event() == GaussianEvent(2.0)
    for sampled in (False, True):
        assert mechanism.event(bound, ft.Adjacency.ADD_REMOVE, sampled) == GaussianEvent(2.0)
    quiet = ClientNoise(1e-9, records=4)  # more records than were said: as far as four of norm 2 reach
    released = quiet.release(np.array([300.0, 400.0]), bound, SeededStream(0))
    np.testing.assert_allclose(released, [4.8, 6.4], rtol=1e-6)
    np.testing.assert_allclose(quiet.release(np.array([3.0, 4.0]), bound, SeededStream(0)), [3.0, 4.0])


def test_who_clips_lower_adds_as_much_noise_where_all_share_it():
    invitation = Invitation(3.0, noise_multiplier=200.0, trust=Trust.TRUSTED)
    own, lower = (invitation.terms(ft.Budget(1.0, 1e-6), 10, clip) for clip in (3.0, 1.5))
    assert (lower.mechanism.noise_multiplier, own.mechanism.noise_multiplier) == (400.0, 200.0)
    assert lower.variance == pytest.approx(own.variance) == pytest.approx(600.0**2)


@pytest.mark.parametrize("unit", ["user", "party"])
def test_a_client_protected_as_a_whole_adds_noise_for_each_of_its_records(unit):
    invitation = Invitation(2.0, rounds=5)
    whole, record = (
        invitation.terms(ft.Budget(1.0, 1e-6, unit=one, observer="server"), 7) for one in (unit, "record")
    )
    assert whole.mechanism == ClientNoise(whole.mechanism.noise_multiplier, records=7)
    assert whole.mechanism.noise_multiplier == pytest.approx(7 * record.mechanism.noise_multiplier)
