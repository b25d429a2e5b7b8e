"""Our policy gradient against five updates of TRL's GRPOTrainer on the same answers:
advantages, losses and weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gristmill.mixtures.schema.rl import Rl
from gristmill.train.models.weights import load_model
from gristmill.train.rl.policy import opinion_of
from gristmill.train.rl.policy_gradient import (
    group_advantages,
    kl_loss,
    surrogate_loss,
    token_weights,
)
from gristmill.train.rl.rollout import Part
from tests.referees.tiny_models import TINY, trainer_settings, word_tokenizer

# Importing it takes seconds, which collection need not spend.
pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")

STEPS, RATE, BETA, GROUP, ANSWERS, MAX_TOKENS = 5, 1e-3, 0.04, 4, 8, 6
VOCAB, END = 32, 2


@dataclass
class TrlRun:
    """Rewards and advantages by group, the batch and loss of each update, and the final
    weights.
    """

    rewards: list[Tensor] = field(default_factory=list)
    advantages: list[Tensor] = field(default_factory=list)
    batches: list[dict[str, Tensor]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def answers_to(count: int, draw: int) -> list[list[int]]:
    """Draw answers of different lengths, most of which end."""
    numbers = torch.Generator().manual_seed(draw)
    lengths = torch.randint(1, MAX_TOKENS + 1, (count,), generator=numbers).tolist()
    return [
        [
            *torch.randint(4, VOCAB, (length - 1,), generator=numbers).tolist(),
            END if length < MAX_TOKENS else 5,
        ]
        for length in lengths
    ]


def reward_of(tokens: list[int]) -> float:
    """Return a number that differs between answers."""
    return sum(tokens) / VOCAB


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Save a tiny model of transformers, and make a tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = word_tokenizer(f"w{number}" for number in range(4, VOCAB))
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**TINY, "vocab_size": VOCAB}))
    folder = tmp_path_factory.mktemp("start")
    model.save_pretrained(folder)
    return folder, tokenizer


@pytest.fixture(scope="module")
def train_with_trl(
    start: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., TrlRun]]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    folder, tokenizer = start

    def train(**settings: Any) -> TrlRun:
        policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        config = GRPOConfig(
            **trainer_settings(tmp_path_factory.mktemp("trl"), STEPS, RATE),
            per_device_train_batch_size=ANSWERS,
            num_generations=GROUP,
            max_completion_length=MAX_TOKENS,
            beta=BETA,
            num_iterations=2,
            steps_per_generation=1,
            temperature=0.7,
            **settings,
        )
        run = TrlRun()

        def rollout(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
            ids = tokenizer(prompts)["input_ids"]
            answers = answers_to(len(prompts), len(run.rewards))
            return {
                "prompt_ids": ids,
                "completion_ids": answers,
                "logprobs": [[0.0] * len(answer) for answer in answers],
            }

        def rewarded(completion_ids: list[list[int]], **columns: Any) -> list[float]:
            rewards = [reward_of(tokens) for tokens in completion_ids]
            run.rewards.append(torch.tensor(rewards))
            return rewards

        class RecordingTrainer(GRPOTrainer):
            def _generate_and_score_completions(self, inputs: Any) -> Any:
                outputs = super()._generate_and_score_completions(inputs)
                run.advantages.append(outputs["advantages"].clone())
                return outputs

            def _compute_loss(self, model: Any, inputs: Any) -> Any:
                run.batches.append(
                    {
                        name: value.clone()
                        for name, value in inputs.items()
                        if isinstance(value, torch.Tensor)
                    }
                )
                loss = super()._compute_loss(model, inputs)
                run.losses.append(loss.item())
                return loss

        data = Dataset.from_list(
            [
                {"prompt": f"w{number} w{number + 5} w9"[: 5 + 4 * (number % 2)]}
                for number in range(4, 20)
            ]
        )
        trainer = RecordingTrainer(
            model=policy,
            reward_funcs=rewarded,
            args=config,
            train_dataset=data,
            processing_class=tokenizer,
            rollout_func=rollout,
        )
        trainer.train()
        run.weights = {
            name: value.detach() for name, value in policy.state_dict().items()
        }
        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        yield train


def part_of(batch: dict[str, Tensor]) -> Part:
    """Lay out TRL's batch, whose prompts are padded on the left, as our rows of
    answers.
    """
    rows = [
        torch.cat((prompt[prompt_mask.bool()], answer))
        for prompt, prompt_mask, answer in zip(
            batch["prompt_ids"],
            batch["prompt_mask"],
            batch["completion_ids"],
            strict=True,
        )
    ]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=3)
    mask = batch["completion_mask"].bool()
    columns = (
        batch["prompt_mask"].sum(dim=1, keepdim=True) - 1 + torch.arange(mask.shape[1])
    )
    return Part(
        ids, torch.where(mask, columns, 0), mask, batch["completion_ids"] * mask
    )


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (
            {
                "loss_type": "grpo",
                "scale_rewards": "group",
                "use_bias_correction_kl": False,
            },
            {"normalisation": "sequence", "kl_correction": False},
        ),
        (
            {"loss_type": "dapo", "scale_rewards": "batch", "epsilon_high": 0.28},
            {"normalisation": "token", "advantage_scale": "batch", "clip_high": 0.28},
        ),
        (
            {"loss_type": "dr_grpo", "scale_rewards": "none"},
            {"normalisation": "constant", "advantage_scale": "none"},
        ),
        (
            {
                "loss_type": "grpo",
                "importance_sampling_level": "sequence",
                "scale_rewards": "group",
                "epsilon": 3e-3,
                "epsilon_high": 4e-3,
                "use_bias_correction_kl": False,
            },
            {
                "normalisation": "sequence",
                "ratio": "sequence",
                "clip": 3e-3,
                "clip_high": 4e-3,
                "kl_correction": False,
            },
        ),
    ],
)
def test_losses_and_weights_equal_those_of_trl(
    theirs: dict[str, Any],
    ours: dict[str, Any],
    start: tuple[Path, Any],
    train_with_trl: Callable[..., TrlRun],
) -> None:
    run = train_with_trl(**theirs)
    section = Rl.model_validate(
        {
            "data": [{"path": "none"}],
            "rewards": [{"kind": "exact"}],
            "steps": STEPS,
            "kl_weight": BETA,
            "temperature": 0.7,
            **ours,
        }
    )
    for rewards, expected in zip(run.rewards, run.advantages, strict=True):
        torch.testing.assert_close(
            group_advantages(rewards, GROUP, section.advantage_scale),
            expected,
            atol=1e-5,
            rtol=0,
        )
    policy, reference = load_model(start[0]), load_model(start[0])
    for parameter in policy.parameters():
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=RATE, weight_decay=0.0)
    losses, clipped_tokens, old = [], 0, torch.empty(0)
    for number, batch in enumerate(run.batches):
        part = part_of(batch)
        opinion = opinion_of(policy, part, section.temperature)
        if number % 2 == 0:  # two updates per batch of answers
            old = opinion.logps.detach()
        with torch.no_grad():
            before = opinion_of(reference, part, section.temperature).logps
        loss, clipped = surrogate_loss(
            opinion.logps,
            old,
            batch["advantages"][:, None],
            section.clip,
            section.clip_high,
            part.mask if section.ratio == "sequence" else None,
        )
        loss = loss + BETA * kl_loss(
            opinion.logps, old, before, section.kl_estimator, section.kl_correction
        )
        total = (
            loss * token_weights(part.mask, section.normalisation, MAX_TOKENS)
        ).sum() / len(part.mask)
        total.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
        clipped_tokens += int((clipped & part.mask).sum())
    assert clipped_tokens > 0
    assert losses == pytest.approx(run.losses, rel=1e-5, abs=1e-5)
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(
            parameter.detach(), run.weights[name], atol=1e-4, rtol=0
        )
