"""Rollouts through the interface of vLLM, with a stub that reads the same folder
through transformers.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from gristmill.train.rl.rollouts import Generated
from gristmill.train.rl.vllm_engine import (
    RolloutEngineError,
    check_agreement,
)
from tests.train.test_rl import metrics, rl_config, shape, start, tensors_of  # noqa: F401 - fixtures

BATCHES = 3


@dataclass
class SamplingParams:
    """The parameters of vLLM that are used."""

    temperature: float
    max_tokens: int
    stop_token_ids: list[int]
    seed: int
    logprobs: int
    detokenize: bool


class LLM:
    """The part of vLLM's class that is used; reads the folder again on request unless
    `stale`.
    """

    stale = False
    instances: Sequence[Any] = ()

    def __init__(
        self,
        model: str,
        skip_tokenizer_init: bool,
        dtype: str,
        max_model_len: int,
        gpu_memory_utilization: float,
        logprobs_mode: str,
    ) -> None:
        assert skip_tokenizer_init
        assert (dtype, max_model_len, gpu_memory_utilization, logprobs_mode) == (
            "float32",
            32,
            0.25,
            "processed_logprobs",
        )
        self.folder, self.calls = model, list[str]()
        LLM.instances = [*LLM.instances, self]
        self._read()

    def _read(self) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(self.folder).eval()

    def collective_rpc(self, method: str) -> None:
        assert method == "reload_weights"
        self.calls.append(method)
        if not self.stale:
            self._read()

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset_prefix_cache")

    @torch.no_grad()
    def generate(
        self,
        prompts: list[dict[str, list[int]]],
        sampling: list[SamplingParams],
        use_tqdm: bool,
    ) -> list[Any]:
        return [
            SimpleNamespace(
                outputs=[self._generate_one(prompt["prompt_token_ids"], params)]
            )
            for prompt, params in zip(prompts, sampling, strict=True)
        ]

    def _generate_one(self, prompt: list[int], params: SamplingParams) -> Any:
        generator = torch.Generator().manual_seed(params.seed)
        ids, logps = list(prompt), []
        while len(ids) - len(prompt) < params.max_tokens and (
            len(ids) == len(prompt) or ids[-1] not in params.stop_token_ids
        ):
            logits = self.model(torch.tensor([ids])).logits[0, -1]
            scaled = torch.log_softmax(logits / (params.temperature or 1.0), -1)
            token = (
                int(scaled.argmax())
                if not params.temperature
                else int(torch.multinomial(scaled.exp(), 1, generator=generator))
            )
            ids.append(token)
            logps.append({token: SimpleNamespace(logprob=float(scaled[token]))})
        return SimpleNamespace(token_ids=ids[len(prompt) :], logprobs=logps)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> type[LLM]:
    """The stub in place of the package."""
    module = ModuleType("vllm")
    module.__spec__ = importlib.util.spec_from_loader("vllm", None)
    module.LLM, module.SamplingParams = LLM, SamplingParams  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(LLM, "instances", [])
    return LLM


@pytest.fixture
def config(rl_config: dict[str, Any]) -> dict[str, Any]:  # noqa: F811
    """Settings with few steps that change the policy fast."""
    return {
        **rl_config,
        "steps": BATCHES,
        "rollouts": "vllm",
        "vllm_memory": 0.25,
        "temperature": 0.8,
        "rollouts_agree": 0.001,
        "holdout": 0.0,
        "precision": "fp32",
    }


@pytest.mark.slow
def test_agreeing_engine_draws_the_answers(
    vllm: type[LLM],
    run_stage: Any,
    start: dict[str, Path],  # noqa: F811
    config: dict[str, Any],
    tmp_path: Path,
) -> None:
    run_stage("rl", start, config, tmp_path / "rl")
    lines = metrics(tmp_path / "rl")
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert 0.0 <= line["rollouts/logp_difference"] < 1e-5
        assert (
            line["rollouts/logp_difference"]
            <= line["rollouts/largest_logp_difference"]
            < 1e-4
        )
    (engine,) = vllm.instances
    assert engine.calls[:2] == ["reload_weights", "reset_prefix_cache"]
    assert Path(engine.folder) == tmp_path / "rl" / "work" / "vllm"
    written = json.loads((Path(engine.folder) / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.slow
def test_engine_with_stale_weights_is_rejected_before_training(
    vllm: type[LLM],
    run_stage: Any,
    start: dict[str, Path],  # noqa: F811
    config: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm, "stale", True)
    with pytest.raises(RolloutEngineError, match=r"0\.\d+ .* 0\.001\b"):
        run_stage("rl", start, config, tmp_path / "rl")
    files = sorted(
        path.name for path in (tmp_path / "rl" / "work" / "answers").glob("*")
    )
    assert files == ["batch-00000000.parquet"]  # drawn with the initial weights


def test_missing_vllm_is_rejected(
    run_stage: Any,
    start: dict[str, Path],  # noqa: F811
    config: dict[str, Any],
    tmp_path: Path,
) -> None:
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is installed here")
    with pytest.raises(RolloutEngineError, match=r"vllm|vLLM"):
        run_stage("rl", start, config, tmp_path / "rl")


def test_difference_covers_drawn_tokens_only() -> None:
    """Differences 0.1 and 0.3 at the drawn tokens have mean 0.2; the token between them
    is from a tool.
    """
    answers = [
        Generated([1, 2, 3], True, (True, False, True), (), (-1.1, 0.0, -2.3)),
        Generated([4], True, (True,)),
    ]
    ours, mask = (
        torch.tensor([[-1.0, -9.0, -2.0], [0.0, 0.0, 0.0]]),
        torch.tensor([[True, False, True], [False] * 3]),
    )
    assert check_agreement(answers, ours, mask, 0.21) == {
        "rollouts/logp_difference": pytest.approx(0.2),
        "rollouts/largest_logp_difference": pytest.approx(0.3),
    }
    assert check_agreement([Generated([1], True)], ours[:1], mask[:1], 0.1) == {}
    for logps in (ours, torch.full_like(ours, float("nan"))):
        with pytest.raises(RolloutEngineError, match="policy"):
            check_agreement(answers, logps, mask, 0.19)
