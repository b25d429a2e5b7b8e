"""Conversations as tokens: rendering by the chat template, encoding, loss masks and
truncation.

The template is Jinja, as in transformers; `{% generation %}` marks enclose the
assistant's turns. Each segment between two marks is encoded separately, so that
tokens never cross a mark, and a prompt has the same ids in training and in generation.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

import numpy as np

from gristmill.core.files import (
    sha256_file,
    write_json,
    write_text,
)
from gristmill.dataprep.examples.conversations import Example, Message, Tool
from gristmill.dataprep.examples.kept_examples import UsableSet, check_records
from gristmill.tokenize.chat_template import (
    CLOSE,
    OPEN,
    PROBE_TOOL,
    TEMPLATE_ERRORS,
    Clock,
    PromptMismatchError,
    Segment,
    call_probe,
    compile_template,
    fixed_clock,
    probe_rows,
    render_rows,
    render_text,
)
from gristmill.tokenize.encoding.tokenizer import configured_tokens, special_ids
from gristmill.train.data.rendered_content import part_left_out

if TYPE_CHECKING:
    from torch import Tensor


TEMPLATE_FILE, TOKENIZER_FILE, TOKENIZER_CONFIG_FILE = (
    "chat_template.jinja",
    "tokenizer.json",
    "tokenizer_config.json",
)
LEFT_OUT_SHARE = 0.1
"""Share of a set's examples; if more are not trained on, a warning says so."""
EXAMPLE_IDS = "examples.txt"
"""File of a training stage's output: the id of the example of each row."""
ROWS_PER_SET = "rows-per-set.json"
"""File beside it: number of rows per set."""
PAD_MULTIPLE = 64
"""Micro-batches are padded to a multiple of this."""
SHOWN_REASONS, SHOWN_EXAMPLES = 10, 4
UNMARKED = "the chat template marks no answer that is to be trained"
ALL_UNTRAINED = "every answer has a weight of 0"
TrainOn = Literal["assistant", "last", "all"]


class ChatError(ValueError):
    """A conversation or a template that cannot be turned into tokens."""


class TemplateMismatchError(ChatError):
    """A conversation that the template does not write completely, or not as the model
    would be asked.
    """


T = TypeVar("T")


@dataclass(frozen=True)
class Tokens:
    """A rendered conversation.

    Attributes:
        ids: (t,) int64.
        turns: (t,) int64: number of the assistant's turn, from 1; 0 for all other
            tokens.
    """

    ids: np.ndarray
    turns: np.ndarray


class Chat:
    """A tokenizer with a chat template.

    Args:
        folder: output of the tokenizer stage.
        clock: source of the date for templates that write it.

    Raises:
        ChatError: the template is missing.
    """

    def __init__(self, folder: Path, clock: Clock = fixed_clock) -> None:
        from tokenizers import Tokenizer

        self.folder = folder
        self._file = folder / TEMPLATE_FILE
        if not self._file.exists():
            raise ChatError(
                f"{folder}: no {TEMPLATE_FILE}; a tokenizer without a chat template "
                "cannot be tuned on "
                "conversations: remove `sft:` and `dpo:`, or use a trained tokenizer"
            )
        self.tokenizer = Tokenizer.from_str(
            (folder / TOKENIZER_FILE).read_text(encoding="utf-8")
        )
        self._named_tokens = configured_tokens(folder)
        self._template = compile_template(self._file.read_text(encoding="utf-8"), clock)

    @property
    def digest(self) -> str:
        """Hash of the template and the tokenizer."""
        return sha256_file(self._file) + sha256_file(self.folder / TOKENIZER_FILE)

    @cached_property
    def pad(self) -> int:
        """Id of the padding token; end of text if the tokenizer has none."""
        return self._id("pad_token", "eos_token")

    @cached_property
    def end_of_text(self) -> int:
        """Id that ends a document."""
        return self._id("eos_token")

    @cached_property
    def start_of_text(self) -> int:
        """Id that templates write in front; end of text if the tokenizer has none."""
        return self._id("bos_token", "eos_token")

    @cached_property
    def stops(self) -> frozenset[int]:
        """Ids that end an answer: end of text, and the special tokens at the ends of
        the template's answers and calls of tools.
        """
        _, rows = probe_rows(self._template, **self._named_tokens)
        with suppress(*TEMPLATE_ERRORS):
            rows += self._render(render_rows, False, call_probe(), [PROBE_TOOL])
        ends = {
            self.tokenizer.encode(text, add_special_tokens=False).ids[-1]
            for row in rows
            for text, turn in row
            if turn
        }
        special = set(special_ids(self.tokenizer).values())
        return frozenset({self.end_of_text, *ends & special})

    def rows(
        self,
        messages: Sequence[Message],
        prompt: bool = False,
        tools: Sequence[Tool] = (),
    ) -> list[list[Segment]]:
        """Render a conversation: rows as of `chat_template.render_rows`. Each turn of
        the assistant is generated in one of them; the last one ends with the last
        message.

        Args:
            messages: `role` and `content` each, optionally `tool_calls`.
            prompt: end with the generation prompt.
            tools: descriptions of the tools that may be called.

        Raises:
            TemplateMismatchError: the template omits content of the messages or tools,
                or writes an answer behind another text than the prompt for it.
            ChatError: a content holds a special token, or the template rejects the
                messages.
        """
        if spelled := next(self._special_in([*messages, *tools]), None):
            raise ChatError(f"content holds {spelled!r}, which is a special token")

        def all_texts(messages: Sequence[Message], tools: Sequence[Tool]) -> str:
            """All rows of the conversation."""
            rows = self._render(render_rows, prompt, messages, tools)
            return "".join(text for row in rows for text, _ in row)

        try:
            rows = self._render(render_rows, prompt, messages, tools)
        except PromptMismatchError as error:
            raise TemplateMismatchError(f"{self._file}: {error}") from error
        except TEMPLATE_ERRORS as error:
            raise ChatError(f"{self._file}: {error}") from error
        text = partial(self._render, render_text, prompt)
        # What a template drops once other turns follow is in the row that trains it.
        left_out = part_left_out(text, messages, tools) and part_left_out(
            all_texts, messages, tools
        )
        if left_out is not None:
            raise TemplateMismatchError(
                f"{self._file} does not write {left_out}, so that it would not be "
                "trained; give a template that writes it, or remove it from the data"
            )
        return rows

    def text(self, messages: Sequence[Message], prompt: bool = False) -> str:
        """Text of a conversation's last row; arguments and errors as for `rows`."""
        return "".join(text for text, _ in self.rows(messages, prompt)[-1])

    def encode(
        self,
        messages: Sequence[Message],
        prompt: bool = False,
        tools: Sequence[Tool] = (),
    ) -> Tokens:
        """Tokens of a conversation's last row. Arguments and errors as for `rows`."""
        return self.tokens(self.rows(messages, prompt, tools)[-1])

    def tokens(self, row: Sequence[Segment]) -> Tokens:
        """Tokens of a row and their turns."""
        ids: list[int] = []
        turns: list[int] = []
        for text, turn in row:
            encoded = self.tokenizer.encode(text, add_special_tokens=False).ids
            ids += encoded
            turns += [turn] * len(encoded)
        return Tokens(np.array(ids, np.int64), np.array(turns, np.int64))

    def _render(
        self,
        render: Callable[..., T],
        prompt: bool,
        messages: Sequence[Message],
        tools: Sequence[Tool],
    ) -> T:
        """Call `render_rows` or `render_text` with the template."""
        return render(
            self._template,
            messages,
            prompt,
            tools=list(tools) or None,
            **self._named_tokens,
        )

    def _special_in(self, item: object) -> Iterator[str]:
        """Yield the special tokens spelled in any text of a message or of a tool's
        description.
        """
        if isinstance(item, str):
            yield from self._special.findall(item)
        elif isinstance(item, Mapping):
            yield from self._special_in([*item, *item.values()])
        elif isinstance(item, list | tuple):
            for value in item:
                yield from self._special_in(value)

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Text of some ids, without or with special tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=not special)

    def plain(self, text: str) -> str:
        """A text without anything that would be read as a special token."""
        while self._special.search(text):  # a removal may create another
            text = self._special.sub("", text)
        return text

    @cached_property
    def _special(self) -> re.Pattern[str]:
        return re.compile(
            "|".join(map(re.escape, [*special_ids(self.tokenizer), OPEN, CLOSE]))
        )

    def _id(self, *names: str) -> int:
        for name in names:
            number = self.tokenizer.token_to_id(self._named_tokens.get(name, ""))
            if number is not None:
                return int(number)
        raise ChatError(
            f"{self.folder / TOKENIZER_CONFIG_FILE}: names none of "
            f"{', '.join(names)} of the vocabulary"
        )


class NothingToTrainError(ValueError):
    """A set of examples has no token to train on."""


@dataclass(frozen=True)
class EncodingCounts:
    """Outcome of encoding the examples of a set; all others are used.

    Attributes:
        examples: number of examples.
        unrenderable: examples that the chat template cannot write, or not completely.
        unrenderable_reasons: number of them by error, the most frequent errors.
        dropped: examples without a trained token within the longest row.
    """

    examples: int
    unrenderable: int
    unrenderable_reasons: Mapping[str, int]
    dropped: int


@dataclass(frozen=True)
class Encoded(Generic[T]):
    """Encoded examples of a set.

    Attributes:
        used: those that can be trained on, in order.
        counts: numbers of examples.
        mismatches: id of an example -> error about its template.
    """

    used: list[T]
    counts: EncodingCounts
    mismatches: Mapping[str, str]


def encode_examples(
    examples: Sequence[Example], encode: Callable[[Example], Sequence[T]]
) -> Encoded[T]:
    """Encode examples.

    Args:
        examples: of a set.
        encode: encodes one; empty if it is too long. Raises ChatError for an example
            that cannot be rendered.
    """
    used: list[T] = []
    dropped = 0
    reasons = Counter[str]()
    mismatches: dict[str, str] = {}
    for example in examples:
        try:
            encoded = encode(example)
        except ChatError as error:
            reasons[str(error)] += 1
            if isinstance(error, TemplateMismatchError):
                mismatches[example["id"]] = str(error)
            continue
        used += encoded
        dropped += not encoded
    common_reasons = dict(reasons.most_common(SHOWN_REASONS))
    counts = EncodingCounts(len(examples), reasons.total(), common_reasons, dropped)
    return Encoded(used, counts, mismatches)


class SetErrors:
    """Errors of the sets of a stage, raised together."""

    def __init__(self) -> None:
        self._errors: list[NothingToTrainError | TemplateMismatchError] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Context of one set, whose error ends it."""
        try:
            yield
        except (NothingToTrainError, TemplateMismatchError) as error:
            self._errors.append(error)

    def raise_all(self) -> None:
        """Raise the first error, with the messages of all."""
        if self._errors:
            raise type(self._errors[0])("\n".join(map(str, self._errors)))


def check_encoded(
    where: str,
    encoded: Encoded[T],
    records: UsableSet,
    max_quarantined: float,
    requirement: str,
    remedy: str,
) -> None:
    """Reject a set that cannot be trained on.

    Args:
        where: name of the set.
        encoded: its examples.
        records: its records.
        max_quarantined: largest share of the records to leave out.
        requirement: condition that an example fulfils to be used.
        remedy: setting to change if none does.

    Raises:
        TemplateMismatchError: the template does not fit more; names the first examples.
        NothingToTrainError: no example is used.
        gristmill.dataprep.examples.kept_examples.ConservationError: a record is not
            accounted for.
    """
    mismatches = encoded.mismatches
    if len(mismatches) > max_quarantined * records.counts.records:
        excerpt = "\n  ".join(
            f"{records.places.get(example, example)}: {reason}"
            for example, reason in islice(mismatches.items(), SHOWN_EXAMPLES)
        )
        raise TemplateMismatchError(
            f"{where}: the chat template does not fit {len(mismatches):,} of "
            f"{records.counts.records:,} examples; mend it, or raise, beside "
            f"its path, max_quarantined from {max_quarantined}:\n  {excerpt}"
        )
    counts = encoded.counts
    if not encoded.used:
        raise NothingToTrainError(
            f"{where}: none of its {counts.examples} {requirement} "
            f"({why_left_out(counts)}); {remedy}, or look at the data"
        )
    check_records(where, records.counts, counts.examples)


@dataclass(frozen=True)
class Conversation:
    """Tokens of one example and their loss mask.

    Attributes:
        ids: (t,) int64, at most `sequence_length`.
        trained: (t,) bool; never the first token, which has no context.
        truncated: True if the end was cut off.
        example: id of the source example.
        answers: turns of the assistant that have a trained token.
        ended: number of these whose end of turn is trained.
        cut: number of these whose end of turn is beyond `sequence_length`.
    """

    ids: np.ndarray
    trained: np.ndarray
    truncated: bool
    example: str
    answers: int = 0
    ended: int = 0
    cut: int = 0


def conversation(
    tokens: Tokens,
    learned: Collection[int],
    length: int,
    example: str,
    stops: Collection[int] = (),
) -> Conversation | None:
    """Truncate to `length` and train on some turns of the assistant; None if no trained
    token is left.

    Args:
        tokens: the rendered conversation.
        learned: trained turns of the assistant, counted from 1; 0 stands for the tokens
            of all others.
        length: most tokens.
        example: its id.
        stops: ids that end a turn.
    """
    trained = np.isin(tokens.turns, list(learned))
    trained[:1] = False
    kept = trained[:length]
    if not kept.any():
        return None
    answered = np.unique(tokens.turns[:length][kept])
    answered = answered[answered > 0]
    last = np.array(
        [np.flatnonzero(tokens.turns == turn)[-1] for turn in answered], np.int64
    )
    has_end = np.isin(tokens.ids[last], list(stops))
    ended = int((has_end & (last < length)).sum())
    return Conversation(
        tokens.ids[:length],
        kept,
        len(tokens.ids) > length,
        example,
        len(answered),
        ended,
        int(has_end.sum()) - ended,
    )


def prepare_conversations(
    examples: Sequence[Example],
    chat: Chat,
    length: int,
    train_on: TrainOn = "assistant",
) -> Encoded[Conversation]:
    """Encode examples of supervised fine-tuning; an example becomes several
    conversations if the template rewrites its turns.

    Args:
        examples: conversations; an assistant's message with `"trained": false` has no
            loss.
        chat: tokenizer and template.
        length: most tokens per example.
        train_on: the assistant's turns, the last of these, or all tokens.
    """

    def encode(example: Example) -> Sequence[Conversation]:
        messages = example["messages"]
        rows = chat.rows(messages, tools=example.get("tools", ()))
        assistants = [message for message in messages if message["role"] == "assistant"]
        first_turn = len(assistants) if train_on == "last" else 1
        learned = {
            turn
            for turn, message in enumerate(assistants, start=1)
            if turn >= first_turn and message.get("trained", True)
        }
        if train_on == "all":
            learned.add(0)
            if len(rows) > 1:
                raise TemplateMismatchError(
                    "the template changes turns of the assistant when others follow, "
                    "so that no text holds all tokens; set train_on: assistant"
                )
        conversations = [
            conversation(tokens, learned, length, example["id"], chat.stops)
            for tokens in map(chat.tokens, rows)
            if learned.intersection(tokens.turns.tolist())
        ]
        if not conversations:
            raise ChatError(UNMARKED if learned else ALL_UNTRAINED)
        used = [item for item in conversations if item is not None]
        if used and len(used) < len(conversations):
            used[-1] = replace(used[-1], truncated=True)
        return used

    return encode_examples(examples, encode)


def fingerprint_of(conversations: Iterable[Conversation]) -> str:
    """Hash of conversations' ids and loss masks, in order: 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for conversation in conversations:
        digest.update(len(conversation.ids).to_bytes(8, "little"))
        digest.update(
            np.asarray(conversation.ids, "<i8").tobytes()
            + np.asarray(conversation.trained, np.uint8).tobytes()
        )
    return digest.hexdigest()


def write_example_ids(
    folder: Path, examples: Sequence[str], rows_per_set: Sequence[int]
) -> None:
    """Write the examples of each row, one line per row, so that a step's examples can
    be traced.

    Args:
        folder: output of a training stage.
        examples: space-separated ids of each row.
        rows_per_set: rows of each set, which define the order of the rows.
    """
    write_text(folder / EXAMPLE_IDS, "".join(f"{example}\n" for example in examples))
    write_json(folder / ROWS_PER_SET, list(rows_per_set))


@dataclass(frozen=True)
class TokenCounts:
    """Trained, cut and ended parts of conversations.

    Attributes:
        answers: turns of the assistant that have a trained token.
        end_of_turn_share: share of these whose end of turn is trained.
        cut_answers: number of these whose end of turn is beyond the longest row.
        used: number of conversations.
        truncated: number of these whose end was cut off.
        example_tokens: tokens of all conversations.
        trained_tokens: number of these with a loss.
        trained_share: share of the tokens.
        truncated_share: share of the conversations.
    """

    answers: int
    end_of_turn_share: float
    cut_answers: int
    used: int
    truncated: int
    example_tokens: int
    trained_tokens: int
    trained_share: float
    truncated_share: float


def counts_of(used: Sequence[Conversation]) -> TokenCounts:
    """Counts and shares over some examples."""
    tokens = sum(len(conversation.ids) for conversation in used)
    trained = sum(int(conversation.trained.sum()) for conversation in used)
    truncated = sum(conversation.truncated for conversation in used)
    answers = sum(conversation.answers for conversation in used)
    ended = sum(conversation.ended for conversation in used)
    return TokenCounts(
        answers=answers,
        end_of_turn_share=ended / max(answers, 1),
        cut_answers=sum(conversation.cut for conversation in used),
        used=len(used),
        truncated=truncated,
        example_tokens=tokens,
        trained_tokens=trained,
        trained_share=trained / max(tokens, 1),
        truncated_share=truncated / max(len(used), 1),
    )


def padded_length(longest: int, limit: int) -> int:
    """Length of a micro-batch's rows: a multiple of PAD_MULTIPLE, at most `limit`."""
    return min(limit, -(-longest // PAD_MULTIPLE) * PAD_MULTIPLE)


def padded(rows: Sequence[Conversation], pad: int, length: int) -> Tensor:
    """Ids of a micro-batch, (n, t), right-padded.

    Args:
        rows: n of them, at least one.
        pad: the padding id.
        length: longest row allowed; t is as small as the rows allow.
    """
    import torch  # making rows of conversations needs no torch
    from torch.nn.utils.rnn import pad_sequence

    ids = pad_sequence(
        [torch.from_numpy(row.ids) for row in rows], True, padding_value=pad
    )
    missing = padded_length(ids.shape[1], length) - ids.shape[1]
    return torch.nn.functional.pad(ids, (0, missing), value=pad)


def why_left_out(counts: EncodingCounts) -> str:
    """Numbers of examples that are too long and that the chat template cannot write,
    with the reasons.
    """
    reasons = "; ".join(
        f"{reason} ({number})" for reason, number in counts.unrenderable_reasons.items()
    )
    return f"{counts.dropped} too long, {counts.unrenderable} not rendered" + (
        f": {reasons}" if reasons else ""
    )


def left_out_warning(name: str, counts: EncodingCounts, length: int) -> str | None:
    """Warning about a set with many examples that are not trained on; None if they are
    few.

    Args:
        name: of the set.
        counts: of the set.
        length: tokens that an example may have.
    """
    num_left_out = counts.dropped + counts.unrenderable
    if num_left_out <= LEFT_OUT_SHARE * counts.examples:
        return None
    return (
        f"{name}: {num_left_out:,} of {counts.examples:,} examples are not trained on "
        f"(at most {length:,} tokens each): {why_left_out(counts)}"
    )
