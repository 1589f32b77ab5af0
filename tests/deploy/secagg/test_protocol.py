"""Sums are exact, whoever drops out when; and nobody's seed and key ever both come out."""

import hashlib
import itertools

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import farthing as ft
from farthing.deploy.messages.signed import Reason, Refused, Signer
from farthing.deploy.secagg import protocol as secagg
from farthing.deploy.secagg import protocol as shamir
from farthing.deploy.secagg.masked_noise import Masked
from farthing.deploy.secagg.protocol import (
    ADVERT,
    MASK_KEY,
    SEED,
    Aggregator,
    Member,
    add_mask,
    least_threshold,
    pack_words,
    signed_words,
    unpack_words,
    word_bytes,
)
from farthing.federated.terms import Share
from farthing.noise.lattice import SeededStream

SESSION = hashlib.sha256(b"session").digest()
SIGNERS = {f"p{i:03}": Signer.new() for i in range(100)}


class Run:
    """A session, step by step; who is named in ``gone`` leaves before that step."""

    def __init__(self, n, *, survivors=1, colluding=0, threshold=None, session=SESSION):
        self.signers = dict(itertools.islice(SIGNERS.items(), n))
        self.enrolled = {name: signer.public for name, signer in self.signers.items()}
        self.members = {
            name: Member(session, name, signer, self.enrolled, survivors=survivors, colluding=colluding)
            for name, signer in self.signers.items()
        }
        self.threshold = threshold or least_threshold(n, colluding, survivors)

    def set_up(self, gone=()):
        adverts = {name: member.advertise() for name, member in self.members.items()}
        self.server = Aggregator(SESSION, self.enrolled, adverts)
        roster = self.server.settle(self.threshold)
        here = {name: m for name, m in self.members.items() if name not in gone}
        self.routed = self.server.route({n: m.share(roster.adverts, self.threshold) for n, m in here.items()})
        return self

    def upload(self, vectors, gone=(), each=8):
        size = len(next(iter(vectors.values())))
        for name, boxes in self.routed.items():
            if name not in gone:
                masked = vectors[name].view(np.uint64) + self.members[name].mask(boxes, size)
                self.server.add(name, unpack_words(pack_words(masked, each), size, each))
        return self

    def finish(self, gone=(), silent=()):
        arrived = self.server.arrived
        signed = {n: self.members[n].consent(arrived) for n in arrived if n not in gone}
        consents = self.server.consents(signed)
        self.revealed = {n: self.members[n].reveal(consents) for n in consents if n not in silent}
        return self.server.result(self.revealed)


def vectors(n, size, seed=0, reach=2**40):
    rng = np.random.default_rng(seed)
    return {name: rng.integers(-reach, reach, size) for name in itertools.islice(SIGNERS, n)}


def refused(call, *arguments):
    with pytest.raises(Refused) as caught:
        call(*arguments)
    return caught.value.reason


@given(st.integers(2, 7), st.integers(1, 40), st.data())
@settings(max_examples=40, deadline=None)
def test_sums_are_exact_whoever_leaves_when(n, size, data):
    run, given_ = Run(n), vectors(n, size, seed=n * 100 + size)
    spare = n - run.threshold
    leaving = data.draw(st.permutations(sorted(run.members)))[:spare]
    steps = [data.draw(st.sampled_from(["share", "mask", "consent", "reveal"])) for _ in leaving]
    gone = {step: {n for n, s in zip(leaving, steps, strict=True) if s == step} for step in set(steps)}
    run.set_up(gone.get("share", ())).upload(given_, gone.get("mask", ()))
    total = run.finish(gone.get("consent", ()), gone.get("reveal", ()))
    here = [name for name in given_ if name not in gone.get("share", set()) | gone.get("mask", set())]
    assert run.server.arrived == sorted(here)
    np.testing.assert_array_equal(total.view(np.int64), sum(given_[name] for name in here))


@pytest.mark.slow
def test_a_hundred_parties_a_hundred_thousand_coordinates():
    run, given_ = Run(100, survivors=60, colluding=20), vectors(100, 100_000, reach=2**30)
    gone = sorted(given_)[::10]
    total = run.set_up().upload(given_, gone, each=6).finish()
    expected = sum(vector for name, vector in given_.items() if name not in gone)
    np.testing.assert_array_equal(signed_words(total, 6), expected)


def test_what_is_sent_is_masked_anew_each_time():
    zeros = {name: np.zeros(4096, np.int64) for name in itertools.islice(SIGNERS, 3)}
    sent = []
    for _ in range(2):
        run = Run(3).set_up()
        sent += [run.members[name].mask(run.routed[name], 4096) for name in zeros]
    for one, other in itertools.combinations(sent, 2):
        assert not np.any(one == other)
    top = np.concatenate(sent) >> np.uint64(56)
    counts = np.bincount(top.astype(np.int64), minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-9


def test_the_mask_of_a_pair_is_the_documented_one():
    """Recomputed with the primitives alone: X25519, HKDF by hand, AES-256 in counter mode."""
    run = Run(2).set_up()
    first, second = (run.members[name] for name in ("p000", "p001"))
    roster, size = run.server.roster, 300_000  # more than one chunk
    masks = [m.mask(run.routed[n], size) for n, m in (("p000", first), ("p001", second))]

    def derived(secret, *about):
        import hmac

        info = b"".join(len(part).to_bytes(4, "big") + part for part in about)
        key = hmac.digest(b"farthing secagg 1", secret, "sha256")
        return hmac.digest(key, info + b"\1", "sha256")

    def stream(key):
        cipher = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()
        return np.frombuffer(cipher.update(bytes(8 * size)), "<u8")

    shared = first._masking.exchange(X25519PublicKey.from_public_bytes(roster.mask_key("p001")))
    pair = stream(derived(shared, b"mask", roster.digest, b"p000", b"p001"))
    own = [stream(derived(m._seed, b"own", roster.digest)) for m in (first, second)]
    np.testing.assert_array_equal(masks[0], own[0] + pair)
    np.testing.assert_array_equal(masks[1], own[1] - pair)


def test_seed_and_key_of_nobody_are_both_revealed():
    run = Run(5, colluding=1).set_up()
    run.upload(vectors(5, 3), gone=("p002",))
    run.finish()
    for given_ in run.revealed.values():
        assert {name: share[:1] for name, share in given_.items()} == {
            name: MASK_KEY if name == "p002" else SEED for name in run.members
        }
    # who takes part is settled once: a second list is signed by nobody
    for name in run.server.arrived:
        assert refused(run.members[name].consent, run.server.arrived[:4]) is Reason.MEMBERS
        assert refused(run.members[name].reveal, {}) is Reason.MEMBERS


@given(st.integers(2, 60), st.integers(0, 20), st.integers(1, 60))
def test_two_lists_cannot_both_be_signed(n, colluding, survivors):
    t = least_threshold(n, colluding, survivors)
    assert 2 * (t - colluding) > n - colluding  # honest ones sign one list, the others both
    assert t - colluding >= survivors
    smaller = t - 1
    assert 2 * smaller <= n + colluding or smaller < survivors + colluding


def test_a_split_view_of_who_arrived_reveals_nothing():
    """The server tells half that p000 arrived and half that it did not: neither list gets enough consents."""
    run = Run(6).set_up()
    run.upload(vectors(6, 3))
    everybody = run.server.arrived
    one, other = everybody, everybody[1:]
    halves = {name: one if place < 3 else other for place, name in enumerate(everybody)}
    signed = {name: run.members[name].consent(halves[name]) for name in everybody}
    for name in everybody:
        with pytest.raises(Refused, match="too few"):
            run.members[name].reveal(signed)


def test_members_refuse_sessions_that_do_not_keep_their_secrets():
    def adverts(run):
        return {name: member.advertise() for name, member in run.members.items()}

    run = Run(5, survivors=3, colluding=1)
    found = adverts(run)
    for name, threshold in (("p000", 3), ("p001", 6)):  # 2t > n + c asks for 4 of 5
        assert refused(run.members[name].share, found, threshold) is Reason.MEMBERS
    others = {name: advert for name, advert in found.items() if name != "p002"}
    assert refused(run.members["p002"].share, others, 4) is Reason.MEMBERS  # not in it itself
    foreign = found | {"p001": Run(5, session=bytes(32)).members["p001"].advertise()}
    assert refused(run.members["p003"].share, foreign, 4) is Reason.MEMBERS  # of another session
    swapped = found | {"p001": found["p000"]}
    assert refused(run.members["p004"].share, swapped, 4) is Reason.MEMBERS  # under another name
    run = Run(5)
    stranger = Member(SESSION, "eve", Signer.new(), run.enrolled, survivors=1, colluding=0)
    assert (
        refused(run.members["p000"].share, adverts(run) | {"eve": stranger.advertise()}, 4) is Reason.MEMBERS
    )


def test_too_few_honest_survivors_are_not_summed():
    run = Run(5, survivors=3, colluding=1).set_up()
    run.upload(vectors(5, 3), gone=("p000", "p001"))
    with pytest.raises(Refused, match="4 are needed"):
        run.members["p002"].consent(run.server.arrived)


def test_sealed_shares_open_for_one_only_and_cannot_be_swapped():
    run = Run(3).set_up()
    boxes = run.routed["p000"]
    assert (
        refused(run.members["p000"].mask, {"p001": boxes["p002"], "p002": boxes["p001"]}, 4) is Reason.MEMBERS
    )
    run = Run(3).set_up()
    wrong = {name: box[:-1] + bytes([box[-1] ^ 1]) for name, box in run.routed["p000"].items()}
    assert refused(run.members["p000"].mask, wrong, 4) is Reason.MEMBERS
    run = Run(3).set_up()
    assert refused(run.members["p000"].mask, {}, 4) is Reason.MEMBERS  # alone


def test_the_server_leaves_out_adverts_and_shares_that_are_none():
    run = Run(4)
    found = {name: member.advertise() for name, member in run.members.items()}
    found["p001"] = bytes(ADVERT)
    found["p002"] = found["p002"][:-1]
    server = Aggregator(SESSION, run.enrolled, found)
    assert sorted(server.adverts) == ["p000", "p003"]
    run = Run(4).set_up()
    boxes = {name: run.members[name] for name in run.members}
    assert set(run.server.route({name: {} for name in boxes})) == set()
    assert refused(run.server.add, "p000", np.zeros(1, np.uint64)) is Reason.MEMBERS


def test_wrong_shares_are_found_and_done_without():
    run = Run(6, threshold=4).set_up()
    given_ = vectors(6, 5)
    run.upload(given_, gone=("p003",))
    arrived = run.server.arrived
    consents = run.server.consents({n: run.members[n].consent(arrived) for n in arrived})
    revealed = {n: run.members[n].reveal(consents) for n in arrived}
    lie = dict.fromkeys(revealed["p000"], SEED + bytes(shamir.SHARE))
    total = run.server.result(revealed | {"p000": lie})
    expected = sum(given_[name] for name in arrived)
    np.testing.assert_array_equal(total.view(np.int64), expected)
    with pytest.raises(Refused, match="cannot be recovered"):
        run.server.result({n: revealed[n] for n in arrived[:3]})
    with pytest.raises(Refused, match="cannot be recovered"):
        run.server.result(revealed | dict.fromkeys(["p000", "p001"], lie))


def test_steps_are_taken_once_and_in_order():
    run = Run(2)
    assert refused(run.members["p000"].share, {}, 2) is Reason.MEMBERS
    run.set_up()
    assert refused(run.members["p000"].advertise) is Reason.MEMBERS
    run.members["p000"].mask(run.routed["p000"], 3)
    assert refused(run.members["p000"].mask, run.routed["p000"], 3) is Reason.MEMBERS


def test_a_step_that_was_refused_was_not_taken():
    """A refused roster, list or set of consents leaves the session where it was."""
    run = Run(4, colluding=1)
    member = run.members["p000"]
    adverts = {name: other.advertise() for name, other in run.members.items()}
    with pytest.raises(Refused):
        member.share(adverts | {"p001": adverts["p002"]}, run.threshold)
    with pytest.raises(Refused):
        member.share(adverts, 2)
    run.server = Aggregator(SESSION, run.enrolled, adverts)
    roster = run.server.settle(run.threshold)
    run.routed = run.server.route(
        {name: m.share(roster.adverts, run.threshold) for name, m in run.members.items()}
    )
    boxes = run.routed["p000"]
    wrong = dict(list(boxes.items())[:2]) | {"p003": bytes(len(boxes["p003"]))}
    assert refused(member.mask, wrong, 3) is Reason.MEMBERS
    assert set(member._held) == {"p000"}
    given_ = vectors(4, 3)
    run.upload(given_)
    assert refused(member.consent, ["p000"]) is Reason.MEMBERS
    arrived = run.server.arrived
    consents = run.server.consents({n: m.consent(arrived) for n, m in run.members.items()})
    assert refused(member.reveal, {}) is Reason.MEMBERS
    total = run.server.result({n: m.reveal(consents) for n, m in run.members.items()})
    np.testing.assert_array_equal(total.view(np.int64), sum(given_.values()))


@given(st.lists(st.integers(-(2**38), 2**38 - 1), min_size=1, max_size=20))
def test_words_are_packed_and_come_back(numbers):
    words = np.array(numbers, dtype=np.int64).view(np.uint64)
    for each in (5, 6, 8):
        body = pack_words(words, each)
        assert len(body) == each * len(numbers)
        found = signed_words(unpack_words(body, len(numbers), each), each)
        np.testing.assert_array_equal(found, numbers)
    with pytest.raises(Refused):
        unpack_words(body, len(numbers) + 1, 8)


@given(st.floats(1.0, 2.0**61))
def test_as_many_bytes_as_sums_need(largest):
    each = word_bytes(largest)
    assert largest < 2.0 ** (8 * each - 1) <= max(2.0**15, largest * 2**10)


def test_sums_that_do_not_fit_are_refused():
    with pytest.raises(Refused, match="64 bits"):
        word_bytes(2.0**62)


def test_masks_of_small_vectors_are_the_beginning_of_large_ones():
    small, large = np.zeros(7, np.uint64), np.zeros(secagg._CHUNK + 9, np.uint64)
    add_mask(small, bytes(32))
    add_mask(large, bytes(32))
    np.testing.assert_array_equal(small, large[:7])
    add_mask(large, bytes(32), minus=True)
    assert not large.any()


def test_masked_shares_of_noise_sum_to_the_noise_that_was_paid_for():
    """Nine shares of noise 6, each masked, leave Gaussian noise of 6 clips in the sum."""
    n, size, bound = 9, 4000, ft.ClipNorm(2.0)
    share = Share(6.0, n)
    _, cell = ft.Gaussian(6.0 / 3).grid(bound, size)
    run, stream = Run(n).set_up(), SeededStream(5)
    for name, boxes in run.routed.items():
        hidden = Masked(share.noise_multiplier, share, cell, run.members[name].mask(boxes, size))
        assert hidden.event(bound, ft.Adjacency.ADD_REMOVE, False) == ft.Gaussian(6.0).unit_event()
        run.server.add(name, hidden.release(np.full(size, 0.25), bound, stream))
    total = run.finish().view(np.int64) * cell
    assert stats.kstest((total - n * 0.25) / 12.0, "norm").pvalue > 0.01


def test_a_masked_release_shows_no_sum_and_its_name_no_mask():
    hidden = Masked(6.0, Share(6.0, 4), 1.0, np.arange(5, dtype=np.uint64))
    assert "mask" not in repr(hidden)
    assert "mask" not in str(hidden)


def test_keys_of_small_order_are_refused():
    with pytest.raises(Refused):
        secagg._shared(X25519PrivateKey.generate(), bytes(32))


def test_sessions_and_rosters_of_something_else_have_other_names():
    about = {"run": "r", "round": 1, "weights": "ab"}
    assert secagg.session_of(about) == secagg.session_of(about | {"seen": [1, "cd"]})
    for name in about:
        assert secagg.session_of(about) != secagg.session_of(about | {name: "other"})
    adverts = {name: bytes([n]) * ADVERT for n, name in enumerate(("a", "b", "c"))}
    digests = {
        secagg.Roster(SESSION, adverts, 2).digest,
        secagg.Roster(SESSION, adverts, 3).digest,
        secagg.Roster(bytes(32), adverts, 2).digest,
        secagg.Roster(SESSION, adverts | {"a": bytes([9]) * ADVERT}, 2).digest,
        secagg.Roster(SESSION, {"d" if name == "a" else name: a for name, a in adverts.items()}, 2).digest,
    }
    assert len(digests) == 5


def test_two_parties_with_the_same_keys_are_refused():
    """Even where each signed them: one of the two would know what the other hides."""
    run = Run(3)
    adverts = {name: member.advertise() for name, member in run.members.items()}
    first, second, third = adverts
    keys = adverts[second][: 3 * secagg.KEY]
    content = secagg._ADVERT + SESSION + secagg._listed([third]) + keys
    forged = adverts | {third: keys + run.signers[third].sign(content)}
    assert secagg.genuine(SESSION, third, forged[third], run.enrolled[third])
    assert refused(run.members[first].share, forged, run.threshold) is Reason.MEMBERS
    assert run.members[first].share(adverts, run.threshold)


def test_shares_of_another_length_are_refused():
    run = Run(3).set_up()
    first, second, _ = run.members
    roster, boxes = run.server.roster, dict(run.routed[first])
    channel = roster.channel(run.members[second]._sealing, first, second, first)
    short = boxes | {second: channel.encrypt(bytes(12), bytes(shamir.SHARE), roster.digest)}
    assert refused(run.members[first].mask, short, 4) is Reason.MEMBERS
    assert run.members[first].mask(boxes, 4).size == 4


def test_nobody_consents_to_a_list_without_itself_and_no_vector_is_added_twice():
    run, given_ = Run(4), vectors(4, 5)
    run.set_up().upload(given_)
    first, *others = sorted(given_)
    assert refused(run.members[first].consent, others) is Reason.MEMBERS
    assert refused(run.server.add, first, np.zeros(5, np.uint64)) is Reason.MEMBERS
    np.testing.assert_array_equal(run.finish().view(np.int64), sum(given_.values()))
