"""Rollouts through vLLM's interface, with a stand-in that reads the same folder through transformers."""

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

from gristmill.train.reinforcement.rollouts import Generated
from gristmill.train.reinforcement.vllm_engine import RolloutEngineError, check_agreement
from tests.train.test_rl import metrics, rl_config, shape, start, tensors_of  # noqa: F401 - fixtures

BATCHES = 3


@dataclass
class SamplingParams:
    """What of vLLM's class is asked for."""

    temperature: float
    max_tokens: int
    stop_token_ids: list[int]
    seed: int
    logprobs: int
    detokenize: bool


class LLM:
    """vLLM's class as far as it is used: reads the folder once, and again where it is told to, unless it is `stale`."""

    stale = False
    made: Sequence[Any] = ()

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
        LLM.made = [*LLM.made, self]
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
    def generate(self, prompts: list[dict[str, list[int]]], wanted: list[SamplingParams], use_tqdm: bool) -> list[Any]:
        return [
            SimpleNamespace(outputs=[self._one(prompt["prompt_token_ids"], how)])
            for prompt, how in zip(prompts, wanted, strict=True)
        ]

    def _one(self, prompt: list[int], how: SamplingParams) -> Any:
        generator = torch.Generator().manual_seed(how.seed)
        ids, logps = list(prompt), []
        while len(ids) - len(prompt) < how.max_tokens and (
            len(ids) == len(prompt) or ids[-1] not in how.stop_token_ids
        ):
            logits = self.model(torch.tensor([ids])).logits[0, -1]
            scaled = torch.log_softmax(logits / (how.temperature or 1.0), -1)
            token = (
                int(scaled.argmax())
                if not how.temperature
                else int(torch.multinomial(scaled.exp(), 1, generator=generator))
            )
            ids.append(token)
            logps.append({token: SimpleNamespace(logprob=float(scaled[token]))})
        return SimpleNamespace(token_ids=ids[len(prompt) :], logprobs=logps)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> type[LLM]:
    """The stand-in in the place of the package."""
    module = ModuleType("vllm")
    module.__spec__ = importlib.util.spec_from_loader("vllm", None)
    module.LLM, module.SamplingParams = LLM, SamplingParams  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(LLM, "made", [])
    return LLM


@pytest.fixture
def config(rl_config: dict[str, Any]) -> dict[str, Any]:  # noqa: F811
    """Few steps, so fast that a policy of yesterday is another one."""
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


def test_an_engine_that_agrees_draws_what_is_learned_from(
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
        assert line["rollouts/logp_difference"] <= line["rollouts/largest_logp_difference"] < 1e-4
    (engine,) = vllm.made
    assert engine.calls[:2] == ["reload_weights", "reset_prefix_cache"]
    assert Path(engine.folder) == tmp_path / "rl" / "work" / "vllm"
    written = json.loads((Path(engine.folder) / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLM"]


def test_an_engine_whose_weights_are_old_is_refused_before_its_answers_are_learned_from(
    vllm: type[LLM],
    run_stage: Any,
    start: dict[str, Path],  # noqa: F811
    config: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm, "stale", True)
    with pytest.raises(RolloutEngineError, match=r"differ from ours by 0\.\d+ in the mean .* allows 0\.001: it"):
        run_stage("rl", start, config, tmp_path / "rl")
    kept = sorted(path.name for path in (tmp_path / "rl" / "work" / "answers").glob("*"))
    assert kept == ["batch-00000000.parquet"]  # the first was drawn with the weights that it began with


def test_without_vllm_and_with_several_processes_it_is_refused(
    run_stage: Any,
    start: dict[str, Path],  # noqa: F811
    config: dict[str, Any],
    tmp_path: Path,
) -> None:
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is installed here")
    with pytest.raises(RolloutEngineError, match="which is not installed here; install it, which wants a GPU"):
        run_stage("rl", start, config, tmp_path / "rl")


def test_the_difference_is_that_of_drawn_tokens_alone() -> None:
    """Differences 0.1 and 0.3 at the drawn tokens, mean 0.2; the token between them is a tool's."""
    answers = [Generated([1, 2, 3], True, (True, False, True), (), (-1.1, 0.0, -2.3)), Generated([4], True, (True,))]
    ours, mask = torch.tensor([[-1.0, -9.0, -2.0], [0.0, 0.0, 0.0]]), torch.tensor([[True, False, True], [False] * 3])
    assert check_agreement(answers, ours, mask, 0.21) == {
        "rollouts/logp_difference": pytest.approx(0.2),
        "rollouts/largest_logp_difference": pytest.approx(0.3),
    }
    assert check_agreement([Generated([1], True)], ours[:1], mask[:1], 0.1) == {}
    for wrong in (ours, torch.full_like(ours, float("nan"))):
        with pytest.raises(RolloutEngineError, match="draws from another policy"):
            check_agreement(answers, wrong, mask, 0.19)
