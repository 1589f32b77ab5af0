"""Invitations, contributions, budgets: there and back, and nothing else."""

import contextlib
import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farthing.accounting.accountants import Accountant
from farthing.budget import Adjacency, Budget, Observer, Unit
from farthing.data.tables import Features
from farthing.deploy.messages import forms
from farthing.deploy.messages.forms import (
    LARGEST_WEIGHT,
    NetworkAsk,
    NetworkKind,
    Question,
    RoundId,
    pack_weights,
    unpack_update,
    unpack_weights,
)
from farthing.deploy.messages.signed import Fields, Reason, Refused
from farthing.errors import InvalidValue, Unsupported
from farthing.federated.terms import Exactly, InTurn, Invitation
from farthing.linear.losses import LinearGradient, Scores, logistic, multinomial
from farthing.queries.query import PerExample
from farthing.queries.samplers import Everyone, Poisson

POSITIVE = st.floats(1e-6, 1e6)
DRAWS = st.one_of(st.just(Everyone()), st.floats(1e-9, 1.0).map(Poisson), st.integers(1, 1000).map(Exactly))
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def there(value):
    return Fields(json.loads(json.dumps(value)))


@given(
    POSITIVE,
    DRAWS,
    st.integers(1, 10**6),
    st.none() | POSITIVE,
    st.sampled_from(Accountant.of_rounds()),
    st.integers(1, 50),
)
def test_invitations(clip, draw, rounds, noise, accountant, survivors):
    trust = "local" if noise is None else "distributed"
    given_ = Invitation(clip, draw, rounds, noise, accountant=accountant, trust=trust, survivors=survivors)
    assert forms.invitation_of(there(forms.invitation(given_))) == given_


@given(st.sampled_from(sorted(forms.invitation(Invitation(1.0)))), PLAIN)
def test_an_invitation_with_any_lie_is_refused_or_makes_sense(name, lie):
    values = forms.invitation(Invitation(1.0, rounds=5, noise_multiplier=2.0)) | {name: lie}
    with contextlib.suppress(Refused):
        found = forms.invitation_of(Fields(values))
        assert forms.invitation_of(Fields(forms.invitation(found))) == found


def test_what_cannot_be_asked_over_a_wire():
    with pytest.raises(Unsupported, match="simulated"):
        forms.invitation(Invitation(1.0, InTurn()))
    features = Features(3)
    for other in (PerExample(lambda rows, w: rows), Scores(logistic, features)):
        with pytest.raises(Unsupported, match="gradients"):
            forms.contribution(other)
    for odd in (Features(3, centre=1.0), Features(3, scale=2.0), Features(3, scale=np.eye(3))):
        with pytest.raises(Unsupported, match="as they are"):
            forms.contribution(LinearGradient(logistic, odd))


@pytest.mark.parametrize("loss", forms.LOSSES.values(), ids=forms.LOSSES)
@pytest.mark.parametrize("features", [Features(3), Features(2, intercept=0.0, radius=1.5)])
def test_contributions(loss, features):
    found = forms.contribution_of(there(forms.contribution(LinearGradient(loss, features))))
    assert found.loss == loss
    assert forms.contribution(found) == forms.contribution(LinearGradient(loss, features))


@given(st.sampled_from(["loss", "width", "intercept", "radius"]), PLAIN)
def test_a_contribution_with_any_lie_is_refused_or_makes_sense(name, lie):
    values = forms.contribution(LinearGradient(multinomial, Features(3))) | {name: lie}
    with contextlib.suppress(Refused):
        assert isinstance(forms.contribution_of(Fields(values)), LinearGradient)


@pytest.mark.parametrize(
    "text", ["", "some", "poisson", "poisson:0", "poisson:x", "exactly:0", "all:1", 3, None]
)
def test_draws_that_are_none(text):
    with pytest.raises(InvalidValue):
        forms.draw_of(text)


@given(
    POSITIVE, st.floats(0, 0.5), st.sampled_from(Adjacency), st.sampled_from(Unit), st.sampled_from(Observer)
)
def test_budgets(epsilon, delta, adjacency, unit, observer):
    budget = Budget(epsilon, delta, adjacency, unit, observer)
    assert forms.budget_of(there(forms.budget(budget))) == budget


def question():
    turn = RoundId("run-1", 3, "ab" * 16)
    gradient = LinearGradient(logistic, Features(3))
    return Question(turn, "d", Invitation(1.0), gradient, (4,), (7, "cd" * 32))


def test_questions():
    found = Question.of(there(question().header()))
    assert found.header() == question().header()
    assert found.turn.key("d") == f"d/run-1/3/{'ab' * 16}"


@given(st.sampled_from(sorted(question().header())), PLAIN)
def test_a_question_with_any_lie_is_refused_or_makes_sense(name, lie):
    with contextlib.suppress(Refused):
        found = Question.of(Fields(question().header() | {name: lie}))
        assert Question.of(Fields(found.header())).header() == found.header()


HASH = "ab" * 32


@given(
    st.sampled_from(NetworkKind),
    st.integers(1, 2**20),
    st.floats(1e-6, 1e3),
    st.floats(0, 1e3),
    st.integers(0, 9),
)
def test_a_question_is_read_as_it_was_written(kind, steps, lr, proximal, batch):
    more = {"steps": steps, "lr": lr, "proximal": proximal, "batch": batch, "cap": lr, "clip": lr}
    header = NetworkAsk("small", HASH, kind, **more).header()
    found = forms.contribution_of(Fields(header))
    assert found.header() == header == forms.contribution(found)


@pytest.mark.parametrize(
    "change",
    [
        {"hash": "ab"},
        {"hash": None},
        {"network": "a b"},
        {"kind": "code"},
        {"kind": ["steps"]},
        {"steps": 0},
        {"steps": True},
        {"steps": 2**21},
        {"lr": 0},
        {"lr": -1.0},
        {"lr": 1e300},
        {"lr": "fast"},
        {"proximal": -0.1},
        {"batch": 1},
        {"factory": "os:system"},
    ],
)
def test_anything_else_is_refused(change):
    header = NetworkAsk("small", HASH, NetworkKind.STEPS, steps=2, lr=0.5).header() | change
    with pytest.raises(Refused, match="malformed"):
        forms.contribution_of(Fields(header))


def test_weights_are_float32_and_checked_before_they_are_used():
    w = np.array([0.1, -LARGEST_WEIGHT, 3.0])
    np.testing.assert_array_equal(unpack_weights(pack_weights(w), (3,)), w.astype(np.float32))
    assert len(pack_weights(w)) == 12
    cases = {Reason.SHAPE: w[:2], Reason.NONFINITE: w * np.nan, Reason.WEIGHTS: w * 1.01}
    for reason, bad in cases.items():
        with pytest.raises(Refused) as refused:
            unpack_weights(pack_weights(bad), (3,))
        assert refused.value.reason is reason
    large = np.full(3, 1e9)
    np.testing.assert_array_equal(unpack_update(pack_weights(large), (3,)), large)


def test_a_network_without_name_or_hash_cannot_be_asked():
    bare = SimpleNamespace(described={"network": "small", "hash": "", "kind": "gradient"})
    with pytest.raises(InvalidValue, match="give the network a name and its source's hash"):
        forms.asked_of(bare)
