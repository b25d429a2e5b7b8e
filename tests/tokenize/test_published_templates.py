"""Published chat templates, rendered as by transformers."""

from __future__ import annotations

import itertools
import json
import random
from copy import deepcopy
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import pytest
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.filters import FILTERS

from gristmill.tokenize.chat_template import (
    CLOSE,
    OPEN,
    SPECIAL_FORM,
    TEMPLATE_DATE,
    PromptMismatchError,
    check_template,
    compile_template,
    render_rows,
    render_text,
)

transformers_templates = pytest.importorskip("transformers.utils.chat_template_utils")
trl = pytest.importorskip("trl")

FOLDER = Path(trl.__file__).parent / "chat_templates"
"""TRL carries the templates of the models that it tests, as their configurations have
them.
"""
PUBLISHED = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted(FOLDER.glob("*.jinja"))
    if not path.stem.endswith("_training")
}
PARTS_ONLY = {"llava_next"}
"""Templates that reject string contents."""
MEDIA_ONLY = {"idefics3", "smolvlm"}
"""Templates that omit string contents."""
FAMILIES = ("qwen3", "phi3", "deepseekv3", "nemotron_3_nano", "gptoss", "llama3")
TEXT_TEMPLATES = [
    pytest.param(name, marks=[] if name in FAMILIES else pytest.mark.slow)
    for name in sorted({*PUBLISHED} - PARTS_ONLY - MEDIA_ONLY)
]
NAMES = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Forecast for a city, <b>in Zürich</b> too.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "A city."},
                "days": {"type": "integer"},
            },
            "required": ["city"],
        },
    },
}
CALL = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}},
}
PLAIN = [
    {"role": "user", "content": " Rain? "},
    {"role": "assistant", "content": "No."},
]
CALLING = [
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "dry", "name": "weather", "tool_call_id": "call00000"},
    {"role": "assistant", "content": "No."},
]
REASONED = [
    PLAIN[0],
    {"role": "assistant", "content": "No.", "reasoning_content": "It is summer."},
]
SYSTEM = {"role": "system", "content": "Be brief."}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "plain": {"messages": PLAIN},
    "system": {"messages": [SYSTEM, *PLAIN, *PLAIN]},
    "prompt": {"messages": [SYSTEM, PLAIN[0]], "add_generation_prompt": True},
    "calls": {"messages": CALLING, "tools": [TOOL]},
    "reasoning": {"messages": [SYSTEM, *REASONED]},
}


class Clock(datetime):
    """A frozen clock for transformers."""

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return TEMPLATE_DATE


def render_by_transformers(template: str, conversation: dict[str, Any]) -> str | None:
    """Render with transformers; None if the template rejects the conversation."""
    messages, names = (
        conversation["messages"],
        {key: value for key, value in conversation.items() if key != "messages"},
    )
    for spelled in (messages, with_json_arguments(messages)):
        try:
            rendered, _ = transformers_templates.render_jinja_template(
                [spelled], chat_template=template, **names, **NAMES
            )
        except TypeError:
            continue
        except jinja2.TemplateError:
            return None
        return str(rendered[0])
    return None


def with_json_arguments(messages: list[Any]) -> list[Any]:
    """Messages with the arguments of calls as OpenAI's API has them."""
    spelled = deepcopy(messages)
    for message in spelled:
        for call in message.get("tool_calls", ()):
            function = call["function"]
            function["arguments"] = json.dumps(
                function["arguments"], ensure_ascii=False
            )
    return spelled


def render_by_gristmill(
    template: jinja2.Template, conversation: dict[str, Any]
) -> str | None:
    """Render with gristmill; None if the template rejects the conversation."""
    names = {
        key: value
        for key, value in conversation.items()
        if key not in ("messages", "add_generation_prompt")
    }
    prompt = conversation.get("add_generation_prompt", False)
    try:
        text = render_text(template, conversation["messages"], prompt, **names, **NAMES)
        return text.replace(OPEN, "").replace(CLOSE, "")
    except (jinja2.TemplateError, TypeError):
        return None


def test_at_least_twenty_templates_are_compared() -> None:
    assert len(PUBLISHED) >= 20


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_template_renders_as_by_transformers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_templates, "datetime", Clock)
    compiled = compile_template(PUBLISHED[name])
    rendered = {
        key: render_by_gristmill(compiled, conversation)
        for key, conversation in CONVERSATIONS.items()
    }
    assert rendered == {
        key: render_by_transformers(PUBLISHED[name], conversation)
        for key, conversation in CONVERSATIONS.items()
    }
    assert (rendered["plain"] is None) == (name in PARTS_ONLY)


@pytest.mark.parametrize("name", TEXT_TEMPLATES)
def test_published_template_is_accepted(name: str) -> None:
    special = SPECIAL_FORM.findall(PUBLISHED[name])
    check_template(PUBLISHED[name], special, **NAMES)


def random_conversation(generator: random.Random) -> dict[str, Any]:
    """Turns of users, the assistant and tools, with and without reasoning."""
    numbers = itertools.count()
    has_tools, has_reasoning = generator.random() < 0.5, generator.random() < 0.5

    def answer(**more: Any) -> dict[str, Any]:
        reasons = has_reasoning and generator.random() < 0.8
        reasoning = {"reasoning_content": f"reason {next(numbers)}"} if reasons else {}
        return {"role": "assistant", "content": "", **reasoning, **more}

    messages = [SYSTEM] if generator.random() < 0.5 else []
    for _ in range(generator.randint(1, 4)):
        messages.append({"role": "user", "content": f"question {next(numbers)}"})
        while has_tools and generator.random() < 0.5:
            messages += [answer(tool_calls=[CALL]), CALLING[2]]
        messages.append(answer(content=f"answer {next(numbers)}"))
    return {"messages": messages, "tools": [TOOL] if has_tools else None}


@pytest.mark.parametrize("name", TEXT_TEMPLATES)
def test_each_turn_is_generated_once_and_follows_the_prompt_of_transformers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_templates, "datetime", Clock)
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    compiled = compile_template(PUBLISHED[name])
    for _ in range(6):
        conversation = random_conversation(generator)
        messages = conversation["messages"]
        try:
            rows = render_rows(compiled, **conversation, **NAMES)
        except (jinja2.TemplateError, PromptMismatchError):
            # reasoning for a prompt that closes it, a role that the template refuses
            continue
        places = [
            place
            for place, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
        assert [turn for row in rows for _, turn in row if turn] == [
            *range(1, len(places) + 1)
        ]
        for row in rows:
            before = ""
            for text, turn in row:
                if turn:
                    place = places[turn - 1]
                    assert before == render_by_transformers(
                        PUBLISHED[name],
                        {
                            **conversation,
                            "messages": messages[:place],
                            "add_generation_prompt": True,
                        },
                    )
                    assert messages[place]["content"] in text
                before += text


def test_functions_have_the_names_of_those_of_transformers() -> None:
    def own_names(environment: jinja2.Environment) -> set[str]:
        functions = environment.globals.items()
        return {
            name
            for name, value in functions
            if DEFAULT_NAMESPACE.get(name) is not value
        }

    theirs = transformers_templates._compile_jinja_template("").environment
    assert own_names(compile_template("").environment) == own_names(theirs)
    changed = {
        name for name, value in theirs.filters.items() if FILTERS.get(name) is not value
    }
    assert changed == {"tojson"}


def test_template_date_comes_from_the_clock() -> None:
    template = "{{ strftime_now('%d %b %Y') }}"
    assert render_text(compile_template(template), []) == "26 Jul 2024"
    assert (
        render_text(compile_template(template, lambda: datetime(2031, 2, 3)), [])
        == "03 Feb 2031"
    )
    with pytest.raises(jinja2.TemplateError):
        render_text(compile_template("{{ strftime_now('%9999999Y') }}"), [])
