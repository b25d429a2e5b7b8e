"""Prompt templates: sandboxed Jinja, shipped with gristmill or in a user's file.

A template may use only the values that it is passed: an undefined name or code that
reaches beyond them is an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gristmill.core.files import as_path
from gristmill.dataprep.llm.prompting import Request, Schema, prompt
from gristmill.mixtures.steps.judge import Question
from gristmill.mixtures.yaml_text import unknown_name, why_unreadable

FOLDER = Path(__file__).parent / "templates"
END = ".j2"


class TemplateProblemError(ValueError):
    """A template cannot be read or filled in."""


@dataclass(frozen=True)
class PromptTemplate:
    """Template and its origin.

    Attributes:
        place: name of its file, for messages.
        text: source of the template.
    """

    place: str
    text: str

    @property
    def sha256(self) -> str:
        """SHA-256 of the text, in hexadecimal."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @cached_property
    def _compiled(self) -> Any:
        from jinja2 import StrictUndefined, TemplateSyntaxError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,
        )  # prompts are not HTML
        try:
            return environment.from_string(self.text)
        except TemplateSyntaxError as error:
            raise TemplateProblemError(
                f"{self.place}, line {error.lineno}: {error.message}"
            ) from error

    def check(self, known: Collection[str]) -> None:
        """Check that the template compiles and uses only known names.

        Raises:
            TemplateProblemError: it has an error, or uses an unknown name.
        """
        from jinja2 import meta

        names = meta.find_undeclared_variables(
            self._compiled.environment.parse(self.text)
        )
        unknown = next((name for name in sorted(names) if name not in known), None)
        if unknown is not None:
            raise TemplateProblemError(
                f"{self.place}: there is no "
                f"{unknown_name(unknown, known, 'templates get')}"
            )

    def fill(self, values: Mapping[str, object]) -> str:
        """Render the template.

        Raises:
            TemplateProblemError: it uses a missing value, or fails.
        """
        try:
            filled: str = self._compiled.render(values)
        except TemplateProblemError:
            raise
        except Exception as error:
            raise TemplateProblemError(
                f"{self.place}: {type(error).__name__}: {error}"
            ) from error
        return filled.strip()

    def request(
        self,
        values: Mapping[str, object],
        schema: Schema | None = None,
        number: int = 0,
        about: str | None = None,
        pattern: str | None = None,
    ) -> Request | str:
        """Render the template as a request (see `prompting.Request`), or return the
        reason that it cannot be rendered.
        """
        try:
            return prompt(
                self.fill(values), schema, number=number, about=about, pattern=pattern
            )
        except TemplateProblemError as error:
            return str(error)


def question_template(question: Question) -> PromptTemplate:
    """Template of a question: its own text, that of its file, or a shipped one.

    Raises:
        TemplateProblemError: the file cannot be read.
    """
    if question.prompt is not None:
        return PromptTemplate("prompt", question.prompt)
    return read_template(question.template, f"judge-{question.rubric}")


def shipped(name: str) -> PromptTemplate:
    """Template that is part of gristmill."""
    path = FOLDER / f"{name}{END}"
    return PromptTemplate(path.name, path.read_text(encoding="utf-8"))


def read_template(path: str | None, name: str) -> PromptTemplate:
    """Template of a file, or the shipped template of that name if `path` is None.

    Raises:
        TemplateProblemError: the file cannot be read.
    """
    if path is None:
        return shipped(name)
    try:
        return PromptTemplate(
            Path(path).name, as_path(path).read_text(encoding="utf-8")
        )
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateProblemError(f"{path}: {why_unreadable(error)}") from error


def read_lines(lines: Sequence[str] | str) -> list[str]:
    """Entries of a list in the manifest, or lines of a file without blank lines."""
    if not isinstance(lines, str):
        return list(lines)
    read = as_path(lines).read_text(encoding="utf-8").split("\n")
    return [line.strip() for line in read if line.strip()]
