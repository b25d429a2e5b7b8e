"""Ollama Modelfile: weights, stop tokens, and the chat template in Go.

Ollama does not run the Jinja of a GGUF file. A template that formats each message
independently of its context is translated to Go (text/template) and compared with the
Jinja on conversations; other templates are omitted.
"""

from __future__ import annotations

import json

from gristmill.dataprep.examples.conversations import Message
from gristmill.tokenize.chat_template import PROBE
from gristmill.train.data.conversation_tokens import Chat, ChatError

CONVERSATIONS = (PROBE, PROBE[:2], PROBE[:4], PROBE[1:], PROBE[1:2], PROBE[1:4])
"""Conversations to derive the parts of a template from, and to compare with."""


def modelfile(
    weights: str, chat: Chat, sequence_length: int, template: str | None
) -> str:
    """Text of a Modelfile.

    Args:
        weights: GGUF file, relative to the Modelfile.
        chat: tokenizer of the model.
        sequence_length: context length in tokens.
        template: chat template in Go (see `go_template`), if any.
    """
    stops = sorted(chat.stops)
    lines = [
        f"FROM ./{weights}",
        f"PARAMETER num_ctx {sequence_length}",
        *(
            "PARAMETER stop "
            f"{json.dumps(chat.decode([stop], special=True), ensure_ascii=False)}"
            for stop in stops
        ),
    ]
    return "\n".join(
        [*lines, *([] if template is None else [f'TEMPLATE """{template}"""']), ""]
    )


def go_template(chat: Chat, added: str = "") -> str | None:
    """Chat template in Go, without the text `added` that llama.cpp puts in front; None
    if there is no equivalent of this form.
    """
    # Each text is the difference that one more message makes; there is no equivalent if
    # a message changes the text before it.
    system, first, answer, second, _ = PROBE
    try:
        one_turn, two_turns, three_turns = (
            chat.text(PROBE[1:end]) for end in (2, 3, 4)
        )
        with_prompt = chat.text(PROBE[1:2], prompt=True)
        with_system = chat.text(PROBE[:2])
        around = {
            "assistant": _around(one_turn, two_turns, answer),
            "user": _around(two_turns, three_turns, second),
        }
        head = one_turn.removesuffix(first["content"].join(around["user"]))
        opening = (
            with_system.removesuffix(one_turn.removeprefix(head))
            .removeprefix(head)
            .partition(system["content"])
        )
        around = {"system": (opening[0], opening[2]), **around}
        tail = with_prompt.removeprefix(one_turn)
        for messages in CONVERSATIONS:
            text = head + "".join(
                message["content"].join(around[message["role"]]) for message in messages
            )
            for end in ("", tail):
                if text + end != chat.text(messages, prompt=bool(end)):
                    return None
    except ChatError:
        return None
    written = (head, tail, *(text for pair in around.values() for text in pair))
    if any("{{" in text or '"""' in text for text in written):
        return None
    branches = "".join(
        f'{{{{ {"if" if number == 0 else "else if"} eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}'
        for number, (role, (before, after)) in enumerate(around.items())
    )
    head = head.removeprefix(added)
    return f"{head}{{{{ range .Messages }}}}{branches}{{{{ end }}}}{{{{ end }}}}{tail}"


def _around(shorter: str, longer: str, message: Message) -> tuple[str, str]:
    """Text before and after the content of a conversation's last message."""
    before, _, after = longer.removeprefix(shorter).partition(message["content"])
    return before, after
