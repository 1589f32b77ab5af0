"""Records in parts: the same releases as from one table, in one process and on a Dask cluster."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import farthing as ft
from farthing.data.partitions import Partitions
from farthing.data.tables import Table
from farthing.linear.losses import logistic
from farthing.linear.methods.descent import descent
from farthing.linear.problem import Problem
from farthing.noise.lattice import SeededStream
from farthing.statistics.cells import Cells, Sums
from farthing.statistics.ranks import QuantileScores

RNG = np.random.default_rng(0)
CODES, NUMBERS = RNG.integers(-1, 4, 3000), RNG.normal(3, 2, 3000)


def cut(*arrays: Any) -> list[tuple[Any, ...]]:
    """The arrays in parts of several sizes, one of them empty."""
    return list(zip(*(np.split(array, [10, 10, 1500, 2999]) for array in arrays), strict=True))


def released(records: Any, query: ft.Query) -> Any:
    ledger = ft.Ledger(ft.Budget(5.0, 1e-6), stream=SeededStream(7))
    return ledger.over(records).ask(query).value


SUMS = Sums(4, 0.0, 6.0)
QUERIES = {
    "everyone": ft.Query(ft.Everyone(), SUMS, ft.ClipNorm(SUMS.norms[1]), ft.Gaussian(2.0)),
    "counts": ft.Query(ft.Everyone(), Cells(1, 4), ft.ClipNorm(1.0), ft.Gaussian(2.0)),
}


@pytest.mark.parametrize("name", QUERIES)
def test_a_statistic_is_the_same_to_the_last_bit(name: str) -> None:
    whole = ft.Rows(CODES, NUMBERS)
    parts = Partitions([ft.Rows(*some) for some in cut(CODES, NUMBERS)])
    assert len(parts) == 3000
    assert np.array_equal(released(parts, QUERIES[name]), released(whole, QUERIES[name]))
    backwards = Partitions([ft.Rows(*some) for some in reversed(cut(CODES, NUMBERS))])
    assert np.array_equal(released(backwards, QUERIES[name]), released(whole, QUERIES[name]))


def test_some_of_the_records_are_those_of_the_whole() -> None:
    parts = Partitions([ft.Rows(*some) for some in cut(CODES, NUMBERS)])
    whole, some = ft.Rows(CODES, NUMBERS), RNG.permutation(3000)[:500]
    bound = ft.ClipNorm(SUMS.norms[1])
    expected = SUMS.bounded_sum(whole.take(some), None, bound)
    assert np.array_equal(parts.take(some).summed(SUMS, None, bound), expected)
    assert len(parts.take(some)) == 500
    assert len(parts.take(np.empty(0, np.int64))) == 0


def test_a_record_that_fails_counts_as_zero_in_any_part() -> None:
    def ill(rows: Any, w: Any) -> Any:
        if (rows[0] == 13).any():
            raise ValueError("record 13 is ill")
        return np.ones((len(rows), 1))

    ledger = ft.Ledger(ft.Budget(1e4, 1e-2))
    query = ft.Query(ft.Everyone(), ft.PerExample(ill), ft.ClipNorm(1.0), ft.Gaussian(0.01))
    parts = Partitions([ft.Rows(np.arange(10)), ft.Rows(np.arange(10, 20))])
    assert round(float(ledger.over(parts).ask(query).value[0])) == 19


def test_what_is_no_sum_is_refused_before_anything_is_charged() -> None:
    ledger = ft.Ledger(ft.Budget(1.0, 1e-6))
    query = ft.Query(ft.Everyone(), QuantileScores(0.5, 0.0, 1.0), ft.ClipValue(-0.5, 0.5), ft.NoisyMax(9.0))
    with pytest.raises(ft.Unsupported, match="no sum over records"):
        ledger.over(Partitions([ft.Rows(NUMBERS)])).ask(query)
    assert ledger.share == 0
    with pytest.raises(ft.InvalidValue, match="one part or more"):
        Partitions([])


def tables() -> tuple[Table, list[Table]]:
    X = np.random.default_rng(0).uniform(size=(3000, 3))
    y = (X[:, 0] > X[:, 1]).astype(np.float64)
    return Table(X, y), [Table(*some) for some in cut(X, y)]


def weights(records: Any) -> Any:
    ledger = ft.Ledger(ft.Budget(2.0, 1e-6), stream=SeededStream(3))
    u, constant = ft.run(descent(ledger.over(records), Problem(logistic, 3000, 3, unit=False))).w
    return np.append(u, constant)


def test_a_training_is_the_same_to_rounding() -> None:
    whole, parts = tables()
    assert np.allclose(weights(Partitions(parts)), weights(whole), rtol=1e-9, atol=1e-9)


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    distributed = pytest.importorskip("distributed", reason="needs the extra dask")
    with (
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None
        ) as cluster,
        distributed.Client(cluster) as found,
    ):
        yield found


@pytest.mark.slow
def test_a_cluster_releases_the_same(client: Any) -> None:
    rows = [ft.Rows(*some) for some in cut(CODES, NUMBERS)]
    parts = Partitions.on(client, client.scatter(rows))
    assert np.array_equal(
        released(parts, QUERIES["everyone"]), released(ft.Rows(CODES, NUMBERS), QUERIES["everyone"])
    )
    whole, some = tables()
    assert np.allclose(
        weights(Partitions.on(client, client.scatter(some))), weights(whole), rtol=1e-9, atol=1e-9
    )
