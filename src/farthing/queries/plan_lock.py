"""Guard the state of a plan between its turns, in threads and in forked processes."""

import os
import threading
import weakref
from types import TracebackType


class PlanLock:
    """A lock that is free in a forked child where another thread of the parent held it.

    The child has no such thread, so an ordinary lock would never be released there. A lock of the forking
    thread itself stays held, and is released by that thread in both processes.

    >>> with PlanLock():
    ...     print("held")
    held
    """

    __slots__ = ("__weakref__", "_lock", "_owner")

    def __init__(self) -> None:
        self._lock, self._owner = threading.Lock(), 0
        _LOCKS.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owner = 0
        self._lock.release()


_LOCKS: "weakref.WeakSet[PlanLock]" = weakref.WeakSet()


def _free_in_child() -> None:
    for lock in list(_LOCKS):
        if lock._owner != threading.get_ident():
            lock._lock, lock._owner = threading.Lock(), 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_in_child)
