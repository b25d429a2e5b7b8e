"""Which Prefect a run is shown in. Prefect is the window, never the source of truth: the store decides everything.

In this order: the server that PREFECT_API_URL names; one on this machine's usual port; the one that the active Prefect
profile names; otherwise in the store alone.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from contextlib import suppress
from http import HTTPStatus

from gristmill.flows.orchestration.server_settings import (
    CLIENT_VARIABLE,
    is_admitted,
    prefect_setting,
    set_for_prefect,
)

LOCAL_API = "http://127.0.0.1:4200/api"
PROBE_SECONDS = 2.0

DEFAULT_SETTINGS = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "false",
    "PREFECT_RUNNER_POLL_FREQUENCY": "2",
    "PREFECT_CLIENT_MAX_RETRIES": "8",
    "PREFECT_CLI_PROMPT": "false",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
}


def apply_default_settings(quiet_console: bool) -> None:
    """Set what gristmill needs of Prefect, unless the user has set it. Must run before Prefect is imported.

    Args:
        quiet_console: whether Prefect's own lines stay off the terminal (they still reach its server).
    """
    for name, value in DEFAULT_SETTINGS.items():
        os.environ.setdefault(name, value)
    if quiet_console:
        # Logging below this level goes to Prefect's server but not to this terminal, which has its own display.
        os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
        # These lines go to the terminal alone, such as each event that a server which is away for a while misses.
        os.environ.setdefault("PREFECT_LOGGING_INTERNAL_LEVEL", "CRITICAL")


def find_api() -> str | None:
    """The address of the server to use: the environment's, a local one that answers, the profile's.

    Tells Prefect of it where it would not find it itself.
    """
    if os.environ.get("PREFECT_API_URL"):
        return os.environ["PREFECT_API_URL"]
    if answers(LOCAL_API):
        set_for_prefect({"PREFECT_API_URL": LOCAL_API})
        return LOCAL_API
    return prefect_setting("PREFECT_API_URL")


def answers(api: str) -> bool:
    """Whether a Prefect server answers at this address."""
    try:
        with urllib.request.urlopen(f"{api.rstrip('/')}/health", timeout=PROBE_SECONDS) as reply:
            return json.load(reply) is True
    except (OSError, ValueError, urllib.error.URLError):
        return False


def is_ready(api: str) -> bool:
    """Whether a Prefect server that has been started can use its database, too."""
    try:
        with urllib.request.urlopen(f"{api.rstrip('/')}/ready", timeout=PROBE_SECONDS) as reply:
            return bool(reply.status == HTTPStatus.OK)
    except OSError:
        return False


def choose_tracking() -> tuple[bool, str]:
    """Decide whether a Prefect server shows the run, and word it for the terminal."""
    api = find_api()
    if api is None:
        return False, "No Prefect server runs; the run is recorded in the store (start a server: gristmill up)"
    with suppress(OSError):
        if answers(api) and is_admitted(api):
            return True, f"Shown in Prefect at {api.removesuffix('/api')}"
        if answers(api):
            return False, (
                f"Prefect at {api} asks for a password: this run is not shown there (its record is in the "
                f"store); set {CLIENT_VARIABLE}=USER:PASSWORD"
            )
    # Retrying an unreachable server for minutes would hold up the run for the sake of its picture.
    return False, f"Prefect at {api} does not answer: this run is not shown there (its record is in the store)"
