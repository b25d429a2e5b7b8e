"""Questions about the standard library and their answers, made from its docstrings: the demo's SFT and DPO examples."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from typing import Any

from gristmill.dataprep.reading.pythondocs import docstrings, module_name, read_code, standard_library_files

QUESTIONS_VERSION = 1
"""Raised when the same docstrings give other examples."""
MIN_ANSWER_CHARACTERS = 20
MAX_ANSWER_CHARACTERS = 400
"""Answers are short, so that they fit into the sequences of tiny models."""
PHRASINGS = (
    "What does the {kind} {name} do?",
    "What is the {kind} {name} for?",
    "Explain the {kind} {name}.",
    "Describe {name}.",
)


def questions() -> list[dict[str, Any]]:
    """SFT examples without ids: a question about a name of the standard library, its docstring's first paragraph."""
    return [{"messages": [_user(question), _assistant(answer)]} for question, answer in _pairs()]


def preferences() -> list[dict[str, Any]]:
    """DPO examples without ids: the rejected answer is the true one to another question."""
    pairs = _pairs()
    answers = sorted({answer for _, answer in pairs})
    if len(answers) < 2:
        return []
    examples = []
    for question, answer in pairs:
        number = _hash("rejected", question) % len(answers)
        rejected = answers[number] if answers[number] != answer else answers[number - 1]
        examples.append(
            {"prompt": [_user(question)], "chosen": [_assistant(answer)], "rejected": [_assistant(rejected)]}
        )
    return examples


def _pairs() -> list[tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for name, kind, text in _public_docstrings():
        answer = " ".join(text.split("\n\n")[0].split())
        if MIN_ANSWER_CHARACTERS <= len(answer) <= MAX_ANSWER_CHARACTERS:
            phrasing = PHRASINGS[_hash("phrasing", name) % len(PHRASINGS)]
            found.setdefault(name, (phrasing.format(kind=kind, name=name), answer))
    return list(found.values())


def _public_docstrings() -> Iterator[tuple[str, str, str]]:
    for relative, path in standard_library_files():
        module = module_name(relative)
        try:
            tree = ast.parse(read_code(path))
        except (SyntaxError, ValueError):  # not Python; reading python-docs:// as a source reports it
            continue
        for name, signature, text in docstrings(module, tree):
            if not any(part.startswith("_") for part in name.split(".")):
                kind = "module" if name == module else "function" if signature else "class"
                yield name, kind, text


def _hash(purpose: str, text: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{purpose}\0{text}".encode(), digest_size=8).digest(), "little")


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}
