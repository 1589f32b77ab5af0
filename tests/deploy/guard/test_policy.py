"""Policies: what is understood, and that nothing is ignored."""

import pytest

from farthing.budget import Adjacency, Observer
from farthing.deploy.guard.policy import Limits, Policy
from farthing.errors import InvalidValue
from farthing.federated.terms import Exactly, Trust
from farthing.queries.samplers import Everyone, Poisson

KEYS = ["aa" * 32, "bb" * 32, "cc" * 32]
WHOLE = f"""
dataset = "ward-7"
records = "ward.npz"
size = 500
ledger = "ward.ledger"
socket = "s"
key = "ward.key"
coordinators = ["{KEYS[0]}"]
[budget]
epsilon = 1.0
delta = 1e-6
[limits]
noise = 2.0
clip = 3
rounds = 1000
draws = ["all", "poisson:0.1", "exactly:1"]
losses = ["logistic", "multinomial"]
width = 108
outputs = 3
"""


def load(tmp_path, text):
    path = tmp_path / "policy.toml"
    path.write_text(text)
    return Policy.load(path)


def test_a_policy_is_read_as_it_is_written(tmp_path):
    policy = load(tmp_path, WHOLE)
    assert policy.records == tmp_path / "ward.npz"
    assert policy.log == tmp_path / "ward.ledger.answers"
    assert policy.budget.observer is Observer.SERVER
    assert policy.budget.adjacency is Adjacency.ADD_REMOVE
    assert policy.limits.draws == (Everyone(), Poisson(0.1), Exactly(1))
    assert policy.limits.coordinates == 3 * 109
    assert policy.coordinators == (bytes.fromhex(KEYS[0]),)
    elsewhere = load(tmp_path, 'answers = "/elsewhere/log"\n' + WHOLE)
    assert str(elsewhere.log) == "/elsewhere/log"


def test_distributed_noise_names_those_enrolled(tmp_path):
    parties = f'trust = "distributed"\ncolluding = 1\n[parties]\na = "{KEYS[1]}"\nb = "{KEYS[2]}"\n'
    policy = load(tmp_path, WHOLE + parties)
    assert policy.limits.trust is Trust.DISTRIBUTED
    assert policy.budget.observer is Observer.AGGREGATE
    assert set(policy.parties) == {"a", "b"}
    with pytest.raises(InvalidValue, match="enrolled"):
        load(tmp_path, WHOLE + 'trust = "distributed"\n')
    with pytest.raises(InvalidValue, match="a key of its own"):
        load(tmp_path, WHOLE + parties.replace(KEYS[2], KEYS[1]))
    with pytest.raises(InvalidValue, match=r"below the number of \[parties\], 2, got 2"):
        load(tmp_path, WHOLE + parties.replace("colluding = 1", "colluding = 2"))


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        ("size = 500", "", "size"),
        ("size = 500", "size = 0", "size"),
        ("size = 500", "size = 2000000000", "size must be at most 1,073,741,824"),
        ("size = 500", "size = 500\nsizes = 3", "'sizes'"),
        ("noise = 2.0", "nose = 2.0", "'nose'"),
        ("noise = 2.0", "", "noise"),
        ("noise = 2.0", "noise = -1", "noise"),
        ("noise = 2.0", "noise = 1e10", "noise must be at most"),
        ("clip = 3", "clip = nan", "clip"),
        ("clip = 3", "clip = 1e-320 #", "clip must be at least"),
        ("rounds = 1000", "rounds = 0", "rounds"),
        ("width = 108", "width = 1.5", "width"),
        ("outputs = 3", "outputs = -1", "outputs"),
        ("outputs = 3", "outputs = 2000000", "width and outputs allow 218,000,000 weights"),
        ("outputs = 3", "", "number of classes"),
        ("width = 108", 'width = 108\ntrust = "trusted"', "without noise"),
        ("width = 108", 'width = 108\ntrust = "blind"', "trust"),
        ('"exactly:1"', '"turns"', "draw"),
        ('draws = ["all", "poisson:0.1", "exactly:1"]', "draws = []", "draws"),
        ('losses = ["logistic", "multinomial"]', 'losses = ["hopes"]', "losses"),
        ('losses = ["logistic", "multinomial"]', "losses = 3", "losses"),
        ("epsilon = 1.0", "", "epsilon"),
        ("epsilon = 1.0", "epsilon = 0", "epsilon"),
        ("epsilon = 1.0", "epsilon = 1.0\ngamma = 2", "'gamma'"),
        ("delta = 1e-6", 'delta = 1e-6\nobserver = "anyone"', "not against anyone"),
        ("delta = 1e-6", 'delta = 1e-6\nobserver = "aggregate"', "not against aggregate"),
        ("[budget]", "[badger]", "badger"),
        (f'"{KEYS[0]}"', '"1234"', "public key"),
        (f'["{KEYS[0]}"]', "[]", "coordinators"),
        (f'["{KEYS[0]}"]', '"x"', "coordinators"),
        ('dataset = "ward-7"', 'dataset = "ward 7"', "dataset"),
        ('records = "ward.npz"', "records = 3", "records"),
        ("size = 500", 'size = 500\npeers = ["root"]', "peers"),
        ("size = 500", "size = 500\ngroup = -1", "group"),
        ("size = 500", "size = ", "TOML"),
        ("delta = 1e-6", "", r"\[budget\] must have an entry 'delta'"),
        ("delta = 1e-6", "delta = 0.0", "no question could be answered .* strictly between 0 and 1"),
        ("delta = 1e-6", 'delta = 1e-6\nobserver = "coordinator"', "no question .* zero-out or replace-one"),
        ("size = 500", f"size = {10**400}", "64 bits"),
        ("size = 500", 'size = 500\nanswers = "a\\u0000b"', "null characters"),
    ],
)
def test_what_is_wrong_is_named(before, after, what, tmp_path):
    assert before in WHOLE
    with pytest.raises(InvalidValue, match=what):
        load(tmp_path, WHOLE.replace(before, after))


def test_one_draw_at_least_can_be_answered(tmp_path):
    party = WHOLE.replace("delta = 1e-6", 'delta = 1e-6\nunit = "party"')
    assert load(tmp_path, party).budget.unit == "party"  # by "all" and "exactly:1"
    with pytest.raises(InvalidValue, match=r"no question could be answered .* nothing for a party"):
        load(tmp_path, party.replace('"all", "poisson:0.1", "exactly:1"', '"poisson:0.1"'))


def test_a_policy_must_be_there(tmp_path):
    with pytest.raises(InvalidValue, match="No such file"):
        Policy.load(tmp_path / "none.toml")


def test_draws_that_a_policy_allows():
    limits = Limits(noise=1.0, clip=1.0, rounds=1, draws=(Poisson(0.1), Exactly(3)))
    assert limits.allows_draw(Poisson(0.1))
    assert limits.allows_draw(Poisson(0.01))
    assert limits.allows_draw(Exactly(3))
    for other in (Poisson(0.11), Exactly(2), Everyone()):
        assert not limits.allows_draw(other)
