"""Notification about the end of a run for a user's command or URL (`engine.notify`):
JSON of its record without the manifest, and `text`, a sentence for chat services.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import socket
import subprocess
import urllib.request

from gristmill.core.secrets import mask_known, mask_secrets
from gristmill.flows.running.run_records import RunRecord
from gristmill.flows.running.session import Session

COMMAND_SECONDS = 60.0
REQUEST_SECONDS = 10.0
log = logging.getLogger("gristmill.notify")


def notify(session: Session, record: RunRecord) -> None:
    """Send a notification about the end of a run to `engine.notify`. Failures are
    warnings and do not affect the run.

    Args:
        session: the run's.
        record: its finished record.
    """
    target = session.manifest.engine.notify
    if target is None:
        return
    content = record.content
    seconds = content["finished"] - content["started"]
    sentence = (
        f"gristmill: {content['name']} {content['state']} after {seconds:,.0f} s on "
        f"{socket.gethostname()}. {content['message']}"
    )
    message = {
        key: value
        for key, value in content.items()
        if key not in ("manifest", "settings")
    }
    try:
        payload = mask_secrets({"text": sentence.rstrip(), **message})
        body = mask_known(json.dumps(payload, ensure_ascii=False)).encode()
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
