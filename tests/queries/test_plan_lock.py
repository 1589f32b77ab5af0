"""A fork beside a thread that is in a release: the child's plan goes on, with state of its own."""

import os
import threading
import warnings

import numpy as np
import pytest

from farthing.noise.lattice import SeededStream
from farthing.queries.bounds import ClipNorm
from farthing.queries.buffered import BufferedGaussian
from farthing.queries.correlated import BandedGaussian, TurnGroups
from farthing.queries.plan_lock import PlanLock

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


def in_child(work):
    """Return whether ``work`` ends in a forked child, which is ended after a while in any case."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads is what is tried here
        child = os.fork()
    if child == 0:
        done = threading.Thread(target=work, daemon=True)
        done.start()
        done.join(30)
        os._exit(1 if done.is_alive() else 0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def held_elsewhere(lock, work):
    """``work`` while another thread holds the lock."""
    inside, end = threading.Event(), threading.Event()

    def hold():
        with lock:
            inside.set()
            end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    try:
        return work()
    finally:
        end.set()
        thread.join()


def release(mechanism, turn=0):
    return mechanism.release(np.zeros(3), ClipNorm(1.0), SeededStream(turn), turn)


@pytest.mark.parametrize(
    ("mechanism", "memory"),
    [
        (BandedGaussian(1.0, bands=3).begin(), "_history"),
        (BufferedGaussian(1.0, (0.5,), (0.9,), 8).begin(), "_memory"),
    ],
)
def test_a_child_can_release_while_a_thread_of_the_parent_is_in_a_release(mechanism, memory):
    lock = getattr(mechanism, memory).lock.held
    assert held_elsewhere(lock, lambda: in_child(lambda: release(mechanism)))


def test_a_child_can_draw_while_a_thread_of_the_parent_draws():
    from farthing.queries.correlated import Cyclic

    groups = TurnGroups()
    work = lambda: groups.draw(Cyclic(0.5, 2), 10, SeededStream(0), 0)  # noqa: E731
    assert held_elsewhere(groups._lock.held, lambda: in_child(work))


def test_the_forking_thread_can_take_a_lock_that_another_thread_held():
    """Not in a new thread, which may have the number of the one that held it, and so its lock."""
    lock = PlanLock()

    def taken():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            os._exit(0 if lock.held.acquire(blocking=False) else 1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    assert held_elsewhere(lock.held, taken)


def test_the_forking_thread_releases_its_own_lock_in_both_processes():
    lock = PlanLock()
    with lock.held, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        with lock.held:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("fork", [False, True])
def test_a_child_does_not_continue_its_parents_noise(fork, monkeypatch):
    mechanism = BandedGaussian(1.0, bands=3).begin()
    release(mechanism)
    if fork:
        monkeypatch.setattr("farthing.queries.correlated.os.getpid", lambda: -1)
    alone = release(BandedGaussian(1.0, bands=3).begin(), 1)
    assert np.array_equal(release(mechanism, 1), alone) == fork
