"""What a coordinator remembers, whatever happened while it was written."""

import json
import os
import stat
import tracemalloc

import pytest

from farthing.deploy.checkpoint import Checkpoint
from farthing.errors import FarthingError, InvalidValue

ENROLLED = {"a": bytes(32), "b": bytes(range(32))}


def filled(folder, records=3):
    with Checkpoint(folder, "run-1", ENROLLED) as checkpoint:
        for number in range(records):
            checkpoint.add({"round": number}, bytes([number]) * 20)
        return checkpoint.nonce(5)


def rest(checkpoint):
    return [header["round"] for header, _ in iter(checkpoint.next, None)]


def test_records_come_back_in_order(tmp_path):
    nonce = filled(tmp_path / "run")
    with Checkpoint(tmp_path / "run", "run-1", ENROLLED) as again:
        assert again.replaying
        assert rest(again) == [0, 1, 2]
        assert not again.replaying
        assert again.nonce(5) == nonce
        again.add({"round": 3})
    with Checkpoint(tmp_path / "run", "run-1", ENROLLED) as again:
        assert rest(again) == [0, 1, 2, 3]


def test_whatever_is_torn_off_the_rest_is_whole(tmp_path):
    filled(tmp_path / "run")
    path = tmp_path / "run" / "rounds.log"
    whole = path.read_bytes()
    each = len(whole) // 3
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with Checkpoint(tmp_path / "run", "run-1", ENROLLED) as again:
            assert rest(again) == list(range(size // each))
        assert path.stat().st_size == size // each * each
    path.write_bytes(whole[:-1] + b"?")
    with Checkpoint(tmp_path / "run", "run-1", ENROLLED) as again:
        assert rest(again) == [0, 1]


def test_a_file_that_one_call_does_not_read_or_write_is_whole(tmp_path, monkeypatch):
    """Linux reads and writes 2 GiB at most in one call; so many bytes here."""
    read, write, most = os.pread, os.write, 50
    monkeypatch.setattr(os, "pread", lambda file, count, place: read(file, min(count, most), place))
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:most]))
    filled(tmp_path / "run", 20)
    size = (tmp_path / "run" / "rounds.log").stat().st_size
    with Checkpoint(tmp_path / "run", "run-1", ENROLLED) as again:
        assert rest(again) == list(range(20))
    assert (tmp_path / "run" / "rounds.log").stat().st_size == size


def test_one_record_at_a_time_is_in_memory(tmp_path):
    """All rounds of a large network are larger than it."""
    each = 2**20
    with Checkpoint(tmp_path / "run", "run-1", ENROLLED) as checkpoint:
        for number in range(30):
            checkpoint.add({"round": number}, bytes([number]) * each)
    tracemalloc.start()
    try:
        with Checkpoint(tmp_path / "run", "run-1", ENROLLED) as again:
            for number in range(30):
                header, body = again.next()
                assert (header["round"], body[0], len(body)) == (number, number, each)
        assert tracemalloc.get_traced_memory()[1] < 8 * each
    finally:
        tracemalloc.stop()


def test_a_folder_belongs_to_one_run_and_one_coordinator(tmp_path):
    filled(tmp_path / "run")
    with pytest.raises(InvalidValue, match="another run"):
        Checkpoint(tmp_path / "run", "run-2", ENROLLED)
    with Checkpoint(tmp_path / "run", "run-1", ENROLLED), pytest.raises(InvalidValue, match="at work"):
        Checkpoint(tmp_path / "run", "run-1", ENROLLED)
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(InvalidValue, match="not the file of a run"):
        Checkpoint(tmp_path / "run", "run-1", ENROLLED)


def test_keys_may_be_renewed_and_revoked_in_a_run(tmp_path):
    nonce = filled(tmp_path / "run")
    for enrolled in ({"a": bytes(32)}, ENROLLED | {"b": bytes(32)}, ENROLLED):
        with Checkpoint(tmp_path / "run", "run-1", enrolled) as again:
            assert rest(again) == [0, 1, 2]
            assert again.nonce(5) == nonce
        found = json.loads((tmp_path / "run" / "run.json").read_text())
        assert found["parties"] == {name: key.hex() for name, key in enrolled.items()}


def test_a_draft_left_by_a_crash_is_no_run(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.draft").write_text("half")
    filled(tmp_path / "run")
    found = json.loads((tmp_path / "run" / "run.json").read_text())
    assert found["run"] == "run-1"
    for name in ("run.json", "rounds.log"):
        assert stat.S_IMODE(os.stat(tmp_path / "run" / name).st_mode) == 0o600


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FarthingError, match="cannot be opened"):
        Checkpoint(tmp_path / "file", "run-1", ENROLLED)
    with pytest.raises(FarthingError, match="cannot be opened"):
        Checkpoint(tmp_path / "none" / "run", "run-1", ENROLLED)


def test_nonces_and_turns_differ_and_stay(tmp_path):
    with Checkpoint(tmp_path / "run", "run-1", ENROLLED) as one, Checkpoint(None, "run-1", ENROLLED) as other:
        nonces = [one.nonce(number) for number in range(50)]
        assert len(set(nonces)) == 50
        assert nonces != [other.nonce(number) for number in range(50)]
        turns = [one.turn(number, 3) for number in range(60)]
        assert turns == [one.turn(number, 3) for number in range(60)]
        assert set(turns) == {0, 1, 2}
        assert other.next() is None
