"""The privacy statement: every concern, in order, in words that are true."""

import math
from dataclasses import replace

import numpy as np
import pytest

import farthing as ft
from farthing.audit.auditing import Verdict
from farthing.budget import Adjacency, Budget, Guarantee, Observer, Unit
from farthing.queries.events import ApproximateEvent, DrawnEvent, FixedSizeEvent, GaussianEvent
from farthing.report import Declared, Subject, page
from farthing.report.statement import Tone, band, downwards, guess, headline, statement, upwards
from farthing.report.subject import Charge

ORDER = [
    "Who is protected",
    "What is compared",
    "How much can be learnt",
    "What was taken as public",
    "Who is trusted, who may look",
    "How the cost was added up",
    "How records were drawn",
    "Randomness and floating point",
    "What else was released",
    "Tuning",
    "Audit",
]


def item(subject, name):
    return next(one for one in statement(subject) if one.name == name)


def said(subject, name):
    one = item(subject, name)
    return " ".join((one.value, *one.meaning))


def test_every_concern_in_its_order(full):
    assert [one.name for one in statement(full)] == ORDER
    assert all(one.value and len(one.meaning) <= 6 for one in statement(full))


def test_what_epsilon_means_for_one_person(full):
    words = said(full, "How much can be learnt")
    for text in ("ε = 1", "δ = 10⁻⁵", "e^ε = 2.72", "at most 73.1 %", "strong"):
        assert text in words, text
    assert "δ times the number of records is 0.33" in words
    assert headline(full) == "ε = 1, δ = 10⁻⁵"


@pytest.mark.parametrize(
    ("epsilon", "word", "tone"), [(0.5, "strong", "calm"), (4, "usual", "care"), (20, "weak", "weak")]
)
def test_large_budgets_are_called_what_they_are(full, epsilon, word, tone):
    found = item(replace(full, records=1000, guarantee=replace(full.guarantee, epsilon=epsilon)), ORDER[2])
    assert word in " ".join(found.meaning)
    assert found.tone == tone


def test_a_delta_that_lets_a_record_out_is_warned_of(full):
    found = item(replace(full, guarantee=replace(full.guarantee, delta=1e-3)), ORDER[2])
    assert found.tone is Tone.WEAK
    assert "is 33. That is too large" in " ".join(found.meaning)
    near = item(full, ORDER[2])
    assert near.tone is Tone.CARE
    assert "is 0.33. That is large" in " ".join(near.meaning)
    assert item(replace(full, records=9_000), ORDER[2]).tone is Tone.CALM
    weak = replace(full, guarantee=replace(full.guarantee, epsilon=20.0))
    assert item(weak, ORDER[2]).tone is Tone.WEAK  # the worse of the two


@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 0.0), (1.0, 1e-5), (3.0, 0.01), (0.0001, 0.5)])
def test_nobody_guesses_better_than_told(epsilon, delta):
    """The worst pair of distributions: with δ it gives itself away, else it is randomised response."""
    likely = (1 - delta) * math.exp(epsilon) / (1 + math.exp(epsilon))
    P = [delta, likely, 1 - delta - likely, 0.0]
    Q = P[::-1]
    best = sum(max(p, q) for p, q in zip(P, Q, strict=True)) / 2
    told = guess(Guarantee(epsilon, delta, Adjacency.ADD_REMOVE, Unit.RECORD, Observer.ANYONE, "pld"))
    assert told == pytest.approx(best)


@pytest.mark.parametrize(
    ("adjacency", "text"),
    [
        (Adjacency.ADD_REMOVE, "as likely with one user as without it"),
        (Adjacency.REPLACE_ONE, "as likely with one user as with another in its place"),
        (Adjacency.ZERO_OUT, "as likely with one user as with a blank in its place"),
    ],
)
def test_what_is_compared_is_said_there_too(full, adjacency, text):
    other = replace(full, guarantee=replace(full.guarantee, unit=Unit.USER, adjacency=adjacency))
    assert text in said(other, ORDER[2])


@pytest.mark.parametrize("unit", list(Unit))
@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize("observer", list(Observer))
def test_unit_adjacency_and_observer_have_words_of_their_own(full, unit, adjacency, observer):
    one = replace(full, guarantee=replace(full.guarantee, unit=unit, adjacency=adjacency, observer=observer))
    words = [said(one, name) for name in (ORDER[0], ORDER[1], ORDER[4])]
    assert "{" not in "".join(words)
    others = replace(full, guarantee=replace(full.guarantee, unit="record", adjacency="add-remove"))
    if unit is not Unit.RECORD:
        assert words[0] != said(others, ORDER[0])
    if adjacency is not Adjacency.ADD_REMOVE:
        assert words[1] != said(others, ORDER[1])


def test_the_accountant_names_its_theorem(full, planned):
    assert "Smith & Thakurta 2022" in said(full, ORDER[5])
    words = said(Subject.of(planned[0], title="t", method="m"), ORDER[5])
    assert "60 answers were promised" in words
    assert "Zhu, Dong & Wang 2022, Thm. 10" in words


def test_the_sampler_is_the_one_that_ran(full, planned):
    assert "Every record takes part" in said(full, ORDER[6])
    assert "probability 0.1 (Poisson)" in said(Subject.of(planned[0], title="t", method="m"), ORDER[6])
    fixed = Charge(FixedSizeEvent(5, 100, GaussianEvent(2.0)))
    assert "Exactly 5 of 100" in said(replace(full, charges=(fixed,)), ORDER[6])
    seen = Charge(DrawnEvent(0.2, GaussianEvent(2.0)))
    words = said(replace(full, charges=(fixed, seen)), ORDER[6])
    assert "Several ways" in words
    assert "the draw may be seen" in words
    part = Charge(ApproximateEvent(1.0, 1e-6))
    assert "Not recorded" in said(replace(full, charges=(part,)), ORDER[6])
    assert "by lottery" in said(replace(full, sampler="by lottery"), ORDER[6])


@pytest.mark.parametrize(
    ("sampler", "text"),
    [
        (ft.Cyclic(0.1, 4), "in 3 of 12 answers at most. Each record independently with probability 0.4"),
        (
            ft.TruncatedCyclic(0.1, 4, 60, 400),
            "in 3 of 12 answers at most. Each record independently with proba",
        ),
        (ft.Arrivals(), "Each record in 1 of 12 answers, as it arrived"),
        (ft.Balanced(3, 4), "Each record once in every pass, in one of 3 turns"),
    ],
)
def test_draws_in_turns_are_told_as_such(sampler, text):
    ledger, rows = ft.Ledger(ft.Budget(8.0, 1e-5)), ft.PerExample(lambda rows, w: rows[0])
    query = ft.Query(sampler, rows, ft.ClipNorm(1.0), ft.BandedGaussian(4.0, 4))
    ledger.promise(query, 12)
    ledger.over(ft.Rows(np.ones((400, 2)))).ask(query, None)
    assert text in said(Subject.of(ledger, title="t", method="m"), ORDER[6])


def test_sound_noise_is_said_to_be(full):
    found = item(full, ORDER[7])
    assert found.tone is Tone.CALM
    assert "cryptographic" in found.value


def test_float_noise_is_no_calm_matter():
    subject = Subject.of(ft.Ledger(Budget(1.0, 1e-5), float_noise=True), title="t", method="m")
    assert subject.floats
    assert subject.guaranteed
    assert item(subject, ORDER[7]).tone is Tone.CARE
    assert "Mironov" not in said(subject, ORDER[8])


def test_a_seed_is_shouted(seeded):
    from farthing.ledger.journal import Journal

    with Journal(seeded) as journal:
        subject = Subject.of(journal, title="t", method="m")
    assert headline(subject) == "No privacy guarantee"
    for name in (ORDER[2], ORDER[7]):
        assert item(subject, name).tone is Tone.ALARM
    assert "SEEDED NOISE: no privacy at all" in said(subject, ORDER[7])


DECLARED = Declared.of(
    {
        "schema": {"source": "people.json", "sha256": "ab" * 32, "checked_by": "A. Officer, 2026-11-16"},
        "columns": [
            {"name": "age", "low": 17, "high": 90, "missing": 40},
            {"name": "born", "first": "1920-01-01", "last": "2009-12-31"},
            {"name": "<b>", "values": ["x", "y"], "other": True},
            {"name": "wage", "low": 0, "high": 1e5, "bought": True},
            {"name": "gain", "bounds": "private"},
        ],
        "target": {"name": "income", "values": ["<=50K", ">50K"]},
        "records_declared": True,
    },
    {"rows_per_person": 3, "model": "fit/model.npz", "sha256": {"model": "cd" * 32}},
)


def test_what_was_taken_as_public_is_listed_with_its_hashes(full):
    checked = replace(full, declared=DECLARED)
    assert item(checked, ORDER[3]).tone is Tone.CALM
    assert "checked by A. Officer, 2026-11-16" in said(checked, ORDER[3])
    text = page(checked)
    for fact in ("numbers from 17 to 90; a missing one counts as 40", "dates from 1920-01-01 to 2009-12-31"):
        assert fact in text
    for fact in (
        "2 values: x, y; others are one more value",
        "2 values: &lt;=50K, &gt;50K",
        "at most 3 are used",
    ):
        assert fact in text
    for fact in (
        "ab" * 32,
        "cd" * 32,
        "fit/model.npz",
        "people.json",
        "bounds that were bought from the budget",
    ):
        assert fact in text
    assert "<b>" not in text
    assert "Unchecked schema" not in text


def test_a_schema_that_nobody_checked_is_said_to_void_the_guarantee(full):
    unchecked = replace(full, declared=replace(DECLARED, checked_by=""))
    assert item(unchecked, ORDER[3]).tone is Tone.CARE
    assert "there is no guarantee" in said(unchecked, ORDER[3])
    assert '<section class="banner care"><strong>Unchecked schema' in page(unchecked)
    strong = replace(unchecked, records=1000)  # so that ε and δ alone would have a green banner
    assert '"banner calm"' not in page(strong)
    assert '"banner calm"' in page(replace(strong, declared=DECLARED))
    assert item(full, ORDER[3]).tone is Tone.CARE  # nothing is known of it


def test_other_releases_and_tuning(full):
    assert "test records" in said(full, ORDER[8])
    assert item(full, ORDER[8]).tone is Tone.CARE
    noted = replace(full, guarantee=replace(full.guarantee, note="the number of records is taken as public"))
    assert "The number of records is taken as public." in said(noted, ORDER[8])
    quiet = replace(full, released=(), tuning="")
    assert "as far as this report knows" in said(quiet, ORDER[8])
    assert item(quiet, ORDER[9]).tone is Tone.CARE
    assert "Not included" in said(full, ORDER[9])


def test_the_strongest_attack_is_told_rounded_down(full):
    words = said(full, ORDER[10])
    assert "at least 3.21 where 8 is claimed" in words
    assert "not a proof" in words
    assert "The power of these attacks is not known" in words
    audit = [(name, replace(verdict, caught=9.87654)) for name, verdict in full.audit]
    assert "had ε really been 9.877 or more" in said(replace(full, audit=tuple(audit)), ORDER[10])
    weak = [(name, replace(verdict, caught=math.inf)) for name, verdict in full.audit]
    assert "none of them could have refuted" in said(replace(full, audit=tuple(weak)), ORDER[10])
    assert "Not run" in said(replace(full, audit=()), ORDER[10])


def test_a_broken_claim_is_no_guarantee(full):
    verdict = Verdict(math.inf, Budget(1.0, 1e-5), 100, 0.99, "a canary")
    broken = replace(full, audit=(*full.audit, ("descent", verdict)))
    assert not broken.guaranteed
    assert item(broken, ORDER[10]).tone is Tone.ALARM
    assert "BROKEN" in said(broken, ORDER[10])
    assert item(broken, ORDER[2]).tone is Tone.ALARM


def test_only_attacks_on_this_method_speak_of_it(full):
    fine, broken = (Verdict(low, Budget(1.0, 1e-5), 100, 0.99, "a canary") for low in (0.3, math.inf))
    other = replace(full, method="dpagd", audit=(("descent", fine), ("adadp-as-published", broken)))
    assert other.guaranteed
    assert item(other, ORDER[10]).value == "Not run on this method"
    assert "say nothing about this one: descent, adadp-as-published" in said(other, ORDER[10])
    for method, name in (
        ("auto", "descent"),
        ("auto", "least-squares"),
        ("sgd-ma", "dpsgd-step"),
        ("dpagd", "dpagd"),
    ):
        one = replace(full, method=method, audit=((name, fine), ("pca", broken)))
        assert item(one, ORDER[10]).value == "Not refuted"
        assert "1 attack tried." in said(one, ORDER[10])
        assert not replace(one, audit=((name, broken),)).guaranteed


@pytest.mark.parametrize(
    ("epsilon", "tone", "factor"),
    [
        (0.5, "calm", "1.65"),
        (1.0, "calm", "2.72"),
        (1.1, "care", "3"),
        (10.0, "care", "22,026"),
        (10.1, "weak", "24,343"),
        (1000.0, "weak", "1.97 × 10⁴³⁴"),
        (700.0, "weak", "1.01 × 10³⁰⁴"),
        (800.0, "weak", "2.73 × 10³⁴⁷"),
    ],
)
def test_a_banner_has_the_colour_of_its_epsilon(full, epsilon, tone, factor):
    large = replace(full, records=1000, guarantee=replace(full.guarantee, epsilon=epsilon))
    assert item(large, ORDER[2]).tone == tone
    assert f"e^ε = {factor} times" in said(large, ORDER[2])
    first = page(large).split('class="banner ')[1]
    assert first.startswith(f'{tone}"')
    assert band(epsilon)[1].split(":")[0] in first


@pytest.mark.parametrize(("delta", "tone", "word"), [(1e-5, "care", "large"), (1e-3, "weak", "too large")])
def test_a_banner_has_the_colour_of_its_delta(full, delta, tone, word):
    first = page(replace(full, guarantee=replace(full.guarantee, delta=delta))).split('class="banner ')[1]
    assert first.startswith(f'{tone}"')
    assert f"That is {word}. At 1 or more" in first.split("</section>")[0]
    assert "strong protection" not in first.split("</section>")[0]  # that its ε is small does not make it so


def test_a_ledger_in_memory_is_not_said_to_be_on_disk(full, tmp_path):
    assert not full.durable
    assert "on disk" not in page(full)
    assert '<section class="banner care"><strong>Ledger in memory' in page(full)
    assert "nothing can be compared with it" in page(full)
    with ft.Ledger(Budget(1.0, 1e-5), journal=tmp_path / "a.ledger") as ledger:
        kept = page(Subject.of(ledger, title="t", method="m"))
    assert "a charge is on disk before its answer is computed" in kept
    assert "Ledger in memory" not in kept


def test_what_else_the_ledger_holds_is_told(full):
    words = said(replace(full, budget=Budget(5.0, 1e-5), share=0.2, partial=True), ORDER[2])
    assert "allows ε = 5" in words
    assert "20 % of that is charged" in words
    assert "interrupted" in words


@pytest.mark.parametrize(
    ("value", "up", "down"), [(0.99991, "1", "0.999"), (1.00001, "1.001", "1"), (2.5, "2.5", "2.5")]
)
def test_bounds_are_rounded_to_the_safe_side(value, up, down):
    assert upwards(value) == up
    assert downwards(value) == down


@pytest.mark.parametrize(
    "method", ["auto", "auto, clip=1", "auto, clip=1 (boosted)", "auto (linear, as asked)"]
)
def test_attacks_on_the_method_are_its_own_whatever_its_settings(full, method):
    assert [name for name, _ in replace(full, method=method).own_audit] == ["descent"]
    assert replace(full, method="objective (auto)").own_audit == replace(full, method="auto").own_audit
    assert replace(full, method="objective, auto=1").own_audit == ()
