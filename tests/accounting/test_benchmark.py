"""The benchmark of accountants measures computations, not caches."""

from benchmarks import accounting

from farthing.accounting import pld


def test_nothing_is_cached_where_the_benchmark_is_cold():
    accounting.ours(0.01, 4.0, 10_000, 1e-5)
    assert pld._tight.cache_info().currsize > 0
    accounting.cold()
    assert pld._tight.cache_info().currsize == 0
