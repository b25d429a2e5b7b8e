"""Stage `sft_data`: packs conversations, and pre-training documents to replay, with
loss masks.

Output: a packed set (`tokenize/packed.py`) whose sources are the sets, and `replay` if
configured, with loss masks (`tokenize/loss_masks.py`); `refused.jsonl`: rejected
records with reasons; `counts.json`: shares trained, cut and ended, for the gates in
front of the training; with `holdout` also `held-out/`, a packed set of the held-out
conversations. Needs no accelerator, so data can be inspected and mixed again before a
training is paid for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.core.files import write_json
from gristmill.core.stage_context import Context
from gristmill.dataprep.examples.kept_examples import (
    QUARANTINED,
    check_records,
    set_names,
    usable_sets,
    write_quarantined,
)
from gristmill.dataprep.examples.read_examples import Quarantined
from gristmill.mixtures.posttraining import Gates, SftData
from gristmill.tokenize.encoding.tokenizer import load
from gristmill.tokenize.packed import PackedSet
from gristmill.train.data.conversation_tokens import (
    Chat,
    Conversation,
    NothingToTrainError,
    check_content,
    counts_of,
    decoded_mask,
    left_out_warning,
    prepare_conversations,
    why_left_out,
)
from gristmill.train.data.example_rows import (
    copies,
    packed_rows,
    piece_of,
    quotas,
    replay_count,
    replayed_rows,
    write_example_rows,
)
from gristmill.train.data.pairs import is_held_out
from gristmill.train.loop.rows_read import READS, rows_read
from gristmill.train.stages.stage_inputs import example_length

COUNTS = "counts.json"
HELD_OUT = "held-out"
"""Folder of a packed set of held-out conversations."""
REPLAY = "replay"
SAMPLES_PER_SET = 3
SAMPLE_TOKENS = 512
"""Most tokens of an example in the report."""


class GateError(ValueError):
    """Examples that do not pass `sft.gates`."""


class ReplayError(ValueError):
    """Replay of pre-training that the mixture does not allow."""


def run(
    inputs: Mapping[str, Path], config: dict[str, Any], out: Path, context: Context
) -> dict[str, Any]:
    """Read, encode, weigh and pack all examples.

    Raises:
        gristmill.dataprep.examples.read_examples.ExamplesError: more records of a set
            are quarantined than may be.
        NothingToTrainError: one of the sets trains no token.
        GateError: the examples do not pass `sft.gates`.
        ReplayError: rows of the mixture are of another length.
    """
    section = SftData.model_validate(
        {key: value for key, value in config.items() if key != READS}
    )
    seed, chat, tokenizer = (
        section.key_seed,
        Chat(inputs["tokenizer"]),
        load(inputs["tokenizer"]).described(),
    )
    length, mix = (
        example_length(section.sequence_length, inputs),
        PackedSet(inputs["mix"]) if section.replay else None,
    )
    if mix is not None and length != mix.sequence_length:
        raise ReplayError(
            f"sft.replay: the mixture's rows have {mix.sequence_length} tokens, but "
            f"sft.sequence_length is {length}; make them equal, or replay nothing"
        )
    names = set_names([dataset.path for dataset in section.data], [REPLAY])
    examples, held_out, sets, quarantined = read_sets(section, chat, length, inputs)
    write_quarantined(out / QUARANTINED, zip(names, quarantined, strict=True))
    for name, counts in zip(names, sets, strict=True):
        if warning := left_out_warning(name, counts, length):
            context.warn(warning)
    drawn = weighted(examples, [dataset.weight for dataset in section.data], sets, seed)
    rows = {
        name: packed_rows(
            [piece_of(conversation) for conversation in of_set],
            length,
            section.packing == "best_fit",
        )
        for name, of_set in zip(names, drawn, strict=True)
    }
    used = [conversation for of_set in drawn for conversation in of_set]
    if problems := gate_problems(counts_of(used), section.gates, length):
        raise GateError("sft: " + "; ".join(problems))
    replayed = replay_count(
        sum(len(conversation.ids) for conversation in used), length, section.replay
    )
    if replayed and mix is not None:
        rows[REPLAY] = replayed_rows(
            rows_read(mix, config[READS], inputs.get("pretrain")), replayed
        )
    written = write_example_rows(out, rows, length, tokenizer, chat.pad)
    if any(held_out):
        write_example_rows(
            out / HELD_OUT,
            {
                name: packed_rows(
                    [piece_of(conversation) for conversation in of_set],
                    length,
                    section.packing == "best_fit",
                )
                for name, of_set in zip(names, held_out, strict=True)
                if of_set
            },
            length,
            tokenizer,
            chat.pad,
        )
    write_json(out / COUNTS, counts_of(used))
    replayed_tokens = sum(
        len(piece.ids) for row in rows.get(REPLAY, []) for piece in row
    )
    return {
        "sequence_length": length,
        "packing": section.packing,
        **written,
        "sets": [
            {"name": name, **counts} for name, counts in zip(names, sets, strict=True)
        ],
        **counts_of(used),
        "replay": {
            "rows": replayed,
            "tokens": replayed_tokens,
            "share": replayed_tokens / written["tokens"],
        },
        "samples": [
            {
                "set": name,
                "example": conversation.example,
                "spans": decoded_mask(chat, shortened(conversation)),
            }
            for name, of_set in zip(names, examples, strict=True)
            for conversation in of_set[:SAMPLES_PER_SET]
        ],
    }


def gate_problems(counts: Mapping[str, Any], gates: Gates, length: int) -> list[str]:
    """Sentences, one for each gate that the examples do not pass.

    Args:
        counts: as of `counts_of`.
        gates: the manifest's thresholds.
        length: most tokens of an example.
    """
    problems = []
    if counts["end_of_turn_share"] < gates.min_end_of_turn_trained:
        problems.append(_unended(counts, gates, length))
    if counts["trained_share"] < gates.min_trained:
        problems.append(
            f"only {counts['trained_share']:.2%} of the tokens are trained "
            f"(sft.gates.min_trained: {gates.min_trained}): see that the template's "
            "marks enclose the answers, or lower the gate"
        )
    if counts["truncated_share"] > gates.max_truncated:
        problems.append(
            f"{counts['truncated_share']:.2%} of the examples are cut "
            f"(sft.gates.max_truncated: {gates.max_truncated}): "
            "raise sft.sequence_length, or the gate"
        )
    return problems


def _unended(counts: Mapping[str, Any], gates: Gates, length: int) -> str:
    """Sentence for the gate on trained ends of turns, with the causes: the length, the
    template, or both.
    """
    answers, cut = counts["answers"], counts["cut_answers"]
    unmarked = answers - cut - round(counts["end_of_turn_share"] * answers)
    causes = []
    if cut:
        causes.append(
            f"{cut:,} are cut at {length:,} tokens before their end of turn: raise "
            "sft.sequence_length or leave long examples out"
        )
    if unmarked:
        causes.append(
            f"{unmarked:,} are whole, but the chat template does not mark their end "
            "of turn as generated: put it "
            "before {% endgeneration %}"
        )
    return (
        f"only {counts['end_of_turn_share']:.2%} of {answers:,} answers have a trained "
        "end of turn, without which a model does not learn to stop "
        f"(sft.gates.min_end_of_turn_trained: {gates.min_end_of_turn_trained}); "
        + "; ".join(causes)
    )


def read_sets(
    section: SftData, chat: Chat, length: int, inputs: Mapping[str, Path]
) -> tuple[
    list[list[Conversation]],
    list[list[Conversation]],
    list[dict[str, Any]],
    list[Sequence[Quarantined]],
]:
    """Read and encode all sets of examples, or their prepared versions.

    Returns:
        set by set: the training examples, the held-out ones, counts, and the rejected
        records.

    Raises:
        gristmill.dataprep.examples.read_examples.ExamplesError: more records of a set
            are quarantined than may be.
        NothingToTrainError: one of the sets trains no token, or all of it is held out.
    """
    sets: list[list[Conversation]] = []
    held_out: list[list[Conversation]] = []
    counts: list[dict[str, Any]] = []
    quarantined: list[Sequence[Quarantined]] = []
    for dataset, records in zip(
        section.data, usable_sets(section.data, "sft", inputs), strict=True
    ):
        conversations, counted = prepare_conversations(
            records.examples, chat, length, dataset.train_on
        )
        left_out = counted.pop("left_out")
        check_content(
            f"sft data {dataset.path}",
            left_out,
            records.places,
            records.counts["records"],
            dataset.max_quarantined,
        )
        if not conversations:
            raise NothingToTrainError(
                f"sft data {dataset.path}: none of its {counted['examples']} examples "
                f"has an answer within {length} tokens ({why_left_out(counted)}); "
                "raise sft.sequence_length or look at the data"
            )
        measuring = {
            example["id"]
            for example in records.examples
            if is_held_out(
                {"prompt": asked(example)}, section.holdout, section.key_seed
            )
        }
        held_out.append(
            [
                conversation
                for conversation in conversations
                if conversation.example in measuring
            ]
        )
        sets.append(
            [
                conversation
                for conversation in conversations
                if conversation.example not in measuring
            ]
        )
        counts.append(
            {
                "path": dataset.path,
                **records.counts,
                **counted,
                "held_out": len(held_out[-1]),
            }
        )
        if not sets[-1]:
            raise NothingToTrainError(
                f"sft data {dataset.path}: all of its {len(conversations)} examples "
                f"are held out; lower sft.holdout ({section.holdout}) or remove the set"
            )
        check_records(f"sft_data: {dataset.path}", counts[-1])
        quarantined.append(records.quarantined)
    return sets, held_out, counts, quarantined


def asked(example: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Messages before the assistant's first turn."""
    return list(
        takewhile(lambda message: message["role"] != "assistant", example["messages"])
    )


def weighted(
    sets: Sequence[list[Conversation]],
    weights: Sequence[float | None],
    counts: Sequence[dict[str, Any]],
    seed: int,
) -> list[list[Conversation]]:
    """Examples of each set, repeated by its weight; adds drawn numbers to the sets'
    counts.
    """
    trained = [
        np.array(
            [int(conversation.trained.sum()) for conversation in conversations],
            dtype=np.int64,
        )
        for conversations in sets
    ]
    repeats = [np.ones(len(conversations), dtype=np.int64) for conversations in sets]
    if weights[0] is not None:
        quota_per_set = quotas(
            [int(tokens.sum()) for tokens in trained],
            [weight or 0.0 for weight in weights],
        )
        repeats = [
            copies(
                tokens,
                [conversation.example for conversation in conversations],
                quota,
                seed,
            )
            for tokens, conversations, quota in zip(
                trained, sets, quota_per_set, strict=True
            )
        ]
    drawn = [
        int((number * tokens).sum())
        for number, tokens in zip(repeats, trained, strict=True)
    ]
    for counted, number, tokens in zip(counts, repeats, drawn, strict=True):
        counted |= {
            "drawn": int(number.sum()),
            "drawn_tokens": tokens,
            "drawn_share": tokens / sum(drawn),
        }
    return [
        [
            conversation
            for conversation, times in zip(conversations, number.tolist(), strict=True)
            for _ in range(times)
        ]
        for conversations, number in zip(sets, repeats, strict=True)
    ]


def shortened(one: Conversation) -> Conversation:
    """First tokens of a conversation, as many as the report shows."""
    return Conversation(
        one.ids[:SAMPLE_TOKENS], one.trained[:SAMPLE_TOKENS], one.truncated, one.example
    )
