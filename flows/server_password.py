"""Who may use the Prefect servers that gristmill starts: whoever has the password.

Prefect's API obeys everybody by default, and with it every web page that a browser on this machine has open: a page may
rewrite a deployment and start it. Servers of gristmill answer nobody without the password, and name no other origin.
"""

from __future__ import annotations

import base64
import os
import secrets
import sys
import tempfile
import urllib.error
import urllib.request
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

SERVER_VARIABLE = "PREFECT_SERVER_API_AUTH_STRING"
CLIENT_VARIABLE = "PREFECT_API_AUTH_STRING"
ORIGINS_VARIABLE = "PREFECT_SERVER_CORS_ALLOWED_ORIGINS"
FILE = "gristmill-password"
USER = "gristmill"
PASSWORD_BYTES = 18
ASK_SECONDS = 5.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def prefect_folder() -> Path:
    """Prefect's own folder of this user."""
    return Path(os.environ.get("PREFECT_HOME") or "~/.prefect").expanduser()


def password_file() -> Path:
    """Where the password of this user's servers is kept, for them alone to read."""
    return prefect_folder() / FILE


def server_password() -> str:
    """The password of this user's servers, as USER:PASSWORD: the environment's, or the kept one, made where absent."""
    given = os.environ.get(SERVER_VARIABLE)
    if given:
        return given
    file = password_file()
    if not file.exists():
        _make(file)
    file.chmod(0o600)
    return file.read_text().strip()


def server_environment(port: int, password: str) -> dict[str, str]:
    """What lets a Prefect server on the loopback address ask for a password, and allow its own pages alone."""
    return {SERVER_VARIABLE: password, ORIGINS_VARIABLE: f"http://127.0.0.1:{port},http://localhost:{port}"}


def protect_temporary_server() -> None:
    """Let the server that Prefect starts for this process alone ask for a password that nobody else ever learns."""
    password = f"{USER}:{secrets.token_urlsafe(PASSWORD_BYTES)}"
    set_for_prefect({SERVER_VARIABLE: password, CLIENT_VARIABLE: password, ORIGINS_VARIABLE: "http://127.0.0.1"})


def is_admitted(api: str) -> bool:
    """Whether a Prefect server takes what this process shows it: the environment's password, the active profile's, or
    the kept one, where a server of this machine asks for it.

    Raises:
        OSError: it does not answer.
    """
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_KEY

    if PREFECT_API_KEY.value() or admits(api, PREFECT_API_AUTH_STRING.value()):
        return True
    if os.environ.get(CLIENT_VARIABLE) or urlsplit(api).hostname not in LOOPBACK or not password_file().exists():
        return False
    kept = server_password()
    if not admits(api, kept):
        return False
    set_for_prefect({CLIENT_VARIABLE: kept})
    return True


def admits(api: str, password: str | None) -> bool:
    """Whether a Prefect server answers questions asked with this password, or with none.

    Raises:
        OSError: it does not answer at all.
    """
    question = urllib.request.Request(f"{api.rstrip('/')}/admin/version")
    if password:
        question.add_header("Authorization", f"Basic {base64.b64encode(password.encode()).decode()}")
    try:
        with urllib.request.urlopen(question, timeout=ASK_SECONDS):
            return True
    except urllib.error.HTTPError as refused:
        return refused.code not in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


def set_for_prefect(environment: dict[str, str]) -> None:
    """Set variables of the environment, which Prefect reads once, when it is imported."""
    os.environ.update(environment)
    if "prefect" in sys.modules:
        from prefect.context import refresh_global_settings_context

        refresh_global_settings_context()


def _make(file: Path) -> None:
    """Write a new password, unless another process is faster."""
    file.parent.mkdir(parents=True, exist_ok=True)
    number, fresh = tempfile.mkstemp(prefix=f".{FILE}-", dir=file.parent)  # which nobody else may read
    with os.fdopen(number, "w") as sink:
        sink.write(f"{USER}:{secrets.token_urlsafe(PASSWORD_BYTES)}\n")
    with suppress(FileExistsError):
        os.link(fresh, file)
    os.unlink(fresh)
