"""Chat templates: Jinja as transformers reads it, with marks around what the assistant generates.

`{% generation %} ... {% endgeneration %}` encloses what is trained on (transformers' `return_assistant_tokens_mask`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from gristmill.tokenize.encoding.bounded_jinja import BoundedEnvironment, render

OPEN, CLOSE = "\x00<generation>\x00", "\x00</generation>\x00"
"""What the marks render to. Text that holds one of these is refused."""
PROBE = (
    {"role": "system", "content": "Probe of the system."}, {"role": "user", "content": "First probe of the user."},
    {"role": "assistant", "content": "First probe of the assistant."},
    {"role": "user", "content": "Second probe of the user."},
    {"role": "assistant", "content": "Second probe of the assistant."},
)
"""A conversation that a template has to render."""
SPECIAL_FORM = re.compile(r"<\|[^<>|\s]+\|>")
"""What special tokens look like in the templates of Llama 3, Qwen, Phi and here."""


class TemplateRefusedError(ValueError):
    """A chat template that conversations cannot be trained with."""


class _GenerationMarks(Extension):
    """`{% generation %} ... {% endgeneration %}`: renders its content between OPEN and CLOSE."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own interface

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        """Parse one block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_enclose"), [], [], body).set_lineno(line)

    def _enclose(self, caller: Any) -> str:
        return OPEN + str(caller()) + CLOSE


def compile_template(text: str) -> jinja2.Template:
    """Compile a template as transformers does.

    Raises:
        jinja2.TemplateError: it is no Jinja.
    """
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationMarks, loopcontrols])
    environment.globals["raise_exception"] = _raise
    environment.filters["tojson"] = _to_json
    return environment.from_string(text)


def render_segments(
    template: jinja2.Template, messages: Sequence[Mapping[str, Any]], prompt: bool = False, **names: Any
) -> list[tuple[str, bool]]:
    """Render a conversation: (text, whether the assistant generates it), in order; no empty ones.

    Args:
        template: of `compile_template`.
        messages: what the template calls `messages`.
        prompt: end with what invites the assistant to speak.
        names: other variables of the template, such as `eos_token`.

    Raises:
        jinja2.TemplateError: the template refuses the messages.
    """
    text = render(template, messages=messages, add_generation_prompt=prompt, **names)
    segments, generated = [], False
    for part in re.split(f"({re.escape(OPEN)}|{re.escape(CLOSE)})", text):
        if part in (OPEN, CLOSE):
            generated = part == OPEN
        elif part:
            segments.append((part, generated))
    return segments


def check_template(text: str, special_tokens: Collection[str], **names: Any) -> None:
    """Render a conversation with a template, and refuse what could not be trained.

    Args:
        text: the template.
        special_tokens: those of the tokenizer.
        names: the variables that the template is rendered with, such as `eos_token`.

    Raises:
        TemplateRefusedError: it does not compile or render, marks no answer, loses a message, invites the assistant in
            another way than it shows its answers, or writes a special token that the tokenizer lacks.
    """
    try:
        template = compile_template(text)
        segments = render_segments(template, PROBE, **names)
        prompt = "".join(part for part, _ in render_segments(template, PROBE[:-1], prompt=True, **names))
    except jinja2.TemplateError as error:
        line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise TemplateRefusedError(f"it cannot be rendered: {line}{error.message}") from error
    except Exception as error:  # Jinja runs arbitrary expressions, which fail with Python's own errors
        raise TemplateRefusedError(f"it cannot be rendered: {type(error).__name__}: {error}") from error
    whole, answers = "".join(part for part, _ in segments), [part for part, generated in segments if generated]
    if len(answers) != 2 or any(message["content"] not in answer for message, answer in zip(
            PROBE[2::2], answers, strict=True)):
        raise TemplateRefusedError("it does not mark what the assistant says: put each answer and the end of its turn "
                                   "between {% generation %} and {% endgeneration %}")
    if lost := [message["role"] for message in PROBE if message["content"] not in whole]:
        raise TemplateRefusedError(f"it leaves out what the {lost[0]} says")
    if not whole.startswith(prompt):
        raise TemplateRefusedError("with add_generation_prompt it ends otherwise than the text in front of an answer "
                                   "begins, so that a model would be asked in another way than it was trained")
    if unknown := sorted(set(SPECIAL_FORM.findall(whole)) - set(special_tokens)):
        raise TemplateRefusedError(f"it writes {', '.join(unknown)}, which the tokenizer has no special token for; add "
                                   "it to tokenizer.special_tokens")


def _to_json(value: Any, indent: int | None = None) -> str:
    """As transformers' filter: Jinja's own escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
