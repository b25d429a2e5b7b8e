"""A model with its tokenizer, ready to continue texts and to answer conversations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gristmill.train.evaluation.readers import open_reader
from gristmill.train.models.llama import Llama
from gristmill.train.models.weights import load_model
from gristmill.train.objectives.chat import TEMPLATE_FILE, Chat, ChatError, Message


class VocabularyError(ValueError):
    """A tokenizer has ids that the model has not."""


@dataclass(frozen=True)
class LanguageModel:
    """What can be asked.

    Attributes:
        model: whole in this process.
        encode: text -> ids without special tokens.
        decode: ids -> text without special tokens.
        end: id that ends a text, and stands for an empty one.
        chat: how conversations are written; None where the tokenizer has no template.
    """

    model: Llama
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    end: int
    chat: Chat | None

    @property
    def stops(self) -> frozenset[int]:
        """Ids that end what the model says."""
        return frozenset({self.end}) if self.chat is None else self.chat.stops | {self.end}

    def text_prompt(self, text: str) -> tuple[int, ...]:
        """The ids of a text to go on from."""
        return tuple(self.encode(text) or [self.end])

    def chat_prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The ids of a conversation, up to where the model answers.

        Raises:
            ChatError: the tokenizer has no chat template, or it refuses the messages.
        """
        if self.chat is None:
            raise ChatError(f"this model's tokenizer has no {TEMPLATE_FILE}, so it cannot answer conversations; "
                            "give it texts to continue")
        return tuple(self.chat.encode(messages, prompt=True).ids.tolist())


def open_language_model(folder: Path, tokenizer: Path) -> LanguageModel:
    """Load a model, on the GPU where there is one.

    Args:
        folder: with config.json and model.safetensors.
        tokenizer: a folder with tokenizer.json.

    Raises:
        FileNotFoundError: a file is missing.
        VocabularyError: model and tokenizer do not belong together.
        ValueError: the model is none that can be run here.
    """
    import torch

    model = load_model(folder, "cuda" if torch.cuda.is_available() else "cpu")
    reader = open_reader(model, tokenizer)
    chat = Chat(tokenizer) if (tokenizer / TEMPLATE_FILE).exists() else None
    highest = max([reader.prefix, *(chat.stops if chat else ())])
    if highest >= model.shape.vocab_size:
        raise VocabularyError(f"{tokenizer} has the id {highest}, the model in {folder} only {model.shape.vocab_size} "
                              "ids: they do not belong together")
    return LanguageModel(model, reader.encode, reader.decode, reader.prefix, chat)
