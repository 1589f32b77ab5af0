"""A budget around any Flower app: what is charged before what is sent, what is left out, and when it ends."""

import logging
from asyncio import CancelledError

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import FitIns, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.compat.common import recorddict_compat

import farthing as ft
from farthing.deploy.flower.mod import BudgetMod
from farthing.errors import InvalidValue

CONTEXT = Context(1, 5, {}, RecordDict(), {})
LIMITS = {"epsilon": 4.0, "delta": 1e-5, "clip_norm": 2.0}


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    """Messages name the run that they belong to, which Flower's processes know."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "node.ledger"


def message(content=None, kind="train", size=6):
    arrays = ArrayRecord({"w": Array(np.ones((2, size // 2), np.float32)), "b": Array(np.zeros(3))})
    made = Message(RecordDict({"arrays": arrays}) if content is None else content, 5, kind)
    made.metadata.__dict__["_message_id"] = "m"
    return made


def app(mod, move=1000.0, fails=False):
    """An app that moves every weight, and tells its loss."""
    made = ClientApp(mods=[mod])

    def train(message, context):
        if fails:
            raise ValueError("record 17 is ill")
        arrays = message.content.array_records["arrays"]
        moved = ArrayRecord(
            {name: Array(array.numpy() + array.numpy().dtype.type(move)) for name, array in arrays.items()}
        )
        metrics = MetricRecord({"num-examples": 17, "loss": 0.25})
        return Message(RecordDict({"arrays": moved, "metrics": metrics}), reply_to=message)

    made.train()(train)
    made.evaluate()(train)
    made.query()(train)
    return made


def weights(reply):
    return np.concatenate([a.numpy().ravel() for a in reply.content.array_records["arrays"].values()])


def spent(path):
    with ft.Ledger.open(path) as ledger:
        return ledger.share


def test_an_update_is_clipped_and_noised_and_nothing_else_is_sent(path):
    mod = BudgetMod(path, noise_multiplier=3.0, epsilon=1000.0, delta=1e-5, clip_norm=2.0)
    reply = app(mod)(message(size=40_000), CONTEXT)
    noisy = weights(reply)[:40_000] - 1.0  # what is left of the update is below 2 / 200
    assert float(noisy.std()) == pytest.approx(6.0, rel=0.03)
    assert abs(float(noisy.mean())) < 0.2
    assert dict(reply.content.metric_records["metrics"]) == {"num-examples": 1.0}
    assert list(reply.content) == ["arrays", "metrics"]
    arrays = reply.content.array_records["arrays"]
    assert [a.numpy().dtype for a in arrays.values()] == [np.float32, np.float64]


def test_an_update_within_the_clip_comes_through(path):
    mod = BudgetMod(path, noise_multiplier=1e-3, epsilon=1e9, delta=1e-5, clip_norm=100.0)
    assert weights(app(mod, move=0.5)(message(), CONTEXT)) == pytest.approx([1.5] * 6 + [0.5] * 3, abs=1.0)


def test_the_charge_is_on_disk_before_the_app_runs(path):
    seen = []
    mod = BudgetMod(path, rounds=4, **LIMITS)

    def train(message, context):
        seen.append(spent(path))
        return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)

    made = ClientApp(mods=[mod])
    made.train()(train)
    made(message(), CONTEXT)
    assert seen == [pytest.approx(0.25)]


def test_it_lasts_for_its_rounds_over_processes_and_then_stops(path):
    for _ in range(3):  # a mod of each process, one file
        assert not app(BudgetMod(path, rounds=3, **LIMITS))(message(), CONTEXT).has_error()
    calls = []
    made = ClientApp(mods=[BudgetMod(path, rounds=3, **LIMITS)])
    made.train()(lambda message, context: calls.append(1))
    reply = made(message(), CONTEXT)
    assert reply.has_error()
    assert "budget of this node is spent" in reply.error.reason
    assert not calls
    with ft.Ledger.open(path) as ledger:
        assert ledger.spent.epsilon <= 4.0
        assert str(ledger.guarantee).startswith("(4, 1e-05)-DP, replace-one, per party")


def test_an_app_that_fails_is_answered_for_alike(path, caplog):
    caplog.set_level(logging.CRITICAL, "farthing.deploy.flower.mod")
    replies = [
        app(BudgetMod(path, rounds=9, **LIMITS), fails=fails)(message(), CONTEXT) for fails in (False, True)
    ]
    assert not any(reply.has_error() for reply in replies)
    assert len({tuple(reply.content) for reply in replies}) == 1
    assert spent(path) == pytest.approx(2 / 9)


@pytest.mark.parametrize("kind", ["evaluate", "query"])
def test_what_is_not_paid_for_is_refused(path, kind):
    reply = app(BudgetMod(path, rounds=3, **LIMITS))(message(kind=kind), CONTEXT)
    assert reply.has_error()
    assert f"messages for {kind} are not answered here" in reply.error.reason
    assert not path.exists()


def test_evaluation_on_public_data_may_be_let_through(path):
    mod = BudgetMod(path, rounds=3, public_evaluation=True, **LIMITS)
    reply = app(mod)(message(kind="evaluate"), CONTEXT)
    assert reply.content.metric_records["metrics"]["loss"] == 0.25


def records(**arrays):
    return RecordDict({"arrays": ArrayRecord({name: Array(array) for name, array in arrays.items()})})


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (RecordDict(), "one record of arrays, got 0"),
        (records(w=np.ones(3, np.int64)), "arrays of floats, got 'w'"),
        (records(w=np.zeros(0)), "arrays of floats, got none"),
        (records(w=np.array([1.0, np.nan])), "finite"),
    ],
)
def test_a_message_that_makes_no_sense_is_refused_and_costs_nothing(path, content, reason):
    reply = app(BudgetMod(path, rounds=3, **LIMITS))(message(content), CONTEXT)
    assert reply.has_error()
    assert reason in reply.error.reason
    assert not path.exists() or spent(path) == 0.0


def test_an_app_made_of_a_numpy_client_works_as_it_is(path):
    class Client(NumPyClient):
        def fit(self, parameters, config):
            return [array + 0.1 for array in parameters], 170, {"loss": 0.25}

    made = ClientApp(lambda context: Client().to_client(), mods=[BudgetMod(path, rounds=3, **LIMITS)])
    asked = FitIns(ndarrays_to_parameters([np.ones((2, 3)), np.zeros(4)]), {"lr": 0.1})
    reply = made(message(recorddict_compat.fitins_to_recorddict(asked, True)), CONTEXT)
    found = recorddict_compat.recorddict_to_fitres(reply.content, True)
    assert [array.shape for array in parameters_to_ndarrays(found.parameters)] == [(2, 3), (4,)]
    assert (found.num_examples, found.metrics) == (1, {})
    assert spent(path) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    "more", [{}, {"rounds": 3, "noise_multiplier": 1.0}, {"rounds": 0}, {"noise_multiplier": -1.0}]
)
def test_nonsense_is_refused_when_the_mod_is_made(path, more):
    with pytest.raises(InvalidValue):
        BudgetMod(path, **LIMITS, **more)


@pytest.mark.parametrize("error", [ValueError, SystemExit, CancelledError])
def test_an_app_that_fails_is_run_once_and_its_words_are_not_logged(path, caplog, error):
    calls = []

    def train(message, context):
        calls.append(1)
        raise error("record 17 is ill")

    made = ClientApp(mods=[BudgetMod(path, rounds=9, **LIMITS)])
    made.train()(train)
    assert not made(message(), CONTEXT).has_error()
    assert len(calls) == 1
    assert error.__name__ in caplog.text
    assert "record 17" not in caplog.text


def evaluated(mod, fails=False, **metrics):
    made = ClientApp(mods=[mod])

    def evaluate(message, context):
        if fails:
            raise ValueError("record 17 is ill")
        return Message(RecordDict({"mine": MetricRecord({"examples": 17, **metrics})}), reply_to=message)

    made.evaluate()(evaluate)
    return made(message(kind="evaluate"), CONTEXT)


EVALUATION = {"accuracy": (0.0, 1.0), "loss": (0.0, 10.0)}


def test_an_evaluation_is_charged_and_its_metrics_are_moved_into_their_bounds_and_noised(path):
    """One evaluation at 1e-3 times half a width of 1 and 10, over √2: noise below 0.02 and 0.2 (20 sigma)."""
    options = {"noise_multiplier": 1.0, "epsilon": 1e9, "delta": 1e-5, "clip_norm": 1.0}
    mod = BudgetMod(path, evaluation=EVALUATION, evaluation_noise=1e-3, **options)
    said = dict(evaluated(mod, accuracy=0.75, loss=1e9).content.metric_records["metrics"])
    assert set(said) == {"accuracy", "loss", "num-examples"}  # and nothing that nobody paid for
    assert (said["accuracy"], said["loss"]) == (pytest.approx(0.75, abs=0.02), pytest.approx(10.0, abs=0.2))
    failed = dict(evaluated(mod, fails=True).content.metric_records["metrics"])
    assert (failed["accuracy"], failed["loss"]) == (pytest.approx(0.5, abs=0.02), pytest.approx(5.0, abs=0.2))
    odd = dict(evaluated(mod, accuracy=float("nan"), loss=1.0).content.metric_records["metrics"])
    assert odd["accuracy"] == pytest.approx(0.5, abs=0.02)


def test_updates_and_evaluations_share_one_budget(path):
    mod = BudgetMod(path, rounds=3, evaluation=EVALUATION, **LIMITS)
    assert not app(mod)(message(), CONTEXT).has_error()
    assert spent(path) == pytest.approx(1 / 3)
    for _ in range(2):
        assert not evaluated(mod, accuracy=0.5, loss=1.0).has_error()
    assert spent(path) == pytest.approx(1.0)
    refused = evaluated(mod, accuracy=0.5, loss=1.0)
    assert "spent" in refused.error.reason
    assert app(mod)(message(), CONTEXT).has_error()


@pytest.mark.parametrize(
    "options",
    [
        {"evaluation": {"accuracy": (1.0, 0.0)}},
        {"evaluation": {"accuracy": (0.0, float("inf"))}},
        {"evaluation": EVALUATION, "public_evaluation": True},
        {"evaluation": EVALUATION, "evaluation_noise": 0.0},
    ],
)
def test_what_an_evaluation_must_be(options, path):
    with pytest.raises(InvalidValue):
        BudgetMod(path, rounds=3, **LIMITS, **options)
