"""Settings derived from the `size` or `depth` of a pre-training, for `gristmill
plan`.
"""

from __future__ import annotations

from dataclasses import dataclass

from gristmill.mixtures.manifest import Manifest
from gristmill.mixtures.scaling.size_rules import (
    DECAY_FRACTION,
    OPTIMIZER,
    TOKENS_PER_PARAMETER,
    depth_of,
    dial,
    model_of,
)


@dataclass(frozen=True)
class DerivedValue:
    """Value of a key in effect, and the value given by the rules, which differs if the
    manifest sets the key.
    """

    value: float | str
    rule: float | str


@dataclass(frozen=True)
class DerivedSettings:
    """Settings derived from a size or depth.

    Attributes:
        from_: the size or depth (the key `from` in JSON).
        parameters: number of weights in the layers.
        tokens: training tokens.
        flops: of the training.
        keys: key within `pretrain` -> its value.
    """

    from_: str
    parameters: int
    tokens: int
    flops: float
    keys: dict[str, DerivedValue]


def derived_keys(manifest: Manifest) -> DerivedSettings | None:
    """Return the derived settings; None if the manifest has neither size nor depth."""
    section = manifest.pretrain
    if (
        section is None
        or manifest.mix is None
        or (section.size is None and section.depth is None)
    ):
        return None
    ratio = section.tokens_per_parameter or TOKENS_PER_PARAMETER
    length = manifest.mix.sequence_length
    model = section.model
    batch = section.global_batch_size
    rate = section.optimizer.learning_rate
    plain = model_of(section.depth or depth_of(str(section.size)), {})
    of_shape = dial(model, ratio, length)
    of_batch = dial(model, ratio, length, batch, rate)
    optimizer, schedule = section.optimizer, section.schedule
    return DerivedSettings(
        f"size {section.size}" if section.size else f"depth {section.depth}",
        of_shape.parameters,
        section.steps * batch * length,
        of_shape.flops,
        {
            "model.layers": DerivedValue(model.layers, plain.layers),
            "model.width": DerivedValue(model.width, plain.width),
            "model.heads": DerivedValue(model.heads, plain.heads),
            "global_batch_size": DerivedValue(batch, of_shape.global_batch_size),
            "optimizer.kind": DerivedValue(optimizer.kind, OPTIMIZER),
            "optimizer.learning_rate": DerivedValue(rate, of_shape.learning_rate),
            "optimizer.weight_decay": DerivedValue(
                optimizer.weight_decay, of_batch.weight_decay
            ),
            "schedule.decay_fraction": DerivedValue(
                schedule.decay_fraction, DECAY_FRACTION
            ),
            "steps": DerivedValue(section.steps, of_batch.steps),
        },
    )


def _value_text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,}"


def in_a_sentence(settings: DerivedSettings) -> str:
    """Describe the derived settings in a sentence, with the rule's value for each key
    that the manifest sets.
    """
    parts = []
    for key, derived in settings.keys.items():
        part = f"{key} {_value_text(derived.value)}"
        if derived.value != derived.rule:
            part += f" (rule: {_value_text(derived.rule)})"
        parts.append(part)
    tokens, parameters = settings.tokens, settings.parameters
    return (
        f"{settings.from_}: {', '.join(parts)}; {parameters:,} weights in the "
        f"layers, {tokens:,} tokens, {tokens / parameters:.3g} per weight"
    )
