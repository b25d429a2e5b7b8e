"""Stage `reference`: what the model that preference optimisation starts from thinks of every pair, computed once.

Output: `reference.parquet`, a row per usable pair in the order of the data: `id`, the summed log-probabilities
`chosen` and `rejected` (float32) and the tokens that were summed over, `chosen_tokens` and `rejected_tokens`; and
`key.json`, what these depend on. No loss and no beta is among that, so that other ones cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gristmill.dataprep.context import Context
from gristmill.dataprep.reading.preference_audit import warnings_of
from gristmill.mixtures.posttraining import Reference
from gristmill.train.models.weights import read_shape, stored
from gristmill.train.objectives.chat import Chat
from gristmill.train.objectives.pairs import more_likely, pair_logps, read_pairs
from gristmill.train.objectives.reference import key_of, write_reference
from gristmill.train.parallel.sharding import compute_dtype, sharded_model
from gristmill.train.parallel.world import process_group
from gristmill.train.pretrain import MODEL, describe_model


def run(inputs: Mapping[str, Path], config: dict[str, Any], out: Path, context: Context) -> dict[str, Any]:
    """Score every pair; called on every rank of a torchrun process group.

    Raises:
        gristmill.train.objectives.conversations.NothingToTrainError: a set has no usable pair.
    """
    section = Reference.model_validate(config)
    start = start_of(inputs)
    shape, chat = read_shape(start), Chat(inputs["tokenizer"])
    length = section.sequence_length or shape.sequence_length
    pairs, sets = read_pairs(section.data, chat, length)
    with process_group(context.parallel, pipelined=False) as world:
        if world.is_first:
            for one in sets:
                for warning in warnings_of(one["path"], one["audit"]):
                    context.warn(warning)
        dtype = compute_dtype(section.precision, world.device)
        model = sharded_model(shape, stored(start), world, dtype, context.compute)
        logps = pair_logps(model, pairs, chat.pad, length, section.micro_batch_size, world)
        key = key_of(start, chat, pairs, length, dtype)
        if world.is_first:
            write_reference(out, key, pairs, logps)
    return {**describe_model(shape), "pairs": len(pairs), "sets": sets, "key": key,
            "tokens_scored": sum(tokens for pair in pairs for tokens in pair.scored_tokens),
            "chosen_more_likely": more_likely(logps)}


def start_of(inputs: Mapping[str, Path]) -> Path:
    """The model that preference optimisation starts from: the tuned one, or else the pre-trained one."""
    return (inputs["sft"] if "sft" in inputs else inputs["pretrain"]) / MODEL
