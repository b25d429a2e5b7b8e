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
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path

import numpy as np

from gristmill.core.files import write_json
from gristmill.core.stage_context import Context
from gristmill.dataprep.examples.conversations import Example, Message
from gristmill.dataprep.examples.kept_examples import (
    QUARANTINED,
    UsableSet,
    check_records,
    set_names,
    usable_sets,
    write_quarantined,
)
from gristmill.mixtures.schema.posttraining import Gates, SftData
from gristmill.mixtures.schema.pretrain import Pretrain
from gristmill.tokenize.encoding.tokenizer import load
from gristmill.tokenize.packed import PackedSet
from gristmill.train.data.conversation_tokens import (
    Chat,
    Conversation,
    Encoded,
    NothingToTrainError,
    TokenCounts,
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
from gristmill.train.stages.stage_inputs import Inputs, example_length

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


@dataclass(frozen=True)
class ConversationSet:
    """An encoded set of conversations.

    Attributes:
        path: of the set.
        records: the examples and quarantined records that were read.
        encoded: all encoded conversations, and numbers of the others.
        training, held_out: the encoded ones, by use.
    """

    path: str
    records: UsableSet
    encoded: Encoded[Conversation]
    training: list[Conversation]
    held_out: list[Conversation]


@dataclass(frozen=True)
class DrawnSet:
    """Repeated examples of a set.

    Attributes:
        examples: with repetitions.
        tokens: number of their trained tokens.
    """

    examples: list[Conversation]
    tokens: int


def run(
    inputs: Inputs,
    config: Mapping[str, object],
    out: Path,
    context: Context,
) -> Mapping[str, object]:
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
    seed = section.key_seed
    chat = Chat(inputs["tokenizer"])
    tokenizer = load(inputs["tokenizer"]).described()
    length = example_length(section.sequence_length, inputs)
    mix = PackedSet(inputs["mix"]) if section.replay else None
    if mix is not None and length != mix.sequence_length:
        raise ReplayError(
            f"sft.replay: the mixture's rows have {mix.sequence_length} tokens, but "
            f"sft.sequence_length is {length}; make them equal, or replay nothing"
        )
    names = set_names([dataset.path for dataset in section.data], [REPLAY])
    sets = read_sets(section, chat, length, inputs)
    named_sets = dict(zip(names, sets, strict=True))
    write_quarantined(
        out / QUARANTINED,
        (
            (name, conversation_set.records.quarantined)
            for name, conversation_set in named_sets.items()
        ),
    )
    for name, conversation_set in named_sets.items():
        counts = conversation_set.encoded.counts
        if warning := left_out_warning(name, counts, length):
            context.warn(warning)
    drawn = weighted(
        [conversation_set.training for conversation_set in sets],
        [dataset.weight for dataset in section.data],
        seed,
    )
    is_packed = section.packing == "best_fit"
    rows = {
        name: packed_rows(
            [piece_of(conversation) for conversation in drawn_set.examples],
            length,
            is_packed,
        )
        for name, drawn_set in zip(names, drawn, strict=True)
    }
    used = [conversation for drawn_set in drawn for conversation in drawn_set.examples]
    token_counts = counts_of(used)
    if problems := gate_problems(token_counts, section.gates, length):
        raise GateError("sft: " + "; ".join(problems))
    replayed = replay_count(token_counts.example_tokens, length, section.replay)
    if replayed and mix is not None:
        pretraining = Pretrain.model_validate(config[READS])
        rows[REPLAY] = replayed_rows(
            rows_read(mix, pretraining, inputs.get("pretrain")), replayed
        )
    written = write_example_rows(out, rows, length, tokenizer, chat.pad)
    held_out = {
        name: packed_rows(
            [piece_of(conversation) for conversation in conversation_set.held_out],
            length,
            is_packed,
        )
        for name, conversation_set in named_sets.items()
        if conversation_set.held_out
    }
    if held_out:
        write_example_rows(out / HELD_OUT, held_out, length, tokenizer, chat.pad)
    write_json(out / COUNTS, asdict(token_counts))
    replayed_tokens = sum(
        len(piece.ids) for row in rows.get(REPLAY, []) for piece in row
    )
    drawn_tokens = sum(drawn_set.tokens for drawn_set in drawn)
    return {
        "sequence_length": length,
        "packing": section.packing,
        **asdict(written),
        "sets": [
            {
                "name": name,
                "path": conversation_set.path,
                **asdict(conversation_set.records.counts),
                **asdict(conversation_set.encoded.counts),
                **asdict(counts_of(conversation_set.encoded.used)),
                "held_out": len(conversation_set.held_out),
                "drawn": len(drawn_set.examples),
                "drawn_tokens": drawn_set.tokens,
                "drawn_share": drawn_set.tokens / drawn_tokens,
            }
            for (name, conversation_set), drawn_set in zip(
                named_sets.items(), drawn, strict=True
            )
        ],
        **asdict(token_counts),
        "replay": {
            "rows": replayed,
            "tokens": replayed_tokens,
            "share": replayed_tokens / written.tokens,
        },
        "samples": [
            {
                "set": name,
                "example": conversation.example,
                "spans": decoded_mask(chat, shortened(conversation)),
            }
            for name, conversation_set in named_sets.items()
            for conversation in conversation_set.training[:SAMPLES_PER_SET]
        ],
    }


def gate_problems(counts: TokenCounts, gates: Gates, length: int) -> list[str]:
    """Sentences, one for each gate that the examples do not pass.

    Args:
        counts: of all examples.
        gates: the manifest's thresholds.
        length: most tokens of an example.
    """
    problems = []
    if counts.end_of_turn_share < gates.min_end_of_turn_trained:
        answers = counts.answers
        cut = counts.cut_answers
        unmarked = answers - cut - round(counts.end_of_turn_share * answers)
        causes = []
        if cut:
            causes.append(
                f"{cut:,} are cut at {length:,} tokens before their end of turn: raise "
                "sft.sequence_length or leave long examples out"
            )
        if unmarked:
            causes.append(
                f"{unmarked:,} are whole, but the chat template does not mark their end "
                "of turn as generated: put it before {% endgeneration %}"
            )
        problems.append(
            f"only {counts.end_of_turn_share:.2%} of {answers:,} answers have a trained "
            "end of turn, without which a model does not learn to stop "
            f"(sft.gates.min_end_of_turn_trained: {gates.min_end_of_turn_trained}); "
            + "; ".join(causes)
        )
    if counts.trained_share < gates.min_trained:
        problems.append(
            f"only {counts.trained_share:.2%} of the tokens are trained "
            f"(sft.gates.min_trained: {gates.min_trained}): see that the template's "
            "marks enclose the answers, or lower the gate"
        )
    if counts.truncated_share > gates.max_truncated:
        problems.append(
            f"{counts.truncated_share:.2%} of the examples are cut "
            f"(sft.gates.max_truncated: {gates.max_truncated}): "
            "raise sft.sequence_length, or the gate"
        )
    return problems


def read_sets(
    section: SftData, chat: Chat, length: int, inputs: Inputs
) -> list[ConversationSet]:
    """Read and encode all sets of examples, or their prepared versions.

    Raises:
        gristmill.dataprep.examples.read_examples.ExamplesError: more records of a set
            are quarantined than may be.
        NothingToTrainError: one of the sets trains no token, or all of it is held out.
    """
    sets = []
    for dataset, records in zip(
        section.data, usable_sets(section.data, "sft", inputs), strict=True
    ):
        where = f"sft data {dataset.path}"
        encoded = prepare_conversations(
            records.examples, chat, length, dataset.train_on
        )
        check_content(
            where,
            encoded.left_out,
            records.places,
            records.counts.records,
            dataset.max_quarantined,
        )
        counts = encoded.counts
        if not encoded.used:
            raise NothingToTrainError(
                f"{where}: none of its {counts.examples} examples has an answer within "
                f"{length} tokens ({why_left_out(counts)}); raise sft.sequence_length "
                "or look at the data"
            )
        measuring = {
            example["id"]
            for example in records.examples
            if is_held_out(asked(example), section.holdout, section.key_seed)
        }
        training = [item for item in encoded.used if item.example not in measuring]
        if not training:
            raise NothingToTrainError(
                f"{where}: all of its {len(encoded.used)} examples are held out; lower "
                f"sft.holdout ({section.holdout}) or remove the set"
            )
        check_records(
            where,
            records.counts,
            counts.unrenderable,
            counts.dropped,
            len(encoded.used),
        )
        held_out = [item for item in encoded.used if item.example in measuring]
        sets.append(ConversationSet(dataset.path, records, encoded, training, held_out))
    return sets


def asked(example: Example) -> list[Message]:
    """Messages before the assistant's first turn."""
    return list(
        takewhile(lambda message: message["role"] != "assistant", example["messages"])
    )


def weighted(
    sets: Sequence[list[Conversation]], weights: Sequence[float | None], seed: int
) -> list[DrawnSet]:
    """Examples of each set, repeated by its weight."""
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
    return [
        DrawnSet(
            [
                conversation
                for conversation, times in zip(conversations, number, strict=True)
                for _ in range(times)
            ],
            int((number * tokens).sum()),
        )
        for conversations, number, tokens in zip(sets, repeats, trained, strict=True)
    ]


def shortened(one: Conversation) -> Conversation:
    """First tokens of a conversation, as many as the report shows."""
    return Conversation(
        one.ids[:SAMPLE_TOKENS], one.trained[:SAMPLE_TOKENS], one.truncated, one.example
    )
