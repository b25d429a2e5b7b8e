"""Derived settings of a pre-training: from a size or a depth follow shape, batch,
learning rate, weight decay and steps.

N is the number of weights in the layers (without embedding and output), D the tokens, C
the training compute in FLOPs, each as its source counts them. docs/size-and-laws.md has
the rules in words.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from gristmill.mixtures.base import RawSection
from gristmill.mixtures.schema.model import Model
from gristmill.mixtures.schema.optimizer import OPTIMIZERS

CHANNELS_PER_LAYER = 64
"""Width / depth (nanochat, scripts/base_train.py: aspect_ratio)."""
HEAD_WIDTH = 64
"""Channels per head (GPT-2 and Llama's small models), the same at every size, as muP
requires.
"""
TOKENS_PER_PARAMETER = 20.0
"""Hoffmann et al. 2022, table 3, to about 1 %: the rule of thumb of their first
approach.
"""
BATCH, BATCH_POWER = 0.2920, 0.3271
RATE, RATE_POWER = 0.3118, -0.1250
"""DeepSeek LLM (Bi et al. 2024, section 3.1, equation 1): batch in tokens and learning
rate, as powers of C.
"""
FITTED_FROM = 1e17
"""Compute above which these two were fitted (section 3.1). Below, half of the batch
learns more here (docs/size-and-laws.md).
"""
OPTIMIZER = "muon"
"""Default of a decoder that predicts the next token, at AdamW's rate (Liu et al. 2025,
"Muon is scalable", section 2.2).
"""
DECAY_FRACTION = 0.6
"""Share of the steps in which the learning rate falls; nanochat's warmdown_ratio is
0.5. Measured in docs/size-and-laws.md.
"""
UNTIED: RawSection = {"tied_embeddings": False, "init": "llama"}
"""Keys of `model` of a decoder that predicts the next token: an output layer of its
own, and embeddings with deviation 1. Measured in docs/size-and-laws.md.
"""
EMBEDDING_RATE_SCALE = 12.0
"""Learning rate of untied embeddings over that of everything else; nanochat's is 15
times Muon's (scripts/base_train.py). Measured in docs/size-and-laws.md.
"""
OTHER_OBJECTIVES = ("masked", "prefix_lm", "span_corruption", "ul2", "blank_infilling")
"""Objectives of `pretrain` with which optimizer and initial weights stay those of the
schema: Muon and the others were not measured for them.
"""
TIMESCALE, TIMESCALE_POWER = 1.084, -0.527
"""Bergsma et al. 2025 ("Power Lines", section 3): AdamW's timescale B / (rate decay D),
as a power of D / N.
"""
MOST_DEPTH = 1000
SIZE_PATTERN = r"^[0-9]+(\.[0-9]+)?[kmb]$"
SHAPE_KEYS = ("preset", "init_from", "use")
"""Keys of `model` that determine a whole shape themselves."""
_UNITS = {"k": 1e3, "m": 1e6, "b": 1e9}


@dataclass(frozen=True)
class Dialled:
    """Settings derived from a size.

    Attributes:
        layers, width, heads: shape of the decoder.
        global_batch_size: rows per step, a power of two.
        learning_rate, weight_decay: to three digits.
        steps: optimizer steps that read the tokens.
    """

    layers: int
    width: int
    heads: int
    global_batch_size: int
    learning_rate: float
    weight_decay: float
    steps: int


def depth_of(size: str) -> int:
    """Return the depth whose number of weights in the layers is nearest to a size, in
    ratio.

    >>> [depth_of(size) for size in ("50k", "1m", "3m", "30m", "125m", "1b")]
    [1, 3, 4, 8, 14, 27]
    """
    num_weights = float(size[:-1]) * _UNITS[size[-1]]
    return min(
        range(1, MOST_DEPTH + 1),
        key=lambda depth: abs(
            math.log(model_of(depth, {}).layer_weights / max(num_weights, 1.0))
        ),
    )


def model_of(depth: int, given: RawSection) -> Model:
    """Return the decoder of a depth; given keys replace derived ones.

    Raises:
        pydantic.ValidationError: the given keys are wrong, or contradict each other.
    """
    width = given.get("width", CHANNELS_PER_LAYER * depth)
    heads = (
        max(1, width // given.get("head_width", HEAD_WIDTH))
        if isinstance(width, int)
        else 1
    )
    return Model.model_validate(
        {"layers": depth, "width": width, "heads": heads, **given}
    )


def dial(
    model: Model,
    tokens_per_parameter: float,
    sequence_length: int,
    batch: int | None = None,
    rate: float | None = None,
) -> Dialled:
    """Derive settings from a shape.

    Args:
        model: the decoder.
        tokens_per_parameter: D / N.
        sequence_length: tokens per row.
        batch: rows per step, if set; steps and decay are derived from it.
        rate: the learning rate, if set; the decay is derived from it.
    """
    attention = model.heads * (model.head_width or model.width // model.heads)
    tokens = tokens_per_parameter * model.layer_weights
    # Non-embedding compute, C (Bi et al. 2024, section 3.2: (6 N + 12 layers width
    # length) D); of experts, N counts only those that process a token.
    flops = (
        6 * model.layer_weights + 12 * model.layers * attention * sequence_length
    ) * tokens
    batch_tokens = BATCH * flops**BATCH_POWER * (0.5 if flops < FITTED_FROM else 1.0)
    rows = batch or 2 ** max(0, round(math.log2(batch_tokens / sequence_length)))
    learning_rate = rate or three_digits(RATE * flops**RATE_POWER)
    steps = max(1, math.ceil(tokens / (rows * sequence_length)))
    timescale = TIMESCALE * tokens_per_parameter**TIMESCALE_POWER
    return Dialled(
        model.layers,
        model.width,
        model.heads,
        rows,
        learning_rate,
        three_digits(1 / (learning_rate * timescale * steps)),
        steps,
    )


def take_dial(section: Any, sequence_length: Any) -> Any:
    """Return a section `pretrain` as written, with settings derived from its `size` or
    `depth` where it has none.

    Mistakes are left for the schema to report, without reporting missing keys as well.
    """
    if not isinstance(section, Mapping) or (
        section.get("size") is None and section.get("depth") is None
    ):
        return section
    size, depth = section.get("size"), section.get("depth")
    batch = section.get("global_batch_size")
    model, optimizer, schedule = (
        {} if section.get(key) is None else section[key]
        for key in ("model", "optimizer", "schedule")
    )
    if (
        not isinstance(model, Mapping)
        or not isinstance(optimizer, Mapping)
        or any(model.get(key) is not None for key in SHAPE_KEYS)
    ):
        return {"steps": 1, **section}
    if type(depth) is not int or not 1 <= depth <= MOST_DEPTH:
        depth = 1
        if isinstance(size, str) and re.match(SIZE_PATTERN, size):
            depth = depth_of(size)
    if all(section.get(key) is None for key in OTHER_OBJECTIVES):
        model, optimizer = next_token_recipe(model, optimizer)
    try:
        derived = dial(
            model_of(depth, model),
            _positive(section.get("tokens_per_parameter")) or TOKENS_PER_PARAMETER,
            int(_positive(sequence_length) or 1),
            int(_positive(batch) or 0),
            _positive(optimizer.get("learning_rate")),
        )
    except (ValidationError, TypeError, ArithmeticError):
        return {"steps": 1, **section}
    facts = OPTIMIZERS.get(str(optimizer.get("kind", "adamw")))
    if facts is not None and facts.adamws_rate and optimizer.get("use") is None:
        optimizer = {
            "learning_rate": derived.learning_rate,
            "weight_decay": derived.weight_decay,
            **optimizer,
        }
    if (
        isinstance(schedule, Mapping)
        and schedule.get("use") is None
        and schedule.get("kind", "wsd") == "wsd"
    ):
        schedule = {"decay_fraction": DECAY_FRACTION, **schedule}
    shape = {key: getattr(derived, key) for key in ("layers", "width", "heads")}
    return {
        **section,
        "model": {**shape, **model},
        "optimizer": optimizer,
        "schedule": schedule,
        "steps": derived.steps if section.get("steps") is None else section["steps"],
        "global_batch_size": derived.global_batch_size if batch is None else batch,
    }


def next_token_recipe(
    model: RawSection, optimizer: RawSection
) -> tuple[RawSection, RawSection]:
    """Return the sections `model` and `optimizer` of a decoder that predicts the next
    token, with the keys that a short training learns most with; given keys stay.
    """
    # muP scales the initial weights of gpt2.
    if model.get("mup_base_width") is None:
        model = {**UNTIED, **model}
    if all(optimizer.get(key) is None for key in ("kind", "use")):
        optimizer = {**optimizer, "kind": OPTIMIZER}
        if model.get("tied_embeddings") is False:
            optimizer = {"embedding_rate_scale": EMBEDDING_RATE_SCALE, **optimizer}
    return model, optimizer


def three_digits(value: float) -> float:
    """Round to three significant digits, so that it reads well and fingerprints do not
    depend on the last bit.
    """
    return float(f"{value:.3g}")


def _positive(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and value > 0 else None
