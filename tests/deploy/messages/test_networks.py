"""Questions about networks as messages: what is written is read again, and anything else is refused."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farthing.deploy.messages import forms
from farthing.deploy.messages.networks import (
    LARGEST_WEIGHT,
    NetworkAsk,
    NetworkKind,
    pack_weights,
    unpack_update,
    unpack_weights,
)
from farthing.deploy.messages.signed import Fields, Reason, Refused
from farthing.errors import InvalidValue

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
