"""Credentials are masked in everything that is kept or shown."""

from __future__ import annotations

import io
import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.core import secrets
from gristmill.core.secrets import (
    VARIABLE,
    MaskedStream,
    mask_addresses,
    mask_secrets,
    mask_text,
    remember_secrets,
    restore_secrets,
    split_secrets,
)

SECRETS = st.text(
    string.ascii_letters + string.digits + "-_.~+", min_size=8, max_size=40
).filter(
    # A port or a slash is not a password; text that the address contains anyway could
    # not be distinguished.
    lambda text: (
        not text.isdigit() and text not in "https://example.org/folder/file.jsonl"
    )
)
PLACES = [
    "{scheme}://user:{secret}@example.org/folder/file.jsonl",
    "{scheme}://{secret}:x@example.org:80/file.jsonl",
    "{scheme}://:{secret}@example.org/file.jsonl",
    "{scheme}://user:a/{secret}@example.org/file.jsonl",
    "simplecache::{scheme}://user:{secret}@example.org/file.jsonl",
    "{scheme}://example.org/file.jsonl?{name}={secret}",
    "{scheme}://example.org/file.jsonl?a=b&{name}={secret}&c=d",
    "{scheme}://example.org/file.jsonl?a=b;{name}={secret}",
    "{scheme}://example.org/file.jsonl#{name}={secret}",
    "{scheme}://example.org/file.jsonl?at=https%3A%2F%2Fuser%3A{secret}%40example.org",
]
NAMES = [
    "pwd",
    "auth",
    "code",
    "pass",
    "password",
    "Passphrase",
    "token",
    "access_token",
    "X-Amz-Signature",
    "X-Amz-Security-Token",
    "X-Amz-Credential",
    "sig",
    "key",
    "api_key",
    "apikey",
    "client_secret",
    "jwt",
    "AccountKey",
    "user[pwd]",
    "auth_key",
    "sessionid",
    "id-token",
]


@pytest.fixture(autouse=True)
def no_known_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_known", set())


@given(
    place=st.sampled_from(PLACES),
    name=st.sampled_from(NAMES),
    scheme=st.sampled_from(["https", "s3", "gs", "ftp"]),
    secret=SECRETS,
)
def test_secret_is_masked_in_every_part_of_an_address(
    place: str, name: str, scheme: str, secret: str
) -> None:
    address = place.format(scheme=scheme, name=name, secret=secret)
    sentence = f"cannot open '{address}': refused (403)"
    record = {"path": [address], "files": {address: 1}, "message": sentence}
    assert secret not in mask_text(address)
    assert secret not in mask_text(address.replace(secret, f"a%40{secret}"))
    assert secret not in mask_text(sentence)
    assert mask_text(sentence).endswith("': refused (403)")
    assert secret not in json.dumps(mask_addresses(record))
    written, withheld = split_secrets({"path": address, "url": f"{address} "})
    assert secret not in json.dumps(written)
    assert mask_text(mask_text(sentence)) == mask_text(sentence)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, withheld or "[]")
        assert restore_secrets(written) == {"path": address, "url": f"{address} "}
        assert secret not in mask_text(
            f"a worker's library: {secret!r} is no name of a bucket"
        )


@given(place=st.sampled_from(PLACES), name=st.sampled_from(NAMES), secret=SECRETS)
def test_secret_repeated_by_a_library_is_masked(
    place: str, name: str, secret: str
) -> None:
    address = place.format(scheme="s3", name=name, secret=secret)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secrets, "_known", set())
        remember_secrets({"sources": {"a": {"path": address}}})
        assert secret not in mask_text(
            f'Invalid bucket name "{secret}": it must match the expression'
        )
        output = io.StringIO()
        print(
            f"resume with: gristmill run --store '{address}'", file=MaskedStream(output)
        )
        assert secret not in output.getvalue()


def test_key_split_at_slashes_is_masked_in_parts() -> None:
    remember_secrets("s3://AKIAEXAMPLE:wJalrXUtnFEMI/K7MDENG/bPxRfiCY@bucket/folder")
    assert (
        mask_text('Invalid bucket name "AKIAEXAMPLE:wJalrXUtnFEMI": it')
        == 'Invalid bucket name "***": it'
    )
    assert (
        mask_text("K7MDENG is short, bPxRfiCYX is not")
        == "K7MDENG is short, ***X is not"
    )


def test_addresses_quoted_in_documents_are_kept() -> None:
    output = io.StringIO()
    print("see https://a:b@c/?code=7", file=MaskedStream(output))
    assert output.getvalue() == "see https://a:b@c/?code=7\n"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("https://me:pa%20ss@host/a?b=c", "https://***@host/a?b=c"),
        ("at s3://key:secret@bucket/x: 403", "at s3://***@bucket/x: 403"),
        (
            "https://h/a?X-Amz-Credential=AK%2F1&X-Amz-Date=2026&X-Amz-Signature=ab12",
            ("https://h/a?X-Amz-Credential=***&X-Amz-Date=2026&X-Amz-Signature=***"),
        ),
        ("https://h/a?sv=1&sig=ab%3D#x", "https://h/a?sv=1&sig=***#x"),
        (
            "https://h/a?api_key=1&access_token=2&q=3",
            "https://h/a?api_key=***&access_token=***&q=3",
        ),
        ("https://me@host/a@b:c", "https://me@host/a@b:c"),
        ("s3://bucket/key=1/part", "s3://bucket/key=1/part"),
        ("password: none of an address", "password: none of an address"),
        ("https://me:p@ss@host/a@b", "https://***@host/a@b"),
        ("s3://AKIA:wJal/rXU+tn/K@bucket/a@b", "s3://***@bucket/a@b"),
        ("redis://:pw@host", "redis://***@host"),
        (
            "http://localhost:8080/a@b, http://[::1]:80/@c",
            "http://localhost:8080/a@b, http://[::1]:80/@c",
        ),
        (
            "abfs://a-container-of-some-length@account/x",
            "abfs://a-container-of-some-length@account/x",
        ),
        ("https://ghp_0123456789abcdefghij@host/x", "https://***@host/x"),
        (
            "https://h/?next=https%3A%2F%2Fme%3Apw%40h2%2F&x=1",
            "https://h/?next=https%3A%2F%2F***%40h2%2F&x=1",
        ),
        (
            "https://h/?u=http%3A%2F%2Fh2%3Fauth%3Dpw%26x%3D1",
            "https://h/?u=http%3A%2F%2Fh2%3Fauth%3D***%26x%3D1",
        ),
        ("https://h/#access_token=1&state=2", "https://h/#access_token=***&state=2"),
        (
            "https://h/?user[pwd]=1&code=2&auth=3;pass=4&codec=5",
            "https://h/?user[pwd]=***&code=***&auth=***;pass=***&codec=5",
        ),
    ],
)
def test_only_passwords_and_keys_of_addresses_are_masked(
    text: str, masked: str
) -> None:
    assert mask_text(text) == masked
    assert mask_text(masked) == masked


def test_values_are_masked_by_key() -> None:
    record = {
        "overrides": [
            "engine.options.sasl_password=x=y",
            "engine.options.token=t",
            "mix.tokens=5",
            "sources.a.path=https://u:p@h/a=b",
        ],
        "manifest": {
            "engine": {
                "options": {
                    "aws_secret_access_key": "k",
                    "hf_token": "t",
                    "job_endpoint": "h:1",
                }
            },
            "tokenizer": {"eot_token": "<|end|>", "special_tokens": ["<|user|>"]},
            "steps": 3,
        },
    }
    assert mask_secrets(record) == {
        "overrides": [
            "engine.options.sasl_password=***",
            "engine.options.token=***",
            "mix.tokens=5",
            "sources.a.path=https://***@h/a=b",
        ],
        "manifest": {
            "engine": {
                "options": {
                    "aws_secret_access_key": "***",
                    "hf_token": "***",
                    "job_endpoint": "h:1",
                }
            },
            "tokenizer": {"eot_token": "<|end|>", "special_tokens": ["<|user|>"]},
            "steps": 3,
        },
    }


def test_split_secrets_are_restored_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    description = {
        "config": {"paths": ["a.txt", "https://me:hunter2@h/b"], "hf_token": "hunter2"},
        "engine": {"n": 1},
    }
    written, withheld = split_secrets(description)
    assert "hunter2" not in json.dumps(written)
    assert withheld is not None
    monkeypatch.setenv(VARIABLE, withheld)
    assert restore_secrets(json.loads(json.dumps(written))) == description
    assert split_secrets({"path": "https://h/a"}) == ({"path": "https://h/a"}, None)
    monkeypatch.delenv(VARIABLE)
    assert restore_secrets({"path": "https://h/a"}) == {"path": "https://h/a"}
