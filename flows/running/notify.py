"""Notification about the end of a run: JSON for a user's command or URL
(`engine.notify`).
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import socket
import subprocess
import urllib.request
from pathlib import Path

from gristmill.core.secrets import mask_known, mask_secrets
from gristmill.flows.running.run_records import RunRecord
from gristmill.flows.running.session import Session

COMMAND_SECONDS = 60.0
REQUEST_SECONDS = 10.0
log = logging.getLogger("gristmill.notify")


def notify(session: Session, record: RunRecord, report: Path | None = None) -> None:
    """Send a notification about the end of a run to `engine.notify`. Failures are
    warnings and do not affect the run.

    Args:
        session: the run's.
        record: its finished record.
        report: path of its report, if any.
    """
    target = session.manifest.engine.notify
    if target is None:
        return
    try:
        text = json.dumps(
            mask_secrets(payload(session, record, report)), ensure_ascii=False
        )
        body = mask_known(text).encode()
        target = os.path.expandvars(target)
        if target.startswith(("http://", "https://")):
            headers = {"Content-Type": "application/json", "User-Agent": "gristmill"}
            request = urllib.request.Request(target, body, headers, method="POST")
            with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as answer:
                answer.read()
            return
        done = subprocess.run(
            shlex.split(target),
            input=body,
            stdout=subprocess.DEVNULL,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        if done.returncode != 0:
            log.warning(
                "engine.notify: the command ended with code %d", done.returncode
            )
    except subprocess.TimeoutExpired:
        log.warning(
            "engine.notify: the command took longer than %g s and was ended",
            COMMAND_SECONDS,
        )
    except Exception as error:  # noqa: BLE001 - notifications do not affect a run
        # A message may repeat the URL, which is a credential.
        log.warning(
            "engine.notify did not work: %s",
            str(error).replace(target, "URL") or type(error).__name__,
        )


def payload(
    session: Session, record: RunRecord, report: Path | None
) -> dict[str, object]:
    """Notification with the run's result, and `text`, a sentence for chat services."""
    content = record.content
    seconds = round(content["finished"] - content["started"], 3)
    sentence = (
        f"gristmill: {content['name']} {content['state']} after "
        f"{seconds:,.0f} s on {socket.gethostname()}"
    )
    first_line = content["message"].partition("\n")[0]
    stages = {}
    for name, entry in content["stages"].items():
        stages[name] = {
            key: value
            for key, value in entry.items()
            if key in ("how", "seconds", "rows", "error")
        }
    return {
        "text": f"{sentence}: {first_line}" if first_line else sentence,
        "run": content["run"],
        "name": content["name"],
        "manifest_file": content["manifest_file"],
        "state": content["state"],
        "message": content["message"],
        "started": content["started"],
        "finished": content["finished"],
        "seconds": seconds,
        "host": socket.gethostname(),
        "store": str(session.store.root),
        "report": None if report is None else str(report),
        "stages": stages,
    }
