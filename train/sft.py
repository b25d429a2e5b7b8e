"""Stage `sft`: supervised fine-tuning on conversations; only what the assistant says is trained.

Output: `model/`, `metrics.jsonl`, `skipped_steps.jsonl`, as of pre-training; `examples.txt`: the example of each row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.dataprep.context import Context
from gristmill.dataprep.reading.examples import read_examples
from gristmill.mixtures.posttraining import Examples, Sft
from gristmill.train.loop.loop import Job, train
from gristmill.train.loop.throughput import peak_flops
from gristmill.train.models.weights import read_shape, stored
from gristmill.train.objectives.assistant_turns import AssistantTurns
from gristmill.train.objectives.chat import Chat
from gristmill.train.objectives.conversations import (
    EXAMPLE_IDS,
    Conversation,
    NothingToTrainError,
    counts_of,
    decoded_mask,
    prepare_conversations,
    write_example_ids,
)
from gristmill.train.parallel.sharding import compute_dtype, sharded_model
from gristmill.train.parallel.world import process_group
from gristmill.train.pretrain import (
    MODEL,
    all_tensors,
    averaged,
    causal_share,
    decoder,
    describe_model,
    publish,
    read_token_bytes,
)


def run(inputs: Mapping[str, Path], config: dict[str, Any], out: Path, context: Context) -> dict[str, Any]:
    """Fine-tune the pre-trained model; called on every rank of a torchrun process group.

    Raises:
        NothingToTrainError: a set of examples trains no token.
        gristmill.train.loop.stopping.StoppedError: SIGTERM came; a rerun continues.
    """
    section = Sft.model_validate(config)
    seed = section.seed or 0
    start = inputs["pretrain"] / MODEL
    shape, chat = read_shape(start), Chat(inputs["tokenizer"])
    length = section.sequence_length or shape.sequence_length
    used, sets = read_sets(section.data, chat, length)
    with process_group(context.parallel, pipelined=False) as world:
        dtype = compute_dtype(section.precision, world.device)
        model = sharded_model(shape, stored(start), world, dtype, context.compute)
        token_bytes = read_token_bytes(inputs["tokenizer"], world.device)
        objective = AssistantTurns(used, seed, chat.pad, length, token_bytes, shape.flops_per_token(length))
        if world.is_first:
            write_example_ids(out / EXAMPLE_IDS, [one.example for one in used])
        average = averaged(model, section)
        job = Job(section=section, objective=objective, model=model, world=world, context=context,
                  peak_flops=peak_flops(world.device, dtype), causal_share=causal_share(shape, length),
                  average=average, decode=decoder(inputs["tokenizer"]))
        record, summary = train(job)
        tensors = all_tensors(model, average)
        if record is not None:
            summary |= publish(out, shape, tensors, record)
    return {**summary, **describe_model(shape), "sequence_length": length, "sets": sets, **counts_of(used),
            "example": decoded_mask(chat, used[int(objective.order.rows(np.zeros(1, dtype=np.int64))[0])])}


def read_sets(
    data: Sequence[Examples], chat: Chat, length: int
) -> tuple[list[Conversation], list[dict[str, Any]]]:
    """Read and encode all sets of examples.

    Returns:
        the examples to train on, and counts per set.

    Raises:
        NothingToTrainError: one of the sets trains no token.
    """
    used: list[Conversation] = []
    sets = []
    for one in data:
        found, counts = prepare_conversations(read_examples(one.path, "sft", one.limit), chat, length)
        if not found:
            raise NothingToTrainError(
                f"sft data {one.path}: none of its {counts['examples']} examples has an answer within "
                f"{length} tokens ({counts['dropped']} too long, {counts['refused']} refused "
                f"{counts['refused_reasons']}); raise sft.sequence_length or look at the data")
        used += found
        sets.append({"path": one.path, **counts})
    return used, sets
