"""How a conversation is written as text: our special tokens and chat template, and the templates of other models.

A template is Jinja as transformers reads it, with marks around what the assistant generates: `{% generation %} ...
{% endgeneration %}` encloses what is trained on (transformers' `return_assistant_tokens_mask`).

A template that somebody else wrote is run with bounds on what it may do, so that it ends. The sandbox of Jinja keeps it
from reading and calling what it must not. It does not keep it from counting to 10^10 in nested loops, or from doubling
a text forty times. Here every turn of a loop, every call and every filter is a step, and nothing may make a text or
list beyond a size.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

import jinja2
import jinja2.nodes
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
END_OF_TURN = "<|end|>"
ROLES = ("system", "user", "assistant")
SPECIAL_TOKENS = (END_OF_TEXT, PAD, *(f"<|{role}|>" for role in ROLES), END_OF_TURN)
"""In the order of their ids, from 0, in a tokenizer that is trained here."""

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
"""Jinja, as transformers renders it: role, line break, content, end of turn, line break. Every line break that counts
is in a string, because transformers' `trim_blocks` eats those of the template. `generation` marks what the assistant
learns: its answer and the end of its turn. Tools are described by the system; calls of them and their answers are
written in Hermes' form (Qwen2.5's template too), an answer as the user's turn."""


OPEN, CLOSE = "\x00<generation>\x00", "\x00</generation>\x00"
"""What the marks render to. Text that holds one of these is refused."""
PROBE = (
    {"role": "system", "content": "Probe of the system."},
    {"role": "user", "content": "First probe of the user."},
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
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationMarks, loopcontrols])
    environment.globals["raise_exception"] = _raise
    environment.filters["tojson"] = _to_json
    return environment.from_string(text)


def render_segments(
    template: jinja2.Template, messages: Sequence[Mapping[str, Any]], prompt: bool = False, **names: Any
) -> list[tuple[str, bool]]:
    """Render a conversation: (text, whether the assistant generates it), in order; no empty ones.

    A template that marks nothing, as most of those that models come with, is asked for every beginning of the
    conversation: what an answer adds to the invitation to speak is what the assistant generates.

    Args:
        template: of `compile_template`.
        messages: what the template calls `messages`.
        prompt: end with what invites the assistant to speak.
        names: other variables of the template, such as `eos_token`.

    Raises:
        jinja2.TemplateError: the template refuses the messages.
    """
    text = render(template, messages=messages, add_generation_prompt=prompt, **names)
    if OPEN not in text:
        text = _marked(template, messages, text, **names)
    segments, generated = [], False
    for part in re.split(f"({re.escape(OPEN)}|{re.escape(CLOSE)})", text):
        if part in (OPEN, CLOSE):
            generated = part == OPEN
        elif part:
            segments.append((part, generated))
    return segments


def _marked(template: jinja2.Template, messages: Sequence[Mapping[str, Any]], text: str, **names: Any) -> str:
    """A rendered conversation with marks around the answers, up to the end of each turn; as it is where a template
    writes the beginning of a conversation otherwise when more follows."""
    marked, at = "", 0
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked = render(template, messages=messages[:number], add_generation_prompt=True, **names)
        answered = render(template, messages=messages[: number + 1], add_generation_prompt=False, **names).rstrip()
        if not (text.startswith(answered) and answered.startswith(asked) and len(asked) >= at):
            return text
        marked += text[at : len(asked)] + OPEN + answered[len(asked) :] + CLOSE
        at = len(answered)
    return marked + text[at:]


def as_plain_jinja(text: str) -> str:
    """A template for renderers that do not know `{% generation %}`: what it encloses is enclosed by `{% if true %}`,
    so that blanks around the marks are trimmed as before."""
    return re.sub(
        r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})",
        lambda found: f"{found[1]}{'endif' if found[2] else 'if true'}{found[3]}",
        text,
    )


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
    refuse_untrainable(
        segments,
        prompt,
        special_tokens,
        "it does not mark what the assistant says, and changes what "
        "stands before an answer when more follows: put each answer and the end of its turn between "
        "{% generation %} and {% endgeneration %}",
    )


def refuse_untrainable(
    segments: Sequence[tuple[str, bool]], prompt: str, special_tokens: Collection[str], unmarked: str
) -> None:
    """Raise TemplateRefusedError where PROBE is written in a way that could not be trained.

    Args:
        segments: PROBE as it is written.
        prompt: what is written of it up to its last answer, to ask for one.
        special_tokens: those of the tokenizer.
        unmarked: what to say where not every answer is marked.
    """
    whole, answers = "".join(part for part, _ in segments), [part for part, generated in segments if generated]
    if len(answers) != 2 or any(
        message["content"] not in answer for message, answer in zip(PROBE[2::2], answers, strict=True)
    ):
        raise TemplateRefusedError(unmarked)
    if lost := [message["role"] for message in PROBE if message["content"] not in whole]:
        raise TemplateRefusedError(f"it leaves out the text of the {lost[0]}")
    if not whole.startswith(prompt):
        raise TemplateRefusedError(
            "with add_generation_prompt it ends otherwise than the text in front of an answer "
            "begins, so that a model would be asked in another way than it was trained"
        )
    if unknown := sorted(set(SPECIAL_FORM.findall(whole)) - set(special_tokens)):
        raise TemplateRefusedError(
            f"it writes {', '.join(unknown)}, which the tokenizer has no special token for; add "
            "it to tokenizer.special_tokens"
        )


def _to_json(value: Any, indent: int | None = None) -> str:
    """As transformers' filter: Jinja's own escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


MOST_STEPS = 200_000
"""Of one rendering, which take a second: a conversation of 1,000 messages takes some ten thousand."""
MOST_CHARACTERS = 1 << 26
"""That an operation may make; of a filter or method, the product of the sizes of what it is given."""
ABSENT_GLOBALS = ("lipsum",)
"""Makes any amount of text."""
_rendering = threading.local()


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox for templates that are not trusted with the machine's time and memory."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters = {name: _bounded(function) for name, function in self.filters.items()}
        self.filters |= {_COUNTED: _counted, _JOINED: _joined}
        for name in ABSENT_GLOBALS:
            self.globals.pop(name, None)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Bounds().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right`, unless the result would be too large."""
        _spend(1)
        if operator == "**":
            _refuse_above(abs(right) if isinstance(right, int | float) else 0, 64, "an exponent")
        if operator == "+" and isinstance(left, Sequence) and isinstance(right, Sequence):
            _refuse_above(len(left) + len(right), MOST_CHARACTERS, "a text or list")
        if operator == "*" or (operator == "%" and isinstance(left, str)):
            _refuse_above(_product((left, right)), MOST_CHARACTERS if _is_sized(left, right) else 1 << 64, "a value")
        if operator == "%" and isinstance(left, str):
            _refuse_widths(left)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **options: Any) -> Any:  # type: ignore[override]
        """Call a function of the template, a macro or a method, unless it would make too much."""
        _spend(1)
        # The sandbox gives its own function for a text's `format`, around the method.
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(owner, str | bytes | list | tuple | dict):
            _refuse_above(_product((owner, *args, *options.values())), MOST_CHARACTERS, "what a method is given")
            if getattr(function, "__name__", "") in ("format", "format_map"):
                _refuse_widths(str(owner))
        return super().call(context, function, *args, **options)


def render(template: jinja2.Template, **names: Any) -> str:
    """Render a template of a BoundedEnvironment.

    Raises:
        jinja2.TemplateError: the template refuses what it is given, or does more than it may.
    """
    _rendering.left = MOST_STEPS
    try:
        return template.render(**names)
    except (RecursionError, OverflowError, MemoryError) as error:
        raise SecurityError(f"the template does more than it may: {type(error).__name__}: {error}") from error
    finally:
        _rendering.left = MOST_STEPS


class _Bounds(NodeTransformer):
    """Counts the turns of loops, and looks at what `~` joins."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        """`{% for x in y %}` goes over `y | counted`."""
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, _COUNTED, [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        """`a ~ b` is `[a, b] | joined`."""
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes, lineno=node.lineno), _JOINED, [], [], None, None, lineno=node.lineno)


_COUNTED, _JOINED = "counted by gristmill", "joined by gristmill"
"""Names that no template can write."""


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _spend(1)
        yield item


def _joined(parts: Sequence[Any]) -> str:
    texts = [str(part) for part in parts]
    _refuse_above(sum(map(len, texts)), MOST_CHARACTERS, "a text")
    return "".join(texts)


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of Jinja's that refuses to make too much."""
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0  # Jinja's own argument

    @wraps(function)
    def bounded(*args: Any, **options: Any) -> Any:
        given = (*args[skipped:], *options.values())
        _refuse_above(_product(given), MOST_CHARACTERS, "what a filter is given")
        _spend(1 + sum(len(one) for one in given if isinstance(one, list | tuple | dict | range)))
        if function.__name__ == "do_format":
            _refuse_widths(str(given[0]))
        return function(*args, **options)

    return bounded


def _product(values: Iterable[Any]) -> int:
    """How much could be made of values: their sizes and numbers multiplied."""
    product = 1
    for value in values:
        size = abs(value) if isinstance(value, int) else len(value) if hasattr(value, "__len__") else 1
        product *= max(size, 1)
    return product


def _is_sized(*values: Any) -> bool:
    return any(isinstance(value, str | bytes | list | tuple) for value in values)


def _refuse_widths(form: str) -> None:
    """Refuse `%999999999d`, which is as long as it says."""
    digits = "".join(letter if letter.isdigit() else " " for letter in form).split()
    _refuse_above(max((len(run) for run in digits), default=0), 5, "a width")


def _refuse_above(size: float, most: int, what: str) -> None:
    if size > most:
        raise SecurityError(f"the template does more than it may: {what} would be larger than {most:,}")


def _spend(steps: int) -> None:
    _rendering.left = getattr(_rendering, "left", MOST_STEPS) - steps
    if _rendering.left < 0:
        raise SecurityError(f"the template does more than it may: it takes over {MOST_STEPS:,} steps")
