"""Rollouts through vLLM (`rl.rollouts: vllm`) by its public Python API, with a check of
its log-probabilities.

The policy's weights are written into a folder, which vLLM loads once and reloads before
each batch (`collective_rpc("reload_weights")`, as in its sleep mode and examples).
vLLM's log-probability of each sampled token must agree with the model's own forward
pass; otherwise the batch is not used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gristmill.core.files import write_json
from gristmill.core.seeds import content_key
from gristmill.train.generation.scheduler import Request
from gristmill.train.models.hf_configs import hf_config, split_for_hf
from gristmill.train.models.initialisation import VOCABULARY_TENSORS
from gristmill.train.models.model_config import Shape
from gristmill.train.models.tensor_files import WEIGHTS_FILE, ready, write_tensors
from gristmill.train.rl.rollouts import Generated

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
SEED_BITS = 32


class RolloutEngineError(RuntimeError):
    """A rollout engine that is missing, or that samples from another policy."""


class VllmEngine:
    """vLLM in this process, on the training device (see `sampler.Engine`).

    Args:
        shape: of the model.
        dtype: of the computation.
        folder: of the weights for vLLM.
        stops: ids that end an answer.
        pad: the padding id.
        memory: share of the device's memory for vLLM.

    Raises:
        RolloutEngineError: vLLM is not installed.
    """

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        folder: Path,
        stops: Sequence[int],
        pad: int,
        memory: float,
    ) -> None:
        if find_spec("vllm") is None:
            raise RolloutEngineError(
                "rl.rollouts is vllm, which is not installed here; install it, which "
                "wants a GPU (`pip install vllm`), or remove the key: the engine that "
                "is here draws then"
            )
        self._shape = shape
        self._dtype = dtype
        self._folder = folder
        self._memory = memory
        self._stops = sorted(stops)
        self._pad = pad
        self._llm: Any = None

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """See `sampler.Engine.load`."""
        parts: dict[str, list[Tensor]] = {}
        for source_name, tensor in weights:
            if source_name in VOCABULARY_TENSORS:  # the model has padding rows
                tensor = tensor[: self._shape.vocab_size]
            for name, part in split_for_hf(
                source_name, tensor.detach(), self._shape
            ).items():
                parts.setdefault(name, []).append(part.to(self._dtype).cpu())
        self._folder.mkdir(parents=True, exist_ok=True)
        write_json(
            self._folder / "config.json",
            hf_config(self._shape, DTYPES[self._dtype], self._stops, self._pad),
        )
        # Parts of a fused tensor share its name, and are joined by rows.
        write_tensors(
            self._folder / WEIGHTS_FILE,
            {
                name: ready(
                    torch.cat(source_name)
                    if len(source_name) > 1
                    else source_name[0].contiguous()
                )
                for name, source_name in parts.items()
            },
        )
        if self._llm is None:
            # Log-probabilities after the temperature, as in the training policy.
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
        """See `sampler.Engine.draw`; samples depend on seed and prompt as far as vLLM
        is deterministic, up to rounding that depends on the batch.
        """
        if not requests:
            return []
        sampling_params = [
            import_module("vllm").SamplingParams(
                temperature=request.sampling.temperature,
                max_tokens=request.max_new_tokens,
                stop_token_ids=sorted(request.stops),
                seed=content_key(
                    request.sampling.seed, list(request.prompt), bits=SEED_BITS
                ),
                logprobs=0,
                detokenize=False,
            )
            for request in requests
        ]
        outputs = self._llm.generate(
            [{"prompt_token_ids": list(request.prompt)} for request in requests],
            sampling_params,
            use_tqdm=False,
        )
        answers = []
        for output, request in zip(outputs, requests, strict=True):
            drawn = output.outputs[0]
            tokens = list(drawn.token_ids)
            logps = tuple(
                float(token_logps[token].logprob)
                for token, token_logps in zip(tokens, drawn.logprobs, strict=True)
            )
            ended = bool(tokens) and tokens[-1] in request.stops
            answers.append(Generated(tokens, ended, logps=logps))
        return answers


def check_agreement(
    answers: Sequence[Generated], ours: Tensor, mask: Tensor, bound: float
) -> dict[str, float]:
    """Compare an engine's log-probabilities of its sampled tokens with the model's.

    Args:
        answers: n of them, some or none with `logps`.
        ours: (n, r) float32, log-probabilities by the forward pass of updates.
        mask: (n, r) bool, the sampled tokens.
        bound: the largest mean of their absolute differences.

    Returns:
        `rollouts/logp_difference`, the mean, and `rollouts/largest_logp_difference`;
        empty if no answer has any.

    Raises:
        RolloutEngineError: the mean is beyond the bound, or not a number.
    """
    if all(answer.logps is None for answer in answers):
        return {}
    theirs = torch.zeros_like(ours)
    for row, answer in enumerate(answers):
        theirs[row, : len(answer.tokens)] = torch.tensor(
            answer.logps or [0.0] * len(answer.tokens)
        )
    differences = (theirs - ours).abs()[mask].double()
    mean = float(differences.mean())
    largest = float(differences.max())
    if not mean <= bound:
        raise RolloutEngineError(
            f"rl.rollouts: the log-probabilities of the {len(differences):,} tokens "
            f"that the engine drew differ from ours by {mean:.4f} in the mean (at most "
            f"{largest:.4f}), and rl.rollouts_agree allows {bound:g}: it draws from "
            "another policy than the one that learns. Use the dtype that the training "
            "computes in, or another version of the engine; raise the bound only if "
            "you know where the difference is from"
        )
    return {
        "rollouts/logp_difference": mean,
        "rollouts/largest_logp_difference": largest,
    }
