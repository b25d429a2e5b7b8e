"""Published chat templates, rendered as by transformers."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import pytest
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.filters import FILTERS

from gristmill.tokenize.chat_template import (
    TEMPLATE_DATE,
    compile_template,
    render_segments,
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
    try:
        rendered, _ = transformers_templates.render_jinja_template(
            [messages], chat_template=template, **names, **NAMES
        )
    except (jinja2.TemplateError, TypeError):
        return None
    return str(rendered[0])


def render_by_gristmill(
    template: jinja2.Template, conversation: dict[str, Any]
) -> str | None:
    """Render the text that is trained on; None if the template rejects the
    conversation.
    """
    names = {
        key: value
        for key, value in conversation.items()
        if key not in ("messages", "add_generation_prompt")
    }
    prompt = conversation.get("add_generation_prompt", False)
    try:
        return "".join(
            text
            for text, _ in render_segments(
                template, conversation["messages"], prompt, **names, **NAMES
            )
        )
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
    assert render_segments(compile_template(template), [])[0][0] == "26 Jul 2024"
    assert (
        render_segments(compile_template(template, lambda: datetime(2031, 2, 3)), [])[
            0
        ][0]
        == "03 Feb 2031"
    )
    with pytest.raises(jinja2.TemplateError):
        render_segments(compile_template("{{ strftime_now('%9999999Y') }}"), [])
