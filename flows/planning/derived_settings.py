"""Settings derived from the `size` or `depth` of a pre-training, for `gristmill
plan`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
class Derived:
    """A key derived from a size.

    Attributes:
        key: key within `pretrain`.
        value: value in effect.
        rule: value given by the rules; differs from `value` if the manifest sets the
            key.
    """

    key: str
    value: float | str
    rule: float | str


def derived_keys(manifest: Manifest) -> dict[str, Any] | None:
    """Return the derived settings: `from`, `parameters` (in the layers), `tokens`,
    `flops`, and `keys`, each with its value and the value of the rules; None if the
    manifest has neither size nor depth.
    """
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
    keys = [
        Derived("model.layers", model.layers, plain.layers),
        Derived("model.width", model.width, plain.width),
        Derived("model.heads", model.heads, plain.heads),
        Derived("global_batch_size", batch, of_shape.global_batch_size),
        Derived("optimizer.kind", section.optimizer.kind, OPTIMIZER),
        Derived("optimizer.learning_rate", rate, of_shape.learning_rate),
        Derived(
            "optimizer.weight_decay",
            section.optimizer.weight_decay,
            of_batch.weight_decay,
        ),
        Derived(
            "schedule.decay_fraction", section.schedule.decay_fraction, DECAY_FRACTION
        ),
        Derived("steps", section.steps, of_batch.steps),
    ]
    return {
        "from": f"depth {section.depth}"
        if section.size is None
        else f"size {section.size}",
        "parameters": of_shape.parameters,
        "tokens": section.steps * batch * length,
        "flops": of_shape.flops,
        "keys": {
            derived.key: {"value": derived.value, "rule": derived.rule}
            for derived in keys
        },
    }


def _value_text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,}"


def in_a_sentence(settings: dict[str, Any]) -> str:
    """Describe the derived settings in a sentence, with the rule's value for each key
    that the manifest sets.
    """
    parts = []
    for key, entry in settings["keys"].items():
        part = f"{key} {_value_text(entry['value'])}"
        if entry["value"] != entry["rule"]:
            part += f" (rule: {_value_text(entry['rule'])})"
        parts.append(part)
    tokens, parameters = settings["tokens"], settings["parameters"]
    return (
        f"{settings['from']}: {', '.join(parts)}; {parameters:,} weights in the "
        f"layers, {tokens:,} tokens, {tokens / parameters:.3g} per weight"
    )
