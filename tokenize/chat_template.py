"""Chat templates: gristmill's special tokens and template, and the rendering of other
models' templates.

A template is Jinja as transformers reads it, with marks around the assistant's text:
`{% generation %} ... {% endgeneration %}` encloses the trained part (transformers'
`return_assistant_tokens_mask`). Its functions and filters equal those of transformers.

A template may write the date (`strftime_now`, in the templates of Llama 3.2 and
gpt-oss). Training data must not depend on the day, so stages render TEMPLATE_DATE;
`generate` and `chat` use the clock.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from gristmill.dataprep.examples.conversations import Message
from gristmill.tokenize.bounded_jinja import (
    BoundedEnvironment,
    refuse_widths,
    render,
)

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
END_OF_TURN = "<|end|>"
ROLES = ("system", "user", "assistant")
SPECIAL_TOKENS = (END_OF_TEXT, PAD, *(f"<|{role}|>" for role in ROLES), END_OF_TURN)
"""Special tokens of trained tokenizers in the order of their ids, from 0."""

CHAT_TEMPLATE = """\
{%- set described = 'Tools: ' + tools | tojson if tools else '' -%}
{%- if described and messages[0]['role'] != 'system' -%}{{- '<|system|>\\n' + described + '<|end|>\\n' -}}{%- endif -%}
{%- for message in messages -%}
{{- '<|' + ('user' if message['role'] == 'tool' else message['role']) + '|>\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}
{{- message['content'] -}}
{%- for call in message['tool_calls'] or [] -%}
{{- ('\\n' if message['content'] or not loop.first else '') + '<tool_call>\\n' -}}
{{- call['function'] | tojson + '\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endgeneration -%}
{%- elif message['role'] == 'tool' -%}
{{- '<tool_response>\\n' + message['content'] + '\\n</tool_response><|end|>' -}}
{%- else -%}
{{- message['content'] + ('\\n\\n' + described if described and message['role'] == 'system' else '') + '<|end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
"""
"""Jinja, as transformers renders it: role, line break, content, end of turn, line
break. Every line break that counts is in a string, because transformers' `trim_blocks`
eats those of the template. `generation` marks what the assistant learns: its answer and
the end of its turn. Tools are described by the system; calls of them and their answers
are written in Hermes' form (Qwen2.5's template too), an answer as the user's turn.
"""


ChatMessage = Mapping[str, object]
"""Message of a conversation: `role`, `content`, and whatever else templates read."""
OPEN, CLOSE = "\x00<generation>\x00", "\x00</generation>\x00"
"""Text rendered for the marks; text that contains either is refused."""
PROBE: tuple[Message, ...] = (
    {"role": "system", "content": "Probe of the system."},
    {"role": "user", "content": "First probe of the user."},
    {"role": "assistant", "content": "First probe of the assistant."},
    {"role": "user", "content": "Second probe of the user."},
    {"role": "assistant", "content": "Second probe of the assistant."},
)
"""Conversation that every template must render."""
SPECIAL_FORM = re.compile(r"<\|[^<>|\s]+\|>")
"""Form of special tokens in the templates of Llama 3, Qwen, Phi and gristmill."""


TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
)
"""Errors of rendering: template expressions fail with Python's own errors."""


class TemplateRefusedError(ValueError):
    """A chat template that is unusable for training."""


class _GenerationMarks(Extension):
    """Block `{% generation %} ... {% endgeneration %}`: renders its content between
    OPEN and CLOSE.
    """

    tags = {"generation"}  # noqa: RUF012 - Jinja's own interface

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        """Parse one block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(
            self.call_method("_enclose"), [], [], body
        ).set_lineno(line)

    def _enclose(self, caller: Any) -> str:
        return OPEN + str(caller()) + CLOSE


TEMPLATE_DATE = datetime(2024, 7, 26)
"""Date of every template rendered by a stage: the default of Llama 3.2's template
without a clock.
"""
Clock = Callable[[], datetime]


def fixed_clock() -> datetime:
    """Constant clock of training and evaluation."""
    return TEMPLATE_DATE


def compile_template(text: str, clock: Clock = fixed_clock) -> jinja2.Template:
    """Compile a template as transformers does.

    Args:
        text: the template.
        clock: of `strftime_now`.

    Raises:
        jinja2.TemplateError: invalid Jinja.
    """

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON without Jinja's own escapes for HTML."""
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        refuse_widths(form)
        return clock().strftime(form)

    environment = BoundedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationMarks, loopcontrols],
    )
    environment.add_filters({"tojson": tojson})
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
    }
    return environment.from_string(text)


def render_text(
    template: jinja2.Template,
    messages: Sequence[ChatMessage],
    prompt: bool = False,
    **names: Any,
) -> str:
    """Render a conversation, with OPEN and CLOSE for the template's marks; arguments as
    in `render_segments`.

    Templates use several names for reasoning; transformers sets two of them
    (`_alias_reasoning_fields`).

    Raises:
        jinja2.TemplateError: the template refuses the messages.
    """
    aliased = [
        {"thinking": message["reasoning_content"], **message}
        if message.get("reasoning_content")
        else message
        for message in messages
    ]
    names = {"tools": None, "documents": None, **names}
    return render(template, messages=aliased, add_generation_prompt=prompt, **names)


def render_segments(
    template: jinja2.Template,
    messages: Sequence[ChatMessage],
    prompt: bool = False,
    **names: Any,
) -> list[tuple[str, bool]]:
    """Render a conversation: its parts in order, none empty, each the text and whether
    the assistant generates it.

    A template without marks, like those of most models, is rendered for every prefix of
    the conversation: the assistant generates the text that an answer adds to the
    generation prompt.

    Args:
        template: of `compile_template`.
        messages: the template's `messages`.
        prompt: end with the generation prompt.
        names: other variables of the template, such as `eos_token`.

    Raises:
        jinja2.TemplateError: the template refuses the messages.
    """
    text = render_text(template, messages, prompt, **names)
    if OPEN not in text:
        text = _marked(template, messages, text, **names)
    segments = []
    generated = False
    for part in re.split(f"({re.escape(OPEN)}|{re.escape(CLOSE)})", text):
        if part in (OPEN, CLOSE):
            generated = part == OPEN
        elif part:
            segments.append((part, generated))
    return segments


def _marked(
    template: jinja2.Template,
    messages: Sequence[ChatMessage],
    text: str,
    **names: Any,
) -> str:
    """Mark the answers of a rendered conversation, up to the end of each turn.

    The text is unchanged if the template renders a prefix differently when messages
    follow.
    """
    marked = ""
    position = 0
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt_text = render_text(template, messages[:number], prompt=True, **names)
        answered_text = render_text(template, messages[: number + 1], **names).rstrip()
        if not (
            text.startswith(answered_text)
            and answered_text.startswith(prompt_text)
            and len(prompt_text) >= position
        ):
            return text
        marked += (
            text[position : len(prompt_text)]
            + OPEN
            + answered_text[len(prompt_text) :]
            + CLOSE
        )
        position = len(answered_text)
    return marked + text[position:]


def as_plain_jinja(text: str) -> str:
    """Template for renderers without `{% generation %}`.

    `{% if true %}` replaces the marks, so that blanks around them are trimmed as
    before.
    """
    return re.sub(
        r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})",
        lambda match: f"{match[1]}{'endif' if match[2] else 'if true'}{match[3]}",
        text,
    )


def check_template(text: str, special_tokens: Collection[str], **names: Any) -> None:
    """Render a conversation with a template, and refuse templates that are unusable for
    training.

    Args:
        text: the template.
        special_tokens: those of the tokenizer.
        names: variables of the template, such as `eos_token`.

    Raises:
        TemplateRefusedError: it does not compile or render, marks no answer, loses a
            message, has a generation prompt that differs from the text before its
            answers, or writes a special token that the tokenizer lacks.
    """
    try:
        template = compile_template(text)
        segments = render_segments(template, PROBE, **names)
        prompt = "".join(
            part
            for part, _ in render_segments(template, PROBE[:-1], prompt=True, **names)
        )
    except jinja2.TemplateError as error:
        line = (
            f"line {error.lineno}: "
            if isinstance(error, jinja2.TemplateSyntaxError)
            else ""
        )
        raise TemplateRefusedError(
            f"it cannot be rendered: {line}{error.message}"
        ) from error
    except Exception as error:
        # Jinja runs arbitrary expressions, which fail with Python's own errors
        raise TemplateRefusedError(
            f"it cannot be rendered: {type(error).__name__}: {error}"
        ) from error
    full_text = "".join(part for part, _ in segments)
    answers = [part for part, generated in segments if generated]
    if len(answers) != 2 or any(
        message["content"] not in answer
        for message, answer in zip(PROBE[2::2], answers, strict=True)
    ):
        raise TemplateRefusedError(
            "it does not mark what the assistant says, and changes what "
            "stands before an answer when more follows: put each answer and the end of "
            "its turn between "
            "{% generation %} and {% endgeneration %}"
        )
    if lost_roles := [
        message["role"] for message in PROBE if message["content"] not in full_text
    ]:
        raise TemplateRefusedError(f"it leaves out the text of the {lost_roles[0]}")
    if not full_text.startswith(prompt):
        raise TemplateRefusedError(
            "with add_generation_prompt it ends otherwise than the text in front of "
            "an answer "
            "begins, so that a model would be asked in another way than it was trained"
        )
    if unknown_tokens := sorted(
        set(SPECIAL_FORM.findall(full_text)) - set(special_tokens)
    ):
        raise TemplateRefusedError(
            f"it writes {', '.join(unknown_tokens)}, which the tokenizer has no "
            "special token for; add it to tokenizer.special_tokens"
        )
