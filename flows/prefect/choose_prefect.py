"""Choice of the Prefect server that shows a run. Prefect is a display; the store is the
source of truth.

In order of preference: the server in PREFECT_API_URL; a local one on the default port;
the active Prefect profile's; otherwise only the store.
"""

from __future__ import annotations

import json
import os
import urllib.request
from contextlib import suppress

from gristmill.flows.prefect.server_settings import (
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
    """Set gristmill's defaults for Prefect, unless the user has set them. Must run
    before Prefect is imported.

    Args:
        quiet_console: True to keep Prefect's lines off the terminal (they still reach
            its server).
    """
    for name, value in DEFAULT_SETTINGS.items():
        os.environ.setdefault(name, value)
    if quiet_console:
        # Records below this level go to Prefect's server but not to this terminal,
        # which has its own display.
        os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
        # These records only go to the terminal, such as each event lost while a server
        # is unreachable.
        os.environ.setdefault("PREFECT_LOGGING_INTERNAL_LEVEL", "CRITICAL")


def find_api() -> str | None:
    """Address of the server to use: the environment's, a local one that answers, the
    profile's.

    Sets it for Prefect if Prefect would not find it.
    """
    if os.environ.get("PREFECT_API_URL"):
        return os.environ["PREFECT_API_URL"]
    if answers(LOCAL_API):
        set_for_prefect({"PREFECT_API_URL": LOCAL_API})
        return LOCAL_API
    return prefect_setting("PREFECT_API_URL")


def answers(api: str) -> bool:
    """True if a Prefect server answers at this address."""
    return _fetch(api, "health") is True


def is_ready(api: str) -> bool:
    """True if a running Prefect server can also use its database."""
    return _fetch(api, "ready") is not None


def _fetch(api: str, page: str) -> object:
    url = f"{api.rstrip('/')}/{page}"
    try:
        with urllib.request.urlopen(url, timeout=PROBE_SECONDS) as reply:
            answer: object = json.load(reply)
            return answer
    except (OSError, ValueError):
        return None


def choose_tracking() -> tuple[bool, str]:
    """Decide whether a Prefect server shows the run, with a sentence for the
    terminal.
    """
    api = find_api()
    if api is None:
        return (
            False,
            "No Prefect server runs; the run is recorded in the store (start a "
            "server: gristmill up)",
        )
    with suppress(OSError):
        if answers(api):
            if is_admitted(api):
                return True, f"Shown in Prefect at {api.removesuffix('/api')}"
            return False, (
                f"Prefect at {api} requires a password: this run is not shown there "
                f"(its record is in the store); set {CLIENT_VARIABLE}=USER:PASSWORD"
            )
    # Retrying an unreachable server would delay the run for minutes only for its
    # display.
    return (
        False,
        f"Prefect at {api} does not answer: this run is not shown there (its record "
        "is in the store)",
    )
