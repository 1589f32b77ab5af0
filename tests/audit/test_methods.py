"""Every sound method of the library under its attacks: none is refuted, and the attacks have teeth."""

import os
from dataclasses import replace

import numpy as np
import pytest

import farthing as ft
from farthing.accounting import gaussian
from farthing.audit import methods
from farthing.noise.lattice import SeededStream
from farthing.queries import mechanisms

EXPLORE = os.environ.get("FARTHING_EXPLORE")
ALIKE = [
    "torch-adan",
    "torch-adal",
    "torch-dpopt",
    "torch-adadp-box",
]  # as torch-adadp
QUICK = ["sufficient", "pca", "objective", "gaussian", "laplace", "dpsgd-step", "adal", "addp-seen", "menu"]
QUICK += ["personal-rates", "personal-weights"]
QUICK += ["count", "mean", "bounds", "quantile-choice", "quantile-tree"]


@pytest.mark.parametrize("name", QUICK)
def test_stands_in_a_small_audit(name):
    for _, verdict in methods.attack(name, scale=0.2, confidence=0.999, stream=SeededStream(1)):
        assert not verdict.broken, verdict
        assert verdict.word == "not refuted"


EFFORTS = dict.fromkeys(methods.MODELS, 0.07) | {
    "sgd-adv": 0.01,
    "sgd-adv-clients": 0.01,
    "federated-descent": 0.1,
    "pure": 0.01,
    "pure-classes": 0.05,
    "majority": 0.02,
    "functional": 0.06,
}
EFFORTS |= dict.fromkeys(["fixed-size", "quantile", "huber", "poisson", "sgd1", "sgd1-drawn"], 0.08)
EFFORTS |= dict.fromkeys(["sgd2", "dpagd"], 0.08)
EFFORTS |= dict.fromkeys(["additive", "additive-regression", "descent", "svm", "gradient", "addp"], 0.12)
EFFORTS |= dict.fromkeys(["fedsgd", "fedavg", "addp-poisson", "privgene", "least-squares"], 0.12)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in methods.names() if EXPLORE or name not in ALIKE])
def test_stands(name):
    """No attack refutes a sound method, at a part of the default number of runs."""
    found = methods.attack(name, scale=EFFORTS.get(name, 0.3), confidence=0.999, stream=SeededStream(2))
    assert found
    for _, verdict in found:
        assert not verdict.broken, verdict


SHOWN = ["functional", "sgd-maj", "sgd1", "quantile-choice", "quantiles-released", "mean-released"]
SHOWN += ["sgd1-drawn", "addp", "bounds-released", "pure", "pure-classes", "torch-adadp-box", "noisy-max"]


@pytest.mark.parametrize(
    "name",
    ["tuning", "adadp", "adal", "addp-seen", "sgd1-seen", "quantile-tree"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in SHOWN],
)
def test_shows_more_than_half_of_what_could_be_shown(name):
    found = methods.attack(name, stream=SeededStream(5))
    assert 0.5 < max(verdict.share for _, verdict in found) < 1


def test_the_exact_epsilon_of_loose_accounting_stands_beside_the_claim():
    ((_, verdict),) = methods.attack("sgd-maj", scale=0.02, stream=SeededStream(6))
    noise = 1 / gaussian.mu(4.0, 5e-6)  # two rounds of (4, 5e-6), which are added up to (8, 1e-5)
    assert verdict.claim.epsilon == 8.0
    assert verdict.exact == pytest.approx(gaussian.epsilon(2**0.5 / noise, 1e-5), rel=1e-3)
    assert verdict.share == verdict.eps_lower / verdict.exact < 1


@pytest.mark.parametrize("name", methods.published())
def test_what_is_unsound_is_broken(name):
    ((_, verdict),) = methods.attack(name, scale=0.4, stream=SeededStream(3))
    assert verdict.broken
    assert verdict.eps_lower > 2 * verdict.claim.epsilon


@pytest.mark.parametrize("name", ["sufficient", "pca", "gaussian", "sgd1-drawn", "fedsgd"])
def test_a_third_of_the_noise_is_noticed_in_a_whole_run(name, monkeypatch):
    def quieter(*args, real=mechanisms._grid):
        bits, cell = real(*args)
        return bits, cell / 3

    monkeypatch.setattr(mechanisms, "_grid", quieter)
    verdicts = [v for _, v in methods.attack(name, scale=0.2, stream=SeededStream(4))]
    assert any(verdict.broken for verdict in verdicts)


def test_steps_are_trials_only_where_all_are_equal():
    target = methods.targets()["adassp"]
    with pytest.raises(ft.Unsupported, match="where all are equal"):
        replace(target, stepwise=True).verdicts(0.01, 0.99, SeededStream(0), lambda: None)


def test_every_name_of_train_and_simulate_is_known():
    from farthing.audit.auditing import NOT_ATTACKED, attacks
    from farthing.cli.job import LABELS, NUMBERS
    from farthing.federated.methods.table import METHODS
    from farthing.linear.solvers import CLASSIFIERS, REGRESSORS

    for name in {*LABELS, *NUMBERS, *CLASSIFIERS, *REGRESSORS, *METHODS}:
        if name in NOT_ATTACKED:
            with pytest.raises(ft.Unsupported, match=f"{name} cannot be attacked: it "):
                methods.attack(name)
        else:
            assert set(attacks(name)) <= set(methods.names()), name


def test_every_method_is_named_once_and_none_is_unsound():
    assert len(methods.names()) >= 25
    assert not set(methods.names()) & set(methods.published())
    with pytest.raises(ft.FarthingError, match="there is no method 'nothing': METHOD must be one of"):
        methods.attack("nothing")


def test_neighbours_are_neighbours():
    for name, target in methods.targets().items():
        pair = getattr(target, "pair", None)
        if pair is None:
            continue
        replaced = target.claim.adjacency is ft.Adjacency.REPLACE_ONE
        assert len(pair[1]) - len(pair[0]) == (0 if replaced else 1), name
        kept = len(pair[0]) - replaced
        tables = (getattr(part, "table", part) for part in pair)  # with codes beside it, for additive models
        first, second = (np.asarray(part.X if hasattr(part, "X") else part[0]) for part in tables)
        assert np.array_equal(first[:kept], second[:kept]), name
