"""What followed from the size or depth of a pre-training, for `gristmill plan`."""

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
    """A key that follows from a size.

    Attributes:
        key: inside of `pretrain`.
        value: what it is.
        rule: what the rules give; another one than `value` where the manifest says that itself.
    """

    key: str
    value: float | str
    rule: float | str


def derived_keys(manifest: Manifest) -> dict[str, Any] | None:
    """What followed: `from`, `parameters` (in the layers), `tokens`, `flops`, and `keys`, each with its value and what
    the rules give; None where there is neither size nor depth."""
    section = manifest.pretrain
    if section is None or manifest.mix is None or (section.size is None and section.depth is None):
        return None
    ratio, length = section.tokens_per_parameter or TOKENS_PER_PARAMETER, manifest.mix.sequence_length
    model, rate, batch = section.model, section.optimizer.learning_rate, section.global_batch_size
    plain = model_of(section.depth or depth_of(str(section.size)), {})
    of_shape, of_batch = dial(model, ratio, length), dial(model, ratio, length, batch, rate)
    keys = [
        Derived("model.layers", model.layers, plain.layers),
        Derived("model.width", model.width, plain.width),
        Derived("model.heads", model.heads, plain.heads),
        Derived("global_batch_size", batch, of_shape.global_batch_size),
        Derived("optimizer.kind", section.optimizer.kind, OPTIMIZER),
        Derived("optimizer.learning_rate", rate, of_shape.learning_rate),
        Derived("optimizer.weight_decay", section.optimizer.weight_decay, of_batch.weight_decay),
        Derived("schedule.decay_fraction", section.schedule.decay_fraction, DECAY_FRACTION),
        Derived("steps", section.steps, of_batch.steps),
    ]
    return {
        "from": f"depth {section.depth}" if section.size is None else f"size {section.size}",
        "parameters": of_shape.parameters,
        "tokens": section.steps * batch * length,
        "flops": of_shape.flops,
        "keys": {one.key: {"value": one.value, "rule": one.rule} for one in keys},
    }


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,}"


def in_a_sentence(found: dict[str, Any]) -> str:
    """What followed, and beside what the manifest says itself what the rules give."""
    keys = ", ".join(
        f"{key} {_shown(one['value'])}" + ("" if one["value"] == one["rule"] else f" (rule: {_shown(one['rule'])})")
        for key, one in found["keys"].items()
    )
    return (
        f"{found['from']}: {keys}; {found['parameters']:,} weights in the layers, "
        f"{found['tokens']:,} tokens, {found['tokens'] / found['parameters']:.3g} per weight"
    )
