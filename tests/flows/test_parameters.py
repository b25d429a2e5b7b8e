"""Parameters of the flows: what the form offers, and what of them Prefect may keep."""

from __future__ import annotations

from typing import Any

import pytest

from gristmill.flows.orchestration import parameters as parameter_secrets
from gristmill.flows.orchestration.parameters import (
    ProxyModel,
    RefusedError,
    SecretParameterError,
    refuse_secrets,
    without_secrets,
)

SECRET = "hunter2"


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """How often Prefect's record was masked."""
    calls: list[bool] = []
    monkeypatch.setattr(parameter_secrets, "forget_secrets", lambda: calls.append(True))
    return calls


@pytest.mark.parametrize(
    ("overrides", "store"),
    [
        ([f"sources.a.path=https://me:{SECRET}@host/a"], ""),
        ([f"engine.options.token={SECRET}"], ""),
        ([], f"s3://key:{SECRET}@bucket/store"),
    ],
)
def test_parameters_with_credentials_are_refused_and_masked(
    overrides: list[str], store: str, forgotten: list[bool]
) -> None:
    with pytest.raises(SecretParameterError, match="the environment of the machine that runs the flow") as told:
        refuse_secrets({"overrides": overrides, "store": store})
    assert SECRET not in str(told.value)
    assert str(told.value).startswith("store: " if store else "overrides: ")
    assert forgotten == [True]


def test_parameters_without_credentials_pass(forgotten: list[bool]) -> None:
    refuse_secrets({"overrides": ["tokenizer.eot_token=<|end|>", "sources.a.path=https://host/a?b=c"], "store": ""})
    assert forgotten == []


def test_what_is_wrong_is_told_without_the_credentials_that_it_is_about() -> None:
    error = ValueError("a plain sentence")
    assert without_secrets(error) is error
    told = without_secrets(ValueError(f"https://me:{SECRET}@host/a does not answer"))
    assert isinstance(told, RefusedError)
    assert str(told) == "https://***@host/a does not answer"


def test_the_proxys_form_stands_for_keys_of_the_model_and_back() -> None:
    keys: dict[str, Any] = {"layers": 3, "width": 64, "heads": 2, "qk_norm": True, "rope_theta": 500.5}
    form = ProxyModel.of(keys)
    assert form.more == ("qk_norm=true", "rope_theta=500.5")
    assert form.as_keys() == keys
    assert ProxyModel.of({"qk_norm": True}).as_keys() == {"layers": 2, "width": 128, "heads": 4, "qk_norm": True}


def test_the_forms_of_a_sweep_are_fields_and_not_json() -> None:
    from prefect.utilities.callables import parameter_schema

    from gristmill.flows.sweeps.sweep_flow import gristmill_sweep

    schema = parameter_schema(gristmill_sweep.fn).model_dump_for_openapi()
    model, share = schema["definitions"]["ProxyModel"], schema["definitions"]["SourceShare"]
    assert [model["properties"][name]["type"] for name in model["properties"]] == ["integer"] * 3 + ["array"]
    assert [share["properties"][name]["type"] for name in share["properties"]] == ["string", "number"]
    assert schema["properties"]["target"]["items"] == {"$ref": "#/definitions/SourceShare"}
