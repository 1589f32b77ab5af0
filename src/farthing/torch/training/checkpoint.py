"""Save and restore weights, optimiser and step number, but never the spent budget.

The spent budget is recorded in the ledger's journal only. A run that is restored, from a checkpoint of any
age, continues with the budget that is left there: the weights go back, the budget does not.

    for step in (training := ft.torch.train(model, loss, data, ledger)):
        if step.t % 100 == 0:
            ft.torch.save("model.pt", training)

    training = ft.torch.train(model, loss, data, ledger)     # in another process, the same ledger's journal
    ft.torch.restore("model.pt", training)

A file holds tensors, numbers and texts only and is read with ``weights_only=True``, so that reading one runs
no code. It is written under a temporary name and renamed when it is complete. Checkpoints are as public as
the model.
"""

import contextlib
import os
import pickle
from collections import Counter, OrderedDict
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from farthing.errors import InvalidValue, Unsupported
from farthing.torch.training import sharding

_FORMAT = 1
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


class Stateful(Protocol):
    """Something with a state of tensors and numbers: a `Training`, for instance."""

    def state_dict(self) -> dict[str, Any]:
        """Return all that changes on the way."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore such a state."""


def save(path: str | os.PathLike[str], training: Stateful) -> None:
    """Write a checkpoint of a run: weights, optimiser, schedule and step number, never the spend.

    The file is written beside its place and moved there when it is whole, so that a crash leaves the one
    before it. It is as public as the model.

    Parameters
    ----------
    path : str or PathLike
        Where to write; of weights in shards (`fully_shard`) a folder, which all ranks write into.
    training : Training
        The run, or anything with ``state_dict()`` of tensors, numbers and texts.

    Raises
    ------
    InvalidValue
        A state that holds anything else: it could not be read back without running code.

    Examples
    --------
    >>> import tempfile
    >>> from types import SimpleNamespace
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/run.pt", SimpleNamespace(state_dict=lambda: {"t": 3}))
    ...     os.listdir(folder)
    ['run.pt']
    """
    state = training.state_dict()
    if (model := _sharded(training)) is None:
        _write(path, state)
    else:
        sharding.save_shards(path, state, sharding.mesh_of(model), _write)


def _write(path: str | os.PathLike[str], held: dict[str, Any]) -> None:
    state = {"farthing": _FORMAT, "state": held}
    _check(state, "the checkpoint")
    beside = f"{os.fspath(path)}.{os.getpid()}.part"
    try:
        with open(beside, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)


def restore(path: str | os.PathLike[str], training: Stateful) -> None:
    """Put a checkpoint's weights, optimiser and step number back into a run.

    Nothing is spent and nothing refunded: the run goes on with what its ledger has left.

    Parameters
    ----------
    path : str or PathLike
        A file that `save` wrote. It is read with ``weights_only=True``, which runs no code.
    training : Training
        A run of the same model and optimiser, made by `train` with the same ledger's journal.

    Raises
    ------
    InvalidValue
        No such file, not a checkpoint, or one of another model or optimiser.

    Examples
    --------
    >>> import os, tempfile
    >>> import farthing as ft
    >>> data, loss = (torch.randn(2000, 3), torch.zeros(2000)), lambda out, y: (out[:, 0] - y).square()
    >>> how = {"epsilon": 1.0, "delta": 1e-5, "steps": 2}
    >>> runs = [ft.torch.train(torch.nn.Linear(3, 1), loss, data, **how) for _ in range(2)]
    >>> _ = next(runs[0])
    >>> path = os.path.join(tempfile.mkdtemp(), "model.pt")
    >>> save(path, runs[0])
    >>> restore(path, runs[1])
    >>> runs[1].t, bool((runs[0].model.weight == runs[1].model.weight).all())
    (1, True)
    """
    model = _sharded(training)
    if model is not None:
        path = sharding.newest(path, sharding.mesh_of(model))
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise InvalidValue(f"there is no checkpoint at {os.fspath(path)!r}") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise InvalidValue(f"{os.fspath(path)!r} is not a checkpoint of farthing: {error}") from None
    if not isinstance(found, dict) or found.get("farthing") != _FORMAT:
        raise InvalidValue(f"{os.fspath(path)!r} is not a checkpoint of farthing, format {_FORMAT}")
    state = found["state"] if model is None else sharding.unpacked(found["state"], sharding.mesh_of(model))
    try:
        training.load_state_dict(state)
    except (RuntimeError, KeyError, ValueError, TypeError) as error:
        raise InvalidValue(
            f"the checkpoint at {os.fspath(path)!r} is of another model or optimizer, and what is in memory "
            f"now may be half of it: {error}"
        ) from None


def uncopied(training: Any) -> NoReturn:
    """Refuse to copy or pickle a run: two of them would go on with one memory of noise and draws."""
    raise Unsupported(
        f"a {type(training).__name__} is not copied or pickled: save it (farthing.torch.save), and restore "
        "it into a run of the same model and ledger"
    )


def _sharded(training: Stateful) -> nn.Module | None:
    """Return the model of a run, if its weights lie in shards."""
    model = getattr(training, "model", None)
    return model if isinstance(model, nn.Module) and sharding.sharded(model) else None


def _check(value: Any, name: str) -> None:
    """Refuse, before anything is written, values that could not be read back without running code."""
    if isinstance(value, dict) and type(value) in (dict, OrderedDict, Counter):
        for key, part in value.items():
            _check(part, f"{name}[{key!r}]")
    elif type(value) in (list, tuple):
        for part in value:
            _check(part, name)
    elif not isinstance(value, (*_PLAIN, Tensor)):
        raise InvalidValue(
            f"{name} holds a {type(value).__name__}, a checkpoint only tensors, numbers and texts; "
            "leave the optimizer or scheduler that keeps it out of the checkpoint"
        )
