"""Rollouts through vLLM (`rl.rollouts: vllm`), by its public Python API; and the check that it draws from our policy.

The policy's weights are written into a folder, which vLLM loads once and reads again before each batch
(`collective_rpc("reload_weights")`, as its sleep mode and its examples have it). vLLM says how likely it thought each
token that it drew; that must agree with what our own forward pass says of it, or nothing is learned from the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gristmill.dataprep.files import write_json
from gristmill.dataprep.seeds import content_key
from gristmill.train.generation.scheduler import Request
from gristmill.train.models.families import hf_config, split_for_hf
from gristmill.train.models.initialisation import VOCABULARY_TENSORS
from gristmill.train.models.shape import Shape
from gristmill.train.models.tensor_files import WEIGHTS_FILE, ready, write_tensors
from gristmill.train.reinforcement.rollouts import Generated

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
SEED_BITS = 32


class RolloutEngineError(RuntimeError):
    """The engine that draws is not there, or draws from another policy than the one that learns."""


class VllmEngine:
    """vLLM in this process, on the device that trains (see `sampler.Engine`).

    Args:
        shape: of the model.
        dtype: that is computed in.
        folder: where the weights are written for it.
        stops: ids that end an answer.
        pad: the padding id.
        memory: share of the device's memory that it may take.

    Raises:
        RolloutEngineError: vLLM is not installed.
    """

    def __init__(
        self, shape: Shape, dtype: torch.dtype, folder: Path, stops: Sequence[int], pad: int, memory: float
    ) -> None:
        if find_spec("vllm") is None:
            raise RolloutEngineError(
                "rl.rollouts is vllm, which is not installed here; install it, which wants a GPU "
                "(`pip install vllm`), or remove the key: the engine that is here draws then"
            )
        self._shape, self._dtype, self._folder, self._memory = shape, dtype, folder, memory
        self._stops, self._pad = sorted(stops), pad
        self._llm: Any = None

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """See `sampler.Engine.load`."""
        parts: dict[str, list[Tensor]] = {}
        for one, tensor in weights:
            if one in VOCABULARY_TENSORS:  # ours have rows that no id has
                tensor = tensor[: self._shape.vocab_size]
            for name, part in split_for_hf(one, tensor.detach(), self._shape).items():
                parts.setdefault(name, []).append(part.to(self._dtype).cpu())
        self._folder.mkdir(parents=True, exist_ok=True)
        write_json(self._folder / "config.json", hf_config(self._shape, DTYPES[self._dtype], self._stops, self._pad))
        # Parts of a fused tensor have its name, and are joined by rows.
        write_tensors(
            self._folder / WEIGHTS_FILE,
            {name: ready(torch.cat(one) if len(one) > 1 else one[0].contiguous()) for name, one in parts.items()},
        )
        if self._llm is None:
            # Log-probabilities behind the temperature, which is the policy that learns.
            self._llm = import_module("vllm").LLM(
                model=str(self._folder),
                skip_tokenizer_init=True,
                dtype=DTYPES[self._dtype],
                max_model_len=self._shape.sequence_length,
                gpu_memory_utilization=self._memory,
                logprobs_mode="processed_logprobs",
            )
            return
        self._llm.collective_rpc("reload_weights")
        self._llm.reset_prefix_cache()

    def draw(self, requests: Sequence[Request]) -> list[Generated]:
        """See `sampler.Engine.draw`; what is drawn for a request depends on its seed and prompt as far as vLLM has it
        so, but for rounding, which differs with who is answered at the same time."""
        if not requests:
            return []
        wanted = [
            import_module("vllm").SamplingParams(
                temperature=one.sampling.temperature,
                max_tokens=one.max_new_tokens,
                stop_token_ids=sorted(one.stops),
                seed=content_key(one.sampling.seed, list(one.prompt), bits=SEED_BITS),
                logprobs=0,
                detokenize=False,
            )
            for one in requests
        ]
        found = self._llm.generate([{"prompt_token_ids": list(one.prompt)} for one in requests], wanted, use_tqdm=False)
        return [_generated(one.outputs[0], request) for one, request in zip(found, requests, strict=True)]


def _generated(output: Any, request: Request) -> Generated:
    tokens = list(output.token_ids)
    logps = tuple(float(known[token].logprob) for token, known in zip(tokens, output.logprobs, strict=True))
    return Generated(tokens, bool(tokens) and tokens[-1] in request.stops, logps=logps)


def check_agreement(answers: Sequence[Generated], ours: Tensor, mask: Tensor, bound: float) -> dict[str, float]:
    """How far an engine's log-probabilities of the tokens that it drew are from ours.

    Args:
        answers: n of them, some or none with `logps`.
        ours: (n, r) float32, log-probabilities by the forward pass that updates have.
        mask: (n, r) bool, the tokens that were drawn.
        bound: the largest mean of their absolute differences.

    Returns:
        `rollouts/logp_difference`, the mean, and `rollouts/largest_logp_difference`; nothing where no answer has any.

    Raises:
        RolloutEngineError: the mean is beyond the bound, or no number.
    """
    if all(one.logps is None for one in answers):
        return {}
    theirs = torch.zeros_like(ours)
    for row, one in enumerate(answers):
        theirs[row, : len(one.tokens)] = torch.tensor(one.logps or [0.0] * len(one.tokens))
    apart = (theirs - ours).abs()[mask].double()
    mean, largest = float(apart.mean()), float(apart.max())
    if not mean <= bound:
        raise RolloutEngineError(
            f"rl.rollouts: the log-probabilities of the {len(apart):,} tokens that the engine drew differ from ours by "
            f"{mean:.4f} in the mean (at most {largest:.4f}), and rl.rollouts_agree allows {bound:g}: it draws from "
            "another policy than the one that learns. Use the dtype that the training computes in, or another version "
            "of the engine; raise the bound only if you know where the difference is from"
        )
    return {"rollouts/logp_difference": mean, "rollouts/largest_logp_difference": largest}
