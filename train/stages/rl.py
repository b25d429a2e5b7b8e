"""Stage `rl`: reinforcement learning from rewards of sampled answers, by GRPO, or
from a teacher's opinion of them.

Output: `model/`, `metrics.jsonl`, `skipped_steps.jsonl` as of pre-training;
`prompts.txt`, the ids of the training prompts; `answers.parquet`, all answers used for
training (see rl/rollout_tables.py); `rollouts.json`: answers of some batches, and
greedy answers to held-out prompts before and after; with `lora` also `adapter/`, which
PEFT loads, and `model/` is the model with the adapters merged.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TypedDict

import numpy as np

from gristmill.core.files import as_path, write_json, write_text
from gristmill.core.stage_context import Context
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.schema.rl import Rl
from gristmill.mixtures.user_code import name_of
from gristmill.tokenize.shuffle import Order
from gristmill.train.data.conversation_tokens import Chat, left_out_warning
from gristmill.train.distributed.fsdp import sharded_model
from gristmill.train.distributed.process_groups import on_first
from gristmill.train.eval.intervals import Estimate, paired_difference
from gristmill.train.loop.loop_state import Part
from gristmill.train.loop.metrics_log import METRICS, read_lines
from gristmill.train.loop.objective import JsonObject
from gristmill.train.loop.training_job import Learner, Observers
from gristmill.train.models.model_config import StoredShape
from gristmill.train.models.weights import read_shape, stored
from gristmill.train.resuming import measured_once
from gristmill.train.rl.curriculum import PromptChoice
from gristmill.train.rl.multi_turn import Dialogue
from gristmill.train.rl.policy_objective import Reinforcement
from gristmill.train.rl.prompts import read_prompts, split
from gristmill.train.rl.rewards import rewards_of
from gristmill.train.rl.rollout import Rollouts, take_earlier_batches
from gristmill.train.rl.rollout_phase import Actor
from gristmill.train.rl.rollout_tables import (
    ANSWERS,
    BATCHES,
    gather_batches,
    read_batch,
)
from gristmill.train.rl.sampler import Sampler
from gristmill.train.rl.teacher_endpoint import EndpointTeacher
from gristmill.train.rl.tools.call_format import CallFormat
from gristmill.train.rl.tools.toolbox import Toolbox
from gristmill.train.stages.stage_inputs import MODEL, Inputs, last_model
from gristmill.train.stages.teacher import model_folder, read_teacher
from gristmill.train.stages.trained_models import (
    TunedSummary,
    averaged,
    tune,
    tuning,
)

ROLLOUTS = "rollouts.json"
PROMPTS = "prompts.txt"
SHOWN_GROUPS = 4
"""Prompts of a batch whose answers `rollouts.json` shows."""
SHOWN_HELD_OUT = 8
"""Held-out prompts whose answers the summary shows, before and after training."""
RESAMPLES = 1000
"""Bootstrap samples, the default of `evaluate.bootstrap_samples`."""


class HeldOutRewards(TypedDict):
    """Mean rewards of greedy answers to held-out prompts before and after the training,
    and their paired difference.
    """

    reward_before: float
    reward: float
    difference: Estimate


class AnswerSample(TypedDict):
    """Greedy answers to a held-out prompt before and after the training, with their
    rewards.
    """

    prompt: str
    before: str
    reward_before: float
    after: str
    reward: float


class RlSummary(TunedSummary):
    """Summary of the stage.

    Attributes:
        started_from: stage of the start model.
        sets: counts of each set.
        algorithm, kl_weight, group_size: of the section.
        training_prompts, held_out_prompts: their numbers.
        held_out: rewards of held-out prompts; None without any.
        samples: answers to the first held-out prompts.
        first_rewards, last_rewards: mean total and single rewards of sampled answers in
            the first and the last line of the metrics.
    """

    started_from: str
    sets: list[JsonObject]
    algorithm: str
    kl_weight: float
    group_size: int
    training_prompts: int
    held_out_prompts: int
    held_out: HeldOutRewards | None
    samples: list[AnswerSample]
    first_rewards: dict[str, float]
    last_rewards: dict[str, float]


def run(
    inputs: Inputs,
    config: Recipe,
    out: Path,
    context: Context,
) -> RlSummary:
    """Reinforce; called on every rank of a torchrun process group.

    Raises:
        gristmill.train.data.conversation_tokens.NothingToTrainError: no prompt is left
            to train on.
        gristmill.dataprep.rewards.answer_checks.NoAnswerError: a reward needs right
            answers that prompts do not have.
        gristmill.train.rl.rewards.RewardModelError: a reward model is
            missing, or knows other ids.
        gristmill.train.stages.teacher.TeacherError: the teacher is missing, or has
            another vocabulary.
        gristmill.train.rl.tools.toolbox.ToolError: a tool is not available.
        gristmill.train.rl.tools.sandbox.SandboxError: this machine has no
            sandbox for Python.
        gristmill.train.loop.stopping.StoppedError: SIGTERM was received; a rerun
            continues.
    """
    section = Rl.model_validate(config)
    start_stage = last_model(inputs)
    start = inputs[start_stage] / MODEL
    chat = Chat(inputs["tokenizer"])
    shape = read_shape(start)
    length = section.sequence_length or shape.sequence_length
    if section.max_new_tokens >= length:
        raise ValueError(
            f"rl.max_new_tokens ({section.max_new_tokens}) leaves no room for a "
            f"prompt within {length} tokens; lower it"
        )
    reference: tuple[StoredShape, Path] | None = None
    if section.teacher is not None:
        teacher = model_folder("rl.teacher", section.teacher)
        reference = read_teacher("rl.teacher", teacher, chat), teacher
    endpoint = None
    if section.teacher_endpoint is not None:
        endpoint = EndpointTeacher(section.teacher_endpoint, context)
    dialogue = None
    if section.tools:
        dialogue = Dialogue(
            chat,
            CallFormat(chat),
            Toolbox(section.tools),
            section.turns,
            section.tool_answer_tokens,
        )
    prompts, sets = read_prompts(
        section.data,
        section.rewards,
        chat,
        length - section.max_new_tokens,
        inputs,
        dialogue,
    )
    training, held_out = split(
        prompts, section.holdout, section.holdout_limit, section.key_seed
    )
    section = section.in_steps(len(training))
    with tuning(inputs, section, start, length, out, context) as setup:
        world = setup.world
        if endpoint is not None:
            on_first(partial(endpoint.check_vocabulary, chat, length), world)
        elif reference is None and section.kl_weight and section.lora is None:
            reference = setup.shape, start
        if world.is_first:
            write_text(
                out / PROMPTS,
                "".join(f"{prompt.example['id']}\n" for prompt in training),
            )
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
        model = setup.model()
        order = Order([len(training)], section.key_seed)
        choice = None
        if section.curriculum is not None:
            choice = PromptChoice(section.curriculum, order, section.key_seed)
        actor = Actor(
            section,
            training,
            order,
            model,
            None
            if reference is None
            else sharded_model(
                reference[0],
                stored(reference[1]),
                world,
                setup.dtype,
                context.training.compute,
            ).requires_grad_(False),
            Sampler(
                model,
                section.lora,
                setup.shape,
                setup.dtype,
                section.generation_rows,
                world,
                dialogue,
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
            endpoint,
        )
        # Computed once per run, also if the training resumes.
        before = measured_once(
            context.work / "before.json", world, partial(actor.measure, held_out)
        )
        objective = Reinforcement(actor, length, setup.flops_per_token)
        state: dict[str, Part] = {"rollouts": actor.rollouts}
        if choice is not None:
            state["curriculum"] = choice
        record, summary = tune(
            setup,
            Learner(objective, model, averaged(model, section), state=state),
            Observers(before_step=actor.before_step),
        )
        after = actor.measure(held_out)
        rewarded = []
        if record is not None:
            names = (
                "reward",
                *(f"rewards/{name_of(reward)}" for reward in section.rewards),
            )
            rewarded = [
                {name: line[name] for name in names}
                for line in read_lines(context.work / METRICS)
                if "reward" in line
            ]
            batches = -(-section.steps // section.updates_per_batch)
            gather_batches(context.work / BATCHES, batches, out / ANSWERS)
            write_json(
                out / ROLLOUTS,
                {
                    "batches": [
                        {
                            "step": batch * section.updates_per_batch + 1,
                            "answers": (read_batch([out], batch) or [])[
                                : SHOWN_GROUPS * section.group_size
                            ],
                        }
                        for batch in range(batches)
                        if batch % section.samples_every == 0 or batch == batches - 1
                    ],
                    "before": before,
                    "after": after,
                },
            )
    held_out_rewards: HeldOutRewards | None = None
    if held_out:
        first, second = (
            np.array([answer["reward"] for answer in answers])
            for answers in (before, after)
        )
        held_out_rewards = {
            "reward_before": float(first.mean()),
            "reward": float(second.mean()),
            "difference": paired_difference(first, second, section.key_seed, RESAMPLES),
        }
    return {
        **summary,
        "started_from": start_stage,
        "sets": [prompt_set.summary() for prompt_set in sets],
        "algorithm": section.algorithm,
        "kl_weight": section.kl_weight,
        "group_size": section.group_size,
        "training_prompts": len(training),
        "held_out_prompts": len(held_out),
        "held_out": held_out_rewards,
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
        "first_rewards": rewarded[0] if rewarded else {},
        "last_rewards": rewarded[-1] if rewarded else {},
    }
