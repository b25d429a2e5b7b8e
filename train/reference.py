"""Stage `reference`: what the model that preference optimisation starts from thinks of every pair, computed once.

Output: `reference.parquet`, a row per pair in the order of the stage `dpo_data`: `id`, the summed log-probabilities
`chosen` and `rejected` (float32) and the tokens that were summed over, `chosen_tokens` and `rejected_tokens`; and
`key.json`, what these depend on. No loss and no beta is among that, so that other ones cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.dataprep.context import Context
from gristmill.mixtures.posttraining import Reference
from gristmill.tokenize.packed import PackedSet
from gristmill.train.models.weights import read_shape, stored
from gristmill.train.objectives.pair_rows import PairRows
from gristmill.train.objectives.pairs import more_likely
from gristmill.train.objectives.reference import key_of, pair_logps, write_reference
from gristmill.train.parallel.sharding import compute_dtype, sharded_model
from gristmill.train.parallel.world import process_group
from gristmill.train.pretrain import MODEL, describe_model


def run(inputs: Mapping[str, Path], config: dict[str, Any], out: Path, context: Context) -> dict[str, Any]:
    """Score every pair; called on every rank of a torchrun process group."""
    section = Reference.model_validate(config)
    start = start_of(inputs)
    shape = read_shape(start)
    with closing(PackedSet(inputs["dpo_data"], context.stream, context.warn)) as packed, \
            process_group(context.parallel, pipelined=False) as world:
        rows = PairRows(packed)
        dtype = compute_dtype(section.precision, world.device)
        model = sharded_model(shape, stored(start), world, dtype, context.compute)
        logps = pair_logps(model, rows, np.arange(len(rows)), section.micro_batch_size, world)
        key = key_of(start, rows, dtype)
        if world.is_first:
            write_reference(out, key, rows, logps)
    return {**describe_model(shape), "pairs": len(rows), "key": key,
            "tokens_scored": int(rows.scored_tokens.sum()), "chosen_more_likely": more_likely(logps)}


def start_of(inputs: Mapping[str, Path]) -> Path:
    """The model that preference optimisation starts from: the tuned one, or else the pre-trained one."""
    return (inputs["sft"] if "sft" in inputs else inputs["pretrain"]) / MODEL
