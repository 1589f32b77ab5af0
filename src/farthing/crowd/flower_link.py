"""Flower's SuperLink with a doorman: from other machines nodes get in, and nobody else.

Flower serves three interfaces on one port. Nodes need the fleet's, where they prove who they are; the control
interface, which starts apps, asks nobody for a name unless an account system is set up, and the runtime's is
for the coordinator's own processes. Both are closed to whoever does not come from this machine.

``python -m farthing.crowd.flower_link ARGUMENTS`` takes flower-superlink's arguments, and ends when its
standard input does: with whoever started it.
"""

import ipaddress
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from farthing.processes import end_with_parent

NODES = "/v1/fleet/"
AT_THE_DOOR = "/farthing-doorman"  # answered by the doorman alone, to see that there is one

App = Callable[[dict[str, Any], Any, Any], Awaitable[None]]


class Doorman:
    """Wraps an ASGI app."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http" or not admitted(
            scope.get("path"), scope.get("client"), scope.get("server")
        ):
            await _answer(send, 403)
        elif scope["path"] == AT_THE_DOOR:
            await _answer(send, 204)
        else:
            await self._app(scope, receive, send)


def admitted(path: Any, peer: Any, here: Any = None) -> bool:
    """Nodes from anywhere; all else from this machine only.

    >>> admitted("/v1/fleet/pull-messages", ("192.0.2.7", 4711))
    True
    >>> admitted("/v1/control/start-run", ("192.0.2.7", 4711)), admitted("/v1/control/start-run", ("::1", 1))
    (False, True)
    """
    if isinstance(path, str) and path.startswith(NODES) and ".." not in path:
        return True
    try:
        address = ipaddress.ip_address(peer[0])
    except (TypeError, ValueError, LookupError):
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback) or (here is not None and peer[0] == here[0])


async def _answer(send: Any, status: int) -> None:
    if status == 403:
        print("refused: not from this machine, and not a node", file=sys.stderr, flush=True)
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def main() -> None:
    end_with_parent()
    import uvicorn
    from flwr.superlink.cli.flower_superlink import flower_superlink

    serve = uvicorn.run

    def guarded(app: Any, **options: Any) -> None:
        # Who comes through a proxy on this machine comes from where the proxy says; no other is believed.
        serve(Doorman(app), proxy_headers=True, forwarded_allow_ips="127.0.0.1,::1", **options)

    uvicorn.run = guarded
    flower_superlink()


if __name__ == "__main__":
    main()
