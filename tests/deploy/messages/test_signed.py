"""What is accepted, and above all what is not."""

import contextlib
import json
import os
import pickle
import stat

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from farthing.deploy.messages import signed as messages
from farthing.deploy.messages.signed import (
    Fields,
    MessageKind,
    Reason,
    Refused,
    Signer,
    expected_size,
    message_digest,
    pack_numbers,
    pack_table,
    public_key,
    seal,
    table_size,
    unpack_numbers,
    unpack_table,
    unseal,
)
from farthing.errors import InvalidValue

SIGNER = Signer(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
OTHER = Signer(Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33))))
HEADER = {"run": "r", "round": 3, "x": 0.1}
MESSAGE = seal(MessageKind.QUESTION, HEADER, b"12345678", SIGNER)


def opened(data, largest=10_000):
    return unseal(data, {SIGNER.public}, largest)


def reason(call, *arguments, **options):
    with pytest.raises(Refused) as caught:
        call(*arguments, **options)
    return caught.value.reason


def test_what_was_sealed_is_opened():
    found = opened(MESSAGE)
    assert (found.kind, found.signer, found.body) == (MessageKind.QUESTION, SIGNER.public, b"12345678")
    assert found.fields().plain() == HEADER
    assert found.digest == opened(seal(MessageKind.QUESTION, HEADER, b"12345678", SIGNER)).digest
    assert found.digest == message_digest(MESSAGE)
    assert found.digest != opened(seal(MessageKind.QUESTION, HEADER, b"12345679", SIGNER)).digest


def test_the_layout_is_the_one_written_down():
    head = json.dumps(HEADER, sort_keys=True, separators=(",", ":")).encode()
    assert MESSAGE[:8] == b"frth\x01\x05\0\0"
    assert MESSAGE[8:16] == len(head).to_bytes(4, "little") + (8).to_bytes(4, "little")
    assert MESSAGE[16:48] == SIGNER.public
    assert MESSAGE[48 : 48 + len(head)] == head
    assert len(MESSAGE) == 48 + len(head) + 8 + 64


@pytest.mark.parametrize("place", range(len(MESSAGE)))
def test_no_byte_can_be_changed(place):
    changed = bytearray(MESSAGE)
    changed[place] ^= 1
    with pytest.raises(Refused):
        opened(bytes(changed))


def test_strangers_and_forgeries():
    assert reason(unseal, MESSAGE, {OTHER.public}, 10_000) is Reason.STRANGER
    swapped = MESSAGE[:16] + OTHER.public + MESSAGE[48:]
    assert reason(unseal, swapped, {OTHER.public}, 10_000) is Reason.FORGED
    other = seal(MessageKind.ANSWER, HEADER, b"12345678", SIGNER)  # its signature does not fit another kind
    assert reason(opened, MESSAGE[:-64] + other[-64:]) is Reason.FORGED


def test_size_is_looked_at_first():
    assert expected_size(MESSAGE[:16], len(MESSAGE)) == len(MESSAGE)
    assert reason(expected_size, MESSAGE[:16], len(MESSAGE) - 1) is Reason.OVERSIZED
    huge = messages.PREFIX.pack(b"frth", 1, 5, 0, 10, 2**32 - 1)
    assert reason(expected_size, huge, 10**6) is Reason.OVERSIZED
    long = messages.PREFIX.pack(b"frth", 1, 5, 0, 2**14 + 1, 0)
    assert reason(expected_size, long, 10**9) is Reason.OVERSIZED
    assert reason(opened, MESSAGE + b"?") is Reason.MALFORMED
    assert reason(opened, MESSAGE[:-1]) is Reason.MALFORMED
    assert reason(opened, b"") is Reason.MALFORMED
    with pytest.raises(InvalidValue):
        seal(MessageKind.QUESTION, {"run": "x" * 2**15}, b"", SIGNER)


@given(st.binary(max_size=300))
def test_noise_is_refused(data):
    with pytest.raises(Refused):
        opened(data)


@given(st.binary(max_size=200))
@settings(max_examples=200)
def test_signed_noise_in_a_header_is_refused_or_an_object(text):
    start = messages.PREFIX.pack(b"frth", 1, 5, 0, len(text), 0) + SIGNER.public + text
    data = start + SIGNER.sign(messages._signed(start, b""))
    with contextlib.suppress(Refused):
        assert isinstance(opened(data).fields().plain(), dict)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 9000,
        b'{"a":' * 3000,
        b'{"a":1,"a":2}',
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":' + b"9" * 9000 + b"}",
        b'{"a":"\xff"}',
        b"null",
        b"[]",
        b"",
    ],
)
def test_headers_that_are_no_plain_objects(text):
    assert reason(Fields.parse, text) is Reason.MALFORMED


@pytest.mark.parametrize(
    ("take", "values"),
    [
        (lambda f: f.text("a"), ["", "a b", "a/b", "ä", "x" * 65, 1, None, ["a"], "a\n"]),
        (lambda f: f.whole("a", 1, 9), [0, 10, 1.0, True, "1", None, -1, 10**30]),
        (lambda f: f.number("a"), ["1", None, True, 10**400, [1]]),
        (lambda f: f.hexadecimal("a", 2), ["", "abc", "ABCD", "abcg", 1234, "abcde"]),
        (lambda f: f.inner("a"), [1, "x", None, []]),
        (lambda f: f.whole("b"), [1]),
        (lambda f: f.done(), [1]),
    ],
)
def test_fields_of_another_kind(take, values):
    for value in values:
        assert reason(take, Fields({"a": value})) is Reason.MALFORMED


def test_numbers_have_their_shape_and_are_finite():
    values = np.array([[1.5, -2.0], [0.0, 1e300]])
    body = pack_numbers(values.astype(">f8"))
    np.testing.assert_array_equal(unpack_numbers(body, (2, 2)), values)
    assert reason(unpack_numbers, body, (2, 3)) is Reason.SHAPE
    assert reason(unpack_numbers, body[:-1], (2, 2)) is Reason.SHAPE
    for bad in (np.nan, np.inf, -np.inf):
        assert reason(unpack_numbers, pack_numbers(np.array([bad])), (1,)) is Reason.NONFINITE


NAMES = st.text("abcxyz019._-", min_size=1, max_size=8)


@given(st.dictionaries(NAMES, st.binary(min_size=3, max_size=3), max_size=6))
def test_tables_come_back_and_nothing_else_is_one(entries):
    body = pack_table(entries)
    assert unpack_table(body, 6, (3,)) == entries
    assert len(body) <= table_size(6, 3)
    if entries:
        assert reason(unpack_table, body, len(entries) - 1, (3,)) is Reason.MALFORMED
        assert reason(unpack_table, body, 6, (4,)) is Reason.MALFORMED
        assert reason(unpack_table, body[:-1], 6, (3,)) is Reason.MALFORMED
        assert reason(unpack_table, body + body, 12, (3,)) is Reason.MALFORMED  # a name twice


@given(st.binary(max_size=60))
def test_a_table_is_refused_or_comes_out_the_same(body):
    with contextlib.suppress(Refused):
        assert pack_table(unpack_table(body, 10, range(60))) == body


def test_private_keys_stay_private(tmp_path):
    SIGNER.save(tmp_path / "key")
    assert stat.S_IMODE(os.stat(tmp_path / "key").st_mode) == 0o600
    assert Signer.load(tmp_path / "key").public == SIGNER.public
    with pytest.raises(InvalidValue, match="new file"):
        SIGNER.save(tmp_path / "key")
    with pytest.raises(InvalidValue, match="not pickled"):
        pickle.dumps(SIGNER)
    assert bytes(range(32)).hex()[2:] not in repr(SIGNER)
    for content in ("zz", "00" * 31, ""):
        (tmp_path / "bad").write_text(content)
        with pytest.raises(InvalidValue, match="private key"):
            Signer.load(tmp_path / "bad")
    with pytest.raises(InvalidValue, match="No such file"):
        Signer.load(tmp_path / "none")


def test_public_keys_are_hexadecimal():
    assert public_key(SIGNER.public.hex()) == SIGNER.public
    for bad in ("", "00" * 31, "zz" * 32, 3, None):
        with pytest.raises(InvalidValue, match="public key"):
            public_key(bad)


def test_refusals_show_no_value():
    with pytest.raises(Refused) as caught:
        unpack_numbers(pack_numbers(np.array([123456.75, np.nan])), (2,))
    assert "123456" not in str(caught.value)
