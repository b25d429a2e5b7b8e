"""Stage `sft_data`: packs conversations, and pre-training documents to replay, with
loss masks.

Output: a packed set (`tokenize/packed.py`) whose sources are the sets, and `replay` if
configured, with loss masks (`tokenize/loss_masks.py`); `refused.jsonl`: rejected
records with reasons; with `holdout` also `held-out/`, a packed set of the held-out
conversations; `classes.json`, if the examples are texts with a class. Needs no
accelerator, so data can be inspected and mixed again before a training is paid for.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    set_names,
    usable_sets,
    write_quarantined,
)
from gristmill.mixtures.base import Recipe
from gristmill.mixtures.schema.posttraining import Gates, SftData
from gristmill.mixtures.schema.pretrain import Pretrain
from gristmill.tokenize.encoding.tokenizer import load
from gristmill.tokenize.packed import PackedSet
from gristmill.train.data.conversation_tokens import (
    Chat,
    Conversation,
    Encoded,
    NothingToTrainError,
    SetErrors,
    TokenCounts,
    check_encoded,
    counts_of,
    left_out_warning,
    prepare_conversations,
)
from gristmill.train.data.example_rows import (
    Row,
    copies,
    packed_rows,
    quotas,
    replay_count,
    replayed_rows,
    write_example_rows,
)
from gristmill.train.data.labelled_texts import CLASSES, class_names, prepare_texts
from gristmill.train.data.pairs import is_held_out
from gristmill.train.loop.objective import JsonObject
from gristmill.train.loop.rows_read import READS, rows_read
from gristmill.train.stages.stage_inputs import Inputs, example_length

HELD_OUT = "held-out"
"""Folder of a packed set of held-out conversations."""
REPLAY = "replay"


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


def run(
    inputs: Inputs,
    config: Recipe,
    out: Path,
    context: Context,
) -> JsonObject:
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
    records = list(usable_sets(section.data, "sft", inputs))
    is_chat = section.task == "chat"
    packing = section.packing if is_chat else "none"
    classes = class_names(records) if section.task == "classify" else []
    sets = encoded_sets(section, chat, length, records, classes)
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
        num_used = counts.examples - counts.unrenderable - counts.dropped
        if (num_rows := len(conversation_set.encoded.used)) > num_used:
            context.warn(
                f"{name}: the chat template changes an answer when others follow, so "
                f"{num_used:,} examples are trained as {num_rows:,}, each as the model "
                "reads it when it answers"
            )
    drawn = weighted(
        [conversation_set.training for conversation_set in sets],
        [dataset.weight for dataset in section.data],
        seed,
    )

    def packed(conversations: Sequence[Conversation]) -> list[Row]:
        return packed_rows(conversations, length, packing == "best_fit")

    rows = {
        name: packed(conversations)
        for name, conversations in zip(names, drawn, strict=True)
    }
    used = [conversation for conversations in drawn for conversation in conversations]
    token_counts = counts_of(used)
    unended = next((item.example for item in used if item.ended < item.answers), "")
    for conversation_set in sets:
        unended = conversation_set.records.places.get(unended, unended)
    # Of a labelled text one token is trained.
    gates = section.gates.model_copy(update={} if is_chat else {"min_trained": 0.0})
    if problems := gate_problems(token_counts, gates, length, unended):
        raise GateError("sft: " + "; ".join(problems))
    replayed = replay_count(token_counts.example_tokens, length, section.replay)
    if replayed and mix is not None:
        rows[REPLAY] = replayed_rows(
            rows_read(
                mix, Pretrain.model_validate(config[READS]), inputs.get("pretrain")
            ),
            replayed,
        )
    if classes:
        write_json(out / CLASSES, classes)
    written = write_example_rows(out, rows, length, tokenizer, chat.pad)
    held_out = {
        name: packed(conversation_set.held_out)
        for name, conversation_set in named_sets.items()
        if conversation_set.held_out
    }
    if held_out:
        write_example_rows(out / HELD_OUT, held_out, length, tokenizer, chat.pad)
    replayed_tokens = sum(
        len(piece.ids) for row in rows.get(REPLAY, []) for piece in row
    )
    drawn_tokens = [counts_of(conversations).trained_tokens for conversations in drawn]
    return {
        "sequence_length": length,
        "packing": packing,
        **asdict(written),
        "sets": [
            {
                "name": name,
                "path": conversation_set.path,
                **asdict(conversation_set.records.counts),
                **asdict(conversation_set.encoded.counts),
                **asdict(counts_of(conversation_set.encoded.used)),
                "held_out": len(conversation_set.held_out),
                "drawn": len(conversations),
                "drawn_tokens": tokens,
                "drawn_share": tokens / token_counts.trained_tokens,
            }
            for (name, conversation_set), conversations, tokens in zip(
                named_sets.items(), drawn, drawn_tokens, strict=True
            )
        ],
        **asdict(token_counts),
        "replay": {
            "rows": replayed,
            "tokens": replayed_tokens,
            "share": replayed_tokens / written.tokens,
        },
    }


def gate_problems(
    counts: TokenCounts, gates: Gates, length: int, unended: str
) -> list[str]:
    """Sentences, one for each gate that the examples do not pass.

    Args:
        counts: of all examples.
        gates: the manifest's thresholds.
        length: most tokens of an example.
        unended: place of an example whose end of turn is not trained, if any.
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
                f"{unmarked:,} are whole, but the chat template does not write their end "
                "of turn, or not as generated: let it write a special token after each "
                "answer, before {% endgeneration %} if it has such marks"
            )
        problems.append(
            f"only {counts.end_of_turn_share:.2%} of {answers:,} answers have a trained "
            f"end of turn, not {unended}, and without it a model does not learn to stop "
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


def encoded_sets(
    section: SftData,
    chat: Chat,
    length: int,
    all_records: Sequence[UsableSet],
    classes: Sequence[str],
) -> list[ConversationSet]:
    """Encode all sets of examples.

    Args:
        section: of the stage.
        chat: tokenizer and template.
        length: most tokens of an example.
        all_records: of each set.
        classes: names of the classes, if the examples are texts with a class.

    Raises:
        NothingToTrainError: some sets train no token, or are held out completely.
        gristmill.train.data.conversation_tokens.TemplateMismatchError: the template
            does not fit some sets.

    The error is that of the first such set, with the messages of all.
    """
    sets = []
    errors = SetErrors()
    for dataset, records in zip(section.data, all_records, strict=True):
        with errors.noted():
            where = f"sft data {dataset.path}"
            encoded = (
                prepare_conversations(records.examples, chat, length, dataset.train_on)
                if section.task == "chat"
                else prepare_texts(records.examples, chat, length, classes)
            )
            check_encoded(
                where,
                encoded,
                records,
                dataset.max_quarantined,
                f"examples has an answer within {length} tokens",
                "raise sft.sequence_length",
            )
            measuring = {
                example["id"]
                for example in records.examples
                if is_held_out(asked(example), section.holdout, section.key_seed)
            }
            training = [item for item in encoded.used if item.example not in measuring]
            if not training:
                raise NothingToTrainError(
                    f"{where}: all of its {len(measuring)} examples are held out; "
                    f"lower sft.holdout ({section.holdout}) or remove the set"
                )
            held_out = [item for item in encoded.used if item.example in measuring]
            sets.append(
                ConversationSet(dataset.path, records, encoded, training, held_out)
            )
    errors.raise_all()
    return sets


def asked(example: Example) -> list[Message]:
    """Messages before the assistant's first turn."""
    return list(
        takewhile(lambda message: message["role"] != "assistant", example["messages"])
    )


def weighted(
    sets: Sequence[list[Conversation]], weights: Sequence[float | None], seed: int
) -> Sequence[list[Conversation]]:
    """Examples of each set, repeated by its weight."""
    if weights[0] is None:
        return sets
    trained = [
        np.array(
            [int(conversation.trained.sum()) for conversation in conversations],
            dtype=np.int64,
        )
        for conversations in sets
    ]
    quota_per_set = quotas(
        [int(tokens.sum()) for tokens in trained],
        [weight or 0.0 for weight in weights],
    )
    repeated = []
    for conversations, tokens, quota in zip(sets, trained, quota_per_set, strict=True):
        ids = [conversation.example for conversation in conversations]
        repeats = copies(tokens, ids, quota, seed)
        repeated.append(
            [
                conversation
                for conversation, times in zip(conversations, repeats, strict=True)
                for _ in range(times)
            ]
        )
    return repeated
