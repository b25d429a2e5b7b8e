"""Local servers: their sockets, and uvicorn behind an access token."""

from __future__ import annotations

import socket

from gristmill.flows.access_token import SignIn
from gristmill.flows.models.limits import ImpatientProtocol

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there, on a free port for the port 0; closed by `serve`.

    Raises:
        OSError: the address is no one's here, or the port is taken.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family)


def serve(app: SignIn, listening: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM; answers on their way are finished first, for a few seconds."""
    import uvicorn

    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=5, http=ImpatientProtocol
    )
    uvicorn.Server(config).run(sockets=[listening])
