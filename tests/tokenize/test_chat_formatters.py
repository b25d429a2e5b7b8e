"""User functions that format conversations, alike in training, evaluation and
generation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gristmill.mixtures.sections.tokenizer import OwnFormatter
from gristmill.mixtures.user_code import OwnFunction, take_code
from gristmill.tokenize.encoding.chat_formatters import Formatter
from gristmill.tokenize.encoding.tokenizer import TokenizerError, check, write_tokenizer
from gristmill.tokenize.encoding.vocabulary import train
from gristmill.tokenize.encoding.vocabulary_sample import TokenizerSample
from gristmill.train.data.conversation_tokens import (
    Chat,
    ChatError,
    counts_of,
    decoded_mask,
    prepare_conversations,
)
from gristmill.train.data.pairs import prepare_preferences

FORMAT = """
def write(messages, end="<|end|>"):
    for message in messages:
        speaks = message["role"] == "assistant"
        yield f"{message['role'].upper()}: ", False
        yield message["content"], speaks
        yield end, speaks
        yield "\\n", False
        message["content"] = "changed"
"""
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "So."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]


def own_formatter(folder: Path, source: str = FORMAT, **options: Any) -> OwnFormatter:
    (folder / "chat.py").write_text(source)
    return OwnFormatter.model_validate(
        {
            "use": take_code(OwnFunction("./chat.py:write"), folder),
            "with": options,
            "time_limit_seconds": 0.5,
        }
    )


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train(
        TokenizerSample(
            {"prose": ["Why is it so? Sure, be brief. Yes. USER: ASSISTANT: SYSTEM:"]},
            {},
        ),
        300,
    )


@pytest.fixture
def chat(tmp_path: Path, tokenizer: Any) -> Chat:
    write_tokenizer(tokenizer, tmp_path, own_formatter(tmp_path))
    (tmp_path / "chat.py").unlink()
    return Chat(tmp_path)


def test_loss_covers_exactly_the_marked_segments(chat: Chat) -> None:
    (rendered,) = prepare_conversations(
        [{"id": "a", "messages": TURNS}], chat, 1000
    ).used
    assert decoded_mask(chat, rendered) == [
        ("SYSTEM: Be brief.<|end|>\nUSER: Why?<|end|>\nASSISTANT: ", False),
        ("So.<|end|>", True),
        ("\nUSER: Sure?<|end|>\nASSISTANT: ", False),
        ("Yes.<|end|>", True),
        ("\n", False),
    ]
    assert counts_of([rendered]).end_of_turn_share == 1.0
    assert TURNS[0]["content"] == "Be brief."
    (rendered_last,) = prepare_conversations(
        [{"id": "a", "messages": TURNS}], chat, 1000, "last"
    ).used
    assert [text for text, trained in decoded_mask(chat, rendered_last) if trained] == [
        "Yes.<|end|>"
    ]
    example = {
        "id": "a",
        "prompt": TURNS[:4],
        "chosen": TURNS[4:],
        "rejected": TURNS[2:3],
    }
    (pair,) = prepare_preferences([example], chat, 99).used
    _, rejected = pair.conversations
    assert [text for text, trained in decoded_mask(chat, rejected) if trained] == [
        "So.<|end|>"
    ]


def test_prompt_is_a_prefix_of_the_training_conversation(chat: Chat) -> None:
    prompt, conversation = chat.encode(TURNS[:2], prompt=True), chat.encode(TURNS[:3])
    assert prompt.ids.tolist() == conversation.ids[: len(prompt.ids)].tolist()
    assert conversation.turns[len(prompt.ids)] == 1
    assert chat.stops >= {chat.tokenizer.token_to_id("<|end|>")}


def test_special_token_in_content_and_unwritten_tool_are_rejected(chat: Chat) -> None:
    with pytest.raises(ChatError, match="content holds"):
        chat.encode([{"role": "user", "content": "<|end|>"}])
    with pytest.raises(ChatError, match="chat:write does not write the tool 'weather'"):
        chat.encode(
            TURNS, tools=[{"type": "function", "function": {"name": "weather"}}]
        )


def test_tools_are_passed_to_a_function_with_a_tools_parameter(tmp_path: Path) -> None:
    formatter = Formatter(
        own_formatter(
            tmp_path,
            "def write(messages, tools=None):\n    return [(str(tools), False)]\n",
        )
    )
    assert formatter.segments(TURNS[:2], tools=[{"name": "weather"}]) == [
        ("[{'name': 'weather'}]", False)
    ]
    assert formatter.segments(TURNS[:2]) == [("None", False)]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "def write(messages):\n    return 'text'",
            r"chat.py, line 1: write gives 't' \(str\) where a segment belongs",
        ),
        (
            "def write(messages):\n    return [('a', 1)]",
            "where a segment belongs; give pairs of text and True",
        ),
        (
            "def write(messages):\n    return [('a', False)]",
            "write marks 0 answers in a conversation with 2",
        ),
        (
            "def write(messages):\n    return [(m['text'], False) for m in messages]",
            r"KeyError: 'text' \(chat.py, line ",
        ),
        (
            "def write(): ...",
            r"chat.py, line 1: write\(\) cannot be called with \(messages\)",
        ),
        (
            "def write(messages):\n    return [x for m in messages for x in "
            "(('<|odd|>', False),\n"
            "        (m['content'], m['role'] == 'assistant'))]",
            r"writes <\|odd\|>, which the tokenizer has no",
        ),
        (
            "def write(messages):\n    return [x for m in messages for x in (('u:', "
            "False), (m['role'],\n"
            "        m['role'] == 'assistant'))]",
            "write does not mark all that the assistant says",
        ),
        (
            "def write(messages):\n    return [x for m in messages[1:] for x in "
            "(('u:', False), (m['content'],\n"
            "        m['role'] == 'assistant'))]",
            "it leaves out the text of the system",
        ),
        (
            "def write(messages):\n    while True: pass",
            r"TimeLimitError: took longer than 0.5 s \(chat.py, line 2\)",
        ),
        (
            "while True: pass\ndef write(messages): ...",
            r"chat.py cannot be loaded: TimeLimitError: took longer than 0.5 s",
        ),
        (
            "import os\ndef write(messages):\n    return [x for m in messages for x "
            "in ((os.urandom(4).hex(), False),\n"
            "        (m['content'], m['role'] == 'assistant'))]",
            "writes the same conversation in two ways",
        ),
    ],
)
def test_unsuitable_function_is_rejected_with_its_line(
    tmp_path: Path, tokenizer: Any, source: str, message: str
) -> None:
    with pytest.raises(TokenizerError, match=f"tokenizer.chat_formatter: .*{message}"):
        check(tokenizer, own_formatter(tmp_path, source))


def test_exception_on_a_conversation_drops_that_example_only(
    tmp_path: Path, tokenizer: Any
) -> None:
    source = FORMAT.replace(
        "        speaks =",
        "        if 'shout' in message['content']:\n            raise ValueError('no "
        "shouting')\n        speaks =",
    )
    write_tokenizer(tokenizer, tmp_path, own_formatter(tmp_path, source))
    shouted = [{"role": "user", "content": "shout"}, TURNS[2]]
    examples = [{"id": "a", "messages": TURNS}, {"id": "b", "messages": shouted}]
    encoded = prepare_conversations(examples, Chat(tmp_path), 1000)
    assert (len(encoded.used), encoded.counts.unrenderable) == (1, 1)
    assert list(encoded.counts.unrenderable_reasons) == [
        "chat:write: ValueError: no shouting (chat.py, line 5)"
    ]
