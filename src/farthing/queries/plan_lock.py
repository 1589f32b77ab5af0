"""Guard the state of a plan between its turns, in threads and in forked processes."""

import os
import threading
import weakref


class PlanLock:
    """A lock, ``held``, that is free in a forked child where another thread of the parent held it.

    The child has no such thread, so an ordinary lock would never be released there. A lock of the forking
    thread itself stays held, and is released by that thread in both processes. ``with`` takes and releases
    this lock without a line of Python in between, where Ctrl-C would leave it held.

    >>> with PlanLock().held:
    ...     print("held")
    held
    """

    __slots__ = ("__weakref__", "held")

    def __init__(self) -> None:
        self.held = threading.RLock()
        _LOCKS.add(self)


_LOCKS: "weakref.WeakSet[PlanLock]" = weakref.WeakSet()


def _free_in_child() -> None:
    for lock in list(_LOCKS):
        if lock.held.acquire(blocking=False):  # free, or the forking thread's own
            lock.held.release()
        else:
            lock.held = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_in_child)
