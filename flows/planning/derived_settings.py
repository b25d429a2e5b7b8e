"""Settings derived from the `size` or `depth` of a pre-training, for `gristmill
plan`.
"""

from __future__ import annotations

from dataclasses import dataclass

from gristmill.flows.authoring.manifest_text import flow_text
from gristmill.mixtures.manifest import Manifest


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
    model, batch = section.model, section.global_batch_size
    return DerivedSettings(
        f"size {section.size}" if section.size else f"depth {section.depth}",
        model.layer_weights,
        section.steps * batch * manifest.mix.sequence_length,
        {
            "model.layers": model.layers,
            "model.width": model.width,
            "model.heads": model.heads,
            "model.tied_embeddings": model.tied_embeddings,
            "model.init": model.init,
            "global_batch_size": batch,
            "optimizer.kind": section.optimizer.kind,
            "optimizer.learning_rate": section.optimizer.learning_rate,
            "optimizer.embedding_rate_scale": section.optimizer.embedding_rate_scale,
            "optimizer.weight_decay": section.optimizer.weight_decay,
            "schedule.decay_fraction": section.schedule.decay_fraction,
            "steps": section.steps,
        },
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
