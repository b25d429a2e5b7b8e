"""Language model with its tokenizer, for completing texts and answering
conversations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from gristmill.dataprep.examples.conversations import Message
from gristmill.tokenize.chat_template import Clock, fixed_clock
from gristmill.train.data.conversation_tokens import (
    TEMPLATE_FILE,
    Chat,
    ChatError,
)
from gristmill.train.distributed.process_groups import World
from gristmill.train.eval.likelihood import Request, Score, score_requests
from gristmill.train.loop.spike_report import Decode
from gristmill.train.models.transformer import Llama
from gristmill.train.models.weights import load_model

Encode = Callable[[str], list[int]]
"""Function from a text to ids."""
UNFINISHED = "\ufffd"
"""Output of a decoder for an incomplete character."""


class VocabularyError(ValueError):
    """A tokenizer with ids that the model lacks."""


@dataclass(frozen=True)
class LanguageModel:
    """A model with its tokenizer.

    Attributes:
        model: complete in this process, or sharded over `world`.
        encode: text -> ids without special tokens.
        prompt: text to continue -> ids, with those that stood before a text in training
            unless it begins with them.
        decode: ids -> text without special tokens.
        start: id before a text without context: the tokenizer's start of text, or its
            end without one.
        end: id that ends a text, and replaces an empty one.
        chat: format of conversations; None without a template.
        world: processes of a sharded model, which can score but not generate.
    """

    model: Llama
    encode: Encode
    prompt: Encode
    decode: Decode
    start: int
    end: int
    chat: Chat | None
    world: World | None = None

    @property
    def length(self) -> int:
        """Most ids of a row."""
        return self.model.shape.sequence_length

    @property
    def stops(self) -> frozenset[int]:
        """Ids that end an answer."""
        return (
            frozenset({self.end}) if self.chat is None else self.chat.stops | {self.end}
        )

    def score(self, requests: Sequence[Request]) -> list[Score]:
        """Log-likelihoods of requests; a collective call if the model is sharded."""
        return score_requests(self.model, requests, self.world)

    def text_prompt(self, text: str) -> tuple[int, ...]:
        """Ids of a text to continue."""
        return tuple(self.prompt(text) or [self.end])

    def chat_prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Ids of a conversation, up to the model's answer.

        Raises:
            ChatError: the tokenizer has no chat template, or it rejects the messages.
        """
        return tuple(self.template.encode(messages, prompt=True).ids.tolist())

    @property
    def template(self) -> Chat:
        """Format of conversations.

        Raises:
            ChatError: the tokenizer has no chat template.
        """
        if self.chat is None:
            raise ChatError(
                f"this model's tokenizer has no {TEMPLATE_FILE}, so it cannot answer "
                "conversations; give it texts to continue"
            )
        return self.chat


def with_tokenizer(
    model: Llama,
    folder: Path,
    world: World | None = None,
    clock: Clock = fixed_clock,
) -> LanguageModel:
    """Combine a model with a tokenizer.

    Args:
        model: complete in this process, or sharded over `world`.
        folder: of the tokenizer: output of the stage tokenizer, or an export.
        world: processes of a sharded model.
        clock: source of the date for chat templates that write it.
    """
    from gristmill.tokenize.encoding.tokenizer import (
        configured_tokens,
        read_end_and_pad,
        read_prompt_tokenizer,
        special_ids,
    )

    tokenizer = read_prompt_tokenizer(folder, model.shape.follows_end)
    begin = tokenizer.decode(tokenizer.encode("").ids, skip_special_tokens=False)
    end = tokenizer.get_vocab()[read_end_and_pad(folder, tokenizer)[0]]
    bos = configured_tokens(folder).get("bos_token", "")
    start = special_ids(tokenizer).get(bos, end)

    def encode(string: str) -> list[int]:
        return tokenizer.encode(string, add_special_tokens=False).ids

    def prompt(string: str) -> list[int]:
        is_begun = string.startswith(begin)
        return tokenizer.encode(string, add_special_tokens=not is_begun).ids

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=True)

    chat = Chat(folder, clock) if (folder / TEMPLATE_FILE).exists() else None
    return LanguageModel(model, encode, prompt, decode, start, end, chat, world)


def open_language_model(folder: Path, tokenizer: Path) -> LanguageModel:
    """Load a model, on the GPU if there is one.

    Args:
        folder: with config.json and model.safetensors.
        tokenizer: a folder with tokenizer.json.

    Raises:
        FileNotFoundError: a file is missing.
        VocabularyError: model and tokenizer do not belong together.
        ValueError: the model is not supported.
    """
    import torch

    model = load_model(folder, "cuda" if torch.cuda.is_available() else "cpu")
    language = with_tokenizer(model, tokenizer, clock=datetime.now)
    highest = max(language.start, *language.stops)
    if highest >= model.shape.vocab_size:
        raise VocabularyError(
            f"{tokenizer} has the id {highest}, the model in {folder} only "
            f"{model.shape.vocab_size} ids: they do not belong together"
        )
    return language


class TextStream:
    """Text of an answer in pieces, which concatenate to the answer.

    Args:
        decode: ids -> text.
        stops: texts that end the answer; excluded from the answer.

    Attributes:
        is_stopped: True after a stop.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = tuple(stop for stop in stops if stop)
        self._ids: list[int] = []
        self._shown = 0
        """Number of ids decoded so far; those before `_before` no longer affect the
        text.
        """
        self._before = 0
        self._held = ""
        self.is_stopped = False

    def push(self, ids: Sequence[int]) -> str:
        """Text that is certain after some more ids; "" while a character is
        incomplete.
        """
        self._ids += ids
        return self._release(last=False)

    def finish(self) -> str:
        """Remaining text at the end, with incomplete characters."""
        return self._release(last=True)

    def _release(self, last: bool) -> str:
        if self.is_stopped:
            return ""
        # Decoders may treat the first id differently, so new ids are decoded after some
        # that are decoded already.
        before = self._decode(self._ids[self._before : self._shown])
        decoded = self._decode(self._ids[self._before :])
        text = self._held
        if last or not decoded.endswith(UNFINISHED):
            self._before = self._shown
            self._shown = len(self._ids)
            text += decoded[len(before) :]
        ends = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if ends:
            self.is_stopped = True
            self._held = ""
            return text[: min(ends)]
        # The longest suffix that may start a stop is held back.
        pending = 0
        for stop in () if last else self._stops:
            sizes = range(min(len(stop) - 1, len(text)), pending, -1)
            overlaps = (size for size in sizes if text.endswith(stop[:size]))
            pending = next(overlaps, pending)
        certain = len(text) - pending
        self._held = text[certain:]
        return text[:certain]
