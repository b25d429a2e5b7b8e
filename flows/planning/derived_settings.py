"""Settings derived from the `size` or `depth` of a pre-training, for `gristmill
plan`.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from gristmill.flows.authoring.manifest_text import flow_text
from gristmill.mixtures.manifest import Manifest

KEYS = (
    "model.layers",
    "model.width",
    "model.heads",
    "model.tied_embeddings",
    "model.init",
    "global_batch_size",
    "optimizer.kind",
    "optimizer.learning_rate",
    "optimizer.embedding_rate_scale",
    "optimizer.weight_decay",
    "schedule.decay_fraction",
    "steps",
)
"""Keys within `pretrain` that a size or depth sets."""


@dataclass(frozen=True)
class DerivedSettings:
    """Settings derived from a size or depth.

    Attributes:
        from_: the size or depth (the key `from` in JSON).
        parameters: number of weights in the layers.
        tokens: training tokens.
        keys: key within `pretrain` -> its value in effect.
    """

    from_: str
    parameters: int
    tokens: int
    keys: dict[str, float | str]


def derived_keys(manifest: Manifest) -> DerivedSettings | None:
    """Return the derived settings; None if the manifest has neither size nor depth."""
    section = manifest.pretrain
    if (
        section is None
        or manifest.mix is None
        or (section.size is None and section.depth is None)
    ):
        return None
    return DerivedSettings(
        f"size {section.size}" if section.size else f"depth {section.depth}",
        section.model.layer_weights,
        section.steps * section.global_batch_size * manifest.mix.sequence_length,
        {key: attrgetter(key)(section) for key in KEYS},
    )


def in_a_sentence(settings: DerivedSettings) -> str:
    """Describe the derived settings in a sentence."""
    values = ", ".join(
        f"{key} {flow_text(value) if isinstance(value, bool | str) else f'{value:,}'}"
        for key, value in settings.keys.items()
    )
    tokens, parameters = settings.tokens, settings.parameters
    return (
        f"{settings.from_}: {values}; {parameters:,} weights in the layers, "
        f"{tokens:,} tokens, {tokens / parameters:.3g} per weight"
    )
