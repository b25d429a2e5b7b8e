"""What a manifest may say: the schema that every run is validated against before any work.

One YAML file names the sources, how they are prepared and mixed, and what is trained on them. Each section
below is one stage's own configuration: nothing else of the manifest reaches that stage, so that changing a key
changes that stage and those behind it, and nothing more. A section that is absent switches its stage off.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from gristmill.mixtures.prepare import Step
from gristmill.mixtures.section import NAME_PATTERN, Positive, Section
from gristmill.mixtures.sources import Ingest, Source
from gristmill.mixtures.tokens import Mix, Tokenizer
from gristmill.mixtures.training import Dpo, Evaluate, Export, Pretrain, Sft


class Engine(Section):
    """How the work is done; never enters a fingerprint, never changes a result."""

    runner: str = "local"
    """`local`, or the name of any Beam runner."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Beam pipeline options for a runner other than `local`."""
    workers: Positive = 2
    """Parallel Beam workers."""
    ranks: Positive = 1
    """Training processes (torchrun's --nproc-per-node)."""
    checkpoint_every: Positive = 100
    """Training steps between checkpoints."""
    keep_checkpoints: Annotated[int, Field(ge=2)] = 2


class Manifest(Section):
    """A whole run."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    seed: int = 0
    sources: Annotated[dict[str, Source], Field(min_length=1)]
    ingest: Ingest = Ingest()
    prepare: tuple[Step, ...] = ()
    tokenizer: Tokenizer | None = None
    mix: Mix | None = None
    pretrain: Pretrain | None = None
    sft: Sft | None = None
    dpo: Dpo | None = None
    evaluate: Evaluate | None = None
    export: Export | None = None
    engine: Engine = Engine()

    @model_validator(mode="before")
    @classmethod
    def _empty_sections(cls, value: Any) -> Any:
        """`evaluate:` with nothing behind it asks for the defaults, not for switching the stage off."""
        if not isinstance(value, dict):
            return value
        return {key: ({} if item is None and key in ("tokenizer", "evaluate", "export") else item)
                for key, item in value.items()}
