"""Servers of pages on this machine: their sockets, and uvicorn."""

from __future__ import annotations

import socket

from gristmill.flows.access_token import SignIn

LOOPBACK = "127.0.0.1"


def listen(port: int) -> socket.socket:
    """Open a socket on the loopback address; port 0 takes a free port. `serve` closes it.

    Raises:
        OSError: the port is taken.
    """
    return socket.create_server((LOOPBACK, port))


def serve(app: SignIn, server_socket: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM; open requests have five seconds to finish."""
    import uvicorn

    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=5)
    uvicorn.Server(config).run(sockets=[server_socket])
