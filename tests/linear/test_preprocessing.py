"""Private scaling and binning in pipelines, from one ledger."""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.pipeline import make_pipeline

import farthing as ft
from farthing.noise.lattice import SeededStream


@pytest.fixture
def table() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(20_000, 2)) * [50, 1e6] + [1950, 0]
    return X, (np.abs(X[:, 0] - 1975) > 12).astype(int)


def test_steps_of_a_pipeline_add_up_in_one_ledger(table: tuple[np.ndarray, np.ndarray]) -> None:
    X, y = table
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6), stream=SeededStream(0))
    binned = make_pipeline(
        ft.PrivateBinner(8, 0.3, 1e-6, ledger=ledger), ft.LogisticRegression(bounds=(0, 1), ledger=ledger)
    ).fit(X, y)
    assert binned.score(X, y) > 0.9  # no linear model of one number is above 0.6
    assert 0.999 < ledger.share <= 1
    assert len(binned[0].get_feature_names_out()) == binned[-1].n_features_in_


def test_scaled_features_lie_between_0_and_1(table: tuple[np.ndarray, np.ndarray]) -> None:
    X, _ = table
    scaler = clone(ft.PrivateScaler(1.0, 1e-6, random_state=0)).fit(X)
    scaled = scaler.transform(np.vstack([X, [[-1e9, 1e9]]]))
    assert (scaled.min(), scaled.max()) == (0, 1)
    assert (scaled.std(axis=0) > 0.1).all()
    assert scaler.get_feature_names_out().tolist() == ["x0", "x1"]


def test_nonsense_is_refused_before_anything_is_charged(table: tuple[np.ndarray, np.ndarray]) -> None:
    from scipy.sparse import csr_array

    ledger = ft.Ledger(ft.Budget(1.0, 1e-6))
    for rows, binner in (
        (table[0], ft.PrivateBinner(1, ledger=ledger)),
        (table[0], ft.PrivateBinner(65, ledger=ledger)),
        (table[0], ft.PrivateBinner(4, bounds="mine", ledger=ledger)),
        (csr_array(table[0]), ft.PrivateBinner(4, ledger=ledger)),
        (csr_array(table[0]), ft.PrivateScaler(ledger=ledger)),
    ):
        with pytest.raises(ft.InvalidValue):
            binner.fit(rows)
    assert ledger.share == 0
    with pytest.raises(ft.InvalidValue, match="low < high"):
        ft.PrivateBinner(4, 1.0, 1e-6, bounds=(1, 0)).fit(table[0])


@pytest.mark.parametrize("missing", [np.nan, np.inf])
@pytest.mark.parametrize("make", [ft.PrivateScaler, ft.PrivateBinner, ft.PCA])
def test_no_record_decides_whether_a_pipeline_fails(make: type, missing: float) -> None:
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(500, 2))
    y = (X[:, 0] > 0.5).astype(int)
    X[17, 1] = missing
    ledger = ft.Ledger(ft.Budget(2.0, 1e-6))
    model = make_pipeline(
        make(epsilon=0.5, delta=1e-6, ledger=ledger), ft.LogisticRegression(bounds=(0, 1), ledger=ledger)
    ).fit(X, y)
    broken = np.isfinite(model[0].transform(X)).all(axis=1)
    assert np.flatnonzero(~broken).tolist() == [17]
    assert not np.isfinite(model[0].transform(X[17:18])).any() or make is ft.PrivateScaler
    with pytest.raises(ft.InvalidValue, match="finite"):
        model.predict(X)
