"""Stage `reference`: log-probabilities of all pairs under the start model of preference
optimisation, computed once.

Output: `reference.parquet`, a row per pair in the order of the stage `dpo_data`: `id`,
the summed log-probabilities `chosen` and `rejected` (float32) and their numbers of
tokens, `chosen_tokens` and `rejected_tokens`; and `key.json`, the inputs that these
depend on. The key holds neither loss nor beta, so changing them recomputes nothing.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from gristmill.core.files import write_json
from gristmill.core.stage_context import Context
from gristmill.dataprep.documents import write_table
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.schema.posttraining import Lora, Reference
from gristmill.train.adapters.lora import tuned_model
from gristmill.train.data.pairs import more_likely
from gristmill.train.data.preference_rows import PairRows
from gristmill.train.distributed.fsdp import compute_dtype
from gristmill.train.distributed.process_groups import process_group
from gristmill.train.models.weights import read_shape, stored
from gristmill.train.objectives.reference_logps import (
    KEY,
    TABLE,
    PredictionKey,
    key_of,
    pair_logps,
)
from gristmill.train.stages.stage_inputs import Inputs, open_rows, start_of
from gristmill.train.stages.trained_models import ModelFigures, describe_model


class ReferenceSummary(ModelFigures):
    """Summary of the stage.

    Attributes:
        key: see reference_logps.key_of.
        pairs: their number.
        chosen_more_likely: share of pairs whose chosen answer is the likelier one.
    """

    key: PredictionKey
    pairs: int
    chosen_more_likely: float | None


def run(
    inputs: Inputs,
    config: Recipe,
    out: Path,
    context: Context,
) -> ReferenceSummary:
    """Score every pair; called on every rank of a torchrun process group."""
    section = Reference.model_validate(config)
    start = start_of(inputs)
    with open_rows(inputs["dpo_data"], context) as packed:
        shape = read_shape(start)
        rounded = section.rounded
        # New adapters add nothing, but the base weights must be rounded as in training.
        lora = (
            None
            if rounded is None
            else Lora(rank=1, base=rounded.base, targets=rounded.targets)
        )
        with process_group(
            context.training.parallel, split_rows=False, split=lora is None
        ) as world:
            dtype = compute_dtype(section.precision, world.device)
            model = tuned_model(shape, stored(start), lora, 0, world, dtype, context)
            figures = describe_model(shape, packed.sequence_length)
            pairs = PairRows(packed)
            key = key_of(start, pairs, dtype, rounded)
            logps = pair_logps(
                model, pairs, np.arange(len(pairs)), section.micro_batch_size, world
            )
            if world.is_first:
                tokens = pairs.scored_tokens.astype(np.int32)
                columns = {
                    "chosen": logps[:, 0],
                    "rejected": logps[:, 1],
                    "chosen_tokens": tokens[:, 0],
                    "rejected_tokens": tokens[:, 1],
                }
                write_table(out / TABLE, pa.table({"id": pairs.ids, **columns}))
                write_json(out / KEY, key)
        return {
            **figures,
            "pairs": len(pairs),
            "key": key,
            "chosen_more_likely": more_likely(logps),
        }
