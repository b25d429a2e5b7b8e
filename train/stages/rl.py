"""Stage `rl`: reinforcement learning from rewards of sampled answers, by GRPO or PPO, or
from a teacher's opinion of them.

Output: `model/`, `metrics.jsonl`, `skipped_steps.jsonl` as of pre-training;
`prompts.txt`, the ids of the training prompts; `answers.parquet`, all answers used for
training (see reinforcement/rollouts.py); `rollouts.json`: answers of some batches, and
greedy answers to held-out prompts before and after; with `lora` also `adapter/`, which
PEFT loads, and `model/` is the model with the adapters merged. PPO's critic is not part
of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gristmill.core.files import as_path, write_json
from gristmill.core.stage_context import Context
from gristmill.mixtures.reinforcement import Rl, name_of
from gristmill.tokenize.order import Order
from gristmill.train.adapters.lora import adapted_flops_per_token, tuned_model
from gristmill.train.data.conversation_tokens import Chat, left_out_warning
from gristmill.train.evaluation.intervals import paired_difference
from gristmill.train.loop.loop import train
from gristmill.train.loop.resuming import measured_once
from gristmill.train.models.model_config import Shape
from gristmill.train.models.weights import read_shape, stored
from gristmill.train.parallel.process_groups import World, process_group
from gristmill.train.parallel.sharding import compute_dtype, sharded_model
from gristmill.train.reinforcement.algorithms import ALGORITHMS
from gristmill.train.reinforcement.curriculum import PromptChoice
from gristmill.train.reinforcement.multi_turn import Dialogue
from gristmill.train.reinforcement.policy import add_critic, is_critic
from gristmill.train.reinforcement.policy_objective import Reinforcement
from gristmill.train.reinforcement.prompts import (
    OfferedTools,
    Prompt,
    read_prompts,
    split,
    write_prompt_ids,
)
from gristmill.train.reinforcement.rewards import rewards_of
from gristmill.train.reinforcement.rollout_phase import Actor
from gristmill.train.reinforcement.rollout_tables import (
    ANSWERS,
    BATCHES,
    AnswerRow,
    gather_batches,
    read_batch,
)
from gristmill.train.reinforcement.rollouts import Rollouts, take_earlier_batches
from gristmill.train.reinforcement.sampler import Engine, OwnEngine, Sampler
from gristmill.train.reinforcement.tools.call_format import CallFormat
from gristmill.train.reinforcement.tools.toolbox import Toolbox
from gristmill.train.reinforcement.vllm_engine import RolloutEngineError, VllmEngine
from gristmill.train.stages.stage_inputs import MODEL, MODELS, open_mixture
from gristmill.train.stages.teacher import model_folder, read_teacher
from gristmill.train.stages.trained_models import (
    describe_model,
    publish_tuned,
    tuned_shape,
    tuning_job,
)

ROLLOUTS, PROMPTS = "rollouts.json", "prompts.txt"
SHOWN_GROUPS = 4
"""Prompts of a batch whose answers `rollouts.json` shows."""
SHOWN_HELD_OUT = 8
"""Held-out prompts whose answers the summary shows, before and after training."""
RESAMPLES = 1000
"""Bootstrap samples, the default of `evaluate.bootstrap_samples`."""


def run(
    inputs: Mapping[str, Path], config: dict[str, Any], out: Path, context: Context
) -> dict[str, Any]:
    """Reinforce; called on every rank of a torchrun process group.

    Raises:
        gristmill.train.data.conversation_tokens.NothingToTrainError: no prompt is left
            to train on.
        gristmill.dataprep.rewards.answer_checks.NoAnswerError: a reward needs right
            answers that prompts do not have.
        gristmill.train.reinforcement.rewards.RewardModelError: a reward model is
            missing, or knows other ids.
        gristmill.train.stages.teacher.TeacherError: the teacher is missing, or has
            another vocabulary.
        gristmill.train.reinforcement.tools.toolbox.ToolError: a tool is not available.
        gristmill.train.reinforcement.tools.sandbox.SandboxError: this machine has no
            sandbox for Python.
        gristmill.train.loop.stopping.StoppedError: SIGTERM was received; a rerun
            continues.
    """
    section = Rl.model_validate(config)
    start_stage = next(name for name in reversed(MODELS) if name in inputs)
    start, chat = inputs[start_stage] / MODEL, Chat(inputs["tokenizer"])
    shape = read_shape(start)
    length = row_length(section, shape)
    shape = tuned_shape(shape, length, context)
    reference: tuple[Shape, Path] | None = None
    if section.teacher is not None:
        teacher = model_folder("rl.teacher", section.teacher)
        reference = read_teacher("rl.teacher", teacher, chat), teacher
    elif section.kl_weight and section.lora is None:
        reference = shape, start
    tools = (
        OfferedTools(CallFormat(chat), Toolbox(section.tools, inputs))
        if section.tools
        else None
    )
    prompts, sets = read_prompts(
        section.data,
        section.rewards,
        chat,
        length - section.max_new_tokens,
        inputs,
        tools,
    )
    training, held_out = split(
        prompts, section.holdout, section.holdout_limit, section.key_seed
    )
    section = section.in_steps(len(training))
    with (
        open_mixture(inputs, context) as packed,
        process_group(
            context.parallel, pipelined=False, split=section.lora is None
        ) as world,
    ):
        if world.is_first:
            write_prompt_ids(out / PROMPTS, training)
            for prompt_set in sets:
                if warning := left_out_warning(
                    prompt_set.path,
                    prompt_set.encoding,
                    length - section.max_new_tokens,
                ):
                    context.warn(warning)
            if section.continue_from is not None:
                take_earlier_batches(
                    context.work / BATCHES,
                    as_path(section.continue_from),
                    section.updates_per_batch,
                )
        dtype = compute_dtype(section.precision, world.device)
        model = tuned_model(
            shape,
            stored(start),
            section.lora,
            section.key_seed,
            world,
            dtype,
            context,
            add_critic if ALGORITHMS[section.algorithm].has_critic else None,
        )
        order = Order([len(training)], section.key_seed)
        choice = (
            None
            if section.curriculum is None
            else PromptChoice(section.curriculum, order, section.key_seed)
        )
        actor = Actor(
            section,
            training,
            order,
            model,
            None
            if reference is None
            else sharded_model(
                reference[0], stored(reference[1]), world, dtype, context.compute
            ).requires_grad_(False),
            Sampler(
                model,
                section.lora,
                engine_of(section, shape, dtype, chat, world, context),
                world,
                None
                if tools is None
                else Dialogue(
                    chat,
                    tools.form,
                    tools.toolbox,
                    section.turns,
                    section.tool_answer_tokens,
                ),
            ),
            rewards_of(
                section.rewards,
                inputs,
                chat,
                shape.vocab_size,
                world,
                section.micro_batch_size,
            ),
            Rollouts(section, length, chat.pad),
            chat,
            world,
            context.work / BATCHES,
            choice,
        )
        before = answers_before(actor, held_out, context.work / "before.json")
        objective = Reinforcement(
            actor, length, adapted_flops_per_token(shape, length, section.lora)
        )
        job = replace(
            tuning_job(
                section, objective, model, shape, inputs, packed, world, context
            ),
            before_step=lambda step, rows: actor.before_step(step),
            state={"rollouts": actor.rollouts}
            | ({} if choice is None else {"curriculum": choice}),
        )
        record, summary = train(job)
        after = actor.measure(held_out)
        summary |= publish_tuned(
            job, section.lora, shape, start, out, record, is_extra=is_critic
        )
        if record is not None:
            summary |= rewards_at_both_ends(record.lines(), section)
            gather_batches(context.work / BATCHES, batches_of(section), out / ANSWERS)
            write_json(
                out / ROLLOUTS,
                {
                    "batches": shown_batches(out, section),
                    "before": before,
                    "after": after,
                },
            )
    return {
        **summary,
        **describe_model(shape, length),
        "sequence_length": length,
        "started_from": start_stage,
        "sets": [prompt_set.summary() for prompt_set in sets],
        "algorithm": section.algorithm,
        "kl_weight": section.kl_weight,
        "group_size": section.group_size,
        "training_prompts": len(training),
        "held_out_prompts": len(held_out),
        "held_out": held_out_rewards(before, after, section),
        "samples": [
            {
                "prompt": first_answer["prompt"],
                "before": first_answer["answer"],
                "reward_before": first_answer["reward"],
                "after": last_answer["answer"],
                "reward": last_answer["reward"],
            }
            for first_answer, last_answer in zip(
                before[:SHOWN_HELD_OUT], after, strict=False
            )
        ],
    }


def engine_of(
    section: Rl,
    shape: Shape,
    dtype: torch.dtype,
    chat: Chat,
    world: World,
    context: Context,
) -> Engine:
    """Engine that samples answers on this rank.

    Raises:
        gristmill.train.reinforcement.vllm_engine.RolloutEngineError: `rollouts` is
            vllm, which cannot run here.
    """
    if section.rollouts == "own":
        return OwnEngine(shape, dtype, section.generation_rows, world.device)
    if world.size > 1:
        raise RolloutEngineError(
            "rl.rollouts is vllm, which draws in one process, but there are "
            f"{world.size}: set engine.ranks to 1, or remove the key"
        )
    return VllmEngine(
        shape,
        dtype,
        context.work / "vllm",
        sorted(chat.stops),
        chat.pad,
        section.vllm_memory,
    )


def row_length(section: Rl, shape: Shape) -> int:
    """Most tokens of prompt and answer together.

    Raises:
        ValueError: no prompt fits beside an answer.
    """
    length = section.sequence_length or shape.sequence_length
    if section.max_new_tokens >= length:
        raise ValueError(
            f"rl.max_new_tokens ({section.max_new_tokens}) leaves no room for a "
            f"prompt within {length} tokens; lower it"
        )
    return length


def answers_before(
    actor: Actor, held_out: Sequence[Prompt], file: Path
) -> list[AnswerRow]:
    """Greedy answers of the start model to held-out prompts; computed once per run,
    also if training resumes.
    """
    return measured_once(file, actor.world, lambda: actor.measure(held_out))


def batches_of(section: Rl) -> int:
    """Number of batches of prompts."""
    return -(-section.steps // section.updates_per_batch)


def shown_batches(out: Path, section: Rl) -> list[dict[str, Any]]:
    """First answers of some batches, each with the first step that trained on it."""
    last = batches_of(section) - 1
    return [
        {
            "step": batch * section.updates_per_batch + 1,
            "answers": (read_batch([out], batch) or [])[
                : SHOWN_GROUPS * section.group_size
            ],
        }
        for batch in range(last + 1)
        if batch % section.samples_every == 0 or batch == last
    ]


def rewards_at_both_ends(
    lines: Sequence[dict[str, Any]], section: Rl
) -> dict[str, Any]:
    """Mean total and single rewards of sampled answers, in the first and the last line
    of the metrics.
    """
    rewarded = [line for line in lines if "reward" in line]
    if not rewarded:
        return {}
    keys = ("reward", *(f"rewards/{name_of(reward)}" for reward in section.rewards))
    return {
        "first_rewards": {key: rewarded[0][key] for key in keys},
        "last_rewards": {key: rewarded[-1][key] for key in keys},
    }


def held_out_rewards(
    before: Sequence[AnswerRow], after: Sequence[AnswerRow], section: Rl
) -> dict[str, Any] | None:
    """Mean rewards of greedy answers to held-out prompts before and after, and their
    paired difference; None without held-out prompts.
    """
    if not before:
        return None
    first, second = (
        np.array([answer["reward"] for answer in answers])
        for answers in (before, after)
    )
    return {
        "reward_before": float(first.mean()),
        "reward": float(second.mean()),
        "difference": paired_difference(first, second, section.key_seed, RESAMPLES),
    }
