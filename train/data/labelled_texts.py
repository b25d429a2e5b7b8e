"""Texts with a class, or with an answer for an encoder-decoder, as rows of fine-tuning:
the text as transformers encodes it, and the trained tokens behind it, which are the
number of the class, or the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from gristmill.dataprep.examples.conversations import Example
from gristmill.dataprep.examples.kept_examples import UsableSet
from gristmill.train.data.conversation_tokens import (
    Chat,
    ChatError,
    Conversation,
    Encoded,
    NothingToTrainError,
    encode_examples,
)

CLASSES = "classes.json"
"""File of the class names, in the order of their numbers, beside the rows."""


def class_names(sets: Iterable[UsableSet]) -> list[str]:
    """Names of the classes of all sets, sorted.

    Raises:
        NothingToTrainError: there are less than two.
    """
    names = {
        example["messages"][-1]["content"]
        for records in sets
        for example in records.examples
    }
    if len(names) < 2:
        raise NothingToTrainError(
            f"sft.data: all texts are of the class {', '.join(names)}; a classifier "
            "needs examples of two classes or more"
        )
    return sorted(names)


def prepare_texts(
    examples: Sequence[Example], chat: Chat, length: int, classes: Sequence[str]
) -> Encoded[Conversation]:
    """Encode texts as transformers does, with the special tokens of the tokenizer.

    Args:
        examples: a message each, with its class, or another text, as the answer.
        chat: has the tokenizer.
        length: most tokens of a row; texts are cut, answers are not.
        classes: names, in the order of their numbers; empty for other answers, which
            end with the end of text.
    """
    numbers = {name: [number] for number, name in enumerate(classes)}
    tokenizer = chat.tokenizer
    tokenizer.no_padding()
    tokenizer.no_truncation()

    def encode(example: Example) -> Sequence[Conversation]:
        texts = [message["content"] for message in example["messages"]]
        if len(texts) != 2:
            raise ChatError(
                "an example of this task is one message and its answer; this one has "
                f"{len(texts)} messages"
            )
        answer = numbers.get(texts[1]) or [
            *tokenizer.encode(texts[1], add_special_tokens=False).ids,
            chat.end_of_text,
        ]
        room = length - len(answer)
        if room <= tokenizer.num_special_tokens_to_add(False):
            return []
        tokenizer.enable_truncation(room)
        encoding = tokenizer.encode(texts[0])
        tokenizer.no_truncation()
        ids = np.array([*encoding.ids, *answer], dtype=np.int64)
        trained = np.arange(len(ids)) >= len(encoding.ids)
        return [
            Conversation(
                ids,
                trained,
                bool(encoding.overflowing),
                example["id"],
                answers=1,
                ended=1,
            )
        ]

    return encode_examples(examples, encode)
