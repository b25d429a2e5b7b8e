"""Defaults of `compile`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gristmill.mixtures.schema.engine import Compute, Parallel
from gristmill.train.distributed.compiling import resolve_compile

PLAIN: dict[str, Any] = {"steps": 3}


def resolved(config: dict[str, Any], stage: str = "pretrain", **parallel: int) -> str:
    return resolve_compile(
        Compute(), Parallel.model_validate(parallel), stage, config
    ).compile


def test_plain_decoders_are_compiled_by_default_on_gpus_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert resolved(PLAIN) == "off"
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert resolved(PLAIN) == "block"
    assert resolved(PLAIN, shard=8) == "block"
    assert resolved(PLAIN, tensor=2) == resolved(PLAIN, stage="rl") == "off"
    assert resolved({**PLAIN, "model": {"moe": {"experts": 4}}}) == "off"
    assert resolved({**PLAIN, "masked": {}}) == "off"
    assert (
        resolved({**PLAIN, "length_ramp": [{"until_step": 2, "sequence_length": 64}]})
        == "off"
    )


def test_explicit_setting_is_kept() -> None:
    for chosen in ("off", "block", "model"):
        assert (
            resolve_compile(
                Compute(compile=chosen), Parallel(), "pretrain", PLAIN
            ).compile
            == chosen
        )
