"""The list `prepare`: the stages that judge and edit documents, in the order in which they run."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from gristmill.mixtures.clean import Clean
from gristmill.mixtures.decontaminate import Decontaminate
from gristmill.mixtures.dedup import Dedup
from gristmill.mixtures.dedup_lines import DedupLines
from gristmill.mixtures.dedup_substrings import DedupSubstrings
from gristmill.mixtures.language import LanguageId
from gristmill.mixtures.quality import Quality
from gristmill.mixtures.rules import Filter
from gristmill.mixtures.section import Judging, Section

PREPARE_SECTIONS: dict[str, type[Judging]] = {
    "clean": Clean,
    "filter": Filter,
    "dedup": Dedup,
    "dedup_lines": DedupLines,
    "dedup_substrings": DedupSubstrings,
    "langid": LanguageId,
    "quality": Quality,
    "decontaminate": Decontaminate,
}
PREPARE_STAGES = tuple(PREPARE_SECTIONS)
"""The stages that annotate documents, by the names that `prepare:` uses."""


def take_bare_name(value: Any) -> Any:
    """An entry that is only a name, or has nothing behind it, as one with the defaults."""
    if isinstance(value, str):
        return {value: {}}
    if isinstance(value, dict):
        return {key: ({} if item is None and key in PREPARE_SECTIONS else item) for key, item in value.items()}
    return value


class Step(Section):
    """One entry of `prepare:`: a mapping of one stage name to its configuration."""

    clean: Clean | None = None
    filter: Filter | None = None
    dedup: Dedup | None = None
    dedup_lines: DedupLines | None = None
    dedup_substrings: DedupSubstrings | None = None
    langid: LanguageId | None = None
    quality: Quality | None = None
    decontaminate: Decontaminate | None = None

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: Any) -> Any:
        return take_bare_name(value)

    @model_validator(mode="after")
    def _exactly_one(self) -> Step:
        if len(self.model_fields_set) != 1:
            raise ValueError(f"one stage per entry, one of {', '.join(PREPARE_STAGES)}")
        return self

    @property
    def stage(self) -> str:
        """The stage's name."""
        return next(iter(self.model_fields_set))

    @property
    def config(self) -> Judging:
        """The stage's configuration."""
        config: Judging = getattr(self, self.stage)
        return config
