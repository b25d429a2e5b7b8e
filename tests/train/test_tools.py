"""Tools for models: call formats, responses, and their tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from gristmill.dataprep.examples.read_examples import prompt_example
from gristmill.dataprep.rewards.answer_checks import own_reward, record_columns
from gristmill.mixtures.objectives.rl_tools import AnyTool, Tool
from gristmill.mixtures.schema.rl import OwnReward, Rl, columns_of
from gristmill.mixtures.user_code import Own, name_of, take_code
from gristmill.tokenize.chat_template import CHAT_TEMPLATE
from gristmill.train.data.conversation_tokens import Chat, ChatError
from gristmill.train.generation.sampling import Sampling
from gristmill.train.generation.scheduler import Request
from gristmill.train.rl.multi_turn import CUT, Asked, Dialogue
from gristmill.train.rl.rewards import text_of, turns_of
from gristmill.train.rl.rollout import Generated
from gristmill.train.rl.tools.call_format import Call, CallFormat
from gristmill.train.rl.tools.toolbox import Toolbox, ToolError
from tests.needs_sandbox import skip_without_sandbox

LLAMA = """\
{%- if tools -%}{{ 'Tools: ' + tools | tojson + '<|end|>' }}{%- endif -%}
{%- for m in messages -%}
{{- '<|' + ('user' if m['role'] == 'tool' else m['role']) + '|>' -}}
{%- if m['tool_calls'] -%}
{%- for call in m['tool_calls'] -%}
{{- '{"name": "' + call['function']['name'] + '", "parameters": ' + call['function']['arguments'] | tojson + '}' -}}
{%- endfor -%}
{%- else -%}{{- m['content'] -}}{%- endif -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""
"""Calls in the format of Llama 3.1: bare JSON with `parameters`, without generation
marks.
"""
WITHOUT_TOOLS = """\
{%- for m in messages -%}{{- '<|' + m['role'] + '|>' + m['content'] + '<|end|>' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def tools_of(*tools: Any) -> tuple[AnyTool, ...]:
    return Rl.model_validate(
        {
            "data": [{"path": "a.jsonl"}],
            "rewards": [{"kind": "exact"}],
            "steps": 1,
            "tools": list(tools),
        }
    ).tools


def own_tool(
    folder: Path, source: str, name: str = "tool", **more: Any
) -> dict[str, Any]:
    (folder / "own.py").write_text(source)
    return {
        "use": take_code(
            Own.model_validate({"use": f"./own.py:{name}"}).use, folder
        ).by_value(),
        **more,
    }


def total() -> dict[str, Any]:
    """A tool that adds the numbers of a text, such as `1+1`."""
    source = (
        "def total(terms: str) -> str:\n"
        '    "Adds numbers."\n'
        '    return str(sum(map(int, terms.split("+"))))\n'
    )
    with TemporaryDirectory() as folder:
        return own_tool(Path(folder), source, "total")


@pytest.fixture(scope="module")
def chat(tokenizer_folder: Path) -> Chat:
    return Chat(tokenizer_folder)


@pytest.fixture
def with_template(tokenizer_folder: Path, tmp_path: Path) -> Any:
    def make_chat(template: str) -> Chat:
        shutil.copytree(tokenizer_folder, tmp_path / "chat", dirs_exist_ok=True)
        (tmp_path / "chat" / "chat_template.jinja").write_text(template)
        return Chat(tmp_path / "chat")

    return make_chat


def test_tools_have_short_and_long_forms() -> None:
    tools = tools_of(
        "python",
        {"python": {"seconds": 2}, "name": "quick"},
        {"kind": "python", "name": "slow", "seconds": 9},
    )
    assert [name_of(tool) for tool in tools] == ["python", "quick", "slow"]
    assert [getattr(tool, "seconds", None) for tool in tools] == [5, 2, 9]
    for tools_section, message in (
        (["python", "python"], "python"),
        ([{"pyhton": {}}], "Unable to extract tag"),
        ([{"python": {"second": 1}}], "second"),
    ):
        with pytest.raises(ValueError, match=message):
            tools_of(*tools_section)


def parsed_calls(form: CallFormat, text: str) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, dict(call.arguments)) for call in form.calls(text)]


def test_calls_are_parsed_in_the_format_of_the_template(
    chat: Chat, with_template: Any
) -> None:
    for form in (CallFormat(chat), CallFormat(with_template(WITHOUT_TOOLS))):
        text = (
            'Hm.\n<tool_call>\n{"name": "a", "arguments": {"x": '
            '"}"}}\n</tool_call>\n<tool_call>{"name": "b"}'
        )
        assert parsed_calls(form, text) == [("a", {"x": "}"}), ("b", {})]
        assert parsed_calls(form, "It is 3.") == []
    assert CallFormat(chat).templated
    llama = CallFormat(with_template(LLAMA))
    assert llama.templated
    assert parsed_calls(llama, '{"name": "a", "parameters": {"x": 1}}') == [
        ("a", {"x": 1})
    ]
    assert parsed_calls(llama, 'It is {"name": "a"}') == []


def test_invalid_call_has_its_problem(chat: Chat) -> None:
    form = CallFormat(chat)
    for text, problem in (
        ('{"name": "a"', "JSON"),
        ("[1]", "'name'"),
        ('{"name": 3}', "object"),
        ('{"name": "a", "arguments": 4}', "object"),
        ('{"name": "a", "arguments": "{"}', "JSON"),
        ("[" * 100_000, "nested"),
    ):
        (call,) = form.calls(f"<tool_call>\n{text}")
        assert problem in call.problem
    assert form.calls('<tool_call>{"name": "a", "arguments": "{\\"x\\": 2}"}') == [
        Call("a", {"x": 2})
    ]


def test_template_with_calls_that_are_not_json_is_rejected(with_template: Any) -> None:
    call_tokens = CHAT_TEMPLATE.replace(
        "call['function'] | tojson",
        "call['function']['name'] + (call['function']['arguments'] | tojson)",
    )
    with pytest.raises(ChatError, match="JSON"):
        CallFormat(with_template(call_tokens))


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, LLAMA])
def test_tokens_of_a_multi_turn_answer_equal_those_of_its_conversation(
    template: str, with_template: Any
) -> None:
    chat = with_template(template)
    form = CallFormat(chat)
    tools = Toolbox(tools_of(total()))
    descriptions = tools.descriptions(["total"])
    arguments = {"terms": "21 + 21"}
    call = {
        "id": "call00000",
        "type": "function",
        "function": {"name": "total", "arguments": arguments},
    }
    messages = [{"role": "user", "content": "21 + 21?"}]
    conversation = [
        *messages,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {
            "role": "tool",
            "name": "total",
            "tool_call_id": "call00000",
            "content": "42",
        },
        {"role": "assistant", "content": "It is 42."},
    ]
    tokens = chat.encode(conversation, tools=descriptions)
    prompt = form.prompt(messages, descriptions)
    (answer,) = Dialogue(chat, form, tools, 3, 50).answers(
        scripted(
            chat,
            [
                tokens.ids[tokens.turns == 1].tolist(),
                tokens.ids[tokens.turns == 2].tolist(),
            ],
        ),
        [Asked(Request(tuple(prompt), 200, chat.stops, Sampling()), tools.names)],
    )
    assert [*prompt, *answer.tokens] == tokens.ids[
        : len(prompt) + len(answer.tokens)
    ].tolist()
    drawn = np.array(answer.drawn)
    assert (tokens.turns[len(prompt) :][: len(drawn)] > 0).tolist() == drawn.tolist()
    assert answer.ended
    assert text_of(chat, answer) == "It is 42."
    assert [
        (
            used_call.turn,
            used_call.name,
            used_call.arguments,
            used_call.answer,
            used_call.failed,
        )
        for used_call in answer.used
    ] == [(1, "total", json.dumps(arguments), "42", False)]
    call_turn, tool_turn, last_turn = turns_of(chat, answer)
    assert (call_turn["tool_calls"][0]["function"]["name"], tool_turn["content"]) == (
        "total",
        "42",
    )
    assert last_turn == {"role": "assistant", "content": "It is 42."}


def scripted(
    chat: Chat,
    *answers: Sequence[Sequence[int]],
    requests_seen: list[Any] | None = None,
) -> Any:
    """Draw function that gives each request its scripted turns in order."""
    remaining = [[list(turn) for turn in turns] for turns in answers]
    places: dict[tuple[int, ...], int] = {}

    def draw(requests: Sequence[Request]) -> list[Generated]:
        generated = []
        for number, request in enumerate(requests):
            if requests_seen is not None:
                requests_seen.append(request)
            place = (
                places.setdefault(request.prompt[:3], number)
                if len(remaining) > 1
                else 0
            )
            tokens = remaining[place].pop(0)[: request.max_new_tokens]
            generated.append(
                Generated(tokens, bool(tokens) and tokens[-1] in chat.stops)
            )
        return generated

    return draw


def spoken(chat: Chat, text: str) -> list[int]:
    ids: list[int] = chat.tokenizer.encode(
        f"{text}<|end|>", add_special_tokens=False
    ).ids
    return ids


def call_tokens(chat: Chat, terms: str) -> list[int]:
    return spoken(
        chat,
        f'<tool_call>\n{{"name": "total", "arguments": {{"terms": "{terms}"}}}}\n</tool_call>',
    )


def dialogue(
    chat: Chat, turns: int = 3, answer_tokens: int = 50, *tools: Any
) -> Dialogue:
    return Dialogue(
        chat,
        CallFormat(chat),
        Toolbox(tools_of(*(tools or (total(),)))),
        turns,
        answer_tokens,
    )


def make_request(
    chat: Chat, max_new_tokens: int = 400, offered: tuple[str, ...] = ("total",)
) -> Asked:
    return Asked(
        Request(tuple(spoken(chat, "Count.")), max_new_tokens, chat.stops, Sampling()),
        offered,
    )


def test_tokens_of_a_turn_are_not_encoded_again(chat: Chat) -> None:
    """A call of single-byte tokens, which no encoder gives, is kept when the next turn
    is drawn.
    """
    call = call_tokens(chat, "1+1")
    end = call.pop()
    single = [
        chat.tokenizer.encode(letter, add_special_tokens=False).ids[0]
        for letter in chat.decode(call)
    ]
    assert len(single) > len(call)
    requests_seen: list[Request] = []
    (answer,) = dialogue(chat).answers(
        scripted(
            chat, [[*single, end], spoken(chat, "2")], requests_seen=requests_seen
        ),
        [make_request(chat)],
    )
    assert answer.tokens[: len(single) + 1] == [*single, end]
    assert requests_seen[1].prompt[
        : len(requests_seen[0].prompt) + len(single) + 1
    ] == (
        *requests_seen[0].prompt,
        *single,
        end,
    )
    assert requests_seen[1].max_new_tokens == 400 - (
        len(requests_seen[1].prompt) - len(requests_seen[0].prompt)
    )
    assert answer.used[0].answer == "2"


def test_dialogue_is_cut_after_its_turns_or_tokens(chat: Chat) -> None:
    call = call_tokens(chat, "1+1")
    (answer,) = dialogue(chat, turns=2).answers(
        scripted(chat, [call, call, call]), [make_request(chat)]
    )
    assert (len(answer.turns), len(answer.used), answer.ended) == (2, 1, False)
    assert answer.turns[-1] == call
    (answer,) = dialogue(chat).answers(
        scripted(chat, [call]), [make_request(chat, max_new_tokens=len(call) + 5)]
    )
    assert (answer.tokens, answer.drawn, answer.ended) == (
        call,
        (True,) * len(call),
        False,
    )
    assert [used_call.answer for used_call in answer.used] == ["2"]
    (answer,) = dialogue(chat).answers(
        scripted(chat, [call]), [make_request(chat, max_new_tokens=len(call) - 1)]
    )
    assert (answer.tokens, answer.used, answer.ended) == (call[:-1], (), False)


@pytest.mark.slow
def test_errors_are_responses_and_long_responses_are_cut(
    chat: Chat, tmp_path: Path
) -> None:
    custom_tool = own_tool(
        tmp_path,
        '''
import time

def tool(size: int, unit: str = "m", *, factor=1):
    """Repeats grist.

    More that the model need not know."""
    if size < 0:
        raise ValueError("too small")
    if size > 1000:
        time.sleep(60)
    if size == 7:
        return {1, 2}
    return {"text": "grist " * size + "<|end|>"} if unit == "m" else "<|" + "<|end|>" + "end|>"
''',
        time_limit_seconds=0.2,
    )
    box = Toolbox(tools_of(total(), custom_tool))
    assert box.descriptions(["tool"])[0]["function"] == {
        "name": "tool",
        "description": "Repeats grist.",
        "parameters": {
            "type": "object",
            "properties": {
                "size": {"type": "integer"},
                "unit": {"type": "string"},
                "factor": {"type": "string"},
            },
            "required": ["size"],
        },
    }
    offered = ("tool", "total")
    for call, answer in (
        (Call("tool", {"size": -1}), "error: ValueError: too small"),
        (
            Call("tool", {"size": 7}),
            "error: what it returned is neither text nor JSON: set",
        ),
        (Call("tool", {}), "error: tool takes size, unit, factor; 'size' is missing"),
        (
            Call("tool", {"size": 1, "colour": "red"}),
            "error: tool takes size, unit, factor; it has no 'colour'",
        ),
        (
            Call("mill", {}),
            "error: there is no tool 'mill'; there are tool, total",
        ),
        (Call("", {}, "the call is no JSON: x"), "error: the call is no JSON: x"),
    ):
        (used,) = box.answer(1, [(call, offered)])
        assert (used.answer, used.failed) == (answer, True)
    (timed_out,) = box.answer(1, [(Call("tool", {"size": 2000}), offered)])
    assert timed_out.failed
    assert timed_out.answer.startswith("error: TimeLimitError")
    long_call = spoken(
        chat, '<tool_call>{"name": "tool", "arguments": {"size": 100}}</tool_call>'
    )
    special_call = spoken(
        chat,
        '<tool_call>{"name": "tool", "arguments": {"size": '
        '1, "unit": "s"}}</tool_call>',
    )
    conversation = Dialogue(chat, CallFormat(chat), box, 3, 8)
    (answer,) = conversation.answers(
        scripted(chat, [long_call, special_call, spoken(chat, "So.")]),
        [make_request(chat, offered=offered)],
    )
    assert answer.used[0].answer.endswith(CUT)
    assert len(chat.tokenizer.encode(answer.used[0].answer.removesuffix(CUT)).ids) <= 9
    assert answer.used[1].answer == ""  # empty without its special tokens
    template_tokens = [
        token
        for token, drawn in zip(answer.tokens, answer.drawn or (), strict=True)
        if not drawn
    ]
    # those of the template
    assert chat.decode(template_tokens, special=True).count("<|end|>") == 2


def test_reward_with_turns_receives_the_messages_of_each_answer(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def called(completions, turns): return [float(len(messages)) for messages "
        "in turns]\n"
        "def as_in_trl(completions, **others): return [float(len(others))]\n"
    )

    def rewards(name: str, **more: Any) -> list[float]:
        use = take_code(Own.model_validate({"use": f"./own.py:{name}"}).use, tmp_path)
        return own_reward(OwnReward.model_validate({"use": use.by_value()}))(
            ["q"], ["a"], {}, **more
        )

    assert rewards(
        "called",
        turns=[[{"role": "assistant"}, {"role": "tool"}, {"role": "assistant"}]],
    ) == [3.0]
    assert rewards("called") == [1.0]
    assert rewards("as_in_trl") == [1.0]  # the prompts, as in TRL


RECORDS = [
    {"prompt": "2 + 2?", "answer": 4, "difficulty": {"level": 1}},
    {"prompt": "3 + 3?", "answer": 6, "difficulty": None},
]


@pytest.mark.parametrize(
    "source",
    [
        "def reward(prompts, completions, answer, **kwargs): return seen(answer, "
        "kwargs['difficulty'])",
        "def reward(completions, answer, difficulty, source='none'): return "
        "seen(answer, difficulty)",
        "def reward(completions, **columns): return seen(columns['answer'], "
        "columns['difficulty'])",
    ],
)
def test_reward_written_for_trl_receives_record_columns(
    source: str, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(
        "def seen(answer, difficulty):\n    assert difficulty == [{'level': 1}, "
        "None]\n    return answer\n" + source
    )
    use = take_code(Own.model_validate({"use": "./own.py:reward"}).use, tmp_path)
    reward = OwnReward.model_validate({"use": use.by_value()})
    examples = [
        prompt_example(record, columns=columns_of([reward])) for record in RECORDS
    ]
    columns = record_columns(
        reward, examples, [example["prompt"] for example in examples]
    )
    assert own_reward(reward)(["2 + 2?", "3 + 3?"], ["4", "6"], columns) == [4.0, 6.0]


def test_function_without_description_is_rejected(tmp_path: Path) -> None:
    for source, message in (
        ("def tool(x): return x", "docstring"),
        ('def tool(*x):\n    "It does."', "by name"),
    ):
        with pytest.raises(ToolError, match=message):
            Toolbox(tools_of(own_tool(tmp_path, source)))


def test_tool_of_an_unknown_class_is_rejected() -> None:
    with pytest.raises(TypeError, match="weather"):
        Toolbox([*tools_of(total()), Tool(name="weather")])


def test_calls_of_a_turn_are_answered_in_order(chat: Chat) -> None:
    skip_without_sandbox()
    turn = [
        *call_tokens(chat, "1+1")[:-1],
        *call_tokens(chat, "2+2")[:-1],
        *spoken(
            chat,
            '<tool_call>{"name": "python", "arguments": {"code": '
            '"print(3+3)"}}</tool_call>',
        ),
    ]
    conversation = dialogue(chat, 3, 50, total(), "python")
    request = make_request(chat, 600, ("total", "python"))
    (answer,) = conversation.answers(
        scripted(chat, [turn, spoken(chat, "Done.")]), [request]
    )
    assert [used_call.answer for used_call in answer.used] == ["2", "4", "6"]
    assert "2\n</tool_response>" in chat.decode(answer.tokens, special=True)


def test_calls_have_hermes_format_if_the_template_has_no_tools(
    with_template: Any,
) -> None:
    chat = with_template(WITHOUT_TOOLS)
    form = CallFormat(chat)
    assert not form.templated
    box = Toolbox(tools_of(total()))
    prompt = chat.decode(
        form.prompt([{"role": "user", "content": "2*3?"}], box.descriptions(box.names)),
        special=True,
    )
    assert prompt.startswith(
        '<|user|>Tools: [{"type": "function", "function": {"name": "total"'
    )
    assert prompt.endswith("</tool_call>\n\n2*3?<|end|><|assistant|>")
    assert chat.decode(form.answers(["6", "7"]), special=True) == (
        "<|user|><tool_response>\n6\n</tool_response>\n<tool_response>\n7\n</tool_response><|end|><|assistant|>"
    )
