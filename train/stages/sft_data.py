"""Stage `sft_data`: conversations, and documents of pre-training to replay, made into a packed set with loss masks.

Output: a packed set (`tokenize/packed.py`) whose sources are the sets, and `replay` where it is asked for, with loss
masks (`tokenize/loss_masks.py`); `refused.jsonl`: the records that are not examples, and why; `counts.json`: shares
trained, cut and ended, for the gates in front of the training; with `holdout` also `held-out/`, a packed set of what is
not trained on. Needs no accelerator, so
that data is looked at, and mixed again, before one is paid for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from gristmill.dataprep.context import Context
from gristmill.dataprep.examples.kept_examples import (
    QUARANTINED,
    check_records,
    set_names,
    usable_sets,
    write_quarantined,
)
from gristmill.dataprep.examples.read_examples import Quarantined
from gristmill.dataprep.files import write_json
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
"""Folder of a packed set like the one around it, of the conversations that only measure."""
REPLAY = "replay"
SAMPLES_PER_SET = 3
SAMPLE_TOKENS = 512
"""Of an example that the report shows."""


class GateError(ValueError):
    """The examples would not teach what they are to teach."""


class ReplayError(ValueError):
    """Pre-training cannot be replayed as the manifest asks."""


def run(inputs: Mapping[str, Path], config: dict[str, Any], out: Path, context: Context) -> dict[str, Any]:
    """Read, encode, weigh and pack all examples.

    Raises:
        gristmill.dataprep.examples.read_examples.ExamplesError: more records of a set are quarantined than may be.
        NothingToTrainError: one of the sets trains no token.
        GateError: the examples do not pass `sft.gates`.
        ReplayError: rows of the mixture are of another length.
    """
    section = SftData.model_validate({key: value for key, value in config.items() if key != READS})
    seed, chat, tokenizer = section.key_seed, Chat(inputs["tokenizer"]), load(inputs["tokenizer"]).described()
    length, mix = example_length(section.sequence_length, inputs), PackedSet(inputs["mix"]) if section.replay else None
    if mix is not None and length != mix.sequence_length:
        raise ReplayError(
            f"sft.replay: the mixture's rows have {mix.sequence_length} tokens, but sft.sequence_length "
            f"is {length}; make them equal, or replay nothing"
        )
    names = set_names([one.path for one in section.data], [REPLAY])
    found, held_out, sets, quarantined = read_sets(section, chat, length, inputs)
    write_quarantined(out / QUARANTINED, zip(names, quarantined, strict=True))
    for name, counts in zip(names, sets, strict=True):
        if warning := left_out_warning(name, counts, length):
            context.warn(warning)
    drawn = weighted(found, [one.weight for one in section.data], sets, seed)
    rows = {
        name: packed_rows([piece_of(one) for one in of_set], length, section.packing == "best_fit")
        for name, of_set in zip(names, drawn, strict=True)
    }
    used = [one for of_set in drawn for one in of_set]
    if problems := gate_problems(counts_of(used), section.gates, length):
        raise GateError("sft: " + "; ".join(problems))
    replayed = replay_count(sum(len(one.ids) for one in used), length, section.replay)
    if replayed and mix is not None:
        rows[REPLAY] = replayed_rows(rows_read(mix, config[READS], inputs.get("pretrain")), replayed)
    written = write_example_rows(out, rows, length, tokenizer, chat.pad)
    if any(held_out):
        write_example_rows(
            out / HELD_OUT,
            {
                name: packed_rows([piece_of(one) for one in of_set], length, section.packing == "best_fit")
                for name, of_set in zip(names, held_out, strict=True)
                if of_set
            },
            length,
            tokenizer,
            chat.pad,
        )
    write_json(out / COUNTS, counts_of(used))
    replayed_tokens = sum(len(piece.ids) for row in rows.get(REPLAY, []) for piece in row)
    return {
        "sequence_length": length,
        "packing": section.packing,
        **written,
        "sets": [{"name": name, **counts} for name, counts in zip(names, sets, strict=True)],
        **counts_of(used),
        "replay": {"rows": replayed, "tokens": replayed_tokens, "share": replayed_tokens / written["tokens"]},
        "samples": [
            {"set": name, "example": one.example, "spans": decoded_mask(chat, shortened(one))}
            for name, of_set in zip(names, found, strict=True)
            for one in of_set[:SAMPLES_PER_SET]
        ],
    }


def gate_problems(counts: Mapping[str, Any], gates: Gates, length: int) -> list[str]:
    """A sentence for each gate that the examples do not pass.

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
            f"only {counts['trained_share']:.2%} of the tokens are trained (sft.gates.min_trained: "
            f"{gates.min_trained}): see that the template's marks enclose the answers, or lower the gate"
        )
    if counts["truncated_share"] > gates.max_truncated:
        problems.append(
            f"{counts['truncated_share']:.2%} of the examples are cut (sft.gates.max_truncated: {gates.max_truncated}): "
            "raise sft.sequence_length, or the gate"
        )
    return problems


def _unended(counts: Mapping[str, Any], gates: Gates, length: int) -> str:
    """What keeps the ends of turns from being trained: the length, the template, or both."""
    answers, cut = counts["answers"], counts["cut_answers"]
    unmarked = answers - cut - round(counts["end_of_turn_share"] * answers)
    causes = []
    if cut:
        causes.append(
            f"{cut:,} are cut at {length:,} tokens before their end of turn: raise sft.sequence_length or leave long "
            "examples out"
        )
    if unmarked:
        causes.append(
            f"{unmarked:,} are whole, but the chat template does not mark their end of turn as generated: put it "
            "before {% endgeneration %}"
        )
    return (
        f"only {counts['end_of_turn_share']:.2%} of {answers:,} answers have a trained end of turn, without which a "
        f"model does not learn to stop (sft.gates.min_end_of_turn_trained: {gates.min_end_of_turn_trained}); "
        + "; ".join(causes)
    )


def read_sets(
    section: SftData, chat: Chat, length: int, inputs: Mapping[str, Path]
) -> tuple[list[list[Conversation]], list[list[Conversation]], list[dict[str, Any]], list[Sequence[Quarantined]]]:
    """Read and encode all sets of examples, or what their preparation left of them.

    Returns:
        set by set: the examples to train on, those that only measure, counts, and the records that are not examples.

    Raises:
        gristmill.dataprep.examples.read_examples.ExamplesError: more records of a set are quarantined than may be.
        NothingToTrainError: one of the sets trains no token, or all of it is held out.
    """
    sets: list[list[Conversation]] = []
    held_out: list[list[Conversation]] = []
    counts: list[dict[str, Any]] = []
    quarantined: list[Sequence[Quarantined]] = []
    for one, read in zip(section.data, usable_sets(section.data, "sft", inputs), strict=True):
        found, counted = prepare_conversations(read.examples, chat, length, one.train_on)
        left_out = counted.pop("left_out")
        check_content(f"sft data {one.path}", left_out, read.places, read.counts["records"], one.max_quarantined)
        if not found:
            raise NothingToTrainError(
                f"sft data {one.path}: none of its {counted['examples']} examples has an answer within "
                f"{length} tokens ({why_left_out(counted)}); raise sft.sequence_length or look at the data"
            )
        measuring = {
            example["id"]
            for example in read.examples
            if is_held_out({"prompt": asked(example)}, section.holdout, section.key_seed)
        }
        held_out.append([conversation for conversation in found if conversation.example in measuring])
        sets.append([conversation for conversation in found if conversation.example not in measuring])
        counts.append({"path": one.path, **read.counts, **counted, "held_out": len(held_out[-1])})
        if not sets[-1]:
            raise NothingToTrainError(
                f"sft data {one.path}: all of its {len(found)} examples are held out; lower "
                f"sft.holdout ({section.holdout}) or remove the set"
            )
        check_records(f"sft_data: {one.path}", counts[-1])
        quarantined.append(read.quarantined)
    return sets, held_out, counts, quarantined


def asked(example: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What is said before the assistant's first turn."""
    return list(takewhile(lambda message: message["role"] != "assistant", example["messages"]))


def weighted(
    sets: Sequence[list[Conversation]], weights: Sequence[float | None], counts: Sequence[dict[str, Any]], seed: int
) -> list[list[Conversation]]:
    """The examples of each set as often as its weight asks for; adds what came of it to the sets' counts."""
    trained = [np.array([int(one.trained.sum()) for one in found], dtype=np.int64) for found in sets]
    taken = [np.ones(len(found), dtype=np.int64) for found in sets]
    if weights[0] is not None:
        wanted = quotas([int(tokens.sum()) for tokens in trained], [weight or 0.0 for weight in weights])
        taken = [
            copies(tokens, [one.example for one in found], quota, seed)
            for tokens, found, quota in zip(trained, sets, wanted, strict=True)
        ]
    drawn = [int((number * tokens).sum()) for number, tokens in zip(taken, trained, strict=True)]
    for counted, number, tokens in zip(counts, taken, drawn, strict=True):
        counted |= {"drawn": int(number.sum()), "drawn_tokens": tokens, "drawn_share": tokens / sum(drawn)}
    return [
        [one for one, times in zip(found, number.tolist(), strict=True) for _ in range(times)]
        for found, number in zip(sets, taken, strict=True)
    ]


def shortened(one: Conversation) -> Conversation:
    """Its beginning, as long as the report shows."""
    return Conversation(one.ids[:SAMPLE_TOKENS], one.trained[:SAMPLE_TOKENS], one.truncated, one.example)
