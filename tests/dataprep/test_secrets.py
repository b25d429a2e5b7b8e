"""Credentials are masked wherever something is kept or shown, and nothing else is."""

from __future__ import annotations

import json

import pytest

from gristmill.dataprep.secrets import VARIABLE, mask_secrets, mask_text, restore_secrets, split_secrets


@pytest.mark.parametrize(("text", "masked"), [
    ("https://me:pa%20ss@host/a?b=c", "https://***@host/a?b=c"),
    ("at s3://key:secret@bucket/x: 403", "at s3://***@bucket/x: 403"),
    ("https://h/a?X-Amz-Credential=AK%2F1&X-Amz-Date=2026&X-Amz-Signature=ab12", (
        "https://h/a?X-Amz-Credential=***&X-Amz-Date=2026&X-Amz-Signature=***")),
    ("https://h/a?sv=1&sig=ab%3D#x", "https://h/a?sv=1&sig=***#x"),
    ("https://h/a?api_key=1&access_token=2&q=3", "https://h/a?api_key=***&access_token=***&q=3"),
    ("https://me@host/a@b:c", "https://me@host/a@b:c"),
    ("s3://bucket/key=1/part", "s3://bucket/key=1/part"),
    ("password: none of an address", "password: none of an address"),
])  # fmt: skip
def test_addresses_lose_their_passwords_and_keys_and_nothing_else(text: str, masked: str) -> None:
    assert mask_text(text) == masked
    assert mask_text(masked) == masked


def test_values_are_masked_by_their_key_in_records_and_in_settings() -> None:
    record = {
        "overrides": ["engine.options.sasl_password=x=y", "engine.options.token=t", "mix.tokens=5",
                      "sources.a.path=https://u:p@h/a=b"],
        "manifest": {"engine": {"options": {"aws_secret_access_key": "k", "hf_token": "t", "job_endpoint": "h:1"}},
                     "tokenizer": {"eot_token": "<|end|>", "special_tokens": ["<|user|>"]}, "steps": 3},
    }
    assert mask_secrets(record) == {
        "overrides": ["engine.options.sasl_password=***", "engine.options.token=***", "mix.tokens=5",
                      "sources.a.path=https://***@h/a=b"],
        "manifest": {"engine": {"options": {"aws_secret_access_key": "***", "hf_token": "***", "job_endpoint": "h:1"}},
                     "tokenizer": {"eot_token": "<|end|>", "special_tokens": ["<|user|>"]}, "steps": 3},
    }


def test_what_is_left_out_of_a_description_is_put_back_where_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    description = {"config": {"paths": ["a.txt", "https://me:hunter2@h/b"], "hf_token": "hunter2"}, "engine": {"n": 1}}
    written, rest = split_secrets(description)
    assert "hunter2" not in json.dumps(written)
    assert rest is not None
    monkeypatch.setenv(VARIABLE, rest)
    assert restore_secrets(json.loads(json.dumps(written))) == description
    assert split_secrets({"path": "https://h/a"}) == ({"path": "https://h/a"}, None)
    monkeypatch.delenv(VARIABLE)
    assert restore_secrets({"path": "https://h/a"}) == {"path": "https://h/a"}
