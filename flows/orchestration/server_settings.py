"""Prefect's server as gristmill starts it: its database, and who may use it.

Prefect's API obeys everybody by default, and with it every web page that a browser on this machine has open: a page may
rewrite a deployment and start it. Servers of gristmill answer nobody without the password, and name no other origin.
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
"""Read by `gristmill up` where --database is absent."""
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
"""Of PostgreSQL (docs.prefect.io, self-hosted server: 14.9 or newer); version 13 has no security updates any more."""
_POSTGRESQL = re.compile(
    r"(?:(?P<user>[^:/@?#\s]*)(?::(?:[^:/@?#\s%]|%[0-9a-fA-F]{2})*)?@)?"
    r"(?P<place>(?:\[[0-9a-fA-F:]+\]|[^:/@?#\s]*)(?::\d+)?/[^/@?#\s]+)(?:\?[^@\s]*)?"
)
"""Behind the `//`. Whatever does not fit is never repeated: it may be a password with an @ in it."""


class DatabaseError(RuntimeError):
    """A database that Prefect's server cannot use; the message names the place, never the password."""


def database_environment(url: str | None) -> dict[str, str]:
    """What tells Prefect's server its database.

    Raises:
        DatabaseError: it is not a database that the server can use, or not written as one.
    """
    if url is None:
        return {}
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise DatabaseError(f"--database: this is not a URL; write {FORM}")
    if scheme not in DRIVERS:
        raise DatabaseError(f"--database: a URL beginning with {scheme}:// is not known; write {FORM}")
    if DRIVERS[scheme].startswith("postgresql") and _POSTGRESQL.fullmatch(rest) is None:
        raise DatabaseError(
            f"--database: the URL is not written as {FORM}; in a password, write each of @ : / ? # % "
            "as a percent sign and its code: %40 %3A %2F %3F %23 %25"
        )
    return {CONNECTION_VARIABLE: f"{DRIVERS[scheme]}://{rest}"}


def check_database(url: str | None) -> str | None:
    """Connect to a PostgreSQL database as the server will, before anything is started for it.

    Args:
        url: as `database_environment` takes it.

    Returns:
        a sentence that names the database, for the terminal; None for SQLite.

    Raises:
        DatabaseError: it does not answer, refuses the user, is too old, or lets no tables be made.
    """
    connection = database_environment(url).get(CONNECTION_VARIABLE, "")
    match = _POSTGRESQL.fullmatch(connection.partition("://")[2])
    if not connection.startswith("postgresql") or match is None:
        return None
    place = f"PostgreSQL at {match['place']}" if match["place"][0] != "/" else f"PostgreSQL, {match['place'][1:]}"
    try:
        # On a thread of its own, since the caller's may have a loop that runs already.
        with ThreadPoolExecutor(1) as thread:
            asked = asyncio.wait_for(_ask(connection), CONNECT_SECONDS)
            version, may_create = thread.submit(asyncio.run, asked).result()
    except TimeoutError as error:
        raise DatabaseError(
            f"{place} did not answer within {CONNECT_SECONDS:.0f} s; is it the right host and port, "
            "and may this machine connect?"
        ) from error
    except Exception as error:
        raise DatabaseError(
            f"{place} cannot be used as {match['user'] or 'the default user'}: "
            f"{_without_address(error, connection)}; correct --database or {DATABASE_VARIABLE}"
        ) from error
    if version < LEAST_VERSION:
        raise DatabaseError(f"{place} is version {version}; Prefect's server wants {LEAST_VERSION} or newer")
    if not may_create:
        raise DatabaseError(
            f"{place} does not let {match['user'] or 'the default user'} make tables; as its "
            f"administrator: GRANT CREATE ON DATABASE ... and ON SCHEMA public TO ..."
        )
    return f"Prefect's records: {place}"


async def _ask(connection: str) -> tuple[int, bool]:
    """The server's version, and whether its user may make an extension and tables."""
    from sqlalchemy import text
    from sqlalchemy.ext.asyncio import create_async_engine

    engine: Any = create_async_engine(connection)
    try:
        async with engine.connect() as connected:
            found = (
                await connected.execute(
                    text(
                        "select current_setting('server_version_num')::int / 10000, "
                        "has_database_privilege(current_database(), 'CREATE') and has_schema_privilege('public', 'CREATE')"
                    )
                )
            ).one()
    finally:
        await engine.dispose()
    return int(found[0]), bool(found[1])


def _without_address(error: BaseException, connection: str) -> str:
    """What a driver says, in one line; nothing of it where it repeats the address."""
    while error.__cause__ is not None:
        error = error.__cause__
    said = " ".join(str(error).split()) or type(error).__name__
    password = connection.partition("://")[2].partition("@")[0].partition(":")[2]
    return type(error).__name__ if password and password in said else said


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


def prefect_setting(name: str) -> str | None:
    """A setting as Prefect has it: the environment's, the active profile's, or that of a file in this folder.

    Prefect, whose import takes a second, is asked only where there are such files.
    """
    profiles = Path(os.environ.get("PREFECT_PROFILES_PATH") or prefect_folder() / "profiles.toml")
    if "prefect" not in sys.modules and not (profiles.exists() or _is_set_in_this_folder()):
        return os.environ.get(name) or None
    import prefect.settings

    found = getattr(prefect.settings, name).value()
    return None if found is None else str(getattr(found, "get_secret_value", lambda: found)())


def _is_set_in_this_folder() -> bool:
    """Whether a file of the current folder has settings of Prefect's; a project's own pyproject.toml mostly has none."""
    dotenv, project = Path(".env"), Path("pyproject.toml")
    if Path("prefect.toml").exists() or (dotenv.exists() and "prefect_" in dotenv.read_text(errors="replace").lower()):
        return True
    try:
        return project.exists() and "prefect" in tomllib.loads(project.read_text()).get("tool", {})
    except ValueError:
        return True  # Prefect says what is wrong with it


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


def keep_private() -> None:
    """Let this process create files for its user alone, and restrict a database of Prefect's that is there already."""
    os.umask(0o077)
    for file in prefect_folder().glob("prefect.db*"):
        file.chmod(0o600)


def server_environment(port: int, password: str) -> dict[str, str]:
    """What lets a Prefect server on the loopback address ask for a password, and allow its own pages alone."""
    return {SERVER_VARIABLE: password, ORIGINS_VARIABLE: f"http://127.0.0.1:{port},http://localhost:{port}"}


def is_admitted(api: str) -> bool:
    """Whether a Prefect server takes what this process shows it: the environment's password, the active profile's, or
    the kept one, where a server of this machine asks for it.

    Raises:
        OSError: it does not answer.
    """
    if prefect_setting("PREFECT_API_KEY") or admits(api, prefect_setting(CLIENT_VARIABLE)):
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
