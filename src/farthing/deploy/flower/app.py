"""Define Flower's two apps, which only carry bytes: they hold no key and no record, and decide nothing.

`client` hands a request to the guard's Unix socket and returns the guard's answer. `server` connects to the
coordinator's `Bridge`, sends its requests to nodes over Flower's grid, and hands the answers back. Signing,
checking, charging and counting happen at both ends, outside these apps. Our own SuperLink carries messages
itself (`farthing.deploy.flower.link`): `server` is for a SuperLink of others.
"""

import os

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from farthing.deploy.flower.carrier import (
    GUARD,
    GUARD_SECONDS,
    Carrier,
    opened,
    shorten_backoff,
    wrapped,
)
from farthing.deploy.flower.messaging import BulkGrid
from farthing.deploy.flower.superlink import BRIDGE
from farthing.deploy.messages.transport import call, carry

client = ClientApp()
server = ServerApp()


@client.query()
def relay(message: Message, context: Context) -> Message:
    """Ask the guard. Raises where it does not answer, and the party is missing from the round."""
    path = str(context.node_config[GUARD])
    answer = call(path, opened(message), seconds=GUARD_SECONDS)
    return Message(wrapped(answer), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Carry messages for the coordinator until it disconnects.

    Its bridge is named by our own SuperLink, or by ``flwr run --run-config 'bridge="PATH"'`` on another.
    """
    shorten_backoff()
    carry(str(context.run_config.get("bridge") or os.environ[BRIDGE]), Carrier(BulkGrid(grid)).exchange)
