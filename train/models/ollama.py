"""A Modelfile for Ollama: where the weights are, what ends an answer, and conversations as a template of Go.

Ollama does not run the Jinja of a GGUF file. A template whose every message is written alike, whatever stands around
it, is said again in Go (text/template), and compared with the Jinja on conversations; of any other nothing is said.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from gristmill.tokenize.encoding.chat_templates import PROBE
from gristmill.train.data.conversation_tokens import Chat, ChatError

CONVERSATIONS = (PROBE, PROBE[:2], PROBE[:4], PROBE[1:], PROBE[1:2], PROBE[1:4])
"""What the parts of a template are found in, and compared with."""


def modelfile(weights: str, chat: Chat, sequence_length: int, template: str | None) -> str:
    """The text of a Modelfile.

    Args:
        weights: the GGUF file, relative to the Modelfile.
        chat: the tokenizer of the model.
        sequence_length: tokens that the model reads.
        template: its chat template in Go (see `go_template`), if there is one.
    """
    stops = sorted(chat.stops)
    lines = [
        f"FROM ./{weights}",
        f"PARAMETER num_ctx {sequence_length}",
        *(f"PARAMETER stop {json.dumps(chat.decode([stop], special=True), ensure_ascii=False)}" for stop in stops),
    ]
    return "\n".join([*lines, *([] if template is None else [f'TEMPLATE """{template}"""']), ""])


def go_template(chat: Chat) -> str | None:
    """The chat template in Go; None where it has no equal of this form."""
    parts = _parts(chat)
    if parts is None:
        return None
    head, tail, around = parts
    written = (head, tail, *(text for pair in around.values() for text in pair))
    if any("{{" in text or '"""' in text for text in written):
        return None
    branches = "".join(
        f'{{{{ {"if" if number == 0 else "else if"} eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}'
        for number, (role, (before, after)) in enumerate(around.items())
    )
    return f"{head}{{{{ range .Messages }}}}{branches}{{{{ end }}}}{{{{ end }}}}{tail}"


def _parts(chat: Chat) -> tuple[str, str, Mapping[str, tuple[str, str]]] | None:
    """What stands before a conversation, what invites an answer, and what stands around each role's words.

    Each is what one more message adds to a conversation; None where messages change what stands before them.
    """
    system, first, answer, second, _ = PROBE
    try:
        asked, answered, twice = (_text(chat, PROBE[1:end]) for end in (2, 3, 4))
        invited, told = _text(chat, PROBE[1:2], prompt=True), _text(chat, PROBE[:2])
        around = {"assistant": _around(asked, answered, answer), "user": _around(answered, twice, second)}
        head = asked.removesuffix(first["content"].join(around["user"]))
        opening = told.removesuffix(asked.removeprefix(head)).removeprefix(head).partition(system["content"])
        around = {"system": (opening[0], opening[2]), **around}
        tail = invited.removeprefix(asked)
        if any(
            _filled(head, around, messages) + end != _text(chat, messages, prompt=bool(end))
            for messages in CONVERSATIONS
            for end in ("", tail)
        ):
            return None
    except ChatError:
        return None
    return head, tail, around


def _around(shorter: str, longer: str, message: Mapping[str, str]) -> tuple[str, str]:
    """What stands before and after the words of a conversation's last message."""
    before, _, after = longer.removeprefix(shorter).partition(message["content"])
    return before, after


def _filled(head: str, around: Mapping[str, tuple[str, str]], messages: Sequence[Mapping[str, str]]) -> str:
    return head + "".join(message["content"].join(around[message["role"]]) for message in messages)


def _text(chat: Chat, messages: Sequence[Mapping[str, str]], prompt: bool = False) -> str:
    return "".join(text for text, _ in chat.segments(messages, prompt))
