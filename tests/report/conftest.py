"""Runs to report on: with a filter, with a plan, with nothing to promise, and with every picture."""

import numpy as np
import pytest

import farthing as ft
from farthing.audit.auditing import Verdict
from farthing.budget import Budget, Guarantee
from farthing.noise.lattice import SeededStream
from farthing.report import ClientGroup, FederatedRun, Score, Subject

BUDGET = Budget(1.0, 1e-5)
MEAN = ft.PerExample(lambda rows, w: rows[0] - w)
STEP = ft.Query(ft.Poisson(0.1), MEAN, ft.ClipNorm(2.0), ft.Gaussian(4.0))
WHOLE = ft.Query(ft.Everyone(), MEAN, ft.ClipNorm(3.0), ft.Gaussian(30.0))
ROWS = ft.Rows(np.ones((100, 2)))


def asked(ledger, query, times):
    door = ledger.over(ROWS)
    return [ft.Step(t, None, (door.ask(query, np.zeros(2)).receipt,)) for t in range(1, times + 1)]


@pytest.fixture
def ledgers():
    return asked


@pytest.fixture
def queries():
    return {"sampled": STEP, "whole": WHOLE}


@pytest.fixture
def filtered():
    ledger = ft.Ledger(BUDGET)
    return ledger, asked(ledger, WHOLE, 40)


@pytest.fixture
def planned():
    ledger = ft.Ledger(BUDGET, block=8)
    ledger.promise(STEP, 60)
    return ledger, asked(ledger, STEP, 40)


@pytest.fixture
def seeded(tmp_path):
    """A ledger file that was used with seeded noise, as a careless test leaves one."""
    file = tmp_path / "seeded.ledger"
    with ft.Ledger(BUDGET, journal=file, stream=SeededStream(1)) as ledger:
        asked(ledger, WHOLE, 3)
    return file


def a_federated_run(
    groups=((0.25, 163, 142, 142), (0.5, 163, 512, 512), (1.0, 162, 1827, 1500)), method="A-DDP"
):
    said = Guarantee(
        1.0, 1e-5, ft.Adjacency.ADD_REMOVE, ft.Unit.RECORD, ft.Observer.SERVER, "tight", "a theorem"
    )
    kinds = tuple(ClientGroup(epsilon=e, clients=n, rounds=r, done=d) for e, n, r, d in groups)
    return FederatedRun(method=method, guarantee=said, trust="local", rounds=1500, groups=kinds, value=0.8)


SCORES = (
    *(Score(label="auto", epsilon=e, value=v) for e, v in ((0.1, 0.83), (1.0, 0.851), (3.0, 0.853))),
    Score(label="DP-SGD", epsilon=1.0, value=0.84),
    Score(label="without privacy", epsilon=None, value=0.852),
    Score(label="guessing", epsilon=None, value=0.764),
)
ATTACKS = (
    ("descent", Verdict(3.21987, Budget(8.0, 1e-5), 100, 0.995, "likelihood ratio of every answer")),
    ("dpsgd", Verdict(0.0, Budget(8.0, 1e-5), 50, 0.995, "the model that comes out")),
)


@pytest.fixture
def federated_run():
    return a_federated_run


@pytest.fixture
def full(filtered):
    """Everything that a page can show."""
    ledger, history = filtered
    return Subject.of(
        ledger,
        title="Income",
        method="auto",
        steps=40,
        guarantee=ledger.guarantee,
        history=history,
        records=32561,
        features=108,
        scores=SCORES,
        released=("Accuracy on 16,281 test records: computed without noise.",),
        tuning="Not included: settings are the method's own",
        federated=a_federated_run(),
        audit=ATTACKS,
        verified="An independent verifier agrees.",
    )
