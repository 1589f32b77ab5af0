"""Define the exceptions that farthing raises on purpose, in one tree.

    FarthingError
    ├── InvalidValue (also ValueError)       an argument is not what it must be
    ├── Unsupported (also TypeError)         no theorem covers this combination
    ├── BudgetSpent                          the next query does not fit the budget
    ├── PromiseBroken                        a countdown was asked for something it did not price
    ├── NotReleased                          charged earlier, never released: nothing new comes out
    │   └── OutOfMemory (also MemoryError)   charged, and there was no memory for the batch
    └── LedgerLocked                         the journal is damaged, truncated or rolled back

    UserWarning
    └── NotPrivate                           a value of private records that no charge covers

Nothing is released when one of these is raised, and nothing that was charged is given back. Once a query is
charged, only errors with a true ``public`` are raised: whatever else goes wrong might depend on a record
(`farthing.ledger.answers`).
"""


class FarthingError(Exception):
    """The root of all exceptions that farthing raises on purpose.

    Examples
    --------
    >>> from farthing import Budget
    >>> try:
    ...     Budget(epsilon=-1.0, delta=1e-5)
    ... except FarthingError as error:
    ...     print(error)
    epsilon must be a finite number > 0, got -1.0
    """

    public = False  # whether it says nothing about records, and so may be raised after a charge


class InvalidValue(FarthingError, ValueError):
    """An argument is out of range; the message names it, its value and the range.

    Examples
    --------
    >>> from farthing import Poisson
    >>> Poisson(1.5)
    Traceback (most recent call last):
        ...
    farthing.errors.InvalidValue: sampling_rate must be a number in (0, 1], got 1.5
    """


class Unsupported(FarthingError, TypeError):
    """No theorem known to farthing prices this combination; the message says what to use instead.

    Examples
    --------
    >>> from farthing import (Laplace, ClipNorm, Query, Everyone, PerExample)
    >>> Query(Everyone(), PerExample(lambda rows, w: rows[0]), ClipNorm(1.0), Laplace(2.0))
    Traceback (most recent call last):
        ...
    farthing.errors.Unsupported: Laplace noise needs an L1 bound: use ClipNorm(clip, order=1)
    """


class BudgetSpent(FarthingError):
    """The next query does not fit the rest of the budget. Nothing was charged for it.

    Examples
    --------
    >>> from farthing import (Budget, Ledger)
    >>> from farthing.queries.events import GaussianEvent
    >>> try:
    ...     Ledger(Budget(1.0, 1e-5)).promise(GaussianEvent(0.5))
    ... except BudgetSpent:
    ...     print("not one answer fits")
    not one answer fits
    """


class PromiseBroken(FarthingError):
    """A ledger with a promised plan was asked for something else, or something was promised too late.

    Examples
    --------
    >>> from farthing import (Budget, Ledger)
    >>> from farthing.queries.events import GaussianEvent
    >>> ledger = Ledger(Budget(1.0, 1e-5))
    >>> countdown = ledger.promise(GaussianEvent(20.0), 3)
    >>> try:
    ...     ledger.promise(GaussianEvent(20.0), 4)
    ... except PromiseBroken as error:
    ...     print(error)
    this query is already promised 3 times, not 4
    """


class NotReleased(FarthingError):
    """A request was charged earlier and its answer is gone: no second answer is drawn.

    It is raised for a ``key`` whose charge was written and whose answer never was (a crash in between).

    Examples
    --------
    >>> NotReleased.public  # it depends on no record, so it may be raised after a charge
    True
    """

    public = True


class OutOfMemory(NotReleased, MemoryError):
    """There was not enough memory for a batch. The batch is charged; the message never states its size.

    Examples
    --------
    >>> issubclass(OutOfMemory, MemoryError), issubclass(OutOfMemory, NotReleased)
    (True, True)
    """


class LedgerLocked(FarthingError):
    """The journal does not agree with its hash chain or with its head file: nothing is released.

    Examples
    --------
    >>> issubclass(LedgerLocked, FarthingError)
    True
    """


class NotPrivate(UserWarning):
    """A warning that a value was computed from private records without noise: no guarantee covers it.

    Examples
    --------
    >>> issubclass(NotPrivate, UserWarning)
    True
    """
