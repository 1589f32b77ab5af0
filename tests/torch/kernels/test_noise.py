"""Noise on tensors: price, law, what is drawn ahead, and what is refused."""

import math
import os
import pickle
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest
from scipy import stats

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from farthing.budget import Adjacency, Budget  # noqa: E402
from farthing.errors import InvalidValue, Unsupported  # noqa: E402
from farthing.ledger.ledger import Ledger  # noqa: E402
from farthing.noise import lattice  # noqa: E402
from farthing.noise.lattice import SeededStream, Stream  # noqa: E402
from farthing.queries import mechanisms  # noqa: E402
from farthing.queries.bounds import ClipCoordinates, ClipNorm, ClipValue, Kind  # noqa: E402
from farthing.queries.query import Query, Rows  # noqa: E402
from farthing.queries.samplers import Everyone, Poisson  # noqa: E402
from farthing.torch.kernels import noise  # noqa: E402
from farthing.torch.kernels import noise as noise_pool  # noqa: E402
from farthing.torch.kernels.noise import FloatGaussian, TensorGaussian  # noqa: E402
from farthing.torch.kernels.totals import SLACK  # noqa: E402

LARGE = noise._FEW + 100  # drawn ahead


class Sum:
    """A contribution whose sum is a tensor."""

    honours, shape = (Kind.NORM, Kind.COORDINATES), None

    def bounded_sum(self, records, w, bound):
        return torch.zeros(LARGE)


def releases(seed, size, count, mechanism=None, bound=None):
    stream = SeededStream(seed)
    mechanism, bound = mechanism or TensorGaussian(1.5), bound or ClipNorm(2.0)
    return torch.stack([mechanism.release(torch.full((size,), 0.25), bound, stream) for _ in range(count)])


@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize("sampled", [False, True])
def test_the_price_is_that_of_the_core(adjacency, sampled):
    for bound in (ClipNorm(2.0), ClipCoordinates(np.ones(7))):
        for mechanism in (TensorGaussian(1.1), FloatGaussian(1.1)):
            core = mechanisms.Gaussian(1.1).event(bound, adjacency, sampled)
            assert mechanism.event(bound, adjacency, sampled) == core


def test_the_grid_is_that_of_the_core_and_the_slack():
    bits, cell = mechanisms.Gaussian(0.7).grid(ClipNorm(3.0), 5000)
    assert TensorGaussian(0.7).grid(ClipNorm(3.0), 5000) == (bits, cell * (1 + SLACK))
    assert TensorGaussian(0.7, slack=0.5).grid(ClipNorm(3.0), 5000)[1] == pytest.approx(1.5 * cell)
    # the noise is never below what the price stands for, the grid's own rounding of a sum included
    assert cell * 2.0**bits * (1 + SLACK) > 0.7 * (3.0 * (1 + SLACK) + cell * math.sqrt(5000))


@pytest.mark.parametrize("size", [500, LARGE])
def test_released_values_lie_on_the_lattice(size):
    """Sums so small that float32 holds every cell."""
    bound, mechanism = ClipNorm(1.0), TensorGaussian(1.0)
    _, cell = mechanism.grid(bound, size)
    released = mechanism.release(torch.zeros(size), bound, SeededStream(4)).double() / cell
    near = released[released.abs() < 2**20]
    assert len(near) > size / 2
    assert float((near - near.round()).abs().max()) < 0.1


@pytest.mark.parametrize("size", [2000, LARGE])
def test_the_law_is_normal(size):
    z = (releases(7, size, 5) - 0.25).flatten().double().numpy() / (1.5 * 2.0 * (1 + SLACK))
    assert stats.kstest(z, "norm").pvalue > 1e-3
    assert abs(z.std() - 1) < 5 / math.sqrt(2 * len(z)) + 2.0**-12


def test_small_sums_are_released_as_by_the_core():
    total, bound = torch.linspace(-1, 1, 300), ClipNorm(1.0)
    bits, cell = TensorGaussian(2.0).grid(bound, 300)
    wanted = lattice.noisy(SeededStream(1), total.double().numpy(), 1.0, cell, bits)
    found = TensorGaussian(2.0).release(total, bound, SeededStream(1))
    assert found.dtype == torch.float32
    assert np.array_equal(found.numpy(), wanted.astype(np.float32))


@pytest.mark.parametrize("size", [1000, LARGE])
@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor], ids=["numpy", "tensor"])
def test_noise_follows_the_scale_of_each_coordinate(size, kind):
    scale = np.linspace(0.5, 4.0, size)

    class Scaled(ClipCoordinates):
        def __post_init__(self):
            """Takes the scale as it is."""

        def norm(self, order=2):
            return 1.0

    z = (
        (releases(2, size, 40, TensorGaussian(1.0), Scaled(kind(scale))) - 0.25).double().numpy()
        / scale
        / (1 + SLACK)
    )
    assert stats.kstest(z.ravel(), "norm").pvalue > 1e-3
    assert abs(z[:, : size // 2].std() / z[:, size // 2 :].std() - 1) < 0.05


def test_a_seed_repeats_itself_however_slow_the_drawing_is(monkeypatch):
    first = releases(3, LARGE, 9)
    draw, pauses = lattice.gaussian, iter([0.05, 0.0, 0.02] * 100)

    def slow(*args):
        time.sleep(next(pauses))
        return draw(*args)

    monkeypatch.setattr(lattice, "gaussian", slow)
    assert torch.equal(first, releases(3, LARGE, 9))
    assert not torch.equal(first, releases(4, LARGE, 9))


def test_no_noise_is_used_twice(monkeypatch):
    monkeypatch.setattr(noise_pool, "_RELEASES", 3)
    rounds = releases(5, LARGE, 12) - 0.25
    assert len(torch.unique(rounds[:, :50], dim=0)) == 12
    correlation = np.corrcoef(rounds.numpy())
    np.fill_diagonal(correlation, 0.0)
    assert np.abs(correlation).max() < 5.5 / math.sqrt(LARGE)


def test_noise_is_drawn_ahead_by_a_thread(monkeypatch):
    stream, bound = SeededStream(6), ClipNorm(1.0)
    started, go = [], threading.Event()
    draw = lattice.gaussian

    def waiting(*args):
        started.append(threading.current_thread())
        if len(started) > 2:
            go.wait(300)
        return draw(*args)

    monkeypatch.setattr(lattice, "gaussian", waiting)
    for _ in range(2):  # drawn ahead from the second on
        TensorGaussian(1.0).release(torch.zeros(LARGE), bound, stream)
    deadline = time.monotonic() + 300
    while len(started) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.current_thread() not in started
    go.set()
    assert TensorGaussian(1.0).release(torch.zeros(LARGE), bound, stream).std() > 0.9
    assert len(started) == 3  # what was ahead


def test_a_process_ends_while_noise_is_drawn():
    code = f"""
import time, torch
from farthing.noise import lattice
from farthing.queries.bounds import ClipNorm
from farthing.torch.kernels.noise import TensorGaussian
draw, calls = lattice.gaussian, []
def slow(*args):
    calls.append(args)
    if len(calls) > 2:
        time.sleep(0.5)
    return draw(*args)
lattice.gaussian = slow
stream = lattice.Stream()
for _ in range(2):
    TensorGaussian(1.0).release(torch.zeros({LARGE}), ClipNorm(1.0), stream)
print("done")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (0, "done", "")


@pytest.mark.parametrize("each", [False, True])
def test_the_kernel_releases_what_torch_does(each, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    total = torch.randn(1001, generator=generator) * torch.logspace(-30, 30, 1001)
    total[:3] = torch.tensor([0.5, 1.5, -2.5]) * 0.25  # ties go to the even cell
    noise = torch.from_numpy(lattice.gaussian(SeededStream(3), 1001, 21))
    scale = torch.rand(1001, generator=generator) + 0.1 if each else None
    found = noise_pool.released(total, noise, scale, 0.25)
    monkeypatch.setattr("farthing.noise.native.kernels", lambda *_: None)
    assert torch.equal(found, noise_pool.released(total, noise, scale, 0.25))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_large_sum_that_is_not_finite_is_refused(bad, native, monkeypatch):
    if not native:
        monkeypatch.setattr("farthing.noise.native.kernels", lambda *_: None)
    total = torch.zeros(LARGE)
    total[-1] = bad
    with pytest.raises(InvalidValue, match="not finite"):
        TensorGaussian(1.0).release(total, ClipNorm(1.0), SeededStream(0))


def test_noise_may_be_told_where_to_lie():
    room = np.zeros(3 * 2**15 + 5, np.int64)
    assert lattice.gaussian(SeededStream(2), len(room), 20, room) is room
    assert np.array_equal(room, lattice.gaussian(SeededStream(2), len(room), 20))


def test_a_failed_draw_is_reported_and_not_repeated(monkeypatch):
    stream, bound = SeededStream(8), ClipNorm(1.0)
    for _ in range(2):
        TensorGaussian(1.0).release(torch.zeros(LARGE), bound, stream)
    count = noise_pool._AHEAD["cpu"] // LARGE
    draw = lattice.gaussian

    def failing(*args):
        raise MemoryError("no room")

    monkeypatch.setattr(lattice, "gaussian", failing)
    for _ in range(min(count, noise_pool._RELEASES)):  # the pool; its successor fails
        TensorGaussian(1.0).release(torch.zeros(LARGE), bound, stream)
    with pytest.raises(MemoryError, match="no room"):
        TensorGaussian(1.0).release(torch.zeros(LARGE), bound, stream)
    monkeypatch.setattr(lattice, "gaussian", draw)
    assert TensorGaussian(1.0).release(torch.zeros(LARGE), bound, stream).std() > 0.9


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_drops_the_noise_pool():
    stream = Stream()
    for _ in range(3):
        TensorGaussian(1.0).release(torch.zeros(LARGE), ClipNorm(1.0), stream)
    assert noise_pool._pools[stream]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads: the child ends at once
        child = os.fork()
    if child == 0:
        os._exit(0 if not noise_pool._pools and noise_pool._process == os.getpid() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert noise_pool._pools[stream]


def test_a_fork_past_the_hooks_drops_the_noise_pool_too(monkeypatch):
    stream = SeededStream(9)
    for _ in range(3):
        TensorGaussian(1.0).release(torch.zeros(LARGE), ClipNorm(1.0), stream)
    pool = next(iter(noise_pool._pools[stream].values()))
    monkeypatch.setattr(noise_pool, "_process", -1)
    TensorGaussian(1.0).release(torch.zeros(LARGE), ClipNorm(1.0), stream)
    assert noise_pool._process == os.getpid()
    assert pool not in noise_pool._pools[stream].values()


def test_the_stock_is_bounded_and_dies_with_its_stream():
    stream = SeededStream(10)
    for size in range(LARGE, LARGE + 10):
        TensorGaussian(1.0).release(torch.zeros(size), ClipNorm(1.0), stream)
    assert len(noise_pool._pools[stream]) == noise_pool._POOLS
    before = len(noise_pool._pools)
    del stream
    assert len(noise_pool._pools) == before - 1


def test_a_draw_of_its_own_key_goes_on_with_other_words_after_a_fork():
    first, second = noise_pool.Keyed(bytes(32)), noise_pool.Keyed(bytes(32))
    assert (first.integers(4) == second.integers(4)).all()
    first._rekey()
    assert not (first.integers(4) == second.integers(4)).any()
    assert not first.sound


@pytest.mark.parametrize(
    ("total", "bound", "said"),
    [
        (np.zeros(3), ClipNorm(1.0), "flat float32 tensor, got ndarray"),
        (torch.zeros(3, dtype=torch.float64), ClipNorm(1.0), "got torch.float64"),
        (torch.zeros(3, 2), ClipNorm(1.0), r"got torch.float32 \(3, 2\)"),
        (torch.zeros(0), ClipNorm(1.0), "flat float32 tensor"),
        (torch.zeros(3), ClipCoordinates(np.ones(4)), "the bound has 4 coordinates, the sum has 3"),
        (torch.zeros(3), ClipValue(0.0, 1.0), "ClipValue bounds one number"),
        (torch.tensor([1.0, math.nan]), ClipNorm(1.0), "not finite"),
        (torch.tensor([1.0, -math.inf]), ClipNorm(1.0), "not finite"),
    ],
)
def test_what_cannot_be_released_is_refused(total, bound, said):
    with pytest.raises(InvalidValue, match=said):
        TensorGaussian(1.0).release(total, bound, SeededStream(0))


def test_parameters_are_checked():
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(InvalidValue, match="noise"):
            TensorGaussian(bad)
        with pytest.raises(InvalidValue, match="slack"):
            TensorGaussian(1.0, slack=bad)
    with pytest.raises(Unsupported, match="finer"):
        TensorGaussian(1e9).release(torch.zeros(LARGE), ClipNorm(1.0), SeededStream(0))


def test_a_mechanism_is_a_value():
    assert TensorGaussian(1.0) == TensorGaussian(1.0) != TensorGaussian(2.0)
    assert pickle.loads(pickle.dumps(TensorGaussian(1.0))) == TensorGaussian(1.0)


def test_sums_far_out_are_clamped_not_wrapped():
    released = TensorGaussian(1e-3).release(torch.full((LARGE,), 3e38), ClipNorm(1.0), SeededStream(0))
    assert torch.isfinite(released).all()
    assert (released > 0).all()


def test_through_the_door():
    ledger = Ledger(Budget(1.0, 1e-5))
    query = Query(Poisson(0.1), Sum(), ClipNorm(1.0), TensorGaussian(4.0))
    countdown = ledger.promise(query)
    answer = ledger.over(Rows(np.zeros(100))).ask(query)
    assert countdown.left == countdown.times - 1
    assert answer.value.shape == (LARGE,)
    assert ledger.guarantee.note == ""


def test_float_noise_needs_a_ledger_that_says_so(tmp_path):
    query = Query(Everyone(), Sum(), ClipNorm(1.0), FloatGaussian(40.0))
    ledger = Ledger(Budget(1.0, 1e-5))
    with pytest.raises(Unsupported, match="adds float noise: use lattice noise, or Ledger"):
        ledger.over(Rows(np.zeros(100))).ask(query)
    assert ledger.share == 0
    path = tmp_path / "a.ledger"
    with Ledger(Budget(1.0, 1e-5), journal=path, float_noise=True) as named:
        named.over(Rows(np.zeros(100))).ask(query)
        for guarantee in (named.guarantee, named.spent, named.allot(0.1, 1e-6).guarantee):
            assert "float noise: true of real numbers" in guarantee.note
            assert math.isfinite(guarantee.epsilon)
    with Ledger.open(path) as again:
        assert "float noise" in str(again.guarantee)


def test_float_noise_has_the_deviation_of_the_price():
    z = (releases(11, 50_000, 2, FloatGaussian(1.5)) - 0.25).flatten().double().numpy()
    assert stats.kstest(z / (3.0 * (1 + SLACK)), "norm").pvalue > 1e-3


def test_a_scale_that_was_changed_in_place_gets_no_noise():
    scale = torch.ones(3)
    assert torch.equal(noise.beside(scale, scale.device), scale)
    scale.mul_(2.0)
    with pytest.raises(InvalidValue, match="changed in place"):
        noise.beside(scale, scale.device)


def test_noise_of_many_coordinates_is_added_in_the_memory_of_the_sum(monkeypatch):
    monkeypatch.setitem(noise._HUGE, "cpu", 2**15)
    monkeypatch.setattr(noise, "_PIECE", 2**14)
    total, scale = torch.full((50_000,), 7.0), torch.linspace(1.0, 2.0, 50_000)
    released = TensorGaussian(1.0).release(total, ClipNorm(2.0, scale=scale), SeededStream(3))
    assert released.data_ptr() == total.data_ptr()
    each = (released - 7.0) / scale / 2.0
    assert 0.98 < float(each.std()) < 1.04
    assert abs(float(each.mean())) < 0.03
    one, other = each[: 2**14], each[2**14 : 2**15]
    assert abs(float((one * other).mean())) < 0.05  # every piece has noise of its own
