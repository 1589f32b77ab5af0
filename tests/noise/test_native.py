"""The kernels: where they come from, what is never loaded, and what they compute against numpy."""

import gc
import os
import shutil
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

from farthing.errors import InvalidValue
from farthing.noise import native

compiled = pytest.mark.skipif(
    os.name != "posix" or not any(map(shutil.which, native._COMPILERS)), reason="no C compiler here"
)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """As in a new process with an empty folder, and quick builds; the folder's path."""
    for name, value in {"_tried": False, "_loaded": None, "_asked": 0, "_FLAGS": (("-O0",),)}.items():
        monkeypatch.setattr(native, name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("FARTHING_NATIVE", raising=False)
    return tmp_path / "farthing"


def again(monkeypatch):
    monkeypatch.setattr(native, "_tried", False)
    return native.kernels()


def never(*_):
    raise AssertionError("this must not be reached")


class TestBuild:
    @compiled
    def test_built_once_in_a_private_folder(self, fresh, monkeypatch):
        assert native.kernels() is not None
        (built,) = fresh.iterdir()
        assert fresh.stat().st_mode & 0o777 == 0o700
        assert built.stat().st_mode & 0o077 == 0
        monkeypatch.setattr(native, "_build", never)
        assert again(monkeypatch) is not None

    def test_little_work_builds_nothing(self, fresh, monkeypatch):
        monkeypatch.setattr(native, "_load", never)
        assert native.kernels(native._ENOUGH - 2) is None
        assert native.kernels(1) is None
        with pytest.raises(AssertionError, match="reached"):
            native.kernels(1)

    def test_an_import_builds_nothing(self, tmp_path):
        code = "import farthing.noise.lattice as n; n.gaussian(n.Stream(), 5, 20)"
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
        subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True)
        assert not list(tmp_path.iterdir())

    def test_switched_off(self, fresh, monkeypatch):
        monkeypatch.setenv("FARTHING_NATIVE", "0")
        assert native.kernels() is None
        assert not fresh.exists()

    def test_no_compiler(self, fresh, monkeypatch):
        monkeypatch.setattr(native, "_COMPILERS", ("no-such-compiler",))
        assert native.kernels() is None
        assert native.clamped_outer_sum(*arrays(1, 1, 1, 1), np.zeros((1, 1), np.float32)) is False

    def test_no_compiler_but_a_home_that_is_a_file(self, fresh, monkeypatch):
        fresh.write_text("in the way")
        assert native.kernels() is None

    @compiled
    def test_a_failed_build_tries_plain_flags_then_gives_up(self, fresh, monkeypatch):
        monkeypatch.setattr(native, "_FLAGS", (("--no-such-flag",), ("-O0",)))
        assert native.kernels() is not None
        monkeypatch.setattr(native, "_FLAGS", (("--no-such-flag",),))
        assert again(monkeypatch) is None
        assert all(path.name.startswith("kernels-") for path in fresh.iterdir())

    @compiled
    def test_another_processor_builds_its_own(self, fresh, monkeypatch):
        assert native.kernels() is not None
        monkeypatch.setattr(native, "_processor", lambda: b"another")
        assert again(monkeypatch) is not None
        assert len(list(fresh.iterdir())) == 2

    @compiled
    def test_flags_of_the_processor_only_where_it_is_known(self, fresh, monkeypatch):
        monkeypatch.setattr(native, "_processor", lambda: None)
        monkeypatch.setattr(native, "_FLAGS", (("-O0", "-march=native"),))
        assert native.kernels() is None


class TestHostileFolder:
    @compiled
    @pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b[:-1] + b"x"])
    def test_a_damaged_file_is_never_loaded(self, fresh, monkeypatch, damage):
        assert native.kernels() is not None
        (built,) = fresh.iterdir()
        content = built.read_bytes()
        built.unlink()  # the open library keeps its own
        built.write_bytes(damage(content))
        built.chmod(0o700)
        monkeypatch.setattr(native, "_bind", lambda path: path.read_bytes())
        assert again(monkeypatch) == content

    @compiled
    @pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
    def test_a_folder_others_can_write_to_is_refused(self, fresh, monkeypatch, mode):
        assert native.kernels() is not None
        fresh.chmod(mode)
        monkeypatch.setattr(native, "_bind", never)
        assert again(monkeypatch) is None

    @compiled
    def test_a_file_others_can_write_to_is_built_anew(self, fresh, monkeypatch):
        assert native.kernels() is not None
        (built,) = fresh.iterdir()
        built.chmod(0o777)
        assert again(monkeypatch) is not None
        assert not next(fresh.iterdir()).stat().st_mode & 0o022

    @compiled
    def test_another_owner_is_refused(self, fresh, monkeypatch):
        assert native.kernels() is not None
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        monkeypatch.setattr(native, "_bind", never)
        assert again(monkeypatch) is None

    @compiled
    def test_a_link_is_not_followed(self, fresh, monkeypatch, tmp_path):
        assert native.kernels() is not None
        elsewhere = tmp_path / "elsewhere"
        fresh.rename(elsewhere)
        fresh.symlink_to(elsewhere)
        monkeypatch.setattr(native, "_bind", never)
        assert again(monkeypatch) is None


@compiled
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_forked_during_a_build_builds_its_own(fresh):
    native._lock.acquire()
    child = os.fork()
    if child == 0:
        os._exit(0 if native.kernels() is not None else 1)
    native._lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@compiled
def test_threads_share_one_build(fresh):
    found = []
    threads = [threading.Thread(target=lambda: found.append(native.kernels())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is not None
    assert all(one is found[0] for one in found)


def arrays(batch, steps, outs, ins, seed=0):
    generator = np.random.default_rng(seed)
    delta, a = (generator.standard_normal((batch, steps, k)).astype(np.float32) for k in (outs, ins))
    return delta, a, np.abs(generator.standard_normal((outs, ins))).astype(np.float32)


@compiled
class TestClampedOuterSum:
    @pytest.mark.parametrize("kind", [np.float32, np.float64])
    @pytest.mark.parametrize("threads", [1, 3])
    @pytest.mark.parametrize(
        "shape", [(9, 1, 5, 200), (4, 6, 3, 64), (5, 2, 1, 1), (0, 1, 2, 3), (3, 4, 2, 65)]
    )
    def test_against_numpy(self, shape, threads, kind):
        delta, a, s = arrays(*shape)
        out = np.ones(s.shape, kind)
        assert native.clamped_outer_sum(delta, a, s, out, threads=threads)
        terms = np.clip(np.einsum("bto,bti->boi", delta.astype(float), a.astype(float)), -s, s)
        assert np.allclose(out, 1 + terms.sum(axis=0), rtol=0, atol=1e-5)

    def test_two_dimensions_are_one_step(self):
        delta, a, s = arrays(6, 1, 4, 70)
        one, other = np.zeros((2, *s.shape), np.float32)
        assert native.clamped_outer_sum(delta, a, s, one)
        assert native.clamped_outer_sum(delta[:, 0].copy(), a[:, 0].copy(), s, other)
        assert np.array_equal(one, other)

    def test_no_entry_passes_its_limit_whatever_the_example(self):
        delta, a, s = arrays(1, 1, 4, 80)
        delta[0, 0, :3], a[0, 0, :4] = [np.nan, np.inf, 1e38], [np.inf, 1e38, np.nan, 0.0]
        out = np.zeros(s.shape, np.float64)
        with np.errstate(invalid="ignore"):
            assert native.clamped_outer_sum(delta, a, s, out)
        assert np.all(np.abs(out) <= s)
        assert not out[0].any()
        assert not out[:, 2].any()

    def test_refused_where_arrays_do_not_fit(self):
        delta, a, s = arrays(3, 1, 4, 5)
        for bad in [
            (delta, a[:2], s),
            (delta, a, s.T),
            (delta.astype(float), a, s),
            (delta, a[..., ::-1], s),
        ]:
            with pytest.raises(InvalidValue, match="fit each other"):
                native.clamped_outer_sum(*bad, np.zeros((4, 5), np.float32))


def test_the_table_of_a_kernel_stays_where_it_is_whatever_caches_are_cleared(monkeypatch):
    monkeypatch.setattr(native, "_address", 0)
    monkeypatch.setattr(native, "_kept", np.zeros(0))
    address, table = native.address(), weakref.ref(native.table())
    native.table.cache_clear()
    gc.collect()
    found = table()
    assert found is not None
    assert found.ctypes.data == native.address() == address
