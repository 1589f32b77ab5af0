"""What ``farthing guard`` does: reads the policy and the records, listens until it is told to stop."""

import logging
import signal
import sys
import zipfile
from pathlib import Path

import numpy as np

from farthing.data import table_files
from farthing.data.tables import Table
from farthing.deploy.guard.keeper import Guard
from farthing.deploy.guard.policy import Policy
from farthing.deploy.guard.server import Server
from farthing.deploy.messages.signed import Signer
from farthing.errors import InvalidValue
from farthing.noise.lattice import Stream


def records_of(policy: Policy) -> Table:
    """The party's records, with as many features (multinomial: of such classes) as the policy says.

    That reads the records, on the party's own machine, once: afterwards nothing about a record is refused.
    """
    if policy.schema is not None:
        X, y = table_files.read(str(policy.records), table_files.schema_of(policy.schema, None))
    else:
        X, y = _arrays(policy.records)
    if X.ndim != 2 or X.shape[1] != policy.limits.width:
        raise InvalidValue(f"records must have the {policy.limits.width} features of the policy")
    y = np.asarray(y, dtype=np.float64)
    if "multinomial" in policy.limits.losses and not np.isin(y, np.arange(policy.limits.outputs)).all():
        raise InvalidValue(
            f"labels must be the classes 0 to {policy.limits.outputs - 1} of the policy's outputs = "
            f"{policy.limits.outputs}: give outputs the number of classes"
        )
    return Table(X, y)


def _arrays(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as found:
            X, y = np.asarray(found["X"]), np.asarray(found["y"])
    except OSError as error:
        raise InvalidValue(f"records must be an .npz file, {str(path)!r}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, EOFError, zipfile.BadZipFile):
        raise InvalidValue(
            f"records must be an .npz file with arrays X and y, {str(path)!r} is not"
        ) from None
    if y.ndim != 1 or y.dtype.kind not in "biuf" or not np.isfinite(y).all():
        raise InvalidValue("targets must be one finite number a record")
    if X.dtype.kind == "f" and not np.isfinite(X).all():
        raise InvalidValue("features must be finite; replace missing values by a public constant")
    return X, y


def opened(policy: Policy, *, stream: Stream | None = None) -> Guard:
    """The guard of a policy, over its records."""
    return Guard(policy, records_of(policy), Signer.load(policy.key), stream=stream)


def guard(path: Path, *, check: bool = False, stream: Stream | None = None) -> str:
    """Listens until SIGTERM or SIGINT; with ``check`` only sees that everything is in order.

    Returns the guard's public key, in hexadecimal.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    keeper = opened(Policy.load(path), stream=stream)
    public = keeper.public.hex()
    try:
        if check:
            return public
        server = Server(keeper)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: server.close())
        print(f"listening {public}", flush=True)
        server.serve()
        return public
    finally:
        keeper.close()
