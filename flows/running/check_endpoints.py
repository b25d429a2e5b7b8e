"""Checks of model endpoints before any stage runs: API keys are set, and the endpoints
accept connections.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterable
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from gristmill.core.secrets import mask_text
from gristmill.flows.running.execute import ANSWERS
from gristmill.flows.running.session import Session
from gristmill.mixtures.base import parts_of
from gristmill.mixtures.steps.asked_model import AskedModel

CONNECT_SECONDS = 5.0
PORTS = {"http": 80, "https": 443}


def unreachable_models(
    session: Session, stages: Iterable[str], force: Collection[str] = ()
) -> list[str]:
    """Messages about models that unfinished stages could not call.

    An endpoint may be down if answers of the same model and settings are stored: they
    may suffice.
    """
    messages: list[str] = []
    answers = session.store.root / ANSWERS
    for name in session.unfinished(stages, force):
        node = session.plan[name]
        models_of = node.stage.language_models
        sections = (node.settings, models_of(session.part_of(name)))
        for _, model in parts_of(sections, AskedModel):
            # Imported here, since few runs call a model.
            from gristmill.dataprep.llm.answer_store import has_answers
            from gristmill.dataprep.llm.client import settings_of

            key = model.api_key_env
            if key is not None and not os.environ.get(key, "").strip():
                messages.append(
                    f"{name}: `api_key_env` of the model {model.called} names ${key}, "
                    "which is not set; set it in the environment of `gristmill run`"
                )
            if not model.endpoints or has_answers(answers, settings_of(model, None)):
                continue
            errors = {url: _connection_error(url) for url in model.endpoints}
            if None not in errors.values():
                endpoint_errors = "; ".join(
                    mask_text(f"{url}: {error}") for url, error in errors.items()
                )
                messages.append(
                    f"{name}: no endpoint of the model {model.called} answers "
                    f"({endpoint_errors}); start it, or correct `endpoint`"
                )
    return list(dict.fromkeys(messages))


def _connection_error(url: str) -> str | None:
    """Error of connecting to a URL; None if the connection succeeds, or a proxy is
    used.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or PORTS[parts.scheme]
    if parts.scheme in getproxies() and not proxy_bypass(host):
        return None
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except OSError as error:
        return (error.strerror or str(error) or type(error).__name__).lower()
    return None
