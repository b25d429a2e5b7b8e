"""Settings of Prefect's server as gristmill starts it: its database and its access
control.

By default Prefect's API accepts all requests, including those of any web page open in a
browser on this machine: a page could rewrite a deployment and start it. Servers of
gristmill require a password, and allow no other origin.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import secrets
import sys
import tempfile
import tomllib
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

DATABASE_VARIABLE = "GRISTMILL_DATABASE"
"""Database of `gristmill up` if --database is absent."""
CONNECTION_VARIABLE = "PREFECT_API_DATABASE_CONNECTION_URL"
CONNECT_SECONDS = 10.0
DRIVERS = {
    "postgresql": "postgresql+asyncpg",
    "postgres": "postgresql+asyncpg",
    "postgresql+asyncpg": "postgresql+asyncpg",
    "sqlite+aiosqlite": "sqlite+aiosqlite",
}
FORM = "postgresql://USER:PASSWORD@HOST:PORT/NAME"
LEAST_VERSION = 14
"""Oldest version of PostgreSQL (docs.prefect.io, self-hosted server: 14.9 or newer); 13
has no security updates.
"""
_POSTGRESQL = re.compile(
    r"(?:(?P<user>[^:/@?#\s]*)(?::(?:[^:/@?#\s%]|%[0-9a-fA-F]{2})*)?@)?"
    r"(?P<place>(?:\[[0-9a-fA-F:]+\]|[^:/@?#\s]*)(?::\d+)?/[^/@?#\s]+)(?:\?[^@\s]*)?"
)
"""URL after the `//`. Text that does not match is never repeated: it may be a password
with an @.
"""


class DatabaseError(ValueError):
    """A database that Prefect's server cannot use; the message names its location,
    never the password.
    """


def database_environment(url: str | None) -> dict[str, str]:
    """Environment variables that set the database of Prefect's server.

    Raises:
        DatabaseError: the URL is malformed, or of a database that the server cannot
            use.
    """
    if url is None:
        return {}
    scheme, separator, remainder = url.partition("://")
    if not separator:
        raise DatabaseError(f"--database: this is not a URL; write {FORM}")
    if scheme not in DRIVERS:
        raise DatabaseError(
            f"--database: URLs beginning with {scheme}:// are not "
            f"supported; write {FORM}"
        )
    if (
        DRIVERS[scheme].startswith("postgresql")
        and _POSTGRESQL.fullmatch(remainder) is None
    ):
        raise DatabaseError(
            f"--database: the URL is not written as {FORM}; in a password, write each "
            "of @ : / ? # % as a percent sign and its code: %40 %3A %2F %3F %23 %25"
        )
    return {CONNECTION_VARIABLE: f"{DRIVERS[scheme]}://{remainder}"}


def check_database(url: str | None) -> str | None:
    """Connect to a PostgreSQL database as the server will, before starting it.

    Args:
        url: see `database_environment`.

    Returns:
        a sentence with the database's location for the terminal; None for SQLite.

    Raises:
        DatabaseError: the database does not answer, rejects the user, is too old, or
            does not allow creating tables.
    """
    connection = database_environment(url).get(CONNECTION_VARIABLE, "")
    match = _POSTGRESQL.fullmatch(connection.partition("://")[2])
    if not connection.startswith("postgresql") or match is None:
        return None
    user = match["user"] or "the default user"
    location = f"PostgreSQL at {match['place']}"
    if match["place"][0] == "/":
        location = f"PostgreSQL, {match['place'][1:]}"
    try:
        # In a new thread, as the caller's may run an event loop.
        with ThreadPoolExecutor(1) as thread:
            version_query = asyncio.wait_for(_query_server(connection), CONNECT_SECONDS)
            version, may_create = thread.submit(asyncio.run, version_query).result()
    except TimeoutError as error:
        raise DatabaseError(
            f"{location} did not answer within {CONNECT_SECONDS:.0f} s; check the host "
            "and port, and that this machine may connect"
        ) from error
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = " ".join(str(cause).split()) or type(cause).__name__
        password = connection.partition("://")[2].partition("@")[0].partition(":")[2]
        if password and password in reason:  # some drivers repeat it
            reason = type(cause).__name__
        raise DatabaseError(
            f"{location} cannot be used as {user}: {reason}; correct --database or "
            f"{DATABASE_VARIABLE}"
        ) from error
    if version < LEAST_VERSION:
        raise DatabaseError(
            f"{location} is version {version}; Prefect's server "
            f"requires {LEAST_VERSION} or newer"
        )
    if not may_create:
        raise DatabaseError(
            f"{location} does not allow {user} to create tables; as its administrator, "
            "run: GRANT CREATE ON DATABASE ... and ON SCHEMA public TO ..."
        )
    return f"Prefect's records: {location}"


async def _query_server(connection: str) -> tuple[int, bool]:
    """The server's version, and True if its user may create extensions and tables."""
    from sqlalchemy import text
    from sqlalchemy.ext.asyncio import create_async_engine

    engine: Any = create_async_engine(connection)
    try:
        async with engine.connect() as session:
            query = text(
                "select current_setting('server_version_num')::int / 10000, "
                "has_database_privilege(current_database(), 'CREATE') and "
                "has_schema_privilege('public', 'CREATE')"
            )
            row = (await session.execute(query)).one()
    finally:
        await engine.dispose()
    return int(row[0]), bool(row[1])


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


def server_environment(port: int, password: str) -> dict[str, str]:
    """Environment variables that make a loopback Prefect server require a password, and
    allow only its own pages.
    """
    return {
        SERVER_VARIABLE: password,
        ORIGINS_VARIABLE: f"http://127.0.0.1:{port},http://localhost:{port}",
    }


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
