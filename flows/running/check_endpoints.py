"""Checks of model endpoints before any stage runs: API keys are set, and the endpoints
accept connections.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterable, Iterator
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from pydantic import BaseModel

from gristmill.core.secrets import mask_text
from gristmill.flows.running.execute import ANSWERS
from gristmill.flows.running.session import Session
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
    messages: dict[str, None] = {}
    for name in stages:
        if name not in force and session.committed(name) is not None:
            continue
        node = session.plan[name]
        kind = node.stage
        part = (
            session.manifest
            if kind.instances is None
            else kind.instances(session.manifest)[name]
        )
        for model in _models_in(
            (node.settings, kind.requirements.language_models(part))
        ):
            messages.update(
                dict.fromkeys(
                    f"{name}: {problem}" for problem in _problems_of(model, session)
                )
            )
    return list(messages)


def _models_in(value: object) -> Iterator[AskedModel]:
    if isinstance(value, AskedModel):
        yield value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _models_in(getattr(value, name))
    elif isinstance(value, dict):
        yield from _models_in(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _models_in(item)


def _problems_of(model: AskedModel, session: Session) -> Iterator[str]:
    # Imported here, since few runs call a model.
    from gristmill.dataprep.llm.answer_store import has_answers
    from gristmill.dataprep.llm.llm_client import settings_of

    if (
        model.api_key_env is not None
        and not os.environ.get(model.api_key_env, "").strip()
    ):
        yield (
            f"`api_key_env` of the model {model.called} names ${model.api_key_env}, "
            "which is not set; set it in the environment of `gristmill run`"
        )
    if not model.endpoints or has_answers(
        session.store.root / ANSWERS, settings_of(model, None)
    ):
        return
    errors = {url: _connection_error(url) for url in model.endpoints}
    if None not in errors.values():
        endpoint_errors = "; ".join(
            mask_text(f"{url}: {error}") for url, error in errors.items()
        )
        yield (
            f"no endpoint of the model {model.called} answers ({endpoint_errors}); "
            "start it, or correct `endpoint`"
        )


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
