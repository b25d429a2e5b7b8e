"""Texts with a class, as rows of fine-tuning: the last token, the only trained one, is
the number of the class.
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
        examples: a message each, with its class as the answer.
        chat: has the tokenizer.
        length: most tokens of a row.
        classes: names, in the order of their numbers.
    """
    numbers = {name: number for number, name in enumerate(classes)}
    tokenizer = chat.tokenizer
    tokenizer.no_padding()
    tokenizer.enable_truncation(length - 1)

    def encode(example: Example) -> Sequence[Conversation]:
        texts = [message["content"] for message in example["messages"]]
        if len(texts) != 2:
            raise ChatError(
                "a text to classify is one message, and its class the answer; this "
                f"example has {len(texts)} messages"
            )
        encoding = tokenizer.encode(texts[0])
        ids = np.array([*encoding.ids, numbers[texts[1]]], dtype=np.int64)
        trained = np.arange(len(ids)) == len(ids) - 1
        is_cut = bool(encoding.overflowing)
        return [Conversation(ids, trained, is_cut, example["id"], answers=1, ended=1)]

    encoded = encode_examples(examples, encode)
    tokenizer.no_truncation()
    return encoded
