"""The coordinator's side of a secure sum: words that hold what was drawn, and no more."""

from types import SimpleNamespace

import pytest

import farthing as ft
from farthing.deploy.secagg.protocol import word_bytes
from farthing.deploy.secagg.sessions import Session
from farthing.federated.terms import Invitation


def session(draw, parties=10, records=6000, size=10**6):
    invitation = Invitation(1.0, draw, 100, noise_multiplier=3.0, trust="distributed", survivors=parties // 2)
    terms = invitation.terms(ft.Budget(8.0, 1e-5, observer="aggregate"), records)
    question = SimpleNamespace(shape=(size,), answered=(size,))
    return Session(question, b"", {f"p{n}": terms for n in range(parties)}, parties * records, {}, 1, 1.0)  # type: ignore[arg-type]


def test_a_million_coordinates_take_five_bytes_each_where_records_are_drawn():
    drawn = session(ft.Poisson(0.05))._reach()
    assert word_bytes(drawn) == 5  # 1.25 of a vector of float32
    terms = next(iter(session(ft.Poisson(0.05))._terms.values()))
    cell = 1.0 * 3.0 / 5**0.5 / 2**23  # noise of a share over the cells of its lattice
    assert drawn > 2 * 10 * (300 + 9 * 300**0.5) * terms.bound.clip / cell * 0.99


def test_words_hold_every_record_where_all_take_part():
    whole = session(ft.Everyone())._reach()
    assert whole > 2 * 60_000 / (3.0 / 5**0.5 / 2**23) * 0.99
    assert whole == pytest.approx(session(ft.Poisson(1.0 - 1e-9))._reach(), rel=0.01)
