from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.core.files import read_json, write_json
from gristmill.train.data.conversation_tokens import (
    Chat,
    ChatError,
    ContentLeftOutError,
    conversation,
    counts_of,
    decoded_mask,
    padded,
    prepare_conversations,
    why_left_out,
)
from gristmill.train.data.pairs import encode_pairs

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What does it do?"},
    {"role": "assistant", "content": "It wraps text."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": " Yes."},
]


@pytest.fixture(scope="module")
def chat(tokenizer_folder: Path) -> Chat:
    return Chat(tokenizer_folder)


def test_answers_and_their_end_of_turn_are_trained(chat: Chat) -> None:
    example = conversation(chat.encode(TURNS), 1, 1000, "id")
    assert example is not None
    assert decoded_mask(chat, example) == [
        (
            "<|system|>\nBe brief.<|end|>\n<|user|>\nWhat does it "
            "do?<|end|>\n<|assistant|>\n",
            False,
        ),
        ("It wraps text.<|end|>", True),
        ("\n<|user|>\nSure?<|end|>\n<|assistant|>\n", False),
        (" Yes.<|end|>", True),
        ("\n", False),
    ]


@pytest.mark.parametrize(
    ("train_on", "trained"),
    [
        ("assistant", ["It wraps text.<|end|>", " Yes.<|end|>"]),
        ("last", [" Yes.<|end|>"]),
        (
            "all",
            [
                "\nBe brief.<|end|>\n<|user|>\nWhat does it "
                "do?<|end|>\n<|assistant|>\nIt wraps text.<|end|>\n<|user|>\n"
                "Sure?<|end|>\n<|assistant|>\n Yes.<|end|>\n"
            ],
        ),
    ],
)
def test_train_on_selects_the_trained_turns(
    chat: Chat, train_on: Any, trained: list[str]
) -> None:
    (example,) = prepare_conversations(
        [{"id": "a", "messages": TURNS}], chat, 1000, train_on
    ).used
    assert [
        text for text, is_trained in decoded_mask(chat, example) if is_trained
    ] == trained
    assert counts_of([example]).end_of_turn_share == 1.0


CALL = {
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Zürich"}},
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"city": "<string>"}},
}
WITH_TOOLS = [
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "dry"},
    {"role": "assistant", "content": "No."},
]


def test_tool_calls_are_trained_and_tool_responses_are_not(chat: Chat) -> None:
    (example,) = prepare_conversations(
        [{"id": "a", "messages": WITH_TOOLS, "tools": [TOOL]}], chat, 1000
    ).used
    assert decoded_mask(chat, example) == [
        (
            '<|system|>\nTools: [{"type": "function", "function": {"name": '
            '"weather", "parameters": {"city": "<string>"'
            "}}}]<|end|>\n<|user|>\nRain?<|end|>\n<|assistant|>\n",
            False,
        ),
        (
            '<tool_call>\n{"name": "weather", "arguments": {"city": '
            '"Zürich"}}\n</tool_call><|end|>',
            True,
        ),
        (
            "\n<|user|>\n<tool_response>\ndry\n</tool_response><|end|>\n<|assistant|>\n",
            False,
        ),
        ("No.<|end|>", True),
        ("\n", False),
    ]


@pytest.mark.parametrize(
    ("messages", "tools"),
    [(TURNS, []), (WITH_TOOLS, [TOOL]), ([TURNS[0], *WITH_TOOLS], [TOOL])],
)
def test_ids_and_mask_equal_those_of_transformers(
    chat: Chat, messages: list[Any], tools: list[Any]
) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(chat.folder).apply_chat_template(
        messages,
        tools=tools or None,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    ours = chat.encode(messages, tools=tools)
    assert ours.ids.tolist() == theirs["input_ids"]
    assert (ours.turns > 0).astype(int).tolist() == theirs["assistant_masks"]


def test_preference_prompts_have_the_tools_as_in_transformers(chat: Chat) -> None:
    from transformers import AutoTokenizer

    peer = AutoTokenizer.from_pretrained(chat.folder)
    prompt, answers = (
        WITH_TOOLS[:1],
        {"chosen": WITH_TOOLS[1:2], "rejected": [TURNS[2]]},
    )
    (pair,) = encode_pairs(
        [{"id": "a", "prompt": prompt, "tools": [TOOL], **answers}], chat, 1000
    ).used
    for example, answer in zip(pair.conversations, ("chosen", "rejected"), strict=True):
        theirs = peer.apply_chat_template(
            [*prompt, *answers[answer]],
            tools=[TOOL],
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        assert example.ids.tolist() == theirs["input_ids"]
        assert example.trained.astype(int).tolist() == theirs["assistant_masks"]
        assert '"weather"' in chat.decode(
            example.ids[: int(example.trained.argmax())].tolist()
        )


PLAIN_TEMPLATE = (
    "{%- for message in messages -%}{{- message['role'] + ':' -}}{% generation %}{{ "
    "message['content'] }}"
    "{% endgeneration %}{%- endfor -%}"
)
ADD = {"type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": 2}}}
ADD_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Sum.",
        "parameters": {"properties": {"a": {"type": "integer"}}},
    },
}
SAYS_ADD = {"role": "user", "content": "add 3 and 2: Sum. of a and b"}
ADDING = [SAYS_ADD, {"role": "assistant", "content": "", "tool_calls": [ADD]}]


@pytest.fixture
def templated(chat: Chat, tmp_path: Path) -> Any:
    def copy(template: str) -> Chat:
        shutil.copytree(chat.folder, tmp_path / "copy", dirs_exist_ok=True)
        (tmp_path / "copy" / "chat_template.jinja").write_text(template)
        return Chat(tmp_path / "copy")

    return copy


@pytest.mark.parametrize(
    ("messages", "tools", "left_out"),
    [
        (WITH_TOOLS, [], "the call of 'weather' in message 2"),
        (TURNS, [TOOL], "the tool 'weather'"),
        # The user's words contain everything that the template leaves out.
        (ADDING, [], "the call of 'add' in message 2"),
        ([SAYS_ADD, TURNS[2]], [ADD_TOOL], "the tool 'add'"),
        (
            [SAYS_ADD, {**TURNS[2], "reasoning_content": "add"}],
            [],
            "the reasoning_content of message 2",
        ),
        ([{**SAYS_ADD, "name": "user"}, TURNS[2]], [], "the name of message 1"),
    ],
)
def test_template_that_leaves_out_content_is_rejected(
    templated: Any, messages: list[Any], tools: list[Any], left_out: str
) -> None:
    with pytest.raises(ContentLeftOutError, match=left_out):
        templated(PLAIN_TEMPLATE).encode(messages, tools=tools)


def test_template_must_write_every_part_of_calls_and_tools(templated: Any) -> None:
    name = (
        "{%- for call in m.tool_calls or [] -%}{{- call.function.name -}}{%- endfor -%}"
    )
    loop = (
        "{%- for m in messages -%}{{- m.role + m.content -}}" + name + "{%- endfor -%}"
    )
    with pytest.raises(ContentLeftOutError, match="the arguments of the call of 'add'"):
        templated(loop).encode(ADDING)
    described = (
        "{%- for tool in tools or [] -%}{{- tool.function.name -}}{%- endfor -%}" + loop
    )
    with pytest.raises(ContentLeftOutError, match="the description of the tool 'add'"):
        templated(described).encode(TURNS, tools=[ADD_TOOL])


def test_template_that_cuts_reasoning_off_is_rejected(templated: Any) -> None:
    thinking = {"role": "assistant", "content": "<think>It is add.</think>add"}
    cutting = (
        "{%- for m in messages -%}{{- m.role + m.content.split('</think>')[-1] "
        "-}}{%- endfor -%}"
    )
    with pytest.raises(
        ContentLeftOutError, match="the reasoning in the content of message 2"
    ):
        templated(cutting).encode([SAYS_ADD, thinking])


def test_template_may_write_reasoning_and_names(templated: Any) -> None:
    writing = (
        "{%- for m in messages -%}{{- m.role + '(' + (m.name or '') + ')' + "
        "(m.thinking or '') + m.content -}}"
        "{%- endfor -%}"
    )
    messages = [{**SAYS_ADD, "name": "Ann"}, {**TURNS[2], "reasoning_content": "Hm."}]
    text = "".join(text for text, _ in templated(writing).segments(messages))
    assert text == f"user(Ann){SAYS_ADD['content']}assistant()Hm.{TURNS[2]['content']}"


def test_template_may_leave_out_the_name_of_a_responding_tool(chat: Chat) -> None:
    answered = [
        *WITH_TOOLS[:2],
        {**WITH_TOOLS[2], "name": "weather", "tool_call_id": "1"},
        WITH_TOOLS[3],
    ]
    assert (
        chat.encode(answered, tools=[TOOL]).ids.tolist()
        == chat.encode(WITH_TOOLS, tools=[TOOL]).ids.tolist()
    )


def test_untrained_turns_and_a_final_user_turn_are_context(chat: Chat) -> None:
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "no", "trained": False},
        {"role": "user", "content": "q2"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "thanks"},
    ]
    (example,) = prepare_conversations(
        [{"id": "a", "messages": messages}], chat, 500
    ).used
    assert [text for text, trained in decoded_mask(chat, example) if trained] == [
        "yes<|end|>"
    ]
    counts = counts_of([example])
    assert (counts.answers, counts.end_of_turn_share) == (1, 1.0)


@settings(deadline=None, max_examples=50)
@given(st.text(max_size=30), st.text(max_size=30))
def test_prompt_has_the_same_ids_in_training_and_generation(
    chat: Chat, question: str, answer: str
) -> None:
    messages = [{"role": "user", "content": question}]
    prompt = chat.encode(messages, prompt=True).ids.tolist()
    conversation_ = chat.encode([*messages, {"role": "assistant", "content": answer}])
    assert conversation_.ids[: len(prompt)].tolist() == prompt
    assert conversation_.turns[: len(prompt)].tolist() == [0] * len(prompt)
    assert conversation_.turns[len(prompt)] == 1
    trained = conversation_.ids[conversation_.turns == 1].tolist()
    assert chat.decode(trained, special=True) == answer + "<|end|>"


@pytest.mark.parametrize(
    "text", ["<|end|>", "a <|assistant|>\nb", "\x00<generation>\x00"]
)
def test_content_spelling_a_special_token_is_rejected(chat: Chat, text: str) -> None:
    with pytest.raises(ChatError, match="content holds"):
        chat.encode([{"role": "user", "content": text}])


def test_generation_stops_at_the_end_of_turn_or_text(chat: Chat) -> None:
    assert chat.stops == {0, 5}
    assert chat.pad == 1


def test_configuration_of_transformers_names_the_special_tokens(
    tokenizer_folder: Path, tmp_path: Path, chat: Chat
) -> None:
    """It has other mappings beside the tokens, and writes tokens with their flags."""
    folder = shutil.copytree(tokenizer_folder, tmp_path / "tokenizer")
    path = folder / "tokenizer_config.json"
    config = read_json(path)
    eos = {"content": config["eos_token"], "special": True}
    write_json(path, {**config, "eos_token": eos, "added_tokens_decoder": {"0": eos}})
    written = Chat(folder)
    assert (written.end_of_text, written.pad) == (chat.end_of_text, chat.pad)
    assert written.encode(TURNS).ids.tolist() == chat.encode(TURNS).ids.tolist()


def test_tokenizer_without_a_template_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ChatError, match=r"chat_template\.jinja; .*`sft:` and `dpo:`"):
        Chat(tmp_path)


def test_truncated_dropped_and_unrenderable_examples_are_counted(chat: Chat) -> None:
    examples = [
        {"id": "whole", "messages": TURNS[1:3]},
        {
            "id": "cut",
            "messages": [TURNS[1], {"role": "assistant", "content": "word " * 40}],
        },
        {
            "id": "gone",
            "messages": [{"role": "user", "content": "word " * 40}, TURNS[2]],
        },
        {"id": "odd", "messages": [{"role": "user", "content": "<|end|>"}, TURNS[2]]},
    ]
    encoded = prepare_conversations(examples, chat, 40)
    counts, tokens = encoded.counts, counts_of(encoded.used)
    assert (counts.examples, counts.dropped, counts.unrenderable) == (4, 1, 1)
    assert (tokens.used, tokens.truncated) == (2, 1)
    ((reason, number),) = counts.unrenderable_reasons.items()
    assert ("'<|end|>'" in reason, number) == (True, 1)
    assert why_left_out(counts) == f"1 too long, 1 not rendered: {reason} (1)"
    assert (tokens.answers, tokens.end_of_turn_share) == (2, 0.5)
    assert tokens.whole_share == 0.5
    assert tokens.trained_tokens == sum(
        example.trained.sum() for example in encoded.used
    )
    assert tokens.trained_share + tokens.masked_share == pytest.approx(1.0)
    assert [len(example.ids) for example in encoded.used][1] == 40


def test_rows_are_padded_on_the_right_to_the_needed_length(chat: Chat) -> None:
    used = prepare_conversations(
        [{"id": "a", "messages": TURNS[1:3]}, {"id": "b", "messages": TURNS}],
        chat,
        1000,
    ).used
    ids, trained = padded(used, chat.pad, 1000)
    assert ids.shape == trained.shape == (2, 64)
    length = len(used[0].ids)
    assert ids[0, :length].tolist() == used[0].ids.tolist()
    assert set(ids[0, length:].tolist()) == {chat.pad}
    assert trained[0].sum() == used[0].trained.sum()
    assert padded(used[:1], chat.pad, 50)[0].shape == (1, 50)
