"""Parameters of the flows: their forms, and the values that Prefect may store."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from gristmill.flows.prefect import parameters as parameter_secrets
from gristmill.flows.prefect import reporting, sign_in
from gristmill.flows.prefect.parameters import (
    MOST_NAME_CHARS,
    RefusedError,
    SecretParameterError,
    refuse_secrets,
    run_name,
    without_secrets,
)
from gristmill.flows.stages.plan import UnknownStageError

SECRET = "hunter2"


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for each masking of Prefect's record."""
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
def test_parameters_with_credentials_are_rejected_and_masked(
    overrides: list[str], store: str, forgotten: list[bool]
) -> None:
    with pytest.raises(
        SecretParameterError, match="the environment of the machine that runs the flow"
    ) as error:
        refuse_secrets(overrides, store)
    assert SECRET not in str(error.value)
    assert str(error.value).startswith("store: " if store else "overrides: ")
    assert forgotten == [True]


def test_parameters_without_credentials_pass(forgotten: list[bool]) -> None:
    refuse_secrets(
        ["tokenizer.eot_token=<|end|>", "sources.a.path=https://host/a?b=c"], store=""
    )
    assert forgotten == []


def test_errors_are_reported_without_credentials() -> None:
    error = ValueError("a plain sentence")
    assert without_secrets(error) is error
    masked_error = without_secrets(
        ValueError(f"https://me:{SECRET}@host/a does not answer")
    )
    assert isinstance(masked_error, RefusedError)
    assert str(masked_error) == "https://***@host/a does not answer"


@pytest.mark.parametrize(
    ("manifest", "overrides", "name"),
    [
        ("/data/mill/train.yaml", [], "train"),
        (
            "train.yaml",
            ["pretrain.steps=3000", "seed=2"],
            "train: pretrain.steps=3000, seed=2",
        ),
        ("recipe:c4", [], "c4"),
        (
            "a.yaml",
            [f"sources.a.path=https://me:{SECRET}@host/a"],
            "a: sources.a.path=https://***@host/a",
        ),
    ],
)
def test_a_run_is_named_by_manifest_and_overrides(
    manifest: str, overrides: list[str], name: str
) -> None:
    assert run_name(manifest, overrides) == name
    assert len(run_name(manifest, ["x=" + "y" * 999])) == MOST_NAME_CHARS


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (UnknownStageError("no such stage"), RefusedError),
        (ZeroDivisionError("a bug"), ZeroDivisionError),
    ],
)
def test_rejections_become_sentences_and_bugs_propagate(
    error: Exception, raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    cards: list[str] = []
    monkeypatch.setattr(
        reporting, "publish_card", lambda key, text, about: cards.append(text)
    )
    with (
        pytest.raises(raised, match=str(error)),
        reporting.publishing_refusal("a.yaml"),
    ):
        raise error
    assert str(error) in cards[0]


def test_a_refused_flow_ends_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from prefect.exceptions import FailedRun

    state = reporting.failed(RefusedError("mix.tokns: unknown key"))
    assert (state.is_failed(), state.message) == (True, "mix.tokns: unknown key")
    for name in reporting.ENGINE_LOGGERS:
        logger = logging.getLogger(name)
        logger.propagate, logger.disabled = True, False
        for error in (FailedRun("mix.tokns"), ZeroDivisionError("a bug")):
            logger.error("ended", exc_info=error)
    kinds = [record.exc_info[0] for record in caplog.records if record.exc_info]
    assert kinds == [ZeroDivisionError] * len(reporting.ENGINE_LOGGERS)


def test_refused_flows_add_no_further_filters() -> None:
    reporting.failed(RefusedError("one"))
    filters = [
        list(logging.getLogger(name).filters) for name in reporting.ENGINE_LOGGERS
    ]
    reporting.failed(RefusedError("two"))
    assert filters == [
        logging.getLogger(name).filters for name in reporting.ENGINE_LOGGERS
    ]


def test_printed_link_signs_in_and_logs_omit_the_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    monkeypatch.delenv(sign_in.PAGES_VARIABLE, raising=False)
    sign_in.add_sign_in_page()
    page = tmp_path / "gristmill-pages" / "v2" / "gristmill.html"
    assert sign_in.KEY in page.read_text()
    for is_terminal in (True, False):
        monkeypatch.setattr(
            "sys.stdout.isatty", lambda is_terminal=is_terminal: is_terminal
        )
        lines = "\n".join(sign_in.how_to_open(4200, f"me:{SECRET}"))
        assert ("#bWU6aHVudGVyMg==" in lines) == is_terminal
        assert "http://127.0.0.1:4200/v2/" in lines
        assert "-L 4200:127.0.0.1:4200 -L 4201:127.0.0.1:4201" in lines
