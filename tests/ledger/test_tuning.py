"""The best of a random number of runs: paid for before the first, priced alike by the verifier."""

import io
import math
import warnings

import numpy as np
import pytest

import farthing as ft
from farthing.accounting import tuning
from farthing.accounting.filters import BasicFilter, RdpFilter
from farthing.ledger.tuning import best_of
from farthing.ledger.verifier import verify
from farthing.noise.lattice import SeededStream
from farthing.queries.events import GaussianEvent, PoissonEvent, RepeatedEvent, TuningEvent

ROWS = ft.Rows(np.ones((100, 1)))
BUDGET = ft.Budget(1.0, 1e-5)
BATCH = ft.Poisson(0.1).amplify(ft.Gaussian(3.0))


def _query(noise: float, sampler=None) -> ft.Query:
    total = ft.PerExample(lambda rows, w: rows[0])
    return ft.Query(sampler or ft.Everyone(), total, ft.ClipNorm(1.0), ft.Gaussian(noise))


def _noise(ledger: ft.Ledger) -> float:
    return 1 / ledger.filter.mu * (1 + 1e-9)


def _exported(ledger: ft.Ledger) -> list[str]:
    ledger.journal.export(file := io.StringIO())
    return file.getvalue().splitlines()


def _asks(candidate, ledger):
    value = float(ledger.over(ROWS).ask(_query(_noise(ledger))).value[0])
    return value, candidate


def test_the_best_candidate_is_released_and_all_of_the_budget_is_charged(tmp_path):
    ledger = ft.Ledger(BUDGET, journal=tmp_path / "l")
    tuned = best_of(_asks, [1, 2, 3], ledger, runs=100)
    assert tuned.candidate == tuned.score
    assert isinstance(tuned.model, float)
    assert ledger.share == 1
    assert tuned.privacy.epsilon == pytest.approx(1.0, abs=1e-5)
    assert tuned.privacy.accountant == "tuning"
    assert isinstance(tuned.receipt.event, TuningEvent)
    with pytest.raises(ft.PromiseBroken):
        ledger.over(ROWS).ask(_query(1000.0))


@pytest.mark.parametrize("drawn", [1, 4])
def test_there_are_as_many_runs_as_were_drawn(drawn, monkeypatch):
    monkeypatch.setattr(tuning.RunCount, "draw", lambda self, stream: drawn)
    asked = []

    def run(candidate, own):
        found = _asks(candidate, own)
        asked.append(candidate)  # a rehearsal ends at its first question
        return found

    best_of(run, [1], ft.Ledger(BUDGET), runs=10)
    assert len(asked) == drawn


def test_the_charge_is_durable_before_the_first_run(tmp_path):
    path, seen = tmp_path / "l", []
    ledger = ft.Ledger(BUDGET, journal=path)

    def run(candidate, own):
        answer = own.over(ROWS).ask(_query(_noise(own)))
        seen.append([row.kind for row in ledger.journal.rows()])
        return answer, 0.0

    best_of(run, ["a"], ledger, runs=3)
    assert seen
    assert all("charge" in kinds for kinds in seen)


def test_a_run_cannot_ask_for_more_than_was_paid_for():
    def twice(candidate, own):
        for _ in range(2):
            own.over(ROWS).ask(_query(_noise(own)))
        return None, 1.0

    ledger = ft.Ledger(BUDGET)
    with pytest.raises(ft.NotReleased, match="every run failed"):
        best_of(twice, [0], ledger)
    assert ledger.share == 1

    def at_once(candidate, own):
        return own.over(ROWS).ask(_query(_noise(own) / 2)), 1.0

    ledger = ft.Ledger(BUDGET)
    with pytest.raises(ft.BudgetSpent):
        best_of(at_once, [0], ledger)
    assert ledger.share == 0


def test_a_plan_is_promised_to_every_run_and_nothing_else():
    plan = RepeatedEvent(BATCH, 5)

    def run(candidate, own):
        query = _query(3.0, ft.Poisson(0.1))
        assert own.promise(query, 5).left == 5
        return [own.over(ROWS).ask(query).value for _ in range(5)], candidate

    ledger = ft.Ledger(ft.Budget(2.0, 1e-5))
    tuned = best_of(run, [1, 2], ledger, plan=plan)
    assert len(tuned.model) == 5
    assert tuned.privacy.epsilon == tuning.epsilon(TuningEvent(plan, 10.0, 1.0, 1e-5), 1e-5)

    def other(candidate, own):
        own.promise(_query(1e6), 1)
        return None, 0.0

    with pytest.raises(ft.PromiseBroken, match="plan="):
        best_of(other, [1], ft.Ledger(ft.Budget(2.0, 1e-5)), plan=plan)


def test_a_run_without_a_plan_cannot_promise_one():
    with pytest.raises(ft.Unsupported, match="cannot make promises"):
        best_of(lambda c, own: (own.promise(_query(3.0, ft.Poisson(0.1))), 0.0), [1], ft.Ledger(BUDGET))


def test_a_plan_that_does_not_fit_charges_nothing():
    ledger = ft.Ledger(BUDGET)
    with pytest.raises(ft.BudgetSpent):
        best_of(lambda c, own: (None, 0.0), [1], ledger, plan=RepeatedEvent(BATCH, 100_000))
    assert ledger.share == 0


def test_a_ledger_of_basic_composition_pays_a_part_and_goes_on():
    ledger = ft.Ledger(ft.Budget(2.0, 1e-5), filter=BasicFilter)
    tuned = best_of(_asks, [1, 2], ledger, 1.0, 5e-6)
    assert tuned.privacy.delta == 5e-6
    assert tuned.privacy.epsilon == pytest.approx(1.0, abs=1e-5)
    assert ledger.rest.epsilon == pytest.approx(1.0, abs=1e-4)
    assert ledger.allot().budget.epsilon == pytest.approx(1.0, abs=1e-4)


@pytest.mark.usefixtures("twenty_runs")
def test_failures_inside_runs_are_swallowed_and_count_as_the_worst():
    def fails(candidate, own):
        own.over(ROWS).ask(_query(_noise(own)))
        if candidate:
            raise ValueError("a record was 17")
        return "fine", -5.0

    tuned = best_of(fails, [0, 1], ft.Ledger(BUDGET), runs=200)
    assert (tuned.candidate, tuned.model) == (0, "fine")
    with pytest.raises(ft.NotReleased) as caught:
        best_of(fails, [1], ft.Ledger(BUDGET))
    assert "17" not in str(caught.value)
    with pytest.raises(ValueError, match="17"):  # made-up records, for tests
        best_of(fails, [1], ft.Ledger(BUDGET, stream=SeededStream(0)))


@pytest.mark.usefixtures("twenty_runs")
def test_a_score_that_is_no_number_is_the_worst():
    def run(candidate, own):
        return candidate, candidate

    assert best_of(run, [math.nan, -1e9], ft.Ledger(BUDGET), runs=200).model == -1e9


def test_what_runs_assume_is_written_down_once():
    def run(candidate, own):
        _asks(candidate, own)
        own.note("an assumption")
        return None, 0.0

    ledger = ft.Ledger(BUDGET)
    assert best_of(run, [1], ledger).privacy.note == "an assumption"


@pytest.mark.usefixtures("twenty_runs")
def test_runs_that_are_not_released_leave_no_note_and_no_warning():
    """How many runs there were is secret, and so are the answers of all but the best."""
    places = iter(range(100))

    def run(candidate, own):
        answer, place = float(own.over(ROWS).ask(_query(_noise(own))).value[0]), next(places)
        own.note(f"run {place}")
        warnings.warn(f"run {place} got {answer}", UserWarning, stacklevel=2)
        return place, place

    ledger = ft.Ledger(BUDGET)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        tuned = best_of(run, [1], ledger)
    assert tuned.model == 19
    assert tuned.privacy.note == "run 19"
    assert not said


def test_candidates_may_be_drawn_by_a_function():
    drawn = []

    def uniform(seed):
        drawn.append(np.random.default_rng(seed).uniform())
        return drawn[-1]

    tuned = best_of(lambda c, own: (None, c), uniform, ft.Ledger(BUDGET), runs=200)
    assert tuned.candidate == max(drawn[1:])  # the first one was rehearsed


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"runs": 0.5}, "mean number of runs"),
        ({"runs": 0}, "runs must be"),
        ({"distribution": "normal"}, "geometric"),
        ({"epsilon": 0.5}, "both"),
        ({"candidates": []}, "at least one"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_charged(options, said):
    ledger = ft.Ledger(BUDGET)
    with pytest.raises(ft.InvalidValue, match=said):
        best_of(_asks, **{"candidates": [1], "ledger": ledger, **options})
    assert ledger.share == 0


def test_what_is_no_function_is_refused_before_the_charge():
    ledger = ft.Ledger(BUDGET)
    with pytest.raises(ft.InvalidValue, match="a candidate and a ledger, got NoneType"):
        best_of(None, [1], ledger)
    assert ledger.share == 0


def test_a_ledger_that_was_asked_or_another_filter_is_told_what_to_do():
    ledger = ft.Ledger(BUDGET)
    ledger.over(ROWS).ask(_query(100.0))
    with pytest.raises(ft.Unsupported, match="BasicFilter"):
        best_of(_asks, [1], ledger)
    ledger = ft.Ledger(BUDGET, filter=RdpFilter)
    ledger.over(ROWS).ask(_query(100.0))
    with pytest.raises(ft.Unsupported, match="BasicFilter"):
        best_of(_asks, [1], ledger, 0.5, 1e-6)


def test_a_seeded_ledger_says_that_nothing_is_private():
    for filter in (None, BasicFilter):
        tuned = best_of(_asks, [1], ft.Ledger(BUDGET, filter=filter, stream=SeededStream(0)))
        assert math.isinf(tuned.privacy.epsilon)


@pytest.mark.parametrize("distribution", ["geometric", "logarithmic", "poisson"])
@pytest.mark.parametrize("filter", [None, BasicFilter])
def test_the_verifier_prices_a_tuning_alike(tmp_path, distribution, filter):
    ledger = ft.Ledger(BUDGET, journal=tmp_path / "l", filter=filter)
    best_of(_asks, [1], ledger, 0.9, 1e-5, distribution=distribution, runs=12)
    found = verify(_exported(ledger))
    assert found.code == 0, found
    assert found.spent[0] <= 0.9 <= found.spent[1] * 1.05


def test_the_verifier_prices_a_plan_alike_and_finds_a_run_that_was_charged_alone(tmp_path):
    plan = RepeatedEvent(PoissonEvent(0.1, GaussianEvent(3.0)), 20)
    ledger = ft.Ledger(ft.Budget(3.0, 1e-5), journal=tmp_path / "l", filter=BasicFilter)
    tuned = best_of(lambda c, own: (None, 0.0), [1], ledger, 3.0, 1e-5, plan=plan)
    found = verify(_exported(ledger))
    assert found.code == 0, found
    assert found.spent[0] <= tuned.privacy.epsilon <= found.spent[1] * 1.05


def test_a_charge_of_one_run_instead_of_the_best_of_ten_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "price", lambda event, adjacency: (0.66, event.delta))
    ledger = ft.Ledger(BUDGET, journal=tmp_path / "l", filter=BasicFilter)
    best_of(_asks, [1], ledger)
    found = verify(_exported(ledger))
    assert found.code == 1, found


def _counts(times: int) -> np.ndarray:
    """How many runs so many tunings of mean 4 made."""
    counts = []
    for _ in range(times):
        counts.append(-1)  # one rehearsal each

        def run(candidate, own, counts=counts):
            counts[-1] += 1
            return None, 0.0

        best_of(run, lambda seed: 0, ft.Ledger(BUDGET), runs=4.0)
    return np.array(counts)


def test_the_number_of_runs_is_random():
    """25 geometric numbers have two values with probability below 1e-8."""
    assert len(set(_counts(25).tolist())) > 2


@pytest.mark.slow
def test_the_number_of_runs_has_its_mean():
    """400 geometric numbers of mean 4: their mean is off by 1 with probability below 1e-6 (Chernoff)."""
    assert abs(_counts(400).mean() - 4.0) < 1
