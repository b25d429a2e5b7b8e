"""TRL's GRPOTrainer for five updates against ours, on the very same answers: advantages, losses, and the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gristmill.mixtures.reinforcement import Rl
from gristmill.train.models.weights import load_model
from gristmill.train.reinforcement.policy import opinion_of
from gristmill.train.reinforcement.policy_gradient import group_advantages, kl_loss, surrogate_loss, token_weights
from gristmill.train.reinforcement.rollouts import Part

# Looked for, not imported: it takes seconds, and only the process that runs these tests needs it.
pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")

STEPS, RATE, BETA, GROUP, ANSWERS, MOST = 5, 1e-3, 0.04, 4, 8, 6
VOCAB, END = 32, 2


@dataclass
class Seen:
    """What TRL did: rewards and advantages in the order of groups, the batch of each update, its loss, and weights."""

    rewards: list[Tensor] = field(default_factory=list)
    advantages: list[Tensor] = field(default_factory=list)
    batches: list[dict[str, Tensor]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def answers_to(count: int, draw: int) -> list[list[int]]:
    """Answers of different lengths; most of them end."""
    numbers = torch.Generator().manual_seed(draw)
    lengths = torch.randint(1, MOST + 1, (count,), generator=numbers).tolist()
    return [
        [*torch.randint(4, VOCAB, (length - 1,), generator=numbers).tolist(), END if length < MOST else 5]
        for length in lengths
    ]


def reward_of(tokens: list[int]) -> float:
    """Some number that differs between answers."""
    return sum(tokens) / VOCAB


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A little model of transformers', saved, and a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(
        models.WordLevel(
            {"<unk>": 0, "<s>": 1, "</s>": 2, "<pad>": 3, **{f"w{number}": number for number in range(4, VOCAB)}},
            unk_token="<unk>",
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.3,
            tie_word_embeddings=False,
        )
    )
    folder = tmp_path_factory.mktemp("start")
    model.save_pretrained(folder)
    return folder, PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


@pytest.fixture(scope="module")
def train_theirs(start: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Seen]]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    folder, tokenizer = start

    def train(**settings: Any) -> Seen:
        policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        config = GRPOConfig(
            output_dir=str(tmp_path_factory.mktemp("trl")),
            use_cpu=True,
            bf16=False,
            report_to="none",
            gradient_checkpointing=False,
            max_steps=STEPS,
            per_device_train_batch_size=ANSWERS,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            logging_steps=1,
            max_grad_norm=1.0,
            optim="adamw_torch",
            weight_decay=0.0,
            disable_tqdm=True,
            save_strategy="no",
            num_generations=GROUP,
            max_completion_length=MOST,
            beta=BETA,
            num_iterations=2,
            steps_per_generation=1,
            temperature=0.7,
            **settings,
        )
        seen = Seen()

        def rollout(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
            ids = tokenizer(prompts)["input_ids"]
            answers = answers_to(len(prompts), len(seen.rewards))
            return {"prompt_ids": ids, "completion_ids": answers, "logprobs": [[0.0] * len(one) for one in answers]}

        def rewarded(completion_ids: list[list[int]], **rest: Any) -> list[float]:
            rewards = [reward_of(tokens) for tokens in completion_ids]
            seen.rewards.append(torch.tensor(rewards))
            return rewards

        class Watched(GRPOTrainer):
            def _generate_and_score_completions(self, inputs: Any) -> Any:
                found = super()._generate_and_score_completions(inputs)
                seen.advantages.append(found["advantages"].clone())
                return found

            def _compute_loss(self, model: Any, inputs: Any) -> Any:
                seen.batches.append(
                    {name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
                )
                loss = super()._compute_loss(model, inputs)
                seen.losses.append(loss.item())
                return loss

        data = Dataset.from_list(
            [{"prompt": f"w{number} w{number + 5} w9"[: 5 + 4 * (number % 2)]} for number in range(4, 20)]
        )
        trainer = Watched(
            model=policy,
            reward_funcs=rewarded,
            args=config,
            train_dataset=data,
            processing_class=tokenizer,
            rollout_func=rollout,
        )
        trainer.train()
        seen.weights = {name: value.detach() for name, value in policy.state_dict().items()}
        return seen

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        yield train


def part_of(batch: dict[str, Tensor]) -> Part:
    """TRL's batch, whose prompts are padded on the left, as we lay answers out."""
    rows = [
        torch.cat((prompt[kept.bool()], answer))
        for prompt, kept, answer in zip(batch["prompt_ids"], batch["prompt_mask"], batch["completion_ids"], strict=True)
    ]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=3)
    mask = batch["completion_mask"].bool()
    columns = batch["prompt_mask"].sum(dim=1, keepdim=True) - 1 + torch.arange(mask.shape[1])
    return Part(ids, torch.where(mask, columns, 0), mask, batch["completion_ids"] * mask)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (
            {"loss_type": "grpo", "scale_rewards": "group", "use_bias_correction_kl": False},
            {"normalisation": "sequence", "kl_correction": False},
        ),
        (
            {"loss_type": "dapo", "scale_rewards": "batch", "epsilon_high": 0.28},
            {"normalisation": "token", "advantage_scale": "batch", "clip_high": 0.28},
        ),
        ({"loss_type": "dr_grpo", "scale_rewards": "none"}, {"normalisation": "constant", "advantage_scale": "none"}),
    ],
)
def test_five_updates_are_theirs(
    theirs: dict[str, Any], ours: dict[str, Any], start: tuple[Path, Any], train_theirs: Callable[..., Seen]
) -> None:
    seen = train_theirs(**theirs)
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
    for rewards, expected in zip(seen.rewards, seen.advantages, strict=True):
        torch.testing.assert_close(
            group_advantages(rewards, GROUP, section.advantage_scale), expected, atol=1e-5, rtol=0
        )
    policy, reference = load_model(start[0]), load_model(start[0])
    for parameter in policy.parameters():
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=RATE, weight_decay=0.0)
    losses, clipped_tokens, old = [], 0, torch.empty(0)
    for number, batch in enumerate(seen.batches):
        part = part_of(batch)
        found = opinion_of(policy, part, section.temperature)
        if number % 2 == 0:  # two updates learn from the same answers
            old = found.logps.detach()
        with torch.no_grad():
            before = opinion_of(reference, part, section.temperature).logps
        loss, clipped = surrogate_loss(found.logps, old, batch["advantages"][:, None], section.clip, section.clip_high)
        loss = loss + BETA * kl_loss(found.logps, old, before, section.kl_kind, section.kl_correction)
        total = (loss * token_weights(part.mask, section.normalisation, MOST)).sum() / len(part.mask)
        total.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
        clipped_tokens += int((clipped & part.mask).sum())
    assert clipped_tokens > 0
    assert losses == pytest.approx(seen.losses, rel=1e-5, abs=1e-5)
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(parameter.detach(), seen.weights[name], atol=1e-4, rtol=0)
