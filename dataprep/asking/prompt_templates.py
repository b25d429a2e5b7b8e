"""Templates of prompts: Jinja in a sandbox, those that come with gristmill and files of the user's.

A template says what a model is asked; a name that it uses and nobody gives is an error, and so is code that reaches
beyond the values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gristmill.dataprep.asking.prompting import Request, prompt
from gristmill.dataprep.files import as_path
from gristmill.mixtures.yaml_text import did_you_mean, why_unreadable

FOLDER = Path(__file__).parent / "templates"
END = ".j2"


class TemplateProblemError(ValueError):
    """A template cannot be read or filled in."""


@dataclass(frozen=True)
class PromptTemplate:
    """A template and where it is from.

    Attributes:
        place: its file, for messages.
        text: what it says.
    """

    place: str
    text: str

    @property
    def sha256(self) -> str:
        """Of its text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @cached_property
    def _compiled(self) -> Any:
        from jinja2 import StrictUndefined, TemplateSyntaxError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False
        )  # prompts are no pages
        try:
            return environment.from_string(self.text)
        except TemplateSyntaxError as error:
            raise TemplateProblemError(f"{self.place}, line {error.lineno}: {error.message}") from error

    def check(self, known: Collection[str]) -> None:
        """See that it can be filled in with these names.

        Raises:
            TemplateProblemError: it has an error, or uses another name.
        """
        from jinja2 import meta

        names = meta.find_undeclared_variables(self._compiled.environment.parse(self.text))
        unknown = next((name for name in sorted(names) if name not in known), None)
        if unknown is not None:
            raise TemplateProblemError(
                f"{self.place}: there is no {unknown!r}{did_you_mean(unknown, list(known))}; "
                f"templates get {', '.join(known)}"
            )

    def fill(self, values: Mapping[str, Any]) -> str:
        """The prompt.

        Raises:
            TemplateProblemError: it asks for what is not there, or fails.
        """
        try:
            filled: str = self._compiled.render(values)
        except TemplateProblemError:
            raise
        except Exception as error:
            raise TemplateProblemError(f"{self.place}: {type(error).__name__}: {error}") from error
        return filled.strip()

    def request(
        self,
        values: Mapping[str, Any],
        schema: Mapping[str, Any] | None = None,
        number: int = 0,
        about: str | None = None,
    ) -> Request | str:
        """The prompt as a request (see `prompting.Request`), or why it cannot be filled in."""
        try:
            return prompt(self.fill(values), schema, number=number, about=about)
        except TemplateProblemError as error:
            return str(error)


def shipped(name: str) -> PromptTemplate:
    """A template that comes with gristmill."""
    path = FOLDER / f"{name}{END}"
    return PromptTemplate(path.name, path.read_text(encoding="utf-8"))


def read_template(path: str | None, name: str) -> PromptTemplate:
    """The template of a file, or where there is none the one that comes with gristmill under a name.

    Raises:
        TemplateProblemError: the file cannot be read.
    """
    if path is None:
        return shipped(name)
    try:
        return PromptTemplate(Path(path).name, as_path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateProblemError(f"{path}: {why_unreadable(error)}") from error


def read_lines(lines: Sequence[str] | str) -> list[str]:
    """What a manifest lists, or a file has, one a line; blank lines are passed over."""
    if not isinstance(lines, str):
        return list(lines)
    read = as_path(lines).read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in read if line.strip()]
