"""Stage `sft`: supervised fine-tuning on conversations; only what the assistant says is trained.

Output: `model/`, `metrics.jsonl`, `skipped_steps.jsonl`, as of pre-training; `examples.txt`: the example of each row;
`refused.jsonl`: the records that are no examples, and why; with `lora` also `adapter/`, which PEFT loads, and
`model/` is the model with that merged into it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from gristmill.dataprep.context import Context
from gristmill.dataprep.files import atomic_write
from gristmill.dataprep.reading.examples import read_set
from gristmill.mixtures.posttraining import Instructions, Sft
from gristmill.tokenize.packed import PackedSet
from gristmill.train.adapters.files import settle_adapters
from gristmill.train.adapters.lora import adapted_flops_per_token
from gristmill.train.adapters.model import tuned_model
from gristmill.train.evaluation.validation import Validation
from gristmill.train.loop.loop import Job, train
from gristmill.train.loop.throughput import peak_flops
from gristmill.train.models.weights import read_shape
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
from gristmill.train.objectives.next_token import NextToken
from gristmill.train.objectives.set_weights import copies, quotas
from gristmill.train.optim.elastic import ElasticWeights, fisher_diagonal
from gristmill.train.parallel.sharding import compute_dtype
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

REFUSED = "refused.jsonl"


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
    used, sets, refused = read_sets(section.data, chat, length, seed)
    with closing(PackedSet(inputs["mix"], context.stream, context.warn)) as packed, \
            process_group(context.parallel, pipelined=False) as world:
        dtype = compute_dtype(section.precision, world.device)
        model = tuned_model(shape, start, section, world, dtype, context)
        flops = adapted_flops_per_token(shape, length, section.lora)
        token_bytes = read_token_bytes(inputs["tokenizer"], world.device)
        objective = AssistantTurns(used, seed, chat.pad, length, token_bytes, flops)
        if world.is_first:
            write_example_ids(out / EXAMPLE_IDS, [one.example for one in used])
            write_refused(out / REFUSED, refused)
        elastic = held_by_pretraining(model, section, NextToken(packed, seed, token_bytes, shape))
        average = averaged(model, section)
        job = Job(section=section, objective=objective, model=model, world=world, context=context,
                  peak_flops=peak_flops(world.device, dtype), causal_share=causal_share(shape, length, flops),
                  average=average, elastic=elastic, decode=decoder(inputs["tokenizer"]),
                  after_step=Validation(section.validate_every, section.steps, packed, model, average, token_bytes,
                                        world))
        record, summary = train(job)
        tensors = all_tensors(model, average)
        if record is not None:
            summary |= publish(out, shape, settle_adapters(out, tensors, section.lora), record)
    return {**summary, **describe_model(shape), "sequence_length": length, "sets": sets, **counts_of(used),
            "example": decoded_mask(chat, used[int(objective.order.rows(np.zeros(1, dtype=np.int64))[0])])}


def held_by_pretraining(model: nn.Module, section: Sft, pretraining: NextToken) -> ElasticWeights | None:
    """What holds the weights of a model that was not tuned yet, where the section asks for it."""
    if section.ewc is None:
        return None
    count = min(section.ewc.fisher_rows, pretraining.order.total)
    rows = pretraining.order.rows(np.arange(count, dtype=np.int64))
    return ElasticWeights(model, fisher_diagonal(model, pretraining, rows), section.ewc.weight)


def read_sets(
    data: Sequence[Instructions], chat: Chat, length: int, seed: int
) -> tuple[list[Conversation], list[dict[str, Any]], list[dict[str, str]]]:
    """Read and encode all sets of examples, each as often as its weight asks for.

    Returns:
        the examples to train on, counts per set, and the refused records (set, place, reason).

    Raises:
        gristmill.dataprep.reading.examples.ExamplesError: more records of a set are refused than may be.
        NothingToTrainError: one of the sets trains no token.
    """
    sets: list[list[Conversation]] = []
    counts: list[dict[str, Any]] = []
    refused: list[dict[str, str]] = []
    for one in data:
        read = read_set(one.path, "sft", one.format, one.limit, one.max_refused)
        found, counted = prepare_conversations(read.examples, chat, length, one.train_on)
        if not found:
            raise NothingToTrainError(
                f"sft data {one.path}: none of its {counted['examples']} examples has an answer within "
                f"{length} tokens ({counted['dropped']} too long, {counted['unrenderable']} not to be rendered: "
                f"{counted['unrenderable_reasons']}); raise sft.sequence_length or look at the data")
        sets.append(found)
        counts.append({"path": one.path, **read.counts(), **counted})
        refused += [{"set": one.path, "place": item.place, "reason": item.reason} for item in read.refused]
    return weighted(sets, [one.weight for one in data], counts, seed), counts, refused


def weighted(
    sets: Sequence[list[Conversation]], weights: Sequence[float | None], counts: Sequence[dict[str, Any]], seed: int
) -> list[Conversation]:
    """All examples, those of a set with a weight as often as it asks for; adds what came of it to the sets' counts."""
    trained = [np.array([int(one.trained.sum()) for one in found], dtype=np.int64) for found in sets]
    taken = [np.ones(len(found), dtype=np.int64) for found in sets]
    if weights[0] is not None:
        wanted = quotas([int(tokens.sum()) for tokens in trained], [weight or 0.0 for weight in weights])
        taken = [copies(tokens, [one.example for one in found], quota, seed)
                 for tokens, found, quota in zip(trained, sets, wanted, strict=True)]
    drawn = [int((number * tokens).sum()) for number, tokens in zip(taken, trained, strict=True)]
    for counted, number, tokens in zip(counts, taken, drawn, strict=True):
        counted |= {"drawn": int(number.sum()), "drawn_tokens": tokens, "drawn_share": tokens / sum(drawn)}
    return [one for found, number in zip(sets, taken, strict=True)
            for one, times in zip(found, number.tolist(), strict=True) for _ in range(times)]


def write_refused(path: Path, refused: Sequence[Mapping[str, str]]) -> None:
    """Write which records are no examples, and why: JSON lines with set, place and reason."""
    with atomic_write(path) as sink:
        for one in refused:
            sink.write(json.dumps(one, ensure_ascii=False, sort_keys=True).encode() + b"\n")
