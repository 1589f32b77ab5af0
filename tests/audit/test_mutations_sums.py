"""Planted bugs in sums: each way to let rounding through is noticed by the law of sums."""

import pytest

from farthing.audit import steps
from farthing.data import tables
from farthing.noise import native, summing
from farthing.noise.lattice import SeededStream


def test_the_real_sums_set_off_no_alarm():
    assert steps.sums(SeededStream(0)) == []


def test_rows_summed_one_after_the_other_are_noticed(monkeypatch):
    monkeypatch.setattr(
        "farthing.queries.query.summed", lambda bounded, rows: bounded(rows).cumsum(axis=0)[-1]
    )
    assert any("examples" in told for told in steps.sums(SeededStream(0)))


@pytest.mark.skipif(native.kernels(2**20) is None, reason="no compiler")
def test_kernels_that_never_move_their_sums_are_noticed(monkeypatch):
    """With a chain as long as the table, the kernel adds rows one after the other."""
    monkeypatch.setattr(steps, "badly_rounded", lambda n, apart=1, made=steps.badly_rounded: made(n, 8))
    monkeypatch.setattr(steps, "_MOST", 2.0**-20)
    monkeypatch.setattr(summing, "chain", lambda records, spread=1.0: 2**40)
    assert any("gradients" in told for told in steps.sums(SeededStream(0)))


def test_norms_that_forget_what_cancels_are_noticed(monkeypatch):
    monkeypatch.setattr(tables.Features, "cancels", (0.0, 0.0))
    assert any("centre" in told for told in steps.sums(SeededStream(0)))


def _in_chains(terms):
    """Every term a chain of its own, as in the longest of sums."""
    total = summing.Sum(2**30)
    for term in terms:
        total.add(term, total.rows)
    return total.value


def test_a_total_without_its_compensation_is_noticed(monkeypatch):
    def settle(self):
        self._high = (0.0 if self._high is None else self._high) + self._part
        self._part, self._longest, self._parts = None, 0, 0

    terms = steps.badly_rounded(2**13)
    assert abs(steps.moved(_in_chains, terms) - 1) < 2.0**-34
    monkeypatch.setattr(summing.Sum, "_settle", settle)
    assert steps.moved(_in_chains, terms) > 1 + 2.0**-30
