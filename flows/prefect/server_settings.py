"""Access control of Prefect's server as gristmill starts it.

By default Prefect's API accepts all requests, including those of any web page open in a
browser on this machine: a page could rewrite a deployment and start it. Servers of
gristmill require a password, and allow no other origin.
"""

from __future__ import annotations

import base64
import os
import secrets
import sys
import tempfile
import tomllib
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
    """Prefect's folder of this user."""
    return Path(os.environ.get("PREFECT_HOME") or "~/.prefect").expanduser()


def prefect_setting(name: str) -> str | None:
    """A setting of Prefect from the environment, the active profile, or a file in the
    current folder.

    Prefect, whose import takes a second, is only imported if such files exist.
    """
    profiles = Path(
        os.environ.get("PREFECT_PROFILES_PATH") or prefect_folder() / "profiles.toml"
    )
    dotenv = Path(".env")
    project = Path("pyproject.toml")
    try:
        # Most pyproject.toml files have no settings of Prefect.
        has_settings = (
            "prefect" in sys.modules
            or profiles.exists()
            or Path("prefect.toml").exists()
            or (
                dotenv.exists()
                and "prefect_" in dotenv.read_text(errors="replace").lower()
            )
            or (
                project.exists()
                and "prefect" in tomllib.loads(project.read_text()).get("tool", {})
            )
        )
    except ValueError:
        has_settings = True  # Prefect reports the error
    if not has_settings:
        return os.environ.get(name) or None
    import prefect.settings

    value = getattr(prefect.settings, name).value()
    return (
        None
        if value is None
        else str(getattr(value, "get_secret_value", lambda: value)())
    )


def password_file() -> Path:
    """File of the password of this user's servers, readable only by the user."""
    return prefect_folder() / FILE


def server_password() -> str:
    """Password of this user's servers, as USER:PASSWORD: the environment's, or the
    stored one, created if missing.
    """
    from_environment = os.environ.get(SERVER_VARIABLE)
    if from_environment:
        return from_environment
    file = password_file()
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        # readable only by this user
        descriptor, temporary_file = tempfile.mkstemp(
            prefix=f".{FILE}-", dir=file.parent
        )
        with os.fdopen(descriptor, "w") as sink:
            sink.write(f"{USER}:{secrets.token_urlsafe(PASSWORD_BYTES)}\n")
        with suppress(FileExistsError):  # another process has just written one
            os.link(temporary_file, file)
        os.unlink(temporary_file)
    file.chmod(0o600)
    return file.read_text().strip()


def keep_private() -> None:
    """Create files only for this user from now on, and restrict an existing database of
    Prefect.
    """
    os.umask(0o077)
    for file in prefect_folder().glob("prefect.db*"):
        file.chmod(0o600)


def is_admitted(api: str) -> bool:
    """True if a Prefect server accepts this process's password: the environment's, the
    active profile's, or the stored one for a server on this machine.

    Raises:
        OSError: the server does not answer.
    """
    if prefect_setting("PREFECT_API_KEY") or admits(
        api, prefect_setting(CLIENT_VARIABLE)
    ):
        return True
    if (
        os.environ.get(CLIENT_VARIABLE)
        or urlsplit(api).hostname not in LOOPBACK
        or not password_file().exists()
    ):
        return False
    stored_password = server_password()
    if not admits(api, stored_password):
        return False
    set_for_prefect({CLIENT_VARIABLE: stored_password})
    return True


def admits(api: str, password: str | None) -> bool:
    """True if a Prefect server answers requests with this password, or without one.

    Raises:
        OSError: the server does not answer.
    """
    request = urllib.request.Request(f"{api.rstrip('/')}/admin/version")
    if password:
        request.add_header(
            "Authorization", f"Basic {base64.b64encode(password.encode()).decode()}"
        )
    try:
        with urllib.request.urlopen(request, timeout=ASK_SECONDS):
            return True
    except urllib.error.HTTPError as http_error:
        return http_error.code not in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


def set_for_prefect(environment: dict[str, str]) -> None:
    """Set environment variables that Prefect reads once, when it is imported."""
    os.environ.update(environment)
    if "prefect" in sys.modules:
        from prefect.context import refresh_global_settings_context

        refresh_global_settings_context()
