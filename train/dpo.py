"""Stage `dpo`: direct preference optimisation (Rafailov et al. 2023) of the tuned model.

Output: `model/`, `metrics.jsonl`, `skipped_steps.jsonl` as of pre-training; `holdout.jsonl`, the pairs that were not
trained on, with their log-probabilities under the model that the training started from; `examples.txt`, the example
of each row; with `lora` also `adapter/`, which PEFT loads, and `model/` is the model with that merged into it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.dataprep.context import Context
from gristmill.dataprep.files import atomic_write
from gristmill.mixtures.posttraining import Dpo
from gristmill.tokenize.packed import PackedSet
from gristmill.train.adapters.files import settle_adapters
from gristmill.train.adapters.lora import adapted_flops_per_token
from gristmill.train.adapters.model import tuned_model
from gristmill.train.evaluation.validation import Validation
from gristmill.train.loop.loop import Job, train
from gristmill.train.loop.throughput import peak_flops
from gristmill.train.models.weights import read_shape
from gristmill.train.objectives.chat import Chat
from gristmill.train.objectives.chosen_decline import decline_of
from gristmill.train.objectives.conversations import EXAMPLE_IDS, NothingToTrainError, write_example_ids
from gristmill.train.objectives.pairs import Pair, is_held_out, more_likely, pair_logps, read_pairs, reward_accuracy
from gristmill.train.objectives.preferences import Preferences
from gristmill.train.objectives.reference import certify_start, key_of, read_reference
from gristmill.train.parallel.sharding import compute_dtype
from gristmill.train.parallel.world import process_group
from gristmill.train.pretrain import all_tensors, averaged, causal_share, describe_model, publish, read_token_bytes
from gristmill.train.reference import start_of

HOLDOUT = "holdout.jsonl"
CERTIFICATE = "step-0.json"


def run(inputs: Mapping[str, Path], config: dict[str, Any], out: Path, context: Context) -> dict[str, Any]:
    """Optimise preferences; called on every rank of a torchrun process group.

    Raises:
        NothingToTrainError: no pair is left to train on.
        gristmill.train.objectives.reference.StaleReferenceError: the reference is of other weights, pairs or the like.
        gristmill.train.objectives.reference.NotTheReferenceError: the first batch's margin is not zero.
        gristmill.train.loop.stopping.StoppedError: SIGTERM came; a rerun continues.
    """
    section = Dpo.model_validate(config)
    seed = section.seed or 0
    start = start_of(inputs)
    shape, chat = read_shape(start), Chat(inputs["tokenizer"])
    length = section.sequence_length or shape.sequence_length
    pairs, sets = read_pairs(section.data, chat, length)
    is_out = held_out_mask(pairs, section, seed)
    training = [pair for pair, out_of_training in zip(pairs, is_out, strict=True) if not out_of_training]
    held_out = [pair for pair, out_of_training in zip(pairs, is_out, strict=True) if out_of_training]
    with closing(PackedSet(inputs["mix"], context.stream, context.warn)) as packed, \
            process_group(context.parallel, pipelined=False) as world:
        dtype = compute_dtype(section.precision, world.device)
        reference = read_reference(inputs["reference"], key_of(start, chat, pairs, length, dtype))
        model = tuned_model(shape, start, section, world, dtype, context)
        flops = adapted_flops_per_token(shape, length, section.lora)
        measure = partial(pair_logps, model, pad=chat.pad, length=length, micro_batch_size=section.micro_batch_size,
                          world=world)
        objective = Preferences(training, reference[~is_out], section, seed, chat.pad, length,
                                flops, world.device, context.warn)
        if world.is_first:
            write_example_ids(out / EXAMPLE_IDS, [pair.example["id"] for pair in training])
        certificate = certify_start(model, objective, section, dtype, context.work / CERTIFICATE, world)
        average = averaged(model, section)
        record, summary = train(Job(
            section=section, objective=objective, model=model, world=world, context=context, average=average,
            peak_flops=peak_flops(world.device, dtype), causal_share=causal_share(shape, length, flops),
            after_step=Validation(section.validate_every, section.steps, packed, model, average,
                                  read_token_bytes(inputs["tokenizer"], world.device), world)))
        before, after = reference[is_out], measure(held_out)
        tensors = all_tensors(model, average)
        if record is not None:
            summary |= publish(out, shape, settle_adapters(out, tensors, section.lora), record)
            summary["chosen_decline"] = decline_of(record.lines())
            write_holdout(out / HOLDOUT, held_out, before, length)
    return {
        **summary, **describe_model(shape), "sequence_length": length, "sets": sets, "beta": section.beta,
        "objective": section.loss,
        "training_pairs": len(training), "held_out_pairs": len(held_out), "step_0": certificate,
        "held_out": {
            "reward_accuracy_before": reward_accuracy(before, before),
            "reward_accuracy": reward_accuracy(after, before),
            "chosen_more_likely_before": more_likely(before),
            "chosen_more_likely": more_likely(after),
        },
    }


def held_out_mask(pairs: Sequence[Pair], section: Dpo, seed: int) -> np.ndarray:
    """Which of n pairs are held out, (n,) bool.

    Raises:
        NothingToTrainError: all of them are.
    """
    held_out = np.array([is_held_out(pair.example, section.holdout, seed) for pair in pairs], dtype=bool)
    if held_out.all():
        raise NothingToTrainError(f"dpo: all {len(pairs)} pairs are held out; lower dpo.holdout ({section.holdout}) or "
                                  "add pairs with other prompts")
    return held_out


def write_holdout(path: Path, pairs: Sequence[Pair], reference: np.ndarray, length: int) -> None:
    """Write the held-out pairs as JSON lines.

    Each has `reference_chosen` and `reference_rejected`, and the `sequence_length` that its conversations were cut to.
    """
    with atomic_write(path) as sink:
        for pair, (chosen, rejected) in zip(pairs, reference.tolist(), strict=True):
            line = {**pair.example, "reference_chosen": chosen, "reference_rejected": rejected,
                    "sequence_length": length}
            sink.write(json.dumps(line, ensure_ascii=False, sort_keys=True).encode() + b"\n")
