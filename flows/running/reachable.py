"""What would keep stages from asking their models: no key, nobody who listens. It is said before any stage runs."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterable, Iterator
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from pydantic import BaseModel

from gristmill.dataprep.secrets import mask_text
from gristmill.flows.running.execute import ANSWERS
from gristmill.flows.running.session import Session
from gristmill.mixtures.steps.asked_model import AskedModel

CONNECT_SECONDS = 5.0
PORTS = {"http": 80, "https": 443}


def unreachable_models(session: Session, stages: Iterable[str], force: Collection[str] = ()) -> list[str]:
    """A sentence for each model that stages which are not made yet would ask in vain.

    An endpoint may be away where answers by the same model and settings are kept: perhaps nothing else is asked.
    """
    found: dict[str, None] = {}
    for name in stages:
        if name in force or session.committed(name) is None:
            node = session.plan[name]
            kind = node.stage
            part = session.manifest if kind.instances is None else kind.instances(session.manifest)[name]
            for model in _models_in((node.settings, kind.asks(part))):
                for message in _why_not(model, session):
                    found[f"{name}: {message}"] = None
    return list(found)


def _models_in(value: object) -> Iterator[AskedModel]:
    if isinstance(value, AskedModel):
        yield value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _models_in(getattr(value, name))
    elif isinstance(value, dict):
        yield from _models_in(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _models_in(one)


def _why_not(model: AskedModel, session: Session) -> Iterator[str]:
    # Here, as every run comes by, and few ask a model.
    from gristmill.dataprep.asking.answer_store import has_answers
    from gristmill.dataprep.asking.client import settings_of

    if model.api_key_env is not None and not os.environ.get(model.api_key_env, "").strip():
        yield (
            f"`api_key_env` of the model {model.called} names ${model.api_key_env}, which is not set here; set it "
            "in the environment of `gristmill run`"
        )
    if not model.endpoints or has_answers(session.store.root / ANSWERS, settings_of(model, None)):
        return
    refusals = [_refusal(url) for url in model.endpoints]
    if all(refusal is not None for refusal in refusals):
        said = "; ".join(mask_text(f"{url}: {refusal}") for url, refusal in zip(model.endpoints, refusals, strict=True))
        yield f"nobody answers for the model {model.called} ({said}); start it, or correct `endpoint`"


def _refusal(url: str) -> str | None:
    """Why nobody listens at an address; None where somebody does, or a proxy stands between."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or PORTS[parts.scheme]
    if parts.scheme in getproxies() and not proxy_bypass(host):
        return None
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except OSError as error:
        return (error.strerror or str(error) or type(error).__name__).lower()
    return None
