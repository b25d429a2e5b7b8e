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
from contextlib import suppress
from copy import deepcopy
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from typing import Any

import jinja2
import jinja2.nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from gristmill.dataprep.examples.conversations import Message, ToolCall
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
{{- bos_token -}}
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
PROBE_NAME = "probed_tool"
PROBE_ARGUMENTS: dict[str, object] = {"probed": "value"}
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": PROBE_NAME,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"probed": {"type": "string", "description": "A probe."}},
            "required": ["probed"],
        },
    },
}


def call_probe(answers: Sequence[str] = (), reasoning: str = "") -> list[Message]:
    """Conversation with calls of PROBE_TOOL and their answers, if any; ids are nine
    letters or digits, as Mistral's templates require.
    """
    ids = [f"call{number:05d}" for number in range(len(answers) or 1)]
    calls: list[ToolCall] = [
        {
            "id": call_id,
            "type": "function",
            "function": {"name": PROBE_NAME, "arguments": PROBE_ARGUMENTS},
        }
        for call_id in ids
    ]
    replies: list[Message] = [
        {"role": "tool", "name": PROBE_NAME, "tool_call_id": call_id, "content": answer}
        for call_id, answer in zip(ids, answers, strict=False)
    ]
    call: Message = {"role": "assistant", "content": "", "tool_calls": calls}
    if reasoning:
        call["reasoning_content"] = reasoning
    return [{"role": "user", "content": "x"}, call, *replies]


MARKS = re.compile(f"{re.escape(OPEN)}|{re.escape(CLOSE)}")
THINKING, THINKING_END = "<think>", "</think>"
"""Marks of reasoning inside a content or a prompt (DeepSeek-R1, Qwen3)."""
SPECIAL_FORM = re.compile(r"<[|\uff5c][^<>|\uff5c\s]+[|\uff5c]>")
"""Form of special tokens in the templates of Llama 3, Qwen, Phi, DeepSeek and
gristmill.
"""


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
    in `render_rows`.

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
    names = {
        "tools": None,
        "documents": None,
        "add_generation_prompt": prompt,
        **names,
    }
    try:
        return render(template, messages=aliased, **names)
    except TypeError:
        # DeepSeek-V3's template takes the arguments of calls as OpenAI's API has them.
        as_json: list[dict[str, Any]] = deepcopy([{**message} for message in aliased])
        for message in as_json:
            for call in message.get("tool_calls", ()):
                arguments = call["function"]["arguments"]
                call["function"]["arguments"] = json.dumps(
                    arguments, ensure_ascii=False
                )
        return render(template, messages=as_json, **names)


Segment = tuple[str, int]
"""Text, and the number of the assistant's turn that generates it, from 1; 0 for all
other text.
"""


class PromptMismatchError(ValueError):
    """A template that writes an answer behind another text than the prompt for it."""


def render_rows(
    template: jinja2.Template,
    messages: Sequence[ChatMessage],
    prompt: bool = False,
    **names: Any,
) -> list[list[Segment]]:
    """Render a conversation as the model reads and writes it: rows of segments in
    order, none of them empty.

    The assistant generates what its turn adds to the generation prompt, up to the end
    of the turn; marks of the template restrict that to what they enclose. A turn
    continues the row of the turn before it, if the template leaves that row as it is. A
    template that rewrites turns when others follow (Qwen3 drops their reasoning,
    gpt-oss ends them in another way) begins a new row, in which they are context, as
    they are for the model.

    Args:
        template: of `compile_template`.
        messages: the template's `messages`.
        prompt: end with the generation prompt.
        names: other variables of the template, such as `eos_token`.

    Raises:
        PromptMismatchError: an answer does not continue the prompt for it.
        jinja2.TemplateError: the template refuses the messages.
    """
    final = render_text(template, messages, prompt, **names)
    marked = OPEN in final
    rows: list[list[Segment]] = [[]]
    written = ""
    turn = 0
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        turn += 1
        part = messages[: number + 1]
        is_final = len(part) == len(messages) and not prompt
        rendered = final if is_final else render_text(template, part, **names)
        prompt_text, answer = _turn(template, part, rendered, marked, **names)
        if not prompt_text.startswith(written):
            rows.append([])
            written = ""
        rows[-1].append((prompt_text[len(written) :], 0))
        rows[-1] += [(text, turn * generated) for text, generated in answer]
        written = prompt_text + "".join(text for text, _ in answer)
    text = MARKS.sub("", final)
    if text.startswith(written):
        rows[-1].append((text[len(written) :], 0))
    elif prompt or messages[-1]["role"] != "assistant":
        rows.append([(text, 0)])
    return [
        [
            ("".join(text for text, _ in segments), turn)
            for turn, segments in groupby(
                (segment for segment in row if segment[0]), itemgetter(1)
            )
        ]
        for row in rows
    ]


def _turn(
    template: jinja2.Template,
    messages: Sequence[ChatMessage],
    rendered: str,
    marked: bool,
    **names: Any,
) -> tuple[str, list[tuple[str, bool]]]:
    """Prompt for the last message, and this answer as (text, True if it is generated),
    up to the end of the turn.
    """
    *context, message = messages

    def write(messages: Sequence[ChatMessage], prompt: bool = False) -> str:
        return MARKS.sub("", render_text(template, messages, prompt, **names))

    text = MARKS.sub("", rendered)
    prompt_text = write(context, True) if context or not marked else ""
    answered = text.rstrip()
    eos = names.get("eos_token") or ""
    ends_text = eos and context and answered.endswith(eos)
    if ends_text and not prompt_text.startswith(write(context).rstrip()):
        # It ends every text, whoever spoke last, and not the answer (Phi-3).
        answered = answered.removesuffix(eos).rstrip()
    if not marked and not answered.endswith(("|>", "\uff5c>", eos or "|>")):
        rendered = answered = answered + _start_of_next_turn(context, message, write)
    start = len(prompt_text) if text.startswith(prompt_text) else 0
    if not start and any(earlier["role"] == "assistant" for earlier in context):
        # The answer changes the turns before the last message (gpt-oss drops the
        # reasoning of calls), but not this message and the prompt.
        ending = prompt_text.removeprefix(write(context[:-1]))
        if ending != prompt_text and ending in answered:
            start = answered.rindex(ending) + len(ending)
    if start or not prompt_text:
        parts = []
        position = 0
        for number, part in enumerate(MARKS.split(rendered)):
            edges = (max(edge - position, 0) for edge in (start, len(answered)))
            if piece := part[slice(*edges)]:
                parts.append((piece, not marked or number % 2 == 1))
            position += len(part)
        # The marks may leave out reasoning, but not what a model would have to write.
        unmarked = parts[0][0].strip() if parts[1:] and not parts[0][1] else ""
        if not prompt_text or not unmarked or unmarked.endswith(THINKING_END):
            return prompt_text, parts
    opened = prompt_text.rstrip().removesuffix(THINKING)
    if opened == prompt_text.rstrip() or not answered.startswith(opened):
        raise PromptMismatchError(
            f"the prompt for message {len(messages)} ends with {prompt_text[-40:]!r}, "
            "and the template writes the answer behind another text, so that a model "
            "would be asked in another way than it is trained; if one of them opens or "
            "closes reasoning that the other has not, begin the template with "
            "{% set enable_thinking = true %} or false"
        )
    # The prompt opens reasoning that the template drops or leaves out: DeepSeek-R1.
    # Written as by Qwen3's template.
    content = str(message["content"])
    inline = content.rpartition(THINKING_END)[0].strip().removeprefix(THINKING)
    reasoning = str(message.get("reasoning_content") or inline).strip("\n")
    answer = answered[len(opened) :].rpartition(THINKING_END)[2].lstrip("\n")
    return prompt_text, [(f"{reasoning}\n{THINKING_END}\n\n{answer}", True)]


def _start_of_next_turn(
    context: Sequence[ChatMessage],
    message: ChatMessage,
    write: Callable[[Sequence[ChatMessage]], str],
) -> str:
    """Special token that begins the turn after an answer, which thereby ends the answer
    in templates that write no other end (GLM-4.5); "" without one.
    """
    calls = message.get("tool_calls")
    # without the reasoning, which may be dropped once a turn follows
    answer = {"role": "assistant", "content": "x", "tool_calls": calls or []}
    following = {"role": "tool" if calls else "user", "content": "x"}
    with suppress(*TEMPLATE_ERRORS):
        written = write([*context, answer])
        longer = write([*context, answer, following])
        token = SPECIAL_FORM.match(longer, len(written))
        if token and longer.startswith(written):
            return token[0]
    return ""


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


def check_template(
    text: str, special_tokens: Collection[str] | None, **names: Any
) -> None:
    """Render a conversation with a template, and refuse templates that are unusable for
    training.

    Args:
        text: the template.
        special_tokens: those of the tokenizer; None if the template was published with
            it, whose marks may be plain text (OLMo 2).
        names: variables of the template, such as `eos_token`.

    Raises:
        TemplateRefusedError: it does not compile or render, marks no answer, loses a
            message, has a generation prompt that differs from the text before its
            answers, or writes a special token that the tokenizer lacks.
    """
    try:
        messages, rows = probe_rows(compile_template(text), **names)
    except Exception as error:
        # Jinja runs arbitrary expressions, which fail with Python's own errors
        line = f"line {error.lineno}: " if hasattr(error, "lineno") else ""
        raise TemplateRefusedError(
            f"it cannot be rendered: {line}{type(error).__name__}: {error}"
        ) from error
    full_text = "".join(part for row in rows for part, _ in row)
    answers = "".join(part for row in rows for part, turn in row if turn)
    if lost_roles := [
        message["role"]
        for message in messages
        if message["content"]
        not in (answers if message["role"] == "assistant" else full_text)
    ]:
        raise TemplateRefusedError(
            f"it leaves out the text of the {lost_roles[0]}, or does not mark it; an "
            "answer and the end of its turn belong between {% generation %} and "
            "{% endgeneration %}"
        )
    if special_tokens is None:
        return
    if unknown_tokens := sorted(
        set(SPECIAL_FORM.findall(full_text)) - set(special_tokens)
    ):
        raise TemplateRefusedError(
            f"it writes {', '.join(unknown_tokens)}, which the tokenizer has no "
            "special token for; add it to tokenizer.special_tokens"
        )


def probe_rows(
    template: jinja2.Template, **names: Any
) -> tuple[Sequence[Message], list[list[Segment]]]:
    """PROBE, without its system message if the template refuses that (Gemma), and its
    rows.

    Raises:
        jinja2.TemplateError and others of TEMPLATE_ERRORS: it refuses the others, too.
    """
    try:
        return PROBE, render_rows(template, PROBE, **names)
    except jinja2.TemplateError:
        return PROBE[1:], render_rows(template, PROBE[1:], **names)
