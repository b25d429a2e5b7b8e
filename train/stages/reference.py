"""Stage `reference`: log-probabilities of all pairs under the start model of preference
optimisation, computed once.

Output: `reference.parquet`, a row per pair in the order of the stage `dpo_data`: `id`,
the summed log-probabilities `chosen` and `rejected` (float32) and their numbers of
tokens, `chosen_tokens` and `rejected_tokens`; and `key.json`, the inputs that these
depend on. The key holds neither loss nor beta, so changing them recomputes nothing. For
the loss `kto` the rows are answers, with `logp`, and `mismatched`, the log-probability
of another prompt's answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gristmill.core.stage_context import Context
from gristmill.mixtures.posttraining import Lora, Reference
from gristmill.tokenize.packed import PackedSet
from gristmill.train.adapters.lora import tuned_model
from gristmill.train.data.pairs import more_likely
from gristmill.train.data.preference_rows import AnswerRows, PairRows, check_pairs
from gristmill.train.models.weights import read_shape, stored
from gristmill.train.objectives.kto_objective import answer_logps
from gristmill.train.objectives.reference_logps import (
    answer_key,
    key_of,
    pair_logps,
    write_answer_reference,
    write_reference,
)
from gristmill.train.parallel.process_groups import World, process_group
from gristmill.train.parallel.sharding import compute_dtype
from gristmill.train.stages.stage_inputs import open_rows, start_of
from gristmill.train.stages.trained_models import describe_model


def run(
    inputs: Mapping[str, Path], config: dict[str, Any], out: Path, context: Context
) -> dict[str, Any]:
    """Score every pair, or answer; called on every rank of a torchrun process group.

    Raises:
        gristmill.train.data.preference_rows.LabelledError: the data has single answers,
            but the loss needs pairs.
    """
    section = Reference.model_validate(config)
    start = start_of(inputs)
    with open_rows(inputs["dpo_data"], context) as packed:
        if not section.answers:
            check_pairs(packed)
        return score(packed, start, section, out, context)


def score(
    packed: PackedSet, start: Path, section: Reference, out: Path, context: Context
) -> dict[str, Any]:
    """Score the rows and write the log-probabilities; returns the stage's summary."""
    shape = read_shape(start)
    rounded = section.rounded
    # New adapters add nothing, but the base weights must be rounded as in training.
    lora = (
        None
        if rounded is None
        else Lora(rank=1, base=rounded.base, targets=rounded.targets)
    )
    with process_group(context.parallel, pipelined=False, split=lora is None) as world:
        dtype = compute_dtype(section.precision, world.device)
        model = tuned_model(shape, stored(start), lora, 0, world, dtype, context)
        if section.answers:
            scored = score_answers(
                model, start, AnswerRows(packed), section, dtype, out, world
            )
            return {**describe_model(shape, packed.sequence_length), **scored}
        rows = PairRows(packed)
        logps = pair_logps(
            model, rows, np.arange(len(rows)), section.micro_batch_size, world
        )
        key = key_of(start, rows, dtype, rounded)
        if world.is_first:
            write_reference(out, key, rows, logps)
    return {
        **describe_model(shape, packed.sequence_length),
        "pairs": len(rows),
        "key": key,
        "tokens_scored": int(rows.scored_tokens.sum()),
        "chosen_more_likely": more_likely(logps),
    }


def score_answers(
    model: nn.Module,
    start: Path,
    rows: AnswerRows,
    section: Reference,
    dtype: torch.dtype,
    out: Path,
    world: World,
) -> dict[str, Any]:
    """Score every answer after its own prompt and its partner's answer after the same
    prompt; returns summary figures.
    """
    all_rows = np.arange(len(rows))
    logps = np.stack(
        [
            answer_logps(
                model, rows, all_rows, section.micro_batch_size, world, mismatched
            )
            for mismatched in (False, True)
        ],
        axis=1,
    )
    key = answer_key(start, rows, dtype, section.rounded)
    if world.is_first:
        write_answer_reference(out, key, rows, logps)
    return {
        "answers": len(rows),
        "key": key,
        "tokens_scored": int(rows.scored_tokens.sum()),
    }
