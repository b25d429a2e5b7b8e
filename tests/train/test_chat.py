from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.core.files import read_json, write_json
from gristmill.tokenize.chat_template import END_OF_TURN, check_template
from gristmill.train.data.conversation_tokens import (
    Chat,
    ChatError,
    Conversation,
    TemplateMismatchError,
    conversation,
    counts_of,
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


def decoded_mask(chat: Chat, one: Conversation) -> list[tuple[str, bool]]:
    """Tokens of an example as text: (text, True if trained), with special tokens."""
    edges = np.flatnonzero(np.diff(one.trained)) + 1
    return [
        (chat.decode(ids.tolist(), special=True), bool(trained[0]))
        for ids, trained in zip(
            np.split(one.ids, edges), np.split(one.trained, edges), strict=True
        )
    ]


@pytest.fixture(scope="module")
def chat(tokenizer_folder: Path) -> Chat:
    return Chat(tokenizer_folder)


def test_answers_and_their_end_of_turn_are_trained(chat: Chat) -> None:
    example = conversation(chat.encode(TURNS), (1, 2), 1000, "id")
    assert example is not None
    assert decoded_mask(chat, example) == [
        (
            "<|endoftext|><|system|>\nBe brief.<|end|>\n<|user|>\nWhat does it "
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
                "<|system|>\nBe brief.<|end|>\n<|user|>\nWhat does it "
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
            '<|endoftext|><|system|>\nTools: [{"type": "function", "function": {"name": '
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
    "{% endgeneration %}{%- endfor -%}{%- if add_generation_prompt -%}assistant:{%- "
    "endif -%}"
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
        (WITH_TOOLS, [], r"tool_calls\.0\.function\.name of message 2: \'weather\'"),
        (TURNS, [TOOL], r"function\.name of tool 1: 'weather'"),
        # The user's words contain everything that the template leaves out.
        (ADDING, [], r"tool_calls\.0\.function\.name of message 2: 'add'"),
        ([SAYS_ADD, TURNS[2]], [ADD_TOOL], r"function\.name of tool 1: 'add'"),
        (
            [SAYS_ADD, {**TURNS[2], "reasoning_content": "add"}],
            [],
            "reasoning_content of message 2",
        ),
        ([{**SAYS_ADD, "name": "user"}, TURNS[2]], [], "name of message 1"),
    ],
)
def test_template_that_leaves_out_content_is_rejected(
    templated: Any, messages: list[Any], tools: list[Any], left_out: str
) -> None:
    with pytest.raises(TemplateMismatchError, match=left_out):
        templated(PLAIN_TEMPLATE).encode(messages, tools=tools)


def test_template_must_write_every_part_of_calls_and_tools(templated: Any) -> None:
    name = (
        "{%- for call in m.tool_calls or [] -%}{{- call.function.name -}}{%- endfor -%}"
    )
    loop = (
        "{%- for m in messages -%}{{- m.role + m.content -}}" + name + "{%- endfor -%}"
    )
    with pytest.raises(
        TemplateMismatchError, match=r"function\.arguments of message 2"
    ):
        templated(loop).encode(ADDING)
    described = (
        "{%- for tool in tools or [] -%}{{- tool.function.name -}}{%- endfor -%}" + loop
    )
    with pytest.raises(TemplateMismatchError, match=r"function\.description of tool 1"):
        templated(described).encode(TURNS, tools=[ADD_TOOL])


def test_template_that_cuts_reasoning_off_is_rejected(templated: Any) -> None:
    thinking = {"role": "assistant", "content": "<think>It is add.</think>add"}
    cutting = (
        "{%- for m in messages -%}{{- m.role + m.content.split('</think>')[-1] "
        "-}}{%- endfor -%}"
    )
    with pytest.raises(TemplateMismatchError, match="content of message 2: '<think>"):
        templated(cutting).encode([SAYS_ADD, thinking])


def test_template_may_write_reasoning_and_names(templated: Any) -> None:
    writing = (
        "{%- for m in messages -%}{{- m.role + '(' + (m.name or '') + ')' + "
        "(m.thinking or '') + m.content -}}"
        "{%- endfor -%}"
    )
    messages = [{**SAYS_ADD, "name": "Ann"}, {**TURNS[2], "reasoning_content": "Hm."}]
    text = templated(writing).text(messages)
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


# Small templates with the construct that each family is known for.
LATEST_REASONING = (
    "{%- set ns = namespace(last=0) -%}{%- for m in messages -%}{%- if m.role == 'user' "
    "-%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
    "{%- for m in messages -%}{{- '<|' + m.role + '|>' -}}{%- if m.role == 'assistant' "
    "and loop.index0 > ns.last and (loop.last or m.reasoning_content) -%}{{- '<think>' + "
    "(m.reasoning_content or '') + '</think>' -}}{%- endif -%}"
    "{{- m.content -}}{%- for call in m.tool_calls or [] -%}{{- call.function | tojson "
    "-}}{%- endfor -%}{{- '<|end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
"""Qwen3: writes reasoning behind the last question only, and there also an empty one."""
END_OF_EVERY_TEXT = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>\\n' }}"
    "{% endfor %}{{ '<|assistant|>' if add_generation_prompt else eos_token }}"
)
"""Phi-3: writes the end of text at the end of every text."""
OPENED_REASONING = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content.split('</think>')[-1] + "
    "'<|end|>' }}{% endfor %}{{ '<|assistant|><think>\\n' if add_generation_prompt }}"
)
"""DeepSeek-R1: opens reasoning in the prompt, and drops it from all answers."""
OTHER_LAST_END = (
    "{%- for m in messages -%}{{- '<|' + m.role + '|>' -}}"
    "{%- if m.role != 'assistant' -%}{{- m.content + '<|end|>' -}}"
    "{%- elif m.tool_calls -%}"
    "{%- if messages[loop.index:] | selectattr('role', 'equalto', 'assistant') | "
    "rejectattr('tool_calls') | list == [] -%}{{- '#' + (m.thinking or '') -}}{%- endif -%}"
    "{%- for call in m.tool_calls -%}{{- call.function | tojson -}}{%- endfor -%}"
    "{{- '<|pad|>' -}}"
    "{%- elif loop.last and not add_generation_prompt -%}"
    "{{- '#' + (m.thinking or '') + '!' + m.content + '<|endoftext|>' -}}"
    "{%- else -%}{{- '!' + m.content + '<|end|>' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
"""gpt-oss: drops reasoning once a final answer follows, and ends only the last answer
with the token that stops.
"""
REASONED = [
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "a1", "reasoning_content": "r1"},
    {"role": "user", "content": "q2"},
    {"role": "assistant", "content": "a2", "reasoning_content": "r2"},
]
REASONED_CALLS = [
    {"role": "user", "content": "Rain?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "r1",
        "tool_calls": [CALL],
    },
    {"role": "tool", "content": "dry"},
    {"role": "assistant", "content": "No.", "reasoning_content": "r2"},
]
CALLED = '{"name": "weather", "arguments": {"city": "Zürich"}}'


@pytest.mark.parametrize(
    ("template", "messages", "rows"),
    [
        (
            LATEST_REASONING,
            REASONED,
            [
                ["<|user|>q1<|end|>\n<|assistant|>", "<think>r1</think>a1<|end|>"],
                [
                    "<|user|>q1<|end|>\n<|assistant|>a1<|end|>\n<|user|>q2<|end|>\n"
                    "<|assistant|>",
                    "<think>r2</think>a2<|end|>",
                    "\n",
                ],
            ],
        ),
        (
            LATEST_REASONING,
            REASONED_CALLS,
            [
                [
                    "<|user|>Rain?<|end|>\n<|assistant|>",
                    f"<think>r1</think>{CALLED}<|end|>",
                    "\n<|tool|>dry<|end|>\n<|assistant|>",
                    "<think>r2</think>No.<|end|>",
                    "\n",
                ]
            ],
        ),
        (
            LATEST_REASONING,
            [*WITH_TOOLS, *TURNS[3:]],
            [
                [
                    "<|user|>Rain?<|end|>\n<|assistant|>",
                    f"<think></think>{CALLED}<|end|>",
                ],
                [
                    f"<|user|>Rain?<|end|>\n<|assistant|>{CALLED}<|end|>\n<|tool|>dry"
                    "<|end|>\n<|assistant|>",
                    "<think></think>No.<|end|>",
                ],
                [
                    f"<|user|>Rain?<|end|>\n<|assistant|>{CALLED}<|end|>\n<|tool|>dry"
                    "<|end|>\n<|assistant|>No.<|end|>\n<|user|>Sure?<|end|>\n"
                    "<|assistant|>",
                    "<think></think> Yes.<|end|>",
                    "\n",
                ],
            ],
        ),
        (
            END_OF_EVERY_TEXT,
            TURNS[1:],
            [
                [
                    "<|user|>What does it do?<|end|>\n<|assistant|>",
                    "It wraps text.<|end|>",
                    "\n<|user|>Sure?<|end|>\n<|assistant|>",
                    " Yes.<|end|>",
                    "\n<|endoftext|>",
                ]
            ],
        ),
        (
            OPENED_REASONING,
            [
                REASONED[0],
                {"role": "assistant", "content": "<think>\nr1\n</think>\n\na1"},
                *REASONED[2:],
                *TURNS[3:],
            ],
            [
                [
                    "<|user|>q1<|end|><|assistant|><think>\n",
                    "r1\n</think>\n\na1<|end|>",
                ],
                [
                    "<|user|>q1<|end|><|assistant|>\n\na1<|end|><|user|>q2<|end|>"
                    "<|assistant|><think>\n",
                    "r2\n</think>\n\na2<|end|>",
                ],
                [
                    "<|user|>q1<|end|><|assistant|>\n\na1<|end|><|user|>q2<|end|>"
                    "<|assistant|>a2<|end|><|user|>Sure?<|end|><|assistant|><think>\n",
                    "\n</think>\n\n Yes.<|end|>",
                ],
            ],
        ),
        (
            OTHER_LAST_END,
            [*REASONED_CALLS, *TURNS[3:]],
            [
                [
                    "<|user|>Rain?<|end|><|assistant|>",
                    f"#r1{CALLED}<|pad|>",
                    "<|tool|>dry<|end|><|assistant|>",
                    "#r2!No.<|endoftext|>",
                ],
                [
                    f"<|user|>Rain?<|end|><|assistant|>{CALLED}<|pad|><|tool|>dry<|end|>"
                    "<|assistant|>!No.<|end|><|user|>Sure?<|end|><|assistant|>",
                    "#! Yes.<|endoftext|>",
                ],
            ],
        ),
    ],
)
def test_each_turn_follows_what_a_model_reads_at_generation(
    templated: Any, template: str, messages: list[Any], rows: list[list[str]]
) -> None:
    chat = templated(template)
    used = prepare_conversations([{"id": "a", "messages": messages}], chat, 1000).used
    assert [[text for text, _ in decoded_mask(chat, row)] for row in used] == rows
    assert [[trained for _, trained in decoded_mask(chat, row)] for row in used] == [
        [number % 2 == 1 for number in range(len(row))] for row in rows
    ]
    counts = counts_of(used)
    answers = sum(message["role"] == "assistant" for message in messages)
    assert (counts.answers, counts.end_of_turn_share) == (answers, 1.0)
    # Each trained turn follows the ids of the prompt that a model is asked with.
    places = [
        place
        for place, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    for row in chat.rows(messages):
        tokens = chat.tokens(row)
        for turn in set(tokens.turns.tolist()) - {0}:
            prompt = chat.encode(messages[: places[turn - 1]], prompt=True).ids.tolist()
            assert tokens.ids[: (tokens.turns == turn).argmax()].tolist() == prompt


def test_rows_of_a_changed_conversation_are_trained_and_counted_by_turn(
    templated: Any,
) -> None:
    chat = templated(LATEST_REASONING)
    examples = [{"id": "a", "messages": REASONED}]

    def trained(train_on: Any, length: int = 1000, **changes: Any) -> list[str]:
        messages = [REASONED[0], {**REASONED[1], **changes}, *REASONED[2:]]
        used = prepare_conversations(
            [{"id": "a", "messages": messages}], chat, length, train_on
        ).used
        return [
            text for row in used for text, learned in decoded_mask(chat, row) if learned
        ]

    both = ["<think>r1</think>a1<|end|>", "<think>r2</think>a2<|end|>"]
    assert trained("assistant") == both
    assert trained("last") == both[1:]
    assert trained("assistant", trained=False) == both[1:]
    (reason,) = prepare_conversations(
        examples, chat, 1000, "all"
    ).counts.unrenderable_reasons
    assert "train_on: assistant" in reason
    # The second row has no room for its answer: the example is used, and truncated.
    question = {"role": "user", "content": "word " * 40}
    messages = [*REASONED[:2], question, REASONED[3]]
    encoded = prepare_conversations([{"id": "a", "messages": messages}], chat, 40)
    assert [(row.truncated, row.answers) for row in encoded.used] == [(True, 1)]
    assert (encoded.counts.unrenderable, encoded.counts.dropped) == (0, 0)


def test_preference_is_scored_on_the_turn_that_a_model_would_write(
    templated: Any,
) -> None:
    chat = templated(OTHER_LAST_END)
    example = {"id": "a", "prompt": REASONED[:3], "tools": []}
    answers = {"chosen": REASONED[3:], "rejected": [TURNS[2]]}
    (pair,) = encode_pairs([{**example, **answers}], chat, 1000).used
    for row, answer in zip(
        pair.conversations, ("#r2!a2", "#!It wraps text."), strict=True
    ):
        assert decoded_mask(chat, row) == [
            (
                "<|user|>q1<|end|><|assistant|>!a1<|end|><|user|>q2<|end|><|assistant|>",
                False,
            ),
            (f"{answer}<|endoftext|>", True),
        ]
    answers["chosen"] = [*REASONED[3:], *REASONED[2:]]
    encoded = encode_pairs([{**example, **answers}], chat, 1000)
    assert (encoded.used, list(encoded.mismatches)) == ([], ["a"])


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        # Reasoning is closed in the prompt, but not in the answer, and the reverse.
        (
            LATEST_REASONING.replace(
                "'<|assistant|>' -", "'<|assistant|><think></think>' -"
            ),
            REASONED,
            "message 2 .*enable_thinking",
        ),
        (
            PLAIN_TEMPLATE.replace("{%- if add", "{%- if false and add"),
            TURNS[1:3],
            "message 2",
        ),
    ],
)
def test_answer_behind_another_text_than_the_prompt_is_rejected(
    templated: Any, template: str, messages: list[Any], reason: str
) -> None:
    with pytest.raises(TemplateMismatchError, match=reason):
        templated(template).rows(messages)


def test_thinking_is_switched_in_front_of_the_template(templated: Any) -> None:
    template = LATEST_REASONING.replace(
        "'<|assistant|>' -",
        "'<|assistant|>' + ('' if enable_thinking else '<think></think>') -",
    )
    for enabled, messages in (("true", REASONED[:2]), ("false", TURNS[1:3])):
        chat = templated("{%- set enable_thinking = " + enabled + " -%}" + template)
        (row,) = prepare_conversations(
            [{"id": "a", "messages": messages}], chat, 500
        ).used
        assert "<think></think>" not in decoded_mask(chat, row)[1][0]
        with pytest.raises(TemplateMismatchError):
            templated("{%- set enable_thinking = false -%}" + template).rows(
                REASONED[:2]
            )


def test_turns_end_where_the_template_ends_answers_and_calls(templated: Any) -> None:
    assert templated(OTHER_LAST_END).stops == {0, 1}
    assert templated(END_OF_EVERY_TEXT).stops == {0, 5}


def test_template_that_refuses_a_system_message_is_used_without(templated: Any) -> None:
    template = END_OF_EVERY_TEXT.replace(
        "{{ '<|' +",
        "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ '<|' +",
    )
    check_template(
        template,
        [END_OF_TURN, "<|user|>", "<|assistant|>", "<|system|>"],
        eos_token="</s>",
    )
    assert templated(template).stops == {0, 5}
    with pytest.raises(ChatError, match="no system"):
        templated(template).rows(TURNS)


def test_arguments_of_calls_are_written_for_templates_that_take_text(
    templated: Any,
) -> None:
    template = LATEST_REASONING.replace(
        "call.function | tojson", "call.function.name + ' ' + call.function.arguments"
    )
    assert 'weather {"city": "Zürich"}<|end|>' in templated(template).text(
        WITH_TOOLS[:2]
    )


def test_templates_have_the_start_of_text(chat: Chat, tmp_path: Path) -> None:
    folder = shutil.copytree(chat.folder, tmp_path / "started")
    config = read_json(folder / "tokenizer_config.json")
    write_json(folder / "tokenizer_config.json", {**config, "bos_token": "<|pad|>"})
    started = Chat(folder)
    assert (started.start_of_text, chat.start_of_text) == (1, 0)
    assert started.encode(TURNS).ids[0] == 1
    assert chat.encode(TURNS).ids[0] == 0
    assert (started.encode(TURNS).ids[1:] == chat.encode(TURNS).ids[1:]).all()


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
    assert tokens.truncated_share == 0.5
    assert tokens.trained_tokens == sum(
        example.trained.sum() for example in encoded.used
    )
    assert [len(example.ids) for example in encoded.used][1] == 40


def test_rows_are_padded_on_the_right_to_the_needed_length(chat: Chat) -> None:
    used = prepare_conversations(
        [{"id": "a", "messages": TURNS[1:3]}, {"id": "b", "messages": TURNS}],
        chat,
        1000,
    ).used
    ids = padded(used, chat.pad, 1000)
    assert ids.shape == (2, 64)
    length = len(used[0].ids)
    assert ids[0, :length].tolist() == used[0].ids.tolist()
    assert set(ids[0, length:].tolist()) == {chat.pad}
    assert padded(used[:1], chat.pad, 50).shape == (1, 50)
