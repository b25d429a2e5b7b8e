"""The database of Prefect's server: a file of SQLite, or PostgreSQL, whose password only the server is told."""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

DATABASE_VARIABLE = "GRISTMILL_DATABASE"
"""Read by `gristmill up` where --database is absent."""
CONNECTION_VARIABLE = "PREFECT_API_DATABASE_CONNECTION_URL"
CONNECT_SECONDS = 10.0
DRIVERS = {"postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg",
           "postgresql+asyncpg": "postgresql+asyncpg", "sqlite+aiosqlite": "sqlite+aiosqlite"}
FORM = "postgresql://USER:PASSWORD@HOST:PORT/NAME"
LEAST_VERSION = 14
"""Of PostgreSQL (docs.prefect.io, self-hosted server: 14.9 or newer); version 13 has no security updates any more."""
_POSTGRESQL = re.compile(
    r"(?:(?P<user>[^:/@?#\s]*)(?::(?:[^:/@?#\s%]|%[0-9a-fA-F]{2})*)?@)?"
    r"(?P<place>(?:\[[0-9a-fA-F:]+\]|[^:/@?#\s]*)(?::\d+)?/[^/@?#\s]+)(?:\?[^@\s]*)?")
"""Behind the `//`. Whatever does not fit is never repeated: it may be a password with an @ in it."""


class DatabaseError(RuntimeError):
    """A database that Prefect's server cannot use; the message names the place, never the password."""


def database_environment(url: str | None) -> dict[str, str]:
    """What tells Prefect's server its database.

    Raises:
        DatabaseError: it is no database that the server can use, or not written as one.
    """
    if url is None:
        return {}
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise DatabaseError(f"--database: this is no URL; write {FORM}")
    if scheme not in DRIVERS:
        raise DatabaseError(f"--database: a URL beginning with {scheme}:// is not known; write {FORM}")
    if DRIVERS[scheme].startswith("postgresql") and _POSTGRESQL.fullmatch(rest) is None:
        raise DatabaseError(f"--database: the URL is not written as {FORM}; in a password, write each of @ : / ? # % "
                            "as a percent sign and its code: %40 %3A %2F %3F %23 %25")
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
        raise DatabaseError(f"{place} did not answer within {CONNECT_SECONDS:.0f} s; is it the right host and port, "
                            "and may this machine connect?") from error
    except Exception as error:
        raise DatabaseError(f"{place} cannot be used as {match['user'] or 'the default user'}: "
                            f"{_without_address(error, connection)}; correct --database or {DATABASE_VARIABLE}"
                            ) from error
    if version < LEAST_VERSION:
        raise DatabaseError(f"{place} is version {version}; Prefect's server wants {LEAST_VERSION} or newer")
    if not may_create:
        raise DatabaseError(f"{place} does not let {match['user'] or 'the default user'} make tables; as its "
                            f"administrator: GRANT CREATE ON DATABASE ... and ON SCHEMA public TO ...")
    return f"Prefect's records: {place}"


async def _ask(connection: str) -> tuple[int, bool]:
    """The server's version, and whether its user may make an extension and tables."""
    from sqlalchemy import text
    from sqlalchemy.ext.asyncio import create_async_engine

    engine: Any = create_async_engine(connection)
    try:
        async with engine.connect() as connected:
            found = (await connected.execute(text(
                "select current_setting('server_version_num')::int / 10000, "
                "has_database_privilege(current_database(), 'CREATE') and has_schema_privilege('public', 'CREATE')"
            ))).one()
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
