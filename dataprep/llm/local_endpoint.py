"""Serving of a model folder: a child process serves it on the loopback address while it
is in use.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from gristmill.core.processes import end_session, end_with_parent
from gristmill.core.stage_context import Context
from gristmill.mixtures.steps.asked_model import AskedModel

START_SECONDS = 900.0
"""Time limit for loading a model."""
LOOK_SECONDS = 0.2
END_SECONDS = 15.0
API_KEY_VARIABLE = "GRISTMILL_API_KEY"
"""Environment variable with the API key of the server."""
VLLM_KEY_VARIABLE = "VLLM_API_KEY"
KEY_BYTES = 32
LOG = "model-server.log"
SHOWN_LINES = 5
SERVER_MODULE = "gristmill.flows.models.model_server"
MOST_AT_ONCE = 64
"""Requests that gristmill's server generates together."""


class ServerError(RuntimeError):
    """A model cannot be served on this machine; the message says what to do."""


@contextmanager
def served(model: AskedModel, context: Context) -> Iterator[AskedModel]:
    """Yield the model with its endpoints; a model folder is served until the context
    exits.

    Raises:
        ServerError: the server does not start.
    """
    if model.folder is None:
        yield model
        return
    context.work.mkdir(parents=True, exist_ok=True)
    # All users of a machine can reach its loopback address. One key serves all models
    # of this process.
    key = os.environ.setdefault(API_KEY_VARIABLE, secrets.token_urlsafe(KEY_BYTES))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    command = _server_command(model, port)
    with (context.work / LOG).open("ab") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", __name__, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, VLLM_KEY_VARIABLE: key},
        )
        try:
            _wait(child, port, model, context.work / LOG)
            address = {
                "endpoint": f"http://127.0.0.1:{port}/v1",
                "api_key_env": API_KEY_VARIABLE,
            }
            yield model.model_copy(update={**address, "folder": None})
        finally:
            end_session(child, END_SECONDS)


def _server_command(model: AskedModel, port: int) -> list[str]:
    folder = str(model.folder)
    if model.server != "vllm":
        if find_spec("torch") is None:
            raise ServerError(
                f"the model in {folder} needs torch, which is not installed; install "
                "it with: pip install 'gristmill[train]', or give the `endpoint` of a "
                "server instead of `folder`"
            )
        batch = min(model.concurrency, MOST_AT_ONCE)
        return [sys.executable, "-m", SERVER_MODULE, folder, str(port), str(batch)]
    sibling = Path(sys.executable).with_name("vllm")
    program = str(sibling) if sibling.exists() else shutil.which("vllm")
    if program is None:
        raise ServerError(
            "`server: vllm` needs vLLM, which is not installed here; install it, on "
            "a machine with a "
            "GPU, with: pip install 'gristmill[vllm]', or leave `server` out"
        )
    return [
        program,
        "serve",
        folder,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--served-model-name",
        model.called,
        *model.server_options,
    ]


def _wait(
    child: subprocess.Popen[bytes], port: int, model: AskedModel, log: Path
) -> None:
    """Wait until a server answers.

    Raises:
        ServerError: it has exited, or takes too long.
    """
    import httpx

    end = time.monotonic() + START_SECONDS
    problem = f"does not answer after {START_SECONDS:g} s"
    with httpx.Client(trust_env=False, timeout=5.0) as client:
        while time.monotonic() < end:
            if (status := child.poll()) is not None:
                problem = f"ended (status {status})"
                break
            try:
                if client.get(f"http://127.0.0.1:{port}/health").is_success:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(LOOK_SECONDS)
    last_lines = log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
    output = " | ".join(line.strip() for line in last_lines if line.strip())
    raise ServerError(
        f"the server of {model.folder} {problem}: {output or f'see {log}'}"
    )


def main(argv: Sequence[str]) -> None:
    """Replace this process by a command that ends with its parent."""
    parent, *command = argv
    end_with_parent(signal.SIGTERM, int(parent))
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
