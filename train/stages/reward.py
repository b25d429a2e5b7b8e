"""Stage `reward`: trains a reward model on preferences (Bradley-Terry).

Output: `model/`, a LlamaForSequenceClassification with one label (or that of the
decoder's family) and its tokenizer; `metrics.jsonl`, `skipped_steps.jsonl` as of
pre-training; `holdout.jsonl`, the held-out pairs with their scores; `examples.txt`, the
example of each row; `margins.parquet`, the score difference of each pair (see
`objectives/preference_report.py`); `model-average/` if an average is configured.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict, cast

import numpy as np

from gristmill.core.files import copy_file
from gristmill.core.stage_context import Context
from gristmill.dataprep.examples.kept_examples import set_names
from gristmill.dataprep.examples.preferences import warnings_of
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.schema.posttraining import Lora
from gristmill.mixtures.schema.rl import Reward
from gristmill.train.adapters.lora import (
    adapted_flops_per_token,
    describe_rounding,
    merged,
    tuned_model,
)
from gristmill.train.data.conversation_tokens import (
    LEFT_OUT_SHARE,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    Chat,
    NothingToTrainError,
    write_example_ids,
)
from gristmill.train.data.pairs import (
    HOLDOUT,
    Pair,
    are_held_out,
    read_pairs,
    write_holdout,
)
from gristmill.train.distributed.fsdp import ForeignModelError, compute_dtype
from gristmill.train.distributed.process_groups import process_group
from gristmill.train.eval.intervals import Estimate, share_with_interval
from gristmill.train.loop.objective import JsonObject
from gristmill.train.loop.throughput import Utilisation, peak_flops
from gristmill.train.loop.training_job import Job, Learner
from gristmill.train.models.model_config import Shape, TransformersShape
from gristmill.train.models.reward_model import (
    RewardModel,
    save_reward_model,
    with_new_score,
)
from gristmill.train.models.weights import read_shape, stored
from gristmill.train.objectives.preference_report import (
    MARGINS,
    MarginSummary,
    measured_again,
    write_margins,
)
from gristmill.train.objectives.reward_pairs import RewardPairs, pair_scores
from gristmill.train.stages.stage_inputs import Inputs, start_of
from gristmill.train.stages.trained_models import (
    TunedSummary,
    all_tensors,
    averaged,
    causal_share,
    describe_model,
    final_measurements,
    tuned_shape,
)
from gristmill.train.trainer import train

TOKENIZER_FILES = (TOKENIZER_FILE, TEMPLATE_FILE, TOKENIZER_CONFIG_FILE)


class Judged(TypedDict):
    """Metrics of a reward model on held-out pairs. Undefined values are None.

    Attributes:
        accuracy: share whose chosen answer scores higher (ties count as wrong), with
            its interval.
        longer_chosen: accuracy of preferring the longer answer, with its interval.
        length_correlation: Pearson's, of scores and answers' tokens.
        margin: mean difference.
        mean, deviation: of all scores.
    """

    accuracy: Estimate | None
    longer_chosen: Estimate | None
    length_correlation: float | None
    margin: float | None
    mean: float | None
    deviation: float | None


class RewardSummary(TunedSummary):
    """Summary of the stage.

    Attributes:
        sets: counts of each set.
        training_pairs, held_out_pairs: their numbers.
        too_long_pairs: pairs that are neither trained nor held out.
        held_out: metrics of the held-out pairs.
        margins: of measured pairs; None on other ranks than the first.
    """

    sets: list[JsonObject]
    training_pairs: int
    held_out_pairs: int
    too_long_pairs: int
    held_out: Judged
    margins: MarginSummary | None


def run(
    inputs: Inputs,
    config: Recipe,
    out: Path,
    context: Context,
) -> RewardSummary:
    """Train a reward model; called on every rank of a torchrun process group.

    Raises:
        NothingToTrainError: no pair is left to train on.
        gristmill.train.loop.stopping.StoppedError: SIGTERM was received; a rerun
            continues.
    """
    section = Reward.model_validate(config)
    seed = section.key_seed
    start = start_of(inputs)
    shape = read_shape(start)
    if isinstance(shape, TransformersShape):
        raise ForeignModelError(
            f"reward trains a score on the built-in decoder, not on {shape.family} of "
            "transformers; start from a family of docs/reference/model-families.md"
        )
    chat = Chat(inputs["tokenizer"])
    length = section.sequence_length or shape.sequence_length
    shape = cast(Shape, tuned_shape(shape, length, context))
    sets = read_pairs(section.data or (), chat, length, inputs)
    names = set_names([preference_set.path for preference_set in sets])
    all_pairs = [
        (pair, name)
        for name, preference_set in zip(names, sets, strict=True)
        for pair in preference_set.pairs
    ]
    usable = [
        (pair, name)
        for pair, name in all_pairs
        if not (pair.chosen.truncated or pair.rejected.truncated)
    ]
    pairs = [pair for pair, _ in usable]
    is_out = held_out_pairs(pairs, section, len(all_pairs))
    training, held_out = (
        [pairs[number] for number in np.flatnonzero(mask)] for mask in (~is_out, is_out)
    )
    with process_group(
        context.training.parallel, split_rows=False, split=section.lora is None
    ) as world:
        if world.is_first:
            write_example_ids(
                out, [pair.example["id"] for pair in training], [len(training)]
            )
            for preference_set in sets:
                for warning in warnings_of(preference_set.path, preference_set.audit):
                    context.warn(warning)
            num_read = sum(preference_set.encoding.examples for preference_set in sets)
            if num_read - len(pairs) > LEFT_OUT_SHARE * num_read:
                context.warn(
                    f"{num_read - len(pairs):,} of {num_read:,} pairs are not trained "
                    "on: no template renders them, or one of their answers ends behind "
                    f"reward.sequence_length, {length:,} tokens"
                )
        dtype = compute_dtype(section.precision, world.device)
        model = tuned_model(
            shape,
            with_new_score(stored(start), seed),
            section.lora,
            seed,
            world,
            dtype,
            context,
            # The head is new, and trained even if all other weights are frozen.
            lambda model: model.get_submodule("score").requires_grad_(True),
            RewardModel,
        )
        flops = scoring_flops_per_token(shape, length, section.lora)
        objective = RewardPairs(
            training, section, seed, chat.pad, length, flops, world.device
        )
        learner = Learner(objective, model, averaged(model, section))
        record, summary = train(
            Job(
                section=section,
                learner=learner,
                world=world,
                context=context,
                utilisation=Utilisation(
                    peak_flops(world.device, dtype), causal_share(shape, length, flops)
                ),
            )
        )
        ids = [pair.example["id"] for pair in pairs]
        measured = measured_again(ids, is_out, section.measured_pairs)
        scores = pair_scores(
            model,
            [pairs[pair] for pair in measured],
            chat.pad,
            length,
            section.micro_batch_size,
            world,
        )
        scored = scores[is_out[measured]]
        tensors = all_tensors(model, learner.average)
        measurements = final_measurements(
            record, describe_rounding(model, section.lora)
        )
        margins = None
        if record is not None:
            for name, weights in tensors.items():
                save_reward_model(
                    out / name,
                    shape,
                    weights if section.lora is None else merged(weights, section.lora),
                    sorted(chat.stops),
                    chat.pad,
                )
                for file in TOKENIZER_FILES:
                    if (inputs["tokenizer"] / file).exists():
                        copy_file(inputs["tokenizer"] / file, out / name / file)
            record.publish(out)
            write_holdout(
                out / HOLDOUT, [pair.example for pair in held_out], "score", scored
            )
            margins = write_margins(
                out / MARGINS,
                [pairs[pair].example for pair in measured],
                [usable[pair][1] for pair in measured],
                is_out[measured],
                scores,
            )
    return {
        **summary,
        **measurements,
        **describe_model(shape, length),
        "sequence_length": length,
        "sets": [preference_set.summary() for preference_set in sets],
        "training_pairs": len(training),
        "held_out_pairs": len(held_out),
        "too_long_pairs": len(all_pairs) - len(pairs),
        "held_out": judged(held_out, scored),
        "margins": margins,
    }


def held_out_pairs(pairs: Sequence[Pair], section: Reward, read: int) -> np.ndarray:
    """Mask of held-out pairs, (n,) bool.

    Args:
        pairs: the pairs that were not truncated.
        section: with the held-out share.
        read: number of pairs read, for the message.

    Raises:
        NothingToTrainError: no pair is left to train on.
    """
    is_out = are_held_out(
        (pair.example for pair in pairs), section.holdout, section.key_seed
    )
    if is_out.all():
        raise NothingToTrainError(
            f"reward: of {read} pairs {read - len(pairs)} are longer than "
            f"reward.sequence_length and {len(pairs)} are held out (reward.holdout "
            f"{section.holdout}): none is left to train on; raise the one, lower the "
            "other, or add pairs with other prompts"
        )
    return is_out


def scoring_flops_per_token(shape: Shape, length: int, lora: Lora | None) -> float:
    """Arithmetic of a training per token: that of the decoder without its output
    projection.
    """
    per_weight = 6 if lora is None else 4
    return (
        adapted_flops_per_token(shape, length, lora)
        - per_weight * shape.vocab_size * shape.width
    )


def judged(pairs: Sequence[Pair], scored: np.ndarray) -> Judged:
    """Metrics of a reward model on held-out pairs.

    Args:
        pairs: n of them.
        scored: (n, 2) float32, chosen first.
    """
    lengths = np.array(
        [pair.scored_tokens for pair in pairs], dtype=np.float64
    ).reshape(-1, 2)
    scores = scored.astype(np.float64)
    varies = len(pairs) > 1 and lengths.std() > 0 and scores.std() > 0
    return {
        "accuracy": share_with_interval(scores[:, 0] > scores[:, 1]),
        "longer_chosen": share_with_interval(lengths[:, 0] > lengths[:, 1]),
        "length_correlation": float(np.corrcoef(scores.ravel(), lengths.ravel())[0, 1])
        if varies
        else None,
        "margin": float((scores[:, 0] - scores[:, 1]).mean()) if len(pairs) else None,
        "mean": float(scores.mean()) if len(pairs) else None,
        "deviation": float(scores.std()) if len(pairs) else None,
    }
