"""Records that arrive once: nobody is drawn twice, and a stream costs one answer."""

import io
import threading

import numpy as np
import pytest

import farthing as ft
from farthing.accounting import pld
from farthing.budget import Adjacency
from farthing.errors import BudgetSpent, InvalidValue
from farthing.ledger import verifier
from farthing.noise.lattice import SeededStream
from farthing.queries.buffered import column, column_norm
from farthing.queries.events import GaussianEvent

BUDGET, STEPS = ft.Budget(2.0, 1e-5), 12
ROWS = ft.PerExample(lambda rows, w: rows[0])


class Log:
    """Records that are appended."""

    def __init__(self):
        self.rows = np.empty((0, 2))

    def __len__(self):
        return len(self.rows)

    def take(self, places):
        return ft.Rows(self.rows[places])

    def append(self, values):
        self.rows = np.concatenate([self.rows, values])


def query(budget=BUDGET):
    best = ft.choose_buffers(budget, groups=STEPS, steps=STEPS)
    return ft.Query(ft.Arrivals(), ROWS, ft.ClipNorm(1.0), best.mechanism)


@pytest.mark.parametrize("adjacency", Adjacency)
def test_a_stream_costs_one_answer_and_ends_with_its_plan(adjacency):
    budget = ft.Budget(2.0, 1e-5, adjacency)
    asked = query(budget)
    ledger, log = ft.Ledger(budget), Log()
    ledger.promise(asked, STEPS)
    private, sizes = ledger.over(log), []
    for turn in range(STEPS):
        log.append(np.ones((turn, 2)))
        sizes.append(private.ask(asked, None).value.shape)
    with pytest.raises(BudgetSpent):
        private.ask(asked, None)
    noise = asked.mechanism.noise_multiplier
    assert sizes == [(2,)] * STEPS
    assert ledger.guarantee.epsilon == pytest.approx(
        pld.epsilon(GaussianEvent(noise), 1e-5, adjacency), rel=1e-9
    )
    assert ledger.guarantee.epsilon <= 2.0
    ledger.journal.export(exported := io.StringIO())
    assert verifier.verify(exported.getvalue().splitlines()).code == 0


def test_every_record_is_drawn_once_and_by_one_memory():
    begun, stream = ft.Arrivals().begin(), SeededStream(0)
    drawn = [begun.draw(records, stream, turn).tolist() for turn, records in enumerate((4, 4, 9, 10))]
    assert drawn == [[0, 1, 2, 3], [], [4, 5, 6, 7, 8], [9]]


@pytest.mark.parametrize(
    ("turns", "sizes"), [((0, 2, 3), (2, 4, 6)), ((1, 2), (2, 4)), ((0, 0), (2, 4)), ((0, 1), (4, 2))]
)
def test_after_a_gap_nobody_is_drawn_any_more(turns, sizes):
    begun, stream = ft.Arrivals().begin(), SeededStream(0)
    drawn = [begun.draw(size, stream, turn) for turn, size in zip(turns, sizes, strict=True)]
    assert all(len(one) == 0 for one in drawn[1:])
    assert (len(drawn[0]) > 0) == (turns[0] == 0)
    assert not len(begun.draw(100, stream, turns[-1] + 1))


def test_a_ledger_that_is_opened_again_draws_nobody(tmp_path):
    log = Log()
    log.append(np.full((50, 2), 1e6))
    for first in (True, False):
        opened = ft.Ledger(BUDGET, journal=tmp_path / "a") if first else ft.Ledger.open(tmp_path / "a")
        with opened as ledger:
            ledger.promise(query(), STEPS)
            answer = ledger.over(log).ask(query(), None).value
            assert (np.abs(answer).max() > 30) == first  # 50 clipped records, and noise of about 4
            log.append(np.full((50, 2), 1e6))


def test_threads_draw_nobody_twice():
    begun, stream, drawn = ft.Arrivals().begin(), SeededStream(0), []
    threads = [
        threading.Thread(target=lambda turn=turn: drawn.append(begun.draw(10 * turn, stream, turn)))
        for turn in range(20)
    ]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    everyone = np.concatenate(drawn)
    assert len(everyone) == len(np.unique(everyone))


def test_one_chance_moves_the_rows_by_no_more_than_is_paid_for():
    pairs = (0.3, 0.4), (0.95, 0.6)
    for groups in (1, 3, 12):
        rows = [np.linalg.norm(column(*pairs, STEPS)[: STEPS - s]) for s in range(STEPS)]
        assert max(rows) <= column_norm(*pairs, STEPS, groups) * (1 + 1e-12)
    ft.Query(ft.Arrivals(), ROWS, ft.ClipNorm(1.0), ft.BandedGaussian(1.0, bands=64))


def test_more_turns_than_the_noise_was_made_for_are_refused():
    with pytest.raises(InvalidValue, match="12 turns"):
        ft.Ledger(BUDGET).promise(query(), STEPS + 1)
